"""NorMuonAndAdam computes the formulas of NorMuon and Adam with its table's numbers, on any number of ranks."""

import math
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import train_gpt
from common import U16, U32, U64, add_gradients, normal, short_schedule, tiny_gpt, unequal
from train_gpt import (
    PARAM_TABLE, SCATTER_ORDER, WORK_ORDER, Adam, NorMuon, NorMuonAndAdam, ParamConfig, TrainingManager, join_mantissa,
    normuon_scale, normuon_update, polar_express, split_mantissa,
)  # fmt: skip

F64 = torch.float64

# Polar Express


def quintics(s):
    """What all steps make of a singular value."""
    for a, b, c in train_gpt.POLAR_EXPRESS_COEFFICIENTS:
        s = a * s + b * s**3 + c * s**5
    return s


def matrix_of(singular_values: Tensor, rows: int, cols: int, name: str) -> tuple[Tensor, Tensor, Tensor]:
    """(U, V, U diag(s) Vᵀ), fp64, U (rows, n), V (cols, n)."""
    n = len(singular_values)
    U, V = (torch.linalg.qr(normal(name + side, (size, n)).double())[0] for side, size in (("U", rows), ("V", cols)))
    return U, V, U * singular_values @ V.T


SPECTRA = {
    "even": torch.ones(12, dtype=F64),
    "conditioned": torch.logspace(0, -2, 12, dtype=F64),
    "steep": torch.logspace(3, -3, 12, dtype=F64),
    "deficient": torch.cat((torch.linspace(2, 1, 8, dtype=F64), torch.zeros(4, dtype=F64))),
}


@pytest.mark.parametrize("spectrum", SPECTRA)
@pytest.mark.parametrize("rows, cols", [(12, 12), (40, 12), (12, 40)])
def test_polar_express_maps_each_singular_value_by_five_quintics(rows: int, cols: int, spectrum: str) -> None:
    s = SPECTRA[spectrum]
    U, V, X = matrix_of(s, rows, cols, f"{spectrum}{rows}{cols}")
    found = polar_express(torch.stack((X, 1e-3 * X)))
    for scale, result in zip((1.0, 1e-3), found):
        t = quintics(scale * s / (scale * s.norm() * 1.02 + 1e-6))
        # fp64 rounding of X, some n·2⁻⁵³, grows with the quintics' slopes at zero, 8.2 · 4 · 3.9 · 3.3 · 2.3 = 980
        assert (result - U * t @ V.T).abs().max() <= 1000 * 12 * U64


@pytest.mark.parametrize("rows, cols", [(32, 32), (96, 32), (32, 96)])
def test_polar_express_in_bf16_ends_in_the_quintics_band(rows: int, cols: int) -> None:
    """Conditioning up to 100, so that normalised singular values are at least 0.004.

    Allowance: rounding an m × n matrix, m ≥ n, of nearly orthonormal columns changes singular values by 2u/√3, u = 2⁻⁸, and
    a Gram matrix or a quintic's B, near b + c, by some u to 3u: six units a step. The last quintics' slope near 1 is
    about −0.7: earlier ones count 6u · (1 + 0.7 + 0.5 + …) = 20u. The input's rounding, 2√32/32·u/√3, widens the range.
    """
    s = torch.logspace(0, -2, 32, dtype=F64)
    smallest = (s.min() / (s.norm() * 1.02)).item() - 2 / math.sqrt(32 * 3) * U16
    band = quintics(torch.linspace(smallest, 1 / 1.02, 100_000, dtype=F64))
    X = matrix_of(s, rows, cols, f"bf16{rows}{cols}")[2].float()
    result = polar_express(X[None])
    assert result.dtype == torch.bfloat16
    found = torch.linalg.svdvals(result[0].double())
    assert band.min() - 20 * U16 <= found.min() and found.max() <= band.max() + 20 * U16


def test_singular_values_above_0_2_percent_of_the_norm_end_near_one() -> None:
    """So the docstring says. Of a random square matrix some are smaller, and end well below 1."""
    tall, square = (polar_express(normal(name, (1, rows, 256)).double()) for name, rows in (("tall", 1024), ("square", 256)))
    share = torch.linspace(2e-3, 1, 100_000, dtype=F64)
    for ended in quintics(share / 1.02), torch.linalg.svdvals(tall):
        assert 0.85 < ended.min() and ended.max() < 1.15
    assert torch.linalg.svdvals(square).min() < 0.5


def test_polar_express_is_the_same_for_a_transposed_matrix() -> None:
    X = normal("X", (2, 24, 8)).double()
    assert (polar_express(X.mT.contiguous()) - polar_express(X).mT).abs().max() <= 1000 * 8 * U64


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, F64])
@pytest.mark.parametrize("shape", [(2, 8, 8), (2, 16, 8), (2, 8, 16)])
def test_polar_express_of_zero_is_zero(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    G = torch.zeros(shape, dtype=dtype)
    G[1] = normal("G", shape[1:])
    result = polar_express(G)
    assert (result[0] == 0).all() and result[1].isfinite().all() and result[1].abs().sum() > 0
    assert result.dtype == (F64 if dtype == F64 else torch.bfloat16)


# NorMuon's variance reduction


@pytest.mark.parametrize(
    "shape, moment",
    [((3, 12, 12), (3, 12, 1)), ((3, 20, 8), (3, 20, 1)), ((3, 8, 20), (3, 1, 20))],
    ids=["square", "tall", "wide"],
)
def test_normuon_evens_rows_and_keeps_the_norm(shape: tuple, moment: tuple) -> None:
    """Rows, or columns of a wide matrix: at first the moment is theirs alone, and all come out at one root mean square."""
    u = (normal("u", shape) * torch.exp(normal("spread", moment))).double()
    second_moment = torch.zeros(moment, dtype=F64)
    scaled = normuon_scale(u, second_moment, 0.95)
    along = -1 if moment[-1] == 1 else -2
    assert torch.allclose(second_moment, 0.05 * u.square().mean(along, keepdim=True), rtol=1e-14)
    rms = scaled.square().mean(along, keepdim=True).sqrt()
    assert torch.allclose(rms, rms.mean((-2, -1), keepdim=True).expand_as(rms), rtol=1e-13)
    assert torch.allclose(scaled.norm(dim=(-2, -1)), u.norm(dim=(-2, -1)), rtol=1e-13)
    assert torch.allclose(scaled / u, (scaled / u).mean(along, keepdim=True).expand_as(u), rtol=1e-12)  # a factor a row


def test_normuon_of_zero_is_zero() -> None:
    scaled = normuon_scale(torch.zeros(2, 4, 4), torch.zeros(2, 4, 1), 0.95)
    assert (scaled == 0).all()


# 16 + 16 bits


SPREAD = torch.tensor(
    [0, 1, 2, 0x7F, 0x80, 0xFF, 0x100, 0x1234, 0x7FFE, 0x7FFF, 0x8000, 0x8001, 0xABCD, 0xFF00, 0xFFFE, 0xFFFF]
)
EVERY = torch.arange(65536)
# Among uppers: signed zeros, infinities, quiet and signalling NaNs, subnormals, the largest numbers.
UPPER_SPREAD = torch.tensor(
    [0x0000, 0x8000, 0x7F80, 0xFF80, 0x7FC0, 0xFFC1, 0x7F81, 0x0001, 0x807F, 0x7F7F, 0xFF7F, 0x3F80, 0xBF81, 0x0080]
)


@pytest.mark.parametrize(
    "uppers, lowers", [(EVERY, SPREAD), (UPPER_SPREAD, EVERY)], ids=["every upper half", "every lower half"]
)
def test_mantissa_joins_and_splits_every_pattern(uppers: Tensor, lowers: Tensor) -> None:
    uppers, lowers = (x.flatten() for x in torch.meshgrid(uppers, lowers, indexing="ij"))
    p, mantissa = uppers.to(torch.uint16).view(torch.bfloat16), lowers.to(torch.uint16)
    joined = join_mantissa(p, mantissa)
    assert joined.dtype == torch.float32
    assert torch.equal(joined.view(torch.int32).long() & 0xFFFFFFFF, uppers * 65536 + lowers)
    upper, lower = split_mantissa(joined)
    assert upper.dtype == torch.bfloat16 and lower.dtype == torch.uint16
    assert torch.equal(upper.view(torch.int16), p.view(torch.int16)) and torch.equal(lower.int(), mantissa.int())


def test_bank_in_two_halves_moves_exactly_as_one_in_fp32() -> None:
    """Bit for bit, over updates far below bf16's resolution, and the bf16 half is the top of the fp32 number."""
    start = normal("p", (3, 16, 8)).bfloat16()
    halves, mantissa, whole = start.clone(), torch.zeros(start.shape, dtype=torch.uint16), start.float()
    states = [(torch.zeros(start.shape), torch.zeros(3, 16, 1)) for _ in range(2)]
    scalar = lambda x: torch.tensor(x, dtype=F64)  # noqa: E731
    rates = torch.ones(3, 1, 1), scalar(1e-4), scalar(1.2), scalar(0.9), 0.95, scalar(1.0)
    for step in range(20):
        grad = normal(f"g{step}", tuple(start.shape))
        normuon_update(halves, mantissa, grad, *states[0], *rates)
        normuon_update(whole, None, grad, *states[1], *rates)
        assert torch.equal(join_mantissa(halves, mantissa), whole)
        assert torch.equal(halves.view(torch.int16).int(), whole.view(torch.int32) >> 16)
    assert not torch.equal(whole, start.float())


# Updates against formulas


def alone(label: str, param: Tensor, config: ParamConfig) -> tuple[nn.Parameter, NorMuonAndAdam]:
    """An optimizer of one parameter."""
    p = nn.Parameter(param.clone())
    return p, NorMuonAndAdam([(label, p)], {label: config}, [label], [label])


def adam_reference(p: np.ndarray, g: np.ndarray, m: np.ndarray, v: np.ndarray, t: int, config: Adam, lr_mul: float) -> tuple:
    """(p, m, v) after step t, by the formula, fp64."""
    beta1, beta2 = config.betas
    lr = config.lr * config.lr_mul * lr_mul
    m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g * g
    s = lr * math.sqrt(1 - beta2**t) / (1 - beta1**t)
    u = s * m / (np.sqrt(v) + config.eps)
    u = np.where(u * p > 0, u + lr * lr * config.weight_decay * config.wd_mul * p, u)
    return p - u, m, v


ADAM_LABELS = [label for label, row in PARAM_TABLE.items() if isinstance(row, Adam)]


@pytest.mark.parametrize("label", ADAM_LABELS)
@pytest.mark.parametrize("dtype, unit", [(torch.bfloat16, U16), (torch.float32, U32), (F64, U64)], ids=["bf16", "fp32", "fp64"])
def test_adam_follows_its_formula(label: str, dtype: torch.dtype, unit: float) -> None:
    """Step by step from the parameter as stored: computed in fp32 (fp64), rounded to its dtype once."""
    config = replace(PARAM_TABLE[label], tied_to="")
    p, optimizer = alone("it", normal("p", (30, 7)).to(dtype), config)
    m = v = np.zeros((30, 7))
    for t in range(1, 5):
        g = normal(f"g{t}", (30, 7)).to(dtype)
        p.grad = g.clone()
        optimizer.lr_mul, optimizer.grad_divisor = 1.5 / t, 4
        before = p.detach().double().numpy()
        expected, m, v = adam_reference(before, g.double().numpy() / 4, m, v, t, config, 1.5 / t)
        optimizer.step(True)
        # one rounding of the result, and about a dozen units (fp32's, or fp64's) of the parameter and of the update
        compute = min(unit, U32)
        bound = unit * np.abs(expected) + 20 * compute * (np.abs(before) + np.abs(expected - before) + np.abs(expected))
        assert (np.abs(p.detach().double().numpy() - expected) <= bound).all()
        assert p.grad is None
    state = optimizer.state["it"]
    assert state["step"] == 4 and state["exp_avg"].dtype == state["exp_avg_sq"].dtype == (
        F64 if dtype == F64 else torch.float32
    )


def test_adam_decays_only_where_update_and_weight_agree() -> None:
    """A huge decay: weights that the gradient shrinks anyway shrink further, the others move by the plain step."""
    config = Adam("replicated", lr=0.008, weight_decay=0.005, wd_mul=1e5)
    p, optimizer = alone("w", torch.tensor([2.0, 2.0, -2.0, -2.0], dtype=F64), config)
    p.grad = torch.tensor([1.0, -1.0, 1.0, -1.0], dtype=F64)
    optimizer.step(True)
    decay = 0.008**2 * 0.005 * 1e5 * 2
    assert p.tolist() == pytest.approx([2 - 0.008 - decay, 2 + 0.008, -2 - 0.008, -2 + 0.008 + decay], rel=1e-8)


def polar_reference(X: np.ndarray) -> np.ndarray:
    """By the singular values."""
    U, s, Vt = np.linalg.svd(X, full_matrices=False)
    return U * quintics(s / (np.linalg.norm(X) * 1.02 + 1e-6)) @ Vt


def normuon_reference(
    p: np.ndarray, g: np.ndarray, m: np.ndarray, v: np.ndarray, config: NorMuon, lr: float, factor: float, momentum: float
) -> tuple:
    """(p, m, v) of one matrix after a step, by the formulas, fp64; v (rows,), or (cols,) for a wide matrix."""
    rows, cols = p.shape
    m = momentum * m + (1 - momentum) * g
    u = polar_reference((1 - momentum) * g + momentum * m)
    axis = 1 if rows >= cols else 0
    v = config.beta2 * v + (1 - config.beta2) * (u**2).mean(axis)
    scaled = u * np.expand_dims(1 / np.sqrt(np.maximum(v, 1e-10)), axis)
    scaled *= np.linalg.norm(u) / np.linalg.norm(scaled)
    lr_eff = lr * factor * math.sqrt(max(1, rows / cols))
    return p - lr_eff * scaled - config.weight_decay * config.wd_mul * lr * lr_eff * p * (scaled * p >= 0), m, v


BANKS = {
    # label: (shape, its matrices in order)
    "attn": ((2, 64, 16), (8, 16, 16)),
    "mlp": ((3, 2, 64, 16), (6, 64, 16)),
    "wide": ((3, 8, 24), (3, 8, 24)),
}


@pytest.mark.parametrize("label", BANKS)
def test_normuon_follows_its_formula(label: str) -> None:
    """Four steps in fp64; a row's multipliers in turn, tall matrices at √(rows/cols), wide ones evened by column."""
    shape, matrices = BANKS[label]
    config = PARAM_TABLE.get(label, NorMuon())
    p, optimizer = alone(label, normal("p" + label, shape).double(), config)
    expected = list(p.detach().numpy().reshape(matrices).copy())
    n, rows, cols = matrices
    m, v = [np.zeros((rows, cols))] * n, [np.zeros(max(rows, cols))] * n
    for step in range(4):
        g = normal(f"g{label}{step}", shape).double()
        optimizer.lr_mul, optimizer.momentum, optimizer.grad_divisor = 1.5 - 0.3 * step, 0.85 + 0.03 * step, 8
        p.grad = g.clone()
        optimizer.step(False)
        for i, g_i in enumerate(g.numpy().reshape(matrices) / 8):
            lr, factor = config.lr * optimizer.lr_mul, config.lr_mul[i % len(config.lr_mul)]
            expected[i], m[i], v[i] = normuon_reference(expected[i], g_i, m[i], v[i], config, lr, factor, optimizer.momentum)
        # As for Polar Express: 1000 · n · 2⁻⁵³, at a rate of 0.15 at most, over four steps
        assert np.abs(p.detach().numpy().reshape(matrices) - expected).max() <= 4 * 1000 * 64 * U64
        assert p.grad is None


def test_normuon_decays_where_update_and_weight_agree_or_vanish() -> None:
    """[u·p ≥ 0]: with no gradient at all, every weight decays by wd·lr·lr_eff."""
    config = NorMuon(lr=0.02, weight_decay=1.5)
    p, optimizer = alone("square", normal("p", (1, 16, 16)).double(), config)
    before = p.detach().clone()
    p.grad = torch.zeros_like(p)
    optimizer.step(False)
    assert torch.allclose(p.detach(), before * (1 - 1.5 * 0.02**2), rtol=1e-14, atol=0)


# The step

EVERY_STEP = [label for label, row in PARAM_TABLE.items() if row.every_step]
ODD_STEPS = [label for label, row in PARAM_TABLE.items() if not row.every_step]


def h(**changes: int):
    return short_schedule(**(dict(num_scheduled_iterations=4, micro_batches=4) | changes))


def test_even_steps_move_banks_alone_and_keep_the_other_gradients() -> None:
    model = tiny_gpt()
    manager = TrainingManager(model, h())
    before = {label: param.detach().clone() for label, param in model.named_parameters()}
    add_gradients(model, 0)
    kept = {label: param.grad.clone() for label, param in model.named_parameters()}
    manager.step_optimizers(0)
    for label, param in model.named_parameters():
        bank = label in EVERY_STEP
        assert torch.equal(param, before[label]) != bank, label
        assert param.grad is None if bank else torch.equal(param.grad, kept[label]), label
    add_gradients(model, 1)
    manager.step_optimizers(1)
    for label, param in model.named_parameters():
        assert not torch.equal(param, before[label]) and param.grad is None, label


def test_adam_steps_on_the_gradients_of_two_steps() -> None:
    """Steps 0 and 1 with g0 and g1 end where step 1 alone with g0 + g1 does."""
    both, once = tiny_gpt(F64), tiny_gpt(F64)
    managers = TrainingManager(both, h()), TrainingManager(once, h())
    for step in range(2):
        add_gradients(both, step)
        add_gradients(once, step)
        managers[0].step_optimizers(step)
    managers[1].step_optimizers(1)
    for (label, a), b in zip(both.named_parameters(), once.parameters()):
        assert torch.equal(a, b) == (label in ODD_STEPS), label


def test_gradient_is_divided_by_micro_batches_after_the_backward_pass() -> None:
    model = tiny_gpt(F64)
    manager = TrainingManager(model, h(micro_batches=4))
    add_gradients(model, 1, range(4))
    total = model.value_embeds.grad.clone()
    manager.step_optimizers(1)
    expected = (1 - PARAM_TABLE["value_embeds"].betas[0]) * total / 4
    assert torch.allclose(manager.optimizer.state["value_embeds"]["exp_avg"], expected, rtol=1e-14, atol=0)


@pytest.mark.parametrize("label", ["attn", "mlp", "bigram_embed", "lm_head", "embed", "scalars"])
def test_missing_gradient_is_named(label: str) -> None:
    model = tiny_gpt()
    manager = TrainingManager(model, h())
    add_gradients(model, 1)
    getattr(model, label).grad = None
    with pytest.raises(RuntimeError, match=rf"\b{label}\b"):
        manager.step_optimizers(1)


ORDER_FAULTS = {
    "missing": (lambda order: [x for x in order if x != "bigram_embed"], "missing.*bigram_embed"),
    "twice": (lambda order: [*order, "skip_gate"], "twice.*skip_gate"),
    "unknown": (lambda order: [*order, "ve0"], "unknown.*ve0"),
    "renamed": (lambda order: ["head" if x == "lm_head" else x for x in order], "missing.*lm_head.*unknown.*head"),
}


@pytest.mark.parametrize("which", ["scatter_order", "work_order"])
@pytest.mark.parametrize("fault", ORDER_FAULTS)
def test_order_that_does_not_name_every_parameter_once_is_refused(which: str, fault: str) -> None:
    change, message = ORDER_FAULTS[fault]
    orders = {"scatter_order": SCATTER_ORDER, "work_order": WORK_ORDER}
    orders[which] = change(orders[which])
    with pytest.raises(ValueError, match=f"{which}.*{message}"):
        NorMuonAndAdam(tiny_gpt().named_parameters(), PARAM_TABLE, **orders)


def test_any_permutation_is_an_order() -> None:
    """And gives the same bits: an order is when, not what."""
    orders = (SCATTER_ORDER, WORK_ORDER), (tuple(reversed(SCATTER_ORDER)), tuple(reversed(SCATTER_ORDER)))
    models = [tiny_gpt(), tiny_gpt()]
    for model, order in zip(models, orders):
        add_gradients(model, 1)
        NorMuonAndAdam(model.named_parameters(), PARAM_TABLE, *order).step(True)
    assert unequal(*(dict(model.named_parameters()) for model in models)) == []


def test_table_without_a_parameter_is_refused() -> None:
    table = {label: config for label, config in PARAM_TABLE.items() if label != "bigram_embed"}
    with pytest.raises(ValueError, match="missing.*bigram_embed"):
        NorMuonAndAdam(tiny_gpt().named_parameters(), table, SCATTER_ORDER, WORK_ORDER)


@pytest.mark.parametrize("shape", [(8, 0), ()])
def test_a_parameter_without_rows_is_named(shape: tuple[int, ...]) -> None:
    """As of value embeddings that no layer has any more, or an idea's number."""
    params, table = [("value_embeds", nn.Parameter(torch.zeros(shape)))], {"value_embeds": PARAM_TABLE["value_embeds"]}
    with pytest.raises(ValueError, match="^value_embeds is empty or 0-dim: give it rows$"):
        NorMuonAndAdam(params, table, table, table)


@pytest.mark.parametrize("scale", [torch.zeros(()), torch.zeros(1, 8), [0], (1, 2), [torch.zeros(4)], "x", Fraction(1, 3)])
def test_state_without_a_row_for_each_of_the_parameters_is_refused(scale: object) -> None:
    """A checkpoint joins the ranks' rows: one of such a state would be refused when it is needed. What a list counts in the
    warm-up would stay."""

    class OneForAll(ParamConfig):
        def initial_state(self, rows: Tensor) -> dict[str, Tensor | int]:
            return {"step": 0, "exp_avg": torch.zeros_like(rows), "scale": scale}

    params, table = [("gate", nn.Parameter(torch.zeros(4, 8)))], {"gate": OneForAll("replicated", lr=1)}
    with pytest.raises(ValueError, match=r"^gate: initial_state's scale: must be finite numbers, or tensors of the rows, 4$"):
        NorMuonAndAdam(params, table, table, table)


@pytest.mark.parametrize(
    "name, value, fault",
    [
        ("late", torch.zeros(1), "late is unknown"),  # as torch.optim makes it
        ("step", True, "step is bool, here float"),
        ("exp_avg", torch.zeros(2), r"exp_avg is \(2,\) float32, here \(.*\) float32"),
    ],
)
def test_state_that_an_update_makes_or_changes_is_refused_after_the_warm_up(name: str, value: object, fault: str) -> None:
    """No checkpoint that holds it could be resumed."""
    optimizer = NorMuonAndAdam(tiny_gpt().named_parameters(), PARAM_TABLE, SCATTER_ORDER, WORK_ORDER)
    before = {label: dict(state) for label, state in optimizer.state.items()}
    optimizer.state["embed"][name] = value
    with pytest.raises(ValueError, match=f"^state.embed.{fault}: updates must keep initial_state's names, types and shapes, for"):
        optimizer.load_state(before)


def test_tie_to_no_parameter_is_refused() -> None:
    table = PARAM_TABLE | {"embed": replace(PARAM_TABLE["embed"], tied_to="head")}
    with pytest.raises(ValueError, match="embed is tied to head, which is no parameter"):
        NorMuonAndAdam(tiny_gpt().named_parameters(), table, SCATTER_ORDER, WORK_ORDER)


def test_a_tie_that_would_not_hold_is_refused() -> None:
    """To a parameter that is tied itself, whose gradient would go nowhere; to one whose steps are others."""
    embed, head = PARAM_TABLE["embed"], PARAM_TABLE["lm_head"]
    fields = {"lr": head.lr, "weight_decay": head.weight_decay}
    for table, said in (
        ({"bigram_embed": replace(PARAM_TABLE["bigram_embed"], tied_to="embed")}, "bigram_embed is tied to embed, which is tied itself"),
        ({"lm_head": replace(head, tied_to="embed")}, "lm_head is tied to embed, which is tied itself"),
        ({"embed": replace(embed, tied_to="embed")}, "embed is tied to embed, which is tied itself"),
        ({"lm_head": NorMuon("sharded", **fields)}, "embed is tied to lm_head, which is updated in other steps"),
    ):
        with pytest.raises(ValueError, match=f"^{said}$"):
            NorMuonAndAdam(tiny_gpt().named_parameters(), PARAM_TABLE | table, SCATTER_ORDER, WORK_ORDER)


# Tied and split, on one, two and four ranks

STEPS, SPLIT = 6, train_gpt.split_step(4)  # of h(): Adam on 1, 3 and 5, the split after 3


def try_to_shard() -> list[str]:
    """The messages for parameters that two or four ranks cannot share; a bank, padded, is none of them."""
    messages = []
    for label, shape in (("bigram_embed", (129, 16)), ("mlp", (3, 1, 64, 16)), ("lm_head", (17, 128))):
        try:
            NorMuonAndAdam([(label, nn.Parameter(torch.zeros(shape)))], {label: PARAM_TABLE[label]}, [label], [label])
        except ValueError as error:
            messages.append(str(error))
    return messages


def train_rank(rank: int, world_size: int, dtype: torch.dtype = F64) -> dict:
    """Six steps on this rank's micro-batches: whole parameters and this rank's Adam state of head and embedding, after each."""
    model = tiny_gpt(dtype)
    with torch.no_grad():
        model.embed.copy_(model.lm_head.T)
    manager = TrainingManager(model, h())
    share, history = h().micro_batches // world_size, []
    for step in range(STEPS):
        manager.advance_schedule(step)
        add_gradients(model, step, range(rank * share, (rank + 1) * share))
        manager.step_optimizers(step)
        params = {label: param.detach().clone() for label, param in model.named_parameters()}
        state = {
            label: {k: v.clone() if isinstance(v, Tensor) else v for k, v in manager.optimizer.state[label].items()}
            for label in params
        }
        history.append(
            dict(
                params=params,
                state=state,
                tied=manager.optimizer.tied,
                left=[label for label in params if getattr(model, label).grad is not None],
            )
        )
    return dict(history=history, refusals=try_to_shard())


@pytest.fixture(scope="module")
def trained(run_ranks) -> Callable[[int], list[dict]]:
    """trained(world_size): train_rank of each rank, run once."""
    cache: dict[int, list[dict]] = {}

    def get(world_size: int) -> list[dict]:
        if world_size not in cache:
            cache[world_size] = [train_rank(0, 1)] if world_size == 1 else run_ranks(world_size, train_rank)
        return cache[world_size]

    return get


def whole(ranks: list[dict], step: int, label: str, name: str) -> Tensor:
    """A sharded parameter's state, put together."""
    return torch.cat([rank["history"][step]["state"][label][name] for rank in ranks])


def summed_gradient(label: str, shape: tuple[int, ...], steps: tuple[int, ...]) -> Tensor:
    """What all ranks' micro-batches of these steps have added, divided by their number in a step."""
    return sum(normal(f"g_{label}_{step}_{i}", shape).double() for step in steps for i in range(4)) / 4


WORLD_SIZES = pytest.mark.parametrize("world_size", [1, 2, 4])


@WORLD_SIZES
def test_tied_embed_stays_lm_head_transposed(trained, world_size: int) -> None:
    for rank in trained(world_size):
        for step in range(SPLIT + 1):
            params = rank["history"][step]["params"]
            assert torch.equal(params["embed"], params["lm_head"].T), step
            assert rank["history"][step]["tied"] == (step < SPLIT)


@WORLD_SIZES
def test_tied_head_learns_from_both_gradients(trained, world_size: int) -> None:
    ranks = trained(world_size)
    head, embed = summed_gradient("lm_head", (16, 128), (0, 1)), summed_gradient("embed", (128, 16), (0, 1))
    expected = (1 - PARAM_TABLE["lm_head"].betas[0]) * (head + embed.T)  # from zero
    assert (whole(ranks, 1, "lm_head", "exp_avg") - expected).abs().max() <= 1e-14


@WORLD_SIZES
def test_split_hands_over_the_adam_state_transposed_exactly(trained, world_size: int) -> None:
    ranks = trained(world_size)
    for name in ("exp_avg", "exp_avg_sq"):
        head = whole(ranks, SPLIT, "lm_head", name)
        assert head.shape == (16, 128) and head.abs().sum() > 0
        assert torch.equal(whole(ranks, SPLIT, "embed", name), head.T)
    for rank in ranks:
        state = rank["history"][SPLIT]["state"]
        assert state["embed"]["step"] == state["lm_head"]["step"] == 2


@WORLD_SIZES
def test_split_embed_has_a_life_of_its_own(trained, world_size: int) -> None:
    ranks = trained(world_size)
    params = ranks[0]["history"][5]["params"]
    assert not torch.equal(params["embed"], params["lm_head"].T)
    inherited = whole(ranks, SPLIT, "lm_head", "exp_avg")
    for label, shape, start in (("lm_head", (16, 128), inherited), ("embed", (128, 16), inherited.T)):
        beta1 = PARAM_TABLE[label].betas[0]
        expected = beta1 * start + (1 - beta1) * summed_gradient(label, shape, (4, 5))  # its own gradient alone
        assert (whole(ranks, 5, label, "exp_avg") - expected).abs().max() <= 1e-14
        # The weights follow the formula from the state that was handed over, at the third step, in the extension.
        before = ranks[0]["history"][4]["params"][label].numpy()
        v = whole(ranks, SPLIT, label, "exp_avg_sq").numpy()
        g = summed_gradient(label, shape, (4, 5)).numpy()
        expected_weights, _, _ = adam_reference(before, g, start.numpy(), v, 3, PARAM_TABLE[label], train_gpt.LR_FLOOR)
        assert np.abs(params[label].numpy() - expected_weights).max() <= 1e-13


@WORLD_SIZES
def test_used_gradients_are_cleared_on_every_rank(trained, world_size: int) -> None:
    for rank in trained(world_size):
        assert [set(entry["left"]) for entry in rank["history"]] == [set(ODD_STEPS), set()] * 3


@pytest.mark.parametrize("world_size", [2, 4])
def test_all_ranks_hold_the_same_bits(trained, world_size: int) -> None:
    first, *others = trained(world_size)
    for rank in others:
        for a, b in zip(first["history"], rank["history"]):
            assert unequal(a["params"], b["params"]) == []


@pytest.mark.parametrize("world_size", [2, 4])
def test_same_parameters_for_every_world_size(trained, world_size: int) -> None:
    """In fp64: nothing but the order of a four-term sum differs: 2⁻⁵³, times the thousand of Polar Express, is 1e-13."""
    alone, shared = trained(1)[0]["history"], trained(world_size)[0]["history"]
    for step, (a, b) in enumerate(zip(alone, shared)):
        for label in a["params"]:
            difference = (a["params"][label] - b["params"][label]).norm()
            assert difference <= 1e-12 * a["params"][label].norm(), (label, step)


@pytest.mark.parametrize("world_size", [2, 4])
def test_each_rank_keeps_the_state_of_its_share_alone(trained, world_size: int) -> None:
    for rank in trained(world_size):
        for label, state in rank["history"][0]["state"].items():
            whole = trained(1)[0]["history"][0]["state"][label]
            share = world_size if PARAM_TABLE[label].comms == "sharded" else 1
            for name, x in state.items():
                assert not isinstance(x, Tensor) or len(x) * share == len(whole[name]), (label, name)


@pytest.mark.parametrize("world_size", [2, 4])
def test_parameter_that_cannot_be_sharded_is_named(trained, world_size: int) -> None:
    for messages in (rank["refusals"] for rank in trained(world_size)):
        assert len(messages) == 2
        for message, label, shape in zip(messages, ("bigram_embed", "lm_head"), ("(129, 16)", "(17, 128)")):
            assert label in message and shape in message and f"{world_size} ranks" in message and "--comms" in message

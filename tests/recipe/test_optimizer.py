"""NorMuonAndAdam computes the formulas of NorMuon and Adam with its table's numbers, on any number
of ranks."""

import math
from dataclasses import replace
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import train_gpt
from common import (
    U16, U32, U64, add_gradients, normal, parameters_of, short_schedule, tiny_gpt, unequal,
)  # fmt: skip
from train_gpt import (
    PARAM_TABLE, SCATTER_ORDER, WORK_ORDER, Adam, NorMuon, NorMuonAndAdam, ParamConfig,
    TrainingManager, join_mantissa, make_plan, normuon_update, polar_express, split_mantissa,
)  # fmt: skip

F64 = torch.float64
DTYPES = {"bf16": (torch.bfloat16, U16), "fp32": (torch.float32, U32), "fp64": (F64, U64)}

# -----------------------------------------------------------------------------
# Polar Express


def quintics(s):
    """What all steps make of a singular value."""
    for a, b, c in train_gpt.POLAR_EXPRESS_COEFFICIENTS:
        s = a * s + b * s**3 + c * s**5
    return s


def matrix_of(singular_values: Tensor, rows: int, cols: int) -> tuple[Tensor, Tensor, Tensor]:
    """(U, V, U diag(s) Vᵀ), fp64, U (rows, n), V (cols, n)."""
    n = len(singular_values)
    U = torch.linalg.qr(normal(f"U{rows}x{cols}", (rows, n)).double())[0]
    V = torch.linalg.qr(normal(f"V{rows}x{cols}", (cols, n)).double())[0]
    return U, V, U * singular_values @ V.T


SPECTRA = {
    "even": torch.ones(12, dtype=F64),
    "conditioned": torch.logspace(0, -2, 12, dtype=F64),
    "steep": torch.logspace(3, -3, 12, dtype=F64),
    "deficient": torch.cat((torch.linspace(2, 1, 8, dtype=F64), torch.zeros(4, dtype=F64))),
}


@pytest.mark.parametrize("spectrum", SPECTRA)
@pytest.mark.parametrize("rows, cols", [(12, 12), (40, 12), (12, 40)])
def test_polar_express_maps_each_singular_value_by_five_quintics(
    rows: int, cols: int, spectrum: str
) -> None:
    s = SPECTRA[spectrum]
    U, V, X = matrix_of(s, rows, cols)
    found = polar_express(torch.stack((X, 1e-3 * X)))
    for scale, result in zip((1.0, 1e-3), found):
        t = quintics(scale * s / (scale * s.norm() * 1.02 + 1e-6))
        # fp64 rounding of X, some n·2⁻⁵³, grows with the quintics' slopes at zero,
        # 8.2 · 4 · 3.9 · 3.3 · 2.3 = 980
        assert (result - U * t @ V.T).abs().max() <= 1000 * 12 * U64


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, F64])
def test_polar_express_of_zero_is_zero(dtype: torch.dtype) -> None:
    G = torch.stack((torch.zeros(16, 8), normal("G", (16, 8)))).to(dtype)
    result = polar_express(G)
    assert not result[0].any() and result[1].isfinite().all() and result[1].any()


# -----------------------------------------------------------------------------
# 16 + 16 bits

# Signed zeros, infinities, NaNs, subnormals and the largest numbers are among the uppers.
LOWERS = torch.tensor([0, 1, 0x7F, 0x80, 0x1234, 0x7FFF, 0x8000, 0x8001, 0xABCD, 0xFF00, 0xFFFF])


def test_mantissa_joins_and_splits_every_pattern() -> None:
    uppers, lowers = torch.meshgrid(torch.arange(65536), LOWERS, indexing="ij")
    p = uppers.flatten().to(torch.uint16).view(torch.bfloat16)
    mantissa = lowers.flatten().to(torch.uint16)
    joined = join_mantissa(p, mantissa)
    assert joined.dtype == torch.float32
    words = joined.view(torch.int32).long() & 0xFFFFFFFF
    assert torch.equal(words, (uppers * 65536 + lowers).flatten())
    halves = dict(zip(("p", "mantissa"), split_mantissa(joined)))
    assert unequal(halves, {"p": p, "mantissa": mantissa}) == []


def test_bank_in_two_halves_moves_exactly_as_one_in_fp32() -> None:
    """Over updates far below bf16's resolution; the bf16 half is the top of the fp32 number."""
    halves = normal("p", (3, 16, 8)).bfloat16()
    whole = halves.float()
    start = whole.clone()
    mantissa = torch.zeros(halves.shape, dtype=torch.uint16)
    states = [(torch.zeros(start.shape), torch.zeros(3, 16, 1)) for _ in range(2)]
    names = ("lr", "weight_decay", "momentum", "grad_scale")
    rates = {x: torch.tensor(y, dtype=F64) for x, y in zip(names, (1e-4, 1.2, 0.9, 1.0))}
    lr_mul = torch.ones(3, 1, 1)
    for step in range(20):
        grad = normal(f"g{step}", tuple(start.shape))
        normuon_update(halves, mantissa, grad, *states[0], lr_mul, beta2=0.95, **rates)
        normuon_update(whole, None, grad, *states[1], lr_mul, beta2=0.95, **rates)
        assert torch.equal(join_mantissa(halves, mantissa), whole)
        assert torch.equal(halves.view(torch.int16).int(), whole.view(torch.int32) >> 16)
    assert not torch.equal(whole, start)


# -----------------------------------------------------------------------------
# Updates against formulas


def alone(label: str, param: Tensor, row: ParamConfig) -> tuple[nn.Parameter, NorMuonAndAdam]:
    """A parameter and an optimizer of nothing else, which updates it in every step."""
    p = nn.Parameter(param.clone())
    row = replace(row, every=1, tied_to="")
    return p, NorMuonAndAdam([(label, p)], {label: row}, [label], [label])


def adam_reference(
    p: np.ndarray, g: np.ndarray, m: np.ndarray, v: np.ndarray, t: int, row: Adam, lr: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(p, m, v) after step t, by the formula, fp64; lr: the schedule's multiplier."""
    beta1, beta2 = row.betas
    lr = lr * by_column(row.lr, p.shape[-1])
    m = beta1 * m + (1 - beta1) * g
    v = beta2 * v + (1 - beta2) * g * g
    u = lr * math.sqrt(1 - beta2**t) / (1 - beta1**t) * m / (np.sqrt(v) + row.eps)
    u = np.where(u * p > 0, u + lr * lr * row.weight_decay * row.wd_mul * p, u)
    return p - u, m, v


def by_column(lr: float | tuple[float, ...], columns: int) -> np.ndarray:
    """Each column's multiplier: the last one of a tuple goes for all that follow."""
    rates = lr if isinstance(lr, tuple) else (lr,)
    return np.array([rates[min(j, len(rates) - 1)] for j in range(columns)])


@pytest.mark.parametrize("label", [x for x, row in PARAM_TABLE.items() if isinstance(row, Adam)])
@pytest.mark.parametrize("kind", DTYPES)
def test_adam_follows_its_formula(label: str, kind: str) -> None:
    """From the parameter as stored: computed in fp32 (fp64), rounded to its dtype once."""
    dtype, unit = DTYPES[kind]
    row = PARAM_TABLE[label]
    p, optimizer = alone("it", normal("p", (30, 7)).to(dtype), row)
    m = v = np.zeros((30, 7))
    optimizer.grad_divisor = 4
    for t in range(1, 5):
        g = normal(f"g{t}", (30, 7)).to(dtype)
        p.grad = g.clone()
        before = p.detach().double().numpy().copy()
        expected, m, v = adam_reference(before, g.double().numpy() / 4, m, v, t, row, 1.5 / t)
        optimizer.step(t, lr_factor=1.5 / t)
        # One rounding of the result, and about a dozen units (fp32's, or fp64's) of the parameter
        # and of the update.
        size = np.abs(before) + np.abs(expected - before) + np.abs(expected)
        bound = unit * np.abs(expected) + 20 * min(unit, U32) * size
        assert (np.abs(p.detach().double().numpy() - expected) <= bound).all()
        assert p.grad is None
    state = optimizer.state["it"]
    wide = F64 if dtype == F64 else torch.float32
    assert state["step"] == 4 and state["exp_avg"].dtype == state["exp_avg_sq"].dtype == wide


def polar_reference(X: np.ndarray) -> np.ndarray:
    """By the singular values."""
    U, s, Vt = np.linalg.svd(X, full_matrices=False)
    return U * quintics(s / (np.linalg.norm(X) * 1.02 + 1e-6)) @ Vt


def normuon_reference(
    p: np.ndarray,
    g: np.ndarray,
    m: np.ndarray,
    v: np.ndarray,
    row: NorMuon,
    lr: float,
    matrix_mul: float,
    momentum: float,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(p, m, v) of one matrix after a step, by the formulas, fp64; v (rows,), of a wide matrix
    (cols,)."""
    rows, cols = p.shape
    m = momentum * m + (1 - momentum) * g
    u = polar_reference((1 - momentum) * g + momentum * m)
    axis = 1 if rows >= cols else 0
    v = row.beta2 * v + (1 - row.beta2) * (u**2).mean(axis)
    scaled = u * np.expand_dims(1 / np.sqrt(np.maximum(v, 1e-10)), axis)
    scaled *= np.linalg.norm(u) / np.linalg.norm(scaled)
    matrix_lr = lr * matrix_mul * math.sqrt(max(1, rows / cols))
    decay = row.weight_decay * row.wd_mul * lr * matrix_lr
    return p - matrix_lr * scaled - decay * p * (scaled * p >= 0), m, v


BANKS = {  # label: (shape, its matrices in order)
    "attn": ((2, 64, 16), (8, 16, 16)),
    "mlp": ((3, 2, 64, 16), (6, 64, 16)),
    "wide": ((3, 8, 24), (3, 8, 24)),
}


def parts_of(label: str, bank: np.ndarray) -> list[np.ndarray]:
    """What is orthogonalized as one: a bank's matrices, or the halves of q and k, two heads each."""
    parts = []
    for i, matrix in enumerate(bank.reshape(BANKS[label][1])):
        parts += np.split(matrix, 2) if label == "attn" and i % 4 < 2 else [matrix]
    return parts


@pytest.mark.parametrize("label", BANKS)
def test_normuon_follows_its_formula(label: str) -> None:
    """Four steps in fp64: each matrix's multiplier, √(rows/cols) of tall ones, wide ones by column.
    Second moments are kept: of whole matrices, and of groups of heads."""
    shape, matrices = BANKS[label]
    row = train_gpt.param_table(h(head_dim=4)).get(label, NorMuon(lr=0.023))
    p, optimizer = alone(label, normal("p" + label, shape).double(), row)
    optimizer.grad_divisor = 8
    expected = parts_of(label, p.detach().numpy().copy())
    m = [np.zeros(part.shape) for part in expected]
    v = [np.zeros(max(part.shape)) for part in expected]
    for step in range(4):
        g = normal(f"g{label}{step}", shape).double()
        factor, momentum = 1.5 - 0.3 * step, 0.85 + 0.03 * step
        p.grad = g.clone()
        optimizer.step(step, factor, momentum)
        for i, g_i in enumerate(parts_of(label, g.numpy() / 8)):
            how = (row, row.lr * factor, row.lr_mul[i % len(row.lr_mul)], momentum)
            expected[i], m[i], v[i] = normuon_reference(expected[i], g_i, m[i], v[i], *how)
        # As for Polar Express: 1000 · n · 2⁻⁵³, at a rate of 0.15 at most, over four steps
        for found, part in zip(parts_of(label, p.detach().numpy()), expected, strict=True):
            assert np.abs(found - part).max() <= 4 * 1000 * 64 * U64
        assert p.grad is None
    state = optimizer.state[label]
    moments = []
    for i in range(matrices[0]):
        grouped = label == "attn" and i % 4 < 2
        moments += [*state["group_second_moment"][i]] if grouped else [state["second_moment"][i]]
    for found, moment in zip(moments, v, strict=True):
        assert np.abs(found.flatten().numpy() - moment).max() <= 1e-10


def test_normuon_decays_where_update_and_weight_agree_or_vanish() -> None:
    """[u·p ≥ 0]: with no gradient at all, every weight decays by wd·lr·matrix_lr."""
    p, optimizer = alone("square", normal("p", (1, 16, 16)).double(), NorMuon(lr=0.02))
    before = p.detach().clone()
    p.grad = torch.zeros_like(p)
    optimizer.step(0)
    assert torch.allclose(p.detach(), before * (1 - 1.2 * 0.02**2), rtol=1e-14, atol=0)


# -----------------------------------------------------------------------------
# The step

ODD_STEPS = [label for label, row in PARAM_TABLE.items() if row.every == 2]


def h(**changes: int):
    return short_schedule(**(dict(num_scheduled_iterations=4, micro_batches=4) | changes))


def test_every_is_a_column_of_the_table() -> None:
    """Also of a bank, and of a parameter that is neither NorMuon's nor tied."""
    changed = {label: replace(PARAM_TABLE[label], every=3) for label in ("mlp", "value_embeds")}
    model = tiny_gpt()
    table = PARAM_TABLE | changed
    optimizer = NorMuonAndAdam(model.named_parameters(), table, SCATTER_ORDER, WORK_ORDER)
    for step in range(6):
        add_gradients(model, step)
        before = parameters_of(model)
        optimizer.step(step)
        moved = unequal(before, parameters_of(model))
        assert {*moved} == {label for label, row in table.items() if (step + 1) % row.every == 0}


@pytest.mark.parametrize("label", ["bigram_embed", "embed"])
def test_missing_gradient_is_named_and_nothing_is_updated(label: str) -> None:
    model = tiny_gpt()
    manager = TrainingManager(model, h())
    add_gradients(model, 1)
    getattr(model, label).grad = None
    before = parameters_of(model)
    with pytest.raises(RuntimeError, match=rf"no gradient for {label} at step 1"):
        manager.step_optimizers(make_plan(h())[1])
    assert unequal(before, parameters_of(model)) == []


def test_orders_must_name_every_parameter_once() -> None:
    params = [*tiny_gpt().named_parameters()]
    with pytest.raises(ValueError, match="SCATTER_ORDER.*mlp"):
        NorMuonAndAdam(params, PARAM_TABLE, (*SCATTER_ORDER, "mlp"), WORK_ORDER)
    with pytest.raises(ValueError, match="WORK_ORDER.*" + WORK_ORDER[0]):
        NorMuonAndAdam(params, PARAM_TABLE, SCATTER_ORDER, WORK_ORDER[1:])


def test_orders_and_the_tables_order_change_no_result() -> None:
    """An order is when, not what."""
    reverse = tuple(reversed(SCATTER_ORDER))
    results = []
    for table, *orders in (
        (PARAM_TABLE, SCATTER_ORDER, WORK_ORDER),
        (dict(sorted(PARAM_TABLE.items())), reverse, reverse),
    ):
        model = tiny_gpt()
        optimizer = NorMuonAndAdam(model.named_parameters(), table, *orders)
        for step in range(3):
            add_gradients(model, step)
            optimizer.step(step)
        results.append(parameters_of(model))
    assert unequal(*results) == []


def test_weight_tying_that_would_not_hold_is_refused() -> None:
    table = PARAM_TABLE | {"lm_head": replace(PARAM_TABLE["lm_head"], every=1)}
    with pytest.raises(ValueError, match="embed and lm_head must have the same `every`"):
        NorMuonAndAdam(tiny_gpt().named_parameters(), table, SCATTER_ORDER, WORK_ORDER)


def test_parameter_that_cannot_be_sharded_is_named() -> None:
    p = nn.Parameter(torch.zeros(17, 128))
    with (
        patch.object(dist, "is_initialized", lambda: True),
        patch.object(dist, "get_rank", lambda: 0),
        patch.object(dist, "get_world_size", lambda: 2),
        pytest.raises(ValueError, match=r"lm_head \(17, 128\).* 2 ranks.*--comms"),
    ):
        alone("lm_head", p, PARAM_TABLE["lm_head"])


# -----------------------------------------------------------------------------
# Tied and split; test_ranks.py compares other numbers of ranks with one

STEPS, SPLIT = 6, train_gpt.split_step(4)  # of h(): Adam on 1, 3 and 5, the split after 3


@pytest.fixture(scope="module")
def history() -> list[dict]:
    """Parameters and state after each of six steps."""
    model = tiny_gpt(F64, num_heads=4, head_dim=4)
    with torch.no_grad():
        model.embed.copy_(model.lm_head.T)
    manager = TrainingManager(model, h(head_dim=4))
    optimizer = manager.optimizer
    found = []
    for now in make_plan(h())[:STEPS]:
        manager.advance_schedule(now)
        add_gradients(model, now.step, range(4))
        manager.step_optimizers(now)
        state = {}
        for label, own in optimizer.state.items():
            state[label] = {x: torch.as_tensor(value).clone() for x, value in own.items()}
        left = {label for label, p in model.named_parameters() if p.grad is not None}
        params = parameters_of(model)
        found.append(dict(params=params, state=state, tied=optimizer.tied, left=left))
    return found


def mean_gradient(label: str, shape: tuple[int, ...], steps: tuple[int, ...]) -> Tensor:
    """The sum over these steps' micro-batches, divided by their number in a step."""
    numbers = [(step, i) for step in steps for i in range(4)]
    return sum(normal(f"g_{label}_{step}_{i}", shape).double() for step, i in numbers) / 4


def test_tied_embed_stays_lm_head_transposed(history) -> None:
    for step in range(SPLIT + 1):
        params = history[step]["params"]
        assert torch.equal(params["embed"], params["lm_head"].T), step
        assert history[step]["tied"] == (step < SPLIT)


def test_tied_lm_head_learns_from_both_gradients(history) -> None:
    head = mean_gradient("lm_head", (16, 128), (0, 1))
    embed = mean_gradient("embed", (128, 16), (0, 1))
    expected = (1 - PARAM_TABLE["lm_head"].betas[0]) * (head + embed.T)  # from zero
    found = history[1]["state"]["lm_head"]["exp_avg"]
    assert (found - expected).abs().max() <= 1e-14


def test_split_hands_over_the_adam_state_transposed_exactly(history) -> None:
    head, embed = (history[SPLIT]["state"][label] for label in ("lm_head", "embed"))
    for name in ("exp_avg", "exp_avg_sq"):
        assert head[name].shape == (16, 128) and head[name].any()
        assert torch.equal(embed[name], head[name].T)
    assert embed["step"] == head["step"] == 2


def test_split_embed_learns_from_its_own_gradient_alone(history) -> None:
    params = history[5]["params"]
    assert not torch.equal(params["embed"], params["lm_head"].T)
    inherited = history[SPLIT]["state"]["lm_head"]["exp_avg"]
    for label, start in (("lm_head", inherited), ("embed", inherited.T)):
        row = PARAM_TABLE[label]
        g = mean_gradient(label, tuple(start.shape), (4, 5))
        expected = row.betas[0] * start + (1 - row.betas[0]) * g
        assert (history[5]["state"][label]["exp_avg"] - expected).abs().max() <= 1e-14
        # The weights follow the formula from that state, at the third step, in the extension.
        before = history[4]["params"][label].numpy()
        v = history[SPLIT]["state"][label]["exp_avg_sq"].numpy()
        how = (3, row, train_gpt.LR_FLOOR)
        weights, _, _ = adam_reference(before, g.numpy(), start.numpy(), v, *how)
        assert np.abs(params[label].numpy() - weights).max() <= 1e-13


def test_used_gradients_are_cleared(history) -> None:
    assert [entry["left"] for entry in history] == [{*ODD_STEPS}, set()] * 3

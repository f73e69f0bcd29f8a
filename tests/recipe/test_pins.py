"""The recipe's numbers, written a second time: an idea that changes the recipe fails here, and that
is all right. What these numbers do is in the other files, which take them from the script."""

import math

import pytest
import torch

import train_gpt
from common import U16, short_schedule
from train_gpt import (
    GPT, LAMBDAS, LAYERS, MUDD, PARAM_TABLE, SCALARS, SCATTER_ORDER, WORK_ORDER, Adam,
    Hyperparameters, NorMuon, split_step, step_schedule,
)  # fmt: skip

H = Hyperparameters()


def test_settings_of_the_record() -> None:
    pinned = dict(
        vocab_size=50257, bos_id=50256, model_dim=768, num_heads=6, head_dim=128,
        bigram_rows=754_560, attention_scale=0.1, dtype="bfloat16",
        fp8_head=True, fp8_mlp=True,
        num_scheduled_iterations=1365, num_extension_iterations=10, comms="sharded",
        grad_dtype="param", batch_unit=16384, micro_batches=8, block_size=128, adam_lr_scale=1.0,
        muon_lr_scale=1.0, momentum_warmup=300, momentum_cooldown=50, val_every=250,
        val_tokens=10_485_760, val_batch_tokens=2_097_152,
    )  # fmt: skip
    assert {name: getattr(H, name) for name in pinned} == pinned


# -----------------------------------------------------------------------------
# Table 1: parameters


def test_rows_of_adam() -> None:
    shared = dict(lr=0.008, eps=1e-10, weight_decay=0.005, every=2)

    def replicated(betas: tuple, lr_mul: object, wd_mul: float) -> Adam:
        return Adam("replicated", betas=betas, lr_mul=lr_mul, wd_mul=wd_mul, **shared)

    def sharded(betas: tuple, lr_mul: float, wd_mul: float, tied_to: str = "") -> Adam:
        return Adam("sharded", betas=betas, lr_mul=lr_mul, wd_mul=wd_mul, tied_to=tied_to, **shared)

    assert {label: row for label, row in PARAM_TABLE.items() if isinstance(row, Adam)} == {
        "scalars": replicated((0.9, 0.99), 5, 0),
        "value_embeds": sharded((0.75, 0.95), 75, 5),
        "bigram_embed": sharded((0.75, 0.95), 75, 5),
        "smear_gate": replicated((0.9, 0.99), 0.01, 0),
        "skip_gate": replicated((0.9, 0.99), 0.05, 0),
        "attn_gate_bank": replicated((0.9, 0.99), 1, 1),
        "ve_gate_bank": replicated((0.9, 0.99), 1, 1),
        "layer_lambdas": replicated((0.9, 0.95), (5, 5, 1), 0),
        "mudd": replicated((0.9, 0.99), 0.25, 1),
        "lm_head": sharded((0.5, 0.95), 1, 150),
        "embed": sharded((0.5, 0.95), 1, 150, "lm_head"),
    }


def test_rows_of_normuon() -> None:
    shared = dict(comms="sharded", every=1, lr=0.023, weight_decay=1.2, beta2=0.9, wd_mul=1)
    assert {label: row for label, row in PARAM_TABLE.items() if isinstance(row, NorMuon)} == {
        "attn": NorMuon(
            **shared, heads_per_group=(2, 2, 0, 0), matrices_per_slice=4, pad_front=True
        ),
        "mlp": NorMuon(**shared, lr_mul=(1.0, 2.0)),
    }


def test_orders() -> None:
    gates = ("smear_gate", "skip_gate", "attn_gate_bank", "ve_gate_bank", "layer_lambdas", "mudd")
    tables, head = ("value_embeds", "bigram_embed"), ("lm_head", "embed")
    assert SCATTER_ORDER == ("attn", "mlp", "scalars", *tables, *gates, *head)
    assert WORK_ORDER == ("scalars", *gates, *tables, *head, "attn", "mlp")


def test_coefficients_are_the_published_ones() -> None:
    """arXiv 2505.16932"""
    assert train_gpt.POLAR_EXPRESS_COEFFICIENTS == (
        (8.156554524902461, -22.48329292557795, 15.878769915207462),
        (4.042929935166739, -2.808917465908714, 0.5000178451051316),
        (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
        (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
        (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
    )


def test_scales_of_the_fp8_head() -> None:
    scales = (train_gpt.FP8_X_SCALE, train_gpt.FP8_W_SCALE, train_gpt.FP8_GRAD_SCALE)
    assert scales == (100 / 448, 1.6 / 448, 0.75 / 448)


# -----------------------------------------------------------------------------
# Tables 2 and 3: layers and scalars


def where(**columns: object) -> tuple[int, ...]:
    """The layers that have these values."""
    found = []
    for i, layer in enumerate(LAYERS):
        if all(getattr(layer, column) == value for column, value in columns.items()):
            found.append(i)
    return tuple(found)


def test_what_each_layer_has() -> None:
    assert len(LAYERS) == 11
    assert where(window="") == (6,) and where(window="long") == where(key_offset=True) == (3, 10)
    assert where(paired=True) == (0, 2, 5, 9)
    assert where(value_gate=True) == (1, 2, 8, 9) and where(mudd=True) == (10,)
    assert where(keep="c3") == (3,) and where(keep="c7") == (7,) and where(keep="c9") == (9,)
    assert where(add="c3") == (6,) and where(same_input=True) == (9, 10)


def test_starts_of_the_scalars() -> None:
    resid = {"resid_attn": 1.1**0.5, "resid_mlp": 1.1**0.5}
    assert LAMBDAS == {**resid, "post_attn": 1, "post_mlp": 1, "x0": 0, "bigram": 0.05}
    assert SCALARS == {
        "sa_lambda": [0.5, 1.0] * 11,
        "smear_lambda": [0.0],
        "skip_lambda": [-1.5],
    }
    before, after = MUDD
    gates = {"gate_low": 2, "gate_high": 2}
    assert {name: value for name, value in before.items() if value} == {
        **gates, **{name: value for name, value in LAMBDAS.items() if value}
    }  # fmt: skip
    assert len(before) == 14
    assert after == {"c0": 0, "c7": -0.5, "c9": 0, "value_embed": 0, "c3": 0}


# -----------------------------------------------------------------------------
# Initial weights


@pytest.fixture(scope="module")
def fresh() -> GPT:
    torch.manual_seed(0)
    return GPT(300, len(LAYERS), 4, 16, 64, 128)


def test_shapes_and_dtypes(fresh: GPT) -> None:
    shapes = {
        "attn": (10, 256, 64),
        "mlp": (12, 2, 256, 64),
        "scalars": (24,),
        "value_embeds": (384, 320),
        "bigram_embed": (5760, 16),
        "smear_gate": (1, 12),
        "skip_gate": (1, 12),
        "attn_gate_bank": (10, 4, 12),
        "ve_gate_bank": (4, 4, 12),
        "layer_lambdas": (11, 10),
        "mudd": (2, 64 * 64 + 14 * 64 + 14),
        "lm_head": (64, 384),
        "embed": (384, 64),
    }
    assert {label: tuple(p.shape) for label, p in fresh.named_parameters()} == shapes
    for label, param in fresh.named_parameters():
        wide = label in ("scalars", "layer_lambdas")
        assert param.dtype == (torch.float32 if wide else torch.bfloat16), label


def assert_uniform(x: torch.Tensor, bound: float) -> None:
    """Within ± bound (rounded to bf16), filling it: the largest of n is within 20/n of it, and the
    variance is bound²/3."""
    x = x.double().flatten()
    n = len(x)
    assert bound * (1 - 20 / n) * (1 - U16) <= x.abs().max() <= bound * (1 + U16)
    # The variance of x² is 4/45 bound⁴: five standard errors
    difference = abs(x.square().mean().item() - bound**2 / 3)
    assert difference <= (5 * math.sqrt(4 / 45 / n) + 2 * U16**2) * bound**2
    assert abs(x.mean().item()) <= 5 * bound / math.sqrt(3 * n)


def assert_normal(x: torch.Tensor, std: float) -> None:
    x = x.double().flatten()
    n = len(x)
    assert x.std().item() == pytest.approx(std, rel=5 / math.sqrt(2 * n) + U16)
    assert abs(x.mean().item()) <= 5 * std / math.sqrt(n)
    assert x.abs().max() > 3 * std  # a normal has tails


def test_matrices_start_uniform_and_W_proj_at_zero(fresh: GPT) -> None:
    for part in (fresh.attn[:, :192], fresh.attn[:, 192:], fresh.mlp[:11, 0]):
        assert_uniform(part, math.sqrt(3) * 0.5 * 64**-0.5)
    assert (fresh.mlp[:, 1] == 0).all()


def test_embeddings_start_normal_and_embed_as_the_lm_head_transposed(fresh: GPT) -> None:
    assert_normal(fresh.lm_head, 0.005)
    assert torch.equal(fresh.embed, fresh.lm_head.T)
    for part in fresh.value_embeds.split(64, 1):
        assert_normal(part, 0.01)


def test_bigrams_and_gates_start_at_zero(fresh: GPT) -> None:
    gates = ("smear_gate", "skip_gate", "attn_gate_bank", "ve_gate_bank")
    for label in ("bigram_embed", *gates):
        assert (getattr(fresh, label) == 0).all(), label


def test_scalars_start_in_the_order_of_their_table(fresh: GPT) -> None:
    starts = [0.5, 1.0] * 11 + [0.0, -1.5]
    assert torch.equal(fresh.scalars, torch.tensor(starts))
    rows = torch.tensor([[1.1**0.5, 1.1**0.5, 1, 1, 0, 0.05, 0, 0, 0, 0]] * 11)
    assert torch.equal(fresh.layer_lambdas, rows)


def test_mudd_starts_with_its_biases_alone(fresh: GPT) -> None:
    for network, values in enumerate(MUDD):
        W1, W2, b = fresh.mudd_network(network)
        assert_uniform(W1, 64**-0.5)
        assert (W2 == 0).all()
        starts = (10 * torch.tensor(list(values.values()))).bfloat16()
        assert torch.equal(b[: len(starts)], starts)


def test_signs_are_even(fresh: GPT) -> None:
    signs = fresh.bigram_signs
    assert signs.shape == (8192, 16) and (signs.abs() == 1).all()
    assert abs(signs.float().mean()) <= 5 / math.sqrt(signs.numel())


# -----------------------------------------------------------------------------
# Table 4: stages. Every number of every step: test_schedule.py


def test_embedding_splits_on_the_third_stages_first_odd_step() -> None:
    assert [split_step(n) for n in (1365, 1725, 232, 12)] == [911, 1151, 155, 9]


def test_every_third_of_a_short_run_has_its_batch() -> None:
    for scheduled in (1, 2, 3, 4, 7, 100):
        h = short_schedule(num_scheduled_iterations=scheduled)
        steps = range(h.total_iterations)
        units = [step_schedule(step, h).batch_tokens // h.batch_unit for step in steps]
        first, second = round(scheduled / 3), round(2 * scheduled / 3)
        expected = [8] * first + [16] * (second - first) + [24] * (scheduled - second)
        assert units == expected + [24, 24]

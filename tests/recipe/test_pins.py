"""The recipe's numbers, written a second time: an idea that changes the recipe fails here, and that is all right.

What these numbers do is in the other files, which take them from the script that is tested.
"""

import dataclasses
import math

import pytest
import torch

from common import U16, short_schedule
from train_gpt import (
    FP8_GRAD_SCALE, FP8_W_SCALE, FP8_X_SCALE, GPT, LAYERS, PARAM_TABLE, POLAR_EXPRESS_COEFFICIENTS, SCALARS, SCATTER_ORDER,
    WORK_ORDER, Adam, Hyperparameters, NorMuon, split_step, step_schedule,
)  # fmt: skip

H = Hyperparameters()


def test_settings_of_the_record() -> None:
    pinned = dict(
        vocab_size=50257, bos_id=50256, max_doc_len=2048, model_dim=768, num_heads=6, head_dim=128, bigram_rows=251_520,
        attention_scale=0.1, dtype="bfloat16", fp8_head=True, num_scheduled_iterations=1507, num_extension_iterations=40,
        comms="sharded", grad_dtype="param", batch_unit=16384, micro_batches=8, block_size=128, adam_lr_mul=1.0,
        muon_lr_mul=1.0, momentum_warmup=300, momentum_cooldown=50, val_every=250, val_tokens=10_485_760,
        val_batch_tokens=2_097_152,
    )  # fmt: skip
    assert {name: value for name, value in dataclasses.asdict(H).items() if name in pinned} == pinned


# Table 1: parameters


def test_rows_of_adam() -> None:
    adam = {
        label: (row.comms, row.betas, row.lr_mul, row.wd_mul, row.lr, row.eps, row.weight_decay)
        for label, row in PARAM_TABLE.items() if isinstance(row, Adam)
    }  # fmt: skip
    shared = (0.008, 1e-10, 0.005)
    gate, table, head = ("replicated", (0.9, 0.99)), ("sharded", (0.75, 0.95), 75, 5), ("sharded", (0.5, 0.95), 1, 150)
    assert adam == {
        "scalars": (*gate, 5, 0, *shared), "value_embeds": (*table, *shared), "bigram_embed": (*table, *shared),
        "smear_gate": (*gate, 0.01, 0, *shared), "skip_gate": (*gate, 0.05, 0, *shared),
        "attn_gate_bank": (*gate, 1, 1, *shared), "ve_gate_bank": (*gate, 1, 1, *shared),
        "x0_lambdas": ("replicated", (0.65, 0.95), 5, 0, *shared), "lm_head": (*head, *shared), "embed": (*head, *shared),
    }  # fmt: skip


def test_rows_of_normuon() -> None:
    banks = {
        label: (row.comms, row.lr, row.weight_decay, row.beta2, row.wd_mul, row.lr_mul)
        for label, row in PARAM_TABLE.items() if isinstance(row, NorMuon)
    }  # fmt: skip
    bank = ("sharded", 0.023, 1.2, 0.95, 1)
    assert banks == {"attn": (*bank, (1.0,)), "mlp": (*bank, (1.0, 2.0))}


def test_orders_and_the_tie() -> None:
    gates = "smear_gate", "skip_gate", "attn_gate_bank", "ve_gate_bank", "x0_lambdas"
    tables, head = ("value_embeds", "bigram_embed"), ("lm_head", "embed")
    assert SCATTER_ORDER == ("attn", "mlp", "scalars", *tables, *gates, *head)
    assert WORK_ORDER == ("scalars", *gates, *tables, *head, "attn", "mlp")
    assert {label: row.tied_to for label, row in PARAM_TABLE.items() if row.tied_to} == {"embed": "lm_head"}


def test_coefficients_are_the_published_ones() -> None:
    """arXiv 2505.16932"""
    assert POLAR_EXPRESS_COEFFICIENTS == (
        (8.156554524902461, -22.48329292557795, 15.878769915207462),
        (4.042929935166739, -2.808917465908714, 0.5000178451051316),
        (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
        (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
        (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
    )


def test_five_steps_bring_singular_values_near_one() -> None:
    """From 0.004 on: those of a matrix of 32 rows or columns whose condition is 100."""
    s = torch.linspace(0.004, 1, 100_000, dtype=torch.float64)
    for a, b, c in POLAR_EXPRESS_COEFFICIENTS:
        s = a * s + b * s**3 + c * s**5
    assert 0.8 < s.min() < 0.9 and 1.1 < s.max() < 1.2


def test_scales_of_the_fp8_head() -> None:
    assert (FP8_X_SCALE, FP8_W_SCALE, FP8_GRAD_SCALE) == (100 / 448, 1.6 / 448, 0.75 / 448)


# Tables 2 and 3: layers and scalars


def test_what_each_layer_has() -> None:
    def where(**columns: object) -> tuple[int, ...]:
        return tuple(i for i, layer in enumerate(LAYERS) if all(getattr(layer, c) == value for c, value in columns.items()))

    assert len(LAYERS) == 11
    assert where(window="") == (6,) and where(window="long") == where(key_offset=True) == (3, 10)
    assert where(paired=True) == (0, 2, 5, 9)
    assert {n: where(value_gate=n) for n in {layer.value_gate for layer in LAYERS}} == {
        0: (0, 3, 4, 5, 6, 7), 6: (1, 8, 10), 12: (2, 9),
    }  # fmt: skip
    assert (where(keep="skip"), where(add="skip"), where(keep="backout")) == ((3,), (6,), (7,))


def test_starts_of_the_scalars() -> None:
    assert SCALARS == {
        "resid_lambda": [1.1] * 11, "sa_lambda": [0.5, 1.0] * 11, "bigram_lambda": [0.1] * 11, "smear_lambda": [0.0],
        "backout_lambda": [0.5], "skip_lambda": [-1.5],
    }  # fmt: skip


# Starting values


@pytest.fixture(scope="module")
def fresh() -> GPT:
    torch.manual_seed(0)
    return GPT(300, len(LAYERS), 4, 16, 64, 128)


def test_shapes_and_dtypes(fresh: GPT) -> None:
    bf16, fp32 = torch.bfloat16, torch.float32
    assert {label: (tuple(p.shape), p.dtype) for label, p in fresh.named_parameters()} == {
        "attn": ((10, 256, 64), bf16), "mlp": ((12, 2, 256, 64), bf16), "scalars": ((47,), fp32),
        "value_embeds": ((384, 320), bf16), "bigram_embed": ((1920, 64), bf16),
        "smear_gate": ((1, 12), bf16), "skip_gate": ((1, 12), bf16), "attn_gate_bank": ((10, 4, 12), bf16),
        "ve_gate_bank": ((5, 4, 12), bf16), "x0_lambdas": ((11,), fp32),
        "lm_head": ((64, 384), bf16), "embed": ((384, 64), bf16),
    }  # fmt: skip


def assert_uniform(x: torch.Tensor, bound: float) -> None:
    """Within ± bound (rounded to bf16), filling it: the largest of n is within 20/n of it, and the variance is bound²/3."""
    x = x.double().flatten()
    assert x.abs().max() <= bound * (1 + U16)
    assert x.abs().max() >= bound * (1 - 20 / len(x)) * (1 - U16)
    # The variance of x² is 4/45 bound⁴: five standard errors
    assert abs(x.square().mean().item() - bound**2 / 3) <= 5 * math.sqrt(4 / 45 / len(x)) * bound**2 + 2 * U16**2 * bound**2
    assert abs(x.mean().item()) <= 5 * bound / math.sqrt(3 * len(x))


def assert_normal(x: torch.Tensor, std: float) -> None:
    x = x.double().flatten()
    assert x.std().item() == pytest.approx(std, rel=5 / math.sqrt(2 * len(x)) + U16)
    assert abs(x.mean().item()) <= 5 * std / math.sqrt(len(x))
    assert x.abs().max() > 3 * std  # a normal has tails


def test_q_k_v_and_o_start_uniform(fresh: GPT) -> None:
    for part in (fresh.attn[:, :192], fresh.attn[:, 192:]):
        assert_uniform(part, math.sqrt(3) * 0.5 * 64**-0.5)


def test_fc_starts_uniform_and_proj_at_zero(fresh: GPT) -> None:
    assert_uniform(fresh.mlp[:11, 0], math.sqrt(3) * 0.5 * 64**-0.5)
    assert (fresh.mlp[:, 1] == 0).all()


def test_head_starts_normal_and_embedding_is_its_transpose(fresh: GPT) -> None:
    assert_normal(fresh.lm_head, 0.005)
    assert torch.equal(fresh.embed, fresh.lm_head.T)


def test_value_embeddings_start_normal(fresh: GPT) -> None:
    for part in fresh.value_embeds.split(64, 1):
        assert_normal(part, 0.01)


def test_bigrams_gates_and_x0_lambdas_start_at_zero(fresh: GPT) -> None:
    for label in ("bigram_embed", "smear_gate", "skip_gate", "attn_gate_bank", "ve_gate_bank", "x0_lambdas"):
        assert (getattr(fresh, label) == 0).all(), label


def test_scalars_start_in_the_order_of_their_table(fresh: GPT) -> None:
    assert torch.equal(fresh.scalars, torch.tensor([1.1] * 11 + [0.5, 1.0] * 11 + [0.1] * 11 + [0.0, 0.5, -1.5]))


# Table 4: stages, by what they make of a step of the record preset

# step: (batch units, short window, long window, YaRN's window, lr peak before its decay, MTP weights), windows in blocks
STEPS = {
    0: (8, 1, 3, 3, 1.00, (1, 0.5, 0.25)),
    501: (8, 1, 3, 3, 1.00, (1, 0.5, 0.25 / 502)),
    502: (16, 3, 7, 7, 1.52, (1, 0.5)),  # a third of 1507 is 502.33
    503: (16, 3, 7, 7, 1.52, (1, 0.5 * 502 / 503)),
    678: (16, 3, 7, 7, 1.52, (1, 0.5 * 327 / 503)),  # the cooldown begins: 0.45 of 1507 is 678.15
    679: (16, 3, 7, 7, 1.52, (1, 0.5 * 326 / 503)),
    1004: (16, 3, 7, 7, 1.52, (1, 0.5 / 503)),
    1005: (24, 5, 11, 11, 1.73, (1,)),  # two thirds are 1004.67
    1506: (24, 5, 11, 11, 1.73, (1,)),
    1507: (24, 6, 13, 13, 0.10, (1,)),
    1546: (24, 6, 13, 13, 0.10, (1,)),
    1547: (24, 6, 20, 13, 0.10, (1,)),  # the final validation
}
MOMENTUM = {
    0: 0.85, 150: 0.90, 299: 0.85 + 0.1 * 299 / 300, 300: 0.95, 1000: 0.95, 1497: 0.95, 1498: 0.948, 1522: 0.90, 1546: 0.852,
}  # fmt: skip
# A handful of fp64 operations on numbers below 2.
EXACT = dict(rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("step", STEPS)
def test_schedule_of_the_record(step: int) -> None:
    batch, short, long, yarn, peak, mtp_weights = STEPS[step]
    said = step_schedule(step, H)
    assert (said.batch_tokens, said.short_window) == (batch * 16384, short * 128)
    assert (said.long_window, said.yarn_window) == (long * 128, yarn * 128)
    w = max(0, min(1, (1507 - step) / (1507 - 678)))
    assert said.lr_mul == pytest.approx(peak * w + 0.1 * (1 - w), **EXACT)
    assert len(said.mtp_weights) == len(mtp_weights) and said.mtp_weights == pytest.approx(mtp_weights, **EXACT)


@pytest.mark.parametrize("step", MOMENTUM)
def test_momentum_of_the_record(step: int) -> None:
    assert step_schedule(step, H).momentum == pytest.approx(MOMENTUM[step], **EXACT)


def test_the_embedding_splits_on_the_third_stages_first_odd_step() -> None:
    assert [split_step(scheduled) for scheduled in (1507, 1725, 232, 12)] == [1005, 1151, 155, 9]


def test_every_third_of_a_short_run_has_its_batch() -> None:
    for scheduled in (1, 2, 3, 4, 7, 100):
        h = short_schedule(num_scheduled_iterations=scheduled)
        units = [step_schedule(step, h).batch_tokens // h.batch_unit for step in range(h.total_iterations)]
        thirds = [round(scheduled / 3), round(2 * scheduled / 3)]
        assert units == [8 * (1 + sum(step >= third for third in thirds)) for step in range(scheduled)] + [24, 24]

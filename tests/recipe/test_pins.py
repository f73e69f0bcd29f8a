"""Numbers from outside: the public record's schedule, as its logs have it, and the starts of the
weights. An idea that changes the recipe fails here, and that is all right."""

import math

import pytest
import torch
from torch import Tensor

from common import U16
from train_gpt import GPT, Hyperparameters, make_plan, split_step

# By first step: batch in units of 16,384 tokens; in blocks of 128 tokens the document cut, short
# and long window, and the long window that YaRN has reached; peak of the rate; MTP weights and the
# prefix's at the stage's begin and end.
RECORD = {
    0: (8, 7, 1, 3, 3, 1.00, (1, 0.5, 0.25, 0.25), (1, 0.5, 0, 0.25)),
    455: (16, 16, 3, 7, 7, 1.52, (1, 0.5, 0.25), (1, 0, 0)),
    910: (24, 16, 5, 11, 11, 1.73, (1, 0), (1, 0)),
    1365: (24, 16, 6, 13, 13, 0.15, (1, 0), (1, 0)),  # the extension, at the cooldown's floor
    1375: (24, 16, 6, 20, 13, 0.15, (1, 0), (1, 0)),  # the final validation
}


def test_every_step_of_the_record_has_its_numbers() -> None:
    """The cooldown goes from step 546, 0.40 of 1365, to the floor of 0.15; the peak jumps on the way.
    Momentum rises over 300 steps and falls over the last 50."""
    h = Hyperparameters()
    exact = dict(rel=1e-14, abs=1e-14)  # a handful of fp64 operations on numbers below 2
    assert h.total_iterations == 1375 and split_step(1365) == 911
    for step, said in enumerate(make_plan(h)):
        begin = max(first for first in RECORD if first <= step)
        end = min((first for first in RECORD if first > step), default=1376)
        batch, *blocks, peak, first, last = RECORD[begin]
        done = (step - begin) / (end - begin)
        weights = [a + done * (b - a) for a, b in zip(first, last)]
        t = min(1, max(0, (step - 546) / 819))
        momentum = min(0.85 + 0.1 * step / 300, 0.95, 0.95 - 0.002 * (step - 1325))
        assert said[1:6] == (batch * 16384, *(128 * x for x in blocks)), step
        assert said.lr_factor == pytest.approx(peak * (1 - t) + 0.15 * t, **exact), step
        assert said.momentum == pytest.approx(momentum, **exact), step
        found = (*said.mtp_weights, said.prefix_weight)
        assert found == pytest.approx(tuple(weights), **exact), step


def assert_spread(x: Tensor, std: float, largest: float) -> None:
    """Five standard errors for mean and deviation; the largest within a twentieth, and bf16's step."""
    x = x.double().flatten()
    n = len(x)
    assert x.std().item() == pytest.approx(std, rel=5 / math.sqrt(2 * n) + U16)
    assert abs(x.mean().item()) <= 5 * std / math.sqrt(n)
    assert x.abs().max().item() >= 0.95 * largest * (1 - U16)


def test_weights_start_as_the_records() -> None:
    torch.manual_seed(0)
    sizes = dict(vocab_size=300, num_heads=4, head_dim=16, model_dim=64, bigram_rows=640)
    model = GPT(Hyperparameters(**sizes, val_batch_tokens=128, batch_unit=1, micro_batches=1))
    for uniform, bound in (
        *((part, math.sqrt(3) * 0.5 / 8) for part in (*model.attn.split(64, 1), model.mlp[:11, 0])),
        *((W1, 1 / 8) for W1 in model.mudd_W1),
    ):
        assert_spread(uniform, bound / math.sqrt(3), bound)
        assert uniform.abs().max() <= bound * (1 + U16)
    normal = [(model.lm_head, 0.005), *((part, 0.01) for part in model.value_embeds.split(64, 1))]
    for part, std in normal:
        assert_spread(part, std, 3 * std)  # a normal has tails
    assert torch.equal(model.embed, model.lm_head.T)
    zeros = ("bigram_embed", "smear_gate", "skip_gate", "attn_gate_bank", "ve_gate_bank")
    for x in (model.mlp[:, 1], *map(model.get_parameter, zeros)):
        assert not x.any()
    signs = model.bigram_signs
    assert (signs.abs() == 1).all() and abs(signs.float().mean()) <= 5 / math.sqrt(signs.numel())
    assert model.scalars.tolist() == [0.5, 1.0] * 11 + [0.0, -1.5]
    start = torch.tensor([1.1**0.5, 1.1**0.5, 1, 1, 0, 0.05, 0, 0, 0, 0])
    assert torch.equal(model.layer_lambdas, start.expand(11, 10))

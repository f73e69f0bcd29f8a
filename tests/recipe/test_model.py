"""The model is the naive one, with its gradients, in any dtype."""

import math

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import naive_model
import train_gpt
import triton_kernels
from common import TOLERANCE64, U16, U32, bits, int32, normal, random_batch, tiny_gpt, trunk
from train_gpt import (
    GPT, LAMBDAS, LAYERS, PARAM_TABLE, ForwardSchedule, Yarn, hash_bigrams, sign_rows,
)  # fmt: skip

F64 = torch.float64

# -----------------------------------------------------------------------------
# Bigrams

ROWS = {  # of a table: the published rows of three bigrams
    251_520: {(50256, 464): 19030, (464, 2068): 28927, (1, 0): 27191},
    754_560: {(50256, 464): 518492, (464, 2068): 28717, (1, 0): 27191},
    377_280: {(50256, 464): 143001, (464, 2068): 28822, (1, 0): 27191},
}


@pytest.mark.parametrize("rows", ROWS)
def test_bigram_has_its_published_row(rows: int) -> None:
    for bigram, row in ROWS[rows].items():
        found = hash_bigrams(int32(*bigram), rows)
        assert found.dtype == torch.int32 and found.tolist() == [rows - 1, row]
        assert naive_model.bigram_row([*bigram], 1, rows) == row


@pytest.mark.parametrize("rows", [2, 16_384, 251_520])
def test_every_uint16_token_has_a_row_and_only_position_0_the_last(rows: int) -> None:
    """Products of ids from 59,139 on are beyond 31 bits and wrap around; no row is negative."""
    random = (normal("tokens", (300,)).abs() * 20000).long().clamp(max=65535).tolist()
    tokens = [0, 65535, 65535, 59138, 59139, 0, 1, *random]
    found = hash_bigrams(int32(*tokens), rows).tolist()
    assert found == [naive_model.bigram_row(tokens, t, rows) for t in range(len(tokens))]
    assert found[0] == rows - 1 and all(0 <= row < rows - 1 for row in found[1:])
    assert hash_bigrams(int32(5), rows).tolist() == [rows - 1]


def test_sign_rows_tell_bigrams_apart_that_share_a_row() -> None:
    tokens = [7, 65535, 0, 8191, 8192, 8192, 3, 40000]
    expected = [naive_model.sign_row(tokens, t, 8192) for t in range(len(tokens))]
    assert sign_rows(int32(*tokens)).tolist() == expected
    assert sign_rows(int32(5)).tolist() == [0]
    first, second = int32(0, 1), int32(0, 28)  # both in row 0 of a table of two
    assert torch.equal(hash_bigrams(first, 2), hash_bigrams(second, 2))
    assert sign_rows(first)[1] != sign_rows(second)[1]


# -----------------------------------------------------------------------------
# Rotary positions and YaRN

POSITIONS = 200
# An angle, below 400, is a product of an fp32 frequency (a power, good to 4 roundings), rounded.
ANGLE = 2 * POSITIONS * 5 * U32


def angles(head_dim: int, positions: int) -> Tensor:
    """(positions, head_dim / 2), fp64."""
    freq = torch.tensor(naive_model.frequencies(head_dim), dtype=F64)
    return torch.arange(positions, dtype=F64)[:, None] * freq


@pytest.mark.parametrize("head_dim", [4, 128])
def test_table_holds_cosine_and_minus_sine(head_dim: int) -> None:
    yarn = Yarn(head_dim, POSITIONS, torch.float32)
    assert yarn.scale == 0.1
    assert yarn.table.shape == (2 * POSITIONS, head_dim // 2, 2)
    angle = angles(head_dim, 2 * POSITIONS)
    assert (yarn.table[..., 0].double() - angle.cos()).abs().max() <= ANGLE
    assert (yarn.table[..., 1].double() + angle.sin()).abs().max() <= ANGLE


def test_table_is_rounded_once_from_fp32() -> None:
    narrow = Yarn(16, POSITIONS, torch.bfloat16)
    wide = Yarn(16, POSITIONS, torch.float32)
    assert torch.equal(narrow.table, wide.table.bfloat16())
    assert torch.equal(narrow.float().table, wide.table)  # not widened from bf16


def test_extension_follows_yarn() -> None:
    scale = 0.4
    yarn = Yarn(32, POSITIONS, torch.float32, scale)
    freq = naive_model.frequencies(32)
    for a, b in ((3 * 128, 7 * 128), (7 * 128, 11 * 128), (11 * 128, 13 * 128)):
        yarn.extend(a, b)
        for j, f in enumerate(freq):
            w = min(1.0, max(0.0, (a * f / (2 * math.pi) - 1) / (32 - 1)))
            freq[j] = f * (a / b + w * (1 - a / b))
        scale *= 0.2 * math.log(b / a) + 1
        # Some ten fp32 roundings a change; w's slope in f, at most 1 + 32/31 relative, doubles
        # those of the change before.
        expected = torch.tensor(freq, dtype=F64)
        assert ((yarn.frequencies.double() - expected).abs() <= 100 * U32 * expected).all()
        assert yarn.scale == pytest.approx(scale, rel=1e-14)
        angle = torch.arange(2 * POSITIONS, dtype=torch.float32)[:, None] * yarn.frequencies
        assert torch.equal(yarn.table[..., 0], angle.cos())
        assert torch.equal(yarn.table[..., 1], -angle.sin())
    assert freq[0] == 1  # fast ones stay, slow ones stretch in full
    assert freq[7] == pytest.approx((3 / 13) / 1024)


# -----------------------------------------------------------------------------
# The whole model

T, STARTS, SHORT, LONG = 100, (0, 17, 18, 60), 16, 48
MTP = [1.0, 0.5, 0.2]
PREFIX = 0.25  # weight of the next token's prefix: of three tokens in four
PREFIXES = {token: token // 3 for token in range(120) if token % 4}
TABLE = [PREFIXES.get(token, -1) for token in range(120)]


def batch() -> tuple:
    prefix_weight = torch.tensor([PREFIX])
    schedule = ForwardSchedule(torch.tensor(MTP), SHORT, LONG, prefix_weight=prefix_weight)
    return *random_batch(T, 120, STARTS), schedule


def naive_hidden_states(
    model: GPT, params: dict[str, Tensor], inputs: Tensor, cu_seqlens: Tensor
) -> Tensor:
    """With the model's own frequencies, tested above: fp32 powers, off by 4 roundings in either."""
    windows = {"short": SHORT, "long": LONG}
    freq = model.yarn.frequencies.tolist()
    how = (train_gpt, model.num_heads, inputs, cu_seqlens, windows, freq, 0.1)
    return naive_model.hidden_states(params, *how)


def test_model_in_fp64_is_the_naive_model_with_its_gradients() -> None:
    """Four heads, so that pairing has two heads a position; no fp32 inside but the tables."""
    model = tiny_gpt(F64, num_heads=4, prefixes=TABLE)
    inputs, targets, cu_seqlens, schedule = batch()
    params = {x: param.detach().clone().requires_grad_() for x, param in model.named_parameters()}
    signs = {"bigram_signs": model.bigram_signs}
    hidden = naive_hidden_states(model, params | signs, inputs, cu_seqlens)
    found = trunk(model, inputs, cu_seqlens, schedule)
    assert (found - hidden).abs().max() <= 100 * TOLERANCE64

    logits = hidden @ params["lm_head"]
    expected = naive_model.training_loss(logits, targets, MTP, PREFIXES, PREFIX)
    loss = model(inputs, targets, cu_seqlens, schedule)
    assert loss.dtype == F64
    assert loss.item() == pytest.approx(expected.item(), rel=TOLERANCE64 + U32 * 0.1)
    loss.backward()
    expected.backward()
    for label, param in model.named_parameters():
        difference = (param.grad - params[label].grad).norm() / params[label].grad.norm()
        assert difference <= 1e-8, label  # MTP weights are fp32: 0.2 is off by up to 2⁻²⁴·0.2
    assert (model.mlp.grad[len(LAYERS) :] == 0).all()  # padding
    # Factors of attention where there is none, of all where MUDD has its own, α of paired layers.
    used = torch.ones(11, len(LAMBDAS) + 4, dtype=torch.bool)
    used[6, [0, 2, 4, 5]] = False
    used[10, : len(LAMBDAS)] = False
    used[[0, 2, 5, 6, 9], len(LAMBDAS) :] = False
    assert torch.equal(model.layer_lambdas.grad != 0, used)
    # MUDD's large offsets do not learn, and network 1 has five.
    fixed = [(row == 0).nonzero().flatten().tolist() for row in model.mudd_b.grad]
    assert fixed == [[6, 7, 8, 9, 12, 13], [1, *range(5, 14)]]


def test_evaluation_loss_is_the_mean_of_the_next_token() -> None:
    """In no FP8, and without prefixes."""
    model = tiny_gpt(F64, fp8_head=True, fp8_mlp=True, prefixes=TABLE).eval()
    inputs, targets, cu_seqlens, schedule = batch()
    logits = trunk(tiny_gpt(F64), inputs, cu_seqlens, schedule) @ model.lm_head
    expected = torch.nn.functional.cross_entropy(naive_model.softcap(logits), targets).item()
    loss = model(inputs, targets, cu_seqlens, schedule).item()
    assert loss == pytest.approx(expected, rel=TOLERANCE64)


# Roundings that a number meets along the residual stream: some ten a layer (mix, norm, matmuls,
# gate, sums), which are independent, so that their squares add: √120 ≈ 11 units.
ROUNDINGS = math.sqrt(11 * 10 + 10)
NARROW = {"bf16": (torch.bfloat16, torch.float32, U16), "fp32": (torch.float32, F64, U32)}


@pytest.mark.parametrize("kind", NARROW)
def test_narrow_model_is_the_wide_model_but_for_rounding(kind: str) -> None:
    narrow, wide, unit = NARROW[kind]
    small = tiny_gpt(narrow)
    large = tiny_gpt(wide)
    with torch.no_grad():
        for a, b in zip(large.parameters(), small.parameters()):
            a.copy_(b)  # the same numbers
    inputs, targets, cu_seqlens, schedule = batch()
    found = trunk(small, inputs, cu_seqlens, schedule).double()
    exact = trunk(large, inputs, cu_seqlens, schedule).double()
    assert (found - exact).norm() <= ROUNDINGS * unit * exact.norm()
    # A target's loss moves by at most twice the change of a logit z: that of the hidden state,
    # relative, times the logits, and one more rounding, times the softcap's largest slope.
    logits = exact @ large.lm_head.double()
    size = logits.square().mean().sqrt().item()
    change = 2 * (ROUNDINGS + 1) * unit * size * 23 / 7.5 / 4
    losses = [model(inputs, targets, cu_seqlens, schedule) for model in (small, large)]
    assert abs(losses[0].item() - losses[1].item()) <= T * sum(MTP) * change
    for loss in losses:
        loss.backward()
    for (label, a), b in zip(small.named_parameters(), large.parameters()):
        # Forwards and backwards, √2, a margin of two. A factor's gradient sums products of either
        # sign over tokens and dims; what a token's norms and weights are off by is common to its
        # dims, so it does not cancel as they do: √dim more. So for gates of whole tokens.
        factor = label in ("scalars", "layer_lambdas", "skip_gate") or "mudd" in label
        tolerance = 3 * ROUNDINGS * unit * (4 if factor else 1)
        difference = (a.grad.double() - b.grad.double()).norm()
        assert difference <= tolerance * b.grad.double().norm(), label


def test_more_slots_of_padding_change_no_bit() -> None:
    model = tiny_gpt()
    inputs, targets, cu_seqlens, schedule = batch()
    padded = torch.cat((cu_seqlens, torch.full((9,), T, dtype=torch.int32)))
    plain, more = (model(inputs, targets, starts, schedule) for starts in (cu_seqlens, padded))
    assert torch.equal(bits(plain), bits(more))


def test_every_parameter_has_a_gradient() -> None:
    model = tiny_gpt(torch.bfloat16, fp8_head=True, fp8_mlp=True)
    model(*batch()).backward()
    for label, param in model.named_parameters():
        assert param.grad.dtype == param.dtype, label
        assert param.grad.isfinite().all() and param.grad.any(), label


# -----------------------------------------------------------------------------
# Sizes


def test_vocabulary_is_padded_to_a_multiple_of_128() -> None:
    for vocab, padded in ((1, 128), (128, 128), (129, 256)):
        assert tiny_gpt(vocab_size=vocab).embed.size(0) == padded


# -----------------------------------------------------------------------------
# The record's size


def test_record_models_optimizer_fits_its_parameters(monkeypatch) -> None:
    """Steps 0 (NorMuon alone) and 1 (Adam too) in fake tensors: shapes without numbers."""
    monkeypatch.setattr(triton_kernels, "CPU_CACHE_ELEMENTS", 2**40)  # each parameter in one piece
    h = train_gpt.Hyperparameters()
    with FakeTensorMode():
        manager = train_gpt.TrainingManager(GPT(h), h)
        for now in train_gpt.make_plan(h)[:2]:
            manager.advance_schedule(now)
            for param in manager.model.parameters():
                param.grad = torch.empty_like(param)
            manager.step_optimizers(now)
    state = manager.optimizer.state
    assert state.keys() == PARAM_TABLE.keys() and not manager.optimizer.gradients()
    for label, param in manager.model.named_parameters():
        if "exp_avg" in state[label]:
            assert state[label]["exp_avg"].shape == param.shape, label
    assert state["attn"]["group_second_moment"].shape == (40, 3, 768)

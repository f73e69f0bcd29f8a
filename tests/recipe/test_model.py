"""The model is the naive one, for the tables that it has, in any dtype."""

import math
import resource
from collections import Counter

import pytest
import torch

import naive_model
import train_gpt
from common import TOLERANCE64, U16, U32, bits, close64, int32, normal, random_batch, tiny_gpt
from runtime.ranks import Ranks
from train_gpt import (
    GPT, LAYERS, PARAM_TABLE, SCALARS, ForwardSchedule, Hyperparameters, Layer, TrainingManager, Yarn, attention, hash_bigrams,
)  # fmt: skip
from attention import Band, band_bias, norm_and_rotate_qk, offset_keys

F64 = torch.float64

# One layer's attention


def run_attention(
    paired: bool, key_offset: bool, with_value: bool, window: int, T: int = 45, H: int = 4, D: int = 8
) -> tuple[torch.Tensor, torch.Tensor]:
    """(attention, the naive one), in fp64, on the same random weights."""
    dim = H * D
    x, W_qkv, W_o = (
        normal(name, shape).double() for name, shape in (("x", (T, dim)), ("W_qkv", (3 * dim, dim)), ("W_o", (dim, dim)))
    )
    gate = normal("gate", (H, 12)).double()
    value = normal("value", (T, H, D)).double() if with_value else None
    cu_seqlens = int32(0, 11, 12, 30, T, T)
    yarn = Yarn(D, 64, F64, 0.3)
    p = 2 if paired else 1
    band = Band(p * cu_seqlens, window, p * T, band_bias(p * cu_seqlens, p * T, window, F64))
    out = attention(x, W_qkv, W_o, gate, value, Layer("short", paired, key_offset), yarn, band)
    freq = naive_model.frequencies(D)
    return out, naive_model.layer_attention(x, W_qkv, W_o, gate, value, freq, 0.3, cu_seqlens, window, paired, key_offset)


@pytest.mark.parametrize("with_value", [False, True])
@pytest.mark.parametrize("window", [7, 33])
def test_paired_heads_are_two_positions_a_token(window: int, with_value: bool) -> None:
    # Tables are fp32: sines of two libraries may differ in the last bit.
    out, expected = run_attention(True, False, with_value, window)
    assert (out - expected).abs().max() <= 20 * U32 * expected.abs().max()


@pytest.mark.parametrize("with_value", [False, True])
@pytest.mark.parametrize("key_offset", [False, True])
def test_plain_heads_attend_as_the_formula_says(key_offset: bool, with_value: bool) -> None:
    out, expected = run_attention(False, key_offset, with_value, 20)
    assert (out - expected).abs().max() <= 20 * U32 * expected.abs().max()


def test_pairing_and_key_offset_matter() -> None:
    plain, paired, offset = (run_attention(p, o, False, 20)[0] for p, o in ((False, False), (True, False), (False, True)))
    assert (plain - paired).abs().max() > 0.01 and (plain - offset).abs().max() > 0.01


def test_key_offset_reads_unshifted_keys() -> None:
    """An overlapping in-place copy would spread the first key over all positions."""
    k = torch.arange(6.0).view(6, 1, 1).expand(6, 2, 8).clone()
    shifted = offset_keys(k)
    for dims, back in ((slice(0, 4), 0), (slice(4, 8), 1)):
        expected = [max(0, t - back) for t in range(6)]
        assert (shifted[:, :, dims] == torch.tensor(expected).view(6, 1, 1)).all()


@pytest.mark.parametrize("D", [4, 8, 128])
def test_keys_stay_where_they_are_in_the_dims_that_rotate(D: int) -> None:
    qkv, yarn = normal("qkv", (30, 6, D)).double(), Yarn(D, 64, F64)
    plain, offset = (norm_and_rotate_qk(qkv, yarn.table, False, key_offset) for key_offset in (False, True))
    assert torch.equal(offset[0], plain[0]) and torch.equal(offset[2], plain[2])  # q and v
    assert torch.equal(offset[1][..., : D // 2], plain[1][..., : D // 2])
    assert torch.equal(offset[1][1:, :, D // 2 :], plain[1][:-1, :, D // 2 :])
    assert torch.equal(offset[1][0], plain[1][0]) and not torch.equal(offset[1], plain[1])


# Bigrams

ROWS = {  # of a table: the published rows of three bigrams
    251_520: {(50256, 464): 19030, (464, 2068): 28927, (1, 0): 27191},
    754_560: {(50256, 464): 518492, (464, 2068): 28717, (1, 0): 27191},
    377_280: {(50256, 464): 143001, (464, 2068): 28822, (1, 0): 27191},
}


@pytest.mark.parametrize("rows", ROWS)
def test_a_bigrams_row_is_the_published_one(rows: int) -> None:
    for bigram, row in ROWS[rows].items():
        found = hash_bigrams(int32(*bigram), rows)
        assert found.dtype == torch.int32 and found.tolist() == [rows - 1, row]
        assert naive_model.bigram_row([*bigram], 1, rows) == row


@pytest.mark.parametrize("rows", [2, 7, 16_384, 251_520])
def test_every_token_of_16_bits_has_a_row_and_the_last_is_position_0s_alone(rows: int) -> None:
    """Products of ids from 59,139 on are beyond 31 bits and wrap around; the row is never negative."""
    tokens = [0, 65535, 65535, 59138, 59139, 0, 1, *(normal("tokens", (300,)).abs() * 20000).long().clamp(max=65535).tolist()]
    found = hash_bigrams(int32(*tokens), rows).tolist()
    assert found == [naive_model.bigram_row(tokens, t, rows) for t in range(len(tokens))]
    assert found[0] == rows - 1 and all(0 <= row < rows - 1 for row in found[1:])
    assert hash_bigrams(int32(5), rows).tolist() == [rows - 1]


def test_position_1_is_hashed_with_the_token_at_0() -> None:
    first, other = (hash_bigrams(int32(token, 9, 8), 251_520) for token in (3, 4))
    assert (first != other).tolist() == [False, True, False]


def test_gradients_reach_the_rows_that_were_looked_up_and_no_others() -> None:
    """Of bigrams: across the starts of documents too. Of value embeddings: all layers' parts of a token's row."""
    model = tiny_gpt(F64)
    inputs, targets, cu_seqlens, schedule = batch()
    model(inputs, targets, cu_seqlens, schedule).backward()
    tokens, rows = inputs.tolist(), len(model.bigram_embed)
    looked_up = {
        "bigram_embed": {naive_model.bigram_row(tokens, t, rows) for t in range(T)},
        "value_embeds": {*tokens},
        "embed": {*tokens},
    }
    assert len(looked_up["bigram_embed"]) > 0.8 * T and len(looked_up["bigram_embed"]) < rows / 2
    for label, expected in looked_up.items():
        grad = getattr(model, label).grad
        assert {*grad.any(1).nonzero().flatten().tolist()} == expected, label
    parts = model.value_embeds.grad[sorted(looked_up["value_embeds"])].split(model.model_dim, 1)
    assert len(parts) == 5 and all(part.any(1).all() for part in parts)


def test_without_its_factors_the_bigram_table_changes_nothing() -> None:
    """They are eleven, one a layer, and each one counts."""
    model, (inputs, _, cu_seqlens, schedule) = tiny_gpt(F64), batch()
    first = sum(len(values) for values in list(SCALARS.values())[: list(SCALARS).index("bigram_lambda")])
    factors = model.scalars.data[first : first + len(LAYERS)].zero_()
    hidden, table = model.hidden_states(inputs, cu_seqlens, schedule), model.bigram_embed.data.clone()
    model.bigram_embed.data.zero_()
    assert torch.equal(model.hidden_states(inputs, cu_seqlens, schedule), hidden)
    model.bigram_embed.data.copy_(table)
    for i in range(len(LAYERS)):
        factors.zero_()[i] = 0.5
        assert not torch.equal(model.hidden_states(inputs, cu_seqlens, schedule), hidden), i


# Rotary positions and YaRN

POSITIONS = 200


@pytest.mark.parametrize("head_dim", [4, 8, 16, 128])
def test_table_holds_cosine_and_minus_sine_of_position_times_frequency(head_dim: int) -> None:
    yarn = Yarn(head_dim, POSITIONS, torch.float32)
    assert yarn.scale == 0.1
    assert yarn.table.shape == (2 * POSITIONS, head_dim // 2, 2)
    angle = torch.arange(2 * POSITIONS, dtype=F64)[:, None] * torch.tensor(naive_model.frequencies(head_dim), dtype=F64)
    # The angle, below 400, is a product of an fp32 frequency (a power, good to 4 roundings) rounded once more.
    tolerance = 2 * POSITIONS * 5 * U32
    assert (yarn.table[..., 0].double() - angle.cos()).abs().max() <= tolerance
    assert (yarn.table[..., 1].double() + angle.sin()).abs().max() <= tolerance


def test_table_is_rounded_once_from_fp32() -> None:
    narrow, wide = Yarn(16, POSITIONS, torch.bfloat16), Yarn(16, POSITIONS, torch.float32)
    assert torch.equal(narrow.table, wide.table.bfloat16())
    assert torch.equal(narrow.float().table, wide.table)  # not widened from bf16


def turned(yarn: Yarn, x: torch.Tensor, paired: bool) -> torch.Tensor:
    """Heads x (T, H, D), normed and rotated: as q, and the same as k."""
    q, k, _ = norm_and_rotate_qk(torch.cat((x, x, x), 1), yarn.table, paired, False)
    assert torch.equal(q, k)
    return q


def test_rotation_turns_neighbouring_dims_clockwise() -> None:
    """y[2j] = c·x[2j] + s·x[2j+1], y[2j+1] = c·x[2j+1] − s·x[2j] of x normed; the second half of the head stays."""
    heads = normal("x", (POSITIONS, 4, 16)).double()
    x, y = naive_model.norm(heads), turned(Yarn(16, POSITIONS, F64), heads, paired=False)
    angle = torch.arange(POSITIONS, dtype=F64)[:, None, None] * torch.tensor(naive_model.frequencies(16), dtype=F64)
    c, s = angle.cos(), angle.sin()
    tolerance = 2 * POSITIONS * 5 * U32 * x.abs().max()
    assert (y[..., 0::2] - (c * x[..., 0::2] + s * x[..., 1::2])).abs().max() <= tolerance
    assert (y[..., 1::2] - (c * x[..., 1::2] - s * x[..., 0::2])).abs().max() <= tolerance
    assert close64(y[..., 8:], x[..., 8:])


def test_paired_rotation_is_plain_rotation_at_twice_the_positions() -> None:
    """Both kinds read one table: even heads at 2t, odd heads at 2t + 1."""
    yarn = Yarn(16, POSITIONS, F64)
    x = normal("x", (50, 4, 16)).double()
    spread = torch.zeros(100, 4, 16, dtype=F64)
    spread[0::2, 0::2], spread[1::2, 1::2] = x[:, 0::2], x[:, 1::2]
    plain = turned(yarn, spread, paired=False)
    expected = torch.empty_like(x)
    expected[:, 0::2], expected[:, 1::2] = plain[0::2, 0::2], plain[1::2, 1::2]
    assert torch.equal(turned(yarn, x, paired=True), expected)


@pytest.mark.parametrize("scale", [0.1, 0.4])
def test_extension_follows_yarn(scale: float) -> None:
    yarn = Yarn(32, POSITIONS, torch.float32, scale)
    freq = naive_model.frequencies(32)
    for a, b in ((3 * 128, 7 * 128), (7 * 128, 11 * 128), (11 * 128, 13 * 128)):
        yarn.extend(a, b)
        for j, f in enumerate(freq):
            w = min(1.0, max(0.0, (a * f / (2 * math.pi) - 1) / (32 - 1)))
            freq[j] = f * (a / b + w * (1 - a / b))
        scale *= 0.2 * math.log(b / a) + 1
        # Some ten fp32 roundings a change; w's slope in f, at most 1 + 32/31 relative, doubles those of the change before.
        expected = torch.tensor(freq, dtype=F64)
        assert ((yarn.frequencies.double() - expected).abs() <= 100 * U32 * expected).all()
        assert yarn.scale == pytest.approx(scale, rel=1e-14)
        angle = torch.arange(2 * POSITIONS, dtype=torch.float32)[:, None] * yarn.frequencies
        assert torch.equal(yarn.table[..., 0], angle.cos()) and torch.equal(yarn.table[..., 1], -angle.sin())
    assert freq[0] == 1 and freq[7] == pytest.approx((3 / 13) / 1024)  # fast ones stay, slow ones stretch in full


def test_model_extends_its_windows_by_yarn() -> None:
    model, yarn = tiny_gpt(), Yarn(8, 256, torch.float32)
    model.extend_windows(48, 112)
    yarn.extend(48, 112)
    assert torch.equal(model.yarn.table, yarn.table) and model.yarn.scale == yarn.scale


def test_the_attention_scale_is_a_setting() -> None:
    sizes = dict(vocab_size=128, num_heads=2, head_dim=8, model_dim=16, batch_unit=64, val_batch_tokens=1024, compile=False)
    for scale in (0.1, 0.4):
        h = Hyperparameters(**sizes, attention_scale=scale)
        assert train_gpt.build(h, Ranks(0, 1, torch.device("cpu"))).model.yarn.scale == scale


def test_yarn_state_comes_back_bit_for_bit() -> None:
    yarn = Yarn(16, POSITIONS, torch.bfloat16)
    saved, table = yarn.state(), yarn.table.clone()
    yarn.extend(48, 112)
    assert not torch.equal(yarn.table, table)
    yarn.load_state(saved)
    assert torch.equal(yarn.table, table) and yarn.scale == 0.1


# The whole model

T, STARTS, SHORT, LONG = 100, (0, 17, 18, 60), 16, 48
MTP = [1.0, 0.5, 0.2]


def batch(mtp: list[float] = MTP) -> tuple:
    return *random_batch(T, 120, STARTS), ForwardSchedule(torch.tensor(mtp), SHORT, LONG)


def naive_hidden_states(
    model: GPT, params: dict[str, torch.Tensor], inputs: torch.Tensor, cu_seqlens: torch.Tensor
) -> torch.Tensor:
    """With the model's own frequencies, which test_table_holds_… checks: fp32 powers, off by 4 roundings in either."""
    windows, freq = {"short": SHORT, "long": LONG}, model.yarn.frequencies.tolist()
    return naive_model.hidden_states(params, LAYERS, SCALARS, model.num_heads, inputs, cu_seqlens, windows, freq, 0.1)


def test_model_in_fp64_is_the_naive_model_with_its_gradients() -> None:
    """Four heads, so that pairing has two heads a position; no fp32 inside but the tables."""
    model = tiny_gpt(F64, num_heads=4)
    inputs, targets, cu_seqlens, schedule = batch()
    params = {label: param.detach().clone().requires_grad_() for label, param in model.named_parameters()}
    hidden = naive_hidden_states(model, params, inputs, cu_seqlens)
    assert (model.hidden_states(inputs, cu_seqlens, schedule) - hidden).abs().max() <= 100 * TOLERANCE64

    expected = naive_model.training_loss(hidden @ params["lm_head"], targets, MTP)
    loss = model(inputs, targets, cu_seqlens, schedule)
    assert loss.dtype == F64 and loss.item() == pytest.approx(expected.item(), rel=TOLERANCE64 + U32 * 0.1)
    loss.backward()
    expected.backward()
    for label, param in model.named_parameters():
        difference = (param.grad - params[label].grad).norm() / params[label].grad.norm()
        assert difference <= 1e-8, label  # MTP weights are fp32: 0.2 is off by up to 2⁻²⁴·0.2 of a loss of 1.7
    assert (model.mlp.grad[len(LAYERS) :] == 0).all()  # padding


def test_training_loss_is_the_sum_over_tokens_and_targets_that_exist() -> None:
    model = tiny_gpt(F64)
    for mtp in ([1.0], [1.0, 0.25], [1.0, 0.5, 0.125]):
        inputs, targets, cu_seqlens, schedule = batch(mtp)
        logits = model.hidden_states(inputs, cu_seqlens, schedule) @ model.lm_head
        expected = naive_model.training_loss(logits, targets, mtp)
        assert model(inputs, targets, cu_seqlens, schedule).item() == pytest.approx(expected.item(), rel=TOLERANCE64)


def test_training_loss_of_three_tokens_drops_what_lies_beyond() -> None:
    """T = 3 and three targets a token: 3 + 2 + 1 terms."""
    model = tiny_gpt(F64)
    inputs, targets, cu_seqlens = random_batch(3, 120, (0,))
    schedule = ForwardSchedule(torch.tensor([1.0, 0.5, 0.25]), SHORT, LONG)
    log_probs = torch.log_softmax(naive_model.softcap(model.hidden_states(inputs, cu_seqlens, schedule) @ model.lm_head), -1)
    a, b, c = targets.tolist()
    terms = [
        log_probs[0, a],
        log_probs[1, b],
        log_probs[2, c],
        0.5 * log_probs[0, b],
        0.5 * log_probs[1, c],
        0.25 * log_probs[0, c],
    ]
    assert model(inputs, targets, cu_seqlens, schedule).item() == pytest.approx(-sum(terms).item(), rel=TOLERANCE64)


def test_evaluation_loss_is_the_mean_of_the_next_token() -> None:
    model = tiny_gpt(F64, fp8_head=True).eval()
    inputs, targets, cu_seqlens, schedule = batch()
    logits = model.hidden_states(inputs, cu_seqlens, schedule) @ model.lm_head
    expected = torch.nn.functional.cross_entropy(naive_model.softcap(logits), targets)
    assert model(inputs, targets, cu_seqlens, schedule).item() == pytest.approx(expected.item(), rel=TOLERANCE64)


def test_losses_are_fp32_or_better_in_every_dtype() -> None:
    for dtype, expected in ((torch.bfloat16, torch.float32), (torch.float32, torch.float32), (F64, F64)):
        model = tiny_gpt(dtype)
        assert model(*batch()).dtype == expected and model.eval()(*batch()).dtype == expected


# Roundings that a number meets along the residual stream: per layer some ten (mix, norm, products, gate, sums), which
# are independent, so that their squares add: √120 ≈ 11 units.
ROUNDINGS = math.sqrt(11 * 10 + 10)


@pytest.mark.parametrize(
    "narrow, wide, unit", [(torch.bfloat16, torch.float32, U16), (torch.float32, F64, U32)], ids=["bf16", "fp32"]
)
def test_narrow_model_is_the_wide_model_but_for_rounding(narrow: torch.dtype, wide: torch.dtype, unit: float) -> None:
    small, large = tiny_gpt(narrow), tiny_gpt(wide)
    with torch.no_grad():
        for a, b in zip(large.parameters(), small.parameters()):
            a.copy_(b)  # the same numbers
    inputs, targets, cu_seqlens, schedule = batch()
    hidden = [model.hidden_states(inputs, cu_seqlens, schedule).double() for model in (small, large)]
    assert (hidden[0] - hidden[1]).norm() <= ROUNDINGS * unit * hidden[1].norm()
    # A target's loss moves by at most twice the change of a logit z: that of the hidden state, relative, times the logits,
    # and one more rounding, times the softcap's largest slope.
    logits = hidden[1] @ large.lm_head.double()
    change = 2 * (ROUNDINGS + 1) * unit * logits.square().mean().sqrt().item() * 23 / 7.5 / 4
    losses = [model(inputs, targets, cu_seqlens, schedule) for model in (small, large)]
    assert abs(losses[0].item() - losses[1].item()) <= T * sum(MTP) * change
    for loss in losses:
        loss.backward()
    for (label, a), b in zip(small.named_parameters(), large.parameters()):
        # Forwards and backwards, √2, a margin of two. A scalar's gradient sums products of either sign over tokens and dims;
        # what a token's norms and weights are off by is common to its dims, so it does not cancel as they do: √dim more.
        tolerance = 3 * ROUNDINGS * unit * (4 if label in ("scalars", "x0_lambdas") else 1)
        assert (a.grad.double() - b.grad.double()).norm() <= tolerance * b.grad.double().norm(), label


def test_documents_are_ended_by_padding_alone() -> None:
    """More slots of padding, of no length, change no bit."""
    model = tiny_gpt()
    inputs, targets, cu_seqlens, schedule = batch()
    padded = torch.cat((cu_seqlens, torch.full((9,), T, dtype=torch.int32)))
    losses = [model(inputs, targets, starts, schedule) for starts in (cu_seqlens, padded)]
    assert torch.equal(bits(losses[0]), bits(losses[1]))


def test_every_parameter_has_a_gradient() -> None:
    model = tiny_gpt(torch.bfloat16, fp8_head=True)
    model(*batch()).backward()
    for label, param in model.named_parameters():
        assert param.grad.dtype == param.dtype and param.grad.isfinite().all() and param.grad.abs().sum() > 0, label


# Sizes and starting values


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(num_layers=len(LAYERS) + 1), f"num_layers={len(LAYERS) + 1}"),
        (dict(num_layers=len(LAYERS) - 1), f"num_layers={len(LAYERS) - 1}"),
        (dict(num_heads=3, model_dim=48), "num_heads=3"),
        (dict(head_dim=18, model_dim=36), "head_dim=18"),
        (dict(model_dim=48), "model_dim=48"),
        (dict(head_dim=4, model_dim=8), "model_dim=8"),
    ],
)
def test_impossible_sizes_are_refused_by_number(change: dict, message: str) -> None:
    sizes = dict(vocab_size=128, num_layers=len(LAYERS), num_heads=2, head_dim=16, model_dim=32, max_tokens=64) | change
    with pytest.raises(ValueError, match=message):
        GPT(**sizes)


def test_every_parameter_knows_its_row_of_the_table() -> None:
    labels = {label: param.label for label, param in tiny_gpt().named_parameters()}
    assert labels == {label: label for label in PARAM_TABLE}


def test_vocabulary_is_padded_to_a_multiple_of_128() -> None:
    for vocab, padded in ((1, 128), (128, 128), (129, 256)):
        assert tiny_gpt(vocab_size=vocab).embed.size(0) == padded


# The record's size


def bit_sums(model: GPT) -> dict[str, int]:
    """A cheap witness that a parameter has changed, without a copy: the sum of its bytes, eight at a time."""
    sums = {}
    for label, param in model.named_parameters():
        octets = bits(param)
        eights, rest = octets.split((len(octets) // 8 * 8, len(octets) % 8))
        sums[label] = eights.view(torch.int64).sum().item() + rest.sum().item()
    return sums


def record_steps(rank: int, world_size: int) -> dict:
    """Step 0 (NorMuon alone) and step 1 (Adam too) of the record preset's model on a batch of two documents, 16 tokens in all.

    Matrices are orthogonalised one by one, each alike: two of each shape are enough for a test, the others stay as they are. So
    are a third of the vocabulary and a fifth of the bigram table, which would be nine tenths of the memory.
    """
    torch.manual_seed(0)
    T = 16
    polar_express, orthogonal = train_gpt.polar_express, Counter()

    def polar_express_of_two(G: torch.Tensor) -> torch.Tensor:
        more = 2 - orthogonal[G.shape[1:]]
        orthogonal[G.shape[1:]] += len(G)
        return torch.cat((polar_express(G[:more]), G[more:].bfloat16())) if more > 0 else G.bfloat16()

    train_gpt.polar_express = polar_express_of_two
    h = Hyperparameters()
    vocab_size = h.vocab_size // 3
    sizes = (vocab_size, len(LAYERS), h.num_heads, h.head_dim, h.model_dim, 2048)
    model = GPT(*sizes, bigram_rows=h.bigram_rows // 5, fp8_head=True)
    manager = TrainingManager(model, h)
    inputs, targets, cu_seqlens = random_batch(T, vocab_size, (0, 12))
    losses, moved, before = [], [], bit_sums(model)
    for step in range(2):
        manager.advance_schedule(step)
        loss = model(inputs, targets, cu_seqlens, manager.forward_schedule())
        loss.backward()
        manager.step_optimizers(step)
        losses.append(loss.item())
        before, moved_from = bit_sums(model), before
        moved.append({label for label in before if before[label] != moved_from[label]})
    # The head starts near zero, so logits are within a few tenths and the first loss is that of chance, ln(vocab), a target.
    weights = train_gpt.step_schedule(0, h).mtp_weights
    return dict(
        chance=sum(w * (T - k) for k, w in enumerate(weights)) * math.log(model.embed.size(0)),
        losses=losses,
        moved=moved,
        finite=all(p.abs().amax().isfinite().item() for p in model.parameters()),  # a NaN is the largest
        peak_gib=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
    )


def test_record_model_takes_its_first_steps_on_a_cpu(run_ranks) -> None:
    (run,) = run_ranks(1, record_steps)
    assert run["losses"][0] == pytest.approx(run["chance"], rel=0.02)
    assert math.isfinite(run["losses"][1]) and run["finite"]
    assert run["moved"][0] == {label for label, row in PARAM_TABLE.items() if row.every_step}
    # Bigrams, gates and x0_lambdas start at zero: a gate of what is zero has no gradient yet. The rest moves.
    assert {"attn", "mlp", "lm_head", "embed", "scalars", "value_embeds", "bigram_embed"} <= run["moved"][1]
    assert run["peak_gib"] < 8

"""The model is the one that design.md describes, in any dtype."""

import math
import resource
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import slow
import train_gpt
from common import U16, U32, det, random_batch, tiny_gpt
from train_gpt import GPT, Attention, ForwardSchedule, Hyperparameters, Ranks, TrainingManager, Yarn, norm
from triton_kernels import Band, attend, band_bias, relu_squared_mlp

F64 = torch.float64

# fp64 sums of at most some thousand terms of size one, through eleven layers at most: 1e-12 leaves a factor of a thousand over
# 2⁻⁵³, and is far below anything that a wrong term or a detour through fp32 (2⁻²⁴) would leave.
TOLERANCE64 = 1e-12


def close64(a: torch.Tensor, b: torch.Tensor) -> bool:
    """a equals b but for fp64's rounding, by the largest element."""
    return a.dtype == b.dtype == F64 and (a - b).abs().max().item() <= TOLERANCE64 * max(1.0, b.abs().max().item())


# Attention within documents and a window


def banded(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor, window: int, scale: float = 0.3
) -> torch.Tensor:
    return attend(q, k, v, Band(cu_seqlens, window, len(q), band_bias(cu_seqlens, len(q), window, q.dtype)), scale)


def qkv(length: int, heads: int = 2, dim: int = 4, dtype: torch.dtype = F64) -> list[torch.Tensor]:
    return [det(name, (length, heads, dim)).to(dtype).requires_grad_() for name in "qkv"]


def int32(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def assert_equals_masked_softmax(length: int, window: int, cu_seqlens: torch.Tensor) -> None:
    q, k, v = qkv(length)
    out, expected = banded(q, k, v, cu_seqlens, window), slow.attention(q, k, v, slow.mask(cu_seqlens, length, window), 0.3)
    assert close64(out, expected)
    direction = det("direction", tuple(out.shape)).double()
    gradients = [torch.autograd.grad((y * direction).sum(), (q, k, v)) for y in (out, expected)]
    for gradient, expected_gradient in zip(*gradients):
        assert close64(gradient, expected_gradient)


@pytest.mark.parametrize("window", [0, 1, 31, 32, 33, 64, 65, 127, 128, 500])
@pytest.mark.parametrize("length", [1, 63, 130])
def test_banded_attention_equals_masked_softmax_for_any_window(length: int, window: int) -> None:
    assert_equals_masked_softmax(length, window, int32(0, length // 3, length, length))


@pytest.mark.parametrize(
    "starts",
    [(0,), (0, 1, 2, 3), (0, 31, 32, 33), (0, 64, 128, 149), (0, 0, 0, 40), (0, 7, 7, 7, 90), (0, 100, 150, 150, 150)],
    ids=str,
)
def test_banded_attention_equals_masked_softmax_for_any_documents(starts: tuple[int, ...]) -> None:
    """Documents begin on, before and after block borders; documents of no length and padding change nothing."""
    for window in (20, 70):
        assert_equals_masked_softmax(150, window, int32(*starts, 150))


@settings(max_examples=40)
@given(data=st.data(), length=st.integers(1, 140), window=st.integers(0, 200))
def test_banded_attention_equals_masked_softmax(data: st.DataObject, length: int, window: int) -> None:
    starts = data.draw(st.lists(st.integers(0, length), max_size=6).map(sorted))
    assert_equals_masked_softmax(length, window, int32(0, *starts, length))


@settings(max_examples=10)
@given(starts=st.lists(st.integers(0, 60), max_size=5).map(sorted), window=st.integers(0, 130))
def test_banded_attention_takes_doubled_positions(starts: list[int], window: int) -> None:
    assert_equals_masked_softmax(120, window, 2 * int32(0, *starts, 60))


def test_banded_attention_computes_bf16_in_fp32_and_rounds_once() -> None:
    q, k, v = qkv(130, dtype=torch.bfloat16)
    cu_seqlens = int32(0, 50, 130)
    bias = band_bias(cu_seqlens, 130, 40, torch.float32)
    out = attend(q, k, v, Band(cu_seqlens, 40, 130, bias), 0.3)
    exact = slow.attention(q.double(), k.double(), v.double(), slow.mask(cu_seqlens, 130, 40), 0.3)
    assert out.dtype == torch.bfloat16
    # one rounding to bf16, and fp32 sums over 41 keys and 4 dims of numbers below max |v|
    assert ((out.double() - exact).abs() <= U16 * exact.abs() + 100 * U32 * v.abs().max()).all()


def test_nothing_flows_between_documents() -> None:
    q, k, v = qkv(150)
    borders = [0, 1, 40, 64, 100, 150]
    out = banded(q, k, v, int32(*borders, 150), 1000)
    for first, last in zip(borders, borders[1:]):
        for gradient in torch.autograd.grad(out[first:last].sum(), (q, k, v), retain_graph=True):
            touched = gradient.abs().sum((1, 2)).nonzero().flatten()
            assert ((first <= touched) & (touched < last)).all() and (len(touched) or last - first == 1)


@pytest.mark.parametrize("window", [0, 1, 5, 32, 63, 64, 65])
def test_query_sees_exactly_window_positions_back(window: int) -> None:
    q, k, v = qkv(140)
    out = banded(q, k, v, int32(0, 140), window)
    for t in (0, 1, 31, 32, 64, 65, 130, 139):
        (gradient,) = torch.autograd.grad(out[t].sum(), v, retain_graph=True)
        seen = gradient.abs().sum((1, 2)).nonzero().flatten().tolist()
        assert seen == list(range(max(0, t - window), t + 1))


def test_banded_attention_passes_gradcheck() -> None:
    cu_seqlens = int32(0, 13, 36)
    assert torch.autograd.gradcheck(lambda q, k, v: banded(q, k, v, cu_seqlens, 9), qkv(36, 2, 2))


# One layer's attention


def run_attention(
    paired: bool, key_offset: bool, with_value: bool, window: int, T: int = 45, H: int = 4, D: int = 8
) -> tuple[torch.Tensor, torch.Tensor]:
    """(Attention, the slow one), in fp64, on the same random weights."""
    dim = H * D
    x, W_qkv, W_o = (
        det(name, shape).double() for name, shape in (("x", (T, dim)), ("W_qkv", (3 * dim, dim)), ("W_o", (dim, dim)))
    )
    gate = det("gate", (H, 12)).double()
    value = det("value", (T, H, D)).double() if with_value else None
    cu_seqlens = int32(0, 11, 12, 30, T, T)
    yarn = Yarn(D, 64, F64, 0.3)
    p = 2 if paired else 1
    band = Band(p * cu_seqlens, window, p * T, band_bias(p * cu_seqlens, p * T, window, F64))
    out = Attention(H, D, paired, key_offset)(x, W_qkv, W_o, gate, value, yarn, band)
    return out, slow.layer_attention(
        x, W_qkv, W_o, gate, value, slow.frequencies(D), 0.3, cu_seqlens, window, paired, key_offset
    )


@pytest.mark.parametrize("with_value", [False, True])
@pytest.mark.parametrize("window", [7, 33])
def test_paired_heads_are_two_positions_a_token(window: int, with_value: bool) -> None:
    # Tables are fp32: sines of two libraries may differ in the last bit.
    out, expected = run_attention(True, False, with_value, window)
    assert (out - expected).abs().max() <= 20 * U32 * expected.abs().max()


@pytest.mark.parametrize("with_value", [False, True])
@pytest.mark.parametrize("key_offset", [False, True])
def test_plain_heads_attend_as_designed(key_offset: bool, with_value: bool) -> None:
    out, expected = run_attention(False, key_offset, with_value, 20)
    assert (out - expected).abs().max() <= 20 * U32 * expected.abs().max()


def test_pairing_and_key_offset_matter() -> None:
    plain, paired, offset = (run_attention(p, o, False, 20)[0] for p, o in ((False, False), (True, False), (False, True)))
    assert (plain - paired).abs().max() > 0.01 and (plain - offset).abs().max() > 0.01


def test_key_offset_reads_unshifted_keys() -> None:
    """An overlapping in-place copy would spread the first key over all positions."""
    k = torch.arange(6.0).view(6, 1, 1).expand(6, 2, 8).clone()
    shifted = Attention(2, 8, False, True)._offset(k)
    for dims, back in ((slice(0, 2), 0), (slice(2, 4), 1), (slice(4, 6), 0), (slice(6, 8), 1)):
        expected = [max(0, t - back) for t in range(6)]
        assert (shifted[:, :, dims] == torch.tensor(expected).view(6, 1, 1)).all()


# Rotary positions and YaRN

POSITIONS = 200


@pytest.mark.parametrize("head_dim", [4, 8, 16, 128])
def test_table_holds_cosine_and_minus_sine_of_position_times_frequency(head_dim: int) -> None:
    yarn = Yarn(head_dim, POSITIONS, torch.float32)
    assert yarn.scale == 0.1
    assert yarn.table.shape == (2 * POSITIONS, head_dim // 2, 2)
    angle = torch.arange(2 * POSITIONS, dtype=F64)[:, None] * torch.tensor(slow.frequencies(head_dim), dtype=F64)
    # The angle, below 400, is a product of an fp32 frequency (a power, good to 4 roundings) rounded once more.
    tolerance = 2 * POSITIONS * 5 * U32
    assert (yarn.table[..., 0].double() - angle.cos()).abs().max() <= tolerance
    assert (yarn.table[..., 1].double() + angle.sin()).abs().max() <= tolerance


def test_table_is_rounded_once_from_fp32() -> None:
    narrow, wide = Yarn(16, POSITIONS, torch.bfloat16), Yarn(16, POSITIONS, torch.float32)
    assert torch.equal(narrow.table, wide.table.bfloat16())
    assert torch.equal(narrow.float().table, wide.table)  # not widened from bf16


def test_rotation_turns_neighbouring_dims_clockwise() -> None:
    """y[2j] = c·x[2j] + s·x[2j+1], y[2j+1] = c·x[2j+1] − s·x[2j]; the second half of the head stays."""
    x = det("x", (POSITIONS, 4, 16)).double()
    y = Yarn(16, POSITIONS, F64).rotate(x, paired=False)
    angle = torch.arange(POSITIONS, dtype=F64)[:, None, None] * torch.tensor(slow.frequencies(16), dtype=F64)
    c, s = angle.cos(), angle.sin()
    tolerance = 2 * POSITIONS * 5 * U32 * x.abs().max()
    assert (y[..., 0::2] - (c * x[..., 0::2] + s * x[..., 1::2])).abs().max() <= tolerance
    assert (y[..., 1::2] - (c * x[..., 1::2] - s * x[..., 0::2])).abs().max() <= tolerance
    assert torch.equal(y[..., 8:], x[..., 8:])


def test_paired_rotation_is_plain_rotation_at_twice_the_positions() -> None:
    """Both kinds read one table: even heads at 2t, odd heads at 2t + 1."""
    yarn = Yarn(16, POSITIONS, F64)
    x = det("x", (50, 4, 16)).double()
    spread = torch.zeros(100, 4, 16, dtype=F64)
    spread[0::2, 0::2], spread[1::2, 1::2] = x[:, 0::2], x[:, 1::2]
    turned = yarn.rotate(spread, paired=False)
    expected = torch.empty_like(x)
    expected[:, 0::2], expected[:, 1::2] = turned[0::2, 0::2], turned[1::2, 1::2]
    assert torch.equal(yarn.rotate(x, paired=True), expected)


def test_bf16_rotation_equals_fp32_rotation_but_for_rounding() -> None:
    """The bf16 formula (real and imaginary parts) and the fp32 one (complex product) are one function."""
    x = det("x", (50, 4, 16)).bfloat16()
    narrow, wide = Yarn(16, POSITIONS, torch.bfloat16), Yarn(16, POSITIONS, torch.float32)
    for paired in (False, True):
        difference = narrow.rotate(x, paired).float() - wide.rotate(x.float(), paired)
        # c and s rounded, each product rounded, their sum rounded: 3 roundings of numbers below |x[2j]| + |x[2j+1]|
        bound = x.float().abs().unflatten(-1, (-1, 2)).sum(-1, keepdim=True).expand(-1, -1, -1, 2).flatten(-2)
        assert (difference.abs() <= 3.1 * U16 * bound).all()


@pytest.mark.parametrize("scale", [0.1, 0.4])
def test_extension_follows_yarn(scale: float) -> None:
    yarn = Yarn(32, POSITIONS, torch.float32, scale)
    freq = slow.frequencies(32)
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
    sizes = dict(vocab_size=128, num_heads=2, head_dim=8, model_dim=16, batch_unit=64, val_batch_tokens=1024)
    for changes, scale in (({}, 0.1), (dict(attention_scale=0.4), 0.4)):
        model, _ = train_gpt.build(Hyperparameters(**sizes, **changes, compile=False), Ranks(0, 1, torch.device("cpu")))
        assert model.yarn.scale == scale


def test_yarn_state_comes_back_bit_for_bit() -> None:
    yarn = Yarn(16, POSITIONS, torch.bfloat16)
    saved, table = yarn.state(), yarn.table.clone()
    yarn.extend(48, 112)
    assert not torch.equal(yarn.table, table)
    yarn.load_state(saved)
    assert torch.equal(yarn.table, table) and yarn.scale == 0.1


# Functions with a backward of their own


def test_norm_passes_gradcheck() -> None:
    x = det("x", (5, 3, 8)).double().requires_grad_()
    assert torch.autograd.gradcheck(norm, x)
    assert close64(norm(x), slow.norm(x))


def test_norm_passes_gradcheck_near_zero() -> None:
    """Where the epsilon counts: a mean square like it, and zero itself."""
    for scale in (2.0**-12, 0.0):
        x = (det("x", (3, 8)).double() * scale).requires_grad_()
        # Steps small against |x|; values are of the size of 1/√ε ≈ 3e3 times x.
        assert torch.autograd.gradcheck(norm, x, eps=1e-8, atol=1e-3, rtol=1e-6)


def test_norm_of_bf16_is_fp32_rounded_once() -> None:
    x = det("x", (50, 16)).bfloat16()
    exact = slow.norm(x.double())
    assert norm(x).dtype == torch.bfloat16
    assert ((norm(x).double() - exact).abs() <= (U16 + 20 * U32) * exact.abs()).all()


@pytest.mark.parametrize("paired", [False, True])
def test_rotation_passes_gradcheck(paired: bool) -> None:
    yarn = Yarn(8, 16, F64)
    x = det("x", (5, 2, 8)).double().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: yarn.rotate(x, paired), x)


def test_mlp_passes_gradcheck() -> None:
    x, W_fc, W_proj = (
        det(name, shape).double().requires_grad_() for name, shape in (("x", (5, 4)), ("fc", (9, 4)), ("proj", (9, 4)))
    )
    assert torch.autograd.gradcheck(relu_squared_mlp, (x, W_fc, W_proj))
    assert close64(relu_squared_mlp(x, W_fc, W_proj), torch.relu(x @ W_fc.T) ** 2 @ W_proj)


# The whole model

T, STARTS, SHORT, LONG = 100, (0, 17, 18, 60), 16, 48
MTP = [1.0, 0.5, 0.2]


def batch(mtp: list[float] = MTP) -> tuple:
    return *random_batch(T, 120, STARTS), ForwardSchedule(torch.tensor(mtp), SHORT, LONG)


def parameters64(model: GPT) -> dict[str, torch.Tensor]:
    return {label: param.detach().double().requires_grad_() for label, param in model.named_parameters()}


def test_model_in_fp64_is_the_slow_model_with_its_gradients() -> None:
    """Four heads, so that pairing has two heads a position; no fp32 inside but the tables."""
    model = tiny_gpt(F64, num_heads=4)
    inputs, targets, cu_seqlens, schedule = batch()
    params = parameters64(model)
    # The frequencies are fp32 powers of 1/1024, off by 4 roundings in either: the slow model takes these very numbers, which
    # test_table_holds_… checks, so that fp64's rounding alone remains.
    freq = model.yarn.frequencies.tolist()
    hidden = slow.hidden_states(params, 4, inputs, cu_seqlens, SHORT, LONG, freq, 0.1)
    assert (model.hidden_states(inputs, cu_seqlens, schedule) - hidden).abs().max() <= 100 * TOLERANCE64

    expected = slow.training_loss(hidden @ params["lm_head"], targets, MTP)
    loss = model(inputs, targets, cu_seqlens, schedule)
    assert loss.dtype == F64 and loss.item() == pytest.approx(expected.item(), rel=TOLERANCE64 + U32 * 0.1)
    loss.backward()
    expected.backward()
    for label, param in model.named_parameters():
        difference = (param.grad - params[label].grad).norm() / params[label].grad.norm()
        assert difference <= 1e-8, label  # MTP weights are fp32: 0.2 is off by up to 2⁻²⁴·0.2 of a loss of 1.7
    assert params["mlp"].grad[11].abs().sum() == 0 and model.mlp.grad[11].abs().sum() == 0  # padding


def test_training_loss_is_the_sum_over_tokens_and_targets_that_exist() -> None:
    model = tiny_gpt(F64)
    for mtp in ([1.0], [1.0, 0.25], [1.0, 0.5, 0.125]):
        inputs, targets, cu_seqlens, schedule = batch(mtp)
        logits = model.hidden_states(inputs, cu_seqlens, schedule) @ model.lm_head
        expected = slow.training_loss(logits, targets, mtp)
        assert model(inputs, targets, cu_seqlens, schedule).item() == pytest.approx(expected.item(), rel=TOLERANCE64)


def test_training_loss_of_three_tokens_drops_what_lies_beyond() -> None:
    """T = 3 and three targets a token: 3 + 2 + 1 terms."""
    model = tiny_gpt(F64)
    inputs, targets, cu_seqlens = random_batch(3, 120, (0,))
    schedule = ForwardSchedule(torch.tensor([1.0, 0.5, 0.25]), SHORT, LONG)
    log_probs = torch.log_softmax(slow.softcap(model.hidden_states(inputs, cu_seqlens, schedule) @ model.lm_head), -1)
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
    expected = torch.nn.functional.cross_entropy(slow.softcap(logits), targets)
    assert model(inputs, targets, cu_seqlens, schedule).item() == pytest.approx(expected.item(), rel=TOLERANCE64)


def test_losses_are_fp32_or_better_in_every_dtype() -> None:
    for dtype, expected in ((torch.bfloat16, torch.float32), (torch.float32, torch.float32), (F64, F64)):
        model = tiny_gpt(dtype)
        assert model(*batch()).dtype == expected and model.eval()(*batch()).dtype == expected


# Roundings that a number meets on its way along the residual stream: per layer some ten (mix, norm, products, gate, sums), which
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
    # A target's loss moves by at most twice the change of a logit z: that of the hidden state, relative, times the logits' size,
    # and one more rounding, times the softcap's largest slope.
    logits = hidden[1] @ large.lm_head.double()
    change = 2 * (ROUNDINGS + 1) * unit * logits.square().mean().sqrt().item() * 23 / 7.5 / 4
    losses = [model(inputs, targets, cu_seqlens, schedule) for model in (small, large)]
    assert abs(losses[0].item() - losses[1].item()) <= T * sum(MTP) * change
    for loss in losses:
        loss.backward()
    for (label, a), b in zip(small.named_parameters(), large.parameters()):
        # Forwards and backwards, √2, and a margin of two. A scalar's gradient sums products of either sign over tokens and dims;
        # what a token's norms and weights are off by is common to its dims, so it does not cancel as they do: √dim more.
        tolerance = 3 * ROUNDINGS * unit * (4 if label in ("scalars", "x0_lambdas") else 1)
        assert (a.grad.double() - b.grad.double()).norm() <= tolerance * b.grad.double().norm(), label


def test_documents_are_ended_by_padding_alone() -> None:
    """More slots of padding, of no length, change no bit."""
    model = tiny_gpt()
    inputs, targets, cu_seqlens, schedule = batch()
    padded = torch.cat((cu_seqlens, torch.full((9,), T, dtype=torch.int32)))
    assert torch.equal(model(inputs, targets, cu_seqlens, schedule), model(inputs, targets, padded, schedule))


def test_every_parameter_has_a_gradient() -> None:
    model = tiny_gpt(torch.bfloat16, fp8_head=True)
    model(*batch()).backward()
    for label, param in model.named_parameters():
        assert param.grad.dtype == param.dtype and param.grad.isfinite().all() and param.grad.abs().sum() > 0, label


# Sizes and starting values


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(num_layers=12), "num_layers=12"),
        (dict(num_layers=10), "num_layers=10"),
        (dict(num_heads=3, model_dim=48), "num_heads=3"),
        (dict(head_dim=18, model_dim=36), "head_dim=18"),
        (dict(model_dim=48), "model_dim=48"),
        (dict(head_dim=4, model_dim=8), "model_dim=8"),
    ],
)
def test_impossible_sizes_are_refused_by_number(change: dict, message: str) -> None:
    sizes = dict(vocab_size=128, num_layers=11, num_heads=2, head_dim=16, model_dim=32, max_seq_len=64) | change
    with pytest.raises(ValueError, match=message):
        GPT(**sizes)


@pytest.fixture(scope="module")
def fresh() -> GPT:
    torch.manual_seed(0)
    return GPT(300, 11, 4, 16, 64, 128)


def test_parameters_have_their_shapes_dtypes_and_labels(fresh: GPT) -> None:
    bf16, fp32 = torch.bfloat16, torch.float32
    expected = {
        "attn": ((10, 256, 64), bf16), "mlp": ((12, 2, 256, 64), bf16), "scalars": ((36,), fp32),
        "ve0": ((384, 64), bf16), "ve1": ((384, 64), bf16), "ve2": ((384, 64), bf16),
        "smear_gate": ((1, 12), bf16), "skip_gate": ((1, 12), bf16), "attn_gate_bank": ((10, 4, 12), bf16),
        "ve_gate_bank": ((5, 4, 12), bf16), "x0_lambdas": ((11,), fp32), "lm_head": ((64, 384), bf16), "embed": ((384, 64), bf16),
    }  # fmt: skip
    assert {label: (tuple(p.shape), p.dtype) for label, p in fresh.named_parameters()} == expected
    assert all(param.label == label for label, param in fresh.named_parameters())


def assert_uniform(x: torch.Tensor, bound: float) -> None:
    """Within ± bound (rounded to bf16), filling it: the largest of n is within 20/n of it, and the variance is bound²/3."""
    x = x.double().flatten()
    assert x.abs().max() <= bound * (1 + U16)
    assert x.abs().max() >= bound * (1 - 20 / len(x)) * (1 - U16)
    # The variance of x² is 4/45 bound⁴: five standard errors
    assert abs(x.square().mean().item() - bound**2 / 3) <= 5 * math.sqrt(4 / 45 / len(x)) * bound**2 + 2 * U16**2 * bound**2
    assert abs(x.mean().item()) <= 5 * bound / math.sqrt(3 * len(x))


def test_qkv_starts_uniform_and_o_at_zero(fresh: GPT) -> None:
    assert_uniform(fresh.attn[:, :192], math.sqrt(3) * 64**-0.5)
    assert (fresh.attn[:, 192:] == 0).all()


def test_fc_starts_uniform_at_half_the_width_and_proj_at_zero(fresh: GPT) -> None:
    assert_uniform(fresh.mlp[:11, 0], math.sqrt(3) * 0.5 * 64**-0.5)
    assert (fresh.mlp[:, 1] == 0).all()


def test_head_starts_normal_and_embedding_is_its_transpose(fresh: GPT) -> None:
    x = fresh.lm_head.double().flatten()
    assert x.std().item() == pytest.approx(0.005, rel=5 / math.sqrt(2 * len(x)) + U16)
    assert abs(x.mean().item()) <= 5 * 0.005 / math.sqrt(len(x))
    assert x.abs().max() > 3 * 0.005  # a normal has tails
    assert torch.equal(fresh.embed, fresh.lm_head.T)


def test_value_embeddings_gates_and_x0_lambdas_start_at_zero(fresh: GPT) -> None:
    for label in ("ve0", "ve1", "ve2", "smear_gate", "skip_gate", "attn_gate_bank", "ve_gate_bank", "x0_lambdas"):
        assert (getattr(fresh, label) == 0).all(), label


def test_scalars_start_as_designed(fresh: GPT) -> None:
    assert torch.equal(fresh.scalars, torch.tensor([1.1] * 11 + [0.5, 1.0] * 11 + [0.0, 0.5, -1.5]))


def test_vocabulary_is_padded_to_a_multiple_of_128() -> None:
    for vocab, padded in ((1, 128), (128, 128), (129, 256)):
        assert GPT(vocab, 11, 2, 8, 16, 16).embed.size(0) == padded


# The record's size


def bit_sums(model: GPT) -> dict[str, int]:
    """A cheap witness that a parameter has changed, without a copy."""
    return {
        label: param.detach().view(torch.int32 if param.itemsize == 4 else torch.int16).sum().item()
        for label, param in model.named_parameters()
    }


def record_steps(rank: int, world_size: int) -> dict:
    """Step 0 (NorMuon alone) and step 1 (Adam too) of the record's model on a short batch.

    Matrices are orthogonalised one by one, each alike: two of each bank are enough for a test, the others stay as they are.
    """
    torch.set_num_threads(2)
    polar_express = train_gpt.polar_express
    train_gpt.polar_express = lambda G: torch.cat((polar_express(G[:2]), G[2:].bfloat16()))
    torch.manual_seed(0)
    began = time.monotonic()
    h = Hyperparameters()
    model = GPT(h.vocab_size, 11, h.num_heads, h.head_dim, h.model_dim, 2048, fp8_head=True)
    manager = TrainingManager(model, h)
    inputs, targets, cu_seqlens = random_batch(64, 50257, (0, 50))
    losses, moved = [], []
    for step in range(2):
        before = bit_sums(model)
        manager.advance_schedule(step)
        loss = model(inputs, targets, cu_seqlens, manager.forward_schedule())
        loss.backward()
        manager.step_optimizers(step)
        losses.append(loss.item())
        moved.append([label for label, bits in bit_sums(model).items() if bits != before[label]])
    return dict(
        parameters=sum(p.numel() for p in model.parameters()),
        vocab=model.embed.size(0),
        losses=losses,
        moved=moved,
        finite=all(p.isfinite().all().item() for p in model.parameters()),
        peak_gib=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        seconds=time.monotonic() - began,
    )


def test_record_model_takes_its_first_steps_on_a_cpu(run_ranks) -> None:
    (run,) = run_ranks(1, record_steps)
    dim, vocab = 768, 50304
    assert run["vocab"] == vocab
    assert run["parameters"] == 5 * vocab * dim + 10 * 4 * dim * dim + 12 * 2 * 4 * dim * dim + 36 + 11 + 24 + 15 * 6 * 12
    # The head starts at 0.005, so logits are within a few tenths and the first loss is that of chance, ln(vocab), a target
    chance = (64 + 63 * 0.5 + 62 * 0.25) * math.log(vocab)
    assert run["losses"][0] == pytest.approx(chance, rel=0.02)
    assert math.isfinite(run["losses"][1]) and run["finite"]
    assert set(run["moved"][0]) == {"attn", "mlp"}
    # At the start every output matrix is zero: what feeds one alone has no gradient yet, and moves with Adam one step later or not at all.
    assert {"attn", "mlp", "lm_head", "embed", "scalars"} <= set(run["moved"][1])
    assert run["peak_gib"] < 6

"""FP8 head and MLP are off by what their formats round; the loss is the softcapped multi-token one."""

import math

import pytest
import torch
from torch import Tensor

import naive_model
from checks import exact_loss
from common import U16, U32, close64, normal, train_gpt
from triton_kernels import (
    CPU_BF16, E4M3, E5M2, fp8_head_loss, fp8_linear, fp8_matmul, kernels_of, quantize_by_largest,
    quantize_fp8, relu_squared_mlp_fp8, softcapped_cross_entropy,
)  # fmt: skip

mtp_targets = train_gpt.mtp_targets
BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64
# Unit roundoff (half a unit in the last place), half the spacing of subnormals, largest number.
# e4m3: 3 bits of mantissa, exponents from −6; e5m2: 2 bits, from −14.
FORMATS = {E4M3: (2.0**-4, 2.0**-10, 448.0), E5M2: (2.0**-3, 2.0**-17, 57344.0)}
X_SCALE, W_SCALE, GRAD_SCALE = SCALES = (
    train_gpt.FP8_X_SCALE, train_gpt.FP8_W_SCALE, train_gpt.FP8_GRAD_SCALE,
)  # fmt: skip
every_format = pytest.mark.parametrize("dtype", FORMATS, ids=["e4m3", "e5m2"])
every_dtype = pytest.mark.parametrize("dtype", [BF16, FP32, FP64], ids=["bf16", "fp32", "fp64"])
UNITS = {BF16: U16, FP32: U32, FP64: U32}  # FP8 matmuls are summed in fp32 or better


def rounding_bound(x: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """The most that quantizing changes each x, fp64; x / scale is in fp32, rounded twice."""
    unit, half_subnormal, _ = FORMATS[dtype]
    size = x.double().abs()
    return torch.clamp(size * unit, min=half_subnormal * scale) * (1 + 4 * U32) + 2 * U32 * size


# Quantizing


@every_format
@pytest.mark.parametrize("scale", [1.0, 100 / 448, 1.6 / 448])
def test_quantizing_rounds_to_nearest(dtype: torch.dtype, scale: float) -> None:
    """All magnitudes from below the subnormals to the largest number, of both signs."""
    unit, _, limit = FORMATS[dtype]
    x = torch.logspace(-22, math.log2(limit), 20_000, base=2.0, dtype=FP64)
    x = (torch.cat((x, -x, torch.zeros(1, dtype=FP64))) * scale).float()
    q = quantize_fp8(x, scale, dtype)
    assert q.dtype == dtype and q.shape == x.shape
    error = (q.double() * scale - x.double()).abs()
    assert (error <= rounding_bound(x, scale, dtype)).all()
    assert error.max() > unit * limit * scale / 4  # it does round


@every_format
def test_quantizing_keeps_every_number_of_the_format(dtype: torch.dtype) -> None:
    numbers = torch.arange(256, dtype=torch.uint8).view(dtype)
    numbers = numbers[numbers.float().isfinite()]
    found = quantize_fp8(numbers.float() * 0.25, 0.25, dtype)
    assert torch.equal(found.view(torch.uint8), numbers.view(torch.uint8))


@every_format
@pytest.mark.parametrize("source", [FP32, BF16, FP64])
def test_quantizing_saturates_and_keeps_nan(dtype: torch.dtype, source: torch.dtype) -> None:
    limit = FORMATS[dtype][2]
    x = [limit * 2, limit * 1.07, math.inf, -limit * 2, -math.inf, math.nan, 1e30]
    found = quantize_fp8(torch.tensor(x, dtype=source), 1.0, dtype).float().tolist()
    assert found[:5] == [limit, limit, limit, -limit, -limit]
    assert math.isnan(found[5]) and found[6] == limit


# Matmuls


def operands(dtype: torch.dtype = FP32) -> tuple[Tensor, Tensor, Tensor]:
    """x as a norm gives it, w, and the gradient of a summed loss: magnitudes of the record preset."""
    T, inner, out = 48, 32, 64
    x, w = normal("x", (T, inner)), normal("w", (inner, out), 0.1)
    return x.to(dtype), w.to(dtype), normal("grad", (T, out), 0.05).to(dtype)


def matmul_bound(a: Tensor, da: Tensor, b: Tensor, db: Tensor, out_unit: float) -> Tensor:
    """|ã b̃ − a b| for ã, b̃ off by at most da, db: k terms summed in fp32, two scales, one rounding."""
    a, b = a.double().abs(), b.double().abs()
    size = (a + da) @ (b + db)
    return da @ b + a @ db + da @ db + (a.size(1) + 3) * U32 * size + out_unit * size


def forward_and_gradients(x: Tensor, w: Tensor, grad: Tensor, *scales: float) -> list[Tensor]:
    leaves = [x.clone().requires_grad_(), w.clone().requires_grad_()]
    y = fp8_linear(*leaves, *(scales or SCALES))
    return [y.detach(), *torch.autograd.grad(y, leaves, grad)]


@every_dtype
def test_fp8_matmuls_are_off_by_their_formats_alone(dtype: torch.dtype) -> None:
    x, w, grad = operands(dtype)
    found = forward_and_gradients(x, w, grad)
    assert all(each.dtype == dtype for each in found)
    assert found[2].is_contiguous() and found[2].shape == w.shape  # as lm_head accumulates it
    dx, dw = rounding_bound(x, X_SCALE, E4M3), rounding_bound(w, W_SCALE, E4M3)
    dg = rounding_bound(grad, GRAD_SCALE, E5M2)
    matmuls = [(x, dx, w, dw), (grad, dg, w.T, dw.T), (x.T, dx.T, grad, dg)]
    for each, (a, da, b, db) in zip(found, matmuls):
        exact = a.double() @ b.double()
        error = each.double() - exact
        assert (error.abs() <= matmul_bound(a, da, b, db, UNITS[dtype])).all()
        # It is FP8: independent errors of 2⁻⁴/√3·… a factor are some hundredths of the result.
        assert 0.01 < error.norm() / exact.norm() < 2.0**-3


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=["fp32", "bf16"])
def test_fp8_matmuls_are_those_of_scaled_mm(dtype: torch.dtype) -> None:
    """The reference against PyTorch's own FP8 matmul, which a GPU runs: forward and gradients."""
    x, w, grad = operands(dtype)
    x8, w8 = quantize_fp8(x, X_SCALE, E4M3), quantize_fp8(w, W_SCALE, E4M3)
    g8 = quantize_fp8(grad, GRAD_SCALE, E5M2)

    def scaled_mm(a: Tensor, scale_a: float, b: Tensor, scale_b: float, fast: bool) -> Tensor:
        scales = dict(scale_a=torch.tensor(scale_a), scale_b=torch.tensor(scale_b))
        by_columns = b.mT.contiguous().mT
        options = dict(out_dtype=dtype, use_fast_accum=fast)
        return torch._scaled_mm(a.contiguous(), by_columns, **scales, **options)

    expected = (
        scaled_mm(x8, X_SCALE, w8, W_SCALE, True),
        scaled_mm(g8, GRAD_SCALE, w8.mT, W_SCALE, False),
        scaled_mm(x8.mT, X_SCALE, g8, GRAD_SCALE, False),
    )
    sizes = (x.abs() @ w.abs(), grad.abs() @ w.abs().mT, x.abs().mT @ grad.abs())
    unit = UNITS[dtype]
    for found, other, size in zip(forward_and_gradients(x, w, grad), expected, sizes):
        # FP8 products are exact, so both are off by their own fp32 sums of at most 64 terms (1.2 times
        # those of the unrounded operands) and one rounding of the result: neighbours at most.
        bound = 2 * 1.2 * 67 * U32 * size.double() + 2 * unit * (1 + unit) * other.double().abs()
        assert ((found.double() - other.double()).abs() <= bound).all()


def test_fp8_matmul_takes_either_memory_order() -> None:
    a = quantize_fp8(normal("a", (16, 32)), 1.0, E4M3)
    b = quantize_fp8(normal("b", (32, 48)), 1.0, E4M3)
    found = [fp8_matmul(a, each, 0.5, FP32, False) for each in (b, b.mT.contiguous().mT)]
    assert torch.equal(*found)


@every_dtype
def test_fp8_head_loss_on_a_cpu_is_matmul_and_loss(dtype: torch.dtype) -> None:
    x, w, _ = operands(dtype)
    rest = mtp_targets(torch.arange(48), 2), torch.tensor([1.0, 0.5])
    results = []
    for loss in (
        lambda x, w: fp8_head_loss(x, w, *rest, *SCALES),
        lambda x, w: softcapped_cross_entropy(fp8_linear(x, w, *SCALES), *rest),
    ):
        leaves = [x.clone().requires_grad_(), w.clone().requires_grad_()]
        out = loss(*leaves)
        results.append((out.detach(), *torch.autograd.grad(out, leaves)))
    assert all(torch.equal(*pair) for pair in zip(*results))


def test_each_scale_serves_its_own_operand() -> None:
    """A scale of 1 instead: an operand far below it loses its bits, in its own matmuls alone."""
    right = forward_and_gradients(*operands())
    for i, same in enumerate([(False, True, False), (False, False, True), (True, False, False)]):
        scales = [1.0 if j == i else scale for j, scale in enumerate(SCALES)]
        other = forward_and_gradients(*operands(), *scales)
        assert tuple(torch.equal(*pair) for pair in zip(right, other)) == same


def test_nan_in_the_head_reaches_its_output_and_gradient() -> None:
    x, w, grad = operands()
    x[3, 5] = math.nan
    y, _, grad_w = forward_and_gradients(x, w, grad)
    for found, row in ((y, 3), (grad_w, 5)):
        assert found[row].isnan().all() and found[:row].isfinite().all()


# MLP


@every_dtype
@pytest.mark.parametrize("size", [1e-8, 1.0, 1e12])
def test_the_largest_number_becomes_448(dtype: torch.dtype, size: float) -> None:
    x = (normal("x", (48, 32)) * size).to(dtype)
    x[17, 5] = -4 * x.abs().max()
    q, scale = quantize_by_largest(x)
    assert q.dtype == E4M3 and q.shape == x.shape and scale.shape == ()
    assert scale.dtype == (FP64 if dtype == FP64 else FP32)
    assert scale.item() * 448 == pytest.approx(x.abs().max().item(), rel=4 * U32)
    assert q[17, 5].item() == -448 and q.float().abs().max() == 448
    error = (q.double() * scale.double() - x.double()).abs()
    assert (error <= rounding_bound(x, scale.item(), E4M3)).all()


def test_quantizing_by_the_largest_of_extremes() -> None:
    x = normal("x", (8, 16))
    assert not quantize_by_largest(0 * x)[0].float().any()
    tiny, scale = quantize_by_largest(1e-20 * x)  # below the floor, whose scale it gets
    assert scale.item() == pytest.approx(1e-12 / 448) and tiny.float().abs().max() < 1
    huge, _ = quantize_by_largest(x / x.abs().max() * 3e38)
    assert huge.float().abs().max() == 448
    x[3, 4] = math.nan
    assert quantize_by_largest(x)[0].float().isnan().all()


def mlp_inputs(dtype: torch.dtype = FP64) -> list[Tensor]:
    shapes = {"x": (48, 32), "W_fc": (64, 32), "W_proj": (64, 32)}
    return [normal(label, shape, 0.3).to(dtype) for label, shape in shapes.items()]


def mlp_fp8(x: Tensor, W_fc: Tensor, W_proj: Tensor) -> Tensor:
    return relu_squared_mlp_fp8(x, W_fc, W_proj, *quantize_by_largest(W_fc.detach()))


def hidden(x: Tensor, W_fc: Tensor) -> Tensor:
    """h from the FP8 operands, exact: in fp64."""
    (x8, x_scale), (W8, W_scale) = quantize_by_largest(x), quantize_by_largest(W_fc)
    return (x8.double() @ W8.double().T) * (x_scale.double() * W_scale.double())


@every_dtype
def test_fp8_mlp_squares_a_hidden_layer_that_is_off_by_e4m3(dtype: torch.dtype) -> None:
    """W_proj = 1 shows the activation: relu(h)² of an h that is rounded to dtype first."""
    x, W_fc, _ = mlp_inputs(dtype)
    found = mlp_fp8(x, W_fc, torch.eye(64, dtype=dtype))
    h = hidden(x, W_fc)
    exact = x.double() @ W_fc.double().T
    dx, dw = (rounding_bound(z, z.abs().max().item() / 448, E4M3) for z in (x, W_fc))
    assert ((h - exact).abs() <= matmul_bound(x, dx, W_fc.T, dw.T, 0.0)).all()
    assert 0.01 < (h - exact).norm() / exact.norm() < 2.0**-3  # it is FP8
    assert found.dtype == dtype
    if dtype == BF16:  # a sum in fp32 may round an h between two of its numbers to the other
        assert (found == h.to(BF16).relu().square()).double().mean() > 0.999
    else:
        error = 40 * U32 * (x.double().abs() @ W_fc.double().abs().T)
        assert ((found - h.relu().square()).abs() <= 3 * h.abs() * error + error**2).all()


def test_fp8_mlp_has_the_gradients_of_its_hidden_layer() -> None:
    """Straight through: exact given h, with x and weights as they are."""
    leaves = [z.requires_grad_() for z in mlp_inputs()]
    x, W_fc, W_proj = leaves
    grad = normal("grad", (48, 32)).double()
    h = x @ W_fc.T
    h = h + (hidden(x.detach(), W_fc.detach()) - h).detach()
    results = []
    for out in (mlp_fp8(*leaves), h.relu().square() @ W_proj):
        results.append((out, *torch.autograd.grad(out, leaves, grad)))
    assert all(close64(*pair) for pair in zip(*results))


@pytest.mark.parametrize("power", [-30, 30, 60])
def test_fp8_mlp_does_not_depend_on_the_size_of_its_input(power: int) -> None:
    """A power of two goes through every step, to the bit: no static scale clips or flushes."""
    x, W_fc, W_proj = mlp_inputs(FP32)
    expected = mlp_fp8(x, W_fc, W_proj)
    assert torch.equal(mlp_fp8(x * 2.0**power, W_fc, W_proj), expected * 4.0**power)
    assert torch.equal(mlp_fp8(x, W_fc * 2.0**power, W_proj), expected * 4.0**power)


@every_dtype
def test_fp8_mlp_of_zeros_and_nan(dtype: torch.dtype) -> None:
    x, W_fc, W_proj = mlp_inputs(dtype)
    leaves = [(0 * x).requires_grad_(), W_fc.requires_grad_(), W_proj.requires_grad_()]
    out = mlp_fp8(*leaves)
    for z in (out, *torch.autograd.grad(out.sum(), leaves)):
        assert z.dtype == dtype and not z.any()
    x[5, 7] = math.nan
    assert mlp_fp8(x, W_fc, W_proj).isnan().all()


def test_fp8_mlp_on_a_cpu_with_bf16_units_errs_by_their_roundings() -> None:
    """As the other MLP in test_cpu.py: at most six roundings; and the same FP8 operands."""
    leaves = [z.requires_grad_() for z in mlp_inputs(FP32)]
    results = []
    for device in (CPU_BF16, "cpu"):
        with kernels_of(device):
            out = mlp_fp8(*leaves)
            results.append((out, *torch.autograd.grad(out, leaves, normal("grad", (48, 32)))))
    for narrow, wide in zip(*results):
        assert narrow.dtype == FP32
        assert U16 / 16 < (narrow - wide).norm() / wide.norm() < 4 * U16


# Softcap and loss

WEIGHTS = {1: [1.0], 2: [1.0, 0.5], 3: [1.0, 0.5, 0.25]}
every_K = pytest.mark.parametrize("K", WEIGHTS)


def logits_and_targets(T: int = 7, vocab: int = 11) -> tuple[Tensor, Tensor]:
    logits = normal("logits", (T, vocab), 6.0).double().requires_grad_()
    return logits, (normal("targets", (T,)).abs() * 1000).long() % vocab


def loss_and_gradient(logits: Tensor, targets: Tensor, weights: list[float]) -> list[Tensor]:
    columns = mtp_targets(targets, len(weights))
    loss = softcapped_cross_entropy(logits, columns, torch.tensor(weights))
    return [loss, *torch.autograd.grad(loss, logits)]


def naive(logits: Tensor, targets: Tensor, weights: list[float]) -> list[Tensor]:
    logits = logits.detach().double().requires_grad_()
    loss = naive_model.training_loss(logits, targets, weights)
    return [loss.detach(), *torch.autograd.grad(loss, logits)]


@every_K
def test_loss_passes_gradcheck(K: int) -> None:
    logits, targets = logits_and_targets()
    weights = torch.tensor(WEIGHTS[K])
    loss = lambda x: softcapped_cross_entropy(x, mtp_targets(targets, K), weights)
    assert torch.autograd.gradcheck(loss, logits)


@pytest.mark.parametrize("T", [1, 2, 3, 7])
@every_K
def test_loss_is_the_naive_one(K: int, T: int) -> None:
    """Also for fewer tokens than targets a token: terms beyond the end are dropped."""
    logits, targets = logits_and_targets(T)
    loss, gradient = loss_and_gradient(logits, targets, [3 * w for w in WEIGHTS[K]])
    expected, expected_gradient = naive(logits, targets, WEIGHTS[K])
    assert loss.item() == pytest.approx(3 * expected.item(), rel=1e-13)  # fp64
    assert (gradient / 3 - expected_gradient).abs().max() <= 1e-13


def test_loss_of_a_prefix_is_the_plain_sum() -> None:
    """A prefix equal to a further target, rows without one, the last row's; a column of none."""
    logits, targets = logits_and_targets()
    targets = mtp_targets(targets, 3)
    prefix, none = torch.tensor([0, -1, 3, 10, -1, 0, 5]), torch.full((7,), -1)
    prefix[0], prefix[2] = targets[0, 1], targets[2, 2]
    weights = torch.tensor([1.0, 0.5, 0.25, 0.25])
    for last in (prefix, none):
        columns = torch.cat((targets, last[:, None]), 1)
        loss = softcapped_cross_entropy(logits, columns, weights)
        (gradient,) = torch.autograd.grad(loss, logits)
        expected, expected_gradient = exact_loss(logits, columns, weights)
        assert loss.item() == pytest.approx(expected.item(), rel=1e-13)  # fp64
        assert (gradient - expected_gradient).abs().max() <= 1e-13


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=["fp32", "bf16"])
def test_loss_is_fp32_and_its_gradient_in_the_logits_dtype(dtype: torch.dtype) -> None:
    logits, targets = logits_and_targets()
    narrow = logits.detach().to(dtype).requires_grad_()
    loss, gradient = loss_and_gradient(narrow, targets, WEIGHTS[3])
    expected, exact = naive(narrow, targets, WEIGHTS[3])
    assert loss.dtype == FP32 and gradient.dtype == dtype
    # z, up to 23, is an exponent: e^(z − lse) is off by 23·2 units of fp32 and a few more.
    assert loss.item() == pytest.approx(expected.item(), rel=100 * U32)
    bound = 100 * U32 * 2 + UNITS[dtype] * exact.abs().max()
    assert (gradient.double() - exact).abs().max() <= bound


@every_dtype
@every_K
def test_loss_of_equal_logits_is_that_of_chance(K: int, dtype: torch.dtype) -> None:
    T, vocab = 5, 16
    expected = sum(w * (T - k) for k, w in enumerate(WEIGHTS[K])) * math.log(vocab)
    for value in (-1e4, -3.0, 0.0, 1e4):
        logits = torch.full((T, vocab), value, dtype=dtype, requires_grad=True)
        loss, gradient = loss_and_gradient(logits, torch.zeros(T).long(), WEIGHTS[K])
        assert loss.item() == pytest.approx(expected, rel=100 * U32)
        assert gradient.isfinite().all()
        assert abs(value) < 1e4 or not gradient.any()  # saturated: no slope left


@every_dtype
def test_loss_of_extreme_logits_is_finite(dtype: torch.dtype) -> None:
    """z lies in 0 .. 23, so no token costs more than 23 + ln(vocab)."""
    logits = [[1e4, -1e4, 0.0], [-1e4, 1e4, -1e4]]
    logits = torch.tensor(logits, dtype=dtype, requires_grad=True)
    targets = torch.tensor([1, 1])
    loss, gradient = loss_and_gradient(logits, targets, [1.0])
    expected, exact = naive(logits, targets, [1.0])
    assert loss.item() == pytest.approx(expected.item(), rel=100 * U32)
    assert 23 < loss.item() < 2 * (23 + math.log(3))
    assert gradient.isfinite().all() and (gradient.double() - exact).abs().max() <= 100 * U32


def test_nan_in_a_logit_reaches_the_loss_and_its_rows_gradient() -> None:
    logits, targets = logits_and_targets()
    with torch.no_grad():
        logits[2, 4] = math.nan
    loss, gradient = loss_and_gradient(logits, targets, WEIGHTS[2])
    assert loss.isnan() and gradient[2].isnan().any()
    assert gradient[:2].isfinite().all() and gradient[3:].isfinite().all()

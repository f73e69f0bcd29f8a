"""The FP8 head is off by what its formats round and no more; the loss is the softcapped multi-token cross-entropy."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import naive_model
import triton_kernels as tk
from bench import kernel_checks as checks
from bench.kernel_checks import U32, normal
from common import U16
from train_gpt import FP8_GRAD_SCALE, FP8_W_SCALE, FP8_X_SCALE
from triton_kernels import fp8_head_loss, fp8_linear, fp8_matmul, quantize_fp8, softcapped_cross_entropy

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
# Unit roundoff (half a unit in the last place), half the spacing of subnormals, largest number. e4m3: 3 bits of mantissa,
# exponents from −6; e5m2: 2 bits, from −14.
FORMATS = {E4M3: (2.0**-4, 2.0**-10, 448.0), E5M2: (2.0**-3, 2.0**-17, 57344.0)}
SCALES = FP8_X_SCALE, FP8_W_SCALE, FP8_GRAD_SCALE


def rounding_bound(x: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """The most that quantising may change each x (below saturation), fp64; the division by scale is fp32, twice rounded."""
    unit, half_subnormal, _ = FORMATS[dtype]
    return torch.clamp(x.double().abs() * unit, min=half_subnormal * scale) * (1 + 4 * U32) + 2 * U32 * x.double().abs()


# Quantising


@pytest.mark.parametrize("check", [checks.check_quantize_in_fp8, checks.check_loss_in_fp8])
def test_what_a_gpu_is_held_to_holds_of_the_reference(check: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers beyond e4m3's largest were once held to their own size, and no GPU could pass."""
    monkeypatch.setattr(checks, "kernels_in_guards", lambda: tk.kernels_of("cpu"))
    check("cpu", checks.NEAREST)


@pytest.mark.parametrize("dtype", FORMATS, ids=["e4m3", "e5m2"])
@pytest.mark.parametrize("scale", [1.0, 100 / 448, 1.6 / 448])
def test_quantising_rounds_to_nearest(dtype: torch.dtype, scale: float) -> None:
    """Over all magnitudes from below the subnormals to the largest number, of both signs."""
    limit = FORMATS[dtype][2]
    magnitudes = torch.logspace(-22, math.log2(limit), 20_000, base=2.0, dtype=torch.float64)
    x = (torch.cat((magnitudes, -magnitudes, torch.zeros(1, dtype=torch.float64))) * scale).float()
    q = quantize_fp8(x, scale, dtype)
    assert q.dtype == dtype and q.shape == x.shape
    error = (q.double() * scale - x.double()).abs()
    assert (error <= rounding_bound(x, scale, dtype)).all()
    assert error.max() > FORMATS[dtype][0] * limit * scale / 4  # it does round


@pytest.mark.parametrize("dtype", FORMATS, ids=["e4m3", "e5m2"])
def test_quantising_keeps_every_number_of_the_format(dtype: torch.dtype) -> None:
    numbers = torch.arange(256, dtype=torch.uint8).view(dtype)
    numbers = numbers[numbers.float().isfinite()]
    assert torch.equal(quantize_fp8(numbers.float() * 0.25, 0.25, dtype).view(torch.uint8), numbers.view(torch.uint8))


@pytest.mark.parametrize("dtype", FORMATS, ids=["e4m3", "e5m2"])
@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16, torch.float64])
def test_quantising_saturates_and_keeps_nan(dtype: torch.dtype, source: torch.dtype) -> None:
    limit = FORMATS[dtype][2]
    x = torch.tensor([limit * 2, limit * 1.07, math.inf, -limit * 2, -math.inf, math.nan, 1e30], dtype=source)
    found = quantize_fp8(x, 1.0, dtype).float().tolist()
    assert found[:5] == [limit, limit, limit, -limit, -limit] and math.isnan(found[5]) and found[6] == limit


# Products


def operands(dtype: torch.dtype = torch.float32, T: int = 48, inner: int = 32, out: int = 64) -> tuple[Tensor, Tensor, Tensor]:
    """x as a norm gives it, w and the gradient of a summed loss: sizes of the record preset."""
    return normal("x", (T, inner)).to(dtype), normal("w", (inner, out), 0.1).to(dtype), normal("grad", (T, out), 0.05).to(dtype)


def product_bound(a: Tensor, da: Tensor, b: Tensor, db: Tensor, out_unit: float) -> Tensor:
    """|ã b̃ − a b| where ã, b̃ are off by at most da, db: exact products, k terms summed in fp32, two scales, one rounding."""
    a, b = a.double().abs(), b.double().abs()
    operands_bound = da @ b + a @ db + da @ db
    size = (a + da) @ (b + db)
    return operands_bound + (a.size(1) + 3) * U32 * size + out_unit * size


def forward_and_gradients(x: Tensor, w: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    x, w = x.clone().requires_grad_(), w.clone().requires_grad_()
    y = fp8_linear(x, w, *SCALES)
    return y.detach(), *torch.autograd.grad(y, (x, w), grad)


@pytest.mark.parametrize(
    "dtype, unit", [(torch.float32, U32), (torch.bfloat16, U16), (torch.float64, U32)], ids=["fp32", "bf16", "fp64"]
)
def test_fp8_products_are_off_by_their_formats_alone(dtype: torch.dtype, unit: float) -> None:
    x, w, grad = operands(dtype)
    y, grad_x, grad_w = forward_and_gradients(x, w, grad)
    assert y.dtype == grad_x.dtype == grad_w.dtype == dtype
    assert grad_w.is_contiguous() and grad_w.shape == w.shape  # the layout of lm_head: accumulation is no strided copy
    dx, dw = rounding_bound(x, FP8_X_SCALE, E4M3), rounding_bound(w, FP8_W_SCALE, E4M3)
    dg = rounding_bound(grad, FP8_GRAD_SCALE, E5M2)
    x64, w64, g64 = x.double(), w.double(), grad.double()
    assert ((y.double() - x64 @ w64).abs() <= product_bound(x, dx, w, dw, unit)).all()
    assert ((grad_x.double() - g64 @ w64.T).abs() <= product_bound(grad, dg, w.T, dw.T, unit)).all()
    assert ((grad_w.double() - x64.T @ g64).abs() <= product_bound(x.T, dx.T, grad, dg, unit)).all()
    for found, exact in ((y, x64 @ w64), (grad_x, g64 @ w64.T), (grad_w, x64.T @ g64)):
        # It is FP8: independent errors of 2⁻⁴/√3·… a factor are some hundredths of the result; bf16 would be thousandths.
        assert 0.01 < (found.double() - exact).norm() / exact.norm() < 2.0**-3


@pytest.mark.parametrize("dtype, unit", [(torch.float32, U32), (torch.bfloat16, U16)], ids=["fp32", "bf16"])
def test_fp8_products_are_those_of_scaled_mm(dtype: torch.dtype, unit: float) -> None:
    """The reference against PyTorch's own FP8 product, which is what a GPU runs: forward, grad_x and grad_w."""
    x, w, grad = operands(dtype)
    x8, w8, g8 = (
        quantize_fp8(x, FP8_X_SCALE, E4M3),
        quantize_fp8(w, FP8_W_SCALE, E4M3),
        quantize_fp8(grad, FP8_GRAD_SCALE, E5M2),
    )

    def scaled_mm(a: Tensor, scale_a: float, b: Tensor, scale_b: float, fast: bool) -> Tensor:
        b = b.mT.contiguous().mT  # by columns
        return torch._scaled_mm(
            a.contiguous(),
            b,
            scale_a=torch.tensor(scale_a),
            scale_b=torch.tensor(scale_b),
            out_dtype=dtype,
            use_fast_accum=fast,
        )

    expected = (
        scaled_mm(x8, FP8_X_SCALE, w8, FP8_W_SCALE, True),
        scaled_mm(g8, FP8_GRAD_SCALE, w8.mT, FP8_W_SCALE, False),
        scaled_mm(x8.mT, FP8_X_SCALE, g8, FP8_GRAD_SCALE, False),
    )
    sizes = (x.abs() @ w.abs(), grad.abs() @ w.abs().mT, x.abs().mT @ grad.abs())
    for found, other, size in zip(forward_and_gradients(x, w, grad), expected, sizes):
        # Exact products of FP8 numbers, so both are off by their own fp32 sums of at most 64 terms (1.2 times those of the
        # unrounded operands) and one rounding of the result: neighbours at most.
        bound = 2 * 1.2 * 67 * U32 * size.double() + 2 * unit * (1 + unit) * other.double().abs()
        assert ((found.double() - other.double()).abs() <= bound).all()


def test_fp8_matmul_takes_either_memory_order() -> None:
    a, b = quantize_fp8(normal("a", (16, 32)), 1.0, E4M3), quantize_fp8(normal("b", (32, 48)), 1.0, E4M3)
    by_columns = b.mT.contiguous().mT
    assert torch.equal(fp8_matmul(a, b, 0.5, torch.float32, False), fp8_matmul(a, by_columns, 0.5, torch.float32, False))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=["fp32", "bf16", "fp64"])
def test_fp8_head_loss_on_a_cpu_is_product_and_loss(dtype: torch.dtype) -> None:
    x, w, _ = operands(dtype)
    targets, weights = torch.arange(48) % 64, torch.tensor([1.0, 0.5])
    results = []
    for loss in (
        lambda x, w: fp8_head_loss(x, w, targets, weights, *SCALES),
        lambda x, w: softcapped_cross_entropy(fp8_linear(x, w, *SCALES), targets, weights),
    ):
        leaves = [x.clone().requires_grad_(), w.clone().requires_grad_()]
        out = loss(*leaves)
        results.append((out.detach(), *torch.autograd.grad(out, leaves)))
    for found, expected in zip(*results):
        assert torch.equal(found, expected)


def test_each_scale_serves_its_own_operand() -> None:
    """A scale of 1 instead: operands far below it lose their bits, in that operand's products alone."""
    x, w, grad = operands()
    y, grad_x, grad_w = forward_and_gradients(x, w, grad)
    for i, (same_y, same_x, same_w) in enumerate([(False, True, False), (False, False, True), (True, False, False)]):
        leaves = [x.clone().requires_grad_(), w.clone().requires_grad_()]
        other = fp8_linear(*leaves, *(1.0 if j == i else scale for j, scale in enumerate(SCALES)))
        other_x, other_w = torch.autograd.grad(other, leaves, grad)
        assert (torch.equal(y, other), torch.equal(grad_x, other_x), torch.equal(grad_w, other_w)) == (same_y, same_x, same_w)


def test_nan_in_the_head_reaches_its_output_and_gradient() -> None:
    x, w, grad = operands()
    x[3, 5] = math.nan
    y, _, grad_w = forward_and_gradients(x, w, grad)
    assert y[3].isnan().all() and y[:3].isfinite().all() and grad_w[5].isnan().all() and grad_w[:5].isfinite().all()


# Softcap and loss

WEIGHTS = {1: [1.0], 2: [1.0, 0.5], 3: [1.0, 0.5, 0.25]}


def logits_and_targets(T: int = 7, vocab: int = 11) -> tuple[Tensor, Tensor]:
    logits = normal("logits", (T, vocab), 6.0).double().requires_grad_()
    return logits, (normal("targets", (T,)).abs() * 1000).long() % vocab


def naive_gradient(logits: Tensor, targets: Tensor, weights: list[float]) -> tuple[Tensor, Tensor]:
    logits = logits.detach().double().requires_grad_()
    loss = naive_model.training_loss(logits, targets, weights)
    return loss.detach(), torch.autograd.grad(loss, logits)[0]


@pytest.mark.parametrize("K", WEIGHTS)
def test_loss_passes_gradcheck(K: int) -> None:
    logits, targets = logits_and_targets()
    weights = torch.tensor(WEIGHTS[K])
    assert torch.autograd.gradcheck(lambda x: softcapped_cross_entropy(x, targets, weights), logits)


@pytest.mark.parametrize("T", [1, 2, 3, 7])
@pytest.mark.parametrize("K", WEIGHTS)
def test_loss_is_the_naive_one(K: int, T: int) -> None:
    """Also for fewer tokens than targets a token: terms beyond the end are dropped."""
    logits, targets = logits_and_targets(T)
    loss = softcapped_cross_entropy(logits, targets, torch.tensor(WEIGHTS[K]))
    gradient = torch.autograd.grad(3 * loss, logits)[0] / 3
    expected, expected_gradient = naive_gradient(logits, targets, WEIGHTS[K])
    assert loss.item() == pytest.approx(expected.item(), rel=1e-13)  # fp64
    assert (gradient - expected_gradient).abs().max() <= 1e-13


@pytest.mark.parametrize("dtype, unit", [(torch.float32, U32), (torch.bfloat16, U16)], ids=["fp32", "bf16"])
def test_loss_is_fp32_and_its_gradient_in_the_logits_dtype(dtype: torch.dtype, unit: float) -> None:
    logits, targets = logits_and_targets()
    narrow = logits.detach().to(dtype).requires_grad_()
    loss = softcapped_cross_entropy(narrow, targets, torch.tensor(WEIGHTS[3]))
    (gradient,) = torch.autograd.grad(loss, narrow)
    expected, expected_gradient = naive_gradient(narrow, targets, WEIGHTS[3])
    assert loss.dtype == torch.float32 and gradient.dtype == dtype
    # fp32 throughout: z up to 23 in the exponent, so e^(z − lse) is off by 23·2 units and a few more
    assert loss.item() == pytest.approx(expected.item(), rel=100 * U32)
    assert (gradient.double() - expected_gradient).abs().max() <= 100 * U32 * 2 + unit * expected_gradient.abs().max()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("K", WEIGHTS)
def test_loss_of_equal_logits_is_that_of_chance(K: int, dtype: torch.dtype) -> None:
    T, vocab = 5, 16
    for value in (-1e4, -3.0, 0.0, 1e4):
        logits = torch.full((T, vocab), value, dtype=dtype, requires_grad=True)
        loss = softcapped_cross_entropy(logits, torch.zeros(T, dtype=torch.long), torch.tensor(WEIGHTS[K]))
        expected = sum(w * (T - k) for k, w in enumerate(WEIGHTS[K])) * math.log(vocab)
        assert loss.item() == pytest.approx(expected, rel=100 * U32)
        (gradient,) = torch.autograd.grad(loss, logits)
        assert gradient.isfinite().all() and (abs(value) < 1e4 or (gradient == 0).all())  # saturated: no slope left


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_loss_of_extreme_logits_is_finite(dtype: torch.dtype) -> None:
    """z lies in 0 .. 23, so no token costs more than 23 + ln(vocab)."""
    logits = torch.tensor([[1e4, -1e4, 0.0], [-1e4, 1e4, -1e4]], dtype=dtype, requires_grad=True)
    targets = torch.tensor([1, 1])
    loss = softcapped_cross_entropy(logits, targets, torch.tensor([1.0]))
    expected, expected_gradient = naive_gradient(logits, targets, [1.0])
    assert loss.item() == pytest.approx(expected.item(), rel=100 * U32) and 23 < loss.item() < 2 * (23 + math.log(3))
    (gradient,) = torch.autograd.grad(loss, logits)
    assert gradient.isfinite().all() and (gradient.double() - expected_gradient).abs().max() <= 100 * U32


def test_nan_in_a_logit_reaches_the_loss_and_its_rows_gradient() -> None:
    logits, targets = logits_and_targets()
    with torch.no_grad():
        logits[2, 4] = math.nan
    loss = softcapped_cross_entropy(logits, targets, torch.tensor(WEIGHTS[2]))
    (gradient,) = torch.autograd.grad(loss, logits)
    assert loss.isnan() and gradient[2].isnan().any() and gradient[:2].isfinite().all() and gradient[3:].isfinite().all()

"""FP8 is off by what its formats round; the loss is the naive one; the fused head is the separate one."""

import math

import pytest
import torch
from torch import Tensor

import naive_model
import triton_kernels as tk
from common import U16, U32, close64, normal, train_gpt
from triton_kernels import (
    E4M3, E5M2, fp8_linear, quantize_by_largest, quantize_fp8, softcapped_cross_entropy,
)  # fmt: skip

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
@pytest.mark.parametrize("scale", [1.0, 0.25, 100 / 448, 1.6 / 448])
def test_quantizing_rounds_to_nearest(dtype: torch.dtype, scale: float) -> None:
    """All magnitudes from below the subnormals to the largest number, of both signs; and every
    number of the format is kept."""
    unit, _, limit = FORMATS[dtype]
    x = torch.logspace(-22, math.log2(limit), 20_000, base=2.0, dtype=FP64)
    x = (torch.cat((x, -x, torch.zeros(1, dtype=FP64))) * scale).float()
    q = quantize_fp8(x, scale, dtype)
    assert q.dtype == dtype and q.shape == x.shape
    error = (q.double() * scale - x.double()).abs()
    assert (error <= rounding_bound(x, scale, dtype)).all()
    assert error.max() > unit * limit * scale / 4  # it does round
    numbers = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    numbers = numbers[numbers.isfinite()]
    assert torch.equal(quantize_fp8(numbers * scale, scale, dtype).float(), numbers)


@every_format
@pytest.mark.parametrize("source", [FP32, BF16, FP64])
def test_quantizing_saturates_and_keeps_nan(dtype: torch.dtype, source: torch.dtype) -> None:
    limit = FORMATS[dtype][2]
    x = [limit * 2, limit * 1.07, math.inf, -limit * 2, -math.inf, math.nan, 1e30]
    found = quantize_fp8(torch.tensor(x, dtype=source), 1.0, dtype).float().tolist()
    assert found[:5] == [limit, limit, limit, -limit, -limit]
    assert math.isnan(found[5]) and found[6] == limit


# Matmuls


def matmul_bound(a: Tensor, da: Tensor, b: Tensor, db: Tensor, out_unit: float) -> Tensor:
    """|ã b̃ − a b| for ã, b̃ off by at most da, db: k terms summed in fp32, two scales, one rounding."""
    a, b = a.double().abs(), b.double().abs()
    size = (a + da) @ (b + db)
    return da @ b + a @ db + da @ db + (a.size(1) + 3) * U32 * size + out_unit * size


@every_dtype
def test_fp8_matmuls_are_off_by_their_formats_alone(dtype: torch.dtype) -> None:
    """Forward and both gradients, at magnitudes of the record preset."""
    x = normal("x", (48, 32)).to(dtype)  # as a norm gives it
    w = normal("w", (32, 64), 0.1).to(dtype)
    grad = normal("grad", (48, 64), 0.05).to(dtype)  # of a summed loss
    leaves = [x.clone().requires_grad_(), w.clone().requires_grad_()]
    y = fp8_linear(*leaves, *SCALES)
    found = [y.detach(), *torch.autograd.grad(y, leaves, grad)]
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


# Scaled by the largest number, as in the MLP


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


# Loss, and the fused head on the references


@pytest.mark.parametrize("T", [1, 2, 3, 7])
@pytest.mark.parametrize("weights", [[1.0], [1.0, 0.5], [1.0, 0.5, 0.25]], ids=str)
def test_loss_is_the_naive_one(weights: list[float], T: int) -> None:
    """Also for fewer tokens than targets a token: terms beyond the end are dropped."""
    logits = normal("logits", (T, 11), 6.0).double().requires_grad_()
    targets = (normal("targets", (T,)).abs() * 1000).long() % 11
    columns = train_gpt.mtp_targets(targets, len(weights))
    results = []
    for loss in (
        softcapped_cross_entropy(logits, columns, torch.tensor(weights)),
        naive_model.training_loss(logits, targets, weights),
    ):
        results.append((loss, *torch.autograd.grad(loss, logits)))
    assert all(close64(*pair) for pair in zip(*results))


def head_inputs() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x, w = normal("x", (48, 32)).requires_grad_(), normal("w", (32, 128), 0.1).requires_grad_()
    targets = (normal("targets", (48,)).abs() * 1000).long() % 128
    return x, w, train_gpt.mtp_targets(targets, 3), torch.tensor([1.0, 0.5, 0.25])


def test_fused_head_is_the_separate_one_to_the_bit() -> None:
    """And takes any incoming gradient, which scales the matmuls: exact but for fp32 roundings."""
    x, w, *rest = head_inputs()
    fused = tk.fp8_head_loss_op(x, w, *rest, *SCALES)[0]
    separate = tk.fp8_head_loss(x, w, *rest, *SCALES)
    assert torch.equal(fused, separate)
    gradients = lambda loss: torch.autograd.grad(loss, (x, w), retain_graph=True)
    once = gradients(fused)
    for a, b in zip(once, gradients(separate)):
        assert torch.equal(a, b) and a.is_contiguous()
    for factor in (3.0, 1e-6, -0.125):
        for a, b in zip(gradients(factor * fused), (factor * x.double() for x in once)):
            assert ((a.double() - b).abs() <= 4 * U32 * b.abs()).all()

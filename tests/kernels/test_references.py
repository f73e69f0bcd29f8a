"""What has no kernel of ours, against fp64: norm, rotation in 16 bits, the CPU's attention, gates."""

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import naive_model
import triton_kernels as tk
from common import U16, U32, U64, close64, int32, normal
from runtime.cpu import CPU_FP32
from triton_kernels import (
    RMS_EPS, Band, attend, band_bias, kernels_of, masked_attention, norm, norm_and_rotate_qk, rotate,
)  # fmt: skip

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
UNITS = {BF16: U16, FP16: 2.0**-11, FP32: U32, FP64: U64}
every_dtype = pytest.mark.parametrize("dtype", UNITS, ids=["bf16", "fp16", "fp32", "fp64"])

# Norm and rotation

TINY = {FP16: 2.0**-23}  # fp16 may lose what lies below its smallest number


def forward_and_gradient(function: Callable, x: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    leaf = x.clone().requires_grad_()
    y = function(leaf)
    return y.detach(), torch.autograd.grad(y, leaf, grad)[0]


def formula_of_norm(x: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + RMS_EPS).sqrt()


@every_dtype
@pytest.mark.parametrize("scale", [1.0, 100.0, 1e-3])
def test_norm_and_its_gradient(dtype: torch.dtype, scale: float) -> None:
    x, grad = normal("x", (7, 3, 24), scale).to(dtype), normal("grad", (7, 3, 24)).to(dtype)
    unit = UNITS[dtype]
    wide = min(unit, U32)  # it is computed in fp32 or better
    y, dx = forward_and_gradient(norm, x, grad)
    x, grad = x.double(), grad.double()
    exact, exact_dx = forward_and_gradient(formula_of_norm, x, grad)
    assert y.dtype == dx.dtype == dtype
    # One over the root of a mean of 24 squares, and one product.
    assert ((y.double() - exact).abs() <= (unit + 40 * wide) * exact.abs()).all()
    # r·(dy − y·mean(dy·y)): the saved y is rounded to dtype, and enters twice; the result is rounded
    # once, and nothing between.
    r = 1 / (x.square().mean(-1, keepdim=True) + RMS_EPS).sqrt()
    terms = grad * exact
    mean, size = terms.mean(-1, keepdim=True).abs(), terms.abs().mean(-1, keepdim=True)
    of_saved = r * exact.abs() * unit * (mean + (1 + unit) * size)
    bound = (1 + unit) * of_saved + unit * exact_dx.abs() + TINY.get(dtype, 0.0)
    bound += 60 * wide * r * (grad.abs() + exact.abs() * size)
    assert ((dx.double() - exact_dx).abs() <= bound).all()


def test_norm_of_zero_is_zero_with_a_finite_gradient() -> None:
    y, dx = forward_and_gradient(norm, torch.zeros(2, 8), torch.ones(2, 8))
    assert torch.equal(y, torch.zeros(2, 8))
    assert torch.allclose(dx, torch.full((2, 8), 1 / math.sqrt(RMS_EPS)))


def test_the_narrow_way_of_rotation_is_the_complex_one() -> None:
    """On a CPU in fp32 pairs are complex numbers; in 16 bits, and on a GPU, they are not."""
    random = torch.Generator().manual_seed(0)
    x, grad = torch.randint(-8, 9, (2, 6, 4, 8), generator=random).float()
    quarters = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, -1.0], [-1.0, 0.0]])
    turns = quarters.expand(6, 1, 4, 2).contiguous()
    wide = forward_and_gradient(lambda x: rotate(x, turns), x, grad)
    turn = lambda x: rotate(x, turns.bfloat16())
    narrow = forward_and_gradient(turn, x.bfloat16(), grad.bfloat16())
    assert all(torch.equal(a, b.float()) for a, b in zip(wide, narrow))


@pytest.mark.parametrize("paired", [False, True])
def test_a_table_that_is_too_short_is_named(paired: bool) -> None:
    qkv, table = torch.zeros(9, 6, 8), torch.zeros(17 if paired else 8, 4, 2)
    message = f"table has {len(table)} positions; 9 tokens need"
    with kernels_of("cuda"), pytest.raises(ValueError, match=message):
        norm_and_rotate_qk(qkv, table, paired, False)


# Attention


def band_of(starts: Tensor, window: int, length: int, dtype: torch.dtype = FP64) -> Band:
    return Band(starts, window, length, band_bias(starts, length, window, dtype))


def heads(length: int, count: int = 2, dim: int = 4, dtype: torch.dtype = FP64) -> list[Tensor]:
    return [normal(name, (length, count, dim)).to(dtype).requires_grad_() for name in "qkv"]


def assert_equals_masked_softmax(length: int, window: int, starts: Tensor) -> None:
    """Output and gradients."""
    qkv = heads(length)
    band = band_of(starts, window, length)
    expected = masked_attention(*qkv, band, 0.3)
    direction = normal("direction", tuple(expected.shape)).double()
    out = attend(*qkv, band, 0.3)
    found, exact = (torch.autograd.grad(y, qkv, direction) for y in (out, expected))
    assert close64(out, expected)
    assert all(close64(*pair) for pair in zip(found, exact))


@pytest.mark.parametrize("starts", ["0", "0 0 0 40", "0 1 2 7 7 29 31", "0 25 40 40"])
def test_masked_attention_is_the_naive_one(starts: str) -> None:
    """Its mask is written by loops, query by query and key by key."""
    starts = int32(*map(int, starts.split()), 40)
    qkv = heads(40)
    for window in (0, 1, 9, 100):
        expected = naive_model.attention(*qkv, naive_model.mask(starts, 40, window), 0.3)
        assert close64(masked_attention(*qkv, Band(starts, window, 40, None), 0.3), expected)


@pytest.mark.parametrize("window", [0, 1, 31, 32, 33, 64, 65, 127, 128, 500])
@pytest.mark.parametrize("length", [1, 63, 130])
def test_attention_by_blocks_takes_any_window(length: int, window: int) -> None:
    assert_equals_masked_softmax(length, window, int32(0, length // 3, length, length))


@settings(max_examples=60)
@given(data=st.data(), length=st.integers(1, 140), window=st.integers(0, 200))
def test_attention_by_blocks_takes_any_documents(data, length: int, window: int) -> None:
    """Documents begin on, before and after block borders; empty ones and padding change nothing."""
    borders = st.one_of(
        st.sampled_from([n for n in (0, 31, 32, 33, 64, 128) if n <= length]),
        st.integers(0, length),
    )
    starts = data.draw(st.lists(borders, max_size=6).map(sorted))
    assert_equals_masked_softmax(length, window, int32(0, *starts, length))


def test_attention_by_blocks_computes_bf16_in_fp32_and_rounds_once() -> None:
    qkv = heads(130, dtype=BF16)
    starts = int32(0, 50, 130)
    out = attend(*qkv, band_of(starts, 40, 130, FP32), 0.3)
    exact = masked_attention(*(x.double() for x in qkv), band_of(starts, 40, 130), 0.3)
    assert out.dtype == BF16
    # One rounding to bf16, and fp32 sums over 41 keys and 4 dims of numbers below max |v|.
    bound = U16 * exact.abs() + 100 * U32 * qkv[2].abs().max()
    assert ((out.double() - exact).abs() <= bound).all()


@every_dtype
def test_gates_round_once_with_and_without_a_matmul(dtype: torch.dtype) -> None:
    """The kernel's sums and the reference's matmul, forward and backward."""
    unit = UNITS[dtype]
    add = 40 * (U64 if dtype == FP64 else U32)
    x, W, grad = (normal(*z).to(dtype) for z in (("x", (40, 30)), ("W", (5, 12)), ("g", (40, 5))))
    wide, w, g = x[:, :12].double(), W.double(), grad.double()
    pad = torch.nn.functional.pad
    exact = [wide @ w.T, pad(g @ w, (0, 18)), g.T @ wide]
    size = [wide.abs() @ w.abs().T, pad(g.abs() @ w.abs(), (0, 18)), g.abs().T @ wide.abs()]
    for device in ("cpu", "cuda"):
        leaves = x.clone().requires_grad_(), W.clone().requires_grad_()
        with tk.kernels_of(device):
            logits = tk.gate_logits(*leaves)
        found = (logits, *torch.autograd.grad(logits, leaves, grad))
        for a, b, terms in zip(found, exact, size):
            assert a.dtype == dtype
            assert ((a.double() - b).abs() <= unit * b.abs() + 2 * add * terms).all()


@pytest.mark.parametrize("weights", [(), (40, 1)])
def test_a_cpus_residual_sum_is_the_reference(weights: tuple[int, ...]) -> None:
    """With a weight for all tokens, and with one for each."""
    shapes = {"branch": (40, 16), "x": (40, 16), "c0": (40, 16), "bigram": (40, 4)}
    shapes |= {name: weights for name in ("w0", "w1", "w2")}
    leaves = [normal(name, shape).double().requires_grad_() for name, shape in shapes.items()]
    grad = normal("g", (40, 16)).double()
    results = []
    for device in ("cpu", CPU_FP32):
        with tk.kernels_of(device):
            y = tk.residual_sum(leaves[0], *zip(leaves[4:], leaves[1:4]))
        results.append((y, *torch.autograd.grad(y, leaves, grad)))
    assert all(close64(*pair) for pair in zip(*results))

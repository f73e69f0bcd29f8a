"""References without a file of their own: attention, symmetric matmuls, MLP, transposes."""

from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import naive_model
import triton_kernels as tk
from common import U16, U32, U64, close64, int32, normal
from triton_kernels import Band, attend, band_bias

BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64

# Attention within documents and a window


def banded(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, window: int) -> Tensor:
    bias = band_bias(starts, len(q), window, torch.promote_types(q.dtype, FP32))
    return attend(q, k, v, Band(starts, window, len(q), bias), 0.3)


def naive(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, window: int) -> Tensor:
    return naive_model.attention(q, k, v, naive_model.mask(starts, len(q), window), 0.3)


def heads(length: int, count: int = 2, dim: int = 4, dtype: torch.dtype = FP64) -> list[Tensor]:
    return [normal(name, (length, count, dim)).to(dtype).requires_grad_() for name in "qkv"]


def assert_equals_masked_softmax(length: int, window: int, starts: Tensor) -> None:
    """A head at a time, and both at once."""
    qkv = heads(length)
    expected = naive(*qkv, starts, window)
    direction = normal("direction", tuple(expected.shape)).double()
    gradients = lambda y: torch.autograd.grad((y * direction).sum(), qkv, retain_graph=True)
    for scores in (1, tk.CACHED_SCORES):
        with patch.object(tk, "CACHED_SCORES", scores):
            out = banded(*qkv, starts, window)
            found = gradients(out)
        assert close64(out, expected)
        assert all(close64(a, b) for a, b in zip(found, gradients(expected)))


@pytest.mark.parametrize("window", [0, 1, 31, 32, 33, 64, 65, 127, 128, 500])
@pytest.mark.parametrize("length", [1, 63, 130])
def test_banded_attention_equals_masked_softmax_for_any_window(length: int, window: int) -> None:
    assert_equals_masked_softmax(length, window, int32(0, length // 3, length, length))


@pytest.mark.parametrize(
    "starts",
    ["0", "0 1 2 3", "0 31 32 33", "0 64 128 149", "0 0 0 40", "0 7 7 7 90", "0 100 150 150 150"],
)
def test_banded_attention_equals_masked_softmax_for_any_documents(starts: str) -> None:
    """Documents begin on, before and after block borders; empty ones and padding change nothing."""
    for window in (20, 70):
        assert_equals_masked_softmax(150, window, int32(*map(int, starts.split()), 150))


@settings(max_examples=40)
@given(data=st.data(), length=st.integers(1, 140), window=st.integers(0, 200))
def test_banded_attention_equals_masked_softmax(data, length: int, window: int) -> None:
    starts = data.draw(st.lists(st.integers(0, length), max_size=6).map(sorted))
    assert_equals_masked_softmax(length, window, int32(0, *starts, length))


@settings(max_examples=10)
@given(starts=st.lists(st.integers(0, 60), max_size=5).map(sorted), window=st.integers(0, 130))
def test_banded_attention_takes_doubled_positions(starts: list[int], window: int) -> None:
    assert_equals_masked_softmax(120, window, 2 * int32(0, *starts, 60))


def test_banded_attention_computes_bf16_in_fp32_and_rounds_once() -> None:
    q, k, v = heads(130, dtype=BF16)
    starts = int32(0, 50, 130)
    out = banded(q, k, v, starts, 40)
    exact = naive(q.double(), k.double(), v.double(), starts, 40)
    assert out.dtype == BF16
    # One rounding to bf16, and fp32 sums over 41 keys and 4 dims of numbers below max |v|.
    bound = U16 * exact.abs() + 100 * U32 * v.abs().max()
    assert ((out.double() - exact).abs() <= bound).all()


def touched(gradient: Tensor) -> list[int]:
    return gradient.abs().sum((1, 2)).nonzero().flatten().tolist()


def test_nothing_flows_between_documents() -> None:
    qkv = heads(150)
    borders = [0, 1, 40, 64, 100, 150]
    out = banded(*qkv, int32(*borders, 150), 1000)
    for first, last in zip(borders, borders[1:]):
        for gradient in torch.autograd.grad(out[first:last].sum(), qkv, retain_graph=True):
            found = touched(gradient)
            assert set(found) <= set(range(first, last)) and (found or last - first == 1)


@pytest.mark.parametrize("window", [0, 1, 5, 32, 63, 64, 65])
def test_query_sees_exactly_window_positions_back(window: int) -> None:
    q, k, v = heads(140)
    out = banded(q, k, v, int32(0, 140), window)
    for t in (0, 1, 31, 32, 64, 65, 130, 139):
        (gradient,) = torch.autograd.grad(out[t].sum(), v, retain_graph=True)
        assert touched(gradient) == list(range(max(0, t - window), t + 1))


def test_banded_attention_passes_gradcheck() -> None:
    starts = int32(0, 13, 36)
    attention = lambda q, k, v: banded(q, k, v, starts, 9)
    assert torch.autograd.gradcheck(attention, heads(36, 2, 2))


# Matmuls, MLP, transposes


@pytest.mark.parametrize("dtype", [BF16, FP32, FP64], ids=["bf16", "fp32", "fp64"])
@pytest.mark.parametrize("shape", [(3, 8, 20), (3, 20, 8), (2, 3, 8, 8), (8, 12)], ids=str)
def test_symmetric_matmuls_round_once(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    unit = {BF16: U16, FP32: U32, FP64: U64}[dtype]
    accumulate = 25 * (U64 if dtype == FP64 else U32)
    X = normal("X", shape).to(dtype)
    A = tk.XXT(X)
    x, a = X.double(), A.double()
    size_of_A = 2.5 * a.abs() + 0.5 * a.abs() @ a.abs()
    cases = [
        (tk.XXT, (X,), x @ x.mT, x.abs() @ x.mT.abs()),
        (tk.XTX, (X,), x.mT @ x, x.mT.abs() @ x.abs()),
        (tk.ba_plus_cAA, (A, -2.5, 0.5), -2.5 * a + 0.5 * a @ a, size_of_A),
    ]
    for function, arguments, exact, size in cases:
        out = torch.empty(exact.shape, dtype=dtype)
        result = function(*arguments)
        assert function(*arguments, out) is out
        assert torch.equal(out, result) and result.dtype == dtype
        bound = unit * exact.abs() + 2 * accumulate * size
        assert ((result.double() - exact).abs() <= bound).all()


@pytest.mark.parametrize("dtype", [BF16, FP32, FP64], ids=["bf16", "fp32", "fp64"])
def test_gates_round_once_with_and_without_a_matmul(dtype: torch.dtype) -> None:
    """A GPU's sums and the CPU's matmul, forward and backward."""
    unit = {BF16: U16, FP32: U32, FP64: U64}[dtype]
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


def test_gates_on_a_gpu_have_no_matmul() -> None:
    def gradients(x: Tensor, W: Tensor) -> tuple[Tensor, ...]:
        with tk.kernels_of("cuda"):
            logits = tk.gate_logits(x, W)
        return torch.autograd.grad(logits.square().sum(), (x, W))

    args = normal("x", (8, 20)).requires_grad_(), normal("W", (3, 12)).requires_grad_()
    nodes = [str(node.target) for node in make_fx(gradients)(*args).graph.nodes]
    assert "aten.sum.dim_IntList" in nodes and not any("mm" in node for node in nodes)


def test_mlp_passes_gradcheck() -> None:
    shapes = {"x": (5, 4), "fc": (9, 4), "proj": (9, 4)}
    x, W_fc, W_proj = (normal(*item).double().requires_grad_() for item in shapes.items())
    assert torch.autograd.gradcheck(tk.relu_squared_mlp, (x, W_fc, W_proj))
    exact = torch.relu(x @ W_fc.T) ** 2 @ W_proj
    assert close64(tk.relu_squared_mlp(x, W_fc, W_proj), exact)


def test_transposes_in_place() -> None:
    source, target = normal("source", (6, 9)), normal("target", (9, 6))
    before = target.clone()
    tk.transpose_add(source, target)
    assert torch.equal(target, before + source.T)
    tk.transpose_copy(source, target)
    assert torch.equal(target, source.T)

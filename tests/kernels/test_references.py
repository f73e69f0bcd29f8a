"""The references that have no file of their own: attention within documents and windows, products, MLP, transposes."""

from collections.abc import Callable
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import attention
import naive_model
from common import U16, U32, U64, close64, int32, normal
from attention import Band, attend, band_bias
from triton_kernels import (
    XTX, XXT, ba_plus_cAA, relu_squared_mlp, transpose_add, transpose_copy,
)  # fmt: skip

F64 = torch.float64

# Attention within documents and a window


def banded(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, window: int, scale: float = 0.3) -> Tensor:
    return attend(q, k, v, Band(cu_seqlens, window, len(q), band_bias(cu_seqlens, len(q), window, q.dtype)), scale)


def qkv(length: int, heads: int = 2, dim: int = 4, dtype: torch.dtype = F64) -> list[Tensor]:
    return [normal(name, (length, heads, dim)).to(dtype).requires_grad_() for name in "qkv"]


def assert_equals_masked_softmax(length: int, window: int, cu_seqlens: Tensor) -> None:
    """A head at a time, and both at once."""
    q, k, v = qkv(length)
    expected = naive_model.attention(q, k, v, naive_model.mask(cu_seqlens, length, window), 0.3)
    direction = normal("direction", tuple(expected.shape)).double()
    for scores in (1, attention.CACHED_SCORES):
        with patch.object(attention, "CACHED_SCORES", scores):
            out = banded(q, k, v, cu_seqlens, window)
            gradients = [torch.autograd.grad((y * direction).sum(), (q, k, v), retain_graph=True) for y in (out, expected)]
        assert close64(out, expected)
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
    exact = naive_model.attention(q.double(), k.double(), v.double(), naive_model.mask(cu_seqlens, 130, 40), 0.3)
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


# Products, MLP, transposes


@pytest.mark.parametrize("dtype, unit", [(torch.bfloat16, U16), (torch.float32, U32), (F64, U64)], ids=["bf16", "fp32", "fp64"])
@pytest.mark.parametrize("shape", [(3, 8, 20), (3, 20, 8), (2, 3, 8, 8), (8, 12)])
def test_symmetric_products_round_once(shape: tuple[int, ...], dtype: torch.dtype, unit: float) -> None:
    X = normal("X", shape).to(dtype)
    wide, accumulate = X.double(), 25 * max(unit, U64) if dtype == F64 else 25 * U32
    symmetric = (X @ X.mT if dtype != torch.bfloat16 else (X.float() @ X.float().mT).bfloat16()).contiguous()
    s64 = symmetric.double()
    cases: list[tuple[Callable, Tensor, Tensor]] = [
        (lambda out: XXT(X, out), wide @ wide.mT, wide.abs() @ wide.mT.abs()),
        (lambda out: XTX(X, out), wide.mT @ wide, wide.mT.abs() @ wide.abs()),
        (
            lambda out: ba_plus_cAA(symmetric, -2.5, 0.5, out),
            -2.5 * s64 + 0.5 * s64 @ s64.mT,
            2.5 * s64.abs() + 0.5 * s64.abs() @ s64.abs(),
        ),
    ]
    for function, exact, size in cases:
        out = torch.empty(exact.shape, dtype=dtype)
        result = function(None)
        assert torch.equal(function(out), result) and torch.equal(out, result) and result.dtype == dtype
        assert ((result.double() - exact).abs() <= unit * exact.abs() + 2 * accumulate * size).all()


def test_mlp_passes_gradcheck() -> None:
    x, W_fc, W_proj = (
        normal(name, shape).double().requires_grad_() for name, shape in (("x", (5, 4)), ("fc", (9, 4)), ("proj", (9, 4)))
    )
    assert torch.autograd.gradcheck(relu_squared_mlp, (x, W_fc, W_proj))
    assert close64(relu_squared_mlp(x, W_fc, W_proj), torch.relu(x @ W_fc.T) ** 2 @ W_proj)


def test_transposes_in_place() -> None:
    source, target = normal("source", (6, 9)), normal("target", (9, 6))
    before = target.clone()
    transpose_add(source, target)
    assert torch.equal(target, before + source.T)
    transpose_copy(source, target)
    assert torch.equal(target, source.T)

"""Inside kernels_of a function is its kernel, outside its reference; pieces that fit the cache."""

from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch import Tensor

import triton_kernels as tk
from common import normal

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


@pytest.fixture
def double():
    """double(x) is 2 x by its reference; its kernel on `cuda` says that it was called."""

    @tk.has_kernel
    def double(x: Tensor, out: Tensor | None = None) -> Tensor:
        """Twice x."""
        return 2 * x

    @double.kernel("cuda")
    def _(x: Tensor, out: Tensor | None = None) -> tuple:
        return "kernel", x, out

    return double


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_kernel_inside_reference_outside(double, device: str) -> None:
    x, out = torch.ones(3, device=device), torch.ones(1)
    assert isinstance(double(x), Tensor)
    with tk.kernels_of("cuda"):
        assert double(x) == ("kernel", x, None)
        assert double(x, out) == double(x, out=out) == ("kernel", x, out)
        with tk.kernels_of("cpu"):
            assert isinstance(double(x), Tensor)
        assert double(x)[0] == "kernel"
    with pytest.raises(KeyError), tk.kernels_of("cuda"):  # an error closes it too
        raise KeyError
    assert isinstance(double(x), Tensor)


@pytest.mark.parametrize("dtype", [BF16, FP16, torch.float8_e5m2, FP32, FP64])
def test_kernels_serve_16_bits_and_less_of_their_device(double, dtype: torch.dtype) -> None:
    """Tensors cannot be on a GPU here; the choice looks at device and dtype alone."""
    served = dtype.itemsize <= 2
    x = SimpleNamespace(device=SimpleNamespace(type="cuda"), dtype=dtype)
    assert (tk.kernel_device(x) == "cuda") == served
    if served:
        assert double(x)[0] == "kernel"
    elsewhere = SimpleNamespace(device=SimpleNamespace(type="cpu"), dtype=dtype)
    assert tk.kernel_device(elsewhere) != "cuda"


def test_compiled_function_follows_the_seam() -> None:
    """One graph each, without a break; entering the seam compiles anew, leaving it does not."""
    graphs = []

    def keep(graph: torch.fx.GraphModule, inputs: list) -> object:
        nodes = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
        graphs.append(any("bankrun" in node for node in nodes))
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(lambda X: tk.XXT(X), backend=keep, fullgraph=True, dynamic=False)
    X = torch.empty(8, 4, dtype=BF16, device="meta")
    for forced in ("cpu", "cuda", "cpu", "cuda"):
        with tk.kernels_of(forced):
            assert compiled(X).shape == (8, 8)
    torch._dynamo.reset()
    assert graphs == [False, True]


# Every function that has a kernel: it launches inside, and not outside.

TOKENS = torch.tensor([3, 0, 3], dtype=torch.int32)
TARGETS = torch.zeros(32, 2, dtype=torch.int64)
WEIGHTS = torch.ones(2)
TURNS = torch.ones(32, 2, 2)
SCALES = 0.25, 0.01, 0.002
E4M3 = torch.float8_e4m3fn
CALLS = {
    "XXT": tk.XXT,
    "XTX": tk.XTX,
    "ba_plus_cAA": lambda x: tk.ba_plus_cAA((x @ x.mT)[None], 1.0, 2.0),
    "aX_plus_BX": lambda x: tk.aX_plus_BX(x[None], (x @ x.mT)[None], 2.0),
    "heads": lambda x: tk.norm_and_rotate_qk(x.view(32, 4, 4)[:, :3], TURNS, False, True),
    "relu_squared_mlp": lambda x: tk.relu_squared_mlp(x, x, x),
    "relu_squared_mlp_fp8": lambda x: tk.relu_squared_mlp_fp8(x, x, x, *tk.quantize_by_largest(x)),
    "quantize_fp8": lambda x: tk.quantize_fp8(x, 1.0, E4M3),
    "quantize_fp8_both": lambda x: tk.quantize_fp8_both(x, 1.0, E4M3),
    "cross_entropy": lambda x: tk.softcapped_cross_entropy(x, TARGETS, WEIGHTS),
    "fp8_gradient": lambda x: tk.loss_and_fp8_gradient(x, TARGETS, WEIGHTS, 1.0),
    "fp8_head": lambda x: tk.fp8_head_loss(x, x.mT.contiguous(), TARGETS, WEIGHTS, *SCALES),
    "lookup": lambda x: tk.lookup(x.requires_grad_(), tokens=TOKENS)[0].sum().backward(),
    "transpose_add": lambda x: tk.transpose_add(x, torch.zeros(16, 32, dtype=x.dtype)),
    "transpose_copy": lambda x: tk.transpose_copy(x, torch.zeros(16, 32, dtype=x.dtype)),
}


def scaled_mm(a: Tensor, b: Tensor, *, scale_a, scale_b, out_dtype, use_fast_accum) -> Tensor:
    """torch._scaled_mm as a GPU has it: a by rows, b by columns. A CPU's own depends on its units."""
    assert a.stride(1) == b.stride(0) == 1
    return (scale_a * scale_b * (a.float() @ b.float())).to(out_dtype)


@pytest.mark.parametrize("name", CALLS)
def test_functions_launch_inside_and_not_outside(name: str) -> None:
    x = normal("x", (32, 16))
    mm = mock.patch.object(torch, "_scaled_mm", scaled_mm)
    with mm, mock.patch.object(tk, "launch") as launched:
        CALLS[name](x)
        assert not launched.called
        with tk.kernels_of("cuda"):
            CALLS[name](x)
        assert launched.called


def test_fp8_matmuls_are_scaled_mm_inside_and_not_outside() -> None:
    """For b in either memory order, with the same numbers."""
    a, b = (normal(label, (16, 16)).to(E4M3) for label in "ab")
    with mock.patch.object(torch, "_scaled_mm", side_effect=scaled_mm) as called:
        outside = tk.fp8_matmul(a, b, 0.5, FP32, False)
        assert not called.called
        with tk.kernels_of("cuda"):
            inside = [tk.fp8_matmul(a, x, 0.5, FP32, False) for x in (b, b.mT.contiguous().mT)]
        assert called.call_count == 2
    size = 0.5 * a.double().abs() @ b.double().abs()
    for found in inside:  # 16 terms summed in another order
        assert ((found.double() - outside.double()).abs() <= 40 * 2.0**-24 * size).all()


# Pieces that fit a CPU's cache


def test_cache_holds_as_many_rows_as_fit() -> None:
    """The pieces are views of the same rows of each tensor, in order; none where there are no rows."""
    bank, moments = normal("bank", (7, 3, 5)), normal("moments", (7, 3, 1))
    ones = [1] * 7
    expected = {1: ones, 15: ones, 44: [2, 2, 2, 1], 45: [3, 3, 1], 105: [7], 65_536: [7]}
    for limit, sizes in expected.items():
        with mock.patch.object(tk, "CPU_CACHE_ELEMENTS", limit):
            pieces, nones, others = zip(*tk.cache_sized(bank, None, moments))
            assert list(tk.cache_sized(bank[:0], moments[:0])) == []
        assert [len(piece) for piece in pieces] == [len(other) for other in others] == sizes
        assert set(nones) == {None} and pieces[0].data_ptr() == bank.data_ptr()
        assert torch.equal(torch.cat(pieces), bank) and torch.equal(torch.cat(others), moments)
    huge = torch.empty(100, 1000, 1000, device="meta")  # other devices take all rows at once
    assert [len(piece) for (piece,) in tk.cache_sized(huge)] == [100]

"""Norm, rotation and what attention reads: against autograd of the formulas in fp64."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from checks import exact_heads
from common import U16, U32, U64, normal
from triton_kernels import RMS_EPS, kernels_of, norm, norm_and_rotate_qk, rotate

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
UNITS = {BF16: U16, FP16: 2.0**-11, FP32: U32, FP64: U64}
every_dtype = pytest.mark.parametrize("dtype", UNITS, ids=["bf16", "fp16", "fp32", "fp64"])
TINY = {FP16: 2.0**-23}  # fp16 may lose what lies below its smallest number


def forward_and_gradient(function: Callable, x: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    leaf = x.clone().requires_grad_()
    y = function(leaf)
    return y.detach(), torch.autograd.grad(y, leaf, grad)[0]


def formula_of_norm(x: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + RMS_EPS).sqrt()


def formula_of_rotation(x: Tensor, table: Tensor) -> Tensor:
    """Each pair of dims times a 2 x 2 matrix."""
    c, s = table[..., 0], -table[..., 1]
    matrix = torch.stack((torch.stack((c, s), -1), torch.stack((-s, c), -1)), -2)
    return (matrix @ x.unflatten(-1, (-1, 2)).unsqueeze(-1)).squeeze(-1).flatten(-2)


def table_of(*shape: int) -> Tensor:
    """(*shape, 2): cos and −sin of some angles, fp64."""
    angle = normal("angles", shape).double() * 3
    return torch.stack((angle.cos(), -angle.sin()), -1)


@every_dtype
@pytest.mark.parametrize("scale", [1.0, 100.0, 1e-3])
def test_norm_and_its_gradient(dtype: torch.dtype, scale: float) -> None:
    x, grad = normal("x", (7, 3, 24), scale).to(dtype), normal("grad", (7, 3, 24)).to(dtype)
    unit = UNITS[dtype]
    wide = min(unit, U32)  # of what it is computed in
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


def test_norm_does_nothing_where_the_dtype_stays() -> None:
    """A conversion that changes nothing, of a saved result, costs Dynamo 2.11 the gradient."""
    graphs = []

    def keep(graph: torch.fx.GraphModule, inputs: list) -> object:
        graphs.append(graph)
        return graph.forward

    x, grad = normal("x", (4, 8)), torch.ones(4, 8)
    torch._dynamo.reset()
    compiled = torch.compile(norm, backend=keep, fullgraph=True)
    _, dx = forward_and_gradient(compiled, x, grad)
    torch._dynamo.reset()
    assert torch.equal(dx, forward_and_gradient(norm, x, grad)[1])
    modules = [module for graph in graphs for module in graph.modules() if hasattr(module, "graph")]
    nodes = [node for module in modules for node in module.graph.nodes]
    assert any(node.op.startswith("call") for node in nodes)
    methods = {node.target for node in nodes if node.op == "call_method"}
    assert not methods & {"to", "float"}


@every_dtype
@pytest.mark.parametrize(
    "shape, table",
    [((5, 8), (5, 4)), ((5, 3, 8), (5, 1, 4)), ((5, 3, 2, 8), (5, 1, 2, 4))],
    ids=str,
)
def test_rotation_and_its_gradient(shape, table, dtype: torch.dtype) -> None:
    x, grad = normal("x", shape).to(dtype), normal("grad", shape).to(dtype)
    turns = table_of(*table).to(dtype)
    found = forward_and_gradient(lambda x: rotate(x, turns), x, grad)
    formula = lambda x: formula_of_rotation(x, turns.double())
    exact = forward_and_gradient(formula, x.double(), grad.double())
    for y, expected, of in zip(found, exact, (x, grad)):
        assert y.dtype == dtype and y.shape == shape
        pair = of.double().unflatten(-1, (-1, 2)).abs().sum(-1, keepdim=True)
        size = pair.expand(*shape[:-1], -1, 2).flatten(-2)
        # Two products and their sum, each rounded.
        bound = 3 * UNITS[dtype] * size + TINY.get(dtype, 0.0)
        assert ((y.double() - expected).abs() <= bound).all()


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
@pytest.mark.parametrize("offset", [False, True])
def test_heads_that_attention_reads(paired: bool, offset: bool) -> None:
    """q, k, v and the gradient of qkv, in fp64; v is a view."""
    qkv, table = normal("qkv", (7, 12, 8)).double(), table_of(16, 4)
    grads = [normal(name, (7, 4, 8)).double() for name in "qkv"]
    results = []
    for function in (norm_and_rotate_qk, exact_heads):
        leaf = qkv.clone().requires_grad_()
        heads = function(leaf, table, paired, offset)
        gradient = torch.autograd.grad(heads, leaf, grads)[0]
        results.append((*(x.detach() for x in heads), gradient))
    assert heads[2].data_ptr() == leaf[:, 8:].data_ptr()
    for found, exact in zip(*results):
        assert found.shape == exact.shape and torch.allclose(found, exact, rtol=0, atol=1e-13)


@pytest.mark.parametrize("paired", [False, True])
def test_a_table_that_is_too_short_is_named(paired: bool) -> None:
    qkv, table = torch.zeros(9, 6, 8), torch.zeros(17 if paired else 8, 4, 2)
    message = f"table has {len(table)} positions; 9 tokens need"
    with kernels_of("cuda"), pytest.raises(ValueError, match=message):
        norm_and_rotate_qk(qkv, table, paired, False)

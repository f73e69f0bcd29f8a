"""Norm, rotation, and what attention reads: against autograd of the formulas in fp64, to what the formats round."""

import math

import pytest
import torch
from torch import Tensor

from bench.kernel_checks import U32, UNIT, exact_heads, normal
from attention import norm_and_rotate_qk, rotate
from triton_kernels import RMS_EPS, kernels_of, norm

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}
every_dtype = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)


def forward_and_gradient(function, x: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
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
    """(*shape, 2): cos and -sin of some angles, fp64."""
    angle = normal("angles", shape).double() * 3
    return torch.stack((angle.cos(), -angle.sin()), -1)


@every_dtype
@pytest.mark.parametrize("scale", [1.0, 100.0, 1e-3])
def test_norm_and_its_gradient(dtype: torch.dtype, scale: float) -> None:
    x, grad = normal("x", (7, 3, 24), scale).to(dtype), normal("grad", (7, 3, 24)).to(dtype)
    unit = UNIT.get(dtype, 2.0**-53)
    wide = min(unit, U32)  # of what it is computed in
    y, dx = forward_and_gradient(norm, x, grad)
    exact, exact_dx = forward_and_gradient(formula_of_norm, x.double(), grad.double())
    assert y.dtype == dx.dtype == dtype
    # One over the root of a mean of 24 squares, and one product.
    assert ((y.double() - exact).abs() <= (unit + 40 * wide) * exact.abs()).all()
    # r·(dy − y·mean(dy·y)): the saved y is rounded to dtype, and enters twice; so is the result, once, and nothing between.
    r = 1 / (x.double().square().mean(-1, keepdim=True) + RMS_EPS).sqrt()
    products = grad.double() * exact
    mean, size = products.mean(-1, keepdim=True).abs(), products.abs().mean(-1, keepdim=True)
    of_saved = r * exact.abs() * unit * (mean + (1 + unit) * size)
    bound = (1 + unit) * of_saved + unit * exact_dx.abs() + 60 * wide * r * (grad.double().abs() + exact.abs() * size)
    assert ((dx.double() - exact_dx).abs() <= bound + (2.0**-24 if dtype == torch.float16 else 0.0)).all()


def test_norm_of_zero_is_zero_with_a_finite_gradient() -> None:
    y, dx = forward_and_gradient(norm, torch.zeros(2, 8), torch.ones(2, 8))
    assert torch.equal(y, torch.zeros(2, 8)) and torch.allclose(dx, torch.full((2, 8), 1 / math.sqrt(RMS_EPS)))


def test_norm_does_nothing_where_the_dtype_stays() -> None:
    """A conversion that changes nothing, of a result that is saved, costs Dynamo 2.11 the gradient."""
    graphs = []

    def keep(graph: torch.fx.GraphModule, inputs: list) -> object:
        graphs.append(graph)
        return graph.forward

    x = normal("x", (4, 8))
    torch._dynamo.reset()
    _, dx = forward_and_gradient(torch.compile(norm, backend=keep, fullgraph=True), x, torch.ones(4, 8))
    torch._dynamo.reset()
    assert torch.equal(dx, forward_and_gradient(norm, x, torch.ones(4, 8))[1])
    nodes = [node for graph in graphs for module in graph.modules() if hasattr(module, "graph") for node in module.graph.nodes]
    assert any(node.op.startswith("call") for node in nodes)
    assert not [node for node in nodes if node.op == "call_method" and node.target in ("to", "float")]


@every_dtype
@pytest.mark.parametrize("shape, table", [((5, 8), (5, 4)), ((5, 3, 8), (5, 1, 4)), ((5, 3, 2, 8), (5, 1, 2, 4))], ids=str)
def test_rotation_and_its_gradient(shape: tuple[int, ...], table: tuple[int, ...], dtype: torch.dtype) -> None:
    x, grad, turns = normal("x", shape).to(dtype), normal("grad", shape).to(dtype), table_of(*table).to(dtype)
    unit = UNIT.get(dtype, 2.0**-53)
    y, dx = forward_and_gradient(lambda x: rotate(x, turns), x, grad)
    exact, exact_dx = forward_and_gradient(lambda x: formula_of_rotation(x, turns.double()), x.double(), grad.double())
    assert y.dtype == dx.dtype == dtype and y.shape == dx.shape == shape
    for found, expected, of in ((y, exact, x), (dx, exact_dx, grad)):
        size = of.double().unflatten(-1, (-1, 2)).abs().sum(-1, keepdim=True).expand(*shape[:-1], -1, 2).flatten(-2)
        # Two products and their sum, each rounded; fp16 may lose what lies below its smallest number.
        assert ((found.double() - expected).abs() <= 3 * unit * size + (2.0**-23 if dtype == torch.float16 else 0.0)).all()


def test_the_narrow_way_of_rotation_is_the_complex_one() -> None:
    """On a CPU in fp32 pairs are complex numbers; elsewhere, and in 16 bits, they are not: same turns, and exact."""
    x, grad = torch.randint(-8, 9, (2, 6, 4, 8), generator=torch.Generator().manual_seed(0)).float()
    quarter = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, -1.0], [-1.0, 0.0]]).expand(6, 1, 4, 2).contiguous()
    wide = forward_and_gradient(lambda x: rotate(x, quarter), x, grad)
    narrow = forward_and_gradient(lambda x: rotate(x, quarter.bfloat16()), x.bfloat16(), grad.bfloat16())
    for a, b in zip(wide, narrow):
        assert torch.equal(a, b.float())


@pytest.mark.parametrize("paired, key_offset", [(False, False), (True, False), (False, True), (True, True)])
def test_heads_that_attention_reads(paired: bool, key_offset: bool) -> None:
    """q, k, v and the gradient of qkv, in fp64; v is a view."""
    qkv, table, grads = normal("qkv", (7, 12, 8)).double(), table_of(16, 4), [normal(n, (7, 4, 8)).double() for n in "qkv"]
    results = []
    for function in (norm_and_rotate_qk, exact_heads):
        leaf = qkv.clone().requires_grad_()
        heads = function(leaf, table, paired, key_offset)
        results.append((*(x.detach() for x in heads), torch.autograd.grad(heads, leaf, grads)[0]))
    assert heads[2].data_ptr() == leaf[:, 8:].data_ptr()
    for found, exact in zip(*results):
        assert found.shape == exact.shape and torch.allclose(found, exact, rtol=0, atol=1e-13)


@pytest.mark.parametrize("paired", [False, True])
def test_a_table_that_is_too_short_is_named(paired: bool) -> None:
    qkv, table = torch.zeros(9, 6, 8), torch.zeros(17 if paired else 8, 4, 2)
    with kernels_of("cuda"), pytest.raises(ValueError, match=f"table has {len(table)} positions; 9 tokens need"):
        norm_and_rotate_qk(qkv, table, paired, False)

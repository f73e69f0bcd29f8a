"""The GPU's way through the trainer, without a GPU: which kernels a graph holds; its fused head is the separate one."""

from collections.abc import Iterator

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import library
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import attention
import triton_kernels as tk
from bench.kernel_checks import U32, normal
from train_gpt import FP8_GRAD_SCALE, FP8_W_SCALE, FP8_X_SCALE, GPT, ForwardSchedule, polar_express
from triton_kernels import fp8_linear, softcapped_cross_entropy

bf16, fp32 = torch.bfloat16, torch.float32
SCALES = FP8_X_SCALE, FP8_W_SCALE, FP8_GRAD_SCALE
JOINS = ("aten.cat.default", "aten.stack.default")


@pytest.fixture
def kernels_of_the_gpu() -> Iterator[None]:
    """For tensors without memory, on meta, or fake ones on cpu: PyTorch's CPU build has no others."""
    with tk.kernels_of("cuda"):
        yield


def nodes_of(graph: torch.fx.GraphModule) -> list[str]:
    return [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]


# Polar Express


@pytest.mark.parametrize("shape", [(3, 3072, 768), (5, 768, 768)], ids=["tall", "square"])
def test_polar_express_is_its_products_and_nothing_else(kernels_of_the_gpu: None, shape: tuple[int, ...]) -> None:
    """After scaling, five times: Gram matrix, polynomial, product. No transpose, no copy, no conversion between them."""
    nodes = nodes_of(make_fx(polar_express)(torch.empty(shape, dtype=bf16, device="meta")))
    first = nodes.index("bankrun.gram.default")
    assert nodes[first:] == 5 * (["bankrun.gram.default"] + 2 * ["bankrun.multiply_add.default"])


def test_products_copy_no_contiguous_input(monkeypatch: pytest.MonkeyPatch) -> None:
    launched = []
    monkeypatch.setattr(tk, "launch", lambda kernel, grid, *args, **options: launched.append(args))
    X, B, out = torch.empty(2, 48, 32), torch.empty(2, 32, 32), torch.empty(2, 48, 32)
    assert tk.launch_product(X, B, X, out, 1.0, 2.0) is out
    (args,) = launched
    assert [t.data_ptr() for t in args[:4]] == [t.data_ptr() for t in (X, B, X, out)]


def test_compiled_polar_express_is_one_graph(kernels_of_the_gpu: None) -> None:
    """As normuon_update is compiled on a GPU: dispatch and custom operators all pass through Dynamo."""
    graphs = []

    def keep(graph: torch.fx.GraphModule, inputs: list) -> object:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    X = torch.empty(3, 64, 32, dtype=bf16, device="meta")
    found = torch.compile(polar_express, backend=keep, fullgraph=True, dynamic=False)(X)
    torch._dynamo.reset()
    assert found.shape == (3, 64, 32) and found.dtype == bf16 and len(graphs) == 1
    assert sum("bankrun" in node for node in nodes_of(graphs[0])) == 15


def test_compiled_attention_is_one_graph(kernels_of_the_gpu: None) -> None:
    """varlen_attn is imported at the first call, which may be inside of a compiled model."""
    graphs = []

    def keep(graph: torch.fx.GraphModule, inputs: list) -> object:
        graphs.append(graph)
        return graph.forward

    q, starts = torch.empty(64, 2, 8, dtype=bf16, device="meta"), torch.zeros(4, dtype=torch.int32, device="meta")
    torch._dynamo.reset()
    compiled = torch.compile(attention.attend, backend=keep, fullgraph=True, dynamic=False)
    found = compiled(q, q, q, attention.Band(starts, 16, 64, None), 0.1)
    torch._dynamo.reset()
    assert found.shape == q.shape and found.dtype == bf16 and len(graphs) == 1
    assert sum("varlen_attn" in node for node in nodes_of(graphs[0])) == 1


# The whole model


def test_training_step_holds_the_fused_kernels(kernels_of_the_gpu: None) -> None:
    """Forward and backward of the model in fake tensors at the record preset's widths: shapes, and a count of the kernels."""
    tokens = 1024
    with FakeTensorMode():
        model = GPT(50257, 11, 6, 128, 768, tokens, fp8_head=True)
        schedule = ForwardSchedule(torch.ones(3), 128, 384, 1024)

        def step(inputs: torch.Tensor, targets: torch.Tensor, starts: torch.Tensor) -> list[torch.Tensor]:
            loss = model(inputs, targets, starts, schedule)
            assert loss.shape == () and loss.dtype == fp32
            return list(torch.autograd.grad(loss, list(model.parameters())))

        ids = torch.zeros(tokens, dtype=torch.int32)
        batch = ids, ids.long(), torch.zeros(64, dtype=torch.int32)
        for param, grad in zip(model.parameters(), step(*batch)):
            assert (grad.shape, grad.dtype, grad.is_contiguous()) == (param.shape, param.dtype, True), param.label
        graph = make_fx(step)(*batch)
        nodes = nodes_of(graph)
    expected = {
        "norm_rotate": 10, "norm_rotate_backward": 10, "relu_squared": 22, "fp8_head_loss": 1, "fp8_head_loss_backward": 1,
        "scatter": 3,
    }  # fmt: skip
    assert {name: nodes.count(f"bankrun.{name}.default") for name in expected} == expected
    counts = {name: nodes.count(f"aten.{name}.default") for name in ("embedding", "embedding_dense_backward")}
    assert counts == {"embedding": 3, "embedding_dense_backward": 0} and nodes.count("aten.sort.stable") == 2
    shapes = [tuple(node.meta["val"].shape) for node in graph.graph.nodes if str(node.target) in JOINS]
    assert not [shape for shape in shapes if len(shape) > 2 and shape[0] == tokens], "heads are joined apart from the kernel"


def test_residual_sums_are_no_addmm(kernels_of_the_gpu: None) -> None:
    """Inductor makes one of a 2-D sum with a product."""
    x, w = torch.empty(64, 32, dtype=bf16, device="meta"), torch.empty(32, 32, dtype=bf16, device="meta")
    graph = make_fx(lambda x, w: tk.residual_add(x, x @ w))(x, w)
    (sum_,) = (node for node in graph.graph.nodes if str(node.target) == "aten.add.Tensor")
    assert [tuple(node.meta["val"].shape) for node in sum_.args] == 2 * [(1, 64, 32)]
    assert tk.residual_add(x, x).shape == x.shape


@pytest.mark.parametrize("paired, key_offset", [(False, False), (True, False), (False, True)])
def test_compiled_heads_are_one_operator_each_way(kernels_of_the_gpu: None, paired: bool, key_offset: bool) -> None:
    """v, a view of what the operator takes, passes through Dynamo and AOTAutograd; its gradient is joined by no other node."""
    graphs = []

    def keep(graph: torch.fx.GraphModule, inputs: list) -> object:
        graphs.append([node for node in nodes_of(graph) if "getitem" not in node])
        return make_boxed_func(graph.forward)

    qkv = torch.empty(8, 6, 16, dtype=bf16, device="meta", requires_grad=True)
    table = torch.empty(16, 8, 2, dtype=bf16, device="meta")
    torch._dynamo.reset()
    compiled = torch.compile(
        attention.norm_and_rotate_qk, backend=aot_autograd(fw_compiler=keep, bw_compiler=keep), fullgraph=True, dynamic=False
    )
    heads = compiled(qkv, table, paired, key_offset)
    (grad,) = torch.autograd.grad(heads, qkv, [torch.empty_like(x) for x in heads])
    torch._dynamo.reset()
    assert [x.shape for x in heads] == 3 * [(8, 2, 16)] and grad.shape == qkv.shape
    forward, backward = graphs
    assert forward[0] == "bankrun.norm_rotate.default" and set(forward[1:]) == {"aten.slice.Tensor"}
    assert backward == ["bankrun.norm_rotate_backward.default"]


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
def test_bf16_head_keeps_its_shapes(kernels_of_the_gpu: None, training: bool) -> None:
    """Chips without FP8, and every evaluation."""
    with FakeTensorMode():
        model = GPT(50257, 11, 6, 128, 768, 256).train(training)
        tokens, starts = torch.zeros(256, dtype=torch.int32), torch.zeros(64, dtype=torch.int32)
        loss = model(tokens, tokens.long(), starts, ForwardSchedule(torch.ones(2), 128, 128))
        assert loss.shape == () and loss.dtype == fp32
        if training:
            loss.backward()
            assert model.lm_head.grad.shape == model.lm_head.shape and model.lm_head.grad.dtype == bf16


# The fused head, on the references


def head_inputs() -> tuple[torch.Tensor, ...]:
    x, w = normal("x", (48, 32)).requires_grad_(), normal("w", (32, 128), 0.1).requires_grad_()
    return x, w, (normal("targets", (48,)).abs() * 1000).long() % 128, torch.tensor([1.0, 0.5, 0.25])


def test_fused_head_is_the_separate_one_to_the_bit() -> None:
    x, w, targets, weights = head_inputs()
    fused = tk.fp8_head_loss_op(x, w, targets, weights, *SCALES)[0]
    apart = softcapped_cross_entropy(fp8_linear(x, w, *SCALES), targets, weights)
    assert torch.equal(fused, apart)
    for a, b in zip(torch.autograd.grad(fused, (x, w)), torch.autograd.grad(apart, (x, w))):
        assert torch.equal(a, b) and a.is_contiguous()


def test_fused_head_takes_any_incoming_gradient() -> None:
    """It enters the scale of the products, so that FP8 rounding does not depend on it: exact but for fp32 roundings."""
    x, w, targets, weights = head_inputs()
    loss = tk.fp8_head_loss_op(x, w, targets, weights, *SCALES)[0]
    once = torch.autograd.grad(loss, (x, w), retain_graph=True)
    for factor in (3.0, 1e-6, -0.125):
        for a, b in zip(torch.autograd.grad(factor * loss, (x, w), retain_graph=True), once):
            assert ((a.double() - factor * b.double()).abs() <= 4 * U32 * (factor * b.double()).abs()).all()


@pytest.mark.parametrize("dtype", [fp32, bf16])
def test_fused_ops_keep_the_rules_of_custom_ops(dtype: torch.dtype) -> None:
    """Of the operators that run without a GPU; the others' fake tensors are those of the graphs above."""
    x, w, targets, weights = head_inputs()
    x, w = x.detach().to(dtype), w.detach().to(dtype)
    forward, backward = torch.ops.bankrun.fp8_head_loss.default, torch.ops.bankrun.fp8_head_loss_backward.default
    rules = ("test_autograd_registration", "test_faketensor")
    library.opcheck(forward, (x, w, targets, weights, *SCALES), test_utils=rules)
    library.opcheck(forward, (x.clone().requires_grad_(), w.clone().requires_grad_(), targets, weights, *SCALES), test_utils=rules)
    loss, *saved = forward(x, w, targets, weights, *SCALES)
    library.opcheck(backward, (loss, *saved, dtype, *SCALES), test_utils=rules)

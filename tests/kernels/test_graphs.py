"""The GPU's path without a GPU: which kernels a graph holds; the fused LM head is the separate one."""

from collections.abc import Callable, Iterator

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor, library
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import triton_kernels as tk
from common import U32, normal, train_gpt

GPT, ForwardSchedule = train_gpt.GPT, train_gpt.ForwardSchedule
polar_express = train_gpt.polar_express
BF16, FP32 = torch.bfloat16, torch.float32
SCALES = train_gpt.FP8_X_SCALE, train_gpt.FP8_W_SCALE, train_gpt.FP8_GRAD_SCALE
JOINS = ("aten.cat.default", "aten.stack.default")


@pytest.fixture
def gpu_kernels() -> Iterator[None]:
    """For tensors without memory, on meta, or fake ones: PyTorch's CPU build has no others."""
    with tk.kernels_of("cuda"):
        yield


def on_meta(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def nodes_of(graph: torch.fx.GraphModule) -> list[str]:
    return [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]


def one_graph(function: Callable, *args) -> tuple[Tensor, list[str]]:
    """The result of a compiled function, and the nodes of its one graph."""
    graphs = []

    def keep(graph: torch.fx.GraphModule, inputs: list) -> object:
        graphs.append(nodes_of(graph))
        return graph.forward

    torch._dynamo.reset()
    found = torch.compile(function, backend=keep, fullgraph=True, dynamic=False)(*args)
    torch._dynamo.reset()
    (nodes,) = graphs
    return found, nodes


# Polar Express


@pytest.mark.parametrize("shape", [(3, 3072, 768), (5, 768, 768)], ids=["tall", "square"])
def test_polar_express_is_its_matmuls_and_nothing_else(gpu_kernels, shape) -> None:
    """Scaling, then five times Gram matrix, polynomial and product, without a copy between them."""
    nodes = nodes_of(make_fx(polar_express)(on_meta(*shape)))
    first = nodes.index("bankrun.gram.default")
    assert nodes[first:] == 5 * (["bankrun.gram.default"] + 2 * ["bankrun.multiply_add.default"])


def test_matmuls_copy_no_contiguous_input(monkeypatch: pytest.MonkeyPatch) -> None:
    launched = []
    monkeypatch.setattr(tk, "launch", lambda kernel, grid, *args, **_: launched.append(args))
    X, B, out = torch.empty(2, 48, 32), torch.empty(2, 32, 32), torch.empty(2, 48, 32)
    assert tk.launch_product(X, B, X, out, 1.0, 2.0) is out
    (args,) = launched
    assert [t.data_ptr() for t in args[:4]] == [t.data_ptr() for t in (X, B, X, out)]


def test_compiled_polar_express_is_one_graph(gpu_kernels) -> None:
    """As normuon_update is compiled on a GPU: dispatch and operators pass through Dynamo."""
    found, nodes = one_graph(polar_express, on_meta(3, 64, 32))
    assert found.shape == (3, 64, 32) and found.dtype == BF16
    assert sum("bankrun" in node for node in nodes) == 15


# The whole model


def test_training_step_holds_the_fused_kernels(gpu_kernels) -> None:
    """Forward and backward in fake tensors at the record preset's widths: shapes and kernels."""
    tokens = 1024
    with FakeTensorMode():
        model = GPT(50257, 11, 6, 128, 768, tokens, fp8_head=True)
        schedule = ForwardSchedule(torch.ones(3), 128, 384, 1024)

        def step(inputs: Tensor, targets: Tensor, starts: Tensor) -> list[Tensor]:
            model.zero_grad()
            loss = model(inputs, targets, starts, schedule)
            assert loss.shape == () and loss.dtype == FP32
            loss.backward()
            return [param.grad for param in model.parameters()]

        ids = torch.zeros(tokens, dtype=torch.int32)
        batch = ids, ids.long(), torch.zeros(64, dtype=torch.int32)
        for param, grad in zip(model.parameters(), step(*batch)):
            assert (grad.shape, grad.dtype) == (param.shape, param.dtype), param.label
            assert grad.is_contiguous(), param.label
        graph = make_fx(step)(*batch)
        nodes = nodes_of(graph)
    expected = dict(
        norm_rotate=10, norm_rotate_backward=10, relu_squared=22, fp8_head_loss=1,
        fp8_head_loss_backward=1, scatter=3,
    )  # fmt: skip
    assert {name: nodes.count(f"bankrun.{name}.default") for name in expected} == expected
    assert nodes.count("aten.embedding.default") == 4 and nodes.count("aten.sort.stable") == 2
    assert nodes.count("aten.embedding_dense_backward.default") == 0
    for node in graph.graph.nodes:  # heads are joined by the kernel
        if str(node.target) in JOINS:
            shape = node.meta["val"].shape
            assert len(shape) < 3 or shape[0] != tokens, node


def test_residual_sums_are_no_addmm(gpu_kernels) -> None:
    """Inductor makes one of a 2-D sum with a matmul."""
    x, w = on_meta(64, 32), on_meta(32, 32)
    graph = make_fx(lambda x, w: tk.residual_add(x, x @ w))(x, w)
    (sum_,) = (node for node in graph.graph.nodes if str(node.target) == "aten.add.Tensor")
    assert [tuple(node.meta["val"].shape) for node in sum_.args] == 2 * [(1, 64, 32)]
    assert tk.residual_add(x, x).shape == x.shape


@pytest.mark.parametrize("paired, offset", [(False, False), (True, False), (False, True)])
def test_compiled_heads_are_one_operator_each_way(gpu_kernels, paired: bool, offset: bool) -> None:
    """v, a view of the operator's input, passes through AOTAutograd; nothing else joins gradients."""
    graphs = []

    def keep(graph: torch.fx.GraphModule, inputs: list) -> object:
        graphs.append([node for node in nodes_of(graph) if "getitem" not in node])
        return make_boxed_func(graph.forward)

    qkv = on_meta(8, 6, 16).requires_grad_()
    backend = aot_autograd(fw_compiler=keep, bw_compiler=keep)
    torch._dynamo.reset()
    options = dict(backend=backend, fullgraph=True, dynamic=False)
    heads = torch.compile(tk.norm_and_rotate_qk, **options)(qkv, on_meta(16, 8, 2), paired, offset)
    (grad,) = torch.autograd.grad(heads, qkv, [torch.empty_like(x) for x in heads])
    torch._dynamo.reset()
    assert [x.shape for x in heads] == 3 * [(8, 2, 16)] and grad.shape == qkv.shape
    forward, backward = graphs
    assert forward[0] == "bankrun.norm_rotate.default" and set(forward[1:]) == {"aten.slice.Tensor"}
    assert backward == ["bankrun.norm_rotate_backward.default"]


def test_compiled_fp8_mlp_is_one_operator_each_way(gpu_kernels) -> None:
    """Only the activation is saved; the backward pass is that of bf16, with nothing in FP8."""
    graphs = []

    def keep(graph: torch.fx.GraphModule, inputs: list) -> object:
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    inputs = [on_meta(*shape).requires_grad_() for shape in ((48, 32), (128, 32), (128, 32))]
    backend = aot_autograd(fw_compiler=keep, bw_compiler=keep)
    torch._dynamo.reset()
    options = dict(backend=backend, fullgraph=True, dynamic=False)
    W8, scale = tk.quantize_by_largest(inputs[1].detach())
    out = torch.compile(tk.relu_squared_mlp_fp8, **options)(*inputs, W8, scale)
    grads = torch.autograd.grad(out, inputs, torch.empty_like(out))
    torch._dynamo.reset()
    assert [(x.shape, x.dtype) for x in grads] == [(x.shape, BF16) for x in inputs]
    ours = [[node for node in nodes_of(graph) if "bankrun" in node] for graph in graphs]
    assert ours == [["bankrun.relu_squared_fp8.default"], ["bankrun.relu_squared.default"]]
    forward, backward = graphs
    *_, results = forward.graph.nodes
    saved = {(node.meta["val"].numel(), node.meta["val"].dtype) for node in results.args[0]}
    assert saved == {(n, BF16) for n in (48 * 32, 128 * 32, 48 * 128)}  # x, weights, activation
    for node in backward.graph.nodes:
        assert getattr(node.meta.get("val"), "dtype", BF16) == BF16, node


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
def test_bf16_head_keeps_its_shapes(gpu_kernels, training: bool) -> None:
    """Chips without FP8, and every evaluation."""
    with FakeTensorMode():
        model = GPT(50257, 11, 6, 128, 768, 256).train(training)
        tokens, starts = torch.zeros(256, dtype=torch.int32), torch.zeros(64, dtype=torch.int32)
        schedule = ForwardSchedule(torch.ones(2), 128, 128)
        loss = model(tokens, tokens.long(), starts, schedule)
        assert loss.shape == () and loss.dtype == FP32
        if training:
            loss.backward()
            grad = model.lm_head.grad
            assert grad.shape == model.lm_head.shape and grad.dtype == BF16


# The fused head, on the references


def head_inputs() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x, w = normal("x", (48, 32)).requires_grad_(), normal("w", (32, 128), 0.1).requires_grad_()
    targets = (normal("targets", (48,)).abs() * 1000).long() % 128
    return x, w, train_gpt.mtp_targets(targets, 3), torch.tensor([1.0, 0.5, 0.25])


def test_fused_head_is_the_separate_one_to_the_bit() -> None:
    x, w, targets, weights = head_inputs()
    fused = tk.fp8_head_loss_op(x, w, targets, weights, *SCALES)[0]
    separate = tk.softcapped_cross_entropy(tk.fp8_linear(x, w, *SCALES), targets, weights)
    assert torch.equal(fused, separate)
    for a, b in zip(torch.autograd.grad(fused, (x, w)), torch.autograd.grad(separate, (x, w))):
        assert torch.equal(a, b) and a.is_contiguous()


def test_fused_head_takes_any_incoming_gradient() -> None:
    """It scales the matmuls, so FP8 rounding does not depend on it: exact but for fp32 roundings."""
    x, w, targets, weights = head_inputs()
    loss = tk.fp8_head_loss_op(x, w, targets, weights, *SCALES)[0]
    once = torch.autograd.grad(loss, (x, w), retain_graph=True)
    for factor in (3.0, 1e-6, -0.125):
        scaled = torch.autograd.grad(factor * loss, (x, w), retain_graph=True)
        for a, b in zip(scaled, (factor * x.double() for x in once)):
            assert ((a.double() - b).abs() <= 4 * U32 * b.abs()).all()


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_fused_ops_keep_the_rules_of_custom_ops(dtype: torch.dtype) -> None:
    """Of the operators that run without a GPU; the others' fake tensors are those of the graphs."""
    x, w, *rest = head_inputs()
    x, w = x.detach().to(dtype), w.detach().to(dtype)
    forward = torch.ops.bankrun.fp8_head_loss.default
    backward = torch.ops.bankrun.fp8_head_loss_backward.default
    rules = ("test_autograd_registration", "test_faketensor")
    library.opcheck(forward, (x, w, *rest, *SCALES), test_utils=rules)
    leaves = (x.clone().requires_grad_(), w.clone().requires_grad_())
    library.opcheck(forward, (*leaves, *rest, *SCALES), test_utils=rules)
    loss, *saved = forward(x, w, *rest, *SCALES)
    library.opcheck(backward, (loss, *saved, dtype, *SCALES), test_utils=rules)

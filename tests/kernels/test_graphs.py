"""Under torch.compile the model is one graph a shape, with the same numbers; and the GPU's path, traced
without a GPU, holds the kernels and has the right shapes.

Tensors of the GPU's path are on meta, or fake and say cpu, since PyTorch's CPU build cannot index
those that say cuda; kernels_of decides as a GPU would.
"""

from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import triton_kernels as tk
from common import U32, normal, random_batch, short_schedule, tiny_gpt, train_gpt

GPT, ForwardSchedule, LAYERS = train_gpt.GPT, train_gpt.ForwardSchedule, train_gpt.LAYERS
BF16, FP32 = torch.bfloat16, torch.float32
ONE_GRAPH = dict(fullgraph=True, dynamic=False)


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def gpu_kernels() -> Iterator[None]:
    with tk.kernels_of("cuda"):
        yield


def on_meta(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=BF16, device="meta")


def nodes_of(graph: torch.fx.GraphModule) -> list[str]:
    """The operators of a graph, without the unpacking of results."""
    nodes = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
    return [node for node in nodes if "getitem" not in node]


def compiled(function: Callable) -> tuple[Callable, list[torch.fx.GraphModule]]:
    """The function compiled, and its graphs, as they come: forward, backward."""
    graphs = []

    def keep(graph: torch.fx.GraphModule, inputs: list) -> object:
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    backend = aot_autograd(fw_compiler=keep, bw_compiler=keep)
    return torch.compile(function, backend=backend, **ONE_GRAPH), graphs


# Parts of the GPU's path


@pytest.mark.parametrize("shape", [(3, 3072, 768), (5, 768, 768)], ids=["tall", "square"])
def test_polar_express_is_its_matmuls_and_nothing_else(gpu_kernels, shape) -> None:
    """Scaling, then five times Gram matrix, polynomial and product, without a copy between them."""
    function, graphs = compiled(train_gpt.polar_express)
    found = function(on_meta(*shape))
    assert found.shape == shape and found.dtype == BF16
    (nodes,) = map(nodes_of, graphs)
    first = nodes.index("bankrun.gram.default")
    assert nodes[first:] == 5 * (["bankrun.gram.default"] + 2 * ["bankrun.multiply_add.default"])


def test_residual_sums_are_no_addmm(gpu_kernels) -> None:
    """Inductor makes one of a 2-D sum with a matmul."""
    x, w = on_meta(64, 32), on_meta(32, 32)
    graph = make_fx(lambda x, w: tk.residual_add(x, x @ w))(x, w)
    (sum_,) = (node for node in graph.graph.nodes if str(node.target) == "aten.add.Tensor")
    assert [tuple(node.meta["val"].shape) for node in sum_.args] == 2 * [(1, 64, 32)]


@pytest.mark.parametrize("paired, offset", [(False, False), (True, False), (False, True)])
def test_heads_are_one_operator_each_way(gpu_kernels, paired: bool, offset: bool) -> None:
    """v, a view of the operator's input, passes through AOTAutograd; nothing else joins gradients."""
    qkv = on_meta(8, 6, 16).requires_grad_()
    function, graphs = compiled(tk.norm_and_rotate_qk)
    heads = function(qkv, on_meta(16, 8, 2), paired, offset)
    (grad,) = torch.autograd.grad(heads, qkv, [torch.empty_like(x) for x in heads])
    assert [x.shape for x in heads] == 3 * [(8, 2, 16)] and grad.shape == qkv.shape
    forward, backward = map(nodes_of, graphs)
    assert forward[0] == "bankrun.norm_rotate.default" and set(forward[1:]) == {"aten.slice.Tensor"}
    assert backward == ["bankrun.norm_rotate_backward.default"]


def test_fp8_mlp_is_one_operator_each_way(gpu_kernels) -> None:
    """Only the activation is saved; the backward pass is that of bf16, with nothing in FP8."""
    inputs = [on_meta(*shape).requires_grad_() for shape in ((48, 32), (128, 32), (128, 32))]
    function, graphs = compiled(tk.relu_squared_mlp_fp8)
    out = function(*inputs, *tk.quantize_by_largest(inputs[1].detach()))
    grads = torch.autograd.grad(out, inputs, torch.empty_like(out))
    assert [(x.shape, x.dtype) for x in grads] == [(x.shape, BF16) for x in inputs]
    ours = [[node for node in nodes_of(graph) if "bankrun" in node] for graph in graphs]
    assert ours == [["bankrun.relu_squared_fp8.default"], ["bankrun.relu_squared.default"]]
    forward, backward = graphs
    *_, results = forward.graph.nodes
    saved = {(node.meta["val"].numel(), node.meta["val"].dtype) for node in results.args[0]}
    assert saved == {(n, BF16) for n in (48 * 32, 128 * 32, 48 * 128)}  # x, weights, activation
    for node in backward.graph.nodes:
        assert getattr(node.meta.get("val"), "dtype", BF16) == BF16, node


# The whole model on a GPU, in fake tensors at the record preset's widths: no arithmetic


def traced(training: bool, fp8: bool) -> tuple[nn.Module, list[torch.fx.Node]]:
    """The model with its gradients, and the nodes of a forward and, in training, a backward pass."""
    h = train_gpt.Hyperparameters()
    tokens = 16384
    sizes = (h.vocab_size, len(LAYERS), h.num_heads, h.head_dim, h.model_dim, tokens)
    with FakeTensorMode():
        scale = h.attention_scale
        model = GPT(*sizes, fp8_head=fp8, attention_scale=scale).train(training)
        schedule = ForwardSchedule(torch.ones(3), 128, 384, 2048)

        def step(inputs: Tensor, targets: Tensor, starts: Tensor) -> Tensor:
            loss = model(inputs, targets, starts, schedule)
            if training:
                loss.backward()
            return loss

        ids = torch.zeros(tokens, dtype=torch.int32)
        graph = make_fx(step)(ids, ids.long(), torch.zeros(65, dtype=torch.int32))
    loss = graph.graph.output_node().args[0].meta["val"]
    assert loss.shape == () and loss.dtype == FP32
    return model, [node for node in graph.graph.nodes if node.op == "call_function"]


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
def test_model_without_fp8_has_the_right_shapes(gpu_kernels, training: bool) -> None:
    """Chips without FP8, and every evaluation."""
    model, _ = traced(training, fp8=False)
    for label, param in model.named_parameters() if training else ():
        found, expected = ((x.shape, x.dtype, x.stride()) for x in (param.grad, param))
        assert found == expected, label


@pytest.mark.parametrize("fa4", [True, False])
def test_training_step_holds_the_fused_kernels(gpu_kernels, monkeypatch, fa4: bool) -> None:
    """And every layer hands attention its positions and its window, forward and backward."""
    monkeypatch.setattr(tk, "_fa4", SimpleNamespace() if fa4 else None)
    windows = []
    attend = lambda *args: windows.append(args[3].window) or tk.attend(*args)
    monkeypatch.setattr(train_gpt, "attend", attend)
    model, nodes = traced(True, fp8=True)
    for label, param in model.named_parameters():
        found, expected = ((x.shape, x.dtype, x.stride()) for x in (param.grad, param))
        assert found == expected, label
    names = [str(node.target) for node in nodes]
    expected = dict(
        norm_rotate=10, norm_rotate_backward=10, relu_squared=22, fp8_head_loss=1,
        fp8_head_loss_backward=1, scatter=3, flash_attention=10, flash_attention_backward=10,
    )  # fmt: skip
    assert {name: names.count(f"bankrun.{name}.default") for name in expected} == expected
    assert names.count("aten.embedding.default") == 4 and names.count("aten.sort.stable") == 2
    assert names.count("aten.embedding_dense_backward.default") == 0

    def arguments(name: str) -> list[list]:
        calls = [node.args for node in nodes if str(node.target) == f"bankrun.{name}.default"]
        return [[getattr(x, "meta", {}).get("val", x) for x in args] for args in calls]

    h = train_gpt.Hyperparameters()
    forward, backward = arguments("flash_attention"), arguments("flash_attention_backward")[::-1]
    layers = [layer for layer in LAYERS if layer.window]
    for layer, (q, k, v, starts, *_, longest, used), (*five, _, _, _, _, _, also) in zip(
        layers, forward, backward, strict=True
    ):
        p = 2 if layer.paired else 1
        shape = (p * 16384, h.num_heads // p, h.head_dim)
        assert all(x.shape == shape and x.dtype == BF16 for x in (q, k, v, *five[:5])), layer
        # TMA: dims beside each other, rows at multiples of 16 bytes.
        strides = [x.stride() for x in (q, k, v)]
        assert all(last == 1 and not (a % 8 or b % 8) for a, b, last in strides), layer
        assert starts.shape == (65,) and (longest, used, also) == (p * 2048, fa4, fa4), layer
    assert windows == [{"short": 128, "long": 384}[layer.window] for layer in layers]


# On a CPU, compiled: the same operations in the same order on the same kernels. fp32 results may
# differ where a graph joins or reorders sums.

T, STARTS = 96, (0, 10, 50)
TOLERANCE = 100 * U32


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name in expected:
        assert found[name].dtype == expected[name].dtype
        difference = (found[name] - expected[name]).norm()
        assert difference <= TOLERANCE * expected[name].norm(), name


class Compiled:
    """A tiny model, plain and compiled as model.compile does, with the graphs counted."""

    def __init__(self, backend: str, fp8_head: bool):
        self.model = tiny_gpt(fp8_head=fp8_head)
        h = short_schedule(num_scheduled_iterations=30)
        self.manager = train_gpt.TrainingManager(self.model, h)
        self.counter = CompileCounterWithBackend(backend)
        self.compiled = torch.compile(self.model, backend=self.counter, **ONE_GRAPH)

    def results(self, function: Callable) -> dict[str, Tensor]:
        loss = function(*random_batch(T, 120, STARTS), self.manager.forward_schedule())
        params = dict(self.model.named_parameters())
        gradients = torch.autograd.grad(loss, params.values()) if self.model.training else ()
        return {"loss": loss.detach(), **dict(zip(params, gradients))}

    def assert_same_at(self, step: int, graphs: int) -> None:
        """The same numbers at this step, and so many graphs by then."""
        self.manager.advance_schedule(step)
        assert_same(self.results(self.compiled), self.results(self.model))
        assert self.counter.frame_count == graphs, step


@pytest.mark.slow
def test_compiled_model_is_one_graph_for_each_shape_with_eager_numbers() -> None:
    """Training with the FP8 head and evaluation: two graphs, none more for other weights and other
    steps of a stage."""
    both = Compiled("aot_eager", fp8_head=True)
    for step in (0, 1, 9):  # stage 1, its third weight on the way to zero
        both.assert_same_at(step, 1)
    both.model.eval()
    both.counter.backend = "eager"  # captured, not lowered
    with torch.no_grad():
        for step in (9, 5):
            both.assert_same_at(step, 2)
    both.model.train()
    both.assert_same_at(5, 2)  # the training graph is still there


def test_next_stage_with_a_plain_head_is_one_graph() -> None:
    """Stage 2: fewer MTP weights, wider windows, another attention scale. Captured, not lowered."""
    both = Compiled("eager", fp8_head=False)
    for step in (10, 11, 19):
        both.assert_same_at(step, 1)


@pytest.mark.parametrize("fp8", [True, False], ids=["fp8", "plain"])
def test_compiled_head_is_one_graph_for_each_number_of_targets(fp8: bool) -> None:
    w, x = normal("w", (32, 128), 0.1).requires_grad_(), normal("x", (T, 32)).requires_grad_()
    targets = random_batch(T, 120, STARTS)[1]

    def head(x: Tensor, w: Tensor, weights: Tensor) -> Tensor:
        columns = train_gpt.mtp_targets(targets, len(weights))
        return train_gpt.head_loss(x, w, columns, weights, fp8)

    def results(function: Callable, weights: Tensor) -> dict[str, Tensor]:
        loss = function(x, w, weights)
        x_grad, w_grad = torch.autograd.grad(loss, (x, w))
        return {"loss": loss.detach(), "x": x_grad, "w": w_grad}

    counter = CompileCounterWithBackend("aot_eager")
    both = torch.compile(head, backend=counter, **ONE_GRAPH), head
    for graphs, K in enumerate((3, 2, 1), 1):
        for last in (0.5, 0.25, 0.0):
            weights = torch.tensor([1.0, 0.5, 0.25][: K - 1] + [last])
            assert_same(*(results(function, weights) for function in both))
            assert counter.frame_count == graphs

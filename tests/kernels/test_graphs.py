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

import checks
import triton_kernels as tk
from common import U32, random_batch, short_schedule, tiny_gpt, train_gpt

from runtime import self_check

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


# A part of the GPU's path


@pytest.mark.parametrize("paired, offset", [(False, False), (True, False), (False, True)])
def test_heads_are_one_operator_each_way(gpu_kernels, paired: bool, offset: bool) -> None:
    """v, a view of the operator's input, passes through AOTAutograd; nothing else joins gradients."""
    graphs = []

    def keep(graph: torch.fx.GraphModule, inputs: list) -> object:
        nodes = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
        graphs.append([node for node in nodes if "getitem" not in node])
        return make_boxed_func(graph.forward)

    backend = aot_autograd(fw_compiler=keep, bw_compiler=keep)
    function = torch.compile(tk.norm_and_rotate_qk, backend=backend, **ONE_GRAPH)
    qkv, table = (torch.empty(x, dtype=BF16, device="meta") for x in ((8, 6, 16), (16, 8, 2)))
    heads = function(qkv.requires_grad_(), table, paired, offset)
    (grad,) = torch.autograd.grad(heads, qkv, [torch.empty_like(x) for x in heads])
    assert [x.shape for x in heads] == 3 * [(8, 2, 16)] and grad.shape == qkv.shape
    forward, backward = graphs
    assert forward[0] == "bankrun.norm_rotate.default" and set(forward[1:]) == {"aten.slice.Tensor"}
    assert backward == ["bankrun.norm_rotate_backward.default"]


# The whole model on a GPU, in fake tensors at the record preset's widths: no arithmetic


def traced(training: bool, fp8: bool) -> tuple[nn.Module, list[torch.fx.Node]]:
    """The model with its gradients, and the nodes of a forward and, in training, a backward pass."""
    h = train_gpt.Hyperparameters()
    tokens = 16384
    with FakeTensorMode():
        model = GPT(h, fp8=fp8).train(training)
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


def test_training_step_holds_the_fused_kernels(gpu_kernels, monkeypatch) -> None:
    """And every layer hands attention its positions and its window, forward and backward."""
    monkeypatch.setattr(tk, "_fa4", SimpleNamespace())
    windows = []
    attend = lambda *args: windows.append(args[3].window) or tk.attend(*args)
    monkeypatch.setattr(train_gpt, "attend", attend)
    model, nodes = traced(True, fp8=True)
    for label, param in model.named_parameters():
        found, expected = ((x.shape, x.dtype, x.stride()) for x in (param.grad, param))
        assert found == expected, label
    names = [str(node.target) for node in nodes]
    expected = dict(
        norm_rotate=10, norm_rotate_backward=10, relu_squared_fp8=11, relu_squared=11,
        fp8_head_loss=1, fp8_head_loss_backward=1, scatter=3,
        flash_attention=10, flash_attention_backward=10,
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
        assert starts.shape == (65,) and (longest, used, also) == (p * 2048, True, True), layer
    assert windows == [{"short": 128, "long": 384}[layer.window] for layer in layers]


def test_numbers_of_the_schedule_are_where_the_model_is(gpu_kernels) -> None:
    """An operator with an input on the CPU would cost a graph for a GPU its alignment: all that is
    computed of the operator's results would be loaded by 2 bytes at a time."""
    h = short_schedule()
    model = tiny_gpt().to("meta", BF16)
    schedule = train_gpt.TrainingManager(model, h).advance_schedule(train_gpt.make_plan(h)[0])
    found = [x.device.type for x in (*schedule, *vars(model.yarn).values()) if torch.is_tensor(x)]
    assert len(found) >= 5 and set(found) == {"meta"}


@pytest.mark.parametrize(
    "factor, said", [(1.0, "kernels agree"), (1.1, "the compiled graph differs")]
)
def test_self_check_of_the_compiled_graph(monkeypatch, factor: float, said: str) -> None:
    """References of 20 tokens: those after them have no part in the loss. One graph, also for the run."""
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: list) -> Callable:
        graphs.append(graph)
        return lambda *args: [factor * x for x in graph.forward(*args)]

    monkeypatch.setattr(self_check, "TOKENS", 20)
    model = tiny_gpt(prefixes=[*range(127), -1])
    model.loss = torch.compile(model.loss, backend=backend, **ONE_GRAPH)
    (line,) = checks.self_checked(model, 48)
    assert line.startswith(said) and f" gradients {100 * (factor - 1):.1f} %" in line, line
    h = short_schedule()
    schedule = train_gpt.TrainingManager(model, h).advance_schedule(train_gpt.make_plan(h)[0])
    model(*random_batch(48, 128, (0, 30)), schedule).backward()
    assert len(graphs) == 1


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
        self.plan = train_gpt.make_plan(h)
        self.counter = CompileCounterWithBackend(backend)
        self.compiled = torch.compile(self.model, backend=self.counter, **ONE_GRAPH)

    def results(self, function: Callable, schedule: ForwardSchedule) -> dict[str, Tensor]:
        loss = function(*random_batch(T, 120, STARTS), schedule)
        params = dict(self.model.named_parameters())
        gradients = torch.autograd.grad(loss, params.values()) if self.model.training else ()
        return {"loss": loss.detach(), **dict(zip(params, gradients))}

    def assert_same_at(self, step: int, graphs: int) -> None:
        """The same numbers at this step, and so many graphs by then."""
        schedule = self.manager.advance_schedule(self.plan[step])
        assert_same(*(self.results(x, schedule) for x in (self.compiled, self.model)))
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
    for step in (10, 19):
        both.assert_same_at(step, 1)

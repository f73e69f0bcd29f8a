"""Under torch.compile the model is one graph a shape, with the same numbers, and the GPU's path has
the right shapes.

Tracing all layers takes some ten seconds a graph: the whole model is compiled three times, the LM
head, where the settings differ, for all of them. The kernels' graphs: tests/kernels.
"""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, library, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode

import triton_kernels
from common import U32, normal, random_batch, short_schedule, tiny_gpt
from train_gpt import (
    GPT, LAYERS, ForwardSchedule, Hyperparameters, TrainingManager, head_loss, mtp_targets,
)  # fmt: skip

T, STARTS = 96, (0, 10, 50)
H = short_schedule(num_scheduled_iterations=30)

# The same operations in the same order on the same kernels: fp32 results may differ where a graph
# joins or reorders sums.
TOLERANCE = 100 * U32


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def loss_and_gradients(
    model: GPT, function: Callable, schedule: ForwardSchedule
) -> dict[str, Tensor]:
    loss = function(*random_batch(T, 120, STARTS), schedule)
    params = dict(model.named_parameters())
    gradients = torch.autograd.grad(loss, list(params.values())) if model.training else ()
    return {"loss": loss.detach(), **dict(zip(params, gradients))}


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
        self.manager = TrainingManager(self.model, H)
        self.counter = CompileCounterWithBackend(backend)
        how = dict(backend=self.counter, fullgraph=True, dynamic=False)
        self.compiled = torch.compile(self.model, **how)

    def assert_same_at(self, step: int, graphs: int) -> None:
        """The same numbers at this step, and so many graphs by then."""
        self.manager.advance_schedule(step)
        schedule = self.manager.forward_schedule()
        found = loss_and_gradients(self.model, self.compiled, schedule)
        assert_same(found, loss_and_gradients(self.model, self.model, schedule))
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


class Head(nn.Module):
    def __init__(self, fp8: bool):
        super().__init__()
        self.fp8 = fp8
        self.w = nn.Parameter(normal("w", (32, 128), 0.1))

    def forward(self, x: Tensor, targets: Tensor, mtp_weights: Tensor) -> Tensor:
        targets = mtp_targets(targets, len(mtp_weights))
        return head_loss(x, self.w, targets, mtp_weights, self.fp8)


@pytest.mark.parametrize("fp8", [True, False], ids=["fp8", "plain"])
def test_compiled_head_is_one_graph_for_each_number_of_targets(fp8: bool) -> None:
    head = Head(fp8)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(head, backend=counter, fullgraph=True, dynamic=False)
    x = normal("x", (T, 32)).requires_grad_()
    targets = random_batch(T, 120, STARTS)[1]

    def results(function: Callable, weights: Tensor) -> dict[str, Tensor]:
        loss = function(x, targets, weights)
        x_grad, w_grad = torch.autograd.grad(loss, (x, head.w))
        return {"loss": loss.detach(), "x": x_grad, "w": w_grad}

    for graphs, K in enumerate((3, 2, 1), 1):
        for last in (0.5, 0.25, 0.0):
            weights = torch.tensor([1.0, 0.5, 0.25][: K - 1] + [last])
            assert_same(results(compiled, weights), results(head, weights))
            assert counter.frame_count == graphs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fp8_ops_keep_the_rules_of_custom_ops(dtype: torch.dtype) -> None:
    """Schema, registered autograd, fake tensors of the same shapes, dtypes and strides, tracing.

    What PyTorch's checks cannot do with FP8 tensors on a CPU is left out: change an FP8 input, or
    sum an FP8 output.
    """
    rules = ("test_autograd_registration", "test_faketensor")
    traced = (*rules, "test_aot_dispatch_dynamic")
    scales = (0.2, 0.01, 0.001)
    x = normal("x", (32, 16)).to(dtype)
    w = normal("w", (16, 48), 0.1).to(dtype)
    grad = normal("grad", (32, 48), 0.05).to(dtype)
    forward = torch.ops.bankrun.fp8_linear.default
    backward = torch.ops.bankrun.fp8_linear_backward.default
    library.opcheck(forward, (x, w, *scales), test_utils=(*traced, "test_schema"))
    _, x8, w8 = forward(x, w, *scales)
    library.opcheck(backward, (grad, x8, w8, *scales), test_utils=traced)
    with_gradients = (x.requires_grad_(), w.requires_grad_(), *scales)
    library.opcheck(forward, with_gradients, test_utils=rules)


# -----------------------------------------------------------------------------
# The GPU's path, traced without a GPU


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
def test_gpu_path_has_the_right_shapes_and_dtypes(training: bool) -> None:
    """Fake bf16 tensors at the record preset's widths: no arithmetic. What attention is given:
    tests/kernels/test_flash_attention.py.

    The fake tensors say cpu, since PyTorch's CPU build cannot index those that say cuda; kernels_of
    decides as a GPU would.
    """
    h = Hyperparameters()
    tokens = 16384
    sizes = (h.vocab_size, len(LAYERS), h.num_heads, h.head_dim, h.model_dim, tokens)
    with FakeTensorMode(), triton_kernels.kernels_of("cuda"):
        model = GPT(*sizes, fp8_head=True).train(training)
        inputs = torch.zeros(tokens, dtype=torch.int32)
        targets = torch.zeros(tokens, dtype=torch.int64)
        cu_seqlens = torch.zeros(64, dtype=torch.int32)
        schedule = ForwardSchedule(torch.ones(3), 128, 384, 2048)
        loss = model(inputs, targets, cu_seqlens, schedule)
        assert loss.shape == () and loss.dtype == torch.float32
        if training:
            loss.backward()
            for label, param in model.named_parameters():
                found, expected = ((x.shape, x.dtype, x.stride()) for x in (param.grad, param))
                assert found == expected, label

"""Under torch.compile the model is one graph a shape, with the same numbers, and the GPU's path has the right shapes.

Tracing all layers takes some ten seconds a graph: the whole model is compiled three times, the head, where the settings
differ, for all of them.
"""

import errno
import os
import shutil
import sys
from pathlib import Path

import pytest
import torch
from torch import library, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode

import triton_kernels
from common import ROOT, SCRIPT, U32, ends_with, normal, options, random_batch, run_fresh, short_schedule, tiny_gpt, train_gpt
from train_gpt import FP8_GRAD_SCALE, FP8_W_SCALE, FP8_X_SCALE, GPT, LAYERS, ForwardSchedule, Hyperparameters, TrainingManager
from triton_kernels import fp8_linear, softcapped_cross_entropy

T, STARTS = 96, (0, 10, 50)
H = short_schedule(num_scheduled_iterations=30)

# The same operations in the same order on the same kernels: fp32 results may differ where a graph joins or reorders sums.
TOLERANCE = 100 * U32
SCALES = FP8_X_SCALE, FP8_W_SCALE, FP8_GRAD_SCALE


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def loss_and_gradients(model: GPT, function, schedule: ForwardSchedule) -> dict[str, torch.Tensor]:
    loss = function(*random_batch(T, 120, STARTS), schedule)
    gradients = torch.autograd.grad(loss, list(model.parameters())) if model.training else []
    return {"loss": loss.detach()} | {label: g for (label, _), g in zip(model.named_parameters(), gradients)}


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name in expected:
        assert found[name].dtype == expected[name].dtype
        assert (found[name] - expected[name]).norm() <= TOLERANCE * expected[name].norm(), name


def test_compiled_model_is_one_graph_for_each_shape_with_eager_numbers() -> None:
    """Training with the FP8 head and evaluation: two graphs, none more for other weights and other steps of a stage."""
    model = tiny_gpt(fp8_head=True)
    manager = TrainingManager(model, H)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True, dynamic=False)  # as model.compile does
    for step in (0, 1, 9):  # stage 1, its third weight on the way to zero
        manager.advance_schedule(step)
        schedule = manager.forward_schedule()
        assert_same(loss_and_gradients(model, compiled, schedule), loss_and_gradients(model, model, schedule))
        assert counter.frame_count == 1, f"step {step} has compiled anew"
    model.eval()
    counter.backend = "eager"  # captured, not lowered
    with torch.no_grad():
        for step in (9, 5):
            manager.advance_schedule(step)
            schedule = manager.forward_schedule()
            assert_same(loss_and_gradients(model, compiled, schedule), loss_and_gradients(model, model, schedule))
            assert counter.frame_count == 2
    model.train()
    loss_and_gradients(model, compiled, manager.forward_schedule())
    assert counter.frame_count == 2  # the training graph is still there


def test_next_stage_with_a_plain_head_is_one_graph() -> None:
    """Stage 2 and a plain head: fewer MTP weights, wider windows, another attention scale. Captured, not lowered."""
    model = tiny_gpt()
    manager = TrainingManager(model, H)
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True, dynamic=False)
    for step in (10, 11, 19):
        manager.advance_schedule(step)
        schedule = manager.forward_schedule()
        assert_same(loss_and_gradients(model, compiled, schedule), loss_and_gradients(model, model, schedule))
        assert counter.frame_count == 1


class Head(nn.Module):
    def __init__(self, fp8: bool):
        super().__init__()
        self.fp8, self.w = fp8, nn.Parameter(normal("w", (32, 128), 0.1))

    def forward(self, x: torch.Tensor, targets: torch.Tensor, mtp_weights: torch.Tensor) -> torch.Tensor:
        logits = fp8_linear(x, self.w, *SCALES) if self.fp8 else x @ self.w
        return softcapped_cross_entropy(logits, targets, mtp_weights)


@pytest.mark.parametrize("fp8", [True, False], ids=["fp8", "plain"])
def test_compiled_head_is_one_graph_for_each_number_of_targets(fp8: bool) -> None:
    head, counter = Head(fp8), CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(head, backend=counter, fullgraph=True, dynamic=False)
    x, targets = normal("x", (T, 32)).requires_grad_(), random_batch(T, 120, STARTS)[1]
    for graphs, K in enumerate((3, 2, 1), 1):
        for last in (0.5, 0.25, 0.0):
            weights = torch.tensor([1.0, 0.5, 0.25][: K - 1] + [last])
            results = []
            for function in (compiled, head):
                loss = function(x, targets, weights)
                results.append(dict(zip(("loss", "x", "w"), (loss.detach(), *torch.autograd.grad(loss, (x, head.w))))))
            assert_same(*results)
            assert counter.frame_count == graphs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fp8_ops_keep_the_rules_of_custom_ops(dtype: torch.dtype) -> None:
    """Schema, registered autograd, fake tensors of the same shapes, dtypes and strides, tracing.

    What PyTorch's checks cannot do with FP8 tensors on a CPU is left out: change an FP8 input, or sum an FP8 output.
    """
    rules = ("test_autograd_registration", "test_faketensor")
    x, w, grad = normal("x", (32, 16)).to(dtype), normal("w", (16, 48), 0.1).to(dtype), normal("grad", (32, 48), 0.05).to(dtype)
    forward, backward = torch.ops.bankrun.fp8_linear.default, torch.ops.bankrun.fp8_linear_backward.default
    library.opcheck(forward, (x, w, *SCALES), test_utils=(*rules, "test_schema", "test_aot_dispatch_dynamic"))
    _, x8, w8 = forward(x, w, *SCALES)
    library.opcheck(backward, (grad, x8, w8, *SCALES), test_utils=(*rules, "test_aot_dispatch_dynamic"))
    library.opcheck(forward, (x.requires_grad_(), w.requires_grad_(), *SCALES), test_utils=rules)


# The GPU's path, traced without a GPU


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
def test_gpu_path_has_the_right_shapes_and_dtypes(monkeypatch: pytest.MonkeyPatch, training: bool) -> None:
    """Fake bf16 tensors through varlen_attn at the record preset's widths: shapes, dtypes and arguments, but no arithmetic.

    The fake tensors say cpu, since PyTorch's CPU build cannot index those that say cuda; kernels_of decides as a GPU would.
    """
    import torch.nn.attention.varlen as varlen

    calls = []
    varlen_attn = varlen.varlen_attn

    def recorded(q, k, v, cu_q, cu_k, max_q, max_k, **options):
        out = varlen_attn(q, k, v, cu_q, cu_k, max_q, max_k, **options)
        tensors = [(tuple(x.shape), x.dtype) for x in (q, k, v, out)]
        calls.append((tensors, (max_q, max_k), options["window_size"], options["scale"]))
        return out

    monkeypatch.setattr(varlen, "varlen_attn", recorded)
    h, tokens, slots = Hyperparameters(), 16384, 64
    heads, head_dim = h.num_heads, h.head_dim
    with FakeTensorMode(), triton_kernels.kernels_of("cuda"):
        model = GPT(h.vocab_size, len(LAYERS), heads, head_dim, h.model_dim, tokens, fp8_head=True).train(training)
        inputs, targets = torch.zeros(tokens, dtype=torch.int32), torch.zeros(tokens, dtype=torch.int64)
        schedule = ForwardSchedule(torch.ones(3), 128, 384, h.max_doc_len)
        loss = model(inputs, targets, torch.zeros(slots, dtype=torch.int32), schedule)
        assert loss.shape == () and loss.dtype == torch.float32
        if training:
            loss.backward()
            for label, param in model.named_parameters():
                found, expected = ((x.shape, x.dtype, x.stride()) for x in (param.grad, param))
                assert found == expected, label
    longest = h.max_doc_len
    layers = [layer for layer in LAYERS if layer.window]
    for layer, call in zip(layers, calls, strict=True):
        p, window = 2 if layer.paired else 1, {"short": 128, "long": 384}[layer.window]
        tensor = ((p * tokens, heads // p, head_dim), torch.bfloat16)
        assert call == ([tensor] * 4, (p * longest, p * longest), (window, 0), h.attention_scale), layer


def test_a_cpu_compiles_all_shapes_of_a_run(shards: Path, tmp_path: Path) -> None:
    """Nine and more, as where the extension is validated: Dynamo's own limit of eight ended the warm-up in a traceback. Inductor,
    which takes minutes, has no part in that limit, nor has the number of layers."""
    whole, layers = "model.compile(dynamic=False, fullgraph=True", "ATTENTION_LAYERS = "
    idea = SCRIPT.read_text().replace(f"{whole})", f'{whole}, backend="eager")')
    idea = idea.replace(f"\n{layers}", f"\nLAYERS = LAYERS[3], *LAYERS[6:9]\n{layers}", 1)
    (tmp_path / "idea.py").write_text(idea)
    more = dict(compile=1, num_scheduled_iterations=12, num_extension_iterations=4, val_every=2)
    command = [sys.executable, f"{tmp_path / 'idea.py'}", *options(shards, tmp_path, **more)]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}"}
    done = run_fresh(command, env=environment, timeout=300)
    assert done.returncode == 0 and "step:16/16 val_loss:" in done.stdout, done.stderr


@pytest.mark.skipif(not shutil.which("g++"), reason="no C++ compiler")
def test_a_full_disk_under_compiled_code_is_told_and_another_fault_gets_a_note(shards, tmp_path, monkeypatch, capsys) -> None:
    """A hundred lines ended in g++'s command or an errno without a name."""
    code, fault = tmp_path / "code", []
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", f"{code}")
    from torch._inductor import codecache

    def write(*_: object, **__: object) -> None:
        code.mkdir(exist_ok=True)
        raise OSError(fault[-1], os.strerror(fault[-1]))

    monkeypatch.setattr(codecache, "write_atomic", write)
    monkeypatch.setattr(train_gpt, "warm_up", lambda *_: torch.compile(lambda x: x.sin() + 1)(torch.ones(3)))
    fault.append(errno.ENOSPC)
    free = rf"free are [\d,]+ bytes in {code}, [\d,]+ bytes in \S+: make room, or name other folders by TORCHINDUCTOR_CACHE_DIR, TRITON"
    ends_with(capsys, options(shards, tmp_path), f"error: rank 0 has no room for compiled code, {free}", 1)
    fault.append(errno.EIO)
    with pytest.raises(RuntimeError, match="Input/output error") as failed:
        train_gpt.main(options(shards, tmp_path, run_id="another"))
    note = f"If the script is right, compiled code in {code} may be damaged: remove it and start again."
    assert failed.value.__notes__ == [note]
    monkeypatch.setattr(train_gpt, "warm_up", lambda *_: 1 / 0)  # which is no fault of the compiler's
    with pytest.raises(ZeroDivisionError) as failed:
        train_gpt.main(options(shards, tmp_path, run_id="a third"))
    assert not hasattr(failed.value, "__notes__")

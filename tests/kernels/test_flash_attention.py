"""Which FlashAttention runs, and what FlashAttention 4 is given: a stand-in for its package computes the
same by blocks, and accepts no other arguments."""

import functools
import importlib.metadata
import re
import sys
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, library
from torch._subclasses.fake_tensor import FakeTensorMode

import triton_kernels as tk
from bench import kernels
from common import ROOT, normal, train_gpt

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
P, H, D = 96, 2, tk.FA4_HEAD_DIM
SCALE = 0.1
ON = "FA4 in training (flash-attn-4 4.0.0b36), FA2 in evaluation"


def banded(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, window: int, scale: float) -> Tensor:
    bias = tk.band_bias(starts, len(q), window, FP32)
    return tk._BandedAttention.apply(q, k, v, bias, tk.graph_input(scale)).to(q.dtype)


class Package:
    """The two functions of flash_attn.cute.interface that are called, by the names that 4.0.0b36 has."""

    wrong = ""  # what to compute wrongly

    def __init__(self) -> None:
        self.calls: list[str] = []

    def _flash_attn_fwd(
        self, q, k, v, *, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
        window_size_left, window_size_right, softmax_scale, return_lse,
    ):  # fmt: skip
        self.calls.append("forward")
        assert cu_seqlens_q is cu_seqlens_k and cu_seqlens_q.dtype == torch.int32
        assert cu_seqlens_q.diff().max() <= max_seqlen_q == max_seqlen_k
        assert window_size_right == 0 and return_lse is True
        if self.wrong == "failing":
            raise RuntimeError("CUDA error: unspecified launch failure\nand more")
        left = window_size_left + (self.wrong == "output")
        out = banded(q, k, v, cu_seqlens_q, left, softmax_scale).contiguous()
        return out, out.new_zeros(q.size(1), len(q), dtype=FP32), None, None, None

    def _flash_attn_bwd(
        self, q, k, v, out, dout, lse, *, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
        window_size_left, window_size_right, softmax_scale, dq, dk, dv,
    ):  # fmt: skip
        self.calls.append("backward")
        assert cu_seqlens_q is cu_seqlens_k and cu_seqlens_q.diff().max() <= max_seqlen_q
        assert (max_seqlen_k, window_size_right) == (max_seqlen_q, 0)
        assert lse.shape == (q.size(1), len(q)) and lse.dtype == FP32
        assert all(x.is_contiguous() for x in (dout, dq, dk, dv))
        kept = SimpleNamespace(
            save_for_backward=lambda *tensors: setattr(kept, "saved_tensors", tensors)
        )
        bias = tk.band_bias(cu_seqlens_q, len(q), window_size_left, FP32)
        tk._BandedAttention.forward(kept, q, k, v, bias, tk.graph_input(softmax_scale))
        gradients = tk._BandedAttention.backward(kept, dout)[:3]
        for name, x, gradient in zip(("dq", "dk", "dv"), (dq, dk, dv), gradients):
            x.copy_(gradient * (1.05 if self.wrong == name else 1))
        return dq, dk, dv


def fa4_names(cu_q, cu_k, max_q, max_k, scale, **window) -> dict[str, object]:
    return dict(
        cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, max_seqlen_q=max_q, max_seqlen_k=max_k,
        softmax_scale=scale, **window,
    )  # fmt: skip


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> Iterator[Package]:
    """An H100 with the package, both as far as Python sees; FlashAttention 2 computes by blocks, as the
    package's stand-in does, and says so."""
    package = Package()
    sound = Package()

    def fa2(q, k, v, cu_q, cu_k, max_q, max_k, dropout, causal, debug, *, scale, **window):
        assert (dropout, causal, debug) == (0.0, False, False)
        package.calls.append("FA2")
        options = fa4_names(cu_q, cu_k, max_q, max_k, scale, **window)
        return sound._flash_attn_fwd(q, k, v, **options, return_lse=True)

    def fa2_backward(
        grad, q, k, v, out, lse, cu_q, cu_k, max_q, max_k, dropout, causal, state, unused,
        *, scale, **window,
    ):  # fmt: skip
        assert (dropout, causal, state.shape, unused.numel()) == (0.0, False, (2,), 0)
        package.calls.append("FA2 backward")
        results = [torch.empty_like(q) for _ in range(3)]
        options = fa4_names(cu_q, cu_k, max_q, max_k, scale, **window)
        options |= dict(zip(("dq", "dk", "dv"), results))
        return sound._flash_attn_bwd(q, k, v, out, grad.contiguous(), lse, **options)

    monkeypatch.setattr(tk, "_fa2_forward", fa2)
    monkeypatch.setattr(tk, "_fa2_backward", fa2_backward)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.Tensor, "cuda", lambda x: x)
    monkeypatch.setattr(importlib.metadata, "version", {"flash-attn-4": "4.0.0b36"}.__getitem__)
    monkeypatch.setattr(tk, "_fa4", None)
    names = ("flash_attn", "flash_attn.cute", "flash_attn.cute.interface")
    for name in names:
        monkeypatch.setitem(sys.modules, name, package)
    tk.flash_attention.cache_clear()
    yield package
    tk.flash_attention.cache_clear()


def inputs(dtype: torch.dtype = BF16, dims: int = D) -> list[Tensor]:
    """q; k, a view of one row more; v, a view of qkv; cu_seqlens with documents of no length."""
    qkv = normal("qkv", (P + 1, 3 * H, dims)).to(dtype)
    q, k, v = (
        x.requires_grad_() for x in (qkv[:P, :H].contiguous(), qkv[:, :H], qkv[:P, H : 2 * H])
    )
    return [q, k.contiguous()[:P], v, torch.tensor((0, 30, 31, P, P, P), dtype=torch.int32)]


# Which one runs


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32, FP64])
def test_flash_attention_takes_16_bits_on_a_gpu(dtype: torch.dtype) -> None:
    x = torch.ones(1, dtype=dtype)
    assert not tk.uses_flash(x)
    with tk.kernels_of("cuda"):
        assert tk.uses_flash(x) == (dtype in (BF16, FP16))


def test_fa4_runs_in_training_once_it_has_been_tried(package) -> None:
    """Not in evaluation, for more than 256 documents, for other heads, or without flash_attention()."""
    *qkv, starts = inputs()

    def used(starts: Tensor = starts, qkv: list[Tensor] = qkv) -> list[str]:
        package.calls.clear()
        tk.attend(*qkv, tk.Band(starts, 20, P, None), SCALE)
        return package.calls

    assert used() == ["FA2"]
    assert tk.flash_attention() == ON
    assert used() == ["forward"]
    many = torch.nn.functional.pad(starts, (0, 251), value=P)
    assert used(many) == ["forward"] and used(torch.cat((many, starts[-1:]))) == ["FA2"]
    assert used(qkv=inputs(dims=64)[:3]) == ["FA2"]
    with torch.no_grad():
        assert used() == ["FA2"]


LONGER = r"FA2: .* 4 to 8 % longer than with FA4 \({}; see runtime/requirements-hop.*\)"
FAULTS = {
    "absent": "PackageNotFoundError: No package metadata was found for flash-attn-4",
    "older": "ImportError: flash-attn-4 4.0.0b35 is installed, not 4.0.0b36",
    "not importable": "ModuleNotFoundError: .*flash_attn.cute.interface.*",
    "failing": "RuntimeError: CUDA error: unspecified launch failure",
    "output": "ArithmeticError: FA4's output is off by .*",
    "dq": "ArithmeticError: FA4's dq is off by 0.05",
    "dk": "ArithmeticError: FA4's dk is off by 0.05",
    "dv": "ArithmeticError: FA4's dv is off by 0.05",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_without_fa4_training_goes_on_and_the_log_says_why(monkeypatch, package, fault) -> None:
    def no_version(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    if fault == "absent":
        monkeypatch.setattr(importlib.metadata, "version", no_version)
    if fault == "older":
        monkeypatch.setattr(importlib.metadata, "version", lambda name: "4.0.0b35")
    if fault == "not importable":
        monkeypatch.setitem(sys.modules, "flash_attn.cute.interface", None)
    package.wrong = fault
    assert re.fullmatch(LONGER.format(FAULTS[fault]), tk.flash_attention())
    package.calls.clear()
    *qkv, starts = inputs()
    tk.attend(*qkv, tk.Band(starts, 20, P, None), SCALE)
    assert package.calls == ["FA2"]


def test_other_machines_do_not_look_for_fa4(monkeypatch, package) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 9))
    assert tk.flash_attention() == "FA2"
    tk.flash_attention.cache_clear()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert tk.flash_attention() == "banded, in PyTorch"
    assert package.calls == []


def test_the_requirements_name_the_version_that_is_called() -> None:
    lines = (ROOT / "runtime/requirements-hopper.txt").read_text().splitlines()
    assert any(line.startswith(f"flash-attn-4[cu13]=={tk.FA4_VERSION} ") for line in lines)


def test_kernels_py_times_both_in_every_stage(monkeypatch, package) -> None:
    """Both get the same documents, windows and scale, and nothing is timed but them."""
    timed = lambda function, inputs: (function(*inputs[0]), 1e-3)[1]
    monkeypatch.setattr(kernels, "median_time", timed)
    monkeypatch.setattr(kernels, "host_time", lambda function: 1e-4)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "H100")
    small = functools.partial(train_gpt.Hyperparameters, batch_unit=64)
    monkeypatch.setattr(train_gpt, "Hyperparameters", small)
    first, _, *table = kernels.attention_table().splitlines()
    assert first == f"attention: {ON}, on H100"
    rows = [line.split(" | ") for line in table[2:]]
    assert len(rows) == 16 and {row[-1] for row in rows} == {"0.0e+00 |"}
    assert {row[3] for row in rows} == {"1000"} and {row[7] for row in rows} == {"1.00"}


# What it is given


@pytest.mark.parametrize("window", [0, 20, torch.tensor(200)])
@pytest.mark.parametrize("calls", [["forward", "backward"], ["FA2", "FA2 backward"]])
def test_both_attend_to_the_band(package, calls: list[str], window: int) -> None:
    """Output and gradients of views, as those of the reference: the same window, scale and documents."""
    if calls[0] == "forward":
        assert tk.flash_attention() == ON
    *qkv, starts = inputs()
    grad = normal("grad", (H, P, D)).bfloat16().transpose(0, 1)
    results = []
    for bias in (None, tk.band_bias(starts, P, int(window), FP32)):
        out = tk.attend(*qkv, tk.Band(starts, window, P, bias), SCALE)
        results.append([out, *torch.autograd.grad(out, qkv, grad)])
    assert package.calls[-2:] == calls
    for found, expected in zip(*results):
        assert found.dtype == BF16 and torch.equal(found, expected)


def test_attention_keeps_the_rules_of_custom_operators(monkeypatch) -> None:
    """Schema, registered autograd, fake tensors of the same shapes, dtypes and strides, tracing."""
    monkeypatch.setattr(tk, "_fa4", Package())
    q, k, v, starts = inputs()
    rest = (starts, tk.graph_input(20), tk.graph_input(SCALE), P, True)
    library.opcheck(torch.ops.bankrun.flash_attention.default, (q, k.detach(), v, *rest))
    plain = [x.detach() for x in (q, k, v)]
    out, lse = tk.flash_attention_op(*plain, *rest)
    args = (out, *plain, out, lse, *rest)
    library.opcheck(torch.ops.bankrun.flash_attention_backward.default, args)


def test_one_graph_serves_all_windows_and_scales(monkeypatch) -> None:
    """One for training and one for evaluation, with attention as one node of it."""
    monkeypatch.setattr(tk, "_fa4", SimpleNamespace())
    nodes = []

    def keep(graph: torch.fx.GraphModule, inputs: list) -> object:
        nodes.append([x for x in graph.graph.nodes if "flash_attention" in str(x.target)])
        return graph.forward

    q = torch.empty(P, H, D, device="meta", dtype=BF16, requires_grad=True)
    starts = torch.empty(5, device="meta", dtype=torch.int32)
    torch._dynamo.reset()
    attend = torch.compile(tk.attend, backend=keep, fullgraph=True, dynamic=False)
    for training in (True, False):
        for window, scale in ((16, 0.1), (32, 0.2)):
            with torch.set_grad_enabled(training):
                band = tk.Band(starts, tk.graph_input(window), P, None)
                assert attend(q, q, q, band, tk.graph_input(scale)).shape == q.shape
    torch._dynamo.reset()
    assert [[node.args[-1] for node in found] for found in nodes] == [[True], [False]]  # FA4


@pytest.mark.parametrize("fa4", [True, False])
def test_every_layer_hands_attention_its_positions_and_window(monkeypatch, fa4: bool) -> None:
    """The model at the record preset's widths in fake tensors: forward and backward, paired and plain."""
    calls = {"forward": [], "backward": []}

    def recorded(name: str, operator):
        def record(*args):
            calls[name].append(args)
            return operator(*args)

        return record

    monkeypatch.setattr(tk, "_fa4", SimpleNamespace() if fa4 else None)
    for name, key in (("", "forward"), ("_backward", "backward")):
        operator = f"flash_attention{name}_op"
        monkeypatch.setattr(tk, operator, recorded(key, getattr(tk, operator)))
    h = train_gpt.Hyperparameters()
    tokens = 16384
    sizes = (h.vocab_size, len(train_gpt.LAYERS), h.num_heads, h.head_dim, h.model_dim, tokens)
    with FakeTensorMode(), tk.kernels_of("cuda"):
        model = train_gpt.GPT(*sizes, fp8_head=True)
        ids = torch.zeros(tokens, dtype=torch.int32)
        starts = torch.zeros(65, dtype=torch.int32)
        schedule = train_gpt.ForwardSchedule(torch.ones(3), 128, 384, 2048)
        model(ids, ids.long(), starts, schedule).backward()
    layers = [layer for layer in train_gpt.LAYERS if layer.window]
    both = zip(layers, calls["forward"], calls["backward"][::-1], strict=True)
    for layer, (q, k, v, starts, *numbers), backward in both:
        p = 2 if layer.paired else 1
        shape = (p * tokens, h.num_heads // p, h.head_dim)
        assert all(x.shape == shape and x.dtype == BF16 for x in (q, k, v, *backward[:5])), layer
        # TMA: dims beside each other, rows at multiples of 16 bytes.
        strides = [x.stride() for x in (q, k, v)]
        assert all(last == 1 and not (a % 8 or b % 8) for a, b, last in strides), layer
        assert starts.shape == (65,) and starts.dtype == torch.int32
        window = {"short": 128, "long": 384}[layer.window]
        expected = [window, h.attention_scale, p * 2048, fa4]
        assert [*map(float, numbers)] == [*map(float, backward[-4:])] == expected, layer

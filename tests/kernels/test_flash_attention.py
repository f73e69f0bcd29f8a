"""Which FlashAttention runs, and what both are given: stand-ins for them compute the same, and accept
no other arguments."""

import importlib.metadata
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

import checks
import triton_kernels as tk
from common import ROOT, normal, tiny_gpt, tiny_settings, train_gpt
from runtime.ranks import Ranks

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
P, H, D = 96, 2, tk.FA4_HEAD_DIM
SCALE = 0.1


def attention_and_gradients(q, k, v, band: tk.Band, scale: float, grad=None) -> list[Tensor]:
    """As the CPU computes both, without autograd, which an operator has not."""
    kept = SimpleNamespace()
    kept.save_for_backward = lambda *tensors: setattr(kept, "saved_tensors", tensors)
    bias = tk.band_bias(band.cu_seqlens, len(q), int(band.window), FP32)
    out = tk._BandedAttention.forward(kept, q, k, v, bias, tk.graph_input(scale, q.device))
    results = [out, *(() if grad is None else tk._BandedAttention.backward(kept, grad)[:3])]
    return [x.to(q.dtype).contiguous() for x in results]


class FA4:
    """The two functions of flash_attn.cute.interface that are called, as 4.0.0b36 has them."""

    def __init__(self, factor: float = 1.0):
        self.factor = factor  # of its output, if it is wrong
        self.calls: list[str] = []

    def options(self, window_size_left, softmax_scale, **documents) -> tuple[tk.Band, float]:
        starts = documents["cu_seqlens_q"]
        longest = documents["max_seqlen_q"]
        assert starts is documents["cu_seqlens_k"] and starts.dtype == torch.int32
        assert starts.diff().max() <= longest == documents["max_seqlen_k"]
        assert documents["window_size_right"] == 0 and len(documents) == 5
        return tk.Band(starts, window_size_left, longest, None), softmax_scale

    def _flash_attn_fwd(self, q, k, v, *, return_lse, **options):
        self.calls.append("FA4")
        out = attention_and_gradients(q, k, v, *self.options(**options))[0] * self.factor
        return out, out.new_zeros(q.size(1), len(q), dtype=FP32), None, None, None

    def _flash_attn_bwd(self, q, k, v, out, dout, lse, *, dq, dk, dv, **options):
        self.calls.append("FA4 backward")
        assert lse.shape == (q.size(1), len(q)) and lse.dtype == FP32
        assert all(x.is_contiguous() for x in (dout, dq, dk, dv))
        _, *found = attention_and_gradients(q, k, v, *self.options(**options), dout)
        for x, gradient in zip((dq, dk, dv), found):
            x.copy_(gradient)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """A Hopper GPU with both packages, as far as Python sees: who is called."""
    package = FA4()

    def band(starts, other, longest, longest_k, window) -> tk.Band:
        assert starts is other and longest == longest_k >= starts.diff().max()
        return tk.Band(starts, window, longest, None)

    def fa2(q, k, v, *rest, scale, window_size_left, window_size_right):
        package.calls.append("FA2")
        *documents, dropout, causal, debug = rest
        assert (dropout, causal, debug, window_size_right) == (0.0, False, False, 0)
        (out,) = attention_and_gradients(q, k, v, band(*documents, window_size_left), scale)
        return out, out.new_zeros(q.size(1), len(q), dtype=FP32), None, None, None

    def fa2_backward(grad, q, k, v, out, lse, *rest, scale, window_size_left, window_size_right):
        package.calls.append("FA2 backward")
        *documents, dropout, causal, state, unused = rest
        assert (dropout, causal, state.shape, unused.numel()) == (0.0, False, (2,), 0)
        options = band(*documents, window_size_left), scale
        return tuple(attention_and_gradients(q, k, v, *options, grad)[1:])

    monkeypatch.setattr(tk, "_fa2_forward", fa2)
    monkeypatch.setattr(tk, "_fa2_backward", fa2_backward)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.Tensor, "cuda", lambda x: x)
    monkeypatch.setattr(importlib.metadata, "version", {"flash-attn-4": "4.0.0b36"}.__getitem__)
    monkeypatch.setattr(tk, "_fa4", None)
    monkeypatch.setattr(os, "environ", os.environ | {"HOME": str(tmp_path)})
    for name in ("flash_attn", "flash_attn.cute", "flash_attn.cute.interface"):
        monkeypatch.setitem(sys.modules, name, package)
    monkeypatch.setattr(tk, "flash_attention", tk.flash_attention.__wrapped__)  # without its cache
    return package.calls


def inputs(dims: int = D) -> list[Tensor]:
    """q; k, a view of one row more; v, a view of qkv; cu_seqlens with documents of no length."""
    qkv = normal("qkv", (P + 1, 3 * H, dims)).bfloat16()
    q, k, v = (
        x.requires_grad_() for x in (qkv[:P, :H].contiguous(), qkv[:, :H], qkv[:P, H : 2 * H])
    )
    return [q, k.contiguous()[:P], v, torch.tensor((0, 30, 31, P, P, P), dtype=torch.int32)]


def test_fa4_runs_in_training_once_it_has_been_tried(calls) -> None:
    """Not in evaluation, for more than 256 documents, for other heads, or without flash_attention()."""
    *qkv, starts = inputs()

    def used(starts: Tensor = starts, qkv: list[Tensor] = qkv) -> list[str]:
        calls.clear()
        tk.attend(*qkv, tk.Band(starts, 20, P, None), SCALE)
        return calls

    assert used() == ["FA2"]
    said = tk.flash_attention()
    others = "FA2 in evaluation and above 257 document slots"
    assert said == f"FA4 in training (flash-attn-4 4.0.0b36), {others}"
    assert used() == ["FA4"]
    many = torch.nn.functional.pad(starts, (0, 251), value=P)
    assert used(many) == ["FA4"] and used(torch.cat((many, starts[-1:]))) == ["FA2"]
    assert used(qkv=inputs(dims=64)[:3]) == ["FA2"]
    with torch.no_grad():
        assert used() == ["FA2"]


@pytest.mark.parametrize("fault", ["absent", "fails"])
def test_without_fa4_training_goes_on_and_the_log_says_why(monkeypatch, calls, fault: str) -> None:
    """A package whose kernels do not compile here is found before the first step."""
    package = None if fault == "absent" else SimpleNamespace()
    monkeypatch.setitem(sys.modules, "flash_attn.cute.interface", package)
    said = tk.flash_attention()
    why = "ModuleNotFoundError" if fault == "absent" else "AttributeError"
    assert said.startswith("FA2: ") and why in said and "\n" not in said
    calls.clear()
    *qkv, starts = inputs()
    tk.attend(*qkv, tk.Band(starts, 20, P, None), SCALE)
    assert calls == ["FA2"]


def test_fa4_that_is_off_makes_room_for_fa2(monkeypatch, calls) -> None:
    """The check before the clock sees it, and what is compiled then has FlashAttention 2."""
    monkeypatch.setitem(sys.modules, "flash_attn.cute.interface", FA4(1.5))
    assert tk.flash_attention().startswith("FA4")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # for Dynamo
    model = tiny_gpt(BF16, head_dim=D)
    torch._dynamo.reset()
    model.loss = torch.compile(model.loss, backend="eager", fullgraph=True, dynamic=False)
    others = [name for name in tk.KERNELS if name != "attend"]
    calls.clear()
    with tk.kernels_of("cuda", others):
        first, second = checks.self_checked(model, 48)
    torch._dynamo.reset()
    assert first.startswith("attention: FA2, as FA4 is off: loss ")
    assert second.startswith("kernels agree with PyTorch on a card: loss ")
    assert tk._fa4 is None and set(calls) == {"FA2", "FA2 backward"}


def test_the_setting_keeps_fa4_out(monkeypatch, calls, shards: Path, tmp_path: Path) -> None:
    h = tiny_settings(shards, tmp_path, flash_attention=2)
    ranks = Ranks(0, 1, torch.device("cuda"))
    run = SimpleNamespace(settings=h, plan=train_gpt.make_plan(h), ranks=ranks)
    said = []
    agree = lambda *args: said.append(tk.agree_on_attention(*args))
    monkeypatch.setattr(train_gpt, "agree_on_attention", agree)
    monkeypatch.setattr(train_gpt, "build", None)  # there is no GPU
    with pytest.raises(TypeError):
        train_gpt.prepare(run)
    assert said == ["FA2"] and tk._fa4 is None and calls == []


def test_fa4_keeps_what_it_compiles_where_nobody_else_writes(monkeypatch, calls, tmp_path) -> None:
    """Known to the package when it is imported: it reads the variables then."""
    folder = tmp_path / ".cache/bankrun/flash-attn-4"
    folder.mkdir(parents=True)
    seen, load = {}, importlib.import_module
    monkeypatch.setattr(importlib, "import_module", lambda x: seen.update(os.environ) or load(x))
    tk.flash_attention()
    assert folder.stat().st_mode & 0o777 == 0o700
    assert seen["FLASH_ATTENTION_CUTE_DSL_CACHE_DIR"] == str(folder)
    assert seen["FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"] == "1"


def test_other_machines_do_not_look_for_fa4(monkeypatch, calls) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 9))
    assert tk.flash_attention() == "FA2"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert tk.flash_attention() == "banded, in PyTorch"
    assert calls == []


def test_the_requirements_name_the_version_that_is_called() -> None:
    lines = (ROOT / "runtime/requirements-hopper.txt").read_text().splitlines()
    assert any(line.startswith(f"flash-attn-4[cu13]=={tk.FA4_VERSION} ") for line in lines)


@pytest.mark.parametrize("window", [0, 20, tk.graph_input(200, "cpu")])
@pytest.mark.parametrize("package", ["FA4", "FA2"])
def test_both_attend_to_the_band(calls, package: str, window: int | Tensor) -> None:
    """Output and gradients of views, as those of a CPU: the same window, scale and documents."""
    if package == "FA4":
        tk.flash_attention()
    *qkv, starts = inputs()
    grad = normal("grad", (H, P, D)).bfloat16().transpose(0, 1)
    results = []
    for bias in (None, tk.band_bias(starts, P, int(window), FP32)):
        out = tk.attend(*qkv, tk.Band(starts, window, P, bias), SCALE)
        results.append([out, *torch.autograd.grad(out, qkv, grad)])
    assert calls[-2:] == [package, f"{package} backward"]
    assert all(torch.equal(*pair) for pair in zip(*results))


def test_one_graph_serves_all_windows_and_scales(monkeypatch) -> None:
    """One for training and one for evaluation, with attention as one node of it."""
    monkeypatch.setattr(tk, "_fa4", SimpleNamespace())
    nodes = []

    def keep(graph: torch.fx.GraphModule, inputs: list) -> object:
        nodes.append([x for x in graph.graph.nodes if "flash_attention" in str(x.target)])
        # From an operator with an input on the CPU, Inductor takes the results for unaligned.
        assert {x.device.type for x in inputs} == {"meta"}
        return graph.forward

    q = torch.empty(P, H, D, device="meta", dtype=BF16, requires_grad=True)
    starts = torch.empty(5, device="meta", dtype=torch.int32)
    torch._dynamo.reset()
    attend = torch.compile(tk.attend, backend=keep, fullgraph=True, dynamic=False)
    for training in (True, False):
        for window, scale in ((16, 0.1), (32, 0.2)):
            with torch.set_grad_enabled(training):
                window, scale = (tk.graph_input(x, q.device) for x in (window, scale))
                band = tk.Band(starts, window, P, None)
                assert attend(q, q, q, band, scale).shape == q.shape
    torch._dynamo.reset()
    assert [[node.args[-1] for node in found] for found in nodes] == [[True], [False]]  # FA4


def test_all_ranks_have_one_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node without the package, or on which it fails, takes 4 from all."""
    monkeypatch.setattr(tk, "_fa4", "the package")
    monkeypatch.setattr(tk, "flash_attention", lambda: "FA4 here")
    for others, expected in ((["FA4 of 1"], "FA4 here"), (["FA4 of 1", "FA2"], "FA2")):
        assert tk.agree_on_attention(lambda own: [own, *others]) == expected
    assert tk._fa4 is None

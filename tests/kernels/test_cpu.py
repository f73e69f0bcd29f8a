"""What a run on a CPU chooses, and the arithmetic of bf16 units, which PyTorch has on any CPU."""

import math
import os
import shutil
import sys

import pytest
import torch
from torch import Tensor

import triton_kernels as tk
from common import ROOT, U16, forget_cpu, normal, random_batch, run_fresh, tiny_gpt, train_gpt
from runtime import cpu

AMX, AVX512 = "_is_amx_tile_supported", "_is_avx512_bf16_supported"
every_cpu = pytest.mark.parametrize("names", [(), (AVX512,), (AMX, AVX512)])


def with_units(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """A CPU for which PyTorch has these answers, and no others."""
    for name in (AMX, AVX512):
        monkeypatch.setattr(torch.cpu, name, lambda name=name: name in names, raising=False)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)


@every_cpu
def test_the_units_decide_alone(monkeypatch, names: tuple[str, ...]) -> None:
    chosen, precision, said = {
        (): (cpu.CPU_FP32, "medium", "no bf16 units, fp32 by oneDNN"),
        (AVX512,): (cpu.CPU_BF16, "medium", "bf16 operands by AVX512_BF16, fp32 by oneDNN"),
        (AMX, AVX512): (cpu.CPU_BF16, "highest", "bf16 operands by AMX, fp32 by PyTorch's"),
    }[names]
    with_units(monkeypatch, *names)
    monkeypatch.setattr(cpu, "rounds_fp32", lambda: AMX in names)
    words = {cpu.use_cpu() for _ in range(3)}
    assert len(words) == 1 and said in words.pop()
    assert (cpu.chosen, torch.get_float32_matmul_precision()) == (chosen, precision)
    forget_cpu()
    assert (cpu.chosen, torch.get_float32_matmul_precision()) == (None, "highest")


COMPILED = """
import torch
from torch._inductor.utils import run_and_get_code
import triton_kernels as tk
from runtime import cpu
torch.set_num_threads(2)
table, tokens = torch.ones(8, 16, requires_grad=True), torch.arange(512, dtype=torch.int32) % 8
for compiled in (False, True):
    cpu.use_cpu(compiled)
    loss = torch.compile(lambda: tk.lookup(table, tokens=tokens)[0].square().sum())
    print("atomic_add" in "".join(run_and_get_code(lambda: loss().backward())[1]))
    torch._dynamo.reset()
"""


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("g++"), reason="no C++ compiler")
def test_compiled_gradients_are_added_in_one_order(tmp_path) -> None:
    """Inductor adds them by atomics unless it is asked not to: two runs had other bits."""
    caches = {"TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1", "TORCHINDUCTOR_CACHE_DIR": f"{tmp_path}"}
    env = {**os.environ, **caches, "PYTHONPATH": f"{ROOT}"}
    done = run_fresh([sys.executable, "-c", COMPILED], env=env, timeout=300)
    assert done.stdout == "True\nFalse\n", done


@every_cpu
def test_fp32_matmuls_round_no_operands_whatever_pytorch_knows(monkeypatch, names) -> None:
    """Without /proc/cpuinfo it knew no AMX, which oneDNN used: nothing was learnt, in silence."""
    with_units(monkeypatch, *names)
    cpu.use_cpu()
    x, eye = 1 + torch.arange(300 * 128).view(300, 128) / 2**16, torch.eye(128)
    assert torch.equal(x @ eye, x) and torch.equal((x[None] @ eye[None])[0], x)
    assert not cpu.rounds_fp32()


def test_only_fp32_and_bf16_on_a_cpu_are_served(monkeypatch) -> None:
    with_units(monkeypatch, AVX512)
    cpu.use_cpu()
    served = []
    for dtype in (torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.int32):
        served.append(tk.kernel_device(torch.empty(1, dtype=dtype)) == cpu.CPU_BF16)
    assert served == [True, True, False, False, False]
    assert tk.kernel_device(torch.empty(1, dtype=torch.bfloat16, device="meta")) == "meta"


def mlp_fp8(x: Tensor, W_fc: Tensor, W_proj: Tensor) -> Tensor:
    W8, scale = tk.quantize_by_largest(W_fc.detach().float())  # the same numbers in any dtype
    return tk.relu_squared_mlp_fp8(x, W_fc, W_proj, W8, scale)


FUNCTIONS = {"linear": tk.linear, "mlp": tk.relu_squared_mlp, "mlp_fp8": mlp_fp8}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_bf16_operands_err_by_their_roundings(name: str, dtype: torch.dtype) -> None:
    """Results and gradients, in their inputs' dtype, against fp64.

    Each of at most six roundings on the way, U16 relative, adds an error of random sign: by norm they
    come to √6 U16 at most, and squares double one. fp32 is a hundred times nearer.
    """
    shapes = [(70, 16), (64, 16), (64, 16)][: 2 if name == "linear" else 3]
    inputs = [normal(f"input {i}", shape).to(dtype) for i, shape in enumerate(shapes)]

    def results(dtype: torch.dtype) -> list[Tensor]:
        leaves = [x.to(dtype).requires_grad_() for x in inputs]
        out = FUNCTIONS[name](*leaves)
        return [out, *torch.autograd.grad(out, leaves, normal("g", tuple(out.shape)).to(dtype))]

    def errors(found: list[Tensor]) -> list[float]:
        return [((x.double() - y).norm() / y.norm()).item() for x, y in zip(found, exact)]

    exact = results(torch.float64)
    with tk.kernels_of(cpu.CPU_BF16):
        narrow = results(dtype)
    assert all(x.dtype == dtype for x in narrow)
    assert max(errors(narrow)) < 4 * U16
    if dtype == torch.float32:
        assert max(errors(narrow)) > U16 / 16  # bf16 was there
        assert max(errors(results(dtype))) < U16 / 100


@pytest.mark.parametrize("shape", [(3, 40, 16), (3, 16, 16)])
def test_polar_express_multiplies_in_bf16(shape) -> None:
    """Its operands are bf16 in any case: widened for the matmul or not, it is rounded once."""
    G = normal("G", shape)
    wide = train_gpt.polar_express(G)
    with tk.kernels_of(cpu.CPU_BF16):
        narrow = train_gpt.polar_express(G)
    assert narrow.dtype == wide.dtype == torch.bfloat16
    values = [torch.linalg.svdvals(x.double()) for x in (narrow, wide)]
    assert (values[0] - values[1]).abs().max() < 8 * U16


@pytest.mark.parametrize("least", [1.0, 1e-3, 1e-6])
@pytest.mark.parametrize("shape", [(3, 64, 16), (3, 16, 16), (3, 16, 64)], ids=str)
def test_polar_express_without_bf16_is_that_of_fp64(shape: tuple[int, ...], least: float) -> None:
    """Singular values from 1 to least, a hundred times nearer to fp64's than by bf16.

    bf16 loses all values below U16 in the rounding of the largest. The quintics enlarge small values up
    to 1,000 times.
    """
    U, _, Vh = torch.linalg.svd(normal("G", shape).double(), full_matrices=False)
    G = (U * torch.logspace(0, math.log10(least), 16, dtype=torch.float64)) @ Vh
    exact, rounded = train_gpt.polar_express(G), train_gpt.polar_express(G.float())
    with tk.kernels_of(cpu.CPU_FP32):
        found = [train_gpt.polar_express(scale * G.float()) for scale in (1, 1e3)]
        zero = train_gpt.polar_express(torch.zeros(shape))
    error = lambda x: ((x.double() - exact).norm() / exact.norm()).item()
    assert [x.dtype for x in found] == 2 * [torch.float32] and not zero.any()
    assert 100 * max(map(error, found)) < error(rounded)


def test_the_model_trains_in_fp32_around_bf16_matmuls() -> None:
    """Eleven layers of bf16's rounding are a few per cent of a gradient's norm, in fp32."""
    model = tiny_gpt(torch.float32)
    schedule = train_gpt.ForwardSchedule(torch.ones(1), 16, 48)
    batch = random_batch(64, 128, (0, 20))

    def gradients() -> dict[str, Tensor]:
        model.zero_grad()
        model(*batch, schedule).backward()
        return {label: p.grad.clone() for label, p in model.named_parameters()}

    exact = gradients()
    with tk.kernels_of(cpu.CPU_BF16):
        narrow = gradients()
    for label in ("attn", "mlp", "embed", "lm_head", "value_embeds"):
        error = ((narrow[label] - exact[label]).norm() / exact[label].norm()).item()
        assert narrow[label].dtype == torch.float32 and 0 < error < 11 * 2 * U16, (label, error)

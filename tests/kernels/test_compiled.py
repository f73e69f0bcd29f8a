"""Each GPU kernel compiles for its chips, as launched at the record preset's size, and fits them.

The cases are those of bench/kernels.py. Their launchers run on tensors without memory, up to the
launch itself; Triton then compiles what it was given for sm_90 (H100) and sm_120 (RTX 5090). For
the other chips bench/kernels.py --chip does the same.
"""

import inspect
import re

import pytest
import torch

pytest.importorskip("triton", reason="Triton has no wheel here: its kernels compile elsewhere")

import checks
import triton_kernels as tk
from bench import kernels as bench

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn


@pytest.mark.parametrize("capability", [90, pytest.param(120, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", bench.cases())
def test_kernel_compiles_and_fits(name: str, capability: int) -> None:
    launch = bench.launch_of(bench.cases()[name], capability)
    found = bench.compiled(launch, capability)
    assert found.shared <= bench.CHIPS[capability].shared_memory
    threads = 32 * launch.options["num_warps"]
    assert threads * found.registers <= 65536  # all of a processor's
    if capability == 90:  # Triton 3.6 spills outside the loss's inner loops
        assert found.spilled <= (24 if tk.triton.__version__.startswith("3.6") else 0)
    if "quantize" in name:  # no tile turns in FP8
        assert not re.search(r"st\.shared\S*\.b8", found.ptx)


def test_no_constant_of_a_kernel_is_a_string_by_default() -> None:
    """Triton 3.6 does not compile such a function, and so no run would start."""
    kernels = [x for x in vars(tk).values() if isinstance(x, tk.triton.JITFunction)]
    assert len(kernels) > 20
    for kernel in kernels:
        defaults = [x.default for x in inspect.signature(kernel.fn).parameters.values()]
        assert not any(isinstance(default, str) for default in defaults), kernel


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, BF16, torch.float16])
def test_a_tile_of_fp32_does_not_turn_in_fp8(dtype: torch.dtype) -> None:
    """On an H100 37 % of such a q_t were wrong (Triton 3.6), and 25 % of a bf16 tile cast first."""
    x = torch.empty(64, 96, dtype=dtype, device="meta")
    with bench.recorded_launches(90) as launches:
        q, q_t = tk.quantize_fp8_both(x, 1.0, E4M3)
    (launch,) = launches
    assert launch.options["BOTH"] == (dtype.itemsize == 2)
    assert (q.shape, q_t.shape) == ((64, 96), (96, 64))
    assert q_t.is_contiguous()


@pytest.mark.parametrize("paired, offset", [(False, False), (True, False), (False, True)])
def test_a_single_token_compiles(paired: bool, offset: bool) -> None:
    """A sample after an empty prompt: Triton makes a constant of a length of 1."""
    new = lambda *shape: torch.empty(shape, dtype=BF16, device="meta")
    table = new(2, 64, 2)
    with bench.recorded_launches(90) as launches:
        q, k, rstds = tk.launch_norm_rotate(new(1, 18, 128), table, paired, offset)
        tk.launch_norm_rotate_backward(q, q, q, q, k, rstds, table, paired, offset)
        tk.launch_relu_squared(new(1, 768), new(3072, 768), None)
    assert len(launches) == 3
    for launch in launches[: 2 if paired or offset else 3]:
        assert bench.compiled(launch, 90).ptx


@pytest.mark.parametrize("K", [1, 2, 3, 4])
@pytest.mark.parametrize("T, V", checks.FP8_LOSS_SHAPES)
def test_shapes_of_the_loss_that_a_gpu_checks_compile(T: int, V: int, K: int) -> None:
    new = lambda dtype, *shape: torch.empty(shape, dtype=dtype, device="meta")
    inputs = new(BF16, T, V), new(torch.int64, T, K), new(torch.float32, K)
    with bench.recorded_launches(90) as launches:
        tk.loss_and_fp8_gradient(*inputs, 1.0)
    assert bench.compiled(launches[0], 90).ptx


@pytest.mark.parametrize("name", ["XXT", "relu_squared_fp8", "relu_squared_backward"])
def test_matmuls_fit_a_small_chip(name: str) -> None:
    """An RTX 4090 has 99 KB of shared memory a block."""
    found = bench.compiled(bench.launch_of(bench.cases()[name], 89), 89)
    assert found.shared <= bench.CHIPS[89].shared_memory

"""What a run on a CPU chooses for its products, by what the CPU has, and what is bf16 there.

Every choice asks PyTorch which units there are and never a stopwatch: the same CPU chooses the same, so that a run repeats its
own bits and a resumed one goes on with them. The log's environment says what was chosen; on another kind of CPU bits differ,
and the note of a resumed run shows both. fp64, and fp32 outside of a run, compute as PyTorch does by itself.
"""

import ctypes
import platform

import torch

import triton_kernels
from triton_kernels import CPU_BF16


def bf16_units() -> str:
    """Those that this CPU multiplies bf16 numbers with, summing in fp32; empty: none. PyTorch says so, no stopwatch."""
    names = {"AMX": "_is_amx_tile_supported", "AVX512_BF16": "_is_avx512_bf16_supported"}
    if not torch.backends.mkldnn.is_available():
        return ""
    return next((unit for unit, name in names.items() if getattr(torch.cpu, name, bool)()), "")


def use_cpu() -> str:
    """Products as this CPU makes them best, in words for the log. The same CPU chooses the same: a run repeats its own bits.

    "medium" hands fp32 products to oneDNN, which also on an AMD CPU uses all of AVX-512, where MKL uses half of it. They stay
    in fp32, but on AMX, where oneDNN would round their operands: there they stay with MKL. Where there are bf16 units, linear
    maps, the MLP and Polar Express have bf16 operands; attention and head stay in fp32.
    """
    units = bf16_units()
    triton_kernels.cpu = CPU_BF16 if units else None
    torch.set_float32_matmul_precision("highest" if units == "AMX" else "medium")
    if platform.libc_ver()[0] == "glibc":  # freed memory stays: its pages would be faulted in again, a third of an MLP's time
        ctypes.CDLL(None).mallopt(-4, 0)  # M_MMAP_MAX: large blocks come from the heap too
        ctypes.CDLL(None).mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD: and the heap never shrinks
    library = "oneDNN" if units != "AMX" and torch.backends.mkldnn.is_available() else "PyTorch's own library"
    narrow = f"bf16 operands by {units}" if units else "no bf16 units"
    return f"products: {narrow}, fp32 by {library}, on {torch.backends.cpu.get_cpu_capability()}"


def forget_cpu() -> None:
    """Undo what use_cpu chose: products in full precision, for tests and comparisons."""
    triton_kernels.cpu = None
    torch.set_float32_matmul_precision("highest")

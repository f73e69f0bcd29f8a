"""What a run on a CPU does differently, and what stands in for Triton where there is none.

Every choice asks PyTorch which units the CPU has, and never a stopwatch. So the same CPU chooses the
same, and a run repeats its own bits, also when it is resumed. The log says what was chosen; another
kind of CPU gives other bits. In fp64, and outside of a run, PyTorch computes as it does by itself.
"""

import ctypes
import platform
from collections.abc import Callable
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import Tensor

CPU_BF16 = "CPU with bf16 units"
CPU_FP32 = "CPU without bf16 units"
chosen: str | None = None  # one of these during a run on a CPU; set by use_cpu


def bf16_units() -> str:
    """The units of this CPU that multiply bf16 and sum in fp32; empty if it has none."""
    names = {"AMX": "_is_amx_tile_supported", "AVX512_BF16": "_is_avx512_bf16_supported"}
    if not torch.backends.mkldnn.is_available():
        return ""
    for unit, name in names.items():
        if hasattr(torch.cpu, name) and getattr(torch.cpu, name)():
            return unit
    return ""


def rounds_fp32() -> bool:
    """Whether matmuls now round their fp32 operands: seen in numbers that need 24 bits of mantissa. Without
    /proc/cpuinfo PyTorch sees no units on a CPU with AMX, and oneDNN, which asks the CPU, uses them."""
    x = 1 + torch.arange(64 * 64).view(64, 64) / 4096
    return not torch.equal(x @ torch.eye(64), x)


def use_cpu(compiled: bool = False) -> str:
    """Choose how matmuls run on this CPU, for the whole process; returns one line for the log.

    With bf16 units the linear maps, the MLP and Polar Express have bf16 operands; attention and LM head
    stay in fp32. Without such units nothing is in bf16. "medium" precision hands fp32 matmuls to oneDNN,
    which uses all of AVX-512 also on AMD, where MKL uses half of it. Where oneDNN rounds fp32 operands,
    as on AMX, they stay with MKL. compiled: torch.compile would add the gradients of embeddings with
    atomics, in an order that differs from run to run, so PyTorch is asked for deterministic code.
    """
    global chosen
    if compiled:
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # costs time; nothing reads it
    units = bf16_units()
    chosen = CPU_BF16 if units else CPU_FP32
    torch.set_float32_matmul_precision("medium")
    rounded = rounds_fp32()
    if rounded:
        torch.set_float32_matmul_precision("highest")
    if platform.libc_ver()[0] == "glibc":
        # Keep freed memory: faulting its pages in again takes a third of an MLP's time.
        ctypes.CDLL(None).mallopt(-4, 0)  # M_MMAP_MAX: large blocks come from the heap too
        ctypes.CDLL(None).mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD: the heap never shrinks
    use_onednn = torch.backends.mkldnn.is_available() and not rounded
    library = "oneDNN" if use_onednn else "PyTorch's own library"
    narrow = f"bf16 operands by {units}" if units else "no bf16 units"
    capability = torch.backends.cpu.get_cpu_capability()
    return f"matmuls: {narrow}, fp32 by {library}, on {capability}"


# -----------------------------------------------------------------------------
# Collectives of shards

# Renamed in PyTorch 2.13.
scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class _Exchange:
    """A reduce-scatter in flight: each rank gets the others' rows of its shard, and adds them in rank order.

    Faster: gloo's own copies the whole gradient and sums all of it on every rank, for twice the bytes. With
    it a demo step on two ranks takes 5 to 10 % longer.
    Must hold: own, a part of grad, is written only after grad has been sent.
    """

    def __init__(self, own: Tensor, grad: Tensor):
        self.own = own
        self.received: Tensor | None = torch.empty_like(grad)
        self.work = dist.all_to_all_single(self.received, grad, async_op=True)

    def wait(self) -> None:
        self.work.wait()
        if self.received is not None:
            torch.sum(self.received.view(-1, len(self.own)), 0, out=self.own)
            self.received = None


def reduce_scatter(own: Tensor, grad: Tensor) -> "dist.Work | _Exchange":
    """Start the sum of grad (W·n,) over the W ranks. own (n,), which may be a part of grad, holds this
    rank's rows after wait()."""
    return scatter_single(own, grad, async_op=True) if grad.is_cuda else _Exchange(own, grad)


# -----------------------------------------------------------------------------
# Without Triton, which has no wheel for macOS and some processors, kernels are defined all the same.
# A CPU launches none of them.


class JITFunction:
    """A kernel that cannot run."""

    def __init__(self, function: Callable):
        self.__name__ = function.__name__


class TensorDescriptor:
    """Only a launch makes one."""


tl = SimpleNamespace(constexpr=lambda value: SimpleNamespace(value=value))
triton = SimpleNamespace(
    jit=JITFunction,
    JITFunction=JITFunction,
    cdiv=lambda x, y: -(-x // y),
    next_power_of_2=lambda n: 1 << (n - 1).bit_length(),
    knobs=SimpleNamespace(runtime=SimpleNamespace(interpret=False)),
)

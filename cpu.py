"""What a run on a CPU does otherwise: products by what the CPU has, what is bf16 there, Polar Express without bf16 units,
reduce-scatter by an exchange.

Every choice asks PyTorch which units there are and never a stopwatch: the same CPU chooses the same, so that a run repeats its
own bits and a resumed one goes on with them. The log's environment says what was chosen; on another kind of CPU bits differ,
and the note of a resumed run shows both. fp64, and fp32 outside of a run, compute as PyTorch does by itself.
"""

import ctypes
import platform
import threading

import torch
import torch.distributed as dist
from torch import Tensor

import triton_kernels
from triton_kernels import CPU_BF16, CPU_FP32


def bf16_units() -> str:
    """Those that this CPU multiplies bf16 numbers with, summing in fp32; empty: none. PyTorch says so, no stopwatch."""
    names = {"AMX": "_is_amx_tile_supported", "AVX512_BF16": "_is_avx512_bf16_supported"}
    if not torch.backends.mkldnn.is_available():
        return ""
    return next((unit for unit, name in names.items() if getattr(torch.cpu, name, bool)()), "")


def rounds_fp32() -> bool:
    """Do products now round fp32 operands? Seen by what 24 bits hold and 8 do not, as PyTorch need not know: without
    /proc/cpuinfo it takes a CPU with AMX for one without any units, and oneDNN, which asks the CPU itself, uses them."""
    x = 1 + torch.arange(64 * 64).view(64, 64) / 4096
    return not torch.equal(x @ torch.eye(64), x)


def use_cpu(compiled: bool = False) -> str:
    """Products as this CPU makes them best, in words for the log. The same CPU chooses the same: a run repeats its own bits.

    "medium" hands fp32 products to oneDNN, which also on an AMD CPU uses all of AVX-512, where MKL uses half of it. They stay
    in fp32, but where oneDNN rounds their operands, as on AMX: there they stay with MKL. Where there are bf16 units, linear
    maps, the MLP and Polar Express have bf16 operands; attention and head stay in fp32. Elsewhere nothing is in bf16.
    compiled: torch.compile would add the gradients of embeddings with atomics, in an order that changes from run to run.
    """
    if compiled:
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # as before: it takes time, and nothing reads that
    units = bf16_units()
    triton_kernels.cpu = CPU_BF16 if units else CPU_FP32
    torch.set_float32_matmul_precision("medium")
    if rounded := rounds_fp32():
        torch.set_float32_matmul_precision("highest")
    if platform.libc_ver()[0] == "glibc":  # freed memory stays: its pages would be faulted in again, a third of an MLP's time
        ctypes.CDLL(None).mallopt(-4, 0)  # M_MMAP_MAX: large blocks come from the heap too
        ctypes.CDLL(None).mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD: and the heap never shrinks
    library = "oneDNN" if not rounded and torch.backends.mkldnn.is_available() else "PyTorch's own library"
    narrow = f"bf16 operands by {units}" if units else "no bf16 units"
    return f"products: {narrow}, fp32 by {library}, on {torch.backends.cpu.get_cpu_capability()}"


def forget_cpu() -> None:
    """Undo what use_cpu chose: products in full precision, for tests and comparisons."""
    triton_kernels.cpu = None
    torch.set_float32_matmul_precision("highest")
    torch.use_deterministic_algorithms(False)


def polar_express_in_fp32(G: Tensor, coefficients: tuple[tuple[float, float, float], ...]) -> Tensor:
    """polar_express of G (n, rows, cols) by quintics (a, b, c) without bf16, which a CPU without units for it only rounds to.

    A tall X is multiplied twice: each step turns it into X·P, P = aI + bA + cA² of A = XᵀX, and A into P·A·P. So the steps work
    on the small A and on the product of all P; for cols = rows/4 they take 0.6 of the operations. A's rounding moves singular
    values below 3e-4 of the largest; bf16 moves those below 1e-2. In G's dtype, at least fp32.
    """
    X = G.to(torch.promote_types(G.dtype, torch.float32))
    X = X / (X.norm(dim=(-2, -1), keepdim=True) * 1.02 + 1e-6)
    if X.size(-2) <= X.size(-1):
        for a, b, c in coefficients:
            A = X @ X.mT
            X = torch.baddbmm(X, torch.baddbmm(A, A, A, beta=b, alpha=c), X, beta=a)
        return X
    A, P, factor = X.mT @ X, None, None
    for a, b, c in coefficients:
        if P is not None:
            A = P @ (A @ P)  # all are polynomials in one matrix: their order is free
        P = torch.baddbmm(A, A, A, beta=b, alpha=c)
        P.diagonal(dim1=-2, dim2=-1).add_(a)
        factor = P if factor is None else factor @ P
    return X @ factor


class _Exchange:
    """A reduce-scatter under way: every rank gets the others' rows of its share, and adds them up, in the order of the ranks.
    Faster: gloo's own copies the whole gradient and then sums all of it on every rank, for twice the bytes. Must hold: own,
    a part of grad, is written only after grad has been sent; wait may be called twice, from several threads."""

    def __init__(self, own: Tensor, grad: Tensor):
        self.own, self.received, self.lock = own, torch.empty_like(grad), threading.Lock()
        self.work = dist.all_to_all_single(self.received, grad, async_op=True)

    def wait(self) -> None:
        self.work.wait()
        with self.lock:
            if self.received is not None:
                torch.sum(self.received.view(-1, len(self.own)), 0, out=self.own)
                self.received = None


def reduce_scatter(own: Tensor, grad: Tensor) -> "dist.Work | _Exchange":
    """Launch the sum of grad (W·n,) over the W ranks; own (n,), a part of it or not, holds this rank's rows after wait()."""
    if not grad.is_cuda:
        return _Exchange(own, grad)
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor  # renamed in PyTorch 2.13
    return scatter(own, grad, async_op=True)

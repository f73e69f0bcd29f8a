"""The trainer's operations that have a GPU kernel, each beside its reference in plain PyTorch.

The body of a public function is its reference: the mathematics, and what a CPU runs. The decorator
`has_kernel` puts a kernel in its place where there is one:

    @has_kernel
    def XXT(X, out=None): ...  # plain PyTorch

    @XXT.kernel("cuda")
    def _XXT_cuda(X, out=None): ...  # takes over for 16-bit tensors on a GPU

Chapters, in the order of learning:

     1  How a function finds its kernel
     2  Transposes: tiles that turn on the chip
     3  Embeddings: sums without atomics
     4  The residual stream: norm and sum, left to torch.compile
     5  Queries and keys: norm, rotation and offset in one kernel each way
     6  Attention within documents and a window: FlashAttention, or blocks on a CPU
     7  Symmetric matmuls: what Polar Express is made of
     8  Linear maps and the MLP: an epilogue after a matmul
     9  FP8: quantization and matmuls
    10  LM head and loss: one kernel whose programs wait for each other
    11  fp32 weights as 16 + 16 bits
    12  Compiled on a GPU, in pieces that fit the cache on a CPU

A chapter goes from the mathematics to the launch configuration, the kernel, its launcher and its
custom operators. A kernel's docstring says what it computes, why that is faster ("Faster"), what
must stay true ("Must hold") and which public record had the idea ("From"; else it is this project's).
R61 is record 61 of the public speedrun, https://github.com/KellerJordan/modded-nanogpt.

Precision. Kernels compute in fp32 and store in the dtype of their pointers, so that Triton's interpreter
runs in fp32 and fp16 what GPUs run in bf16 and FP8. References compute in the dtype they are given, but sum
matmuls of bf16 or FP8 in fp32, as matrix units do, and compute norm, attention and loss in fp32 or better.

No launch configuration is searched for at run time. bench/README.md says what each kernel must move and
what it was compiled to; tests/kernels/checks.py says what is proved of it.
"""

import contextlib
import functools
import importlib.metadata
import math
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, library
from torch.nn import functional as F

from runtime import cpu
from runtime.cpu import CPU_BF16, CPU_FP32

try:
    import triton
    import triton.language as tl
    from triton.tools.tensor_descriptor import TensorDescriptor
except ModuleNotFoundError as missing:
    if missing.name != "triton":  # a broken installation is an error
        raise
    from runtime.cpu import TensorDescriptor, tl, triton

Pair = tuple[Tensor, Tensor]
Triple = tuple[Tensor, Tensor, Tensor]

# -----------------------------------------------------------------------------
# 1. How a function finds its kernel

_forced: str | None = None  # set by kernels_of
_plain: tuple[str, ...] = ()  # the same: names of functions that use their references
KERNELS = ["attend"]  # names of the functions that have kernels; none calls one before it


def kernel_device(x: Tensor) -> str | None:
    """The device whose kernels serve x, None if there is none, as for fp64.

    It is x's device type if x has 16 bits or fewer, for which tiles are sized: a GPU has no kernel for
    fp32. In a run on a CPU it is CPU_BF16 or CPU_FP32 for bf16 and fp32 (runtime/cpu.py).
    """
    own = x.device.type if x.dtype.itemsize <= 2 else None
    if x.device.type == "cpu" and x.dtype in (torch.float32, torch.bfloat16):
        own = cpu.chosen
    return own if _forced is None else _forced


@contextlib.contextmanager
def kernels_of(device: str | None, but: Sequence[str] = ()) -> Iterator[None]:
    """Inside, functions use the kernels of `device` on any tensor; "cpu" has none: references. None: as
    outside. Those whose names are in `but` use their references."""
    global _forced, _plain
    before = _forced, _plain
    _forced, _plain = device or _forced, (*_plain, *but)
    try:
        yield
    finally:
        _forced, _plain = before


def has_kernel(reference: Callable) -> Callable:
    """Let the function dispatch on the device of its first argument.

    `.kernel(device)` registers a function of the same signature as that device's kernel. torch.compile
    traces the one that is chosen. (There is no `if function:` here, because Dynamo 2.11 cannot trace it.)
    """
    kernels: dict[str, Callable] = {}
    name = reference.__name__
    KERNELS.insert(0, name)

    @functools.wraps(reference)
    def chosen(x: Tensor, *args: Any, **options: Any) -> Any:
        device = None if name in _plain else kernel_device(x)
        return (kernels[device] if device in kernels else reference)(x, *args, **options)

    def kernel(device: str) -> Callable[[Callable], Callable]:
        def register(function: Callable) -> Callable:
            kernels[device] = function
            return function

        return register

    chosen.kernel = kernel
    return chosen


class Chip(NamedTuple):  # what a launch depends on
    processors: int  # streaming multiprocessors
    shared_memory: int  # bytes that one block may have


H100 = Chip(132, 227 * 1024)
OPTIONS = dict(enable_fp_fusion=True)  # every launch: multiply and add may be one instruction


@functools.cache
def chip(device: torch.device) -> Chip:
    """The chip of a CUDA device. Elsewhere an H100: tests interpret and compile kernels for it."""
    if device.type != "cuda":
        return H100
    found = torch.cuda.get_device_properties(device)
    return Chip(found.multi_processor_count, found.shared_memory_per_block_optin)


def launch(kernel: triton.JITFunction, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
    """Start a kernel. Every launch goes through here, so that tests and benchmarks see it."""
    kernel[grid](*args, **constants, **OPTIONS)


def operator(
    name: str, fake: Callable, changes: tuple[str, ...] = ()
) -> Callable[[Callable], library.CustomOpDef]:
    """The decorated function as custom operator bankrun::name, one node of a compiled graph.

    fake takes the same arguments and returns tensors of the result's shapes and dtypes. changes: arguments
    that are written to. PyTorch's wrapper keeps Dynamo out of the function and imports Dynamo for that: 2 s
    of every rank's start. So on a CPU the function runs unwrapped until something else has imported Dynamo.
    """

    def register(function: Callable) -> library.CustomOpDef:
        node = library.custom_op("bankrun::" + name, function, mutates_args=changes)
        node.register_fake(fake)
        wrapped = torch._disable_dynamo(function)

        def on_cpu(*args: Any) -> Any:
            return (wrapped if "torch._dynamo" in sys.modules else function)(*args)

        library.impl("bankrun::" + name, "cpu", on_cpu)
        return node

    return register


def _wide(x: Tensor) -> Tensor:
    """x in fp32, if it is narrower."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def _cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x in dtype. Dynamo 2.11 loses the gradient of a saved `.to` that changes nothing, so there is none."""
    return x if x.dtype == dtype else x.to(dtype)


_numbers: dict[int, float] = {}  # by address: what graph_input has put there


def graph_input(x: float | Tensor, device: torch.device) -> Tensor:
    """A number as (1,) fp64 on the model's device: a new value compiles no graph anew. A tensor stays as it
    is. (Not 0-dim: a model on a CPU, where it is a factor of a tensor, would be traced twice. Not on the
    CPU beside a GPU: Inductor would load what an operator makes of such an input by 2 bytes at a time.)"""
    if not isinstance(x, Tensor):
        number, x = x, torch.full((1,), x, dtype=torch.float64, device=device)
        if type(x) is Tensor:  # not a FakeTensor, which has no address
            _numbers[x.data_ptr()] = number
    return x


def number_of(x: Tensor) -> float:
    """The number of a graph_input, for which no host waits. Its address is its own while it lives."""
    return _numbers[x.data_ptr()]


def operand_dtype(x: Tensor) -> torch.dtype:
    """The dtype of x as a matmul's operand: bf16 on a CPU with bf16 units, elsewhere its own."""
    return torch.bfloat16 if kernel_device(x) == CPU_BF16 else x.dtype


# -----------------------------------------------------------------------------
# 2. Transposes: tiles that turn on the chip
#
# embed is (vocab, dim) and lm_head (dim, vocab). While they are tied, embed's gradient is added to
# lm_head's, and lm_head's new weights are copied to embed.


@has_kernel
def transpose_add(source: Tensor, target: Tensor, alone: bool = True) -> None:
    """target += sourceᵀ in place: embed.grad (vocab, dim) into lm_head.grad (dim, vocab).

    alone: no collective runs at the same time, so that the kernel may use every processor.
    """
    target.add_(source.mT)


@has_kernel
def transpose_copy(source: Tensor, target: Tensor, alone: bool = True) -> None:
    """target = sourceᵀ in place: lm_head (dim, vocab) into embed (vocab, dim). alone: as in transpose_add."""
    target.copy_(source.mT)


TRANSPOSE = dict(BLOCK=64, num_warps=4)  # 64 bf16 are a memory line of 128 bytes in either layout
TRANSPOSE_PROGRAMS = 32  # an H100 has 132 processors; the others are left to the collectives


@triton.jit
def _load_tile(
    matrix, row, col, rows, cols, ROWS: tl.constexpr, COLS: tl.constexpr, TMA: tl.constexpr = False
):
    """The tile at (row, col) of a contiguous (rows, cols) matrix, zero outside; if TMA, of a descriptor."""
    if TMA:
        tile = matrix.load([row, col])
    else:
        r = row + tl.arange(0, ROWS)[:, None]
        c = col + tl.arange(0, COLS)[None, :]
        inside = (r < rows) & (c < cols)
        tile = tl.load(matrix + r.to(tl.int64) * cols + c, mask=inside, other=0.0)
    return tile


@triton.jit
def _store_tile(matrix, tile, row, col, rows, cols):
    """Round a tile to the matrix's dtype and store the part of it that lies inside."""
    r = row + tl.arange(0, tile.shape[0])[:, None]
    c = col + tl.arange(0, tile.shape[1])[None, :]
    inside = (r < rows) & (c < cols)
    at = matrix + r.to(tl.int64) * cols + c
    tl.store(at, tile.to(matrix.dtype.element_ty), mask=inside)


@triton.jit
def transpose_kernel(source, target, rows, cols, ADD: tl.constexpr, BLOCK: tl.constexpr):
    """target (rows, cols) = sourceᵀ, or += sourceᵀ if ADD. A program takes every num_programs-th tile.

    Faster: tiles turn on the chip, so that reads and writes are whole lines of memory, and the sum needs no
    sourceᵀ in memory. Three tiles are loading while one is turned, because few programs would otherwise
    wait for memory most of the time.
    Must hold: source and target are contiguous and do not overlap; sums are rounded once.
    From: R74. PyTorch's transpose used every processor, and NCCL had to wait.
    """
    across = tl.cdiv(cols, BLOCK)
    first = tl.program_id(0)
    tiles = tl.cdiv(rows, BLOCK) * across
    for tile in tl.range(first, tiles, tl.num_programs(0), num_stages=4):
        row = tile // across * BLOCK
        col = tile % across * BLOCK
        result = _load_tile(source, col, row, cols, rows, BLOCK, BLOCK).T
        if ADD:
            before = _load_tile(target, row, col, rows, cols, BLOCK, BLOCK)
            result = before.to(tl.float32) + result.to(tl.float32)
        _store_tile(target, result, row, col, rows, cols)


def launch_transpose(source: Tensor, target: Tensor, alone: bool = True, *, add: bool) -> None:
    rows, cols = target.shape
    tiles = triton.cdiv(rows, TRANSPOSE["BLOCK"]) * triton.cdiv(cols, TRANSPOSE["BLOCK"])
    # A program has 48 KB of shared memory: a processor holds four.
    programs = 4 * chip(target.device).processors if alone else TRANSPOSE_PROGRAMS
    result = target if target.is_contiguous() else target.contiguous()
    grid = (min(tiles, programs),)
    launch(transpose_kernel, grid, source.contiguous(), result, rows, cols, ADD=add, **TRANSPOSE)
    if result is not target:
        target.copy_(result)


transpose_add.kernel("cuda")(functools.partial(launch_transpose, add=True))
transpose_copy.kernel("cuda")(functools.partial(launch_transpose, add=False))


# -----------------------------------------------------------------------------
# 3. Embeddings: sums without atomics


@has_kernel
def lookup(table: Tensor, *tables: Tensor, tokens: Tensor) -> list[Tensor]:
    """The rows of each table at the tokens, (T, width) each; differentiable in the tables.

    Tables are (vocab, width), all of one vocab; tokens (T,) int32. Several tables share one sort of the
    tokens in the backward pass (from R65, for the value tables). On a GPU that adds to table.grad by itself,
    and autograd sees no gradient of the table: not for torch.autograd.grad, nor inside a compiled graph.
    """
    return [F.embedding(tokens, each) for each in (table, *tables)]


def token_runs(tokens: Tensor, vocab: int) -> Triple:
    """Where each token stands: the tokens sorted, their positions, and each token's first place among them.

    (T,) int32; (T,) int64, those of one token in their order; (vocab + 1,) int32.
    """
    found, order = torch.sort(tokens, stable=True)
    ids = torch.arange(vocab + 1, device=tokens.device, dtype=tokens.dtype)
    return found, order, torch.searchsorted(found, ids, out_int32=True)


SCATTER = dict(ROWS=8, BLOCK=256, num_warps=1)  # one warp holds the sums, in registers
SCATTER_ITEMS = 8  # a program: enough to hide its start, few enough to balance long and short ones


@triton.jit
def scatter_kernel(
    grad, found, order, starts, out,  # (T, dim); token_runs; (V, dim)
    N, dim, ADD: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,  # N: V, or T with ADD
):  # fmt: skip
    """out[v] = Σ grad[order[i]] over starts[v] ≤ i < starts[v + 1]: the gradient of the table's row v.
    With ADD that is added to what out holds, from earlier micro-batches.

    An item is BLOCK columns of a row; each program takes every num_programs-th item. Neighbouring rows,
    often of similar frequency, go to different programs. The most frequent tokens of a BPE are its first,
    and go to the programs that start first.
    Faster: a row is read and written once, in 16 bits: 102 MB for 16384 tokens. PyTorch's zeros in fp32,
    atomic additions and cast move 510 MB. With ADD a row is that of a sorted position, if its run begins
    there: rows without positions, nearly all of a table of bigrams, are not even visited.
    Must hold: no atomics and one order of summation, so that a run repeats bit for bit; a sum is rounded
    once; without ADD a row without positions is zero.
    """
    across = tl.cdiv(dim, BLOCK)
    for item in tl.range(tl.program_id(0), N * across, tl.num_programs(0)):
        place = item // across
        token = (tl.load(found + place) if ADD else place).to(tl.int64)
        c = item % across * BLOCK + tl.arange(0, BLOCK)
        start = tl.load(starts + token)
        end = tl.load(starts + token + 1)
        if ADD:
            end = tl.where(start == place, end, start)
        row = out + token * dim + c
        if start == end:
            if not ADD:
                tl.store(row, tl.zeros((BLOCK,), out.dtype.element_ty), mask=c < dim)
        else:
            sums = tl.zeros((ROWS, BLOCK), tl.float32)
            for first in tl.range(start, end, ROWS, num_stages=3):
                i = first + tl.arange(0, ROWS)
                t = tl.load(order + i, mask=i < end, other=0)[:, None]
                inside = (i < end)[:, None] & (c < dim)
                sums += tl.load(grad + t * dim + c, mask=inside, other=0.0).to(tl.float32)
            total = tl.sum(sums, 0)
            if ADD:
                total += tl.load(row, mask=c < dim, other=0.0).to(tl.float32)
            tl.store(row, total.to(out.dtype.element_ty), mask=c < dim)


def launch_scatter(
    grad: Tensor, found: Tensor, order: Tensor, starts: Tensor, out: Tensor, add: bool
) -> None:
    """out (vocab, dim) becomes the gradient of a table, or that is added to it; grad (T, dim) is that of
    the table's rows; found, order, starts: token_runs."""
    dim = out.size(1)
    N = len(grad if add else out)
    grid = (triton.cdiv(N * triton.cdiv(dim, SCATTER["BLOCK"]), SCATTER_ITEMS),)
    tensors = (grad.contiguous(), found, order, starts, out)
    launch(scatter_kernel, grid, *tensors, N, dim, ADD=add, **SCATTER)


scatter_op = operator("scatter", lambda *_: None, changes=("out",))(launch_scatter)


class _Lookup(torch.autograd.Function):
    """Its backward pass adds the gradient to table.grad and returns none. Autograd would make a second
    tensor of the table's size in each micro-batch, nearly all zeros, and add that."""

    @staticmethod
    def forward(ctx, table: Tensor, tokens: Tensor, *runs: Tensor) -> Tensor:
        ctx.table = table
        ctx.save_for_backward(*runs)
        return F.embedding(tokens, table)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[None, ...]:
        pending = ctx.table.grad
        out = torch.empty_like(ctx.table) if pending is None else pending
        scatter_op(grad, *ctx.saved_tensors, out, pending is not None)
        ctx.table.grad = out
        return 5 * (None,)  # table, tokens, and their runs


@lookup.kernel("cuda")
def _lookup_cuda(table: Tensor, *tables: Tensor, tokens: Tensor) -> list[Tensor]:
    if not torch.is_grad_enabled():
        return [F.embedding(tokens, each) for each in (table, *tables)]
    runs = token_runs(tokens, len(table))
    return [_Lookup.apply(each, tokens, *runs) for each in (table, *tables)]


# -----------------------------------------------------------------------------
# 4. The residual stream: norm and sum
#
# They have no kernel of ours: torch.compile fuses them with their neighbours.

RMS_EPS = torch.finfo(torch.float32).eps


def norm(x: Tensor) -> Tensor:
    """x / √(mean x² + ε) over the last dimension, without weights (arXiv 1910.07467); any float dtype."""
    return _RMSNorm.apply(x)


class _RMSNorm(torch.autograd.Function):
    """With r = 1/rms and y = r·x the gradient is dx = r·(dy − y·mean(dy·y)).

    Faster: only y and r are saved; autograd of the formula would save every step.
    Must hold: computed in fp32 or better and rounded once, forward and backward.
    """

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        wide = _wide(x)
        length = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        rstd = length.square_().mul_(1 / x.size(-1)).add_(RMS_EPS).rsqrt_()
        y = _cast(wide * rstd, x.dtype)
        ctx.save_for_backward(y, rstd)
        return y

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        y, rstd = ctx.saved_tensors
        grad = _cast(grad, rstd.dtype)
        wide = _cast(y, rstd.dtype)
        mean = (grad * wide).sum(-1, keepdim=True).mul_(-1 / y.size(-1))
        return _cast(torch.addcmul(grad, wide, mean).mul_(rstd), y.dtype)


@has_kernel
def residual_sum(branch: Tensor, *terms: Pair) -> Tensor:
    """Σ w·x over the terms, plus branch (T, dim). A term has a weight w, 0-dim or (T, 1), and x (T, dim); all
    but the first may have fewer columns, which are the first of dim."""
    (weight, x), *others = terms
    x = weight * x
    for weight, other in others:
        missing = x.size(1) - other.size(1)
        x = x + (F.pad(weight * other, (0, missing)) if missing else weight * other)
    # With a leading 1 it joins the next norm: a 2-D sum with a matmul becomes an addmm, which copies x.
    return (x[None] + branch[None])[0]


@residual_sum.kernel(CPU_BF16)
@residual_sum.kernel(CPU_FP32)
def _residual_sum_cpu(branch: Tensor, *terms: Pair) -> Tensor:
    if torch.compiler.is_compiling() or any(weight.dim() for weight, _ in terms):
        return residual_sum.__wrapped__(branch, *terms)
    return _ResidualSum.apply(branch, *(weight for weight, _ in terms), *(x for _, x in terms))


class _ResidualSum(torch.autograd.Function):
    """Faster: one node of autograd, whose sums are made in place."""

    @staticmethod
    def forward(ctx, branch: Tensor, *both: Tensor) -> Tensor:
        ctx.save_for_backward(*both)
        n = len(both) // 2
        out = branch.clone()
        for weight, x in zip(both[:n], both[n:]):
            out[:, : x.size(1)].addcmul_(x, weight)
        return out

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, ...]:
        n = len(ctx.saved_tensors) // 2
        weights, xs = ctx.saved_tensors[:n], ctx.saved_tensors[n:]
        parts = [grad[:, : x.size(1)] for x in xs]
        sums = [(g * x).sum() for g, x in zip(parts, xs)]
        return grad, *sums, *(weight * g for weight, g in zip(weights, parts))


# -----------------------------------------------------------------------------
# 5. Queries and keys: norm, rotation and offset in one kernel each way


def rotate(x: Tensor, table: Tensor) -> Tensor:
    """Rotary positions (arXiv 2104.09864): pairs of neighbouring dims, rotated clockwise.

    y[2j] = c·x[2j] + s·x[2j+1] and y[2j+1] = c·x[2j+1] − s·x[2j]. x is (..., D). table is (..., D/2, 2),
    broadcast, and holds c and −s of each angle. On a CPU a pair is a complex number and the rotation one
    product. Only the table is saved for the backward pass.
    """
    pairs = x.unflatten(-1, (-1, 2))
    if x.device.type == "cpu" and x.dtype in (torch.float32, torch.float64):
        turned = torch.view_as_complex(pairs) * torch.view_as_complex(table)
        return torch.view_as_real(turned).flatten(-2)
    even, odd = pairs.unbind(-1)
    c, minus_s = table.unbind(-1)
    return torch.stack((c * even - minus_s * odd, c * odd + minus_s * even), -1).flatten(-2)


def offset_keys(k: Tensor) -> Tensor:
    """k[t] ← k[t−1] for t ≥ 1, in the second half of each head's dims, which do not rotate; k (T, H, D)."""
    here, before = k.chunk(2, -1)
    return torch.cat((here, torch.cat((before[:1], before[:-1]))), -1)


@has_kernel
def norm_and_rotate_qk(qkv: Tensor, table: Tensor, paired: bool, key_offset: bool) -> Triple:
    """What attention reads: q and k, normed and rotated head by head, and v, a view; differentiable in qkv.

    qkv (T, 3H, D) holds the heads of q, of k and of v; D is a multiple of 4; results are (T, H, D). table
    (positions, D/2, 2) is as in rotate. Token t has position t; if paired, it has position 2t in even heads
    and 2t + 1 in odd ones. key_offset applies offset_keys to the rotated k.
    """
    T, heads, D = qkv.shape
    H = heads // 3
    p = 2 if paired else 1
    qk, v = qkv.split((2 * H, H), 1)
    x = norm(qk).reshape(T, 2 * H // p, p, D)
    turned = rotate(x, table[: p * T].view(T, 1, p, D // 2, 2))
    q, k = turned.view(T, 2 * H, D).split(H, 1)
    return q, offset_keys(k) if key_offset else k, v


# A program takes the heads of q, of k or of v of a few tokens, one after the other. So it reads the tokens'
# angles once, and the next head is a constant further. 16 lanes read a head of 128 dims, 16 bytes each.
QK = dict(TOKENS=4, num_warps=1)
_RMS_EPS = tl.constexpr(RMS_EPS)


@triton.jit
def _split_pairs(x):
    """(TOKENS, BLOCK) → even dims and odd dims, (TOKENS, BLOCK / 2) each."""
    return tl.split(tl.reshape(x, (x.shape[0], x.shape[1] // 2, 2)))


@triton.jit
def _turns(table, t, inside, D: tl.constexpr, PAIRED: tl.constexpr):
    """c and −s of the even heads, then of the odd heads: four tensors (TOKENS, BLOCK / 2)."""
    at = table + t * ((1 + PAIRED) * D) + tl.arange(0, inside.shape[1])[None, :]
    even = tl.load(at, mask=inside, other=1.0).to(tl.float32)
    odd = tl.load(at + D, mask=inside, other=1.0).to(tl.float32) if PAIRED else even
    return _split_pairs(even) + _split_pairs(odd)


@triton.jit
def norm_rotate_kernel(
    qkv, table, q, k, rstds,  # (T, 3H, D); (positions, D); (T, H, D); k: one row more if OFFSET; (2H, T) fp32
    T, H: tl.constexpr, D: tl.constexpr, PAIRED: tl.constexpr, OFFSET: tl.constexpr,
    TOKENS: tl.constexpr, BLOCK: tl.constexpr,  # BLOCK: the smallest power of two ≥ D
):  # fmt: skip
    """q and k of norm_and_rotate_qk, and 1/rms of each head.

    Faster: one read and one write of qkv; torch.compile makes two or three of each, 2 bytes at a time.
    Must hold: results are rounded once. Dims that are offset are stored a row further, so row T of k holds
    the last token's, which only the gradient of the norm needs.
    """
    part = tl.program_id(1)  # 0: q, 1: k
    t = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)[:, None]
    dim = tl.arange(0, BLOCK)[None, :]
    inside = (t < T) & (dim < D)
    turns = _turns(table, t, inside, D, PAIRED)
    x = qkv + t * (3 * H * D) + part * (H * D) + dim
    y = (k if part == 1 else q) + t * (H * D) + dim
    offset = dim // (D // 2) * part if OFFSET else 0  # rows
    for h in tl.static_range(H):
        n = tl.load(x + h * D, mask=inside, other=0.0).to(tl.float32)
        rstd = tl.rsqrt(tl.sum(n * n, 1, keep_dims=True) * (1 / D) + _RMS_EPS)
        tl.store(rstds + (part * H + h).to(tl.int64) * T + t, rstd, mask=t < T)
        even, odd = _split_pairs(n * rstd)
        c = turns[h % 2 * 2]
        s = turns[h % 2 * 2 + 1]
        turned = tl.join(c * even - s * odd, c * odd + s * even).reshape(n.shape)
        turned = turned.to(q.dtype.element_ty)
        tl.store(y + offset * (H * D) + h * D, turned, mask=inside)
        if OFFSET:
            tl.store(y + h * D, turned, mask=inside & (t < offset))  # the first token keeps its own


@triton.jit
def norm_rotate_backward_kernel(
    dq, dk, dv, q, k, rstds, table, grad,  # (T, H, D) each; as norm_rotate_kernel has them; (T, 3H, D)
    T, H: tl.constexpr, D: tl.constexpr, PAIRED: tl.constexpr, OFFSET: tl.constexpr,
    TOKENS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The gradient of qkv.

    A head y = r·R·x, with r = 1/rms and R its rotation, has r·(Rᵀ·dy − R⁻¹·y·mean(dy·y)); v has dv.
    Faster: one read and one write, and it needs y, which attention saves anyway, in place of x.
    Must hold: rounded once. R⁻¹ is Rᵀ / (c² + s²), not Rᵀ, as the table is rounded.
    """
    part = tl.program_id(1)  # 0: q, 1: k, 2: v
    t = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)[:, None]
    dim = tl.arange(0, BLOCK)[None, :]
    inside = (t < T) & (dim < D)
    here = t * (H * D) + dim
    dx = grad + t * (3 * H * D) + part * (H * D) + dim
    if part == 2:
        for h in tl.static_range(H):
            tl.store(dx + h * D, tl.load(dv + here + h * D, mask=inside), mask=inside)
    else:
        dy = (dk if part == 1 else dq) + here
        y = (k if part == 1 else q) + here
        turns = _turns(table, t, inside, D, PAIRED)
        inverse_even = 1 / (turns[0] * turns[0] + turns[1] * turns[1])
        inverse = inverse_even, 1 / (turns[2] * turns[2] + turns[3] * turns[3])
        offset = dim // (D // 2) * part if OFFSET else 0  # rows
        for h in tl.static_range(H):
            exists = inside & (t + offset < T)
            g = tl.load(dy + offset * (H * D) + h * D, mask=exists, other=0.0).to(tl.float32)
            if OFFSET:
                g += tl.load(dy + h * D, mask=inside & (t < offset), other=0.0).to(tl.float32)
            n = tl.load(y + offset * (H * D) + h * D, mask=inside, other=0.0).to(tl.float32)
            mean = tl.sum(g * n, 1, keep_dims=True) * (1 / D) * inverse[h % 2]
            rstd = tl.load(rstds + (part * H + h).to(tl.int64) * T + t, mask=t < T, other=0.0)
            even, odd = _split_pairs(n)
            g_even, g_odd = _split_pairs(g)
            c = turns[h % 2 * 2]
            s = turns[h % 2 * 2 + 1]
            even = (g_even - even * mean) * rstd
            odd = (g_odd - odd * mean) * rstd
            turned = tl.join(c * even + s * odd, c * odd - s * even).reshape(n.shape)
            tl.store(dx + h * D, turned.to(grad.dtype.element_ty), mask=inside)


def _empty_heads(qkv: Tensor, table: Tensor, paired: bool, key_offset: bool) -> Triple:
    T, heads, D = qkv.shape
    H = heads // 3
    need = (1 + paired) * T
    if len(table) < need:
        raise ValueError(f"the rotary table has {len(table)} positions; {T} tokens need {need}")
    q = qkv.new_empty(T, H, D)
    k = qkv.new_empty(T + key_offset, H, D)
    return q, k, qkv.new_empty(2 * H, T, dtype=torch.float32)


def _launch_on_heads(
    kernel: triton.JITFunction, parts: int, q: Tensor, paired: bool, offset: bool, *tensors: Tensor
) -> None:
    T, H, D = q.shape
    grid = (triton.cdiv(T, QK["TOKENS"]), parts)
    constants = dict(H=H, D=D, PAIRED=paired, OFFSET=offset, BLOCK=triton.next_power_of_2(D))
    launch(kernel, grid, *(x.contiguous() for x in tensors), T, **constants, **QK)


def launch_norm_rotate(qkv: Tensor, table: Tensor, paired: bool, key_offset: bool) -> Triple:
    """q, k and 1/rms as norm_rotate_kernel stores them. ValueError: the table has too few positions."""
    q, k, rstds = _empty_heads(qkv, table, paired, key_offset)
    _launch_on_heads(norm_rotate_kernel, 2, q, paired, key_offset, qkv, table, q, k, rstds)
    return q, k, rstds


def _empty_qkv(q: Tensor, *_: Any) -> Tensor:
    return q.new_empty(q.size(0), 3 * q.size(1), q.size(2))


def launch_norm_rotate_backward(
    dq: Tensor, dk: Tensor, dv: Tensor, q: Tensor, k: Tensor, rstds: Tensor, table: Tensor,
    paired: bool, key_offset: bool,
) -> Tensor:  # fmt: skip
    """The gradient of qkv, (T, 3H, D)."""
    grad = _empty_qkv(q)
    tensors = (dq, dk, dv, q, k, rstds, table, grad)
    _launch_on_heads(norm_rotate_backward_kernel, 3, q, paired, key_offset, *tensors)
    return grad


norm_rotate_op = operator("norm_rotate", _empty_heads)(launch_norm_rotate)
norm_rotate_backward_op = operator("norm_rotate_backward", _empty_qkv)(launch_norm_rotate_backward)


class _FusedNormRotation(torch.autograd.Function):
    @staticmethod
    def forward(ctx, qkv: Tensor, table: Tensor, paired: bool, key_offset: bool) -> Triple:
        q, k, rstds = norm_rotate_op(qkv, table, paired, key_offset)
        ctx.save_for_backward(q, k, rstds, table)
        ctx.flags = paired, key_offset
        return q, k[: len(q)], qkv[:, 2 * q.size(1) :]

    @staticmethod
    def backward(ctx, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return norm_rotate_backward_op(*grads, *ctx.saved_tensors, *ctx.flags), None, None, None


norm_and_rotate_qk.kernel("cuda")(_FusedNormRotation.apply)


# -----------------------------------------------------------------------------
# 6. Attention within documents and a window: FlashAttention, or blocks on a CPU


class Band(NamedTuple):
    """Which keys a query sees: its own position and the `window` before it, within its document."""

    cu_seqlens: Tensor  # (slots,) int32: document starts, padded by the number of positions
    window: int | Tensor  # positions; as a graph_input one compiled graph serves all
    max_len: int  # longest document, in positions
    bias: Tensor | None  # band_bias, for a CPU; None: FlashAttention


def masked_attention(q: Tensor, k: Tensor, v: Tensor, band: Band, scale: float) -> Tensor:
    """The reference of attend, which only tests call: nearly all of its (H, P, P) scores are masked."""
    position = torch.arange(len(q), device=q.device)
    document = torch.searchsorted(band.cu_seqlens, position, right=True)
    back = position[:, None] - position  # how far each key lies before each query
    seen = (document[:, None] == document) & (back >= 0) & (back <= band.window)
    scores = scale * torch.einsum("qhd, khd -> hqk", q, k)
    probs = scores.masked_fill(~seen, -math.inf).softmax(-1)
    return torch.einsum("hqk, khd -> qhd", probs, v)


def uses_flash(x: Tensor) -> bool:
    """Whether tensors like x go to FlashAttention: 16-bit ones on a GPU. Their bands need no bias."""
    served = kernel_device(x) == "cuda" and "attend" not in _plain
    return served and x.dtype in (torch.bfloat16, torch.float16)


# FlashAttention 4 on Hopper, whose algorithm there is FlashAttention 3's (Shah et al., arXiv 2407.08608).
# Faster: FlashAttention 2, which PyTorch holds, is written for chips before Hopper: it waits for copies and
# uses neither the asynchronous matrix units (wgmma) nor TMA.
# Must hold: what is called here is private to the package, so its version is this one and no other.
FA4_VERSION = "4.0.0b36"  # flash-attn-4 on PyPI, as in runtime/requirements-hopper.txt
FA4_HEAD_DIM = 128  # what is tried before the first step
FA4_SLOTS = 257  # above 256 documents it runs other code, which the self-check might not see
_fa4: Any = None  # the package's module; flash_attention sets it
# FlashAttention 2, as PyTorch holds it; torch.nn.attention.varlen calls the same two.
_fa2_forward = torch.ops.aten._flash_attention_forward
_fa2_backward = torch.ops.aten._flash_attention_backward
NO_DROPOUT = 0.0


def _fa4_options(cu_seqlens: Tensor, window: Tensor, scale: Tensor, max_len: int) -> dict[str, Any]:
    """What both directions are given. 0 positions to the right of a query: causal."""
    return dict(
        cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens, max_seqlen_q=max_len, max_seqlen_k=max_len,
        window_size_left=number_of(window), window_size_right=0, softmax_scale=number_of(scale),
    )  # fmt: skip


def _fa2_options(window: Tensor, scale: Tensor) -> dict[str, Any]:
    return dict(scale=number_of(scale), window_size_left=number_of(window), window_size_right=0)


def _fake_attention(q: Tensor, *_: Any) -> Pair:
    P, H, _ = q.shape
    return q.new_empty(q.shape), q.new_empty(H, P, dtype=torch.float32)


@operator("flash_attention", _fake_attention)
def flash_attention_op(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, window: Tensor, scale: Tensor,
    max_len: int, fa4: bool,
) -> Pair:  # fmt: skip
    """Attention (P, H, D), and log Σ exp of each query's scores, (H, P) fp32, for the backward pass.
    window and scale: graph_input."""
    if fa4:
        options = _fa4_options(cu_seqlens, window, scale, max_len)
        out, lse, *_ = _fa4._flash_attn_fwd(q, k, v, return_lse=True, **options)
    else:
        documents = (cu_seqlens, cu_seqlens, max_len, max_len)
        rest = (NO_DROPOUT, False, False)  # not causal by itself: the window is; no debug mask
        out, lse, *_ = _fa2_forward(q, k, v, *documents, *rest, **_fa2_options(window, scale))
    return out, lse


def _fake_attention_backward(grad: Tensor, q: Tensor, *_: Any) -> Triple:
    return q.new_empty(q.shape), q.new_empty(q.shape), q.new_empty(q.shape)


@operator("flash_attention_backward", _fake_attention_backward)
def flash_attention_backward_op(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    cu_seqlens: Tensor, window: Tensor, scale: Tensor, max_len: int, fa4: bool,
) -> Triple:  # fmt: skip
    """grad (P, H, D) → the gradients of q, k and v, contiguous; k and v may be views."""
    if not fa4:
        documents = (cu_seqlens, cu_seqlens, max_len, max_len)
        random_state = grad.new_zeros(2, dtype=torch.uint64)
        rest = (NO_DROPOUT, False, random_state, grad.new_empty(0))
        options = _fa2_options(window, scale)
        return _fa2_backward(grad, q, k, v, out, lse, *documents, *rest, **options)
    dq, dk, dv = _fake_attention_backward(grad, q)
    options = _fa4_options(cu_seqlens, window, scale, max_len) | dict(dq=dq, dk=dk, dv=dv)
    _fa4._flash_attn_bwd(q, k, v, out, grad.contiguous(), lse, **options)
    return dq, dk, dv


def _save_attention(ctx, inputs, output):
    *qkv, cu_seqlens, window, scale, ctx.max_len, ctx.fa4 = inputs
    ctx.save_for_backward(*qkv, *output, cu_seqlens, window, scale)
    ctx.set_materialize_grads(False)


def _attention_gradients(ctx, grad, _):
    gradients = flash_attention_backward_op(grad, *ctx.saved_tensors, ctx.max_len, ctx.fa4)
    return *gradients, None, None, None, None, None


flash_attention_op.register_autograd(_attention_gradients, setup_context=_save_attention)


def _load_fa4() -> Any:
    """The package's module. What it compiles it keeps as object files, and loads these as code: by default
    from a folder in /tmp that anybody can make first, here from one that nobody else can write to."""
    found = importlib.metadata.version("flash-attn-4")
    if found != FA4_VERSION:
        raise ImportError(f"flash-attn-4 {found} is installed, not {FA4_VERSION}")
    folder = Path.home() / ".cache/bankrun/flash-attn-4"
    with contextlib.suppress(OSError):  # without a home it compiles at every start
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o700)
        os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", str(folder))
        os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
    return importlib.import_module("flash_attn.cute.interface")


@functools.cache
def flash_attention() -> str:
    """Turn on FlashAttention 4 for training on Hopper, if its package is installed and runs. Returns one
    line for the log: which attention runs and, on Hopper, what the lack of it costs (estimated)."""
    global _fa4
    if not torch.cuda.is_available():
        return "banded, in PyTorch"
    if torch.cuda.get_device_capability()[0] != 9:
        return "FA2"
    try:
        with warnings.catch_warnings(action="ignore"):  # from the package's compiler
            _fa4 = _load_fa4()
            x = torch.ones(1024, 2, FA4_HEAD_DIM).bfloat16().cuda().requires_grad_()
            band = Band(torch.tensor((0, 1024), dtype=torch.int32).cuda(), 200, 1024, None)
            attend(x, x, x, band, 0.1).sum().backward()  # compiles its four kernels
    except Exception as error:  # it is absent or does not work here: training is slower, no more
        _fa4 = None
        why = f"{type(error).__name__}: {error}".partition("\n")[0]
        cost = "steps take an estimated 4 to 8 % longer than with FA4"
        return f"FA2: {cost} ({why}; see runtime/requirements-hopper.txt)"
    others = f"FA2 in evaluation and above {FA4_SLOTS} document slots"
    return f"FA4 in training (flash-attn-4 {FA4_VERSION}), {others}"


def agree_on_attention(gather: Callable[[str], list[str]], newest: int = 4) -> str:
    """flash_attention of all ranks: 4 if newest is 4 and all have it, else 2. gather: every rank's text."""
    global _fa4
    said = gather(flash_attention() if newest == 4 else "FA2")
    without = [line for line in said if not line.startswith("FA4")]
    if without:
        _fa4 = None
    return (without or said)[0]


def attend(q: Tensor, k: Tensor, v: Tensor, band: Band, scale: float | Tensor) -> Tensor:
    """masked_attention: softmax(scale · q kᵀ) v over the keys of the band; causal; differentiable.

    q, k, v and the result are (P, H, D) of one dtype. A band with a bias is computed block by block in fp32
    or better, one without a bias by FlashAttention: 4 where gradients are wanted and flash_attention() has
    turned it on, else 2.
    """
    scale = graph_input(scale, q.device)
    if band.bias is not None:
        return _BandedAttention.apply(q, k, v, band.bias, scale).to(q.dtype)
    fits = q.size(-1) == FA4_HEAD_DIM and len(band.cu_seqlens) <= FA4_SLOTS
    fa4 = _fa4 is not None and fits and torch.is_grad_enabled()
    numbers = (graph_input(band.window, q.device), scale)
    return flash_attention_op(q, k, v, band.cu_seqlens, *numbers, band.max_len, fa4)[0]


def band_bias(cu_seqlens: Tensor, length: int, window: int, dtype: torch.dtype) -> Tensor:
    """The band as a bias of the scores, (blocks, rows, keys): 0 where a query sees a key, else −inf.

    A block of `rows` queries has the keys of its own block and of those that its window reaches.
    """
    device = cu_seqlens.device
    rows = 32  # measured on two cores
    blocks = -(-length // rows)
    back = -(-min(window, length) // rows) * rows
    position = torch.arange(blocks * rows, device=device, dtype=torch.int32)
    start = cu_seqlens[torch.searchsorted(cu_seqlens, position, right=True) - 1]
    reach = (position - start).clamp_(max=window).view(blocks, rows, 1)
    row = torch.arange(rows, device=device)[:, None]
    column = torch.arange(-back, rows, device=device)
    # How far a key lies before the query, (rows, keys); keys after it are out of every reach.
    distance = (row - column).masked_fill_(column > row, 2**31 - 1).int()
    return torch.where(distance > reach, torch.tensor(-math.inf, device=device, dtype=dtype), 0.0)


def _by_head(x: Tensor, padded: int, front: int) -> Tensor:
    """(P, H, D) → (front + H·padded, D) in fp32 or better, zeros first and after each head."""
    P, H, D = x.shape
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    out = x.new_zeros(front + H * padded, D, dtype=dtype)
    out[front:].view(H, padded, D)[:, :P].copy_(x.transpose(0, 1))
    return out


def _by_position(x: Tensor, heads: int, length: int) -> Tensor:
    """Blocks (batch, rows, D), or anything of as many rows, → (P, H, D), a view without padding."""
    return x.view(heads, -1, x.size(-1))[:, :length].transpose(0, 1)


def _windows(x: Tensor, batch: int, rows: int, keys: int) -> Tensor:
    """A view (batch, keys, D) of x (positions, D): overlapping windows, each `rows` further."""
    D = x.size(1)
    return x.as_strided((batch, keys, D), (rows * D, D, 1))


def _sum_by_key(weights: Tensor, x: Tensor) -> Tensor:
    """For each key the sum of x over the queries that see it, by weights (batch, rows, keys).

    x (batch, rows, D); result (batch, rows · D). Block b of queries sees blocks b − n + 1 … b of keys, so a
    block of keys has its n terms in as many windows: at equal distances in memory, hence one sum.
    """
    batch, rows, keys = weights.shape
    D = x.size(-1)
    n = keys // rows
    terms = x.new_empty(batch + n - 1, keys, D)
    terms[batch:].zero_()  # of queries beyond the end
    torch.bmm(weights.mT, x, out=terms[:batch])
    strides = (keys * D, (keys - rows) * D, 1)
    return terms.as_strided((batch, n, rows * D), strides, (keys - rows) * D).sum(1)


class _BandedAttention(torch.autograd.Function):
    """softmax(scale · q kᵀ + bias) v, block by block: the CPU's fast path, not the reference.

    Faster: a block of queries meets only the keys that its window reaches. Heads lie one after another in
    memory, so the keys of all blocks are overlapping windows of one tensor, and one bmm serves all blocks.
    Must hold: the first blocks of a head reach into the head before it. The bias masks those keys as it
    masks other documents, so their probabilities are zero, and so is what they add to that head.
    """

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: Tensor) -> Tensor:
        P, H, _ = q.shape
        blocks, rows, keys = bias.shape
        padded = blocks * rows
        scale = scale.to(bias.dtype)
        q = _by_head(q, padded, 0).mul_(scale).view(H * blocks, rows, -1)
        k, v = (_windows(_by_head(x, padded, keys - rows), len(q), rows, keys) for x in (k, v))
        bias = bias.repeat(H, 1, 1) if H > 1 else bias
        probs = torch.softmax(torch.baddbmm(bias, q, k.mT), -1)
        ctx.save_for_backward(q, k, v, probs, scale)
        return _by_position(torch.bmm(probs, v), H, P)

    @staticmethod
    def backward(ctx, grad: Tensor):
        q, k, v, probs, scale = ctx.saved_tensors
        P, H, _ = grad.shape
        g = _by_head(grad, len(q) * q.size(1) // H, 0).view_as(q)
        scores = torch._softmax_backward_data(torch.bmm(g, v.mT), probs, -1, probs.dtype)
        grads = (torch.bmm(scores, k).mul_(scale), _sum_by_key(scores, q), _sum_by_key(probs, g))
        return *(_by_position(x.view_as(q), H, P) for x in grads), None, None


# -----------------------------------------------------------------------------
# 7. Symmetric matmuls: what Polar Express (Amsel et al., arXiv 2505.16932) is made of
#
# XXT and ba_plus_cAA have their names from the public speedrun, which computes one triangle too. From: R74
# for tall matrices (Xᵀ X, then X B from the right); R69 for its tuning.


def _operand(x: Tensor) -> Tensor:
    """x as the operand of a matmul that is summed in fp32: widened on a CPU that is slow at bf16."""
    return x if x.is_cuda or kernel_device(x) == CPU_BF16 else _wide(x)


@has_kernel
def XXT(X: Tensor) -> Tensor:
    """X Xᵀ, rounded once. X (..., rows, cols) bf16, fp32 or fp64; result (..., rows, rows) of its dtype."""
    wide = _operand(X)
    return (wide @ wide.mT).to(X.dtype)


@has_kernel
def XTX(X: Tensor) -> Tensor:
    """Xᵀ X for tall X, so that none is transposed in memory; rounded once. Result (..., cols, cols)."""
    wide = _operand(X)
    return (wide.mT @ wide).to(X.dtype)


@has_kernel
def ba_plus_cAA(A: Tensor, beta: float, alpha: float) -> Tensor:
    """beta·A + alpha·A·Aᵀ, rounded once. A (n, rows, rows) is symmetric, so A·Aᵀ = A²; result like A."""
    wide = _operand(A)
    return torch.baddbmm(wide, wide, wide, beta=beta, alpha=alpha).to(A.dtype)


@has_kernel
def aX_plus_BX(X: Tensor, B: Tensor, a: float, right: bool = False) -> Tensor:
    """a·X + B·X, or a·X + X·B if right; rounded once. X (n, rows, cols), B square, result like X."""
    wide = _operand(X)
    square = _operand(B)
    factors = (wide, square) if right else (square, wide)
    return torch.baddbmm(wide, *factors, beta=a).to(X.dtype)


# One configuration for every chip and shape: 96 KB of shared memory, so that an H100's processor holds two
# blocks and an RTX 4090's one. Smaller tiles would fill more of the chip with the few matrices of one rank
# of 8, but read so much more from L2 that they lose.
PRODUCT = dict(BLOCK=128, BLOCK_K=64, num_warps=8, num_stages=3)


@triton.jit
def product_kernel(
    L, R, C, out,  # left factor, right factor, addend, result: contiguous stacks of matrices
    M, N, K,  # out and C are (batch, M, N)
    alpha, beta,
    L_TRANSPOSED: tl.constexpr, R_TRANSPOSED: tl.constexpr,  # L is (K, M), else (M, K); R (N, K), else (K, N)
    SYMMETRIC: tl.constexpr,  # compute the tiles on and below the diagonal, and store each twice
    ADDEND: tl.constexpr, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """out = alpha · L R + beta · C, a program a tile; a transposed factor turns on the chip.

    Faster: a symmetric result takes the tiles of one triangle, 21 of 36 for 768 x 768. The addend costs one
    read and no pass of its own.
    Must hold: if SYMMETRIC, L R and C are symmetric. out overlaps no other tensor. A result is rounded
    once, and its two triangles have the same bits.
    """
    tile = tl.program_id(0)
    matrix = tl.program_id(1).to(tl.int64)
    if SYMMETRIC:
        i = 0
        while (i + 1) * (i + 2) // 2 <= tile:  # row i of the triangle begins at tile i(i + 1)/2
            i += 1
        j = tile - i * (i + 1) // 2
    else:
        i = tile // tl.cdiv(N, BLOCK)
        j = tile % tl.cdiv(N, BLOCK)
    row = i * BLOCK
    col = j * BLOCK
    L += matrix * M * K
    R += matrix * N * K
    C += matrix * M * N
    out += matrix * M * N

    acc = tl.zeros((BLOCK, BLOCK), tl.float32)
    for k in range(0, K, BLOCK_K):
        if L_TRANSPOSED:
            left = _load_tile(L, k, row, K, M, BLOCK_K, BLOCK).T
        else:
            left = _load_tile(L, row, k, M, K, BLOCK, BLOCK_K)
        if R_TRANSPOSED:
            right = _load_tile(R, col, k, N, K, BLOCK, BLOCK_K).T
        else:
            right = _load_tile(R, k, col, K, N, BLOCK_K, BLOCK)
        acc = tl.dot(left, right, acc, input_precision="ieee")
    acc *= alpha
    if ADDEND:
        acc += beta * _load_tile(C, row, col, M, N, BLOCK, BLOCK).to(tl.float32)
    result = acc.to(out.dtype.element_ty)
    _store_tile(out, result, row, col, M, N)
    if SYMMETRIC:
        if i != j:
            _store_tile(out, result.T, col, row, N, M)


def launch_product(
    L: Tensor, R: Tensor, C: Tensor | None, out: Tensor, alpha: float, beta: float,
    L_transposed: bool = False, R_transposed: bool = False, symmetric: bool = False,
) -> Tensor:  # fmt: skip
    """alpha · op(L) op(R) + beta · C into out, all (..., rows, cols); returns out.

    op transposes a factor where L_transposed or R_transposed says so. out is contiguous and overlaps nothing.
    """
    M, N = out.shape[-2:]
    K = L.size(-2 if L_transposed else -1)
    rows = triton.cdiv(M, PRODUCT["BLOCK"])
    cols = triton.cdiv(N, PRODUCT["BLOCK"])
    tiles = rows * (rows + 1) // 2 if symmetric else rows * cols
    L = L.contiguous()
    C = L if C is None else C.contiguous()
    launch(
        product_kernel, (tiles, out[..., 0, 0].numel()),
        L, R.contiguous(), C, out, M, N, K, alpha, beta,
        L_TRANSPOSED=L_transposed, R_TRANSPOSED=R_transposed, SYMMETRIC=symmetric, ADDEND=beta != 0,
        **PRODUCT,
    )  # fmt: skip
    return out


def _empty_gram(X: Tensor, tall: bool) -> Tensor:
    n = X.size(-1 if tall else -2)
    return X.new_empty(*X.shape[:-2], n, n)


def launch_gram(X: Tensor, tall: bool) -> Tensor:
    """Xᵀ X if tall, else X Xᵀ."""
    out = _empty_gram(X, tall)
    return launch_product(X, X, None, out, 1.0, 0.0, tall, not tall, symmetric=True)


def _like_addend(L: Tensor, R: Tensor, C: Tensor, *_: Any) -> Tensor:
    return C.new_empty(C.shape)


def launch_multiply_add(
    L: Tensor, R: Tensor, C: Tensor, alpha: float, beta: float, symmetric: bool
) -> Tensor:
    """alpha · L R + beta · C. symmetric: L = R, and L and C are symmetric."""
    out = _like_addend(L, R, C)
    return launch_product(L, R, C, out, alpha, beta, R_transposed=symmetric, symmetric=symmetric)


gram_op = operator("gram", _empty_gram)(launch_gram)
multiply_add_op = operator("multiply_add", _like_addend)(launch_multiply_add)
XXT.kernel("cuda")(lambda X: gram_op(X, False))
XTX.kernel("cuda")(lambda X: gram_op(X, True))
ba_plus_cAA.kernel("cuda")(lambda A, beta, alpha: multiply_add_op(A, A, A, alpha, beta, True))


@aX_plus_BX.kernel("cuda")
def _aX_plus_BX_cuda(X: Tensor, B: Tensor, a: float, right: bool = False) -> Tensor:
    """Not baddbmm, which copies X into its result before it multiplies."""
    factors = (X, B) if right else (B, X)
    return multiply_add_op(*factors, X, 1.0, a, False)


# -----------------------------------------------------------------------------
# 8. Linear maps and the MLP: an epilogue after a matmul


def linear(x: Tensor, W: Tensor) -> Tensor:
    """x @ Wᵀ, differentiable. x (tokens, in) and W (out, in) of one dtype; result (tokens, out) of it.

    On a CPU with bf16 units the operands are rounded to bf16, forward and backward, and summed in fp32:
    these units multiply twice as fast as those of fp32.
    """
    narrow = operand_dtype(x)
    return _cast(F.linear(_cast(x, narrow), _cast(W, narrow)), x.dtype)


@has_kernel
def gate_logits(x: Tensor, W: Tensor) -> Tensor:
    """The first n dims of x (tokens, dim) times a small Wᵀ (outputs, n): (tokens, outputs), differentiable.

    Summed in fp32 or better, rounded once. Unlike linear it never narrows its operands.
    """
    return F.linear(x[:, : W.size(1)], W)


@gate_logits.kernel("cuda")
@gate_logits.kernel(CPU_BF16)
@gate_logits.kernel(CPU_FP32)
def _gate_logits_sums(x: Tensor, W: Tensor) -> Tensor:
    """torch.compile fuses these sums with the sigmoid; a matmul takes longer to start than to multiply."""
    terms = _wide(x[:, None, : W.size(1)]) * _wide(W)  # (tokens, outputs, n), never in memory
    return _cast(terms.sum(-1), x.dtype)


@has_kernel
def relu_squared_mlp(x: Tensor, W_fc: Tensor, W_proj: Tensor) -> Tensor:
    """The MLP with a squared ReLU (So et al., arXiv 2109.08668): relu(x @ W_fcᵀ)² @ W_proj.

    x (tokens, dim), W_fc (hidden, dim) and W_proj (hidden, dim) of one dtype; result (tokens, dim);
    differentiable in all three.
    """
    return _ReluSquaredMLP.apply(x, W_fc, W_proj)


def _mlp_gradients(ctx, grad: Tensor) -> Triple:
    x, W_fc, W_proj, r = ctx.saved_tensors
    grad = _cast(grad, r.dtype)
    grad_W_proj = r.square().mT @ grad
    grad_h = (grad @ (2 * W_proj).mT).mul_(r)  # d relu(h)² = 2 relu(h)
    return tuple(_cast(z, ctx.dtype) for z in (grad_h @ W_fc, grad_h.mT @ x, grad_W_proj))


class _ReluSquaredMLP(torch.autograd.Function):
    """The reference. It saves r = relu(x W_fcᵀ) and computes the activation r² again in the backward pass.

    On a CPU with bf16 units operands and hidden layer are in bf16, as in linear.
    """

    @staticmethod
    def forward(ctx, x: Tensor, W_fc: Tensor, W_proj: Tensor) -> Tensor:
        ctx.dtype = x.dtype
        narrow = operand_dtype(x)
        x, W_fc, W_proj = (_cast(z, narrow) for z in (x, W_fc, W_proj))
        r = torch.relu_(x @ W_fc.mT)  # (tokens, hidden)
        ctx.save_for_backward(x, W_fc, W_proj, r)
        return _cast(r.square() @ W_proj, ctx.dtype)

    backward = staticmethod(_mlp_gradients)


# Chips with an H100's shared memory (H100, H200, B200) also have the tensor memory accelerator (TMA), which
# copies whole tiles by descriptor. Others (A100: 163 KB, RTX 4090: 99 KB) load by pointers.
# fmt: off
LARGE_TILES = dict(TMA=True, FLATTEN=True, BLOCK_M=128, BLOCK_N=256, BLOCK_K=64, num_warps=8, num_stages=4)
SMALL_TILES = dict(TMA=False, FLATTEN=False, BLOCK_M=128, BLOCK_N=128, BLOCK_K=32, num_warps=8, num_stages=4)
# fmt: on
LARGE_TILES_BACKWARD = LARGE_TILES | dict(num_stages=3)  # room for a tile of the activation


@triton.jit
def _prefetch_tile(matrix, row, col, rows, cols, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Ask L2 for the tile at (row, col) of a contiguous (rows, cols) matrix: one address a memory line."""
    LINE: tl.constexpr = 1024 // matrix.dtype.element_ty.primitive_bitwidth  # elements in 128 bytes
    r = tl.minimum(row + tl.arange(0, ROWS), rows - 1)[:, None].to(tl.int64)
    c = tl.minimum(col + tl.arange(0, COLS // LINE) * LINE, cols - 1)[None, :]
    if _ON_GPU:
        asm: tl.constexpr = "prefetch.global.L2 [$1]; mov.b32 $0, 0;"  # it must have a result
        at = (matrix + r * cols + c).to(tl.int64)
        tl.inline_asm_elementwise(asm, "=r,l", [at], tl.int32, False, 1)


@triton.jit
def relu_squared_kernel(
    x, w, activation, out,  # (M, K), (N, K), (M, N), (M, N): tensor descriptors if TMA, else pointers
    pointer,  # to the activation, or None
    scale,  # factor of x wᵀ: a 0-dim fp32 tensor, or None
    M, N, K,
    BACKWARD: tl.constexpr, TMA: tl.constexpr, FLATTEN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """out = relu(x wᵀ)² forward, x wᵀ · 2√activation backward. A program takes every num_programs-th tile.

    With a scale, x and w are FP8, and h = scale · x wᵀ is rounded to out's dtype before it is squared.
    Faster: the epilogue squares, or multiplies by the slope, so that x wᵀ never goes to memory. Programs
    that run side by side share rows of x, and all of w stays in L2. If FLATTEN, the loops over tiles and
    over K are one, so that the next tile's operands load during an epilogue. A tile of the activation is on
    its way into L2 during the matmul before it: in the epilogue its threads would wait for memory.
    Must hold: rows are multiples of 16 bytes (TMA); NaN stays NaN.
    From: R84 for FP8; R87 for saving the square alone.
    """
    HALF: tl.constexpr = BLOCK_N // 2
    OUT: tl.constexpr = out.dtype if TMA else out.dtype.element_ty
    if scale is not None:
        factor = tl.load(scale)
    across = tl.cdiv(N, BLOCK_N)
    first = tl.program_id(0)
    tiles = tl.cdiv(M, BLOCK_M) * across
    for tile in tl.range(first, tiles, tl.num_programs(0), flatten=FLATTEN):
        row = tile // across * BLOCK_M
        col = tile % across * BLOCK_N
        if BACKWARD:
            _prefetch_tile(pointer, row, col, M, N, BLOCK_M, BLOCK_N)
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for k in range(0, K, BLOCK_K):
            left = _load_tile(x, row, k, M, K, BLOCK_M, BLOCK_K, TMA)
            right = _load_tile(w, col, k, N, K, BLOCK_N, BLOCK_K, TMA)
            acc = tl.dot(left, right.T, acc, input_precision="ieee")
        halves = tl.split(tl.permute(tl.reshape(acc, (BLOCK_M, 2, HALF)), (0, 2, 1)))
        # One half after the other, so that registers and shared memory hold half a tile at a time.
        for half in tl.static_range(2):
            result = halves[half]
            at = col + half * HALF
            if BACKWARD:
                saved = _load_tile(activation, row, at, M, N, BLOCK_M, HALF, TMA)
                result *= 2 * tl.sqrt(saved.to(tl.float32))
            else:
                result = tl.where(result < 0, 0.0, result)  # NaN stays
                if scale is not None:
                    # Squared as it is: a cast back to fp32 would cost a slow conversion a number.
                    result = (result * factor).to(OUT)
                result *= result
            if TMA:
                out.store([row, at], result.to(OUT))
            else:
                _store_tile(out, result, row, at, M, N)


def launch_relu_squared(
    x: Tensor, w: Tensor, activation: Tensor | None, scale: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """relu(x wᵀ)², or x wᵀ · 2√activation where one is given, (M, N); x (M, K) and w (N, K) of one dtype.

    With a scale, 0-dim in fp32, x and w are FP8, and the result is relu(scale · x wᵀ)² in dtype.
    """
    M, K = x.shape
    N = w.size(0)
    out = x.new_empty(M, N, dtype=dtype)
    large = LARGE_TILES if activation is None else LARGE_TILES_BACKWARD
    config = large if chip(x.device).shared_memory >= H100.shared_memory else SMALL_TILES
    if scale is not None:
        config = config | dict(BLOCK_K=2 * config["BLOCK_K"])  # as many bytes
    m, n, k = config["BLOCK_M"], config["BLOCK_N"], config["BLOCK_K"]

    def tiles(matrix: Tensor, rows: int, cols: int) -> TensorDescriptor | Tensor:
        matrix = matrix.contiguous()
        return TensorDescriptor.from_tensor(matrix, [rows, cols]) if config["TMA"] else matrix

    result = tiles(out, m, n // 2)
    if activation is not None:
        activation = activation.contiguous()
    saved = result if activation is None else tiles(activation, m, n // 2)
    programs = min(chip(x.device).processors, triton.cdiv(M, m) * triton.cdiv(N, n))
    launch(
        relu_squared_kernel, (programs,),
        tiles(x, m, k), tiles(w, n, k), saved, result, activation, scale, M, N, K,
        BACKWARD=activation is not None, **config,
    )  # fmt: skip
    return out


def _fake_relu_squared(x: Tensor, w: Tensor, activation: Tensor | None) -> Tensor:
    return x.new_empty(x.size(0), w.size(0))


relu_squared_op = operator("relu_squared", _fake_relu_squared)(launch_relu_squared)


def _fused_mlp_gradients(ctx, grad: Tensor) -> Triple:
    x, W_fc, W_proj, activation = ctx.saved_tensors
    grad_h = relu_squared_op(grad, W_proj, activation)
    return grad_h @ W_fc, grad_h.mT @ x, activation.mT @ grad


class _FusedReluSquaredMLP(torch.autograd.Function):
    """With r = relu(x W_fcᵀ) it saves only the activation a = r², and takes the slope 2r = 2√a from it.

    Faster: an element of the hidden layer moves 14 bytes. Forward, a is written and read. Backward, a is
    read, grad_h written, and as operands of the last matmuls a is read once and grad_h twice. Saving r too
    would move 16; saving only r would move 14, but two matmuls would have to square an operand as it loads.
    Must hold: a ≥ 0. A root halves relative errors, so √a is as exact as the r that it replaces.
    """

    @staticmethod
    def forward(ctx, x: Tensor, W_fc: Tensor, W_proj: Tensor) -> Tensor:
        activation = relu_squared_op(x, W_fc, None)  # (tokens, hidden)
        ctx.save_for_backward(x, W_fc, W_proj, activation)
        return activation @ W_proj

    backward = staticmethod(_fused_mlp_gradients)


relu_squared_mlp.kernel("cuda")(_FusedReluSquaredMLP.apply)


# -----------------------------------------------------------------------------
# 9. FP8: quantization and matmuls
#
# Formats (Micikevicius et al., arXiv 2209.05433): e4m3 has 3 bits of mantissa and reaches 448, for weights
# and activations; e5m2 has 2 bits and reaches 57344, for gradients. Scales are static in the LM head; in the
# MLP they are those of the largest number, of a layer's weights or of a micro-batch.

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def has_fp8(device: torch.device) -> bool:
    """Whether there are FP8 matrix units: on CUDA from compute capability 8.9. A CPU emulates them."""
    return device.type == "cpu" or torch.cuda.get_device_capability(device) >= (8, 9)


@has_kernel
def quantize_fp8(x: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """x / scale rounded to E4M3 or E5M2, of any shape. Numbers beyond it saturate; NaN stays NaN."""
    limit = torch.finfo(dtype).max
    return (_wide(x) * (1 / scale)).clamp_(-limit, limit).to(dtype)


@has_kernel
def quantize_fp8_both(x: Tensor, scale: float, dtype: torch.dtype) -> Pair:
    """quantize_fp8(x) and its transpose, both contiguous, for two matmuls that sum along each dimension.

    FP8 units want operands that are contiguous along the summed dimension.
    """
    q = quantize_fp8(x, scale, dtype)
    return q, q.mT.contiguous()


QUANTIZE = dict(BLOCK=128, num_warps=8)  # a tile's rows and columns are FP8 lines of 128 bytes


@triton.jit
def _within(x, scale, limit):
    """x · scale within ±limit. NaN stays NaN, so that a broken run shows in its loss."""
    y = x.to(tl.float32) * scale
    return tl.where(y > limit, limit, tl.where(y < -limit, -limit, y))


@triton.jit
def quantize_kernel(
    x, q, q_t, rows, cols, inverse_scale, limit, BOTH: tl.constexpr, BLOCK: tl.constexpr
):
    """q (rows, cols) and, if BOTH, q_t (cols, rows): x · inverse_scale within ±limit; a program a tile.

    Faster: x is read once for both layouts, and nothing is written in 16 bits.
    Must hold: both layouts have the same bits. So x is of 16 bits if BOTH, and turns before its cast. A
    tile that is cast first, as Triton does with fp32, has a quarter or more of q_t wrong on an H100: the
    assembler in Triton 3.6 and 3.7 then takes bytes from registers that are gone.
    From: R76, which transposes FP8 operands by tiles.
    """
    across = tl.cdiv(cols, BLOCK)
    row = tl.program_id(0) // across * BLOCK
    col = tl.program_id(0) % across * BLOCK
    tile = _load_tile(x, row, col, rows, cols, BLOCK, BLOCK)
    _store_tile(q, _within(tile, inverse_scale, limit), row, col, rows, cols)
    if BOTH:
        _store_tile(q_t, _within(tile.T, inverse_scale, limit), col, row, cols, rows)


def launch_quantize(x: Tensor, scale: float, limit: float, q: Tensor, q_t: Tensor | None) -> None:
    """Fill q, and q_t where it is given."""
    cols = x.size(-1)
    rows = x.numel() // cols
    grid = (triton.cdiv(rows, QUANTIZE["BLOCK"]) * triton.cdiv(cols, QUANTIZE["BLOCK"]),)
    both = q_t is not None
    launch(
        quantize_kernel, grid,
        x.contiguous(), q, q_t if both else q, rows, cols, 1 / scale, limit, BOTH=both, **QUANTIZE,
    )  # fmt: skip


@quantize_fp8.kernel("cuda")
def _quantize_fp8_cuda(x: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    q = torch.empty(x.shape, device=x.device, dtype=dtype)
    launch_quantize(x, scale, torch.finfo(dtype).max, q, None)
    return q


@quantize_fp8_both.kernel("cuda")
def _quantize_fp8_both_cuda(x: Tensor, scale: float, dtype: torch.dtype) -> Pair:
    if x.element_size() != 2:  # as quantize_kernel demands
        q = _quantize_fp8_cuda(x, scale, dtype)
        return q, q.mT.contiguous()
    q = torch.empty(x.shape, device=x.device, dtype=dtype)
    q_t = torch.empty(x.shape[::-1], device=x.device, dtype=dtype)
    launch_quantize(x, scale, torch.finfo(dtype).max, q, q_t)
    return q, q_t


@has_kernel
def fp8_matmul(
    a: Tensor, b: Tensor, scale: float | Tensor, out_dtype: torch.dtype, fast_accum: bool
) -> Tensor:
    """scale · a @ b of FP8 operands, summed in fp32 (in fp64 if out_dtype is fp64).

    a (m, k); b (k, n) in either memory order; result (m, n) in out_dtype. scale is a number, or a 0-dim
    tensor on a's device, for which the host need not wait. fast_accum lets matrix units keep fewer bits of
    the running sum; the forward pass does.
    """
    wide = torch.promote_types(out_dtype, torch.float32)  # it holds any product of two FP8 numbers
    return (a.to(wide) @ b.to(wide)).mul_(scale).to(out_dtype)


@fp8_matmul.kernel("cuda")
def _fp8_matmul_cuda(
    a: Tensor, b: Tensor, scale: float | Tensor, out_dtype: torch.dtype, fast_accum: bool
) -> Tensor:
    """cuBLASLt wants a by rows and b by columns: both contiguous along k."""
    if b.stride(0) != 1:
        b = b.mT.contiguous().mT
    one = torch.ones((), device=a.device, dtype=torch.float32)
    options = dict(out_dtype=out_dtype, use_fast_accum=fast_accum)
    return torch._scaled_mm(a.contiguous(), b, scale_a=one * scale, scale_b=one, **options)


def fp8_linear(x: Tensor, w: Tensor, x_scale: float, w_scale: float, grad_scale: float) -> Tensor:
    """x @ w with FP8 operands, differentiable. x (T, in), w (in, out) and y (T, out) are of one dtype.

    Faster: FP8 units multiply twice as fast as those of bf16.
    Must hold: divided by their scales, x and w fit e4m3 and the incoming gradient fits e5m2. So the
    gradient is that of a loss summed over tokens, divided by nothing.
    From: the speedrun's FP8 LM head, with its static scales.
    """
    return _FP8Linear.apply(x, w, x_scale, w_scale, grad_scale)


class _FP8Linear(torch.autograd.Function):
    """It saves x and w in e4m3. A GPU with FP8 units does the same inside fp8_head_loss_op."""

    @staticmethod
    def forward(ctx, x: Tensor, w: Tensor, x_scale: float, w_scale: float, grad_scale: float):
        x8 = quantize_fp8(x, x_scale, E4M3)
        w8 = quantize_fp8(w, w_scale, E4M3)
        ctx.save_for_backward(x8, w8)
        ctx.scales = x_scale, w_scale, grad_scale
        return fp8_matmul(x8, w8, x_scale * w_scale, x.dtype, True)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        x8, w8 = ctx.saved_tensors
        x_scale, w_scale, grad_scale = ctx.scales
        grad8 = quantize_fp8(grad, grad_scale, E5M2)
        grad_x = fp8_matmul(grad8, w8.mT, grad_scale * w_scale, grad.dtype, False)
        grad_w = fp8_matmul(x8.mT, grad8, x_scale * grad_scale, grad.dtype, False)
        return grad_x, grad_w, None, None, None


@has_kernel
def relu_squared_mlp_fp8(
    x: Tensor, W_fc: Tensor, W_proj: Tensor, W8: Tensor, W_scale: Tensor
) -> Tensor:
    """relu_squared_mlp with e4m3 operands in h = x @ W_fcᵀ, each scaled by its largest number.

    W8 and W_scale: quantize_by_largest(W_fc), which the caller does for all layers at once. h is summed in
    fp32, scaled, and rounded to x's dtype; the rest is in this dtype. Gradients are straight-through: of
    the unquantized x and W_fc, at the slope of this h, none through the scales.
    """
    return _ReluSquaredMLPFP8.apply(x, W_fc, W_proj, W8, W_scale)


def quantize_by_largest(x: Tensor) -> Pair:
    """x / scale in e4m3, and scale = max(max|x|, 1e-12) / 448 of each matrix, in fp32 or better.

    x (rows, cols), scale 0-dim, or (n, rows, cols) and (n,). One NaN makes all of its matrix NaN. Nothing
    saturates: 448 and a few units of fp32 round to 448.
    """
    wide = _wide(x)
    largest = wide.abs().amax(-1).amax(-1)  # torch.compile fuses the rows' with a norm before it
    scale = largest.clamp(min=1e-12) / torch.finfo(E4M3).max
    return (wide * (1 / scale)[..., None, None]).to(E4M3), scale


class _ReluSquaredMLPFP8(torch.autograd.Function):
    """The reference: _ReluSquaredMLP of another h."""

    @staticmethod
    def forward(ctx, x: Tensor, W_fc: Tensor, W_proj: Tensor, W8: Tensor, W_scale: Tensor):
        ctx.dtype = x.dtype
        narrow = operand_dtype(x)
        x8, x_scale = quantize_by_largest(x)
        r = torch.relu_(fp8_matmul(x8, W8.mT, x_scale * W_scale, narrow, True))  # (tokens, hidden)
        x, W_fc, W_proj = (_cast(z, narrow) for z in (x, W_fc, W_proj))
        ctx.save_for_backward(x, W_fc, W_proj, r)
        return _cast(r.square() @ W_proj, ctx.dtype)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        return *_mlp_gradients(ctx, grad), None, None


def _fake_relu_squared_fp8(x8: Tensor, w8: Tensor, _: Tensor, dtype: torch.dtype) -> Tensor:
    return x8.new_empty(len(x8), len(w8), dtype=dtype)


@operator("relu_squared_fp8", _fake_relu_squared_fp8)
def relu_squared_fp8_op(x8: Tensor, w8: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    return launch_relu_squared(x8, w8, None, scale, dtype)


class _FusedReluSquaredMLPFP8(torch.autograd.Function):
    """_FusedReluSquaredMLP of another activation.

    Faster: FP8 units multiply twice as fast as those of bf16. torch.compile fuses what quantizes; the
    kernel reads the scale, so that the host does not wait.
    Must hold: dim is a multiple of 16. Matrix units keep fewer bits of a running sum, as with fast_accum in
    fp8_matmul.
    From: R84. Here weights are quantized in every forward pass, so that nothing is state.
    """

    @staticmethod
    def forward(ctx, x: Tensor, W_fc: Tensor, W_proj: Tensor, W8: Tensor, W_scale: Tensor):
        x8, x_scale = quantize_by_largest(x)
        activation = relu_squared_fp8_op(x8, W8, x_scale * W_scale, x.dtype)
        ctx.save_for_backward(x, W_fc, W_proj, activation)
        return activation @ W_proj

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        return *_fused_mlp_gradients(ctx, grad), None, None


relu_squared_mlp_fp8.kernel("cuda")(_FusedReluSquaredMLPFP8.apply)


# -----------------------------------------------------------------------------
# 10. LM head and loss: softcapped logits, several targets a token, as in R61

SOFTCAP, SOFTCAP_SHIFT, SOFTCAP_SCALE = 23.0, 5.0, 7.5


def softcap(logits: Tensor) -> Tensor:
    """z = 23 · sigmoid((logits + 5) / 7.5), in fp32 or better; any shape."""
    return (_wide(logits) + SOFTCAP_SHIFT).mul_(1 / SOFTCAP_SCALE).sigmoid_().mul_(SOFTCAP)


@has_kernel
def softcapped_cross_entropy(logits: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    """Cross-entropy of z = softcap(logits) with K weighted targets a token, summed over tokens.

    It is Σ_t Σ_k w_k · CE(z[t], targets[t, k]), without the terms whose target is −1: none;
    differentiable in logits (T, vocab). targets (T, K) int64, where a token may stand several times in a
    row; weights (K,) float; result a scalar, fp32 or better.
    """
    return _SoftcappedCrossEntropy.apply(logits, targets, weights)


class _SoftcappedCrossEntropy(torch.autograd.Function):
    """A row's loss is Σ_k w_k · (lse(z) − z[target_k]), with lse the log of the sum of exp z.

    Its gradient in z is (Σ_k w_k) · softmax(z) − Σ_k w_k · onehot(target_k). Both sums are over the
    targets that exist. No z is above 23, so exp z is summed without taking off its maximum.
    """

    @staticmethod
    def forward(ctx, logits: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
        z = softcap(logits)  # (T, vocab)
        total = z.exp().sum(-1)  # (T,)
        weights = (weights * (targets >= 0)).to(z.dtype)  # (T, K): 0 where there is no target
        index = targets.clamp(min=0)
        ctx.save_for_backward(z, total, index, weights)
        ctx.dtype = logits.dtype
        return ((total.log()[:, None] - z.gather(1, index)) * weights).sum()

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:
        z, total, index, weights = ctx.saved_tensors
        weights = weights * (grad / SOFTCAP_SCALE)
        grad_z = z.exp().mul_((weights.sum(1) / total)[:, None]).scatter_add_(1, index, -weights)
        # SOFTCAP_SCALE · dz/dlogits, with z = 23σ and dσ = σ(1 − σ).
        slope = torch.addcmul(z, z, z, value=-1 / SOFTCAP)
        return grad_z.mul_(slope).to(ctx.dtype), None, None


@has_kernel
def loss_and_fp8_gradient(logits: Tensor, targets: Tensor, weights: Tensor, scale: float) -> Triple:
    """softcapped_cross_entropy with its gradient already as the backward matmuls want it.

    Returns the loss; its gradient in the logits, divided by scale, in e5m2 (T, vocab); and the same
    transposed, (vocab, T). The gradient is that of the loss itself: the incoming gradient, a scalar,
    multiplies the scales of the backward matmuls. T and vocab even, as these want multiples of 16.
    """
    with torch.enable_grad():
        logits = _wide(logits.detach()).requires_grad_()
        loss = _SoftcappedCrossEntropy.apply(logits, targets, weights)
        (grad,) = torch.autograd.grad(loss, logits)
    return loss.detach(), *quantize_fp8_both(grad, scale, E5M2)


# The loss on a GPU, sums and gradients in one kernel.
#
# Order. A row of 50304 logits must be summed before its first gradient is known. The work is cut into items
# of ROWS rows by WIDTH columns. S adds up exp z over an item; G reads the item again and writes its gradient
# in both layouts. Programs draw items from one counter, strip after strip of ROWS rows. A strip's gradients
# come AHEAD strips after its sums. Meanwhile (dots) its logits wait in L2: four strips of 6.4 MB at most.
#
#     time →    S0  S1  S2  S3  G0  S4  G1  S5  G2  S6  G3 ...
#     strip 0   S0 ············ G0
#     strip 1       S1 ················ G1
#     strip 2           S2 ···················· G2
#     strip 3               S3 ························ G3
#
# Memory sees one read of 2 bytes a logit and two writes of 1, where separate kernels move 11. There is no
# deadlock, however many programs the chip holds: sums are drawn before the gradients that wait for them. 64
# rows make 64 contiguous bytes, two sectors, in the transposed layout; more rows would not stay in L2.
#
# Arithmetic. With t = tanh((logit + 5) / 15), z is 11.5 (1 + t), exp z a constant times 2^(16.6 t), and
# dz/dlogit 23/30 (1 − t²). A logit takes 26 instructions and three special functions (a processor has 16 a
# clock, and 128 multiply-adds): tanh.approx in S and in G, and an exponential in G; that of S is a
# polynomial. tanh.approx is off by up to 2^-11: that changes the errors which FP8 leaves in the gradients
# of w and x, 5.9 to 6.3 %, by less than a thousandth of themselves. Without FP8, as in evaluation, EXACT
# computes t from an exponential and a reciprocal. A special function is one PTX instruction that flushes
# denormals; Triton's own take three to five.
#
# Words. Two bf16 logits are read as one int32, two FP8 numbers written as one int16. Words are transposed
# whole, so one loop writes both layouts. bf16 is widened by shifts: for a conversion, Triton up to 3.7 would
# transpose the logits and compute each gradient twice. From: R75 (no targets in the loop, folded constants).
LOSS = dict(ROWS=64, WIDTH=512, BLOCK=64, AHEAD=3, num_warps=8, maxnreg=64)
LOSS_PROGRAMS = 4  # a processor: so a thread has 64 registers
_HALF_CAP = tl.constexpr(SOFTCAP / 2)
_TO_X = tl.constexpr(0.5 / SOFTCAP_SCALE)  # from a logit to the argument of tanh
_X_SHIFT = tl.constexpr(0.5 * SOFTCAP_SHIFT / SOFTCAP_SCALE)
_SLOPE = tl.constexpr(SOFTCAP / 4 / SOFTCAP_SCALE)  # dz/dlogit where t is 0
_LOG2E = tl.constexpr(math.log2(math.e))
_T_LOG2E = tl.constexpr(math.log2(math.e) * SOFTCAP / 2)  # exp z = 2^(this · (1 + t))
_ON_GPU = tl.constexpr(not triton.knobs.runtime.interpret)  # the interpreter has no PTX


@triton.jit
def _ptx(x, instruction: tl.constexpr):
    return tl.inline_asm_elementwise(instruction, "=f,f", [x], tl.float32, True, 1)


@triton.jit
def _exp2(x):
    return _ptx(x, "ex2.approx.ftz.f32 $0, $1;") if _ON_GPU else tl.exp2(x)


@triton.jit
def _reciprocal(x):
    return _ptx(x, "rcp.approx.ftz.f32 $0, $1;") if _ON_GPU else 1 / x


@triton.jit
def _tanh(logit, EXACT: tl.constexpr):
    """t = tanh((logit + 5) / 15). Unless EXACT, off by up to 2^-11 of itself: z by 0.006."""
    if EXACT or not _ON_GPU:
        e = _exp2(tl.fma(logit, -2 * _LOG2E * _TO_X, -2 * _LOG2E * _X_SHIFT))
        return tl.fma(_reciprocal(1 + e), 2.0, -1.0)
    else:
        return _ptx(tl.fma(logit, _TO_X, _X_SHIFT), "tanh.approx.f32 $0, $1;")


@triton.jit
def _add_exp2(t, total):
    """total + 2^(16.6 t) = total + exp(z − 11.5), without special functions.

    2^(whole part) comes from its bits; the rest, in −½ .. ½, from a polynomial of relative error 2.6e-6,
    fitted for the smallest maximum. A row adds up to less than 1e10.
    """
    shifted = tl.fma(t, _T_LOG2E, 12582912.0)  # 1.5 · 2^23: the whole part ends in the lowest bits
    power = ((shifted.to(tl.int32, bitcast=True) << 23) + 0x3F800000).to(tl.float32, bitcast=True)
    f = tl.fma(t, _T_LOG2E, 12582912.0 - shifted)
    p = tl.fma(f, 0.009570101946827139, 0.055917861585538735)
    p = tl.fma(p, f, 0.2402474483798435)
    p = tl.fma(p, f, 0.6931218145829673)
    p = tl.fma(p, f, 0.9999992614392346)
    return tl.fma(p, power, total)


@triton.jit
def _block_of(matrix, row, V, BLOCK: tl.constexpr):
    """Pointers to the first BLOCK columns of rows. A word holds two of them."""
    PAIR: tl.constexpr = 2 if matrix.dtype.element_ty.is_int() else 1
    start = matrix + (row.to(tl.int64) * (V // PAIR))[:, None]
    return start + tl.arange(0, BLOCK // PAIR)[None, :]


@triton.jit
def _load_block(block, pair, end, BLOCK: tl.constexpr, eviction: tl.constexpr):
    """Logits or words of BLOCK columns from a pair of columns on; none from `end` on."""
    N: tl.constexpr = block.shape[1]
    at = pair * (2 * N // BLOCK)
    inside = (at + tl.arange(0, N) < end // (BLOCK // N))[None, :]
    return tl.load(block + at, mask=inside, eviction_policy=eviction)


@triton.jit
def _pairs(x):
    """A block's even and its odd columns, in fp32."""
    if x.dtype == tl.int32:
        return (x << 16).to(tl.float32, bitcast=True), (x & -65536).to(tl.float32, bitcast=True)
    else:
        return tl.split(tl.reshape(x.to(tl.float32), (x.shape[0], x.shape[1] // 2, 2)))


@triton.jit
def _to_e5m2(low, high):
    """Words of two numbers in e5m2, int16, which saturate; NaN stays NaN.

    PTX takes four numbers at a time: with one word alone the assembler of Triton 3.7 crashes for sm_89.
    """
    if _ON_GPU:
        return tl.inline_asm_elementwise(
            "{.reg .b16 a, b;"
            " cvt.rn.satfinite.e5m2x2.f32 a, $1, $3;"
            " cvt.rn.satfinite.e5m2x2.f32 b, $2, $4;"
            " mov.b32 $0, {a, b};}",
            "=r,f,f,f,f", [high, low], tl.int16, True, 2,
        )  # fmt: skip
    else:  # the interpreter's own cast loses carries; e5m2 is the upper half of fp16
        both = tl.join(low, high)
        half = both.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32)
        half += tl.where(both == both, 127 + (half >> 8 & 1), 0)
        low, high = tl.split(half >> 8)
        return (low & 255 | high << 8).to(tl.int16)


@triton.jit
def _load_targets(targets, weights, row, K: tl.constexpr, SLOTS: tl.constexpr):
    """Rows' targets, −1: none, and their weights, 0 where there is none; (ROWS, SLOTS)."""
    k = tl.arange(0, SLOTS)[None, :]
    target = tl.load(targets + row[:, None] * K + k, mask=k < K, other=-1)
    weight = tl.load(weights + k, mask=k < K, other=0.0)
    return target, tl.where(target >= 0, weight, 0.0)


@triton.jit
def _load_logit(logits, place, mask):
    if logits.dtype.element_ty == tl.int32:
        logits = logits.to(tl.pointer_type(tl.bfloat16))
    return tl.load(logits + place, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _sum_item(
    logits, targets, weights, lse, row_loss, partial, done, T, V, strip, part, parts,
    EXACT: tl.constexpr, K: tl.constexpr, SLOTS: tl.constexpr,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Σ exp z of one item. A strip's last program adds its items up, in order, and finishes its rows.

    The next block is on its way while one is worked at; there is no barrier in this loop.
    """
    WHOLE: tl.constexpr = logits.dtype.element_ty == tl.int32
    lane = tl.arange(0, ROWS)
    row = tl.minimum(strip * ROWS + lane, T - 1)  # the last row may be computed many times
    end = tl.minimum((part + 1) * WIDTH, V)
    block = _block_of(logits, row, V, BLOCK)
    sums = tl.zeros((ROWS, BLOCK // 2), tl.float32)
    first = part * (WIDTH // 2)
    ahead = _load_block(block, first, end, BLOCK, "")
    for pair in range(first, tl.cdiv(end, 2), BLOCK // 2):
        even, odd = _pairs(ahead)
        ahead = _load_block(block, pair + BLOCK // 2, end, BLOCK, "")
        c = 2 * (pair + tl.arange(0, BLOCK // 2))[None, :]
        sums = tl.where((c < V) | WHOLE, _add_exp2(_tanh(even, EXACT), sums), sums)
        sums = tl.where((c + 1 < V) | WHOLE, _add_exp2(_tanh(odd, EXACT), sums), sums)
    strip_sums = partial + strip * parts * ROWS + lane[None, :]
    tl.store(strip_sums + part * ROWS, tl.sum(sums, 1)[None, :])
    tl.debug_barrier()  # all threads have stored before one of them says so
    if tl.atomic_add(done + strip, 1, sem="acq_rel") == parts - 1:
        total = tl.zeros((16, ROWS), tl.float32)
        for some in range(0, parts, 16):
            p = some + tl.arange(0, 16)[:, None]
            total += tl.load(strip_sums + p * ROWS, mask=p < parts, other=0.0)
        log_total = tl.log(tl.sum(total, 0)) + _HALF_CAP
        target, weight = _load_targets(targets, weights, row, K, SLOTS)
        logit = _load_logit(logits, row.to(tl.int64)[:, None] * V + target, target >= 0)
        z = tl.fma(_tanh(logit, EXACT), _HALF_CAP, _HALF_CAP)
        loss = tl.where(target >= 0, weight * (log_total[:, None] - z), 0.0)
        tl.store(lse + row, log_total)
        tl.store(row_loss + row, tl.sum(loss, 1))
        tl.debug_barrier()
        tl.atomic_add(done + strip, 1, sem="release")


@triton.jit
def _gradient(logit, exponent, weight, onehot, EXACT: tl.constexpr):
    """(weight · softmax(z) − onehot) · (1 − t²); softmax(z) is 2^(16.6 t + exponent)."""
    t = _tanh(logit, EXACT)
    p = weight * _exp2(tl.fma(t, _T_LOG2E, exponent))
    if onehot is not None:
        p -= onehot
    return p * (1.0 - t * t)


@triton.jit
def _gradient_item(
    logits, targets, weights, lse, grad, grad_t, T, V, strip, part, inverse_scale,
    EXACT: tl.constexpr, K: tl.constexpr, SLOTS: tl.constexpr,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """((Σ_k w_k) softmax(z) − Σ_k w_k onehot(target_k)) · dz/dlogit · inverse_scale of one item.

    First as if there were no targets; then the item's few targets are overwritten.
    """
    WHOLE: tl.constexpr = logits.dtype.element_ty == tl.int32
    FP8: tl.constexpr = grad.dtype.element_ty == tl.int16
    row = tl.minimum(strip * ROWS + tl.arange(0, ROWS), T - 1)
    exponent = tl.fma(tl.load(lse + row), -_LOG2E, _T_LOG2E)[:, None]
    size = inverse_scale * _SLOPE
    target, weight = _load_targets(targets, weights, row, K, SLOTS)
    weight = tl.sum(weight, 1)[:, None] * size
    end = tl.minimum((part + 1) * WIDTH, V)
    block = _block_of(logits, row, V, BLOCK)
    out = _block_of(grad, row, V, BLOCK)
    row_pair = strip * (ROWS // 2) + tl.arange(0, ROWS // 2)[None, :]
    first = part * (WIDTH // 2)
    out_t = grad_t + (first + tl.arange(0, BLOCK // 2)).to(tl.int64)[:, None] * T + row_pair
    ahead = _load_block(block, first, end, BLOCK, "evict_first")
    for pair in range(first, tl.cdiv(end, 2), BLOCK // 2):
        even, odd = _pairs(ahead)
        ahead = _load_block(block, pair + BLOCK // 2, end, BLOCK, "evict_first")
        even = _gradient(even, exponent, weight, None, EXACT)
        odd = _gradient(odd, exponent, weight, None, EXACT)
        if FP8:
            words = _to_e5m2(even, odd)  # two columns of a row
            inside = (pair + tl.arange(0, BLOCK // 2) < V // 2) | WHOLE
            tl.store(out + pair, words, mask=inside[None, :])
            upper, lower = tl.split(tl.reshape(words.T, (BLOCK // 2, ROWS // 2, 2)))
            inside = inside[:, None] & (row_pair < T // 2)
            tl.store(out_t, (upper & 255) | (lower << 8), mask=inside)  # two rows of a column
            tl.store(out_t + T // 2, ((upper >> 8) & 255) | (lower & -256), mask=inside)
            out_t += BLOCK // 2 * T
        else:
            wide = tl.reshape(tl.join(even, odd), (ROWS, BLOCK)).to(grad.dtype.element_ty)
            inside = (2 * pair + tl.arange(0, BLOCK) < V) | WHOLE
            tl.store(out + 2 * pair, wide, mask=inside[None, :])
    tl.debug_barrier()  # all threads have stored before some of it is overwritten
    onehot = tl.zeros((ROWS, SLOTS), tl.float32)  # a target may be that of several k
    for k in tl.static_range(K):
        same = tl.load(targets + row * K + k)[:, None] == target
        onehot += tl.where(same, tl.load(weights + k), 0.0)
    here = (target >= part * WIDTH) & (target < end)
    place = row.to(tl.int64)[:, None] * V + target
    logit = _load_logit(logits, place, here)
    value = _gradient(logit, exponent, weight, onehot * size, EXACT)
    if FP8:
        narrow = _to_e5m2(value, value).to(tl.int8)
        tl.store(grad.to(tl.pointer_type(tl.int8)) + place, narrow, mask=here)
        place_t = target * T + row[:, None]
        tl.store(grad_t.to(tl.pointer_type(tl.int8)) + place_t, narrow, mask=here)
    else:
        tl.store(grad + place, value.to(grad.dtype.element_ty), mask=here)


@triton.jit
def loss_kernel(
    logits, targets, weights,  # (T, V), or as words (T, V/2); (T, K) int64, −1: none; (K,) fp32
    lse, row_loss,  # (T,) fp32 each; lse is an input if only gradients are asked for
    partial, drawn, done,  # scratch: (strips, parts, ROWS) fp32; () and (strips,) int32, zero
    grad, grad_t,  # (T, V); or in FP8, as words, (T, V/2) and (V, T/2)
    T, V, inverse_scale,
    SUMS: tl.constexpr, GRADIENTS: tl.constexpr, EXACT: tl.constexpr,
    K: tl.constexpr, SLOTS: tl.constexpr,  # SLOTS: K or the next power of 2
    ROWS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Each row's loss and log-sum-exp if SUMS; its gradient if GRADIENTS, in both layouts if in FP8.

    Faster: see above.
    Must hold: items are drawn in one order. Partial sums are added in a fixed order, so that a run repeats
    bit for bit. A strip is done, done > parts, only after all its sums and its log-sum-exp are stored.
    Logits are words only if V is a multiple of BLOCK; gradients only if T and V are even.
    From: R67 (FP8 gradient from the loss) and R79 (one kernel for both, in CUDA).
    """
    strips = tl.cdiv(T, ROWS)
    parts = tl.cdiv(V, WIDTH)
    LAG: tl.constexpr = AHEAD if SUMS and GRADIENTS else 0
    KINDS: tl.constexpr = 2 if SUMS and GRADIENTS else 1
    ticket = tl.atomic_add(drawn, 1)
    while ticket < (strips + LAG) * parts * KINDS:
        strip = ticket // (parts * KINDS)
        part = ticket % parts
        kind = ticket // parts % KINDS
        if SUMS:
            if kind == 0 and strip < strips:
                _sum_item(
                    logits, targets, weights, lse, row_loss, partial, done, T, V, strip, part, parts,
                    EXACT, K, SLOTS, ROWS, WIDTH, BLOCK,
                )  # fmt: skip
        if GRADIENTS:
            if kind == KINDS - 1 and strip >= LAG:
                if SUMS:
                    while tl.atomic_add(done + strip - LAG, 0, sem="acquire") <= parts:
                        pass
                _gradient_item(
                    logits, targets, weights, lse, grad, grad_t, T, V, strip - LAG, part,
                    inverse_scale, EXACT, K, SLOTS, ROWS, WIDTH, BLOCK,
                )  # fmt: skip
        ticket = tl.atomic_add(drawn, 1)


def launch_loss(
    logits: Tensor, targets: Tensor, weights: Tensor, lse: Tensor | None = None,
    grad: Tensor | None = None, grad_t: Tensor | None = None, scale: float = 1.0,
) -> Pair:  # fmt: skip
    """Each row's loss and log-sum-exp, (T,) fp32; fills grad and grad_t if given. With an lse, only these.

    grad has any dtype, (T, V); with a grad_t, (V, T), both are e5m2, and T and V even.
    """
    T, V = logits.shape
    device = logits.device
    strips = triton.cdiv(T, LOSS["ROWS"])
    parts = triton.cdiv(V, LOSS["WIDTH"])
    logits = logits.contiguous()
    if logits.dtype == torch.bfloat16 and V % LOSS["BLOCK"] == 0:
        logits = logits.view(torch.int32)
    weights = weights.float().contiguous()
    K = len(weights)
    sums = lse is None
    if sums:
        lse = torch.empty(T, device=device)
    row_loss = torch.empty_like(lse)
    partial = torch.empty(strips * parts * LOSS["ROWS"] if sums else 1, device=device)
    # The number of items drawn and, 16 bytes further, the items done of each strip.
    counters = torch.zeros(4 + strips, device=device, dtype=torch.int32)
    gradients = grad is not None
    exact = grad_t is None
    grad = grad if gradients else row_loss
    launch(
        loss_kernel, (min(LOSS_PROGRAMS * chip(device).processors, strips * parts),),
        logits, targets.contiguous(), weights, lse, row_loss, partial, counters, counters[4:],
        grad if exact else grad.view(torch.int16), grad if exact else grad_t.view(torch.int16),
        T, V, 1 / scale, SUMS=sums, GRADIENTS=gradients, EXACT=exact,
        K=K, SLOTS=triton.next_power_of_2(K), **LOSS,
    )  # fmt: skip
    return row_loss, lse


def _fake_cross_entropy(logits: Tensor, *_: Any) -> Pair:
    loss = logits.new_empty((), dtype=torch.float32)
    return loss, logits.new_empty(logits.shape[:1], dtype=torch.float32)


@operator("cross_entropy", _fake_cross_entropy)
def cross_entropy_op(logits: Tensor, targets: Tensor, weights: Tensor) -> Pair:
    """The loss and each row's log-sum-exp (T,), without FP8: 2 bytes a logit, 4 in the backward pass."""
    row_loss, lse = launch_loss(logits, targets, weights)
    return row_loss.sum(), lse


def _contiguous_like(logits: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(logits, memory_format=torch.contiguous_format)


@operator("cross_entropy_backward", _contiguous_like)
def cross_entropy_backward_op(
    logits: Tensor, targets: Tensor, weights: Tensor, lse: Tensor
) -> Tensor:
    """The gradient in the logits, in their dtype."""
    grad = _contiguous_like(logits)
    launch_loss(logits, targets, weights, lse, grad)
    return grad


def _save_lse(ctx, inputs, output):
    ctx.save_for_backward(*inputs, output[1])
    ctx.set_materialize_grads(False)


def _cross_entropy_gradients(ctx, grad, _):
    """The loss is linear in the weights, so the incoming gradient multiplies them and costs no pass."""
    logits, targets, weights, lse = ctx.saved_tensors
    return cross_entropy_backward_op(logits, targets, weights * grad, lse), None, None


cross_entropy_op.register_autograd(_cross_entropy_gradients, setup_context=_save_lse)
softcapped_cross_entropy.kernel("cuda")(lambda *inputs: cross_entropy_op(*inputs)[0])


@loss_and_fp8_gradient.kernel("cuda")
def _loss_and_fp8_gradient_cuda(
    logits: Tensor, targets: Tensor, weights: Tensor, scale: float
) -> Triple:
    grad = torch.empty(logits.shape, device=logits.device, dtype=E5M2)
    grad_t = torch.empty(logits.shape[::-1], device=logits.device, dtype=E5M2)
    row_loss, _ = launch_loss(logits, targets, weights, None, grad, grad_t, scale)
    return row_loss.sum(), grad, grad_t


@has_kernel
def fp8_head_loss(
    x: Tensor, w: Tensor, targets: Tensor, weights: Tensor,
    x_scale: float, w_scale: float, grad_scale: float,
) -> Tensor:  # fmt: skip
    """The training loss of the logits x @ w in FP8, summed over tokens; differentiable in x and w.

    x (T, in); w (in, vocab), the layout that its gradient is born in; targets (T, K) and weights (K,) as
    in softcapped_cross_entropy; scales as in fp8_linear; result a scalar, fp32 or better.
    """
    logits = fp8_linear(x, w, x_scale, w_scale, grad_scale)
    return softcapped_cross_entropy(logits, targets, weights)


def _fake_head_loss(x, w, *_):
    shape = len(x), w.size(1)
    loss = x.new_empty((), dtype=torch.promote_types(x.dtype, torch.float32))
    shapes = (shape, E5M2), (shape[::-1], E5M2), (x.shape[::-1], E4M3), (w.shape, E4M3)
    return loss, *(x.new_empty(shape, dtype=dtype) for shape, dtype in shapes)


@operator("fp8_head_loss", _fake_head_loss)
def fp8_head_loss_op(
    x: Tensor, w: Tensor, targets: Tensor, weights: Tensor,
    x_scale: float, w_scale: float, grad_scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """LM head and loss as one node, with what its backward pass needs.

    Returns the loss; its gradient in the logits in e5m2, (T, vocab) and (vocab, T); x transposed and w in
    e4m3. The last four are the operands of the backward matmuls, contiguous along the summed dimension.
    Faster: the logits are not kept, and their gradient is never in 16 bits.
    Must hold: FP8 rounding does not depend on the incoming gradient, which only scales the matmuls.
    """
    x8, x8_t = quantize_fp8_both(x, x_scale, E4M3)
    w8, w8_t = quantize_fp8_both(w, w_scale, E4M3)
    logits = fp8_matmul(x8, w8_t.mT, x_scale * w_scale, x.dtype, True)
    loss, grad8, grad8_t = loss_and_fp8_gradient(logits, targets, weights, grad_scale)
    return loss, grad8, grad8_t, x8_t, w8


def _fake_head_loss_backward(grad, grad8, grad8_t, x8_t, w8, dtype, *_):
    shapes = x8_t.shape[::-1], w8.shape
    return tuple(grad.new_empty(shape, dtype=dtype) for shape in shapes)


@operator("fp8_head_loss_backward", _fake_head_loss_backward)
def fp8_head_loss_backward_op(
    grad: Tensor, grad8: Tensor, grad8_t: Tensor, x8_t: Tensor, w8: Tensor,
    dtype: torch.dtype, x_scale: float, w_scale: float, grad_scale: float,
) -> Pair:  # fmt: skip
    """grad_x (T, in) and grad_w (in, vocab) in dtype; grad is the incoming gradient, a scalar."""
    grad_x = fp8_matmul(grad8, w8.mT, grad * (grad_scale * w_scale), dtype, False)
    grad_w = fp8_matmul(x8_t, grad8_t.mT, grad * (x_scale * grad_scale), dtype, False)
    return grad_x, grad_w


def _save_head_loss(ctx, inputs, output):
    ctx.save_for_backward(*output[1:])  # all results but the loss
    ctx.dtype = inputs[0].dtype
    ctx.scales = inputs[-3:]
    ctx.set_materialize_grads(False)


def _head_loss_gradients(ctx, grad, *_):
    grads = fp8_head_loss_backward_op(grad, *ctx.saved_tensors, ctx.dtype, *ctx.scales)
    return *grads, None, None, None, None, None


fp8_head_loss_op.register_autograd(_head_loss_gradients, setup_context=_save_head_loss)
fp8_head_loss.kernel("cuda")(lambda *inputs, **scales: fp8_head_loss_op(*inputs, **scales)[0])


# -----------------------------------------------------------------------------
# 11. fp32 weights as 16 + 16 bits: a bf16 parameter, and the lower halves beside it


def join_mantissa(p: Tensor, mantissa: Tensor) -> Tensor:
    """The fp32 numbers whose upper halves are p (bf16) and whose lower halves are mantissa (uint16)."""
    upper = p.view(torch.int16).to(torch.int32) << 16
    return (upper | mantissa.to(torch.int32)).view(torch.float32)


def split_mantissa(x: Tensor) -> Pair:
    """fp32 x as upper halves (bf16, truncated) and lower halves (uint16), which join to the same bits."""
    bits = x.contiguous().view(torch.int32)
    upper = (bits >> 16).to(torch.int16).view(torch.bfloat16)
    return upper, (bits & 0xFFFF).to(torch.uint16)


# -----------------------------------------------------------------------------
# 12. Compiled on a GPU, in pieces that fit the cache on a CPU

CPU_CACHE_ELEMENTS = 262_144  # a tensor's part: all tensors of an update stay in a core's cache


def fused_on_gpu(function: Callable) -> Callable:
    """The function, compiled if its first argument is on a GPU: on a CPU that costs more than it saves."""

    @functools.cache
    def compiled() -> Callable:
        return torch.compile(function, dynamic=False, fullgraph=True)

    @functools.wraps(function)
    def dispatch(x: Tensor, *args: Any, **options: Any) -> Any:
        return (compiled() if x.is_cuda else function)(x, *args, **options)

    return dispatch


def cache_sized(*tensors: Tensor | None) -> Iterator[tuple[Tensor | None, ...]]:
    """The tensors in slices along dim 0, the same rows of each, in order; None stays None.

    On a CPU a slice has as many rows of the first tensor as the cache holds, at least one, so that an
    update of many passes stays in the cache. Elsewhere there is one slice.
    """
    first = tensors[0]
    at_once = len(first)
    if first.device.type == "cpu":
        at_once = CPU_CACHE_ELEMENTS // max(1, first[:1].numel())
    at_once = max(1, at_once)
    for start in range(0, len(first), at_once):
        yield tuple(None if x is None else x[start : start + at_once] for x in tensors)

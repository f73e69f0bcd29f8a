"""The trainer's operations that have more than one implementation: a reference in plain PyTorch, a kernel for GPUs.

A function's body is its reference: the mathematics, and the fast path on a CPU. `has_kernel` puts a kernel in its place:

    @has_kernel
    def XXT(X, out=None): ...  # plain PyTorch

    @XXT.kernel("cuda")
    def _XXT_cuda(X, out=None): ...  # takes over for 16-bit tensors on a GPU

Chapters, in the order of learning: how a function finds its kernel; transposes; embeddings; FP8; symmetric products; norm;
MLP; head and loss; what the machine wants. Attention is a file of its own, attention.py. Each chapter goes from the
mathematics to the launch configuration, the kernel, its launcher and custom operators. Docstrings say what is computed, why
that is faster, what must hold, its source.

Kernels compute in fp32 and store in the dtype of their pointers: Triton's interpreter runs in fp32 and fp16 on a CPU the code
that GPUs run in bf16 and FP8. No configuration is searched for at run time. References compute in the dtype they are given,
but sum products of bf16 or FP8 in fp32, as matrix units do, and norm, attention and loss in fp32 or better.
What a kernel must move and was compiled to: bench/README.md. What is proved of it: bench/kernel_checks.py.
"""

import contextlib
import functools
import math
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, library
from torch.nn import functional as F

try:
    import triton
    import triton.language as tl
    from triton.tools.tensor_descriptor import TensorDescriptor
except ModuleNotFoundError as missing:
    if missing.name != "triton":  # one that is half installed is an error
        raise
    from no_triton import TensorDescriptor, tl, triton

# -----------------------------------------------------------------------------
# How a function finds its kernel

_forced: str | None = None  # set by kernels_of
CPU_BF16, CPU_FP32 = "CPU with bf16 units", "CPU without bf16 units"  # devices of their own
cpu: str | None = None  # one of these in a run on a CPU: set by use_cpu of cpu.py


def kernel_device(x: Tensor) -> str | None:
    """The type of device whose kernels serve x; None in fp64, on a GPU also in fp32: tiles are sized for 16 bits."""
    own = x.device.type if x.dtype.itemsize <= 2 else None
    if x.device.type == "cpu" and x.dtype in (torch.float32, torch.bfloat16):
        own = cpu
    return own if _forced is None else _forced


@contextlib.contextmanager
def kernels_of(device: str) -> Iterator[None]:
    """Inside, every function takes the kernels of `device`, whatever the device and dtype of its tensors: for tests and
    benchmarks. kernels_of("cuda") is the GPU's way on any tensor; kernels_of("cpu"), which has no kernels, the reference's."""
    global _forced
    before, _forced = _forced, device
    try:
        yield
    finally:
        _forced = before


def has_kernel(reference: Callable) -> Callable:
    """The decorated function, or the kernel for the device of its first argument: a function of the same signature, registered
    by `.kernel(device)`. torch.compile traces the chosen one; no `if function:` here: Dynamo 2.11 cannot trace it."""
    kernels: dict[str, Callable] = {}

    @functools.wraps(reference)
    def chosen(x: Tensor, *args: Any, **options: Any) -> Any:
        device = kernel_device(x)
        return (kernels[device] if device in kernels else reference)(x, *args, **options)

    chosen.kernel = lambda device: lambda function: kernels.update({device: function}) or function
    return chosen


class Chip(NamedTuple):  # what a launch depends on
    processors: int  # streaming multiprocessors
    shared_memory: int  # bytes that one block may have


H100 = Chip(132, 227 * 1024)
OPTIONS = dict(enable_fp_fusion=True)  # of every launch: a multiplication and an addition may be one instruction


@functools.cache
def chip(device: torch.device) -> Chip:
    """The chip of a CUDA device; an H100 elsewhere: tests interpret and compile kernels for it."""
    if device.type != "cuda":
        return H100
    found = torch.cuda.get_device_properties(device)
    return Chip(found.multi_processor_count, found.shared_memory_per_block_optin)


def launch(kernel: triton.JITFunction, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
    """The one place where a kernel starts, so that tests and benchmarks see what is launched."""
    kernel[grid](*args, **constants, **OPTIONS)


def operator(name: str, fake: Callable) -> Callable[[Callable], library.CustomOpDef]:
    """The decorated function as custom operator bankrun::name, one node of a compiled graph; fake gives its result's shapes
    and dtypes, of the same arguments. PyTorch's wrapper keeps Dynamo out of it, and imports Dynamo for that: 2 s of every rank
    on a CPU. There the function stands without it as long as nobody else has imported Dynamo."""

    def register(function: Callable) -> library.CustomOpDef:
        node = library.custom_op("bankrun::" + name, function, mutates_args=())
        node.register_fake(fake)
        wrapped = torch._disable_dynamo(function)
        library.impl("bankrun::" + name, "cpu", lambda *args: (wrapped if "torch._dynamo" in sys.modules else function)(*args))
        return node

    return register


def _wide(x: Tensor) -> Tensor:  # in fp32 if it is narrower
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def _cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x in dtype. Where nothing changes, nothing is done: Dynamo 2.11 loses the gradient of a saved `.to` that does nothing."""
    return x if x.dtype == dtype else x.to(dtype)


def operand_dtype(x: Tensor) -> torch.dtype:
    """In which x is an operand of a product: bf16 on a CPU with bf16 units, elsewhere its own."""
    return torch.bfloat16 if kernel_device(x) == CPU_BF16 else x.dtype


# -----------------------------------------------------------------------------
# Transposes: the tied embedding (vocab, dim) and the head (dim, vocab)


@has_kernel
def transpose_add(source: Tensor, target: Tensor, alone: bool = True) -> None:
    """target += sourceᵀ in place: embed.grad (vocab, dim) into lm_head.grad (dim, vocab).
    alone: nothing runs meanwhile, so that a kernel takes all processors."""
    target.add_(source.mT)


@has_kernel
def transpose_copy(source: Tensor, target: Tensor, alone: bool = True) -> None:
    """target = sourceᵀ in place: lm_head (dim, vocab) into embed (vocab, dim). alone: as in transpose_add."""
    target.copy_(source.mT)


TRANSPOSE = dict(BLOCK=64, num_warps=4)  # 64 bf16 are a line of 128 bytes, in either layout
TRANSPOSE_PROGRAMS = 32  # of an H100's 132 processors: the others stay with the collectives that run meanwhile


@triton.jit
def _load_tile(matrix, row, col, rows, cols, ROWS: tl.constexpr, COLS: tl.constexpr, TMA: tl.constexpr = False):
    """(ROWS, COLS) at (row, col) of a contiguous (rows, cols) matrix, zero outside; matrix is a tensor descriptor if TMA."""
    if TMA:
        tile = matrix.load([row, col])
    else:
        r, c = row + tl.arange(0, ROWS)[:, None], col + tl.arange(0, COLS)[None, :]
        tile = tl.load(matrix + r.to(tl.int64) * cols + c, mask=(r < rows) & (c < cols), other=0.0)
    return tile


@triton.jit
def _store_tile(matrix, tile, row, col, rows, cols):
    r, c = row + tl.arange(0, tile.shape[0])[:, None], col + tl.arange(0, tile.shape[1])[None, :]
    tl.store(matrix + r.to(tl.int64) * cols + c, tile.to(matrix.dtype.element_ty), mask=(r < rows) & (c < cols))


@triton.jit
def transpose_kernel(source, target, rows, cols, ADD: tl.constexpr, BLOCK: tl.constexpr):
    """target (rows, cols) = sourceᵀ, or += if ADD, tile by tile; each program takes every num_programs-th.
    Faster: tiles turn on the chip, so that reads and writes are whole lines of memory, and a sum needs no sourceᵀ in memory;
    three tiles are on their way while one is turned, as few programs would else wait for memory most of the time.
    Must hold: source and target are contiguous and do not overlap; sums are rounded once."""
    across = tl.cdiv(cols, BLOCK)
    for tile in tl.range(tl.program_id(0), tl.cdiv(rows, BLOCK) * across, tl.num_programs(0), num_stages=4):
        row, col = tile // across * BLOCK, tile % across * BLOCK
        result = _load_tile(source, col, row, cols, rows, BLOCK, BLOCK).T
        if ADD:
            result = _load_tile(target, row, col, rows, cols, BLOCK, BLOCK).to(tl.float32) + result.to(tl.float32)
        _store_tile(target, result, row, col, rows, cols)


def launch_transpose(source: Tensor, target: Tensor, alone: bool = True, *, add: bool) -> None:
    rows, cols = target.shape
    tiles = triton.cdiv(rows, TRANSPOSE["BLOCK"]) * triton.cdiv(cols, TRANSPOSE["BLOCK"])
    grid = (min(tiles, 4 * chip(target.device).processors if alone else TRANSPOSE_PROGRAMS),)  # of 48 KB, four fit a processor
    result = target if target.is_contiguous() else target.contiguous()
    launch(transpose_kernel, grid, source.contiguous(), result, rows, cols, ADD=add, **TRANSPOSE)
    if result is not target:
        target.copy_(result)


transpose_add.kernel("cuda")(functools.partial(launch_transpose, add=True))
transpose_copy.kernel("cuda")(functools.partial(launch_transpose, add=False))


# -----------------------------------------------------------------------------
# Embeddings: several looked up at once


@has_kernel
def lookup(table: Tensor, *tables: Tensor, tokens: Tensor) -> list[Tensor]:
    """The tokens' rows of each table, (T, width), differentiable. Tables (vocab, width), of one vocab; tokens (T,) int32."""
    return [F.embedding(tokens, each) for each in (table, *tables)]


def token_runs(tokens: Tensor, vocab: int) -> tuple[Tensor, Tensor]:
    """Positions sorted by token, (T,) int64, equal ones in their order; each token's first place there, (vocab + 1,) int32."""
    found, order = torch.sort(tokens, stable=True)
    ids = torch.arange(vocab + 1, device=tokens.device, dtype=tokens.dtype)
    return order, torch.searchsorted(found, ids, out_int32=True)


SCATTER = dict(ROWS=8, BLOCK=256, num_warps=1)  # a warp holds the sums; in registers alone
SCATTER_ITEMS = 8  # of a program: enough to hide its start, few enough to even out the long with the short


@triton.jit
def scatter_kernel(
    grad, order, starts, out,  # (T, dim); (T,) int64; (V + 1,) int32; (V, dim)
    V, dim, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out[v] = Σ grad[order[i]], starts[v] ≤ i < starts[v + 1]: a sum over the positions of token v, zero where there are none.
    Each program takes every num_programs-th item, a row's BLOCK columns: neighbours, often frequent alike, go to different
    programs, the most frequent tokens of a BPE, its first, to those that start first.
    Faster: a row is read and written once in 16 bits, 102 MB for 16384 tokens; zeros in fp32, atomic additions and a cast move
    510. Must hold: no atomics, and one order of summation, so that a run repeats itself to the bit; a sum is rounded once."""
    across = tl.cdiv(dim, BLOCK)
    for item in tl.range(tl.program_id(0), V * across, tl.num_programs(0)):
        token, c = (item // across).to(tl.int64), item % across * BLOCK + tl.arange(0, BLOCK)
        start, end = tl.load(starts + token), tl.load(starts + token + 1)
        row = out + token * dim + c
        if start == end:
            tl.store(row, tl.zeros((BLOCK,), out.dtype.element_ty), mask=c < dim)
        else:
            sums = tl.zeros((ROWS, BLOCK), tl.float32)
            for first in tl.range(start, end, ROWS, num_stages=3):
                i = first + tl.arange(0, ROWS)
                t = tl.load(order + i, mask=i < end, other=0)[:, None]
                sums += tl.load(grad + t * dim + c, mask=(i < end)[:, None] & (c < dim), other=0.0).to(tl.float32)
            tl.store(row, tl.sum(sums, 0).to(out.dtype.element_ty), mask=c < dim)


def launch_scatter(grad: Tensor, order: Tensor, starts: Tensor) -> Tensor:
    """(vocab, dim): the gradient of a table from that of its rows, grad (T, dim); order and starts: token_runs."""
    out = grad.new_empty(len(starts) - 1, grad.size(1))
    items = len(out) * triton.cdiv(out.size(1), SCATTER["BLOCK"])
    launch(scatter_kernel, (triton.cdiv(items, SCATTER_ITEMS),), grad.contiguous(), order, starts, out, *out.shape, **SCATTER)
    return out


scatter_op = operator("scatter", lambda grad, _, starts: grad.new_empty(len(starts) - 1, grad.size(1)))(launch_scatter)


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx, table: Tensor, tokens: Tensor, order: Tensor, starts: Tensor) -> Tensor:
        ctx.save_for_backward(order, starts)
        return F.embedding(tokens, table)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return scatter_op(grad, *ctx.saved_tensors), None, None, None


@lookup.kernel("cuda")
def _lookup_cuda(table: Tensor, *tables: Tensor, tokens: Tensor) -> list[Tensor]:
    runs = token_runs(tokens, len(table))
    return [_Lookup.apply(each, tokens, *runs) for each in (table, *tables)]


# -----------------------------------------------------------------------------
# FP8: quantisation and products
# Formats (Micikevicius et al., arXiv 2209.05433): e4m3, 3 bits of mantissa and up to 448, for weights and activations; e5m2,
# 2 bits and up to 57344, for gradients. Scales are static: no pass looks for the largest number.

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def has_fp8(device: torch.device) -> bool:
    """FP8 matrix units (CUDA from compute capability 8.9), or the CPU's emulation of the same arithmetic."""
    return device.type == "cpu" or torch.cuda.get_device_capability(device) >= (8, 9)


@has_kernel
def quantize_fp8(x: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """x / scale rounded to FP8; numbers beyond the format saturate, NaN stays NaN.
    x any shape and float dtype; dtype torch.float8_e4m3fn or torch.float8_e5m2; result like x, in dtype."""
    limit = torch.finfo(dtype).max
    return (_wide(x) * (1 / scale)).clamp_(-limit, limit).to(dtype)


@has_kernel
def quantize_fp8_both(x: Tensor, scale: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """quantize_fp8(x) and its transpose, both contiguous: FP8 products want their operands contiguous along the summed
    dimension, and x (rows, cols) is summed over its columns in one product and over its rows in another."""
    q = quantize_fp8(x, scale, dtype)
    return q, q.mT.contiguous()


QUANTIZE = dict(BLOCK=128, num_warps=8)  # tiles whose rows and columns are whole lines of 128 bytes in FP8


@triton.jit
def _within(x, scale, limit):
    """x · scale within ±limit; NaN stays NaN, so that a broken run is seen in its loss."""
    y = x.to(tl.float32) * scale
    return tl.where(y > limit, limit, tl.where(y < -limit, -limit, y))


@triton.jit
def quantize_kernel(x, q, q_t, rows, cols, inverse_scale, limit, BOTH: tl.constexpr, BLOCK: tl.constexpr):
    """q (rows, cols) and, if BOTH, q_t (cols, rows): x · inverse_scale within ±limit, one program a tile.
    Faster: x is read once for both layouts, and nothing is written in 16 bits. Must hold: both layouts have the same bits.
    So x is of 16 bits if BOTH, and turns before its cast. Of a tile that is cast first, as Triton does with fp32, a quarter
    of q_t or more is wrong on an H100: the assembler in Triton 3.6 and 3.7 merges the pairs of a cast into words, and then
    takes bytes of pairs that are no more."""
    across = tl.cdiv(cols, BLOCK)
    row, col = tl.program_id(0) // across * BLOCK, tl.program_id(0) % across * BLOCK
    tile = _load_tile(x, row, col, rows, cols, BLOCK, BLOCK)
    _store_tile(q, _within(tile, inverse_scale, limit), row, col, rows, cols)
    if BOTH:
        _store_tile(q_t, _within(tile.T, inverse_scale, limit), col, row, cols, rows)


def launch_quantize(x: Tensor, scale: float, limit: float, q: Tensor, q_t: Tensor | None) -> None:
    rows, cols = x.numel() // x.size(-1), x.size(-1)
    grid = (triton.cdiv(rows, QUANTIZE["BLOCK"]) * triton.cdiv(cols, QUANTIZE["BLOCK"]),)
    both, q_t = q_t is not None, q if q_t is None else q_t
    launch(quantize_kernel, grid, x.contiguous(), q, q_t, rows, cols, 1 / scale, limit, BOTH=both, **QUANTIZE)


@quantize_fp8.kernel("cuda")
def _quantize_fp8_cuda(x: Tensor, scale: float, dtype: torch.dtype, both: bool = False) -> Tensor | tuple[Tensor, Tensor]:
    q, fused = torch.empty(x.shape, device=x.device, dtype=dtype), both and x.element_size() == 2
    q_t = torch.empty(x.shape[::-1], device=x.device, dtype=dtype) if fused else None
    launch_quantize(x, scale, torch.finfo(dtype).max, q, q_t)
    if both:
        return q, q_t if fused else q.mT.contiguous()
    return q


quantize_fp8_both.kernel("cuda")(functools.partial(_quantize_fp8_cuda, both=True))


@has_kernel
def fp8_matmul(a: Tensor, b: Tensor, scale: float | Tensor, out_dtype: torch.dtype, fast_accum: bool) -> Tensor:
    """scale · a @ b for FP8 operands, summed in fp32 (fp64 if out_dtype is fp64).
    a (m, k) FP8; b (k, n) FP8, in either memory order; result (m, n) in out_dtype. scale: a number, or a 0-dim tensor on
    a's device, for which the host need not wait. fast_accum: matrix units may keep fewer bits of the running sum (forward)."""
    wide = torch.promote_types(out_dtype, torch.float32)  # products of two FP8 numbers are exact in it
    return (a.to(wide) @ b.to(wide)).mul_(scale).to(out_dtype)


@fp8_matmul.kernel("cuda")
def _fp8_matmul_cuda(a: Tensor, b: Tensor, scale: float | Tensor, out_dtype: torch.dtype, fast_accum: bool) -> Tensor:
    """cuBLASLt wants a by rows and b by columns: both contiguous along k."""
    if b.stride(0) != 1:
        b = b.mT.contiguous().mT
    one = torch.ones((), device=a.device, dtype=torch.float32)
    return torch._scaled_mm(a.contiguous(), b, scale_a=one * scale, scale_b=one, out_dtype=out_dtype, use_fast_accum=fast_accum)


def fp8_linear(x: Tensor, w: Tensor, x_scale: float, w_scale: float, grad_scale: float) -> Tensor:
    """x @ w with FP8 operands, x (T, in), w (in, out), both of one dtype; y (T, out) likewise; differentiable.
    Faster: FP8 units multiply twice as fast as those of bf16. Must hold: x, w and the incoming gradient, divided by their
    scales, fit e4m3, e4m3 and e5m2. So the gradient has the size of that of a summed token loss, not divided by anything."""
    return fp8_linear_op(x, w, x_scale, w_scale, grad_scale)[0]


@operator("fp8_linear", lambda x, w, *_: (x.new_empty(len(x), w.size(1)), *(torch.empty_like(z, dtype=E4M3) for z in (x, w))))
def fp8_linear_op(x: Tensor, w: Tensor, x_scale: float, w_scale: float, grad_scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """y in x's dtype, and both operands in e4m3 for the backward; grad_scale is that of the backward."""
    x8 = quantize_fp8(x, x_scale, E4M3)
    w8 = quantize_fp8(w, w_scale, E4M3)
    return fp8_matmul(x8, w8, x_scale * w_scale, x.dtype, True), x8, w8


@operator("fp8_linear_backward", lambda grad, x8, w8, *_: tuple(torch.empty_like(z, dtype=grad.dtype) for z in (x8, w8)))
def fp8_linear_backward_op(
    grad: Tensor, x8: Tensor, w8: Tensor, x_scale: float, w_scale: float, grad_scale: float
) -> tuple[Tensor, Tensor]:
    """grad (T, out) → grad_x (T, in) and grad_w (in, out), both in grad's dtype."""
    grad8 = quantize_fp8(grad, grad_scale, E5M2)
    grad_x = fp8_matmul(grad8, w8.mT, grad_scale * w_scale, grad.dtype, False)
    grad_w = fp8_matmul(x8.mT, grad8, x_scale * grad_scale, grad.dtype, False)
    return grad_x, grad_w


def _keep_fp8(ctx, inputs, output):  # for the backward: all results but the first, and the three scales
    ctx.save_for_backward(*output[1:])
    ctx.dtype, ctx.scales = inputs[0].dtype, inputs[-3:]
    ctx.set_materialize_grads(False)


fp8_linear_op.register_autograd(
    lambda ctx, grad, *_: (*fp8_linear_backward_op(grad, *ctx.saved_tensors, *ctx.scales), None, None, None),
    setup_context=_keep_fp8,
)

# -----------------------------------------------------------------------------
# Symmetric products: what Polar Express is made of (Amsel et al., arXiv 2505.16932). XXT and ba_plus_cAA have their names from
# the public speedrun (KellerJordan/modded-nanogpt), which computes one triangle too.


def _operand(x: Tensor) -> Tensor:  # of a product that is summed in fp32: as matrix units do; other CPUs are slow at bf16
    return x if x.is_cuda or kernel_device(x) == CPU_BF16 else _wide(x)


def _result(product: Tensor, dtype: torch.dtype, out: Tensor | None) -> Tensor:
    return product.to(dtype) if out is None else out.copy_(product)


@has_kernel
def XXT(X: Tensor, out: Tensor | None = None) -> Tensor:
    """X Xᵀ. X (..., rows, cols) bf16, fp32 or fp64; out and result (..., rows, rows), same dtype, one rounding."""
    wide = _operand(X)
    return _result(wide @ wide.mT, X.dtype, out)


@has_kernel
def XTX(X: Tensor, out: Tensor | None = None) -> Tensor:
    """Xᵀ X, for tall matrices, so that none is transposed in memory. X (..., rows, cols); result (..., cols, cols)."""
    wide = _operand(X)
    return _result(wide.mT @ wide, X.dtype, out)


@has_kernel
def ba_plus_cAA(A: Tensor, beta: float, alpha: float, out: Tensor | None = None) -> Tensor:
    """beta·A + alpha·A·Aᵀ, A (..., n, n) symmetric, so that A·Aᵀ = A². Result like A, one rounding."""
    wide = _operand(A)
    flat = wide.flatten(0, -3) if wide.ndim > 3 else wide.reshape(-1, *wide.shape[-2:])
    return _result(torch.baddbmm(flat, flat, flat, beta=beta, alpha=alpha).view_as(A), A.dtype, out)


@has_kernel
def aX_plus_BX(X: Tensor, B: Tensor, a: float, right: bool = False) -> Tensor:
    """a·X + B·X, or a·X + X·B if right. X (n, rows, cols), B (n, k, k) with k rows or cols; result like X, one rounding."""
    wide, square = _operand(X), _operand(B)
    return (torch.baddbmm(wide, wide, square, beta=a) if right else torch.baddbmm(wide, square, wide, beta=a)).to(X.dtype)


# One configuration for every chip and shape: 96 KB of shared memory, so two blocks on an H100 and one on an RTX 4090.
# Smaller tiles would fill more of the chip with the few matrices of a rank of 8, but read so much more from L2 that they lose.
PRODUCT = dict(BLOCK=128, BLOCK_K=64, num_warps=8, num_stages=3)


@triton.jit
def product_kernel(
    L, R, C, out,  # left factor, right factor, addend, result: contiguous stacks of matrices
    M, N, K,  # out and C are (batch, M, N)
    alpha, beta,
    L_TRANSPOSED: tl.constexpr, R_TRANSPOSED: tl.constexpr,  # L lies in memory as (K, M), else (M, K); R as (N, K), else (K, N)
    SYMMETRIC: tl.constexpr,  # out is symmetric: compute the tiles on and below the diagonal, store each twice
    ADDEND: tl.constexpr, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """out = alpha · L R + beta · C, one program a tile; a transposed factor is loaded along its rows and turned on the chip.
    Faster: a symmetric result takes the tiles of one triangle, 21 of 36 for 768 x 768; the addend costs one read and no
    pass. Must hold: where SYMMETRIC, L R is symmetric, and so is C; out is none of the others; a result is rounded once,
    and its two triangles have the same bits."""
    tile, matrix = tl.program_id(0), tl.program_id(1).to(tl.int64)
    if SYMMETRIC:
        i = 0
        while (i + 1) * (i + 2) // 2 <= tile:  # row i of the triangle begins at tile i(i + 1)/2
            i += 1
        j = tile - i * (i + 1) // 2
    else:
        i, j = tile // tl.cdiv(N, BLOCK), tile % tl.cdiv(N, BLOCK)
    row, col = i * BLOCK, j * BLOCK
    L, R = L + matrix * M * K, R + matrix * N * K
    C, out = C + matrix * M * N, out + matrix * M * N

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
    """alpha · op(L) op(R) + beta · C into out, all (..., rows, cols); out may be none of the others."""
    (M, N), K = out.shape[-2:], L.size(-2 if L_transposed else -1)
    rows, cols = triton.cdiv(M, PRODUCT["BLOCK"]), triton.cdiv(N, PRODUCT["BLOCK"])
    L, R, C = L.contiguous(), R.contiguous(), L if C is None else C.contiguous()
    target = out if out.is_contiguous() else torch.empty_like(out, memory_format=torch.contiguous_format)
    launch(
        product_kernel, (rows * (rows + 1) // 2 if symmetric else rows * cols, out[..., 0, 0].numel()),
        L, R, C, target, M, N, K, alpha, beta,
        L_TRANSPOSED=L_transposed, R_TRANSPOSED=R_transposed, SYMMETRIC=symmetric, ADDEND=beta != 0, **PRODUCT,
    )  # fmt: skip
    return out if target is out else out.copy_(target)


def _empty_gram(X: Tensor, tall: bool) -> Tensor:
    n = X.size(-1 if tall else -2)
    return X.new_empty(*X.shape[:-2], n, n)


@operator("gram", _empty_gram)
def gram_op(X: Tensor, tall: bool) -> Tensor:
    """Xᵀ X if tall, else X Xᵀ."""
    return launch_product(X, X, None, _empty_gram(X, tall), 1.0, 0.0, tall, not tall, symmetric=True)


@operator("multiply_add", lambda L, R, C, *_: C.new_empty(C.shape))
def multiply_add_op(L: Tensor, R: Tensor, C: Tensor, alpha: float, beta: float, symmetric: bool) -> Tensor:
    """alpha · L R + beta · C; symmetric says that L = R, and they and C are symmetric."""
    return launch_product(L, R, C, C.new_empty(C.shape), alpha, beta, R_transposed=symmetric, symmetric=symmetric)


def _gram_cuda(X: Tensor, out: Tensor | None = None, *, tall: bool) -> Tensor:
    return gram_op(X, tall) if out is None else launch_product(X, X, None, out, 1.0, 0.0, tall, not tall, symmetric=True)


XXT.kernel("cuda")(functools.partial(_gram_cuda, tall=False))
XTX.kernel("cuda")(functools.partial(_gram_cuda, tall=True))


@ba_plus_cAA.kernel("cuda")
def _ba_plus_cAA_cuda(A: Tensor, beta: float, alpha: float, out: Tensor | None = None) -> Tensor:
    if out is None:
        return multiply_add_op(A, A, A, alpha, beta, True)
    return launch_product(A, A, A, out, alpha, beta, R_transposed=True, symmetric=True)


@aX_plus_BX.kernel("cuda")
def _aX_plus_BX_cuda(X: Tensor, B: Tensor, a: float, right: bool = False) -> Tensor:
    """Not baddbmm: that copies X into its result before it multiplies."""
    return multiply_add_op(X, B, X, 1.0, a, False) if right else multiply_add_op(B, X, X, 1.0, a, False)


# -----------------------------------------------------------------------------
# The residual stream: norm and sum. They have no kernel: torch.compile joins them with their neighbours. Heads: attention.py.

RMS_EPS = torch.finfo(torch.float32).eps


def norm(x: Tensor) -> Tensor:
    """x / √(mean x² + ε) over the last dimension, without weights; x any shape and float dtype (arXiv 1910.07467)."""
    return _RMSNorm.apply(x)


class _RMSNorm(torch.autograd.Function):
    """With r = 1/rms and y = r·x: dx = r·(dy − y·mean(dy·y)). Faster: it keeps y and r alone, where autograd of the formula
    would keep every step. Must hold: computed in fp32 or better and rounded once, forward and backward."""

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
        grad, wide = _cast(grad, rstd.dtype), _cast(y, rstd.dtype)
        mean = (grad * wide).sum(-1, keepdim=True).mul_(-1 / y.size(-1))
        return _cast(torch.addcmul(grad, wide, mean).mul_(rstd), y.dtype)


@has_kernel
def residual_add(x: Tensor, branch: Tensor) -> Tensor:
    """x + branch, (T, dim) each."""
    return x + branch


@residual_add.kernel("cuda")
def _residual_add_cuda(x: Tensor, branch: Tensor) -> Tensor:
    """With a leading 1: a 2-D sum with a product becomes an addmm of torch.compile, which copies x before it multiplies. This
    one becomes part of the next norm."""
    return (x[None] + branch[None])[0]


# -----------------------------------------------------------------------------
# Linear maps of the attention


def linear(x: Tensor, W: Tensor) -> Tensor:
    """x @ Wᵀ, differentiable. x (tokens, in), W (out, in), one dtype; result (tokens, out).
    On a CPU with bf16 units operands are in bf16, forward and backward, what comes in and goes out in x's dtype: those units
    multiply twice as fast as fp32's, and sum in fp32."""
    narrow = operand_dtype(x)
    return _cast(F.linear(_cast(x, narrow), _cast(W, narrow)), x.dtype)


# -----------------------------------------------------------------------------
# MLP with a squared ReLU (So et al., arXiv 2109.08668)


@has_kernel
def relu_squared_mlp(x: Tensor, W_fc: Tensor, W_proj: Tensor) -> Tensor:
    """relu(x @ W_fc.T)² @ W_proj, differentiable in all three.
    x (tokens, dim), W_fc (hidden, dim), W_proj (hidden, dim), one dtype; result (tokens, dim)."""
    return _ReluSquaredMLP.apply(x, W_fc, W_proj)


class _ReluSquaredMLP(torch.autograd.Function):
    """The backward rebuilds the activation r² from the one saved tensor r = relu(x W_fcᵀ). On a CPU with bf16 units operands
    and the hidden layer are in bf16, what comes in and goes out in x's dtype: as linear."""

    @staticmethod
    def forward(ctx, x: Tensor, W_fc: Tensor, W_proj: Tensor) -> Tensor:
        ctx.dtype, narrow = x.dtype, operand_dtype(x)
        x, W_fc, W_proj = (_cast(z, narrow) for z in (x, W_fc, W_proj))
        r = torch.relu_(x @ W_fc.mT)  # (tokens, hidden)
        ctx.save_for_backward(x, W_fc, W_proj, r)
        return _cast(r.square() @ W_proj, ctx.dtype)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, W_fc, W_proj, r = ctx.saved_tensors
        grad = _cast(grad, r.dtype)
        grad_W_proj = r.square().mT @ grad
        grad_h = (grad @ (2 * W_proj).mT).mul_(r)  # d relu(h)² = 2 relu(h)
        return tuple(_cast(z, ctx.dtype) for z in (grad_h @ W_fc, grad_h.mT @ x, grad_W_proj))


# Chips with an H100's shared memory (H100, H200, B200) also have the tensor memory accelerator, TMA, that copies whole tiles by
# descriptor; the others (A100: 163 KB, RTX 4090: 99 KB) load by pointers.
LARGE_TILES = dict(TMA=True, FLATTEN=True, BLOCK_M=128, BLOCK_N=256, BLOCK_K=64, num_warps=8, num_stages=4)
SMALL_TILES = dict(TMA=False, FLATTEN=False, BLOCK_M=128, BLOCK_N=128, BLOCK_K=32, num_warps=8, num_stages=4)
LARGE_TILES_BACKWARD = LARGE_TILES | dict(num_stages=3)  # as a tile of the activation is on its way too


@triton.jit
def relu_squared_kernel(
    x, w, activation, out,  # (M, K), (N, K), (M, N), (M, N): tensor descriptors if TMA, else pointers
    M, N, K,
    BACKWARD: tl.constexpr, TMA: tl.constexpr, FLATTEN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """out = relu(x wᵀ)² forward; out = x wᵀ · 2√activation backward. Each program takes every num_programs-th tile.
    Faster: the product's epilogue squares, or multiplies by the slope, so that x wᵀ never goes to memory. Programs that run
    side by side share rows of x, and all of w stays in L2. If FLATTEN, both loops are one: the next tile's operands are on
    their way during an epilogue. Must hold: rows are multiples of 16 bytes (TMA); NaN stays NaN."""
    HALF: tl.constexpr = BLOCK_N // 2
    across = tl.cdiv(N, BLOCK_N)
    for tile in tl.range(tl.program_id(0), tl.cdiv(M, BLOCK_M) * across, tl.num_programs(0), flatten=FLATTEN):
        row, col = tile // across * BLOCK_M, tile % across * BLOCK_N
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for k in range(0, K, BLOCK_K):
            rows = _load_tile(x, row, k, M, K, BLOCK_M, BLOCK_K, TMA)
            acc = tl.dot(rows, _load_tile(w, col, k, N, K, BLOCK_N, BLOCK_K, TMA).T, acc, input_precision="ieee")
        halves = tl.split(tl.permute(tl.reshape(acc, (BLOCK_M, 2, HALF)), (0, 2, 1)))
        for half in tl.static_range(2):  # one after the other, so that registers and shared memory hold half a tile at a time
            result, at = halves[half], col + half * HALF
            if BACKWARD:
                result *= 2 * tl.sqrt(_load_tile(activation, row, at, M, N, BLOCK_M, HALF, TMA).to(tl.float32))
            else:
                result = tl.where(result < 0, 0.0, result)  # NaN stays
                result *= result
            if TMA:
                out.store([row, at], result.to(out.dtype))
            else:
                _store_tile(out, result, row, at, M, N)


def launch_relu_squared(x: Tensor, w: Tensor, activation: Tensor | None) -> Tensor:
    """(M, N): relu(x wᵀ)², or x wᵀ · 2√activation where an activation is given. x (M, K), w (N, K), one dtype."""
    (M, K), N = x.shape, w.size(0)
    out = x.new_empty(M, N)
    large = LARGE_TILES if activation is None else LARGE_TILES_BACKWARD
    config = large if chip(x.device).shared_memory >= H100.shared_memory else SMALL_TILES
    m, n, k = config["BLOCK_M"], config["BLOCK_N"], config["BLOCK_K"]

    def tiles(matrix: Tensor, rows: int, cols: int) -> TensorDescriptor | Tensor:
        return TensorDescriptor.from_tensor(matrix.contiguous(), [rows, cols]) if config["TMA"] else matrix.contiguous()

    result = tiles(out, m, n // 2)
    launch(
        relu_squared_kernel, (min(chip(x.device).processors, triton.cdiv(M, m) * triton.cdiv(N, n)),),
        tiles(x, m, k), tiles(w, n, k), result if activation is None else tiles(activation, m, n // 2), result,
        M, N, K, BACKWARD=activation is not None, **config,
    )  # fmt: skip
    return out


relu_squared_op = operator("relu_squared", lambda x, w, _: x.new_empty(x.size(0), w.size(0)))(launch_relu_squared)


class _FusedReluSquaredMLP(torch.autograd.Function):
    """Saves the activation a = relu(x W_fcᵀ)² alone, and rebuilds the slope 2 relu(x W_fcᵀ) = 2√a from it.
    Faster: an element of the hidden layer moves 14 bytes: write a, read a; backward read a, write grad_h, and a once and
    grad_h twice as operands. Saving relu(x W_fcᵀ) too would move 16; saving it alone, 14, but two products would have to square
    an operand on its way. Must hold: a ≥ 0. A root halves relative errors, so √a is as exact as the relu it replaces."""

    @staticmethod
    def forward(ctx, x: Tensor, W_fc: Tensor, W_proj: Tensor) -> Tensor:
        activation = relu_squared_op(x, W_fc, None)  # (tokens, hidden)
        ctx.save_for_backward(x, W_fc, W_proj, activation)
        return activation @ W_proj

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, W_fc, W_proj, activation = ctx.saved_tensors
        grad_h = relu_squared_op(grad, W_proj, activation)
        return grad_h @ W_fc, grad_h.mT @ x, activation.mT @ grad


relu_squared_mlp.kernel("cuda")(_FusedReluSquaredMLP.apply)


# -----------------------------------------------------------------------------
# Head and loss: softcapped logits, several targets a token, products in FP8, as in public record 61 of the speedrun

SOFTCAP, SOFTCAP_SHIFT, SOFTCAP_SCALE = 23.0, 5.0, 7.5


def softcap(logits: Tensor) -> Tensor:
    """z = 23 · sigmoid((logits + 5) / 7.5), in fp32 or better; any shape."""
    return (_wide(logits) + SOFTCAP_SHIFT).mul_(1 / SOFTCAP_SCALE).sigmoid_().mul_(SOFTCAP)


@has_kernel
def softcapped_cross_entropy(logits: Tensor, targets: Tensor, mtp_weights: Tensor) -> Tensor:
    """Multi-token cross-entropy (arXiv 2404.19737) of z = softcap(logits), summed: Σ_t Σ_k w_k · CE(z[t], targets[t + k]).
    Terms with t + k ≥ T are dropped. Differentiable in logits. logits (T, vocab), any float dtype; targets (T,) int64;
    mtp_weights (K,) float; result a scalar, fp32 or better."""
    return _SoftcappedCrossEntropy.apply(logits, targets, mtp_weights)


class _SoftcappedCrossEntropy(torch.autograd.Function):
    """A row's loss is Σ_k w_k · (lse(z) − z[target_k]); its gradient in z is (Σ_k w_k) · softmax(z) − Σ_k w_k · onehot. No z is
    above 23, so that exp z is summed as it is."""

    @staticmethod
    def forward(ctx, logits: Tensor, targets: Tensor, mtp_weights: Tensor) -> Tensor:
        z = softcap(logits)  # (T, vocab)
        total = z.exp().sum(-1)  # (T,)
        T, K = len(targets), mtp_weights.numel()
        index = torch.arange(T, device=z.device)[:, None] + torch.arange(K, device=z.device)  # (T, K): t + k
        weights = (mtp_weights * (index < T)).to(z.dtype)  # w_k where the target exists, else 0
        index = targets[index.clamp_(max=T - 1)]
        ctx.save_for_backward(z, total, index, weights)
        ctx.dtype = logits.dtype
        return ((total.log()[:, None] - z.gather(1, index)) * weights).sum()

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:
        z, total, index, weights = ctx.saved_tensors
        weights = weights * (grad / SOFTCAP_SCALE)
        grad_z = z.exp().mul_((weights.sum(1) / total)[:, None]).scatter_add_(1, index, -weights)
        slope = torch.addcmul(z, z, z, value=-1 / SOFTCAP)  # SOFTCAP_SCALE · dz/dlogits: z = 23σ and dσ = σ(1 − σ)
        return grad_z.mul_(slope).to(ctx.dtype), None, None


@has_kernel
def loss_and_fp8_gradient(
    logits: Tensor, targets: Tensor, mtp_weights: Tensor, scale: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """softcapped_cross_entropy with its gradient already as the backward products want it.
    Returns the loss; its gradient in the logits, divided by scale, in FP8 (T, vocab); and the same transposed (vocab, T).
    The gradient is that of the loss itself: the incoming gradient, a scalar, multiplies the scales of the products."""
    with torch.enable_grad():
        logits = _wide(logits.detach()).requires_grad_()
        loss = _SoftcappedCrossEntropy.apply(logits, targets, mtp_weights)
        (grad,) = torch.autograd.grad(loss, logits)
    return loss.detach(), *quantize_fp8_both(grad, scale, dtype)


# The loss on a GPU. A row of 50304 logits must be summed before its first gradient is known. So work comes in items of ROWS
# rows times WIDTH columns, of two kinds: S adds up exp z over an item; G reads the item again and writes its gradient in both
# layouts. Programs draw items from one counter, one strip of ROWS rows after the other; the gradients of a strip come AHEAD
# strips after its sums. Dots: the strip's logits wait in L2, at most four strips of 6.4 MB.
#
#     time →    S0  S1  S2  S3  G0  S4  G1  S5  G2  S6  G3 ...
#     strip 0   S0 ············ G0
#     strip 1       S1 ················ G1
#     strip 2           S2 ···················· G2
#     strip 3               S3 ························ G3
#     strip 4                       S4 ························ ...
#
# So a gradient finds its sums done and its logits in L2: memory sees one read of 2 bytes a logit and two writes of 1, where
# separate kernels move 11. Sums are drawn before the gradients that need them, so that some running program can always go
# on: no deadlock, however many programs the chip holds. 64 rows make 64 contiguous bytes, two sectors, in the transposed
# layout; more would leave L2.
#
# Special functions limit this kernel (16 a clock and processor, next to 128 multiply-adds), then the number of instructions.
# So a logit takes five: σ an exponential and a reciprocal, both times, and the gradient's probability an exponential; that of
# the sums is a polynomial. Each is one PTX instruction that flushes denormals; Triton's own take three to five.
LOSS = dict(ROWS=64, WIDTH=1024, BLOCK=64, AHEAD=3, num_warps=8)
_CAP, _CAP_SCALE, _LOG2E = tl.constexpr(SOFTCAP), tl.constexpr(SOFTCAP_SCALE), tl.constexpr(math.log2(math.e))
_TURN = tl.constexpr(-math.log2(math.e) / SOFTCAP_SCALE)  # logit to exponent, of 2
_TURN_SHIFT = tl.constexpr(-math.log2(math.e) * SOFTCAP_SHIFT / SOFTCAP_SCALE)
_ON_GPU = tl.constexpr(not triton.knobs.runtime.interpret)  # the interpreter has no PTX


@triton.jit
def _exp2(x):
    return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, False, 1) if _ON_GPU else tl.exp2(x)


@triton.jit
def _reciprocal(x):
    return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, False, 1) if _ON_GPU else 1 / x


@triton.jit
def _sigmoid(logit):
    """σ = sigmoid((logit + 5) / 7.5). z = 23σ is at most 23: a row of exp z sums to less than 1e15, without its maximum off."""
    return _reciprocal(1 + _exp2(tl.fma(logit.to(tl.float32), _TURN, _TURN_SHIFT)))


@triton.jit
def _add_exp2(x, total):
    """total + 2^x for x in 0 .. 100 without special functions: 2^(whole part) from its bits, the rest, in −½ .. ½, from a
    polynomial (relative error 2.6e-6, fitted for the least of the largest)."""
    shifted = x + 12582912.0  # 1.5 · 2^23: the whole part ends in the lowest bits
    power = ((shifted.to(tl.int32, bitcast=True) << 23) + 0x3F800000).to(tl.float32, bitcast=True)
    f = x - (shifted - 12582912.0)
    p = tl.fma(f, 0.009570101946827139, 0.055917861585538735)
    p = tl.fma(p, f, 0.2402474483798435)
    p = tl.fma(p, f, 0.6931218145829673)
    p = tl.fma(p, f, 0.9999992614392346)
    return tl.fma(p, power, total)


@triton.jit
def _sum_item(
    logits, targets, weights, lse, row_loss, partial, done, T, V, strip, part, parts,
    K: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Σ exp z of one item. The last program of a strip adds the items up, in order, and finishes the strip's rows."""
    lane = tl.arange(0, ROWS)
    row = strip * ROWS + lane
    start = logits + row.to(tl.int64) * V
    sums = tl.zeros((ROWS, BLOCK), tl.float32)
    for col in tl.range(part * WIDTH, tl.minimum((part + 1) * WIDTH, V), BLOCK, num_stages=2):
        c = (col + tl.arange(0, BLOCK))[None, :]
        sigma = _sigmoid(tl.load(start[:, None] + c, mask=(row < T)[:, None] & (c < V), other=0.0))
        sums = tl.where(c < V, _add_exp2(sigma * (_CAP * _LOG2E), sums), sums)
    strip_sums = partial + strip * parts * ROWS + lane
    tl.store(strip_sums + part * ROWS, tl.sum(sums, 1))
    tl.debug_barrier()  # all threads have stored before one of them says so
    if tl.atomic_add(done + strip, 1, sem="acq_rel") == parts - 1:
        total = tl.zeros((ROWS,), tl.float32)
        for p in range(parts):
            total += tl.load(strip_sums + p * ROWS)
        log_total = tl.log(total)
        loss = tl.zeros((ROWS,), tl.float32)
        for k in tl.static_range(K):
            exists = row + k < T
            target = tl.load(targets + row + k, mask=exists, other=0)
            z = _CAP * _sigmoid(tl.load(start + target, mask=exists, other=0.0))
            loss += tl.where(exists, tl.load(weights + k) * (log_total - z), 0.0)
        tl.store(lse + row, log_total, mask=row < T)
        tl.store(row_loss + row, loss, mask=row < T)
        tl.debug_barrier()
        tl.atomic_add(done + strip, 1, sem="release")


@triton.jit
def _gradient(logit, log2_total, weight, onehot, size):
    """(weight · softmax(z) − onehot) · dz/dlogit · size; z = 23σ and dσ = σ(1 − σ)."""
    sigma = _sigmoid(logit)
    p = _exp2(tl.fma(sigma, _CAP * _LOG2E, -log2_total))
    return (weight * p - onehot) * (tl.fma(-sigma, sigma, sigma) * size)


@triton.jit
def _gradient_item(
    logits, targets, weights, lse, grad, grad_t, T, V, strip, part, inverse_scale,
    K: tl.constexpr, BOTH: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """((Σ_k w_k) softmax(z) − Σ_k w_k onehot(target_k)) · dz/dlogit · inverse_scale of one item.
    First as if there were no targets; then the item's few targets are written over; then what was written is turned. A turn
    of the numbers at hand would cost more: Triton up to 3.7 turns the logits instead, and computes every gradient twice."""
    row = strip * ROWS + tl.arange(0, ROWS)
    offset = row.to(tl.int64) * V
    log2_total = tl.load(lse + row, mask=row < T, other=0.0) * _LOG2E
    size = inverse_scale * (_CAP / _CAP_SCALE)
    weight = tl.zeros((ROWS,), tl.float32)
    for k in tl.static_range(K):
        weight += tl.where(row + k < T, tl.load(weights + k), 0.0)
    end = tl.minimum((part + 1) * WIDTH, V)
    for col in tl.range(part * WIDTH, end, BLOCK, num_stages=2):
        c = col + tl.arange(0, BLOCK)
        inside = (row < T)[:, None] & (c < V)[None, :]
        logit = tl.load(logits + offset[:, None] + c[None, :], mask=inside, other=0.0, eviction_policy="evict_first")
        narrow = _gradient(logit, log2_total[:, None], weight[:, None], 0.0, size).to(grad.dtype.element_ty)
        tl.store(grad + offset[:, None] + c[None, :], narrow, mask=inside)
    tl.debug_barrier()  # all threads have stored before some of it is written over
    for k in tl.static_range(K):
        target = tl.load(targets + row + k, mask=row + k < T, other=-1)
        onehot = tl.zeros((ROWS,), tl.float32)  # one target may be that of several k
        for j in tl.static_range(K):
            same = tl.load(targets + row + j, mask=row + j < T, other=-1) == target
            onehot += tl.where(same, tl.load(weights + j), 0.0)
        here = (target >= part * WIDTH) & (target < end)
        logit = tl.load(logits + offset + target, mask=here, other=0.0)
        narrow = _gradient(logit, log2_total, weight, onehot, size).to(grad.dtype.element_ty)
        tl.store(grad + offset + target, narrow, mask=here)
    if BOTH:
        tl.debug_barrier()
        for col in tl.range(part * WIDTH, end, 2 * BLOCK, num_stages=2):  # 64 KB in all, still in L2
            _store_tile(grad_t, _load_tile(grad, strip * ROWS, col, T, V, ROWS, 2 * BLOCK).T, col, strip * ROWS, V, T)


@triton.jit
def loss_kernel(
    logits, targets, weights,  # (T, V); (T,) int64; (K,) fp32
    lse, row_loss,  # (T,) fp32 each; lse is read if only gradients are asked for
    partial, drawn, done,  # scratch: (strips, parts, ROWS) fp32; () and (strips,) int32, zero
    grad, grad_t,  # (T, V), (V, T)
    T, V, inverse_scale,
    K: tl.constexpr, SUMS: tl.constexpr, GRADIENTS: tl.constexpr, BOTH: tl.constexpr,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Loss and log-sum-exp of each row if SUMS; its gradient in the logits if GRADIENTS, and transposed if BOTH.
    Faster: see the picture above. Must hold: items are drawn in one order; partial sums are added in a fixed order, so that
    a run repeats itself to the bit; a strip is done, done > parts, only after all its sums and its log-sum-exp are stored."""
    strips, parts = tl.cdiv(T, ROWS), tl.cdiv(V, WIDTH)
    LAG: tl.constexpr = AHEAD if SUMS and GRADIENTS else 0
    KINDS: tl.constexpr = 2 if SUMS and GRADIENTS else 1
    ticket = tl.atomic_add(drawn, 1)
    while ticket < (strips + LAG) * parts * KINDS:
        strip, part, kind = ticket // (parts * KINDS), ticket % parts, ticket // parts % KINDS
        if SUMS:
            if kind == 0 and strip < strips:
                _sum_item(
                    logits, targets, weights, lse, row_loss, partial, done, T, V, strip, part, parts, K, ROWS, WIDTH, BLOCK
                )
        if GRADIENTS:
            if kind == KINDS - 1 and strip >= LAG:
                if SUMS:
                    while tl.atomic_add(done + strip - LAG, 0, sem="acquire") <= parts:
                        pass
                _gradient_item(
                    logits, targets, weights, lse, grad, grad_t, T, V, strip - LAG, part, inverse_scale,
                    K, BOTH, ROWS, WIDTH, BLOCK,
                )  # fmt: skip
        ticket = tl.atomic_add(drawn, 1)


def launch_loss(
    logits: Tensor, targets: Tensor, mtp_weights: Tensor, lse: Tensor | None = None,
    grad: Tensor | None = None, grad_t: Tensor | None = None, scale: float = 1.0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The loss (T,) a row and the log-sum-exp (T,); fills grad and grad_t. Where lse is given, only them."""
    (T, V), device = logits.shape, logits.device
    strips, parts = triton.cdiv(T, LOSS["ROWS"]), triton.cdiv(V, LOSS["WIDTH"])
    logits, targets, weights = logits.contiguous(), targets.contiguous(), mtp_weights.float().contiguous()
    sums = lse is None
    lse = torch.empty(T, device=device) if lse is None else lse
    row_loss = torch.empty_like(lse)
    partial = torch.empty(strips * parts * LOSS["ROWS"] if sums else 1, device=device)
    counters = torch.zeros(4 + strips, device=device, dtype=torch.int32)  # of items drawn, and from 16 bytes on, of items done
    grad = row_loss if grad is None else grad
    launch(
        loss_kernel, (min(2 * chip(device).processors, strips * parts),),
        logits, targets, weights, lse, row_loss, partial, counters, counters[4:], grad, grad if grad_t is None else grad_t,
        T, V, 1 / scale, K=weights.numel(), SUMS=sums, GRADIENTS=grad is not row_loss, BOTH=grad_t is not None, **LOSS,
    )  # fmt: skip
    return row_loss, lse


@operator("cross_entropy", lambda x, *_: tuple(x.new_empty(shape, dtype=torch.float32) for shape in ((), x.shape[:1])))
def cross_entropy_op(logits: Tensor, targets: Tensor, mtp_weights: Tensor) -> tuple[Tensor, Tensor]:
    """The summed loss and each row's log-sum-exp (T,), for evaluation and chips without FP8: 2 bytes a logit, 4 backward."""
    row_loss, lse = launch_loss(logits, targets, mtp_weights)
    return row_loss.sum(), lse


@operator("cross_entropy_backward", lambda logits, *_: torch.empty_like(logits, memory_format=torch.contiguous_format))
def cross_entropy_backward_op(logits: Tensor, targets: Tensor, mtp_weights: Tensor, lse: Tensor) -> Tensor:
    """The gradient in the logits, in their dtype."""
    grad = torch.empty_like(logits, memory_format=torch.contiguous_format)
    launch_loss(logits, targets, mtp_weights, lse, grad)
    return grad


def _keep_lse(ctx, inputs, output):
    ctx.save_for_backward(*inputs, output[1])
    ctx.set_materialize_grads(False)


def _cross_entropy_gradients(ctx, grad, _):
    """The loss is linear in the weights: the incoming gradient multiplies them, and costs no pass of its own."""
    logits, targets, mtp_weights, lse = ctx.saved_tensors
    return cross_entropy_backward_op(logits, targets, mtp_weights * grad, lse), None, None


cross_entropy_op.register_autograd(_cross_entropy_gradients, setup_context=_keep_lse)
softcapped_cross_entropy.kernel("cuda")(lambda logits, targets, mtp_weights: cross_entropy_op(logits, targets, mtp_weights)[0])


@loss_and_fp8_gradient.kernel("cuda")
def _loss_and_fp8_gradient_cuda(logits, targets, mtp_weights, scale, dtype):
    grad, grad_t = (torch.empty(shape, device=logits.device, dtype=dtype) for shape in (logits.shape, logits.shape[::-1]))
    return launch_loss(logits, targets, mtp_weights, None, grad, grad_t, scale)[0].sum(), grad, grad_t


@has_kernel
def fp8_head_loss(
    x: Tensor, w: Tensor, targets: Tensor, mtp_weights: Tensor, x_scale: float, w_scale: float, grad_scale: float
) -> Tensor:
    """The training loss of logits x @ w in FP8, summed over tokens: a scalar, fp32 or better, differentiable in x and w.
    x (T, in); w (in, vocab), the layout of its gradient; targets (T,) int64; mtp_weights (K,); scales as in fp8_linear."""
    return softcapped_cross_entropy(fp8_linear(x, w, x_scale, w_scale, grad_scale), targets, mtp_weights)


def _fake_head_loss(x, w, *_):
    T, inner, vocab = *x.shape, w.size(1)
    loss = x.new_empty((), dtype=torch.promote_types(x.dtype, torch.float32))
    shapes = ((T, vocab), E5M2), ((vocab, T), E5M2), ((inner, T), E4M3), ((inner, vocab), E4M3)
    return loss, *(x.new_empty(shape, dtype=dtype) for shape, dtype in shapes)


@operator("fp8_head_loss", _fake_head_loss)
def fp8_head_loss_op(
    x: Tensor, w: Tensor, targets: Tensor, mtp_weights: Tensor, x_scale: float, w_scale: float, grad_scale: float
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Product and loss as one node: the loss; its gradient in the logits in e5m2, (T, vocab) and (vocab, T); x transposed and
    w in e4m3. The last four are the operands of the backward products, each contiguous along the summed dimension.
    Faster: the logits are not kept, and their gradient is never in 16 bits. Must hold: FP8 rounding does not depend on the
    incoming gradient, a scalar, which enters the scales of the backward products alone."""
    x8, x8_t = quantize_fp8_both(x, x_scale, E4M3)
    w8, w8_t = quantize_fp8_both(w, w_scale, E4M3)
    logits = fp8_matmul(x8, w8_t.mT, x_scale * w_scale, x.dtype, True)
    loss, grad8, grad8_t = loss_and_fp8_gradient(logits, targets, mtp_weights, grad_scale, E5M2)
    return loss, grad8, grad8_t, x8_t, w8


@operator("fp8_head_loss_backward", lambda grad, grad8, grad8_t, x8_t, w8, dtype, *_: (
    grad.new_empty(x8_t.shape[::-1], dtype=dtype), grad.new_empty(w8.shape, dtype=dtype)
))  # fmt: skip
def fp8_head_loss_backward_op(
    grad: Tensor, grad8: Tensor, grad8_t: Tensor, x8_t: Tensor, w8: Tensor,
    dtype: torch.dtype, x_scale: float, w_scale: float, grad_scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """grad_x (T, in) and grad_w (in, vocab) in dtype."""
    grad_x = fp8_matmul(grad8, w8.mT, grad * (grad_scale * w_scale), dtype, False)
    grad_w = fp8_matmul(x8_t, grad8_t.mT, grad * (x_scale * grad_scale), dtype, False)
    return grad_x, grad_w


fp8_head_loss_op.register_autograd(
    lambda ctx, grad, *_: (*fp8_head_loss_backward_op(grad, *ctx.saved_tensors, ctx.dtype, *ctx.scales), *5 * [None]),
    setup_context=_keep_fp8,
)
fp8_head_loss.kernel("cuda")(lambda *inputs, **scales: fp8_head_loss_op(*inputs, **scales)[0])


# -----------------------------------------------------------------------------
# fp32 weights in 16 + 16 bits: a bf16 parameter, and its lower halves beside it


def join_mantissa(p: Tensor, mantissa: Tensor) -> Tensor:
    """The fp32 numbers whose upper halves are p (bf16) and whose lower halves are mantissa (uint16)."""
    return ((p.view(torch.int16).to(torch.int32) << 16) | mantissa.to(torch.int32)).view(torch.float32)


def split_mantissa(x: Tensor) -> tuple[Tensor, Tensor]:
    """fp32 x as (bf16 upper half, truncated, and uint16 lower half): join_mantissa gives back every bit."""
    bits = x.contiguous().view(torch.int32)
    return (bits >> 16).to(torch.int16).view(torch.bfloat16), (bits & 0xFFFF).to(torch.uint16)


# -----------------------------------------------------------------------------
# What the machine wants

CPU_CACHE_ELEMENTS = 262_144  # of one tensor, so that those of a whole update stay in a core's cache or near it


def fused_on_gpu(function: Callable) -> Callable:
    """Fused by torch.compile where the first argument is on a GPU; plain on a CPU, where that costs more than it saves."""
    compiled = functools.cache(lambda: torch.compile(function, dynamic=False, fullgraph=True))

    @functools.wraps(function)
    def dispatch(x: Tensor, *args: Any) -> Any:
        return compiled()(x, *args) if x.is_cuda else function(x, *args)

    return dispatch


def cache_sized(*tensors: Tensor | None) -> Iterator[tuple[Tensor | None, ...]]:
    """The same rows of all tensors, in order: slices along dim 0; None stays None. On a CPU as many rows at a time as its
    cache holds of the first tensor, at least one: an update in many passes stays in the cache. Elsewhere all at once."""
    first, rows = tensors[0], len(tensors[0])
    at_once = max(1, CPU_CACHE_ELEMENTS // max(1, first[:1].numel()) if first.device.type == "cpu" else rows)
    for start in range(0, rows, at_once):
        yield tuple(None if x is None else x[start : start + at_once] for x in tensors)

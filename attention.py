"""Attention: norm, rotation and offset of the heads of q and k, then softmax within documents and a window.

Chapters: q and k, one kernel each way on a GPU; attention, which is FlashAttention on a GPU and runs block by block on a CPU.
How a function finds its kernel, and what its docstring says: triton_kernels.py.
"""

import functools
import importlib.util
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

import triton_kernels
from triton_kernels import RMS_EPS, has_kernel, kernel_device, norm, operator, tl, triton

# -----------------------------------------------------------------------------
# Queries and keys: norm, rotation and offset are one kernel


def rotate(x: Tensor, table: Tensor) -> Tensor:
    """Rotary positions (arXiv 2104.09864): pairs of neighbouring dims, turned clockwise by an angle of the table.
    y[2j] = c·x[2j] + s·x[2j+1], y[2j+1] = c·x[2j+1] − s·x[2j]. x (..., D); table (..., D/2, 2), broadcast, holds c and −s.
    On a CPU a pair is a complex number, so that all is one product. Only the table is saved for the backward."""
    pairs = x.unflatten(-1, (-1, 2))
    if x.device.type == "cpu" and x.dtype in (torch.float32, torch.float64):
        return torch.view_as_real(torch.view_as_complex(pairs) * torch.view_as_complex(table)).flatten(-2)
    (even, odd), (c, minus_s) = pairs.unbind(-1), table.unbind(-1)
    return torch.stack((c * even - minus_s * odd, c * odd + minus_s * even), -1).flatten(-2)


def offset_keys(k: Tensor) -> Tensor:
    """k[t] ← k[t−1] for t ≥ 1 in the second half of the head's dims, which does not rotate; k (T, H, D)."""
    here, before = k.chunk(2, -1)
    return torch.cat((here, torch.cat((before[:1], before[:-1]))), -1)


@has_kernel
def norm_and_rotate_qk(qkv: Tensor, table: Tensor, paired: bool, key_offset: bool) -> tuple[Tensor, Tensor, Tensor]:
    """What attention reads of qkv: q and k, normed and rotated by head, k then offset if key_offset; v, a view. Differentiable.
    qkv (T, 3H, D): heads of q, k, v; D a multiple of 4. table (positions, D/2, 2) as in rotate; a head stands at position t,
    but if paired, even heads at 2t and odd ones at 2t + 1. Results (T, H, D)."""
    T, heads, D = qkv.shape
    H, p = heads // 3, 2 if paired else 1
    qk, v = qkv.split((2 * H, H), 1)
    turned = rotate(norm(qk).reshape(T, 2 * H // p, p, D), table[: p * T].view(T, 1, p, D // 2, 2))
    q, k = turned.view(T, 2 * H, D).split(H, 1)
    return q, offset_keys(k) if key_offset else k, v


# A program takes all heads of q, of k or of v of a few tokens, one after the other: so it reads their turns once, and the next
# head is a constant further. 16 lanes read a head of 128 dims, 16 bytes each.
QK = dict(TOKENS=4, num_warps=1)
_RMS_EPS = tl.constexpr(RMS_EPS)


@triton.jit
def _split_pairs(x):
    """(TOKENS, BLOCK) → even dims, odd dims: (TOKENS, BLOCK / 2) each."""
    return tl.split(tl.reshape(x, (x.shape[0], x.shape[1] // 2, 2)))


@triton.jit
def _turns(table, t, inside, D: tl.constexpr, PAIRED: tl.constexpr):
    """c and −s at the positions of even heads, c and −s at those of odd heads: (TOKENS, BLOCK / 2) each."""
    at = table + t * ((1 + PAIRED) * D) + tl.arange(0, inside.shape[1])[None, :]
    even = tl.load(at, mask=inside, other=1.0).to(tl.float32)
    odd = tl.load(at + D, mask=inside, other=1.0).to(tl.float32) if PAIRED else even
    return _split_pairs(even) + _split_pairs(odd)


@triton.jit
def norm_rotate_kernel(
    qkv, table, q, k, rstds,  # (T, 3H, D); (positions, D); (T, H, D); the same, or (T + 1, H, D) if OFFSET; (2H, T) fp32
    T, H: tl.constexpr, D: tl.constexpr, PAIRED: tl.constexpr, OFFSET: tl.constexpr,
    TOKENS: tl.constexpr, BLOCK: tl.constexpr,  # the next power of two from D on
):  # fmt: skip
    """q and k of norm_and_rotate_qk, and 1/rms of each head.
    Faster: one read and one write; torch.compile makes two or three of each, of 2 bytes at a time. Must hold: rounded once.
    Dims that are offset are stored a row further: so row T holds the last token's, for the norm's gradient alone."""
    part = tl.program_id(1)  # 0: q, 1: k
    t, dim = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)[:, None], tl.arange(0, BLOCK)[None, :]
    inside = (t < T) & (dim < D)
    turns = _turns(table, t, inside, D, PAIRED)
    x, y = qkv + t * (3 * H * D) + part * (H * D) + dim, (k if part == 1 else q) + t * (H * D) + dim
    offset = dim // (D // 2) * part if OFFSET else 0  # rows
    for h in tl.static_range(H):
        n = tl.load(x + h * D, mask=inside, other=0.0).to(tl.float32)
        rstd = tl.rsqrt(tl.sum(n * n, 1, keep_dims=True) * (1 / D) + _RMS_EPS)
        tl.store(rstds + (part * H + h).to(tl.int64) * T + t, rstd, mask=t < T)
        even, odd = _split_pairs(n * rstd)
        c, s = turns[h % 2 * 2], turns[h % 2 * 2 + 1]
        turned = tl.join(c * even - s * odd, c * odd + s * even).reshape(n.shape).to(q.dtype.element_ty)
        tl.store(y + offset * (H * D) + h * D, turned, mask=inside)
        if OFFSET:
            tl.store(y + h * D, turned, mask=inside & (t < offset))  # the first token keeps its own


@triton.jit
def norm_rotate_backward_kernel(
    dq, dk, dv, q, k, rstds, table, grad,  # (T, H, D) each; as norm_rotate_kernel has them; (T, 3H, D)
    T, H: tl.constexpr, D: tl.constexpr, PAIRED: tl.constexpr, OFFSET: tl.constexpr,
    TOKENS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The gradient of qkv: of a head y = r·R·x, r = 1/rms, R its rotation, it is r·(Rᵀ·dy − R⁻¹·y·mean(dy·y)); of v it is dv.
    Faster: one read and one write, and it needs y, which attention keeps anyway, not x. Must hold: rounded once; R⁻¹ is not
    Rᵀ but Rᵀ / (c² + s²), as the table is rounded."""
    part = tl.program_id(1)  # 0: q, 1: k, 2: v
    t, dim = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)[:, None], tl.arange(0, BLOCK)[None, :]
    inside = (t < T) & (dim < D)
    here, dx = t * (H * D) + dim, grad + t * (3 * H * D) + part * (H * D) + dim
    if part == 2:
        for h in tl.static_range(H):
            tl.store(dx + h * D, tl.load(dv + here + h * D, mask=inside), mask=inside)
    else:
        dy, y = (dk if part == 1 else dq) + here, (k if part == 1 else q) + here
        turns = _turns(table, t, inside, D, PAIRED)
        inverse = 1 / (turns[0] * turns[0] + turns[1] * turns[1]), 1 / (turns[2] * turns[2] + turns[3] * turns[3])
        offset = dim // (D // 2) * part if OFFSET else 0  # rows
        for h in tl.static_range(H):
            g = tl.load(dy + offset * (H * D) + h * D, mask=inside & (t + offset < T), other=0.0).to(tl.float32)
            if OFFSET:
                g += tl.load(dy + h * D, mask=inside & (t < offset), other=0.0).to(tl.float32)
            n = tl.load(y + offset * (H * D) + h * D, mask=inside, other=0.0).to(tl.float32)
            mean = tl.sum(g * n, 1, keep_dims=True) * (1 / D) * inverse[h % 2]
            rstd = tl.load(rstds + (part * H + h).to(tl.int64) * T + t, mask=t < T, other=0.0)
            even, odd = _split_pairs(n)  # one by one: Triton 3.7 cannot read nested tuples
            g_even, g_odd = _split_pairs(g)
            c, s = turns[h % 2 * 2], turns[h % 2 * 2 + 1]
            even, odd = (g_even - even * mean) * rstd, (g_odd - odd * mean) * rstd
            turned = tl.join(c * even + s * odd, c * odd - s * even).reshape(n.shape)
            tl.store(dx + h * D, turned.to(grad.dtype.element_ty), mask=inside)


def _empty_heads(qkv: Tensor, table: Tensor, paired: bool, key_offset: bool) -> tuple[Tensor, Tensor, Tensor]:
    (T, _, D), H = qkv.shape, qkv.size(1) // 3
    if len(table) < (1 + paired) * T:
        raise ValueError(f"the rotary table has {len(table)} positions; {T} tokens need {(1 + paired) * T}")
    return qkv.new_empty(T, H, D), qkv.new_empty(T + key_offset, H, D), qkv.new_empty(2 * H, T, dtype=torch.float32)


def _launch_on_heads(kernel: triton.JITFunction, parts: int, q: Tensor, paired: bool, offset: bool, *tensors: Tensor) -> None:
    T, H, D = q.shape
    constants = dict(H=H, D=D, PAIRED=paired, OFFSET=offset, BLOCK=triton.next_power_of_2(D), **QK)
    triton_kernels.launch(kernel, (triton.cdiv(T, QK["TOKENS"]), parts), *(x.contiguous() for x in tensors), T, **constants)


def launch_norm_rotate(qkv: Tensor, table: Tensor, paired: bool, key_offset: bool) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, 1/rms as norm_rotate_kernel stores them."""
    q, k, rstds = _empty_heads(qkv, table, paired, key_offset)
    _launch_on_heads(norm_rotate_kernel, 2, q, paired, key_offset, qkv, table, q, k, rstds)
    return q, k, rstds


def _empty_qkv(q: Tensor, *_: Any) -> Tensor:
    T, H, D = q.shape
    return q.new_empty(T, 3 * H, D)


def launch_norm_rotate_backward(
    dq: Tensor, dk: Tensor, dv: Tensor, q: Tensor, k: Tensor, rstds: Tensor, table: Tensor, paired: bool, key_offset: bool
) -> Tensor:
    grad = _empty_qkv(q)
    tensors = dq, dk, dv, q, k, rstds, table, grad
    _launch_on_heads(norm_rotate_backward_kernel, 3, q, paired, key_offset, *tensors)
    return grad


norm_rotate_op = operator("norm_rotate", _empty_heads)(launch_norm_rotate)
norm_rotate_backward_op = operator("norm_rotate_backward", _empty_qkv)(launch_norm_rotate_backward)


class _FusedNormRotation(torch.autograd.Function):
    @staticmethod
    def forward(ctx, qkv: Tensor, table: Tensor, paired: bool, key_offset: bool) -> tuple[Tensor, Tensor, Tensor]:
        q, k, rstds = norm_rotate_op(qkv, table, paired, key_offset)
        ctx.save_for_backward(q, k, rstds, table)
        ctx.kind = paired, key_offset
        return q, k[: len(q)], qkv[:, 2 * q.size(1) :]

    @staticmethod
    def backward(ctx, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return norm_rotate_backward_op(*grads, *ctx.saved_tensors, *ctx.kind), None, None, None


norm_and_rotate_qk.kernel("cuda")(_FusedNormRotation.apply)


# -----------------------------------------------------------------------------
# Attention within documents and a window


class Band(NamedTuple):
    """Which keys a query sees: its own position and the `window` before it, within its document."""

    cu_seqlens: Tensor  # (slots,) int32, document starts in positions, padded by the number of positions
    window: int  # positions
    max_len: int  # longest document, in positions
    bias: Tensor | None  # for the banded reference: (blocks, rows, keys), 0 where seen, −inf elsewhere; None: FlashAttention


def uses_flash(x: Tensor) -> bool:
    """Whether tensors like x go to FlashAttention: 16-bit ones on a GPU. Their bands need no bias."""
    return kernel_device(x) == "cuda" and x.dtype in (torch.bfloat16, torch.float16)


@functools.cache
def flash_attention() -> str:
    """Turn FlashAttention 3 (arXiv 2407.08608) on where its package is; what attention runs on, in words for the log."""
    if not torch.cuda.is_available():
        return "banded, in PyTorch"
    if importlib.util.find_spec("flash_attn_interface") is None:
        return "varlen_attn, FA2"
    try:
        torch.nn.attention.activate_flash_attention_impl("FA3")
    except Exception as error:  # a package of another PyTorch: slower, no failure
        return f"varlen_attn, FA2: {type(error).__name__}: {error}".partition("\n")[0]
    return "varlen_attn, FA3"


def attend(q: Tensor, k: Tensor, v: Tensor, band: Band, scale: float) -> Tensor:
    """softmax(scale · q kᵀ) v over the keys of the band, causal, differentiable; q, k, v and result (P, H, D), one dtype.
    A band with a bias goes the banded way, in fp32 or better; one without to FlashAttention."""
    if band.bias is not None:
        return _BandedAttention.apply(q, k, v, band.bias, scale).to(q.dtype)
    from torch.nn.attention.varlen import varlen_attn  # a second, which a CPU never needs: it brings the compiler along

    return varlen_attn(q, k, v, *2 * (band.cu_seqlens,), *2 * (band.max_len,), scale=scale, window_size=(band.window, 0))


def band_bias(cu_seqlens: Tensor, length: int, window: int, dtype: torch.dtype) -> Tensor:
    """(blocks, rows, keys) for blocks of `rows` queries, each with the keys of its own and the blocks its window reaches."""
    device = cu_seqlens.device
    rows = 32  # measured on two cores
    blocks, back = -(-length // rows), -(-min(window, length) // rows) * rows
    position = torch.arange(blocks * rows, device=device, dtype=torch.int32)
    start = cu_seqlens[torch.searchsorted(cu_seqlens, position, right=True) - 1]  # of the position's document
    reach = (position - start).clamp_(max=window).view(blocks, rows, 1)
    row, column = torch.arange(rows, device=device)[:, None], torch.arange(-back, rows, device=device)
    distance = (row - column).masked_fill_(column > row, 2**31 - 1).int()  # of the key before the query: (rows, keys)
    return torch.where(distance > reach, torch.tensor(-math.inf, device=device, dtype=dtype), 0.0)


def _by_head(x: Tensor, padded: int, front: int, back: int) -> Tensor:
    """(P, H, D) → (front + H·padded + back, D), fp32 or better: zero rows first, after each head and last."""
    P, H, D = x.shape
    out = x.new_zeros(front + H * padded + back, D, dtype=torch.float64 if x.dtype == torch.float64 else torch.float32)
    out[front : len(out) - back].view(H, padded, D)[:, :P].copy_(x.transpose(0, 1))
    return out


def _bands(x: Tensor, batch: int, rows: int, keys: int) -> Tensor:
    """(batch, keys, D): a view, each window one block of rows further."""
    return x.as_strided((batch, keys, x.size(1)), (rows * x.size(1), x.size(1), 1))


def _scores(like: Tensor, batch: int, rows: int, keys: int) -> Tensor:
    """Memory for what each of batch blocks of queries has for the keys of its band: see _by_query and _by_key."""
    block = rows * (keys + 1)
    memory = like.new_empty(batch * block + (keys // rows - 1) * block)
    memory[batch * block :].zero_()  # of the queries that the last keys would have after the end
    return memory


def _by_query(memory: Tensor, batch: int, rows: int, keys: int) -> Tensor:
    """(batch, rows, keys) of _scores: a row for each query. After each block is a gap of `rows` elements."""
    return memory.as_strided((batch, rows, keys), (rows * (keys + 1), keys, 1))


def _by_key(memory: Tensor, batch: int, rows: int, keys: int) -> Tensor:
    """(batch, rows, keys) of _scores: a row for each key, with the queries that may see it, of its own block and the next.
    From one query to the next it is keys elements, into the next block too: a row further, rows keys back, and over the gap."""
    return memory.as_strided((batch, rows, keys), (rows * (keys + 1), 1, keys), keys - rows)


CACHED_SCORES = 1 << 17  # half a MiB in fp32: a core has as much cache of its own


def _head_groups(batch: int, rows: int, keys: int, blocks: int) -> list[slice]:
    """Of the batch: as many heads at a time as have scores that stay in the cache, at least one."""
    step = max(1, CACHED_SCORES // (blocks * rows * keys)) * blocks
    return [slice(i, i + step) for i in range(0, batch, step)]


class _BandedAttention(torch.autograd.Function):
    """softmax(scale · q kᵀ + bias) v, block by block: the reference on any device, and the fast path on CPU.
    Faster: a block of queries multiplies the few keys of its window, not all: heads lie one after another in memory, so that
    the keys of all blocks are overlapping windows of one strided view; backward, so are the queries of all blocks of keys. Few
    heads at a time: their scores stay in the cache. Must hold: a head's first blocks reach into the head before it, so that the
    bias masks those keys like any foreign document's; their probabilities are zero, by query and by key."""

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float) -> Tensor:
        (P, H, D), (blocks, rows, keys) = q.shape, bias.shape
        sizes, padded, beyond = (H * blocks, rows, keys), blocks * rows, keys - rows
        q = _by_head(q, padded, 0, beyond).mul_(scale)
        k, v = (_bands(_by_head(x, padded, beyond, 0), *sizes) for x in (k, v))
        own, probs = _bands(q, H * blocks, rows, rows), _scores(q, *sizes)
        by_query, out = _by_query(probs, *sizes), torch.empty_like(own)
        for heads in _head_groups(*sizes, blocks):
            scores = torch.bmm(own[heads], k[heads].mT)
            scores.view(-1, *bias.shape).add_(bias)
            torch.bmm(by_query[heads].copy_(torch.softmax(scores, -1)), v[heads], out=out[heads])
        ctx.save_for_backward(q, k, v, probs, out)
        ctx.scale, ctx.sizes = scale, sizes
        return out.view(H, padded, D)[:, :P].transpose(0, 1)

    @staticmethod
    def backward(ctx, grad: Tensor):
        q, k, v, probs, out = ctx.saved_tensors
        (P, H, D), sizes = grad.shape, ctx.sizes
        batch, rows, keys = sizes
        blocks, padded = batch // H, batch // H * rows
        g = _by_head(grad, padded, 0, keys - rows)
        own, grad_scores, grads = _bands(g, batch, rows, rows), _scores(q, *sizes), [torch.empty_like(out) for _ in range(3)]
        mean = (own * out).sum(-1, keepdim=True)  # over the keys, of the probabilities' gradients, weighted by them
        q, g = _bands(q, *sizes), _bands(g, *sizes)  # of each block of keys; q carries the scale
        for heads in reversed(_head_groups(*sizes, blocks)):  # by key they read the next head's too
            grad_q, grad_k, grad_v = (x[heads] for x in grads)
            scores = torch.bmm(own[heads], v[heads].mT).sub_(mean[heads]).mul_(_by_query(probs, *sizes)[heads])
            torch.bmm(_by_query(grad_scores, *sizes)[heads].copy_(scores), k[heads], out=grad_q)
            torch.bmm(_by_key(grad_scores, *sizes)[heads], q[heads], out=grad_k)
            torch.bmm(_by_key(probs, *sizes)[heads], g[heads], out=grad_v)
        grads[0].mul_(ctx.scale)
        return *(x.view(H, padded, D)[:, :P].transpose(0, 1) for x in grads), None, None

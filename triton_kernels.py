"""Every function that wants a GPU kernel, each beside a plain-PyTorch reference of the same function.

`train_gpt.py` calls the public names below and nothing else of this file. Each chooses by the device of its tensors:
`kernel_for(name, tensor)` gives the GPU kernel where one is registered for that device, else the reference. A kernel is
added with `@kernel("XXT", "cuda")` on a function of the same signature; nothing else changes.

The references are exact statements of the mathematics and the fast path on CPU. They compute in the dtype they are given,
with two exceptions that mirror what matrix units do: a product of bf16 or FP8 operands is accumulated in fp32 and rounded
once, and the loss is computed in fp32 or better.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

# -----------------------------------------------------------------------------
# Choosing by device

_KERNELS: dict[tuple[str, str], Callable] = {}


def kernel(name: str, device_type: str) -> Callable[[Callable], Callable]:
    """Register the decorated function as the kernel of public function `name` on tensors of `device_type` ("cuda")."""

    def register(function: Callable) -> Callable:
        _KERNELS[name, device_type] = function
        return function

    return register


def kernel_for(name: str, tensor: Tensor) -> Callable:
    """The kernel registered as `name` for the device of `tensor`, or the reference."""
    return _KERNELS.get((name, tensor.device.type)) or _REFERENCES[name]


def _wide(x: Tensor) -> Tensor:
    """x in fp32 if it is narrower."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def _operand(x: Tensor) -> Tensor:
    """x as the operand of a product that is accumulated in fp32: matrix units do that themselves, CPUs are slow at bf16."""
    return x if x.is_cuda else _wide(x)


# -----------------------------------------------------------------------------
# Symmetric products: what Polar Express is made of


def XXT(X: Tensor, out: Tensor | None = None) -> Tensor:
    """X Xᵀ. X (..., rows, cols) bf16, fp32 or fp64; out and result (..., rows, rows), same dtype, one rounding."""
    return kernel_for("XXT", X)(X, out)


def XTX(X: Tensor, out: Tensor | None = None) -> Tensor:
    """Xᵀ X, for tall matrices, so that none is transposed in memory. X (..., rows, cols); result (..., cols, cols)."""
    return kernel_for("XTX", X)(X, out)


def ba_plus_cAA(A: Tensor, beta: float, alpha: float, out: Tensor | None = None) -> Tensor:
    """beta·A + alpha·A·Aᵀ, A (..., n, n) symmetric, so that A·Aᵀ = A². Result like A, one rounding."""
    return kernel_for("ba_plus_cAA", A)(A, beta, alpha, out)


def aX_plus_BX(X: Tensor, B: Tensor, a: float, right: bool = False) -> Tensor:
    """a·X + B·X, or a·X + X·B if right. X (n, rows, cols), B (n, k, k) with k rows or cols; result like X, one rounding."""
    return kernel_for("aX_plus_BX", X)(X, B, a, right)


def _store(result: Tensor, dtype: torch.dtype, out: Tensor | None) -> Tensor:
    return result.to(dtype) if out is None else out.copy_(result)


def _XXT_reference(X: Tensor, out: Tensor | None) -> Tensor:
    wide = _operand(X)
    return _store(wide @ wide.mT, X.dtype, out)


def _XTX_reference(X: Tensor, out: Tensor | None) -> Tensor:
    wide = _operand(X)
    return _store(wide.mT @ wide, X.dtype, out)


def _ba_plus_cAA_reference(A: Tensor, beta: float, alpha: float, out: Tensor | None) -> Tensor:
    wide = _operand(A)
    flat = wide.flatten(0, -3) if wide.ndim > 3 else wide.reshape(-1, *wide.shape[-2:])
    return _store(torch.baddbmm(flat, flat, flat, beta=beta, alpha=alpha).view_as(A), A.dtype, out)


def _aX_plus_BX_reference(X: Tensor, B: Tensor, a: float, right: bool) -> Tensor:
    wide, square = _operand(X), _operand(B)
    return (torch.baddbmm(wide, wide, square, beta=a) if right else torch.baddbmm(wide, square, wide, beta=a)).to(X.dtype)


# -----------------------------------------------------------------------------
# MLP with a squared ReLU


def relu_squared_mlp(x: Tensor, W_fc: Tensor, W_proj: Tensor) -> Tensor:
    """relu(x @ W_fc.T)² @ W_proj, differentiable in all three.

    x (tokens, dim), W_fc (hidden, dim), W_proj (hidden, dim), one dtype; result (tokens, dim).
    """
    return kernel_for("relu_squared_mlp", x)(x, W_fc, W_proj)


class _ReluSquaredMLP(torch.autograd.Function):
    """The backward rebuilds the activation r² from the one saved tensor r = relu(x W_fcᵀ)."""

    @staticmethod
    def forward(ctx, x: Tensor, W_fc: Tensor, W_proj: Tensor) -> Tensor:
        r = torch.relu_(x @ W_fc.mT)  # (tokens, hidden)
        ctx.save_for_backward(x, W_fc, W_proj, r)
        return (r * r) @ W_proj

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, W_fc, W_proj, r = ctx.saved_tensors
        grad_W_proj = (r * r).mT @ grad
        grad_h = (grad @ (2 * W_proj).mT).mul_(r)  # d relu(h)² = 2 relu(h)
        return grad_h @ W_fc, grad_h.mT @ x, grad_W_proj


# -----------------------------------------------------------------------------
# The head: FP8 products, softcap and loss


def quantize_fp8(x: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """x / scale rounded to FP8; what lies beyond the format saturates, NaN stays NaN.

    x any shape and float dtype; dtype torch.float8_e4m3fn or torch.float8_e5m2; result like x, in dtype.
    """
    return kernel_for("quantize_fp8", x)(x, scale, dtype)


def _quantize_fp8_reference(x: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    limit = torch.finfo(dtype).max
    return (_wide(x) * (1 / scale)).clamp_(-limit, limit).to(dtype)


def fp8_matmul(a: Tensor, b: Tensor, scale: float, out_dtype: torch.dtype, fast_accum: bool) -> Tensor:
    """scale · a @ b for FP8 operands, accumulated in fp32 (fp64 if out_dtype is fp64).

    a (m, k) FP8; b (k, n) FP8, in either memory order; result (m, n) in out_dtype. fast_accum lets the matrix units keep
    fewer bits of the running sum, which costs the forward nothing that can be measured and is not done in the backward.
    """
    return kernel_for("fp8_matmul", a)(a, b, scale, out_dtype, fast_accum)


def _fp8_matmul_reference(a: Tensor, b: Tensor, scale: float, out_dtype: torch.dtype, fast_accum: bool) -> Tensor:
    # Products of two FP8 numbers are exact in fp32, so that widening first changes nothing but the speed.
    wide = torch.promote_types(out_dtype, torch.float32)
    return (a.to(wide) @ b.to(wide)).mul_(scale).to(out_dtype)


@kernel("fp8_matmul", "cuda")
def _fp8_matmul_cuda(a: Tensor, b: Tensor, scale: float, out_dtype: torch.dtype, fast_accum: bool) -> Tensor:
    """cuBLASLt wants a by rows and b by columns: both contiguous along k."""
    if b.stride(0) != 1:
        b = b.mT.contiguous().mT
    one = torch.ones((), device=a.device, dtype=torch.float32)
    return torch._scaled_mm(a.contiguous(), b, scale_a=one * scale, scale_b=one, out_dtype=out_dtype, use_fast_accum=fast_accum)


SOFTCAP, SOFTCAP_SHIFT, SOFTCAP_SCALE = 23.0, 5.0, 7.5


def softcap(logits: Tensor) -> Tensor:
    """z = 23 · sigmoid((logits + 5) / 7.5), in fp32 or better; any shape."""
    return torch.sigmoid((_wide(logits) + SOFTCAP_SHIFT) * (1 / SOFTCAP_SCALE)).mul_(SOFTCAP)


def softcapped_cross_entropy(logits: Tensor, targets: Tensor, mtp_weights: Tensor) -> Tensor:
    """Multi-token cross-entropy of softcapped logits, summed: Σ_t Σ_k w_k · CE(z[t], targets[t + k]).

    z = 23 · sigmoid((logits + 5) / 7.5); terms with t + k ≥ T are dropped. Differentiable in logits.
    logits (T, vocab), any float dtype; targets (T,) int64; mtp_weights (K,) float; result a scalar, fp32 or better.
    """
    return kernel_for("softcapped_cross_entropy", logits)(logits, targets, mtp_weights)


def _mtp_term_weights(T: int, mtp_weights: Tensor) -> Tensor:
    """(T, K): w_k where the target t + k exists, else 0."""
    offsets = torch.arange(mtp_weights.numel(), device=mtp_weights.device)
    positions = torch.arange(T, device=mtp_weights.device)
    return mtp_weights * (positions[:, None] + offsets < T)


def _mtp_targets(targets: Tensor, K: int) -> Tensor:
    """(T, K): targets[t + k], with the last target where t + k is beyond the end (its weight is 0)."""
    index = torch.arange(targets.numel(), device=targets.device)[:, None] + torch.arange(K, device=targets.device)
    return targets[index.clamp_(max=targets.numel() - 1)]


class _SoftcappedCrossEntropy(torch.autograd.Function):
    """A row's loss is Σ_k w_k · (lse(z) − z[target_k]); its gradient in z is (Σ_k w_k) · softmax(z) − Σ_k w_k · onehot."""

    @staticmethod
    def forward(ctx, logits: Tensor, targets: Tensor, mtp_weights: Tensor) -> Tensor:
        z = softcap(logits)  # (T, vocab)
        lse = z.logsumexp(-1)  # (T,)
        index = _mtp_targets(targets, mtp_weights.numel())  # (T, K)
        weights = _mtp_term_weights(len(targets), mtp_weights).to(z.dtype)  # (T, K)
        ctx.save_for_backward(z, lse, index, weights)
        ctx.dtype = logits.dtype
        return ((lse[:, None] - z.gather(1, index)) * weights).sum()

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:
        z, lse, index, weights = ctx.saved_tensors
        grad_z = (z - lse[:, None]).exp_().mul_(weights.sum(1, keepdim=True)).scatter_add_(1, index, -weights)
        slope = z * (1 - z * (1 / SOFTCAP))  # SOFTCAP_SCALE · dz/dlogits: z = 23σ and dσ = σ(1 − σ)
        return grad_z.mul_(slope).mul_(grad / SOFTCAP_SCALE).to(ctx.dtype), None, None


# -----------------------------------------------------------------------------
# Attention within documents and a window


class Band(NamedTuple):
    """Which keys a query sees: those of its document, at most `window` positions back, itself included."""

    cu_seqlens: Tensor  # (slots,) int32, document starts in positions, padded by the number of positions
    window: int  # positions
    max_len: int  # longest document, in positions
    bias: Tensor | None  # for the banded reference: (blocks, rows, keys), 0 where seen, −inf elsewhere


def uses_flash(x: Tensor) -> bool:
    """FlashAttention takes 16-bit tensors on a GPU; everything else goes the banded way."""
    return x.is_cuda and x.dtype in (torch.bfloat16, torch.float16)


def attend(q: Tensor, k: Tensor, v: Tensor, band: Band, scale: float) -> Tensor:
    """Causal attention within documents and window, differentiable; q, k, v and result (P, H, D), one dtype."""
    if band.bias is not None:
        return banded_attention(q, k, v, band.bias, scale)
    cu_seqlens, max_len = band.cu_seqlens, band.max_len
    return varlen_attn(q, k, v, cu_seqlens, cu_seqlens, max_len, max_len, scale=scale, window_size=(band.window, 0))


def band_bias(cu_seqlens: Tensor, length: int, window: int, dtype: torch.dtype) -> Tensor:
    """(blocks, rows, keys) for blocks of `rows` queries, each with the keys of its own and the blocks that its window reaches."""
    device = cu_seqlens.device
    rows = 32 if window <= 128 else 64
    blocks, back = -(-length // rows), -(-min(window, length) // rows)
    position = torch.arange(blocks * rows, device=device)
    start = cu_seqlens[torch.searchsorted(cu_seqlens, position.int(), right=True) - 1]  # of the position's document
    first_seen = torch.maximum(position - window, start).view(blocks, rows, 1)
    key = position.view(blocks, rows)[:, :1] + torch.arange(-back * rows, rows, device=device)  # (blocks, keys)
    key = key.unsqueeze(1)
    unseen = (key < first_seen) | (key > position.view(blocks, rows, 1))
    return torch.zeros(unseen.shape, device=device, dtype=dtype).masked_fill_(unseen, -math.inf)


class _BandedAttention(torch.autograd.Function):
    """softmax(scale · q kᵀ + bias) v, block by block: the reference on any device, and the fast path on CPU.

    Heads lie one after another in memory, so that every block's keys are one overlapping window of one strided view.
    What a head's first blocks see of the head before it is masked like any other foreign document.
    """

    @staticmethod
    def by_head(x: Tensor, padded: int, front: int) -> Tensor:
        """(P, H, D) → (front + H·padded, D), fp32 or better, `front` zero rows first."""
        P, H, D = x.shape
        out = torch.empty(front + H * padded, D, device=x.device, dtype=torch.promote_types(x.dtype, torch.float32))
        out[:front].zero_()
        heads = out[front:].view(H, padded, D)
        heads[:, P:].zero_()
        heads[:, :P].copy_(x.transpose(0, 1))
        return out

    @staticmethod
    def bands(x: Tensor, batch: int, rows: int, keys: int) -> Tensor:
        """(batch, keys, D): a view, each window one block of rows further."""
        return x.as_strided((batch, keys, x.size(1)), (rows * x.size(1), x.size(1), 1))

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float) -> Tensor:
        P, H, D = q.shape
        blocks, rows, keys = bias.shape
        batch, padded = H * blocks, blocks * rows
        by_head, bands = _BandedAttention.by_head, _BandedAttention.bands
        q = by_head(q, padded, 0).mul_(scale).view(batch, rows, D)
        k, v = by_head(k, padded, keys - rows), by_head(v, padded, keys - rows)
        scores = torch.bmm(q, bands(k, batch, rows, keys).mT)
        scores.view(H, blocks, rows, keys).add_(bias)
        probs = torch.softmax(scores, -1)
        ctx.save_for_backward(q, k, v, probs)
        ctx.scale, ctx.shape = scale, (P, H, D)
        out = torch.bmm(probs, bands(v, batch, rows, keys))
        return out.view(H, padded, D)[:, :P].transpose(0, 1)

    @staticmethod
    def backward(ctx, grad: Tensor):
        q, k, v, probs = ctx.saved_tensors
        P, H, D = ctx.shape
        batch, rows, keys = probs.shape
        padded, back = batch // H * rows, keys // rows - 1
        by_head, bands = _BandedAttention.by_head, _BandedAttention.bands
        g = by_head(grad, padded, 0).view(batch, rows, D)

        def sum_bands(x: Tensor) -> Tensor:
            """(batch, keys, D) → (P, H, D): each key's sum over the blocks that saw it."""
            out = torch.zeros(back * rows + H * padded, D, device=x.device, dtype=x.dtype)
            for i in range(back + 1):
                out[i * rows : i * rows + H * padded].view(batch, rows, D).add_(x[:, i * rows : (i + 1) * rows])
            return out[back * rows :].view(H, padded, D)[:, :P].transpose(0, 1)

        grad_v = sum_bands(torch.bmm(probs.mT, g))
        grad_probs = torch.bmm(g, bands(v, batch, rows, keys).mT)
        grad_scores = torch._softmax_backward_data(grad_probs, probs, -1, probs.dtype)
        grad_q = torch.bmm(grad_scores, bands(k, batch, rows, keys)).mul_(ctx.scale)
        grad_k = sum_bands(torch.bmm(grad_scores.mT, q))  # q carries the scale
        return grad_q.view(H, padded, D)[:, :P].transpose(0, 1), grad_k, grad_v, None, None


def banded_attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float) -> Tensor:
    """q, k, v (P, H, D); bias of band_bias; result (P, H, D) in q's dtype, computed in fp32 or better."""
    return _BandedAttention.apply(q, k, v, bias, scale).to(q.dtype)


# -----------------------------------------------------------------------------
# The tied embedding's transposes


def transpose_add(source: Tensor, target: Tensor) -> None:
    """target += sourceᵀ in place: embed.grad (vocab, dim) into lm_head.grad (dim, vocab)."""
    kernel_for("transpose_add", source)(source, target)


def transpose_copy(source: Tensor, target: Tensor) -> None:
    """target = sourceᵀ in place: lm_head (dim, vocab) into embed (vocab, dim)."""
    kernel_for("transpose_copy", source)(source, target)


def _transpose_add_reference(source: Tensor, target: Tensor) -> None:
    target.add_(source.mT)


def _transpose_copy_reference(source: Tensor, target: Tensor) -> None:
    target.copy_(source.mT)


_REFERENCES: dict[str, Callable] = {
    "XXT": _XXT_reference,
    "XTX": _XTX_reference,
    "ba_plus_cAA": _ba_plus_cAA_reference,
    "aX_plus_BX": _aX_plus_BX_reference,
    "relu_squared_mlp": _ReluSquaredMLP.apply,
    "quantize_fp8": _quantize_fp8_reference,
    "fp8_matmul": _fp8_matmul_reference,
    "softcapped_cross_entropy": _SoftcappedCrossEntropy.apply,
    "transpose_add": _transpose_add_reference,
    "transpose_copy": _transpose_copy_reference,
}

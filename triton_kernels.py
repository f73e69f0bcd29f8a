"""Every function that wants a GPU kernel, each beside a plain-PyTorch reference of the same function.

`train_gpt.py` calls the public names below and nothing else of this file. Each chooses by the device of its tensors:
`kernel_for(name, tensor)` gives the GPU kernel where one is registered for that device, else the reference. A kernel is
added with `@kernel("XXT", "cuda")` on a function of the same signature; nothing else changes. Below each reference stand, in
this order: the launch configuration, the kernel, its launcher, and the custom operators that torch.compile sees as one node.

No configuration is searched for at run time. A kernel stores in the dtype of its pointers and computes in fp32, so the tests
run the same code in fp32 and fp16 on a CPU (tests/test_kernels.py) that GPUs run in bf16 and FP8. What each kernel must move,
and what it was compiled to, is in bench/README.md.

The references are exact statements of the mathematics and the fast path on CPU. They compute in the dtype they are given,
with two exceptions that mirror what matrix units do: a product of bf16 or FP8 operands is accumulated in fp32 and rounded
once, and the loss is computed in fp32 or better.
"""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor, library
from torch.nn.attention.varlen import varlen_attn
from triton.tools.tensor_descriptor import TensorDescriptor

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
    """The kernel registered as `name` for the device of `tensor`, or the reference: always that for fp32 and fp64.

    The kernels' tiles are sized for 16 bits; wider numbers are for tests and small machines, which PyTorch serves well.
    """
    registered = _KERNELS.get((name, tensor.device.type)) if tensor.dtype.itemsize <= 2 else None
    return registered or _REFERENCES[name]


class Chip(NamedTuple):
    """What a launch depends on."""

    processors: int  # streaming multiprocessors
    shared_memory: int  # bytes that one block may have


@functools.cache
def chip(device: torch.device) -> Chip:
    """The chip of a CUDA device; an H100 for tensors that are on none, which tests compile and interpret kernels with."""
    if device.type != "cuda":
        return Chip(132, 232448)
    found = torch.cuda.get_device_properties(device)
    return Chip(found.multi_processor_count, found.shared_memory_per_block_optin)


OPTIONS = dict(enable_fp_fusion=True)  # of every launch: a multiplication and an addition may be one instruction


def launch(kernel: triton.JITFunction, grid: tuple[int, ...], *args, **constants) -> None:
    """The one place where a kernel starts, so that tests and benchmarks see what is launched."""
    kernel[grid](*args, **constants, **OPTIONS)


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


# One configuration for every chip and shape: 96 KB of shared memory, so two blocks on an H100 and one on an RTX 4090.
# Smaller tiles would fill more of the chip with the few matrices of a rank of 8, but read so much more from L2 that they lose.
_PRODUCT = dict(BLOCK=128, BLOCK_K=64, num_warps=8, num_stages=3)


@triton.jit
def _load_tile(matrix, row, col, rows, cols, ROWS: tl.constexpr, COLS: tl.constexpr):
    """(ROWS, COLS) at (row, col) of a contiguous (rows, cols) matrix, zero outside: neighbouring threads read one row."""
    r, c = row + tl.arange(0, ROWS)[:, None], col + tl.arange(0, COLS)[None, :]
    return tl.load(matrix + r.to(tl.int64) * cols + c, mask=(r < rows) & (c < cols), other=0.0)


@triton.jit
def _store_tile(matrix, tile, row, col, rows, cols):
    r, c = row + tl.arange(0, tile.shape[0])[:, None], col + tl.arange(0, tile.shape[1])[None, :]
    tl.store(matrix + r.to(tl.int64) * cols + c, tile.to(matrix.dtype.element_ty), mask=(r < rows) & (c < cols))


@triton.jit
def _product_kernel(
    L, R, C, out,  # left factor, right factor, addend, result: contiguous stacks of matrices
    M, N, K,  # out and C are (batch, M, N)
    alpha, beta,
    L_TRANSPOSED: tl.constexpr,  # L lies in memory as (K, M), else (M, K)
    R_TRANSPOSED: tl.constexpr,  # R lies in memory as (N, K), else (K, N)
    SYMMETRIC: tl.constexpr,  # out is symmetric: compute the tiles on and below the diagonal, store each twice
    ADDEND: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """out = alpha · L R + beta · C, one program a tile. A transposed factor is loaded along its rows and turned on the chip."""
    tile, matrix = tl.program_id(0), tl.program_id(1).to(tl.int64)
    if SYMMETRIC:
        i = 0
        while (i + 1) * (i + 2) // 2 <= tile:  # row i of the triangle begins at tile i(i + 1)/2
            i += 1
        j = tile - i * (i + 1) // 2
    else:
        i, j = tile // tl.cdiv(N, BLOCK), tile % tl.cdiv(N, BLOCK)
    row, col = i * BLOCK, j * BLOCK
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


def _product(
    L: Tensor, R: Tensor, C: Tensor | None, out: Tensor, alpha: float, beta: float,
    L_transposed: bool = False, R_transposed: bool = False, symmetric: bool = False,
) -> Tensor:  # fmt: skip
    """alpha · op(L) op(R) + beta · C into out, all (..., rows, cols); out may be none of the others."""
    M, N = out.shape[-2:]
    K = L.size(-2 if L_transposed else -1)
    rows, cols = triton.cdiv(M, _PRODUCT["BLOCK"]), triton.cdiv(N, _PRODUCT["BLOCK"])
    L, R, C = L.contiguous(), R.contiguous(), L if C is None else C.contiguous()
    target = out if out.is_contiguous() else torch.empty_like(out, memory_format=torch.contiguous_format)
    launch(
        _product_kernel, (rows * (rows + 1) // 2 if symmetric else rows * cols, out[..., 0, 0].numel()),
        L, R, C, target, M, N, K, alpha, beta,
        L_TRANSPOSED=L_transposed, R_TRANSPOSED=R_transposed, SYMMETRIC=symmetric, ADDEND=beta != 0, **_PRODUCT,
    )  # fmt: skip
    return out if target is out else out.copy_(target)


@library.custom_op("bankrun::gram", mutates_args=())
def gram_op(X: Tensor, tall: bool) -> Tensor:
    """Xᵀ X if tall, else X Xᵀ: one opaque node of a compiled graph."""
    n = X.size(-1 if tall else -2)
    return _product(X, X, None, X.new_empty(*X.shape[:-2], n, n), 1.0, 0.0, tall, not tall, symmetric=True)


@gram_op.register_fake
def _(X, tall):
    n = X.size(-1 if tall else -2)
    return X.new_empty(*X.shape[:-2], n, n)


@library.custom_op("bankrun::multiply_add", mutates_args=())
def multiply_add_op(L: Tensor, R: Tensor, C: Tensor, alpha: float, beta: float, symmetric: bool) -> Tensor:
    """alpha · L R + beta · C; symmetric says that L = R, and they and C are symmetric."""
    return _product(L, R, C, C.new_empty(C.shape), alpha, beta, R_transposed=symmetric, symmetric=symmetric)


@multiply_add_op.register_fake
def _(L, R, C, alpha, beta, symmetric):
    return C.new_empty(C.shape)


@kernel("XXT", "cuda")
def _XXT_cuda(X: Tensor, out: Tensor | None) -> Tensor:
    return gram_op(X, False) if out is None else _product(X, X, None, out, 1.0, 0.0, R_transposed=True, symmetric=True)


@kernel("XTX", "cuda")
def _XTX_cuda(X: Tensor, out: Tensor | None) -> Tensor:
    return gram_op(X, True) if out is None else _product(X, X, None, out, 1.0, 0.0, L_transposed=True, symmetric=True)


@kernel("ba_plus_cAA", "cuda")
def _ba_plus_cAA_cuda(A: Tensor, beta: float, alpha: float, out: Tensor | None) -> Tensor:
    if out is None:
        return multiply_add_op(A, A, A, alpha, beta, True)
    return _product(A, A, A, out, alpha, beta, R_transposed=True, symmetric=True)


@kernel("aX_plus_BX", "cuda")
def _aX_plus_BX_cuda(X: Tensor, B: Tensor, a: float, right: bool) -> Tensor:
    """Not baddbmm: that copies X into its result before it multiplies."""
    return multiply_add_op(X, B, X, 1.0, a, False) if right else multiply_add_op(B, X, X, 1.0, a, False)


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


# Chips with 227 KB of shared memory a block (H100, H200, B200) also have the tensor memory accelerator, TMA, that copies whole
# tiles by descriptor; the others (A100: 163 KB, RTX 4090: 99 KB) load by pointers.
_LARGE = dict(TMA=True, BLOCK_M=128, BLOCK_N=256, BLOCK_K=64, num_warps=8, num_stages=4)
_SMALL = dict(TMA=False, BLOCK_M=128, BLOCK_N=128, BLOCK_K=32, num_warps=8, num_stages=4)


@triton.jit
def _read(matrix, row, col, rows, cols, ROWS: tl.constexpr, COLS: tl.constexpr, TMA: tl.constexpr):
    if TMA:
        tile = matrix.load([row, col])
    else:
        tile = _load_tile(matrix, row, col, rows, cols, ROWS, COLS)
    return tile


@triton.jit
def _relu_squared_kernel(
    x, w, activation, out,  # (M, K), (N, K), (M, N), (M, N): tensor descriptors if TMA, else pointers
    M, N, K,
    BACKWARD: tl.constexpr, TMA: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """out = relu(x wᵀ)² forward; out = x wᵀ · 2√activation backward. Each program takes every num_programs-th tile.

    Programs that run side by side share rows of x, and all of w stays in L2.
    """
    HALF: tl.constexpr = BLOCK_N // 2
    across = tl.cdiv(N, BLOCK_N)
    for tile in tl.range(tl.program_id(0), tl.cdiv(M, BLOCK_M) * across, tl.num_programs(0)):
        row, col = tile // across * BLOCK_M, tile % across * BLOCK_N
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for k in range(0, K, BLOCK_K):
            rows = _read(x, row, k, M, K, BLOCK_M, BLOCK_K, TMA)
            acc = tl.dot(rows, _read(w, col, k, N, K, BLOCK_N, BLOCK_K, TMA).T, acc, input_precision="ieee")
        halves = tl.split(tl.permute(tl.reshape(acc, (BLOCK_M, 2, HALF)), (0, 2, 1)))
        for half in tl.static_range(2):  # one after the other, so that registers and shared memory hold half a tile at a time
            result, at = halves[half], col + half * HALF
            if BACKWARD:
                result *= 2 * tl.sqrt(_read(activation, row, at, M, N, BLOCK_M, HALF, TMA).to(tl.float32))
            else:
                result = tl.where(result < 0, 0.0, result)  # NaN stays
                result *= result
            if TMA:
                out.store([row, at], result.to(out.dtype))
            else:
                _store_tile(out, result, row, at, M, N)


def _relu_squared(x: Tensor, w: Tensor, activation: Tensor | None) -> Tensor:
    """(M, N): relu(x wᵀ)², or x wᵀ · 2√activation where an activation is given. x (M, K), w (N, K), one dtype."""
    (M, K), N = x.shape, w.size(0)
    out = x.new_empty(M, N)
    of_chip = chip(x.device)
    config = _LARGE if of_chip.shared_memory >= 232448 else _SMALL
    m, n, k = config["BLOCK_M"], config["BLOCK_N"], config["BLOCK_K"]

    def tiles(matrix: Tensor, rows: int, cols: int) -> TensorDescriptor | Tensor:
        return TensorDescriptor.from_tensor(matrix.contiguous(), [rows, cols]) if config["TMA"] else matrix.contiguous()

    result = tiles(out, m, n // 2)
    launch(
        _relu_squared_kernel, (min(of_chip.processors, triton.cdiv(M, m) * triton.cdiv(N, n)),),
        tiles(x, m, k), tiles(w, n, k), result if activation is None else tiles(activation, m, n // 2), result,
        M, N, K, BACKWARD=activation is not None, **config,
    )  # fmt: skip
    return out


@library.custom_op("bankrun::relu_squared", mutates_args=())
def relu_squared_op(x: Tensor, w: Tensor) -> Tensor:
    """relu(x wᵀ)²"""
    return _relu_squared(x, w, None)


@library.custom_op("bankrun::relu_squared_backward", mutates_args=())
def relu_squared_backward_op(grad: Tensor, W_proj: Tensor, activation: Tensor) -> Tensor:
    """The gradient of x W_fcᵀ: grad W_projᵀ · 2√activation"""
    return _relu_squared(grad, W_proj, activation)


@relu_squared_op.register_fake
@relu_squared_backward_op.register_fake
def _(x, w, activation=None):
    return x.new_empty(x.size(0), w.size(0))


class _FusedReluSquaredMLP(torch.autograd.Function):
    """Saves the activation a = relu(x W_fcᵀ)² alone, and rebuilds the slope 2 relu(x W_fcᵀ) = 2√a from it.

    An element of the hidden layer so moves 14 bytes: write a, read a; backward read a, write grad_h, and a once and grad_h
    twice as operands. Saving relu(x W_fcᵀ) too would move 16; saving it instead of a, 14 as well, but two products would have
    to square an operand on its way to the matrix units. A root halves relative errors, so √a is as exact as what it replaces.
    """

    @staticmethod
    def forward(ctx, x: Tensor, W_fc: Tensor, W_proj: Tensor) -> Tensor:
        activation = relu_squared_op(x, W_fc)  # (tokens, hidden)
        ctx.save_for_backward(x, W_fc, W_proj, activation)
        return activation @ W_proj

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, W_fc, W_proj, activation = ctx.saved_tensors
        grad_h = relu_squared_backward_op(grad, W_proj, activation)
        return grad_h @ W_fc, grad_h.mT @ x, activation.mT @ grad


kernel("relu_squared_mlp", "cuda")(_FusedReluSquaredMLP.apply)


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


def quantize_fp8_both(x: Tensor, scale: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """quantize_fp8(x) and its transpose, both contiguous: FP8 products want their operands contiguous along the summed
    dimension, and x (rows, cols) is summed over its columns in one product and over its rows in another."""
    return kernel_for("quantize_fp8_both", x)(x, scale, dtype)


def _quantize_fp8_both_reference(x: Tensor, scale: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    q = quantize_fp8(x, scale, dtype)
    return q, q.mT.contiguous()


_QUANTIZE = dict(BLOCK=128, num_warps=8)  # tiles whose rows and columns are whole lines of 128 bytes in FP8


@triton.jit
def _quantize_kernel(x, q, q_t, rows, cols, inverse_scale, limit, BOTH: tl.constexpr, BLOCK: tl.constexpr):
    """q (rows, cols) and, if BOTH, q_t (cols, rows): x · inverse_scale within ±limit, NaN kept. One program a tile."""
    across = tl.cdiv(cols, BLOCK)
    row, col = tl.program_id(0) // across * BLOCK, tl.program_id(0) % across * BLOCK
    tile = _load_tile(x, row, col, rows, cols, BLOCK, BLOCK).to(tl.float32) * inverse_scale
    tile = tl.where(tile > limit, limit, tl.where(tile < -limit, -limit, tile)).to(q.dtype.element_ty)
    _store_tile(q, tile, row, col, rows, cols)
    if BOTH:
        _store_tile(q_t, tile.T, col, row, cols, rows)


def _quantize(x: Tensor, scale: float, limit: float, q: Tensor, q_t: Tensor | None) -> None:
    cols = x.size(-1)
    rows = x.numel() // cols
    launch(
        _quantize_kernel, (triton.cdiv(rows, _QUANTIZE["BLOCK"]) * triton.cdiv(cols, _QUANTIZE["BLOCK"]),),
        x.contiguous(), q, q if q_t is None else q_t, rows, cols, 1 / scale, limit, BOTH=q_t is not None, **_QUANTIZE,
    )  # fmt: skip


@kernel("quantize_fp8", "cuda")
def _quantize_fp8_cuda(x: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    q = torch.empty(x.shape, device=x.device, dtype=dtype)
    _quantize(x, scale, torch.finfo(dtype).max, q, None)
    return q


@kernel("quantize_fp8_both", "cuda")
def _quantize_fp8_both_cuda(x: Tensor, scale: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    q, q_t = (torch.empty(shape, device=x.device, dtype=dtype) for shape in (x.shape, x.shape[::-1]))
    _quantize(x, scale, torch.finfo(dtype).max, q, q_t)
    return q, q_t


def fp8_matmul(a: Tensor, b: Tensor, scale: float | Tensor, out_dtype: torch.dtype, fast_accum: bool) -> Tensor:
    """scale · a @ b for FP8 operands, accumulated in fp32 (fp64 if out_dtype is fp64).

    a (m, k) FP8; b (k, n) FP8, in either memory order; result (m, n) in out_dtype. fast_accum lets the matrix units keep
    fewer bits of the running sum, which costs the forward nothing that can be measured and is not done in the backward.
    scale: a number, or a 0-dim tensor on a's device, which nobody has to wait for.
    """
    return kernel_for("fp8_matmul", a)(a, b, scale, out_dtype, fast_accum)


def _fp8_matmul_reference(a: Tensor, b: Tensor, scale: float | Tensor, out_dtype: torch.dtype, fast_accum: bool) -> Tensor:
    # Products of two FP8 numbers are exact in fp32, so that widening first changes nothing but the speed.
    wide = torch.promote_types(out_dtype, torch.float32)
    return (a.to(wide) @ b.to(wide)).mul_(scale).to(out_dtype)


@kernel("fp8_matmul", "cuda")
def _fp8_matmul_cuda(a: Tensor, b: Tensor, scale: float | Tensor, out_dtype: torch.dtype, fast_accum: bool) -> Tensor:
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


def loss_and_fp8_gradient(
    logits: Tensor, targets: Tensor, mtp_weights: Tensor, scale: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """softcapped_cross_entropy with its gradient already as the backward products want it.

    Returns the loss; its gradient in the logits, divided by scale, in FP8 (T, vocab); and the same transposed (vocab, T).
    The gradient is that of the loss itself: whatever number comes in from behind multiplies the scales of the products.
    """
    return kernel_for("loss_and_fp8_gradient", logits)(logits, targets, mtp_weights, scale, dtype)


def _loss_and_fp8_gradient_reference(logits, targets, mtp_weights, scale, dtype):
    with torch.enable_grad():
        logits = _wide(logits.detach()).requires_grad_()
        loss = _SoftcappedCrossEntropy.apply(logits, targets, mtp_weights)
        (grad,) = torch.autograd.grad(loss, logits)
    return loss.detach(), *_quantize_fp8_both_reference(grad, scale, dtype)


# The loss on a GPU. A row of 50304 logits must be summed before its first gradient is known; what lies between is the trick.
# Work comes in items of ROWS rows times WIDTH columns, of two kinds: "sum" adds up exp z over an item, "gradient" reads the
# item again and writes its gradient in both layouts. Programs draw items from one counter, a strip of ROWS rows after the
# other, the sums of a strip AHEAD strips before its gradients. So a gradient finds its sums long done, and its logits, 6.4 MB
# a strip, still in L2: of the 11 bytes a logit that separate kernels move, memory sees one read of 2 bytes and two writes
# of 1. Sums are drawn before the gradients that wait for them, so some running program always can go on: no deadlock, however
# many programs the chip holds. 64 rows make 64 contiguous bytes, two sectors, in the transposed layout; more would leave L2.
_LOSS = dict(ROWS=64, WIDTH=1024, BLOCK=64, AHEAD=3, num_warps=8)
_CAP, _CAP_SCALE = tl.constexpr(SOFTCAP), tl.constexpr(SOFTCAP_SCALE)
_LOG2E = tl.constexpr(math.log2(math.e))
_TURN = tl.constexpr(-math.log2(math.e) / SOFTCAP_SCALE)  # logit to exponent, of 2
_TURN_SHIFT = tl.constexpr(-math.log2(math.e) * SOFTCAP_SHIFT / SOFTCAP_SCALE)
_ON_GPU = tl.constexpr(not triton.knobs.runtime.interpret)  # the interpreter has no PTX


# Five special functions a logit are what limits this kernel (16 a clock and processor, next to 128 multiply-adds), and then
# the number of instructions. So σ takes one exponential and one reciprocal; of the two exponentials of z, that of the sums is
# a polynomial; and each special function is one PTX instruction that flushes denormals, where Triton's own take three to five.


@triton.jit
def _exp2(x):
    return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, False, 1) if _ON_GPU else tl.exp2(x)


@triton.jit
def _reciprocal(x):
    return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, False, 1) if _ON_GPU else 1 / x


@triton.jit
def _sigmoid(logit):
    """σ = sigmoid((logit + 5) / 7.5). z = 23σ is in 0 .. 23: exp z needs no maximum to be subtracted first, a whole row of
    them sums to less than 1e15."""
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
    """Σ exp z of one item; whoever is last in a strip adds the items up, in order, and finishes its rows."""
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

    First as if there were no targets; then those few of them that lie in the item are written over.
    """
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
        if BOTH:
            tl.store(grad_t + c.to(tl.int64)[:, None] * T + row[None, :], narrow.T, mask=inside.T)
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
            tl.store(grad_t + target * T + row, narrow, mask=here)


@triton.jit
def _loss_kernel(
    logits, targets, weights,  # (T, V); (T,) int64; (K,) fp32
    lse, row_loss,  # (T,) fp32 each; lse is read if only gradients are asked for
    partial, drawn, done,  # scratch: (strips, parts, ROWS) fp32; () and (strips,) int32, zero
    grad, grad_t,  # (T, V), (V, T)
    T, V, inverse_scale,
    K: tl.constexpr, SUMS: tl.constexpr, GRADIENTS: tl.constexpr, BOTH: tl.constexpr,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
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


def _loss(
    logits: Tensor, targets: Tensor, mtp_weights: Tensor, lse: Tensor | None = None,
    grad: Tensor | None = None, grad_t: Tensor | None = None, scale: float = 1.0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The loss (T,) a row and the log-sum-exp (T,); fills grad and grad_t. Where lse is given, only them."""
    (T, V), device = logits.shape, logits.device
    strips, parts = triton.cdiv(T, _LOSS["ROWS"]), triton.cdiv(V, _LOSS["WIDTH"])
    logits, targets, weights = logits.contiguous(), targets.contiguous(), mtp_weights.float().contiguous()
    sums = lse is None
    lse = torch.empty(T, device=device) if lse is None else lse
    row_loss = torch.empty_like(lse)
    partial = torch.empty(strips * parts * _LOSS["ROWS"] if sums else 1, device=device)
    counters = torch.zeros(4 + strips, device=device, dtype=torch.int32)  # of items drawn, and from 16 bytes on, of items done
    grad = row_loss if grad is None else grad
    launch(
        _loss_kernel, (min(2 * chip(device).processors, strips * parts),),
        logits, targets, weights, lse, row_loss, partial, counters, counters[4:], grad, grad if grad_t is None else grad_t,
        T, V, 1 / scale, K=weights.numel(), SUMS=sums, GRADIENTS=grad is not row_loss, BOTH=grad_t is not None, **_LOSS,
    )  # fmt: skip
    return row_loss, lse


@library.custom_op("bankrun::cross_entropy", mutates_args=())
def cross_entropy_op(logits: Tensor, targets: Tensor, mtp_weights: Tensor) -> tuple[Tensor, Tensor]:
    """The summed loss and each row's log-sum-exp (T,)."""
    row_loss, lse = _loss(logits, targets, mtp_weights)
    return row_loss.sum(), lse


@cross_entropy_op.register_fake
def _(logits, targets, mtp_weights):
    return logits.new_empty((), dtype=torch.float32), logits.new_empty(logits.size(0), dtype=torch.float32)


@library.custom_op("bankrun::cross_entropy_backward", mutates_args=())
def cross_entropy_backward_op(logits: Tensor, targets: Tensor, mtp_weights: Tensor, lse: Tensor) -> Tensor:
    """The gradient in the logits, in their dtype."""
    grad = torch.empty_like(logits, memory_format=torch.contiguous_format)
    _loss(logits, targets, mtp_weights, lse, grad)
    return grad


@cross_entropy_backward_op.register_fake
def _(logits, targets, mtp_weights, lse):
    return torch.empty_like(logits, memory_format=torch.contiguous_format)


class _FusedSoftcappedCrossEntropy(torch.autograd.Function):
    """For evaluation and chips without FP8: 2 bytes a logit forward, 4 backward. The loss is linear in the weights, so what
    comes in from behind multiplies them and costs no pass of its own."""

    @staticmethod
    def forward(ctx, logits: Tensor, targets: Tensor, mtp_weights: Tensor) -> Tensor:
        loss, lse = cross_entropy_op(logits, targets, mtp_weights)
        ctx.save_for_backward(logits, targets, mtp_weights, lse)
        return loss

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:
        logits, targets, mtp_weights, lse = ctx.saved_tensors
        return cross_entropy_backward_op(logits, targets, mtp_weights * grad, lse), None, None


kernel("softcapped_cross_entropy", "cuda")(_FusedSoftcappedCrossEntropy.apply)


@kernel("loss_and_fp8_gradient", "cuda")
def _loss_and_fp8_gradient_cuda(logits, targets, mtp_weights, scale, dtype):
    grad, grad_t = (torch.empty(shape, device=logits.device, dtype=dtype) for shape in (logits.shape, logits.shape[::-1]))
    return _loss(logits, targets, mtp_weights, None, grad, grad_t, scale)[0].sum(), grad, grad_t


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
    """(blocks, rows, keys) for blocks of `rows` queries, each with the keys of its own and the blocks its window reaches."""
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


_TRANSPOSE = dict(BLOCK=64, num_warps=4)  # 64 bf16 are a line of 128 bytes, in either layout
_TRANSPOSE_PROGRAMS = 32  # of an H100's 132 processors: the others stay with the reductions that run meanwhile


@triton.jit
def _transpose_kernel(source, target, rows, cols, ADD: tl.constexpr, BLOCK: tl.constexpr):
    """target (rows, cols) = sourceᵀ, or += if ADD, tile by tile; each program takes every num_programs-th."""
    across = tl.cdiv(cols, BLOCK)
    for tile in tl.range(tl.program_id(0), tl.cdiv(rows, BLOCK) * across, tl.num_programs(0)):
        row, col = tile // across * BLOCK, tile % across * BLOCK
        result = _load_tile(source, col, row, cols, rows, BLOCK, BLOCK).T
        if ADD:
            result = _load_tile(target, row, col, rows, cols, BLOCK, BLOCK).to(tl.float32) + result.to(tl.float32)
        _store_tile(target, result, row, col, rows, cols)


def _transpose(source: Tensor, target: Tensor, add: bool) -> None:
    rows, cols = target.shape
    tiles = triton.cdiv(rows, _TRANSPOSE["BLOCK"]) * triton.cdiv(cols, _TRANSPOSE["BLOCK"])
    result = target if target.is_contiguous() else target.contiguous()
    grid = (min(_TRANSPOSE_PROGRAMS, tiles),)
    launch(_transpose_kernel, grid, source.contiguous(), result, rows, cols, ADD=add, num_stages=2, **_TRANSPOSE)
    if result is not target:
        target.copy_(result)


@kernel("transpose_add", "cuda")
def _transpose_add_cuda(source: Tensor, target: Tensor) -> None:
    _transpose(source, target, True)


@kernel("transpose_copy", "cuda")
def _transpose_copy_cuda(source: Tensor, target: Tensor) -> None:
    _transpose(source, target, False)


_REFERENCES: dict[str, Callable] = {
    "XXT": _XXT_reference,
    "XTX": _XTX_reference,
    "ba_plus_cAA": _ba_plus_cAA_reference,
    "aX_plus_BX": _aX_plus_BX_reference,
    "relu_squared_mlp": _ReluSquaredMLP.apply,
    "quantize_fp8": _quantize_fp8_reference,
    "quantize_fp8_both": _quantize_fp8_both_reference,
    "fp8_matmul": _fp8_matmul_reference,
    "softcapped_cross_entropy": _SoftcappedCrossEntropy.apply,
    "loss_and_fp8_gradient": _loss_and_fp8_gradient_reference,
    "transpose_add": _transpose_add_reference,
    "transpose_copy": _transpose_copy_reference,
}

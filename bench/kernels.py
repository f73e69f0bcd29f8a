"""Every GPU kernel: what must hold of it, what it compiles to for an H100, and how fast it is.

    ./run.sh bench/kernels.py              # a table at the record preset's sizes; on a GPU with times
    ./run.sh bench/kernels.py transpose    # the kernels whose name holds this, or one of several
    ./run.sh bench/kernels.py attention    # FlashAttention 4 against 2, on a Hopper GPU

Without a GPU the kernels are compiled for an H100 by the compiler inside Triton; nothing is run.
tests/kernels calls the checks, which need no Triton but its interpreter's stand-in.
"""

import argparse
import contextlib
import functools
import itertools
import math
import re
import statistics
import subprocess
import sys
import tempfile
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch
from torch import Tensor

import triton_kernels as tk
from bench.settings import largest_batch, markdown, model_of
from triton_kernels import tl, triton  # or what stands in for them

BF16, FP32 = torch.bfloat16, torch.float32
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
_add_exp2 = tk._add_exp2  # a kernel takes the names of its file

# -----------------------------------------------------------------------------
# What must hold. The checks call the public functions inside kernels_of("cuda"). Every tensor that
# a launcher allocates comes out of `guarded`: full of NaN, so that an element not written is seen,
# and between guards, so that one written outside is seen. Errors are measured against fp64 and
# bounded by what the formats round: unit roundoff of the result once, of fp32 once a term of a sum.

U32 = 2.0**-24  # unit roundoff of fp32: the largest relative error of rounding to nearest
UNIT = {FP32: U32, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
SMALLEST = {FP32: 2.0**-126, torch.float16: 2.0**-24, torch.bfloat16: 2.0**-126}  # normal in fp32
GUARD = 256  # elements


def normal(label: str, shape: tuple[int, ...], scale: float = 1.0) -> Tensor:
    """fp32 standard normal numbers, times scale, that depend on label and shape alone."""
    generator = np.random.Generator(np.random.Philox(zlib.crc32(label.encode())))
    return torch.from_numpy(generator.standard_normal(shape).astype(np.float32)) * scale


@contextlib.contextmanager
def guarded() -> Iterator[None]:
    """Tensors allocated inside hold NaN (all bits set), between guards that must stay untouched."""
    wholes = []
    new_empty = torch.Tensor.new_empty

    def allocate(shape, *, device=None, dtype=None, **_) -> Tensor:
        dtype = dtype or FP32
        size = math.prod(shape)
        count = (size + 2 * GUARD) * dtype.itemsize
        whole = torch.full((count,), 255, dtype=torch.uint8, device=device)
        wholes.append((whole, dtype.itemsize))
        return whole.view(dtype)[GUARD : GUARD + size].view(shape)

    def flat(shape: tuple) -> tuple:
        return tuple(shape[0]) if len(shape) == 1 and not isinstance(shape[0], int) else shape

    def like(x: Tensor, dtype: torch.dtype | None = None, **_) -> Tensor:
        return allocate(x.shape, device=x.device, dtype=dtype or x.dtype)

    def new(x: Tensor, *shape, dtype: torch.dtype | None = None, **options) -> Tensor:
        if options:  # the interpreter's own
            return new_empty(x, *shape, dtype=dtype, **options)
        return allocate(flat(shape), device=x.device, dtype=dtype or x.dtype)

    def empty(*shape, **options) -> Tensor:
        return allocate(flat(shape), **options)

    def zeros(*shape, **options) -> Tensor:
        return empty(*shape, **options).zero_()

    with (
        mock.patch.multiple(torch, empty=empty, zeros=zeros, empty_like=like),
        mock.patch.object(torch.Tensor, "new_empty", new),
    ):
        yield
    for whole, size in wholes:
        guards = torch.cat((whole[: GUARD * size], whole[-GUARD * size :]))
        assert (guards == 255).all(), "written outside"


@contextlib.contextmanager
def kernels_in_guards() -> Iterator[None]:
    """The GPU's kernels, whatever the tensors, with all that they allocate between guards."""
    with tk.kernels_of("cuda"), guarded():
        yield


def in_guards(x: Tensor) -> Tensor:
    """A copy of x that lies between guards; call inside `guarded`."""
    return torch.empty_like(x).copy_(x)


def assert_within(found: Tensor, exact: Tensor, bound: Tensor) -> None:
    """NaN exactly where `exact` is NaN, else off by at most `bound`: inf where the format overflows."""
    wrong = (found.isnan() != exact.isnan()).sum()
    assert wrong == 0, f"{wrong} elements are NaN or are not"
    excess = ((found.double() - exact).abs() - bound).masked_fill(exact.isnan(), -1.0)
    overflow = bound.isinf() & exact.isfinite()
    assert (found[overflow].abs() >= torch.finfo(found.dtype).max * 0.99).all()
    assert (found[overflow] * exact[overflow] > 0).all()
    excess = excess.masked_fill(overflow, -1.0)
    off = (excess > 0).sum()
    assert off == 0, f"{off} elements off, one by {excess.max():.3g} more than allowed"


def same_bits(a: Tensor, b: Tensor) -> bool:
    """NaN equals itself, -0 is not 0."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(*(x.detach().contiguous().view(-1).view(torch.uint8) for x in (a, b)))


def rounded(exact: Tensor, size: Tensor, terms: int, dtype: torch.dtype) -> Tensor:
    """The error of `terms` products summed in fp32, of absolute sum `size`, then rounded to dtype."""
    bound = (terms + 8) * U32 * size + UNIT[dtype] * exact.abs() * (1 + 2.0**-6) + SMALLEST[dtype]
    return bound.masked_fill(exact.abs() + bound > torch.finfo(dtype).max, math.inf)


def sample(
    label: str, shape: tuple[int, ...], dtype: torch.dtype, device: str, values: str = "random"
) -> Tensor:
    """values: random, zeros, equal, large (± a hundred), nan (one element in the middle)."""
    if values in ("zeros", "equal"):
        return torch.full(shape, 0.0 if values == "zeros" else 0.75, dtype=dtype, device=device)
    x = normal(label, shape)
    if values == "large":
        x = x.sign() * 100
    if values == "nan":
        x.view(-1)[x.numel() // 2] = math.nan
    return x.to(device, dtype)


# Symmetric products


def check_product(
    name: str, shape: tuple[int, ...], dtype: torch.dtype, values: str, given_out: bool, device: str
) -> None:
    """shape of X; for ba_plus_cAA, A is square of its last size."""
    X = sample("X", shape, dtype, device, values)
    n = shape[-1 if name in ("XTX", "ba_plus_cAA", "aX_plus_XB") else -2]
    square = sample("A", (*shape[:-2], n, n), dtype, device, values)
    A = (square + square.mT) / 2  # rounds to something symmetric
    wide = X.double()
    square = A.double()
    beta = -2.5
    alpha = 0.5
    left, right, addend = {
        "XXT": (wide, wide.mT, 0 * (wide @ wide.mT).nan_to_num(0.0, 0.0, 0.0)),
        "XTX": (wide.mT, wide, 0 * (wide.mT @ wide).nan_to_num(0.0, 0.0, 0.0)),
        "ba_plus_cAA": (alpha * square, square.mT, beta * square),
        "aX_plus_BX": (square, wide, beta * wide),
        "aX_plus_XB": (wide, square, beta * wide),
    }[name]
    exact = left @ right + addend
    with kernels_in_guards():
        out = torch.empty(exact.shape, device=device, dtype=dtype) if given_out else None
        found = {
            "XXT": lambda: tk.XXT(X, out),
            "XTX": lambda: tk.XTX(X, out),
            "ba_plus_cAA": lambda: tk.ba_plus_cAA(A, beta, alpha, out),
            "aX_plus_BX": lambda: tk.aX_plus_BX(X, A, beta),
            "aX_plus_XB": lambda: tk.aX_plus_BX(X, A, beta, right=True),
        }[name]()
    assert found.dtype == dtype and found.is_contiguous() and (out is None or found is out)
    size = left.abs() @ right.abs() + addend.abs()
    assert_within(found, exact, rounded(exact, size, left.size(-1), dtype))
    if name in ("XXT", "XTX", "ba_plus_cAA"):
        for i in range(128, n, 128):  # what lies above the diagonal tiles is a copy, to the bit
            assert same_bits(found[..., i - 128 : i, i:], found[..., i:, i - 128 : i].mT)


# Norm and rotation of q and k


def exact_heads(
    qkv: Tensor, table: Tensor, paired: bool, key_offset: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The definition: each head by its own position, and offset dims by their own row."""
    q, k, v = qkv.chunk(3, 1)
    T, H, D = q.shape
    places = (torch.arange(n, device=qkv.device) for n in (T, H, D))
    t, head, dim = torch.meshgrid(*places, indexing="ij")
    position = 2 * t[..., 0] + head[..., 0] % 2 if paired else t[..., 0]
    c, minus_s = table[position].unbind(-1)  # (T, H, D/2)

    def turned(x: Tensor) -> Tensor:
        n = x / (x.square().mean(-1, keepdim=True) + tk.RMS_EPS).sqrt()
        even, odd = n.unflatten(-1, (-1, 2)).unbind(-1)
        return torch.stack((c * even - minus_s * odd, c * odd + minus_s * even), -1).flatten(-2)

    back = (dim >= D // 2) & key_offset
    return turned(q), turned(k).gather(0, (t - back.long()).clamp(min=0)), v


def check_norm_and_rotate(
    sizes: tuple, paired: bool, key_offset: bool, dtype: torch.dtype, values: str, device: str
) -> None:
    """Results and the gradient of qkv; sizes: tokens, heads, dims of a head. The table is bf16's."""
    T, H, D = sizes
    angle = normal("angles", (2 * T, D // 2)).to(device) * 3
    table = torch.stack((angle.cos(), -angle.sin()), -1).bfloat16().to(dtype)
    qkv = sample("qkv", (T, 3 * H, D), dtype, device, values)
    grads = [sample(f"d{name}", (T, H, D), dtype, device) for name in "qkv"]
    with kernels_in_guards():
        leaf = qkv.clone().requires_grad_()
        found = tk.norm_and_rotate_qk(leaf, table, paired, key_offset)
        (found_grad,) = torch.autograd.grad(found, leaf, grads)
    wide = qkv.double().requires_grad_()
    exact = exact_heads(wide, table.double(), paired, key_offset)
    (exact_grad,) = torch.autograd.grad(exact, wide, [g.double() for g in grads])

    q, k, v = (x.detach() for x in found)
    assert v.data_ptr() == leaf.data_ptr() + 2 * H * D * dtype.itemsize  # a view
    assert v.stride() == (3 * H * D, D, 1)
    assert all(x.is_contiguous() and x.dtype == dtype and x.shape == sizes for x in (q, k))
    r = (1 / (qkv.double().square().mean(-1, keepdim=True) + tk.RMS_EPS).sqrt()).nan_to_num(0.0)
    n = (r * qkv.double().abs()).nan_to_num(0.0)
    largest = n.amax(-1, keepdim=True)
    mean = n.mean(-1, keepdim=True)
    size = torch.maximum(largest, largest.roll(1, 0))  # of a token, or the one before
    size = 2 * size[:, : 2 * H]  # of two dims turned
    for x, y, bound in zip((q, k), exact, size.chunk(2, 1)):
        assert_within(x, y.detach(), rounded(y.detach(), bound, D + 16, dtype))
    # r·(Rᵀ·dy − R⁻¹·y·mean(dy·y)): the saved y is rounded to dtype, and enters twice;
    # a dy of k may be the sum of two tokens'.
    dy = torch.cat(grads, 1).double().abs().amax(-1, keepdim=True)
    size = (r * 2 * (dy + dy.roll(-1, 0)) * (1 + largest * mean)).expand_as(exact_grad)
    bound = rounded(exact_grad, size, D + 40, dtype) + 2 * UNIT[dtype] * (1 + UNIT[dtype]) * size
    assert_within(found_grad[:, : 2 * H], exact_grad[:, : 2 * H], bound[:, : 2 * H])
    assert torch.equal(found_grad[:, 2 * H :], grads[2])


def check_model(device: str) -> None:
    """A small model's loss and gradients in fp32 are the same by kernels and by references."""
    from train_gpt import ForwardSchedule, Hyperparameters

    T = 40
    small = dict(vocab_size=128, bigram_rows=300, num_heads=4, head_dim=12, model_dim=48)
    model = model_of(Hyperparameters(**small), T).float().to(device)
    labels, results = [label for label, _ in model.named_parameters()], []
    with torch.no_grad():
        for label, param in model.named_parameters():
            param.add_(normal(label, tuple(param.shape), 0.1).to(device))
    ids = (normal("tokens", (T,)).abs() * 1e6).long().to(device) % 128
    starts = torch.tensor([0, 11, T, T], dtype=torch.int32, device=device)
    schedule = ForwardSchedule(torch.tensor([1.0, 0.5], device=device), 7, 20)
    for kind in ("cuda", "cpu"):
        with tk.kernels_of(kind):
            loss = model(ids.int(), ids.roll(-1), starts, schedule)
            results.append((loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))))
    # Eleven layers of some ten operations, each a few roundings of its own, and sums of up to
    # 192 terms in another order.
    for label, found, exact in zip(("loss", *labels), *results):
        assert (found - exact).norm() <= 1000 * U32 * exact.norm(), label


# MLP


def check_relu_squared(
    sizes: tuple, dtype: torch.dtype, values: str, device: str, tma: bool | None = None
) -> None:
    """Both kernels; sizes: tokens, dim, hidden; tma: by descriptors or not, else as on the chip."""
    if tma is not None:  # and fewer programs than tiles, so that programs do several
        few = tk.Chip(3, tk.H100.shared_memory - (not tma))
        with mock.patch.object(tk, "chip", lambda device: few):
            return check_relu_squared(sizes, dtype, values, device)
    tokens, dim, hidden = sizes
    x = sample("x", (tokens, dim), dtype, device, values)
    w = sample("w", (hidden, dim), dtype, device) * 0.25
    with guarded():
        activation = tk.launch_relu_squared(x, w, None)
    h = x.double() @ w.double().mT
    dh = (dim + 8) * U32 * (x.double().abs() @ w.double().mT.abs())
    r = torch.where(h < 0, 0.0, h)
    exact = r * r
    error = 2 * r * dh + dh * dh
    assert_within(activation, exact, rounded(exact, error, 0, dtype) + error)

    if values == "large":  # as an input of its own: finite in fp16 too
        activation = torch.full_like(activation, 10000.0)
    grad = sample("grad", (tokens, dim), dtype, device)
    with guarded():
        grad_h = tk.launch_relu_squared(grad, w, activation)
    slope = 2 * activation.double().sqrt()
    product = grad.double() @ w.double().mT
    size = grad.double().abs() @ w.double().abs().mT
    assert_within(grad_h, product * slope, rounded(product * slope, size * slope, dim, dtype))


def check_relu_squared_fp8(
    sizes: tuple, dtype: torch.dtype, values: str, device: str, tma: bool | None = None
) -> None:
    """The kernel of FP8 operands, whose products are exact; arguments: check_relu_squared."""
    if tma is not None:
        few = tk.Chip(3, tk.H100.shared_memory - (not tma))
        with mock.patch.object(tk, "chip", lambda device: few):
            return check_relu_squared_fp8(sizes, dtype, values, device)
    tokens, dim, hidden = sizes
    x, x_scale = tk.quantize_by_largest(sample("x", (tokens, dim), dtype, device, values))
    w, w_scale = tk.quantize_by_largest(sample("w", (hidden, dim), dtype, device) * 0.25)
    scale = x_scale * w_scale
    with guarded():
        found = tk.launch_relu_squared(x, w, None, scale, dtype)
    h = scale.double() * (x.double() @ w.double().mT)
    size = scale.double() * (x.double().abs() @ w.double().abs().mT)
    # A GPU's units round a running sum to 14 bits after every 32 products: 2^11 U32.
    dh = rounded(h, size, dim * (2**6 if device == "cuda" else 1), dtype)
    r = torch.where(h < 0, 0.0, h)
    error = 2 * r * dh + dh * dh
    assert_within(found, r * r, rounded(r * r, error, 0, dtype) + error)
    if values == "random":  # of small whole numbers sums are exact: h is rounded before its square
        x, w = ((t.float() / 128).round().to(E4M3) for t in (x, w))
        scale = torch.full_like(scale, 1 / 3)
        h = (x.float() @ w.float().mT * scale).to(dtype).float()
        with guarded():
            found = tk.launch_relu_squared(x, w, None, scale, dtype)
        assert torch.equal(found, h.relu().square().to(dtype))


def check_mlp_gradients(device: str) -> None:
    """Both MLPs in fp32, results and gradients, against the plain formula in fp64."""
    shapes = {"x": (150, 48), "W_fc": (304, 48), "W_proj": (304, 48)}
    x, W_fc, W_proj = (sample(label, shape, FP32, device) for label, shape in shapes.items())
    grad = sample("g", (150, 48), FP32, device)

    def plain(x: Tensor, fc: Tensor, proj: Tensor) -> Tensor:
        return torch.relu(x @ fc.mT) ** 2 @ proj

    def plain_fp8(x: Tensor, fc: Tensor, proj: Tensor) -> Tensor:
        x8, x_scale = tk.quantize_by_largest(x.detach().float())
        fc8, fc_scale = tk.quantize_by_largest(fc.detach().float())
        h8 = (x8.double() @ fc8.double().mT) * (x_scale.double() * fc_scale.double())
        h = x @ fc.mT
        return torch.relu(h + (h8 - h).detach()) ** 2 @ proj

    def mlp_fp8(x: Tensor, fc: Tensor, proj: Tensor) -> Tensor:
        return tk.relu_squared_mlp_fp8(x, fc, proj, *tk.quantize_by_largest(fc.detach()))

    for both in ((tk.relu_squared_mlp, plain), (mlp_fp8, plain_fp8)):
        results = []
        for function, dtype in zip(both, (FP32, torch.float64)):
            inputs = [t.to(dtype).requires_grad_() for t in (x, W_fc, W_proj)]
            with tk.kernels_of("cuda"):
                out = function(*inputs)
            results.append((out.detach(), *torch.autograd.grad(out, inputs, grad.to(dtype))))
        for found, exact in zip(*results):
            # Chains of sums of at most 304 and 150 terms: very safe for the norm.
            assert found.dtype == FP32 and (found - exact).norm() <= 500 * U32 * exact.norm()


# Loss


def loss_inputs(
    T: int, V: int, K: int, dtype: torch.dtype, device: str, values: str
) -> tuple[Tensor, Tensor, Tensor]:
    scale = 6 if values in ("random", "nan") else 100
    logits = sample("logits", (T, V), dtype, device, values) * scale
    tokens = (normal("targets", (T + 2,)).abs() * 1e6).long() % V
    tokens[0] = V - 1
    tokens[T - 1] = 0
    tokens[T:] = -1
    # The next three tokens, none past the end; then a prefix: by turns the second target once more,
    # none, another token; the last row has one.
    targets = torch.stack([tokens[k : k + T] for k in (0, 1, 2, 1)], 1)
    prefix = targets[:, 3]
    prefix[1::3] = -1
    prefix[2::3] = tokens[:T].flip(0)[2::3]
    prefix[-1] = V // 2
    weights = torch.tensor([1.0, 0.5, 0.25, 0.25], device=device)
    return logits, targets[:, :K].to(device), weights[:K]


def exact_loss(logits: Tensor, targets: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """The definition, column by column, in fp64 through autograd."""
    logits = logits.double().detach().requires_grad_()
    z = 23 * torch.sigmoid((logits + 5) / 7.5)
    loss = torch.zeros((), dtype=torch.float64, device=logits.device)
    for column, w in zip(targets.T, weights.double()):
        nll = torch.nn.functional.cross_entropy(z, column, ignore_index=-1, reduction="sum")
        loss = loss + w * nll
    return loss.detach(), torch.autograd.grad(loss, logits)[0]


# In fp32: z is off by 10 units of at most 23, so p and e^z by 300 units of themselves (the
# polynomial of the sums by 44 more); p ≤ 1, Σ w ≤ 2, dz/dlogit ≤ 0.77. In FP8 on a GPU
# tanh.approx is off by 2^-11 of itself: z by 0.0056.
GRADIENT_ERROR = 300 * U32 * 2 * 0.77
LOSS_ERROR = 400 * U32  # of each token's loss, in units of Σ w
TANH_ERROR = 2.0**-11


def check_loss(T: int, V: int, K: int, dtype: torch.dtype, values: str, device: str) -> None:
    """Loss and gradient, without FP8."""
    logits, targets, weights = loss_inputs(T, V, K, dtype, device, values)
    exact, exact_gradient = exact_loss(logits, targets, weights)
    with kernels_in_guards():
        leaf = logits.clone().requires_grad_()
        loss = tk.softcapped_cross_entropy(leaf, targets, weights)
        (3 * loss).backward()
    assert loss.dtype == FP32 and loss.shape == ()
    assert_within(loss.detach(), exact, 2 * T * LOSS_ERROR + T * U32 * exact.abs())
    error = torch.full_like(exact_gradient, GRADIENT_ERROR)
    unit = UNIT[dtype] * (2 if dtype == BF16 and device == "cpu" else 1)  # which truncates
    bound = 3 * error + unit * 3 * exact_gradient.abs() * 1.1 + SMALLEST[dtype]
    assert_within(leaf.grad, 3 * exact_gradient, bound)


# Half a unit in the last place where the device rounds to nearest; the interpreter loses carries,
# which may halve a number.
NEAREST = {E4M3: 2.0**-4, E5M2: 2.0**-3}
CARRIES_LOST = {E4M3: 0.5, E5M2: 0.5}


@triton.jit
def _exp2_of(t, y, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(y + at, _add_exp2(tl.load(t + at), 1.0) - 1.0)


def check_exp2(device: str) -> None:
    """The polynomial of the sums, within what it is fitted for, eight roundings, and that of the
    constant in the exponent."""
    t = torch.linspace(-1, 1, 4096, device=device)
    y = torch.empty_like(t)
    _exp2_of[(1,)](t, y, SIZE=len(t))
    exact = torch.exp(11.5 * t.double())
    assert_within(y, exact, (2.6e-6 + 20 * U32) * (exact + 1))


def fp8_gradient_bound(logits: Tensor, targets: Tensor, exact: Tensor, unit: float) -> Tensor:
    """Of the gradient / 0.75 * 448 in e5m2: one rounding, and on a GPU tanh.approx twice in p, by
    z and by the sums, and in dz/dlogit."""
    p = (23 * torch.sigmoid((logits.double() + 5) / 7.5)).softmax(-1)
    p.scatter_add_(1, targets.clamp(min=0), (targets >= 0).double())
    off = 25 * TANH_ERROR * 2 * 0.77 * p if logits.is_cuda else 0.0 * p
    error = (GRADIENT_ERROR + off) * 448 / 0.75
    return (1 + 2.0**-8) * (unit * exact.abs() + error) + 2.0**-16


def check_loss_in_fp8(
    T: int, V: int, K: int, dtype: torch.dtype, values: str, device: str, unit: float
) -> None:
    """Both layouts hold the same e5m2 numbers, of the right size; unit: of the device's rounding."""
    logits, targets, weights = loss_inputs(T, V, K, dtype, device, values)
    with kernels_in_guards():
        loss, grad, grad_t = tk.loss_and_fp8_gradient(logits, targets, weights, 0.75 / 448)
    exact_loss_, exact = exact_loss(logits, targets, weights)
    exact *= 448 / 0.75
    z_error = 23 * TANH_ERROR if logits.is_cuda else LOSS_ERROR
    assert_within(loss, exact_loss_, 2 * T * (LOSS_ERROR + z_error) + T * U32 * exact_loss_.abs())
    assert grad.shape == (T, V) and same_bits(grad_t, grad.mT)
    assert_within(grad.float(), exact, fp8_gradient_bound(logits, targets, exact, unit))


# FP8


def check_quantize(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    """What is handed to the cast, to the bit: of numbers beyond the format, infinities and NaN."""
    x = sample("x", shape, FP32, device, "nan") * 3
    x.view(-1)[:: max(1, x.numel() // 7)] *= 1000
    x.view(-1)[-1] = math.inf
    x.view(-1)[0] = -math.inf
    x = x.to(dtype)
    for limit, scale in ((448.0, 100 / 448), (57344.0, 0.75 / 448)):
        with guarded():
            q, q_t, alone = (torch.empty(s, device=device) for s in (shape, shape[::-1], shape))
            tk.launch_quantize(x, scale, limit, q, q_t)
            tk.launch_quantize(x, scale, limit, alone, None)
        expected = (x.float() * (1 / scale)).clamp(-limit, limit)
        assert torch.equal(q.isnan(), expected.isnan()) and q.isnan().any()
        assert torch.equal(q.nan_to_num(), expected.nan_to_num())
        assert same_bits(q_t, q.mT) and same_bits(alone, q)


def check_quantize_in_fp8(device: str, units: dict[torch.dtype, float]) -> None:
    """Both layouts hold the same numbers, of the right size; to the bit where it is to nearest."""
    inputs = (FP32, torch.bfloat16 if device == "cuda" else torch.float16)
    for dtype, x_dtype in itertools.product(units, inputs):
        x = (sample("x", (200, 144), FP32, device) * 30).to(x_dtype)
        with kernels_in_guards():
            q, q_t = tk.quantize_fp8_both(x, 100 / 448, dtype)
            alone = tk.quantize_fp8(x, 100 / 448, dtype)
        assert same_bits(q_t, q.mT) and same_bits(alone, q)
        largest = torch.finfo(dtype).max
        exact = (x.double() * (448 / 100)).clamp(-largest, largest)
        smallest = 2.0**-9  # of e4m3
        assert_within(q.float(), exact, (1 + 2.0**-8) * units[dtype] * exact.abs() + smallest)
        if units is NEAREST:
            with tk.kernels_of("cpu"):
                reference = tk.quantize_fp8(x, 100 / 448, dtype)
            assert same_bits(q, reference)


# Transposes


def check_transpose(shape: tuple[int, int], dtype: torch.dtype, device: str) -> None:
    source = sample("s", shape, dtype, device, "nan")
    target = sample("t", shape[::-1], dtype, device)
    total = (target.float() + source.mT.float()).to(dtype)
    for function, expected in ((tk.transpose_copy, source.mT), (tk.transpose_add, total)):
        with kernels_in_guards():
            result = in_guards(target)
            function(source, result)
        assert torch.equal(result.isnan(), expected.isnan())
        assert torch.equal(result.nan_to_num(), expected.nan_to_num())


# Embeddings


def check_lookup(
    T: int, vocab: int, dim: int, dtype: torch.dtype, device: str, most: float = 0.5
) -> None:
    """Rows and gradients of two tables, one over twice as wide; most: one token's share of positions."""
    tokens = (normal("tokens", (T,)).abs() * 1e6).long() % vocab
    tokens[: int(most * T)] = vocab // 2
    tokens = tokens[normal("order", (T,)).argsort()].to(device, torch.int32)
    widths = {"first": dim, "second": 2 * dim + 3}
    tables = [sample(label, (vocab, n), dtype, device) for label, n in widths.items()]
    grads = [sample(f"gradient of the {x}", (T, n), dtype, device) for x, n in widths.items()]
    for table in tables:
        table.requires_grad_()
    grads[0][T // 2] = math.nan  # and so its token's row, and no other
    with kernels_in_guards():
        runs = []
        for _ in range(2):
            rows = tk.lookup(*tables, tokens=tokens)
            runs.append(torch.autograd.grad(rows, tables, grads))
    for table, row in zip(tables, rows):
        assert torch.equal(row, table[tokens.long()])
    at = tokens.long()
    for found, again, grad in zip(*runs, grads):
        assert found.dtype == dtype and found.is_contiguous() and same_bits(found, again)
        zeros = torch.zeros(vocab, grad.size(1), dtype=torch.float64, device=device)
        exact = zeros.index_add(0, at, grad.double())
        size = zeros.index_add(0, at, grad.double().abs())
        bound = rounded(exact, size.nan_to_num(0.0), T, dtype).masked_fill(size == 0, 0.0)
        assert_within(found, exact, bound)


# -----------------------------------------------------------------------------
# What a launch compiles to, on any machine that has Triton

# Chips by compute capability: what the launches ask for, see triton_kernels.chip.
CHIPS = {
    80: tk.Chip(108, 163 * 1024),
    89: tk.Chip(128, 99 * 1024),
    90: tk.H100,
    100: tk.Chip(148, tk.H100.shared_memory),
}


class Launch(NamedTuple):
    kernel: Any  # triton.JITFunction
    grid: tuple[int, ...]
    args: tuple
    options: dict[str, Any]


class Resources(NamedTuple):
    """What a launch was compiled to."""

    registers: int  # a thread
    spilled: int  # bytes of stack a thread
    shared: int  # bytes of shared memory a block
    ttir: str
    ptx: str
    cubin: bytes


@contextlib.contextmanager
def recorded_launches(capability: int) -> Iterator[list[Launch]]:
    """What the kernels would launch on a chip of this compute capability, without launching it."""
    launches: list[Launch] = []

    def record(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
        launches.append(Launch(kernel, grid, args, options | tk.OPTIONS))

    with (
        tk.kernels_of("cuda"),
        mock.patch.object(tk, "launch", record),
        mock.patch.object(tk, "chip", lambda device: CHIPS[capability]),
    ):
        yield launches


class _Target:
    """A driver for compiling alone. Each chip is a device, so that Triton keeps binaries apart."""

    def __init__(self, capability: int):
        self.capability = capability

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> str:
        return f"compute capability {self.capability}"

    def get_current_stream(self, device: str) -> int:
        return 0


def compiled(launch: Launch, capability: int) -> Resources:
    """Compile a launch as Triton would for a launch, but don't run it."""
    from triton.runtime import driver

    before = driver._active
    driver.set_active(_Target(capability))
    try:
        binary = launch.kernel.warmup(*launch.args, grid=launch.grid, **launch.options)
    finally:
        driver.set_active(before)  # None: the machine's own, when somebody asks for it
    asm = binary.asm
    usage = dumped(asm["cubin"], "cuobjdump", "-res-usage")
    found = dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", usage))
    spilled = int(found["STACK"]) + int(found["LOCAL"])
    shared = binary.metadata.shared
    return Resources(int(found["REG"]), spilled, shared, asm["ttir"], asm["ptx"], asm["cubin"])


def dumped(cubin: bytes, tool: str, *options: str) -> str:
    """What a tool inside Triton prints about a binary."""
    path = Path(triton.__file__).with_name("backends") / "nvidia" / "bin" / tool
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [path, *options, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def disassembled(cubin: bytes) -> tuple[list[tuple[str, str]], list[tuple[int, int]]]:
    """The instructions of a binary, (name, operands); and the first and last of each of its loops."""
    instructions, labels, loops = [], {}, []
    for line in dumped(cubin, "nvdisasm", "-ndf").splitlines():  # without data flow, a third faster
        if label := re.match(r"(\.L_\w+):", line):
            labels[label[1]] = len(instructions)
        elif found := re.search(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?(\S+)(.*);", line):
            instructions.append(found.groups())
    for i, (name, operands) in enumerate(instructions):
        to = re.search(r"`\((\.L_\w+)\)", operands)
        if name.startswith("BRA") and to and labels[to[1]] < i:
            loops.append((labels[to[1]], i))
    return instructions, loops


def is_innermost(loop: tuple[int, int], loops: list[tuple[int, int]]) -> bool:
    first, last = loop
    return not any(first <= a and b <= last and (a, b) != loop for a, b in loops)


def innermost_loops(cubin: bytes) -> list[Counter]:
    """The instructions of each loop that holds no other, by name; without a loop, all."""
    instructions, loops = disassembled(cubin)
    loops = loops or [(0, len(instructions) - 1)]
    inner = [loop for loop in loops if is_innermost(loop, loops)]
    return [Counter(name for name, _ in instructions[a : z + 1]) for a, z in inner]


# -----------------------------------------------------------------------------
# The kernels at the record preset's sizes

# Operations a second: matrix units in bf16 (dense; in FP8 twice as many), and special functions
# (exponential, reciprocal: 16 a clock and processor, 132 processors at 1.98 GHz). An H200 has the
# same, and faster memory.
MATRIX_LIMIT, SPECIAL_LIMIT = 989e12, 16 * 132 * 1.98e9
MEMORY_LIMITS = {"H100": 3.35e12, "H200": 4.8e12}  # bytes a second


class Case(NamedTuple):
    name: str
    shape: str
    inputs: Callable[[Callable], tuple]  # of new(shape, dtype): a tensor on the device at hand
    run: Callable  # of the inputs: what launches the kernel
    torch: tuple[Callable, ...]  # PyTorch's ways of doing the same, inside kernels_of("cpu")
    must: float  # bytes: each input read once, each output written once
    operations: float = 0
    matrix: bool = False  # operations are those of matrix units, else special functions
    fp8: bool = False  # needs FP8 units


def _product_cases(attn: tuple, mlp: tuple) -> Iterator[Case]:
    """Polar Express on the banks of one rank of 8: n matrices (dim, dim), tall ones (hidden, dim)."""
    (n, dim, _), (tall, hidden, _) = attn, mlp
    square, large, small = 2 * n * dim * dim, 2 * tall * hidden * dim, 2 * tall * dim * dim  # bytes
    tiles = dim // 128
    flops = 2 * n * dim**3
    triangle = (tiles + 1) / 2 / tiles  # the share of the tiles that are computed
    units = dict(matrix=True)

    def scaled_addition(L: Tensor, R: Tensor, C: Tensor) -> Tensor:
        return tk.launch_product(L, R, C, torch.empty_like(C), 1.0, 2.0)

    yield Case(
        "XXT", f"{attn}", lambda new: (new(attn),), lambda X: tk.XXT(X, torch.empty_like(X)),
        (lambda X: X @ X.mT,), 2 * square, flops * triangle, **units,
    )  # fmt: skip
    yield Case(
        "XTX", f"{mlp}", lambda new: (new(mlp),), lambda X: tk.XTX(X, X.new_empty(tall, dim, dim)),
        (lambda X: X.mT @ X,), large + small, 2 * tall * dim * dim * hidden * triangle, **units,
    )  # fmt: skip
    yield Case(
        "ba_plus_cAA", f"{attn}", lambda new: (new(attn),),
        lambda A: tk.ba_plus_cAA(A, 0.5, 0.1, torch.empty_like(A)),
        (lambda A: torch.baddbmm(A, A, A.mT, beta=0.5, alpha=0.1),),
        2 * square, flops * triangle, **units,
    )  # fmt: skip
    yield Case(
        "aX_plus_BX", f"{attn}", lambda new: (new(attn), new(attn)),
        lambda X, B: scaled_addition(B, X, X), (lambda X, B: torch.baddbmm(X, B, X, beta=2.0),),
        3 * square, flops, **units,
    )  # fmt: skip
    yield Case(
        "aX_plus_XB", f"{mlp}", lambda new: (new(mlp), new((tall, dim, dim))),
        lambda X, B: scaled_addition(X, B, X), (lambda X, B: torch.baddbmm(X, X, B, beta=2.0),),
        2 * large + small, 2 * tall * dim * dim * hidden, **units,
    )  # fmt: skip


def _rotation_cases(T: int, heads: int, D: int) -> Iterator[Case]:
    def separate(qkv: Tensor, table: Tensor, paired: bool, offset: bool) -> tuple:
        return tk.norm_and_rotate_qk(qkv, table, paired, offset)

    def forward(new: Callable, paired: bool, offset: bool) -> tuple:
        return new((T, 3 * heads, D)), new(((1 + paired) * T, D // 2, 2)), paired, offset

    def backward(new: Callable, paired: bool, offset: bool) -> tuple:
        saved = [new((T, heads, D)) for _ in range(4)]  # gradients of q, k, v, and the result q
        k, rstds = new((T + offset, heads, D)), new((2 * heads, T), FP32).abs()
        return *saved, k, rstds, new(((1 + paired) * T, D // 2, 2)), paired, offset

    kinds = {"": (False, False), ", paired": (True, False), ", offset": (False, True)}
    for kind, how in kinds.items():
        more = 2 * D * T * (1 + how[0]) + 4 * 2 * heads * T  # bytes of the table, and of 1/rms
        yield Case(
            f"norm_rotate{kind}", f"{(T, 3 * heads, D)}",
            lambda new, how=how: forward(new, *how), tk.launch_norm_rotate,
            (separate, torch.compile(separate)), 2 * 4 * T * heads * D + more,
        )  # fmt: skip
        yield Case(
            f"norm_rotate_backward{kind}", f"{(T, 3 * heads, D)}",
            lambda new, how=how: backward(new, *how), tk.launch_norm_rotate_backward,
            (), 2 * 8 * T * heads * D + more,
        )  # fmt: skip


def _mlp_cases(T: int, dim: int, hidden: int) -> Iterator[Case]:
    def plain(x: Tensor, w: Tensor) -> Tensor:
        return torch.relu(x @ w.mT).square()

    def scaled_mm(x: Tensor, w: Tensor, scale: Tensor) -> Tensor:
        scales = dict(scale_a=scale, scale_b=torch.ones_like(scale))
        h = torch._scaled_mm(x, w.mT, **scales, out_dtype=BF16, use_fast_accum=True)
        return torch.relu(h).square()

    def plain_backward(g: Tensor, w: Tensor, a: Tensor) -> Tensor:
        return (g @ w.mT) * (2 * a.sqrt())

    shape, weights = f"{(T, dim)} x {(hidden, dim)}", 2 * dim * hidden
    more = dict(operations=2 * T * dim * hidden, matrix=True)
    yield Case(
        "relu_squared", shape, lambda new: (new((T, dim)), new((hidden, dim))),
        lambda x, w: tk.launch_relu_squared(x, w, None), (plain, torch.compile(plain)),
        weights + 2 * T * (dim + hidden), **more,
    )  # fmt: skip
    yield Case(
        "relu_squared_fp8", shape,
        lambda new: (new((T, dim), E4M3), new((hidden, dim), E4M3), new((), FP32).abs()),
        lambda x, w, scale: tk.launch_relu_squared(x, w, None, scale, BF16),
        (scaled_mm, torch.compile(scaled_mm)), weights / 2 + T * (dim + 2 * hidden), **more, fp8=True,
    )  # fmt: skip
    yield Case(
        "relu_squared_backward", shape,
        lambda new: (new((T, dim)), new((hidden, dim)), new((T, hidden)).abs()),
        tk.launch_relu_squared, (plain_backward, torch.compile(plain_backward)),
        weights + 2 * T * (dim + 2 * hidden), **more,
    )  # fmt: skip


def _head_cases(T: int, V: int, dim: int) -> Iterator[Case]:
    from train_gpt import FP8_GRAD_SCALE, FP8_X_SCALE

    def logits(new: Callable) -> tuple:
        return new((T, V)), new((T, 4), torch.int64), new((4,), FP32).abs()

    def plain(logits: Tensor, targets: Tensor, weights: Tensor) -> tuple:
        logits = logits.detach().requires_grad_()
        loss = tk.softcapped_cross_entropy(logits, targets, weights)
        (grad,) = torch.autograd.grad(loss, logits)
        return loss, *tk.quantize_fp8_both(grad, FP8_GRAD_SCALE, E5M2)

    def both(x: Tensor) -> Any:
        return tk.quantize_fp8_both(x, FP8_X_SCALE, E4M3)

    shape, loss = f"{(T, V)}", tk.softcapped_cross_entropy
    yield Case(
        "loss_and_fp8_gradient", shape, logits,
        lambda x, t, w: tk.loss_and_fp8_gradient(x, t, w, FP8_GRAD_SCALE),
        (torch.compile(plain),), 4 * T * V, 3 * T * V, fp8=True,
    )  # fmt: skip
    yield Case(
        "cross_entropy", shape, logits, tk.launch_loss, (loss, torch.compile(loss)),
        2 * T * V, 2 * T * V,
    )  # fmt: skip
    yield Case(
        "cross_entropy_backward", shape, lambda new: (*logits(new), new((T,), FP32).abs() + 12),
        lambda x, t, w, lse: tk.launch_loss(x, t, w, lse, torch.empty_like(x)), (),
        4 * T * V, 3 * T * V,
    )  # fmt: skip
    for name, size in (("x", (T, dim)), ("w", (dim, V))):
        yield Case(
            f"quantize_fp8_both, {name}", f"{size}", lambda new, size=size: (new(size),),
            both, (both, torch.compile(both)), 4 * math.prod(size), fp8=True,
        )  # fmt: skip


def _table_cases(T: int, V: int, dim: int, bigrams: int, values: int) -> Iterator[Case]:
    """Gradients of look-ups, in the first stage's micro-batch or T tokens; the tie's transposes."""

    def runs(new: Callable, tokens: int, rows: int, width: int) -> tuple:
        ids = new((tokens,), torch.int32)
        return new((tokens, width)), ids, *tk.token_runs(ids, rows)

    first = T // 3
    tables = {
        f"{first} tokens": (first, V, dim),
        f"{T} tokens": (T, V, dim),
        "value tables": (first, V, values),
        "bigrams": (first, bigrams, dim),
    }
    for what, (tokens, rows, width) in tables.items():

        def plain(grad: Tensor, ids: Tensor, *_: Any, rows: int = rows) -> Tensor:
            return torch.ops.aten.embedding_dense_backward(grad, ids, rows, -1, False)

        yield Case(
            f"scatter, {what}", f"{(tokens, width)} into {(rows, width)}",
            lambda new, sizes=(tokens, rows, width): runs(new, *sizes),
            lambda grad, ids, *runs: tk.launch_scatter(grad, *runs), (plain, torch.compile(plain)),
            2 * (tokens + rows) * width + 8 * tokens + 4 * rows,
        )  # fmt: skip
    for where, alone in (("beside collectives", False), ("alone", True)):
        for function, source, moves in (
            (tk.transpose_add, (V, dim), 6),
            (tk.transpose_copy, (dim, V), 4),
        ):
            run = functools.partial(function, alone=alone)
            yield Case(
                f"{function.__name__}, {where}", f"{source} into {source[::-1]}",
                lambda new, source=source: (new(source), new(source[::-1])),
                run, (run, torch.compile(run)), moves * V * dim,
            )  # fmt: skip


@functools.cache
def cases() -> dict[str, Case]:
    """By name; the sizes are the recipe's, so it is imported here and not with the checks."""
    from bench.communication import model_parameters, rows_of
    from train_gpt import PARAM_TABLE, VALUE_LAYERS, Hyperparameters

    h = Hyperparameters()
    parameters = model_parameters(h)
    banks = {
        label: rows_of(parameters[label], PARAM_TABLE[label]).shape for label in ("attn", "mlp")
    }
    attn, mlp = ((-(-matrices // 8), *shape) for matrices, *shape in banks.values())
    _, hidden, dim = mlp
    T = largest_batch(h) // h.micro_batches
    V = parameters["embed"].shape[0]
    found = [*_product_cases(attn, mlp), *_rotation_cases(T, h.num_heads, h.head_dim)]
    found += [*_mlp_cases(T, dim, hidden), *_head_cases(T, V, dim)]
    found += _table_cases(T, V, dim, h.bigram_rows, VALUE_LAYERS * dim)
    return {case.name: case for case in found}


def __getattr__(name: str) -> Any:
    if name == "CASES":
        return cases()
    raise AttributeError(f"module {__name__} has no attribute {name}")


def launch_of(case: Case, capability: int) -> Launch:
    """What the case launches at the record preset's size. Its tensors are shapes without memory."""

    def new(shape: tuple[int, ...], dtype: torch.dtype = BF16) -> Tensor:
        return torch.empty(shape, device="meta", dtype=dtype)

    with recorded_launches(capability) as launches:
        case.run(*case.inputs(new))
    (launch,) = launches
    return launch


# -----------------------------------------------------------------------------
# The table


def limit(case: Case, memory: float) -> float:
    """Seconds that no kernel of this work can be below."""
    rate = MATRIX_LIMIT * (1 + case.fp8) if case.matrix else SPECIAL_LIMIT
    return max(case.operations / rate, case.must / memory)


def static_row(case: Case, memory: float) -> list[str]:
    found = compiled(launch_of(case, 90), 90)
    unit = "G" if case.matrix else "G special"
    operations = f"{case.operations / 1e9:.3g} {unit}" if case.operations else ""
    work = [operations, f"{case.must / 1e6:.4g}", f"{1e6 * limit(case, memory):.3g}"]
    return [case.name, case.shape, *work, *map(str, found[:3])]


def random_input(shape: tuple[int, ...], dtype: torch.dtype = BF16) -> Tensor:
    if dtype == torch.int64:
        return torch.randint(50257, shape, device="cuda")
    if dtype == torch.int32:  # tokens as frequent as words: the n-th in 1/n, the first 6 %
        return (50257 ** torch.rand(shape, device="cuda") - 1).int()
    return torch.randn(shape, device="cuda").to(dtype)


def median_time(function: Callable, inputs: list[tuple], repeats: int = 30) -> float:
    """Seconds of a call, the median. The inputs rotate, so that none is found in the cache."""
    for i in range(3):
        function(*inputs[i % len(inputs)])
    times = []
    for i in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(1_000_000)  # the launch happens meanwhile: only the kernel is measured
        start.record()
        function(*inputs[i % len(inputs)])
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times)


def measured_row(case: Case, memory: float) -> list[str]:
    copies = max(1, min(8, int(200e6 / case.must) + 1))  # together four times an H100's L2
    inputs = [case.inputs(random_input) for _ in range(copies)]
    with tk.kernels_of("cuda"):
        seconds = median_time(case.run, inputs)
    with tk.kernels_of("cpu"):  # the references
        others = [median_time(function, inputs) for function in case.torch]
    ratio = f"{min(others) / seconds:.2f}" if others else ""
    return [f"{1e6 * seconds:.4g}", f"{limit(case, memory) / seconds:.0%}", ratio]


def kernels_table(chosen: list[Case]) -> str:
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "H100"
    chip = "H200" if "H200" in gpu else "H100"
    memory = MEMORY_LIMITS[chip]
    head = ["kernel", "at the record preset", "operations", "must move, MB", f"limit {chip}, µs"]
    head += ["registers", "spilled", "shared memory, bytes"]
    rows = [static_row(case, memory) for case in chosen]
    if torch.cuda.is_available():
        head += [f"measured on {gpu}, µs", "of the limit", "times faster than PyTorch"]
        rows = [row + measured_row(case, memory) for row, case in zip(rows, chosen)]
    return markdown(head, rows)


# -----------------------------------------------------------------------------
# FlashAttention 4 against 2


def fineweb_documents(tokens: int, longest: int, slots: int) -> Tensor:
    """cu_seqlens (slots,) of documents as long as FineWeb's: lognormal, of 480 tokens in the median."""
    generator = np.random.Generator(np.random.Philox(0))
    lengths = np.exp(generator.normal(math.log(480), 0.95, slots)).clip(1, longest)
    starts = np.cumsum(lengths.astype(int)) - lengths.astype(int)
    return torch.from_numpy(starts.clip(max=tokens)).int()


def host_time(function: Callable, repeats: int = 20) -> float:
    """Seconds until a call returns, its kernels still waiting."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(repeats):
        function()
    return (time.perf_counter() - start) / repeats


def attention_row(tokens: int, longest: int, window: int, paired: bool, h: Any) -> list:
    """Times of attend, forward and backward, and how far FlashAttention 4 is off FlashAttention 2."""
    from data.loader import default_doc_slots

    p = 2 if paired else 1
    starts = fineweb_documents(tokens, longest, default_doc_slots(tokens))
    band = tk.Band((p * starts).cuda(), window, p * longest, None)
    shape = (p * tokens, h.num_heads // p, h.head_dim)
    *leaves, grad = (normal(name, shape).bfloat16().cuda() for name in ("q", "k", "v", "grad"))
    leaves = [x.requires_grad_() for x in leaves]
    attend = lambda: tk.attend(*leaves, band, h.attention_scale)
    device, host, results = [], [], []
    for package in (None, tk._fa4):
        with mock.patch.object(tk, "_fa4", package):
            out = attend()
            backward = lambda: torch.autograd.grad(out, leaves, grad, retain_graph=True)
            results.append([out, *backward()])
            device.append([median_time(function, [()]) for function in (attend, backward)])
            host.append(sum(host_time(function) for function in (attend, backward)))
    errors = [((a - b).float().norm() / b.float().norm()).item() for a, b in zip(*results[::-1])]
    times = [f"{1e6 * seconds:.0f}" for pair in zip(*device) for seconds in pair]
    faster = f"{sum(device[0]) / sum(device[1]):.2f}"
    row = [tokens, "paired" if paired else "plain", window, *times, faster]
    return [*row, *(f"{1e6 * seconds:.0f}" for seconds in host), f"{max(errors):.1e}"]


def attention_table() -> str:
    """Every shape and window of the schedule, or one line that says why FlashAttention 4 does not run."""
    from train_gpt import EXTENSION, STAGES, Hyperparameters

    said = f"attention: {tk.flash_attention()}"
    if tk._fa4 is None:
        return said
    h = Hyperparameters()
    rows = []
    for stage, paired in itertools.product((*STAGES, EXTENSION), (False, True)):
        for window in (stage.short, stage.long):
            tokens = stage.batch * h.batch_unit // h.micro_batches
            sizes = (tokens, stage.docs * h.block_size, window * h.block_size)
            rows.append(attention_row(*sizes, paired, h))
    head = ["tokens", "heads", "window", "forward FA2, µs", "FA4", "backward FA2, µs", "FA4"]
    head += ["times faster", "host FA2, µs", "FA4", "largest relative difference"]
    return f"{said}, on {torch.cuda.get_device_name()}\n\n{markdown(head, rows)}"


def main(argv: list[str] | None = None) -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("names", nargs="*", default=[""], help="parts of kernels' names")
    args = parser.parse_args(argv)
    chosen = [case for name, case in cases().items() if any(part in name for part in args.names)]
    if chosen:
        print(kernels_table(chosen), flush=True)
    if any(part and part in "attention" for part in args.names):
        print(attention_table(), flush=True)


if __name__ == "__main__":
    main()

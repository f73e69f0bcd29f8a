"""What must hold of each GPU kernel: tests/kernels runs it in Triton's interpreter and on a GPU, bench/gpu.py measures it.

The checks call the public functions inside kernels_of("cuda"). Every tensor that a launcher allocates comes out of `guarded`:
full of NaN, so that an element not written is seen, and with guards on both sides, so that one written outside is seen too.
Errors are measured against fp64 and bounded by what the formats round: unit roundoff of the result once, and of fp32 once
for each term of a sum.
"""

import contextlib
import itertools
import math
import zlib
from collections.abc import Iterator
from unittest import mock

import numpy as np
import torch
from torch import Tensor

import attention
import triton_kernels as tk
from triton_kernels import tl, triton  # or what stands in for them

_add_exp2 = tk._add_exp2  # a kernel takes the names of its file
U32 = 2.0**-24  # unit roundoff of fp32: the largest relative error of rounding to nearest
UNIT = {torch.float32: U32, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
SMALLEST = {torch.float32: 2.0**-126, torch.float16: 2.0**-24, torch.bfloat16: 2.0**-126}  # GPUs may flush fp32 subnormals
GUARD = 256  # elements


def normal(label: str, shape: tuple[int, ...], scale: float = 1.0) -> Tensor:
    """fp32 standard normal numbers, times scale, that depend on label and shape alone."""
    generator = np.random.Generator(np.random.Philox(zlib.crc32(label.encode())))
    return torch.from_numpy(generator.standard_normal(shape).astype(np.float32)) * scale


@contextlib.contextmanager
def guarded() -> Iterator[None]:
    """Tensors allocated inside hold NaN (all bits set), between guards that must be untouched at the end."""
    wholes, new_empty = [], torch.Tensor.new_empty

    def allocate(shape, *, device=None, dtype=None, **_) -> Tensor:
        dtype, size = dtype or torch.float32, math.prod(shape)
        whole = torch.full(((size + 2 * GUARD) * dtype.itemsize,), 255, dtype=torch.uint8, device=device)
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

    patches = (
        mock.patch.object(torch, "empty", lambda *shape, **options: allocate(flat(shape), **options)),
        mock.patch.object(torch, "zeros", lambda *shape, **options: allocate(flat(shape), **options).zero_()),
        mock.patch.object(torch, "empty_like", like),
        mock.patch.object(torch.Tensor, "new_empty", new),
    )
    with contextlib.ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        yield
    for whole, size in wholes:
        assert (whole[: GUARD * size] == 255).all() and (whole[-GUARD * size :] == 255).all(), "written outside"


@contextlib.contextmanager
def kernels_in_guards() -> Iterator[None]:
    """The GPU's kernels, whatever the tensors, with all that they allocate between guards."""
    with tk.kernels_of("cuda"), guarded():
        yield


def in_guards(x: Tensor) -> Tensor:
    """A copy of x that lies between guards; call inside `guarded`."""
    return torch.empty_like(x).copy_(x)


def assert_within(found: Tensor, exact: Tensor, bound: Tensor) -> None:
    """NaN where exact is NaN and there alone; else off by at most bound, which is infinite where the format may overflow."""
    assert torch.equal(found.isnan(), exact.isnan()), f"{(found.isnan() != exact.isnan()).sum()} elements are NaN or are not"
    excess = ((found.double() - exact).abs() - bound).masked_fill(exact.isnan(), -1.0)
    overflow = bound.isinf() & exact.isfinite()
    assert (found[overflow].abs() >= torch.finfo(found.dtype).max * 0.99).all()
    assert (found[overflow] * exact[overflow] > 0).all()
    excess = excess.masked_fill(overflow, -1.0)
    assert (excess <= 0).all(), f"{(excess > 0).sum()} elements off, one by {excess.max():.3g} more than allowed"


def rounded(exact: Tensor, size: Tensor, terms: int, dtype: torch.dtype) -> Tensor:
    """The error of `terms` products summed in fp32, of absolute sum `size`, then rounded to dtype."""
    bound = (terms + 8) * U32 * size + UNIT[dtype] * exact.abs() * (1 + 2.0**-6) + SMALLEST[dtype]
    return bound.masked_fill(exact.abs() + bound > torch.finfo(dtype).max, math.inf)


def sample(label: str, shape: tuple[int, ...], dtype: torch.dtype, device: str, values: str = "random") -> Tensor:
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


def check_product(name: str, shape: tuple[int, ...], dtype: torch.dtype, values: str, given_out: bool, device: str) -> None:
    """shape of X; for ba_plus_cAA, A is square of its last size."""
    X = sample("X", shape, dtype, device, values)
    n = shape[-1 if name in ("XTX", "ba_plus_cAA", "aX_plus_XB") else -2]
    square = sample("A", (*shape[:-2], n, n), dtype, device, values)
    A = (square + square.mT) / 2  # rounds to something symmetric
    wide, square = X.double(), A.double()
    beta, alpha = -2.5, 0.5
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
    assert_within(found, exact, rounded(exact, left.abs() @ right.abs() + addend.abs(), left.size(-1), dtype))
    if name in ("XXT", "XTX", "ba_plus_cAA"):
        for i in range(128, n, 128):  # what lies above the diagonal tiles is a copy, to the bit
            bits = torch.int16 if dtype.itemsize == 2 else torch.int32
            assert torch.equal(found.view(bits)[..., i - 128 : i, i:], found.view(bits)[..., i:, i - 128 : i].mT)


# Norm and rotation of q and k


def exact_heads(qkv: Tensor, table: Tensor, paired: bool, key_offset: bool) -> tuple[Tensor, Tensor, Tensor]:
    """The definition: each head by its own position, and offset dims by their own row."""
    q, k, v = qkv.chunk(3, 1)
    T, H, D = q.shape
    t, head, dim = torch.meshgrid(*(torch.arange(n, device=qkv.device) for n in (T, H, D)), indexing="ij")
    c, minus_s = table[2 * t[..., 0] + head[..., 0] % 2 if paired else t[..., 0]].unbind(-1)  # (T, H, D/2)

    def turned(x: Tensor) -> Tensor:
        n = x / (x.square().mean(-1, keepdim=True) + tk.RMS_EPS).sqrt()
        even, odd = n[..., 0::2], n[..., 1::2]
        return torch.stack((c * even - minus_s * odd, c * odd + minus_s * even), -1).flatten(-2)

    back = (dim >= D // 2) & key_offset
    return turned(q), turned(k).gather(0, (t - back.long()).clamp(min=0)), v


def check_norm_and_rotate(
    sizes: tuple[int, int, int], paired: bool, key_offset: bool, dtype: torch.dtype, values: str, device: str
) -> None:
    """Results and the gradient of qkv; sizes: tokens, heads, dims of a head. The table is rounded to bf16, as it is held."""
    T, H, D = sizes
    angle = normal("angles", (2 * T, D // 2)).to(device) * 3
    table = torch.stack((angle.cos(), -angle.sin()), -1).bfloat16().to(dtype)
    qkv = sample("qkv", (T, 3 * H, D), dtype, device, values)
    grads = [sample(f"d{name}", (T, H, D), dtype, device) for name in "qkv"]
    with kernels_in_guards():
        leaf = qkv.clone().requires_grad_()
        found = attention.norm_and_rotate_qk(leaf, table, paired, key_offset)
        (found_grad,) = torch.autograd.grad(found, leaf, grads)
    wide = qkv.double().requires_grad_()
    exact = exact_heads(wide, table.double(), paired, key_offset)
    (exact_grad,) = torch.autograd.grad(exact, wide, [g.double() for g in grads])

    q, k, v = (x.detach() for x in found)
    assert v.data_ptr() == leaf.data_ptr() + 2 * H * D * dtype.itemsize and v.stride() == (3 * H * D, D, 1)
    assert all(x.is_contiguous() and x.dtype == dtype and x.shape == sizes for x in (q, k))
    r = (1 / (qkv.double().square().mean(-1, keepdim=True) + tk.RMS_EPS).sqrt()).nan_to_num(0.0)
    n = (r * qkv.double().abs()).nan_to_num(0.0)
    largest, mean = n.amax(-1, keepdim=True), n.mean(-1, keepdim=True)
    size = 2 * torch.maximum(largest, largest.roll(1, 0))[:, : 2 * H]  # of two dims turned, of a token or the one before
    for x, y, bound in zip((q, k), exact, size.chunk(2, 1)):
        assert_within(x, y.detach(), rounded(y.detach(), bound, D + 16, dtype))
    # r·(Rᵀ·dy − R⁻¹·y·mean(dy·y)): the saved y is rounded to dtype, and enters twice; a dy of k may be the sum of two tokens'.
    dy = torch.cat(grads, 1).double().abs().amax(-1, keepdim=True)
    size = (r * 2 * (dy + dy.roll(-1, 0)) * (1 + largest * mean)).expand_as(exact_grad)
    bound = rounded(exact_grad, size, D + 40, dtype) + 2 * UNIT[dtype] * (1 + UNIT[dtype]) * size
    assert_within(found_grad[:, : 2 * H], exact_grad[:, : 2 * H], bound[:, : 2 * H])
    assert torch.equal(found_grad[:, 2 * H :], grads[2])


def check_model(device: str) -> None:
    """Loss and gradients of a small model in fp32, with every kernel that fp32 has, are those of the references."""
    from bench.settings import model_of
    from train_gpt import ForwardSchedule, Hyperparameters

    T, h = 40, Hyperparameters(vocab_size=128, bigram_rows=300, num_heads=4, head_dim=12, model_dim=48)
    model, results = model_of(h, T).float().to(device), []
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
    # Eleven layers of some ten operations, each a few roundings of its own, and sums of up to 192 terms in another order.
    for label, found, exact in zip(("loss", *(label for label, _ in model.named_parameters())), *results):
        assert (found - exact).norm() <= 1000 * U32 * exact.norm(), label


# MLP


def check_relu_squared(
    sizes: tuple[int, int, int], dtype: torch.dtype, values: str, device: str, tma: bool | None = None
) -> None:
    """Forward and backward kernel; sizes: tokens, dim, hidden; tma: whether by descriptors, else as the chip has it."""
    if tma is not None:
        few = tk.Chip(3, tk.H100.shared_memory - (not tma))  # fewer programs than tiles, so that programs do several
        with mock.patch.object(tk, "chip", lambda device: few):
            return check_relu_squared(sizes, dtype, values, device)
    tokens, dim, hidden = sizes
    x, w = sample("x", (tokens, dim), dtype, device, values), sample("w", (hidden, dim), dtype, device) * 0.25
    with guarded():
        activation = tk.launch_relu_squared(x, w, None)
    h = x.double() @ w.double().mT
    dh = (dim + 8) * U32 * (x.double().abs() @ w.double().mT.abs())
    r = torch.where(h < 0, 0.0, h)
    exact = r * r
    assert_within(activation, exact, rounded(exact, 2 * r * dh + dh * dh, 0, dtype) + 2 * r * dh + dh * dh)

    if values == "large":
        activation = torch.full_like(activation, 10000.0)  # as an input of its own: finite in fp16 too
    grad = sample("grad", (tokens, dim), dtype, device)
    with guarded():
        grad_h = tk.launch_relu_squared(grad, w, activation)
    slope = 2 * activation.double().sqrt()
    product, size = grad.double() @ w.double().mT, grad.double().abs() @ w.double().abs().mT
    assert_within(grad_h, product * slope, rounded(product * slope, size * slope, dim, dtype))


def check_mlp_gradients(device: str) -> None:
    """The whole MLP in fp32, result and three gradients, against autograd of the plain formula in fp64."""
    shapes = {"x": (150, 48), "W_fc": (304, 48), "W_proj": (304, 48)}
    x, W_fc, W_proj = (sample(label, shape, torch.float32, device) for label, shape in shapes.items())
    grad = sample("g", (150, 48), torch.float32, device)
    results = []
    for function, dtype in (
        (tk.relu_squared_mlp, torch.float32),
        (lambda x, f, p: torch.relu(x @ f.mT) ** 2 @ p, torch.float64),
    ):
        inputs = [t.to(dtype).requires_grad_() for t in (x, W_fc, W_proj)]
        with tk.kernels_of("cuda"):
            out = function(*inputs)
        results.append((out.detach(), *torch.autograd.grad(out, inputs, grad.to(dtype))))
    for found, exact in zip(*results):
        # Chains of sums of at most 304 and 150 terms; errors of opposite sign make that very safe for the norm.
        assert found.dtype == torch.float32 and (found - exact).norm() <= 500 * U32 * exact.norm()


# Loss


def loss_inputs(T: int, V: int, K: int, dtype: torch.dtype, device: str, values: str) -> tuple[Tensor, Tensor, Tensor]:
    logits = sample("logits", (T, V), dtype, device, values) * (6 if values in ("random", "nan") else 100)
    targets = (normal("targets", (T,)).abs() * 1e6).long().to(device) % V
    targets[0], targets[-1] = V - 1, 0
    return logits, targets, torch.tensor([1.0, 0.5, 0.25], device=device)[:K]


def exact_loss(logits: Tensor, targets: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """The definition, term by term, in fp64 through autograd."""
    logits = logits.double().detach().requires_grad_()
    z = 23 * torch.sigmoid((logits + 5) / 7.5)
    terms = [
        w * torch.nn.functional.cross_entropy(z[: len(z) - k], targets[k:], reduction="sum")
        for k, w in enumerate(weights.double())
        if k < len(z)
    ]
    loss = torch.stack(terms).sum()
    return loss.detach(), torch.autograd.grad(loss, logits)[0]


# In fp32: z is off by 10 units of at most 23, so p and e^z by 300 units of themselves (the polynomial of the sums by 44 more);
# p ≤ 1, Σ w ≤ 1.75, dz/dlogit ≤ 0.77.
GRADIENT_ERROR = 300 * U32 * 1.75 * 0.77
LOSS_ERROR = 400 * U32  # of each token's loss, in units of Σ w


def check_loss(T: int, V: int, K: int, dtype: torch.dtype, values: str, device: str) -> None:
    """Loss, and both ways to its gradient: in the logits' dtype when the backward pass comes, and at once in two layouts.

    The second is taken in fp32, so it is what the kernel hands to the cast to FP8.
    """
    logits, targets, weights = loss_inputs(T, V, K, dtype, device, values)
    exact, exact_gradient = exact_loss(logits, targets, weights)
    scale = 0.75 / 448
    with kernels_in_guards():
        leaf = logits.clone().requires_grad_()
        loss = tk.softcapped_cross_entropy(leaf, targets, weights)
        (3 * loss).backward()
        fused_loss, grad, grad_t = tk.loss_and_fp8_gradient(logits, targets, weights, scale, torch.float32)
    for found in (loss, fused_loss):
        assert found.dtype == torch.float32 and found.shape == ()
        assert_within(found.detach(), exact, 1.75 * T * LOSS_ERROR + T * U32 * exact.abs())
    error = torch.full_like(exact_gradient, GRADIENT_ERROR)
    assert_within(leaf.grad, 3 * exact_gradient, 3 * error + UNIT[dtype] * 3 * exact_gradient.abs() * 1.1 + SMALLEST[dtype])
    assert_within(grad.double() * scale, exact_gradient, error)
    assert grad.shape == (T, V) and grad_t.shape == (V, T)
    assert torch.equal(grad_t.view(torch.int32), grad.mT.contiguous().view(torch.int32))


# Half a unit in the last place where the device rounds to nearest; the interpreter loses carries, which may halve a number.
NEAREST = {torch.float8_e4m3fn: 2.0**-4, torch.float8_e5m2: 2.0**-3}
CARRIES_LOST = {torch.float8_e4m3fn: 0.5, torch.float8_e5m2: 0.5}


@triton.jit
def _exp2_of(x, y, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(y + at, _add_exp2(tl.load(x + at), 1.0) - 1.0)


def check_exp2(device: str) -> None:
    """The polynomial of the sums, within what it is fitted for and eight roundings."""
    x = torch.linspace(4, 22, 4096, device=device)
    y = torch.empty_like(x)
    _exp2_of[(1,)](x, y, SIZE=len(x))
    exact = torch.exp2(x.double())
    assert_within(y, exact, (2.6e-6 + 8 * U32) * (exact + 1))


def check_loss_in_fp8(device: str, units: dict[torch.dtype, float]) -> None:
    """The cast itself: both layouts hold the same e5m2 numbers, of the right size."""
    logits, targets, weights = loss_inputs(80, 1100, 3, torch.float32, device, "random")
    with kernels_in_guards():
        _, grad, grad_t = tk.loss_and_fp8_gradient(logits, targets, weights, 0.75 / 448, torch.float8_e5m2)
    exact = exact_loss(logits, targets, weights)[1] / (0.75 / 448)
    assert torch.equal(grad_t.view(torch.uint8), grad.view(torch.uint8).mT)
    unit = units[torch.float8_e5m2]
    assert_within(grad.float(), exact, (1 + 2.0**-8) * unit * exact.abs() + 2.0**-16 + 600 * GRADIENT_ERROR)


# FP8


def check_quantize(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    """What is handed to the cast, in fp32 and to the bit, from numbers below and beyond the format, infinities and NaN."""
    x = sample("x", shape, torch.float32, device, "nan") * 3
    x.view(-1)[:: max(1, x.numel() // 7)] *= 1000
    x.view(-1)[-1], x.view(-1)[0] = math.inf, -math.inf
    x = x.to(dtype)
    for limit, scale in ((448.0, 100 / 448), (57344.0, 0.75 / 448)):
        with guarded():
            q, q_t = torch.empty(shape, device=device), torch.empty(shape[::-1], device=device)
            tk.launch_quantize(x, scale, limit, q, q_t)
            alone = torch.empty(shape, device=device)
            tk.launch_quantize(x, scale, limit, alone, None)
        expected = (x.float() * (1 / scale)).clamp(-limit, limit)
        assert torch.equal(q.isnan(), expected.isnan()) and q.isnan().any()
        assert torch.equal(q.nan_to_num(), expected.nan_to_num())
        bits = q.view(torch.int32)
        assert torch.equal(q_t.view(torch.int32), bits.mT) and torch.equal(alone.view(torch.int32), bits)


def check_quantize_in_fp8(device: str, units: dict[torch.dtype, float]) -> None:
    """Of fp32 and of 16 bits: both layouts hold the same numbers, of the right size, and to the bit where it is to nearest."""
    inputs = (torch.float32, torch.bfloat16 if device == "cuda" else torch.float16)
    for dtype, x_dtype in itertools.product(units, inputs):
        x, unit = (sample("x", (200, 144), torch.float32, device) * 30).to(x_dtype), units[dtype]
        with kernels_in_guards():
            q, q_t = tk.quantize_fp8_both(x, 100 / 448, dtype)
            alone = tk.quantize_fp8(x, 100 / 448, dtype)
        bits = q.view(torch.uint8)
        assert torch.equal(q_t.view(torch.uint8), bits.mT) and torch.equal(alone.view(torch.uint8), bits)
        exact = (x.double() * (448 / 100)).clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max)
        assert_within(q.float(), exact, (1 + 2.0**-8) * unit * exact.abs() + 2.0**-9)  # the smallest number of e4m3
        if units is NEAREST:
            with tk.kernels_of("cpu"):
                reference = tk.quantize_fp8(x, 100 / 448, dtype)
            assert torch.equal(bits, reference.view(torch.uint8))


# Transposes


def check_transpose(shape: tuple[int, int], dtype: torch.dtype, device: str) -> None:
    source, target = sample("s", shape, dtype, device, "nan"), sample("t", shape[::-1], dtype, device)
    for function, expected in (
        (tk.transpose_copy, source.mT),
        (tk.transpose_add, (target.float() + source.mT.float()).to(dtype)),
    ):
        with kernels_in_guards():
            result = in_guards(target)
            function(source, result)
        assert torch.equal(result.isnan(), expected.isnan()) and torch.equal(result.nan_to_num(), expected.nan_to_num())


# Embeddings


def check_lookup(T: int, vocab: int, dim: int, dtype: torch.dtype, device: str, most: float = 0.5) -> None:
    """Rows and gradients of two tables, the second more than twice as wide; `most`: the share of positions of one token."""
    tokens = (normal("tokens", (T,)).abs() * 1e6).long() % vocab
    tokens[: int(most * T)] = vocab // 2
    tokens = tokens[normal("order", (T,)).argsort()].to(device, torch.int32)
    widths = {"first": dim, "second": 2 * dim + 3}
    tables = [sample(label, (vocab, width), dtype, device).requires_grad_() for label, width in widths.items()]
    grads = [sample(f"gradient of the {label}", (T, width), dtype, device) for label, width in widths.items()]
    grads[0][T // 2] = math.nan  # and so its token's row, and no other
    with kernels_in_guards():
        runs = []
        for _ in range(2):
            rows = tk.lookup(*tables, tokens=tokens)
            runs.append(torch.autograd.grad(rows, tables, grads))
    for table, row in zip(tables, rows):
        assert torch.equal(row, table[tokens.long()])
    bits = torch.int16 if dtype.itemsize == 2 else torch.int32
    for found, again, grad in zip(*runs, grads):
        assert found.dtype == dtype and found.is_contiguous() and torch.equal(found.view(bits), again.view(bits))
        exact, size = (
            torch.zeros(vocab, grad.size(1), dtype=torch.float64, device=device).index_add_(0, tokens.long(), x)
            for x in (grad.double(), grad.double().abs())
        )
        assert_within(found, exact, rounded(exact, size.nan_to_num(0.0), T, dtype).masked_fill(size == 0, 0.0))

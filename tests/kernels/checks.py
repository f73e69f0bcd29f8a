"""What must hold of each kernel and of its reference, against fp64: called by test_kernels.py and
test_on_gpu.py.

kernels: "cuda", the kernels, on a GPU or in Triton's interpreter; "cpu", the references. Only the
first needs Triton.
"""

import contextlib
import inspect
import itertools
import math
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
from torch import Tensor, nn

import triton_kernels as tk
from bench.resumes import same_bits
from common import U16, U32, U64, normal, random_batch, short_schedule, tiny_gpt, train_gpt
from runtime.ranks import AgreedError, Ranks
from runtime.self_check import self_check

BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2

# Kernels run between guards: every tensor that a launcher allocates is full of NaN, so that an element
# not written is seen, and lies between guards, so that one written outside is seen. Errors are bounded
# by what the formats round: unit roundoff of the result once, that of the sum once a term.

UNIT = {FP64: U64, FP32: U32, torch.float16: 2.0**-11, BF16: U16}
SMALLEST = {FP64: 2.0**-1022, FP32: 2.0**-126, torch.float16: 2.0**-24, BF16: 2.0**-126}
GUARD = 256  # elements


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
def under_test(kernels: str) -> Iterator[None]:
    """References; or the GPU's kernels, with all that they allocate between guards."""
    with tk.kernels_of(kernels), guarded() if kernels == "cuda" else contextlib.nullcontext():
        yield


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


def unit_of_sums(dtype: torch.dtype) -> float:
    """Unit roundoff of what results in dtype are summed in: fp32 or better."""
    return min(UNIT[dtype], U32)


def rounded(exact: Tensor, size: Tensor, terms: int, dtype: torch.dtype) -> Tensor:
    """The error of `terms` products, of absolute sum `size`, that are summed and rounded to dtype."""
    sums = (terms + 8) * unit_of_sums(dtype) * size
    bound = sums + UNIT[dtype] * exact.abs() * (1 + 2.0**-6) + SMALLEST[dtype]
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
    name: str, shape: tuple[int, ...], dtype: torch.dtype, values: str, device: str, kernels: str
) -> None:
    """shape of X, (n, rows, cols); for ba_plus_cAA, A is square of its last size."""
    X = sample("X", shape, dtype, device, values)
    n = shape[-1 if name in ("XTX", "ba_plus_cAA", "aX_plus_XB") else -2]
    square = sample("A", (*shape[:-2], n, n), dtype, device, values)
    A = (square + square.mT) / 2  # rounds to something symmetric
    wide = X.double()
    square = A.double()
    beta = -2.5
    alpha = 0.5
    none = torch.zeros((), dtype=FP64, device=device)
    left, right, addend = {
        "XXT": (wide, wide.mT, none),
        "XTX": (wide.mT, wide, none),
        "ba_plus_cAA": (alpha * square, square.mT, beta * square),
        "aX_plus_BX": (square, wide, beta * wide),
        "aX_plus_XB": (wide, square, beta * wide),
    }[name]
    exact = left @ right + addend
    with under_test(kernels):
        found = {
            "XXT": lambda: tk.XXT(X),
            "XTX": lambda: tk.XTX(X),
            "ba_plus_cAA": lambda: tk.ba_plus_cAA(A, beta, alpha),
            "aX_plus_BX": lambda: tk.aX_plus_BX(X, A, beta),
            "aX_plus_XB": lambda: tk.aX_plus_BX(X, A, beta, right=True),
        }[name]()
    assert found.dtype == dtype and found.is_contiguous()
    size = left.abs() @ right.abs() + addend.abs()
    assert_within(found, exact, rounded(exact, size, left.size(-1), dtype))
    if kernels == "cuda" and name in ("XXT", "XTX", "ba_plus_cAA"):
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
    sizes: tuple,
    layer: tuple[bool, bool],
    dtype: torch.dtype,
    values: str,
    device: str,
    kernels: str,
) -> None:
    """Results and the gradient of qkv. sizes: tokens, heads, dims of a head; layer: paired, key_offset.
    The table is bf16's."""
    T, H, D = sizes
    paired, key_offset = layer
    angle = normal("angles", (2 * T, D // 2)).to(device) * 3
    table = torch.stack((angle.cos(), -angle.sin()), -1).bfloat16().to(dtype)
    qkv = sample("qkv", (T, 3 * H, D), dtype, device, values)
    grads = [sample(f"d{name}", (T, H, D), dtype, device) for name in "qkv"]
    with under_test(kernels):
        leaf = qkv.clone().requires_grad_()
        found = tk.norm_and_rotate_qk(leaf, table, paired, key_offset)
        (found_grad,) = torch.autograd.grad(found, leaf, grads)
    wide = qkv.double().requires_grad_()
    exact = exact_heads(wide, table.double(), paired, key_offset)
    (exact_grad,) = torch.autograd.grad(exact, wide, [g.double() for g in grads])

    q, k, v = (x.detach() for x in found)
    assert v.data_ptr() == leaf.data_ptr() + 2 * H * D * dtype.itemsize  # a view
    assert v.stride() == (3 * H * D, D, 1)
    assert all(x.dtype == dtype and x.shape == sizes for x in (q, k))
    assert kernels == "cpu" or (q.is_contiguous() and k.is_contiguous())
    r = (1 / (qkv.double().square().mean(-1, keepdim=True) + tk.RMS_EPS).sqrt()).nan_to_num(0.0)
    n = (r * qkv.double().abs()).nan_to_num(0.0)
    largest = n.amax(-1, keepdim=True)
    mean = n.mean(-1, keepdim=True)
    size = torch.maximum(largest, largest.roll(1, 0))  # a token's, or that of the one before
    size = 2 * size[:, : 2 * H]  # two dims are turned
    for x, y, bound in zip((q, k), exact, size.chunk(2, 1)):
        assert_within(x, y.detach(), rounded(y.detach(), bound, D + 16, dtype))
    # r·(Rᵀ·dy − R⁻¹·y·mean(dy·y)): the saved y is rounded to dtype, and enters twice;
    # a dy of k may be the sum of two tokens'.
    dy = torch.cat(grads, 1).double().abs().amax(-1, keepdim=True)
    size = (r * 2 * (dy + dy.roll(-1, 0)) * (1 + largest * mean)).expand_as(exact_grad)
    bound = rounded(exact_grad, size, D + 40, dtype) + 2 * UNIT[dtype] * (1 + UNIT[dtype]) * size
    assert_within(found_grad[:, : 2 * H], exact_grad[:, : 2 * H], bound[:, : 2 * H])
    assert torch.equal(found_grad[:, 2 * H :], grads[2])


# The check before the clock


def self_checked(model: nn.Module, T: int) -> list[str]:
    """What it says of a model and T tokens, on a card as far as it sees: its lines, and its error."""
    h = short_schedule()
    lines = []
    run = SimpleNamespace(plan=train_gpt.make_plan(h), first_step=0)
    run.ranks = Ranks(0, 1, torch.device("cpu"))
    run.log = SimpleNamespace(write=lines.append)
    manager = train_gpt.TrainingManager(model, h)
    card = dict(get_device_name=lambda: "a card", reset_peak_memory_stats=lambda: None)
    try:
        with mock.patch.multiple(torch.cuda, **card):
            self_check(run, manager, random_batch(T, 128, (0, 5, 11)), tk)
    except AgreedError as error:
        lines.append(str(error))
    return lines


def check_broken_kernel(
    kernel: str, before: str, after: str, said: str, folder: Path, device: str
) -> None:
    """What is said once a piece of the kernel's source is another. Kernels are compared in fp32."""
    source = inspect.getsource(getattr(tk, kernel).fn)
    assert source.count(before) == 1
    path = folder / "broken.py"  # which the interpreter reads again
    path.write_text(source.replace(before, after))
    names = dict(vars(tk))
    exec(compile(path.read_text(), path, "exec"), names)
    with (
        tk.kernels_of("cuda"),
        mock.patch.dict(tk.QK, TOKENS=16),  # few programs: they run one after the other
        mock.patch.object(tk, kernel, names[kernel]),
    ):
        (found,) = self_checked(tiny_gpt(max_tokens=16, bigram_rows=64), 16)
    assert re.match(said, found), found


# MLP


def few_programs(tma: bool | None) -> contextlib.AbstractContextManager:
    """A chip with fewer programs than tiles, with or without TMA; None: the chip as it is."""
    few = tk.Chip(3, tk.H100.shared_memory - (not tma))
    patch = mock.patch.object(tk, "chip", lambda device: few)
    return contextlib.nullcontext() if tma is None else patch


def check_relu_squared(
    sizes: tuple, dtype: torch.dtype, values: str, device: str, tma: bool | None = None
) -> None:
    """Both kernels. sizes: tokens, dim, hidden; tma: see few_programs."""
    tokens, dim, hidden = sizes
    x = sample("x", (tokens, dim), dtype, device, values)
    w = sample("w", (hidden, dim), dtype, device) * 0.25
    with guarded(), few_programs(tma):
        activation = tk.launch_relu_squared(x, w, None)
    h = x.double() @ w.double().mT
    dh = (dim + 8) * U32 * (x.double().abs() @ w.double().mT.abs())
    r = torch.where(h < 0, 0.0, h)
    error = 2 * r * dh + dh * dh
    assert_within(activation, r * r, rounded(r * r, error, 0, dtype) + error)

    if values == "large":  # as an input of its own: finite in fp16 too
        activation = torch.full_like(activation, 10000.0)
    grad = sample("grad", (tokens, dim), dtype, device)
    with guarded(), few_programs(tma):
        grad_h = tk.launch_relu_squared(grad, w, activation)
    slope = 2 * activation.double().sqrt()
    product = grad.double() @ w.double().mT
    size = grad.double().abs() @ w.double().abs().mT
    assert_within(grad_h, product * slope, rounded(product * slope, size * slope, dim, dtype))


def check_relu_squared_fp8(
    sizes: tuple, dtype: torch.dtype, values: str, device: str, tma: bool | None = None
) -> None:
    """The kernel of FP8 operands, whose products are exact; arguments: check_relu_squared."""
    tokens, dim, hidden = sizes
    x, x_scale = tk.quantize_by_largest(sample("x", (tokens, dim), dtype, device, values))
    w, w_scale = tk.quantize_by_largest(sample("w", (hidden, dim), dtype, device) * 0.25)
    scale = x_scale * w_scale
    with guarded(), few_programs(tma):
        found = tk.launch_relu_squared(x, w, None, scale, dtype)
    h = scale.double() * (x.double() @ w.double().mT)
    size = scale.double() * (x.double().abs() @ w.double().abs().mT)
    # A GPU's units round a running sum to 14 bits after every 32 products: 2^11 U32.
    dh = rounded(h, size, dim * (2**6 if device == "cuda" else 1), dtype)
    r = torch.where(h < 0, 0.0, h)
    error = 2 * r * dh + dh * dh
    assert_within(found, r * r, rounded(r * r, error, 0, dtype) + error)
    if values == "random":  # sums of small whole numbers are exact: h is rounded before its square
        x, w = ((t.float() / 128).round().to(E4M3) for t in (x, w))
        scale = torch.full_like(scale, 1 / 3)
        h = (x.float() @ w.float().mT * scale).to(dtype).float()
        with guarded(), few_programs(tma):
            found = tk.launch_relu_squared(x, w, None, scale, dtype)
        assert torch.equal(found, h.relu().square().to(dtype))


def check_mlp_gradients(dtype: torch.dtype, device: str, kernels: str) -> None:
    """Both MLPs, results and gradients, against the plain formula in fp64. That in FP8 is
    straight-through: exact given h, with x and weights as they are."""
    shapes = {"x": (150, 48), "W_fc": (304, 48), "W_proj": (304, 48)}
    x, W_fc, W_proj = (sample(label, shape, FP32, device) for label, shape in shapes.items())
    grad = sample("g", (150, 48), FP32, device)

    def plain(x: Tensor, fc: Tensor, proj: Tensor) -> Tensor:
        return torch.relu(x @ fc.mT) ** 2 @ proj

    def plain_fp8(x: Tensor, fc: Tensor, proj: Tensor) -> Tensor:
        x8, x_scale = tk.quantize_by_largest(x.detach().to(dtype))
        fc8, fc_scale = tk.quantize_by_largest(fc.detach().to(dtype))
        h8 = (x8.double() @ fc8.double().mT) * (x_scale.double() * fc_scale.double())
        h = x @ fc.mT
        assert 0.01 < (h8 - h).norm() / h.norm() < 2.0**-3  # it is FP8
        return torch.relu(h + (h8 - h).detach()) ** 2 @ proj

    def mlp_fp8(x: Tensor, fc: Tensor, proj: Tensor) -> Tensor:
        return tk.relu_squared_mlp_fp8(x, fc, proj, *tk.quantize_by_largest(fc.detach()))

    for both in ((tk.relu_squared_mlp, plain), (mlp_fp8, plain_fp8)):
        results = []
        for function, wide in zip(both, (dtype, FP64)):
            inputs = [t.to(wide).requires_grad_() for t in (x, W_fc, W_proj)]
            with tk.kernels_of(kernels):
                out = function(*inputs)
            results.append((out.detach(), *torch.autograd.grad(out, inputs, grad.to(wide))))
        for found, exact in zip(*results):
            # Chains of sums of at most 304 and 150 terms: very safe for the norm.
            assert found.dtype == dtype
            assert (found - exact).norm() <= 500 * UNIT[dtype] * exact.norm()


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
    loss = torch.zeros((), dtype=FP64, device=logits.device)
    for column, w in zip(targets.T, weights.double()):
        nll = torch.nn.functional.cross_entropy(z, column, ignore_index=-1, reduction="sum")
        loss = loss + w * nll
    return loss.detach(), torch.autograd.grad(loss, logits)[0]


# z is off by 10 units of at most 23, so p and e^z by 300 units of themselves (the polynomial of the
# sums by 44 more); p ≤ 1, Σ w ≤ 2, dz/dlogit ≤ 0.77. In FP8 on a GPU tanh.approx is off by 2^-11 of
# itself: z by 0.0056.
GRADIENT_ERROR = 300 * 2 * 0.77  # units of fp32, or of fp64
LOSS_ERROR = 400  # the same, a token, times Σ w
TANH_ERROR = 2.0**-11


def check_loss(
    T: int, V: int, K: int, dtype: torch.dtype, values: str, device: str, kernels: str
) -> None:
    """Loss and gradient, without FP8."""
    logits, targets, weights = loss_inputs(T, V, K, dtype, device, values)
    exact, exact_gradient = exact_loss(logits, targets, weights)
    with under_test(kernels):
        leaf = logits.clone().requires_grad_()
        loss = tk.softcapped_cross_entropy(leaf, targets, weights)
        (3 * loss).backward()
    assert loss.dtype == torch.promote_types(dtype, FP32) and loss.shape == ()
    u = unit_of_sums(dtype)
    assert_within(loss.detach(), exact, T * u * (2 * LOSS_ERROR + exact.abs()))
    error = torch.full_like(exact_gradient, GRADIENT_ERROR * u)
    truncates = dtype == BF16 and device == "cpu" and kernels == "cuda"  # in the interpreter
    unit = UNIT[dtype] * (2 if truncates else 1)
    bound = 3 * error + unit * 3 * exact_gradient.abs() * 1.1 + SMALLEST[dtype]
    assert_within(leaf.grad, 3 * exact_gradient, bound)


def fp8_gradient_bound(logits: Tensor, targets: Tensor, exact: Tensor) -> Tensor:
    """The error of the gradient / 0.75 * 448 in e5m2: one rounding, and on a GPU tanh.approx twice in
    p, by z and by the sums, and in dz/dlogit."""
    p = (23 * torch.sigmoid((logits.double() + 5) / 7.5)).softmax(-1)
    p.scatter_add_(1, targets.clamp(min=0), (targets >= 0).double())
    off = 25 * TANH_ERROR * 2 * 0.77 * p if logits.is_cuda else 0.0 * p
    error = (GRADIENT_ERROR * U32 + off) * 448 / 0.75
    nearest = 2.0**-3  # half a unit in e5m2's last place
    return (1 + 2.0**-8) * (nearest * exact.abs() + error) + 2.0**-16


# On a GPU. In bf16 a vocabulary is a multiple of 64, as the model's always is: of those of 16 alone
# the assembler of Triton 3.7 dies.
FP8_LOSS_SHAPES = [(16, 64), (80, 1152), (336, 1152), (2048, 50304)]


def check_loss_in_fp8(
    T: int, V: int, K: int, dtype: torch.dtype, values: str, device: str, kernels: str
) -> None:
    """Both layouts hold the same e5m2 numbers, off by one rounding to nearest."""
    logits, targets, weights = loss_inputs(T, V, K, dtype, device, values)
    with under_test(kernels):
        loss, grad, grad_t = tk.loss_and_fp8_gradient(logits, targets, weights, 0.75 / 448)
    exact_loss_, exact = exact_loss(logits, targets, weights)
    exact *= 448 / 0.75
    error = 2 * LOSS_ERROR * U32 + (2 * 23 * TANH_ERROR if logits.is_cuda else 0.0)
    assert_within(loss, exact_loss_, T * (error + U32 * exact_loss_.abs()))
    assert grad.shape == (T, V) and same_bits(grad_t, grad.mT)
    assert_within(grad.float(), exact, fp8_gradient_bound(logits, targets, exact))


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


def check_quantize_in_fp8(device: str) -> None:
    """To nearest, as the reference on the same device, in both layouts; the interpreter truncates."""
    for dtype, x_dtype in itertools.product((E4M3, E5M2), (FP32, BF16)):
        x = (sample("x", (200, 144), FP32, device) * 30).to(x_dtype)
        with under_test("cuda"):
            q, q_t = tk.quantize_fp8_both(x, 100 / 448, dtype)
            alone = tk.quantize_fp8(x, 100 / 448, dtype)
        with tk.kernels_of("cpu"):
            expected = tk.quantize_fp8(x, 100 / 448, dtype)
        assert same_bits(q, expected) and same_bits(q_t, expected.mT) and same_bits(alone, expected)


# Transposes


def check_transpose(shape: tuple[int, int], dtype: torch.dtype, device: str, kernels: str) -> None:
    source = sample("s", shape, dtype, device, "nan")
    target = sample("t", shape[::-1], dtype, device)
    wide = torch.promote_types(dtype, FP32)
    total = (target.to(wide) + source.mT.to(wide)).to(dtype)
    for function, expected in ((tk.transpose_copy, source.mT), (tk.transpose_add, total)):
        with under_test(kernels):
            result = torch.empty_like(target).copy_(target)
            function(source, result)
        assert torch.equal(result.isnan(), expected.isnan())
        assert torch.equal(result.nan_to_num(), expected.nan_to_num())


# Embeddings


def check_lookup(
    sizes: tuple, dtype: torch.dtype, device: str, kernels: str, most: float = 0.5
) -> None:
    """Rows and gradients of two tables, one over twice as wide. sizes: tokens, vocab, dim; most: one
    token's share of positions."""
    T, vocab, dim = sizes
    tokens = (normal("tokens", (T,)).abs() * 1e6).long() % vocab
    tokens[: int(most * T)] = vocab // 2
    tokens = tokens[normal("order", (T,)).argsort()].to(device, torch.int32)
    widths = {"first": dim, "second": 2 * dim + 3}
    tables = [sample(label, (vocab, n), dtype, device) for label, n in widths.items()]
    grads = [sample(f"gradient of the {x}", (T, n), dtype, device) for x, n in widths.items()]
    for table in tables:
        table.requires_grad_()
    grads[0][T // 2] = math.nan  # and so its token's row, and no other
    with under_test(kernels):
        runs = []
        for _ in range(2):
            for table in tables:
                table.grad = None
            for _ in range(2):  # micro-batches
                rows = tk.lookup(*tables, tokens=tokens)
                torch.autograd.backward(rows, grads)
                runs.append([table.grad.clone() for table in tables])
    once, twice, *again = runs
    for table, row in zip(tables, rows):
        assert torch.equal(row, table[tokens.long()])
    at = tokens.long()
    for results in zip(once, twice, *again, grads):
        *found, grad = results
        assert all(x.dtype == dtype and x.is_contiguous() for x in found)
        assert same_bits(found[0], found[2]) and same_bits(found[1], found[3])
        zeros = torch.zeros(vocab, grad.size(1), dtype=FP64, device=device)
        exact = zeros.index_add(0, at, grad.double())
        size = zeros.index_add(0, at, grad.double().abs())
        bound = 0.0
        for i, total in enumerate(found[:2], 1):
            step = rounded(i * exact, i * size.nan_to_num(0.0), T, dtype)
            bound = bound + step.masked_fill(size == 0, 0.0)
            assert_within(total, i * exact, bound)

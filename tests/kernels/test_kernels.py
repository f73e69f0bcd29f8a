"""Each GPU kernel, run by Triton's interpreter on this machine's CPU, and its reference do what the
check says.

The interpreter runs the kernels' own code, one program after the other, on numpy. It proves indices,
masks, arithmetic and the order of the loss's work: one program draws every item there, so a gradient
drawn before its sums would wait for ever. It cannot prove what bf16 matmuls round to (it has no bf16),
FP8 rounding (it truncates some; the loss has its own), or programs that run at the same time. So fp32
and fp16 stand for bf16, what quantize_kernel hands to the cast is looked at in fp32, and test_on_gpu.py
does the rest on a GPU.
"""

import concurrent.futures
import multiprocessing
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch

import checks
from common import HAS_TRITON

FP64, FP32, FP16, BF16 = torch.float64, torch.float32, torch.float16, torch.bfloat16
NO_TRITON = "Triton has no wheel here: its kernels run elsewhere"
needs_triton = pytest.mark.skipif(not HAS_TRITON, reason=NO_TRITON)


@pytest.fixture(scope="module")
def interpreted() -> Iterator[Callable]:
    """interpreted(check, *args) runs check(*args, device="cpu") in a process that interprets."""
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, context) as executor:
        with mock.patch.dict(os.environ, TRITON_INTERPRET="1", OMP_NUM_THREADS="1"):
            executor.submit(os.getpid).result(timeout=300)  # imports read the variables

        def run(check: Callable, *args, **options) -> None:
            executor.submit(check, *args, device="cpu", **options).result(timeout=300)

        yield run
        for process in list(executor._processes.values()):
            process.kill()  # a check that hangs must not hang the tests


@pytest.fixture
def check(request) -> Callable:
    """check(code, what, *args): of the "kernel", interpreted, or of its "reference"."""

    def run(code: str, what: Callable, *args) -> None:
        if code == "kernel":
            request.getfixturevalue("interpreted")(what, *args, kernels="cuda")
        else:
            what(*args, device="cpu", kernels="cpu")

    return run


def both(kernel: tuple, reference: tuple) -> pytest.MarkDecorator:
    """The dtypes in which the kernel and the reference are checked."""
    codes = [pytest.param("kernel", dtype, marks=needs_triton) for dtype in kernel]
    codes += [("reference", dtype) for dtype in reference]
    names = [f"kernel {dtype}" for dtype in kernel] + [f"reference {dtype}" for dtype in reference]
    return pytest.mark.parametrize(
        "code, dtype", codes, ids=[x.replace("torch.", "") for x in names]
    )


every_dtype = both((FP32, FP16), (FP64, FP32))
one_dtype = both((FP16,), (FP32,))
extremes = pytest.mark.parametrize("values", ["zeros", "equal", "large", "nan"])


# Matmuls: one tile, several, none whole, tall, wide

SHAPES = [(1, 128, 128), (2, 130, 70), (1, 257, 40), (3, 20, 300)]
every_product = pytest.mark.parametrize(
    "name", ["XXT", "XTX", "ba_plus_cAA", "aX_plus_BX", "aX_plus_XB"]
)


@both((FP32, FP16), (FP64, FP32, BF16))
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@every_product
def test_product(check, code: str, name: str, shape, dtype: torch.dtype) -> None:
    check(code, checks.check_product, name, shape, dtype, "random")


@one_dtype
@extremes
@every_product
def test_product_of_extremes(check, code: str, name: str, values: str, dtype) -> None:
    check(code, checks.check_product, name, (2, 150, 136), dtype, values)


# Norm and rotation: one token, whole and broken programs (4 tokens), heads of any multiple of 4 dims

PLAIN, PAIRED, OFFSET = (False, False), (True, False), (False, True)
layers = pytest.mark.parametrize(
    "layer", [PLAIN, PAIRED, OFFSET], ids=["plain", "paired", "offset"]
)


@every_dtype
@layers
@pytest.mark.parametrize("sizes", [(1, 2, 4), (9, 4, 12), (8, 2, 128)], ids=str)
def test_norm_and_rotate(check, code: str, sizes, layer, dtype: torch.dtype) -> None:
    check(code, checks.check_norm_and_rotate, sizes, layer, dtype, "random")


@one_dtype
@layers
@extremes
def test_norm_and_rotate_of_extremes(check, code: str, values: str, layer, dtype) -> None:
    check(code, checks.check_norm_and_rotate, (6, 2, 16), layer, dtype, values)


# MLP. Descriptors want rows of a multiple of 16 bytes, so sizes are multiples of 8, in FP8 of 16.

SQUARED = {checks.check_relu_squared: (150, 72, 312), checks.check_relu_squared_fp8: (150, 80, 304)}
squared = pytest.mark.parametrize("what", SQUARED, ids=["16 bits", "FP8"])


@needs_triton
@pytest.mark.parametrize("dtype", [FP32, FP16], ids=["fp32", "fp16"])
@pytest.mark.parametrize("sizes", [(128, 128, 256), None, (16, 16, 16), (300, 48, 528)], ids=str)
@pytest.mark.parametrize("tma", [True, False], ids=["descriptors", "pointers"])
@squared
def test_relu_squared(interpreted, what: Callable, sizes, dtype: torch.dtype, tma: bool) -> None:
    interpreted(what, sizes or SQUARED[what], dtype, "random", tma=tma)


@needs_triton
@extremes
@squared
def test_relu_squared_of_extremes(interpreted, what: Callable, values: str) -> None:
    interpreted(what, SQUARED[what], FP16, values)


@both((FP32,), (FP64, FP32))
def test_mlp_gradients(check, code: str, dtype: torch.dtype) -> None:
    check(code, checks.check_mlp_gradients, dtype)


# Loss: fewer tokens than targets a token; whole and broken strips (64 tokens), parts (512 columns)
# and blocks (64 columns, which in bf16 are read as words); more strips than sums run ahead


@both((FP32, FP16, BF16), (FP64, FP32, BF16))
@pytest.mark.parametrize("T, V", [(1, 3), (2, 64), (64, 1024), (65, 1030), (150, 200)])
def test_loss(check, code: str, T: int, V: int, dtype: torch.dtype) -> None:
    check(code, checks.check_loss, T, V, 4, dtype, "random")


@both((FP32,), (FP64,))
@pytest.mark.parametrize("T, K", [(260, 4), (70, 1), (70, 2), (70, 3)])
def test_loss_of_many_strips_and_of_fewer_targets(check, code: str, T: int, K: int, dtype) -> None:
    check(code, checks.check_loss, T, 600, K, dtype, "random")


@both((FP32, FP16), (FP32, BF16))
@extremes
def test_loss_of_extremes(check, code: str, values: str, dtype: torch.dtype) -> None:
    check(code, checks.check_loss, 70, 200, 4, dtype, values)


@both((BF16, FP32), (BF16,))
@pytest.mark.parametrize("T, V, K", [(2, 64, 1), (64, 1152, 2), (260, 576, 4), (66, 1100, 3)])
def test_loss_in_fp8_has_two_equal_layouts(check, code: str, T: int, V: int, K: int, dtype) -> None:
    check(code, checks.check_loss_in_fp8, T, V, K, dtype, "random")


@both((BF16,), (BF16,))
@extremes
def test_loss_in_fp8_of_extremes(check, code: str, values: str, dtype: torch.dtype) -> None:
    check(code, checks.check_loss_in_fp8, 70, 128, 4, dtype, values)


# The whole model: the check before the clock. A kernel, a piece of its source, what is put there, and
# how the message begins.

BROKEN = {
    "nothing": ("scatter_kernel", "sums +=", "sums +=", "kernels agree .* gradients 0.0 %"),
    "a missing mask": ("scatter_kernel", "(i < end)[:, None] & ", "", "lookup differs"),
    "a wrong scale": ("relu_squared_kernel", "2 * tl.sqrt", "tl.sqrt", "relu_squared_mlp differs"),
    "a transposed index": (
        "norm_rotate_kernel", "(part * H + h).to(tl.int64) * T + t", "t * (2 * H) + part * H + h",
        "norm_and_rotate_qk differs",
    ),
}  # fmt: skip


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("what", BROKEN)
def test_self_check_names_a_broken_kernel(interpreted, tmp_path: Path, what: str) -> None:
    interpreted(checks.check_broken_kernel, *BROKEN[what], tmp_path)


# FP8, transposes


@needs_triton
@pytest.mark.parametrize("dtype", [FP32, FP16], ids=["fp32", "fp16"])
@pytest.mark.parametrize("shape", [(1, 5), (128, 256), (130, 70)], ids=str)
def test_quantize(interpreted, shape: tuple[int, int], dtype: torch.dtype) -> None:
    interpreted(checks.check_quantize, shape, dtype)


@every_dtype
@pytest.mark.parametrize("shape", [(1, 1), (64, 128), (70, 130), (700, 20)], ids=str)
def test_transposes(check, code: str, shape: tuple[int, int], dtype: torch.dtype) -> None:
    check(code, checks.check_transpose, shape, dtype)


# Embeddings: one token, tokens without and with one position, one with most; rows of less and more
# than a tile (256 columns, 8 positions)


@every_dtype
@pytest.mark.parametrize("sizes", [(1, 1, 1), (3, 40, 256), (70, 30, 40), (50, 7, 300)], ids=str)
def test_lookup(check, code: str, sizes: tuple[int, int, int], dtype: torch.dtype) -> None:
    check(code, checks.check_lookup, sizes, dtype)

"""Each GPU kernel, run by Triton's interpreter on this machine's CPU, does what its check says.

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
from unittest import mock

import pytest
import torch

pytest.importorskip("triton", reason="Triton has no wheel here: its kernels run elsewhere")

import checks

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
both_dtypes = pytest.mark.parametrize("dtype", [FP32, FP16], ids=["fp32", "fp16"])
extremes = pytest.mark.parametrize("values", ["zeros", "equal", "large", "nan"])


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


# Matmuls: one tile, several, none whole, tall, wide, in stacks

SHAPES = [(64, 32), (128, 128), (2, 130, 70), (257, 40), (3, 20, 300)]
PRODUCTS = ["XXT", "XTX", "ba_plus_cAA", "aX_plus_BX", "aX_plus_XB"]


@both_dtypes
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", PRODUCTS)
def test_product(interpreted, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    interpreted(checks.check_product, name, shape, dtype, "random", given_out=False)


@extremes
@pytest.mark.parametrize("name", PRODUCTS)
def test_product_of_extremes(interpreted, name: str, values: str) -> None:
    interpreted(checks.check_product, name, (2, 150, 136), FP16, values, given_out=False)


@pytest.mark.parametrize("name", ["XXT", "XTX", "ba_plus_cAA"])
def test_product_into_a_given_tensor(interpreted, name: str) -> None:
    interpreted(checks.check_product, name, (2, 150, 136), FP32, "random", given_out=True)


# Norm and rotation: one token, whole and broken programs (4 tokens), heads of any multiple of 4 dims

layers = pytest.mark.parametrize(
    "paired, offset",
    [(False, False), (True, False), (False, True)],
    ids=["plain", "paired", "offset"],
)


@both_dtypes
@layers
@pytest.mark.parametrize("sizes", [(1, 2, 4), (9, 4, 12), (8, 2, 128)], ids=str)
def test_norm_and_rotate(interpreted, sizes, paired: bool, offset: bool, dtype) -> None:
    interpreted(checks.check_norm_and_rotate, sizes, paired, offset, dtype, "random")


@layers
@extremes
def test_norm_and_rotate_of_extremes(interpreted, values, paired: bool, offset: bool) -> None:
    interpreted(checks.check_norm_and_rotate, (6, 2, 16), paired, offset, FP16, values)


# MLP. Descriptors want rows of a multiple of 16 bytes: sizes are multiples of 8, but not of tiles.


@both_dtypes
@pytest.mark.parametrize("sizes", [(128, 64, 256), (150, 72, 312), (8, 8, 16), (300, 40, 520)])
@pytest.mark.parametrize("tma", [True, False], ids=["descriptors", "pointers"])
def test_relu_squared(interpreted, sizes, dtype: torch.dtype, tma: bool) -> None:
    interpreted(checks.check_relu_squared, sizes, dtype, "random", tma=tma)


@extremes
def test_relu_squared_of_extremes(interpreted, values: str) -> None:
    interpreted(checks.check_relu_squared, (150, 72, 312), FP16, values)


# Rows of FP8: multiples of 16.


@both_dtypes
@pytest.mark.parametrize("sizes", [(128, 128, 256), (150, 80, 304), (16, 16, 16), (300, 48, 528)])
@pytest.mark.parametrize("tma", [True, False], ids=["descriptors", "pointers"])
def test_relu_squared_fp8(interpreted, sizes, dtype: torch.dtype, tma: bool) -> None:
    interpreted(checks.check_relu_squared_fp8, sizes, dtype, "random", tma=tma)


@extremes
def test_relu_squared_fp8_of_extremes(interpreted, values: str) -> None:
    interpreted(checks.check_relu_squared_fp8, (150, 80, 304), FP16, values)


def test_mlp_gradients_are_those_of_autograd(interpreted) -> None:
    interpreted(checks.check_mlp_gradients)


# Loss: fewer tokens than targets a token; whole and broken strips (64 tokens), parts (512 columns)
# and blocks (64 columns: of bf16 they are read as words, which the interpreter can)


@pytest.mark.parametrize("dtype", [FP32, FP16, BF16], ids=["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("T, V", [(1, 3), (2, 64), (64, 1024), (65, 1030), (150, 200)])
def test_loss(interpreted, T: int, V: int, dtype: torch.dtype) -> None:
    interpreted(checks.check_loss, T, V, 4, dtype, "random")


def test_the_exponential_is_off_by_its_polynomial_alone(interpreted) -> None:
    interpreted(checks.check_exp2)


def test_loss_of_more_strips_than_sums_run_ahead(interpreted) -> None:
    """In one dtype, which the order of the work does not depend on."""
    interpreted(checks.check_loss, 260, 1100, 4, FP32, "random")


@pytest.mark.parametrize("K", [1, 2, 3])
def test_loss_of_fewer_targets(interpreted, K: int) -> None:
    interpreted(checks.check_loss, 70, 1100, K, FP32, "random")


@both_dtypes
@extremes
def test_loss_of_extremes(interpreted, values: str, dtype: torch.dtype) -> None:
    interpreted(checks.check_loss, 70, 200, 4, dtype, values)


NEAREST = checks.NEAREST[torch.float8_e5m2]


@pytest.mark.parametrize(
    "T, V, K, dtype",
    [(2, 64, 1, BF16), (64, 576, 2, BF16), (260, 1152, 4, BF16), (66, 1100, 3, FP32)],
    ids=str,
)
def test_loss_in_fp8_has_two_equal_layouts(interpreted, T: int, V: int, K: int, dtype) -> None:
    interpreted(checks.check_loss_in_fp8, T, V, K, dtype, "random", unit=NEAREST)


@extremes
def test_loss_in_fp8_of_extremes(interpreted, values: str) -> None:
    interpreted(checks.check_loss_in_fp8, 70, 128, 4, BF16, values, unit=NEAREST)


# The whole model


@pytest.mark.slow
def test_model_of_kernels_is_the_model_of_references(interpreted) -> None:
    interpreted(checks.check_model)


# FP8, transposes


@both_dtypes
@pytest.mark.parametrize("shape", [(1, 5), (128, 256), (130, 70)], ids=str)
def test_quantize(interpreted, shape: tuple[int, int], dtype: torch.dtype) -> None:
    interpreted(checks.check_quantize, shape, dtype)


def test_quantize_in_fp8_has_two_equal_layouts(interpreted) -> None:
    interpreted(checks.check_quantize_in_fp8, units=checks.CARRIES_LOST)


def test_what_a_gpu_is_held_to_holds_of_the_reference() -> None:
    """Numbers beyond e4m3's largest were once held to their own size, and no GPU could pass."""
    with mock.patch.object(checks, "kernels_in_guards", lambda: checks.tk.kernels_of("cpu")):
        checks.check_quantize_in_fp8("cpu", checks.NEAREST)
        checks.check_loss_in_fp8(80, 1152, 4, BF16, "random", "cpu", NEAREST)


@both_dtypes
@pytest.mark.parametrize("shape", [(1, 1), (64, 128), (70, 130), (700, 20)], ids=str)
def test_transposes(interpreted, shape: tuple[int, int], dtype: torch.dtype) -> None:
    interpreted(checks.check_transpose, shape, dtype)


# Embeddings: one token, tokens without and with one position, one with most; rows of less and more
# than a tile (256 columns, 8 positions)


@both_dtypes
@pytest.mark.parametrize("T, vocab, dim", [(1, 1, 1), (3, 40, 256), (70, 30, 40), (50, 7, 300)])
def test_lookup(interpreted, T: int, vocab: int, dim: int, dtype: torch.dtype) -> None:
    interpreted(checks.check_lookup, T, vocab, dim, dtype)

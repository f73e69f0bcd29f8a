"""Each GPU kernel, run by Triton's interpreter on this machine's CPU, does what bench/kernel_checks.py says.

The interpreter runs the kernels' own code, one program after the other, on numpy. It proves indices, masks, arithmetic and
the order of the loss's work: one program draws every item there, so a gradient drawn before its sums would wait for ever.
It cannot prove what bf16 products round to (it has no bf16), FP8 rounding (it truncates some), or programs that run at the
same time; fp32 and fp16 stand for bf16, what reaches the cast to FP8 is looked at in fp32, and test_on_gpu.py does the rest
where there is a GPU.
"""

import concurrent.futures
import multiprocessing
import os
from collections.abc import Callable, Iterator
from unittest import mock

import pytest
import torch

pytest.importorskip("triton", reason="Triton has no wheel here: its kernels run and compile elsewhere")

from bench import kernel_checks as checks

FP32, FP16 = torch.float32, torch.float16
both_dtypes = pytest.mark.parametrize("dtype", [FP32, FP16], ids=["fp32", "fp16"])


@pytest.fixture(scope="module")
def interpreted() -> Iterator[Callable]:
    """interpreted(check, *args) runs check(*args, device="cpu") in a process whose Triton interprets."""
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, context) as executor:
        with mock.patch.dict(os.environ, TRITON_INTERPRET="1", OMP_NUM_THREADS="1"):  # read by imports: in a new process
            executor.submit(os.getpid).result(timeout=300)
        yield lambda check, *args, **options: executor.submit(check, *args, device="cpu", **options).result(timeout=300)
        for process in list(executor._processes.values()):
            process.kill()  # a check that hangs must not hang the tests


# Products: one tile, several, none whole, tall, wide, in stacks

SHAPES = [(64, 32), (128, 128), (2, 130, 70), (257, 40), (3, 20, 300)]
PRODUCTS = ["XXT", "XTX", "ba_plus_cAA", "aX_plus_BX", "aX_plus_XB"]


@both_dtypes
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", PRODUCTS)
def test_product(interpreted: Callable, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    interpreted(checks.check_product, name, shape, dtype, "random", given_out=False)


@pytest.mark.parametrize("values", ["zeros", "equal", "large", "nan"])
@pytest.mark.parametrize("name", PRODUCTS)
def test_product_of_extremes(interpreted: Callable, name: str, values: str) -> None:
    interpreted(checks.check_product, name, (2, 150, 136), FP16, values, given_out=False)


@pytest.mark.parametrize("name", ["XXT", "XTX", "ba_plus_cAA"])
def test_product_into_a_given_tensor(interpreted: Callable, name: str) -> None:
    interpreted(checks.check_product, name, (2, 150, 136), FP32, "random", given_out=True)


# Norm and rotation: one token, whole and broken programs (4 tokens), heads of any multiple of 4 dims

PLAIN_PAIRED_OFFSET = pytest.mark.parametrize(
    "paired, key_offset", [(False, False), (True, False), (False, True)], ids=["plain", "paired", "offset"]
)


@both_dtypes
@PLAIN_PAIRED_OFFSET
@pytest.mark.parametrize("sizes", [(1, 2, 4), (9, 4, 12), (8, 2, 128)], ids=str)
def test_norm_and_rotate(
    interpreted: Callable, sizes: tuple[int, int, int], paired: bool, key_offset: bool, dtype: torch.dtype
) -> None:
    interpreted(checks.check_norm_and_rotate, sizes, paired, key_offset, dtype, "random")


@PLAIN_PAIRED_OFFSET
@pytest.mark.parametrize("values", ["zeros", "equal", "large", "nan"])
def test_norm_and_rotate_of_extremes(interpreted: Callable, values: str, paired: bool, key_offset: bool) -> None:
    interpreted(checks.check_norm_and_rotate, (6, 2, 16), paired, key_offset, FP16, values)


# MLP. Descriptors want rows of a multiple of 16 bytes, so sizes are multiples of 8, but not of the tiles.


@both_dtypes
@pytest.mark.parametrize("sizes", [(128, 64, 256), (150, 72, 312), (8, 8, 16), (300, 40, 520)], ids=str)
@pytest.mark.parametrize("tma", [True, False], ids=["descriptors", "pointers"])
def test_relu_squared(interpreted: Callable, sizes: tuple[int, int, int], dtype: torch.dtype, tma: bool) -> None:
    interpreted(checks.check_relu_squared, sizes, dtype, "random", tma=tma)


@pytest.mark.parametrize("values", ["zeros", "equal", "large", "nan"])
def test_relu_squared_of_extremes(interpreted: Callable, values: str) -> None:
    interpreted(checks.check_relu_squared, (150, 72, 312), FP16, values)


def test_mlp_gradients_are_those_of_autograd(interpreted: Callable) -> None:
    interpreted(checks.check_mlp_gradients)


# Loss: fewer tokens than targets a token, whole and broken strips (64 tokens), parts (1024 columns) and tiles (64 columns)


@both_dtypes
@pytest.mark.parametrize("T, V", [(1, 3), (2, 64), (64, 1024), (65, 1030), (150, 200)])
def test_loss(interpreted: Callable, T: int, V: int, dtype: torch.dtype) -> None:
    interpreted(checks.check_loss, T, V, 3, dtype, "random")


def test_the_exponential_is_off_by_its_polynomial_alone(interpreted: Callable) -> None:
    interpreted(checks.check_exp2)


def test_loss_of_more_strips_than_sums_run_ahead(interpreted: Callable) -> None:
    """In one dtype: the order of the work does not know it."""
    interpreted(checks.check_loss, 260, 1100, 3, FP32, "random")


@pytest.mark.parametrize("K", [1, 2])
def test_loss_of_fewer_targets(interpreted: Callable, K: int) -> None:
    interpreted(checks.check_loss, 70, 1100, K, FP32, "random")


@both_dtypes
@pytest.mark.parametrize("values", ["zeros", "equal", "large", "nan"])
def test_loss_of_extremes(interpreted: Callable, values: str, dtype: torch.dtype) -> None:
    interpreted(checks.check_loss, 70, 200, 3, dtype, values)


def test_loss_in_fp8_has_two_equal_layouts(interpreted: Callable) -> None:
    interpreted(checks.check_loss_in_fp8, units=checks.CARRIES_LOST)


# The whole model


def test_model_of_kernels_is_the_model_of_references(interpreted: Callable) -> None:
    interpreted(checks.check_model)


# FP8, embeddings, transposes


@both_dtypes
@pytest.mark.parametrize("shape", [(1, 5), (128, 256), (130, 70)], ids=str)
def test_quantize(interpreted: Callable, shape: tuple[int, int], dtype: torch.dtype) -> None:
    interpreted(checks.check_quantize, shape, dtype)


def test_quantize_in_fp8_has_two_equal_layouts(interpreted: Callable) -> None:
    interpreted(checks.check_quantize_in_fp8, units=checks.CARRIES_LOST)


@both_dtypes
@pytest.mark.parametrize("shape", [(1, 1), (64, 128), (70, 130), (700, 20)], ids=str)
def test_transposes(interpreted: Callable, shape: tuple[int, int], dtype: torch.dtype) -> None:
    interpreted(checks.check_transpose, shape, dtype)


# One token, tokens without and with one position, one with most; rows of less and more than a tile (256 columns, 8 positions)


@both_dtypes
@pytest.mark.parametrize("T, vocab, dim", [(1, 1, 1), (3, 40, 256), (70, 30, 40), (50, 7, 300)])
def test_lookup(interpreted: Callable, T: int, vocab: int, dim: int, dtype: torch.dtype) -> None:
    interpreted(checks.check_lookup, T, vocab, dim, dtype)

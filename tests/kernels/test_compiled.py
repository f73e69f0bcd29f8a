"""Each GPU kernel compiles for its chips, as launched at the record preset's size, and fits them.

The cases are those of bench/kernels.py. Their launchers run on tensors without memory, up to the
launch itself; Triton then compiles what it was given for sm_80 (A100; for FP8 sm_89, RTX 4090),
sm_90 (H100) and sm_100 (B200).
"""

import re

import pytest
import torch

pytest.importorskip("triton", reason="Triton has no wheel here: its kernels compile elsewhere")

import triton_kernels as tk
from bench import kernels as bench

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn


def targets() -> list:
    """Every kernel for an H100; the other chips are slow tests."""
    found = []
    for name, case in bench.cases().items():
        found.append((name, 90))
        for other in (89 if case.fp8 else 80, 100):
            found.append(pytest.param(name, other, marks=pytest.mark.slow))
    return found


def compiled(name: str, capability: int = 90) -> bench.Resources:
    return bench.compiled(bench.launch_of(bench.cases()[name], capability), capability)


@pytest.mark.parametrize("name, capability", targets())
def test_kernel_compiles_and_fits(name: str, capability: int) -> None:
    case = bench.cases()[name]
    launch = bench.launch_of(case, capability)
    found = bench.compiled(launch, capability)
    assert found.shared <= bench.CHIPS[capability].shared_memory
    assert (found.shared == 0) == name.startswith("norm_rotate")  # whose heads stay within a warp
    threads = 32 * launch.options["num_warps"]
    assert threads * found.registers <= 65536  # all of a processor's
    if capability == 90:
        assert found.spilled == 0
        assert ("wgmma.mma_async" in found.ptx) == case.matrix  # Hopper's matrix instruction
    if capability >= 90:
        tma = "cp.async.bulk.tensor" in found.ptx
        assert tma == name.startswith("relu_squared")
    assert not re.search(r"st\.shared\S*\.b8", found.ptx)  # no tile turns in FP8: quantize_kernel


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, BF16, torch.float16])
def test_a_tile_of_fp32_does_not_turn_in_fp8(dtype: torch.dtype) -> None:
    """On an H100 37 % of such a q_t were wrong (Triton 3.6), and 25 % of a bf16 tile cast first."""
    x = torch.empty(64, 96, dtype=dtype, device="meta")
    with bench.recorded_launches(90) as launches:
        q, q_t = tk.quantize_fp8_both(x, 1.0, E4M3)
    (launch,) = launches
    assert launch.options["BOTH"] == (dtype.itemsize == 2)
    assert (q.shape, q_t.shape) == ((64, 96), (96, 64))
    assert q_t.is_contiguous()


@pytest.mark.parametrize("paired, offset", [(False, False), (True, False), (False, True)])
def test_a_single_token_compiles(paired: bool, offset: bool) -> None:
    """A sample after an empty prompt: Triton makes a constant of a length of 1."""
    new = lambda *shape: torch.empty(shape, dtype=BF16, device="meta")
    table = new(2, 64, 2)
    with bench.recorded_launches(90) as launches:
        q, k, rstds = tk.launch_norm_rotate(new(1, 18, 128), table, paired, offset)
        tk.launch_norm_rotate_backward(q, q, q, q, k, rstds, table, paired, offset)
        tk.launch_relu_squared(new(1, 768), new(3072, 768), None)
    assert len(launches) == 3
    for launch in launches[: 2 if paired or offset else 3]:
        assert bench.compiled(launch, 90).cubin


@pytest.mark.parametrize("name", ["XXT", "relu_squared_fp8", "relu_squared_backward"])
def test_matmuls_fit_a_small_chip(name: str) -> None:
    """An RTX 4090 has 99 KB of shared memory a block."""
    assert compiled(name, 89).shared <= bench.CHIPS[89].shared_memory


def test_symmetric_matmuls_launch_one_triangle() -> None:
    """768 = 6 tiles: 21 on and below the diagonal of each matrix; all 36 if it is not symmetric."""
    names = ("XXT", "XTX", "ba_plus_cAA", "aX_plus_BX")
    grids = [bench.launch_of(bench.cases()[name], 90).grid for name in names]
    assert grids == [(21, 5), (21, 3), (21, 5), (36, 5)]


@pytest.mark.parametrize("name", ["transpose_add", "transpose_copy"])
def test_transposes_leave_processors_to_collectives(name: str) -> None:
    """Without collectives as many programs run as processors hold; loads go on while a tile turns."""
    beside = bench.launch_of(bench.cases()[f"{name}, beside collectives"], 90)
    alone = bench.launch_of(bench.cases()[f"{name}, alone"], 90)
    found = bench.compiled(alone, 90)
    assert beside.grid == (32,)
    assert alone.grid == (4 * 132,)
    assert 4 * found.shared <= bench.CHIPS[90].shared_memory
    threads = 4 * 32 * alone.options["num_warps"]
    assert threads * found.registers <= 65536
    assert "cp.async.cg" in found.ptx


def test_tiles_of_the_mlp_follow_each_other_without_a_gap() -> None:
    """As many stages as shared memory holds: one less backward, for the activation's tile."""
    for name, stages in dict(relu_squared=4, relu_squared_fp8=4, relu_squared_backward=3).items():
        launch = bench.launch_of(bench.cases()[name], 90)
        assert launch.options["FLATTEN"] and launch.options["num_stages"] == stages
        more = launch._replace(options=launch.options | dict(num_stages=stages + 1))
        assert bench.compiled(more, 90).shared > bench.CHIPS[90].shared_memory


def test_activation_is_on_its_way_into_l2_before_the_matmul() -> None:
    """In the backward pass alone; one address for each line of 128 bytes."""
    ask = "prefetch.global.L2"
    assert ask not in compiled("relu_squared").ptx
    ptx = compiled("relu_squared_backward").ptx
    lines = tk.LARGE_TILES["BLOCK_M"] * tk.LARGE_TILES["BLOCK_N"] * 2 // 128
    of_a_thread = lines // (32 * tk.LARGE_TILES["num_warps"])
    assert {block.count(ask) for block in ptx.split("$L__BB")} == {0, of_a_thread}
    assert ptx.index(ask) < ptx.index("wgmma.mma_async")


def test_fp8_tiles_are_as_many_bytes() -> None:
    """So twice as deep; and FP8 units multiply them, not those of fp16 after a cast."""
    launch = bench.launch_of(bench.cases()["relu_squared_fp8"], 90)
    assert launch.options["BLOCK_K"] == 2 * tk.LARGE_TILES["BLOCK_K"]
    operands = set(re.findall(r"wgmma\.mma_async\S*?\.f32\.(\S+)", bench.compiled(launch, 90).ptx))
    assert operands == {"e4m3.e4m3"}


def test_gradients_of_embeddings_are_written_without_atomics() -> None:
    """So that a run repeats bit for bit; and loads go on while positions are summed."""
    ptx = compiled("scatter, 16384 tokens").ptx
    assert not re.search(r"\b(atom|red)\b", ptx) and "cp.async.cg" in ptx


def test_strips_that_wait_for_their_gradients_stay_in_l2() -> None:
    """50 MB on an H100; and a gradient comes later than all programs' sums, four a processor."""
    launch = bench.launch_of(bench.cases()["loss_and_fp8_gradient"], 90)
    strip = tk.LOSS["ROWS"] * 50304 * 2
    assert (tk.LOSS["AHEAD"] + 1) * strip < 50e6 * 0.6
    assert tk.LOSS["AHEAD"] * 2 * -(-50304 // tk.LOSS["WIDTH"]) >= launch.grid[0]


def test_loss_takes_three_special_functions_and_26_instructions_a_logit() -> None:
    """One special function in its sums, without a barrier, and two in its gradients, of 16 logits a
    thread; no guarded forms. A row's neighbours are one access, in both layouts."""
    launch = bench.launch_of(bench.cases()["loss_and_fp8_gradient"], 90)
    found = bench.compiled(launch, 90)
    assert (
        launch.grid == (4 * 132,)
        and 4 * 32 * launch.options["num_warps"] * found.registers <= 65536
    )
    loops = [
        (sum(count for name, count in loop.items() if name.startswith("MUFU")), loop)
        for loop in bench.innermost_loops(found.cubin)
    ]
    (few, sums), (many, gradients) = sorted(loop for loop in loops if loop[0])
    assert (few, many) == (16, 2 * 16) and not any(name.startswith("BAR") for name in sums)
    assert sums.total() + gradients.total() <= 27 * 16
    assert sums["LDG.E.128"] == 2 and gradients["STG.E.128"] == 1 and gradients["STG.E.64"] == 2
    assert not re.search(r"ex2\.approx\.f32|div\.full|rcp\.rn", found.ptx)

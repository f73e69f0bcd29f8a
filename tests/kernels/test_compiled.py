"""Each GPU kernel compiles for the chips it is meant for, as it is launched at the record preset's size, and fits them.

The cases are those of bench/kernels.py. Their launchers run on tensors without memory, up to the launch itself; Triton then
compiles what it was given for sm_80 (A100), sm_90 (H100) and sm_100 (B200), for FP8 sm_89 (RTX 4090) in place of sm_80.
"""

import importlib.metadata
import re

import pytest
import torch

pytest.importorskip("triton", reason="Triton has no wheel here: its kernels run and compile elsewhere")

from bench import kernels as bench
from common import ROOT

TARGETS = [(name, capability) for name, case in bench.CASES.items() for capability in (89 if case.fp8 else 80, 90, 100)]


@pytest.mark.parametrize("name, capability", TARGETS)
def test_kernel_compiles_and_fits(name: str, capability: int) -> None:
    case = bench.CASES[name]
    launch = bench.launch_of(case, capability)
    found = bench.compiled(launch, capability)
    assert found.shared <= bench.CHIPS[capability].shared_memory
    assert (found.shared == 0) == name.startswith("norm_rotate")  # whose heads stay within a warp
    assert 32 * launch.options["num_warps"] * found.registers <= 65536  # all the registers of a processor
    if capability == 90:
        assert found.spilled == 0
        assert ("wgmma.mma_async" in found.ptx) == case.matrix  # Hopper's matrix instruction, and none where none is meant
    if capability >= 90:
        tensor_memory_accelerator = "cp.async.bulk.tensor" in found.ptx
        assert tensor_memory_accelerator == name.startswith("relu_squared")
    assert not re.search(r"st\.shared\S*\.b8", found.ptx)  # a tile that turns in FP8: see quantize_kernel


def test_a_tile_of_fp32_does_not_turn_in_fp8() -> None:
    """On an H100 37 % of such a q_t were wrong with Triton 3.6, and with 3.7 25 % of one of bf16 that was cast first."""
    for dtype, turns in ((torch.float32, False), (torch.float64, False), (torch.bfloat16, True), (torch.float16, True)):
        with bench.recorded_launches(90) as launches:
            q, q_t = bench.tk.quantize_fp8_both(torch.empty(64, 96, dtype=dtype, device="meta"), 1.0, torch.float8_e4m3fn)
        assert [launch.options["BOTH"] for launch in launches] == [turns]
        assert (q.shape, q_t.shape) == ((64, 96), (96, 64)) and q_t.is_contiguous()


def test_the_table_of_kernels_is_what_the_compiler_makes() -> None:
    """Four registers' numbers of bench/README.md were an older source's."""
    pinned = re.search(r"^triton==([\d.]+)", (ROOT / "requirements.txt").read_text(), re.MULTILINE)[1]
    if (found := importlib.metadata.version("triton")) != pinned:
        pytest.skip(f"the table is of Triton {pinned}, this is {found}")
    lines = (ROOT / "bench" / "README.md").read_text().splitlines()
    assert [row for case in bench.CASES.values() if (row := f"| {' | '.join(bench.static_row(case))} |") not in lines] == []


@pytest.mark.parametrize("paired, offset", [(False, False), (True, False), (False, True)])
def test_a_single_token_compiles(paired: bool, offset: bool) -> None:
    """A sample after an empty prompt: Triton makes a constant of a length of 1, which lacks what numbers have."""
    new = lambda *shape: torch.empty(shape, dtype=torch.bfloat16, device="meta")
    with bench.recorded_launches(90) as launches:
        q, k, rstds = bench.attention.launch_norm_rotate(new(1, 18, 128), new(2, 64, 2), paired, offset)
        bench.attention.launch_norm_rotate_backward(q, q, q, q, k, rstds, new(2, 64, 2), paired, offset)
        bench.tk.launch_relu_squared(new(1, 768), new(3072, 768), None)
    assert len(launches) == 3 and all(bench.compiled(launch, 90).cubin for launch in launches[: 2 if paired or offset else 3])


@pytest.mark.parametrize("name", ["XXT", "relu_squared_backward"])
def test_products_fit_a_small_chip(name: str) -> None:
    """An RTX 4090 has 99 KB of shared memory a block."""
    found = bench.compiled(bench.launch_of(bench.CASES[name], 89), 89)
    assert found.shared <= bench.CHIPS[89].shared_memory


def test_symmetric_products_launch_one_triangle() -> None:
    """768 = 6 tiles: 21 on and below the diagonal, for each matrix; all 36 where the result is not symmetric."""
    grids = {name: bench.launch_of(bench.CASES[name], 90).grid for name in ("XXT", "XTX", "ba_plus_cAA", "aX_plus_BX")}
    assert grids == {"XXT": (21, 5), "XTX": (21, 3), "ba_plus_cAA": (21, 5), "aX_plus_BX": (36, 5)}


@pytest.mark.parametrize("name", ["transpose_add", "transpose_copy"])
def test_few_processors_are_taken_from_communication_and_all_where_there_is_none(name: str) -> None:
    """Alone, as many programs as processors hold at once; and in both, loads that go on while a tile is turned."""
    beside, alone = (bench.launch_of(bench.CASES[f"{name}, {where}"], 90) for where in ("beside collectives", "alone"))
    found = bench.compiled(alone, 90)
    assert beside.grid == (32,) and alone.grid == (4 * 132,) and 4 * found.shared <= bench.CHIPS[90].shared_memory
    assert 4 * 32 * alone.options["num_warps"] * found.registers <= 65536
    assert "cp.async.cg" in found.ptx


def test_tiles_of_the_mlp_follow_each_other_without_a_gap() -> None:
    """One loop for tiles and steps; as many stages as shared memory holds: one less backward, for the activation's tile."""
    stages = {}
    for name in ("relu_squared", "relu_squared_backward"):
        launch = bench.launch_of(bench.CASES[name], 90)
        stages[name] = launch.options["num_stages"]
        more = launch._replace(options=launch.options | dict(num_stages=stages[name] + 1))
        assert launch.options["FLATTEN"] and bench.compiled(more, 90).shared > bench.CHIPS[90].shared_memory
    assert stages == {"relu_squared": 4, "relu_squared_backward": 3}


def test_gradients_of_embeddings_are_written_without_atomics() -> None:
    """So that a run repeats itself to the bit; and the next positions are on their way while some are summed."""
    ptx = bench.compiled(bench.launch_of(bench.CASES["scatter, 16384 tokens"], 90), 90).ptx
    assert not re.search(r"\b(atom|red)\b", ptx) and "cp.async.cg" in ptx


def test_strips_that_wait_for_their_gradients_stay_in_l2() -> None:
    """50 MB on an H100; and as many sums are ahead of a gradient as programs run at once, two a processor."""
    config, launch = bench.tk.LOSS, bench.launch_of(bench.CASES["loss_and_fp8_gradient"], 90)
    strip = config["ROWS"] * 50304 * 2
    assert (config["AHEAD"] + 1) * strip < 50e6 * 0.6
    assert config["AHEAD"] * 2 * -(-50304 // config["WIDTH"]) >= launch.grid[0]


def test_loss_takes_five_special_functions_a_logit() -> None:
    """Two where it sums, three in its gradients, 16 logits a thread and round; and not the guarded forms of several steps."""
    found = bench.compiled(bench.launch_of(bench.CASES["loss_and_fp8_gradient"], 90), 90)
    loops = bench.innermost_loops(found.cubin)
    special = [sum(count for name, count in loop.items() if name.startswith("MUFU")) for loop in loops]
    assert sorted(count for count in special if count) == [2 * 16, 3 * 16]
    assert not re.search(r"ex2\.approx\.f32|div\.full|rcp\.rn", found.ptx)


def test_a_name_that_no_kernel_holds_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """And no empty table."""
    for options in (["nosuch"], ["nosuch", "--loops"], ["XXT", "nosuch"]):
        monkeypatch.setattr("sys.argv", ["bench/kernels.py", *options])
        with pytest.raises(SystemExit, match="no kernel's name holds 'nosuch': XXT, "):
            bench.main()


def test_an_unknown_option_is_an_error(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setattr("sys.argv", ["bench/kernels.py", "--nonsense=1"])
    with pytest.raises(SystemExit) as ended:
        bench.main()
    assert ended.value.code == 2 and capsys.readouterr().err.startswith("bench/kernels.py: error: no option --nonsense=1; there is --loops")


def test_help_is_given(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    """It was no option."""
    monkeypatch.setattr(bench.sys, "argv", ["kernels.py", "--help"])
    bench.main()
    assert capsys.readouterr().out == f"{bench.__doc__}\n"


def test_of_several_names_all_are_shown(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    """The second was passed over."""
    monkeypatch.setattr("sys.argv", ["bench/kernels.py", "XTX", "XXT"])
    monkeypatch.setattr(bench, "static_row", lambda case: [case.name])
    monkeypatch.setattr(bench.torch.cuda, "is_available", lambda: False)
    bench.main()
    assert capsys.readouterr().out.splitlines()[2:] == ["| XXT |", "| XTX |"]

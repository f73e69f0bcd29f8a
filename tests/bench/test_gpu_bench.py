"""bench/gpu.py: its dry run on any machine; on a GPU the sections that check, which no CPU can stand in for."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import attention
from bench import gpu
from common import HAS_TRITON, ROOT, run_fresh, run_script, train_gpt
from train_gpt import EXTENSION, STAGES

# tests/kernels/test_compiled.py compiles more than the table of kernels; without Triton none can be checked.
DRY_SECTIONS = [name for name in gpu.SECTIONS if name not in ("kernel_table", *["kernels"] * (not HAS_TRITON))]


def bench(*options: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, str(ROOT / "bench" / "gpu.py"), *options], capture_output=True, text=True, cwd=ROOT, timeout=500
    )


@pytest.fixture(scope="module")
def dry_run(tmp_path_factory: pytest.TempPathFactory) -> dict:
    """The report's data, by section."""
    folder = tmp_path_factory.mktemp("report")
    done = bench("--dry-run", f"--output={folder}", f"--only={','.join(DRY_SECTIONS)}")
    assert done.returncode == 0, done.stdout + done.stderr
    (report,) = folder.glob("*.md")
    assert "Failed: nothing" in report.read_text()
    return json.loads(report.with_suffix(".json").read_text())


def test_every_section_of_a_dry_run_passes_and_reports(dry_run: dict) -> None:
    assert [name for name, section in dry_run.items() if section["text"] and not section["failure"]] == DRY_SECTIONS


def test_the_run_is_timed_stage_by_stage(dry_run: dict) -> None:
    stages = dry_run["run"]["data"]["stages"]
    assert [stage["stage"] for stage in stages] == ["stage 1", "stage 2", "stage 3", "extension"]
    assert [stage["tokens"] for stage in stages] == [32 * stage.batch for stage in (*STAGES, EXTENSION)]
    assert all(stage["seconds"] > 0 for stage in stages)


def test_each_stage_is_profiled_with_adam_and_without(dry_run: dict) -> None:
    found = [step["step"] for step in dry_run["profile"]["data"]["steps"]]
    kinds = ("NorMuon alone", "Adam")
    parts = ("model", "optimizer")
    assert found == [f"stage {i}, {kind}, {part}" for i in (1, 2, 3) for kind in kinds for part in parts]


def test_twice_the_micro_batches_keep_half_the_activations(dry_run: dict) -> None:
    """All that is kept grows with the tokens but the weights' scaled and quantised copies, less than a hundredth of it."""
    saved = [row["saved"] for row in dry_run["memory"]["data"]["rows"]]
    assert saved[0] / saved[1] == pytest.approx(2, rel=0.02) and saved[0] / saved[2] == pytest.approx(4, rel=0.05)


def test_stages_are_the_schedules() -> None:
    """Of 45 scheduled steps and 5 more; and of fewer steps than a stage's name counts."""
    h = train_gpt.Hyperparameters(num_scheduled_iterations=45, num_extension_iterations=5)
    expected = {"stage 1": range(15), "stage 2": range(15, 30), "stage 3": range(30, 45), "extension": range(45, 50)}
    assert gpu.stages_of(h) == expected
    h = train_gpt.Hyperparameters(num_scheduled_iterations=4, num_extension_iterations=0)
    assert gpu.stages_of(h) == {"stage 1": range(1), "stage 2": range(1, 3), "stage 3": range(3, 4)}


def test_operations_of_a_token_at_the_records_size() -> None:
    """By hand: ten layers' attention matrices, eleven layers' MLPs, the head; twice forward, four times backward."""
    weights = 10 * 4 * 768 * 768 + 11 * 2 * 3072 * 768 + 768 * 50304
    assert gpu.flops_per_token(train_gpt.Hyperparameters()) == 6 * weights


def test_a_failed_check_ends_with_code_1_is_in_the_report_and_leaves_the_others_their_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    attend = attention.attend

    def wrong_in_fp64(q, k, v, band, scale):
        return attend(q, k, v, band, scale + (q.dtype == torch.float64))

    monkeypatch.setattr(attention, "attend", wrong_in_fp64)
    for name, value in (("TRITON_INTERPRET", "1"), ("TORCHINDUCTOR_CACHE_DIR", tmp_path), ("TRITON_CACHE_DIR", tmp_path)):
        monkeypatch.setenv(name, str(value))  # as main would, which then runs in this process
    code = gpu.main(["--dry-run", f"--output={tmp_path}", "--only=attention,environment"])
    printed = capsys.readouterr().out
    assert code == 1 and "attention: FAILED: attention is off" in printed and "environment: ok" in printed
    (report,) = tmp_path.glob("*.md")
    assert "Failed: attention." in report.read_text() and "## environment" in report.read_text()


def test_a_second_call_uses_the_firsts_shards_and_keeps_its_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setitem(gpu.SECTIONS, "environment", lambda bench: (str(bench.shards()), {}))
    monkeypatch.setattr(sys, "stdout", open("/dev/full", "w"))  # which ended it, before it had written what it had measured
    made = []
    for _ in range(2):
        assert gpu.main(["--dry-run", f"--output={tmp_path}", f"--cache={tmp_path}/kept", "--only=environment"]) == 0
        shards = sorted((tmp_path / "kept").rglob("*.bin"))
        made.append([shard.stat().st_mtime_ns for shard in shards])
    assert made[0] and made[0] == made[1]
    assert len(list(tmp_path.glob("*.md"))) == len(list(tmp_path.glob("*.json"))) == 2


def test_calls_at_one_time_have_a_report_each(tmp_path: Path) -> None:
    """Each wrote the name that was free when it began: one report was lost."""
    assert len({gpu.claim_report(tmp_path / "new", "a") for _ in range(5)}) == len([*(tmp_path / "new").glob("*.md")]) == 5


def test_a_report_takes_no_name_of_which_either_file_is_there(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("of before")
    assert gpu.claim_report(tmp_path, "a") != tmp_path / "a" and [*tmp_path.glob("a.*")] == [tmp_path / "a.json"]
    assert gpu.claim_report(tmp_path, "b") == tmp_path / "b" != gpu.claim_report(tmp_path, "b")


@pytest.mark.parametrize("option", ["--output={}/file", "--cache={}/file/x", "--output={}/file/x"])
def test_a_folder_that_cannot_be_is_told_before_anything_is_measured(tmp_path: Path, option: str) -> None:
    (tmp_path / "file").touch()
    given = ["--dry-run", "--only=environment", f"--output={tmp_path}", option.format(tmp_path)]
    done = run_fresh([sys.executable, ROOT / "bench" / "gpu.py", *given], cwd=ROOT)
    assert (done.returncode, done.stdout) == (1, "") and done.stderr.startswith(f"bench/gpu.py: error: {tmp_path}/file")
    assert done.stderr.count("\n") == 1 and [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so() -> None:
    done = run_script(ROOT / "bench" / "gpu.py")
    assert done.returncode == 2 and "no CUDA device" in done.stderr and "--dry-run" in done.stderr


def test_unknown_section_is_refused() -> None:
    done = bench("--only=kernel\x1b[2J")
    assert done.returncode == 2 and r"no section kernel\x1b[2J" in done.stderr


def test_a_caution_that_names_the_warm_up_is_not_its_end() -> None:
    """On an H200 the section run ended by it."""
    caution = "caution: passes or updates change x: a run begins with what the warm-up left there\n"
    output = f"warm-up: every shape\nRecompiling function\n{caution}3 parameters, ranks: 1, warm-up 28 s\nstep:1/8\n"
    assert gpu.split_at_warm_up(output) == (28, "\nstep:1/8\n")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("section", ["attention", "model", "run", "profile"])
def test_section_passes_on_the_gpu(section: str, tmp_path: Path) -> None:
    done = bench(f"--only={section}", f"--output={tmp_path}")
    assert done.returncode == 0, done.stdout + done.stderr

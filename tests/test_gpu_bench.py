"""bench/gpu.py: its dry run on any machine; on a GPU the sections that check, which no CPU can stand in for."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from conftest import ROOT

COMMAND = [sys.executable, str(ROOT / "bench" / "gpu.py")]


def bench(*options: str) -> subprocess.CompletedProcess:
    return subprocess.run([*COMMAND, *options], capture_output=True, text=True, cwd=ROOT, timeout=500)


@pytest.fixture(scope="module")
def dry_run(tmp_path_factory: pytest.TempPathFactory) -> dict:
    """All sections but kernels.py's table, which test_kernels_compiled.py compiles more of."""
    folder = tmp_path_factory.mktemp("report")
    done = bench("--dry-run", f"--output={folder}", "--only=environment,kernels,attention,model,run,profile,memory")
    assert done.returncode == 0, done.stdout + done.stderr
    (report,) = folder.glob("*.md")
    assert "Failed: nothing" in report.read_text()
    return json.loads(report.with_suffix(".json").read_text())


def test_dry_run_walks_every_section(dry_run: dict) -> None:
    assert list(dry_run) == ["environment", "kernels", "attention", "model", "run", "profile", "memory"]
    assert all(section["failure"] == "" and section["text"] for section in dry_run.values())
    assert dry_run["run"]["data"]["recompiles"] == 0 and len(dry_run["run"]["data"]["stages"]) == 4
    assert dry_run["profile"]["data"]["changed"] == []


def test_twice_the_micro_batches_keep_half_the_activations(dry_run: dict) -> None:
    """All that is kept grows with the tokens but the weights' scaled and quantised copies, less than a hundredth of it."""
    saved = [row["saved"] for row in dry_run["memory"]["data"]["rows"]]
    assert saved[0] / saved[1] == pytest.approx(2, rel=0.02) and saved[0] / saved[2] == pytest.approx(4, rel=0.05)


def test_a_failed_check_ends_with_code_1_and_is_in_the_report(tmp_path: Path) -> None:
    broken = tmp_path / "gpu.py"
    source = (ROOT / "bench" / "gpu.py").read_text()
    for old, new in (
        ("Path(__file__).resolve().parent.parent", f"Path({str(ROOT)!r})"),
        ("attend(q, k, v, band, 0.1)", "attend(q, k, v, band, 0.1 + wide)"),
    ):
        assert old in source
        source = source.replace(old, new)
    broken.write_text(source)
    done = subprocess.run(
        [sys.executable, broken, "--dry-run", f"--output={tmp_path}", "--only=attention,environment"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1 and "attention: FAILED" in done.stdout and "environment: ok" in done.stdout
    (report,) = tmp_path.glob("*.md")
    assert "Failed: attention." in report.read_text()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so() -> None:
    done = bench()
    assert done.returncode == 2 and "no CUDA device" in done.stderr and "--dry-run" in done.stderr


def test_unknown_section_is_refused() -> None:
    done = bench("--only=kernel")
    assert done.returncode == 2 and "no section kernel" in done.stderr


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("section", ["attention", "model", "run", "profile"])
def test_section_on_the_gpu(section: str, tmp_path: Path) -> None:
    done = bench(f"--only={section}", f"--output={tmp_path}")
    assert done.returncode == 0, done.stdout + done.stderr

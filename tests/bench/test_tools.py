"""bench/gpu.py and resumes.py: what they print is what the code does."""

import json
import os
import re
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

import triton_kernels as tk
from bench import gpu
from common import ROOT, SCRIPT, options, run_fresh, train_gpt
from data.shards import read_shard


def tool(name: str, *arguments: object, **how: object):
    return run_fresh([sys.executable, ROOT / "bench" / name, *arguments], timeout=1200, **how)


# gpu.py

VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "TORCHINDUCTOR_CACHE_DIR",
    "TRITON_CACHE_DIR",
)  # main sets them


def test_a_floor_is_what_one_computes_by_hand() -> None:
    """Of the last stage: 393,216 tokens, windows of 640 and 1,408 positions; a document a micro-batch."""
    h, T = train_gpt.Hyperparameters(), 24 * 16384
    batch = (None, None, torch.tensor([0, 2000, 2000]))
    last = train_gpt.make_plan(h)[h.num_scheduled_iterations - 1]
    found = gpu.floor(last, h, [batch])
    assert found["MLP kernels"] == pytest.approx(
        2 * T * 11 * 768 * 3072 * (1 / 1.5e15 + 1 / 7.9e14)
    )
    assert found["LM head"] == pytest.approx(3 * 2 * T * 768 * 50304 / 1.5e15)
    seen = {
        window: sum(min(i, window + 1) for i in range(1, 2001)) / 2000 for window in (640, 1408)
    }
    paired = sum(min(i, 641) for i in range(1, 4001)) / 4000
    # Five queries by keys backward, two forward: of four plain short layers, two long, four paired.
    keys = 4 * seen[640] + 2 * seen[1408] + 4 * paired
    assert found["attention"] == pytest.approx(7 * 2 * T * 768 * keys / 6e14)
    assert sum(found.values()) > sum(gpu.floor(last, h).values())


def dry_run(folder: Path, plan: str, *arguments: str) -> dict[str, dict]:
    """The sections' results, all of which passed."""
    how = ["--dry-run", "--minutes=60", f"--output={folder}", *arguments]
    done = tool("gpu.py", f"--{plan}", *how)
    assert done.returncode == 0, done.stdout + done.stderr
    (report,) = folder.glob("*.md")
    assert "Failed: nothing" in report.read_text() and report.read_text() in done.stdout
    found = json.loads(report.with_suffix(".json").read_text())
    assert list(found) == list(gpu.PLANS[plan].needs) and all(x["text"] for x in found.values())
    return found


@pytest.mark.slow
def test_a_dry_run_of_the_first_hour_passes_and_leaves_a_log(tmp_path: Path) -> None:
    found = dry_run(tmp_path, "first")
    stages = found["run"]["data"]["stages"]
    assert [x["stage"] for x in stages] == ["stage 1", "stage 2", "stage 3", "extension"]
    assert all(x["seconds"] > 0 for x in stages)
    assert all(x.startswith("tests/kernels/") for x in found["tests"]["data"]["passed"])
    assert found["run"]["data"]["outcomes"] and found["loss"]["data"]["outcomes"]
    (log,) = tmp_path.glob("*-run.txt")
    again = tmp_path / "again"
    done = run_fresh([sys.executable, ROOT / "records/extract.py", log, again])
    assert done.returncode == 0, done.stderr
    assert (again / "train_gpt.py").read_bytes() == SCRIPT.read_bytes()


@pytest.mark.slow
def test_a_dry_run_of_the_second_passes(tmp_path: Path) -> None:
    variants = [f"{SCRIPT} triton_kernels.SOFTCAP=20.0", str(ROOT / "bench/reference.py")]
    found = dry_run(tmp_path, "second", *(f"--variant={x}" for x in variants))
    # Of each stage, with Adam or not, model and optimizer.
    assert len(found["profile"]["data"]) == 3 * 2 * 2
    assert all(len(x["top"]) == 40 for x in found["profile"]["data"] if "model" in x["step"])
    names = ["train_gpt.py", *variants, gpu.GATES, gpu.TABLES]
    rounds = found["ab"]["data"]["rounds"]
    expected = [(x, y) for x in ("stage 1", "stage 3") for y in names]
    assert [(x["stage"], x["variant"]) for x in rounds] == expected
    assert found["ab"]["data"]["outcomes"].keys() >= {gpu.GATES, gpu.TABLES}


FAULTY = """
import os, signal, time
from bench import gpu
def killed(bench):
    print("half of it", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
gpu.SECTIONS |= dict(run=killed, tests=lambda bench: time.sleep(600))
sys.exit(gpu.main())
"""


@pytest.mark.slow
def test_a_section_that_is_killed_or_hangs_leaves_the_others_in_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    script = tmp_path / "faulty.py"
    script.write_text(f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{FAULTY}")
    needs = dict(run=200, tests=1, environment=300, ab=1e6)  # seconds: nothing is left beside these
    monkeypatch.setattr(gpu.signal, "signal", lambda *_: None)  # of this process
    monkeypatch.setattr(gpu, "STARTED", time.monotonic())
    monkeypatch.setattr(gpu, "CHILD", [sys.executable, script])
    monkeypatch.setitem(gpu.PLANS, "first", gpu.PLANS["first"]._replace(needs=needs))
    for name in VARIABLES:
        monkeypatch.setenv(name, "")
    assert gpu.main(["--first", "--dry-run", f"--output={tmp_path}", "--minutes=10"]) == 1
    (report,) = tmp_path.glob("*.md")
    text = report.read_text()
    assert "Failed: run, tests, ab." in text and text in capfd.readouterr().out
    assert "killed by SIGKILL" in text and "half of it" in text
    assert "ended at its limit" in text and "left out: " in text
    assert f"| PyTorch | {torch.__version__} |" in text
    assert "| 130 to 200 | not measured |" in text


def test_a_failed_check_is_in_the_report_and_leaves_the_others_their_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def fails(bench: gpu.Bench) -> tuple:
        calls.append("section")
        raise RuntimeError("recompiled\nwhat was found")

    monkeypatch.setitem(gpu.SECTIONS, "run", fails)
    for name in VARIABLES:
        monkeypatch.setenv(name, "")
    sections = ["--dry-run", f"--output={tmp_path}", "--section=run,environment"]
    assert gpu.main(sections) == gpu.main(sections) == 1
    reports = sorted(tmp_path.glob("*.md"))
    assert len(reports) == 2  # the first stays
    text = reports[0].read_text()
    assert "Failed: run." in text and "what was found" in text and "## environment" in text
    assert calls == 2 * ["section"]


def test_sections_take_the_graphs_of_a_run() -> None:
    """Their key holds what a run imports of ours, and nothing of the bench."""
    code = "import train_gpt; own = train_gpt.SOURCES.imported(); from bench import gpu; "
    code += "print(own == gpu.recipe_sources() != train_gpt.SOURCES.imported())"
    done = run_fresh([sys.executable, "-c", code], cwd=ROOT)
    assert done.stdout == "True\n", done.stderr


def test_documents_to_time_with_are_as_long_as_finewebs(tmp_path: Path) -> None:
    """Half have 480 tokens or more; e^0.95 times that has one in 6.3: a σ more. Of 10,000 draws,
    shares have a standard deviation of 0.5 %. All bytes of the text are there."""
    text = tmp_path / "text.txt"
    text.write_bytes(b"abcdefghij" * 700_000)
    gpu.make_shards(text, tmp_path / "shards")
    shards = [read_shard(x) for x in sorted((tmp_path / "shards").glob("text_*.bin"))]
    tokens = np.concatenate(shards)
    assert (tokens < 256).sum() == 7_000_000
    lengths = np.diff(np.flatnonzero(tokens == 256))
    assert len(lengths) > 10_000 and lengths.max() <= 2048
    assert abs((lengths >= 480).mean() - 0.5) < 0.02
    assert abs((lengths >= 480 * np.e**0.95).mean() - 0.1587) < 0.02


def test_constants_change_inside_and_come_back_after_an_error() -> None:
    before = tk.QUANTIZE["BLOCK"]
    changes = ["triton_kernels.QUANTIZE.BLOCK=64", "train_gpt.MUDD_SCALE=(2,)"]
    with pytest.raises(KeyError, match="NONE"):
        with gpu.constants([*changes, "triton_kernels.QUANTIZE.NONE=1"], train_gpt):
            pass
    with pytest.raises(ZeroDivisionError), gpu.constants(changes, train_gpt):
        assert tk.QUANTIZE["BLOCK"] == 64 and train_gpt.MUDD_SCALE == (2,)
        raise ZeroDivisionError
    assert tk.QUANTIZE["BLOCK"] == before and train_gpt.MUDD_SCALE == 0.1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("section", [x for x in gpu.SECTIONS if x != "tests"])
def test_section_passes_on_the_gpu(section: str, tmp_path: Path) -> None:
    done = tool("gpu.py", f"--section={section}", f"--output={tmp_path}")
    assert done.returncode == 0, done.stdout + done.stderr


# resumes.py


def resumes(script: Path, shards: Path, folder: Path):
    own = ("run_id", "log_dir", "preset", "num_scheduled", "num_extension", "val_every")
    given = [x for x in options(shards, folder) if not x.startswith(tuple(f"--{y}" for y in own))]
    alone = {**os.environ, "RANKS": "1"}
    return tool("resumes.py", script, "--steps=6", "--preset=demo", *given, env=alone)


@pytest.mark.slow
def test_the_recipe_resumes_to_the_same_bits(shards: Path, tmp_path: Path) -> None:
    done = resumes(SCRIPT, shards, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r": 6 steps, resumed after 3 and 4: the same bits, \d\d entries", done.stdout)


@pytest.mark.slow
def test_an_idea_that_does_something_at_every_third_step_does_not(
    shards: Path, tmp_path: Path
) -> None:
    """It counts its updates, and no checkpoint holds the count."""
    source = SCRIPT.read_text()
    step = "        self.optimizer.step(now.step, now.lr_factor, now.momentum)\n"
    assert source.count(step) == 1
    count = "        self.calls = getattr(self, 'calls', 0) + 1\n"
    count += "        now = now._replace(momentum=now.momentum * (0.5, 1, 1)[self.calls % 3])\n"
    idea = ROOT / "ideas" / f"third_{tmp_path.name}.py"
    idea.parent.mkdir(exist_ok=True)
    idea.write_text(source.replace(step, count + step))
    try:
        done = resumes(idea, shards, tmp_path)
    finally:
        idea.unlink()
    assert done.returncode == 1, done.stdout + done.stderr
    assert re.search(r"resumed after step 4: \d+ of \d+ entries differ at the end", done.stdout)

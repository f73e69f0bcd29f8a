"""bench/communication.py, gpu.py, kernels.py, resumes.py: what they print is what the code does."""

import json
import re
import sys
from pathlib import Path

import pytest
import torch

from bench import communication, gpu
from common import ROOT, SCRIPT, options, run_fresh, train_gpt

README = (ROOT / "bench" / "README.md").read_text(encoding="utf-8")


def tool(name: str, *arguments: object, **how: object):
    return run_fresh([sys.executable, ROOT / "bench" / name, *arguments], timeout=300, **how)


# communication.py


def test_the_readme_shows_the_sums_of_communication(capsys: pytest.CaptureFixture) -> None:
    communication.main([])
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| **")]
    assert len(lines) == 3 and [line for line in lines if line not in README] == []


# gpu.py


@pytest.mark.slow
def test_every_section_of_a_dry_run_passes_and_reports(tmp_path: Path) -> None:
    done = tool("gpu.py", "--dry-run", f"--output={tmp_path}")
    assert done.returncode == 0, done.stdout + done.stderr
    (report,) = tmp_path.glob("*.md")
    assert "Failed: nothing" in report.read_text()
    found = json.loads(report.with_suffix(".json").read_text())
    assert [x for x, one in found.items() if one["text"] and not one["failure"]] == list(
        gpu.SECTIONS
    )
    stages = found["run"]["data"]["stages"]
    names = ["stage 1", "stage 2", "stage 3", "extension"]
    assert [x["stage"] for x in stages] == names and all(x["seconds"] > 0 for x in stages)
    # Of each stage, with Adam or not, model and optimizer.
    assert len(found["profile"]["data"]) == 3 * 2 * 2


def test_a_failed_check_is_in_the_report_and_leaves_the_others_their_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(bench: gpu.Bench) -> tuple:
        raise gpu.SectionError("attention is off", "what was found", {})

    monkeypatch.setitem(gpu.SECTIONS, "attention", fails)
    for name in ("CUDA_VISIBLE_DEVICES", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        monkeypatch.setenv(name, "")  # which main sets
    sections = ["--dry-run", f"--output={tmp_path}", "--section=attention,environment"]
    assert gpu.main(sections) == gpu.main(sections) == 1
    reports = sorted(tmp_path.glob("*.md"))
    assert len(reports) == 2  # the first stays
    text = reports[0].read_text()
    assert "Failed: attention." in text and "what was found" in text and "## environment" in text


def test_stages_are_the_schedules() -> None:
    h = train_gpt.Hyperparameters(num_scheduled_iterations=45, num_extension_iterations=5)
    thirds = {"stage 1": range(15), "stage 2": range(15, 30), "stage 3": range(30, 45)}
    assert gpu.stages_of(h) == {**thirds, "extension": range(45, 50)}


def test_operations_of_a_token_at_the_records_size() -> None:
    """By hand: ten layers' attention, eleven layers' MLPs, the LM head; twice forward, four times
    backward."""
    weights = 10 * 4 * 768 * 768 + 11 * 2 * 3072 * 768 + 768 * 50304
    assert gpu.flops_per_token(train_gpt.Hyperparameters()) == 6 * weights


KERNELS = {
    "triton_per_fused__to_copy_mul_pow_mean_rsqrt_3": "elementwise and other",  # a fused norm
    "triton_poi_fused_cat_copy_sigmoid_7": "elementwise and other",
    "transpose_kernel": "copies",
    "Memcpy DtoD (Device -> Device)": "copies",
    "nvjet_tst_128x256_64x4_2x1_v_bz_coopA_NNT": "matmuls",
    "void flash::flash_fwd_kernel<Flash_fwd_kernel_traits>": "attention",
    "loss_kernel": "loss",
}


@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_is_counted_as_what_it_does(name: str) -> None:
    assert gpu.kind_of(name) == KERNELS[name]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("section", ["attention", "model", "run", "profile"])
def test_section_passes_on_the_gpu(section: str, tmp_path: Path) -> None:
    done = tool("gpu.py", f"--section={section}", f"--output={tmp_path}")
    assert done.returncode == 0, done.stdout + done.stderr


# resumes.py


def resumes(script: Path, shards: Path, folder: Path):
    own = ("run_id", "log_dir", "preset", "num_scheduled", "num_extension", "val_every")
    given = [x for x in options(shards, folder) if not x.startswith(tuple(f"--{y}" for y in own))]
    return tool("resumes.py", script, "--steps=6", "--preset=demo", *given)


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
    step = "        self.optimizer.step(step)\n"
    assert source.count(step) == 1
    count = "        self.calls = getattr(self, 'calls', 0) + 1\n"
    count += "        self.optimizer.momentum *= 0.5 if self.calls % 3 == 0 else 1\n"
    idea = ROOT / "ideas" / f"third_{tmp_path.name}.py"
    idea.parent.mkdir(exist_ok=True)
    idea.write_text(source.replace(step, count + step))
    try:
        done = resumes(idea, shards, tmp_path)
    finally:
        idea.unlink()
    assert done.returncode == 1, done.stdout + done.stderr
    assert re.search(r"resumed after step 4: \d+ of \d+ entries differ at the end", done.stdout)

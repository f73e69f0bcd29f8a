"""Public record 61 stays: the source in its record's log gives the figures of an independent implementation, and trains.

What that recipe and this one share is held against the same figures: an idea that changes it fails here, and that is all right.
"""

import functools
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import train_gpt
from common import HAS_TRITON, ROOT, ends_with, options, run_fresh
from sample import sample

RECORD_61 = ROOT / "records" / "2026-11-22_Record_61"
FOLDER = Path(__file__).parent / "parity"
SHARED = "attn mlp smear_gate skip_gate attn_gate_bank ve_gate_bank x0_lambdas lm_head embed".split()


@functools.cache
def figures(name: str) -> dict:
    return json.loads((FOLDER / f"{name}.json").read_text())


# Two sources


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with all that the first log of record 61 holds."""
    folder = tmp_path_factory.mktemp("extracted") / "again"
    command = [sys.executable, ROOT / "records" / "extract.py", min(RECORD_61.glob("*.txt")), folder]
    run_fresh(command, check=True)
    if not HAS_TRITON:  # a log holds what was imported, and that run had Triton
        shutil.copy(ROOT / "no_triton.py", folder)
    return folder


@pytest.fixture(scope="module")
def record_61(source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict:
    """What its source measures, where nothing else of the project can be imported."""
    command, elsewhere = [sys.executable, "-P", FOLDER / "measure.py", source], tmp_path_factory.mktemp("elsewhere")
    how = {"cwd": elsewhere, "env": {**os.environ, "PYTHONPATH": ""}, "timeout": 200}
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, **how).stdout)


@functools.cache
def this_script(kind: str) -> dict:
    spec = importlib.util.spec_from_file_location("measure", FOLDER / "measure.py")
    measure = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(measure)
    return getattr(measure, f"{kind}_figures")(train_gpt)


# Model, fp32. The two implementations behind the figures agreed to 1e-6; sums in another order stay below ten times that.


def test_losses_and_gradients_are_the_records(record_61: dict) -> None:
    found, expected = record_61["model"], figures("model")
    for name in ("train_loss", "eval_loss", "grad_norm"):
        assert found[name] == pytest.approx(expected[name], rel=1e-5), name
    assert found["grad_norm"].keys() == expected["grad_norm"].keys()


# Orthogonalisation, in bf16: single numbers are off by up to 2⁻⁸, sums over thousands of them far less. The smallest singular
# value of a square matrix is near zero and has no more than bf16's noise for digits.


def assert_orthogonalised(found: dict) -> None:
    for name, expected in figures("orthogonalise").items():
        one = found[name]
        assert one["dtype"] == "torch.bfloat16"
        assert one["polar_norm"] == pytest.approx(expected["polar_norm"], rel=1e-3)
        assert one["polar_probe"] == pytest.approx(expected["polar_probe"], abs=1e-2 * expected["polar_norm"])
        assert (one["sv_min"], one["sv_max"]) == pytest.approx((expected["sv_min"], expected["sv_max"]), abs=1e-2)
        assert one["normuon_norm"] == pytest.approx(expected["normuon_norm"], rel=1e-3)
        assert one["normuon_probe"] == pytest.approx(expected["normuon_probe"], abs=1e-2 * expected["normuon_norm"])
        assert one["second_moment_sum"] == pytest.approx(expected["second_moment_sum"], rel=1e-4)


def test_orthogonalisation_is_the_records(record_61: dict) -> None:
    assert_orthogonalised(record_61["orthogonalise"])


def test_orthogonalisation_here_is_still_the_records() -> None:
    assert_orthogonalised(this_script("orthogonalise"))


# Optimizer, in the training dtypes. Adam is fp32 arithmetic rounded once, so it agrees to 1e-6; a bank's update is bf16 in
# places, so its norm agrees to 1e-4 and its probe to a hundredth of that.


def assert_steps(found: dict, labels: list[str]) -> None:
    expected = figures("optimizer")
    for step, (norms, probes) in enumerate(zip(expected["norm_after_step"], expected["probe_after_step"], strict=True)):
        for label in labels:
            for_norm, for_probe = (1e-4, 1e-2) if label in ("attn", "mlp") else (1e-6, 1e-6)
            norm, probe = (found[f"{kind}_after_step"][step][label] for kind in ("norm", "probe"))
            assert norm == pytest.approx(norms[label], rel=for_norm), (label, step)
            assert probe == pytest.approx(probes[label], abs=for_probe * norms[label]), (label, step)
    assert found["lr"] == expected["lr"] and found["momentum"] == pytest.approx(expected["momentum"], rel=1e-12)


def test_steps_are_the_records(record_61: dict) -> None:
    labels = [*figures("optimizer")["norm_after_step"][0]]
    assert set(labels) == record_61["optimizer"]["norm_after_step"][0].keys() > set(SHARED)
    assert_steps(record_61["optimizer"], labels)


def test_steps_of_what_is_shared_are_still_the_records() -> None:
    assert_steps(this_script("optimizer"), SHARED)


# The log is the record


def test_the_records_source_trains_and_its_checkpoint_is_not_taken_here(
    source: Path, shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """By what run.sh starts; its log holds the source that the record's has. A rank of that source, through and told so, may
    abort while its interpreter ends, once in some hundred runs."""
    given = [x for x in options(shards, tmp_path, save_every=8) if "bigram_rows" not in x]
    command = [sys.executable, ROOT / "launch" / "start.py", source / "train_gpt.py", *given]
    run = run_fresh(command, env={**os.environ, "RANKS": "2"})
    assert run.returncode == 0 or "terminate called without an active exception" in run.stderr, run.stderr
    log = (tmp_path / "logs" / "run.txt").read_text()
    assert "step:8/8 val_loss:" in log and (source / "train_gpt.py").read_text() in log

    checkpoint = tmp_path / "logs" / "run" / "step_000008.pt"
    message = (
        "step_000008.pt cannot be resumed: its model is another recipe's: it holds ve0, ve1, ve2, "
        "this script wants bigram_embed, value_embeds: use its own sources"
    )
    ends_with(capsys, options(shards, tmp_path, resume=checkpoint), message, code=1)
    with pytest.raises(ValueError, match=message):
        sample(train_gpt, f"{checkpoint}", "def ", 3, 1.0)

"""Public record 61 stays: the source in its record's log gives the figures of an independent
implementation, and trains.

What that recipe and this one have in common is held against the same figures: an idea that changes
it fails here, and that is all right.
"""

import functools
import json
import os
import sys
from pathlib import Path

import pytest

import train_gpt
from common import HAS_TRITON, ROOT, options, run_fresh
from sample import load_script

LOG = ROOT / "records/2026-11-22_Record_61/seed0.txt"
FOLDER = Path(__file__).parent / "parity"
COMMON = ("smear_gate", "skip_gate", "attn_gate_bank", "lm_head", "embed")


@functools.cache
def figures(name: str) -> dict:
    return json.loads((FOLDER / f"{name}.json").read_text())


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with all that the log holds."""
    if not HAS_TRITON:
        pytest.skip("a log holds what was imported, and that run had Triton")
    folder = tmp_path_factory.mktemp("extracted") / "again"
    run_fresh([sys.executable, ROOT / "records/extract.py", LOG, folder], check=True)
    return folder


@pytest.fixture(scope="module")
def record_61(source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict:
    """What its source measures, where nothing else of the project can be imported."""
    command = [sys.executable, "-P", FOLDER / "measure.py", source]
    environment = {**os.environ, "PYTHONPATH": ""}
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    return json.loads(run_fresh(command, check=True, cwd=elsewhere, env=environment).stdout)


@functools.cache
def this_script(kind: str) -> dict:
    return getattr(load_script(FOLDER / "measure.py"), f"{kind}_figures")(train_gpt)


# Model, fp32. The two implementations behind the figures agreed to 1e-6; sums in another order stay
# below ten times that.


def test_losses_and_gradients_are_the_records(record_61: dict) -> None:
    found = record_61["model"]
    expected = figures("model")
    assert found["grad_norm"].keys() == expected["grad_norm"].keys()
    for name in ("train_loss", "eval_loss", "grad_norm"):
        assert found[name] == pytest.approx(expected[name], rel=1e-5), name


# Orthogonalization, in bf16: single numbers are off by up to 2⁻⁸, sums over thousands of them far
# less. The smallest singular value of a square matrix is near zero and has no more than bf16's noise
# for digits.


def assert_orthogonalized(found: dict) -> None:
    for name, expected in figures("orthogonalise").items():
        one = found[name]
        assert one["dtype"] == "torch.bfloat16"
        for figure in ("sv_min", "sv_max"):
            assert one[figure] == pytest.approx(expected[figure], abs=1e-2)
        for kind in ("polar", "normuon"):
            norm = expected[f"{kind}_norm"]
            assert one[f"{kind}_norm"] == pytest.approx(norm, rel=1e-3)
            probe = expected[f"{kind}_probe"]
            assert one[f"{kind}_probe"] == pytest.approx(probe, abs=1e-2 * norm)
        moment = expected["second_moment_sum"]
        assert one["second_moment_sum"] == pytest.approx(moment, rel=1e-4)


def test_orthogonalization_is_the_records(record_61: dict) -> None:
    assert_orthogonalized(record_61["orthogonalise"])


def test_orthogonalization_here_is_still_the_records() -> None:
    assert_orthogonalized(this_script("orthogonalise"))


# Optimizer, in the training dtypes. Adam is fp32 arithmetic rounded once, so it agrees to 1e-6; a
# bank's update is bf16 in places, so its norm agrees to 1e-4 and its probe to a hundredth of that.


def assert_steps(found: dict, labels: tuple[str, ...]) -> None:
    expected = figures("optimizer")
    for step, norms in enumerate(expected["norm_after_step"]):
        probes = expected["probe_after_step"][step]
        for label in labels:
            for_norm, for_probe = (1e-4, 1e-2) if label in ("attn", "mlp") else (1e-6, 1e-6)
            norm = found["norm_after_step"][step][label]
            probe = found["probe_after_step"][step][label]
            assert norm == pytest.approx(norms[label], rel=for_norm), (label, step)
            assert probe == pytest.approx(probes[label], abs=for_probe * norms[label])
    assert len(found["norm_after_step"]) == len(expected["norm_after_step"])
    assert found["lr"] == expected["lr"]
    assert found["momentum"] == pytest.approx(expected["momentum"], rel=1e-12)


def test_steps_are_the_records(record_61: dict) -> None:
    labels = figures("optimizer")["norm_after_step"][0].keys()
    assert labels == record_61["optimizer"]["norm_after_step"][0].keys() > set(COMMON)
    assert_steps(record_61["optimizer"], tuple(labels))


def test_steps_of_what_is_common_are_still_the_records() -> None:
    assert_steps(this_script("optimizer"), COMMON)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", "12")
def test_records_source_trains_and_its_log_holds_it(
    source: Path, shards: Path, tmp_path: Path, ranks: str
) -> None:
    """By what run.sh starts, with the launch/ and runtime/ that the log brings."""
    given = [x for x in options(shards, tmp_path) if "bigram_rows" not in x]
    command = [sys.executable, ROOT / "runtime/launch.py", source / "train_gpt.py", *given]
    run = run_fresh(command, env={**os.environ, "RANKS": ranks})
    assert run.returncode == 0, run.stderr
    log = (tmp_path / "logs/run.txt").read_text()
    assert "step:8/8 val_loss:" in log and (source / "train_gpt.py").read_text() in log

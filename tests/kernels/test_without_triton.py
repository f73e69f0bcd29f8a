"""Where Triton has no wheel the trainer runs all the same."""

import os
import sys
from pathlib import Path

import pytest

from common import ROOT, options, run_fresh


@pytest.fixture
def blocked(tmp_path: Path) -> dict[str, str]:
    """An environment whose interpreters find no Triton."""
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text("import sys\nsys.modules['triton'] = None\n")
    paths = os.pathsep.join([f"{site}", f"{ROOT}"])
    return {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "RANKS": "1"}


def test_a_run_needs_no_triton(shards, tmp_path, blocked) -> None:
    steps = dict(num_scheduled_iterations=2, num_extension_iterations=0)
    arguments = options(shards, tmp_path, sample_tokens=5, **steps)
    command = [sys.executable, "runtime/launch.py", "train_gpt.py", *arguments]
    done = run_fresh(command, cwd=ROOT, env=blocked, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "\nstep:2/2 val_loss" in (tmp_path / "logs" / "run.txt").read_text()


@pytest.mark.slow
def test_the_tests_are_found_without_triton(blocked) -> None:
    """All but those of kernels, which say so."""
    pytest_ = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command = [*pytest_, "--collect-only", "tests/kernels", "tests/recipe"]
    found = run_fresh(command, cwd=ROOT, env=blocked, timeout=120)
    assert found.returncode == 0, found.stdout[-2000:] + found.stderr
    assert "kernels/test_references.py" in found.stdout

"""Where Triton has no wheel the trainer runs, and a kernel that is launched says what it needs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import no_triton
from common import ROOT, options


@pytest.fixture
def blocked(tmp_path: Path) -> dict[str, str]:
    """An environment whose interpreters find no Triton."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text("import sys\nsys.modules['triton'] = None\n")
    return {**os.environ, "PYTHONPATH": f"{tmp_path / 'site'}", "OMP_NUM_THREADS": "1", "RANKS": "1"}


def test_a_run_needs_no_triton(shards, tmp_path, blocked) -> None:
    more = options(shards, tmp_path, sample_tokens=5, num_scheduled_iterations=2, num_extension_iterations=0)
    command = [sys.executable, "launch/start.py", "train_gpt.py", *more]
    done = subprocess.run(command, cwd=ROOT, env=blocked, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    log = (tmp_path / "logs" / "run.txt").read_text()
    assert "\nstep:2/2 val_loss" in log and "⟫" in log and "Triton none" in log and "# no_triton.py" in log


def test_the_tests_are_found_without_triton(blocked) -> None:
    """All but those of kernels, which say so. ./test.sh itself was run there too: README."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", "tests"]
    found = subprocess.run(command, cwd=ROOT, env=blocked, capture_output=True, text=True, timeout=120)
    assert found.returncode == 0 and "recipe/test_model.py" in found.stdout, found.stdout[-2000:] + found.stderr


def test_a_kernel_says_that_it_needs_triton(blocked) -> None:
    code = (
        "import torch, triton_kernels as tk\n"
        "with tk.kernels_of('cuda'): tk.transpose_copy(torch.ones(2, 3), torch.zeros(3, 2))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=blocked, capture_output=True, text=True, timeout=120)
    assert done.returncode and "RuntimeError: transpose_kernel needs Triton, which this environment lacks" in done.stderr


def test_the_stand_in_counts_like_triton() -> None:
    assert [no_triton.cdiv(x, 8) for x in (0, 1, 8, 9)] == [0, 1, 1, 2]
    assert [no_triton.next_power_of_2(n) for n in (1, 2, 3, 64, 65)] == [1, 2, 4, 64, 128]

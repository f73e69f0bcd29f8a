"""SCRIPT=idea.py ./test.sh tests/recipe: the script that is tested is the idea, in every process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import bench.communication
import cpu
import train_gpt
from common import ROOT, SCRIPT, run_fresh


def seen(rank: int = 0, world_size: int = 1) -> tuple[str, str, str, bool]:
    """The script's file, its marker and its cpu.py's, and whether the project's other modules have the same script."""
    marks = (getattr(module, "MARKER", "") for module in (train_gpt, cpu))
    return train_gpt.__file__, *marks, bench.communication.train_gpt is train_gpt


def test_every_process_tests_the_same_script(run_ranks) -> None:
    mark = os.environ.get("MARKER", "")
    assert [seen(), *run_ranks(2, seen)] == [(str(SCRIPT), mark, mark, True)] * 3


def test_script_may_be_an_idea_with_files_beside_it(tmp_path: Path) -> None:
    idea = tmp_path / "idea.py"
    for path, source in ((idea, SCRIPT), (tmp_path / "cpu.py", ROOT / "cpu.py")):
        path.write_text(source.read_text() + "\nMARKER = 'an idea'\n")
    test = f"tests/recipe/{Path(__file__).name}::{test_every_process_tests_the_same_script.__name__}"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n0", test]
    environment = {**os.environ, "SCRIPT": f"{idea}", "MARKER": "an idea"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_script_that_trains_nothing_is_named() -> None:
    """Each test failed of its own."""
    tool = ROOT / "records" / "plan.py"
    there = {**os.environ, "SCRIPT": f"{tool}", "PYTHONPATH": f"{ROOT}"}
    done = run_fresh([sys.executable, "-c", "import common"], cwd=ROOT / "tests", env=there)
    said = f"test.sh: error: SCRIPT={tool} is no training script: it has no Hyperparameters\n"
    assert (done.returncode, done.stderr) == (1, said)


@pytest.mark.parametrize("flag", ["-k", "-xk", "-vvk", "--deselect"])
def test_a_word_of_pytests_is_no_path(tmp_path: Path, flag: str) -> None:
    """Joined flags take one, too."""
    python = tmp_path / "python3"
    python.write_text('#!/bin/sh\ncase $1 in launch/*) echo "$0" ;; -c) echo 0 ;; *) echo "$@" ;; esac\n')
    python.chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    command = [ROOT / "test.sh", "-x", "tests/test_layout.py", flag, "nowhere"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.stdout.endswith(f" -x tests/test_layout.py {flag} nowhere\n"), done.stderr
    done = subprocess.run([*command[:-2], "-v", "nowhere"], env=environment, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (1, f"test.sh: error: no such tests: nowhere, in {ROOT}\n")


@pytest.mark.parametrize("where", ["here", "in the project"])
def test_the_script_is_the_one_where_the_user_stands(tmp_path: Path, where: str) -> None:
    """A train_gpt.py of his own is not the project's; a path that is nowhere here is the project's; one that is nowhere ends."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python3").write_text('#!/bin/sh\necho "$SCRIPT" >&2\nexit 7\n')
    (tmp_path / "bin" / "python3").chmod(0o755)
    if where == "here":
        (tmp_path / "train_gpt.py").touch()

    def said(script: str) -> tuple[int, str]:
        environment = {**os.environ, "SCRIPT": script, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
        done = subprocess.run([ROOT / "test.sh"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
        return done.returncode, done.stderr

    found = f"{tmp_path if where == 'here' else ROOT}/train_gpt.py"
    assert said("train_gpt.py") == said(found) == (7, f"{found}\n")
    unset = "test.sh: error: SCRIPT is empty: unset it, or name a script (is a shell variable not set?)\n"
    assert said("") == (1, unset)
    assert said("README.md") == (1, "test.sh: error: SCRIPT=README.md is no training script, such as train_gpt.py\n")
    assert said("nowhere.py") == (1, f"test.sh: error: no such script: SCRIPT=nowhere.py, in {tmp_path} or {ROOT}\n")

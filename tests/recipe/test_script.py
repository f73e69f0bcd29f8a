"""SCRIPT=ideas/idea.py ./test.sh tests/recipe: the script that is tested is the idea, in every
process."""

import os
import sys
from pathlib import Path

import bench.gpu
import train_gpt
from common import ROOT, SCRIPT, run_fresh


def seen(rank: int = 0, world_size: int = 1) -> tuple[str, str, bool]:
    """The script's file and marker, and whether the project's other modules have the same script."""
    mark = getattr(train_gpt, "MARKER", "")
    return train_gpt.__file__, mark, bench.gpu.train_gpt is train_gpt


def test_every_process_tests_the_same_script(run_ranks) -> None:
    expected = (str(SCRIPT), os.environ.get("MARKER", ""), True)
    assert [seen(), *run_ranks(2, seen)] == [expected] * 3


def test_script_may_be_an_idea(tmp_path: Path) -> None:
    idea = tmp_path / "idea.py"
    idea.write_text(SCRIPT.read_text() + "\nMARKER = 'an idea'\n")
    test = f"{__file__}::{test_every_process_tests_the_same_script.__name__}"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n0", test]
    environment = {**os.environ, "SCRIPT": str(idea), "MARKER": "an idea"}
    done = run_fresh(command, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr

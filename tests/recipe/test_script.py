"""SCRIPT=ideas/idea.py ./test.sh: an idea is what is tested, in every process."""

import os
import sys
from pathlib import Path

from common import SCRIPT, run_fresh, train_gpt

PRINT_MARKERS = """
import common, pathlib, test_script
print(test_script.marker(), *common.run_ranks(pathlib.Path.cwd(), 2, test_script.marker))
"""


def marker(rank: int = 0, world_size: int = 1) -> str:
    return train_gpt.MARKER


def test_every_process_tests_the_script_that_is_named(tmp_path: Path) -> None:
    (tmp_path / "idea.py").write_text(SCRIPT.read_text() + "\nMARKER = 'idea'\n")
    environment = {"SCRIPT": str(tmp_path / "idea.py"), "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", PRINT_MARKERS]
    run = run_fresh(command, cwd=tmp_path, env=os.environ | environment)
    assert run.stdout.split() == ["idea"] * 3, run.stderr

"""The data files stand alone: a recipe, whichever it is, imports them and never the other way."""

import sys
from pathlib import Path

import pytest

from common import run_fresh

ROOT = Path(__file__).resolve().parents[2]
OURS = {path.stem for path in ROOT.glob("*.py")} | {path.parent.name for path in ROOT.glob("*/*.py")}


@pytest.mark.parametrize(
    "module, imported",
    [
        ("data.shards", {"data", "data.shards"}),
        ("data.loader", {"data", "data.loader", "data.shards"}),
        ("data.encodings", {"data", "data.encodings", "data.shards"}),
    ],
)
def test_a_data_file_imports_nothing_of_the_recipe_or_the_runtime(module: str, imported: set[str]) -> None:
    assert {"train_gpt", "triton_kernels", "runtime", "data"} <= OURS
    command = [sys.executable, "-c", f"import sys, {module}; print(*sys.modules)"]
    modules = run_fresh(command, cwd=ROOT, check=True).stdout.split()
    assert {name for name in modules if name.partition(".")[0] in OURS} == imported

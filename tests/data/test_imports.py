"""The data files stand alone: a recipe, whichever it is, imports them and never the other way."""

import subprocess
import sys
from pathlib import Path

import pytest

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
    modules = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True, timeout=120).stdout.split()
    assert {name for name in modules if name.partition(".")[0] in OURS} == imported

"""What the tests of the tools share."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """run(tool, output, *options): the tool's main, in this process."""

    def run(tool: ModuleType, output: Path, *options: str) -> None:
        command = [tool.__name__, "--output", str(output), *options]
        monkeypatch.setattr(sys, "argv", command)
        tool.main()

    return run


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """The folder in which a tool makes its shards."""
    return tmp_path / "out"

"""Runs here are small: tests/quick_runs.py."""

import signal
import sys
import types

import pytest

from launch import start as launcher
from quick_runs import no_warm_up, one_thread  # noqa: F401


@pytest.fixture
def start(monkeypatch, capfd):
    """start(arguments): the exit code, all lines, and the ranks that would start: their number and command."""

    def run(*arguments: str) -> tuple[int, list[str], tuple]:
        started: list = []
        fake = lambda count, command, name, environ, marks: types.SimpleNamespace(wait=lambda: started.append((count, command)) or 0)
        with monkeypatch.context() as patch:
            patch.setattr(launcher, "Ranks", fake)
            patch.setattr(sys, "path", sys.path[:])
            patch.setattr(sys, "argv", sys.argv)
            patch.setattr(signal, "signal", lambda *_: None)
            capfd.readouterr()
            with pytest.raises(SystemExit) as exit_:
                launcher.main([*map(str, arguments)])
        printed = "".join(capfd.readouterr())
        return exit_.value.code, printed.splitlines(), started[0] if started else ()

    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)  # which PyTorch's compiler sets, in this process too
    monkeypatch.delenv("RANKS", raising=False)
    monkeypatch.delenv("SCRIPT", raising=False)
    return run

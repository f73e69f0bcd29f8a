"""Fixtures of runs so small that threads and warm-up would take most of their time."""

import os
import sys
from collections.abc import Iterator

import pytest

from common import train_gpt
from runtime.run import Run


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "sched_getaffinity", lambda _: {0})
        yield


@pytest.fixture
def no_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """It changes nothing: runtime/test_run.py. Here, and of ranks that are forks of this process: what run as their script."""
    monkeypatch.setattr(train_gpt, "warm_up", lambda *_: None)
    open_run = Run.open

    def opened(*given: object) -> None:
        open_run(*given)
        if hasattr(script := sys.modules["__main__"], "warm_up"):
            script.warm_up = lambda *_: None

    monkeypatch.setattr(Run, "open", opened)

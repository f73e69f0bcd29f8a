"""Fixtures of runs so small that threads and warm-up would take most of their time."""

import os
from collections.abc import Iterator

import pytest

from common import train_gpt


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "sched_getaffinity", lambda _: {0})
        yield


@pytest.fixture
def no_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """It changes nothing: runtime/test_run.py."""
    monkeypatch.setattr(train_gpt, "warm_up", lambda *_: None)

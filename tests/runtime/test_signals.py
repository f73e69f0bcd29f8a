"""Signals in one process: noted while it trains, obeyed at once at any other time."""

import os
import signal

import pytest

from runtime import ranks
from runtime.ranks import SIGNALS, Signals


class Ended(BaseException):
    """In place of os._exit."""


@pytest.fixture(autouse=True)
def no_exit(monkeypatch):
    def end(code: int) -> None:
        raise Ended(code)

    monkeypatch.setattr(ranks.os, "_exit", end)
    for name in ("RANK", ranks.LAUNCHER):
        monkeypatch.delenv(name, raising=False)


def send(*numbers: int) -> None:
    for number in numbers:
        os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", SIGNALS)
def test_the_first_signal_in_training_is_noted(number, capfd):
    """And it is the same one if it comes again within a second."""
    before = signal.getsignal(number)
    with Signals() as signals:
        signals.in_training = True
        send(number)
        send(number)
        assert signals.received == number
    assert capfd.readouterr().err.count("stopping after the step in progress") == 1
    assert signal.getsignal(number) == before


def test_a_second_signal_ends_the_process_at_once(monkeypatch):
    with Signals() as signals:
        signals.in_training = True
        send(signal.SIGTERM)
        with pytest.raises(Ended) as ended:
            send(signal.SIGHUP)
        assert ended.value.args == (128 + signal.SIGHUP,)
        monkeypatch.setattr(ranks, "SAME_SIGNAL", 0.0)
        with pytest.raises(Ended) as ended:
            send(signal.SIGTERM)
        assert ended.value.args == (128 + signal.SIGTERM,)


def test_a_signal_outside_of_training_ends_the_process_at_once():
    with Signals() as signals:
        with pytest.raises(Ended) as ended:
            send(signal.SIGUSR2)
        assert ended.value.args == (128 + signal.SIGUSR2,) and not signals.received


def test_an_ignored_signal_stays_ignored():
    """As SIGHUP by nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Signals() as signals:
            send(signal.SIGHUP)
            assert not signals.received
    finally:
        signal.signal(signal.SIGHUP, before)

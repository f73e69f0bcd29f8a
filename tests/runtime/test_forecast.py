"""runtime/forecast.py: the memory that a run needs, and the settings that fit a card. No GPU is needed."""

from types import SimpleNamespace

import pytest

from common import train_gpt
from runtime import forecast

GIB = 2**30
PROPOSALS = {80: "", 23: "--micro_batches=16 needs about 18.0 GiB", 5: "no --micro_batches needs"}


@pytest.mark.parametrize("free", PROPOSALS)
def test_micro_batches_are_proposed_that_fit_the_card(monkeypatch, free):
    """By what an H100 took above the state with 8: 24.94 GiB."""
    monkeypatch.setattr(forecast, "state_bytes", lambda _: int(5.53 * GIB))
    h = train_gpt.Hyperparameters()
    assert forecast.memory(h, 0, 393_216) / GIB == pytest.approx(24.94, rel=0.01)
    advice = forecast.advice(h, SimpleNamespace(), 393_216, 1, free * GIB)
    assert bool(advice) == bool(PROPOSALS[free]) and PROPOSALS[free] in advice

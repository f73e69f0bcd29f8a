"""The table of a newcomer's minutes is what lies between a run's lines."""

import pytest

from bench import first_minutes

LINES = [
    (2.0, "environment: python"), (2.5, "data: data/local_text.py"), (9.0, "data: ready (7.0 s)"),
    (9.5, "settings, data and room are checked; starting 2 ranks (0.5 s)"), (13.0, "log: x"), (13.5, "warm-up: every shape"),
    (16.0, "2,474,775 parameters, 2 ranks, warm-up 3 s"), (17.0, "step:0/2 val_loss:5.8 x"), (17.25, "step:1/2 train_time"),
    (17.5, "step:2/2 train_time"), (18.5, "step:2/2 val_loss:5.1"), (18.5, "peak memory resident"), (22.0, "sample, after"),
]  # fmt: skip


def test_phases_are_the_seconds_between_lines():
    assert [seconds for _, seconds in first_minutes.phases(LINES)] == [2.0, 7.0, 0.5, 4.0, 2.5, 1.0, 0.25, 1.25, 3.5]
    assert sum(seconds for _, seconds in first_minutes.phases(LINES)) == LINES[-1][0]


def test_a_run_without_a_line_is_named():
    with pytest.raises(SystemExit, match="no line like"):
        first_minutes.phases(LINES[:-1])

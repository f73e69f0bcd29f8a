"""The picture of a comparison shows the stages that the run's script tells."""

import pytest

pytest.importorskip("scipy", reason="pip install -r records/requirements.txt")
pytest.importorskip("matplotlib", reason="pip install -r records/requirements.txt")

from made_logs import ENVIRONMENT, make_log, step_lines

import plot
from runlog import parse_log


@pytest.mark.parametrize(
    "table, starts",
    [
        ("STAGES = (Stage(until=1/3, batch=8), Stage(until=2 / 3, batch=16), Stage(until=1.0, batch=24))", [0, 20, 40, 60]),
        ("STAGES = (Stage(until=1/4, batch=8), Stage(until=1, batch=16))", [0, 15, 60]),
        ("STAGES: tuple[Stage, ...] = (Stage(until=0.2), Stage(until=3/4/1), Stage(until=1))", [0, 12, 45, 60]),
        ("STAGES = (Stage(batch=8), Stage(batch=16), Stage(batch=24))", [0, 20, 40, 60]),
        ("STAGES = (Stage(8),)", [0, 60]),
        ("STAGES = ()", [60]),
    ],
)
def test_stages_begin_where_the_one_before_ends(table, starts):
    assert stages(table) == pytest.approx(starts)


@pytest.mark.parametrize(
    "table",
    [
        "STAGES = (Stage(until=THIRD), Stage(until=1))",
        "STAGES = (Stage(until=__import__('os').getpid()), Stage(until=1))",
        "STAGES = (Stage(until=1/0), Stage(until=1))",
        "STAGES = (Stage(until='1'), Stage(until=1))",
        "STAGES = (Stage(until=1/3), Stage(batch=16))",
        "STAGES = (Stage(until=2/3), Stage(until=1/3))",
        "STAGES = TABLE",
        "OTHERS = (Stage(until=1),)",
        "STAGES = (",
    ],
)
def test_stages_that_cannot_be_told_are_not_guessed(table):
    assert stages(table) == []


def stages(table):
    """The steps at which the stages of a script with this table begin, then its extension; 60 steps are scheduled of 64."""
    environment = ENVIRONMENT.replace("lr=0.5", "num_scheduled_iterations=60")
    script = f"from recipe import Stage\n\n{table}\n".encode()
    run = parse_log(make_log(script=script, environment=environment, lines=step_lines(64)))
    return [start for _, start in plot.stages(run)]

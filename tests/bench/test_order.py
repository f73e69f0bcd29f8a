"""bench/order.py: traces made by hand, and one of two gloo ranks from end to end."""

import json
import sys
from pathlib import Path

import pytest

from bench import order
from bench.order import Span
from common import ROOT, SCRIPT, TINY, options, run_fresh, tiny_settings, train_gpt


def made_rows(shift: float = 0.0, late: float = 0.0) -> list[list]:
    """The rows of a rank that reduces, updates and gathers a, then b; late: its launches, by so much."""
    # fmt: off
    rows = [
        ["a", "launch reduce", 0, 0, 0], ["a", "reduce", 0, 2, 800],
        ["b", "launch reduce", 0, 0, 0], ["b", "reduce", 0, 5, 400],
        ["a", "wait reduce", 0, 2, 0], ["a", "update", 2, 6, 0],
        ["a", "launch gather", 6, 6, 0], ["a", "gather", 6, 7, 800],
        ["b", "wait reduce", 6, 6, 0], ["b", "update", 6, 7, 0],
        ["b", "launch gather", 7, 7, 0], ["b", "gather", 7, 9, 400],
        ["a", "wait gather", 7, 7, 0], ["b", "wait gather", 7, 9, 0], ["", "step", 0, 9, 0],
    ]
    # fmt: on
    moved = shift + late
    return [[5, label, phase, a + moved, z + moved, size] for label, phase, a, z, size in rows]


def written(folder: Path, *ranks: list[list], device: str = "cuda") -> Path:
    path = folder / "made.trace.json"
    path.write_text(json.dumps([{"device": device, "rows": rows} for rows in ranks]))
    return path


def test_a_trace_is_read_back_as_the_step_that_made_it(tmp_path: Path) -> None:
    """Two ranks whose clocks differ by 100 s."""
    (step,) = order.read_trace(written(tmp_path, made_rows(), made_rows(shift=100)))
    assert step.scatter == step.work == ("a", "b")
    assert (step.seconds, step.exposed, step.skew) == (9, 4, 0)
    assert {name: span for name, span in step.spans.items() if span.seconds} == {
        "a reduce": (0, 2), "b reduce": (2, 5), "a update": (2, 6), "b update": (6, 7),
        "a gather": (6, 7), "b gather": (7, 9),
    }  # fmt: skip
    assert step.sent == {"a": 800, "b": 400}  # half of the whole each way, on two ranks


def test_a_late_rank_decides_when_a_collective_begins(tmp_path: Path) -> None:
    first = made_rows()
    for row in first:
        if row[2] in ("reduce", "wait reduce", "step"):
            row[4] += 3
    (step,) = order.read_trace(written(tmp_path, first, made_rows(late=1), device="cpu"))
    assert step.rank == 0 and step.skew == 1 and step.spans["a reduce"] == Span(1, 5)


def test_two_ranks_are_traced_from_end_to_end(
    shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """A run of the real script: each step has the recipe's orders, and every row of its table."""
    path = tmp_path / "run.trace.json"
    tool = [sys.executable, ROOT / "bench" / "order.py", "trace", SCRIPT]
    given = options(shards, tmp_path)
    done = run_fresh([*tool, "--steps=2:8", f"--output={path}", *given], timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    steps = {step.step: step for step in order.read_trace(path)}
    assert sorted(steps) == [2, 3, 4, 5, 6, 7]
    table = train_gpt.param_table(tiny_settings(shards, tmp_path))
    split = train_gpt.split_step(TINY["num_scheduled_iterations"])
    for number, step in steps.items():
        due = {x for x, row in table.items() if row.is_due(number)}
        due -= {x for x, row in table.items() if row.tied_to and number <= split}
        assert step.scatter == tuple(x for x in train_gpt.SCATTER_ORDER if x in due)
        assert step.work == tuple(x for x in train_gpt.WORK_ORDER if x in due)
        assert all(f"{x} {phase}" in step.spans for x in due for phase in ("reduce", "update"))
    order.main(["show", str(path)])
    assert {"NorMuon alone", "with Adam, split"} <= {
        line[3:].partition(":")[0] for line in capsys.readouterr().out.splitlines()
    }

"""bench/order.py: a trace made by hand, and one of two gloo ranks from end to end."""

import json
import sys
from pathlib import Path

import pytest

from bench import order
from common import ROOT, SCRIPT, TINY, options, run_fresh, tiny_settings, train_gpt


def test_a_trace_made_by_hand_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """b is reduced first and a updated first; a waits 2 s for its reduction, then b 1 s for its gather."""
    rows = [
        ["a", "update", 2, 6], ["a", "wait reduce", 0, 2], ["b", "update", 6, 7],
        ["b", "launch reduce", 0, 0], ["a", "launch reduce", 0.1, 0.1], ["b", "gather", 7, 9],
        ["b", "wait gather", 8, 9], ["", "step", 0, 9],
    ]  # fmt: skip
    path = tmp_path / "made.trace.json"
    path.write_text(json.dumps([[[5, *row] for row in rows]]))
    (step,) = order.read_trace(path)
    assert step.labels("launch reduce") == ("b", "a") and step.labels("update") == ("a", "b")
    assert (step.ms, step.exposed) == (9000, 3000)
    order.main(["show", str(path)])
    said = capsys.readouterr().out
    assert "| a | 0.00 | 0.00 | 2000 | 4000 | 0.00 | 0.00 |" in said
    assert "| 7000.000 | 9000.000 | b | gather |" in said


def test_two_ranks_are_traced_from_end_to_end(
    shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """A run of the real script: each step has the recipe's orders, and every row of its table."""
    path = tmp_path / "run.trace.json"
    tool = [sys.executable, ROOT / "bench" / "order.py", "trace", SCRIPT]
    given = options(shards, tmp_path)
    done = run_fresh([*tool, "--steps=2:8", f"--output={path}", *given], timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    steps = order.read_trace(path)
    assert [(x.rank, x.number) for x in steps] == [(r, n) for r in (0, 1) for n in range(2, 8)]
    table = train_gpt.param_table(tiny_settings(shards, tmp_path))
    split = train_gpt.split_step(TINY["num_scheduled_iterations"])
    for step in steps:
        due = {x for x, row in table.items() if row.is_due(step.number)}
        due -= {x for x, row in table.items() if row.tied_to and step.number <= split}
        scatter = tuple(x for x in train_gpt.SCATTER_ORDER if x in due)
        work = tuple(x for x in train_gpt.WORK_ORDER if x in due)
        assert step.labels("launch reduce") == scatter and step.labels("update") == work
        assert set(step.labels("reduce")) == set(step.labels("wait reduce")) == due
    order.main(["show", str(path)])
    assert {"NorMuon alone", "with Adam, split"} <= {
        line[3:].partition(":")[0] for line in capsys.readouterr().out.splitlines()
    }

"""bench/order.py: the model against steps worked by hand, the search against all orders, a trace of
two gloo ranks from end to end."""

import itertools
import json
import random
import sys
from pathlib import Path

import pytest

from bench import order
from bench.communication import STEPS, expected_calls, model_parameters
from bench.order import Orders, Problem, Slowdown, Span, Task, operations_of, simulate
from common import ROOT, SCRIPT, options, run_fresh, train_gpt
from train_gpt import Hyperparameters, param_table

# Two labels, by hand. In the order a, b: a's reduction 0–2, b's 2–5; a's update 2–6, b's 6–7; a's
# gather 6–7, b's 7–9.
AB = {"a": Task(reduce=2, update=4, gather=1), "b": Task(reduce=3, update=1, gather=2)}
A_FIRST = Orders(("a", "b"), ("a", "b"))
B_FIRST = Orders(("b", "a"), ("b", "a"))


def seconds(orders: Orders) -> float:
    return Problem(AB).seconds(orders)


# The model


def test_a_step_of_two_labels_runs_as_by_hand() -> None:
    assert simulate(operations_of(AB, A_FIRST)) == {
        "a reduce": (0, 2),
        "b reduce": (2, 5),
        "a update": (2, 6),
        "b update": (6, 7),
        "a gather": (6, 7),
        "b gather": (7, 9),
    }
    assert seconds(A_FIRST) == 9
    # b's reduction 0–3, a's 3–5; b's update 3–4, a's 5–9; b's gather 5–7, a's 9–10
    assert seconds(B_FIRST) == 10
    # reduced a, b but worked b, a: b's update waits for 5, a's ends at 10, a's gather at 11
    assert seconds(Orders(A_FIRST.scatter, B_FIRST.work)) == 11


def test_lanes_that_are_both_busy_slow_each_other() -> None:
    """a's update has 4 s of work at rate 1/2 beside b's reduction, 3 s of work at rate 3/4, from 2
    to 6: 2 s are left of it."""
    slowed = simulate(operations_of(AB, A_FIRST), Slowdown(compute=1.0, communication=1 / 3))
    assert slowed["b reduce"] == pytest.approx((2, 6))
    assert slowed["a update"] == pytest.approx((2, 8))


def test_a_tied_gradient_joins_before_the_reduction_and_is_copied_after_the_gather() -> None:
    """a travels 0–2; b's reduction follows 1 s of transposing, and travels 2–5; its copy 9–9.5."""
    tasks = {"a": AB["a"], "b": AB["b"]._replace(before=1, behind=0.5)}
    spans = simulate(operations_of(tasks, A_FIRST))
    assert spans["b before"] == (0, 1)
    assert spans["b reduce"] == (2, 5)
    assert spans["b behind"] == (9, 9.5)


def test_exposed_time_has_a_reason() -> None:
    operations = operations_of(AB, B_FIRST)
    spans = simulate(operations)
    found = order.exposures(operations, spans)
    expected = [(0, 3, "b update"), (4, 5, "a update"), (9, 10, "")]
    assert [(x.start, x.end, x.before) for x in found] == expected
    said = "a update waits for a reduce (ms: a reduce 1000.000)"
    assert order.reason(found[1], operations) == said


# The search


def random_problem(chance: random.Random) -> Problem:
    """Up to four labels, some alike, some without a gather, a tie, some slowed."""

    def time(often: float) -> float:
        return chance.choice((0, 1, 2, 3)) if chance.random() < often else 3 * chance.random()

    def rare() -> float:
        return 2 * chance.random() if chance.random() < 0.2 else 0

    labels = "abcd"[: chance.choice((1, 2, 3, 3, 4))]
    tasks = {x: Task(time(0.5), time(0.5), time(0.6), rare(), rare()) for x in labels}
    if len(tasks) > 2 and chance.random() < 0.3:
        tasks["b"] = tasks["a"]
    slowdown = Slowdown(chance.random(), chance.random()) if chance.random() < 0.5 else Slowdown()
    return Problem(tasks, slowdown)


@pytest.mark.parametrize("seed", range(12))
def test_no_orders_are_below_the_bounds_and_the_search_finds_the_best(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = random_problem(random.Random(seed))
    every = list(itertools.permutations(problem.tasks))
    pairs = itertools.product(every, every)
    best = min(problem.seconds(Orders(*pair)) for pair in pairs)
    assert order.lower_bound(problem) <= best + 1e-9
    found = order.search(problem, Orders(every[-1], every[0]))
    assert found.exact and found.seconds == pytest.approx(best, abs=1e-8)
    monkeypatch.setattr(order, "ALL_PAIRS", 0)
    local = order.search(problem, Orders(every[-1], every[0]))
    assert local.seconds == pytest.approx(best, rel=0.05) and local.bound <= best + 1e-9


def test_orders_that_nothing_beats_stay() -> None:
    problem = Problem(dict.fromkeys("cabde", Task(1, 1, 1)))
    start = Orders(tuple("bcaed"), tuple("bcaed"))
    assert order.search(problem, start).orders == start


# Costs


def test_a_collective_takes_its_hops_and_its_bytes_at_the_machines_rate() -> None:
    """mlp's padded bank in bf16, gathered: 7/8 of 12 × 2 × 3072 × 768 elements."""
    step, tied = STEPS["NorMuon alone"]
    tasks = order.tasks_of(Hyperparameters(), order.read_machine("8xh100"), 8, step, tied)
    sends = 7 / 8 * 2 * 12 * 2 * 3072 * 768
    assert tasks["mlp"].gather_bytes == sends
    assert tasks["mlp"].gather == pytest.approx(8e-6 + 7e-6 + sends / 300e9)


def test_bound_prints_what_the_readme_shows(capsys: pytest.CaptureFixture) -> None:
    order.main(["bound", "--machine=8xh100"])
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    readme = (ROOT / "bench" / "README.md").read_text(encoding="utf-8")
    assert len(rows) == 5 and [row for row in rows if row not in readme] == []


# Traces


def made_rows(shift: float = 0.0, late: float = 0.0) -> list[list]:
    """The rows of a rank that works AB in the order A_FIRST; late: its launches, by so much."""
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
    """Two ranks whose clocks differ by 100 s; made by hand from the model's own spans."""
    (step,) = order.read_trace(written(tmp_path, made_rows(), made_rows(shift=100)))
    assert step.orders == A_FIRST and step.skew == 0 and order.window(step.spans) == 9
    times = {label: task[:5] for label, task in step.tasks.items()}
    assert times == {label: task[:5] for label, task in AB.items()}
    assert step.spans == simulate(operations_of(step.tasks, step.orders))
    assert step.tasks["a"].reduce_bytes == 400  # half of the whole, on two ranks


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
    """A run of the real script: every collective of theory is seen, with its bytes; and the run's
    losses are those of a run without a trace."""
    path = tmp_path / "run.trace.json"
    tool = [sys.executable, ROOT / "bench" / "order.py", "trace", SCRIPT]
    given = options(shards, tmp_path)
    done = run_fresh([*tool, "--steps=2:8", f"--output={path}", *given], timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    steps = {step.step: step for step in order.read_trace(path)}
    assert sorted(steps) == [2, 3, 4, 5, 6, 7]
    h = order.settings([*given, "--preset=demo"])
    split = train_gpt.split_step(h.num_scheduled_iterations)
    for number, step in steps.items():
        tied = number <= split
        calls = expected_calls(model_parameters(h), param_table(h), 2, number, tied)
        sends = sum(task.reduce_bytes + task.gather_bytes for task in step.tasks.values())
        assert sends == sum(call.sent for call in calls.values())
        assert step.orders == order.recipe_orders(step.tasks)
    order.main(["show", str(path)])
    assert {"NorMuon alone", "with Adam, split"} <= {
        line[3:].partition(":")[0] for line in capsys.readouterr().out.splitlines()
    }

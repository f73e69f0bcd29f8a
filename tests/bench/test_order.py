"""bench/order.py: the model against hand-worked steps, the search against all orders, a trace of two gloo ranks end to end."""

import errno
import itertools
import json
import os
import random
import re
import shlex
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from bench import order, order_pictures, order_validation, schedule_costs, traces
from bench.communication import expected_calls, model_parameters
from bench.schedule_model import (
    COMPUTE, Forward, Interference, ModelError, Operation, Orders, Span, Task, critical_path, exposures,
    operations_of, reason, simulate, step_seconds,
)  # fmt: skip
from bench.schedule_search import Problem, flow_bound, overlap_bound, search
from common import ROOT, options, run_fresh, run_script, tiny_settings, train_gpt, without_stdout
from launch.console import PICTURES
from runtime.ranks import Ranks
from tracer import Tracer, steps_of
from train_gpt import SCATTER_ORDER, WORK_ORDER, Hyperparameters, param_table

# Two labels, by hand. In the order a, b: a's reduction 0–2, b's 2–5; a's update 2–6, b's 6–7; a's gather 6–7, b's 7–9.
AB = {"a": Task(reduce=2, update=4, gather=1), "b": Task(reduce=3, update=1, gather=2)}
A_FIRST, B_FIRST = Orders(("a", "b"), ("a", "b")), Orders(("b", "a"), ("b", "a"))


# -----------------------------------------------------------------------------
# The model


def test_a_step_of_two_labels_runs_as_by_hand() -> None:
    assert simulate(operations_of(AB, A_FIRST)) == {
        "a reduce": (0, 2), "b reduce": (2, 5), "a update": (2, 6), "b update": (6, 7), "a gather": (6, 7), "b gather": (7, 9),
    }  # fmt: skip
    # b's reduction 0–3, a's 3–5; b's update 3–4, a's 5–9; b's gather 5–7, a's 9–10
    assert step_seconds(AB, B_FIRST) == 10
    # reduced a, b but worked b, a: b's update waits for 5, a's ends at 10, a's gather at 11
    assert step_seconds(AB, Orders(A_FIRST.scatter, B_FIRST.work)) == 11


def test_lanes_that_are_both_busy_slow_each_other() -> None:
    """a's update has 4 s of work at rate 1/2 beside b's reduction, 3 s of work at rate 3/4, from 2 to 6: 2 s are left of it."""
    slowed = simulate(operations_of(AB, A_FIRST), Interference(compute=1.0, communication=1 / 3))
    assert slowed["b reduce"] == pytest.approx((2, 6)) and slowed["a update"] == pytest.approx((2, 8))


def test_two_channels_share_the_lane() -> None:
    """Reductions of 2 and 3 s at half rate: the first ends at 4, the second, 1 s of which is left, at 5."""
    spans = simulate(operations_of(AB, A_FIRST), channels=2)
    assert spans["a reduce"] == pytest.approx((0, 4)) and spans["b reduce"] == pytest.approx((0, 5))


def test_a_tied_gradient_joins_before_the_reduction_and_its_weights_come_after_the_gather() -> None:
    """a travels 0–2; b's reduction is launched after 1 s of transposing, and travels 2–5; its copy runs 9–9.5."""
    tasks = {"a": AB["a"], "b": AB["b"]._replace(before=1, behind=0.5)}
    spans = simulate(operations_of(tasks, A_FIRST))
    assert spans["b before"] == (0, 1) and spans["b reduce"] == (2, 5) and spans["b behind"] == (9, 9.5)
    alone = simulate(operations_of({"b": tasks["b"]}, Orders(("b",), ("b",))))
    assert alone["b reduce"] == (1, 4)  # nothing else travels while it is made
    later = simulate(operations_of({**tasks, "c": Task(1, 1)}, Orders(("b", "c", "a"), ("a", "b", "c"))))
    assert later["b reduce"].start == 1 and later["c reduce"].start == 4  # launched behind it, though ready


def test_the_next_forward_pass_waits_for_what_it_reads_alone() -> None:
    """It needs a, whose gather ends at 7, for 1 s, then b, at 9: it ends at 10, and would without a step after 2 s."""
    forward = (Forward("first", 1, ("a",)), Forward("then", 1, ("b",)))
    assert simulate(operations_of(AB, A_FIRST, forward))["first"] == (7, 8)
    assert step_seconds(AB, A_FIRST, forward=forward) == 8


def test_exposed_time_has_a_reason_and_the_critical_path_no_gaps() -> None:
    operations = operations_of(AB, B_FIRST)
    spans = simulate(operations)
    found = exposures(operations, spans)
    assert [(x.start, x.end, x.before) for x in found] == [(0, 3, "b update"), (4, 5, "a update"), (9, 10, "")]
    assert reason(found[1], operations) == "a update waits for a reduce (ms: itself a reduce 1000.000)"
    assert reason(found[2], operations) == "nothing is left to update (ms: still a gather 1000.000)"
    path = critical_path(operations, spans)
    assert path == ["b reduce", "a reduce", "a update", "a gather"]
    assert sum(spans[name].end - spans[name].start for name in path) == 10
    crossed = operations_of(AB, Orders(("a", "b"), ("b", "a")))
    first = exposures(crossed, simulate(crossed))[0]
    assert "itself b reduce 3000.000; behind a reduce 2000.000" in reason(first, crossed)


@pytest.mark.parametrize(
    "operations, message",
    [
        ([Operation("a", COMPUTE, 1, ("b",)), Operation("b", COMPUTE, 1)], "never ends: a waits for b"),
        ([Operation("a", COMPUTE, 1, ("c",))], "a is after c, which is no operation"),
        ([Operation("a", COMPUTE, 1), Operation("a", COMPUTE, 1)], "same name: a"),
        ([], "a step without operations"),
        ([Operation("a", "network", 1)], "no lane 'network'"),
        ([Operation("a", COMPUTE, float("nan"))], "a takes nan seconds"),
    ],
)
def test_a_step_that_cannot_run_is_told(operations: list[Operation], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        simulate(operations)


# -----------------------------------------------------------------------------
# The search


def random_problem(chance: random.Random) -> Problem:
    """Up to four labels, some alike, some without a gather, a tie or a forward pass, some with interference."""
    time = lambda often: chance.choice((0, 1, 2, 3)) if chance.random() < often else 3 * chance.random()
    rare = lambda: 2 * chance.random() if chance.random() < 0.2 else 0
    labels = "abcd"[: chance.choice((1, 2, 3, 3, 4))]
    tasks = {label: Task(time(0.5), time(0.5), time(0.6), rare(), rare(), rare()) for label in labels}
    if len(tasks) > 2 and chance.random() < 0.3:
        tasks["b"] = tasks["a"]
    slowdown = chance.choice((Interference(), Interference(chance.random(), chance.random())))
    forward = (Forward("first", 1, ("a",)), Forward("then", 2, tuple(tasks))) if chance.random() < 0.2 else ()
    return Problem(tasks, slowdown, chance.choice((1, 1, 2)), forward)


@pytest.mark.parametrize("seed", range(40))
def test_the_search_finds_the_best_of_all_orders_and_no_bound_is_above_it(seed: int) -> None:
    problem = random_problem(random.Random(seed))
    every = list(itertools.permutations(problem.tasks))
    best = min(problem.seconds(Orders(*pair)) for pair in itertools.product(every, every))
    found = search(problem, Orders(every[-1], every[0]))
    assert max(overlap_bound(problem), flow_bound(problem)) <= best + 1e-9
    assert found.exact and found.seconds == pytest.approx(best, abs=1e-8) and found.bound <= found.seconds
    assert problem.seconds(found.orders) == found.seconds


def test_orders_that_nothing_beats_stay() -> None:
    """Equal labels: every order is as fast."""
    problem = Problem(dict.fromkeys("cab", Task(1, 1, 1)))
    start = Orders(("b", "c", "a"), ("b", "c", "a"))
    assert search(problem, start).orders == start


def test_without_interference_or_ties_the_flow_bound_is_reached() -> None:
    chance = random.Random(3)
    problem = Problem({label: Task(*(chance.random() for _ in range(3))) for label in "abcdefg"})
    found = search(problem, Orders(tuple("abcdefg"), tuple("gfedcba")))
    assert found.seconds == pytest.approx(flow_bound(problem), rel=0.02)


# -----------------------------------------------------------------------------
# Costs


def test_collectives_send_what_the_theory_says_at_the_machines_rate() -> None:
    h, machine = Hyperparameters(), schedule_costs.read_machine("8xh100")
    for do_adam, tied in schedule_costs.KINDS.values():
        tasks = schedule_costs.tasks_of(h, machine, 8, do_adam, tied)
        calls = expected_calls(model_parameters(h), param_table(h), 8, do_adam, tied)
        assert {(label, phase): call.sent for (label, phase), call in calls.items()} == {
            (label, phase): getattr(task, f"{phase}_bytes")
            for label, task in tasks.items() for phase in ("reduce", "gather") if getattr(task, f"{phase}_bytes")
        }  # fmt: skip
    mlp = tasks["mlp"]
    assert mlp.gather == pytest.approx(8e-6 + 7e-6 + mlp.gather_bytes / 300e9)


def test_every_machine_says_where_its_values_come_from(tmp_path: Path) -> None:
    for path in schedule_costs.MACHINES.glob("*.json"):
        assert schedule_costs.read_machine(path.stem).bandwidth > 0
    broken = json.loads(path.read_text())
    broken["hop"]["source"] = ""
    (tmp_path / "mine.json").write_text(json.dumps(broken))
    with pytest.raises(ModelError, match="mine.json: hop: must be positive, and say its source"):
        schedule_costs.read_machine(f"{tmp_path}/mine.json")
    with pytest.raises(ModelError, match="--machine=nine.*: use .*8xh100"):
        schedule_costs.read_machine("nine")


def test_every_label_has_a_task_and_a_place_in_the_forward_pass() -> None:
    tasks = schedule_costs.tasks_of(Hyperparameters(), schedule_costs.read_machine("8xh100"), 8, True, False)
    assert set(tasks) == set(train_gpt.PARAM_TABLE)
    assert sorted(label for part in schedule_costs.next_forward(tasks) for label in part.needs) == sorted(tasks)


# -----------------------------------------------------------------------------
# Traces


def made_rows(shift: float = 0.0, late: float = 0.0) -> list[list]:
    """The rows of a rank that works AB in the order A_FIRST, in seconds; late: a's launch, and all that follows, by so much."""
    rows = [
        ["a", "launch reduce", 0, 0, 0], ["a", "reduce", 0, 2, 800],
        ["b", "launch reduce", 0, 0, 0], ["b", "reduce", 0, 5, 400],
        ["a", "wait reduce", 0, 2, 0], ["a", "update", 2, 6, 0], ["a", "launch gather", 6, 6, 0], ["a", "gather", 6, 7, 800],
        ["b", "wait reduce", 6, 6, 0], ["b", "update", 6, 7, 0], ["b", "launch gather", 7, 7, 0], ["b", "gather", 7, 9, 400],
        ["a", "wait gather", 7, 7, 0], ["b", "wait gather", 7, 9, 0], ["", "step", 0, 9, 0],
    ]  # fmt: skip
    return [[5, label, phase, start + shift + late, end + shift + late, size] for label, phase, start, end, size in rows]


def written(folder: Path, *ranks: list[list], device: str = "cuda") -> Path:
    path = folder / "made.trace.json"
    found = [{"clock": "", "rows": rows} for rows in ranks]
    path.write_text(json.dumps({"format": traces.FORMAT, "device": device, "ranks": found}))
    return path


def test_a_trace_is_read_back_as_the_step_that_made_it(tmp_path: Path) -> None:
    """Two ranks whose clocks differ by 100 s, one of which was made by hand from the model's own spans."""
    (step,) = traces.read_trace(written(tmp_path, made_rows(), made_rows(shift=100)))
    assert step.orders == A_FIRST and step.skew == 0 and step.seconds == 9
    assert {label: task[:6] for label, task in step.tasks.items()} == {label: task[:6] for label, task in AB.items()}
    assert step.spans == simulate(step.operations)
    assert step.waits == {("a", "reduce"): 2, ("b", "reduce"): 0, ("a", "gather"): 0, ("b", "gather"): 2}
    assert step.tasks["a"].reduce_bytes == 400 and step.tasks["b"].gather_bytes == 200  # half of the whole, on two ranks


def test_the_table_holds_medians_of_every_column(tmp_path: Path) -> None:
    """The waits were one step's."""
    (step,) = traces.read_trace(written(tmp_path, made_rows(), made_rows()))
    slower = lambda times: step._replace(
        tasks={label: Task(*(times * x for x in task[:6]), *task[6:]) for label, task in step.tasks.items()},
        waits={key: times * x for key, x in step.waits.items()},
    )
    steps = [slower(times) for times in (10, 1, 3)]
    lines = order.trace_table(steps, traces.median_tasks(steps)).splitlines()
    assert lines[-3:] == [
        "| a | 0.00080 | 6,000.00 | 6,000.00 | 12,000.00 | 3,000.00 | 0.00 | 0.00 |",
        "| b | 0.00040 | 9,000.00 | 0.00 | 3,000.00 | 6,000.00 | 6,000.00 | 0.00 |",
        "| **sum** | 0.00120 | 15,000.00 | 6,000.00 | 15,000.00 | 9,000.00 | 6,000.00 | 0.00 |",
    ]


def test_one_rank_has_no_collectives(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    pytest.importorskip("matplotlib", reason="pip install -r records/requirements.txt")
    rows = [row for row in made_rows() if "wait" not in row[2] and row[2] not in ("reduce", "gather")]
    order.main(["show", f"{written(tmp_path, rows)}"])
    assert "| **sum** | 0.00 | 0.00 | 0.00 |" in capsys.readouterr().out


def test_a_late_rank_decides_when_a_collective_begins(tmp_path: Path) -> None:
    first = [[*row[:4], row[4] + 3, row[5]] if row[2] in ("reduce", "wait reduce", "step") else row for row in made_rows()]
    path = written(tmp_path, made_rows(), made_rows())
    found = json.loads(path.read_text())
    found["ranks"] = [{"clock": "one", "rows": first}, {"clock": "one", "rows": made_rows(late=1)}]
    path.write_text(json.dumps(found))
    (step,) = traces.read_trace(path)
    assert step.rank == 0 and step.skew == 1 and step.spans["a reduce"] == Span(1, 5)


@pytest.mark.parametrize(
    "broken",
    ["no step", "a time in words", "a step alone", "labels that are none", "a step in words", "an end before", "an escape"]
    + ["an end that never comes"]
    + [f"no {row[2]} of {row[1]}" for row in made_rows()[:-1]],
)
def test_a_trace_that_is_not_whole_is_named(tmp_path: Path, broken: str) -> None:
    rows = made_rows()
    if broken == "a time in words":
        rows[0][3] = "soon"
    if broken == "a step in words":
        rows[0][0] = f"{rows[0][0]}"
    if broken == "an end before":
        rows[0][4] = rows[0][3] - 1
    if broken == "an end that never comes":
        rows[0][4] = float("inf")
    if broken == "labels that are none":
        rows[0][1] = None
    if broken == "an escape":
        rows = [[row[0], row[1].replace("a", "\x1b"), *row[2:]] for row in rows]
    if broken.startswith("no "):
        rows = [row for row in rows if f"no {row[2]} of {row[1]}" != broken]
    rows = {"no step": rows[:-1], "a step alone": rows[-1:]}.get(broken, rows)
    with pytest.raises(ModelError, match="made.trace.json is no (whole )?trace: give the file that a run with --trace_steps=A:B"):
        traces.read_trace(written(tmp_path, rows))


def test_show_prints_the_table_the_reasons_and_the_orders_to_try(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    pytest.importorskip("matplotlib", reason="pip install -r records/requirements.txt")
    rows = [row for row in made_rows()]
    order.main(["show", f"{written(tmp_path, rows, made_rows(shift=7))}"])
    out = capsys.readouterr().out
    assert "Exposed: no arithmetic runs for 4000.000 of 9000.000 ms" in out
    assert "a update waits for a reduce (ms: itself a reduce 2000.000)" in out
    assert "Critical path: a reduce → a update → b update → b gather" in out and "Keep the orders" in out
    assert (tmp_path / "made.trace.png").read_bytes()[:4] == b"\x89PNG"
    events = json.loads((tmp_path / "made.trace.chrome.json").read_text())["traceEvents"]
    assert {event["name"] for event in events if event["ph"] == "X"} == set(simulate(operations_of(AB, A_FIRST)))


@pytest.mark.parametrize(("name", "option"), [("made.trace.png", "picture"), ("made.trace.chrome.json", "chrome")])
def test_show_replaces_no_file_of_another_that_its_user_has_not_named(tmp_path: Path, name: str, option: str) -> None:
    """It took a photo's place in silence. Its own files it makes anew, and those that an option names."""
    pytest.importorskip("matplotlib", reason="pip install -r records/requirements.txt")
    trace, foreign = written(tmp_path, made_rows()), tmp_path / name
    foreign.write_text('{"traceEvents": []}')
    said = f"order.py: error: {foreign}: does not say that this tool wrote it, and is not replaced: name another by --{option}=, or delete it"
    with pytest.raises(SystemExit) as left:
        order.main(["show", f"{trace}"])
    assert left.value.code == said and foreign.read_text() == '{"traceEvents": []}'
    assert {path.name for path in tmp_path.iterdir()} == {trace.name, name}  # nothing else was written
    order.main(["show", f"{trace}", f"--{option}={foreign}"])
    made = foreign.read_bytes()
    assert len(made) > 100
    foreign.write_bytes(made + b" ")
    order.main(["show", f"{trace}"])
    assert foreign.read_bytes() == made


def test_a_picture_that_says_who_wrote_it_is_whole(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="pip install -r records/requirements.txt")
    from PIL import Image  # which matplotlib needs

    order.main(["show", f"{written(tmp_path, made_rows())}"])
    with Image.open(tmp_path / "made.trace.png") as picture:
        picture.load()
        assert picture.info["Software"] == "bankrun bench/order.py"
    assert json.loads((tmp_path / "made.trace.chrome.json").read_text())["otherData"] == {"writer": "bankrun bench/order.py"}


@pytest.mark.parametrize("ending", PICTURES)
def test_a_picture_is_written_in_each_format_that_the_option_takes(ending: str, tmp_path: Path) -> None:
    """Six of nine took none of png's metadata, and were refused after all work."""
    pytest.importorskip("matplotlib", reason="pip install -r records/requirements.txt")
    operations = operations_of(AB, A_FIRST)
    order_pictures.gantt([("a step", operations, simulate(operations))], tmp_path / f"x{ending}")
    assert (tmp_path / f"x{ending}").stat().st_size > 1000


def test_show_prints_its_table_where_nothing_can_be_written(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """As in another user's folder: here a folder stands in the way of both files."""
    pytest.importorskip("matplotlib", reason="pip install -r records/requirements.txt")
    trace, names = written(tmp_path, made_rows()), ("made.trace.png", "made.trace.chrome.json")
    for name in names:
        (tmp_path / f"{name}.bankrun.tmp").mkdir()
    with pytest.raises(SystemExit) as left:
        order.main(["show", f"{trace}"])
    out = capsys.readouterr().out
    assert "| label | MB sent |" in out and "Critical path: " in out and "made.trace" not in out
    assert left.value.code.startswith("order.py: error: ") and "\n" not in left.value.code
    assert all(f"{tmp_path / name}: " in left.value.code for name in names)
    with pytest.raises(SystemExit):
        order.main(["show", f"{trace}", f"--picture={tmp_path}/made.trace.png"])
    assert capsys.readouterr().out == ""  # asked for, and not there


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["show", "nowhere.json"], r"nowhere.json: No such file.*give the file that a run with --trace_steps=A:B wrote"),
        (["show", "{file}"], r"is no trace: give the file"),
        (["simulate", "{file}"], r"is no step: .*: write"),
        (["search", "--tasks={file}"], r"has no tasks: "),
        (["show", "/dev/zero"], r"/dev/zero: not a regular file: give the file"),
        (["simulate", "/dev/zero"], r"/dev/zero: not a regular file: give a file"),
        (["search", "--tasks=/dev/zero"], r"/dev/zero: not a regular file: give a file"),
        (["search", "--machine=nine"], r"--machine=nine: .*: use .*8xh100"),
        *[([*command, "{deep}"], r"is no trace|nested too deep") for command in (["show"], ["simulate"])],
        *[(["search", f"--{option}={{deep}}"], "nested too deep") for option in ("tasks", "machine")],
        (["search", "--scale=8,12"], r"--scale: 12 ranks do not fill nodes of 8: use a multiple"),
    ],
)
def test_bad_input_ends_with_one_line(arguments: list[str], message: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("[1, 2]")
    (tmp_path / "deep.json").write_text("[" * 100_000)
    with pytest.raises(SystemExit) as exit_:
        order.main([argument.format(file=tmp_path / "file", deep=tmp_path / "deep.json") for argument in arguments])
    assert re.search(message, str(exit_.value)) and "\n" not in str(exit_.value)


A = {"name": "a", "lane": "compute", "seconds": 1}
NONSENSE = {  # in a file: the command, and what is told
    "seconds in words": ({"operations": [{**A, "seconds": "1"}]}, "simulate", "is no step: .*seconds is '1'"),
    "a list for a name": ({"operations": [{**A, "name": ["a"]}]}, "simulate", r"is no step: .*name is \['a'\]"),
    "bytes in words": ({"operations": [{**A, "bytes": "x"}]}, "simulate", "is no step: .*bytes is 'x'"),
    "a negative slowdown": ({"operations": [A], "compute_slowdown": -1}, "simulate", r"slowdowns are \[-1.0, 0.0\], must be 0 or more"),
    "an endless slowdown": ({"operations": [A], "communication_slowdown": 1e999}, "simulate", "slowdowns are"),
    "a part of a channel": ({"operations": [A], "channels": 2.7}, "simulate", "channels is 2.7"),
    "an escape": ({"operations": [{**A, "name": "\x1b", "seconds": -1}]}, "simulate", r"operation '\\x1b': a name must be"),
    "a negative time": ({"operations": [{**A, "seconds": -1}]}, "simulate", "operation a takes -1 seconds"),
    "no task": ({"tasks": {}}, "search --tasks", "one at least, and numbers of 0 or more"),
    "a task in words": ({"tasks": {"a": {"reduce": 1, "update": "1"}}}, "search --tasks", "update is '1'"),
    "an endless number": ({"operations": [{**A, "seconds": 10**400}]}, "simulate", "a number of 401 digits"),
    "an endless slowdown of digits": ({"operations": [A], "compute_slowdown": 10**400}, "simulate", "a number of 401 digits"),
    "labels of lists": ({"tasks": {"a": {"reduce": 1, "update": 1}}, "work": [["a"], ["b"]]}, "search --tasks", "are lists of labels"),
    "labels of numbers": ({"tasks": {"a": {"reduce": 1, "update": 1}}, "work": [1, 2]}, "search --tasks", "are lists of labels"),
    "a negative task": ({"tasks": {"a": {"reduce": 1, "update": -1}}}, "search --tasks", "numbers of 0 or more"),
}  # fmt: skip


@pytest.mark.parametrize("case", NONSENSE)
def test_nonsense_in_a_file_is_named(case: str, tmp_path: Path) -> None:
    found, command, message = NONSENSE[case]
    (tmp_path / "file").write_text(json.dumps(found))
    arguments = ["search", f"--tasks={tmp_path / 'file'}"] if "--tasks" in command else [command, f"{tmp_path / 'file'}"]
    with pytest.raises(SystemExit) as exit_:
        order.main(arguments)
    assert re.search(message, str(exit_.value)) and "\n" not in str(exit_.value) and "\x1b" not in str(exit_.value)


@pytest.mark.parametrize(
    "command",
    ["order.py search --ranks=0", "order.py search --ranks=-2", "order.py validate --repetitions=0",
     "order.py validate --link=nan", "grad_dtype.py foo", "grad_dtype.py --seeds=0", "grad_dtype.py --ranks=some",
     "grad_dtype.py --lr=3", "grad_dtype.py --seed 3", "grad_dtype.py --grad_dtype=param",
     "verdicts.py --comparisons=0"],
)  # fmt: skip
def test_options_that_cannot_be_meant_end_with_a_message(command: str) -> None:
    script, *arguments = command.split()
    done = run_script(ROOT / "bench" / script, *arguments)
    assert done.returncode == 2 and done.stdout == "" and ": error: " in done.stderr.splitlines()[-1], done.stderr


def test_a_reader_that_has_enough_is_no_fault(tmp_path: Path) -> None:
    (tmp_path / "tasks.json").write_text(json.dumps({"tasks": {"a": {"reduce": 1, "update": 1}}}))
    command = [sys.executable, f"{ROOT}/bench/order.py", "search", f"--tasks={tmp_path}/tasks.json"]
    done = subprocess.run(["bash", "-o", "pipefail", "-c", f"{shlex.join(command)} | true"], capture_output=True, timeout=100)
    assert (done.returncode, done.stderr) == (0, b"")
    with open("/dev/full", "wb") as full:
        done = run_fresh(command, stdout=full)
    assert done.returncode == 1 and done.stderr.count("\n") == 1 and "No space left" in done.stderr, done
    closed = run_fresh(command, preexec_fn=without_stdout)
    assert (closed.returncode, closed.stdout, closed.stderr) == (0, "", "")


def test_a_full_disk_leaves_the_picture_that_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "step.json").write_text(json.dumps({"operations": [op._asdict() for op in operations_of(AB, A_FIRST)]}))
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(errno.ENOSPC, "No space left on device")))
    for option, name in (("chrome", "x.json"), ("picture", "x.png")):
        (tmp_path / name).write_text("of before")
        with pytest.raises(SystemExit, match=f"order.py: error: .*{name}"):
            order.main(["simulate", f"{tmp_path / 'step.json'}", f"--{option}={tmp_path / name}"])
        assert (tmp_path / name).read_text() == "of before"


def test_other_optimizers_steps_can_be_put_in(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    step = {"operations": [op._asdict() for op in operations_of(AB, A_FIRST)]}
    (tmp_path / "step.json").write_text(json.dumps(step))
    order.main(["simulate", f"{tmp_path / 'step.json'}"])
    assert "| b gather | communication | 7000.000 | 9000.000 |" in capsys.readouterr().out
    for option, name in (("chrome", "x.json"), ("picture", "x.png")):
        with pytest.raises(SystemExit, match=f"order.py: error: .*/none/{name}"):
            order.main(["simulate", f"{tmp_path / 'step.json'}", f"--{option}=/none/{name}"])
    tasks = {"tasks": {label: task._asdict() for label, task in AB.items()}, "scatter": ["b", "a"], "work": ["b", "a"]}
    (tmp_path / "tasks.json").write_text(json.dumps(tasks))
    order.main(["search", f"--tasks={tmp_path / 'tasks.json'}"])
    assert "9000.000 ms instead of 10000.000" in capsys.readouterr().out


def test_a_search_that_takes_long_says_how_far_it_is(tmp_path: Path, monkeypatch, capsys: pytest.CaptureFixture) -> None:
    """It took 8 minutes with 80 labels, without a word; a short one is quiet."""
    chance = random.Random(3)  # the first orders are not the best
    tasks = {f"{i}": dict(reduce=chance.random(), update=chance.random(), gather=chance.random()) for i in range(6)}
    (tmp_path / "tasks.json").write_text(json.dumps({"tasks": tasks}))
    heard = []
    for seconds in (1e9, 0.0):
        monkeypatch.setattr(order, "TELL_EVERY", seconds)
        order.main(["search", f"--tasks={tmp_path / 'tasks.json'}"])
        heard.append(capsys.readouterr())
    assert heard[0].out == heard[1].out and heard[0].err == ""
    told = re.findall(r"^order.py: searching from start (\d+) of (\d+), best so far [\d.]+ ms$", heard[1].err, re.M)
    assert len(told) == heard[1].err.count("\n") and told[0] == ("1", "10")


def test_what_train_gpt_takes_back_names_every_label() -> None:
    for labels in (["mlp", "attn"], [label for label in WORK_ORDER if label != "embed"][::-1]):
        whole = order.completed(Orders(tuple(labels), tuple(labels)))
        for found, usual in zip(whole, (SCATTER_ORDER, WORK_ORDER)):
            assert sorted(found) == sorted(usual) and [label for label in found if label in labels] == labels


# -----------------------------------------------------------------------------
# The tracer


def traced_settings(data: Path) -> Hyperparameters:
    sizes = dict(model_dim=16, num_heads=2, head_dim=8, num_scheduled_iterations=4, num_extension_iterations=1, fp8_head=False)
    return tiny_settings(data, data / "traced", trace_steps="2:5", val_every=0, **sizes)


def traced_run(rank: int, world_size: int, data: Path) -> None:
    train_gpt.train(traced_settings(data), Ranks(rank, world_size, torch.device("cpu")))


def test_two_ranks_are_traced_from_end_to_end(run_ranks, shards: Path, capsys: pytest.CaptureFixture) -> None:
    """Of every step that was asked for: intervals nest, each collective is there once, with the bytes that theory counts."""
    run_ranks(2, traced_run, shards)
    h, path = traced_settings(shards), shards / "traced" / "logs" / "run.trace.json"
    found = json.loads(path.read_text())
    assert len(found["ranks"]) == 2
    for rank in found["ranks"]:
        rows = [traces.Row(*row) for row in rank["rows"]]
        assert {row.step for row in rows} == {2, 3, 4} and len({row[:3] for row in rows}) == len(rows)
        for number in (2, 3, 4):
            own = {row[1:3]: row for row in rows if row.step == number}
            whole = own["", "step"]
            assert all(whole.start <= row.start <= row.end <= whole.end for row in own.values())
            for label, phase in [key for key in own if key[1] in ("reduce", "gather")]:
                launch, travels, wait = (own[label, name] for name in (f"launch {phase}", phase, f"wait {phase}"))
                assert launch.end <= travels.start and travels.end <= wait.end
            assert all(own[label, "wait reduce"].end <= own[label, "update"].start for label, phase in own if phase == "update")
    kinds = {2: (False, True), 3: (True, True), 4: (False, True)}
    for step in traces.read_trace(path):
        calls = expected_calls(model_parameters(h), param_table(h), 2, *kinds[step.step])
        sent = {(label, "reduce"): task.reduce_bytes for label, task in step.tasks.items()}
        sent |= {(label, "gather"): task.gather_bytes for label, task in step.tasks.items() if task.gather_bytes}
        assert sent == {key: call.sent for key, call in calls.items()}
        assert step.orders == order.default_orders(step.tasks) and set(step.spans) == {op.name for op in step.operations}
    pytest.importorskip("matplotlib", reason="pip install -r records/requirements.txt")
    order.main(["show", f"{path}"])
    out = capsys.readouterr().out
    assert "## NorMuon alone: step" in out and "## with Adam, tied: step 3" in out and "Critical path:" in out


def run_of(folder: Path, device: str = "cpu") -> SimpleNamespace:
    """What a Tracer needs of a run."""
    return SimpleNamespace(ranks=Ranks(0, 1, torch.device(device)), folder=folder)


def test_an_untraced_step_finds_the_optimizer_untouched() -> None:
    class Untouched:
        """Raises AttributeError for whatever is looked at or set."""

        __slots__ = ()

    tracer = Tracer("3:5", run_of(Path("run")))
    with tracer.traced(2, Untouched()), tracer.traced(5, Untouched()):
        pass
    assert tracer.rows == [] and list(steps_of("3:5")) == [3, 4] and not steps_of("")


def test_on_a_gpu_events_stand_for_times_and_a_stream_aside_sees_collectives_end(tmp_path: Path, monkeypatch) -> None:
    """Events of a clock that ticks at each record; every collective is waited for twice, aside and by the step."""
    ticks, waits = itertools.count(), []

    class Event:
        def record(self) -> None:
            self.tick = next(ticks)

        def elapsed_time(self, other: "Event") -> float:
            return 1000.0 * (other.tick - self.tick)

    class Optimizer:
        padded = {"a": torch.zeros(4)}
        _pending = _update = lambda self, label, grad=None: torch.zeros(2)

        def _launch_gather(self, label: str) -> SimpleNamespace:
            return SimpleNamespace(wait=lambda: waits.append(label))

        def _launch_reduction(self, label: str) -> tuple:
            return None, SimpleNamespace(wait=lambda: waits.append(label))

    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: Event())
    for name, stand_in in {"Stream": object, "stream": lambda _: nullcontext(), "synchronize": lambda: None}.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    tracer, optimizer = Tracer("5:6", run_of(tmp_path / "run", "cuda")), Optimizer()
    with tracer.traced(5, optimizer):
        optimizer._launch_reduction("a")[1].wait()
        optimizer._update("a", None)
        optimizer._launch_gather("a").wait()
    tracer.write(tracer.gather())
    assert waits == ["a"] * 4 and vars(optimizer) == {}
    (step,) = traces.read_trace(tmp_path / "run.trace.json")
    found = json.loads((tmp_path / "run.trace.json").read_text())
    rows = {phase: (start, end, size) for _, _, phase, start, end, size in found["ranks"][0]["rows"]}
    # ticks: 0 the step, 1–2 launch, 3–4 the reduction, 5–6 its wait, 7–8 update, 9–10 launch, 11–12 gather, 13–14 wait, 15 end;
    # seconds from the first row's start, tick 1
    assert rows["reduce"] == (2, 3, 8) and rows["gather"] == (10, 11, 16) and rows["step"] == (-1, 14, 0)
    assert step.channels == 1 and step.waits == {("a", "reduce"): 1, ("a", "gather"): 1}


def test_a_run_that_makes_no_traced_step_leaves_the_trace_of_one_that_did(tmp_path: Path, capsys) -> None:
    """As a finished run that is resumed."""
    (tmp_path / "run.trace.json").write_text("{}")
    tracer = Tracer("2:5", run_of(tmp_path / "run"))
    tracer.write(tracer.gather())
    assert (tmp_path / "run.trace.json").read_text() == "{}" and len([*tmp_path.iterdir()]) == 1
    assert "no trace: this run made no step of --trace_steps=2:5" in capsys.readouterr().err
    lost = Tracer("2:5", run_of(tmp_path / "none" / "run")).write({"ranks": [{"rows": [1]}]})
    assert lost == f"{tmp_path}/none/run.trace.json: No such file or directory: the trace is lost"


@pytest.mark.parametrize("text", ["1:" + "9" * 5000, "3", "5:3", "3:3", "a:b", ":4", "-1:4", "3:", "1:2:3"])
def test_steps_that_cannot_be_meant_are_told_before_the_run(text: str, capsys, shards: Path, tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as exit_:
        train_gpt.main(options(shards, tmp_path, trace_steps=text))
    assert exit_.value.code == 1 and f"--trace_steps={text}: must be A:B" in capsys.readouterr().err


# -----------------------------------------------------------------------------
# Validation: its arithmetic; what it measures stands in bench/README.md


def test_rank_correlation_is_spearmans() -> None:
    """By hand: with one swap of neighbours among four, 1 − 6·2 / (4·15) = 0.8; ties share their mean rank."""
    assert order_validation.rank_correlation([1, 2, 3, 4], [10, 30, 20, 40]) == pytest.approx(0.8)
    assert order_validation.rank_correlation([1, 2, 3], [3, 2, 1]) == -1
    assert order_validation.rank_correlation([1, 1], [1, 2]) == 0


def test_the_fit_finds_the_slowdown_that_made_the_times() -> None:
    orders = [Orders(*pair) for pair in itertools.product(itertools.permutations("ab"), repeat=2)]
    times = [step_seconds(AB, pair, Interference(0.3, 0.3)) for pair in orders]
    assert order_validation.fit(AB, orders, times) == Interference(0.3, 0.3)


def test_the_readme_shows_what_the_search_prints() -> None:
    """The first table, whose figures follow from train_gpt.py and bench/machines/8xh100.json alone."""
    found = order.search_kinds(Hyperparameters(), schedule_costs.read_machine("8xh100"), 8)
    assert order.kinds_table(found) in (ROOT / "bench" / "README.md").read_text(encoding="utf-8")


MACHINES = {  # a file's name and ranks of a node, and what is told
    "a number for a name": (5, 8, "name is 5, ranks_per_node 8: must be a line of text, and a whole number"),
    "an escape for a name": ("\x1b[31m", 8, r"name is '\\x1b\[31m', "),
    "half a rank": ("m", 0.5, "ranks_per_node 0.5: must be"),
    "two ranks and a half": ("m", 2.5, "ranks_per_node 2.5: must be"),
    "an endless number of ranks": ("m", 10**400, "a number of 401 digits"),
}


@pytest.mark.parametrize("case", MACHINES)
def test_a_machine_that_cannot_be_is_one_message(tmp_path: Path, case: str) -> None:
    name, ranks, said = MACHINES[case]
    found = json.loads((ROOT / "bench" / "machines" / "8xh100.json").read_text()) | {"name": name}
    found["ranks_per_node"]["value"] = ranks
    (tmp_path / "machine.json").write_text(json.dumps(found))
    with pytest.raises(ModelError, match=said):
        schedule_costs.read_machine(f"{tmp_path / 'machine.json'}")


READ = r"(s|t|trace)\.json is what is read, and would be replaced: name another file\n$"  # the trace of a run that was through
JSON = r"argument --chrome: (idea.py|trace.png): must end in .json\n$"
REPLACED = {
    "simulate s.json --picture=LICENSE": "LICENSE: must end in .png or .svg or ", "search --chrome=idea.py": JSON,
    "show trace.json --chrome=trace.png": JSON, "simulate s.json --chrome=./s.json": READ,
    "search --tasks=t.json --chrome=t.json": READ, "show trace.json --chrome trace.json": READ,
}  # fmt: skip


@pytest.mark.parametrize("arguments", REPLACED)
def test_a_file_that_would_replace_another_is_refused(arguments: str, capsys: pytest.CaptureFixture, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as left:
        order.main(arguments.split())
    assert left.value.code == 2 and re.search(REPLACED[arguments], capsys.readouterr().err)


@pytest.mark.parametrize("ranks", [7, 8])
def test_figures_for_ranks_that_training_refuses_say_so(capsys: pytest.CaptureFixture, monkeypatch, ranks: int) -> None:
    monkeypatch.setattr(order, "search_kinds", lambda *_: {})  # which takes seconds
    monkeypatch.setattr(order, "kinds_table", lambda _: sys.exit(3))
    with pytest.raises(SystemExit, match="3"):
        order.main(["search", f"--ranks={ranks}"])
    assert ("Training refuses so many ranks today: the rows of value_embeds, " in capsys.readouterr().out) == (ranks == 7)


def test_a_step_of_no_length_is_drawn_and_advised_upon(tmp_path, capsys):
    (tmp_path / "tasks.json").write_text('{"tasks": {"a": {"reduce": 0, "update": 0}, "b": {"reduce": 0, "update": 0}}}')
    picture = tmp_path / "step.png"
    order.main(["search", f"--tasks={tmp_path}/tasks.json", f"--picture={picture}"])
    assert "Keep the orders" in capsys.readouterr().out and picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--tasks=tasks.json", "--nonsense=3"], "--nonsense=3 goes without it"),
        (["--tasks=tasks.json", "--scale=8,16"], "--scale goes without it"),
        (["--scale=8,16", "--picture=p.png"], "--picture and --chrome go without it"),
    ],
)
def test_search_refuses_what_it_would_not_use(arguments, said, capsys):
    with pytest.raises(SystemExit) as left:
        order.main(["search", *arguments])
    assert left.value.code == 2 and said in capsys.readouterr().err

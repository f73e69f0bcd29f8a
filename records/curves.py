"""What lies between the first step and the last: step times by stage, and a loss gain in steps and seconds."""

import ast
import math
from itertools import pairwise
from typing import NamedTuple

import t_tests
from groups import Group
from runlog import RunLog, parse
from t_tests import Difference, mean, sigma

ALIKE = 1.25  # of two spans of steps, at most, over which slopes are taken together
FAR = 1 / 4  # of the steps: a loss worth more of them than this is too far along a straight line for a test
ENDING = 1 / 20  # of the steps: the slope of a loss curve is measured over at least these last ones

# -----------------------------------------------------------------------------
# Step times


class Pace(NamedTuple):
    """Milliseconds a step in a part of the runs: of the baseline, of the other group, and their difference."""

    part: str
    before: float
    after: float
    difference: Difference


def parts(run: RunLog) -> list[tuple[str, float, float]]:
    """(name, first step, last step) of the whole run and of its stages; of its thirds where the log does not tell stages."""
    last = run.validations[-1][0]
    starts = stages(run) or [(f"{name} third", i * last / 3) for i, name in enumerate(("first", "second", "last"))]
    ends = [start for _, start in starts[1:]] + [last]
    return [("all steps", 0, last), *((name, start, end) for (name, start), end in zip(starts, ends, strict=True))]


def pace(run: RunLog, start: float, end: float) -> float | None:
    """Milliseconds a step from the first logged time from step `start` on, to the last up to `end`; None: not told."""
    times = times_from_0(run)
    steps = [step for step, time in times.items() if start <= step <= end and math.isfinite(time)]
    if not steps or min(steps) == max(steps):
        return None
    return (times[max(steps)] - times[min(steps)]) / (max(steps) - min(steps))


def times_from_0(run: RunLog) -> dict[int, float]:
    """Its times, with step 0's, which a log without a validation there does not tell: the first step's time is its own."""
    return {0: 0.0} | run.times if 1 in run.times and not run.restart else run.times


def paces(a: Group, b: Group, pairs: bool) -> list[Pace]:
    """The parts that the runs of both groups have, by name; each run by its own stages. pairs: of runs, if all tell theirs."""
    of_groups: list[dict[str, list[float]]] = [{}, {}]
    for group, found in zip((a, b), of_groups, strict=True):
        for run in group.runs:
            for name, start, end in parts(run):
                if (value := pace(run, start, end)) is not None:
                    found.setdefault(name, []).append(value)
    before, after = of_groups
    found = []
    for name in before:
        if name in after:
            test = t_tests.paired if pairs and len(before[name]) == len(after[name]) == len(a.runs) else t_tests.different
            found.append(Pace(name, mean(before[name]), mean(after[name]), test(before[name], after[name])))
    return found


def stages(run: RunLog) -> list[tuple[str, float]]:
    """The names of its stages and the steps at which they begin; empty if its sources and settings do not tell.

    The script's table STAGES has a row a stage, whose `until` is the fraction of the scheduled steps at which it ends; in
    older scripts, whose class of rows has no such field, the stages are equal parts. A script whose rows are made elsewhere,
    or that changes its table later, does not tell.
    """
    try:
        scheduled = float(int(run.settings["num_scheduled_iterations"]))
        tree = parse(run.script[1])
        stored = [node for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]
        tables = [
            node.value.elts
            for node in tree.body
            if isinstance(node, ast.Assign | ast.AnnAssign) and ast.unparse(node).startswith(("STAGES = ", "STAGES: "))
        ]
        fields = {
            node.name: [ast.unparse(line.target) for line in node.body if isinstance(line, ast.AnnAssign)]
            for node in tree.body
            if isinstance(node, ast.ClassDef)
        }
        rows = [arguments(row, fields) for row in tables[0]]
        ends = [number(row["until"]) for row in rows if "until" in row]
        if not any("until" in row or "until" in fields[call.func.id] for row, call in zip(rows, tables[0], strict=True)):
            ends = [(i + 1) / len(rows) for i in range(len(rows))]
    except (KeyError, ValueError, SyntaxError, IndexError, AttributeError, ArithmeticError, RecursionError, MemoryError):
        return []
    changed = [node.id for node in stored].count("STAGES") > 1
    starts = [0.0, *ends][:-1]
    if changed or len(ends) != len(tables[0]) or not all(a < b for a, b in pairwise([0.0, *ends])):
        return []
    begin, extension = [(f"stage {i + 1}", scheduled * start) for i, start in enumerate(starts)], scheduled * [1.0, *ends][-1]
    return begin + [("extension", extension)] * (run.validations[-1][0] > extension)


def arguments(call: ast.Call, fields: dict[str, list[str]]) -> dict[str, ast.expr]:
    """What `Class(…)` gives its fields, by keyword or by place; fields: of each class, in order. AttributeError: no call."""
    return dict(zip(fields.get(call.func.id, []), call.args)) | {option.arg: option.value for option in call.keywords}


def number(expression: ast.expr) -> float:
    """The value of a number, or of a division of such. Raises ValueError for anything else, ZeroDivisionError."""
    if isinstance(expression, ast.Constant) and type(expression.value) in (int, float):
        return float(expression.value)
    if isinstance(expression, ast.BinOp) and isinstance(expression.op, ast.Div):
        return number(expression.left) / number(expression.right)
    raise ValueError(f"neither a number nor a division: {ast.unparse(expression)}")


# -----------------------------------------------------------------------------
# A loss gain in steps and seconds


class EqualLoss(NamedTuple):
    """What a difference in loss is worth, new against baseline, and what the times are at equal loss."""

    slope: float  # of both groups: the loss that a step takes off near the end, above 0
    slope_error: float
    over: int  # the steps that the slope is measured over, the fewest of any run
    steps: float  # that the new runs could end earlier, to end with the baseline's loss; below 0: must end later
    pace: float  # seconds a step of the new runs there; nan: unknown
    seconds: float  # steps × pace
    time: Difference | None  # of the times at equal loss; None: the times do not compare, or it is far
    far: bool  # more than FAR of the steps


def ending(run: RunLog) -> tuple[int, float, float | None] | None:
    """(steps, loss that a step takes off, seconds a step) from the last validation far enough from the end, to the end; the
    loss is nan if the last one is of averaged weights, and those before it are not."""
    end, last_loss, last_time = run.validations[-1]
    before = [x for x in run.validations if x[0] <= end - max(1.0, ENDING * end)]
    if not before:
        return None
    step, loss, time = before[-1]
    loss = math.nan if run.settings.get("tail_averages") == "True" else loss
    told = time is not None and last_time is not None
    return end - step, (loss - last_loss) / (end - step), (last_time - time) / 1000 / (end - step) if told else None


def equal_loss(a: Group, b: Group, comparable: bool, pairs: bool) -> EqualLoss | None:
    """None: two runs of each at least, whose losses fall near the end. comparable: are their times?

    A run's time at the baseline's loss is its time + (its loss − that) × pace / slope; those are compared as times are, in
    pairs or not. The slope's own error is added to that difference's: error² + (Δloss × pace × slope_error / slope²)².
    Runs that were last validated much earlier than others give no slope.
    """
    endings = [[ending(run) for run in group.runs] for group in (a, b)]
    if min(map(len, endings)) < 2 or not all(map(all, endings)):
        return None
    over = min(steps for group in endings for steps, _, _ in group)
    slopes = [[slope for steps, slope, _ in group if steps <= ALIKE * over and not math.isnan(slope)] for group in endings]
    slopes = [group for group in slopes if len(group) > 1]  # a slope over more steps is another: curves flatten
    if not slopes or not (slope := mean([*map(mean, slopes)])) > 0:
        return None
    slope_error = math.hypot(*(sigma(group) / math.sqrt(len(group)) for group in slopes)) / len(slopes)
    told = [pace for _, _, pace in endings[1] if pace is not None]
    seconds_a_step, gain = mean(told), mean(a.losses) - mean(b.losses)
    time, far = None, abs(gain / slope) > FAR * min(run.validations[-1][0] for run in a.runs + b.runs)
    if comparable and not far and len(told) == len(b.runs) == len(b.times) and len(a.runs) == len(a.times):
        price = seconds_a_step / slope
        equal = [[run.seconds + run.loss * price for run in group.runs] for group in (a, b)]
        found = (t_tests.paired if pairs else t_tests.different)(*equal)
        time = t_tests.t_test(found.mean, math.hypot(found.error, gain * price * slope_error / slope), found.freedom)
    return EqualLoss(slope, slope_error, over, gain / slope, seconds_a_step, gain / slope * seconds_a_step, time, far)

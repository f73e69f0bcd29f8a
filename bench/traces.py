"""Reading what --trace_steps wrote: the ranks' rows on one clock, each step as the schedule's model has it."""

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from bench.communication import sent
from bench.schedule_model import ModelError, Operation, Orders, Span, Task, from_file, operations_of
from data.shards import plain_json, read_regular

FORMAT = "bankrun trace 1"
CHANNELS = {"cuda": 1, "cpu": 2}  # collectives in service at a time: NCCL's stream; gloo's two workers


class Row(NamedTuple):
    """As tracer.py's Tracer describes it; times in seconds."""

    step: int
    label: str
    phase: str
    start: float
    end: float
    bytes: int


class TracedStep(NamedTuple):
    """One step as its slowest rank saw it."""

    step: int
    tasks: dict[str, Task]
    orders: Orders
    spans: dict[str, Span]  # of the operations of `operations_of`, from the step's first moment on any rank
    waits: dict[tuple[str, str], float]  # by label, and "reduce" or "gather": seconds that the compute lane stood still for it
    rank: int  # the slowest
    skew: float  # seconds between the first and the last rank's start
    channels: int  # of the lane

    @property
    def operations(self) -> list[Operation]:
        return operations_of(self.tasks, self.orders)

    @property
    def kind(self) -> str:
        return kind_of(self.tasks)

    @property
    def seconds(self) -> float:
        return max(span.end for span in self.spans.values()) - min(span.start for span in self.spans.values())


def kind_of(labels: Iterable[str]) -> str:
    """What a step updates, in words. Only Adam steps update a replicated or tied parameter."""
    labels = list(labels)
    if set(labels) <= {"attn", "mlp"}:
        return "NorMuon alone"
    if "lm_head" not in labels:
        return f"{len(labels)} labels"
    return "with Adam, split" if "embed" in labels else "with Adam, tied"


def read_trace(path: Path) -> list[TracedStep]:
    """The steps of a trace, in their order. Raises ModelError for a file that is none, or that is not whole."""
    try:
        found = plain_json(read_regular(path))
        if found["format"] != FORMAT:
            raise KeyError
        fields = lambda row: dict(zip(Row._fields, row, strict=True))
        ranks = [[from_file(Row, fields(row)) for row in rank["rows"]] for rank in found["ranks"]]
        is_row = lambda row: -math.inf < row.start <= row.end < math.inf and row.bytes >= 0 and row.label.isprintable()
        if not all(is_row(row) for rows in ranks for row in rows):
            raise ValueError
        clocks, channels = [rank["clock"] for rank in found["ranks"]], CHANNELS[found["device"]]
    except OSError as error:
        raise ModelError(f"{path}: {error.strerror}: give the file that a run with --trace_steps=A:B wrote") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ModelError(f"{path} is no trace: give the file that a run with --trace_steps=A:B wrote") from None
    if not ranks or not all(ranks):
        raise ModelError(f"{path} holds no step: trace steps that the run makes, --trace_steps=A:B with A below the last one")
    try:
        ranks = aligned(ranks, clocks)
        numbers = sorted({row.step for row in ranks[0]})
        of_step = lambda number: [[row for row in rows if row.step == number] for rows in ranks]
        steps = [traced_step(number, of_step(number), channels) for number in numbers]
        if not all(step.tasks and {x.name for x in step.operations} <= step.spans.keys() for step in steps):
            raise ValueError
        return steps
    except (ArithmeticError, LookupError, StopIteration, TypeError, ValueError) as error:
        if isinstance(error, ModelError):
            raise
        raise ModelError(f"{path} is no whole trace: give the file that a run with --trace_steps=A:B wrote") from None


def aligned(ranks: list[list[Row]], clocks: list[str]) -> list[list[Row]]:
    """All rows on the first rank's clock. Where clocks differ: a collective ends on all ranks at once, in the median."""
    ends = [{row[:3]: row.end for row in rows if row.phase in ("reduce", "gather")} for rows in ranks]
    moved = [ranks[0]]
    for rows, own, clock in zip(ranks[1:], ends[1:], clocks[1:]):
        shared = ends[0].keys() & own.keys()
        if own.keys() != ends[0].keys():
            raise ModelError("the ranks traced different collectives: the trace is not whole, make another")
        same = clock and clock == clocks[0]
        shift = 0.0 if same or not shared else statistics.median(ends[0][key] - own[key] for key in shared)
        moved.append([row._replace(start=row.start + shift, end=row.end + shift) for row in rows])
    return moved


def traced_step(step: int, ranks: list[list[Row]], channels: int) -> TracedStep:
    """One step from the rows of all ranks, aligned: a collective is in service from when the last rank has launched it, and the
    lane has a channel for it, to its end on the slowest rank; times of the arithmetic are the slowest rank's."""
    begins = [next(row.start for row in rows if row.phase == "step") for rows in ranks]
    ends = [next(row.end for row in rows if row.phase == "step") for rows in ranks]
    slowest, zero = ends.index(max(ends)), min(begins)
    launched = {}  # of collectives, on the last rank
    for row in (row for rows in ranks for row in rows if row.phase in ("reduce", "gather")):
        launched[row.label, row.phase] = max(row.start, launched.get((row.label, row.phase), row.start))
    own = sorted((row for row in ranks[slowest] if row.phase != "step"), key=lambda row: row.start)
    collectives = [row for row in own if row.phase in ("reduce", "gather")]
    services, lane = {}, []
    for row in collectives:
        free = sorted(lane)[-channels] if len(lane) >= channels else zero
        start = min(max(launched[row.label, row.phase], free), row.end)
        lane.append(row.end)
        services[f"{row.label} {row.phase}"] = Span(start - zero, row.end - zero)
    alone = shared_out(services)
    spans, waits, arithmetic = dict(services), {}, {}
    free = begins[slowest]
    previous = ""
    for row in (row for row in own if row not in collectives):
        if row.phase == "launch reduce":
            spans[f"{row.label} before"] = Span(free - zero, row.start - zero)
            spans[f"{row.label} launch"] = Span(row.start - zero, row.end - zero)
        elif row.phase.startswith("wait"):
            waits[row.label, row.phase.removeprefix("wait ")] = row.end - row.start
        elif row.phase == "update":
            arithmetic[row.label] = free  # with what the host does between the wait and the update
        if row.phase == "launch gather":
            spans[f"{row.label} update"] = Span(arithmetic[row.label] - zero, row.end - zero)
        if previous and row.start > free:
            spans[f"{previous} behind"] = Span(free - zero, row.start - zero)
        previous = row.label if row.phase == "wait gather" else ""
        free = row.end
    if previous and ends[slowest] > free:
        spans[f"{previous} behind"] = Span(free - zero, ends[slowest] - zero)
    scatter = tuple(row.label for row in own if row.phase == "launch reduce")
    work = tuple(row.label for row in own if row.phase == "update")
    size = {(row.label, row.phase): row.bytes for row in collectives}
    if {*scatter} != {*work} or waits.keys() != size.keys():  # each collective is launched, and waited for
        raise ValueError
    seconds = {name: span.end - span.start for name, span in spans.items()} | alone

    def task(label: str) -> Task:
        sharded = (label, "gather") in size
        kinds = {"reduce": "reduce-scatter" if sharded else "all-reduce", "gather": "all-gather"}
        times = {phase: seconds.get(f"{label} {phase}", 0.0) for phase in Task._fields[:6]}
        moved = {f"{phase}_bytes": sent(kind, size.get((label, phase), 0), len(ranks)) for phase, kind in kinds.items()}
        return Task(**times, **moved)

    tasks = {label: task(label) for label in work}
    names = {op.name for op in operations_of(tasks, Orders(scatter, work))}
    spans = {name: span for name, span in spans.items() if name in names}
    return TracedStep(step, tasks, Orders(scatter, work), spans, waits, slowest, max(begins) - zero, channels)


def shared_out(spans: Mapping[str, Span]) -> dict[str, float]:
    """Seconds that each collective would take alone, if those in service at a time share the lane evenly."""
    times = sorted({time for span in spans.values() for time in span})
    alone = dict.fromkeys(spans, 0.0)
    for start, end in zip(times, times[1:]):
        active = [name for name, span in spans.items() if span.start <= start and end <= span.end]
        for name in active:
            alone[name] += (end - start) / len(active)
    return alone


def by_kind(steps: Iterable[TracedStep]) -> Iterator[tuple[str, list[TracedStep]]]:
    """Steps of the same kind and orders together."""
    groups: dict[Any, list[TracedStep]] = {}
    for step in steps:
        groups.setdefault((step.kind, step.orders), []).append(step)
    yield from ((kind, group) for (kind, _), group in groups.items())


def median_tasks(steps: list[TracedStep]) -> dict[str, Task]:
    """Each time of each task as its median over steps of one kind."""
    labels = steps[0].tasks
    return {label: Task(*map(statistics.median, zip(*(step.tasks[label] for step in steps)))) for label in labels}


def typical(steps: list[TracedStep]) -> TracedStep:
    """The step with the median time, the earlier of two."""
    return sorted(steps, key=lambda step: step.seconds)[(len(steps) - 1) // 2]

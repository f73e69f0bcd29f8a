"""When each operation of a step runs: a discrete-event model of one rank with two lanes.

The communication lane serves collectives in the order of their launch, the compute lane its work in program order; an
operation starts when its lane is free and all that it waits for is done. Plain data in (operations with seconds, bytes and
dependencies) and out (spans), so that any optimizer's step can be put in: as operations, or as tasks, of which `operations_of`
makes the step that `NorMuonAndAdam.step` makes of two orders. Seconds are those of an operation alone; while both lanes are
busy, each is slowed by its own factor, as collectives take processors and memory bandwidth from kernels. The host is ahead.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

COMMUNICATION, COMPUTE = "communication", "compute"
EPSILON = 1e-12  # seconds: two times that differ by less are the same


class ModelError(ValueError):
    """A step that cannot be run; its message says what to change."""


class Operation(NamedTuple):
    """One collective, or one piece of arithmetic."""

    name: str  # unique: "attn reduce"
    lane: str  # COMMUNICATION or COMPUTE
    seconds: float  # alone
    after: tuple[str, ...] = ()  # operations that must be done before it starts
    bytes: float = 0.0  # that a rank sends


def from_file(kind: type, row: Mapping) -> Any:
    """A named tuple of what a file says. Raises TypeError or ValueError, naming the field, for what is not of its type."""
    made = kind(**row)
    for name, value in zip(made._fields, made):
        wanted = kind.__annotations__[name]
        texts = isinstance(value, tuple) and all(isinstance(text, str) for text in value)
        number = type(value) is int or wanted is float and type(value) is float
        if not (isinstance(value, str) if wanted is str else number if wanted in (int, float) else texts):
            raise ValueError(f"{name} is {value!r:.60}")
    return made


class Span(NamedTuple):
    """When an operation ran, in seconds."""

    start: float
    end: float


class Interference(NamedTuple):
    """How much longer each lane takes while the other is busy: 0.2 is 20 %."""

    compute: float = 0.0
    communication: float = 0.0


def interference_of(found: Mapping) -> Interference:
    """That of a file, 0 where it tells none. Raises ValueError."""
    slowdowns = [float(found.get(f"{lane}_slowdown", 0)) for lane in (COMPUTE, COMMUNICATION)]
    if not all(0 <= slowdown < 1e6 for slowdown in slowdowns):
        raise ValueError(f"slowdowns are {slowdowns}, must be 0 or more")
    return Interference(*slowdowns)


class Task(NamedTuple):
    """What a step does for one label. Times in seconds, bytes as one rank sends them."""

    reduce: float  # of its gradient's reduction; 0: it has none, as on one rank
    update: float
    gather: float = 0.0  # 0: it has none, as when replicated
    before: float = 0.0  # arithmetic before its reduction is launched: a tied gradient is added, transposed
    launch: float = 0.0  # arithmetic in the launch itself: gloo copies what it reduces
    behind: float = 0.0  # arithmetic after its gather: the tied parameter is overwritten
    reduce_bytes: float = 0.0
    gather_bytes: float = 0.0


class Forward(NamedTuple):
    """A part of the next step's forward pass, and the labels whose new values it reads."""

    name: str
    seconds: float
    needs: tuple[str, ...]


class Orders(NamedTuple):
    """Labels in the order in which their reductions are launched, and in the order in which their updates are worked."""

    scatter: tuple[str, ...]
    work: tuple[str, ...]


def operations_of(tasks: Mapping[str, Task], orders: Orders, forward: Sequence[Forward] = ()) -> list[Operation]:
    """NorMuonAndAdam's step: launch all reductions; in work order wait, update, launch the gather; then wait for the gathers,
    first for those with something behind them. A collective starts after the arithmetic that was launched before it.
    forward: parts of the next forward pass, in their order, each of which waits for what it needs alone.
    Raises ModelError if the orders do not name every task once."""
    for name, order in zip(("scatter", "work"), orders):
        if sorted(order) != sorted(tasks):
            raise ModelError(f"the {name} order names {', '.join(order)}; it must name each of {', '.join(tasks)} once")
    operations: list[Operation] = []
    last: tuple[str, ...] = ()  # the arithmetic launched so far
    for label in orders.scatter:
        task = tasks[label]
        for phase, seconds in (("before", task.before), ("launch", task.launch)):
            if seconds:
                operations.append(Operation(f"{label} {phase}", COMPUTE, seconds))
                last = (f"{label} {phase}",)
        if task.reduce:
            operations.append(Operation(f"{label} reduce", COMMUNICATION, task.reduce, last, task.reduce_bytes))
    for label in orders.work:
        task = tasks[label]
        reduced = (f"{label} reduce",) if task.reduce else ()
        operations.append(Operation(f"{label} update", COMPUTE, task.update, reduced))
        if task.gather:
            operations.append(Operation(f"{label} gather", COMMUNICATION, task.gather, (f"{label} update",), task.gather_bytes))
    for label in orders.work:
        if tasks[label].behind:
            gathered = f"{label} gather" if tasks[label].gather else f"{label} update"
            operations.append(Operation(f"{label} behind", COMPUTE, tasks[label].behind, (gathered,)))
    for part in forward:
        ready = [phase for label in part.needs if label in tasks for phase in ready_after(label, tasks[label])]
        operations.append(Operation(part.name, COMPUTE, part.seconds, tuple(ready)))
    return operations


def ready_after(label: str, task: Task) -> list[str]:
    """The operations after which a label's new values, and those of what is tied to it, can be read."""
    last = "gather" if task.gather else "update"
    return [f"{label} {last}", *([f"{label} behind"] if task.behind else [])]


def simulate(
    operations: Iterable[Operation], interference: Interference = Interference(), channels: int = 1
) -> dict[str, Span]:
    """The span of each operation by its name, from 0 on. channels: collectives in service at a time, which share the lane.

    Raises ModelError if an operation waits for one that comes later in its own lane, or that is not there.
    """
    operations = list(operations)
    lanes = {lane: [op for op in operations if op.lane == lane] for lane in (COMMUNICATION, COMPUTE)}
    check(operations, lanes)
    slow = {COMPUTE: 1 / (1 + interference.compute), COMMUNICATION: 1 / (1 + interference.communication)}
    width = {COMPUTE: 1, COMMUNICATION: channels}
    next_up = dict.fromkeys(lanes, 0)
    started: dict[str, float] = {}
    spans: dict[str, Span] = {}
    running: dict[str, dict[str, float]] = {lane: {} for lane in lanes}  # by lane: seconds left of each operation, alone
    now = 0.0
    while len(spans) < len(operations):
        for lane, queue in lanes.items():
            while len(running[lane]) < width[lane] and next_up[lane] < len(queue):
                op = queue[next_up[lane]]
                if any(name not in spans for name in op.after):
                    break
                running[lane][op.name], started[op.name] = op.seconds, now
                next_up[lane] += 1
        both = bool(running[COMPUTE]) and bool(running[COMMUNICATION])
        rates = {lane: (slow[lane] if both else 1.0) / max(1, len(active)) for lane, active in running.items()}
        left = [seconds / rates[lane] for lane, active in running.items() for seconds in active.values()]
        if not left:
            heads = [queue[next_up[lane]] for lane, queue in lanes.items() if next_up[lane] < len(queue)]
            stuck = "; ".join(f"{op.name} waits for {', '.join(set(op.after) - spans.keys())}" for op in heads)
            raise ModelError(f"the step never ends: {stuck}: put what is waited for earlier in its lane")
        passed = min(left)
        now += passed
        for lane, active in running.items():
            for name in list(active):
                active[name] -= passed * rates[lane]
                if active[name] <= EPSILON:
                    del active[name]
                    spans[name] = Span(started[name], now)
    return spans


def check(operations: list[Operation], lanes: Mapping[str, list[Operation]]) -> None:
    """Raise ModelError for names twice, unknown lanes or dependencies, and times that are none."""
    names = {op.name for op in operations}
    if not names:
        raise ModelError("a step without operations: give one at least")
    if len(names) < len(operations):
        twice = sorted({op.name for op in operations if sum(other.name == op.name for other in operations) > 1})
        raise ModelError(f"operations with the same name: {', '.join(twice)}: a name must stand once")
    for op in operations:
        if not op.name.isprintable():
            raise ModelError(f"operation {ascii(op.name)}: a name must be printable")
        if op.lane not in lanes:
            raise ModelError(f"operation {op.name}: no lane {op.lane!r}: use {' or '.join(lanes)}")
        if missing := [name for name in op.after if name not in names]:
            raise ModelError(f"operation {op.name} is after {', '.join(missing)}, which is no operation")
        if not 0 <= op.seconds < 1e9:
            raise ModelError(f"operation {op.name} takes {op.seconds} seconds: must be 0 or more")


def window(spans: Mapping[str, Span]) -> float:
    """Seconds from the first start to the last end."""
    return max(span.end for span in spans.values()) - min(span.start for span in spans.values())


def step_seconds(
    tasks: Mapping[str, Task], orders: Orders, interference: Interference = Interference(), channels: int = 1,
    forward: Sequence[Forward] = (),
) -> float:  # fmt: skip
    """The step's window; with a forward pass, how much later that ends than it would if it took the step no time."""
    spans = simulate(operations_of(tasks, orders, forward), interference, channels)
    return window(spans) - sum(part.seconds for part in forward)


# -----------------------------------------------------------------------------
# Why a step takes as long as it does: of spans that were simulated, or traced


class Exposure(NamedTuple):
    """A time in which no arithmetic runs."""

    start: float
    end: float
    before: str  # the arithmetic that waits; "" at the step's end
    served: tuple[tuple[str, float], ...]  # collectives in the lane meanwhile, with their seconds; none: nothing was ready

    @property
    def seconds(self) -> float:
        return self.end - self.start


def exposures(operations: Sequence[Operation], spans: Mapping[str, Span], least: float = EPSILON) -> list[Exposure]:
    """The times in which the compute lane stands still within the step, those of more than `least` seconds."""
    first, last = min(span.start for span in spans.values()), max(span.end for span in spans.values())
    compute = sorted((spans[op.name], op.name) for op in operations if op.lane == COMPUTE)
    collectives = [(op.name, spans[op.name]) for op in operations if op.lane == COMMUNICATION]
    found, free = [], first
    for (start, end), name in [*compute, (Span(last, last), "")]:
        if start - free > least:
            overlaps = [(other, min(start, span.end) - max(free, span.start)) for other, span in collectives]
            served = tuple((other, seconds) for other, seconds in overlaps if seconds > EPSILON)
            found.append(Exposure(free, start, name, served))
        free = max(free, end)
    return found


def reason(exposure: Exposure, operations: Sequence[Operation]) -> str:
    """Why arithmetic waits, in words."""
    place = {op.name: i for i, op in enumerate(operations)}
    own = next((op.after for op in operations if op.name == exposure.before), ())
    last = max((place[name] for name in own), default=len(place))
    ahead = [name for name in place if place[name] < last]
    groups = {"itself" if own else "still": own or place, "behind": ahead, "beside": place}
    parts, told = [], set()
    for how, members in groups.items():
        times = [f"{name} {1000 * seconds:.3f}" for name, seconds in exposure.served if name in members and name not in told]
        told.update(members)
        if times:
            parts.append(f"{how} {', '.join(times)}")
    silent = exposure.seconds - sum(seconds for _, seconds in exposure.served)
    if not exposure.served or silent > 0.05 * exposure.seconds:
        parts.append(f"nothing travels for {1000 * silent:.3f}: the host, or another rank, is late")
    waits = f"{exposure.before} waits for {', '.join(own) or 'its turn'}" if exposure.before else "nothing is left to update"
    return f"{waits} (ms: {'; '.join(parts)})"


def critical_path(operations: Sequence[Operation], spans: Mapping[str, Span], slack: float = 1e-9) -> list[str]:
    """Operations, first to last, each of which could not start before the one in front of it had ended: to shorten the step is
    to shorten one of these, or to change their order. slack: seconds between an end and the start that it allows, at most;
    behind a longer pause the path goes on with what ended last before it."""
    by_name = {op.name: op for op in operations}
    lanes = {lane: [op.name for op in operations if op.lane == lane] for lane in (COMMUNICATION, COMPUTE)}
    name = max(spans, key=lambda name: (spans[name].end, spans[name].start))
    path = [name]
    while True:
        op = by_name[name]
        queue = lanes[op.lane]
        earlier = [*op.after, *queue[: queue.index(name)]]
        done = [other for other in earlier if other in spans and spans[other].end <= spans[name].start + slack]
        if not done:
            return path[::-1]
        name = max(done, key=lambda other: (spans[other].end, other in op.after))
        path.append(name)

"""The best orders of a step's reductions and updates, and a time that no orders beat.

Small problems are solved exactly, by branch and bound over both orders. Others by local search from several starts, beside a
lower bound: the larger of two that hold whatever the orders are, `overlap_bound` and `flow_bound`.
"""

import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from bench.schedule_model import Forward, Interference, Orders, Task, step_seconds

EXACT_PAIRS = 15_000  # of orders, at most, for branch and bound: five different labels
SUBSETS = 14  # labels, at most, for the dynamic program over all subsets
WORTH = 2e-3  # what orders must gain to be taken instead of ones nearer to those given
TIE = 1e-9  # seconds: orders that differ by less are equally good


class Found(NamedTuple):
    """What a search ends with."""

    orders: Orders
    seconds: float
    bound: float  # no orders are faster
    exact: bool  # nothing is faster: every pair of orders was ruled out, or the bound is reached


class Problem(NamedTuple):
    """A step whose orders are sought."""

    tasks: Mapping[str, Task]
    interference: Interference = Interference()
    channels: int = 1
    forward: Sequence[Forward] = ()

    def seconds(self, orders: Orders) -> float:
        return step_seconds(self.tasks, orders, self.interference, self.channels, self.forward)


class Together(NamedTuple):
    """Steps of several kinds that share one pair of orders, each with its share of all steps; each has its own labels."""

    parts: Sequence[tuple[Problem, float]]

    def seconds(self, orders: Orders) -> float:
        """In the mean of all steps."""
        total = 0.0
        for problem, share in self.parts:
            own = Orders(*(tuple(label for label in order if label in problem.tasks) for order in orders))
            total += share * problem.seconds(own)
        return total


# -----------------------------------------------------------------------------
# Lower bounds


def overlap_bound(problem: Problem) -> float:
    """The larger of all communication and all compute, with what cannot overlap, and what overlapping itself costs.

    While the first reduction travels, only what stands before the updates can run; while the last gather does, only what stands
    behind the gathers. Of c seconds of communication and u of compute, both slowed by factors 1 + a and 1 + b while both lanes
    are busy, x seconds of overlap save x · (1/(1 + a) + 1/(1 + b) − 1).
    """
    tasks, (b, a) = problem.tasks.values(), problem.interference
    communication = sum(task.reduce + task.gather for task in tasks)
    compute = sum(task.before + task.launch + task.update + task.behind for task in tasks)
    hidden_first = sum(task.before + task.launch for task in tasks) * (1 + b) / (1 + a)
    hidden_last = sum(task.behind for task in tasks) * (1 + b) / (1 + a)
    alone = max(0.0, min(task.reduce for task in tasks) - hidden_first)
    if not problem.forward:
        alone += max(0.0, min(task.gather for task in tasks) - hidden_last)
    if problem.forward:  # which runs beside gathers as well, and is taken off at the end
        compute += sum(part.seconds for part in problem.forward)
    overlap = min((communication - alone) * (1 + a), compute * (1 + b))
    gain = max(0.0, 1 / (1 + a) + 1 / (1 + b) - 1)
    return communication + compute - gain * overlap - sum(part.seconds for part in problem.forward)


def flow_bound(problem: Problem) -> float:
    """The best time of a simpler step: no interference, reductions in work order and never late, the forward pass at the end.

    A dynamic program over the sets of labels that are worked first, with the times at which both lanes are through with a set's
    updates and gathers; of two states of a set only one that is better somewhere is kept. Every pair of orders takes at least
    as long in the full model: to reduce in work order makes each prefix ready earliest, and interference only delays.
    """
    tasks = problem.tasks
    if problem.forward:
        return 0.0
    labels = sorted(tasks, key=tasks.__getitem__)
    before = sum(task.before + task.launch for task in tasks.values())
    behind = sum(task.behind for task in tasks.values())
    reductions = sum(task.reduce for task in tasks.values())
    if len(labels) > SUBSETS:
        return 0.0
    states: dict[int, list[tuple[float, float]]] = {0: [(before, reductions)]}
    for done in range(2 ** len(labels) - 1):
        for i, label in enumerate(labels):
            twin = i and tasks[labels[i - 1]] == tasks[label] and not done >> (i - 1) & 1  # of equals, the first goes first
            if done >> i & 1 or twin or done not in states:
                continue
            task, after = tasks[label], done | 1 << i
            ready = sum(tasks[labels[j]].reduce for j in range(len(labels)) if after >> j & 1)
            for compute, lane in states[done]:
                worked = max(compute, ready) + task.update
                add_state(states.setdefault(after, []), (worked, max(lane, worked) + task.gather if task.gather else lane))
        if done:
            states.pop(done, None)
    return min(max(lane, compute + behind) for compute, lane in states[2 ** len(labels) - 1])


def add_state(front: list[tuple[float, float]], new: tuple[float, float]) -> None:
    """Keep of a set's states those that no other beats in both times."""
    if not any(old[0] <= new[0] and old[1] <= new[1] for old in front):
        front[:] = [old for old in front if not (new[0] <= old[0] and new[1] <= old[1])] + [new]


def lower_bound(problem: Problem) -> float:
    return max(overlap_bound(problem), flow_bound(problem))


# -----------------------------------------------------------------------------
# Search


def permutations(tasks: Mapping[str, Task], twins: bool) -> Iterator[tuple[str, ...]]:
    """All orders of the labels; unless twins, those in which labels with equal tasks keep the table's order."""
    labels = list(tasks)
    equal = [] if twins else [(a, b) for i, a in enumerate(labels) for b in labels[i + 1 :] if tasks[a] == tasks[b]]
    for order in itertools.permutations(labels):
        if all(order.index(a) < order.index(b) for a, b in equal):
            yield order


def pairs_of_orders(tasks: Mapping[str, Task]) -> int:
    """How many pairs branch and bound must rule out: of equal labels one work order stands for all."""
    orders = alike = 1
    for i in range(len(tasks)):
        orders *= i + 1
    for task in set(tasks.values()):
        for i in range(sum(other == task for other in tasks.values())):
            alike *= i + 1
    return orders * orders // alike


def exact_search(problem: Problem, start: Orders) -> tuple[Orders, float]:
    """The best of all pairs of orders. For each scatter order, work orders grow label by label; those whose prefix cannot end
    before the best so far are given up: its updates and gathers end, without interference, no earlier than computed here."""
    tasks, best, seconds = problem.tasks, start, problem.seconds(start)
    bound = lower_bound(problem)
    behind = sum(task.behind for task in tasks.values())
    extra = float("inf") if problem.forward else 0.0  # prefixes say nothing then
    for scatter in permutations(tasks, twins=False):
        ready, lane, compute = {}, 0.0, 0.0
        for label in scatter:
            compute += tasks[label].before + tasks[label].launch
            lane = max(lane, compute if tasks[label].before + tasks[label].launch else 0.0) + tasks[label].reduce
            ready[label] = lane if tasks[label].reduce and problem.channels == 1 else 0.0
        total = sum(task.reduce for task in tasks.values())
        grown = [((), compute, total if problem.channels > 1 else lane)]
        while grown and seconds > bound + TIE:
            work, compute, lane = grown.pop()
            left = [label for label in tasks if label not in work]
            if not left:
                orders = Orders(scatter, work)
                if (took := problem.seconds(orders)) < seconds - TIE:
                    best, seconds = orders, took
                continue
            for label in reversed(left):
                worked = max(compute, ready[label]) + tasks[label].update
                gathered = max(lane, worked) + tasks[label].gather if tasks[label].gather else lane
                rest = [tasks[other] for other in left if other != label]
                ends = worked + sum(task.update for task in rest) + behind, gathered + sum(task.gather for task in rest)
                if max(ends) < seconds - TIE + extra:
                    grown.append(((*work, label), worked, gathered))
    return best, seconds


def neighbours(order: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Every order in which one label stands elsewhere."""
    for i, label in enumerate(order):
        rest = order[:i] + order[i + 1 :]
        for j in range(len(order)):
            if j != i:
                yield (*rest[:j], label, *rest[j:])


def descend(
    problem: Problem | Together, orders: Orders, tell: Callable[[float], None] = lambda _: None
) -> tuple[Orders, float]:
    """Move one label in one order, or in both, for as long as that shortens the step. tell: hears its seconds, at every try."""
    seconds, better = problem.seconds(orders), True
    while better:
        better = False
        moves = [Orders(order, orders.work) for order in neighbours(orders.scatter)]
        moves += [Orders(orders.scatter, order) for order in neighbours(orders.work)]
        moves += [Orders(order, order) for order in neighbours(orders.work)]
        for move in moves:
            tell(seconds)
            if (took := problem.seconds(move)) < seconds - TIE:
                orders, seconds, better = move, took, True
                break
    return orders, seconds


def starts(problem: Problem, start: Orders, tries: int) -> Iterator[Orders]:
    """Where local search begins: the given orders; Johnson's rules for flow shops; random ones."""
    tasks, labels = problem.tasks, list(problem.tasks)
    yield start
    yield Orders(start.work, start.work)
    rules = (
        lambda label: (tasks[label].reduce > tasks[label].gather, tasks[label].reduce),  # short reductions first
        lambda label: -tasks[label].update,  # long updates first
        lambda label: tasks[label].update - tasks[label].gather,
        lambda label: -tasks[label].gather,
    )
    for rule in rules:
        order = tuple(sorted(labels, key=rule))
        yield Orders(order, order)
    chance = random.Random(0)
    for _ in range(tries):
        yield Orders(tuple(chance.sample(labels, len(labels))), tuple(chance.sample(labels, len(labels))))


def search(
    problem: Problem, start: Orders, tries: int = 4, tell: Callable[[int, int, float], None] = lambda *_: None
) -> Found:
    """The best orders found from `start`, which stays where nothing is faster; the same on every call.

    tell: hears, at every try of a local search, which start of how many it goes from, and the best seconds so far.
    """
    bound = lower_bound(problem)
    if pairs_of_orders(problem.tasks) <= EXACT_PAIRS:
        orders, seconds = exact_search(problem, descend(problem, start)[0])
        orders, seconds = keep(problem, start, orders, seconds)
        return Found(orders, seconds, seconds, True)
    best, seconds = start, problem.seconds(start)
    begins = [*starts(problem, start, tries)]
    for i, begin in enumerate(begins, 1):
        if seconds <= bound + TIE:
            break
        orders, took = descend(problem, begin, lambda now: tell(i, len(begins), min(now, seconds)))
        if took < (1 - WORTH) * seconds:
            best, seconds = orders, took
    return Found(best, seconds, min(bound, seconds), seconds <= bound + TIE)


def keep(problem: Problem, start: Orders, orders: Orders, seconds: float) -> tuple[Orders, float]:
    """`start` if the orders found are no faster."""
    usual = problem.seconds(start)
    return (start, usual) if usual <= seconds + TIE else (orders, seconds)

"""What a gain in loss is worth in steps and seconds, and the times at equal loss."""

import math
from typing import NamedTuple

import t_tests
from groups import Group
from runlog import RunLog
from t_tests import Difference, mean, sigma

ALIKE = 1.25  # slopes are averaged over spans of steps whose lengths differ by no more
FAR = 1 / 4  # share of the steps: a gain worth more is too far along a straight line for a test
ENDING = 1 / 20  # share of the steps, the last ones, over which the slope is measured at least


class EqualLoss(NamedTuple):
    """What a difference in loss is worth, and what the times are at equal loss."""

    slope: float  # the loss that a step takes off near the end, of both groups; above 0
    over: int  # the steps that it is measured over
    steps: float  # by so many the new runs could end earlier, at the baseline's loss; < 0: later
    pace: float  # seconds a step, in the new runs, over those last steps
    time: Difference | None  # in time at equal loss; None: not comparable, or far
    far: bool


def ending(run: RunLog) -> tuple[int, float, float] | None:
    """(steps, loss a step takes off, seconds a step) since the last validation before the end."""
    end, last_loss, last_time = run.validations[-1]
    before = [x for x in run.validations if x[0] <= end - max(1.0, ENDING * end)]
    if not before:
        return None
    step, loss, time = before[-1]
    steps = end - step
    return steps, (loss - last_loss) / steps, (last_time - time) / 1000 / steps


def equal_loss(a: Group, b: Group, times_compare: bool, pairs: bool) -> EqualLoss | None:
    """None if fewer than two runs of each have a slope, or losses do not fall near the end.

    A run's time at the baseline's loss is its time + (its loss − that) × pace / slope. The error
    of the slope is added: error² + (Δloss × pace × slope's error / slope²)².
    """
    endings = [[ending(run) for run in group.runs] for group in (a, b)]
    if min(map(len, endings)) < 2 or None in endings[0] + endings[1]:
        return None
    over = min(steps for group in endings for steps, _, _ in group)
    # Curves flatten: over many more steps the slope is steeper.
    slopes = [[x for steps, x, _ in group if steps <= ALIKE * over] for group in endings]
    slopes = [group for group in slopes if len(group) > 1]
    slope = mean([mean(group) for group in slopes])
    if not slope > 0:
        return None
    errors = [sigma(group) / math.sqrt(len(group)) for group in slopes]
    slope_error = math.hypot(*errors) / len(errors)
    seconds_a_step = mean([seconds for _, _, seconds in endings[1]])
    gain = mean(a.losses) - mean(b.losses)
    steps = gain / slope
    far = abs(steps) > FAR * min(run.steps for run in a.runs + b.runs)
    time = None
    if times_compare and not far:
        price = seconds_a_step / slope
        times = [[run.seconds + run.loss * price for run in group.runs] for group in (a, b)]
        time = (t_tests.paired if pairs else t_tests.different)(*times)
        error = math.hypot(time.error, gain * price * slope_error / slope)
        if error > 0:
            time = t_tests.with_error(time.mean, error, time.freedom)
    return EqualLoss(slope, over, steps, seconds_a_step, time, far)

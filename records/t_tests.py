"""Statistics of a comparison: t-tests with intervals, Holm's correction, numbers of runs.

Sample means, sample standard deviations. nan: undefined, for fewer than two runs or no variance.
"""

import math
import statistics
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

P = 0.01  # the significance that a record needs
POWER = 0.8  # the chance of reaching it at which a number of runs is enough
CONFIDENCE = 0.95  # of intervals
RANGE = 0.8  # of the estimates of a number of runs, whose range is told
LEAST_RUNS = 5  # below that, σ is too uncertain to say how many runs are enough: by a factor of 3 with 4 runs
PLAIN = 1000  # t of a difference whose range is not told: the fewest runs show both its ends
MOST_RUNS = 10_000
UNSAFE = 1.5  # times P: a true error above that is told


class Difference(NamedTuple):
    """Of two means, new minus baseline: with its standard error, degrees of freedom, two-sided p and CONFIDENCE interval."""

    mean: float
    error: float = math.nan
    freedom: float = math.nan
    p: float = math.nan
    low: float = math.nan
    high: float = math.nan


class Needed(NamedTuple):
    """Runs of a new set: about, and the range of RANGE of such estimates. None: more than MOST_RUNS."""

    about: int | None
    low: int | None
    high: int | None


def mean(values: list[float]) -> float:
    return statistics.fmean(values) if values else math.nan


def sigma(values: list[float]) -> float:
    """Sample standard deviation, nan for fewer than two values."""
    return statistics.stdev(values) if len(values) > 1 else math.nan


# -----------------------------------------------------------------------------
# Tests


def welch(spread_a: float, n_a: int, spread_b: float, n_b: int) -> tuple[float, float]:
    """Standard error of the difference of two means, and its degrees of freedom (Welch-Satterthwaite)."""
    a, b = spread_a**2 / n_a, spread_b**2 / n_b
    share = a / (a + b) if a + b else 0.5  # else too small to be squared: no error above 0
    return math.sqrt(a + b), 1 / (share**2 / (n_a - 1) + (1 - share) ** 2 / (n_b - 1))


def t_test(difference: float, error: float, freedom: float) -> Difference:
    """The difference with its p and interval, from Student's t; without, if the error is not above 0."""
    from scipy.special import stdtr, stdtrit  # scipy.stats takes a second to import

    if not error > 0:
        return Difference(difference)
    half = float(stdtrit(freedom, (1 + CONFIDENCE) / 2)) * error
    p = float(2 * stdtr(freedom, -abs(difference) / error))
    return Difference(difference, error, freedom, p, difference - half, difference + half)


def different(a: list[float], b: list[float]) -> Difference:
    """mean(b) − mean(a), by Welch's two-sample t-test: variances may differ."""
    if min(len(a), len(b)) < 2 or not sigma(a) + sigma(b) > 0:
        return Difference(mean(b) - mean(a))
    return t_test(mean(b) - mean(a), *welch(sigma(a), len(a), sigma(b), len(b)))


def differences_of_pairs(a: list[float], b: list[float]) -> list[float]:
    """b − a, to ten digits: logs print four, and where all pairs differ alike, the rest is rounding, no spread."""
    return [round(after - before, 10) for before, after in zip(a, b, strict=True)]


def paired(a: list[float], b: list[float]) -> Difference:
    """mean(b − a), by the paired t-test: value i of each belong together."""
    differences = differences_of_pairs(a, b)
    if not sigma(differences) > 0:
        return Difference(mean(differences))
    return t_test(mean(differences), sigma(differences) / math.sqrt(len(a)), len(a) - 1)


def p_below(values: list[float], target: float) -> float:
    """One-sided p of the one-sample t-test: that runs whose mean is the target have a mean so far below it."""
    from scipy.special import stdtr

    if not sigma(values) > 0:
        return math.nan
    return float(stdtr(len(values) - 1, (mean(values) - target) / (sigma(values) / math.sqrt(len(values)))))


def holm(ps: list[float]) -> list[float]:
    """Holm's correction of the p-values of one family: below P for any of them, with P the chance that one is by accident.

    The smallest times their number, the next times one less, and so on; none below the one before. nan are not counted.
    """
    defined = sorted(p for p in ps if not math.isnan(p))
    corrected, least = {}, 0.0
    for i, p in enumerate(defined):
        least = max(least, min(1.0, (len(defined) - i) * p))
        corrected.setdefault(p, least)
    return [corrected.get(p, math.nan) for p in ps]


def welch_limits(spread_a: float, n_a: int, spread_b: float, n_b: int, nodes: int):
    """What Student's t of n_a + n_b − 2 degrees of freedom must exceed for Welch's test to say p < P: array of `nodes` values.

    Given the ratio of the sample variances, Welch's statistic is such a t times a known factor; that ratio follows a beta
    distribution, whose quantiles these are, so that a mean over the array is an integral by the midpoint rule.
    """
    import numpy as np
    from scipy.special import betaincinv, stdtrit

    a, b = n_a - 1, n_b - 1
    share = betaincinv(a / 2, b / 2, (np.arange(nodes) + 0.5) / nodes)
    part_a, part_b = spread_a**2 * share / a / n_a, spread_b**2 * (1 - share) / b / n_b  # of the squared standard error
    freedom = (part_a + part_b) ** 2 / (part_a**2 / a + part_b**2 / b)
    factor = np.sqrt((a + b) * (part_a + part_b)) / math.hypot(spread_a / math.sqrt(n_a), spread_b / math.sqrt(n_b))
    return stdtrit(freedom, 1 - P / 2) * factor


@lru_cache(maxsize=256)
def true_error(n_a: int, n_b: int, ratio: float | None = None) -> float:
    """How often Welch's test says p < P of runs of equal means, normally distributed.

    ratio: σ_a/σ_b; None: the worst between 1/4 and 4.
    """
    from scipy.special import stdtr

    if ratio is None:
        return max(true_error(n_a, n_b, 2.0 ** (i / 2)) for i in range(-4, 5))
    return float(2 * stdtr(n_a + n_b - 2, -welch_limits(ratio, n_a, 1.0, n_b, 400)).mean())


def welch_power(size: float, spread_a: float, n_a: int, spread_b: float, n_b: int) -> float:
    """How often Welch's test says p < P, on the right side, of runs whose true means differ by `size`."""
    noncentrality = size / math.hypot(spread_a / math.sqrt(n_a), spread_b / math.sqrt(n_b))
    return chance_above(welch_limits(spread_a, n_a, spread_b, n_b, 40), n_a + n_b - 2, noncentrality)


def one_sample_power(size: float, spread: float, n: int, significance: float) -> float:
    """How often a one-sample t-test is significant on one side, of n values whose true mean lies `size` on that side."""
    from scipy.special import stdtrit

    return chance_above(stdtrit(n - 1, 1 - significance), n - 1, size / spread * math.sqrt(n))


def chance_above(limits, freedom: int, noncentrality: float) -> float:
    """That a noncentral t exceeds a limit; the mean for several."""
    import numpy as np
    from scipy.special import nctdtr

    return 1 - float(np.mean(np.nan_to_num(nctdtr(freedom, noncentrality, limits))))  # scipy gives nan below some 1e-280


# -----------------------------------------------------------------------------
# Numbers of runs: of a new set, tested alone. Runs added to those that were looked at make p smaller than it is.


def fewest(power: Callable[[int], float]) -> int | None:
    """The smallest number of runs, from 2 to MOST_RUNS, whose power, which grows with it, is at least POWER."""
    low, high = 1, 2
    while power(high) < POWER:
        low, high = high, 2 * high
        if low >= MOST_RUNS:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if power(middle) < POWER else (low, middle)
    return high if high <= MOST_RUNS else None


def new_set(size: float, error: float, freedom: float, power: Callable[[int, float], float]) -> Needed:
    """size: of the difference found. power(n, size): of a set of n, were that the true one.

    The range is that of the true sizes between which the noncentral t distribution puts RANGE of such findings.
    """
    from scipy.special import nctdtrinc

    def enough(true_size: float) -> int | None:
        return fewest(lambda n: power(n, true_size)) if true_size > 0 else None

    ends = (size, size)  # scipy's function does not return for t of some 1e5
    if size < PLAIN * error:
        ends = (float(nctdtrinc(freedom, q, size / error)) * error for q in ((1 - RANGE) / 2, (1 + RANGE) / 2))
    return Needed(*map(enough, (size, *ends)))


def new_set_different(a: list[float], b: list[float]) -> Needed | None:
    """How many new runs of each give Welch's test p < P with chance POWER, were the present means and σ the true ones.

    None: fewer than LEAST_RUNS of one, no variance or no difference.
    """
    if min(len(a), len(b)) < LEAST_RUNS or not sigma(a) + sigma(b) > 0 or mean(a) == mean(b):
        return None

    return new_set(
        abs(mean(b) - mean(a)),
        *welch(sigma(a), len(a), sigma(b), len(b)),
        lambda n, size: welch_power(size, sigma(a), n, sigma(b), n),
    )


def new_set_paired(a: list[float], b: list[float]) -> Needed | None:
    """The same for pairs."""
    differences = differences_of_pairs(a, b)
    spread, n = sigma(differences), len(differences)
    if n < LEAST_RUNS or not spread > 0 or mean(differences) == 0:
        return None
    return new_set(
        abs(mean(differences)),
        spread / math.sqrt(n),
        n - 1,
        lambda n, size: one_sample_power(size, spread, n, P / 2),
    )


def new_set_below(values: list[float], target: float) -> Needed | None:
    """The same for the test that the mean is below the target. None also if the present mean is not below."""
    spread, n = sigma(values), len(values)
    if n < LEAST_RUNS or not spread > 0 or mean(values) >= target:
        return None
    return new_set(target - mean(values), spread / math.sqrt(n), n - 1, lambda n, size: one_sample_power(size, spread, n, P))


def runs_for(difference: float, spread: float) -> int | None:
    """How many runs of each show a true difference of means at p < P with chance POWER, at a standard deviation of `spread`."""
    return fewest(lambda n: welch_power(difference, spread, n, spread, n))


def runs_for_below(margin: float, spread: float) -> int | None:
    """How many runs show a true mean below a target by `margin`."""
    return fewest(lambda n: one_sample_power(margin, spread, n, P))

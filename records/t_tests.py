"""Statistics by scipy.stats: t-tests, Holm's correction, looks at a race, numbers of runs.

Sample means and sample standard deviations. nan: undefined, for fewer than two runs or runs that
do not differ.
"""

import bisect
import math
import statistics
from typing import NamedTuple

import numpy as np
from scipy import stats

P = 0.01  # the significance that a record needs
POWER = 0.8  # the chance of reaching it at which a number of runs is enough
CONFIDENCE = 0.95  # the level of intervals
RANGE = 0.8  # the interval of a difference from which a number of runs is estimated
LEAST_RUNS = 5  # fewer say too little about σ to estimate how many runs are enough
MOST_RUNS = 10_000
# Looks of a race that ends early: after which share of its pairs, rounded up, at which level. The
# levels add up to P, so without a difference at most so many races end with a verdict (Bonferroni).
LOOKS = ((5, 12, 0.001), (2, 3, 0.003), (1, 1, 0.006))
LEAST_POWER = 0.05  # of the last look, below which a race ends early without a verdict
KEEP, DISCARD, UNDECIDED = 0, 10, 11  # verdicts, as exit codes of race.py
OPEN = -1  # no verdict yet


class Difference(NamedTuple):
    """Between two means, new minus baseline: standard error, two-sided p and interval."""

    mean: float
    error: float = math.nan
    freedom: float = math.nan
    p: float = math.nan
    low: float = math.nan
    high: float = math.nan


class Needed(NamedTuple):
    """Runs of a new set, for the difference found and the ends of its interval. None: too many."""

    about: int | None
    low: int | None
    high: int | None


def mean(values: list[float]) -> float:
    return statistics.fmean(values) if values else math.nan


def sigma(values: list[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else math.nan


def different(a: list[float], b: list[float]) -> Difference:
    """mean(b) − mean(a), by Welch's t-test."""
    if min(len(a), len(b)) < 2 or not sigma(a) + sigma(b) > 0:
        return Difference(mean(b) - mean(a))
    return difference_of(mean(b) - mean(a), stats.ttest_ind(b, a, equal_var=False))


def differences_of_pairs(a: list[float], b: list[float]) -> list[float]:
    """b − a, to ten digits: logs print four, so the rest is rounding."""
    return [round(after - before, 10) for before, after in zip(a, b, strict=True)]


def paired(a: list[float], b: list[float]) -> Difference:
    """mean(b − a), by the paired t-test: value i of each belong together."""
    differences = differences_of_pairs(a, b)
    if not sigma(differences) > 0:
        return Difference(mean(differences))
    return difference_of(mean(differences), stats.ttest_1samp(differences, 0))


def difference_of(size: float, result) -> Difference:
    """size: the difference that scipy's result tests."""
    low, high = result.confidence_interval(CONFIDENCE)
    error = (high - low) / 2 / stats.t.ppf((1 + CONFIDENCE) / 2, result.df)
    figures = (error, result.df, result.pvalue, low, high)
    return Difference(size, *map(float, figures))


def with_error(size: float, error: float, freedom: float, level=CONFIDENCE) -> Difference:
    """The t-test of a difference whose standard error was computed elsewhere; its interval's level."""
    p = 2 * stats.t.sf(abs(size) / error, freedom)
    half = stats.t.ppf((1 + level) / 2, freedom) * error
    return Difference(size, error, freedom, float(p), float(size - half), float(size + half))


def p_below(values: list[float], target: float) -> float:
    """One-sided p of the one-sample t-test that the mean is below the target."""
    if not sigma(values) > 0:
        return math.nan
    return float(stats.ttest_1samp(values, target, alternative="less").pvalue)


def holm(ps: list[float]) -> list[float]:
    """Holm's correction of the p-values of one family; nan are not counted.

    The smallest times their number, the next times one less, and so on; none below the one
    before. Source: S. Holm, Scandinavian Journal of Statistics 6 (1979).
    """
    order = sorted((i for i, p in enumerate(ps) if not math.isnan(p)), key=lambda i: ps[i])
    corrected, least = list(ps), 0.0
    for rank, i in enumerate(order):
        least = max(least, min(1.0, (len(order) - rank) * ps[i]))
        corrected[i] = least
    return corrected


def looks(pairs: int) -> dict[int, float]:
    """The level of each look of a race of at most so many pairs, by the pairs that it takes."""
    if pairs < LEAST_RUNS:
        return {pairs: P}
    return {-(-pairs * part // whole): level for part, whole, level in LOOKS}


def power_left(found: Difference, n: int, plan: dict[int, float]) -> float:
    """The chance that the last look shows the difference found after n pairs, were it the true one.

    At the end t has a normal distribution, about: mean t·√(total / n), spread √(coming / total).
    """
    total = max(plan)
    t = abs(found.mean) / found.error
    least = stats.t.isf(plan[total] / 2, found.freedom * (total - 1) / (n - 1))
    return stats.norm.cdf((t * math.sqrt(total / n) - least) / math.sqrt(1 - n / total))


def decide(found: Difference, n: int, plan: dict[int, float], futility: bool = True) -> int:
    """KEEP (below 0: better), DISCARD, UNDECIDED or OPEN after n pairs. Figures may be arrays."""
    shown, ended = found.p < plan[n], n == max(plan)
    if futility and min(plan) < n < max(plan):
        ended = power_left(found, n, plan) < LEAST_POWER
    cases = [shown & (found.mean < 0), shown & (found.mean > 0), ended]
    return np.select(cases, [KEEP, DISCARD, UNDECIDED], OPEN)


def power(size: float, spreads: list[float], n: int, alpha: float) -> float:
    """How often a t-test of n runs a group shows a true difference of `size`, one-sided alpha.

    spreads: the standard deviation of each group; a single one for a mean or for pairs.
    """
    variances = [spread**2 for spread in spreads]
    error = math.sqrt(sum(variances) / n)
    freedom = (n - 1) * sum(variances) ** 2 / sum(x**2 for x in variances)  # Welch–Satterthwaite
    found = float(stats.nct.sf(stats.t.isf(alpha, freedom), freedom, size / error))
    return 1.0 if math.isnan(found) else found  # scipy's nan: the size is many errors


def runs_for(size: float, spreads: list[float], alpha: float = P / 2) -> int | None:
    """The fewest runs a group whose power is POWER."""
    if not size > 0:
        return None
    counts = range(MOST_RUNS + 1)
    n = bisect.bisect_left(counts, POWER, lo=2, key=lambda n: power(size, spreads, n, alpha))
    return n if n <= MOST_RUNS else None


def needed(found: Difference, spreads: list[float], alpha: float = P / 2) -> Needed | None:
    """Runs of a new set that would show a difference as large as this one; None: unknown."""
    if math.isnan(found.p) or found.mean == 0:
        return None
    half = stats.t.ppf((1 + RANGE) / 2, found.freedom) * found.error
    size = abs(found.mean)
    return Needed(*(runs_for(x, spreads, alpha) for x in (size, size + half, size - half)))

"""How many runs does it take, before one starts?

python records/plan.py 0.001                       # to show a difference of 0.001 in mean loss, at σ = 0.0014
python records/plan.py 0.001 logs/baseline         # at the σ of these runs
python records/plan.py 0.3 logs/baseline --time    # a difference of 0.3 s in mean time
"""

import math
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent)]  # also where Python leaves it out: PYTHONSAFEPATH

import older  # noqa: F401, first of all
import t_tests
import tool
from groups import InputError, gather, on_several_machines, plural
from t_tests import MOST_RUNS, POWER, RANGE, P
from verdict import cautions

SIGMA = 0.0014  # of final losses between seeds, in the public speedrun's records
COUNTS = (3, 5, 10, 20, 40)


def smallest_shown(count: int, spread: float) -> float:
    """The true difference that `count` runs of each show with chance POWER."""
    low, high = 0.0, 100 * spread
    for _ in range(60):
        middle = (low + high) / 2
        enough = t_tests.welch_power(middle, spread, count, spread, count) >= POWER
        low, high = (low, middle) if enough else (middle, high)
    return high


def spread_range(values: list[float]) -> tuple[float, float]:
    """The standard deviations between which RANGE of such samples leave the true one, from the χ² distribution."""
    from scipy.special import chdtri

    freedom = len(values) - 1
    return tuple(t_tests.sigma(values) * math.sqrt(freedom / chdtri(freedom, q)) for q in ((1 - RANGE) / 2, (1 + RANGE) / 2))


def plan(difference: float, spread: float, unit: str = "", between: tuple[float, float] | None = None) -> list[str]:
    """Sentences. between: the spreads that may be the true one."""

    def runs(count: int | None) -> str:
        return f"{count:,}" if count else f"over {MOST_RUNS:,}"

    sizes = ", ".join(f"{smallest_shown(count, spread):.2g}{unit} with {count}" for count in COUNTS)
    ends = [runs(t_tests.runs_for(difference, end)) for end in between or ()]
    uncertain = f", {ends[0]} to {ends[1]} if σ is {between[0]:.2g} to {between[1]:.2g} ({RANGE:.0%})" if between else ""
    each, below = t_tests.runs_for(difference, spread), t_tests.runs_for_below(difference, spread)
    return [
        f"To show, at p < {P:g} with a chance of {POWER:.0%}, at σ = {spread:.2g}{unit}:",
        f"  a difference of {difference:g}{unit} between two means: {runs(each)} runs of each{uncertain}",
        f"  a mean loss {difference:g} below the target: {runs(below)} runs" if not unit else "",
        f"  what so many runs of each show: {sizes}",
    ]


def main(argv: list[str] | None = None) -> None:
    """The command line. Raises SystemExit with code 1 after a message for logs that give no σ, 2 for wrong options."""
    parser = tool.Parser("plan.py", __doc__)
    parser.add_argument("difference", type=tool.finite, help="of two means, that is to be shown")
    parser.add_argument("logs", nargs="*", default=[], metavar="LOGS", help="runs of one kind, whose σ is taken")
    parser.add_argument("--sigma", type=tool.finite, help=f"standard deviation between runs (of losses: {SIGMA:g})")
    parser.add_argument("--time", action="store_true", help="the difference is one of times, in seconds")
    options = parser.parse_intermixed_args(argv)
    between = None
    try:
        if options.logs and options.sigma is not None:
            raise InputError("logs give a σ, and --sigma is one: name either")
        if options.logs:
            group = gather("logs", *options.logs)
            values = group.times if options.time else group.losses
            if options.time and (mixed := on_several_machines(group.runs)):
                raise InputError(f"{' '.join(options.logs)}: times of different machines have no σ: {', '.join(mixed)}")
            if not t_tests.sigma(values) > 0:
                raise InputError(f"{' '.join(options.logs)}: {len(values)} runs give no σ: it takes two that differ")
            options.sigma, between = t_tests.sigma(values), spread_range(values)
            if group.aside:
                print(tool.clean(f"Not counted:\n{group.told_aside()}"))
            for caution in cautions(group):
                print(tool.clean(f"But: {caution}.", one_line=True))
            if lack := options.time and len(group.runs) - len(values):
                print(f"But: {plural(lack, 'log')} of {len(group.runs)} tell no times.")
        elif options.sigma is None:
            options.sigma = None if options.time else SIGMA
        if not options.sigma or not options.sigma > 0 or not options.difference > 0:
            raise InputError("the difference and σ must be above 0; of times, logs or --sigma must tell σ")
        if not all(1e-50 < number < 1e50 for number in (options.difference, options.sigma)):  # fourth powers are taken
            raise InputError("the difference and σ must be from 1e-50 to 1e50")
    except (InputError, OSError) as error:
        raise SystemExit(f"plan.py: error: {error}") from None
    except ModuleNotFoundError as error:
        raise SystemExit(f"plan.py: error: {error}. Try: pip install -r records/requirements.txt") from None
    if options.sigma == SIGMA and not between:
        print("σ is that of the public speedrun's records; of other runs, as the demo's, name their logs.")
    print("\n".join(filter(None, plan(options.difference, options.sigma, " s" if options.time else "", between))))


if __name__ == "__main__":
    tool.run(main)

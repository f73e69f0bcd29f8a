"""How many runs does it take, before one starts?

./run.sh records/plan.py 0.001                  # a difference of 0.001 in mean loss, at σ = 0.0014
./run.sh records/plan.py 0.001 logs/baseline    # at the σ of these runs
./run.sh records/plan.py 0.3 logs/baseline --time    # a difference of 0.3 s in mean time
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import t_tests
from groups import InputError, different_machines, gather_all
from t_tests import MOST_RUNS, POWER, P

SIGMA = 0.0014  # final losses between seeds, in the public speedrun's records


def plan(difference: float, spread: float, unit: str = "") -> list[str]:
    """The lines to print."""
    each = t_tests.runs_for(difference, [spread, spread]) or f"over {MOST_RUNS:,}"
    below = t_tests.runs_for(difference, [spread], P) or f"over {MOST_RUNS:,}"
    lines = [
        f"To show, at p < {P:g} with a chance of {POWER:.0%}, at σ = {spread:.2g}{unit}:",
        f"  a difference of {difference:g}{unit} of two means: {each} runs of each",
    ]
    if not unit:
        lines.append(f"  a mean loss {difference:g} below the target: {below} runs")
    return lines


def main(argv: list[str] | None = None) -> None:
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    parser.add_argument("difference", type=float, help="between two means, to be shown")
    parser.add_argument("logs", nargs="?", metavar="LOGS", help="runs whose σ is taken")
    parser.add_argument("--sigma", type=float, help=f"between runs (of losses: {SIGMA:g})")
    parser.add_argument("--time", action="store_true", help="the difference is in time, s")
    options = parser.parse_intermixed_args(argv)
    spread = options.sigma or (None if options.time else SIGMA)
    try:
        if options.logs:
            group = gather_all([options.logs])[0]
            if options.time and (differ := different_machines(group.runs)):
                raise InputError(f"times of different machines: {', '.join(differ)}")
            if group.aside:
                print(f"set aside:\n{group.aside_lines()}")
            spread = t_tests.sigma(group.times if options.time else group.losses)
    except InputError as error:
        raise SystemExit(f"plan.py: error: {error}") from None
    if not (spread and spread > 0 and options.difference > 0):
        parser.error("difference and σ must be above 0: give --sigma, or two runs or more")
    print("\n".join(plan(options.difference, spread, " s" if options.time else "")))


if __name__ == "__main__":
    main()

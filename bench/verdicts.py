"""Are the verdicts of records/compare.py wrong as seldom, and right as often, as they say? Simulated comparisons tell.

    python bench/verdicts.py [--comparisons=2000]

Runs with normally distributed times and losses go through the same functions as logs do. It prints the tables of
records/README.md; ± is the Monte Carlo error, one standard deviation of a count of so many comparisons.
"""

import argparse
import math
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "records"), str(ROOT)]  # a launch of PYTHONPATH, as ROS has one, is another's
from launch.environment import go_on

if __name__ == "__main__":
    go_on("records/requirements.txt", "numpy", "scipy")

import numpy as np

import t_tests
import verdict
from groups import Group
from launch.console import Parser, until_reader_leaves
from plan import smallest_shown
from runlog import RunLog
from t_tests import P

TARGET, LOSS_SIGMA, TIME, TIME_SIGMA = 3.28, 0.0014, 100.0, 0.2  # losses as in the public speedrun
SLOPE, STEPS = 0.0002, 1500  # of losses near the end: a step's


class Simulation:
    """Groups of runs of a known truth."""

    def __init__(self, seed: int):
        self.random = np.random.default_rng(seed)

    def group(self, name: str, count: int, time: float = TIME, loss: float = TARGET, spread: float = 1.0, drift=0.0) -> Group:
        """count runs; spread multiplies both σ; drift, of as many values: added to the times."""
        times = self.random.normal(time, spread * TIME_SIGMA, count) + drift
        losses = self.random.normal(loss, spread * LOSS_SIGMA, count)
        slopes = self.random.normal(SLOPE, SLOPE / 20, count)
        runs = []
        for i, (seconds, final, slope) in enumerate(zip(times, losses, slopes, strict=True)):
            before = STEPS - 125
            points = [(before, final + 125 * slope, 1000 * seconds * before / STEPS), (STEPS, final, 1000 * seconds)]
            runs.append(
                RunLog(Path(f"{name}{i}.txt"), times={step: ms for step, _, ms in points}, validations=points, total=STEPS)
            )
        return Group(name, runs)


def rate(hits: list[bool]) -> str:
    share = np.mean(hits)
    return f"{share:.2%} ± {math.sqrt(share * (1 - share) / len(hits)):.2%}"


def compared(*groups: Group, pairs: bool = False) -> list[dict]:
    return verdict.compare([*groups], TARGET, pairs)[1:]


def says(row: dict, *words: str) -> bool:
    return any(word in row["verdict"] for word in words)


def errors(count: int) -> list[tuple[str, str, str]]:
    """Verdicts that are wrong, where nothing differs."""
    simulation, found = Simulation(0), {name: [] for name in ("time", "loss", "equal", "below", "paired", "several")}
    for _ in range(count):
        row = compared(simulation.group("a", 10), simulation.group("b", 10))[0]
        found["time"].append(says({"verdict": row["sentences"][0]}, "FASTER", "SLOWER"))
        found["loss"].append(says(row, "loss LOWER", "loss HIGHER"))
        found["equal"].append(says({"verdict": row["sentences"][2]}, "FASTER", "SLOWER"))
        found["below"].append(says(row, "BELOW"))
        drift = np.arange(10) / 10
        row = compared(simulation.group("a", 10, drift=drift), simulation.group("a", 10, drift=drift), pairs=True)[0]
        found["paired"].append(says({"verdict": row["sentences"][0]}, "FASTER", "SLOWER"))
        rows = compared(*(simulation.group(name, 10) for name in "abcd"))
        found["several"].append(any(says(row, "loss LOWER", "loss HIGHER") for row in rows))
    claims = {
        "time": "FASTER or SLOWER, 10 runs of each", "loss": "loss LOWER or HIGHER, 10 of each",
        "equal": "FASTER or SLOWER at equal loss, 10 of each", "below": "mean loss BELOW, 10 runs of mean 3.28",
        "paired": "FASTER or SLOWER, 10 pairs, drifting machine", "several": "any loss LOWER or HIGHER, of 3 ideas (Holm)",
    }  # fmt: skip
    return [(claims[name], f"{P:.0%}", rate(hits)) for name, hits in found.items()]


def powers(count: int) -> list[tuple[str, str, str]]:
    """Verdicts that are right, where something differs by what plan.py says is shown; and intervals that hold the truth."""
    simulation, claimed, shift = Simulation(1), f"{t_tests.POWER:.0%}", smallest_shown(10, 1.0)
    lower, shown, held, at_equal, below = [], [], [], [], []
    alone = t_tests.runs_for_below(0.001, LOSS_SIGMA)
    truth = -shift * LOSS_SIGMA / SLOPE * TIME / STEPS
    for _ in range(count):
        row = compared(simulation.group("a", 10), simulation.group("b", 10, loss=TARGET - shift * LOSS_SIGMA))[0]
        lower.append(says(row, "loss LOWER"))
        held.append(row["loss_low"] <= -shift * LOSS_SIGMA <= row["loss_high"])
        at_equal.append(row["equal_low"] <= truth <= row["equal_high"])
        row = compared(simulation.group("a", 10), simulation.group("b", 10, time=TIME - shift * TIME_SIGMA))[0]
        shown.append(says(row, "FASTER by") and "not shown to be faster" not in row["sentences"][0])
        below.append(verdict.compare([simulation.group("a", alone, loss=TARGET - 0.001)], TARGET)[0]["loss_p_below_target"] < P)
    return [
        (f"loss LOWER, 10 of each, truly by {shift:.2f} σ", claimed, rate(lower)),
        (f"FASTER, 10 of each, truly by {shift:.2f} σ", claimed, rate(shown)),
        (f"mean loss BELOW, {alone} runs, truly by 0.001", claimed, rate(below)),
        ("95% interval of the loss holds the truth", "95%", rate(held)),
        ("95% interval of the time at equal loss holds it", "95%", rate(at_equal)),
    ]


def numbers(count: int) -> list[tuple[str, str, str]]:
    """The new sets that an open verdict asks for, where 8 of each are compared that truly differ by one σ."""
    simulation, true, held, abouts = Simulation(2), t_tests.runs_for(1.0, 1.0), [], []
    for _ in range(count):
        a, b = (simulation.group(name, 8, loss=TARGET - drop).losses for name, drop in (("a", 0), ("b", LOSS_SIGMA)))
        needed = t_tests.new_set_different(a, b)
        held.append(needed.low <= true <= (needed.high or math.inf))
        abouts.append(needed.about or math.inf)
    abouts = np.quantile(abouts, (0.1, 0.5, 0.9), method="nearest")
    return [(f"range of the new set holds the true {true}", f"{t_tests.RANGE:.0%}", rate(held)),
            ("its “about”: a tenth below, median, a tenth above", f"{true}", ", ".join(f"{x:g}" for x in abouts))]  # fmt: skip


def looking_again(count: int) -> list[tuple[str, str, str]]:
    """A run more of each, from 3 on, until p < P or 20 are reached, where nothing differs."""
    random, hits = np.random.default_rng(3), []
    for _ in range(count):
        a, b = random.normal(size=(2, 20))
        hits.append(any(t_tests.different([*a[:n]], [*b[:n]]).p < P for n in range(3, 21)))
    return [("looking after each run, from 3 of each to 20", f"{P:.0%}", rate(hits))]


def unequal(count: int) -> list[tuple[str, str, str]]:
    """Welch's test of 3, 5 or 10 runs against 10, where nothing differs; what verdicts are warned of."""
    from scipy.stats import ttest_ind

    random, rows = np.random.default_rng(4), []
    for n_a, n_b, ratio in ((3, 10, 1), (3, 10, 2), (4, 10, 2), (5, 10, 2), (3, 3, 1), (5, 5, 2), (10, 10, 1)):
        samples = random.normal(0, ratio, (n_a, 100 * count)), random.normal(0, 1, (n_b, 100 * count))
        hits = ttest_ind(*samples, equal_var=False).pvalue < P
        warned = "warned of" if t_tests.true_error(n_a, n_b) > t_tests.UNSAFE * P else "safe"
        rows.append(
            (f"{n_a} against {n_b}, σ {ratio} : 1 ({warned})", f"{t_tests.true_error(n_a, n_b, ratio):.2%}", rate([*hits]))
        )
    return rows


def table(header: str, rows: list[tuple[str, str, str]]) -> str:
    return "\n".join([f"| {header} | said | simulated |", "|---|---|---|", *(f"| {' | '.join(row)} |" for row in rows), ""])


def main(argv: list[str] | None = None) -> None:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--comparisons", type=int, default=2000, help="of each table, 1 or more (%(default)s)")
    if (count := parser.parse_args(argv).comparisons) < 1:
        parser.error(f"--comparisons={count}: must be 1 or more")
    print(table("wrong where nothing differs", errors(count) + looking_again(count)))
    print(table("right where something differs", powers(count) + numbers(count)))
    print(table("Welch's test says p < 0.01 of equal means", unequal(count)))


if __name__ == "__main__":
    with until_reader_leaves():
        main()

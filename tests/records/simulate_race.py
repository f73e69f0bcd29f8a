"""How often is a race's verdict right? Simulated races, decided as records/race.py decides.

./run.sh -m tests.records.simulate_race      # a minute; writes the table in docs/loop.md anew
"""

import sys
from pathlib import Path

import numpy as np
from scipy import stats

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "records")]

from history import between
from t_tests import DISCARD, KEEP, OPEN, Difference, P, decide, looks

RACES, PAIRS, SEED = 200_000, 12, 0
SIZES = (0, 0.5, 1, 2)  # by how many σ of a run the idea's losses are lower
KINDS = ((0.5, "pairs"), (0, "pairs"), (0, "Welch"))  # correlation of a pair's losses, test
MARKS = ("<!-- table: written by simulate_race.py -->", "<!-- table ends -->")
HEAD = """| losses of a pair | test | better by | race | without futility | 12 pairs at 0.01 |
|---|---|---|---|---|---|
"""


def losses(correlation: float, size: float) -> tuple[np.ndarray, np.ndarray]:
    """(RACES, PAIRS) of the baseline and of the idea, with σ = 1."""
    random = np.random.default_rng([SEED, int(10 * correlation), int(10 * size)])
    common, a, b = random.standard_normal((3, RACES, PAIRS))
    own = (1 - correlation) ** 0.5
    common *= correlation**0.5
    return common + own * a, common + own * b - size


def difference(a: np.ndarray, b: np.ndarray, test: str) -> Difference:
    """What t_tests.paired or t_tests.different finds, race by race."""
    if test == "pairs":
        found = stats.ttest_rel(b, a, axis=1)
    else:
        found = stats.ttest_ind(b, a, axis=1, equal_var=False)
    mean = b.mean(1) - a.mean(1)
    return Difference(mean, mean / found.statistic, found.df, found.pvalue)


def races(a: np.ndarray, b: np.ndarray, test: str, plan: dict, futility: bool) -> tuple:
    """Verdict, pairs used and difference found of each race."""
    codes = np.full(len(a), OPEN)
    used, sizes = np.zeros((2, len(a)))
    for n in plan:
        found = difference(a[:, :n], b[:, :n], test)
        now = decide(found, n, plan, futility)
        ends = (codes == OPEN) & (now != OPEN)
        codes[ends], used[ends], sizes[ends] = now[ends], n, found.mean[ends]
    return codes, used, sizes


def row(correlation: float, test: str, size: float) -> str:
    """Raises SystemExit for more false verdicts than P."""
    a, b = losses(correlation, size)
    cells = [f"correlate, {correlation:g}" if correlation else "do not", test, f"{size:g} σ"]
    for plan, futility in ((looks(PAIRS), True), (looks(PAIRS), False), ({PAIRS: P}, False)):
        codes, used, sizes = races(a, b, test, plan, futility)
        keep, discard = np.mean(codes == KEEP), np.mean(codes == DISCARD)
        if size == 0 and keep + discard > P + 2 * (P / RACES) ** 0.5:
            raise SystemExit(f"{cells}: {keep + discard:.3%} false verdicts")
        cell = f"{keep:.2%}, {discard:.2%}"
        cell += f"; {used.mean():.1f} pairs" * (len(plan) > 1)
        seen = -sizes[codes == KEEP].mean()
        cells.append(cell + f"; {seen:.2f} σ" * (size > 0))
    return f"| {' | '.join(cells)} |\n"


if __name__ == "__main__":
    table = HEAD + "".join(row(*kind, size) for kind in KINDS for size in SIZES)
    page = ROOT / "docs/loop.md"
    page.write_text(between(page, MARKS, table), encoding="utf-8")
    print(table, end="")

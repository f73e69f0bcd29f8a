"""The simulation in records/README.md is the one that bench/verdicts.py runs, and its figures are what the tools claim."""

import re
from pathlib import Path

import pytest

pytest.importorskip("scipy", reason="pip install -r records/requirements.txt")

from bench import verdicts

README = Path(__file__).resolve().parents[2] / "records" / "README.md"
ROW = re.compile(r"^\| (.+?) \| (\S+) \| (.+?) \|$", re.MULTILINE)


def rows(text):
    """(what, said, simulated) of the tables of a text."""
    tables = re.findall(r"^\| [^|\n]+ \| said \| simulated \|\n\|[-|]+\|\n((?:\|.+\n)+)", text, re.MULTILINE)
    return [row for table in tables for row in ROW.findall(table)]


def test_the_readme_shows_what_the_simulation_prints(capsys):
    verdicts.main(["--comparisons=12"])
    printed, shown = rows(capsys.readouterr().out), rows(README.read_text(encoding="utf-8"))
    assert [row[:2] for row in printed] == [row[:2] for row in shown] and len(shown) == 21


def test_the_simulated_figures_are_those_claimed():
    """Within three standard deviations of the Monte Carlo error; what is looked at again and again errs more often."""
    looked = []
    for what, said, simulated in rows(README.read_text(encoding="utf-8")):
        if "±" not in simulated:
            continue
        value, error = (float(number) for number in re.findall(r"([\d.]+)%", simulated))
        claim = float(said.rstrip("%"))
        if what.startswith("looking"):
            looked.append(value - 3 * error > claim)
        elif "Holm" in what or "of each" in what and claim == 1:
            assert value < claim + 3 * error, what  # a bound
        else:
            assert abs(value - claim) < 3 * error + 0.1, what
    assert looked == [True]

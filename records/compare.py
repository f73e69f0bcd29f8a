"""Did the idea work? Compares the logs of some runs with those of a baseline.

    python records/compare.py BASELINE NEW [MORE…] [--pairs] [--source] [--rules] [--snippet] [--plot out.png] [--json]

Each of them is a log, a folder of logs (*.txt, *.log, at any depth) or a glob in quotes; a log that several of them name
belongs to the one that names the fewest. How many runs it takes: plan.py.
"""

import argparse
import json
import math
import shutil
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent)]  # also where Python leaves it out: PYTHONSAFEPATH

import older  # noqa: F401, first of all
import rules
import show
import tool
import verdict
from changes import environment_differences
from groups import Group, InputError, gather_all
from launch.console import PICTURES, output_file
from t_tests import mean  # history.py's

__all__ = ["main", "mean", "report"]


def report(groups: list[Group], target: float, console, pairs: bool = False) -> list[dict]:
    """The table and verdicts of groups, the first being the baseline, on a rich console; all figures. pairs: verdict.compare's."""
    rows = verdict.compare(groups, target, pairs)
    show.report(rows, groups, target, console)
    return rows


def for_programs(value):
    """For JSON: nan, which it has not, as null; tuples with names as objects."""
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        value = value._asdict()
    if isinstance(value, dict):
        return {key: for_programs(item) for key, item in value.items()}
    if isinstance(value, list):
        return [for_programs(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def print_json(groups: list[Group], target: float, pairs: bool) -> None:
    rows = verdict.compare(groups, target, pairs)
    for row, group in zip(rows, groups, strict=True):
        changes = environment_differences(groups[0], group)
        row["environment_changes"] = [{"what": what, "before": before, "after": after} for what, before, after in changes]
    print(json.dumps(for_programs({"target": target, "groups": rows}), indent=1))


def reader_left() -> None:
    """Instead of rich's end of the process with code 1; main knows what to do."""
    raise BrokenPipeError


def print_for_people(groups: list[Group], options: argparse.Namespace) -> None:
    from rich.console import Console

    shown = sys.stdout.isatty()  # whatever FORCE_COLOR says: what reads a pipe reads Markdown
    width = shutil.get_terminal_size().columns if shown else 1000  # rich would take a COLUMNS=0 for one
    console = Console(emoji=False, force_terminal=shown, soft_wrap=not shown, width=width)
    console.on_broken_pipe = reader_left
    rows = report(groups, options.target, console, options.pairs)
    for row, group in zip(rows[1:], groups[1:], strict=True):
        if options.source:
            show.print_changes(groups[0], group, console)
        if options.rules:
            show.say(console, "\n" + rules.check_list(groups[0], group, row, options.target), lines=True)
        if options.snippet:
            show.say(console, "\n" + rules.snippet(rows[0], row, options.target), wrap=False, lines=True)


def main(argv: list[str] | None = None) -> None:
    """The command line. Raises SystemExit with code 1 after a message for logs that cannot be compared, 2 for wrong options."""
    parser = tool.Parser("compare.py", __doc__)
    parser.add_argument("groups", nargs="+", metavar="LOGS", help="a log, a folder or a glob; the first is the baseline")
    parser.add_argument("--target", type=tool.above_zero, default=3.28, help="the loss to be below (%(default)s)")
    parser.add_argument("--pairs", action="store_true", help="runs alternated: compare those of one seed, pair by pair")
    parser.add_argument("--any-source", action="store_true", help="take runs of a group for one kind whatever their sources")
    parser.add_argument("--at", type=int, metavar="STEP", help="compare the runs as if they had ended at this step")
    parser.add_argument("--source", action="store_true", help="diff of the sources and environments, baseline against each")
    parser.add_argument("--rules", action="store_true", help="the rules of a record, with what the logs prove of them")
    parser.add_argument("--snippet", action="store_true", help="for the public speedrun's README: row, figures and their proof")
    parser.add_argument("--plot", type=output_file(*PICTURES), metavar="PNG", help="draw losses and step times into this file")
    parser.add_argument("--json", action="store_true", help="all figures as JSON, for programs")
    options = parser.parse_args(argv)
    asked = [f"--{name}" for name in ("source", "rules", "snippet", "pairs") if getattr(options, name)]
    if asked and len(options.groups) < 2:
        parser.error(f"{asked[0]} takes a baseline and another group of LOGS: name both")
    if options.json and asked and asked != ["--pairs"]:
        parser.error(f"--json goes without {asked[0]}, which is for people")
    try:
        groups = gather_all(options.groups, options.any_source, options.at)
        logs = [log.path for group in groups for log in group.logs]
        if options.plot and options.plot.exists() and any(map(options.plot.samefile, logs)):
            raise InputError(f"--plot={options.plot}: is one of the logs: name another file")
        groups = verdict.in_pairs(groups) if options.pairs else groups  # of each figure, picture and rule
        if options.plot:  # before prints, as the reader of a pipe may have enough
            from plot import draw

            draw(groups, options.target, options.plot, options.pairs)
        if options.json:
            print_json(groups, options.target, options.pairs)
        else:
            print_for_people(groups, options)
    except BrokenPipeError:  # for tool.run
        raise
    except (InputError, OSError, ValueError) as error:
        raise SystemExit(f"compare.py: error: {error}") from None
    except ModuleNotFoundError as error:
        raise SystemExit(f"compare.py: error: {error}. Try: pip install -r records/requirements.txt") from None


if __name__ == "__main__":
    tool.run(main)

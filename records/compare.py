"""Did the idea work? Compares the logs of some runs with those of a baseline.

    python records/compare.py BASELINE NEW [MORE…] [--source] [--plot out.png] [--json] [--target 3.28]

Each of them is a log, a folder of logs (*.txt, *.log, at any depth) or a glob in quotes.
"""

import argparse
import difflib
import json
import math
import statistics
import sys

from groups import Group, InputError, gather, short_names
from runlog import RunLog

P = 0.01  # the significance that a record needs
POWER = 0.8  # the chance of reaching it at which a number of runs "would settle it"
MOST_RUNS = 10_000


# -----------------------------------------------------------------------------
# Statistics: t-tests on sample mean and sample standard deviation. nan: undefined, for fewer than two runs or no variance.


def mean(values: list[float]) -> float:
    return statistics.fmean(values) if values else math.nan


def sigma(values: list[float]) -> float:
    """Sample standard deviation, nan for fewer than two values."""
    return statistics.stdev(values) if len(values) > 1 else math.nan


def welch(spread_a: float, n_a: int, spread_b: float, n_b: int) -> tuple[float, float]:
    """Standard error of the difference of two means, and its degrees of freedom (Welch-Satterthwaite)."""
    a, b = spread_a**2 / n_a, spread_b**2 / n_b
    return math.sqrt(a + b), (a + b) ** 2 / (a * a / (n_a - 1) + b * b / (n_b - 1))


def p_different(a: list[float], b: list[float]) -> float:
    """Two-sided p of Welch's two-sample t-test: that runs of equal means differ by so much."""
    from scipy.special import stdtr  # scipy.stats takes a second to import

    if min(len(a), len(b)) < 2 or not sigma(a) + sigma(b) > 0:
        return math.nan
    error, freedom = welch(sigma(a), len(a), sigma(b), len(b))
    return float(2 * stdtr(freedom, -abs(mean(a) - mean(b)) / error))


def p_below(values: list[float], target: float) -> float:
    """One-sided p of the one-sample t-test: that runs whose mean is the target have a mean so far below it."""
    from scipy.special import stdtr

    if not sigma(values) > 0:
        return math.nan
    return float(stdtr(len(values) - 1, (mean(values) - target) / (sigma(values) / math.sqrt(len(values)))))


def more_runs_different(a: list[float], b: list[float]) -> int | None:
    """How many more runs of each give Welch's test p < P with chance POWER, were the present means and σ the true ones.

    None: more than MOST_RUNS, or not defined.
    """
    from scipy.special import nctdtr, stdtrit

    def power(more: int) -> float:
        error, freedom = welch(sigma(a), len(a) + more, sigma(b), len(b) + more)
        return 1 - nctdtr(freedom, abs(mean(a) - mean(b)) / error, stdtrit(freedom, 1 - P / 2))

    return fewest(power) if min(len(a), len(b)) > 1 and sigma(a) + sigma(b) > 0 else None


def more_runs_below(values: list[float], target: float) -> int | None:
    """The same for the test that the mean is below the target. None also if the present mean is not below."""
    from scipy.special import nctdtr, stdtrit

    def power(more: int) -> float:
        n = len(values) + more
        return 1 - nctdtr(n - 1, (target - mean(values)) / sigma(values) * math.sqrt(n), stdtrit(n - 1, 1 - P))

    return fewest(power) if sigma(values) > 0 and mean(values) < target else None


def fewest(power) -> int | None:
    """The smallest number of runs, from 1 to MOST_RUNS, whose power, which grows with it, is at least POWER."""
    low, high = 0, 1
    while power(high) < POWER:
        low, high = high, 2 * high
        if low > MOST_RUNS:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if power(middle) < POWER else (low, middle)
    return high


# -----------------------------------------------------------------------------
# The verdict


def summary(group: Group, baseline: Group | None, target: float) -> dict:
    """All figures of a group, and of its difference from the baseline (None: it is the baseline). Times in seconds."""
    times, losses = group.times, group.losses
    figures = {
        "name": group.name,
        "runs": len(group.runs),
        "steps": group.runs[0].validations[-1][0],
        "time_mean": mean(times),
        "time_sigma": sigma(times),
        "loss_mean": mean(losses),
        "loss_sigma": sigma(losses),
        "loss_p_below_target": p_below(losses, target),
        "losses": losses,
        "times": [run.seconds for run in group.runs],
        "logs": [str(run.path) for run in group.runs],
        "set_aside": [{"log": str(log.path), "reason": reason} for log, reason in group.aside],
        "problems": [{"log": str(log.path), "problem": problem} for log in group.logs for problem in log.problems],
    }
    if baseline:
        figures |= {
            "time_difference": mean(times) - mean(baseline.times),
            "time_p": p_different(times, baseline.times),
            "loss_difference": mean(losses) - mean(baseline.losses),
            "loss_p": p_different(losses, baseline.losses),
        }
    figures["verdict"] = verdict(group, baseline, target, figures)
    return figures


def verdict(group: Group, baseline: Group | None, target: float, figures: dict) -> str:
    """One sentence: faster or not, below the target or not, and what would settle it."""
    chance = f"for an {POWER:.0%} chance at the present means and σ"
    said = []
    if baseline:
        p, difference = figures["time_p"], figures["time_difference"]
        size = f"by {abs(difference):.3f} s ({abs(difference) / mean(baseline.times):.2%})" if baseline.times else ""
        if math.isnan(difference):
            said.append("faster or slower is unknown, as logs lack times")
        elif math.isnan(p):
            lack = "no variance" if min(len(group.times), len(baseline.times)) > 1 else "two runs of each at least"
            said.append(f"{'faster' if difference < 0 else 'slower'} {size}, but no test: {needs(lack)}")
        elif p < P:
            said.append(f"{'FASTER' if difference < 0 else 'SLOWER'} {size}, p = {figure(p)}")
        else:
            more = more_runs_different(group.times, baseline.times)
            settle = f"about {more} more of each would settle it, {chance}" if more else f"over {MOST_RUNS:,} more would not"
            said.append(f"not shown to be faster or slower, p = {figure(p)}; {settle}")
    p, below = figures["loss_p_below_target"], figures["loss_mean"] < target
    if math.isnan(p):
        lack = "two runs at least" if len(group.runs) < 2 else "no variance"
        said.append(f"mean loss {'below' if below else 'not below'} {target:g}, but no test: {needs(lack)}")
    elif p < P:
        said.append(f"mean loss BELOW {target:g}, p = {figure(p)}")
    elif p > 1 - P:
        said.append(f"mean loss ABOVE {target:g}, p = {figure(1 - p)}")
    elif not below:
        said.append(f"mean loss not below {target:g}: no number of runs would help at the present mean")
    else:
        more = more_runs_below(group.losses, target)
        settle = f"about {more} more would settle it, {chance}" if more else f"over {MOST_RUNS:,} more would not"
        said.append(f"mean loss not shown to be below {target:g}, p = {figure(p)}; {settle}")
    return f"{group.name}: " + "; ".join(said) + "."


def needs(lack: str) -> str:
    return "the runs do not differ at all (one seed?)" if lack == "no variance" else f"it takes {lack}"


def figure(value: float | None, form: str = ".2g") -> str:
    """A number for people; p-values by default. Nothing for what is undefined."""
    return "" if value is None or math.isnan(value) else f"{value:{form}}"


# -----------------------------------------------------------------------------
# Output


def print_table(summaries: list[dict], groups: list[Group], target: float, console) -> None:
    """The table, the raw figures, what was set aside and the verdicts; on a pipe as Markdown."""
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    columns = (
        ("runs", "runs", "d"),
        ("steps", "steps", "d"),
        ("time s", "time_mean", ".3f"),
        ("σ", "time_sigma", ".3f"),
        ("Δ", "time_difference", "+.3f"),
        ("p", "time_p", ".2g"),
        ("loss", "loss_mean", ".5f"),
        ("σ", "loss_sigma", ".5f"),
        ("Δ", "loss_difference", "+.5f"),
        ("p", "loss_p", ".2g"),
        (f"p(<{target:g})", "loss_p_below_target", ".2g"),
    )
    terminal = console.is_terminal
    table = Table(
        box=box.SIMPLE_HEAD if terminal else box.MARKDOWN, pad_edge=not terminal, padding=(0, 1, 0, 0) if terminal else (0, 1)
    )
    table.add_column("", overflow="fold", min_width=6)
    for header, _, _ in columns:
        table.add_column(header, justify="right", no_wrap=True)
    for row in summaries:
        table.add_row(escape(row["name"]), *(figure(row.get(key), form) for _, key, form in columns))
    console.print(table)
    for row in summaries:
        console.print(
            f"{row['name']} losses: {', '.join(figure(loss, '.4f') for loss in row['losses'])}", highlight=False, markup=False
        )
        times = ", ".join(figure(time, ".3f") or "?" for time in row["times"])
        console.print(f"{row['name']} times, s: {times}", highlight=False, markup=False)
    for row in summaries:
        for aside in row["set_aside"]:
            console.print(f"set aside: {aside['log']}: {aside['reason']}", style="yellow", highlight=False, markup=False)
        for problem in row["problems"]:
            console.print(f"note: {problem['log']}: {problem['problem']}", style="dim", highlight=False, markup=False)
    for group in groups:
        differing = [name for name in group.runs[0].facts if len({run.facts.get(name) for run in group.runs}) > 1]
        if differing:
            console.print(
                f"note: the runs of {group.name} differ in {', '.join(differing)}",
                style="yellow",
                highlight=False,
                markup=False,
            )
    for group in groups[1:]:
        console.print(changed(groups[0], group), highlight=False, markup=False)
    console.print()
    for row in summaries:
        console.print(row["verdict"], style="bold", highlight=False, markup=False)


def changed(baseline: Group, group: Group) -> str:
    """What a group's recipe and environment have changed, in a line."""
    pieces = []
    for name, lines in source_diffs(baseline.runs[0], group.runs[0]):
        added, removed = (sum(line.startswith(sign) for line in lines[2:]) for sign in "+-")
        pieces.append(f"{name} +{added} −{removed}")
    pieces += [f"{name} {before} → {after}" for name, before, after in environment_differences(baseline.runs[0], group.runs[0])]
    return f"{group.name} changes: {'; '.join(pieces) or 'nothing: the same sources, settings and environment'}"


def source_diffs(a: RunLog, b: RunLog) -> list[tuple[str, list[str]]]:
    """(path, unified diff) of each source that differs; the scripts are compared whatever their names."""
    files = [(*a.script, *b.script)]
    for name in sorted({*a.modules, *b.modules}):
        files.append((name, a.modules.get(name), name, b.modules.get(name)))
    diffs = []
    for name_a, source_a, name_b, source_b in files:
        if source_a != source_b:
            titles = [f"{log.path}: {name if source is not None else '(none)'}"
                      for log, name, source in ((a, name_a, source_a), (b, name_b, source_b))]  # fmt: skip
            lines = [(source or b"").decode("utf-8", "replace").splitlines() for source in (source_a, source_b)]
            diff = [*difflib.unified_diff(*lines, *titles, lineterm="")]
            diffs.append((name_b, diff or [f"--- {titles[0]}", f"+++ {titles[1]}"]))  # empty, or other line breaks
    return diffs


def environment_differences(a: RunLog, b: RunLog) -> list[tuple[str, str, str]]:
    """(what, before, after) of versions, devices and settings that differ."""
    found = []
    for before, after, prefix in ((a.facts, b.facts, ""), (a.recipe_settings, b.recipe_settings, "--")):
        for name in dict.fromkeys((*before, *after)):
            if before.get(name) != after.get(name):
                found.append((prefix + name, before.get(name, "(none)"), after.get(name, "(none)")))
    return found


def print_changes(baseline: Group, group: Group, console) -> None:
    """The diff of sources and of environments: of the first run of each."""
    colours = {"+": "green", "-": "red", "@": "cyan"}
    for _, lines in source_diffs(baseline.runs[0], group.runs[0]):
        for i, line in enumerate(lines):
            style = "bold" if i < 2 else colours.get(line[:1])
            console.print(line, style=style, highlight=False, markup=False, soft_wrap=True)
    for name, before, after in environment_differences(baseline.runs[0], group.runs[0]):
        console.print(f"-{name}: {before}", style="red", highlight=False, markup=False, soft_wrap=True)
        console.print(f"+{name}: {after}", style="green", highlight=False, markup=False, soft_wrap=True)


def without_nan(value):
    """For JSON, which has no nan: null."""
    if isinstance(value, dict):
        return {key: without_nan(item) for key, item in value.items()}
    if isinstance(value, list):
        return [without_nan(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def report(groups: list[Group], target: float, console) -> None:
    """The table and verdicts of groups, the first being the baseline, on a rich console."""
    summaries = [summary(group, groups[0] if i else None, target) for i, group in enumerate(groups)]
    print_table(summaries, groups, target, console)


def main(argv: list[str] | None = None) -> None:
    """The command line. Raises SystemExit with code 1 after a message for logs that cannot be compared, 2 for wrong options."""
    parser = argparse.ArgumentParser(
        prog="compare.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("groups", nargs="+", metavar="LOGS", help="a log, a folder or a glob; the first is the baseline")
    parser.add_argument("--target", type=float, default=3.28, help="the loss to be below (%(default)s)")
    parser.add_argument("--source", action="store_true", help="diff of the sources and environments, baseline against each")
    parser.add_argument("--plot", metavar="PNG", help="draw losses and step times into this file")
    parser.add_argument("--json", action="store_true", help="all figures as JSON, for programs")
    options = parser.parse_args(argv)
    try:
        groups = [gather(*pair) for pair in zip(short_names(options.groups), options.groups, strict=True)]
        if options.json:
            figures = [summary(group, groups[0] if i else None, options.target) for i, group in enumerate(groups)]
            changes = [
                [{"what": what, "before": before, "after": after} for what, before, after in environment_differences(a, b)]
                for a, b in ((groups[0].runs[0], group.runs[0]) for group in groups)
            ]
            for row, change in zip(figures, changes, strict=True):
                row["environment_changes"] = change
            print(json.dumps(without_nan({"target": options.target, "groups": figures}), indent=1))
        else:
            from rich.console import Console

            console = Console(soft_wrap=not sys.stdout.isatty(), width=None if sys.stdout.isatty() else 1000)
            report(groups, options.target, console)
            if options.source:
                for group in groups[1:]:
                    print_changes(groups[0], group, console)
        if options.plot:
            from plot import draw

            draw(groups, options.target, options.plot)
    except (InputError, OSError, ValueError) as error:
        raise SystemExit(f"compare.py: error: {error}") from None
    except ModuleNotFoundError as error:
        raise SystemExit(f"compare.py: error: {error}. Try: pip install -r records/requirements.txt") from None


if __name__ == "__main__":
    main()

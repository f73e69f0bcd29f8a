"""Did the idea work? Compares the logs of some runs with those of a baseline.

./run.sh records/compare.py BASELINE NEW [MORE…] [--pairs] [--at STEP] [--source] [--rules]
                            [--snippet] [--plot out.png] [--json]

Each argument is a log, a folder of logs (*.txt, *.log) or a glob in quotes. How many runs it
takes: plan.py.
"""

import argparse
import difflib
import json
import math
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

import verdict
from groups import Group, InputError, changed_files, gather_all, names, plural
from runlog import RunLog, shown
from t_tests import Difference, P
from verdict import figure

# Columns: header, figure of a row (see verdict.py), format; without one it is a p-value.
TIME = (
    ("runs", "runs", "d"),
    ("steps", "steps", "d"),
    ("time s", "time_mean", ".3f"),
    ("σ", "time_sigma", ".3f"),
    ("Δ", "time", "+.3f"),
    ("p", "time_p_holm", ""),
)
LOSS = (
    ("loss", "loss_mean", ".5f"),
    ("σ", "loss_sigma", ".5f"),
    ("Δ", "loss", "+.5f"),
    ("p", "loss_p_holm", ""),
)


# ----------------------------------------------------------------------------------------------
# The report


def say(console: Console, text: str, style: str | None = None) -> None:
    """A line without markup, in which nothing from a foreign log moves the cursor."""
    console.print(shown(text), style=style, highlight=False, markup=False)


def report(rows: list[dict], groups: list[Group], target: float, console: Console) -> None:
    """Table, figures run by run, what was set aside, what changed, verdicts and cautions."""
    print_tables(rows, target, console)
    console.print()
    for row in rows:
        say(console, f"{row['name']} losses: {', '.join(f'{x:.4f}' for x in row['losses'])}")
        say(console, f"{row['name']} times, s: {', '.join(f'{x:.3f}' for x in row['times'])}")
    for row, group in zip(rows, groups):
        for item in row["set_aside"]:
            say(console, f"set aside: {item}", "yellow")
        for item in row["problems"]:
            say(console, f"note: {item}", "dim")
        differ = [x for x in group.runs[0].facts if len({r.facts.get(x) for r in group.runs}) > 1]
        if differ:
            say(console, f"note: the runs of {group.name} differ in {', '.join(differ)}", "yellow")
    for row, group in zip(rows[1:], groups[1:]):
        say(console, changes(groups[0], group))
    console.print()
    for row in rows:
        for i, sentence in enumerate(row["sentences"]):
            say(console, f"{'  ' if i else title(row) + ': '}{sentence}", "bold")
        for caution in row["cautions"]:
            say(console, f"  but: {caution}", "yellow")


def title(row: dict) -> str:
    aside = len(row["set_aside"])
    return f"{row['name']} ({aside} of {row['runs'] + aside} set aside)" if aside else row["name"]


def print_tables(rows: list[dict], target: float, console: Console) -> None:
    """One table; two on a terminal that is too narrow."""
    loss = (*LOSS, (f"p(<{target:g})", "p_below_target", ""))
    table = make_table(rows, (*TIME, *loss), console)
    if console.measure(table, options=console.options.update(width=1000)).maximum <= console.width:
        console.print(table)
    else:
        console.print(make_table(rows, TIME, console))
        console.print(make_table(rows, loss, console))


def make_table(rows: list[dict], columns: tuple, console: Console) -> Table:
    """A row for each group; in a pipe Markdown, which pages and issues take as it is."""
    style = box.SIMPLE_HEAD if console.is_terminal else box.MARKDOWN
    table = Table("", box=style)
    for header, _, _ in columns:
        holm = " Holm" if header == "p" and len(rows) > 2 else ""
        table.add_column(header + holm, justify="right", no_wrap=True)
    for row in rows:
        figures = (figure(value(row, name), form) for _, name, form in columns)
        table.add_row(Text(row["name"]), *figures)
    return table


def value(row: dict, name: str) -> float:
    """A figure; nan where the baseline has none."""
    found = row.get(name, math.nan)
    return found.mean if isinstance(found, Difference) else found


# ----------------------------------------------------------------------------------------------
# What changed


def diffs(a: RunLog, b: RunLog) -> list[tuple[str, list[str]]]:
    """(path, unified diff) of each source that differs in more than comments."""
    found = []
    for name in changed_files(a, b):
        name_a = a.script[0] if name == b.script[0] else name
        pair = (a.sources.get(name_a, b""), b.sources.get(name, b""))
        before, after = (source.decode("utf-8", "replace").splitlines() for source in pair)
        titles = (f"{a.path}: {name_a}", f"{b.path}: {name}")
        found.append((name, [*difflib.unified_diff(before, after, *titles, lineterm="")]))
    return found


def fact_changes(baseline: Group, group: Group) -> list[tuple[str, str, str]]:
    """(name, before, after) for each fact of the environment and each setting that differs."""
    found = []
    for what in ("facts", "recipe_settings"):
        before, after = (getattr(side.runs[0], what) for side in (baseline, group))
        for name in {**after, **before}:
            # "instructions" are a part of "matmuls".
            if before.get(name) != after.get(name) and name != "instructions":
                option = name if what == "facts" else f"--{name}"
                found.append((option, before.get(name, "(none)"), after.get(name, "(none)")))
    return found


def changes(baseline: Group, group: Group) -> str:
    """One line, from the first run of each."""
    a, b = baseline.runs[0], group.runs[0]
    pieces = []
    for name, lines in diffs(a, b):
        added, removed = (sum(line.startswith(sign) for line in lines[2:]) for sign in "+-")
        pieces.append(f"{name} +{added} −{removed}")
    for side in (baseline, group):
        if not side.runs[0].sources:
            pieces.append(f"the logs of {side.name} hold no sources")
    for name, before, after in fact_changes(baseline, group):
        pieces.append(f"{name} {before} → {after}")
    return f"{group.name} changes: {'; '.join(pieces) or 'nothing'}"


def print_changes(baseline: Group, group: Group, console: Console) -> None:
    """The diff of sources and environments, from the first run of each."""
    colours = {"+": "green", "-": "red", "@": "cyan"}
    lines = [line for _, diff in diffs(baseline.runs[0], group.runs[0]) for line in diff]
    for log in (baseline.runs[0], group.runs[0]):
        if log.source_changes:
            lines += [f"{log.path}: resumed with changed source", *log.source_changes.split("\n")]
    for name, before, after in fact_changes(baseline, group):
        lines += [f"-{name}: {before}", f"+{name}: {after}"]
    for line in lines:
        console.print(shown(line), style=colours.get(line[:1]), markup=False, soft_wrap=True)


# ----------------------------------------------------------------------------------------------
# The rules of a record

HOLDS, BROKEN, READ = "[x]", "[!]", "[ ]"  # by the logs; READ: a reviewer has to judge
COMPILER_FLAG = re.compile(r"(?i)inductor|dynamo|functorch|torch_compile|torch\.compile\(")


def check_list(baseline: Group, group: Group, row: dict, target: float) -> list[str]:
    """A line for each rule in README.md, with its mark and the evidence."""
    a, b = baseline.runs[0], group.runs[0]
    below, seeds, aside = row["p_below_target"], row["seeds"], len(row["set_aside"])
    own_seeds = mark(len({*seeds}) == len(seeds))
    source = all(run.sources and not run.source_changes for run in group.runs)
    changed = changed_files(a, b)
    use = (READ, f"read the diff of {names(changed)}") if changed else (HOLDS, "no source differs")
    loss = f"{row['loss_mean']:.5f}, p = {figure(below) or 'undefined'}"
    runs = f"{plural(row['runs'], 'run')}, {aside} set aside; logs cannot show others"
    rules = {
        "The data stream is the baseline's": same_data(a, b),
        f"Mean loss below {target:g} at p < {P:g}": (mark(below < P), loss),
        "The clock is the baseline's": same_folder(a, b, "runtime/"),
        "No extra compiler flags": compiler_flags(a, b),
        "The source is in the log": (mark(source), plural(len(b.sources), "file")),
        f"Faster at p < {P:g}, on one machine": faster(row),
        "Every run has its own seed": (READ if None in seeds else own_seeds, names(seeds, 99)),
        "The number of runs was fixed before": (READ, runs),
        "The script's use of data, clock and validation is the baseline's": use,
    }
    return [f"- {found} {rule}: {evidence}" for rule, (found, evidence) in rules.items()]


def mark(holds: bool) -> str:
    return HOLDS if holds else BROKEN


def faster(row: dict) -> tuple[str, str]:
    if row["times_do_not_compare"]:
        return BROKEN, row["times_do_not_compare"]
    time, p = row["time"].mean, row["time_p_holm"]
    shown_faster = READ if not row["machines_known"] else HOLDS
    evidence = f"{time:+.3f} s, p = {figure(p) or 'undefined'}"
    return shown_faster if p < P and time < 0 else BROKEN, evidence


def same_data(a: RunLog, b: RunLog) -> tuple[str, str]:
    """Whether sources and shards are the same, as far as the logs say."""
    if shards := verdict.other_tokens(a, b):
        return BROKEN, f"other tokens in {names(shards)}"
    found, evidence = same_folder(a, b, "data/")
    if found == HOLDS and not (a.shards and b.shards):
        return READ, f"{evidence}; the logs do not say what the shards hold"
    return found, evidence


def same_folder(a: RunLog, b: RunLog, folder: str) -> tuple[str, str]:
    """Whether the sources below a folder are the same, and the evidence."""
    if not any(name.startswith(folder) for name in {**a.sources, **b.sources}):
        return READ, f"no {folder} in the logs: read the script's diff"
    differ = changed_files(a, b, folder)
    return (BROKEN, f"changed: {names(differ)}") if differ else (HOLDS, f"the same {folder}")


def compiler_flags(a: RunLog, b: RunLog) -> tuple[str, str]:
    """Added lines, and variables of the environment, that name the compiler."""
    added = [line[1:].strip() for _, diff in diffs(a, b) for line in diff[2:] if line[:1] == "+"]
    before = a.facts.get("variables", "").split(", ")
    added += [x for x in b.facts.get("variables", "").split(", ") if x not in before]
    found = [text[:80] for text in added if COMPILER_FLAG.search(text)]
    return (READ, f"added: {names(found)}") if found else (HOLDS, "no added line names one")


def snippet(baseline: dict, row: dict, target: float) -> list[str]:
    """For the public speedrun's README: its row, and Python that prints figures and p-values."""
    where = row["times_do_not_compare"] or "on one machine" * row["machines_known"]
    below = f"scipy.stats.ttest_1samp(losses, {target:g}, alternative='less').pvalue"
    faster = "scipy.stats.ttest_ind(times, baseline_times, equal_var=False).pvalue"
    lines = [
        "| # | Record time | Description | Date | Log | Contributors |",
        "| - | - | - | - | - | - |",
        f"| <number> | {figure(row['time_mean'] / 60, '.3f') or '?'} minutes | <description> "
        "| <date> | [log](<folder>) | <names> |",
        "",
        "```python",
        "import scipy.stats, statistics",
        "",
        f"losses = {row['losses']}",
        f"times = {row['times']}  # seconds",
        f"baseline_times = {baseline['times']}  # {where or '<same machine?>'}",
        'print("loss mean:", statistics.fmean(losses))',
        'print("loss sigma:", statistics.stdev(losses))',
        f'print("p of a mean below {target:g}:", {below})',
        'print("time mean:", statistics.fmean(times))',
    ]
    if not row["times_do_not_compare"]:
        lines.append(f'print("p of another time:", {faster})')
    return [*lines, "```"]


# ----------------------------------------------------------------------------------------------
# Command line


def for_json(value):
    """JSON has no nan: it becomes null. Named tuples become objects."""
    if hasattr(value, "_asdict"):
        value = value._asdict()
    if isinstance(value, dict):
        return {key: for_json(item) for key, item in value.items()}
    if isinstance(value, list):
        return [for_json(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def print_all(groups: list[Group], options: argparse.Namespace) -> None:
    rows = verdict.compare(groups, options.target, options.pairs)
    if options.json:
        print(json.dumps(for_json({"target": options.target, "groups": rows}), indent=1))
        return
    piped = not sys.stdout.isatty()
    console = Console(emoji=False, width=1000 if piped else None, soft_wrap=piped)
    report(rows, groups, options.target, console)
    for row, group in zip(rows[1:], groups[1:]):
        if options.source:
            print_changes(groups[0], group, console)
        if options.rules:
            print(f"\n{row['name']}:")
            for line in check_list(groups[0], group, row, options.target):
                print(shown(line))
        if options.snippet:
            print()
            for line in snippet(rows[0], row, options.target):
                print(shown(line))


def main(argv: list[str] | None = None) -> None:
    """Raises SystemExit with a message for logs that cannot be compared."""
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    add = parser.add_argument
    first = "a log, folder or glob; the first is the baseline"
    add("groups", nargs="+", metavar="LOGS", help=first)
    add("--target", type=float, help="the loss to be below (3.28; the demo's, of bytes, 1.22)")
    add("--pairs", action="store_true", help="runs that alternated: compare seed by seed")
    add("--at", type=int, metavar="STEP", help="as if the runs had ended at this step")
    add("--source", action="store_true", help="diff of sources and environments")
    add("--rules", action="store_true", help="the rules of a record, with what the logs say")
    add("--snippet", action="store_true", help="row and figures for the public speedrun's README")
    add("--plot", metavar="PNG", help="draw losses and step times into this file")
    add("--json", action="store_true", help="all figures, for programs")
    options = parser.parse_args(argv)
    if options.plot and Path(options.plot).suffix not in (".png", ".pdf", ".svg"):
        parser.error(f"--plot={options.plot}: must end in .png, .pdf or .svg")
    try:
        groups = gather_all(options.groups, options.at)
        if options.pairs:
            groups = verdict.in_pairs(groups)
    except InputError as error:
        raise SystemExit(f"compare.py: error: {error}") from None
    if options.target is None:
        in_bytes = groups[0].runs[0].settings.get("encoding") == "'bytes'"
        options.target = 1.22 if in_bytes else 3.28
    if options.plot:
        from plot import draw  # matplotlib takes a second to import

        draw(groups, options.target, options.plot, options.pairs)
    print_all(groups, options)


if __name__ == "__main__":
    main()

"""A comparison on the console, in a terminal of any width, or on a pipe as Markdown."""

from changes import changed, environment_differences, source_diffs
from groups import Group, folded
from runlog import resumed_with_changes
from tool import clean
from verdict import figure

TIME = (
    ("runs", "runs", "d"),
    ("steps", "steps", "d"),
    ("time s", "time_mean", ".3f"),
    ("σ", "time_sigma", ".3f"),
    ("Δ", "time_difference", "+.3f"),
    ("p", "time_p_holm", ".2g"),
)
LOSS = (
    ("loss", "loss_mean", ".5f"),
    ("σ", "loss_sigma", ".5f"),
    ("Δ", "loss_difference", "+.5f"),
    ("p", "loss_p_holm", ".2g"),
)


NAME = 6  # characters of a name on a line, at least


def say(console, text: str, style: str | None = None, wrap: bool = True, lines: bool = False) -> None:
    """A line, as it is: without rich's markup, emoji and highlighting, nor what a foreign log would do to a terminal."""
    console.print(
        clean(text, one_line=not lines), style=style, highlight=False, markup=False, emoji=False, soft_wrap=not wrap or None
    )


def report(rows: list[dict], groups: list[Group], target: float, console) -> None:
    """Table, raw figures, what was set aside, what changed, and the verdicts with what speaks against them."""
    print_table(rows, target, console)
    for row in rows:
        say(console, f"{row['name']} losses: {', '.join(figure(loss, '.4f') for loss in row['losses'])}")
        say(console, f"{row['name']} times, s: {', '.join(figure(time, '.3f') or '?' for time in row['times'])}")
    for row in rows:
        for line in folded([(item["log"], item["reason"]) for item in row["set_aside"]]):
            say(console, f"set aside: {line}", "yellow")
        for line in folded([(item["log"], item["problem"]) for item in row["problems"]]):
            say(console, f"note: {line}", "dim")
        for note in row["notes"]:
            say(console, f"note: {note}", "yellow")
    for group in groups:
        told = dict.fromkeys(name for run in group.runs for name in run.facts)
        if differing := [name for name in told if len({run.facts.get(name) for run in group.runs}) > 1]:
            say(console, f"note: the runs of {group.name} differ in {', '.join(differing)}", "yellow")
    for row, group in zip(rows[1:], groups[1:], strict=True):
        say(console, changed(groups[0], group))
        if row["paces"]:
            parts = [f"{x.part} {x.before:.2f} → {x.after:.2f}, {signed(x.difference)}" for x in row["paces"]]
            say(console, f"{row['name']} ms a step (Δ ± its standard error): {'; '.join(parts)}")
    console.print()
    for row in rows:
        for i, sentence in enumerate(row["sentences"], 1):
            opening, end = f"{row['title']}:" if i == 1 else " ", "." if i == len(row["sentences"]) else ";"
            say(console, f"{opening} {sentence}{end}", "bold")
        for caution in row["cautions"]:
            say(console, f"  but: {caution}", "yellow")


def signed(difference) -> str:
    error = figure(difference.error, ".2f")
    return f"{difference.mean:+.2f}{f' ± {error}' if error else ''}"


def print_table(rows: list[dict], target: float, console) -> None:
    """One table; where a terminal is too narrow for it two, of times and of losses, or more; where none fits, lines."""
    losses = *LOSS, (f"p(<{target:g})", "loss_p_below_target", ".2g")
    if not console.is_terminal or width(rows, (*TIME, *losses), console) <= console.width:
        console.print(make_table(rows, (*TIME, *losses), console))
        return
    folded_names = [{**row, "name": "-" * NAME} for row in rows]
    for columns in (TIME, losses):
        while columns:
            counts = range(len(columns), 0, -1)
            if count := next((n for n in counts if width(folded_names, columns[:n], console) <= console.width), 0):
                console.print(make_table(rows, columns[:count], console))
            else:
                count = len(columns)
                for row in rows:
                    told = (f"{header} {figure(row.get(key), form)}" for header, key, form in columns if key in row)
                    say(console, f"{row['name']}: {', '.join(told)}")
            columns = columns[count:]


def width(rows: list[dict], columns: tuple, console) -> int:
    """Characters that a table takes with no name folded."""
    return console.measure(make_table(rows, columns, console), options=console.options.update(width=1000)).maximum


def make_table(rows: list[dict], columns: tuple, console):
    """Of a row for each group; lines of Markdown on a pipe."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    terminal = console.is_terminal
    table = Table(
        box=box.SIMPLE_HEAD if terminal else box.MARKDOWN, pad_edge=not terminal, padding=(0, 1, 0, 0) if terminal else (0, 1)
    )
    table.add_column("", overflow="fold", min_width=NAME)
    for header, _, _ in columns:
        if header == "p" and len(rows) > 2:
            header = "p Holm"
        table.add_column(header, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(Text(row["name"]), *(figure(row.get(key), form) for _, key, form in columns))
    return table


def print_changes(baseline: Group, group: Group, console) -> None:
    """The diff of the sources of the first run of each, and of the environments of all."""
    a, b = baseline.runs[0], group.runs[0]
    colours = {"+": "green", "-": "red", "@": "cyan"}
    for _, lines in source_diffs(a, b):
        for i, line in enumerate(lines):
            say(console, line, "bold" if i < 2 else colours.get(line[:1]), wrap=False)
    for log in (a, b):
        if diff := resumed_with_changes(log):
            say(console, f"{log.path}: resumed with changed source", "bold", wrap=False)
            for line in diff.splitlines():
                say(console, line, colours.get(line[:1]), wrap=False)
    for name, before, after in environment_differences(baseline, group):
        say(console, f"-{name}: {before}", "red", wrap=False)
        say(console, f"+{name}: {after}", "green", wrap=False)

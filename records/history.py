"""The history in records/README.md and each record's page, from its logs and its record.toml.

./run.sh records/history.py                     write the tables and the pages anew
./run.sh records/history.py --check             write nothing; exit code 1 if one is out of date
./run.sh records/history.py --picture NAME      draw the pictures of records/NAME/ anew

A record is a folder with logs (*.txt) and a record.toml: description, date (year-month-day),
contributors (a list), track (where it was run), target (the loss to be below). The logs of its
baseline, made on the same machine, lie in its folder baseline/; or baseline = "NAME" names another
record. pairs = true compares seed by seed; adopted = false lists the folder under "Tried, not
adopted". A page is written between its two marks; other text in it stays. public.toml has the
public speedrun's figures for a track.
"""

import argparse
import io
import re
import shlex
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from rich.console import Console

import compare
import verdict
from groups import BASELINE, Group, InputError, choose, different_machines, find_logs
from runlog import read_log, shown
from t_tests import mean

RECORDS = Path(__file__).resolve().parent
MARKS = ("<!-- history: written by history.py -->", "<!-- history ends -->")
PAGE_MARKS = ("<!-- record: written by history.py -->", "<!-- record ends -->")
PICTURE = "comparison.png"
PUBLIC = "public.toml"
DEMO = "demo"  # how a track begins whose folders are versions of the demo, not records


@dataclass
class Record:
    """A folder of records/: record.toml and the runs."""

    folder: Path
    group: Group
    own_baseline: Group | None  # the logs in its folder baseline/
    description: str
    date: str
    contributors: list[str]
    track: str
    target: float
    baseline: str = ""
    pairs: bool = False
    adopted: bool = True


def read_record(folder: Path) -> Record:
    """Raises InputError, naming the file, for metadata or logs that do not make a record."""
    path = folder / "record.toml"
    groups = []
    for part in (folder, folder / BASELINE):
        logs = [read_log(log) for log in find_logs(str(part))] if part.is_dir() else []
        for log in logs:
            log.path = log.path.relative_to(folder)  # pages name no path of this machine
        name = BASELINE if part.name == BASELINE else folder.name
        groups.append(choose(name, str(part), logs) if logs else None)
    try:
        metadata = tomllib.loads(path.read_text(encoding="utf-8"))
        return Record(folder, *groups, **metadata)
    except (ValueError, TypeError) as error:
        raise InputError(f"{path}: {error}") from None


def read_records(root: Path) -> dict[str, Record]:
    """The records in `root`, by name, oldest first."""
    found = [read_record(path.parent) for path in root.glob("*/record.toml")]
    found.sort(key=lambda record: (record.date, record.folder.name))
    return {record.folder.name: record for record in found}


def compared(record: Record, records: dict[str, Record]) -> list[Group]:
    """The groups on its page: its baseline, if it has one, and its own runs."""
    baseline = record.own_baseline
    if record.baseline:
        if record.baseline not in records:
            path = record.folder / "record.toml"
            raise InputError(f"{path}: no record is named {record.baseline} (baseline)")
        baseline = records[record.baseline].group
    groups = [baseline, record.group] if baseline else [record.group]
    return verdict.in_pairs(groups) if record.pairs else groups


def markdown(text: object) -> str:
    """Text that shows as it is in a cell of Markdown: no HTML, no code."""
    line = shown(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"[`|]", r"\\\g<0>", line)


def fenced(text: str) -> str:
    """A block of code that no line of `text` can end and no mark of a page can stand in."""
    return "```\n" + text.replace("```", "'''").replace("<!--", "<! --") + "\n```"


def read_public(root: Path) -> dict[str, list[dict[str, Any]]]:
    """The public speedrun's rows, by track."""
    path = root / PUBLIC
    return tomllib.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def history(records: dict[str, Record], public: dict[str, list[dict[str, Any]]]) -> str:
    """A table for each track, newest first, public figures last; then what was not adopted."""
    adopted = [record for record in records.values() if record.adopted]
    others = [record for record in records.values() if not record.adopted]
    sections = []
    for track in sorted({record.track for record in adopted} | public.keys()):
        listed = [record for record in adopted if record.track == track]
        rows = [table_row(x, records, str(i)) for i, x in enumerate(listed, 1)]
        rows = rows[::-1] + [public_row(row) for row in public.get(track, [])]
        if track.startswith(DEMO):
            sections.append(table(f"Versions of the {track}", "version", rows))
        else:
            sections.append(table(track, "record", rows))
    rows = [table_row(record, records, record.folder.name) for record in reversed(others)]
    sections.append(table("Tried, not adopted", "idea", rows))
    return "".join(sections) or "\nNo record yet.\n"


def table(title: str, what: str, rows: list[str]) -> str:
    """A section of Markdown; "" without rows."""
    if not rows:
        return ""
    columns = [what, "time", "loss", "description", "date", "log", "contributors"]
    head = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    return "\n".join(["", f"### {markdown(title)}", "", *head, *rows, ""])


def table_row(record: Record, records: dict[str, Record], name: str) -> str:
    group = compared(record, records)[-1]
    folder = record.folder.name
    mixed = different_machines(group.runs)
    cells = [
        f"[{name}]({folder}/README.md)",
        "?" if mixed else f"{mean(group.times):.3f} s",
        f"{mean(group.losses):.4f}",
        markdown(record.description),
        record.date,
        f"[log]({folder}/{markdown(group.runs[0].path.as_posix())}), of {len(group.runs)}",
        markdown(", ".join(record.contributors)),
    ]
    return f"| {' | '.join(cells)} |"


def public_row(row: dict[str, Any]) -> str:
    cells = [markdown(row[name]) for name in ("record", "time", "loss", "description", "date")]
    cells += [f"[log]({row['log']}), of {row['runs']}", "the public speedrun"]
    return f"| {' | '.join(cells)} |"


def page(record: Record, records: dict[str, Record]) -> str:
    """A record's own README.md: what it is, the comparison, how to run it again."""
    groups = compared(record, records)
    rows = verdict.compare(groups, record.target, record.pairs)
    console = Console(file=io.StringIO(), width=1000, soft_wrap=True, emoji=False)
    compare.report(rows, groups, record.target, console)
    lines = [line.rstrip() for line in console.file.getvalue().strip().splitlines()]
    end = lines.index("")
    parts = [
        f"# {record.folder.name}",
        markdown(record.description),
        f"{record.date}, {markdown(', '.join(record.contributors))}. "
        f"Track: {markdown(record.track)}.",
        "\n".join(lines[:end]),
        fenced("\n".join(lines[end:]).strip()),
    ]
    if (record.folder / PICTURE).exists():
        parts.append(f"![losses and step times]({PICTURE})")
    run = groups[-1].runs[0]
    if run.sources:
        log = f"records/{record.folder.name}/{run.path}"
        extract = shlex.join(["./run.sh", "records/extract.py", log, "again"])
        again = shlex.join(["./run.sh", f"again/{run.script[0]}"])
        parts.append("The source:\n\n" + fenced(f"{shown(extract)}\n{shown(again)}"))
    return between(record.folder / "README.md", PAGE_MARKS, "\n\n".join(parts) + "\n")


def between(path: Path, marks: tuple[str, str], text: str) -> str:
    """The page at `path` with this text between its marks. Raises InputError without marks."""
    begin, end = marks
    old = path.read_text(encoding="utf-8") if path.exists() else f"{begin}\n{end}\n"
    before, opened, rest = old.partition(f"{begin}\n")
    _, closed, after = rest.partition(f"{end}\n")
    if not (opened and closed):
        raise InputError(f"{path}: the lines {begin} and {end} are not there: nothing written")
    return f"{before}{opened}{text}{closed}{after}"


def pages(root: Path) -> dict[Path, str]:
    """What README.md in `root` and the page of every record should hold."""
    records = read_records(root)
    readme = root / "README.md"
    texts = {readme: between(readme, MARKS, f"{history(records, read_public(root))}\n")}
    return texts | {x.folder / "README.md": page(x, records) for x in records.values()}


def draw_pictures(record: Record, records: dict[str, Record]) -> None:
    from plot import draw, draw_loss  # matplotlib takes a second to import

    groups = compared(record, records)
    draw(groups, record.target, record.folder / PICTURE, record.pairs)
    draw_loss(groups, record.target, record.folder / "loss.png")


def main(argv: list[str] | None = None, root: Path = RECORDS) -> None:
    """Raises SystemExit with a message for what cannot be done or is out of date."""
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    parser.add_argument("--check", action="store_true", help="write nothing")
    parser.add_argument("--picture", metavar="NAME", help="draw this record's pictures anew")
    options = parser.parse_args(argv)
    try:
        if options.picture:
            records = read_records(root)
            if options.picture not in records:
                raise InputError(f"{root / options.picture}: no such record")
            draw_pictures(records[options.picture], records)
        texts = pages(root)
    except InputError as error:
        raise SystemExit(f"history.py: error: {error}") from None
    stale = [x for x, text in texts.items() if not x.exists() or x.read_text("utf-8") != text]
    if options.check and stale:
        paths = ", ".join(map(str, stale))
        raise SystemExit(f"history.py: error: out of date: {paths}: run records/history.py")
    for path in stale:
        path.write_text(texts[path], encoding="utf-8")
        print(f"wrote {path}")


if __name__ == "__main__":
    main()

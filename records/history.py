"""The history of records, from the logs in records/*/ and the record.toml beside them.

    python records/history.py                     write the tables of records and each record's page anew
    python records/history.py --check             write nothing; exit code 1 if any of them is out of date
    python records/history.py --picture NAME      draw records/NAME/loss.png anew: loss against time
    python records/history.py --add NAME LOG… --description TEXT --contributors NAME,… [--baseline NAME]
                                                  copy logs into records/NAME/, write its record.toml, draw its pictures

record.toml: description, date (year-month-day), contributors (a list), track (what the record is of), target (the loss to be
below) and, if it has one, baseline (another record's folder).
"""

import argparse
import datetime
import io
import json
import shutil
import tempfile
import tomllib
from dataclasses import dataclass
from pathlib import Path

import compare
from groups import Group, InputError, gather

RECORDS = Path(__file__).resolve().parent
BEGIN, END = "<!-- history: written by history.py -->", "<!-- history ends -->"
FIELDS = {"description": str, "date": str, "contributors": list, "track": str, "target": (int, float)}


@dataclass
class Record:
    """A folder of records/: its metadata and its runs."""

    folder: Path
    description: str
    date: str
    contributors: list[str]
    track: str
    target: float
    group: Group
    baseline: str | None = None


def read_record(folder: Path) -> Record:
    """The record in a folder. Raises InputError, naming the file, for metadata or logs that do not make one."""
    path = folder / "record.toml"
    try:
        metadata = tomllib.loads(path.read_text(encoding="utf-8"))
        if wrong := [name for name, kind in FIELDS.items() if not isinstance(metadata.get(name), kind)]:
            raise ValueError(f"{', '.join(wrong)}: missing, or not of the right type")
        if unknown := set(metadata) - set(FIELDS) - {"baseline"}:
            raise ValueError(f"unknown: {', '.join(sorted(unknown))}")
        datetime.date.fromisoformat(metadata["date"])
    except (ValueError, OSError) as error:
        raise InputError(f"{path}: {error}") from None
    group = gather(folder.name, str(folder))
    for log in group.logs:
        log.path = log.path.relative_to(folder)
    return Record(folder=folder, group=group, **metadata)


def table(records: list[Record], here: str = "") -> str:
    """The history as Markdown: a table a track, newest first. here: what leads from the page to the records' folders."""
    lines = []
    for track in sorted({record.track for record in records}):
        of_track = sorted((record for record in records if record.track == track), key=lambda r: (r.date, r.folder.name))
        lines += [
            "",
            f"### {track}",
            "",
            "| record | time | loss | description | date | log | contributors |",
            "|---" * 7 + "|",
        ]
        for number, record in reversed([*enumerate(of_track, 1)]):
            name, times = f"{here}{record.folder.name}", record.group.times
            cells = [
                f"[{number}]({name}/README.md)",
                f"{compare.mean(times):.1f} s",
                f"{compare.mean(record.group.losses):.4f}",
                record.description.replace("|", "\\|"),
                record.date,
                f"[log]({name}/{record.group.runs[0].path}), of {len(record.group.runs)}",
                ", ".join(record.contributors),
            ]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, ""]) if lines else "\nNo record yet.\n"


def page(record: Record, records: dict[str, Record]) -> str:
    """A record's own README.md: what it is, the comparison, how to have it again."""
    from rich.console import Console

    groups = [record.group]
    if record.baseline:
        if record.baseline not in records:
            raise InputError(f"{record.folder / 'record.toml'}: no record is named {record.baseline!r} (baseline)")
        groups.insert(0, records[record.baseline].group)
    console = Console(file=io.StringIO(), width=1000, color_system=None)
    compare.report(groups, record.target, console)
    text = "\n".join(line.rstrip() for line in console.file.getvalue().strip().splitlines())
    grid, _, rest = text.partition("\n\n")
    picture = "\n![losses and step times](comparison.png)\n" if (record.folder / "comparison.png").exists() else ""
    log = record.group.runs[0].path
    return (
        f"# {record.folder.name}\n\n{record.description}\n\n"
        f"{record.date}, {', '.join(record.contributors)}. Track: {record.track}.\n\n"
        f"{grid}\n\n```\n{rest}\n```\n{picture}\n"
        f"The source: `python records/extract.py records/{record.folder.name}/{log} again`, "
        f"then `./run.sh again/{record.group.runs[0].script[0]}`.\n"
    )


def pages(root: Path) -> dict[Path, str]:
    """What the README.md of `root`, that above it if it has a table, and each record's should hold. Raises InputError."""
    records = {path.parent.name: read_record(path.parent) for path in sorted(root.glob("*/record.toml"))}
    written = {}
    for readme, here in ((root / "README.md", ""), (root.parent / "README.md", f"{root.name}/")):
        text = readme.read_text(encoding="utf-8") if readme.exists() else ""
        before, begin, rest = text.partition(BEGIN)
        _, end, after = rest.partition(END)
        if end:
            written[readme] = f"{before}{begin}\n{table([*records.values()], here)}\n{end}{after}"
        elif begin or not here:
            raise InputError(f"{readme}: the lines {BEGIN!r} and {END!r}, between which the table goes, are not there")
    return written | {record.folder / "README.md": page(record, records) for record in records.values()}


def add(root: Path, name: str, logs: list[str], metadata: dict) -> None:
    """Make the record `name` of these logs: copies, record.toml, comparison.png, loss.png. On error nothing is left of it.

    Raises InputError for logs that are no complete runs of one recipe, or if the record is there already.
    """
    folder = root / name
    if folder.exists() or Path(name).name != name:
        raise InputError(f"{folder}: {'exists' if folder.exists() else 'not the plain name of a folder'}; name another")
    group = gather(name, *logs)
    with tempfile.TemporaryDirectory(prefix=".record-", dir=root) as staging:
        draft = Path(staging) / name
        draft.mkdir()
        for run in group.runs:
            if (draft / run.path.name).exists():
                raise InputError(f"{run.path}: two of the logs have this name; rename one")
            shutil.copyfile(run.path, draft / run.path.name)
        toml = "".join(
            f"{key} = {json.dumps(value, ensure_ascii=False)}\n" for key, value in metadata.items() if value is not None
        )
        (draft / "record.toml").write_text(toml, encoding="utf-8")
        read_record(draft)
        from plot import draw, draw_loss

        baseline = [read_record(root / metadata["baseline"]).group] if metadata["baseline"] else []
        draw([*baseline, group], metadata["target"], str(draft / "comparison.png"))
        draw_loss([*baseline, group], metadata["target"], str(draft / "loss.png"))
        draft.rename(folder)


def draw_picture(root: Path, name: str) -> Path:
    """Draw the loss.png of the record `name`, with its baseline's runs if it has one; its path. Raises InputError."""
    from plot import draw_loss

    record = read_record(root / name)
    baseline = [read_record(root / record.baseline).group] if record.baseline else []
    draw_loss([*baseline, record.group], record.target, str(path := record.folder / "loss.png"))
    return path


def main(argv: list[str] | None = None, root: Path = RECORDS) -> None:
    """The command line. Raises SystemExit with code 1 after a message for what cannot be done or is out of date."""
    parser = argparse.ArgumentParser(
        prog="history.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing, exit with 1 if a page is out of date")
    parser.add_argument("--picture", metavar="NAME", help="draw this record's loss.png anew")
    parser.add_argument("--add", metavar="NAME", help="the new record's folder, such as 2026-01-31_Idea")
    parser.add_argument("logs", nargs="*", metavar="LOG", help="with --add: its logs, or folders or globs of them")
    parser.add_argument("--description", help="with --add: what the record does, in a line")
    parser.add_argument("--contributors", help="with --add: names, with commas between them")
    parser.add_argument("--date", default=datetime.date.today().isoformat(), help="with --add (today)")
    parser.add_argument("--track", default="8 H100, loss 3.28", help="with --add: what it is a record of (%(default)s)")
    parser.add_argument("--target", type=float, default=3.28, help="with --add: the loss to be below (%(default)s)")
    parser.add_argument("--baseline", metavar="NAME", help="with --add: the record's folder to compare it with")
    options = parser.parse_args(argv)
    if bool(options.add) != bool(options.logs) or options.add and not (options.description and options.contributors):
        parser.error("--add takes NAME, logs, --description and --contributors; without it there are no logs to name")
    try:
        if options.picture:
            print(f"wrote {draw_picture(root, options.picture)}")
        if options.add:
            metadata = {name: getattr(options, name) for name in (*FIELDS, "baseline")}
            metadata["contributors"] = [name.strip() for name in options.contributors.split(",")]
            add(root, options.add, options.logs, metadata)
        stale = {
            path: text for path, text in pages(root).items() if not path.exists() or path.read_text(encoding="utf-8") != text
        }
        if options.check and stale:
            raise InputError(f"out of date: {', '.join(map(str, stale))}; run: python records/history.py")
        for path, text in stale.items():
            path.write_text(text, encoding="utf-8")
            print(f"wrote {path}")
    except (InputError, OSError) as error:
        raise SystemExit(f"history.py: error: {error}") from None
    except ModuleNotFoundError as error:
        raise SystemExit(f"history.py: error: {error}. Try: pip install -r records/requirements.txt") from None


if __name__ == "__main__":
    main()

"""The history of records, from the logs in records/*/ and the record.toml beside them.

    python records/history.py                     write the tables of records and each record's page anew
    python records/history.py --check             write nothing; exit code 1 if any of them is out of date
    python records/history.py --picture NAME      draw the pictures of records/NAME/ anew
    python records/history.py --add NAME LOG… --description TEXT --contributors NAME,… [--baseline LOGS] [--pairs]
                                                  copy logs into records/NAME/, write its record.toml, draw its pictures

--baseline: logs of what it is compared with, made on the same machine, which are kept in NAME/baseline/; or a record's name.
record.toml: description, date (year-month-day), contributors (a list), track (what the record is of), target (the loss to be
below); if it is compared with another record's logs, baseline (that folder); if its runs alternated with the baseline's, pairs =
true. A page's text outside of its two marks is its author's, and stays.
"""

import argparse
import datetime
import io
import json
import os
import re
import shlex
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

sys.path[:0] = [str(Path(__file__).resolve().parent)]  # also where Python leaves it out: PYTHONSAFEPATH

import older  # noqa: F401, first of all
import tomllib
import compare
import tool
from groups import BASELINE, Group, InputError, choose, figures, find_logs, gather, on_several_machines, plural
from runlog import RunLog, machines, read_log
from tool import clean, markdown
from verdict import in_pairs

RECORDS = Path(__file__).resolve().parent
TRACK, TARGET = "8 H100, loss 3.28", 3.28
BEGIN, END = "<!-- history: written by history.py -->", "<!-- history ends -->"
PAGE_BEGIN, PAGE_END = "<!-- record: written by history.py -->", "<!-- record ends -->"
PLAIN_NAME = re.compile(r"\w[\w.+-]{0,99}", re.ASCII)
LINE = re.compile(r"[^\n]*\S[^\n]*")


def is_names(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(is_line(name) for name in value)


def is_line(value: object) -> bool:
    return isinstance(value, str) and bool(LINE.fullmatch(value)) and not re.search("[\x7f\ud800-\udfff]", value)  # LC_ALL=C's


def is_date(value: object) -> bool:
    try:
        return is_line(value) and datetime.date.fromisoformat(value).isoformat() == value
    except ValueError:
        return False


def is_loss(value: object) -> bool:
    return type(value) in (int, float) and 0 < value < 1e300


FIELDS = {  # of record.toml: what is a value, in words
    "description": (is_line, "a line of text"),
    "date": (is_date, "a text such as 2026-01-31"),
    "contributors": (is_names, "a list of names, none of them empty"),
    "track": (is_line, "a line of text"),
    "target": (is_loss, "a number above 0"),
}
OPTIONAL = {"baseline": (is_line, "a record's name"), "pairs": (lambda value: type(value) is bool, "true or false")}


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
    pairs: bool = False  # compared seed by seed, as its runs and the baseline's alternated
    own_baseline: Group | None = None  # the logs of its folder baseline/


def read_record(folder: Path) -> Record:
    """The record in a folder. Raises InputError, naming the file, for metadata or logs that do not make one."""
    path = folder / "record.toml"
    try:
        metadata = tomllib.loads(read(path))
        known = FIELDS | {name: rule for name, rule in OPTIONAL.items() if name in metadata}
        wrong = [f"{name} must be {what}" for name, (holds, what) in known.items() if not holds(metadata.get(name))]
        if unknown := sorted(set(metadata) - set(known)):
            wrong.append(f"there is no {', '.join(map(clean, unknown))}")
        if not PLAIN_NAME.fullmatch(folder.name):
            wrong.append("its folder's name must be letters, digits and . _ + -")
        if wrong:
            raise ValueError("; ".join(wrong))
    except (ValueError, OSError, RecursionError) as error:
        raise InputError(f"{path}: {error}") from None
    logs, own = ([read_log(path) for path in find_logs(str(x))] if x.is_dir() else [] for x in (folder, folder / BASELINE))
    for log in logs + own:
        log.path = log.path.relative_to(folder)
    group = choose(folder.name, str(folder), logs, False)
    baseline = choose(BASELINE, str(folder / BASELINE), own, False) if own else None
    return Record(folder=folder, group=group, own_baseline=baseline, **metadata)


def compared_with(record: Record, records: dict[str, Record]) -> list[Group]:
    """The baseline's group, if it has one: its own logs, else another record's. Raises InputError."""
    if record.own_baseline:
        return [record.own_baseline]
    if record.baseline and record.baseline not in records:
        raise InputError(f"{record.folder / 'record.toml'}: no record is named {record.baseline!r} (baseline)")
    return [records[record.baseline].group] if record.baseline else []


def compared(record: Record, records: dict[str, Record]) -> list[Group]:
    """What its page compares: its baseline, if it has one, and its group; in pairs those with partners. Raises InputError."""
    groups = [*compared_with(record, records), record.group]
    return in_pairs(groups) if record.pairs else groups


def table(records: dict[str, Record], here: str = "") -> str:
    """The history as Markdown: a table a track, newest first. here: what leads from the page to the records' folders."""
    lines = []
    for track in sorted({record.track for record in records.values()}):
        of_track = [record for record in records.values() if record.track == track]
        of_track.sort(key=lambda record: (record.date, record.folder.name))
        lines += [
            "",
            f"### {markdown(track)}",
            "",
            "| record | time | loss | description | date | log | contributors |",
            "|---" * 7 + "|",
        ]
        for number, record in reversed([*enumerate(of_track, 1)]):
            group = compared(record, records)[-1]
            name, times, runs = f"{here}{record.folder.name}", group.times, group.runs
            log = quote(runs[0].path.as_posix().encode("utf-8", "surrogateescape"))
            cells = [
                f"[{number}]({name}/README.md)",
                f"{compare.mean(times):.3f} s" if len(times) == len(runs) and not on_several_machines(runs) else "?",
                f"{compare.mean(group.losses):.4f}",
                markdown(record.description),
                record.date,
                f"[log]({name}/{log}), of {len(runs)}",
                markdown(", ".join(record.contributors)),
            ]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, ""]) if lines else "\nNo record yet.\n"


def page(record: Record, records: dict[str, Record]) -> str:
    """A record's own README.md: what it is, the comparison, how to have it again. Raises InputError, see written."""
    from rich.console import Console

    groups = compared(record, records)
    console = Console(file=io.StringIO(), width=1000, color_system=None, force_terminal=False, force_jupyter=False, emoji=False)
    compare.report(groups, record.target, console, record.pairs)
    text = "\n".join(line.rstrip() for line in console.file.getvalue().strip().splitlines())
    grid, _, rest = text.partition("\n\n")
    picture = "\n![losses and step times](comparison.png)\n" if (record.folder / "comparison.png").exists() else ""
    run = groups[-1].runs[0]
    extract = shlex.join(["python", "records/extract.py", f"records/{record.folder.name}/{run.path}", "again"])
    again = shlex.join(["./run.sh", f"again/{run.script[0]}"])
    source = f"\nThe source:\n\n{tool.fenced(f'{clean(extract, one_line=True)}{chr(10)}{clean(again, one_line=True)}')}\n"
    return written(
        record.folder / "README.md",
        f"# {record.folder.name}\n\n{markdown(record.description)}\n\n"
        f"{record.date}, {markdown(', '.join(record.contributors))}. Track: {markdown(record.track)}.\n\n"
        f"{grid}\n\n{tool.fenced(rest)}\n{picture}{source if run.sources else ''}",
    )


def written(path: Path, text: str) -> str:
    """The page with this text between its marks; what stands outside is kept. Raises InputError for a page without marks."""
    old = read(path) if path.exists() else f"{PAGE_BEGIN}\n{PAGE_END}\n"
    before, after = around(old, PAGE_BEGIN, PAGE_END)
    if before is None:
        raise InputError(
            f"{path}: not overwritten, as the lines {PAGE_BEGIN} and {PAGE_END}, between which goes what is written, "
            f"are not there: add them, or remove the file"
        )
    return f"{before}{PAGE_BEGIN}\n{text}{PAGE_END}{after}"


def around(text: str, begin: str, end: str) -> tuple[str | None, str]:
    """What stands before the line `begin` and after the line `end`; None if either is not there, or is there twice."""
    marks = [[*re.finditer(rf"^{re.escape(mark)}(?=\r?$)", text, re.MULTILINE)] for mark in (begin, end)]
    if [len(found) for found in marks] != [1, 1] or marks[0][0].end() > marks[1][0].start():
        return None, ""
    return text[: marks[0][0].start()], text[marks[1][0].end() :]


def pages(root: Path) -> dict[Path, str]:
    """What the README.md of `root`, that above it if it has a table, and each record's should hold. Raises InputError."""
    records = read_records(root)
    found = {}
    for readme, here in ((root / "README.md", ""), (root.parent / "README.md", f"{root.name}/")):
        text = read(readme) if readme.exists() else ""
        before, after = around(text, BEGIN, END)
        if before is not None:
            found[readme] = f"{before}{BEGIN}\n{table(records, here)}\n{END}{after}"
        elif BEGIN in text or END in text or not here:
            raise InputError(
                f"{readme}: the lines {BEGIN!r} and {END!r}, between which the table goes, are not there once each"
            )
    return found | {record.folder / "README.md": page(record, records) for record in records.values()}


def check_new(root: Path, name: str, metadata: dict) -> None:
    """Raise InputError for a name that is taken or none, and for fields of record.toml that cannot be."""
    folder = root / name
    if folder.exists() or not PLAIN_NAME.fullmatch(name):
        why = "exists" if folder.exists() else "must be letters, digits and . _ + -"
        raise InputError(f"{folder}: {why}; name another")
    if wrong := [f"--{option} must be {FIELDS[option][1]}" for option, value in metadata.items() if not FIELDS[option][0](value)]:
        raise InputError("; ".join(wrong))


def add(root: Path, name: str, logs: list[str], metadata: dict, baseline: str | None, keep_aside: bool) -> None:
    """Make the record `name` of these logs: copies, record.toml, pictures. On error nothing is left of it.

    Raises InputError if one of the logs does not count, unless keep_aside, or is another record's or the baseline's too.
    """
    folder = root / name
    group, own = gather(name, *logs), None
    if None in (metadata["track"], metadata["target"]) and (cpu := next(filter(None, map(only_cpu, group.runs)), "")):
        raise InputError(f"these runs are of a CPU ({cpu}): say --track, such as 'demo, 2 CPU cores', and its --target")
    otherwise = {"track": TRACK, "target": TARGET, "date": datetime.date.today().isoformat()}
    metadata |= {option: value for option, value in otherwise.items() if metadata[option] is None}
    check_new(root, name, {option: metadata[option] for option in FIELDS})
    known = record_names(root)
    if baseline and Path(os.path.realpath(baseline)).parent == root.resolve() and (named := Path(baseline).name) in known:
        baseline = named  # as a shell completes it
    if baseline and baseline not in known:
        own = gather(BASELINE, baseline)
    elif baseline:
        metadata = metadata | {"baseline": baseline}
    records = read_records(root)
    of_baseline = own or records[baseline].group if baseline else None
    both = in_pairs([of_baseline, group]) if metadata.get("pairs") and of_baseline else [own, group]
    for what in both if own else both[1:]:  # another record's logs stay its own
        if what.aside and not keep_aside:
            raise InputError(
                f"{len(what.aside)} of {plural(len(what.logs), 'log')} of {what.name} would not count:\n{what.told_aside()}\n"
                f"--keep-aside keeps them in the record, whose page names them; or name the logs that are meant"
            )
    pages(root)  # what is wrong with another record's would be found once this one is there
    others = [("the baseline", own)] if own else []
    others += [(f"the record {other}", found.group) for other, found in records.items()]
    others += [(f"the baseline of {other}", found.own_baseline) for other, found in records.items() if found.own_baseline]
    for run in group.runs:
        for where, other in others:
            if run.times and any(figures(run) == figures(log) for log in other.runs):
                raise InputError(f"{run.path}: has the times and losses of a run of {where}: a record is made of its own runs")
    for left in root.glob(".record-draft-????????"):  # copies, of a process that was killed: this one has the folder alone
        shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=".record-draft-", dir=root) as staging:
        draft = Path(staging) / name
        copy_logs(group, draft)
        if own:
            copy_logs(own, draft / BASELINE)
        toml = "".join(f"{key} = {json.dumps(value, ensure_ascii=False)}\n" for key, value in metadata.items())
        (draft / "record.toml").write_text(toml, encoding="utf-8")
        record = read_record(draft)
        if [log.path.name for log in record.group.runs] != sorted(log.path.name for log in group.runs):
            raise InputError(f"{name}: its logs alone are not of one kind; name the logs that are meant")
        draw_pictures(record, records)
        page(record, records)
        draft.rename(folder)


def only_cpu(run: RunLog) -> str:
    """The CPU that a run was made on; "" if its log tells of a GPU, or of neither."""
    here = machines(run)[0]
    return "" if "GPUs" in here else here.get("CPU", "")


def read(path: Path) -> str:
    """With its line breaks as they are, without the mark that some editors put before a text in UTF-8. Raises InputError."""
    try:
        return path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: its byte {error.start} is no UTF-8: save the page as UTF-8") from None


def copy_logs(group: Group, folder: Path) -> None:
    """Raises InputError if two of them have one name, or one would not be found in a folder."""
    folder.mkdir()
    for log in group.logs:
        if log.path.suffix not in (".txt", ".log"):
            raise InputError(f"{log.path}: a record's logs are *.txt or *.log; rename it")
        if (folder / log.path.name).exists():
            raise InputError(f"{log.path}: two of the logs have this name; rename one")
        shutil.copyfile(log.path, folder / log.path.name)


def draw_pictures(record: Record, records: dict[str, Record]) -> list[Path]:
    """Draw its comparison.png and loss.png; their paths. Raises InputError."""
    from plot import draw, draw_loss

    groups = compared(record, records)
    paths = [record.folder / name for name in ("comparison.png", "loss.png")]
    draw(groups, record.target, str(paths[0]), record.pairs)
    draw_loss(groups, record.target, str(paths[1]))
    return paths


def record_names(root: Path) -> list[str]:
    return sorted(path.parent.name for path in root.glob("*/record.toml"))


def read_records(root: Path) -> dict[str, Record]:
    """Those of `root`, by name. Raises InputError."""
    return {name: read_record(root / name) for name in record_names(root)}


def update(options: argparse.Namespace, root: Path) -> None:
    """Do what the command line asks for, then tell what was written: a pipe's reader may have gone. Raises InputError."""
    written: list[Path] = []
    if options.picture:
        if options.picture not in record_names(root):
            raise InputError(f"{root / options.picture}: no such record")
        records = read_records(root)
        written += draw_pictures(records[options.picture], records)
    if options.add:
        metadata = {name: getattr(options, name) for name in FIELDS}
        metadata["contributors"] = [name.strip() for name in options.contributors.split(",")]
        check_new(root, options.add, {name: value for name, value in metadata.items() if value is not None})
        metadata |= {"pairs": True} if options.pairs else {}
        add(root, options.add, options.logs, metadata, options.baseline, options.keep_aside)
    stale = {path: text for path, text in pages(root).items() if not path.exists() or read(path) != text}
    if options.check and stale:
        raise InputError(f"out of date: {', '.join(map(str, stale))}; run: python records/history.py")
    try:
        for path, text in stale.items():
            tool.write(path, text)
    except OSError as error:
        there = f"the record {options.add} is made; " if options.add else ""
        raise InputError(f"{error}: {there}mend it, then python records/history.py writes the pages") from None
    for path in (*written, *stale):
        print(f"wrote {path}")


def main(argv: list[str] | None = None, root: Path = RECORDS) -> None:
    """The command line. Raises SystemExit with code 1 after a message for what cannot be done or is out of date."""
    parser = tool.Parser("history.py", __doc__)
    parser.add_argument("--check", action="store_true", help="write nothing, exit with 1 if a page is out of date")
    parser.add_argument("--picture", metavar="NAME", help="draw this record's pictures anew")
    parser.add_argument("--add", metavar="NAME", help="the new record's folder, such as 2026-01-31_Idea")
    parser.add_argument("logs", nargs="*", metavar="LOG", help="with --add: its logs, or folders or globs of them")
    parser.add_argument("--description", help="with --add: what the record does, in a line")
    parser.add_argument("--contributors", help="with --add: names, with commas between them")
    parser.add_argument("--date", help="with --add (today)")
    parser.add_argument("--track", help=f"with --add: what it is a record of ({TRACK}, unless the logs tell no GPU)")
    parser.add_argument("--target", type=tool.above_zero, help=f"with --add: the loss to be below ({TARGET}, as --track)")
    parser.add_argument(
        "--baseline", metavar="LOGS", help="with --add: logs to compare it with, kept beside, or a record's name"
    )
    parser.add_argument("--pairs", action="store_true", help="with --add: compare seed by seed, as the runs alternated")
    parser.add_argument(
        "--keep-aside", action="store_true", help="with --add: keep logs that do not count; the page names them"
    )
    options = parser.parse_args(argv)
    if bool(options.add) != bool(options.logs) or options.add and not (options.description and options.contributors):
        parser.error("--add takes NAME, logs, --description and --contributors; without it there are no logs to name")
    asked = [name for name in (*FIELDS, *OPTIONAL, "keep_aside") if getattr(options, name) != parser.get_default(name)]
    if asked and not options.add:
        parser.error(f"--{asked[0].replace('_', '-')} goes with --add")
    if options.check and (options.add or options.picture):
        parser.error("--check writes nothing: it goes without --add and --picture")
    if options.pairs and not (options.add and options.baseline):
        parser.error("--pairs goes with --add and its --baseline")
    try:
        with tool.alone(root):  # two at once would each write a table without the other's record
            update(options, root)
    except BrokenPipeError:  # for tool.run
        raise
    except (InputError, OSError, ValueError) as error:
        raise SystemExit(f"history.py: error: {error}") from None
    except ModuleNotFoundError as error:
        raise SystemExit(f"history.py: error: {error}. Try: pip install -r records/requirements.txt") from None


if __name__ == "__main__":
    tool.run(main)

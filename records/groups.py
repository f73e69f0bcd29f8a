"""Runs of one kind: which logs an argument names, which are averaged, which are set aside and why."""

import glob
import os
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from kinds import differing, kind
from runlog import RunLog, at_step, machines, read_log
from tool import clean

BASELINE = "baseline"  # the folder of a record's own baseline, and its name in the table
NAMED = 3  # logs in a list, before "and … more"


@dataclass
class Group:
    """The logs of one argument: complete runs of one kind, and what was set aside, with the reason."""

    name: str
    runs: list[RunLog] = field(default_factory=list)
    aside: list[tuple[RunLog, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # of the choice of its logs
    partners: list[RunLog] = field(default_factory=list)  # in pairs, the baseline's: that of run i

    @property
    def times(self) -> list[float]:
        """Training times in seconds, of the runs whose last line tells it."""
        return [run.seconds for run in self.runs if run.seconds is not None]

    @property
    def losses(self) -> list[float]:
        return [run.loss for run in self.runs]

    @property
    def of_each_source(self) -> list[RunLog]:
        """The first run of each kind of sources: one, but with --any-source."""
        firsts: dict[tuple, RunLog] = {}
        for run in self.runs:
            firsts.setdefault(kind(run)["sources"], run)
        return [*firsts.values()]

    @property
    def logs(self) -> list[RunLog]:
        """All of them: the runs, then what was set aside."""
        return [*self.runs, *(log for log, _ in self.aside)]

    def told_aside(self) -> str:
        """A line for each reason, indented, with the logs that were set aside for it."""
        return "\n".join(f"  {line}" for line in folded([(log.path, reason) for log, reason in self.aside]))


class InputError(Exception):
    """Arguments that cannot be compared; the message says which and what to do."""


def find_logs(argument: str) -> list[Path]:
    """The logs that an argument names, sorted; of a record's folder those of the record, not of what it is compared with.
    Raises InputError if there is none."""
    path = Path(argument)
    if path.is_dir():
        found = [x for x in files_below(path) if x.suffix in (".txt", ".log") and x.name != "requirements.txt"]
        found = sorted(x for x in found if x.name[0] != ".")  # hidden, as macOS leaves beside each file on foreign disks
        if (path / "record.toml").exists():
            found = [x for x in found if x.relative_to(path).parts[0] != BASELINE]
        if not found:
            raise InputError(f"{argument}: no *.txt or *.log in this folder")
        return found
    if path.exists():
        return [path]
    there = next(parent for parent in path.parents if parent.exists())  # its own name may have brackets
    beyond = glob.glob(f"{glob.escape(f'{there}')}/{path.relative_to(there)}", recursive=True)
    found = sorted(map(Path, beyond or glob.glob(argument, recursive=True)))
    if not found:
        raise InputError(f"{argument}: no such log or folder, and nothing matches it as a glob")
    return [log for match in found for log in (find_logs(str(match)) if match.is_dir() else [match])]


def files_below(folder: Path) -> Iterator[Path]:
    """All that are no folders, also below links to folders; each folder once. Raises InputError for one that cannot be read."""

    def refuse(error: OSError) -> None:
        raise InputError(f"{error.filename}: cannot be read: {error.strerror}")

    seen = {os.path.realpath(folder)}
    for place, folders, names in os.walk(folder, onerror=refuse, followlinks=True):
        yield from (Path(place, name) for name in names)
        real = {name: os.path.realpath(Path(place, name)) for name in sorted(folders)}
        folders[:] = [name for name in real if real[name] not in seen]
        seen |= {*real.values()}


def short_names(arguments: list[str]) -> list[str]:
    """The last path components of the arguments, as many as tell them apart."""
    parts = [Path(argument).parts or (argument,) for argument in arguments]
    for count in range(1, max(map(len, parts)) + 1):
        names = [clean("/".join(part[-count:]), one_line=True) for part in parts]
        if len(set(names)) == len(names):
            break
    return names


def shares(arguments: list[str]) -> list[tuple[list[Path], list[str]]]:
    """(logs, notes) of each argument. A log that several of them name belongs to the one that names the fewest logs.

    Raises InputError where that is no decision, or leaves an argument without a log.
    """
    found = [list({os.path.realpath(path): path for path in find_logs(argument)}.items()) for argument in arguments]
    owner: dict[str, int] = {}
    for i in sorted(range(len(found)), key=lambda i: len(found[i])):
        for real, path in found[i]:
            if real in owner and len(found[owner[real]]) == len(found[i]):
                raise InputError(f"{path} belongs to {arguments[owner[real]]} and to {arguments[i]}: name it once")
            owner.setdefault(real, i)
    shared = []
    for i, logs in enumerate(found):
        own = [path for real, path in logs if owner[real] == i]
        others = Counter(arguments[owner[real]] for real, _ in logs if owner[real] != i)
        notes = [f"{count} of {len(logs)} logs of {arguments[i]} belong to {name}, which names fewer: not counted here"
                 for name, count in others.items()]  # fmt: skip
        if not own:
            raise InputError(f"{arguments[i]}: all its logs belong to {', '.join(others)}: nothing is left to compare")
        shared.append((own, notes))
    return shared


def gather_all(arguments: list[str], any_source: bool = False, at: int | None = None) -> list[Group]:
    """The groups of a comparison, no log in two of them; at: the step at which runs end. Raises InputError."""
    groups = []
    for name, argument, (paths, notes) in zip(short_names(arguments), arguments, shares(arguments), strict=True):
        logs = [read_log(path) if at is None else at_step(read_log(path), at) for path in paths]
        group = choose(name, argument, logs, any_source)
        group.notes = notes + group.notes
        groups.append(group)
    return groups


def gather(name: str, *arguments: str, any_source: bool = False) -> Group:
    """One group of the logs of all arguments. Raises InputError if no run is left, or if they are of several kinds."""
    paths = dict.fromkeys(log for argument in arguments for log in find_logs(argument))
    return choose(name, ", ".join(arguments), [read_log(path) for path in paths], any_source)


def choose(name: str, argument: str, logs: list[RunLog], any_source: bool) -> Group:
    """A group of these logs' runs, all of the kind that most of them are. Raises InputError as gather does."""
    group = Group(name)
    kinds: dict[tuple, list[RunLog]] = {}
    seen = {}
    for log in logs:
        if log.fault:
            group.aside.append((log, log.fault))
            continue
        its_kind = tuple(sorted(kind(log, any_source).items()))
        content = its_kind, figures(log)
        if log.times and content in seen:
            group.aside.append((log, f"the same run as {seen[content]}"))
        else:
            seen[content] = log.path
            kinds.setdefault(its_kind, []).append(log)
    complete = sum(map(len, kinds.values()))
    if not complete:
        raise InputError(f"{argument}: none of {len(group.aside)} logs is a complete run:\n{group.told_aside()}")
    ordered = sorted(kinds.items(), key=lambda item: -len(item[1]))
    (usual, group.runs), *others = ordered
    if 2 * len(group.runs) <= complete or any(len(runs) > 1 for _, runs in others):
        raise InputError(several_kinds(argument, ordered))
    for other, runs in others:
        group.aside += [(run, f"other than most here: {differing(dict(usual), dict(other))}") for run in runs]
    if any_source and (count := len(group.of_each_source)) > 1:
        group.notes.append(
            f"the runs of {name} have {count} different sources (--any-source); what changed is told of the first"
        )
    return group


def figures(log: RunLog) -> tuple:
    """Its times and losses: no two runs have the same, and an editor that adds a mark or blanks to a copy changes none."""
    return (*sorted(log.times.items()), *log.validations)


def several_kinds(argument: str, ordered: list[tuple[tuple, list[RunLog]]]) -> str:
    """The message that lists the kinds of runs, most runs first, by what each differs from the first."""
    first, lines = dict(ordered[0][0]), []
    for i, (other, runs) in enumerate(ordered):
        folders = names([*dict.fromkeys(run.path.parent for run in runs)])
        what = f": differs in {differing(first, dict(other))}" if i else ""
        lines.append(f"  {plural(len(runs), 'run')} in {folders} ({names([run.path.name for run in runs])}){what}")
    return (
        f"{argument}: {len(ordered)} kinds of runs, which share no mean, and which is meant is yours to say (a kind is taken "
        f"for granted if it is more than half of all and the others are single runs):\n" + "\n".join(lines) + "\n"
        "Name the logs of one kind: a folder of them, or a glob in quotes. compare.py has --any-source, for any sources."
    )


# -----------------------------------------------------------------------------
# Words


def plural(count: int, what: str) -> str:
    return f"{count} {what}{'s' * (count != 1)}"


def names(items: list, most: int = NAMED) -> str:
    """The first of them, and how many more."""
    more = f" and {len(items) - most} more" if len(items) > most else ""
    return ", ".join(clean(item, one_line=True) for item in items[:most]) + more


def folded(items: list[tuple[Path | str, str]]) -> list[str]:
    """A line for each text, with the logs that it is said of; texts that differ in a step, a line or a file are one."""
    texts: dict[str, list[tuple[Path | str, str]]] = {}
    for path, text in items:
        texts.setdefault(re.sub(r"\d+|(?<=the same run as ).*", "#", text), []).append((path, text))
    lines = []
    for same in texts.values():
        (path, text), more = same[0], len(same) - 1
        also = f" (and {more} more like it: {names([Path(other).name for other, _ in same[1:]])})" if more else ""
        lines.append(f"{clean(f'{path}: {text}', one_line=True)}{also}")
    return lines


# -----------------------------------------------------------------------------
# Machines


def on_several_machines(runs: list[RunLog]) -> list[str]:
    """In what the machines of runs differ, as far as their logs tell; empty: in nothing that they tell."""
    values: dict[str, list[str]] = {}
    for machine in (machine for run in runs for machine in machines(run)):
        for name, value in machine.items():
            if value not in values.setdefault(name, []):
                values[name].append(value)
    return [
        f"{name} {' and '.join(found)}" if len(found) == 2 and len("".join(found)) < 60 else f"{len(found)} values of {name}"
        for name, found in values.items()
        if len(found) > 1
    ]


def machine_told(runs: list[RunLog]) -> bool:
    """Do all the logs tell what tells machines apart: a host, a driver, GPU ids, or a CPU?"""
    return all(any({"host", "driver", "GPU ids", "CPU"} & set(machine) for machine in machines(run)) for run in runs)

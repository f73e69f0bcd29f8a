"""Runs of one recipe: which logs an argument names, which are averaged, which are set aside and why."""

import glob
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from runlog import RunLog, read_log


@dataclass
class Group:
    """The logs of one argument: complete runs of one recipe, and what was set aside, with the reason."""

    name: str
    runs: list[RunLog] = field(default_factory=list)
    aside: list[tuple[RunLog, str]] = field(default_factory=list)

    @property
    def times(self) -> list[float]:
        """Training times in seconds, of the runs whose last line tells it."""
        return [run.seconds for run in self.runs if run.seconds is not None]

    @property
    def losses(self) -> list[float]:
        return [run.loss for run in self.runs]

    @property
    def logs(self) -> list[RunLog]:
        """All of them: the runs, then what was set aside."""
        return [*self.runs, *(log for log, _ in self.aside)]


class InputError(Exception):
    """Arguments that cannot be compared; the message says which and what to do."""


def find_logs(argument: str) -> list[Path]:
    """The logs that an argument names, sorted. Raises InputError if there is none."""
    path = Path(argument)
    if path.is_dir():
        found = sorted(file for file in path.rglob("*") if file.suffix in (".txt", ".log") and file.name != "requirements.txt")
        if not found:
            raise InputError(f"{argument}: no *.txt or *.log in this folder")
        return found
    if path.exists():
        return [path]
    found = sorted(Path(name) for name in glob.glob(argument, recursive=True))
    if not found:
        raise InputError(f"{argument}: no such log or folder, and nothing matches it as a glob")
    return [log for match in found for log in (find_logs(str(match)) if match.is_dir() else [match])]


def short_names(arguments: list[str]) -> list[str]:
    """The last path components of the arguments, as many as tell them apart."""
    parts = [Path(argument).parts or (argument,) for argument in arguments]
    for count in range(1, max(map(len, parts)) + 1):
        names = ["/".join(part[-count:]) for part in parts]
        if len(set(names)) == len(names):
            break
    return names


def gather(name: str, *arguments: str) -> Group:
    """Read the logs of arguments, and set aside what must not be averaged in. Raises InputError if no run is left."""
    group = Group(name)
    complete, seen = [], {}
    for path in dict.fromkeys(log for argument in arguments for log in find_logs(argument)):
        log = read_log(path)
        content = (log.recipe, tuple(log.times.values()), tuple(log.validations))
        if log.fault:
            group.aside.append((log, log.fault))
        elif log.times and content in seen:
            group.aside.append((log, f"the same run as {seen[content]}"))
        else:
            seen[content] = path
            complete.append(log)
    if not complete:
        reasons = "\n".join(f"  {log.path}: {reason}" for log, reason in group.aside)
        raise InputError(f"{', '.join(arguments)}: none of {len(group.aside)} logs is a complete run:\n{reasons}")
    usual, _ = Counter(log.recipe for log in complete).most_common(1)[0]
    for log in complete:
        if log.recipe == usual:
            group.runs.append(log)
        else:
            kinds = ("other sources", "other settings", "another number of steps")
            differs = [kind for kind, a, b in zip(kinds, log.recipe, usual, strict=True) if a != b]
            group.aside.append((log, f"made with {' and '.join(differs)} than most here"))
    return group

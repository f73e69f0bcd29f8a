"""Groups of runs: the logs that an argument names, those that share a mean, those set aside."""

import glob
import io
import tokenize
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from runlog import MACHINE, MADE_WITH, RunLog, at_step, read_log, shown

BASELINE = "baseline"  # the folder of a record's own baseline, and its name in the table
NAMED = 3  # logs in a list, before "and … more"


class InputError(Exception):
    """Arguments that cannot be compared; the message says which and what to do."""


@dataclass
class Group:
    """Complete runs that share a mean, and the logs that were set aside, with the reason."""

    name: str
    runs: list[RunLog] = field(default_factory=list)
    aside: list[tuple[RunLog, str]] = field(default_factory=list)

    @property
    def times(self) -> list[float]:
        """Training times, seconds."""
        return [run.seconds for run in self.runs]

    @property
    def losses(self) -> list[float]:
        return [run.loss for run in self.runs]

    @property
    def logs(self) -> list[RunLog]:
        return [*self.runs, *(log for log, _ in self.aside)]

    def aside_lines(self) -> str:
        return "\n".join(f"  {shown(log.path)}: {shown(why)}" for log, why in self.aside)


# ----------------------------------------------------------------------------------------------
# Which logs


def find_logs(argument: str) -> list[Path]:
    """The logs that a path, a folder or a glob names, sorted. Raises InputError if there is none.

    A record's folder names the record's own logs, not those of its baseline.
    """
    path = Path(argument)
    if path.is_dir():
        found = [x for x in path.rglob("*") if x.suffix in (".txt", ".log") and x.name[0] != "."]
        if (path / "record.toml").exists():
            found = [x for x in found if x.relative_to(path).parts[0] != BASELINE]
    elif path.exists():
        found = [path]
    else:
        matches = glob.glob(argument, recursive=True)
        found = [log for match in matches for log in find_logs(match)]
    if not found:
        raise InputError(f"{argument}: no logs (*.txt, *.log) there")
    return sorted(found)


def short_names(arguments: list[str]) -> list[str]:
    """The last parts of the paths, as many as it takes to tell the arguments apart."""
    parts = [Path(argument).parts or (argument,) for argument in arguments]
    for count in range(1, max(map(len, parts)) + 1):
        names = [shown("/".join(part[-count:])) for part in parts]
        if len(set(names)) == len(names):
            break
    return names


def gather_all(arguments: list[str], at: int | None = None) -> list[Group]:
    """The groups of a comparison; at: the step at which runs end. Raises InputError, OSError."""
    groups, owners = [], {}
    for name, argument in zip(short_names(arguments), arguments):
        paths = find_logs(argument)
        for path in paths:
            # A log in two groups would make them alike.
            owner = owners.setdefault(path.resolve(), argument)
            if owner != argument:
                raise InputError(f"{path} belongs to {owner} and to {argument}: name it once")
        logs = [read_log(path) for path in paths]
        if at is not None:
            logs = [at_step(log, at) for log in logs]
        groups.append(choose(name, argument, logs))
    return groups


# ----------------------------------------------------------------------------------------------
# What made a run


@lru_cache(maxsize=1024)
def code(source: bytes) -> tuple[str, ...]:
    """The source's tokens without comments, empty lines and docstrings."""
    try:
        tokens = list(tokenize.tokenize(io.BytesIO(source).readline))
    except (tokenize.TokenError, SyntaxError):  # another Python's: compared byte for byte
        return (source.decode("utf-8", "replace"),)
    layout = (tokenize.COMMENT, tokenize.NL, tokenize.ENCODING)
    tokens = [token for token in tokens if token.type not in layout]
    kept, statement = [], []
    for token in tokens:
        statement.append("indent" if token.type == tokenize.INDENT else token.string)
        if token.type in (tokenize.INDENT, tokenize.DEDENT):
            kept += statement
            statement = []
        elif token.type in (tokenize.NEWLINE, tokenize.ENDMARKER):
            # A string and its line's end: a docstring, which computes nothing.
            only_string = len(statement) == 2 and statement[0][-1:] in "'\""
            kept += [] if only_string else statement
            statement = []
    return tuple(kept)


def same_code(a: bytes | None, b: bytes | None) -> bool:
    """Whether two files compute the same; None: there is no such file."""
    return a == b or None not in (a, b) and code(a) == code(b)


def changed_files(a: RunLog, b: RunLog, folder: str = "") -> list[str]:
    """The sources below a folder that differ. The scripts are compared whatever their names."""
    before, after = ({**log.sources, "": log.script[1]} for log in (a, b))
    for log, sources in ((a, before), (b, after)):
        sources.pop(log.script[0], None)
    differ = [x for x in {**after, **before} if not same_code(before.get(x), after.get(x))]
    return sorted(name or b.script[0] for name in differ if name.startswith(folder))


def experiment(log: RunLog) -> dict[str, object]:
    """What runs that share a mean have in common, by name."""
    files = {**log.sources, "": log.script[1]}
    files.pop(log.script[0], None)
    sources = {name: code(source) for name, source in files.items()}
    made = {name: value for name, value in log.facts.items() if name in MADE_WITH}
    return {
        "sources": sources,
        "settings": log.recipe_settings,
        "steps": log.steps,
        "shards": log.shards,
        "changes of source when resumed": log.source_changes,
        **made,
    }


def differing(a: dict, b: dict) -> str:
    """How two experiments differ, in words."""
    said = []
    for name in dict.fromkeys((*a, *b)):
        before, after = a.get(name), b.get(name)
        if before == after:
            continue
        if name == "sources":
            files = [x for x in {**before, **after} if before.get(x) != after.get(x)]
            said.append(f"sources ({', '.join(shown(file) or 'the script' for file in files)})")
        elif isinstance(before, dict):  # settings, shards
            keys = [x for x in {**before, **after} if before.get(x) != after.get(x)]
            said += [f"{key} {before.get(key)} → {after.get(key)}" for key in keys]
        else:
            said.append(f"{name} {before} → {after}")
    return shown(", ".join(said))


def choose(name: str, argument: str, logs: list[RunLog]) -> Group:
    """The runs of the experiment that most of these logs belong to; single others are set aside.

    Raises InputError if no run is complete, or if no experiment has most of the runs.
    """
    group, seen = Group(name), {}
    found: list[tuple[dict, list[RunLog]]] = []
    for log in logs:
        if log.fault:
            group.aside.append((log, log.fault))
            continue
        figures = (*log.times.items(), *log.validations)  # no two runs share all of them
        if figures in seen:
            group.aside.append((log, f"the same run as {seen[figures]}"))
            continue
        seen[figures] = log.path
        its_own = experiment(log)
        runs = next((runs for known, runs in found if known == its_own), None)
        if runs is None:
            found.append((its_own, runs := []))
        runs.append(log)
    if not found:
        raise InputError(f"{argument}: no complete run among these:\n{group.aside_lines()}")
    found.sort(key=lambda item: -len(item[1]))
    (usual, group.runs), *others = found
    complete = len(group.runs) + sum(len(runs) for _, runs in others)
    if 2 * len(group.runs) <= complete or any(len(runs) > 1 for _, runs in others):
        raise InputError(several_experiments(argument, found))
    for other, runs in others:
        group.aside += [(run, f"unlike the others: {differing(usual, other)}") for run in runs]
    return group


def several_experiments(argument: str, found: list[tuple[dict, list[RunLog]]]) -> str:
    lines = [f"{argument}: runs of {len(found)} experiments, which share no mean:"]
    for i, (other, runs) in enumerate(found):
        what = f": {differing(found[0][0], other)}" if i else ""
        lines.append(f"  {plural(len(runs), 'run')} ({names([x.path for x in runs])}){what}")
    return "\n".join([*lines, "Name the logs of one: a folder, or a glob in quotes."])


def different_machines(runs: list[RunLog]) -> list[str]:
    """How the machines of runs differ, as far as their logs say."""
    found = []
    for name in MACHINE:
        values = dict.fromkeys(run.facts[name] for run in runs if name in run.facts)
        if len(values) > 1:
            text = " and ".join(values)
            found.append(f"{name} {text}" if len(text) < 70 else f"{len(values)} values of {name}")
    return found


def machine_known(runs: list[RunLog]) -> bool:
    """Whether each log holds a fact that tells machines apart; a public log may hold none."""
    return all({"host", "driver", "GPU ids", "CPU"} & {*run.facts} for run in runs)


def plural(count: int, what: str) -> str:
    return f"{count} {what}{'s' * (count != 1)}"


def names(items: list, most: int = NAMED) -> str:
    more = f" and {len(items) - most} more" if len(items) > most else ""
    return ", ".join(shown(item) for item in items[:most]) + more

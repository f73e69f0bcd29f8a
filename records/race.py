"""Two scripts in alternation, A B B A …, with seeds 0, 1, …: so what drifts on a machine meets both alike.

    python records/race.py train_gpt.py ideas/idea.py 10 [--logs FOLDER] [-- --option=value …]

Each run is ./run.sh's; its log is FOLDER/NAME/seed0.txt and so on (logs/race-A-B, named by the scripts). At the end, and with
--compare at once, the two folders are compared pair by pair. Started again, it goes on where it ended: complete runs are
kept, the log of one cut short is kept as seed0.cut1.txt, which compare.py names, and its run made again. It refuses to go on
in a folder of other sources or options, or of another host, or beside logs that are not its own; other files than the two
scripts and what they import may come and change. It ends after a run on other data, by other versions, on other ranks or with
other variables of the environment than those before.
"""

import contextlib
import fcntl
import functools
import hashlib
import itertools
import json
import os
import platform
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent)]  # also where Python leaves it out: PYTHONSAFEPATH

import older  # noqa: F401, first of all
import compare
import tool
from changes import other_tokens, source_pairs
from kinds import differing, kind, same_source
from launch.console import console, end_with_parent, reason, user_path
from launch.sources import Sources, imported_names, stem
from runlog import RunLog, made_with, read_log
from t_tests import MOST_RUNS
from tool import ROOT, clean

RUN = (str(ROOT / "run.sh"),)  # the command that trains
CHECK_ALONE = ("env", "BANKRUN_CHECK_ALONE=1")  # launch/start.py's: no rank
OWN = ("seed", "log_dir", "run_id", "resume")  # options that the race gives
ENDS = (".trace.json", "", ".txt")  # of what a run leaves: its trace, the folder of its checkpoints, its log
GOES_ON = "The same command goes on from there"
ADVICE = {  # by a run's code, where it would end so again
    0: "So would the next: mend the script, and begin anew, with another --logs",
    1: "Mend what it says above, if anything: the same command goes on from there; other sources are a race of another --logs",
    2: "Mend what it says above: then the same command goes on; other options or sources are a race of another --logs",
}
PART_OF_IT = re.compile(r"seed\d+(?:\.cut\d+)?\.txt")


class RaceError(Exception):
    """Why it cannot start or go on; the message says what to do."""


def order(count: int) -> list[tuple[int, int]]:
    """(script, seed) of each run: 0 or 1. A B, B A, A B, …"""
    return [(script, seed) for seed in range(count) for script in ((0, 1) if seed % 2 == 0 else (1, 0))]


def names_of(scripts: list[Path]) -> list[str]:
    """The names of their folders: stems, with a and b before those that are the same."""
    stems = [script.stem for script in scripts]
    return stems if stems[0] != stems[1] else [f"a-{stems[0]}", f"b-{stems[1]}"]


@functools.cache  # what names more has changed, and ends the race
def named_by(script: Path) -> frozenset[Path]:
    """The files that the script's import statements name, and theirs: also in packages below its folder."""
    found = Sources(script)
    with without_own_modules(), contextlib.suppress(ValueError):  # a log could not hold them: the run says so
        found.imported()
    return frozenset(found.named)


@contextlib.contextmanager
def without_own_modules() -> Iterator[None]:
    """This process has imported none of the project for the length of the block: a run may find others of these names."""
    origins = {name: f"{getattr(getattr(module, '__spec__', None), 'origin', None)}" for name, module in sys.modules.items()}
    own = [name for name, file in origins.items() if Path(file).is_relative_to(ROOT) and "site-packages" not in file]
    hidden = {name: sys.modules.pop(name) for name in own}
    try:
        yield
    finally:
        sys.modules.update(hidden)


def sources(scripts: list[Path]) -> dict[str, str]:
    """The digest of each file that a run may import: what import statements name, also those of files that have come since, and
    what starts it. Others that lie beside the scripts, as the next idea, are none."""
    folders = {ROOT, *(script.parent for script in scripts)}
    lie = {path for folder in folders for form in ("*.py", "*/__init__.py") for path in folder.glob(form)}
    files, more = set(), {*scripts, ROOT / "launch" / "start.py"}.union(*map(named_by, scripts))
    while more := {path for path in more if path.is_file()} - files:
        files |= more
        named = set().union(*(imported_names(path.read_text(encoding="utf-8", errors="replace")) for path in more))
        more = {path for path in lie if stem(path) in named}
    return {place(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(files)}


def place(path: Path) -> str:
    """Its path; within the project from there, as that may be renamed, or mounted elsewhere, while its race rests."""
    return str(path.relative_to(ROOT) if path.is_relative_to(ROOT) else path)


def conditions(scripts: list[Path], options: list[str]) -> dict:
    """What all runs of a race share."""
    return {
        "scripts": [place(script) for script in scripts],
        "options": options,
        "host": platform.node(),
        "RANKS": os.environ.get("RANKS", ""),
        "sources": sources(scripts),
    }


def differing_conditions(before: dict, now: dict) -> list[str]:
    """What differs, in words; of sources which."""
    shown = lambda value: clean(value if isinstance(value, str) else " ".join(value), one_line=True) or "none"
    differ = [what if what == "sources" else f"{what} ({shown(before[what])} before, {shown(now[what])} now)"
              for what in now if before[what] != now[what]]  # fmt: skip
    if "sources" in differ:
        old, new = before["sources"], now["sources"]
        told = (name + " (new)" * (name not in old) + " (gone)" * (name not in new)
                for name in sorted({*old, *new}) if old.get(name) != new.get(name))  # fmt: skip
        differ[-1] = f"sources: {', '.join(told)}"
    return differ


def check(folder: Path, names: list[str], now: dict) -> bool:
    """Does the race begin, as there is no log yet? Raises RaceError if the folder holds anything of another race."""
    path, names, differ = folder / "race.json", {*names}, []
    try:
        if path.exists():
            before = json.loads(path.read_text(encoding="utf-8"))
            before["scripts"] = [place(Path(script)) for script in before["scripts"]]
            before["sources"] = {place(Path(name)): digest for name, digest in before["sources"].items()}
            names |= {*names_of([Path(script) for script in before["scripts"]])}
            differ = differing_conditions(before, now)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        raise RaceError(f"{path}: not what a race writes: give another --logs") from None
    logs = [log for name in sorted(names) for log in sorted((folder / name).glob("[!.]*")) if log.suffix in (".txt", ".log")]
    if foreign := [str(log) for log in logs if not PART_OF_IT.fullmatch(log.name) or not path.exists()]:
        raise RaceError(f"{foreign[0]}: not of this race ({len(foreign)} such logs): move it, or give another --logs")
    if differ and logs:  # without one, an option may have been wrong
        raise RaceError(f"{folder}: holds a race of other {'; '.join(differ)}: put them back, or give another --logs")
    return bool(differ) or not path.exists()


def set_cut_aside(log: Path) -> None:
    """Rename what a run that is not complete has left, all of it or nothing: its names are needed. The log goes last, so that a
    race that is killed midway goes on. Raises RaceError if that run goes on."""
    at_once = lambda name, flags: os.open(name, flags | os.O_NONBLOCK)  # whatever a user has there
    path = log.with_suffix(".lock")  # runtime/run.py's
    with contextlib.suppress(FileNotFoundError), open(path, "rb", opener=at_once) as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RaceError(f"{log}: its run is under way in another process: wait for its end") from None
        except OSError:  # a network file system without locks
            pass
    others = (log.with_name(f"{log.stem}.cut{count}.txt") for count in itertools.count(1))
    other = next(x for x in others if not any(os.path.lexists(x.with_suffix(end)) for end in ENDS))
    with contextlib.ExitStack() as undo:
        for end in ENDS:
            if os.path.lexists(path := log.with_suffix(end)):
                path.rename(other.with_suffix(end))
                undo.callback(other.with_suffix(end).rename, path)
        undo.pop_all()


def made_on(log: RunLog) -> dict[str, str]:
    """What runs of two scripts share. What a script reads, as its configuration, is its own."""
    return {name: value for name, value in made_with(log).items() if name != "read by its sources"}


def check_alike(logs: dict[Path, tuple[int, RunLog]]) -> None:
    """Raise RaceError if the last of the complete logs, (script, log) by path, was made otherwise than one before: on other data,
    as where a path is relative, by other versions, on other ranks, or, of one script, with other variables, or of other files."""
    *before, (path, (script, log)) = logs.items()
    for other_path, (other_script, other) in before:
        same = kind if script == other_script else made_on
        tokens = "".join(f"other tokens in {name}" for name in other_tokens(other, log)[:1])
        told, told_before = (run.facts.get("variables", "none") for run in (log, other))  # another tree may tell others
        variables = f"variables: {told_before} → {told}" if script == other_script and told != told_before else ""
        differ = tokens or differing(same(other), same(log)) or variables
        if differ == "sources":
            changed = [name for _, was, name, source in source_pairs(other, log) if not same_source(was, source)]
            differ = f"sources: {', '.join(changed)}"
        if differ:
            fault = f"{path}: made otherwise than {other_path}: {clean(differ, one_line=True)}"
            raise RaceError(f"{fault}: move it and start as before")


def with_this_python() -> dict[str, str]:
    """The environment in which run.sh, which takes the first python3 of the PATH, takes this one; .venv's it finds if need be."""
    python, path = Path(sys.executable), os.environ.get("PATH", os.defpath)
    if python.parents[1] != ROOT / ".venv" and (python.parent / "python3").resolve() == python.resolve():
        path = f"{python.parent}{os.pathsep}{path}"
    return {**os.environ, "PATH": path}


def run_to_its_end(command: list[str]) -> int:
    """Its exit code; 128 + signal if one killed it, or came and it ended well or was killed. Ctrl-C reaches the run by itself,
    which ends after its step; SIGTERM, and SIGHUP as SIGTERM, are handed on, each time; a kill -9 of this process is a SIGTERM."""
    process, received = None, []

    def hand_on(number: int, _: object) -> None:
        received.append(number)
        if number != signal.SIGINT and process:
            process.terminate()

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    for number, handler in before.items():
        if handler != signal.SIG_IGN:  # as after nohup
            signal.signal(number, hand_on)
    try:
        process = subprocess.Popen(command, env=with_this_python(), preexec_fn=end_with_parent)
        for number in [*received]:  # while it started
            process.send_signal(signal.SIGINT if number == signal.SIGINT else signal.SIGTERM)
        code = process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if received and (code <= 0 or code > 128):
        return 128 + received[0]
    return code if code >= 0 else 128 - code


def start(script: Path, name: str, log: Path, options: list[str], check_alone: bool = False) -> RunLog:
    """The script's run, or only what its start checks; its log, without a fault. Raises RaceError, SystemExit after a signal."""
    seed = log.stem.removeprefix("seed")
    own = [f"--seed={seed}", f"--log_dir={log.parent}", f"--run_id={log.stem}"]
    code = run_to_its_end([*CHECK_ALONE * check_alone, *RUN, str(script), *options, *own])
    found = read_log(log) if log.exists() else RunLog(log, fault="it left no log")
    if code - 128 in {*signal.Signals}:
        by = signal.Signals(code - 128).name
        tool.end(f"race.py: {name}, seed {seed}: ended by {by}. {GOES_ON}", code)
    if code or (found.fault and not check_alone):
        why = f"ended with code {code}" if code else f"ended well, but its log: {clean(found.fault, one_line=True)}"
        advice = "Mend what it says above: then the same command begins" if check_alone else ADVICE.get(code, GOES_ON)
        raise RaceError(f"{name}, seed {seed}: {why}. {advice}")
    return found


def race(scripts: list[Path], count: int, folder: Path, options: list[str]) -> None:
    """Make the runs that are not there. Raises RaceError, OSError."""
    names, now = names_of(scripts), conditions(scripts, options)
    begins, made = check(folder, names, now), [folder / name for name in names if not (folder / name).exists()]
    try:
        for name in names:
            (folder / name).mkdir(parents=True, exist_ok=True)
        if begins:
            tool.write(folder / "race.json", json.dumps(now, indent=1))
        make_runs(scripts, count, folder, options, now)
    except (RaceError, OSError):
        if begins:
            undo(folder, names, made)
        raise


def undo(folder: Path, names: list[str], made: list[Path]) -> None:
    """Remove what a race has made that ended before any run left something."""
    if not any((folder / name).is_dir() and any((folder / name).iterdir()) for name in names):
        (folder / "race.json").unlink(missing_ok=True)
        for path in filter(Path.exists, made):
            path.rmdir()
        if made and folder.exists() and not any(folder.iterdir()):
            folder.rmdir()


def make_runs(scripts: list[Path], count: int, folder: Path, options: list[str], now: dict) -> None:
    """now: the conditions as the race begins or goes on. Raises RaceError, OSError."""
    names, logs = names_of(scripts), {}
    for i, (which, seed) in enumerate(order(count), 1):
        log = folder / names[which] / f"seed{seed}.txt"
        if log.exists():
            if not (fault := (found := read_log(log)).fault):
                logs[log] = which, found
                check_alike(logs)
                continue
            console(f"race: {clean(f'{log}: {fault}', one_line=True)}: made again")
        idea = folder / names[1] / "seed0.txt"
        if i == 1 and not idea.exists():  # the baseline's run would be lost: with other sources the race begins anew
            console(f"race: {names[1]}: checked before {names[0]}'s first run")
            set_cut_aside(idea)
            start(scripts[1], names[1], idea, options, check_alone=True)
        set_cut_aside(log)  # also checkpoints without a log, which no run begins beside
        if differ := differing_conditions(now, conditions(scripts, options)):
            fault = f"changed since the race began: {'; '.join(differ)}"
            raise RaceError(f"{fault}: put them back and start again, or give another --logs")
        begun = time.monotonic()
        console(f"race: run {i} of {2 * count}: {names[which]}, seed {seed}")
        logs[log] = which, start(scripts[which], names[which], log, options)
        check_alike(logs)
        console(f"race: {names[which]}, seed {seed}: {time.monotonic() - begun:.0f} s")


def main(argv: list[str] | None = None) -> None:
    """The command line. Raises SystemExit with code 1 after a message for what cannot go on, 2 for wrong options."""
    argv = sys.argv[1:] if argv is None else argv
    own, options = (argv[: argv.index("--")], argv[argv.index("--") + 1 :]) if "--" in argv else (argv, [])
    parser = tool.Parser("race.py", __doc__)
    parser.add_argument("scripts", nargs=2, type=user_path, metavar="SCRIPT", help="the baseline, then the idea")
    parser.add_argument("count", type=int, metavar="N", help="runs of each")
    parser.add_argument("--logs", type=user_path, metavar="FOLDER", help="where to (logs/race-A-B)")
    parser.add_argument("--target", type=tool.above_zero, default=3.28, help="compare.py's: the loss to be below (%(default)s)")
    parser.add_argument("--compare", action="store_true", help="start no run: compare those that are there")
    parser.usage = f"{parser.format_usage().removeprefix('usage: ').rstrip()} [-- --option=value ...]"
    chosen, late = parser.parse_known_args(own)
    if late:
        advice = f"; options of the runs stand after --, as: -- {' '.join(late)}" if late[0].startswith("-") else ""
        parser.error(f"{late[0]}: unknown here{advice}")
    if not 1 <= chosen.count <= MOST_RUNS:
        parser.error(f"N must be from 1 to {MOST_RUNS:,}")
    if {"-h", "--help"} & {*options}:
        parser.error("--help after -- is the script's: ./run.sh --help")
    if given := [name for name in OWN if any(re.match(rf"--{name}(=|$)", option) for option in options)]:
        parser.error(f"--{given[0]} is the race's to give")
    scripts = [Path(os.path.realpath(script)) for script in chosen.scripts]
    if missing := [script for script in scripts if not os.path.isfile(script)]:
        parser.error(f"no such script: {missing[0]}")
    if foreign := [script for script in scripts if script.suffix != ".py"]:
        parser.error(f"{foreign[0]}: no script: must end in .py")
    names = names_of(scripts)
    folder = Path(chosen.logs or ROOT / "logs" / f"race-{names[0]}-{names[1]}")
    try:
        if not chosen.compare:
            new = [name for name in names if not os.path.isdir(folder / name)]
            if new and (fault := tool.place_fault(folder)):
                raise RaceError(f"{fault}: give another --logs")
            folder.mkdir(parents=True, exist_ok=True)  # not behind a link to a disk that is not mounted
        folder = Path(os.path.realpath(folder))
        folders = [folder / name for name in names]
        if not chosen.compare:
            with contextlib.ExitStack() as inside:
                try:
                    inside.enter_context(tool.alone(folder, wait=False))
                except BlockingIOError:
                    raise RaceError(f"another race is at work in {folder}: wait, or give another --logs") from None
                race(scripts, chosen.count, folder, options)
    except BrokenPipeError:  # for tool.run
        raise
    except (FileExistsError, NotADirectoryError) as error:
        raise SystemExit(f"race.py: error: {reason(error)}: give another --logs") from None
    except (RaceError, OSError) as error:
        raise SystemExit(f"race.py: error: {error}") from None
    several = min(len([*x.glob("seed*.txt")]) for x in folders) > 1  # perhaps of an earlier race of more runs
    compare.main([*map(str, folders), f"--target={chosen.target}", *["--pairs"] * (several or chosen.compare)])


if __name__ == "__main__":
    tool.run(main)

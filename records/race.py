"""Two scripts in alternation, A B, B A, …, with seeds 0, 1, …, so that a drift meets both.

./run.sh records/race.py train_gpt.py ideas/idea.py 10 [--logs FOLDER] [-- --option=value …]

The logs are FOLDER/NAME/seed0.txt and so on (logs/race-A-B, named by the scripts). At the end
they are compared pair by pair. Started again, the race resumes where it ended; the log of a run
that was cut short is kept as seed0.cut1.txt, which compare.py names, and the run is repeated.
Both scripts share the compile caches of PyTorch and Triton, so only the first run compiles.
"""

import argparse
import itertools
import shlex
import signal
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import compare
from groups import differing, experiment
from runlog import RunLog, read_log, shown

ROOT = Path(__file__).resolve().parent.parent
LAUNCH = [sys.executable, str(ROOT / "runtime/launch.py")]
OWN = ("seed", "log_dir", "run_id", "resume")  # options that the race sets
NEW_RACE = "start a new race with another --logs"


class RaceError(Exception):
    """Why the race stops; the message says what to do."""


def order(count: int) -> list[tuple[int, int]]:
    """(script, seed) of each run: A B, B A, A B, …"""
    turns = [(0, 1) if seed % 2 == 0 else (1, 0) for seed in range(count)]
    return [(script, seed) for seed, turn in enumerate(turns) for script in turn]


def names_of(scripts: list[Path]) -> list[str]:
    """The names of their folders."""
    stems = [script.stem for script in scripts]
    return stems if stems[0] != stems[1] else [f"a-{stems[0]}", f"b-{stems[1]}"]


def train(command: list[str]) -> int:
    """The run's exit code. Ctrl-C reaches it by itself; SIGTERM is passed on."""
    with subprocess.Popen(command) as process:
        handlers = {signal.SIGINT: lambda *_: None, signal.SIGTERM: lambda *_: process.terminate()}
        before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
        code = process.wait()
        for number, handler in before.items():
            signal.signal(number, handler)
    return code


def set_aside(log: Path) -> None:
    """Rename the log of a run that was cut short, and its checkpoints."""
    cuts = (f"{log.stem}.cut{count}" for count in itertools.count(1))
    stem = next(x for x in cuts if not log.with_name(f"{x}.txt").exists())
    log.rename(log.with_name(f"{stem}.txt"))
    if log.with_suffix("").is_dir():
        log.with_suffix("").rename(log.with_name(stem))


def check_alike(log: RunLog, first: RunLog) -> None:
    """Raise RaceError if two runs of one script differ in sources, settings or data."""
    differ = differing(experiment(first), experiment(log))
    if differ:
        what = f"{log.path} differs from {first.path}: {differ}"
        raise RaceError(f"{what}: {NEW_RACE}, or move this log away")


def check_options(folder: Path, options: list[str]) -> None:
    """Raise RaceError if the runs in the folder were made with other options."""
    note = folder / "options.txt"
    given = shlex.join(options) + "\n"
    if note.exists() and note.read_text() != given:
        made = note.read_text().strip() or "none"
        raise RaceError(f"{folder}: its runs have other options ({made}): give another --logs")
    folder.mkdir(parents=True, exist_ok=True)
    note.write_text(given)


def race(scripts: list[Path], count: int, folder: Path, options: list[str]) -> None:
    """Make the runs that are missing. Raises RaceError."""
    names = names_of(scripts)
    sources = [script.read_bytes() for script in scripts]  # an edit from now on ends the race
    check_options(folder, options)
    firsts: dict[int, RunLog] = {}
    for i, (which, seed) in enumerate(order(count), 1):
        path = folder / names[which] / f"seed{seed}.txt"
        log = read_log(path) if path.exists() else None
        if log and not log.fault and log.script[1] != sources[which]:
            what = f"{path} is from another version of {scripts[which].name}"
            raise RaceError(f"{what}: {NEW_RACE}, or move that folder away")
        if log and log.fault:
            print(f"race: {shown(f'{path}: {log.fault}')}: run again", flush=True)
            set_aside(path)
        if not log or log.fault:
            if scripts[which].read_bytes() != sources[which]:
                raise RaceError(f"{scripts[which]} has changed since the race began: {NEW_RACE}")
            print(f"race: run {i} of {2 * count}: {names[which]}, seed {seed}", flush=True)
            own = [f"--seed={seed}", f"--log_dir={path.parent}", f"--run_id={path.stem}"]
            code = train([*LAUNCH, str(scripts[which]), *options, *own])
            if code:
                raise SystemExit(code if code > 0 else 128 - code)  # the run has printed why
            log = read_log(path)
        if log.fault:
            raise RaceError(f"{path}: {log.fault}, though its run ended with code 0")
        check_alike(log, firsts.setdefault(which, log))


def main(argv: list[str] | None = None) -> None:
    """Raises SystemExit with a message, or with the exit code of a run that failed."""
    argv = sys.argv[1:] if argv is None else argv
    split = argv.index("--") if "--" in argv else len(argv)
    options = argv[split + 1 :]
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    parser.add_argument("scripts", nargs=2, type=Path, metavar="SCRIPT", help="baseline, idea")
    parser.add_argument("count", type=int, metavar="N", help="runs of each")
    parser.add_argument("--logs", type=Path, metavar="FOLDER", help="where to (logs/race-A-B)")
    parser.add_argument("--target", type=float, help="compare.py's")
    chosen = parser.parse_args(argv[:split])
    given = [name for name in OWN if any(x.split("=")[0] == f"--{name}" for x in options)]
    if given:
        parser.error(f"--{given[0]}: the race sets it")
    scripts = [script.resolve() for script in chosen.scripts]
    if missing := [script for script in scripts if not script.is_file()]:
        parser.error(f"no such script: {missing[0]}")
    names = names_of(scripts)
    folder = (chosen.logs or ROOT / "logs" / f"race-{names[0]}-{names[1]}").resolve()
    try:
        race(scripts, chosen.count, folder, options)
    except RaceError as error:
        raise SystemExit(f"race.py: error: {shown(error)}") from None
    pairs = ["--pairs"] if chosen.count > 1 else []
    target = [f"--target={chosen.target}"] if chosen.target else []
    compare.main([*(str(folder / name) for name in names), *target, *pairs])


if __name__ == "__main__":
    main()

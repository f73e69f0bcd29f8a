"""Two scripts in alternation, A B, B A, …, with seeds 0, 1, …, so that a drift meets both.

./run.sh records/race.py train_gpt.py ideas/idea.py 10 [--logs FOLDER] [-- --option=value …]
./run.sh records/race.py train_gpt.py ideas/idea.py --max_pairs=12 [-- --option=value …]

The logs are FOLDER/NAME/seed0.txt and so on (logs/race-A-B, named by the scripts). At the end
they are compared pair by pair. Started again, the race resumes where it ended; the log of a run
that was cut short is kept as seed0.cut1.txt, which compare.py names, and the run is repeated.
Both scripts share the compile caches of PyTorch and Triton, so only the first run compiles.

With --max_pairs the race ends once it has a verdict, or no chance of one; its folder's name ends
in the CRC-32 of the idea. Exit codes: 0 keep, 10 discard, 11 undecided. More: docs/loop.md.
"""

import argparse
import ctypes
import fcntl
import itertools
import shlex
import signal
import subprocess
import sys
import time
import zlib
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import compare
import t_tests
from equal_loss import ending
from groups import Group, differing, experiment
from runlog import RunLog, read_log, shown
from runtime.launch import SIGNALS
from t_tests import DISCARD, KEEP, OPEN, UNDECIDED, mean
from verdict import differences, figure

# Whether a seed's losses correlate, so that looks test their differences; else Welch's test. A
# race's own losses must not choose. The demo's do, by 0.96: records/2026-11-29_Larger_batches.
LOSSES_PAIR = True

ROOT = Path(__file__).resolve().parent.parent
LAUNCH = [sys.executable, str(ROOT / "runtime/launch.py")]
OWN = ("seed", "log_dir", "run_id", "resume")  # options that the race sets
NEW_RACE = "start a new race with another --logs"
LIBC = ctypes.CDLL(None)  # loaded here, as a process just forked should load nothing
JUDGED = {"loss": "{:+.5f}", "equal_loss": "{:+.3f} s"}  # by --at: the format of a difference
MEANS = {"val_loss": ".5f", "val_bpb": ".5f", "train_seconds": ".3f", "peak_memory_MiB": ".0f"}
HEADER = "\t".join(["date", "crc32", *MEANS, "verdict", "note"]).encode() + b"\n"
VERDICTS = {KEEP: "keep", DISCARD: "discard", UNDECIDED: "undecided", OPEN: "no verdict yet"}


class RaceError(Exception):
    """Why the race stops; the message says what to do."""


def names_of(scripts: list[Path]) -> list[str]:
    """The names of their folders."""
    stems = [script.stem for script in scripts]
    return stems if stems[0] != stems[1] else [f"a-{stems[0]}", f"b-{stems[1]}"]


def end_with_race() -> None:
    """In the run's process: the kernel sends it SIGTERM if the race is killed. On Linux only."""
    if sys.platform == "linux":
        LIBC.prctl(1, signal.SIGTERM)  # 1: PR_SET_PDEATHSIG


def train(command: list[str]) -> int:
    """The run's exit code. A signal is passed on; after it the code is 128 + its number."""
    received, before = [], {}

    def pass_on(number: int, _: object) -> None:
        received.append(number)
        process.send_signal(number)

    with subprocess.Popen(command, preexec_fn=end_with_race) as process:
        for number in SIGNALS:
            if signal.getsignal(number) != signal.SIG_IGN:  # as by nohup
                before[number] = signal.signal(number, pass_on)
        code = process.wait()
        for number, handler in before.items():
            signal.signal(number, handler)
    return 128 + received[0] if received else code


def in_training(log: Path) -> bool:
    """Whether a run that is writing this log holds its lock (runtime/run.py)."""
    try:
        with open(log.with_suffix(".lock"), "rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return isinstance(error, BlockingIOError)  # else there is no lock
    return False


def set_aside(log: Path) -> None:
    """Rename the log of a run that was cut short, and its checkpoints."""
    cuts = (f"{log.stem}.cut{count}" for count in itertools.count(1))
    stem = next(x for x in cuts if not log.with_name(f"{x}.txt").exists())
    log.rename(log.with_name(f"{stem}.txt"))
    if log.with_suffix("").is_dir():
        log.with_suffix("").rename(log.with_name(stem))


def check_options(folder: Path, options: list[str]) -> None:
    """Raise RaceError if the runs in the folder were made with other options."""
    note = folder / "options.txt"
    given = f"{shlex.join(options)}\n".encode("utf-8", "surrogateescape")
    if note.exists() and note.read_bytes() != given:
        made = note.read_text("utf-8", "replace").strip() or "none"
        raise RaceError(f"{folder}: its runs have other options ({made}): give another --logs")
    folder.mkdir(parents=True, exist_ok=True)
    note.write_bytes(given)


def race(scripts: list[Path], count: int, folder: Path, options: list[str]) -> Iterator:
    """Make the runs that are missing; after each pair both groups so far. Raises RaceError."""
    groups = [Group(name) for name in names_of(scripts)]
    sources = [script.read_bytes() for script in scripts]  # an edit from now on ends the race
    for i in range(2 * count):
        seed, which = i // 2, (i + i // 2) % 2  # A B, B A, A B, …
        name, runs = groups[which].name, groups[which].runs
        path = folder / name / f"seed{seed}.txt"
        log = read_log(path) if path.exists() else None
        if log and not log.fault and log.script[1] != sources[which]:
            what = f"{path} is from another version of {scripts[which].name}"
            raise RaceError(f"{what}: {NEW_RACE}, or move that folder away")
        if not log or log.fault:
            if in_training(path):
                raise RaceError(f"{path}: this run is training now, started by another race")
            if log:
                print(f"race: {shown(f'{path}: {log.fault}')}: run again", flush=True)
                set_aside(path)
            if scripts[which].read_bytes() != sources[which]:
                raise RaceError(f"{scripts[which]} has changed since the race began: {NEW_RACE}")
            print(f"race: run {i + 1} of {2 * count}: {name}, seed {seed}", flush=True)
            own = [f"--seed={seed}", f"--log_dir={path.parent}", f"--run_id={path.stem}"]
            code = train([*LAUNCH, str(scripts[which]), *options, *own])
            if code:
                raise SystemExit(code if code > 0 else 128 - code)  # the run has printed why
            log = read_log(path)
        if log.fault:
            raise RaceError(f"{path}: {log.fault}, though its run ended with code 0")
        runs.append(log)
        if differ := differing(experiment(runs[0]), experiment(log)):
            what = f"{path} differs from {runs[0].path}: {differ}"
            raise RaceError(f"{what}: {NEW_RACE}, or move this log away")
        if i % 2:
            yield groups


def judge(pairs: Iterator, plan: dict[int, float], at: str) -> tuple[int, str, list[RunLog]]:
    """The verdict's exit code, the line with its figures, and the idea's runs."""
    for a, b in pairs:
        n = len(b.runs)
        if at != "loss" and None in map(ending, a.runs + b.runs):
            raise RaceError("--at=equal_loss: no validation shortly before the end: --val_every")
        if n not in plan:
            continue
        row = differences(a, b, LOSSES_PAIR or at != "loss")
        found = row["loss" if at == "loss" else "equal"]
        found = t_tests.with_error(*found[:3], 1 - plan[n])
        code = int(t_tests.decide(found, n, plan))
        size, low, high = map(JUDGED[at].format, (found.mean, found.low, found.high))
        seconds = sum(x.figures.get("total_seconds", x.seconds) for x in a.runs + b.runs)
        line = (
            f"{VERDICTS[code]}, {at} {size}, {1 - plan[n]:.1%} interval {low} to {high}, "
            f"p = {found.p:.3g} at level {plan[n]:g}, {n} of {max(plan)} pairs, {seconds:.0f} s"
        )
        if code != OPEN:
            break
        print(f"race: {line}", flush=True)
    return code, shown("; but: ".join([line, *row["cautions"]])), b.runs


def result(runs: list[RunLog], code: int, note: str) -> bytes:
    """A row for the table of results: the means of runs, empty where their logs have no figure."""
    crc = f"{zlib.crc32(runs[0].script[1]):08x}"
    logged = [x.figures | {"val_loss": x.loss, "train_seconds": x.seconds} for x in runs]
    means = {name: mean([x[name] for x in logged if name in x]) for name in MEANS}
    figures = [figure(means[name], form) for name, form in MEANS.items()]
    row = [time.strftime("%F"), crc, *figures, VERDICTS[code], shown(note).replace("\t", " ")]
    return "\t".join(row).encode() + b"\n"


def add_result(path: Path, row: bytes = b"") -> None:
    """Append a row to the table of results; a new one gets its header. Raises RaceError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "a+b") as table:
            fcntl.flock(table, fcntl.LOCK_EX)
            table.seek(0)
            found = table.readline()
            if found not in (b"", HEADER):
                raise RaceError(f"--results={path}: not a table with the columns of race.py")
            table.write(row if found else HEADER + row)
    except OSError as error:
        raise RaceError(f"--results={path}: {error.strerror}") from None


def main(argv: list[str] | None = None) -> None:
    """Raises SystemExit with a message, or with the code of a run that failed or of the verdict."""
    argv = sys.argv[1:] if argv is None else argv
    split = argv.index("--") if "--" in argv else len(argv)
    options = argv[split + 1 :]
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    add = parser.add_argument
    add("scripts", nargs=2, type=Path, metavar="SCRIPT", help="baseline, idea")
    add("count", type=int, nargs="?", metavar="N", help="runs of each")
    add("--max_pairs", type=int, metavar="N", help="instead of N: until a verdict, N pairs at most")
    add("--at", choices=JUDGED, default="loss", help="what is judged")
    add("--results", type=Path, default=ROOT / "ideas/results.tsv", help="gets the verdict's row")
    add("--note", default="", metavar="TEXT", help="the last column of that row")
    add("--logs", type=Path, metavar="FOLDER", help="where to (logs/race-A-B)")
    add("--target", type=float, help="compare.py's")
    chosen = parser.parse_args(argv[:split])
    given = [name for name in OWN if any(x.split("=")[0] == f"--{name}" for x in options)]
    if given:
        parser.error(f"--{given[0]}: the race sets it")
    if (chosen.count is None) == (chosen.max_pairs is None):
        parser.error("how many runs? Give N or --max_pairs=N")
    scripts = [script.resolve() for script in chosen.scripts]
    if missing := [script for script in scripts if not script.is_file()]:
        parser.error(f"no such script: {missing[0]}")
    names = names_of(scripts)
    folder, own = f"race-{names[0]}-{names[1]}", []
    if chosen.max_pairs is not None:  # each version of the idea has its own race, and looks
        folder += f"-{zlib.crc32(scripts[1].read_bytes()):08x}"
        own = [f"--max_pairs={chosen.max_pairs}", f"--at={chosen.at}", "--"]
    folder = (chosen.logs or ROOT / "logs" / folder).resolve()
    count = chosen.max_pairs if own else chosen.count
    try:
        if count < 1 + bool(own):
            raise RaceError(f"{count} is too few: N from 1, --max_pairs from 2")
        if own:
            add_result(chosen.results)  # not a table: said before the first run
        check_options(folder, [*own, *options])
        pairs = race(scripts, count, folder, options)
        if own:
            code, line, runs = judge(pairs, t_tests.looks(count), chosen.at)
            print(f"verdict: {line}", flush=True)
            add_result(chosen.results, result(runs, code, chosen.note))
            raise SystemExit(code)
        for _ in pairs:
            pass
    except RaceError as error:
        raise SystemExit(f"race.py: error: {shown(error)}") from None
    pairs = ["--pairs"] if count > 1 else []
    target = [f"--target={chosen.target}"] if chosen.target else []
    compare.main([*(str(folder / name) for name in names), *target, *pairs])


if __name__ == "__main__":
    main()

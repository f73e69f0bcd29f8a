"""Does a script resume to the same bits? A short run, resumed in its middle, and that one after its next step once more.

    python bench/resumes.py                                   # train_gpt.py, 8 steps of the demo on the CPU
    python bench/resumes.py ideas/idea.py --steps=40          # an idea whose state changes late
    python bench/resumes.py ideas/idea.py -- --block_size=64  # options of the runs

Compared are the state in the last checkpoint, to the bit, and the validation losses. Of two steps in a row one is odd, and what
comes round every third, say, is where it began after one of them at most. Exit code 1 if they differ, as where a script keeps
state that no checkpoint holds, or if a run fails. On a GPU nothing could be told: there no run repeats itself to the bit.
"""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from launch.environment import go_on

if __name__ == "__main__":
    go_on("requirements.txt", "torch", "numpy")

from data.shards import number_between
from launch.console import Parser, console, ended_by_signals, printable, run_to_end, until_reader_leaves

RUN = [str(ROOT / "run.sh")]  # the command that trains
OWN = ("num_scheduled_iterations", "num_extension_iterations", "save_every", "keep_checkpoints", "log_dir", "run_id", "resume")
SMALL = {"val_every": 2, "val_tokens": 32768, "sample_tokens": 0}  # unless told otherwise
EXTENSION = 2  # steps
SAID = 12  # last lines of a run that failed


class Failed(Exception):
    """Why nothing can be compared."""


def train(script: str, options: list[str], **own: object) -> list[str]:
    """One run, on the CPU: what it cautions of. Raises Failed."""
    command = [*RUN, script, *options, *(f"--{name}={value}" for name, value in own.items())]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    environ = {**os.environ, "PATH": path, "CUDA_VISIBLE_DEVICES": ""}
    done = run_to_end(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    lines = [printable(line) for line in done.stdout.splitlines()]
    if done.returncode:
        raise Failed("\n".join([*lines[-SAID:], f"the run ended with code {done.returncode}"]))
    return [line for line in lines if "caution: " in line]


def end_of(folder: Path, steps: int) -> tuple[dict, list[str]]:
    """The state in the last checkpoint of the run whose log this folder holds, and its validation losses. Raises Failed."""
    from runtime.checkpoints import read_checkpoint
    from runtime.log import RULE

    logs = [*folder.glob("*.txt")]
    if len(logs) != 1:
        raise Failed(f"the run has written {'several logs' if logs else 'no log: does it train?'}")
    log, path = logs[0], logs[0].with_suffix("") / f"step_{steps:06}.pt"
    if not path.exists():
        raise Failed(f"the run has not written {path.name}: does the script save?")
    lines = log.read_text(encoding="utf-8").rpartition(RULE)[2]
    return read_checkpoint(path)["state"], re.findall(r"^step:(\d+/\d+ val_loss:\S+)", lines, re.MULTILINE)


def resumes(script: str, steps: int, options: list[str], scratch: Path) -> bool:
    """Make the runs and say what comes of them. Raises Failed."""
    from bench.settings import unequal
    from launch.nests import leaves

    middle, folder, same = steps // 2, scratch / "whole", True
    own = dict(num_scheduled_iterations=steps - EXTENSION, num_extension_iterations=EXTENSION, keep_checkpoints=4)
    for line in train(script, options, **own, save_every=middle, log_dir=folder, run_id="run"):
        console(line)
    whole, losses = end_of(folder, steps)
    entries = len(dict(leaves(whole)))
    for step in (middle, middle + 1):
        path, folder = folder / "run" / f"step_{step:06}.pt", scratch / f"from {step}"
        train(script, options, **own, save_every=step + 1, log_dir=folder, resume=path)
        found, found_losses = end_of(folder, steps)
        differ, others = unequal(whole, found), [f"{a} → {b}" for a, b in zip(losses, found_losses) if a != b]
        if differ or losses != found_losses:
            same = False
            counted = f"{len(differ)} of {entries} entries of the state differ at the end"
            console(printable("; ".join([f"resumed after step {step}: {counted}", *differ[:1], *others[-1:]])))
    if same:
        how = f"{steps} steps, resumed after {middle} and {middle + 1}"
        console(printable(f"{script}: {how}: the same bits, {entries} entries and {len(losses)} validation losses"))
    else:
        console(printable(f"{script} keeps what no checkpoint holds, or is another run each time: docs/reliability.md, Checkpoints"))
    return same


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    given, options = (argv[: argv.index("--")], argv[argv.index("--") + 1 :]) if "--" in argv else (argv, [])
    parser = Parser(description="Does a script resume to the same bits?")
    parser.add_argument("script", nargs="?", default="train_gpt.py", help="as ./run.sh takes it (%(default)s)")
    parser.add_argument("--steps", type=number_between(4, 10**6), default=8, help="of the whole run (%(default)s)")
    parser.usage = f"{parser.format_usage().removeprefix('usage: ').rstrip()} [-- --option=value ...]"
    args = parser.parse_args(given)
    if not args.script.endswith(".py"):
        parser.error(f"{args.script}: no training script, such as train_gpt.py")
    names = [option.removeprefix("--").partition("=")[0] for option in options]
    if taken := [name for name in names if name in OWN]:
        parser.error(f"--{taken[0]} is given by this tool: --steps says how many there are")
    options = [*options, *(f"--{name}={value}" for name, value in SMALL.items() if name not in names)]
    try:
        with tempfile.TemporaryDirectory(prefix="bankrun-resumes-") as folder:
            return 0 if resumes(args.script, args.steps, options, Path(folder)) else 1
    except (Failed, OSError) as error:
        print(f"resumes.py: error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    with ended_by_signals(), until_reader_leaves():
        sys.exit(main())

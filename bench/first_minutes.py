"""Where a newcomer's minutes go: from a clone of this repository to the demo's first step and its sample, as a table.

    python bench/first_minutes.py                    # the environment that is active
    python bench/first_minutes.py --fresh            # .venv is made and filled, from the network
    python bench/first_minutes.py --steps=392        # the whole demo; else 6 steps

Clones what is committed into a temporary folder and starts ./run.sh there, on two ranks. The seconds are those between the
lines that a user sees; "joining" is from the start of the ranks to their log: their imports, the group, the checks of all.
"""

import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from launch.environment import go_on

if __name__ == "__main__":
    go_on("requirements.txt", "torch", "numpy")

from data.shards import number_between
from launch.console import Parser, ended_by_signals, ended_with_block, run_to_end, until_reader_leaves

PHASES = (  # what a line ends, by its beginning
    ("environment, import", r"environment: "),
    ("data", r"data: ready"),
    ("check", r"settings, data and room are checked"),
    ("joining", r"warm-up: "),
    ("warm-up", r"[\d,]+ parameters, "),
    ("first validation", r"step:0/\d+ val_loss"),
    ("first step", r"step:1/"),
    ("the other steps", r"step:(\d+)/\1 val_loss"),
    ("sample", r"sample, after"),
)


def phases(lines: list[tuple[float, str]]) -> list[tuple[str, float]]:
    """(phase, seconds) of a run's lines, each with the seconds since its start: a phase ends with its kind's first line."""
    found, before, rest = [], 0.0, iter(lines)
    for name, pattern in PHASES:
        at = next((at for at, line in rest if re.match(pattern, line)), None)
        if at is None:
            raise SystemExit(f"first_minutes.py: error: the run has no line like {pattern!r}")
        found.append((name, at - before))
        before = at
    return found


def run(folder: Path, steps: int, environment: dict[str, str]) -> list[tuple[float, str]]:
    begun, lines = time.monotonic(), []
    command = [f"{folder / 'run.sh'}", f"--num_scheduled_iterations={steps}", "--num_extension_iterations=0"]
    with ended_with_block(command, env=environment, stdout=subprocess.PIPE, text=True, errors="replace") as process:
        lines += [(time.monotonic() - begun, line) for line in process.stdout]
        process.communicate()
    if process.returncode:
        raise SystemExit(f"first_minutes.py: error: the run ended with code {process.returncode}")
    return lines


def main(argv: list[str] | None = None) -> None:
    parser = Parser(description="Where a newcomer's minutes go.")
    parser.add_argument("--steps", type=number_between(1, 10**6), default=6, help="of the demo (6)")
    parser.add_argument("--fresh", action="store_true", help="make and fill .venv, too")
    args = parser.parse_args(argv)
    active = f"{Path(sys.executable).parent}{os.pathsep}"
    path = os.environ["PATH"] if args.fresh else active + os.environ["PATH"]
    with tempfile.TemporaryDirectory() as folder:
        own = {name: text for name, text in os.environ.items() if not name.startswith("GIT_")}  # a hook's mean the user's index
        begun = time.monotonic()
        if run_to_end(["git", "clone", "--quiet", f"{ROOT}", f"{folder}/bankrun"], env=own).returncode:
            raise SystemExit(f"first_minutes.py: error: git cannot clone {ROOT}: clone the project, this measures what a clone does")
        rows = [("clone", time.monotonic() - begun)]
        rows += phases(run(Path(folder, "bankrun"), args.steps, {**own, "PATH": path, "RANKS": "2"}))
    print("| phase | s |\n|---|---|")
    for name, seconds in [*rows, ("in all", sum(seconds for _, seconds in rows))]:
        print(f"| {name} | {seconds:.1f} |")


if __name__ == "__main__":
    with ended_by_signals(), until_reader_leaves():
        main()

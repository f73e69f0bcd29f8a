"""Does a script resume to the same bits? A short run on the CPU, resumed in its middle, and again.

    ./run.sh bench/resumes.py                                   # train_gpt.py, 8 steps of the demo
    ./run.sh bench/resumes.py ideas/idea.py --steps=40          # an idea whose state changes late
    ./run.sh bench/resumes.py ideas/idea.py --block_size=64     # options of the runs

Compared are the state in the last checkpoint, to the bit, and the validation losses. The second
resume begins a step later than the first, so that one of the two is after an odd step. Exit code 1
if they differ, as where a script keeps state that no checkpoint holds. Not for a GPU, where no run
repeats itself to the bit.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from runtime.checkpoints import read_checkpoint
from runtime.sources import RULE

import torch

EXTENSION = 2  # steps


def train(script: str, options: list[str], folder: Path, steps: int, **own: Any) -> dict[str, Any]:
    """Of one run: every entry of the state in its last checkpoint, and its validation losses."""
    own |= dict(num_scheduled_iterations=steps - EXTENSION, num_extension_iterations=EXTENSION)
    own |= dict(keep_checkpoints=4, log_dir=folder, run_id="run")
    command = [sys.executable, str(ROOT / "runtime/launch.py"), script, *options]
    command += [f"--{name}={value}" for name, value in own.items()]
    environ = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    output = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    done = subprocess.run(command, env=environ, **output)
    if done.returncode:
        tail = "\n".join(done.stdout.splitlines()[-12:])
        sys.exit(f"{tail}\nresumes.py: the run ended with code {done.returncode}")
    log = (folder / "run.txt").read_text(encoding="utf-8").rpartition(RULE)[2]
    losses = re.findall(r"^(step:\d+/\d+ val_loss):(\S+)", log, re.MULTILINE)
    checkpoint = read_checkpoint(folder / "run" / f"step_{steps:06}.pt")
    return leaves(checkpoint["state"]) | dict(losses)


def leaves(nest: Any, name: str = "") -> dict[str, Any]:
    """The entries of a nest of dicts, lists and tuples, by their dotted names."""
    if isinstance(nest, (list, tuple)):
        nest = dict(enumerate(nest))
    if not isinstance(nest, dict):
        return {name: nest}
    found = {}
    for key, value in nest.items():
        found |= leaves(value, f"{name}.{key}" if name else f"{key}")
    return found


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """NaN equals itself, -0 is not 0."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(*(x.detach().contiguous().view(-1).view(torch.uint8) for x in (a, b)))


def is_same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return same_bits(a, b)
    return type(a) is type(b) and a == b


def main(argv: list[str] | None = None) -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw, allow_abbrev=False)
    parser.add_argument("script", nargs="?", default=str(ROOT / "train_gpt.py"))
    parser.add_argument("--steps", type=int, default=8, help="of the whole run (%(default)s)")
    args, given = parser.parse_known_args(argv)
    options = ["--val_every=2", "--val_tokens=32768", "--sample_tokens=0", *given]
    middle, same = args.steps // 2, True
    with tempfile.TemporaryDirectory(prefix="bankrun-resumes-") as scratch:
        folder = Path(scratch, "0")
        whole = train(args.script, options, folder, args.steps, save_every=middle)
        for step in (middle, middle + 1):
            own = dict(save_every=step + 1, resume=folder / "run" / f"step_{step:06}.pt")
            folder = Path(scratch, f"{step}")
            found = train(args.script, options, folder, args.steps, **own)
            differ = sorted(whole.keys() ^ found.keys())
            differ += [x for x in whole if x in found and not is_same(whole[x], found[x])]
            if differ:
                same = False
                count = f"{len(differ)} of {len(whole)} entries differ at the end"
                print(f"resumed after step {step}: {count}: {', '.join(differ[:3])}, …")
    if same:
        how = f"{args.steps} steps, resumed after {middle} and {middle + 1}"
        print(f"{args.script}: {how}: the same bits, {len(whole)} entries", flush=True)
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())

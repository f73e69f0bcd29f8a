"""nanoGPT's CPU command and the demo on one text: time to nanoGPT's validation loss, on two cores.

    python records/2026-11-29_Beside_nanoGPT/race.py NANOGPT STEPS [SEED …]

NANOGPT is a checkout of github.com/karpathy/nanoGPT, with the packages that it needs. Its data,
characters of Shakespeare, come from its own data/shakespeare_char/prepare.py. Choose STEPS on
another seed than those that count. Run nothing else meanwhile: nanoGPT's threads wait in a loop,
so that any other load slows it more than the demo. Logs: logs/beside_nanogpt/STEPS_steps, a new folder.
"""

import random
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from data.shards import write_shard

# Its README's "I only have a macbook", evaluated at the start and the end alone.
NANOGPT = """train.py config/train_shakespeare_char.py --device=cpu --compile=False --eval_iters=20
    --log_interval=1 --block_size=64 --batch_size=12 --n_layer=4 --n_head=4 --n_embd=128
    --max_iters=2000 --lr_decay_iters=2000 --dropout=0.0 --eval_interval=2000""".split()
OURS = """--val_every=0 --val_tokens=98304 --sample_tokens=0 --num_extension_iterations=8
    --adam_lr_scale=4""".split()


def timed(command: list[object], folder: Path) -> tuple[float, str]:
    """Seconds of a command, and what it printed."""
    started = time.perf_counter()
    done = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, text=True, check=True)
    return time.perf_counter() - started, done.stdout


def documents(text: bytes, limit: int) -> list[bytes]:
    """Whole paragraphs, as many as fit into so many bytes, at least one."""
    found = [b""]
    for paragraph in text.split(b"\n\n"):
        if found[-1] and len(found[-1]) + len(paragraph) + 2 > limit:
            found.append(b"")
        found[-1] += paragraph + b"\n\n"
    return found


def shards(text: bytes, folder: Path) -> None:
    """nanoGPT's split of the text: its first nine tenths are trained on."""
    split = int(0.9 * len(text))
    train = documents(text[:split], 380)
    random.Random(0).shuffle(train)
    for side, own in (("train", train), ("val", documents(text[split:], 2000))):
        tokens = [np.array([256, *document], np.uint16) for document in own]
        write_shard(folder / f"text_{side}_000000.bin", np.concatenate(tokens))


def main() -> None:
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    nanogpt, steps, *seeds = sys.argv[1:]
    nanogpt = Path(nanogpt).resolve()
    text = nanogpt / "data/shakespeare_char"
    logs = ROOT / f"logs/beside_nanogpt/{steps}_steps"
    logs.mkdir(parents=True)
    timed([sys.executable, "prepare.py"], text)
    their_wall, said = timed([sys.executable, *NANOGPT], nanogpt)
    (logs / "nanogpt.out").write_text(said)
    target = float(re.findall(r"val loss ([\d.]+)", said)[-1])
    _, *ms, _ = re.findall(r"^iter \d+: .*time ([\d.]+)ms", said, re.M)  # first and last evaluate
    theirs = sum(map(float, ms)) / 1000
    print(
        f"nanoGPT: loss {target}, {theirs:.1f} s of training, {their_wall:.1f} s in all", flush=True
    )
    with tempfile.TemporaryDirectory() as data:
        shards((text / "input.txt").read_bytes(), Path(data))
        for seed in seeds or "012":
            own = (f"--data={data}", f"--num_scheduled_iterations={steps}", f"--seed={seed}")
            own += (f"--log_dir={logs.relative_to(ROOT)}", f"--run_id=seed{seed}")
            wall, said = timed([ROOT / "run.sh", *OURS, *own], ROOT)
            figures = dict(re.findall(r"^(\w+): ([\d.]+)$", said.rpartition("\n---\n")[2], re.M))
            loss, seconds = float(figures["val_loss"]), float(figures["train_seconds"])
            print(
                f"seed {seed}: loss {loss:.4f}, {seconds:.1f} s of training, {wall:.1f} s in all; "
                f"ratios {seconds / theirs:.3f} and {wall / their_wall:.3f}",
                flush=True,
            )


if __name__ == "__main__":
    main()

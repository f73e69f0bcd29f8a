"""What it costs to sum and reduce gradients in bf16 instead of fp32: the same small run both ways, for several seeds.

    python bench/grad_dtype.py [--data=data/local] [--seeds=3] [--ranks=2] [any option of the trainer]

A bf16 model of the demo's topology, 8 micro-batches a step shared by gloo ranks, on byte shards of data/local_text.py.
Prints a markdown table: the final validation loss of each run, and the bytes that a rank sends in a step.
"""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import mean, stdev

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]
from launch.environment import go_on

if __name__ == "__main__":
    go_on("requirements.txt", "torch")

from bench.communication import expected_calls, markdown, model_parameters
from bench.settings import refused_in_a_line, trainer_settings
from data.shards import number_between
from launch.console import Parser, ended_by_signals, run_to_end, until_reader_leaves
from train_gpt import PRESETS, check_shards, param_table

SETTINGS = dict(
    preset="demo", dtype="bfloat16", fp8_head="true", model_dim=64, num_heads=2, head_dim=32, micro_batches=8, batch_unit=64,
    num_scheduled_iterations=285, num_extension_iterations=15, val_every=0, val_tokens=131_072, val_batch_tokens=32_768,
    sample_tokens=0, block_size=16, max_doc_len=2048, attention_scale=0.1, momentum_warmup=80, muon_lr_mul=1.0,
    adam_lr_mul=1.0,
)  # fmt: skip


def final_loss(options: list[str], ranks: int) -> float:
    """Of one run by launch/start.py."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, f"{ROOT}/launch/start.py", *options, f"--log_dir={folder}", "--run_id=run"]
        environment = {**os.environ, "RANKS": f"{ranks}", "OMP_NUM_THREADS": "1"}
        if code := run_to_end(command, stdout=subprocess.DEVNULL, env=environment).returncode:
            raise SystemExit(f"grad_dtype.py: error: a run ended with code {code}: {' '.join(command)}")
        log = (Path(folder) / "run.txt").read_text(encoding="utf-8")
    return float(re.findall(r"^step:\d+/\d+ val_loss:(\d+\.\d+)", log, re.MULTILINE)[-1])


def main() -> None:
    parser = Parser(description=(__doc__ or "").partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--seeds", type=number_between(1, 1000), default=3, help="runs of each kind (%(default)s)")
    parser.add_argument("--ranks", type=number_between(1, 1000), default=2, help="of a run (%(default)s)")
    args, given = parser.parse_known_args()
    if own := [option for option in given if option.partition("=")[0] in ("--seed", "--grad_dtype")]:
        parser.error(f"{own[0]}: is this program's own to set: it runs --seeds of both kinds")
    seeds, ranks, rows = args.seeds, args.ranks, []
    ours = SETTINGS | {"data": ROOT / PRESETS[SETTINGS["preset"]]["data"]}
    options = [*(f"--{name}={value}" for name, value in ours.items()), *given]  # of two, the later counts
    h = trainer_settings(options)
    options += [f"--data={h.data}"]  # as they are: this process holds them, and none makes them anew
    with refused_in_a_line():
        h.check(ranks)
        check_shards(h)
    for grad_dtype in ("param", "float32"):
        how = f"--grad_dtype={grad_dtype}"
        losses = []
        for seed in range(seeds):
            losses.append(final_loss([*options, how, f"--seed={seed}"], ranks))
            print(f"{how} --seed={seed}: {losses[-1]:.4f}", file=sys.stderr, flush=True)
        h = trainer_settings([*options, how])
        calls = expected_calls(model_parameters(h), param_table(h), ranks, True, False)
        spread = f" ± {stdev(losses):.4f}" if seeds > 1 else ""
        rows.append([grad_dtype, *(f"{loss:.4f}" for loss in losses), f"{mean(losses):.4f}{spread}",
                     f"{sum(call.sent for call in calls.values()) / 1e6:.2f}"])  # fmt: skip
    print(markdown(["gradients in", *(f"seed {seed}" for seed in range(seeds)), "mean", "MB sent, Adam step, split"], rows))


if __name__ == "__main__":
    with ended_by_signals(), until_reader_leaves():
        main()

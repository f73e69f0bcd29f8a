"""runtime/run.py in parts: what is timed, graphs from the cache."""

import math
import re
import subprocess
import sys
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from common import ROOT, tiny_settings, train_gpt
from data.encodings import load_encoding
from data.shards import write_shard
from runtime import clock, run
from runtime.log import Log
from runtime.ranks import Ranks, Signals

CPU = torch.device("cpu")
FIGURES = "val_loss val_bpb train_seconds total_seconds steps tokens_M params_M tokens_per_second"


def test_what_is_timed(shards, tmp_path, monkeypatch):
    """Passes, updates and step lines; not the warm-up, validation, checkpoints and the sample. Each
    takes another number of seconds by a clock that stands still otherwise."""
    now = [0.0]
    still = SimpleNamespace(**vars(time) | {"perf_counter": lambda: now[0]})
    monkeypatch.setattr(clock, "time", still)
    manager = train_gpt.TrainingManager
    takes = {
        (train_gpt.GPT, "forward"): 1,  # twice a step
        (Log, "write_step"): 2,
        (manager, "step_optimizers"): 4,
        (train_gpt, "validate"): 1e3,
        (run.checkpoints, "write_checkpoint"): 1e4,
        (train_gpt, "sample_text"): 1e5,
        (train_gpt, "warm_up"): 1e6,
    }
    for (place, name), seconds in takes.items():

        def function(*args, function=getattr(place, name), seconds=seconds):
            now[0] += seconds
            return function(*args)

        monkeypatch.setattr(place, name, function)
    h = tiny_settings(shards, tmp_path, save_every=4, sample_tokens=1)
    train_gpt.train(h, Ranks(0, 1, CPU), Signals())
    # The last step's line is made before it is written.
    text = (tmp_path / "logs/run.txt").read_text()
    assert "\nstep:8/8 train_time:62000ms step_avg:7750.00ms\n" in text
    assert re.search(r"step:8/8 val_loss:\S+ train_time:64000ms step_avg:8000.00ms\n", text)


@pytest.mark.parametrize("encoding", ["bytes", "toy"])
def test_the_figures_at_the_end(shards, tmp_path, offer_encoding, capsys, encoding):
    """Of a text in bytes and in a small BPE: the same bits per byte as by hand. They end the log and
    the console, and follow the last line --- whatever a sample holds."""
    text = "ab  ab cab\n" * 90
    offer_encoding("toy", end_of_text=303)
    settings = load_encoding(encoding).settings
    tokens = load_encoding(encoding).document(text)
    for name in ("own_train_000000.bin", "own_val_000000.bin"):
        write_shard(tmp_path / name, tokens if "val" in name else np.tile(tokens, 40))
    h = tiny_settings(tmp_path, tmp_path, seed=3, block_size=512, **settings)
    train_gpt.train(h, Ranks(0, 1, CPU), Signals())
    log = (tmp_path / "logs/run.txt").read_text()
    figures = log.rpartition("\n---\n")[2]
    assert capsys.readouterr().out.endswith(f"\n---\n{figures}")
    names, values = zip(*(line.split(": ") for line in figures.splitlines()))
    assert names == (*FIGURES.split(), "peak_memory_MiB")
    found = dict(zip(names, map(float, values)))
    assert f"val_loss:{found['val_loss']:.4f}" in log
    size = len(load_encoding(encoding).decode(tokens[1 : h.val_tokens + 1].tolist()).encode())
    bits = found["val_loss"] * h.val_tokens / math.log(2)
    assert found["val_bpb"] == pytest.approx(bits / size, abs=2e-6)
    assert found["total_seconds"] > found["train_seconds"] > 0 and found["steps"] == 8


COMPILES = """
import math, sys
from pathlib import Path
sys.path.insert(0, "{root}")
import torch
from torch import library
from torch._dynamo.utils import counters
from runtime.run import cache_graphs


@library.custom_op("test::triple", mutates_args=())
def triple(x: torch.Tensor) -> torch.Tensor:
    return 3 * x


triple.register_fake(torch.empty_like)
triple.register_autograd(lambda ctx, grad: {factor} * grad)
cache_graphs({{"script.py": Path(__file__).read_text()}})
x = torch.ones(4, requires_grad=True)
torch.compile(lambda x: triple(x).sin().sum())(x).backward()
counts = counters["aot_autograd"]
print(round(x.grad[0].item() / math.cos(3)), counts["autograd_cache_hit"])
"""


@pytest.mark.slow
def test_a_graph_comes_from_the_cache_unless_an_operator_has_changed(tmp_path, monkeypatch):
    """PyTorch's own key does not hold the backward formula that an operator registers."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    script = tmp_path / "script.py"
    results = []
    for factor in (3, 3, 7):
        script.write_text(COMPILES.format(root=str(ROOT), factor=factor))
        done = subprocess.run([sys.executable, script], capture_output=True, text=True)
        results.append(done.stdout.strip() or done.stderr)
    assert results == ["3 0", "3 1", "7 0"]

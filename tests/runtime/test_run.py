"""runtime/run.py in parts: what is timed, graphs from the cache."""

import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from common import ROOT, tiny_settings, train_gpt
from runtime import clock, run
from runtime.log import Log
from runtime.ranks import Ranks, Signals

CPU = torch.device("cpu")


def test_what_is_timed(shards, tmp_path, monkeypatch):
    """Passes, updates and step lines; not the warm-up, validation, checkpoints and the sample. Each
    takes another number of seconds by a clock that stands still otherwise."""
    now = [0.0]
    monkeypatch.setattr(clock, "time", SimpleNamespace(perf_counter=lambda: now[0]))
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

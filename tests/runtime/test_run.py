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


FILES = {
    "script.py": """
import sys
sys.path.insert(0, "{root}")
import torch
from torch._dynamo.utils import counters
from operators import triple
from runtime.run import cache_graphs
from runtime.sources import Sources
class Copy(torch.autograd.Function):
    forward = staticmethod(lambda ctx, x: x.clone())
    backward = staticmethod(lambda ctx, grad: {function} * grad)
sources = Sources(__file__).imported()
sources["data/loader.py"] += "# {loader}"
cache_graphs(sources)
x = torch.ones(4, requires_grad=True)
torch.compile(lambda x: triple(Copy.apply(x)))(x).sum().backward()
print(x.grad[0].item(), counters["aot_autograd"]["autograd_cache_hit"])
""",
    "operators.py": """
import torch
from runtime.cpu import triton
@triton.jit
def kernel(x):
    return {kernel} * x
factor = lambda: {called}
@torch.library.custom_op("test::triple", mutates_args=())
def triple(x: torch.Tensor) -> torch.Tensor:
    return 3 * x
triple.register_fake(torch.{fake})
keep = lambda ctx, inputs, output: setattr(ctx, "factor", {kept})
backward = lambda ctx, grad: {formula} * ctx.factor * factor() * grad
triple.register_autograd(backward, setup_context=keep)
""",
}
SAME = dict(function=1, loader="a line", kernel=1, called=1, fake="empty_like", kept=1, formula=3)
EDITS = [  # the gradient, and how many graphs come from the cache
    ({}, "3.0 0"),
    (dict(loader="another", kernel=2), "3.0 1"),
    (dict(formula=7), "7.0 0"),
    (dict(called=2), "6.0 0"),
    (dict(kept=5), "15.0 0"),
    (dict(fake="zeros_like"), "3.0 0"),
    (dict(function=4), "12.0 0"),  # by PyTorch's own key
]


@pytest.mark.slow
def test_a_graph_comes_from_the_cache_unless_an_operator_has_changed(tmp_path, monkeypatch):
    """PyTorch's own key does not hold the functions that an operator registers, nor what they call."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    for edit, expected in EDITS:
        for name, text in FILES.items():
            (tmp_path / name).write_text(text.format(root=ROOT, **SAME | edit))
        command = [sys.executable, tmp_path / "script.py"]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.stdout.strip() == expected, (edit, done.stderr)

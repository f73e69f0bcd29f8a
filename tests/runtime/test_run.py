"""runtime/run.py and runtime/checkpoints.py in parts: the clock, the ranks' report, differences."""

import random
import re
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from common import ROOT, tiny_settings, train_gpt
from runtime import run
from runtime.checkpoints import course, differences, raise_if_any
from runtime.log import Log
from runtime.ranks import Ranks, Signals
from runtime.run import BAD_DATA, Clock, LossReport, seed_random

CPU = torch.device("cpu")


def test_the_clock_counts_what_lies_between_start_and_stop():
    clock = Clock(CPU)
    assert clock.ms() == 0
    clock.start()
    time.sleep(0.02)
    clock.stop()
    counted = clock.ms()
    assert 20 <= counted < 500
    time.sleep(0.02)
    assert clock.ms() == counted
    clock.start()
    time.sleep(0.02)
    assert clock.ms() >= counted + 20


def test_what_is_timed(shards, tmp_path, monkeypatch):
    """Passes, updates and step lines; not the warm-up, validation, checkpoints and the sample. Each
    takes another number of seconds by a clock that stands still otherwise."""
    now = [0.0]
    monkeypatch.setattr(run, "time", SimpleNamespace(perf_counter=lambda: now[0], strftime=str))
    timed = {"forward_backward": 1, "write_step": 2, "step_optimizers": 4}
    others = {"validate": 1e3, "write_checkpoint": 1e4, "sample_text": 1e5, "warm_up": 1e6}
    for name, seconds in (timed | others).items():
        places = (train_gpt, train_gpt.TrainingManager, Log, run.checkpoints)
        place = next(x for x in places if hasattr(x, name))

        def function(*args, function=getattr(place, name), seconds=seconds):
            now[0] += seconds
            return function(*args)

        monkeypatch.setattr(place, name, function)
    h = tiny_settings(shards, tmp_path, save_every=4, sample_tokens=1)
    train_gpt.train(h, Ranks(0, 1, CPU), Signals())
    # The last step's line is made before it is written.
    text = (tmp_path / "logs/run.txt").read_text()
    assert "\nstep:8/8 train_time:54000ms step_avg:6750.00ms\n" in text
    assert re.search(r"step:8/8 val_loss:\S+ train_time:56000ms step_avg:7000.00ms\n", text)


def reported(rank, world_size):
    reasons = (0, BAD_DATA, int(signal.SIGTERM))
    found = []
    for reason in reasons:
        loss = torch.tensor(1.0 + rank)
        report = LossReport(0, loss, reason * rank, Ranks(rank, world_size, CPU))
        found.append((report.receive().item(), *report.read()))
    return found


def test_every_rank_reads_the_mean_loss_and_a_reason_to_stop(run_ranks):
    expected = [(True, 1.5, 0), (True, 1.5, BAD_DATA), (True, 1.5, signal.SIGTERM)]
    assert run_ranks(2, reported) == [expected, expected]


def test_seeds_of_all_three_libraries():
    draws = []
    for seed in ((1, 2), (1, 2), (1, 3)):
        seed_random(*seed)
        draws.append((torch.rand(1).item(), random.random(), np.random.rand()))
    assert draws[0] == draws[1]
    assert not {*draws[0]} & {*draws[2]}


def test_differences_are_named_by_their_path(tmp_path):
    was = {"a": {"x": (2, 3), "y": 1}, "b": "same"}
    now = {"a": {"x": (2, 4)}, "b": "same", "c": 5}
    found = differences(was, now)
    assert "a.y was 1, is not there" in found and "c was not there, is 5" in found
    assert len(found) == 3 and differences(was, was) == []
    raise_if_any(tmp_path, [])
    with pytest.raises(ValueError, match="cannot be resumed: 1; 2; 3; and 2 more$"):
        raise_if_any(tmp_path, "12345")


def test_the_course_is_the_batches_of_the_first_steps():
    class Manager:
        batch_tokens = (8, 8, 16).__getitem__
        max_doc_len = (4, 4, 4).__getitem__

    batches = "2 × 8 cut at 4 + 1 × 16 cut at 4"
    assert course(Manager, 3) == {"tokens in batches": batches, "tokens": "32"}


COMPILES = """
import math, sys
from pathlib import Path
sys.path.insert(0, "{root}")
import torch
from torch import library
from torch._dynamo.utils import counters
from runtime.run import cache_graphs


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad


@library.custom_op("test::triple", mutates_args=())
def triple(x: torch.Tensor) -> torch.Tensor:
    return 3 * x


triple.register_fake(torch.empty_like)
triple.register_autograd(lambda ctx, grad: {factor} * grad)
cache_graphs({{"script.py": Path(__file__).read_text()}})
x = torch.ones(4, requires_grad=True)
torch.compile(lambda x: triple(Double.apply(x)).sin().sum())(x).backward()
counts = counters["aot_autograd"]
print(round(x.grad[0].item() / math.cos(6)), counts["autograd_cache_hit"])
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
    assert results == ["6 0", "6 1", "14 0"]

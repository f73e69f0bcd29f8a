"""runtime/forecast.py: what a run tells about itself before it is known. No GPU is needed."""

import re
from types import SimpleNamespace

import pytest
import torch

from common import options, train_gpt
from runtime import forecast, run
from runtime.log import Log
from runtime.options import describe

GIB = 2**30


@pytest.fixture(scope="module")
def manager():
    """That of the record preset, without memory."""
    h = train_gpt.Hyperparameters()
    sizes = (h.vocab_size, len(train_gpt.LAYERS), h.num_heads, h.head_dim, h.model_dim)
    with torch.device("meta"):
        model = train_gpt.GPT(*sizes, h.max_tokens, bigram_rows=h.bigram_rows)
    return train_gpt.TrainingManager(model, h)


MEASURED = {8: 24.94, 16: 12.47, 32: 6.24}  # GiB above the state, on an H100, by micro-batches


@pytest.mark.parametrize("count", MEASURED)
def test_memory_is_what_was_measured(count):
    """And training's share: 19.31 GiB with 8 micro-batches of 49,152 tokens."""
    h = train_gpt.Hyperparameters(micro_batches=count)
    assert forecast.memory(h, 0, 393_216) / GIB == pytest.approx(MEASURED[count], rel=0.01)
    h = train_gpt.Hyperparameters(val_batch_tokens=16_384)
    assert forecast.memory(h, 0, 393_216) / GIB == pytest.approx(19.31, rel=0.01)


CARDS = {  # GB: what is proposed
    80: "",
    48: "",
    24: "23.0 GiB free: --micro_batches=16 needs about 18.0 GiB",
    16: "15.0 GiB free: --micro_batches=32 needs about 11.7 GiB",
    6: "5.0 GiB free: no --micro_batches needs so little",
}


@pytest.mark.parametrize("card", CARDS)
def test_micro_batches_are_proposed_that_fit_the_card(card, manager, monkeypatch):
    """In one line, before the warm-up; the settings stay."""
    device = SimpleNamespace(type="cuda")
    free = (card - 1) * GIB - 1000
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free, card * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 1000)
    shown = []
    this = run.Run(manager.h, SimpleNamespace(device=device, world_size=1), None, None)
    this.log = SimpleNamespace(show=shown.append)
    this.last_step = manager.h.total_iterations
    this.announce(manager, train_gpt.PRESETS)
    plan, *advice = shown
    assert plan.startswith("preset record: 1,375 steps, 361,758,720 tokens on 1 GPU; the stream")
    assert len(advice) == bool(CARDS[card]) and CARDS[card] in "".join(advice)
    assert manager.h.micro_batches == 8


def test_a_run_tells_what_it_does_and_how_long_it_takes(shards, tmp_path, capsys, monkeypatch):
    """A step of 16 tokens takes a second on a clock that stands still otherwise; two stages follow."""
    now = [0.0]
    clock = SimpleNamespace(perf_counter=lambda: now[0], strftime=str)
    monkeypatch.setattr(run, "time", clock)
    write = Log.write_step

    def write_step(log, *lines):
        now[0] += 1
        write(log, *lines)

    monkeypatch.setattr(Log, "write_step", write_step)
    train_gpt.main(options(shards, tmp_path, num_scheduled_iterations=72))
    printed = capsys.readouterr().out
    assert "preset demo, --model_dim=32, --head_dim=16, --bigram_rows=768" in printed
    assert printed.index("74 steps, 38,400 tokens on 1 CPU rank;") < printed.index("warm-up")
    found = re.search(r"step:20/74 .*\nabout (\S+) minutes of training left: (.*); later", printed)
    parts = "0.1 for 4 steps of 256 tokens, 0.8 for 24 steps of 512 tokens, 1.3 for 26 steps of 768"
    assert found[1] == "2.2" and found[2] == f"{parts} tokens"
    assert printed.count("minutes of training") == 1


def test_the_short_preset_is_a_tenth_of_the_record():
    """At a tenth of the steps its schedule is the record's: batches, windows, rates, momentum."""
    record = train_gpt.Hyperparameters()
    short = train_gpt.Hyperparameters(**train_gpt.PRESETS["short"])
    short.check(8)
    for step in (0, 20, 44, 45, 60, 90, 91, 120, 133):
        one, other = (
            train_gpt.step_schedule(step, short),
            train_gpt.step_schedule(10 * step + 5, record),
        )
        assert one[:5] == other[:5]
        assert one.lr_schedule == pytest.approx(other.lr_schedule, abs=0.02)
        assert one.momentum == pytest.approx(other.momentum, abs=0.02)
    tokens = [
        sum(train_gpt.step_schedule(i, h).batch_tokens for i in range(h.total_iterations))
        for h in (short, record)
    ]
    assert tokens[0] / tokens[1] == pytest.approx(0.1, abs=0.001)
    assert describe(short, train_gpt.PRESETS) == "short"
    h = train_gpt.Hyperparameters(seed=3, run_id="x", data="y")
    assert describe(h, train_gpt.PRESETS) == "record, --seed=3"

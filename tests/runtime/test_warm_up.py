"""The warm-up runs every shape that the schedule uses, and leaves no trace."""

import builtins
import io
import itertools
import logging
import os
import random
import re
import struct
import sys
import tempfile
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal
from functools import partial
from types import ModuleType, SimpleNamespace

import numpy
import pytest
import torch

import launch.unsaved
import runtime.run
import train_gpt
import triton_kernels
from common import ROOT, SCRIPT, ends_with, options, run_fresh, tiny_settings, unequal
from launch.console import AgreedError
from launch.unsaved import kept_outside
from runtime.checkpoints import read_checkpoint
from runtime.ranks import Ranks
from train_gpt import build, main, step_schedule, warm_up

RANKS = Ranks(0, 1, torch.device("cpu"))
THIS = sys.modules[__name__]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_warm_up_leaves_everything_as_it_was(shards, tmp_path, dtype):
    manager = build(tiny_settings(shards, tmp_path, dtype=dtype), RANKS)
    model = manager.model
    before, random_before, table = manager.state_dict(), torch.get_rng_state(), model.yarn.table.clone()
    warm_up(manager, RANKS)
    assert unequal(before, manager.state_dict()) == []
    assert torch.equal(table, model.yarn.table) and torch.equal(random_before, torch.get_rng_state())
    assert all(p.grad is None for p in model.parameters()) and model.training
    assert manager.current == step_schedule(0, manager.h)


@pytest.mark.parametrize("persistent", [True, False])
def test_a_buffer_that_the_forward_pass_changes_is_refused(shards, tmp_path, monkeypatch, persistent):
    """No checkpoint held an idea's running mean: a resumed run went on without it, and without a word."""

    def add(model, _) -> None:
        model.running += model.fixed

    def build_with_buffers(*args):
        manager = build(*args)
        manager.model.register_buffer("running", torch.zeros(3), persistent)
        manager.model.register_buffer("fixed", torch.ones(3), persistent)
        manager.model.register_forward_pre_hook(add)
        return manager

    monkeypatch.setattr(train_gpt, "build", build_with_buffers)
    with pytest.raises(AgreedError, match="^passes or updates change running: neither a checkpoint nor another rank knows"):
        train_gpt.train(tiny_settings(shards, tmp_path), RANKS)


class Part(torch.nn.Module):
    """An idea's module, with state that is neither a parameter nor a buffer."""

    count = 0

    def __init__(self):
        super().__init__()
        self.scale = torch.ones(3)


class Average:
    """Of the head, in no module."""

    def __init__(self, manager):
        self.held = {"lm_head": manager.model.lm_head.detach().clone()}

    def take_in(self, manager):
        self.held["lm_head"].lerp_(manager.model.lm_head.detach(), 0.2)


@dataclass(slots=True)
class Slots:
    """An idea's running mean, without a __dict__."""

    mean: float = 1.0


def counted(): ...


@torch.no_grad()
def listing(x, seen=[0], *, also={"n": 0}):
    seen[0] += x
    also["n"] += x


def closure():
    seen = [0]
    return lambda: seen.append(1)


def listed_hook():
    seen = []
    return lambda grad: seen.append(1)


class Static:
    @staticmethod
    def call(seen=[0]):
        seen[0] += 1


add_one = closure()


class Counts(dict):
    """With an attribute beside what it holds."""

    total = 0


def numbered():
    at = 0
    while True:
        at += 1
        yield at


def put(name, value):
    """Makes manager.NAME = value(manager)."""
    return lambda manager: setattr(manager, name, value(manager))


KEPT = {  # an idea's own state, by its name in the message: how it is made, and what a pass or an update does to it
    "manager.model.calls": (lambda m: setattr(m.model, "calls", 0), lambda m: setattr(m.model, "calls", m.model.calls + 1), "pass"),
    "manager.model.late": (lambda m: None, lambda m: setattr(m.model, "late", torch.zeros(2)), "pass"),
    "manager.model._modules['part'].scale": (
        lambda m: m.model.add_module("part", Part()), lambda m: m.model.part.scale.add_(1), "pass"),
    "test_warm_up.Part.count": (lambda m: None, lambda m: setattr(Part, "count", Part.count + 1), "pass"),
    "test_warm_up.counted.calls": (lambda m: setattr(counted, "calls", 0), lambda m: setattr(counted, "calls", 1), "pass"),
    "manager.model.rng": (
        lambda m: setattr(m.model, "rng", torch.Generator()), lambda m: torch.rand((), generator=m.model.rng), "pass"),
    "manager.numbers": (put("numbers", lambda m: numpy.random.default_rng(0)), lambda m: m.numbers.normal(), "pass"),
    "manager.dice": (put("dice", lambda m: random.Random(0)), lambda m: m.dice.random(), "pass"),
    "train_gpt.MEANS['x'][0]": (lambda m: None, lambda m: train_gpt.MEANS.setdefault("x", [torch.zeros(1)])[0].add_(1), "pass"),
    "manager.optimizer.norm": (lambda m: setattr(m.optimizer, "norm", 0.5), lambda m: setattr(m.optimizer, "norm", 0.6), "step"),
    "manager.clip.mean": (put("clip", lambda m: Slots()), lambda m: setattr(m.clip, "mean", 0.5), "step"),
    "manager.clip": (put("clip", lambda m: numpy.float32(1)), lambda m: setattr(m, "clip", m.clip / 2), "step"),
    "manager.coin part": (put("coin", lambda m: itertools.cycle((0, 1, 1))), lambda m: next(m.coin), "step"),
    "manager.order part": (put("order", lambda m: iter([*range(99)])), lambda m: next(m.order), "step"),
    "manager.names.at": (put("names", lambda m: numbered()), lambda m: next(m.names), "step"),
    "manager.sum": (put("sum", lambda m: Decimal(1)), lambda m: setattr(m, "sum", m.sum / 2), "step"),
    "manager.seen_ids": (put("seen_ids", lambda m: bytearray(8)), lambda m: m.seen_ids.__setitem__(3, 1), "step"),
    "test_warm_up.listing.seen[0]": (lambda m: None, lambda m: listing(1), "step"),
    "test_warm_up.listing.also['n']": (lambda m: None, lambda m: listing(1), "step"),
    "test_warm_up.add_one.seen[": (lambda m: None, lambda m: add_one(), "step"),
    "test_warm_up.Static.call.seen[0]": (lambda m: None, lambda m: Static.call(), "step"),
    "manager.listed[0]": (put("listed", lambda m: [].append), lambda m: m.listed(1), "step"),
    "manager.hook.args[0].mean": (put("hook", lambda m: partial(Slots.__setattr__, Slots())), lambda m: m.hook("mean", 2.0), "step"),
    "manager.array": (put("array", lambda m: numpy.zeros((300, 300)).T), lambda m: m.array.__setitem__((0, 0), 1), "step"),
    "manager.model._parameters['lm_head'].slow": (
        lambda m: setattr(m.model.lm_head, "slow", torch.zeros(2)), lambda m: m.model.lm_head.slow.add_(1), "step"),
    "manager.probe.grad": (
        put("probe", lambda m: torch.zeros(2, requires_grad=True)), lambda m: setattr(m.probe, "grad", torch.ones(2)), "pass"),
    "manager.counts.total": (put("counts", lambda m: Counts()), lambda m: setattr(m.counts, "total", 1), "step"),
    "manager.bits": (put("bits", lambda m: numpy.random.PCG64(0)), lambda m: m.bits.random_raw(), "step"),
    "manager.written": (put("written", lambda m: io.BytesIO()), lambda m: (m.written.write(b"x"), m.written.seek(0)), "step"),
    "manager.activation": (put("activation", lambda m: torch.relu), lambda m: setattr(m, "activation", torch.tanh), "step"),
    "manager.model._parameters['lm_head']._backward_hooks[": (
        lambda m: m.model.lm_head.register_hook(listed_hook()), lambda m: [*m.model.lm_head._backward_hooks.values()][0](None), "pass"),
    "manager.model._parameters['embed']._post_accumulate_grad_hooks[": (
        lambda m: m.model.embed.register_post_accumulate_grad_hook(listed_hook()), lambda m: None, "pass"),
    "manager.model._parameters['scalars']": (
        lambda m: None, lambda m: m.model.scalars.requires_grad_(False), "step"),
    "manager.lines part 1[1]": (put("lines", lambda m: map(len, open(__file__))), lambda m: next(m.lines), "step"),
    "manager.which": (put("which", lambda m: 0), lambda m: setattr(m, "which", m.which ^ 1), "step"),
    "manager.third": (put("third", lambda m: 0), lambda m: setattr(m, "third", (m.third + 1) % 3), "step"),
    "manager.fourth": (put("fourth", lambda m: 0), lambda m: setattr(m, "fourth", (m.fourth + 1) % 4), "step"),
    "manager.turn": (put("turn", lambda m: 0), lambda m: setattr(m, "turn", (m.turn + 1) % 2), "pass"),
    "manager.turns": (put("turns", lambda m: 0), lambda m: setattr(m, "turns", (m.turns + 1) % 5), "pass"),
    "manager.seen": (put("seen", lambda m: 0), lambda m: setattr(m, "seen", m.seen + 1), "step"),
    "manager.average.held['lm_head']": (put("average", Average), lambda m: m.average.take_in(m), "step"),
    "manager.swa._buffers['n_averaged']": (
        put("swa", lambda m: torch.optim.swa_utils.AveragedModel(m.model)), lambda m: m.swa.update_parameters(m.model), "step"),
    "manager.sgd.state[0]['step']": (
        put("sgd", lambda m: torch.optim.AdamW([torch.nn.Parameter(torch.ones(3), requires_grad=True)])),
        lambda m: (setattr(m.sgd.param_groups[0]["params"][0], "grad", torch.ones(3)), m.sgd.step()), "step"),
}  # fmt: skip


class Enough(Exception): ...


def enough(*_) -> None:
    """In place of what comes after the warm-up."""
    raise Enough


@pytest.mark.parametrize("name", KEPT)
def test_state_that_no_checkpoint_holds_is_told(shards, tmp_path, monkeypatch, capsys, name):
    """A counter, a generator, an average of weights, an optimizer of its own: a resumed run began them anew, without a word, and
    had a loss of 4.95 in place of 4.55."""
    monkeypatch.setattr(train_gpt, "MEANS", {}, raising=False)
    monkeypatch.setitem(launch.unsaved.__dict__, "own_modules", lambda *_: {"train_gpt": train_gpt, "test_warm_up": THIS})
    make, change, when = KEPT[name]

    class Idea(train_gpt.TrainingManager):
        def forward_schedule(self):
            if when == "pass":
                change(self)
            return super().forward_schedule()

        def step_optimizers(self, step):
            super().step_optimizers(step)
            if when == "step":
                change(self)

    def build_with_state(*args):
        manager = build(*args)
        make(manager)
        return manager

    monkeypatch.setattr(train_gpt, "TrainingManager", Idea)
    monkeypatch.setattr(train_gpt, "build", build_with_state)
    monkeypatch.setattr(train_gpt, "validate", enough)
    with pytest.raises(Enough):
        train_gpt.train(tiny_settings(shards, tmp_path), RANKS)
    said = re.search("^caution: passes or updates change (.*): no checkpoint holds that", capsys.readouterr().out, re.MULTILINE)
    assert said and name in said[1]


@pytest.mark.parametrize("parity", [0, 1])
def test_what_comes_round_with_adam_or_without_is_told(shards, tmp_path, monkeypatch, capsys, parity):
    """A toggle at each second step, of which the warm-up has four: after it as before it, and a resumed run had other bits."""

    class Idea(train_gpt.TrainingManager):
        def __init__(self, *given):
            super().__init__(*given)
            self.which = 0

        def step_optimizers(self, step):
            super().step_optimizers(step)
            self.which ^= int(step % 2 == parity)

    monkeypatch.setattr(train_gpt, "TrainingManager", Idea)
    train_gpt.train(tiny_settings(shards, tmp_path), RANKS)
    assert "caution: passes or updates change manager.which: no" in capsys.readouterr().out


def test_a_copy_of_an_older_script_runs(shards, tmp_path):
    """One that restores without the warm-up once more, takes raise_first from where it was, and tells the log of its console."""
    text = SCRIPT.read_text()
    older = {
        "run.restore(functools.partial(warm_up, manager, ranks, run.first_step))": "run.restore()",
        "Stopped, leave, raise_first, tell": "Stopped, leave, tell",
        "is_plain_name, parse_options, setting": "is_plain_name, parse_options, raise_first, setting",
        "run.log.write(report)": "run.log.write(report, console=True)",
    }
    for now, then in older.items():
        assert text.count(now) == 1
        text = text.replace(now, then)
    (tmp_path / "older.py").write_text(text)
    command = [sys.executable, f"{tmp_path / 'older.py'}", *options(shards, tmp_path, tail_averages="true")]
    done = run_fresh(command, env={**os.environ, "PYTHONPATH": f"{ROOT}"})
    assert done.returncode == 0 and "caution" not in done.stdout and "tail averages" in done.stdout, done


@pytest.mark.parametrize("parity", [0, 1])
def test_a_buffer_that_comes_round_is_refused(shards, tmp_path, monkeypatch, parity):
    class Idea(train_gpt.TrainingManager):
        def step_optimizers(self, step):
            super().step_optimizers(step)
            if step % 2 == parity:
                self.model.turn.copy_(1 - self.model.turn)

    def build_with_a_turn(*args):
        manager = build(*args)
        manager.model.register_buffer("turn", torch.zeros(1))
        return manager

    monkeypatch.setattr(train_gpt, "TrainingManager", Idea)
    monkeypatch.setattr(train_gpt, "build", build_with_a_turn)
    with pytest.raises(AgreedError, match="^passes or updates change turn: neither a checkpoint nor another rank knows"):
        train_gpt.train(tiny_settings(shards, tmp_path), RANKS)


def kept_by_one(rank, world_size, shards, folder):
    class Idea(train_gpt.TrainingManager):
        calm = 1.0

        def step_optimizers(self, step):
            super().step_optimizers(step)
            if rank == 1:  # as by the last rows of a bank
                self.calm *= 0.9

    told, traces = [], runtime.run.warm_up_traces
    runtime.run.warm_up_traces = lambda *given: told.append(traces(*given)) or told[0]
    train_gpt.TrainingManager = Idea
    train_gpt.train(tiny_settings(shards, folder), Ranks(rank, world_size, torch.device("cpu")))
    return told[0]


def test_what_another_rank_than_the_first_keeps_is_told(run_ranks, shards, tmp_path):
    """The first one's was, alone; what goes by rows may be another's."""
    said = run_ranks(2, kept_by_one, shards, tmp_path)
    assert said[0] == said[1] and said[0].startswith("caution: passes or updates change manager.calm: no checkpoint holds that")


@pytest.mark.parametrize("follows", [True, False])
def test_a_momentum_that_follows_the_schedules_is_state(shards, tmp_path, monkeypatch, capsys, follows):
    """Slowly, from what it was in the step before; one that is half of it is none."""

    class Idea(train_gpt.TrainingManager):
        def step_optimizers(self, step):
            current, past = step_schedule(step, self.h), self.optimizer.momentum
            self.optimizer.lr_mul = current.lr_mul
            self.optimizer.momentum = past + 0.1 * (current.momentum - past) if follows else current.momentum / 2
            self.optimizer.step(current.do_adam)
            if step == self.split_step:
                self.optimizer.split_tied()

    monkeypatch.setattr(train_gpt, "TrainingManager", Idea)
    train_gpt.train(tiny_settings(shards, tmp_path), RANKS)
    said = re.search("^caution: passes or updates change (.*): no checkpoint holds that", capsys.readouterr().out, re.MULTILINE)
    assert said[1] == "manager.optimizer.momentum" if follows else not said


@pytest.mark.parametrize("kind", [list, tuple, dict])
def test_an_average_in_the_state_is_the_first_again(shards, tmp_path, monkeypatch, capsys, kind):
    """In a list it stayed what the warm-up had made of it, as a copy of the state held the list itself."""
    first, seen = {}, []

    class Idea(train_gpt.TrainingManager):
        def __init__(self, *given):
            super().__init__(*given)
            held = [x.detach().clone() for x in self.optimizer.params.values()]
            self.ema = dict(enumerate(held)) if kind is dict else kind(held)
            self.counts = [0]
            first.update({i: x.clone() for i, x in enumerate(held)})

        def held(self):
            return self.ema.values() if kind is dict else self.ema

        def _arrange(self, *given):
            state = super()._arrange(*given)
            return state | {"same": state["same"] | {"ema": self.ema, "counts": self.counts}}

        def load_state_dict(self, saved):
            super().load_state_dict(saved)
            for mine, x in zip(self.held(), saved["same"]["ema"].values() if kind is dict else saved["same"]["ema"]):
                mine.copy_(x)
            self.counts = saved["same"]["counts"]

        def step_optimizers(self, step):
            if manager_of_run and not seen:
                seen.append(([x.clone() for x in self.held()], [*self.counts]))
            super().step_optimizers(step)
            self.counts.append(step)
            for mine, x in zip(self.held(), self.optimizer.params.values()):
                mine.lerp_(x.detach(), 0.1)

    manager_of_run, forward_backward = [], train_gpt.forward_backward
    monkeypatch.setattr(train_gpt, "TrainingManager", Idea)
    monkeypatch.setattr(train_gpt, "forward_backward", lambda *given: manager_of_run.append(1) or forward_backward(*given))
    main(options(shards, tmp_path, save_every=4))
    (held, counts), = seen
    assert all(torch.equal(x, first[i]) for i, x in enumerate(held)) and counts == [0]
    assert "caution" not in capsys.readouterr().out
    end = read_checkpoint(tmp_path / "logs" / "run" / "step_000008.pt")["state"]["same"]
    assert end["counts"] == [0, *range(8)] and type(end["ema"]) is kind


def test_a_module_of_an_idea_is_looked_at(shards, tmp_path):
    """A counter in a module beside an idea was passed by."""
    counting = "    helper.CALLS += 1\n    model, h = manager.model, manager.h\n"
    idea = SCRIPT.read_text().replace("import torch\n", "import helper\nimport torch\n", 1)
    (tmp_path / "idea.py").write_text(idea.replace("    model, h = manager.model, manager.h\n", counting, 1))
    (tmp_path / "helper.py").write_text("CALLS = 0\n")
    command = [sys.executable, f"{tmp_path / 'idea.py'}", *options(shards, tmp_path)]
    done = run_fresh(command, env={**os.environ, "PYTHONPATH": f"{ROOT}"})
    (said,) = [line for line in done.stdout.splitlines() if line.startswith("caution")]
    assert done.returncode == 0 and said.startswith("caution: passes or updates change helper.CALLS: no checkpoint holds that")
    assert said.split("\n")[0].endswith(": no harm to a cache; bench/resumes.py tells"), said


def test_the_modules_of_the_recipe_are_looked_at(shards, tmp_path, monkeypatch, capsys):
    """triton_kernels.py and attention.py, which README names for changes of kernels, edited in place: a running mean, say."""
    running, rms_norm = [1.0], train_gpt.norm
    monkeypatch.setattr(triton_kernels, "RUNNING", running, raising=False)
    monkeypatch.setattr(train_gpt, "norm", lambda x: running.append(1.0) or rms_norm(x))
    train_gpt.train(tiny_settings(shards, tmp_path), RANKS)
    assert "caution: passes or updates change triton_kernels.RUNNING[" in capsys.readouterr().out


class Closed(dict):
    def values(self):
        raise ValueError("invalid operation on closed shelf")


class Proxy:
    def __getattr__(self, name):
        return {"z_loss": 1e-4}[name]


ODD = {
    "a KeyError for an attribute": Proxy,
    "a closed mapping": Closed,
    "conjugate numbers": lambda: torch.ones(4, dtype=torch.complex64).conj(),
    "more digits than Python writes": lambda: (1 << 20000) - 1,
}


@pytest.mark.parametrize("kind", ODD)
def test_what_cannot_be_looked_at_is_passed_over(monkeypatch, kind):
    """Each ended a sound run in a traceback."""
    monkeypatch.setattr(launch.unsaved, "own_modules", lambda *_: {})
    assert kept_outside(SimpleNamespace(odd=ODD[kind](), after=3), None)["manager.after"] == "3"


def use_a_logger(held):
    logging.getLogger("other").setLevel(logging.ERROR)
    held.log.isEnabledFor(logging.INFO)


def make_at_its_first_use(held):
    held.kernel, held.kind, held.cache = counted, Part, {}


def write_logs(held):
    for log in held.logs:
        print("a line", file=log, flush=True)


NO_STATE = {"a logger": use_a_logger, "logs": write_logs, "made at its first use": make_at_its_first_use, "beside a large table": lambda held: held.tables.append([])}


@pytest.mark.parametrize("case", NO_STATE)
def test_what_is_no_state_of_an_ideas_is_not_told(monkeypatch, tmp_path, case):
    """Each was a caution of a sound run; the table's, as what was looked at ended elsewhere."""
    monkeypatch.setattr(launch.unsaved, "own_modules", lambda *_: {})
    held = SimpleNamespace(log=logging.getLogger("an idea's"), kernel=None, kind=None, cache=None, tables=[])
    held.logs = [open(tmp_path / f"{i}.txt", mode) for i, mode in enumerate(("w", "a", "w+", "a+"))]
    if "table" in case:
        monkeypatch.setattr(launch.unsaved, "MOST", 1000)
        held.tables.append([*range(2000)])
    before = kept_outside(held, None)
    NO_STATE[case](held)
    assert launch.unsaved.differing(before, kept_outside(held, None)) == []


def test_what_the_compiler_leaves_in_a_scripts_globals_is_not_told(monkeypatch):
    """Python's own names, under one of the compiler's: a caution of every compiled run."""
    idea = ModuleType("idea")
    exec("from collections import namedtuple\nPart = namedtuple('Part', 'x')\n"
         "def passes(x):\n    return Part(x).x * len(x.shape)", vars(idea))  # fmt: skip
    monkeypatch.setattr(launch.unsaved, "own_modules", lambda *_: {"idea": idea})
    before = kept_outside(SimpleNamespace(), None)
    torch.compile(idea.passes, backend="eager")(torch.ones(3))
    assert any(value is vars(builtins) for name, value in vars(idea).items() if name != "__builtins__")
    assert any(name.startswith("___unnamed_scope") for name in vars(idea))
    assert launch.unsaved.differing(before, kept_outside(SimpleNamespace(), None)) == []


def rates():
    for rate in [1.0] * 13 + [1.1] * 99:
        yield rate


def warmed():
    yield 0.9
    yield from rates()


class Scaler:
    def __call__(self, seen=[0]):
        seen[0] += 1


def file_of_lines():
    with tempfile.NamedTemporaryFile("w") as file:
        file.write("1.0\n" * 400)
        file.flush()
        return open(file.name, "r+")


def read_only(number):
    return numpy.broadcast_to(numpy.float32(number), (4,))


SEEN = {  # what an idea keeps, how it is made and used
    "a text that is read on": (lambda: open(__file__), lambda x, _: x.readline()),
    "a text whose lines are iterated over": (lambda: open(__file__), lambda x, _: next(x)),
    "a file that may be written": (file_of_lines, lambda x, _: x.readline()),
    "a text in memory": (lambda: io.StringIO("1\n" * 9), lambda x, _: next(x)),
    "what a generator yields from": (warmed, lambda x, _: next(x)),
    "a loop over equal values": (rates, lambda x, _: next(x)),
    "a deque's iterator": (lambda: iter(deque([1, 2, 3])), lambda x, _: next(x)),
    "an iterator of another module": (lambda: struct.iter_unpack("h", bytes(40)), lambda x, _: next(x)),
    "an array that nobody can write": (lambda: read_only(1), lambda _, held: setattr(held, "x", read_only(2))),
    "a default of a special method": (lambda: Scaler, lambda x, _: x()()),
    "a name with two underscores": (lambda: SimpleNamespace(__n=0), lambda x, _: setattr(x, "__n", 1)),
    "children of a generator": (lambda: numpy.random.default_rng(0), lambda x, _: x.spawn(1)),
    "children of a seed": (lambda: numpy.random.SeedSequence(0), lambda x, _: x.spawn(1)),
    "a view of bytes": (lambda: memoryview(bytearray(8)), lambda x, _: x.__setitem__(3, 1)),
}


@pytest.mark.parametrize("kind", SEEN)
def test_what_an_idea_keeps_is_seen(monkeypatch, kind):
    """None was: a generator's place was that of its code, a text's that of its last block."""
    monkeypatch.setattr(launch.unsaved, "own_modules", lambda *_: {"test_warm_up": THIS})
    make, use = SEEN[kind]
    held = SimpleNamespace(x=make())
    for _ in range(2 if isinstance(held.x, Iterator) else 0):
        use(held.x, held)
    before, unchanged = kept_outside(held, None), kept_outside(held, None)
    assert kind == "a text whose lines are iterated over" or launch.unsaved.differing(before, unchanged) == []
    use(held.x, held)
    changed = launch.unsaved.differing(before, kept_outside(held, None))
    assert any(name.startswith(("manager.x", "test_warm_up.Scaler")) for name in changed)


class Archive(Mapping):
    """As np.load gives one: each value is read from its file when it is asked for."""

    asked = 0

    def __getitem__(self, key):
        Archive.asked += 1
        return numpy.zeros(4)

    def __iter__(self):
        return iter("ab")

    def __len__(self):
        return 2


class LazyDict(dict):
    values = items = lambda self: Archive().values()


@pytest.mark.parametrize("kind", [Archive, LazyDict])
def test_a_mapping_that_reads_its_values_is_left_alone(monkeypatch, kind):
    """An archive of 2.4 GB was read at each look: 27 s of warm-up in place of 1, and 2,737 MiB in place of 606."""
    monkeypatch.setattr(launch.unsaved, "own_modules", lambda *_: {})
    monkeypatch.setattr(Archive, "asked", 0)
    kept_outside(SimpleNamespace(bank=kind()), None)
    assert Archive.asked == 0


def test_a_number_of_numpys_is_the_same_as_a_checkpoint_gives_it_back(monkeypatch):
    monkeypatch.setattr(launch.unsaved, "own_modules", lambda *_: {})
    of_numpy, of_python = (kept_outside(SimpleNamespace(n=n, x=x), None) for n, x in ((numpy.int64(3), numpy.float64(0.5)), (3, 0.5)))
    assert of_numpy == of_python


def test_what_a_kernel_of_an_idea_compiles_is_no_state(monkeypatch):
    """It keeps it, and the hash of its source, from its first call on, which is the warm-up's."""
    triton = pytest.importorskip("triton")
    monkeypatch.setattr(launch.unsaved, "own_modules", lambda *_: {})
    kernel = triton.runtime.JITFunction(counted)
    held = SimpleNamespace(kernel=kernel, tuned=triton.autotune([triton.Config({})], key=[])(kernel))
    before = kept_outside(held, None)
    kernel.hash = kernel.device_caches[0] = held.tuned.cache["8"] = "compiled"
    assert kept_outside(held, None) == before


class Corpus(list):
    """Counts what is read of it."""

    read = 0

    def __iter__(self):
        for x in super().__iter__():
            self.read += 1
            yield x


@pytest.mark.parametrize("kind", [Corpus, lambda numbers: dict.fromkeys(numbers, 1)], ids=["list", "dict"])
def test_a_corpus_in_a_list_is_looked_at_in_part(monkeypatch, kind):
    """Of five million numbers the names alone took 2 GB, on each rank."""
    monkeypatch.setattr(launch.unsaved, "own_modules", lambda *_: {})
    monkeypatch.setattr(launch.unsaved, "MOST", 100)
    tokens = kind(range(1000))
    found = kept_outside(SimpleNamespace(count=1, tokens=tokens), None)
    assert "manager.count" in found and 90 < len(found) <= 100 and getattr(tokens, "read", 0) <= 100


@pytest.mark.parametrize("where", ["manager", "script"])
def test_a_vocabulary_does_not_hide_what_follows(monkeypatch, where):
    """A global dict of 100,256 entries took all the looks that a run has, and an optimizer's own state was not seen."""
    manager = SimpleNamespace(optimizer=SimpleNamespace(clip=SimpleNamespace(mean=1.0)))
    vocabulary = {f"token{i}": i for i in range(500)}
    script = ModuleType("script")
    setattr(manager if where == "manager" else script, "VOCABULARY", vocabulary)
    monkeypatch.setattr(launch.unsaved, "own_modules", lambda *_: {"script": script})
    monkeypatch.setattr(launch.unsaved, "MOST", 2000)
    found = kept_outside(manager, None)
    monkeypatch.setattr(launch.unsaved, "MOST", len(found) - 250)
    found = kept_outside(manager, None)
    assert "manager.optimizer.clip.mean" in found and any("VOCABULARY" in name for name in found)


def test_generators_that_each_step_seeds_are_no_state(monkeypatch):
    """`from random import random` in an idea was told as state that no checkpoint holds."""
    monkeypatch.setattr(launch.unsaved, "own_modules", lambda *_: {})
    held = SimpleNamespace(draw=random.random, pick=random.randint, normal=numpy.random.normal, made=torch.default_generator)
    before = kept_outside(held, None)
    random.random(), numpy.random.normal(), torch.rand(1)
    assert kept_outside(held, None) == before


def test_a_corpus_on_a_disk_is_not_copied_into_memory(tmp_path, monkeypatch):
    """An idea's own loader has one, of 1.5 GB, in each rank; a text of it stayed as it was, twice. Of an array in memory a part."""
    monkeypatch.setattr(launch.unsaved, "own_modules", lambda *_: {})
    monkeypatch.setattr(launch.unsaved, "checksum", lambda octets: f"{len(octets)}")
    (tmp_path / "corpus.bin").touch()
    os.truncate(tmp_path / "corpus.bin", 1 << 34)
    read, changed = (numpy.memmap(tmp_path / "corpus.bin", numpy.uint16, mode) for mode in ("r", "r+"))
    held = numpy.zeros(10**6, numpy.uint16)
    found = kept_outside(SimpleNamespace(read=read, changed=changed, held=held, text="x" * 10**6), None)
    assert found["manager.read"].split() == found["manager.changed"].split() == ["(8589934592,)"]
    assert found["manager.held"].startswith("(1000000,) ") and int(found["manager.held"].split()[1]) <= 2 << 16
    assert len(found["manager.text"]) < 40


def test_a_parameter_of_some_stages_alone_is_refused_before_the_first_step(shards, tmp_path, monkeypatch, capsys):
    """The run ended in a traceback where the stage that used it ended, with nothing saved."""

    class Idea(train_gpt.GPT):
        def __init__(self, *sizes, **more):
            super().__init__(*sizes, **more)
            self.mtp_scale = torch.nn.Parameter(torch.zeros(8))

        def forward(self, inputs, targets, cu_seqlens, schedule):
            loss = super().forward(inputs, targets, cu_seqlens, schedule)
            return loss * (1 + self.mtp_scale.sum()) if len(schedule.mtp_weights) > 1 or not self.training else loss

    row = {"mtp_scale": train_gpt.Adam("replicated")}
    monkeypatch.setattr(train_gpt, "GPT", Idea)
    monkeypatch.setattr(train_gpt, "PARAM_TABLE", train_gpt.PARAM_TABLE | row)
    for order in ("SCATTER_ORDER", "WORK_ORDER"):
        monkeypatch.setattr(train_gpt, order, (*getattr(train_gpt, order), *row))
    message = "error: mtp_scale: no gradient at step 4: every parameter takes part in every step; one that does nothing by 0"
    ends_with(capsys, options(shards, tmp_path, save_every=1), message, code=1)
    assert "step:" not in (tmp_path / "logs" / "run.txt").read_text().rpartition("=" * 100)[2]
    monkeypatch.setattr(train_gpt, "warm_up", lambda *_: None)  # an idea's own, say
    ends_with(capsys, options(shards, tmp_path), "error: mtp_scale: no gradient: every parameter", code=1)


def test_a_rules_state_that_changes_its_kind_is_found_before_the_first_step(shards, tmp_path, monkeypatch, capsys):
    """An idea's that counts its steps in a tensor: a traceback."""
    update = train_gpt.Adam.update

    def counted(self, rows, grad, state, now):
        state["step"] = int(state["step"])
        update(self, rows, grad, state, now)
        state["step"] = torch.tensor(state["step"])

    monkeypatch.setattr(train_gpt.Adam, "update", counted)
    said = "state.scalars.step is Tensor, here float: updates must keep initial_state's names, types and shapes, for checkpoints"
    ends_with(capsys, options(shards, tmp_path), f"error: {said}", code=1)


def test_a_parameter_of_some_passes_of_a_step_is_not(shards, tmp_path, monkeypatch):
    """As of a layer that is dropped by chance."""

    class Idea(train_gpt.GPT):
        passes = itertools.count()

        def __init__(self, *sizes, **more):
            super().__init__(*sizes, **more)
            self.extra = torch.nn.Parameter(torch.zeros(8))

        def forward(self, *given):
            loss = super().forward(*given)
            return loss * (1 + self.extra.sum()) if not self.training or next(self.passes) % 2 else loss

    row = {"extra": train_gpt.Adam("replicated")}
    monkeypatch.setattr(train_gpt, "GPT", Idea)
    monkeypatch.setattr(train_gpt, "PARAM_TABLE", train_gpt.PARAM_TABLE | row)
    for order in ("SCATTER_ORDER", "WORK_ORDER"):
        monkeypatch.setattr(train_gpt, order, (*getattr(train_gpt, order), *row))
    main(options(shards, tmp_path))


def test_a_buffer_that_an_update_changes_is_refused(shards, tmp_path, monkeypatch):
    """An average of weights in a buffer: it changes in no pass."""

    class Averaging(train_gpt.TrainingManager):
        def step_optimizers(self, step):
            super().step_optimizers(step)
            self.model.average.lerp_(self.model.lm_head.detach(), 0.1)

    def build_with_average(*args):
        manager = build(*args)
        manager.model.register_buffer("average", manager.model.lm_head.detach().clone())
        return manager

    monkeypatch.setattr(train_gpt, "TrainingManager", Averaging)
    monkeypatch.setattr(train_gpt, "build", build_with_average)
    with pytest.raises(AgreedError, match="^passes or updates change average: neither a checkpoint"):
        train_gpt.train(tiny_settings(shards, tmp_path), RANKS)


@pytest.mark.parametrize("given", [{"tail_averages": True}, {"grad_dtype": "float32", "dtype": "bfloat16"}])
def test_the_recipe_keeps_no_state_that_no_checkpoint_holds(shards, tmp_path, capsys, given):
    train_gpt.train(tiny_settings(shards, tmp_path, **given), RANKS)
    assert "caution" not in capsys.readouterr().out


def test_all_random_numbers_of_the_first_weights_are_the_seeds(shards, tmp_path):
    def drawn(seed: int) -> list[float]:
        numpy.random.seed(None), random.seed()
        first = build(tiny_settings(shards, tmp_path, seed=seed), RANKS).model.embed
        return [first.sum().item(), numpy.random.rand(), random.random()]

    assert drawn(1) == drawn(1) and not {*drawn(1)} & {*drawn(2)}


@pytest.mark.parametrize("first_step", [0, 5])
def test_warm_up_runs_every_shape_that_training_uses(shards, tmp_path, monkeypatch, first_step):
    """From the first step on: what lies behind a resumed run is not run again."""
    h = tiny_settings(shards, tmp_path, save_every=5, keep_checkpoints=9)
    manager = build(h, RANKS)
    shapes = []

    def record(module, inputs):
        x, _, cu_seqlens, schedule = inputs
        windows = schedule.short_window, schedule.long_window, module.yarn.scale
        numbers = *windows, schedule.max_doc_len  # a graph holds them
        shapes.append((module.training, len(x), len(cu_seqlens), len(schedule.mtp_weights), *numbers))

    manager.max_val_doc_len = train_gpt.check_shards(h).longest
    manager.model.register_forward_pre_hook(record)
    warm_up(manager, RANKS, first_step)  # on a CPU without the compiler
    trained = [s for s in shapes if s[0]]
    assert len(shapes) - len(trained) <= 1  # a validation takes longest
    shapes.clear()
    h.compile = True
    warm_up(manager, RANKS, first_step)
    warmed, h.compile = shapes.copy(), False
    assert trained == [s for s in warmed if s[0]]
    assert len(set(warmed)) == len(warmed)
    monkeypatch.setattr(train_gpt, "warm_up", lambda *_: None)
    monkeypatch.setattr(train_gpt, "build", lambda *_: manager)
    train_gpt.train(h, RANKS)
    if first_step:
        shapes.clear()
        resume = f"{tmp_path / 'logs' / 'run' / 'step_000005.pt'}"
        train_gpt.train(tiny_settings(shards, tmp_path, run_id="on", resume=resume), RANKS)
    else:
        del shapes[: len(warmed)]
    assert set(shapes) == set(warmed) and len({s[:2] for s in warmed}) > (1 if first_step else 3)
    assert len({(s[0], s[-1]) for s in warmed}) == 2  # one longest document for all of training, one for all validations


def test_training_after_a_warm_up_equals_training_without(shards, tmp_path, monkeypatch):
    main(options(shards, tmp_path, run_id="with", save_every=8))
    monkeypatch.setattr(train_gpt, "warm_up", lambda *_: None)
    main(options(shards, tmp_path, run_id="without", save_every=8))
    a, b = (read_checkpoint(tmp_path / "logs" / name / "step_000008.pt")["state"] for name in ("with", "without"))
    assert unequal(a, b) == []

"""Checkpoints: a resumed run ends with the bits of one that never stopped, on any number of ranks, after any kill."""

import errno
import functools
import hashlib
import io
import math
import os
import pickle
import random
import re
import shutil
import signal
import time
import zipfile
from collections import deque
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

import train_gpt
from common import ends_with, exit_code, forked, lines_of, normal, options, text_of, tiny_gpt, tiny_settings, unequal, wait_until
from launch.console import Stopped
from launch.nests import non_finite
from launch.signals import Signals
from launch.sources import resumption_note
from runtime import checkpoints
from runtime.checkpoints import CheckpointError, differences, load_whole_state, read_checkpoint, whole_state, write_checkpoint
from runtime.ranks import Ranks
from runtime.run import check_start
from train_gpt import Hyperparameters, TrainingManager, main

STEPS, SPLIT = 8, 5  # 6 scheduled and 2; the embedding splits after step 5
END = f"step_{STEPS:06d}.pt"
BF16 = dict(dtype="bfloat16", batch_unit=16)  # mantissas are in play; half the tokens: a CPU without units takes long for each


def losses(log: Path) -> list[float]:
    return [float(x) for x in re.findall(r"val_loss:(\d+\.\d+)", lines_of(log))]


# -----------------------------------------------------------------------------
# Resumption


@pytest.fixture(scope="module")
def unbroken(shards, tmp_path_factory):
    """The logs of a run in bf16, so that mantissas are in play, that saves at each step; and of one that saves at its end."""
    folder = tmp_path_factory.mktemp("unbroken")
    main(options(shards, folder, **BF16, save_every=1, keep_checkpoints=99))
    main(options(shards, folder, **BF16, save_every=STEPS, run_id="once"))
    return folder / "logs"


def test_saving_changes_nothing(unbroken):
    a, b = (read_checkpoint(unbroken / run / END) for run in ("run", "once"))
    assert unequal(a["state"], b["state"]) == []
    assert lines_of(unbroken / "run.txt") == lines_of(unbroken / "once.txt")
    assert [path.name for path in (unbroken / "once").iterdir()] == [END]


def test_the_clock_stands_while_a_checkpoint_is_written(shards, tmp_path, monkeypatch, no_warm_up):
    """Three saves of half a second more, which do not count; eight steps of 50 ms more, which do."""
    step_optimizers = TrainingManager.step_optimizers
    monkeypatch.setattr(checkpoints, "write_checkpoint", lambda *args: (time.sleep(0.5), write_checkpoint(*args)))
    monkeypatch.setattr(TrainingManager, "step_optimizers", lambda *args: (time.sleep(0.05), step_optimizers(*args)))
    started = time.monotonic()
    main(options(shards, tmp_path, save_every=3, val_every=0))
    saved = read_checkpoint(tmp_path / "logs" / "run" / END)
    assert 0.4 < saved["seconds"] < time.monotonic() - started - 1.5


@pytest.mark.parametrize("step", range(1, STEPS + 1))
def test_a_resumed_run_ends_like_one_that_never_stopped(unbroken, shards, tmp_path, step, no_warm_up):
    """From every step: stages 1, 2, 3 and the extension, tied, right after the split, odd and even, the end itself."""
    path = unbroken / "run" / f"step_{step:06d}.pt"
    main(options(shards, tmp_path, **BF16, save_every=5, resume=path))
    log = tmp_path / "logs" / "run.txt"
    if step < STEPS:
        a, b = (read_checkpoint(logs / "run" / END)["state"] for logs in (unbroken, tmp_path / "logs"))
        assert unequal(a, b) == []
        begin = read_checkpoint(path)["state"]
        assert a["same"]["tied"] is False and begin["same"]["tied"] == (step <= SPLIT)
        assert bool(begin["partial"][0]) == (step % 2 == 1)
    assert lines_of(log) == lines_of(unbroken / "run.txt")
    assert f"\nresumed at step {step} from {path}, with the same source\n" in log.read_text().split("=" * 100 + "\n")[1]
    times = [int(t) for t in re.findall(r"train_time:(\d+)ms", log.read_text().split("=" * 100 + "\n")[2])]
    assert times == sorted(times)


def test_an_idea_that_draws_resumes_to_the_same_bits(shards, tmp_path, monkeypatch, no_warm_up):
    """Dropout, or a depth by chance: the numbers of a step, and of a validation, are its own, whatever came before."""
    drawn = lambda branch: torch.nn.functional.dropout(branch, 0.1) + branch * random.random() + branch * np.random.rand()
    monkeypatch.setattr(train_gpt, "residual_add", lambda x, branch: x + drawn(branch))
    seeds, seed_random = [], train_gpt.seed_random
    monkeypatch.setattr(train_gpt, "seed_random", lambda *numbers: (seeds.append(numbers), seed_random(*numbers)))
    one, two = tmp_path / "one", tmp_path / "two"
    main(options(shards, one, save_every=4, keep_checkpoints=9, seed=5))
    assert {*seeds} == {(5,), *((5, step, 0) for step in range(STEPS + 1))}  # the last: of the validation
    main(options(shards, two, save_every=4, seed=5, resume=one / "logs" / "run" / "step_000004.pt"))
    assert lines_of(one / "logs" / "run.txt") == lines_of(two / "logs" / "run.txt")
    ends = [read_checkpoint(folder / "logs" / "run" / END)["state"] for folder in (one, two)]
    assert unequal(*ends) == []


@pytest.mark.parametrize("numbers", [(6, 2, 0), (5, 3, 0), (5, 2, 1)], ids=["seed", "step", "rank"])
def test_each_number_of_a_seed_makes_others(numbers):
    """Of PyTorch, Python and NumPy. That a run of another seed ended otherwise told nothing: its first weights are others."""
    drawn = lambda *numbers: (train_gpt.seed_random(*numbers), torch.rand(1).item(), random.random(), np.random.rand())[1:]
    assert drawn(5, 2, 0) == drawn(5, 2, 0) and not {*drawn(5, 2, 0)} & {*drawn(*numbers)}


PACES = {  # which parameters an idea's step updates, whatever the schedule says; from where it is resumed
    "Adam late": (lambda step, do_adam: do_adam and step > 4, 4),
    "Adam in each step": (lambda step, do_adam: True, 3),
    "Adam every third": (lambda step, do_adam: step % 3 == 2, 4),
}


@pytest.mark.parametrize("pace", PACES)
def test_an_idea_that_steps_otherwise_than_its_schedule_says_resumes(shards, tmp_path, monkeypatch, no_warm_up, pace):
    """Its checkpoints were written, and refused: the gradients that wait in them were not those of the schedule."""

    class Paced(TrainingManager):
        def step_optimizers(self, step):
            current = train_gpt.step_schedule(step, self.h)
            self.optimizer.step(updates(step, current.do_adam))
            if step == self.split_step:
                self.optimizer.split_tied()

    updates, step = PACES[pace]
    monkeypatch.setattr(train_gpt, "TrainingManager", Paced)
    one, two = tmp_path / "one", tmp_path / "two"
    main(options(shards, one, save_every=step, keep_checkpoints=9))
    main(options(shards, two, save_every=step, resume=one / "logs" / "run" / f"step_{step:06d}.pt"))
    ends = [read_checkpoint(folder / "logs" / "run" / END)["state"] for folder in (one, two)]
    assert unequal(*ends) == []


def test_an_idea_of_before_whose_layout_takes_a_step_alone_resumes(shards, tmp_path, monkeypatch, no_warm_up):
    """A copy of the script as it was in November's first weeks ended in a TypeError after a pull."""

    class Earlier(TrainingManager):
        def layout(self, step):
            return super().layout(step + 0)

    monkeypatch.setattr(train_gpt, "TrainingManager", Earlier)
    one, two = tmp_path / "one", tmp_path / "two"
    check_start(train_gpt, tiny_settings(shards, one), 1)
    main(options(shards, one, save_every=3, keep_checkpoints=9))
    main(options(shards, two, save_every=3, resume=one / "logs" / "run" / "step_000003.pt"))
    ends = [read_checkpoint(folder / "logs" / "run" / END)["state"] for folder in (one, two)]
    assert unequal(*ends) == []


def test_an_idea_with_state_of_its_own_resumes_if_its_layout_tells_of_it(shards, tmp_path, monkeypatch, capsys, no_warm_up):
    """Without that it was told at its first save, and had trained in vain."""

    class Counting(TrainingManager):
        seen = 0

        def step_optimizers(self, step):
            super().step_optimizers(step)
            self.seen += 2

        def load_state_dict(self, saved):
            super().load_state_dict(saved)
            self.seen = saved["same"]["seen"]

    class Whole(Counting):
        def _arrange(self, *args):
            state = super()._arrange(*args)
            return {**state, "same": {**state["same"], "seen": self.seen}}

    class Half(Counting):
        def state_dict(self):
            state = super().state_dict()
            return {**state, "same": {**state["same"], "seen": self.seen}}

    monkeypatch.setattr(train_gpt, "TrainingManager", Whole)
    main(options(shards, tmp_path, save_every=4, keep_checkpoints=9))
    main(options(shards, tmp_path / "two", save_every=4, resume=tmp_path / "logs" / "run" / "step_000004.pt"))
    ends = [read_checkpoint(folder / "logs" / "run" / END)["state"]["same"]["seen"] for folder in (tmp_path, tmp_path / "two")]
    assert ends == [16, 16]
    monkeypatch.setattr(train_gpt, "TrainingManager", Half)
    fault = "same.seen is in state_dict alone of Half: what a checkpoint shall hold goes into _arrange, which both take it from"
    large = dict(bigram_rows=1 << 20)  # looked at without its numbers
    for more in ({}, large):
        with pytest.raises(ValueError, match=fault):
            check_start(train_gpt, tiny_settings(shards, tmp_path, run_id="half", **more), 1)
    ends_with(capsys, options(shards, tmp_path, run_id="half"), fault, 1)  # before its first step, also by hand
    assert "step:" not in lines_of(tmp_path / "logs" / "half.txt")


class Now(NamedTuple):
    fast: float = 1.0


@pytest.mark.parametrize("value", [Now(), deque([1.0]), Fraction(1, 2), np.zeros(3), np.zeros(1), [Path("x")], {"x": {range(3)}}])
def test_a_value_that_no_checkpoint_gives_back_is_told_before_the_first_step(shards, tmp_path, monkeypatch, capsys, value):
    """All checkpoints were written, the run ended well, and none could be read."""
    keep(monkeypatch, value)
    kind = type(*value) if type(value) is list else type(next(iter(value.values()))) if type(value) is dict else type(value)
    fault = rf"same\.kept\S* is a {kind.__name__}, of .*Keeping's state: no checkpoint could be read again: give tensors, numbers"
    with pytest.raises(ValueError, match=fault):
        check_start(train_gpt, tiny_settings(shards, tmp_path, bigram_rows=1 << 20), 1)
    if kind is Now:  # by hand
        ends_with(capsys, options(shards, tmp_path), fault, 1)
        assert "step:" not in lines_of(tmp_path / "logs" / "run.txt")


@pytest.mark.parametrize("value", [math.inf, torch.tensor(-math.inf), {"best": [math.nan]}, np.float64(math.inf)])
def test_a_value_that_is_not_finite_is_told_before_the_first_step(shards, tmp_path, monkeypatch, capsys, value):
    """As the first best loss: the run ended at its first save, and said that earlier ones were good."""
    keep(monkeypatch, value)
    fault = r"same\.kept\S* is not finite, of .*Keeping's state: no checkpoint is saved of that: begin with a number, as 1e30"
    for more in {}, dict(bigram_rows=1 << 20):  # of a model on meta it may be on meta, too
        with pytest.raises(ValueError, match=fault):
            check_start(train_gpt, tiny_settings(shards, tmp_path, **more), 1)
    ends_with(capsys, options(shards, tmp_path), fault, 1)  # by hand
    assert "step:" not in lines_of(tmp_path / "logs" / "run.txt")


@pytest.mark.parametrize("part", ["sharded", "partial"])
def test_rows_of_no_parameter_are_told_before_the_first_step(shards, tmp_path, monkeypatch, capsys, part):
    """Every checkpoint was written, and none could be resumed: a KeyError in load_whole_state."""

    class Keeping(TrainingManager):
        def _arrange(self, states, pending):
            state = super()._arrange(states, pending)
            extra = {} if part == "partial" and len(pending) == len(self.optimizer.params) else {"ema": {"embed": torch.ones(2)}}
            return state | {part: state[part] | extra}

        def load_state_dict(self, saved):
            super().load_state_dict(saved | {part: {label: x for label, x in saved[part].items() if label != "ema"}})

    monkeypatch.setattr(train_gpt, "TrainingManager", Keeping)
    fault = f"{part}.ema is no parameter's, of .*Keeping's state: a rank's rows are known of those alone: keep it in the optimizer's"
    for more in {}, dict(bigram_rows=1 << 20):
        with pytest.raises(ValueError, match=fault):
            check_start(train_gpt, tiny_settings(shards, tmp_path, **more), 1)
    ends_with(capsys, options(shards, tmp_path), fault, 1)


def test_plain_values_are_given_back(shards, tmp_path, monkeypatch, no_warm_up):
    value = dict(enumerate([[np.float64(2)], (1, [2.0, None]), {1, 2}, b"x", torch.float32, {"x": np.int64(3)}]))
    keep(monkeypatch, value)
    main(options(shards, tmp_path, save_every=4))
    assert read_checkpoint(tmp_path / "logs" / "run" / END)["state"]["same"]["kept"] == value
    main(options(shards, tmp_path, save_every=4, resume="latest"))


def keep(monkeypatch: pytest.MonkeyPatch, value: Any) -> None:
    class Keeping(TrainingManager):
        def _arrange(self, *given):
            state = super()._arrange(*given)
            return state | {"same": state["same"] | {"kept": value}}

    monkeypatch.setattr(train_gpt, "TrainingManager", Keeping)


def test_a_dict_of_an_idea_that_changes_its_kinds_ends_the_run_at_its_first_save(shards, tmp_path, monkeypatch, capsys):
    """It was compared with itself: checkpoints were written, and none could be resumed."""
    stats, forward_backward = {"best": None}, train_gpt.forward_backward
    keep(monkeypatch, stats)
    monkeypatch.setattr(train_gpt, "forward_backward", lambda *given: stats.update(best=0.5) or forward_backward(*given))
    ends_with(capsys, options(shards, tmp_path, save_every=3), "state.same.kept.best is float, here NoneType: updates must keep", 1)
    assert not [*(tmp_path / "logs" / "run").glob("*.pt")]


def test_a_schedule_by_chance_resumes_to_the_same_bits(shards, tmp_path, monkeypatch, no_warm_up):
    """Windows that vary: they were drawn by the step before."""

    class Varied(TrainingManager):
        def advance_schedule(self, step):
            super().advance_schedule(step)
            self.current = self.current._replace(short_window=self.current.short_window * random.choice((1, 2, 3)))

    monkeypatch.setattr(train_gpt, "TrainingManager", Varied)
    one, two = tmp_path / "one", tmp_path / "two"
    main(options(shards, one, save_every=1, keep_checkpoints=9))
    main(options(shards, two, save_every=8, resume=one / "logs" / "run" / "step_000005.pt"))
    assert unequal(*(read_checkpoint(folder / "logs" / "run" / END)["state"] for folder in (one, two))) == []


def test_numpys_numbers_in_a_schedule_are_saved_as_pythons(shards, tmp_path, monkeypatch, no_warm_up):
    """As of an idea's table of stages: each checkpoint was written, and none could be read."""
    stages = tuple(stage._replace(batch=np.int64(stage.batch)) for stage in train_gpt.STAGES)
    monkeypatch.setattr(train_gpt, "STAGES", stages)
    main(options(shards, tmp_path, save_every=4))
    assert read_checkpoint(tmp_path / "logs" / "run" / END)["course"]["tokens in batches"].startswith("2 × 256 + ")


def test_moments_in_fp8_are_looked_at():
    x = torch.tensor([1.0, torch.nan]).to(torch.float8_e4m3fn)
    assert non_finite({"a": x, "b": x[:1], "c": torch.zeros(1, dtype=torch.uint8)}) == ["a"]


class WithModule(train_gpt.GPT):
    def __init__(self, *sizes, **more):
        super().__init__(*sizes, **more)
        self.extra = torch.nn.Linear(self.model_dim, self.model_dim, bias=False)

    def hidden_states(self, *args):
        x = super().hidden_states(*args)
        return x + 0.1 * self.extra(x)


def test_an_idea_with_a_module_resumes(shards, tmp_path, monkeypatch, no_warm_up):
    """Its label, extra.weight, has a dot: all of its checkpoints were refused, as another recipe's."""
    monkeypatch.setattr(train_gpt, "GPT", WithModule)
    monkeypatch.setitem(train_gpt.PARAM_TABLE, "extra.weight", train_gpt.Adam("sharded"))
    for order in ("SCATTER_ORDER", "WORK_ORDER"):
        monkeypatch.setattr(train_gpt, order, (*getattr(train_gpt, order), "extra.weight"))
    one, two = tmp_path / "one", tmp_path / "two"
    main(options(shards, one, save_every=3, keep_checkpoints=9))
    main(options(shards, two, save_every=3, resume=one / "logs" / "run" / "step_000003.pt"))
    ends = [read_checkpoint(folder / "logs" / "run" / END)["state"] for folder in (one, two)]
    assert unequal(*ends) == [] and ends[0]["same"]["parameters"]["extra.weight"].any()


def test_a_resumed_run_warms_up_without_a_trace(unbroken, shards, tmp_path):
    main(options(shards, tmp_path, **BF16, save_every=99, resume=unbroken / "run" / "step_000006.pt"))
    a, b = (read_checkpoint(logs / "run" / END) for logs in (unbroken, tmp_path / "logs"))
    assert unequal(a["state"], b["state"]) == []


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_before_the_update_of(step: int) -> None:
    step_optimizers = TrainingManager.step_optimizers
    TrainingManager.step_optimizers = lambda self, now: die() if now == step else step_optimizers(self, now)


def die_in_the_validation_of(step: int) -> None:
    validate = train_gpt.validate

    def mortal(now, manager, run):
        if now == step:
            run.heard_signal = lambda _: die()
        return validate(now, manager, run)

    train_gpt.validate = mortal


def die_before_the_last_checkpoint_has_its_name() -> None:
    replace = os.replace
    os.replace = lambda old, new: die() if Path(new).name == END else replace(old, new)


KILLS = {  # what kills, --save_every, and the step of the newest checkpoint
    "stage 1, tied": (functools.partial(die_before_the_update_of, 1), 1, 1),
    "stage 2, even": (functools.partial(die_before_the_update_of, 2), 1, 2),
    "at the split": (functools.partial(die_before_the_update_of, SPLIT), 1, SPLIT),
    "the extension": (functools.partial(die_before_the_update_of, 6), 5, 5),
    "in a validation": (functools.partial(die_in_the_validation_of, 4), 3, 3),
    "in a save": (die_before_the_last_checkpoint_has_its_name, 5, 5),
}


@pytest.mark.parametrize("moment", KILLS)
def test_a_killed_run_goes_on_under_its_own_log(unbroken, shards, tmp_path, moment, no_warm_up):
    """kill -9, then --resume=latest: the same log, as if nothing had been."""
    be_mortal, every, resumed = KILLS[moment]
    arguments = options(shards, tmp_path, **BF16, save_every=every, run_id="mine")
    child = forked(lambda: (be_mortal(), main(arguments)), tmp_path / "output")
    assert exit_code(child) == -signal.SIGKILL, text_of(tmp_path / "output")
    assert any((tmp_path / "logs").rglob("*.tmp")) == (moment == "in a save")
    main([argument for argument in arguments if "run_id" not in argument] + ["--resume=latest"])
    log = tmp_path / "logs" / "mine.txt"
    assert lines_of(log) == lines_of(unbroken / "run.txt")
    assert f"\nresumed at step {resumed} from " in log.read_text().split("=" * 100 + "\n")[1]
    names = sorted(path.name for path in (tmp_path / "logs" / "mine").iterdir())
    assert names == [f"step_{(STEPS - 1) // every * every:06d}.pt", END]


def test_a_checkpoint_whose_steps_took_other_batches_is_refused(unbroken, shards, tmp_path, monkeypatch, capsys, no_warm_up):
    """By changed source: documents would be trained on twice, or passed over. Later steps may take others."""
    path = unbroken / "run" / "step_000004.pt"
    at = lambda path, run_id: options(shards, tmp_path, **BF16, run_id=run_id, resume=path)
    first, *rest = train_gpt.STAGES
    less = first._replace(batch=4), *rest
    alike = first._replace(batch=12), rest[0]._replace(batch=12), rest[1]  # as many tokens, and yet other documents
    later = first, rest[0]._replace(batch=12), rest[1]
    for stages, was, here in (
        (less, "2 × 128 + 2 × 256 tokens in batches, here 2 × 64 + 2 × 256", "; its steps took 768 tokens, here 640"),
        (alike, "2 × 128 + 2 × 256 tokens in batches, here 4 × 192", ""),
        (later, "… + 2 × 256 tokens in batches, here … + 2 × 192", "; its steps took 768 tokens, here 640"),
    ):
        monkeypatch.setattr(train_gpt, "STAGES", stages)
        ends_with(capsys, at(path, "a"), re.escape(f"step_000004.pt cannot be resumed: its steps took {was}{here}\n"), 1)
    older = read_checkpoint(path)
    del older["course"]["tokens in batches"]  # as versions before held the sum alone
    write_checkpoint(tmp_path / "sum" / "step_000004.pt", older, keep=1)
    ends_with(capsys, at(tmp_path / "sum" / "step_000004.pt", "a"), "cannot be resumed: its steps took 768 tokens, here 640", 1)
    monkeypatch.setattr(train_gpt, "STAGES", (first, *rest[:-1], rest[-1]._replace(batch=rest[-1].batch // 2)))
    main(at(path, "b"))
    saved = read_checkpoint(path)
    settings = Hyperparameters(**saved["hyperparameters"])
    sizes = [train_gpt.step_schedule(step, settings).batch_tokens for step in range(4)]
    assert saved.pop("course")["tokens in batches"] == f"2 × {sizes[0]} + 2 × {sizes[2]}"
    write_checkpoint(tmp_path / "older" / "step_000004.pt", saved, keep=1)  # as older versions wrote them
    main(at(tmp_path / "older" / "step_000004.pt", "c"))


def test_a_script_of_before_that_counts_no_averages_saves_and_resumes(unbroken, shards, tmp_path, monkeypatch, no_warm_up):
    """Its first save was a traceback, after all the steps before it."""
    made = TrainingManager.__init__
    monkeypatch.setattr(TrainingManager, "__init__", lambda manager, *given: made(manager, *given) or delattr(manager, "ticks"))
    main(options(shards, tmp_path, **BF16, save_every=5))
    main(options(shards, tmp_path, **BF16, save_every=5, resume=tmp_path / "logs" / "run" / "step_000005.pt"))
    states = [read_checkpoint(folder / "run" / END)["state"] for folder in (unbroken, tmp_path / "logs")]
    assert not unequal(*states)


@pytest.mark.parametrize("latest", [True, False], ids=["from its own checkpoint", "from the same one again"])
def test_a_run_resumed_twice_has_the_notes_of_the_course_that_stays(unbroken, shards, tmp_path, latest, no_warm_up):
    path = unbroken / "run" / "step_000003.pt"
    main(options(shards, tmp_path, **BF16, save_every=5, resume=path))
    main(options(shards, tmp_path, **BF16, save_every=5, resume="latest" if latest else path))
    log = tmp_path / "logs" / "run.txt"
    notes = re.findall(r"\nresumed at step (\d) from ", log.read_text().split("=" * 100 + "\n")[1])
    assert notes == (["3", f"{STEPS}"] if latest else ["3"])
    assert lines_of(log) == lines_of(unbroken / "run.txt")


def test_a_note_on_a_resumption_says_which_sources_have_changed():
    rule, earlier = "=" * 100, "resumed at step 2 from p, with the same source"
    saved = {"step": 3, "sources": {"train_gpt.py": "a\nb\nc\n", "runtime/log.py": "x\n", "old.py": "1\n"}}
    saved["log"] = {"header": f"x\n{rule}\nPython\n{rule}"}
    now = {"idea.py": "a\nB\nc\n", "runtime/log.py": "x\n", "ideas/new.py": "2\n"}
    note = resumption_note(Path("p"), saved, now, ["Python", "machine"]).splitlines()
    assert note[:3] == ["resumed at step 3 from p, with changed source, 4 lines of difference", "Python", "machine"]
    assert [line for line in note[3:] if line[0] in "+-"] == [
        "--- script before", "+++ script now", "-b", "+B", "--- old.py before", "+++ old.py now", "-1",
        "--- ideas/new.py before", "+++ ideas/new.py now", "+2",
    ]  # fmt: skip
    renamed = dict(zip(("idea.py", "runtime/log.py", "old.py"), saved["sources"].values()))
    assert resumption_note(Path("p"), saved, renamed, []) == "resumed at step 3 from p, with the same source"
    there = resumption_note(Path("a\nb/p"), saved, renamed, [])  # on one line, by which tools find it
    assert there == "resumed at step 3 from a b/p, with the same source"
    for before, now, said in (
        (["read by its sources: LR='3'"], [], "; read by its sources: LR='3' before, none now"),
        ([], ["variables: X='1'"], "; variables: none before, X='1' now"),
        (["variables: X='1'", earlier], ["variables: X='1'"], "; variables: none before, X='1' now"),
        ([earlier, "read by its sources: LR='3'"], ["read by its sources: LR='3'"], ""),
    ):
        header = "\n".join(["x", rule, "Python", *before, rule])
        there = resumption_note(Path("p"), {**saved, "log": {"header": header}}, renamed, now).splitlines()[0]
        assert there == f"resumed at step 3 from p, with the same source{said}"


def test_another_runs_log_is_not_written_over(unbroken, shards, tmp_path, capsys):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "run.txt").write_text("mine\n")
    with pytest.raises(SystemExit):
        main(options(shards, tmp_path, **BF16, resume=unbroken / "run" / END))
    assert "run.txt is not the log of the checkpoint's run: move it, or give another --run_id" in capsys.readouterr().err
    assert (tmp_path / "logs" / "run.txt").read_text() == "mine\n"


def test_a_log_that_cannot_be_replaced_is_refused_at_the_start(unbroken, shards, tmp_path, capsys, monkeypatch):
    """As of another user in a folder like /tmp, or mounted by itself: the run trained to its end, and none of its checkpoints
    could be resumed."""
    shutil.copytree(unbroken, tmp_path / "logs")
    before, replace = (log := tmp_path / "logs" / "run.txt").read_bytes(), os.replace

    def busy(source: Path, target: Path) -> None:
        if f"{target}" == f"{log}":
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), f"{source}")
        replace(source, target)

    more = {**BF16, "save_every": 2, "resume": f"{tmp_path / 'logs' / 'run' / 'step_000006.pt'}"}
    settings = tiny_settings(shards, tmp_path, **more)
    check_start(train_gpt, settings, 1)
    assert log.read_bytes() == before
    monkeypatch.setattr(os, "replace", busy)
    said = "run.txt: Device or resource busy: it cannot be replaced by the log of the run that goes on: see to it, or give another"
    with pytest.raises(OSError, match=said):
        check_start(train_gpt, settings, 1)
    with pytest.raises(SystemExit):
        main(options(shards, tmp_path, **more))
    assert said in capsys.readouterr().err
    assert log.read_bytes() == before and not [*(tmp_path / "logs").glob("*.bankrun.tmp")]


@pytest.mark.parametrize("run_id", ["", "run"])
def test_latest_passes_over_a_damaged_checkpoint(unbroken, shards, tmp_path, capsys, run_id, no_warm_up):
    """Of all runs, or of the one that run_id names."""
    folder, other = tmp_path / "logs" / (run_id or "run"), tmp_path / "logs" / "run1"
    for step, place in ((3, folder), (7, folder), *([(8, other)] if run_id else [])):
        place.mkdir(parents=True, exist_ok=True)
        shutil.copy(unbroken / "run" / f"step_{step:06d}.pt", place)
    os.truncate(folder / "step_000007.pt", 20000)
    main(options(shards, tmp_path, **BF16, resume="latest", run_id=run_id))
    printed = capsys.readouterr()
    assert re.search(r"passed over .*step_000007.pt: damaged or cut short", printed.err)
    assert "resumed at step 3 from" in printed.out
    assert lines_of(tmp_path / "logs" / f"{run_id or 'run'}.txt") == lines_of(unbroken / "run.txt")


# -----------------------------------------------------------------------------
# World sizes


H = Hyperparameters(num_scheduled_iterations=9, num_extension_iterations=3, block_size=16, micro_batches=8)


def train_a_little(manager: TrainingManager, steps: int, rank: int) -> None:
    for step in range(steps):
        manager.advance_schedule(step)
        for label, param in manager.model.named_parameters():
            g = normal(f"g_{label}_{step}_{rank}", tuple(param.shape)).to(param.dtype)
            param.grad = g if param.grad is None else param.grad + g
        manager.step_optimizers(step)


def saved_on(rank: int, world_size: int, folder: str) -> None:
    for dtype in (torch.bfloat16, torch.float32):
        for steps in (4, 5, 9):
            manager = TrainingManager(tiny_gpt(dtype), H)
            train_a_little(manager, steps, rank)
            whole = whole_state(manager, Ranks(rank, world_size, torch.device("cpu")))
            if rank == 0:
                torch.save(whole, f"{folder}/{world_size}_{steps}_{dtype}.pt")


def converted_on(rank: int, world_size: int, folder: str, origins: list[int]) -> dict[int, list[str]]:
    """For each number of ranks in `origins`, everything that they saved, loaded by these and put together again: what is not
    the same."""
    ranks = Ranks(rank, world_size, torch.device("cpu"))
    return {origin: converted_from(origin, folder, ranks) for origin in origins}


def converted_from(origin: int, folder: str, ranks: Ranks) -> list[str]:
    faults = []
    for path in sorted(Path(folder).glob(f"{origin}_*.pt")):
        before = torch.load(path, weights_only=True)
        manager = TrainingManager(tiny_gpt(getattr(torch, path.stem.split("torch.")[1])), H)
        load_whole_state(manager, before, ranks)
        after = whole_state(manager, ranks)
        if ranks.first:
            parts = before.pop("partial"), after.pop("partial")
            faults += [f"{path.stem}: {name}" for name in unequal(before, after)]
            if ranks.world_size == origin:
                faults += [f"{path.stem}: partial {name}" for name in unequal(*parts)]
            for label in parts[0][0]:
                sums = [sum(part[label].double() for part in of.values()) for of in parts]
                dtype = parts[0][0][label].dtype
                # Sums of so many ranks are rounded once, for each rank here, if there are fewer of them than there were.
                bound = origin * 8 * torch.finfo(dtype).eps / 2 if ranks.world_size < origin else 0.0
                if not ((sums[0] - sums[1]).abs() <= bound * (sums[0].abs() + 1)).all():
                    faults.append(f"{path.stem}: sum of {label}")
    return faults


@pytest.fixture(scope="module")
def of_any_size(run_ranks, tmp_path_factory):
    """A folder of states after 4, 5 and 9 steps, in both dtypes, on 1, 2 and 4 ranks."""
    folder = str(tmp_path_factory.mktemp("sizes"))
    saved_on(0, 1, folder)
    for world_size in (2, 4):
        run_ranks(world_size, saved_on, folder)
    return folder


CONVERSIONS = [(1, 2), (1, 4), (2, 2), (2, 1), (2, 4), (4, 1), (4, 2)]  # from how many ranks to how many


@pytest.fixture(scope="module")
def converted(of_any_size, run_ranks):
    """{world size: what converted_on found on each of its ranks, which start once}."""
    origins = {world_size: [a for a, b in CONVERSIONS if b == world_size] for world_size in (1, 2, 4)}
    return {1: [converted_on(0, 1, of_any_size, origins[1])]} | {
        world_size: run_ranks(world_size, converted_on, of_any_size, origins[world_size]) for world_size in (2, 4)
    }


@pytest.mark.parametrize("origin, world_size", CONVERSIONS)
def test_a_checkpoint_serves_any_number_of_ranks(of_any_size, converted, origin, world_size):
    assert len(list(Path(of_any_size).glob(f"{origin}_*.pt"))) == 6
    assert [rank[origin] for rank in converted[world_size]] == [[]] * world_size


def test_the_layout_of_a_checkpoint_is_that_of_its_state(of_any_size):
    for path in Path(of_any_size).iterdir():
        world_size, steps, dtype = path.stem.split("_")
        layout = TrainingManager(tiny_gpt(getattr(torch, dtype.removeprefix("torch."))), H).layout(int(steps))
        layout["partial"] = dict.fromkeys(range(int(world_size)), layout["partial"])
        assert differences(torch.load(path, weights_only=True), layout) == []


def two_ranks_resume(rank: int, world_size: int, shards: Path, folder: Path) -> None:
    """Whole runs on two ranks: unbroken, from its step 3 (gradients are pending, tied) and 6 (split); one obeys a signal."""
    ranks, base = Ranks(rank, world_size, torch.device("cpu")), dict(save_every=1, keep_checkpoints=99)
    train_gpt.warm_up = lambda *_: None
    train_gpt.train(tiny_settings(shards, folder, **base), ranks)
    for step in (3, 6):
        resume = str(folder / "logs" / "run" / f"step_{step:06d}.pt")
        train_gpt.train(tiny_settings(shards, folder, **base, run_id=f"from{step}", resume=resume), ranks)
    signals = Signals()
    step_optimizers = TrainingManager.step_optimizers

    def interrupted(self, step):
        signals.received = signal.SIGTERM if (rank, step) == (1, 4) else signals.received  # after the step's report has left
        step_optimizers(self, step)

    TrainingManager.step_optimizers = interrupted
    try:
        train_gpt.train(tiny_settings(shards, folder, save_every=99, run_id="stopped"), ranks, signals)
        raise AssertionError("went on")
    except Stopped as stopped:
        assert stopped.args[1] == 143


@pytest.fixture(scope="module")
def on_two_ranks(run_ranks, shards, tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    run_ranks(2, two_ranks_resume, shards, folder)
    return folder / "logs"


def test_two_ranks_resume_bit_for_bit(on_two_ranks):
    unbroken = read_checkpoint(on_two_ranks / "run" / END)
    assert len(read_checkpoint(on_two_ranks / "run" / "step_000003.pt")["state"]["partial"][1]) == 10
    for step in (3, 6):
        assert unequal(unbroken["state"], read_checkpoint(on_two_ranks / f"from{step}" / END)["state"]) == []
        assert lines_of(on_two_ranks / f"from{step}.txt") == lines_of(on_two_ranks / "run.txt")


def test_two_ranks_stop_together_and_save(on_two_ranks):
    """A signal of one rank, received after the report of step 4 has left, is agreed in step 5."""
    stopped = read_checkpoint(on_two_ranks / "stopped" / "step_000006.pt")
    assert unequal(stopped["state"], read_checkpoint(on_two_ranks / "run" / "step_000006.pt")["state"]) == []
    assert lines_of(on_two_ranks / "stopped.txt").splitlines()[-1].startswith("stopped by SIGTERM after step:6/8: checkpoint ")


@pytest.mark.parametrize("step", [3, 4, 7])
def test_one_rank_goes_on_for_two(on_two_ranks, shards, tmp_path, step, no_warm_up):
    """fp32 sums in another order, through 5 steps: a difference in the fourth decimal of a loss at most."""
    main(options(shards, tmp_path, save_every=99, resume=on_two_ranks / "run" / f"step_{step:06d}.pt"))
    assert losses(tmp_path / "logs" / "run.txt") == pytest.approx(losses(on_two_ranks / "run.txt"), abs=2e-3)
    assert list(read_checkpoint(tmp_path / "logs" / "run" / END)["state"]["partial"]) == [0]


# -----------------------------------------------------------------------------
# Safe on disk


def test_fifty_kills_at_random_moments_of_a_save_lose_nothing(tmp_path):
    """kill -9 within a save or between two, every other time while a file is being written: the newest checkpoint is
    whole, and no older than the last one reported."""
    generator = random.Random(0)
    payload = {f"{i}": normal(f"x{i}", (400_000,)) for i in range(4)}  # 6.4 MB
    folder, reports, in_a_save = tmp_path / "run", tmp_path / "reports", 0
    folder.mkdir()
    reports.touch()

    def save_for_ever() -> None:
        step = int(reports.read_text().split()[-1]) + 1 if reports.stat().st_size else 1
        with open(reports, "a", buffering=1) as file:
            while True:
                write_checkpoint(folder / f"step_{step:06d}.pt", {"run_id": "run", "step": step, "state": payload}, keep=2)
                print(step, file=file)
                step += 1

    def reported(more_than: int) -> bool:
        return reports.stat().st_size > more_than

    for i in range(50):
        before = reports.stat().st_size
        child = forked(save_for_ever, tmp_path / "output")
        wait_until(functools.partial(reported, before))
        if i % 2:
            wait_until(lambda: any(folder.glob("*.tmp")), pause=0.0001)
        time.sleep(generator.uniform(0, 0.002 if i % 2 else 0.06))
        os.kill(child, signal.SIGKILL)
        assert exit_code(child) == -signal.SIGKILL
        in_a_save += any(folder.glob("*.tmp"))
        saved = read_checkpoint(checkpoints.checkpoints(folder)[0])
        assert unequal({**saved, "step": 0}, {"run_id": "run", "step": 0, "state": payload}) == []
        assert saved["step"] >= int(reports.read_text().split()[-1])
        assert len(checkpoints.checkpoints(folder)) in (2, 3) or saved["step"] < 3
    assert in_a_save >= 5, f"only {in_a_save} of the kills met a file in the making"


@pytest.fixture
def small_file(tmp_path):
    path = tmp_path / "run" / "step_000001.pt"
    path.parent.mkdir()
    write_checkpoint(path, {"step": 1, "weights": {"embed": normal("embed", (4, 3))}, "name": "run"}, keep=1)
    return path


@hypothesis_settings(max_examples=300)
@given(data=st.data())
def test_a_damaged_checkpoint_is_found(tmp_path_factory, data):
    """Bytes changed, cut off, inserted: the only outcomes are the content that was saved, and a clear error."""
    path = tmp_path_factory.getbasetemp() / "damaged" / "step_000001.pt"
    path.parent.mkdir(exist_ok=True)
    saved = {"step": 1, "state": {"weights": normal("embed", (4, 3))}}
    write_checkpoint(path, saved, keep=1)
    whole = path.read_bytes()
    broken = data.draw(damaged(whole))
    path.write_bytes(broken)
    if broken == whole:
        assert unequal(read_checkpoint(path), saved) == []
    else:
        with pytest.raises(CheckpointError, match=r"step_000001.pt: (not a checkpoint|damaged or cut short)"):
            read_checkpoint(path)


@st.composite
def damaged(draw, whole: bytes) -> bytes:
    at = draw(st.integers(0, len(whole) - 1))
    some = draw(st.binary(max_size=8))
    kind = draw(st.sampled_from(["change", "cut", "insert", "drop", "other"]))
    if kind == "other":
        return some
    if kind == "cut":
        return whole[:at]
    if kind == "insert":
        return whole[:at] + some + whole[at:]
    return whole[:at] + (some if kind == "change" else b"") + whole[at + max(1, len(some)) :]


@hypothesis_settings(max_examples=200)
@given(data=st.data())
def test_a_forged_checkpoint_loads_or_is_refused(tmp_path_factory, data):
    """Damage under a fitting checksum: a dict of plain types and tensors, or a clear error; nothing else gets through."""
    path = tmp_path_factory.getbasetemp() / "forged" / "step_000001.pt"
    path.parent.mkdir(exist_ok=True)
    write_checkpoint(path, {"step": 1, "state": {"embed": normal("embed", (4, 3))}}, keep=1)
    forge(path, data.draw(damaged(path.read_bytes()[len(checkpoints.MAGIC) + 32 :])))
    try:
        found = read_checkpoint(path)
    except CheckpointError as error:
        assert re.search(r"step_000001.pt(: holds| cannot be resumed: .* is a tensor out of place)", str(error))
    else:
        assert isinstance(found, dict)


def forge(path: Path, payload: bytes) -> None:
    path.write_bytes(checkpoints.MAGIC + hashlib.sha256(payload).digest() + payload)


def test_what_would_become_more_in_memory_than_in_its_file_is_not_read(tmp_path):
    """7.6 MB of a compressed archive took 2.2 GiB."""
    torch.save({"state": torch.zeros(10**6)}, plain := io.BytesIO())
    with zipfile.ZipFile(plain) as records, zipfile.ZipFile(small := io.BytesIO(), "w", zipfile.ZIP_DEFLATED) as packed:
        for record in records.infolist():
            packed.writestr(record.filename, records.read(record))
    forge(tmp_path / "step_000001.pt", small.getvalue())
    with pytest.raises(CheckpointError, match="holds what cannot be loaded: ValueError: compressed records, as torch.save makes none"):
        read_checkpoint(tmp_path / "step_000001.pt")
    forge(tmp_path / "step_000001.pt", plain.getvalue())
    assert read_checkpoint(tmp_path / "step_000001.pt")["state"].numel() == 10**6


class Act:
    """Makes a folder when it is unpickled."""

    def __init__(self, folder: Path):
        self.folder = folder

    def __reduce__(self):
        return os.mkdir, (f"{self.folder}",)


@pytest.mark.parametrize("dump", [torch.save, pickle.dump], ids=["torch.save", "pickle"])
def test_nothing_is_unpickled_that_could_act(tmp_path, small_file, dump: Callable):
    buffer = io.BytesIO()
    dump({"step": 1, "state": Act(tmp_path / "acted")}, buffer)
    forge(small_file, buffer.getvalue())
    with pytest.raises(CheckpointError, match="holds what cannot be loaded"):
        read_checkpoint(small_file)
    assert not (tmp_path / "acted").exists()

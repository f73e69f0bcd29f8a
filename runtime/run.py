"""Start, pauses and stop of a run: what stands around the recipe's loop and is not timed."""

import dataclasses
import gc
import math
import pickle
import signal
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import Any, Self

import torch
import torch.distributed as dist

from data.loader import FetchedAhead, tokens_taken
from data.shards import check_free, keep_lock, lock_run, unlock_run, whole_file
from launch.console import RunError, Stopped, encoded, tell
from launch.machine import check_common, checksum, checksums, end_of_run, peak_memory
from launch.nests import differences, map_tensors, non_finite, ticks
from launch.signals import FAULT, Signals, while_saving
from launch.sources import Sources, check_unused, resumption_note
from launch.steps import Steps, saved_steps
from launch.unsaved import check_names, kept_outside, warm_up_traces
from runtime import checkpoints
from runtime.log import Clock, Log, StepReport, log_header, step_line
from runtime.ranks import Ranks


class Run:
    """One run of a script, from its start or a checkpoint's step to its log's last line.
    In a with block, all ranks call, in order: open, restore, start_clock, ahead; for each step paused, where must_pause or the
    recipe wants to, then report_loss before its last backward pass, agree_on_loss before its update, end_step after it; at last
    finish. settings: a dataclass with log_dir, run_id, resume, save_every, keep_checkpoints and total_iterations. manager: what
    checkpoints.py needs, batch_tokens(step), and live_tensors(): {"weights", "gradients", "buffers": {label: tensor}}."""

    def __init__(self, settings: Any, ranks: Ranks, signals: Signals, sources: Sources):
        self.settings, self.ranks, self.signals, self.sources = settings, ranks, signals, sources
        self.steps, self.clock, self.first_step, self.total = Steps(ranks.rank), Clock(ranks.device), 0, settings.total_iterations
        self.resumed: dict[str, Any] | None = None  # the checkpoint's content
        self.pending: StepReport | None = None  # on a GPU, of a step that is launched and not yet through
        self.faults, self.unsaved, self.locks = [], "", []  # data that fail on this rank; on the first: a failed save, the lock
        self.at_end: Callable = lambda: ""  # called by all ranks once they are through, or have agreed to stop: what is lost

    def __enter__(self) -> Self:
        self.signals.before_end = lambda: self.__exit__(Stopped)
        return self

    def __exit__(self, error: type | None, value: BaseException | None = None, *_: object) -> None:
        gc.unfreeze()  # for another run of this process, and as what ends with the process has not leaked
        end = end_of_run(self, error, value)
        with suppress(IndexError):  # a signal that ends this process is here too, in another thread: one of both has the lock
            unlock_run(self.locks.pop())
        if end is not value:
            raise end from value

    def open(self, manager: Any, shards: dict[str, str], facts: list[str]) -> None:
        """Check that all ranks do the same, the checkpoint to resume, the room for new ones; open the log. Raises AgreedError.
        shards: names and contents; the resumed run's must be the same. facts: more lines for the log's environment."""
        s, ranks, self.manager, self.shards, path = self.settings, self.ranks, manager, shards, None
        self.logged, run_id = ranks.on_all(self.sources.of_run), f"{time.strftime('%Y%m%d-%H%M%S')}-{uuid.uuid4().hex[:8]}"
        same = {f"--{x}": value for x, value in dataclasses.asdict(s).items() if x not in ("data", "log_dir")} | shards
        self.sources.keep_folder(s)
        weights, self.buffers = (checksums(f"the first {x}", manager.live_tensors().get(x, {})) for x in ("weights", "buffers"))
        ranks.check_same(same | {x: checksum(encoded(text)) for x, text in self.logged.items()} | weights | self.buffers)
        if s.resume:
            there = checkpoints.checkpoints(Path(s.log_dir), "*")
            path, saved = ranks.on_all(checkpoints.find_checkpoint, s.resume, s.log_dir, s.run_id)
            ranks.on_all(checkpoints.check_fits, path, saved, s, shards, manager)
            self.resumed, self.first_step, self.clock.before, run_id = saved, saved["step"], saved["seconds"], saved["run_id"]
        ranks.check_same({"the checkpoint": f"{path} at step {self.first_step}"})
        s.run_id = s.run_id or run_id
        self.folder, self.saved_steps = Path(s.log_dir) / s.run_id, saved_steps(s, self.first_step)
        ranks.on_all(lambda: ranks.first and self.locks.append(lock_run(Path(s.log_dir, f"{s.run_id}.lock"), tell)))
        new = s.resume == checkpoints.LATEST and {*checkpoints.checkpoints(path.parent)} - {*there}
        ranks.raise_together(RunError(f"run {s.run_id} has saved a checkpoint meanwhile: start again") if new else None)
        ranks.on_all(*(check_unused, Path(s.log_dir, f"{s.run_id}.txt"), path, s, whole_file) if ranks.first else (str,))
        self.layout, self.outside = map_tensors(lambda x: x, manager.layout(1)), kept_outside(manager, self.sources)  # copies
        room = checkpoints.check_room, self.folder, self.layout, ranks.world_size, s.keep_checkpoints
        ranks.on_all(*(*room, len(self.saved_steps)) if ranks.first and s.save_every else (str,))
        facts.append("shards: " + ", ".join(f"{x!a} {text[-8:]}" for x, text in sorted(shards.items()) if "CRC-32" in text))
        facts = self.sources.facts(self.logged, ranks, s, facts)
        header = resumption_note(path, saved, self.logged, facts) if s.resume else log_header(self.logged, facts)
        self.log = ranks.on_all(Log, ranks, Path(s.log_dir, f"{s.run_id}.txt"), header, saved["log"] if s.resume else None)
        self.log.show(f"log: {self.log.path}" + (f"\n{header.splitlines()[0]}" if s.resume else ""))
        compiled = getattr(s, "compile", False) or ranks.device.type == "cuda"
        self.log.show(f"warm-up: every shape{', compiled: minutes' if compiled else ' of training'}")

    def restore(self, again: Callable[[int], None] | None = None) -> None:
        """The checkpoint's state, if any, into the manager's. Raises AgreedError. again: warm_up_traces'; none of older scripts."""
        self.log.show(warm_up_traces(self.ranks, again, self.buffers, self.outside, self.manager, self.sources))
        if self.resumed:
            checkpoints.load_whole_state(self.manager, self.resumed["state"], self.ranks)
            self.resumed = None  # as large as the model with its optimizer

    def start_clock(self) -> None:
        """From here on time counts, and a signal waits for its step. A full collection, of most of a second, comes before."""
        pickle.loads(pickle.dumps(torch.zeros(1)))  # imports what a save needs: the project or its packages may move
        gc.collect()
        gc.freeze()
        self.tokens, self.tokens_done = (sum(map(self.manager.batch_tokens, range(n))) for n in (self.total, self.first_step))
        self.signals.in_training, self.signals.trained, self.signals.has_peers = True, True, self.ranks.world_size > 1
        self.steps.begin(self.first_step, restored=self.resumed is None)
        self.clock.start()

    def ahead(self, open_batches: Callable[[], Iterator], share: int, steps: int) -> Iterator:
        """The micro-batches of so many steps, `share` in each, fetched a step early: if that fails on any rank, the run ends
        after the step before, saved. Of all the run's steps, each takes its share, or is refused. Called by all ranks."""
        batches = FetchedAhead(open_batches, share, steps, self.faults)
        if any(self.ranks.gather(self.faults)):
            self.signals.agreed = FAULT
            batches.close()
        return self.steps.counted(iter(batches), share, steps) if steps == self.total - self.first_step else iter(batches)

    def report_loss(self, step: int, loss: torch.Tensor) -> None:
        """Send this rank's loss, 0-dim, on its way to all, behind the step's last backward pass."""
        self.steps.report(step, loss, self.must_pause(step))
        self.current = StepReport(step, loss, self._stop(), self.ranks)

    def agree_on_loss(self, step: int) -> None:
        """Wait for all ranks' losses and signals. Raises AgreedError, naming parameters, for a loss that is not finite."""
        self.steps.agree(step)
        loss, self.signals.agreed = self.current.read()
        if not math.isfinite(loss):
            fault = f"the training loss is {loss} at step {step}: stopped before its update; {self._not_finite(loss)}"
            self.ranks.raise_together(RunError(f"{fault}; lower the learning rate or look at the last change"))

    def end_step(self) -> None:
        """Write the step's line; on a GPU that of the step before, which the device is through with."""
        self.steps.end()
        self.current.end()
        self._write_pending()
        self.pending = self.current
        self.current.on_gpu or self._write_pending()

    def _write_pending(self) -> None:
        if self.pending is None:
            return
        done, self.pending = self.pending, None
        done.wait()
        seconds, number = self.signals.pace = self.clock.read(), done.step + 1
        self.tokens_done += self.manager.batch_tokens(done.step)
        left, speed = int(seconds * (self.tokens / self.tokens_done - 1)), self.tokens_done / seconds
        live = f"step {number}/{self.total}  loss {done.loss:.4f}  {speed:,.0f} tokens/s  {left // 60}:{left % 60:02d} left"
        self.log.progress(step_line(number, self.total, seconds), live)

    def must_pause(self, step: int) -> bool:  # for a checkpoint, due before `step`, or as all ranks agreed to stop
        return bool(self.signals.agreed) or step in self.saved_steps

    @contextmanager
    def paused(self, step: int) -> Iterator[None]:
        """The clock stands. Between steps: saves if that is due; stops, before or after the block, once all ranks agreed to.
        Within another pause it is none of its own."""
        if self.clock.started is None:
            yield
            return
        self._write_pending()
        self.clock.stop()
        self.signals.pausing, between = True, self.steps.are_before(step)
        if between and step in self.saved_steps and not self.signals.agreed:
            self.saved_steps.remove(step)  # due no more
            self._save(step)
        between and self._stop_if_agreed(step)
        try:
            yield
            between and self._stop_if_agreed(step)
        finally:  # also where a script goes on after an error of its block
            self.signals.pausing = False
            self.clock.start()

    def _stop(self) -> int:
        return self.signals.received or FAULT * bool(self.faults)

    def heard_signal(self, loss: torch.Tensor) -> bool:
        """Within a pause: has any rank received a signal, or bad data? loss: any 0-dim tensor on the ranks' device."""
        _, self.signals.agreed = StepReport(0, loss, self._stop(), self.ranks).read()
        return bool(self.signals.agreed)

    def log_validation(self, step: int, loss: float) -> None:
        """Write a validation's line, unless it was cut short. Raises AgreedError for what is not finite or not common."""
        if not self.signals.agreed:
            loss = self.steps.validation(step, loss)
            self.ranks.check_same({f"the validation loss of step {step}": f"{loss!r}"})
            if culprits := self._not_finite(loss):
                self.ranks.raise_together(RunError(f"the validation loss is {loss} at step {step}: stopped; {culprits}"))
            check_common(self.ranks, self.log.write, "weights", self.manager.live_tensors()["weights"], f"at step {step}")
            self.log.write(step_line(step, self.total, self.clock.read(), loss))

    def _not_finite(self, loss: float) -> str:  # labels of weights, or else of gradients, on any rank; empty if all is finite
        for kind, tensors in self.manager.live_tensors().items():
            if bad := set().union(*self.ranks.gather(non_finite(tensors))):
                return f"not finite: the {kind} of {', '.join(label for label in tensors if label in bad)}"
        return "" if math.isfinite(loss) else "weights and gradients are finite"

    @while_saving
    def _save(self, step: int) -> str:
        """What became of a checkpoint, in words: a full disk does not end the run. Raises AgreedError for infinities, NaN."""
        path, state = self.folder / f"step_{step:06d}.pt", checkpoints.whole_state(self.manager, self.ranks, self.log.write)

        def write() -> str:
            self.locks[:] = map(keep_lock, self.locks)
            if bad := non_finite(state):
                earlier = "; earlier ones are good" * any(checkpoints.checkpoints(self.folder))
                raise ValueError(f"not finite at step {step}: {', '.join(bad)}: stopped, not saved{earlier}")
            kinds = differences({**state, "partial": {}}, {**self.layout, "partial": {}}, "state.")
            if kinds := kinds or self.manager.contradictions(state, step):
                raise ValueError(f"{'; '.join(kinds[:3])}: updates must keep initial_state's kinds; stopped, not saved")
            s, log = self.settings, {"header": self.log.header, "lines": "".join(self.log.lines)}
            saved = {"run_id": s.run_id, "step": step, "seconds": self.clock.before, "log": log, "shards": self.shards}
            course = {**tokens_taken(self.manager.batch_tokens, step), **ticks(self.manager, step)}
            saved |= {"hyperparameters": dataclasses.asdict(s), "sources": self.logged, "course": course, "state": state}
            try:
                checkpoints.write_checkpoint(path, saved, s.keep_checkpoints)
                self.unsaved = ""
            except (OSError, MemoryError) as error:
                self.unsaved = f"no checkpoint of step {step}: {path}: {getattr(error, 'strerror', '') or repr(error)}"
                self.log.write(self.unsaved)
            return self.unsaved or f"checkpoint {path}"

        return self.ranks.on_first(write)

    def _stop_if_agreed(self, step: int) -> None:
        """Save, tell, and raise Stopped after a signal, AgreedError after a fault."""
        if not (agreed := self.signals.agreed):
            return
        kept = self._save(step) if self.settings.save_every else "no checkpoint, as --save_every=0"
        faults = [f"rank {rank}: {fault[0]}" for rank, fault in enumerate(self.ranks.gather(self.faults)) if fault]
        name = "bad data" if agreed == FAULT else signal.Signals(agreed).name
        message = f"stopped by {name} after step:{step}/{self.total}: {'; '.join(filter(None, [kept, *faults[:1], self.at_end()]))}"
        self.log.write(message)
        self.log.close()
        self.ranks.raise_together(RunError(message) if agreed == FAULT else None)
        raise Stopped(message, 128 + agreed)

    def finish(self, sample: Callable[[], str] | None = None) -> None:
        """The log's last lines, and a sample, if any, which no rank waits for. Raises RunError if something is lost."""
        self._write_pending()
        self.steps.check_made(self.total)
        self.signals.in_training, lost = False, self.at_end()
        self.log.write(peak_memory(self.ranks.device))
        if sample and self.ranks.first:
            try:
                self.log.write(f"sample, after a prompt from the validation shard:\n{sample()}")
            except Exception as error:  # the run is through: a shard or an encoding that has gone meanwhile ends no good run
                self.log.write(f"no sample: {type(error).__name__}: {error}")
        self.log.close()
        cut = f"{self.log.path} lacks its last lines" * bool(self.log.unwritten)
        unmade = self.steps.lacks(self.total, self.must_pause(self.total)) * self.ranks.first
        if lacks := " and ".join(filter(None, [cut, self.unsaved, lost, *unmade])):
            raise RunError(f"all steps are done, but {lacks}")


def check_start(script: ModuleType, settings: Any, world_size: int) -> None:
    """Raise ValueError or OSError for what one process can know before the ranks start; they check it again, together.
    script: with build, and check_shards, called last for a new run. settings: checked."""
    from torch.testing._internal.distributed.fake_pg import FakeStore  # a group of any size, of which one process is there

    s = dataclasses.replace(settings, **{name: False for name in ("compile", "fp8_head") if hasattr(settings, name)})
    dim, *sizes = (getattr(s, x, 0) for x in ("model_dim", "bigram_rows", "vocab_size", "max_tokens"))
    large = torch.cuda.is_available() or dim * max(256 * dim, *sizes) > 1 << 24  # numbers: no memory holds every size
    place = torch.device("meta" if large else "cpu")  # meta's import takes longer than to build what is small
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    try:
        with place:
            manager = script.build(s, Ranks(0, world_size, place))
    finally:
        dist.destroy_process_group()
    check_names(manager, numbers=not large)
    run_id, path, first = s.run_id, None, 0
    if s.resume:
        path, saved = checkpoints.find_checkpoint(s.resume, s.log_dir, s.run_id)
        checkpoints.check_fits(path, saved, settings, script.check_shards(s).shards, manager)
        run_id, first = run_id or saved["run_id"], saved["step"]
    if run_id:
        check_free(Path(s.log_dir, f"{run_id}.lock"))
        check_unused(Path(s.log_dir, f"{run_id}.txt"), path, s, whole_file)
    folder, odd = Path(s.log_dir, run_id if s.save_every else ""), manager.layout(1)
    checkpoints.check_room(folder, odd if s.save_every else {}, world_size, s.keep_checkpoints, len(saved_steps(s, first)))
    s.resume or script.check_shards(s)

"""Start, pauses and stop of a run: what stands around the recipe's loop and is not timed."""

import dataclasses
import math
import signal
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from runtime import checkpoints
from runtime.log import Clock, Log, StepReport, environment, log_header, peak_memory, step_line
from runtime.ranks import Ranks, RunError, Signals, Stopped
from runtime.sources import Sources


class Run:
    """One run of a script, from its start or a checkpoint's step to its log's last line.

    All ranks call, in order: open, restore, start_clock; for each step paused, where must_pause or the recipe wants to, then
    report_loss before its last backward pass, agree_on_loss before its update, end_step after it; at last finish. settings: a
    dataclass with log_dir, run_id, resume, save_every, keep_checkpoints and total_iterations. manager: what checkpoints.py
    needs, batch_tokens(step), and live_tensors(): {"weights" and "gradients": {label: tensor}}.
    """

    def __init__(self, settings: Any, ranks: Ranks, signals: Signals, sources: Sources):
        self.settings, self.ranks, self.signals, self.sources = settings, ranks, signals, sources
        self.clock = Clock(ranks.device)
        self.first_step, self.total = 0, settings.total_iterations
        self.resumed: dict[str, Any] | None = None  # the checkpoint's content
        self.pending: StepReport | None = None  # on a GPU, of a step that is launched and not yet through

    def open(self, manager: Any, shards: dict[str, int], facts: list[str]) -> None:
        """Find and check the checkpoint to resume, check the room for new ones, open the log. Raises AgreedError.

        shards: names and bytes; the resumed run's must be the same. facts: lines for the log's environment.
        """
        s, ranks, self.manager, self.shards = self.settings, self.ranks, manager, shards
        run_id, path = f"{time.strftime('%Y%m%d-%H%M%S')}-{uuid.uuid4().hex[:8]}", None
        if s.resume:
            path, saved = ranks.on_all(checkpoints.find_checkpoint, s.resume, s.log_dir, s.run_id)
            ranks.on_all(checkpoints.check_fits, path, saved, dataclasses.asdict(s), shards)
            ranks.on_all(checkpoints.check_usable, path, saved, manager, self.total)
            self.resumed, self.first_step, self.clock.before, run_id = saved, saved["step"], saved["seconds"], saved["run_id"]
        ranks.check_same(f"{path} at step {self.first_step}")
        s.run_id = s.run_id or run_id
        self.folder = Path(s.log_dir) / s.run_id
        room = (checkpoints.check_room, self.folder, manager.layout(0), s.keep_checkpoints)
        ranks.on_all(*room if ranks.first and s.save_every else (str,))
        here, sources = environment(ranks, self.sources.script, s, facts), self.sources.imported()
        header = checkpoints.resumption_note(path, saved, sources, here) if s.resume else log_header(sources, here)
        self.log = ranks.on_all(Log, ranks, Path(s.log_dir, f"{s.run_id}.txt"), header, saved["log"] if s.resume else None)
        self.log.show(f"log: {self.log.path}" + (f"\n{header.splitlines()[0]}" if s.resume else ""))

    def restore(self) -> None:
        """The checkpoint's state, if one is resumed, into the manager's model and optimizer."""
        if self.resumed:
            checkpoints.load_whole_state(self.manager, self.resumed["state"], self.ranks)
            self.resumed = None  # as large as the model with its optimizer

    def start_clock(self) -> None:
        """From here on time counts, and a signal waits for the end of its step."""
        self.tokens, self.tokens_done = (sum(map(self.manager.batch_tokens, range(n))) for n in (self.total, self.first_step))
        self.signals.in_training, self.signals.has_peers = True, self.ranks.world_size > 1
        self.clock.start()

    def report_loss(self, step: int, loss: Tensor) -> None:
        """Send this rank's loss, 0-dim, on its way to all, behind the step's last backward pass."""
        self.current = StepReport(step, loss, self.signals.received, self.ranks)

    def agree_on_loss(self, step: int) -> None:
        """Wait for all ranks' losses and signals. Raises AgreedError, naming parameters, for a loss that is not finite."""
        loss, self.signals.agreed = self.current.read()
        if not math.isfinite(loss):
            fault = f"the training loss is {loss} at step {step}: stopped before its update; {self._name_non_finite()}"
            self.ranks.raise_together(RunError(f"{fault}; lower the learning rate or look at the last change"))

    def end_step(self) -> None:
        """Write the step's line; on a GPU that of the step before, which the device is through with."""
        self.current.end()
        self._write_pending()
        self.pending = self.current
        if not self.current.on_gpu:
            self._write_pending()

    def _write_pending(self) -> None:
        if self.pending is None:
            return
        done, self.pending = self.pending, None
        done.wait()
        seconds, number = self.clock.read(), done.step + 1
        self.tokens_done += self.manager.batch_tokens(done.step)
        left, speed = int(seconds * (self.tokens / self.tokens_done - 1)), self.tokens_done / seconds
        live = f"step {number}/{self.total}  loss {done.loss:.4f}  {speed:,.0f} tokens/s  {left // 60}:{left % 60:02d} left"
        self.log.progress(step_line(number, self.total, seconds), live)

    def must_pause(self, step: int) -> bool:
        """Is a checkpoint due before `step`, or a signal to be obeyed?"""
        return bool(self.signals.agreed) or self._saves(step)

    def _saves(self, step: int) -> bool:
        every = self.settings.save_every
        return every > 0 and step > self.first_step and (step % every == 0 or step == self.total)

    @contextmanager
    def paused(self, step: int) -> Iterator[None]:
        """The clock stands. Saves if that is due; raises Stopped, before or after the block, once all ranks agreed to."""
        self._write_pending()
        self.clock.stop()
        if self._saves(step) and not self.signals.agreed:
            self._save(step)
        self._obey_signal(step)
        yield
        self._obey_signal(step)
        self.clock.start()

    def heard_signal(self, loss: Tensor) -> bool:
        """Within a pause: has any rank received a signal? loss: any 0-dim tensor on the ranks' device."""
        _, self.signals.agreed = StepReport(0, loss, self.signals.received, self.ranks).read()
        return bool(self.signals.agreed)

    def log_validation(self, step: int, loss: float) -> None:
        """Write a validation's line, unless a signal cut it short. Raises AgreedError for numbers that are not finite."""
        if not self.signals.agreed:
            if (culprits := self._name_non_finite()) or not math.isfinite(loss):
                self.ranks.raise_together(RunError(f"the validation loss is {loss} at step {step}: stopped; {culprits}"))
            self.log.write(step_line(step, self.total, self.clock.before, loss), console=True)

    def _name_non_finite(self) -> str:
        """Labels whose weights hold an infinity or NaN, or else whose gradients do, on any rank; empty if all is finite."""
        for kind, tensors in self.manager.live_tensors().items():
            if bad := set().union(*self.ranks.gather(checkpoints.non_finite_tensors(tensors))):
                return f"not finite: the {kind} of {', '.join(label for label in tensors if label in bad)}"
        return ""

    def _save(self, step: int) -> str:
        """What became of a checkpoint, in words: a full disk does not end the run. Raises AgreedError for infinities, NaN."""
        path, state = self.folder / f"step_{step:06d}.pt", checkpoints.whole_state(self.manager, self.ranks)

        def write() -> str:
            if bad := checkpoints.non_finite_tensors(state):
                raise ValueError(f"not finite at step {step}: {', '.join(bad)}: stopped, not saved; earlier ones are good")
            settings, log = self.settings, {"header": self.log.header, "lines": "".join(self.log.lines)}
            saved = {"step": step, "seconds": self.clock.before, "run_id": settings.run_id, "log": log, "shards": self.shards}
            saved |= {"hyperparameters": dataclasses.asdict(settings), "sources": self.sources.imported()}
            try:
                checkpoints.write_checkpoint(path, {**saved, "state": state}, settings.keep_checkpoints)
            except OSError as error:
                message = f"no checkpoint of step {step}: {path}: {error.strerror}"
                self.log.show(f"{message}: the run goes on")
                return message
            return f"checkpoint {path}"

        return self.ranks.on_all(write if self.ranks.first else str)

    def _obey_signal(self, step: int) -> None:
        if self.signals.agreed:
            kept = self._save(step) if self.settings.save_every else "no checkpoint, as --save_every=0"
            message = f"stopped by {signal.Signals(self.signals.agreed).name} after step:{step}/{self.total}: {kept}"
            self.log.write(message, console=True)
            self.log.close()
            self.ranks.leave_together()
            raise Stopped(message, 128 + self.signals.agreed)

    def finish(self, sample: Callable[[], str] | None = None) -> None:
        """A sample of the model's text, if any, and the log's last line."""
        self.signals.in_training = False
        if sample and self.ranks.first:
            self.log.write(f"sample, after a prompt from the validation shard:\n{sample()}", console=True)
        self.log.write(peak_memory(self.ranks.device), console=True)
        self.log.close()
        self.ranks.leave_together()

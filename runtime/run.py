"""A run around the recipe's loop: clock, log, checkpoints, and the end that signals or faults bring."""

import copy
import fcntl
import gc
import itertools
import math
import random
import re
import signal
import time
import uuid
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from numbers import Number
from pathlib import Path
from typing import Any, Self

import numpy
import torch
import torch.distributed as dist
from torch import Tensor

from data.loader import fetch_ahead, validation_bytes
from runtime import checkpoints, checks
from runtime.checkpoints import Checkpoint
from runtime.clock import Clock, seconds_since_start
from runtime.launch import SIGNALS, Signals
from runtime.log import Log, figures_text, log_header, machine_facts, peak_memory, settings_text
from runtime.ranks import AgreedError, Ranks, RunError, Stopped
from runtime.sources import RULE, Sources, below_path, changes

BAD_DATA = -1  # a reason to stop, besides the numbers of signals
SAVE = -2  # the run goes on, but saves first
REASONS = (*SIGNALS, BAD_DATA, SAVE)
CONTAINERS = (dict, list, set, deque)
STATE = (*CONTAINERS, tuple, Tensor, Number, type(None))  # in which a script counts or gathers


def seed_random(*numbers: int) -> None:
    """Seed PyTorch, Python and NumPy: an idea that draws random numbers repeats them after a resume."""
    seed = hash(numbers)
    torch.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed % 2**32)


def cache_graphs(sources: dict[str, str]) -> None:
    """Let PyTorch's cache on disk take graphs with autograd functions, as the model's.

    Its key is the graph that Dynamo traces, where an operator is a name. What that registers, a fake
    or a backward formula, and what these call becomes part of the key: all files but the script and
    the project's own that define no operator. Triton kernels are left out: they are called later."""
    from torch._functorch import config as functorch
    from torch.compiler import config as compiler

    functorch.autograd_cache_allow_custom_autograd_functions = True
    defines = r"(custom|triton)_op|register_(autograd|fake)|operator\(|library\.|Library\("
    kernel = r"(?m)^@triton\.jit\ndef .*\n([ \t)#].*\n|\n)*"
    apart = (next(iter(sources)), "data/", "runtime/", "sample.py")
    code = ""
    for path, text in sources.items():
        if not path.startswith(apart) or re.search(defines, text):
            code += re.sub(kernel, "", text)
    compiler.cache_key_tag = f"{zlib.crc32(code.encode()):08x}"


@contextmanager
def unchanged(names: dict[str, Any]) -> Iterator[None]:
    """At the end of the block the numbers, tensors and containers among a module's names are the same
    objects as before, with the same contents."""
    own = {x: value for x, value in names.items() if not x.startswith("__")}
    contents: dict[int, tuple[Any, Any]] = {}  # by id: an object and a copy

    def keep(x: Any) -> None:
        if isinstance(x, Tensor):
            contents[id(x)] = (x, x.detach().clone())
        elif isinstance(x, (*CONTAINERS, tuple)) and id(x) not in contents:
            contents[id(x)] = (x, copy.copy(x))
            for item in x.values() if isinstance(x, dict) else x:
                keep(item)

    keep(own)
    yield
    names.update({x: value for x, value in own.items() if isinstance(value, STATE)})
    for x, before in contents.values():
        if isinstance(x, Tensor):
            x.detach().copy_(before)
        elif isinstance(x, CONTAINERS):
            x.clear()
            (x.update if isinstance(x, (dict, set)) else x.extend)(before)


class LossReport:
    """The mean of all ranks' losses, and their reasons to stop, in one asynchronous all-reduce, which
    travels during the last backward pass. Every rank decides alike."""

    def __init__(self, step: int, loss: Tensor, reason: int, ranks: Ranks):
        """loss: 0-dim, of this rank; reason: one of REASONS, or 0."""
        self.step = step
        numbers = loss.new_zeros(1 + len(REASONS))
        numbers[0] = loss.detach() / ranks.world_size
        if reason:
            numbers[1 + REASONS.index(reason)].fill_(1)
        self.work = dist.all_reduce(numbers, async_op=True) if ranks.world_size > 1 else None
        self.numbers = numbers

    def receive(self) -> None:
        """Wait for the other ranks, on a GPU without its host. Comes before read."""
        if self.work:
            self.work.wait()
        self.arrived: torch.cuda.Event | None = None
        if self.numbers.is_cuda:
            on_host = torch.empty(len(self.numbers), pin_memory=True)
            self.numbers = on_host.copy_(self.numbers, non_blocking=True)
            self.arrived = torch.cuda.Event()
            self.arrived.record()

    def read(self) -> tuple[float, int]:
        """The loss, and the first of REASONS that a rank has, or 0."""
        if self.arrived:
            self.arrived.synchronize()
        loss, *flags = self.numbers.tolist()
        return loss, next(itertools.compress(REASONS, flags), 0)


class Run:
    """One run of a script, from its start or a checkpoint to its log's last line.

    In a with block, all ranks call: open, announce, timed_warm_up, restore, read_ahead; then in each
    step must_pause, save_or_stop, send_loss, check_loss, log_step; at the end finish. settings: a
    dataclass with the fields read below; an empty run_id is filled in. plan: NamedTuples with
    batch_tokens, of each step and of the last validation. manager: see runtime/checkpoints.py."""

    def __init__(
        self, settings: Any, plan: list, ranks: Ranks, signals: Signals, sources: Sources,
        resumed: Checkpoint | None = None,
    ):  # fmt: skip
        self.settings = settings
        self.plan = plan
        self.last_step = len(plan) - 1
        # Tokens before each step, and before the last validation.
        self.tokens = [0, *itertools.accumulate(now.batch_tokens for now in plan[:-1])]
        self.ranks = ranks
        self.signals = signals
        self.sources = sources
        self.clock = Clock(ranks.device)
        self.saves = settings.save_every > 0 or settings.save_minutes > 0
        self.resumed = resumed
        saved = resumed.content if resumed else {"step": 0, "seconds": 0.0}
        self.first_step = self.saved_step = saved["step"]
        self.clock.before = saved["seconds"]
        self.reason = 0  # to stop: one of REASONS, the same on all ranks
        self.due = False  # a checkpoint, by --save_minutes
        self.reports: list[LossReport] = []  # not read yet
        # Reports left unread while the host goes on: on a GPU it is a step ahead.
        self.ahead = int(ranks.device.type == "cuda")
        self.loss = math.nan  # the newest one read
        self.faults: list[str] = []  # what this rank could not read
        self.not_saved = ""  # the last save's error
        self.log: Log | None = None
        self.lock: Any = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, _: object) -> None:
        self.signals.in_training = False
        gc.unfreeze()
        if self.log and isinstance(error, Exception) and not isinstance(error, Stopped):
            self.log.write(f"error: {type(error).__name__}: {error}".partition("\n")[0], False)
        if self.lock:
            Path(self.lock.name).unlink(missing_ok=True)
            self.lock.close()

    # Before step 0

    def open(self, manager: Any, shards: dict[str, str], facts: list[str]) -> None:
        """Check what all ranks must have in common, what is resumed, and the disk; open the log.
        shards: contents by name. facts: lines for the log. Raises AgreedError."""
        s = self.settings
        ranks = self.ranks
        self.shards = shards
        self.logged = self.sources.imported()
        same = {name: value for name, value in vars(s).items() if name not in ("data", "log_dir")}
        same |= {x: zlib.crc32(text.encode()) for x, text in self.logged.items()}
        ranks.check_same(same | shards | {"the first step": self.first_step})
        self.check_saved(manager)
        run_id = f"{time.strftime('%Y%m%d-%H%M%S')}-{uuid.uuid4().hex[:8]}"
        if self.resumed:
            path, saved = self.resumed
            run_id = saved["run_id"]
            diff = changes(saved["sources"], self.logged)
            if diff and s.resume == checkpoints.AUTO:
                raise AgreedError(
                    f"--resume=auto: the source has changed since {path}: give another --run_id, or "
                    f"--resume=latest to go on with the change"
                )
            ranks.on_all_ranks(checkpoints.check_fits, self.resumed, s, self.plan, shards, manager)
        s.run_id = ranks.gather(s.run_id or run_id)[0]
        log_path = Path(s.log_dir, f"{s.run_id}.txt")
        self.folder = log_path.with_suffix("")
        ranks.on_all_ranks(self._check_place, log_path, manager)

        read = [f"{x!a} {text[-8:]}" for x, text in sorted(shards.items()) if "CRC-32" in text]
        environment = [
            *machine_facts(ranks.device, ranks.world_size),
            *facts,
            "shards: " + ", ".join(read),
            f"{next(iter(self.logged))} {settings_text(s)}",
        ]
        header = log_header(self.logged, environment)
        lines = ""
        if self.resumed:
            source = "the same source"
            if diff:
                source = f"changed source, {len(diff)} lines of difference"
            note = f"resumed at step {self.first_step} from {path.name}, with {source}"
            lines = saved["log"]["lines"]
            before = saved["log"]["header"].removesuffix(RULE)
            header = before + "\n".join([note, *environment, *diff, RULE])
        self.log = ranks.on_all_ranks(Log, log_path, ranks.first, header, lines)
        self.log.show(f"log: {log_path}")
        if self.resumed:
            complete = self.first_step == self.last_step
            self.log.show(note + complete * ": all its steps are done, nothing is trained")

    def check_saved(self, manager: Any) -> None:
        """Raise AgreedError if checkpoints are asked for that would lack some of the state."""
        if self.saves or self.settings.resume:
            self.ranks.on_all_ranks(checks.check_saved, manager)

    def _check_place(self, log: Path, manager: Any) -> None:
        """On rank 0, raise ValueError or OSError if this run cannot write where it should."""
        if not self.ranks.first:
            return
        s = self.settings
        log.parent.mkdir(parents=True, exist_ok=True)
        lock = open(log.with_suffix(".lock"), "ab")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            raise ValueError(f"--run_id={s.run_id}: a run of this name is training now") from None
        self.lock = lock
        present = checkpoints.checkpoints(self.folder)
        if self.resumed and log.exists():
            own = self.resumed.content["log"]["header"].partition(f"\n{RULE}\n")[0]
            if not log.read_bytes().startswith(own.encode()):
                raise ValueError(f"{log} is not the log of the checkpoint's run: move it away")
        elif not self.resumed and present:
            raise ValueError(
                f"--run_id={s.run_id}: that run exists and has checkpoints: resume it with "
                f"--resume=latest, or give another --run_id"
            )
        elif log.exists():
            if s.resume != checkpoints.AUTO:
                raise ValueError(f"--run_id={s.run_id}: {log} exists: give another --run_id")
            aside = (log.with_suffix(f".cut{i}.txt") for i in itertools.count(1))
            log.rename(next(path for path in aside if not path.exists()))
        if self.saves:
            every = 1 if s.save_minutes else s.save_every
            coming = 1 + (self.last_step - self.first_step) // every
            files = min(coming, max(1, s.keep_checkpoints + 1 - len(present)))
            checkpoints.check_disk_space(self.folder, manager, self.ranks.world_size, files)

    def announce(self, manager: Any) -> None:
        """Show what the run will do, and whether it fits the GPU's memory. Nothing is compiled yet."""
        batches = [now.batch_tokens for now in self.plan[:-1]]
        device = self.ranks.device
        world_size = self.ranks.world_size
        places = "GPU" if device.type == "cuda" else "CPU rank"
        self.log.show(
            f"{len(batches):,} steps, {sum(batches):,} tokens on {world_size} {places}"
            f"{'s'[: world_size > 1]}; on any number they are the same tokens"
        )
        if device.type == "cuda":
            free = torch.cuda.mem_get_info(device)[0]
            free += torch.cuda.memory_reserved(device)  # by this process
            advice = checks.memory_advice(self.settings, manager, max(batches), world_size, free)
            if advice:
                self.log.show(advice)

    @contextmanager
    def timed_warm_up(self, script: dict[str, Any]) -> Iterator[None]:
        """script: the names of its module. What its code counts or gathers there is put back."""
        if self.settings.compile or self.ranks.device.type == "cuda":
            cache_graphs(self.logged)
            self.log.show("warm-up: every shape of the schedule, compiled: minutes")
        started = time.perf_counter()
        with unchanged(script):
            yield
        gc.collect()  # a compiled model has cycles: free it before the run's own is made
        self.log.show(f"warm-up: {time.perf_counter() - started:.0f} s")

    def restore(self, manager: Any) -> None:
        """Load the checkpoint to resume, if any, into the manager that is trained from here on."""
        self.manager = manager
        if self.resumed:
            state = self.resumed.content.pop("state")  # as large as the model with its optimizer
            checkpoints.load_whole_state(manager, state, self.ranks)
        parameters = sum(param.numel() for param in manager.model.parameters())
        self.log.show(f"{parameters:,} parameters, {self.ranks.world_size} ranks")
        self.signals.in_training = True
        self.saved_at = time.perf_counter()
        gc.collect()  # garbage of the warm-up, not within a step
        gc.freeze()

    # Data

    def read_ahead(self, batches: Iterator, per_step: int) -> Iterator:
        """The micro-batches, `per_step` in each step, read early. If reading fails on any rank, the
        run stops before the step that would need them, saved; here, before the first."""
        ahead = fetch_ahead(batches, per_step * (1 + self.ahead), self.faults)
        if any(self.ranks.gather(bool(self.faults))):
            self.reason = BAD_DATA
        return ahead

    # Within a step

    def _own_reason(self) -> int:
        return self.signals.received or (BAD_DATA if self.faults else 0)

    def send_loss(self, step: int, loss: Tensor) -> None:
        """Start to reduce a step's loss over the ranks. loss: 0-dim, per token, of this rank."""
        self.step = step
        minutes = (time.perf_counter() - self.saved_at) / 60
        is_due = self.ranks.first and 0 < self.settings.save_minutes <= minutes
        reason = self._own_reason() or is_due * SAVE
        self.reports.append(LossReport(step, loss, reason, self.ranks))

    def check_loss(self) -> None:
        """Before a step's update, after its backward pass. On a CPU its loss is read. A GPU's host is a
        step ahead: it reads the loss of the step before. Raises AgreedError if that is not finite."""
        self.reports[-1].receive()
        self._read_losses(self.ahead)

    def _read_losses(self, leave: int = 0) -> None:
        """Read all reports but the newest `leave`. Raises AgreedError."""
        while len(self.reports) > leave:
            report = self.reports.pop(0)
            self.loss, reason = report.read()
            self.due = reason == SAVE
            self.reason = 0 if self.due else reason
            if not math.isfinite(self.loss):
                self._end_with_loss(report.step)

    def _end_with_loss(self, step: int) -> None:
        """Raise AgreedError for a loss that is not finite. On a GPU the step's update has been made, so
        that nearly all weights hold NaN: none is named."""
        found = f"the training loss is {self.loss} at step {step}"
        if not self.ahead:
            found += f"; not finite: {self._not_finite() or 'the loss alone'}"
        advice = "lower the learning rate or look at the last change"
        raise AgreedError(f"{found}; {self._newest_checkpoint()}; {advice}")

    def _newest_checkpoint(self) -> str:
        found = checkpoints.checkpoints(self.folder)
        return f"the newest checkpoint is {found[0]}" if found else "there is no checkpoint"

    def _not_finite(self) -> str:
        """What holds infinities or NaN on any rank: weights, or else pending gradients, or else
        optimizer state. Empty: nothing."""
        optimizer = self.manager.optimizer
        state = [(label, x) for label, own in optimizer.state.items() for x in own.values()]
        kinds = {
            "weights": optimizer.params.items(),
            "gradients": optimizer.gradients().items(),
            "optimizer state": [(label, x) for label, x in state if isinstance(x, Tensor)],
        }
        for kind, tensors in kinds.items():
            own = {label for label, x in tensors if not x.isfinite().all()}
            bad = set().union(*self.ranks.gather(own))
            if bad:
                return f"the {kind} of {', '.join(sorted(bad))}"
        return ""

    def log_step(self, line: str) -> None:
        """Write a step's line. A terminal shows it as one live line, with the newest loss and the time
        left, by tokens."""
        done = self.step + 1
        seconds = self.clock.ms() / 1000
        left = int(seconds * (self.tokens[-1] / self.tokens[done] - 1))
        loss = "" if math.isnan(self.loss) else f" loss:{self.loss:.4f}"  # none read yet
        live = f"{line}{loss} {left // 60}:{left % 60:02d} left"
        self.log.write_step(line, live)

    # Between steps

    def must_pause(self, step: int) -> bool:
        """Whether a checkpoint is due before `step`, or all ranks have agreed to stop."""
        every = self.settings.save_every
        on_schedule = self.due or (every > 0 and step % every == 0)
        at_end = self.saves and step == self.last_step
        return bool(self.reason) or ((on_schedule or at_end) and step > self.first_step)

    def save_or_stop(self, step: int) -> None:
        """Save if that is due; the clock must be stopped. Raises Stopped after a signal, AgreedError
        after bad data, both saved first, if saving is on, and AgreedError for a loss that is not finite."""
        self._read_losses()
        if self.must_pause(step) and not self.reason:
            self.log.show(self._save(step))
        self.stop_if_signalled(step)

    def heard_signal(self) -> bool:
        """Whether a signal has reached any rank, or its data are bad. Called by all ranks."""
        reasons = (self.reason, *self.ranks.gather(self._own_reason()))
        self.reason = next(filter(None, reasons), 0)
        return bool(self.reason)

    def stop_if_signalled(self, step: int) -> None:
        """Raises as save_or_stop does, if a signal has arrived or data are bad."""
        if not self.reason:
            return
        saved = self._save(step) if self.saves else "no checkpoint, as --save_every=0"
        faults = enumerate(self.ranks.gather(self.faults))
        faults = [f"rank {rank}: {found[0]}" for rank, found in faults if found]
        name = "bad data" if self.reason == BAD_DATA else signal.Signals(self.reason).name
        parts = "; ".join([saved, *faults[:1]])
        message = f"stopped by {name} after step:{step}/{self.last_step}: {parts}"
        self.log.write(message, console=False)
        with suppress(OSError):  # a full disk: the message is on the console too
            self.log.close()
        if self.reason == BAD_DATA:
            raise AgreedError(message)
        raise Stopped(message, 128 + self.reason)

    def _save(self, step: int) -> str:
        """Save a checkpoint; what became of it, in words. A full disk does not end the run. Raises
        AgreedError for a state that is not finite, which a step with a finite loss can leave."""
        path = self.folder / f"step_{step:06d}.pt"
        if path.exists() and step == self.saved_step:
            return f"checkpoint {path}"
        bad = self._not_finite()
        if bad:
            newest = self._newest_checkpoint()
            raise AgreedError(f"not saved before step {step}: not finite: {bad}; {newest}")
        state = checkpoints.whole_state(self.manager, self.ranks)
        saved = {
            "run_id": self.settings.run_id,
            "step": step,
            "seconds": self.clock.before,
            "settings": dict(vars(self.settings)),
            "shards": dict(self.shards),
            "plan": [now._asdict() for now in self.plan[:step]],
            "sources": self.logged,
            "log": {"header": self.log.header, "lines": self.log.lines},
            "state": state,
        }

        def write() -> str:
            try:
                checkpoints.write_checkpoint(path, saved, self.settings.keep_checkpoints)
            except OSError as error:
                return f"no checkpoint of step {step}: {path}: {error.strerror}"
            return ""

        self.not_saved = self.ranks.gather(self.ranks.on_first(write))[0]
        self.saved_step = step
        self.due = False
        self.saved_at = time.perf_counter()
        if self.not_saved:
            self.log.write(self.not_saved, console=False)
        return self.not_saved or f"checkpoint {path}"

    # The end

    def finish(
        self, val_loss: float, matrices: tuple[Tensor, ...], sample: Callable[[], str]
    ) -> None:
        """The log's last lines: late imports, peak memory, sample, figures. val_loss: the last one, nats.
        matrices: those that multiply each token. Raises RunError if log or last checkpoint is lost."""
        self.signals.in_training = False
        for name, text in self.sources.imported().items():
            if name not in self.logged:
                self.log.write(f"{below_path(name, text)}\n{RULE}", console=False)
        peak, words = peak_memory(self.ranks.device)
        peak = max(self.ranks.gather(peak))
        self.log.write(words)
        if self.settings.sample_tokens and self.ranks.first:
            self.log.write(f"sample, after a prompt from the validation shard:\n{sample()}")
        if self.not_saved:
            raise RunError(f"all steps are done, but {self.not_saved}")
        if self.ranks.first:
            self.log.write(
                figures_text(self._figures(val_loss, matrices) | {"peak_memory_MiB": peak})
            )
        try:
            self.log.close()
        except OSError as error:
            raise RunError(f"all steps are done, but {error}") from error

    def _figures(self, val_loss: float, matrices: tuple[Tensor, ...]) -> dict[str, float]:
        """What programs read of a complete run, by name."""
        s = self.settings
        seconds = self.clock.before
        tokens = self.tokens[-1]
        figures = {"val_loss": val_loss}
        try:
            size = validation_bytes(s.data, s.val_tokens, s.encoding, s.vocab_size)
            figures["val_bpb"] = val_loss * s.val_tokens / math.log(2) / size
        except (ValueError, OSError) as error:
            self.log.show(f"no val_bpb: {error}")
        figures |= {"train_seconds": seconds, "total_seconds": seconds_since_start()}
        parameters = sum(param.numel() for param in self.manager.model.parameters())
        figures |= {"steps": self.last_step, "tokens_M": tokens / 1e6, "params_M": parameters / 1e6}
        figures["tokens_per_second"] = tokens / seconds
        device = self.ranks.device
        if device.type == "cuda" and "H100" in torch.cuda.get_device_name(device):
            # Of 989 TFLOP/s a GPU: a weight is a multiply and add, once forward and twice backward.
            flops = 6 * sum(x.numel() for x in matrices) * tokens / seconds
            figures["mfu_percent"] = 100 * flops / (989e12 * self.ranks.world_size)
        return figures

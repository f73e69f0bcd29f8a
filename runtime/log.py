"""The log and what stands in it: sources, environment, the clock's readings, step lines."""

import os
import sys
import time
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from data.shards import whole_file
from launch.console import console, encoded, live_line, printable
from launch.signals import STOPS
from launch.sources import RULE
from runtime.ranks import Ranks

BANNER = "-" * 40


def log_header(sources: dict[str, str], environment: list[str]) -> str:
    """The sources, exactly, each but the first after a banner with its path; then the environment; each part ends in a rule."""
    (_, script), *others = sources.items()
    files = (line for path, text in others for line in (BANNER, f"# {path}", BANNER, text))
    return "\n".join([script, *files, RULE, *environment, RULE])


def same_run(path: Path, log: dict[str, str]) -> tuple[str, str] | None:
    """A checkpoint's sources and environment, without later notes; None if the file at path is not its course's log or part."""
    sources, environment = log["header"].removesuffix(f"\n{RULE}").rsplit(f"\n{RULE}\n", 1)  # sources may hold such lines
    found = path.read_bytes().rstrip(b"\0") if path.is_file() else b""  # a machine that goes down can leave less, or NUL bytes
    begin, text = f"{sources}\n{RULE}\n", found.decode(errors="replace").rstrip("\ufffd")
    there, _, lines = text[len(begin) :].partition(f"\n{RULE}\n")
    if not all(x.startswith(y) or y.startswith(x) for x, y in ((text[: len(begin)], begin), (lines, log["lines"]))):
        return None
    return (sources, environment) if f"{environment}\n{RULE}".startswith(there) or len(lines) >= len(log["lines"]) else None


class Log:
    """A file on the first rank, nothing on the others. The console sees what is asked to; a terminal one live line.
    A resumed run's first line cuts its log where the checkpoint was made, with a note in the header. Lines that the disk does not
    take wait for the next try; told once, and the run goes on. A file that is deleted, replaced or changed is made again."""

    def __init__(self, ranks: Ranks, path: Path, header: str, resumed: dict[str, str] | None = None):
        """header: see log_header; resumed: a checkpoint's log, `header` then being the note. Raises OSError or ValueError."""
        self.quiet, self.live = not ranks.first, ranks.first and getattr(sys.stdout, "isatty", bool)()
        self.path, self.header, self.lines, self.unwritten, self.warned = path, header, [], b"", False
        self.place, self.size = (), 0  # of the file that this process has written: none yet
        if resumed and not self.quiet:
            if not (parts := same_run(path, resumed)):
                raise ValueError(f"{path} is not the log of the checkpoint's run: move it, or give another --run_id")
            self.header, self.lines = "\n".join([parts[0], RULE, parts[1], header, RULE]), [resumed["lines"]]
        elif not self.quiet:
            try:
                self._write_all()
            except OSError as error:
                raise OSError(f"{error.filename or path}: {error.strerror or error}: see to it, or give another --log_dir") from error

    def write(self, text: object, console: bool = True) -> None:  # a line of the log
        if self.quiet:
            return
        self.lines.append(encoded(f"{text}\n").decode().replace("\0", "\\0"))  # as a checkpoint compares it with the file
        self.unwritten += encoded(self.lines[-1])
        try:
            self._put()
        except OSError as error:
            if not self.warned:
                self.show(f"{self.path}: {error.strerror or error}: the run goes on, the log's lines wait for room")
            self.warned = True
        if console:
            self.show(f"{text}")

    def _put(self, compare: bool = False) -> None:
        there = os.stat(self.path) if self.path.exists() else None
        kept = there and (there.st_dev, there.st_ino, there.st_size) == (*self.place, self.size)
        if not kept or (compare and self.path.read_bytes() + self.unwritten != self._text()):
            return self._write_all()
        while self.unwritten:  # a full disk takes a part, then raises
            written = self.file.write(self.unwritten)
            self.size, self.unwritten = self.size + written, self.unwritten[written:]

    def _text(self) -> bytes:
        return encoded("".join([self.header, "\n", *self.lines]))

    def _write_all(self) -> None:  # a new file of what is in memory, whole or not at all
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(self.path) as file:
            file.write(self._text())
        self.file, self.unwritten = open(self.path, "ab", buffering=0), b""
        found = os.fstat(self.file.fileno())
        self.place, self.size = (found.st_dev, found.st_ino), found.st_size

    def show(self, text: str) -> None:  # any text for the console alone; a sample or a name cannot move its cursor
        if text and not self.quiet:
            console(("\r\x1b[K" if self.live else "") + printable(text))

    def progress(self, line: str, live: str) -> None:
        """A step's line: into the log; on a terminal as the live line, in a pipe as it is."""
        self.write(line, console=not self.live)
        if self.live:
            live_line(live)

    def close(self) -> None:
        if not self.quiet:
            with suppress(OSError):  # lines that wait are shown below
                self._put(compare=True)
                self.file.close()
        if self.unwritten:
            self.show(f"{self.path} lacks its last {len(self.unwritten)} bytes:\n{self.unwritten.decode(errors='replace')}")


def step_line(step: int, total: int, seconds: float, val_loss: float | None = None) -> str:
    """In the format of the public speedrun, github.com/KellerJordan/modded-nanogpt: its tools read our logs."""
    loss = "" if val_loss is None else f"val_loss:{val_loss:.4f} "
    return f"step:{step}/{total} {loss}train_time:{1000 * seconds:.0f}ms step_avg:{1000 * seconds / max(step, 1):.2f}ms"


class Clock:
    """Training time: what lies between start and stop, each on a synchronised device."""

    def __init__(self, device: torch.device):
        self.device, self.before, self.started = device, 0.0, None  # before: seconds until the last stop; None: it stands

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def start(self) -> None:
        self.synchronize()
        self.started = time.perf_counter()

    def stop(self) -> None:
        self.synchronize()
        self.before, self.started = self.read(), None

    def read(self) -> float:  # seconds; running, wait for the device first, or for the event of the step that is read
        return self.before + (0 if self.started is None else time.perf_counter() - self.started)


class StepReport:
    """What all ranks have to say of a step: the mean of their losses and their reasons to stop, in one asynchronous all-reduce of
    five numbers during the last backward pass, read before the update. The device never waits, all ranks decide alike, and a
    loss that is not finite never reaches the weights. On a GPU the step's end is waited for one step later."""

    def __init__(self, step: int, loss: Tensor, stop: int, ranks: Ranks):
        """loss: of this rank, 0-dim; stop: one of STOPS, or 0. Launches the reduction."""
        self.step, self.on_gpu, self.numbers = step, loss.is_cuda, loss.new_zeros(1 + len(STOPS))
        self.numbers[0] = loss.detach() / ranks.world_size
        if stop:
            self.numbers[1 + STOPS.index(stop)].fill_(1)
        self.work = dist.all_reduce(self.numbers, async_op=True) if ranks.world_size > 1 else None
        if self.on_gpu:
            self.sums, self.numbers = self.numbers, torch.empty(1 + len(STOPS), pin_memory=True)
            self.arrived, self.ended, aside = torch.cuda.Event(), torch.cuda.Event(), torch.cuda.Stream()
            aside.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(aside):  # the backward pass does not wait for other ranks
                if self.work:
                    self.work.wait()
                self.numbers.copy_(self.sums, non_blocking=True)
                self.arrived.record()

    def read(self) -> tuple[float, int]:
        """The loss, and the first of STOPS that any rank has, or 0: the same on all ranks."""
        if self.on_gpu:
            self.arrived.synchronize()
        elif self.work:
            self.work.wait()
        self.loss, *stops = self.numbers.tolist()
        return self.loss, next((stop for stop, ranks in zip(STOPS, stops) if ranks), 0)

    def end(self) -> None:  # the step's work is launched
        if self.on_gpu:
            self.ended.record()

    def wait(self) -> None:  # until the device is through with the step
        if self.on_gpu:
            self.ended.synchronize()

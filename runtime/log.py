"""The log and what stands in it: sources, environment, the clock's readings, step lines."""

import os
import platform
import re
import resource
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from data.shards import whole_file
from runtime.ranks import Ranks

RULE, BANNER = "=" * 100, "-" * 40


def log_header(sources: dict[str, str], environment: list[str]) -> str:
    """The sources, exactly, each but the first after a banner with its path; then the environment; each part ends in a rule."""
    (_, script), *others = sources.items()
    files = (line for path, text in others for line in (BANNER, f"# {path}", BANNER, text))
    return "\n".join([script, *files, RULE, *environment, RULE])


def environment(ranks: Ranks, script: str, settings: Any, facts: list[str]) -> list[str]:
    """Versions, machine, the recipe's own facts and the settings, a line each."""
    cpus, triton = Path("/proc/cpuinfo"), sys.modules.get("triton")
    name = re.search(r"^model name\s*: (.+)", cpus.read_text() if cpus.exists() else "", re.MULTILINE)
    cpu = name[1] if name else platform.processor() or "unknown"
    devices = [f"cpu: {cpu}, {os.cpu_count()} cores, {torch.get_num_threads()} threads a rank"]
    if ranks.device.type == "cuda":
        devices = [f"{i}: {torch.cuda.get_device_properties(i)}" for i in range(torch.cuda.device_count())]
    versions = f"PyTorch {torch.__version__}, CUDA {torch.version.cuda}, Triton {triton.__version__ if triton else 'none'}"
    machine = f"{platform.platform()}, {ranks.world_size} ranks"
    return [f"Python {sys.version}", versions, machine, *devices, *facts, f"{script} {settings}"]


class Log:
    """A file on the first rank, nothing on the others. The console sees what is asked to; a terminal one live line.

    A resumed run goes on in its log, cut where the checkpoint was made, with a note in the header. Lines that the disk does not
    take wait for the next try; that is told once, and the run goes on.
    """

    def __init__(self, ranks: Ranks, path: Path, header: str, resumed: dict[str, str] | None = None):
        """header: see log_header; resumed: a checkpoint's log, `header` then being the note. Raises OSError or ValueError."""
        self.quiet, self.live = not ranks.first, ranks.first and sys.stdout.isatty()
        self.path, self.header, self.lines, self.unwritten, self.warned = path, header, [], b"", False
        if self.quiet:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        if resumed:
            self.header, self.lines = self._annotated(resumed, header), [resumed["lines"]]
            with whole_file(path) as file:
                file.write(f"{self.header}\n{resumed['lines']}".encode())
        elif path.exists():
            raise ValueError(f"{path} is another run's log: move it, or give another --run_id or --log_dir")
        self.file = open(path, "ab" if resumed else "xb", buffering=0)
        if not resumed:
            self._put(f"{header}\n")

    def _annotated(self, resumed: dict[str, str], note: str) -> str:
        """The header with the note, and with those on earlier resumptions. Raises ValueError if the log is another run's."""
        sources, environment = resumed["header"].removesuffix(f"\n{RULE}").split(f"\n{RULE}\n", 1)
        if self.path.exists():
            parts = self.path.read_bytes().decode(errors="replace").split(f"\n{RULE}\n", 2)
            for old, new in ((parts[0], sources), (parts[2] if len(parts) == 3 else "", resumed["lines"])):
                if not old.startswith(new) and not new.startswith(old):  # a machine that goes down can leave less
                    raise ValueError(f"{self.path} is not the log of the checkpoint's run: move it, or give another --run_id")
            environment = parts[1] if len(parts) == 3 else environment
        return f"{sources}\n{RULE}\n{environment}\n{note}\n{RULE}"

    def write(self, text: str, console: bool = False) -> None:
        """A line of the log."""
        if self.quiet:
            return
        self.lines.append(f"{text}\n")
        try:
            self._put(self.lines[-1])
        except OSError as error:
            if not self.warned:
                self.show(f"{self.path}: {error}: the run goes on, the log's lines wait for room")
            self.warned = True
        if console:
            self.show(text)

    def _put(self, text: str) -> None:
        self.unwritten += text.encode()
        while self.unwritten:  # a full disk takes a part, then raises
            self.unwritten = self.unwritten[self.file.write(self.unwritten) :]

    def show(self, text: str) -> None:
        """For the console alone."""
        if not self.quiet:
            print(("\r\x1b[K" if self.live else "") + text, flush=True)

    def progress(self, line: str, live_line: str) -> None:
        """A step's line: into the log; on a terminal as the live line, in a pipe as it is."""
        self.write(line, console=not self.live)
        if self.live:
            print(f"\r\x1b[K{live_line}", end="", flush=True)

    def close(self) -> None:
        if not self.quiet:
            self.file.close()
        if self.unwritten:
            self.show(f"{self.path} lacks its last {len(self.unwritten)} bytes:\n{self.unwritten.decode()}")


def step_line(step: int, total: int, seconds: float, val_loss: float | None = None) -> str:
    """In the format of the public speedrun, github.com/KellerJordan/modded-nanogpt: its tools read our logs."""
    loss = "" if val_loss is None else f"val_loss:{val_loss:.4f} "
    return f"step:{step}/{total} {loss}train_time:{1000 * seconds:.0f}ms step_avg:{1000 * seconds / max(step, 1):.2f}ms"


def peak_memory(device: torch.device) -> str:
    if device.type == "cuda":
        allocated, reserved = (f(device) >> 20 for f in (torch.cuda.max_memory_allocated, torch.cuda.max_memory_reserved))
        return f"peak memory allocated: {allocated} MiB reserved: {reserved} MiB"
    return f"peak memory resident: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10} MiB"


class Clock:
    """Training time: what lies between start and stop, each on a synchronised device."""

    def __init__(self, device: torch.device):
        self.device, self.before, self.started = device, 0.0, 0.0  # before: seconds until the last stop

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def start(self) -> None:
        self.synchronize()
        self.started = time.perf_counter()

    def stop(self) -> None:
        self.synchronize()
        self.before = self.read()

    def read(self) -> float:
        """Seconds, running. Wait for the device first, or for the event of the step that is read."""
        return self.before + time.perf_counter() - self.started


class StepReport:
    """What all ranks have to say of a step, and its end.

    The mean of their losses and the signals they received travel in one asynchronous all-reduce of three numbers, during the
    last backward pass, and are read before the update: the device never waits, all ranks decide alike, and a loss that is not
    finite never reaches the weights. On a GPU the end is waited for one step later.
    """

    def __init__(self, step: int, loss: Tensor, received: int, ranks: Ranks):
        """loss: of this rank, 0-dim; received: a signal's number, or 0. Launches the reduction."""
        self.step, self.on_gpu, self.numbers = step, loss.is_cuda, loss.new_zeros(3)
        self.numbers[0] = loss / ranks.world_size
        if received:
            self.numbers[1 if received == signal.SIGINT else 2].fill_(1)
        self.work = dist.all_reduce(self.numbers, async_op=True) if ranks.world_size > 1 else None
        if self.on_gpu:
            self.sums, self.numbers = self.numbers, torch.empty(3, pin_memory=True)
            self.arrived, self.ended, aside = torch.cuda.Event(), torch.cuda.Event(), torch.cuda.Stream()
            aside.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(aside):  # the backward pass does not wait for other ranks
                if self.work:
                    self.work.wait()
                self.numbers.copy_(self.sums, non_blocking=True)
                self.arrived.record()

    def read(self) -> tuple[float, int]:
        """The loss, and the signal that any rank received, or 0: the same on all ranks."""
        if self.on_gpu:
            self.arrived.synchronize()
        elif self.work:
            self.work.wait()
        self.loss, interrupted, terminated = self.numbers.tolist()
        return self.loss, signal.SIGINT if interrupted else signal.SIGTERM if terminated else 0

    def end(self) -> None:
        """The step's work is launched."""
        if self.on_gpu:
            self.ended.record()

    def wait(self) -> None:
        """Until the device is through with the step."""
        if self.on_gpu:
            self.ended.synchronize()

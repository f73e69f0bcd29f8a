"""The clock of a run: what counts as training time."""

import os
import time
from pathlib import Path

import torch

IMPORTED = time.perf_counter()


class Clock:
    """Training time: what lies between start and stop, each on a synchronized device."""

    def __init__(self, device: torch.device):
        self.device = device
        self.before = 0.0  # seconds until the last stop
        self.started: float | None = None

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def start(self) -> None:
        self.started = self._now()

    def stop(self) -> None:
        self.before += self._now() - self.started
        self.started = None

    def ms(self) -> float:
        """Milliseconds so far. While the clock runs this is the host's time: a GPU may still be
        working on the last step."""
        running = 0.0 if self.started is None else time.perf_counter() - self.started
        return 1000 * (self.before + running)


def seconds_since_start() -> float:
    """Since this process began; where there is no /proc, since its imports."""
    stat = Path("/proc/self/stat")
    if not stat.exists():
        return time.perf_counter() - IMPORTED
    ticks = int(stat.read_text().rpartition(")")[2].split()[19])  # since the machine's start
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")

"""The clock of a run: what counts as training time."""

import time

import torch


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
        now = self._now()
        self.before += now - self.started
        self.started = None

    def ms(self) -> float:
        """Milliseconds so far. While the clock runs this is the host's time: a GPU may still be
        working on the last step."""
        running = 0.0 if self.started is None else time.perf_counter() - self.started
        return 1000 * (self.before + running)

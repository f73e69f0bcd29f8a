"""Signals, and a launcher that is gone: heard at any time, obeyed by all ranks at the end of a step."""

import contextlib
import functools
import os
import select
import signal
import stat
import threading
import time
from collections.abc import Callable
from typing import Any, Self

import torch.distributed as dist

from launch.console import RunError, guard_console, leave, tell

LAUNCHER = "BANKRUN_LAUNCHER"  # in the environment of start.py's ranks: it tells of signals and dead ranks, once for all
STOP_TIMEOUT = 25.0  # seconds for all ranks to end a step after a signal, less than a launcher's 30
STEPS_TO_STOP = 4  # or as many times what a step takes, if that is longer
PAUSE_TO_STOP = 300.0  # seconds for a pause's part between two looks, as a batch of a validation: no step's time tells its own
IN_TRAINING = "BANKRUN_IN_TRAINING"  # there too: the pipe into which a rank says + as it begins, - as it is through, 0 after it if it has not trained
BUSY = signal.SIGURG  # from a rank to start.py, which then waits on; what does not know it takes no notice
ONE_SIGNAL = 1.0  # seconds in which a signal that comes again is the same: a service manager's to all, and a launcher's copy
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
LOST = "lost another rank, which has died or hangs"
FAULT = -1  # beside their numbers: data that fail
STOPS = (*SIGNALS, FAULT)  # reasons to stop after the step


def lost_another(error: BaseException | None) -> bool:
    """Is the error that of a rank which waits for another one that has gone? gloo has no type of its own for it."""
    return isinstance(error, dist.DistError) or "gloo/transport" in str(error)


class Signals:
    """SIGTERM, SIGHUP and Ctrl-C, heard in a thread: the main one may be waiting for a rank that has gone.

    While `in_training`, the first one is only `received`: all ranks obey once they have `agreed`, at the end of a step. A
    second one, which the same within ONE_SIGNAL is not, or one at another time, ends the process at once, code 128 + signal.
    A launcher that is gone is a SIGTERM; a shell that started the process by hand may go.
    """

    def __init__(self):
        self.received, self.agreed, self.heard_at = 0, 0, 0.0  # a signal's number, one of STOPS; 0: none
        self.pace = 0.0, 1  # seconds that so many steps took
        self.before_end: Callable = lambda: None  # called before a signal ends this process at once
        self.in_training, self.saving, self.pausing, self.has_peers, parent = False, False, False, False, os.getppid()
        self.launched = os.environ.get(LAUNCHER) == f"{parent}"  # of another process: left in the environment by chance
        launched = self.launched or "TORCHELASTIC_RUN_ID" in os.environ
        self.launcher = parent if launched else None  # the id of the process without which this one ends
        self.trained = False  # or has begun to
        self.marks = int(os.environ.get(IN_TRAINING, -1)) if self.launched else -1

    def __enter__(self) -> Self:
        guard_console()  # before the pipe takes the numbers
        (self.heard, self.speak), self.previous = os.pipe(), {}
        if threading.current_thread() is threading.main_thread():  # no other can set handlers
            for number in SIGNALS:
                if signal.getsignal(number) != signal.SIG_IGN:  # as in the background of a shell, or after nohup
                    self.previous[number] = signal.signal(number, lambda *_: None)
            os.set_blocking(self.speak, False)
            self.previous_fd = signal.set_wakeup_fd(self.speak)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # start.py blocks Ctrl-C until now
        entered.append(self)
        self.thread = threading.Thread(target=self._listen, daemon=True, name="signals")
        self.thread.start()
        self._say(b"+")
        return self

    def _say(self, mark: bytes) -> None:
        with contextlib.suppress(OSError):  # it is closed
            if self.marks >= 0 and stat.S_ISFIFO(os.fstat(self.marks).st_mode):
                os.write(self.marks, mark)

    def __exit__(self, kind: type | None, error: BaseException | None, _: object) -> None:
        lost = lost_another(error)  # told while SIGTERM, which a launcher now sends, is heard
        bug = isinstance(error, Exception) and not isinstance(error, RunError)
        if self.launched and bug and (lost or os.environ.get("RANK") != "0"):
            self.in_training = False  # from here on a signal ends this rank, before it repeats what another has told
            time.sleep(0 if self.received else 5)
            if self.received:
                leave("", 1)
        if lost and bug:
            leave(f"error: rank {os.environ.get('RANK', 0)}: {LOST}: {error}", 1)
        entered.remove(self)
        through = self.launched and error is None  # about to leave: no signal makes another end of it
        for number, handler in self.previous.items():  # a launcher that sees another rank leave first sends one more
            after = signal.SIG_IGN if self.agreed and (self.has_peers or self.launched) else handler
            signal.signal(number, (lambda *_: None) if through else after)
        if self.previous:
            signal.set_wakeup_fd(self.previous_fd)
        self.in_training = False
        os.write(self.speak, b"\0")  # a forked child may hold this end open
        self.thread.join()
        os.close(self.speak)
        os.close(self.heard)
        self._say(b"-" if self.trained else b"-0")

    def _listen(self) -> None:
        poll = select.poll()
        poll.register(self.heard, select.POLLIN)
        while True:
            if poll.poll(1000 if self.launcher else None):
                if (number := os.read(self.heard, 1)[0]) == 0:
                    return
                if number not in self.previous or (number == signal.SIGHUP and self.received):
                    continue  # a terminal that closes may send several, as a shell passes them on
                name = signal.Signals(number).name
            elif os.getppid() != self.launcher:
                number, name, self.launcher = signal.SIGTERM, "the launcher is gone", None
            else:
                continue
            if self.received in (number, signal.SIGHUP) and time.monotonic() < self.heard_at + ONE_SIGNAL:
                continue
            if self.received or not self.in_training:
                why = f"{name}: ended at once; a launcher sends SIGTERM to all ranks when one of them has died"
                self._end("" if self.launched else why, 128 + number)
            self.received, self.heard_at = number, time.monotonic()
            if not self.launched:
                tell(f"{name}: ends after this step; a second one ends it at once")
            if self.has_peers or self.launched:
                threading.Thread(target=self._await_end, args=(number,), daemon=True).start()

    def _end(self, why: str, code: int) -> None:
        self.before_end()
        leave(why, code)

    def _await_end(self, number: int) -> None:
        """Give up on a step, or a part of a pause, that does not end. A checkpoint takes as long as its disk does, and one rank
        alone as its step: the launcher, which would end them, hears that they go on."""
        seconds, steps = self.pace
        patience = left = max(STOP_TIMEOUT, STEPS_TO_STOP * seconds / steps, PAUSE_TO_STOP * self.pausing)
        while left > 0 and self.in_training:
            time.sleep(STOP_TIMEOUT / 25)
            left -= STOP_TIMEOUT / 25
            if self.saving or not self.has_peers:
                left = patience
            if self.launched and os.getppid() == self.launcher and (left == patience or patience > STOP_TIMEOUT):
                os.kill(self.launcher, BUSY)
        if self.in_training:
            self._end(f"the step did not end within {patience:.0f} s: another rank has died or hangs", 128 + number)


entered: list[Signals] = []  # those whose block this process is in
held = threading.local()  # mask: what a thread that forks had blocked before


def hold() -> None:
    held.mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)


def hold_no_more() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, held.mask)


def forget_in_child() -> None:
    """A process that this one forks has its handlers, and the pipe: what ends a worker of an idea is no signal to the run."""
    for signals in entered:
        for number, handler in signals.previous.items():
            signal.signal(number, handler)
        if signals.previous:
            signal.set_wakeup_fd(-1)
    hold_no_more()


os.register_at_fork(before=hold, after_in_parent=hold_no_more, after_in_child=forget_in_child)


def let_the_first_tell(rank: int, seconds: float) -> None:
    """On another rank, wait so long: of an error that all meet the first one tells, and a launcher ends them all by it."""
    if rank:
        with contextlib.suppress(ValueError):  # in a thread
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(seconds)


def while_saving(save: Callable) -> Callable:
    """A method of a Run, for whose end a signal waits, however long that is."""

    @functools.wraps(save)
    def told(run: Any, *args: Any) -> Any:
        run.signals.saving = True
        try:
            return save(run, *args)
        finally:
            run.signals.saving = False

    return told

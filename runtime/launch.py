"""Start a training script's ranks on this machine, and end as the run does.

    [RANKS=1] python runtime/launch.py [script.py] [--option=value …]     # as ./run.sh does

One rank for each GPU, or two on the CPU: plain processes that meet on the loopback. After a signal they
have minutes for a checkpoint, after a rank's death seconds: PyTorch's launcher has one limit for both.
"""

import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any, Self

ROOT = Path(__file__).resolve().parent.parent
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
SAME_SIGNAL = 1.0  # seconds in which a signal is the same one: launcher and terminal both send it
LAUNCHER = "BANKRUN_LAUNCHER_PID"  # environment variable of a rank: its launcher's process id
PR_SET_PDEATHSIG = 1  # linux/prctl.h
STOPPING = "stopping after the step in progress; a second signal ends the run at once"
SECONDS_TO_END = 5.0  # for the other ranks, once one has ended with an error


def main(arguments: list[str]) -> int:
    """The run's exit code: 0, a failed rank's, or 128 + a signal's number."""
    script, options = find_script(arguments)
    count = 1 if {"-h", "--help"} & set(options) else number_of_ranks()
    with Signals() as signals:
        signals.in_training = True  # until all ranks have ended
        start([sys.executable, "-u", str(script), *options], count, signals.ranks)
        return wait(signals)


def find_script(arguments: list[str]) -> tuple[Path, list[str]]:
    """The script, relative to the current folder or else to the project, and its options."""
    if not arguments or arguments[0].startswith("-"):
        return ROOT / "train_gpt.py", arguments
    name, *options = arguments
    for path in (Path(name), ROOT / name):
        if path.is_file() and path.suffix == ".py":
            return path, options
    sys.exit(f"error: {name}: no such script; a script is a .py file, an option begins with --")


def number_of_ranks() -> int:
    """RANKS, or as many GPUs as divide 8, or two without a GPU."""
    gpus = number_of_gpus()
    text = os.environ.get("RANKS", "")
    if not text:
        return max([n for n in (1, 2, 4, 8) if n <= gpus], default=2)
    if not (text.isascii() and text.isdigit() and int(text) >= 1):
        sys.exit(f"error: RANKS={text}: must be a whole number from 1")
    cores = os.cpu_count() or 1
    if int(text) > (gpus or 16 * cores):
        most = f"the {gpus} GPUs" if gpus else f"16 for each of the {cores} cores"
        sys.exit(f"error: RANKS={text}: more than {most} of this machine")
    return int(text)


def number_of_gpus() -> int:
    if not (os.path.exists("/dev/nvidia0") or os.path.exists("/dev/nvidiactl")):
        return 0  # the import below takes two seconds
    import torch

    return torch.cuda.device_count()


def free_port() -> int:
    """A port on the loopback. Tried here: without it, ranks would wait for minutes, deaf to signals."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), 10).close()
            return server.getsockname()[1]
    except OSError as error:
        sys.exit(f"error: ranks cannot meet on 127.0.0.1: {error}; RANKS=1 needs no socket")


def tell(message: str) -> None:
    """Print to stderr, as a signal handler may."""
    with suppress(OSError):  # a console that is closed or full ends nothing
        os.write(2, f"{message}\n".encode(errors="replace"))


class Signals:
    """The signals by which users and clusters stop a run: those of a rank, or of the launcher.

    While `in_training` the first one is only noted, as `received`: all ranks agree on it at the end of
    the step. A second one ends the process at once, as does the first at any other time, with code
    128 + n. A launcher that dies is a SIGTERM. What was ignored at the start, as by nohup, stays ignored.
    """

    def __init__(self):
        self.received = 0  # a signal's number
        self.in_training = False
        self.received_at = 0.0
        self.ranks: list[subprocess.Popen] = []  # the launcher's
        self.previous: dict[int, Any] = {}  # handlers

    def __enter__(self) -> Self:
        for number in SIGNALS:
            if signal.getsignal(number) != signal.SIG_IGN:
                self.previous[number] = signal.signal(number, self._handle)
        end_with_launcher()
        # `start` blocks Ctrl-C until now: each rank would answer with a traceback of its imports.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        return self

    def __exit__(self, *_: object) -> None:
        self.in_training = False
        if "RANK" in os.environ:  # it ends now, and what the launcher passes on may still come
            return
        for number, handler in self.previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, _: FrameType | None) -> None:
        now = time.monotonic()
        if self.received == number and now < self.received_at + SAME_SIGNAL:
            return
        at_once = self.received or not self.in_training
        if os.environ.get("RANK", "0") == "0" and LAUNCHER not in os.environ:
            end = "stopped at once" if at_once else STOPPING
            tell(f"{signal.Signals(number).name}: {end}")
        if at_once:
            send(self.ranks, signal.SIGKILL)
            os._exit(128 + number)
        self.received = number
        self.received_at = now


def end_with_launcher() -> None:
    """Have the kernel send SIGTERM to this rank when its launcher dies. On Linux only."""
    if "RANK" not in os.environ or sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    launcher = os.environ.get(LAUNCHER)
    if launcher is not None and int(launcher) != os.getppid():  # it has died before that call
        os._exit(128 + signal.SIGTERM)


def start(command: list[str], count: int, ranks: list[subprocess.Popen]) -> None:
    """Add so many ranks to the list, processes of this command."""
    common = {"PYTHONHASHSEED": "0"}  # a set of strings has one order on all ranks
    # One rank opens no socket; that of an old log's source opens one, on any port.
    rendezvous = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    if count > 1:
        rendezvous["MASTER_PORT"] = f"{free_port()}"
        if "lo" in {name for _, name in socket.if_nameindex()}:  # Linux
            common |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    common |= os.environ  # what the user has set stays
    common |= rendezvous
    common |= {"WORLD_SIZE": f"{count}", "LOCAL_WORLD_SIZE": f"{count}"}
    common |= {LAUNCHER: f"{os.getpid()}"}
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    for rank in range(count):
        environment = common | {"RANK": f"{rank}", "LOCAL_RANK": f"{rank}"}
        ranks.append(subprocess.Popen(command, env=environment))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def send(ranks: list[subprocess.Popen], number: int) -> None:
    for process in ranks:
        process.send_signal(number)  # nothing to one that has ended


def wait(signals: Signals) -> int:
    """Wait for all ranks. The first one that fails decides the exit code, and ends the others. A
    signal is passed on to all."""
    ranks = signals.ranks
    code, failed_at, passed_on = 0, 0.0, False
    while any(process.poll() is None for process in ranks):
        if signals.received and not passed_on:
            passed_on = True
            send(ranks, signals.received)
        if not code:
            code = failure(signals)
            failed_at = time.monotonic()
        elif time.monotonic() > failed_at + SECONDS_TO_END:
            send(ranks, signal.SIGKILL)
        elif code != 128 + signals.received:  # else they end by themselves
            send(ranks, signal.SIGTERM)  # repeated, as a rank only notes the first one
        time.sleep(0.05)
    return code or failure(signals)


def failure(signals: Signals) -> int:
    """The exit code of a rank that has failed, or 0. One that a signal has killed is named."""
    codes = [process.poll() or 0 for process in signals.ranks]
    code = min(codes) or max(codes)
    if code >= 0:
        return code
    if -code == signals.received:
        return 128 + signals.received
    hint = ": out of memory? lower --val_batch_tokens, or raise --micro_batches"
    hint *= -code == signal.SIGKILL
    tell(f"error: rank {codes.index(code)} was killed by {signal.Signals(-code).name}{hint}")
    return 1


if __name__ == "__main__":
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # until the ranks run: no traceback
    sys.exit(main(sys.argv[1:]))

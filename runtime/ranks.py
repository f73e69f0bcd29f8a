"""The ranks of a run: how they join, agree on errors, and how their processes end. Each is a process with
torchrun's environment variables, started by runtime/launch.py or torchrun; a script without is one rank."""

import os
import re
import signal
import socket
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from runtime.launch import LAUNCHER, Signals, tell  # noqa: F401 (scripts take Signals here)

COLLECTIVE_TIMEOUT = timedelta(minutes=5)  # compiling takes the longest


class RunError(RuntimeError):
    """Ends the run with this one line and exit code 1."""


class AgreedError(RunError):
    """A RunError that every rank raises: rank 0 prints it."""


class Stopped(RunError):
    """The run stops early, as asked. Arguments: a message, which may be empty, and the exit code."""


class Ranks(NamedTuple):
    """This process among the ranks. All ranks call the methods below, in the same order."""

    rank: int
    world_size: int
    device: torch.device

    @property
    def first(self) -> bool:
        return self.rank == 0

    def gather(self, item: Any) -> list[Any]:
        """Every rank's item, in order, on every rank. item: can be pickled."""
        items = [item] * self.world_size
        if self.world_size > 1:
            dist.all_gather_object(items, item)
        return items

    def raise_on_all_ranks(self, error: Exception | None) -> None:
        """Raise AgreedError on every rank if any rank has an error."""
        own = None if error is None else str(error) or repr(error)
        for rank, message in enumerate(self.gather(own)):
            if message is not None:
                raise AgreedError(message if rank == 0 else f"rank {rank}: {message}")

    def check_same(self, found: dict[str, Any]) -> None:
        """Raise AgreedError on every rank if a rank's values differ from those of rank 0."""
        first = self.gather(found)[0]
        differences = [
            f"{name} is {found.get(name)}, on rank 0 {first.get(name)}"
            for name in first | found
            if found.get(name) != first.get(name)
        ]
        text = f"{'; '.join(differences[:3])}: must be the same on all ranks"
        self.raise_on_all_ranks(RunError(text) if differences else None)

    def on_all_ranks(self, function: Callable, *args: Any) -> Any:
        """function(*args) on every rank. A RunError, ValueError or OSError of one rank is raised on
        each of them, as an AgreedError."""
        result, error = None, None
        try:
            result = function(*args)
        except (RunError, ValueError, OSError) as caught:
            error = caught
        self.raise_on_all_ranks(error)
        return result

    def on_first(self, function: Callable[[], Any], interval: float = 60.0) -> Any:
        """function() on rank 0, in a thread, however long it takes; others get "". Errors as above.
        Meanwhile the ranks meet every `interval` seconds, so that no collective times out."""
        with ThreadPoolExecutor(1) as executor:
            work = executor.submit(function if self.first else str)
            while not all(self.gather(bool(wait([work], interval).done))):
                pass
            return self.on_all_ranks(work.result)

    def collect(self, x: Tensor) -> list[Tensor]:
        """Every rank's x on rank 0, in order; an empty list elsewhere. x: (n, …) on the CPU; n may differ."""
        as_bytes = x.contiguous().view(torch.uint8)  # not every dtype can be pickled
        parts = [as_bytes] * self.world_size if self.first else []
        if self.world_size > 1:
            dist.gather_object(as_bytes, parts or None)
        return [part.view(x.dtype) for part in parts]


def join_ranks() -> Ranks:
    """Join the process group that the environment describes: NCCL on GPUs, gloo on the CPU. One rank has
    no group, and opens no socket. Raises AgreedError if a machine has fewer GPUs than ranks."""
    rank = int(os.environ.get("RANK", 0))
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    device = torch.device("cpu")
    options = {"backend": "gloo"}
    if torch.cuda.is_available():
        gpus = torch.cuda.device_count()
        if local_size > gpus:
            raise AgreedError(f"{local_size} ranks on a machine with {gpus} GPUs: one GPU each")
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
        options = {"backend": "nccl", "device_id": device}
    elif "OMP_NUM_THREADS" not in os.environ:
        # More threads are no faster in the demo, and 20 times slower on a busy core.
        torch.set_num_threads(1)
    if world_size > 1:
        place = dict(rank=rank, world_size=world_size, timeout=COLLECTIVE_TIMEOUT)
        if LAUNCHER in os.environ:
            store = loopback_store(rank, world_size)
        else:
            store, *_ = next(dist.rendezvous("env://", **place))
        # A torchrun that restarts its ranks keeps the store, with the addresses of the dead ones.
        store = dist.PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)
        dist.init_process_group(store=store, **place, **options)
    return Ranks(rank, world_size, device)


def loopback_store(rank: int, world_size: int) -> dist.TCPStore:
    """The ranks' store, on the loopback alone; one that PyTorch opens listens on every interface."""
    address = os.environ["MASTER_ADDR"]
    port = int(os.environ["MASTER_PORT"])
    listener = socket.create_server((address, port)).detach() if rank == 0 else None
    return dist.TCPStore(
        address, port, world_size, rank == 0, COLLECTIVE_TIMEOUT, master_listen_fd=listener
    )


# ---------------------------------------------------------------------------------------------------
# Ends


def run_main(main: Callable[[], None]) -> None:
    """main(), then the end of this process: errors that a user can act on are one line. Exit codes: 0; 1
    for an error; a SystemExit's or Stopped's own; see docs/running.md. After an error the process ends
    without Python's shutdown, which can hang in the threads of NCCL or gloo."""
    first = os.environ.get("RANK", "0") == "0"
    try:
        main()
    except SystemExit as error:
        if error.code and not first:  # an option's: rank 0 prints it, and may still be importing
            let_others_report(20)
        raise
    except KeyboardInterrupt:  # before Signals
        end_process(128 + signal.SIGINT)
    except Stopped as stopped:
        message, code = stopped.args
        if first and message:
            tell(message)
        elif not first:
            let_others_report(1)
        end_process(code)
    except RunError as error:
        agreed = isinstance(error, AgreedError)
        if not first:
            let_others_report(20 if agreed else 2)
        if first or not agreed:
            tell(f"error: {error}")
        end_process(1)
    except Exception as error:
        message = describe(error)
        if is_lost_rank(error):
            let_others_report(5)
        elif not first:  # a bug that all ranks meet is printed by rank 0, which ends them all
            let_others_report(2)
        if message:
            tell(message)
        else:
            sys.excepthook(type(error), error, error.__traceback__)
        end_process(1)
    if dist.is_initialized():
        dist.destroy_process_group()
    flush_consoles()


def describe(error: Exception) -> str:
    """One line for an error that comes from the machine; empty for any other."""
    rank = os.environ.get("RANK", "0")
    if isinstance(error, torch.OutOfMemoryError):
        tried = re.search(r"Tried to allocate ([\d.]+ \w+)", str(error))
        size = f" (asked for {tried[1]})" if tried else ""
        advice = "twice as many --micro_batches need about half of it"
        return f"error: rank {rank} is out of GPU memory{size}: {advice}"
    if is_lost_rank(error):
        reason = str(error).strip().partition("\n")[0]
        return f"error: rank {rank} lost another rank: {reason}"
    return ""


def is_lost_rank(error: Exception) -> bool:
    """Whether a collective failed because another rank has died. gloo has no error type for it."""
    words = ("gloo/transport", "Connection closed by peer")
    return isinstance(error, dist.DistError) or any(word in str(error) for word in words)


def let_others_report(seconds: float) -> None:
    """Wait so long for the launcher's SIGTERM, which it sends once a rank has ended with an error."""
    with suppress(ValueError):  # not in the main thread
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    time.sleep(seconds)


def flush_consoles() -> None:
    """Flush stdout and stderr; one that is closed or full is given up."""
    for stream, number in ((sys.stdout, 1), (sys.stderr, 2)):
        try:
            stream.flush()
        except (AttributeError, OSError, ValueError):  # None if it was closed from the start
            nowhere = os.open(os.devnull, os.O_WRONLY)  # else Python's shutdown fails on it
            os.dup2(nowhere, number)


def end_process(code: int) -> None:
    flush_consoles()
    os._exit(code)

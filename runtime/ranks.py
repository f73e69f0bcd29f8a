"""The ranks of a run: joining, and agreeing on errors. A rank never waits for one that has left."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from datetime import timedelta
from itertools import count
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from launch.console import AgreedError, RunError
from launch.machine import (
    cannot_join, check_compiled_code, environment_number, find_store, forget_earlier_run, is_launched, usable_cores,
)  # fmt: skip
from launch.signals import let_the_first_tell

RENDEZVOUS_TIMEOUT = timedelta(seconds=60)  # for the ranks to find each other
COLLECTIVE_TIMEOUT = timedelta(minutes=5)  # for a rank that hangs; compiling takes the most
RUNS = count()  # of this process: an idea may call main() twice, and the store keeps the keys of the first group


class Ranks(NamedTuple):
    """This process among the others. The methods that talk to them are called by all ranks, in the same order."""

    rank: int
    world_size: int
    device: torch.device

    @property
    def first(self) -> bool:
        return self.rank == 0

    def gather(self, item: Any) -> list[Any]:  # every rank's item, on every rank
        items = [item] * self.world_size
        if self.world_size > 1:
            dist.all_gather_object(items, item)
        return items

    def raise_together(self, error: Exception | None) -> None:
        """Raise AgreedError on every rank if any has an error."""
        for rank, message in enumerate(self.gather(error and (f"{error}" or repr(error)))):
            if message:
                let_the_first_tell(self.rank, 2)
                raise AgreedError(message if rank == 0 else f"rank {rank}: {message}")

    def check_same(self, found: dict[str, Any]) -> None:
        """Raise AgreedError on every rank, with the first differences, if one has found something other than the first."""
        first = self.gather(found)[0]
        other = [f"{x} is {found.get(x)}, on rank 0 {first.get(x)}" for x in {**first, **found} if found.get(x) != first.get(x)]
        self.raise_together(RunError(f"{'; '.join(other[:3])}: must be the same on all ranks") if other else None)

    def on_all(self, function: Callable, *args: Any) -> Any:
        """function(*args) on every rank: a ValueError or OSError of one is raised on each of them, as an AgreedError."""
        try:
            result, error = function(*args), None
        except (ValueError, OSError) as caught:
            result, error = None, caught
        self.raise_together(error)
        return result

    def on_first(self, function: Callable, pause: float = 60.0) -> Any:
        """on_all of the first rank alone, however long it takes: the others hear every `pause` seconds that it goes on."""
        with ThreadPoolExecutor(1) as aside:
            work = aside.submit(function if self.first else str)
            while not all(self.gather(bool(wait([work], pause).done))):
                pass
            return self.on_all(work.result)

    def collect(self, x: Tensor) -> list[Tensor]:
        """On the first rank, every rank's x, in order; nothing on the others. x on the CPU, (n, …); n may differ."""
        octets = x.contiguous().view(torch.uint8)  # not every dtype can be pickled
        parts = [octets] * self.world_size if self.first else []
        if self.world_size > 1:
            dist.gather_object(octets, parts or None)
        return [part.view(x.dtype) for part in parts]


def join_ranks() -> Ranks:
    """What torchrun's environment says, and its process group; one rank without it. Raises RunError if it cannot be so."""
    check_compiled_code()
    launched = is_launched()
    world_size, rank, local_rank = (environment_number(*x) for x in (("WORLD_SIZE", 1, 1), ("RANK", 0), ("LOCAL_RANK", 0)))
    local_size = environment_number("LOCAL_WORLD_SIZE", local_rank + 1, least=1)
    if not (rank < world_size and local_rank < local_size <= world_size):
        found = f"RANK={rank} of WORLD_SIZE={world_size}, LOCAL_RANK={local_rank} of LOCAL_WORLD_SIZE={local_size}"
        raise RunError(f"{found} in the environment: a rank must be below its size; start with torchrun")
    device, how = torch.device("cpu"), dict(backend="gloo", rank=rank, world_size=world_size, timeout=COLLECTIVE_TIMEOUT)
    if torch.cuda.is_available():
        if local_rank >= (gpus := torch.cuda.device_count()):
            raise RunError(f"local rank {local_rank} has no GPU: this machine shows {gpus}; start as many ranks as GPUs")
        device = torch.device("cuda", local_rank)
        how |= dict(backend="nccl", device_id=device)
    else:
        torch.set_num_threads(max(1, usable_cores() // local_size))
    if run := next(RUNS):
        forget_earlier_run(device)
    if launched:
        try:
            torch.cuda.set_device(-1 if device.index is None else device.index)  # -1: no GPU
            store = dist.PrefixStore(f"{run}", find_store(RENDEZVOUS_TIMEOUT.total_seconds()))
            dist.init_process_group(store=store, **how)
        except (RuntimeError, ValueError) as error:
            raise cannot_join(error, Ranks(rank, world_size, device)) from error
    return Ranks(rank, world_size, device)

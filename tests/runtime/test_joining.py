"""Ranks: what they gather, and how an error of one reaches all, over real gloo groups."""

import time

import pytest
import torch

from runtime.ranks import AgreedError, Ranks, RunError, join_ranks


def error_of(function, *args) -> str:
    """What function(*args) raises as an AgreedError; none: empty."""
    try:
        function(*args)
    except AgreedError as error:
        return f"{error}"
    return ""


def fail_on(rank: int, failing: int, kind: type = ValueError) -> int:
    if rank == failing:
        raise kind("no such shard")
    return rank


def meet(rank, world_size):
    """What this rank has from each way in which ranks meet."""
    ranks = Ranks(rank, world_size, torch.device("cpu"))
    rows = torch.full((rank + 1, 2), rank, dtype=torch.bfloat16)
    collected = [x.tolist() for x in ranks.collect(rows)]
    found = [ranks.gather({"rank": rank}), collected, ranks.on_all_ranks(fail_on, rank, -1)]
    messages = [
        error_of(ranks.on_all_ranks, fail_on, rank, failing, kind)
        for failing, kind in enumerate((ValueError, OSError, RunError))
    ]
    messages.append(error_of(ranks.check_same, {"--seed": 1, "shards": rank // 2}))
    # The first rank's work may take longer than a collective.
    saved = ranks.on_first(lambda: time.sleep(0.3) or "saved", interval=0.05)
    return [*found, saved], [*messages, error_of(ranks.on_first, lambda: fail_on(0, 0, OSError))]


def test_ranks_gather_collect_and_raise_an_error_of_one_on_all(run_ranks):
    (first, *others), messages = zip(*run_ranks(3, meet))
    items = [{"rank": 0}, {"rank": 1}, {"rank": 2}]
    assert first == [items, [[[rank, rank]] * (rank + 1) for rank in range(3)], 0, "saved"]
    assert others == [[items, [], rank, ""] for rank in (1, 2)]
    expected = ["no such shard", "rank 1: no such shard", "rank 2: no such shard"]
    expected.append("rank 2: shards is 1, on rank 0 0: must be the same on all ranks")
    assert messages == ([*expected, "no such shard"],) * 3


# Joining


@pytest.mark.parametrize("threads", ["", "2"])
def test_a_script_by_hand_is_one_rank_with_one_thread_unless_told(monkeypatch, threads):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    if threads:
        monkeypatch.setenv("OMP_NUM_THREADS", threads)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    chosen = []
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    ranks = join_ranks()
    assert ranks == Ranks(0, 1, torch.device("cpu")) and ranks.first
    assert chosen == ([] if threads else [1]) and not torch.distributed.is_initialized()


def test_more_ranks_than_gpus_are_refused(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(AgreedError, match="3 ranks on a machine with 2 GPUs"):
        join_ranks()

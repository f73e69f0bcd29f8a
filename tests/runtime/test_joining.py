"""Ranks: how an error of one reaches all, over a real gloo group."""

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
    """What this rank has of each way in which an error of one reaches all."""
    ranks = Ranks(rank, world_size, torch.device("cpu"))
    messages = [
        error_of(ranks.on_all_ranks, fail_on, rank, failing, kind)
        for failing, kind in enumerate((ValueError, OSError, RunError))
    ]
    messages.append(error_of(ranks.check_same, {"--seed": 1, "shards": rank // 2}))
    messages.append(error_of(ranks.on_first, lambda: fail_on(0, 0, OSError)))
    # The first rank's work may take longer than a collective.
    return messages, ranks.on_first(lambda: time.sleep(0.3) or "saved", interval=0.05)


def test_an_error_of_one_rank_is_raised_on_all(run_ranks):
    messages, saved = zip(*run_ranks(3, meet))
    expected = ["no such shard", "rank 1: no such shard", "rank 2: no such shard"]
    expected.append("rank 2: shards is 1, on rank 0 0: must be the same on all ranks")
    assert messages == ([*expected, "no such shard"],) * 3
    assert saved == ("saved", "", "")


def test_more_ranks_than_gpus_are_refused(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(AgreedError, match="3 ranks on a machine with 2 GPUs"):
        join_ranks()

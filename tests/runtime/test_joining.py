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


def here(rank: int, world_size: int) -> Ranks:
    return Ranks(rank, world_size, torch.device("cpu"))


def fail_on(rank: int, failing: int, kind: type) -> int:
    if rank == failing:
        raise kind("no such shard")
    return rank


def gather_and_collect(rank, world_size):
    ranks = here(rank, world_size)
    rows = torch.full((rank + 1, 2), rank, dtype=torch.bfloat16)
    return ranks.gather({"rank": rank}), ranks.collect(rows)


def test_gather_on_all_ranks_collect_on_the_first(run_ranks):
    results = run_ranks(3, gather_and_collect)
    items = [{"rank": 0}, {"rank": 1}, {"rank": 2}]
    assert [gathered for gathered, _ in results] == [items] * 3
    (_, rows), *others = results
    assert [x.tolist() for x in rows] == [[[rank, rank]] * (rank + 1) for rank in range(3)]
    assert {x.dtype for x in rows} == {torch.bfloat16}
    assert [rows for _, rows in others] == [[], []]


def agree(rank, world_size):
    ranks = here(rank, world_size)
    messages = []
    for failing in range(world_size):
        for kind in (ValueError, OSError, RunError):
            messages.append(error_of(ranks.on_all_ranks, fail_on, rank, failing, kind))
    same = {"--seed": 1, "shards": rank // 2}
    messages.append(error_of(ranks.check_same, same))
    return ranks.on_all_ranks(fail_on, rank, -1, ValueError), messages


def test_an_error_of_one_rank_is_raised_on_all(run_ranks):
    results = run_ranks(3, agree)
    assert [result for result, _ in results] == [0, 1, 2]
    expected = ["no such shard"] * 3 + ["rank 1: no such shard"] * 3 + ["rank 2: no such shard"] * 3
    expected.append("rank 2: shards is 1, on rank 0 0: must be the same on all ranks")
    assert [messages for _, messages in results] == [expected] * 3


def work_on_the_first(rank, world_size):
    ranks = here(rank, world_size)
    done = ranks.on_first(lambda: time.sleep(0.3) or "saved", interval=0.05)
    return done, error_of(ranks.on_first, lambda: fail_on(0, 0, OSError))


def test_work_of_the_first_rank_may_take_longer_than_a_collective(run_ranks):
    assert run_ranks(2, work_on_the_first) == [("saved", "no such shard"), ("", "no such shard")]


# Joining


def test_a_script_by_hand_is_one_rank_with_one_thread(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    chosen = []
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    ranks = join_ranks()
    assert ranks == Ranks(0, 1, torch.device("cpu")) and ranks.first
    assert chosen == [1] and not torch.distributed.is_initialized()
    assert ranks.gather("x") == ["x"] and ranks.on_first(lambda: "x") == "x"


def test_threads_are_those_of_omp_num_threads(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch, "set_num_threads", lambda _: pytest.fail("was set"))
    join_ranks()


def test_more_ranks_than_gpus_are_refused(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(AgreedError, match="3 ranks on a machine with 2 GPUs"):
        join_ranks()

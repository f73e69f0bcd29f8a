"""Ranks find each other or say why not, and agree on what they found; a rank never waits for one that has left."""

import gc
import math
import os
import re
import shutil
import signal
import socket
import sys
import threading
import time
import weakref
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import common
import launch.machine
import train_gpt
from common import ROOT, SCRIPT, Forked, children, lines_of, options, run_fresh, text_of, tiny_settings, torchrun, wait_until
from data.shards import read_shard, write_shard
from launch.console import AgreedError, RunError
from runtime import ranks as runtime_ranks
from runtime.checkpoints import differences, read_checkpoint, whole_state, write_checkpoint
from runtime.ranks import Ranks
from train_gpt import main

# -----------------------------------------------------------------------------
# Environment

GOOD = dict(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="free")
ENVIRONMENT = [  # what differs from a good one, and the message
    (dict(RANK=None), "RANK missing in the environment, which has RANK or WORLD_SIZE: start with torchrun, or unset all"),
    (dict(WORLD_SIZE=None), "WORLD_SIZE missing in the environment"),
    (dict(MASTER_ADDR=None), "MASTER_ADDR missing in the environment"),
    (dict(MASTER_PORT=None, MASTER_ADDR=None), "MASTER_ADDR, MASTER_PORT missing in the environment"),
    (dict(RANK="first"), "RANK='first' in the environment: must be a number from 0 on: start with torchrun or unset it"),
    (dict(RANK="-1"), "RANK='-1' in the environment: must be a number"),
    (dict(RANK="1"), "RANK=1 of WORLD_SIZE=1, LOCAL_RANK=0 of LOCAL_WORLD_SIZE=1 in the environment: a rank must be below"),
    (dict(RANK=""), "RANK='' in the environment"),
    (dict(WORLD_SIZE="0"), "WORLD_SIZE='0' in the environment: must be a number from 1 on"),
    (dict(WORLD_SIZE="two"), "WORLD_SIZE='two' in the environment"),
    (dict(WORLD_SIZE="9" * 5000), "WORLD_SIZE='9{20}' in the environment"),
    (dict(WORLD_SIZE="1.0"), "WORLD_SIZE='1.0' in the environment"),
    (dict(LOCAL_RANK="x"), "LOCAL_RANK='x' in the environment"),
    (dict(LOCAL_RANK="3"), "LOCAL_RANK=3 of LOCAL_WORLD_SIZE=1 in the environment: a rank must be below its size"),
    (dict(LOCAL_WORLD_SIZE="4"), "of LOCAL_WORLD_SIZE=4 in the environment: a rank must be below its size"),
    (dict(LOCAL_WORLD_SIZE="0"), "LOCAL_WORLD_SIZE='0' in the environment"),
    (dict(MASTER_PORT="http"), "rank 0 of 1 cannot join the others at 127.0.0.1:http"),
    (dict(MASTER_PORT="99999999"), "rank 0 of 1 cannot join the others at 127.0.0.1:99999999"),
    (dict(MASTER_PORT="99999999", WORLD_SIZE="2", RANK="1"), "rank 1 of 2 cannot join the others at 127.0.0.1:99999999"),
    (dict(MASTER_PORT="taken"), "cannot join .* is the port free. .*EADDRINUSE"),
    (dict(WORLD_SIZE="2"), "rank 0 of 2 cannot join .* are all of them started, once each"),
    (dict(WORLD_SIZE="2", RANK="1"), "rank 1 of 2 cannot join .* the port free. Connection refused$"),
    (dict(WORLD_SIZE="2", RANK="1", MASTER_PORT="silent"), "rank 1 of 2 cannot join .* what listens there does not answer as a store"),
    (dict(MASTER_ADDR="nohost.invalid"), "rank 0 of 1 cannot join the others at nohost.invalid:.* the port free. Name or service not"),
    (dict(MASTER_ADDR="x" * 70), "rank 0 of 1 cannot join the others at x{70}:"),
]  # fmt: skip


@pytest.mark.parametrize("change, message", ENVIRONMENT, ids=[str(case[0])[1:41] for case in ENVIRONMENT])
def test_a_bad_environment_is_named_within_seconds(shards, tmp_path, capfd, monkeypatch, no_warm_up, change, message):
    """A service that is no store held a rank for ever; a wrong address was told after two minutes, below PyTorch's own lines."""
    monkeypatch.setattr(runtime_ranks, "RENDEZVOUS_TIMEOUT", timedelta(seconds=1))
    monkeypatch.setattr(launch.machine, "STORE_SLACK", 1.0)
    with socket.socket() as taken, socket.socket() as free:
        for a in (taken, free):
            a.bind(("0.0.0.0", 0))
        taken.listen()
        ports = {"taken": f"{taken.getsockname()[1]}", "free": f"{free.getsockname()[1]}"}
        ports["silent"] = ports["taken"]
        free.close()
        for name, value in {**GOOD, **change}.items():
            monkeypatch.delenv(name, raising=False)
            if value is not None:
                monkeypatch.setenv(name, ports.get(value, value))
        with pytest.raises(SystemExit) as exit_:
            main(options(shards, tmp_path))
    printed = capfd.readouterr().err
    for waiting in (x for x in threading.enumerate() if x.name == "store"):
        waiting.join(30)  # as its service is closed now: what PyTorch says then is no other test's
    assert exit_.value.code == 1
    assert re.search(rf": error: .*{message}", printed, re.MULTILINE), printed
    assert len(printed.splitlines()) == 1 or "EADDRINUSE" in message or {"RANK", "MASTER_ADDR"}.isdisjoint(change), printed
    assert not dist.is_initialized() and not (tmp_path / "logs").exists()


FULL = "CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation' in https://docs.nvidia.com"
BUSY = "CUDA error: CUDA-capable device(s) is/are busy or unavailable\nSearch for `cudaErrorDevicesUnavailable'"
NCCL = "NCCL error in: NCCLUtils.cpp:93, unhandled cuda error (run with NCCL_DEBUG=INFO for details), NCCL version 2.28.9\n"
NCCL += "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\n"
ROOM = "rank 0 is out of memory: {}; nvidia-smi shows whose, more --micro_batches need less (docs/memory.md)"
OTHERS = "rank 0 of 1 cannot join the others at 127.0.0.1:1, are all of them started, once each, and is the port free? "


@pytest.mark.parametrize(("of_gpu", "of_group", "message"), [
    (FULL, None, ROOM.format("GPU 0 has no room for it at all")),
    (BUSY, None, "rank 0: GPU 0 cannot be used, nvidia-smi may say more: CUDA error: CUDA-capable device(s) is/are busy or unavailable"),
    (None, NCCL + "Failed to CUDA calloc async 608 bytes", ROOM.format("of GPU 0's 80.0 GiB it holds 0.0, all else 79.0")),
    (None, NCCL + "Cuda failure 'invalid device'", OTHERS + NCCL.partition("\n")[0] + ": Cuda failure 'invalid device'"),
    (None, "connection refused\nmore", OTHERS + "connection refused"),
])  # fmt: skip
def test_a_gpu_that_a_rank_cannot_have_is_named(monkeypatch, of_gpu, of_group, message):
    """The first and third met on an H100 whose memory another process held: what it said is said here by fakes of its calls. There
    the third had a second message below it, NCCL's, that its group was not destroyed."""
    for name, value in {**GOOD, "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    groups = []

    def gpu(*_):
        if of_gpu:
            raise torch.AcceleratorError(of_gpu)

    def group(*_, **__):
        half_made = set()  # as an object of NCCL's, which warns as it goes
        groups.append(weakref.ref(half_made))
        raise dist.DistBackendError(of_group)

    def room(device):
        gpu()
        return 1 << 30, 80 << 30

    fakes = dict(is_available=lambda: True, device_count=lambda: 1, set_device=gpu, mem_get_info=room, memory_reserved=lambda x: 0)
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(dist, "rendezvous", lambda *_, **__: iter([(None, 0, 1)]))
    monkeypatch.setattr(dist, "init_process_group", group)
    monkeypatch.setattr(dist, "PrefixStore", lambda *_: None)
    monkeypatch.setattr(runtime_ranks, "RUNS", iter([0]))
    with pytest.raises(RunError) as said:
        runtime_ranks.join_ranks()
    assert f"{said.value}" == message
    del said
    gc.collect()
    assert all(group() is not None for group in groups) and len(groups) == (of_group is not None)


def test_what_a_run_in_this_process_asked_for_keeps_no_fork_waiting(monkeypatch):
    """A tool's test hung for 300 s, in a worker whose earlier tests had started threads: OpenMP's are in no fork."""
    for name in GOOD:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(runtime_ranks, "usable_cores", lambda: 2)
    runtime_ranks.join_ranks()
    numbers = torch.ones(1 << 20)
    assert numbers.relu().sum() == 1 << 20
    source = "import torch; torch.set_num_threads(2); print(torch.get_num_threads(), torch.ones(1 << 20).relu().sum().item())"
    assert run_fresh([sys.executable, "-c", source], timeout=20).stdout == f"2 {float(1 << 20)}\n"


# -----------------------------------------------------------------------------
# Agreement


def raised(function: Any, *args: Any) -> str:
    """The message of the AgreedError that this raises."""
    try:
        return f"nothing raised, but {function(*args)!r}"
    except AgreedError as error:
        return f"{error}"


def fail_on(rank: int, ranks: Ranks, error: Exception) -> int:
    if ranks.rank == rank:
        raise error
    return ranks.rank


def slow_first(ranks: Ranks, error: Exception | None = None) -> tuple[Any, int]:
    """What on_first says of a work of 1 s, told every 0.1 s, and how often the ranks have met meanwhile."""
    met, gather = [], dist.all_gather_object

    def work() -> str:
        time.sleep(1)
        if error:
            raise error
        return f"done on {ranks.rank}"

    dist.all_gather_object = lambda *items: (met.append(1), gather(*items))
    try:
        return raised(ranks.on_first, work, 0.1) if error else ranks.on_first(work, 0.1), len(met)
    finally:
        dist.all_gather_object = gather


def agree(rank: int, world_size: int) -> dict[str, Any]:
    """What this rank gets from each of the methods that talk to others."""
    ranks = Ranks(rank, world_size, torch.device("cpu"))
    slow = {"slow": slow_first(ranks), "slow and failing": slow_first(ranks, OSError("no disk"))}
    time.sleep = lambda _: None
    uneven = torch.arange(3 * (rank + 1)).view(-1, 3)
    tensors = {
        "uneven": uneven,
        "empty": uneven[:rank],  # none of the first rank
        "not contiguous": uneven.repeat(2, 1).T,
        **{f"{dtype}": uneven.to(dtype) for dtype in (torch.float32, torch.bfloat16, torch.uint16, torch.float8_e4m3fn)},
    }
    return {
        "gather": ranks.gather({"rank": rank}),
        "collect": {name: (x, ranks.collect(x)) for name, x in tensors.items()},
        "same": ranks.check_same({"a": 3}),
        "other": raised(ranks.check_same, {"a": 3, "b": rank, "cd"[rank]: 5}),
        "result": ranks.on_all(fail_on, -1, ranks, ValueError("no")),
        "first fails": raised(ranks.on_all, fail_on, 0, ranks, ValueError("of the first")),
        "second fails": raised(ranks.on_all, fail_on, 1, ranks, OSError("of the second")),
        "without a word": raised(ranks.on_all, fail_on, 1, ranks, ValueError()),
        "both": raised(ranks.raise_together, RunError(f"of {rank}")),
        "none": ranks.raise_together(None),
        **slow,
    }


@pytest.fixture(scope="module")
def agreed(run_ranks):
    return run_ranks(2, agree)


def test_every_rank_gets_every_item_in_order(agreed):
    assert [found["gather"] for found in agreed] == [[{"rank": 0}, {"rank": 1}]] * 2


def test_the_first_rank_gets_every_tensor_whatever_its_size_and_dtype(agreed):
    first, second = (found["collect"] for found in agreed)
    for name, (sent, got) in first.items():
        assert common.unequal(dict(enumerate(got)), {0: sent, 1: second[name][0]}) == [], name
        assert second[name][1] == []


def test_the_others_meet_a_first_rank_that_takes_long(agreed):
    """So that none waits as for one that hangs; a fault is raised on each."""
    assert [found["slow"][0] for found in agreed] == ["done on 0", ""]
    assert [found["slow and failing"][0] for found in agreed] == ["no disk", "no disk"]
    for found in agreed:
        assert found["slow"][1] > 4 and found["slow and failing"][1] > 4


def test_one_rank_alone_has_what_it_sends():
    ranks, x = Ranks(0, 1, torch.device("cpu")), torch.arange(6).view(2, 3).to(torch.uint16)
    assert ranks.gather("x") == ["x"] and ranks.on_all(max, 1, 2) == 2
    assert common.unequal(dict(enumerate(ranks.collect(x))), {0: x}) == []
    ranks.check_same({"a": "anything"})
    with pytest.raises(AgreedError, match="^no$"):
        ranks.on_all(fail_on, 0, ranks, ValueError("no"))


def test_an_error_of_one_rank_is_raised_on_each_with_its_rank(agreed):
    assert [found["result"] for found in agreed] == [0, 1]
    assert [found["first fails"] for found in agreed] == ["of the first"] * 2
    assert [found["second fails"] for found in agreed] == ["rank 1: of the second"] * 2
    assert [found["without a word"] for found in agreed] == ["rank 1: ValueError()"] * 2
    assert [found["both"] for found in agreed] == ["of 0"] * 2


def test_ranks_that_found_another_thing_than_the_first_are_named(agreed):
    message = "rank 1: b is 1, on rank 0 0; c is None, on rank 0 5; d is 5, on rank 0 None"
    assert [found["other"] for found in agreed] == [f"{message}: must be the same on all ranks"] * 2


# -----------------------------------------------------------------------------
# Runs that no rank may wait in


def test_a_shard_missing_on_one_node_stops_all_ranks(shards, tmp_path):
    """Each rank looks into a folder of its own, as on nodes with disks of their own."""
    lonely = tmp_path / "node1"
    lonely.mkdir()
    shutil.copy(shards / "local_val_000000.bin", lonely)
    (tmp_path / "nodes.py").write_text(
        f"import os, sys\nsys.path.insert(0, {str(ROOT / 'tests')!r})\nsys.path.insert(0, {str(ROOT)!r})\n"
        "from common import train_gpt\n"
        f"train_gpt.main([*sys.argv[1:], '--data=' + [{str(shards)!r}, {str(lonely)!r}][int(os.environ['RANK'])]])\n"
    )
    with open(tmp_path / "output", "w") as output:
        launcher = torchrun(options(shards, tmp_path), script=tmp_path / "nodes.py", stdout=output, stderr=output)
    assert launcher.wait() == 1
    printed = text_of(tmp_path / "output")
    assert re.search(rf"nodes.py: error: rank 1: no shard matches {lonely}/\*_train_\*.bin", printed), printed
    assert printed.count("no shard matches") == 1 and not list((tmp_path / "logs").glob("*"))


def test_a_rank_that_leaves_alone_says_so(shards, tmp_path, monkeypatch, no_warm_up):
    """As by an idea's own sys.exit: the run ended with code 1, and without a word."""
    source, end = SCRIPT.read_text(), "            run.end_step()\n"
    assert source.count(end) == 1
    leaving = f"{end}            if step == 3 and ranks.rank == 1:\n                sys.exit('diverged')\n"
    (tmp_path / "leaves.py").write_text(source.replace(end, leaving))
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}")
    with open(tmp_path / "output", "w") as output:
        ranks = torchrun(options(shards, tmp_path), script=tmp_path / "leaves.py", stdout=output, stderr=output)
    said = "leaves.py: error: rank 1's train() has ended by sys.exit('diverged') without run.finish(): the log lacks its last line"
    assert ranks.wait() == 1 and said in text_of(tmp_path / "output").splitlines()


def test_what_earlier_tests_left_closes_no_file_of_a_fork(tmp_path):
    """Open files in reference cycles, which a fork inherits: its collector must not close what has their numbers there."""

    class Left:
        def __init__(self):
            self.myself, self.file = self, open(os.devnull)

    def stat_its_own() -> None:
        files = [os.open(os.devnull, os.O_RDONLY) for _ in range(60)]
        gc.collect()
        for file in files:
            os.fstat(file)

    left = [Left() for _ in range(30)]
    gc.disable()
    try:
        del left
        with open(tmp_path / "output", "w") as output:
            fork = Forked(stat_its_own, stdout=output, stderr=output)
    finally:
        gc.enable()
    assert (fork.wait(), text_of(tmp_path / "output")) == (0, "")


def test_an_idea_may_call_main_twice(shards, tmp_path, monkeypatch, no_warm_up):
    """To tell one run from another, say: the second group met the first one's keys in the store, and waited five minutes."""
    twice = "for name in ('first', 'second'):\n        main([*sys.argv[1:], f'--run_id={name}'])"
    source, end = SCRIPT.read_text(), 'if __name__ == "__main__":\n    main()'
    assert source.count(end) == 1
    (tmp_path / "twice.py").write_text(source.replace(end, end.replace("main()", twice)))
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}")
    monkeypatch.chdir(ROOT)  # where a script's data are looked for
    with open(tmp_path / "output", "w") as output:
        ranks = torchrun(options(shards, tmp_path), script=tmp_path / "twice.py", stdout=output, stderr=output)
    assert ranks.wait() == 0, text_of(tmp_path / "output")
    losses = [re.findall(r"val_loss:\S+", lines_of(tmp_path / "logs" / f"{name}.txt")) for name in ("first", "second")]
    assert losses[0] == losses[1] and len(losses[0]) == 3


NODES = {  # what differs on the second node; what all ranks say
    "option": (dict(muon_lr_mul=1.25), "", b"", "--muon_lr_mul is 1.25, on rank 0 1.3"),
    "number of steps": (dict(num_extension_iterations=3), "", b"", "--num_extension_iterations is 3, on rank 0 2"),
    "tokens": ({}, "local_train_000000.bin", b"", r"local_train_000000.bin is .*, CRC-32 \w+, on rank 0 .*, CRC-32 \w+"),
    "one shard more": ({}, "local_train_000007.bin", b"", "local_train_000007.bin is .* tokens, on rank 0 None"),
    "source": ({}, "", b"# more", rf"{re.escape(SCRIPT.name)} is CRC-32 \w{{8}}, on rank 0 CRC-32 \w{{8}}"),
}  # fmt: skip


@pytest.mark.parametrize("case", NODES)
def test_a_node_that_would_train_something_else_stops_all_ranks(run_ranks, shards, tmp_path, case):
    """Each with its own folder of shards and its own source: it would end with figures of neither."""
    messages = run_ranks(2, second_node, shards, tmp_path, case)
    assert messages[0] == messages[1] and not list((tmp_path / "logs").glob("*"))
    assert re.match(f"rank 1: {NODES[case][3]}: must be the same on all ranks", messages[0]), messages[0]


def test_ranks_that_begin_with_other_weights_do_not_train(run_ranks, shards, tmp_path):
    """As of an idea that draws them in the order of a set of strings: each rank trained a model of its own, to the end."""
    messages = run_ranks(2, other_weights, shards, tmp_path)
    assert messages[0] == messages[1] and not list((tmp_path / "logs").glob("*"))
    said = r"rank 1: the first weights of x0_lambdas is CRC-32 \w{8}, on rank 0 CRC-32 \w{8}: must be the same on all ranks"
    assert re.fullmatch(said, messages[0]), messages[0]


def test_a_number_of_one_ranks_own_is_not_saved_for_all(run_ranks, shards, tmp_path):
    """An idea's rule kept a norm of its own rows: resumed, all ranks went on with the first one's."""
    said = "rank 1: sharded.embed.own is 1, on rank 0 0: must be the same on all ranks"
    assert run_ranks(2, own_numbers, shards, tmp_path) == [said, said]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_tensor_of_one_ranks_own_is_not_saved_for_all(run_ranks, shards, tmp_path, device):
    """As the mean norm of a gradient's own rows, outside of the optimizer's state. On GPUs a kernel may round otherwise."""
    who = "the tensors of same.optimizer.scalars.own are not the same on all ranks at a save"
    said = f"{who}: a checkpoint would give all of them the first one's: all_reduce what goes into them"
    expected = [said if device == "cpu" else f"caution: {said}"] * 2
    assert run_ranks(2, own_tensors, shards, tmp_path, device) == expected


def test_a_number_that_is_none_yet_is_the_same_on_all_ranks(run_ranks, shards, tmp_path):
    """NaN, which equals nothing: "is nan, on rank 0 nan"."""
    assert run_ranks(2, no_numbers, shards, tmp_path) == [True, True]


def test_gradients_that_one_rank_lacks_are_put_together_by_label(run_ranks, shards, tmp_path):
    """As after a branch that an idea drops by chance: the others' went into the checkpoint by a label of another, or all hung."""
    one, two = run_ranks(2, pending_of_some, shards, tmp_path)
    assert one == {0: {"attn": 1.0, "embed": 1.0, "mlp": 0.0}, 1: {"attn": 2.0, "embed": 0.0, "mlp": 2.0}} and two == {}


def pending_of_some(rank: int, world_size: int, shards: Path, folder: Path) -> dict:
    ranks = Ranks(rank, world_size, torch.device("cpu"))
    manager = train_gpt.build(tiny_settings(shards, folder), ranks)
    params = manager.optimizer.params
    for label in ("attn", ("embed", "mlp")[rank]):
        params[label].grad = torch.full_like(params[label], 1.0 + rank)
    parts = whole_state(manager, ranks)["partial"]
    assert all(x.shape == params[label].shape for part in parts.values() for label, x in part.items())
    return {at: {label: x.double().mean().item() for label, x in part.items()} for at, part in parts.items()}


def no_numbers(rank: int, world_size: int, shards: Path, folder: Path) -> bool:
    ranks = Ranks(rank, world_size, torch.device("cpu"))
    manager = train_gpt.build(tiny_settings(shards, folder), ranks)
    manager.optimizer.state["embed"]["best"] = math.nan
    return math.isnan(whole_state(manager, ranks)["sharded"]["embed"]["best"])


def own_tensors(rank: int, world_size: int, shards: Path, folder: Path, device: str) -> str:
    manager = train_gpt.build(tiny_settings(shards, folder), Ranks(rank, world_size, torch.device("cpu")))
    manager.optimizer.state["scalars"]["own"] = torch.tensor(float(rank))
    ranks, cautions = Ranks(rank, world_size, torch.device(device)), []
    said = raised(whole_state, manager, ranks, cautions.append)
    return cautions[0] if cautions else said


def own_numbers(rank: int, world_size: int, shards: Path, folder: Path) -> str:
    ranks = Ranks(rank, world_size, torch.device("cpu"))
    manager = train_gpt.build(tiny_settings(shards, folder), ranks)
    manager.optimizer.state["embed"]["own"] = rank
    return raised(whole_state, manager, ranks)


def test_numbers_that_an_ideas_rule_keeps_are_saved_as_pythons(shards, tmp_path):
    """NumPy's, or one that began as int 0 and became a float: every checkpoint was written, and none could be resumed."""
    ranks = Ranks(0, 1, torch.device("cpu"))
    manager = train_gpt.build(tiny_settings(shards, tmp_path), ranks)
    manager.optimizer.state["embed"] |= {"own": np.float64(0.5), "count": 0}
    layout = manager.layout(0)
    manager.optimizer.state["embed"]["count"] = 1.5
    state = whole_state(manager, ranks)
    write_checkpoint(tmp_path / "step_000000.pt", {"state": state}, keep=1)
    found = read_checkpoint(tmp_path / "step_000000.pt")["state"]["sharded"]["embed"]
    assert found["own"] == 0.5 and type(found["own"]) is float and differences(found, layout["sharded"]["embed"], "state.") == []


def other_weights(rank: int, world_size: int, shards: Path, folder: Path) -> str:
    build = train_gpt.build

    def build_otherwise(*args):
        manager = build(*args)
        manager.model.x0_lambdas.data[-1] += rank
        return manager

    train_gpt.build = build_otherwise
    return raised(train_gpt.train, tiny_settings(shards, folder), Ranks(rank, world_size, torch.device("cpu")))


def second_node(rank: int, world_size: int, shards: Path, folder: Path, case: str) -> str:
    """The message of the run on this rank."""
    options, shard, line, _ = NODES[case] if rank else ({}, "", b"", "")
    data = shutil.copytree(shards, folder / f"node{rank}")
    if shard:
        tokens = read_shard(data / "local_train_000000.bin")
        write_shard(data / shard, np.where(tokens == 256, tokens, tokens ^ 1))
    train_gpt.SOURCES.contents[train_gpt.SOURCES.path] += line
    train_gpt.warm_up = lambda *_: None
    return raised(train_gpt.train, tiny_settings(data, folder, **options), Ranks(rank, world_size, torch.device("cpu")))


@pytest.mark.parametrize("victim", [0, 1])
def test_when_one_rank_is_killed_the_others_say_so_and_end(shards, tmp_path, victim, no_warm_up):
    arguments = options(shards, tmp_path, num_scheduled_iterations=80, val_every=0)
    log = tmp_path / "logs" / "run.txt"
    with open(tmp_path / "output", "w") as output:
        launcher = torchrun(arguments, stdout=output, stderr=output)
    try:
        shows = lambda: "\nstep:3/" in text_of(tmp_path / "output")  # after the log, and a rank may be killed between them
        wait_until(lambda: shows() or launcher.poll() is not None, 100)
        os.kill(children(launcher.pid)[victim], signal.SIGKILL)
        assert launcher.wait(60) == 1
    finally:
        launcher.kill()
    printed = text_of(tmp_path / "output")
    errors = [line for line in printed.splitlines() if ": error: " in line]
    assert len(errors) == 1 and f"rank {1 - victim}: lost another rank, which has died or hangs" in errors[0], printed
    shown = [line for line in printed.splitlines() if line.startswith("step:")]
    *_, last = written = log.read_text().splitlines()
    assert 3 <= len(shown) < 82 and all(line in written for line in shown)
    assert victim == 0 or last == "error: lost another rank, which has died or hangs: the console has why"  # not gloo's words


def test_a_launchers_ranks_all_end_with_the_signals_code(shards, tmp_path, no_warm_up):
    """SIGTERM to one rank alone; torchrun then reports code 143 for both."""
    arguments = options(shards, tmp_path, save_every=99, num_scheduled_iterations=120, val_every=0)
    log = tmp_path / "logs" / "run.txt"
    with open(tmp_path / "output", "w") as output:
        launcher = torchrun(arguments, stdout=output, stderr=output)
    try:
        wait_until(lambda: "\nstep:2/" in text_of(log) or launcher.poll() is not None, 100)
        os.kill(children(launcher.pid)[1], signal.SIGTERM)
        launcher.wait(60)
    finally:
        launcher.kill()
    printed = text_of(tmp_path / "output")
    assert re.search(r"\nstopped by SIGTERM after step:\d+/122: checkpoint \S+", log.read_text())
    assert set(re.findall(r"exitcode\s*: (-?\d+)", printed)) == {"143"}, printed
    assert printed.count("SIGTERM: ends after this step") == 1
    assert len(list((tmp_path / "logs" / "run").glob("*.pt"))) == 1

"""What every test shares: the repository on sys.path, one thread, reproducible hypotheses, processes that cannot hang."""

import argparse
import gc
import os
import re
import shutil
import signal
import sys
import tempfile
import typing
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BESIDE = (ROOT / os.environ.get("SCRIPT", "train_gpt.py")).parent  # the script's files before the project's, as in a run
FIRST = dict.fromkeys([str(ROOT / "tests"), str(BESIDE), str(ROOT)])
sys.path[:0] = FIRST

# PyTorch asks for huge pages: the full-size model would be all page faults otherwise.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # as launch/ asks before PyTorch is imported: forks of this process spin else
gc.disable()  # until all is imported: pytest_collection_finish

import numpy as np
import pytest
import torch
from hypothesis import settings

import common  # first: it loads the script that is tested
import cpu
from launch import others_code
from data.loader import CHECKED, HELD, LISTED
from data.shards import write_shard

# A shell starts its background commands deaf to Ctrl-C and Ctrl-\, nohup to SIGHUP, and they hand that down; the tests send them.
signal.signal(signal.SIGINT, signal.default_int_handler)
for number in (signal.SIGQUIT, signal.SIGHUP):
    signal.signal(number, signal.SIG_DFL)
RECURSION = sys.getrecursionlimit()
HANDLERS = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
os.environ.pop("PYTHONUNBUFFERED", None)  # of some containers: tools print into buffers, as a user's do
torch.set_num_threads(1)  # the tensors are tiny, and the ranks of a test share the machine
settings.register_profile("bankrun", deadline=None, derandomize=True, database=None)
settings.load_profile("bankrun")


def more_threads_in_forks(number: int, choose: Callable[[int], None] = torch.set_num_threads, here: int = os.getpid()) -> None:
    """In place of torch.set_num_threads: in this process one, for a run's main here too. Its forks would wait for ever for
    threads that OpenMP has started here, as none of these comes along; without any they start their own."""
    choose(1 if os.getpid() == here else number)


torch.set_num_threads = more_threads_in_forks


ROOM = 2 << 30  # bytes of all tests' files at a time


def pytest_sessionstart(session: pytest.Session) -> None:
    """Without room for all tests hundreds of them would fail, each in words of its own; and compiled code of others would run."""
    if fault := others_code(make=True):
        raise pytest.UsageError(fault)
    all_tests = session.config.args_source is pytest.Config.ArgsSource.TESTPATHS
    if all_tests and (free := shutil.disk_usage(folder := tempfile.gettempdir()).free) < ROOM:
        gib = [f"{x / 2**30:.1f} GiB" for x in (ROOM, free)]
        raise pytest.UsageError(f"all tests need {gib[0]} in {folder}, {gib[1]} are free: make room, or TMPDIR=FOLDER ./test.sh")


SLOW = [  # files, the slowest first: they begin before all others, so that no worker is left with one of them at the end
    "faults/test_start.py", "faults/test_running.py", "runtime/test_checkpoints.py", "bench/test_codegen.py",
    "runtime/test_joining.py", "records/test_race.py", "kernels/test_interpreted.py", "runtime/test_warm_up.py",
    "data/test_downloads.py", "runtime/test_sample.py", "runtime/test_sources.py", "runtime/test_trouble.py",
]  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    last = len(SLOW)
    places = {ROOT / "tests" / name: at for at, name in enumerate(SLOW)}
    items.sort(key=lambda item: places.get(item.path, last))


def pytest_collection_finish() -> None:
    """What is imported by now stays: no collection of garbage looks through PyTorch's million objects again, also after a run
    in this process. A sixth of the time of tests that compile, a quarter of finding all, half of those that train."""
    gc.freeze()
    gc.unfreeze = lambda: None
    gc.enable()
    sys.path[:] = dict.fromkeys([*FIRST, *sys.path])  # ranks get it; tools of bench/ put the project first


@pytest.fixture(autouse=True)
def full_precision():
    """What a run in this process chose for its CPU ends with its test."""
    cpu.forget_cpu()
    yield
    cpu.forget_cpu()


@pytest.fixture(autouse=True)
def own_process():
    """What a tool in this process hears by, and how deep PyTorch's compiler lets Python go, is no other test's."""
    for number, handler in HANDLERS.items():
        signal.signal(number, handler)
    sys.setrecursionlimit(RECURSION)


@pytest.fixture(autouse=True)
def forget_shards():
    """A test's folder goes when it passes, and another's may have its path."""
    for found in (LISTED, CHECKED, HELD):
        found.clear()


@pytest.fixture(scope="session")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with shards of two of Python's own modules, in bytes: text that no edit of this project changes."""
    folder = tmp_path_factory.mktemp("shards")
    pieces = re.split(rb"\n\n+", b"".join(Path(module.__file__).read_bytes() for module in (argparse, typing)))
    tokens = np.concatenate([np.concatenate(([256], np.frombuffer(piece, dtype=np.uint8))) for piece in pieces])
    write_shard(folder / "local_train_000000.bin", tokens)
    write_shard(folder / "local_val_000000.bin", tokens[:4096])
    return folder


@pytest.fixture(scope="session")
def run_ranks(tmp_path_factory: pytest.TempPathFactory):
    """run_ranks(world_size, function, *args): what the top-level function returned on each rank; see common.run_ranks."""

    def run(world_size: int, function, *args) -> list:
        return common.run_ranks(tmp_path_factory.mktemp("ranks"), world_size, function, *args)

    return run

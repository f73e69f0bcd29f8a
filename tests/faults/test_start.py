"""A mistake before the ranks start is one message within seconds; a rank's end is one message and the run's exit code."""

import contextlib
import ctypes
import errno
import fcntl
import io
import importlib.util
import os
import py_compile
import re
import resource
import runpy
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import types
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

import train_gpt
from common import (
    HAS_TRITON, ROOT, SCRIPT, Forked, children, copy_project, exit_code, forked, options, run_fresh, started, text_of, unreadable,
    wait_until, without_rights,
)  # fmt: skip
from data.shards import read_shard, shard_name, write_shard
from launch import start as launcher
from launch.environment import broken_package, cut_package, package_fault
from launch.start import Ranks
from runtime import checkpoints
from runtime.options import parse_options

TINY = "--preset=demo --batch_unit=32 --num_scheduled_iterations=6 --val_tokens=512 --val_batch_tokens=256".split()
PYTHON = sys.executable

# -----------------------------------------------------------------------------
# One process, before the ranks


@pytest.fixture(autouse=True)
def signals_as_before() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (*launcher.SIGNALS, signal.SIGTSTP)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


MISTAKES = {  # arguments after good ones, the environment, message, exit code
    "no data": ("--data=/nowhere", {}, r"no shard matches /nowhere/\*_val_\*.bin: make some with data/local_text.py", 1),
    "a file for a folder": ("--data=/etc/hostname", {}, "/etc/hostname is a file: --data names the folder of the shards$", 1),
    "unknown option": ("--learning_rate=1", {}, "unrecognized arguments: --learning_rate=1", 2),
    "nearly an option": ("--val_evry=2 -seed=1", {},
                         r"unrecognized arguments: --val_evry=2 -seed=1 \(did you mean --val_every and --seed\?\)$", 2),
    "wrong type": ("--seed=first", {}, "argument --seed: invalid int value: 'first'", 2),
    "a second script": ("idea.py", {}, r"idea\.py comes after --.*: one script, before all options", 2),
    "an end in place of a value": ("--seed=--", {}, "--seed=--: -- is no value$", 2),
    "no value": ("--seed", {}, "argument --seed: expected one argument", 2),
    "unknown preset": ("--preset=laptop", {}, "argument --preset: invalid choice: 'laptop'", 2),
    "out of range": ("--val_every=-1", {}, "--val_every=-1: must be 0 or more", 1),
    "uneven micro-batches": ("--micro_batches=7", {}, "tokens do not divide into 7 micro-batches of a multiple of 16", 1),
    "documents of one token": ("--max_doc_len=1", {}, "--max_doc_len=1: must be 2 or more", 1),
    "a block without end": ("--block_size=1099511627775", {}, r"--block_size=1099511627775: must be below 2\*\*32", 1),
    "unknown encoding": ("--encoding=klingon", {}, "no encoding is called 'klingon'; there are: bytes, ", 1),
    "no such model": ("--num_heads=3", {}, "num_heads=3: must be even", 1),
    "no checkpoint": ("--resume=/nowhere.pt", {}, "/nowhere.pt: cannot be read: No such file", 1),
    "none at all": ("--resume=latest", {}, "latest: no usable checkpoint in .*: --save_every writes them", 1),
    "escape sequences": ("--resume=x\x1b[2J", {}, r"x\\x1b\[2J: cannot be read: No such file", 1),
    "no folder for the log": ("--log_dir=/dev/null", {}, "/dev/null", 1),
    "an empty checkpoint": ("--resume=", {}, r"argument --resume: is empty: leave the option out, or give a value \(check", 2),
    "an empty folder of data": ("--data=", {}, r"argument --data: is empty: leave the option out, or give a value \(folder", 2),
    "an empty folder of logs": ("--log_dir=", {}, r"argument --log_dir: is empty: leave the option out, or give a value", 2),
    "compiled code in no folder": (
        "", {"TORCHINDUCTOR_CACHE_DIR": "/dev/null"},
        "TORCHINDUCTOR_CACHE_DIR=/dev/null: no folder that can be written, File exists: name another, or unset", 1),
    "nobody's home": ("--log_dir=~nobody_here/x", {}, r"--log_dir: ~nobody_here/x: no user of this .*; a file of it is \./~nobody_", 2),
    "no ranks": ("", {"RANKS": "0"}, "RANKS=0: must be a whole number from 1 on", 2),
    "fewer than no ranks": ("", {"RANKS": "-1"}, "RANKS=-1: must be a whole number from 1 on", 2),
    "ranks by name": ("", {"RANKS": "abc"}, "RANKS=abc: must be a whole number from 1 on", 2),
    "half a rank": ("", {"RANKS": "1.5"}, "RANKS=1.5: must be a whole number from 1 on", 2),
    "more digits than Python reads": ("", {"RANKS": "9" * 5000}, "RANKS=9{20}: must be a whole number from 1 on", 2),
    "an empty argument": ("--seed=3 ''", {}, "an argument is empty: is a shell variable not set?", 2),
    "a script for the tests": (
        "", {"SCRIPT": "ideas/idea.py"},
        "SCRIPT=ideas/idea.py is for ./test.sh alone: name the script first, or unset it: ./run.sh ideas/idea.py$", 2,
    ),
    "more ranks than work": ("", {"RANKS": "1000"}, "--micro_batches=2 cannot be shared by 1000 ranks: use a multiple", 1),
    "ranks that share nothing evenly": (
        "--batch_unit=48 --val_batch_tokens=384 --val_tokens=384 --micro_batches=3", {"RANKS": "3"},
        r"lm_head \(32, 384\) cannot be sharded: its 32 rows do not divide over 3 ranks: start a number", 1),
}  # fmt: skip


@pytest.mark.parametrize("case", MISTAKES)
def test_a_mistake_is_one_message_before_any_rank_starts(start, shards, tmp_path, monkeypatch, case):
    arguments, variables, message, code = MISTAKES[case]
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    found, lines, started = start(*options(shards, tmp_path), *shlex.split(arguments))
    assert (found, started) == (code, ()), lines
    errors = [line for line in lines if re.search(f": error: .*{message}", line)]
    assert len(errors) == 1 and lines[-1] == errors[0] and len(lines) <= 5, lines
    assert not list((tmp_path / "logs").glob("**/*.*"))


@pytest.mark.parametrize("path, said", [("closed/idea.py", "Permission denied"), ("unread.py", "Permission denied"),
                                        (f"{'x' * 256}.py", "File name too long")], ids=["folder", "file", "name"])  # fmt: skip
def test_a_script_that_cannot_be_read_is_one_message(tmp_path, path, said):
    script = unreadable(tmp_path) / path
    done = subprocess.run(
        [PYTHON, f"{ROOT}/launch/start.py", f"{script}"], capture_output=True, text=True, preexec_fn=without_rights
    )
    assert (done.returncode, done.stdout, done.stderr) == (1, "", f"start.py: error: {script}: cannot be read: {said}\n")


def test_a_part_of_the_project_is_no_script(start, tmp_path):
    """Some have a main(), which ran as each rank, and ended well; to rename data/encodings.py was no way out."""
    (tmp_path / "idea.py").symlink_to(ROOT / "launch" / "start.py")
    names = "launch/start.py", "data/loader.py", "launch/environment.py", "sample.py", "tail_averages.py", "cpu.py"
    for path in (tmp_path / "idea.py", *(ROOT / name for name in names)):
        said = f"{path} is a part of the project, and no training script: begin with a copy of train_gpt.py"
        assert start(path) == (2, [f"start.py: error: {said}"], ())


def test_more_ranks_than_memory_holds_are_refused(start, shards, tmp_path, monkeypatch):
    monkeypatch.setenv("RANKS", "2")
    monkeypatch.setattr(launcher, "free_memory", lambda: 900 << 20)  # room for one
    code, lines, started = start(*options(shards, tmp_path))
    assert (code, started) == (1, ())
    assert re.search(r"error: 2 ranks need about 1.\d GiB of memory, 0.9 GiB are free: start fewer, as RANKS=1$", lines[-1])
    monkeypatch.setattr(launcher, "free_memory", lambda: 8 << 30)
    assert start(*options(shards, tmp_path))[2]


def test_a_large_vocabulary_counts(start, shards, tmp_path, monkeypatch):
    """Its logits are most of what a rank needs: an estimate was a seventh of that. In training, and in longer validations."""
    monkeypatch.setenv("RANKS", "1")
    monkeypatch.setattr(launcher, "free_memory", lambda: 2 << 30)
    tiny = options(shards, tmp_path, micro_batches=1)
    for more in (["--vocab_size=65536"], ["--vocab_size=8192", "--val_tokens=16384", "--val_batch_tokens=16384"]):
        code, lines, started = start(*tiny, *more)
        said = r"a rank needs about \d\.\d GiB of memory, 2.0 GiB are free: lower"
        assert (code, started) == (1, ()) and re.search(said, lines[-1]), lines
    assert start(*tiny)[2]


def test_the_backward_pass_counts(start, shards, tmp_path, monkeypatch):
    """Where training has longer micro-batches than validation: at width 128, --batch_unit=640, 1,936 MiB were taken for 1,062."""
    monkeypatch.setenv("RANKS", "1")
    monkeypatch.setattr(launcher, "free_memory", lambda: 1600 << 20)
    wide = options(shards, tmp_path, micro_batches=1, model_dim=256, num_heads=4, head_dim=64)
    assert start(*wide)[2]
    code, lines, started = start(*wide, "--batch_unit=192")
    assert (code, started) == (1, ()) and re.search(r"a rank needs about \d\.\d GiB of memory, 1.6 GiB are free: lower", lines[-1]), lines


LARGE = {  # RANKS, GiB free; what is refused, by what a rank needs; what is not; the last of the way out
    "windows": (1, 8, dict(block_size=1024), dict(block_size=256), "or the batches"),
    "no window beyond the batch": (1, 2, dict(block_size=256), dict(block_size=2048, val_batch_tokens=4096), "or the batches"),
    "windows in training": (1, 6, dict(val_batch_tokens=4096, batch_unit=384, block_size=1024), dict(block_size=32), "or the batches"),
    "a copy of the state, and an update": (1, 4.7, dict(bigram_rows=2_000_000), dict(bigram_rows=400_000), "or the batches"),
    "a save": (1, 6, dict(bigram_rows=2_000_000, save_every=1), dict(bigram_rows=2_000_000), "or the batches, or give --save_every=0"),
    "a save of two": (2, 12, dict(bigram_rows=2_000_000, save_every=1), dict(bigram_rows=2_000_000), "RANKS=1, or give --save_every=0"),
}  # fmt: skip


@pytest.mark.parametrize("what", LARGE)
def test_what_else_takes_memory_counts(start, shards, tmp_path, monkeypatch, what):
    """Of "windows", "a copy" and "a save" 10,564, 4,980 and 6,072 MiB were taken, where 1,077 to 2,600 were asked for: the system
    killed a rank, one as it wrote its first checkpoint."""
    ranks, free, refused, taken, way_out = LARGE[what]
    monkeypatch.setenv("RANKS", f"{ranks}")
    monkeypatch.setattr(launcher, "free_memory", lambda: int(free * 2**30))
    given = train_gpt.DEMO | dict(val_every=0, val_tokens=32768, sample_tokens=0, data=shards, log_dir=tmp_path / "logs")
    given |= dict(num_scheduled_iterations=3, num_extension_iterations=1)
    code, lines, started = start(*(f"--{name}={value}" for name, value in (given | refused).items()))
    said = rf"{'a rank needs' if ranks == 1 else '2 ranks need'} about \d+\.\d GiB of memory, {free:.1f} GiB are free: .*{way_out}$"
    assert (code, started) == (1, ()) and re.search(said, lines[-1]), lines
    assert "memory" not in start(*(f"--{name}={value}" for name, value in (given | taken).items()))[1][-1]


def test_an_idea_with_its_own_attention_is_not_taken_for_the_banded_one():
    """Which keeps a number for each query and key; and one without layers."""
    h = train_gpt.Hyperparameters(**train_gpt.DEMO | dict(block_size=1024))
    asked = lambda script: launcher.attention_memory(script, h, h.total_iterations, 16_384, False)
    own = types.SimpleNamespace(**vars(train_gpt) | {"attend": lambda *_: None})
    assert asked(train_gpt) > 8 << 30 and asked(own) == 0 == asked(types.SimpleNamespace(attend=train_gpt.attend))


ADVICE = {  # GiB free; those that each of several ranks, then one alone, needs in training and at a save; what is told
    "alone there is room": (8, (5, 0), (6, 0), "2 ranks need about 10.0 GiB of memory, 8.0 GiB are free: start fewer, as RANKS=1"),
    "alone there is none": (8, (5, 0), (9, 0), f"a rank needs about 9.0 GiB of memory, 8.0 GiB are free: lower {launcher.SIZES}"),
    "alone the save has room": (16, (4, 20), (6, 13),
        "2 ranks need about 24.0 GiB of memory, 16.0 GiB are free: start fewer, as RANKS=1, or give --save_every=0"),
    "without a save there is none either": (4, (8, 9), (8, 9),
        f"a rank needs about 9.0 GiB of memory, 4.0 GiB are free: lower {launcher.SIZES}"),
}  # fmt: skip


@pytest.mark.parametrize("case", ADVICE)
def test_a_way_out_of_too_little_memory_is_one(case):
    """RANKS=1 was told where one rank has to hold the whole state, and --save_every=0 where it did not help."""
    free, several, alone, said = ADVICE[case]
    with pytest.raises(launcher.LaunchError) as error:
        launcher.check_memory(2, lambda ranks: tuple(x << 30 for x in (several if ranks > 1 else alone)), free << 30)
    assert error.value.args[0] == said


@pytest.mark.parametrize("option, number", [("v", "RLIMIT_AS"), ("d", "RLIMIT_DATA")])
def test_a_limit_of_memory_is_told_before_the_ranks_start(start, shards, tmp_path, monkeypatch, option, number):
    """As a batch system sets it; ranks ended in tracebacks of the library that could not allocate."""
    limits, own = resource.getrlimit, getattr(resource, number)
    monkeypatch.setattr(launcher.resource, "getrlimit", lambda x: (500 << 20, -1) if x == own else limits(x))
    code, lines, started = start(*options(shards, tmp_path))
    said = rf"error: ulimit -{option} is 512000, a rank needs about \d{{6,7}}: raise it, or lower --model_dim"
    assert (code, started) == (1, ()) and re.search(said, lines[-1]), lines


def test_a_limit_of_a_files_size_is_told_before_the_ranks_start(start, shards, tmp_path, monkeypatch):
    """No checkpoint was saved, and each told so."""
    limits, own = resource.getrlimit, resource.RLIMIT_FSIZE
    monkeypatch.setattr(launcher.resource, "getrlimit", lambda x: (100 << 10, -1) if x == own else limits(x))
    code, lines, started = start(*options(shards, tmp_path, save_every=4))
    said = r"error: ulimit -f is 100, a checkpoint has over \d{3,5}: raise it, or --save_every=0$"
    assert (code, started) == (1, ()) and re.search(said, lines[-1]), lines
    assert start(*options(shards, tmp_path, save_every=0))[2]


@pytest.mark.parametrize("size", ["--bigram_rows=100000000", "--model_dim=65536 --num_heads=2048 --head_dim=32"])
def test_a_model_that_memory_does_not_hold_is_refused_unbuilt(start, shards, tmp_path, monkeypatch, size):
    """It was built to be looked at, and the check was killed."""
    monkeypatch.setattr(launcher, "free_memory", lambda: 8 << 30)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    code, lines, started = start(*options(shards, tmp_path), *size.split())
    said = r"error: a rank needs about [\d,]+\.\d GiB of memory, 8.0 GiB are free: lower --model_dim, --bigram_rows"
    assert (code, started) == (1, ()) and re.search(said, lines[-1]), lines
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 << 10  # KiB


LIMITS = {  # files below /sys/fs/cgroup, GiB that are free of the machine's 16, /proc/self/cgroup
    "none": ({}, 16),
    "version 2": ({"memory.max": f"{8 << 30}\n", "memory.current": f"{3 << 30}\n"}, 5),
    "version 2, without one": ({"memory.max": "max\n", "memory.current": f"{3 << 30}\n"}, 16),
    "version 1": ({"memory/memory.limit_in_bytes": f"{8 << 30}\n", "memory/memory.usage_in_bytes": f"{2 << 30}\n"}, 6),
    "of a job": ({"job/memory.max": f"{8 << 30}\n", "job/memory.current": f"{3 << 30}\n"}, 5, "0::/job/step\n"),
    "of a job's step": ({"job/step/memory.max": f"{8 << 30}\n", "job/step/memory.current": f"{1 << 30}\n",
                         "job/memory.max": "max\n", "job/memory.current": "1\n"}, 7, "0::/job/step\n"),
    "of a job, version 1": ({"memory/job/memory.limit_in_bytes": f"{8 << 30}\n", "memory/job/memory.usage_in_bytes": "0\n",
                             "memory/cpu/memory.limit_in_bytes": "0\n", "memory/cpu/memory.usage_in_bytes": "0\n"}, 8,
                            "9:cpu,cpuacct:/cpu\n8:memory:/job\n"),
    "version 2, files cached": ({"memory.max": f"{8 << 30}\n", "memory.current": f"{7 << 30}\n", "memory.stat":
                                f"anon {4 << 30}\nfile {3 << 30}\nactive_file {1 << 30}\ninactive_file {2 << 30}\n"}, 4),
    "version 1, files cached": ({"memory/memory.limit_in_bytes": f"{8 << 30}\n", "memory/memory.usage_in_bytes": f"{7 << 30}\n",
                                 "memory/memory.stat": f"cache 1\nactive_file {1 << 30}\ntotal_active_file {2 << 30}\n"}, 3),
    "version 1, without": ({"memory/memory.limit_in_bytes": f"{2**63 - 4096}\n", "memory/memory.usage_in_bytes": "1\n"}, 16),
}  # fmt: skip


@pytest.mark.parametrize("case", LIMITS)
def test_the_memory_of_a_control_group_is_all_that_is_free(tmp_path, case):
    files, gib, *own = LIMITS[case]
    all_files = {"proc/meminfo": f"MemAvailable:   {16 << 20} kB\n", **{f"sys/fs/cgroup/{name}": files[name] for name in files}}
    all_files |= {"proc/self/cgroup": own[0]} if own else {}
    for name, text in all_files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert launcher.free_memory(tmp_path) == gib << 30
    (tmp_path / "proc" / "meminfo").write_text("MemFree: 1 kB\n")  # of some containers
    assert launcher.free_memory(tmp_path) == (gib << 30 if gib < 16 else 1 << 62)


def test_more_ranks_than_gpus_are_refused(start, shards, tmp_path, monkeypatch):
    monkeypatch.setenv("RANKS", "3")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: types.SimpleNamespace(name="H100"))
    code, lines, started = start(*options(shards, tmp_path))
    assert (code, started) == (1, ()) and lines[-1].endswith("RANKS=3: this machine shows 2 GPUs, and a rank needs its own")
    assert ", 2 x H100 (" in lines[0]


@pytest.mark.parametrize("gpus, micro_batches, ranks", [(0, 2, 2), (0, 1, 1), (8, 8, 8), (6, 8, 4), (8, 3, 1), (1, 8, 1)])
def test_ranks_that_nobody_asked_for_share_the_micro_batches(gpus, micro_batches, ranks):
    assert launcher.usual_ranks(gpus, micro_batches) == ranks


def test_a_limit_of_open_files_is_told_before_the_ranks_start(start, shards, tmp_path, monkeypatch):
    monkeypatch.setattr(launcher.resource, "getrlimit", lambda _: (14, 4096))
    code, lines, started = start(*options(shards, tmp_path))
    assert (code, started) == (1, ()) and lines[-1].endswith("error: ulimit -n is 14: a run may have 64 files open: raise it")


def test_gloos_interface_must_be_there(start, shards, tmp_path, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,wlan7")
    code, lines, started = start(*options(shards, tmp_path))
    assert (code, started) == (1, ())
    said = "GLOO_SOCKET_IFNAME=lo,wlan7: this machine has no such network interface, but "
    assert said in lines[-1] and lines[-1].endswith(": unset it, or name one of them")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0,lo")
    launcher.check_interfaces("GLOO_SOCKET_IFNAME", launcher.gloo_has, lambda: [(1, "lo"), (2, "eth0")])


@pytest.mark.parametrize("text, met", [
    ("", True), (",", True), ("lo", True), ("eth", True), ("wlan,lo", True), ("=eth0,ib0", True), ("^docker,lo", True), ("^=lo", True),
    ("nope", False), ("=eth", False), ("^lo,eth", False), ("^=eth0,lo", False),
])  # fmt: skip
def test_nccls_pattern_must_be_met(monkeypatch, text, met):
    """On an H200 the ranks asked whether all of them were started, and is the port free."""
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", text)
    with contextlib.nullcontext() if met else pytest.raises(launcher.LaunchError, match=re.escape(f"NCCL_SOCKET_IFNAME={text}: this")):
        launcher.check_interfaces("NCCL_SOCKET_IFNAME", launcher.nccl_has, lambda: [(1, "lo"), (2, "eth0")])


@pytest.fixture
def one_gpu(monkeypatch):
    """What the launcher asks of PyTorch, which sees one."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: types.SimpleNamespace(name="H200"))


def test_tritons_interpreter_is_for_a_cpu(start, shards, tmp_path, monkeypatch, one_gpu):
    """Exported for the kernels' tests, it ended a GPU's run in a traceback of the warm-up."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    code, lines, started = start(*options(shards, tmp_path))
    said = "error: TRITON_INTERPRET is set: Triton's interpreter runs kernels on a CPU alone: unset it"
    assert (code, started) == (1, ()) and lines[-1].endswith(said)


def test_a_gpus_network_interface_is_asked_for(start, shards, tmp_path, monkeypatch, one_gpu):
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "nope")
    code, lines, started = start(*options(shards, tmp_path))
    assert (code, started) == (1, ()) and "error: NCCL_SOCKET_IFNAME=nope: this machine has no such network interface" in lines[-1]


@pytest.mark.parametrize("error, setting", [
    (RuntimeError("stoull"), "max_split_size_mb:abc"),
    (ValueError("Unrecognized key 'expandable_segment' in CUDA allocator config."), "expandable_segment:True"),
])  # fmt: skip
def test_gpus_that_cannot_be_used_are_told(start, shards, tmp_path, monkeypatch, one_gpu, error, setting):
    """Each was a traceback on an H200."""

    def cannot(_):
        raise error

    monkeypatch.setattr(torch.cuda, "get_device_properties", cannot)
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", setting)
    code, lines, started = start(*options(shards, tmp_path))
    said = f"error: PyTorch cannot use the GPUs, by PYTORCH_ALLOC_CONF={setting}: {error}"
    assert (code, started) == (1, ()) and lines[-1].endswith(said)


ABORTS = """#include <cstdlib>
#include <stdexcept>
#include <string>
static bool read = [] {
    if (std::getenv("PYTORCH_CUDA_ALLOC_CONF") == std::string("abc")) throw std::runtime_error("Index out of bounds");
    return true;
}();
"""


@pytest.mark.skipif(not shutil.which("g++"), reason="no C++ compiler")
def test_a_setting_by_which_pytorchs_library_for_cuda_aborts_is_told(tmp_path, monkeypatch):
    """PyTorch's for CUDA reads it as it is loaded, and aborts with 40 lines of C++ frames."""
    (folder := tmp_path / "torch" / "lib").mkdir(parents=True)
    spec = types.SimpleNamespace(origin=f"{tmp_path}/torch/__init__.py")
    monkeypatch.setattr(launcher.importlib.util, "find_spec", lambda _: spec)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "abc")
    launcher.check_allocators()  # a PyTorch without CUDA
    command = ["g++", "-shared", "-fPIC", "-x", "c++", "-", "-o", f"{folder}/libc10_cuda.so"]
    subprocess.run(command, input=ABORTS, text=True, check=True)
    with pytest.raises(launcher.LaunchError) as told:
        launcher.check_allocators()
    fault = "PyTorch cannot be imported, by PYTORCH_CUDA_ALLOC_CONF=abc: Index out of bounds"
    assert told.value.args[0] == f"{fault}: unset it, or write option:value,option:value"
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    launcher.check_allocators()


@pytest.mark.parametrize("leave, code", [("", 0), ("0", 0), ("3", 3)])
def test_a_script_that_ends_while_it_is_imported_is_told(start, tmp_path, leave, code):
    script = tmp_path / "idea.py"
    script.write_text(f"import sys\nsys.exit({leave})\n")
    ended, lines, started = start(script)
    assert (ended, started) == (1, ())
    assert lines[-1].endswith(f"idea.py ended while it was imported, with code {code}: nothing was trained")


def test_too_little_room_is_told_before_the_ranks_start(start, shards, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**9, 10**9, 10**6))
    code, lines, started = start(*options(shards, tmp_path, save_every=3, keep_checkpoints=4))
    assert (code, started) == (1, ()) and re.search(r"checkpoints need [\d,]+ bytes, 1,000,000 are free: make room", lines[-1])


SAVES = [(0, 0, 0), (1, 0, 8), (3, 0, 3), (4, 0, 2), (99, 0, 1), (3, 3, 2), (3, 6, 1)]  # save_every, step resumed, checkpoints


@pytest.mark.parametrize("save_every, resumed, saves", SAVES)
def test_room_is_wanted_for_what_will_be_saved(start, shards, tmp_path, monkeypatch, no_warm_up, save_every, resumed, saves):
    """The same before the ranks start and by them."""
    if resumed:
        train_gpt.main(options(shards, tmp_path, save_every=3, keep_checkpoints=9))
    resume = {"resume": tmp_path / "logs" / "run" / f"step_{resumed:06d}.pt"} if resumed else {}
    arguments, asked = options(shards, tmp_path, save_every=save_every, **resume), []
    monkeypatch.setattr(checkpoints, "check_room", lambda _, layout, ranks, keep, saves: asked.append(bool(layout) * saves))
    code, lines, _ = start(*arguments)
    assert code == 0, lines
    monkeypatch.setattr(train_gpt, "warm_up", lambda *_: sys.exit("far enough"))
    with pytest.raises(SystemExit, match="far enough"):
        train_gpt.main(arguments)
    assert asked == [saves] * (1 + bool(save_every))


def test_a_resumption_without_its_runs_options_is_told_of_them(start, shards, tmp_path, no_warm_up):
    """Too few tokens for a schedule that was never meant: the message said how many more to make."""
    train_gpt.main(options(shards, tmp_path, save_every=8))
    code, lines, _ = start(*options(shards, tmp_path, resume="latest", num_scheduled_iterations=10**5))
    assert code == 1 and "tokens" in lines[-1]
    assert lines[-1].endswith("; is it the data, and are these the options, of the run that is resumed?")


def test_a_checkpoint_needs_room_for_its_log_and_the_pending_gradients_of_all_ranks(tmp_path, monkeypatch):
    free = 3 * (400 + (1 << 20))  # two that are kept, one in the making
    layout, usage = {"state": torch.zeros(60), "partial": {"a": torch.zeros(20)}}, shutil._ntuple_diskusage  # 2 ranks
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10**9, 10**9, free))
    checkpoints.check_room(tmp_path, layout, 2, 2, 5)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10**9, 10**9, free - 1))
    with pytest.raises(OSError, match=f"3 checkpoints need {free:,} bytes, {free - 1:,} are free: make room or lower"):
        checkpoints.check_room(tmp_path, layout, 2, 2, 5)
    (tmp_path / "step_000004.pt.bankrun.tmp").write_bytes(b"x" * 9000)  # of a save that was killed: the next one drops it
    checkpoints.check_room(tmp_path, layout, 2, 2, 5)
    free = 1
    checkpoints.check_room(tmp_path, layout, 2, 2, 0)  # of a run at its end, which saves nothing: it could not be resumed


def test_checkpoints_of_another_run_are_told_before_the_ranks_start(start, shards, tmp_path):
    """Only those of this one's name: not what lies in the folder of all runs."""
    for path in (tmp_path / "logs" / "step_000001.pt", tmp_path / "logs" / "run" / "step_000003.pt"):
        path.parent.mkdir(exist_ok=True)
        path.touch()
    code, lines, started = start(*options(shards, tmp_path, save_every=3))
    said = f"{tmp_path}/logs/run holds another run's checkpoints: move it, or give another --run_id or --log_dir"
    assert (code, started) == (1, ()) and lines[-1].endswith(f"error: {said}")
    code, _, started = start(*(option for option in options(shards, tmp_path, save_every=3) if "run_id" not in option))
    assert code == 0 and started


def test_a_home_folder_in_an_option_is_meant_as_such(start, shards, tmp_path, monkeypatch):
    """Shells expand --log_dir ~/runs, and leave --log_dir=~/runs as it is."""
    monkeypatch.setenv("HOME", f"{tmp_path}")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").symlink_to(shards)
    code, _, (_, command) = start(*options(shards, tmp_path), "--log_dir=~/runs", "--data=~/mine")
    assert code == 0 and {*command[-2:]} == {"--log_dir=~/runs", "--data=~/mine"}  # which each rank takes so, too
    s = parse_options(train_gpt.Hyperparameters, train_gpt.PRESETS, "demo", command[3:])
    assert (s.log_dir, s.data) == (f"{tmp_path}/runs", f"{tmp_path}/mine")
    code, lines, _ = start(*options(shards, tmp_path), "--resume=~/no.pt")
    assert code == 1 and f"{tmp_path}/no.pt: cannot be read: No such file" in lines[-1]
    assert not (tmp_path / "~").exists()


def test_a_trace_that_is_there_is_told_before_the_ranks_start(start, shards, tmp_path):
    """Of a run whose log was moved, or a file of the user's; one that traces nothing leaves it alone."""
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "run.trace.json").write_text("mine")
    code, lines, started = start(*options(shards, tmp_path, trace_steps="2:4"))
    said = f"{tmp_path}/logs/run.trace.json is there, another run's trace or a file of yours: move it, or give another --run_id"
    assert (code, started) == (1, ()) and lines[-1].endswith(f"error: {said} or --log_dir")
    assert start(*options(shards, tmp_path))[0] == 0


def test_a_disk_that_is_full_is_named(start, shards, tmp_path, monkeypatch):
    """Its error names no file."""
    full = lambda **_: (_ for _ in ()).throw(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    monkeypatch.setattr(checkpoints.tempfile, "NamedTemporaryFile", full)
    code, lines, started = start(*options(shards, tmp_path))
    assert (code, started) == (1, ())
    said = f"{tmp_path}/logs: cannot be written: {os.strerror(errno.ENOSPC)}: see to it, or give another --log_dir"
    assert lines[-1].endswith(f"error: {said}")


@pytest.mark.parametrize("place", ["a file", "a link to nowhere"])
def test_what_stands_in_the_logs_place_is_named(start, shards, tmp_path, place):
    if place == "a file":
        (tmp_path / "logs").touch()
    else:
        (tmp_path / "logs").symlink_to(tmp_path / "unmounted" / "logs")
    code, lines, started = start(*options(shards, tmp_path, save_every=4))
    assert (code, started) == (1, ()) and re.search(f"{tmp_path}/logs(/run)? is no folder, or a link to one that is not", lines[-1])


def test_a_checkpoint_that_does_not_serve_is_told_before_the_ranks_start(start, shards, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(train_gpt, "warm_up", lambda *_: None)
        patch.setattr(os, "sched_getaffinity", lambda _: {0})  # one thread
        train_gpt.main(options(shards, tmp_path, save_every=8))
    path = tmp_path / "logs" / "run" / "step_000008.pt"
    assert start(*options(shards, tmp_path, resume=path))[2][0] == 2
    code, lines, started = start(*options(shards, tmp_path, resume=path, seed=3))
    assert (code, started) == (1, ()) and lines[-1].endswith("step_000008.pt cannot be resumed: seed is 0, here 3")
    code, lines, started = start(*options(shards, tmp_path))
    assert (code, started) == (1, ()) and "run.txt is another run's log: move it" in lines[-1]
    path.write_bytes(path.read_bytes()[:-1])
    code, lines, started = start(*options(shards, tmp_path, resume=path))
    assert (code, started) == (1, ()) and "step_000008.pt: damaged or cut short" in lines[-1]


def test_a_run_under_way_is_told_as_such(start, shards, tmp_path):
    """The same command in a second terminal: it was told to move the log."""
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "run.txt").write_text("a log\n")
    with open(tmp_path / "logs" / "run.lock", "wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        code, lines, started = start(*options(shards, tmp_path))
    message = f"run run is under way in another process, which holds {tmp_path}/logs/run.lock: wait for its end"
    assert (code, started) == (1, ()) and lines[-1].endswith(message)


def test_a_good_start_says_what_it_does_and_how_long_it_took(start, shards, tmp_path, monkeypatch):
    code, lines, (count, command) = start(*options(shards, tmp_path))
    assert (code, count) == (0, 2) and command == [PYTHON, "-u", f"{ROOT / 'train_gpt.py'}", *options(shards, tmp_path)]
    assert re.fullmatch(r"environment: .+, Python [\d.]+, PyTorch \S+, no GPU \([\d.]+ s\)", lines[0])
    assert re.fullmatch(r"settings, data and room are checked; starting 2 ranks \([\d.]+ s\)", lines[1]) and len(lines) == 2
    monkeypatch.setenv("BANKRUN_CHECK_ALONE", "1")
    code, lines, started = start(*options(shards, tmp_path))
    assert (code, started) == (0, ()) and re.fullmatch(r"settings, data and room are checked \([\d.]+ s\)", lines[-1])


@pytest.mark.parametrize("console", ["full", "gone", "ascii", "none"])
def test_a_console_that_cannot_be_written_keeps_no_rank_from_starting(start, shards, tmp_path, monkeypatch, console):
    """Nor the tool that makes the data from making them."""
    (reader, writer), broken = os.pipe(), {"full": lambda: open("/dev/full", "w"), "none": lambda: None}
    os.close(reader)
    broken |= {"gone": lambda: os.fdopen(writer, "w", closefd=False)}
    broken |= {"ascii": lambda: io.TextIOWrapper(io.BytesIO(), encoding="ascii")}
    tool = tmp_path / "tool.py"
    tool.write_text(f"print('ü' * 99999)\nopen('{tmp_path}/made', 'w')")
    monkeypatch.setattr(launcher, "MAKERS", {"data/local": f"{tool}", f"{shards}": f"{tool}"})
    monkeypatch.setitem(train_gpt.PRESETS, "demo", {**train_gpt.DEMO, "data": f"{shards}"})
    monkeypatch.setattr(launcher, "load", lambda _: train_gpt)
    for stream in ("stdout", "stderr"):
        monkeypatch.setattr(sys, stream, broken[console]())
    launcher.show("ü", 0)
    launcher.tell("ü", "ü")
    code, _, (ranks, _) = start(f"--log_dir={tmp_path / 'logs'}", *TINY)
    assert (code, ranks) == (0, 2) and (tmp_path / "made").exists()
    monkeypatch.undo()
    os.close(writer)


# -----------------------------------------------------------------------------
# Scripts and paths


def test_a_run_that_goes_on_keeps_the_data_that_it_began_with(start, shards, tmp_path, monkeypatch):
    """The tool would replace them where the text has changed meanwhile, as that of a newer Python."""
    tool, data = tmp_path / "tool.py", tmp_path / "data" / "local"
    tool.write_text(f"open({f'{tmp_path}/asked'!r}, 'w')")
    shutil.copytree(shards, data)
    monkeypatch.setattr(launcher, "ROOT", tmp_path)
    monkeypatch.setattr(launcher, "MAKERS", {"data/local": f"{tool}"})
    monkeypatch.setattr(launcher, "find_script", lambda given: (SCRIPT, given))
    more = [option for option in options(shards, tmp_path) if not option.startswith("--data")]
    monkeypatch.setattr(checkpoints, "find_checkpoint", lambda *_: (tmp_path / "some.pt", {}))
    code, lines, _ = start(*more, "--resume=some.pt")
    assert code == 1 and "some.pt cannot be resumed" in lines[-1] and not (tmp_path / "asked").exists(), lines
    next(data.glob("*_val_*")).unlink()
    start(*more, "--resume=some.pt")
    assert (tmp_path / "asked").exists()


def test_data_that_another_python_has_made_since_are_told(start, shards, tmp_path, monkeypatch, no_warm_up):
    """Of two checksums nobody knows what to do."""
    shutil.copytree(shards, data := tmp_path / "data" / "local")
    monkeypatch.setattr(launcher, "ROOT", tmp_path)
    monkeypatch.setattr(launcher, "find_script", lambda given: (SCRIPT, given))
    given = [option for option in options(shards, tmp_path, save_every=4) if not option.startswith("--data")]
    monkeypatch.chdir(tmp_path)
    train_gpt.main([*given, "--data=data/local"])
    write_shard(data / "local_train_000000.bin", read_shard(data / "local_train_000000.bin")[::-1].copy())
    code, lines, started = start(*given, f"--resume={tmp_path}/logs/run/step_000004.pt")
    said = "cannot be resumed: other shards: name its own by --data, or make them again by the same Python; local_train.*CRC-32"
    assert (code, started) == (1, ()) and re.search(said, lines[-1]), lines


def test_a_shard_that_is_not_there_between_others_is_told(start, shards, tmp_path):
    """It trained on what was left of a copy cut short, in silence."""
    tokens = read_shard(shards / "local_train_000000.bin")
    for number, part in {0: tokens[:1000], 1: tokens[1000:2000], 3: tokens[3000:]}.items():
        write_shard(tmp_path / shard_name("local", "train", number), part)
    shutil.copy(shards / "local_val_000000.bin", tmp_path)
    code, lines, started = start(*options(shards, tmp_path), f"--data={tmp_path}")
    told = "data: local_train_000003.bin follows local_train_000001.bin: what lay between is not trained on"
    assert code == 0 and started and lines.count(told) == 1, lines
    for number in (1, 3):
        shutil.copy(tmp_path / shard_name("local", "train", number), tmp_path / f"\x1b[2J_train_{number:06d}.bin")
    lines = start(*options(shards, tmp_path), f"--data={tmp_path}")[1]
    assert told.replace("local", r"\x1b[2J") in lines, lines
    for number in (1, 3):
        (tmp_path / f"\x1b[2J_train_{number:06d}.bin").unlink()
    os.rename(tmp_path / shard_name("local", "train", 3), tmp_path / shard_name("local", "train", 2))
    assert not [line for line in start(*options(shards, tmp_path), f"--data={tmp_path}")[1] if " follows " in line]
    assert not [*launcher.gaps({f"my_train_{i}.bin": "CRC-32 0" for i in range(12)})]  # numbers, not texts


BEFORE_DATA = {  # mistakes that need no data
    "--resume=/nowhere.pt": "/nowhere.pt: cannot be read",
    "--encoding=gpt7": "no encoding is called 'gpt7'",
    "--num_heads=3": "num_heads=3: must be even",
    "--bigram_rows=4000000000": "GiB of memory",
    "--run_id=old": "logs/old.txt is another run's log",
    "--log_dir=/proc/logs": "/proc/logs: cannot be written",
}


@pytest.mark.parametrize("mistake", BEFORE_DATA)
def test_a_mistake_is_told_before_data_are_made(start, shards, tmp_path, monkeypatch, mistake):
    """A first download takes minutes; once the data are there, the tool looks at them first."""
    tool = tmp_path / "tool.py"
    tool.write_text(f"open({f'{tmp_path}/asked'!r}, 'w')")
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "old.txt").write_text("mine")
    monkeypatch.setattr(launcher, "ROOT", tmp_path)
    monkeypatch.setattr(launcher, "MAKERS", {"data/local": f"{tool}"})
    monkeypatch.setattr(launcher, "find_script", lambda given: (SCRIPT, given))
    more = [option for option in options(shards, tmp_path) if not option.startswith("--data")]
    code, lines, _ = start(*more, *mistake.split())
    assert code == 1 and BEFORE_DATA[mistake] in lines[-1] and not (tmp_path / "asked").exists(), lines
    start(*more)
    assert (tmp_path / "asked").exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_ends_the_tool_that_makes_the_data(shards, tmp_path, monkeypatch, number):
    tool, here = tmp_path / "tool.py", tmp_path / "here"
    tool.write_text(f"import os, time\nopen({f'{here}.tmp'!r}, 'w').write(str(os.getpid()))\n"
                    f"os.rename({f'{here}.tmp'!r}, {f'{here}'!r})\ntime.sleep(600)")  # fmt: skip
    monkeypatch.setattr(launcher, "MAKERS", {f"{shards}": f"{tool}"})
    monkeypatch.setitem(train_gpt.PRESETS, "demo", {**train_gpt.DEMO, "data": f"{shards}"})
    monkeypatch.setattr(launcher, "load", lambda _: train_gpt)

    def begin() -> None:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # these tests may themselves run under nohup
        launcher.main([f"--log_dir={tmp_path / 'logs'}", *TINY])

    child = forked(begin, tmp_path / "output")
    wait_until(here.exists)
    os.kill(child, number)
    assert exit_code(child) == 128 + number
    assert not Path("/proc", here.read_text()).exists()
    assert text_of(tmp_path / "output").splitlines()[-1].endswith(f".py: {number.name}: ended before its ranks started")


@pytest.mark.parametrize("safe", ["", "1"], ids=["", "PYTHONSAFEPATH"])
@pytest.mark.parametrize("program", ["start.py", "environment.py"])
def test_ctrl_c_while_it_imports_is_quiet(tmp_path, program, safe):
    """Here it meets a module of Python's own that never comes, as PYTHONPATH goes before them."""
    (tmp_path / "shutil.py").write_text(f"import time\nopen({f'{tmp_path}/here'!r}, 'w')\nwhile True: time.sleep(0.1)")
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}", "PYTHONSAFEPATH": safe}
    command = [PYTHON, f"{ROOT}/launch/{program}", f"{ROOT}/requirements.txt"]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    wait_until((tmp_path / "here").exists)
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=60) == (b"", None) and process.returncode == 130


CHARACTERS, BLANK = "characters, or with \\ or control characters: rename it", "at its end or behind a .py: rename it"
NAMES = {"x\ny.py": CHARACTERS, "x\udcff.py": CHARACTERS, "x\\y.py": CHARACTERS, f"{'x' * 199}.py": CHARACTERS,
         " x.py": BLANK, "x.py y(2).py": BLANK}  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_a_script_whose_name_no_log_could_give_back_is_refused(start, shards, tmp_path, monkeypatch, name):
    """It trained, and extract.py refused its log, or wrote another name; or compare.py found no settings there."""
    shutil.copy(SCRIPT, script := tmp_path / name)
    code, lines, started = start(script, *options(shards, tmp_path))
    assert (code, started) == (1, ()) and lines[-1].endswith(NAMES[name]), lines


def test_a_package_beside_a_script_that_hides_one_of_ours_is_named(start, shards, tmp_path):
    shutil.copy(SCRIPT, script := tmp_path / "idea.py")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "__init__.py").touch()
    with_others = {name: sys.modules.pop(name) for name in [*sys.modules] if name.partition(".")[0] == "data"}
    try:
        code, lines, started = start(script, *options(shards, tmp_path))
    finally:
        sys.modules.update(with_others)
    said = f"No module named 'data.encodings': {tmp_path}/data hides the module 'data' that others import: rename it"
    assert (code, started) == (1, ()) and lines[-1] == f"idea.py: error: {said}", lines


@pytest.mark.parametrize("name", ["attention", "cpu", "sample", "tail_averages", "tracer", "triton_kernels"])
def test_a_file_beside_a_script_that_hides_one_of_ours_is_named(start, shards, tmp_path, name):
    """As a sample.py of the user's own: a traceback, of an import that failed. A changed copy of ours is an idea's right."""
    shutil.copy(SCRIPT, script := tmp_path / "idea.py")
    (tmp_path / f"{name}.py").write_text("import torch\n")
    ours = {name: sys.modules.pop(name)} if name in sys.modules else {}
    try:
        code, lines, started = start(script, *options(shards, tmp_path))
        assert (code, started) == (1, ()) and len(lines) == 1, lines
        said = f": {tmp_path}/{name}.py hides the module '{name}' that others import: rename it"
        assert "has no attribute" in lines[0] or "cannot import name" in lines[0]
        assert lines[0].endswith(said), lines
        sys.modules.pop(name, None)
        (tmp_path / f"{name}.py").write_text("import no_such_model\n")
        said, _, started = start(script, *options(shards, tmp_path))
        note = f"{tmp_path}/{name}.py is imported in place of the project's: rename it, if that is not meant"
        assert said.endswith(f"No module named 'no_such_model'\n{note}") and not started
        if name == "sample":  # the others register operators, once a process
            shutil.copy(ROOT / f"{name}.py", tmp_path)
            assert start(script, *options(shards, tmp_path))[0] == 0
    finally:
        sys.modules.pop(name, None)
        sys.modules.update(ours)


def test_a_file_of_the_projects_root_that_hides_a_package_is_named(start, shards, tmp_path, monkeypatch):
    """Each rank ended in a traceback, where the script lies elsewhere."""
    monkeypatch.setattr(launcher, "ROOT", root := tmp_path / "project")
    root.mkdir()
    (root / "torch.py").touch()
    (tmp_path / "ideas").mkdir()
    shutil.copy(SCRIPT, script := tmp_path / "ideas" / "idea.py")
    with pytest.raises(launcher.LaunchError, match=f"{root}/torch.py hides the module 'torch' that others import: rename it"):
        launcher.load(script)


@pytest.mark.parametrize("name", ["copy.py", "queue.py", "sample.py", "tail_averages.py", "torch.py"])
def test_a_script_that_hides_a_module_is_refused(start, shards, tmp_path, name):
    shutil.copy(SCRIPT, tmp_path / name)
    code, lines, started = start(tmp_path / name, *options(shards, tmp_path))
    assert (code, started) == (1, ()) and len(lines) == 1
    assert f"/{name} hides the module '{name[:-3]}' that others import: rename it" in lines[0]


@pytest.mark.parametrize(
    "field, said",
    [
        ("gain: float = setting(__import__('numpy').sqrt(0.5), 'x')", "gain is or holds a float64"),
        ("teacher: Path = setting(Path('none'), 'x')", "teacher is or holds a Path"),
        ("clip: int | None = setting(None, 'x')", r"clip is or holds a (int \| None|Union)"),
    ],
)
def test_a_setting_that_no_checkpoint_could_give_back_is_refused(start, shards, tmp_path, field, said):
    source, line = SCRIPT.read_text(), "    seed: int = setting("
    assert source.count(line) == 1
    (tmp_path / "idea.py").write_text(source.replace(line, f"    {field}\n{line}"))
    code, lines, started = start(tmp_path / "idea.py", *options(shards, tmp_path))
    assert (code, started) == (1, ()) and re.fullmatch(
        rf"idea\.py: error: the setting {said}: must be a plain bool, int, float or str", lines[-1]
    ), lines


ODD_SETTINGS = {
    "a whole number": ("gamma: float = 1", "gamma is of type float, and 1 is none: write 1.0"),
    "a text for a float": ("gamma: float = 'x'", "gamma is of type float, and 'x' is none"),
    "a text": ("gamma: int = '1'", "gamma is of type int, and '1' is none"),
    "an option": ("preset: str = 'x'", "preset has the name of an option that all scripts have: rename it"),
    "the other option": ("help: str = 'x'", "help has the name of an option that all scripts have: rename it"),
    "a function's": ("warm: int = __import__('dataclasses').field(default_factory=int)",
                     "warm has no default of its own: give one, as setting(1, 'meaning')"),
}
DEFAULTS = {  # of a new setting, which a user did not give: he was told of an option
    "z_loss: float = 0.0": r"--z_loss=0\.0: must be positive and finite",
    "rampup: int = setting(0, 'x')": "--rampup=0: must be positive",
    "shift: float = setting(-1.0, 'x', least=0)": r"--shift=-1\.0: must be 0 or more and finite",
    "limit: int = setting(2**40, 'x')": r"--limit=\d+: must be below 2\*\*32",
}


@pytest.mark.parametrize("case", ODD_SETTINGS)
def test_a_setting_must_be_of_its_type_and_have_a_name_of_its_own(start, shards, tmp_path, case):
    """A float that is 1 made checkpoints that could not be resumed: 1.0 came back."""
    field, said = ODD_SETTINGS[case]
    line = "    seed: int = setting("
    (tmp_path / "idea.py").write_text(SCRIPT.read_text().replace(line, f"    {field}\n{line}"))
    code, lines, started = start(tmp_path / "idea.py", *options(shards, tmp_path))
    assert (code, started) == (1, ()) and lines[-1] == f"idea.py: error: the setting {said}"


ODD_CLASSES = {  # changes of the script's settings, and presets
    "a misspelt name": ("vocab_size=257, bos_id=256,", "vocab_size=257, bos_ids=256,", "the preset 'demo' gives 'bos_ids', and no setting has that name "
                        "(did you mean bos_id?)"),
    "a name like none": ("vocab_size=257, bos_id", "vocab_size=257, warmth=2, bos_id", "the preset 'demo' gives 'warmth', and no setting has that name"),
    "frozen": ("@dataclass\nclass Hyper", "@dataclass(frozen=True)\nclass Hyper",
               "Hyperparameters is frozen or has slots, and a run names itself there: make it neither"),
    "slots": ("@dataclass\nclass Hyper", "@dataclass(slots=True)\nclass Hyper",
              "Hyperparameters is frozen or has slots, and a run names itself there: make it neither"),
}  # fmt: skip


@pytest.mark.parametrize("case", ODD_CLASSES)
def test_settings_that_no_run_could_have_are_told_before_the_ranks_start(start, shards, tmp_path, case):
    """Tracebacks, of the launcher or of a rank."""
    old, new, said = ODD_CLASSES[case]
    assert (source := SCRIPT.read_text()).count(old) == 1
    (tmp_path / "idea.py").write_text(source.replace(old, new))
    code, lines, started = start(tmp_path / "idea.py", *options(shards, tmp_path))
    assert (code, started) == (1, ()) and lines[-1] == f"idea.py: error: {said}"


@pytest.mark.parametrize("field", DEFAULTS)
def test_a_default_outside_of_its_limits_is_told_as_the_scripts(start, shards, tmp_path, field):
    line = "    seed: int = setting("
    (tmp_path / "idea.py").write_text(SCRIPT.read_text().replace(line, f"    {field}\n{line}"))
    code, lines, started = start(tmp_path / "idea.py", *options(shards, tmp_path))
    row = "a limit from below is the least of its row, as setting(0.0, …, least=0), or least=-1 to go below 0"
    told = f"and what the script gives is not: change that; {row}"
    assert (code, started) == (1, ()) and re.fullmatch(f"idea.py: error: {DEFAULTS[field]}, {re.escape(told)}", lines[-1]), lines


def test_settings_that_change_when_they_are_copied_are_told_before_the_ranks_start(start, shards, tmp_path):
    line = "    seed: int = setting("
    made = "    def __post_init__(self):\n        self.muon_lr_mul *= 0.5\n\n"
    (tmp_path / "idea.py").write_text(SCRIPT.read_text().replace(line, f"{made}{line}"))
    code, lines, started = start(tmp_path / "idea.py", *options(shards, tmp_path))
    said = "idea.py: error: the setting muon_lr_mul changes when settings are copied, as by __post_init__: derive it where it is used"
    assert (code, started) == (1, ()) and lines[-1] == said, lines


TAKEN = {
    "all of it": "from train_gpt import *\n",
    "its main alone": "import train_gpt\nfrom train_gpt import Hyperparameters, PRESETS, build, check_shards, main\n",
    "nothing else": "import train_gpt\nfrom train_gpt import main\n",
}


@pytest.mark.parametrize("case", TAKEN)
def test_a_script_that_runs_anothers_main_is_refused(start, shards, tmp_path, case):
    """Its log held the other script alone, as did the comparison with it."""
    (tmp_path / "idea.py").write_text(TAKEN[case] + 'if __name__ == "__main__":\n    main()\n')
    code, lines, started = start(tmp_path / "idea.py", *options(shards, tmp_path))
    said = r"idea\.py: error: idea\.py runs the main\(\) of /.*/train_gpt\.py, whose log would not hold idea\.py: make it a changed copy .*"
    assert (code, started) == (1, ()) and re.fullmatch(said, lines[-1]), lines


@pytest.mark.parametrize("how", [
    "self.drop = torch.linspace(0, 0.1, num_layers)[-1].item()", "x = torch.ones(3); x[x > 0] = 2",
    "torch.equal(torch.ones(3), torch.ones(3))", "torch.ones(3).numpy()",
])  # fmt: skip
def test_an_idea_that_takes_numbers_out_of_tensors_is_checked_where_there_are_some(start, shards, tmp_path, how):
    """A large model is looked at on meta, where a tensor has none."""
    line = "        self.num_heads, self.head_dim, self.model_dim = num_heads, head_dim, model_dim\n"
    source = SCRIPT.read_text().replace(line, f"{line}        {how}\n")
    assert how in source
    (tmp_path / "idea.py").write_text(source)
    assert start(tmp_path / "idea.py", *options(shards, tmp_path), "--bigram_rows=524288")[2], "refused"


def test_a_limit_of_threads_is_told_before_the_ranks_start(start, shards, tmp_path, monkeypatch):
    """ulimit -u, or a container's pids.max; messages need a thread too, where one can be had."""
    begin = threading.Thread.start

    def limited(thread):
        if thread.daemon:
            if threading.active_count() > 9:
                raise RuntimeError("can't start new thread")
        begin(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)
    code, lines, started = start(*options(shards, tmp_path))
    assert (code, started) == (1, ())
    said = r"2 ranks need about (\d+) threads, \d can be had: raise ulimit -u or the container's limit of processes"
    need = int(re.search(said, lines[-1])[1])
    _, lines, _ = start(*options(shards, tmp_path, trace_steps="0:2"))
    assert int(re.search(said, lines[-1])[1]) == need + 2 * 32  # the tracer's


def test_a_launcher_that_can_have_no_thread_still_speaks(monkeypatch, capfd):
    def none(_):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", none)
    launcher.console("said")
    assert capfd.readouterr().out == "said\n"


@pytest.mark.parametrize("place", ["project", "folder of an idea"])
def test_so_is_one_beside_the_script(start, shards, tmp_path, monkeypatch, place):
    """test.py, which nothing imports, is none."""
    idea = tmp_path / ("train_gpt.py" if place == "project" else "idea.py")
    if place == "project":
        monkeypatch.setattr(launcher, "ROOT", tmp_path)
    for name in (idea.name, "copy.py", "test.py"):
        shutil.copy(SCRIPT, tmp_path / name)
    code, lines, started = start(*([] if place == "project" else [idea]), *options(shards, tmp_path))
    assert (code, started) == (1, ()) and len(lines) == 1 and "/copy.py hides the module 'copy'" in lines[0]


@pytest.mark.parametrize("beside", ["json/__init__.py", "typing_extensions.py", "numpy/__init__.py", "data.py"])
def test_so_is_a_package_or_a_module_of_an_installed_one(start, shards, tmp_path, beside):
    """PyTorch imports the first three; the last is in the way of the project's package."""
    shutil.copy(SCRIPT, tmp_path / "idea.py")
    (tmp_path / beside).parent.mkdir(exist_ok=True)
    (tmp_path / beside).write_text("")
    code, lines, started = start(tmp_path / "idea.py", *options(shards, tmp_path))
    name = beside.partition("/")[0].removesuffix(".py")
    assert (code, started) == (1, ()) and len(lines) == 1 and f"hides the module '{name}' that others" in lines[0]


def test_a_folder_whose_name_is_no_modules_hides_none(start, shards, tmp_path):
    shutil.copy(SCRIPT, tmp_path / "idea.py")
    for name in ("torch.bak", "json.old", "numpy-2.0"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").touch()
    code, lines, started = start(tmp_path / "idea.py", *options(shards, tmp_path))
    assert started and not any("hides" in line for line in lines)


@pytest.mark.parametrize("name, value", [("TORCH_DISTRIBUTED_DEBUG", "DETAIL"), ("TORCH_DIST_INIT_BARRIER", "1")])
def test_pytorchs_own_debugging_does_not_end_the_check(shards, tmp_path, name, value):
    """What no group of one process among several can have; the ranks get it."""
    code = f"from launch.start import *; print(check(load(Path(sys.argv[1])), sys.argv[2:], None, False)[0], os.environ['{name}'])"
    command = [PYTHON, "-c", code, f"{SCRIPT}", *options(shards, tmp_path)]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}", name: value}
    run = subprocess.run if name == "TORCH_DISTRIBUTED_DEBUG" else run_fresh  # which is read as PyTorch is imported
    done = run(command, capture_output=True, text=True, timeout=120, cwd=tmp_path, env=environment)
    assert done.returncode == 0 and done.stdout.endswith(f"\n2 {value}\n"), done.stderr


AGAIN = f"delete {ROOT}/.venv, ./run.sh makes it again" if sys.prefix == f"{ROOT}/.venv" else "install it again"


@pytest.mark.parametrize("by_path", [True, False])
def test_a_numpy_that_cannot_be_imported_is_named(tmp_path, by_path):
    """Of another Python, as a cluster's modules put it on the path, or half installed: the message had no reason."""
    (folder := tmp_path / "other" / "numpy").mkdir(parents=True)
    cause = 'ModuleNotFoundError("No module named \'numpy._core._umath\'")'
    (folder / "__init__.py").write_text(f'raise ImportError("\\n\\nIMPORTANT: PLEASE READ THIS\\n") from {cause}')
    code = f"import sys; sys.path.insert(0, {f'{folder.parent}'!r}); from launch import start; start.load(start.Path('x.py'))"
    environ = {**os.environ, "PYTHONPATH": f"{folder.parent}" if by_path else ""}
    done = subprocess.run([PYTHON, "-c", code], cwd=ROOT, env=environ, capture_output=True, text=True, timeout=60)
    why = "No module named 'numpy._core._umath': "
    named = f"numpy cannot be imported: {why}it is that of {folder.parent}, which PYTHONPATH names, for another Python, say: unset it"
    assert (named if by_path else f"numpy: {why}{PYTHON} lacks a package, or has half of one: {AGAIN}") in done.stderr


def test_a_script_named_without_its_ending_is_told(start, tmp_path, monkeypatch):
    """`./run.sh ideas/idea`: an unrecognized argument."""
    monkeypatch.chdir(tmp_path)
    code, lines, _ = start("save_evry=3", "--seed=1")  # an option without its --
    assert code == 2 and lines[-1].endswith("unrecognized arguments: save_evry=3 (did you mean --save_every?)"), lines
    Path("ideas").mkdir()
    Path("ideas/idea.py").touch()
    code, lines, _ = start("--num_sch=3", "--keep=1", "--num=2")  # beginnings, of which one is of several
    hint = "--num_scheduled_iterations and --keep_checkpoints and --num_heads"
    assert code == 2 and lines[-1].endswith(f"unrecognized arguments: --num_sch=3 --keep=1 --num=2 (did you mean {hint}?)"), lines
    said = "start.py: error: ideas/idea: a script's name ends in .py: ./run.sh ideas/idea.py"
    assert start("ideas/idea", "--seed=1") == (2, [said], ())
    Path("ideas/idea.py.bak").touch()
    for other in "ideas/idea.py.bak", "ideas/", "README.md":  # the last in the project
        assert start(other, "--seed=1") == (2, [f"start.py: error: {other}: no script: a script's name ends in .py"], ())


@pytest.mark.parametrize("tool", ["sample.py x", "bench/resumes.py", "data/local_text.py", "records/history.py"])
def test_a_tool_names_a_package_that_cannot_be_imported(tmp_path, tool):
    """A traceback of 20 lines."""
    (folder := tmp_path / "other" / "numpy").mkdir(parents=True)
    (folder / "__init__.py").write_text('raise ImportError("built for Python 3.9")')
    environ = {**os.environ, "PYTHONPATH": f"{folder.parent}"}
    done = subprocess.run([PYTHON, *tool.split()], cwd=ROOT, env=environ, capture_output=True, text=True, timeout=60)
    said = f"it is that of {folder.parent}, which PYTHONPATH names, for another Python, say: unset it"
    told = f"{Path(tool.split()[0]).name}: error: numpy cannot be imported: built for Python 3.9: {said}\n"
    assert (done.returncode, done.stderr) == (1, told)


@pytest.mark.parametrize(("place", "fault"), [
    ("{ROOT}/data/shards.py", ""),
    ("{named}/numpy/__init__.py", "numpy cannot be imported: gone: it is that of "),
    ("/x/lib/site-packages/numpy/linalg.py", "numpy: gone: "),
    ("/x/ideas/mine.py", ""),
])  # fmt: skip
def test_an_import_that_fails_is_a_packages_fault_or_ours(tmp_path, monkeypatch, place, fault):
    (named := tmp_path / "other" / "numpy").mkdir(parents=True)
    (named / "__init__.py").touch()
    above = Path(np.__file__).parents[3]  # as where .venv is in the folder
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{above}:{named.parent}")
    monkeypatch.setattr(sys, "path", [f"{named.parent}", *sys.path] if "{named}" in place else sys.path)
    monkeypatch.delitem(sys.modules, "numpy") if "{named}" in place else None
    code = compile("raise ImportError('gone')", place.format(ROOT=ROOT, named=named.parent), "exec")
    with pytest.raises(ImportError) as caught:
        exec(code, {"__name__": "numpy.linalg"})
    said = package_fault(caught.value)
    assert said.startswith(fault) if fault else said == ""


@pytest.mark.parametrize("why, libraries, advice", [
    ("libtorch_cpu.so: failed to map segment from shared object", "", "raise ulimit -v, or see that its disk is not mounted noexec"),
    ("a.so: undefined symbol: x, version CXXABI_1.3", "/old", "LD_LIBRARY_PATH=/old may have another library of that name: unset it"),
    ("/old/libstdc++.so.6: file too short", "/none:/old", "LD_LIBRARY_PATH=/none:/old may have another library of that name: unset it"),
    ("a.so: undefined symbol: x, version CXXABI_1.3", "", f"{PYTHON} lacks a package, or has half of one: {AGAIN}"),
    ("No module named 'numpy._core'", "/old", f"{PYTHON} lacks a package, or has half of one: {AGAIN}"),
])  # fmt: skip
def test_a_package_that_lacks_nothing_is_not_made_again(monkeypatch, why, libraries, advice):
    """Under a limit of memory, or with a cluster's libraries, the advice was to install it again."""
    monkeypatch.setenv("LD_LIBRARY_PATH", libraries)
    assert broken_package("numpy", ImportError(why)).endswith(f": {why}: {advice}")


def test_a_lack_of_memory_at_the_import_is_told(monkeypatch):
    """By nothing that itself needs some: environment.py could not be read."""
    monkeypatch.setattr(runpy, "run_path", lambda *_: pytest.fail("reads a file"))
    assert launcher.import_fault(MemoryError()) == "PyTorch cannot be imported, no memory is left: raise ulimit -v, or free some"
    assert launcher.cut_package(MemoryError()) == ""


CUT = {  # what a power cut may leave of a package: a file, its bytes once, its text, what then imports it, the fault
    "empty": ("torch/__init__.py", 9, "", "import torch; torch.SymInt", "torch: module 'torch' has no attribute 'SymInt': "),
    "an empty module": ("rich/console.py", 9, "", "from rich.console import Console", "rich: cannot import name 'Console' from 'rich."),
    "cut": ("numpy/__init__.py", 99, '\n"""NumPy', "import numpy", "numpy: unterminated triple-quoted string literal"),
    "cut in a name": ("rich/console.py", 99, "x = regi", "import rich.console", "rich: name 'regi' is not defined"),
    "empty on purpose": ("torch/optim/__init__.py", 0, "", "from torch.optim import Muonn", ""),
    "of no such name": ("torch/optim/__init__.py", 0, "", "import torch.optim; torch.optim.Muonn", ""),
    "of another Python": ("numpy/__init__.py", 4, "x = \n", "import numpy", ""),
    "without a size": ("numpy/__init__.py", "", "x = ", "import numpy", ""),
    "without a record": ("numpy/__init__.py", None, "", "import numpy; numpy.x", ""),
    "an idea's": ("../ideas/idea.py", 9, "x = ", "import ideas.idea", ""),
}  # fmt: skip


def write_record(folder: Path, name: str, size: int | str) -> None:
    for package, line in (("a-1.0", "a/__init__.py,sha256=x,5"), ("b-2.0", f"b.py,,\n{name}.txt,sha256=x,99\n{name},sha256=x,{size}")):
        (folder / f"{package}.dist-info").mkdir()
        (folder / f"{package}.dist-info" / "RECORD").write_text(f"{line}\nbin/c,,\n")


@pytest.mark.parametrize("case", CUT)
def test_a_package_of_which_a_file_is_cut_is_named(tmp_path, monkeypatch, case):
    """Tracebacks, or that PyTorch cannot be imported where it was NumPy."""
    name, size, text, code, fault = CUT[case]
    file = Path(os.path.normpath(tmp_path / "site-packages" / name))
    for package in (file.parent, tmp_path / "site-packages" / "torch"):
        package.mkdir(parents=True, exist_ok=True)
        (package / "__init__.py").touch()
    file.write_text(text)
    if size is not None:
        write_record(tmp_path / "site-packages", name, size)
    monkeypatch.setattr(sys, "path", [f"{tmp_path}/site-packages", f"{tmp_path}", *sys.path])
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}")
    before = {*sys.modules}
    for module in [x for x in sys.modules if x.partition(".")[0] in ("torch", "rich", "numpy")]:
        monkeypatch.delitem(sys.modules, module)
    with pytest.raises((ImportError, AttributeError, SyntaxError, NameError)) as caught:
        exec(code, {})
    for module in {*sys.modules} - before:  # a later test would import what is here
        del sys.modules[module]
    said = cut_package(caught.value)
    assert said.startswith(fault) and said.endswith(f": {AGAIN}") if fault else said == "", said
    monkeypatch.setattr(sys, "prefix", f"{ROOT}/.venv")
    assert not fault or cut_package(caught.value).endswith(f": delete {ROOT}/.venv, ./run.sh makes it again")


@pytest.mark.parametrize("command", ["launch/start.py {}", "sample.py latest x --script={}"])
@pytest.mark.parametrize("code", ["import odd.part", "import odd\nmain = lambda: main()\nclass Hyperparameters: x = odd.part"])
def test_a_cut_package_that_an_idea_imports_is_one_line(tmp_path, command, code):
    (folder := tmp_path / "site-packages" / "odd").mkdir(parents=True)
    for name in ("__init__.py", "part.py"):
        (folder / name).write_text("" if name == "__init__.py" else "x = ")
    write_record(folder.parent, "odd/__init__.py" if "class" in code else "odd/part.py", 99)
    (tmp_path / "idea.py").write_text(code)
    environ = {**os.environ, "PYTHONPATH": f"{folder.parent}"}
    command = [PYTHON, *command.format(tmp_path / "idea.py").split()]
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=60)
    why = "module 'odd' has no attribute 'part'" if "class" in code else r"invalid syntax \(part.py, line 1\)"
    said = rf"(idea|sample)\.py: error: odd cannot be imported: {why}: it is that of \S+, which PYTHONPATH names.*: unset it\n"
    assert done.returncode == 1 and re.fullmatch(said, done.stderr), done.stderr


def less_of_waits(text: str) -> str:
    """Two tests may check records/ at once."""
    return re.sub(r".*: waiting for another tool that works there, as race\.py\n", "", text)


@pytest.mark.parametrize("command", ["launch/start.py", "sample.py latest x", "data/local_text.py", "records/history.py --check"])
def test_a_compiled_file_that_is_cut_is_named(tmp_path, command):
    """"marshal data too short", after a power cut: a traceback, or PyTorch that cannot be imported."""
    (folder := tmp_path / "site-packages" / "numpy").mkdir(parents=True)
    (folder / "__init__.py").write_text("x = [1, 2, 3]")
    compiled = Path(py_compile.compile(f"{folder}/__init__.py"))
    compiled.write_bytes(compiled.read_bytes()[:-9])
    environ = {**os.environ, "PYTHONPATH": f"{folder.parent}"}
    done = subprocess.run([PYTHON, *command.split()], cwd=ROOT, env=environ, capture_output=True, text=True, timeout=60)
    told = f"{Path(command.split()[0]).name if 'start' not in command else SCRIPT.name}: error: {compiled} is cut short: delete it"
    assert (done.returncode, less_of_waits(done.stderr)) == (1, f"{told}, Python makes it again\n")
    try:
        raise EOFError  # an idea's own
    except EOFError as error:
        assert cut_package(error) == ""
    assert cut_package(ImportError("an idea's", path=5)) == ""


@pytest.mark.parametrize("command", ["launch/start.py", "sample.py latest x", "data/local_text.py", "records/history.py --check"])
def test_a_cut_package_is_one_line(tmp_path, command):
    (folder := tmp_path / "site-packages" / "numpy").mkdir(parents=True)
    (folder / "__init__.py").write_text('"""NumPy')
    write_record(folder.parent, "numpy/__init__.py", 99)
    environ = {**os.environ, "PYTHONPATH": f"{folder.parent}"}
    done = subprocess.run([PYTHON, *command.split()], cwd=ROOT, env=environ, capture_output=True, text=True, timeout=60)
    said = r"\S+\.py: error: numpy cannot be imported: unterminated .*: it is that of \S+, which PYTHONPATH names.*: unset it\n"
    assert done.returncode == 1 and re.fullmatch(said, less_of_waits(done.stderr)), done.stderr


@pytest.mark.parametrize("name, said", [("TORCH_LOGS", "Invalid log settings: x"), ("TORCH_DISTRIBUTED_DEBUG", "The value of ")])
def test_a_variable_that_pytorch_does_not_import_with_is_named(tmp_path, name, said):
    """Also an empty one, which the error does not name; a bench found PyTorch's traceback."""
    commands = {SCRIPT.name: [f"{ROOT}/launch/start.py", f"{SCRIPT}"], "sample.py": [f"{ROOT}/sample.py", "latest", "x"]}
    commands |= {"kernels.py": [f"{ROOT}/bench/kernels.py", "none"]}
    clean = {x: value for x, value in os.environ.items() if not x.startswith(("TORCH", "PYTORCH", "TRITON"))}
    for program, command in commands.items():
        for value in ("x", "")[: 1 + (name == "TORCH_LOGS")]:
            how = {"capture_output": True, "text": True, "timeout": 120, "cwd": tmp_path, "env": {**clean, name: value}}
            done = subprocess.run([PYTHON, *command], **how)
            assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1), done.stderr
            assert f"{program}: error: PyTorch cannot be imported, by {name}={value}: {said if value else ''}" in done.stderr


def test_a_transport_that_gloo_has_not_is_named_before_the_ranks_start(shards, tmp_path):
    """In a process of its own: gloo keeps for good what the variable says."""
    command = [PYTHON, f"{ROOT}/launch/start.py", f"{SCRIPT}", *options(shards, tmp_path)]
    how = {"capture_output": True, "text": True, "timeout": 120, "env": {**os.environ, "GLOO_DEVICE_TRANSPORT": "IBVERBS"}}
    done = subprocess.run(command, **how)
    said = rf"{SCRIPT.name}: error: GLOO_DEVICE_TRANSPORT=IBVERBS: make\w+\(\): unsupported gloo device: unset it, or say TCP\n"
    assert done.returncode == 1 and re.fullmatch(said, done.stderr) and not (tmp_path / "logs").exists(), done.stderr


FIELD = "    seed: int = setting("
IDEA = SCRIPT.read_text().replace(FIELD, f"    warmth: int = setting(3, 'of the idea')\n{FIELD}")


def test_an_idea_with_settings_of_its_own_is_checked_by_them(start, shards, tmp_path):
    script = tmp_path / "warm.py"
    script.write_text(IDEA)
    good = start(script, *options(shards, tmp_path, warmth=4))
    assert good[0] == 0 and good[2][1][2:4] == [f"{script}", "--preset=demo"], good[1]
    code, lines, _ = start(script, *options(shards, tmp_path, warmth=-4))
    assert code == 1 and lines[-1] == "warm.py: error: --warmth=-4: must be positive"


@pytest.mark.parametrize("name", ["knob", "one.two.three.knob"])
def test_a_stale_compiled_form_is_not_run(start, shards, tmp_path, name):
    """Two texts of one size and second, as two archives leave them. Far below, the launcher runs it, and no rank after it."""
    (tmp_path / "warm.py").write_text(f"import {name} as knob\nprint('of text', knob.x)\n{SCRIPT.read_text()}")
    path = tmp_path / f"{name.replace('.', '/')}.py"
    path.parent.mkdir(parents=True, exist_ok=True)
    cache = Path(importlib.util.cache_from_source(path))
    for text in (1, 2):
        (tmp_path / "new").write_text(f"x = {text}\n")
        os.utime(tmp_path / "new", (10**9, 10**9))
        os.replace(tmp_path / "new", path)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "dont_write_bytecode", False)
            code, lines, _ = start(tmp_path / "warm.py", *options(shards, tmp_path))
            for module in [module for module in sys.modules if module.partition(".")[0] in ("knob", "one")]:
                del sys.modules[module]
        assert code == 0 and (f"of text {text}" in lines or "." in name and not cache.exists()), lines
        assert text == 2 or cache.exists()


def test_an_option_that_ends_like_a_script_is_an_option(start, shards, tmp_path):
    code, lines, started = start("--run_id=odd.py", *options(shards, tmp_path))
    assert code == 0 and "--run_id=odd.py" in started[1], lines


def test_a_script_elsewhere_needs_a_path_without_a_colon(start, tmp_path, monkeypatch):
    monkeypatch.setattr(launcher, "ROOT", tmp_path / "a:b")
    (tmp_path / "a:b").mkdir()
    (tmp_path / "idea.py").write_text("")
    code, lines, started = start(tmp_path / "idea.py")
    said = f"start.py: error: a path with ':', as {tmp_path}/a:b, cannot be in PYTHONPATH: a script elsewhere needs it there"
    assert (code, started, lines) == (1, (), [said])


def test_a_bug_in_the_script_keeps_its_traceback(tmp_path):
    """And is raised once, before any rank starts."""
    (tmp_path / "idea.py").write_text("import no_such_module\n")
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit, match="ModuleNotFoundError: .*no_such_module"):
        patch.setattr(sys, "path", sys.path[:])
        patch.setattr(sys, "argv", sys.argv)
        launcher.main([f"{tmp_path / 'idea.py'}"])


@pytest.mark.parametrize("source", [
    "x = 1\nint('seven')\n", "def f():\n    {}['steps']\nf()\n", "import beside\n", "if x:\n", "x = '\xe9'\n",
    "open('no_such_file')\n", "import json.nothing\n", "raise ValueError('two\\nlines')\n",
])  # fmt: skip
def test_it_is_what_python_says_of_the_script_itself(monkeypatch, tmp_path, source):
    """Also of kinds that are messages elsewhere. No frame of the launcher or of imports stands above the script's."""
    monkeypatch.setattr(sys, "path", sys.path[:])
    (tmp_path / "beside.py").write_text("x = (\n")
    (tmp_path / "idea.py").write_text(source, "latin-1")
    alone = subprocess.run([sys.executable, "-c", f"import runpy; runpy.run_path({f'{tmp_path}/idea.py'!r}, run_name='idea')"],
                           env={**os.environ, "PYTHONPATH": f"{tmp_path}"}, capture_output=True, text=True)  # fmt: skip
    with pytest.raises(SystemExit) as said:
        launcher.load(tmp_path / "idea.py")
    own, lines = alone.stderr.rstrip().splitlines(), f"{said.value}".splitlines()
    if lines[0].startswith("Traceback"):
        assert lines == own[:1] + own[[f'"{tmp_path}/idea.py"' in line for line in own].index(True):]
    else:
        assert lines == own[-len(lines):] and len(lines) < 6


@pytest.mark.parametrize("name", ["warm.py", "helper.py"])
def test_a_source_that_is_not_utf_8_is_refused(start, shards, tmp_path, monkeypatch, name):
    """Python reads it; its log would hold another program."""
    monkeypatch.setitem(sys.modules, "helper", None)  # so that none is left after the test
    del sys.modules["helper"]
    (tmp_path / "helper.py").write_text("")
    (tmp_path / "warm.py").write_text(f"import helper\n{SCRIPT.read_text()}")
    source = b"# -*- coding: latin-1 -*-\n# \xe9\n" + (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(source)
    code, lines, started = start(tmp_path / "warm.py", *options(shards, tmp_path))
    said = f"warm.py: error: {tmp_path}/{name}, byte 28: is not UTF-8: save it as UTF-8"
    assert (code, started, lines[-1]) == (1, (), said) and len(lines) == 2


@pytest.mark.parametrize("bug", ["one, two = 1, 2, 3", "torch.zeros(2).new_tensor([[1], [2, 3]])", "float('two')"])
def test_so_does_one_that_the_check_meets(start, shards, tmp_path, bug):
    """Though the project's own ValueErrors, and those that an idea raises to be read, are messages."""
    script = tmp_path / "warm.py"
    script.write_text(f"{IDEA}\nimport torch\ndef build(h, ranks):\n    {bug}\n")
    code, lines, started = start(script, *options(shards, tmp_path))
    assert (code, started) == (1, ()) and lines[1] == "Traceback (most recent call last):"
    at = f'  File "{script}", line {len(script.read_text().splitlines())}, in build'
    assert at in lines and lines[-1].startswith("ValueError: ")
    script.write_text(f"{IDEA}\ndef build(h, ranks):\n    raise ValueError('too warm')\n")
    assert start(script, *options(shards, tmp_path))[1][1:] == ["warm.py: error: too warm"]


MAIN = "def main():\n    pass\n\nif __name__ == '__main__':\n    main()\n"


@pytest.mark.parametrize("source", ["", "x = 1\n", MAIN.replace("main", "train"), MAIN.partition("if")[0], MAIN[:-7] + "pass  # main()"])
def test_a_script_that_would_train_nothing_is_refused(start, tmp_path, source):
    """It ended with code 0 and no word."""
    (tmp_path / "idea.py").write_text(source.replace("__train__", "__main__"))
    code, lines, started = start(tmp_path / "idea.py")
    said = 'has no main() that it calls if __name__ == "__main__": begin with a copy of train_gpt.py'
    assert (code, started) == (1, ()) and lines == [f"idea.py: error: {tmp_path / 'idea.py'} {said}"]


def test_a_profiled_main_is_called(start, tmp_path):
    (tmp_path / "idea.py").write_text(MAIN[:-7] + "import cProfile\n    cProfile.run('main()', 'profile')\n")
    assert start(tmp_path / "idea.py", "--data=x")[0] == 0


def test_a_script_without_settings_is_started_unchecked(start, tmp_path):
    script = tmp_path / "other.py"
    script.write_text(MAIN)
    assert start(script, "--data=x", "--any")[2] == (2, [PYTHON, "-u", f"{script}", "--data=x", "--any"])


@pytest.mark.skipif(not HAS_TRITON, reason="the first record's source needs Triton, which is not here")
def test_so_is_the_source_of_the_first_record(shards, tmp_path):
    """Older than check_shards: its page says that ./run.sh trains it again, from any folder on the project's data."""
    record, again = ROOT / "records/2026-11-21_Demo/seed0.txt", tmp_path / "again"
    run_fresh([PYTHON, ROOT / "records/extract.py", record, again], check=True)
    code = "from launch.start import *; print(check(load(Path(sys.argv[1])), sys.argv[2:], None, False))"
    command = [PYTHON, "-c", code, again / "train_gpt.py", f"--data={shards}"]
    assert run_fresh(command, cwd=ROOT, check=True).stdout.splitlines()[-1] == f"(2, ['--data={shards}'])"
    command[2] = code.replace("; print(", "; check.__globals__['make_data'] = print; print(")
    expected = [f"--data={ROOT / 'data/local'}", f"--log_dir={ROOT / 'logs'}"]
    said = run_fresh([*command[:4]], cwd=tmp_path, env={**os.environ, "PYTHONPATH": f"{ROOT}"}, check=True).stdout
    assert said.splitlines()[-2:] == ["data/local_text.py", f"(2, {expected})"]


def test_paths_mean_the_folder_in_which_the_user_stands(start, shards, tmp_path, monkeypatch):
    """Those that are not given are the project's."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(shards, tmp_path / "mine")
    _, _, (_, command) = start("--data=mine", "--log_dir=here", *TINY)
    assert command[3:] == ["--data=mine", "--log_dir=here", *TINY] and not (tmp_path / "here").exists()  # the run makes it
    (tmp_path / "file").touch()
    code, lines, _ = start("--data=mine", "--log_dir=file/here", *TINY)
    assert code == 1 and "error: file/here: cannot be written: file/here is no folder" in lines[-1], lines
    _, _, (_, command) = start("--data=mine", *TINY)
    assert command[3:] == ["--data=mine", *TINY, f"--log_dir={ROOT / 'logs'}"]
    code, lines, _ = start("--data=mine", *TINY, "--resume=there.pt")
    assert code == 1 and "error: there.pt: cannot be read: No such file" in lines[-1]
    monkeypatch.chdir(ROOT)
    _, _, (_, command) = start(f"--data={tmp_path / 'mine'}", *TINY)
    assert command[4:] == TINY


def test_a_script_that_changes_the_folder_as_it_is_imported_changes_no_path(start, shards, tmp_path, monkeypatch):
    """To its own, as many do; its ranks do it too."""
    (tmp_path / "stands").mkdir()
    monkeypatch.chdir(tmp_path / "stands")
    shutil.copytree(shards, "mine")
    (tmp_path / "idea.py").write_text(f"import os\nos.chdir(os.path.dirname(__file__))\n{SCRIPT.read_text()}")
    _, _, (_, command) = start("../idea.py", "--data=mine", "--log_dir=logs", *TINY)
    paths = [f"--data={tmp_path}/stands/mine", f"--log_dir={tmp_path}/stands/logs"]
    assert command[3:] == ["--data=mine", "--log_dir=logs", *TINY, *paths] and os.getcwd() == f"{tmp_path}/stands"
    code, lines, _ = start("../idea.py", "--data=mine", "--resume=latest", *TINY)
    assert code == 1 and f"latest: no usable checkpoint in {ROOT}/logs" in lines[-1]


TAKES = """import json, os
GAIN = os.environ.pop("GAIN", "1")
os.environ["BANKS"] = os.environ.get("BANKS", "") + "x"


def main():
    print(GAIN, os.environ["BANKS"], os.environ["OMP_WAIT_POLICY"])


if __name__ == "__main__":
    main()
"""


def test_a_rank_gets_the_variables_that_the_user_has_given(tmp_path):
    """The launcher's own import took one out of the environment, and the ranks trained with the script's default."""
    (tmp_path / "idea.py").write_text(TAKES)
    command = [PYTHON, f"{ROOT}/launch/start.py", "idea.py", "--data=here"]
    done = subprocess.run(command, cwd=tmp_path, env=os.environ | {"RANKS": "1", "GAIN": "3"}, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout.splitlines()[-1:]) == (0, ["3 x passive"]), done


def test_only_help_alone_asks_for_help(start, shards, tmp_path):
    code, _, started = start(*options(shards, tmp_path, run_id="a --help b"))
    assert code == 0 and started
    code, lines, started = start("--run_id=x", "--help")
    assert code == 0 and not started and lines[0] == f"usage: {SCRIPT.name} [--option=value …], listed by --help"


def test_help_of_what_cannot_start_is_the_same_line(tmp_path):
    """It was a traceback, or nothing."""
    (tmp_path / "empty.py").touch()
    hides = tmp_path / "hides"
    hides.mkdir()
    (hides / "idea.py").write_text(SCRIPT.read_text())
    (hides / "sample.py").write_text("print('mine')")
    for script, variables, said in (
        (SCRIPT, {"TORCH_LOGS": "foo"}, "PyTorch cannot be imported, by TORCH_LOGS=foo: Invalid log settings: foo, "),
        (tmp_path / "empty.py", {}, f"{tmp_path}/empty.py has no main() that it calls"),
        (hides / "idea.py", {}, "cannot import name 'sample_text' from 'sample'"),
    ):
        command = [PYTHON, f"{ROOT}/launch/start.py", f"{script}", "--help"]
        done = subprocess.run(command, env={**os.environ, **variables}, capture_output=True, text=True, timeout=60, cwd=tmp_path)
        assert done.returncode == 1 and done.stderr.startswith(f"{script.name}: error: {said}") and done.stderr.count("\n") == 1, done


def test_a_script_elsewhere_tells_its_options(tmp_path):
    """With a module beside it, which PYTHONSAFEPATH kept it from, and the project's."""
    (tmp_path / "beside.py").touch()
    (tmp_path / "idea.py").write_text(f"import beside\n{SCRIPT.read_text()}")
    command = [PYTHON, f"{ROOT}/launch/start.py", "idea.py", "--help"]
    how = {"capture_output": True, "text": True, "timeout": 60, "cwd": tmp_path, "env": {**os.environ, "PYTHONSAFEPATH": "1"}}
    done = subprocess.run(command, **how)
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.startswith("usage: idea.py"), done


def run_sh(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    path = f"{Path(PYTHON).parent}{os.pathsep}{os.environ['PATH']}"
    variables = {**os.environ, "PATH": path, "PYTHONPATH": "", **variables}
    return subprocess.run(["bash", *arguments], env=variables, capture_output=True, text=True, timeout=100, cwd="/tmp")


FROM_GONE = ["bash {root}/run.sh", "{python} {root}/launch/start.py", "{python} {root}/sample.py", "{python} {root}/bench/order.py"]


@pytest.mark.parametrize("command", FROM_GONE)
def test_a_folder_that_is_gone_is_told(tmp_path, command):
    """PyTorch's import there ends in a library that cannot be loaded."""
    (tmp_path / "gone").mkdir()
    line = f"cd {shlex.quote(f'{tmp_path}/gone')}; rmdir ../gone; "
    line += f"exec {command.format(root=shlex.quote(f'{ROOT}'), python=shlex.quote(PYTHON))} --seed=1"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=100)
    said = [line for line in done.stderr.splitlines() if not line.startswith("shell-init: ")]  # bash's own
    name = command.rpartition("/")[2]
    assert done.returncode == 1 and said == [f"{name}: error: the current folder is gone or may not be searched: change into another"]


def test_a_folder_that_may_not_be_searched_is_told(monkeypatch, capsys):
    """As of sudo -u in a home of mode 0700."""
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(SystemExit) as ended:
        launcher.main([f"{SCRIPT}"])
    assert ended.value.code == 1 and "the current folder is gone or may not be searched" in capsys.readouterr().err


def test_run_sh_passes_a_programs_exit_code_on(tmp_path):
    """Python would make a SystemExit a traceback, and its code 1."""
    (tmp_path / "program.py").write_text("import sys; sys.exit(0)\n")
    (tmp_path / "requirements.txt").touch()
    command = [PYTHON, f"{ROOT}/launch/environment.py", f"{tmp_path}/requirements.txt", "--then", f"{tmp_path}/program.py"]
    done = subprocess.run(command, env={**os.environ, "PYTHONINSPECT": "1"}, stdin=subprocess.DEVNULL, capture_output=True)
    assert (done.returncode, done.stderr) == (0, b"")


def test_run_sh_finds_its_project_through_links_and_whatever_cdpath_says(shards, tmp_path):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "train").symlink_to(copy_project(tmp_path / "project") / "run.sh")
    bad = [*options(shards, tmp_path), "--data=/nowhere"]
    done = run_sh(f"{tmp_path / 'bin' / 'train'}", *bad, CDPATH=f"{tmp_path}")
    assert done.returncode == 1 and done.stderr.startswith("train_gpt.py: error: no shard matches /nowhere/"), done.stderr
    assert done.stderr.count("\n") == 1 and done.stdout.startswith("environment: ") and done.stdout.count("\n") == 1


# -----------------------------------------------------------------------------
# Ranks: small programs in their place


@pytest.fixture
def ranks(monkeypatch, capfd):
    """ranks(source, count): exit code and stderr of so many processes that run this source; `rank` is theirs."""

    def run(source: str, count: int = 2) -> tuple[int, str]:
        program = f"import os, signal, sys, time\nsys.path.insert(0, {f'{ROOT}'!r})\nrank = int(os.environ['RANK'])\n{source}"
        with monkeypatch.context() as patch:
            if "launch.signals" in program or "Signals" in program:  # which imports PyTorch
                patch.setattr(launcher, "subprocess", types.SimpleNamespace(Popen=Forked))
            code = Ranks(count, [PYTHON, "-c", program], "idea.py", {**os.environ}).wait()
        return code, capfd.readouterr().err

    monkeypatch.setattr(launcher, "loopback_store", lambda: (None, 1))
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # these tests may themselves run under nohup
    return run


ENDS = {  # what two ranks do, the exit code, and all that is said
    "well": ("", 0, ""),
    "by a message of its own": ("rank == 0 and sys.exit('bad'); time.sleep(50)", 1, "bad\n"),
    "by options": ("sys.exit(2)", 2, ""),
    "in the midst of its training": (
        "from launch.signals import Signals\nsignals = Signals().__enter__()\nos._exit(0)", 1,
        "idea.py: error: a rank has ended with code 0, as by os._exit(0), before its training has: its log is cut off\n"),
    "once it is through": ("from launch.signals import Signals\nwith Signals() as s: s.trained = True\nos._exit(0)", 0, ""),
    "without training": ("from launch.signals import Signals\nwith Signals(): pass", 1,
                         "idea.py: error: main() has ended, and nothing was trained: there is no log\n"),
    "by SIGKILL": ("rank and os.kill(os.getpid(), 9); time.sleep(50)", 1,
                   "idea.py: error: rank 1 was killed by SIGKILL (out of memory, or at a limit of time?): the run has ended\n"),
    "by a segmentation fault": ("os.kill(os.getpid(), signal.SIGSEGV) if rank == 0 else time.sleep(50)", 1,
                                "idea.py: error: rank 0 was killed by SIGSEGV: the run has ended\n"),
    "by a signal to one": ("sys.exit(143)", 143, "idea.py: ended by SIGTERM, sent to a rank\n"),
    "by a signal before it could heed it": ("rank and os.kill(os.getpid(), 1); time.sleep(50)", 129,
                                            "idea.py: ended by SIGHUP, sent to a rank\n"),
}  # fmt: skip


@pytest.mark.parametrize("case", ENDS)
def test_a_ranks_end_is_the_runs_code_and_one_message(ranks, monkeypatch, case):
    monkeypatch.setenv("TRITON_CACHE_DIR", "/nowhere")
    source, code, said = ENDS[case]
    assert ranks(source) == (code, said)


@pytest.mark.parametrize("instead", ["pass", "return", "raise SystemExit"])
def test_a_main_that_trains_nothing_is_no_run(instead, shards, tmp_path):
    """Code 0, without a log and a word."""
    where = {"return": "        with Signals() as signals:", "raise SystemExit": "        h = parse_options("}.get(instead, "")
    trains = "            train(h, join_ranks(), signals)"
    idea = SCRIPT.read_text().replace(trains, f"            {instead}") if not where else SCRIPT.read_text().replace(
        where, f"        if argv is None: {instead}\n{where}", 1)
    (script := tmp_path / "idea.py").write_text(idea)
    done = run_fresh([PYTHON, f"{ROOT}/launch/start.py", script, *options(shards, tmp_path)], env={**os.environ, "RANKS": "1"})
    assert done.returncode == 1 and done.stderr == "idea.py: error: main() has ended, and nothing was trained: there is no log\n"


def test_a_killed_ranks_code_is_known_where_its_signal_is_ignored(tmp_path):
    """By the process that starts the launcher: the kernel then keeps no child's code, and Python reads 0."""
    script = tmp_path / "idea.py"
    script.write_text("def main():\n    import os\n    os.kill(os.getpid(), 9)\n\n\nif __name__ == '__main__':\n    main()\n")
    command, ignores = [PYTHON, f"{ROOT}/launch/start.py", script, "--data=x"], lambda: signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    done = run_fresh(command, env={**os.environ, "RANKS": "1"}, preexec_fn=ignores)
    assert done.returncode == 1 and "rank 0 was killed by SIGKILL" in done.stderr, done.stderr


def test_ranks_read_files_as_utf8_whatever_the_locale(tmp_path):
    """As PyTorch's compiler must, which reads its templates by the locale's encoding; the console keeps its own."""
    (tmp_path / "idea.py").write_text("""import locale, sys


def main():
    print(locale.getpreferredencoding(False), sys.stdout.encoding)


if __name__ == "__main__":
    main()
""")
    command = [PYTHON, f"{ROOT}/launch/start.py", "idea.py", "--data=x"]
    ascii_alone = {"RANKS": "1", "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": ""}
    how = {"capture_output": True, "text": True, "timeout": 60, "cwd": tmp_path, "env": {**os.environ, **ascii_alone}}
    done = subprocess.run(command, **how)
    assert done.returncode == 0 and done.stdout.endswith("\nutf-8 ascii\n"), done


def test_signals_that_a_parent_has_blocked_end_a_run(tmp_path):
    """Blocked is not ignored, and the ranks do not block them: what began the launcher may be a thread that does."""
    script = tmp_path / "idea.py"
    script.write_text(f"""import signal, time

def main():
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {{15}})
    open({f"{tmp_path}/begun"!r}, "w")
    time.sleep(60)


if __name__ == "__main__":
    main()
""")
    process = subprocess.Popen(
        [PYTHON, f"{ROOT}/launch/start.py", script, "--data=x"], stderr=subprocess.PIPE, text=True, env={**os.environ, "RANKS": "1"},
        preexec_fn=lambda: signal.pthread_sigmask(signal.SIG_BLOCK, launcher.SIGNALS),
    )  # fmt: skip
    try:
        wait_until((tmp_path / "begun").exists, 60)
        process.terminate()
        _, said = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == 143 and said.startswith("idea.py: SIGTERM: "), said


def test_when_a_rank_fails_the_others_are_asked_to_end(ranks, tmp_path):
    here = f"{tmp_path}/here"
    hears = f"signal.signal(15, lambda *_: sys.exit('asked'))\n    open({here!r}, 'w')\n    time.sleep(600)"
    fails = f"while not os.path.exists({here!r}): time.sleep(0.01)\nsys.exit('bad')"
    assert ranks(f"if rank:\n    {hears}\n{fails}") == (1, "bad\nasked\n")


def test_ctrl_backslash_promises_no_end_of_a_step(ranks):
    code, said = ranks("rank or os.kill(os.getppid(), signal.SIGQUIT)\ntime.sleep(50)")
    assert (code, said) == (131, "idea.py: SIGQUIT: ends all ranks at once\n")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_is_handed_on_and_is_the_exit_code(ranks, number):
    """One of the ranks sends it to this process: to the launcher."""
    listen = "signal.signal({0}, lambda *_: sys.exit(128 + {0}))\nrank or os.kill(os.getppid(), {0})\ntime.sleep(50)"
    code, said = ranks("time.sleep(0.5 * (1 - rank))\n" + listen.format(int(number)))
    assert code == 128 + number and said.count("\n") == 1 and said.startswith(f"idea.py: {number.name}: a step that has begun")


def test_ctrl_c_while_ranks_import_is_one_line(ranks):
    """No KeyboardInterrupt from each; once they handle signals, they get the signal itself."""
    send = "rank or os.kill(os.getppid(), signal.SIGINT)\ntime.sleep(50)"
    for before in ("", "from launch.signals import Signals\nSignals().__enter__()\n"):
        code, said = ranks(f"{before}time.sleep(0.5 * (1 - rank))\n{send}")
        assert code == 130 and said.count("\n") == 1 and said.startswith("idea.py: SIGINT: "), said


def test_ranks_that_do_not_end_are_killed(ranks, monkeypatch):
    monkeypatch.setattr(launcher, "PATIENCE", 0.5)
    deaf = "signal.signal(15, signal.SIG_IGN)\nrank or sys.exit(time.sleep(0.5) or 1)\ntime.sleep(50)"
    begun = time.monotonic()
    code, said = ranks(deaf)
    assert code == 1 and time.monotonic() - begun < 25
    assert re.fullmatch(r"(idea.py: rank 1 is waited for, and killed in [01] s unless it saves\n)?idea.py: rank 1 is killed, as .*\n", said)


def test_what_a_killed_rank_has_started_ends_with_it(ranks, tmp_path):
    """A worker of an idea lived on, and held what its rank had open."""
    forks = "if rank == 0:\n    child = os.fork()\n    if not child: time.sleep(600)\n"
    tells = f"    open({f'{tmp_path}/child'!r}, 'w').write(f'{{child}}')\n"
    assert ranks(f"{forks}{tells}    os.kill(os.getpid(), 9)\ntime.sleep(50)")[0] == 1
    status = Path(f"/proc/{text_of(tmp_path / 'child')}/status")
    wait_until(lambda: not (text := text_of(status)) or "\nState:\tZ" in text)


BEGINS = """\
import atexit, os, subprocess, sys, threading
rank, done = os.environ.get("RANK", "none"), threading.Event()
threading.Thread(target=done.wait).start()
child = subprocess.Popen(["sleep", "600"])
atexit.register(lambda: open("ended", "a").write(rank))
open(f"child-{rank}", "w").write(f"{child.pid}")
class Tee:
    def __init__(self, stream): self.write, self.flush = stream.write, stream.flush
sys.stdout, sys.stderr = Tee(sys.stdout), Tee(sys.stderr)
def main(): print("trained")
if __name__ == "__main__":
    main()
    child.kill()
    done.set()
"""


@pytest.mark.parametrize("mistake", [False, True])
def test_what_a_script_begins_as_it_is_imported_ends_with_the_launcher(tmp_path, mistake):
    """A thread that waits for the script's end kept it for ever, deaf to signals; a file that rank 0 had written at its end was
    written again by a process that had trained nothing; a stream without an encoding was an AttributeError."""
    (tmp_path / "idea.py").write_text(BEGINS.replace("def main", "def other" if mistake else "def main"))
    command = [PYTHON, f"{ROOT}/launch/start.py", "idea.py", "--data=here"]
    done = subprocess.run(command, cwd=tmp_path, env=os.environ | {"RANKS": "1"}, capture_output=True, text=True, timeout=100)
    assert done.returncode == mistake and ("trained" in done.stdout) != mistake, done
    assert ("has no main()" in done.stderr) == mistake and "Traceback" not in done.stderr
    assert text_of(tmp_path / "ended") == ("" if mistake else "0")
    status = Path(f"/proc/{text_of(tmp_path / 'child-none')}/status")
    wait_until(lambda: not (text := text_of(status)) or "\nState:\tZ" in text)


def test_what_a_shell_has_started_before_outlives_the_launcher(tmp_path):
    """As a monitor, before its exec, or what takes its output: they are the launcher's children then."""
    (tmp_path / "idea.py").write_text("")
    shell = f"sleep 600 > /dev/null 2>&1 & echo $!; exec {PYTHON} {ROOT}/launch/start.py idea.py"
    done = subprocess.run(["bash", "-c", shell], cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert "has no main()" in done.stderr and done.returncode == 1
    pid = int(done.stdout.split()[0])
    assert "\nState:\tS" in text_of(Path(f"/proc/{pid}/status"))  # neither gone nor a zombie
    os.kill(pid, signal.SIGKILL)


SAVES = """\
from launch import signals
signals.STOP_TIMEOUT = 0.2
with signals.Signals() as heard:
    heard.in_training, heard.trained, heard.has_peers, heard.saving = True, True, {peers}, {saving}
    open(f"{place}/{{rank}}", "w")
    while len(os.listdir("{place}")) < 1 + heard.has_peers: time.sleep(0.01)
    rank or os.kill(os.getppid(), 15)
    time.sleep(2)
    print("through", file=sys.stderr)
    heard.in_training = heard.saving = False
    {after}
"""


@pytest.mark.parametrize("peers, saving", [(True, True), (False, False)])
def test_what_goes_on_is_waited_for(ranks, monkeypatch, tmp_path, peers, saving):
    """A checkpoint that is written, a step of one rank alone; for what then hangs no longer than for others."""
    monkeypatch.setattr(launcher, "PATIENCE", 1.0)
    (one := tmp_path / "one").mkdir()
    code, said = ranks(SAVES.format(place=one, peers=peers, saving=saving, after="pass"), 1 + peers)
    assert (code, said.count("through\n"), said.count("\n")) == (0, 1 + peers, 2 + peers), said
    begun = time.monotonic()
    (other := tmp_path / "other").mkdir()
    code, said = ranks(SAVES.format(place=other, peers=peers, saving=saving, after="time.sleep(50)"), 1 + peers)
    assert (code, said.count("through\n")) == (143, 1 + peers) and time.monotonic() - begun < 40, said


def test_a_second_signal_ends_also_who_saves(ranks, monkeypatch, tmp_path):
    monkeypatch.setattr(launcher, "PATIENCE", 0.5)
    again = SAVES.replace("    time.sleep(2)", "    time.sleep(1.5)\n    rank or os.kill(os.getppid(), 15)\n    time.sleep(50)")
    code, said = ranks(again.format(place=tmp_path, peers=True, saving=True, after=""))
    assert code == 143 and "through" not in said


@pytest.mark.parametrize("numbers", [(15, 1), (1, 15), (2, 1, 1)], ids=str)
def test_a_hang_up_beside_another_signal_is_no_second_one(ranks, tmp_path, numbers):
    """As at a logout: from the terminal, and from systemd to all processes, which thus get them twice."""
    send = f"[(os.kill(pid, n), time.sleep(0.1)) for n in {numbers} for pid in (os.getpid(), os.getppid())]"
    both = SAVES.replace("os.kill(os.getppid(), 15)", send).replace("time.sleep(2)", "time.sleep(3)")
    code, said = ranks(both.format(place=tmp_path, peers=True, saving=True, after="pass"))
    assert (code, said.count("through\n")) == (0, 2), said


def test_time_in_which_the_launcher_stood_still_is_no_patience(ranks, monkeypatch, tmp_path):
    """As by docker pause, or kill -STOP of all processes: ranks that had no time to end their step were killed."""
    clock = types.SimpleNamespace(monotonic=lambda: time.monotonic() + 1000 * (tmp_path / "later").exists(), sleep=time.sleep)
    monkeypatch.setattr(launcher, "time", clock)
    later = f"time.sleep(0.2)\n    open('{tmp_path}/later', 'w')\n    time.sleep(0.5)"
    stood = SAVES.replace("    time.sleep(2)", f"    {later}").replace("STOP_TIMEOUT = 0.2", "STOP_TIMEOUT = 25")
    (tmp_path / "place").mkdir()
    code, said = ranks(stood.format(place=tmp_path / "place", peers=True, saving=False, after="pass"))
    assert (code, said.count("through\n")) == (0, 2), said


def test_ctrl_z_does_not_stop_the_launcher_alone(ranks):
    code, said = ranks("rank or os.kill(os.getppid(), signal.SIGTSTP)\ntime.sleep(1)")
    assert (code, said) == (0, "idea.py: SIGTSTP: its clock would not stop, so a run trains on; Ctrl-C ends it after its step\n")


def test_two_signals_before_the_ranks_start_are_one(tmp_path, monkeypatch):
    """Of a service manager, or at a logout; a later one ends it at once."""

    def begin(wait: float, second: int) -> None:
        def busy(*_: object) -> None:
            try:
                os.kill(os.getpid(), signal.SIGTERM)
            finally:
                time.sleep(wait)
                os.kill(os.getpid(), second)
                time.sleep(0.1)

        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        monkeypatch.setattr(launcher, "load", lambda _: None)
        monkeypatch.setattr(launcher, "check_main", busy)
        launcher.main([f"{SCRIPT}"])

    for wait, second, code in ((0.0, signal.SIGHUP, 143), (0.0, signal.SIGTERM, 143), (1.2, signal.SIGHUP, 129)):
        output = tmp_path / f"{wait}{second}"
        assert exit_code(forked(lambda wait=wait, second=second: begin(wait, second), output)) == code, text_of(output)
        assert text_of(output) == (f"{SCRIPT.name}: SIGTERM: ended before its ranks started\n" if code == 143 else "")


def test_a_signal_within_an_imports_c_code_ends_all_the_same(tmp_path):
    """There an exception is an ImportError, "lacks a package", or aborts the process, or is lost: as here, in a callback."""
    text = "import ctypes, os, signal\nctypes.CFUNCTYPE(None)(lambda: os.kill(os.getpid(), signal.SIGTERM))()\n"
    (tmp_path / "idea.py").write_text(text)
    work = lambda: launcher.main([f"{tmp_path / 'idea.py'}"])
    assert exit_code(forked(work, tmp_path / "output")) == 143
    assert text_of(tmp_path / "output") == "idea.py: SIGTERM: ended before its ranks started\n"


def test_a_signal_within_c_code_of_the_checks_is_not_lost(tmp_path, monkeypatch):
    """No rank starts after it."""
    hear = ctypes.CFUNCTYPE(None)(lambda: os.kill(os.getpid(), signal.SIGTERM))

    def begin() -> None:
        monkeypatch.setattr(launcher, "load", lambda _: None)
        monkeypatch.setattr(launcher, "check_main", lambda *_: None)
        monkeypatch.setattr(launcher, "check", lambda *_: hear() or (1, []))
        monkeypatch.setattr(launcher, "Ranks", lambda *_: os._exit(3))
        launcher.main([f"{SCRIPT}"])

    assert exit_code(forked(begin, tmp_path / "output")) == 143
    assert text_of(tmp_path / "output").endswith(f"{SCRIPT.name}: SIGTERM: ended before its ranks started\n")


def test_nohup_stays_in_force(ranks):
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    assert ranks("rank or os.kill(os.getppid(), signal.SIGHUP)\ntime.sleep(0.3)") == (0, "")


def test_a_bug_on_all_ranks_is_shown_once(ranks, tmp_path):
    """They meet it at the same time."""
    meet = f"open({f'{tmp_path}/'!r} + str(rank), 'w')\nwhile len(os.listdir({f'{tmp_path}'!r})) < 2: time.sleep(0.01)\n"
    code, said = ranks(f"from launch.signals import Signals\n{meet}with Signals():\n    raise KeyError('a bug')")
    assert code == 1 and said.count("Traceback") == 1 and said.count("KeyError: 'a bug'") == 1, said


def test_a_loopback_that_is_down_is_told_at_once(monkeypatch):
    """As in a network namespace without one; c10d would try for 5 minutes."""

    def down(*_, **__):
        raise OSError(101, "Network is unreachable")

    monkeypatch.setattr(socket, "create_connection", down)
    said = r"127\.0\.0\.1 cannot be reached, .*: Network is unreachable: is the loopback up \(ip link set lo up\)\?"
    with pytest.raises(launcher.LaunchError, match=said):
        launcher.loopback_store()


def test_the_environment_of_a_rank_is_torchruns(monkeypatch):
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth7")
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    found = launcher.rank_environment(1, 2, 29500)
    assert {name: found[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")} == dict(
        RANK="1", LOCAL_RANK="1", WORLD_SIZE="2", LOCAL_WORLD_SIZE="2"
    )
    assert (found["MASTER_ADDR"], found["MASTER_PORT"], found["TORCHELASTIC_USE_AGENT_STORE"]) == ("127.0.0.1", "29500", "True")
    assert found["GLOO_SOCKET_IFNAME"] == "lo" and found["NCCL_SOCKET_IFNAME"] == "eth7" and found["PYTHONHASHSEED"] == "0"
    assert found["PYTHONINSPECT"] == ""
    assert "GLOO_SOCKET_IFNAME" not in launcher.rank_environment(0, 1, 1, interfaces=lambda: [(1, "eth0")])


def test_a_rank_finds_the_modules_beside_its_script_first(tmp_path, monkeypatch):
    """As the check of its start has."""
    monkeypatch.setenv("PYTHONSAFEPATH", "1")
    (tmp_path / "idea.py").write_text("import attention\nprint(attention.__file__)")
    (tmp_path / "attention.py").write_text("")
    environment = {**os.environ, **launcher.rank_environment(0, 1, 1)}
    assert subprocess.check_output([PYTHON, tmp_path / "idea.py"], env=environment, text=True) == f"{tmp_path}/attention.py\n"


# -----------------------------------------------------------------------------
# A real run


def listeners(processes: list[int]) -> list[str]:
    """The addresses on which these processes listen, in the kernel's hexadecimals."""
    sockets = {os.readlink(fd) for pid in processes for fd in Path(f"/proc/{pid}/fd").glob("*") if fd.is_symlink()}
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
    return [row[1].partition(":")[0] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in sockets]


def test_a_run_listens_on_the_loopback_alone_and_a_killed_rank_is_one_line(shards, tmp_path):
    arguments = options(shards, tmp_path, num_scheduled_iterations=200, val_every=0)
    log, output = tmp_path / "logs" / "run.txt", tmp_path / "output"
    with open(output, "w") as file:
        launcher = started(arguments, stdout=file, stderr=file)
    try:
        wait_until(lambda: "\nstep:3/" in text_of(log) or launcher.poll() is not None, 100)
        ranks = children(launcher.pid)
        assert len(ranks) == 2, text_of(output)
        found = listeners([launcher.pid, *ranks])
        assert len(found) == 3 and set(found) == {"0100007F"}  # 127.0.0.1: the store, and a socket of each rank's gloo
        os.kill(ranks[1], signal.SIGKILL)
        assert launcher.wait(60) == 1
    finally:
        launcher.kill()
    said = [line for line in text_of(output).splitlines() if ": error: " in line or "SIG" in line or "Traceback" in line]
    assert said == [f"{SCRIPT.name}: error: rank 1 was killed by SIGKILL (out of memory, or at a limit of time?): the run has ended"]


@pytest.mark.parametrize(("number", "name"), [(signal.SIGKILL, r"SIGKILL \(out of memory, or at a limit of time\?\)"), (64, "SIG")])
def test_a_data_tool_that_is_killed_is_told(number, name, tmp_path, monkeypatch, capsys):
    (tmp_path / "maker.py").write_text(f"import os; os.kill(os.getpid(), {int(number)})")
    monkeypatch.setattr(launcher, "load", lambda _: launcher.make_data(f"{tmp_path}/maker.py"))
    with pytest.raises(SystemExit) as left:
        launcher.main([])
    assert left.value.code == 1
    assert re.search(f"error: maker.py was killed by {name}.*: there are no data", capsys.readouterr().err)


def test_a_file_that_was_cut_under_a_process_is_asked_for(tmp_path, monkeypatch):
    """Of mapped ones, as shards and compiled code are."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", f"{tmp_path}")
    assert launcher.killed(-signal.SIGBUS) == f"killed by SIGBUS (a shard was cut short, or compiled code: remove {tmp_path}?)"
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", f"{tmp_path}/none")
    assert launcher.killed(-signal.SIGBUS) == "killed by SIGBUS (a shard was cut short?)"


def test_damaged_code_of_a_gpus_is_asked_for(tmp_path, monkeypatch, one_gpu):
    """An H200's library crashes where such a file was cut."""
    monkeypatch.setenv("TRITON_CACHE_DIR", f"{tmp_path}")
    assert launcher.killed(-signal.SIGSEGV) == f"killed by SIGSEGV (damaged code in {tmp_path}: remove it?)"
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)  # a CPU's ranks load none of it
    assert launcher.killed(-signal.SIGSEGV) == "killed by SIGSEGV"


@pytest.mark.parametrize("moment", ["before", "after_in_parent"])
def test_a_signal_as_the_data_tool_is_started_ends_the_start(moment, tmp_path, monkeypatch):
    """Python runs hooks at a fork, ours among them, and discards what is raised there: a traceback, and the run trained on."""
    (tmp_path / "maker.py").write_text("import time; time.sleep(60)")

    def begin() -> None:
        os.register_at_fork(**{moment: lambda: signal.raise_signal(signal.SIGTERM)})
        sys.unraisablehook = sys.__unraisablehook__  # of pytest's, which prints nothing
        monkeypatch.setattr(launcher, "load", lambda _: None)
        monkeypatch.setattr(launcher, "check_main", lambda *_: launcher.make_data(f"{tmp_path}/maker.py"))
        launcher.main([f"{SCRIPT}"])

    assert exit_code(forked(begin, tmp_path / "output")) == 143
    said = text_of(tmp_path / "output").splitlines()
    assert said == [f"data: {tmp_path}/maker.py", f"{SCRIPT.name}: SIGTERM: ended before its ranks started"]


def test_a_second_signal_ends_a_start_whose_data_tool_stands_still_before_its_program(tmp_path, monkeypatch):
    """As in a lock that another thread held at the fork; only kill -9 ended either."""
    pid = tmp_path / "pid"

    def stand() -> None:
        pid.write_text(f"{os.getpid()}")
        time.sleep(600)

    def signals() -> None:
        wait_until(lambda: text_of(pid))
        for wait in (launcher.ONE_SIGNAL + 0.3, 0):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(wait)

    def begin() -> None:
        os.register_at_fork(after_in_child=stand)
        threading.Thread(target=signals, daemon=True).start()
        monkeypatch.setattr(launcher, "load", lambda _: None)
        monkeypatch.setattr(launcher, "check_main", lambda *_: launcher.make_data("maker.py"))
        launcher.main([f"{SCRIPT}"])

    assert exit_code(forked(begin, tmp_path / "output")) == 143
    os.kill(int(text_of(pid)), signal.SIGKILL)


@pytest.mark.skipif(sys.platform != "linux", reason="where a child hears of its parent's end")
def test_a_data_tool_ends_with_a_launcher_that_is_killed(tmp_path):
    """It fetched 2 GB to the end."""
    maker = "import os, sys, time; open(sys.path[0] + '/pid', 'w').write(f'{os.getpid()}'); time.sleep(600)"
    (tmp_path / "maker.py").write_text(maker)
    work = f"from launch import start; start.make_data({f'{tmp_path}/maker.py'!r})"
    process = subprocess.Popen([PYTHON, "-c", work], cwd=ROOT, stdout=subprocess.DEVNULL)
    wait_until(lambda: text_of(tmp_path / "pid"))
    process.kill()
    process.wait()
    status = Path(f"/proc/{text_of(tmp_path / 'pid')}/status")
    wait_until(lambda: not (text := text_of(status)) or "\nState:\tZ" in text)


def test_a_rank_that_ends_with_a_code_that_is_no_signals_is_told(capsys):
    ranks = launcher.Ranks(1, [sys.executable, "-c", "import sys; sys.exit(255)"], "script.py", {**os.environ})
    assert ranks.wait() == 255 and "script.py: error: rank 0 ended with code 255" in capsys.readouterr().err

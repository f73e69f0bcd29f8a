"""What a log tells of the machine: variables that change what is computed, and no path."""

import dataclasses
import mmap
import os
import platform
import re
import subprocess
import sys

import pytest
import torch

import launch.machine
import train_gpt
from common import ROOT
from launch.machine import OF_THE_PROJECT, VARIABLES, forget_earlier_run, machine_facts, peak_memory, settings_text, usable_cores
from launch.start import MODULES


def test_variables_that_change_what_is_computed_are_told(monkeypatch):
    for name in ("TORCHINDUCTOR_MAX_AUTOTUNE", "NCCL_ALGO", "OMP_NUM_THREADS", "TORCHINDUCTOR_CACHE_DIR", "SECRET_TOKEN"):
        monkeypatch.setenv(name, "/a/path" if name.endswith("DIR") else "1\n2")
    told = [line for line in machine_facts(torch.device("cpu"), 1) if line.startswith("variables: ")]
    assert len(told) == 1 and r"NCCL_ALGO='1\n2', " in told[0] and r"TORCHINDUCTOR_MAX_AUTOTUNE='1\n2'" in told[0]
    assert not any(word in told[0] for word in ("OMP", "/a/path", "SECRET"))


def test_variables_that_the_sources_read_are_told(monkeypatch):
    """An idea's learning rate: two of them were runs of one kind, and no log could be run again."""
    for name in ("LR", "DEPTH", "FOLDER", "RANK", "WANDB_API_KEY", "HF_TOKEN", "NCCL_ALGO", "UNREAD", "FLAG", "OTHER", "NAMED"):
        monkeypatch.setenv(name, "/a/path" if name == "FOLDER" else "1.5")
    script = """float(os.environ.get("LR", 1)), os.getenv('DEPTH'), os.environ["FOLDER"], environ["RANK"], os.environ["WANDB_API_KEY"]"""
    other = """os.environ.pop( 'HF_TOKEN'), os.environ["NCCL_ALGO"], os.environ["UNSET"], os.environ.get(key="NAMED")"""
    other += """\nhigh = 0.5 if "FLAG" in os.environ else 0.1; low = 'OTHER' not in environ"""
    told = machine_facts(torch.device("cpu"), 1, {"idea.py": script, "mine.py": other})
    assert [line for line in told if line.startswith("read by")] == ["read by its sources: DEPTH='1.5', FLAG='1.5', LR='1.5', NAMED='1.5', OTHER='1.5'"]
    with monkeypatch.context() as patch:  # one that the script has taken out
        patch.setitem(launch.machine.GIVEN, "DEPTH", "2")
        patch.delenv("DEPTH")
        assert "DEPTH='2', " in machine_facts(torch.device("cpu"), 1, {"idea.py": script})[-1]
    for name in ("s", "step", "BLOCK", "WIDTH"):  # in quotes in the project's own sources, which read none of them
        monkeypatch.setenv(name, "1")
    project = {path.name: path.read_text() for path in ROOT.glob("*.py")}
    sources = {"train_gpt.py": project.pop("train_gpt.py"), **project}
    assert not [line for line in machine_facts(torch.device("cpu"), 1, sources) if line.startswith("read by")]
    for name, value in {"BATCH_TOKENS": "16384", "HF_TOKENS": "hf_abc"}.items():
        monkeypatch.setenv(name, value)
    alias = "env = os.environ\nN = 'LR'; env.get (\"DEPTH\"), environb[b'FLAG'], env['BATCH_TOKENS'], env['HF_TOKENS'], env['RANK']"
    told = machine_facts(torch.device("cpu"), 1, {"ideas/idea.py": "x", "ideas/mine.py": alias, "launch/other.py": "'OTHER'"})
    assert [x for x in told if x.startswith("read by")] == ["read by its sources: BATCH_TOKENS='16384', DEPTH='1.5', FLAG='1.5', LR='1.5'"]
    secrets = {"GITHUB_PAT": "x1", "NOTIFY_PWD": "hunter2", "UPLOAD_JWT": "x", "A_COOKIE": "ab", "SMTP_PASSWORD": "48151623"}
    plain = {"DATA": "sk-learn", "KEY_DIM": "64", "NAME": "eyJ", "NUM_PASSES": "3", "PATIENCE": "3", "PIN_MEMORY": "1", "TASK": "mask-language-2"}
    for name, value in {**secrets, "WHO": "ghp_S3cr3tS3cr3t", "X": "sk-proj-0123456789", **plain}.items():
        monkeypatch.setenv(name, value)
    script = ", ".join(f"os.environ['{name}']" for name in (*secrets, "WHO", "X", *plain))
    (told,) = [x for x in machine_facts(torch.device("cpu"), 1, {"idea.py": script}) if x.startswith("read by")]
    assert told == "read by its sources: " + ", ".join(f"{name}={value!r}" for name, value in plain.items())
    assert OF_THE_PROJECT == {f"{name}.py" for name in MODULES}
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # told with the CPU
    ours = 'os.environ["OMP_NUM_THREADS"], os.environ.setdefault("OMP_WAIT_POLICY", "passive")'  # launch/'s own
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")
    assert not [line for line in machine_facts(torch.device("cpu"), 1, {"idea.py": "x", "a.py": ours}) if line.startswith("read by")]


def test_a_rank_asks_for_no_more_threads_than_openmp_may_have(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {*range(8)})
    for limit, cores in (("3", 3), ("64", 8), ("", 8), ("none", 8), ("0", 8), ("\u00b2", 8)):
        monkeypatch.setenv("OMP_THREAD_LIMIT", limit)
        assert usable_cores() == cores


def test_the_cores_that_a_run_may_not_use_are_told(monkeypatch):
    """Under taskset, or in a container's set, it was the same machine, and "FASTER" beside runs there."""
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    for allowed, told in ((8, ", 8 cores, "), (3, ", 3 of 8 cores, ")):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: {*range(allowed)})
        (line,) = [line for line in machine_facts(torch.device("cpu"), 1) if line.startswith("cpu: ")]
        assert told in line


QUOTAS = {  # files below /sys/fs/cgroup, cores of the machine's 8, threads, /proc/self/cgroup
    "none": ({}, 8, 8),
    "version 2": ({"cpu.max": "150000 100000\n"}, 1.5, 2),
    "version 2, without one": ({"cpu.max": "max 100000\n"}, 8, 8),
    "more than there are": ({"cpu.max": "1600000 100000\n"}, 8, 8),
    "version 1": ({"cpu/cpu.cfs_quota_us": "200000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 2, 2),
    "version 1, without one": ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 8, 8),
    "of no known form": ({"cpu.max": "150000 0\n"}, 8, 8, "nonsense\n"),
    "of a job": ({"job/cpu.max": "300000 100000\n", "job/step/cpu.max": "max 100000\n"}, 3, 3, "0::/job/step\n"),
    "of a job, version 1": ({"cpu/job/cpu.cfs_quota_us": "50000\n", "cpu/job/cpu.cfs_period_us": "100000\n",
                             "cpu/other/cpu.cfs_quota_us": "1\n", "cpu/other/cpu.cfs_period_us": "100000\n"}, 0.5, 1,
                            "9:memory:/other\n8:cpu,cpuacct:/job\n"),
}  # fmt: skip


@pytest.mark.parametrize("case", QUOTAS)
def test_the_time_that_a_control_group_gives_is_of_so_many_cores(monkeypatch, tmp_path, case):
    """Under docker's --cpus=1 a run was on the same machine, with a thread for each core that it had no time on."""
    files, cores, threads, *own = QUOTAS[case]
    all_files = {f"sys/fs/cgroup/{name}": text for name, text in files.items()} | ({"proc/self/cgroup": own[0]} if own else {})
    for name, text in all_files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {*range(8)})
    monkeypatch.delenv("OMP_THREAD_LIMIT", raising=False)
    found = launch.machine.allowed_cores(tmp_path)
    monkeypatch.setattr(launch.machine, "allowed_cores", lambda: found)
    (line,) = [line for line in machine_facts(torch.device("cpu"), 1) if line.startswith("cpu: ")]
    assert (f", {cores} of 8 cores, " if cores < 8 else ", 8 cores, ") in line and usable_cores() == threads


def test_variables_that_make_a_run_slower_are_told(monkeypatch):
    """DETAIL checks every collective: a third of a small step, which compare.py laid to nothing."""
    given = {"TORCH_DISTRIBUTED_DEBUG": "DETAIL", "OMP_WAIT_POLICY": "active", "GLOO_SOCKET_IFNAME": "eth0", "KMP_BLOCKTIME": "0",
             "MALLOC_ARENA_MAX": "1", "PYTHONDEVMODE": "1", "LD_PRELOAD": "/usr/lib/libjemalloc.so.2:/home/me/b.so"}  # fmt: skip
    for name, value in {**given, "TORCHELASTIC_RUN_ID": "x", "PYTHONPATH": "ideas"}.items():
        monkeypatch.setenv(name, value)
    (told,) = [line for line in machine_facts(torch.device("cpu"), 1) if line.startswith("variables: ")]
    given["LD_PRELOAD"] = "libjemalloc.so.2:b.so"
    assert all(f"{name}={value!a}" in told for name, value in given.items()), told
    assert "TORCHELASTIC" not in told and "PYTHONPATH" not in told
    # launch/'s
    ours = {"OMP_WAIT_POLICY": "passive", "PYTHONHASHSEED": "0", "GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    for name, value in ours.items():
        monkeypatch.setenv(name, value)
    assert not any(name in "".join(machine_facts(torch.device("cpu"), 1)) for name in ours)


def test_two_machines_of_one_cpu_are_told_apart_without_their_names(monkeypatch):
    """As nodes of a cluster, whose times do not compare; the records' tools read it."""
    told = []
    for name in ("node7", "node8"):
        monkeypatch.setattr(platform, "node", lambda name=name: name)
        told.append([line for line in machine_facts(torch.device("cpu"), 1) if "node" in line or line.startswith("host: ")])
    assert [re.fullmatch(r"host: ([0-9a-f]{8}), a CRC-32 of its name", *lines) is not None for lines in told] == [True, True]
    assert told[0] != told[1]


def test_without_them_there_is_no_such_line(monkeypatch):
    for name in filter(VARIABLES.fullmatch, [*os.environ]):
        monkeypatch.delenv(name)
    assert not any(line.startswith("variables: ") for line in machine_facts(torch.device("cpu"), 1))


def test_settings_are_told_whatever_their_class_says_of_itself() -> None:
    """An idea's @dataclass(repr=False), or one made in a function: compare.py found no settings, and so no differences."""

    @dataclasses.dataclass(repr=False)
    class Settings(train_gpt.Hyperparameters):
        warmth: float = dataclasses.field(default=0.5, repr=False)

    usual = train_gpt.Hyperparameters(seed=3)
    assert settings_text(usual) == repr(usual)
    assert settings_text(Settings(seed=3)) == f"Settings({repr(usual).partition('(')[2][:-1]}, warmth=0.5)"


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a process has no peak of another's")
def test_the_peak_is_not_of_who_started_the_process():
    """Of a notebook or a sweep with much in memory: 3,082 MiB in place of 534."""
    peak = "import torch, launch.machine; print(launch.machine.peak_memory(torch.device('cpu')))"
    start = f"import subprocess, sys; x = b'1' * (1 << 30); subprocess.run([sys.executable, '-c', {peak!r}], close_fds=False)"
    said = subprocess.run([sys.executable, "-c", start], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert int(re.fullmatch(r"peak memory resident: (\d+) MiB\n", said)[1]) < 900


@pytest.mark.skipif(sys.platform != "linux", reason="where memory can be asked for a new peak, /proc/self/clear_refs")
def test_the_peak_of_an_earlier_run_is_not_the_next_ones():
    """Of a sweep in one process."""
    peak = lambda: int(re.fullmatch(r"peak memory resident: (\d+) MiB", peak_memory(torch.device("cpu")))[1])
    forget_earlier_run(torch.device("cpu"))
    before = peak()
    large = mmap.mmap(-1, 400 << 20)  # not malloc's, which may keep what is freed
    for page in range(0, len(large), 4096):
        large[page] = 1
    assert peak() > before + 300
    large.close()
    assert peak() > before + 300
    forget_earlier_run(torch.device("cpu"))
    assert peak() < before + 200

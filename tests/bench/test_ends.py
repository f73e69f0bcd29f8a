"""A signal to a tool of bench/ ends all that it has started, by SIGTERM, and leaves none of its folders; a reader may leave."""

import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from common import ROOT, run_fresh, text_of, wait_until

CHILD = """#!/bin/bash
# In place of a launcher: SIGTERM reaches what it has started through it alone.
here={here}
sleep 600 & echo $! >"$here/rank"
trap 'kill %1; sleep 0.2; touch "$here/ended"; exit 1' TERM
touch "$here/started"
wait
"""
AS_MAIN = """
import runpy, sys
sys.executable, sys.argv = {child!r}, sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
SMALL = "--num_scheduled_iterations=6 --num_extension_iterations=2 --val_tokens=1024 --val_batch_tokens=1024"
TOOLS = [f"grad_dtype.py {SMALL} --data={{shards}}", "order.py validate", "codegen.py", "gpu.py --dry-run", "first_minutes.py", "resumes.py"]


@pytest.fixture
def start(tmp_path):
    """start(tool and its arguments, by space): the process, once it has a child; other programs of its path are that child."""

    def begin(tool: str, hangup: signal.Handlers = signal.SIG_DFL) -> subprocess.Popen:
        (tmp_path / "tmp").mkdir()
        for name in ("python", "python3", "git"):
            (tmp_path / name).write_text(CHILD.format(here=shlex.quote(f"{tmp_path}")))
            (tmp_path / name).chmod(0o755)
        script, *arguments = tool.split()
        as_main = AS_MAIN.format(child=f"{tmp_path / 'python'}")
        command = [sys.executable, "-c", as_main, f"{ROOT / 'bench' / script}", *arguments]
        path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
        environment = {**os.environ, "PATH": path, "TMPDIR": f"{tmp_path / 'tmp'}", "OMP_NUM_THREADS": "1"}
        environment["TORCHINDUCTOR_CACHE_DIR"] = f"{tmp_path / 'cache'}"  # PyTorch makes it as it imports its compiler
        process = subprocess.Popen(
            command, env=environment, stderr=subprocess.PIPE, text=True, preexec_fn=lambda: signal.signal(signal.SIGHUP, hangup)
        )
        wait_until(lambda: (tmp_path / "started").exists() or process.poll() is not None)
        assert process.poll() is None, process.stderr.read()
        return process

    return begin


@pytest.mark.parametrize("tool", TOOLS)
def test_a_signal_leaves_neither_ranks_nor_folders(start, shards, tmp_path, tool):
    number = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)[TOOLS.index(tool) % 3]
    process = start(tool.format(shards=shards))
    rank = Path("/proc", text_of(tmp_path / "rank").strip())
    assert rank.exists() and (list((tmp_path / "tmp").iterdir()) or tool == "gpu.py --dry-run")
    process.send_signal(number)
    assert "Traceback" not in process.communicate(timeout=60)[1] and process.returncode == 128 + number
    assert (tmp_path / "ended").exists() and not rank.exists() and not list((tmp_path / "tmp").iterdir())


def test_a_killed_tool_takes_its_ranks_along(start, tmp_path):
    """As an OOM kill does: they went on to their end, beside what was measured next."""
    process = start("first_minutes.py")
    rank = Path("/proc", text_of(tmp_path / "rank").strip())
    process.kill()
    wait_until(lambda: (tmp_path / "ended").exists() and not rank.exists(), seconds=10)
    process.communicate()


SLOW = """
import os, time
open(os.environ["IMPORTING"], "w").close()
time.sleep(600)
"""
WITH_IMPORTS = ["sample.py", "data/local_text.py", *(f"bench/{x}.py" for x in ("communication", "cpu_step", "kernels", "order", "verdicts"))]


@pytest.mark.parametrize("tool", WITH_IMPORTS)
def test_ctrl_c_while_a_tool_imports_is_no_traceback(tmp_path, tool):
    """PyTorch takes seconds."""
    for name in ("torch", "numpy", "tqdm"):
        (tmp_path / f"{name}.py").write_text(SLOW)
    there = {**os.environ, "PYTHONPATH": f"{tmp_path}", "IMPORTING": f"{tmp_path / 'importing'}"}
    command = [sys.executable, f"{ROOT / tool}", "--help"]
    with subprocess.Popen(command, env=there, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        wait_until(lambda: (tmp_path / "importing").exists() or process.poll() is not None)
        process.send_signal(signal.SIGINT)
        assert (*process.communicate(timeout=60), process.returncode) == ("", "", 130)


def test_a_signal_while_a_child_starts_ends_it_too() -> None:
    """It came before anybody knew the child, which stayed."""
    source = """
import os, signal, subprocess, sys
from launch import console
begin, children = subprocess.Popen, []
def signalled(*args, **options):
    children.append(begin(*args, **options))
    os.kill(os.getpid(), signal.SIGHUP)
    return children[0]
subprocess.Popen = signalled
try:
    with console.ended_by_signals():
        console.run_to_end(["sleep", "600"])
finally:
    print(children[0].poll())
    try:
        console.run_to_end(["/nowhere"])
    except FileNotFoundError:
        print(console._late)  # what comes now is heard at once again
"""
    done = subprocess.run([sys.executable, "-c", source], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (128 + signal.SIGHUP, f"{-signal.SIGTERM}\nNone\n", "")


@pytest.mark.parametrize("seconds, code", [(0.0, 128 + signal.SIGINT), (1.5, -signal.SIGTERM)])
def test_a_signal_that_comes_again_at_once_is_the_same(tmp_path, seconds, code) -> None:
    """Ctrl-C in a terminal, and the parent's SIGTERM: the second came while a folder was cleaned up, which stayed."""
    source = f"""
import os, signal, tempfile, time
from launch import console
with console.ended_by_signals(), tempfile.TemporaryDirectory(dir={f"{tmp_path}"!r}):
    try:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(9)
    finally:
        time.sleep({seconds})
        os.kill(os.getpid(), signal.SIGTERM)
"""
    done = subprocess.run([sys.executable, "-c", source], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr, len(list(tmp_path.iterdir()))) == (code, "", int(code < 0))


def test_what_nohup_ignores_ends_no_tool(start, tmp_path):
    process = start("first_minutes.py", signal.SIG_IGN)
    process.send_signal(signal.SIGHUP)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.5)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM and (tmp_path / "ended").exists()


def test_no_version_is_not_all_versions_that_pass(tmp_path):
    """VERSIONS=" " ended with code 0, and nothing was tested."""
    command = ["bash", f"{ROOT / 'bench' / 'versions.sh'}", f"{tmp_path / 'made'}"]
    done = subprocess.run(command, env={**os.environ, "VERSIONS": " "}, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and done.stderr.startswith("bench/versions.sh: error: VERSIONS is blank: ")
    assert not done.stdout and not (tmp_path / "made").exists()
    for option, code, said in (("--help", 0, "Does the CPU part"), ("--jobs=2", 2, "bench/versions.sh: error: --jobs=2 is no folder")):
        done = subprocess.run([*command[:2], option], cwd=tmp_path, capture_output=True, text=True, timeout=60)
        assert done.returncode == code and (done.stdout + done.stderr).startswith(said), done


PYTHON = """#!/bin/bash
# In place of python3, and of an environment's: notes what pip is to install, and passes each test.
case "$*" in
    "-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
    "-m pip "*) echo >>{here}/installs ;;
    "-m pytest "*) echo "1 passed in 0.01s" ;;
    *) exec {python} "$@" ;;
esac
"""


def test_an_environment_is_that_of_all_three_versions(tmp_path):
    """It was found by PyTorch's alone, and a pass said of a Triton that was not there; the line tells what is."""
    (tmp_path / "python3").write_text(PYTHON.format(here=shlex.quote(f"{tmp_path}"), python=shlex.quote(sys.executable)))
    (tmp_path / "python3").chmod(0o755)
    for name, version in (("torch", "1.2"), ("triton", "3.4"), ("numpy", "5.6")):
        (tmp_path / f"{name}-{version}.dist-info").mkdir()
        (tmp_path / f"{name}-{version}.dist-info" / "METADATA").write_text(f"Name: {name}\nVersion: {version}\n")
    environment = {**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": f"{tmp_path}"}
    command = ["bash", f"{ROOT / 'bench' / 'versions.sh'}", f"{tmp_path / 'made'}"]

    def installs(versions: str) -> int:
        done = subprocess.run(command, env=environment | {"VERSIONS": versions}, capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.splitlines()[-1] == "torch 1.2, Triton 3.4, NumPy 5.6: 1 passed in 0.01s"
        return len(text_of(tmp_path / "installs").splitlines())

    assert [installs(x) for x in ("2.11.0:3.6.0:2.3.5", "2.11.0:3.6.0:2.3.5", "2.11.0:3.7.1:2.3.5", "2.11.0:3.7.1:2.4.6")] == [1, 1, 2, 3]
    made = tmp_path / "made" / "2.11.0-3.7.1-2.4.6" / "made"
    assert made.read_text().startswith("torch==2.11.0\ntriton==3.7.1\nnumpy==2.4.6\n")
    made.write_text(f"{made.read_text()}a-requirement-of-before\n")
    assert installs("2.11.0:3.7.1:2.4.6") == 4


def test_a_reader_that_has_enough_is_no_fault() -> None:
    """`communication.py | head`"""
    command = [sys.executable, f"{ROOT / 'bench' / 'communication.py'}"]
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "wb") as left, open("/dev/full", "wb") as full:
        for stdout, code, said in ((left, 0, ""), (full, 1, "communication.py: error: [Errno 28] No space left on device\n")):
            done = run_fresh(command, stdout=stdout)
            assert (done.returncode, done.stderr) == (code, said)

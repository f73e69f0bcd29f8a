"""Signals, and ranks that die: what users, clusters and consoles do to a run of runtime/launch.py."""

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest

from common import ROOT, wait_until
from runtime import launch

LAUNCH = [sys.executable, f"{ROOT / 'runtime/launch.py'}"]
LOOP = f"{Path(__file__).with_name('step_loop.py')}"
LONG = 200  # seconds: what has not happened by then never will
HANG = "time.sleep(1000)"


class Run:
    """A launcher with its ranks, in a process group of their own, as a shell starts them."""

    def __init__(self, folder: Path, command: list[str], **variables: str):
        self.out = folder / "out"
        self.err = folder / "err"
        environment = {**os.environ, "RANKS": "2", **variables}
        with open(self.out, "w") as out, open(self.err, "w") as err:
            self.process = subprocess.Popen(
                command, env=environment, stdout=out, stderr=err, start_new_session=True
            )

    def ranks(self) -> list[int]:
        """Process ids."""
        pid = self.process.pid
        return [int(x) for x in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]

    def wait_for(self, text: str) -> None:
        wait_until(lambda: text in self.out.read_text(), LONG)

    def end(self) -> tuple[int, str]:
        """The exit code, and what is on stderr."""
        return self.process.wait(LONG), self.err.read_text()


@pytest.fixture
def start(tmp_path: Path) -> Iterator:
    """start(command, **environment variables) -> Run, which no process outlives."""
    runs = []

    def start_run(*command: str, **variables: str) -> Run:
        runs.append(Run(tmp_path, [*LAUNCH, *(command or [LOOP])], **variables))
        return runs[-1]

    yield start_run
    for run in runs:
        try:
            os.killpg(run.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass


def is_alive(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


# Signals

# On how many ranks.
SIGNALS = {signal.SIGINT: "2", signal.SIGHUP: "1", signal.SIGUSR1: "1", signal.SIGUSR2: "1"}


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_ends_the_run_after_its_step(start, number):
    """Sent to launcher and ranks alike, as terminals and clusters do: it is one signal, also for a
    rank that has ended its steps when the launcher passes it on."""
    run = start(RANKS=SIGNALS[number])
    run.wait_for("step:2")
    os.killpg(run.process.pid, number)
    wait_until(lambda: "stopped after step:" in run.err.read_text(), LONG)
    os.killpg(run.process.pid, number)
    code, printed = run.end()
    assert code == 128 + number
    assert printed.count("stopping after the step in progress") == 1
    assert printed.count("stopped after step:") == 1
    assert "Traceback" not in printed


def test_a_second_signal_ends_the_run_at_once(start):
    run = start(FAULT=f"if step == 2: {HANG}", RANKS="1")
    run.wait_for("step:2")
    run.process.send_signal(signal.SIGTERM)
    wait_until(lambda: "SIGTERM: stopping" in run.err.read_text(), LONG)
    ranks = run.ranks()
    run.process.send_signal(signal.SIGINT)
    code, printed = run.end()
    assert code == 128 + signal.SIGINT
    assert "stopped after" not in printed
    wait_until(lambda: not any(map(is_alive, ranks)), LONG)


def test_a_signal_that_was_ignored_at_the_start_stays_ignored(start):
    """As SIGHUP by nohup."""
    handler = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    run = start(RANKS="1")
    signal.signal(signal.SIGHUP, handler)
    run.wait_for("step:2")
    os.killpg(run.process.pid, signal.SIGHUP)
    os.killpg(run.process.pid, signal.SIGTERM)
    code, printed = run.end()
    assert code == 128 + signal.SIGTERM and "SIGHUP" not in printed


def test_ctrl_c_while_the_ranks_import_is_no_traceback(start):
    run = start()
    wait_until(lambda: len(run.ranks()) == 2, LONG)
    os.killpg(run.process.pid, signal.SIGINT)
    assert run.end() == (
        130,
        "SIGINT: stopping after the step in progress; a second signal ends the run at once\n",
    )


def test_a_launcher_that_is_killed_takes_its_ranks_along(start):
    run = start()
    run.wait_for("step:2")
    ranks = run.ranks()
    run.process.kill()
    wait_until(lambda: not any(map(is_alive, ranks)), LONG)


# Ranks


def listening_at(pid: int) -> set[str]:
    """The addresses at which a process listens, as /proc/net writes them."""
    links = [os.readlink(file) for file in Path(f"/proc/{pid}/fd").iterdir()]
    sockets = re.findall(r"socket:\[(\d+)\]", " ".join(links))
    addresses = set()
    for table in ("tcp", "tcp6"):
        for line in Path("/proc/net", table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[9] in sockets and fields[3] == "0A":  # listening
                addresses.add(fields[1].partition(":")[0])
    return addresses


def test_ranks_listen_on_the_loopback_alone_and_one_that_is_killed_is_named(start):
    run = start()
    run.wait_for("step:2")
    assert set.union(*map(listening_at, run.ranks())) == {"0100007F"}  # 127.0.0.1
    os.kill(run.ranks()[1], signal.SIGKILL)
    code, printed = run.end()
    assert code == 1
    hint = "out of memory? lower --val_batch_tokens, or raise --micro_batches"
    assert re.fullmatch(rf"error: rank \d was killed by SIGKILL: {re.escape(hint)}\n", printed)


def test_one_rank_opens_no_socket(start):
    run = start(RANKS="1")
    run.wait_for("step:2")
    (rank,) = run.ranks()
    links = [os.readlink(file) for file in Path(f"/proc/{rank}/fd").iterdir()]
    assert links and "socket:" not in " ".join(links)


def test_ranks_without_a_loopback_are_refused_in_one_line(monkeypatch):
    """PyTorch would wait for five minutes."""
    monkeypatch.setattr(socket, "create_connection", Mock(side_effect=OSError("unreachable")))
    with pytest.raises(SystemExit, match="cannot meet on 127.0.0.1: .* RANKS=1 needs no socket"):
        launch.free_port()


def test_a_rank_that_hangs_when_another_is_lost_is_killed(start):
    """As one that waits inside NCCL, where Python does not hear a signal."""
    block = "import signal; signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])"
    run = start(FAULT=f"if step == 2 and ranks.first: exec('{block}'); {HANG}")
    run.wait_for("step:2")
    os.kill(max(run.ranks()), signal.SIGKILL)
    code, _ = run.end()
    assert code == 1


ERRORS = {  # FAULT, what is printed, and how many tracebacks
    "of one rank": ("if step == 2 and ranks.rank == 1: 1 / 0", "rank1.*ZeroDivisionError", 1),
    "no memory": (
        "if step == 2 and ranks.rank == 1: raise torch.OutOfMemoryError(TRIED)",
        r"^error: rank 1 is out of GPU memory \(asked for 2\.00 GiB\): .*--micro_batches",
        0,
    ),
}


@pytest.mark.parametrize("error", ERRORS)
def test_an_error_ends_all_ranks_and_is_printed_once(start, error):
    fault, expected, tracebacks = ERRORS[error]
    code, printed = start(FAULT=fault).end()
    assert code == 1
    assert re.search(expected, printed, re.MULTILINE), printed
    assert printed.count("Traceback") == tracebacks, printed

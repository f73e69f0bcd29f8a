"""Helpers of the tests: the script they test, tensors that any machine makes alike, small models, runs and processes that end.

`train_gpt` is the script that SCRIPT names (SCRIPT=idea.py ./test.sh), in every process that has imported this file.
"""

import ctypes
import datetime
import gc
import importlib.util
import os
import re
import runpy
import shutil
import signal
import site
import subprocess
import sys
import sysconfig
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing import forkserver
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NoReturn
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

import data
import launch
import runtime

ROOT = Path(__file__).resolve().parent.parent
for package in (data, launch, runtime):  # beside a script that extract.py wrote lies what a run imports of each; the rest is ours
    package.__path__.append(str(ROOT / package.__name__))

from bench.kernel_checks import normal
from launch import start as launcher
from sample import load_script

unfreeze = gc.unfreeze  # which conftest.py takes away

# A run's own process has a file; the program of pytest-xdist's workers, and of multiprocessing's below, has none.
sys.modules["__main__"].__file__ = getattr(sys.modules["__main__"], "__file__", pytest.__file__)

SCRIPT = ROOT / os.environ.get("SCRIPT", "train_gpt.py")
train_gpt = sys.modules.get("train_gpt") or load_script(SCRIPT, "train_gpt")
if not hasattr(train_gpt, "Hyperparameters"):
    sys.exit(f"test.sh: error: SCRIPT={SCRIPT} is no training script: it has no Hyperparameters")
MODULES = [path for path in sorted(ROOT.glob("*.py")) if path.stem in {*launcher.IMPORTED, "train_gpt"}]  # no idea beside them

HAS_TRITON = sys.modules.get("triton", ...) is not None and importlib.util.find_spec("triton") is not None

# Unit roundoffs: the largest relative error of rounding to nearest, half a unit in the last place.
U64, U32, U16 = 2.0**-53, 2.0**-24, 2.0**-8  # fp64, fp32, bf16


def probe(label: str, x: Tensor) -> float:
    """The sum over elements of x times normal("probe_" + label), in fp64: one number that notices any element."""
    return (x.double() * normal("probe_" + label, tuple(x.shape)).double()).sum().item()


def norm64(x: Tensor) -> float:
    """The Frobenius norm, in fp64."""
    return x.double().norm().item()


def unequal(a: Any, b: Any, name: str = "") -> list[str]:
    """Names of what is not the same in two nests of dicts, bit for bit."""
    if isinstance(a, dict) and isinstance(b, dict):
        faults = [f"{name}{key}" for key in a.keys() ^ b.keys()]
        return faults + [fault for key in a.keys() & b.keys() for fault in unequal(a[key], b[key], f"{name}{key}.")]
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        same = a.dtype == b.dtype and a.shape == b.shape and torch.equal(bits(a), bits(b))
    else:
        same = type(a) is type(b) and a == b
    return [] if same else [name.removesuffix(".")]


# fp64 sums of at most some thousand terms of size one, through eleven layers at most: 1e-12 leaves a factor of a thousand over
# 2⁻⁵³, and is far below anything that a wrong term or a detour through fp32 (2⁻²⁴) would leave.
TOLERANCE64 = 1e-12


def close64(a: Tensor, b: Tensor) -> bool:
    """a equals b but for fp64's rounding, by the largest element."""
    return a.dtype == b.dtype == torch.float64 and (a - b).abs().max().item() <= TOLERANCE64 * max(1.0, b.abs().max().item())


def int32(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def bits(x: Tensor) -> Tensor:
    """The bytes of a tensor: NaN equals itself, -0 is not 0."""
    return x.detach().contiguous().view(-1).view(torch.uint8)


# Small models and batches

# Scales at which every parameter matters and nothing saturates.
SCALES = dict(
    attn=0.15, mlp=0.1, value_embeds=0.5, bigram_embed=0.5, attn_gate_bank=0.3, ve_gate_bank=0.3, smear_gate=0.5, skip_gate=0.5,
    x0_lambdas=0.1, lm_head=0.3, embed=0.7,
)  # fmt: skip


@torch.no_grad()
def set_parameters(model: nn.Module, scales: dict[str, float] = SCALES, prefix: str = "") -> nn.Module:
    """Every parameter normal(prefix + label) at its scale, or 0.3; scalars 0.05 of it off their start."""
    for label, param in model.named_parameters():
        if label == "scalars":
            param.add_(normal(prefix + label, tuple(param.shape), 0.05))
        else:
            param.copy_(normal(prefix + label, tuple(param.shape), scales.get(label, 0.3)))
    return model


def add_gradients(model: nn.Module, step: int, micro_batches: range = range(1)) -> None:
    """What backward passes would add: for each micro-batch, numbers that label, step and micro-batch decide."""
    for label, param in model.named_parameters():
        for i in micro_batches:
            g = normal(f"g_{label}_{step}_{i}", tuple(param.shape)).to(param.dtype)
            param.grad = g if param.grad is None else param.grad + g


def tiny_gpt(
    dtype: torch.dtype = torch.float32,
    *,
    vocab_size: int = 128,
    num_heads: int = 2,
    head_dim: int = 8,
    max_tokens: int = 256,
    bigram_rows: int = 0,
    fp8_head: bool = False,
    script: ModuleType = train_gpt,
) -> nn.Module:
    """The script's topology at the smallest widths, no parameter at zero; bf16 keeps the training dtypes."""
    layers, dim = len(script.LAYERS), num_heads * head_dim
    more = dict(bigram_rows=bigram_rows, fp8_head=fp8_head)
    model = script.GPT(vocab_size, layers, num_heads, head_dim, dim, max_tokens, **more)
    if dtype != torch.bfloat16:
        model.to(dtype)
    return set_parameters(model)


def random_batch(T: int, vocab: int, starts: tuple[int, ...], slots: int = 8, seed: int = 7) -> tuple[Tensor, Tensor, Tensor]:
    """inputs (T,) int32, targets (T,) int64, cu_seqlens (slots,) int32."""
    tokens = torch.from_numpy(np.random.Generator(np.random.Philox(seed)).integers(0, vocab, T + 1))
    cu_seqlens = torch.full((slots,), T, dtype=torch.int32)
    cu_seqlens[: len(starts)] = torch.tensor(starts, dtype=torch.int32)
    return tokens[:-1].int(), tokens[1:].long(), cu_seqlens


# Small runs


def short_schedule(*, script: ModuleType = train_gpt, **changes: Any) -> Any:
    """Hyperparameters of 12 + 2 steps for a manager alone, which needs no data: windows in blocks of 16 tokens."""
    chosen = dict(num_scheduled_iterations=12, num_extension_iterations=2, block_size=16, micro_batches=2) | changes
    return script.Hyperparameters(**chosen)


TINY = dict(
    preset="demo", bigram_rows=768, model_dim=32, num_heads=2, head_dim=16, batch_unit=32, micro_batches=2,
    num_scheduled_iterations=6, num_extension_iterations=2, val_every=4, val_tokens=512, val_batch_tokens=256, sample_tokens=0,
    run_id="run",
)  # fmt: skip


def options(shards: Path, folder: Path, **more: Any) -> list[str]:
    """The command line of a run of TINY settings on these shards, its log in folder/logs."""
    return [f"--{name}={value}" for name, value in {**TINY, "data": shards, "log_dir": folder / "logs", **more}.items()]


def tiny_settings(shards: Path, folder: Path, **more: Any) -> Any:
    """The same as Hyperparameters."""
    chosen = {**train_gpt.DEMO, **TINY, "data": f"{shards}", "log_dir": f"{folder / 'logs'}", **more}
    return train_gpt.Hyperparameters(**{name: value for name, value in chosen.items() if name != "preset"})


def ends_with(capsys: pytest.CaptureFixture, arguments: list[str], message: str, code: int) -> None:
    """main(arguments) exits with this code, and a message on stderr that matches, and no traceback."""
    with pytest.raises(SystemExit) as exit_:
        train_gpt.main(arguments)
    printed = capsys.readouterr().err
    assert exit_.value.code == code, printed
    assert re.search(message, printed), printed
    assert "Traceback" not in printed


def lines_of(log: Path) -> str:
    """A log's lines after its header, without times and memory."""
    lines = log.read_text().split("=" * 100 + "\n")[2]
    return re.sub(r"(train_time:|step_avg:|resident: )\S+", r"\1", lines)


# Copies of the project


def copy_project(root: Path) -> Path:
    """The project as users have it, at root; without Triton its requirements ask for none, as where it has no wheel."""
    for name in ("launch", "runtime", "data"):
        shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__", "*.bin", "local", "fineweb*"))
    for path in (*MODULES, ROOT / "run.sh"):
        shutil.copy(path, root)
    lines = (ROOT / "requirements.txt").read_text().splitlines(keepends=True)
    (root / "requirements.txt").write_text("".join(x for x in lines if HAS_TRITON or not x.startswith("triton==")))
    return root


def unreadable(folder: Path) -> Path:
    """The folder, with scripts in it that nobody may read, but root's rights (without_rights), and one that is a loop."""
    (folder / "closed").mkdir()
    for name in ("closed/idea.py", "unread.py"):
        (folder / name).write_text("x = 1\n")
    (folder / "unread.py").chmod(0)
    (folder / "closed").chmod(0)
    (folder / "loop.py").symlink_to("loop.py")
    return folder


def without_rights() -> None:
    """A preexec_fn: root's process, and what it executes, may then read what its user may, and no more."""
    libc, header, sets = ctypes.CDLL(None), (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    for capability in (1, 2):  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH, which pass by modes
        libc.prctl(24, capability, 0, 0, 0)  # PR_CAPBSET_DROP, for what is executed
    libc.capget(header, sets)
    for i in (0, 1):  # effective, permitted
        sets[i] &= ~0b110
    libc.capset(header, sets)


# Processes


class Forked:
    """A subprocess.Popen of `python [-u] script arguments`, of `python -c source` or of a function, without the seconds that
    imports take: a fork of this process, with the signals, files and environment that a new program would have. The modules
    that are imported here are so there."""

    def __init__(
        self,
        args: list[str] | Callable[[], object],
        *,
        env: dict[str, str] | None = None,
        stdout: Any = None,
        stderr: Any = None,
        start_new_session: bool = False,
        pass_fds: Sequence[int] = (),
    ):
        self.returncode: int | None = None
        self.pid = os.fork()
        if not self.pid:
            try:
                if start_new_session:
                    os.setsid()
                become_new(stdout, stderr, env, pass_fds)
                work_and_end(args if callable(args) else lambda: run_python([*args[1:]]), 1)
            finally:
                os._exit(99)

    def poll(self) -> int | None:
        """Its exit code, negative for a signal; none while it runs."""
        if self.returncode is None:
            done, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if done else None
        return self.returncode

    def wait(self, timeout: float = 60) -> int:
        """The same, once it has ended; one that takes longer is killed, and the test fails."""
        if self.returncode is None:
            self.returncode = exit_code(self.pid, timeout)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def become_new(stdout: Any, stderr: Any, env: dict[str, str] | None, kept: Sequence[int] = ()) -> None:
    """What the kernel and Python do at the start of a program, in a child of this process. Files as subprocess takes them."""
    for number, given in ((1, stdout), (2, stderr)):
        if given is not None:
            file = os.open(os.devnull, os.O_WRONLY) if given == subprocess.DEVNULL else given
            os.dup2(file if isinstance(file, int) else file.fileno(), number)
    gc.freeze()  # collected here, the garbage of earlier tests would close its files' numbers again, which name other files by then
    null = os.open(os.devnull, os.O_RDWR)
    for number in map(int, os.listdir("/dev/fd")):  # closed, but no other file gets its number: a logger may hold it, which writes
        if number > 2 and number not in (null, *kept):
            os.dup2(null, number, inheritable=False)
    sys.stdout, sys.stderr = (open(number, "w", buffering=1, errors="backslashreplace", closefd=False) for number in (1, 2))
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    if env is not None:
        os.environ.clear()
        os.environ.update(env)
    torch.set_num_threads(1)


def without_stdout() -> None:
    """A preexec_fn: what >&- does in a shell."""
    os.close(1)
    sys.stdout = None


def run_python(arguments: list[str], forget: bool = False) -> None:
    """What `python arguments` does; forget: it has imported nothing but installed modules."""
    arguments = arguments[1:] if arguments[0] == "-u" else arguments
    if forget:
        installed = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib"))
        for name, module in [*sys.modules.items()]:
            places = vars(module).get("__file__"), *vars(module).get("__path__", ())  # torch.ops says _ops.py
            if any(place and os.path.isabs(place) and not place.startswith(installed) for place in places):
                del sys.modules[name]
        sys.path[:] = [path for path in sys.path if path.startswith(installed)]
        sys.orig_argv[:] = [sys.executable, *arguments]
    sys.path[:0] = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    if forget:
        sys.modules.pop("sitecustomize", None)
        site.execsitecustomize()
    if arguments[0] == "-c":
        sys.argv = ["-c", *arguments[2:]]
        sys.path.insert(0, "")
        main = sys.modules["__main__"] = ModuleType("__main__")
        exec(arguments[1], vars(main))
    else:
        sys.argv = arguments
        sys.path.insert(0, f"{Path(arguments[0]).parent}")
        runpy.run_path(arguments[0], run_name="__main__")


def run_fresh(command: list[object], **how: Any) -> subprocess.CompletedProcess[str]:
    """subprocess.run(command, capture_output=True, text=True), of `python script arguments` or `python -c source`, in a fork of
    this process that has forgotten this project's modules, and so imports its own, but not PyTorch again. So are the Pythons
    that it starts: a launcher's ranks. Not for what a variable says to the interpreter itself, or to PyTorch's import. Where there
    is a GPU it is that call: a fork may not use one that this process has used.

    how: cwd, env; preexec_fn; check; timeout, in seconds; stdout, a file that gets it."""
    if torch.cuda.is_available():
        how = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "timeout": 100, **how, "capture_output": False}
        return subprocess.run(command, **how)

    def start() -> None:
        os.chdir(how.get("cwd") or ".")
        if how.get("preexec_fn"):
            how["preexec_fn"]()
        subprocess.Popen = popen_fresh
        run_python([*map(os.fspath, command[1:])], forget=True)

    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        code = Forked(start, env=how.get("env"), stdout=how.get("stdout", output), stderr=errors).wait(how.get("timeout") or 100)
        said = []
        for file in (output, errors):
            file.seek(0)
            said.append(file.read().decode())
    done = subprocess.CompletedProcess(command, code, *said)
    if how.get("check"):
        done.check_returncode()
    return done


def popen_fresh(command: Any, *given: Any, popen: Any = subprocess.Popen, **how: Any) -> Any:
    """In such a fork, for subprocess.Popen: a rank's process is one too."""
    if isinstance(command, list) and command[0] == sys.executable and how.keys() <= {"env", "start_new_session"}:
        return Forked(lambda: run_python([*map(os.fspath, command[1:])], forget=True), **how)
    return popen(command, *given, **how)


def work_and_end(work: Callable[[], object], after_traceback: int) -> NoReturn:
    """End this process as an interpreter would: with a SystemExit's code, this one after a traceback, else with 0."""
    code = 0
    try:
        work()
    except SystemExit as exit_:
        code = exit_.code or 0
        if isinstance(code, str):
            print(code, file=sys.stderr)
            code = 1
    except BaseException:
        traceback.print_exc()
        code = after_traceback
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def forked(work: Callable[[], object], output: Path, errors: Path | None = None) -> int:
    """The id of a child process that does `work`, its output in a file, what goes to stderr in another one if that is given;
    its code is 99 after a traceback, which no test expects."""
    if child := os.fork():
        return child
    try:
        for number, path in ((1, output), (2, errors or output)):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
        sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
        torch.set_num_threads(1)
        work_and_end(work, 99)
    finally:
        os._exit(99)


def started(arguments: list[str], ranks: int = 2, script: Path = SCRIPT, **how: Any) -> Forked:
    """What ./run.sh ends in, launch/start.py, of a script on so many ranks, its processes Forked. how: as subprocess takes it."""

    def start() -> None:
        with patch.object(launcher, "subprocess", SimpleNamespace(**vars(subprocess) | {"Popen": Forked})):
            launcher.main([f"{script}", *arguments])

    return Forked(start, env={**os.environ, "RANKS": f"{ranks}"}, **how)


def torchrun(arguments: list[str], ranks: int = 2, script: Path = SCRIPT, **how: Any) -> Forked:
    """torchrun, of a script on so many ranks, its processes Forked."""

    def start() -> None:
        from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

        sys.argv = ["torchrun", "--standalone", f"--nproc_per_node={ranks}", f"{script}", *arguments]
        with patch.object(subprocess_handler, "Popen", Forked):
            runpy.run_module("torch.distributed.run", run_name="__main__")

    return Forked(start, env={**os.environ, "OMP_NUM_THREADS": "1"}, **how)


def run_script(script: Path, *arguments: str, seconds: float = 100) -> subprocess.CompletedProcess[str]:
    """What `python script arguments` does, in a fork of this process, which has imported PyTorch already."""

    def work() -> None:
        sys.argv = [f"{script}", *arguments]
        runpy.run_path(f"{script}", run_name="__main__")

    with tempfile.TemporaryDirectory() as folder:
        output, errors = Path(folder, "stdout"), Path(folder, "stderr")
        code = exit_code(forked(work, output, errors), seconds)
        return subprocess.CompletedProcess([script, *arguments], code, output.read_text(), errors.read_text())


def children(process: int) -> list[int]:
    """The ids of the processes that it has started, in that order: a launcher's ranks."""
    return [int(child) for child in text_of(Path(f"/proc/{process}/task/{process}/children")).split()]


def exit_code(child: int, seconds: float = 60) -> int:
    """Of a child process, at its end, negative for a signal; one that takes longer is killed, and the test fails."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    pytest.fail(f"a process did not end within {seconds} s")


def wait_until(holds: Callable[[], bool], seconds: float = 60, pause: float = 0.005) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(pause)


def text_of(path: Path) -> str:
    """A file's text, none if it is not there yet."""
    return path.read_text() if path.exists() else ""


# Ranks


def run_ranks(folder: Path, world_size: int, function: Callable, *args: Any, timeout: float = 300) -> list[Any]:
    """[function(rank, world_size, *args) of each rank], in processes of their own that form a gloo group.

    function: at the top level of a module; its result must be something torch.save takes. Raises RuntimeError, with the
    traceback, as soon as one rank fails, and TimeoutError after `timeout` seconds; no process outlives the call.
    """
    context = mp.get_context("forkserver")  # a clean process, which has imported all that ranks need
    context.set_forkserver_preload(["rank_imports"])
    path = os.pathsep.join(path for path in sys.path if path)
    with patch.dict(os.environ, PYTHONPATH=path, PYTHONSAFEPATH="1"):  # it has no sys.path of ours
        forkserver.ensure_running()
    processes = [
        context.Process(target=_rank_main, args=(rank, world_size, str(folder), function, args), daemon=True)
        for rank in range(world_size)
    ]
    deadline = time.monotonic() + timeout
    try:
        for process in processes:
            process.start()
        while any(process.is_alive() for process in processes):
            failed = [rank for rank, process in enumerate(processes) if process.exitcode not in (None, 0)]
            if failed:
                break
            if time.monotonic() > deadline:
                raise TimeoutError(f"{function.__name__} on {world_size} ranks did not end within {timeout} s")
            processes[0].join(0.02)
            time.sleep(0.02)
    finally:
        for process in processes:
            if process.pid is not None:
                process.kill()
                process.join()
    failed = [rank for rank in range(world_size) if not (folder / f"{rank}.pt").exists()]
    if failed:
        reports = [path.read_text() for rank in failed if (path := folder / f"{rank}.txt").exists()]
        raise RuntimeError(f"{function.__name__} failed on ranks {failed}:\n" + "\n".join(reports or ["killed, no traceback"]))
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(world_size)]


def _rank_main(rank: int, world_size: int, folder: str, function: Callable, args: tuple) -> None:
    torch.set_num_threads(1)
    path = Path(folder)
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{path / 'rendezvous'}",
            rank=rank,
            world_size=world_size,
            timeout=datetime.timedelta(seconds=60),
        )
        result = function(rank, world_size, *args)
        torch.save(result, path / f"{rank}.tmp")
        dist.barrier()
        (path / f"{rank}.tmp").rename(path / f"{rank}.pt")
        dist.destroy_process_group()
    except BaseException:
        (path / f"{rank}.txt").write_text(f"rank {rank}:\n{traceback.format_exc()}")
        raise SystemExit(1) from None

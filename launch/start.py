"""Start a script's ranks on this machine: python launch/start.py [script.py] [--option=value …], which ./run.sh ends in.

One process first checks what can be known without the ranks: options, data, the checkpoint to resume, room on the disk and in
memory. So a mistake is one message within seconds. Then it starts RANKS processes, or one for each GPU, or two on a CPU, and
waits: a rank's own message stays the only one, a rank that dies without one is named, and the exit code is the run's.

The script is imported for the check, which starts nothing. Paths in options mean the folder in which the user stands; those
that are not given are the project's. More than one machine: torchrun, docs/ranks.md.
"""

import sys

if sys.version_info < (3, 11):
    sys.exit("start.py: error: needs Python 3.11 or later: start by run.sh, which finds one, or makes .venv")
if __name__ == "__main__" and not sys.flags.safe_path:
    sys.path.pop(0)  # this folder: a copy.py in it is not the library's

import os
import signal

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) == signal.default_int_handler:
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))  # while it imports: main() handles it

import ast
import contextlib
import dataclasses
import difflib
import fcntl
import importlib.util
import itertools
import locale
import re
import resource
import runpy
import shutil
import socket
import subprocess
import tempfile
import threading
import time
import traceback
import typing
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
ALLOCATORS = "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"  # settings of PyTorch's memory on GPUs
TEXT = "data/local"  # shards of text that lies on this machine, and may change
MAKERS = {"data/fineweb10B": "data/cached_fineweb10B.py", TEXT: "data/local_text.py"}  # of the presets' data
MODULES = ("attention", "cpu", "no_triton", "sample", "tail_averages", "tracer", "triton_kernels")  # of the project
IMPORTED = {*MODULES, "data", "launch", "numpy", "runtime", "sympy", "torch", "triton"}  # by every script
PARTS = {ROOT / name for name in ("bench", "data", "launch", "records", "runtime", "tests", *(f"{x}.py" for x in MODULES))}
HIDES = "{} hides the module {!r} that others import: rename it"
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
ONE_SIGNAL = 1.0  # seconds in which a signal that comes again is the same: GNU timeout's to its child, then to its group
LEAST_FILES = 64  # that a process may have open: 40 were enough for one rank on a CPU
RANK_THREADS = 8  # of a rank on a CPU, beside those that share its products: counted
TRACER_THREADS = 32  # of a rank, with --trace_steps: tracer.py
PATIENCE = 30.0  # seconds for ranks to end: they give each other 25, launch/signals.py; more while one says that it saves
# Bytes of a CPU rank beside its model's state: alone, and for each token of its longest micro-batch and dimension. Fitted to
# the demo's peaks at width 128, 645, 769, 1,518 and 2,248 MiB with 512, 2,048, 16,384 and 32,768 tokens; PyTorch 2.13. And for
# each token and entry of the vocabulary: 988, 2,681 and 7,878 MiB with 257, 8,192 and 32,768 entries, 16,384 tokens, width 64.
RANK_MEMORY, TOKEN_MEMORY, LOGIT_MEMORY = 600 << 20, 400, 13
# The same in training, with the backward pass and three predicted tokens, of 15 runs of 960 to 7,680 tokens in a micro-batch,
# width 64 to 256 and 257 to 50,257 entries, 745 to 6,119 MiB: the estimates are 0.78 to 1.16 of these.
TRAINED_TOKEN_MEMORY, TRAINED_LOGIT_MEMORY = 1200, 40
# The same without attention, where that is counted by its windows: of 13 runs with blocks of 32 to 1,024 tokens, 2 to 16 heads,
# width 64 to 256, 905 to 10,564 MiB; the estimates are 0.98 to 1.16 of these.
BESIDE_ATTENTION, TRAINED_BESIDE_ATTENTION = 140, 500
# What the first rank holds at a save beside its own, as a share of the whole state: alone, and where it gathers the others'. Of
# 10 runs with 0.4 to 2 million rows of bigrams, or 251,520 at width 768, 2,075 to 11,711 MiB; the estimates are 0.91 to 1.15
# of these.
SAVES_ALONE, SAVES = 3, 6
LIBRARIES = 1 << 30  # bytes of a rank's addresses that are in no memory, as PyTorch's files: 1.0 GiB
SIZES = "--model_dim, --bigram_rows, --vocab_size, --block_size or the batches"  # what a rank's memory goes by
UNSAVED = ", or give --save_every=0"  # where that helps
CGROUP_MEMORY = (  # where control groups are, their limit, use and, in memory.stat, cached files: version 2, then 1
    ("sys/fs/cgroup", "memory.max", "memory.current", r"^(?:in)?active_file (\d+)$"),
    ("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", r"^total_(?:in)?active_file (\d+)$"),
)
PLAIN = (bool, int, float, str)  # of settings
CHECK_ALONE = "BANKRUN_CHECK_ALONE"  # in the environment: start no rank, by records/race.py
WHEELS = "https://download.pytorch.org/whl"  # PyTorch's own index; its FlashAttention 3 is flash-attn-3, imported by this name:
FLASH_ATTENTION = "flash_attn_interface"


class LaunchError(Exception):
    """A start that cannot be: LaunchError(message, exit code)."""


class Interrupted(BaseException):
    """A signal before the ranks start: Interrupted(number)."""


def main(argv: list[str] | None = None) -> None:
    """Raises SystemExit, with the run's code, after at most one message of its own."""
    name, *given = sys.argv if argv is None else ["start.py", *argv]
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # as a parent may have blocked them
        interrupt = interrupter(heard := [])
        for number in heeded_signals():
            signal.signal(number, interrupt)
        check_standing()
        path, options = find_script(given)
        name = path.name
        sys.argv = [f"{path}", *options]  # as the script's own: its messages begin with its name
        asks_help = {"--help", "-h"} & {*options}
        asked = None if asks_help else ranks_asked()
        if 0 <= (files := resource.getrlimit(resource.RLIMIT_NOFILE)[0]) < LEAST_FILES:
            raise LaunchError(f"ulimit -n is {files}: a run may have {LEAST_FILES} files open: raise it", 1)
        check_interfaces("GLOO_SOCKET_IFNAME", gloo_has)
        if fault := of_launch("others_code")():
            raise LaunchError(fault, 1)
        importing.append(name)
        here, variables = os.getcwd(), {**os.environ}
        try:
            script = load(path)
        finally:
            importing.clear()
        moves = os.getcwd() != here  # as it is imported, in each rank too
        os.chdir(here)
        check_main(script, path)
        if asks_help:
            script.main()
            raise SystemExit(0)
        show_environment()
        ranks, options = check(script, options, asked, moves)
        for number, _ in heard[:1]:  # raised where Python discards it, as in a callback of C code
            raise Interrupted(number)
        command = [sys.executable, "-u", f"{path}", *options]
        said_by = sys.modules.get(getattr(getattr(script, "Signals", None), "__module__", ""))
        marks = hasattr(said_by, "IN_TRAINING")  # an older script's signals say nothing
        code = 0 if CHECK_ALONE in os.environ else Ranks(ranks, command, name, untouched(variables, os.environ), marks).wait()
    except LaunchError as error:
        message, code = error.args
        tell(name, f"error: {message}")
    except (ValueError, OSError) as error:
        code = 1
        if is_message(error):
            tell(name, f"error: {error}")
        else:
            console(traceback.format_exc().rstrip(), "stderr")
    except subprocess.CalledProcessError as error:  # the tool that makes the data has said why, unless it was killed
        code = max(error.returncode, 1)
        if error.returncode < 0:
            tell(name, f"error: {Path(error.cmd[-1]).name} was {killed(error.returncode)}: there are no data, nothing was trained")
    except Interrupted as caught:
        (number,) = caught.args
        code = end_early(name, number)
    raise SystemExit(code)


def end_after(main: Callable[[], None]) -> None:
    """main(), then the end of this process at once. A script that it has imported may have begun something here, as a thread that
    samples the load: only a rank ends that as the script means to. So threads are not waited for, functions of atexit, which
    might write a rank's file again, are not called, and child processes are ended."""
    code, before = 1, {*child_processes()}  # those that a shell had, before its exec
    try:
        main()
        code = 0
    except SystemExit as ended:
        if ended.code is None or isinstance(ended.code, int):
            code = ended.code or 0
        else:  # a text
            console(f"{ended.code}", "stderr")
    except BaseException as error:
        if fault := cut_package(error):
            tell(sys.argv[0], f"error: {fault}")
        else:
            console(traceback.format_exc().rstrip(), "stderr")
    finally:
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        flushing = threading.Thread(target=flush, daemon=True)  # a console that has stopped is waited for a second
        try:
            flushing.start()
            flushing.join(1)
            for pid in {*child_processes()} - before:
                with contextlib.suppress(OSError):  # it has ended
                    os.kill(pid, signal.SIGTERM)
        finally:
            os._exit(code)


def flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # full, gone, closed
            stream.flush()


def child_processes() -> list[int]:
    """Of this process, where /proc tells."""
    found = []
    for file in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            if int(file.read_bytes().rpartition(b")")[2].split()[1]) == os.getpid():
                found.append(int(file.parent.name))
    return found


def check_standing() -> None:
    """Raise LaunchError for a current folder that is gone, in which PyTorch cannot be imported, or may not be searched."""
    try:
        there = os.getcwd() and os.access(os.curdir, os.X_OK)
    except FileNotFoundError:
        there = False
    if not there:
        raise LaunchError("the current folder is gone or may not be searched: change into another", 1)


def heeded_signals() -> list[int]:
    """Those that are not ignored, as in the background of a shell, or after nohup."""
    return [number for number in SIGNALS if signal.getsignal(number) != signal.SIG_IGN]


def interrupter(heard: list[tuple[int, float]], raises: bool = True) -> Callable[[int, Any], None]:
    """A handler for all signals before the ranks start, which it adds to heard, with their times; raises: the first as
    Interrupted. What comes within a second of it, as a hang-up beside SIGTERM, is the same one; later the end is at once."""

    def interrupt(number: int, _: Any) -> None:
        heard.append((number, time.monotonic()))
        if importing:  # an exception that C code of a package meets is an ImportError, or the end of the process
            os._exit(end_early(importing[0], number))
        if raises and len(heard) == 1:
            raise Interrupted(number)
        if heard[-1][1] > heard[0][1] + ONE_SIGNAL:
            os._exit(128 + number)

    return interrupt


importing: list[str] = []  # the script's name, while it and the packages are imported: nothing has been begun then


def end_early(name: str, number: int) -> int:
    """Tell of a signal before the ranks start; the exit code."""
    tell(name, f"{signal.Signals(number).name}: ended before its ranks started")
    return 128 + number


def is_message(error: Exception) -> bool:
    """Was it raised to be read? A ValueError of Python or of a library, as for a wrong shape, is a bug, which has a place."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    path = Path(frame.filename)
    inside = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path  # which may itself lie in a folder of packages
    library = "site-packages" in inside.parts or path.is_relative_to(Path(os.__file__).parent)
    return isinstance(error, OSError) or not library and (frame.line or "").startswith("raise ")


def tell(name: str, message: str) -> None:
    """A message on stderr, led by the script's name."""
    console(f"{Path(name).name}: {message}", "stderr")


def show(message: str, since: float) -> None:
    """What has been done, and in how many seconds."""
    console(f"{message} ({time.monotonic() - since:.1f} s)")


def console(text: str, stream: str = "stdout") -> None:
    """Without control characters, as of a file's name. What a stream does not take is lost, and ends nothing; one that has
    stopped, as by Ctrl-S, is waited for a second."""
    text = "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)
    file = getattr(sys, stream) or open(os.devnull, "w")
    encoding = getattr(file, "encoding", None) or "utf-8"  # a script's own stream may have none, and no fileno()
    data, taken = f"{text}\n".encode(encoding, "replace"), []

    def put() -> None:
        with contextlib.suppress(OSError, ValueError):
            try:
                number = file.fileno()
            except (OSError, AttributeError):  # no file
                file.write(data.decode(encoding))
            else:  # not through its buffer: whoever ends the process would wait for that
                file.flush()
                os.write(number, data)
            taken.append(True)

    thread = threading.Thread(target=put, daemon=True)
    try:
        thread.start()
        thread.join(1)
    except RuntimeError:  # no thread is to be had
        put()
    if not taken:
        setattr(sys, stream, open(os.devnull, "w"))


# -----------------------------------------------------------------------------
# Before the ranks


def find_script(given: list[str]) -> tuple[Path, list[str]]:
    """The script, and the options after it: where the user stands, else in the project; if none is given, the project's own.
    Raises LaunchError."""
    named = bool(given) and given[0].endswith(".py") and not given[0].startswith("-")
    meant = "" if named or not given else given[0]
    if meant and any(os.path.isfile(folder / f"{meant}.py") for folder in (Path.cwd(), ROOT)):
        raise LaunchError(f"{meant}: a script's name ends in .py: ./run.sh {meant}.py", 2)
    if meant and any(os.path.exists(folder / meant) for folder in (Path.cwd(), ROOT)):
        raise LaunchError(f"{meant}: no script: a script's name ends in .py", 2)
    first, options = (given[0], given[1:]) if named else (f"{ROOT / 'train_gpt.py'}", given)
    other = os.environ.get("SCRIPT", "")
    if not named and other.endswith(".py") and Path(other).name != "train_gpt.py":  # the project's own would run in its place
        raise LaunchError(f"SCRIPT={other} is for ./test.sh alone: name the script first, or unset it: ./run.sh {other}", 2)
    alone = [pair for pair in itertools.pairwise(["", *options]) if "=" in pair[0] or not pair[0].startswith("-")]
    for before, late in alone:  # no value of the option before it
        if not late:
            raise LaunchError("an argument is empty: is a shell variable not set?", 2)
        if late.endswith(".py") and not late.startswith("-"):
            raise LaunchError(f"{late} comes after {before or first}: one script, before all options", 2)
    try:
        path = next((path for folder in (Path.cwd(), ROOT) if (path := folder / first).is_file()), None)
        with open(path or os.devnull, "rb"):
            pass
    except OSError as error:  # not allowed, or too long a name
        raise LaunchError(f"{error.filename}: cannot be read: {error.strerror}", 1) from None
    if path is None:
        places = " or ".join(dict.fromkeys((f"{Path.cwd()}", f"{ROOT}")))
        raise LaunchError(f"no such script: {first}, in {places}", 1)
    check_names(path)
    if os.pathsep in f"{ROOT}" and not path.resolve().is_relative_to(ROOT):  # which then comes from PYTHONPATH
        fault = f"a path with {os.pathsep!r}, as {ROOT}, cannot be in PYTHONPATH: a script elsewhere needs it there"
        raise LaunchError(fault, 1)
    return path.resolve(), options


def check_names(path: Path) -> None:
    """Raise LaunchError for a script, or what lies beside it or in the project, that is found in place of Python's own modules,
    and for a part of the project. sample.py and bench/codegen.py ask, too."""
    real = Path(os.path.realpath(path))
    if {real, real.parent} & PARTS and real.is_file() and b"\nclass Hyperparameters" not in real.read_bytes():
        raise LaunchError(f"{path} is a part of the project, and no training script: begin with a copy of train_gpt.py", 2)
    packages = (file.parent for file in path.parent.glob("*/__init__.py"))
    for file in (path, *path.parent.glob("*.py"), *packages, *ROOT.glob("*.py")):
        own = file is path and file.stem in IMPORTED or file.name in ("data.py", "launch.py", "runtime.py")
        if own or module_at(file) in sys.stdlib_module_names - {"test"}:
            raise LaunchError(HIDES.format(file, module_at(file)), 1)


def module_at(path: Path) -> str:
    """The name by which a file or a package is imported: none is that of a folder torch.bak."""
    return path.name.removesuffix(".py")


def ranks_asked() -> int | None:
    """RANKS of the environment. Raises LaunchError for what is no number of ranks."""
    text = os.environ.get("RANKS", "")
    if text and not (text.isascii() and text.isdigit() and len(text) < 10 and int(text) > 0):
        raise LaunchError(f"RANKS={text[:20]}: must be a whole number from 1 on", 2)
    return int(text) if text else None


def calls_main(source: bytes) -> bool:
    """Does a script of this text call a main() where it is run, not imported?"""
    run = (node for node in ast.parse(source).body if isinstance(node, ast.If) and "__main__" in ast.dump(node.test))
    nodes = [node for part in run for node in ast.walk(part)]
    calls = (node.func for node in nodes if isinstance(node, ast.Call))
    texts = (f"{node.value}" for node in nodes if isinstance(node, ast.Constant))  # as of cProfile.run("main()")
    named = any("main" in (getattr(function, "id", ""), getattr(function, "attr", "")) for function in calls)
    return named or any("main(" in text for text in texts)


def check_main(script: ModuleType, path: Path) -> None:
    """Raise LaunchError for a script that has taken another's main(): the log would hold that one alone."""
    sources = getattr(getattr(script, "main", None), "__globals__", {}).get("SOURCES")  # an older script has none
    if hasattr(sources, "taken_by") and sources.path != path.resolve():
        raise LaunchError(sources.taken_by(path), 1)


def check_interfaces(variable: str, has: Callable[[str, list[str]], bool], interfaces: Callable = socket.if_nameindex) -> None:
    """Raise LaunchError for names of gloo's, or patterns of NCCL's, that no network interface has."""
    there = [name for _, name in interfaces()]
    text = os.environ.get(variable, "")
    if text.strip(",") and not has(text, there):
        fault = f"{variable}={ascii(text)[1:-1][:40]}: this machine has no such network interface"
        raise LaunchError(f"{fault}, but {', '.join(there)}: unset it, or name one of them", 1)


def gloo_has(text: str, there: list[str]) -> bool:
    """All of these names are there."""
    return {*filter(None, text.split(","))} <= {*there}


def nccl_has(text: str, there: list[str]) -> bool:
    """One is there that begins as one of these texts does; = before them: that is one of them; ^: no such one."""
    names = tuple(filter(None, text.lstrip("^=").split(",")))
    exact = text.lstrip("^").startswith("=")
    return any((name in names if exact else name.startswith(names)) != text.startswith("^") for name in there)


def check_transport() -> None:
    """Raise LaunchError for a transport of gloo's that this PyTorch has not, as a cluster's module may set it."""
    from torch.distributed import ProcessGroupGloo

    name = "GLOO_DEVICE_TRANSPORT"
    if name in os.environ:
        try:
            ProcessGroupGloo.create_default_device()
        except RuntimeError as error:
            raise LaunchError(f"{name}={ascii(os.environ[name])[1:-1][:40]}: {error}: unset it, or say TCP", 1) from None


def load(path: Path) -> ModuleType:
    """The script as a module. A package that is missing or broken is one message; a bug keeps its traceback."""
    near = (folder.glob(pattern) for folder in (path.parent, ROOT) for pattern in ("*.py", "*/*.py"))
    drop_stale_caches(file for files in near for file in files)
    check_allocators()
    packages = ["numpy", "torch"] + ["triton"] * bool(importlib.util.find_spec("triton"))  # it may have no wheel: no_triton.py
    try:
        for package in packages:
            importlib.import_module(package)
    except ImportError as error:
        fault = runpy.run_path(f"{ROOT}/launch/environment.py")["broken_package"](package, error)
        raise LaunchError(fault, 1) from None
    except Exception as error:  # as of what it reads in the environment
        raise LaunchError(import_fault(error), 1) from None
    near = dict.fromkeys((path.parent, ROOT))
    packages = (file.parent for folder in near for file in folder.glob("*/__init__.py"))
    for file in (*(file for folder in near for file in folder.glob("*.py")), *packages):
        if "site-packages" in f"{getattr(sys.modules.get(module_at(file)), '__file__', None)}":  # PyTorch's, say
            raise LaunchError(HIDES.format(file, module_at(file)), 1)
    sys.path[:0] = [f"{path.parent}", f"{ROOT}"]  # as in a rank
    spec = importlib.util.spec_from_file_location("launched_script", path)
    module = sys.modules["launched_script"] = importlib.util.module_from_spec(spec)
    try:
        with modules_beside_told(path):
            spec.loader.exec_module(module)
    except LaunchError:
        raise
    except Exception as error:
        package = path.parent / f"{getattr(error, 'name', '')}".partition(".")[0]
        if isinstance(error, ModuleNotFoundError) and path.parent != ROOT and package.name in IMPORTED and package.is_dir():
            raise LaunchError(f"{error}: {HIDES.format(package, package.name)}", 1) from None
        if fault := cut_package(error):
            raise LaunchError(fault, 1) from None
        raise SystemExit(trace_of_script(error)) from None
    except SystemExit as left:  # with its own message, or without a word
        why = f"{path} ended while it was imported, with code {left.code or 0}: nothing was trained"
        raise left if isinstance(left.code, str) else LaunchError(why, 1) from None
    if not callable(getattr(module, "main", None)) or not calls_main(path.read_bytes()):
        raise LaunchError(f'{path} has no main() that it calls if __name__ == "__main__": begin with a copy of train_gpt.py', 1)
    return module


def trace_of_script(error: Exception) -> str:
    """Of a bug as it is imported: what Python says if it runs the script itself, without the frames of this file and of imports
    above the script's."""
    trace, here = error.__traceback__, trace_of_script.__code__.co_filename
    while trace and trace.tb_frame.f_code.co_filename.startswith((here, "<frozen importlib")):
        trace = trace.tb_next
    return "".join(traceback.format_exception(error.with_traceback(trace))).rstrip()


def show_environment() -> None:
    """Raises LaunchError for GPUs that PyTorch cannot use."""
    import torch

    gpus = torch.cuda.device_count()
    try:
        devices = ", ".join({torch.cuda.get_device_properties(i).name for i in range(gpus)}) if gpus else "no GPU"
    except (RuntimeError, ValueError) as error:
        raise LaunchError(f"PyTorch cannot use the GPUs{by_allocators()}: {one_line(error)}", 1) from None
    python = f"Python {sys.version.split()[0]}, PyTorch {torch.__version__}"
    show(f"environment: {sys.executable}, {python}, {f'{gpus} x ' if gpus else ''}{devices}", time.monotonic() - process_age())


@contextlib.contextmanager
def modules_beside_told(script: Path) -> Iterator[None]:
    """While a script is imported: raises LaunchError for a file beside it that is found in place of one of the project's modules,
    and lacks what others import of it, as a sample.py of the user's own; what else fails there has a note. A changed copy of one
    is an idea's right. sample.py asks, too."""
    try:
        yield
    except Exception as error:
        own = {f"{script.parent / name}.py": name for name in MODULES} if script.parent != ROOT else {}
        lacking = getattr(error, "path", None) or getattr(getattr(error, "obj", None), "__file__", None)  # of an AttributeError
        if isinstance(error, (ImportError, AttributeError)) and lacking in own:
            raise LaunchError(f"{one_line(error)}: {HIDES.format(lacking, own[lacking])}", 1) from None
        ran = [frame.filename for frame in traceback.extract_tb(error.__traceback__) if frame.filename in own]
        if ran:
            error.add_note(f"{ran[-1]} is imported in place of the project's: rename it, if that is not meant")
        raise


def cut_package(error: BaseException) -> str:
    """What launch/environment.py says of it; without memory nothing, as it could not be read."""
    return "" if isinstance(error, MemoryError) else runpy.run_path(f"{ROOT}/launch/environment.py")["cut_package"](error)


def of_launch(name: str) -> Any:
    """What launch/__init__.py defines; no import, as launch may be a folder of the script's."""
    return runpy.run_path(f"{Path(__file__).with_name('__init__.py')}")[name]


def import_fault(error: Exception) -> str:
    """What to say where PyTorch's own import fails. sample.py asks, too."""
    if isinstance(error, MemoryError):  # environment.py could not be read
        return "PyTorch cannot be imported, no memory is left: raise ulimit -v, or free some"
    return runpy.run_path(f"{ROOT}/launch/environment.py")["import_fault"](error)


def one_line(error: Exception) -> str:
    return " ".join(f"{error}".split())[:150] or repr(error)


def by_allocators() -> str:
    """The settings of PyTorch's allocators that are given: ", by …" or nothing."""
    given = [f"{name}={ascii(os.environ[name])[1:-1][:80]}" for name in ALLOCATORS if os.environ.get(name)]
    return f", by {', '.join(given)}" if given else ""


def check_allocators() -> None:
    """Raise LaunchError for a setting of PyTorch's allocators with which its library for CUDA aborts the process that loads it: an
    import cannot tell any more. Asked of another process, if there is such a setting and such a library."""
    package = importlib.util.find_spec("torch") if by_allocators() else None
    library = Path(package.origin).with_name("lib") / "libc10_cuda.so" if package and package.origin else None
    if library and library.exists():
        command = [sys.executable, "-P", "-S", "-c", "import ctypes, sys; ctypes.CDLL(sys.argv[1])", f"{library}"]
        done = subprocess.run(command, capture_output=True, text=True, errors="replace")
        if done.returncode == -signal.SIGABRT:
            why = re.search(r"what\(\):\s+(.*)", done.stderr)
            fault = f"PyTorch cannot be imported{by_allocators()}: {why[1][:150] if why else 'it aborts'}"
            raise LaunchError(f"{fault}: unset it, or write option:value,option:value", 1)


def drop_stale_caches(sources: Iterable[Path]) -> None:
    """Remove the compiled form of each source that came to its place after it had been compiled. Python looks at the size and
    the second of the last edit alone, and runs the old one where both are the same: of two archives, or after a quick edit."""
    for path in sources:
        with contextlib.suppress(OSError):  # there is none, or it is not ours to remove
            cache = importlib.util.cache_from_source(path)
            if os.stat(cache).st_mtime_ns <= os.stat(path).st_ctime_ns:
                os.unlink(cache)


def process_age() -> float:
    """Seconds since this process began, run.sh included; 0 where no /proc tells."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError):
        return 0.0


def check(script: ModuleType, options: list[str], asked: int | None, moves: bool) -> tuple[int, list[str]]:
    """The number of ranks, and their options, once one process finds nothing wrong. Makes or fetches a preset's own data, for
    minutes: a new run's after all else, a resumed run's once its checkpoint is found.

    moves: the script changes the current folder as it is imported.
    A script without settings, or older than check_start, as the demo's first record, is started unchecked.
    Raises SystemExit for options that are none; LaunchError, ValueError, OSError; CalledProcessError if there are no data.
    """
    import torch

    gpus = torch.cuda.device_count()
    if asked and gpus and asked > gpus:
        raise LaunchError(f"RANKS={asked}: this machine shows {gpus} GPUs, and a rank needs its own", 1)
    run, settings = importlib.import_module("runtime.run"), importlib.import_module("runtime.options")  # of the script's tree
    if not (hasattr(run, "check_start") and all(hasattr(script, x) for x in ("Hyperparameters", "PRESETS", "check_shards"))):
        paths = {"data": "data/fineweb10B" if gpus else TEXT, "log_dir": "logs"}
        if not is_given("data", options):
            make_data(MAKERS[paths["data"]])
        has = getattr(getattr(script, "Hyperparameters", None), "__dataclass_fields__", {}) if moves or Path.cwd() != ROOT else {}
        meant = [name for name in paths if name in has and not is_given(name, options)]
        return asked or usual_ranks(gpus, 8), options + [f"--{name}={ROOT / paths[name]}" for name in meant]
    check_settings(script.Hyperparameters, script.PRESETS)
    check_defaults(settings.check_values, script.Hyperparameters, script.PRESETS)
    try:
        s = settings.parse_options(script.Hyperparameters, script.PRESETS, "", options)
    except RuntimeError as error:  # of settings that change when they are copied
        raise LaunchError(f"{error}", 1) from None
    compiled = bool(getattr(s, "compile", False))
    compiles = compiled or gpus  # whose updates are compiled
    check_cache("TORCHINDUCTOR_CACHE_DIR", inductors_folder() if compiles else "")
    if gpus:
        check_interfaces("NCCL_SOCKET_IFNAME", nccl_has)
        if os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "yes", "on", "y"):
            raise LaunchError("TRITON_INTERPRET is set: Triton's interpreter runs kernels on a CPU alone: unset it", 1)
        check_cache("TRITON_CACHE_DIR", tritons_folder())
        if "triton" in sys.modules:
            check_compiler("CC", ["gcc", "clang"])
    else:
        check_transport()
        if compiled:
            check_compiler("CXX", ["clang++" if sys.platform == "darwin" else "g++"])
            check_compiled_paths(f"{Path(torch.__file__).parent}", inductors_folder())
    ranks = asked or usual_ranks(gpus, s.micro_batches)
    s.check(ranks)
    check_threads(ranks, torch.get_num_threads(), bool(getattr(s, "trace_steps", "")))
    if hasattr(script, "SOURCES"):
        script.SOURCES.imported()  # that a log can hold them
        drop_stale_caches(getattr(script.SOURCES, "contents", ()))
    torch.distributed.set_debug_level(torch.distributed.DebugLevel.OFF)  # here: DETAIL knows no group of one process
    own = None if is_given("data", options) else s.data
    kept = bool(s.resume) and own == TEXT and has_shards(ROOT / own)  # it goes on with those that it began with
    options = options + project_paths(s, options, moves)
    begun = time.monotonic()

    def check_shards(settings: Any) -> Any:
        nonlocal begun
        if own in MAKERS and not kept:
            begun += make_data(MAKERS[own])
        try:
            data = script.check_shards(settings)
        except ValueError as error:
            if not s.resume or not is_message(error):
                raise
            raise LaunchError(f"{error}; is it the data, and are these the options, of the run that is resumed?", 1) from None
        for gap in gaps(getattr(data, "shards", {})):  # an older script gives none
            console(gap)
        return data

    def build(settings: Any, group: Any) -> Any:
        free = free_memory()
        try:
            manager = script.build(settings, group)
        except Exception as error:  # as of an idea that takes a number out of a tensor, which on meta has none
            if group.device.type != "meta" or "meta" not in f"{error}".lower():
                raise
            manager = None
        if manager is None:
            with torch.device("cpu"):
                manager = script.build(settings, group._replace(device=torch.device("cpu")))
        check_sizes(manager, manager.layout(0), free)  # before data are made
        return manager

    def check_sizes(manager: Any, layout: dict, free: int) -> None:
        leaves = importlib.import_module("runtime.checkpoints").leaves
        parts = (layout["same"], layout["sharded"], layout["same"]["parameters"])
        same, sharded, weights = ([x.nbytes for _, x in leaves(part) if torch.is_tensor(x)] for part in parts)
        state, saved = sum(same + sharded), bool(getattr(s, "save_every", 0))
        # An update takes as much as its weights, twice.
        passes = 0 if gpus else max(passes_memory(script, s, manager.batch_tokens), 2 * max(weights, default=0))

        def needs(ranks: int) -> tuple[int, int]:
            held = RANK_MEMORY + sum(weights) + (own := sum(same) + sum(sharded) // ranks)
            whole = (SAVES if ranks > 1 else SAVES_ALONE) * state
            return held + own + passes, saved * (held + whole)  # own: the warm-up's copy

        if not gpus:
            check_memory(ranks, needs, free)
        limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
        if saved and 0 <= limit < state:
            raise LaunchError(f"ulimit -f is {limit >> 10}, a checkpoint has over {state >> 10}: raise it, or --save_every=0", 1)

    barrier = os.environ.pop("TORCH_DIST_INIT_BARRIER", None)  # here nobody else would come to it
    run.check_start(SimpleNamespace(**vars(script) | {"check_shards": check_shards, "build": build}), s, ranks)
    os.environ |= {"TORCH_DIST_INIT_BARRIER": barrier} if barrier else {}
    starting = "" if CHECK_ALONE in os.environ else f"; starting {ranks} rank{'s' * (ranks > 1)}"
    show(f"settings, data and room are checked{starting}", begun)
    bring_flash_attention()
    return ranks, options


def gaps(shards: dict[str, str]) -> Iterator[str]:
    """A line for each two shards that the run trains on between which one is not there: no fault, but seldom meant."""
    read = [name for name, text in shards.items() if "CRC-32" in text]
    numbered = [match.groups() for name in read if (match := re.fullmatch(r"(.*_train_)(\d+)\.bin", name))]
    for (prefix, before), (other, after) in itertools.pairwise(sorted(numbered, key=lambda found: (found[0], int(found[1])))):
        if prefix == other and int(after) > int(before) + 1:
            yield f"data: {prefix}{after}.bin follows {prefix}{before}.bin: what lay between is not trained on"


def check_settings(settings: type, presets: dict[str, dict]) -> None:
    """Raise LaunchError for a setting that is no bool, int, float or str: no option gives it, no checkpoint gives it back; for
    one whose values are not of its type, as of checkpoints and logs they would be; for the name of an option of our own; for a
    preset's name that no setting has; for settings that a run cannot give its id."""
    kinds = typing.get_type_hints(settings)
    for name, changes in presets.items():
        if odd := [x for x in changes if x not in kinds]:
            near = difflib.get_close_matches(f"{odd[0]}", kinds, 1)
            meant = f" (did you mean {near[0]}?)" if near else ""
            raise LaunchError(f"the preset {name!r} gives {odd[0]!r}, and no setting has that name{meant}", 1)
    if settings.__dataclass_params__.frozen or "__slots__" in vars(settings):
        raise LaunchError(f"{settings.__name__} is frozen or has slots, and a run names itself there: make it neither", 1)
    for field in dataclasses.fields(settings):
        if field.name in ("help", "preset"):
            raise LaunchError(f"the setting {field.name} has the name of an option that all scripts have: rename it", 1)
        if field.default is dataclasses.MISSING:
            raise LaunchError(f"the setting {field.name} has no default of its own: give one, as setting(1, 'meaning')", 1)
        values = [field.default, *(preset[field.name] for preset in presets.values() if field.name in preset)]
        if odd := [kind for kind in (kinds[field.name], *map(type, values)) if kind not in PLAIN]:
            name = getattr(odd[0], "__qualname__", odd[0])
            raise LaunchError(f"the setting {field.name} is or holds a {name}: must be a plain bool, int, float or str", 1)
        kind = kinds[field.name]
        if odd := [value for value in values if type(value) is not kind]:
            fault = f"the setting {field.name} is of type {kind.__name__}, and {odd[0]!r} is none"
            raise LaunchError(f"{fault}: write {odd[0]}.0" if (kind, type(odd[0])) == (float, int) else fault, 1)


def check_defaults(check_values: Callable, settings: type, presets: dict[str, dict]) -> None:
    """Raise LaunchError for a default or a preset's value that its own setting's limits refuse, as 0 does without a `least`."""
    for preset in ({}, *presets.values()):
        try:
            check_values(settings(**preset))
        except ValueError as error:
            row = "a limit from below is the least of its row, as setting(0.0, …, least=0), or least=-1 to go below 0"
            raise LaunchError(f"{error}, and what the script gives is not: change that; {row}", 1) from None


def check_compiler(name: str, usual: list[str]) -> None:
    """Raise LaunchError if neither the variable's compiler works nor, without it, one of the usual: Inductor asks for CXX on a
    CPU, Triton for CC on a GPU."""
    asked = os.environ.get(name)
    if all(failure([command, "--version"]) for command in ([asked] if asked else usual)):
        what = f"{name}={asked} is no compiler that works" if asked else f"there is no {' or '.join(usual)} on the PATH"
        way_out = ", or give --compile=false" if name == "CXX" else ""
        raise LaunchError(f"{what}, which the compiled code needs: install one, name it by {name}{way_out}", 1)


def check_compiled_paths(pytorch: str, cache: str) -> None:
    """Raise LaunchError for folders that Inductor's C++ compiler cannot be told of: its command line is one text, unquoted."""
    for path, way_out in ((pytorch, "move the environment"), (cache, "name another by TORCHINDUCTOR_CACHE_DIR")):
        if re.search(r"[\s'\"\\]", path):
            fault = f"PyTorch's compiler takes no path with a blank, a quotation mark or a backslash, as {path} has"
            raise LaunchError(f"{fault}: {way_out}, or give --compile=false", 1)


COMPILED = 64 << 20  # bytes of compiled code, of the smallest model: 55 MB


def check_cache(name: str, usual: str = "") -> None:
    """Raise LaunchError if the folder of compiled code cannot be one. usual: the one without the variable, if it is asked for."""
    given = os.environ.get(name)
    if folder := given or usual:
        try:
            os.makedirs(folder, mode=0o777 if given else 0o700, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                pass
            loads = not os.statvfs(folder).f_flag & getattr(os, "ST_NOEXEC", 0)
            used, free = any(x.is_dir() for x in os.scandir(folder)), shutil.disk_usage(folder).free
        except OSError as error:
            fault = f"no folder that can be written, {error.strerror}: name another"
            raise LaunchError(f"{name}={folder}: {fault}, or unset it" if given else f"{folder}: {fault} by {name}", 1) from None
        if not loads:
            raise LaunchError(f"{folder} is mounted noexec, and compiled code could not be loaded: name another by {name}", 1)
        if free < COMPILED and not used:  # that may hold all that is needed
            fault = f"compiled code needs {COMPILED:,} bytes or more, {free:,} are free"
            raise LaunchError(f"{folder}: {fault}: make room, or name another by {name}", 1)


def inductors_folder() -> str:
    """Where PyTorch's compiler keeps its code."""
    return os.environ.get("TORCHINDUCTOR_CACHE_DIR") or of_launch("inductors_folder")()


def tritons_folder() -> str:
    """Where Triton does, as it has it."""
    return os.path.join(os.environ.get("TRITON_HOME") or os.path.expanduser("~"), ".triton", "cache")


def usual_ranks(gpus: int, micro_batches: int) -> int:
    """One rank for each GPU, as many of 8, 4, 2, 1 as share the micro-batches evenly; two on a CPU."""
    return next(n for n in (8, 4, 2, 1) if n == 1 or n <= (gpus or 2) and micro_batches % n == 0)


def is_given(name: str, options: list[str]) -> bool:
    return any(option == f"--{name}" or option.startswith(f"--{name}=") for option in options)


def has_shards(folder: Path) -> bool:
    """Of both splits."""
    return all(any(folder.glob(f"*_{split}_*.bin")) for split in ("train", "val"))


def make_data(tool: str) -> float:
    """Run what makes a preset's data, or finds them made; the seconds it took. Raises CalledProcessError: it said why."""
    begun = time.monotonic()
    console(f"data: {tool}")
    command = [sys.executable, "-u", f"{ROOT / tool}"]
    ours = importlib.import_module("launch.console")  # of the script's tree, which may be older
    how = {"stdout": subprocess.PIPE, "text": True, "errors": "replace", "preexec_fn": getattr(ours, "end_with_parent", None)}
    hear = interrupter(late := [], raises=False)  # Python runs hooks at a fork, and discards what is raised in them
    before = {number: signal.signal(number, hear) for number in heeded_signals()}
    try:
        process = subprocess.Popen(command, **how)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    with process as making:
        try:
            for number, _ in late[:1]:
                signal.raise_signal(number)
            for line in making.stdout:
                console(line.rstrip())
        except BaseException:
            making.terminate()
            raise
    if making.returncode:
        raise subprocess.CalledProcessError(making.returncode, command)
    show("data: ready", begun)
    return time.monotonic() - begun


def project_paths(s: Any, options: list[str], moves: bool) -> list[str]:
    """Options for the paths that are not given: the project's, wherever the user stands. moves: ranks will stand elsewhere, so
    all are absolute. Changes s alike."""
    more = []
    for field in dataclasses.fields(s):
        value = getattr(s, field.name)
        if field.metadata.get("path") and value:
            project = f"{ROOT / value}" if moves or Path.cwd() != ROOT else value
            meant = value if is_given(field.name, options) else project
            meant = os.path.abspath(meant) if moves and meant != "latest" else meant
            if meant != value:
                setattr(s, field.name, meant)
                more.append(f"--{field.name}={meant}")
    return more


def bring_flash_attention() -> None:
    """FlashAttention 3 on the ranks' path, where all GPUs are Hoppers, the environment lacks it and PyTorch's index has a wheel
    for its CUDA. It goes into .flash_attention/, beside the environment. Without it a line says so, and the run goes on."""
    import torch

    capabilities = {torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())}
    if capabilities != {(9, 0)} or importlib.util.find_spec(FLASH_ATTENTION):
        return
    begun, python = time.monotonic(), "{}.{}".format(*sys.version_info)
    folder = ROOT / ".flash_attention" / f"{python}-{torch.__version__}"
    index = os.environ.get("FLASH_ATTENTION_INDEX", f"{WHEELS}/cu{(torch.version.cuda or '').replace('.', '')}")
    ranks_path = os.pathsep.join(filter(None, [f"{folder}", os.environ.get("PYTHONPATH")]))
    import_it = [sys.executable, "-P", "-c", f"import {FLASH_ATTENTION}"]
    try:
        with alone(folder.parent):
            fault = "" if folder.exists() else install_flash_attention(index, folder)
            fault = fault or failure(import_it, PYTHONPATH=ranks_path)
            if fault:
                shutil.rmtree(folder, ignore_errors=True)
    except OSError as error:
        fault = f"{error}"
    if fault:
        show(f"no FlashAttention 3, steps take some 7 % longer by calculation, attention is FlashAttention 2: {fault}", begun)
    else:
        os.environ["PYTHONPATH"] = ranks_path
        show("FlashAttention 3: ready", begun)


def install_flash_attention(index: str, folder: Path) -> str:
    """Why it cannot be had; nothing once it is in `folder`, whole: made beside it, and renamed."""
    console(f"FlashAttention 3: looking in {index}")
    making = folder.with_name(f"{folder.name}.tmp")
    shutil.rmtree(making, ignore_errors=True)  # of a start that was killed
    options = ["--quiet", "--disable-pip-version-check", "--no-input", "--no-user", "--no-deps", "--only-binary=:all:", "--retries=0"]
    install = [sys.executable, "-P", "-m", "pip", "install", *options, "--timeout=10", f"--index-url={index}", f"--target={making}"]
    if fault := failure([*install, "flash-attn-3"]):
        shutil.rmtree(making, ignore_errors=True)
    else:
        making.rename(folder)
    return fault


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Makes `folder`, and waits for another start that is in this block; a file system without locks keeps none away."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "ab") as file:
        with contextlib.suppress(OSError):
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                console("FlashAttention 3: waiting for another start, which fetches it")
                fcntl.flock(file, fcntl.LOCK_EX)
        yield


def failure(command: list[str], **environment: str) -> str:
    """The last line that a command said, if it failed; else nothing."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, env={**os.environ, **environment})
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{error}"
    said = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    return (said[-1] if said else f"exit code {done.returncode}") if done.returncode else ""


def check_threads(ranks: int, cores: int, traced: bool = False) -> None:
    """Raise LaunchError if this process may not have as many threads as ranks on a CPU will (ulimit -u, a container's limit of
    processes): without them they end in tracebacks, or wait for each other. Tried, as no limit says what is left of it."""
    need, started, ended = (RANK_THREADS + TRACER_THREADS * traced) * ranks + 2 * cores, [], threading.Event()
    try:
        for _ in range(need):
            (thread := threading.Thread(target=ended.wait, daemon=True)).start()
            started.append(thread)
    except RuntimeError:
        fault = f"{ranks} rank{'s need' if ranks > 1 else ' needs'} about {need} threads, {len(started)} can be had"
        limited = "ulimit -v, " * (resource.getrlimit(resource.RLIMIT_AS)[0] >= 0)  # a thread's stack takes addresses
        raise LaunchError(f"{fault}: raise {limited}ulimit -u or the container's limit of processes", 1) from None
    finally:
        ended.set()
        for thread in started:
            thread.join()


def passes_memory(script: Any, s: Any, batch_tokens: Callable[[int], int]) -> int:
    """Bytes that a CPU rank takes for a pass, the largest of all stages that last: an estimate."""
    width, vocab, steps = getattr(s, "model_dim", 0), getattr(s, "vocab_size", 0), s.total_iterations
    need = [(TOKEN_MEMORY * width + LOGIT_MEMORY * vocab) * getattr(s, "max_tokens", 0)]
    for step in {*range(0, steps, steps // 64 + 1), steps - 1}:
        tokens = batch_tokens(step) // s.micro_batches
        need.append((TRAINED_TOKEN_MEMORY * width + TRAINED_LOGIT_MEMORY * vocab) * tokens)
        if banded := attention_memory(script, s, step, tokens, True):
            need.append((TRAINED_BESIDE_ATTENTION * width + TRAINED_LOGIT_MEMORY * vocab) * tokens + 3 * banded // 2)
    tokens = getattr(s, "val_batch_tokens", 0) // s.micro_batches
    if banded := attention_memory(script, s, steps, tokens, False):
        need.append((BESIDE_ATTENTION * width + LOGIT_MEMORY * vocab) * tokens + banded)
    return max(need)


def attention_memory(script: Any, s: Any, step: int, tokens: int, trained: bool) -> int:
    """Bytes that a CPU's attention (attention.py) takes of a micro-batch of so many tokens, in training what all layers keep
    for their backward pass: by the script's LAYERS and step_schedule. 0 of a script without, or with an attend of its own."""
    with contextlib.suppress(Exception):
        if script.attend.__module__ != "attention":
            return 0
        now, bands, work = script.step_schedule(step, s), {}, []
        for layer in script.LAYERS:
            if layer.window:
                p, window = 1 + layer.paired, getattr(now, f"{layer.window}_window")
                bands[layer.window, p] = band = 4 * p * tokens * (min(window, p * tokens) + 32)  # in fp32
                work.append((band * s.num_heads / p, band * (3.3 + s.head_dim / 16 * (1 + trained))))
        kept, most = [kept for kept, _ in work], max(beside + kept * trained for kept, beside in work)
        return int(sum(bands.values()) + (sum(kept) if trained else max(kept)) + most)
    return 0


def check_memory(ranks: int, needs: Callable[[int], tuple[int, int]], free: int) -> None:
    """Raise LaunchError for more ranks than so many free bytes hold, or one beyond the user's limits.
    needs: of so many ranks the bytes of each, and of the first as it saves; 0: it does not."""
    each, saves = needs(ranks)
    most = max(each, saves)
    for option, limit, beside in (("v", resource.RLIMIT_AS, LIBRARIES), ("d", resource.RLIMIT_DATA, 0)):
        if 0 <= (found := resource.getrlimit(limit)[0]) < most + beside:
            fault = f"ulimit -{option} is {found >> 10}, a rank needs about {(most + beside) >> 10}"
            raise LaunchError(f"{fault}: raise it, or lower {SIZES}{UNSAVED * (each + beside <= found)}", 1)
    need, alone = (ranks - 1) * each + most, max(needs(1))
    if need > free:
        fewer = alone <= free  # so there are several
        who, advice = (f"{ranks} ranks need", "start fewer, as RANKS=1") if fewer else ("a rank needs", f"lower {SIZES}")
        gib = [f"{x / 2**30:,.1f} GiB" for x in (need if fewer else alone, free)]
        raise LaunchError(f"{who} about {gib[0]} of memory, {gib[1]} are free: {advice}{UNSAVED * (ranks * each <= free)}", 1)


def free_memory(root: Path = Path("/")) -> int:
    """Bytes that new processes can have: of the machine, or of the control groups that this one is in. No end where /proc does
    not tell."""
    machine = root / "proc/meminfo"
    found = re.search(r"MemAvailable:\s+(\d+)", machine.read_text() if machine.exists() else "")
    free = int(found[1]) << 10 if found else 1 << 62
    groups = {Path()}  # as a container shows its own
    with contextlib.suppress(OSError):  # "0::/slurm/job_7", "9:memory:/slurm/job_7"
        lines = [line.split(":", 2) for line in (root / "proc/self/cgroup").read_text().splitlines()]
        own = [Path(path.lstrip("/")) for _, kinds, path in lines if not kinds or "memory" in kinds.split(",")]
        groups |= {group for path in own for group in (path, *path.parents)}
    for place, *files, cached in CGROUP_MEMORY:
        for group in (root / place / group for group in groups):
            with contextlib.suppress(OSError, ValueError):  # another version's; "max", no limit
                limit, used = (int((group / file).read_text()) for file in files)
                stat = (group / "memory.stat").read_text() if (group / "memory.stat").exists() else ""
                given_back = sum(map(int, re.findall(cached, stat, re.MULTILINE)))  # by the kernel, to who asks for memory
                free = min(free, limit - used + given_back)
    return free


# -----------------------------------------------------------------------------
# The ranks


class Ranks:
    """The processes of a run, and the store through which they find each other: it listens on the loopback alone.

    Signals are handed on to all; a second one ends the ranks at once. When one rank fails, the others are ended.
    """

    def __init__(self, count: int, command: list[str], name: str, environ: dict[str, str], marks_itself: bool = False):
        self.marks_itself = marks_itself  # the script's main(), by its Signals
        self.name, self.received, self.heard, self.busy, self.stopped = name, [], 0.0, 0.0, False
        self.awake = 0.0  # seconds of wait, without those in which this process stood still itself, as by docker pause
        for number in heeded_signals():
            signal.signal(number, self._receive)
        signal.signal(signal.SIGURG, self._hear_busy)  # launch/signals.py's BUSY
        if signal.getsignal(signal.SIGTSTP) != signal.SIG_IGN:
            signal.signal(signal.SIGTSTP, self._stay)  # not alone, while the ranks train on
        self.swept: set[int] = set()  # sessions of ranks that were killed, whose other processes have been too
        self.store, port = loopback_store()
        self.processes: list[subprocess.Popen] = []
        marks, pipe = os.pipe()  # launch/signals.py's IN_TRAINING
        os.set_blocking(marks, False)
        self.marks = open(marks, "rb", buffering=0)  # noqa: SIM115
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # they inherit it until they handle signals:
        try:  # while they import, a Ctrl-C would be a traceback from each
            for rank in range(count):  # in a session of its own: Ctrl-C reaches this process alone, and from here each rank
                environment = {**environ, **rank_environment(rank, count, port), "BANKRUN_IN_TRAINING": f"{pipe}"}
                self.processes.append(subprocess.Popen(command, env=environment, start_new_session=True, pass_fds=[pipe]))
        except OSError:
            self._send(signal.SIGKILL)
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            os.close(pipe)

    def _receive(self, number: int, _: Any) -> None:
        soon, hang_up = time.monotonic() < self.heard + ONE_SIGNAL, signal.SIGHUP
        again = self.received and (number == hang_up or soon and {number, hang_up} & {*self.received})
        if not again:  # a terminal that closes may send several; systemd sends SIGHUP after SIGTERM
            self.received.append(number)
            self.heard = time.monotonic()

    def _hear_busy(self, *_: Any) -> None:
        self.busy = self.awake

    def _stay(self, *_: Any) -> None:
        self.stopped = True

    def wait(self, pause: float = 0.05) -> int:
        """The exit code: 0, a rank's own, 128 + a signal that was handed on, 1 for a rank that died by another."""
        told, failed, deadline, last, late = 0, None, float("inf"), time.monotonic(), 0
        while self._running():
            before, last = last, time.monotonic()
            self.awake += min(last - before, 1.0)
            if len(self.received) > told:
                number, told = self.received[told], told + 1
                self._send(number)
                deadline = min(deadline, self.awake + PATIENCE) if told == 1 else self.awake + 2
                if told == 1:
                    at_once = "ends all ranks at once"  # SIGQUIT, which they do not handle
                    soft = f"a step that has begun is finished, a start ends now; a second one {at_once}"
                    how = at_once if number == signal.SIGQUIT else soft
                    tell(self.name, f"{signal.Signals(number).name}: {how}")
            elif told > 1:  # again: a rank that has just heard the first one takes this for the same
                self._send(self.received[-1])
            if self.stopped:
                self.stopped = False
                tell(self.name, "SIGTSTP: its clock would not stop, so a run trains on; Ctrl-C ends it after its step")
            if failed is None and (failed := self._failed()) is not None:
                self._send(signal.SIGTERM)
                deadline = self.awake + PATIENCE
            busy = self.busy + PATIENCE if told == 1 and failed is None else 0.0
            left = max(deadline, busy) - self.awake
            if told < 2 and late < (later := (left < PATIENCE / 2) + (left < 0)):  # a second signal ends all without a word
                late, alive = later, (f"rank {i}" for i, process in enumerate(self.processes) if process.poll() is None)
                how = "is killed, as it has not ended" if late == 2 else f"is waited for, and killed in {left:.0f} s unless it saves"
                if which := ", ".join(alive):
                    tell(self.name, f"{which} {how}")
            if left < 0:
                self._send(signal.SIGKILL)
            time.sleep(pause)
        failed = self._failed() if failed is None else failed
        return self._good_code() if failed is None else self._code(*failed)

    def _running(self) -> bool:
        """Is any? What one that was killed has started, as workers of an idea, which could not end it itself, is killed too."""
        codes = {process: process.poll() for process in self.processes}
        for process, code in codes.items():
            if process.pid not in self.swept and (code or 0) < 0:
                self.swept.add(process.pid)
                with contextlib.suppress(OSError):  # there is none
                    os.killpg(process.pid, signal.SIGKILL)
        return None in codes.values()

    def _failed(self) -> tuple[int, int] | None:
        """(rank, exit code) of one that has failed, killed ones first."""
        codes = ((rank, process.poll()) for rank, process in enumerate(self.processes))
        return min(((rank, code) for rank, code in codes if code), key=lambda found: found[1] > 0, default=None)

    def _send(self, number: int) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM if number == signal.SIGINT and blocks_sigint(process.pid) else number)

    def _good_code(self) -> int:
        """0, unless a rank has left in the midst of its training."""
        marks = self.marks.read(1 << 16) or b""
        if marks.count(b"+") > marks.count(b"-"):
            tell(self.name, "error: a rank has ended with code 0, as by os._exit(0), before its training has: its log is cut off")
            return 1
        if b"0" in marks or self.marks_itself and b"+" not in marks:
            tell(self.name, "error: main() has ended, and nothing was trained: there is no log")
            return 1
        return 0

    def _code(self, rank: int, code: int) -> int:
        if self.received:
            return 128 + self.received[0]
        if -code in heeded_signals():  # before it could heed them itself
            code = 128 - code
        if code < 0:
            tell(self.name, f"error: rank {rank} was {killed(code)}: the run has ended")
            return 1
        if code > 128:
            known = code - 128 in {*signal.Signals}
            by = f"ended by {signal.Signals(code - 128).name}, sent to a rank" if known else f"error: rank {rank} ended with code {code}"
            tell(self.name, by)
        return code


def killed(code: int) -> str:
    """By which signal a process ended, from its negative return code."""
    cached = inductors_folder()
    cut = f" (a shard was cut short{f', or compiled code: remove {cached}' if os.path.isdir(cached) else ''}?)"
    kernels, torch = os.environ.get("TRITON_CACHE_DIR") or tritons_folder(), sys.modules.get("torch")
    damaged = f" (damaged code in {kernels}: remove it?)" if torch and torch.cuda.device_count() and os.path.isdir(kernels) else ""
    why = {signal.SIGKILL: " (out of memory, or at a limit of time?)", signal.SIGBUS: cut, signal.SIGSEGV: damaged}
    return f"killed by {signal.Signals(-code).name if -code in {*signal.Signals} else f'signal {-code}'}{why.get(-code, '')}"


def blocks_sigint(pid: int) -> bool:
    """A rank that does not handle signals yet, or never will."""
    with contextlib.suppress(OSError):  # it has ended
        found = re.search(r"^SigBlk:\s*(\w+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
        return bool(int(found[1], 16) >> (signal.SIGINT - 1) & 1)
    return False


def loopback_store() -> tuple[Any, int]:
    """The ranks' TCPStore in this process, and its port. PyTorch's own way listens on all interfaces."""
    import torch.distributed as dist

    try:  # c10d would try for 5 minutes, deaf to signals
        with socket.create_server(("127.0.0.1", 0)) as probe, socket.create_connection(probe.getsockname(), timeout=5):
            pass
    except OSError as error:
        fault = f"127.0.0.1 cannot be reached, over which the ranks find each other: {error.strerror or error}"
        raise LaunchError(f"{fault}: is the loopback up (ip link set lo up)?", 1) from None
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        port = listening.getsockname()[1]
        return dist.TCPStore(
            "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach()
        ), port  # fmt: skip


def rank_environment(rank: int, count: int, port: int, interfaces: Callable = socket.if_nameindex) -> dict[str, str]:
    """What torchrun would set, for ranks of one machine; what their user has set stays."""
    # The script divides the cores itself. A set's order of strings is the same on all ranks, and in a run that goes on.
    same = {"OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
    if "lo" in {name for _, name in interfaces()}:  # gloo and NCCL listen there too
        same |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    chosen = {name: os.environ.get(name, value) for name, value in same.items()}
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": True}
    ours = {"TORCHELASTIC_RUN_ID": uuid.uuid4().hex, "BANKRUN_LAUNCHER": os.getpid()}
    ours |= {"PYTHONINSPECT": ""}  # which would end it in a prompt
    if locale.getpreferredencoding(False).lower() not in ("utf-8", "utf8"):  # by it PyTorch's compiler reads files of its own
        kept = os.environ.get("PYTHONIOENCODING") or getattr(sys.stdout, "encoding", None) or "utf-8"
        ours |= {"PYTHONUTF8": "1", "PYTHONIOENCODING": kept}
    return chosen | {name: f"{value}" for name, value in {**ranks, **place, **ours}.items()} | import_environment()


def untouched(before: Mapping[str, str], now: Mapping[str, str]) -> dict[str, str]:
    """The variables as before the script was imported here, as each rank imports it again: one that it takes out, or adds to,
    would be another there. OpenMP's as they are now, by launch/__init__.py, which a script may import after PyTorch."""
    openmp = {name: value for name, value in now.items() if name.startswith("OMP_")}
    return {name: value for name, value in before.items() if not name.startswith("OMP_")} | openmp


def import_environment() -> dict[str, str]:
    """With which a script finds what lies beside it, which PYTHONSAFEPATH keeps it from, and, from elsewhere, the project."""
    return {"PYTHONPATH": os.pathsep.join(filter(None, [f"{ROOT}", os.environ.get("PYTHONPATH")])), "PYTHONSAFEPATH": ""}


if __name__ == "__main__":
    end_after(main)

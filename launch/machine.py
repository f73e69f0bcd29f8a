"""What this machine, its software and its environment are."""

import ctypes
import dataclasses
import gc
import math
import os
import platform
import random
import re
import resource
import shutil
import socket
import sys
import tempfile
import threading
import time
import traceback
import zlib
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist

from launch import GIVEN, OF_VARIABLES, others_code, threads_at_most
from launch.console import RunError, Stopped, encoded
from launch.signals import LOST, let_the_first_tell, lost_another

# What Python, PyTorch and their libraries read of the environment and compute otherwise, or slower, by; threads are told with
# the CPU. Not torchrun's own variables, nor what launch/ sets.
VARIABLES = re.compile(
    r"(TORCH(?!ELASTIC)|PYTORCH_|NVIDIA_TF32_|CUBLAS|CUDNN|NCCL_|GLOO_|TRITON_|MKL_|ONEDNN_|DNNL_|OPENBLAS_|ATEN_|KMP_)\w+"
    r"|GOMP_\w+|OMP_(?!NUM_THREADS$)\w+|CUDA_(LAUNCH_BLOCKING|DEVICE_MAX_CONNECTIONS|MODULE_LOADING)"
    r"|PYTHON(HASHSEED|MALLOC|DEVMODE|TRACEMALLOC|OPTIMIZE|_GIL|_JIT)|(MALLOC|GLIBC)_\w+|LD_PRELOAD"
)
# What a source itself reads, but for what launchers set and what is nobody's to know.
READ = re.compile(
    r"""(?:\benviron(?:\.\w+\(|\[)|\bgetenv\()\s*(?:key\s*=\s*)?["'](\w+)["']"""
    r"""|["'](\w+)["']\s+(?:not\s+)?in\s+(?:os\.)?environ\b"""
)
IN_QUOTES = re.compile(r"""["']([A-Z][A-Z_\d]+)["']""")  # so may a script's own, by whatever name os.environ has there
NUMBER = re.compile(r"[-+.\de]{1,8}")
LAUNCHERS = re.compile(r"(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)S?|MASTER_\w+|TORCHELASTIC_\w+|BANKRUN_\w+|OMP_NUM_THREADS")
KEYS = ("KEY", "TOKEN")  # a number is none, but in a name that ends so
PARTS = (*KEYS, "SECRET", "PASS", "AUTH", "CREDENTIAL")  # of a secret's name, whose value is no number
WORDS = re.compile(r"(?:^|_)(?:SECRETS?|PASS(?:WORD|WD|PHRASE|CODE)?|PWD|PAT|AUTH|CREDENTIALS?|JWT|COOKIES?|SESSION|CERT)(?:_|$)")
SECRET = re.compile(r"(?<![A-Za-z\d])(?:gh[a-z]_|github_pat_|glpat-|hf_|sk-|xox\w-|AKIA|eyJ)(?=[\w.-]*\d)[\w.-]{8,}")  # a value
OF_THE_PROJECT = {"attention.py", "cpu.py", "no_triton.py", "sample.py", "tail_averages.py", "tracer.py", "triton_kernels.py"}
COMMON = {  # what all ranks hold alike, and how to keep it so
    "weights": "the rule of a replicated parameter must do the same on each, with no random numbers",
    "tensors": "a checkpoint would give all of them the first one's: all_reduce what goes into them",
}
NO_MEMORY = re.compile(r"out of memory|Failed to CUDA \w*alloc|CUBLAS_STATUS_ALLOC_FAILED|DefaultCPUAllocator: can't allocate")
NO_ROOM = re.compile(r"No space left on device|Disk quota exceeded")
ASKED = re.compile(r"(?:ried|nable) to allocate (?:([\d.]+ [KMGTPE]iB)|(\d+) bytes)")
CGROUP_TIME = (  # where control groups are, with their microseconds of all cores in a period, and it: version 2, then 1
    ("sys/fs/cgroup", "cpu.max"),
    ("sys/fs/cgroup/cpu", "cpu.cfs_quota_us", "cpu.cfs_period_us"),
)
OURS = {"OMP_WAIT_POLICY": "passive", "PYTHONHASHSEED": "0", "GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}


def settings_text(settings: Any) -> str:
    """A dataclass as Python would show it, which log's readers go by, whatever an idea's own class says."""
    fields = (f"{field.name}={getattr(settings, field.name)!r}" for field in dataclasses.fields(settings))
    return f"{type(settings).__name__}({', '.join(fields)})"


def machine_facts(device: torch.device, world_size: int, sources: dict[str, str] = {}, files: dict[str, str] = {}) -> list[str]:
    """Versions, devices and variables, a line each; of the sources, texts by name, what they read themselves, and of the files
    that they have read the checksums, by name."""
    cpus, triton = Path("/proc/cpuinfo"), sys.modules.get("triton")
    name = re.search(r"^model name\s*: (.+)", cpus.read_text() if cpus.exists() else "", re.MULTILINE)
    cpu = name[1] if name else platform.processor() or "unknown"
    host = f"host: {zlib.crc32(encoded(platform.node())):08x}, a CRC-32 of its name"  # GPUs have ids
    cores = f"{os.cpu_count()}" if (own := allowed_cores()) == os.cpu_count() else f"{own:g} of {os.cpu_count()}"
    devices = [host, f"cpu: {cpu}, {cores} cores, {torch.get_num_threads()} threads a rank"]
    if device.type == "cuda":
        devices = [f"{i}: {torch.cuda.get_device_properties(i)}" for i in range(torch.cuda.device_count())]
    versions = f"PyTorch {torch.__version__}, CUDA {torch.version.cuda}, Triton {triton.__version__ if triton else 'none'}"
    given = {name: value for name, value in sorted(os.environ.items()) if VARIABLES.fullmatch(name) and value != OURS.get(name)}
    given |= {"LD_PRELOAD": re.sub(r"[^\s:]*/", "", given["LD_PRELOAD"])} if "LD_PRELOAD" in given else {}
    names = {name for text in sources.values() for found in READ.findall(text) for name in found}
    beside = {os.path.dirname(name) for name in [*sources][:1]}  # the script, which is the first
    texts = (text for file, text in sources.items() if os.path.dirname(file) in beside and file not in OF_THE_PROJECT)
    names |= {name for text in texts for name in IN_QUOTES.findall(text)}
    environ = {**GIVEN, **os.environ}  # a script may take out what it reads
    read = sorted((name, environ[name]) for name in names & environ.keys() - given.keys())
    own = {name: value for name, value in read if value != OURS.get(name) and is_logged(name, value)} | files
    told = {  # without paths
        kind: ", ".join(f"{name}={value!a}" for name, value in found.items() if "/" not in value)
        for kind, found in zip(OF_VARIABLES, (given, own))
    }
    variables = [f"{kind}: {text}" for kind, text in told.items() if text]
    return [f"Python {sys.version}", versions, f"{platform.platform()}, {world_size} ranks", *devices, *variables]


def is_logged(name: str, value: str) -> bool:  # none that launchers set, and no secret
    upper, number = name.upper(), NUMBER.fullmatch(value)
    named = upper.endswith(KEYS) if number else any(part in upper for part in PARTS)
    return not (LAUNCHERS.fullmatch(name) or named or WORDS.search(upper) or SECRET.search(value))


def allowed_cores(root: Path = Path("/")) -> float:
    """Those that this process may use, as taskset or a container says, where the system tells. 1.5, with docker's --cpus=1.5:
    the time of so many, on whichever."""
    least = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    groups = {Path()}  # as a container shows its own
    with suppress(OSError, ValueError):  # "0::/slurm/job_7", "5:cpu,cpuacct:/slurm/job_7"
        lines = [line.split(":", 2) for line in (root / "proc/self/cgroup").read_text().splitlines()]
        own = [Path(path.lstrip("/")) for _, kinds, path in lines if not kinds or "cpu" in kinds.split(",")]
        groups |= {group for path in own for group in (path, *path.parents)}
    for place, *files in CGROUP_TIME:
        for group in (root / place / group for group in groups):
            with suppress(OSError, ValueError, ZeroDivisionError):  # another version's; "max", no limit
                time, period = map(int, " ".join((group / file).read_text() for file in files).split())
                least = min(least, time / period) if time > 0 else least  # -1: no limit
    return least


def usable_cores() -> int:
    """The same in whole cores; no more than OpenMP may have threads, or products would be wrong."""
    cores = math.ceil(allowed_cores())
    return min(cores, threads_at_most() or cores)


def seed_random(*numbers: int) -> None:
    """Begin this process's random numbers anew, PyTorch's, Python's and NumPy's: each of these numbers makes others."""
    seed = hash(numbers)
    torch.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed % 2**32)


def checksum(octets: bytes | numpy.ndarray) -> str:
    return f"CRC-32 {zlib.crc32(octets):08x}"


def checksums(kind: str, tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    """By "kind of name", a CRC-32 of each tensor's bytes: 0.5 s for 1 GiB."""
    octets = {name: x.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy() for name, x in tensors.items()}
    return {f"{kind} of {name}": checksum(x) for name, x in octets.items()}


def check_buffers(first: dict[str, str], tensors: dict[str, torch.Tensor]) -> None:
    """Raise ValueError, naming them, for a model's buffers that its passes have changed, and its restored state has not changed
    back. first: their checksums."""
    now = checksums("the first buffers", tensors)
    if changed := ", ".join(x.partition(" of ")[2] for x in now if now[x] != first.get(x)):
        fault = f"passes or updates change {changed}: neither a checkpoint nor another rank knows of a buffer"
        raise ValueError(f"{fault}: make it a parameter, with a rule of its own")


def check_common(ranks: Any, caution: Callable, kind: str, tensors: dict[str, torch.Tensor], when: str = "at a save") -> None:
    """Called by all ranks. Raises AgreedError, naming them, for tensors that are not the same on all; on GPUs, whose kernels may
    round otherwise, calls caution with the words. kind: one of COMMON."""
    each = ranks.gather(checksums(kind, tensors) if ranks.world_size > 1 else {})
    names = dict.fromkeys(name for rank in each for name in rank)
    other = [x.partition(" of ")[2] for x in names if len({rank.get(x) for rank in each}) > 1]
    more = f" and {len(other) - 3} more" if len(other) > 3 else ""
    fault = f"the {kind} of {', '.join(other[:3])}{more} are not the same on all ranks {when}: {COMMON[kind]}"
    ranks.raise_together(RunError(fault) if other and ranks.device.type != "cuda" else None)
    if other:
        caution(f"caution: {fault}")


def peak_memory(device: torch.device) -> str:
    if device.type == "cuda":
        allocated, reserved = (f(device) >> 20 for f in (torch.cuda.max_memory_allocated, torch.cuda.max_memory_reserved))
        return f"peak memory allocated: {allocated} MiB reserved: {reserved} MiB"
    kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with suppress(OSError, TypeError):  # on Linux that may be the peak of who started this process
        kib = int(re.search(r"^VmHWM:\s*(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)[1])
    return f"peak memory resident: {kib >> 10} MiB"


def end_of_run(run: Any, kind: type | None, error: BaseException | None) -> BaseException | None:
    """What a Run ends by: the error, a RunError for a lack of memory or room, or for a loop that was left. Its log, if it has a line
    of a step, tells of it in its last one. kind: the error's class; Stopped, without an error, in the thread of a signal."""
    end = error
    try:
        refuse_lack_of_memory(error, run.ranks)
        refuse_lack_of_room(error, run.ranks)
        if kind in (None, SystemExit) and run.signals.in_training:
            let_the_first_tell(run.ranks.rank, 5)
            how = f"rank {run.ranks.rank}'s train() has ended{f' by sys.exit({error.code!r})' if error else ''}"
            raise RunError(f"{how} without run.finish(): the log lacks its last line")
    except RunError as fault:
        end = fault
    told = not isinstance(end, Exception) or isinstance(end, Stopped) or not run.signals.in_training
    log = None if told else run.log
    if log and log.place and log.lines and not log.file.closed:
        name = "" if isinstance(end, RunError) else f"{type(end).__name__}: "
        said = f"{LOST}: the console has why" if lost_another(end) else f"{name}{end}"
        log.write(f"error: {said}".partition("\n")[0].rstrip(": "), console=False)
    return end


def refuse_lack_of_memory(error: BaseException | None, ranks: Any) -> None:
    """Raise RunError for an error by which a rank's memory is too small: who holds it, and where the script asked for more."""
    if not is_lack_of_memory(error):
        return
    held, advice = "", "more --micro_batches, or fewer RANKS, need less (docs/memory.md)"
    if ranks.device.type == "cuda":
        held, advice = held_of_gpu(ranks.device), "nvidia-smi shows whose, more --micro_batches need less (docs/memory.md)"
    folders = {Path(__file__).parent.parent, Path(getattr(sys.modules["__main__"], "__file__", None) or ".").resolve().parent}
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename).parent in folders]
    asked = ASKED.search(f"{error}")
    more = f"{asked[1] or f'{int(asked[2]) / 2**30:.1f} GiB'} more are asked for" if asked else "it ran out"
    place = "".join(f"{more} in {x.name}, {Path(x.filename).name}:{x.lineno}" for x in frames[-1:])
    raise RunError(f"rank {ranks.rank} is out of memory: {'; '.join(filter(None, [held, place, advice]))}") from error


def is_lack_of_memory(error: BaseException | None) -> bool:
    """By its type or its words; no message of ours, which has its own advice, as of a model that is too large."""
    if isinstance(error, RunError):
        return False
    told = isinstance(error, RuntimeError) and NO_MEMORY.search(f"{error}")
    return bool(told) or isinstance(error, MemoryError | torch.OutOfMemoryError)


def refuse_lack_of_room(error: BaseException | None, ranks: Any) -> None:
    """Raise RunError for an error by which compiled code has no room on a disk. Another one of PyTorch's compiler gets a note: what
    a power cut has left of compiled code may be none."""
    inductor, frames = sys.modules.get("torch._inductor.codecache"), traceback.extract_tb(error and error.__traceback__)
    if not any(re.search(r"/(_inductor|triton)/", frame.filename) for frame in frames):
        return
    folders = [inductor.cache_dir()] if inductor else []
    if ranks.device.type == "cuda":
        folders += [os.environ.get("TRITON_CACHE_DIR") or os.path.join(os.environ.get("TRITON_HOME") or os.path.expanduser("~"), ".triton/cache")]
    if NO_ROOM.search(f"{error}"):
        free = [f"{shutil.disk_usage(x).free:,} bytes in {x}" for x in (*folders, tempfile.gettempdir()) if os.path.isdir(x)]
        advice = "make room, or name other folders by TORCHINDUCTOR_CACHE_DIR, TRITON_CACHE_DIR and TMPDIR"
        raise RunError(f"rank {ranks.rank} has no room for compiled code, free are {', '.join(free)}: {advice}") from error
    if type(error).__module__.startswith(("torch._inductor", "torch._dynamo")):
        error.add_note(f"If the script is right, compiled code in {' or '.join(folders)} may be damaged: remove it and start again.")


def held_of_gpu(device: torch.device) -> str:
    try:
        free, total = torch.cuda.mem_get_info(device)
    except RuntimeError:  # a GPU without room for a context
        return f"GPU {device.index} has no room for it at all"
    own = torch.cuda.memory_reserved(device)
    whole, mine, rest = (f"{x / 2**30:.1f}" for x in (total, own, total - free - own))
    return f"of GPU {device.index}'s {whole} GiB it holds {mine}, all else {rest}"


NAME_TIMEOUT = 10.0  # seconds, for the first rank's name to be known, as where its machine starts with the others
STORE_SLACK = 5.0  # seconds, for what PyTorch says itself


def find_store(seconds: float) -> Any:
    """The ranks' store at MASTER_ADDR and MASTER_PORT. Raises RuntimeError or ValueError if it does not answer in time: PyTorch tries
    twice to reach one, waits for an answer without end, and finds both out among lines of its own."""
    address, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    lack = tried_for(lambda: socket.getaddrinfo(address, None), min(NAME_TIMEOUT, seconds))
    if not lack and re.fullmatch(r"[0-9]{1,5}", port) and int(port) < 65536 and not makes_store():
        lack = tried_for(lambda: socket.create_connection((address, int(port)), timeout=seconds).close(), seconds)
    if lack:
        raise RuntimeError(lack.strerror or f"{lack}") from lack
    found: list = []

    def meet() -> None:
        try:
            found.append(next(dist.rendezvous("env://", timeout=timedelta(seconds=seconds)))[0])
        except Exception as error:
            found.append(error)

    meeting = threading.Thread(target=meet, name="store", daemon=True)  # it ends with the process, whatever it waits for
    meeting.start()
    meeting.join(seconds + STORE_SLACK)
    if not found:
        raise RuntimeError("what listens there does not answer as a store of ranks does")
    if isinstance(found[0], Exception):
        raise found[0]
    return found[0]


def makes_store() -> bool:
    """Does this rank make the store, not a launcher?"""
    return os.environ["RANK"] == "0" and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"


def tried_for(function: Callable[[], Any], seconds: float) -> OSError | None:
    """What a function that is called again and again still raises after so many seconds."""
    begun = time.monotonic()
    while True:
        try:
            function()
            return None
        except OSError as error:
            if time.monotonic() - begun > seconds:
                return error
        time.sleep(0.1)


def cannot_join(error: Exception, ranks: Any) -> RunError:
    """What to raise for an error by which a rank finds no GPU to work on, or not the others."""
    if ranks.device.type == "cuda":  # the group in its frames is never freed: half made, it would warn that nobody destroyed it
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(error))
    refuse_lack_of_memory(error, ranks)
    why, *more = [line for line in f"{error}".splitlines() if line] or [repr(error)]
    if isinstance(error, torch.AcceleratorError):
        return RunError(f"rank {ranks.rank}: GPU {ranks.device.index} cannot be used, nvidia-smi may say more: {why}")
    place = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    advice = "are all of them started, once each, and is the port free?"
    why = ": ".join([why, *more[-1:]]) if "NCCL" in why else why
    return RunError(f"rank {ranks.rank} of {ranks.world_size} cannot join the others at {place}, {advice} {why}")


def forget_earlier_run(device: torch.device) -> None:
    """Of this process: its model, which is garbage by now, and its peak of memory."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    with suppress(OSError):  # not Linux, or not allowed
        Path("/proc/self/clear_refs").write_text("5")


def check_compiled_code() -> None:
    """Raise RunError for a folder of compiled code in which others may write. The launcher has looked before its ranks start."""
    if "BANKRUN_LAUNCHER" not in os.environ and (fault := others_code(make=True)):
        raise RunError(fault)


def is_launched() -> bool:
    """Is this process a rank that a launcher has started? Raises RunError for a half of what torchrun sets."""
    launched = "RANK" in os.environ or "WORLD_SIZE" in os.environ
    missing = ", ".join(sorted({"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} - os.environ.keys()))
    if launched and missing:
        raise RunError(f"{missing} missing in the environment, which has RANK or WORLD_SIZE: start with torchrun, or unset all")
    return launched


def environment_number(name: str, default: int, least: int = 0) -> int:
    """A number of torchrun's environment. Raises RunError if it is none, or too small."""
    text = os.environ.get(name, f"{default}")[:20]  # Python reads no number of thousands of digits
    if not (text.isascii() and text.isdigit() and len(text) < 10) or int(text) < least:
        raise RunError(f"{name}={text!r} in the environment: must be a number from {least} on: start with torchrun or unset it")
    return int(text)

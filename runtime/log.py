"""The log of a run: its sources, its environment, and its lines."""

import os
import platform
import re
import resource
import sys
import zlib
from pathlib import Path
from typing import Any

import torch

from data.shards import replace_file
from runtime.sources import RULE, as_text, printable

# Variables that change what Python, PyTorch and their libraries compute, or how fast.
VARIABLES = re.compile(
    r"(TORCH(?!ELASTIC)|PYTORCH_|NVIDIA_TF32_|CUBLAS|CUDNN|NCCL_|GLOO_|TRITON_|MKL_|ONEDNN_)\w+"
    r"|(KMP|OMP|GOMP|OPENBLAS|MALLOC)_\w+|CUDA_(LAUNCH_BLOCKING|DEVICE_MAX_CONNECTIONS)"
)
SET_BY_US = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}


def machine_facts(device: torch.device, world_size: int) -> list[str]:
    """Versions, devices and variables, a line each."""
    triton_version = getattr(sys.modules.get("triton"), "__version__", "none")
    facts = [
        f"Python {sys.version}",
        f"PyTorch {torch.__version__}, CUDA {torch.version.cuda}, Triton {triton_version}",
        f"{platform.platform()}, {world_size} ranks",
    ]
    if device.type == "cuda":
        for i in range(torch.cuda.device_count()):
            facts.append(f"{i}: {torch.cuda.get_device_properties(i)}")
    else:
        host = zlib.crc32(platform.node().encode())  # times of two machines are not comparable
        facts.append(f"host: {host:08x}, a CRC-32 of its name")
        threads = torch.get_num_threads()
        facts.append(f"cpu: {cpu_name()}, {os.cpu_count()} cores, {threads} threads a rank")
    given = {
        name: value
        for name, value in sorted(os.environ.items())
        if VARIABLES.fullmatch(name) and "/" not in value and value != SET_BY_US.get(name)
    }
    if given:
        facts.append("variables: " + ", ".join(f"{x}={value!a}" for x, value in given.items()))
    return facts


def cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    text = info.read_text() if info.exists() else ""
    name = re.search(r"^model name\s*: (.+)", text, re.MULTILINE)
    return name[1] if name else platform.processor() or "unknown"


def peak_memory(device: torch.device) -> tuple[int, str]:
    """Of this rank: MiB, and in words."""
    if device.type == "cuda":
        allocated = torch.cuda.max_memory_allocated(device) >> 20
        reserved = torch.cuda.max_memory_reserved(device) >> 20
        return allocated, f"peak memory allocated: {allocated} MiB reserved: {reserved} MiB"
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    return resident, f"peak memory resident: {resident} MiB"


def figures_text(figures: dict[str, float]) -> str:
    """The end of a complete log, for programs: a line ---, then a number a line. Readers take what
    follows the last such line, as a sample may hold one."""
    digits = {"val_loss": 6, "val_bpb": 6, "peak_memory_MiB": 0, "tokens_per_second": 0, "steps": 0}
    lines = [f"{name}: {x:.{digits.get(name, 3)}f}" for name, x in figures.items()]
    return "\n".join(["---", *lines])


def log_header(sources: dict[str, str], environment: list[str]) -> str:
    """The sources, exactly, then the environment; each part ends in a rule."""
    return "\n".join([as_text(sources), RULE, *environment, RULE])


class Log:
    """A file on rank 0, nothing on other ranks. The console sees its lines too. Those that a full disk
    does not take stay in memory until the next write; the run goes on."""

    def __init__(self, path: Path, first: bool, header: str = "", lines: str = ""):
        """header: see log_header. lines: of a resumed run, before its checkpoint. A file that is
        there is replaced, all or nothing. Raises OSError."""
        self.path = path
        self.quiet = not first
        self.live = first and sys.stdout is not None and sys.stdout.isatty()
        self.header = header
        self.lines = lines
        self.unwritten = b""
        if self.quiet:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        with replace_file(path) as file:
            file.write(f"{header}\n{lines}".encode())
        self.file = open(path, "ab", buffering=0)

    def write(self, text: str, console: bool = True) -> None:
        """Add lines to the log."""
        if self.quiet:
            return
        if console:
            self.show(text)
        # A NUL byte, as a young model may write it, would make the log a binary file.
        text = text.replace("\0", "\\x00") + "\n"
        self.lines += text
        self.unwritten += text.encode(errors="replace")
        self._flush()

    def write_step(self, line: str, live: str) -> None:
        """Add a step's line. A terminal shows `live` instead, over the one before."""
        self.write(line, console=not self.live)
        if self.live:
            self._print(f"\r\x1b[K{live}", end="")

    def show(self, text: str) -> None:
        """Print to the console alone."""
        if not self.quiet:
            self._print(("\r\x1b[K" if self.live else "") + printable(text))

    def _flush(self) -> None:
        try:
            while self.unwritten:
                written = self.file.write(self.unwritten)
                self.unwritten = self.unwritten[written:]
        except OSError as error:
            self.show(f"{self.path}: {error.strerror}: lines are kept until there is disk space")

    def _print(self, text: str, end: str = "\n") -> None:
        try:
            print(text, end=end, flush=True)
        except (OSError, ValueError):  # a console that is closed or full ends nothing
            sys.stdout = open(os.devnull, "w")
            self.live = False

    def close(self) -> None:
        """Write what is left. Raises OSError if lines are lost."""
        if self.quiet:
            return
        self._flush()
        self.file.close()
        self.quiet = True
        if self.unwritten:
            raise OSError(f"{self.path} lacks its last {len(self.unwritten)} bytes")


def settings_text(settings: Any) -> str:
    """The settings as one line, which records/ parses."""
    fields = ", ".join(f"{name}={value!r}" for name, value in vars(settings).items())
    return f"{type(settings).__name__}({fields})"

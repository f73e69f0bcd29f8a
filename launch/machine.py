"""What this machine, its software and its environment are."""

import os
import platform
import random
import re
import resource
import sys
import zlib
from pathlib import Path

import numpy
import torch

from launch.console import RunError, encoded

# What PyTorch and its libraries read of the environment and compute otherwise by; threads are told with the CPU.
VARIABLES = re.compile(
    r"(TORCH(INDUCTOR|DYNAMO|_COMPILE|_ALLOW_TF32|_NCCL)|PYTORCH|NVIDIA_TF32|CUBLAS|NCCL|TRITON|MKL|ONEDNN|DNNL|ATEN)_\w+"
    r"|CUDA_(LAUNCH_BLOCKING|DEVICE_MAX_CONNECTIONS)"
)


def machine_facts(device: torch.device, world_size: int) -> list[str]:
    """Versions and devices, a line each."""
    cpus, triton = Path("/proc/cpuinfo"), sys.modules.get("triton")
    name = re.search(r"^model name\s*: (.+)", cpus.read_text() if cpus.exists() else "", re.MULTILINE)
    cpu = name[1] if name else platform.processor() or "unknown"
    host = f"host: {zlib.crc32(encoded(platform.node())):08x}, a CRC-32 of its name"  # GPUs have ids
    devices = [host, f"cpu: {cpu}, {os.cpu_count()} cores, {torch.get_num_threads()} threads a rank"]
    if device.type == "cuda":
        devices = [f"{i}: {torch.cuda.get_device_properties(i)}" for i in range(torch.cuda.device_count())]
    versions = f"PyTorch {torch.__version__}, CUDA {torch.version.cuda}, Triton {triton.__version__ if triton else 'none'}"
    set_here = {name: value for name, value in sorted(os.environ.items()) if VARIABLES.fullmatch(name) and "/" not in value}
    variables = ["variables: " + ", ".join(f"{name}={value!a}" for name, value in set_here.items())] if set_here else []
    return [f"Python {sys.version}", versions, f"{platform.platform()}, {world_size} ranks", *devices, *variables]


def usable_cores() -> int:
    """Those that this process may use, where the system says."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def seed_random(*numbers: int) -> None:
    """Begin this process's random numbers anew, PyTorch's, Python's and NumPy's: each of these numbers makes others."""
    seed = hash(numbers)
    torch.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed % 2**32)


def peak_memory(device: torch.device) -> str:
    if device.type == "cuda":
        allocated, reserved = (f(device) >> 20 for f in (torch.cuda.max_memory_allocated, torch.cuda.max_memory_reserved))
        return f"peak memory allocated: {allocated} MiB reserved: {reserved} MiB"
    return f"peak memory resident: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10} MiB"


def environment_number(name: str, default: int, least: int = 0) -> int:
    """A number of torchrun's environment. Raises RunError if it is none, or too small."""
    text = os.environ.get(name, f"{default}")[:20]  # Python reads no number of thousands of digits
    if not (text.isascii() and text.isdigit() and len(text) < 10) or int(text) < least:
        raise RunError(f"{name}={text!r} in the environment: must be a number from {least} on: start with torchrun or unset it")
    return int(text)

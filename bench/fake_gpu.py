"""An H100 that is not there: PyTorch traces, compiles and generates code for it; nothing is ever launched.

    from bench import fake_gpu; fake_gpu.install()     # before anything imports torch, once a process

Tensors on it are fake ones (torch's FakeTensorMode): shapes, strides and dtypes. fake_gpu.cpp takes the place of the CUDA
runtime in PyTorch's C++ side, and is built by g++ against the headers of the PyTorch at hand; the rest is said to PyTorch's
Python side and to Triton here. It serves builds of PyTorch with and without CUDA.
"""

import ctypes
import hashlib
import importlib.util
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

SOURCE = Path(__file__).with_suffix(".cpp")
CAPABILITY = (9, 0)
PROPERTIES = SimpleNamespace(
    name="NVIDIA H100 80GB HBM3", major=9, minor=0, multi_processor_count=132, total_memory=80 << 30, warp_size=32,
    regs_per_multiprocessor=65536, max_threads_per_multi_processor=2048, max_threads_per_block=1024, L2_cache_size=50 << 20,
    shared_memory_per_block=48 << 10, shared_memory_per_block_optin=227 << 10, shared_memory_per_multiprocessor=228 << 10,
    gcnArchName="", is_integrated=False, is_multi_gpu_board=False,
)  # fmt: skip


class FakeGPUError(RuntimeError):
    """This machine cannot have a fake GPU; the message says what it needs."""


def install() -> None:
    """Give this process a GPU. Raises FakeGPUError if torch was imported before, or cannot be built against."""
    if "torch" in sys.modules:
        raise FakeGPUError("torch is imported already: a fake GPU must come before it")
    spec = importlib.util.find_spec("torch")
    if spec is None:
        raise FakeGPUError(f"{sys.executable} has no torch")
    torch_at = Path(spec.origin).parent
    for name in ("libc10.so", "libtorch_cpu.so"):  # before torch is loaded, which asks once and for all for its CUDA
        _load(torch_at / "lib" / name)
    library = _load(_built(torch_at))
    library.register_hooks()  # one that is there wins over torch's own
    import torch  # noqa: F401

    library.register_guard()  # the last one wins
    _tell_python()
    _tell_inductor()
    _tell_triton()


def _load(path: Path) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    except OSError as error:
        raise FakeGPUError(f"{path} cannot be loaded: {error}") from error


def _built(torch_at: Path) -> Path:
    """fake_gpu.cpp, built against this PyTorch, kept in the user's cache."""
    version = (torch_at / "version.py").read_bytes()
    key = hashlib.sha256(SOURCE.read_bytes() + version + bytes(torch_at)).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "bankrun"
    if not cache.is_absolute():  # a user without a name and a home
        raise FakeGPUError(f"{cache} is no folder for what is built: XDG_CACHE_HOME names one")
    library = cache / f"fake_gpu-{key}.so"
    if library.exists():
        return library
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as folder:
            made = Path(folder, library.name)
            command = ["g++", "-std=c++20", "-O1", "-shared", "-fPIC", f"-I{torch_at}/include", f"-L{torch_at}/lib"]
            command += [str(SOURCE), "-o", str(made), "-lc10", "-ltorch_cpu"]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                raise FakeGPUError(f"g++ cannot build {SOURCE} against {torch_at}/include: {done.stderr.strip()[:2000]}")
            made.replace(library)
    except OSError as error:
        if isinstance(error, FileNotFoundError) and error.filename == "g++":
            raise FakeGPUError("there is no g++ on the PATH (Debian, Ubuntu: apt-get install g++)") from error
        raise FakeGPUError(f"{cache} cannot be written: {error}; XDG_CACHE_HOME names another folder") from error
    return library


def _tell_python() -> None:
    """torch.cuda is that of a machine with one H100."""
    import torch

    says = dict(
        is_available=True, is_initialized=True, is_bf16_supported=True, device_count=1, current_device=0,
        get_device_properties=PROPERTIES, get_device_capability=CAPABILITY, get_device_name=PROPERTIES.name,
        init=None, _lazy_init=None, synchronize=None, set_device=None, _exchange_device=0, _maybe_exchange_device=0,
        set_rng_state=None,
    )  # fmt: skip
    for name, value in says.items():
        setattr(torch.cuda, name, _returning(value))
    torch.cuda.get_rng_state = lambda *_: torch.zeros(16, dtype=torch.uint8)
    torch.version.cuda = torch.version.cuda or "13.0"
    for name in ("_cuda_getCurrentRawStream", "_cuda_getDevice"):
        setattr(torch._C, name, _returning(0))
    torch.autograd.set_multithreading_enabled(False)  # there is no thread for this device
    torch._C._set_only_lift_cpu_tensors(True)


def _returning(value):
    return lambda *_, **__: value


def _tell_inductor() -> None:
    """The device's interface; and nothing is timed: no trial of padded products, no patterns that run an example."""
    import torch._inductor.config
    import torch._inductor.fx_passes.fuse_attention as fuse_attention
    import torch._inductor.fx_passes.pad_mm as pad_mm
    import torch._subclasses.fake_tensor as fake_tensor
    from torch._inductor.constant_folding import ConstantFolder
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch._dynamo.device_interface import CudaInterface, DeviceInterface, register_interface_for_device

    fake_tensor.CONSTANT_NUMEL_LIMIT = 0  # else a tensor of one element is kept real too, and moved to the GPU

    class Worker(DeviceInterface.Worker):
        set_device = staticmethod(_returning(None))
        current_device = staticmethod(_returning(0))
        get_device_properties = staticmethod(_returning(PROPERTIES))

    class OnCPU(TorchDispatchMode):
        """Constants are folded by computing them, one element each: on the CPU, whatever device they are for."""

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            return function(*args, **{**(kwargs or {}), **({"device": "cpu"} if "device" in (kwargs or {}) else {})})

    def on_cpu(method):
        def wrapped(self, *args, **options):
            with OnCPU():
                return method(self, *args, **options)

        return wrapped

    ConstantFolder.run = on_cpu(ConstantFolder.run)

    says = dict(
        current_device=0, device_count=1, get_device_properties=PROPERTIES, get_compute_capability=90, get_raw_stream=0,
        is_available=True, is_triton_capable=True, is_bf16_supported=True, raise_if_triton_unavailable=None, synchronize=None,
    )  # fmt: skip
    CudaInterface.Worker = Worker
    for name, value in says.items():
        setattr(CudaInterface, name, staticmethod(_returning(value)))
    for device in ("cuda", "cuda:0"):
        register_interface_for_device(device, CudaInterface)
    fake_tensor.init_gpu_context = _returning(None)
    torch._inductor.config.compile_threads = 1
    for name in ("should_pad", "_should_pad", "should_pad_bench", "_should_pad_bench"):
        if hasattr(pad_mm, name):
            setattr(pad_mm, name, _returning(False))
    fuse_attention._get_sfdp_patterns = _returning([])
    fuse_attention._sfdp_init = _returning(None)


def _tell_triton() -> None:
    import torch
    from torch._inductor.runtime import triton_helpers
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    class Driver:
        utils = SimpleNamespace(
            get_device_properties=_returning({"max_shared_mem": 227 << 10, "multiprocessor_count": 132, "warpSize": 32})
        )
        get_current_target = _returning(GPUTarget("cuda", 90, 32))
        get_current_device = _returning(0)
        get_current_stream = _returning(0)
        get_active_torch_device = _returning(torch.device("cuda", 0))
        get_device_interface = _returning(torch.cuda)
        is_active = _returning(True)

    driver.set_active(Driver())
    triton_helpers.set_driver_to_gpu = _returning(None)  # generated kernels call it

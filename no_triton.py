"""What stands in for Triton where it has no wheel (macOS, other processors): kernels are defined, and say what they need when
one is launched. Everything that a CPU runs is plain PyTorch."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any


class JITFunction:
    """A kernel that nothing can run."""

    def __init__(self, function: Callable):
        self.__name__, self.__doc__ = function.__name__, function.__doc__

    def __getitem__(self, grid: Any) -> Callable:
        raise RuntimeError(f"{self.__name__} needs Triton, which this environment lacks: pip install triton, or use the CPU")


def cdiv(x: int, y: int) -> int:
    return -(-x // y)


def next_power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length()


class TensorDescriptor:
    @staticmethod
    def from_tensor(tensor: Any, block_shape: list[int]) -> Any:
        return tensor


class constexpr:
    def __init__(self, value: Any):
        self.value = value


tl = SimpleNamespace(constexpr=constexpr)
knobs = SimpleNamespace(runtime=SimpleNamespace(interpret=False))
triton = SimpleNamespace(jit=JITFunction, JITFunction=JITFunction, cdiv=cdiv, next_power_of_2=next_power_of_2, knobs=knobs)

"""Nests of dicts: what a manager's state and a checkpoint are."""

import sys
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

DEEPEST = 40  # dicts in one another; a state has some five


def leaves(tree: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted name, value) of everything in a nest of dicts that is not a dict."""
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from leaves(value, f"{name}.{key}" if name else f"{key}")
    else:
        yield name, tree


def check_tree(nest: Any) -> Any:
    """The nest. Raises ValueError for dicts within themselves, in two places or deeper than any run's: no walk might end."""
    found = level = [nest] if isinstance(nest, dict) else []
    for _ in range(DEEPEST):
        level = [y for x in level for y in x.values() if isinstance(y, dict)]
        found = found + level
        if len({*map(id, found)}) < len(found):
            break
    if level:
        raise ValueError("dicts within themselves, in two places or too deep, as no run saves them")
    return nest


def map_tensors(function: Callable[[Tensor], Any], tree: Any) -> Any:
    """The nest with function(tensor) in place of each tensor, and Python's number in place of each of NumPy's."""
    if isinstance(tree, dict):
        return {key: map_tensors(function, value) for key, value in tree.items()}
    return function(tree) if isinstance(tree, Tensor) else tree.item() if hasattr(tree, "item") else tree


def non_finite(tree: Any) -> list[str]:
    """Names of the tensors that hold an infinity or NaN, and of the numbers that are one, or beyond a float."""
    wide = lambda x: x.float() if x.is_floating_point() and x.itemsize == 1 else x  # PyTorch has no isfinite of FP8
    good = lambda x: wide(x).isfinite().all() if isinstance(x, Tensor) else abs(x) <= sys.float_info.max
    return [name for name, x in leaves(tree) if isinstance(x, Tensor | int | float) and not good(x)]


def differences(found: Any, expected: Any, name: str = "") -> list[str]:
    """Where two nests differ in keys and types, a state's numbers being of one, or tensors in shape and dtype, not values."""
    if isinstance(expected, dict) and isinstance(found, dict):
        faults = sorted(f"{name}{key} is missing" for key in expected.keys() - found.keys())
        faults += sorted(f"{name}{key} is unknown" for key in found.keys() - expected.keys())
        return sum((differences(found[k], expected[k], f"{name}{k}.") for k in expected if k in found), faults)
    here, there = ("float" if type(x) is int and name[:6] == "state." else type(x).__name__ for x in (expected, found))
    if isinstance(expected, Tensor) and isinstance(found, Tensor):
        here, there = (f"{tuple(x.shape)} {str(x.dtype).removeprefix('torch.')}" for x in (expected, found))
    return [f"{name[:-1]} is {there}, here {here}"] if here != there else []

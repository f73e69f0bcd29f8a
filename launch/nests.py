"""Nests of dicts, lists and tuples: what a manager's state and a checkpoint are."""

import io
import itertools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import torch
from torch import Tensor

DEEPEST = 40  # of one another; a state has some five


def leaves(tree: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted name, value) of everything in a nest that holds no more."""
    if (held := held_by(tree)) is None:
        yield name, tree
    for key, value in held or ():
        yield from leaves(value, f"{name}.{key}" if name else f"{key}")


def held_by(tree: Any) -> list[tuple[Any, Any]] | None:
    """(key or place, value) of what a dict, list or tuple holds; None of another value, as a named tuple."""
    if isinstance(tree, dict):
        return [*tree.items()]
    return [*enumerate(tree)] if type(tree) in (list, tuple) else None


def check_tree(nest: Any) -> Any:
    """The nest. Raises ValueError for one within itself, in two places or deeper than any run's: no walk might end."""
    found = level = [nest] if held_by(nest) else []
    for _ in range(DEEPEST):
        level = [y for x in level for _, y in held_by(x) if held_by(y)]
        found = found + level
        if len({*map(id, found)}) < len(found):
            break
    if level:
        raise ValueError("dicts or lists within themselves, in two places or too deep, as no run saves them")
    return nest


def map_tensors(function: Callable[[Tensor], Any], tree: Any) -> Any:
    """The nest with function(tensor) in place of each tensor, and Python's number in place of each of NumPy's."""
    if isinstance(tree, dict):
        return {key: map_tensors(function, value) for key, value in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)(map_tensors(function, value) for value in tree)
    return function(tree) if isinstance(tree, Tensor) else tree.item() if isinstance(tree, numpy.generic) else tree


def pending_layout(manager: Any) -> dict[str, Any]:
    """manager.layout(None), in which all gradients pend; of scripts of before that knew no None, the one at step 1."""
    try:
        return manager.layout(None)
    except TypeError:
        return manager.layout(1)


def ticks(manager: Any, step: int) -> dict[str, int]:
    """manager.ticks(step), by average; none of scripts of before that had no averages."""
    return manager.ticks(step) if hasattr(manager, "ticks") else {}


def written(tree: Any) -> memoryview:
    """The nest as torch.save writes it, with Python's number in place of each of NumPy's, which torch.load refuses. Raises
    MemoryError, over which torch.save raises another error: it goes on writing after it."""
    try:
        torch.save(map_tensors(lambda x: x, tree), buffer := io.BytesIO())
    except RuntimeError as error:
        raise (error.__context__ if isinstance(error.__context__, MemoryError) else error) from None
    return buffer.getbuffer()


def unreadable(tree: Any) -> list[str]:
    """What of a nest a checkpoint does not give back: a sentence each. weights_only refuses all but tensors and plain types."""
    faults = []
    for name, x in leaves(map_tensors(lambda x: x, tree)):
        if isinstance(x, Tensor):
            faults += [f"{name} is sparse"] * (x.layout != torch.strided)
        elif type(x) not in (bool, int, float, str, type(None)):
            try:
                torch.save(x, buffer := io.BytesIO())
                torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)
            except Exception:  # whatever pickle, or the value's own code, makes of it
                faults.append(f"{name} is a {type(x).__qualname__}")
    return faults


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


def unlike(was: Any, now: Any) -> list[tuple[str, str]]:
    """Both in words, unless these are the same: of sums, as "2 × 128 + 2 × 256", from the first term that is another, cut short."""
    terms = [f"{x}".split(" + ") for x in (was, now)]
    alike = len([*itertools.takewhile(lambda pair: pair[0] == pair[1], zip(*terms))])
    was, now = (" + ".join(["…"] * bool(alike) + x[alike:])[:90] for x in terms)
    return [(was, now)] if terms[0] != terms[1] else []

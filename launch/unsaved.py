"""What a script keeps where no checkpoint looks: its own state in attributes, classes, modules and globals.

A resumed run begins such state anew, and the warm-up, whose updates are undone, changes it for good. So all that can be reached
from the manager and from the script's own modules is compared before and after the warm-up, and after three passes and updates
more, and what differs is told.
"""

import array
import contextlib
import functools
import gc
import heapq
import io
import itertools
import logging
import mmap
import operator
import random
import re
import sys
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from numbers import Number
from pathlib import PurePath
from types import BuiltinMethodType, FunctionType, GeneratorType, MappingProxyType, MemberDescriptorType, MethodType, ModuleType
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from launch.machine import check_buffers, checksum, checksums
from launch.nests import leaves, non_finite, pending_layout, unreadable
from launch.sources import Sources

PROJECT = {"data", "launch", "no_triton", "runtime", "sample", "tracer"}  # what is no part of the recipe
SET_IN_EACH_STEP = {"lr_mul", "momentum"}  # of the optimizer
SAMPLED = 1 << 16  # elements by which a larger tensor or array is told from another
MOST = 100_000  # values that are looked at
FEW = 100  # for each so many that a container has, its values come later
TOLD = 3  # in a message
CUT = ""  # a name that is none: not all has been looked at
LINES = itertools.count()  # a number that is another each time
FUNCTION = "function or class"  # begins the text that tells one apart
SEEDED = {id(x) for x in (random._inst, numpy.random.mtrand._rand, torch.default_generator)}  # in each step, by seed_random
# PyTorch's compiler makes globals of a module whose functions it compiles: Python's own names; values by their id and a number
BY_COMPILER = re.compile(r"__builtins_dict__|_\d{6,}_c\d")
CALLED = FunctionType, MethodType, BuiltinMethodType, staticmethod, classmethod
BY_NAME = *CALLED, type, torch.dtype, torch.device
MAPPINGS = dict, MappingProxyType  # others, as an archive of arrays, may read a file for each value
HOLDERS = *MAPPINGS, set, frozenset, list, tuple, deque
HOOKS = "_backward_hooks", "_post_accumulate_grad_hooks"  # of a tensor
OPAQUE = ModuleType, Sources, logging.Logger, logging.Handler, logging.Manager
LEAVES = {bool, int, float, complex, str, bytes, type(None)}


def told_apart(x: Any) -> str:
    """A text that is another for another number, text, tensor, array, random generator, function or class; "": no such."""
    if isinstance(x, BY_NAME):
        return f"{FUNCTION} {getattr(x, '__module__', '')} {getattr(x, '__qualname__', x)} {getattr(x, '__code__', '')}"
    if isinstance(x, HOLDERS):
        return ""
    if isinstance(x, (str, bytes)):
        return f"{len(x)} {hash(x)}"  # a corpus, say: no copy
    if isinstance(x, numpy.generic):
        return f"{x.item()!r}"  # as a checkpoint gives it back
    if isinstance(x, (Number, PurePath)):
        return f"{x!r}"
    if isinstance(x, torch.Tensor):
        part = x.detach().flatten()[:: 1 + x.numel() // SAMPLED] if x.layout == torch.strided and not x.is_meta else None
        return f"{tuple(x.shape)} {x.requires_grad} {'' if part is None else checksums('', {'': part})}"
    if isinstance(x, (bytearray, memoryview, array.array)):
        return f"{len(x)} {told_apart(numpy.frombuffer(x, numpy.uint8)) if x else ''}"
    if isinstance(x, numpy.ndarray):
        return f"{x.shape} {'' if on_disk(x) else checksum(x.flat[:: 1 + x.size // SAMPLED].tobytes())}"
    if isinstance(x, io.BytesIO):
        return f"{x.tell()} {told_apart(numpy.frombuffer(x.getbuffer(), numpy.uint8)) if x.getbuffer().nbytes else ''}"
    if isinstance(x, io.IOBase):
        return place_in(x)
    if isinstance(x, torch.Generator):
        return checksum(x.get_state().numpy())
    if isinstance(x, (numpy.random.Generator, numpy.random.BitGenerator)):
        bits = getattr(x, "bit_generator", x)
        return f"{bits.state} {told_apart(bits.seed_seq)}"
    if isinstance(x, numpy.random.SeedSequence):
        return f"{x.state}"
    if isinstance(x, (random.Random, numpy.random.RandomState)):
        return f"{x.getstate() if isinstance(x, random.Random) else x.get_state()}"
    return ""


def parts_of(x: Any, own: set[str]) -> list[tuple[str, Any]]:
    """(name, value) of what a value holds. own: the modules of whose functions and classes the attributes count."""
    foreign = isinstance(x, (FunctionType, type)) and x.__module__ not in own
    module = type(x).__module__  # of Triton's kernels and PyTorch's operators, which compile, and tune themselves: no state
    kernel = module.startswith(("triton.", "torch._")) and not isinstance(x, torch.nn.Module)
    if foreign or kernel or isinstance(x, OPAQUE):
        return []
    if isinstance(x, GeneratorType):
        local = x.gi_frame.f_locals if x.gi_frame else {}
        parts = [(f".{name}", y) for name, y in local.items()]
        parts += [(f" part {i}", y) for i, y in enumerate(gc.get_referents(x)) if isinstance(y, Iterator)]  # of loops, yield from
        return [(" at", x.gi_frame.f_lasti if x.gi_frame else "its end"), *parts]
    if isinstance(x, Iterator) and not isinstance(x, io.IOBase) and not isinstance(type(x).__next__, FunctionType):
        return [(f" part {i}", y) for i, y in enumerate(place_of(x))]  # made in C: no attribute tells where it is
    attributes = {**(vars(x) if hasattr(x, "__dict__") else {})}
    slots = () if isinstance(x, io.IOBase) else slots_of(type(x))  # a file's is its buffer, of another mode
    attributes |= {name: getattr(x, name) for name in slots if hasattr(x, name)}
    sums = "wide_grads" if "grad_divisor" in attributes else None  # of an optimizer: pending gradients are a checkpoint's
    special = {name for name, y in attributes.items() if isinstance(x, type) and isinstance(y, FunctionType)}  # as __call__
    parts = [(f".{name}", y) for name, y in attributes.items() if (named(name) or name in special) and name != sums]
    if isinstance(x, Tensor):
        parts += [(f".{name}", getattr(x, name, None)) for name in (*HOOKS, *["grad"] * x.is_leaf)]
    elif isinstance(x, MAPPINGS):
        items = itertools.islice(dict.items(x) if isinstance(x, dict) else x.items(), MOST)
        parts += [(f"[{f'{key!r:.40}' if isinstance(key, str | int) else i}]", y) for i, (key, y) in enumerate(items)]
    elif isinstance(x, HOLDERS):
        parts += [(f"[{i}]", y) for i, y in enumerate(itertools.islice(x, MOST))]
    elif isinstance(x, CALLED):
        parts += [("", getattr(x, name, None)) for name in ("__self__", "__func__", "__wrapped__")]  # by torch.no_grad, say
    if isinstance(x, FunctionType) and x.__globals__.get("__name__") in own:
        parts += kept_by(x)
    return parts


def on_disk(x: Any) -> bool:
    """An array whose numbers lie in a file: what changes there stays."""
    return isinstance(x, numpy.memmap | mmap.mmap) or isinstance(x, numpy.ndarray) and on_disk(x.base)


def place_in(file: io.IOBase) -> str:
    """Where one is that is read on, on a disk or in memory; a log is none, which may be read too."""
    log = file.writable() and not getattr(file, "mode", "r").startswith("r")
    if log or not (file.readable() and file.seekable()):
        return ""
    try:
        return f"{file.tell()}"
    except OSError:  # a text whose lines are iterated over
        return f"line {next(LINES)}"


def place_of(iterator: Iterator) -> list[Any]:
    """What makes an iterator of C's anew where it is; as far as that can be seen, if it does not tell."""
    with contextlib.suppress(TypeError), warnings.catch_warnings(action="ignore"):
        return [*iterator.__reduce__()]
    return [f"{iterator!r}", operator.length_hint(iterator), *gc.get_referents(iterator)]


def kept_by(function: FunctionType) -> list[tuple[str, Any]]:
    """What it keeps between its calls, by its name there: defaults that may change, and the variables around it."""
    code, cells = function.__code__, function.__closure__ or ()
    defaults = function.__defaults__ or ()
    found = dict(zip(code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount], defaults))
    found |= function.__kwdefaults__ or {}
    for name, cell in zip(code.co_freevars, cells):
        with contextlib.suppress(ValueError):  # it is empty
            found[name] = cell.cell_contents
    return [(f".{name}", y) for name, y in found.items() if named(name)]


@functools.cache
def slots_of(kind: type) -> list[str]:
    """The attributes that a value of this type has in __slots__, or in C, by way of all its bases."""
    fields = (field for base in kind.__mro__ for field in vars(base).items())
    return [name for name, y in fields if isinstance(y, MemberDescriptorType) and named(name)]


def named(name: str) -> bool:  # by a script, not by Python or its compiler
    pythons = name.startswith("__") and name.endswith("__")
    return not (pythons or name.startswith(("_dynamo", "_compiled_call")) or BY_COMPILER.search(name))


def own_modules(manager: Any, sources: Sources) -> dict[str, ModuleType]:
    """By its name in a message, the script as a module, and of the modules that it imports the recipe's and those which are not
    the project's."""
    files = {file for file, path in sources.paths.items() if path}
    found = {name: x for name, x in sys.modules.items() if getattr(getattr(x, "__spec__", None), "origin", None) in files}
    beside = {name: x for name, x in found.items() if name.partition(".")[0] not in PROJECT | {"__main__"}}
    return beside | {sources.path.stem: sys.modules[type(manager).__module__]}


def kept_outside(manager: Any, sources: Sources) -> dict[str, str]:
    """By name, such as manager.ema['embed'], what tells apart each value that can be reached from the manager and from the
    script's modules. What a checkpoint holds is among it: it is the same again once the warm-up is undone."""
    modules = own_modules(manager, sources)
    own = {module.__name__ for module in modules.values()}
    roots = [("manager", manager), *(
        (f"{name}.{x}", y) for name, module in modules.items() for x, y in vars(module).items() if named(x))]  # fmt: skip
    found, seen, numbers = {}, {}, itertools.count()  # seen holds its values: another has none of their ids
    left = [(1, next(numbers), *root) for root in roots]  # a heap: small containers first, so that no corpus hides what follows
    while left and len(found) + len(seen) < MOST:
        size, _, name, x = heapq.heappop(left)
        if id(x) in SEEDED:
            continue
        try:
            if text := told_apart(x):
                found[name] = text
            if not (type(x) in LEAVES or id(x) in seen) and len(left) < 2 * MOST:
                seen[id(x)] = x
                parts = parts_of(x, own)
                for part, y in parts:
                    if y is not None:  # most of all
                        heapq.heappush(left, (size * (1 + len(parts) // FEW), next(numbers), f"{name}{part}", y))
        except Exception:  # of a shelf that is closed, an object whose attributes are its own affair
            continue
    return {**found, CUT: ""} if left else found


def check_names(manager: Any, numbers: bool = True) -> None:
    """Raise ValueError for state that state_dict gives and layout does not tell of, or the other way, and for what no checkpoint
    takes or gives back: none could be resumed. numbers: the manager's model has some; of meta a state may not be had."""
    try:
        with Uncopied():
            state = manager.state_dict()
    except (NotImplementedError, RuntimeError):
        if numbers:
            raise
        return
    given, told = ({name for name, _ in leaves({**x, "partial": {}})} for x in (state, manager.layout(0)))
    if other := sorted(given ^ told):
        fault = f"{other[0]} is in {'state_dict' if other[0] in given else 'layout'} alone of {type(manager).__name__}"
        raise ValueError(f"{fault}: what a checkpoint shall hold goes into _arrange, which both take it from")
    known = {"sharded": manager.own_rows, "partial": pending_layout(manager)["partial"]}
    unknown = [f"{part}.{x} is no parameter's" for part, labels in known.items() for x in state[part] if x not in labels]
    infinite = non_finite({name: x for name, x in leaves(state) if not (isinstance(x, Tensor) and x.is_meta)})
    for faults, advice in (
        (unknown, "a rank's rows are known of those alone: keep it in the optimizer's state of each, or whole in same"),
        ([f"{name} is not finite" for name in infinite], "no checkpoint is saved of that: begin with a number, as 1e30"),
        (unreadable(state), "no checkpoint could be read again: give tensors, numbers, texts, and dicts, lists or tuples of them"),
    ):
        if faults:
            raise ValueError(f"{faults[0]}, of {type(manager).__name__}'s state: {advice}")


class Uncopied(TorchFunctionMode):
    """Tensors stay where they are: for their names alone, as of a model on meta, which has no numbers to copy."""

    def __torch_function__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        stays = function in (Tensor.to, Tensor.cpu, Tensor.clone)
        return args[0] if stays else function(*args, **kwargs or {})


def warm_up_traces(
    ranks: Any, again: Callable[[int], None] | None, buffers: dict[str, str], outside: dict[str, str], manager: Any, sources: Sources
) -> str:  # fmt: skip
    """What to tell, if the warm-up has left traces outside of what a checkpoint holds. Called by all ranks.

    again(step): one pass and the update of this step once more, undone. What comes round in as many as the warm-up has, as a
    toggle, does not in one more; and what an update sets is the same after another past. Older scripts give none. outside: what
    kept_outside gave before.
    Raises AgreedError, naming them, for the model's buffers, and as check_names does.
    """
    set_before: dict[str, str] = {}
    ranks.on_all(check_names, manager)
    for step in (None, 0, 1, 0) if again else (None,):  # without Adam and with
        if step is not None:
            again(step)
        ranks.on_all(check_buffers, buffers, manager.live_tensors().get("buffers", {}))
        now = kept_outside(manager, sources)
        changed = [name for name in differing(outside, now) if not is_set_in_each_step(name, now)]
        if step == 0:
            changed, set_before = changed or differing(set_before or now, now), now
        each = ranks.gather((changed[:TOLD], len(changed)))
        if any(count for _, count in each):
            names, count = next(found for found in each if found[1])
            more = f" and {count - TOLD} more" if count > TOLD else ""
            how = "a run and its resumptions begin with what the warm-up left there: no harm to a cache; bench/resumes.py tells"
            return f"caution: passes or updates change {', '.join(names)}{more}: no checkpoint holds that; {how}"
    return ""


def is_set_in_each_step(name: str, found: dict[str, str]) -> bool:
    """Is it a setting of an optimizer, which is told by its grad_divisor?"""
    owner, _, attribute = name.rpartition(".")
    return attribute in SET_IN_EACH_STEP and f"{owner}.grad_divisor" in found


def differing(before: dict[str, str], now: dict[str, str]) -> list[str]:
    """Names of what is not as it was; not of a function or a class where nothing was told before, as of what is made at its first
    use; where not all has been looked at, of what was seen both times."""
    both = CUT in before or CUT in now
    changed = [x for x in {**now, **before} if now.get(x) != before.get(x) and not (both and not (x in now and x in before))]
    return [x for x in changed if x in before or not now[x].startswith(FUNCTION)]

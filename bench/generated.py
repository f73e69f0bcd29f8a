"""What Inductor generates on a fake GPU: every launch of its graphs, the bytes it moves, the instructions it executes.

    fake_gpu.install()
    from bench.generated import graphs_of
    forward, backward = graphs_of(model, inputs, targets)     # fake tensors in, two Graphs out

Bytes are those of the elements that a kernel touches, each once: L1 and L2 are taken to keep what it reads twice. Instructions
are those of the binary that Triton builds for sm_90. Custom operators are followed to what they launch, on meta tensors.
"""

import ast
import contextlib
import importlib.util
import math
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import sympy
import torch
import torch._functorch.config
import triton
from torch._inductor import ir
from torch._inductor.dependencies import Dep, MemoryDep
from torch._inductor.graph import GraphLowering
from torch._inductor.scheduler import BaseSchedulerNode, ExternKernelSchedulerNode, NopKernelSchedulerNode
from torch._inductor.virtualized import V
from torch._library.custom_ops import OPDEFS
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor


import triton_kernels as tk
from bench import kernels as bench_kernels

SAMPLE = 1 << 15  # elements at which overlapping accesses are compared
CONFIGS = 6  # of a kernel, at most, among which the fewest instructions count: Inductor times them and takes the fastest


@dataclass
class Kernel:
    """One launch."""

    name: str  # of the generated kernel, the Triton kernel or the operator
    kind: str  # "generated"; "kernel", a Triton one of ours; "product", "fp8 product"; "copy" before one; "attention"; "other"
    bytes: float = 0  # read and written
    instructions: float = 0  # of warps
    special: float = 0  # exponentials, reciprocals, roots: of threads
    flops: float = 0
    programs: int = 0  # of a Triton kernel of our own: thread blocks
    operator: str = ""  # the custom operator that launches it
    paths: list[list[str]] = field(
        default_factory=list
    )  # functions called on the way to each of its operations: "file:function"
    lines: list[str] = field(default_factory=list)  # where the script says so: "number: text", the innermost line of each path
    targets: list[str] = field(default_factory=list)  # ATen operators that it computes
    shapes: list[list[int]] = field(default_factory=list)  # of the buffers that it reads and writes
    shape: str = ""  # of a product: m × k × n
    window: int = -1  # of attention, in positions; -1: none


class Graph(NamedTuple):
    phase: str  # "forward", "backward" or "inference"
    code: str
    kernels: list[Kernel]
    saved: int  # bytes that a forward graph keeps for its backward

    def to_json(self) -> dict[str, Any]:
        return {"phase": self.phase, "saved": self.saved, "kernels": [asdict(kernel) for kernel in self.kernels]}


class _Launched(BaseException):
    """Raised where the generated code of a forward pass would run."""


class _Lowered(NamedTuple):
    """A graph of Inductor's, its code, and what it launches: Kernels, and custom operators yet to be followed."""

    graph: GraphLowering
    code: str
    items: list[Any]


@contextlib.contextmanager
def _compiling(run: Callable[[_Lowered], list], count: bool = True) -> Iterator[list[_Lowered]]:
    """Inside, Inductor writes code and loads none; `run` is called where a graph would run, for its outputs."""
    found: list[_Lowered] = []

    class Module:
        """In place of that of the generated code."""

        __file__ = __file__

        def __init__(self, lowered: _Lowered):
            self.call = lambda args: run(lowered)

    def record(graph: GraphLowering) -> Module:
        code, _ = graph.codegen()
        with V.set_graph_handler(graph):
            found.append(_Lowered(graph, getattr(code, "value", code), _described(graph)))
        if count:
            _name_and_count(found[-1])
        return Module(found[-1])

    with (
        mock.patch.object(GraphLowering, "_compile_to_module", record),
        mock.patch.object(torch._functorch.config, "force_non_lazy_backward_lowering", True),
    ):
        yield found


def graphs_of(function: Callable, *args: Any, count: bool = True) -> list[Graph]:
    """The graphs that torch.compile makes of a call on fake tensors: forward, then backward if anything wants gradients.
    count: compile their kernels and count instructions, which takes most of the time; else there are no kernels.
    Raises RuntimeError if it makes none, and whatever the compiler raises."""

    def stop(_: _Lowered) -> list:
        raise _Launched

    if not isinstance(function, torch.nn.Module) or function._compiled_call_impl is None:
        function = torch.compile(function, dynamic=False, fullgraph=True)
    with _compiling(stop, count) as found, contextlib.suppress(_Launched):
        function(*args)
    if not found:
        raise RuntimeError("torch.compile made no graph of this call")
    backward = next((lowered.graph for lowered in found if lowered.graph.is_backward), None)
    graphs = []
    for graph, code, items in found:
        phase = "backward" if graph.is_backward else "inference" if graph.is_inference else "forward"
        saved = _saved(graph, backward) if phase == "forward" and backward else 0
        graphs.append(Graph(phase, code, _followed(items) if count else [], saved))
    return graphs


def launches_during(run: Callable[[], None]) -> tuple[list[Kernel], list[str]]:
    """What a function on fake tensors launches, by graphs that give nothing back (they update in place) and by our own kernels;
    and the code of those graphs."""
    _items.clear()
    with _compiling(lambda lowered: _items.extend(lowered.items) or []) as found, _own_launches(_items):
        run()
    return _followed(_items), [lowered.code for lowered in found]


_items: list[Any] = []  # one for all calls: a graph that an earlier one has compiled is not compiled again


def _saved(forward: GraphLowering, backward: GraphLowering) -> int:
    """Bytes of the buffers among the forward's last outputs, the backward's first inputs; parameters are there anyway."""
    count = sum(not name.startswith("tangents") for name in backward.graph_inputs)
    buffers = {}
    for output in forward.graph_outputs[len(forward.graph_outputs) - count :]:
        while isinstance(output, ir.MutableBox | ir.BaseView):
            output = output.data
        if isinstance(output, ir.Buffer) and output.get_name() not in forward.graph_inputs:
            buffers[output.get_name()] = _nbytes(output)
    return sum(buffers.values())


# -----------------------------------------------------------------------------
# Nodes of the schedule


def _described(lowering: GraphLowering) -> list[Any]:
    """Of each launch of the generated code, in its order, a Kernel; of each custom operator its (Kernel, fx node)."""
    found = []
    for node in lowering.scheduler.nodes:
        parts = [part for part in node.get_nodes() if not isinstance(part, NopKernelSchedulerNode)]
        if not parts or isinstance(node, NopKernelSchedulerNode):
            continue
        origins = [origin for part in parts if part.node is not None for origin in part.node.get_origins()]
        if isinstance(parts[0], ExternKernelSchedulerNode):
            found += _extern(parts[0].node, origins)
        else:
            kernel = Kernel("", "generated", _traffic(parts))
            kernel.shapes = _shapes(parts)
            found.append(_placed(kernel, origins))
    return found


def _placed(kernel: Kernel, origins: Iterable[torch.fx.Node]) -> Kernel:
    """Where in the script it comes from, and what it computes."""
    paths, lines, targets = {}, {}, {}
    package = str(Path(torch.__file__).parent)
    for origin in origins:
        targets[str(origin.target)] = None
        found = re.findall(r'File "(.+?)", line (\d+), in (\S+)\n\s*(.*)', origin.meta.get("stack_trace") or "")
        own = [(Path(file).name, line, function, text) for file, line, function, text in found if not file.startswith(package)]
        paths[tuple(f"{file}:{function}" for file, _, function, _ in own)] = None
        for file, line, _, text in [call for call in own if call[0] == own[0][0]][-1:]:
            lines[f"{file}:{line}: {text.strip()}"] = None
    kernel.paths, kernel.lines, kernel.targets = [list(path) for path in paths if path], list(lines), list(targets)
    return kernel


def _extern(node: ir.ExternKernel, origins: list[torch.fx.Node]) -> list[Any]:
    if isinstance(node, ir.MultiOutput):  # an output of a kernel that is counted
        return []
    target = getattr(node, "op_overload", None)
    name = str(target or getattr(node, "python_kernel_name", None) or type(node).__name__)
    inputs = [x for x in getattr(node, "inputs", []) if hasattr(x, "get_size")]
    kernel = _placed(Kernel(name, "other"), origins)
    kernel.shapes = [_size(x) for x in inputs]
    product = re.search(r"\b(addmm|baddbmm|bmm|mm|_scaled_mm)\b", name)
    if product:
        out, (*_, rows, inner), cols = _size(node), _size(inputs[-2]), _size(inputs[-1])[-1]
        kernel.kind = "fp8 product" if product[1] == "_scaled_mm" else "product"
        kernel.flops, kernel.shape = 2 * math.prod(out) * inner, f"{rows} × {inner} × {cols}"
        kernel.bytes = sum(map(_nbytes, inputs)) + _nbytes(node)
        if (
            product[1] in ("addmm", "baddbmm") and _size(inputs[0]) == out
        ):  # what is added comes into the result before the product
            copy = _placed(
                Kernel("copy for " + name, "copy", 3 * _nbytes(node)), origins
            )  # read, written, and read again there
            copy.shapes = [out]
            return [copy, kernel]
        return [kernel]
    origin = next((origin for origin in origins if origin.target is target), None)
    if origin is not None:
        return [(kernel, origin)]
    kernel.bytes = sum(map(_nbytes, inputs)) + (_nbytes(node) if hasattr(node, "get_size") else 0)
    return [kernel]


def _size(x: Any) -> list[int]:
    """Empty for what Inductor gives no size: a node of several outputs, a constant."""
    try:
        return [int(n) for n in x.get_size()]
    except (NotImplementedError, AttributeError):
        return []


def _nbytes(x: Any) -> int:
    """0 for what has no dtype."""
    try:
        return math.prod(_size(x)) * x.get_dtype().itemsize
    except (NotImplementedError, AttributeError):
        return 0


# -----------------------------------------------------------------------------
# Bytes


def _traffic(parts: list[BaseSchedulerNode]) -> float:
    """Bytes that a fused kernel reads and writes: not what stays inside."""
    own = {buffer.get_name() for part in parts for buffer in part.get_outputs()}
    inside = {*V.graph.removed_buffers, *getattr(V.graph, "inplaced_to_remove", ())}
    total = 0.0
    for names, kept in (("reads", lambda name: name not in own), ("writes", lambda name: name not in inside)):
        accesses: dict[str, list[Dep]] = {}
        for part in parts:
            for dep in getattr(part.read_writes, names):
                if isinstance(dep, MemoryDep) and kept(dep.name):
                    accesses.setdefault(dep.name, []).append(dep)
        for name, deps in accesses.items():
            buffer = V.graph.name_to_buffer.get(name) or V.graph.graph_inputs.get(name) or V.graph.constants.get(name)
            if hasattr(buffer, "get_size"):
                total += touched(deps, math.prod(_size(buffer))) * buffer.get_dtype().itemsize
    return total


def _shapes(parts: list[BaseSchedulerNode]) -> list[list[int]]:
    names = {dep.name for part in parts for dep in (*part.read_writes.reads, *part.read_writes.writes)}
    buffers = (V.graph.name_to_buffer.get(name) or V.graph.graph_inputs.get(name) for name in sorted(names))
    return [size for size in map(_size, buffers) if size]


def touched(accesses: Iterable[MemoryDep], size: int) -> int:
    """How many elements of a buffer of `size` these accesses touch, each counted once. Indices that come out of memory count
    once a look-up; where several accesses may overlap, a sample of their outermost rows is compared."""
    looked_up, direct = 0, {}
    for dep in set(accesses):
        ranges = {var: int(extent) for var, extent in zip(dep.var_names, dep.size)}
        if not dep.index.free_symbols <= set(ranges):
            looked_up += math.prod(ranges.values())
            continue
        ranges = {var: extent for var, extent in ranges.items() if var in dep.index.free_symbols}  # the others repeat
        direct[dep.index, tuple(ranges.items())] = ranges
    if len(direct) == 1:
        (((index, _), ranges),) = direct.items()
        if not index.atoms(sympy.Function):
            return min(size, math.prod(ranges.values())) + looked_up
    if not direct:
        return looked_up
    share = min(1.0, *(SAMPLE / math.prod(ranges.values()) for ranges in direct.values()))
    places, scale = [], 1.0
    for (index, _), ranges in direct.items():
        taken = dict(ranges)
        if ranges:
            first, extent = next(iter(ranges.items()))
            taken[first] = max(1, round(extent * share))
            scale = max(scale, extent / taken[first])
        places.append(_addresses(index, taken))
    return min(size, round(len(np.unique(np.concatenate(places))) * scale)) + looked_up


def _addresses(index: sympy.Expr, ranges: dict[sympy.Symbol, int]) -> np.ndarray:
    """Every value of the index over the ranges."""
    if not ranges:
        return np.array([int(index)])
    grids = dict(zip(ranges, np.meshgrid(*map(np.arange, ranges.values()), indexing="ij", sparse=True)))
    return np.unique(_evaluated(index, grids))


def _evaluated(index: sympy.Expr, values: dict[sympy.Symbol, np.ndarray]) -> Any:
    if index in values:
        return values[index]
    if index.is_Integer:
        return int(index)
    args = [_evaluated(arg, values) for arg in index.args]
    name = type(index).__name__
    if name not in INDEXING:
        raise RuntimeError(f"Inductor indexes memory by {name}: not known here")
    return INDEXING[name](*args)


INDEXING = {
    "Add": lambda *terms: sum(terms),
    "Mul": lambda *factors: math.prod(factors),
    "Identity": lambda x: x,
    "FloorDiv": lambda x, divisor: x // divisor,
    "CleanDiv": lambda x, divisor: x // divisor,
    "Mod": lambda x, modulus: x % modulus,
    "PythonMod": lambda x, modulus: x % modulus,
    "ModularIndexing": lambda x, divisor, modulus: x // divisor % modulus,
}


# -----------------------------------------------------------------------------
# Instructions


def _name_and_count(lowered: _Lowered) -> None:
    """Name Inductor's kernels by the calls of the code, in its order, and count what those execute."""
    sources, calls = written_kernels(lowered.code)
    generated = [kernel for kernel in lowered.items if isinstance(kernel, Kernel) and kernel.kind == "generated"]
    if not sources:  # code for a CPU
        return
    if len(calls) != len(generated):
        raise RuntimeError(
            f"{len(calls)} launches in the generated code, {len(generated)} fused nodes: this Inductor is not known"
        )
    for kernel, (name, args) in zip(generated, calls):
        kernel.name = name
        kernel.instructions, kernel.special = executed_by(sources[name].replace(name, "generated_kernel"), args)


def written_kernels(code: str) -> tuple[dict[str, str], list[tuple[str, tuple]]]:
    """Of a module of generated code: its Triton kernels' sources by name, and its launches, (name, arguments), in order; of the
    arguments the numbers, None for others."""
    sources, calls = {}, []
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Assign) and ast.unparse(node.value).startswith("async_compile.triton("):
            sources[node.targets[0].id] = node.value.args[1].value
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "run":
            args = tuple(arg.value if isinstance(arg, ast.Constant) else None for arg in node.args)
            calls.append((node.lineno, ast.unparse(node.func.value), args))
    return sources, [(name, args) for _, name, args in sorted(calls, key=lambda call: call[0]) if name in sources]


@cache
def executed_by(source: str, args: tuple) -> tuple[float, float]:
    """Warp instructions, and special functions of threads, of a launch of a kernel that Inductor wrote; of the configurations
    it would time, that with the fewest."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "generated.py")
        path.write_text(source, encoding="utf-8")
        spec = importlib.util.spec_from_file_location("generated", path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        tuner = module.generated_kernel
        return min(_executed_with(tuner, config, args) for config in tuner.configs[:CONFIGS])


def _executed_with(tuner: Any, config: triton.Config, args: tuple) -> tuple[float, float]:
    from torch._inductor.runtime.triton_heuristics import GridExpr

    signature, meta = tuner.triton_meta["signature"], tuner.inductor_meta
    constants = tuner.triton_meta["constants"] | config.kwargs
    constants = {name: constants.get(name) for name, type_ in signature.items() if type_ == "constexpr"}
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages, "enable_fp_fusion": True}
    program = ASTSource(fn=tuner.fn, signature=dict(signature), constexprs=constants, attrs=tuner.triton_meta["configs"][0])
    cubin = triton.compile(program, target=GPUTarget("cuda", 90, 32), options=options).asm["cubin"]
    numbers = constants | dict(zip((name for name, type_ in signature.items() if type_ != "constexpr"), args))
    grid = GridExpr.from_meta(meta, config.kwargs | {"num_warps": config.num_warps}, mode="python")
    scope = dict(numbers)
    exec("\n".join(grid.prefix), scope)  # Inductor's own expressions
    programs = math.prod(eval(str(expression), scope) for expression in (grid.x_grid, grid.y_grid, grid.z_grid))
    trips = 1
    if "R0_BLOCK" in config.kwargs:
        trips = math.ceil(numbers["r0_numel"] / config.kwargs["R0_BLOCK"])
    elif "RSPLIT_SIZE" in numbers:
        trips = math.ceil(numbers["RSPLIT_SIZE"] / numbers.get("XBLOCK", 1))
    instructions, special = per_warp(cubin, trips)
    return programs * config.num_warps * instructions, 32 * programs * config.num_warps * special


def per_warp(cubin: bytes, trips: float) -> tuple[float, float]:
    """Instructions that a warp executes, and special functions among them, with `trips` rounds of each innermost loop."""
    instructions, loops = bench_kernels.disassembled(cubin)
    times = [1.0] * len(instructions)
    for first, last in loops:
        if not any(first <= a and b <= last and (a, b) != (first, last) for a, b in loops):
            times[first : last + 1] = [trips] * (last + 1 - first)
    names = [name for name, _ in instructions]
    end = max((i for i, name in enumerate(names) if name == "EXIT"), default=len(names))
    times[end + 1 :] = [0.0] * (len(names) - end - 1)  # padding
    total = sum(n for n, name in zip(times, names) if name != "NOP")
    return total, sum(n for n, name in zip(times, names) if name.startswith("MUFU"))


# -----------------------------------------------------------------------------
# Custom operators


def _followed(items: list[Any]) -> list[Kernel]:
    """Kernels are themselves, launches of ours are counted, and custom operators replaced by what they launch."""
    kernels = []
    for item in items:
        if isinstance(item, Kernel):
            kernels.append(item)
        elif isinstance(item, bench_kernels.Launch):
            kernels.append(launched(item))
        elif "attn" in item[0].name or "attention" in item[0].name:
            kernels.append(_attention(*item))
        else:
            kernel, origin = item
            inside = launches_of(
                origin.target, *_on_meta(torch.fx.map_arg((origin.args, origin.kwargs), lambda x: x.meta["val"]))
            )
            for inner in inside:
                inner.operator, inner.paths, inner.lines = kernel.name, kernel.paths, kernel.lines
                inner.targets = kernel.targets
            kernels += inside
    return kernels


def _on_meta(args: Any) -> Any:
    """The same arguments, tensors without memory in place of fake ones."""

    def tensor(x: Any) -> Any:
        if not isinstance(x, torch.Tensor) or x.device.type == "meta":
            return x
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")

    return torch.utils._pytree.tree_map(tensor, args)


@contextlib.contextmanager
def _own_launches(items: list[Any]) -> Iterator[None]:
    """Inside, Triton kernels are collected in place of being launched."""

    def record(function: JITFunction, *args: Any, grid: Any, warmup: bool = False, **options: Any) -> None:
        without_memory = [
            replace(arg, base=_on_meta(arg.base)) if isinstance(arg, TensorDescriptor) else _on_meta(arg) for arg in args
        ]
        items.append(bench_kernels.Launch(function, grid, tuple(without_memory), options))

    with mock.patch.object(JITFunction, "run", record):
        yield


class _Calls(TorchDispatchMode):
    """Collects the ATen operators that would each be a kernel of their own."""

    def __init__(self, found: list[Kernel]):
        super().__init__()
        self.found = found

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if (
            function.is_view
            or function.namespace != "aten"
            or function.name().startswith(("aten::empty", "aten::new_empty", "aten::_unsafe_view", "aten::detach"))
        ):
            return result
        tensors = [x for x in torch.utils._pytree.tree_leaves((args, kwargs, result)) if isinstance(x, torch.Tensor)]
        kernel = Kernel(str(function), "other", sum(x.nbytes for x in tensors), shapes=[list(x.shape) for x in tensors])
        if function.overloadpacket in flop_registry:
            kernel.kind = "fp8 product" if "_scaled_mm" in kernel.name else "product"
            kernel.flops = flop_registry[function.overloadpacket](*args, **(kwargs or {}), out_val=result)
            kernel.shape = " × ".join(map(str, (*args[0].shape, args[1].shape[-1])))
        self.found.append(kernel)
        return result


def launches_of(operator: Any, args: tuple, kwargs: dict[str, Any]) -> list[Kernel]:
    """What a custom operator would launch for these arguments, on meta tensors: its Triton kernels, and ATen's operators."""
    items: list[Any] = []
    definition = OPDEFS.get(operator._schema.name)
    run = operator if definition is None else definition._init_fn  # one of PyTorch's own, or one of ours
    with tk.kernels_of("cuda"), _own_launches(items), _Calls(items):
        run(*args, **kwargs)
    return _followed(items)


class Access(NamedTuple):
    """A load or a store in a Triton kernel."""

    argument: str
    elements: int  # of its tile
    store: bool
    loop: int  # the innermost loop around it, by its place in the kernel; -1: none


def launched(launch: bench_kernels.Launch) -> Kernel:
    """A launch of a Triton kernel of our own: each tensor that it reads and each that it writes counts once, or what its tiles
    touch if that is less; reading back what it has written is left to L2. A product's operations are its tiles'."""
    resources = bench_kernels.compiled(launch, 90)
    accesses, loops, has_dot = accesses_of(resources.ttir)
    tensors = {name: getattr(arg, "base", arg) for name, arg in zip(launch.kernel.arg_names, launch.args)}
    programs, warps = math.prod(launch.grid), launch.options["num_warps"]
    kernel = Kernel(launch.kernel.fn.__name__, "kernel", programs=programs)
    kernel.shapes = [list(x.shape) for x in tensors.values() if isinstance(x, torch.Tensor)]
    for tensor in {id(tensors[access.argument]): tensors[access.argument] for access in accesses}.values():
        for store in (False, True):
            mine = [access for access in accesses if tensors[access.argument] is tensor]
            if not store and mine[0].store:  # what a program has written it reads back from L2
                continue
            mine = [access for access in mine if access.store == store]
            size = tensor.numel()
            if all(access.loop < 0 for access in mine):
                size = min(size, programs * sum(access.elements for access in mine))
            kernel.bytes += size * tensor.element_size()
    if has_dot:
        kernel.flops = _dot_operations(accesses, tensors, programs)
    elif not loops:
        instructions, special = per_warp(resources.cubin, 1)
        kernel.instructions, kernel.special = programs * warps * instructions, 32 * programs * warps * special
    else:
        for body, times in _passes(resources.cubin, accesses, loops, tensors):
            kernel.instructions += times * warps * sum(body.values())
            kernel.special += 32 * times * warps * sum(n for name, n in body.items() if name.startswith("MUFU"))
    return kernel


def _dot_operations(accesses: list[Access], tensors: dict[str, torch.Tensor], programs: int) -> float:
    """2 m n k of a product a (…, m, k) · b (…, k, n) → c (…, m, n), from the sizes alone: |a| |b| / |c| is k² for each matrix
    of a batch. Where a program computes one tile of c, only as many as there are programs."""
    inner = [access for access in accesses if not access.store and access.elements > 1]
    operands = [tensors[name].numel() for name in dict.fromkeys(access.argument for access in inner if access.loop >= 0)][:2]
    stored = [access for access in accesses if access.store]
    result = tensors[stored[0].argument]
    batch = result.numel() // math.prod(result.shape[-2:])
    depth = math.sqrt(operands[0] * operands[-1] / result.numel() / batch)
    computed = result.numel()
    if all(access.loop < 0 for access in stored):
        computed = min(computed, programs * max(access.elements for access in stored))
    return 2 * computed * depth


def _passes(cubin: bytes, accesses: list[Access], loops: list[int], tensors: dict[str, torch.Tensor]) -> Iterator[tuple]:
    """Of each innermost loop that walks a tensor tile by tile: its instructions, and how often all programs go round it."""
    bodies = bench_kernels.innermost_loops(cubin)
    walks = []
    for loop in loops:
        tiles = [access for access in accesses if access.loop == loop and access.elements > 1]
        times = [tensors[access.argument].numel() / access.elements for access in tiles]
        walks.append(max(times, default=0))
    if len(bodies) != len(walks):  # the compiler has unrolled the small ones
        walks = [times for times in walks if times]
        largest = sorted(sorted(range(len(bodies)), key=lambda i: -sum(bodies[i].values()))[: len(walks)])
        bodies = [bodies[i] for i in largest]
    yield from zip(bodies, walks)


def accesses_of(ttir: str) -> tuple[list[Access], list[int], bool]:
    """The loads and stores of a kernel in Triton's own language, its innermost loops, and whether it multiplies matrices."""
    accesses, pointers, has_dot = [], {}, False
    around: list[int | None] = []  # the blocks that are open: a loop's number, None for others
    outer: set[int] = set()
    count = 0
    for line in ttir.splitlines():
        line = re.sub(r"\s*loc\(.*$", "", line.strip())
        closed = around.pop() if line.startswith("}") and around else None
        inside = next((loop for loop in reversed(around) if loop is not None), -1)
        if line.endswith("{"):
            loop = closed if line.startswith("} do") else None
            if re.search(r"\bscf\.(for|while)\b", line):
                outer.add(inside)
                loop, count = count, count + 1
            around.append(loop)
        pointers.update((name, [first]) for name, first in re.findall(r"(%\w+) = (%\w+)", line.partition("iter_args(")[2]))
        if found := re.match(
            r"(%\w+) = arith.select %\w+, (%\w+), (%\w+) : .*!tt.ptr", line
        ):  # some programs one, some the other
            pointers[found[1]] = [found[2], found[3]]
        if found := re.match(r"(%\w+) = tt\.(?:splat|addptr|broadcast|expand_dims|bitcast|reshape) (%\w+)", line):
            pointers[found[1]] = [found[2]]
        has_dot |= "= tt.dot" in line
        if found := re.search(r"tt\.(descriptor_)?(load|store) (%\w+).*", line):
            names = [found[3]]
            while any(name in pointers for name in names):
                names = [root for name in names for root in pointers.get(name, [name])]
            types = re.findall(r"(?:tensor|tensordesc)<((?:\d+x)+)", found[0])
            tile = math.prod(map(int, types[-1].split("x")[:-1])) if types else 1
            accesses += [Access(name[1:], tile, found[2] == "store", inside) for name in names]
    return accesses, [loop for loop in range(count) if loop not in outer], has_dot


def _attention(kernel: Kernel, origin: torch.fx.Node) -> Kernel:
    """Queries, keys and values of P positions, H heads, D dims, and the window; its operations are the caller's to say."""
    tensors = [node.meta["val"] for node in origin.args if isinstance(node, torch.fx.Node)]
    backward = "backward" in kernel.name
    kernel.kind = "attention backward" if backward else "attention"
    kernel.bytes = sum(x.nbytes for x in tensors if isinstance(x, torch.Tensor)) * (1.5 if backward else 4 / 3)
    kernel.shapes = [list(x.shape) for x in tensors if isinstance(x, torch.Tensor)]
    windows = [arg[0] for arg in origin.args if isinstance(arg, list | tuple) and len(arg) == 2]
    kernel.window = windows[0] if windows else -1
    return kernel

"""What Inductor generates on a fake GPU: each launch of its graphs, its bytes and instructions.

    fake_gpu.install()
    from bench.generated import graphs_of
    forward, backward = graphs_of(model, inputs, targets)     # fake tensors in, two Graphs out

Bytes are those of the elements that a kernel touches, each once: caches keep what it reads twice.
Instructions are those of the binary that Triton builds for sm_90. Custom operators are followed to
what they launch, on meta tensors.
"""

import ast
import contextlib
import importlib.util
import math
import re
import tempfile
from collections import Counter
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
from torch._inductor import ir, scheduler
from torch._inductor.dependencies import MemoryDep
from torch._inductor.graph import GraphLowering
from torch._inductor.virtualized import V
from torch._library.custom_ops import OPDEFS
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import flop_registry
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

import triton_kernels as tk
from bench import kernels

SAMPLE = 1 << 15  # elements at which overlapping accesses are compared
CONFIGS = 6  # of a kernel, at most: Inductor times them, here the fewest instructions count


@dataclass
class Kernel:
    """One launch."""

    name: str  # of the generated kernel, the Triton kernel or the operator
    kind: str  # generated, (fp8) kernel: ours, (fp8) product, copy, attention (backward), other
    bytes: float = 0  # read and written
    instructions: float = 0  # of warps
    special: float = 0  # exponentials, reciprocals, roots: of threads
    flops: float = 0
    programs: int = 0  # of a Triton kernel of ours: thread blocks
    operator: str = ""  # the custom operator that launches it
    paths: list[list[str]] = field(default_factory=list)  # "file:function" calls to its operations
    targets: list[str] = field(default_factory=list)  # ATen operators that it computes
    shapes: list[list[int]] = field(default_factory=list)  # of what it reads and writes
    shape: str = ""  # of a product: m × k × n
    window: int = -1  # of attention, in positions, as codegen.py fills it in; -1: none


class Graph(NamedTuple):
    phase: str  # "forward", "backward" or "inference"
    code: str
    kernels: list[Kernel]
    saved: int  # bytes that a forward graph keeps for its backward

    def to_json(self) -> dict[str, Any]:
        kernels = [asdict(kernel) for kernel in self.kernels]
        return {"phase": self.phase, "saved": self.saved, "kernels": kernels}


class _Launched(BaseException):
    """Raised where the generated code of a forward pass would run."""


class _Lowered(NamedTuple):
    """A graph of Inductor's, its code, and what it launches: Kernels, and custom operators."""

    graph: GraphLowering
    code: str
    items: list[Any]


@contextlib.contextmanager
def compiling(run: Callable[[_Lowered], list], counted: bool = True) -> Iterator[list[_Lowered]]:
    """Inside, Inductor writes code and loads none; `run` is called where a graph would run. The list
    grows by every graph that is compiled; unless they are counted, without what they launch."""
    found: list[_Lowered] = []

    class Module:
        """In place of that of the generated code."""

        __file__ = __file__

        def __init__(self, lowered: _Lowered):
            self.call = lambda args: run(lowered)

    def record(graph: GraphLowering) -> Module:
        code, _ = graph.codegen()
        if not counted:
            found.append(_Lowered(graph, "", []))
            return Module(found[-1])
        with V.set_graph_handler(graph):
            found.append(_Lowered(graph, getattr(code, "value", code), _described(graph)))
        _name_and_count(found[-1])
        return Module(found[-1])

    eager_backward = mock.patch.object(
        torch._functorch.config, "force_non_lazy_backward_lowering", True
    )
    with mock.patch.object(GraphLowering, "_compile_to_module", record), eager_backward:
        yield found


def compiled_by(function: Callable, *args: Any, counted: bool = True) -> list[_Lowered]:
    """The graphs that a call compiles: none if an earlier call's serve it. Nothing is run."""

    def stop(_: _Lowered) -> list:
        raise _Launched

    with compiling(stop, counted) as found, contextlib.suppress(_Launched):
        function(*args)
    return found


def graphs_of(function: Callable, *args: Any) -> list[Graph]:
    """The graphs that torch.compile makes of a call on fake tensors: forward, and backward if
    anything wants gradients. Raises whatever the compiler raises."""
    if not isinstance(function, torch.nn.Module):  # a model has compiled parts
        function = torch.compile(function, dynamic=False, fullgraph=True)
    found = compiled_by(function, *args)
    backward = next((lowered.graph for lowered in found if lowered.graph.is_backward), None)
    graphs = []
    for graph, code, items in found:
        phase = "inference" if graph.is_inference else "forward"
        if graph.is_backward:
            phase = "backward"
        saved = _saved(graph, backward) if phase == "forward" and backward else 0
        graphs.append(Graph(phase, code, _followed(items), saved))
    return graphs


# One list for all calls: a graph that an earlier call has compiled writes here too.
_items: list[Any] = []


def number_compiled(run: Callable[[], None]) -> int:
    """How many graphs a function on fake tensors compiles, of those that update in place."""
    with compiling(lambda _: [], counted=False) as found, _own_launches([]):
        run()
    return len(found)


def launches_during(run: Callable[[], None]) -> tuple[list[Kernel], list[str]]:
    """What a function on fake tensors launches, by graphs that give nothing back (they update in
    place) and by our own kernels; and the code of the graphs that it compiled."""
    _items.clear()
    updating = compiling(lambda lowered: _items.extend(lowered.items) or [])
    with updating as found, _own_launches(_items):
        run()
    return _followed(_items), [lowered.code for lowered in found]


def _saved(forward: GraphLowering, backward: GraphLowering) -> int:
    """Bytes of the buffers that the forward hands to the backward; parameters are there anyway."""
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
    """Of each launch of the generated code a Kernel; of each custom operator (Kernel, fx node)."""
    found = []
    nothing = scheduler.NopKernelSchedulerNode
    for node in lowering.scheduler.nodes:
        parts = [part for part in node.get_nodes() if not isinstance(part, nothing)]
        if not parts or isinstance(node, nothing):
            continue
        ours = [part.node for part in parts if part.node is not None]
        origins = [origin for part in ours for origin in part.get_origins()]
        if isinstance(parts[0], scheduler.ExternKernelSchedulerNode):
            found += _extern(parts[0].node, origins)
        else:
            kernel = Kernel("", "generated", _traffic(parts), shapes=_shapes(parts))
            found.append(_placed(kernel, origins))
    return found


def _placed(kernel: Kernel, origins: Iterable[torch.fx.Node]) -> Kernel:
    """Where in the script it comes from, and what it computes."""
    paths, targets = {}, {}
    package = str(Path(torch.__file__).parent)
    for origin in origins:
        targets[str(origin.target)] = None
        trace = origin.meta.get("stack_trace") or ""
        calls = re.findall(r'File "(.+?)", line \d+, in (\S+)\n', trace)
        own = [f"{Path(x).name}:{name}" for x, name in calls if not x.startswith(package)]
        paths[tuple(own)] = None
    kernel.paths = [list(path) for path in paths if path]
    kernel.targets = list(targets)
    return kernel


def _extern(node: ir.ExternKernel, origins: list[torch.fx.Node]) -> list[Any]:
    if isinstance(node, ir.MultiOutput):  # an output of a kernel that is counted
        return []
    target = getattr(node, "op_overload", None)
    name = str(target or getattr(node, "python_kernel_name", None) or type(node).__name__)
    inputs = [x for x in getattr(node, "inputs", []) if hasattr(x, "get_size")]
    kernel = _placed(Kernel(name, "other"), origins)
    kernel.shapes = [_size(x) for x in inputs]
    if product := re.search(r"\b(addmm|baddbmm|bmm|mm|_scaled_mm)\b", name):
        out = _size(node)
        # Scales follow the factors of _scaled_mm; what is added comes before those of addmm.
        left, right = inputs[:2] if product[1] == "_scaled_mm" else inputs[-2:]
        *_, rows, inner = _size(left)
        kernel.kind = "fp8 product" if product[1] == "_scaled_mm" else "product"
        kernel.flops = 2 * math.prod(out) * inner
        kernel.shape = f"{rows} × {inner} × {_size(right)[-1]}"
        kernel.bytes = sum(map(_nbytes, inputs)) + _nbytes(node)
        if product[1] in ("addmm", "baddbmm") and _size(inputs[0]) == out:
            # What is added is copied into the result: read, written, and read again there.
            copy = _placed(Kernel("copy for " + name, "copy", 3 * _nbytes(node)), origins)
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


def _buffer(name: str) -> Any:
    graph = V.graph
    return (
        graph.name_to_buffer.get(name) or graph.graph_inputs.get(name) or graph.constants.get(name)
    )


# -----------------------------------------------------------------------------
# Bytes


def _traffic(parts: list[Any]) -> float:
    """Bytes that a fused kernel reads and writes: not what stays inside."""
    own = {buffer.get_name() for part in parts for buffer in part.get_outputs()}
    inside = {*V.graph.removed_buffers, *getattr(V.graph, "inplaced_to_remove", ())}
    total = 0.0
    for names, omitted in (("reads", own), ("writes", inside)):
        accesses: dict[str, list[MemoryDep]] = {}
        for dep in (dep for part in parts for dep in getattr(part.read_writes, names)):
            if isinstance(dep, MemoryDep) and dep.name not in omitted:
                accesses.setdefault(dep.name, []).append(dep)
        for name, deps in accesses.items():
            buffer = _buffer(name)
            if hasattr(buffer, "get_size"):
                elements = touched(deps, math.prod(_size(buffer)))
                total += elements * buffer.get_dtype().itemsize
    return total


def _shapes(parts: list[Any]) -> list[list[int]]:
    deps = (x for part in parts for x in (*part.read_writes.reads, *part.read_writes.writes))
    sizes = [_size(_buffer(name)) for name in sorted({dep.name for dep in deps})]
    return [size for size in sizes if size]


def touched(accesses: Iterable[MemoryDep], size: int) -> int:
    """How many elements of a buffer of `size` these accesses touch, each counted once. Indices that
    come out of memory count once a look-up; where several accesses may overlap, a sample of their
    outermost rows is compared."""
    looked_up = 0
    direct: dict[tuple, dict[sympy.Symbol, int]] = {}
    for dep in set(accesses):
        ranges = {var: int(extent) for var, extent in zip(dep.var_names, dep.size)}
        used = dep.index.free_symbols
        if not used <= set(ranges):
            looked_up += math.prod(ranges.values())
            continue
        ranges = {var: extent for var, extent in ranges.items() if var in used}  # others repeat
        direct[dep.index, tuple(ranges.items())] = ranges
    if not direct:
        return looked_up
    if len(direct) == 1:
        (((index, _), ranges),) = direct.items()
        if not index.atoms(sympy.Function):
            return min(size, math.prod(ranges.values())) + looked_up
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
    grids = np.meshgrid(*map(np.arange, ranges.values()), indexing="ij", sparse=True)
    return np.unique(_evaluated(index, dict(zip(ranges, grids))))


def _evaluated(index: sympy.Expr, values: dict[sympy.Symbol, np.ndarray]) -> Any:
    if index in values:
        return values[index]
    if index.is_Integer:
        return int(index)
    return INDEXING[type(index).__name__](*(_evaluated(arg, values) for arg in index.args))


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
    """Name Inductor's kernels by the calls of the code, and count what those execute."""
    sources, calls = written_kernels(lowered.code)
    ours = [x for x in lowered.items if isinstance(x, Kernel) and x.kind == "generated"]
    if not sources:  # code for a CPU
        return
    if len(calls) != len(ours):
        raise RuntimeError(f"{len(calls)} launches in the generated code, {len(ours)} fused nodes")
    for kernel, (name, args) in zip(ours, calls):
        kernel.name = name
        source = sources[name].replace(name, "generated_kernel")
        kernel.instructions, kernel.special = executed_by(source, args)


def written_kernels(code: str) -> tuple[dict[str, str], list[tuple[str, tuple]]]:
    """Of generated code: its Triton kernels' sources by name, and its launches, (name, arguments),
    in order; of the arguments the numbers, None for others."""
    sources, calls = {}, []
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Assign):
            if ast.unparse(node.value).startswith("async_compile.triton("):
                sources[node.targets[0].id] = node.value.args[1].value
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if node.func.attr == "run":
                args = (arg.value if isinstance(arg, ast.Constant) else None for arg in node.args)
                calls.append((node.lineno, ast.unparse(node.func.value), tuple(args)))
    calls.sort(key=lambda call: call[0])
    return sources, [(name, args) for _, name, args in calls if name in sources]


@cache
def executed_by(source: str, args: tuple) -> tuple[float, float]:
    """Warp instructions, and special functions of threads, of a launch of a kernel that Inductor
    wrote; of the configurations it would time, that with the fewest."""
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

    meta, warps = tuner.triton_meta, config.num_warps
    signature = meta["signature"]
    given = meta["constants"] | config.kwargs
    names = {
        kind: [x for x in signature if (signature[x] == "constexpr") == kind] for kind in (0, 1)
    }
    constants = {name: given.get(name) for name in names[True]}
    options = {"num_warps": warps, "num_stages": config.num_stages, "enable_fp_fusion": True}
    attrs = meta["configs"][0]
    program = ASTSource(tuner.fn, dict(signature), constexprs=constants, attrs=attrs)
    binary = triton.compile(program, target=GPUTarget("cuda", 90, 32), options=options)
    numbers = constants | dict(zip(names[False], args))
    settings = config.kwargs | {"num_warps": warps}
    grid = GridExpr.from_meta(tuner.inductor_meta, settings, mode="python")
    scope = dict(numbers)
    exec("\n".join(grid.prefix), scope)  # Inductor's own expressions
    sizes = (eval(str(x), scope) for x in (grid.x_grid, grid.y_grid, grid.z_grid))
    programs = math.prod(sizes)
    trips = 1
    if "R0_BLOCK" in config.kwargs:
        trips = math.ceil(numbers["r0_numel"] / config.kwargs["R0_BLOCK"])
    elif "RSPLIT_SIZE" in numbers:
        trips = math.ceil(numbers["RSPLIT_SIZE"] / numbers.get("XBLOCK", 1))
    instructions, special = per_warp(binary.asm["cubin"], trips)
    return programs * warps * instructions, 32 * programs * warps * special


def per_warp(cubin: bytes, trips: float) -> tuple[float, float]:
    """Instructions that a warp executes, and special functions among them, with so many rounds of
    each innermost loop."""
    instructions, loops = kernels.disassembled(cubin)
    names = [name for name, _ in instructions]
    times = [1.0] * len(names)
    for first, last in loops:
        if kernels.is_innermost((first, last), loops):
            times[first : last + 1] = [trips] * (last + 1 - first)
    end = max((i for i, name in enumerate(names) if name == "EXIT"), default=len(names))
    counted = list(zip(times, names))[: end + 1]  # padding follows
    total = sum(n for n, name in counted if name != "NOP")
    return total, sum(n for n, name in counted if name.startswith("MUFU"))


# -----------------------------------------------------------------------------
# Custom operators


def _followed(items: list[Any]) -> list[Kernel]:
    """Kernels are themselves, our launches are counted, operators become what they launch."""
    found: list[Kernel] = []
    for item in items:
        if isinstance(item, Kernel):
            found.append(item)
        elif isinstance(item, kernels.Launch):
            found.append(launched(item))
        elif "attn" in item[0].name or "attention" in item[0].name:
            found.append(_attention(*item))
        else:
            kernel, origin = item
            args = torch.fx.map_arg((origin.args, origin.kwargs), lambda x: x.meta["val"])
            for inner in launches_of(origin.target, *_on_meta(args)):
                place = dict(paths=kernel.paths, targets=kernel.targets)
                found.append(replace(inner, operator=kernel.name, **place))
    return found


def _on_meta(args: Any) -> Any:
    """The same arguments, tensors without memory in place of fake ones."""

    def tensor(x: Any) -> Any:
        if not isinstance(x, torch.Tensor) or x.device.type == "meta":
            return x
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")

    return tree_map(tensor, args)


@contextlib.contextmanager
def _own_launches(items: list[Any]) -> Iterator[None]:
    """Inside, Triton kernels are collected in place of being launched."""

    def without_memory(arg: Any) -> Any:
        if isinstance(arg, TensorDescriptor):
            return replace(arg, base=_on_meta(arg.base))
        return _on_meta(arg)

    def record(kernel: JITFunction, *args: Any, grid: Any, warmup: bool = False, **options: Any):
        items.append(kernels.Launch(kernel, grid, tuple(map(without_memory, args)), options))

    with mock.patch.object(JITFunction, "run", record):
        yield


class _Calls(TorchDispatchMode):
    """Collects the ATen operators that would each be a kernel of their own."""

    NO_KERNEL = ("aten::empty", "aten::new_empty", "aten::_unsafe_view", "aten::detach")

    def __init__(self, found: list[Kernel]):
        super().__init__()
        self.found = found

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        if function.is_view or function.namespace != "aten":
            return result
        if function.name().startswith(self.NO_KERNEL):
            return result
        leaves = tree_leaves(result if "embedding" in function.name() else (args, kwargs, result))
        tensors = [x for x in leaves if isinstance(x, torch.Tensor)]
        kernel = Kernel(str(function), "other", sum(x.nbytes for x in tensors))
        kernel.shapes = [list(x.shape) for x in tensors]
        if (flops := flop_registry.get(function.overloadpacket)) is not None:
            kernel.kind = "fp8 product" if "_scaled_mm" in kernel.name else "product"
            kernel.flops = flops(*args, **kwargs, out_val=result)
            kernel.shape = " × ".join(map(str, (*args[0].shape, args[1].shape[-1])))
        self.found.append(kernel)
        return result


class _Eager(_Calls):
    """The same, and what custom operators launch."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.name() in OPDEFS:
            self.found += launches_of(function, *_on_meta((args, kwargs or {})))
        return super().__torch_dispatch__(function, types, args, kwargs)


def launched_eagerly(run: Callable[[], None]) -> list[Kernel]:
    """What a function on fake tensors launches outside of any graph."""
    found: list[Kernel] = []
    with _Eager(found):
        run()
    return found


def launches_of(operator: Any, args: tuple, kwargs: dict[str, Any]) -> list[Kernel]:
    """What a custom operator would launch for these arguments, on meta tensors."""
    items: list[Any] = []
    definition = OPDEFS.get(operator._schema.name)
    run = operator if definition is None else definition._init_fn  # PyTorch's own, or ours
    with tk.kernels_of("cuda"), _own_launches(items), _Calls(items):
        run(*args, **kwargs)
    return _followed(items)


class Access(NamedTuple):
    """A load or a store in a Triton kernel."""

    argument: str
    elements: int  # of its tile
    store: bool
    loop: int  # the innermost loop around it, by its place in the kernel; -1: none


def launched(launch: kernels.Launch) -> Kernel:
    """A launch of a Triton kernel of ours: each tensor that it reads and each that it writes counts
    once, or what its tiles touch if that is less; reading back what it wrote is left to L2."""
    resources = kernels.compiled(launch, 90)
    accesses, loops, has_dot = accesses_of(resources.ttir)
    args = zip(launch.kernel.arg_names, launch.args)
    tensors = {name: getattr(arg, "base", arg) for name, arg in args}
    if (
        launch.kernel is tk.scatter_kernel and launch.options["ADD"]
    ):  # it touches no more rows than there are positions
        tensors["out"] = tensors["out"][: len(tensors["grad"])]
    programs, warps = math.prod(launch.grid), launch.options["num_warps"]
    kernel = Kernel(launch.kernel.fn.__name__, "kernel", programs=programs)
    kernel.shapes = [list(x.shape) for x in tensors.values() if isinstance(x, torch.Tensor)]
    kernel.bytes = _launched_bytes(accesses, tensors, programs)
    if has_dot:
        sizes = (x.element_size() for x in tensors.values() if isinstance(x, torch.Tensor))
        kernel.kind = "fp8 kernel" if min(sizes) == 1 else "kernel"
        kernel.flops = _dot_operations(accesses, tensors, programs)
        return kernel
    passes = [(per_warp(resources.cubin, 1), programs)]
    if loops:
        passes = _passes(resources.cubin, accesses, loops, tensors)
    for (instructions, special), times in passes:
        kernel.instructions += times * warps * instructions
        kernel.special += 32 * times * warps * special
    return kernel


def _launched_bytes(accesses: list[Access], tensors: dict[str, Any], programs: int) -> float:
    total = 0.0
    for tensor in {id(tensors[x.argument]): tensors[x.argument] for x in accesses}.values():
        own = [access for access in accesses if tensors[access.argument] is tensor]
        for store in (False, True):
            if not store and own[0].store:  # what a program has written it reads back from L2
                continue
            alike = [access for access in own if access.store == store]
            size = tensor.numel()
            if all(access.loop < 0 for access in alike):
                size = min(size, programs * sum(access.elements for access in alike))
            total += size * tensor.element_size()
    return total


def _dot_operations(accesses: list[Access], tensors: dict[str, Any], programs: int) -> float:
    """2 m n k of a product a (…, m, k) · b (…, k, n) → c (…, m, n), from the sizes: |a| |b| / |c| is
    k² for each matrix. Where a program computes one tile of c, only as many as there are programs."""
    loads = [x for x in accesses if not x.store and x.elements > 1 and x.loop >= 0]
    operands = [tensors[name].numel() for name in dict.fromkeys(x.argument for x in loads)][:2]
    stored = [access for access in accesses if access.store]
    result = tensors[stored[0].argument]
    batch = result.numel() // math.prod(result.shape[-2:])
    depth = math.sqrt(operands[0] * operands[-1] / result.numel() / batch)
    computed = result.numel()
    if all(access.loop < 0 for access in stored):
        computed = min(computed, programs * max(access.elements for access in stored))
    return 2 * computed * depth


def _passes(
    cubin: bytes, accesses: list[Access], loops: list[int], tensors: dict[str, Any]
) -> Iterator[tuple[tuple[int, int], float]]:
    """Of each innermost loop that walks a tensor tile by tile: its instructions and the special
    functions among them; and how often all programs go round it."""
    bodies = kernels.innermost_loops(cubin)
    walks = []
    for loop in loops:
        tiles = Counter()  # a round may take several of a tensor
        for access in accesses:
            if access.loop == loop and access.elements > 1:
                tiles[access.argument, access.store] += access.elements
        times = [tensors[name].numel() / size for (name, _), size in tiles.items()]
        walks.append(max(times, default=0))
    if len(bodies) != len(walks):  # the compiler has unrolled the small ones
        walks = [times for times in walks if times]
        by_length = sorted(range(len(bodies)), key=lambda i: -bodies[i].total())
        bodies = [bodies[i] for i in sorted(by_length[: len(walks)])]
    for body, times in zip(bodies, walks):
        special = sum(n for name, n in body.items() if name.startswith("MUFU"))
        yield (body.total(), special), times


def accesses_of(ttir: str) -> tuple[list[Access], list[int], bool]:
    """The loads and stores of a kernel in Triton's own language, its innermost loops, and whether
    it multiplies matrices."""
    accesses, has_dot, count = [], False, 0
    pointers: dict[str, list[str]] = {}
    around: list[int | None] = []  # the blocks that are open: a loop's number, None for others
    outer: set[int] = set()
    value = r"(%\w+) = tt\.(?:splat|addptr|broadcast|expand_dims|bitcast|reshape) (%\w+)"
    choice = r"(%\w+) = arith.select %\w+, (%\w+), (%\w+) : .*!tt.ptr"
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
        carried = re.findall(r"(%\w+) = (%\w+)", line.partition("iter_args(")[2])
        pointers.update((name, [first]) for name, first in carried)
        if found := re.match(choice, line):  # some programs one, some the other
            pointers[found[1]] = [found[2], found[3]]
        if found := re.match(value, line):
            pointers[found[1]] = [found[2]]
        has_dot |= "= tt.dot" in line
        if found := re.search(r"tt\.(descriptor_)?(load|store) (%\w+).*", line):
            names = [found[3]]
            while any(name in pointers for name in names):
                names = [root for name in names for root in pointers.get(name, [name])]
            types = re.findall(r"(?:tensor|tensordesc)<((?:\d+x)+)", found[0])
            tile = math.prod(map(int, types[-1].split("x")[:-1])) if types else 1
            accesses += [Access(x[1:], tile, found[2] == "store", inside) for x in names]
    return accesses, [loop for loop in range(count) if loop not in outer], has_dot


def _attention(kernel: Kernel, origin: torch.fx.Node) -> Kernel:
    """Queries, keys and values of P positions, H heads, D dims."""
    values = [arg.meta["val"] for arg in origin.args if isinstance(arg, torch.fx.Node)]
    tensors = [x for x in values if isinstance(x, torch.Tensor)]
    backward = "backward" in kernel.name
    kernel.kind = "attention backward" if backward else "attention"
    kernel.bytes = sum(x.nbytes for x in tensors) * (1.5 if backward else 4 / 3)
    kernel.shapes = [list(x.shape) for x in tensors]
    return kernel

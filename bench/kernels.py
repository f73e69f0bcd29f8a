"""Every GPU kernel at the sizes of the record preset: what it must do, what it was compiled to, and on a GPU how fast it is.

    python bench/kernels.py              # one table; the measured columns appear on a CUDA machine
    python bench/kernels.py transpose    # only kernels whose name holds this, or one of several such parts
    python bench/kernels.py loss --loops # instead, the instructions of their innermost loops on an H100

Without a GPU the kernels are compiled all the same, for an H100, by the compiler inside Triton; nothing is run.
"""

import re
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from launch.environment import go_on

if __name__ == "__main__":
    go_on("requirements.txt", "torch", "triton")


from launch import others_code
from launch.console import until_reader_leaves  # before PyTorch, whose threads launch tells how to wait

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

import attention
import triton_kernels as tk
from bench.communication import model_parameters, rows_of
from bench.settings import largest_batch
from train_gpt import FP8_GRAD_SCALE, FP8_X_SCALE, PARAM_TABLE, VALUE_LAYERS, Hyperparameters

BF16, FP32, E4M3, E5M2 = torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.float8_e5m2

# Operations a second: matrix units in bf16 (dense), and special functions (exponential, reciprocal: 16 a clock and processor,
# 132 processors at 1.98 GHz). An H200 has the same, and faster memory.
MATRIX_LIMIT, SPECIAL_LIMIT = 989e12, 16 * 132 * 1.98e9
MEMORY_LIMITS = {"H100": 3.35e12, "H200": 4.8e12}  # bytes a second

# Chips by compute capability: what the launches ask for, see triton_kernels.chip.
CHIPS = {80: tk.Chip(108, 163 * 1024), 89: tk.Chip(128, 99 * 1024), 90: tk.H100, 100: tk.Chip(148, tk.H100.shared_memory)}


class Launch(NamedTuple):
    kernel: triton.JITFunction
    grid: tuple[int, ...]
    args: tuple
    options: dict[str, Any]


class Resources(NamedTuple):
    """What a launch was compiled to."""

    registers: int  # a thread
    spilled: int  # bytes of stack a thread
    shared: int  # bytes of shared memory a block
    ttir: str
    ptx: str
    cubin: bytes


@contextmanager
def recorded_launches(capability: int) -> Iterator[list[Launch]]:
    """What the kernels would launch on a chip of this compute capability, in place of launching it."""
    launches: list[Launch] = []

    def record(kernel: triton.JITFunction, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
        launches.append(Launch(kernel, grid, args, options | tk.OPTIONS))

    with (
        tk.kernels_of("cuda"),
        mock.patch.object(tk, "launch", record),
        mock.patch.object(tk, "chip", lambda device: CHIPS[capability]),
    ):
        yield launches


class _Target:
    """A driver for compiling alone. Each chip is a device of its own, so that Triton keeps their binaries apart."""

    def __init__(self, capability: int):
        self.capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> str:
        return f"compute capability {self.capability}"

    def get_current_stream(self, device: str) -> int:
        return 0


def compiled(launch: Launch, capability: int) -> Resources:
    """Compile a launch by Triton's own way to a launch, which settles types, divisibilities and options, but don't run it."""
    before = driver._active
    driver.set_active(_Target(capability))
    try:
        binary = launch.kernel.warmup(*launch.args, grid=launch.grid, **launch.options)
    finally:
        driver.set_active(before)  # None: the machine's own, when somebody asks for it
    cubin = binary.asm["cubin"]
    usage = dumped(cubin, "cuobjdump", "-res-usage")
    number = {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}
    spilled = number["STACK"] + number["LOCAL"]
    return Resources(number["REG"], spilled, binary.metadata.shared, binary.asm["ttir"], binary.asm["ptx"], cubin)


def dumped(cubin: bytes, tool: str, *options: str) -> str:
    """What a tool inside Triton prints about a binary."""
    path = Path(triton.__file__).with_name("backends") / "nvidia" / "bin" / tool
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([path, *options, file.name], capture_output=True, text=True, check=True).stdout


def disassembled(cubin: bytes) -> tuple[list[tuple[str, str]], list[tuple[int, int]]]:
    """The instructions of a binary, (name, operands), in its order; and the first and last of each of its loops."""
    instructions, labels = [], {}
    for line in dumped(cubin, "nvdisasm", "-ndf").splitlines():  # without data flow, a third faster
        if label := re.match(r"(\.L_\w+):", line):
            labels[label[1]] = len(instructions)
        elif found := re.search(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?(\S+)(.*);", line):
            instructions.append(found.groups())
    jumps = [(i, re.search(r"`\((\.L_\w+)\)", rest)) for i, (name, rest) in enumerate(instructions) if name.startswith("BRA")]
    return instructions, [(labels[to[1]], i) for i, to in jumps if to and labels[to[1]] < i]


def innermost_loops(cubin: bytes) -> list[Counter]:
    """The instructions of each loop that holds no other, by name, in the order of the binary; without a loop, all."""
    instructions, spans = disassembled(cubin)
    spans = spans or [(0, len(instructions) - 1)]
    inner = [(a, z) for a, z in spans if not any(a <= b and y <= z and (a, z) != (b, y) for b, y in spans)]
    return [Counter(name for name, _ in instructions[a : z + 1]) for a, z in inner]


# -----------------------------------------------------------------------------
# The cases


class Case(NamedTuple):
    name: str
    shape: str
    inputs: Callable[[Callable], tuple]  # of new(shape, dtype): a tensor on the device at hand
    run: Callable  # of the inputs: what launches the kernel
    torch: tuple[Callable, ...]  # of the same inputs, called inside kernels_of("cpu"): PyTorch's ways of doing the same
    operations: float
    must: float  # bytes: each input read once, each output written once
    moved: float  # bytes to and from memory, if L2 keeps what the kernel counts on
    matrix: bool = False  # operations are those of matrix units, else special functions
    fp8: bool = False


def _cases() -> Iterator[Case]:
    h = Hyperparameters()
    rows = {label: rows_of(parameter, PARAM_TABLE[label]).shape for label, parameter in model_parameters(h).items()}
    # The banks of one rank of 8: 5 matrices of 768 x 768, 3 of 3072 x 768.
    attn, mlp = ((-(-matrices // 8), *shape) for matrices, *shape in (rows["attn"], rows["mlp"]))
    (n, dim, _), (tall, hidden, _) = attn, mlp
    square = 2 * n * dim * dim
    triangle = (dim // 128) * (dim // 128 + 1) / 2 / (dim // 128) ** 2  # the share of the tiles that are computed
    small = 2 * tall * dim * dim
    yield Case(
        "XXT", f"{attn}", lambda new: (new(attn),), lambda X: tk.XXT(X, torch.empty_like(X)), (lambda X: X @ X.mT,),
        2 * n * dim**3 * triangle, 2 * square, 2 * square, matrix=True,
    )  # fmt: skip
    yield Case(
        "XTX", f"{mlp}", lambda new: (new(mlp),), lambda X: tk.XTX(X, X.new_empty(tall, dim, dim)),
        (lambda X: X.mT @ X,),
        2 * tall * dim * dim * hidden * triangle, 2 * tall * hidden * dim + small, 2 * tall * hidden * dim + small, matrix=True,
    )  # fmt: skip
    yield Case(
        "ba_plus_cAA", f"{attn}", lambda new: (new(attn),),
        lambda A: tk.ba_plus_cAA(A, 0.5, 0.1, torch.empty_like(A)),
        (lambda A: torch.baddbmm(A, A, A.mT, beta=0.5, alpha=0.1),),
        2 * n * dim**3 * triangle, 2 * square, 2 * square, matrix=True,
    )  # fmt: skip
    yield Case(
        "aX_plus_BX", f"{attn}", lambda new: (new(attn), new(attn)),
        lambda X, B: tk.launch_product(B, X, X, torch.empty_like(X), 1.0, 2.0),
        (lambda X, B: torch.baddbmm(X, B, X, beta=2.0),),
        2 * n * dim**3, 3 * square, 3 * square, matrix=True,
    )  # fmt: skip
    yield Case(
        "aX_plus_XB", f"{mlp}", lambda new: (new(mlp), new((tall, dim, dim))),
        lambda X, B: tk.launch_product(X, B, X, torch.empty_like(X), 1.0, 2.0),
        (lambda X, B: torch.baddbmm(X, X, B, beta=2.0),),
        2 * tall * dim * dim * hidden, 4 * tall * hidden * dim + small, 4 * tall * hidden * dim + small, matrix=True,
    )  # fmt: skip

    # A micro-batch of the last stage.
    T, V = largest_batch(h) // h.micro_batches, rows["lm_head"][1]
    flops, weights = 2 * T * dim * hidden, 2 * dim * hidden
    forward, backward = weights + 2 * T * (dim + hidden), weights + 2 * T * (dim + 2 * hidden)
    heads, D = h.num_heads, h.head_dim
    table, rstds = 2 * D * T, 4 * 2 * heads * T

    def separate(qkv: Tensor, table: Tensor, paired: bool, offset: bool) -> tuple:
        return attention.norm_and_rotate_qk(qkv, table, paired, offset)

    for kind, paired, offset in (("", False, False), (", paired", True, False), (", offset", False, True)):
        moved = table * (1 + paired) + rstds
        yield Case(
            f"norm_rotate{kind}", f"{(T, 3 * heads, D)}",
            lambda new, p=paired, o=offset: (new((T, 3 * heads, D)), new(((1 + p) * T, D // 2, 2)), p, o),
            attention.launch_norm_rotate, (separate, torch.compile(separate)),
            0, 2 * 4 * T * dim + moved, 2 * 4 * T * dim + moved,
        )  # fmt: skip
        yield Case(
            f"norm_rotate_backward{kind}", f"{(T, 3 * heads, D)}",
            lambda new, p=paired, o=offset: (
                *(new((T, heads, D)) for _ in range(4)), new((T + o, heads, D)), new((2 * heads, T), FP32).abs(),
                new(((1 + p) * T, D // 2, 2)), p, o,
            ),
            attention.launch_norm_rotate_backward, (), 0, 2 * 8 * T * dim + moved, 2 * 8 * T * dim + moved,
        )  # fmt: skip
    unfused = lambda x, w: torch.relu(x @ w.mT).square()
    unfused_backward = lambda g, w, a: (g @ w.mT) * (2 * a.sqrt())

    def tiles_apart(*inputs: Tensor | None) -> Tensor:
        """As launched before tiles and steps were one loop: which is faster, a GPU must say."""
        apart = dict(FLATTEN=False, num_stages=4)
        with mock.patch.dict(tk.LARGE_TILES, apart), mock.patch.dict(tk.LARGE_TILES_BACKWARD, apart):
            return tk.launch_relu_squared(*inputs)

    for note, run in (("", tk.launch_relu_squared), (", tiles apart", tiles_apart)):
        yield Case(
            f"relu_squared{note}", f"{(T, dim)} x {(hidden, dim)}", lambda new: (new((T, dim)), new((hidden, dim))),
            lambda x, w, run=run: run(x, w, None), (unfused, torch.compile(unfused)), flops, forward, forward, matrix=True,
        )  # fmt: skip
        yield Case(
            f"relu_squared_backward{note}", f"{(T, dim)} x {(hidden, dim)}",
            lambda new: (new((T, dim)), new((hidden, dim)), new((T, hidden)).abs()),
            run, (unfused_backward, torch.compile(unfused_backward)), flops, backward, backward, matrix=True,
        )  # fmt: skip

    def logits(new: Callable, tokens: int = T) -> tuple:
        return new((tokens, V)), new((tokens,), torch.int64), new((3,), FP32).abs()

    def plain(logits: Tensor, targets: Tensor, weights: Tensor) -> tuple:
        logits = logits.detach().requires_grad_()
        loss = tk.softcapped_cross_entropy(logits, targets, weights)
        (grad,) = torch.autograd.grad(loss, logits)
        return loss, *tk.quantize_fp8_both(grad, FP8_GRAD_SCALE, E5M2)

    partial = 2 * 4 * T * triton.cdiv(V, tk.LOSS["WIDTH"])
    yield Case(
        "loss_and_fp8_gradient", f"{(T, V)}", logits,
        lambda x, t, w: tk.loss_and_fp8_gradient(x, t, w, FP8_GRAD_SCALE, E5M2), (torch.compile(plain),),
        5 * T * V, 4 * T * V, 4 * T * V + partial, fp8=True,
    )  # fmt: skip
    loss = tk.softcapped_cross_entropy
    yield Case(
        "cross_entropy", f"{(T, V)}", logits, tk.launch_loss, (loss, torch.compile(loss)),
        2 * T * V, 2 * T * V, 2 * T * V + partial,
    )  # fmt: skip
    yield Case(
        "cross_entropy_backward", f"{(T, V)}", lambda new: (*logits(new), new((T,), FP32).abs() + 12),
        lambda x, t, w, lse: tk.launch_loss(x, t, w, lse, torch.empty_like(x)), (), 3 * T * V, 4 * T * V, 4 * T * V,
    )  # fmt: skip
    both = lambda x: tk.quantize_fp8_both(x, FP8_X_SCALE, E4M3)
    for name, shape in (("quantize_fp8_both, x", (T, dim)), ("quantize_fp8_both, w", (dim, V))):
        size = 4 * shape[0] * shape[1]
        yield Case(
            name, f"{shape}", lambda new, shape=shape: (new(shape),),
            both, (both, torch.compile(both)), 0, size, size, fp8=True,
        )  # fmt: skip

    def gradient_of_a_lookup(new: Callable, tokens: int, rows: int, width: int) -> tuple:
        ids = new((tokens,), torch.int32)
        return new((tokens, width)), ids, *tk.token_runs(ids, rows)

    first, bigrams = T // 3, Hyperparameters().bigram_rows  # the first stage's micro-batch
    tables = [(f"{tokens} tokens", tokens, V, dim) for tokens in (first, T)]
    tables += [("value tables", first, V, VALUE_LAYERS * dim), ("bigrams", first, bigrams, dim)]
    for what, tokens, rows, width in tables:
        size = 2 * (tokens + rows) * width + 8 * tokens + 4 * rows
        plain_scatter = lambda grad, ids, *_, rows=rows: torch.ops.aten.embedding_dense_backward(grad, ids, rows, -1, False)
        yield Case(
            f"scatter, {what}", f"{(tokens, width)} into {(rows, width)}",
            lambda new, sizes=(tokens, rows, width): gradient_of_a_lookup(new, *sizes),
            lambda grad, ids, *runs: tk.launch_scatter(grad, *runs), (plain_scatter, torch.compile(plain_scatter)),
            0, size, size,
        )  # fmt: skip
    for where, alone in (("beside collectives", False), ("alone", True)):
        for function, rows, cols, moves in ((tk.transpose_add, V, dim, 6), (tk.transpose_copy, dim, V, 4)):
            run = lambda s, t, function=function, alone=alone: function(s, t, alone)
            yield Case(
                f"{function.__name__}, {where}", f"{(rows, cols)} into {(cols, rows)}",
                lambda new, rows=rows, cols=cols: (new((rows, cols)), new((cols, rows))), run, (run, torch.compile(run)),
                0, moves * V * dim, moves * V * dim,
            )  # fmt: skip


CASES = {case.name: case for case in _cases()}


def launch_of(case: Case, capability: int) -> Launch:
    """What the case launches at the record preset's size. No memory is taken: its tensors are shapes alone."""
    with recorded_launches(capability) as launches:
        case.run(*case.inputs(lambda shape, dtype=BF16: torch.empty(shape, device="meta", dtype=dtype)))
    (launch,) = launches
    return launch


# -----------------------------------------------------------------------------
# The table


def limit(case: Case, memory: float) -> float:
    """Seconds that no kernel of this work can be below."""
    return max(case.operations / (MATRIX_LIMIT if case.matrix else SPECIAL_LIMIT), case.must / memory)


def static_row(case: Case) -> list[str]:
    resources = compiled(launch_of(case, 90), 90)
    operations = f"{case.operations / 1e9:.3g} G{'' if case.matrix else ' special'}" if case.operations else ""
    times = [f"{1e6 * limit(case, memory):.3g}" for memory in MEMORY_LIMITS.values()]
    return [
        case.name, case.shape, operations, f"{case.must / 1e6:.4g}", f"{case.moved / 1e6:.4g}", *times,
        str(resources.registers), str(resources.spilled), str(resources.shared),
    ]  # fmt: skip


def random_input(shape: tuple[int, ...], dtype: torch.dtype = BF16) -> Tensor:
    if dtype == torch.int64:
        return torch.randint(50257, shape, device="cuda")
    if dtype == torch.int32:  # tokens as frequent as words: the n-th in 1/n, the first 6 %
        return (50257 ** torch.rand(shape, device="cuda") - 1).int()
    return torch.randn(shape, device="cuda").to(dtype) if len(shape) < 2 else torch.randn(shape, device="cuda", dtype=dtype)


def median_time(function: Callable, inputs: list[tuple], repeats: int = 30) -> float:
    """Seconds of a call, the median over repeats that go round the inputs, so that none finds its own in the cache."""
    for i in range(3):
        function(*inputs[i % len(inputs)])
    times = []
    for i in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(1_000_000)  # the launch happens meanwhile, so that only the kernel is measured
        start.record()
        function(*inputs[i % len(inputs)])
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times)


def measured_row(case: Case, memory: float) -> list[str]:
    copies = max(1, min(8, int(200e6 / case.must) + 1))  # together four times an H100's L2
    inputs = [case.inputs(random_input) for _ in range(copies)]
    with tk.kernels_of("cuda"):
        seconds = median_time(case.run, inputs)
    with tk.kernels_of("cpu"):  # the references
        others = [median_time(function, inputs) for function in case.torch]
    ratio = f"{min(others) / seconds:.2f}" if others else ""
    return [f"{1e6 * seconds:.4g}", f"{limit(case, memory) / seconds:.0%}", ratio]


def print_loops(cases: list[Case]) -> None:
    print("| kernel | instructions of a loop | of them |\n|---|---|---|")
    for case in cases:
        for loop in innermost_loops(compiled(launch_of(case, 90), 90).cubin):
            kinds = ", ".join(f"{count} {name}" for name, count in loop.most_common(8))
            print(f"| {case.name} | {loop.total()} | {kinds} |", flush=True)


def main() -> None:
    options = [argument for argument in sys.argv[1:] if argument.startswith("--")]
    wanted = [argument for argument in sys.argv[1:] if argument not in options] or [""]
    if "--help" in options:
        return print(__doc__)
    if set(options) - {"--loops"}:
        print(f"bench/kernels.py: error: no option {', '.join(options)}; there is --loops, and parts of kernels' names", file=sys.stderr)
        sys.exit(2)
    if absent := [part for part in wanted if not any(part in name for name in CASES)]:
        sys.exit(f"bench/kernels.py: no kernel's name holds {absent[0]!r}: {', '.join(CASES)}")
    cases = [case for name, case in CASES.items() if any(part in name for part in wanted)]
    if options:
        return print_loops(cases)
    if fault := others_code(make=True):
        sys.exit(f"bench/kernels.py: error: {fault}")
    header = ["kernel", "at the record preset", "operations", "must move, MB", "moves, MB"]
    header += [f"limit {name}, µs" for name in MEMORY_LIMITS] + ["registers", "spilled", "shared memory, bytes"]
    gpu = torch.cuda.is_available()
    if gpu:
        name = torch.cuda.get_device_name()
        memory = MEMORY_LIMITS["H200" if "H200" in name else "H100"]
        header += [f"measured on {name}, µs", "of the limit", "times faster than PyTorch"]
    print("| " + " | ".join(header) + " |\n|" + "---|" * len(header))
    for case in cases:
        row = static_row(case) + (measured_row(case, memory) if gpu else [])
        print("| " + " | ".join(row) + " |", flush=True)


if __name__ == "__main__":
    with until_reader_leaves():
        main()

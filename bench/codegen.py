"""The code that torch.compile generates for an H100, and what it should cost, without a GPU.

    ./run.sh bench/codegen.py                                 # forward and backward, by group
    ./run.sh bench/codegen.py ideas/idea.py --kernels         # another script, kernel by kernel
    ./run.sh bench/codegen.py --optimizer --world_size=1,8    # updates, and the bytes they send
    ./run.sh bench/codegen.py --output=FILE --save_code=FOLDER    # all counts; the generated code
    ./run.sh bench/codegen.py --warm_up                       # the graphs of a run's warm-up

Inductor compiles the record preset for a fake H100 (fake_gpu.py) and stops before anything is
launched. What it would launch is counted: bytes and instructions of each kernel it wrote, operations
of each matmul, and of each custom operator what that launches. A kernel's predicted time is the
longest of its bytes, its instructions and 2.5 µs; a matmul's that of its operations at a rate.
Kernels are grouped by the functions of the script that they come from.

Good for differences between two scripts. Absolute times may be off by 30 %: it knows nothing of
caches, clocks, or what runs side by side. It needs g++ and the Triton that the GPU's PyTorch pins.
"""

import argparse
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

# Nothing here may import torch before fake_gpu has been installed.
from bench.settings import markdown, model_of, numbers, synthetic

# -----------------------------------------------------------------------------
# An H100, as kernels find it: limits that they reach, not those of the data sheet

MEMORY = 2.9e12  # bytes a second, of 3.35
PROCESSORS = 132
ISSUE = PROCESSORS * 4 * 1.7e9  # warp instructions a second of our kernels: 4 slots a processor
ISSUE_GENERATED = 0.5 * ISSUE  # of Inductor's, whose warps wait for memory: 2 of 4
SPECIAL = 16 * PROCESSORS * 1.98e9  # special functions a second
LAUNCH = 2.5e-6  # seconds, the shortest kernel
TINY_PRODUCT = 5e-6  # seconds, the shortest matmul
GAP = 1e-6  # seconds between two kernels
RATES = {  # operations a second
    "product": 620e12,  # cuBLAS, bf16
    "kernel": 540e12,  # the MLP's, Triton, bf16
    # Its up-projection. Assumed: of the 345 µs that it took in bf16 for 49,152 tokens (records/
    # 2026-11-26), those of the matmul halve, 234 at 989 TFLOP/s; the rest stays.
    "fp8 kernel": 1000e12,
    "fp8 product, forward": 1000e12,  # with fast accumulation
    "fp8 product": 850e12,
    "attention": 450e12,  # FlashAttention 3
    "attention backward": 330e12,
}
DOCUMENT, LONGEST = 700, 2048  # tokens of FineWeb's mean document, and of the longest in training
TILE = 96  # keys beyond those of its window that a query pays for, as attention works by tiles


# -----------------------------------------------------------------------------
# Groups: what a kernel does, in words of the model


def functions(kernel: dict) -> set[str]:
    return {call.rpartition(":")[2] for path in kernel["paths"] for call in path}


def on_one_path(kernel: dict, *names: str) -> bool:
    """Whether some operation of the kernel is computed inside all of these functions."""
    paths = [{call.rpartition(":")[2] for call in path} for path in kernel["paths"]]
    return any(set(names) <= path for path in paths)


def computes(kernel: dict, *words: str) -> bool:
    names = [*kernel["targets"], kernel["name"], kernel["operator"]]
    return any(word in name for word in words for name in names)


def has_tokens(kernel: dict, tokens: int) -> bool:
    sizes = [size for shape in kernel["shapes"] for size in shape if size]
    return any(size % tokens == 0 for size in sizes)


def is_table(kernel: dict, tokens: int) -> bool:
    if computes(kernel, "embedding", "index_put", "scatter_kernel"):
        return True
    large = max(map(max, kernel["shapes"])) > 50000
    return large and kernel["kind"] == "generated" and not has_tokens(kernel, tokens)


# The script's functions that the rules below know; another one is a group of its own.
KNOWN = {
    "forward", "hidden_states", "attention", "rotate", "offset_keys", "head_loss", "bands", "norm",
    "relu_squared_mlp", "adam_update", "normuon_update", "normuon_scale", "polar_express",
    "join_mantissa", "split_mantissa", "gated_value",
}  # fmt: skip


def own_function(kernel: dict) -> str:
    """The script's function that the rules do not know, if there is one: "name()"."""
    script = kernel["paths"][0][0].partition(":")[0] if kernel["paths"] else ""
    inner = set()
    for path in kernel["paths"]:
        calls = [call for call in path if call.startswith(script + ":")]
        inner |= {call.rpartition(":")[2] for call in calls[-1:]}
    new = sorted(inner - KNOWN)
    return f"{new[0]}()" if new and all(name.isidentifier() for name in new) else ""


SMALL = 1e6  # bytes, less than which a kernel is a small one
LOSS = ("head_loss", "cross_entropy", "loss_", "quantize")
QK, NORMS = "q, k: norm, rotation, offset", "norms, residual, lambdas"
# (name, whether it counts among elementwise and reduction kernels, rule): the first that holds.
GROUPS: tuple[tuple[str, bool, Callable[[dict, int], bool]], ...] = (
    ("attention", False, lambda k, T: k["kind"].startswith("attention")),
    ("LM head, FP8 matmuls", False, lambda k, T: k["kind"] == "fp8 product"),
    ("gates' matmuls", False, lambda k, T: k["kind"] == "product" and k["flops"] < 2e9),
    ("matmuls", False, lambda k, T: k["kind"] == "product"),
    ("MLP kernels", False, lambda k, T: k["kind"].endswith("kernel") and k["flops"] > 0),
    ("loss, quantisation", False, lambda k, T: k["kind"] != "generated" and computes(k, *LOSS)),
    (NORMS, True, lambda k, T: k["kind"] == "copy"),
    ("small", True, lambda k, T: k["bytes"] < SMALL),
    ("embeddings", True, is_table),
    ("weight scales, banks", True, lambda k, T: not has_tokens(k, T)),
    (QK, True, lambda k, T: on_one_path(k, "attention", "norm") or computes(k, "norm_rotate")),
    (QK, True, lambda k, T: not functions(k).isdisjoint({"rotate", "offset_keys"})),
    ("", True, lambda k, T: bool(own_function(k))),  # its own name
    (NORMS, True, lambda k, T: "norm" in functions(k)),
    ("gates, values", True, lambda k, T: computes(k, "sigmoid") or "attention" in functions(k)),
    (NORMS, True, lambda k, T: True),
)


def group_of(kernel: dict, tokens: int) -> tuple[str, bool]:
    """Its group, and whether that is elementwise."""
    name, elementwise, _ = next(rule for rule in GROUPS if rule[2](kernel, tokens))
    return name or own_function(kernel), elementwise


# -----------------------------------------------------------------------------
# Predicted times


def mean_keys(window: int, stretch: int) -> float:
    """Keys that a query sees, on average, in a window of so many positions and in its document:
    documents of exponential length, cut at LONGEST tokens, a token being `stretch` positions."""
    mean, longest = DOCUMENT * stretch, LONGEST * stretch
    window = longest if window < 0 else min(window, longest)
    cut = math.exp(-longest / mean)
    return (mean * (1 - math.exp(-window / mean)) - window * cut) / (1 - cut)


def attention_flops(kernel: dict, tokens: int) -> float:
    """Of queries (P, H, D): two matmuls forward, five backward, over the keys of the window and
    what tiles add."""
    positions, heads, dim = next(shape for shape in kernel["shapes"] if len(shape) == 3)
    keys = mean_keys(kernel["window"], max(1, positions // tokens)) + TILE
    return (10 if "backward" in kernel["kind"] else 4) * positions * heads * dim * keys


def seconds(kernel: dict, phase: str, tokens: int) -> float:
    kind, flops = kernel["kind"], kernel["flops"]
    rate = RATES.get(kind, RATES["kernel"])
    if kind.startswith("attention"):
        flops = attention_flops(kernel, tokens)
    if kind == "fp8 product" and phase == "forward":
        rate = RATES["fp8 product, forward"]
    waves = kernel["programs"] / PROCESSORS
    busy = 1.0  # the share of the processors that have work; a matmul's programs take one each
    if waves:
        busy = waves / math.ceil(waves) if flops else min(1.0, waves)
    issue = ISSUE_GENERATED if kind == "generated" else ISSUE
    limits = (kernel["bytes"] / MEMORY, kernel["instructions"] / issue, kernel["special"] / SPECIAL)
    return max(TINY_PRODUCT if kind == "product" else LAUNCH, max(*limits, flops / rate) / busy)


# -----------------------------------------------------------------------------
# One script; the fake GPU and the script's modules stay in this process for good


def measure(options: argparse.Namespace) -> dict:
    """{"passes": {tokens: [graph, …]}, "updates": {world_size: {kind of step: {sent, kernels}}},
    "warm_up": [[what, graphs, seconds], …]}"""
    from bench import fake_gpu

    fake_gpu.install()
    import torch
    import triton
    from torch._subclasses.fake_tensor import FakeTensorMode

    from sample import load_script

    trainer = load_script(options.script.resolve(), "train_gpt")
    from bench.generated import graphs_of

    torch._dynamo.config.recompile_limit = 64
    torch.set_num_threads(1)
    h = trainer.Hyperparameters()
    versions = f"PyTorch {torch.__version__}, Triton {triton.__version__}"
    found = dict(script=options.script.name, made=versions, passes={}, updates={}, warm_up=[])
    with mock.patch.object(torch.cuda, "is_available", lambda: False):  # nothing is pinned
        batches = {tokens: synthetic(h, tokens) for tokens in options.tokens}
    if options.warm_up:
        found["warm_up"] = warm_up(trainer, h)
    for tokens in sorted(options.tokens):
        torch._dynamo.reset()
        step = step_of(tokens, trainer, h)
        with FakeTensorMode(allow_non_fake_inputs=True):
            manager = manager_of(trainer, h)
            manager.advance_schedule(step)
            batch = [x.new_zeros(x.shape, device="cuda:0") for x in batches[tokens]]
            graphs = graphs_of(manager.model, *batch, manager.forward_schedule())
            if manager.model._compiled_call_impl is None:  # else they are in the graph
                add_lookups(graphs, manager.model, batch[0])
        fill_in_windows(graphs, step, trainer, h)
        found["passes"][tokens] = [graph.to_json() for graph in graphs]
        save(options, {f"{tokens}-{graph.phase}": graph.code for graph in graphs})
    for world_size in options.world_size if options.optimizer else []:
        found["updates"][world_size] = updates(trainer, h, world_size, options)
    return found


def add_lookups(graphs: list, model: Any, inputs: Any) -> None:
    """What is launched outside of the graphs: lookups, and their gradients added to pending ones."""
    import torch

    from bench.generated import launched_eagerly

    for param in model.parameters():
        param.grad = param.detach().clone()
    rows = []
    graphs[0].kernels.extend(launched_eagerly(lambda: rows.extend(model.look_up(inputs))))
    gradients = [x.detach().clone() for x in rows]
    graphs[1].kernels.extend(launched_eagerly(lambda: torch.autograd.backward(rows, gradients)))


def fill_in_windows(graphs: list, step: int, trainer: ModuleType, h: Any) -> None:
    """Windows are inputs of a graph. They follow from the layers, which a backward graph reverses."""
    now = trainer.step_schedule(step, h)
    windows = [getattr(now, f"{x.window}_window") for x in trainer.LAYERS if x.window]
    for graph in graphs:
        found = [kernel for kernel in graph.kernels if kernel.kind.startswith("attention")]
        if len(found) != len(windows):  # an idea's
            continue
        for kernel, window in zip(found, windows[:: -1 if graph.phase == "backward" else 1]):
            kernel.window = window


def manager_of(trainer: ModuleType, h: Any) -> Any:
    """Compiled model and optimizer of the script on the fake GPU; tensors cannot be moved there."""
    import torch

    with torch.device("cuda:0"):
        model = model_of(h, h.max_tokens, fp8=True)
        trainer.compile_model(model)
        return trainer.TrainingManager(model, h)


def step_of(tokens: int, trainer: ModuleType, h: Any) -> int:
    """The first step whose micro-batches have so many tokens, else one of the nearest size."""
    sizes: dict[int, int] = {}
    for step in range(h.total_iterations):
        sizes.setdefault(trainer.step_schedule(step, h).batch_tokens // h.micro_batches, step)
    return sizes[min(sizes, key=lambda size: abs(size - tokens))]


def updates(
    trainer: ModuleType, h: Any, world_size: int, options: argparse.Namespace
) -> dict[str, dict]:
    """By kind of step, what the first of world_size ranks launches to update its shards, and the
    bytes that it sends."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    from bench.communication import STEPS, sent
    from bench.generated import launches_during

    traffic = [0.0]

    def collective(kind: str, whole: int) -> Callable:
        def call(*args: Any, **_: Any) -> Any:
            traffic[0] += sent(kind, args[whole].nbytes, world_size)
            return SimpleNamespace(wait=lambda: None)

        return call

    one_of_many = dict(
        is_initialized=lambda: world_size > 1,
        get_rank=lambda *_: 0,
        get_world_size=lambda *_: world_size,
        all_reduce=collective("all-reduce", 0),
    )
    scatter, gather = collective("reduce-scatter", 1), collective("all-gather", 0)
    found: dict[str, dict] = {}
    with (
        mock.patch.multiple(trainer.dist, **one_of_many),
        mock.patch.multiple(trainer, reduce_scatter=scatter, all_gather=gather),
        FakeTensorMode(allow_non_fake_inputs=True),
    ):
        manager = manager_of(trainer, h)
        for kind, (step, tied) in STEPS.items():
            give_gradients(manager.model)
            manager.optimizer.tied = tied
            traffic[0] = 0.0
            launches, codes = launches_during(lambda: manager.optimizer.step(step))
            kernels = [asdict(kernel) for kernel in launches]
            found[kind] = {"sent": traffic[0], "kernels": kernels}
            name = f"update-{world_size}-{kind}".replace(", ", "-").replace(" ", "-")
            save(options, {f"{name}-{i}": code for i, code in enumerate(codes)})
    return found


def give_gradients(model: Any) -> None:
    for parameter in model.parameters():
        parameter.grad = parameter.detach().clone()


def warm_up(trainer: ModuleType, h: Any) -> list[tuple[str, int, float]]:
    """What a run's warm-up compiles on one GPU: (what, graphs, seconds until their code is written).
    In the end what the run's own model compiles, which comes after the warm-up's."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    from bench.communication import STEPS
    from bench.generated import compiled_by, number_compiled

    with mock.patch.object(torch.cuda, "is_available", lambda: False):  # nothing is pinned
        passes = [(*shape, synthetic(h, shape[-1])) for shape in trainer.shapes(h)]
    found = []

    def count(what: str, compile_graphs: Callable[[], int]) -> None:
        started = time.perf_counter()
        graphs = compile_graphs()
        found.append((what, graphs, time.perf_counter() - started))

    def forward(step: int, training: bool, batch: Iterable[Any]) -> int:
        manager.advance_schedule(step)
        batch = [x.new_zeros(x.shape, device="cuda:0") for x in batch]
        call = (manager.model.train(training), *batch, manager.forward_schedule())
        with torch.set_grad_enabled(training):
            return len(compiled_by(*call, counted=False))

    def update() -> int:
        graphs = 0
        for step, tied in STEPS.values():
            give_gradients(manager.model)
            manager.optimizer.tied = tied
            graphs += number_compiled(lambda: manager.optimizer.step(step))
        return graphs

    def again() -> int:
        return sum(forward(step, training, batch) for step, training, _, batch in passes) + update()

    torch._dynamo.reset()
    with FakeTensorMode(allow_non_fake_inputs=True):
        manager = manager_of(trainer, h)
        for step, training, tokens, batch in passes:
            what = f"step {step}, {'training' if training else 'validation'}, {tokens:,} tokens"
            count(what, lambda: forward(step, training, batch))
        count("updates", update)
        manager = manager_of(trainer, h)
        count("the run's own model", again)
    return found


def save(options: argparse.Namespace, codes: dict[str, str]) -> None:
    if options.save_code:
        options.save_code.mkdir(parents=True, exist_ok=True)
        for name, code in codes.items():
            path = options.save_code / f"{options.script.stem}-{name}.py"
            path.write_text(code, encoding="utf-8")


# -----------------------------------------------------------------------------
# Tables


def group_table(graphs: list[dict], tokens: int) -> str:
    """The kernels of one micro-batch by phase and group, those that take longest first."""

    def row(kernels: list[dict]) -> list:
        size = sum(kernel["bytes"] for kernel in kernels)
        return [len(kernels), f"{size / 1e9:.2f}", ms(sum(kernel["seconds"] for kernel in kernels))]

    rows, everything, small = [], [], []
    for graph in graphs:
        groups: dict[str, list[dict]] = {}
        for kernel in graph["kernels"]:
            kernel["seconds"] = seconds(kernel, graph["phase"], tokens)
            name, elementwise = group_of(kernel, tokens)
            groups.setdefault(name, []).append(kernel)
            everything.append(kernel)
            small += [kernel] * elementwise
        own = [[name, graph["phase"], *row(kernels)] for name, kernels in groups.items()]
        rows += sorted(own, key=lambda row: -float(row[-1]))
    whole = sum(kernel["seconds"] + GAP for kernel in everything)
    saved = sum(graph["saved"] for graph in graphs)
    rows.append(["elementwise and reductions", "", *row(small)])
    rows.append(["**all**, with gaps between them", "", len(everything), "", ms(whole)])
    rows.append(["saved for backward", "", "", f"{saved / 1e9:.2f}", ""])
    return markdown(["group", "phase", "kernels", "GB", "ms"], rows)


def ms(value: float) -> str:
    return f"{1e3 * value:.2f}"


def kernel_table(graphs: list[dict], tokens: int) -> str:
    """Every kernel, the longest first."""
    rows = []
    for graph in graphs:
        for kernel in graph["kernels"]:
            time = seconds(kernel, graph["phase"], tokens)
            name = kernel["name"][:60] + (f" {kernel['shape']}" if kernel["shape"] else "")
            calls = ", ".join(sorted(functions(kernel) - {"hidden_states", "chosen"}))[:80]
            size = f"{kernel['bytes'] / 1e6:.1f}"
            instructions = f"{kernel['instructions'] / 1e6:.2f}"
            group, _ = group_of(kernel, tokens)
            rows.append((time, graph["phase"], group, size, instructions, name, calls))
    rows.sort(key=lambda row: -row[0])
    head = ["µs", "phase", "group", "MB", "instructions, M", "kernel", "from"]
    return markdown(head, [[f"{1e6 * time:.1f}", *rest] for time, *rest in rows])


def optimizer_table(updates: dict[str, dict]) -> str:
    """What the updates of one rank take, by the number of ranks and the kind of step."""
    rows = []
    for world_size, kinds in updates.items():
        for kind, update in kinds.items():
            kernels, sent = update["kernels"], f"{update['sent'] / 1e6:.0f}"
            time = sum(seconds(kernel, "update", 1) + GAP for kernel in kernels)
            rows.append([world_size, kind, len(kernels), ms(time), sent])
    return markdown(["GPUs", "update", "kernels", "ms", "MB sent"], rows)


# -----------------------------------------------------------------------------
# The command


def arguments(argv: list[str] | None) -> argparse.Namespace:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    add = parser.add_argument
    add("script", nargs="?", type=Path, default=ROOT / "train_gpt.py", help="or a copy of it")
    add("--tokens", type=numbers, default=[16384], help="of a micro-batch: 16384,32768,49152")
    add("--optimizer", action="store_true", help="the optimizer's updates too")
    add("--world_size", type=numbers, default=[8], help="ranks of the updates, as 1,2,4,8")
    add("--kernels", action="store_true", help="every kernel, the longest first")
    add("--warm_up", action="store_true", help="the graphs that a run compiles before it starts")
    add("--output", type=Path, help="JSON of everything that was counted")
    add("--save_code", type=Path, metavar="FOLDER", help="where to put the generated code")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    options = arguments(argv)
    print(
        f"codegen.py: compiling {options.script} for an H100, which takes minutes", file=sys.stderr
    )
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
        os.environ["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"
        found = measure(options)
    if options.output:
        options.output.write_text(json.dumps([found], indent=1), encoding="utf-8")
    print(f"{found['made']}; predicted for an H100, nothing was run\n")
    for tokens, graphs in found["passes"].items():
        print(f"A micro-batch of {tokens:,} tokens\n\n{group_table(graphs, tokens)}\n")
        if options.kernels:
            print(f"{kernel_table(graphs, tokens)}\n")
    if options.optimizer:
        print(f"Updates of one rank\n\n{optimizer_table(found['updates'])}\n")
    if found["warm_up"]:
        names, graphs, seconds = zip(*found["warm_up"])
        rows = [*found["warm_up"], ("**all**", sum(graphs), sum(seconds))]
        print(f"Warm-up\n\n{markdown(['what compiles', 'graphs', 'seconds on this CPU'], rows)}")


if __name__ == "__main__":
    main()

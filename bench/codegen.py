"""The code that torch.compile generates for an H100, and what it should cost there, on a machine without a GPU.

    python bench/codegen.py                                    # the model of train_gpt.py: forward and backward, by group
    python bench/codegen.py ideas/idea.py --against train_gpt.py      # two scripts side by side
    python bench/codegen.py --optimizer --world_size=1,8       # the updates too, and a step of each stage on so many GPUs
    python bench/codegen.py --kernels --save-code=FOLDER       # every kernel; the generated code
    python bench/codegen.py --output=base.json                 # keep what was counted; base.json can then stand for a script

Inductor compiles the record preset's model for a fake H100 (fake_gpu.py) and stops before anything is launched. What it would
launch is counted: bytes and instructions of each kernel it wrote, operations of each product, and of each custom operator what
that launches. A kernel's predicted time is the longest of its bytes, its instructions and 2.5 µs; a product's that of its
operations at a rate (RATES). Kernels are grouped by the functions and lines of the script that they come from.

What it is good for: differences between two scripts. By hand, on the source of public record 61, the method came out 4 to 9 %
above the measured steps; single groups may be off by 30 %. It knows nothing of caches, clocks, or what runs side by side.

It wants g++, and the requirements of the trainer; the PyTorch may be built with CUDA or without, the code is the same. Kernels
are compiled by the Triton at hand, the one that PyTorch's CUDA builds pin if the figures are to be those of a GPU (README).
"""

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from launch.environment import go_on

if __name__ == "__main__":
    go_on("requirements.txt", "torch", "triton")


from bench import fake_gpu
from data.shards import plain_json, whole_file
from launch.console import (
    Parser, console, ended_by_signals, numbers_between, output_file, printable, run_to_end, until_reader_leaves, user_path,
)
from launch.start import LaunchError, check_names, end_after

# -----------------------------------------------------------------------------
# An H100, as kernels find it: limits that they reach, not those of the data sheet

MEMORY = 2.9e12  # bytes a second, of 3.35
PROCESSORS = 132
ISSUE = PROCESSORS * 4 * 1.7e9  # warp instructions a second of our own kernels: 4 slots of each processor
ISSUE_GENERATED = 0.5 * ISSUE  # of Inductor's, whose warps wait for memory: 2 of 4
SPECIAL = 16 * PROCESSORS * 1.98e9  # special functions a second
LAUNCH = 2.5e-6  # seconds, the shortest kernel
TINY_PRODUCT = 5e-6  # seconds, the shortest product
GAP = 1e-6  # seconds between two kernels
RATES = {  # operations a second
    "product": 620e12,  # cuBLAS, bf16
    "MLP kernel": 540e12,  # Triton, bf16
    "FP8 product, forward": 1000e12,  # with fast accumulation
    "FP8 product": 850e12,
    "attention, FA2": 250e12,
    "attention backward, FA2": 170e12,
    "attention, FA3": 450e12,
    "attention backward, FA3": 330e12,
}
BUS = 300e9  # bytes a second that a rank sends in a ring over NVLink
DOCUMENT, LONGEST = 700, 2048  # tokens of FineWeb's mean document, and of the longest one in training
TILE = 96  # keys beyond those of its window that a query pays for, as attention works by tiles

# Public record 61 on 8 H100s, by its log: seconds a step in the three stages, and the tokens of their micro-batches there.
PEER = {16384: 32.2e-3, 32768: 58.5e-3, 49152: 84.5e-3}


# -----------------------------------------------------------------------------
# Groups: what a kernel does, in words of the model


def functions(kernel: dict) -> set[str]:
    return {call.rpartition(":")[2] for path in kernel["paths"] for call in path}


def on_one_path(kernel: dict, *names: str) -> bool:
    """Whether some operation of the kernel is computed inside all of these functions."""
    return any(set(names) <= {call.rpartition(":")[2] for call in path} for path in kernel["paths"])


def computes(kernel: dict, *words: str) -> bool:
    names = [*kernel["targets"], kernel["name"], kernel["operator"]]
    return any(word in name for word in words for name in names)


def has_tokens(kernel: dict, tokens: int) -> bool:
    return any(size % tokens == 0 for shape in kernel["shapes"] for size in shape if size)


# The script's functions that the rules below know; what comes from another one is a group of its own.
KNOWN = {
    "forward", "hidden_states", "attention", "rotate", "offset_keys", "head_loss", "bands", "norm", "relu_squared_mlp",
    "adam_update", "normuon_update", "normuon_scale", "polar_express", "join_mantissa", "split_mantissa",
}  # fmt: skip

ROTATION = {"rotate", "offset_keys"}
SMALL = 1e6  # bytes, less than which a kernel is a small one


def own_function(kernel: dict) -> str:
    """The script's function that the rules do not know, if there is one: "name()"."""
    script = kernel["paths"][0][0].partition(":")[0] if kernel["paths"] else ""
    inner = [[call for call in path if call.startswith(script + ":")][-1:] for path in kernel["paths"]]
    new = sorted({call.rpartition(":")[2] for calls in inner for call in calls} - KNOWN)
    return f"{new[0]}()" if new and all(name.isidentifier() for name in new) else ""


# The first rule that holds. (name, whether it counts among elementwise and reduction kernels, rule)
GROUPS: tuple[tuple[str, bool, Callable[[dict, int], bool]], ...] = (
    ("attention", False, lambda k, T: k["kind"].startswith("attention")),
    ("head, FP8 products", False, lambda k, T: k["kind"] == "fp8 product"),
    ("gates' products", False, lambda k, T: k["kind"] == "product" and k["flops"] < 2e9),
    ("products", False, lambda k, T: k["kind"] == "product"),
    ("MLP kernels", False, lambda k, T: k["kind"] == "kernel" and k["flops"] > 0),
    ("loss, quantisation", False,
     lambda k, T: k["kind"] != "generated" and computes(k, "head_loss", "cross_entropy", "loss_", "quantize")),
    ("norms, residual, lambdas", True, lambda k, T: k["kind"] == "copy"),
    ("small", True, lambda k, T: k["bytes"] < SMALL),
    ("embeddings", True, lambda k, T: computes(k, "embedding", "index_put", "bankrun.scatter") or bool(
        max(map(max, k["shapes"])) > 50000 and k["kind"] == "generated" and not has_tokens(k, T))),
    ("weight scales, banks", True, lambda k, T: not has_tokens(k, T)),
    ("q, k: norm, rotation, offset", True,
     lambda k, T: on_one_path(k, "attention", "norm") or computes(k, "norm_rotate") or not functions(k).isdisjoint(ROTATION)),
    ("", True, lambda k, T: bool(own_function(k))),  # its own name
    ("norms, residual, lambdas", True, lambda k, T: "norm" in functions(k)),
    ("gates, values", True, lambda k, T: computes(k, "sigmoid") or "attention" in functions(k)),
    ("norms, residual, lambdas", True, lambda k, T: True),
)  # fmt: skip


def group_of(kernel: dict, tokens: int) -> tuple[str, bool]:
    """Its group, and whether that is elementwise."""
    name, elementwise, _ = next(rule for rule in GROUPS if rule[2](kernel, tokens))
    return name or own_function(kernel), elementwise


# -----------------------------------------------------------------------------
# Predicted times


def mean_keys(window: int, stretch: int) -> float:
    """Keys that a query sees, on average, in a window of so many positions and in its document: documents of exponential
    length, cut at LONGEST tokens, a token being `stretch` positions."""
    mean, longest = DOCUMENT * stretch, LONGEST * stretch
    window = longest if window < 0 else min(window, longest)
    cut = math.exp(-longest / mean)
    return (mean * (1 - math.exp(-window / mean)) - window * cut) / (1 - cut)


def attention_flops(kernel: dict, tokens: int) -> float:
    """Of queries (P, H, D): two products forward, five backward, over the keys of the window and what tiles add."""
    positions, heads, dim = next(shape for shape in kernel["shapes"] if len(shape) == 3)
    keys = mean_keys(kernel["window"], max(1, positions // tokens)) + TILE
    return (10 if "backward" in kernel["kind"] else 4) * positions * heads * dim * keys


def rate_of(kernel: dict, phase: str, flash: str) -> float:
    kind = kernel["kind"]
    if kind.startswith("attention"):
        return RATES[f"{kind}, {flash}"]
    if kind == "fp8 product":
        return RATES["FP8 product, forward" if phase == "forward" else "FP8 product"]
    return RATES["product" if kind == "product" else "MLP kernel"]


def seconds(kernel: dict, phase: str, tokens: int, flash: str) -> float:
    flops = attention_flops(kernel, tokens) if kernel["kind"].startswith("attention") else kernel["flops"]
    least = TINY_PRODUCT if kernel["kind"] == "product" else LAUNCH
    waves = kernel["programs"] / PROCESSORS
    busy = 1.0  # the share of the processors that have work; a product's programs take one each
    if waves:
        busy = waves / math.ceil(waves) if flops else min(1.0, waves)
    issue = ISSUE_GENERATED if kernel["kind"] == "generated" else ISSUE
    limits = (
        kernel["bytes"] / MEMORY,
        kernel["instructions"] / issue,
        kernel["special"] / SPECIAL,
        flops / rate_of(kernel, phase, flash),
    )
    return max(least, max(limits) / busy)


# -----------------------------------------------------------------------------
# One script, in a process of its own


class ScriptError(RuntimeError):
    """The script, or this machine, cannot be measured."""


def measure(script: Path, tokens: list[int], train: bool, count: bool, world_sizes: list[int], code: Path | None) -> dict:
    """{"passes": {tokens: {"graphs": [{phase, saved, kernels}, …]}}, "updates": {world_size: [{step, sent, kernels}, …]}}

    code: what the paths of the generated code begin with."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    from sample import load_script

    trainer = load_script(script, "train_gpt")  # before others import it by that name: theirs is the script's, then
    from bench.generated import graphs_of

    torch._dynamo.config.recompile_limit = 64
    torch.set_num_threads(1)
    h = trainer.Hyperparameters()
    device = torch.device("cuda:0")
    found: dict[str, Any] = {
        "script": script.name,
        "torch": torch.__version__,
        "triton": _triton_version(),
        "eval": not train,
        "saved": not count,
        "passes": {},
        "updates": {},
    }
    sizes = dict(vocab_size=h.vocab_size, max_doc_len=h.max_doc_len, doc_slots=h.doc_slots)
    with mock.patch.object(torch.cuda, "is_available", lambda: False):  # nothing is pinned
        batches = {size: trainer.synthetic_batch(size, **sizes) for size in tokens}
    with FakeTensorMode(allow_non_fake_inputs=True):
        manager = manager_of(trainer, h)
        for size in sorted(tokens):
            manager.advance_schedule(step_of(size, trainer, h))
            manager.model.train(train)
            batch = [torch.zeros(x.shape, dtype=x.dtype, device=device) for x in batches[size]]
            torch._dynamo.reset()
            with torch.set_grad_enabled(train):
                graphs = graphs_of(manager.model, *batch, manager.forward_schedule(), count=count)
            found["passes"][size] = [graph.to_json() for graph in graphs]
            _save(code, {f"{size}-{graph.phase}": graph.code for graph in graphs})
    for world_size in world_sizes:
        found["updates"][world_size] = updates(trainer, h, world_size, code)
    found["stages"] = [
        {"micro_batches": h.micro_batches, "tokens": stage.batch * h.batch_unit // h.micro_batches,
         "windows": [stage.short * h.block_size, stage.long * h.block_size]}
        for stage in trainer.STAGES
    ]  # fmt: skip
    return found


def manager_of(trainer: Any, h: Any) -> Any:
    """Model and optimizer of the script on the fake GPU, whose tensors cannot be moved there."""
    import torch

    from bench.settings import model_of

    with torch.device("cuda:0"):
        return trainer.TrainingManager(model_of(h, h.max_tokens, fp8_head=h.fp8_head), h)


STEPS = {"NorMuon alone": (False, True), "with Adam, tied": (True, True), "with Adam, split": (True, False)}  # do_adam, tied


def updates(trainer: Any, h: Any, world_size: int, code: Path | None) -> dict[str, dict]:
    """By kind of step, what the first of world_size ranks launches to update its shards, and the bytes that it sends."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    from bench.communication import sent
    from bench.generated import launches_during

    traffic = [0.0]

    def collective(kind: str, whole: int) -> Callable:
        def call(*args: Any, **options: Any) -> Any:
            traffic[0] += sent(kind, args[whole].nbytes, world_size)
            return SimpleNamespace(wait=lambda: None)

        return call

    one_of_many = dict(
        is_initialized=lambda: True,
        get_rank=lambda *_: 0,
        get_world_size=lambda *_: world_size,
        all_reduce=collective("all-reduce", 0),
    )
    found = {}
    with (
        mock.patch.multiple(trainer.dist, **(one_of_many if world_size > 1 else {})),
        mock.patch.multiple(trainer, reduce_scatter=collective("reduce-scatter", 1), all_gather=collective("all-gather", 0)),
        FakeTensorMode(allow_non_fake_inputs=True),
    ):
        manager = manager_of(trainer, h)
        for name, (do_adam, tied) in STEPS.items():
            for parameter in manager.model.parameters():
                parameter.grad = torch.zeros_like(parameter)
            manager.optimizer.tied, traffic[0] = tied, 0.0
            kernels, codes = launches_during(lambda: manager.optimizer.step(do_adam))
            found[name] = {"sent": traffic[0], "kernels": [asdict(kernel) for kernel in kernels]}
            _save(
                code,
                {f"update-{world_size}-{name}-{i}".replace(", ", "-").replace(" ", "-"): text for i, text in enumerate(codes)},
            )
    return found


def _triton_version() -> str:
    import triton

    return triton.__version__


def _save(begin: Path | None, codes: dict[str, str]) -> None:
    if begin is not None:
        begin.parent.mkdir(parents=True, exist_ok=True)
        for name, text in codes.items():
            Path(f"{begin}-{name}.py").write_text(text, encoding="utf-8")


def step_of(tokens: int, trainer: Any, h: Any) -> int:
    """The first step whose micro-batches have so many tokens, else one of the nearest size."""
    sizes = {}
    for step in range(h.total_iterations):
        sizes.setdefault(trainer.step_schedule(step, h).batch_tokens // h.micro_batches, step)
    return sizes[min(sizes, key=lambda size: abs(size - tokens))]


# -----------------------------------------------------------------------------
# Tables


def by_group(graphs: list[dict], tokens: int, flash: str) -> dict[tuple[str, str], dict]:
    """(phase, group) → kernels, seconds, bytes, elementwise; the phases in order, the groups by their time."""
    groups: dict[tuple[str, str], dict] = {}
    for graph in graphs:
        for kernel in graph["kernels"]:
            name, elementwise = group_of(kernel, tokens)
            row = groups.setdefault(
                (graph["phase"], name), {"kernels": 0, "seconds": 0.0, "bytes": 0, "elementwise": elementwise}
            )
            row["kernels"] += 1
            row["bytes"] += kernel["bytes"]
            row["seconds"] += seconds(kernel, graph["phase"], tokens, flash)
    return groups


def summary(graphs: list[dict], tokens: int, flash: str) -> dict[str, Any]:
    """Of one micro-batch: elementwise seconds and kernels, all seconds with gaps, kernels, and saved bytes."""
    rows = by_group(graphs, tokens, flash).values()
    kernels = sum(row["kernels"] for row in rows)
    return {
        "elementwise": sum(row["seconds"] for row in rows if row["elementwise"]),
        "elementwise kernels": sum(row["kernels"] for row in rows if row["elementwise"]),
        "gaps": GAP * kernels,
        "seconds": sum(row["seconds"] for row in rows) + GAP * kernels,
        "kernels": kernels,
        "saved": sum(graph["saved"] for graph in graphs),
    }


def table(head: list[str], rows: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *rows])


def ms(value: float) -> str:
    return f"{1e3 * value:.2f}"


def pass_table(found: list[dict], tokens: int, flash: str) -> str:
    """Groups of one micro-batch, of one script or of two with what the first has over the second."""
    names = [one["script"] for one in found]
    groups = [by_group(one["passes"][str(tokens)], tokens, flash) for one in found]
    keys = sorted({key for group in groups for key in group}, key=lambda key: _place(key, groups))
    nothing = {"kernels": 0, "seconds": 0.0, "bytes": 0}
    head = ["group", "phase"]
    for name in names:
        head += [f"{name}: kernels", "GB", "ms"] if len(found) > 1 else ["kernels", "GB", "ms"]
    rows = []
    for phase, name in keys:
        cells = [group.get((phase, name), nothing) for group in groups]
        row = [name, phase]
        for cell in cells:
            row += [str(cell["kernels"]), f"{cell['bytes'] / 1e9:.2f}", ms(cell["seconds"])]
        rows.append(row + _difference([1e3 * cell["seconds"] for cell in cells]))
    totals = [summary(one["passes"][str(tokens)], tokens, flash) for one in found]
    for title, kernels, value in (
        ("elementwise and reductions", "elementwise kernels", "elementwise"), ("gaps between kernels", None, "gaps"),
        ("**all**", "kernels", "seconds"),
    ):  # fmt: skip
        row = [title, ""]
        for total in totals:
            row += [str(total[kernels]) if kernels else "", "", ms(total[value])]
        rows.append(row + _difference([1e3 * total[value] for total in totals]))
    if any(total["saved"] for total in totals):
        row = ["saved for backward", ""]
        for total in totals:
            row += ["", f"{total['saved'] / 1e9:.2f}", ""]
        rows.append(row + _difference([total["saved"] / 1e9 for total in totals], " GB"))
    return table(head + ["difference"] * (len(found) > 1), rows)


def _difference(values: list[float], unit: str = " ms") -> list[str]:
    return [f"{values[0] - values[1]:+.2f}{unit}"] if len(values) > 1 else []


def _place(key: tuple[str, str], groups: list[dict]) -> tuple:
    phases = ["forward", "inference", "backward", "update"]
    return phases.index(key[0]), -max(group.get(key, {"seconds": 0})["seconds"] for group in groups), key[1]


def kernel_table(graphs: list[dict], tokens: int, flash: str) -> str:
    """Every kernel, the longest first."""
    rows = []
    for graph in graphs:
        for kernel in graph["kernels"]:
            rows.append((seconds(kernel, graph["phase"], tokens, flash), graph["phase"], group_of(kernel, tokens)[0], kernel))
    return table(
        ["µs", "phase", "group", "MB", "instructions, M", "kernel", "from"],
        [
            [f"{1e6 * time:.1f}", phase, group, f"{kernel['bytes'] / 1e6:.1f}", f"{kernel['instructions'] / 1e6:.2f}",
             kernel["name"][:60] + (f" {kernel['shape']}" if kernel["shape"] else ""),
             ", ".join(sorted(functions(kernel) - {"hidden_states", "chosen"}))[:80]]
            for time, phase, group, kernel in sorted(rows, key=lambda row: -row[0])
        ],
    )  # fmt: skip


def update_seconds(update: dict, tokens: int = 1) -> float:
    return sum(seconds(kernel, "update", tokens, "FA3") + GAP for kernel in update["kernels"]) + update["sent"] / BUS


def scaled(kernel: dict, stage: dict, to: dict) -> dict:
    """A kernel of one stage's micro-batch as it would be in another's: what has tokens grows with them, windows are its."""
    if not has_tokens(kernel, stage["tokens"]):
        return kernel
    times = to["tokens"] / stage["tokens"]
    grown = {name: kernel[name] * times for name in ("bytes", "instructions", "special", "flops")}
    shapes = [
        [round(size * times) if size and size % stage["tokens"] == 0 else size for size in shape] for shape in kernel["shapes"]
    ]
    window = dict(zip(stage["windows"], to["windows"])).get(kernel["window"], kernel["window"])
    return {**kernel, **grown, "shapes": shapes, "window": window}


def pass_seconds(one: dict, stage: dict, flash: str) -> float:
    """Of one micro-batch of a stage: as it was compiled, or as the nearest that was, scaled."""
    compiled = min(one["passes"], key=lambda tokens: abs(int(tokens) - stage["tokens"]))
    graphs = one["passes"][compiled]
    if int(compiled) != stage["tokens"]:
        like = next(other for other in one["stages"] if other["tokens"] == int(compiled))
        graphs = [{**graph, "kernels": [scaled(kernel, like, stage) for kernel in graph["kernels"]]} for graph in graphs]
    return summary(graphs, stage["tokens"], flash)["seconds"]


def step_seconds(one: dict, stage: int, world_size: int, flash: str) -> float:
    """A step of a stage on so many GPUs: its micro-batches one after another, then the updates, of which every second has Adam,
    and all traffic, hidden by nothing."""
    facts, kinds = one["stages"][stage], one["updates"][str(world_size)]
    split = stage == len(one["stages"]) - 1
    adam = kinds["with Adam, split" if split else "with Adam, tied"]
    update = (update_seconds(kinds["NorMuon alone"]) + update_seconds(adam)) / 2
    return facts["micro_batches"] / world_size * pass_seconds(one, facts, flash) + update


def step_table(found: list[dict], world_sizes: list[int]) -> str:
    """Milliseconds of a step by stage; on 8 GPUs also as a share of what public record 61 took."""
    rows = []
    for one in found:
        for stage, facts in enumerate(one["stages"]):
            for flash in ("FA3", "FA2"):
                times = [step_seconds(one, stage, W, flash) for W in world_sizes]
                peer = PEER.get(facts["tokens"], 0)
                share = f"{step_seconds(one, stage, 8, flash) / peer:.2f}" if 8 in world_sizes and peer else ""
                rows.append([one["script"], str(stage + 1), flash, *(f"{1e3 * time:.1f}" for time in times), share])
    head = [
        "script",
        "stage",
        "attention",
        *(f"{W} GPU{'s' * (W > 1)}, ms a step" for W in world_sizes),
        "of record 61's, on 8",
    ]
    return table(head, rows)


def update_table(found: list[dict], world_sizes: list[int]) -> str:
    rows = []
    for one in found:
        for W in world_sizes:
            for name, update in one["updates"][str(W)].items():
                alone = update_seconds({**update, "sent": 0})
                rows.append([one["script"], str(W), name, str(len(update["kernels"])), ms(alone), f"{update['sent'] / 1e6:.0f}",
                             ms(update["sent"] / BUS)])  # fmt: skip
    return table(["script", "GPUs", "step", "kernels", "ms", "MB sent", "ms at 300 GB/s"], rows)


def tables(found: list[dict], options: argparse.Namespace) -> list[str]:
    """All that these options ask for."""
    texts = []
    if options.saved:
        rows = [[f"{tokens:,}", *(f"{sum(graph['saved'] for graph in one['passes'][str(tokens)]) / 1e9:.2f}" for one in found)]
                for tokens in options.tokens]  # fmt: skip
        head = ["tokens of a micro-batch", *(f"saved by {one['script']}, GB" for one in found)]
        texts.append(f"{table(head, rows)} \n")
    for tokens in [] if options.saved else options.tokens:
        texts.append(f"A micro-batch of {tokens:,} tokens\n\n{pass_table(found, tokens, options.attention)}\n")
        if options.kernels:
            texts.append(f"{kernel_table(found[0]['passes'][str(tokens)], tokens, options.attention)} \n")
    if options.optimizer:
        texts.append(f"Updates of one rank\n\n{update_table(found, options.world_size)}\n")
        texts.append(f"A step\n\n{step_table(found, options.world_size)}\n")
    return texts


# -----------------------------------------------------------------------------
# The command


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(prog="bench/codegen.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("script", nargs="?", type=Path, default=ROOT / "train_gpt.py", help="a copy of train_gpt.py")
    parser.add_argument("--against", type=user_path, help="another script, to be shown beside the first")
    parser.add_argument("--tokens", type=numbers_between(1, 2**24), default=[16384], help="of a micro-batch: 16384,32768,49152")
    parser.add_argument("--eval", action="store_true", help="the forward pass of a validation, in place of training")
    parser.add_argument("--optimizer", action="store_true", help="the updates too, and a step on several GPUs")
    parser.add_argument("--world_size", type=numbers_between(1, 2**16), default=[8], help="ranks of the updates, as 1,2,4,8")
    parser.add_argument("--attention", choices=("FA2", "FA3"), default="FA3", help="FlashAttention of the tables")
    parser.add_argument("--saved", action="store_true", help="only the bytes saved for backward: a fraction of the time")
    parser.add_argument("--kernels", action="store_true", help="every kernel, the longest first")
    parser.add_argument("--output", type=output_file(".json"), help="JSON of everything that was counted")
    parser.add_argument("--save-code", type=user_path, metavar="FOLDER", help="where to put the generated code, by script")
    parser.add_argument("--child", help=argparse.SUPPRESS)  # the process that has the fake GPU: where its result goes
    options = parser.parse_args(argv)
    parser.refuse_replacing([options.script, options.against], [options.output])
    return options


def make_folder(path: Path) -> None:
    """Raises ScriptError: before minutes of compiling."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ScriptError(f"error: --save-code={path}: {error.strerror or error}") from None


def known(script: Path, options: argparse.Namespace) -> dict | None:
    """What has been counted, of a .json; None of a script. Raises ScriptError for what is neither."""
    if not script.is_file():
        raise ScriptError(printable(f"there is no script {script}"))
    if script.suffix == ".json":
        return counted_before(script, options)
    if script.suffix != ".py":
        raise ScriptError(f"{script} is no script (.py), nor what --output has written (.json)")
    try:
        check_names(script)
    except LaunchError as error:
        raise ScriptError(error.args[0]) from None
    return None


def told_apart(paths: list[Path]) -> list[str]:
    """Their names, with as many of the folders above as it takes for them to differ before the suffix; of one file the same."""
    whole = [Path(os.path.abspath(path)) for path in paths]
    for parts in range(1, max(len(path.parts) for path in whole)):
        names = [Path(*path.parts[1:][-parts:]) for path in whole]
        if len({name.with_suffix("") for name in names}) == len(names):
            return [str(name) for name in names]
    return [path.name for path in whole]


def run_child(script: Path, options: argparse.Namespace, name: str) -> dict:
    """measure() in a process of its own: a fake GPU and a script's modules are for good. Raises ScriptError. name: by
    told_apart; the files of its code begin with it."""
    console(printable(f"bench/codegen.py: compiling {script} for an H100, which takes minutes"), "stderr")
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "found.json")
        command = [sys.executable, __file__, str(script), f"--child={result}", f"--tokens={','.join(map(str, options.tokens))}"]
        command += ["--eval"] * options.eval + ["--saved"] * options.saved + ["--optimizer"] * options.optimizer
        command += [f"--world_size={','.join(map(str, options.world_size))}"]
        begin = name.removesuffix(".py").replace("/", "-")
        command += [f"--save-code={options.save_code / begin}"] if options.save_code else []
        caches = {"TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1", "TORCHINDUCTOR_CACHE_DIR": folder, "OMP_NUM_THREADS": "1"}
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, **caches, "PYTHONPATH": os.pathsep.join(paths)}
        done = run_to_end(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        if done.returncode or not result.exists():
            raise ScriptError(f"{script}: {_last_error(done.stderr)}")
        return json.loads(result.read_text(encoding="utf-8"))


def counted_before(path: Path, options: argparse.Namespace) -> dict:
    """What an earlier call's --output holds. Raises ScriptError unless it counted what these options ask for."""
    unread = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, StopIteration)
    other = f"{path}: holds no counts of this version: make it anew with --output"
    try:
        found = plain_json(path.read_bytes())[0]
        if not all({"phase", "saved", "kernels"} <= {*graph} for graphs in found["passes"].values() for graph in graphs):
            raise ValueError
        passes, updates = ({int(number) for number in found[part]} for part in ("passes", "updates"))
        wrong = ["--eval"] * (found["eval"] != options.eval) + ["--saved"] * (found["saved"] and not options.saved)
    except unread:
        raise ScriptError(other) from None
    wrong += [f"--tokens={number}" for number in options.tokens if number not in passes]
    wrong += [f"--optimizer --world_size={W}" for W in options.world_size if options.optimizer and W not in updates]
    if wrong:
        raise ScriptError(f"{path}: was counted otherwise, by {', '.join(wrong)}: give the same options, or make it anew")
    try:
        tables([found], options)  # which read what was not looked at yet
        if not all(isinstance(found[part], str) for part in ("script", "torch", "triton")):
            raise ValueError
    except unread:
        raise ScriptError(other) from None
    return found


def _last_error(text: str) -> str:
    """The line of an error's type and message, and what follows it up to an empty line."""
    lines = [line for line in text.strip().splitlines()]
    starts = [i for i, line in enumerate(lines) if line[:1].isalpha() and "Error" in line.split(":")[0]]
    return (
        "\n".join(lines[starts[-1] : starts[-1] + 6])
        if starts
        else "\n".join(lines[-5:]) or "the compiler ended without a word"
    )


def main(argv: list[str] | None = None) -> None:
    options = arguments(argv)
    scripts = [options.script] + ([options.against] if options.against else [])
    if options.child:
        sys.path.insert(0, f"{options.script.resolve().parent}")  # its files before the project's, as in a run
        fake_gpu.install()
        sizes = options.world_size if options.optimizer else []
        found = measure(options.script.resolve(), options.tokens, not options.eval, not options.saved, sizes, options.save_code)
        Path(options.child).write_text(json.dumps(found))
        return
    try:
        if options.output:  # before minutes of compiling
            tempfile.TemporaryFile(dir=options.output.parent).close()
        if options.save_code:
            make_folder(options.save_code)
        before = {script: known(script, options) for script in scripts}  # all, before minutes of compiling one
        names = told_apart(scripts)
        found = [before[script] or run_child(script, options, name) for script, name in zip(scripts, names)]
        made = [f"PyTorch {one['torch']}, Triton {one['triton']}" for one in found]
        if len({*made}) > 1:
            raise ScriptError(f"{scripts[0]} was counted by {made[0]}, {scripts[1]} by {made[1]}: kernels of two compilers")
    except ScriptError as error:
        sys.exit(f"bench/codegen.py: {error}")
    except OSError as error:
        sys.exit(f"bench/codegen.py: error: {options.output or error.filename}: {error.strerror or error}")
    if options.output:  # before prints, as the reader of a pipe may have enough
        try:
            with whole_file(options.output) as file:
                file.write(json.dumps(found, indent=1).encode())
        except OSError as error:
            sys.exit(f"bench/codegen.py: error: {options.output}: {error.strerror or error}")
    if len({one["script"] for one in found}) < len(found):
        found = [{**one, "script": name} for one, name in zip(found, names)]
    print(printable(f"{made[0]}, {options.attention}; predicted for an H100, nothing was run\n"))
    print(printable("\n".join(tables(found, options))))


if __name__ == "__main__":
    end_after(ended_by_signals()(until_reader_leaves()(main)))

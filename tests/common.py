"""Helpers of the tests: the script they test, tensors that are alike everywhere, small models and
runs, processes.

`train_gpt` is the script that SCRIPT names (SCRIPT=ideas/idea.py ./test.sh), also in every process
that imports this file.
"""

import datetime
import importlib.util
import os
import subprocess
import sys
import time
import traceback
import zlib
from collections.abc import Callable
from multiprocessing import forkserver
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parent.parent
for folder in (str(ROOT / "tests"), str(ROOT)):
    if folder not in sys.path:
        sys.path.insert(0, folder)

from runtime import cpu
from sample import load_script

SCRIPT = ROOT / os.environ.get("SCRIPT", "train_gpt.py")
train_gpt = sys.modules.get("train_gpt") or load_script(SCRIPT, "train_gpt")

HAS_TRITON = importlib.util.find_spec("triton") is not None

# Unit roundoffs: the largest relative error of rounding to nearest.
U64, U32, U16 = 2.0**-53, 2.0**-24, 2.0**-8  # fp64, fp32, bf16

# fp64 sums of at most some thousand terms of size one, through eleven layers at most: a thousand
# times 2⁻⁵³, and far below what a wrong term or a detour through fp32 (2⁻²⁴) would leave.
TOLERANCE64 = 1e-12


# -----------------------------------------------------------------------------
# Tensors


def normal(label: str, shape: tuple[int, ...], scale: float = 1.0) -> Tensor:
    """fp32 standard normal numbers, times scale, that depend on label and shape alone."""
    generator = np.random.Generator(np.random.Philox(zlib.crc32(label.encode())))
    return torch.from_numpy(generator.standard_normal(shape).astype(np.float32)) * scale


def int32(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def bits(x: Tensor) -> Tensor:
    """The bytes of a tensor: NaN equals itself, -0 is not 0."""
    return x.detach().contiguous().view(-1).view(torch.uint8)


def close64(a: Tensor, b: Tensor) -> bool:
    """Whether a equals b but for fp64's rounding, by the largest element."""
    allowed = TOLERANCE64 * max(1.0, b.abs().max().item())
    return a.dtype == b.dtype == torch.float64 and (a - b).abs().max().item() <= allowed


def unequal(a: Any, b: Any, name: str = "") -> list[str]:
    """Names of what is not the same in two nests of dicts, bit for bit."""
    if isinstance(a, dict) and isinstance(b, dict):
        faults = [f"{name}{key}" for key in a.keys() ^ b.keys()]
        for key in a.keys() & b.keys():
            faults += unequal(a[key], b[key], f"{name}{key}.")
        return faults
    if isinstance(a, list) and isinstance(b, list):
        return unequal(dict(enumerate(a)), dict(enumerate(b)), name)
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        same = a.dtype == b.dtype and a.shape == b.shape and torch.equal(bits(a), bits(b))
    else:
        same = type(a) is type(b) and a == b
    return [] if same else [name.removesuffix(".")]


def forget_cpu() -> None:
    """Undo use_cpu, for the tests that follow: matmuls in full precision."""
    cpu.chosen = None
    torch.set_float32_matmul_precision("highest")
    torch.use_deterministic_algorithms(False)


# -----------------------------------------------------------------------------
# Small models and batches

# Scales at which every parameter matters and nothing saturates.
SCALES = dict(
    attn=0.15,
    mlp=0.1,
    value_embeds=0.5,
    bigram_embed=0.5,
    smear_gate=0.5,
    skip_gate=0.5,
    mudd_W1=0.1,
    mudd_W2=0.1,
    mudd_b=0.1,
    embed=0.7,
)


@torch.no_grad()
def set_parameters(model: nn.Module, prefix: str = "") -> None:
    """Every parameter normal(prefix + label) at its scale, or 0.3; factors 0.05 off their start.
    Signs are the same in every model."""
    for label, param in model.named_parameters():
        if label in ("scalars", "layer_lambdas"):
            param.add_(normal(prefix + label, tuple(param.shape), 0.05))
        else:
            param.copy_(normal(prefix + label, tuple(param.shape), SCALES.get(label, 0.3)))
    model.bigram_signs.copy_(normal("bigram_signs", tuple(model.bigram_signs.shape)).sign())


def parameters_of(model: nn.Module) -> dict[str, Tensor]:
    """Copies of a model's parameters, by label."""
    return {label: param.detach().clone() for label, param in model.named_parameters()}


def add_gradients(model: nn.Module, step: int, micro_batches: range = range(1)) -> None:
    """What backward passes would add: numbers that label, step and micro-batch decide."""
    for label, param in model.named_parameters():
        for i in micro_batches:
            g = normal(f"g_{label}_{step}_{i}", tuple(param.shape)).to(param.dtype)
            param.grad = g if param.grad is None else param.grad + g


def tiny_gpt(
    dtype: torch.dtype = torch.float32,
    *,
    vocab_size: int = 128,
    num_heads: int = 2,
    head_dim: int = 8,
    max_tokens: int = 256,
    script: ModuleType = train_gpt,
    **more: Any,
) -> nn.Module:
    """The script's model at the smallest widths, no parameter at zero; bf16: the training dtypes.
    more: further settings, in FP8 only if they say so."""
    prefixes = more.pop("prefixes", None)
    sizes = dict(vocab_size=vocab_size, num_heads=num_heads, head_dim=head_dim, bigram_rows=1920)
    sizes |= dict(model_dim=num_heads * head_dim, batch_unit=1, micro_batches=1)
    sizes |= dict(val_batch_tokens=max_tokens, fp8_head=False, fp8_mlp=False)
    model = script.GPT(script.Hyperparameters(**(sizes | more)), prefixes)
    if dtype != torch.bfloat16:
        model.to(dtype)
    set_parameters(model)
    return model


def trunk(model: nn.Module, inputs: Tensor, cu_seqlens: Tensor, schedule: Any) -> Tensor:
    """What the LM head reads, (T, dim)."""
    return model.trunk(model.look_up(inputs), inputs, cu_seqlens, schedule)


def random_batch(
    T: int, vocab: int, starts: tuple[int, ...], slots: int = 8, seed: int = 7
) -> tuple[Tensor, Tensor, Tensor]:
    """inputs (T,) int32, targets (T,) int64, cu_seqlens (slots,) int32."""
    generator = np.random.Generator(np.random.Philox(seed))
    tokens = torch.from_numpy(generator.integers(0, vocab, T + 1))
    cu_seqlens = torch.full((slots,), T, dtype=torch.int32)
    cu_seqlens[: len(starts)] = int32(*starts)
    return tokens[:-1].int(), tokens[1:].long(), cu_seqlens


# -----------------------------------------------------------------------------
# Small runs

TINY = dict(
    preset="demo",
    bigram_rows=768,
    model_dim=32,
    num_heads=2,
    head_dim=16,
    batch_unit=32,
    micro_batches=2,
    num_scheduled_iterations=6,
    num_extension_iterations=2,
    val_every=4,
    val_tokens=512,
    val_batch_tokens=256,
    sample_tokens=0,
    run_id="run",
)


def short_schedule(*, script: ModuleType = train_gpt, **changes: Any) -> Any:
    """Hyperparameters of 12 + 2 steps for tiny_gpt's manager, without data; a block has 16 tokens."""
    short = dict(num_scheduled_iterations=12, num_extension_iterations=2, head_dim=8)
    return script.Hyperparameters(**(short | dict(block_size=16, micro_batches=2) | changes))


def options(shards: Path, folder: Path, **more: Any) -> list[str]:
    """The command line of a run of TINY settings on these shards, its log in folder/logs."""
    chosen = TINY | {"data": shards, "log_dir": folder / "logs"} | more
    return [f"--{name}={value}" for name, value in chosen.items()]


def tiny_settings(shards: Path, folder: Path, **more: Any) -> Any:
    """The same as Hyperparameters."""
    chosen = TINY | {"data": str(shards), "log_dir": str(folder / "logs")} | more
    del chosen["preset"]
    return train_gpt.Hyperparameters(**(train_gpt.DEMO | chosen))


# -----------------------------------------------------------------------------
# Processes


def run_fresh(command: list[Any], **how: Any) -> subprocess.CompletedProcess[str]:
    """subprocess.run(command), what it prints captured as text; 100 seconds unless how says else."""
    how = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "timeout": 100} | how
    return subprocess.run(command, **how)


def wait_until(holds: Callable[[], bool], seconds: float = 60, pause: float = 0.01) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(pause)


def run_ranks(folder: Path, world_size: int, function: Callable, *args: Any) -> list[Any]:
    """[function(rank, world_size, *args) of each rank], in processes that form a gloo group.

    function: at the top level of a module; torch.save takes its result. Raises RuntimeError, with
    the traceback, as soon as one rank fails, or after 300 s. No process outlives the call.
    """
    context = mp.get_context("forkserver")  # a clean process that has imported this file
    context.set_forkserver_preload(["common"])
    with patch.dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path)):
        forkserver.ensure_running()
    processes = [
        context.Process(
            target=_rank_main, args=(rank, world_size, folder, function, args), daemon=True
        )
        for rank in range(world_size)
    ]
    deadline = time.monotonic() + 300
    try:
        for process in processes:
            process.start()
        while any(process.is_alive() for process in processes) and time.monotonic() < deadline:
            if any(process.exitcode for process in processes):
                break
            time.sleep(0.02)
    finally:
        for process in processes:
            if process.pid is not None:
                process.kill()
                process.join()
    if any(process.exitcode for process in processes):
        reports = "\n".join(path.read_text() for path in folder.glob("*.txt"))
        raise RuntimeError(f"{function.__name__} on {world_size} ranks: {reports or 'too slow'}")
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(world_size)]


def _rank_main(rank: int, world_size: int, folder: Path, function: Callable, args: tuple) -> None:
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder / 'rendezvous'}",
            rank=rank,
            world_size=world_size,
            timeout=datetime.timedelta(seconds=60),
        )
        result = function(rank, world_size, *args)
        torch.save(result, folder / f"{rank}.pt")
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        (folder / f"{rank}.txt").write_text(f"rank {rank}:\n{traceback.format_exc()}")
        raise SystemExit(1) from None

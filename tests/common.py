"""Helpers of the tests: tensors that any machine makes alike, small models, and processes that end."""

import datetime
import time
import traceback
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from train_gpt import GPT

# Unit roundoffs: the largest relative error of rounding to nearest, half a unit in the last place.
U64, U32, U16 = 2.0**-53, 2.0**-24, 2.0**-8  # fp64, fp32, bf16


def det(label: str, shape: tuple[int, ...], scale: float = 1.0) -> Tensor:
    """fp32 standard normal numbers, times scale, that depend on label and shape alone."""
    generator = np.random.Generator(np.random.Philox(zlib.crc32(label.encode())))
    return torch.from_numpy(generator.standard_normal(shape).astype(np.float32)) * scale


def probe(label: str, x: Tensor) -> float:
    """The sum over elements of x times det("probe_" + label), in fp64: one number that notices any element."""
    return (x.double() * det("probe_" + label, tuple(x.shape)).double()).sum().item()


def norm64(x: Tensor) -> float:
    """The Frobenius norm, in fp64."""
    return x.double().norm().item()


# Scales at which every parameter matters and nothing saturates.
SCALES = dict(
    attn=0.15, mlp=0.1, ve0=0.5, ve1=0.5, ve2=0.5, attn_gate_bank=0.3, ve_gate_bank=0.3, smear_gate=0.5, skip_gate=0.5,
    x0_lambdas=0.1, lm_head=0.3, embed=0.7,
)  # fmt: skip


@torch.no_grad()
def set_parameters(model: GPT, scales: dict[str, float] = SCALES, prefix: str = "") -> GPT:
    """Every parameter det(prefix + label) at its scale; scalars so much off their start."""
    for label, param in model.named_parameters():
        if label == "scalars":
            param.add_(det(prefix + label, tuple(param.shape), 0.05))
        else:
            param.copy_(det(prefix + label, tuple(param.shape), scales[label]))
    return model


def tiny_gpt(
    dtype: torch.dtype = torch.float32,
    *,
    vocab_size: int = 128,
    num_heads: int = 2,
    head_dim: int = 8,
    max_seq_len: int = 256,
    fp8_head: bool = False,
) -> GPT:
    """The 11-layer topology at the smallest widths, no parameter at zero; bf16 keeps the training dtypes."""
    model = GPT(vocab_size, 11, num_heads, head_dim, num_heads * head_dim, max_seq_len, fp8_head=fp8_head)
    if dtype != torch.bfloat16:
        model.to(dtype)
    return set_parameters(model)


def random_batch(T: int, vocab: int, starts: tuple[int, ...], slots: int = 8, seed: int = 7) -> tuple[Tensor, Tensor, Tensor]:
    """inputs (T,) int32, targets (T,) int64, cu_seqlens (slots,) int32."""
    tokens = torch.from_numpy(np.random.Generator(np.random.Philox(seed)).integers(0, vocab, T + 1))
    cu_seqlens = torch.full((slots,), T, dtype=torch.int32)
    cu_seqlens[: len(starts)] = torch.tensor(starts, dtype=torch.int32)
    return tokens[:-1].int(), tokens[1:].long(), cu_seqlens


def run_ranks(folder: Path, world_size: int, function: Callable, *args: Any, timeout: float = 120) -> list[Any]:
    """[function(rank, world_size, *args) of each rank], in processes of their own that form a gloo group.

    function: at the top level of a module; its result must be something torch.save takes. Raises RuntimeError, with the
    traceback, as soon as one rank fails, and TimeoutError after `timeout` seconds; no process outlives the call.
    """
    context = mp.get_context("forkserver")  # a clean process, which has imported all that ranks need
    context.set_forkserver_preload(["torch", "torch.distributed", "numpy", "pytest", "train_gpt", "common"])
    processes = [
        context.Process(target=_rank_main, args=(rank, world_size, str(folder), function, args), daemon=True)
        for rank in range(world_size)
    ]
    deadline = time.monotonic() + timeout
    try:
        for process in processes:
            process.start()
        while any(process.is_alive() for process in processes):
            failed = [rank for rank, process in enumerate(processes) if process.exitcode not in (None, 0)]
            if failed:
                break
            if time.monotonic() > deadline:
                raise TimeoutError(f"{function.__name__} on {world_size} ranks did not end within {timeout} s")
            processes[0].join(0.02)
            time.sleep(0.02)
    finally:
        for process in processes:
            if process.pid is not None:
                process.kill()
                process.join()
    failed = [rank for rank in range(world_size) if not (folder / f"{rank}.pt").exists()]
    if failed:
        reports = [path.read_text() for rank in failed if (path := folder / f"{rank}.txt").exists()]
        raise RuntimeError(f"{function.__name__} failed on ranks {failed}:\n" + "\n".join(reports or ["killed, no traceback"]))
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(world_size)]


def _rank_main(rank: int, world_size: int, folder: str, function: Callable, args: tuple) -> None:
    torch.set_num_threads(1)
    path = Path(folder)
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{path / 'rendezvous'}",
            rank=rank,
            world_size=world_size,
            timeout=datetime.timedelta(seconds=60),
        )
        result = function(rank, world_size, *args)
        torch.save(result, path / f"{rank}.tmp")
        dist.barrier()
        (path / f"{rank}.tmp").rename(path / f"{rank}.pt")
        dist.destroy_process_group()
    except BaseException:
        (path / f"{rank}.txt").write_text(f"rank {rank}:\n{traceback.format_exc()}")
        raise SystemExit(1) from None

"""Before the clock, on the run's own card: what trains computes what PyTorch does, up to rounding."""

import bisect
from typing import Any

import torch
from torch import Tensor
from torch.linalg import vector_norm

from runtime.ranks import RunError

TOKENS = 8192  # of a micro-batch, at most: they take references 9 to 11 GB, beside the weights
# What rounding may change, relative, by norm. Loss: one rounding to bf16. Gradients: on both sides 256
# in a row, which add up like their root; with FP8 one to e5m2 besides. The model as compiled for a CPU,
# at the record's widths, is 3.1 and 4.4 % off.
LOSS, BF16, FP8 = 2.0**-8, 512**0.5 * 2.0**-8, (512 * 2.0**-16 + 2.0**-6) ** 0.5


def self_check(run: Any, manager: Any, batch: Any, tk: Any) -> None:
    """Log how far a micro-batch's loss and gradients are off. Discard the manager: its weights change.
    batch: on the device; tk: the module triton_kernels. Where FlashAttention 4 is off, 2 has its turn.
    Raises AgreedError, with the name of what is off."""
    now = run.plan[run.first_step]
    found = run.ranks.gather(find_fault(manager, now, batch, tk))
    off = dict(found).get("attend")
    if off and tk._fa4:
        tk.agree_on_attention(run.ranks.gather, 2)
        run.log.write(f"attention: FA2, as FA4 is off: {off}")
        found = run.ranks.gather(find_fault(manager, now, batch, tk))
    name, text = found[run.ranks.rank]
    text = f"PyTorch on {torch.cuda.get_device_name()}: {text}"
    error = RunError(f"{name} differs from {text}; --self_check=false trains all the same")
    run.ranks.raise_on_all_ranks(error if name else None)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()  # the log has the run's
    run.log.write(f"kernels agree with {text}")


def find_fault(manager: Any, now: Any, batch: Any, tk: Any) -> tuple[str, str]:
    """What is off: a function with a kernel, "the compiled graph", or "" for nothing; and how far."""
    model = manager.model
    torch.manual_seed(0)
    for x in model.parameters():  # zeros would hide kernels
        x.data.add_(torch.randn_like(x), alpha=0.3 * x.size(-1) ** -0.5)
    inputs, targets, starts = batch
    n = min(len(inputs), TOKENS)
    targets[n:] = -1  # none: what comes later has no part in the loss

    def results(n: int, plain: list[str] | None) -> dict[str, Tensor]:
        """Of n tokens, eager with the references of `plain`; None: as the run trains."""
        model.zero_grad()
        stance = "default" if plain is None else "force_eager"
        with torch.compiler.set_stance(stance), tk.kernels_of(None, plain or ()):
            schedule = manager.advance_schedule(now)
            for _ in range(2):  # the second gradient is added to the first
                loss = model(inputs[:n], targets[:n], starts.clamp(max=n), schedule)
                loss.backward()
        rows = {label: row.as_rows for label, row in manager.optimizer.table.items()}
        params = [(label, x) for label, x in model.named_parameters() if x.grad is not None]
        return {label: rows[label](x.grad) for label, x in params} | {"loss": loss.detach()}

    def compare(n: int, plain: list[str] | None) -> tuple[bool, str]:
        found = results(n, plain)
        errors = {}  # of a stack of matrices the largest
        for label, x in exact.items():
            pair = (torch.atleast_2d(z) for z in (found[label] - x, x))
            off, size = (vector_norm(z, dim=(-2, -1), dtype=torch.float32) for z in pair)
            errors[label] = (off / size.clamp(min=1e-30)).nan_to_num(torch.inf).max().item()
        loss = errors.pop("loss")
        worst = max(errors, key=errors.get)
        fits = errors[worst] <= (FP8 if model.fp8_head or model.fp8_mlp else BF16)
        text = f"loss {loss:.0e}, gradients {100 * errors[worst]:.1f} % (largest: {worst})"
        return fits and loss <= LOSS, text

    exact = results(n, tk.KERNELS)
    fits, text = compare(len(inputs), None)
    if fits:
        return "", text
    heals = lambda i: compare(n, tk.KERNELS[:i])[0]  # so many references
    i = bisect.bisect_left(range(len(tk.KERNELS)), True, key=heals)
    return ("the compiled graph", *tk.KERNELS)[i], text

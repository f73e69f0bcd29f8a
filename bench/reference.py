"""R0, the recipe in plain PyTorch: what our kernels must beat. It trains as the recipe does.

    ./run.sh bench/gpu.py --section=ab --variant=bench/reference.py    # beside the recipe
    ./run.sh bench/reference.py --num_scheduled_iterations=200         # a run; any option of training

The script is train_gpt.py with some of its functions replaced by name, so the recipe cannot drift. R0
has no kernel of ours, but what a PyTorch programmer writes under torch.compile: F.rms_norm, rotary
positions, FlashAttention 2, F.embedding, FP8 matmuls by torch._scaled_mm, loss and residual stream left
to Inductor, Polar Express by torch.matmul and baddbmm. Loss, gradients and updates are the recipe's.
"""

import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch
import torch.nn.functional as F
from torch import Tensor

import triton_kernels as tk
from runtime.ranks import run_main
from runtime.sources import Sources
from sample import load_script

# -----------------------------------------------------------------------------
# The operations of triton_kernels.py. Shapes: see there


def norm(x: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], eps=tk.RMS_EPS)


def norm_and_rotate_qk(qkv: Tensor, table: Tensor, paired: bool, key_offset: bool) -> tk.Triple:
    T, heads, D = qkv.shape
    p = 2 if paired else 1
    qk, v = qkv.split((heads // 3 * 2, heads // 3), 1)
    angles = table[: p * T].view(T, 1, p, D // 2, 2)
    q, k = tk.rotate(norm(qk).view(T, -1, p, D), angles).view_as(qk).chunk(2, 1)
    return q, tk.offset_keys(k) if key_offset else k, v


def attend(q: Tensor, k: Tensor, v: Tensor, band: tk.Band, scale: Any) -> Tensor:
    """FlashAttention 2 of PyTorch; where a band has a bias, SDPA with a mask of all positions."""
    starts, window = band.cu_seqlens, band.window
    if band.bias is None:
        numbers = (*(tk.graph_input(x, q.device) for x in (window, scale)), band.max_len)
        return tk.flash_attention_op(q, k, v, starts, *numbers, fa4=False)[0]
    at = torch.arange(len(q), device=q.device, dtype=starts.dtype)
    document = torch.searchsorted(starts, at, right=True)
    distance = at[:, None] - at
    seen = (document[:, None] == document) & (distance >= 0) & (distance <= window)
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=float(scale))
    return y.transpose(0, 1)


def relu_squared_mlp(x: Tensor, W_fc: Tensor, W_proj: Tensor) -> Tensor:
    return F.relu(F.linear(x, W_fc)).square() @ W_proj


to_fp8 = tk.quantize_fp8.__wrapped__  # the reference, without our kernel


class FP8Forward(torch.autograd.Function):
    """x @ Wᵀ of operands that are given in FP8 too; backward as if they had not been rounded."""

    @staticmethod
    def forward(ctx, x: Tensor, W: Tensor, x8: Tensor, W8: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(x, W)
        return tk.fp8_matmul(x8, W8.mT, scale, x.dtype, True)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, W = ctx.saved_tensors
        return grad @ W, grad.mT @ x, None, None, None


def relu_squared_mlp_fp8(
    x: Tensor, W_fc: Tensor, W_proj: Tensor, W8: Tensor, W_scale: Tensor
) -> Tensor:
    x8, x_scale = tk.quantize_by_largest(x.detach())
    h = FP8Forward.apply(x, W_fc, x8, W8, x_scale * W_scale)
    return F.relu(h).square() @ W_proj


class FP8Linear(torch.autograd.Function):
    """x @ w with FP8 operands in all three matmuls, as tk.fp8_linear. On a GPU tk.fp8_matmul is
    torch._scaled_mm, which wants its second operand by columns."""

    @staticmethod
    def forward(ctx, x: Tensor, w: Tensor, x_scale: float, w_scale: float, grad_scale: float):
        x8, w8 = to_fp8(x, x_scale, tk.E4M3), to_fp8(w, w_scale, tk.E4M3)
        ctx.save_for_backward(x8, w8)
        ctx.scales, ctx.dtype = (x_scale, w_scale, grad_scale), x.dtype
        return tk.fp8_matmul(x8, w8, x_scale * w_scale, x.dtype, True)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        x8, w8 = ctx.saved_tensors
        x_scale, w_scale, grad_scale = ctx.scales
        grad8 = to_fp8(grad, grad_scale, tk.E5M2)
        grad_x = tk.fp8_matmul(grad8, w8.mT, grad_scale * w_scale, ctx.dtype, False)
        grad_w = tk.fp8_matmul(x8.mT, grad8, x_scale * grad_scale, ctx.dtype, False)
        return grad_x, grad_w, None, None, None


class SoftcappedCrossEntropy(torch.autograd.Function):
    """A pass over the logits each way. Inductor would write fp32 logits to memory for F.cross_entropy,
    which looks targets up in them."""

    @staticmethod
    def forward(ctx, logits: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
        lse = tk.softcap(logits).logsumexp(-1)
        weights = weights.to(lse.dtype) * (targets >= 0)
        z = tk.softcap(logits.gather(1, targets.clamp(min=0)))
        ctx.save_for_backward(logits, targets, weights, lse)
        return ((lse[:, None] - z) * weights).sum()

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:
        logits, targets, weights, lse = ctx.saved_tensors
        z = tk.softcap(logits)
        column = torch.arange(z.size(1), device=z.device)
        grad_z = weights.sum(1, keepdim=True) * (z - lse[:, None]).exp()
        for target, weight in zip(targets.split(1, 1), weights.split(1, 1)):
            grad_z = grad_z - torch.where(target == column, weight, 0)
        slope = z * (1 - z / tk.SOFTCAP) / tk.SOFTCAP_SCALE
        return (grad * grad_z * slope).to(logits.dtype), None, None


def softcapped_cross_entropy(logits: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    return SoftcappedCrossEntropy.apply(logits, targets, weights)


def fp8_head_loss(x: Tensor, w: Tensor, targets: Tensor, weights: Tensor, *scales: float) -> Tensor:
    return softcapped_cross_entropy(FP8Linear.apply(x, w, *scales), targets, weights)


def compile_model(model: Any) -> None:
    """The look-ups too: the recipe leaves them out, as its kernel adds their gradients in place."""
    model.compile(dynamic=False, fullgraph=True)


# -----------------------------------------------------------------------------
# The script


KERNELS = (tk.lookup, tk.residual_sum, tk.XXT, tk.XTX, tk.ba_plus_cAA, tk.aX_plus_BX)
KERNELS += (tk.transpose_add, tk.transpose_copy)
REPLACED = [function.__wrapped__ for function in KERNELS]  # their references: a line or two each
REPLACED += [norm, norm_and_rotate_qk, attend, relu_squared_mlp, relu_squared_mlp_fp8]
REPLACED += [softcapped_cross_entropy, fp8_head_loss, compile_model]


def replace_functions(script: dict[str, Any]) -> None:
    """Put R0's functions in the place of those of the same names in a script's globals. Raises
    KeyError for a name that the script does not have: it would be replaced in vain."""
    for function in REPLACED:
        script[function.__name__]  # KeyError
        script[function.__name__] = function


RECIPE = load_script(ROOT / "train_gpt.py", f"{__name__}.recipe")
RECIPE.SOURCES = Sources(__file__)
replace_functions(vars(RECIPE))


def __getattr__(name: str) -> Any:
    """What else a training script has: gpu.py loads this file as one."""
    return getattr(RECIPE, name)


if __name__ == "__main__":
    run_main(RECIPE.main)

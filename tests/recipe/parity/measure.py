"""The figures of model.json, orthogonalise.json and optimizer.json, of the source in a folder:

    python measure.py FOLDER        # prints them as JSON, in the form of the three files

It imports numpy, torch and FOLDER/train_gpt.py: a source out of a log is measured without this
project.
"""

import json
import sys
import zlib
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import torch
from torch import Tensor

MODEL_SCALES = dict(
    attn=0.08, mlp=0.05, ve0=0.5, ve1=0.5, ve2=0.5, attn_gate_bank=0.3, ve_gate_bank=0.3,
    smear_gate=0.5, skip_gate=0.5, x0_lambdas=0.1, lm_head=0.3, embed=0.7,
)  # fmt: skip
STEPS = 3


def normal(label: str, shape: tuple[int, ...], scale: float = 1.0) -> Tensor:
    generator = np.random.Generator(np.random.Philox(zlib.crc32(label.encode())))
    return torch.from_numpy(generator.standard_normal(shape).astype(np.float32)) * scale


def norm64(x: Tensor) -> float:
    return x.double().norm().item()


def probe(label: str, x: Tensor) -> float:
    """One number that notices any element."""
    return (x.double() * normal("probe_" + label, tuple(x.shape)).double()).sum().item()


def model_figures(script: ModuleType) -> dict:
    """Losses, and the gradients' norms, of the model of public record 61."""
    model = script.GPT(512, 11, 4, 32, 128, 1024).float()
    with torch.no_grad():
        for label, param in model.named_parameters():
            if label == "scalars":
                param.add_(normal(label, tuple(param.shape), 0.05))
            else:
                param.copy_(normal(label, tuple(param.shape), MODEL_SCALES[label]))
    generator = np.random.Generator(np.random.Philox(7))
    tokens = torch.from_numpy(generator.integers(0, 500, 257))
    starts = torch.tensor([0, 40, 41, 130, 256, 256, 256], dtype=torch.int32)
    schedule = script.ForwardSchedule(torch.tensor([1, 0.5, 0.2]), 16, 48)
    batch = (tokens[:-1].int(), tokens[1:].long(), starts, schedule)
    loss = model(*batch)
    loss.backward()
    gradients = {label: norm64(param.grad) for label, param in model.named_parameters()}
    with torch.no_grad():
        eval_loss = model.eval()(*batch).item()
    return dict(train_loss=loss.item(), eval_loss=eval_loss, grad_norm=gradients)


def orthogonalise_figures(script: ModuleType) -> dict:
    figures = {}
    for name, shape in (("square", (4, 48, 48)), ("tall", (3, 96, 32))):
        g = normal("pe_" + name, shape) * torch.exp(normal("pr_" + name, (*shape[:-1], 1)))
        polar = script.polar_express(g)
        second_moment = torch.full((*shape[:-1], 1), 0.01)
        values = torch.linalg.svdvals(polar.double())
        scaled = script.normuon_scale(polar.float(), second_moment, 0.95)
        figures[name] = dict(
            dtype=str(polar.dtype),
            polar_norm=norm64(polar),
            polar_probe=probe(name, polar),
            sv_min=values.min().item(),
            sv_max=values.max().item(),
            normuon_norm=norm64(scaled),
            normuon_probe=probe(name, scaled),
            second_moment_sum=second_moment.double().sum().item(),
        )
    return figures


def optimizer_figures(script: ModuleType) -> dict:
    """Every parameter after each of the first steps, in the training dtypes."""
    h = script.Hyperparameters(num_scheduled_iterations=12, num_extension_iterations=2)
    plan = range(STEPS)
    if hasattr(script, "make_plan"):  # later than record 61
        sizes = dict(vocab_size=256, num_heads=4, head_dim=16, model_dim=64, bigram_rows=15 * 256)
        h = replace(h, **sizes)
        plan = script.make_plan(h)[:STEPS]
        model = script.GPT(h, fp8=False)
    else:
        model = script.GPT(256, 11, 4, 16, 64, 1024)
    params = dict(model.named_parameters())
    with torch.no_grad():
        for label, param in params.items():
            param.copy_(normal("p_" + label, tuple(param.shape), 0.1))
        model.embed.copy_(model.lm_head.T)
    manager = script.TrainingManager(model, h)
    norms, probes = [], []
    for step, now in enumerate(plan):
        manager.advance_schedule(now)
        for label, param in params.items():
            g = normal(f"g_{label}_{step}", tuple(param.shape))
            if param.ndim >= 2:
                g = g * torch.exp(normal("r_" + label, (*param.shape[:-1], 1)))
            g = g.to(param.dtype)
            param.grad = g if param.grad is None else param.grad + g
        manager.step_optimizers(now)
        norms.append({label: norm64(param) for label, param in params.items()})
        probes.append({label: probe(label, param) for label, param in params.items()})
    said = [script.step_schedule(step, h) for step in range(STEPS)]
    lr = "lr_factor" if hasattr(said[0], "lr_factor") else "lr_mul"  # as record 61 has it
    return dict(
        norm_after_step=norms,
        probe_after_step=probes,
        lr=[getattr(schedule, lr) for schedule in said],
        momentum=[schedule.momentum for schedule in said],
    )


if __name__ == "__main__":
    sys.path.insert(0, str(Path(sys.argv[1]).resolve()))
    torch.set_num_threads(1)
    import train_gpt

    functions = dict(
        model=model_figures, orthogonalise=orthogonalise_figures, optimizer=optimizer_figures
    )
    print(json.dumps({name: function(train_gpt) for name, function in functions.items()}))

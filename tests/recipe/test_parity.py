"""Model and optimizer give the recipe's figures, measured on an independent implementation.

Pins of what is computed: an idea that changes model, rates or schedule fails here too, and that is all right.
"""

import functools
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from common import normal, norm64, probe, set_parameters
from train_gpt import GPT, ForwardSchedule, Hyperparameters, TrainingManager, normuon_scale, polar_express, step_schedule

FOLDER = Path(__file__).parent / "parity"


@functools.cache
def figures(name: str) -> dict:
    return json.loads((FOLDER / f"{name}.json").read_text())


# Model. The two implementations behind the figures agreed to 1e-6; fp32 sums in another order stay well below ten times that.

MODEL_TOLERANCE = 1e-5
MODEL_SCALES = dict(
    attn=0.08, mlp=0.05, ve0=0.5, ve1=0.5, ve2=0.5, attn_gate_bank=0.3, ve_gate_bank=0.3, smear_gate=0.5, skip_gate=0.5,
    x0_lambdas=0.1, lm_head=0.3, embed=0.7,
)  # fmt: skip


@functools.cache
def model_run() -> tuple[float, float, dict[str, torch.Tensor]]:
    """Training loss, evaluation loss, and the gradients of the former."""
    model = set_parameters(GPT(512, 11, 4, 32, 128, 1024).float(), MODEL_SCALES)
    tokens = torch.from_numpy(np.random.Generator(np.random.Philox(7)).integers(0, 500, 257))
    cu_seqlens = torch.tensor([0, 40, 41, 130, 256, 256, 256], dtype=torch.int32)
    batch = tokens[:-1].int(), tokens[1:].long(), cu_seqlens, ForwardSchedule(torch.tensor([1, 0.5, 0.2]), 16, 48)
    loss = model(*batch)
    loss.backward()
    model.eval()
    with torch.no_grad():
        eval_loss = model(*batch)
    return loss.item(), eval_loss.item(), {label: param.grad for label, param in model.named_parameters()}


def test_training_loss_is_the_records() -> None:
    assert model_run()[0] == pytest.approx(figures("model")["train_loss"], rel=MODEL_TOLERANCE)


def test_evaluation_loss_is_the_records() -> None:
    assert model_run()[1] == pytest.approx(figures("model")["eval_loss"], rel=MODEL_TOLERANCE)


@pytest.mark.parametrize("label", figures("model")["grad_norm"])
def test_gradient_is_the_records(label: str) -> None:
    assert norm64(model_run()[2][label]) == pytest.approx(figures("model")["grad_norm"][label], rel=MODEL_TOLERANCE)


def test_figures_cover_every_gradient() -> None:
    assert model_run()[2].keys() == figures("model")["grad_norm"].keys()


# Orthogonalisation, in bf16: single numbers are off by up to 2⁻⁸, sums over thousands of them far less. The smallest singular
# value of a square matrix is near zero and has no more than bf16's noise for digits.


@pytest.mark.parametrize("name, shape", [("square", (4, 48, 48)), ("tall", (3, 96, 32))])
def test_orthogonalisation_is_the_records(name: str, shape: tuple[int, int, int]) -> None:
    expected = figures("orthogonalise")[name]
    g = normal("pe_" + name, shape) * torch.exp(normal("pr_" + name, (*shape[:-1], 1)))
    polar = polar_express(g)
    assert polar.dtype == torch.bfloat16
    assert norm64(polar) == pytest.approx(expected["polar_norm"], rel=1e-3)
    assert probe(name, polar) == pytest.approx(expected["polar_probe"], abs=1e-2 * expected["polar_norm"])
    singular_values = torch.linalg.svdvals(polar.double())
    assert singular_values.min().item() == pytest.approx(expected["sv_min"], abs=1e-2)
    assert singular_values.max().item() == pytest.approx(expected["sv_max"], abs=1e-2)

    second_moment = torch.full((*shape[:-1], 1), 0.01)
    scaled = normuon_scale(polar.float(), second_moment, 0.95)
    assert norm64(scaled) == pytest.approx(expected["normuon_norm"], rel=1e-3)
    assert probe(name, scaled) == pytest.approx(expected["normuon_probe"], abs=1e-2 * expected["normuon_norm"])
    assert second_moment.double().sum().item() == pytest.approx(expected["second_moment_sum"], rel=1e-4)


# Optimizer, in the training dtypes. Adam is fp32 arithmetic rounded once, so it agrees to 1e-6; a bank's update is bf16 in
# places, so its norm agrees to 1e-4 and its probe to a hundredth of that.

OPTIMIZER_H = Hyperparameters(num_scheduled_iterations=12, num_extension_iterations=2)


@functools.cache
def optimizer_run() -> list[dict[str, torch.Tensor]]:
    """Every parameter after steps 0, 1, 2."""
    model = GPT(256, 11, 4, 16, 64, 1024)
    params = dict(model.named_parameters())
    with torch.no_grad():
        for label, param in params.items():
            param.copy_(normal("p_" + label, tuple(param.shape), 0.1))
        model.embed.copy_(model.lm_head.T)
    manager = TrainingManager(model, OPTIMIZER_H)
    after = []
    for step in range(3):
        manager.advance_schedule(step)
        for label, param in params.items():
            g = normal(f"g_{label}_{step}", tuple(param.shape))
            if param.ndim >= 2:
                g = g * torch.exp(normal("r_" + label, (*param.shape[:-1], 1)))
            g = g.to(param.dtype)
            param.grad = g if param.grad is None else param.grad + g
        manager.step_optimizers(step)
        after.append({label: param.detach().clone() for label, param in params.items()})
    return after


@pytest.mark.parametrize("step", range(3))
@pytest.mark.parametrize("label", figures("optimizer")["norm_after_step"][0])
def test_step_is_the_records(label: str, step: int) -> None:
    x = optimizer_run()[step][label]
    norm, expected_probe = (figures("optimizer")[f"{kind}_after_step"][step][label] for kind in ("norm", "probe"))
    norm_tolerance, probe_tolerance = (1e-4, 1e-2) if label in ("attn", "mlp") else (1e-6, 1e-6)
    assert norm64(x) == pytest.approx(norm, rel=norm_tolerance)
    assert probe(label, x) == pytest.approx(expected_probe, abs=probe_tolerance * norm)


def test_schedule_of_those_steps_is_the_records() -> None:
    schedules = [step_schedule(step, OPTIMIZER_H) for step in range(3)]
    assert [s.lr_mul for s in schedules] == figures("optimizer")["lr"]
    assert [s.momentum for s in schedules] == pytest.approx(figures("optimizer")["momentum"], rel=1e-12)

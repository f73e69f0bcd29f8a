"""bench/reference.py: R0 computes what the recipe computes, by other means, and trains."""

import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import triton_kernels as tk
from bench import reference
from common import (
    HAS_TRITON, ROOT, add_gradients, close64, options, parameters_of, random_batch, run_fresh,
    short_schedule, tiny_gpt, train_gpt,
)  # fmt: skip
from records.runlog import read_log

R0 = reference.RECIPE
FP8 = dict(fp8_head=True, fp8_mlp=True)
PREFIXES = (torch.arange(128) * 5 + 1) % 128


def loss_and_gradients(script, fp8: bool) -> tuple[Tensor, dict[str, Tensor]]:
    """Of two targets a token and a prefix in training; of one document, and two that are shorter."""
    model = tiny_gpt(torch.float64, script=script, prefixes=PREFIXES, **(FP8 if fp8 else {}))
    weights = torch.tensor([1, 0.5], dtype=torch.float64)
    schedule = script.ForwardSchedule(weights, 16, 48, 0, torch.tensor([0.25]).double())
    loss = model(*random_batch(128, 128, (0, 70, 90)), schedule)
    loss.backward()
    return loss.detach(), {label: param.grad for label, param in model.named_parameters()}


@pytest.mark.parametrize("fp8", [False, True], ids=["fp64", "fp8"])
def test_loss_and_gradients_are_the_recipes(fp8: bool) -> None:
    found, gradients = loss_and_gradients(R0, fp8)
    loss, exact = loss_and_gradients(train_gpt, fp8)
    assert close64(found / 128, loss / 128)
    assert gradients.keys() == exact.keys()
    assert [x for x in exact if not close64(gradients[x] / 128, exact[x] / 128)] == []


def test_updates_are_the_recipes() -> None:
    """NorMuon alone, then with Adam."""
    results = []
    for script in (R0, train_gpt):
        model = tiny_gpt(torch.float64, script=script)
        manager = script.TrainingManager(model, short_schedule(script=script))
        for now in script.make_plan(manager.h)[:2]:
            add_gradients(model, now.step)
            manager.step_optimizers(now)
        results.append(parameters_of(model))
    assert [x for x in results[1] if not close64(results[0][x], results[1][x])] == []


@pytest.mark.skipif(not HAS_TRITON, reason="without Triton nothing is launched")
def test_no_kernel_of_ours_is_launched_but_flash_attention() -> None:
    with tk.kernels_of("cuda"), FakeTensorMode(allow_non_fake_inputs=True):
        model = tiny_gpt(torch.bfloat16, script=R0, vocab_size=257, head_dim=16, **FP8)
        schedule = R0.ForwardSchedule(torch.ones(3), 16, 48, 256)
        ids = torch.zeros(256, dtype=torch.int32)

        def step(*batch: Tensor) -> list[Tensor]:
            grads = torch.autograd.grad(model(*batch, schedule), list(model.parameters()))
            return [*grads, R0.polar_express(torch.zeros(3, 64, 32, dtype=torch.bfloat16))]

        graph = make_fx(step)(ids, ids.long(), torch.zeros(8, dtype=torch.int32)).graph
    names = {str(node.target).removesuffix(".default") for node in graph.nodes}
    operators = {name for name in names if name.startswith("bankrun.")}
    assert operators == {"bankrun.flash_attention", "bankrun.flash_attention_backward"}


@pytest.mark.slow
def test_it_trains_into_a_log_of_its_own_source(shards: Path, tmp_path: Path) -> None:
    command = [sys.executable, ROOT / "bench/reference.py", *options(shards, tmp_path)]
    done = run_fresh(command, timeout=1200)
    assert done.returncode == 0, done.stdout + done.stderr
    log = read_log(tmp_path / "logs/run.txt")
    assert not log.fault and not log.problems and log.script[0] == "bench/reference.py"

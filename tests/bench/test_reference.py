"""bench/reference.py: the baselines compute what the recipe computes, by other means; GPT-2 trains."""

import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import triton_kernels as tk
from bench import reference
from common import (
    HAS_TRITON, ROOT, add_gradients, close64, parameters_of, random_batch, run_fresh, short_schedule,
    tiny_gpt, train_gpt,
)  # fmt: skip
from records.runlog import read_log
from sample import load_script

BASELINES = pytest.mark.parametrize("variant", ["R0", "R1"])
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


@BASELINES
@pytest.mark.parametrize("fp8", [False, True], ids=["fp64", "fp8"])
def test_loss_and_gradients_are_the_recipes(variant: str, fp8: bool) -> None:
    found, gradients = loss_and_gradients(reference.script_of(variant), fp8)
    loss, exact = loss_and_gradients(train_gpt, fp8)
    assert close64(found / 128, loss / 128)
    assert gradients.keys() == exact.keys()
    assert [x for x in exact if not close64(gradients[x] / 128, exact[x] / 128)] == []


@BASELINES
def test_updates_are_the_recipes(variant: str) -> None:
    """NorMuon alone, then with Adam."""
    results = []
    for script in (reference.script_of(variant), train_gpt):
        model = tiny_gpt(torch.float64, script=script)
        manager = script.TrainingManager(model, short_schedule(script=script))
        for step in range(2):
            add_gradients(model, step)
            manager.step_optimizers(step)
        results.append(parameters_of(model))
    assert [x for x in results[1] if not close64(results[0][x], results[1][x])] == []


def operators(function, *args) -> Counter:
    """How often a function, forward and backward, calls each custom operator of this project."""
    with tk.kernels_of("cuda"), FakeTensorMode(allow_non_fake_inputs=True):
        nodes = make_fx(function)(*args).graph.nodes
    names = (str(node.target) for node in nodes)
    return Counter(name.split(".")[1] for name in names if name.startswith("bankrun."))


ATTENTION = dict(flash_attention=10, flash_attention_backward=10)  # FlashAttention 2 in R0
EXPECTED = {
    "R0": ATTENTION,
    "R1": ATTENTION
    | dict(relu_squared=11, relu_squared_fp8=11, gram=5, multiply_add=5)
    | dict(cross_entropy=1, cross_entropy_backward=1),
}


@pytest.mark.skipif(not HAS_TRITON, reason="without Triton nothing is launched")
@BASELINES
def test_graphs_hold_the_kernels_of_the_inventory_and_no_others(variant: str) -> None:
    script = reference.script_of(variant)
    with tk.kernels_of("cuda"), FakeTensorMode():
        model = script.GPT(257, 11, 2, 16, 32, 256, **FP8)
        schedule = script.ForwardSchedule(torch.ones(3), 16, 48, 256)
        ids = torch.zeros(256, dtype=torch.int32)
        batch = ids, ids.long(), torch.zeros(8, dtype=torch.int32)
        matrices = torch.zeros(3, 64, 32, dtype=torch.bfloat16)

    def step(*batch: Tensor) -> list[Tensor]:
        return list(torch.autograd.grad(model(*batch, schedule), list(model.parameters())))

    found = operators(step, *batch) + operators(script.polar_express, matrices)
    assert found == EXPECTED[variant]


def test_a_replaced_name_that_is_gone_is_an_error() -> None:
    with pytest.raises(KeyError):
        reference.replace_functions(dict.fromkeys([*reference.PLAIN][1:]), "R0")


def test_a_written_script_is_the_variant(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    reference.main(["--variants=R0", f"--write={tmp_path}"])
    script = load_script(Path(capsys.readouterr().out.strip()), "written")
    assert script.attend is reference.attend and script.GPT is not train_gpt.GPT


def test_a_dry_run_times_every_variant_in_each_stage(capsys: pytest.CaptureFixture) -> None:
    """The first losses of a stage are alike: in stage 3, after updates, all but the last digits."""
    reference.main(["--dry-run", "--rounds=2", "--variants=ours,R0"])
    rows = [x.strip("| \n").split(" | ") for x in capsys.readouterr().out.splitlines()[3:]]
    assert [row[:2] for row in rows] == [[n, name] for n in "13" for name in ("ours", "R0")]
    assert "0.00" not in [row[2] for row in rows] and rows[0][5] == rows[1][5]
    assert float(rows[2][5]) == pytest.approx(float(rows[3][5]), abs=0.01)


def test_gpt2_trains_into_a_log_that_compare_reads(shards: Path, tmp_path: Path) -> None:
    sizes = "--layers=1 --heads=2 --dim=16 --context=32 --batch_tokens=256 --micro_batches=2"
    steps = "--total_iterations=50 --val_every=25 --val_tokens=1024 --lr=0.01 --compile=false"
    place = f"--data={shards} --vocab_size=257 --bos_id=256 --encoding=bytes --log_dir={tmp_path}"
    command = f"--model=gpt2 --run_id=gpt2 {sizes} {steps} {place}".split()
    done = run_fresh([sys.executable, ROOT / "bench/reference.py", *command])
    assert done.returncode == 0, done.stderr
    log = read_log(tmp_path / "gpt2.txt")
    assert not log.fault and not log.problems and [x for x, *_ in log.validations] == [0, 25, 50]
    assert log.validations[0][1] > 5.4 and log.loss < 4.5
    assert log.script[0] == "bench/reference.py" and log.settings["dim"] == "16"

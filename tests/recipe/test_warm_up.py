"""The warm-up leaves no trace in what the run begins with, an idea's own state included, and what it
compiles serves the run."""

import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import triton_kernels as tk
from common import SCRIPT, parameters_of, tiny_settings, unequal
from runtime.ranks import AgreedError, Ranks, Signals
from sample import load_script

ALONE = Ranks(0, 1, torch.device("cpu"))

# A copy that brings an optimizer, and keeps a moving average of the weights.
OWN_OPTIMIZER = """

class OwnOptimizer(TrainingManager):
    def __init__(self, model, h):
        super().__init__(model, h)
        self.own = {optimizer}
        self.average = [param.detach().clone() for param in model.parameters()]

    @torch.no_grad()
    def step_optimizers(self, step):
        self.own.step()
        self.own.zero_grad()
        for average, param in zip(self.average, self.model.parameters()):
            average.lerp_(param, 0.1)


TrainingManager = OwnOptimizer
"""
OPTIMIZERS = {
    "AdamW": "torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.1)",
    "SGD": "torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)",
}


def copy_of_script(folder: Path, *changes: tuple[str, str]) -> ModuleType:
    """The script as a module, its source changed: each (pattern, replacement) is found once."""
    source = SCRIPT.read_text()
    for pattern, replacement in changes:
        source, count = re.subn(pattern, lambda _: replacement, source)
        assert count == 1, pattern
    path = folder / "idea.py"
    path.write_text(source)
    return load_script(path)


def with_optimizer(folder: Path, optimizer: str) -> ModuleType:
    own = OWN_OPTIMIZER.format(optimizer=OPTIMIZERS[optimizer])
    end_of_class = "\n\n# -+\n# Model and data of a run\n"
    return copy_of_script(folder, (end_of_class, own))


def trained(script: ModuleType, h: Any) -> dict[str, Any]:
    """A run's weights and averages at its end."""
    managers = []
    build = script.build
    script.build = lambda *args: managers.append(build(*args)) or managers[-1]
    script.train(h, ALONE, Signals())
    script.build = build
    assert len(managers) == 2
    manager = managers[-1]
    average = dict(enumerate(getattr(manager, "average", [])))
    return {"weights": parameters_of(manager.model), "average": average}


@pytest.mark.parametrize("optimizer", [*OPTIMIZERS, ""])
def test_run_ends_on_the_same_bits_as_without_a_warm_up(
    shards: Path, tmp_path: Path, optimizer: str
) -> None:
    """An optimizer that the manager makes would start from the moments and the step count of the
    warm-up's gradients, an average from its weights. Empty: the recipe's own optimizer."""
    script = with_optimizer(tmp_path, optimizer) if optimizer else copy_of_script(tmp_path)
    short = dict(num_scheduled_iterations=3, num_extension_iterations=1, val_every=0)
    warmed = trained(script, tiny_settings(shards, tmp_path, run_id="warmed", **short))
    script.warm_up = lambda *_: None
    cold = trained(script, tiny_settings(shards, tmp_path, run_id="cold", **short))
    assert len(cold["average"]) == len(cold["weights"]) * bool(optimizer)
    assert unequal(warmed, cold) == []


def test_optimizer_that_no_checkpoint_would_have_is_refused_with_save_every(
    shards: Path, tmp_path: Path
) -> None:
    script = with_optimizer(tmp_path, "SGD")
    with pytest.raises(AgreedError, match="TrainingManager.own is a torch.optim.SGD.*save_every=0"):
        script.train(tiny_settings(shards, tmp_path, save_every=4), ALONE, Signals())


@pytest.fixture
def fresh_dynamo(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, int]]:
    """Dynamo's statistics: unique_graphs is the number of graphs compiled."""
    monkeypatch.setattr(torch._dynamo.config, "recompile_limit", 8)  # which a run raises
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield torch._dynamo.utils.counters["stats"]
    torch._dynamo.reset()


@pytest.mark.slow
def test_warm_up_compiles_all_that_the_run_needs(
    shards: Path, tmp_path: Path, fresh_dynamo: dict[str, int]
) -> None:
    """Nine shapes and more, as where the extension is validated: Dynamo's own limit is eight. The
    backend has no part in that, nor has the number of layers."""
    script = copy_of_script(
        tmp_path,
        (r"model\.loss, dynamic", 'model.loss, backend="eager", dynamic'),
        (
            r"\nATTENTION_LAYERS = ",
            "\nrows = (LAYERS[3], *LAYERS[6:8], *LAYERS[9:])\n"
            "LAYERS = tuple(replace(row, index=i) for i, row in enumerate(rows))\n"
            "ATTENTION_LAYERS = ",
        ),
    )
    warm_up = script.warm_up
    graphs = []

    def counted(*args: Any) -> None:
        warm_up(*args)
        graphs.append(fresh_dynamo["unique_graphs"])

    script.warm_up = counted
    steps = dict(num_scheduled_iterations=12, num_extension_iterations=4, val_every=2)
    trained(script, tiny_settings(shards, tmp_path, compile=True, **steps))
    assert graphs[0] > 8 and fresh_dynamo["unique_graphs"] == graphs[0]


def test_warm_up_adds_to_gradients_too(shards: Path, tmp_path: Path, monkeypatch) -> None:
    """A GPU has one kernel for the first micro-batch of a table's gradient and one for the others."""
    launched = set()

    def record(grad, order, starts, out, add):
        launched.add((*out.shape, add))
        out.zero_()

    script = copy_of_script(tmp_path)
    monkeypatch.setattr(script, "lookup", tk._lookup_cuda)
    monkeypatch.setattr(tk, "scatter_op", record)
    h = tiny_settings(shards, tmp_path)
    script.warm_up(script.build(h, ALONE), ALONE)
    tables = {(rows, width) for rows, width, _ in launched}
    assert len(tables) == 3 and len(launched) == 6

"""The warm-up leaves no trace in what the run begins with, an idea's own state included, and what it
compiles serves the run."""

import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from common import SCRIPT, parameters_of, tiny_settings, unequal
from runtime.ranks import Ranks, Signals
from sample import load_script

ALONE = Ranks(0, 1, torch.device("cpu"))
SHORT = dict(  # a step of each stage and of the extension
    num_scheduled_iterations=3, num_extension_iterations=1, val_every=0, batch_unit=16,
    val_tokens=128, val_batch_tokens=128, model_dim=16, head_dim=8,
)  # fmt: skip

# A copy that brings a second optimizer, and keeps moving averages of the weights: in its manager, and
# in the script's module.
OWN_OPTIMIZER = """

AVERAGES = {"embed": [torch.zeros(())]}
UPDATES = 0
NEWEST = None


class OwnOptimizer(TrainingManager):
    def __init__(self, model, h):
        super().__init__(model, h)
        self.own = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.1)
        self.average = [param.detach().clone() for param in model.parameters()]

    @torch.no_grad()
    def step_optimizers(self, now):
        global UPDATES, NEWEST
        self.own.step()
        super().step_optimizers(now)
        averages = AVERAGES["embed"]
        averages[0].lerp_(self.model.embed.std(), 0.1)
        averages.append(averages[0].clone())
        UPDATES += 1
        NEWEST = averages[0] if NEWEST is None else NEWEST + averages[0]
        for average, param in zip(self.average, self.model.parameters()):
            average.lerp_(param, 0.1)


TrainingManager = OwnOptimizer
"""


def copy_of_script(folder: Path, *changes: tuple[str, str]) -> ModuleType:
    """The script as a module, its source changed: each (pattern, replacement) is found once."""
    source = SCRIPT.read_text()
    for pattern, replacement in changes:
        source, count = re.subn(pattern, lambda _: replacement, source)
        assert count == 1, pattern
    path = folder / "idea.py"
    path.write_text(source)
    return load_script(path)


def with_own_optimizer(folder: Path) -> ModuleType:
    end_of_class = "\n\n# -+\n# Model and data of a run\n"
    return copy_of_script(folder, (end_of_class, OWN_OPTIMIZER))


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
    own = {x: getattr(script, x, None) for x in ("AVERAGES", "UPDATES", "NEWEST")}
    return {"weights": parameters_of(manager.model), "average": average, "own": own}


def test_run_ends_on_the_same_bits_as_without_a_warm_up(shards: Path, tmp_path: Path) -> None:
    """Both optimizers would start from the moments and the step count of the warm-up's gradients, the
    averages from its weights."""
    script = with_own_optimizer(tmp_path)
    warmed = trained(script, tiny_settings(shards, tmp_path, run_id="warmed", **SHORT))
    script = with_own_optimizer(tmp_path)
    script.warm_up = lambda *_: None
    cold = trained(script, tiny_settings(shards, tmp_path, run_id="cold", **SHORT))
    assert len(cold["average"]) == len(cold["weights"]) and cold["own"]["UPDATES"] == 4
    assert unequal(warmed, cold) == []


@pytest.fixture
def fresh_dynamo(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(torch._dynamo.config, "recompile_limit", 3)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


@pytest.mark.slow
def test_warm_up_compiles_all_that_the_run_needs(
    shards: Path, tmp_path: Path, fresh_dynamo: None
) -> None:
    """More shapes than Dynamo's limit, which a run raises. The backend has no part in that, nor has
    the number of layers."""
    layers = """
rows = (LAYERS[3], *LAYERS[6:8], *LAYERS[9:])
LAYERS = tuple(replace(row, index=i) for i, row in enumerate(rows))
ATTENTION_LAYERS = """
    backend = (r"model\.loss, dynamic", 'model.loss, backend="eager", dynamic')
    script = copy_of_script(tmp_path, backend, (r"\nATTENTION_LAYERS = ", layers))
    graphs = torch._dynamo.utils.counters["stats"]
    after_warm_up = []
    warm_up = script.warm_up
    script.warm_up = lambda *args: (warm_up(*args), after_warm_up.append(graphs["unique_graphs"]))
    trained(script, tiny_settings(shards, tmp_path, compile=True, **SHORT))
    assert [graphs["unique_graphs"]] == after_warm_up and after_warm_up[0] > 3

"""The losses that a run prints are those of its weights and shards.

They are computed a second time, by the naive model in fp64 from the shards' bytes: in every stage
and with the final windows, on one rank and on two.
"""

import re
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

import naive_model
from common import U32, parameters_of, run_ranks, tiny_settings, train_gpt
from runtime.log import Log
from runtime.ranks import Ranks, Signals
from runtime.run import Run

BOS = 256
CHANGES = dict(
    batch_unit=8, block_size=4, val_tokens=256, val_batch_tokens=256, fp8_head=False, fp8_mlp=False,
)  # fmt: skip
# Bytes have no prefixes: here some of them do.
PREFIXES = {byte: byte // 2 for byte in range(256) if byte % 3}


def recorded_run(rank: int, world_size: int, fields: dict) -> dict:
    """A run in fp64 on this rank: by step, its losses, the weights that they are of, rates, console
    lines."""
    found = {name: {} for name in ("training", "validation", "weights", "rates", "shown")}
    build, validate = train_gpt.build, train_gpt.validate

    class Recorded(train_gpt.TrainingManager):
        def step_optimizers(self, now):
            found["weights"]["training", now.step] = parameters_of(self.model)
            with patch.object(self.optimizer, "step", wraps=self.optimizer.step) as step:
                super().step_optimizers(now)
            (_, *found["rates"][now.step]) = step.call_args.args

    def build_recorded(h, *rest):
        model = build(h, *rest).model.double()
        found["signs"] = model.bigram_signs
        return Recorded(model, h)

    def validate_recorded(now, manager, run):
        found["weights"]["validation", now.step] = parameters_of(manager.model)
        found["validation"][now.step] = validate(now, manager, run)
        return found["validation"][now.step]

    def log_step(run, line, original=Run.log_step):
        found["training"][len(found["training"])] = run.loss
        original(run, line)

    def write_step(log, line, live):
        found["shown"][len(found["shown"])] = live

    with pytest.MonkeyPatch.context() as monkey:
        monkey.setattr(train_gpt, "build", build_recorded)
        monkey.setattr(train_gpt, "validate", validate_recorded)
        monkey.setattr(train_gpt, "warm_up", lambda *_: None)
        table = [PREFIXES.get(token, -1) for token in range(257)]
        monkey.setattr(train_gpt, "load_prefixes", lambda *_: table)
        monkey.setattr(Run, "log_step", log_step)
        monkey.setattr(Log, "write_step", write_step)
        ranks = Ranks(rank, world_size, torch.device("cpu"))
        train_gpt.train(train_gpt.Hyperparameters(**fields), ranks, Signals())
    return found


@pytest.fixture(scope="module")
def runs(shards, tmp_path_factory):
    """The settings, and what the first rank recorded of a run on one rank and of the same on two: in
    fp64 their weights are one another's but for 10⁻⁹."""
    settings = tiny_settings(shards, tmp_path_factory.mktemp("losses"), **CHANGES)
    other = vars(settings) | {"run_id": "two"}
    two = run_ranks(tmp_path_factory.mktemp("group"), 2, recorded_run, other)[0]
    return settings, recorded_run(0, 1, vars(settings)), two


def tokens_of(settings: Any, split: str) -> np.ndarray:
    """A shard's tokens: 256 int32 of header, then uint16."""
    (path,) = Path(settings.data).glob(f"*_{split}_*.bin")
    return np.fromfile(path, dtype=np.uint16, offset=1024).astype(np.int64)


def training_slices(settings: Any, step: int) -> list[tuple[list[int], list[int]]]:
    """(tokens, document starts) of each micro-batch of a step: whole documents, cut at 7 blocks in
    the first stage and at 16 later, until T + 1 tokens are there."""
    stream = tokens_of(settings, "train")
    documents = [piece.tolist() for piece in np.split(stream, np.flatnonzero(stream == BOS))[1:]]
    next_document = iter(documents)
    for s in range(step + 1):
        slices = []
        units = {0: 8, 1: 8, 2: 16, 3: 16}.get(s, 24)
        T = units * settings.batch_unit // settings.micro_batches
        cut = (7 if units == 8 else 16) * settings.block_size
        for _ in range(settings.micro_batches):
            tokens, starts = [], []
            while len(tokens) < T + 1:
                starts.append(len(tokens))
                tokens += next(next_document)[:cut]
            slices.append((tokens[: T + 1], [start for start in starts if start < T]))
    return slices


def yarn(settings: Any, blocks: list[int]) -> tuple[list[float], float]:
    """Frequencies and attention scale after the long window has had these sizes (arXiv 2309.00071,
    α = 1, β = 32)."""
    frequencies = naive_model.frequencies(settings.head_dim)
    scale = settings.attention_scale
    for old, new in zip(blocks, blocks[1:]):
        rotations = [old * settings.block_size * f / (2 * np.pi) for f in frequencies]
        stay = [min(1.0, max(0.0, (r - 1) / 31)) for r in rotations]
        ratio = old / new
        frequencies = [f * (ratio + s * (1 - ratio)) for f, s in zip(frequencies, stay)]
        scale *= 0.2 * np.log(new / old) + 1
    return frequencies, scale


def naive_loss(
    settings: Any,
    weights: dict[str, torch.Tensor],  # and signs
    tokens: list[int],
    starts: list[int],
    windows: tuple[int, int],
    blocks: list[int],
    mtp: tuple[float, ...],
    prefix: float = 0.0,
) -> float:
    """Summed over tokens, in fp64. windows: (short, long) in blocks; blocks: see yarn."""
    p = {label: value.double() for label, value in weights.items()}
    sizes = [size * settings.block_size for size in windows]
    x = naive_model.hidden_states(
        *(p, train_gpt, settings.num_heads, torch.tensor(tokens[:-1]), torch.tensor(starts)),
        dict(zip(("short", "long"), sizes)),
        *yarn(settings, blocks),
    )
    targets = torch.tensor(tokens[1:])
    logits = x @ p["lm_head"]
    return naive_model.training_loss(logits, targets, mtp, PREFIXES, prefix).item()


# (short, long) windows in blocks, weights of multiple tokens and of the prefix, and the long windows
# that YaRN has been through: the record's schedule, of 6 scheduled steps; a step of each stage and of
# the extension.
TRAINING = {
    1: ((1, 3), (1, 0.5, 0.125), 0.25, [3]),
    3: ((3, 7), (1, 0.25), 0.125, [3, 7]),
    5: ((5, 11), (1,), 0.0, [3, 7, 11]),
    7: ((6, 13), (1,), 0.0, [3, 7, 11, 13]),
}
VALIDATION = {0: ((1, 3), [3]), 4: ((5, 11), [3, 7, 11]), 8: ((6, 20), [3, 7, 11, 13])}


# A loss is a sum in fp32 over at most 16 micro-batches, and MTP weights are fp32.
TOLERANCE = dict(rel=32 * U32)
PRINTED = dict(abs=5.1e-5)


@pytest.mark.parametrize("step", TRAINING)
def test_training_loss_is_that_of_the_weights_and_the_documents(runs, step):
    settings, *both = runs
    windows, mtp, prefix, blocks = TRAINING[step]
    weights = both[0]["weights"]["training", step] | {"bigram_signs": both[0]["signs"]}
    total = count = 0.0
    for tokens, starts in training_slices(settings, step):
        total += naive_loss(settings, weights, tokens, starts, windows, blocks, mtp, prefix)
        count += (len(tokens) - 1) * sum(mtp)
    for found in both:
        assert found["training"][step] == pytest.approx(total / count, **TOLERANCE)
        printed = re.search(r"loss:(\S+) ", found["shown"][step])[1]
        assert float(printed) == pytest.approx(total / count, **PRINTED)


@pytest.mark.parametrize("step", VALIDATION)
def test_validation_loss_is_that_of_the_weights_and_the_shard(runs, step):
    settings, *both = runs
    windows, blocks = VALIDATION[step]
    weights = both[0]["weights"]["validation", step] | {"bigram_signs": both[0]["signs"]}
    stream = tokens_of(settings, "val")
    T = settings.val_batch_tokens // settings.micro_batches
    total = 0.0
    for first in range(0, settings.val_tokens, T):
        tokens = stream[first : first + T + 1]
        starts = sorted({0, *np.flatnonzero(tokens[:-1] == BOS).tolist()})
        total += naive_loss(settings, weights, tokens.tolist(), starts, windows, blocks, (1.0,))
    loss = total / settings.val_tokens
    for found, name in zip(both, ("run", "two")):
        assert found["validation"][step] == pytest.approx(loss, **TOLERANCE)
        log = Path(settings.log_dir, f"{name}.txt").read_text()
        (printed,) = re.findall(rf"^step:{step}/8 val_loss:(\S+) ", log, re.M)
        assert float(printed) == pytest.approx(loss, **PRINTED)


def test_each_step_has_its_own_rate_and_momentum(runs):
    settings, *both = runs
    plan = train_gpt.make_plan(settings)[:-1]
    assert len({now.momentum for now in plan}) > 1
    expected = {now.step: [now.lr_factor, now.momentum] for now in plan}
    assert [found["rates"] for found in both] == [expected] * 2

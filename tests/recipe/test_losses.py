"""The losses that a run prints, training and validation, are those of its weights and shards: computed a second time, by the
naive model in fp64 from the shards' bytes, in every stage and with the final windows, on one rank and on two."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch

import naive_model
from common import run_ranks, tiny_settings, train_gpt
from runtime.log import Log
from runtime.ranks import Ranks
from runtime.run import Run

BOS, DOCUMENT = 256, 100
CHANGES = dict(batch_unit=16, val_tokens=256, val_batch_tokens=128, max_doc_len=DOCUMENT, fp8_head=False)


def recorded_run(rank: int, world_size: int, fields: dict) -> dict:
    """A run on this rank: weights by (what, step); figures that it handed on and lines that it showed, by step."""
    found = {"weights": {}, "validation": {}, "training": {}, "rates": {}, "shown": {}}

    def with_weights(kind, function):
        def wrapped(step, manager, *rest):
            found["weights"][kind, step] = {label: p.detach().clone() for label, p in manager.model.named_parameters()}
            return function(step, manager, *rest)

        return wrapped

    def end_step(run, original=Run.end_step):
        step, optimizer = run.current.step, run.manager.optimizer
        found["training"][step], found["rates"][step] = run.current.loss, (optimizer.lr_mul, optimizer.momentum)
        original(run)

    def log_validation(run, step, loss, original=Run.log_validation):
        found["validation"][step] = loss
        original(run, step, loss)

    def progress(log, line, live, original=Log.progress):
        found["shown"][len(found["shown"])] = live
        original(log, line, live)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_gpt, "validate", with_weights("validation", train_gpt.validate))
        patch.setattr(train_gpt, "forward_backward", with_weights("training", train_gpt.forward_backward))
        patch.setattr(train_gpt, "warm_up", lambda *_: None)
        patch.setattr(train_gpt, "use_cpu", str)  # products in fp32: how bf16 rounds is kernels/test_cpu.py's
        patch.setattr(Run, "end_step", end_step)
        patch.setattr(Run, "log_validation", log_validation)
        patch.setattr(Log, "progress", progress)
        train_gpt.train(train_gpt.Hyperparameters(**fields), Ranks(rank, world_size, torch.device("cpu")))
    return found


@pytest.fixture(scope="module", params=[1, 2], ids=["one rank", "two ranks"])
def run(request, shards, tmp_path_factory):
    """The settings, and what the first rank recorded."""
    folder = tmp_path_factory.mktemp("losses")
    settings = tiny_settings(shards, folder, **CHANGES)
    return settings, run_ranks(tmp_path_factory.mktemp("group"), request.param, recorded_run, vars(settings))[0]


def tokens_of(settings, split: str) -> np.ndarray:
    """A shard's tokens: 256 int32 of header, then uint16."""
    (path,) = Path(settings.data).glob(f"*_{split}_*.bin")
    return np.fromfile(path, dtype=np.uint16, offset=1024).astype(np.int64)


def training_slices(settings, step: int) -> list[tuple[list[int], list[int]]]:
    """(tokens, document starts) of each micro-batch of a step: whole documents, cut, until T + 1 tokens are there."""
    stream = tokens_of(settings, "train")
    documents = [piece.tolist() for piece in np.split(stream, np.flatnonzero(stream == BOS))[1:]]
    slices, at = [], 0
    for s in range(step + 1):
        units = {0: 8, 1: 8, 2: 16, 3: 16}.get(s, 24)
        slices, T = [], units * settings.batch_unit // settings.micro_batches
        for _ in range(settings.micro_batches):
            tokens, starts = [], []
            while len(tokens) < T + 1:
                starts.append(len(tokens))
                tokens += documents[at][:DOCUMENT]
                at += 1
            slices.append((tokens[: T + 1], [start for start in starts if start < T]))
    return slices


def yarn(settings, blocks: list[int]) -> tuple[list[float], float]:
    """Frequencies and attention scale after the long window has had these sizes (arXiv 2309.00071, α = 1, β = 32)."""
    frequencies, scale = naive_model.frequencies(settings.head_dim), settings.attention_scale
    for old, new in zip(blocks, blocks[1:]):
        old_window, ratio = old * settings.block_size, old / new
        stay = [min(1.0, max(0.0, (old_window * f / (2 * np.pi) - 1) / 31)) for f in frequencies]
        frequencies = [f * (ratio + s * (1 - ratio)) for f, s in zip(frequencies, stay)]
        scale *= 0.2 * np.log(new / old) + 1
    return frequencies, scale


def naive_logits(settings, weights, tokens, starts, short: int, long: int, blocks: list[int]) -> torch.Tensor:
    """(T, vocab) in fp64."""
    p = {label: value.double() for label, value in weights.items()}
    windows = {"short": short * settings.block_size, "long": long * settings.block_size}
    inputs, cu_seqlens = torch.tensor(tokens[:-1]), torch.tensor(starts)
    layers, scalars = train_gpt.LAYERS, train_gpt.SCALARS
    x = naive_model.hidden_states(p, layers, scalars, settings.num_heads, inputs, cu_seqlens, windows, *yarn(settings, blocks))
    return x @ p["lm_head"]


# (short, long) windows in blocks, multi-token weights, and the long windows that YaRN has been through: the design's schedule,
# of 6 scheduled steps; a step of each stage, one of the extension.
TRAINING = {
    1: ((1, 3), (1, 0.5, 0.125), [3]),
    3: ((3, 7), (1, 0.25), [3, 7]),
    5: ((5, 11), (1,), [3, 7, 11]),
    7: ((6, 13), (1,), [3, 7, 11, 13]),
}
VALIDATION = {0: ((1, 3), [3]), 4: ((5, 11), [3, 7, 11]), 8: ((6, 20), [3, 7, 11, 13])}


@pytest.mark.parametrize("step", TRAINING)
def test_the_training_loss_is_that_of_the_weights_and_the_documents(run, step):
    """A run's fp32 against fp64: sums of some hundred losses of size five, through eleven layers."""
    settings, found = run
    windows, mtp, blocks = TRAINING[step]
    total = count = 0.0
    for tokens, starts in training_slices(settings, step):
        logits = naive_logits(settings, found["weights"]["training", step], tokens, starts, *windows, blocks)
        total += naive_model.training_loss(logits, torch.tensor(tokens[1:]), list(mtp)).item()
        count += (len(tokens) - 1) * sum(mtp)
    assert found["training"][step] == pytest.approx(total / count, rel=1e-6)
    printed = re.search(r"loss (\S+) ", found["shown"][step])[1]
    assert float(printed) == pytest.approx(total / count, abs=5.1e-5)


@pytest.mark.parametrize("step", VALIDATION)
def test_the_validation_loss_is_that_of_the_weights_and_the_shard(run, step):
    settings, found = run
    windows, blocks = VALIDATION[step]
    tokens, T, losses = tokens_of(settings, "val"), settings.val_batch_tokens // settings.micro_batches, []
    for first in range(0, settings.val_tokens, T):
        piece = tokens[first : first + T + 1]
        starts = sorted({0, *np.flatnonzero(piece[:-1] == BOS).tolist()})
        logits = naive_logits(settings, found["weights"]["validation", step], piece, starts, *windows, blocks)
        losses.append(naive_model.training_loss(logits, torch.from_numpy(piece[1:]), [1.0]).item())
    loss = sum(losses) / settings.val_tokens
    assert found["validation"][step] == pytest.approx(loss, rel=1e-6)
    printed = re.findall(rf"^step:{step}/8 val_loss:(\S+) ", Path(settings.log_dir, "run.txt").read_text(), re.M)
    assert [float(x) for x in printed] == [pytest.approx(loss, abs=5.1e-5)]


def test_each_step_is_made_with_its_own_rate_and_momentum(run):
    settings, found = run
    schedule = [train_gpt.step_schedule(step, settings) for step in range(8)]
    assert len({now.momentum for now in schedule}) > 1
    assert found["rates"] == {step: (now.lr_mul, now.momentum) for step, now in enumerate(schedule)}

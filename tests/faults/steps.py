"""What the tests of faults do between the steps of a run."""

import os
import random
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from common import train_gpt
from runtime.sources import RULE


def train_idea(arguments: list[str]) -> None:
    """A run of an idea that draws random numbers in each step: a resume must draw the same."""
    forward = train_gpt.GPT.forward

    def noisy(model, *batch):
        if model.training:
            drawn = torch.rand(1) + random.random() + numpy.random.rand()
            model.scalars.data.add_(drawn, alpha=3e-4)
        return forward(model, *batch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_gpt.GPT, "forward", noisy)
        train_gpt.main(arguments)


def lines_of(log: Path) -> str:
    """A log's lines after its header, without times and memory."""
    text = log.read_text().split(f"{RULE}\n")[2]
    varies = "train_time:|step_avg:|resident: |seconds: |per_second: |memory_MiB: "
    return re.sub(rf"({varies})\S+", r"\1", text)


def after_step(patch: pytest.MonkeyPatch, done: int, action: Callable) -> None:
    """Each run calls action(run) when so many of its steps are done, before the next one."""
    log_step = train_gpt.Run.log_step

    def acting(run, line):
        log_step(run, line)
        if line.startswith(f"step:{done}/"):
            action(run)

    patch.setattr(train_gpt.Run, "log_step", acting)


@torch.no_grad()
def spoil_a_weight(run) -> None:
    run.manager.optimizer.params["attn"].view(-1)[7] = float("inf")


def kill(*_) -> None:
    """This process, by SIGKILL."""
    os.kill(os.getpid(), signal.SIGKILL)


def in_child(function: Callable, **given: Any) -> int:
    """The exit code of a forked process that calls function(**given); -9 if it was killed."""
    child = os.fork()
    if not child:
        try:
            function(**given)
            os._exit(0)
        finally:  # else it would go on with pytest
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

"""What the tests of faults do between the steps of a run."""

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch

from common import train_gpt


def train_idea(arguments: list[str]) -> None:
    """A run of an idea that draws random numbers in each step: a resume must draw the same."""
    forward = train_gpt.GPT.forward

    def noisy(model, *batch):
        if model.training:
            model.scalars.data.add_(torch.rand(1), alpha=1e-3)
        return forward(model, *batch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_gpt.GPT, "forward", noisy)
        train_gpt.main(arguments)


def after_step(patch: pytest.MonkeyPatch, done: int, action: Callable) -> None:
    """Each run calls action(run) when so many of its steps are done, before the next one."""
    log_step = train_gpt.Run.log_step

    def acting(run, line):
        log_step(run, line)
        if line.startswith(f"step:{done}/"):
            action(run)

    patch.setattr(train_gpt.Run, "log_step", acting)


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

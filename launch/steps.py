"""The steps of a run, made one after the other: whether each call of a script's loop comes in its place."""

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import torch

from launch.console import AgreedError

CALLS = "each step calls run.report_loss, run.agree_on_loss and run.end_step once, in this order"


def saved_steps(settings: Any, first: int) -> set[int]:
    """The steps before which a run that begins at `first` writes a checkpoint, the end among them."""
    every, last = settings.save_every, settings.total_iterations
    return {step for step in (*range(every, last, every), last) if step > first} if every else set()


class Steps:
    """What a run's loop has made so far. A call out of its place raises AgreedError, before a log or a checkpoint tells of
    a step what is not so."""

    def __init__(self):
        self.made = -1  # steps, those before a resumption too; -1: the clock has not begun
        self.reported, self.agreed = False, False  # of the step that is being made
        self.begun: dict[object, int] = {}  # of each iteration over micro-batches: how many it has taken of a step
        self.validated = -1  # the last step before which the run was

    def counted(self, batches: Iterator, share: int) -> Iterator:
        """The micro-batches, of which a step has `share`."""
        iteration = object()
        try:
            with closing(batches):
                for batch in batches:
                    self.begun[iteration] = (self.begun.get(iteration, 0) + 1) % share
                    yield batch
        finally:
            self.begun.pop(iteration, None)

    def are_before(self, step: int) -> bool:
        """Are all steps before `step` made, and nothing of itself? Else a checkpoint would hold a part of it, or the next one."""
        return step == self.made and not self.reported and not any(self.begun.values())

    def report(self, step: int, loss: Any, due: bool) -> None:
        """due: a pause before the step."""
        self._check_begun()
        if not torch.is_tensor(loss) or loss.numel() != 1:  # shown in this case alone: a GPU would have to get there
            raise AgreedError(f"run.report_loss({step}, {loss!r}): must be a 0-dim tensor")
        refuse_if(self.reported, f"step {self.made} has no run.end_step(): {CALLS}")
        refuse_if(step != self.made, f"run.report_loss({step}), and the next step is {self.made}: {CALLS}")
        passed_over = f"a checkpoint or a signal is passed over without `with run.paused({step})` before anything of the step"
        refuse_if(due, f"run.must_pause({step}) is true: {passed_over}")
        self.reported = True

    def agree(self, step: int) -> None:
        refuse_if(not self.reported, f"run.agree_on_loss({step}) without run.report_loss({step}) before it: {CALLS}")
        self.agreed = True

    def end(self) -> None:
        refuse_if(not self.agreed, f"run.end_step() without run.agree_on_loss before it: {CALLS}")
        self.reported, self.agreed, self.made = False, False, self.made + 1

    def validation(self, step: int, loss: Any) -> float:
        self._check_begun()
        try:
            number = float(loss)
        except (TypeError, ValueError, RuntimeError):
            raise AgreedError(f"the validation of step {step} gave {loss!r}: must give its loss, a number") from None
        made = f"{self.made} steps that called run.end_step{', and a part of the next' * self.reported}"
        refuse_if(step != self.made or self.reported, f"a validation of step {step} after {made}: the weights are not that step's")
        refuse_if(step == self.validated, f"step {step} is validated twice: write another figure by run.log.write")
        self.validated = step
        return number

    def check_made(self, last: int) -> None:
        left = f"train() has left its loop before it made step {last}/{last}: the log is cut short"
        refuse_if(self.made < last, left)  # as by a break

    def lacks(self, last: int, due: bool) -> list[str]:
        """What a run that has made all its steps has not written. due: a pause after the last."""
        unsaved = "no checkpoint is of its end, without `with run.paused` after the last step" * due
        return [unsaved, "its log lacks the validation of its end" * (self.validated != last)]

    def _check_begun(self) -> None:
        refuse_if(self.made < 0, "run.start_clock() comes before the loop")


def refuse_if(fault: bool, message: str) -> None:
    if fault:
        raise AgreedError(message)

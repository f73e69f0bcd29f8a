"""The steps of a run, made one after the other: whether each call of a script's loop comes in its place."""

import dataclasses
from collections.abc import Iterator
from contextlib import closing
from typing import Any, NoReturn

import torch

from launch.console import RunError
from launch.signals import let_the_first_tell

CALLS = "each step calls run.report_loss, run.agree_on_loss and run.end_step once, in this order"


def saved_steps(settings: Any, first: int) -> set[int]:
    """The steps before which a run that begins at `first` writes a checkpoint, the end among them."""
    every, last = settings.save_every, settings.total_iterations
    return {step for step in (*range(every, last, every), last) if step > first} if every else set()


@dataclasses.dataclass
class Taken:
    """How many micro-batches a loop has taken, of which a step has `share`."""

    share: int
    all: int  # of the run
    until_now: int = 0
    at_end: int = 0  # of the last step
    due: int = 0  # there


class Steps:
    """What a run's loop has made so far, on this rank. A call out of its place raises RunError, before a log or a checkpoint tells
    of a step what is not so."""

    def __init__(self, rank: int):
        self.rank = rank
        self.made = -1  # steps, those before a resumption too; -1: the clock has not begun
        self.reported, self.agreed = False, False  # of the step that is being made
        self.trained_on: list[Taken] = []
        self.validated = -1  # the last step before which the run was

    def begin(self, step: int, restored: bool) -> None:
        """restored: what a checkpoint holds, if there is one, is in the model."""
        self._refuse_if(self.made >= 0, "run.start_clock() is called twice: time is counted from the first one on")
        self._refuse_if(not restored, "run.start_clock() without run.restore() before it: the model has not the checkpoint's state")
        self.made = step

    def counted(self, batches: Iterator, share: int, steps: int) -> Iterator:
        """The micro-batches of so many steps, `share` in each: of training, if the clock has not begun."""
        taken = Taken(share, share * steps)
        if self.made < 0:
            self.trained_on.append(taken)

        def count() -> Iterator:
            with closing(batches):
                for batch in batches:
                    taken.until_now += 1
                    yield batch

        return count()

    def are_before(self, step: int) -> bool:
        """Are all steps before `step` made, and nothing of itself? Else a checkpoint would hold a part of it, or the next one. Of one
        micro-batch a step, fetched before the pause, the gradients come behind the report."""
        parts = [x for x in self.trained_on if x.share > 1 and x.until_now != x.at_end]
        return step == self.made and not self.reported and not parts

    def report(self, step: int, loss: Any, due: bool) -> None:
        """due: a pause before the step."""
        self._check_begun()
        if not torch.is_tensor(loss) or loss.numel() != 1:  # shown in this case alone: a GPU would have to get there
            self._refuse(f"run.report_loss({step}, {loss!r}): must be a 0-dim tensor")
        self._refuse_if(self.reported, f"step {self.made} has no run.end_step(): {CALLS}")
        self._refuse_if(step != self.made, f"run.report_loss({step}), and the next step is {self.made}: {CALLS}")
        passed_over = f"a checkpoint or a signal is passed over without `with run.paused({step})` before anything of the step"
        self._refuse_if(due, f"run.must_pause({step}) is true: {passed_over}")
        self.reported = True

    def agree(self, step: int) -> None:
        self._refuse_if(not self.reported, f"run.agree_on_loss({step}) without run.report_loss({step}) before it: {CALLS}")
        self.agreed = True

    def end(self) -> None:
        self._refuse_if(not self.agreed, f"run.end_step() without run.agree_on_loss before it: {CALLS}")
        for taken in self.trained_on:
            taken.at_end, taken.due = taken.until_now, taken.due + taken.share
            ahead = taken.at_end - taken.due  # a loop may hold the next step's, or all from its beginning
            fits = 0 <= ahead <= taken.share or taken.at_end == taken.all
            found = f"{taken.at_end} micro-batches are taken after step {self.made}, must be {taken.due}"
            rule = f"{taken.share} a step, a step ahead at most or all at once, or a resumption has others"
            self._refuse_if(not fits, f"{found}: {rule}")
        self.reported, self.agreed, self.made = False, False, self.made + 1

    def validation(self, step: int, loss: Any) -> float:
        self._check_begun()
        try:
            number = float(loss)
        except (TypeError, ValueError, ArithmeticError, RuntimeError):
            self._refuse(f"the validation of step {step} gave {loss!r}: must give its loss, a number")
        made = f"{self.made} steps that called run.end_step{', and a part of the next' * self.reported}"
        self._refuse_if(step != self.made or self.reported, f"a validation of step {step} after {made}: the weights are not that step's")
        self._refuse_if(step == self.validated, f"step {step} is validated twice: write another figure by run.log.write")
        self.validated = step
        return number

    def check_made(self, last: int) -> None:
        left = f"train() has left its loop before it made step {last}/{last}: the log is cut short"
        self._refuse_if(self.made < last, left)  # as by a break

    def lacks(self, last: int, due: bool) -> list[str]:
        """What a run that has made all its steps has not written. due: a pause after the last."""
        unsaved = "no checkpoint is of its end, without `with run.paused` after the last step" * due
        return [unsaved, "its log lacks the validation of its end" * (self.validated != last)]

    def _check_begun(self) -> None:
        self._refuse_if(self.made < 0, "run.start_clock() comes before the loop")

    def _refuse_if(self, fault: bool, message: str) -> None:
        if fault:
            self._refuse(message)

    def _refuse(self, message: str) -> NoReturn:
        """Of what all ranks meet the first one tells; of what this one meets alone, this one."""
        let_the_first_tell(self.rank, 5)
        raise RunError(f"rank {self.rank}: {message}" if self.rank else message) from None

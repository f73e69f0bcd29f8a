"""A loop of a user's own: each call of a run in its place, or the run says so."""

import inspect
import re
import signal

import pytest

import train_gpt
from common import SCRIPT, ends_with, lines_of, options, started, unequal
from runtime.checkpoints import read_checkpoint
from train_gpt import main

PAUSED = "                with run.paused(step):  # the clock stands; saves; leaves here if all ranks agreed to stop\n"
VALIDATED = ("                    if is_validated(step, h):\n"
             "                        run.log_validation(step, validate(step, manager, run))\n")  # fmt: skip
END = "            run.end_step()\n"
LEFT = "            if step == h.total_iterations:\n                break\n"
AGREED = "            run.agree_on_loss(step)"
RESTORED = "    run.restore(functools.partial(warm_up, manager, ranks, run.first_step))\n"
STARTED = "        run.start_clock()\n"
CLOSED = "        batches.close()\n"
LAST = "run.log_validation(h.total_iterations, validate(h.total_iterations, manager, run))\n"


@pytest.fixture
def change(monkeypatch, no_warm_up):
    """change(function, (old, new), …): the script's function, with these texts in place of those, which stand there once."""

    def changed(name: str, *texts: tuple[str, str]) -> None:
        source = inspect.getsource(getattr(train_gpt, name))
        for old, new in texts:
            assert source.count(old) == 1, old
            source = source.replace(old, new)
        exec(compile(source, f"{SCRIPT}", "exec"), vars(train_gpt), found := {})
        monkeypatch.setattr(train_gpt, name, found[name])

    return changed


NEVER_PAUSED = PAUSED, "                if True:\n"
VALIDATED_ELSEWHERE = VALIDATED, "                        pass\n"
OUT_OF_PLACE = {  # what is said, and the changes of train()
    "paused at the step before": (
        "run.must_pause(3) is true: a checkpoint or a signal is passed over without `with run.paused(3)` before anything",
        (PAUSED, PAUSED.replace("paused(step)", "paused(step - 1)")),
    ),
    "never paused": ("run.must_pause(3) is true: a checkpoint or a signal is passed over", NEVER_PAUSED),
    "validated after its step": (
        "a validation of step 0 after 1 steps that called run.end_step: the weights are not that step's",
        VALIDATED_ELSEWHERE,
        (END, f"{END}            is_validated(step, h) and run.log_validation(step, 1.0)\n"),
    ),
    "validated within its step": (
        "a validation of step 0 after 0 steps that called run.end_step, and a part of the next: the weights are not",
        VALIDATED_ELSEWHERE,
        (AGREED, f"            run.log_validation(step, 1.0)\n{AGREED}"),
    ),
    "a step that is skipped": (
        "run.report_loss(3), and the next step is 2: each step calls run.report_loss, run.agree_on_loss and run.end_step once",
        (LEFT, f"{LEFT}            if step == 2:\n                continue\n"),
    ),
    "a step twice": ("run.report_loss(1), and the next step is 2", (LEFT, f"{LEFT}            step = min(step, 1)\n")),
    "no end of a step": ("step 0 has no run.end_step(): each step calls", (END, "")),
    "no agreement": ("run.end_step() without run.agree_on_loss before it: each step", (AGREED, "            #")),
    "no loss": (
        "run.agree_on_loss(0) without run.report_loss(0) before it: each step",
        ("            forward_backward(step", "            (step"),
    ),
    "a start later": ("run.start_clock() is called twice: time", (LEFT, f"{LEFT}            step == 2 and run.start_clock()\n")),
    "no start": ("run.start_clock() comes before the loop", (STARTED, "")),
    "a validation of nothing": (
        "the validation of step 0 gave None: must give its loss, a number",
        ("validate(step, manager, run)", "validate(step, manager, run) and None"),
    ),
    "a validation of two losses": (
        "the validation of step 0 gave tensor([5.",
        ("validate(step, manager, run)", "torch.ones(2) * validate(step, manager, run)"),
    ),
    "half a share": (
        "1 micro-batches are taken after step 0, must be 2: 2 a step, a step ahead at most or all at once, or a resumption has others",
        (LEFT, f"{LEFT}            next(batches) if step else None\n"),
        ("            forward_backward(step, manager, batches, run)\n",
         "            forward_backward(step, manager, itertools.islice(batches, 1), run)\n"
         "            run.report_loss(step, torch.ones(()))\n"),
    ),
    "two shares": (
        "8 micro-batches are taken after step 1, must be 4: 2 a step, a step ahead at most or all at once, or a resumption has others",
        ("            forward_backward(step", "            [next(batches) for _ in range(2)]\n            forward_backward(step"),
    ),
    "a validation of no number": (
        "the validation of step 0 gave 1000",
        ("validate(step, manager, run)", "validate(step, manager, run) and 10**400"),
    ),
    "a validation twice": (
        "step 0 is validated twice: write another figure by run.log.write",
        (VALIDATED, f"{VALIDATED}                        run.log_validation(step, 1.0)\n"),
    ),
}


def test_a_resumption_that_restores_nothing_is_told(shards, tmp_path, capsys, change):
    """As without a warm-up: it went on from the checkpoint's step with the first weights."""
    main(options(shards, tmp_path, save_every=5))
    change("prepare", (RESTORED, ""))
    said = "error: run.start_clock\\(\\) without run.restore\\(\\) before it: the model has not the checkpoint's state\n"
    ends_with(capsys, options(shards, tmp_path, resume=tmp_path / "logs" / "run" / "step_000005.pt"), said, 1)


@pytest.mark.parametrize("loss", ["total.item()", "total.expand(2)"])
def test_a_loss_that_is_no_0_dim_tensor_is_told(shards, tmp_path, capsys, change, loss):
    change("forward_backward", ("total / (tokens * sum(schedule.mtp_weights))", loss))
    said = r"error: run.report_loss\(0, .*\): must be a 0-dim tensor"
    ends_with(capsys, options(shards, tmp_path), said, 1)


@pytest.mark.parametrize("case", OUT_OF_PLACE)
def test_a_call_out_of_its_place_is_told(shards, tmp_path, capsys, change, case):
    """Checkpoints held a step's gradients, or the next step; runs that lacked steps were whole to the tools."""
    said, *texts = OUT_OF_PLACE[case]
    change("train", *texts)
    ends_with(capsys, options(shards, tmp_path, save_every=3), f"error: {re.escape(said)}", 1)


def test_a_signal_that_is_passed_over_is_told_too(shards, tmp_path, capsys, change):
    """A loop without pauses went on, and after 25 s another rank was said to hang."""
    heard = f"            if step == 2:\n                signals.received = {signal.SIGTERM:d}\n"
    change("train", NEVER_PAUSED, (LEFT, f"{LEFT}{heard}"))
    ends_with(capsys, options(shards, tmp_path), r"error: run.must_pause\(3\) is true: a checkpoint or a signal is passed over", 1)


@pytest.mark.parametrize("after", [END, f"{AGREED}  # an infinity or NaN ends the run here, before it reaches the weights\n"])
def test_a_signal_in_a_pause_of_a_step_is_obeyed_before_the_next(shards, tmp_path, change, after):
    """The checkpoint had the number of the step before, or gradients of its own step: a resumption made them twice."""
    one = dict(micro_batches=1, batch_unit=64)  # a step, so that none tells of the step
    main(options(shards, tmp_path / "plain", **one, save_every=1, keep_checkpoints=9))
    heard = f"                if step == 4:\n                    signals.received = {signal.SIGTERM:d}\n"
    change("train", (after, f"{after}            with run.paused(step):\n{heard}"))
    with pytest.raises(SystemExit, match="143"):
        main(options(shards, tmp_path / "paused", **one, save_every=99))
    assert "stopped by SIGTERM after step:6/8: checkpoint " in lines_of(tmp_path / "paused" / "logs" / "run.txt")
    plain, paused = (read_checkpoint(tmp_path / x / "logs" / "run" / "step_000006.pt")["state"] for x in ("plain", "paused"))
    assert not unequal(plain, paused)


PAUSE = "            with run.paused(step):\n                pass\n"
ELSEWHERE = {  # where train() pauses once more
    "after its step": ("train", END, END + PAUSE),
    "after it, before the next": ("train", END, END + PAUSE.replace("(step)", "(step + 1)")),
    "after its schedule": ("train", "            forward_backward(", f"{PAUSE}            forward_backward("),
    "before its update": ("train", AGREED, PAUSE + AGREED),
    "between micro-batches": ("forward_backward", "        loss.backward()\n", f"        loss.backward()\n{PAUSE[4:]}"),
}


@pytest.mark.parametrize("place", ELSEWHERE)
def test_a_pause_elsewhere_stops_the_clock_alone(shards, tmp_path, change, place):
    """For what is not timed, as statistics. It wrote the checkpoint again, of a state that was no step's."""
    main(options(shards, tmp_path / "plain", save_every=3))
    name, old, new = ELSEWHERE[place]
    change(name, (old, new))
    main(options(shards, tmp_path / "paused", save_every=3))
    (plain, paused) = (tmp_path / folder / "logs" for folder in ("plain", "paused"))
    untimed = lambda folder: re.sub(r"train_time:.*|resident: .*", "", lines_of(folder / "run.txt"))
    assert untimed(plain) == untimed(paused)
    names = [path.name for path in sorted((plain / "run").iterdir())]
    assert names == [path.name for path in sorted((paused / "run").iterdir())] and len(names) > 1
    for name in names:
        assert not unequal(*(read_checkpoint(folder / "run" / name)["state"] for folder in (plain, paused)))


def test_a_pause_between_micro_batches_is_none_before_the_step(shards, tmp_path, capsys, change):
    """The checkpoint of a step would hold a part of its gradients."""
    change("train", NEVER_PAUSED)
    change("forward_backward", ELSEWHERE["between micro-batches"][1:])
    ends_with(capsys, options(shards, tmp_path, save_every=3), r"error: run.must_pause\(3\) is true", 1)


MEAN = "    return sum(ranks.gather(total.item())) / (steps * h.micro_batches)\n"
APART = {  # on two ranks: what is said, once, and the change of the script
    "a validation of the first rank's": (
        "rank 1: the validation of step 0 gave None: must give its loss, a number",
        (MEAN, MEAN.replace("return", "loss =") + "    return loss if ranks.first else None\n"),
    ),
    "a validation of each rank's own": (
        r"rank 1: the validation loss of step 0 is \S+, on rank 0 \S+: must be the same on all ranks",
        (MEAN, "    return total.item()\n"),
    ),
    "a validation that is NaN on one": (
        "rank 1: the validation loss of step 0 is nan, on rank 0 1.0: must be the same on all ranks",
        (MEAN, "    return float('nan') if ranks.rank else 1.0\n"),
    ),
    "no end of a step on one": (
        r"rank 1: step 0 has no run.end_step\(\): each step calls .*",
        (END, "            ranks.first and run.end_step()\n"),
    ),
    "a break of one": (
        "rank 1: train\\(\\) has left its loop before it made step 8/8: the log is cut short",
        (LEFT, f"{LEFT}            if step == 3 and ranks.rank:\n                break\n"),
    ),
    "a return of both": (
        r"rank 0's train\(\) has ended without run.finish\(\): the log lacks its last line",
        (END, f"{END}            if step == 3:\n                return\n"),
    ),
    "a skipped step of both": (
        "run.report_loss\\(3\\), and the next step is 2: each step calls .*",
        (LEFT, f"{LEFT}            if step == 2:\n                continue\n"),
    ),
}


@pytest.mark.parametrize("case", APART)
def test_what_ranks_do_apart_is_told_once(shards, tmp_path, no_warm_up, case):
    """Of a call out of its place on the second rank alone nothing was told; a loss of its own passed for that of all."""
    said, (old, new) = APART[case]
    text, output = SCRIPT.read_text(), tmp_path / "output"
    assert text.count(old) == 1
    (tmp_path / "idea.py").write_text(text.replace(old, new))
    with output.open("w") as file:
        run = started(options(shards, tmp_path), script=tmp_path / "idea.py", stdout=file, stderr=file)
    assert run.wait(100) == 1
    errors = [line for line in output.read_text().splitlines() if "error: " in line]
    assert len(errors) == 1 and re.search(f"error: {said}$", errors[0]), output.read_text()
    assert "Traceback" not in output.read_text()


INNER = """\
                    with run.paused(step):
                        pass
                    assert run.clock.started is None and signals.pausing
"""


def test_a_pause_within_a_pause_is_the_same_one(shards, tmp_path, change):
    """The clock began within the outer one: the validation was timed, and the line after it earlier than its own."""
    change("train", (f"{PAUSED}{VALIDATED}", f"{PAUSED}{INNER}{VALIDATED}{INNER}"))
    main(options(shards, tmp_path, save_every=4))
    assert sorted(path.name for path in (tmp_path / "logs" / "run").iterdir()) == ["step_000004.pt", "step_000008.pt"]


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_a_loop_may_hold_the_next_steps_micro_batch(shards, tmp_path, change, micro_batches):
    """As to copy it to the GPU early: of one a step also over the pause, of more from within the step."""
    sizes = dict(micro_batches=micro_batches, batch_unit=64 // micro_batches, save_every=3, keep_checkpoints=9)
    main(options(shards, tmp_path / "plain", **sizes))
    held = "            held = [*itertools.islice(batches, 1)]\n"
    passed = "forward_backward(step, manager, itertools.chain(held, batches), run)\n"
    place = (END, END + held) if micro_batches == 1 else (END, held + END)
    change("train", place, (STARTED, f"{STARTED}        held = []\n"), ("forward_backward(step, manager, batches, run)\n", passed))
    main(options(shards, tmp_path / "held", **sizes))
    for name in ("step_000003.pt", "step_000008.pt"):
        states = [read_checkpoint(tmp_path / folder / "logs" / "run" / name)["state"] for folder in ("plain", "held")]
        assert not unequal(*states)


def test_a_loop_may_hold_all_micro_batches(shards, tmp_path, change):
    """As on a GPU, taken before the first step: none is left for another one."""
    main(options(shards, tmp_path / "plain", save_every=5))
    change("train", (STARTED, f"        batches = iter([*batches])\n{STARTED}"), (CLOSED, ""))
    main(options(shards, tmp_path / "held", save_every=5))
    for name in ("step_000005.pt", "step_000008.pt"):
        states = [read_checkpoint(tmp_path / folder / "logs" / "run" / name)["state"] for folder in ("plain", "held")]
        assert not unequal(*states)


def test_a_loop_may_open_its_micro_batches_in_parts(shards, tmp_path, change):
    """As for a stage each, before the clock begins: no step takes of all."""
    main(options(shards, tmp_path / "plain", save_every=5))
    rest = "run.ahead(functools.partial(micro_batches, h, ranks, training=True, first_step=5), h.micro_batches, 3)"
    opened = "h.total_iterations - run.first_step)\n"
    change("train", (opened, f"5)\n        batches = itertools.chain(batches, {rest})\n"), (CLOSED, ""))
    main(options(shards, tmp_path / "parts", save_every=5))
    states = [read_checkpoint(tmp_path / folder / "logs" / "run" / "step_000008.pt")["state"] for folder in ("plain", "parts")]
    assert not unequal(*states)


def test_a_part_of_a_validation_is_no_part_of_a_step(shards, tmp_path, change):
    """A few batches alone, for speed, and the next checkpoint was said to be passed over."""
    change("validate", ("if i % share == 0 and run.heard_signal(total):", "if i == 0:"))
    main(options(shards, tmp_path, save_every=3, val_batch_tokens=64))  # as many batches as steps
    assert len([*(tmp_path / "logs" / "run").iterdir()]) > 1


def test_the_clock_goes_on_after_an_error_in_a_pause(shards, tmp_path, change):
    """A script passed over what failed in its pause, and no step behind it was timed."""
    failed = f"{VALIDATED}                    elif step == 3:\n                        raise ArithmeticError\n"
    block = "".join(f"    {line}\n" for line in f"{PAUSED}{failed}".splitlines())
    passed_over = f"                try:\n{block}                except ArithmeticError:\n                    pass\n"
    once_more = "if is_validated(step, h) or run.must_pause(step):", "if is_validated(step, h) or step == 3:"
    change("train", once_more, (f"{PAUSED}{VALIDATED}", passed_over))
    main(options(shards, tmp_path, val_every=0))
    log = tmp_path / "logs" / "run.txt"
    ended = re.findall(r"^step:(\d)/8 train_time:(\d+)ms", log.read_text(), re.M)
    assert ended[-1][0] == "8"
    times = [int(time) for _, time in ended[-5:]]
    assert times == sorted(set(times))


def test_a_validation_that_is_timed_says_so(shards, tmp_path, change):
    """Outside of a pause its line had the time of the pause before it, so 0 without one."""
    change("train", (PAUSED, "                if True:\n"))
    main(options(shards, tmp_path))
    log = tmp_path / "logs" / "run.txt"
    lines = len(re.findall("^step:", lines_of(log), re.M))  # behind the sources, in which some stand, too
    times = [int(time) for time in re.findall(r"^step:.* train_time:(\d+)ms", log.read_text(), re.M)[-lines:]]
    assert lines > 8
    assert times == sorted(times) and times[-1] > times[0]


def test_what_the_end_lacks_is_told(shards, tmp_path, capsys, change):
    """A validation after the loop takes no part in a pause, which saves."""
    one_less = ("range(run.first_step, h.total_iterations + 1)", "range(run.first_step, h.total_iterations)")
    change("train", one_less, (CLOSED, f"{CLOSED}        {LAST}"))
    said = "all steps are done, but no checkpoint is of its end, without `with run.paused` after the last step"
    ends_with(capsys, options(shards, tmp_path, save_every=3), said, 1)
    main(options(shards, tmp_path, run_id="unsaved"))


def test_a_run_without_its_last_validation_is_told(shards, tmp_path, capsys, change):
    change("train", ("range(run.first_step, h.total_iterations + 1)", "range(run.first_step, h.total_iterations)"))
    ends_with(capsys, options(shards, tmp_path), "all steps are done, but its log lacks the validation of its end", 1)

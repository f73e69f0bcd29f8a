"""What a log holds is read back exactly, and what is wrong with it is said."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import made_logs
from made_logs import BANNER, ENVIRONMENT, ROOT, RULE, SOURCES, make_log, public_log, step_lines

from runlog import at_step, parse_log, read_log

TRAPS = (
    RULE,
    BANNER,
    "# data/shards.py",
    f"{BANNER}\n# runtime/log.py\n{BANNER}",
    f'x = "{RULE}"',
    "step:7/9 train_time:1ms step_avg:1.00ms",
    "sample, after a prompt from x:",
    "é ⟫",
    "",
)
NAMES = ("my ideas/idea 2.py", "train_gpt.py", "data/__init__.py", "runtime/log.py")


@st.composite
def python_source(draw):
    """Statements and strings; the strings hold lines such as those of a log."""
    lines = draw(st.lists(st.sampled_from(TRAPS), max_size=5))
    string = "x = '''\n" + "\n".join(lines) + "\n'''"
    statements = st.sampled_from(["y = 1", "import os", "# ----", string])
    pieces = draw(st.lists(statements, max_size=4))
    return ("\n".join(pieces) + draw(st.sampled_from(["", "\n"])) * bool(pieces)).encode()


@settings(max_examples=60, deadline=None)
@given(names=st.permutations(NAMES), count=st.integers(1, len(NAMES)), data=st.data())
def test_sources_and_figures_read_back_as_they_were_written(names, count, data):
    sources = {name: data.draw(python_source()) for name in names[:count]}
    total = data.draw(st.integers(1, 9))
    stop = data.draw(st.integers(0, total))
    log = parse_log(make_log(sources, lines=step_lines(stop, total=total, every=3)))
    assert [*log.sources.items()] == [*sources.items()]
    assert log.environment == ENVIRONMENT.replace("SCRIPT", names[0])
    assert log.times == {step: 10.0 * step for step in range(stop + 1)}
    at = [step for step in range(stop + 1) if step % 3 == 0 or step == total]
    assert [step for step, _, _ in log.validations] == at
    assert bool(log.fault) == (stop < total) and not log.problems


def test_what_somebody_prints_beside_the_figures_changes_none():
    plain = parse_log(make_log())
    between = step_lines().replace(" train_time", " grad_norm:1.2 train_time")
    beside = "step 3 had the largest gradient\n" + step_lines() + "step:8/8 ema_loss:2.9\n"
    after = [step_lines(extra=extra) for extra in (" grad_norm:1.23", " grad_norm:1e-3 lr:0.5x")]
    for log in (parse_log(make_log(lines=lines)) for lines in (between, beside, *after)):
        assert (log.times, log.validations) == (plain.times, plain.validations)
        assert log.total == 8 and not log.fault


def test_figures_follow_the_last_line_of_three_dashes():
    assert parse_log(make_log()).figures == {} == parse_log(public_log()).figures
    end = f"{made_logs.END}---\nsteps: 9\n---\nval_loss: 3.2779\ntokens_M: 1e+3\nhost: a: b\nsteps: 8\n"
    log = parse_log(make_log(end=end))
    assert log.figures == {"val_loss": 3.2779, "tokens_M": 1000.0, "steps": 8.0}
    assert not log.fault and at_step(log, 4).figures == {}  # they are the whole run's


@pytest.mark.parametrize("kernels", [False, True])
def test_logs_of_the_public_speedrun_read_exactly(kernels):
    log = parse_log(public_log(kernels=kernels))
    names = ["train_gpt.py", "triton_kernels.py"][: 1 + kernels]
    assert log.sources == {name: SOURCES[name] for name in names}
    expected = {"Python": "3.12.7", "PyTorch": "2.10.0", "CUDA": "12.6", "Triton": "3.5.0"}
    expected |= {"driver": "570.10", "GPUs": "8 × NVIDIA H100 80GB HBM3"}
    assert {name: log.facts[name] for name in expected} == expected
    assert (log.validations, log.fault) == ([(0, 10.8, 0.0), (2, 3.27, 20.0)], "")


def test_every_log_under_records_reads():
    paths = [*ROOT.glob("records/2026-*/**/*.txt")]
    assert len(paths) > 100
    for path in paths:
        log = read_log(path)
        assert (log.fault, log.problems) == ("", []), path
        assert log.sources and log.settings and log.facts["PyTorch"], path


WHOLE, CUT = step_lines(), step_lines(5, total=8)


FAULTS = [
    (CUT, "cut short at step 5/8"),
    (CUT + "Traceback (most …):\nRuntimeError: boom\n", "crashed at step 5/8: Run"),
    (WHOLE + WHOLE, "step 0 follows step 8: more than one run"),
    ("", "cut short before its first step"),
    (WHOLE.replace("loss:3.2700", "loss:nan"), "crashed: the validation loss is nan"),
    (WHOLE.replace("train_time:70ms", "train_time:7ms"), "wrong time: 7 ms at step 7"),
    (WHOLE + "step:8/8 val_loss:3.1 train_time:80ms\n", "step 8 has two validation losses"),
]


@pytest.mark.parametrize("lines, fault", FAULTS)
def test_a_run_that_is_not_complete_says_why(lines, fault):
    assert parse_log(make_log(lines=lines)).fault.startswith(fault)


def test_a_log_that_ends_within_its_header():
    data = make_log()
    assert "within its sources" in parse_log(data[:60]).fault
    assert "within its environment" in parse_log(data[: data.find(b"attention:")]).fault


def test_a_last_line_that_is_still_written_is_not_read():
    log = parse_log(make_log(lines=CUT + "step:6/8 train_time:6", end=""))
    assert (max(log.times), log.fault) == (5, "cut short at step 5/8")


def test_a_resumed_run_names_both_machines_and_its_changed_source():
    part = ENVIRONMENT.replace("0bbfd16a", "11111111")
    note = "resumed at step 4 from c/4.pt, with changed source, 2 lines of difference"
    log = parse_log(make_log(environment=f"{ENVIRONMENT}\n{note}\n{part}\n-x = 1\n+x = 2"))
    assert log.facts["host"] == "0bbfd16a then 11111111"
    assert (log.resumed_at, log.source_changes) == ([4], "-x = 1\n+x = 2")
    assert log.settings["lr"] == "0.5" and log.shards["a_val_0.bin"] == "0000000b"

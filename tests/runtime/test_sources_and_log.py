"""runtime/sources.py and runtime/log.py: what a log holds, and what a console shows of it."""

import os
import resource
import select
import sys

import pytest
import torch

from common import train_gpt
from runtime.log import Log, log_header, machine_facts, settings_text
from runtime.sources import RULE, changes, printable


def test_printable_leaves_no_control_character():
    text = "".join(map(chr, range(0x100))) + "\u202e\ud800ß→\U0001f600"
    shown = printable(text)
    assert all(char.isprintable() or char in "\n\t" for char in shown)
    assert printable("\x1b[2J\r\0") == r"\x1b[2J\r\x00"
    assert printable("ß→\U0001f600\n\t") == "ß→\U0001f600\n\t"


def test_changes_of_sources():
    before = {"train.py": "x = 1\n", "a.py": "y = 2\nz = 3"}
    assert changes(before, before) == []
    diff = changes(before, {"train.py": "x = 1\n", "a.py": "y = 2\nz = 4", "b.py": "new"})
    assert {"-z = 3", "+z = 4", "+new"} <= {*diff} and "-x = 1" not in diff


def test_facts_of_a_machine_name_no_folder_of_the_user(monkeypatch):
    for name, value in (("OMP_NUM_THREADS", "1"), ("NCCL_DEBUG", "a\nb"), ("MKL_X", "/home/me")):
        monkeypatch.setenv(name, value)
    *_, variables = machine_facts(torch.device("cpu"), 3)
    assert "NCCL_DEBUG='a\\nb'" in variables and "OMP_NUM_THREADS='1'" in variables
    assert "/home" not in variables


def test_settings_are_a_line_that_python_reads():
    h = train_gpt.Hyperparameters(run_id="a'b", seed=3)
    assert eval(settings_text(h), vars(train_gpt)) == h


# -----------------------------------------------------------------------------
# Log


def test_a_log_begins_with_its_header_and_the_lines_of_a_resumed_run(tmp_path, capsys):
    path = tmp_path / "x.txt"
    path.write_text("old")
    header = log_header({"train.py": "x = 1"}, ["a", "b"])
    log = Log(path, True, header, "before\n")
    log.write("line\0\x1b[2J")
    log.write("quiet", console=False)
    assert header == f"x = 1\n{RULE}\na\nb\n{RULE}"
    assert path.read_text() == f"{header}\nbefore\nline\\x00\x1b[2J\nquiet\n"
    assert log.lines == "before\nline\\x00\x1b[2J\nquiet\n"
    assert capsys.readouterr().out == "line\\x00\\x1b[2J\n"


def test_lines_wait_for_a_full_disk(tmp_path, capsys):
    """Part of a line is written, the rest follows. Lines that are lost at the end are an error."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    log = Log(tmp_path / "x.txt", True, "header")
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10, hard))
        log.write("first line")
        log.write("second")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert log.path.read_text() == "header\nfir"
    assert "x.txt: File too large" in capsys.readouterr().out
    log.write("third")
    assert log.path.read_text() == "header\nfirst line\nsecond\nthird\n"
    log.file.close()
    log.file = open("/dev/full", "ab", buffering=0)
    log.write("lost")
    with pytest.raises(OSError, match="x.txt lacks its last 5 bytes"):
        log.close()


def test_a_terminal_has_one_live_line(tmp_path, monkeypatch):
    ours, theirs = os.openpty()
    shown = b""
    with open(theirs, "w") as terminal:
        monkeypatch.setattr(sys, "stdout", terminal)
        log = Log(tmp_path / "x.txt", True, "header")
        log.write_step("step:1/2 time", "step:1/2 time loss:3")
        log.write("a line")
        while not shown.endswith(b"a line\r\n"):
            assert select.select([ours], [], [], 100)[0], shown
            shown += os.read(ours, 1000)
    os.close(ours)
    assert shown.decode() == "\r\x1b[Kstep:1/2 time loss:3\r\x1b[Ka line\r\n"
    assert log.path.read_text() == "header\nstep:1/2 time\na line\n"

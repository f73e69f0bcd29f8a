"""Checkpoints on disks that others use: the newest is found, the last good one stays, nothing foreign is read or waited for."""

import errno
import os
import re
import resource
import shutil
from pathlib import Path

import pytest
import torch

import train_gpt
from common import ends_with, exit_code, forked, lines_of, options, text_of, unequal, without_rights
from launch.sources import check_unused
from runtime import checkpoints
from runtime.checkpoints import CheckpointError, find_checkpoint, read_checkpoint, write_checkpoint
from runtime.log import RULE, Log, same_run
from runtime.options import is_plain_name
from runtime.run import Run
from train_gpt import TrainingManager, main

END = "step_000008.pt"


def save(folder: Path, *steps: int, keep: int = 99) -> None:
    for step in steps:
        run = folder.name.encode().decode()  # as an option's value, no key's own object
        write_checkpoint(folder / f"step_{step:06d}.pt", {"run_id": run, "step": step}, keep)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture(scope="module")
def good(shards, tmp_path_factory):
    """The logs' folder of a run that saved every step."""
    folder = tmp_path_factory.mktemp("good")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_gpt, "warm_up", lambda *_: None)
        main(options(shards, folder, save_every=1, keep_checkpoints=99))
    return folder / "logs"


# -----------------------------------------------------------------------------
# Which is the latest


@pytest.mark.parametrize("run", ["", "a"])
def test_the_latest_of_a_run_is_that_of_the_last_step_whatever_the_files_times(tmp_path, run):
    """cp -r gives them in any order; a step has as many digits as it likes."""
    save(tmp_path / "a", 9, 10, 1_000_000)
    for age, name in enumerate(("step_1000000.pt", "step_000009.pt", "step_000010.pt")):
        os.utime(tmp_path / "a" / name, (10**9 + age, 10**9 + age))
    assert find_checkpoint("latest", f"{tmp_path}", run)[1]["step"] == 1_000_000


def test_of_several_runs_the_one_that_wrote_last_has_the_latest(tmp_path):
    save(tmp_path / "long", 500)
    save(tmp_path / "short", 3, 4)
    os.utime(tmp_path / "long" / "step_000500.pt", (10**9, 10**9))
    os.utime(tmp_path / "short" / "step_000004.pt", (10**9 - 5, 10**9 - 5))
    assert find_checkpoint("latest", f"{tmp_path}")[0].parts[-2:] == ("short", "step_000004.pt")


def dangling(path: Path) -> None:
    path.symlink_to("nowhere")


def empty_dict(path: Path) -> None:
    write_checkpoint(path, {}, 99)


def huge(path: Path) -> None:
    path.touch()
    os.truncate(path, 100 << 30)


PASSED_OVER = {  # what makes a file of a later step, and why it is no checkpoint
    "a dangling link": (dangling, "cannot be read: No such file or directory"),
    "a FIFO": (os.mkfifo, "not a regular file"),
    "a folder": (os.mkdir, "cannot be read: Is a directory"),
    "a device": (lambda path: path.symlink_to("/dev/zero"), "not a regular file"),
    "100 GiB": (huge, r"not a checkpoint of this version \(begins with b'\\x00"),
    "empty": (Path.touch, r"not a checkpoint of this version \(begins with b''"),
    "a bare tensor": (lambda path: write_checkpoint(path, torch.zeros(3), 99), "holds a Tensor instead of a run's state"),
    "an empty dict": (empty_dict, "holds nothing instead of a run's state"),
}  # fmt: skip


@pytest.mark.parametrize("case", PASSED_OVER)
def test_what_is_no_checkpoint_is_refused_before_it_is_read(tmp_path, capsys, case):
    """By its name, and by `latest`, which takes the one before."""
    make, why = PASSED_OVER[case]
    save(tmp_path / "a", 7)
    path = tmp_path / "a" / "step_000008.pt"
    make(path)
    with pytest.raises(CheckpointError, match=f"step_000008.pt: {why}"):
        read_checkpoint(path)
    assert find_checkpoint("latest", f"{tmp_path}", "a")[1]["step"] == 7
    assert re.search(f"passed over .*step_000008.pt: {why}", capsys.readouterr().err)


def test_what_is_passed_over_is_told_once(tmp_path, capsys, monkeypatch):
    """By the launcher's check; its ranks find the same."""
    monkeypatch.setenv("BANKRUN_LAUNCHER", "1")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "step_000008.pt").write_text("x")
    with pytest.raises(CheckpointError, match="no usable checkpoint"):
        find_checkpoint("latest", f"{tmp_path}", "run")
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(("closed", "run", "found"), [("b", "", 3), ("b", "b", None), ("", "", None)], ids=str)
def test_a_folder_that_may_not_be_read_is_not_passed_over_in_silence(tmp_path, closed, run, found):
    """One run's, asked for or not, or that of all, as another user keeps it: a glob finds nothing there."""
    logs = tmp_path / "logs"
    save(logs / "a", 3)
    save(logs / "b", 7)
    (logs / closed).chmod(0o300)

    def work() -> None:
        without_rights()
        try:
            assert find_checkpoint("latest", f"{logs}", run)[1]["step"] == found
        except CheckpointError as error:
            assert found is None and "no usable checkpoint in" in f"{error}"

    assert exit_code(forked(work, tmp_path / "output")) == 0, text_of(tmp_path / "output")
    assert f"passed over {logs / closed}: cannot be read: Permission denied\n" in text_of(tmp_path / "output")


def test_a_copy_under_a_later_steps_name_is_no_later_step(tmp_path, capsys):
    save(tmp_path / "a", 3, 7)
    shutil.copy(tmp_path / "a" / "step_000003.pt", tmp_path / "a" / "step_000009.pt")
    assert find_checkpoint("latest", f"{tmp_path}", "a")[1]["step"] == 7
    assert "step_000009.pt: holds step 3" in capsys.readouterr().err


@pytest.mark.parametrize("held", [dict(step=torch.tensor([5, 5])), dict(step=5, run_id=torch.zeros(0)), dict(step=True)], ids=str)
def test_a_step_that_is_no_number_is_passed_over(tmp_path, capsys, held):
    """Made by hand, under a fitting SHA-256: a tensor of several is neither equal nor not."""
    save(tmp_path / "a", 1, 3)
    for step in (1, 5):
        write_checkpoint(tmp_path / "a" / f"step_{step:06d}.pt", held, 99)
    assert find_checkpoint("latest", f"{tmp_path}", "a")[1]["step"] == 3
    said = r": holds step True of run a: name it| cannot be resumed: (step|run_id) is a tensor out of place"
    assert re.search(f"passed over .*step_000005.pt({said})", capsys.readouterr().err)


def test_a_copy_that_was_put_aside_is_no_run_of_its_own(good, shards, tmp_path, capsys, no_warm_up):
    """The newest file of all; its run would be taken back to it, and lose its later checkpoints."""
    shutil.copytree(good, tmp_path / "logs")
    (tmp_path / "logs" / "aside").mkdir()
    shutil.copy(tmp_path / "logs" / "run" / "step_000003.pt", tmp_path / "logs" / "aside")
    assert find_checkpoint("latest", f"{tmp_path / 'logs'}")[0] == tmp_path / "logs" / "run" / END
    said = "aside/step_000003.pt: holds step 3 of run run: name it to go on from there"
    assert said in capsys.readouterr().err


def test_a_checkpoint_larger_than_the_memory_is_refused(tmp_path):
    """Its beginning is right, and its size 100 GiB."""
    path = tmp_path / "step_000001.pt"
    path.write_bytes(checkpoints.MAGIC)
    os.truncate(path, 100 << 30)

    def work() -> None:
        used = int(text_of(Path("/proc/self/statm")).split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 30), used + (1 << 30)))
        with pytest.raises(CheckpointError, match="step_000001.pt: cannot be read: MemoryError"):
            read_checkpoint(path)

    assert exit_code(forked(work, tmp_path / "output")) == 0, text_of(tmp_path / "output")


def test_latest_goes_on_from_where_the_run_went_on(good, shards, tmp_path, capsys, no_warm_up):
    """A run resumed from step 2 has left steps 3 to 8 of its first course; then it is killed after step 3."""
    shutil.copytree(good, tmp_path / "logs")
    step_optimizers = TrainingManager.step_optimizers

    def fail(self, step):
        if step == 3:
            raise ValueError("killed")
        step_optimizers(self, step)

    arguments = options(shards, tmp_path, save_every=1, keep_checkpoints=99)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(ValueError, match="killed"):
        patch.setattr(TrainingManager, "step_optimizers", fail)
        main([*arguments, f"--resume={tmp_path}/logs/run/step_000002.pt"])
    main([*arguments, "--resume=latest"])
    printed = capsys.readouterr()
    assert "resumed at step 3 from" in printed.out
    passed_over = re.findall(r"passed over .*step_00000(\d).pt: .*run.txt is another run's, was edited, or its run went on", printed.err)
    assert passed_over == [*"87654"]
    found, expected = (read_checkpoint(logs / "run" / END) for logs in (tmp_path / "logs", good))
    assert unequal(found["state"], expected["state"]) == []


@pytest.mark.parametrize(("note", "kept"), [("", True), ("resumed\n", False)])
def test_a_log_with_fewer_lines_is_of_the_same_course_unless_that_went_on_from_an_earlier_step(tmp_path, note, kept):
    """A machine that went down left less; a resumption left a note. Its steps may have taken the same milliseconds."""
    (path := tmp_path / "run.txt").write_text(f"source\n{RULE}\nPython\n{note}{RULE}\nstep:1\n")
    saved = {"header": f"source\n{RULE}\nPython\n{RULE}", "lines": "step:1\nstep:2\n"}
    assert same_run(path, saved) == (("source", "Python") if kept else None)


@pytest.mark.parametrize("cut", range(4))
@pytest.mark.parametrize("nul_bytes", [0, 5000])
def test_what_a_power_loss_leaves_of_a_log_is_of_its_course(tmp_path, cut, nul_bytes):
    """A file system that had made room for bytes that it never wrote; a character that is cut."""
    text = [f"source √\n{RULE}\nPython √\n{RULE}\n", "step:1 √", "\nstep:2\n"]
    whole = "".join(text).encode()
    sizes = [0, len("source √".encode()) - 1, len(text[0].encode()) - 1, len("".join(text[:2]).encode()) - 1]
    (path := tmp_path / "run.txt").write_bytes(whole[: sizes[cut]] + bytes(nul_bytes))
    saved = {"header": text[0][:-1], "lines": text[1] + text[2]}
    assert same_run(path, saved) == ("source √", "Python √")
    path.write_bytes(b"another" + whole[: sizes[cut]] + bytes(nul_bytes))
    assert same_run(path, saved) is None


def at_once(*_) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("steps", [0, 1])
def test_latest_keeps_to_a_course_from_its_first_step_on(good, shards, tmp_path, capsys, no_warm_up, monkeypatch, steps):
    """A run resumed from step 2 is ended after so many steps: the first cuts its log, so steps 3 to 8 are no longer its own."""
    shutil.copytree(good, tmp_path / "logs")
    arguments = options(shards, tmp_path, save_every=1, keep_checkpoints=99)
    before = (tmp_path / "logs" / "run.txt").read_bytes()
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        if steps:
            patch.setattr(Run, "must_pause", lambda run, step: step > 2 and at_once())
        else:
            patch.setattr(train_gpt, "warm_up", at_once)
        main([*arguments, f"--resume={tmp_path}/logs/run/step_000002.pt"])
    assert ((tmp_path / "logs" / "run.txt").read_bytes() == before) == (steps == 0)
    capsys.readouterr()
    main([*arguments, "--resume=latest"])
    assert f"resumed at step {2 if steps else 8} from" in capsys.readouterr().out


def test_a_run_that_saves_while_its_latest_is_read_is_not_cut_back(good, shards, tmp_path, capsys, no_warm_up, monkeypatch):
    """It ends, as by a signal, before this one holds its lock: its last steps are not thrown away."""
    shutil.copytree(good, tmp_path / "logs")
    run = tmp_path / "logs" / "run"
    for step in (7, 8):
        (run / f"step_{step:06d}.pt").rename(tmp_path / f"step_{step:06d}.pt")
    check_fits, log = checkpoints.check_fits, text_of(tmp_path / "logs" / "run.txt")

    def late(*arguments) -> None:
        check_fits(*arguments)
        (tmp_path / "step_000007.pt").rename(run / "step_000007.pt")

    arguments = [*options(shards, tmp_path), "--resume=latest"]
    with monkeypatch.context() as patch:
        patch.setattr(checkpoints, "check_fits", late)
        ends_with(capsys, arguments, "run run has saved a checkpoint meanwhile: start again", 1)
    assert text_of(tmp_path / "logs" / "run.txt") == log and names(tmp_path / "logs") == ["run", "run.txt"]
    main(arguments)
    assert "resumed at step 7 from" in capsys.readouterr().out


# -----------------------------------------------------------------------------
# What is kept


KEPT = {  # steps that are there, the step that is written, how many stay, and which
    "of the newest": ((1, 2, 3), 4, 2, (3, 4)),
    "one": ((1, 2, 3), 4, 1, (4,)),
    "after a step back": ((2, 6, 7), 3, 2, (2, 3)),
    "room for all": ((2, 6, 7), 3, 9, (2, 3, 6, 7)),
    "written again": ((1, 2), 2, 2, (1, 2)),
}  # fmt: skip


@pytest.mark.parametrize("case", KEPT)
@pytest.mark.parametrize("run", ["a", "run_id", "step"])  # pickled names are of a key's own object, which Python's paths take
def test_the_file_just_written_and_the_steps_before_it_stay(tmp_path, case, run):
    there, step, keep, kept = KEPT[case]
    save(tmp_path / run, *there)
    save(tmp_path / run, step, keep=keep)
    assert names(tmp_path / run) == [f"step_{step:06d}.pt" for step in kept]


def test_a_run_that_older_source_began_deletes_its_checkpoints(tmp_path):
    """Which began otherwise."""
    for step in (1, 2):
        write_checkpoint(tmp_path / "a" / f"step_{step:06d}.pt", {"step": step, "seconds": 0.5, "run_id": "a", "more": "x" * 9999}, 9)
    save(tmp_path / "a", 3, keep=1)
    assert names(tmp_path / "a") == ["step_000003.pt"]


def test_an_empty_file_of_a_later_step_costs_no_checkpoint(tmp_path):
    save(tmp_path / "a", 7)
    (tmp_path / "a" / "step_999999.pt").touch()
    save(tmp_path / "a", 8, keep=1)
    assert find_checkpoint("latest", f"{tmp_path}", "a")[1]["step"] == 8


def test_files_of_an_idea_beside_the_checkpoints_stay(tmp_path):
    """Names like step_2.pt counted, and were deleted."""
    save(tmp_path / "a", 1)
    for name in ("step_2.pt", "step_0000003.pt", "step_000004_ema.pt"):
        (tmp_path / "a" / name).touch()
    save(tmp_path / "a", 5, keep=1)
    assert names(tmp_path / "a") == ["step_0000003.pt", "step_000004_ema.pt", "step_000005.pt", "step_2.pt"]


def test_so_do_those_with_a_checkpoints_name(tmp_path):
    """An idea's bare weights were deleted, and counted among the newest, so that real ones went. A folder stays, too."""
    save(tmp_path / "a", 1, 4)
    for step in (2, 3, 5, 6):
        torch.save({"weight": torch.zeros(2)}, tmp_path / "a" / f"step_{step:06d}.pt")
    (tmp_path / "a" / "step_000007.pt").mkdir()
    os.mkfifo(tmp_path / "a" / "step_000009.pt")
    save(tmp_path / "a", 8, keep=2)
    assert names(tmp_path / "a") == [f"step_{step:06d}.pt" for step in (2, 3, 4, 5, 6, 7, 8, 9)]


def test_so_do_checkpoints_of_another_run_and_copies(tmp_path):
    """One that was put aside there under a later step's name was deleted, without a word."""
    save(tmp_path / "b", 1, 4)
    save(tmp_path / "a", 1, 2, 3)
    for old, new in (("b/step_000004.pt", "step_000100.pt"), ("b/step_000001.pt", "step_000001.pt"), ("a/step_000002.pt", "step_000050.pt")):
        shutil.copy(tmp_path / old, tmp_path / "a" / new)
    save(tmp_path / "a", 4, keep=1)
    assert names(tmp_path / "a") == [f"step_{step:06d}.pt" for step in (1, 4, 50, 100)]


def test_what_cannot_be_deleted_does_not_make_a_save_fail(tmp_path, capsys, monkeypatch):
    def refuse(path, **_):
        if path.name == "step_000003.pt":
            raise OSError(errno.EPERM, "Operation not permitted")
        os.unlink(path)

    save(tmp_path / "a", 3)
    (tmp_path / "a" / "notes.pt").touch()
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", lambda path, missing_ok=False: path.exists() and refuse(path))
        save(tmp_path / "a", 4, 5, keep=1)
    assert names(tmp_path / "a") == ["notes.pt", "step_000003.pt", "step_000005.pt"]
    assert "step_000003.pt: cannot be deleted: " in capsys.readouterr().err


ROOM = [  # --keep_checkpoints, --save_every, files that are there; how many files a run of 8 steps adds
    (100000, 3, 0, 3), (100000, 1, 0, 8), (2, 1, 0, 3), (1, 8, 0, 1), (2, 1, 2, 1), (1, 8, 5, 1), (9, 1, 4, 6),
]  # fmt: skip


@pytest.mark.parametrize("keep, every, there, files", ROOM)
def test_room_is_asked_for_the_saves_to_come(shards, tmp_path, monkeypatch, capsys, keep, every, there, files):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**9, 10**9, 1000))
    save(tmp_path / "logs" / "run", *range(1, there + 1))
    message = f"/run: {files} checkpoints need"
    if there:  # as a resumed run sees them
        with pytest.raises(OSError, match=message):
            checkpoints.check_room(tmp_path / "logs" / "run", {}, 1, keep, 8 // every)
    else:
        ends_with(capsys, options(shards, tmp_path, save_every=every, keep_checkpoints=keep), message, code=1)
        assert not (tmp_path / "logs").exists()


@pytest.mark.parametrize("there", [False, True])
def test_folders_that_have_no_room_are_left_as_they_were(tmp_path, monkeypatch, there):
    """An empty log_dir/RUN stayed, of a run that never began."""
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**9, 10**9, 1000))
    if there:
        (tmp_path / "logs" / "run").mkdir(parents=True)
    before = [*tmp_path.rglob("*")]
    with pytest.raises(OSError, match="/logs/run: 3 checkpoints need .* make room or lower --keep_checkpoints"):
        checkpoints.check_room(tmp_path / "logs" / "run", {}, 1, 2, 8)
    assert [*tmp_path.rglob("*")] == before
    monkeypatch.undo()
    checkpoints.check_room(tmp_path / "logs" / "run", {}, 1, 2, 8)  # nor where there is room: the first save makes them
    assert [*tmp_path.rglob("*")] == before


def test_folders_on_a_full_disk_are_left_as_they_were(tmp_path):
    """They held the probe for room, which had not been closed."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        with pytest.raises(OSError, match="/logs/run: cannot be written: File too large"):
            checkpoints.check_room(tmp_path / "logs" / "run", {}, 1, 2, 8)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [*tmp_path.rglob("*")] == []


def test_fewer_than_one_checkpoint_are_no_advice(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**9, 10**9, 1000))
    with pytest.raises(OSError, match="2 checkpoints need .* make room or give another --log_dir$"):
        checkpoints.check_room(tmp_path, {}, 1, 1, 8)


def test_files_with_a_checkpoints_name_make_no_room(tmp_path, monkeypatch):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "step_000001.pt").write_bytes(b"an idea's")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**9, 10**9, 1000))
    with pytest.raises(OSError, match="/run: 3 checkpoints need"):
        checkpoints.check_room(tmp_path / "run", {}, 1, 2, 8)


def test_a_new_run_does_not_delete_the_checkpoints_of_another(good, shards, tmp_path, capsys):
    """Whose log was moved away, as the message on it says; resumed, they are its own."""
    shutil.copytree(good, tmp_path / "logs")
    before = names(tmp_path / "logs" / "run")
    (tmp_path / "logs" / "run.txt").unlink()
    message = "/logs/run holds another run's checkpoints: move it, or give another --run_id or --log_dir"
    ends_with(capsys, options(shards, tmp_path, save_every=2, keep_checkpoints=1), message, code=1)
    assert names(tmp_path / "logs") == ["run"] and names(tmp_path / "logs" / "run") == before


@pytest.mark.parametrize("by", ["run_id", "log_dir"])
def test_a_resumed_run_does_not_delete_the_checkpoints_of_another(good, shards, tmp_path, capsys, by):
    """Under that one's name, or in a folder where another has its own; one whose log was deleted goes on beside its own."""
    other = tmp_path / "logs" / ("other" if by == "run_id" else "run")
    shutil.copytree(good / "run", other)
    where = dict(run_id="other") if by == "run_id" else {}
    before = {path.name: path.read_bytes() for path in other.iterdir()}
    message = f"{other} holds another run's checkpoints: move it, or give another --run_id or --log_dir"
    resume = options(shards, tmp_path, save_every=1, keep_checkpoints=1, resume=good / "run" / sorted(before)[0], **where)
    ends_with(capsys, resume, re.escape(message), code=1)
    assert {path.name: path.read_bytes() for path in other.iterdir()} == before and names(tmp_path / "logs") == [other.name]
    check_unused(other.with_suffix(".txt"), other / sorted(before)[0])


def test_a_new_run_does_not_replace_the_trace_of_another(good, shards, tmp_path, capsys, monkeypatch, no_warm_up):
    """Which a resumed run does: its own."""
    shutil.copytree(good, tmp_path / "logs")
    trace, log = tmp_path / "logs" / "run.trace.json", tmp_path / "logs" / "run.txt"
    trace.write_text("mine")
    log.rename(tmp_path / "moved.txt")
    message = "/logs/run.trace.json is there, another run's trace or a file of yours: move it, or give another --run_id"
    (tmp_path / "logs" / "run").rename(tmp_path / "logs" / "other")
    ends_with(capsys, options(shards, tmp_path, trace_steps="6:7"), message, code=1)
    assert trace.read_text() == "mine" and not log.exists()
    path = tmp_path / "logs" / "other" / "step_000006.pt"
    main(options(shards, tmp_path, trace_steps="6:7", resume=path))
    assert trace.read_text().startswith('{"format"')


def test_what_a_killed_save_has_left_goes_with_the_next(tmp_path):
    """Each may be as large as a checkpoint; what is no file of ours stays."""
    (tmp_path / "step_000007.pt.bankrun.tmp").write_bytes(b"a part")
    (tmp_path / "mine.tmp").write_bytes(b"mine")
    (tmp_path / "step_000009.pt.bankrun.tmp").symlink_to("mine.tmp")
    write_checkpoint(tmp_path / "step_000008.pt", {"step": 8}, 2)
    assert names(tmp_path) == ["mine.tmp", "step_000008.pt", "step_000009.pt.bankrun.tmp"]


def test_the_probe_of_a_folder_touches_no_file_of_the_users(tmp_path):
    for name in ("probe", "probe.tmp"):
        (tmp_path / name).write_text("mine")
    checkpoints.check_room(tmp_path, {}, 1, 2, 5)
    assert names(tmp_path) == ["probe", "probe.tmp"] and (tmp_path / "probe").read_text() == "mine"


# -----------------------------------------------------------------------------
# Saves that fail


def at_step(monkeypatch, step: int, act) -> None:
    step_optimizers = TrainingManager.step_optimizers
    change = lambda self, now: (step_optimizers(self, now), act() if now == step else None)
    monkeypatch.setattr(TrainingManager, "step_optimizers", change)


def test_a_removed_folder_is_made_again(shards, tmp_path, monkeypatch, no_warm_up):
    """The checkpoints', with all that is in it; and the log's, with the checkpoints' in it."""
    for i, folder in enumerate((tmp_path / "logs" / "run", tmp_path / "logs")):
        with pytest.MonkeyPatch.context() as patch:
            at_step(patch, 4, lambda folder=folder: shutil.rmtree(folder))
            main(options(shards, tmp_path, save_every=3))
        assert names(tmp_path / "logs" / "run") == ["step_000006.pt", END]
        assert re.findall(r"step:(\d)/8 train", lines_of(tmp_path / "logs" / "run.txt")) == [*"12345678"]
        os.rename(tmp_path / "logs", tmp_path / f"{i}")


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), MemoryError("out")], ids=["disk", "memory"])
def test_a_save_that_failed_is_in_the_log_and_the_next_may_succeed(shards, tmp_path, monkeypatch, capsys, error, no_warm_up):
    write = checkpoints.write_checkpoint

    def fail_at_3(path, *rest):
        if path.name == "step_000003.pt":
            raise error
        write(path, *rest)

    monkeypatch.setattr(checkpoints, "write_checkpoint", fail_at_3)
    main(options(shards, tmp_path, save_every=3))
    lines = lines_of(tmp_path / "logs" / "run.txt").splitlines()
    assert [re.sub(" /.*/", " ", line) for line in lines if not line.startswith(("step:", "peak"))] == [
        f"no checkpoint of step 3: step_000003.pt: {getattr(error, 'strerror', repr(error))}"
    ]
    assert names(tmp_path / "logs" / "run") == ["step_000006.pt", END]


def test_a_save_without_memory_is_told_as_one(tmp_path):
    """torch.save raised an error of its own over it, of an unexpected position, and the run ended in that."""
    state = {"x": torch.ones(75_000_000)}  # 300 MB

    def work() -> None:
        used = int(text_of(Path("/proc/self/statm")).split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + (100 << 20), -1))
        with pytest.raises(MemoryError):
            write_checkpoint(tmp_path / "run" / END, state, 1)
        assert not (tmp_path / "run").exists()

    assert exit_code(forked(work, tmp_path / "output")) == 0, text_of(tmp_path / "output")


def test_a_run_without_its_last_checkpoint_does_not_end_well(shards, tmp_path, monkeypatch, capsys, no_warm_up):
    """A file stands where its folder was."""
    folder = tmp_path / "logs" / "run"
    at_step(monkeypatch, 6, lambda: (shutil.rmtree(folder), folder.touch()))
    message = r"all steps are done, but no checkpoint of step 8: .*/logs/run/step_000008.pt: File exists\n"
    ends_with(capsys, options(shards, tmp_path, save_every=3), message, code=1)
    lines = lines_of(tmp_path / "logs" / "run.txt")
    assert "\nno checkpoint of step 8: " in lines and "\nstep:8/8 val_loss" in lines and "\npeak memory" in lines


def test_a_lost_log_hides_no_lost_checkpoint(shards, tmp_path, monkeypatch, capsys, no_warm_up):
    """As of one full disk: the message told of the log alone."""
    folder = tmp_path / "logs" / "run"

    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    at_step(monkeypatch, 6, lambda: (shutil.rmtree(folder), folder.touch(), monkeypatch.setattr(Log, "_put", full)))
    message = r"all steps are done, but .*/run.txt lacks its last lines and no checkpoint of step 8: .*: File exists\n"
    ends_with(capsys, options(shards, tmp_path, save_every=3), message, code=1)


# -----------------------------------------------------------------------------
# Names of runs

BAD_NAMES = [
    "..", ".", "../x", "a/b", "/a", ".hidden", "[ab]", "a*", "a?b", "*", "a\nb", "a\tb", "\x1b[31m", "a\x7f", "a\u202eb",
    "a\\b", "-a", " a", "a;b", "$a", "`a`", "a|b", "a>b", "x" * 201, "\udcff", "a\udc80",
]  # fmt: skip


@pytest.mark.parametrize("name", BAD_NAMES, ids=ascii)
def test_a_runs_name_is_one_plain_file_name(shards, tmp_path, capsys, name):
    """Nothing is written or deleted, where it would lead to or elsewhere."""
    (tmp_path / "step_000001.pt").touch()
    message = re.escape(f"--run_id={ascii(name)[1:-1]}: must be a file's name, alone")
    ends_with(capsys, options(shards, tmp_path, save_every=1, run_id=name), message, code=1)
    assert names(tmp_path) == ["step_000001.pt"]


@pytest.mark.parametrize("name", ["run", "20261122-004553-0a1b2c3d", "lr=0.3", "a.b_c-d+e", "été", "two words", "x" * 200])
def test_other_names_are_taken(name):
    assert is_plain_name(name)


def test_a_checkpoint_cannot_bring_a_name_that_leads_elsewhere(good, shards, tmp_path, capsys):
    saved = read_checkpoint(good / "run" / "step_000003.pt")
    for name in ("..", "[ab]", "a\n"):
        write_checkpoint(tmp_path / "step_000003.pt", {**saved, "run_id": name}, 9)
        arguments = [a for a in options(shards, tmp_path, resume=tmp_path / "step_000003.pt") if "run_id" not in a]
        ends_with(capsys, arguments, re.escape(f"run_id is {name!r}, must be a file's name"), code=1)
    assert names(tmp_path) == ["step_000003.pt"]


# -----------------------------------------------------------------------------
# The log of a resumed run


def test_sources_may_hold_lines_that_look_like_a_logs(good, shards, tmp_path, no_warm_up):
    """A source with the line that ends the sources, one with all of a log."""
    saved = read_checkpoint(good / "run" / "step_000003.pt")
    sources, environment = saved["log"]["header"].removesuffix(f"\n{RULE}").rsplit(f"\n{RULE}\n", 1)
    for tricky in (f'"""\n{RULE}\n"""\n', f'"""\n{RULE}\nPython\n{RULE}\nstep:1/8\n"""\n', f"x = 1\n{RULE}"):
        header = f"{tricky}{sources}\n{RULE}\n{environment}\n{RULE}"
        shutil.rmtree(tmp_path / "logs", ignore_errors=True)
        (tmp_path / "logs").mkdir()
        (tmp_path / "logs" / "run.txt").write_text(f"{header}\n{saved['log']['lines']}step:4/8 more\n")
        path = tmp_path / "step_000003.pt"
        write_checkpoint(path, {**saved, "log": {**saved["log"], "header": header}}, 9)
        for _ in range(2):
            main(options(shards, tmp_path, resume=path))
        text = (tmp_path / "logs" / "run.txt").read_text()
        assert text.startswith(f"{tricky}{sources}\n{RULE}\n{environment}\nresumed at step 3 from ")
        assert text.count("\nresumed at step 3 from ") == 1
        lines = text.removeprefix(f"{tricky}{sources}\n{RULE}\n").split(f"\n{RULE}\n")[1]
        assert re.findall(r"step:(\d)/8 train", lines) == [*"12345678"] and "more" not in lines


def test_the_header_tells_of_the_courses_whose_lines_are_there(good, shards, tmp_path, no_warm_up):
    """A run that went on from step 3 with changed source, from there again, then from step 6, and from step 3 as it began."""
    shutil.copytree(good, tmp_path / "logs")
    log, saves = tmp_path / "logs" / "run.txt", tmp_path / "logs" / "run"
    more = dict(save_every=1, keep_checkpoints=9)
    resume = lambda step: main(options(shards, tmp_path, resume=saves / f"step_{step:06d}.pt", **more))
    notes = lambda: re.findall(r"^resumed at step (\d) from .*, with (changed|the same) source", log.read_text(), re.M)
    changed = {**train_gpt.SOURCES.contents, train_gpt.SOURCES.path: b"x = 1\n"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_gpt.SOURCES, "contents", changed)
        for _ in range(2):
            resume(3)
            assert notes() == [("3", "changed")]
        resume(6)
        assert notes() == [("3", "changed"), ("6", "the same")]
    resume(3)
    assert notes() == [("3", "the same")]

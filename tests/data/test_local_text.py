"""Shards of local text: nothing lost, nothing too long, the same everywhere, and only made when they have to be."""

import errno
import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import train_gpt
from common import tiny_settings
from data import local_text
from data.local_text import DOCUMENT_BYTES, cut, split
from data.shards import READERS, DataError, check_replaced, hold_shards, read_shard, without_readers

SCRIPT = Path(local_text.__file__)
TEXT = st.text(st.sampled_from("ab é€𝄞\t\r\n\n\n"), max_size=400)


def make(monkeypatch: pytest.MonkeyPatch, source: Path, output: Path, *options: str) -> None:
    monkeypatch.setattr(sys, "argv", ["local_text.py", "--input", str(source), "--output", str(output), *options])
    local_text.main()


def documents_of(output: Path, split: str, end_of_text: int = 256) -> list[np.ndarray]:
    """The documents of all shards of a split, without their end-of-text token: (length,) uint16 each."""
    tokens = np.concatenate([read_shard(path) for path in sorted(output.glob(f"local_{split}_*.bin"))])
    starts = np.flatnonzero(tokens == end_of_text)
    assert starts[0] == 0
    return [part[1:] for part in np.split(tokens, starts[1:])]


def texts_of(output: Path, split: str) -> list[bytes]:
    return [document.astype(np.uint8).tobytes() for document in documents_of(output, split)]


def write_library(folder: Path) -> Path:
    """Forty files of some ten documents each, in nested folders, and things that are no text."""
    for number in range(40):
        file = folder / f"shelf{number % 3}" / f"book{number}.{'md' if number % 2 else 'py'}"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("".join(f"{number}.{k} " + "wörter " * 60 + "\n\n" for k in range(40)))
    (folder / "latin1.py").write_bytes("schön".encode("latin-1"))
    (folder / "binary.py").write_bytes(b"\0\0\0")
    (folder / ".git").mkdir()
    (folder / ".git" / "config.py").write_text("not wanted")
    return folder


@pytest.fixture
def library(tmp_path: Path) -> Path:
    return write_library(tmp_path / "library")


# ----------------------------------------------------------------------------------------------------------------------
# Documents


@settings(deadline=None)
@given(text=TEXT, limit=st.integers(4, 60))
def test_pieces_put_together_are_the_text_and_none_is_too_long(text: str, limit: int) -> None:
    pieces = cut(text.encode(), limit)
    assert b"".join(pieces) == text.encode()
    assert all(0 < len(piece) <= limit for piece in pieces)
    for piece in pieces:
        piece.decode()  # raises if a character was cut


@settings(deadline=None)
@given(paragraphs=st.lists(st.integers(1, 28), min_size=1, max_size=20))
def test_paragraphs_that_fit_stay_whole_and_share_pieces(paragraphs: list[int]) -> None:
    text = b"".join(b"x" * length + b"\n\n" for length in paragraphs)
    pieces = cut(text, 30)
    assert all(piece.endswith(b"\n\n") for piece in pieces)
    for piece, following in zip(pieces, pieces[1:]):  # a piece ends because the next paragraph does not fit
        assert len(piece) + following.index(b"\n\n") + 2 > 30


def test_a_long_paragraph_is_cut_at_line_ends_and_a_long_line_between_characters() -> None:
    assert cut(b"aaaa\nbbbb\ncccc\n\ndd", 11) == [b"aaaa\nbbbb\n", b"cccc\n\ndd"]
    assert cut("ééé\n".encode(), 5) == ["éé".encode(), "é\n".encode()]
    assert cut(b"a\r\n \r\nb", 6) == [b"a\r\n \r\n", b"b"]
    assert cut(b"", 10) == []


def test_a_side_of_the_split_does_not_depend_on_the_other_documents() -> None:
    documents = [f"document {number}".encode() for number in range(4000)]
    train, validation = split(documents)
    assert sorted(train + validation) == sorted(documents)
    assert set(split(documents[:2000])[1]) == set(validation) & set(documents[:2000])
    # binomial(4000, 1/20): mean 200, standard deviation 13.8; five of them on either side
    assert 131 <= len(validation) <= 269
    assert train != sorted(train) and split(documents[::-1]) == (train, validation)


def test_each_side_of_the_split_gets_a_document() -> None:
    for count in (2, 3, 4):
        train, validation = split([b"%d" % number for number in range(count)])
        assert train and validation
    with pytest.raises(DataError, match="two splits take two"):
        split([b"one"])


# ----------------------------------------------------------------------------------------------------------------------
# The program


def test_all_text_arrives_and_only_text(
    tmp_path: Path, library: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    make(monkeypatch, library, tmp_path / "out")
    arrived = texts_of(tmp_path / "out", "train") + texts_of(tmp_path / "out", "val")
    expected = [piece for file in library.glob("shelf*/*") for piece in cut(file.read_bytes())]
    assert sorted(arrived) == sorted(expected)
    report = capsys.readouterr().out
    assert "40 files (2 skipped" in report and f"{len(expected):,} documents" in report
    for path in (tmp_path / "out").glob("*.bin"):
        assert f"{path}  {len(read_shard(path)):,} tokens" in report


def test_any_tiktoken_encoding_can_be_used(
    tmp_path: Path, library: Path, monkeypatch: pytest.MonkeyPatch, offer_encoding
) -> None:
    (library / "ab.py").write_text("abab")
    encoding = offer_encoding("toy", end_of_text=301)
    make(monkeypatch, library, tmp_path / "toy", "--encoding", "toy")
    make(monkeypatch, library, tmp_path / "bytes")
    everything = []
    for part in ("train", "val"):
        documents = [document.tolist() for document in documents_of(tmp_path / "toy", part, 301)]
        assert list(map(encoding.decode_bytes, documents)) == texts_of(tmp_path / "bytes", part)
        everything += documents
    assert [300, 300] in everything
    manifest = json.loads((tmp_path / "toy" / "manifest.json").read_bytes())
    assert (manifest["encoding"], manifest["vocab_size"], manifest["bos_id"]) == ("toy", 302, 301)


def test_the_start_of_a_shard_is_a_sample_of_all_files(tmp_path: Path, library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(monkeypatch, library, tmp_path / "out")
    train = texts_of(tmp_path / "out", "train")
    files = {document.split(b".")[0] for document in train[: len(train) // 4]}
    # 40 files of 10 pieces: of a random quarter, a file is missing with probability 0.75**10 = 6 %, so two or three are; in the
    # order of the files, thirty would be. Hashes decide, so this comes out the same every time
    assert len(files) >= 32


def test_the_same_text_makes_the_same_shards_anywhere(tmp_path: Path, library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(library, tmp_path / "elsewhere" / "copy")
    make(monkeypatch, library, tmp_path / "one", "--shard_tokens", "50_000")
    make(monkeypatch, tmp_path / "elsewhere" / "copy", tmp_path / "two", "--shard_tokens", "50_000")
    shards = sorted((tmp_path / "one").glob("*.bin"))
    assert len(shards) > 5
    for shard in shards:
        assert shard.read_bytes() == (tmp_path / "two" / shard.name).read_bytes()
    make(monkeypatch, library, tmp_path / "whole")
    assert texts_of(tmp_path / "one", "train") == texts_of(tmp_path / "whole", "train")


def test_finished_work_is_not_done_again(
    tmp_path: Path, library: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    output = library / "out"  # inside of the input: must not become input
    make(monkeypatch, library, output, "--shard_tokens", "50_000")
    states = {path: path.stat().st_mtime_ns for path in output.iterdir() if path.name != ".lock"}
    capsys.readouterr()
    make(monkeypatch, library, output, "--shard_tokens", "50_000")
    report = capsys.readouterr().out
    assert "is up to date" in report and report.count("\n") == 1
    assert states == {path: path.stat().st_mtime_ns for path in states}


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES])
def test_what_is_ready_serves_where_nothing_can_be_written(
    tmp_path: Path, library: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, number: int
) -> None:
    """As in a project that is mounted for reading; what would have to be made is named."""

    def refuse(path: Path) -> None:
        raise OSError(number, os.strerror(number), f"{path}")

    make(monkeypatch, library, tmp_path / "out")
    monkeypatch.setattr("data.shards.open_lock", refuse)
    make(monkeypatch, library, tmp_path / "out")
    assert "is up to date" in capsys.readouterr().out
    said = r"out cannot be written, and holds shards of other text, .*: train on them as they are, by --data=.*/out, or name another"
    with pytest.raises(SystemExit, match=said):
        make(monkeypatch, library, tmp_path / "out", "--shard_tokens=7")
    with pytest.raises(SystemExit, match="new cannot be written: name another folder with --output"):
        make(monkeypatch, library, tmp_path / "new")


def change_letter(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-3] + b"!\n\n")


CHANGES = {
    "a changed file": lambda library, output: (library / "shelf0" / "book0.py").write_text("new " * 50),
    "a changed letter": lambda library, output: change_letter(library / "shelf0" / "book0.py"),
    "a new file": lambda library, output: (library / "new.txt").write_text("new"),
    "a lost shard": lambda library, output: (output / "local_val_000000.bin").unlink(),
    "a cut shard": lambda library, output: (output / "local_val_000000.bin").write_bytes(b"cut"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_work_is_done_again_after(change: str, tmp_path: Path, library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(monkeypatch, library, tmp_path / "out")
    CHANGES[change](library, tmp_path / "out")
    make(monkeypatch, library, tmp_path / "out")
    make(monkeypatch, library, tmp_path / "fresh")
    names = lambda folder: sorted(path.name for path in folder.iterdir())
    assert names(tmp_path / "out") == names(tmp_path / "fresh")
    for path in (tmp_path / "fresh").glob("*.bin"):
        assert path.read_bytes() == (tmp_path / "out" / path.name).read_bytes()


@pytest.mark.parametrize("limit", [local_text.READ_ANEW, 0], ids=["read anew", "by times"])
def test_other_text_of_the_same_size_and_time_is_other_text(
    limit: int, tmp_path: Path, library: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """As archives that set all times alike bring it. What is read anew may lie elsewhere."""
    monkeypatch.setattr(local_text, "READ_ANEW", limit)
    made = lambda source: (make(monkeypatch, source, tmp_path / "out"), "is up to date" not in capsys.readouterr().out)[1]
    assert made(library) and not made(library)
    book = library / "shelf0" / "book0.py"
    status, text = book.stat(), book.read_bytes()
    book.write_bytes(text.swapcase())
    os.utime(book, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert text.swapcase() != text and made(library) and not made(library)
    shutil.copytree(library, tmp_path / "elsewhere")
    assert made(tmp_path / "elsewhere") == (limit == 0)


@pytest.mark.parametrize("changed", local_text.PROGRAM, ids=lambda path: path.name)
def test_a_changed_program_makes_the_shards_again(
    changed: Path, tmp_path: Path, library: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    make(monkeypatch, library, tmp_path / "out")
    (tmp_path / "changed.py").write_bytes(changed.read_bytes() + b"#")
    program = [tmp_path / "changed.py" if path == changed else path for path in local_text.PROGRAM]
    monkeypatch.setattr(local_text, "PROGRAM", program)
    capsys.readouterr()
    make(monkeypatch, library, tmp_path / "out")
    assert "is up to date" not in capsys.readouterr().out


def test_other_options_make_other_shards_and_clear_the_old(
    tmp_path: Path, library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(monkeypatch, library, tmp_path / "out", "--shard_tokens", "50_000")
    make(monkeypatch, library, tmp_path / "out", "--suffixes", ".md, .rst")
    assert len(list((tmp_path / "out").glob("local_train_*.bin"))) == 1
    assert json.loads((tmp_path / "out" / "manifest.json").read_bytes())["files"] == 20


def test_a_file_that_cannot_be_read_is_skipped(tmp_path: Path, library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (library / "dead link.py").symlink_to(library / "nowhere")
    refused, read = library / "shelf0" / "book0.py", Path.open

    def open_(path: Path, *given, **how):
        if path == refused:
            raise PermissionError(13, "Permission denied")
        return read(path, *given, **how)

    monkeypatch.setattr(Path, "open", open_)
    make(monkeypatch, library, tmp_path / "out")
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_bytes())
    assert (manifest["files"], manifest["skipped_files"]) == (39, 3)


@pytest.mark.parametrize("read_anew", [local_text.READ_ANEW, 0])
def test_a_file_that_can_be_read_later_is_read_then(
    tmp_path: Path, library: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, read_anew: int
) -> None:
    """By its content; of a large text by whether it may be read."""
    monkeypatch.setattr(local_text, "READ_ANEW", read_anew)
    refused, read, access = library / "shelf0" / "book0.py", Path.open, os.access

    def open_(path: Path, *given, **how):
        if path == refused:
            raise PermissionError(13, "Permission denied")
        return read(path, *given, **how)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", open_)
        patch.setattr(os, "access", lambda path, mode: path != refused and access(path, mode))
        for said in ("39 files (3 skipped", "is up to date"):
            make(monkeypatch, library, tmp_path / "out")
            assert said in capsys.readouterr().out
    for said in ("40 files (2 skipped", "is up to date"):
        make(monkeypatch, library, tmp_path / "out")
        assert said in capsys.readouterr().out


def test_a_file_that_fails_for_another_reason_ends_it(tmp_path: Path, library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk or a network file system that may be there again: its text is not left out in silence."""
    broken, read = library / "shelf0" / "book0.py", Path.open

    def open_(path: Path, *given, **how):
        if path == broken:
            raise OSError(5, "Input/output error", f"{path}")
        return read(path, *given, **how)

    monkeypatch.setattr(Path, "open", open_)
    with pytest.raises(SystemExit, match=r"error: .*Input/output error: .*book0.py"):
        make(monkeypatch, library, tmp_path / "out")
    assert not [*(tmp_path / "out").glob("*.bin")]


@pytest.mark.parametrize("when", ["found", "read"])
def test_a_file_that_goes_meanwhile_is_told(tmp_path: Path, library: Path, monkeypatch, when: str) -> None:
    """As an editor's: Python's own words, of no such file, said nothing of why."""
    gone, found = sorted(library.rglob("*.py"))[-1], getattr(local_text, "find_files" if when == "found" else "read_text")

    def go(*args):
        result = found(*args)
        gone.unlink(missing_ok=True)
        return result

    monkeypatch.setattr(local_text, found.__name__, go)
    with pytest.raises(SystemExit, match=f"{gone} has gone since it was found: start again"):
        make(monkeypatch, library, tmp_path / "out")
    assert not [*(tmp_path / "out").glob("*.bin")]


@pytest.mark.parametrize("read", [False, True])
def test_a_file_that_changes_while_all_are_read_is_told(tmp_path: Path, library: Path, monkeypatch, read: bool) -> None:
    """Put back afterwards, the shards held the edit, and the manifest said that they were up to date."""
    read_text, files = local_text.read_text, sorted(library.rglob("*.py"))

    def edited(path: Path) -> bytes | None:
        if path != files[-1] and not files[-1].read_bytes().endswith(b"# edited\n"):
            files[-1].write_bytes(files[-1].read_bytes() + b"# edited\n")
        return read_text(path)

    monkeypatch.setattr(local_text, "read_text", edited)
    if not read:
        monkeypatch.setattr(local_text, "READ_ANEW", 0)  # as of large texts, told by their times
    with pytest.raises(SystemExit, match="a file has changed while all were read: start again"):
        make(monkeypatch, library, tmp_path / "out")
    assert not [*(tmp_path / "out").glob("*.bin")]


def test_a_file_that_breaks_while_it_is_read_is_named(tmp_path: Path) -> None:
    """As by a bad sector; the system's error names no file then."""
    (tmp_path / "memory").symlink_to("/proc/self/mem")
    with pytest.raises(OSError, match="Input/output error: .*/memory'"):
        local_text.read_text(tmp_path / "memory")


def test_a_large_file_that_is_no_text_is_hardly_read(tmp_path: Path, library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a disk's image, larger than memory; a text that is gets a message with its name."""
    with open(library / "disk.img", "wb") as file:
        file.truncate(1 << 40)
    assert local_text.read_text(library / "disk.img") is None
    (tmp_path / "large.txt").write_text("text")
    monkeypatch.setattr(Path, "open", Mock(side_effect=MemoryError))
    with pytest.raises(DataError, match="large.txt: not enough memory, in which all text is held: leave it out"):
        local_text.read_text(tmp_path / "large.txt")


def test_characters_between_two_blocks_are_text(tmp_path: Path) -> None:
    text = "x" * (2**20 - 1) + "ü"
    (tmp_path / "text").write_text(text)
    assert local_text.read_text(tmp_path / "text") == text.encode()
    (tmp_path / "text").write_bytes(text.encode()[:-1])
    assert local_text.read_text(tmp_path / "text") is None


def test_a_file_is_taken_once_whatever_links_lead_to_it(tmp_path: Path, library: Path) -> None:
    """As latest.txt beside the file that it means; of one elsewhere the first link."""
    before, _ = local_text.find_files(library, [".py"], tmp_path / "out")
    name, path = next(iter(before.items()))
    (library / "a latest.py").symlink_to(path)
    (tmp_path / "book.py").write_text("x = 1\n")
    for link in ("linked again.py", "linked.py"):
        (library / link).symlink_to(tmp_path / "book.py")
    now, _ = local_text.find_files(library, [".py"], tmp_path / "out")
    assert now.keys() - before.keys() == {"linked again.py"} and name in now


def test_installed_packages_are_left_out_of_pythons_own_library_alone(tmp_path: Path, library: Path, monkeypatch) -> None:
    packages = library / "site-packages"
    packages.mkdir()
    (packages / "package.py").write_text("x = 1\n")
    assert "site-packages/package.py" in local_text.find_files(library, [".py"], tmp_path / "out")[0]
    monkeypatch.setattr(local_text, "STDLIB", library)
    assert "site-packages/package.py" not in local_text.find_files(library, [".py"], tmp_path / "out")[0]


def test_links_to_folders_are_followed_once(tmp_path: Path, library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "book.md").write_text("A text that only a link leads to.\n")
    (library / "linked").symlink_to(tmp_path / "elsewhere")
    (library / "linked again").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "circle").symlink_to(library)
    make(monkeypatch, library, tmp_path / "out")
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_bytes())
    assert (manifest["files"], manifest["skipped_files"]) == (41, 2)


def test_what_gives_no_text_is_an_error_with_one_line(
    tmp_path: Path, library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "nothing").mkdir()
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "short.txt").write_text("one document")
    cases = [
        (tmp_path / "missing", (), "no such file or folder"),
        (tmp_path / "nothing", (), "no files"),
        (library, ("--suffixes", ".rs"), "no files that end in .rs"),
        (tmp_path / "empty.txt", (), "no text in 1 file(s), of which 0 are not UTF-8"),
        (library / "latin1.py", (), "no text in 1 file(s), of which 1 are not UTF-8"),
        (tmp_path / "short.txt", (), "1 document(s)"),
        (library, ("--encoding", "gpt7"), "no encoding is called 'gpt7'"),
    ]
    for source, options, message in cases:
        with pytest.raises(SystemExit) as caught:
            make(monkeypatch, source, tmp_path / "out", *options)
        assert message in caught.value.code and "\n" not in caught.value.code
        assert not list((tmp_path / "out").glob("*.bin"))


def test_the_standard_library_from_any_folder(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--output", "out"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, timeout=120)
    train, validation = (documents_of(tmp_path / "out", split) for split in ("train", "val"))
    # Python's own sources without its tests have about 14 MB, 8,000 documents; a distribution may leave some out
    assert len(train) + len(validation) > 3000
    assert max(map(len, train + validation)) <= DOCUMENT_BYTES == 2040
    total, mean = sum(map(len, train + validation)), (len(train) + len(validation)) / 20
    assert abs(len(validation) - mean) < 5 * (0.95 * mean) ** 0.5
    assert total / (len(train) + len(validation)) > 1500  # about 2,000 bytes a document


def test_a_failed_run_exits_with_1_and_no_traceback(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--input", "missing", "--output", "out"]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert run.returncode == 1 and run.stderr.startswith("local_text.py: error: ") and run.stderr.count("\n") == 1


# ----------------------------------------------------------------------------------------------------------------------
# What is not this program's


def put_fifo(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def own_shard(output: Path) -> None:
    shutil.copy(output / "local_val_000000.bin", output / "local_val_000009.bin")


def own_making(out: Path) -> None:
    (out / ".making").mkdir()
    (out / ".making" / "notes.txt").write_text("mine")


FOREIGN = {  # what stands in --output, and the message
    "another program's manifest": (lambda out: (out / "manifest.json").write_text('{"name": "app"}'), "not written"),
    "a manifest with another's shards": (
        lambda out: (out / "manifest.json").write_text('{"recipe": {}, "shards": {"../mine.bin": 1}}'), "json was not written"
    ),
    "a list": (lambda out: (out / "manifest.json").write_text("[]"), "manifest.json was not written by this program"),
    "a broken manifest": (lambda out: (out / "manifest.json").write_text("[1"), "manifest.json cannot be read .*: choose another --output"),
    "a deep manifest": (lambda out: (out / "manifest.json").write_text("[" * 10**5), "manifest.json cannot be read"),
    "a FIFO for a manifest": (lambda out: put_fifo(out / "manifest.json"), "is a link, a folder or"),
    "a shard that no manifest lists": (own_shard, "local_val_000009.bin is in no manifest.json of this program: choose"),
    "shards without a manifest": (lambda out: (out / "manifest.json").unlink(), "train_000000.bin is in no manifest.json"),
    "another's folder of our name": (own_making, "notes.txt is not this program's, which makes shards there: move it away"),
    "a FIFO for a lock": (lambda out: put_fifo(out / ".lock"), "is a link, a folder or another thing"),
}  # fmt: skip


def states(folder: Path) -> dict[str, object]:
    return {path.name: (os.lstat(path).st_mode, os.lstat(path).st_mtime_ns) for path in folder.iterdir()}


@pytest.mark.parametrize("case", FOREIGN)
def test_what_is_not_this_programs_is_named_and_left_as_it_is(
    case: str, tmp_path: Path, library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put, message = FOREIGN[case]
    make(monkeypatch, library, tmp_path / "out")
    put(tmp_path / "out")
    (tmp_path / "mine.bin").write_text("mine")
    before = states(tmp_path / "out")
    with pytest.raises(SystemExit, match=message):
        make(monkeypatch, library, tmp_path / "out", "--shard_tokens", "50_000")
    assert states(tmp_path / "out") == before and (tmp_path / "mine.bin").read_text() == "mine"


def test_files_beside_the_shards_stay(tmp_path: Path, library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of names like ours, through making, making again, and making anew."""
    (tmp_path / "out").mkdir()
    mine = ["._local_train_000000.bin", "local_notes.bin", "local_1.bin", "local_test_000000.bin", "local_train_000000.bin.old", "notes.json"]
    for name in mine:
        (tmp_path / "out" / name).write_text("mine")
    for options in ((), (), ("--shard_tokens", "50_000"), ()):
        make(monkeypatch, library, tmp_path / "out", *options)
    assert all((tmp_path / "out" / name).read_text() == "mine" for name in mine)
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {*mine, ".lock", ".readers", "manifest.json", "local_train_000000.bin", "local_val_000000.bin"}


@pytest.mark.parametrize("name", ["fineweb_train_000001.bin", "local_val_1.bin"])
def test_shards_of_others_are_not_added_to(tmp_path: Path, library: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """A run would train on both."""
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / name).write_text("mine")
    with pytest.raises(SystemExit, match=f"out/{name} is not this program's, and a run would train on both: choose another --output"):
        make(monkeypatch, library, tmp_path / "out")
    assert (tmp_path / "out" / name).read_text() == "mine"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_leaves_nothing_of_what_was_begun(number: int, tmp_path: Path) -> None:
    """SIGTERM and SIGHUP, as of a scheduler and a terminal that closes, left half a shard without a word."""
    (source := tmp_path / "text").mkdir()
    for i in range(30):
        (source / f"{i}.txt").write_text("x " * 1000)
    program = (
        "import os, sys\nfrom data import local_text\nwhole = local_text.ShardWriter.close\n"
        f"def close(self):\n    os.kill(os.getpid(), {int(number)})\n    whole(self)\n"
        "local_text.ShardWriter.close = close\nsys.argv[0] = 'local_text.py'\nlocal_text.main()"
    )
    command = [sys.executable, "-c", program, f"--input={source}", f"--output={tmp_path / 'out'}"]
    done = subprocess.run(command, cwd=SCRIPT.parent.parent, capture_output=True, text=True, timeout=60)
    said = "local_text.py: interrupted; the same command goes on from here\n"
    assert (done.returncode, done.stderr) == (128 + number, said) and not (tmp_path / "out").exists()


def interrupted() -> None:
    raise KeyboardInterrupt


NEW_SHARDS = 4  # of the library at 300,000 tokens a shard: so many are written, listed, and so many renamed, listed for good


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library, and beside it shards of it by the size that was asked for; to be read alone."""
    folder = tmp_path_factory.mktemp("made")
    library = write_library(folder / "library")
    with pytest.MonkeyPatch.context() as patch:
        for size in ("50_000", "300_000", "1_000_000"):
            make(patch, library, folder / size, "--shard_tokens", size)
    return folder


@pytest.mark.parametrize("end", [interrupted, lambda: os._exit(9)], ids=["Ctrl-C", "kill -9"])
@pytest.mark.parametrize("size", ["50_000", "1_000_000"], ids=["fewer shards", "more shards"])
@pytest.mark.parametrize("writes", range(1, 2 * NEW_SHARDS + 3))
def test_a_run_cut_off_at_any_write_is_made_again_by_the_same_command(
    writes: int, size: str, end: Callable[[], None], tmp_path: Path, made: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:  # fmt: skip
    """It never counts as finished; the shards before it stay until all of its own are written, and then leave nothing."""
    library, fresh, out = made / "library", made / "300_000", shutil.copytree(made / size, tmp_path / "out")
    assert len(list(fresh.glob("*.bin"))) == NEW_SHARDS
    content = lambda folder: {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    before, replace, left = content(out), os.replace, [writes]

    def cut(source: Path, target: Path) -> None:
        left[0] -= 1
        if not left[0]:
            end()
        replace(source, target)

    if not (child := os.fork()):
        try:
            monkeypatch.setattr("data.shards.os.replace", cut)
            make(monkeypatch, library, out, "--shard_tokens", "300_000")
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == (1 if end == interrupted else 9)
    if writes <= NEW_SHARDS + 1:
        left_there = content(out)
        assert {name: left_there[name] for name in before} == before
    of_shards = lambda files: {name: data for name, data in files.items() if name.endswith(".bin")}
    if of_shards(content(out)) not in (of_shards(before), of_shards(content(fresh))):
        with pytest.raises(DataError, match="out: its shards are of two texts, as their making was cut off: run data/local_text"):
            check_replaced(out)
    capsys.readouterr()
    make(monkeypatch, library, out, "--shard_tokens", "300_000")
    assert "is up to date" not in capsys.readouterr().out
    assert content(out) == content(fresh)
    assert not (out / ".making").exists()


def test_a_run_takes_no_shards_of_two_texts(tmp_path: Path, shards: Path) -> None:
    """As a making that was killed in the moment of their renaming leaves them; another program's manifest.json says nothing."""
    folder = shutil.copytree(shards, tmp_path / "data")
    h = tiny_settings(folder, tmp_path)
    for manifest in ('{"shards": {"a": 1}}', '{"recipe": null}', "no JSON", '{"recipe": {}, "shards": {}}'):
        (folder / "manifest.json").write_text(manifest)
        train_gpt.check_shards(h)
    (folder / "manifest.json").write_text('{"recipe": null, "shards": {}}')
    with pytest.raises(DataError, match="data: its shards are of two texts"):
        train_gpt.check_shards(h)


@pytest.mark.parametrize("moment", range(1, 2 * NEW_SHARDS + 2))
def test_a_full_disk_leaves_the_shards_that_are_there(
    moment: int, tmp_path: Path, library: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """And nothing of the new ones, whatever was the last that found room: each shard and its name, then the list of both."""
    make(monkeypatch, library, out := tmp_path / "out", "--shard_tokens", "50_000")
    before, fsync, left = states(out), os.fsync, [moment]

    def full(descriptor: int) -> None:
        left[0] -= 1
        if not left[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(descriptor)

    with monkeypatch.context() as patch, pytest.raises(SystemExit, match="error: .*No space left on device"):
        patch.setattr(os, "fsync", full)
        make(monkeypatch, library, out, "--shard_tokens", "300_000")
    assert states(out) == before
    capsys.readouterr()
    make(monkeypatch, library, out, "--shard_tokens", "50_000")
    assert "is up to date" in capsys.readouterr().out


def test_a_reader_that_has_enough_is_no_fault(tmp_path: Path, library: Path) -> None:
    """As with `| true`, when the shards are made and when they are there."""
    command = [sys.executable, str(SCRIPT), f"--input={library}", f"--output={tmp_path / 'out'}"]
    for _ in range(2):
        ours, theirs = os.pipe()
        os.close(ours)
        done = subprocess.run(command, stdout=theirs, stderr=subprocess.PIPE, text=True)
        os.close(theirs)
        assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    assert (tmp_path / "out" / "manifest.json").exists()


@pytest.mark.parametrize("stream", [1, 2])
def test_a_closed_stream_leads_nowhere(stream: int, tmp_path: Path, library: Path) -> None:
    """As by 2>&- in a shell."""
    command = [sys.executable, str(SCRIPT), "--input", f"{library}", "--output", f"{tmp_path / 'out'}"]
    done = subprocess.run(command, timeout=60, stdout=subprocess.DEVNULL, preexec_fn=lambda: os.close(stream))
    assert done.returncode == 0 and (tmp_path / "out" / "manifest.json").exists()
    assert all(read_shard(path).size for path in (tmp_path / "out").glob("*.bin"))


def test_another_text_does_not_take_the_place_of_the_demos(tmp_path: Path, library: Path) -> None:
    """As --input alone did, in silence; the next ./run.sh made its own again, in the place of those. Nor by another name."""
    (tmp_path / "link").symlink_to(SCRIPT.parent)
    for output in ([], ["--output=data/local"], [f"--output={tmp_path}/link/local"]):
        command = [sys.executable, str(SCRIPT), f"--input={library}", *output]
        done = subprocess.run(command, cwd=SCRIPT.parents[1], timeout=60, capture_output=True, text=True)
        assert done.returncode == 2 and "error: --output must be given with --input: " in done.stderr and not done.stdout


@pytest.mark.parametrize("below", ["", "deeper"])
def test_a_file_in_place_of_the_folder_is_named(below: str, tmp_path: Path, library: Path, monkeypatch) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(SystemExit, match=f"error: {tmp_path}/file(/{below})? is no folder: name another for the shards"):
        make(monkeypatch, library, tmp_path / "file" / below)
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize("way", ["the same", "a link", "by another way"])
def test_shards_among_the_text_they_are_made_of_are_refused(
    way: str, tmp_path: Path, library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "link").symlink_to(library)
    output = {"the same": library, "a link": tmp_path / "link", "by another way": library / "shelf0" / ".."}[way]
    before = states(library)
    with pytest.raises(SystemExit, match="is the --input too: its shards would be text of the next run; choose another"):
        make(monkeypatch, library, output)
    assert states(library) == before


def test_shards_that_a_run_holds_are_not_replaced(tmp_path: Path, library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two runs may hold them at once; as long as one does, what would be made otherwise is refused, and what is there serves."""
    make(monkeypatch, library, out := tmp_path / "out")
    before, readers = states(out), [hold_shards(out), hold_shards(out)]
    make(monkeypatch, library, out)
    (library / "more.py").write_text("x = 1\n" * 100)
    for _ in range(2):
        with pytest.raises(SystemExit, match="out: a run trains on these shards, which others would replace: wait for its end"):
            make(monkeypatch, library, out)
        assert states(out) == before
        readers.pop().close()
    make(monkeypatch, library, out)
    assert states(out) != before and hold_shards(tmp_path) is None
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / READERS).symlink_to(out / READERS)  # a folder of links to these shards
    with hold_shards(tmp_path / "linked"), pytest.raises(SystemExit, match="out: a run trains on these shards"):
        (library / "more.py").write_text("x = 2\n" * 100)
        make(monkeypatch, library, out)
    os.mkfifo(tmp_path / READERS)  # whatever a user has there, nothing waits for it
    assert hold_shards(tmp_path)


def test_shards_that_a_tool_replaces_are_not_held(tmp_path: Path) -> None:
    with without_readers(tmp_path), pytest.raises(DataError, match=f"{tmp_path}: another process replaces its shards: wait for"):
        hold_shards(tmp_path)
    hold_shards(tmp_path).close()


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK])
def test_a_file_system_without_locks_is_told_and_goes_on(tmp_path, library, monkeypatch, capsys, number) -> None:
    def none(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", none)
    make(monkeypatch, library, tmp_path / "out")
    assert f"out cannot be locked, {os.strerror(number)}: start no second tool" in capsys.readouterr().err
    assert [*(tmp_path / "out").glob("*_train_*.bin")] and hold_shards(tmp_path / "out") is None


@pytest.mark.parametrize("encoding", ["ascii", "utf-8"])
def test_a_console_without_the_letters_of_a_folder_gets_escapes(tmp_path: Path, library: Path, encoding: str) -> None:
    """Also of a folder whose name is no text."""
    output = os.fsencode(tmp_path / "oüt") + b"\xe9"
    command = [sys.executable, local_text.__file__, "--input", f"{library}", "--output", output]
    environment = {**os.environ, "PYTHONIOENCODING": encoding}
    for said in (rb"tokens in \d+ shards", rb"is up to date"):
        done = subprocess.run(command, capture_output=True, timeout=60, env=environment)
        assert done.returncode == 0 and re.search(said, done.stdout) and rb"\udce9" in done.stdout, done.stderr


def test_folders_that_cannot_be_read_are_counted_and_named(
    tmp_path: Path, library: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """Permissions do not stop the root user, so the calls fail instead."""
    refused, scandir = {str(library / "shelf1"), str(library / "shelf2")}, os.scandir

    def no_access(folder: str):
        if str(folder) in refused:
            raise PermissionError(13, "Permission denied", str(folder))
        return scandir(folder)

    monkeypatch.setattr(os, "scandir", no_access)
    names = f"'{library / 'shelf1'}', '{library / 'shelf2'}'"
    expected = f"local_text.py: 2 folder(s) cannot be read, their text is missing: {names}\n"
    for _ in range(2):  # made, and up to date
        make(monkeypatch, library, tmp_path / "out")
        assert expected in capsys.readouterr().err
    refused.add(str(library))
    with pytest.raises(SystemExit, match=r"no files; 1 folder\(s\) cannot be read"):
        make(monkeypatch, library, tmp_path / "out")


def test_a_folder_whose_files_cannot_be_looked_at_is_named_too(
    tmp_path: Path, library: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    is_file = Path.is_file

    def no_access(path: Path) -> bool:
        if path.parent == library / "shelf1":
            raise PermissionError(13, "Permission denied", str(path))
        return is_file(path)

    monkeypatch.setattr(Path, "is_file", no_access)
    make(monkeypatch, library, tmp_path / "out")
    assert f"1 folder(s) cannot be read, their text is missing: '{library / 'shelf1'}'" in capsys.readouterr().err

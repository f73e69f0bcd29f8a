"""Shards of local text: nothing lost, nothing too long, the same everywhere, made only when needed."""

import os
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data import local_text
from data.encodings import load_encoding
from data.local_text import DOCUMENT_BYTES, cut, split
from data.shards import DataError, read_shard

TEXT = st.text(st.sampled_from("ab é€𝄞\t\r\n\n\n"), max_size=400)


@settings(deadline=None)
@given(text=TEXT, limit=st.integers(4, 60))
def test_pieces_put_together_are_the_text_and_none_is_too_long(text: str, limit: int) -> None:
    pieces = cut(text.encode(), limit)
    assert b"".join(pieces) == text.encode()
    assert all(0 < len(piece) <= limit for piece in pieces)
    for piece in pieces:
        piece.decode()  # raises if a character was cut


def test_cuts_are_at_paragraphs_else_lines_else_characters() -> None:
    assert cut(b"aa\n\nbb\n\ncc\n\n", 9) == [b"aa\n\nbb\n\n", b"cc\n\n"]
    assert cut(b"aaaa\nbbbb\ncccc\n\ndd", 11) == [b"aaaa\nbbbb\n", b"cccc\n\ndd"]
    assert cut("ééé\n".encode(), 5) == ["éé".encode(), "é\n".encode()]
    assert cut(b"a\r\n \r\nb", 6) == [b"a\r\n \r\n", b"b"]
    assert cut(b"", 10) == []


def test_the_side_of_a_document_does_not_depend_on_the_others() -> None:
    documents = [b"document %d" % number for number in range(4000)]
    sides = split(documents)
    assert sorted(sides["train"] + sides["val"]) == sorted(documents)
    assert set(split(documents[:2000])["val"]) == set(sides["val"]) & set(documents[:2000])
    # binomial(4000, 1/20): mean 200, standard deviation 13.8; five of them on either side
    assert 131 <= len(sides["val"]) <= 269
    assert sides["train"] != sorted(sides["train"]) and split(documents[::-1]) == sides
    assert all(split([b"a", b"b"]).values())  # each side gets a document
    with pytest.raises(DataError, match="1 document"):
        split([b"a"])


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """Forty files of some ten documents each, in nested folders, and things that are no text."""
    folder = tmp_path / "library"
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
def make(run):
    """make(source, output, *options): local_text.py in this process."""
    return lambda source, *more: run(local_text, *more, "--input", str(source))


def shards_in(output: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(output.glob("local_*.bin"))}


def documents_of(output: Path, end_of_text: int) -> list[np.ndarray]:
    """The documents of all shards, without their end-of-text token."""
    tokens = np.concatenate([read_shard(path) for path in sorted(output.glob("local_*.bin"))])
    return [part[1:] for part in np.split(tokens, np.flatnonzero(tokens == end_of_text)[1:])]


def test_all_text_arrives_and_only_text(
    out: Path, library: Path, make, offer_encoding, capsys
) -> None:
    offer_encoding("toy", end_of_text=303)
    make(library, out, "--encoding=toy", "--shard_tokens=100_000", "--suffixes=.py,.md")
    documents = documents_of(out, 303)
    texts = [path.read_bytes() for path in library.glob("shelf*/*")]
    pieces = [piece.decode() for text in texts for piece in cut(text)]
    assert sorted(load_encoding("toy").decode(x.tolist()) for x in documents) == sorted(pieces)
    assert max(len(x) for x in documents) <= DOCUMENT_BYTES
    said = capsys.readouterr().out
    assert "2 files are not UTF-8 text, such as binary.py, latin1.py" in said
    assert "--bos_id=303" in said and "local_train_000001.bin" in said
    assert (out / "prefixes_toy.bin").exists()


def test_the_same_text_makes_the_same_shards_in_any_folder(tmp_path, library: Path, make) -> None:
    make(library, tmp_path / "a")
    shutil.copytree(library, tmp_path / "copy")
    (tmp_path / "copy" / "again.py").symlink_to(tmp_path / "copy" / "shelf0" / "book0.py")
    (tmp_path / "copy" / "circle").symlink_to(tmp_path / "copy")
    make(tmp_path / "copy", tmp_path / "copy" / "out")
    assert shards_in(tmp_path / "a") == shards_in(tmp_path / "copy" / "out") != {}


@pytest.mark.parametrize("change", ["a file", "a shard", "an option"])
def test_shards_are_made_again_only_after_a_change(
    tmp_path: Path, out: Path, library: Path, make, capsys, change: str
) -> None:
    make(library, out)
    make(library, out)
    assert "up to date" in capsys.readouterr().out.splitlines()[-1]
    if change == "a file":
        (library / "shelf0" / "book0.py").write_text("a change")
    elif change == "a shard":
        os.truncate(out / "local_val_000000.bin", 2000)
    options = ["--shard_tokens=50_000"] if change == "an option" else []
    make(library, out, *options)
    made = shards_in(out)
    make(library, tmp_path / "fresh", *options)
    assert made == shards_in(tmp_path / "fresh")  # none of the old ones is left


def test_an_interrupted_run_leaves_no_set_of_shards(out, library: Path, make, monkeypatch) -> None:
    """Of two texts, or of a part of one: validation, which training needs, comes last."""
    make(library, out)
    expected = shards_in(out)
    for writes in (0, 1, 2):
        left = iter([None] * writes)
        real = local_text.ShardWriter.close
        close = lambda writer: real(writer) if next(left, True) is None else sys.exit("power cut")
        monkeypatch.setattr(local_text.ShardWriter, "close", close)
        with pytest.raises(SystemExit):
            make(library, out, "--shard_tokens", "300_000")
        assert "local_val_000000.bin" not in shards_in(out)
        monkeypatch.undo()
    make(library, out)  # the same command makes them
    assert shards_in(out) == expected


def test_shards_of_others_are_not_replaced(tmp_path: Path, library: Path, make) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "local_train_000000.bin").write_text("mine")
    with pytest.raises(SystemExit, match="choose another --output"):
        make(library, tmp_path / "mine")
    with pytest.raises(SystemExit):  # the demo's
        make(library, local_text.DEFAULT_OUTPUT)
    assert (tmp_path / "mine" / "local_train_000000.bin").read_text() == "mine"

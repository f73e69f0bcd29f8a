"""Makes token shards from text on this machine, without network, GPU or vocabulary.

    ./run.sh data/local_text.py                                        the demo's shards
    ./run.sh data/local_text.py --input FOLDER --output data/mine --encoding gpt2

The text is by default the source of Python's standard library, without installed packages. Of
another --input all UTF-8 files are taken, except in hidden folders; a file with several links once.

A document is a piece of a file of at most 2,040 bytes, cut at blank lines. Its hash decides whether it
is validation (one in twenty) and its place, so that any part of a shard is a fair sample. The same
text makes the same shards on every machine. The text is held in memory. manifest.json in --output
tells what the shards were made of: only after a change are they made again.
"""

import argparse
import os
import re
import sys
import sysconfig
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tqdm import tqdm

from data.encodings import load_encoding, save_tables
from data.shards import DataError, ShardWriter, has_tokens, shard_name
from data.shards import load_manifest, save_manifest

STDLIB = Path(sysconfig.get_paths()["stdlib"]).resolve()
INSTALLED = {"site-packages", "dist-packages"}  # folders in it
DEFAULT_OUTPUT = Path(__file__).resolve().parent / "local"
DOCUMENT_BYTES = 2040  # with end-of-text below the 2,048 tokens at which training cuts documents
VALIDATION_SHARE = 1 / 20
TOOL = "data/local_text.py"


def find_files(source: Path, suffixes: list[str], output: Path) -> list[Path]:
    """Files of `source`, not of `output`, that end in one of `suffixes`, if any. Raises DataError."""
    if source.is_file():
        return [source]
    left_out = INSTALLED if source == STDLIB else set()
    folders_seen = {output.resolve()}
    files: dict[Path, Path] = {}  # by the file that a link leads to
    for folder, folders, names in os.walk(source, followlinks=True):
        here = Path(folder).resolve()
        if here in folders_seen:
            folders.clear()
            continue
        folders_seen.add(here)
        folders[:] = sorted(x for x in folders if x[0] != "." and x not in left_out)
        for name in sorted(names):
            path = Path(folder, name)
            if name.endswith(tuple(suffixes) or "") and path.is_file():
                files.setdefault(path.resolve(), path)
    if not files:
        ending = f" that end in {' or '.join(suffixes)}" if suffixes else ""
        raise DataError(f"{source}: no files{ending}; --input names a text file or a folder")
    return list(files.values())


def read_text(path: Path) -> bytes | None:
    """The bytes of a UTF-8 text file; None if it is no UTF-8, or has a NUL byte. Raises OSError."""
    text = path.read_bytes()
    try:
        text.decode()
    except UnicodeDecodeError:
        return None
    return None if b"\0" in text else text


END_OF_PARAGRAPH = re.compile(rb"\n(?:[ \t\r\f\v]*\n)+")


def cut(text: bytes, limit: int = DOCUMENT_BYTES) -> list[bytes]:
    """UTF-8 text in few pieces of at most `limit` (>= 4) bytes; paragraphs that fit stay whole."""
    pieces = []
    piece = b""
    for unit in units(text, limit):
        if piece and len(piece) + len(unit) > limit:
            pieces.append(piece)
            piece = b""
        piece += unit
    return pieces + [piece] if piece else pieces


def units(text: bytes, limit: int) -> Iterator[bytes]:
    """What `cut` may cut between: paragraphs, else their lines, else parts of a line."""
    ends = [match.end() for match in END_OF_PARAGRAPH.finditer(text)]
    for start, end in zip([0, *ends], [*ends, len(text)]):
        if end - start <= limit:
            yield text[start:end]
            continue
        whole_characters = rb"(?s:.{1,%d})(?![\x80-\xBF])" % limit
        for line in text[start:end].splitlines(keepends=True):
            yield from re.findall(whole_characters, line)


def split(documents: list[bytes]) -> dict[str, list[bytes]]:
    """{"train": …, "val": …}, each in the order of the documents' hashes; the lowest are "val".

    So the side of a document does not depend on the others, unless one side would be empty: then
    it gets one document. Raises DataError for fewer than two documents.
    """
    if len(documents) < 2:
        raise DataError(f"{len(documents)} document(s): training and validation need one each")
    hashed = sorted((blake2b(document, digest_size=8).digest(), document) for document in documents)
    bound = int(VALIDATION_SHARE * 2**64)
    count = sum(int.from_bytes(number, "big") < bound for number, _ in hashed)
    count = min(max(count, 1), len(documents) - 1)
    ordered = [document for _, document in hashed]
    return {"train": ordered[count:], "val": ordered[:count]}


def recipe_of(args: argparse.Namespace, files: list[Path]) -> str:
    """A hash of what decides about the shards: program, options, names, sizes and times of files."""
    parts = [Path(__file__).read_bytes(), vars(args)]
    for path in files:
        status = path.stat()
        parts += [path, status.st_size, status.st_mtime_ns]
    return blake2b(repr(parts).encode(), digest_size=16).hexdigest()


def make_shards(args: argparse.Namespace, files: list[Path], recipe: str) -> None:
    """Replace the shards in `args.output` by those of `files`. Raises DataError, OSError."""
    encoding = load_encoding(args.encoding)
    texts = {path: read_text(path) for path in tqdm(files, desc="reading", disable=None)}
    skipped = [os.path.relpath(path, args.input) for path, text in texts.items() if text is None]
    left_out = f"{len(skipped)} files are not UTF-8 text, such as {', '.join(skipped[:3])}"
    found = [text for text in texts.values() if text is not None]
    documents = [piece for text in found for piece in cut(text)]
    if not documents:
        raise DataError(f"{args.input}: no text in {len(files)} files: {left_out}")
    splits = split(documents)

    # Validation is written last, so a training run refuses what an interrupted run leaves.
    args.output.mkdir(parents=True, exist_ok=True)
    save_manifest(args.output, {"tool": TOOL, "recipe": None, "shards": {}})
    for old in args.output.glob("local_*.bin"):
        old.unlink()
    save_tables(args.output, args.encoding)
    shards = {}
    for side in ("train", "val"):
        writer = ShardWriter(args.output, lambda i: shard_name("local", side, i), args.shard_tokens)
        for document in tqdm(splits[side], desc=side, unit=" documents", disable=None):
            writer.add(encoding.document(document.decode()))
        writer.close()
        shards |= writer.written
    manifest = {"tool": TOOL, **encoding.settings, "shards": shards, "recipe": recipe}
    save_manifest(args.output, manifest)

    size = sum(map(len, documents))
    print(f"{len(documents):,} documents, {size:,} bytes, of {len(files) - len(skipped):,} files")
    if skipped:
        print(f"skipped: {left_out}")
    print("train with", *(f"--{name}={value}" for name, value in encoding.settings.items()))
    print(f"{args.output}:", *(f"{name} ({tokens:,} tokens)" for name, tokens in shards.items()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--input", type=Path, default=STDLIB, help="a text file, or a folder of them")
    add("--output", type=Path, default=DEFAULT_OUTPUT, help="folder for the shards")
    add("--encoding", default="bytes", help="bytes, or a tiktoken encoding such as gpt2")
    add("--suffixes", help="take only files that end so, as .py,.md; default: all, of Python .py")
    add("--shard_tokens", type=int, default=100_000_000, help="tokens a shard; the last has less")
    args = parser.parse_args()
    args.input = args.input.resolve()
    is_demo = args.input == STDLIB
    if args.output.resolve() == DEFAULT_OUTPUT and not is_demo:
        parser.error(f"--input needs --output: {DEFAULT_OUTPUT} has the demo's shards")
    suffixes = args.suffixes if args.suffixes is not None else ".py" * is_demo
    args.suffixes = [x.strip() for x in suffixes.split(",") if x.strip()]

    try:
        files = find_files(args.input, args.suffixes, args.output)
        recipe = recipe_of(args, files)
        manifest = load_manifest(args.output, TOOL)
        shards = manifest["shards"] if manifest and manifest["recipe"] == recipe else {}
        if shards and all(has_tokens(args.output / name, n) for name, n in shards.items()):
            print(f"{args.output}: up to date, {sum(shards.values()):,} tokens")
        else:
            make_shards(args, files, recipe)
    except (DataError, OSError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()

"""The tools that download, with the real huggingface_hub against a hub on this machine."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BytesIO
from pathlib import Path
from urllib.parse import unquote

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from huggingface_hub import constants

from data import cached_fineweb10B, fineweb
from data.encodings import Encoding, load_prefixes, prefix_table
from data.shards import read_shard, write_shard

COMMIT = "0" * 40
CACHED = f"datasets/{cached_fineweb10B.REPO}/resolve"
PARQUET = f"datasets/{fineweb.REPO}/resolve"


class Hub(ThreadingHTTPServer):
    """Serves `files`, by their path, as the Hugging Face hub does; `announced` replaces a SHA-256."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[str, bytes] = {}
        self.announced: dict[str, str] = {}
        self.break_after: dict[str, int] = {}  # bytes until the next GET of a path is cut off
        self.stall: set[str] = set()  # GETs of these paths send half of the file, and wait
        self.stalled = threading.Event()
        self.log: list[str] = []  # method, path, range

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.answer()

    def do_GET(self) -> None:
        self.answer()

    def answer(self) -> None:
        path = unquote(self.path.split("?")[0].lstrip("/"))
        for revision in ("main", COMMIT):
            path = path.replace(f"/resolve/{revision}/", "/resolve/")
        self.server.log.append(f"{self.command} {path} {self.headers.get('Range')}")
        if path.startswith("api/datasets"):
            return self.reply(200, self.api(path), {})
        content = self.server.files.get(path)
        if content is None:
            return self.reply(404, b"", {"X-Error-Code": "EntryNotFound"})
        digest = hashlib.sha256(content).hexdigest()
        etag = self.server.announced.get(path, digest)
        headers = {"ETag": f'"{etag}"', "X-Linked-ETag": f'"{etag}"', "X-Repo-Commit": COMMIT}
        start = int((self.headers.get("Range") or "bytes=0-").split("=")[1].split("-")[0])
        self.reply(206 if start else 200, content[start:], headers, path)

    def api(self, path: str) -> bytes:
        prefix = f"api/datasets/{fineweb.REPO}"
        if path == prefix:
            return json.dumps({"id": fineweb.REPO, "sha": COMMIT}).encode()
        subset = path.removeprefix(f"{prefix}/tree/{COMMIT}/")
        names = [name.removeprefix(PARQUET + "/") for name in self.server.files]
        entry = {"type": "file", "size": 1, "oid": "0"}
        return json.dumps([entry | {"path": x} for x in names if x.startswith(subset)]).encode()

    def reply(self, status: int, content: bytes, headers: dict[str, str], path: str = "") -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        if path in self.server.stall:
            self.wfile.write(content[: len(content) // 2])
            self.server.stalled.set()
            self.connection.recv(1)  # until the client goes away
        cut = self.server.break_after.pop(path, None)
        self.wfile.write(content[:cut])
        self.close_connection = cut is not None


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    server = Hub()
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    # for tools in this process: their library has read the environment when it was imported
    template = server.address + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "ENDPOINT", server.address)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, "127.0.0.1")
    monkeypatch.setenv("HF_ENDPOINT", server.address)  # for tools in processes of their own
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """run(tool, *options): its main, in this process, with the output tmp_path / "out"."""

    def run(tool, *options: str) -> None:
        command = [tool.__name__, "--output", str(tmp_path / "out"), *options]
        monkeypatch.setattr(sys, "argv", command)
        tool.main()

    return run


def shards_in(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.glob("fineweb_*.bin"))}


# --------------------------------------------------------------------------------------------------
# cached_fineweb10B.py

VAL, FIRST = "fineweb_val_000000.bin", "fineweb_train_000001.bin"


@pytest.fixture
def shards(hub: Hub, tmp_path: Path, offer_encoding) -> dict[str, bytes]:
    """What the hub serves: validation and two training shards, small ones. tiktoken has a gpt2."""
    offer_encoding("gpt2", end_of_text=303)
    served = {}
    for seed, name in enumerate((VAL, FIRST, "fineweb_train_000002.bin")):
        tokens = np.random.default_rng(seed).integers(0, 50257, 1000 + seed)
        write_shard(tmp_path / "made", tokens)
        served[name] = (tmp_path / "made").read_bytes()
    hub.files = {f"{CACHED}/{name}": content for name, content in served.items()}
    return served


def test_downloads_the_shards_asked_for_and_only_those_that_are_missing(
    hub: Hub, shards: dict[str, bytes], run, tmp_path: Path
) -> None:
    run(cached_fineweb10B, "1")
    assert shards_in(tmp_path / "out") == {FIRST: shards[FIRST], VAL: shards[VAL]}
    hub.log.clear()
    run(cached_fineweb10B, "1")
    assert hub.log == []
    run(cached_fineweb10B, "2")
    assert shards_in(tmp_path / "out") == shards
    assert not any(FIRST in request for request in hub.log)
    left = {path.name for path in (tmp_path / "out").iterdir()}
    assert left == {*shards, "prefixes_gpt2.bin"}
    for number in ("-1", "104"):
        with pytest.raises(SystemExit, match="2"):
            run(cached_fineweb10B, number)


def test_shards_are_fetched_where_tiktoken_has_no_vocabulary(
    shards, run, tmp_path, offer_encoding, capsys
) -> None:
    """As without network: training then makes the prefix table."""
    offer_encoding("other", end_of_text=303)
    run(cached_fineweb10B, "1")
    assert len(shards_in(tmp_path / "out")) == 2
    said = capsys.readouterr().out.splitlines()
    assert sum("no prefix table yet" in line for line in said) == 1 and "2 shards" in said[-1]
    offer_encoding("gpt2", end_of_text=303)
    run(cached_fineweb10B, "1")
    assert (load_prefixes(tmp_path / "out", "gpt2", 304) == prefix_table("gpt2", 304)).all()


def test_a_broken_connection_is_resumed(hub: Hub, shards, run, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 100)
    hub.break_after = {f"{CACHED}/{VAL}": 700}
    run(cached_fineweb10B, "0")
    assert shards_in(tmp_path / "out") == {VAL: shards[VAL]}
    assert f"GET {CACHED}/{VAL} bytes=700-" in hub.log


def test_a_shard_of_another_hash_never_gets_its_name(hub: Hub, shards, run, tmp_path) -> None:
    """As of a hub, or a proxy, that sends damaged bytes."""
    hub.announced = {f"{CACHED}/{FIRST}": "1" * 64}
    with pytest.raises(SystemExit, match=f"{FIRST}: SHA-256 .* announces 1+; .* deleted"):
        run(cached_fineweb10B, "1")
    assert list(shards_in(tmp_path / "out")) == [VAL]
    hub.announced = {}
    run(cached_fineweb10B, "1")
    assert shards_in(tmp_path / "out")[FIRST] == shards[FIRST]


def test_a_file_that_is_no_shard_is_neither_taken_nor_replaced(hub, shards, run, tmp_path) -> None:
    hub.files[f"{CACHED}/{VAL}"] = b"<html>" * 400
    with pytest.raises(SystemExit, match="not a token shard"):
        run(cached_fineweb10B, "0")
    assert not shards_in(tmp_path / "out")
    (tmp_path / "out" / VAL).write_bytes(shards[VAL][:-2])
    with pytest.raises(SystemExit, match=f"out/{VAL}: truncated .*; delete it"):
        run(cached_fineweb10B, "0")
    (tmp_path / "out" / VAL).unlink()
    (tmp_path / "out" / "manifest.json").write_text("{}")
    with pytest.raises(SystemExit, match="choose another --output"):
        run(cached_fineweb10B, "0")


@pytest.mark.parametrize("tool", ["cached_fineweb10B", "fineweb"])
@pytest.mark.parametrize("fault", ["no hub", "no such file"])
def test_no_hub_is_one_line(hub: Hub, tmp_path: Path, tool: str, fault: str) -> None:
    environment = {**os.environ}
    if fault == "no hub":
        environment["HF_ENDPOINT"] = "http://127.0.0.1:9"  # nobody listens
    script = Path(fineweb.__file__).with_name(f"{tool}.py")
    command = [sys.executable, str(script), "--output", str(tmp_path / "out")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1


# --------------------------------------------------------------------------------------------------
# fineweb.py

SHARD_TOKENS = 5000
OPTIONS = ("--encoding", "bytes", "--shard_tokens", str(SHARD_TOKENS), "--workers", "2")


def parquet_of(texts: list[str | None]) -> bytes:
    table = pyarrow.table({"id": list(range(len(texts))), "text": texts})
    file = BytesIO()
    pyarrow.parquet.write_table(table, file, row_group_size=8)
    return file.getvalue()


@pytest.fixture
def stream(hub: Hub) -> list[int]:
    """The tokens of what the hub serves: three parquet files of 60 texts in row groups of 8.

    Beside them lie other files, and another subset.
    """
    random = np.random.default_rng(0)
    tokens = []
    for index in range(3):
        lengths = random.integers(0, 80, 60)
        texts = [f"{index} {k} " + "wörd " * int(n) for k, n in enumerate(lengths)]
        hub.files[f"{PARQUET}/sample/10BT/00{index}.parquet"] = parquet_of([*texts, None])
        tokens += [token for text in texts for token in (256, *text.encode())]
    hub.files[f"{PARQUET}/sample/10BT/README.md"] = b"not parquet"
    hub.files[f"{PARQUET}/sample/100BT/000.parquet"] = parquet_of(["not wanted"])
    return tokens


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads for processes, which take seconds to start."""
    pool = lambda workers, *_, **__: ThreadPoolExecutor(workers)
    monkeypatch.setattr(fineweb, "ProcessPoolExecutor", pool)


def tokens_of(folder: Path, shard_tokens: int = SHARD_TOKENS) -> list[int]:
    """All tokens, validation first; names and sizes of the shards are checked."""
    paths = sorted(folder.glob("*.bin"), key=lambda path: path.name[-10:])
    names = [fineweb.name_of(index) for index in range(len(paths))]
    shards = [read_shard(path).tolist() for path in paths]
    assert [path.name for path in paths] == names and names[0] == VAL
    assert all(len(shard) == shard_tokens for shard in shards[:-1])
    return sum(shards, [])


@pytest.mark.parametrize("shard_tokens", [301, 45_000])
def test_shards_are_the_documents_in_order(threads, stream, run, tmp_path, shard_tokens) -> None:
    run(fineweb, *OPTIONS, "--shard_tokens", str(shard_tokens))
    assert tokens_of(tmp_path / "out", shard_tokens) == stream
    left = [path.name for path in (tmp_path / "out").iterdir() if path.suffix != ".bin"]
    assert left == ["manifest.json"]


def test_the_prefix_table_lies_beside_the_shards(
    threads, stream, run, tmp_path, offer_encoding
) -> None:
    offer_encoding("toy", end_of_text=303)
    run(fineweb, *OPTIONS, "--encoding", "toy")
    assert (tmp_path / "out" / "prefixes_toy.bin").exists()


@pytest.mark.parametrize("limit", [SHARD_TOKENS + 1, 2 * SHARD_TOKENS, 2 * SHARD_TOKENS + 77])
def test_a_limit_on_the_tokens_is_kept_exactly(threads, stream, run, tmp_path, limit) -> None:
    run(fineweb, *OPTIONS, "--num_tokens", str(limit))
    assert tokens_of(tmp_path / "out") == stream[:limit]


def test_a_killed_run_continues_and_ends_with_the_same_shards(
    hub: Hub, stream: list[int], tmp_path: Path
) -> None:
    """The second file stalls: by then the first has become shards, the last cut in a document."""
    script = [sys.executable, fineweb.__file__, "--output", str(tmp_path / "out"), *OPTIONS]
    hub.stall = {f"{PARQUET}/sample/10BT/001.parquet"}
    process = subprocess.Popen(script, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    assert hub.stalled.wait(60)
    workers = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    process.send_signal(signal.SIGKILL)
    process.wait()
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").glob("*.bin")}
    assert 0 < len(before) < len(stream) // SHARD_TOKENS
    assert stream[len(before) * SHARD_TOKENS] != 256

    hub.stall.clear()
    hub.log.clear()
    subprocess.run(script, check=True, timeout=60)
    assert tokens_of(tmp_path / "out") == stream
    assert {path: path.stat().st_mtime_ns for path in before} == before  # none was made again
    assert not any("GET" in request and "000.parquet" in request for request in hub.log)
    assert not any(Path(f"/proc/{worker}/cwd").exists() for worker in workers)  # orphans
    hub.log.clear()
    subprocess.run(script, check=True, timeout=60)
    assert hub.log == []


def test_a_damaged_shard_is_made_again(threads, stream, run, tmp_path: Path) -> None:
    run(fineweb, *OPTIONS)
    path = tmp_path / "out" / fineweb.name_of(2)
    path.write_bytes(path.read_bytes()[:-2])
    run(fineweb, *OPTIONS)
    assert tokens_of(tmp_path / "out") == stream


def test_a_text_that_fails_names_file_and_row_group(hub, stream, run) -> None:
    """Text that is not UTF-8, in a worker process: what it raises must be pickled."""
    texts = pyarrow.array([b"a"] * 9 + [b"a\xff"]).view(pyarrow.string())
    hub.files[f"{PARQUET}/sample/10BT/001.parquet"] = parquet_of(texts)
    with pytest.raises(SystemExit, match="error: .*001.parquet, row group 1: UnicodeDecodeError"):
        run(fineweb, *OPTIONS)


def test_so_does_a_panic_of_the_encoding(threads, stream, run, monkeypatch) -> None:
    """It is no Exception."""

    class Panic(BaseException):
        pass

    def document(encoding: Encoding, text: str) -> None:
        raise Panic("StackOverflow")

    monkeypatch.setattr(Encoding, "document", document)
    with pytest.raises(SystemExit, match="000.parquet, row group 0: Panic: StackOverflow"):
        run(fineweb, *OPTIONS)


def test_what_leaves_nothing_to_train_on_is_refused(threads, hub, stream, run, tmp_path) -> None:
    with pytest.raises(SystemExit, match="2"):
        run(fineweb, *OPTIONS, "--num_tokens", str(SHARD_TOKENS))
    with pytest.raises(SystemExit, match="no parquet files in sample/7"):
        run(fineweb, *OPTIONS, "--subset", "sample/7")
    with pytest.raises(SystemExit, match="make no training shard: lower --shard_tokens"):
        run(fineweb, *OPTIONS, "--subset", "sample/100BT")
    with pytest.raises(SystemExit, match="choose another --output"):
        run(fineweb, *OPTIONS, "--subset", "sample/10BT")

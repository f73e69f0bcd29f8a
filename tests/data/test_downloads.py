"""The two downloaders against a hub on this machine: whatever breaks, a shard under its name is whole and is the right one.

The hub here serves the few routes that huggingface_hub asks for, counts what it sends, and breaks down when told to. The
programs run as a user runs them, with HF_ENDPOINT pointing here and every other way out of the machine closed.
"""

import errno
import hashlib
import json
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BytesIO
from pathlib import Path
from types import ModuleType, SimpleNamespace
from urllib.parse import unquote, urlsplit

import huggingface_hub
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from requests import certs

from common import ROOT, run_fresh, wait_until
from data import cached_fineweb10B, fineweb
from data.shards import DataError, ShardError, check_alone, hub_fault, read_shard, write_shard

FOLDER = Path(fineweb.__file__).parent
CACHED = "datasets/kjj0/fineweb10B-gpt2/resolve/main"
COMMIT = "c0" * 20
PARQUET = f"datasets/HuggingFaceFW/fineweb/resolve/{COMMIT}"


class Hub(ThreadingHTTPServer):
    """Serves `files` (by path), and announces their SHA-256, as the hub does for large files, or what `announced` says.

    `breaks` says, for a path, how its next GETs go wrong: (what, after how many bytes); `fails`, for "METHOD path", how many
    requests are answered with `status`.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[str, bytes] = {}
        self.breaks: dict[str, list[tuple[str, int]]] = {}
        self.announced: dict[str, str] = {}
        self.fails: dict[str, int] = {}
        self.status, self.error = 500, b""
        self.endless: dict[str, int] = {}  # GETs of these paths have this status, and send more and more, and no length
        self.silent: set[str] = set()  # HEADs of these paths tell no length
        self.commit: object = COMMIT
        self.lists: list | None = None  # instead of a dataset's files
        self.says = b""  # instead of what the hub says of a dataset
        self.next_pages: list[str] = []  # the addresses that the next pages of a list of files name
        self.log: list[tuple[str, str, str | None]] = []  # method, path, range
        self.sent = 0  # bytes of bodies
        self.stalled = threading.Event()

    def handle_error(self, request: socket.socket, client_address: tuple) -> None:
        """A client that went away is part of these tests."""

    def gets(self) -> list[tuple[str, str | None]]:
        """Of files."""
        return [(path, span) for method, path, span in self.log if method == "GET" and "/resolve/" in path]


class Handler(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.answer(body=False)

    def do_GET(self) -> None:
        self.answer(body=True)

    def answer(self, body: bool) -> None:
        path = unquote(urlsplit(self.path).path).lstrip("/")
        self.server.log.append((self.command, path, self.headers.get("Range")))
        if path.startswith("api/"):
            return self.send_without_end({}) if path in self.server.endless else self.answer_api(path)
        if self.server.fails.get(request := f"{self.command} {path}", 0):
            self.server.fails[request] -= 1
            return self.reply(self.server.status, self.server.error, {}, body)
        content = self.server.files.get(path)
        if content is None:
            return self.reply(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT})
        announced = self.server.announced.get(path, hashlib.sha256(content).hexdigest())
        headers = {"ETag": '"of the storage"', "X-Linked-ETag": f'"{announced}"', "X-Repo-Commit": COMMIT}
        status, start = 200, 0
        if self.headers.get("Range"):
            status, start = 206, int(self.headers["Range"].removeprefix("bytes=").split("-")[0])
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        if body and path in self.server.endless:
            return self.send_without_end(headers)
        if not body and path in self.server.silent:
            return self.send_head(200, headers)
        self.reply(status, content[start:], headers, body, self.server.breaks.get(path) if body else None)

    def send_head(self, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()

    def send_without_end(self, headers: dict[str, str]) -> None:
        status = self.server.endless[unquote(urlsplit(self.path).path).lstrip("/")]
        there = {"Location": "/api/elsewhere"} if status == 302 else {}
        self.send_head(status, {**headers, **there, "Transfer-Encoding": "chunked"})
        self.close_connection = True
        for _ in range(2_000):  # until the client goes away; then 130 MB are a failure
            self.wfile.write(b"10000\r\n" + bytes(2**16) + b"\r\n")
            self.server.sent += 2**16

    def answer_api(self, path: str) -> None:
        if self.server.says and "datasets" in path:
            return self.reply(200, self.server.says, {})
        if not path.startswith("api/datasets/"):  # as what the library asks once a day, and keeps
            return self.reply(200, b"[1]", {})
        if path.endswith("/revision/main") or path == "api/datasets/HuggingFaceFW/fineweb":
            return self.reply(200, json.dumps({"id": "HuggingFaceFW/fineweb", "sha": self.server.commit}).encode(), {})
        subset = path.split(f"/tree/{COMMIT}/")[1]
        names = [name.removeprefix(PARQUET + "/") for name in self.server.files]
        entries = [{"type": "file", "path": name, "size": 1, "oid": "0"} for name in names if name.startswith(subset + "/")]
        entries = self.server.lists or entries
        if not entries:
            return self.reply(404, b"", {"X-Error-Code": "EntryNotFound"})
        link = {"Link": f'<{self.server.next_pages.pop(0)}>; rel="next"'} if self.server.next_pages else {}
        self.reply(200, json.dumps(entries).encode(), link, breaks=self.server.breaks.get(path))

    def reply(
        self,
        status: int,
        content: bytes,
        headers: dict[str, str],
        body: bool = True,
        breaks: list[tuple[str, int]] | None = None,
    ) -> None:
        self.send_head(status, {**headers, "Content-Length": str(len(content))})
        if not body:
            return
        how, after = breaks.pop(0) if breaks else ("", len(content))
        self.server.sent += min(after, len(content))  # before the client can have them all and look
        self.wfile.write(content[:after])
        if how == "stall":
            self.server.stalled.set()
            self.connection.recv(1)  # until the client goes away
        elif how == "reset":
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            os.close(self.connection.detach())
        if how:
            self.close_connection = True


@pytest.fixture
def hub() -> Iterator[Hub]:
    server = Hub()
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def environment_of(hub: Hub, folder: Path) -> dict[str, str]:
    dead = "http://127.0.0.1:9"  # nobody listens: what is not for this machine fails at once
    ours = ("HF_", "HUGGING", "TIKTOKEN")
    environment = {name: value for name, value in os.environ.items() if not name.upper().startswith(ours)}
    environment |= {"HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}", "HF_HOME": str(folder / "home")}
    environment |= {"HF_HUB_DISABLE_XET": "1", "TIKTOKEN_CACHE_DIR": str(folder / "tiktoken")}
    for proxy in ("http_proxy", "https_proxy", "all_proxy"):
        environment |= {proxy: dead, proxy.upper(): dead}
    return environment | {"no_proxy": "127.0.0.1", "NO_PROXY": "127.0.0.1"}


def start(script: str, hub: Hub, folder: Path, *options: str) -> subprocess.Popen:
    command, environment = [*start_command(script, folder), *options], environment_of(hub, folder)
    return subprocess.Popen(command, env=environment, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def start_command(script: str, folder: Path) -> list[str]:
    return [sys.executable, str(FOLDER / script), "--output", str(folder / "out")]


def run(script: str, hub: Hub, folder: Path, *options: str) -> tuple[int, str, str]:
    """Exit code, standard output and standard error."""
    process = start(script, hub, folder, *options)
    out, err = process.communicate(timeout=60)
    return process.returncode, out, err


@pytest.mark.parametrize("script", ["cached_fineweb10B.py", "fineweb.py"])
@pytest.mark.parametrize(
    "name, value",
    [("HF_ENDPOINT", value) for value in ("foo", "http://[", "", "ftp://x", "https://", "http://h:port", " http://h", "http://h ")]
    + [("HF_HUB_ETAG_TIMEOUT", "abc"), ("HF_HUB_DOWNLOAD_TIMEOUT", "1.5"), ("SSL_CERT_FILE", "/nowhere/ca.pem")]
    + [("SSL_CERT_FILE", "/tmp"), ("SSL_CERT_FILE", os.devnull), ("HF_TOKEN_PATH", "/dev/zero")]
    + [("SSLKEYLOGFILE", "/nowhere/keys"), ("SSLKEYLOGFILE", "/tmp"), ("HF_HOME", os.devnull)],
)
def test_a_variable_that_cannot_be_meant_is_named_at_once(tmp_path: Path, script: str, name: str, value: str) -> None:
    """Not a traceback of the library's, nor five attempts."""
    command = [sys.executable, str(FOLDER / script), "--output", str(tmp_path / "out")]
    run = run_fresh if script == "fineweb.py" else subprocess.run  # the library is imported by one of them
    done = run(command, env={**os.environ, name: value}, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and done.stdout == "" and not (tmp_path / "out").exists()
    assert done.stderr.startswith(f"{script}: error: {name}={value!a} in the environment: must be ")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("name", ["HF_HOME", "XDG_CACHE_HOME", "HF_TOKEN_PATH"])
def test_a_file_of_the_current_folder_is_no_token(tmp_path: Path, name: str) -> None:
    """With an empty variable, of a shell's that is not set, the hub was sent what a file `token` held, or Python could not read."""
    (tmp_path / "token").write_text("mine")
    (tmp_path / "huggingface").mkdir()
    (tmp_path / "huggingface" / "token").write_text("mine")
    there = {x: value for x, value in os.environ.items() if x not in ("HF_TOKEN", "HF_HOME", "HF_TOKEN_PATH")}
    ask = "from data.cached_fineweb10B import build_hf_headers; print(build_hf_headers().get('authorization'))"
    how = {"env": {**there, "HOME": f"{tmp_path}/home", "PYTHONPATH": f"{FOLDER.parent}", name: ""}, "cwd": tmp_path}
    done = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, timeout=60, **how)
    assert (done.stdout, done.stderr) == ("None\n", "")


def test_so_is_a_proxy_that_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was tried five times over 15 s. What else it says may be a secret."""
    monkeypatch.setenv("ALL_PROXY", "FOO://me:secret@here")
    assert hub_fault() == "ALL_PROXY='foo'://… in the environment: must be http, https or socks5, or unset"
    for good in ("http://h:1", "socks5h://h", "h:3128", ""):
        monkeypatch.setenv("ALL_PROXY", good)
        assert hub_fault() == ""


def test_a_key_log_that_cannot_be_is_no_fault_of_the_certificates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", certs.where())
    monkeypatch.setenv("SSLKEYLOGFILE", "/nowhere/keys")
    assert hub_fault() == "SSLKEYLOGFILE='/nowhere/keys' in the environment: must be a file that can be written, or unset"


def test_so_is_a_time_of_more_digits_than_a_number_may_have(tmp_path: Path) -> None:
    command = [sys.executable, str(FOLDER / "cached_fineweb10B.py"), "--output", str(tmp_path / "out")]
    done = subprocess.run(command, env={**os.environ, "HF_HUB_ETAG_TIMEOUT": "9" * 5000}, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and done.stdout == "" and not (tmp_path / "out").exists()
    assert re.fullmatch("cached_fineweb10B.py: error: HF_HUB_ETAG_TIMEOUT='9{40}' in the environment: must be .*\n", done.stderr)


def test_so_is_a_token_that_no_header_can_hold_and_it_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_ü")
    assert hub_fault() == "HF_TOKEN in the environment: must be a token, of ASCII alone, or unset"
    monkeypatch.setenv("HF_TOKEN", "hf_u")
    assert not hub_fault()


def test_so_is_a_token_that_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a FIFO, as of `<(pass show token)`, which is empty for the second to read; /dev/null is how to have none."""
    os.mkfifo(tmp_path / "token")
    for path, fault in ((tmp_path / "token", "must be a file, or unset"), (os.devnull, ""), (tmp_path / "none", ""), ("x" * 300, "")):
        monkeypatch.setenv("HF_TOKEN_PATH", f"{path}")
        assert hub_fault().endswith(fault) and bool(hub_fault()) == bool(fault)


@pytest.mark.parametrize("script", ["cached_fineweb10B.py", "fineweb.py", "local_text.py"])
def test_so_is_one_for_the_bars(tmp_path: Path, script: str) -> None:
    command, environment = [*start_command(script, tmp_path)], os.environ | {"TQDM_MININTERVAL": "abc"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and done.stdout == "" and not (tmp_path / "out").exists()
    assert re.fullmatch(f"{script}: error: TQDM_MININTERVAL in the environment: .*'abc': unset it\n", done.stderr)


@pytest.mark.parametrize("script, options", [("cached_fineweb10B.py", "0"), ("fineweb.py", "--num_tokens=50 --shard_tokens=49 --workers=1")])
def test_a_closed_stderr_leads_nowhere(
    hub: Hub, tmp_path: Path, request: pytest.FixtureRequest, script: str, options: str
) -> None:
    """As by 2>&- in a shell: what would show the progress has nowhere to."""
    request.getfixturevalue("parquet" if script == "fineweb.py" else "shards")
    command = [*start_command(script, tmp_path), *options.split(), *["--encoding=bytes"] * (script == "fineweb.py")]
    done = subprocess.run(command, env=environment_of(hub, tmp_path), cwd=tmp_path, timeout=60, preexec_fn=lambda: os.close(2))
    assert done.returncode == 0 and len(shards_in(tmp_path / "out")) == (2 if script == "fineweb.py" else 1)


def shards_in(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*.bin"))}


def failed_with(message: str, result: tuple[int, str, str]) -> bool:
    code, _, err = result
    last = err.strip().splitlines()[-1]
    return code == 1 and "error: " in last and message in last and "Traceback" not in err


# ----------------------------------------------------------------------------------------------------------------------
# cached_fineweb10B.py


def shard_bytes(folder: Path, tokens: int, seed: int) -> bytes:
    path = folder / "made.tmp"
    write_shard(path, np.random.default_rng(seed).integers(0, 50257, tokens))
    content = path.read_bytes()
    path.unlink()
    return content


@pytest.fixture
def shards(hub: Hub, tmp_path: Path) -> dict[str, bytes]:
    """What the hub serves: validation and three training shards, small ones."""
    names = ["fineweb_val_000000.bin"] + [f"fineweb_train_{index:06d}.bin" for index in (1, 2, 3)]
    shards = {name: shard_bytes(tmp_path, 1000 + 10 * seed, seed) for seed, name in enumerate(names)}
    hub.files = {f"{CACHED}/{name}": content for name, content in shards.items()}
    return shards


def first(shards: dict[str, bytes], count: int) -> dict[str, bytes]:
    return dict(sorted({name: shards[name] for name in list(shards)[:count]}.items()))


def test_fetches_the_shards_asked_for_and_asks_for_nothing_when_they_are_whole(
    hub: Hub, shards: dict[str, bytes], tmp_path: Path
) -> None:
    code, out, _ = run("cached_fineweb10B.py", hub, tmp_path, "2")
    assert code == 0 and "3 shards, 3,030 tokens" in out
    assert shards_in(tmp_path / "out") == first(shards, 3)
    assert {path.name for path in (tmp_path / "out").iterdir() if path.suffix != ".bin"} == {".lock", "fetched.json"}

    hub.log.clear()
    code, out, _ = run("cached_fineweb10B.py", hub, tmp_path, "2")
    assert code == 0 and "3 shards" in out and hub.log == []


@pytest.mark.parametrize("kept", ["[1]", "NaN", '"login"', '{"harnesses": [1]}', '{"harnesses": {"x": {"envVars": 5}}}'])
def test_a_hub_is_asked_for_nothing_else_and_what_one_has_said_breaks_nothing(
    hub: Hub, shards: dict[str, bytes], tmp_path: Path, kept: str
) -> None:
    """The library keeps for a day what any hub says of programs that may use it; each later request failed by it."""
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / ".agent_harnesses.json").write_text(kept)
    assert run("cached_fineweb10B.py", hub, tmp_path, "1")[0] == 0
    (tmp_path / "home" / ".agent_harnesses.json").unlink()
    assert run("cached_fineweb10B.py", hub, tmp_path, "2")[0] == 0
    assert {path for _, path, _ in hub.log} == {f"{CACHED}/{name}" for name in first(shards, 3)}


@pytest.mark.parametrize("how", ["drop", "reset"])
def test_a_broken_connection_goes_on_where_it_ended(hub: Hub, shards: dict[str, bytes], tmp_path: Path, how: str) -> None:
    """To the byte; a reset may take with it what the client's system had not handed over."""
    name = "fineweb_val_000000.bin"
    hub.breaks[f"{CACHED}/{name}"] = [(how, 700), (how, 500)]
    code, _, err = run("cached_fineweb10B.py", hub, tmp_path, "0")
    assert code == 0 and err.count("trying again in 1 s (1 of 5)") == 2, err  # some bytes arrived: attempts count anew
    assert shards_in(tmp_path / "out") == first(shards, 1)
    if how == "drop":
        assert [span for _, span in hub.gets()] == [None, "bytes=700-", "bytes=1200-"]
        assert hub.sent == len(shards[name])


def test_a_shard_on_disk_that_is_not_whole_is_fetched_again(hub: Hub, shards: dict[str, bytes], tmp_path: Path) -> None:
    output = tmp_path / "out"
    output.mkdir()
    for name, content in shards.items():
        (output / name).write_bytes(content)
    truncated, empty = "fineweb_train_000001.bin", "fineweb_train_000003.bin"
    (output / truncated).write_bytes(shards[truncated][:-500])
    (output / empty).write_bytes(b"")
    code, _, err = run("cached_fineweb10B.py", hub, tmp_path, "3")
    assert code == 0 and "(500 too few)" in err and "is empty" in err
    assert shards_in(output) == first(shards, 4)
    assert [path for path, _ in hub.gets()] == [f"{CACHED}/{truncated}", f"{CACHED}/{empty}"]
    told = re.findall("^fetching .*", err, re.M)  # as after nohup: no bar is shown
    assert told == [f"fetching {truncated}, 3.04kB (2 of 4)", f"fetching {empty}, 3.08kB (4 of 4)"]


def test_a_bad_shard_from_the_hub_never_gets_its_name(hub: Hub, shards: dict[str, bytes], tmp_path: Path) -> None:
    name = "fineweb_train_000001.bin"
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / name).write_bytes(already := shards[name][:-500])
    for bad, message in ((shards[name][:900], "900 bytes"), (b"<html>" + shards[name][6:], "magic number")):
        hub.files[f"{CACHED}/{name}"] = bad
        result = run("cached_fineweb10B.py", hub, tmp_path, "2")
        assert failed_with(f"sent a bad {name}", result) and failed_with(message, result)
        assert shards_in(tmp_path / "out") == first(shards, 1) | {name: already}
        assert len(list((tmp_path / "out").rglob("*.bin"))) == 2

    hub.files[f"{CACHED}/{name}"] = shards[name]  # once the hub is well, the same command finishes
    assert run("cached_fineweb10B.py", hub, tmp_path, "2")[0] == 0
    assert shards_in(tmp_path / "out") == first(shards, 3)


def test_a_shard_that_the_hub_does_not_have_is_an_error_at_once(hub: Hub, shards: dict[str, bytes], tmp_path: Path) -> None:
    result = run("cached_fineweb10B.py", hub, tmp_path, "4")
    assert failed_with("kjj0/fineweb10B-gpt2/fineweb_train_000004.bin", result)
    assert failed_with("(attempt 1 of 5): 404", result)
    assert shards_in(tmp_path / "out") == first(shards, 4)


def test_a_shard_is_on_disk_before_it_has_its_name(tmp_path: Path, shards: dict[str, bytes], monkeypatch) -> None:
    """And its name before fetch_shard returns, after which fetched.json says that it was compared."""
    name, done, fsync, replace = "fineweb_train_000001.bin", [], os.fsync, os.replace
    inode = lambda file: os.stat(file).st_ino
    said = cached_fineweb10B.Announced(hashlib.sha256(shards[name]).hexdigest(), None)
    monkeypatch.setattr(cached_fineweb10B, "announced", lambda *_: said)
    monkeypatch.setattr(cached_fineweb10B, "receive", lambda _, part, *sizes: part.write_bytes(shards[name]))
    monkeypatch.setattr(os, "fsync", lambda file: (done.append(("synced", inode(file))), fsync(file)))
    monkeypatch.setattr(os, "replace", lambda old, new: (done.append(("named", inode(old))), replace(old, new)))
    cached_fineweb10B.fetch_shard(name, tmp_path, {})
    shard = inode(tmp_path / name)
    assert done == [("synced", shard), ("named", shard), ("named", shard), ("synced", inode(tmp_path))]


@pytest.mark.parametrize(("said", "taken"), [(900, 900), (0, None), (-7, None), (None, None)])
def test_a_size_that_none_can_have_is_as_good_as_none(monkeypatch: pytest.MonkeyPatch, said: int | None, taken: int | None) -> None:
    """Of -7 bytes were more than announced, whatever came."""
    metadata = SimpleNamespace(etag="0" * 64, size=said)
    monkeypatch.setattr(cached_fineweb10B, "get_hf_file_metadata", lambda *_, **__: metadata)
    assert cached_fineweb10B.announced("someone/texts", "a.bin").size == taken


def test_what_the_environment_asks_for_is_not_tried_again(hub: Hub, tmp_path: Path) -> None:
    environment = environment_of(hub, tmp_path) | {"HF_HUB_OFFLINE": "1"}
    command = [*start_command("cached_fineweb10B.py", tmp_path), "0"]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert failed_with("(attempt 1 of 5): ", (done.returncode, done.stdout, done.stderr)) and "offline mode" in done.stderr


def test_a_killed_download_leaves_only_whole_shards_and_can_be_repeated(
    hub: Hub, shards: dict[str, bytes], tmp_path: Path
) -> None:
    hub.breaks[f"{CACHED}/fineweb_train_000001.bin"] = [("stall", 900)]
    process = start("cached_fineweb10B.py", hub, tmp_path, "1")
    assert hub.stalled.wait(30)
    process.kill()
    process.communicate()
    assert shards_in(tmp_path / "out") == first(shards, 1)

    assert run("cached_fineweb10B.py", hub, tmp_path, "1")[0] == 0
    assert shards_in(tmp_path / "out") == first(shards, 2)
    assert not list((tmp_path / "out").rglob("*.incomplete"))


def test_a_number_of_shards_that_there_is_not_is_a_usage_error(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    for number in ("104", "-1", "many"):
        monkeypatch.setattr(sys, "argv", ["cached_fineweb10B.py", number])
        with pytest.raises(SystemExit) as caught:
            cached_fineweb10B.main()
        assert caught.value.code == 2 and "argument N" in capsys.readouterr().err


@pytest.mark.parametrize("method", ["HEAD", "GET"])
def test_a_500_of_the_hub_is_named_and_tried_again(hub: Hub, shards: dict[str, bytes], tmp_path: Path, method: str) -> None:
    name = "fineweb_val_000000.bin"
    hub.fails[f"{method} {CACHED}/{name}"] = 1
    code, _, err = run("cached_fineweb10B.py", hub, tmp_path, "0")
    assert code == 0 and shards_in(tmp_path / "out") == first(shards, 1), err
    assert f"{name}: " in err and "500" in err and "trying again in 1 s (1 of 5)" in err


class Client:
    """fetch and fetch_shard in this process, from the hub, without pauses."""

    def __init__(self, hub: Hub, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.known, self.pauses = folder, {}, []
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        place = f"http://127.0.0.1:{hub.server_port}"
        template = place + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", place)
        monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(cached_fineweb10B.time, "sleep", self.pauses.append)
        folder.mkdir(exist_ok=True)

    def get(self, name: str) -> Path:
        return cached_fineweb10B.fetch("kjj0/fineweb10B-gpt2", name, self.folder, 10_000)

    def shard(self, name: str) -> int:
        return cached_fineweb10B.fetch_shard(name, self.folder, self.known)


@pytest.fixture
def client(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Client:
    return Client(hub, tmp_path / "here", monkeypatch)


def garbage(content: bytes) -> bytes:
    """A right header, and other tokens."""
    return content[:1024] + bytes(len(content) - 1024)


def test_garbage_under_a_right_header_is_thrown_away_and_named(
    hub: Hub, shards: dict[str, bytes], client: Client, capsys: pytest.CaptureFixture
) -> None:
    """The hub announces the hash of the shard, and what comes is something else, every time."""
    name = "fineweb_val_000000.bin"
    path, announced = f"{CACHED}/{name}", hashlib.sha256(shards[name]).hexdigest()
    hub.files[path], hub.announced[path] = garbage(shards[name]), announced
    message = rf"could not fetch kjj0/fineweb10B-gpt2/{name} from http://127.* \(attempt 5 of 5\): .* hash {announced}"
    with pytest.raises(DataError, match=message):
        client.shard(name)
    assert not [path for path in client.folder.rglob("*") if path.is_file()] and len(client.pauses) == 4
    hub.files[path] = shards[name]
    assert client.shard(name) == 1000 and shards_in(client.folder) == first(shards, 1)


def test_garbage_in_the_middle_is_fetched_again(hub: Hub, shards: dict[str, bytes], client: Client) -> None:
    """What an earlier attempt left may be damaged: then the whole file comes anew."""
    name = "fineweb_val_000000.bin"
    (client.folder / f"{name}.{hashlib.sha256(shards[name]).hexdigest()[:16]}.part").write_bytes(bytes(700))
    assert client.get(name).read_bytes() == shards[name]
    assert [span for _, span in hub.gets()] == ["bytes=700-", None] and len(client.pauses) == 1


@pytest.mark.parametrize("how", ["drop", "reset", "stall"])
def test_a_download_of_many_breaks_arrives_and_one_without_progress_ends(
    hub: Hub, shards: dict[str, bytes], client: Client, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Attempts count anew while bytes arrive: eight breaks are no end, five without a byte are."""
    name = "fineweb_val_000000.bin"
    monkeypatch.setattr(cached_fineweb10B, "TIMEOUT", 0.5)
    hub.breaks[f"{CACHED}/{name}"] = [(how, 100 + i) for i in range(8)]
    assert client.get(name).read_bytes() == shards[name]
    assert len(hub.gets()) >= 9 and hub.gets()[-1][1] is not None
    if how == "drop":  # a reset may take some bytes with it, a busy machine may be late once more than the hub stalls
        assert hub.sent == len(shards[name]) and client.pauses == [1] * 8
    client.get(name).unlink()
    hub.breaks[f"{CACHED}/{name}"] = [("drop", 0)] * 5
    with pytest.raises(DataError, match=r"attempt 5 of 5"):
        client.get(name)


def test_a_kill_loses_nothing_that_has_arrived(hub: Hub, shards: dict[str, bytes], tmp_path: Path) -> None:
    name = "fineweb_val_000000.bin"
    hub.breaks[f"{CACHED}/{name}"] = [("stall", 900), *[("stall", 0)] * 4]  # what has come is written when the client gives up
    script = f"import sys; sys.path.insert(0, {str(FOLDER)!r}); import cached_fineweb10B as tool; tool.TIMEOUT = 2.0; tool.main()"
    command = [sys.executable, "-c", script, *start_command("cached_fineweb10B.py", tmp_path)[2:], "0"]
    pipes = dict(stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    process = subprocess.Popen(command, env=environment_of(hub, tmp_path), cwd=tmp_path, **pipes)
    wait_until(lambda: sum(path.stat().st_size for path in tmp_path.rglob("*.part")) == 900)
    process.kill()
    process.wait()
    hub.breaks.clear(), hub.log.clear()
    assert run("cached_fineweb10B.py", hub, tmp_path, "0")[0] == 0
    assert hub.gets() == [(f"{CACHED}/{name}", "bytes=900-")] and shards_in(tmp_path / "out") == first(shards, 1)


def test_what_is_left_of_another_state_of_the_file_is_not_gone_on_with(
    hub: Hub, shards: dict[str, bytes], client: Client
) -> None:
    name = "fineweb_val_000000.bin"
    (client.folder / f"{name}.{'0' * 16}.part").write_bytes(bytes(700))
    assert client.get(name).read_bytes() == shards[name]
    assert [span for _, span in hub.gets()] == [None] and [path.name for path in client.folder.iterdir()] == [name]


def test_a_body_without_end_ends_as_more_comes_than_was_announced(hub: Hub, shards: dict[str, bytes], client: Client) -> None:
    """It filled the disk."""
    hub.endless[f"{CACHED}/{list(shards)[0]}"] = 200
    with pytest.raises(DataError, match=r"\(attempt 1 of 5\): it sends more than the 3,024 bytes that it has announced"):
        client.shard(list(shards)[0])
    assert not [path for path in client.folder.rglob("*") if path.is_file()] and hub.sent < 2**24


def main_says(tool: ModuleType, folder: Path, monkeypatch: pytest.MonkeyPatch, *options: str) -> str:
    """The line with which the tool ends in this process, with code 1. It leaves no file."""
    monkeypatch.setattr(sys, "argv", [f"{tool.__name__}.py", "--output", str(folder), *options])
    with pytest.raises(SystemExit) as caught:
        tool.main()
    assert not [path for path in folder.rglob("*") if path.is_file()]
    return f"{caught.value.code}"  # of a message: code 1


@pytest.mark.parametrize("says_length", [False, True])
def test_a_file_has_no_more_bytes_than_such_a_file_can_have(
    hub: Hub, shards: dict[str, bytes], client: Client, monkeypatch: pytest.MonkeyPatch, says_length: bool
) -> None:
    """Of one whose length nobody says, and of one that is announced to be larger."""
    path = f"{CACHED}/{list(shards)[0]}"
    hub.endless[path] = 200
    hub.silent |= set() if says_length else {path}
    monkeypatch.setattr(cached_fineweb10B, "MAX_SHARD", 3000)
    told = main_says(cached_fineweb10B, client.folder / "out", monkeypatch, "0")
    announced = "fineweb_val_000000.bin has 3,024 bytes, as is announced, such a file 3,000 at most: another hub?"
    said = announced if says_length else "(attempt 1 of 5): it sends more than the 3,000 bytes that such a file can have"
    assert said in told and "\n" not in told
    assert (hub.sent == 0 if says_length else hub.sent < 2**24) and client.pauses == [] and not (client.folder / "out").exists()


def test_a_parquet_file_has_no_more_bytes_than_one_can_have(
    hub: Hub, parquet: dict[str, list[str]], client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = f"{PARQUET}/sample/10BT/000.parquet"
    hub.endless[path], hub.silent = 200, {path}
    monkeypatch.setattr(fineweb, "MAX_PARQUET", 3000)
    progress = fineweb.Progress({}, *fineweb.list_parquet("sample/10BT"))
    with pytest.raises(DataError, match=r"\(attempt 1 of 5\): it sends more than the 3,000 bytes that such a file can have$"):
        fineweb.fetch_parquet(progress, client.folder, 0)
    assert hub.sent < 2**24 and not [path for path in client.folder.rglob("*") if path.is_file()] and progress.fetched == []


@pytest.mark.parametrize(
    "tool, status", [(fineweb, 200), *((tool, status) for tool in (cached_fineweb10B, fineweb) for status in (302, 403, 500))]
)
def test_an_answer_without_end_is_no_hubs(
    hub: Hub, shards: dict[str, bytes], client: Client, monkeypatch: pytest.MonkeyPatch, tool: ModuleType, status: int
) -> None:
    """A list's, an error's or a redirect's. It took all memory, five times."""
    path = f"{CACHED}/fineweb_val_000000.bin" if tool == cached_fineweb10B else "api/datasets/HuggingFaceFW/fineweb"
    hub.endless[path] = status
    huggingface_hub.close_session()  # an earlier test's
    monkeypatch.setattr(cached_fineweb10B, "MAX_ANSWER", 2**20)
    told = main_says(tool, client.folder / "out", monkeypatch, *["--encoding=bytes"] * (tool == fineweb))
    answers = f"http://127.0.0.1:{hub.server_port}/{path} answers, and not as a hub does, with more than 1,048,576 bytes"
    assert f"(attempt 1 of 5): {answers}: a login page, or another HF_ENDPOINT?" in told and "\n" not in told
    assert hub.sent < 2**24 and client.pauses == [] and not (client.folder / "out").exists()


def test_of_a_long_error_the_beginning_is_told(hub: Hub, shards: dict[str, bytes], client: Client, capsys) -> None:
    """As of a server that answers with a page."""
    hub.fails[f"GET {CACHED}/{list(shards)[0]}"], hub.error = 1, b"x" * 2**20
    assert client.shard(list(shards)[0]) == 1000
    assert re.search("500 .*xxx; trying again in 1 s", said := capsys.readouterr().err) and len(said) < 3000


@pytest.mark.parametrize("announced", ["", "d41d8cd98f00b204e9800998ecf8427e", "../" * 22])
def test_a_hub_that_announces_no_hash_is_refused(
    hub: Hub, shards: dict[str, bytes], client: Client, announced: str
) -> None:
    hub.announced[f"{CACHED}/fineweb_val_000000.bin"] = announced
    with pytest.raises(DataError, match=r"\(attempt 1 of 5\): it announces the ETag .* which is no SHA-256"):
        client.shard("fineweb_val_000000.bin")
    assert hub.gets() == [] and not list(client.folder.iterdir())


def test_a_small_file_has_the_hash_of_git(hub: Hub, shards: dict[str, bytes], client: Client) -> None:
    hub.files[f"{CACHED}/a"] = b"what is up, doc?"
    hub.announced[f"{CACHED}/a"] = "bd9dbf5aae1a3862dd1526723246b20206e5fc37"  # from the book Pro Git
    assert client.get("a").read_bytes() == b"what is up, doc?"


def test_garbage_in_a_shard_on_disk_is_found_and_fetched_again(
    hub: Hub, shards: dict[str, bytes], client: Client, capsys: pytest.CaptureFixture
) -> None:
    """One that nobody has compared yet, and one that has changed since; what has not is not read again."""
    name, content = list(shards)[1], shards[list(shards)[1]]
    (client.folder / name).write_bytes(garbage(content))
    assert client.shard(name) == 1010 and (client.folder / name).read_bytes() == content
    assert f"{name}: does not have the hash" in capsys.readouterr().err
    hub.log.clear()
    assert client.shard(name) == 1010 and hub.log == []

    (client.folder / name).write_bytes(garbage(content))
    os.utime(client.folder / name, ns=(0, client.known[name][1] + 1))
    assert client.shard(name) == 1010 and (client.folder / name).read_bytes() == content
    assert [path for path, _ in hub.gets()] == [f"{CACHED}/{name}"]

    os.utime(client.folder / name)  # touched, or copied: read again, and found right
    hub.log.clear()
    assert client.shard(name) == 1010 and hub.log == []


@pytest.mark.parametrize("change", [garbage, lambda content: content[:-2], lambda content: content + b"mine", lambda _: b"mine"])
def test_a_shard_that_is_not_the_hubs_stays_until_the_hubs_has_come(
    hub: Hub, shards: dict[str, bytes], client: Client, change: Callable[[bytes], bytes]
) -> None:
    name = list(shards)[1]
    (client.folder / name).write_bytes(mine := change(shards[name]))
    hub.files[f"{CACHED}/{name}"] = b"no shard"
    with pytest.raises(ShardError, match="sent a bad"):
        client.shard(name)
    assert (client.folder / name).read_bytes() == mine


@pytest.mark.parametrize("begin", [struct.pack("<ii", 20240801, 7), struct.pack("<ii", 20240520, 2), b"<html>no"])
def test_a_file_of_another_format_is_not_replaced(hub: Hub, shards: dict[str, bytes], client: Client, begin: bytes) -> None:
    """As llm.c's shards of another tokenizer, which have the same names."""
    name = list(shards)[1]
    (client.folder / name).write_bytes(mine := begin + shards[name][8:])
    with pytest.raises(DataError, match=f"{name}: magic number or version of another format: it is not replaced, move it away"):
        client.shard(name)
    assert (client.folder / name).read_bytes() == mine and hub.log == []


def test_what_else_is_in_a_folder_of_downloads_stays(hub: Hub, shards: dict[str, bytes], tmp_path: Path, monkeypatch) -> None:
    client = Client(hub, tmp_path / "out", monkeypatch)
    for path in (mine := client.folder / "arriving" / "mine.bin", client.folder / "arriving" / f"{list(shards)[0]}.0f.part"):
        path.parent.mkdir(exist_ok=True)
        path.write_text("precious")
    monkeypatch.setattr(sys, "argv", ["cached_fineweb10B.py", "1", "--output", str(client.folder)])
    cached_fineweb10B.main()
    assert shards_in(client.folder) == first(shards, 2) and [*mine.parent.iterdir()] == [mine]


def test_a_name_of_the_hubs_cannot_move_a_cursor(hub: Hub, client: Client, capsys: pytest.CaptureFixture) -> None:
    hub.files[f"{CACHED}/\x1b[31m\n.bin"] = b"x"
    hub.breaks[f"{CACHED}/\x1b[31m\n.bin"] = [("drop", 0)]
    client.get("\x1b[31m\n.bin")
    told = capsys.readouterr().err.splitlines()
    assert told[0] == r"fetching \x1b[31m .bin, 1.00B" and r"/\x1b[31m .bin: " in told[1] and len(told) == 2


def test_a_link_to_where_downloads_arrive_is_refused(hub: Hub, shards: dict[str, bytes], tmp_path: Path, monkeypatch) -> None:
    """Behind it files of the shards' names were moved away and replaced."""
    client, mine = Client(hub, tmp_path / "out", monkeypatch), tmp_path / "mine"
    mine.mkdir()
    (mine / list(shards)[0]).write_text("precious")
    (client.folder / "arriving").symlink_to(mine)
    monkeypatch.setattr(sys, "argv", ["cached_fineweb10B.py", "1", "--output", str(client.folder)])
    with pytest.raises(SystemExit, match="arriving is a link: remove it, or name a folder on that disk by --output"):
        cached_fineweb10B.main()
    assert hub.log == [] and (mine / list(shards)[0]).read_text() == "precious"


@pytest.mark.parametrize("name", ["local_train_000000.bin", "mine_val_1.bin"])
def test_shards_of_others_are_not_added_to(hub: Hub, shards: dict[str, bytes], tmp_path: Path, monkeypatch, name: str) -> None:
    """A run would train on both. By either tool."""
    client = Client(hub, tmp_path / "out", monkeypatch)
    (client.folder / name).write_text("mine")
    (client.folder / f"._{name}").write_text("macOS's, which no run takes for a shard")
    said = f"out/{name} is not this program's, and a run would train on both: choose another --output"
    monkeypatch.setattr(sys, "argv", ["cached_fineweb10B.py", "1", "--output", str(client.folder)])
    with pytest.raises(SystemExit, match=said):
        cached_fineweb10B.main()
    with pytest.raises(DataError, match=said):
        fineweb.load_progress(client.folder, {"subset": "x"})
    assert hub.log == [] and [path.name for path in client.folder.glob("[!.]*.bin")] == [name]
    (client.folder / name).unlink()
    check_alone(client.folder, "fineweb")


def test_the_shards_of_the_other_tool_are_not_replaced(hub: Hub, tmp_path: Path, monkeypatch) -> None:
    client = Client(hub, tmp_path / "out", monkeypatch)
    (client.folder / "progress.json").write_text("{}")
    (client.folder / "fineweb_val_000000.bin").write_text("mine")
    monkeypatch.setattr(sys, "argv", ["cached_fineweb10B.py", "1", "--output", str(client.folder)])
    with pytest.raises(SystemExit, match=r"out holds shards of fineweb.py \(progress.json\): choose another --output"):
        cached_fineweb10B.main()
    assert hub.log == [] and (client.folder / "fineweb_val_000000.bin").read_text() == "mine"


@pytest.mark.parametrize("content", ["[]", "[1", '{"a": 5}', '{"fineweb_val_000000.bin": ["x", 0]}', "null", '{"a": ["x", 1e400]}'])
def test_a_note_of_hashes_that_makes_no_sense_is_made_again(
    hub: Hub, shards: dict[str, bytes], tmp_path: Path, content: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = Client(hub, tmp_path / "out", monkeypatch)
    (client.folder / "fetched.json").write_text(content)
    monkeypatch.setattr(sys, "argv", ["cached_fineweb10B.py", "0", "--output", str(client.folder)])
    for _ in range(2):
        cached_fineweb10B.main()
        assert shards_in(client.folder) == first(shards, 1)
    noted = json.loads((client.folder / "fetched.json").read_bytes())["fineweb_val_000000.bin"]
    assert noted[0] == hashlib.sha256(shards["fineweb_val_000000.bin"]).hexdigest()


@pytest.mark.parametrize("status", [401, 403])
def test_a_token_that_the_hub_refuses_is_an_error_at_once_and_named(
    hub: Hub, shards: dict[str, bytes], client: Client, status: int
) -> None:
    """One that has run out, of public data: it was tried five times."""
    hub.fails[f"HEAD {CACHED}/fineweb_val_000000.bin"], hub.status = 9, status
    with pytest.raises(DataError, match=rf"attempt 1 of 5\): .*{status}.*: is the token of HF_TOKEN, or of `hf auth login`, still good\?"):
        client.shard("fineweb_val_000000.bin")
    assert client.pauses == []


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES, errno.ENOSPC])
def test_shards_that_were_brought_serve_where_no_note_can_be_kept(
    hub: Hub, shards: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, number: int
) -> None:
    """As of another user, or copied without their times; on a full disk the note is missed."""

    def refuse(path: Path, *_: object) -> None:
        raise OSError(number, os.strerror(number), f"{path}")

    client = Client(hub, tmp_path / "out", monkeypatch)
    for name, content in first(shards, 2).items():
        (client.folder / name).write_bytes(content)
    monkeypatch.setattr(cached_fineweb10B, "write_json", refuse)
    monkeypatch.setattr(sys, "argv", ["cached_fineweb10B.py", "1", "--output", str(client.folder)])
    if number == errno.ENOSPC:
        with pytest.raises(SystemExit, match=f"{os.strerror(number)}: '{client.folder}/fetched.json'"):
            cached_fineweb10B.main()
        return
    cached_fineweb10B.main()
    said = capsys.readouterr()
    assert "2 shards, 2,010 tokens, all whole" in said.out and hub.gets() == []
    note = f"{client.folder}/fetched.json: {os.strerror(number)}: the shards serve, and are compared with the hub again at the next start"
    assert said.err.splitlines() == [note]


def test_without_a_hub_whole_shards_are_told_to_serve(tmp_path: Path, hub: Hub, shards: dict[str, bytes], monkeypatch) -> None:
    """As on a node without internet, to which they were brought."""
    client = Client(hub, tmp_path / "out", monkeypatch)
    (path := client.folder / "fineweb_val_000000.bin").write_bytes(shards[path.name])
    monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", "http://127.0.0.1:9/{filename}")
    way_out = f"{path} is whole, and has not been compared: to train on it all the same, give --data={client.folder}$"
    with pytest.raises(DataError, match=f"could not fetch the hash of .*: {way_out}"):
        client.shard(path.name)
    with pytest.raises(DataError, match="could not fetch") as error:
        client.shard("fineweb_train_000001.bin")
    assert "--data" not in f"{error.value}"


def test_what_stands_in_a_shards_place_and_is_no_file_is_left_alone(hub: Hub, shards: dict[str, bytes], client: Client) -> None:
    for name, put in (("fineweb_val_000000.bin", os.mkfifo), ("fineweb_train_000001.bin", os.mkdir)):
        put(client.folder / name)
        with pytest.raises(DataError, match=f"{name}: is not a file: move it away"):
            client.shard(name)
        assert (client.folder / name).exists() and hub.log == []


def test_retries_end(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    pauses, calls = [], []
    monkeypatch.setattr(cached_fineweb10B.time, "sleep", pauses.append)

    def fail() -> None:
        calls.append(1)
        raise ConnectionError("cable cut") from TimeoutError("cable cut" if len(calls) < 5 else "by a spade")

    with pytest.raises(DataError, match=r"could not fetch the cable .*\(attempt 5 of 5\): cable cut by a spade$"):
        cached_fineweb10B.with_retries(fail, "the cable")
    assert len(calls) == 5 and pauses == [1, 2, 4, 8]
    assert capsys.readouterr().err.count("the cable: cable cut; trying again") == 4


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), MemoryError("No space")])
def test_a_full_disk_is_not_tried_again_and_nor_is_a_full_memory(error: Exception) -> None:
    calls = []

    def fail() -> None:
        calls.append(1)
        raise error

    with pytest.raises(type(error), match="No space"):
        cached_fineweb10B.with_retries(fail, "a shard")
    assert len(calls) == 1


# ----------------------------------------------------------------------------------------------------------------------
# fineweb.py

SHARD_TOKENS = 5000
OPTIONS = ("--encoding", "bytes", "--shard_tokens", str(SHARD_TOKENS), "--workers", "2")


@pytest.fixture
def parquet(hub: Hub) -> dict[str, list[str]]:
    """What the hub serves: three parquet files of 60 texts each in row groups of 8, and one of another subset."""
    random = np.random.default_rng(0)
    subset = {}
    for name in ("sample/10BT/000.parquet", "sample/10BT/001.parquet", "sample/10BT/002.parquet", "sample/100BT/000.parquet"):
        texts = [f"{name} {k} " + "wörd " * int(random.integers(0, 80)) for k in range(60)]
        table = pyarrow.table({"id": list(range(60)), "text": texts})
        pyarrow.parquet.write_table(table, file := BytesIO(), row_group_size=8)
        hub.files[f"{PARQUET}/{name}"] = file.getvalue()
        if "10BT" in name.split("/"):
            subset[name] = texts
    hub.files[f"{PARQUET}/sample/10BT/README.md"] = b"not parquet"
    return subset


@pytest.mark.parametrize("texts", [[], [None, None]])
def test_a_subset_without_text_is_an_error(hub: Hub, tmp_path: Path, texts: list) -> None:
    """It was "0 shards, 0 tokens, all whole"."""
    table = pyarrow.table({"text": pyarrow.array(texts, pyarrow.string())})
    pyarrow.parquet.write_table(table, file := BytesIO())
    hub.files[f"{PARQUET}/sample/10BT/000.parquet"] = file.getvalue()
    for _ in range(2):
        result = run("fineweb.py", hub, tmp_path, *OPTIONS)
        assert failed_with("no text in the 1 files of sample/10BT: choose another --subset", result)


BAD_LISTS = [  # what the hub's list is, and what of it is told
    ({"next_pages": ...}, r"\(attempt 1 of 5\): its list has a file twice"),
    ({"next_pages": ..., "files": {f"{PARQUET}/sample/10BT/README.md": b""}}, "its list has more than 3 pages"),
    ({"commit": None}, r"\(attempt 1 of 5\): its answer names no commit of the dataset: sha is None"),
    ({"commit": 7}, r"\(attempt 1 of 5\): its answer names no commit of the dataset: sha is 7"),
    ({"breaks": [("stall", 1)] * 5}, r"\(attempt 5 of 5\): .*timed out"),
    ({"says": b"<html>Log in</html>"}, r"\(attempt 1 of 5\): it answers, .* with '<html>Log in</html>': a login page, or another"),
    ({"lists": ["a"]}, r"\(attempt 1 of 5\): it answers, and not as a hub does, with '\[\"a\"\]': a login page"),
    ({"lists": [{"type": "file"}]}, r"\(attempt 1 of 5\): it answers, and not as a hub does, with .*: a login page"),
    ({"says": b"[" * 200_000}, r"\(attempt 1 of 5\): it answers, and not as a hub does, with '\[\[\[.*: a login page"),
    ({"says": b"[]"}, r"\(attempt 1 of 5\): it answers, and not as a hub does, with '\[\]': a login page"),
]


@pytest.mark.parametrize("how, message", BAD_LISTS)
def test_a_list_that_never_ends_or_makes_no_sense_is_named(
    hub: Hub, client: Client, parquet: dict[str, list[str]], how: dict, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was waited for, and followed, for ever."""
    monkeypatch.setattr(fineweb, "TIMEOUT", 0.1)
    monkeypatch.setattr(fineweb, "MAX_PAGES", 3)
    tree = f"api/datasets/HuggingFaceFW/fineweb/tree/{COMMIT}/sample/10BT"
    itself = f"http://127.0.0.1:{hub.server_port}/{tree}"
    for name, value in how.items():
        setattr(hub, name, {"breaks": {tree: value}, "next_pages": [itself] * 9}.get(name, value))
    with pytest.raises(DataError, match=f"could not fetch the list of the files of HuggingFaceFW/fineweb/sample/10BT .*{message}"):
        fineweb.list_parquet("sample/10BT")


def test_pages_of_a_list_are_put_together(hub: Hub, client: Client, parquet: dict[str, list[str]]) -> None:
    hub.next_pages = [f"http://127.0.0.1:{hub.server_port}/api/datasets/HuggingFaceFW/fineweb/tree/{COMMIT}/sample/100BT"]
    assert fineweb.list_parquet("sample/10BT") == (COMMIT, sorted([*parquet, "sample/100BT/000.parquet"]))


def stream_of(parquet: dict[str, list[str]]) -> list[int]:
    return [token for texts in parquet.values() for text in texts for token in (256, *text.encode())]


def shards_hold(folder: Path, stream: list[int], shard_tokens: int = SHARD_TOKENS) -> bool:
    """Whether the shards in `folder`, validation first, are the stream cut every `shard_tokens` tokens."""
    paths = sorted(folder.glob("fineweb_val_*.bin")) + sorted(folder.glob("fineweb_train_*.bin"))
    names = ["fineweb_val_000000.bin"] + [f"fineweb_train_{index:06d}.bin" for index in range(1, len(paths))]
    expected = [stream[at : at + shard_tokens] for at in range(0, len(stream), shard_tokens)]
    return [path.name for path in paths] == names and [read_shard(path).tolist() for path in paths] == expected


def children_of(process: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="looks for orphaned processes in /proc")
def test_a_killed_run_goes_on_and_ends_with_the_shards_of_an_uninterrupted_one(
    hub: Hub, parquet: dict[str, list[str]], tmp_path: Path
) -> None:
    """The second file stalls: by then the first has become shards, the last of which ended inside of a document."""
    stream = stream_of(parquet)
    hub.breaks[f"{PARQUET}/sample/10BT/001.parquet"] = [("stall", 1000)]
    process = start("fineweb.py", hub, tmp_path, *OPTIONS)
    assert hub.stalled.wait(30)
    children = children_of(process.pid)
    process.send_signal(signal.SIGKILL)
    process.wait()
    before = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "out").glob("*.bin")}
    progress = json.loads((tmp_path / "out" / "progress.json").read_bytes())
    assert 0 < len(before) < len(stream) // SHARD_TOKENS and not progress["finished"]
    assert stream[len(before) * SHARD_TOKENS] != 256

    deadline = time.monotonic() + 10
    while any(Path(f"/proc/{child}").exists() and "Z" not in state_of(child) for child in children):
        assert time.monotonic() < deadline, "the tokenising processes outlive their parent"
        time.sleep(0.05)

    hub.log.clear()
    code, out, err = run("fineweb.py", hub, tmp_path, *OPTIONS)
    assert code == 0 and f"{len(stream):,} tokens" in out, err
    assert shards_hold(tmp_path / "out", stream)
    after = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "out").glob("*.bin")}
    assert {name: after[name] for name in before} == before  # none was made again
    assert f"{PARQUET}/sample/10BT/000.parquet" not in dict(hub.gets())  # nor fetched
    assert sorted(path.name for path in (tmp_path / "out").iterdir() if path.suffix != ".bin") == [".lock", "progress.json"]

    hub.log.clear()
    assert run("fineweb.py", hub, tmp_path, *OPTIONS)[0] == 0 and hub.log == []


def state_of(process: int) -> str:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"


class Here:
    """fineweb.main in this process: threads for processes, parquet files from a folder, and a power cut on demand."""

    def __init__(self, hub: Hub, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.monkeypatch, self.cut_after = folder, monkeypatch, -1
        self.fetched: list[str] = []

        def fetch(repo: str, name: str, where: Path, limit: int, revision: str, place: str, keep: bool) -> Path:
            if keep:
                return where / name
            self.fetched.append(name)
            (where / name).parent.mkdir(parents=True, exist_ok=True)
            (where / name).write_bytes(hub.files[f"{PARQUET}/{name}"])
            return where / name

        def list_parquet(subset: str) -> tuple[str, list[str]]:
            names = [name.removeprefix(PARQUET + "/") for name in hub.files]
            return COMMIT, sorted(name for name in names if name.startswith(subset) and name.endswith(".parquet"))

        monkeypatch.setattr(fineweb, "fetch", fetch)
        monkeypatch.setattr(fineweb, "list_parquet", list_parquet)
        monkeypatch.setattr(fineweb, "worker_pool", ThreadPoolExecutor)
        self.write = fineweb.ShardWriter._write
        monkeypatch.setattr(fineweb.ShardWriter, "_write", lambda writer: self.write_or_cut(writer))

    def write_or_cut(self, writer: fineweb.ShardWriter) -> None:
        if self.cut_after == 0:
            raise KeyboardInterrupt
        self.cut_after -= 1
        self.write(writer)

    def make(self, *options: str, cut_after: int = -1) -> None:
        self.cut_after = cut_after
        self.monkeypatch.setattr(sys, "argv", ["fineweb.py", "--output", str(self.folder), *OPTIONS, *options])
        fineweb.main()


@pytest.fixture
def here(hub: Hub, parquet: dict[str, list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Here:
    return Here(hub, tmp_path / "out", monkeypatch)


@pytest.mark.parametrize("shard_tokens", [301, 5000, 49_000])
def test_shards_are_the_documents_in_order(here: Here, parquet: dict[str, list[str]], shard_tokens: int) -> None:
    here.make("--shard_tokens", str(shard_tokens))
    assert shards_hold(here.folder, stream_of(parquet), shard_tokens)
    assert not list(here.folder.rglob("*.parquet"))


def test_a_users_own_parquet_files_stay(here: Here) -> None:
    mine = here.folder / "parquet" / "mine" / "precious.parquet"
    mine.parent.mkdir(parents=True)
    mine.write_text("precious")
    here.make()
    assert [path for path in (here.folder / "parquet").rglob("*") if path.is_file()] == [mine]
    assert [*(here.folder / "parquet").iterdir()] == [mine.parent]


@pytest.mark.parametrize("linked", [False, True])
@pytest.mark.parametrize("cut_after", [2, -1])
def test_a_parquet_file_that_was_there_is_used_and_stays(
    here: Here, hub: Hub, parquet: dict[str, list[str]], tmp_path: Path, linked: bool, cut_after: int
) -> None:
    """Nothing behind a link is deleted, not even what was fetched there."""
    folder, name = tmp_path / "mine" if linked else here.folder / "parquet", "sample/10BT/001.parquet"
    (folder / name).parent.mkdir(parents=True)
    (folder / name).write_bytes(hub.files[f"{PARQUET}/{name}"])
    if linked:
        here.folder.mkdir()
        (here.folder / "parquet").symlink_to(folder)
    if cut_after > 0:
        with pytest.raises(SystemExit, match="130"):
            here.make(cut_after=cut_after)
    here.make()
    assert shards_hold(here.folder, stream_of(parquet)) and name not in here.fetched
    stay = [*parquet] if linked else [name]
    assert {path: (folder / path).read_bytes() for path in stay} == {path: hub.files[f"{PARQUET}/{path}"] for path in stay}
    assert [path.relative_to(folder).as_posix() for path in sorted(folder.rglob("*.parquet"))] == stay


def test_a_parquet_file_that_was_there_and_is_not_the_hubs_is_named(
    hub: Hub, client: Client, parquet: dict[str, list[str]]
) -> None:
    name = "sample/10BT/000.parquet"
    progress = fineweb.Progress({}, COMMIT, [name])
    mine = client.folder / "parquet" / name
    mine.parent.mkdir(parents=True)
    mine.write_text("mine")
    with pytest.raises(DataError, match="000.parquet does not have the hash .* and is not replaced: move it away"):
        fineweb.fetch_parquet(progress, client.folder, 0)
    assert mine.read_text() == "mine" and hub.gets() == []
    mine.unlink()
    assert fineweb.fetch_parquet(progress, client.folder, 0) == mine and progress.fetched == [name]
    mine.write_text("damaged")  # since it was fetched: comes anew
    assert fineweb.fetch_parquet(progress, client.folder, 0).read_bytes() == hub.files[f"{PARQUET}/{name}"]


def test_a_damaged_parquet_file_that_was_there_stays(here: Here, hub: Hub, parquet: dict[str, list[str]]) -> None:
    """The hub's own is so."""
    whole = hub.files[f"{PARQUET}/{[*parquet][0]}"]
    for content, what in ((b"no parquet", "is not a parquet file"), (damaged(whole), "is damaged")):
        mine = here.folder / "parquet" / "sample/10BT/001.parquet"
        mine.parent.mkdir(parents=True, exist_ok=True)
        mine.write_bytes(content)
        with pytest.raises(SystemExit, match=f"001.parquet {what}.*; it was there: move it away"):
            here.make()
        assert mine.read_bytes() == content


def test_interrupted_at_every_shard_the_same_shards_come_out(here: Here, parquet: dict[str, list[str]]) -> None:
    """Runs that write no shard, then one, then one more, until there is one left for the last run."""
    stream = stream_of(parquet)
    for noted in range(-(-len(stream) // SHARD_TOKENS)):
        with pytest.raises(SystemExit, match="130"):
            here.make(cut_after=min(noted, 1))
        assert shards_noted(here.folder) == noted
    assert [path.name for path in here.folder.rglob("*.parquet")] == ["002.parquet"]  # the others are in shards already
    here.make()
    assert shards_hold(here.folder, stream)


def shards_noted(folder: Path) -> int:
    return len(json.loads((folder / "progress.json").read_bytes())["shards"])


def test_a_shard_written_but_not_noted_is_written_again(here: Here, parquet: dict[str, list[str]]) -> None:
    with pytest.raises(SystemExit):
        here.make(cut_after=4)
    progress = json.loads((here.folder / "progress.json").read_bytes())
    progress["shards"].pop()
    (here.folder / "progress.json").write_text(json.dumps(progress))
    here.make()
    assert shards_hold(here.folder, stream_of(parquet))


@pytest.mark.parametrize("damage", [Path.unlink, lambda path: path.write_bytes(path.read_bytes()[:-2])])
def test_a_damaged_shard_is_made_again(here: Here, parquet: dict[str, list[str]], damage) -> None:
    here.make()
    damage(here.folder / "fineweb_train_000003.bin")
    here.make()
    assert shards_hold(here.folder, stream_of(parquet))


@pytest.mark.parametrize("limit", [SHARD_TOKENS + 1, 2 * SHARD_TOKENS, 2 * SHARD_TOKENS + 77])
def test_a_limit_on_the_tokens_is_kept_exactly(here: Here, parquet: dict[str, list[str]], limit: int) -> None:
    here.make("--num_tokens", str(limit))
    assert shards_hold(here.folder, stream_of(parquet)[:limit])
    here.fetched.clear()
    here.make("--num_tokens", str(limit))
    assert here.fetched == []


@pytest.mark.parametrize("limit", [1, SHARD_TOKENS])
def test_a_limit_that_leaves_nothing_to_train_on_is_refused(here: Here, capsys: pytest.CaptureFixture[str], limit: int) -> None:
    """--num_tokens=50_000_000, to try, made the validation shard alone: "all whole", and then no shard for training."""
    with pytest.raises(SystemExit, match="2"):
        here.make("--num_tokens", str(limit))
    said = f"--num_tokens={limit} and --shard_tokens={SHARD_TOKENS}: the first shard is for validation, none is left for training"
    assert said in capsys.readouterr().err and here.fetched == [] and not shards_in(here.folder)


def test_a_subset_that_leaves_nothing_to_train_on_is_told(here: Here) -> None:
    for _ in range(2):
        with pytest.raises(SystemExit, match="all .* tokens are in the validation shard, .* make smaller --shard_tokens, in another"):
            here.make("--shard_tokens=99_000_000")
    assert [*shards_in(here.folder)] == ["fineweb_val_000000.bin"]


def test_shards_of_another_recipe_or_origin_are_not_mixed_in(here: Here, parquet: dict[str, list[str]]) -> None:
    here.make()
    before = shards_in(here.folder)
    for option in (("--shard_tokens", "4000"), ("--subset", "sample/100BT"), ("--num_tokens", "9999")):
        with pytest.raises(SystemExit, match="was made with .* choose another --output"):
            here.make(*option)
    (here.folder / "progress.json").unlink()
    for origin in ("unknown origin", "cached_fineweb10B.py"):
        with pytest.raises(SystemExit, match=f"holds shards of {origin} .no progress.json.: choose another --output"):
            here.make()
        (here.folder / "fetched.json").touch()
    assert shards_in(here.folder) == before


@pytest.mark.parametrize("content", [b"no parquet", {"url": ["a"]}, {"text": [1]}, {"text": [["a"]]}, {"text": [b"a"]}])
def test_a_file_without_texts_is_named_and_not_kept(here: Here, hub: Hub, content: bytes | dict) -> None:
    if isinstance(content, dict):
        pyarrow.parquet.write_table(pyarrow.table(content), file := BytesIO())
        content = file.getvalue()
    hub.files[f"{PARQUET}/sample/10BT/001.parquet"] = content
    with pytest.raises(SystemExit, match="001.parquet .*(is not a parquet file|has no column text of strings, only (url|text): )"):
        here.make()
    assert not list(here.folder.rglob("001.parquet"))


def test_a_name_of_the_hubs_cannot_move_a_cursor_in_a_bar(here: Here, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []

    class Bar(fineweb.tqdm):
        def __init__(self, *given: object, **options: object) -> None:
            told.append(f"{options.get('desc')}")
            super().__init__(*given, **options)

        def set_description(self, desc: str | None = None, refresh: bool | None = True) -> None:
            told.append(f"{desc}")

    for module in (cached_fineweb10B, fineweb):
        monkeypatch.setattr(module, "tqdm", Bar)
    name = f"{PARQUET}/sample/10BT/001.parquet"
    hub.files[name.replace("001", "\x1b[2J001")] = hub.files.pop(name)
    here.make()
    cached_fineweb10B.progress_bar("\x1b[2J001.part", 0, 1).close()
    assert {r"\x1b[2J001", r"\x1b[2J001.parquet"} <= {*told} and not [text for text in told if "\x1b" in text], told


def test_a_worker_imports_nothing_from_the_current_folder(tmp_path: Path) -> None:
    """As where others can write: multiprocessing starts it by python -c."""
    (tmp_path / "own").mkdir()
    (script := tmp_path / "own" / "script.py").write_text(f"""
import sys
sys.path.insert(0, {f'{ROOT}'!r})
from data import fineweb
if __name__ == "__main__":
    with fineweb.worker_pool(1) as pool:
        print(pool.submit(len, "abc").result())
""")
    for name in ("multiprocessing", "pickle", "socket", "runpy"):
        (tmp_path / f"{name}.py").write_text(f"open({f'{tmp_path}/ran'!r}, 'a').write(__name__ + ' ')")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=100, cwd=tmp_path)
    assert done.stdout == "3\n" and not (tmp_path / "ran").exists(), done


def test_a_small_file_of_endless_text_is_named_before_memory_ends(here: Here, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """A dictionary of one text, and rows that name it."""
    text = pyarrow.array(["a" * 1000]).dictionary_encode().take(pyarrow.array([0] * 500))
    pyarrow.parquet.write_table(pyarrow.table({"text": text}), file := BytesIO())
    hub.files[f"{PARQUET}/sample/10BT/001.parquet"], read = file.getvalue(), []
    encode = fineweb.load_encoding

    def counted(name: str):
        encoding = encode(name)
        return replace(encoding, encode=lambda x: read.append(x) or encoding.encode(x))

    monkeypatch.setattr(fineweb, "MAX_ROW_GROUP", 100_000)
    monkeypatch.setattr(fineweb, "load_encoding", counted)
    with pytest.raises(SystemExit, match="001.parquet has more than 100,000 tokens in row group 0"):
        here.make()
    assert sum(text.startswith("aaa") for text in read) <= 128


def test_a_dead_worker_is_an_error_and_not_a_hang(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    def die(*_: object) -> None:
        raise fineweb.BrokenProcessPool("gone")

    monkeypatch.setattr(fineweb, "tokenise", die)
    with pytest.raises(SystemExit, match="a tokenising process died"):
        here.make()


def test_memory_is_bounded_by_the_row_groups_under_way(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    under_way, most = 0, 0

    class Counting(ThreadPoolExecutor):
        def submit(self, *task: object):
            nonlocal under_way, most
            under_way += 1
            most = max(most, under_way)
            return super().submit(*task)

    stream = fineweb.token_stream

    def counted(*arguments: object, **options: object):
        nonlocal under_way
        for item in stream(*arguments, **options):
            under_way -= 1
            yield item

    monkeypatch.setattr(fineweb, "worker_pool", Counting)
    monkeypatch.setattr(fineweb, "token_stream", counted)
    here.make("--workers", "3")
    assert most == 6  # two for each worker


def test_what_the_hub_does_not_have_is_an_error_with_one_line(hub: Hub, parquet: dict[str, list[str]], tmp_path: Path) -> None:
    result = run("fineweb.py", hub, tmp_path, *OPTIONS, "--subset", "sample/9BT")
    assert failed_with("HuggingFaceFW/fineweb/sample/9BT", result) and failed_with("404", result)
    assert failed_with("encoding 'gpt2' could not be loaded", run("fineweb.py", hub, tmp_path))
    assert not (tmp_path / "out").exists()


def damaged(content: bytes) -> bytes:
    """Ones over the pages of a row group in the middle of a parquet file: its directory, at the end, is whole."""
    with pyarrow.parquet.ParquetFile(BytesIO(content)) as file:
        column = file.metadata.row_group(3).column(1)
    at = column.dictionary_page_offset or column.data_page_offset
    return content[:at] + b"\xff" * column.total_compressed_size + content[at + column.total_compressed_size :]


def test_a_corrupt_page_names_its_file_which_the_same_command_fetches_again(
    here: Here, hub: Hub, parquet: dict[str, list[str]]
) -> None:
    """For instance by a disk: until now the same command failed on it for ever."""
    path = f"{PARQUET}/sample/10BT/001.parquet"
    good, hub.files[path] = hub.files[path], damaged(hub.files[path])
    with pytest.raises(SystemExit, match=r"001.parquet is damaged in row group 3 \(.*\); it was deleted: run the same command"):
        here.make()
    assert not list(here.folder.rglob("001.parquet"))
    hub.files[path] = good
    here.make()
    assert here.fetched.count("sample/10BT/001.parquet") == 2
    assert shards_hold(here.folder, stream_of(parquet))


def test_a_text_that_is_not_utf8_is_damage_too(here: Here, hub: Hub) -> None:
    column = pyarrow.Array.from_buffers(
        pyarrow.string(), 1, [None, pyarrow.py_buffer(np.array([0, 2], np.int32)), pyarrow.py_buffer(b"\xff\xfe")]
    )
    pyarrow.parquet.write_table(pyarrow.table({"text": column}), file := BytesIO())
    hub.files[f"{PARQUET}/sample/10BT/001.parquet"] = file.getvalue()
    with pytest.raises(SystemExit, match=r"001.parquet is damaged in row group 0 \(.*codec can't decode"):
        here.make()


def test_a_parquet_file_that_has_changed_on_disk_is_fetched_again(hub: Hub, parquet: dict, client: Client) -> None:
    name = "sample/10BT/000.parquet"
    (client.folder / "sample/10BT").mkdir(parents=True)
    (client.folder / name).write_bytes(damaged(hub.files[f"{PARQUET}/{name}"]))
    for requests in (1, 0):  # then it is right, and not fetched
        hub.log.clear()
        cached_fineweb10B.fetch(fineweb.REPO, name, client.folder, fineweb.MAX_PARQUET, COMMIT)
        assert len(hub.gets()) == requests
    assert (client.folder / name).read_bytes() == hub.files[f"{PARQUET}/{name}"]


HOSTILE = ["../../mine.parquet", "{folder}/mine.parquet", "sample/../../../mine.parquet", "way/mine.parquet"]
HOSTILE += ["mine.txt", "a\0.parquet", "a\ud800.parquet", "sample/10BT//000.parquet", "sample/./10BT/000.parquet"]


@pytest.mark.parametrize("name", HOSTILE)
def test_a_name_that_leads_elsewhere_is_neither_fetched_nor_deleted(here: Here, tmp_path: Path, name: str) -> None:
    """In progress.json, whoever wrote it, and in the hub's list."""
    mine = [tmp_path / "mine.parquet", here.folder / "mine.parquet", here.folder / "mine.txt"]
    (here.folder / "parquet").mkdir(parents=True)
    (here.folder / "parquet" / "way").symlink_to(tmp_path)
    for path in mine:
        path.write_text("mine")
    name = name.format(folder=tmp_path)
    names = [name, "sample/10BT/000.parquet"]
    here.monkeypatch.setattr(fineweb, "list_parquet", lambda _: (COMMIT, names))
    for _ in range(2):
        with pytest.raises(SystemExit, match="is no name of a parquet file below .* neither fetched nor deleted"):
            here.make()
        recipe = {"subset": "sample/10BT", "encoding": "bytes", "shard_tokens": SHARD_TOKENS, "num_tokens": 0}
        progress = {"recipe": recipe, "commit": COMMIT, "files": names, "shards": [[5000, 1, 0, 0]]}
        (here.folder / "progress.json").write_text(json.dumps(progress))
    assert [path.read_text() for path in mine] == ["mine"] * 3 and here.fetched == []


BROKEN_PROGRESS = ["", "[]", "7", "{}", "[" * 100_000, '{"recipe": 1}', "FIFO"]
BROKEN_PROGRESS += [
    json.dumps({"recipe": {}, "commit": "c", "files": files, "shards": shards})
    for files, shards in ((5, []), ([5], []), (["a.parquet"], 5), (["a.parquet"], [[1]]), (["a.parquet"], [[1, 1, 0, 0]]),
                          (["a.parquet"], [["1", 0, 0, 0]]), (["a.parquet"], [[-1, 0, 0, 0]]))
]  # fmt: skip
BROKEN_PROGRESS += [
    json.dumps({"recipe": {}, "commit": "c", "files": ["a.parquet"], "fetched": fetched}) for fetched in (5, [5], ["b.parquet"])
]


@pytest.mark.parametrize("content", BROKEN_PROGRESS)
def test_progress_that_makes_no_sense_is_named(here: Here, content: str) -> None:
    here.folder.mkdir()
    if content == "FIFO":
        os.mkfifo(here.folder / "progress.json")
    else:
        (here.folder / "progress.json").write_text(content)
    with pytest.raises(SystemExit, match=r"progress.json( cannot be read|.*|: is a link)") as caught:
        here.make()
    assert "\n" not in str(caught.value.code) and "error: " in caught.value.code and here.fetched == []

"""FlashAttention 3 comes with a start on Hopper GPUs, from an index of wheels, or a line says what its lack costs: no error.

No GPU and no such index is here: capabilities are made up, the index and its wheels are the test's own, pip is the real one.
"""

import functools
import http.server
import os
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from launch import start
import attention


def wheel(folder: Path, module: str) -> None:
    """A wheel of flash-attn-3 in an index below folder, with this text as its module."""
    place = folder / "flash-attn-3"
    place.mkdir(parents=True)
    name = "flash_attn_3-3.0.0-py3-none-any.whl"
    info = "flash_attn_3-3.0.0.dist-info"
    files = {
        "flash_attn_interface.py": module,
        f"{info}/METADATA": "Metadata-Version: 2.1\nName: flash-attn-3\nVersion: 3.0.0\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": "",
    }
    with zipfile.ZipFile(place / name, "w") as archive:
        for path, text in files.items():
            archive.writestr(path, text)
    (place / "index.html").write_text(f'<a href="{name}">{name}</a>')


@pytest.fixture
def hopper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Two Hoppers, a project without the package, and the folder that the index serves."""
    served, root = tmp_path / "index", tmp_path / "project"
    served.mkdir()
    root.mkdir()

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=f"{served}"))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr(start, "ROOT", root)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setenv("FLASH_ATTENTION_INDEX", f"http://127.0.0.1:{server.server_address[1]}")
    for name in ("PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "PYTHONPATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PYTHONPATH", "before")
    yield served
    server.shutdown()
    server.server_close()


def test_it_is_fetched_once_and_the_ranks_import_it(hopper, capsys, tmp_path, monkeypatch):
    for name in ("pip", "logging", "flash_attn_interface"):  # of the folder where the user stands
        (tmp_path / f"{name}.py").write_text("raise SystemExit(1)")
    monkeypatch.chdir(tmp_path)
    wheel(hopper, "WHICH = 3")
    start.bring_flash_attention()
    (tmp_path / "flash_attn_interface.py").unlink()
    assert "FlashAttention 3: looking in http://127.0.0.1" in (said := capsys.readouterr().out) and "3: ready (" in said
    found = subprocess.run([sys.executable, "-c", "import flash_attn_interface as f; print(f.WHICH)"], capture_output=True)
    assert found.stdout == b"3\n" and os.environ["PYTHONPATH"].endswith(":before")
    (hopper / "flash-attn-3/index.html").unlink()
    os.environ["PYTHONPATH"] = "before"
    start.bring_flash_attention()
    assert "looking" not in (said := capsys.readouterr().out) and "3: ready (" in said


@pytest.mark.parametrize("module, fault", [(None, "No matching distribution"), ("import no_such_cuda", "no_such_cuda")])
def test_without_a_wheel_that_works_one_line_says_what_that_costs(hopper, capsys, module, fault):
    if module:
        wheel(hopper, module)
    start.bring_flash_attention()
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith("no FlashAttention 3, steps take some 7 % longer") and fault in lines[1] and len(lines) == 2
    assert os.environ["PYTHONPATH"] == "before" and [*(start.ROOT / ".flash_attention").iterdir()] == [lock()]


def lock() -> Path:
    return start.ROOT / ".flash_attention" / "lock"


def test_two_starts_at_once_fetch_it_once(hopper, capsys, monkeypatch):
    """The second begins while the first fetches, and waits; one that was killed there has left a part of it."""
    wheel(hopper, "WHICH = 3")
    place = start.ROOT / ".flash_attention" / "{}.{}-{}".format(*sys.version_info[:2], torch.__version__)
    place.with_name(f"{place.name}.tmp").mkdir(parents=True)
    fetch, fetched, waiting = start.install_flash_attention, [], threading.Event()

    def fetch_slowly(*given):
        fetched.append(given)
        assert waiting.wait(60)
        return fetch(*given)

    monkeypatch.setattr(start, "install_flash_attention", fetch_slowly)
    monkeypatch.setattr(start, "console", lambda text, *_: (print(text), "waiting" in text and waiting.set()))
    starts = [threading.Thread(target=start.bring_flash_attention) for _ in range(2)]
    for thread in starts:
        thread.start()
    for thread in starts:
        thread.join(100)
    said = capsys.readouterr().out
    assert len(fetched) == 1 and said.count("waiting for another start") == 1 and said.count("3: ready (") == 2
    assert {*place.parent.iterdir()} == {place, lock()} and (place / "flash_attn_interface.py").exists()


def test_an_index_that_cannot_be_reached_is_no_error(hopper, capsys, monkeypatch):
    monkeypatch.setenv("FLASH_ATTENTION_INDEX", "http://127.0.0.1:9")
    start.bring_flash_attention()
    assert "no FlashAttention 3, steps take" in capsys.readouterr().out


def test_nor_is_a_folder_that_cannot_be_made(hopper, capsys):
    lock().parent.write_text("")
    start.bring_flash_attention()
    assert "no FlashAttention 3, steps take" in capsys.readouterr().out


@pytest.mark.parametrize("capability", [(8, 0), (10, 0)])
def test_other_gpus_and_none_are_left_alone(hopper, capsys, monkeypatch, capability):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (capability, (9, 0))[device])
    start.bring_flash_attention()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    start.bring_flash_attention()
    assert capsys.readouterr().out == ""


def test_a_package_of_another_pytorch_leaves_attention_as_it_was(monkeypatch):
    def broken(name):
        raise RuntimeError("undefined symbol\nand more")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(attention.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(torch.nn.attention, "activate_flash_attention_impl", broken, raising=False)
    attention.flash_attention.cache_clear()
    assert attention.flash_attention() == "varlen_attn, FA2: RuntimeError: undefined symbol"
    attention.flash_attention.cache_clear()

"""Compiled code: what it needs is asked before the ranks start, and nobody else's runs."""

import getpass
import os
import re
import shutil
import tempfile
import types
from unittest.mock import Mock

import pytest
import torch
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

import launch
import runtime.run
from common import SCRIPT, options
from launch import start as launcher
from launch.console import RunError
from runtime.ranks import join_ranks

ADVICE = "whose code would run as yours: remove it, or name another by TORCHINDUCTOR_CACHE_DIR"
FOLDERS = {  # of compiled code, in /tmp: who owns it, and what it leads to, if it is a link; who may write there
    "another's": (7, None, 0o755, "is of user 7, "),
    "another's link": (7, 0, 0o755, "is of user 7, "),
    "a link to another's": (0, 7, 0o755, "is of user 7, "),
    "a link to /dev/shm": (0, 0, 0o1777, "may be written by anybody, "),
    "open to all": (0, None, 0o777, "may be written by anybody, "),
    "mine": (0, None, 0o755, ""),
    "a link of mine": (0, 0, 0o700, ""),
}


@pytest.mark.parametrize("case", FOLDERS)
@pytest.mark.parametrize("way", ["run.sh", "by hand", "an older script"])
def test_compiled_code_of_others_does_not_run(start, shards, tmp_path, monkeypatch, case, way):
    """Anybody may make the folder in /tmp, and what lay there ran. One that is named by the variable is meant. Users and rights are
    as the case has them; 0 stands for this user, too."""
    owner, target, mode, said = FOLDERS[case]
    folder = tmp_path / f"torchinductor_{getpass.getuser()}"
    lstat, of_file = os.lstat, os.stat
    changed = lambda found, owner: os.stat_result([found[0] & ~0o7777 | mode, *found[1:4], owner or os.geteuid(), *found[5:10]])
    is_it = lambda path: isinstance(path, str) and path == f"{folder}"
    monkeypatch.setattr(os, "lstat", lambda x, **how: changed(lstat(x), owner) if is_it(x) else lstat(x, **how))
    behind = owner if target is None else target
    monkeypatch.setattr(os, "stat", lambda x, *also, **how: changed(of_file(x), behind) if is_it(x) else of_file(x, *also, **how))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    monkeypatch.delenv("BANKRUN_LAUNCHER", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", f"{tmp_path}")
    folder.mkdir()
    if way == "by hand":
        for name in ("RANK", "WORLD_SIZE"):
            monkeypatch.delenv(name, raising=False)
        try:
            join_ranks()
            found = ""
        except RunError as error:
            found = f"{error}"
    else:
        if way == "an older script":
            monkeypatch.delattr(runtime.run, "check_start")
        code, lines, started = start(*options(shards, tmp_path, compile=False))
        found = "" if started and code == 0 else lines[-1].removeprefix(f"{SCRIPT.name}: error: ")
    assert found == (f"{folder}: {said}{ADVICE}" if said else "")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", f"{folder}")
    assert launch.others_code() == ""


def test_a_user_without_a_name_is_known_by_his_number(tmp_path, monkeypatch):
    """As PyTorch has it: as in a container."""
    monkeypatch.setattr(tempfile, "tempdir", f"{tmp_path}")
    monkeypatch.setattr(getpass, "getuser", Mock(side_effect=KeyError("uid not found")))
    assert launch.inductors_folder() == default_cache_dir() == f"{tmp_path}/torchinductor_uid_{os.getuid()}"
    monkeypatch.setattr(getpass, "getuser", lambda: "al/ice")
    assert launch.inductors_folder() == default_cache_dir() == f"{tmp_path}/torchinductor_al_ice"
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    assert launch.others_code(make=True) == "" and launch.inductors_folder()[-3:] == "ice"
    assert os.stat(f"{tmp_path}/torchinductor_al_ice").st_mode & 0o777 == 0o700
    monkeypatch.setattr(tempfile, "gettempdir", Mock(side_effect=FileNotFoundError("no usable temporary directory")))
    assert launch.inductors_folder() == launch.others_code(make=True) == ""


def test_a_folder_of_compiled_code_is_made_for_its_user_alone(tmp_path):
    launcher.check_cache("", f"{tmp_path}/inductor")
    assert os.stat(f"{tmp_path}/inductor").st_mode & 0o777 == 0o700


@pytest.mark.parametrize(
    "variables, said",
    [
        ({"CXX": "/bin/false"}, "CXX=/bin/false is no compiler that works, which the compiled code needs: install one, name it by CXX, or"),
        ({"PATH": "/nowhere"}, r"there is no \S+ on the PATH, which the compiled code needs: install one, name it by CXX, or give --compile"),
        ({"CXX": "/bin/true", "noexec": ""}, r"/\S+ is mounted noexec, and compiled code could not be loaded: name another by TORCHINDUCTOR_CACHE_DIR"),
        ({"CXX": "/bin/true", "TMPDIR": "."}, "torchinductor_al_ice: no folder that can be written, File exists: name another by TORCHINDUCTOR_"),
        ({"CXX": "/bin/true", "TORCHINDUCTOR_CACHE_DIR": "full"}, "full: compiled code needs 67,108,864 bytes or more, 4,096 are free: make room, or"),
        ({"CXX": "/bin/true", "TORCHINDUCTOR_CACHE_DIR": "My cache"}, "takes no path with a blank, .* as My cache has: name another by TORCH"),
    ],
    ids=["no compiler that works", "none", "noexec", "another's", "full", "blank"],
)
def test_what_compiled_code_needs_is_asked_before_the_ranks_start(start, shards, tmp_path, monkeypatch, variables, said):
    for name in ("CC", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CXX", "/bin/true")
    if "PATH" in variables:
        assert start(*options(shards, tmp_path, compile=True))[0] == 0
    monkeypatch.delenv("CXX")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    if "noexec" in variables:
        there, names = os.statvfs, ("f_bavail", "f_bfree", "f_blocks", "f_frsize", "f_bsize", "f_flag")
        fields = lambda path: {name: getattr(there(path), name) for name in names}
        monkeypatch.setattr(os, "statvfs", lambda path: types.SimpleNamespace(**fields(path) | {"f_flag": os.ST_NOEXEC}))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(launcher.LaunchError, match="no path with a blank, .* as /My Projects/torch has: move the environment, or"):
        launcher.check_compiled_paths("/My Projects/torch", "")
    if "TMPDIR" in variables:
        monkeypatch.setattr(launcher.tempfile, "tempdir", None)
        monkeypatch.setattr(getpass, "getuser", lambda: "al/ice")
        monkeypatch.setenv("TMPDIR", f"{tmp_path}")
        (tmp_path / "torchinductor_al_ice").touch()
    if said.startswith("full"):
        monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(1 << 30, (1 << 30) - 4096, 4096))
        (tmp_path / "used" / "ab").mkdir(parents=True)
        launcher.check_cache("", f"{tmp_path / 'used'}")  # may hold all that is needed
    if "PATH" in variables:
        with pytest.raises(launcher.LaunchError, match="there is no gcc or clang on the PATH, .*: install one, name it by CC'"):
            launcher.check_compiler("CC", ["gcc", "clang"])
    code, lines, started = start(*options(shards, tmp_path, compile=True))
    assert (code, started) == (1, ()) and re.search(said, lines[-1]), lines


def test_a_gpus_updates_are_compiled_whatever_the_model_is(start, shards, tmp_path, monkeypatch):
    """What their folder needs was asked with --compile=true alone."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: types.SimpleNamespace(name="H200"))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", f"{tmp_path}")
    (tmp_path / f"torchinductor_{getpass.getuser()}").touch()
    code, lines, started = start(*options(shards, tmp_path, compile=False))
    assert (code, started) == (1, ()) and "no folder that can be written, File exists: name another by TORCHIND" in lines[-1], lines

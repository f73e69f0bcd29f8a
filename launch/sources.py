"""The project's sources as they were when the process began, and which of them it imports: what a log holds."""

import os
import re
import sys
import sysconfig
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
IMPORT = re.compile(r"^[ \t]*(?:import|from)[ \t]+([\w.]+(?:[ \t]*,[ \t]*[\w.]+)*)(?:[ \t]+import[ \t]+([\w \t,]+))?", re.M)
LIBRARIES = {Path(sysconfig.get_paths()[name]).resolve() for name in ("stdlib", "platstdlib")}


class Sources:
    """Every Python file of the project, read at once: an edit during a run does not reach its log."""

    def __init__(self, script: str | Path):
        """script: in the project (ideas/idea.py) or elsewhere, then with the files that it imports from there."""
        self.path = Path(script).resolve()
        self.contents = {}
        for path in filter(Path.is_file, {self.path, *python_files(ROOT)}):
            try:
                self.contents[path] = path.read_bytes()
            except OSError:  # what cannot be read cannot be imported
                if path == self.path:
                    raise
        self.script = self._name(self.path)  # its path in the project, or its file's name
        self.paths: dict[str, Path | None] = {}  # by a module's file, if it is ours: asked once, as there are thousands
        self.named: dict[Path, set[Path]] = {}  # by path, see _named_in

    def imported(self, errors: str = "strict") -> dict[str, str]:
        """{path in the project: text, line breaks as they are} of the script, then of all that is or will be imported.
        errors: of bytes that are no UTF-8, which a log cannot hold. Raises ValueError, unless it is "replace"."""
        files = {getattr(getattr(module, "__spec__", None), "origin", None) or "" for module in list(sys.modules.values())}
        self.paths |= {file: self._ours(file) for file in files - self.paths.keys()}
        ours, more = set(), {self.path, *filter(None, map(self.paths.get, files))}
        while more:
            self.contents |= {path: path.read_bytes() for path in more - self.contents.keys()}
            self.named |= {path: self._named_in(path) for path in more - self.named.keys()}
            ours, more = ours | more, set().union(*map(self.named.get, more)) - ours - more
        return {self._name(path): self._text(path, errors) for path in dict.fromkeys((self.path, *sorted(ours)))}

    def _named_in(self, path: Path) -> set[Path]:
        """Our files that a file's import statements name, also within functions: those are imported once a step calls them."""
        folders = {self.path.parent, ROOT}
        here = {name.partition(".")[0] for folder in folders for name in os.listdir(folder)}
        names = set()
        for modules, members in IMPORT.findall(self.contents[path].decode(errors="replace")):
            for module in re.findall(r"\w[\w.]*", modules):
                if module.partition(".")[0] in here:
                    names |= {module, *(f"{module}.{name}" for name in re.findall(r"\w+", members))}
        parts = {tuple(name.split(".")[:n]) for name in names for n in range(1, name.count(".") + 2)}
        files = (Path(folder, *part) for folder in folders for part in parts)
        found = (x for file in files for x in (file.with_suffix(".py"), file / "__init__.py") if os.access(x, os.R_OK))
        return {*filter(None, (self._ours(f"{x}") for x in found))}

    def _text(self, path: Path, errors: str) -> str:
        try:
            return self.contents[path].decode(errors=errors)
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}, byte {error.start}: is not UTF-8: save it as UTF-8") from None

    def _ours(self, file: str) -> Path | None:
        path = Path(file).resolve()
        beside = file.endswith(".py") and (path.is_relative_to(ROOT) or path.is_relative_to(self.path.parent))
        installed = {"site-packages", "dist-packages"} & {*path.parts} or any(path.is_relative_to(x) for x in LIBRARIES)
        return path if beside and not installed and (path in self.contents or path.is_file()) else None

    def _name(self, path: Path) -> str:
        return path.relative_to(ROOT if path.is_relative_to(ROOT) else self.path.parent).as_posix()


def check_unused(log: Path, resumed: Path | None = None, settings: Any = None) -> None:
    """Raise ValueError if there is a run's log already, or a folder of its checkpoints, which a new run would delete, or what
    its trace would replace, if settings ask for one.
    resumed: a checkpoint; that the log is of its run is for Log to see, and what lies beside the checkpoint is of its run."""
    folder, advice = log.with_suffix(""), "move it, or give another --run_id or --log_dir"
    if resumed and (holds_run(log) or resumed.resolve().parent == folder.resolve()):
        return
    if holds_run(log):
        raise ValueError(f"{log} is another run's log: {advice}")
    if any(folder.glob("step_*.pt")):
        raise ValueError(f"{folder} holds another run's checkpoints: {advice}")
    trace = folder.with_name(f"{folder.name}.trace.json")  # tracer.py's
    if not resumed and getattr(settings, "trace_steps", "") and os.path.lexists(trace):  # older scripts trace nothing
        raise ValueError(f"{trace} is there, another run's trace or a file of yours: {advice}")


def holds_run(log: Path) -> bool:
    """Is there something at log, but for the header of a run that ended before its first line?"""
    if not log.is_file():
        return os.path.lexists(log)
    end = b"\n" + b"=" * 100 + b"\n"
    with open(log, "rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - len(end)))
        return file.read() != end


def python_files(root: Path) -> list[Path]:
    """All *.py below root, but for hidden folders and environments."""
    found = []
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if not name.startswith(".") and "pyvenv.cfg" not in files]
        found += [Path(folder, name) for name in files if name.endswith(".py")]
    return found

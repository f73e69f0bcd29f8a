"""The sources of a run as they were when it began: what its log holds. Works without PyTorch."""

import difflib
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RULE = "=" * 100  # a line that ends a part of a log's header
BANNER = "-" * 40  # a line above and below a source's path


def printable(text: str) -> str:
    """The text without a terminal's control characters: each is shown as its escape, \\x1b."""
    shown = (char if char.isprintable() or char in "\n\t" else ascii(char)[1:-1] for char in text)
    return "".join(shown)


class Sources:
    """Every Python file of the project and of the script's folder, read at once: what is edited
    while a run starts does not reach its log."""

    def __init__(self, script: str | Path):
        """script: a training script, in the project (ideas/idea.py) or elsewhere."""
        self.script = Path(script).resolve()
        self.texts: dict[Path, bytes] = {}
        for folder in (ROOT, ROOT / "runtime", ROOT / "data", self.script.parent):
            for path in filter(Path.is_file, folder.glob("*.py")):
                self.texts[path.resolve()] = path.read_bytes()

    def imported(self) -> dict[str, str]:
        """{path in the project: text} of the script, then of every file that is imported now and is
        no installed package or part of Python."""
        paths = [self.script]
        for module in list(sys.modules.values()):
            file = getattr(module, "__file__", None)
            path = Path(file).resolve() if file and Path(file).is_absolute() else None
            if path and path not in paths and self._is_ours(path):
                paths.append(path)
        found = {}
        for path in [self.script, *sorted(paths[1:])]:
            content = self.texts.get(path)
            if content is None:  # imported from a folder of the script's own
                content = self.texts[path] = path.read_bytes()
            found[self._name(path)] = content.decode()
        return found

    def _is_ours(self, path: Path) -> bool:
        if path.suffix != ".py" or "site-packages" in path.parts or "tests" in path.parts:
            return False
        return path.is_relative_to(ROOT) or path.is_relative_to(self.script.parent)

    def _name(self, path: Path) -> str:
        """The path as extract.py writes it: relative to the script's folder, or to the project."""
        if path == self.script and not path.is_relative_to(ROOT):
            return path.name
        base = ROOT if path.is_relative_to(ROOT) else self.script.parent
        return path.relative_to(base).as_posix()


def below_path(name: str, text: str) -> str:
    """A file as a log holds it, below its path."""
    return "\n".join([BANNER, f"# {name}", BANNER, text])


def as_text(sources: dict[str, str]) -> str:
    """Sources as a log's header holds them: the script, then each further file."""
    (_, script), *others = sources.items()
    return "\n".join([script, *(below_path(name, text) for name, text in others)])


def changes(before: dict[str, str], now: dict[str, str]) -> list[str]:
    """Lines of the differences between two runs' sources; empty if they are the same."""
    diff = []
    for name in dict.fromkeys([*before, *now]):
        old = before.get(name, "").splitlines()
        new = now.get(name, "").splitlines()
        diff += difflib.unified_diff(old, new, f"{name} before", f"{name} now", "", "", 1, "")
    return diff

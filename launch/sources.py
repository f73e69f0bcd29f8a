"""The project's sources as they were when the process began, and which of them it imports: what a log holds."""

import ast
import difflib
import functools
import itertools
import os
import re
import sys
import sysconfig
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from importlib.util import cache_from_source, find_spec, spec_from_file_location
from pathlib import Path
from types import CodeType
from typing import Any
from zipimport import zipimporter

from launch import OF_VARIABLES

RULE = "=" * 100  # a line that ends a part of a log's header
ROOT = Path(__file__).resolve().parent.parent
CONTINUED = re.compile(rb"\\(?:\r\n|\r|\n)")
PLAIN_IMPORT = re.compile(r"(?:^|[:;])[ \t]*import\b((?:[^#;\n\\]|\\\n)+)", re.MULTILINE)
FROM_IMPORT = re.compile(r"(?:^|[:;])[ \t]*from(?:[ \t]|\\\n)+([^\W\d]\w*)[\w.]*(?:[ \t]|\\\n)+import\b", re.MULTILINE)
BY_TEXT = {"import_module", "__import__"}
LATER_IMPORT = re.compile(rb"^(?!import\b|from\b).*\bimport\b", re.MULTILINE)
INSTALLED = re.compile(r"[/\\](?:site|dist)-packages[/\\]")
STANDARD = [sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib")]  # Python's own modules
STANDARD += map(os.path.realpath, [*STANDARD])
PACKAGES = {"torch", "torchgen", "functorch", "triton", "numpy", "tiktoken", "huggingface_hub", "flash_attn_interface"}
CORPUS = 1 << 26  # bytes of Python, of which the project has 2.4 MB: more is a text to train on, and not held in memory
READ_OF_A_FILE = 1 << 26  # bytes of one that is no source: of a corpus the begin
LIBRARIES = tuple(x for path in STANDARD if not f"{ROOT}".startswith(x := f"{path}{os.sep}"))


class Sources:
    """Every Python file of the project, read at once: what is edited later reaches neither the log nor a late import."""

    def __init__(self, script: str | Path):
        """script: in the project (ideas/idea.py) or elsewhere, then with the files that it imports from there."""
        self.path = Path(script).resolve()
        self.contents = {}
        project = python_files(ROOT)
        modules = {path.parent if path.stem == "__init__" else path.with_suffix("") for path in project} - {ROOT}
        hiding = {file for module in modules for file in files_of(module.relative_to(ROOT), [self.path.parent])}
        for path in filter(os.path.isfile, {self.path, *project, *hiding}):
            try:
                self.contents[path] = path.read_bytes()
            except OSError:  # what cannot be read cannot be imported
                if path == self.path:
                    raise
        if self.path not in self.contents:
            sys.exit(f"error: {script} is no file, and a log would lack it: save the script as one, and start that")
        caller = sys._getframe(1).f_code  # of the script, unless a test or a tool asks
        self.edited = caller.co_name == "<module>" and not is_code_of(self.contents[self.path], caller)
        self.stems = {*map(stem, (*self.contents, *self.path.parent.glob("*.py")))}
        self.script = self._name(self.path)  # its path in the project, or its file's name
        self.paths: dict[str, Path | None] = {}  # by a module's file, if it is ours: asked once, as there are thousands
        self.named: dict[Path, set[Path]] = {}  # by path, see _named_in
        self.broken: set[Path] = set()  # what Python cannot parse
        self.opened: set[str] = set()  # names of files that this process has opened to read, whichever they are
        self.relative: tuple[int, str] = 0, ""  # this process, once its run has begun, and the run's relative paths
        running = getattr(sys.modules.get("__main__"), "__file__", None)
        if running and self.path in places(running):  # no test, tool or notebook
            if lacking := [name for name in ("torch", "numpy") if not find_spec(name)]:
                how = f"./run.sh {self.script}, or the project's .venv/bin/python"
                sys.exit(f"{self.path.name}: error: {sys.executable} has no {lacking[0]}: start it with {how}")
            sys.meta_path.insert(0, self)
            sys.addaudithook(self._heed)

    def imported(self) -> dict[str, str]:
        """{path in the project: text, line breaks as they are} of the script, then of all that is or will be imported.
        Raises ValueError for what a log cannot hold: bytes that are no UTF-8, two files of one path, a path that extract.py
        would not write, a compiled module alone; for a script that was edited after Python had read it and before this did."""
        if self.edited:
            raise ValueError(f"{self.path} was edited while it started: start again")
        specs = [getattr(module, "__spec__", None) for module in list(sys.modules.values())]
        packed = {spec.origin for spec in specs if isinstance(getattr(spec, "loader", None), zipimporter)}
        files = {getattr(spec, "origin", None) or "" for spec in specs}
        for file in sorted(file for file in files if (file.endswith(".pyc") or file in packed) and self._beside(file)):
            raise ValueError(f"{file} is a module without its source, which a log would hold: give it its .py, or move it away")
        self.paths |= {file: self._ours(file) for file in files - self.paths.keys()}
        loaded = {*filter(None, map(self.paths.get, files))}
        ours, more = set(), {self.path, *loaded}
        if running := getattr(sys.modules.get("__main__"), "__file__", None):  # the script, in a run
            loaded |= {*places(running)}
        folders = [self.path.parent, ROOT]  # in the order in which a run looks there
        added = (Path(place, "x.py") for place in sys.path if os.path.isdir(place))
        folders += [file.parent for file in added if self._beside(f"{file}")]  # what the script adds, no packages
        while more:
            self.contents |= {path: path.read_bytes() for path in more - self.contents.keys()}
            self.stems |= {*map(stem, more)}
            self.named |= {path: self._named_in(path, path in loaded, folders) for path in more - self.named.keys()}
            ours, more = ours | more, set().union(*map(self.named.get, more)) - ours - more
        ours -= self.broken - loaded
        named: dict[str, Path] = {}
        for path in (self.path, *sorted(ours - {self.path})):
            if (other := named.setdefault(self._name(path), path)) != path:
                raise ValueError(f"{other} and {path} both take part, and a log has one {self._name(path)}: rename one")
            name = self._name(path)
            if not name.isprintable() or "\\" in name or len(name) > 200:  # extract.py's rules
                raise ValueError(f"{name!a:.210}: a name of over 200 characters, or with \\ or control characters: rename it")
            if name != name.strip() or ".py " in name:  # as the line that ends a log's environment would be read otherwise
                raise ValueError(f"{name!a}: a name with a blank at its begin, at its end or behind a .py: rename it")
        return {name: self._text(path) for name, path in named.items()}

    def of_run(self) -> dict[str, str]:
        """The same, for a log. Raises ValueError also for what no log would hold: another script that the process runs, which has
        taken this one's main(); a module from elsewhere, as by PYTHONPATH, that our files name."""
        running = getattr(sys.modules.get("__main__"), "__file__", None)
        if not running:  # python -c, a notebook
            raise ValueError(self.taken_by(Path("code without a file")))
        at = Path(running).resolve()
        if at != self.path and not self._installed(f"{at}") and at.parent != Path(sys.executable).parent:  # as coverage
            raise ValueError(self.taken_by(at))
        texts = self.imported()
        if foreign := self in sys.meta_path and self._foreign(texts):  # no test
            raise ValueError(f"{foreign}, which no log would hold: move it beside the script, or install it as a package, without -e")
        return texts

    def _heed(self, event: str, given: tuple) -> None:
        """Note what is opened to read; raise RuntimeError where a run would go on with another current folder."""
        if event == "open" and len(given) == 3 and isinstance(given[0], str):
            if not (given[2] or 0) & (os.O_WRONLY | os.O_RDWR):
                self.opened.add(given[0])
        elif event == "os.chdir" and self.relative[0] == os.getpid() and sys.modules["launch.signals"].entered:
            fault = f"the current folder cannot change during a run whose paths begin in it, {self.relative[1]}"
            raise RuntimeError(f"{fault}: name files by absolute paths, or give these so")

    def read(self, settings: Any) -> dict[str, str]:
        """The CRC-32 of each file that the run has read by now, as its script's configuration, by its name: of those beside or
        below the script, in the project, or with a relative name; of two of one name, as the script would call them. Not of
        sources, data, logs, checkpoints and packages."""
        own = (getattr(settings, name, "") for name in ("data", "log_dir", "resume"))
        others = (sys.prefix, sys.base_prefix, *map(os.environ.get, ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")))
        left, found = {Path(x).resolve() for x in (*own, *others) if x}, {}
        for name in sorted(name for name in self.opened if not name.endswith((".py", ".pyc"))):  # those are most
            with suppress(OSError, RuntimeError, ValueError):  # it has gone, may no longer be read, or leads in a circle
                path = Path(name).resolve()
                near = [folder for folder in (self.path.parent, ROOT) if path.is_relative_to(folder)]
                inside = path.relative_to(near[0]) if near else Path(name)
                hidden = any(part.startswith(".") and part != ".." for part in inside.parts) or INSTALLED.search(f"{path}")
                if inside.is_absolute() or hidden or left & {path, *path.parents}:
                    continue
                if path.is_file():
                    with open(path, "rb") as file:
                        octets = file.read(READ_OF_A_FILE)
                    found[path] = f"{inside}", f"CRC-32 {zlib.crc32(octets):08x}"
        times = Counter(inside for inside, _ in found.values())  # one beside the script, and one of its name in the project, say
        from_script = lambda path, inside: inside if times[inside] == 1 else os.path.relpath(path, self.path.parent)
        return {from_script(path, name).encode("unicode_escape").decode(): text for path, (name, text) in found.items()}

    def keep_folder(self, settings: Any) -> None:
        """From here on os.chdir is refused in this process, until its Signals end, if the run's data or logs are relative paths."""
        paths = {name: getattr(settings, name, "") for name in ("data", "log_dir")}
        relative = ", ".join(f"--{name}={path}" for name, path in paths.items() if path and not os.path.isabs(path))
        self.relative = (os.getpid(), relative) if relative else (0, "")

    def facts(self, texts: dict[str, str], ranks: Any, settings: Any, more: list[str]) -> list[str]:
        """The log's environment, a line each: machine, what the sources of these texts read, more, script and settings."""
        from launch.machine import machine_facts, settings_text  # not above: the tools in records/ need no PyTorch

        machine = machine_facts(ranks.device, ranks.world_size, texts, self.read(settings))
        return [*machine, *more, f"{self.script} {settings_text(settings)}"]

    def taken_by(self, other: Path) -> str:
        """What is told of another script that runs this one's main()."""
        return f"{other.name} runs the main() of {self.path}, whose log would not hold {other.name}: make it a changed copy of that"

    def _foreign(self, texts: dict[str, str]) -> str:
        """Which of our files names a module that lies neither in the project, nor beside the script, nor among packages, in
        words. What a debugger brings is named by none of them; the packages that we need may lie anywhere."""
        named = {name: imported_names(text) for name, text in texts.items()}
        tops = set().union(*named.values()) - PACKAGES - sys.stdlib_module_names
        for top in sorted(tops):
            is_loaded, spec = top in sys.modules, getattr(sys.modules.get(top), "__spec__", None)
            if not is_loaded and not getattr(spec := PathFinder.find_spec(top), "origin", None):  # no module, but a word
                continue
            place = next(iter(getattr(spec, "submodule_search_locations", None) or [getattr(spec, "origin", None) or ""]))
            if not (place.endswith(".py") or os.path.isdir(place)) or self._installed(place) or self._beside(place):
                continue
            if not any(Path(place).parent.glob("*.dist-info")):  # as pip's --target leaves
                return f"{next(name for name in named if top in named[name])} imports {top} from {place}"
        return ""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: Any = None) -> ModuleSpec | None:
        """For Python's imports, as the first finder: of a file that has since been edited, has gone, or is hidden by one that has
        come, what it was; of one that came to its place after its compiled form had, what it is."""
        if name.rpartition(".")[2] not in self.stems:  # nearly all
            return None
        spec = PathFinder.find_spec(name, path, target)
        then = self._at_start(name)
        if then and (not (spec and spec.origin) or self._ours(spec.origin) and not {*places(spec.origin)} & self.contents.keys()):
            folder = [f"{then.parent}"] if then.name == "__init__.py" else None
            loader = AsRead(name, f"{then}", self.contents[then])
            return spec_from_file_location(name, then, loader=loader, submodule_search_locations=folder)
        for file in places(spec.origin) if spec and isinstance(spec.loader, SourceFileLoader) else ():
            now = file.read_bytes()
            held = self.contents.get(file, now if file.parent == self.path.parent else None)
            if held is not None and (held != now or is_stale(file)):
                spec.loader = AsRead(spec.loader.name, spec.loader.path, held)
                return spec
        return None

    def _at_start(self, name: str) -> Path | None:
        """Where a module lay when the process began, if it was read then."""
        files = files_of(Path(*name.split(".")), (self.path.parent, ROOT))
        return next((file for file in files if file in self.contents), None)

    def _named_in(self, path: Path, is_loaded: bool, folders: Sequence[Path]) -> set[Path]:
        """Our files that a file's import statements name, also within functions: those are imported once a step calls them.
        folders: where a run looks, in this order.
        Statements that are not indented have run if the file is loaded: what they named is loaded too."""
        lines = CONTINUED.sub(b" ", self.contents[path]).replace(b"\r", b"\n")
        if is_loaded and not LATER_IMPORT.search(lines) and not any(name.encode() in lines for name in BY_TEXT):
            return set()
        if (statements := all_imports(self.contents[path])) is None:  # not to be imported either: no log needs it
            self.broken.add(path)
            return set()
        here = {name.partition(".")[0] for folder in folders for name in os.listdir(folder)}
        found = set()
        for node in statements:
            names = [alias.name for alias in node.names]
            if isinstance(node, ast.ImportFrom):
                base = [node.module] if node.module else []
                names = [*base, *(".".join([*base, name]) for name in names)]
            if level := getattr(node, "level", 0):  # from .part import f, from . import part: of the file's package
                within = dict.fromkeys({name.partition(".")[0] for name in names}, path.parents[level - 1 : level])
            else:
                within = {top: folders_of(top, folders) for top in {name.partition(".")[0] for name in names} & here}
            for parts in (name.split(".") for name in names if name.partition(".")[0] in within):
                found |= {self._find(Path(*parts[:n]), within[parts[0]]) for n in range(1, len(parts) + 1)}
        return {*filter(None, found)}

    def _find(self, module: Path, folders: Sequence[Path]) -> Path | None:
        """The file of a module in the first of the folders that holds one, if it is ours."""
        files = (file for file in files_of(module, folders) if os.access(file, os.R_OK))
        return next(filter(None, (self._ours(f"{file}") for file in files)), None)

    def _text(self, path: Path) -> str:
        if (at := self.contents[path].find(0)) >= 0:  # Python takes none either
            raise ValueError(f"{path}, byte {at}: a NUL byte, which no text holds: save it without")
        try:
            return self.contents[path].decode()
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}, byte {error.start}: is not UTF-8: save it as UTF-8") from None

    def _ours(self, file: str) -> Path | None:
        if not file.endswith(".py") or self._installed(file):  # nearly all
            return None
        return next((path for path in self._beside(file) if path in self.contents or path.is_file()), None)

    def _beside(self, file: str) -> list[Path]:
        """Where the file lies in the project or beside the script; a link counts that lies there, wherever its end."""
        ours = (path for path in places(file) if path.is_relative_to(ROOT) or path.is_relative_to(self.path.parent))
        return [path for path in ours if not self._installed(f"{path}")]

    def _installed(self, file: str) -> bool:
        """Is it Python's own or a package's? The project may itself lie in a folder of packages."""
        homes = (f"{home}" for home in (ROOT, self.path.parent) if not INSTALLED.fullmatch(f"/{home.name}/"))
        inside = next((file[len(home) :] for home in homes if file.startswith(f"{home}{os.sep}")), file)
        return bool(INSTALLED.search(inside)) or file.startswith(LIBRARIES)

    def _name(self, path: Path) -> str:
        return path.relative_to(ROOT if path.is_relative_to(ROOT) else self.path.parent).as_posix()


def is_code_of(source: bytes, code: CodeType) -> bool:
    """Was a module's code made of this text?"""
    try:
        return comparable(compile(source, code.co_filename, "exec", dont_inherit=True)) == comparable(code)
    except (SyntaxError, ValueError):
        return False


def comparable(code: CodeType) -> CodeType:
    """With texts for its fractions, as no NaN is equal to another."""

    def plain(x: Any) -> Any:
        if isinstance(x, CodeType):
            return comparable(x)
        return f"{x!r}" if isinstance(x, float | complex | tuple) else x

    return code.replace(co_consts=tuple(map(plain, code.co_consts)))


def files_of(module: Path, folders: Sequence[Path]) -> Iterator[Path]:
    """Where a module, a path without its ending, may lie, in the order in which Python looks."""
    for folder in folders:
        yield folder / module / "__init__.py"
        yield (folder / module).with_suffix(".py")


def is_stale(source: Path) -> bool:
    """May its compiled form be another's? See drop_stale_caches of start.py."""
    try:
        return os.stat(cache_from_source(source)).st_mtime_ns <= os.stat(source).st_ctime_ns
    except OSError:  # there is none
        return False


def stem(path: Path) -> str:
    """The last part of the name of the module that lies there."""
    return path.parent.name if path.stem == "__init__" else path.stem


class AsRead(SourceFileLoader):
    """Loads a module from these bytes, whatever its file and the compiled one beside it hold."""

    def __init__(self, name: str, path: str, content: bytes):
        super().__init__(name, path)
        self.content = content

    def path_stats(self, path: str) -> dict:
        raise OSError(f"{path} was edited")  # so that Python looks for no compiled one

    def get_data(self, path: str) -> bytes:
        return self.content


@functools.cache
def all_imports(source: bytes) -> list[ast.Import | ast.ImportFrom] | None:
    """The import statements of a source, and the calls that stand for some; None of what Python cannot parse."""
    try:
        tree = ast.parse(source)
        return [*imports(tree), *(imports_by_text(tree) if any(name.encode() in source for name in BY_TEXT) else ())]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def imports(tree: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    """The import statements, wherever they stand."""
    for body in (getattr(tree, name, ()) for name in ("body", "orelse", "finalbody", "handlers", "cases")):
        for node in body if isinstance(body, list) else ():
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                yield node
            else:
                yield from imports(node)


def imports_by_text(tree: ast.AST) -> Iterator[ast.Import]:
    """Calls of BY_TEXT with a name as the statements that they stand for."""
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call) and node.args):
        function, name = getattr(call.func, "attr", getattr(call.func, "id", "")), getattr(call.args[0], "value", None)
        if function in BY_TEXT and isinstance(name, str) and not name.startswith("."):
            yield ast.Import([ast.alias(name)])


@functools.cache
def imported_names(text: str) -> frozenset[str]:
    """The roots of the modules that a text's lines seem to import, and of all names in quotes on those that import by a text."""
    plain = (name for names in PLAIN_IMPORT.findall(text) for name in names.replace("\\\n", " ").split(",") if name.strip())
    roots = (name.split()[0].partition(".")[0] for name in plain)
    return frozenset((*roots, *FROM_IMPORT.findall(text), *quoted_names(text)))


def quoted_names(text: str) -> set[str]:
    """Roots of what may be a module's name, in the strings of lines that use import_module or __import__."""
    try:
        nodes = [*ast.walk(ast.parse(text))] if any(name in text for name in BY_TEXT) else []
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return set()
    lines = {x.lineno for x in nodes if {getattr(x, name, None) for name in ("id", "attr")} & BY_TEXT}
    texts = (x.value for x in nodes if isinstance(x, ast.Constant) and isinstance(x.value, str) and x.lineno in lines)
    return {found[1] for x in texts if (found := re.match(r"([^\W\d]\w*)(?:\.|$)", x))} - BY_TEXT


def folders_of(module: str, folders: Sequence[Path]) -> Sequence[Path]:
    """Those of the folders, in which a run looks in this order, where `import module` finds it, or has found it."""
    files = {path: folder for folder in folders for path in (folder / f"{module}.py", folder / module / "__init__.py")}
    if loaded := getattr(getattr(sys.modules.get(module), "__spec__", None), "origin", None):
        return [folder for path, folder in files.items() if path in places(loaded)][:1]
    return [folder for path, folder in files.items() if path.is_file()][:1] or folders  # else folders without __init__.py


def places(file: str) -> Iterator[Path]:
    """Where a file is said to lie; where its folder does; and where it does: links lead from one to the next."""
    yield (path := Path(os.path.abspath(file)))
    yield path.parent.resolve() / path.name
    yield path.resolve()


def source_changes(then: dict[str, str], now: dict[str, str]) -> tuple[str, list[str]]:
    """Whether two processes imported the same, in words, and the lines of their differences; of the scripts, which come first,
    whatever their names."""
    then, now = ({name if i else "script": texts[name] for i, name in enumerate(texts)} for texts in (then, now))
    diff = []
    for name in dict.fromkeys((*then, *now)):
        lines = (texts.get(name, "").splitlines() for texts in (then, now))
        diff += difflib.unified_diff(*lines, f"{name} before", f"{name} now", n=1, lineterm="")
    changed = sum(line[:1] in "+-" and line[:3] not in ("+++", "---") for line in diff)
    return f"with changed source, {changed} lines of difference" if diff else "with the same source", diff


def resumption_note(path: Path, saved: dict[str, Any], sources: dict[str, str], environment: list[str]) -> str:
    """For the log's header: where the run went on, on what machine, and by what changes to the sources and what they read."""
    source, diff = source_changes(saved["sources"], sources)
    last = saved["log"]["header"].removesuffix(RULE).rpartition(RULE)[2]  # sources, rule, environments, rule
    was, now = map(variables_of, (last.splitlines(), environment))
    other = [f"{x}: {was.get(x, 'none')} before, {now.get(x, 'none')} now" for x in was | now if was.get(x) != now.get(x)]
    first = "; ".join([f"resumed at step {saved['step']} from {' '.join(f'{path}'.split())}, {source}", *other])
    return "\n".join([first, *environment, *diff])


def variables_of(environment: list[str]) -> dict[str, str]:
    """What machine_facts has told of variables, by kind, in the last of a log's environments."""
    found: dict[str, str] = {}
    for kind, _, text in (line.partition(": ") for line in environment):
        if kind.startswith("resumed at step "):
            found = {}
        elif kind in OF_VARIABLES:
            found[kind] = text
    return found


def check_unused(log: Path, resumed: Path | None = None, settings: Any = None, whole_file: Callable | None = None) -> None:
    """Raise ValueError if there is a run's log already, or a folder of its checkpoints, which a new run would delete, or what
    its trace would replace, if settings ask for one.
    resumed: a checkpoint; that the log is of its run is for Log to see, and what lies beside the checkpoint is of its run.
    whole_file: data/shards.py's, by which the log will be replaced; none of older scripts."""
    folder, advice = log.with_suffix(""), "move it, or give another --run_id or --log_dir"
    if resumed and (holds_run(log) or resumed.resolve().parent == folder.resolve()):
        if whole_file and log.is_file():
            check_replaceable(log, whole_file)
        return
    if holds_run(log):
        raise ValueError(f"{log} is another run's log: {advice}")
    if any(folder.glob("step_*.pt")):
        raise ValueError(f"{folder} holds another run's checkpoints: {advice}")
    trace = folder.with_name(f"{folder.name}.trace.json")  # tracer.py's
    if not resumed and getattr(settings, "trace_steps", "") and os.path.lexists(trace):  # older scripts trace nothing
        raise ValueError(f"{trace} is there, another run's trace or a file of yours: {advice}")


def check_replaceable(log: Path, whole_file: Callable) -> None:
    """Raise OSError if a log that is there could not be cut where its run goes on, as in a folder of another user or mounted by
    itself: the run would train to its end, and its checkpoints would not fit what is there. Tried, with its own content."""
    try:
        content = log.read_bytes()
        with whole_file(log) as file:
            file.write(content)
    except OSError as error:
        fault = f"{error.strerror or error}: it cannot be replaced by the log of the run that goes on"
        raise OSError(f"{log}: {fault}: see to it, or give another --log_dir") from error


def holds_run(log: Path) -> bool:
    """Is there something at log, but for the header of a run that ended before its first line?"""
    if not log.is_file():
        return os.path.lexists(log)
    end = f"\n{RULE}\n".encode()
    with open(log, "rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - len(end)))
        if file.read() != end:
            return True
        file.seek(0)  # an idea may write such lines: a header ends with the environment
        return not file.read().removesuffix(end).rpartition(end)[2].startswith(b"Python ")


def python_files(root: Path) -> list[Path]:
    """All *.py below root, but for hidden folders, environments (venv's and conda's), installed packages, and what lies in
    folders of data/, as a text to train on may; nor of the largest folders what would make it more than CORPUS."""
    found: dict[str, list[Path]] = {}  # by the folder of root
    for folder, folders, files in os.walk(root):
        environment = {"pyvenv.cfg", "conda-meta"} & {*files, *folders}
        left = environment or Path(folder) == Path(root, "data")
        folders[:] = [x for x in folders if not (left or x.startswith(".") or INSTALLED.fullmatch(f"/{x}/"))]
        top = os.path.relpath(folder, root).partition(os.sep)[0]
        found.setdefault(top, []).extend(Path(folder, name) for name in files if name.endswith(".py"))
    sizes = sorted((sum(map(size_of, files)), top) for top, files in found.items())
    kept = zip(sizes, itertools.accumulate(size for size, _ in sizes))
    return [path for (_, top), so_far in kept if so_far <= CORPUS or top == "." for path in found[top]]


def size_of(path: Path) -> int:
    """In bytes; 0 of what is not there."""
    try:
        return os.stat(path).st_size
    except OSError:
        return 0

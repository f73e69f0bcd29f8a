"""Who imports whom: no module imports itself by way of others, and the runtime knows nothing of the recipe."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("launch", "runtime", "data", "records", "bench", "tests")
ON_PATH = ("", "tests", "records")  # folders that something puts on sys.path


def import_graph(root: Path) -> dict[str, set[str]]:
    """Each of the project's own modules, by its path, and those that it imports: anywhere in it, if only to check types."""
    files = [*root.glob("*.py"), *(path for package in PACKAGES for path in (root / package).rglob("*.py"))]
    names = {path.relative_to(root).as_posix() for path in files}
    graph = {}
    for name in sorted(names):
        folders = (name.rpartition("/")[0], *ON_PATH)  # a script finds those beside it first
        tree = ast.parse((root / name).read_bytes())
        graph[name] = {path for node in ast.walk(tree) for path in imported(node, name, folders, names)} - {name}
    return graph


def imported(node: ast.AST, name: str, folders: tuple[str, ...], names: set[str]) -> Iterator[str]:
    """The files of `names` that a node of the module `name` imports, with the __init__.py of their packages."""
    if isinstance(node, ast.Import):
        dotted = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
        parent = f"{node.module}." if node.module else ""
        dotted = [node.module or "", *(parent + alias.name for alias in node.names)]
        if node.level:
            folders = ("/".join(name.split("/")[: -node.level]),)
    else:
        return
    for module in dotted:
        parts = module.split(".")
        for folder in folders:
            start = [folder] if folder else []
            found = ["/".join(start + parts) + ".py"] if module else []
            found += ["/".join([*start, *parts[:count], "__init__.py"]) for count in range(1, len(parts) + 1) if module]
            if found := names.intersection(found):
                yield from found
                break


def packages(graph: dict[str, set[str]]) -> dict[str, set[str]]:
    """The same between packages; a module of the root is one of its own."""
    between: dict[str, set[str]] = {}
    for name, others in graph.items():
        package = name.partition("/")[0]
        between.setdefault(package, set()).update({other.partition("/")[0] for other in others} - {package})
    return between


def circle(graph: dict[str, set[str]]) -> list[str]:
    """Modules of which each imports the next, the last one being the first again; empty if there are none."""
    finished: set[str] = set()

    def search(path: list[str]) -> list[str]:
        for other in sorted(graph[path[-1]] - finished):
            if other in path:
                return [*path[path.index(other) :], other]
            if found := search([*path, other]):
                return found
        finished.add(path[-1])
        return []

    return next((found for name in sorted(graph) if name not in finished and (found := search([name]))), [])


def reachable(graph: dict[str, set[str]], start: str) -> set[str]:
    """What a module imports, and what that imports, and so on."""
    found, waiting = set(), [start]
    while waiting:
        new = graph[waiting.pop()] - found
        found |= new
        waiting += new
    return found


@pytest.mark.parametrize("level", [lambda graph: graph, packages], ids=["modules", "packages"])
def test_no_imports_go_in_a_circle(level):
    assert " imports ".join(circle(level(import_graph(ROOT)))) == ""


def test_runtime_and_data_know_nothing_of_the_recipe():
    """An idea.py would train train_gpt's model otherwise."""
    graph = import_graph(ROOT)
    below = [name for name in graph if name.startswith(("launch/", "runtime/", "data/"))]
    assert "runtime/options.py" in below and "data/shards.py" in below
    recipe = ("train_gpt.py", "tests/", "bench/")
    wrong = {name: [other for other in reachable(graph, name) if other.startswith(recipe)] for name in below}
    assert {name: others for name, others in wrong.items() if others} == {}


FILES = {
    "train_gpt.py": "from runtime import log\nimport numpy, missing.module",
    "runtime/__init__.py": "",
    "runtime/log.py": "from . import clock\nfrom .deep.er import x",
    "runtime/clock.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from runtime.log import Log",
    "runtime/deep/er.py": "from ..clock import Clock",
    "records/compare.py": "def main():\n    import plot\n    from data.shards import x",
    "records/plot.py": "import os.path",
    "data/shards.py": "",
    "tests/common.py": "from train_gpt import GPT",
    "tests/records/test_compare.py": "import common, compare as c\nfrom made_logs import x",
    "tests/records/made_logs.py": "",
    "bench/gpu.py": "try:\n    import common\nexcept ImportError:\n    pass",
    "logs/idea.py": "import train_gpt",
}


@pytest.fixture
def small(tmp_path):
    """The graph of FILES."""
    for name, source in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(source)
    return import_graph(tmp_path)


def test_the_graph_has_every_import_and_no_other(small):
    assert small == {
        "train_gpt.py": {"runtime/__init__.py", "runtime/log.py"},
        "runtime/__init__.py": set(),
        "runtime/log.py": {"runtime/clock.py", "runtime/deep/er.py"},
        "runtime/clock.py": {"runtime/__init__.py", "runtime/log.py"},
        "runtime/deep/er.py": {"runtime/clock.py"},
        "records/compare.py": {"records/plot.py", "data/shards.py"},
        "records/plot.py": set(),
        "data/shards.py": set(),
        "tests/common.py": {"train_gpt.py"},
        "tests/records/test_compare.py": {"tests/common.py", "records/compare.py", "tests/records/made_logs.py"},
        "tests/records/made_logs.py": set(),
        "bench/gpu.py": {"tests/common.py"},
    }


def test_a_circle_is_found(small):
    assert circle(small) == ["runtime/log.py", "runtime/clock.py", "runtime/log.py"]
    small["runtime/log.py"].remove("runtime/clock.py")
    assert circle(small) == ["runtime/log.py", "runtime/deep/er.py", "runtime/clock.py", "runtime/log.py"]
    small["runtime/clock.py"].clear()
    assert circle(small) == [] == circle(packages(small))
    small["tests/common.py"].add("bench/gpu.py")
    assert circle(packages(small)) == ["bench", "tests", "bench"]
    assert reachable(small, "records/compare.py") == {"records/plot.py", "data/shards.py"}

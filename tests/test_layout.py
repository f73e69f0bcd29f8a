"""Imports go down: each file imports, of ours, what the table allows. All files read easily, with short
lines. Every room stays within its lines."""

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ALLOWED = {  # file or folder: what it may import of ours; everything, if it is not named here
    "data": ("data",),
    "runtime": ("runtime", "data"),
    "triton_kernels.py": ("runtime.cpu",),
    "sample.py": ("runtime", "data", "triton_kernels"),
    "train_gpt.py": ("runtime", "data", "triton_kernels", "sample"),
    "records": ("records", "runtime"),
    "bench": ("bench", "runtime", "data", "triton_kernels", "sample", "train_gpt"),
}
LIMITS = {  # lines of a file, or of all files that match; what grows here must shrink elsewhere
    "train_gpt.py": 1_700,
    "triton_kernels.py": 2_150,
    "sample.py": 150,
    "runtime/*.py": 2_050,
    "data/*.py": 1_270,
    "records/*.py": 2_200,
    "bench/*.py": 1_750,
    "tests/**/*.py": 9_300,
    "README.md": 95,
    "[!.]*/[!2]*.md": 700,  # docs and the folders' READMEs, without dated reports
}
OURS = ("data", "runtime", "records", "bench", "tests", "train_gpt", "triton_kernels", "sample")
FOLDERS = (".", "data", "runtime", "records", "bench", "tests", "tests/*", "tests/recipe/parity")


def imports(tree: ast.AST) -> list[str]:
    """Modules of ours that a file imports, anywhere in it."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found += [f"{node.module}.{alias.name}" for alias in node.names]
    return [name for name in found if name.split(".")[0] in OURS]


def code_lines(source: str, tree: ast.AST) -> list[str]:
    """Lines that are neither blank nor a comment nor of a docstring."""
    docs = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module) and ast.get_docstring(
            node
        ):
            docs |= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    lines = enumerate(source.splitlines(), 1)
    return [x for i, x in lines if x.strip() and not x.strip().startswith("#") and i not in docs]


def test_files_import_downwards_and_read_easily() -> None:
    faults = []
    for path in sorted(path for folder in FOLDERS for path in ROOT.glob(f"{folder}/*.py")):
        source = path.read_text()
        tree = ast.parse(source)
        name = path.relative_to(ROOT).as_posix()
        allowed = ALLOWED.get(name, ALLOWED.get(name.partition("/")[0], OURS))
        for module in imports(tree):
            if not any(f"{module}.".startswith(f"{prefix}.") for prefix in allowed):
                faults.append(f"{name} imports {module}")
        code = code_lines(source, tree)
        density = sum(map(len, code)) / max(1, len(code))
        longest = max(map(len, source.splitlines()), default=0)
        if density > 58 or longest > 110:
            faults.append(f"{name}: {density:.1f} characters a code line, a line of {longest}")
        print(f"{name}: {len(source.splitlines())} lines")
    assert not faults, "\n".join(faults)


def test_every_room_stays_within_its_lines() -> None:
    found = {
        pattern: sum(len(path.read_text().splitlines()) for path in ROOT.glob(pattern))
        for pattern in LIMITS
    }
    assert {x: lines for x, lines in found.items() if lines > LIMITS[x]} == {}

"""Arrows between modules go down: each file imports, of ours, what the table allows. All files read
easily: short lines."""

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

"""What made a run: its kind. Only runs of one kind share a mean.

Sources are compared as syntax trees, in which what cannot change a training run is made the same:
- comments, line breaks and quotes, which a syntax tree does not have; numbers written otherwise (1_000);
- docstrings, and other strings that stand alone;
- annotations of variables, and of functions without a decorator: not in the body of a class, where they make a field, nor
  under a decorator, where they may be code (Triton's constexpr);
- constants given to seed and run_id, in an assignment or as an argument of that name; in a class with both as fields, a run's
  settings, also to what else may differ between runs (log_dir, sample_tokens, …: MAY_DIFFER_BETWEEN_RUNS).
Everything else counts: names, order, unused code. A source that this Python cannot parse is compared byte for byte.
"""

import ast
import hashlib
from functools import lru_cache

from runlog import MAY_DIFFER_BETWEEN_RUNS, RunLog, made_with, parse

ANYWHERE = frozenset({"seed", "run_id"})  # what these are given makes no other run, wherever

class Normal(ast.NodeTransformer):
    """Makes the same what cannot change a training run."""

    def __init__(self):
        self.in_class = self.is_decorated = False
        self.own = ANYWHERE  # names whose constants do not count

    def generic_visit(self, node: ast.AST) -> ast.AST:
        super().generic_visit(node)
        for name in ("body", "orelse", "finalbody"):
            if isinstance(statements := getattr(node, name, None), list):
                kept = [statement for statement in statements if not stands_alone(statement)]
                setattr(node, name, kept or [ast.Pass()] if name == "body" and not isinstance(node, ast.Module) else kept)
        return node

    def body_of(self, node: ast.AST, is_class: bool) -> ast.AST:
        outer = self.in_class, self.is_decorated
        self.in_class, self.is_decorated = is_class, self.is_decorated or not is_class and bool(node.decorator_list)
        self.generic_visit(node)
        self.in_class, self.is_decorated = outer
        return node

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        fields = {getattr(field.target, "id", "") for field in node.body if isinstance(field, ast.AnnAssign)}
        outer, self.own = self.own, MAY_DIFFER_BETWEEN_RUNS | ANYWHERE if fields >= ANYWHERE else ANYWHERE
        self.body_of(node, True)
        self.own = outer
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        if not node.decorator_list and not self.is_decorated:
            node.returns = None
            arguments = node.args
            every = (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg)
            for argument in filter(None, every):
                argument.annotation = None
        return self.body_of(node, False)

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST | None:
        self.generic_visit(node)
        if node.value and is_own([node.target], self.own if self.in_class else ANYWHERE):
            node.value = blank(node.value)
        if self.in_class or self.is_decorated:
            return node
        return ast.Assign(targets=[node.target], value=node.value) if node.value else None

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        self.generic_visit(node)
        if is_own(node.targets, ANYWHERE):
            node.value = blank(node.value)
        return node

    def visit_keyword(self, node: ast.keyword) -> ast.AST:
        self.generic_visit(node)
        if node.arg in ANYWHERE:
            node.value = blank(node.value)
        return node


def stands_alone(statement: ast.stmt) -> bool:
    """Is it a string that nothing uses?"""
    value = statement.value if isinstance(statement, ast.Expr) else None
    return isinstance(value, ast.Constant) and isinstance(value.value, str)


def is_own(targets: list[ast.expr], names: frozenset[str]) -> bool:
    """Are all of them names, or attributes, of these?"""
    return all(getattr(target, "id", getattr(target, "attr", None)) in names for target in targets)


def blank(value: ast.expr) -> ast.expr:
    """The expression without its constant: a whole one, or the text of an f-string."""
    if isinstance(value, ast.Constant):
        return ast.Constant(None)
    if isinstance(value, ast.JoinedStr):
        value.values = [part for part in value.values if not isinstance(part, ast.Constant)]
    return value


@lru_cache(maxsize=1024)
def normalised(source: bytes) -> str:
    """Equal for sources that train the same run, in the sense of this file's first lines; of no other use."""
    try:
        text = ast.dump(Normal().visit(parse(source))).encode("utf-8", "surrogatepass")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        text = source
    return hashlib.sha256(text).hexdigest()


def same_source(a: bytes | None, b: bytes | None) -> bool:
    """None: there is no such file."""
    return a == b or None not in (a, b) and normalised(a) == normalised(b)


def kind(log: RunLog, any_source: bool = False) -> dict:
    """What runs that share a mean have in common, by what it is; values compare, and hash. any_source: whatever the sources."""
    files = {"": log.script[1], **dict(sorted(log.modules.items()))}  # the script under any name
    sources = () if any_source else tuple((name, normalised(source)) for name, source in files.items())
    settings = tuple(sorted(log.recipe_settings.items()))
    shards = {"shards": ", ".join(f"{name} {digest}" for name, digest in sorted(log.shards.items()))} if log.shards else {}
    return {"sources": sources, "settings": settings, "number of steps": log.validations[-1][0]} | shards | made_with(log)


def differing(a: dict, b: dict) -> str:
    """In what two kinds differ, in words."""
    said = []
    for name in dict.fromkeys((*a, *b)):
        before, after = a.get(name), b.get(name)
        if before == after:
            continue
        if name == "settings":
            before, after = dict(before), dict(after)
            said += [f"--{key} {before.get(key, '(none)')} → {after.get(key, '(none)')}"
                     for key in dict.fromkeys((*before, *after)) if before.get(key) != after.get(key)]  # fmt: skip
        elif name in ("sources", "resumption with changed source"):
            said.append("another " + name if name.startswith("resumption") and before and after else name)
        else:
            said.append(f"{name} {before or '(none)'} → {after or '(none)'}")
    return ", ".join(said)

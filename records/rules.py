"""The rules of a record, with what the logs can prove of them, and what the public speedrun's README wants to be told."""

import ast
import platform
import re
from collections import Counter
from collections.abc import Callable
from functools import lru_cache
from itertools import chain, product

from changes import other_tokens
from groups import Group, names, plural
from kinds import Normal, same_source
from runlog import RunLog, parse, resumed_with_changes
from t_tests import P
from tool import clean
from verdict import figure, validation_micro_batch

COMPILER_FLAG = re.compile(
    r"inductor|dynamo|functorch\.|\btorch\.compile\b|(?<!\bre)\.compile\(|TORCHINDUCTOR|TORCH_COMPILE|TORCHDYNAMO"
)
MAY_BE_ONE = re.compile(
    r"(?<!\bre\.)compile|functorch|environ|putenv|[gs]etattr|__dict__|\b(?:vars|exec|eval)\(|__import__|import_module"
)
COMPILER_VARIABLE = re.compile(r"""\b(?:TORCHINDUCTOR|TORCH_COMPILE|TORCHDYNAMO)\w*=(?:'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")""")
OF_LOSS = re.compile(r"loss|entropy|softcap|validat|^forward$")
CLOCK = {"clock", "start_clock", "paused"}  # attributes of a Run
BY_NAME = {"getattr", "attrgetter", "methodcaller", "__getattribute__"}  # reach an attribute that no statement names
# What changes what no statement names, and the modules whose import may do so.
DYNAMIC = {"setattr", "delattr", "__setattr__", "__delattr__", "exec", "eval", "vars", "globals", "locals", "__import__",
           "import_module", "__dict__", "__code__", "__globals__", "__defaults__", "patch", "monkeypatch"}
POWERS = {"builtins", "ctypes", "gc", "importlib", "inspect", "mock", "pytest", "sys", "unittest"}
BODIES = ("body", "orelse", "finalbody", "handlers", "cases")
PROVEN, BROKEN, OPEN = "[x]", "[!]", "[ ]"


def check_list(baseline: Group, group: Group, row: dict, target: float) -> str:
    """A line for each rule of records/README.md: [x] the logs prove it, [!] they speak against it, [ ] read for yourself."""
    below, time = row["loss_p_below_target"], row["time_p_holm"]
    faster = time < P and row["time_difference"] < 0
    lines = [
        ("The data stream is unchanged", *of_all(data_stream, baseline, group)),
        (f"Mean loss below {target:g} at p < {P:g}", PROVEN if below < P else BROKEN,
         f"{row['loss_mean']:.5f}, p = {figure(below) or 'undefined'}"),
        ("Time is training alone, by the same clock", *of_all(clock, baseline, group)),
        ("No extra compiler flags", *compiler_flags(baseline, group)),
        ("The source is in the log", *sources(group)),
        (f"Faster than the baseline at p < {P:g}, {row['where'] or 'on one machine'}",
         BROKEN if not faster else PROVEN if row["where"] else OPEN,
         row["times_do_not_compare"] or f"{row['time_difference']:+.3f} s, p = {figure(time) or 'undefined'}"
         f"{'' if row['where'] else '; the logs do not tell their machines'}"),
        ("Every run has its own seed", *seeds(group)),
        ("The number of runs was fixed before, and all of them are here", OPEN,
         f"{plural(row['runs'], 'run')}, {len(row['set_aside'])} set aside; logs cannot tell of others"),
        ("The validation loss is computed as the baseline's", *of_all(validation_loss, baseline, group)),
    ]  # fmt: skip
    if changed := [run.path.name for run in baseline.runs + group.runs if resumed_with_changes(run)]:
        for i in (0, 2, 3, 4, 8):  # what sources prove
            rule, mark, evidence = lines[i]
            lines[i] = rule, OPEN if mark == PROVEN else mark, f"{evidence}; but {names(changed)} went on with changed source"
    return "\n".join(clean(f"- {mark} {rule}: {evidence}", one_line=True) for rule, mark, evidence in lines)


def of_all(rule: Callable[[RunLog, RunLog], tuple[str, str]], baseline: Group, group: Group) -> tuple[str, str]:
    """A rule's worst verdict: with --any-source the runs of a group have several sources, and each of them counts."""
    pairs = [*product(baseline.of_each_source, group.of_each_source)]
    verdicts = [(*rule(a, b), f"{b.path.name} against {a.path.name}: " if len(pairs) > 1 else "") for a, b in pairs]
    mark, evidence, whose = max(verdicts, key=lambda verdict: (PROVEN, OPEN, BROKEN).index(verdict[0]))
    return mark, evidence if mark == PROVEN else whose + evidence


def folder_differences(a: RunLog, b: RunLog, folder: str) -> list[str] | None:
    """The files in a folder whose sources differ in more than comments and the like; None: neither log holds one."""
    found = sorted(name for name in {*a.modules, *b.modules} if name.startswith(folder))
    return [name for name in found if not same_source(a.modules.get(name), b.modules.get(name))] if found else None


def unchanged(a: RunLog, b: RunLog, folder: str, own: str) -> tuple[str, str] | None:
    """The verdict where a folder's sources already decide: unknown, in the script, or changed; None: as the baseline's."""
    if not a.sources or not b.sources:
        return OPEN, "logs hold no sources"
    differ = folder_differences(a, b, folder)
    if differ is None:
        return OPEN, f"the script holds its own {own}: read its diff"
    return (BROKEN, f"changed: {names(differ)}") if differ else None


def data_stream(a: RunLog, b: RunLog) -> tuple[str, str]:
    if decided := unchanged(a, b, "data/", "loader"):
        return decided
    if shards := other_tokens(a, b):
        return BROKEN, f"other tokens in {names(shards)}"
    if differ := of_other_settings(a, b, "val_tokens", "bos_id"):
        return differ
    if not a.shards or not b.shards:
        return OPEN, f"the logs do not tell what --data={b.settings.get('data')} held"
    if unread := unreadable(a, b):
        return OPEN, unread
    before, after = analysed(a.script[1])["data"], analysed(b.script[1])["data"]
    differ = [name for name in {**before, **after} if before.get(name) != after.get(name)]
    if differ := differ + elsewhere(a, b, "data") + started_otherwise(a, b):
        return OPEN, f"data/*.py are the baseline's; they are used otherwise: read the diff of {names(differ)}"
    return PROVEN, "the shards, data/*.py and what script and modules do with them are the baseline's"


def of_other_settings(a: RunLog, b: RunLog, *names_of: str) -> tuple[str, str] | None:
    """The verdict where a setting of these names is another; None: as the baseline's, or not told."""
    for name in names_of:
        before, after = a.settings.get(name), b.settings.get(name)
        if before != after and None not in (before, after):
            return BROKEN, f"--{name} is {after}, was {before}"
    return None


def clock(a: RunLog, b: RunLog) -> tuple[str, str]:
    if decided := unchanged(a, b, "runtime/", "clock"):
        return decided
    if unread := unreadable(a, b):
        return OPEN, unread
    before, after = analysed(a.script[1])["untimed"], analysed(b.script[1])["untimed"]
    if differ := [name for name in {**before, **after} if before.get(name) != after.get(name)]:
        where = f"what runs while the clock stands is not: read the diff of {names(differ)}"
        return OPEN, f"runtime/*.py are the baseline's; {where}"
    if differ := elsewhere(a, b, "runtime"):
        return OPEN, f"runtime/*.py are the baseline's; other modules use them otherwise: read the diff of {names(differ)}"
    if differ := started_otherwise(a, b):
        return OPEN, f"runtime/*.py are the baseline's; something may change their use: read the diff of {names(differ)}"
    return PROVEN, "runtime/*.py are the baseline's, and what runs while the clock stands: functions, not classes"


def elsewhere(a: RunLog, b: RunLog, package: str) -> list[str]:
    """The modules beside script and package that use the package, or change what they import, otherwise than the baseline's."""
    found = sorted(name for name in {*a.modules, *b.modules} if not name.startswith(f"{package}/"))
    before, after = ({name: analysed(run.modules.get(name, b""))[package] for name in found} for run in (a, b))
    return [name for name in found if before[name] != after[name]]


def started_otherwise(a: RunLog, b: RunLog) -> list[str]:
    """The script and the modules that do more outside their functions than the baseline's."""
    before, after = {**a.modules, b.script[0]: a.script[1]}, b.sources
    changed = [name for name in after if not same_source(before.get(name), after[name])]
    more = [name for name in changed if analysed(after[name])["outside"] - analysed(before.get(name, b""))["outside"]]
    return [f"{name}, outside its functions" for name in more]


def validation_loss(a: RunLog, b: RunLog) -> tuple[str, str]:
    if not a.sources or not b.sources:
        return OPEN, "logs hold no sources"
    if differ := of_other_settings(a, b, "val_tokens"):
        return differ
    before, after = validation_micro_batch(a), validation_micro_batch(b)
    if before != after and None not in (before, after):
        return OPEN, f"in micro-batches of {after} tokens, was {before}: documents are cut in other places"
    if unread := unreadable(a, b):
        return OPEN, unread
    before, after = losses(a), losses(b)
    if differ := [name for name in {**before, **after} if before.get(name) != after.get(name)]:
        return OPEN, f"read the diff of {names(differ)}"
    if not after:
        return OPEN, "no function's name tells of it"
    return PROVEN, "forward passes, and functions named by a loss or a validation, are the baseline's; what they call may differ"


def losses(run: RunLog) -> dict[str, str]:
    """What may compute the loss, of all its sources."""
    found = {}
    for name, text in chain.from_iterable(analysed(source)["losses"] for source in run.sources.values()):
        found[name] = f"{found.get(name, '')} {text}"
    return found


def compiler_flags(baseline: Group, group: Group) -> tuple[str, str]:
    if not all(run.sources for run in baseline.runs + group.runs):
        return OPEN, "logs hold no sources"
    added = [*(possible_flags(group) - possible_flags(baseline))]
    if flags := [text for text in added if COMPILER_FLAG.search(text)]:
        return BROKEN, f"not in the baseline: {names(flags)}"
    if unread := unreadable(*baseline.runs, *group.runs):
        return OPEN, unread
    if added:
        return OPEN, f"a changed line may set one: {names(added)}"
    return PROVEN, "no variable is another, no changed line names a compiler, or sets what it does not name"


def possible_flags(group: Group) -> Counter:
    """Lines that may set what the compiler does, and such variables: of any of its runs, as it started or went on."""
    found = Counter()
    for run in group.runs:
        lines = [line for source in filter(analysed, run.sources.values()) for line in analysed(source)["flags"]]
        found |= Counter([*lines, *{*COMPILER_VARIABLE.findall(run.facts.get("variables", ""))}])
    return found


def sources(group: Group) -> tuple[str, str]:
    lacking = [run.path.name for run in group.runs if not run.sources]
    return (BROKEN, f"not in {names(lacking)}") if lacking else (PROVEN, plural(len(group.runs[0].sources), "file"))


def seeds(group: Group) -> tuple[str, str]:
    found = [run.settings.get("seed") for run in group.runs]
    if None in found:
        return OPEN, "the logs do not tell seeds"
    return (PROVEN if len({*found}) == len(found) else BROKEN), ", ".join(found)


# -----------------------------------------------------------------------------
# Sources


@lru_cache(maxsize=1024)
def analysed(source: bytes) -> dict | None:
    """What the rules ask of a source, without what cannot change a run; None for one that this Python cannot read: of a later
    Python, nested too deep, or beyond MAX_SOURCE. Nothing can be proven of that."""
    try:
        tree = ast.fix_missing_locations(Normal().visit(parse(source)))
        asked = {"data": uses(tree, "data"), "runtime": uses(tree, "runtime"), "untimed": untimed(tree)}
        return asked | {"outside": outside_functions(tree), "losses": of_loss(tree), "flags": flag_lines(tree)}
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def unreadable(*runs: RunLog) -> str:
    """Which of their sources this Python cannot read, in words; empty if there is none."""
    found = dict.fromkeys(name for run in runs for name, source in run.sources.items() if not analysed(source))
    return f"this Python, {platform.python_version()}, cannot read {names([*found])}: read it yourself" if found else ""


def of_loss(tree: ast.AST) -> list[tuple[str, str]]:
    """What may compute the loss, by class and name: forward passes, and functions whose names say so."""
    classes = {id(x): f"{node.name}." for node in ast.walk(tree) if isinstance(node, ast.ClassDef) for x in node.body}
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and OF_LOSS.search(node.name)]
    return [(f"{classes.get(id(node), '')}{node.name}", ast.dump(node)) for node in functions]


def uses(tree: ast.AST, package: str) -> dict[str, str]:
    """What a source does with a package, by name: its functions and classes that name what is imported from there, those that
    name one of these, and so on; so of its other statements and what they assign."""
    reached, imports = {package}, []
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            base = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            if ours := [alias for alias in node.names if f"{base}{alias.name}.".startswith(f"{package}.")]:
                imports.append(ast.dump(node))
                reached |= {alias.asname or alias.name for alias in ours}
    found, rest = {"the imports": imports}, [x for x in tree.body if not isinstance(x, (ast.Import, ast.ImportFrom))]
    if patched := patches(tree):
        found["what it changes of its imports"] = patched
    while near := [node for node in rest if reached & names_in(node, ast.Load)]:
        rest = [node for node in rest if node not in near]
        for node in near:
            found.setdefault(getattr(node, "name", "its statements"), []).append(ast.dump(node))
            reached |= {node.name} if hasattr(node, "name") else names_in(node, ast.Store)
    return {name: " ".join(sorted(dumps)) for name, dumps in found.items()}


def patches(tree: ast.AST) -> list[str]:
    """The statements that change what a script imports: module.function = its own, Class.method = its own."""
    imports = [x for x in ast.walk(tree) if isinstance(x, (ast.Import, ast.ImportFrom))]
    imported = {(alias.asname or alias.name).partition(".")[0] for node in imports for alias in node.names}
    found = [ast.dump(node) for node in imports if POWERS & roots_of(node)]
    for node in ast.walk(tree):
        if isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Delete)):
            targets = getattr(node, "targets", None) or [node.target]
            changed = [x for target in targets for x in ast.walk(target) if isinstance(x, (ast.Attribute, ast.Subscript))]
            if any(names_in(x, ast.Load) & imported for x in changed):
                found.append(ast.dump(node))
        elif isinstance(node, (ast.For, ast.AsyncFor, ast.comprehension, ast.withitem)):
            target = getattr(node, "target", None) or getattr(node, "optional_vars", None)
            found += [ast.dump(target)] if target and attributes_of(target) else []
        elif DYNAMIC & {getattr(node, "id", ""), getattr(node, "attr", "")} or is_modules(node):
            found.append(ast.dump(node))
    return found


def roots_of(node: ast.Import | ast.ImportFrom) -> set[str]:
    """The first parts of the modules' names that it imports."""
    modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
    return {name.partition(".")[0] for name in modules}


def is_modules(node: ast.AST) -> bool:  # sys.modules; a model's modules() is called
    return isinstance(node, ast.Attribute) and node.attr == "modules" and getattr(node.value, "id", "") == "sys"


def outside_functions(tree: ast.AST) -> set[str]:
    """What a source does while it is imported, beside functions, classes, imports and tables: its other statements, the names
    that it binds again, what it calls, but for its own classes."""
    found = set()
    own = {node.name: node for node in tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}

    def visit(body: list[ast.stmt]) -> None:
        bound = Counter()
        for node in body:
            targets = getattr(node, "targets", None) or [getattr(node, "target", None)]
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                bound.update((alias.asname or alias.name).partition(".")[0] for alias in node.names)
                run = []
            elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                bound[node.name] += 1
                run = node.decorator_list + (node.bases if isinstance(node, ast.ClassDef) else [node.args])
                visit(node.body if isinstance(node, ast.ClassDef) else [])
            elif isinstance(node, (ast.Assign, ast.AnnAssign)) and not any(map(changes_an_object, targets)):
                bound.update(names_in(node, ast.Store))
                run = [node.value] if node.value else []
            else:
                bound.update(names_in(node, ast.Store))
                found.add(ast.dump(node))
                run = []
            called = {x.func for part in run for x in ast.walk(part) if isinstance(x, ast.Call)}
            for definition in (own.get(getattr(function, "id", ""), function) for function in called):
                found.update([] if isinstance(definition, ast.ClassDef) else [ast.dump(definition)])
        found.update(f"{name} again" for name, times in bound.items() if times > 1)

    visit(tree.body)
    return found


def changes_an_object(target: ast.AST) -> bool:
    return any(isinstance(x, (ast.Attribute, ast.Subscript)) for x in ast.walk(target))


def names_in(node: ast.AST, context: type) -> set[str]:
    return {x.id for x in ast.walk(node) if isinstance(x, ast.Name) and isinstance(x.ctx, context)}


def untimed(tree: ast.AST) -> dict[str, str]:
    """What a script does while the clock stands, by name: the statements before `run.start_clock()`, those `with
    run.paused(…)` and all that use the clock; then each function that these use, or that one of those uses. Methods are not
    followed. And what it makes of the clock: its own classes of runs, what it is `with`, what it changes of its imports, and
    where it may reach it by another name."""
    found, by_run = [], uses(tree, "runtime.run")
    for statement in filter(lambda node: isinstance(node, ast.stmt), ast.walk(tree)):
        for body in (getattr(statement, name, None) for name in BODIES):
            starts = [i for i, x in enumerate(body) if attributes_of(x) & {"start_clock"}] if isinstance(body, list) else []
            found += body[: starts[0]] if starts else []
        nodes = [x for x in ast.iter_child_nodes(statement) if not isinstance(x, ast.stmt)]
        found += [x for x in nodes if isinstance(x, ast.withitem)]
        if CLOCK & {*chain.from_iterable(map(attributes_of, nodes))}:
            found.append(statement)
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    reached, more = {}, found
    while more:
        used = {x.id for node in more for x in ast.walk(node) if isinstance(x, ast.Name)} & functions.keys() - reached.keys()
        more = [functions[name] for name in sorted(used)]
        reached |= {node.name: ast.dump(node) for node in more}
    own = {name: text for name, text in by_run.items() if name not in functions}
    by_name = " ".join(ast.dump(node) for node in ast.walk(tree) if isinstance(node, ast.stmt) and is_by_name(node))
    return {"the loop": " ".join(map(ast.dump, found)), "what reaches attributes by name": by_name, **reached, **own}


def is_by_name(statement: ast.stmt) -> bool:
    """Does it itself reach attributes by names that it computes, or that a pattern of `match` names?"""
    inner = [x for x in ast.iter_child_nodes(statement) if not isinstance(x, ast.stmt)]
    nodes = [x for part in inner for x in ast.walk(part)]
    names = {getattr(x, "id", getattr(x, "attr", "")) for x in nodes}
    return bool(BY_NAME & names) or any(isinstance(x, ast.MatchClass) and x.kwd_attrs for x in nodes)


def attributes_of(node: ast.AST) -> set[str]:
    return {x.attr for x in ast.walk(node) if isinstance(x, ast.Attribute)}


def flag_lines(tree: ast.AST) -> list[str]:
    """The lines that may set what the compiler does."""
    return [line.strip() for line in ast.unparse(tree).splitlines() if COMPILER_FLAG.search(line) or MAY_BE_ONE.search(line)]


# -----------------------------------------------------------------------------
# The public speedrun's README


def snippet(baseline: dict, row: dict, target: float) -> str:
    """Its row of the table, and Python that prints the figures from the losses and times; what logs cannot tell is in <>."""
    minutes = figure(row["time_mean"] / 60, ".3f") or "?"
    times = [time for time in row["times"] if time is not None]
    before = [time for time in baseline["times"] if time is not None]
    where = row["times_do_not_compare"] or row["where"] or "<same machine?>"
    lines = [
        "| # | Record time | Description | Date | Log | Contributors |",
        "| - | - | - | - | - | - |",
        f"| <number> | {minutes} minutes | <description> | <date> | [log](<folder>) | <names> |",
        "",
        "```python",
        "import scipy.stats, statistics",
        "",
        f"losses = {[round(loss, 10) for loss in row['losses']]}",
        f"times = {[round(time, 9) for time in times]}  # seconds",
        f"baseline_times = {[round(time, 9) for time in before]}  # {where}",
    ]
    p_below = "scipy.stats.ttest_1samp(losses, {:g}, alternative='less')"
    p_time = "scipy.stats.ttest_ind(times, baseline_times, equal_var=False)"
    computed = [
        ("loss mean", "statistics.fmean(losses)", row["loss_mean"], ".5f"),
        ("loss sigma", "statistics.stdev(losses)", row["loss_sigma"], ".5f"),
        (f"p of a mean below {target:g}", f"{p_below.format(target)}.pvalue", row["loss_p_below_target"], ".2g"),
        ("time mean", "statistics.fmean(times)", row["time_mean"], ".3f"),
    ]  # fmt: skip
    if not row["times_do_not_compare"] and row["test"] == "Welch's t-test":
        computed.append(("p of another time", f"{p_time}.pvalue", row["time_p"], ".2g"))
    for what, expression, value, form in computed:
        if text := figure(value, form):
            lines.append(f'print("{what}:", f"{{{expression}:{form}}}")  # {text}')
    return "\n".join(clean(line, one_line=True) for line in [*lines, "```"])  # which is pasted, and run

"""The rules of a record, with what the logs can prove of them, and what the public speedrun's README wants to be told."""

import ast
import re
from collections import Counter

from groups import Group, names, plural
from kinds import Normal, same_source
from runlog import RunLog
from t_tests import P
from verdict import figure

COMPILER_FLAG = re.compile(r"inductor|torch\._(?:dynamo|functorch)|dynamo\.config|torch\.compile\(|TORCHINDUCTOR|TORCH_COMPILE")
BODIES = ("body", "orelse", "finalbody", "handlers", "cases")
PROVEN, BROKEN, OPEN = "[x]", "[!]", "[ ]"


def check_list(baseline: Group, group: Group, row: dict, target: float) -> str:
    """A line for each rule of records/README.md: [x] the logs prove it, [!] they speak against it, [ ] read for yourself."""
    a, b = baseline.runs[0], group.runs[0]
    below, time = row["loss_p_below_target"], row["time_p_holm"]
    faster = time < P and row["time_difference"] < 0
    lines = [
        ("The data stream is unchanged", *data_stream(a, b)),
        (f"Mean loss below {target:g} at p < {P:g}", PROVEN if below < P else BROKEN,
         f"{row['loss_mean']:.5f}, p = {figure(below) or 'undefined'}"),
        ("Time is training alone, by the same clock", *clock(a, b)),
        ("No extra compiler flags", *compiler_flags(a, b)),
        ("The source is in the log", *sources(group)),
        (f"Faster than the baseline at p < {P:g}, on one machine", PROVEN if faster else BROKEN,
         row["times_do_not_compare"] or f"{row['time_difference']:+.3f} s, p = {figure(time) or 'undefined'}"),
        ("Every run has its own seed", *seeds(group)),
        ("The number of runs was fixed before, and all of them are here", OPEN,
         f"{plural(row['runs'], 'run')}, {len(row['set_aside'])} set aside; logs cannot tell of others"),
    ]  # fmt: skip
    return "\n".join(f"- {mark} {rule}: {evidence}" for rule, mark, evidence in lines)


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
    if a.settings.get("data") != b.settings.get("data"):
        return OPEN, f"data/*.py are the baseline's; --data is {b.settings.get('data')}, was {a.settings.get('data')}"
    if statements(a.script[1], "data") != statements(b.script[1], "data"):
        return OPEN, "data/*.py are the baseline's; the script uses them in other statements: read its diff"
    return PROVEN, "data/*.py, --data and the script's statements that use them are the baseline's"


def clock(a: RunLog, b: RunLog) -> tuple[str, str]:
    if decided := unchanged(a, b, "runtime/", "clock"):
        return decided
    if untimed(a.script[1]) != untimed(b.script[1]):
        return OPEN, "runtime/*.py are the baseline's; what the script does while the clock stands is not: read its diff"
    return PROVEN, "runtime/*.py and what the script does while the clock stands are the baseline's"


def compiler_flags(a: RunLog, b: RunLog) -> tuple[str, str]:
    if not a.sources or not b.sources:
        return OPEN, "logs hold no sources"
    before, after = (Counter(line for source in log.sources.values() for line in flag_lines(source)) for log in (a, b))
    added = [*(after - before)]
    return (BROKEN, f"not in the baseline: {names(added)}") if added else (PROVEN, "none that the baseline has not")


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


def parsed(source: bytes) -> ast.AST:
    """Without what cannot change a run; empty for what this Python cannot parse."""
    try:
        return ast.fix_missing_locations(Normal().visit(ast.parse(source)))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ast.Module(body=[], type_ignores=[])


def statements(source: bytes, package: str) -> Counter:
    """The statements in which a script uses what it imports from a package; of those with a body, what stands before it."""
    tree = parsed(source)
    imports = [x for x in ast.walk(tree) if isinstance(x, ast.ImportFrom) and f"{x.module}.".startswith(f"{package}.")]
    imported = {alias.asname or alias.name for node in imports for alias in node.names} | {package}
    found = Counter(map(ast.dump, imports))
    for statement in ast.walk(tree):
        if isinstance(statement, ast.stmt):
            fields = [value for name, value in ast.iter_fields(statement) if name not in BODIES]
            nodes = [x for value in fields for x in (value if isinstance(value, list) else [value]) if isinstance(x, ast.AST)]
            if any(isinstance(x, ast.Name) and x.id in imported for node in nodes for x in ast.walk(node)):
                found[" ".join(map(ast.dump, nodes))] += 1
    return found


def untimed(source: bytes) -> Counter:
    """The blocks during which the clock stands: `with run.paused(…)`."""
    return Counter(
        ast.dump(node) for node in ast.walk(parsed(source)) if isinstance(node, ast.With)
        and any(isinstance(x, ast.Attribute) and x.attr == "paused" for item in node.items for x in ast.walk(item))
    )  # fmt: skip


def flag_lines(source: bytes) -> list[str]:
    """The lines that set what the compiler does."""
    try:
        text = ast.unparse(parsed(source))
    except (ValueError, RecursionError):
        return []
    return [line.strip() for line in text.splitlines() if COMPILER_FLAG.search(line)]


# -----------------------------------------------------------------------------
# The public speedrun's README


def snippet(baseline: dict, row: dict, target: float) -> str:
    """Its row of the table, and Python that prints the figures from the losses and times; what logs cannot tell is in <>."""
    minutes = figure(row["time_mean"] / 60, ".3f") or "?"
    times = [time for time in row["times"] if time is not None]
    before = [time for time in baseline["times"] if time is not None]
    lines = [
        "| # | Record time | Description | Date | Log | Contributors |",
        "| - | - | - | - | - | - |",
        f"| <number> | {minutes} minutes | <description> | <date> | [log](<folder>) | <names> |",
        "",
        "```python",
        "import scipy.stats, statistics",
        "",
        f"losses = {[round(loss, 4) for loss in row['losses']]}",
        f"times = {[round(time, 3) for time in times]}  # seconds",
        f"baseline_times = {[round(time, 3) for time in before]}  # {row['times_do_not_compare'] or 'same machine'}",
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
    return "\n".join([*lines, "```"])

"""What a group's runs have changed, against the baseline's: sources, settings, versions, devices."""

import contextlib
import difflib
import itertools

from groups import Group, plural
from kinds import same_source
from runlog import Effort, RunLog, resumed_with_changes
from tool import clean

MOST_PAIRS = 3 * 10**7  # of lines, looked at as the sources of two logs are compared: seconds


def changed(baseline: Group, group: Group) -> str:
    """In a line: the sources of the first run of each, the environments of all."""
    a, b = baseline.runs[0], group.runs[0]
    pieces = []
    for name, lines in source_diffs(a, b):
        added, removed = (sum(line.startswith(sign) for line in lines[2:]) for sign in "+-")
        pieces.append(f"{name} +{added} −{removed}")
    if unknown := [side.name for side in (baseline, group) if not side.runs[0].sources]:
        pieces = [f"its sources are unknown: the logs of {' and '.join(unknown)} hold none"]
    elif pieces and same_sources(a, b):
        pieces = [f"{', '.join(pieces)}, in comments and the like alone"]
    for log in (a, b):
        if diff := resumed_with_changes(log).splitlines():
            lines = sum(line.startswith(("+", "-")) and not line.startswith(("+++ ", "--- ")) for line in diff)
            whose = "" if log is b else f"{baseline.name} was "
            pieces.append(f"{whose}resumed with changed source, {plural(lines, 'line')} of difference")
    pieces += [f"{name} {before} → {after}" for name, before, after in environment_differences(baseline, group)]
    firsts = " (sources: of the first runs)" if any(len(side.of_each_source) > 1 for side in (baseline, group)) else ""
    return f"{group.name} changes{firsts}: {'; '.join(pieces) or 'nothing: the same sources, settings and environment'}"


def same_sources(a: RunLog, b: RunLog) -> bool:
    """But for what cannot change a run, see kinds.py."""
    return all(same_source(before, after) for _, before, _, after in source_pairs(a, b))


def source_pairs(a: RunLog, b: RunLog) -> list[tuple[str, bytes | None, str, bytes | None]]:
    """(path, source, path, source) of both, None where there is no such file; the scripts are a pair whatever their names."""
    modules = sorted({*a.modules, *b.modules})
    return [(*a.script, *b.script), *((name, a.modules.get(name), name, b.modules.get(name)) for name in modules)]


def source_diffs(a: RunLog, b: RunLog) -> list[tuple[str, list[str]]]:
    """(path, unified diff) of each source that differs."""
    diffs, effort = [], Effort(MOST_PAIRS)
    for name_a, source_a, name_b, source_b in source_pairs(a, b):
        if source_a != source_b:
            titles = [clean(f"{log.path}: {name if source is not None else '(none)'}", one_line=True)
                      for log, name, source in ((a, name_a, source_a), (b, name_b, source_b))]  # fmt: skip
            lines = [(source or b"").decode("utf-8", "replace").splitlines() for source in (source_a, source_b)]
            diff = line_diff(*lines, *titles, effort=effort)
            diffs.append((name_b, diff or [f"--- {titles[0]}", f"+++ {titles[1]}"]))  # empty, or other line breaks
    return diffs


class TooLong(Exception):
    """Two texts that would take minutes."""


class Matcher(difflib.SequenceMatcher):
    """difflib's, which stops where effort ends: lines that stand again and again may take it the cube of their number."""

    def __init__(self, before: list[str], after: list[str], effort: Effort):
        super().__init__(None, before, after)
        self.effort = effort
        self.pairs = [0, *itertools.accumulate(1 + len(self.b2j.get(line, ())) for line in before)]  # up to each line

    def find_longest_match(self, *within: int) -> difflib.Match:
        """Within before[first:end] and after[first:end], as get_matching_blocks asks. Raises TooLong."""
        first, end, *_ = within
        if not self.effort.spend(self.pairs[end] - self.pairs[first]):
            raise TooLong
        return super().find_longest_match(*within)


def line_diff(before: list[str], after: list[str], *titles: str, effort: Effort) -> list[str]:
    """Unified; of texts that would take minutes all that is between their common beginning and end."""
    with contextlib.suppress(TooLong):
        Matcher(before, after, effort).get_matching_blocks()  # as unified_diff will
        return [*difflib.unified_diff(before, after, *titles, lineterm="")]
    first = next((i for i, (a, b) in enumerate(zip(before, after)) if a != b), min(len(before), len(after)))
    rest = min(len(before), len(after)) - first
    last = next((i for i, (a, b) in enumerate(zip(before[::-1], after[::-1])) if a != b or i == rest), rest)
    sides = [side[first : len(side) - last] for side in (before, after)]
    ranges = " ".join(f"{sign}{first + 1},{len(side)}" for sign, side in zip("-+", sides))
    lines = (f"{sign}{line}" for sign, side in zip("-+", sides) for line in side)
    return [f"--- {titles[0]}", f"+++ {titles[1]}", f"@@ {ranges} @@ too long to be compared line by line", *lines]


def other_tokens(a: RunLog, b: RunLog) -> list[str]:
    """Shards of b in whose place a read other tokens, by name. One may have read more of them: a longer run does. Empty too
    where logs do not tell what the shards held."""
    found = []
    for split in ("_train_", "_val_"):  # in the order of their names, as a run reads them
        before, after = ([item for item in sorted(log.shards.items()) if split in item[0]] for log in (a, b))
        found += [name for (_, was), (name, digest) in zip(before, after) if digest != was]
    return found


def environment_differences(baseline: Group, group: Group) -> list[tuple[str, str, str]]:
    """(what, before, after) of versions, devices and settings that differ; where runs of one group do, "this or that"."""
    found = []
    for kind, prefix in (("facts", ""), ("recipe_settings", "--")):
        told = [[getattr(run, kind) for run in side.runs] for side in (baseline, group)]
        for name in dict.fromkeys(name for runs in told for values in runs for name in values):
            before, after = (" or ".join(dict.fromkeys(values.get(name, "(none)") for values in runs)) for runs in told)
            if before != after:
                found.append((prefix + name, before, after))
    return found

"""Reads training logs: ours and the public speedrun's, github.com/KellerJordan/modded-nanogpt.

A log holds the sources of a run, the script first, each further file after a banner of dashes
with its path; a rule of 100 =; the environment, whose last line (in ours) is the script's path
and the settings; another rule; then lines such as

    step:250/1765 val_loss:4.6145 train_time:8312ms step_avg:33.25ms
    step:251/1765 train_time:8345ms step_avg:33.25ms grad_norm:1.23

A step line may have further `name:value` columns. `name: value` lines after the last `---` are
its figures. What is missing or malformed raises nothing: RunLog.fault and RunLog.problems say it.
"""

import ast
import re
import sys
import warnings
from collections import Counter
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from math import isfinite
from pathlib import Path, PurePath

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from runtime.sources import RULE, printable

# Settings in which runs of one experiment may differ: the seed, and what is written where.
OWN_OF_A_RUN = {"seed", "encoding", "log_dir", "run_id", "sample_tokens"}
OWN_OF_A_RUN |= {"save_every", "save_minutes", "keep_checkpoints", "resume"}

RULE_LINE = f"\n{RULE}\n".encode()
SOURCES_END = re.compile(rb"\n={100}\n(?=(?:Running )?Python \d)")
BANNER_LINES = re.compile(rb"\n-{40}\n# *([^\s][^\n]*\.py)\n-{40}\n")
SETTINGS_LINE = re.compile(r"^(\S.*?\.py) (\w+\(.*\))$", re.MULTILINE)
STEP_LINE = re.compile(r"step:(\d+)/(\d+)((?: [^\s:]+:\S+)+) *")
SAMPLE = "\nsample, after a prompt"  # the title of free text, in which anything may stand
# The run's own line, or the last line of a traceback, by any rank.
ERROR = r"^(?:\[rank\d+\]: ?)?(?:error: |[\w.]*(?:Error|Exception)\b).*$"
ERROR_LINE = re.compile(ERROR, re.MULTILINE)
RESUMED = re.compile(r"^resumed at step (\d+) from .*$", re.MULTILINE)
CUDA_DEVICE = re.compile(r"Properties\(name='([^'\n]+)'(?:[^\n]*?\buuid=([\w-]+))?")
# A row of nvidia-smi's table of GPUs: index, name, persistence mode, bus id.
SMI_GPU = r"^\| +\d+ +(\S[^|\n]*?) +(?:On|Off|N/A) *\| +([\dA-Fa-f:]+\.\d) "
SMI_ROW = re.compile(SMI_GPU, re.MULTILINE)
FIGURE = re.compile(r"^(\w+): (-?\d+(?:\.\d+)?(?:e[+-]?\d+)?)$", re.MULTILINE)
SHARD = re.compile(r"""(?:^|, )('(?:[^'\\]|\\.)+'|"(?:[^"\\]|\\.)+") ([0-9a-f]{8})\b""")
FACTS = {
    "Python": r"^(?:Running )?Python (\S+)",
    "PyTorch": r"\bPyTorch (\S+?),? (?:compiled for )?CUDA",
    "CUDA": r"\bPyTorch \S+ (?:compiled for )?CUDA (\S+?),?(?:\s|$)",
    "Triton": r"\bTriton (?:version )?(\S+)",
    "attention": r"^attention: (.+)",
    "host": r"^host(?:name)?: ([^\s,]+)",
    "driver": r"\bDriver Version: (\S+)",
    "platform": r"^(.+), \d+ ranks$",
    "ranks": r", (\d+) ranks$",
    "CPU": r"^cpu: (.+)",
    "matmuls": r"^(?:matmuls|products): (.+)",  # "products" until 2026-11-29
    # What a CPU computes with: two machines of one CPU's name may differ in it.
    "instructions": r"^(?:matmuls|products): .*, on (\S+)$",
    "variables": r"^variables: (.+)",
}
# Facts that runs of one mean share; facts in which machines agree whose times compare.
MADE_WITH = ("PyTorch", "CUDA", "Triton", "attention", "ranks", "GPUs")
MACHINE = ("host", "driver", "platform", "CPU", "instructions", "ranks", "GPUs", "GPU ids")


@dataclass
class RunLog:
    """One log. Step 1 is the first update; times are training times since the start, in ms."""

    path: Path
    sources: dict[str, bytes] = field(default_factory=dict)  # by path; the script first
    environment: str = ""
    times: dict[int, float] = field(default_factory=dict)
    validations: list[tuple[int, float, float]] = field(default_factory=list)  # step, loss, ms
    total: int = 0  # steps of the whole run
    figures: dict[str, float] = field(default_factory=dict)  # after the last `---`, if any
    fault: str = ""  # why this is not a complete run; empty: it is one
    problems: list[str] = field(default_factory=list)

    @property
    def steps(self) -> int:
        """Up to the last validation."""
        return self.validations[-1][0]

    @property
    def loss(self) -> float:
        """The last validation's, nats a token."""
        return self.validations[-1][1]

    @property
    def seconds(self) -> float:
        """Training time at the last validation."""
        return self.validations[-1][2] / 1000

    @property
    def script(self) -> tuple[str, bytes]:
        """Its path and source; train_gpt.py, empty, if the log has no sources."""
        return next(iter(self.sources.items()), ("train_gpt.py", b""))

    @cached_property
    def settings(self) -> dict[str, str]:
        """The options of the run as Python expressions, by name; empty in foreign logs."""
        line = SETTINGS_LINE.search(self.environment)
        if not line:
            return {}
        try:
            call = ast.parse(line[2], mode="eval").body
            return {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
        except (SyntaxError, ValueError, AttributeError):
            return {"settings": line[2]}

    @property
    def recipe_settings(self) -> dict[str, str]:
        """The settings that runs of one experiment share. `data` counts by its last folder."""
        kept = {name: x for name, x in self.settings.items() if name not in OWN_OF_A_RUN}
        if "data" in kept:
            kept["data"] = repr(PurePath(kept["data"].strip("'\"")).name)
        return kept

    @cached_property
    def parts(self) -> list[str]:
        """The environment as the run started, then that of each resumption."""
        starts = [0, *(match.start() for match in RESUMED.finditer(self.environment))]
        ends = [*starts[1:], len(self.environment)]
        return [self.environment[start:end] for start, end in zip(starts, ends)]

    @cached_property
    def facts(self) -> dict[str, str]:
        """Versions, devices, host, ranks. A resumed run may have two of one: "this then that"."""
        found: dict[str, list[str]] = {}
        for name, value in (item for part in self.parts for item in part_facts(part).items()):
            if value not in found.setdefault(name, []):
                found[name].append(value)
        return {name: " then ".join(values) for name, values in found.items()}

    @cached_property
    def shards(self) -> dict[str, str]:
        """The CRC-32 of each shard that the run has read, by name, where logged."""
        line = re.search(r"^shards: (.+)$", self.environment, re.MULTILINE)
        return {name[1:-1]: crc for name, crc in SHARD.findall(line[1] if line else "")}

    @property
    def resumed_at(self) -> list[int]:
        return [int(match[1]) for match in RESUMED.finditer(self.environment)]

    @property
    def source_changes(self) -> str:
        """The diffs of the sources with which it was resumed; empty: with the same."""
        changed = [x for x in self.parts[1:] if "changed source" in x.partition("\n")[0]]
        return "\n".join(SETTINGS_LINE.split(part)[-1].strip("\n") for part in changed)


def part_facts(environment: str) -> dict[str, str]:
    """See RunLog.facts. No times of day, temperatures or loads."""
    found = {}
    for name, pattern in FACTS.items():
        if match := re.search(pattern, environment, re.MULTILINE | re.IGNORECASE):
            found[name] = match[1]
    gpus = CUDA_DEVICE.findall(environment) or SMI_ROW.findall(environment)
    if gpus:
        counts = Counter(name for name, _ in gpus)
        found["GPUs"] = ", ".join(f"{count} × {name}" for name, count in sorted(counts.items()))
        if all(number for _, number in gpus):
            found["GPU ids"] = ", ".join(sorted(number.lower() for _, number in gpus))
    return found


def shown(text: object) -> str:
    """Foreign text for a terminal, on one line, its escape sequences made visible."""
    return printable(str(text)).replace("\n", " ")


def read_log(path: Path) -> RunLog:
    """The log at `path`. Raises OSError if it cannot be read."""
    return parse_log(path.read_bytes(), path)


def parse_log(data: bytes, path: Path = Path("log")) -> RunLog:
    """The log whose content is `data`; `path` is only its name."""
    log = RunLog(path)
    end = SOURCES_END.search(data)
    if not end:
        log.fault = "not a log, or cut short within its sources"
        return log
    environment, ended, body = data[end.end() :].partition(RULE_LINE)
    log.environment = environment.decode("utf-8", "replace").strip("\n")
    if not ended:
        log.fault = "cut short within its environment"
        return log
    log.sources = split_sources(data[: end.start()], log.environment) | late_sources(body)
    text = body.decode("utf-8", "replace")
    _, mark, end = text.rpartition("\n---\n")
    log.figures = {name: float(value) for name, value in FIGURE.findall(end if mark else "")}
    read_steps(text, log)
    return log


# ----------------------------------------------------------------------------------------------
# Sources


@lru_cache(maxsize=1024)
def parses(source: bytes) -> bool:
    try:
        with warnings.catch_warnings(action="ignore"):
            ast.parse(source)
        return True
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False


def split_sources(text: bytes, environment: str) -> dict[str, bytes]:
    """The files that banners join, by path. The environment's last line names the script.

    A banner may also stand in a string of a source. The source does not parse up to that one.
    """
    settings = SETTINGS_LINE.search(environment)
    name = settings[1] if settings else "train_gpt.py"
    public = environment.startswith("Running")  # with empty lines around its banners
    sources, start = {}, 0
    while True:
        banners = [*BANNER_LINES.finditer(text, start)]
        ends = [*(banner.start() for banner in banners), len(text)]
        i = next((i for i, end in enumerate(ends) if parses(text[start:end])), 0)
        source = text[start : ends[i]]
        if public and sources:
            source = source.removeprefix(b"\n")
        if i == len(banners):
            sources[name] = source
            return sources
        sources[name] = source.removesuffix(b"\n") if public else source
        name = banners[i][1].decode("utf-8", "replace")
        start = banners[i].end()


def late_sources(body: bytes) -> dict[str, bytes]:
    """The files that the run imported after its header was written, by path."""
    lines, _, _ = body.partition(SAMPLE.encode())
    found = {}
    for banner in BANNER_LINES.finditer(lines):
        source, ended, _ = lines[banner.end() :].partition(RULE_LINE)
        if ended:
            found[banner[1].decode("utf-8", "replace")] = source
    return found


# ----------------------------------------------------------------------------------------------
# Step lines


def read_steps(body: str, log: RunLog) -> None:
    """Fill in the figures of the step lines, and the fault if the run is not complete."""
    text, sample, _ = f"\n{body}".partition(SAMPLE)
    if not sample:
        text = text[: text.rfind("\n")]  # the last line may be half written
    last, fault = -1, ""
    for line in text.split("\n"):
        match = STEP_LINE.fullmatch(line)
        if not match:
            continue
        columns = dict(column.split(":", 1) for column in match[3].split())
        try:
            time = float(columns["train_time"].removesuffix("ms"))
            loss = float(columns["val_loss"]) if "val_loss" in columns else None
        except (KeyError, ValueError):
            log.problems.append(f"not read: {line[:80]!r}")
            continue
        step, log.total = int(match[1]), int(match[2])
        if step < last:
            fault = fault or f"step {step} follows step {last}: more than one run in this log"
        known = [old for at, old, _ in log.validations if at == step]
        if loss is not None and known and known[0] != loss:
            fault = fault or f"step {step} has two validation losses, {known[0]:g} and {loss:g}"
        if loss is not None and not known:
            log.validations.append((step, loss, time))
        log.times[step] = time
        last = step
    log.fault = fault or wrong_figure(log) or incomplete(log, last, text)


def wrong_figure(log: RunLog) -> str:
    """A time that no clock can have shown, or a loss that is not finite; "" if there is none."""
    before = 0.0
    for step, time in log.times.items():
        # Two readings of one step may differ a bit.
        if not isfinite(time) or time < 0.99 * before - 1:
            return f"wrong time: {time:g} ms at step {step}, after {before:g} ms"
        before = time
    for step, loss, _ in log.validations:
        if not isfinite(loss) or loss < 0:
            return f"crashed: the validation loss is {loss} at step {step}"
    return ""


def incomplete(log: RunLog, last: int, text: str) -> str:
    """Why the run is not complete: "" if it has a validation loss at its last step."""
    if last < 0:
        return "cut short before its first step"
    if last == log.total and log.validations and log.validations[-1][0] == last:
        return ""
    if errors := ERROR_LINE.findall(text):
        return f"crashed at step {last}/{log.total}: {errors[-1][:120]}"
    lack = ": no validation loss there" if last == log.total else ""
    return f"cut short at step {last}/{log.total}{lack}"


def at_step(log: RunLog, step: int) -> RunLog:
    """The log as if its run had ended at `step`; a fault if there was no validation."""
    kept = [validation for validation in log.validations if validation[0] <= step]
    times = {at: time for at, time in log.times.items() if at <= step}
    cut = replace(log, validations=kept, times=times, total=step, figures={})
    # A run that crashed later was complete up to here; a wrong figure stays a fault.
    if log.fault.startswith(("crashed at", "cut short at")) or not log.fault:
        cut.fault = ""
        if not kept or kept[-1][0] != step:
            validated = ", ".join(str(at) for at, _, _ in log.validations) or "none"
            cut.fault = f"not validated at step {step}, but at {validated}"
    return cut

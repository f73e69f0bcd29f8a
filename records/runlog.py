"""Training logs, read: bankrun's own and those of the public speedrun, github.com/KellerJordan/modded-nanogpt.

A log holds the sources of a run, the script first, each further file after a banner of dashes with its path; a rule of 100 =;
the environment, whose last line is the script's path and the settings; another rule; then lines like
`step:250/1765 val_loss:4.6145 train_time:8312ms step_avg:33.25ms`. Older logs differ in detail.
Reading never raises for what a log holds: what is missing or malformed is said in RunLog.fault and RunLog.problems.
"""

import ast
import itertools
import re
import sys
import warnings
from codecs import BOM_UTF8
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import cached_property, lru_cache
from itertools import chain, islice, pairwise
from math import isfinite
from pathlib import Path, PurePath

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from runtime.options import MAY_DIFFER_BETWEEN_RUNS

MAX_BYTES = 1 << 30
MAX_PROBLEMS = 5  # named, in a log
MAX_PARSES = 100  # in search of the end of a source
MAX_SOURCE = 1 << 20  # bytes that are parsed as one: a tree takes up to 900 times the memory; the largest here has 0.1 MB
EFFORT = 8, 1 << 20  # in search of the ends of all sources: bytes parsed for each byte of the log, and beyond
A_SEARCH = 500  # bytes that a search counts at least
LONGEST = 1e11  # ms: three years
HIGHEST = 1e6  # validation loss, nats
UNTIMED = 16  # steps: the oldest public runs start their clock again after ten

PLAIN_LINE = re.compile(
    rb"^step:(\d{1,9})/(\d{1,9}) train_time:(\d{1,12})ms step_avg:(?:\d{1,9}(?:\.\d{1,9})?|nan)ms\r?\n", re.MULTILINE
)
# The trainer's, and those that seem to be: what else a script writes, whatever it looks like, tells nothing where these are.
VALIDATION_LINE = re.compile(rb"^step:\d{1,9}/\d{1,9} val_loss:\S{1,40} train_time:\d{1,12}ms step_avg:", re.MULTILINE)
OF_TRAINER = re.compile(rb"[ \t]*step:\S{1,40} (?:val_loss:|train_time:|train_loss:\S{1,40} train_time:)")  # the last: older ones
# With a validation loss, or of other logs: `s:250 tel:3.91`, `step 250/1765 | val loss 3.91 | train time 8.3 s`, and worse.
LOOSE_LINE = re.compile(rb"^[ \t]*(?:step|s)(?::|[ \t]*=|[ \t]+(?=\d)).*$", re.MULTILINE)
LOOSE_STEP = re.compile(rb"\s*\w+[ \t:=]+(\d{1,9})(?:\s*(?:/|of)\s*(\d{1,9}))?(?![\w.])")
VALUE = rb"(?:[^\s|,;]|,(?=\d)){1,40}"  # 3,28 is no number, and not 3
LOOSE_LOSS = re.compile(rb"\b(?:val(?:idation)?[_ ]?loss|tel)[ \t:=]+(%s)()" % VALUE)  # not ema_val_loss
UNIT = rb"[ \t]?(?:ms|s|(?:sec|min|h(?:r|our)?)\w*|\(\w+\))|[ \t]\d+(?: ?ms?)?"  # the last: of 8 300 ms
LOOSE_TIME = re.compile(rb"\b(?:train[_ing]*[_ ]?)?time[ \t:=]+(%s?)(%s)?(?=[\s|;]|,(?!\d)|$)" % (VALUE, UNIT))
UNITS = {b"": 1, b"ms": 1, b"s": 1000, b"sec": 1000, b"seconds": 1000, b"(ms)": 1, b"(s)": 1000}  # in ms
ERROR_LINE = re.compile(rb"^(?:\[rank\d{1,6}\]: ?)?(?:error: |[\w.]*(?:Error|Exception|Interrupt)\b|Traceback \(most).*$", re.MULTILINE)

ENVIRONMENT = re.compile(rb"\s*(?:Running )?(?:Python|PyTorch)\b", re.IGNORECASE)
# Script, settings; blanks are an editor's. It looks ahead for the last bracket, so that none before it is tried.
SETTINGS_LINE = re.compile(r"^(?=.*\)[ \t]*$)(\S.{0,4095}?\.py) (\w+\(.*\))[ \t]*$", re.MULTILINE)
BANNER = re.compile(rb"\n-{40}\r?\n# *([^\s][^\n]{0,4095})\n-{40}\r?\n")  # no blank can be of the path or before it
# What may hold quotes or lines like any of a log's, without being one: comments and strings; one that nothing ends goes to the
# end of its line, or of the text, and is not looked at twice. Without possessive quantifiers, which Python had wrong before
# 3.11.5; no character can be read in two ways, so none is read often.
COMMENT_OR_STRING = re.compile(
    rb"#[^\n]*"
    rb"|'''[^'\\]*(?:(?:\\(?:.|\Z)|'(?!''))[^'\\]*)*(?:'''|\Z)"
    rb'|"""[^"\\]*(?:(?:\\(?:.|\Z)|"(?!""))[^"\\]*)*(?:"""|\Z)'
    rb"|'[^'\\\n]*(?:\\(?:.|\Z)[^'\\\n]*)*(?:'|(?=\n)|\Z)"
    rb'|"[^"\\\n]*(?:\\(?:.|\Z)[^"\\\n]*)*(?:"|(?=\n)|\Z)',
    re.DOTALL,
)
FACTS = (
    ("Python", r"^(?:Running )?Python (\S+)"),
    ("PyTorch", r"(?i)\bPyTorch (\S+?),? (?:compiled for )?CUDA"),
    ("CUDA", r"(?i)\bPyTorch \S+ (?:compiled for )?CUDA (\S+?),?(?:\s|$)"),
    ("Triton", r"\bTriton (?:version )?(\S+)"),
    ("driver", r"\bDriver Version: (\S+)"),
    ("attention", r"^attention: (.+)"),
    ("platform", r"^(.+), \d+ ranks$"),
    ("ranks", r", (\d+) ranks$"),
    ("CPU", r"^cpu: (.+)"),
    ("products", r"^products: (.+)"),
    ("variables", r"^variables: (.+)"),
    ("read by its sources", r"^read by its sources: (.+)"),
)


@dataclass
class RunLog:
    """One log. Steps count from 1 after the first update; times are training time since the start, in milliseconds."""

    path: Path
    sources: dict[str, bytes] = field(default_factory=dict)  # path from the root: exact bytes; the script first
    environment: str = ""
    times: dict[int, float] = field(default_factory=dict)  # step: ms
    restart: int = 0  # the step from which on `times` tell, of a clock that was set to 0 there
    validations: list[tuple[int, float, float | None]] = field(default_factory=list)  # (step, loss, ms or None)
    total: int | None = None  # steps of the whole run, if the step lines say so
    peak_memory: str = ""
    fault: str = ""  # why this is not a complete run; empty: it is one
    problems: list[str] = field(default_factory=list)  # what could not be read, and why

    @property
    def loss(self) -> float:
        """The last validation's."""
        return self.validations[-1][1]

    @property
    def seconds(self) -> float | None:
        """Training time at the last validation."""
        milliseconds = self.validations[-1][2]
        return None if milliseconds is None else milliseconds / 1000

    @cached_property
    def settings(self) -> dict[str, str]:
        """The options of the run, as Python expressions by name, from the environment's last line; empty in foreign logs."""
        line = SETTINGS_LINE.search(self.environment)
        if not line:
            return {}
        try:
            call = ast.parse(line[2], mode="eval").body
            return {keyword.arg or "**": ast.unparse(keyword.value) for keyword in call.keywords}
        except (SyntaxError, ValueError, AttributeError, RecursionError, MemoryError):
            return {"settings": line[2]}

    @cached_property
    def facts(self) -> dict[str, str]:
        """The environment in comparable pieces: versions, devices, ranks; without times of day, temperatures and loads. Of a
        resumed run all that it was, "this then that"."""
        parts = []
        for environment, _ in environment_parts(self):
            found = {name: match[1] for name, pattern in FACTS if (match := re.search(pattern, environment, re.MULTILINE))}
            if names := Counter(name for name, _ in gpus(environment)):
                found["GPUs"] = ", ".join(f"{count} × {name}" for name, count in sorted(names.items()))
            parts.append(found)
        every = dict.fromkeys(name for found in parts for name in found)
        for name, found in itertools.product({"variables", "read by its sources"} & every.keys(), parts):
            found.setdefault(name, "none")  # as where a resumption forgot it
        return {name: " then ".join(dict.fromkeys(found[name] for found in parts if name in found)) for name in every}

    @cached_property
    def shards(self) -> dict[str, str]:
        """The digest of each shard that the run has read, by name; empty in logs that do not tell."""
        line = re.search(r"^shards: (.+)$", self.environment, re.MULTILINE)
        each = r"""(?:^|, )('(?:[^'\\]|\\.)+'|"(?:[^"\\]|\\.)+") ([0-9a-f]{8})\b"""  # from no quote that a name holds
        quoted = re.findall(each, line[1] if line else "")
        return {name[1:-1]: digest for name, digest in quoted}

    @property
    def recipe_settings(self) -> dict[str, str]:
        """The settings in which runs of one experiment agree; of data the folder's name, as folders move."""
        kept = {name: value for name, value in self.settings.items() if name not in MAY_DIFFER_BETWEEN_RUNS}
        every = (re.search(r"\btrace_steps=('[^']+')", line) for _, line in SETTINGS_LINE.findall(self.environment))
        if traced := next(filter(None, every), None):  # also of a resumption: a tracer works while the clock runs
            kept["trace_steps"] = traced[1]
        return kept | {"data": repr(PurePath(kept["data"].strip("'\"")).name)} if "data" in kept else kept

    @property
    def script(self) -> tuple[str, bytes]:
        """Path and source of the script; train_gpt.py, empty, where the log has no sources."""
        return next(iter(self.sources.items()), ("train_gpt.py", b""))

    @cached_property
    def modules(self) -> dict[str, bytes]:
        """The sources but the script's."""
        return dict(islice(self.sources.items(), 1, None))


def read_log(path: Path) -> RunLog:
    """The log at `path`. Never raises for its content, nor for a file that cannot be read: fault says why."""
    try:
        if not path.is_file():
            return RunLog(path, fault="not a file")
        if (size := path.stat().st_size) > MAX_BYTES:
            return RunLog(path, fault=f"too large for a log: {size >> 20} MiB, not read")
        return parse_log(path.read_bytes() if size else b"", path)  # some of /proc, which have none, make a reader wait
    except OSError as error:
        return RunLog(path, fault=f"cannot be read: {error.strerror}")


def parse_log(data: bytes, path: Path = Path("log")) -> RunLog:
    """The log whose content is `data`; `path` is only its name."""
    log = RunLog(path)
    text, nul, _ = data.partition(b"\0")
    if nul:
        log.problems.append(f"read up to byte {len(text)}: there begin NUL bytes, which no text holds")
    if text.count(b"\n") == text.count(b"\r\n") > 0:  # no run writes such step lines
        text = text.replace(b"\r\n", b"\n")
        log.problems.append("every line ends as Windows ends it: read, and its sources given back, with line breaks alone")
    if text.startswith(BOM_UTF8):
        log.problems.append("begins with a byte order mark, an editor's or its script's own: given back with its script")
    if not text.strip():
        log.fault = "binary" if nul else "empty"
        return log
    body = split_header(text, log)
    if body is not None:
        read_steps(text, body, log)
    elif not log.fault:
        log.fault = "no log: neither sources that a rule of = ends nor step lines"
    if nul and log.fault:  # by them, it may be
        log.fault += f"; {log.problems[0]}"
    return log


# -----------------------------------------------------------------------------
# Header: sources and environment


def split_header(text: bytes, log: RunLog) -> int | None:
    """Fill in the log's sources and environment; where its step lines begin, None if it does not get so far."""
    opened = text.startswith(b"=" * 20)  # the oldest logs open with a rule
    start = text.find(b"\n") + 1 if opened else 0
    rules, ends = find_rules(text, start)
    if not ends:
        if LOOSE_LINE.match(text, start):
            log.problems.append("no sources, no environment: it begins with step lines")
            return start
        if re.search(rb"^(?:import|from|def|class) \w", text, re.MULTILINE):
            log.fault = "cut short within its sources: no rule of = ends them"
        return None
    effort = Effort(EFFORT[0] * len(text) + EFFORT[1])
    end = first_whole(
        text,
        start,
        ends,
        lambda end: all(map(effort.parses, sources_until(text, start, end, rules, effort).values())),
        effort,
    )
    if end is None:
        log.fault = "cut short within its sources: no rule of = ends them, but within a string"
        return None
    log.environment, body, ended = environment_after(text, end[1], rules)
    if not ended:  # the script's name and the format are not known then, so its sources would be guesses
        log.fault = "cut short within its environment: no rule ends it, no step line follows"
        return None
    log.sources = sources_until(text, start, end, rules, effort)
    if effort.left < 0:
        log.problems.append(
            "its sources were too tangled to search for their ends: some may end where a banner only seems to be"
        )
    if not log.sources:
        log.problems.append("no sources: nothing stands before the environment")
    return body


def environment_after(text: bytes, start: int, rules: list[tuple[int, int]]) -> tuple[str, int, bool]:
    """The environment from `start` on, where what follows it begins, and whether a rule or a step line ends it."""
    following = next((rule for rule in rules if rule[0] >= start), None)
    if following:
        end, body = following
    else:
        line = LOOSE_LINE.search(text, start)
        end = body = line.start() if line else len(text)
    return text[start:end].decode("utf-8", "replace").strip("\r\n"), body, bool(following or line)


def sources_until(
    text: bytes, start: int, end: tuple[int, int], rules: list[tuple[int, int]], effort: "Effort"
) -> dict[str, bytes]:
    """The sources from `start` on, were `end` the rule that ends them."""
    environment, _, _ = environment_after(text, end[1], rules)
    sources = text[start : end[0]]
    modern = re.match(r"(?:Running )?Python\b", environment)
    if not text.startswith(b"=" * 20) and (modern or sources.endswith(b"\n\n")):
        sources = sources[:-1]  # print() ended it, with a line break that is not its own
    return split_sources(sources, environment, effort)


def find_rules(text: bytes, start: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """(start, end with its line break) of the lines that one character fills, and which of them may end the sources.

    An environment follows those. Where none does, every rule of = may; other characters' may be comments of the sources.
    """
    of_equals = []
    for character in (b"=", b"-", b"*", b"#", b"_", b"~"):
        rules, at = [], max(start - 1, 0)
        while (at := text.find(b"\n" + character * 50, at)) >= 0:
            line_break = text.find(b"\n", at + 1)
            line_end = len(text) if line_break < 0 else line_break
            if not text[at + 1 : line_end].strip(character + b" \t\r"):
                rules.append((at + 1, min(line_end + 1, len(text))))
            at = line_end
        if ends := [rule for rule in rules if ENVIRONMENT.match(text, rule[1])]:
            return rules, ends
        if character == b"=":
            of_equals = rules
    return of_equals, of_equals


class Effort:
    """How far to search, as in a log's header, so that no text takes longer than in proportion to its size."""

    def __init__(self, most: int):
        self.left = most

    def spend(self, cost: int) -> bool:
        """May that be done?"""
        self.left -= cost + A_SEARCH
        return self.left >= 0

    def parses(self, source: bytes) -> bool:
        """Is it Python, to the last line? No, once too much was parsed."""
        return self.spend(len(source)) and parses(source)


def first_whole(
    text: bytes,
    start: int,
    ends: Iterable[tuple[int, int]],
    whole: Callable[[tuple[int, int]], bool],
    effort: Effort,
) -> tuple[int, int] | None:
    """The first of `ends` up to which the text from `start` is whole: sources may hold lines like any of a log's.

    Exact for sources that this Python can parse: such a line stands in a string or a bracket there, so that what is before it
    does not parse, and neither does what goes beyond the end. So the order of the search decides nothing but its speed: first
    those outside of strings, as far as a regular expression can tell; nearly always the first of them is it. For sources that
    do not parse, that one; None if there is none.
    """
    outside, inside = None, []
    strings = COMMENT_OR_STRING.finditer(text, start)
    string, parsed = next(strings, None), 0
    for end in ends:
        while string and string.end() <= end[0]:
            string = next(strings, None)
        if string and string.start() <= end[0]:
            inside.append(end)
            continue
        outside = outside or end
        if effort.left < 0 or parsed >= MAX_PARSES:
            return outside
        if whole(end):
            return end
        parsed += 1
    return next((end for end in inside[: MAX_PARSES - parsed] if effort.left >= 0 and whole(end)), outside)


@lru_cache(maxsize=128)
def parses(source: bytes) -> bool:
    """Is it Python, to the last line?"""
    try:
        parse(source)
        return True
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False


def parse(source: bytes) -> ast.Module:
    """A source's tree. Raises SyntaxError, ValueError, also for one of more than MAX_SOURCE bytes, RecursionError, MemoryError."""
    if len(source) > MAX_SOURCE:
        raise ValueError(f"a source of {len(source):,} bytes, more than {MAX_SOURCE:,}")
    with warnings.catch_warnings(action="ignore"):
        return ast.parse(source)


def split_sources(text: bytes, environment: str, effort: Effort) -> dict[str, bytes]:
    """The files that banners join, by path. The environment's last line names the first; train_gpt.py where it does not."""
    settings = SETTINGS_LINE.search(environment)
    name, files, start = settings[1] if settings else "train_gpt.py", {}, 0
    seen = {name}  # a banner with one of these names is text within a source
    spaced = environment.startswith("Running")  # the public speedrun's script puts empty lines around its banner
    while banner := next_banner(text, start, seen, effort):
        files[name] = text[start : banner[0]]
        if spaced:
            files[name] = files[name].removesuffix(b"\n")
        name = banner_name(BANNER.match(text, banner[0]))
        seen.add(name)
        start = banner[1]
        if spaced and text.startswith(b"\n", start):
            start += 1
    return {**files, name: text[start:]} if text.strip() else {}


def next_banner(text: bytes, start: int, seen: set[str], effort: Effort) -> tuple[int, int] | None:
    """(start, end) of the banner after the file that begins at `start`; None if it is the last. seen: no banner's name."""
    banners = (m.span() for m in BANNER.finditer(text, start) if banner_name(m) not in seen)
    first = next(banners, None)
    if first is None:
        return None
    last = (len(text), len(text))
    end = first_whole(text, start, chain([first], banners, [last]), lambda end: effort.parses(text[start : end[0]]), effort)
    return None if end == last else end


def banner_name(banner: re.Match) -> str:
    return banner[1].removesuffix(b"\r").decode("utf-8", "replace")


# -----------------------------------------------------------------------------
# Step lines


def read_steps(text: bytes, start: int, log: RunLog) -> None:
    """Fill in what the lines from `start` on say, and fault if that is not a complete run."""
    before = max(start - 1, 0)  # the line break before the first
    end = text.find(b"\nsample, after a prompt", before)  # free text, in which anything may stand
    body = text[start : len(text) if end < 0 else end + 1]
    peak = text.rfind(b"\npeak memory", before, len(text) if end < 0 else end)
    if peak < 0:  # older ones have it after the sample
        peak = text.rfind(b"\npeak memory", before)
    if peak >= 0:
        log.peak_memory = text[peak + 1 :].partition(b"\n")[0].decode("utf-8", "replace").strip()
    if end < 0 and not body.endswith(b"\n"):
        whole, _, last = body.rpartition(b"\n")
        if last and not last.endswith(b"ms"):
            log.problems.append("its last line has no end (written to still, or cut): not read")
            body = whole + b"\n"

    between = PLAIN_LINE.split(body)  # text, step, total, ms, text, …: nearly all text is empty
    steps, totals, milliseconds = (between[i::4] for i in (1, 2, 3))
    steps = [*map(int, steps)]
    log.times = dict(zip(steps, map(float, milliseconds), strict=True))
    order, done, twice, foreign, ended = [], 0, "", [], {**log.times}
    told = VALIDATION_LINE.search(body)
    for i, others in enumerate(between[::4]):
        for line in LOOSE_LINE.findall(others) if others else ():
            if told and not OF_TRAINER.match(line):
                foreign.append(line)
                continue
            if not (fields := read_line(line, text, log)):
                continue
            step, total, loss, time = fields
            order += [*steps[done:i], step]
            done = i
            if total:
                log.total = total
            if time is not None:
                log.times[step] = time
            before = log.validations[-1] if log.validations else (None, loss)
            if loss is not None and before[0] == step and before[1] != loss:
                losses = f"step {step} has two validation losses, {before[1]:g} and {loss:g}"
                if told:
                    twice = f"{losses}: which is the run's cannot be told"
                elif len(log.problems) < MAX_PROBLEMS:
                    log.problems.append(f"{losses}: the first counts")
            elif loss is not None:
                log.validations.append((step, loss, time))
    order += steps[done:]
    if foreign:
        example = foreign[0][:60].decode("utf-8", "replace")
        log.problems.append(f"lines of steps that are not the trainer's are not read: {len(foreign)}, such as {example!r}")
    log.total = int(totals[-1]) if totals and log.total is None else log.total
    back = order != sorted(order) and next((a, b) for a, b in pairwise(order) if b < a)
    again = next((f"step {a} stands twice: it was made again" for a, b in pairwise(steps) if a == b), "")
    log.fault = (
        f"step {back[1]} comes after step {back[0]}: more than one run in a log"
        if back
        else twice or again or wrong_time(log) or early_validation(log, ended) or incomplete(log, order, body)
    )
    if end >= 0 and log.fault.startswith("cut short at") and PLAIN_LINE.search(text, end):
        log.fault += ": there a sample begins, behind which nothing is read: give one in mid-run another title"
    if not back:
        drop_other_clock(log)


def read_line(line: bytes, text: bytes, log: RunLog) -> tuple[int, int | None, float | None, float | None] | None:
    """Step, total, validation loss and milliseconds of a step line of whatever format; None if it tells no step."""
    step = LOOSE_STEP.match(line)
    fields: list[float | None] = [None, None]
    unreadable = [] if step else ["step"]
    for i, (what, pattern) in enumerate((("validation loss", LOOSE_LOSS), ("time", LOOSE_TIME))):
        if found := pattern.search(line):
            try:
                fields[i] = float(found[1].replace(b"_", b"?")) * UNITS[(found[2] or b"").strip()]
            except KeyError:
                unreadable.append(f"{what} in ms or s")
            except ValueError:
                unreadable.append(what)
    if unreadable and len(log.problems) < MAX_PROBLEMS:
        number = text.count(b"\n", 0, text.find(line)) + 1
        log.problems.append(f"line {number}: no {' and no '.join(unreadable)} in {line[:60].decode('utf-8', 'replace')!r}")
    return (int(step[1]), int(step[2]) if step[2] else None, *fields) if step else None


def wrong_time(log: RunLog) -> str:
    """Which of its times no clock can have shown; "" if there is none. A hundredth of going back may be one of two clocks'."""
    before, before_step, untimed = 0.0, 0, min(UNTIMED, max(log.times, default=0) // 4)
    told = [(step, time) for step, time in log.times.items()]
    for step, time in sorted(told + [(step, time) for step, _, time in log.validations if time is not None]):
        if not 0 <= time < LONGEST:
            return f"wrong time: {time:g} ms at step {step}"
        if step > untimed and time < 0.99 * before - 1:
            return f"wrong time: {time:g} ms at step {step}, after {before:g} ms at step {before_step}"
        before, before_step = time, step
    return ""


def early_validation(log: RunLog, ended: dict[int, float]) -> str:
    """Which validation's time is before that of its own step; ended: what the steps' own lines say, in ms."""
    for step, _, time in log.validations:
        if time is not None and step > UNTIMED and time < 0.99 * ended.get(step, 0) - 1:
            return f"wrong time: {time:g} ms at the validation of step {step}, which had ended at {ended[step]:g} ms"
    return ""


def drop_other_clock(log: RunLog) -> None:
    """Leave out the times before the last that went back: the clock was set to 0 there, so they tell of no step after it."""
    told = sorted(log.times.items())
    restarts = [step for (_, before), (step, time) in pairwise(told) if time < 0.99 * before - 1]
    if restarts:
        log.restart = restarts[-1]
        log.times = {step: time for step, time in log.times.items() if step >= log.restart}


def at_step(log: RunLog, step: int) -> RunLog:
    """The log as if its run had ended at `step`: nothing after it counts. Its fault, if there was no validation."""
    kept = [validation for validation in log.validations if validation[0] <= step]
    times = {at: time for at, time in log.times.items() if at <= step}
    cut = replace(log, validations=kept, times=times, total=step, problems=log.problems + [f"read up to step {step} alone"])
    if not log.fault or log.fault.startswith(("crashed", "cut short at")):
        order = sorted({*times, *(at for at, _, _ in kept)})
        if not order or order[-1] != step:
            cut.fault = f"it has no step {step}"
        elif not kept or kept[-1][0] != step:
            cut.fault = f"not validated at step {step}, but at {', '.join(f'{at}' for at, _, _ in log.validations) or 'none'}"
        else:
            cut.fault = wrong_time(cut) or incomplete(cut, order, b"")
    return cut


def incomplete(log: RunLog, order: list[int], body: bytes) -> str:
    """Why the run is not complete, "" if it is: a finite validation loss at its last step."""
    last = order[-1] if order else -1
    of_total = f"{last}/{log.total}" if log.total else f"{last}"
    for step, loss, _ in log.validations:
        if not isfinite(loss):
            return f"crashed: the validation loss is {loss} at step {step}"
        if not 0 <= loss <= HIGHEST:
            return f"wrong loss: {loss:g} at step {step}: a cross-entropy is between 0 and, of any run, {HIGHEST:g}"
    if last < 0:
        return "cut short before its first step"
    validated = log.validations[-1][0] if log.validations else -1
    if validated == last and log.total in (None, last):
        if log.total is None:
            log.problems.append(f"its lines tell no total of steps: taken as complete at step {last}")
        return ""
    if errors := ERROR_LINE.findall(body):
        return f"crashed at step {of_total}: {errors[-1][:120].decode('utf-8', 'replace').strip()}"
    if log.total is not None and last < log.total:
        return f"cut short at step {of_total}"
    return f"cut short at step {of_total}: no validation loss there"


# -----------------------------------------------------------------------------
# What made a run, and where: by the parts of its environment, as it started and at each resumption

RESUMED = re.compile(r"^resumed at step (\d{1,9}) from .*, with (?:the same|changed) source.*$", re.MULTILINE)
CUDA_DEVICE = re.compile(r"Properties\(name='([^'\n]+)'(?:[^\n]{0,400}?\buuid=([\w-]+))?")
SMI_ROW = re.compile(
    r"^\| {1,9}\d{1,3} {1,9}(\S[^|\n]{0,80}?) {1,60}(?:On|Off|N/A)? {0,9}\| {1,9}([\dA-Fa-f]{4,8}(?::[\dA-Fa-f]{2}){2}\.\d)",
    re.MULTILINE,
)
MADE_WITH = ("PyTorch", "CUDA", "Triton", "attention", "ranks", "GPUs", "read by its sources")  # of RunLog.facts
MACHINE = (
    ("host", r"(?im)^host(?:name)?\s*[:=]\s*([^\s,]+)"),
    ("driver", r"\bDriver Version: (\S+)"),
    ("kernel", r"(?m)^(\S+), \d+ ranks$"),
    ("CPU", r"(?m)^cpu: (.+ cores(?:, \d+ threads a rank)?)"),
    ("CPU instructions", r"(?m)^products: [^\n]{1,200}, on (\S+)$"),  # of CPUs of one name
    ("ranks", r"(?m), (\d+) ranks$"),
)
DATES = (
    (r"(?m)^(\w{3} \w{3} +\d+ \d\d:\d\d:\d\d) (?:[A-Z]+ )?(\d{4})\s*$", "%a %b %d %H:%M:%S %Y"),  # nvidia-smi's
    (r"\brun_id='(\d{8})-(\d{6})-", "%Y%m%d %H%M%S"),
)


def environment_parts(log: RunLog) -> list[tuple[str, str]]:
    """(environment, diff of the sources) as the run started, without a diff, and at each resumption."""
    marks = [*RESUMED.finditer(log.environment)]
    starts = [0, *(mark.start() for mark in marks)]
    parts = []
    for start, end in zip(starts, [*starts[1:], len(log.environment)], strict=True):
        text = log.environment[start:end]
        line = SETTINGS_LINE.search(text) if start else None
        split = line.end() if line else len(text)
        parts.append((text[:split], text[split:].strip("\n")))
    return parts


def gpus(environment: str) -> list[tuple[str, str]]:
    """(name, UUID or bus id or "") of each GPU that a part of an environment lists."""
    return CUDA_DEVICE.findall(environment) or SMI_ROW.findall(environment)


def made_with(log: RunLog) -> dict[str, str]:
    """What runs of one kind share beside sources and settings: versions, GPUs, ranks, and resumptions with changed source."""
    shared = {name: value for name, value in log.facts.items() if name in MADE_WITH}
    changes = "\n".join(diff for _, diff in environment_parts(log) if diff)
    return shared | ({"resumption with changed source": changes} if changes else {})


def resumed_with_changes(log: RunLog) -> str:
    """The diffs of the sources with which it was resumed; empty: with the same, or not at all."""
    return made_with(log).get("resumption with changed source", "")


def machines(log: RunLog) -> list[dict[str, str]]:
    """Where it ran, as started and at each resumption, as far as the log tells: see MACHINE; GPUs and their ids."""
    found = []
    for environment, _ in environment_parts(log):
        machine = {name: match[1] for name, pattern in MACHINE if (match := re.search(pattern, environment))}
        if listed := gpus(environment):
            machine["GPUs"] = ", ".join(name for name, _ in listed)
            if all(number for _, number in listed):
                machine["GPU ids"] = ", ".join(sorted(number.lower() for _, number in listed))
        found.append(machine)
    return found


def started(log: RunLog) -> datetime | None:
    """When, in the machine's own time zone: from nvidia-smi's table or the run's id; None if neither tells."""
    for pattern, form in DATES:
        if match := re.search(pattern, log.environment):
            try:
                return datetime.strptime(f"{match[1]} {match[2]}", form)
            except ValueError:
                continue
    return None


def resumed_at(log: RunLog) -> list[int]:
    """The steps at which it was resumed."""
    return [int(mark[1]) for mark in RESUMED.finditer(log.environment)]

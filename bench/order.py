"""The orders in which the optimizer launches reductions and works updates: seen, explained, searched and bounded.

    python bench/order.py show logs/RUN.trace.json     # of a run with --trace_steps=A:B: table, picture, reasons, what to try
    python bench/order.py search --machine=8xh100      # the best orders on a machine of bench/machines, beside a bound
    python bench/order.py search --scale=8,16,64,512   # how the step grows with ranks
    python bench/order.py simulate STEP.json           # any optimizer's step, as operations
    python bench/order.py validate --link=1            # does the model predict gloo? (bench/order_validation.py)

search takes the trainer's options too (--grad_dtype=float32). What it prints are predictions. bench/README.md explains.
"""

import argparse
import math
import os
import random
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from launch.environment import go_on

if __name__ == "__main__":
    go_on("requirements.txt", "torch")

from bench import order_pictures, order_validation, schedule_costs, traces
from bench.communication import markdown, model_parameters, refused, rows_of
from bench.schedule_model import (
    ModelError, Operation, Orders, Span, Task, critical_path, exposures, from_file, interference_of, operations_of, reason, simulate,
    step_seconds, window,
)  # fmt: skip
from bench.schedule_search import WORTH, Found, Problem, Together, descend, search
from bench.settings import trainer_settings
from data.shards import number_between, plain_json, read_regular
from launch.console import (
    PICTURES, Parser, console, ended_by_signals, numbers_between, output_file, printable, until_reader_leaves, user_path,
)  # fmt: skip
from train_gpt import SCATTER_ORDER, WORK_ORDER, Hyperparameters, param_table

SHOWN = 0.01  # of a step: shorter exposures are summed up
TELL_EVERY = 10.0  # seconds of a search
RANDOM_ORDERS = 200  # to see what orders are worth at all
BESIDE = {"picture": ".png", "chrome": ".chrome.json"}  # by option: show's files where its user names none
SHARES = {"NorMuon alone": 1 / 2, "with Adam, tied": 1 / 3, "with Adam, split": 1 / 6}  # of a run's steps


def milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.3f}"


def default_orders(labels: Mapping[str, Task]) -> Orders:
    """The script's, of these labels."""
    return Orders(*(tuple(label for label in order if label in labels) for order in (SCATTER_ORDER, WORK_ORDER)))


def teller() -> Callable[[int, int, float], None]:
    """What tells on stderr how far a search is, if it takes long: with 80 labels minutes."""
    told = time.monotonic()

    def tell(start: int, starts: int, seconds: float) -> None:
        nonlocal told
        if time.monotonic() >= told + TELL_EVERY:
            told = time.monotonic()
            console(f"order.py: searching from start {start} of {starts}, best so far {milliseconds(seconds)} ms", "stderr")

    return tell


# -----------------------------------------------------------------------------
# Why a step takes its time


def explain(operations: Sequence[Operation], spans: Mapping[str, Span], slack: float = 1e-9) -> str:
    """Exposed communication, its reasons, and the critical path."""
    total, found, begin = window(spans), exposures(operations, spans), min(span.start for span in spans.values())
    lines = [f"Exposed: no arithmetic runs for {milliseconds(sum(x.seconds for x in found))} of {milliseconds(total)} ms:"]
    long = [exposure for exposure in found if exposure.seconds >= SHOWN * total]
    lines += [f"- {milliseconds(x.seconds)} ms from {milliseconds(x.start - begin)} on: {reason(x, operations)}" for x in long]
    if rest := sum(x.seconds for x in found) - sum(x.seconds for x in long):
        lines.append(f"- {milliseconds(rest)} ms in {len(found) - len(long)} shorter pauses")
    path = critical_path(operations, spans, slack)
    return "\n".join([*lines, "", f"Critical path: {' → '.join(path)}"])


def advice(tasks: Mapping[str, Task], start: Orders, found: Found, now: float) -> str:
    """What to try next, in words and as lines for train_gpt.py."""
    bound = f"no orders are faster than {milliseconds(found.bound)} ms" + ", and these are as fast" * found.exact
    gain = (now - found.seconds) / now if now else 0.0
    if gain < WORTH:
        return f"Keep the orders: the model finds none that is faster ({bound})."
    head = f"Try next, for {milliseconds(found.seconds)} ms instead of {milliseconds(now)} ({gain:.1%} less; {bound}):"
    return f"{head}\n{as_code(found.orders)}"


def as_code(orders: Orders) -> str:
    """For train_gpt.py: with the labels that the step has not, behind those that they follow there."""
    return "\n".join(f"    {name} = {order}" for name, order in zip(("SCATTER_ORDER", "WORK_ORDER"), completed(orders)))


def completed(orders: Orders) -> Orders:
    """The orders of one kind of step as orders of all labels, if they are labels of the script."""
    if not set(orders.work) <= set(WORK_ORDER):
        return orders
    whole = []
    for own, usual in zip(orders, (SCATTER_ORDER, WORK_ORDER)):
        order = list(own)
        for i, label in enumerate(usual):
            if label not in order:
                order.insert(order.index(usual[i - 1]) + 1 if i else 0, label)
        whole.append(tuple(order))
    return Orders(*whole)


# -----------------------------------------------------------------------------
# show


def trace_table(steps: Sequence[traces.TracedStep], tasks: Mapping[str, Task]) -> str:
    """By label, in work order: what it sent, and the medians of its times over steps of one kind, in milliseconds; their sums
    last. tasks: traces.median_tasks of the steps."""
    rows = []
    for label in steps[0].orders.work:
        task = tasks[label]
        waits = [median(step.waits.get((label, phase), 0.0) for step in steps) for phase in ("reduce", "gather")]
        beside = 1000 * (task.before + task.launch + task.behind)
        times = (task.reduce, waits[0], task.update, task.gather, waits[1])
        rows.append([label, (task.reduce_bytes + task.gather_bytes) / 1e6, *(1000 * time for time in times), beside])
    rows.append(["**sum**", *(sum(row[i] for row in rows) for i in range(1, 8))])
    return markdown(["label", "MB sent", "reduce", "exposed wait", "update", "gather", "exposed wait", "beside these"], rows)


def show(args: argparse.Namespace) -> None:
    """One traced step of each kind: the picture, the table, the reasons, and the orders to try."""
    groups = [(kind, steps, traces.typical(steps)) for kind, steps in traces.by_kind(traces.read_trace(args.trace))]
    for option, path in args.beside.items():
        if os.path.lexists(path) and not is_own(path):
            fault = f"{path}: does not say that this tool wrote it, and is not replaced"
            raise ModelError(f"{fault}: name another by --{option}=, or delete it")
    panels = [(f"{kind}, step {step.step}, traced", step.operations, step.spans) for kind, _, step in groups]
    unwritten = draw(panels, args)
    for kind, steps, step in groups:
        tasks, took = traces.median_tasks(steps), sorted(one.seconds for one in steps)
        print(f"\n## {kind}: step {step.step}, the typical one of {len(steps)}\n")
        print(f"{milliseconds(step.seconds)} ms ({milliseconds(took[0])} to {milliseconds(took[-1])}) on rank {step.rank}, the "
              f"slowest; the ranks began within {milliseconds(step.skew)} ms. In the table: medians of the {len(steps)}, ms.\n")  # fmt: skip
        print(trace_table(steps, tasks))
        print(f"\n{explain(step.operations, step.spans, 0.01 * step.seconds)}\n")
        problem = Problem(tasks, channels=step.channels)
        modelled = problem.seconds(step.orders)
        difference = modelled / median(took) - 1 if median(took) else 0.0
        print(f"The model, from this table: {milliseconds(modelled)} ms, {difference:+.1%} from the median.")
        print(advice(tasks, step.orders, search(problem, step.orders, tell=teller()), modelled))
    if unwritten:
        raise ModelError("; ".join(unwritten))


def draw(panels: Sequence[tuple[str, Sequence[Operation], Mapping[str, Span]]], args: argparse.Namespace) -> list[str]:
    """The files that were asked for, all of them before anything is printed: the reader of a pipe may have enough. Returns why
    those of args.beside are not there that could not be written; raises for others."""
    wanted = {args.picture: order_pictures.gantt, args.chrome: order_pictures.chrome_trace}
    wanted.pop(None, None)
    unwritten = {}
    for path, write in wanted.items():
        try:
            write(panels, path)
        except (ModelError, OSError) as error:
            if path not in args.beside.values():
                raise
            unwritten[path] = str(error)
    for path in wanted:
        if path not in unwritten:
            print(f"{path}\n")
    return [*unwritten.values()]


def is_own(path: Path) -> bool:
    """Whether order_pictures wrote it, by what is near its beginning; what cannot be read is none."""
    try:
        return order_pictures.WRITER.encode() in read_regular(path)[:1024]
    except OSError:
        return False


# -----------------------------------------------------------------------------
# simulate


def show_step(args: argparse.Namespace) -> None:
    """A step in a file: {"operations": [{"name", "lane", "seconds", "after", "bytes"}]} and, if need be, "compute_slowdown",
    "communication_slowdown" and "channels"."""
    try:
        found = plain_json(read_regular(args.step))
        operations = [from_file(Operation, {**row, "after": tuple(row.get("after", ()))}) for row in found["operations"]]
        slowdown, channels = interference_of(found), found.get("channels", 1)
        if type(channels) is not int or channels < 1:
            raise ValueError(f"channels is {channels!r:.60}")
    except OSError as error:
        raise ModelError(f"{args.step}: {error.strerror}: give a file with operations") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        wanted = '{"operations": [{"name", "lane", "seconds", "after": [names]}]}'
        raise ModelError(f"{args.step} is no step: {error!r}: write {wanted}") from None
    spans = simulate(operations, slowdown, channels)
    rows = [[op.name, op.lane, *(f"{1000 * time:.3f}" for time in spans[op.name])] for op in operations]
    draw([(args.step.stem, operations, spans)], args)
    print(markdown(["operation", "lane", "starts, ms", "ends, ms"], sorted(rows, key=lambda row: float(row[2]))))
    print(f"\n{explain(operations, spans)}")


# -----------------------------------------------------------------------------
# search


def spread(problem: Problem) -> tuple[float, float]:
    """Median and worst of random orders, in seconds."""
    labels, chance = list(problem.tasks), random.Random(0)
    pick = lambda: tuple(chance.sample(labels, len(labels)))
    took = sorted(problem.seconds(Orders(pick(), pick())) for _ in range(RANDOM_ORDERS))
    return median(took), took[-1]


def search_kinds(h: Hyperparameters, machine: schedule_costs.Machine, world_size: int) -> dict[str, tuple[Problem, Found]]:
    """By kind of step, the best orders."""
    found = {}
    for kind, how in schedule_costs.KINDS.items():
        problem = Problem(schedule_costs.tasks_of(h, machine, world_size, *how), machine.interference)
        found[kind] = problem, search(problem, default_orders(problem.tasks))
    return found


def kinds_table(found: Mapping[str, tuple[Problem, Found]]) -> str:
    rows = []
    for kind, (problem, best) in found.items():
        tasks = problem.tasks.values()
        usual = problem.seconds(default_orders(problem.tasks))
        communication = sum(task.reduce + task.gather for task in tasks)
        compute = sum(task.before + task.launch + task.update + task.behind for task in tasks)
        times = (communication, compute, usual, best.seconds, best.bound, *spread(problem))
        rows.append([kind, *map(milliseconds, times), f"{best.seconds / best.bound - 1:.1%}", "yes" if best.exact else "no"])
    return markdown(["step", "communication", "compute", "the table's orders", "best found", "lower bound",
                     "random orders: median", "worst", "best above bound", "proven best"], rows)  # fmt: skip


def together(found: Mapping[str, tuple[Problem, Found]]) -> str:
    """One pair of orders for all steps, as the script has it: the best that local search finds from each kind's best."""
    steps = Together([(problem, SHARES[kind]) for kind, (problem, _) in found.items()])
    start = Orders(SCATTER_ORDER, WORK_ORDER)
    begins = [start, *(completed(best.orders) for _, best in found.values())]
    orders, seconds = min((descend(steps, begin) for begin in begins), key=lambda pair: pair[1])
    usual = steps.seconds(start)
    if seconds > (1 - WORTH) * usual:
        return f"One pair of orders for all steps: the table's, {milliseconds(usual)} ms in the mean of a run; none is faster."
    return (f"One pair of orders for all steps: {milliseconds(seconds)} ms in the mean of a run, the table's "
            f"{milliseconds(usual)}:\n{as_code(orders)}")  # fmt: skip


def head_start(h: Hyperparameters, machine: schedule_costs.Machine, world_size: int) -> str:
    """How much later the next forward pass ends than without a step, if it waits for all gathers, or for what it reads."""
    rows = []
    for kind, how in schedule_costs.KINDS.items():
        tasks = schedule_costs.tasks_of(h, machine, world_size, *how)
        start, forward = default_orders(tasks), tuple(schedule_costs.next_forward(tasks))
        late = Problem(tasks, machine.interference, forward=forward)
        orders, seconds = min((descend(late, begin) for begin in (start, last_read_last(start))), key=lambda pair: pair[1])
        waits = step_seconds(tasks, start, machine.interference)
        rows.append([kind, *map(milliseconds, (waits, late.seconds(start), seconds)), " ".join(orders.work)])
    return markdown(["step", "all gathers first", "what is read, the table's orders", "best orders", "their work order"], rows)


def in_parts(h: Hyperparameters, machine: schedule_costs.Machine, world_size: int) -> str:
    """Steps with NorMuon alone, if the largest bank were reduced, worked and gathered in equal parts, each with the fixed costs
    of its collectives and kernels: finer pieces overlap where no order helps."""
    tasks = schedule_costs.tasks_of(h, machine, world_size, do_adam=False, tied=True)
    largest, rows = max(tasks, key=lambda label: tasks[label].update), []
    alone, kernels = machine.collective("all-gather", 0, world_size), schedule_costs.KERNELS["normuon"] * machine.kernel
    for parts in range(1, 5):
        fixed = Task(alone, kernels, alone)
        part = Task(*((whole - least) / parts + least for whole, least in zip(tasks[largest], fixed)))
        pieces = {label: task for label, task in tasks.items() if label != largest}
        pieces |= {f"{largest} {i + 1} of {parts}": part for i in range(parts)}
        problem = Problem(pieces, machine.interference)
        found = search(problem, Orders(tuple(pieces), tuple(pieces)))
        rows.append([parts, milliseconds(found.seconds), milliseconds(found.bound), ", ".join(found.orders.work)])
    return markdown([f"parts of {largest}", "best found", "lower bound", "both orders"], rows)


def last_read_last(orders: Orders) -> Orders:
    """The same orders with lm_head's update behind the others, if it is among them: the forward pass reads it last."""
    return Orders(orders.scatter, tuple(sorted(orders.work, key=lambda label: label == "lm_head")))


def sensitivity(h: Hyperparameters, machine: schedule_costs.Machine, world_size: int) -> str:
    """The table's orders and the best, on other links."""
    others = {name: (schedule_costs.read_machine(name), ranks) for name, ranks in
             (("8xh100-pcie", 8), ("8xh100", 8), ("2x8xh100-400g", 16))}  # fmt: skip
    rates = (0.5, 1.5, 3.0, 6.0)
    faster = {}
    for rate in rates:
        links = dict(bandwidth=rate * machine.bandwidth, node_bandwidth=rate * machine.node_bandwidth)
        faster[f"{machine.name}, {rate:g} × its bandwidth"] = machine._replace(**links), world_size
    rows = []
    for name, (other, ranks) in {**others, **faster}.items():
        for kind, (problem, best) in search_kinds(h, other, ranks).items():
            usual = problem.seconds(default_orders(problem.tasks))
            same = best.orders == default_orders(problem.tasks)
            orders = "the table's" if same else f"launch {' '.join(best.orders.scatter)}; work {' '.join(best.orders.work)}"
            rows.append([name, ranks, kind, *map(milliseconds, (usual, best.seconds, best.bound)), orders])
    return markdown(["machine", "ranks", "step", "the table's orders", "best found", "lower bound", "best orders"], rows)


def scale_table(h: Hyperparameters, machine: schedule_costs.Machine, sizes: Sequence[int]) -> str:
    """A step's window by number of ranks, with the table's orders, in both layouts."""
    parameters, table, rows = model_parameters(h), param_table(h), []
    if odd := [ranks for ranks in sizes if ranks > machine.ranks_per_node and ranks % machine.ranks_per_node]:
        raise ModelError(f"--scale: {odd[0]} ranks do not fill nodes of {machine.ranks_per_node:g}: use a multiple")
    for ranks in sizes:
        for layout in ("all ranks", "a node's ranks")[: 1 + (ranks > machine.ranks_per_node)]:
            row = [ranks, layout]
            for how in ((False, True), (True, False)):
                tasks = schedule_costs.tasks_of(h, machine, ranks, *how, node_layout=layout != "all ranks")
                free = machine._replace(latency=0.0, hop=0.0, node_hop=0.0)
                without = schedule_costs.tasks_of(h, free, ranks, *how, node_layout=layout != "all ranks")
                length = lambda tasks: sum(task.reduce + task.gather for task in tasks.values())
                seconds = step_seconds(tasks, default_orders(tasks), machine.interference)
                row += [milliseconds(seconds), f"{1 - length(without) / length(tasks):.0%}"]
            sharers = ranks if layout == "all ranks" else int(machine.ranks_per_node)
            banks = [label for label, config in table.items() if config.may_pad]
            real = [len(rows_of(parameters[label], table[label])) for label in banks]
            row.append(f"{sum(n + -n % sharers for n in real) / sum(real) - 1:.0%}")
            row.append(", ".join(refused(h, sharers)) or "none")
            rows.append(row)
    return markdown(["ranks", "shared by", "NorMuon alone, ms", "of it latency", "with Adam, split, ms", "of it latency",
                     "padding of the banks", "refused today"], rows)  # fmt: skip


def search_orders(args: argparse.Namespace, options: list[str]) -> None:
    if args.tasks:
        return search_file(args)
    h = trainer_settings(options, preset="record")
    machine = schedule_costs.read_machine(args.machine)
    ranks = args.ranks or int(machine.ranks_per_node)
    if not args.scale:
        found, panels = search_kinds(h, machine, ranks), []
        for kind, (problem, _) in found.items():
            operations = operations_of(problem.tasks, default_orders(problem.tasks))
            spans = simulate(operations, problem.interference)
            panels.append((f"{kind}, the table's orders, predicted for {machine.name}", operations, spans))
        draw(panels, args)
    print(f"# Predictions for {machine.name}, {ranks} ranks, in ms\n")
    if undivided := refused(h, ranks):
        print(f"Training refuses so many ranks today: the rows of {', '.join(undivided)} do not divide among them.\n")
    if args.scale:
        return print(scale_table(h, machine, args.scale))
    print(kinds_table(found))
    for (kind, (problem, best)), (_, operations, spans) in zip(found.items(), panels, strict=True):
        print(f"\n## {kind}, the table's orders\n\n{explain(operations, spans)}\n")
        orders = default_orders(problem.tasks)
        print(advice(problem.tasks, orders, best, problem.seconds(orders)))
    print(f"\n{together(found)}\n\n## If the next forward pass waited for what it reads alone\n")
    print(head_start(h, machine, ranks))
    print(f"\n## NorMuon alone, if the largest bank came in parts\n\n{in_parts(h, machine, ranks)}")
    print(f"\n## On other machines\n\n{sensitivity(h, machine, ranks)}")


def search_file(args: argparse.Namespace) -> None:
    """Another optimizer's labels: {"tasks": {label: {"reduce", "update", "gather" …}}}, in seconds; its orders as "scatter" and
    "work", if any; "compute_slowdown", "communication_slowdown"."""
    path = args.tasks
    try:
        found = plain_json(read_regular(path))
        tasks = {label: from_file(Task, row) for label, row in found["tasks"].items()}
        if not tasks or not all(0 <= number < 1e18 for task in tasks.values() for number in task):
            raise ValueError("one at least, and numbers of 0 or more")
        start = Orders(*(tuple(found.get(order, tasks)) for order in ("scatter", "work")))
        if not all(isinstance(label, str) for order in start for label in order):
            raise ValueError("scatter and work are lists of labels")
        slowdown = interference_of(found)
    except OSError as error:
        raise ModelError(f"{path}: {error.strerror}: give a file with tasks") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f'{path} has no tasks: {error!r}: write {{"tasks": {{label: {{"reduce": seconds, …}}}}}}') from None
    problem = Problem(tasks, slowdown)
    operations = operations_of(tasks, start)
    draw([(f"{path.stem}, its orders, predicted", operations, simulate(operations, slowdown))], args)
    print(advice(tasks, start, search(problem, start, tell=teller()), problem.seconds(start)))


# -----------------------------------------------------------------------------
# validate


def validate(args: argparse.Namespace) -> None:
    """Predicted against measured windows of the optimizer's step on gloo."""
    summary = []
    for ranks in args.ranks:
        rate = args.link * ranks / 2
        found = order_validation.measure(ranks, args.orders, args.repetitions, rate, not args.arithmetic)
        slowdown, results = order_validation.compare(found)
        predicted, measured = ([getattr(row, name) for row in results] for name in ("predicted", "measured"))
        errors = sorted(abs(a / b - 1) for a, b in zip(predicted, measured))
        print(f"\n{ranks} ranks: predicted and measured ms of {len(results)} orders, from the fastest predicted\n")
        both = sorted(zip(predicted, measured))
        print("; ".join(f"{milliseconds(a)} {milliseconds(b)}" for a, b in both), flush=True)
        summary.append([ranks, f"{rate:g} Gb/s" if rate else "loopback", len(results), f"{slowdown.compute:.2f}",
                        f"{min(measured) * 1000:.0f} to {max(measured) * 1000:.0f}", f"{errors[len(errors) // 2]:.1%}",
                        f"{errors[-1]:.1%}", f"{order_validation.rank_correlation(predicted, measured):.2f}"])  # fmt: skip
    head = ["ranks", "link", "orders predicted", "slowdown, fitted", "measured, ms", "error, median", "worst"]
    head.append("rank correlation")
    print(f"\n{markdown(head, summary)}")


# -----------------------------------------------------------------------------
# The command


def link_rate(text: str) -> float:
    """argparse type: Gb/s, 0 or more."""
    if not 0 <= (rate := float(text)) < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r}: must be 0 or more, and finite")
    return rate


def main(argv: list[str] | None = None) -> None:
    raw, positive = argparse.RawDescriptionHelpFormatter, number_between(1, 10**6)
    parser = Parser(description=__doc__, formatter_class=raw, allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True)
    shown = commands.add_parser("show", help="explain a trace")
    shown.add_argument("trace", type=Path)
    searched = commands.add_parser("search", help="search the best orders on a machine", allow_abbrev=False)
    searched.add_argument("--machine", default="8xh100", help="of bench/machines, or a path (%(default)s)")
    searched.add_argument("--ranks", type=positive, help="one node's by default")
    searched.add_argument("--scale", type=numbers_between(2, 2**16), help="numbers of ranks, by comma: how the step grows")
    searched.add_argument("--tasks", type=user_path, help="a file with the labels of another optimizer")
    stepped = commands.add_parser("simulate", help="explain a step in a file")
    stepped.add_argument("step", type=Path)
    for command in (shown, searched, stepped):
        command.add_argument("--picture", type=output_file(*PICTURES), help="where to draw both lanes; show: beside the trace")
        command.add_argument("--chrome", type=output_file(".json"), help="spans for ui.perfetto.dev; show: as well")
    validated = commands.add_parser("validate", help="predict gloo's steps")
    validated.add_argument("--ranks", type=numbers_between(2, 1000), default=[2, 4, 8], help="by comma (2,4,8)")
    predicted = "to predict, beside those of the fit; 4 of them, made by hand, always are (%(default)s)"
    validated.add_argument("--orders", type=positive, default=14, help=predicted)
    validated.add_argument("--repetitions", type=positive, default=5, help="of each, of which the least counts (%(default)s)")
    link = "Gb/s of a loopback of two ranks' own, more for more ranks, as root; 0: the machine's (%(default)s)"
    validated.add_argument("--link", type=link_rate, default=0.0, help=link)
    validated.add_argument("--arithmetic", action="store_true", help="real updates, in place of as much sleep")
    args, options = parser.parse_known_args(argv)
    if options and args.command != "search":
        parser.error(f"unrecognized arguments: {' '.join(options)}")
    if args.command == "search":
        if args.tasks and (other := [*options, *(f"--{x}" for x in ("ranks", "scale") if getattr(args, x))]):
            parser.error(f"--tasks has its own times: {other[0]} goes without it")
        if args.scale and (args.picture or args.chrome):
            parser.error("--scale is a table: --picture and --chrome go without it")
    args.beside = {}
    if args.command == "show" and args.trace.name:  # a folder is refused as it is read
        args.beside = {option: args.trace.with_suffix(suffix) for option, suffix in BESIDE.items() if not getattr(args, option)}
        vars(args).update(args.beside)
    files = (("trace", "step", "tasks"), ("picture", "chrome"))
    parser.refuse_replacing(*([getattr(args, x, None) for x in names] for names in files))
    try:
        with until_reader_leaves():
            if args.command == "search":
                search_orders(args, options)
            else:
                {"show": show, "simulate": show_step, "validate": validate}[args.command](args)
    except (ModelError, OSError) as error:
        raise SystemExit(printable(f"order.py: error: {error}")) from None


if __name__ == "__main__":
    with ended_by_signals():
        main()

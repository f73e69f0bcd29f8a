"""What NorMuonAndAdam's steps cost on a machine that a file describes: tasks for bench/schedule_model.py. Predictions, all.

A machine's file says each value with its unit and source. Collectives take the ring's time: (W − 1)/W of the tensor over the
bandwidth, and a latency a hop; an all-reduce twice both, or a tree's 2 log₂ W hops where they are fewer. Ranks fill nodes;
beyond one node the ring's slowest link counts.
"""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from bench.communication import Parameter, model_parameters, padded_bytes, polar_express_flops, rows_of, sent
from bench.schedule_model import Forward, Interference, ModelError, Task
from data.shards import plain_json, read_regular
from train_gpt import POLAR_EXPRESS_COEFFICIENTS, Hyperparameters, NorMuon, ParamConfig, param_table

MACHINES = Path(__file__).resolve().parent / "machines"
TRIANGLE = 21 / 36  # of the tiles of a symmetric product are computed, at 768 × 768
ADAM_BYTES = 16  # an element's moments, fp32, read and written; its parameter and gradient come on top
NORMUON_BYTES = 8 + 6 + 4 + 4  # the momentum, fp32, read and written; Polar Express's own norm; its result twice; the mantissa
KERNELS = {"adam": 1, "normuon": 7 + 3 * len(POLAR_EXPRESS_COEFFICIENTS)}  # launched for a label


class Machine(NamedTuple):
    """The values of a machine's file, in SI units."""

    name: str
    ranks_per_node: float
    bandwidth: float  # bytes a second that a rank sends in a ring within a node
    latency: float  # seconds of a collective that sends nothing
    hop: float  # seconds of each of the ring's steps, within a node
    node_bandwidth: float  # bytes a second that the ring carries from node to node
    node_hop: float  # seconds of a step from node to node
    memory: float  # bytes a second that elementwise kernels reach
    matrix: float  # operations a second that Polar Express's products reach
    kernel: float  # seconds of the shortest kernel, with the gap before the next
    transpose_share: float  # of the memory's rate, for the transposes of a tie, which leave processors to collectives
    compute_slowdown: float  # of arithmetic while collectives run: 0.2 is 20 %
    communication_slowdown: float  # and the other way round

    @property
    def interference(self) -> Interference:
        return Interference(self.compute_slowdown, self.communication_slowdown)

    def collective(self, kind: str, size: float, world_size: int) -> float:
        """Seconds of a collective on a tensor of `size` bytes that is whole on each rank before or after."""
        if world_size == 1:
            return 0.0
        nodes = -(-world_size // int(self.ranks_per_node))
        between = nodes if nodes > 1 else 0  # links of the ring from node to node
        hops = (world_size - 1) / world_size * ((world_size - between) * self.hop + between * self.node_hop)
        if kind == "all-reduce":
            inside = math.log2(min(world_size, self.ranks_per_node))
            hops = 2 * min(hops, math.ceil(inside) * self.hop + math.ceil(math.log2(nodes)) * self.node_hop)
        bandwidth = min(self.bandwidth, self.node_bandwidth) if between else self.bandwidth
        return self.latency + hops + sent(kind, size, world_size) / bandwidth


def read_machine(name: str) -> Machine:
    """A file of bench/machines by its name, or any by its path. Raises ModelError for a value that is missing or wrong."""
    path = Path(name) if name.endswith(".json") else MACHINES / f"{name}.json"
    known = ", ".join(sorted(path.stem for path in MACHINES.glob("*.json")))
    try:
        found = plain_json(read_regular(path))
        values = {field: float(found[field]["value"]) for field in Machine._fields[1:]}
        unsourced = [field for field in Machine._fields[1:] if not found[field]["source"]]
    except OSError as error:
        raise ModelError(f"--machine={name}: {path}: {error.strerror}: use {known}, or a path that ends in .json") from None
    except (ValueError, KeyError, TypeError) as error:
        fields = ", ".join(Machine._fields[1:])
        raise ModelError(f"{path}: {error!r}: each of {fields} needs a value, unit and source") from None
    wrong = [field for field, value in values.items() if not 0 <= value < 1e18 or value == 0 and "slowdown" not in field]
    if wrong or unsourced:
        raise ModelError(f"{path}: {', '.join(wrong or unsourced)}: must be positive, and say its source")
    name, nodes = found.get("name", path.stem), values["ranks_per_node"]
    if not (isinstance(name, str) and name.isprintable()) or nodes % 1:
        raise ModelError(f"{path}: name is {name!r:.60}, ranks_per_node {nodes:g}: must be a line of text, and a whole number")
    return Machine(name, **values)


# -----------------------------------------------------------------------------
# The optimizer's tasks


def update_seconds(parameter: Parameter, config: ParamConfig, rows: int, machine: Machine) -> float:
    """Of one rank that updates so many of a parameter's rows: bytes over the memory's rate, products over the matrix units'."""
    one = rows_of(parameter, config)[0]
    grad = torch.promote_types(parameter.dtype, config.grad_dtype or parameter.dtype).itemsize
    moved = rows * one.numel() * (2 * parameter.dtype.itemsize + grad)
    if not isinstance(config, NorMuon):
        return KERNELS["adam"] * machine.kernel + (moved + rows * one.numel() * ADAM_BYTES) / machine.memory
    height, width = one.shape
    large, small = max(height, width), min(height, width)
    symmetric = 2 * small * small * (large + small)  # of polar_express_flops, in products whose half is computed
    flops = rows * len(POLAR_EXPRESS_COEFFICIENTS) * (polar_express_flops(height, width) - (1 - TRIANGLE) * symmetric)
    elementwise = (moved + rows * one.numel() * NORMUON_BYTES) / machine.memory
    return KERNELS["normuon"] * machine.kernel + elementwise + flops / machine.matrix


def tasks_of(
    h: Hyperparameters, machine: Machine, world_size: int, do_adam: bool, tied: bool, node_layout: bool = False
) -> dict[str, Task]:
    """What a step does for each label that it updates, on the busiest rank, in the table's order.

    node_layout: shares are those of the ranks of one node, the same on all nodes: a gradient is reduced and scattered within
    the node, then all-reduced between the nodes, and parameters are gathered within the node.
    """
    parameters, table, tasks = model_parameters(h), param_table(h), {}
    sharers = min(world_size, int(machine.ranks_per_node)) if node_layout else world_size
    nodes = world_size // sharers
    for label, config in table.items():
        if not (do_adam or config.every_step) or tied and config.tied_to:
            continue
        parameter, sharded = parameters[label], config.comms == "sharded" and world_size > 1
        grad_dtype = torch.promote_types(parameter.dtype, config.grad_dtype or parameter.dtype)
        sizes = {phase: padded_bytes(parameter, config, dtype, sharers) for phase, dtype in
                 (("reduce", grad_dtype), ("gather", parameter.dtype))}  # fmt: skip
        kind = "reduce-scatter" if sharded else "all-reduce"
        reduce = machine.collective(kind, sizes["reduce"], sharers if sharded else world_size)
        if sharded and nodes > 1:  # each rank's share over its node's links, which the node's ranks divide
            between = machine._replace(ranks_per_node=1, node_bandwidth=machine.node_bandwidth / machine.ranks_per_node)
            reduce += between.collective("all-reduce", sizes["reduce"] / sharers, nodes)
        rows = -(-len(rows_of(parameter, config)) // sharers) if sharded else len(rows_of(parameter, config))
        before = behind = 0.0
        if tied and label in (row.tied_to for row in table.values()):
            rate = machine.memory * (machine.transpose_share if world_size > 1 else 1.0)
            before, behind = 3 * sizes["gather"] / rate, 2 * sizes["gather"] / rate
        tasks[label] = Task(
            reduce=reduce,
            update=update_seconds(parameter, config, rows, machine),
            gather=machine.collective("all-gather", sizes["gather"], sharers) if sharded else 0.0,
            before=before,
            behind=behind,
            reduce_bytes=sent(kind, sizes["reduce"], sharers if sharded else world_size),
            gather_bytes=sent("all-gather", sizes["gather"], sharers) if sharded else 0.0,
        )
    return tasks


KINDS = {"NorMuon alone": (False, True), "with Adam, tied": (True, True), "with Adam, split": (True, False)}


# Of a micro-batch of 16,384 tokens on one H100, as bench/codegen.py predicts it (README: "This recipe"): embeddings; all
# between them and the head; the head's product and loss. Tables are looked up at once; a bank is one tensor for all layers.
FORWARD_SECONDS = {"look-ups": 0.07e-3, "layers": 6.36e-3, "head and loss": 2.49e-3}


def next_forward(tasks: dict[str, Task]) -> Iterator[Forward]:
    """The parts of the next forward pass, with those of this step's labels whose new values each reads first."""
    late = {"lm_head": "head and loss"}
    first = {label: "look-ups" for label in ("embed", "value_embeds", "bigram_embed")}
    for part, seconds in FORWARD_SECONDS.items():
        yield Forward(part, seconds, tuple(label for label in tasks if {**first, **late}.get(label, "layers") == part))

"""bench/codegen.py counts what generated code does: against known sizes, and the hand-written table
of bench/kernels.py."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton has no wheel here: its kernels compile elsewhere")

from bench import codegen
from bench import kernels as bench_kernels
from bench.generated import launched
from common import ROOT

T, DIM, HIDDEN, VOCAB = 4096, 768, 3072, 50304
X = 2 * T * DIM  # bytes of a bf16 (T, DIM)

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="a fake GPU is built by g++")


def run(*command: str) -> subprocess.CompletedProcess:
    place = {"PYTHONPATH": str(ROOT), "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"}
    environ = os.environ | place | {"OMP_NUM_THREADS": "1"}
    output = dict(capture_output=True, text=True, timeout=600)
    return subprocess.run([sys.executable, *command], cwd=ROOT, env=environ, **output)


# Counting


@pytest.fixture(scope="module")
def graphs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict]]:
    """The graphs of the small functions of small_graphs.py, by name."""
    path = tmp_path_factory.mktemp("codegen") / "graphs.json"
    done = run("tests/bench/small_graphs.py", str(path))
    assert done.returncode == 0, done.stderr
    return json.loads(path.read_text())


def only_kernel(graphs: list[dict]) -> dict:
    ((kernel,),) = [graph["kernels"] for graph in graphs]
    return kernel


MOVED = {
    "chain": 3 * X,  # two in, one out, nothing in between
    "reduction": X + 4 * T,
    "neighbours": X + X - 2 * DIM,  # each row read once, though two results want it
    "columns": 3 * X // 4,  # of the rows, the two quarters that are used
    "lookup": 4 * T + 2 * X,  # tokens, their rows, the result: not the table
}


@pytest.mark.parametrize("name", MOVED)
def test_a_kernel_moves_what_it_touches(graphs: dict, name: str) -> None:
    assert only_kernel(graphs[name])["bytes"] == MOVED[name]


def test_instructions_are_those_of_every_warp(graphs: dict) -> None:
    """One special function an element; and about as many instructions as such a kernel can have."""
    kernel = only_kernel(graphs["exponential"])
    assert kernel["special"] == T * DIM
    assert 1.5 < 32 * kernel["instructions"] / (T * DIM) < 10
    assert only_kernel(graphs["chain"])["special"] == 2 * T * DIM  # a sigmoid: and a division


def test_a_forward_keeps_what_its_backward_reads(graphs: dict) -> None:
    """The norm its result and 1/rms; the MLP its activation: inputs and weights are there anyway."""
    assert [graph["phase"] for graph in graphs["norm"]] == ["forward", "backward"]
    assert graphs["norm"][0]["saved"] == X + 4 * T
    assert graphs["mlp"][0]["saved"] == 2 * T * HIDDEN


def test_matmuls_and_operators_do_what_their_shapes_say(graphs: dict) -> None:
    """Of the MLP: two matmuls forward and four backward, one of each by our kernel."""
    forward, backward = graphs["mlp"]
    kernels = forward["kernels"] + backward["kernels"]
    assert [kernel["flops"] for kernel in kernels] == [2 * T * DIM * HIDDEN] * 6
    ours = [kernel for kernel in kernels if kernel["operator"]]
    assert [kernel["name"] for kernel in ours] == ["relu_squared_kernel"] * 2
    weights, hidden = 2 * DIM * HIDDEN, 2 * T * HIDDEN
    expected = [X + weights + hidden, X + weights + 2 * hidden]
    assert [kernel["bytes"] for kernel in ours] == expected


def test_quantizing_an_mlp_costs_one_pass_over_its_input(graphs: dict) -> None:
    """The norm takes the largest of its rows along; the cast reads 16 bits and writes 8."""
    forward = graphs["fp8 mlp"][0]["kernels"]
    bytes_ = [k["bytes"] for k in forward if k["kind"] == "generated" and [T, DIM] in k["shapes"]]
    assert bytes_ == [2 * X + 2 * 4 * T, 1.5 * X + 4]
    assert [k["name"] for k in forward if k["kind"] == "fp8 kernel"] == ["relu_squared_kernel"]


@pytest.mark.parametrize("name", bench_kernels.cases())
def test_our_kernels_move_and_compute_what_the_table_says(name: str) -> None:
    """What is read from the compiled kernel is what bench/kernels.py says of it, by hand. Beside it
    there are a number a row (targets, sums, losses), and of the loss two for each strip of a row."""
    case = bench_kernels.cases()[name]
    kernel = launched(bench_kernels.launch_of(case, 90))
    more = 49152 * (64 + 8 * 50) if "cross_entropy" in name or "loss" in name else 0
    assert case.must <= kernel.bytes <= 1.0001 * case.must + more
    if case.matrix:
        assert kernel.flops == pytest.approx(case.operations, rel=1e-6)
    elif name == "cross_entropy":
        assert kernel.special == pytest.approx(case.operations, rel=1e-3)
        assert 10 < 32 * kernel.instructions / (case.operations / 2) < 40


# Times and groups


def kernel(**changes: object) -> dict:
    zeros = dict(bytes=0.0, instructions=0.0, special=0.0, flops=0.0, programs=0, window=-1)
    texts = dict(name="k", kind="generated", operator="", shape="")
    return zeros | texts | dict(paths=[], targets=[], shapes=[[T, DIM]]) | changes


TIMES = [
    ({}, codegen.LAUNCH),
    ({"bytes": 2.9e9}, 1e-3),
    ({"bytes": 2.9e9, "instructions": 2 * 132 * 2 * 1.7e6}, 2e-3),  # two a clock and processor
    ({"bytes": 2.9e9, "special": 3 * 16 * 132 * 1.98e6}, 3e-3),
    ({"kind": "product", "flops": 6.2e11}, 1e-3),
    ({"kind": "product", "flops": 1.0}, codegen.TINY_PRODUCT),
    ({"kind": "kernel", "bytes": 2.9e9, "programs": 33}, 4e-3),  # a quarter of the processors
    ({"kind": "kernel", "flops": 5.4e11, "programs": 198}, 4e-3 / 3),  # one wave and a half: two
    ({"kind": "fp8 kernel", "flops": 1e12}, 1e-3),
    ({"kind": "fp8 kernel", "flops": 1e12, "bytes": 5.8e9}, 2e-3),
]


@pytest.mark.parametrize("changes, expected", TIMES)
def test_a_time_is_the_longest_of_the_limits(changes: dict, expected: float) -> None:
    assert codegen.seconds(kernel(**changes), "forward", T) == pytest.approx(expected)


def test_keys_are_bounded_by_window_and_documents() -> None:
    assert codegen.mean_keys(0, 1) == 0
    assert codegen.mean_keys(16, 1) == pytest.approx(16, rel=0.05)
    assert codegen.mean_keys(10**6, 1) == codegen.mean_keys(2048, 1) < 1024
    assert codegen.mean_keys(256, 2) > codegen.mean_keys(256, 1)  # two positions a token


HIDDEN_STATES = ["s.py:forward", "s.py:hidden_states"]
PATHS = {
    codegen.QK: dict(paths=[[*HIDDEN_STATES, "s.py:attention", "k.py:norm"]]),
    codegen.NORMS: dict(paths=[[*HIDDEN_STATES, "k.py:norm"]]),
    "gates, values": dict(paths=[HIDDEN_STATES], targets=["aten.sigmoid.default"]),
    "weight scales, banks": dict(shapes=[[3 * DIM, DIM]], paths=[HIDDEN_STATES]),
    "embeddings": dict(targets=["aten.embedding.default"]),
    "idea()": dict(paths=[[*HIDDEN_STATES, "s.py:idea"]]),
    "loss, quantisation": dict(kind="kernel", name="loss_kernel"),
    "MLP kernels": dict(kind="fp8 kernel", name="relu_squared_kernel", flops=1e12),
    "gates' matmuls": dict(kind="product", flops=1e7),
    "small": dict(bytes=9e5),
}


@pytest.mark.parametrize("group", PATHS)
def test_a_group_is_where_the_script_computes_it(group: str) -> None:
    assert codegen.group_of(kernel(**{"bytes": 1e8} | PATHS[group]), T)[0] == group


def test_a_table_adds_up() -> None:
    """A forward of one elementwise kernel and one matmul, a backward of that kernel."""
    norm = kernel(bytes=2.9e9, **PATHS[codegen.NORMS])
    forward = dict(phase="forward", saved=5 * 10**9)
    forward["kernels"] = [norm, kernel(kind="product", flops=6.2e12)]
    text = codegen.group_table([forward, dict(phase="backward", saved=0, kernels=[norm])], T)
    rows = text.splitlines()[2:]
    cells = [[cell.strip() for cell in row[1:-1].split("|")] for row in rows]
    assert cells == [
        ["matmuls", "forward", "1", "0.00", "10.00"],
        [codegen.NORMS, "forward", "1", "2.90", "1.00"],
        [codegen.NORMS, "backward", "1", "2.90", "1.00"],
        ["elementwise and reductions", "", "2", "5.80", "2.00"],
        ["**all**, with gaps between them", "", "3", "", "12.00"],
        ["saved for backward", "", "", "5.00", ""],
    ]


def test_an_update_is_its_kernels_and_their_gaps() -> None:
    update = {"sent": 300e6, "kernels": [kernel(bytes=2.9e9)] * 10}
    text = codegen.optimizer_table({"8": {"with Adam, tied": update}})
    assert text.splitlines()[-1] == "| 8 | with Adam, tied | 10 | 10.01 | 300 |"


# The command

IDEA = """
import sys
sys.path.insert(0, {root!r})
exec(compile(open({script!r}).read(), __file__, "exec"))  # its functions' globals are here
LAYERS = (Layer(0, "short", paired=True, value_gate=True),)
ATTENTION_LAYERS = VALUE_LAYERS = VALUE_GATES = MLP_BANK_LAYERS = 1
SCALARS |= {{"sa_lambda": [0.5, 1.0]}}
MUDD = (MUDD[0], {{"c0": 0.0, "value_embed": 0.0}})
from bench import generated
generated.CONFIGS = 1  # of a kernel: the fewest of several are counted in small_graphs.py
"""


@pytest.mark.slow
def test_the_command_counts_a_script_and_a_run_compiles_what_it_must(tmp_path: Path) -> None:
    """Of a model with one layer: its own matmuls, and more kept than its hidden layer. In its warm-up
    three graphs of training, forward and backward, and one of validation; the run's model has none."""
    idea, counted = tmp_path / "idea.py", tmp_path / "counted.json"
    idea.write_text(IDEA.format(root=str(ROOT), script=str(ROOT / "train_gpt.py")))
    asked = [
        f"--tokens={T}",
        "--warm_up",
        f"--output={counted}",
        f"--save_code={tmp_path / 'code'}",
    ]
    done = run("bench/codegen.py", str(idea), *asked)
    assert done.returncode == 0, done.stderr
    found = json.loads(counted.read_text())[0]
    graphs_of = {what: graphs for what, graphs, _ in found["warm_up"]}
    assert list(graphs_of.values()) == [2, 1, 2, 0, 2, 0, 0, 0, 11, 0], graphs_of
    graphs = found["passes"][str(T)]
    assert [graph["phase"] for graph in graphs] == ["forward", "backward"]
    assert 2 * T * HIDDEN < graphs[0]["saved"] < 4 * T * VOCAB
    kernels = [kernel for graph in graphs for kernel in graph["kernels"]]
    matmuls = [x["flops"] for x in kernels if codegen.group_of(x, T)[0] == "matmuls"]
    square = 2 * T * DIM * DIM
    # qkv and o; of the MLP's six matmuls, four
    assert sum(matmuls) == 3 * (3 * square + square) + 4 * 4 * square
    groups = {codegen.group_of(kernel, T)[0] for kernel in kernels}
    assert {"attention", "embeddings", "MLP kernels", "LM head, FP8 matmuls"} <= groups
    names = {path.name for path in (tmp_path / "code").iterdir()}
    assert names == {f"idea-{T}-forward.py", f"idea-{T}-backward.py"}

"""bench/codegen.py counts what generated code does: against known sizes, and the table of bench/kernels.py."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton has no wheel here: its kernels run and compile elsewhere")

from bench import codegen, fake_gpu
from bench import kernels as bench_kernels
from bench.generated import accesses_of, launched
from common import ROOT

T, DIM, HIDDEN, VOCAB = 4096, 768, 3072, 50304
X = 2 * T * DIM  # bytes of a bf16 (T, DIM)

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="a fake GPU is built by g++, which is not here")


def run(*command: str, **environment: str) -> subprocess.CompletedProcess:
    place = {"PYTHONPATH": str(ROOT), "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, timeout=600, cwd=ROOT, env=os.environ | place | environment
    )


def refused(capsys: pytest.CaptureFixture, *arguments: str) -> str:
    """The message with which these arguments end the program, that prints nothing else."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as exit_:
        codegen.main([*arguments])
    printed, code = capsys.readouterr(), exit_.value.code
    assert code and printed.out == ""
    return code if isinstance(code, str) else printed.err


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


@pytest.mark.parametrize(
    "name, expected",
    [
        ("chain", 3 * X),  # two in, one out, nothing in between
        ("reduction", X + 4 * T),
        ("neighbours", X + X - 2 * DIM),  # each row read once, though two results want it
        ("columns", 3 * X // 4),  # of the rows, the two quarters that are used
        ("lookup", 4 * T + 2 * X),  # tokens, their rows, the result: not the table
    ],
)
def test_a_kernel_moves_what_it_touches(graphs: dict, name: str, expected: int) -> None:
    assert only_kernel(graphs[name])["bytes"] == expected


def test_instructions_are_those_of_every_warp(graphs: dict) -> None:
    """One special function an element; and about as many instructions as such a kernel can have: loads and stores of 16 bytes
    take 2 for 4 elements of fp32, each element at least its exponential, and none more than ten."""
    kernel = only_kernel(graphs["exponential"])
    assert kernel["special"] == T * DIM
    assert 1.5 < 32 * kernel["instructions"] / (T * DIM) < 10


def test_a_sigmoid_takes_an_exponential_and_a_division(graphs: dict) -> None:
    assert only_kernel(graphs["chain"])["special"] == 2 * T * DIM


def test_a_forward_keeps_what_its_backward_reads(graphs: dict) -> None:
    """The norm its result and 1/rms; the MLP its activation, as inputs and weights are there anyway."""
    assert [graph["phase"] for graph in graphs["norm"]] == ["forward", "backward"]
    assert graphs["norm"][0]["saved"] == X + 4 * T
    assert graphs["mlp"][0]["saved"] == 2 * T * HIDDEN


def test_products_and_operators_do_what_their_shapes_say(graphs: dict) -> None:
    """Of the MLP: two products each forward and four backward of 2 T dim hidden operations, one of each by our kernel."""
    forward, backward = graphs["mlp"]
    kernels = forward["kernels"] + backward["kernels"]
    assert [kernel["flops"] for kernel in kernels] == [2 * T * DIM * HIDDEN] * 6
    ours = [kernel for kernel in kernels if kernel["operator"]]
    assert [kernel["name"] for kernel in ours] == ["relu_squared_kernel"] * 2
    weights, hidden = 2 * DIM * HIDDEN, 2 * T * HIDDEN
    assert [kernel["bytes"] for kernel in ours] == [X + weights + hidden, X + weights + 2 * hidden]


def test_a_kernel_knows_the_functions_it_comes_from(graphs: dict) -> None:
    for graph in graphs["norm"]:
        assert "norm" in codegen.functions(only_kernel([graph]))
    assert "norm" not in codegen.functions(only_kernel(graphs["chain"]))


@pytest.mark.parametrize("name", bench_kernels.CASES)
def test_our_kernels_move_and_compute_what_the_table_says(name: str) -> None:
    """What is read from the compiled kernel is what bench/kernels.py says of it, and that was written by hand. Beside it there
    are a number a row (targets, sums, losses), and the loss's partial sums."""
    case = bench_kernels.CASES[name]
    launch = bench_kernels.launch_of(case, 90)
    kernel = launched(launch)
    rows = 0 if "cross_entropy" not in name and "loss" not in name else 49152
    assert case.must <= kernel.bytes <= 1.0001 * case.moved + 64 * rows
    if case.matrix:
        assert kernel.flops == pytest.approx(case.operations, rel=1e-6)
    elif name == "cross_entropy":
        assert kernel.special == pytest.approx(case.operations, rel=1e-3)
        assert 10 < 32 * kernel.instructions / (case.operations / 2) < 40


TTIR = """
tt.func public @kernel(%x: !tt.ptr<bf16> loc("x"), %y: !tt.ptr<f32>, %n: i32) attributes {noinline = false} {
  %a = tt.splat %x : !tt.ptr<bf16> -> tensor<64x1x!tt.ptr<bf16>> loc(#loc)
  %b = tt.addptr %a, %o : tensor<64x1x!tt.ptr<bf16>>, tensor<64x1xi32> loc(#loc)
  %c = scf.for %i = %c0 to %n step %c1 iter_args(%p = %b) -> (tensor<64x1x!tt.ptr<bf16>>)  : i32 {
    %d = scf.for %j = %c0 to %n step %c1 iter_args(%s = %zero) -> (tensor<64xf32>)  : i32 {
      %e = tt.broadcast %p : tensor<64x1x!tt.ptr<bf16>> -> tensor<64x32x!tt.ptr<bf16>> loc(#loc)
      %f = tt.load %e, %m : tensor<64x32x!tt.ptr<bf16>> loc(#loc)
      scf.yield %s : tensor<64xf32> loc(#loc)
    } loc(#loc)
    scf.yield %p : tensor<64x1x!tt.ptr<bf16>> loc(#loc)
  } loc(#loc)
  %g = tt.splat %y : !tt.ptr<f32> -> tensor<64x!tt.ptr<f32>> loc(#loc)
  tt.store %g, %d : tensor<64x!tt.ptr<f32>> loc(#loc)
  %h = tt.load %y : !tt.ptr<f32> loc(#loc)
  tt.return loc(#loc)
} loc(#loc)
"""


def test_accesses_are_followed_to_their_arguments_and_loops() -> None:
    accesses, innermost, has_dot = accesses_of(TTIR)
    assert accesses == [("x", 64 * 32, False, 1), ("y", 64, True, -1), ("y", 1, False, -1)]
    assert innermost == [1] and not has_dot


# Times and groups


def kernel(**changes: object) -> dict:
    nothing = dict(name="k", kind="generated", bytes=0.0, instructions=0.0, special=0.0, flops=0.0, programs=0, operator="",
                   paths=[], lines=[], targets=[], shapes=[[T, DIM]], shape="", window=-1)  # fmt: skip
    return nothing | changes


@pytest.mark.parametrize(
    "changes, expected",
    [
        ({}, codegen.LAUNCH),
        ({"bytes": 2.9e9}, 1e-3),
        ({"bytes": 2.9e9, "instructions": 2 * 132 * 2 * 1.7e6}, 2e-3),  # two a clock and processor
        ({"bytes": 2.9e9, "special": 3 * 16 * 132 * 1.98e6}, 3e-3),
        ({"kind": "product", "flops": 6.2e11}, 1e-3),
        ({"kind": "product", "flops": 1.0}, codegen.TINY_PRODUCT),
        ({"kind": "kernel", "bytes": 2.9e9, "programs": 33}, 4e-3),  # a quarter of the processors
        ({"kind": "kernel", "flops": 5.4e11, "programs": 198}, 4e-3 / 3),  # one wave and a half: two waves
    ],
)
def test_a_time_is_the_longest_of_the_limits(changes: dict, expected: float) -> None:
    assert codegen.seconds(kernel(**changes), "forward", T, "FA3") == pytest.approx(expected)


def test_keys_are_bounded_by_window_and_documents() -> None:
    assert codegen.mean_keys(0, 1) == 0
    assert codegen.mean_keys(16, 1) == pytest.approx(16, rel=0.05)  # nearly all positions have as many before them
    assert codegen.mean_keys(10**6, 1) == codegen.mean_keys(2048, 1) < 1024
    assert codegen.mean_keys(256, 2) > codegen.mean_keys(256, 1)  # twice the positions a token: documents are longer


PATHS = {
    "q, k: norm, rotation, offset": dict(paths=[["s.py:forward", "s.py:hidden_states", "s.py:attention", "k.py:norm"]]),
    "norms, residual, lambdas": dict(paths=[["s.py:forward", "s.py:hidden_states", "k.py:norm"]]),
    "gates, values": dict(paths=[["s.py:forward", "s.py:hidden_states"]], targets=["aten.sigmoid.default"]),
    "weight scales, banks": dict(shapes=[[3 * DIM, DIM]], paths=[["s.py:forward", "s.py:hidden_states"]]),
    "embeddings": dict(targets=["aten.embedding.default"]),
    "idea()": dict(paths=[["s.py:forward", "s.py:hidden_states", "s.py:idea"]]),
    "loss, quantisation": dict(kind="kernel", name="loss_kernel"),
    "MLP kernels": dict(kind="kernel", flops=1e12),
    "gates' products": dict(kind="product", flops=1e7),
}


@pytest.mark.parametrize("group", PATHS)
def test_a_group_is_where_the_script_computes_it(group: str) -> None:
    assert codegen.group_of(kernel(bytes=1e8, **PATHS[group]), T)[0] == group


def test_a_kernel_below_a_megabyte_is_small() -> None:
    assert codegen.group_of(kernel(bytes=9e5, targets=["aten.sigmoid.default"]), T) == ("small", True)


def made(script: str, seconds: float, saved: int) -> dict:
    """A script whose forward has one elementwise kernel of so many seconds, and one product."""
    norm = kernel(bytes=seconds * codegen.MEMORY, **PATHS["norms, residual, lambdas"])
    graphs = [{"phase": "forward", "saved": saved, "kernels": [norm, kernel(kind="product", flops=6.2e12)]}]
    graphs.append({"phase": "backward", "saved": 0, "kernels": [norm]})
    update = {"sent": 300e6, "kernels": [kernel(bytes=2.9e9)]}
    updates = {"8": {name: update for name in codegen.STEPS}}
    stages = [{"micro_batches": 8, "tokens": T, "until": 1.0}]
    return {"script": script, "passes": {str(T): graphs}, "updates": updates, "stages": stages}


def cells(text: str, start: str) -> list[str]:
    (line,) = [line for line in text.splitlines() if line.startswith(f"| {start} |")]
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_a_table_adds_up() -> None:
    text = codegen.pass_table([made("a.py", 1e-3, 5 * 10**9)], T, "FA3")
    assert cells(text, "norms, residual, lambdas | forward")[2:] == ["1", "2.90", "1.00"]
    assert cells(text, "elementwise and reductions")[2:] == ["2", "", "2.00"]
    assert cells(text, r"**all**")[2:] == ["3", "", "12.00"]  # 10 of the product, 2, and 0.003 of gaps
    assert cells(text, "saved for backward")[3] == "5.00"


def test_two_scripts_stand_side_by_side() -> None:
    text = codegen.pass_table([made("idea.py", 1.5e-3, 4 * 10**9), made("train_gpt.py", 1e-3, 5 * 10**9)], T, "FA3")
    assert cells(text, "norms, residual, lambdas | backward")[2:] == ["1", "4.35", "1.50", "1", "2.90", "1.00", "+0.50 ms"]
    assert cells(text, "**all**")[-1] == "+1.00 ms"
    assert cells(text, "saved for backward")[-1] == "-1.00 GB"


def test_a_step_is_its_passes_updates_and_traffic() -> None:
    """On 8 ranks one micro-batch of 12.003 ms; an update of a kernel of 1 ms and a gap; 300 MB at 300 GB/s."""
    one = made("a.py", 1e-3, 0)
    assert codegen.step_seconds(one, 0, 8, "FA3") == pytest.approx(12.003e-3 + 1.001e-3 + 1e-3)


# The command

IDEA = """
import sys
sys.path.insert(0, {root!r})
exec(compile(open({script!r}).read(), __file__, "exec"))  # the trainer, its functions' globals here
LAYERS = (Layer("short", paired=True, value_gate=6, keep="backout"),)
ATTENTION_LAYERS = VALUE_LAYERS = MLP_BANK_LAYERS = 1
SCALARS |= {{"resid_lambda": [1.1], "sa_lambda": [0.5, 1.0], "bigram_lambda": [0.1]}}
from bench import generated
generated.CONFIGS = 1  # of a kernel: the fewest of several are counted in small_graphs.py
"""


def test_the_command_shows_a_script_and_two_beside_each_other(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Of a model with one layer: the products are its own, what is kept is more than its hidden layer, and less than all."""
    idea, counted = tmp_path / "idea.py", tmp_path / "counted.json"
    idea.write_text(IDEA.format(root=str(ROOT), script=str(ROOT / "train_gpt.py")))
    done = run("bench/codegen.py", str(idea), f"--tokens={T}", f"--output={counted}", f"--save-code={tmp_path / 'code'}")
    assert done.returncode == 0, done.stderr
    graphs = json.loads(counted.read_text())[0]["passes"][str(T)]
    assert [graph["phase"] for graph in graphs] == ["forward", "backward"]
    assert 2 * T * HIDDEN < graphs[0]["saved"] < 4 * T * VOCAB
    kernels = [(graph["phase"], kernel) for graph in graphs for kernel in graph["kernels"]]
    products = [kernel["flops"] for _, kernel in kernels if codegen.group_of(kernel, T)[0] == "products"]
    square = 2 * T * DIM * DIM
    assert sum(products) == 3 * (3 * square + square) + 4 * 4 * square  # qkv and o; of the MLP's six products, four
    groups = {(phase, codegen.group_of(kernel, T)[0]) for phase, kernel in kernels}
    expected = {"attention", "embeddings", "MLP kernels", "head, FP8 products", "loss, quantisation"}
    assert {(phase, name) for phase in ("forward", "backward") for name in expected} - groups <= {
        ("backward", "loss, quantisation")
    }
    assert {path.name for path in (tmp_path / "code").iterdir()} == {f"idea-{T}-forward.py", f"idea-{T}-backward.py"}
    codegen.main([str(counted), f"--against={counted}", f"--tokens={T}"])
    assert cells(capsys.readouterr().out, "**all**")[-1] == "+0.00 ms"
    check_counted_otherwise(tmp_path, counted, capsys)


def check_counted_otherwise(folder: Path, counted: Path, capsys: pytest.CaptureFixture) -> None:
    """Counts of other options, or of another compiler, are no counts of these: training passed for validation."""
    (found,), other = json.loads(counted.read_text()), folder / "other.json"
    cases = [
        ({}, ["--eval"], "was counted otherwise, by --eval: "),
        ({"eval": True}, [], "was counted otherwise, by --eval: "),
        ({"saved": True}, [], "was counted otherwise, by --saved: "),
        ({}, ["--tokens=256"], "was counted otherwise, by --tokens=256: "),
        ({}, ["--optimizer"], "was counted otherwise, by --optimizer --world_size=8: "),
        *[({"passes": {f"{T}": wrong}}, [], "holds no counts of this version: ") for wrong in (5, [5], [{}])],
        ({"passes": None}, [], "holds no counts of this version: "),
        ({"torch": "1.0"}, [f"--against={counted}"], "was counted by PyTorch 1.0, "),
    ]
    for change, options, said in cases:
        other.write_text(json.dumps([found | change]))
        message = refused(capsys, str(other), *([f"--tokens={T}"] if "--tokens=256" not in options else []), *options)
        assert message.startswith(f"bench/codegen.py: {other}") and said in message and "\n" not in message
    other.write_text(json.dumps([found | {"triton": "\x1b[2J3", "script": "\x1b]0;x\x07.py"}]))
    codegen.main([str(other), f"--tokens={T}"])
    assert "Triton \\x1b[2J3" in (shown := capsys.readouterr().out) and not {"\x1b", "\x07"} & {*shown}
    for text in ("", "{}", "[]", "[1]", "x", "[" * 100_000):
        other.write_text(text)
        assert refused(capsys, str(other)).endswith("holds no counts of this version: make it anew with --output")
    message = refused(capsys, str(other), f"--against={counted}", f"--output={folder}/./counted.json")
    assert f"error: {counted} is what is read, and would be replaced: name another file" in message
    message = refused(capsys, str(counted), f"--output={folder}/no/such.json")
    assert message == f"bench/codegen.py: error: {folder}/no/such.json: No such file or directory"


TOLD_APART = {
    "train_gpt.py": ["train_gpt.py"],
    "idea.py train_gpt.py": ["idea.py", "train_gpt.py"],
    "/p/ideas/train_gpt.py /p/train_gpt.py": ["ideas/train_gpt.py", "p/train_gpt.py"],
    "/p/a/x/train_gpt.py /p/b/x/train_gpt.py": ["a/x/train_gpt.py", "b/x/train_gpt.py"],
    "/train_gpt.py /p/train_gpt.py": ["train_gpt.py", "p/train_gpt.py"],
    "base.json base.py": ["base.json", "base.py"],
    "idea.py ./x/../idea.py": ["idea.py", "idea.py"],
}


@pytest.mark.parametrize("paths", TOLD_APART)
def test_scripts_of_one_name_are_told_apart_by_their_folders(paths: str) -> None:
    assert codegen.told_apart([Path(path) for path in paths.split()]) == TOLD_APART[paths]


def counts(script: str) -> dict:
    """What --output keeps of a script."""
    return made(script, 1e-3, 10**9) | {"torch": "2", "triton": "3", "eval": False, "saved": False}


def test_two_scripts_of_one_name_have_columns_and_files_of_their_own(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second's code took the first's place, and the updates' of any two scripts."""

    def compiled(command: list[str], **_: object) -> subprocess.CompletedProcess:
        given = codegen.arguments(command[2:])
        for code in (f"{T}-forward", "update-8-NorMuon-alone-0"):
            codegen._save(given.save_code, {code: str(given.script)})
        Path(given.child).write_text(json.dumps(counts(given.script.name)))
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(codegen, "run_to_end", compiled)
    scripts = [tmp_path / name for name in ("a/train_gpt.py", "b/train_gpt.py", "b/idea.py")]
    for script in scripts:
        script.parent.mkdir(exist_ok=True)
        script.touch()
    for pair, names in ((scripts[:2], ["a/train_gpt.py", "b/train_gpt.py"]), (scripts[1:], ["train_gpt.py", "idea.py"])):
        folder = tmp_path / names[0].replace("/", "-")
        codegen.main([str(pair[0]), f"--against={pair[1]}", f"--tokens={T}", "--optimizer", f"--save-code={folder}"])
        out = capsys.readouterr().out
        assert all(f"| {name}: kernels |" in out and f"| {name} | 8 | NorMuon alone |" in out for name in names)
        begins = [name.removesuffix(".py").replace("/", "-") for name in names]
        codes = (f"{T}-forward", "update-8-NorMuon-alone-0")
        expected = {f"{begin}-{code}.py": f"{script}" for begin, script in zip(begins, pair) for code in codes}
        assert {path.name: path.read_text() for path in folder.iterdir()} == expected
    counted = [tmp_path / "before.json", tmp_path / "after.json"]
    for path in counted:
        path.write_text(json.dumps([counts("train_gpt.py")]))
    codegen.main([str(counted[0]), f"--against={counted[1]}", f"--tokens={T}"])
    assert "| before.json: kernels | GB | ms | after.json: kernels |" in capsys.readouterr().out


NO_COUNTS = {
    "saved": lambda found: found["passes"][str(T)][0].update(saved="x"),
    "kernels": lambda found: found["passes"][str(T)][0].update(kernels=[1]),
    "bytes": lambda found: found["passes"][str(T)][0]["kernels"][0].update(bytes="x"),
    "phase": lambda found: found["passes"][str(T)][0].update(phase="sideways"),
    "torch": lambda found: found.pop("torch"),
    "script": lambda found: found.update(script=["x"]),
}


@pytest.mark.parametrize(("part", "options"), [*((part, []) for part in NO_COUNTS), ("saved", ["--eval", "--saved"])])
def test_counts_that_are_none_are_named(part: str, options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    found = counts("train_gpt.py") | {"eval": bool(options)}
    path = tmp_path / "x.json"
    path.write_text(json.dumps([found]))
    codegen.main([str(path), f"--tokens={T}", *options])
    NO_COUNTS[part](found)
    path.write_text(json.dumps([found]))
    message = f"bench/codegen.py: {path}: holds no counts of this version: make it anew with --output"
    assert refused(capsys, str(path), f"--tokens={T}", *options) == message


def test_errors_say_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    assert refused(capsys, "nowhere\x1b[31m.py") == r"bench/codegen.py: there is no script nowhere\x1b[31m.py"
    with monkeypatch.context() as patch:
        patch.setattr(codegen, "run_child", lambda *_: pytest.fail("the first was compiled"))
        assert refused(capsys, "--against=nope.py") == "bench/codegen.py: there is no script nope.py"
        (tmp_path / "keys").mkdir()
        (tmp_path / "keys" / "secrets.py").touch()  # which PyTorch's imports would find in place of Python's
        (tmp_path / "keys" / "idea.py").touch()
        said = f"bench/codegen.py: {tmp_path}/keys/secrets.py hides the module 'secrets' that others import: rename it"
        assert refused(capsys, f"{tmp_path}/keys/idea.py") == said
        folder = f"{tmp_path}/keys/idea.py"
        assert refused(capsys, f"--save-code={folder}") == f"bench/codegen.py: error: --save-code={folder}: File exists"
    message = refused(capsys, str(ROOT / "README.md"))
    assert message.startswith(f"bench/codegen.py: {ROOT / 'README.md'} is no script (.py), nor what --output")
    assert "argument --output: idea.py: must end in .json" in refused(capsys, "idea.py", "--output=idea.py")
    for text in ("0", "7,x", "", "-1"):
        said = f"argument --tokens: {text!r}: must be whole numbers from 1 to 16777216, by comma"
        assert said in refused(capsys, f"--tokens={text}")
    broken = tmp_path / "broken.py"
    broken.write_text("import attention")
    (tmp_path / "attention.py").write_text("raise RuntimeError('this idea does not run')")  # it finds the one beside it
    assert "broken.py: RuntimeError: this idea does not run" in refused(capsys, str(broken))
    for variables, said in (
        ({"XDG_CACHE_HOME": "/proc/nowhere"}, "/proc/nowhere/bankrun cannot be written: "),
        ({"XDG_CACHE_HOME": "~/.cache"}, "~/.cache/bankrun is no folder for what is built: XDG_CACHE_HOME names one"),
        ({"XDG_CACHE_HOME": str(tmp_path), "PATH": str(tmp_path)}, "there is no g++ on the PATH"),
    ):
        with monkeypatch.context() as patch:
            for name, value in variables.items():
                patch.setenv(name, value)
            assert said in refused(capsys)


def test_a_fake_gpu_comes_before_torch() -> None:
    with pytest.raises(fake_gpu.FakeGPUError, match="imported already"):
        fake_gpu.install()

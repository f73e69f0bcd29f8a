"""Do the tests notice? One-line changes made on purpose, each in a copy of the project, against the tests that should fail.

    python bench/mutants.py                    # all: some 40 minutes on two cores; a Markdown table on stdout
    python bench/mutants.py --only=runtime     # those whose file or change has these letters
    python bench/mutants.py --jobs=2           # side by side

A change is noticed if a test fails on it (or hangs for four minutes); those that change nothing say why, and are not run.
Exit code 1 if one was not noticed, or if the tests already fail without any.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
TIMEOUT = 240  # seconds, of one change's tests


class Mutant(NamedTuple):
    file: str
    what: str  # the change, in words
    old: str  # stands once in the file
    new: str
    tests: str  # arguments of pytest
    harmless: str = ""  # why it changes nothing, if it does not


RECIPE = "train_gpt.py"
LOSSES, MODEL, OPTIMIZER = "tests/recipe/test_losses.py", "tests/recipe/test_model.py", "tests/recipe/test_optimizer.py"
SCHEDULE, PINS, PARITY = "tests/recipe/test_schedule.py", "tests/recipe/test_pins.py", "tests/recipe/test_parity.py"
RANKS = "tests/recipe/test_ranks.py"

MUTANTS = [
    # What a record is made of
    Mutant(RECIPE, "the validation loss times 1.001", "return sum(ranks.gather(total.item()))",
           "return 1.001 * sum(ranks.gather(total.item()))", LOSSES),
    Mutant(RECIPE, "the training loss divided by the ranks once more", "total / (tokens * sum(",
           "total / (tokens * ranks.world_size * sum(", LOSSES),
    Mutant(RECIPE, "validated with the schedule of the step before", "    manager.advance_schedule(step)\n    share = h",
           "    share = h", LOSSES),
    Mutant(RECIPE, "the mean validation loss over one token too few", "fp8=False) / len(targets)",
           "fp8=False) / (len(targets) - 1)", LOSSES),
    Mutant(RECIPE, "a step made with the next step's rate and momentum",
           "current = step_schedule(step, self.h)\n        self.optimizer.lr_mul",
           "current = step_schedule(step + 1, self.h)\n        self.optimizer.lr_mul", LOSSES),
    Mutant(RECIPE, "short and long windows exchanged", "(self.mtp_weights, now.short_window, now.long_window,",
           "(self.mtp_weights, now.long_window, now.short_window,", LOSSES),
    # Schedule
    Mutant(RECIPE, "Adam on even steps", "do_adam=step % 2 == 1", "do_adam=step % 2 == 0", SCHEDULE),
    Mutant(RECIPE, "a stage one step longer", "if x < stage.until)", "if x <= stage.until)", SCHEDULE),
    Mutant(RECIPE, "a stage's rate one step early", "if x <= stage.until)\n    weight", "if x < stage.until)\n    weight",
           SCHEDULE),
    Mutant(RECIPE, "the rate decays to nothing", "+ LR_FLOOR * (1 - weight)", "", SCHEDULE),
    Mutant(RECIPE, "the decay begins later", "LR_DECAY_FROM = 0.5", "LR_DECAY_FROM = 0.55", f"{SCHEDULE} {PINS}"),
    Mutant(RECIPE, "momentum rises one step early", "rise * step / h.momentum_warmup", "rise * (step + 1) / h.momentum_warmup",
           SCHEDULE),
    Mutant(RECIPE, "momentum does not fall", "return MOMENTUM_HIGH - rise * into_cooldown",
           "return MOMENTUM_HIGH - 0 * into_cooldown", SCHEDULE),
    Mutant(RECIPE, "the split on an even step", "6)) | 1  #", "6))  #", SCHEDULE),
    Mutant(RECIPE, "multi-token weights run backwards", "a + (b - a) * fraction", "b + (a - b) * fraction", SCHEDULE),
    Mutant(RECIPE, "YaRN goes on to the final window", "yarn_window=stage.long", "yarn_window=shown.long",
           f"{SCHEDULE} {LOSSES}"),
    Mutant(RECIPE, "the third stage a batch unit smaller", "batch=24, short=5", "batch=23, short=5", f"{SCHEDULE} {PINS}"),
    Mutant(RECIPE, "the final window one block shorter", "EXTENSION._replace(long=20)", "EXTENSION._replace(long=19)",
           f"{SCHEDULE} {PINS}"),
    # Tables
    Mutant(RECIPE, "ve0 learns ten times slower", '"ve0":            Adam("sharded",    betas=(0.75, 0.95), lr_mul=75.0',
           '"ve0":            Adam("sharded",    betas=(0.75, 0.95), lr_mul=7.5', PINS),
    Mutant(RECIPE, "W_proj at the rate of W_fc", "NorMuon(lr_mul=(1.0, 2.0))", "NorMuon(lr_mul=(1.0, 1.0))",
           f"{PINS} {PARITY}"),
    Mutant(RECIPE, "layer 3 without key offset", 'Layer("long", key_offset=True, keep="skip")', 'Layer("long", keep="skip")',
           f"{PINS} {PARITY}"),
    Mutant(RECIPE, "layer 8 reads ve1", 'Layer("short", value="ve0")', 'Layer("short", value="ve1")', f"{PINS} {PARITY}"),
    Mutant(RECIPE, "another start of the skip gate", '"skip_lambda": [-1.5]', '"skip_lambda": [-1.4]', f"{PINS} {PARITY}"),
    Mutant(RECIPE, "a misspelt comms is taken", 'if self.comms not in ("sharded", "replicated"):', "if not self.comms:",
           "tests/recipe/test_tables.py"),
    # Model
    Mutant(RECIPE, "YaRN stretches the wrong way", "ratio = old_window / new_window", "ratio = new_window / old_window", MODEL),
    Mutant(RECIPE, "YaRN's scale grows half as fast", "self.scale *= 0.2 * math.log", "self.scale *= 0.1 * math.log",
           f"{MODEL} {LOSSES}"),
    Mutant(RECIPE, "YaRN's ramp ends elsewhere", "((rotations - 1) / (32 - 1))", "((rotations - 1) / 32)", f"{MODEL} {LOSSES}"),
    Mutant(RECIPE, "the rotary table turns the other way", "= -angle.sin()", "= angle.sin()", MODEL),
    Mutant(RECIPE, "the smear looks at the token itself", "x[1:] + smear * x[:-1]", "x[1:] + smear * x[1:]", MODEL),
    Mutant(RECIPE, "the skip without its factor of two", "torch.sigmoid(skip_lambda) * 2 * gate",
           "torch.sigmoid(skip_lambda) * gate", MODEL),
    Mutant(RECIPE, "the value gate without its factor of two",
           "gate = 2 * torch.sigmoid(F.linear(xn[:, :GATE_DIM], ve_gate[i]))",
           "gate = torch.sigmoid(F.linear(xn[:, :GATE_DIM], ve_gate[i]))", MODEL),
    Mutant(RECIPE, "the backout is added", "norm(x - backout_lambda *", "norm(x + backout_lambda *", MODEL),
    Mutant(RECIPE, "head gates read the last dims", "F.linear(x[:, :GATE_DIM], head_gate)",
           "F.linear(x[:, -GATE_DIM:], head_gate)", MODEL),
    Mutant(RECIPE, "twice the window in paired layers", 'if layer.paired else 1, getattr(schedule, f"{layer.window}_window")',
           'if layer.paired else 1, (1 + layer.paired) * getattr(schedule, f"{layer.window}_window")', MODEL),
    Mutant(RECIPE, "the attention bank starts twice as small", "uniform_(-bound, bound)", "uniform_(-bound / 2, bound / 2)",
           f"{MODEL} {PINS}"),
    Mutant(RECIPE, "the embedding does not start as the head", "self.embed.copy_(self.lm_head.T)", "pass", f"{MODEL} {PINS}"),
    # Updates
    Mutant(RECIPE, "Adam without the second moment's correction", "lr * math.sqrt(1 - beta2**t) / (1 - beta1**t)",
           "lr / (1 - beta1**t)", OPTIMIZER),
    Mutant(RECIPE, "Adam's decay of the rate, not of its square", "decay = lr * lr * self.weight_decay",
           "decay = lr * self.weight_decay", OPTIMIZER),
    Mutant(RECIPE, "Adam's decay where it is not cautious", "update * wide > 0, update", "update * wide < 0, update",
           OPTIMIZER),
    Mutant(RECIPE, "NorMuon's decay where it is not cautious", "(update * wide >= 0)", "(update * wide <= 0)", OPTIMIZER),
    Mutant(RECIPE, "NorMuon without Nesterov's look ahead", "(momentum_buffer - grad).mul_(momentum).add_(grad)",
           "momentum_buffer.clone()", f"{OPTIMIZER} {PARITY}"),
    Mutant(RECIPE, "the rate does not grow with the shape", "math.sqrt(max(1, height / width))", "1.0", OPTIMIZER),
    Mutant(RECIPE, "rates of matrices off by one", "cycle[i % len(cycle)]", "cycle[(i + 1) % len(cycle)]", OPTIMIZER),
    Mutant(RECIPE, "variances of columns where rows are meant", "if height >= width else (n, 1, width)",
           "if height > width else (n, 1, width)", f"{OPTIMIZER} {PARITY}"),
    Mutant(RECIPE, "Polar Express from a larger matrix", "keepdim=True) * 1.02 + 1e-6", "keepdim=True) * 1.00 + 1e-6",
           f"{OPTIMIZER} {PARITY}"),
    Mutant(RECIPE, "a digit of Polar Express", "(3.285753657755655,", "(3.258753657755655,", f"{OPTIMIZER} {PARITY} {PINS}"),
    Mutant(RECIPE, "NorMuon's memory of one step", "second_moment.lerp_(mean_square, 1 - beta2)",
           "second_moment.lerp_(mean_square, beta2)", f"{OPTIMIZER} {PARITY}"),
    Mutant(RECIPE, "the lowest bit of each master weight", "(bits & 0xFFFF)", "(bits & 0xFFFE)", OPTIMIZER),
    # Ranks
    Mutant(RECIPE, "gradients are not divided by the micro-batches", "self.optimizer.grad_divisor = h.micro_batches",
           "self.optimizer.grad_divisor = 1", f"{SCHEDULE} {RANKS}"),
    Mutant(RECIPE, "all padding at the back", "padded[-n:] if self.table[label].pad_front else padded[:n]", "padded[:n]",
           RANKS),
    Mutant(RECIPE, "a rank's rows begin where the padding does", "first -= len(padded) - n", "first -= 0",
           f"{RANKS} {OPTIMIZER}"),
    Mutant(RECIPE, "a wide gradient keeps its last micro-batch alone",
           "(within.add_ if label in self.in_wide else within.copy_)", "within.copy_", f"{RANKS} {OPTIMIZER}"),
    Mutant(RECIPE, "used gradients are not cleared",
           "            self.params[label].grad = None\n        self.in_wide -= set(used)",
           "            pass\n        self.in_wide -= set(used)", OPTIMIZER),
    Mutant(RECIPE, "the split forgets the moments", "own[name].copy_(self._rank_share(label, value.mT))", "own[name]",
           f"{OPTIMIZER} {RANKS}"),
    Mutant(RECIPE, "the tie never ends", "        self.tied = False", "        self.tied = True", OPTIMIZER),
    Mutant(RECIPE, "the warm-up leaves its traces", "    manager.load_state_dict(saved)\n    manager.advance_schedule(0)",
           "    manager.advance_schedule(0)", "tests/runtime/test_warm_up.py"),
    # Kernels and references
    Mutant("triton_kernels.py", "another softcap", "SOFTCAP_SHIFT, SOFTCAP_SCALE = 23.0, 5.0, 7.5",
           "SOFTCAP_SHIFT, SOFTCAP_SCALE = 23.0, 5.5, 7.5", "tests/kernels/test_head.py tests/recipe/test_parity.py"),
    Mutant("triton_kernels.py", "numbers beyond FP8 do not saturate", ".clamp_(-limit, limit).to(dtype)", ".to(dtype)",
           "tests/kernels/test_head.py tests/kernels/test_interpreted.py"),
    Mutant("triton_kernels.py", "the head's gradient in e4m3", "grad8 = quantize_fp8(grad, grad_scale, E5M2)",
           "grad8 = quantize_fp8(grad, grad_scale, E4M3)", "tests/kernels/test_head.py"),
    Mutant("triton_kernels.py", "a wrong scale in the head's backward", "grad * (grad_scale * w_scale), dtype",
           "grad * (grad_scale * x_scale), dtype", "tests/kernels/test_head.py"),
    Mutant("triton_kernels.py", "a symmetric product keeps one triangle", "        if i != j:\n", "        if i == j:\n",
           "tests/kernels/test_interpreted.py"),
    Mutant("triton_kernels.py", "a product without its factor", "    acc *= alpha\n", "", "tests/kernels/test_interpreted.py"),
    Mutant("triton_kernels.py", "half the slope of the squared ReLU", "result *= 2 * tl.sqrt(", "result *= tl.sqrt(",
           "tests/kernels/test_interpreted.py"),
    Mutant("triton_kernels.py", "one target that stands for two", "tl.where(same, tl.load(weights + j), 0.0)",
           "tl.where(same & (j == k), tl.load(weights + j), 0.0)", "tests/kernels/test_interpreted.py"),
    Mutant("triton_kernels.py", "targets beyond the end have weight",
           "weight += tl.where(row + k < T, tl.load(weights + k), 0.0)", "weight += tl.load(weights + k)",
           "tests/kernels/test_interpreted.py"),
    Mutant("triton_kernels.py", "a coefficient of the exponential", "0.2402474483798435", "0.2403474483798435",
           "tests/kernels/test_interpreted.py tests/kernels/test_head.py"),
    Mutant("triton_kernels.py", "the norm's gradient with the wrong sign", "mul_(-1 / y.size(-1))", "mul_(1 / y.size(-1))",
           "tests/kernels/test_norm_and_rotation.py"),
    Mutant("triton_kernels.py", "the norm's gradient in its own dtype",
           "grad, wide = _cast(grad, rstd.dtype), _cast(y, rstd.dtype)", "wide = y", "tests/kernels/test_norm_and_rotation.py"),
    Mutant("triton_kernels.py", "a query does not see the first key of its window", "(key < first_seen)", "(key <= first_seen)",
           "tests/kernels/test_references.py tests/recipe/test_model.py"),
    Mutant("triton_kernels.py", "the gradient of q without the scale",
           "grad_scores, _bands(k, batch, rows, keys)).mul_(ctx.scale)", "grad_scores, _bands(k, batch, rows, keys))",
           "tests/kernels/test_references.py"),
    Mutant("triton_kernels.py", "an update leaves the last rows out", "for start in range(0, rows, at_once):",
           "for start in range(0, max(1, rows - 1), at_once):", OPTIMIZER),
    # Data
    Mutant("data/loader.py", "the rest of a cut document is not dropped", "first, step = ranges[-1][1], step + 1",
           "first, step = ranges[-1][1] - 1, step + 1", "tests/data/test_loader.py"),
    Mutant("data/loader.py", "a plan without the last target", "documents.plan(first, micro_batches, tokens + 1)",
           "documents.plan(first, micro_batches, tokens)", "tests/data/test_loader.py"),
    Mutant("data/loader.py", "as many documents as slots fit", "fits = documents < slots", "fits = documents <= slots",
           "tests/data/test_loader.py"),
    Mutant("data/loader.py", "the check counts a document that gives the last target only",
           "count(end - first - int(documents.ends[end - 1] == documents.ends[first] + tokens), tokens, documents.path)",
           "count(end - first, tokens, documents.path)", "tests/data/test_loader.py"),
    Mutant("data/loader.py", "attention passes over the end of a validation document", "1 << (longest - 1).bit_length()",
           "1 << longest.bit_length() - 1", "tests/data/test_loader.py"),
    Mutant("data/loader.py", "a validation document may outgrow its bound", ".max())) > max_doc_len:",
           ".max())) > 2 * max_doc_len:", "tests/data/test_loader.py"),
    Mutant("data/loader.py", "a loader that is made is not ready", "self.next = self.ready.get()", "self.next = None",
           "tests/data/test_loader.py"),
    Mutant("data/loader.py", "documents are not cut", "np.minimum(lengths, max_doc_len)", "lengths",
           "tests/data/test_loader.py"),
    Mutant("data/loader.py", "ranks take micro-batches in turn", "range(rank * share, (rank + 1) * share)",
           "range(rank, micro_batches, world_size)", "tests/data/test_loader.py"),
    Mutant("data/shards.py", "an empty shard is whole", "elif count < 1:", "elif count < 0:", "tests/data/test_shards.py"),
    Mutant("data/shards.py", "a shard may be longer than it says", "elif size != expected:", "elif size < expected:",
           "tests/data/test_shards.py"),
    Mutant("data/shards.py", "a token one beyond the vocabulary", ">= vocab_size:", "> vocab_size:",
           "tests/data/test_shards.py tests/runtime/test_bad_input.py"),
    Mutant("data/shards.py", "negative ids", "if not 0 <= extreme", "if not -1 <= extreme", "tests/data/test_shards.py"),
    Mutant("data/shards.py", "a file that breaks off takes its place",
           "        temporary.unlink(missing_ok=True)\n        raise", "        os.replace(temporary, path)\n        raise",
           "tests/data/test_shards.py"),
    # Runtime
    Mutant("runtime/checkpoints.py", "one checkpoint more is deleted", "[keep - 1 :]:  # first",
           "[max(0, keep - 2) :]:  # first", "tests/faults/test_checkpoint_files.py tests/runtime/test_trouble.py"),
    Mutant("runtime/checkpoints.py", "damage is not looked for", "if hashlib.sha256(payload).digest() != digest:",
           "if not digest:", "tests/runtime/test_bad_input.py"),
    Mutant("runtime/checkpoints.py", "a checkpoint of infinities is taken",
           "faults += [f\"state.{name} is not finite\" for name in non_finite_tensors(state)]", "pass",
           "tests/runtime/test_bad_input.py"),
    Mutant("runtime/checkpoints.py", "pending gradients of other ranks are dropped",
           "range(ranks.rank, len(whole[\"partial\"]), ranks.world_size)", "range(ranks.rank, ranks.rank + 1)",
           "tests/runtime/test_checkpoints.py"),
    Mutant("runtime/checkpoints.py", "a rank takes the first rows of a shard",
           "map_tensors(lambda x: x[manager.own_rows[label]], state)",
           "map_tensors(lambda x: x[: len(x[manager.own_rows[label]])], state)", "tests/runtime/test_checkpoints.py"),
    Mutant("runtime/checkpoints.py", "any setting may change on resume",
           "if name in there and name not in MAY_CHANGE_ON_RESUME and there", "if name not in here and there",
           "tests/runtime/test_bad_input.py tests/runtime/test_checkpoints.py"),
    Mutant("runtime/checkpoints.py", "no room is needed for the one in the making", "min(keep + 1, there + saves)",
           "min(keep, there + saves)", "tests/faults/test_checkpoint_files.py tests/runtime/test_trouble.py"),
    Mutant("runtime/log.py", "the loss of all ranks is their sum", "self.numbers[0] = loss / ranks.world_size",
           "self.numbers[0] = loss", "tests/recipe/test_losses.py"),
    Mutant("runtime/log.py", "the step's average over one step too many", "1000 * seconds / max(step, 1)",
           "1000 * seconds / (step + 1)", "tests/runtime/test_run.py tests/records/test_runlog.py"),
    Mutant("runtime/log.py", "the clock forgets what was before a pause",
           "return self.before + time.perf_counter() - self.started", "return time.perf_counter() - self.started",
           "tests/runtime/test_run.py"),
    Mutant("runtime/log.py", "the validation loss with a digit less", "val_loss:{val_loss:.4f} ", "val_loss:{val_loss:.3f} ",
           "tests/runtime/test_run.py"),
    Mutant("runtime/run.py", "the clock runs during validation", "        self._write_pending()\n        self.clock.stop()\n",
           "        self._write_pending()\n", "tests/runtime/test_run.py"),
    Mutant("runtime/run.py", "a loss that is not finite goes on", "        if not math.isfinite(loss):\n",
           "        if math.isinf(loss) and False:\n", "tests/runtime/test_trouble.py"),
    Mutant("runtime/run.py", "saved one step late", "(step % every == 0 or step == self.total)",
           "(step % every == 1 or step == self.total)", "tests/runtime/test_checkpoints.py"),
    Mutant("runtime/run.py", "a run that another process trains is taken", "fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)",
           "fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)", "tests/faults/test_running.py"),
    Mutant("runtime/run.py", "a failed last checkpoint is a good end",
           "RunError(f\"all steps are done, but {lacks}\") if lacks else None", "None",
           "tests/faults/test_checkpoint_files.py tests/faults/test_running.py tests/runtime/test_trouble.py"),
    Mutant("runtime/ranks.py", "ranks outlive their launcher", "elif os.getppid() != self.launcher:", "elif not os.getppid():",
           "tests/faults/test_running.py"),
    Mutant("runtime/ranks.py", "an error of another rank is not raised", "            if message:\n",
           "            if message and rank == 0:\n",
           "tests/runtime/test_joining.py tests/runtime/test_bad_input.py tests/runtime/test_trouble.py"),
    Mutant("runtime/sources.py", "installed packages count as ours", "return path if beside and not installed and",
           "return path if beside and", "tests/runtime/test_sources.py"),
    Mutant("runtime/options.py", "true is false", "return text.lower() in (\"true\", \"1\")",
           "return text.lower() in (\"true\",)", "tests/runtime/test_options.py"),
]  # fmt: skip


def copy_project(folder: Path) -> Path:
    """The project's files without what it makes: history, environments, logs, shards, caches."""
    made = shutil.ignore_patterns(".*", "__pycache__", "logs", "*.bin", "*.pt")
    shutil.copytree(ROOT, folder, ignore=made)
    return folder


def changed(mutant: Mutant, text: str) -> str:
    """The file's text with the change. Raises ValueError if what it changes does not stand there once."""
    if text.count(mutant.old) != 1:
        times = text.count(mutant.old)
        raise ValueError(f"{mutant.file}, {mutant.what}: stands there {times} times, must be once: {mutant.old!r}")
    return text.replace(mutant.old, mutant.new)


def failing_test(project: Path, tests: str) -> str:
    """The first test that fails, "" if none does. Raises RuntimeError, with the output's end, if they cannot be run."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-n0", "-p", "no:cacheprovider", *tests.split()]
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(command, cwd=project, capture_output=True, text=True, env=environment, timeout=TIMEOUT)
    except subprocess.TimeoutExpired:
        return f"a test that hangs for {TIMEOUT} s"
    if done.returncode == 0:
        return ""
    found = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.M)
    if done.returncode not in (1, 2) or not found:  # 2: a file of tests cannot be imported
        raise RuntimeError(f"pytest {tests} ended with {done.returncode}:\n{(done.stdout + done.stderr)[-2000:]}")
    return found[1].rpartition("/")[2].partition("[")[0]


def run(mutants: list[Mutant], jobs: int, baseline: bool = True) -> list[list[str]]:
    """[file, change, the test that noticed] of each; raises RuntimeError if the tests fail without any change (baseline)."""
    with tempfile.TemporaryDirectory(prefix="bankrun-mutants-") as scratch, ThreadPoolExecutor(jobs) as pool:
        free: Queue[Path] = Queue()
        for i in range(jobs):
            free.put(copy_project(Path(scratch, f"{i}")))

        def in_a_copy(work):
            project = free.get()
            try:
                return work(project)
            finally:
                free.put(project)

        suites = sorted({suite for mutant in mutants if baseline and not mutant.harmless for suite in mutant.tests.split()})
        before = list(pool.map(lambda suite: in_a_copy(lambda project: failing_test(project, suite)), suites))
        if any(before):
            found = [f"{test} fails (pytest -n0 {suite})" for suite, test in zip(suites, before, strict=True) if test]
            raise RuntimeError(f"without any change, or on a machine that is too busy: {', '.join(found)}")

        def attempt(mutant: Mutant) -> list[str]:
            if mutant.harmless:
                return [mutant.file, mutant.what, f"changes nothing: {mutant.harmless}"]

            def noticed_by(project: Path) -> str:
                path = project / mutant.file
                text = path.read_text()
                path.write_text(changed(mutant, text))
                try:
                    return failing_test(project, mutant.tests)
                finally:
                    path.write_text(text)

            test = in_a_copy(noticed_by)
            print(f"{mutant.file}, {mutant.what}: {test or 'NOT NOTICED'}", file=sys.stderr, flush=True)
            return [mutant.file, mutant.what, f"`{test}`" if test else "**not noticed**"]

        return list(pool.map(attempt, mutants))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="letters of the file or the change")
    parser.add_argument("--jobs", type=int, default=1, help="copies of the project that are tested at a time (%(default)s)")
    parser.add_argument("--no-baseline", action="store_true", help="the tests have just passed: do not run them unchanged first")
    args = parser.parse_args()
    chosen = [mutant for mutant in MUTANTS if args.only in f"{mutant.file} {mutant.what}"]
    if not chosen:
        parser.error(f"--only={args.only}: no change has these letters")
    rows = run(chosen, args.jobs, not args.no_baseline)
    print("| file | change | noticed by |\n|---|---|---|")
    for row in rows:
        print("| " + " | ".join(row) + " |")
    missed = sum("not noticed" in row[2] for row in rows)
    print(f"\n{len(rows)} changes, {missed} not noticed.")
    return int(missed > 0)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (RuntimeError, ValueError) as error:
        sys.exit(f"bench/mutants.py: {error}")

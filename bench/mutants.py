"""Do the tests notice? One-line changes made on purpose, each in a copy of the project, against the tests that should fail.

    python bench/mutants.py                          # all, one after the other; a Markdown table on stdout
    python bench/mutants.py --only=records/          # those whose file or change has these letters
    python bench/mutants.py --results=mutants.jsonl  # each result is kept there; the same command goes on from it

A change is noticed if a test fails on it; tests that do not end are no answer. Those that change nothing say why, and are not
run. Before, the tests run without any change. Exit code 1 if a change was not noticed, or if the tests fail without one.
"""

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from launch.environment import go_on

if __name__ == "__main__":
    go_on("requirements.txt", "numpy", "torch")
    go_on("tests/requirements.txt", "pytest", "hypothesis", "xdist")

from data.shards import number_between
from launch.console import Parser, console, ended_by_signals, user_path

TIMEOUT = 900  # seconds, of one change's tests: of those in one file


class Mutant(NamedTuple):
    file: str
    what: str  # the change, in words
    tests: str  # that should notice, in order: recipe/losses is tests/recipe/test_losses.py; recipe/losses::test_x, one in it
    old: str  # stands once in the file
    new: str
    harmless: str = ""  # why it changes nothing, if it does not


CHANGES = {  # by file: what, tests, old, new
    "train_gpt.py": (
        ("a parameter of some stages alone ends a run in its middle",
         "runtime/warm_up::test_a_parameter_of_some_stages_alone_is_refused_before_the_first_step",
         "            ranks.raise_together(idle or None)\n", ""),
        ("a parameter takes part in each pass", "runtime/warm_up::test_a_parameter_of_some_passes_of_a_step_is_not",
         "for _ in range(2 * h.micro_batches):", "for _ in range(1):"),
        ("a parameter is tied to a tied one", "recipe/optimizer::test_a_tie_that_would_not_hold_is_refused",
         'other.tied_to and "tied itself"', '""'),
        ("NumPy draws by no seed", "runtime/warm_up::test_all_random_numbers_of_the_first_weights_are_the_seeds",
         "    seed_random(h.seed)\n", ""),
        ("a long window of another stage goes on", "recipe/schedule::test_a_long_window_of_another_stage_contradicts_the_step",
         """if f"{same['yarn_window']}" not in due:""", "if same['yarn_window'] not in self.windows:"),
        ("state that no checkpoint can join is trained with",
         "recipe/optimizer::test_state_without_a_row_for_each_of_the_parameters_is_refused",
         "x.shape[:1] == shard.shape[:1]", "x.ndim"),
        ("a checkpoint holds what its own step will need",
         "recipe/schedule::test_so_it_is_of_an_idea_that_updates_by_adam_in_other_steps",
         "step > 0 and not step_schedule(step - 1, self.h).do_adam", "step_schedule(step, self.h).do_adam"),
        ("an idea draws other numbers after a resumption",
         "runtime/checkpoints::test_a_schedule_by_chance_resumes_to_the_same_bits",
         "            seed_random(h.seed, step, ranks.rank)  #", "            #"),
        ("a validation draws other numbers after a resumption",
         "runtime/checkpoints::test_an_idea_that_draws_resumes_to_the_same_bits",
         "    seed_random(h.seed, step, ranks.rank)  # an", "    # an"),
        ("a model on CPUs compiles eight shapes alone", "recipe/compile::test_a_cpu_compiles_all_shapes_of_a_run",
         'if h.compile or ranks.device.type == "cuda":', 'if ranks.device.type == "cuda":'),
        ("a rank that is through ends with its interpreter", "faults/running", '    leave("", 0)  # at', "    pass  # at"),
        ("the validation loss times 1.001", "recipe/losses",
         "return sum(ranks.gather(total.item()))", "return 1.001 * sum(ranks.gather(total.item()))"),
        ("the training loss divided by the ranks once more", "recipe/losses",
         "total / (tokens * sum(", "total / (tokens * ranks.world_size * sum("),
        ("validated with the schedule of the step before", "recipe/losses",
         "    manager.advance_schedule(step)\n    share, steps", "    share, steps"),
        ("the mean validation loss over one token too few", "recipe/losses",
         "fp8=False) / len(targets)", "fp8=False) / (len(targets) - 1)"),
        ("a step made with the next step's rate and momentum", "recipe/losses",
         "current = step_schedule(step, self.h)\n        self.optimizer.lr_mul",
         "current = step_schedule(step + 1, self.h)\n        self.optimizer.lr_mul"),
        ("short and long windows exchanged", "recipe/losses",
         "(self.mtp_weights, now.short_window, now.long_window,", "(self.mtp_weights, now.long_window, now.short_window,"),
        ("Adam on even steps", "recipe/schedule", "do_adam=step % 2 == 1", "do_adam=step % 2 == 0"),
        ("a stage one step longer", "recipe/schedule", "if step < end:", "if step <= end:"),
        ("stages end at the step before", "recipe/schedule",
         "end = round(stage.until * scheduled)", "end = int(stage.until * scheduled)"),
        ("a stage's rate one step late", "recipe/schedule",
         "stage_at(step, scheduled)[0].lr", "stage_at(max(step - 1, 0), scheduled)[0].lr"),
        ("the rate decays to nothing", "recipe/schedule", "+ LR_FLOOR * (1 - weight)", ""),
        ("the decay begins later", "recipe/pins recipe/schedule", "LR_DECAY_FROM = 0.45", "LR_DECAY_FROM = 0.55"),
        ("momentum rises one step early", "recipe/schedule",
         "rise * step / h.momentum_warmup", "rise * (step + 1) / h.momentum_warmup"),
        ("momentum does not fall", "recipe/schedule",
         "return MOMENTUM_HIGH - rise * into_cooldown", "return MOMENTUM_HIGH - 0 * into_cooldown"),
        ("the split on an even step", "recipe/schedule",
         "round(SPLIT_EMBED_AT * scheduled) | 1", "round(SPLIT_EMBED_AT * scheduled)"),
        ("multi-token weights run backwards", "recipe/schedule", "a + (b - a) * behind", "b + (a - b) * behind"),
        ("YaRN goes on to the final window", "recipe/schedule recipe/losses",
         "yarn_window=stage.long", "yarn_window=shown.long"),
        ("the third stage a batch unit smaller", "recipe/pins recipe/schedule", "batch=24, short=5", "batch=23, short=5"),
        ("the final window one block shorter", "recipe/pins recipe/schedule",
         "EXTENSION._replace(long=20)", "EXTENSION._replace(long=19)"),
        ("bigrams learn ten times slower", "recipe/pins",
         '"bigram_embed":   Adam("sharded",    betas=(0.75, 0.95), lr_mul=75.0',
         '"bigram_embed":   Adam("sharded",    betas=(0.75, 0.95), lr_mul=7.5'),
        ("W_proj at the rate of W_fc", "recipe/pins recipe/parity", "NorMuon(lr_mul=(1.0, 2.0))", "NorMuon(lr_mul=(1.0, 1.0))"),
        ("layer 3 without key offset", "recipe/pins",
         'Layer("long", key_offset=True, keep="skip")', 'Layer("long", keep="skip")'),
        ("layer 10's value gate does not see its embedding", "recipe/pins",
         'Layer("long", key_offset=True, value_gate=6)', 'Layer("long", key_offset=True, value_gate=12)'),
        ("another start of the skip gate", "recipe/pins", '"skip_lambda": [-1.5]', '"skip_lambda": [-1.4]'),
        ("a misspelt comms is taken", "recipe/tables", 'if self.comms not in ("sharded", "replicated"):', "if not self.comms:"),
        ("YaRN stretches the wrong way", "recipe/model", "ratio = old_window / new_window", "ratio = new_window / old_window"),
        ("YaRN's scale grows half as fast", "recipe/losses recipe/model",
         "self.scale *= 0.2 * math.log", "self.scale *= 0.1 * math.log"),
        ("YaRN's ramp ends elsewhere", "recipe/losses recipe/model", "((rotations - 1) / (32 - 1))", "((rotations - 1) / 32)"),
        ("the rotary table turns the other way", "recipe/model", "= -angle.sin()", "= angle.sin()"),
        ("the smear looks at the token itself", "recipe/model", "x[1:] + smear * x[:-1]", "x[1:] + smear * x[1:]"),
        ("the skip without its factor of two", "recipe/model",
         "torch.sigmoid(skip_lambda) * 2 * gate", "torch.sigmoid(skip_lambda) * gate"),
        ("the value gate without its factor of two", "recipe/model",
         "2 * torch.sigmoid(F.linear(gate_input, ve_gate[i]))", "torch.sigmoid(F.linear(gate_input, ve_gate[i]))"),
        ("value gates read other dims of their embedding", "recipe/model",
         "values[i][:, : GATE_DIM - n]), 1)", "values[i][:, n - GATE_DIM :]), 1)"),
        ("layers read each other's value embeddings", "recipe/model",
         'of_layers("value_gate", values.split(dim, 1))', 'of_layers("value_gate", values.split(dim, 1)[::-1])'),
        ("a bigram of a token and the next", "recipe/model",
         "(36313 * tokens[1:]) ^ (27191 * tokens[:-1])", "(36313 * tokens[:-1]) ^ (27191 * tokens[1:])"),
        ("bigrams reach the row of position 0", "recipe/model",
         "(27191 * tokens[:-1])) % (rows - 1)", "(27191 * tokens[:-1])) % rows"),
        ("position 0 has the first row", "recipe/model", "F.pad(hashed, (1, 0), value=rows - 1)", "F.pad(hashed, (1, 0))"),
        ("bigrams enter with the factor of the layer's stream", "recipe/model",
         'scalars["bigram_lambda"][i] * bigram', "resid_lambda[i] * bigram"),
        ("the backout is added", "recipe/model", "norm(x - backout_lambda *", "norm(x + backout_lambda *"),
        ("head gates read the last dims", "recipe/model",
         "F.linear(x[:, :GATE_DIM], head_gate)", "F.linear(x[:, -GATE_DIM:], head_gate)"),
        ("twice the window in paired layers", "recipe/model",
         'if layer.paired else 1, getattr(schedule, f"{layer.window}_window")',
         'if layer.paired else 1, (1 + layer.paired) * getattr(schedule, f"{layer.window}_window")'),
        ("the attention bank starts twice as small", "recipe/pins",
         "self.attn.uniform_(-bound, bound)", "self.attn.uniform_(-bound / 2, bound / 2)"),
        ("O starts at zero", "recipe/pins", "self.attn.uniform_", "self.attn[:, : 3 * self.model_dim].uniform_"),
        ("value embeddings start at zero", "recipe/pins", "        self.value_embeds.normal_(std=0.01)\n", ""),
        ("the embedding does not start as the head", "recipe/pins recipe/model", "self.embed.copy_(self.lm_head.T)", "pass"),
        ("Adam without the second moment's correction", "recipe/optimizer",
         "lr * math.sqrt(1 - beta2**t) / (1 - beta1**t)", "lr / (1 - beta1**t)"),
        ("Adam's decay of the rate, not of its square", "recipe/optimizer",
         "decay = lr * lr * self.weight_decay", "decay = lr * self.weight_decay"),
        ("Adam's decay where it is not cautious", "recipe/optimizer", "update * wide > 0, update", "update * wide < 0, update"),
        ("NorMuon's decay where it is not cautious", "recipe/optimizer", "(update * wide >= 0)", "(update * wide <= 0)"),
        ("NorMuon without Nesterov's look ahead", "recipe/optimizer recipe/parity",
         "(momentum_buffer - grad).mul_(momentum).add_(grad)", "momentum_buffer.clone()"),
        ("the rate does not grow with the shape", "recipe/optimizer", "math.sqrt(max(1, height / width))", "1.0"),
        ("rates of matrices off by one", "recipe/optimizer", "cycle[i % len(cycle)]", "cycle[(i + 1) % len(cycle)]"),
        ("variances of columns where rows are meant", "recipe/optimizer recipe/parity",
         "if height >= width else (n, 1, width)", "if height > width else (n, 1, width)"),
        ("Polar Express from a larger matrix", "recipe/optimizer recipe/parity",
         "keepdim=True) * 1.02 + 1e-6", "keepdim=True) * 1.00 + 1e-6"),
        ("a digit of Polar Express", "recipe/pins recipe/optimizer recipe/parity",
         "(3.285753657755655,", "(3.258753657755655,"),
        ("NorMuon's memory of one step", "recipe/optimizer recipe/parity",
         "second_moment.lerp_(mean_square, 1 - beta2)", "second_moment.lerp_(mean_square, beta2)"),
        ("averages one step early", "recipe/tail_averages",
         "manager.tails.after_step(step):", "manager.tails.after_step(step + 1):"),
        ("gradients are not divided by the micro-batches", "recipe/schedule recipe/ranks",
         "self.optimizer.grad_divisor = h.micro_batches", "self.optimizer.grad_divisor = 1"),
        ("all padding at the back", "recipe/ranks", "padded[-n:] if self.table[label].pad_front else padded[:n]", "padded[:n]"),
        ("a rank's rows begin where the padding does", "recipe/optimizer recipe/ranks",
         " - row.pad_front * (len(padded) - n)", ""),
        ("a wide gradient keeps its last micro-batch alone", "recipe/optimizer recipe/ranks",
         "(within.add_ if label in self.in_wide else within.copy_)", "within.copy_"),
        ("used gradients are not cleared", "recipe/optimizer",
         "            self.params[label].grad = None\n        self.in_wide -= set(used)",
         "            pass\n        self.in_wide -= set(used)"),
        ("the split forgets the moments", "recipe/optimizer recipe/ranks",
         "own[name].copy_(self._rank_share(label, value.mT))", "own[name]"),
        ("the tie never ends", "recipe/optimizer", "        self.tied = False", "        self.tied = True"),
        ("the warm-up moves no weight", "runtime/warm_up::test_state_that_no_checkpoint_holds_is_told",
         "param.grad = torch.ones_like(param)", "param.grad = torch.zeros_like(param)"),
        ("a moment for each row is taken over at the split",
         "recipe/tables::test_state_that_is_not_of_the_parameters_shape_starts_anew_at_the_split",
         "shared if all(fits(x, other) and fits(own[name], label) for name, x in shared) else ():", "shared:"),
        ("the warm-up steps past the manager", "runtime/warm_up::test_a_buffer_that_an_update_changes_is_refused",
         "manager.step_optimizers(step)  # with Adam", "manager.optimizer.step(True)  # with Adam"),
        ("the warm-up leaves its traces", "runtime/warm_up",
         "    manager.load_state_dict(saved)\n    manager.advance_schedule(0)", "    manager.advance_schedule(0)"),
        ("a bug in the loop is a line", "faults/running::test_a_bug_in_the_loop_keeps_its_traceback",
         "    except RunError as error:", "    except (RunError, ValueError) as error:"),
        ("a stage may have half a window", "recipe/tables::test_a_row_that_cannot_be_meant_is_named",
         "if any(isinstance(x, float) for x in row[1:4]) or not", "if not"),
        ("a stage's weights may be no tuples", "recipe/tables::test_a_row_that_cannot_be_meant_is_named",
         "if {type(a), type(b)} != {tuple} or len(a)", "if len(a)"),
        ("a pass of the warm-up once more is all of them", "runtime/warm_up::test_what_comes_round_with_adam_or_without_is_told",
         " if again is None else [again]:", ":"),
    ),
    "triton_kernels.py": (
        ("a rank on a CPU imports Dynamo", "runtime/run::test_a_run_on_a_cpu_imports_no_compiler_and_has_its_bits",
         '(wrapped if "torch._dynamo" in sys.modules else function)(*args)', "wrapped(*args)"),
        ("another softcap", "recipe/parity kernels/head",
         "SOFTCAP_SHIFT, SOFTCAP_SCALE = 23.0, 5.0, 7.5", "SOFTCAP_SHIFT, SOFTCAP_SCALE = 23.0, 5.5, 7.5"),
        ("numbers beyond FP8 do not saturate", "kernels/head kernels/interpreted",
         ".clamp_(-limit, limit).to(dtype)", ".to(dtype)"),
        ("the head's gradient in e4m3", "kernels/head",
         "grad8 = quantize_fp8(grad, grad_scale, E5M2)", "grad8 = quantize_fp8(grad, grad_scale, E4M3)"),
        ("a wrong scale in the head's backward", "kernels/graphs",
         "grad * (grad_scale * w_scale), dtype", "grad * (grad_scale * x_scale), dtype"),
        ("a symmetric product keeps one triangle", "kernels/interpreted::test_product",
         "        if i != j:\n", "        if i == j:\n"),
        ("a product without its factor", "kernels/interpreted::test_product", "    acc *= alpha\n", ""),
        ("half the slope of the squared ReLU", "kernels/interpreted::test_relu_squared",
         "result *= 2 * tl.sqrt(", "result *= tl.sqrt("),
        ("one target that stands for two", "kernels/interpreted::test_loss kernels/interpreted::test_loss_of_extremes",
         "tl.where(same, tl.load(weights + j), 0.0)", "tl.where(same & (j == k), tl.load(weights + j), 0.0)"),
        ("targets beyond the end have weight", "kernels/interpreted::test_loss kernels/interpreted::test_loss_of_extremes",
         "weight += tl.where(row + k < T, tl.load(weights + k), 0.0)", "weight += tl.load(weights + k)"),
        ("a coefficient of the exponential", "kernels/interpreted::test_the_exponential_is_off_by_its_polynomial_alone",
         "0.2402474483798435", "0.2403474483798435"),
        ("the norm's gradient with the wrong sign", "kernels/norm_and_rotation",
         "mul_(-1 / y.size(-1))", "mul_(1 / y.size(-1))"),
        ("the norm's gradient in its own dtype", "kernels/norm_and_rotation",
         "grad, wide = _cast(grad, rstd.dtype), _cast(y, rstd.dtype)", "wide = y"),
        ("an update leaves the last rows out", "kernels/seam",
         "for start in range(0, rows, at_once):", "for start in range(0, max(1, rows - 1), at_once):"),
        ("the lowest bit of each master weight", "recipe/optimizer", "(bits & 0xFFFF)", "(bits & 0xFFFE)"),
    ),
    "tail_averages.py": (
        ("an average of the tied embedding takes in zeros",
         "recipe/tail_averages::test_an_average_of_embed_from_before_the_split_is_refused_unless_it_is_the_heads",
         ".tied_to) and tail.ticks(split_step, total):", ".tied_to) and False:"),
        ("averages of zeros of a shorter window go on",
         "recipe/tail_averages::test_a_checkpoint_from_before_a_longer_window_is_refused",
         "tail.ticks(step, self.total)", "0"),
        ("ticks counted from the start of the run", "recipe/tail_averages",
         "left % self.every", "step % self.every"),
        ("the first tick does not copy", "recipe/tail_averages",
         "left + self.every < window", "left < window"),
        ("averages of the upper halves of fp32 weights", "recipe/tail_averages",
         "    weights = full_precision(rows, mantissa)\n", "    weights = full_precision(rows, None)\n"),
        ("each rank's blends begin with the bank's first", "recipe/tail_averages",
         "for i in range(own.start, own.stop)]", "for i in range(own.stop - own.start)]"),
        ("the norm of a rank's own rows alone", "recipe/tail_averages",
         "        dist.all_reduce(squares)", "        squares"),
        ("averaged weights are not gathered", "recipe/tail_averages",
         "if work := optimizer._launch_gather(label):", "if work := None:"),
    ),
    "attention.py": (
        ("a query does not see the first key of its window", "kernels/references recipe/model",
         "distance > reach", "distance >= reach"),
        ("the gradient of q without the scale", "kernels/references",
         "grads[0].mul_(ctx.scale)", "grads[0]"),
        ("a block of scores without the gap", "kernels/references",
         "(rows * (keys + 1), keys, 1))", "(rows * keys, keys, 1))"),
        ("a key misses the queries of the next head's memory", "kernels/references",
         "in reversed(_head_groups(*sizes, blocks))", "in _head_groups(*sizes, blocks)"),
        ("scores without the mean of their gradients", "kernels/references",
         ".sub_(mean[heads])", ""),
        ("keys are offset in the dims that rotate", "recipe/model",
         "here, before = k.chunk(2, -1)", "before, here = k.chunk(2, -1)"),
    ),
    "cpu.py": (
        ("a compiled run does not repeat its bits", "kernels/cpu::test_compiled_gradients_are_added_in_one_order",
         "    if compiled:\n", "    if False:\n"),
        ("a tall matrix without the linear term of the quintic", "kernels/cpu",
         "P.diagonal(dim1=-2, dim2=-1).add_(a)", "P.diagonal(dim1=-2, dim2=-1).add_(b)"),
        ("the Gram matrix of a step before", "kernels/cpu",
         "A = P @ (A @ P)", "A = P @ A"),
        ("fp32 products may round their operands", "kernels/cpu",
         "if rounded := rounds_fp32():", "if rounded := False:"),
        ("without bf16 units Polar Express still rounds to bf16", "kernels/cpu",
         "triton_kernels.cpu = CPU_BF16 if units else CPU_FP32", "triton_kernels.cpu = CPU_BF16 if units else None"),
        ("an exchange forgets the other ranks' rows", "recipe/ranks",
         "torch.sum(self.received.view(-1, len(self.own)), 0, out=self.own)",
         "self.own.copy_(self.received.view(-1, len(self.own))[0])"),
    ),
    "bench/settings.py": (
        ("torchrun leaves a folder of its own", "bench/ranks_bench::test_torchrun_leaves_its_folder_where_it_is_told",
         ', f"--log-dir={folder}"]', "]"),
    ),
    "bench/order.py": (
        ("a table of medians holds one step's waits", "bench/order::test_the_table_holds_medians_of_every_column",
         "for step in steps) for phase", "for step in steps[:1]) for phase"),
    ),
    "data/cached_fineweb10B.py": (
        ("a token that the hub refuses is tried again", "data/downloads::test_a_token_that_the_hub_refuses_is_an_error_at_once_and_named",
         "in (401, 403)", "in ()"),
        ("without a hub no way out is told", "data/downloads::test_without_a_hub_whole_shards_are_told_to_serve",
         'raise DataError(f"{error}: {way_out}") from None', "raise"),
        ("shards where no note can be kept do not serve", "data/downloads::test_shards_that_were_brought_serve_where_no_note_can_be_kept",
         "if error.errno not in NOT_WRITABLE:", "if error:"),
        ("a shard has its name before it is on disk", "data/downloads::test_a_shard_is_on_disk_before_it_has_its_name",
         "        os.fsync(file.fileno())  # a name", "        pass  # a name"),
        ("what else is in the folder of downloads goes with them", "data/downloads",
         "        for emptied in (path.parent, *path.parent.parents):",
         "        __import__('shutil').rmtree(folder, ignore_errors=True)\n        for emptied in ():"),
        ("the other tool's shards are replaced", "data/downloads",
         'if os.path.lexists(args.output / "progress.json"):', "if None:"),
        ("what is behind a link is replaced", "data/downloads::test_a_link_to_where_downloads_arrive_is_refused",
         '"arriving").is_symlink():', '"arriving") is None:'),
        ("a shard goes before the hub's has come", "data/downloads",
         "  # it stays until then", "\n            final.unlink()"),
        ("a file of another format is replaced", "data/downloads::test_a_file_of_another_format_is_not_replaced",
         "        except ForeignFile:", "        except ImportError:"),
        ("more than was announced fills the disk", "data/downloads::test_a_body_without_end_ends_as_more_comes_than_was_announced",
         "if size is not None and", "if None and"),
    ),
    "data/fineweb.py": (
        ("a parquet file that was there is deleted", "data/downloads::test_a_parquet_file_that_was_there_is_used_and_stays",
         "    if not found and name not in", "    if name not in"),
        ("a page that leads to itself is followed", "data/downloads::test_a_list_that_never_ends_or_makes_no_sense_is_named",
         "if len({*names}) < len(names):", "if None:"),
        ("a validation shard alone may be asked for", "data/downloads::test_a_limit_that_leaves_nothing_to_train_on_is_refused",
         "if 0 < args.num_tokens <= args.shard_tokens:", "if 0 < args.num_tokens < args.shard_tokens:"),
        ("a validation shard alone is all whole", "data/downloads::test_a_subset_that_leaves_nothing_to_train_on_is_told",
         "if len(progress.shards) < 2:", "if len(progress.shards) < 1:"),
    ),
    "data/encodings.py": (
        ("the limit of tiktoken's requests stays for others",
         "data/encodings::test_a_server_that_does_not_answer_is_not_waited_for_without_end", "HTTPAdapter.send = send\n", "pass\n"),
    ),
    "data/loader.py": (
        ("shards of two makers are trained on", "data/loader::test_shards_of_two_makers_are_no_data",
         "if others := sorted(shards - own):", "if others := ():"),
        ("tokens of a shard that gives no whole step are not told", "runtime/bad_input::test_a_bad_shard_is_named",
         "            present += int(documents.ends[-1])", "            present += 0"),
        ("shards of two texts are trained on", "data/local_text::test_a_run_takes_no_shards_of_two_texts",
         "    check_replaced(Path(folder))\n", ""),
        ("shards of another encoding are trained on",
         "data/loader::test_settings_that_are_not_those_of_the_shards_manifest_are_refused", "made[x] != given[x])]", "None)]"),
        ("a copy of a shard is trained on too", "data/loader::test_tokens_that_would_be_trained_on_twice_are_refused",
         "!= path:", "== 0:"),
        ("the rest of a cut document is not dropped", "data/loader",
         "first, step = ranges[-1][1], step + 1", "first, step = ranges[-1][1] - 1, step + 1"),
        ("a plan without the last target", "data/loader",
         "documents.plan(first, micro_batches, tokens + 1)", "documents.plan(first, micro_batches, tokens)"),
        ("as many documents as slots fit", "data/loader", "fits = documents < slots", "fits = documents <= slots"),
        ("the check counts a document that gives the last target only", "data/loader",
         "count(end - first - int(documents.ends[end - 1] == documents.ends[first] + tokens), tokens, documents.path)",
         "count(end - first, tokens, documents.path)"),
        ("attention passes over the end of a validation document", "data/loader",
         "1 << (longest - 1).bit_length()", "1 << longest.bit_length() - 1"),
        ("a validation document may outgrow its bound", "data/loader",
         ".max())) > max_doc_len:", ".max())) > 2 * max_doc_len:"),
        ("a loader that is made is not ready", "data/loader", "self.next = self.ready.get()", "self.next = None"),
        ("documents are not cut", "data/loader", "np.minimum(lengths, max_doc_len)", "lengths"),
        ("ranks take micro-batches in turn", "data/loader",
         "range(rank * share, (rank + 1) * share)", "range(rank, micro_batches, world_size)"),
        ("a run does not hold its shards", "data/loader", "HELD[folder] = hold_shards(Path(folder))", "pass"),
        ("a shard that comes after the check is read", "data/loader",
         "return LISTED.get(pattern) or find_shards(pattern)", "return find_shards(pattern)"),
        ("tokens that changed since the check are trained on",
         "faults/running::test_a_shard_that_fails_ends_the_run_after_the_step_before",
         "if path in CHECKED and digest_of(tokens) != CHECKED[path]:", "if path in CHECKED and not len(tokens):"),
        ("the encoding of fineweb.py's progress is not looked at", "data/loader::test_an_encoding_that_is_not_that_of_finewebs_progress_is_refused",
         "if encoding and made != encoding and", "if False and"),
    ),
    "data/local_text.py": (
        ("shards of other text that cannot be replaced are replaced", "data/local_text::test_what_is_ready_serves_where_nothing_can_be_written",
         "            elif readers:\n", "            elif True:\n"),
        ("a file that is no text is read to its end", "data/local_text::test_a_large_file_that_is_no_text_is_hardly_read",
         "file.read(2**20)", "file.read()"),
        ("other text of the same size is the old one",
         "data/local_text::test_other_text_of_the_same_size_and_time_is_other_text",
         "                fingerprint.update(path.read_bytes())\n", "                pass\n"),
        ("a link to a file makes its text count again",
         "data/local_text::test_a_file_is_taken_once_whatever_links_lead_to_it",
         "if (place := path.resolve()) not in taken:", "if (place := path) not in taken:"),
        ("a linked folder's text is left out", "data/local_text::test_links_to_folders_are_followed_once",
         "followlinks=True", "followlinks=False"),
        ("a file that can be read now counts as before", "data/local_text::test_a_file_that_can_be_read_later_is_read_then",
         "os.access(path, os.R_OK)", "True"),
        ("good shards go before new ones are whole", "data/local_text::test_a_full_disk_leaves_the_shards_that_are_there",
         "    with folder_to_make(args", "    [(args.output / name).unlink() for name in old]\n    with folder_to_make(args"),
        ("new shards take their places unlisted",
         "data/local_text::test_a_run_cut_off_at_any_write_is_made_again_by_the_same_command",
         "dict.fromkeys((*old, *shards), 0)", "dict.fromkeys(old, 0)"),
        ("what a killed run has left stays in the way",
         "data/local_text::test_a_run_cut_off_at_any_write_is_made_again_by_the_same_command",
         "        shutil.rmtree(folder)\n    folder.mkdir()", "        pass\n    folder.mkdir()"),
    ),
    "data/shards.py": (
        ("a tool adds to shards of others", "data/local_text::test_shards_of_others_are_not_added_to",
         "for pattern in (TRAIN, VALIDATION)) and not", "for pattern in ()) and not"),
        ("folders of a log that was not written stay", "faults/running::test_a_log_without_room_at_the_start_is_named_and_leaves_nothing",
         "_made_for.get(file, [])", "()"),
        ("a folder that a failed download made stays",
         "data/shards::test_a_folder_that_a_failure_leaves_as_it_was_made_goes_and_one_that_waits_makes_its_own",
         "for inside in folder.iterdir() if made else ():", "for inside in ():"),
        ("a fork holds a run's lock", "faults/running::test_a_fork_holds_no_lock", "file.close() for file in [*_to_lock]", "file for file in [*_to_lock]"),
        ("a compressed checkpoint is read", "runtime/checkpoints::test_what_would_become_more_in_memory_than_in_its_file_is_not_read",
         "if any(x.compress_type for x in records.infolist()) or", "if None and"),
        ("a link to a folder becomes a file", "data/shards",
         "if path.exists() and not path.is_file():", "if path.exists() and not (path.is_file() or path.is_symlink()):"),
        ("a failure leaves the folder that it has made", "data/shards",
         "            if made and {*os.listdir(folder)}", "            if not made and {*os.listdir(folder)}"),
        ("a device of the system becomes a file", "data/shards::test_a_device_or_a_fifo_is_not_replaced",
         "if path.exists() and not path.is_file():", "if False:"),
        ("a run begins on shards that a tool replaces", "data/local_text::test_shards_that_a_tool_replaces_are_not_held",
         'BlockingIOError:\n        raise DataError(f"{folder}: another', 'EOFError:\n        raise DataError(f"{folder}: another'),
        ("a user's file goes with the lock", "faults/running::test_a_users_file_in_place_of_the_lock_stays",
         " and not found.st_size", ""),
        ("any address is the hub's", "data/downloads::test_a_variable_that_cannot_be_meant_is_named_at_once",
         'parts.scheme in ("http", "https") and', "True and"),
        ("a folder that cannot be written serves nobody",
         "data/local_text::test_what_is_ready_serves_where_nothing_can_be_written",
         "if error.errno not in NOT_WRITABLE:", "if error.errno in NOT_WRITABLE:"),
        ("an empty shard is whole", "data/shards", "elif count < 1:", "elif count < 0:"),
        ("a shard may be longer than it says", "data/shards", "elif size != expected:", "elif size < expected:"),
        ("a token one beyond the vocabulary", "data/shards runtime/bad_input", ">= vocab_size:", "> vocab_size:"),
        ("negative ids", "data/shards", "if not 0 <= extreme", "if not -1 <= extreme"),
        ("a file that breaks off takes its place", "data/shards",
         "        temporary.unlink(missing_ok=True)\n        raise", "        os.replace(temporary, path)\n        raise"),
        ("a run that another process trains is taken",
         "faults/running::test_a_second_process_on_a_run_is_refused_and_a_dead_one_is_not_in_the_way",
         "LOCK_EX | fcntl.LOCK_NB)\n        except BlockingIOError:\n            raise ValueError",
         "LOCK_SH | fcntl.LOCK_NB)\n        except BlockingIOError:\n            raise ValueError"),
        ("a closed stream ends a tool", "data/local_text::test_a_closed_stream_leads_nowhere",
         "    guard_console()\n", ""),
        ("shards are replaced under a run", "data/local_text::test_shards_that_a_run_holds_are_not_replaced",
         "LOCK_EX | fcntl.LOCK_NB)\n        except BlockingIOError:\n            raise DataError",
         "LOCK_SH | fcntl.LOCK_NB)\n        except BlockingIOError:\n            raise DataError"),
        ("what a folder's name has and a console lacks ends a tool",
         "data/local_text::test_a_console_without_the_letters_of_a_folder_gets_escapes",
         'stream.reconfigure(errors="backslashreplace")', "pass"),
        ("an address may have a blank", "data/downloads::test_a_variable_that_cannot_be_meant_is_named_at_once",
         " and endpoint == endpoint.strip()", ""),
    ),
    "launch/__init__.py": (
        ("a killed rank reads as a good end", "faults/start::test_a_killed_ranks_code_is_known_where_its_signal_is_ignored",
         "signal.signal(signal.SIGCHLD, signal.SIG_DFL)", "pass"),
        ("OpenMP gives fewer threads than PyTorch asks for",
         "faults/environment::test_threads_are_told_to_wait_asleep_before_pytorch_loads", 'os.environ.pop("OMP_DYNAMIC", None)', "pass"),
    ),
    "launch/console.py": (
        ("true is false", "runtime/options", 'return text.lower() in ("true", "1")', 'return text.lower() in ("true",)'),
        ("a slow reader of a non-blocking pipe gets a part", "faults/tools::test_a_slow_reader_of_a_pipe_that_waits_for_nobody_gets_all",
         "os.set_blocking(number, True)", "pass"),
        ("what a thread of an idea still writes is lost", "faults/running::test_what_aborts_an_ending_interpreter_ends_no_finished_run",
         '        atexit.register(end_well, getattr(sys, "last_value", None))\n', "        end_well(None)\n"),
        ("a parent's signal ends a tool that cleans up", "bench/ends::test_a_signal_that_comes_again_at_once_is_the_same",
         "time.monotonic() > first + 1:", "time.monotonic() > first:"),
        ('the end of options is a value of one', 'faults/tools::test_the_end_of_options_is_no_value_of_one',
         'text.endswith("=--")', 'text.endswith("==-")'),
        ("what a message quotes reaches the terminal", "faults/tools::test_nor_does_a_refusal_of_options",
         "        super().error(printable(message))", "        super().error(message)"),
        ("a folder is an output until the work is done", "faults/tools::test_what_cannot_be_a_file_is_no_output_before_the_work",
         "if os.path.exists(path) and not os.path.isfile(path):", "if not os.path.exists(path.parent):"),
        ("a file of any kind is an output", "records/compare::test_options_that_would_do_nothing_are_refused",
         "if path.suffix.lower() not in suffixes:", "if None:"),
        ("a tool is killed, and its ranks go on", "bench/ends::test_a_killed_tool_takes_its_ranks_along",
         "preexec_fn=end_with_parent, ", ""),
        ("a signal while a child starts leaves it", "bench/ends::test_a_signal_while_a_child_starts_ends_it_too",
         "        if _late is not None:", "        if False:"),
        ("what an idea has open at a good end is lost",
         "faults/running::test_what_aborts_an_ending_interpreter_ends_no_finished_run", "    if code == 0:\n", "    if code < 0:\n"),
        ("a launcher is killed, and its ranks go on", "bench/ends",
         "        process.terminate()\n", "        process.kill()\n"),
        ("a tool's folders outlive a signal", "bench/ends",
         "(signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if", "(signal.SIGINT, signal.SIGHUP) if"),
        ("a tool is ended by what nohup ignores", "bench/ends::test_what_nohup_ignores_ends_no_tool",
         " if signal.getsignal(x) != signal.SIG_IGN]", "]"),
        ("an empty text is a value", "faults/start::test_a_mistake_is_one_message_before_any_rank_starts",
         "        if not given:\n", "        if None:\n"),
        ("what an encoding lacks closes the console", "faults/running::test_what_a_console_cannot_show_is_replaced",
         'if escapes else "replace")', 'if escapes else "strict")'),
        ("what a console lacks is not told",
         "faults/running::test_a_console_that_stops_does_not_stop_a_run_and_says_what_it_lacks",
         "if lost := _lost.pop(stream, 0):", "if lost := None:"),
        ("a line that was taken in part is lost",
         "faults/running::test_a_console_that_stops_does_not_stop_a_run_and_says_what_it_lacks",
         "            _left[stream] = rest\n", "            _left[stream] = end.encode()\n"),
    ),
    "launch/environment.py": (
        ("who only looks is waited for aloud", "faults/environment::test_a_lock_that_is_held_for_a_moment_is_not_told",
         "if tries == LOOKS:", "if tries == 0:"),
        ("a foreign folder of pip's configuration gets the packages", "faults/environment::test_what_sends_pip_elsewhere_is_not_heeded",
         "for name, value in SETTING.findall(told):", "for name, value in ():"),
        ("a foreign folder of pip's gets the packages", "faults/environment::test_what_sends_pip_elsewhere_is_not_heeded",
         " if name not in ELSEWHERE}", "}"),
        ("a tool without its packages does not go on in .venv", "faults/environment::test_a_tool_goes_on_in_the_environment_that_run_sh_has_made",
         "        os.execv(python, [python] + sys.orig_argv[1:])", "        pass"),
        ("a link to a folder is emptied", "faults/environment::test_what_is_no_environment_is_not_emptied",
         "if os.path.islink(folder) or not", "if not"),
        ("an environment that does not run is emptied", "faults/environment::test_an_environment_whose_python_fails_is_not_emptied",
         "    if os.path.exists(python):  # as", "    if False:  # as"),
        ("an environment whose Python is gone is emptied", "faults/environment::test_an_environment_without_its_python_is_made_again",
         "            os.rename(folder, aside)\n", "            pass\n"),
        ("an environment that Windows made is emptied", "faults/environment::test_an_environment_without_its_python_is_made_again",
         "holds_files(folder) and os.path.realpath(python)", "os.path.islink(python) and os.path.realpath(python)"),
        ("another user's environment is emptied", "faults/environment::test_the_environment_of_another_user_is_not_emptied",
         "if os.stat(folder).st_uid != os.geteuid():", "if False:"),
        ("another user's environment is filled", "faults/environment::test_an_environment_that_may_not_be_filled_is_named",
         "    elif not os.access(folder, os.W_OK):", "    elif False:"),
        ("versions are compared as texts", "faults/environment",
         'numbers(there) < numbers(oldest or "0")', 'there < (oldest or "0")'),
    ),
    "launch/nests.py": (
        ("a list of tensors is copied as a list alone", "runtime/warm_up::test_an_average_in_the_state_is_the_first_again",
         "return type(tree)(map_tensors(function, value) for value in tree)", "return tree"),
        ("what no checkpoint gives back is saved",
         "runtime/checkpoints::test_a_value_that_no_checkpoint_gives_back_is_told_before_the_first_step",
         "type(x) not in (bool, int, float, str, type(None))", "type(x) in ()"),
    ),
    "launch/signals.py": (
        ("a validation's batch has the time of a step",
         "runtime/signals::test_what_is_slow_has_more_time", ", PAUSE_TO_STOP * self.pausing)", ")"),
        ("one rank alone is ended by a signal that comes twice", "runtime/signals::test_ranks_that_stop_are_deaf_to_a_second_signal",
         "(self.has_peers or self.launched)", "self.has_peers"),
        ("what ends a forked worker ends the run", "runtime/signals::test_a_signal_to_a_forked_worker_ends_it_alone",
         "after_in_child=forget_in_child", "after_in_child=hold_no_more"),
        ("a slow machine has no more time", "runtime/signals::test_what_is_slow_has_more_time",
         "STEPS_TO_STOP * seconds / steps, PAUSE", "0.0, PAUSE"),
        ("a checkpoint that takes long is given up", "runtime/signals::test_a_checkpoint_takes_as_long_as_it_takes",
         "if self.saving or not self.has_peers:", "if not self.has_peers:"),
        ("a launcher's copy of a signal is a second one",
         "runtime/signals::test_the_same_signal_at_once_is_one_and_later_a_second",
         "if self.received in (number, signal.SIGHUP) and time.monotonic()", "if False and time.monotonic()"),
        ("a run's lock outlives a signal", "faults/running::test_a_signal_before_the_first_step_leaves_no_lock",
         "        self.before_end()\n", "        pass\n"),
        ("ranks outlive their launcher", "faults/running::test_a_process_ends_with_its_launcher_but_not_with_a_shell",
         "elif os.getppid() != self.launcher:", "elif not os.getppid():"),
        ("a second signal is not heard", "runtime/signals::test_a_second_signal_ends_at_once_whatever_the_process_waits_for",
         "if self.received or not self.in_training:", "if not self.in_training:"),
        ("a closed terminal ends a run at once",
         "faults/running::test_a_closed_terminal_ends_a_run_like_sigterm_but_not_after_nohup",
         "SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)", "SIGNALS = (signal.SIGINT, signal.SIGTERM)"),
    ),
    "launch/machine.py": (
        ("an earlier run's peak of memory is the next one's", "runtime/machine::test_the_peak_of_an_earlier_run_is_not_the_next_ones",
         'Path("/proc/self/clear_refs").write_text("5")', "pass"),
        ("a variable that is read by another name is not told", "runtime/machine::test_variables_that_the_sources_read_are_told",
         "for name in IN_QUOTES.findall(text)}", "for name in ()}"),
        ("what an idea reads of the environment is not told", "runtime/machine::test_variables_that_the_sources_read_are_told",
         '("read by its sources", own)', '("read by its sources", {})'),
        ("variables with paths are logged", "runtime/machine", ' if "/" not in value)', ")"),
        ("what the forward pass changes is forgotten", "runtime/warm_up::test_a_buffer_that_the_forward_pass_changes_is_refused",
         "if now[x] != first.get(x)):", "if x not in now):"),
        ("what slows every collective is not told", "runtime/machine", "(TORCH(?!ELASTIC)|", "(TORCH_COMPILE|"),
        ("weights that ranks train apart are the first's to tell", "runtime/trouble::test_weights_that_ranks_train_apart_end_the_run",
         "for rank in each)]", "for rank in each[:1])]"),
        ("on GPUs other roundings end a run", "runtime/joining::test_a_tensor_of_one_ranks_own_is_not_saved_for_all",
         "if other and ranks.device.type != \"cuda\" else", "if other else"),
        ("the peak of memory is its parent's", "runtime/machine::test_the_peak_is_not_of_who_started_the_process",
         "        kib = int(re", "        kib = kib or int(re"),
        ("a password of digits is logged", "runtime/machine::test_variables_that_the_sources_read_are_told",
         "key or SECRETS.search(upper) or", "key or"),
        ("a token by its value is logged", "runtime/machine::test_variables_that_the_sources_read_are_told",
         " or SECRET.search(value))", ")"),
    ),
    "launch/unsaved.py": (
        ("the place of an iterator is not told", "runtime/warm_up::test_state_that_no_checkpoint_holds_is_told",
         "return [*iterator.__reduce__()]", "return []"),
        ("what cannot be looked at ends a run", "runtime/warm_up::test_what_cannot_be_looked_at_is_passed_over",
         "contextlib.suppress(Exception):", "contextlib.suppress(OSError):"),
        ("a vocabulary hides an optimizer's state", "runtime/warm_up::test_a_vocabulary_does_not_hide_what_follows",
         "size * (1 + len(parts) // FEW)", "size"),
        ("every number of a corpus is looked at", "runtime/warm_up::test_a_corpus_in_a_list_is_looked_at_in_part",
         "itertools.islice(x, MOST)", "x"),
        ("an idea's own generator is not told", "runtime/warm_up::test_state_that_no_checkpoint_holds_is_told",
         "    if isinstance(x, torch.Generator):", "    if isinstance(x, bool):"),
        ("what an object of an idea holds is not told", "runtime/warm_up::test_state_that_no_checkpoint_holds_is_told",
         'vars(x) if hasattr(x, "__dict__") else {}', "{}"),
        ("an idea's own modules are not looked at", "runtime/warm_up::test_a_module_of_an_idea_is_looked_at",
         "    return beside | {", "    return {"),
        ("state that layout does not tell of is trained with",
         "runtime/checkpoints::test_an_idea_with_state_of_its_own_resumes_if_its_layout_tells_of_it",
         "if other := sorted(given ^ told):", "if other := sorted(told - given):"),
        ("what a tensor has as an attribute is passed over", "runtime/warm_up::test_state_that_no_checkpoint_holds_is_told",
         "            if not (seeded or type(x)", "            if not (text or seeded or type(x)"),
        ("a function that takes another's place is passed over", "runtime/warm_up::test_state_that_no_checkpoint_holds_is_told",
         "    if isinstance(x, NAMES):", "    if None:"),
        ("what is made in C is passed over", "runtime/warm_up::test_state_that_no_checkpoint_holds_is_told",
         "enumerate(x.__reduce_ex__(2))]", "enumerate(())]"),
        ("what a kernel compiles counts as state", "runtime/warm_up::test_what_a_kernel_of_an_idea_compiles_is_no_state",
         "kernel = module.startswith((\"triton.\",", "kernel = module.startswith((\"x.\","),
        ("an infinity in the first state is not told", "runtime/checkpoints::test_a_value_that_is_not_finite_is_told_before_the_first_step",
         "is not finite\" for name in infinite]", "is not finite\" for name in ()]"),
        ("rows of no parameter are not told", "runtime/checkpoints::test_rows_of_no_parameter_are_told_before_the_first_step",
         "for x in state[part] if x not in labels]", "for x in state[part] if None]"),
        ("what comes round in the warm-up is not told", "runtime/warm_up::test_what_comes_round_with_adam_or_without_is_told",
         "for step in (None, 0, 1, 0):", "for step in (None,):"),
        ("what comes round without Adam is not told", "runtime/warm_up::test_what_comes_round_with_adam_or_without_is_told",
         "for step in (None, 0, 1, 0):", "for step in (None, 1, 1, 1):"),
        ("a momentum that follows is no state", "runtime/warm_up::test_a_momentum_that_follows_the_schedules_is_state",
         "differing(set_before or now, now)", "[]"),
        ("hooks of a tensor are passed over", "runtime/warm_up::test_state_that_no_checkpoint_holds_is_told",
         "(*HOOKS, *[\"grad\"] * x.is_leaf)", "[\"grad\"] * x.is_leaf"),
        ("the place in a file is passed over", "runtime/warm_up::test_state_that_no_checkpoint_holds_is_told",
         "    if isinstance(x, io.IOBase):", "    if None:"),
        ("a recipe's own modules are passed over", "runtime/warm_up::test_the_modules_of_the_recipe_are_looked_at",
         "PROJECT = {\"data\",", "PROJECT = {\"triton_kernels\", \"data\","),
    ),
    "launch/sources.py": (
        ("a run goes on in another folder", "runtime/sources::test_a_run_with_relative_paths_stays_in_its_folder",
         'elif event == "os.chdir" and', "elif None and"),
        ("a worker may not change its folder", "runtime/sources::test_a_run_with_relative_paths_stays_in_its_folder",
         "self.relative[0] == os.getpid() and", "self.relative[0] and"),
        ("a log that ends in a rule is no run's",
         "faults/running::test_a_log_that_ends_in_an_ideas_own_rule_is_not_written_over",
         '.rpartition(end)[2].startswith(b"Python ")', '.rpartition(end)[2].startswith(b"")'),
        ("a file that a script reads is in no log",
         "runtime/sources::test_the_files_that_a_script_reads_are_told_by_their_checksums",
         "texts, self.read(settings))", "texts, {})"),
        ("a file that a run writes is one that it reads",
         "runtime/sources::test_the_files_that_a_script_reads_are_told_by_their_checksums",
         "(given[2] or 0) & (os.O_WRONLY | os.O_RDWR)", "(given[2] or 0) & 0"),
        ("code without a file trains in a script's name", "runtime/sources::test_code_that_no_log_would_hold_trains_nothing",
         '        if not running:  # python', "        if None:  # python"),
        ("a folder that the script adds is not looked into", "runtime/sources::test_so_is_what_it_imports_from_a_folder_that_the_script_adds_and_by_a_text",
         'if self._beside(f"{file}")]', "if None]"),
        ("a module that a text names is not held", "runtime/sources::test_so_is_what_it_imports_from_a_folder_that_the_script_adds_and_by_a_text",
         "*(imports_by_text(tree) if any(name.encode() in source for name in BY_TEXT) else ())]", "]"),
        ("a name that a line imports is a module", "runtime/sources::test_a_module_from_elsewhere_is_refused",
         "(*roots, *FROM_IMPORT", "(*re.findall(r'import (\\w+)', text), *roots, *FROM_IMPORT"),
        ("what a function imports on a line that Python continues is not in the log",
         "runtime/sources::test_what_a_loaded_file_imports_later_is_held_however_its_lines_end",
         'lines = CONTINUED.sub(b" ", self.contents[path])', "lines = self.contents[path]"),
        ("what Python cannot parse is logged", "runtime/sources::test_what_a_step_imports_later_is_held_too",
         "        ours -= self.broken - loaded\n", ""),
        ("a module from an archive is in no log", "runtime/sources::test_a_module_from_an_archive_is_refused",
         " or file in packed)", ")"),
        ("a script with a NaN never starts", "runtime/sources::test_a_script_that_is_edited_between_pythons_reading_and_ours_is_refused",
         'return f"{x!r}" if isinstance(x, float | complex | tuple) else x', "return x"),
        ("a source's NUL ends the log", "runtime/sources::test_a_source_that_no_log_can_hold_is_named",
         "self.contents[path].find(0)) >= 0", "self.contents[path].find(0)) > 1 << 40"),
        ("a project among packages logs its script alone",
         "runtime/sources::test_the_log_holds_every_file_that_was_imported",
         'return bool(INSTALLED.search(inside)) or', 'return bool(INSTALLED.search(file)) or'),
        ("a rank by hand runs a stale compiled form", "runtime/sources::test_a_rank_by_hand_runs_no_stale_compiled_form",
         "(held != now or is_stale(file))", "held != now"),
        ("a script of any name is trained", "faults/start::test_a_script_whose_name_no_log_could_give_back_is_refused",
         "not name.isprintable() or ", ""),
        ("installed packages are read", "runtime/sources::test_hidden_folders_and_environments_are_not_read",
         ' or INSTALLED.fullmatch(f"/{x}/"))', ")"),
        ("a late import runs what the log does not hold", "runtime/sources",
         "self.contents.get(file, now if", "{}.get(file, now if"),
        ("what comes during a run is imported", "runtime/sources::test_what_comes_or_goes_during_a_run_reaches_no_later_import",
         "        if then and (not", "        if () and (not"),
        ("what a function imports later is not in the log", "runtime/sources::test_what_a_step_imports_later_is_held_too",
         "if is_loaded and not LATER_IMPORT.search(lines) and", "if is_loaded or path == self.path or"),
        ("a file of the project hides one beside the script",
         "runtime/sources::test_of_two_files_of_a_name_the_log_holds_the_one_that_takes_part",
         "folders = [self.path.parent, ROOT]", "folders = [ROOT, self.path.parent]"),
        ("what a link leads to is no source", "runtime/sources::test_a_link_beside_the_script_is_held_wherever_it_leads",
         "(path for path in places(file) if path.is_rel", "(path for path in [*places(file)][2:] if path.is_rel"),
        ("a source that is no UTF-8 is logged as another", "runtime/sources::test_a_source_that_no_log_can_hold_is_named",
         "self.contents[path].decode()", 'self.contents[path].decode(errors="replace")'),
        ("a new run replaces the trace of another", "faults/start::test_a_trace_that_is_there_is_told_before_the_ranks_start",
         "if not resumed and getattr(", "if resumed and getattr("),
        ("installed packages count as ours", "runtime/sources",
         "(?:site|dist)-packages", "site-packages"),
        ("a header alone keeps its name", "faults/running::test_a_run_that_ended_before_its_first_line_keeps_no_name",
         "if file.read() != end:", "if True:"),
        ("a new run deletes the checkpoints of another",
         "faults/start::test_checkpoints_of_another_run_are_told_before_the_ranks_start",
         'if any(folder.glob("step_*.pt")):', "if None:"),
        ("a resumed run deletes the checkpoints of another",
         "faults/checkpoint_files::test_a_resumed_run_does_not_delete_the_checkpoints_of_another",
         "if resumed and (holds_run(log) or", "if resumed or (holds_run(log) and"),
        ("an edit during a run reaches its log", "runtime/sources",
         "{self.path, *project, *hiding}", "{self.path}"),
        ("the project's module runs in place of the script's own", "runtime/sources::test_a_changed_copy_of_our_module_beside_a_script_is_the_one_that_runs",
         "{self.path, *project, *hiding}", "{self.path, *project}"),
        ("a module from elsewhere takes part, in no log", "runtime/sources::test_a_module_from_elsewhere_is_refused",
         "if foreign := self in sys.meta_path and", "if foreign := None and"),
        ("a Python without PyTorch ends in a traceback", "runtime/sources::test_a_python_without_pytorch_is_told_what_starts_a_script",
         "            if lacking := [name", "            if lacking := [][:0] and [name"),
    ),
    "launch/start.py": (
        ("an empty argument is an option", "faults/start::test_a_mistake_is_one_message_before_any_rank_starts",
         "        if not late:\n", "        if False:\n"),
        ("a check alone starts the ranks", "faults/start::test_a_good_start_says_what_it_does_and_how_long_it_took",
         "0 if CHECK_ALONE in os.environ else Ranks", "Ranks"),
        ("validation's logits take no memory", "faults/start::test_a_large_vocabulary_counts",
         "+ LOGIT_MEMORY * vocab, TRAINED", "+ 0 * vocab, TRAINED"),
        ("the backward pass takes no memory", "faults/start::test_the_backward_pass_counts",
         "trained * batch // s.micro_batches)", "0)"),
        ("a script that changes the folder changes what its paths mean",
         "faults/start::test_a_script_that_changes_the_folder_as_it_is_imported_changes_no_path",
         "        moves = os.getcwd() != here  # as", "        moves = False  # as"),
        ("a rank that leaves in the midst of its training ends well", "faults/start::test_a_ranks_end_is_the_runs_code_and_one_message",
         'if marks.count(b"+") > marks.count(b"-"):', "if False:"),
        ("the compiler is told of a path with a blank", "faults/start::test_what_compiled_code_needs_is_asked_before_the_ranks_start",
         "    for path, way_out in ((pytorch,", "    for path, way_out in () and ((pytorch,"),
        ("the first record's source looks for the project's data where the user stands", "faults/start::test_so_is_the_source_of_the_first_record",
         "options + [f\"--{name}={ROOT / paths[name]}\" for name in meant]", "options"),
        ("ranks read PyTorch's templates by the locale", "faults/start::test_ranks_read_files_as_utf8_whatever_the_locale",
         'ours |= {"PYTHONUTF8": "1", "PYTHONIOENCODING": kept}', "pass"),
        ("a compiler that fails is one", "faults/start::test_what_compiled_code_needs_is_asked_before_the_ranks_start",
         'failure([command, "--version"]) for', "not command for"),
        ("a signal that is blocked ends no run", "faults/start::test_signals_that_a_parent_has_blocked_end_a_run",
         "        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)", "        pass"),
        ("a part of the project is run as a script", "faults/start::test_a_part_of_the_project_is_no_script",
         "if {real, real.parent} & PARTS and", "if {real, real.parent} & {0} and"),
        ("a script that SCRIPT names is passed over", "faults/start::test_a_mistake_is_one_message_before_any_rank_starts",
         'if not named and other.endswith(".py")', 'if named and other.endswith(".py")'),
        ("what a killed rank has started lives on", "faults/start::test_what_a_killed_rank_has_started_ends_with_it",
         "                    os.killpg(process.pid, signal.SIGKILL)", "                    pass"),
        ("a signal before a rank heeds it is a fault", "faults/start::test_a_ranks_end_is_the_runs_code_and_one_message",
         "        if -code in heeded_signals():", "        if None:"),
        ("a default outside of its limits is a user's", 'faults/start::test_a_default_outside_of_its_limits_is_told_as_the_scripts',
         '    check_defaults(settings.check_values, script.Hyperparameters, script.PRESETS)\n', ''),
        ("a signal within an import is an error of that", "faults/start::test_a_signal_within_an_imports_c_code_ends_all_the_same",
         "        importing.append(name)\n", ""),
        ("a launcher that stood still has no patience", "faults/start::test_time_in_which_the_launcher_stood_still_is_no_patience",
         "self.awake += min(last - before, 1.0)", "self.awake += last - before"),
        ("a limit of threads is met by the ranks", "faults/start::test_a_limit_of_threads_is_told_before_the_ranks_start",
         "    check_threads(ranks, torch.get_num_threads(), bool(getattr(s, \"trace_steps\", \"\")))\n", ""),
        ("a whole number is taken for a float's default",
         "faults/start::test_a_setting_must_be_of_its_type_and_have_a_name_of_its_own",
         "if type(value) is not kind]", "if type(value) not in PLAIN]"),
        ("mistakes are told once the data are made", "faults/start::test_a_mistake_is_told_before_data_are_made",
         "begun = time.monotonic()\n\n    def", "begun = make_data(MAKERS[own])\n\n    def"),
        ("strings of a set have an order on each rank", "faults/start::test_the_environment_of_a_rank_is_torchruns",
         ', "PYTHONHASHSEED": "0"}', "}"),
        ("a gap between shards is not told", "faults/start::test_a_shard_that_is_not_there_between_others_is_told",
         "for gap in gaps(getattr(data, \"shards\", {})):", "for gap in ():"),
        ("a script after the options is one of them", "faults/start::test_a_mistake_is_one_message_before_any_rank_starts",
         'if late.endswith(".py") and', 'if late.endswith(".pyc") and'),
        ("data are made anew under a run that goes on",
         "faults/start::test_a_run_that_goes_on_keeps_the_data_that_it_began_with", "kept = bool(s.resume) and", "kept = False and"),
        ("a rank looks for modules in the project first",
         "faults/start::test_a_rank_finds_the_modules_beside_its_script_first", ', "PYTHONSAFEPATH": ""}', "}"),
        ("files that a control group has cached count as used", "faults/start::test_the_memory_of_a_control_group_is_all_that_is_free",
         "free = min(free, limit - used + given_back)", "free = min(free, limit - used)"),
        ("a hang-up after SIGTERM is a second signal", "faults/start::test_a_hang_up_beside_another_signal_is_no_second_one",
         "again = self.received and (number == hang_up or soon and {number, hang_up} & {*self.received})",
         "again = number in self.received and (number == hang_up or soon)"),
        ("two signals at once are a traceback", "faults/start::test_two_signals_before_the_ranks_start_are_one",
         "        if len(heard) == 1:\n", "        if True:\n"),
        ("Ctrl-Z stops the launcher alone", "faults/start::test_ctrl_z_does_not_stop_the_launcher_alone",
         "            signal.signal(signal.SIGTSTP, self._stay)  #", "            pass  #"),
        ("a ~ in an option is a folder of that name", "faults/start::test_a_home_folder_in_an_option_is_meant_as_such",
         "meant = os.path.expanduser(value) if is_given(", "meant = value if is_given("),
        ("a setting may be what no checkpoint gives back",
         "faults/start::test_a_setting_that_no_checkpoint_could_give_back_is_refused",
         "    check_plain(script.Hyperparameters, script.PRESETS)\n", ""),
        ("who saves is killed", "faults/start::test_what_goes_on_is_waited_for", "left = max(deadline, busy) -", "left = deadline -"),
        ("a stale compiled form is run", "faults/start::test_a_stale_compiled_form_is_not_run",
         "<= os.stat(path).st_ctime_ns", "<= os.stat(path).st_mtime_ns"),
        ("a script that ends while it is imported ends well",
         "faults/start::test_a_script_that_ends_while_it_is_imported_is_told",
         "raise left if isinstance(left.code, str) else", "raise left if left else"),
        ("a source that no log can hold starts ranks", "faults/start::test_a_source_that_is_not_utf_8_is_refused",
         "script.SOURCES.imported()", "script.SOURCES"),
        ("a control group of version 1 has no end", "faults/start::test_the_memory_of_a_control_group_is_all_that_is_free",
         '    ("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes",',
         '    ("sys/fs/cgroup/none", "memory.limit_in_bytes", "memory.usage_in_bytes",'),
        ("the control group of a whole job has no end", "faults/start::test_the_memory_of_a_control_group_is_all_that_is_free",
         "groups |= {group for path in own for group in (path, *path.parents)}", "groups |= {*own}"),
        ("a script that trains nothing ends well", "faults/start::test_a_script_that_would_train_nothing_is_refused",
         ' or not calls_main(path.read_bytes())', ""),
        ("no rank is a number of ranks", "faults/start", "int(text) > 0)", "int(text) >= 0)"),
        ("one rank's memory is all that is needed", "faults/start", "    if need > free:", "    if each > free:"),
        ("more ranks than share the work evenly", "faults/start",
         "(gpus or 2) and micro_batches % n == 0", "(gpus or 2) and micro_batches >= n"),
        ("the ranks' store listens on all interfaces", "faults/start",
         'listening.bind(("127.0.0.1", 0))', 'listening.bind(("", 0))'),
        ("a signal ends a run with a rank's own code", "faults/start", "return 128 + self.received[0]", "return code"),
        ("a rank's death ends no other", "faults/start",
         "                self._send(signal.SIGTERM)\n", "                pass\n"),
        ("a run is ended by what nohup ignores", "faults/start",
         "return [number for number in SIGNALS if signal.getsignal(number) != signal.SIG_IGN]", "return [*SIGNALS]"),
        ("the tool that makes the data outlives its caller", "faults/start",
         "            making.terminate()\n", "            making.kill\n"),
        ("a bug in a script is a line", "faults/start", "        if is_message(error):", "        if error:"),
        ("two starts fetch FlashAttention 3 at once", "faults/flash_attention",
         "                fcntl.flock(file, fcntl.LOCK_EX)\n", "                pass\n"),
        ("what a script begins at its import outlives the launcher", "faults/start::test_what_a_script_begins_as_it_is_imported_ends_with_the_launcher",
         "        for pid in child_processes():", "        for pid in ():"),
        ("the launcher calls a script's functions of atexit", "faults/start::test_what_a_script_begins_as_it_is_imported_ends_with_the_launcher",
         "        os._exit(code)\n\n\ndef child", "        sys.exit(code)\n\n\ndef child"),
        ("the launcher's console must have an encoding", "faults/start::test_what_a_script_begins_as_it_is_imported_ends_with_the_launcher",
         "getattr(file, \"encoding\", None) or \"utf-8\"", "file.encoding"),
        ("a data tool outlives a killed launcher", "faults/start::test_a_data_tool_ends_with_a_launcher_that_is_killed",
         ", \"preexec_fn\": getattr(ours, \"end_with_parent\", None)}", "}"),
    ),
    "runtime/checkpoints.py": (
        ("gradients that a rank lacks shift the others'",
         "runtime/joining::test_gradients_that_one_rank_lacks_are_put_together_by_label",
         'sorted((state["partial"] | zeros).items())', 'sorted(state["partial"].items())'),
        ("what a killed save has left needs room",
         "faults/start::test_a_checkpoint_needs_room_for_its_log_and_the_pending_gradients_of_all_ranks",
         "shutil.disk_usage(folder).free + left)", "shutil.disk_usage(folder).free)"),
        ("a run at its end needs room", "faults/start::test_a_checkpoint_needs_room_for_its_log_and_the_pending_gradients_of_all_ranks",
         "files = min(saves, max(1,", "files = max(1, max(1,"),
        ("gradients wait as the schedule says",
         "runtime/checkpoints::test_an_idea_that_steps_otherwise_than_its_schedule_says_resumes",
         "x, manager.layout(None)", "x, manager.layout(step)"),
        ("a sparse tensor is taken", "runtime/bad_input::test_a_checkpoint_that_contradicts_itself_or_the_run_is_refused",
         "or y.layout != torch.strided)", "or False)"),
        ("an idea with a module cannot be resumed", "runtime/checkpoints::test_an_idea_with_a_module_resumes",
         'name.partition(".parameters.")[2]', 'name.split(".")[3]'),
        ("one rank's number is saved for all", "runtime/joining::test_a_number_of_one_ranks_own_is_not_saved_for_all",
         "    ranks.check_same({name: f\"{x}\" for name, x in leaves(state) if not isinstance(x, Tensor)})\n", ""),
        ("a run goes on elsewhere in the data",
         "runtime/checkpoints::test_a_checkpoint_whose_steps_took_other_batches_is_refused",
         '{"tokens": sum(map(manager.batch_tokens, range(saved["step"]))), **', "{**"),
        ("room for the pending gradients of one rank",
         "faults/start::test_a_checkpoint_needs_room_for_its_log_and_the_pending_gradients_of_all_ranks",
         '(ranks if name.startswith("partial.") else 1)', "1"),
        ("one checkpoint more is deleted", "runtime/trouble faults/checkpoint_files",
         "[keep - 1 :]:  # first", "[max(0, keep - 2) :]:  # first"),
        ("damage is not looked for", "runtime/bad_input", "if hashlib.sha256(payload).digest() != digest:", "if not digest:"),
        ("another recipe's checkpoint is told by its settings alone", "recipe/parity",
         "if held and held != {*labels} else []", "if not held else []"),
        ("a checkpoint of infinities is taken", "runtime/bad_input",
         'faults + [f"state.{name} is not finite" for name in non_finite(state)]', "faults"),
        ("an idea's files with a checkpoint's name are deleted",
         "faults/checkpoint_files::test_so_do_those_with_a_checkpoints_name", " and is_ours(old)]", "]"),
        ("another run's checkpoint is deleted", "faults/checkpoint_files::test_so_do_checkpoints_of_another_run_and_copies",
         "% (MAGIC, run, step)", '% (MAGIC, b"", step)'),
        ("pending gradients of other ranks are dropped", "runtime/checkpoints::test_a_checkpoint_serves_any_number_of_ranks",
         'range(ranks.rank, len(whole["partial"]), ranks.world_size)', "range(ranks.rank, ranks.rank + 1)"),
        ("a rank takes the first rows of a shard", "runtime/checkpoints::test_a_checkpoint_serves_any_number_of_ranks",
         "map_tensors(lambda x: x[manager.own_rows[label]], state)",
         "map_tensors(lambda x: x[: len(x[manager.own_rows[label]])], state)"),
        ("any setting may change on resume", "runtime/bad_input runtime/checkpoints",
         "if x in there and x not in MAY_CHANGE_ON_RESUME and f", "if x not in here and f"),
        ("the log takes no room in a checkpoint",
         "faults/start::test_a_checkpoint_needs_room_for_its_log_and_the_pending_gradients_of_all_ranks",
         "files * (2**20 + sum(", "files * (0 + sum("),
        ("no room is needed for the one in the making", "runtime/trouble faults/checkpoint_files",
         "max(1, keep + 1 - sum(", "max(1, keep - sum("),
        ("a tensor of the first rank's is given to all", "runtime/joining::test_a_tensor_of_one_ranks_own_is_not_saved_for_all",
         "leaves({\"same\": state[\"same\"]})", "leaves({})"),
        ("a step that is a tensor ends a search", "faults/checkpoint_files::test_a_step_that_is_no_number_is_passed_over",
         "if f\"{held!r}\" != f\"{(step_of(path), run)!r}\":", "if held != (step_of(path), run):"),
    ),
    "runtime/log.py": (
        ("a checkpoint holds a line that its log does not",
         "faults/running::test_a_line_that_utf8_does_not_have_keeps_checkpoints_usable",
         'self.lines.append(encoded(f"{text}\\n").decode())', 'self.lines.append(f"{text}\\n")'),
        ("a log that another hand makes longer stays so",
         "faults/running::test_a_log_that_is_lost_is_written_again_from_memory",
         "there and (there.st_dev, there.st_ino, there.st_size) == (*self.place, self.size)",
         "there and (there.st_dev, there.st_ino) == self.place"),
        ("latest takes a course that the run has left",
         "faults/checkpoint_files::test_a_log_with_fewer_lines_is_of_the_same_course_unless_that_went_on_from_an_earlier_step",
         r'if f"{environment}\n{RULE}".startswith(there) or', "if True or"),
        ("the loss of all ranks is their sum", "recipe/losses",
         "self.numbers[0] = loss / ranks.world_size", "self.numbers[0] = loss"),
        ("the step's average over one step too many", "records/runlog runtime/run",
         "1000 * seconds / max(step, 1)", "1000 * seconds / (step + 1)"),
        ("the clock forgets what was before a pause", "runtime/run",
         "return self.before + time.perf_counter() - self.started", "return time.perf_counter() - self.started"),
        ("the validation loss with a digit less", "runtime/run", "val_loss:{val_loss:.4f} ", "val_loss:{val_loss:.3f} "),
        ("a console must say whether it is a terminal", "runtime/run::test_a_stream_of_a_scripts_own_gets_plain_lines",
         "getattr(sys.stdout, \"isatty\", bool)()", "sys.stdout.isatty()"),
    ),
    "runtime/options.py": (
        ("a seed may have more bits than PyTorch takes", "runtime/options::test_a_bad_option_is_named",
         "not least <= value < 2**32:", "not least <= value < 2**40:"),
        ("settings change with each copy", "runtime/options::test_settings_that_change_when_they_are_copied_are_refused",
         '!= f"{getattr(found, x)!r}"]', '== ""]'),
    ),
    "runtime/ranks.py": (
        ("ranks wait for a first one that writes", "runtime/joining::test_the_others_meet_a_first_rank_that_takes_long",
         "wait([work], pause)", "wait([work])"),
        ("an error of another rank is not raised", "runtime/bad_input runtime/trouble runtime/joining",
         "            if message:\n", "            if message and rank == 0:\n"),
        ("what a rank lacks is no difference",
         "runtime/joining::test_ranks_that_found_another_thing_than_the_first_are_named",
         "for x in {**first, **found} if", "for x in found if"),
    ),
    "runtime/run.py": (
        ("a loop that a break has left ends well", "faults/running::test_a_train_that_returns_early_ends_no_run_well",
         "if self.tokens_done < self.tokens:", "if False:"),
        ("two processes train one run", "faults/running::test_a_lock_that_was_deleted_is_taken_again",
         "            self.locks[:] = map(keep_lock, self.locks)\n", ""),
        ("a run under way is another run's log", "faults/start::test_a_run_under_way_is_told_as_such",
         '        check_free(Path(s.log_dir, f"{run_id}.lock"))\n', ""),
        ("the model of a run that has ended stays", "runtime/run::test_the_model_of_an_earlier_run_is_given_back",
         "        gc.unfreeze()  # for", "        pass  # for"),
        ("a loss of finite weights goes on", "runtime/trouble::test_a_loss_of_weights_that_are_finite_and_too_large_says_so",
         'return "" if math.isfinite(loss) else', 'return "" if loss else'),
        ("a validation is no pause", "runtime/signals::test_a_run_is_in_a_pause_while_it_validates",
         "self.signals.pausing = True", "self.signals.pausing = False"),
        ("a dict of an idea's is compared with itself",
         "runtime/checkpoints::test_a_dict_of_an_idea_that_changes_its_kinds_ends_the_run_at_its_first_save",
         "map_tensors(lambda x: x, manager.layout(1))", "manager.layout(1)"),
        ("a rule's state may change its kind", "runtime/trouble::test_a_rules_state_that_changes_its_kind_is_found_at_a_save",
         "if kinds := kinds or", "if kinds := "),
        ("ranks begin with other weights", "runtime/joining::test_ranks_that_begin_with_other_weights_do_not_train",
         "} | weights | self.buffers", "} | self.buffers"),
        ("room is wanted for what was saved before", "faults/start::test_room_is_wanted_for_what_will_be_saved",
         "saved_steps(s, first)", "saved_steps(s, 0)"),
        ("a loop that is left ends well", "faults/running::test_a_train_that_returns_early_ends_no_run_well",
         "if error in (None, SystemExit) and self.signals.in_training:", "if error is None and not self.signals.in_training and self.locks:"),
        ("ranks may train weights apart", "runtime/trouble::test_weights_that_ranks_train_apart_end_the_run",
         "\"weights\", self.manager.live_tensors()[\"weights\"], f", "\"weights\", {}, f"),
        ("a step that no checkpoint may hold is saved", "runtime/trouble::test_a_step_that_no_checkpoint_may_hold_is_found_at_a_save",
         "kinds or self.manager.contradictions(state, step)", "kinds"),
        ("a source that no log can hold is a bug of a rank's", "runtime/sources::test_so_it_is_by_a_rank_that_torchrun_starts",
         "ranks.on_all(self.sources.of_run)", "self.sources.of_run()"),
        ("the clock runs during validation", "runtime/run",
         "        self._write_pending()\n        self.clock.stop()\n", "        self._write_pending()\n"),
        ("a loss that is not finite goes on", "runtime/trouble",
         "        if not math.isfinite(loss):\n", "        if math.isinf(loss) and False:\n"),
        ("saved one step late", "runtime/checkpoints",
         "(*range(every, last, every), last)", "(*range(every + 1, last, every), last)"),
        ("a failed last checkpoint is a good end", "runtime/trouble faults/checkpoint_files faults/running",
         "if self.log.unwritten else self.unsaved", 'if self.log.unwritten else ""'),
        ("ranks wait for the sample", "runtime/run::test_no_rank_waits_for_the_sample",
         "        self.log.close()\n        lacks", "        self.ranks.gather(None)\n        self.log.close()\n        lacks"),
        ("the trace of a run that is through is not written",
         "faults/running::test_a_signal_in_the_sample_leaves_the_trace_and_the_logs_last_line",
         "= False, self.at_end()", '= False, ""'),
        ("a run that has gone on is cut back",
         "faults/checkpoint_files::test_a_run_that_saves_while_its_latest_is_read_is_not_cut_back",
         "meanwhile: start again\") if new else None", "meanwhile: start again\") if False else None"),
        ("ranks may train with other options",
         "runtime/joining::test_a_node_that_would_train_something_else_stops_all_ranks",
         'if x not in ("data", "log_dir")} | shards', 'if x == "seed"} | shards'),
        ("ranks may train other sources", "runtime/joining::test_a_node_that_would_train_something_else_stops_all_ranks",
         "same | {x: checksum(encoded(text)) for x, text in self.logged.items()} |", "same |"),
        ("ranks may train on other shards",
         "runtime/joining::test_a_node_that_would_train_something_else_stops_all_ranks",
         'not in ("data", "log_dir")} | shards', 'not in ("data", "log_dir")}'),
        ("the log does not tell what its shards held", "runtime/run::test_the_log_tells_what_the_shards_held",
         'x!a} {text[-8:]}"', 'x!a} {text[:8]}"'),
        ("earlier checkpoints are good where there are none", "runtime/trouble::test_a_first_save_promises_no_earlier_ones",
         "\" * any(checkpoints.checkpoints(self.folder))", "\""),
    ),
    "sample.py": (
        ("a sample's products are not the run's", "runtime/sample::test_a_checkpoint_writes_text",
         "        trainer.use_cpu()\n", "        pass\n"),
        ("a NUL that a model writes ends the log", "runtime/sample::test_a_log_holds_no_nul_of_a_sample",
         '.replace("\\0", "\\\\x00")', ""),
        ("the smallest nucleus holds nothing",
         "runtime/sample::test_the_nucleus_is_the_fewest_likeliest_that_reach_its_share",
         "order[1:][(ranked.cumsum(0) - ranked)[1:] >= nucleus]", "order[(ranked.cumsum(0) - ranked) >= nucleus]"),
    ),
    "records/changes.py": (
        ("shards in another order are the same tokens", "records/verdict::test_other_tokens_are_held_against_a_comparison",
         "sorted(log.shards.items()) if", "sorted(log.shards.items(), key=lambda item: item[1]) if"),
        ("changed source of a resumption is not told", "records/compare::test_runs_that_went_on_with_changed_source_say_so",
         "if diff := resumed_with_changes(log).splitlines():", "if diff := []:"),
    ),
    "records/curves.py": (
        ("a loss worth more steps than a run has is tested", "records/curves::test_a_loss_that_is_worth_too_many_steps_has_no_test",
         "if comparable and not far and", "if comparable and"),
        ("a stage's end by place is not read", "records/plot::test_stages_begin_where_the_one_before_ends",
         "dict(zip(fields.get(call.func.id, []), call.args)) | ", "{} | "),
        ("slopes over many steps and few have a mean", "records/curves::test_a_slope_over_more_steps_does_not_count",
         "ALIKE = 1.25", "ALIKE = 125"),
        ("the slope's own error is left out", "records/curves",
         "math.hypot(found.error, gain * price * slope_error / slope)", "found.error"),
        ("a loss gain in steps turned round", "records/curves",
         "gain = mean(told), mean(a.losses) - mean(b.losses)", "gain = mean(told), mean(b.losses) - mean(a.losses)"),
    ),
    "records/extract.py": (
        ("what is no source is taken out of a log", "records/extract::test_what_is_no_source_is_refused",
         'if not name.endswith(".py"):', "if None:"),
        ("a source's path may leave the folder", "records/extract",
         'if any(part in ("", ".", "..")', 'if any(part in ("", ".")'),
        ("the new script comes first", "records/extract faults/tools",
         "for i in (*range(1, len(paths)), 0):", "for i in range(len(paths)):"),
        ("the old script stays until the new one comes", "faults/tools",
         "            paths[0].unlink()\n", "            pass\n"),
    ),
    "records/groups.py": (
        ("logs in a linked folder are passed over", "records/compare::test_a_link_to_a_folder_is_followed_once",
         "followlinks=True", "followlinks=False"),
        ("a copied log counts twice", "records/kinds records/compare",
         "if log.times and content in seen:", "if not log.times and content in seen:"),
        ("a copy with a blank at a line's end counts twice", "records/kinds",
         "(*sorted(log.times.items()), *log.val", "(*log.times.items(), *log.val"),
        ("half of the runs are most of them", "records/kinds",
         "if 2 * len(group.runs) <= complete or", "if 2 * len(group.runs) < complete or"),
    ),
    "records/history.py": (
        ("a record is made before the others' pages are looked at", "records/history::test_an_authors_own_text_stays",
         "    pages(root)  # what is wrong", "    pass  # what is wrong"),
        ("--check writes", "records/history::test_options_that_do_not_go_together_are_refused",
         "if options.check and (options.add or options.picture):", "if None:"),
        ("a baseline becomes another record", "records/history::test_a_baseline_does_not_become_the_record",
         "if found.own_baseline]", "if False]"),
        ("times of several machines have a mean", "records/history::test_times_of_different_machines_have_no_mean",
         " and not on_several_machines(runs) else", " else"),
        ("a record's pairs are compared by means", "records/history::test_runs_that_alternated_are_compared_in_pairs_by_the_record_too",
         "record.target, console, record.pairs)", "record.target, console)"),
        ("records are read before the arguments", "records/history::test_what_the_arguments_alone_tell_is_told_before_all_records_are_read",
         "    known = record_names(root)", "    known = read_records(root)"),
    ),
    "records/kinds.py": (
        ("a setting's name hides a recipe's", "records/kinds::test_what_can_change_a_run_is_another_source",
         "        if is_own(node.targets, ANYWHERE):", "        if is_own(node.targets, MAY_DIFFER_BETWEEN_RUNS):"),
        ("runs of another length share a mean", "records/kinds", ', "number of steps": log.validations[-1][0]}', "}"),
        ("any argument may differ between runs", "records/kinds", "if node.arg in ANYWHERE:", "if node.arg:"),
        ("runs of other tokens share a mean", "records/kinds", "log.validations[-1][0]} | shards | made_with(log)",
         "log.validations[-1][0]} | made_with(log)"),
        ("annotations in a class do not count", "records/kinds",
         "if self.in_class or self.is_decorated:", "if self.is_decorated:"),
    ),
    "records/race.py": (
        ("another race takes the folder of one", "records/race::test_what_would_mix_two_races_is_refused",
         '            names |= {*names_of([Path(script) for script in before["scripts"]])}\n', ""),
        ("a killed race's run goes on", "records/race::test_kill_9_of_a_race_ends_its_run",
         ", preexec_fn=end_with_parent)", ")"),
        ("an idea that cannot start is told after the baseline's run", "records/race::test_an_idea_that_cannot_start_costs_no_run",
         "if i == 1 and not idea.exists():", "if False:"),
        ("runs with other variables are paired", "records/race::test_a_run_with_other_variables_ends_the_race",
         "differing(same(other), same(log)) or variables", "differing(same(other), same(log))"),
        ("an editor's lock ends a race", "records/race::test_what_no_run_can_import_is_not_watched",
         "{path for path in more if path.is_file()} - files", "{*more} - files"),
        ("an edit in launch/ goes on in the same race", "records/race::test_every_source_of_a_run_is_watched",
         '{*scripts, ROOT / "launch" / "start.py"}', "{*scripts}"),
        ("what is set aside takes the name of what was", "records/race::test_what_is_set_aside_takes_no_name_of_what_was",
         "if not any(os.path.lexists(x.with_suffix(end)) for end in ENDS))", "if not x.exists())"),
        ("a race that a signal ended has the code of a run that a signal killed",
         "records/race::test_a_signal_to_a_race_reaches_its_run_and_ends_it", "if received and (code <= 0 or", "if received and (code == 0 or"),
        ("a race that is refused leaves its folders", "records/race::test_a_race_that_is_refused_at_once_leaves_nothing",
         "        if begins:\n            undo", "        if None:\n            undo"),
        ("options of the runs may stand anywhere", "records/race::test_options_of_the_runs_stand_after_two_hyphens",
         "    if late:\n", "    if None:\n"),
    ),
    "records/runlog.py": (
        ("CPUs of one name and other instructions are one machine", "records/verdict::test_a_cpu_of_other_instructions_is_another_machine",
         '    ("CPU instructions", r"(?m)^products: [^\\n]{1,200}, on (\\S+)$"),  # of CPUs of one name\n', ""),
        ("minutes are milliseconds", "records/runlog::test_a_time_in_other_units_is_none",
         "UNITS[(found[2] or", "(UNITS | {b'min': 1})[(found[2] or"),
        ("no loss is wrong", "records/runlog::test_what_is_no_complete_run_is_named", "if not 0 <= loss <= HIGHEST:", "if not -99 <= loss <= HIGHEST:"),
        ("3,28 is read as 3", "records/runlog::test_a_number_of_another_country_is_none", r'|,(?=\d)){1,40}"  #', '){1,40}"  #'),
        ("the loss of averaged weights is the run's", "records/runlog::test_a_step_with_two_losses_has_none",
         r'LOOSE_LOSS = re.compile(rb"\b', 'LOOSE_LOSS = re.compile(rb"'),
        ("a traced run is of one kind with others", "records/kinds::test_settings_of_a_runs_own_make_no_other_kind",
         'kept["trace_steps"] = traced[1]', "pass"),
        ("a run that ends early is complete", "records/runlog",
         "if validated == last and log.total in (None, last):", "if validated == last:"),
        ("a crash is a result", "records/runlog",
         '        if not isfinite(loss):\n            return f"crashed', '        if False:\n            return f"crashed'),
        ("a clock may run backwards", "faults/tools", "time < 0.99 * before - 1:", "time < 0.99 * before - 1e12:"),
        ("two runs in one log are one", "records/runlog", "back = order != sorted(order) and", "back = order is None and"),
        ("seconds are read as milliseconds", "records/runlog", 'b"s": 1000, b"sec"', 'b"s": 1, b"sec"'),
        ("a line that is being written is read", "records/runlog",
         'if last and not last.endswith(b"ms"):', 'if not last and last.endswith(b"ms"):'),
        ("a line that a script writes beside the trainer's is a step's", "records/runlog::test_what_a_script_writes_beside_the_trainers_lines_is_no_figure",
         "if told and not OF_TRAINER.match(line):", "if False:"),
        ("of two losses of a step the first is the run's", "records/runlog::test_a_step_with_two_losses_has_none",
         "else twice or wrong_time(log)", "else wrong_time(log)"),
        ("a quote that nothing ends is looked at again", "records/runlog::test_no_quote_is_looked_at_twice",
         r"""[^'\\\n]*)*(?:'|(?=\n)|\Z)""", r"""[^'\\\n]*)*'"""),
    ),
    "records/rules.py": (
        ("a source that this Python cannot read is the baseline's", "records/compare::test_of_a_source_that_this_python_cannot_read_nothing_is_proven",
         "        return None\n\n\ndef unreadable", '        return analysed(b"")\n\n\ndef unreadable'),
        ("the sources of a group's first runs alone count", "records/compare::test_each_source_of_a_group_counts_for_the_rules",
         "product(baseline.of_each_source, group.of_each_source)", "product(baseline.runs[:1], group.runs[:1])"),
        ("machines that no log tells are one", "records/compare::test_a_machine_that_no_log_tells_is_not_proven_to_be_one",
         'PROVEN if row["where"] else OPEN', "PROVEN"),
        ("a loss may be computed otherwise", "records/compare::test_what_is_not_proven_or_broken_is_marked",
         "if before.get(name) != after.get(name)]:\n        return OPEN, f\"read", "if name not in before and 0]:\n        return OPEN, f\"read"),
        ("a script may reach the clock by a pattern", "records/compare::test_what_is_not_proven_or_broken_is_marked",
         "any(isinstance(x, ast.MatchClass) and x.kwd_attrs for x in nodes)", "False"),
        ("a script may bind a name again", "records/compare::test_what_is_not_proven_or_broken_is_marked",
         "for name, times in bound.items() if times > 1)", "for name, times in bound.items() if times > 9)"),
        ("a script may call what it wants as it starts", "records/compare::test_what_is_not_proven_or_broken_is_marked",
         "called = {x.func for part in run ", "called = {x.func for part in run[9:] "),
        ("a module may change the data stream", "records/compare::test_what_is_not_proven_or_broken_is_marked",
         ' + elsewhere(a, b, "data")', ""),
        ("a script may change what it imports", "records/compare::test_what_is_not_proven_or_broken_is_marked",
         "if patched := patches(tree):", "if patched := []:"),
        ("a script may have a clock of its own", "records/compare::test_what_is_not_proven_or_broken_is_marked",
         "found += [x for x in nodes if isinstance(x, ast.withitem)]", "found += []"),
        ("what the script does with its batches may change", "records/compare::test_what_is_not_proven_or_broken_is_marked",
         'reached |= {node.name} if hasattr(node, "name") else', 'reached |= set() if hasattr(node, "name") else'),
        ("flags of a group's first run alone count", "records/compare::test_what_any_run_was_made_with_is_told",
         "    for run in group.runs:\n        lines", "    for run in group.runs[:1]:\n        lines"),
        ("a line that may set a flag proves that none does", "records/compare::test_what_is_not_proven_or_broken_is_marked",
         "    if added:\n", "    if not added:\n"),
        ("the data stream is unchanged by other tokens", "records/compare::test_what_is_not_proven_or_broken_is_marked",
         "if shards := other_tokens(a, b):", "if shards := []:"),
        ("what a pause calls may change", "records/compare::test_what_is_not_proven_or_broken_is_marked",
         "more = [functions[name] for name in sorted(used)]", "more = []"),
        ("a script may stop the clock", "records/compare::test_what_is_not_proven_or_broken_is_marked",
         'CLOCK = {"clock", "start_clock", "paused"}', 'CLOCK = {"start_clock", "paused"}'),
        ("a resumption with changed source proves as much", "records/compare::test_what_is_not_proven_or_broken_is_marked",
         "for i in (0, 2, 3, 4, 8):", "for i in ():"),
        ("a variable is no compiler flag", "records/compare::test_what_is_not_proven_or_broken_is_marked",
         "(?:TORCHINDUCTOR|", "(?:"),
        ("a script may change what it imports in a list", "records/compare::test_what_is_not_proven_or_broken_is_marked",
         "ast.AsyncFor, ast.comprehension, ", "ast.AsyncFor, "),
        ("a script may import what changes other modules", "records/compare::test_what_is_not_proven_or_broken_is_marked",
         "for node in imports if POWERS & roots_of(node)]", "for node in imports if None]"),
    ),
    "records/t_tests.py": (
        ("the variance of the runs, not of their kind", "records/t_tests",
         "return statistics.stdev(values) if", "return statistics.pstdev(values) if"),
        ("Welch's freedom as if the variances were equal", "records/t_tests",
         "1 / (share**2 / (n_a - 1) + (1 - share) ** 2 / (n_b - 1))", "n_a + n_b - 2.0"),
        ("one side of p where two are meant", "records/t_tests", "p = float(2 * stdtr(", "p = float(stdtr("),
        ("intervals of 90 % that are said to be of 95 %", "records/t_tests",
         "(1 + CONFIDENCE) / 2)) * error", "CONFIDENCE)) * error"),
        ("pairs with the freedom of two groups", "records/t_tests",
         "math.sqrt(len(a)), len(a) - 1)", "math.sqrt(len(a)), 2 * len(a) - 2)"),
        ("pairs that all differ alike, tested on what the subtraction rounds", "records/t_tests",
         "round(after - before, 10)", "after - before"),
        ("p of the target for runs above it", "records/t_tests",
         "(mean(values) - target) / (sigma(values)", "(target - mean(values)) / (sigma(values)"),
        ("a corrected p below the one before", "records/t_tests",
         "least = max(least, min(1.0, (len(defined) - i) * p))", "least = min(1.0, (len(defined) - i) * p)"),
        ("Holm's correction one idea short", "records/t_tests",
         "min(1.0, (len(defined) - i) * p)", "min(1.0, max(1, len(defined) - i - 1) * p)"),
        ("one run too few is enough", "records/t_tests",
         "return high if high <= MOST_RUNS", "return high - 1 if high <= MOST_RUNS"),
        ("the range of a number of runs turned round", "records/t_tests",
         "((1 - RANGE) / 2, (1 + RANGE) / 2)", "((1 + RANGE) / 2, (1 - RANGE) / 2)"),
        ("a true error where the variances are equal only", "records/t_tests",
         "for i in range(-4, 5))", "for i in range(0, 1))"),
    ),
    "records/tool.py": (
        ("a target of nothing is taken", "faults/tools::test_a_target_that_no_loss_can_be_below_is_refused",
         "if (value := finite(text)) > 0:", "if (value := finite(text)) > -9:"),
        ("a tool ends with a terminal that nohup leaves", "faults/tools::test_what_nohup_ignores_ends_no_tool",
         "for number, handler in before.items() if handler != signal.SIG_IGN]", "for number in before]"),
        ("a second signal ends what undoes the half of an extraction",
         "faults/tools::test_a_signal_leaves_no_half_of_an_extraction", "            signal.signal(other, signal.SIG_IGN)\n", "            pass\n"),
        ("escape sequences reach the terminal", "records/compare faults/tools",
         "c if c.isprintable() or c in kept else", 'c if c.isprintable() or c == "\\x1b" or c in kept else'),
    ),
    "records/show.py": (
        ("a narrow terminal cuts figures", "records/compare::test_a_narrow_terminal_cuts_no_figure",
         "columns[:n], console) <= console.width), 0):", "columns[:n], console) <= 999), 0):"),
    ),
    "records/verdict.py": (
        ("faster is slower", "records/verdict", 'words[difference > 0], f"by', 'words[difference < 0], f"by'),
        ("p-values of several ideas as they are", "records/verdict",
         "zip(rows[1:], t_tests.holm(each), strict=True)",
         "zip(rows[1:], each, strict=True)"),
        ("tests that there are not are counted among Holm's", "records/verdict::test_a_cpu_of_other_instructions_is_another_machine",
         "sum(not math.isnan(x) for x in each)", "len(each)"),
        ("other tokens compare", "records/verdict", "    if shards := other_tokens(", "    if shards := [] and other_tokens("),
        ("times of different machines compare", "records/verdict",
         "return f\"different machines ({', '.join(differ)})\" if differ else \"\"", 'return ""'),
        ("a loss above the target is below it", "records/verdict", "if p > 1 - P:", "if p > 1 + P:"),
        ("runs of one seed without a caution", "records/verdict",
         "if len(seeds) == 1 and repeated:", "if len(seeds) == 0 and repeated:"),
    ),
}  # fmt: skip
MUTANTS = [Mutant(file, *row) for file, rows in CHANGES.items() for row in rows]
NOT_NOTICED = "**not noticed**"
RUNNING: set[subprocess.Popen] = set()  # pytest, of each job


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


def path_of(tests: str) -> str:
    """recipe/losses as pytest's argument."""
    folder, name, test = re.fullmatch(r"(\w+)/(\w+)(::\w+)?", tests).groups()
    return f"tests/{folder}/test_{name}.py{test or ''}"


def failing_test(project: Path, tests: str) -> str:
    """The first test that fails, "" if none does. Raises RuntimeError, with the output's end, if they cannot be run, and
    InterruptedError if a signal, as run's own, has ended them."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-n0", "-p", "no:cacheprovider", path_of(tests)]
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryFile("w+") as output:  # a pipe would wait for what hanging tests leave behind
        process = subprocess.Popen(command, cwd=project, stdout=output, stderr=output, env=environment, start_new_session=True)
        RUNNING.add(process)
        try:
            code = process.wait(TIMEOUT)
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"pytest {path_of(tests)} did not end within {TIMEOUT} s") from None
        finally:
            RUNNING.discard(process)
            end_session(process)
        output.seek(0)
        said = output.read()
    if code < 0:
        raise InterruptedError(f"pytest {path_of(tests)} was ended by {signal.Signals(-code).name}")
    if code == 0:
        return ""
    found = re.search(r"^(?:FAILED|ERROR) (\S+)", said, re.M)
    if code not in (1, 2) or not found:  # 2: a file of tests cannot be imported
        raise RuntimeError(f"pytest {path_of(tests)} ended with {code}:\n{said[-2000:]}")
    return found[1].partition("[")[0].rpartition("/")[2]


def end_session(process: subprocess.Popen) -> None:
    """Ends a process and those of its group."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


def run(mutants: list[Mutant], jobs: int = 1, baseline: bool = True, tell: Callable[[Mutant, str], Any] = print) -> list[str]:
    """What noticed each: a test, "" for none. tell: called with each result as it is found.

    Raises RuntimeError if the tests fail without any change (baseline).
    """
    with tempfile.TemporaryDirectory(prefix="bankrun-mutants-") as scratch, ThreadPoolExecutor(jobs) as pool:
        free: Queue[Path] = Queue()
        for i in range(jobs):
            free.put(copy_project(Path(scratch, f"{i}")))

        def in_a_copy(work: Callable[[Path], str]) -> str:
            project = free.get()
            try:
                return work(project)
            finally:
                free.put(project)

        def on_all(work: Callable, items: list) -> list:
            try:
                return list(pool.map(work, items))
            except KeyboardInterrupt:  # which reaches neither the threads nor what they wait for
                for process in [*RUNNING]:
                    end_session(process)
                raise

        suites = sorted({suite for mutant in mutants if baseline for suite in mutant.tests.split()})
        before = on_all(lambda suite: in_a_copy(lambda project: failing_test(project, suite)), suites)
        if any(before):
            found = [f"{test} fails (pytest -n0 {path_of(suite)})" for suite, test in zip(suites, before, strict=True) if test]
            raise RuntimeError(f"without any change, or on a machine that is too busy: {', '.join(found)}")

        def attempt(mutant: Mutant) -> str:
            def noticed_by(project: Path) -> str:
                path = project / mutant.file
                text = path.read_text(encoding="utf-8")
                path.write_text(changed(mutant, text), encoding="utf-8")
                try:
                    return next(filter(None, (failing_test(project, suite) for suite in mutant.tests.split())), "")
                except RuntimeError as error:
                    print(f"{mutant.file}, {mutant.what}: {error}", file=sys.stderr, flush=True)
                    return ""
                finally:
                    path.write_text(text, encoding="utf-8")

            test = in_a_copy(noticed_by)
            tell(mutant, test)
            return test

        return on_all(attempt, mutants)


def known(results: Path | None) -> dict[Mutant, str]:
    """The tests that noticed changes in earlier calls; a change that none noticed is tried again."""
    found = {}
    for number, line in enumerate(results.read_text().splitlines() if results and results.is_file() else [], 1):
        try:
            mutant, test = json.loads(line)
            found[Mutant(*mutant)] = test
        except (ValueError, TypeError):
            raise ValueError(f"{results}: line {number} is no result: delete it, or name another file") from None
    return {mutant: test for mutant, test in found.items() if test}


def table(noticed: dict[Mutant, str]) -> str:
    """Markdown: by file, and by the file of tests that noticed, in the order of the list."""
    rows: dict[tuple[str, str], list[str]] = {}
    for mutant, test in noticed.items():
        by = f"`{test.partition('::')[0]}`" if test else NOT_NOTICED
        rows.setdefault((mutant.file, f"changes nothing: {mutant.harmless}" if mutant.harmless else by), []).append(mutant.what)
    counts = Counter(mutant.file for mutant in noticed)
    lines = [f"| `{file}`, {counts[file]} | {by} | {'; '.join(changes)} |" for (file, by), changes in sorted(
        rows.items(), key=lambda row: [*counts].index(row[0][0]))]  # fmt: skip
    return "\n".join(["| file, changes | noticed by | what is changed |", "|---|---|---|", *lines])


def main(argv: list[str] | None = None) -> int:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="letters of the file or the change")
    parser.add_argument("--jobs", type=number_between(1, 16), default=1, help="copies that are tested at a time (%(default)s)")
    parser.add_argument("--results", type=user_path, help="a file that keeps them, a line each; noticed changes are not tried again")
    parser.add_argument("--no-baseline", action="store_true", help="the tests have just passed: do not run them unchanged")
    args = parser.parse_args(argv)
    chosen = [mutant for mutant in MUTANTS if args.only in f"{mutant.file} {mutant.what}"]
    if args.results and args.results.is_dir():
        parser.error(f"--results={args.results}: a folder, and no file in one")
    if not chosen:
        parser.error(f"--only={args.only}: no change has these letters")

    def tell(mutant: Mutant, test: str) -> None:
        if args.results:
            with open(args.results, "a") as file:
                file.write(json.dumps([mutant, test]) + "\n")
        console(f"{mutant.file}, {mutant.what}: {test or NOT_NOTICED}", "stderr")

    before = known(args.results)
    if args.results:
        tempfile.TemporaryFile(dir=args.results.parent).close()  # that it can be written, before minutes of tests
    left = [mutant for mutant in chosen if mutant not in before and not mutant.harmless]
    found = before | dict(zip(left, run(left, args.jobs, not args.no_baseline, tell) if left else [], strict=True))
    noticed = {mutant: found.get(mutant, "") for mutant in chosen}
    missed = sum(not test and not mutant.harmless for mutant, test in noticed.items())
    print(f"{table(noticed)}\n\n{len(noticed)} changes, {missed} not noticed.")
    return int(missed > 0)


if __name__ == "__main__":
    try:
        with ended_by_signals():  # none leaves tests that go on, or copies of the project
            sys.exit(main())
    except (RuntimeError, ValueError, OSError) as error:
        sys.exit(f"bench/mutants.py: {error}")

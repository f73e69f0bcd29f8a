"""Text from a checkpoint: by sample.py, with the weights that were saved."""

import os
import re
import shlex
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import sample
import train_gpt
import triton_kernels
from common import ROOT, SCRIPT, lines_of, options, run_fresh, tiny_settings, unreadable, without_rights, without_stdout
from data.loader import first_documents
from data.shards import write_shard
from runtime.checkpoints import read_checkpoint, write_checkpoint
from runtime.ranks import Ranks
from train_gpt import Hyperparameters, main

ADVICE = "name its script by --script, beside its own modules"


@pytest.fixture(scope="module")
def logs(shards, tmp_path_factory):
    """The logs' folder of a run in bf16 that saves step 7, with the third stage's windows, and its end."""
    folder = tmp_path_factory.mktemp("saved")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_gpt, "warm_up", lambda *_: None)
        main(options(shards, folder, dtype="bfloat16", save_every=7))
    return folder / "logs"


def test_a_checkpoint_writes_text(logs, capsys):
    path, texts = f"{logs / 'run' / 'step_000008.pt'}", []
    for checkpoint in (path, path, "latest"):
        sample.main([checkpoint, "def ", "--tokens=12", f"--log_dir={logs}", f"--script={SCRIPT}"])
        printed = capsys.readouterr()
        assert printed.err == ""
        texts.append(printed.out)
    assert texts[0] == texts[1] == texts[2] and texts[0].startswith("def ⟫") and len(texts[0]) > 8
    assert triton_kernels.cpu  # as in a run: with bf16 operands, where the CPU has units for them, or the text is another


def test_other_source_than_the_checkpoints_is_told(logs, tmp_path, capsys):
    """A changed model of the same parameters would write nonsense in silence; so would a changed module."""
    saved = read_checkpoint(logs / "run" / "step_000008.pt")
    for name in (SCRIPT.name, "attention.py"):
        write_checkpoint(tmp_path / name / "step_000008.pt", saved | {"sources": saved["sources"] | {name: "x = 1\n"}}, keep=1)
        sample.main([f"{tmp_path / name}/step_000008.pt", "def ", "--tokens=2", f"--script={SCRIPT}"])
        said = f"sample.py: step_000008.pt was trained by other source ({name}): if that makes another model, {ADVICE}\n"
        assert capsys.readouterr().err == said


def test_a_model_of_another_size_is_refused_with_the_hint(logs, tmp_path, capsys):
    """As of a copy with more layers."""
    saved = read_checkpoint(logs / "run" / "step_000008.pt")
    saved["state"]["same"]["parameters"]["attn"] = saved["state"]["same"]["parameters"]["attn"][1:]
    deep = tmp_path / "deep" / "step_000008.pt"
    write_checkpoint(deep, saved | {"sources": {"ideas/deep.py": "x = 1\n", **saved["sources"]}, "run_id": "deep"}, keep=1)
    with pytest.raises(SystemExit) as ended:
        sample.main([f"{deep}", "def ", "--tokens=2", f"--script={SCRIPT}"])
    assert ended.value.code == 1 and f"if that makes another model, {ADVICE}\n" in capsys.readouterr().err


def test_a_prompt_of_any_bytes_is_one(logs, capsys):
    """As a terminal of another encoding gives it."""
    prompt = os.fsdecode(b"caf\xe9")
    sample.main([f"{logs / 'run' / 'step_000008.pt'}", prompt, "--tokens=2", f"--script={SCRIPT}"])
    assert sample.encode(prompt, "bytes")[-1] == 0xE9


def test_the_latest_is_the_projects_wherever_one_stands(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    looked = []
    monkeypatch.setattr(sample.checkpoints, "find_checkpoint", lambda *place: looked.append(place) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        sample.main(["latest", "x", f"--script={SCRIPT}"])
    assert looked == [("latest", ROOT / "logs")]


def test_a_parameter_that_a_setting_switches_on_is_no_other_recipes(logs, tmp_path, monkeypatch, capsys):
    """The table of the settings counts, not the script's."""
    path = logs / "run" / "step_000008.pt"
    monkeypatch.delitem(train_gpt.PARAM_TABLE, "embed")
    rows = train_gpt.param_table
    embed = train_gpt.Adam("sharded", tied_to="lm_head")
    monkeypatch.setattr(train_gpt, "param_table", lambda h: rows(h) | {"embed": embed})
    assert sample.sample(train_gpt, f"{path}", "abc", 2, 1.0)


def test_a_log_holds_no_nul_of_a_sample(shards, monkeypatch):
    """A model of bytes may write one, which would end the log for all that read it."""
    monkeypatch.setattr(sample, "continue_text", lambda *_: [0, 10, 65])
    texts = sample.sample_text(SimpleNamespace(h=Hyperparameters(data=f"{shards}", bos_id=256, encoding="bytes")))
    assert texts.count("⟫\\x00\nA") == 3


def test_sampling_computes_with_the_saved_weights(logs, monkeypatch):
    """The first token's probabilities are those of the saved model at its step."""
    seen = []
    monkeypatch.setattr(torch, "multinomial", lambda p, *_, **__: (seen.append(p.clone()), p.argmax()[None])[1])
    path = logs / "run" / "step_000007.pt"
    sample.sample(train_gpt, f"{path}", "abc", 1, 1.0)
    saved = read_checkpoint(path)
    manager = train_gpt.build(Hyperparameters(**saved["hyperparameters"]), Ranks(0, 1, torch.device("cpu")))
    model = manager.model.eval()
    for label, param in model.named_parameters():
        param.data.copy_(saved["state"]["same"]["parameters"][label])
    manager.advance_schedule(7)
    with torch.no_grad():
        tokens, cu_seqlens = (torch.tensor(x, dtype=torch.int32) for x in ([256, *b"abc"], [0, 4]))
        x = model.hidden_states(tokens, cu_seqlens, manager.forward_schedule())
        logits = triton_kernels.softcap(x[-1] @ model.lm_head).float()[:257]
    logits[256] = -torch.inf
    assert torch.equal(seen[0], torch.softmax(logits, -1))


@pytest.mark.parametrize(
    "arguments, message, code",
    [
        (["/nowhere.pt", "x"], "/nowhere.pt: cannot be read: No such file", 1),
        (["latest", "x", "--log_dir=/nowhere"], "error: latest: no usable checkpoint in /nowhere/*: --save_every writes them", 1),
        (["x"], "required: prompt", 2),
        (["", "x"], "argument checkpoint: is empty: leave the option out, or give a value (a file, or 'latest')", 2),
        (["x", "y", "--tokens=0"], "--tokens and --temperature must be positive and finite", 2),
        *[(["x", "y", f"--temperature={t}"], "must be positive and finite", 2) for t in ("inf", "nan", "0", "-1", "1e999")],
        *[(["x", "y", f"--nucleus={n}"], "--nucleus must be above 0 and at most 1", 2) for n in ("0", "1.1", "nan", "-1")],
        (["x", "y", "--script=/nowhere.py"], "/nowhere.py: No such file", 2),
        (["x", "y", f"--script=/{'x' * 256}.py"], "x.py: File name too long", 2),
        (["x", "y", "--script=/\x1b[31m.py"], r"error: --script=/\x1b[31m.py: ", 2),
        (["x", "y", "--no\x1b[31m"], r"unrecognized arguments: --no\x1b[31m", 2),
        *[(["x", "y", f"--script={ROOT / name}"], f"{name}: is no training script, such as train_gpt.py", 2)
          for name in ("README.md", "run.sh", "data/encodings.py")],
    ],
)
def test_sampling_refuses_clearly(capsys, monkeypatch, arguments, message, code):
    monkeypatch.setitem(sys.modules, "encodings", sys.modules["encodings"])  # Python's, back after data/encodings.py
    with pytest.raises(SystemExit) as exit_:
        sample.main(arguments)
    assert exit_.value.code == code and message in capsys.readouterr().err


@pytest.mark.parametrize("error, has_gpu", [
    (MemoryError(), False), (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), True),
    (RuntimeError("[enforce fail at alloc_cpu.cpp:121] . DefaultCPUAllocator: can't allocate memory: 9 bytes"), False),
])  # fmt: skip
def test_a_lack_of_memory_is_one_message(monkeypatch, capsys, error, has_gpu):
    def raise_it(*_):
        raise error

    monkeypatch.setattr(sample, "sample", raise_it)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    with pytest.raises(SystemExit) as end:
        sample.main(["a.pt", "x"])
    way_out = ": nvidia-smi shows who else holds the GPU's, with CUDA_VISIBLE_DEVICES= the CPU writes" * has_gpu
    assert (end.value.code, capsys.readouterr().err) == (1, f"sample.py: error: a.pt: out of memory{way_out}\n")
    error = RuntimeError("a fault of ours")
    with pytest.raises(RuntimeError, match="a fault of ours"):
        sample.main(["a.pt", "x"])


@pytest.mark.parametrize("path, said", [("closed/idea.py", "Permission denied"), ("unread.py", "Permission denied"),
                                        ("loop.py", "Too many levels of symbolic links")])  # fmt: skip
def test_a_script_that_cannot_be_read_is_one_message(tmp_path, path, said):
    script = unreadable(tmp_path) / path
    command = [sys.executable, f"{ROOT / 'sample.py'}", "x", "y", f"--script={script}"]
    done = run_fresh(command, preexec_fn=without_rights)
    assert done.returncode == 2 and done.stderr.endswith(f"error: --script={script}: {said}\n")


def test_a_folder_of_logs_that_may_not_be_read_is_not_an_empty_one(tmp_path):
    (tmp_path / "logs").mkdir(mode=0o300)
    command = [sys.executable, f"{ROOT / 'sample.py'}", "latest", "x", f"--log_dir={tmp_path / 'logs'}"]
    done = run_fresh(command, preexec_fn=without_rights)
    told = [f"sample.py: passed over {tmp_path / 'logs'}: cannot be read: Permission denied", "sample.py: error: latest: no usable"]
    assert done.returncode == 1 and all(map(done.stderr.__contains__, told)), done


TEMPERATURES = {1e308: "any", 1e38: "any", 1e-38: "likeliest", 1e-45: "likeliest", 1e-46: "likeliest", 5e-324: "likeliest"}


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_any_finite_temperature_gives_probabilities(logs, monkeypatch, temperature):
    """The limits of division: all tokens alike, or one alone."""
    seen = []
    monkeypatch.setattr(torch, "multinomial", lambda p, *_, **__: (seen.append(p.clone()), p.argmax()[None])[1])
    sample.sample(train_gpt, f"{logs / 'run' / 'step_000008.pt'}", "abc", 2, temperature)
    for p in seen:
        expected = torch.full((257,), 1 / 256) if TEMPERATURES[temperature] == "any" else torch.eye(257)[p.argmax()]
        expected[256] = 0  # end-of-text
        assert torch.allclose(p, expected)


@pytest.mark.parametrize("length", [383, 382, 381])
def test_a_prompt_that_fills_the_model_is_refused_and_a_text_that_would_is_said_to_be_shorter(logs, capsys, length):
    """This model takes 384 tokens in all: with end-of-text, a prompt of 382 leaves room for one."""
    command = [f"{logs / 'run' / 'step_000008.pt'}", "x" * length, "--tokens=2", f"--script={SCRIPT}"]
    if length == 383:
        with pytest.raises(SystemExit, match="1"):
            sample.main(command)
        expected = "sample.py: error: the prompt has 384 tokens, the model takes 383 and writes on: shorten it\n"
        assert capsys.readouterr().err == expected
        return
    sample.main(command)
    err = capsys.readouterr().err
    assert err == ("sample.py: writes 1 tokens, not 2: the model takes 384 in all\n" if length == 382 else "")


def test_a_long_text_of_sample_is_told_before(logs, monkeypatch, capsys):
    """3,000 tokens took minutes without a word."""
    monkeypatch.setattr(sample, "LONG", 300)
    monkeypatch.setattr(sample, "continue_text", lambda _, prompt, count, *__: [7] * count)
    command = [f"{logs / 'run' / 'step_000008.pt'}", "x", f"--script={SCRIPT}"]
    sample.main([*command, "--tokens=300"])
    assert capsys.readouterr().err == ""
    sample.main([*command, "--tokens=301"])
    assert capsys.readouterr().err == "sample.py: 301 tokens, a forward pass each: the text comes at their end\n"


def test_a_script_finds_the_modules_beside_it(logs, tmp_path):
    """As in the run that it trained: its own attention.py, and a helper that the project has not."""
    (tmp_path / "idea.py").write_text(f"import helper_of_the_idea\n{SCRIPT.read_text()}")
    (tmp_path / "helper_of_the_idea.py").write_text("")
    (tmp_path / "attention.py").write_text((ROOT / "attention.py").read_text() + "\nprint('its own attention')\n")
    command = [sys.executable, ROOT / "sample.py", logs / "run" / "step_000008.pt", "abc", "--tokens=2"]
    done = run_fresh([*command, "--script", tmp_path / "idea.py"], timeout=100)
    assert done.returncode == 0 and done.stdout.startswith("its own attention\nabc⟫"), done


def test_modules_of_other_sources_beside_a_script_are_told(logs, tmp_path):
    """As of an older record's sources, whose own sample.py is the one to run."""
    (tmp_path / "launch").mkdir()
    for name in ("__init__.py", "console.py"):
        (tmp_path / "launch" / name).write_text("")
    (tmp_path / "train_gpt.py").write_text(SCRIPT.read_text())
    command = [sys.executable, ROOT / "sample.py", logs / "run" / "step_000008.pt", "abc"]
    done = run_fresh([*command, "--script", tmp_path / "train_gpt.py"], timeout=100)
    assert done.returncode == 1 and "Traceback" not in done.stderr, done
    assert done.stderr.startswith("sample.py: error: not of one project") and done.stderr.endswith(f"run {tmp_path}/sample.py\n")


def test_the_sources_of_a_log_have_a_sample_py_that_runs(logs, tmp_path):
    """Without launch/start.py, which no run imports."""
    again = tmp_path / "again"
    run_fresh([sys.executable, ROOT / "records" / "extract.py", logs / "run.txt", again], check=True)
    command = [sys.executable, again / "sample.py", logs / "run" / "step_000008.pt", "abc", "--tokens=2"]
    done = run_fresh(command, timeout=100)
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.startswith("abc⟫"), done
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules |= dict.fromkeys(['numpy', 'torch'])\n")
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": f"{tmp_path}"})
    said = rf"sample.py: error: \S+ lacks (numpy|torch), and {again} makes no environment: run it by one that has it, as .venv/bin/.*\n"
    assert done.returncode == 1 and re.fullmatch(said, done.stderr), done


@pytest.mark.parametrize("name", ["secrets.py", "random.py", "queue/__init__.py"])
def test_a_module_of_pythons_name_beside_a_script_is_named(tmp_path, name):
    """NumPy imports the first, in a traceback; of the others the advice was to run a sample.py that is not there."""
    (tmp_path / "idea.py").write_text(SCRIPT.read_text())
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("KEY = 1\n")
    command = [sys.executable, ROOT / "sample.py", "latest", "abc", "--script", tmp_path / "idea.py"]
    done = run_fresh(command)
    place, module = f"{tmp_path}/{name}".removesuffix("/__init__.py"), name.partition("/")[0].removesuffix(".py")
    assert done.returncode == 1 and not done.stdout
    assert done.stderr == f"sample.py: error: {place} hides the module {module!r} that others import: rename it\n"


def test_a_reader_that_has_enough_is_no_fault(logs):
    checkpoint = logs / "run" / "step_000008.pt"
    command = [sys.executable, f"{ROOT / 'sample.py'}", f"{checkpoint}", "abc", "--tokens=2", f"--script={SCRIPT}"]
    done = subprocess.run(["bash", "-o", "pipefail", "-c", f"{shlex.join(command)} | true"], capture_output=True, timeout=100)
    assert (done.returncode, done.stderr) == (0, b"")
    closed = run_fresh(command, preexec_fn=without_stdout)
    assert (closed.returncode, closed.stdout, closed.stderr) == (0, "", "")
    with open("/dev/full", "wb") as full:
        done = run_fresh(command, stdout=full)
    assert done.returncode == 1 and done.stderr.count("\n") == 1, done


def test_what_a_model_writes_cannot_move_a_cursor(logs, shards, tmp_path, monkeypatch, capsys, no_warm_up):
    """Control characters of a prompt, a shard or a model are escapes on the console, of a run and of sample.py."""
    monkeypatch.setattr(sample, "decode", lambda *_: "\x1b[2Jé\r\x07\x9b\u202e")
    main(options(shards, tmp_path, sample_tokens=9))
    sample.main([f"{logs / 'run' / 'step_000008.pt'}", "\x1b[31m", "--tokens=2", f"--script={SCRIPT}"])
    printed = capsys.readouterr().out
    assert printed.count("\\x1b[2Jé\\r\\x07\\x9b\\u202e") == 7 and "\n\\x1b[31m⟫" in printed
    assert not {*"\x1b\r\x07\x9b\u202e"} & {*printed}
    assert "\x1b[2Jé" in lines_of(tmp_path / "logs" / "run.txt")  # as it is


@pytest.mark.parametrize(
    "tokens, written, said", [(300, 300, ""), (301, 301, ""), (320, 319, " (not 320: the model takes 384 in all)")]
)
def test_a_long_or_shorter_text_at_a_runs_end_is_told_before(shards, tmp_path, monkeypatch, capsys, tokens, written, said):
    """5,000 took minutes without a word."""
    manager = train_gpt.build(tiny_settings(shards, tmp_path, sample_tokens=tokens), Ranks(0, 1, torch.device("cpu")))
    monkeypatch.setattr(sample, "LONG", 300)
    monkeypatch.setattr(sample, "continue_text", lambda _, prompt, count, *__: [7] * count)
    assert sample.sample_text(manager).count("\a") == 3 * written
    before = f"sample: 3 texts of {written} tokens{said}, a forward pass each"
    assert capsys.readouterr().out.startswith(before) if tokens > 300 else capsys.readouterr().out == ""


def test_a_model_that_takes_no_more_than_the_prompt_writes_nothing(shards, tmp_path, monkeypatch, capsys):
    """Fewer than no tokens were told."""
    manager = train_gpt.build(tiny_settings(shards, tmp_path, sample_tokens=5), Ranks(0, 1, torch.device("cpu")))
    monkeypatch.setattr(type(manager.h), "max_tokens", 48)
    sample.sample_text(manager)
    assert "3 texts of 0 tokens (not 5: the model takes 48 in all)" in capsys.readouterr().out


@pytest.mark.parametrize(
    "nucleus, kept",
    [*[(n, [2]) for n in (5e-324, 1e-46, 1e-9)], (0.5, [2]), (0.51, [2, 0]), (0.75, [2, 0]), (0.76, [2, 0, 1]), (0.9, [2, 0, 1, 3]), (1, [2, 0, 1, 3])],
)
def test_the_nucleus_is_the_fewest_likeliest_that_reach_its_share(nucleus, kept):
    probs = torch.tensor([0.25, 0.125, 0.5, 0.125])  # equal ones in their order
    cut = sample.keep_nucleus(probs, nucleus)
    assert cut.nonzero().flatten().tolist() == sorted(kept)
    assert torch.equal(cut[cut > 0], probs[cut > 0])


def test_the_likeliest_is_drawn_even_from_the_smallest_nucleus(logs):
    path = f"{logs / 'run' / 'step_000008.pt'}"
    texts = {sample.sample(train_gpt, path, "a", 8, t, n) for t, n in ((1.0, 1e-9), (1e-9, 1.0))}
    assert len(texts) == 1


STEPS = 60


@pytest.fixture(scope="module")
def trained(shards, tmp_path_factory):
    """The log's lines of a run of STEPS small steps on Python source."""
    folder = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_gpt, "warm_up", lambda *_: None)
        patch.setattr(train_gpt, "use_cpu", str)  # the same bits, so the same text, on every CPU of a kind
        more = dict(num_scheduled_iterations=STEPS, num_extension_iterations=0, val_every=0, momentum_warmup=300)
        main(options(shards, folder, sample_tokens=100, **more))
    return (folder / "logs" / "run.txt").read_text().rpartition("=" * 100 + "\n")[2]


def test_a_run_ends_with_three_texts_that_are_mostly_not_blank(trained, shards):
    """Python source is a quarter blanks, in runs: a text of the likeliest tokens alone falls into one and stays there."""
    _, _, said = trained.partition("sample, after a prompt from the validation shard:\n")
    texts = re.split(r"(?:^|\n\n)\[\d\] ", said.removesuffix("\n"))[1:]
    prompts = ["".join(map(chr, x[1:])) for x in first_documents(f"{shards}", 256, 65, 3)]
    assert len(texts) == len(prompts) == 3
    for text, prompt in zip(texts, prompts):
        begin, _, written = text.partition("⟫")
        assert begin == prompt and len(begin) == 64
        assert len("".join(written.split())) > 50, text


def test_a_shard_of_short_documents_still_gives_a_prompt(tmp_path):
    write_shard(tmp_path / "x_val_0.bin", np.array([256, 1, 2, 256, 3, 256, 4, 5, 6, 7], dtype=np.uint16))
    assert first_documents(f"{tmp_path}", 256, 5, 3) == [[256, 4, 5, 6, 7]]
    assert first_documents(f"{tmp_path}", 256, 6, 3) == [[256, 1, 2]]
    assert first_documents(f"{tmp_path}", 256, 2, 3) == [[256, 1], [256, 3], [256, 4]]

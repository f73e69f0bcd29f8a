"""Logs to read, as train_gpt.py writes them."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "records"))

RULE, BANNER = "=" * 100, "-" * 40
ENVIRONMENT = (
    "Python 3.12.3 (main) [GCC 13]\nPyTorch 2.13.0+cu130, CUDA 13.0, Triton 3.9.0\nLinux-6.8-x86_64, 8 ranks\n"
    "0: _CudaDeviceProperties(name='NVIDIA H100 80GB HBM3', major=9)\n"
    "1: _CudaDeviceProperties(name='NVIDIA H100 80GB HBM3', major=9)\n"
    "attention: varlen_attn, FA3\nSCRIPT Hyperparameters(lr=0.5, seed=0, run_id='a')"
)
SOURCES = {
    "train_gpt.py": b"import torch\nx = 1\n",
    "triton_kernels.py": b"def kernel():\n    pass\n",
    "data/__init__.py": b"",
    "data/shards.py": b'"""No line break at the end."""',
}


def step_lines(steps=8, ms=10.0, loss=3.27, total=None, every=4):
    """The lines of a run of so many steps of `total`; validations every so many steps."""
    total, lines = total or steps, []
    for step in range(steps + 1):
        if step:
            lines.append(f"step:{step}/{total} train_time:{step * ms:.0f}ms step_avg:{ms:.2f}ms")
        if step % every == 0 or step == total:
            value = loss + 0.1 * (total - step)
            lines.append(f"step:{step}/{total} val_loss:{value:.4f} train_time:{step * ms:.0f}ms step_avg:{ms:.2f}ms")
    return "\n".join(lines) + "\n"


def make_log(
    sources=SOURCES, environment=ENVIRONMENT, lines=None, end="peak memory allocated: 1 MiB reserved: 2 MiB\n", script=None
):
    """A log of a run with these sources, the script first; script: another text of train_gpt.py."""
    sources = sources if script is None else sources | {"train_gpt.py": script}
    name, *modules = sources
    parts = [sources[name]]
    for module in modules:
        parts += [f"{BANNER}\n# {module}\n{BANNER}".encode(), sources[module]]
    header = f"{RULE}\n{environment.replace('SCRIPT', name)}\n{RULE}\n"
    return b"\n".join([*parts, f"{header}{step_lines() if lines is None else lines}{end}".encode()])


def write_runs(folder, times, losses, steps=8, **parts):
    """A folder of complete runs with these training times in ms and last losses."""
    folder.mkdir(parents=True)
    for i, (time, loss) in enumerate(zip(times, losses, strict=True)):
        environment = parts.get("environment", ENVIRONMENT).replace("seed=0", f"seed={i}")
        lines = step_lines(steps, time / steps, loss)
        (folder / f"{i}.txt").write_bytes(make_log(**{**parts, "environment": environment, "lines": lines}))
    return str(folder)


def smi_environment(driver="570.10", buses=("61:00.0", "62:00.0"), date="Mon Jan  5 10:00:00 2026", pytorch="2.10.0"):
    """What the public speedrun's script prints: versions, then nvidia-smi's tables, of GPUs and of processes."""
    rows = "\n".join(
        f"|   {i}  NVIDIA H100 80GB HBM3          On  |   00000000:{bus} Off |                    0 |\n"
        "| N/A   36C    P0            118W /  700W |    1506MiB /  81559MiB |      0%      Default |"
        for i, bus in enumerate(buses)
    )
    return (
        f"Running Python 3.12.7 (main) [GCC 13.2.0]\nRunning PyTorch {pytorch} compiled for CUDA 12.6\n"
        f"Running Triton version 3.5.0\n{date}\n| NVIDIA-SMI 570.10    Driver Version: {driver}    CUDA Version: 12.8 |\n"
        f"|=====+====|\n{rows}\n|  Processes: |\n|    0   N/A  N/A           10696      C   python3.12      1506MiB |\n"
    )


def records_folder(folder, monkeypatch):
    """A folder of records below this one, with its table's place; they get no pictures."""
    import history

    monkeypatch.setattr(history, "draw_pictures", lambda *_: [])
    (folder / "records").mkdir()
    (folder / "records" / "README.md").write_text(f"{history.BEGIN}\n{history.END}\n")
    return folder / "records"

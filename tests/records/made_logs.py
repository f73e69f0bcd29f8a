"""Logs to read, as train_gpt.py and the public speedrun's script write them."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "records"))

RULE, BANNER = "=" * 100, "-" * 40
ENVIRONMENT = (
    "Python 3.12.3 (main) [GCC 13]\nPyTorch 2.13.0+cu130, CUDA 13.0, Triton 3.9.0\n"
    "Linux-6.8-x86_64, 8 ranks\nhost: 0bbfd16a, a CRC-32 of its name\n"
    "0: _CudaDeviceProperties(name='NVIDIA H100 80GB HBM3', major=9)\n"
    "1: _CudaDeviceProperties(name='NVIDIA H100 80GB HBM3', major=9)\n"
    "attention: varlen_attn, FA3\nshards: 'a_train_0.bin' 0000000a, 'a_val_0.bin' 0000000b\n"
    "SCRIPT Hyperparameters(data='data/x', lr=0.5, seed=0, run_id='a')"
)
SOURCES = {
    "train_gpt.py": b"import torch\nx = 1\n",
    "triton_kernels.py": b"def kernel():\n    pass\n",
    "data/__init__.py": b"",
    "data/shards.py": b'"""No line break at the end."""',
    "runtime/run.py": b"class Clock:\n    pass\n",
}
END = "sample, after a prompt\nstep:1/1 val_loss:0.1 train_time:1ms\npeak memory resident: 9 MiB\n"


def step_lines(steps=8, ms=10.0, loss=3.27, total=None, every=4, extra=""):
    """The lines of a run of so many steps of `total`; validations every so many steps."""
    total, lines = total or steps, []
    for step in range(steps + 1):
        time = f"train_time:{step * ms:.0f}ms step_avg:{ms:.2f}ms{extra}"
        if step:
            lines.append(f"step:{step}/{total} {time}")
        if step % every == 0 or step == total:
            value = loss + 0.1 * (total - step)
            lines.append(f"step:{step}/{total} val_loss:{value:.4f} {time}")
    return "\n".join(lines) + "\n"


def make_log(sources=SOURCES, environment=ENVIRONMENT, lines=None, end=END, changed=None):
    """A log of a run with these sources, the script first; changed: other text of some."""
    sources = sources | (changed or {})
    name, *modules = sources
    parts = [sources[name]]
    for module in modules:
        parts += [f"{BANNER}\n# {module}\n{BANNER}".encode(), sources[module]]
    header = f"{RULE}\n{environment.replace('SCRIPT', name)}\n{RULE}\n"
    body = step_lines() if lines is None else lines
    return b"\n".join([*parts, f"{header}{body}{end}".encode()])


def write_runs(folder, times, losses, steps=8, seeds=None, **parts):
    """A folder of complete runs with these training times in ms and last losses."""
    folder.mkdir(parents=True)
    environment = parts.pop("environment", ENVIRONMENT)
    for i, (time, loss) in enumerate(zip(times, losses, strict=True)):
        text = environment.replace("seed=0", f"seed={seeds[i] if seeds else i}")
        lines = step_lines(steps, time / steps, loss)
        (folder / f"{i}.txt").write_bytes(make_log(environment=text, lines=lines, **parts))
    return str(folder)


def public_log(pytorch="2.10.0", kernels=True):
    """A log as the public speedrun's script prints it, with nvidia-smi's tables."""
    code = SOURCES["train_gpt.py"].decode()
    if kernels:
        text = SOURCES["triton_kernels.py"].decode()
        code += f"\n\n{BANNER}\n# triton_kernels.py\n{BANNER}\n\n{text}"
    rows = "\n".join(
        f"|   {i}  NVIDIA H100 80GB HBM3          On  |   00000000:{61 + i}:00.0 Off |         0 |\n"
        "| N/A   36C    P0            118W /  700W |    1506MiB /  81559MiB |      0%      Default |"
        for i in range(8)
    )
    environment = (
        f"Running Python 3.12.7 (main) [GCC 13.2.0]\nRunning PyTorch {pytorch} compiled for CUDA 12.6\n"
        "Running Triton version 3.5.0\nMon Jan  5 10:00:00 2026\n"
        "| NVIDIA-SMI 570.10    Driver Version: 570.10    CUDA Version: 12.8 |\n"
        f"|=====+====|\n{rows}\n|  Processes: |\n"
        "|    0   N/A  N/A           10696      C   python3.12      1506MiB |\n"
    )
    lines = "step:0/2 val_loss:10.8 train_time:0ms step_avg:nanms\n"
    lines += step_lines(2).partition("\n")[2]
    end = "peak memory allocated: 29005 MiB reserved: 44576 MiB\n"
    return f"{code}\n{RULE}\n{environment}\n{RULE}\n{lines}{end}".encode()

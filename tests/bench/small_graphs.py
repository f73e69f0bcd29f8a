"""What test_codegen.py compiles for the fake GPU, in a process of its own, as JSON."""

import json
import sys

from bench import fake_gpu

fake_gpu.install()

import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

import triton_kernels as tk
from bench import generated

T, DIM, HIDDEN, VOCAB = 4096, 768, 3072, 50304


def new(*shape: int, dtype: torch.dtype = torch.bfloat16, grad: bool = False) -> torch.Tensor:
    return torch.zeros(shape, device="cuda:0", dtype=dtype, requires_grad=grad)


def mlp(x: torch.Tensor, W_fc: torch.Tensor, W_proj: torch.Tensor) -> torch.Tensor:
    return tk.relu_squared_mlp(x, W_fc, W_proj)


def cases():
    yield "chain", lambda x, y: torch.sigmoid(x) * y + 1, (new(T, DIM), new(T, DIM))
    yield "exponential", torch.exp2, (new(T, DIM, dtype=torch.float32),)
    yield "reduction", lambda x: x.float().sum(-1), (new(T, DIM),)
    yield "neighbours", lambda x: x[1:] + x[:-1], (new(T, DIM),)
    yield "columns", lambda x: x[:, : DIM // 4] * x[:, DIM // 2 : 3 * DIM // 4], (new(T, DIM),)
    tokens = new(T, dtype=torch.int32)
    yield "lookup", lambda ids, table: F.embedding(ids, table) * 2, (tokens, new(VOCAB, DIM))
    yield "norm", lambda x, y: tk.norm(x + y), (new(T, DIM, grad=True), new(T, DIM, grad=True))
    weights = [new(HIDDEN, DIM, grad=True) for _ in range(2)]
    yield "mlp", mlp, (new(T, DIM, grad=True), *weights)
    quantized = lambda x, *weights: tk.relu_squared_mlp_fp8(tk.norm(x), *weights)
    W8 = new(HIDDEN, DIM, dtype=tk.E4M3)
    scale = new(dtype=torch.float32)
    yield "fp8 mlp", quantized, (new(T, DIM, grad=True), *weights, W8, scale)


# Whose instructions are looked at; of the others one configuration is disassembled.
COUNTED = ("chain", "exponential")
CONFIGS = generated.CONFIGS
found = {}
with FakeTensorMode(allow_non_fake_inputs=True):
    for name, function, args in cases():
        torch._dynamo.reset()
        generated.CONFIGS = CONFIGS if name in COUNTED else 1
        found[name] = [graph.to_json() for graph in generated.graphs_of(function, *args)]
json.dump(found, open(sys.argv[1], "w"))

"""The model written a second time, for tests: loops, a T×T mask, no cleverness, any dtype.

It takes the tables LAYERS, LAMBDAS and SCALARS from the script that is tested, and shares no code
with it or with triton_kernels.py.
"""

import math
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor

EPS = 2.0**-23  # of the RMS norm


def norm(x: Tensor) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + EPS)


# -----------------------------------------------------------------------------
# Attention


def mask(cu_seqlens: Tensor, length: int, window: int) -> Tensor:
    """(length, length): query t sees key s of its own document with t − window ≤ s ≤ t."""
    document = [sum(start <= t for start in cu_seqlens.tolist()) for t in range(length)]
    seen = torch.zeros(length, length, dtype=torch.bool)
    for t in range(length):
        for s in range(max(0, t - window), t + 1):
            seen[t, s] = document[s] == document[t]
    return seen


def attention(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float) -> Tensor:
    """q, k, v (P, H, D), seen (P, P)."""
    scores = torch.einsum("thd,shd->hts", q, k) * scale
    probs = torch.softmax(scores.masked_fill(~seen, -math.inf), -1)
    return torch.einsum("hts,shd->thd", probs, v)


def frequencies(head_dim: int) -> list[float]:
    """Radians a position, of each pair of neighbouring dims: a quarter as many as dims, then zeros."""
    n = head_dim // 4
    return [(1 / 1024) ** (j / (n - 1) if n > 1 else 0) for j in range(n)] + [0.0] * n


def rotate(x: Tensor, positions: list[list[int]], freq: list[float]) -> Tensor:
    """x (T, H, D), positions[t][h]. Angles are fp32 products of fp32 numbers, as in the tables."""
    position = torch.tensor(positions, dtype=torch.float32)
    angle = position[..., None] * torch.tensor(freq, dtype=torch.float32)  # (T, H, D/2)
    c = angle.cos().to(x.dtype)
    s = angle.sin().to(x.dtype)
    y = torch.empty_like(x)
    y[..., 0::2] = c * x[..., 0::2] + s * x[..., 1::2]
    y[..., 1::2] = c * x[..., 1::2] - s * x[..., 0::2]
    return y


def offset_keys(k: Tensor) -> Tensor:
    """k[t] ← k[t−1] in the dims from the middle of the head on."""
    middle = k.size(-1) // 2
    out = k.clone()
    for t in range(1, len(k)):
        out[t, :, middle:] = k[t - 1, :, middle:]
    return out


def doubled(z: Tensor) -> Tensor:
    """(2T, H/2, D): row 2t holds heads 0 .. H/2−1 of token t, row 2t+1 the others."""
    half = z.size(1) // 2
    rows = []
    for token in z:
        rows += [token[:half], token[half:]]
    return torch.stack(rows)


def exclude_own_value(y: Tensor, v: Tensor, alpha: Tensor) -> Tensor:
    """Exclusive self-attention (XSA): y and v (T, H, D), alpha (H,)."""
    along = (y * v).sum(-1, keepdim=True) / (v * v).sum(-1, keepdim=True).clamp_min(1e-8)
    return y - torch.tanh(alpha)[:, None] * along * v


def layer_attention(
    x: Tensor,
    W_qkv: Tensor,
    W_o: Tensor,
    head_gate: Tensor,
    value: Tensor | None,
    alpha: Tensor,
    freq: list[float],
    scale: float,
    cu_seqlens: Tensor,
    window: int,
    paired: bool,
    key_offset: bool,
) -> Tensor:
    """x (T, dim), normed → (T, dim)."""
    T = len(x)
    H = len(head_gate)
    q, k, v = (x @ W_qkv.T).reshape(T, 3 * H, -1).split(H, 1)
    positions = [[2 * t + h % 2 if paired else t for h in range(H)] for t in range(T)]
    q = rotate(norm(q), positions, freq)
    k = rotate(norm(k), positions, freq)
    if value is not None:
        v = v + value
    if key_offset:
        k = offset_keys(k)
    if paired:
        seen = mask(2 * cu_seqlens, 2 * T, window)
        y2 = attention(doubled(q), doubled(k), doubled(v), seen, scale)
        y = torch.stack([torch.cat((y2[2 * t], y2[2 * t + 1])) for t in range(T)])
    else:
        y = attention(q, k, v, mask(cu_seqlens, T, window), scale)
        y = exclude_own_value(y, v, alpha)
    y = y * torch.sigmoid(x[:, :12] @ head_gate.T)[..., None]
    return y.reshape(T, -1) @ W_o.T


# -----------------------------------------------------------------------------
# The whole model


def named_scalars(scalars: Tensor, table: dict[str, list[float]]) -> dict[str, Tensor]:
    """Each name's piece of the parameter, one piece after the other."""
    pieces = {}
    first = 0
    for name, values in table.items():
        pieces[name] = scalars[first : first + len(values)]
        first += len(values)
    return pieces


def bigram_row(tokens: list[int], t: int, rows: int) -> int:
    """The row of position t in the bigram table: hashed in 32 bits, two's complement."""
    if t == 0:
        return rows - 1
    bits = 36313 * tokens[t] % 2**32 ^ 27191 * tokens[t - 1] % 2**32
    return (bits - 2**32 if bits >= 2**31 else bits) % (rows - 1)


def sign_row(tokens: list[int], t: int, rows: int) -> int:
    """The row of position t in the table of signs."""
    return (tokens[t] ^ tokens[t - 1]) % rows if t > 0 else 0


# What a network of MUDD adds to its number j; these numbers do not learn a bias.
MUDD_OFFSETS = ({6: 2.0, 7: 2.0, 8: 1.1**0.5, 9: 1.0, 12: 1.1**0.5, 13: 1.0}, {1: -0.5})


def mudd_factors(p: dict[str, Tensor], j: int, x: Tensor) -> list[Tensor]:
    """The 14 factors of network j, of which network 1 uses 5; (T, 1) each. p: parameters by label."""
    W1, W2, b = (p[f"mudd_{part}"][j] for part in ("W1", "W2", "b"))
    hidden = x @ W1.T
    hidden = hidden * (1 + torch.erf(hidden / 2**0.5)) / 2
    factors = []
    for k in range(len(b)):
        learnt = hidden @ W2[k]
        if k in MUDD_OFFSETS[j]:
            factors.append(MUDD_OFFSETS[j][k] + 0.1 * learnt[:, None])
        else:
            factors.append(0.1 * (learnt + b[k])[:, None])
    return factors


def hidden_states(
    p: dict[str, Tensor],
    tables: ModuleType,
    H: int,
    inputs: Tensor,
    cu_seqlens: Tensor,
    windows: dict[str, int],
    freq: list[float],
    scale: float,
) -> Tensor:
    """What the LM head reads. p: parameters by label, and bigram_signs; tables: the script; windows:
    positions, by name."""
    sigmoid = torch.sigmoid
    layers = tables.LAYERS
    dim = p["embed"].size(1)
    tokens = inputs.tolist()
    s = named_scalars(p["scalars"], tables.SCALARS)
    lambdas = dict(zip(tables.LAMBDAS, p["layer_lambdas"].T))  # name: (layers,)
    alphas = p["layer_lambdas"][:, len(tables.LAMBDAS) :]  # (layers, H)
    e = p["embed"][tokens]
    rows = [e[0]]
    for t in range(1, len(e)):
        rows.append(e[t] + s["smear_lambda"] * sigmoid(p["smear_gate"][0] @ e[t, :12]) * e[t - 1])
    # The bigram's row, with signs, in the first dims; zeros in the others.
    T = len(tokens)
    table, signs = p["bigram_embed"], p["bigram_signs"]
    bigram = torch.zeros_like(e)
    for t in range(T):
        row = table[bigram_row(tokens, t, len(table))]
        bigram[t, : len(row)] = row * signs[sign_row(tokens, t, len(signs))]
    # The embedding that layers add again holds the bigram: as in the logs of public record 83.
    x = c0 = norm(torch.stack(rows)) + lambdas["bigram"][0] * bigram
    embeds = iter(p["value_embeds"][tokens].split(dim, 1))
    embeds = {i: next(embeds) for i, layer in enumerate(layers) if layer.value_embed}
    kept = {}
    for i, layer in enumerate(layers):
        if layer.add:
            gate = sigmoid(c0[:, :12] @ p["skip_gate"].T)
            x = x + sigmoid(s["skip_lambda"]) * 2 * gate * kept[layer.add]
        mu = mudd_factors(p, 0, x) if layer.mudd else None
        if layer.window:
            if not layer.same_input:
                xn = norm(x)
            value = None
            if layer.mudd:
                gate = torch.cat([mu[6]] * (H // 2) + [mu[7]] * (H // 2), 1)
                value = gate[..., None] * embeds[i].view(T, H, -1)
                value = value + (mu[0] * c0 + mu[1] * kept["c7"] + mu[2] * x).view(T, H, -1)
            elif layer.value_gate:
                G = p["ve_gate_bank"][sum(before.value_gate for before in layers[:i])]
                gate = 2 * sigmoid(xn[:, :6] @ G[:, :6].T + embeds[i][:, :6] @ G[:, 6:].T)
                value = gate[..., None] * embeds[i].view(T, H, -1)
            a = sum(bool(before.window) for before in layers[:i])
            out = layer_attention(
                xn,
                s["sa_lambda"][2 * i] * p["attn"][a, : 3 * dim],
                s["sa_lambda"][2 * i + 1] * p["attn"][a, 3 * dim :],
                p["attn_gate_bank"][a],
                value,
                alphas[i],
                freq,
                scale,
                cu_seqlens,
                windows[layer.window],
                layer.paired,
                layer.key_offset,
            )
            if layer.mudd:
                x = (1 + mu[5]) * x + mu[3] * c0 + mu[4] * kept["c7"]
                x = mu[8] * x + mu[9] * out + mu[10] * c0 + mu[11] * bigram
            else:
                x = lambdas["resid_attn"][i] * x + lambdas["post_attn"][i] * out
                x = x + lambdas["x0"][i] * c0
                if i > 0:
                    x = x + lambdas["bigram"][i] * bigram
        out = F.relu(norm(x) @ p["mlp"][i, 0].T) ** 2 @ p["mlp"][i, 1]
        if layer.mudd:
            x = mu[12] * x + mu[13] * out
        else:
            x = lambdas["resid_mlp"][i] * x + lambdas["post_mlp"][i] * out
        if layer.keep:
            kept[layer.keep] = x
    mu = mudd_factors(p, 1, x)
    x = x + mu[0] * c0 + mu[1] * kept["c7"] + mu[2] * kept["c9"] + mu[3] * embeds[min(embeds)]
    return norm(x + mu[4] * kept["c3"])


def softcap(logits: Tensor) -> Tensor:
    return 23 * torch.sigmoid((logits + 5) / 7.5)


def training_loss(
    logits: Tensor,
    targets: Tensor,
    weights: list[float],
    prefixes: dict[int, int] | None = None,
    prefix_weight: float = 0.0,
) -> Tensor:
    """Σ_t Σ_k w_k · CE(z[t], targets[t + k]), over the targets that exist, and the prefix weight
    times CE(z[t], prefix of targets[t]), over the targets that have one."""
    log_probs = torch.log_softmax(softcap(logits), -1)
    T = len(targets)
    terms = []
    for k, w in enumerate(weights):
        terms += [-w * log_probs[t, targets[t + k]] for t in range(T - k)]
    for t, target in enumerate(targets.tolist()):
        if prefixes and target in prefixes:
            terms.append(-prefix_weight * log_probs[t, prefixes[target]])
    return sum(terms)

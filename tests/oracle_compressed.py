"""Compressed sparse attention by its definition: float64 NumPy, one sequence, loops over queries, heads and entries.

No JAX, no helper shared with the library. Arrays may have leading axes of their own, and may be complex: the gradient
of a real function f is Im f(x + ih) / h, exact to rounding for tiny h (the complex step), so that no formula of a
backward pass is needed here.
"""

import dataclasses
from typing import Any

import numpy as np

STEP = 1e-30


def rotate(x, position, angles, inverse=False):
    """The last 2·len(angles) channels of x [.., H] in interleaved pairs, by position · angles."""
    x, R = np.array(x), 2 * len(angles)
    if R == 0:
        return x
    theta = (-1 if inverse else 1) * position * angles
    a, b = x[..., -R::2].copy(), x[..., x.shape[-1] - R + 1 :: 2].copy()
    x[..., -R::2] = a * np.cos(theta) - b * np.sin(theta)
    x[..., x.shape[-1] - R + 1 :: 2] = a * np.sin(theta) + b * np.cos(theta)
    return x


def rms_norm(x, weight, eps):
    return x / np.sqrt(np.mean(x * x, -1, keepdims=True) + eps) * weight


def softmax(scores, axis):
    weights = np.exp(scores - np.max(scores.real, axis, keepdims=True))
    return weights / weights.sum(axis, keepdims=True)


@dataclasses.dataclass
class EntrySource:
    """What is compressed: u, z [.., S, C], ape [.., m, C], norm [.., c] or None."""

    u: Any
    z: Any
    ape: Any
    norm: Any = None
    overlap: bool = True

    @property
    def ratio(self):
        return self.ape.shape[-2]


def entries(source, angles=(), eps=1e-6):
    """[.., S // m, c]: every complete block, candidates listed one by one."""
    m, C = source.ape.shape[-2:]
    S, c = source.u.shape[-2], C // 2 if source.overlap else C
    found = []
    for i in range(S // m):
        candidates = [(t, slice(C - c, C)) for t in range(m * i, m * i + m)]
        if source.overlap and i:
            candidates = [(t, slice(0, c)) for t in range(m * i - m, m * i)] + candidates
        z = np.stack([source.z[..., t, half] + source.ape[..., t % m, half] for t, half in candidates], -2)
        u = np.stack([source.u[..., t, half] for t, half in candidates], -2)
        entry = (softmax(z, -2) * u).sum(-2)
        if source.norm is not None:
            entry = rms_norm(entry, source.norm, eps)
        found.append(rotate(entry, m * i, np.asarray(angles)))
    lead = source.u.shape[:-2]
    return np.stack(found, -2) if found else np.zeros((*lead, 0, c))


@dataclasses.dataclass
class EntryIndex:
    """query [.., T, J, c], weights [.., T, J], source."""

    query: Any
    weights: Any
    source: EntrySource


def scores(query, weights, keys):
    """I[t, i] = Σ_j w[t, j] ReLU(q[t, j] · k[i]), [.., T, E]."""
    dots = np.einsum("...tjc,...ic->...tji", query, keys)
    return np.einsum("...tj,...tji->...ti", weights, np.where(dots.real > 0, dots, 0))


def top(row, k):
    """Numbers of the k largest, ties to the lower one, ascending."""
    return sorted(sorted(range(len(row)), key=lambda i: (-row[i], i))[:k])


@dataclasses.dataclass
class Layer:
    """One layer over one sequence: query [.., T, N, D], kv [.., T, D]; index None attends to every visible entry."""

    query: Any
    kv: Any
    source: EntrySource
    index: EntryIndex | None = None
    sinks: Any = None
    scale: float = 1.0
    window: int = 128
    top_k: int = 0
    angles: Any = ()
    eps: float = 1e-6


def select(layer):
    """For every query the numbers of the entries that it attends to."""
    m, T = layer.source.ratio, layer.query.shape[-3]
    if layer.index is None:
        return [list(range((t + 1) // m)) for t in range(T)]
    angles = np.asarray(layer.angles)
    keys = entries(layer.index.source, angles, layer.eps)
    query = np.stack([rotate(layer.index.query[..., t, :, :], t, angles) for t in range(T)], -3)
    rows = scores(query, layer.index.weights, keys).real
    rows = rows.reshape(-1, *rows.shape[-2:])[0]
    return [top(rows[t, : (t + 1) // m], layer.top_k) for t in range(T)]


def forward(layer, selected=None):
    """(out [.., T, N, D], lse [.., T, N]); the sink is in the lse."""
    T, N, D = layer.query.shape[-3:]
    angles = np.asarray(layer.angles)
    compressed = entries(layer.source, angles, layer.eps)
    kv = np.stack([rotate(layer.kv[..., t, :], t, angles) for t in range(T)], -2)
    selected = select(layer) if selected is None else selected
    outs, lses = [], []
    for t in range(T):
        rows = [kv[..., s, :] for s in range(max(0, t - layer.window + 1), t + 1)]
        rows = np.stack(np.broadcast_arrays(*rows, *[compressed[..., i, :] for i in selected[t]]), -2)
        for n in range(N):
            q = rotate(layer.query[..., t, n, :], t, angles)
            logits = layer.scale * np.einsum("...d,...sd->...s", q, rows)
            if layer.sinks is not None:
                sink = np.asarray(layer.sinks[..., n, None])
                lead = np.broadcast_shapes(logits.shape[:-1], sink.shape[:-1])
                logits = np.concatenate([np.broadcast_to(x, (*lead, x.shape[-1])) for x in (logits, sink)], -1)
            shift = np.max(logits.real, -1, keepdims=True)
            lses.append(shift[..., 0] + np.log(np.exp(logits - shift).sum(-1)))
            weights = softmax(logits, -1)[..., : rows.shape[-2]]
            outs.append(rotate(np.einsum("...s,...sd->...d", weights, rows), t, angles, inverse=True))
    out, lse = np.stack(np.broadcast_arrays(*outs), -2), np.stack(np.broadcast_arrays(*lses), -1)
    return out.reshape(*out.shape[:-2], T, N, D), lse.reshape(*lse.shape[:-1], T, N)


def gradients(function, inputs, chunk=256):
    """d function(inputs) / d inputs[name] for a real function of a dict of arrays, by the complex step.

    `function` gets the inputs with one leading axis, one copy for each number that is moved, and returns `[copies]`.
    """
    found = {}
    for name, x in inputs.items():
        x, parts = np.asarray(x, np.float64), []
        for start in range(0, x.size, chunk):
            moved = np.arange(start, min(start + chunk, x.size))
            step = np.zeros((len(moved), x.size), complex)
            step[np.arange(len(moved)), moved] = 1j * STEP
            varied = inputs | {name: x + step.reshape(-1, *x.shape)}
            parts.append(np.imag(function(varied)) / STEP)
        found[name] = np.concatenate(parts).reshape(x.shape) if parts else np.zeros(x.shape)
    return found

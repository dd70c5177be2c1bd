"""The truth: exact attention in float64 NumPy.

Loops over batch and heads, arrays within. Nothing here imports JAX or jattn, so that an error in one cannot hide in
the other. Masks arrive as bool arrays. Gradients are analytic; test_attention.py holds them against differences.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

NEG_INF = float("-inf")


@dataclass(frozen=True)
class ScoreMod:
    """A score modifier as explicit formulas on [T, S] arrays: its value and its derivatives.

    `value(score, b, n, t, s, *aux)`, `d_score(...)` and `d_aux(...) -> tuple` get b, n as ints and t [T, 1], s [1, S]
    as positions; aux arrays arrive as the [T, S] slice of what broadcasts to [B, N, T, S].
    """

    value: Callable
    d_score: Callable
    d_aux: Callable = lambda *args: ()


@dataclass(frozen=True)
class Problem:
    """One call: query [B, T, N, H], key [B, S, K, H], value [B, S, K, D]; bias, mask, keep fit [B, N, T, S]."""

    query: np.ndarray
    key: np.ndarray
    value: np.ndarray
    bias: np.ndarray | None = None
    mask: np.ndarray | None = None
    scale: float | None = None
    offset: np.ndarray | int = 0  # position of query 0, int or [B]
    query_lengths: np.ndarray | None = None  # [B]
    soft_cap: float | None = None
    score_mod: ScoreMod | None = None
    aux: tuple = ()
    sinks: np.ndarray | None = None  # [N]
    keep: np.ndarray | None = None  # dropout: True where a weight is kept
    keep_probability: float = 1.0


def _f64(x):
    return np.asarray(x).astype(np.float64)


def _slice(x, shape, b, n):
    """The [T, S] slice (b, n) of x broadcast to [B, N, T, S]."""
    return np.broadcast_to(x, shape)[b, n]


def _scale(p):
    return 1 / np.sqrt(p.query.shape[-1]) if p.scale is None else float(p.scale)


def _slice_forward(p, b, n):
    """Everything about one (batch, head) that forward and backward need."""
    (B, T, N, _), (S, K) = p.query.shape, p.key.shape[1:3]
    shape = (B, N, T, S)
    kv = n // (N // K)
    q, k, v = _f64(p.query[b, :, n]), _f64(p.key[b, :, kv]), _f64(p.value[b, :, kv])
    qk = q @ k.T
    biased = _scale(p) * qk
    visible = np.ones((T, S), bool) if p.mask is None else _slice(p.mask, shape, b, n).astype(bool)
    row_exists = np.ones(T, bool) if p.query_lengths is None else np.arange(T) < p.query_lengths[b]
    visible = visible & row_exists[:, None]
    if p.bias is not None:
        bias = _f64(_slice(p.bias, shape, b, n))
        biased = biased + np.where(visible, bias, 0.0)
    offset = int(np.broadcast_to(p.offset, (B,))[b])
    where = (b, n, offset + np.arange(T)[:, None], np.arange(S)[None, :])
    aux = tuple(_f64(_slice(a, shape, b, n)) for a in p.aux)
    pre = biased if p.score_mod is None else p.score_mod.value(biased, *where, *aux)
    visible = visible & ~np.isneginf(pre)
    safe = np.where(visible, pre, 0.0)
    score = safe if p.soft_cap is None else p.soft_cap * np.tanh(safe / p.soft_cap)
    score = np.where(visible, score, NEG_INF)

    sink = np.full(T, NEG_INF if p.sinks is None else float(p.sinks[n]))
    top = np.maximum(score.max(axis=1, initial=NEG_INF), sink)
    top = np.where(np.isneginf(top), 0.0, top)
    weight = np.exp(score - top[:, None])
    total = weight.sum(axis=1) + np.exp(sink - top)
    with np.errstate(divide="ignore"):
        lse = np.where(row_exists, top + np.log(total), NEG_INF)
    prob = np.divide(weight, total[:, None], out=np.zeros_like(weight), where=total[:, None] > 0)
    prob_sink = np.where(row_exists, np.exp(sink - np.where(np.isneginf(lse), 0.0, lse)), 0.0)
    factor = np.ones((T, S)) if p.keep is None else _slice(p.keep, shape, b, n) / p.keep_probability
    return dict(
        q=q,
        k=k,
        v=v,
        kv=kv,
        qk=qk,
        biased=biased,
        where=where,
        aux=aux,
        safe=safe,
        visible=visible,
        prob=prob,
        prob_sink=prob_sink,
        factor=factor,
        lse=lse,
    )


def forward(p):
    """(out [B, T, N, D], lse [B, T, N]), float64."""
    B, T, N, _ = p.query.shape
    out, lse = np.zeros((B, T, N, p.value.shape[-1])), np.zeros((B, T, N))
    for b in range(B):
        for n in range(N):
            f = _slice_forward(p, b, n)
            out[b, :, n], lse[b, :, n] = _results(f)
    return out, lse


def _results(f):
    return (f["prob"] * f["factor"]) @ f["v"], f["lse"]


def backward(p, dout, dlse=None):
    """Gradients, by name, of sum(out * dout) + sum(lse * dlse), the latter over the finite lse; and, as
    "forward", what `forward` gives."""
    B, T, N, _ = p.query.shape
    out, lse = np.zeros((B, T, N, p.value.shape[-1])), np.zeros((B, T, N))
    dq, dk, dv = (np.zeros(x.shape) for x in (p.query, p.key, p.value))
    dbias, daux = _Sum(np.shape(p.bias)), [_Sum(np.shape(a)) for a in p.aux]
    dsinks, dscale, terms = _Sum((N, 1, 1)), _Sum(()), dict(sinks=np.zeros(N), scale=0.0)
    for b in range(B):
        for n in range(N):
            f = _slice_forward(p, b, n)
            out[b, :, n], lse[b, :, n] = _results(f)
            g = _f64(dout[b, :, n])
            glse = np.zeros(T) if dlse is None else np.where(np.isneginf(f["lse"]), 0.0, _f64(dlse[b, :, n]))
            dprob = (g @ f["v"].T) * f["factor"]
            delta = (f["prob"] * dprob).sum(axis=1)
            ds = f["prob"] * (dprob - delta[:, None] + glse[:, None])
            rough = f["prob"] * (abs(dprob) + abs(delta - glse)[:, None])  # what a machine adds, before it cancels
            dsinks.add((f["prob_sink"] * (glse - delta))[:, None], b, n)
            if p.soft_cap is not None:
                ds = ds * (1 - np.tanh(f["safe"] / p.soft_cap) ** 2)
            if p.score_mod is not None:
                biased = np.where(f["visible"], f["biased"], 0.0)
                for total, d in zip(daux, p.score_mod.d_aux(biased, *f["where"], *f["aux"]), strict=True):
                    total.add(ds * np.where(f["visible"], d, 0.0), b, n)
                ds = ds * np.where(f["visible"], p.score_mod.d_score(biased, *f["where"], *f["aux"]), 0.0)
            if p.bias is not None:
                dbias.add(ds, b, n)
            dscale.add(ds * f["qk"], b, n)
            terms["scale"] += ((rough * f["qk"]) ** 2).sum()
            terms["sinks"][n] += ((f["prob_sink"] * (abs(delta) + abs(glse))) ** 2).sum()
            dq[b, :, n] += _scale(p) * ds @ f["k"]
            dk[b, :, f["kv"]] += _scale(p) * ds.T @ f["q"]
            dv[b, :, f["kv"]] += (f["prob"] * f["factor"]).T @ g
    return dict(
        query=dq,
        key=dk,
        value=dv,
        bias=dbias.total,
        sinks=dsinks.total[:, 0, 0],
        scale=dscale.total,
        # Sizes of sums of as many independent terms, for the gradients that are a number or one a head.
        terms={name: np.sqrt(np.max(x)) for name, x in terms.items()},
        aux=[s.total for s in daux],
        forward=(out, lse),
    )


class _Sum:
    """Sum of [B, N, T, S] terms over every axis along which an array of shape `own` broadcasts."""

    def __init__(self, own):
        self.total = np.zeros(own)
        self.padded = self.total.reshape((1,) * (4 - len(own)) + tuple(own))

    def add(self, terms, b, n):
        """Adds the [T, S] slice (b, n)."""
        axes = tuple(i for i in (0, 1) if self.padded.shape[i + 2] == 1 and terms.shape[i] != 1)
        part = terms.sum(axis=axes, keepdims=True)
        self.padded[b if self.padded.shape[0] > 1 else 0, n if self.padded.shape[1] > 1 else 0] += part


# Dropout: Philox4x32-10 (Salmon et al., SC'11), written from the paper.


def philox4x32(counter, key):
    """Ten rounds of Philox4x32 on four uint32 counter arrays and two key words; returns four uint32 arrays."""
    low = np.uint64(0xFFFFFFFF)
    c = [np.asarray(x).astype(np.uint64) & low for x in counter]
    k = [int(x) & 0xFFFFFFFF for x in key]
    for _ in range(10):
        p0, p1 = c[0] * np.uint64(0xD2511F53), c[2] * np.uint64(0xCD9E8D57)
        high0, low0, high1, low1 = p0 >> np.uint64(32), p0 & low, p1 >> np.uint64(32), p1 & low
        c = [high1 ^ c[1] ^ np.uint64(k[0]), low1, high0 ^ c[3] ^ np.uint64(k[1]), low0]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return [x.astype(np.uint32) for x in c]


def dropout_keep(key_words, rate, B, N, T, S, offset=0):
    """(keep bool [B, N, T, S], probability of keeping): one 16-bit draw per (b, n, query position, key position)."""
    threshold = round(rate * 65536)
    b, n, t, s = np.meshgrid(np.arange(B), np.arange(N), np.arange(T), np.arange(S), indexing="ij", sparse=True)
    t = (t + np.broadcast_to(offset, (B,))[:, None, None, None]).astype(np.int64) & 0xFFFFFFFF
    t_counter = (t >> 4) << 3 | (t & 7)
    s_counter = (s >> 4) << 2 | (s >> 1 & 3)
    lane = np.broadcast_to((s & 1) | (t >> 3 & 1) << 1 | (s >> 3 & 1) << 2, (B, N, T, S))
    words = np.stack(philox4x32(np.broadcast_arrays(b, n, t_counter, s_counter), key_words))
    word = np.take_along_axis(words, (lane >> 1)[None], axis=0)[0]
    bits = np.where(lane & 1, word >> 16, word & 0xFFFF)
    return bits >= threshold, 1 - threshold / 65536


# Packed sequences.


def sequence_slices(cu_q, cu_k, query_lengths=None, key_lengths=None):
    """Per sequence: (packed query slice, packed key slice), cut to the used lengths when given."""
    for i in range(len(cu_q) - 1):
        t = cu_q[i + 1] - cu_q[i] if query_lengths is None else min(query_lengths[i], cu_q[i + 1] - cu_q[i])
        s = cu_k[i + 1] - cu_k[i] if key_lengths is None else min(key_lengths[i], cu_k[i + 1] - cu_k[i])
        yield slice(int(cu_q[i]), int(cu_q[i] + t)), slice(int(cu_k[i]), int(cu_k[i] + s))

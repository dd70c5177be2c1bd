"""What the tests of decoding and of paged caches share: inputs, the oracle's view of a call, and the error rule."""

import dataclasses
import functools

import baseline
import compare
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import oracle

import jattn

JUNK = np.array([2147480000, -1, -2147483648, 7919], np.int32)  # what unused block table entries hold


def draw(B=3, T=2, S=300, N=4, K=2, H=16, D=None, dtype="float32", seed=0):
    """query, key, value: Student-t with a scale for each channel, and a few logits near +40."""
    rng = np.random.default_rng(seed)
    q, k, v = (rng.standard_t(4, (B, n, heads, d)) for n, heads, d in ((T, N, H), (S, K, H), (S, K, D or H)))
    v = v * rng.uniform(0.1, 3, D or H)
    if T and S:
        q, k = q / 2, k / 2
        hot = k[:, S // 3, 0]  # of the first query head, when it can be seen
        q[:, -1, 0] = hot / (hot**2).sum(-1, keepdims=True) * 40 * H**0.5
    return tuple(x.astype(dtype) for x in (q, k, v))


def problem(q, k, v, lengths, rule=None, query_lengths=None, causal=True, **options):
    """The call for the oracle. rule(b, n, row, t, s) says what is visible besides; t and s are positions."""
    B, T, N, _ = q.shape
    S = k.shape[1]
    lengths = np.asarray(lengths)
    offset = lengths - (T if query_lengths is None else query_lengths)
    b, n, row, s = np.ogrid[:B, :N, :T, :S]
    t = row + offset[:, None, None, None]
    visible = (s < lengths[:, None, None, None]) & (~np.bool_(causal) | (s <= t))
    visible = visible & (True if rule is None else rule(b, n, row, t, s))
    return oracle.Problem(
        query=q, key=k, value=v, mask=np.broadcast_to(visible, (B, N, T, S)), offset=offset,
        query_lengths=query_lengths, **options,
    )


def hold(result, p, score_mod=None):
    """Holds (out, lse) against the oracle by the one error rule."""
    out, lse = result
    dtype, (truth, truth_lse) = p.query.dtype, oracle.forward(p)
    assert out.dtype == dtype and lse.dtype == (np.float64 if dtype == np.float64 else np.float32)
    compare.check("out", out, truth, list(baselines(p, score_mod)), dtype)
    compare.check_lse(lse, truth_lse, dtype)


def baselines(p, score_mod):
    """Three runs of the dense baseline, with the channels of q·k and of v in different order."""
    rng, T = np.random.default_rng(6), p.query.shape[1]
    mask = p.mask
    if p.query_lengths is not None:
        mask = mask & (np.arange(T)[:, None] < p.query_lengths[:, None, None, None])
    static = dict(scale=p.scale, soft_cap=p.soft_cap, score_mod=score_mod)
    static["offset"] = tuple(p.offset) if score_mod else 0  # nothing else looks at it
    for shuffled in (False, True, True):
        h, d = (rng.permutation(n) if shuffled else np.arange(n) for n in (p.query.shape[-1], p.value.shape[-1]))
        out = _dense(p.query[..., h], p.key[..., h], p.value[..., d], mask, p.sinks, p.aux, **static)
        yield np.asarray(out)[..., np.argsort(d)]


@functools.partial(jax.jit, static_argnames=("scale", "soft_cap", "score_mod", "offset"))
def _dense(q, k, v, mask, sinks, aux, **static):
    return baseline.attention(q, k, v, None, mask, sinks=sinks, aux=aux, **static)[0]


def dequantized(x):
    """The truth of a `Quantized`, float64."""
    scale = np.asarray(x.scale, np.float64)
    return np.asarray(x.values).astype(np.float64) * (scale if x.per == "tensor" else scale[..., None])


def paged(k, v, lengths, page_size=16, extra=5, seed=0, tables=None):
    """A cache with the first `lengths` keys and values of each sequence on random pages, NaN in every other slot and
    junk in every other table entry. `k` and `v` are NumPy arrays, or Quantized with a scale a token."""
    rng = np.random.default_rng(seed)
    leaves, structure = jax.tree.flatten((k, v))
    B, S = leaves[0].shape[:2]
    width = -(-S // page_size)
    used = -(-np.asarray(lengths) // page_size)
    pages = int(used.sum()) + extra
    if tables is None:
        tables = rng.choice([*JUNK, pages], (B, width)).astype(np.int32)
        order = iter(rng.permutation(pages))
        for b in range(B):
            tables[b, : used[b]] = [next(order) for _ in range(used[b])]

    def scatter(x):
        x = np.asarray(x)
        pool = np.full((pages, page_size, *x.shape[2:]), poison(x.dtype), x.dtype)
        for b in range(B):
            for s in range(lengths[b]):
                pool[tables[b, s // page_size], s % page_size] = x[b, s]
        return jnp.asarray(pool)

    key, value = structure.unflatten([scatter(x) if x.ndim >= 3 else jnp.asarray(x) for x in leaves])
    return jattn.PagedCache(key, value, jnp.asarray(tables), jnp.asarray(np.asarray(lengths, np.int32)))


def poison(dtype):
    """NaN, or of integers the largest."""
    return 127 if dtype == np.int8 else ml_dtypes.finfo(dtype).dtype.type(np.nan)


def poisoned(x, lengths):
    """`x [B, S, ...]` with NaN at and past each length."""
    gone = np.arange(x.shape[1]) >= np.asarray(lengths)[:, None]
    return np.where(gone.reshape(*gone.shape, *[1] * (x.ndim - 2)), poison(x.dtype), x)


def replace(cache, **changes):
    return dataclasses.replace(cache, **changes)

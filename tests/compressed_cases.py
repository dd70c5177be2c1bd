"""Toy layers of compressed attention, with the ways to cut and to run them that the tests share."""

import functools

import jax
import numpy as np
import pytest

from jattn.compressed import EntryIndex, EntrySource, csa_attention, hca_attention
from jattn.compressed_cache import CompressedCache
from jattn.compressed_tokens import Rotary

B, T, N, D, J, C = 2, 40, 3, 12, 2, 8
WINDOW, TOP, SCALE = 6, 3, D**-0.5
ROTARY, ANGLES = Rotary(4, base=100.0), 100.0 ** (-np.arange(0, 4, 2) / 4)
RATIO, OVERLAP = {"CSA": 4, "HCA": 8}, {"CSA": True, "HCA": False}
KINDS = pytest.mark.parametrize("kind", RATIO)
SINKS = np.float32([-1, 0.5, 2])


def source(rng, kind, c, B, T, dtype="float32"):
    m, width = RATIO[kind], c * (2 if OVERLAP[kind] else 1)
    weights = "float64" if dtype == "float64" else "float32"
    u, z = rng.standard_t(3, (B, T, width)), 2 * rng.standard_normal((B, T, width))
    ape, norm = rng.standard_normal((m, width)), 1 + 0.3 * rng.standard_normal(c)
    return EntrySource(u.astype(dtype), z.astype(dtype), ape.astype(weights), norm.astype(weights))


@functools.cache
def draw(kind, B=B, T=T, dtype="float32", seed=0):
    """(query, kv, source, index) of B sequences; one key is far larger than others, and seen for a while."""
    rng = np.random.default_rng(seed)
    query = (2 * rng.standard_normal((B, T, N, D))).astype(dtype)
    kv = rng.standard_normal((B, T, D)).astype(dtype)
    kv[:, T // 3] *= 8
    own, index = source(rng, kind, D, B, T, dtype), None
    if kind == "CSA":
        q, w = rng.standard_normal((B, T, J, C)), rng.standard_normal((B, T, J))
        index = EntryIndex(q.astype(dtype), w.astype(dtype), source(rng, kind, C, B, T, dtype))
    return query, kv, own, index


@functools.cache
def compiled(kind, **options):
    call = csa_attention if kind == "CSA" else hca_attention
    options = dict(scale=SCALE, window=WINDOW, rotary=ROTARY, return_residual=True) | options

    def run(query, kv, own, index, cache, sinks, top_k=TOP, **more):
        picked = (index,) if kind == "CSA" else ()
        more |= dict(top_k=top_k) if isinstance(index, EntryIndex) else {}
        return call(query, kv, own, *picked, cache, sinks=sinks, **options, **more)

    return jax.jit(run, static_argnames="top_k")


def run(kind, inputs, cache=None, lengths=None, sinks=SINKS, options=(), **more):
    """(out, lse), with a cache ((out, lse), cache); lengths are always given, to share compilations."""
    if "cu_seqlens" not in more:
        B, T = inputs[0].shape[:2]
        more["seq_lengths"] = np.full(B, T, np.int32) if lengths is None else np.asarray(lengths, np.int32)
    return host(compiled(kind, **dict(options))(*inputs, cache, sinks, **more))


def host(tree):
    """NumPy arrays: slicing those compiles nothing."""
    return jax.tree.map(np.asarray, tree)


@functools.cache
def empty(kind, B=B, capacity=T + 8, index_dim=C, head_dim=D, **more):
    index_dim = index_dim if kind == "CSA" else None
    make = functools.partial(CompressedCache.zeros, B, capacity, head_dim, ratio=RATIO[kind], overlap=OVERLAP[kind])
    return host(jax.jit(functools.partial(make, index_dim=index_dim, window=WINDOW, **more))())


def tokens(inputs, change):
    """`inputs` with `change` made to every array that has tokens."""
    B, T = inputs[0].shape[:2]
    return jax.tree.map(lambda x: change(x) if x.shape[:2] == (B, T) else x, inputs)


def rows(inputs, of):
    """`inputs` of some sequences."""
    return tokens(inputs, lambda x: np.asarray(x)[np.asarray(of)])


def chunk(inputs, a, b, T=T):
    """Tokens a..b - 1, with NaN behind them."""

    def cut(x):
        x = np.asarray(x)
        fill = np.full((x.shape[0], T - (b - a), *x.shape[2:]), np.nan, x.dtype)
        return np.concatenate([x[:, a:b], fill], 1)

    return tokens(inputs, cut)


def equal(a, b, message=""):
    """Bit for bit, and in structure."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        x, y = np.asarray(x), np.asarray(y)
        assert x.dtype == y.dtype and x.shape == y.shape and x.tobytes() == y.tobytes(), message

"""Compressed sparse and heavily compressed attention as Flax layers: the definition, and decoding through the cache."""

import functools

import baseline_compressed
import compare
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import oracle_compressed as oracle
import pytest
from flax import nnx
from linear_cases import quick_compiles  # noqa: F401 -- for every test here
from nnx_cases import B, M, T, call, decoded, disturb, gradients, parameters, rms, tokens

import jattn
import jattn.nnx

N, D, WINDOW, TOP, J, C = 4, 8, 6, 3, 4, 6
ROTARY, ANGLES = jattn.Rotary(4, base=100.0), 100.0 ** (-np.arange(0, 4, 2) / 4)
SIZES = dict(
    num_heads=N, in_features=M, qkv_features=N * D, query_latent_features=10, window=WINDOW, num_groups=2,
    group_features=5, rotary=ROTARY,
)  # fmt: skip
LAYERS = {
    "csa": (jattn.nnx.CompressedSparseAttention, dict(top_k=TOP, index_heads=J, index_head_dim=C)),
    "hca": (jattn.nnx.HeavilyCompressedAttention, dict(ratio=8)),
}


def layer(kind, **options):
    make, own = LAYERS[kind]
    return disturb(make(**SIZES, **own, **options, rngs=nnx.Rngs(0)))


def projected(layer, x, dtype):
    """What attention takes of x, in NumPy: query, kv, entries, and index (None for HCA), of the oracle's classes."""
    w, x = parameters(layer, dtype), x.astype(dtype)

    def source(at, c):
        u, z = x @ w[at + ".kv.kernel"], x @ w[at + ".gate.kernel"]
        return oracle.EntrySource(u, z, w[at + ".position_bias"], w[at + ".norm.scale"], layer.overlap)

    latent = rms(x @ w["query_down.kernel"], w["query_norm.scale"])
    query = rms(np.einsum("btq,qnd->btnd", latent, w["query_up.kernel"]), dtype(1))
    kv = rms(x @ w["kv.kernel"], w["kv_norm.scale"])
    index = None
    if layer.overlap:
        heads = np.einsum("btq,qjc->btjc", latent, w["index_query.kernel"])
        index = oracle.EntryIndex(
            heads, x @ w["index_weights.kernel"] * dtype((J * C) ** -0.5), source("index_entries", C)
        )
    return query, kv, source("entries", D), index, w


def output(out, w):
    groups = out.reshape(*out.shape[:2], 2, -1)
    return np.einsum("btgi,igr->btgr", groups, w["out_down.kernel"]).reshape(*out.shape[:2], -1) @ w["out_up.kernel"]


@functools.cache
def formula(kind, seed=1):
    """(truth, baseline): the definition in float64, and dense attention over what it selects in float32."""
    of, x, rows = layer(kind), tokens(seed=seed), []
    query, kv, source, index, w = projected(of, x, np.float64)
    chosen = np.zeros((B, T, T // of.ratio), bool)

    def one(source, b):
        return oracle.EntrySource(source.u[b], source.z[b], source.ape, source.norm, source.overlap)

    for b in range(B):
        picked = index and oracle.EntryIndex(index.query[b], index.weights[b], one(index.source, b))
        problem = oracle.Layer(
            query[b], kv[b], one(source, b), picked, w["sinks"], D**-0.5, WINDOW, TOP, ANGLES
        )  # fmt: skip
        for t, entries in enumerate(oracle.select(problem)):
            chosen[b, t, entries] = True
        rows.append(oracle.forward(problem)[0])
    truth = output(np.stack(rows), w)
    query, kv, source, _, w = projected(of, x, np.float32)
    out, _ = baseline_compressed.attention(
        *map(jnp.asarray, (query, kv, source.u, source.z, source.ape, source.norm, w["sinks"])), chosen=chosen,
        overlap=of.overlap, scale=D**-0.5, window=WINDOW, rotary=ROTARY,
    )  # fmt: skip
    return truth, output(np.asarray(out), w)


def check(name, kind, got, rows=slice(None)):
    truth, baseline = formula(kind)
    compare.check(name, got, truth[rows], [baseline[rows]], np.float32)


def test_csa_is_the_definition_and_decoding_is_the_prompt():
    """At every position: at once, and token by token from nothing."""
    x, of = tokens(), layer("csa")
    check("at once", "csa", np.asarray(call(of, x)))
    of.init_cache((B, T, M))
    check("token by token", "csa", decoded(of, x, [1] * T))
    assert of.cached.get_value().lengths.tolist() == [T] * B


def test_hca_decodes_prompts_of_other_lengths():
    """A prompt whose padding is NaN and an empty one, and then token by token: every position is that of the whole."""
    x, of, lengths = tokens(), layer("hca"), np.array([21, 0], np.int32)
    of.init_cache((B, T, M))
    padded = np.where(np.arange(21)[:, None] < lengths[:, None, None], x[:, :21], np.float32(np.nan))
    first = np.asarray(call(of, padded, decode=True, seq_lengths=lengths))
    steps = decoded(of, np.stack([x[0, 21:], x[1, :19]]), [1] * 19)
    check("the first", "hca", np.concatenate([first[0], steps[0]]), 0)
    check("the second", "hca", steps[1], (1, slice(0, 19)))


def test_packed_sequences_do_not_see_each_other():
    """HCA at once, in one row."""
    x, of = tokens(), layer("hca")
    packed = np.asarray(call(of, x.reshape(B * T, M), cu_seqlens=np.array([0, T, 2 * T], np.int32)))
    check("packed", "hca", packed.reshape(B, T, M))


def test_every_parameter_learns():
    """Of HCA: CSA has an indexer more, which nothing flows to through the selection."""
    of = layer("hca")
    found = gradients(of, tokens())
    assert set(found) == set(parameters(of, np.float32))
    for name, gradient in found.items():
        assert np.isfinite(gradient).all() and np.abs(gradient).max() > 0, name


def test_dtypes():
    of = layer("hca", dtype=jnp.bfloat16)
    of.init_cache((B, T, M))
    assert of.cached.get_value().window.dtype == jnp.bfloat16
    assert call(of, tokens(ml_dtypes.bfloat16)[:, :1], decode=True).dtype == jnp.bfloat16


def test_errors():
    of, x = layer("csa"), tokens()
    with pytest.raises(ValueError, match=r"decode=True needs a cache: call init_cache"):
        of(x, decode=True)
    with pytest.raises(ValueError, match=r"cu_seqlens are for packed inputs \[T, 12\] and no cache"):
        of(x, cu_seqlens=np.array([0, T]))
    with pytest.raises(ValueError, match="num_heads=4 must be a multiple of num_groups=3"):
        jattn.nnx.HeavilyCompressedAttention(**SIZES | dict(num_groups=3), rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="must be a multiple of 64 channels"):
        of.init_cache((B, T, M), kv_format="v4_584")

"""The Hopper kernels on pieces of a longer sequence, as sequence parallelism calls them: merged, they are the whole."""

import dataclasses

import cases
import jax
import jax.numpy as jnp
import mosaic
import numpy as np
import pytest

from jattn import masks, mods
from jattn.attention import prepare
from jattn.pallas import attention
from jattn.partials import merge
from jattn.reference import attention as reference


def odd(b, n, t, s, every):
    return (t - s + n) % every != 0


CALLS = {
    "causal, offset, lengths, dropout": dict(
        is_causal=True, query_offset=3, key_value_seq_lengths=jnp.array([77], jnp.int32), dropout_rate=0.25,
        dropout_key=jax.random.key(1),
    ),
    "prefix, predicate, alibi": dict(
        mask=masks.prefix(40) & masks.predicate(odd, jnp.full((1, 1, 1, 1), 3, jnp.int32)), score_mod=mods.alibi(2),
        query_seq_lengths=jnp.array([60], jnp.int32),
    ),
    "window, blocks, soft cap": dict(
        mask=masks.blocks(jnp.asarray(np.random.default_rng(0).random((8, 12)) < 0.7), (8, 8)), logits_soft_cap=5.0,
        local_window_size=(40, 20),
    ),
}  # fmt: skip
T, S, ROWS, KEYS = 64, 96, 32, 48
FIRST = T - ROWS  # of the queries that are looked at


def whole(implementation, arrays, context, options, dout):
    """(out, lse), (dq, dk, dv) of the call at once, out, lse and dq of the last queries."""
    out, lse, _ = implementation.forward(arrays, context, options, unrounded=True)
    g = implementation.backward(arrays, context, options, out, lse, jnp.zeros_like(lse), dout, jnp.zeros_like(lse))
    return (out[:, FIRST:], lse[:, FIRST:]), (g.query[:, FIRST:], g.key, g.value)


def pieces(implementation, arrays, context, options, dout):
    """The same of the last queries from rectangles, each a call of its own."""
    options = dataclasses.replace(options, partial=True)
    own = slice(FIRST, T)

    def rectangle(s):
        part = dataclasses.replace(
            arrays, query=arrays.query[:, own], key=arrays.key[:, s : s + KEYS], value=arrays.value[:, s : s + KEYS]
        )
        return part, dataclasses.replace(context, origin=jnp.array([0, 0, FIRST, s], jnp.int32))

    def backward(arrays, context, *saved):
        g = implementation.backward(arrays, context, options, *saved)
        return g.query, g.key, g.value

    see = jax.jit(lambda *call: implementation.forward(*call, options, unrounded=True)[:2])
    out, lse = merge(*(see(*rectangle(s)) for s in range(0, S, KEYS)))
    zero = jnp.zeros_like(lse)
    parts = [jax.jit(backward)(*rectangle(s), out, lse, zero, dout[:, own], zero) for s in range(0, S, KEYS)]
    dq, dk, dv = zip(*parts, strict=True)
    assert all(x.dtype == jnp.float32 for x in (*dq, *dk, *dv))
    return (out, lse), (sum(dq), jnp.concatenate(dk, axis=1), jnp.concatenate(dv, axis=1))


def check(name, kernels, dims=(64, 64)):
    q, k, v = cases.qkv(B=1, T=T, S=S, N=2, K=1, H=dims[0], D=dims[1], dtype="bfloat16")
    call = prepare(q, k, v, **CALLS[name])
    assert attention.why_not(dataclasses.replace(call.problem, S=KEYS, partial=True)) is None
    dout = jax.random.normal(jax.random.key(2), (*q.shape[:3], dims[1]), jnp.bfloat16).at[:, :FIRST].set(0)
    config = reference.TileConfig(16, 16)
    plain = dataclasses.replace(call.options, config=config)
    q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
    exact = dataclasses.replace(call.arrays, query=q, key=k, value=v)
    own = dataclasses.replace(call.options, config=mosaic.SMALL)
    want = jax.tree.leaves(whole(reference, exact, call.context, plain, dout.astype(jnp.float32)))
    yardstick = jax.tree.leaves(whole(reference, call.arrays, call.context, plain, dout))
    got = jax.tree.leaves(pieces(kernels, call.arrays, call.context, own, dout))
    for x, y, exactly in zip(got, yardstick, want, strict=True):
        seen = np.isfinite(exactly)
        np.testing.assert_array_equal(np.isfinite(x), seen)
        size = np.abs(exactly[seen]).max()
        error, allowed = (np.abs(np.asarray(z, np.float32) - exactly)[seen].max() / size for z in (x, y))
        assert error <= 2 * allowed + 2 * float(jnp.finfo(jnp.bfloat16).eps)


@pytest.mark.parametrize("name", CALLS)
def test_emulated(name, monkeypatch, capfd):
    for _ in mosaic.emulated(monkeypatch):
        check(name, attention)
    assert "RACE" not in capfd.readouterr().out


@pytest.mark.gpu
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128)], ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_on_the_gpu(name, dims):
    check(name, attention, dims)


def test_what_is_refused():
    q = jnp.zeros((1, 64, 2, 64), jnp.bfloat16)
    problem = dataclasses.replace(prepare(q, q, q).problem, partial=True)
    assert attention.why_not(problem) is None
    assert "every 4th" in attention.why_not(dataclasses.replace(problem, stride=4))
    assert "16 keys, not 40" in attention.why_not(dataclasses.replace(problem, dropout=True, S=40))

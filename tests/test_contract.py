"""The contract, line by line: docs/contract.md names the test of each paragraph."""

# ruff: noqa: E731 -- short local functions

import functools
import logging
import subprocess
import sys

import compare
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import oracle
import pytest
from cases import qkv

import jattn
from jattn import masks, mods

NAN_INF = np.array([np.nan, np.inf, -np.inf], np.float32)


def same_bits(a, b):
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(np.asarray(x), np.asarray(y)), a, b)


def rules(T, S, offset=0):
    """Position t [T, 1] of each query and s [S] of each key."""
    return np.arange(T)[:, None] + offset, np.arange(S)


def gradients(f, *arrays):
    """(out, lse), and gradients of a loss of both, compiled as one, and once for all calls with the same `f`."""
    grads, results = _gradients(f, len(arrays))(*arrays)
    return jax.tree.map(np.asarray, (results, grads))


@functools.lru_cache(maxsize=2)
def _gradients(f, number):
    def loss(*x):
        out, lse = f(*x)
        return (out.astype(jnp.float32) ** 2).sum() + jnp.where(lse > -jnp.inf, lse, 0).sum(), (out, lse)

    return jax.jit(jax.grad(loss, tuple(range(number)), has_aux=True))


# 1. Order.


def test_order_of_operations():
    """scale → bias → score_mod → soft cap → mask → softmax with sink → dropout → ·v, large enough to tell the order."""
    rng = np.random.default_rng(0)
    q, k, v = qkv(B=2, T=17, S=40, N=4, K=2)
    keep, p = oracle.dropout_keep((0, 7), 0.4, 2, 4, 17, 40, 23)
    t, s = rules(17, 40, 23)
    mod = oracle.ScoreMod(lambda x, b, n, t, s: x * 3 - 1, lambda x, b, n, t, s: 3.0)
    problem = oracle.Problem(
        q,
        k,
        v,
        bias=2 * rng.standard_normal((2, 1, 17, 40)).astype(np.float32),
        mask=s <= t,
        scale=np.float32(0.7),
        offset=23,
        soft_cap=4.0,
        score_mod=mod,
        sinks=rng.standard_normal(4).astype(np.float32),
        keep=keep,
        keep_probability=p,
    )

    def call(d):
        return jattn.attention(
            d["query"],
            d["key"],
            d["value"],
            d["bias"],
            scale=d["scale"],
            sinks=d["sinks"],
            is_causal=True,
            query_offset=23,
            logits_soft_cap=4.0,
            score_mod=lambda x, b, n, t, s: x * 3 - 1,
            dropout_rate=0.4,
            dropout_key=jax.random.key(7),
            return_residual=True,
        )

    dlse = rng.standard_normal((2, 17, 4)).astype(np.float32)
    compare.attention(problem, call, score_mod=lambda x, b, n, t, s: x * 3 - 1, dlse=dlse)


@pytest.mark.parametrize("cap", [None, 3.0, 50.0])
def test_minus_infinity_before_the_cap_is_masked(cap):
    """An additive mask is a mask: the weight is exactly 0, not that of −cap; a whole row of it is an empty row."""
    q, k, v = qkv()
    hidden = np.random.default_rng(1).random((2, 4, 17, 23)) < 0.4
    hidden[0, :, 3] = True
    bias = np.where(hidden, -np.inf, 0).astype(np.float32)
    f = lambda q, k, v, **d: jattn.attention(q, k, v, logits_soft_cap=cap, return_residual=True, **d)
    got = gradients(lambda q, k, v: f(q, k, v, bias=bias), q, k, v)
    want = gradients(lambda q, k, v: f(q, k, v, mask=~hidden), q, k, v)
    jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, atol=1e-5), got, want)
    assert not got[0][0][0, 3].any() and np.isneginf(got[0][1][0, 3]).all()
    dbias = jax.grad(lambda b: (f(q, k, v, bias=b)[0] ** 2).sum())(bias)
    assert np.isfinite(dbias).all() and not np.asarray(dbias)[hidden].any()


def test_minus_infinity_from_a_modifier_is_masked():
    q, k, v = qkv()
    mod = lambda x, b, n, t, s: jnp.where(s <= t, x, -jnp.inf)
    f = lambda *x, **d: jattn.attention(*x, logits_soft_cap=5.0, return_residual=True, **d)
    got = gradients(lambda *x: f(*x, score_mod=mod), q, k, v)
    want = gradients(lambda *x: f(*x, is_causal=True), q, k, v)
    jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, atol=1e-5), got, want)


def test_masked_entries_change_no_bit():
    """Any finite key, value or bias behind the mask: the same bits in every result; and no gradient there."""
    q, k, v = qkv()
    mask = np.random.default_rng(2).random((2, 1, 17, 23)) < 0.6
    mask[..., 5] = False
    bias = np.random.default_rng(3).standard_normal((2, 1, 17, 23)).astype(np.float32)
    f = lambda q, k, v, bias: jattn.attention(q, k, v, bias, mask, logits_soft_cap=1.0, return_residual=True)
    results, grads = gradients(f, q, k, v, bias)
    k2, v2 = k.copy(), v.copy()
    k2[:, 5], v2[:, 5] = 1e4, -1e30
    bias2 = np.where(mask, bias, 3e38).astype(np.float32)
    results2, grads2 = gradients(f, q, k2, v2, bias2)
    same_bits(results2, results)
    same_bits(grads2, grads)
    assert not grads[1][:, 5].any() and not grads[2][:, 5].any() and not grads[3][~mask].any()


def test_nan_and_inf_leave_no_trace():
    """Keys and values beyond the lengths, queries beyond theirs, and bias wherever the mask hides it."""
    q, k, v = qkv()
    rng = np.random.default_rng(4)
    key_lengths, query_lengths = np.array([11, 0], np.int32), np.array([17, 6], np.int32)
    mask = rng.random((2, 4, 17, 23)) < 0.7
    bias = rng.standard_normal((2, 4, 17, 23)).astype(np.float32)
    seen = (
        mask
        & (np.arange(23) < key_lengths[:, None, None, None])
        & (np.arange(17)[:, None] < query_lengths[:, None, None, None])
    )

    def f(q, k, v, bias):
        return jattn.attention(
            q,
            k,
            v,
            bias,
            mask,
            query_seq_lengths=query_lengths,
            key_value_seq_lengths=key_lengths,
            return_residual=True,
            score_mod=lambda x, b, n, t, s: x * 0.5,
            logits_soft_cap=9.0,
        )

    want = gradients(f, q, k, v, bias)
    for poison in NAN_INF:
        dirty = [x.copy() for x in (q, k, v)]
        for b in range(2):
            dirty[0][b, query_lengths[b] :] = poison
            dirty[1][b, key_lengths[b] :] = poison
            dirty[2][b, key_lengths[b] :] = poison
        same_bits(gradients(f, *dirty, np.where(seen, bias, poison).astype(np.float32)), want)
    assert all(np.isfinite(g).all() for g in want[1])


def test_nan_where_someone_looks_is_not_hidden():
    """The other side of the promise: a NaN that is attended to arrives."""
    q, k, v = qkv()
    v[0, 3] = np.nan
    assert np.isnan(jattn.attention(q, k, v)[0]).all()


# 2. Positions.


@pytest.mark.parametrize("offset", [6, [3, -9], "end"])
def test_query_offset_places_the_queries(offset):
    """Causal, windows, prefix and modifiers all read the same position."""
    q, k, v = qkv(T=17, S=23)
    lengths = np.array([23, 9], np.int32)
    start = np.array([23 - 17, 9 - 17]) if offset == "end" else np.broadcast_to(offset, 2)
    t, s = rules(17, 23, start[:, None, None, None])
    given = np.asarray(offset, np.int32) if isinstance(offset, list) else offset
    cases = [
        (dict(is_causal=True), s <= t),
        (dict(local_window_size=(4, 1)), (s >= t - 4) & (s <= t + 1)),
        (dict(mask=masks.prefix(5)), (s < 5) | (s <= t)),
    ]
    mod = oracle.ScoreMod(lambda x, b, n, t, s: x - 0.1 * abs(t - s), lambda x, b, n, t, s: 1.0)
    fn = lambda x, b, n, t, s: x - 0.1 * abs(t - s).astype(x.dtype)
    for options, mask in cases:
        problem = oracle.Problem(q, k, v, mask=mask & (s < lengths[:, None, None, None]), offset=start, score_mod=mod)

        def call(d, options=options):
            return jattn.attention(
                **d, **options, query_offset=given, key_value_seq_lengths=lengths, score_mod=fn, return_residual=True
            )

        compare.attention(problem, call, score_mod=fn)


def test_query_offset_may_be_traced():
    q, k, v = qkv()
    f = jax.jit(lambda o: jattn.attention(q, k, v, is_causal=True, query_offset=o))
    for offset in (np.array([0, 0], np.int32), np.array([9, -3], np.int32)):
        np.testing.assert_allclose(f(offset), jattn.attention(q, k, v, is_causal=True, query_offset=offset), atol=1e-6)
    np.testing.assert_allclose(
        jax.jit(lambda o: jattn.attention(q, k, v, is_causal=True, query_offset=o))(np.int32(4)),
        jattn.attention(q, k, v, is_causal=True, query_offset=4),
        atol=1e-6,
    )


def test_end_counts_the_lengths_given():
    """Key length − query length, a missing one being S or T."""
    q, k, v = qkv(T=17, S=23)
    kl, ql = np.array([20, 7], np.int32), np.array([17, 5], np.int32)
    for options, start in (
        (dict(), [6, 6]),
        (dict(key_value_seq_lengths=kl), [3, -10]),
        (dict(query_seq_lengths=ql), [6, 18]),
        (dict(key_value_seq_lengths=kl, query_seq_lengths=ql), [3, 2]),
    ):
        end = jattn.attention(q, k, v, is_causal=True, query_offset="end", **options)
        same_bits(end, jattn.attention(q, k, v, is_causal=True, query_offset=np.asarray(start, np.int32), **options))


def one_hot_weights(T, S, **options):
    """Which keys each query looks at, [T, S]: equal scores, unit-vector values."""
    q, k = np.ones((1, T, 1, 8), np.float32), np.ones((1, S, 1, 8), np.float32)
    return np.asarray(jattn.attention(q, k, np.eye(S, dtype=np.float32)[None, :, None], **options))[0, :, 0] > 0


@pytest.mark.parametrize(
    "window", [0, 1, 3, (3, 0), (0, 3), (None, 2), (2, None), (None, None), (5, -2), (-2, 5), (0, 0)]
)
def test_windows_are_inclusive(window):
    """An int w is (w, w); None is unbounded; a negative bound is a real bound."""
    left, right = window if isinstance(window, tuple) else (window, window)
    t, s = rules(16, 19)
    want = (s >= t - (99 if left is None else left)) & (s <= t + (99 if right is None else right))
    np.testing.assert_array_equal(one_hot_weights(16, 19, local_window_size=window), want)


@pytest.mark.parametrize("window", [-1, (-1, 0), (2, -3)])
def test_an_empty_window_is_a_value_error(window):
    with pytest.raises(ValueError, match="use None for unbounded"):
        jattn.attention(*qkv(), local_window_size=window)


def test_soft_cap():
    """c · tanh(score / c); None is off; 0 and below is an error."""
    q, k, v = qkv()
    for cap in (0.5, 30.0):
        mod = lambda x, b, n, t, s, cap=cap: cap * jnp.tanh(x / cap)
        np.testing.assert_allclose(
            jattn.attention(q, k, v, logits_soft_cap=cap), jattn.attention(q, k, v, score_mod=mod), atol=1e-6
        )
    same_bits(jattn.attention(q, k, v, logits_soft_cap=None), jattn.attention(q, k, v))
    for cap in (0, 0.0, -1.0):
        with pytest.raises(ValueError, match="logits_soft_cap"):
            jattn.attention(q, k, v, logits_soft_cap=cap)


def test_segment_ids_compare_for_equality_alone():
    """Renamed, unordered, negative and huge ids: what is equal sees each other, nothing else."""
    q, k, v = qkv(B=2, T=140, S=140, N=2, K=1, H=8)
    rng = np.random.default_rng(5)
    ids = rng.integers(0, 4, (2, 140))
    for names in ([0, 1, 2, 3], [3, 0, 2, 1], [-1, -(2**31), 2**31 - 1, 0]):
        renamed = np.array(names)[ids].astype(np.int32)
        for given in (renamed, (renamed, renamed.copy())):
            got = jattn.attention(q, k, v, segment_ids=given)
            want = jattn.attention(q, k, v, mask=(ids[:, None, :, None] == ids[:, None, None, :]))
            np.testing.assert_allclose(got, want, atol=1e-6)
    np.testing.assert_allclose(
        jattn.attention(q, k, v, segment_ids=renamed[0]),
        jattn.attention(q, k, v, segment_ids=np.stack([renamed[0]] * 2)),
        atol=1e-6,
    )


def test_sugar_and_masks_are_anded():
    q, k, v = qkv(T=20, S=20)
    ids, lengths = np.arange(20)[None].repeat(2, 0).astype(np.int32) // 8, np.array([20, 13], np.int32)
    mask = np.random.default_rng(0).random((2, 4, 20, 20)) < 0.8
    got = jattn.attention(
        q, k, v, mask=mask, is_causal=True, local_window_size=(6, 6), segment_ids=ids, key_value_seq_lengths=lengths
    )
    both = masks.dense(mask) & masks.causal() & masks.window(6) & masks.segments(ids) & masks.lengths(lengths)
    np.testing.assert_allclose(got, jattn.attention(q, k, v, mask=both), atol=1e-6)


# 3. Empty rows.

EMPTY = {
    "mask": (dict(mask=np.arange(17)[:, None] > np.array([3] * 23)), np.arange(17) <= 3),
    "causal before the first key": (dict(is_causal=True, query_offset=-5), np.arange(17) < 5),
    "window past the last key": (dict(local_window_size=(2, 2), query_offset=15), np.arange(17) + 15 - 2 > 22),
    "no key length": (dict(key_value_seq_lengths=np.array([0, 0], np.int32)), np.ones(17, bool)),
    "every row": (dict(mask=np.zeros((1, 23), bool)), np.ones(17, bool)),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", EMPTY)
def test_a_row_without_keys_is_zero(name, dtype):
    """Output exactly 0, lse −inf, gradients 0, whatever the cotangent; other rows as ever."""
    options, empty = EMPTY[name]
    q, k, v = qkv(dtype=dtype)
    f = lambda *x: jattn.attention(*x, **options, return_residual=True)
    (out, lse), pull = jax.vjp(f, q, k, v)
    assert not np.asarray(out)[:, empty].any()
    np.testing.assert_array_equal(np.isneginf(lse), np.broadcast_to(empty[:, None], lse.shape))
    dq, dk, dv = pull((jnp.ones_like(out), jnp.ones_like(lse)))
    assert all(np.isfinite(np.asarray(g, np.float32)).all() for g in (dq, dk, dv))
    assert not np.asarray(dq)[:, empty].any()
    only_empty = jnp.broadcast_to(jnp.asarray(empty)[:, None], lse.shape)
    grads = pull(
        (jnp.where(only_empty[..., None], 1, 0).astype(out.dtype) * jnp.ones_like(out), only_empty.astype(lse.dtype))
    )
    assert not any(np.asarray(g).any() for g in grads)


def test_no_keys_and_no_queries_at_all():
    """S = 0, T = 0, both, and no batch."""
    for B, T, S in ((2, 5, 0), (2, 0, 5), (2, 0, 0), (0, 5, 5)):
        q, k, v = qkv(B=B, T=T, S=S, N=4, K=2, H=16, D=8)
        (out, lse), grads = gradients(lambda *x: jattn.attention(*x, is_causal=True, return_residual=True), q, k, v)
        assert out.shape == (B, T, 4, 8) and not out.any() and np.isneginf(lse).all()
        assert [g.shape for g in grads] == [q.shape, k.shape, v.shape] and not any(g.any() for g in grads)
    bias = np.zeros((1, 4, 5, 0), np.float32)
    q, k, v = qkv(T=5, S=0)
    assert jax.grad(lambda b: jattn.attention(q, k, v, b).sum())(bias).shape == bias.shape


def test_an_empty_row_with_a_sink():
    """Output 0, lse = sink, and dsink gets the lse cotangent only."""
    q, k, v = qkv(N=4)
    sinks = np.array([0.3, -2.0, 5.0, 0.0], np.float32)
    for S_visible in (0, 23):
        mask = np.arange(17)[:, None] >= (17 if not S_visible else 6)
        f = lambda s, mask=mask: jattn.attention(q, k, v, mask=mask, sinks=s, return_residual=True)
        (out, lse), pull = jax.vjp(f, sinks)
        empty = ~mask[:, 0]
        assert not np.asarray(out)[:, empty].any()
        np.testing.assert_array_equal(np.asarray(lse)[:, empty], np.broadcast_to(sinks, (2, empty.sum(), 4)))
        dlse = np.random.default_rng(0).standard_normal(lse.shape).astype(np.float32) * empty[:, None]
        dout = np.random.default_rng(1).standard_normal(out.shape).astype(np.float32) * empty[:, None, None]
        np.testing.assert_allclose(pull((dout, dlse))[0], dlse.sum((0, 1)), rtol=1e-5, atol=1e-6)


def test_rows_past_the_query_length_are_zero():
    """Output 0, lse −inf (with a sink too), gradients 0, whatever stands in them."""
    q, k, v = qkv()
    lengths = np.array([17, 6], np.int32)
    q[1, 6:] = np.nan
    f = lambda q, k, v, s: jattn.attention(q, k, v, sinks=s, query_seq_lengths=lengths, return_residual=True)
    (out, lse), pull = jax.vjp(f, q, k, v, np.ones(4, np.float32))
    assert not np.asarray(out)[1, 6:].any() and np.isneginf(lse[1, 6:]).all() and np.isfinite(lse[0]).all()
    past = (np.arange(17) >= lengths[:, None])[..., None]
    grads = pull(
        (
            jnp.asarray(past[..., None] * np.ones(out.shape, np.float32)),
            jnp.asarray(past * np.ones(lse.shape, np.float32)),
        )
    )
    assert not any(np.asarray(g).any() for g in grads)


# 4. lse.


def test_lse_is_the_natural_log_of_the_denominator():
    """With bias, cap and sink in it; float32 for 16-bit inputs, at values around 12."""
    for dtype in ("bfloat16", "float32"):
        q, k, v = qkv(S=23, dtype=dtype)
        bias = np.full((23,), 9.0, np.float32)
        _, lse = jattn.attention(q, k, v, bias, sinks=np.full(4, 10.0, np.float32), return_residual=True)
        s = (
            np.einsum("btkgh,bskh->btkgs", q.astype(float).reshape(2, 17, 2, 2, 16), k.astype(float)).reshape(
                2, 17, 4, 23
            )
            / 4
            + 9
        )
        want = np.log(np.exp(s).sum(-1) + np.exp(10.0))
        assert lse.dtype == np.float32 and lse.shape == (2, 17, 4) and want.min() > 11
        compare.check_lse(lse, want, dtype)


def test_lse_is_differentiable():
    """grad of lse.sum() is softmax · k · scale."""
    q, k, v = qkv(N=2, K=2)
    got = jax.grad(lambda q: jattn.attention(q, k, v, return_residual=True)[1].sum())(q)
    s = np.einsum("btnh,bsnh->bnts", q, k).astype(float) / 4
    p = np.exp(s) / np.exp(s).sum(-1, keepdims=True)
    np.testing.assert_allclose(got, np.einsum("bnts,bsnh->btnh", p, k) / 4, atol=1e-6)


@pytest.mark.parametrize("cuts", [[0, 23], [0, 9, 23], [0, 1, 2, 16, 23], [0, 0, 23, 23]])
def test_merge_of_parts_is_the_whole(cuts):
    """Split the keys anywhere, empty parts included, the sink in one part: values, lse and gradients of the whole."""
    q, k, v = qkv()
    sinks = np.ones(4, np.float32)
    whole = lambda q, k, v: jattn.attention(q, k, v, sinks=sinks, return_residual=True)

    def merged(q, k, v):
        parts = [
            jattn.attention(q, k[:, a:b], v[:, a:b], sinks=sinks if i == 0 else None, return_residual=True)
            for i, (a, b) in enumerate(zip(cuts, cuts[1:], strict=False))
        ]
        return jattn.merge(*parts) if len(parts) > 1 else parts[0]

    got, want = gradients(merged, q, k, v), gradients(whole, q, k, v)
    jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, atol=1e-4), got, want)


def test_merge_of_empty_states_is_empty_and_finite():
    empty = jattn.empty((2, 3, 4, 8), jnp.float32)
    out, lse = jattn.merge(empty, empty)
    assert not np.any(out) and np.isneginf(lse).all()
    some = jattn.attention(*qkv(B=2, T=3, H=8), return_residual=True)
    same_bits(jattn.merge(empty, some), some)
    same_bits(jattn.merge(some, empty), some)
    grads = jax.grad(
        lambda a, b: jnp.sum(jattn.merge(a, b)[0]) + jnp.sum(jattn.merge(a, b)[1] > -jnp.inf, dtype=jnp.float32), (0, 1)
    )
    for pair in ((empty, empty), (empty, some), (some, empty)):
        assert all(np.isfinite(g).all() for g in jax.tree.leaves(grads(*pair)))


# 5. dtypes.


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16, np.float32])
def test_dtypes(dtype):
    """Output in the query's dtype, lse float32, every gradient in its primal's dtype, others of any float dtype."""
    q, k, v = (x.astype(dtype) for x in qkv())
    for other in (np.float32, np.float16, ml_dtypes.bfloat16):
        bias, sinks, scale = np.zeros((17, 23), other), np.ones(4, other), np.asarray(0.3, other)
        f = lambda q, k, v, b, s, c: jattn.attention(q, k, v, b, sinks=s, scale=c, return_residual=True)
        (out, lse), pull = jax.vjp(f, q, k, v, bias, sinks, scale)
        assert out.dtype == dtype and lse.dtype == np.float32
        assert [g.dtype for g in pull((out, lse))] == [dtype] * 3 + [np.dtype(other)] * 3


def test_sixteen_bit_scores_are_float32():
    """Scores that 16 bits cannot hold: a sum of 256 products around 300, kept apart to better than 1 part in 1000."""
    q = np.full((1, 1, 1, 256), 1.0, ml_dtypes.bfloat16)
    k = np.full((1, 2, 1, 256), 1.171875, ml_dtypes.bfloat16)
    k[0, 1, 0, 0] = 1.421875
    v = np.array([0, 1], ml_dtypes.bfloat16).reshape(1, 2, 1, 1)
    out, lse = jattn.attention(q, k, v, scale=1.0, return_residual=True)
    assert abs(float(out[0, 0, 0, 0]) - 1 / (1 + np.exp(-0.25))) < 4e-3
    assert abs(float(lse[0, 0, 0]) - (300 + np.log(1 + np.exp(0.25)))) < 1e-3


def test_float16_does_not_overflow():
    """Scores beyond 65504 before the scale; values at the edge of the range."""
    q, k, v = (np.full(s, x, np.float16) for s, x in (((1, 2, 1, 64), 40), ((1, 3, 1, 64), 40), ((1, 3, 1, 64), 6e4)))
    out, lse = jattn.attention(q, k, v, return_residual=True)
    assert (np.asarray(out) == np.float16(6e4)).all() and np.isfinite(lse).all()


# 6. Dropout; more in test_dropout.py.


@pytest.mark.parametrize("size", [(40, 600), (600, 40)])
def test_dropout_is_philox_on_logical_positions(size):
    """Beyond any one tile, in each direction."""
    T, S = size
    q, k, _ = qkv(B=1, T=T, S=S, N=2, K=1, H=8)
    v = np.eye(S, dtype=np.float32)[None, :, None]
    out = jattn.attention(q, k, v, dropout_rate=0.5, dropout_key=jax.random.key(11))
    keep, _ = oracle.dropout_keep((0, 11), 0.5, 1, 2, T, S)
    np.testing.assert_array_equal(np.asarray(out).transpose(0, 2, 1, 3) != 0, keep)


# 7. Determinism.


def test_deterministic_runs_and_remat_are_bit_equal():
    q, k, v = qkv(B=2, T=130, S=260, H=16, dtype="bfloat16")
    bias = np.random.default_rng(0).standard_normal((1, 4, 1, 260)).astype(np.float32)
    f = lambda q, k, v, b: jattn.attention(
        q, k, v, b, is_causal=True, query_offset=100, deterministic=True, return_residual=True
    )
    first = gradients(f, q, k, v, bias)
    same_bits(gradients(f, q, k, v, bias), first)
    remat = gradients(jax.checkpoint(f, policy=jax.checkpoint_policies.nothing_saveable), q, k, v, bias)
    same_bits(remat, first)
    eager = jattn.attention(q, k, v, bias, is_causal=True, query_offset=100)
    np.testing.assert_allclose(np.asarray(eager, np.float32), first[0][0].astype(np.float32), atol=2e-2)


def test_a_neighbour_in_the_batch_changes_no_bit():
    q, k, v = qkv(B=3, T=20, S=30)
    f = jax.jit(lambda *x: jattn.attention(*x, is_causal=True, query_offset=10))
    base = np.asarray(f(q, k, v))
    for x in (q, k, v):
        x[1] *= -7
    got = np.asarray(f(q, k, v))
    same_bits(got[[0, 2]], base[[0, 2]])


# 8. Grouped-query attention.


def compiled(f, *shapes):
    return jax.jit(f).lower(*shapes).compile().memory_analysis().temp_size_in_bytes


def grad_of(**options):
    return jax.grad(lambda *x: jattn.attention(*x, **options).astype(jnp.float32).sum(), (0, 1, 2))


def test_gqa_is_never_expanded_in_memory():
    """32 query heads on one key head: temporaries stay far below 32 copies of the keys."""
    B, S, N, H = 1, 4096, 32, 64
    q = jax.ShapeDtypeStruct((B, 64, N, H), jnp.float32)
    k = jax.ShapeDtypeStruct((B, S, 1, H), jnp.float32)
    copies = 4 * B * S * N * H
    forward = lambda q, k, v: jattn.attention(q, k, v)
    assert compiled(forward, q, k, k) < copies / 2
    assert compiled(grad_of(), q, k, k) < copies


@pytest.mark.parametrize("N, K", [(6, 2), (12, 2), (8, 1), (5, 5), (9, 3)])
def test_head_n_reads_key_head_n_over_g(N, K):
    """And dk, dv sum over the group."""
    q, k, v = qkv(B=1, N=N, K=K, H=8, D=12)
    problem = oracle.Problem(q, k, v)
    compare.attention(problem, lambda d: jattn.attention(**d, return_residual=True))


def test_group_sums_are_float32():
    """256 query heads on one key head, in bf16: a sum kept in bf16 would stall."""
    q, k, v = qkv(B=1, T=4, S=5, N=256, K=1, H=16, dtype="bfloat16")
    dout = np.ones((1, 4, 256, 16), ml_dtypes.bfloat16)
    _, pull = jax.vjp(lambda v: jattn.attention(q, k, v), v)
    truth = oracle.backward(oracle.Problem(q, k, v), dout)["value"]
    error = np.abs(np.asarray(pull(jnp.asarray(dout))[0], float) - truth).max()
    assert error <= 2 * compare.eps("bfloat16") * np.abs(truth).max()


# 9. bias, score_mod, aux, scale, sinks.


@pytest.mark.parametrize(
    "shape",
    [
        (2, 4, 17, 23),
        (1, 4, 17, 23),
        (2, 1, 17, 23),
        (1, 1, 17, 23),
        (1, 4, 1, 23),
        (2, 4, 17, 1),
        (23,),
        (17, 1),
        (4, 1, 1),
        (),
    ],
)
def test_dbias_sums_over_the_broadcast_axes(shape):
    """Exactly, and the same bits each time."""
    q, k, v = qkv()
    bias = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    problem = oracle.Problem(q, k, v, bias=bias, sinks=np.ones(4, np.float32))
    call = lambda d: jattn.attention(**d, return_residual=True)
    dlse = np.random.default_rng(1).standard_normal((2, 17, 4)).astype(np.float32)
    runs = []

    def jit(f):
        """Runs twice what runs first, which is `call`."""
        compiled = compare.quickly(q.dtype)(f)
        return compiled if runs else lambda *x: runs.extend((compiled(*x), compiled(*x))) or runs[0]

    compare.attention(problem, call, dlse=dlse, jit=jit)
    same_bits(*runs)


def test_scale_and_sinks_are_differentiable_and_a_traced_scale_does_not_recompile():
    q, k, v = qkv()
    problem = oracle.Problem(q, k, v, scale=np.float32(0.4), sinks=np.array([1, 0, -1, 2], np.float32))
    compare.attention(problem, lambda d: jattn.attention(**d, return_residual=True))
    traces = []

    @jax.jit
    def f(scale):
        traces.append(scale)
        return jattn.attention(q, k, v, scale=scale)

    np.testing.assert_allclose(f(np.float32(0.4)), jattn.attention(q, k, v, scale=0.4), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(f(np.float32(0.7)), jattn.attention(q, k, v, scale=0.7), rtol=1e-5, atol=1e-6)
    assert len(traces) == 1


def test_relative_bias_is_the_bias_it_stands_for():
    q, k, v = qkv()
    table = np.random.default_rng(0).standard_normal((4, 9)).astype(np.float32)
    t, s = rules(17, 23)
    dense = table[:, np.clip(s - t + 4, 0, 8)]
    np.testing.assert_allclose(
        jattn.attention(q, k, v, score_mod=mods.relative_bias(table)), jattn.attention(q, k, v, dense), atol=1e-6
    )


def test_a_function_that_closes_over_arrays_is_refused_with_the_line_to_write():
    slopes = jnp.ones(4)
    with pytest.raises(TypeError, match=r"mods\.score_mod\("):
        jattn.attention(*qkv(), score_mod=lambda x, b, n, t, s: x * slopes[n])
    with pytest.raises(TypeError, match=r"masks\.predicate\("):
        jattn.attention(*qkv(), mask=masks.predicate(lambda b, n, t, s: slopes[n] > 0))


# 10. Errors; all of them in test_errors.py.


def test_errors_speak_with_one_voice():
    q, k, v = qkv()
    with pytest.raises(ValueError, match=r"^key head dim H=8 must equal query's H=16"):
        jattn.attention(q, k[..., :8], v)
    with pytest.raises(ValueError, match="xla"):
        jattn.attention(q, k, v, implementation="cuddn")


# 11. Composition; the transforms are in test_transforms.py, sharding in test_sharding.py.


@pytest.mark.parametrize("S", [16384, 32768])
def test_memory_is_linear(S):
    """Temporaries of forward and backward: at most 8 times (q, k, v, out)."""
    q = jax.ShapeDtypeStruct((1, S, 8, 64), jnp.float32)
    k = jax.ShapeDtypeStruct((1, S, 2, 64), jnp.float32)
    assert compiled(grad_of(is_causal=True), q, k, k) <= 8 * 4 * S * 64 * (8 + 2 + 2 + 8)


def test_shapes_past_two_to_the_31_elements_lower():
    """Nothing overflows 32 bits on the way to the compiler."""
    q = jax.ShapeDtypeStruct((1, 2**24, 2, 128), jnp.bfloat16)
    k = jax.ShapeDtypeStruct((1, 2**24, 1, 128), jnp.bfloat16)
    f = jax.jit(grad_of(is_causal=True, local_window_size=(1023, 0)))
    assert "16777216" in f.lower(q, k, k).as_text()


def test_no_environment_variable_or_log_gets_in():
    """A fresh process with variables a library might read: same bits, no output, nothing logged."""
    program = (
        "import logging, numpy as np; logging.basicConfig(level=logging.INFO); import jattn\n"
        "r = np.random.default_rng(0)\n"
        "q, k, v = (r.standard_normal((1, 9, 2, 8)).astype('float32') for _ in range(3));"
        "print(np.asarray(jattn.attention(q, k, v, is_causal=True)).tobytes().hex())"
    )
    r = np.random.default_rng(0)
    q, k, v = (r.standard_normal((1, 9, 2, 8)).astype(np.float32) for _ in range(3))
    want = np.asarray(jattn.attention(q, k, v, is_causal=True)).tobytes().hex()
    import os

    env = dict(os.environ, JATTN_IMPLEMENTATION="none", JATTN_DEBUG="1", JATTN_BLOCK="7")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=env, check=True)
    assert done.stdout.strip() == want
    assert "jattn" not in done.stderr


def test_calls_log_nothing(caplog):
    with caplog.at_level(logging.DEBUG):
        jattn.attention(*qkv(), is_causal=True)
    assert not [r for r in caplog.records if r.name.startswith("jattn")]

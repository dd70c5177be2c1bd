"""Latent attention: both forms are the layer of the oracle; caches of every kind hold the same bits."""

import functools

import compare
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import oracle_sparse as oracle
import pytest

import jattn
from jattn import masks, rope
from jattn.mla import (
    MLAWeights,
    mla_absorbed,
    mla_decode,
    mla_output,
    mla_prefill,
    mla_preprocess,
    mla_values,
    pack_latent,
    unpack_latent,
)
from jattn.sparse import sparse_attention

SIZES = dict(M=24, Q=20, N=3, H=8, R=4, C=12, D=10)
SCALE = 12**-0.5
ROTATE = functools.partial(rope, interleaved=True)
KINDS = {  # rotate, query latent, gate
    "deepseek": (ROTATE, True, False),
    "kimi linear": (None, False, False),
    "kimi k3": (None, True, True),
}


def layer_weights(latent_queries=True, gate=False, dtype="float32", seed=0, *, M, Q, N, H, R, C, D):
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return (rng.standard_normal(shape) * shape[0] ** -0.5).astype(dtype)

    def gain(n):
        return (1 + rng.standard_normal(n) / 10).astype(dtype)

    w = dict(
        query_up=normal(Q if latent_queries else M, N, H + R), latent_down=normal(M, C + R), latent_norm=gain(C),
        key_up=normal(C, N, H), value_up=normal(C, N, D), out=normal(N, D, M),
    )  # fmt: skip
    w |= dict(query_down=normal(M, Q), query_norm=gain(Q)) if latent_queries else {}
    return w | (dict(gate=normal(M, N, D)) if gate else {})


def tokens(T=9, B=2, dtype="float32", M=24):
    return np.random.default_rng(1).standard_normal((B, T, M)).astype(dtype)


@functools.partial(jax.jit, static_argnums=(2, 3))
def forms(x, w, rotate, gated):
    """The layer by each form: expanded, absorbed, and absorbed over a cache."""
    inputs = mla_preprocess(x, w, rotate=rotate)
    latents = dict(scale=SCALE, latent_dim=inputs.latent.shape[-1])
    values = [
        mla_prefill(inputs, w, scale=SCALE),
        mla_values(mla_absorbed(inputs.query, inputs.rows, **latents), w),
        mla_values(mla_decode(inputs.query, inputs.rows, **latents), w),
    ]
    return [mla_output(v, w, x if gated else None) for v in values]


@pytest.mark.quick
@pytest.mark.parametrize("kind", KINDS)
def test_every_form_is_the_layer(kind):
    rotate, latent_queries, gate = KINDS[kind]
    w, x = layer_weights(latent_queries, gate, **SIZES), tokens()
    truth = np.stack([oracle.mla_layer(row, w, SCALE, rotate is not None) for row in x])
    for found in map(np.asarray, forms(x, MLAWeights(**w), rotate, gate)):
        assert found.dtype == np.float32
        # Products of weights in a chain, each rounded: no dense baseline has fewer of them.
        assert np.abs(found - truth).max() <= 1e-5 * np.abs(truth).max()


def test_float64():
    with jax.enable_x64(True):
        w, x = layer_weights(dtype="float64", **SIZES), tokens(dtype="float64")
        truth = np.stack([oracle.mla_layer(row, w, SCALE) for row in x])
        for found in map(np.asarray, forms(x, MLAWeights(**w), ROTATE, False)):
            assert np.abs(found - truth).max() <= 1e-12 * np.abs(truth).max()


def dense(x, w, turned):
    """The layer as one would write it down, in the dtype of x; `turned(y)` are its positions."""

    def product(equation, *operands):
        return jnp.einsum(equation, *operands, preferred_element_type=acc).astype(x.dtype)

    def norm(y, gain):
        wide = y.astype(acc)
        return (wide / jnp.sqrt((wide**2).mean(-1, keepdims=True) + 1e-6) * gain.astype(acc)).astype(x.dtype)

    acc = jnp.float64 if x.dtype == jnp.float64 else jnp.float32
    C, _, H = w["key_up"].shape
    q = product("btq,qnh->btnh", norm(product("btm,mq->btq", x, w["query_down"]), w["query_norm"]), w["query_up"])
    down = product("btm,mc->btc", x, w["latent_down"])
    c, turn = norm(down[..., :C], w["latent_norm"]), turned(down[..., None, C:])
    k, v = product("btc,cnh->btnh", c, w["key_up"]), product("btc,cnd->btnd", c, w["value_up"])
    k = jnp.concatenate([k, jnp.broadcast_to(turn, (*k.shape[:3], turn.shape[-1]))], -1)
    q = jnp.concatenate([q[..., :H], turned(q[..., H:])], -1)
    s = jnp.einsum("btnh,bsnh->bnts", q, k, preferred_element_type=acc) * SCALE
    p = jax.nn.softmax(jnp.where(np.tril(np.ones(s.shape[2:], bool)), s, -jnp.inf), axis=-1)
    return product("btnd,ndm->btm", product("bnts,bsnd->btnd", p.astype(x.dtype), v), w["out"])


def test_bfloat16_rounds_between_products():
    w, x = layer_weights(dtype="bfloat16", **SIZES), tokens(dtype="bfloat16")
    truth = np.stack([oracle.mla_layer(row, w, SCALE) for row in x])
    yard = jax.jit(functools.partial(dense, turned=ROTATE))(x, w)
    for found in forms(x, MLAWeights(**w), ROTATE, False):
        assert found.dtype == jnp.bfloat16
        compare.check("y", found, truth, [yard], "bfloat16")


def test_gradients_of_both_forms():
    """Of the tokens and of every weight, against the dense layer in float64."""
    w, x = layer_weights(**SIZES), tokens()
    d = np.random.default_rng(2).standard_normal(x.shape)

    @jax.jit
    def truth(x, w):
        y, pull = jax.vjp(lambda *a: dense(*a, ROTATE), x, w)
        return y, *pull(d)

    @functools.partial(jax.jit, static_argnums=2)
    def gradients(x, w, absorbed):
        def layer(x, w):
            inputs = mla_preprocess(x, w, rotate=ROTATE)
            if absorbed:
                values = mla_values(mla_absorbed(inputs.query, inputs.rows, scale=SCALE, latent_dim=12), w)
            else:
                values = mla_prefill(inputs, w, scale=SCALE)
            return mla_output(values, w)

        return jax.vjp(layer, x, w)[1](d.astype(np.float32))

    with jax.enable_x64(True):
        y, dx, dw = jax.tree.map(np.asarray, truth(*jax.tree.map(np.float64, (x, w))))
    assert np.abs(y - np.stack([oracle.mla_layer(r, w, SCALE) for r in x])).max() < 1e-10
    for absorbed in (False, True):
        got = jax.tree.map(np.asarray, gradients(x, MLAWeights(**w), absorbed))
        assert np.abs(got[0] - dx).max() <= 1e-5 * np.abs(dx).max()
        for name, want in dw.items():
            assert np.abs(getattr(got[1], name) - want).max() <= 1e-5 * np.abs(want).max()


def test_positions_and_histories():
    """Tokens at the end of a history, at positions of their own for each sequence."""
    w, x = layer_weights(**SIZES), tokens(T=12)
    positions = np.int32([np.arange(12) + 100, np.arange(12) + 7])
    truth = np.stack([oracle.mla_layer(row, w, SCALE, positions=p) for row, p in zip(x, positions, strict=True)])
    w = MLAWeights(**w)

    @jax.jit
    def run(x, positions):
        whole = mla_preprocess(x, w, positions, rotate=ROTATE)
        tail = mla_preprocess(x[:, 9:], w, positions[:, 9:], rotate=ROTATE)
        latents = dict(scale=SCALE, latent_dim=12, query_offset="end")
        return [
            mla_prefill(tail, w, whole.rows, scale=SCALE, query_offset="end"),
            mla_values(mla_absorbed(tail.query, whole.rows, **latents), w),
        ]

    for found in run(x, positions):
        found = np.asarray(mla_output(found, w))
        assert np.abs(found - truth[:, 9:]).max() <= 1e-5 * np.abs(truth).max()


# Caches.


def cache_of(B=3, T=2, N=4, S=300, C=24, R=8, dtype="float32", seed=0):
    rng = np.random.default_rng(seed)
    q, rows = rng.standard_t(4, (B, T, N, C + R)) / 2, rng.standard_t(4, (B, S, C + R)) / 2
    return q.astype(dtype), rows.astype(dtype)


decode = jax.jit(
    functools.partial(mla_decode, scale=0.2, return_residual=True), static_argnames=("latent_dim", "implementation")
)
LENGTHS = np.int32([300, 1, 263])


def equal(got, want):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        a, b = np.asarray(a), np.asarray(b)
        assert a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()


def test_rows_are_keys_and_values_of_one_head(dtype="bfloat16"):
    """The bits of `decode_attention` with one head whose values are the first channels of its keys."""
    q, rows = cache_of(dtype=dtype)
    options = dict(local_window_size=(200, 0), sinks=np.float32([1, -2, 0, 5]), query_seq_lengths=np.int32([2, 1, 0]))
    options |= dict(mask=masks.tree([-1, -1]), return_residual=True, scale=0.2)

    @jax.jit
    def both(q, rows):
        key = rows[:, :, None]
        out, lse = jattn.decode_attention(q, key, key, LENGTHS, **options)
        return mla_decode(q, rows, LENGTHS, latent_dim=24, **options), (out[..., :24], lse)

    equal(*both(q, rows))


def paged(rows, page, seed=0):
    """Rows in pages in some order, with NaN (or bytes of NaN) everywhere else."""
    B, S, F = rows.shape
    W = -(-S // page)
    order = np.random.default_rng(seed).permutation(2 * B * W)[: B * W]
    junk = 255 if rows.dtype == np.uint8 else np.nan
    pool = np.full((2 * B * W, page, F), junk, rows.dtype)
    pool[order] = np.pad(rows, ((0, 0), (0, W * page - S), (0, 0)), constant_values=junk).reshape(B * W, page, F)
    tables = np.pad(order.reshape(B, W), ((0, 0), (0, 1)), constant_values=2147480000)
    return pool, tables.astype(np.int32)


def stored_rows(dtype="float32"):
    q, rows = cache_of(C=512, R=64, N=2, S=70, dtype=dtype)
    return q, np.asarray(jax.jit(pack_latent)(rows[..., :512], rows[..., 512:])), np.int32([70, 1, 33])


@pytest.mark.parametrize("stored", [False, True])
def test_pages_are_the_contiguous_cache(stored):
    """Numbers and bytes, in pages of any size, packed queries too; what no sequence holds may be anything."""
    q, rows, lengths, C = *(stored_rows() if stored else (*cache_of(), LENGTHS)), 512 if stored else 24
    dirty = np.where(np.arange(rows.shape[1])[:, None] < lengths[:, None, None], rows, 255 if stored else np.nan)
    want = decode(q, dirty.astype(rows.dtype), lengths, latent_dim=C)
    pool, tables = paged(rows, 16)
    equal(decode(q, pool, lengths, latent_dim=C, block_tables=tables), want)
    flat = q.reshape(6, *q.shape[2:])
    got = decode(flat, pool, lengths, latent_dim=C, block_tables=tables, cu_seqlens_q=np.int32([0, 2, 4, 6]))
    equal([x.reshape(3, 2, *x.shape[1:]) for x in got], list(want))


def test_stored_rows_are_the_rows_they_stand_for(dtype="bfloat16"):
    q, rows, lengths = stored_rows(dtype)
    plain = np.asarray(jax.jit(unpack_latent, static_argnums=1)(rows, dtype))
    equal(*(decode(q, x, lengths, latent_dim=512) for x in (rows, plain)))
    lists = np.int32(np.random.default_rng(0).integers(-1, 75, (3, 2, 10)))
    sparse = jax.jit(functools.partial(sparse_attention, scale=0.2, value_dim=512))
    equal(*(sparse(q, x, lists) for x in (rows, plain)))
    with pytest.raises(NotImplementedError, match="mla_decode has no derivatives"):
        jax.grad(lambda q: decode(q, rows, latent_dim=512)[0].astype(jnp.float32).sum())(jnp.asarray(q))


def test_a_row_has_656_bytes():
    """Codes, scales and rope part lie where other libraries read them."""
    rng = np.random.default_rng(0)
    latent = (rng.standard_t(3, (5, 512)) * 3).astype(np.float32)
    key_rope = rng.standard_normal((5, 64)).astype(np.float32)
    latent[0, :128], latent[1, 130] = 0, np.nan
    rows = np.asarray(jax.jit(pack_latent)(latent, key_rope))
    assert rows.shape == (5, 656) and rows.dtype == np.uint8
    scales = rows[:, 512:528].copy().view(np.float32)
    top = np.maximum(np.abs(latent.reshape(5, 4, 128)).max(2), np.float32(1e-4)).astype(np.float64)
    np.testing.assert_array_equal(scales, np.exp2(np.ceil(np.log2(top / 448))))
    codes = (latent / np.repeat(scales, 128, 1)).astype(ml_dtypes.float8_e4m3fn)
    clean = np.ones((5, 512), bool)
    clean[1, 128:256] = False
    np.testing.assert_array_equal(rows[:, :512][clean], codes.view(np.uint8)[clean])
    np.testing.assert_array_equal(rows[:, 528:].copy().view(ml_dtypes.bfloat16), key_rope.astype(ml_dtypes.bfloat16))
    again, narrow = (np.asarray(jax.jit(unpack_latent, static_argnums=1)(rows, d)) for d in ("float32", "bfloat16"))
    assert np.isnan(again[:, :512][~clean]).all()
    np.testing.assert_array_equal(again[:, :512][clean], (codes.astype("f") * np.repeat(scales, 128, 1))[clean])
    np.testing.assert_array_equal(again, narrow.astype(np.float32))


def test_a_sequence_knows_of_no_other():
    """Bits: alone and in batches, wherever it is, beside any lengths, in a cache of any size, one query or several."""
    q, rows = cache_of(B=1, T=1)
    run = functools.partial(decode, latent_dim=24)
    alone = jax.tree.map(lambda x: x[0], run(q, rows, np.int32([263])))
    rng = np.random.default_rng(0)
    for place in (0, 3, 6):
        many, keys = rng.standard_normal((7, 1, 4, 32)).astype("f"), rng.standard_normal((7, 300, 32)).astype("f")
        lengths = rng.choice([0, 9, 10, 300], 7).astype(np.int32)
        many[place], keys[place], lengths[place] = q[0], rows[0], 263
        equal(jax.tree.map(lambda x, p=place: x[p], run(many, keys, lengths)), alone)
    longer = np.pad(rows, ((0, 0), (0, 700), (0, 0)), constant_values=np.nan)
    equal(jax.tree.map(lambda x: x[0], run(q, longer, np.int32([263]))), alone)
    two = np.concatenate([np.full_like(q, np.nan), q], axis=1)
    equal(jax.tree.map(lambda x: x[0, 1:], run(two, rows, np.int32([263]))), alone)
    # Packed behind a chunk of 9 tokens, or of 10.
    pool, tables = paged(np.concatenate([rows, rows]), 64)
    chunk = np.full((11, *q.shape[2:]), np.nan, np.float32)
    for n in (9, 10):
        chunk[n] = q[0, 0]
        cu = np.int32([0, n, n + 1])
        got = run(chunk, pool, np.int32([100, 263]), block_tables=tables, cu_seqlens_q=cu)
        equal(jax.tree.map(lambda x, n=n: x[n : n + 1], got), alone)


def test_decoding_is_the_last_row_of_prefill():
    """Every token of a layer, through a cache, against the whole sequence at once."""
    w, x = MLAWeights(**layer_weights(**SIZES)), tokens(T=12)
    whole = np.asarray(forms(x, w, ROTATE, False)[0])

    @jax.jit
    def step(cache, x, t):
        inputs = mla_preprocess(x, w, t[None], rotate=ROTATE)
        cache = jax.lax.dynamic_update_slice_in_dim(cache, inputs.rows, t, axis=1)
        latents = mla_decode(inputs.query, cache, jnp.broadcast_to(t + 1, 2), scale=SCALE, latent_dim=12)
        return cache, mla_output(mla_values(latents, w), w)

    cache = np.full((2, 12, 16), np.nan, np.float32)
    for t in range(12):
        cache, y = step(cache, x[:, t : t + 1], np.int32(t))
        assert np.abs(np.asarray(y)[:, 0] - whole[:, t]).max() <= 1e-5 * np.abs(whole).max()


def test_nothing_to_see():
    q, rows = cache_of()
    for length, cached in ((0, rows), (None, rows[:, :0])):
        out, lse = decode(q, cached, None if length is None else np.int32([length] * 3), latent_dim=24)
        assert not out.any() and np.isneginf(lse).all() and out.shape == (3, 2, 4, 24)
    assert decode(q[:0], rows[:0], latent_dim=24)[0].shape == (0, 2, 4, 24)


@pytest.mark.parametrize("stored", [False, True])
def test_memory_does_not_grow_with_the_cache(stored):
    def temporary(S):
        q = jax.ShapeDtypeStruct((2, 1, 4, 576), "bfloat16")
        rows = jax.ShapeDtypeStruct((2, S, 656 if stored else 576), "uint8" if stored else "bfloat16")
        run = jax.jit(functools.partial(mla_decode, scale=0.1, latent_dim=512))
        return run.lower(q, rows).compile().memory_analysis().temp_size_in_bytes

    assert temporary(65536) <= temporary(4096) + 4096


X, W = tokens(), layer_weights(**SIZES)
INPUTS = jax.jit(functools.partial(mla_preprocess, rotate=None))(X, MLAWeights(**W))
Q, ROWS = cache_of()
TABLES = np.zeros((3, 1), np.int32)


def test_the_scale_is_not_that_of_the_rows():
    """Absorbed queries have C + R channels, and would have another default: there is none."""
    inputs, w = INPUTS, MLAWeights(**W)
    for call in (
        lambda **o: mla_prefill(inputs, w, **o),
        lambda **o: mla_absorbed(inputs.query, inputs.rows, latent_dim=12, **o),
        lambda **o: mla_decode(inputs.query, inputs.rows, latent_dim=12, **o),
    ):  # fmt: skip
        with pytest.raises(TypeError, match="scale"):
            call()
        with pytest.raises(TypeError, match="scale=None: pass the scale of the expanded form"):
            call(scale=None)


def preprocess(**changes):
    return mla_preprocess(X, MLAWeights(**(W | changes)), rotate=None)


@pytest.mark.parametrize(
    "call, error, words",
    [
        (lambda: preprocess(key_up=W["key_up"][:, :2]), ValueError, r"MLAWeights.query_up has shape \(20, 3, 12\)"),
        (lambda: preprocess(query_norm=W["query_norm"][:9]), ValueError, "MLAWeights.query_up has shape"),
        (lambda: preprocess(query_norm=None), ValueError, "query_down and query_norm go together"),
        (lambda: preprocess(out=W["out"][..., :5]), ValueError, r"MLAWeights.out has shape \(3, 10, 5\); expected"),
        (lambda: preprocess(out=jnp.bfloat16(W["out"])), TypeError, "MLAWeights.out dtype bfloat16 must equal x's"),
        (lambda: preprocess(latent_down=W["latent_down"][:, :9]), ValueError, r"expected \[M, C \+ R\] with C=12"),
        (lambda: mla_preprocess(X, W, rotate=None), TypeError, "weights must be a jattn.MLAWeights, not dict"),
        (lambda: mla_preprocess(X, MLAWeights(**W)), TypeError, "rotate"),
        (lambda: mla_preprocess(X, MLAWeights(**W), np.arange(3), rotate=None), ValueError, "positions have shape"),
        (lambda: mla_preprocess(X, MLAWeights(**W), X[..., 0], rotate=None), TypeError, "positions must be integers"),
        (lambda: mla_preprocess(X, MLAWeights(**W), rotate=lambda y, p: y[..., :2]), ValueError, "rotate returned"),
        (lambda: mla_preprocess(np.int32(X), MLAWeights(**W), rotate=None), TypeError, "x has dtype int32"),
        (lambda: mla_output(X, MLAWeights(**W)), ValueError, r"values have shape \(2, 9, 24\); expected"),
        (lambda: mla_output(np.ones((2, 9, 3, 10), "f"), MLAWeights(**W), X), ValueError, "x has no use"),
        (lambda: mla_output(np.ones((2, 9, 3, 10), "f"), MLAWeights(**W, gate=1)), ValueError, "x is needed"),
        (lambda: mla_values(X, MLAWeights(**W)), ValueError, r"expected \[\*B, T, N, C\] with N=3, C=12"),
        (lambda: mla_prefill(INPUTS, MLAWeights(**W), X, scale=1), ValueError, "rows have shape"),
        (lambda: mla_absorbed(Q, ROWS[:1], scale=1, latent_dim=24), ValueError, r"with \*B=\(3,\)"),
        (lambda: decode(Q, ROWS, latent_dim=33), ValueError, "latent_dim=33 must be <= 32"),
        (lambda: decode(Q, ROWS[..., :9], latent_dim=8), ValueError, "rows have 9 channels for queries of C"),
        (lambda: decode(Q, np.uint8(ROWS), latent_dim=8), ValueError, "rows of 656 bytes are for 512"),
        (lambda: decode(Q, np.float16(ROWS), latent_dim=8), TypeError, "rows dtype float16 must equal query's float32"),
        (lambda: mla_decode(Q, ROWS, [301, 1, 1], scale=1, latent_dim=8), ValueError, "lengths=.* must be <= 300"),
        (lambda: decode(Q, ROWS, latent_dim=8, cu_seqlens_q=[0, 1]), ValueError, "cu_seqlens_q needs block_tables"),
        (lambda: decode(Q, ROWS, latent_dim=8, block_tables=TABLES), ValueError, "need lengths"),
        (lambda: decode(Q[:2], ROWS[:, :64], LENGTHS, latent_dim=8, block_tables=TABLES), ValueError, "with B=3"),
        (lambda: decode(Q[:, :0], ROWS, latent_dim=8), ValueError, "query length T=0 must be from 1 to 64"),
        (lambda: decode(Q, ROWS, latent_dim=8, implementation="mosaic"), NotImplementedError, "it has no kernel for"),
        (lambda: pack_latent(X, X), ValueError, r"expected \[.., 512\] and \[.., 64\]"),
        (lambda: unpack_latent(X), TypeError, "rows must be uint8, not float32"),
    ],
)
def test_refused(call, error, words):
    with pytest.raises(error, match=words):
        call()


@pytest.mark.gpu
def test_on_a_gpu():
    for kind in KINDS:
        test_every_form_is_the_layer(kind)
    test_gradients_of_both_forms()
    for stored in (False, True):
        test_pages_are_the_contiguous_cache(stored)
    for dtype in ("float32", "bfloat16"):
        test_stored_rows_are_the_rows_they_stand_for(dtype)
    test_a_sequence_knows_of_no_other()
    test_decoding_is_the_last_row_of_prefill()

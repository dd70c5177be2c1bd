"""The indexer: formats bit for bit, scores, exact selection whatever ties, and its training."""

import functools

import compare
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import oracle_sparse as oracle
import pytest

from jattn import _formats, rope
from jattn.indexer import (
    IndexerWeights,
    hadamard,
    indexer_dequantize,
    indexer_kl,
    indexer_logits,
    indexer_project,
    indexer_quantize,
    indexer_scores,
    indexer_select,
    topk_select,
)
from jattn.sparse import sparse_attention

# Formats.

quantize, dequantize = jax.jit(indexer_quantize, static_argnums=1), jax.jit(indexer_dequantize, static_argnums=2)


def heavy(*shape, seed=0):
    rng = np.random.default_rng(seed)
    return (rng.standard_t(3, shape) * rng.uniform(0.01, 30, (*shape[:-1], 1))).astype(np.float32)


@pytest.mark.parametrize("fmt", ["fp8_row", "fp8_row_ue8m0"])
def test_fp8_rows_are_the_nearest_codes(fmt):
    x = heavy(50, 128)
    x[0], x[1] = 0, 1e-6
    codes, scales = map(np.asarray, quantize(x, fmt))
    top = np.maximum(np.abs(x).max(1), np.float32(1e-4))
    want = top * np.float32(1 / 448)
    if fmt == "fp8_row_ue8m0":
        want = np.exp2(np.ceil(np.log2(top.astype(np.float64) / 448))).astype(np.float32)
    np.testing.assert_array_equal(scales[:, 0], want)
    np.testing.assert_array_equal(codes.view(np.uint8), (x / scales).astype(ml_dtypes.float8_e4m3fn).view(np.uint8))
    again = np.asarray(dequantize(codes, scales))
    np.testing.assert_array_equal(again, codes.astype(np.float32) * scales)
    assert (np.abs(again - x) <= np.maximum(np.abs(x) / 16, scales / 2**9) * 1.0001).all()


def test_powers_of_two_round_up():
    """At every power of two from both sides: not rounded first, and not below 2^-126."""
    for largest in (448, 6):
        exact = np.float32(largest) * np.exp2(np.arange(-126, 119, dtype=np.float32))
        above, below = np.nextafter(exact, np.float32(np.inf)), np.nextafter(exact, np.float32(0))
        scale = jax.jit(functools.partial(_formats.power_of_two_scale, largest=largest))
        np.testing.assert_array_equal(scale(exact), exact / largest)
        np.testing.assert_array_equal(scale(above), exact / largest * 2)
        np.testing.assert_array_equal(scale(below), exact / largest)
        np.testing.assert_array_equal(scale(np.float32([0, 1e-44, np.nan, np.inf])), [2**-126, 2**-126, np.nan, np.nan])
    powers = np.exp2(np.arange(-126, 127, dtype=np.float32))
    np.testing.assert_array_equal(jax.jit(_formats.reciprocal)(powers), 1 / powers)
    codes = np.arange(1, 255, dtype=np.uint8)
    decoded = jax.jit(_formats.decode_ue8m0)(np.append(codes, np.uint8(255)))
    np.testing.assert_array_equal(decoded[:-1], np.exp2(codes.astype(np.float64) - 127))
    assert np.isnan(decoded[-1])
    np.testing.assert_array_equal(jax.jit(_formats.encode_ue8m0)(decoded), np.append(codes, np.uint8(255)))


def test_e2m1_ties_go_to_even():
    midpoints = np.float32([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    x = np.concatenate([midpoints, np.nextafter(midpoints, np.float32(9)), np.nextafter(midpoints, np.float32(0))])
    x = np.concatenate([x, np.float32([0, 6, 7, 1e30]), np.linspace(0, 7, 701, dtype=np.float32)])
    x = np.concatenate([x, -x])
    got = np.asarray(jax.jit(lambda x: _formats.decode_e2m1(_formats.encode_e2m1(x)))(x))
    want = np.array([oracle.e2m1(v) for v in x.tolist()])
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(np.signbit(got), np.signbit(want))
    np.testing.assert_array_equal(got[:7], [0, 1, 1, 2, 2, 4, 4])


def test_fp4_blocks():
    x = heavy(20, 128)
    x[0] = 0
    x[1, :32], x[1, 32:64] = 6, np.float32(6.0000005)
    codes, scales = map(np.asarray, quantize(x, "fp4_b32"))
    assert codes.shape == (20, 64) and scales.shape == (20, 4) and codes.dtype == scales.dtype == jnp.uint8
    want = np.stack([np.concatenate([oracle.fp4_block(b) for b in row.reshape(4, 32)]) for row in x])
    for dtype in (jnp.float32, jnp.bfloat16):
        np.testing.assert_array_equal(np.asarray(dequantize(codes, scales, dtype)).astype(np.float64), want)
    np.testing.assert_array_equal(scales[1, :2], [127, 128])
    np.testing.assert_array_equal(scales[0], 1)  # of zeros: 2^-126
    # The low nibble first.
    one = np.zeros((1, 32), np.float32)
    one[0, :2] = 6, -1
    np.testing.assert_array_equal(np.asarray(quantize(one, "fp4_b32")[0])[0, 0], 7 | (8 + 2) << 4)


@pytest.mark.parametrize("fmt", ["fp8_row", "fp8_row_ue8m0", "fp4_b32"])
def test_nan_and_inf_spoil_their_block_alone(fmt):
    x = heavy(4, 64)
    x[1, 3], x[2, 40] = np.nan, np.inf
    got = np.asarray(dequantize(*quantize(x, fmt)))
    spoilt = np.zeros((4, 64), bool)
    spoilt[1, : 32 if fmt == "fp4_b32" else 64] = True
    spoilt[2, 32 if fmt == "fp4_b32" else 0 :] = True
    assert np.isnan(got[spoilt]).all() and np.isfinite(got[~spoilt]).all()


def test_index_pages():
    codes, scales = map(np.asarray, quantize(heavy(3, 64, 128), "fp8_row"))
    pages = np.asarray(jax.jit(_formats.pack_index_pages)(codes, scales[..., 0]))
    assert pages.shape == (3, 64 * 132) and pages.dtype == np.uint8
    np.testing.assert_array_equal(pages[:, : 64 * 128], codes.view(np.uint8).reshape(3, -1))
    np.testing.assert_array_equal(pages[:, 64 * 128 :].copy().view(np.float32), scales[..., 0])
    again = jax.jit(_formats.unpack_index_pages, static_argnums=1)(pages, 64)
    np.testing.assert_array_equal(np.asarray(again[0]).view(np.uint8), codes.view(np.uint8))
    np.testing.assert_array_equal(again[1], scales[..., 0])


def test_hadamard_is_orthogonal():
    x = heavy(3, 128)
    matrix = np.array([[1.0]])
    while len(matrix) < 128:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    turned = jax.jit(hadamard)(x)
    np.testing.assert_allclose(turned, x @ matrix / np.sqrt(128), rtol=1e-5, atol=1e-4)
    np.testing.assert_allclose(jax.jit(hadamard)(turned), x, rtol=1e-5, atol=1e-4)


# Scores.


def operands(B=2, T=5, N=3, H=32, S=70, dtype="float32", seed=0):
    """query, key, weights with all signs."""
    rng = np.random.default_rng(seed)
    q, k, w = rng.standard_t(5, (B, T, N, H)), rng.standard_t(5, (B, S, H)), rng.standard_normal((B, T, N))
    return q.astype(dtype), k.astype(dtype), w.astype(np.float32)


LOW, HIGH = np.int32([[0, 3, 70, 9, -5], [1, 0, 0, 69, 8]]), np.int32([[70, 9, 70, 3, 99], [2, 0, 1, 70, 64]])


@functools.partial(jax.jit, static_argnums=4)
def scored(q, k, w, bounds=(None, None), dtype="float32"):
    return indexer_logits(q, k, w, *bounds, out_dtype=dtype)


@jax.jit
def dense(q, k, w):
    products = jnp.einsum("btnh,bsh->btns", q, k, preferred_element_type=jnp.float32)
    return jnp.einsum("btns,btn->bts", jax.nn.relu(products), w)


@pytest.mark.quick
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_scores(dtype):
    q, k, w = operands(dtype=dtype)
    inside = (np.arange(70) >= LOW[..., None]) & (np.arange(70) < HIGH[..., None])
    dirty = k.copy()
    dirty[:, 69] = np.nan  # which some rows see, and others not
    got = np.asarray(scored(q, dirty, w, (LOW, HIGH)))
    assert got.dtype == np.float32
    assert np.isneginf(got[~inside]).all() and np.isnan(got[..., 69][inside[..., 69]]).all()
    truth = np.stack([oracle.logits(*x) for x in zip(q, k, w, strict=True)])
    some = inside & (np.arange(70) < 69)
    compare.check("scores", got[some], truth[some], [np.asarray(dense(q, k, w))[some]], np.float32)
    rounded = np.asarray(scored(q, k, w, (LOW, HIGH), "bfloat16"))
    np.testing.assert_array_equal(rounded[some], got[some].astype(ml_dtypes.bfloat16))


@pytest.mark.parametrize("fmt", ["fp8_row", "fp4_b32"])
def test_scores_of_codes(fmt):
    """Codes and scales give the scores of the numbers they stand for, to the rounding of float32 sums."""
    q, k, w = operands()
    pairs = [quantize(x, fmt) for x in (q, k)]
    got = np.asarray(scored(*pairs, w))
    q, k = (np.asarray(dequantize(*x)) for x in pairs)
    truth = np.stack([oracle.logits(*x) for x in zip(q, k, w, strict=True)])
    compare.check("scores", got, truth, [dense(q, k, w)], np.float32)


def test_float64_scores():
    with jax.enable_x64(True):
        q, k, w = operands(dtype="float64")
        got = scored(q, k, w.astype(np.float64), (None, HIGH.astype(np.int64)), "float64")
        truth = np.stack([oracle.logits(*x) for x in zip(q, k, w, strict=True)])
        inside = np.arange(70) < HIGH[..., None]
        np.testing.assert_allclose(np.asarray(got)[inside], truth[inside], rtol=1e-12, atol=1e-12)
        assert got.dtype == np.float64
        holds(np.asarray(got)[0], 4)


def test_a_score_knows_of_its_query_and_its_key_alone():
    """Bits: alone and in batches, for every length of keys, from pages in any order, and one key array for all."""
    q, k, w = operands(B=5, T=3, S=70)
    want = np.asarray(scored(q, k, w))
    np.testing.assert_array_equal(scored(q[3:4], k[3:4], w[3:4]), want[3:4])
    np.testing.assert_array_equal(scored(q[3], k[3], w[3]), want[3])
    np.testing.assert_array_equal(scored(q[2:4, 1:2], k[2:4], w[2:4, 1:2]), want[2:4, 1:2])
    long = np.concatenate([k, np.full((5, 2000, 32), np.nan, np.float32)], axis=1)
    np.testing.assert_array_equal(np.asarray(scored(q, long, w))[..., :70], want)
    order = np.random.default_rng(0).permutation(30)[:25]
    pool = np.full((30, 16, 32), np.nan, np.float32)
    pool[order] = np.pad(k, ((0, 0), (0, 10), (0, 0)), constant_values=np.nan).reshape(25, 16, 32)
    tables = np.pad(order.reshape(5, 5), ((0, 0), (0, 1)), constant_values=2147480000)
    paged = jax.jit(functools.partial(indexer_logits, k_end=70))(q, pool, w, block_tables=tables.astype(np.int32))
    paged = np.asarray(paged)
    assert paged.shape == (5, 3, 96) and np.isneginf(paged[..., 70:]).all()
    np.testing.assert_array_equal(paged[..., :70], want)


def test_gradients_of_scores():
    q, k, w = operands()
    q[:, 0, 0] = 0  # products of exactly 0 have derivative 0
    d = np.random.default_rng(1).standard_normal((2, 5, 70)).astype(np.float32)
    inside = (np.arange(70) >= LOW[..., None]) & (np.arange(70) < HIGH[..., None])

    def pull(f):
        return jax.jit(lambda q, k, w: jax.vjp(f, q, k, w)[1](d))(q, k, w)

    got = pull(lambda *x: indexer_logits(*x, LOW, HIGH))
    yard = pull(lambda *x: jnp.where(inside, dense(*x), -jnp.inf))
    truth = [oracle.logits_gradients(*x) for x in zip(q, k, w, d * inside, strict=True)]
    for name, a, y, t in zip("qkw", got, yard, zip(*truth, strict=True), strict=True):
        compare.check("d" + name, a, np.stack(t), [y], np.float32)


# Selection.


selected = jax.jit(topk_select, static_argnums=1)


def holds(scores, k, low=None, high=None):
    """`topk_select` of `[T, S]` scores is what sorting gives."""
    T, S = scores.shape
    low, high = (np.full(T, d) if x is None else np.broadcast_to(x, (T,)) for x, d in ((low, 0), (high, S)))
    indices, count = map(np.asarray, selected(scores, k, low.astype(np.int32), high.astype(np.int32)))
    assert indices.dtype == count.dtype == np.int32 and indices.shape == (T, k)
    for t in range(T):
        want, n = oracle.select(scores[t], k, int(low[t]), int(high[t]))
        np.testing.assert_array_equal(indices[t], want)
        assert count[t] == n


def planted(kind, T=7, S=300):
    rng = np.random.default_rng(2)
    x = rng.standard_normal((T, S)).astype(np.float32)
    if kind == "plateau":  # what ReLU makes: exact zeros, of both signs, across the boundary, values below them too
        x = np.where(rng.random((T, S)) < 0.6, rng.choice([0.0, -0.0], (T, S)), x).astype(np.float32)
    if kind == "equal":
        x[:] = -1.5
    if kind == "few values":
        x = x.round(0)
    if kind == "nan and inf":
        x = rng.choice([np.nan, -np.nan, np.inf, -np.inf, 0, -0.0, 1, -1], (T, S)).astype(np.float32)
    if kind == "large":  # past what float16 has
        x = x * np.float32(7e37)
        x[:, ::3] = -7e4 - x[:, ::3] / 1e38
    if kind == "tiny":  # subnormal
        x = x * 1e-41
    return x


@pytest.mark.parametrize("kind", ["plain", "plateau", "equal", "few values", "nan and inf", "large", "tiny"])
def test_selection_is_exact(kind):
    """Ties to the lower index, ascending, for k below, at and above the number of candidates."""
    high = np.array([300, 299, 60, 61, 59, 0, 200])
    low = np.array([0, 1, 0, 0, 0, 0, 140])
    holds(planted(kind), 60, low, high)


def test_selection_of_bfloat16():
    """Scores that were rounded tie, and ties are of the rounded ones."""
    x = planted("plain").astype(ml_dtypes.bfloat16)
    assert max(np.sum(row == row[oracle.select(row, 60, 0, 300)[0]].min()) for row in x) > 1
    holds(x, 60)
    holds(planted("nan and inf").astype(np.float16), 60)


def test_scores_that_differ_in_their_last_bits():
    """131072 of them: no bin is too full."""
    rng = np.random.default_rng(0)
    x = (np.float32(3.0).view(np.uint32) + rng.integers(0, 1024, (1, 131072)).astype(np.uint32)).view(np.float32)
    holds(x, 2048)


def test_few_scores_are_not_tiny():
    x = np.full((2, 4099), -8e4, np.float32)
    x[0, [5, 77, 900, 901, 902, 4000, 4098]] = np.arange(7)
    x[1] = -np.inf
    x[1, 4090:] = -1
    holds(x, 512)
    holds(x, 512, 0, [4099, 100])


def test_more_slots_than_keys():
    holds(planted("plateau", 2, 9), 16)
    indices, count = topk_select(np.zeros((2, 3, 0), np.float32), 4)
    assert (np.asarray(indices) == -1).all() and not count.any() and indices.shape == (2, 3, 4)
    assert topk_select(np.zeros((0, 5), np.float32), 4)[0].shape == (0, 4)


chosen = jax.jit(indexer_select, static_argnums=3, static_argnames="score_dtype")


def test_select_is_both_in_one(score_dtype="bfloat16"):
    """In pieces, with the bits of scores that exist at once: 2100 keys, in blocks of which some are never seen."""
    q, k, w = operands(B=1, T=40, N=2, S=2100, seed=3)
    low = np.int32([[0] * 20 + [1500] * 20])
    high = np.int32([np.r_[1:21, 1500:1520]])
    high[0, 20:30] = 2100
    got = jax.tree.map(np.asarray, chosen(q, k, w, 30, low, high, score_dtype=score_dtype))
    scores = scored(q, k, w, (low, high), score_dtype)
    for a, b in zip(got, selected(scores, 30, low, high), strict=True):
        np.testing.assert_array_equal(a, b)
    # Few candidates are all taken, whatever they score.
    np.testing.assert_array_equal(got[0][0, 4], [*range(5), *[-1] * 25])


def test_select_without_keys_or_rows():
    q, k, w = operands()
    indices, count = indexer_select(q, k[:, :0], w, 4)
    assert (np.asarray(indices) == -1).all() and not count.any()
    assert indexer_select(q[:, :0], k, w[:, :0], 4)[0].shape == (2, 0, 4)
    assert indexer_select(q[:0], k[:0], w[:0], 4)[0].shape == (0, 5, 4)


@functools.partial(jax.jit, static_argnames="k")
def layer(q, k_index, w, query, kv, end, k):
    lists, _ = indexer_select(q, k_index, w, k, k_end=end)
    return sparse_attention(query, kv, lists, scale=0.2, value_dim=16, return_residual=True)


def test_the_future_changes_no_bit():
    """Causality by perturbation, with scores of which many tie, and selections that fill up from row 6 on."""
    T, rng = 40, np.random.default_rng(0)
    q, k, w = (x[0] for x in operands(B=1, T=T, N=2, S=T))
    k = k.round(0)
    query, kv = rng.standard_normal((T, 2, 24)).astype(np.float32), rng.standard_normal((T, 24)).astype(np.float32)
    end = np.arange(1, T + 1, dtype=np.int32)
    want = jax.tree.map(np.asarray, layer(q, k, w, query, kv, end, k=6))
    for t in (0, 5, 6, 17, 38):
        later = np.arange(T) > t
        other = [np.where(later.reshape(-1, *[1] * (x.ndim - 1)), 7 - x, x) for x in (q, k, w, query, kv)]
        got = layer(*other, end, k=6)
        for a, b in zip(got, want, strict=True):
            np.testing.assert_array_equal(a[: t + 1], b[: t + 1])
            assert (np.asarray(a[t + 1 :]) != b[t + 1 :]).any()


def test_decoding_is_the_last_row_of_prefill():
    """Every t, bit for bit, over caches of one size: also where a list holds all there is."""
    T, rng = 40, np.random.default_rng(0)
    q, k, w = (x[0] for x in operands(B=1, T=T, N=2, S=T))
    k = k.round(0)
    query, kv = rng.standard_normal((T, 2, 24)).astype(np.float32), rng.standard_normal((T, 24)).astype(np.float32)
    want = layer(q, k, w, query, kv, np.arange(1, T + 1, dtype=np.int32), k=6)
    for t in range(T):
        past = np.arange(T)[:, None] <= t
        caches = np.where(past, k, np.nan), np.where(past, kv, np.nan)
        row = slice(t, t + 1)
        got = layer(q[row], caches[0], w[row], query[row], caches[1], np.int32([t + 1]), k=6)
        for a, b in zip(got, want, strict=True):
            np.testing.assert_array_equal(a[0], b[t])


# Training.


def test_scores_at_listed_keys(dtype="float32"):
    """Values and gradients, with slots that repeat, are empty, or name keys that others name too."""
    q, k, w = operands(dtype=dtype)
    rng = np.random.default_rng(4)
    lists = rng.integers(-2, 73, (2, 5, 20)).astype(np.int32)
    lists[0, 0] = 7
    lists[:, 4, :3] = -1, 2**31 - 1, 70
    valid = (lists >= 0) & (lists < 70)
    d = rng.standard_normal((2, 5, 20)).astype(np.float32)

    @jax.jit
    def run(q, k, w):
        out, pull = jax.vjp(lambda *x: indexer_scores(*x, lists), q, k, w)
        return out, pull(d)

    @jax.jit
    def yard(q, k, w):
        def f(q, k, w):
            found = jnp.take_along_axis(dense(q, k, w), jnp.where(valid, lists, 0), axis=2)
            return jnp.where(valid, found, -jnp.inf)

        out, pull = jax.vjp(f, q, k, w)
        return out, pull(d)

    (out, got), (dense_out, dense_got) = run(q, k, w), yard(q, k, w)
    all_scores = np.stack([oracle.logits(*x) for x in zip(q, k, w, strict=True)])
    truth = np.take_along_axis(all_scores, np.where(valid, lists, 0), axis=2)
    assert np.isneginf(np.asarray(out)[~valid]).all()
    compare.check("scores", out[valid], truth[valid], [dense_out[valid]], np.float32)
    spread = np.zeros((2, 5, 70))
    for at in np.ndindex(lists.shape):
        if valid[at]:
            spread[(*at[:2], lists[at])] += d[at]
    truth = zip(*[oracle.logits_gradients(*x) for x in zip(q, k, w, spread, strict=True)], strict=True)
    for name, a, y, t, x in zip("qkw", got, dense_got, truth, (q, k, w), strict=True):
        assert a.dtype == x.dtype
        compare.check("d" + name, a, np.stack(t), [y], dtype)


def test_loss_and_its_gradient():
    rng = np.random.default_rng(0)
    scores = rng.standard_normal((6, 20)).astype(np.float32) * 5
    target = rng.random((6, 20)).astype(np.float32) * 8
    scores[0, 10:], scores[1] = -np.inf, -np.inf
    target[2], target[3, ::2] = 0, 0
    target[4, 1:] = 0
    loss, got = jax.jit(lambda s: (indexer_kl(s, target), jax.grad(lambda s: indexer_kl(s, target).sum())(s)))(scores)
    assert loss.dtype == np.float32 and loss.shape == (6,)
    truth = [oracle.kl(*x) for x in zip(scores, target, strict=True)]
    np.testing.assert_allclose(loss, [x[0] for x in truth], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(got, [x[1] for x in truth], rtol=1e-5, atol=1e-6)
    assert not np.any(jax.jit(jax.grad(lambda t: indexer_kl(scores, t).sum()))(target))


def test_projections_turn_channels_as_their_model_does():
    """At position 1000 the two layouts differ, and each is the oracle's."""
    rng = np.random.default_rng(0)
    M, Q, N, H = 12, 10, 2, 16
    w = dict(
        query_up=(Q, N, H), key_down=(M, H), key_norm=(H,), key_bias=(H,), head_weights=(M, N)
    )  # fmt: skip
    w = {n: rng.standard_normal(s).astype(np.float32) for n, s in w.items()}
    x, a = rng.standard_normal((3, M)).astype(np.float32), rng.standard_normal((3, Q)).astype(np.float32)
    positions, found = np.int32([1000, 1001, 1007]), {}
    for interleaved in (False, True):
        rotate = functools.partial(rope, rotary_dim=8, interleaved=interleaved)
        project = jax.jit(functools.partial(indexer_project, rotate=rotate))
        query, key, heads = project(x, a, IndexerWeights(**w), positions)
        q = oracle.rope(np.einsum("tq,qnh->tnh", a, w["query_up"]), positions, interleaved=interleaved, rotary=8)
        k = oracle.f64(x) @ w["key_down"]
        k = (k - k.mean(1, keepdims=True)) / np.sqrt(k.var(1, keepdims=True) + 1e-6) * w["key_norm"] + w["key_bias"]
        np.testing.assert_allclose(query, q, rtol=1e-4, atol=1e-4)
        k = oracle.rope(k, positions, interleaved=interleaved, rotary=8)
        np.testing.assert_allclose(key, k, rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(heads, x @ w["head_weights"] * N**-0.5 * H**-0.5, rtol=1e-5, atol=1e-5)
        found[interleaved] = np.asarray(query)
    assert np.abs(found[False] - found[True]).max() > 0.1


Q, K, W = operands()
LISTS = np.zeros((2, 5, 4), np.int32)
CODES = quantize(K, "fp8_row")


@pytest.mark.parametrize(
    "call, error, words",
    [
        (lambda: indexer_logits(Q, K[..., :8], W), ValueError, "key head dim H=8 must equal query's H=32"),
        (lambda: indexer_logits(Q, K, W[..., :2]), ValueError, r"query has shape \(2, 5, 3, 32\); expected"),
        (lambda: indexer_logits(Q, jnp.bfloat16(K), W), TypeError, "key dtype bfloat16 must equal query's float32"),
        (lambda: indexer_logits(Q, K[:1], W), ValueError, r"key has shape \(1, 70, 32\); expected \[S, H\]"),
        (lambda: indexer_logits(Q, CODES, W), TypeError, "key dtype float8_e4m3fn must equal query's"),
        (lambda: indexer_logits((Q, Q), K, W), ValueError, "no pair that indexer_quantize returns"),
        (lambda: indexer_logits(Q, K, W, k_end=np.ones(3, np.int32)), ValueError, r"k_end has shape \(3,\)"),
        (lambda: indexer_logits(Q, K, W, k_end=1.0), TypeError, "k_end=1.0 must be an int array"),
        (lambda: indexer_logits(Q, K, np.int32(W)), TypeError, "weights must be floating-point, not int32"),
        (lambda: indexer_logits(Q, K, W, out_dtype="int8"), TypeError, "out_dtype=int8 must be one of"),
        (lambda: indexer_logits(Q, K, W, block_tables=LISTS), ValueError, "block_tables have shape"),
        (lambda: indexer_select(Q, K, W, 0), ValueError, "k=0 must be >= 1"),
        (lambda: indexer_select(Q, K, W, 2.0), TypeError, "k=2.0 must be a Python int"),
        (lambda: indexer_select(Q, K, W, 2, implementation="mosaic"), NotImplementedError, "it has no kernel for"),
        (lambda: topk_select(LISTS, 2), TypeError, "scores have dtype int32"),
        (lambda: topk_select(W[0, 0], 2), ValueError, r"scores have shape \(3,\); expected \[\*B, T, S\]"),
        (lambda: topk_select(W, 2, implementation="triton"), ValueError, "'triton' is unknown"),
        (lambda: indexer_scores(Q, K, W, LISTS[0]), ValueError, r"indices have shape \(5, 4\)"),
        (lambda: indexer_scores(Q, K, W, W), TypeError, "indices must be integers, not float32"),
        (lambda: indexer_scores(quantize(Q, "fp8_row"), CODES, W, LISTS), TypeError, "codes have no"),
        (
            lambda: jax.grad(lambda k: indexer_logits(Q, k, W, block_tables=LISTS[:, 0]).sum())(jnp.asarray(K)),
            NotImplementedError,
            "no derivatives over keys in pages",
        ),
        (lambda: indexer_kl(W, W[0]), ValueError, r"target has shape \(5, 3\); scores have \(2, 5, 3\)"),
        (lambda: indexer_kl(LISTS, LISTS), TypeError, "scores must be floating-point, not int32"),
        (lambda: indexer_quantize(Q, "fp6"), ValueError, "fmt='fp6' is unknown; choose from 'fp8_row'"),
        (lambda: indexer_quantize(Q[..., :24], "fp4_b32"), ValueError, "24 channels, no multiple of the block of 32"),
        (lambda: indexer_quantize(LISTS), TypeError, "x must be floating-point, not int32"),
        (lambda: indexer_dequantize(Q, W), ValueError, "no pair that indexer_quantize returns"),
        (lambda: hadamard(Q[..., :24]), ValueError, "24 channels; the Hadamard transform needs a power"),
    ],
)
def test_refused(call, error, words):
    with pytest.raises(error, match=words):
        call()


def test_derivatives_that_are_refused():
    f = lambda q: indexer_scores(q, K, W, LISTS).sum()  # noqa: E731
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(f, (Q,), (Q,))
    with pytest.raises(NotImplementedError, match="first derivatives in reverse mode only"):
        jax.jacrev(jax.grad(f))(Q)


@pytest.mark.gpu
def test_on_a_gpu():
    for dtype in ("float32", "bfloat16"):
        test_scores(dtype)
        test_scores_at_listed_keys(dtype)
        test_select_is_both_in_one(dtype)
    for kind in ("plateau", "nan and inf", "large", "tiny"):
        test_selection_is_exact(kind)
    test_fp4_blocks()
    test_a_score_knows_of_its_query_and_its_key_alone()
    test_the_future_changes_no_bit()
    test_decoding_is_the_last_row_of_prefill()

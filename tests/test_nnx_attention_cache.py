"""The autoregressive cache of `jattn.nnx.MultiHeadAttention`: Flax's convention, and what is beyond it."""

import functools

import compare
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType
from linear_cases import quick_compiles  # noqa: F401 -- for every test here
from nnx_cases import B, M, call, decoded, disturb, parameters, tokens

import jattn
import jattn.nnx

T, N, H = 70, 4, 6  # T: more than decoding takes at once
tokens = functools.partial(tokens, T=T)
LAYERS = {
    "plain": dict(),
    "global": dict(num_kv_heads=2, rope=True),
    "local": dict(num_kv_heads=1, rope={"base": 100.0}, local_window_size=(9, 0), sinks=True, logits_soft_cap=2.0),
}


def layer(name, **options):
    make = functools.partial(jattn.nnx.MultiHeadAttention, N, M, N * H, is_causal=True, rngs=nnx.Rngs(0))
    return disturb(make(**LAYERS[name], **options))


def turned(x, base):
    """Pairs (i, i + H / 2) of x `[B, T, N, H]`, by their positions."""
    angle = np.arange(x.shape[1])[:, None, None] * base ** (-np.arange(0, H, 2) / H)
    a, b = np.split(x, 2, -1)
    pair = a * np.cos(angle) - b * np.sin(angle), a * np.sin(angle) + b * np.cos(angle)
    return np.concatenate(pair, -1).astype(x.dtype)


def formula(layer, x, dtype, visible=None):
    """The layer in NumPy, in `dtype`."""
    w, x = parameters(layer, dtype), x.astype(dtype)
    query, key, value = (
        np.einsum("btm,mnh->btnh", x, w[f"{name}.kernel"]) + w[f"{name}.bias"] for name in ("query", "key", "value")
    )
    if layer.rope is not None:
        query, key = (turned(x, dict(layer.rope).get("base", 10000.0)) for x in (query, key))
    key, value = (np.repeat(x, N // layer.num_kv_heads, axis=2) for x in (key, value))
    scores = np.einsum("btnh,bsnh->bnts", query, key) * dtype(H**-0.5)
    if layer.logits_soft_cap:
        scores = layer.logits_soft_cap * np.tanh(scores / layer.logits_soft_cap)
    seen = np.tri(len(x[0]), dtype=bool)
    if layer.local_window_size:
        seen = seen & ~np.tri(len(x[0]), k=-layer.local_window_size[0] - 1, dtype=bool)
    scores = np.where(seen if visible is None else seen & visible, scores, -np.inf)
    top = scores.max(-1, keepdims=True)
    weights, sink = np.exp(scores - top), 0
    if layer.sinks is not None:
        sink = np.exp(w["sinks"][:, None, None] - top)
    weights = weights / (weights.sum(-1, keepdims=True) + sink)
    out = np.einsum("bnts,bsnd->btnd", weights, value)
    return np.einsum("btnd,ndm->btm", out, w["out.kernel"]) + w["out.bias"]


def check(name, layer, x, got, rows=slice(None), visible=None):
    """The error rule, with the formula in float32 for the yardstick."""
    truth, baseline = (formula(layer, x, dtype, visible)[rows] for dtype in (np.float64, np.float32))
    compare.check(name, got, truth, [baseline], np.float32)


def test_flax_convention():
    """Its cache, its single tokens, its mask: what its own module gives; and a cache that it has made goes on here."""
    x, length = tokens()[:, :10], 12
    ours = layer("plain")
    theirs = nnx.MultiHeadAttention(N, M, N * H, decode=True, rngs=nnx.Rngs(1))
    nnx.update(theirs, nnx.state(ours, nnx.Param))
    visible = np.ones((B, 1, 1, length), bool)
    visible[1, ..., 2] = False
    for one in (ours, theirs):
        one.init_cache((B, length, M))
        assert one.cached_key[...].shape == one.cached_value[...].shape == (B, length, N, H)
    with jax.numpy_dtype_promotion("standard"):
        flax = decoded(theirs, x, [1] * 10, mask=visible)
    found = decoded(ours, x, [1] * 10, mask=visible)
    truth = formula(ours, x, np.float64, visible[..., :10])
    compare.check("decoded", found, truth, [flax], np.float32)

    theirs.init_cache((B, length, M))
    with jax.numpy_dtype_promotion("standard"):
        decoded(theirs, x[:, :4], [1] * 4)
    nnx.update(ours, nnx.state(theirs, nnx.Cache))
    check("goes on", ours, x, decoded(ours, x[:, 4:], [1, 1, 4]), (slice(None), slice(4, None)))
    assert ours.cache_index[...].shape == () and ours.cache_index[...] == 10
    with pytest.raises(ValueError, match="seq_lengths need a cache_index of one length a sequence"):
        ours(x, decode=True, seq_lengths=np.array([1, 2]))


@pytest.mark.parametrize("name", ["global", "local"])
def test_decoding_is_the_prompt(name):
    """At every position: at once, and in chunks of any size through the cache."""
    x, of = tokens(), layer(name)
    check("at once", of, x, np.asarray(call(of, x)))
    for chunks in ([1] * T, [1, 1, 1, 66, 1]):
        of.init_cache((B, T, M))
        check(f"chunks {chunks[:4]}", of, x, decoded(of, x, chunks))
    assert of.cache_index[...].tolist() == [T] * B


def test_pages_in_any_order_are_the_contiguous_cache():
    x, of, chunks = tokens(), layer("local"), [17, *[1] * 3]
    x = x[:, :20]
    of.init_cache((B, 80, M))
    want = decoded(of, x, chunks)
    of.init_cache((B, 80, M), page_size=16, num_pages=12)
    for pages in (of.cached_key, of.cached_value):
        pages[...] = jnp.full_like(pages[...], jnp.nan)
    tables = np.random.default_rng(0).permutation(12)[:10].reshape(B, 5).astype(np.int32)
    np.testing.assert_array_equal(decoded(of, x, chunks, block_tables=tables), want)
    with pytest.raises(ValueError, match="block_tables are needed"):
        of(x, decode=True)
    with pytest.raises(NotImplementedError, match="cannot honour mask='ndarray': over pages"):
        of(x, decode=True, block_tables=tables, mask=np.ones((20, 80), bool))


@pytest.mark.parametrize("pages", [{}, {"page_size": 16, "num_pages": 10}], ids=["rows", "pages"])
@pytest.mark.parametrize("lengths", [(17, 7), (66, 0)])
def test_tokens_that_do_not_exist(lengths, pages):
    """Sequences of other lengths, whose padding and unused rows are NaN; then they go on."""
    x, of = tokens(), layer("global")
    tables = dict(block_tables=np.arange(10, dtype=np.int32).reshape(2, 5)) if pages else {}
    of.init_cache((B, T, M), **pages)
    for rows in (of.cached_key, of.cached_value):
        rows[...] = jnp.full_like(rows[...], jnp.nan)
    padded = np.full((B, max(lengths), M), np.nan, np.float32)
    for b, n in enumerate(lengths):
        padded[b, :n] = x[b, :n]
    first = np.asarray(call(of, padded, decode=True, seq_lengths=np.array(lengths, np.int32), **tables))
    assert of.cache_index[...].tolist() == list(lengths)
    second = np.asarray(call(of, np.stack([x[b, n : n + 1] for b, n in enumerate(lengths)]), decode=True, **tables))
    for b, n in enumerate(lengths):
        check(f"sequence {b}", of, x, np.concatenate([first[b, :n], second[b]]), (b, slice(0, n + 1)))


def test_tokens_behind_the_room_are_not_kept():
    x, of = tokens(), layer("global")
    for chunks in ([17, 1, 1, 1, 1, 1], [17, 1, 1, 1]):
        of.init_cache((B, 20, M))
        decoded(of, x[:, : sum(chunks)], chunks)
        assert of.cache_index[...].tolist() == [20] * B
        kept = np.asarray(of.cached_key[...])
    decoded(of, x[:, :66], [66])
    np.testing.assert_array_equal(of.cached_key[...], kept)


def test_masks():
    """A rule, and the same as an array."""
    x, of = tokens()[:, :20], layer("global")
    window = ~np.tri(20, k=-4, dtype=bool)
    of.init_cache((B, 20, M))
    check("rule", of, x, decoded(of, x, [17, 1, 1, 1], mask=jattn.masks.window(3, 0)), visible=window)
    of.init_cache((B, 20, M))
    check("array", of, x, decoded(of, x, [20], mask=window), visible=window)


def test_any_number_of_batch_axes():
    x, of = tokens()[:, :18], layer("local")
    of.init_cache((B, 18, M))
    want = decoded(of, x, [17, 1])
    of.init_cache((1, B, 1, 18, M))
    found = [call(of, jnp.asarray(x[:, at])[None, :, None], decode=True) for at in (slice(17), slice(17, 18))]
    np.testing.assert_array_equal(jnp.concatenate(found, -2)[0, :, 0], want)
    of.init_cache((18, M))
    alone = call(of, x[0, :17], decode=True)
    np.testing.assert_array_equal(alone, want[0, :17])


def test_positions():
    x, of, at = tokens()[:, :18], layer("global"), np.arange(18, dtype=np.int32)
    of.init_cache((B, 18, M))
    check("moved", of, x, np.asarray(call(of, x, decode=True, input_positions=at + 3)))


def test_views_and_dtypes():
    of = jattn.nnx.MultiHeadAttention(N, M, N * H, dtype=jnp.bfloat16, decode=True, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"decode=True needs a cache: call init_cache"):
        of(tokens()[:, :1])
    seen = nnx.view(of, decode=True, batch_size=B, max_length=5)
    y = seen(tokens(ml_dtypes.bfloat16)[:, :3])
    assert seen.cached_key[...].dtype == y.dtype == jnp.bfloat16 and seen.cache_index[...].tolist() == [3] * B
    of.init_cache((B, 5, M), jnp.float32)
    with pytest.raises(TypeError, match="cached_key is float32, but the layer computes in bfloat16"):
        of(tokens()[:, :1])


def test_a_layer_spread_over_devices_is_the_layer():
    """Heads over two devices, by the metadata of the parameters."""
    init = nnx.with_partitioning(nnx.initializers.lecun_normal(), (None, "model"))
    mesh = jax.make_mesh((2,), ("model",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    x = tokens()[:, :18]
    with jax.set_mesh(mesh):
        of = layer("global", kernel_init=init)
        assert of.query.kernel[...].sharding.spec[:2] == (None, "model")
        of.init_cache((B, 18, M))
        check("decoded", of, x, decoded(of, x, [17, 1]))


def test_errors():
    of, x = layer("global", dropout_rate=0.5), tokens()[:, :3]
    with pytest.raises(ValueError, match="page_size=16 and num_pages=None go together"):
        of.init_cache((B, T, M), page_size=16)
    with pytest.raises(ValueError, match="page"):
        of.init_cache((B, T, M), page_size=17, num_pages=3)
    with pytest.raises(ValueError, match="seq_lengths and block_tables are for decode=True"):
        of(x, seq_lengths=np.array([3, 3]), deterministic=True)
    of.init_cache((B, T, M))
    decode = functools.partial(of, decode=True, deterministic=True)
    with pytest.raises(NotImplementedError, match="cannot honour dropout_rate=0.5: decoding has no dropout"):
        of(x, decode=True, deterministic=False)
    with pytest.raises(ValueError, match=r"inputs_q has batch axes \(1,\); the cache has \(2,\)"):
        decode(x[:1])
    with pytest.raises(ValueError, match=r"inputs_k has axes \(2, 2\); expected those of inputs_q, \(2, 3\)"):
        decode(x, x[:, :2])
    with pytest.raises(ValueError, match="a row of the cache is one sequence"):
        decode(x, segment_ids=np.zeros((B, 3), np.int32))
    with pytest.raises(ValueError, match="block_tables are for a cache in pages"):
        decode(x, block_tables=np.zeros((B, 1), np.int32))
    with pytest.raises(NotImplementedError, match="cannot honour input_positions="):
        plain = layer("plain")
        plain.init_cache((B, T, M))
        plain(x, decode=True, input_positions=np.arange(3))

"""Multi-head latent attention as a Flax layer: the published formula, and decoding through rows and pages."""

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
from nnx_cases import B, M, call, decoded, disturb, gradients, parameters, rms, sigmoid, tokens

import jattn
import jattn.nnx

T = 70  # more than decoding takes at once
tokens = functools.partial(tokens, T=T)
LAYERS = {
    "deepseek": dict(num_heads=3, query_latent_features=10, value_head_dim=5, rope_features=4),
    "kimi linear": dict(num_heads=2, rope=False),
    "kimi k3": dict(num_heads=3, query_latent_features=10, rope=False, gated=True, latent_features=9, rope_features=2),
}


def layer(name, **options):
    make = functools.partial(jattn.nnx.MultiHeadLatentAttention, in_features=M, rngs=nnx.Rngs(0))
    return disturb(make(**LAYERS[name], **options))


def turned(x, base=10000.0):
    """Interleaved pairs of x `[B, T, .., R]`, by their positions."""
    R = x.shape[-1]
    angle = np.arange(x.shape[1])[:, None] * base ** (-np.arange(0, R, 2) / R)
    angle = angle.reshape(x.shape[1], *[1] * (x.ndim - 3), R // 2)
    a, b = x[..., ::2], x[..., 1::2]
    pair = a * np.cos(angle) - b * np.sin(angle), a * np.sin(angle) + b * np.cos(angle)
    return np.stack(pair, -1).reshape(x.shape).astype(x.dtype)


def formula(layer, x, dtype, visible=None):
    """The layer in NumPy, keys and values expanded, in `dtype`."""
    w, x = parameters(layer, dtype), x.astype(dtype)
    H, C = layer.head_dim, layer.latent_features
    turn = (lambda y: y) if layer.rope is None else turned
    latent = x
    if layer.query_latent_features:
        latent = rms(x @ w["query_down.kernel"], w["query_norm.scale"])
    query = np.einsum("btm,mnh->btnh", latent, w["query_up.kernel"])
    row = x @ w["latent_down.kernel"]
    c = rms(row[..., :C], w["latent_norm.scale"])
    shared = np.repeat(turn(row[..., None, C:]), layer.num_heads, axis=2)
    key = np.concatenate([np.einsum("btc,cnh->btnh", c, w["key_up.kernel"]), shared], -1)
    query = np.concatenate([query[..., :H], turn(query[..., H:])], -1)
    value = np.einsum("btc,cnd->btnd", c, w["value_up.kernel"])
    scores = np.einsum("btnh,bsnh->bnts", query, key) * dtype((H + layer.rope_features) ** -0.5)
    visible = np.tri(x.shape[1], dtype=bool) if visible is None else visible
    scores = np.where(visible, scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights = weights / weights.sum(-1, keepdims=True)
    out = np.einsum("bnts,bsnd->btnd", weights, value)
    if layer.gated:
        out = out * sigmoid(np.einsum("btm,mnd->btnd", x, w["gate.kernel"]))
    return np.einsum("btnd,ndm->btm", out, w["out.kernel"])


def check(name, layer, x, got, rows=slice(None), visible=None):
    """The error rule, with the formula in float32 for the yardstick."""
    truth, baseline = (formula(layer, x, dtype, visible)[rows] for dtype in (np.float64, np.float32))
    compare.check(name, got, truth, [baseline], np.float32)


@pytest.mark.parametrize("name", LAYERS)
def test_is_the_published_layer_and_decoding_is_the_prompt(name):
    """At every position: at once, token by token from nothing, and a prompt (a long one too) before single tokens."""
    x, of = tokens(), layer(name)
    check("at once", of, x, np.asarray(call(of, x)))
    for chunks in ([1] * T, [1, 1, 1, 66, 1]) if name == "deepseek" else ([1] * T,):
        of.init_cache((B, T, M))
        check(f"chunks {chunks[:2]}", of, x, decoded(of, x, chunks))
    assert of.cache_index[...].tolist() == [T] * B
    assert of.cached_rows[...].shape == (B, T, of.latent_features + of.rope_features)


def test_pages_in_any_order_are_the_contiguous_cache():
    x, of, chunks = tokens(), layer("kimi k3"), [17, *[1] * 53]
    of.init_cache((B, 80, M))
    want = decoded(of, x, chunks)
    of.init_cache((B, 80, M), page_size=16, num_pages=12)
    of.cached_rows[...] = jnp.full_like(of.cached_rows[...], jnp.nan)
    tables = np.random.default_rng(0).permutation(12)[:10].reshape(B, 5).astype(np.int32)
    np.testing.assert_array_equal(decoded(of, x, chunks, block_tables=tables), want)
    with pytest.raises(ValueError, match="block_tables are needed"):
        of(x, decode=True)


@pytest.mark.parametrize("lengths", [(66, 7), (3, 0)])
def test_tokens_that_do_not_exist(lengths):
    """Sequences of other lengths, whose padding and unused rows are NaN; then they go on."""
    x, of = tokens(), layer("deepseek")
    of.init_cache((B, T, M))
    of.cached_rows[...] = jnp.full_like(of.cached_rows[...], jnp.nan)
    padded = np.full((B, max(lengths), M), np.nan, np.float32)
    for b, n in enumerate(lengths):
        padded[b, :n] = x[b, :n]
    first = np.asarray(call(of, padded, decode=True, seq_lengths=np.array(lengths, np.int32)))
    assert of.cache_index[...].tolist() == list(lengths)
    second = np.asarray(call(of, np.stack([x[b, n : n + 1] for b, n in enumerate(lengths)]), decode=True))
    for b, n in enumerate(lengths):
        check(f"sequence {b}", of, x, np.concatenate([first[b, :n], second[b]]), (b, slice(0, n + 1)))


def test_tokens_behind_the_room_are_not_kept():
    x, of = tokens(), layer("kimi linear")
    of.init_cache((B, 20, M))
    decoded(of, x, [17, *[1] * 53])
    assert of.cache_index[...].tolist() == [20] * B
    rows = np.asarray(of.cached_rows[...])
    of.init_cache((B, 20, M))
    decoded(of, x[:, :20], [17, 1, 1, 1])
    np.testing.assert_array_equal(of.cached_rows[...], rows)


def test_segments_and_masks():
    x, of = tokens(), layer("kimi linear")
    ids = np.repeat(np.array([[3] * 17 + [1] * 53], np.int32), B, axis=0)
    seen = np.tri(T, dtype=bool) & (ids[:, None, :, None] == ids[:, None, None])
    check("segments", of, x, np.asarray(call(of, x, segment_ids=ids)), visible=seen)
    window = np.tri(T, dtype=bool) & ~np.tri(T, k=-4, dtype=bool)
    check("window", of, x, np.asarray(call(of, x, mask=jattn.masks.window(3, 0))), visible=window)
    check("array", of, x, np.asarray(call(of, x, mask=window)), visible=window)
    of.init_cache((B, T, M))
    check("decoded", of, x, decoded(of, x, [1, 1, 1, 66, 1], mask=jattn.masks.window(3, 0)), visible=window)


def test_positions_turn_by_differences():
    x, of = tokens(), layer("deepseek")
    at = np.arange(T, dtype=np.int32)
    check("moved", of, x, np.asarray(call(of, x, input_positions=at + 3)))
    base = layer("deepseek", rope={"base": 100.0})
    assert np.abs(call(base, x) - call(of, x)).max() > 1e-3
    with pytest.raises(NotImplementedError, match="cannot honour input_positions="):
        layer("kimi k3")(x, input_positions=at)


def test_a_layer_spread_over_devices_is_the_layer():
    """Heads over two devices, by the metadata of the parameters; the cache is where the compiler puts it."""
    init = nnx.with_partitioning(nnx.initializers.lecun_normal(), (None, "model"))
    mesh = jax.make_mesh((2,), ("model",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    x = tokens()
    with jax.set_mesh(mesh):
        of = layer("kimi linear", kernel_init=init, rope_features=2)
        assert of.query_up.kernel[...].sharding.spec[:2] == (None, "model")
        of.init_cache((B, T, M))
        check("spread", of, x, np.asarray(call(of, x)))
        check("decoded", of, x, decoded(of, x, [T - 2, 1, 1]))


def test_dropout_follows_flax_rules():
    of, x = layer("deepseek", dropout_rate=0.5), tokens()
    with pytest.raises(ValueError, match="deterministic must be given"):
        of(x)
    off = np.asarray(call(of, x, deterministic=True))
    check("off", of, x, off)
    one, two = (np.asarray(call(of, x, deterministic=False)) for _ in range(2))
    assert (one != off).any() and (one != two).any()
    same = np.asarray(call(of, x, deterministic=False, rngs=nnx.Rngs(5)))

    @nnx.jit
    def by_hand(of, x, key):
        x, weights = of._weights(x)
        values = jattn.mla_prefill(
            of._tokens(x, weights, None), weights, scale=of.scale, dropout_rate=0.5, dropout_key=key
        )
        return jattn.mla_output(values, weights)

    np.testing.assert_array_equal(by_hand(of, x, nnx.Rngs(5).dropout()), same)
    with pytest.raises(NotImplementedError, match="cannot honour dropout_rate=0.5: decoding has no dropout"):
        of.init_cache((B, T, M))
        of(x, decode=True, deterministic=False)


def test_every_parameter_learns():
    of = layer("kimi k3")
    found = gradients(of, tokens())
    assert set(found) == set(parameters(of, np.float32))
    for name, gradient in found.items():
        assert np.isfinite(gradient).all() and np.abs(gradient).max() > 0, name


def test_dtypes():
    of = layer("kimi k3", dtype=jnp.bfloat16)
    of.init_cache((B, T, M))
    assert of.cached_rows[...].dtype == call(of, tokens(ml_dtypes.bfloat16)[:, :1], decode=True).dtype == jnp.bfloat16


def test_errors():
    of, x = layer("kimi k3"), tokens()
    with pytest.raises(ValueError, match=r"decode=True needs a cache: call init_cache"):
        of(x, decode=True)
    with pytest.raises(ValueError, match="seq_lengths and block_tables are for decode=True"):
        of(x, seq_lengths=np.array([3, 4]))
    with pytest.raises(ValueError, match="page_size=16 and num_pages=None go together"):
        of.init_cache((B, T, M), page_size=16)
    of.init_cache((B, T, M))
    with pytest.raises(ValueError, match="inputs have B=1 sequences; the cache has 2"):
        of(x[:1], decode=True)
    with pytest.raises(ValueError, match="a row of the cache is one sequence"):
        of(x, segment_ids=np.zeros((B, T), np.int32), decode=True)
    with pytest.raises(ValueError, match="block_tables are for a cache in pages"):
        of(x, decode=True, block_tables=np.zeros((B, 1), np.int32))
    with pytest.raises(NotImplementedError, match="cannot honour use_bias=True"):
        layer("kimi k3", use_bias=True)
    with pytest.raises(NotImplementedError, match="cannot honour precision="):
        layer("kimi k3", precision="BF16_BF16_F32")
    with pytest.raises(ValueError, match="a cache needs is_causal=True"):
        layer("kimi k3", is_causal=False).init_cache((B, T, M))

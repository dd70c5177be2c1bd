"""Arrays past 2^31 elements, and a million tokens, on a GPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jattn

pytestmark = pytest.mark.gpu


def test_queries_past_two_billion_elements():
    """The last rows of 17 x 2^20 x 128 are those of the same call on these rows alone."""
    T, S, N, H = (1 << 20) + 100, 256, 17, 128
    assert T * N * H > 2**31
    keys = jax.random.split(jax.random.key(0), 3)
    query = jax.random.normal(keys[0], (1, T, N, H), jnp.bfloat16)
    key, value = (jax.random.normal(k, (1, S, N, H), jnp.bfloat16) for k in keys[1:])
    out, lse = jattn.attention(query, key, value, return_residual=True, implementation="mosaic")
    for rows in (slice(0, 100), slice(T - 100, T)):
        want, want_lse = jattn.attention(query[:, rows], key, value, return_residual=True, implementation="mosaic")
        np.testing.assert_array_equal(out[:, rows].astype(jnp.float32), want.astype(jnp.float32))
        np.testing.assert_array_equal(lse[:, rows], want_lse)


def test_keys_past_two_billion_elements():
    """The last of 17 sequences of 2^20 keys is that sequence on its own."""
    B, S, H = 17, 1 << 20, 128
    assert B * S * H > 2**31
    keys = jax.random.split(jax.random.key(0), 3)
    query = jax.random.normal(keys[0], (B, 3, 1, H), jnp.bfloat16)
    key, value = (jax.random.normal(k, (B, S, 1, H), jnp.bfloat16) for k in keys[1:])
    out = jattn.attention(query, key, value, implementation="mosaic")
    want = jattn.attention(query[-1:], key[-1:], value[-1:], implementation="mosaic")
    np.testing.assert_array_equal(out[-1:].astype(jnp.float32), want.astype(jnp.float32))


def test_a_million_tokens():
    """1 x 1,048,576 x 8 x 128 causal, forward and backward; the first rows are those of the first rows alone."""
    S, N, H = 1 << 20, 8, 128
    keys = jax.random.split(jax.random.key(0), 4)
    query, key, value, dout = (jax.random.normal(k, (1, S, N, H), jnp.bfloat16) for k in keys)
    out, pull = jax.vjp(lambda q, k, v: jattn.attention(q, k, v, is_causal=True), query, key, value)
    short = slice(0, 1000)
    want = jattn.attention(*(x[:, short] for x in (query, key, value)), is_causal=True)
    difference = np.abs(out[:, short].astype(jnp.float32) - want.astype(jnp.float32)).max()
    assert difference <= 2 * float(jnp.finfo(jnp.bfloat16).eps) * np.abs(want.astype(jnp.float32)).max()
    assert all(bool(jnp.isfinite(x).all()) for x in (out, *pull(dout)))

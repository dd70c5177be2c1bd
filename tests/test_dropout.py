"""Dropout: which weights go is a function of key words, batch, head and positions alone; the backward replays it."""

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cases import qkv

import jattn


def weights(T, S, rate=0.5, key=None, B=2, N=3, **options):
    """The weights after dropout, [B, N, T, S]: values are unit vectors, so the output is the weight itself."""
    q, k, _ = qkv(B, T, S, N, 1, 8)
    v = np.broadcast_to(np.eye(S, dtype=np.float32)[:, None], (B, S, 1, S)).copy()
    key = jax.random.key(5) if key is None else key
    return np.asarray(jattn.attention(q, k, v, dropout_rate=rate, dropout_key=key, **options)).transpose(0, 2, 1, 3)


@pytest.mark.quick
@pytest.mark.parametrize("offset", [0, 37, np.array([5, 130], np.int32)])
@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_the_dropped_weights_are_those_of_philox(rate, offset):
    T, S = 40, 150
    keep, p = oracle.dropout_keep((0, 5), rate, 2, 3, T, S, offset)
    got = weights(T, S, rate, query_offset=offset)
    np.testing.assert_array_equal(got != 0, keep)
    whole = weights(T, S, 0.0, query_offset=offset)
    np.testing.assert_allclose(got, np.where(keep, whole / p, 0), rtol=2e-6)


def test_words_beyond_16_bits_of_position_count():
    T, S = 3, 40
    for offset in (2**16 - 1, 2**20 + 7):
        keep, _ = oracle.dropout_keep((0, 5), 0.5, 2, 3, T, S, offset)
        np.testing.assert_array_equal(weights(T, S, query_offset=offset) != 0, keep)


def test_the_pattern_does_not_depend_on_the_lengths_of_the_call():
    """Tiles of another size, another split: position (t, s) keeps its fate."""
    big = weights(130, 300) != 0
    for T, S in ((130, 17), (17, 300), (1, 129)):
        np.testing.assert_array_equal(weights(T, S) != 0, big[:, :, :T, :S])
    np.testing.assert_array_equal(weights(30, 300, query_offset=100) != 0, big[:, :, 100:])


def test_batch_index_is_flat_and_heads_count_query_heads():
    q, k, v = qkv(6, 9, 11, 4, 2, 8)
    key = jax.random.key(1)
    flat = jattn.attention(q, k, v, dropout_rate=0.4, dropout_key=key)
    nested = jattn.attention(*(x.reshape(2, 3, *x.shape[1:]) for x in (q, k, v)), dropout_rate=0.4, dropout_key=key)
    np.testing.assert_array_equal(nested.reshape(flat.shape), flat)
    got = weights(8, 16, B=3, N=5) != 0
    for b in range(3):
        for n in range(5):
            assert not any(np.array_equal(got[b, n], got[c, m]) for c in range(3) for m in range(5) if (b, n) != (c, m))


def test_both_words_of_the_key_count():
    base = weights(9, 16, key=jax.random.wrap_key_data(jnp.array([1, 2], jnp.uint32))) != 0
    for words in ([1, 3], [2, 2]):
        other = weights(9, 16, key=jax.random.wrap_key_data(jnp.array(words, jnp.uint32))) != 0
        keep, _ = oracle.dropout_keep(words, 0.5, 2, 3, 9, 16)
        np.testing.assert_array_equal(other, keep)
        assert not np.array_equal(base, other)


def test_keys_of_another_generator_work():
    key = jax.random.key(3, impl="rbg")
    words = np.asarray(jax.random.bits(key, (2,), "uint32"))
    keep, _ = oracle.dropout_keep(words, 0.5, 2, 3, 9, 16)
    np.testing.assert_array_equal(weights(9, 16, key=key) != 0, keep)


def test_raw_keys_are_threefry_words():
    np.testing.assert_array_equal(weights(9, 16, key=jnp.array([0, 5], jnp.uint32)), weights(9, 16))


def test_the_mean_over_keys_is_the_attention_without_dropout():
    """Within five standard deviations of the mean, for 500 keys."""
    q, k, v = qkv(1, 5, 33, 2, 1, 8)
    keys = jax.random.split(jax.random.key(0), 500)
    run = jax.jit(jax.vmap(lambda key: jattn.attention(q, k, v, dropout_rate=0.3, dropout_key=key)))
    out = np.asarray(run(keys))
    spread = out.std(0) / np.sqrt(500)
    assert (abs(out.mean(0) - np.asarray(jattn.attention(q, k, v))) < 5 * spread + 1e-6).all()


def test_rate_zero_is_no_dropout():
    q, k, v = qkv()
    plain = jattn.attention(q, k, v)
    np.testing.assert_array_equal(jattn.attention(q, k, v, dropout_rate=0.0, dropout_key=jax.random.key(0)), plain)
    np.testing.assert_array_equal(jattn.attention(q, k, v, dropout_rate=0.0), plain)


def test_lse_does_not_know_of_dropout():
    q, k, v = qkv()
    _, lse = jattn.attention(q, k, v, return_residual=True)
    _, dropped = jattn.attention(q, k, v, dropout_rate=0.5, dropout_key=jax.random.key(0), return_residual=True)
    np.testing.assert_array_equal(lse, dropped)


def test_checkpoint_replays_the_same_weights():
    """Bit for bit, for every policy."""
    q, k, v = qkv()

    def attend(q, k, v):
        return jattn.attention(q, k, v, dropout_rate=0.3, dropout_key=jax.random.key(0), is_causal=True)

    def gradients(f):
        return jax.jit(jax.grad(lambda *x: (f(*x) ** 2).sum(), (0, 1, 2)))(q, k, v)

    want = gradients(attend)
    for policy in ("nothing_saveable", "everything_saveable"):
        got = gradients(jax.checkpoint(attend, policy=getattr(jax.checkpoint_policies, policy)))
        for g, w in zip(got, want, strict=True):
            np.testing.assert_array_equal(g, w, err_msg=policy)


def test_a_traced_key_does_not_compile_again():
    q, k, v = qkv()
    traces = []

    @jax.jit
    def f(key):
        traces.append(key)
        return jattn.attention(q, k, v, dropout_rate=0.3, dropout_key=key)

    a, b = f(jax.random.key(0)), f(jax.random.key(1))
    assert len(traces) == 1 and not np.array_equal(a, b)


@pytest.mark.parametrize(
    "rate, error",
    [
        (-0.1, ValueError),
        (1.0, ValueError),
        (1.5, ValueError),
        (float("nan"), ValueError),
        (2.0**-18, ValueError),
        (1 - 2.0**-18, ValueError),
        ("half", TypeError),
    ],
)
def test_rates_that_cannot_be_are_refused(rate, error):
    with pytest.raises(error, match="dropout_rate"):
        jattn.attention(*qkv(), dropout_rate=rate, dropout_key=jax.random.key(0))


def test_the_smallest_rates_are_exact():
    assert np.isclose(weights(9, 16, 2.0**-16).sum(), 2 * 3 * 9, atol=1)


def test_dropout_without_a_key_is_refused():
    with pytest.raises(ValueError, match="dropout_key"):
        jattn.attention(*qkv(), dropout_rate=0.1)


def test_a_key_that_is_no_key_is_refused():
    for key in (3, np.zeros(3, np.uint32), np.zeros(2, np.float32)):
        with pytest.raises((TypeError, ValueError), match="dropout_key"):
            jattn.attention(*qkv(), dropout_rate=0.1, dropout_key=key)

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jattn._philox import keep_bits, keep_mask, key_words, mulhi, philox4x32, threshold

KEY = 0xA4093822, 0x299F31D0
jit_mask = jax.jit(keep_mask, static_argnums=(4, 6))


def philox_numpy(counter, key):
    """Philox4x32-10 in uint64 NumPy, written from the paper: products as 64-bit numbers."""
    mask = np.uint64(0xFFFFFFFF)
    c0, c1, c2, c3 = np.broadcast_arrays(*(np.asarray(c).astype(np.int64).astype(np.uint64) & mask for c in counter))
    k0, k1 = (int(k) for k in key)
    for _ in range(10):
        p0, p1 = np.uint64(0xD2511F53) * c0, np.uint64(0xCD9E8D57) * c2
        c0, c1, c2, c3 = (
            (p1 >> np.uint64(32)) ^ c1 ^ np.uint64(k0),
            p1 & mask,
            (p0 >> np.uint64(32)) ^ c3 ^ np.uint64(k1),
            p0 & mask,
        )
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return c0, c1, c2, c3


def bits_numpy(key, b, n, t, s):
    """The 16 bits of each element, one element at a time, from the layout's definition by bit strings."""
    b, n, t, s = np.broadcast_arrays(b, n, t, s)
    out = np.zeros(b.shape, np.uint32)
    for i in np.ndindex(b.shape):
        # Character 31 - j is bit j.
        rows, columns = f"{int(t[i]) % 2**32:032b}", f"{int(s[i]) % 2**32:032b}"
        row = int(rows[:28] + rows[29:], 2)
        column = int(columns[:28] + columns[29:31], 2)
        lane = int(columns[31]) + 2 * int(rows[28]) + 4 * int(columns[28])
        block = philox_numpy((b[i], n[i], row, column), key)
        out[i] = int(block[lane // 2]) >> 16 * (lane % 2) & 0xFFFF
    return out


def mask_numpy(key, batch, heads, query_start, num_queries, key_start, num_keys, cut):
    batch, heads = np.asarray(batch), np.asarray(heads)
    t = np.reshape(np.asarray(query_start, np.int64), (-1, 1, 1, 1)) + np.arange(num_queries)[:, None]
    s = np.reshape(np.asarray(key_start, np.int64), (-1, 1, 1, 1)) + np.arange(num_keys)
    return bits_numpy(key, batch[:, None, None, None], heads[:, None, None], t, s) >= cut


@pytest.mark.parametrize(
    "counter, key, expected",
    [  # kat_vectors of the Random123 distribution, lines "philox4x32 10"
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_known_answers(counter, key, expected):
    out = philox4x32(counter, key)
    assert all(x.dtype == jnp.uint32 and x.shape == () for x in out)
    assert tuple(int(x) for x in out) == expected
    assert tuple(int(x) for x in philox_numpy(counter, key)) == expected


def test_mulhi_is_exact():
    rng = np.random.default_rng(0)
    edges = np.array([0, 1, 0xFFFF, 0x10000, 0x10001, 0x7FFFFFFF, 0x80000000, 0xFFFF0000, 0xFFFFFFFF], np.uint32)
    numbers = np.concatenate([edges, rng.integers(0, 2**32, 200, dtype=np.uint32)])
    a, b = numbers[:, None], numbers[None, :]
    expected = (a.astype(np.uint64) * b.astype(np.uint64) >> np.uint64(32)).astype(np.uint32)
    np.testing.assert_array_equal(mulhi(jnp.asarray(a), jnp.asarray(b)), expected)


def test_blocks_match_numpy_on_broadcast_counters():
    rng = np.random.default_rng(1)
    counter = [rng.integers(0, 2**32, shape, dtype=np.uint32) for shape in ((3, 1, 1), (4, 1), (5,), (3, 4, 5))]
    for ours, theirs in zip(philox4x32(counter, KEY), philox_numpy(counter, KEY), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_elementwise_bits_follow_the_layout():
    b, n = np.array([0, 7])[:, None, None, None], np.array([0, 3])[:, None, None]
    t, s = np.arange(-9, 25)[:, None], np.arange(-3, 30)
    bits = keep_bits(KEY, b, n, t, s)
    assert bits.dtype == jnp.uint32
    np.testing.assert_array_equal(bits, bits_numpy(KEY, b, n, t, s))


def test_each_lane_of_a_block_is_used_once():
    t, s = np.array([2, 10])[:, None], np.array([4, 5, 12, 13])
    words = philox4x32((1, 2, 2, 2), KEY)
    halves = sorted(int(word) >> 16 * half & 0xFFFF for word in words for half in (0, 1))
    assert sorted(np.asarray(keep_bits(KEY, 1, 2, t, s)).ravel().tolist()) == halves


@pytest.mark.parametrize(
    "query_start, num_queries, key_start, num_keys",
    [(0, 16, 13, 21), (5, 7, 0, 32), (31, 1, -17, 5), (-3, 20, 13, 21), (2**31 - 4, 9, 0, 32), (8, 0, -17, 5)],
)
def test_window_matches_numpy(query_start, num_queries, key_start, num_keys):
    batch, heads, words = np.array([4, 0], np.int32), np.array([1, 9, 2], np.int32), np.array(KEY, np.uint32)
    expected = mask_numpy(KEY, batch, heads, query_start, num_queries, key_start, num_keys, 20000)
    static = keep_mask(words, batch, heads, query_start, num_queries, key_start, num_keys, 20000)
    assert static.dtype == jnp.bool and static.shape == (2, 3, num_queries, num_keys)
    np.testing.assert_array_equal(static, expected)
    starts = np.array(query_start, np.int64).astype(np.int32), np.array(key_start, np.int64).astype(np.int32)
    traced = jit_mask(words, batch, heads, starts[0], num_queries, starts[1], num_keys, 20000)
    np.testing.assert_array_equal(traced, expected)


def test_one_window_equals_its_tiles():
    batch, heads, words = np.arange(2), np.arange(2), np.array(KEY, np.uint32)
    whole = np.asarray(keep_mask(words, batch, heads, 0, 48, 0, 48, 30000))
    for (t, rows), (s, columns) in [((0, 16), (0, 48)), ((3, 33), (17, 8)), ((40, 8), (1, 47)), ((16, 32), (16, 32))]:
        tile = jit_mask(words, batch, heads, jnp.int32(t), rows, jnp.int32(s), columns, 30000)
        np.testing.assert_array_equal(tile, whole[:, :, t : t + rows, s : s + columns])
    one = keep_mask(words, batch[1:], heads[1:], 0, 48, 0, 48, 30000)
    np.testing.assert_array_equal(one, whole[1:, 1:])


def test_starts_per_batch():
    batch, heads, words = np.array([0, 1, 5]), np.array([2, 0]), np.array(KEY, np.uint32)
    queries, keys = np.array([0, 13, -2], np.int32), np.array([7, 0, 100], np.int32)
    for query_start, key_start in (
        (queries, 3),
        (0, keys),
        (queries, keys),
        (queries, jnp.int32(5)),
        (queries[1:2], 3),
    ):
        expected = mask_numpy(KEY, batch, heads, query_start, 9, key_start, 18, 9000)
        traced = jit_mask(words, batch, heads, query_start, 9, key_start, 18, 9000)
        np.testing.assert_array_equal(traced, expected)


def test_vmap_over_keys_and_starts():
    batch, heads = np.arange(2), np.arange(3)
    words = np.array([[1, 2], [3, 4]], np.uint32)
    starts = np.array([5, 30], np.int32)
    out = jax.vmap(lambda k, start: keep_mask(k, batch, heads, start, 6, start, 20, 1000))(words, starts)
    for i in range(2):
        start = int(starts[i])
        np.testing.assert_array_equal(out[i], mask_numpy(words[i], batch, heads, start, 6, start, 20, 1000))


def test_bits_at_the_threshold_are_kept():
    one, bits = np.arange(1), int(keep_bits(KEY, 0, 0, 5, 6))
    for cut, kept in ((bits, True), (bits + 1, False)):
        assert bool(keep_mask(np.array(KEY, np.uint32), one, one, 5, 1, 6, 1, cut)[0, 0, 0, 0]) is kept


def test_extreme_thresholds():
    words, one = np.array(KEY, np.uint32), np.arange(1)
    assert bool(keep_mask(words, one, one, 0, 64, 0, 64, 0).all())
    assert int(keep_mask(words, one, one, 0, 64, 0, 64, 65535).sum()) <= 3


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_drop_fraction_and_independence(rate):
    words = key_words(jax.random.key(3))
    keep = np.asarray(keep_mask(words, np.arange(4), np.arange(4), 0, 128, 0, 128, threshold(rate)))
    deviation = np.sqrt(rate * (1 - rate) / keep.size)
    assert abs((1 - keep.mean()) - rate) < 4 * deviation + 2.0**-16
    # Correlation of two independent 16384-element masks has standard deviation 1/128.
    flat = keep.reshape(16, -1)
    correlation = np.corrcoef(flat) - np.eye(16)
    assert np.abs(correlation).max() < 4.5 / 128
    for axis in (2, 3):
        for distance in (1, 2, 8):
            near = np.take(keep, range(128 - distance), axis).ravel(), np.take(keep, range(distance, 128), axis).ravel()
            assert abs(np.corrcoef(*near)[0, 1]) < 4.5 / np.sqrt(near[0].size)
    assert np.abs(np.asarray(keep.mean((0, 1, 3))) - (1 - rate)).max() < 5 * np.sqrt(rate * (1 - rate) / 2048)


def test_keys_give_different_masks():
    one = np.arange(1)
    masks = [keep_mask(key_words(jax.random.key(i)), one, one, 0, 64, 0, 64, 32768) for i in range(2)]
    assert 0.45 < float((masks[0] == masks[1]).mean()) < 0.55


def test_threshold():
    assert [threshold(r) for r in (0, 0.0, 0.5, 2.0**-16, 0.1)] == [0, 0, 32768, 1, 6554]
    assert threshold(np.float32(0.25)) == 16384
    assert threshold(65535 / 65536) == 65535


@pytest.mark.parametrize("rate", [1.5, 1, 1.0, -0.1, float("nan"), float("inf")])
def test_rate_outside_the_range(rate):
    with pytest.raises(ValueError, match=r"dropout_rate=\S+ must be in \[0, 1\)"):
        threshold(rate)


def test_rates_that_sixteen_bits_cannot_draw():
    with pytest.raises(ValueError, match=r"dropout_rate=1e-05 is below 2\*\*-16"):
        threshold(1e-5)
    with pytest.raises(ValueError, match="dropout_rate=0.999999 rounds to 1"):
        threshold(0.999999)


@pytest.mark.parametrize("rate", ["0.1", None, True, 1j, np.zeros(2)])
def test_rate_of_another_type(rate):
    with pytest.raises(TypeError, match="dropout_rate must be a Python number"):
        threshold(rate)


def test_traced_rate_is_refused():
    with pytest.raises(TypeError, match="dropout_rate must be a Python number"):
        jax.jit(threshold)(0.5)


def test_threefry_keys_give_their_data():
    key = jax.random.key(123456789)
    np.testing.assert_array_equal(key_words(key), jax.random.key_data(key))
    raw = jax.random.key_data(key)
    np.testing.assert_array_equal(key_words(raw), raw)
    np.testing.assert_array_equal(key_words(np.asarray(raw)), raw)
    np.testing.assert_array_equal(jax.jit(key_words)(key), raw)
    batch = jax.random.split(key, 3)
    np.testing.assert_array_equal(jax.vmap(key_words)(batch), jax.random.key_data(batch))


def test_other_generators_give_two_random_words():
    key = jax.random.key(5, impl="rbg")
    words = key_words(key)
    assert words.shape == (2,) and words.dtype == jnp.uint32
    np.testing.assert_array_equal(words, jax.random.bits(key, (2,), jnp.uint32))


def test_what_is_no_key():
    with pytest.raises(TypeError, match="dropout_key must be a JAX random key, got int"):
        key_words(0)
    with pytest.raises(TypeError, match=r"raw uint32 \[2\], got float32 \[2\]"):
        key_words(np.zeros(2, np.float32))
    with pytest.raises(ValueError, match=r"one key of shape \(\), got keys of shape \(3,\)"):
        key_words(jax.random.split(jax.random.key(0), 3))
    with pytest.raises(ValueError, match=r"raw dropout_key must be uint32 \[2\], got \[4\]; wrap"):
        key_words(jnp.zeros(4, jnp.uint32))


def test_no_64_bit_type_is_used():
    jaxpr = jax.make_jaxpr(keep_mask, static_argnums=(4, 6))(
        np.array(KEY, np.uint32), np.arange(2, dtype=np.int32), np.arange(2, dtype=np.int32), np.int32(3), 20,
        np.int32(1), 40, np.uint32(9),
    )  # fmt: skip
    assert "64[" not in str(jaxpr)

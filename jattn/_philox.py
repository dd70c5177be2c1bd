"""Dropout bits from Philox4x32-10 counters: one function of key and logical position, free of tiles and devices.

The generator is that of Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).
Element (b, n, t, s) takes 16 of the 128 bits of one block:

    counter   (b, n, t without bit 3, s without bits 0 and 3), the bits above a removed bit close up
    lane      s bit 0 | t bit 3 << 1 | s bit 3 << 2, in 0..7
    bits      output word lane >> 1, its low half for an even lane and its high half for an odd one

so a block covers rows {t, t+8} by columns {s, s+1, s+8, s+9}: in the accumulator of a Hopper wgmma one thread holds
all eight. An element is kept iff its bits are >= threshold.
"""

import numbers

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_WEYL = np.uint32(0x9E3779B9), np.uint32(0xBB67AE85)
_ROUNDS = 10

# Aligned 16 by 16 elements are exactly 32 whole blocks: 8 rows (bit 3 removed) by 4 columns (bits 0 and 3 removed).
_TILE = 16


def _u32(x):
    """x as uint32, negative integers in two's complement."""
    if isinstance(x, int):
        x = np.uint32(x & 0xFFFFFFFF)
    return jnp.asarray(x).astype(jnp.uint32)


def mulhi(a, b):
    """Upper 32 bits of the product of uint32 a and b, from 16-bit pieces: no 64-bit type, no carry is lost."""
    half, low = np.uint32(16), np.uint32(0xFFFF)
    a_high, a_low, b_high, b_low = a >> half, a & low, b >> half, b & low
    middle = a_high * b_low + (a_low * b_low >> half)
    other = a_low * b_high + (middle & low)
    return a_high * b_high + (middle >> half) + (other >> half)


def philox4x32(counter, key):
    """Philox4x32-10: four uint32 words from four counter words and two key words, elementwise.

    counter: 4 integers or integer arrays that broadcast together; key: 2 integers or arrays. Returns 4 uint32 arrays.

    >>> [hex(x) for x in philox4x32((0, 0, 0, 0), (0, 0))]
    ['0x6627e8d5', '0xe169c58d', '0xbc57ac4c', '0x9b00dbd8']
    """
    c0, c1, c2, c3 = map(_u32, counter)
    k0, k1 = map(_u32, key)
    m0, m1 = map(np.uint32, _MULTIPLIERS)
    for i in range(_ROUNDS):
        if i:
            k0, k1 = k0 + _WEYL[0], k1 + _WEYL[1]
        c0, c1, c2, c3 = mulhi(c2, m1) ^ c1 ^ k0, c2 * m1, mulhi(c0, m0) ^ c3 ^ k1, c0 * m0
    return c0, c1, c2, c3


def _counter_row(t):
    """t without bit 3."""
    return (t >> np.uint32(4)) << np.uint32(3) | t & np.uint32(7)


def _counter_column(s):
    """s without bits 0 and 3."""
    return (s >> np.uint32(4)) << np.uint32(2) | (s >> np.uint32(1)) & np.uint32(3)


def keep_bits(key_words, b, n, t, s):
    """The 16 bits (as uint32) of every element (b, n, t, s), integers or integer arrays that broadcast together.

    The elementwise form: a kernel inlines it, or takes whole blocks from `philox4x32` where a thread holds them.
    """
    t, s = _u32(t), _u32(s)
    x0, x1, x2, x3 = philox4x32((b, n, _counter_row(t), _counter_column(s)), key_words)
    t3, s3 = (t & np.uint32(8)) != np.uint32(0), (s & np.uint32(8)) != np.uint32(0)
    word = jnp.where(s3, jnp.where(t3, x3, x2), jnp.where(t3, x1, x0))
    return word >> (s & np.uint32(1)) * np.uint32(16) & np.uint32(0xFFFF)


def _cover(start, size):
    """The aligned groups of 16 positions that cover [start, start + size): (first position, groups, start - first)."""
    if isinstance(start, numbers.Integral):
        shift = int(start) % _TILE
        return _u32(int(start) - shift), -(-(shift + size) // _TILE), shift
    start = _u32(start)
    start = start.reshape(()) if start.size == 1 else start
    shift = start & np.uint32(_TILE - 1)
    return start - shift, (size + 2 * (_TILE - 1)) // _TILE, shift.astype(jnp.int32)


def _positions(first, groups, offsets):
    """uint32 [B or 1, groups, len(offsets)]: positions first + 16·group + offset, wrapping."""
    grid = np.arange(groups, dtype=np.uint32)[:, None] * np.uint32(_TILE) + np.asarray(offsets, np.uint32)
    return first.reshape(-1, 1, 1) + grid


def _window(x, shift, size, axis):
    """x[shift : shift + size] along axis; shift is an int, a scalar, or one per entry of the leading axis."""
    if isinstance(shift, int):
        return lax.slice_in_dim(x, shift, shift + size, axis=axis)
    if shift.ndim == 0:
        return lax.dynamic_slice_in_dim(x, shift, size, axis)
    return jax.vmap(lambda row, start: lax.dynamic_slice_in_dim(row, start, size, axis - 1))(x, shift)


def keep_mask(key_words, batch, heads, query_start, num_queries, key_start, num_keys, threshold):
    """Which elements of a window of weights survive dropout: bool [B, N, num_queries, num_keys].

    key_words: uint32 [2], see `key_words`. batch: int [B], flat batch indices. heads: int [N]. query_start, key_start:
    first position of the window, an int, an integer scalar or an integer array [B] or [1], traced or not; positions
    count as uint32, negative ones in two's complement. num_queries, num_keys: ints. threshold: see `threshold`.

    Every Philox block of the covering grid of 16 by 16 tiles is computed once and gives eight elements.
    """
    query_first, query_groups, query_shift = _cover(query_start, num_queries)
    key_first, key_groups, key_shift = _cover(key_start, num_keys)
    t = _counter_row(_positions(query_first, query_groups, range(8)))
    s = _counter_column(_positions(key_first, key_groups, range(0, 8, 2)))
    counter = (
        _u32(batch).reshape(-1, 1, 1, 1, 1, 1),
        _u32(heads).reshape(-1, 1, 1, 1, 1),
        t[:, None, :, :, None, None],
        s[:, None, None, None, :, :],
    )
    # [B, N, query group, t in 0..7, key group, s // 2 in 0..3]. Without the barrier XLA fuses the generator into the
    # expansion below: 167 instead of 7.3 ms on 2 CPU cores for 8 heads, 512 by 512.
    words = lax.optimization_barrier(jnp.broadcast_arrays(*philox4x32(counter, key_words)))
    cut = _u32(threshold)
    low, high = ([half(x) >= cut for x in words] for half in (lambda x: x & np.uint32(0xFFFF), lambda x: x >> 16))
    lanes = [jnp.stack(pair, axis=-1) for pair in zip(low, high, strict=True)]  # [..., s bit 0], by word
    columns = [jnp.stack(pair, axis=-3) for pair in (lanes[0::2], lanes[1::2])]  # [..., s bit 3, s // 2, s bit 0]
    keep = jnp.stack(columns, axis=3)  # [B, N, query group, t bit 3, t in 0..7, key group, s bit 3, s // 2, s bit 0]
    keep = keep.reshape(*keep.shape[:2], query_groups * _TILE, key_groups * _TILE)
    return _window(_window(keep, query_shift, num_queries, 2), key_shift, num_keys, 3)


def threshold(rate):
    """The int that 16 bits must reach for their element to be kept: round(rate · 65536), in 0..65535.

    rate: a Python number in [0, 1). The rate in force is threshold / 65536, so kept weights are divided by
    1 - threshold / 65536. Raises TypeError for anything but a real number, ValueError for a rate outside [0, 1), for a
    nonzero one below 2**-16 and for one that rounds to 1.

    >>> threshold(0.1)
    6554
    """
    if isinstance(rate, bool) or not isinstance(rate, numbers.Real):
        raise TypeError(f"dropout_rate must be a Python number, got {type(rate).__name__}")
    if not 0 <= rate < 1:
        raise ValueError(f"dropout_rate={rate} must be in [0, 1)")
    if 0 < rate < 2.0**-16:
        raise ValueError(f"dropout_rate={rate} is below 2**-16, the smallest rate that 16 bits can draw; use 0")
    count = round(float(rate) * 65536)
    if count == 65536:
        raise ValueError(f"dropout_rate={rate} rounds to 1 in steps of 2**-16, which would drop every weight")
    return count


def key_words(key):
    """The two uint32 words [2] of a JAX random key that seed Philox.

    key: a typed key of shape [] (`jax.random.key`), or a raw uint32 [2] threefry key (`jax.random.PRNGKey`). A threefry
    key gives its own data; a key of another generator gives `jax.random.bits(key, (2,), uint32)`. Raises TypeError for
    anything else that is not a key, ValueError for a batch of keys or a raw key of another length.
    """
    if not isinstance(key, jax.Array | np.ndarray):
        raise TypeError(f"dropout_key must be a JAX random key, got {type(key).__name__}")
    if jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        if key.shape:
            raise ValueError(f"dropout_key must be one key of shape (), got keys of shape {key.shape}")
        if str(jax.random.key_impl(key)) == "threefry2x32":
            return jax.random.key_data(key)
        return jax.random.bits(key, (2,), jnp.uint32)
    if key.dtype != jnp.uint32:
        raise TypeError(f"dropout_key must be a JAX random key or raw uint32 [2], got {key.dtype} {list(key.shape)}")
    if key.shape != (2,):
        raise ValueError(
            f"a raw dropout_key must be uint32 [2], got {list(key.shape)}; "
            "wrap a key of another generator with jax.random.wrap_key_data(key, impl=...)"
        )
    return jnp.asarray(key)

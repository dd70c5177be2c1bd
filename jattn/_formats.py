"""Number formats of latent caches and of the indexer, bit for bit: fp8 with scales, FP4, exponent-only scales, rows.

    e4m3      1 sign, 4 exponent, 3 mantissa bits, largest 448; a scale maps the largest magnitude of a block to 448
    e2m1      1 sign, 2 exponent, 1 mantissa bit: 0, .5, 1, 1.5, 2, 3, 4, 6; two to a byte, the low nibble first
    ue8m0     a byte b that means 2^(b - 127); 255 is NaN

Scales are powers of two where it says so: rounded up, so that nothing saturates. Rounding of values is to nearest, ties
to even. NaN and Inf make NaN of their whole block. Source: OCP Microscaling Formats 1.0; FlashMLA for the row of 656
bytes; DeepGEMM for the index page.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

LATENT, ROPE = 512, 64  # channels of a latent row, and of the key part that carries positions
ROW_BYTES = LATENT + 4 * (LATENT // 128) + 2 * ROPE  # 656
_E4M3, _E2M1 = 448.0, 6.0
_FLOOR = 1e-4  # the largest magnitude that a scale is made for is at least this


def stored(x):
    """`x`, rounded even where it is read back at once: a compiler that sees a conversion to a narrower float and back
    may leave out both (XLA does, for GPUs)."""
    return lax.optimization_barrier(x)


def bytes_of(x):
    """`x [..., n]` as the bytes it is stored in, uint8 `[..., n · itemsize]`, lowest first."""
    return lax.bitcast_convert_type(x, jnp.uint8).reshape(*x.shape[:-1], x.shape[-1] * x.dtype.itemsize)


def from_bytes(data, dtype):
    """What `bytes_of` was given: uint8 `[..., n · itemsize]` -> `[..., n]`."""
    size = jnp.dtype(dtype).itemsize
    data = data if size == 1 else data.reshape(*data.shape[:-1], data.shape[-1] // size, size)
    return lax.bitcast_convert_type(data, dtype)


def power_of_two_scale(top, largest):
    """The smallest power of two from 2^-126 on that is >= top / largest, exactly; NaN for NaN and Inf. float32."""
    # As a division it would be rounded, up past a power of two where a compiler multiplies by the reciprocal.
    fraction, exponent = math.frexp(largest)
    limit = np.int32(np.float32(2 * fraction).view(np.int32) & 0x7FFFFF)
    bits = lax.bitcast_convert_type(top, jnp.int32)
    power = (bits >> 23) - 126 - exponent + ((bits & 0x7FFFFF) > limit).astype(jnp.int32)
    scale = lax.bitcast_convert_type((jnp.clip(power, -126, 127) + 127) << 23, jnp.float32)
    return jnp.where(jnp.isfinite(top), scale, jnp.float32(np.nan))


def reciprocal(scale):
    """1 / scale of a float32 power of two up to 2^126, exactly, on devices that divide approximately too."""
    bits = (254 << 23) - lax.bitcast_convert_type(scale, jnp.int32)
    return jnp.where(jnp.isnan(scale), scale, lax.bitcast_convert_type(bits, jnp.float32))


def encode_ue8m0(scale):
    """The byte of a float32 power of two from 2^-126 to 2^127; 255 for NaN."""
    exponent = (lax.bitcast_convert_type(scale, jnp.int32) >> 23) & 255
    return jnp.where(jnp.isnan(scale), 255, exponent).astype(jnp.uint8)


def decode_ue8m0(byte):
    """float32 2^(byte - 127); 0 gives 2^-126 · 0.5, which some devices take for 0, and 255 NaN."""
    bits = jnp.where(byte == 0, 1 << 22, byte.astype(jnp.int32) << 23)
    power = lax.bitcast_convert_type(bits, jnp.float32)
    return jnp.where(byte == 255, jnp.float32(np.nan), power)


def quantize_fp8(x, block=None, *, power_of_two=False):
    """e4m3 codes `[..., n]` and float32 scales `[..., n / block]`, one a block of channels (None: all n)."""
    blocks = _blocks(x, block)
    top = jnp.maximum(_largest(blocks), _FLOOR)
    if power_of_two:
        scale = power_of_two_scale(top, _E4M3)
        values = blocks * reciprocal(scale)[..., None]
    else:
        scale = top * np.float32(1 / _E4M3)
        values = blocks / scale[..., None]
    codes = stored(jnp.clip(values, -_E4M3, _E4M3).astype(jnp.float8_e4m3fn))
    return codes.reshape(x.shape), scale


def dequantize_fp8(codes, scale, dtype=jnp.float32):
    """`codes · scale` in float32, rounded to `dtype` (exact in bfloat16 for scales that are powers of two)."""
    blocks = codes.astype(jnp.float32).reshape(*scale.shape, codes.shape[-1] // max(scale.shape[-1], 1))
    return (blocks * scale[..., None]).reshape(codes.shape).astype(dtype)


def quantize_fp4(x, block=32):
    """e2m1 codes, uint8 `[..., n / 2]`, and ue8m0 scales, uint8 `[..., n / block]`, of `x [..., n]`."""
    blocks = _blocks(x, block)
    scale = power_of_two_scale(_largest(blocks), _E2M1)
    codes = encode_e2m1(blocks * reciprocal(scale)[..., None]).reshape(*x.shape[:-1], x.shape[-1] // 2, 2)
    return codes[..., 0] | (codes[..., 1] << 4), encode_ue8m0(scale)


def dequantize_fp4(codes, scales, dtype=jnp.float32):
    """The numbers that `quantize_fp4` kept, `[..., n]`: exact in float32 and in bfloat16."""
    nibbles = jnp.stack([codes & 15, codes >> 4], axis=-1).reshape(*scales.shape, -1)
    values = decode_e2m1(nibbles) * decode_ue8m0(scales)[..., None]
    return values.reshape(*codes.shape[:-1], 2 * codes.shape[-1]).astype(dtype)


def encode_e2m1(x):
    """The nibble of each float32, uint8, 0..15; magnitudes past 6 saturate, NaN gives 0."""
    size = jnp.abs(x)
    # Midpoints go to the even one of two neighbouring codes.
    code = sum((size > m).astype(jnp.uint8) for m in (0.25, 1.25, 2.5, 5.0))
    code = code + sum((size >= m).astype(jnp.uint8) for m in (0.75, 1.75, 3.5))
    return code | (jnp.signbit(x).astype(jnp.uint8) << 3)


def decode_e2m1(nibble):
    table = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    return jnp.asarray(np.concatenate([table, -table]))[nibble.astype(jnp.int32)]


def pack_latent(latent, rope):
    """Rows of 656 bytes, uint8, of `latent [..., 512]` and `rope [..., 64]`: e4m3 codes, four float32 scales (one for
    128 channels, powers of two), and the rope part in bfloat16."""
    codes, scale = quantize_fp8(latent, 128, power_of_two=True)
    rope = stored(rope.astype(jnp.bfloat16))
    return jnp.concatenate([bytes_of(codes), bytes_of(scale), bytes_of(rope)], axis=-1)


def unpack_latent(rows, dtype=jnp.float32):
    """`[..., 576]` of `dtype`, latent before rope, of uint8 rows `[..., 656]`."""
    codes, scale, rope = jnp.split(rows, [LATENT, ROW_BYTES - 2 * ROPE], axis=-1)
    latent = dequantize_fp8(from_bytes(codes, jnp.float8_e4m3fn), from_bytes(scale, jnp.float32), dtype)
    return jnp.concatenate([latent, from_bytes(rope, jnp.bfloat16).astype(dtype)], axis=-1)


def pack_index_pages(codes, scales):
    """Pages of index keys, uint8 `[P, page · (n + 4)]`: all e4m3 codes `[P, page, n]`, then all float32 scales."""
    return jnp.concatenate([bytes_of(codes).reshape(codes.shape[0], -1), bytes_of(scales)], axis=-1)


def unpack_index_pages(pages, page_size, dim=128):
    """`(codes [P, page, dim] e4m3, scales [P, page] float32)` of `pack_index_pages`."""
    codes, scales = jnp.split(pages, [page_size * dim], axis=-1)
    codes = from_bytes(codes.reshape(-1, page_size, dim), jnp.float8_e4m3fn)
    return codes, from_bytes(scales, jnp.float32)


@jax.jit
def hadamard(x):
    """`x [.., n]` times the normalised Walsh-Hadamard matrix of n channels, a power of two; its own inverse.

    Computed in float32 (float64 for float64), returned in the dtype of x. Index queries and keys are turned by it
    before they are rounded, which spreads outliers over all channels and changes no product.

    Raises:
        ValueError: n is no power of two.

    Example:
        >>> import jax.numpy as jnp, jattn
        >>> jattn.hadamard(jnp.array([1.0, 0.0, 0.0, 0.0])).tolist()
        [0.5, 0.5, 0.5, 0.5]

    Source: DeepSeek-V3.2 (2025).
    """
    n = x.shape[-1]
    if n & (n - 1) or n == 0:
        raise ValueError(f"x has {n} channels; the Hadamard transform needs a power of two")
    y, step = x.astype(jnp.float32) if x.dtype.itemsize < 4 else x, 1
    while step < n:
        pairs = y.reshape(*x.shape[:-1], n // (2 * step), 2, step)
        a, b = pairs[..., 0, :], pairs[..., 1, :]
        y = jnp.stack([a + b, a - b], axis=-2).reshape(x.shape)
        step *= 2
    return (y * np.asarray(1 / math.sqrt(n), y.dtype)).astype(x.dtype)


def _blocks(x, block):
    n = x.shape[-1]
    block = n if block is None else block
    if block <= 0 or n % block:
        raise ValueError(f"x has {n} channels, no multiple of the block of {block} that shares a scale")
    return x.astype(jnp.float32).reshape(*x.shape[:-1], n // block, block)


def _largest(blocks):
    return jnp.max(jnp.abs(blocks), axis=-1)

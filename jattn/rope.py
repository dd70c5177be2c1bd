"""Rotary position embedding, exact to float32 rounding at every int32 position."""

import dataclasses
import math
import numbers

import jax
import jax.numpy as jnp
import numpy as np

from jattn._philox import mulhi


def _positive(name, value):
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be a Python number, got {type(value).__name__}")
    if not 0 < value < math.inf:
        raise ValueError(f"{name}={value} must be positive and finite")


@dataclasses.dataclass(frozen=True)
class LinearScaling:
    """Position interpolation: every frequency is divided by factor (Chen et al., arXiv:2306.15595)."""

    factor: float

    def __post_init__(self):
        _positive("factor", self.factor)

    def __call__(self, frequencies):
        return frequencies / self.factor


@dataclasses.dataclass(frozen=True)
class Llama3Scaling:
    """The frequencies of Llama 3.1 and later: long wavelengths are divided by factor, short ones kept.

    A wavelength above original_length / low_freq_factor tokens is divided, one below original_length / high_freq_factor
    is kept, and between the two the frequency is interpolated linearly in original_length / wavelength ("NTK-by-parts",
    Peng et al., arXiv:2309.00071, section 3.2; the constants are those of the Llama 3.1 release).
    """

    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_length: int = 8192

    def __post_init__(self):
        for field in dataclasses.fields(self):
            _positive(field.name, getattr(self, field.name))
        if self.low_freq_factor >= self.high_freq_factor:
            raise ValueError(
                f"low_freq_factor={self.low_freq_factor} must be below high_freq_factor={self.high_freq_factor}"
            )

    def __call__(self, frequencies):
        turns = self.original_length * frequencies / (2 * np.pi)
        kept = np.clip((turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor), 0, 1)
        return frequencies * (kept + (1 - kept) / self.factor)


def _cos_sin(positions, frequencies, dtype):
    """cos and sin [..., R // 2] in dtype of positions [...] times frequencies [R // 2], NumPy float64 in radians."""
    if dtype == jnp.float64 or positions.dtype.itemsize == 8:
        angles = positions.astype(jnp.float64)[..., None] * frequencies
        return jnp.cos(angles).astype(dtype), jnp.sin(angles).astype(dtype)
    # A product in float32 is off by 6e-8 of the angle, 0.06 rad at position 10**6. Turns in 64-bit fixed point wrap for
    # free: the upper word of position · fraction is the phase to 2**-32 turns at every position.
    fractions = [int(turns * 2.0**64) % 2**64 for turns in (frequencies / (2 * np.pi)).tolist()]
    high, low = np.array([divmod(fraction, 2**32) for fraction in fractions], np.uint32).reshape(-1, 2).T
    p = positions.astype(jnp.int32 if jnp.issubdtype(positions.dtype, jnp.signedinteger) else jnp.uint32)[..., None]
    count = p.astype(jnp.uint32)
    # Two's complement reads a negative position 2**32 too high, which mulhi turns into one low too many.
    phase = count * high + mulhi(count, jnp.asarray(low)) - jnp.where(p < 0, low, np.uint32(0))
    angles = jax.lax.bitcast_convert_type(phase, jnp.int32).astype(dtype) * np.asarray(2 * np.pi / 2**32, dtype)
    return jnp.cos(angles), jnp.sin(angles)


def _check(x, positions, base, rotary_dim, scaling):
    """(x, positions, rotary_dim) as arrays and an int, or the error."""
    x = jnp.asarray(x)
    if x.ndim < 3:
        raise ValueError(f"x must be [*B, T, N, H], got shape {x.shape}")
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"x must be floating point, got {x.dtype}")
    T, H = x.shape[-3], x.shape[-1]
    positions = jnp.arange(T, dtype=jnp.int32) if positions is None else jnp.asarray(positions)
    if not jnp.issubdtype(positions.dtype, jnp.integer):
        raise TypeError(f"positions must be integers, got {positions.dtype}")
    if positions.shape not in ((T,), x.shape[:-2]):
        raise ValueError(f"positions shape {positions.shape} must be [T] or [*B, T] of x, {(T,)} or {x.shape[:-2]}")
    _positive("base", base)
    if scaling is not None and not isinstance(scaling, LinearScaling | Llama3Scaling):
        raise TypeError(f"scaling must be None, LinearScaling or Llama3Scaling, got {type(scaling).__name__}")
    if rotary_dim is None:
        if H % 2:
            raise ValueError(f"head dim H={H} must be even; pass an even rotary_dim to rotate a part of it")
        return x, positions, H
    if isinstance(rotary_dim, bool) or not isinstance(rotary_dim, numbers.Integral):
        raise TypeError(f"rotary_dim must be an int, got {type(rotary_dim).__name__}")
    if rotary_dim % 2 or not 0 < rotary_dim <= H:
        raise ValueError(f"rotary_dim={rotary_dim} must be even and in [2, H={H}]")
    return x, positions, int(rotary_dim)


def rope(x, positions=None, *, base=10000.0, rotary_dim=None, scaling=None, interleaved=False):
    """Rotates pairs of head channels by an angle proportional to the position (rotary position embedding).

    Pair i of R = rotary_dim channels turns by position · base ** (-2i / R) radians, so that the product of a rotated
    query and a rotated key depends on the difference of their positions alone.

    Args:
      x: queries or keys [*B, T, N, H], floating point.
      positions: integers [*B, T], or [T] for the whole batch; default 0..T-1. Negative ones rotate backwards:
        `rope(rope(x, p), -p)` is x.
      base: the base of the frequencies, a positive Python number.
      rotary_dim: how many leading channels rotate, even; default all H. The others pass through unchanged.
      scaling: None, `LinearScaling(...)` or `Llama3Scaling(...)`, a change of the frequencies for long contexts.
      interleaved: False pairs channels (i, i + R/2), as GPT-NeoX and Llama in Hugging Face; True pairs (2i, 2i + 1),
        as GPT-J and the original Llama weights.

    Returns:
      An array of x's shape and dtype. Angles, sines and products are float32, or float64 for float64 inputs; the angle
      is right to 1e-6 rad at every int32 position (float32 products are off by 0.06 at 10**6). Differentiable in x.

    Raises:
      TypeError: x not floating point, positions not integers, options of another type.
      ValueError: shapes that do not fit, an odd or too large rotary_dim, a base that is not positive.

    Example:
      >>> q, k = jattn.rope(q, positions), jattn.rope(k, positions)
      >>> out = jattn.attention(q, k, v, is_causal=True)

    Source: Su et al., RoFormer, arXiv:2104.09864.
    """
    x, positions, rotary_dim = _check(x, positions, base, rotary_dim, scaling)
    frequencies = float(base) ** (-np.arange(0, rotary_dim, 2, dtype=np.float64) / rotary_dim)
    if scaling is not None:
        frequencies = scaling(frequencies)
    dtype = jnp.float64 if x.dtype == jnp.float64 else jnp.float32
    cos, sin = (a[..., None, :] for a in _cos_sin(positions, frequencies, dtype))  # [*B or none, T, 1, R // 2]

    turning = x[..., :rotary_dim].astype(dtype)
    if interleaved:
        first, second = turning[..., 0::2], turning[..., 1::2]
    else:
        first, second = jnp.split(turning, 2, axis=-1)
    pair = first * cos - second * sin, second * cos + first * sin
    turned = jnp.stack(pair, axis=-1).reshape(turning.shape) if interleaved else jnp.concatenate(pair, axis=-1)
    return jnp.concatenate([turned.astype(x.dtype), x[..., rotary_dim:]], axis=-1)

"""int8 and fp8 keys and values with scales: half the bytes of a bfloat16 cache, folded back inside attention.

A scale belongs to the whole tensor, to a head, or to one token of one head; attention multiplies scores by the scale of
the key and weights by the scale of the value, so that no dequantised copy of a cache is ever made.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jattn import _formats

__all__ = ["Quantized", "dequantize", "quantize"]

#: storage dtype -> the largest magnitude that is used
LARGEST = {"int8": 127.0, "float8_e4m3fn": 448.0}
_PER = ("tensor", "head", "token")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Quantized:
    """`values · scale`, a pytree: what `decode_attention` and a `PagedCache` take in the place of an array.

    values: int8 or float8_e4m3fn `[..., S, K, H]`. scale: float32, `[]` for the tensor, `[K]` one a head, or
    `[..., S, K]` one a token and head.

    Example:
        >>> import jax, jattn
        >>> k = jattn.quantize(jax.random.normal(jax.random.key(0), (2, 100, 4, 64)))
        >>> k.shape, k.scale.shape
        ((2, 100, 4, 64), (2, 100, 4))
    """

    values: Any
    scale: Any

    @property
    def shape(self):
        return self.values.shape

    @property
    def dtype(self):
        return self.values.dtype

    @property
    def per(self) -> str:
        """What one scale belongs to: "tensor", "head" or "token"."""
        kinds = {(): "tensor", self.values.shape[-2:-1]: "head", self.values.shape[:-1]: "token"}
        if self.scale.shape not in kinds:
            raise ValueError(f"scale has shape {self.scale.shape}; expected one of {', '.join(map(str, kinds))}")
        return kinds[self.scale.shape]


def quantize(x, dtype="int8", *, per: str = "token", scale=None) -> Quantized:
    """Rounds `x` to int8 or fp8, to the nearest multiple that its scale allows.

    A scale is the largest magnitude that it belongs to, divided by that of the dtype (127 or 448). NaN and Inf then
    make NaN of what shares their scale. Under a scale that is given, larger magnitudes, Inf included, saturate, and NaN
    is NaN in fp8 and 0 in int8.

    Args:
        x: floating-point `[..., S, K, H]`.
        dtype: "int8" or "float8_e4m3fn".
        per: what has a scale of its own: "token" (each token of each head), "head" or "tensor".
        scale: positive scales to use, float `[]`, `[K]` or `[..., S, K]`, in the place of `per`.

    Returns:
        A `Quantized` with float32 scales.

    Raises:
        ValueError: shape, `per`, or the shape of `scale`. TypeError: dtypes.

    Example:
        >>> import jax, jattn
        >>> x = jax.random.normal(jax.random.key(0), (100, 4, 64))
        >>> bool(abs(jattn.dequantize(jattn.quantize(x)) - x).max() < 0.03)
        True

    Source: symmetric rounding to nearest, per token and head as vLLM's quantised caches have it.
    """
    if not hasattr(x, "dtype") or not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"x must be a floating-point array, not {getattr(x, 'dtype', type(x).__name__)}")
    if x.ndim < 3:
        raise ValueError(f"x has shape {x.shape}; expected [..., S, K, H]")
    dtype = storage(dtype)
    if per not in _PER:
        raise ValueError(f"per={per!r} must be one of {', '.join(map(repr, _PER))}")
    x, largest = jnp.asarray(x).astype(jnp.float32), LARGEST[dtype.name]
    if scale is None:
        scale = _scale(x, per, largest)
    scale = jnp.asarray(scale)
    if not jnp.issubdtype(scale.dtype, jnp.floating):
        raise TypeError(f"scale must be floating-point, not {scale.dtype}")
    found = Quantized(x, scale.astype(jnp.float32))
    values = jnp.clip(x / over_values(found), -largest, largest)
    if dtype == jnp.int8:
        values = jnp.round(jnp.nan_to_num(values))
    return dataclasses.replace(found, values=_formats.stored(values.astype(dtype)))


def dequantize(x: Quantized, dtype=jnp.float32):
    """`values · scale`, computed in float32 and rounded to `dtype`.

    Args:
        x: a `Quantized`, `[..., S, K, H]`.
        dtype: a floating dtype.

    Returns:
        `[..., S, K, H]` of `dtype`.

    Raises:
        TypeError: `x` is not a `Quantized`. ValueError: its scale has another shape than `quantize` gives.

    Example:
        >>> y = jattn.dequantize(jattn.quantize(x), x.dtype)
    """
    if not isinstance(x, Quantized):
        raise TypeError(f"x must be a jattn.Quantized, not {type(x).__name__}")
    return (x.values.astype(jnp.float32) * over_values(x)).astype(dtype)


def over_values(x: Quantized):
    """The scales of `x`, broadcastable to its values."""
    return x.scale if x.per == "tensor" else x.scale[..., None]


def storage(dtype) -> jnp.dtype:
    """`dtype`, if values may be stored in it."""
    dtype = jnp.dtype(dtype)
    if dtype.name not in LARGEST:
        raise TypeError(f"dtype={dtype.name} must be one of {', '.join(LARGEST)}")
    return dtype


def _scale(x, per, largest):
    axes = {"tensor": None, "token": -1, "head": tuple(i for i in range(x.ndim) if i != x.ndim - 2)}[per]
    top = jnp.max(jnp.abs(x), axis=axes, initial=0)
    # Not 0 where all is 0, and no subnormal number, which a device may take for 0.
    return jnp.maximum(top / largest, jnp.finfo(jnp.float32).tiny)

"""The linear layers and norms around latent attention: products in the accumulator's dtype, one voice for misfits."""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
from jax import lax

from jattn._problem import accumulator


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def normal(key, shapes, fan_in, dtype):
    """Normal arrays of these shapes, of variance 1 / fan_in each."""
    ends = list(itertools.accumulate(math.prod(shape) for shape in shapes))
    drawn = jnp.split(jax.random.normal(key, (ends[-1],), "float32"), ends[:-1])
    return [(x * n**-0.5).astype(dtype).reshape(s) for x, s, n in zip(drawn, shapes, fan_in, strict=True)]


def product(equation, x, y, rounded=True):
    """An einsum in the accumulator's dtype, in which `b` is any number of batch axes; `rounded` to the dtype of x."""
    dtype = accumulator(x.dtype)
    precision = lax.Precision.HIGHEST if x.dtype == dtype else None
    found = jnp.einsum(equation.replace("b", "..."), x, y, precision=precision, preferred_element_type=dtype)
    return found.astype(x.dtype) if rounded else found


def rms_norm(x, gain, eps):
    wide = x.astype(accumulator(x.dtype))
    wide = wide * lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return (wide * gain.astype(wide.dtype)).astype(x.dtype)


def layer_norm(x, gain, bias, eps):
    wide = x.astype(accumulator(x.dtype))
    wide = wide - jnp.mean(wide, axis=-1, keepdims=True)
    wide = wide * lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return (wide * gain.astype(wide.dtype) + bias.astype(wide.dtype)).astype(x.dtype)


def rotated(rotate, y, positions):
    """`rotate(y, positions)`, which must keep shape and dtype; y itself without one."""
    if rotate is None:
        return y
    turned = rotate(y, positions)
    if turned.shape != y.shape or turned.dtype != y.dtype:
        raise ValueError(f"rotate returned {turned.dtype} {turned.shape} for {y.dtype} {y.shape}; it must keep both")
    return turned


def fits(weights, shapes, dtype):
    """Refuses weights of other shapes than `shapes`, by name, or of another dtype than x."""
    for name, want in shapes.items():
        x, full = getattr(weights, name), f"{type(weights).__name__}.{name}"
        if x.shape != want:
            raise ValueError(f"{full} has shape {x.shape}; expected {want} to fit x and the other weights")
        if x.dtype != dtype:
            raise TypeError(f"{full} dtype {x.dtype} must equal x's {dtype}")

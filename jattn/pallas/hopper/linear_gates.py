"""Gates, activations and norms of linear attention, in float32, of the functions that Mosaic has and as exact as XLA's.

Their arguments are arrays of any layout, or scalars.
"""

import jax.numpy as jnp
from jax import lax

from jattn._linear import NORM_EPS

# Whatever a token before it wrote is 0 in float32 after such a decay; less would take digits from others' sums.
LEAST = -128.0
LOG2_E = 1.4426950408889634


def log_decay(options, x, A_log, dt_bias):
    """The log of the decay, `<= 0`, from g or a raw gate; A_log and dt_bias (or None) are like x or scalars."""
    if options.gate is None:
        return x
    if options.gate == "clipped":
        return jnp.maximum(x, jnp.float32(options.lower_bound))
    x = x if dt_bias is None else x + dt_bias
    rate = None if A_log is None else jnp.exp(A_log)
    if options.gate == "softplus":
        return -(rate * softplus(x))
    return jnp.float32(options.lower_bound) * sigmoid(x if rate is None else rate * x)


def activated(options, beta):
    if options.beta_activation is None:
        return beta
    return sigmoid(beta) * jnp.float32(2 if options.beta_activation == "sigmoid2" else 1)


def sigmoid(x):
    return 1 / (1 + jnp.exp(-x))


def softplus(x):
    """log(1 + exp(x)), to a relative error of a few 1e-7 where it is small."""
    y = jnp.exp(-jnp.abs(x))
    s = y / (2 + y)  # log1p(y) = 2 artanh(s), s <= 1/3
    return jnp.maximum(x, 0) + 2 * s * _polynomial(s * s, [1 / n for n in (15, 13, 11, 9, 7, 5, 3, 1)])


def decay_factors(g):
    """`(one, rest)` with exp(g) = one + rest, where one is 0 or 1: a decay near 1 is not rounded to the grid of numbers
    near 1 (see `reference.linear_recurrent.decayed`)."""
    near, series = g > -0.5, _polynomial(g, [1 / n for n in (40320, 5040, 720, 120, 24, 6, 2, 1)])
    return jnp.where(near, jnp.float32(1), jnp.float32(0)), jnp.where(near, series * g, jnp.exp(g))


def _polynomial(x, coefficients):
    """Of the highest power first."""
    value = coefficients[0]
    for c in coefficients[1:]:
        value = x * jnp.float32(value) + jnp.float32(c) if isinstance(value, float) else value * x + jnp.float32(c)
    return value


def inverse_norm(squares):
    """1 over the length of a vector with this sum of squares."""
    return lax.rsqrt(squares + jnp.float32(NORM_EPS))

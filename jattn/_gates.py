"""Gates of linear attention, as every implementation computes them outside its kernels."""

import jax
import jax.numpy as jnp


def log_decay(x, A_log, dt_bias, gate, lower_bound):
    """The log of the decay from a raw gate; A_log and dt_bias (or None) broadcast to it."""
    x = x if dt_bias is None else x + dt_bias
    rate = jnp.ones((), x.dtype) if A_log is None else jnp.exp(A_log)
    if gate == "softplus":
        return -rate * jax.nn.softplus(x)
    return jnp.asarray(lower_bound, x.dtype) * jax.nn.sigmoid(rate * x)


def activated(beta, activation):
    """The learning rate from what its activation makes one of."""
    if activation is None:
        return beta
    return jax.nn.sigmoid(beta) * jnp.asarray(2 if activation == "sigmoid2" else 1, beta.dtype)

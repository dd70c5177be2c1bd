"""Gates of linear attention, as every implementation computes them outside its kernels."""

import jax
import jax.numpy as jnp


def log_decay(x, A_log, dt_bias, gate, lower_bound):
    """The log of the decay from what a gate is given; A_log and dt_bias (or None) broadcast to it."""
    if gate == "clipped":  # not a maximum, which halves the gradient of decays at the bound
        return jnp.where(x < lower_bound, jnp.asarray(lower_bound, x.dtype), x)
    x = x if dt_bias is None else x + dt_bias
    rate = jnp.ones((), x.dtype) if A_log is None else jnp.exp(A_log)
    if gate == "softplus":
        return -rate * jax.nn.softplus(x)
    return jnp.asarray(lower_bound, x.dtype) * jax.nn.sigmoid(rate * x)


def log_decays(arrays, options, dtype):
    """Those of a call's `Arrays` with its `Options`, in dtype; None without decay."""
    g, A_log, dt_bias = (None if x is None else x.astype(dtype) for x in (arrays.g, arrays.A_log, arrays.dt_bias))
    if g is None or options.gate is None:
        return g
    if A_log is not None and options.rule.decay == "channel":
        A_log = A_log[:, None]
    return log_decay(g, A_log, dt_bias, options.gate, options.lower_bound)


def activated(beta, activation):
    """The learning rate from what its activation makes one of."""
    if activation is None:
        return beta
    return jax.nn.sigmoid(beta) * jnp.asarray(2 if activation == "sigmoid2" else 1, beta.dtype)

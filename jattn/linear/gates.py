"""Decay gates and the L2 norm as functions of their own; the ops have them built in."""

import jax.numpy as jnp

from jattn import _gates
from jattn._problem import accumulator
from jattn.linear import _call
from jattn.reference import linear_operands

__all__ = ["gdn_gate", "kda_gate", "l2_norm"]


def kda_gate(x, A_log, dt_bias=None, *, gate: str = "softplus", lower_bound: float = -5.0):
    """The log of the decay of each channel, from a raw gate. More of x is more forgetting.

        "softplus"   −exp(A_log) · softplus(x + dt_bias)                      at most 0
        "bounded"    lower_bound · sigmoid(exp(A_log) · (x + dt_bias))        between lower_bound and 0

    Args:
        x: floating-point `[*B, T, N, H]`.
        A_log: `[N]`; None is 0, for "bounded" only.
        dt_bias: `[N, H]` or `[N · H]`; None is 0.
        gate: "softplus" or "bounded".
        lower_bound: in [-5, 0).

    Returns:
        `[*B, T, N, H]`, float32 (float64 for float64): what `kda` takes as g.

    Raises:
        ValueError, TypeError: an argument is wrong (the message names it and its value).

    Example:
        >>> import jax.numpy as jnp, jattn
        >>> float(jattn.linear.kda_gate(jnp.zeros((1, 2, 4)), None, gate="bounded")[0, 0, 0])
        -2.5

    Source: Kimi Team, "Kimi Linear" (2025); Mamba's discretisation for "softplus" (Gu, Dao, 2023).
    """
    x = _call.floating(x, "x")
    if x.ndim < 2:
        raise ValueError(f"x has shape {x.shape}; expected [*B, T, N, H]")
    return _gated(x, A_log, dt_bias, gate, lower_bound, *x.shape[-2:])


def gdn_gate(x, A_log, dt_bias=None, *, gate: str = "softplus", lower_bound: float = -5.0):
    """`kda_gate` for one number a head: what `gated_delta_rule` takes as g.

    Args:
        x: floating-point `[*B, T, N]`.
        A_log: `[N]`; None is 0, for "bounded" only.
        dt_bias: `[N]`; None is 0.
        gate, lower_bound: as in `kda_gate`.

    Returns:
        `[*B, T, N]`, float32 (float64 for float64).

    Raises:
        ValueError, TypeError: an argument is wrong (the message names it and its value).

    Example:
        >>> import jax.numpy as jnp, jattn
        >>> round(float(jattn.linear.gdn_gate(jnp.zeros((2, 4)), jnp.zeros(4))[0, 0]), 4)
        -0.6931

    Source: Yang, Kautz, Hatamizadeh, "Gated Delta Networks" (2024).
    """
    x = _call.floating(x, "x")
    if x.ndim < 1:
        raise ValueError(f"x has shape {x.shape}; expected [*B, T, N]")
    return _gated(x, A_log, dt_bias, gate, lower_bound, x.shape[-1], None)


def l2_norm(x):
    """`x / sqrt(Σ x² + 1e-6)` along the last axis, computed in float32 and rounded to the dtype of x once.

    Args:
        x: floating-point `[..., H]`.

    Returns:
        `[..., H]` in the same dtype.

    Raises:
        TypeError: x is not floating-point.

    Example:
        >>> import jax.numpy as jnp, jattn
        >>> [round(float(y), 3) for y in jattn.linear.l2_norm(jnp.array([3.0, 4.0]))]
        [0.6, 0.8]

    Source: the normalisation of queries and keys in Yang et al. (2024).
    """
    x = _call.floating(x, "x")
    return linear_operands.unit(x.astype(accumulator(x.dtype))).astype(x.dtype)


def _gated(x, A_log, dt_bias, gate, lower_bound, N, H):
    A_log, dt_bias = _call.gate_parameters(_call.choice(gate, "gate", _call.RAW_GATES), A_log, dt_bias, N, H)
    dtype = accumulator(x.dtype)
    A_log, dt_bias = (None if a is None else a.astype(dtype) for a in (A_log, dt_bias))
    if A_log is not None and H is not None:
        A_log = A_log[:, None]
    return _gates.log_decay(jnp.asarray(x, dtype), A_log, dt_bias, gate, _call.bound(lower_bound))

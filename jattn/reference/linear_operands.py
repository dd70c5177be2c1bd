"""From what a caller gives to what the recurrence takes: L2 norm, gate, activation of beta, scale, groups of heads."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jattn._gates import activated, log_decays
from jattn._linear import NORM_EPS
from jattn._problem import accumulator

TOKENS = ("query", "key", "value", "g", "beta")  # arrays of a call with an axis of tokens


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Operands:
    """C tokens of each of s chunks, in the accumulator's dtype. Rows that do not exist are 0 throughout."""

    q: Any  # [B, N, s, C, H], scaled
    k: Any  # [B, N, s, C, H]
    v: Any  # [B, N, s, C, D]
    g: Any  # [B, N, s, C, H or 1]
    beta: Any  # [B, N, s, C, 1] or None

    def chunk(self, i):
        """[B, N, C, ...]."""
        return jax.tree.map(lambda x: x[:, :, i], self)


def operands(rows, exists, options) -> Operands:
    """Operands of `rows`, the `Arrays` of tokens `[B, s, C, ...]`; `exists` is bool [s, C] or [B, 1, C]."""
    N, dtype = rows.value.shape[-2], accumulator(rows.query.dtype)
    q, k, v = (x.astype(dtype) for x in (rows.query, rows.key, rows.value))
    if options.qk_l2norm:
        q, k = unit(q), unit(k)
    q = q * jnp.asarray(options.scale if rows.scale is None else rows.scale, dtype)
    q, k = (_expand(x, N) for x in (q, k))
    g = log_decays(rows, options, dtype)
    if g is None:
        g = jnp.zeros((*v.shape[:-1], 1), dtype)
    elif options.rule.decay == "head":
        g = g[..., None]
    beta = None
    if options.rule.delta:
        beta = activated(rows.beta.astype(dtype), options.beta_activation)[..., None]
        beta = jnp.where(exists[..., None, None], beta, 0)
    g = jnp.where(exists[..., None, None], g, 0)
    return Operands(*(None if x is None else jnp.moveaxis(x, 3, 1) for x in (q, k, v, g, beta)))


def unit(x):
    """x over its length along the last axis."""
    return x * lax.rsqrt(_total(x * x) + jnp.asarray(NORM_EPS, x.dtype))


def _total(x):
    """Sum along the last axis, kept, by halves: the order of a reduction may depend on the size of the batch."""
    while (n := x.shape[-1]) > 1:
        half = n // 2
        rest = x[..., 2 * half :]
        x = x[..., :half] + x[..., half : 2 * half]
        x = jnp.concatenate([x, rest], axis=-1) if n % 2 else x
    return x


def einsum(spec, *operands):
    """In the precision of the operands: no TF32, no bfloat16 passes."""
    return jnp.einsum(spec, *operands, precision=lax.Precision.HIGHEST)


def _expand(x, N):
    """[..., K, H] -> [..., N, H]. Only a few chunks of tokens ever have all heads at once."""
    K = x.shape[-2]
    if K == N:
        return x
    x = jnp.broadcast_to(x[..., None, :], (*x.shape[:-1], N // K, x.shape[-1]))
    return x.reshape(*x.shape[:-3], math.prod(x.shape[-3:-1]), x.shape[-1])

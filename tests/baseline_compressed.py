"""The yardstick of the error rule for compressed attention: plain jnp over dense arrays, in the input dtype.

Sums and softmax are float32 (float64 for float64 inputs) and left to XLA; weights are cast to the input dtype before
they are multiplied.
"""

import jax
import jax.numpy as jnp
import numpy as np


def accumulator(x):
    return jnp.float64 if x.dtype == jnp.float64 else jnp.float32


def entries(u, z, ape, norm, overlap, rotary, dtype=None):
    """[B, T // m, c] of u, z [B, T, C], all blocks at once."""
    m, C = ape.shape
    B, E, acc, dtype = u.shape[0], u.shape[1] // m, accumulator(u), dtype or u.dtype
    u, z = (x[:, : E * m].reshape(B, E, m, C) for x in (u, z))
    z = z.astype(acc) + ape.astype(acc)
    if overlap:
        u, z = (
            jnp.concatenate([jnp.pad(x[:, :-1], [(0, 0), (1, 0), (0, 0), (0, 0)], constant_values=fill)[..., : C // 2],
                             x[..., C // 2 :]], 2)
            for x, fill in ((u, 0), (z, -jnp.inf))
        )  # fmt: skip
    entry = (jax.nn.softmax(z, 2).astype(u.dtype) * u).sum(2).astype(acc)
    entry = entry / jnp.sqrt((entry * entry).mean(-1, keepdims=True) + np.asarray(1e-6, acc)) * norm.astype(acc)
    return rotary(entry.astype(dtype), m * jnp.arange(E, dtype=jnp.int32))


def attention(query, kv, u, z, ape, norm, sinks, *, chosen, overlap, scale, window, rotary):
    """(out [B, T, N, D], lse [B, T, N]); chosen bool [B, T, E] says which entries a query attends to."""
    T, acc, dtype = query.shape[1], accumulator(query), query.dtype
    position = jnp.arange(T, dtype=jnp.int32)
    query, kv = rotary(query, position[:, None]), rotary(kv, position)
    rows = jnp.concatenate([kv, entries(u, z, ape, norm, overlap, rotary, dtype)], 1)
    distance = np.arange(T)[:, None] - np.arange(T)
    near = np.broadcast_to((distance >= 0) & (distance < window), (query.shape[0], T, T))
    seen = np.concatenate([near, chosen], -1)[:, :, None]
    scores = jnp.einsum("btnd,bsd->btns", query, rows, preferred_element_type=acc) * np.asarray(scale, acc)
    sink = jnp.broadcast_to(sinks.astype(acc)[:, None], (*scores.shape[:-1], 1))
    scores = jnp.concatenate([jnp.where(seen, scores, -jnp.inf), sink], -1)
    weights = jax.nn.softmax(scores, -1)[..., :-1].astype(dtype)
    out = jnp.einsum("btns,bsd->btnd", weights, rows, preferred_element_type=acc).astype(dtype)
    return rotary(out, position[:, None], inverse=True), jax.nn.logsumexp(scores, -1)

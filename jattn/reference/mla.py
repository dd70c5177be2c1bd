"""Attention over a cache of latent rows in plain JAX: the walk of `reference.paged`, for keys that are the values too.

Rows lie in the cache without an axis for their one head, as numbers or as 656 bytes each, and are unpacked as fetched.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from jattn import _formats
from jattn.reference import attention, paged


def forward(arrays, options):
    """`(out, lse)` in the accumulator's dtype; `arrays.key` are rows `[P, page, C + R]`, or uint8 `[P, page, 656]`."""
    walk = _Walk(arrays, options)
    state = (
        walk.full((walk.T, walk.N, walk.D), 0, walk.dtype),
        walk.full((walk.T, walk.N), -jnp.inf, walk.dtype),
        walk.full((walk.T, walk.N), 0, walk.dtype),
    )
    out, lse, _ = walk.over_strips(lambda one, strip, state: attention._forward_strip(one, strip, state), state)
    shape = arrays.query.shape[:-1]
    return out.reshape(*shape, walk.D), lse.reshape(shape)


class _Walk(paged.Walk):
    def __init__(self, arrays, options):
        P, page, _ = arrays.key.shape
        rows = jax.ShapeDtypeStruct((P, page, 1, arrays.query.shape[-1]), arrays.query.dtype)
        super().__init__(dataclasses.replace(arrays, key=rows, value=rows), options)
        self.key, self.value, self._fetched = arrays.key, None, None

    def keys_of(self, x, tile, key_ok):
        """`([1, 1, block_k, C + R] in the query's dtype, None)` of a split; as values, the keys just fetched."""
        if x is None:
            return self._fetched
        exists, index = key_ok[0, 0, 0, :], tile.key_index[0, 0, 0]
        page = jnp.take(self.table, index // self.page_size, mode="clip")
        rows = x.at[jnp.clip(page, 0, self.P - 1), index % self.page_size].get(mode="promise_in_bounds")
        rows = lax.optimization_barrier(jnp.where(exists[:, None], rows, jnp.zeros((), x.dtype)))
        rows = _formats.unpack_latent(rows, self.query.dtype) if x.dtype == jnp.uint8 else rows
        self._fetched = rows[None, None], None
        return self._fetched

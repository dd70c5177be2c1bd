"""Tokens for heads: from a device's own tokens of all heads to all tokens of its own heads, and back.

Source: Jacobs et al., "DeepSpeed Ulysses" (arXiv:2309.14509).
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jattn._mask_rules import Blocks
from jattn._problem import accumulator
from jattn._ring import map_mask
from jattn._varying import vary, varying_axes


def all_to_all(x, name, split, concat):
    """Cuts axis `split` into a part a device, and puts those of all devices together along axis `concat`."""
    return lax.all_to_all(x, name, split_axis=split, concat_axis=concat, tiled=True)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _replicated(name, count, x):
    """Keys `[B, T, K, H]`, each head `count` times, exchanged; in the accumulator's dtype, so that gradients are."""
    return all_to_all(jnp.repeat(x, count, 2), name, 2, 1).astype(accumulator(x.dtype))


def _replicated_backward(name, count, like, g):
    g = all_to_all(g, name, 1, 2)
    return (jnp.sum(g.reshape(*g.shape[:2], g.shape[2] // count, count, g.shape[3]), 3).astype(like.dtype),)


_replicated.defvjp(
    lambda name, count, x: (_replicated(name, count, x), jnp.zeros((), x.dtype)), _replicated_backward
)


@dataclasses.dataclass(frozen=True)
class Exchange:
    """From a device's tokens of all heads to all tokens of its heads; `restore(x, axis)` puts these in order."""

    name: str
    T: int
    N: int
    restore: Any

    def to_heads(self, arrays, context, mod):
        size, K = lax.axis_size(self.name), arrays.key.shape[2]
        if self.N % size:
            raise ValueError(
                f"query heads N={self.N} must be a multiple of {size}, the size of mesh axis {self.name!r}, to be "
                "exchanged for tokens"
            )
        query = all_to_all(arrays.query, self.name, 2, 1)
        count = math.lcm(K, size) // K
        if count == 1:
            key, value = (all_to_all(x, self.name, 2, 1) for x in (arrays.key, arrays.value))
        else:
            key, value = (_replicated(self.name, count, x) for x in (arrays.key, arrays.value))
        query, key, value = (self.restore(x, 1) for x in (query, key, value))
        kinds = () if mod is None else mod.kinds
        aux = (self.array(a) if k == "element" else self.heads(a, 0) for a, k in zip(arrays.aux, kinds, strict=True))
        arrays = dataclasses.replace(
            arrays, query=query, key=key, value=value, bias=None if arrays.bias is None else self.array(arrays.bias),
            sinks=None if arrays.sinks is None else self.heads(arrays.sinks, 0), aux=tuple(aux),
        )
        first_head = lax.axis_index(self.name) * (self.N // size)
        origin = jnp.zeros(4, jnp.int32).at[1].set(first_head)
        origin = vary(origin, varying_axes(arrays))
        return arrays, dataclasses.replace(context, mask=self.mask(context.mask), origin=origin)

    def array(self, x):
        """`[B or 1, N or 1, own rows or 1, S or 1]`: rows for heads, where it has both."""
        if x.shape[2] != self.T:
            return self.heads(x, 1)
        if x.shape[1] == 1:
            return self.gather(x, 2)
        return self.restore(all_to_all(x, self.name, 1, 2), 2)

    def heads(self, x, axis):
        """The own heads of an array that has all."""
        if x.shape[axis] == 1:
            return x
        mine = self.N // lax.axis_size(self.name)
        return lax.dynamic_slice_in_dim(x, lax.axis_index(self.name) * mine, mine, axis)

    def gather(self, x, axis):
        return self.restore(lax.all_gather(x, self.name, axis=axis, tiled=True), axis)

    def mask(self, mask):
        def rest(mask):
            return Blocks(self.heads(mask.block_mask, 1), mask.block_size) if isinstance(mask, Blocks) else mask

        return map_mask(mask, self.array, lambda ids: self.gather(ids, 2), lambda ids: self.gather(ids, 3), rest)

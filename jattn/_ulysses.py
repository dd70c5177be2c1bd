"""Tokens for heads: from a device's own tokens of all heads to all tokens of its own heads, and back.

Source: Jacobs et al., "DeepSpeed Ulysses" (arXiv:2309.14509).
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax import lax

from jattn._collectives import all_gather, exchange
from jattn._layout import SequenceLayout
from jattn._mask import parts
from jattn._mask_rules import Blocks, Predicate
from jattn._problem import accumulator
from jattn._ring import map_mask
from jattn._varying import vary, varying_axes


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _replicated(change, count, x):
    """Keys `[B, T, K, H]`, each head `count` times, exchanged; in the accumulator's dtype, so that gradients are."""
    return change.heads_for_tokens(jnp.repeat(x, count, 2), 2, 1).astype(accumulator(x.dtype))


def _replicated_backward(change, count, like, g):
    g = change.tokens_for_heads(g, 2, 1)
    return (jnp.sum(g.reshape(*g.shape[:2], g.shape[2] // count, count, g.shape[3]), 3).astype(like.dtype),)


_replicated.defvjp(
    lambda change, count, x: (_replicated(change, count, x), jnp.zeros((), x.dtype)), _replicated_backward
)


@dataclasses.dataclass(frozen=True)
class Exchange:
    """From a device's tokens of all heads to all tokens of its heads, in natural order, and back.

    A device has a part of each of `runs` runs of heads. Where heads are sharded over another axis, each of whose
    devices has whole runs, these do not meet. With one run they are neighbours, as what counts heads asks for.
    """

    name: str
    layout: SequenceLayout
    T: int
    N: int
    K: int
    runs: int

    @classmethod
    def of(cls, name, layout, T, N, K, counts_heads):
        size = lax.axis_size(name)
        if N % size:
            raise ValueError(
                f"query heads N={N} must be a multiple of {size}, the size of mesh axis {name!r}, to be "
                "exchanged for tokens"
            )
        return cls(name, layout, T, N, K, 1 if counts_heads else math.lcm(K, size) // size)

    def to_heads(self, arrays, context, mod):
        size = lax.axis_size(self.name)
        query = self.heads_for_tokens(arrays.query, 2, 1)
        count = math.lcm(self.K, size) // self.K
        if count == 1:
            key, value = (self.heads_for_tokens(x, 2, 1) for x in (arrays.key, arrays.value))
        else:
            key, value = (_replicated(self, count, x) for x in (arrays.key, arrays.value))
        kinds = () if mod is None else mod.kinds
        aux = (self.array(a) if k == "element" else self.heads(a, 0) for a, k in zip(arrays.aux, kinds, strict=True))
        arrays = dataclasses.replace(
            arrays, query=query, key=key, value=value, bias=None if arrays.bias is None else self.array(arrays.bias),
            sinks=None if arrays.sinks is None else self.heads(arrays.sinks, 0), aux=tuple(aux),
        )
        first_head = lax.axis_index(self.name) * (self.N // size)  # with one run; else nothing counts heads
        origin = jnp.zeros(4, jnp.int32).at[1].set(first_head)
        origin = vary(origin, varying_axes(arrays))
        return arrays, dataclasses.replace(context, mask=self.mask(context.mask), origin=origin)

    def array(self, x):
        """`[B or 1, N or 1, own rows or 1, S or 1]`: rows for heads, where it has both."""
        if x.shape[2] != self.T:
            return self.heads(x, 1)
        if x.shape[1] == 1:
            return self.gather(x, 2)
        return self.heads_for_tokens(x, 1, 2)

    def heads(self, x, axis):
        """The own heads of an array that has all."""
        if x.shape[axis] == 1:
            return x
        own = lax.dynamic_index_in_dim(self._by_device(x, axis), lax.axis_index(self.name), 0, keepdims=False)
        return _joined(own, axis)

    def gather(self, x, axis):
        return self.layout.unshard(_joined(jnp.moveaxis(all_gather(x, self.name), 0, axis), axis), axis)

    def heads_for_tokens(self, x, heads, tokens):
        found = exchange(self._by_device(x, heads), self.name)  # a part of the tokens from each device
        found = _joined(found, heads + 1)
        return self.layout.unshard(_joined(jnp.moveaxis(found, 0, tokens), tokens), tokens)

    def tokens_for_heads(self, x, heads, tokens):
        x = self.layout.shard(x, tokens)
        parts = _divided(x, tokens, lax.axis_size(self.name))
        found = exchange(jnp.moveaxis(parts, tokens, 0), self.name)  # a part of the heads from each device
        found = _divided(found, heads + 1, self.runs)
        return _joined(_joined(jnp.moveaxis(found, 0, heads + 1), heads), heads)

    def _by_device(self, x, axis):
        """The heads of each device, `[P, ..., runs, heads of a run, ...]`."""
        x = _divided(_divided(x, axis, self.runs), axis + 1, lax.axis_size(self.name))
        return jnp.moveaxis(x, axis + 1, 0)

    def mask(self, mask):
        def rest(mask):
            return Blocks(self.heads(mask.block_mask, 1), mask.block_size) if isinstance(mask, Blocks) else mask

        return map_mask(mask, self.array, lambda ids: self.gather(ids, 2), lambda ids: self.gather(ids, 3), rest)


def counts_heads(mask, mod, dropout):
    """Whether a call asks for the number of a head."""
    return mod is not None or dropout or (mask is not None and any(isinstance(m, Predicate) for m in parts(mask)))


def _divided(x, axis, count):
    """An axis as two, the first of size `count`."""
    return x.reshape(*x.shape[:axis], count, x.shape[axis] // count, *x.shape[axis + 1 :])


def _joined(x, axis):
    """Two neighbouring axes as one."""
    return x.reshape(*x.shape[:axis], x.shape[axis] * x.shape[axis + 1], *x.shape[axis + 2 :])

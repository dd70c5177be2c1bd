"""Attention over a cache in plain JAX: `implementation="xla"` of `decode_attention` and `paged_attention`.

    for each strip of block_q queries of one sequence:
        for each split of block_k keys that the strip may see:
            K, V = the split, fetched through the block table; 0 where no query of the strip may look
            one step of the online softmax of `reference.attention`

A contiguous cache has one page a sequence. Strips and splits start at multiples of their size in the sequence and are
never moved or cut to fit, and everything after a fetch has the shape of one strip against one split. So a sequence's
bits cannot depend on its neighbours, its row, its pages or the size of the cache.
"""

import copy
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jattn._problem import accumulator
from jattn._tile import Rows, Tile, maximum, minimum
from jattn.reference import attention
from jattn.reference.attention import TileConfig

PLATFORM = None


def why_not(problem) -> str | None:
    """Plain JAX runs everything that passes the argument checks."""
    return None


def why_not_here() -> str | None:
    """And it runs on every machine."""
    return None


def choose(problem, config) -> TileConfig:
    """Strips of 8 queries, splits of 256 keys, whatever the call: a choice by its size would show in the bits."""
    return TileConfig(8, 256) if config is None else attention.choose(problem, config)


def forward(arrays, options):
    """`(out, lse)` in the accumulator's dtype, shaped as the query; see `_problem.CacheArrays`."""
    return run(Walk(arrays, options))


def run(walk):
    """`(out, lse)` of a walk."""
    state = (
        walk.full((walk.T, walk.N, walk.D), 0, walk.dtype),
        walk.full((walk.T, walk.N), -jnp.inf, walk.dtype),
        walk.full((walk.T, walk.N), 0, walk.dtype),
    )
    out, lse, _ = walk.over_strips(lambda one, strip, state: attention._forward_strip(one, strip, state), state)
    shape = walk.arrays.query.shape[:-1]
    return out.reshape(*shape, walk.D), lse.reshape(shape)


@dataclasses.dataclass(frozen=True)
class Strip:
    """`block_q` queries of one sequence, and the keys that any of them may see."""

    start: Any  # index of the first query in the sequence
    rows: Any  # addresses of the queries, int32 [block_q]; T where there is none
    live: Any  # bool [1, 1, block_q, 1]: which exist
    low: Any  # no query of the strip sees a key before this one,
    high: Any  # or at or past this one
    first: Any  # first split to visit
    count: Any  # how many
    order: None = None


class Walk(attention.Walk):
    """The strips and splits of one call; `of` speaks of one sequence, as the functions of a strip expect."""

    def __init__(self, arrays, options):
        # Not the base's: it would address keys that lie end to end.
        self.arrays, self.options, self.context = arrays, options, arrays
        self.N, H = arrays.query.shape[-2:]
        self.query = arrays.query.reshape(-1, self.N, H)
        self.T, self.B = self.query.shape[0], 1
        self.P, self.page_size, self.K, _ = arrays.key.shape
        self.D = arrays.value.shape[-1]
        self.S = 0 if _none(self.P) else arrays.block_tables.shape[1] * self.page_size
        self.block_q, self.block_k = options.config.block_q, options.config.block_k
        self.dtype = accumulator(arrays.query.dtype)
        self.precision = lax.Precision.HIGHEST if arrays.query.dtype == self.dtype else None
        self.key, self.value = (arrays.key, arrays.key_scale), (arrays.value, arrays.value_scale)
        self.scale = options.scale if arrays.scale is None else arrays.scale
        self.bias, self.sinks, self.aux, self.margin = None, arrays.sinks, arrays.aux, 0
        self.start, self.queries = self._sequences()
        self.keys = jnp.clip(arrays.lengths, 0, self.S)

    def _sequences(self):
        """First row and number of queries of each sequence, int32 `[B]` each, inside the array whatever was given."""
        B, cu = self.arrays.block_tables.shape[0], self.arrays.cu_queries
        if cu is None:
            length = self.arrays.query.shape[1]
            start, queries = jnp.arange(B, dtype=jnp.int32) * length, jnp.full((B,), length, jnp.int32)
        else:
            cu = jnp.clip(cu, 0, self.T)
            start, queries = cu[:-1], jnp.maximum(cu[1:] - cu[:-1], 0)
        if self.arrays.query_lengths is not None:
            queries = jnp.clip(self.arrays.query_lengths, 0, queries)
        return start, queries

    def over_strips(self, body, state):
        if _none(self.T) or _none(self.start.shape[0]):
            return state
        ends = jnp.cumsum(-(-self.queries // self.block_q), dtype=jnp.int32)

        def step(r, state):
            sequence = jnp.sum(ends <= r, dtype=jnp.int32)  # a search would need a batch size that is not symbolic
            before = jnp.where(sequence == 0, 0, ends[sequence - 1])
            one = self.of(sequence)
            return body(one, one.strip((r - before) * self.block_q), state)

        return self._loop(0, ends[-1], step, state)

    def of(self, sequence):
        """This walk with every per-sequence array cut to one sequence."""

        def pick(x):
            return lax.dynamic_slice_in_dim(x, sequence, 1)  # clamps: of one row, that row

        one = copy.copy(self)
        one.sequence, one.table = sequence, self.arrays.block_tables[sequence]
        one.start, one.queries, one.keys = self.start[sequence], self.queries[sequence], self.keys[sequence]
        one.offset = one.keys - one.queries
        mask, one.aux = jax.tree.map(pick, (self.arrays.mask, self.aux))
        one.context = dataclasses.replace(self.arrays, mask=mask)
        return one

    def strip(self, start) -> Strip:
        index = start + jnp.arange(self.block_q, dtype=jnp.int32)
        live = index < self.queries
        rows = Rows(
            first=self.offset + start,
            last=self.offset + jnp.minimum(start + self.block_q, self.queries) - 1,
            num_keys=self.keys,
        )
        mask = self.context.mask
        low, high = (0, self.keys) if mask is None else mask.span(rows)
        low, high = maximum(low, 0), minimum(high, self.keys)
        if mask is not None and mask.key_limit() is not None:
            high = jnp.minimum(high, mask.key_limit()[0, 0, 0, 0])
        first = low // self.block_k
        return Strip(
            start, jnp.where(live, self.start + index, self.T), live[None, None, :, None], low, high, first,
            jnp.maximum(-(-high // self.block_k) - first, 0),
        )

    def tile(self, strip, block):
        """One strip against one split, and which of its keys anybody may see: bool `[1, 1, 1, block_k]`."""
        column = block * self.block_k
        tile = Tile(
            row=strip.start, column=column, num_queries=self.block_q, num_keys=self.block_k, query_start=strip.start,
            key_start=column, batch=self.sequence.reshape(1, 1, 1, 1), offset=self.offset.reshape(1, 1, 1, 1),
            head=jnp.arange(self.N, dtype=jnp.int32).reshape(1, -1, 1, 1),
        )
        return tile, (tile.key_index >= strip.low) & (tile.key_index < strip.high)

    def rows_of(self, x, strip, clean=False):
        x = jnp.take(x, strip.rows, axis=0, mode="clip")
        x = jnp.swapaxes(x, 0, 1)[None]
        return lax.optimization_barrier(jnp.where(strip.live, x, jnp.zeros((), x.dtype)) if clean else x)

    def put_rows(self, x, strip, new):
        return x.at[strip.rows].set(jnp.swapaxes(new[0], 0, 1).astype(x.dtype), mode="drop")

    def keys_of(self, x, tile, key_ok):
        """`([1, K, block_k, H] in the query's dtype, its scales [1, K, 1 or block_k] or None)` of a split."""
        pages, scale = x
        exists, index = key_ok[0, 0, 0, :], tile.key_index[0, 0, 0]
        page = jnp.take(self.table, index // self.page_size, mode="clip")
        # Page and slot apart: their product may pass 2^31.
        at = jnp.clip(page, 0, self.P - 1), index % self.page_size

        def fetch(pages):
            found = pages.at[at].get(mode="promise_in_bounds")
            return jnp.where(exists.reshape(-1, *[1] * (found.ndim - 1)), found, jnp.zeros((), found.dtype))

        keys = jnp.swapaxes(fetch(pages).astype(self.query.dtype), 0, 1)[None]
        if scale is not None:
            scale = (fetch(scale).T if scale.ndim == 3 else jnp.broadcast_to(scale, (self.K,))[:, None])[None]
            scale = scale.astype(self.dtype)
        # A fetch depends on the shape of the cache; what follows must compile to the same code for every call.
        return lax.optimization_barrier((keys, scale))

    def with_keys(self, rows, keys):
        keys, scale = keys
        return self._scaled(super().with_keys(rows, keys), scale)

    def over_keys(self, weights, keys):
        keys, scale = keys
        if scale is None:
            return super().over_keys(weights, keys)
        # float16 weights times a small scale would underflow: what is common to the split is for the accumulator.
        top = jnp.maximum(jnp.max(jnp.abs(scale), axis=2, keepdims=True), jnp.finfo(self.dtype).tiny)
        return self._scaled(super().over_keys(self._scaled(weights, scale / top), keys), top)

    def _scaled(self, x, scale):
        """`x [1, N, block_q, features]` times `scale [1, K, features or 1]` of its key head."""
        if scale is None:
            return x
        grouped = x.reshape(1, self.K, self.N // self.K, *x.shape[2:])
        return (grouped * scale[:, :, None, None, :]).reshape(x.shape)


def _none(size):
    """Whether a dimension is 0; one of an exported program may be symbolic, and then is not."""
    return isinstance(size, int) and size == 0

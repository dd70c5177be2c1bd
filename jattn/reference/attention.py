"""Exact attention in plain JAX, one tile at a time: `implementation="xla"` of `attention` and `ragged_attention`.

    for each strip of block_q query rows:                 (packed: strips never cross a sequence)
        for each block of block_k keys that the mask lets the strip see:
            S = scale Q Kᵀ → bias → modifier → soft cap → mask        one tile, all batch rows and heads
            m, l, O = online softmax of S, accumulating P V           Milakov & Gimelshein 2018; Dao 2023, algorithm 1
        out = O / l,  lse = m + log l

The backward walks the same tiles, recomputing P = exp(S − lse): nothing of size T x S is ever stored. A strip or block
that would run past the end is moved back to fit, and the elements seen before are masked out, so nothing is padded.
"""

import dataclasses
import functools
import math
import operator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jattn._philox import keep_bits, keep_mask
from jattn._problem import accumulator
from jattn._tile import Grid, Rows, Tile, maximum, minimum
from jattn._varying import vary, varying_axes


@dataclasses.dataclass(frozen=True)
class TileConfig:
    """Rows and columns of a tile."""

    block_q: int
    block_k: int

    def __post_init__(self):
        for name in ("block_q", "block_k"):
            if not isinstance(getattr(self, name), int) or getattr(self, name) <= 0:
                raise ValueError(f"{name}={getattr(self, name)!r} must be a positive int")


PLATFORM = None


def why_not(problem) -> str | None:
    """Plain JAX runs everything that passes the argument checks."""
    return None


def why_not_here() -> str | None:
    """And it runs on every machine."""
    return None


def why_not_backward(problem) -> str | None:
    return None


def choose(problem, config) -> TileConfig:
    """Tiles of 256 x 256, smaller where batch x heads is large: a score tile spans all of them and should fit a cache.

    On two CPU cores (B1 S2048 N8 H64, float32, forward + backward) every choice from 128 to 512 is within 30 %.
    """
    if config is not None:
        if not isinstance(config, TileConfig):
            raise TypeError(f"config={config!r} is not a jattn.reference.attention.TileConfig, which xla takes")
        return config
    rows = problem.B * problem.N
    side = 128 if isinstance(rows, int) and rows > 256 else 256  # an exported batch size may be symbolic
    return TileConfig(side, side)


def forward(arrays, context, options, *, unrounded=False):
    """`(out [B, T, N, D], lse [B, T, N], rest)`, all in the accumulator's dtype; see `_problem` for the arguments.

    `rest` is what `backward` needs besides: the rounding error of lse, `[B, T, N]`. At |lse| = 40 that error alone
    would put 2e-6 on every float32 weight of a row, an order of magnitude more than a softmax made at once has.
    """
    walk = Walk(arrays, context, options)
    rows = (walk.B, walk.N, walk.T)
    state = (
        walk.full((*rows, walk.D), 0, walk.dtype),
        walk.full(rows, -jnp.inf, walk.dtype),
        walk.full(rows, 0, walk.dtype),
    )
    state = walk.over_strips(lambda strip, state: _forward_strip(walk, strip, state), state)
    return tuple(jnp.swapaxes(x, 1, 2) for x in state)


def backward(arrays, context, options, out, lse, rest, dout, dlse):
    """Gradients of every array in `arrays`, in their dtypes (`options.partial`: in the accumulator's), from the
    cotangents of out and lse."""
    walk = Walk(arrays, context, options)
    saved = _Saved.make(walk, arrays, out, lse, rest, dout, dlse)
    totals = _Totals(
        query=walk.full(walk.query.shape, 0, walk.dtype if options.partial else arrays.query.dtype),
        key=walk.zeros(walk.key),
        value=walk.zeros(walk.value),
        scale=walk.zeros(arrays.scale),
        bias=walk.zeros(arrays.bias),
        aux=tuple(walk.zeros(a) for a in walk.aux),
        sinks=walk.zeros(arrays.sinks),
    )
    totals = walk.over_strips(lambda strip, state: _backward_strip(walk, saved, strip, state), totals)
    grads = dataclasses.replace(
        arrays,
        query=jnp.swapaxes(totals.query, 1, 2),
        key=jnp.swapaxes(totals.key, 1, 2),
        value=jnp.swapaxes(totals.value, 1, 2),
        scale=totals.scale,
        bias=totals.bias,
        aux=tuple(walk.unpad(i, a) for i, a in enumerate(totals.aux)),
        sinks=totals.sinks,
    )
    return grads if options.partial else jax.tree.map(lambda g, x: g.astype(x.dtype), grads, arrays)


# The walk: which tiles, and where they are.


@dataclasses.dataclass(frozen=True)
class Strip:
    """`block_q` query rows of one sequence (of every batch row, when not packed)."""

    row: Any  # address of the first row
    query_start: Any  # its index in the (undivided) sequence
    live: Any  # bool [B or 1, 1, block_q, 1]: rows to compute; None when all are
    column: Any  # address of the sequence's first key
    num_keys: Any  # keys in the sequence
    first: Any  # first key block to visit
    count: Any  # how many
    order: Any  # the blocks to visit, int32 [nk], or None: consecutive ones
    sequence: Any  # index of the packed sequence, or None


class Walk:
    """The tiles of one problem: sizes, operands in `[B, heads, tokens, features]`, and the loops over them."""

    def __init__(self, arrays, context, options):
        self.context, self.options = context, options
        self.B, self.T, self.N, self.H = arrays.query.shape
        self.S, self.K, self.D = arrays.key.shape[1], arrays.key.shape[2], arrays.value.shape[3]
        self.block_q = max(1, min(options.config.block_q, self.T))
        self.block_k = max(1, min(options.config.block_k, self.S))
        self.dtype = accumulator(arrays.query.dtype)
        # float32 must not be multiplied as TF32 or bfloat16; narrower inputs keep the device's fast product.
        self.precision = lax.Precision.HIGHEST if arrays.query.dtype == self.dtype else None
        self.query, self.key, self.value = (jnp.swapaxes(x, 1, 2) for x in (arrays.query, arrays.key, arrays.value))
        self.scale = options.scale if arrays.scale is None else arrays.scale
        self.bias, self.sinks = arrays.bias, arrays.sinks
        # Packed tiles may start before the first diagonal of their sequence: pad so that every slice is inside.
        self.margin = self.block_q + self.block_k
        self.aux = tuple(self._pad(i, a) for i, a in enumerate(arrays.aux))
        self.packed = context.cu_queries is not None
        self.origin = (0, 0, 0, 0) if context.origin is None else tuple(context.origin)
        self.stride = options.stride
        self.offset = options.query_offset
        if context.query_offset is not None:
            self.offset = context.query_offset.reshape(-1, 1, 1, 1)
        self.limit = None if context.mask is None else context.mask.key_limit()
        # Rows or keys that may hold NaN without being anybody's business: zero them before they meet a product.
        self.foreign_keys = self.packed or self.limit is not None
        self.foreign_rows = self.packed or context.query_lengths is not None
        self._order = self._block_lists()
        if self.packed:
            strips = -(-jnp.diff(context.cu_queries) // self.block_q)
            self._strip_ends = jnp.cumsum(jnp.maximum(strips, 0), dtype=jnp.int32)

    # Values that vary over the same mesh axes as the operands, which loop carries inside shard_map must.

    def vary(self, x):
        return vary(x, varying_axes(self.query))

    def full(self, shape, value, dtype):
        return self.vary(jnp.full(shape, value, dtype))

    def zeros(self, like):
        return None if like is None else self.full(like.shape, 0, self.dtype)

    # Loops.

    def over_strips(self, body, state):
        if self.T == 0 or (self.packed and self._strip_ends.shape == (0,)):
            return state
        count = self._strip_ends[-1] if self.packed else math.ceil(self.T / self.block_q)
        return self._loop(0, count, lambda r, state: body(self.strip(r), state), state)

    def over_blocks(self, strip, body, state):
        if self.S == 0:
            return state

        def step(i, state):
            block = strip.first + i if strip.order is None else strip.order[i]
            tile, key_ok = self.tile(strip, block)
            return body(tile, key_ok, state)

        return self._loop(0, strip.count, step, state)

    def _loop(self, lower, upper, body, state):
        if not isinstance(upper, int):
            # XLA for GPUs fails on nested loops whose bounds it can fold (a caller's constant offsets or lengths).
            upper = lax.optimization_barrier(upper)
        lower, upper = (self.vary(jnp.asarray(x, jnp.int32)) for x in (lower, upper))
        return lax.fori_loop(lower, upper, body, state)

    def strip(self, r) -> Strip:
        """The r-th strip: where it is, which of its rows are live, and which key blocks it can see."""
        sequence, base, length, column, num_keys, i = None, 0, self.T, 0, self.S, r
        if self.packed:
            cu_queries, cu_keys = self.context.cu_queries, self.context.cu_keys
            sequence = jnp.searchsorted(self._strip_ends, r, side="right").astype(jnp.int32)
            base, column = cu_queries[sequence], cu_keys[sequence]
            length, num_keys = cu_queries[sequence + 1] - base, cu_keys[sequence + 1] - column
            strips = -(-length // self.block_q)
            i = r - (self._strip_ends[sequence] - strips)
        start = i * self.block_q
        row = jnp.clip(base + start, 0, self.T - self.block_q)
        index = row - base + jnp.arange(self.block_q, dtype=jnp.int32)[None, None, :, None]
        live = None
        if self.packed or self.T % self.block_q:
            live = (index >= start) & (index < length)
        if self.context.query_lengths is not None:
            inside = self._index(2, index) < self._of(self.context.query_lengths.reshape(-1, 1, 1, 1), sequence)
            live = inside if live is None else live & inside
        offset = self._of(self.offset, sequence)
        lowest, highest = (offset, offset) if isinstance(offset, int) else (jnp.min(offset), jnp.max(offset))
        rows = Rows(
            first=lowest + self._index(2, start),
            last=highest + self._index(2, jnp.minimum(start + self.block_q, length) - 1),
            num_keys=self._index(3, num_keys), sequence=sequence,
        )
        first, count, order = self._visible_blocks(rows, i, num_keys)
        return Strip(row, self._index(2, row - base), live, column, num_keys, first, count, order, sequence)

    def tile(self, strip, block):
        """One tile of a strip, and which of its keys exist: bool `[B or 1, 1, 1, block_k]`, or None when all do."""
        start = block * self.block_k
        column = jnp.clip(strip.column + start, 0, self.S - self.block_k)
        sequence = strip.sequence
        batch = self._index(0, jnp.arange(self.B, dtype=jnp.int32)) if sequence is None else sequence[None]
        head = self._index(1, jnp.arange(self.N, dtype=jnp.int32))
        tile = Tile(
            row=strip.row, column=column, num_queries=self.block_q, num_keys=self.block_k,
            query_start=strip.query_start, key_start=self._index(3, column - strip.column), sequence=sequence,
            batch=batch.reshape(-1, 1, 1, 1), head=head.reshape(1, -1, 1, 1),
            offset=self._of(self.offset, sequence), stride=self.stride,
        )
        key_ok = None
        if self.packed or self.S % self.block_k:
            index = column - strip.column + jnp.arange(self.block_k, dtype=jnp.int32)[None, None, None, :]
            key_ok = (index >= start) & (index < strip.num_keys)
        if self.limit is not None:
            inside = tile.key_index < self._of(self.limit, sequence)
            key_ok = inside if key_ok is None else key_ok & inside
        return tile, key_ok

    def _index(self, axis, local):
        """The index in the whole of what sits at `local` here: batch, head, query or key, as in `Context.origin`."""
        return self.origin[axis] + (local if axis < 2 else self.stride * local)

    def _of(self, x, sequence):
        """The packed sequence's own row of a per-sequence array; anything else as it is."""
        if sequence is None or isinstance(x, int) or x.shape[0] == 1:
            return x
        return lax.dynamic_slice_in_dim(x, sequence, 1)

    def _visible_blocks(self, rows, i, num_keys):
        if self._order is not None:
            return 0, self._order[1][i], self._order[0][i]
        lo, hi = (0, rows.num_keys) if self.context.mask is None else self.context.mask.span(rows)
        lo, hi = (-((self.origin[3] - x) // self.stride) for x in (lo, hi))  # first local key at or past an index
        lo, hi = maximum(lo, 0), minimum(hi, num_keys)
        first = lo // self.block_k
        return first, maximum(-(-hi // self.block_k) - first, 0), None

    def _block_lists(self):
        """For masks that are not intervals: the key blocks each strip can see, `(order [nq, nk], count [nq])`."""
        mask = self.context.mask
        if mask is None or mask.interval or self.packed or not self.T or not self.S:
            return None
        grid = Grid(self.T, self.S, self.block_q, self.block_k, self.offset, self.origin[2:], self.stride)
        some, _ = mask.possible(grid)
        shape = (math.ceil(self.T / self.block_q), math.ceil(self.S / self.block_k))
        visible = jnp.broadcast_to(jnp.any(some, axis=(0, 1)), shape)
        order = jnp.argsort(~visible, axis=1, stable=True).astype(jnp.int32)
        return order, jnp.sum(visible, axis=1, dtype=jnp.int32)

    # Diagonal aux arrays.

    def _diagonal(self, i):
        return self.options.mod.kinds[i] == "diagonal"

    def _pad(self, i, a):
        return jnp.pad(a, ((0, 0), (0, 0), (self.margin, self.margin))) if self._diagonal(i) else a

    def unpad(self, i, a):
        return a[:, :, self.margin : a.shape[2] - self.margin] if self._diagonal(i) else a

    def cut_aux(self, tile):
        origin = self.T - 1 + self.margin
        cut = (tile.cut_diagonals(a, origin) if self._diagonal(i) else tile.cut(a) for i, a in enumerate(self.aux))
        return tuple(a.astype(self.dtype) if jnp.issubdtype(a.dtype, jnp.floating) else a for a in cut)

    def add_aux(self, tile, totals, updates):
        origin = self.T - 1 + self.margin
        return tuple(
            a if u.dtype == jax.dtypes.float0  # of an aux of integers
            else tile.paste_add_diagonals(a, u, origin) if self._diagonal(i)
            else tile.paste_add(a, u)
            for i, (a, u) in enumerate(zip(totals, updates, strict=True))
        )

    # Operand tiles and products.

    def rows_of(self, x, strip, clean=False):
        """Rows `[B, heads, block_q, ...]` of a strip; with `clean`, zeros where rows are not live."""
        x = lax.dynamic_slice_in_dim(x, strip.row, self.block_q, 2)
        if clean and self.foreign_rows and strip.live is not None:
            live = strip.live if x.ndim == 4 else strip.live[..., 0]
            x = jnp.where(live, x, jnp.zeros((), x.dtype))
        return x

    def keys_of(self, x, tile, key_ok):
        x = lax.dynamic_slice_in_dim(x, tile.column, self.block_k, 2)
        if self.foreign_keys and key_ok is not None:
            x = jnp.where(jnp.swapaxes(key_ok, 2, 3), x, jnp.zeros((), x.dtype))
        return x

    def put_rows(self, x, strip, new):
        """Writes a strip's live rows, leaving the others as they are."""
        new = new.astype(x.dtype)
        if strip.live is not None:
            live = strip.live if x.ndim == 4 else strip.live[..., 0]
            new = jnp.where(live, new, self.rows_of(x, strip))
        return lax.dynamic_update_slice_in_dim(x, new, strip.row, 2)

    def per_kv_head(self, x):
        """`[B, N, rows, ...]` as `[B, K, G * rows, ...]`: the query heads of one key head are rows of one product."""
        return x.reshape(self.B, self.K, self.N // self.K * x.shape[2], *x.shape[3:])

    def dot(self, pattern, a, b):
        return jnp.einsum(
            pattern, a.astype(b.dtype), b, precision=self.precision, preferred_element_type=self.dtype
        )

    def with_keys(self, rows, keys):
        """`[B, N, block_q, block_k]`: every row times every key."""
        product = self.dot("bkmh,bksh->bkms", self.per_kv_head(rows), keys)
        return product.reshape(self.B, self.N, rows.shape[2], keys.shape[2])

    def over_keys(self, weights, keys):
        """`[B, N, block_q, features]`: the sum over keys of weights times keys."""
        product = self.dot("bkms,bksh->bkmh", self.per_kv_head(weights), keys)
        return product.reshape(self.B, self.N, weights.shape[2], keys.shape[3])

    def over_rows(self, weights, rows):
        """`[B, K, block_k, features]`: the sum over query rows and the group's heads of weights times rows."""
        return self.dot("bkms,bkmh->bksh", self.per_kv_head(weights), self.per_kv_head(rows))


# The tile: scores in contract order, softmax, gradients.


def _visible(walk, strip, tile, key_ok):
    """Elements of a tile that take part, bool, or None when all do."""
    mask = walk.context.mask
    terms = [x for x in (strip.live, key_ok, None if mask is None else mask.tile(tile)) if x is not None]
    return jnp.broadcast_to(functools.reduce(operator.and_, terms), _shape(walk)) if terms else None


def _shape(walk):
    return walk.B, walk.N, walk.block_q, walk.block_k


def _modified(walk, tile, visible, raw, scale, bias, aux):
    """Raw products to scores before the soft cap, and which elements participate (bool, or None when all do).

    What an additive mask hides stays hidden: -inf after the bias or after the modifier counts as masked.
    """
    score = raw * jnp.asarray(scale, walk.dtype)
    if bias is not None:
        score = score + bias
        visible = _alive(visible, score)
    if walk.options.mod is not None:
        # A modifier must not meet what a masked bias may hold: 0 · NaN would come back in its gradient.
        score = _hidden(visible, score, 0)
        score = walk.options.mod(score, tile.batch, tile.head, tile.query_position, tile.key_index, *aux)
        visible = _alive(visible, score)
    return score, visible


def _capped(walk, score):
    cap = walk.options.soft_cap
    return score if cap is None else cap * jnp.tanh(score / cap)


def _alive(visible, score):
    alive = score != -jnp.inf
    return alive if visible is None else visible & alive


def _hidden(participating, x, value):
    return x if participating is None else jnp.where(participating, x, jnp.asarray(value, x.dtype))


def _bias_of(walk, tile):
    return None if walk.bias is None else tile.cut(walk.bias).astype(walk.dtype)


def _dropped(walk, tile, x):
    """Dropout of attention weights, or of their gradients: zero where dropped, scaled up where kept."""
    threshold = walk.options.dropout_threshold
    if threshold == 0:
        return x
    if tile.stride != 1:
        bits = keep_bits(walk.context.dropout_key, tile.batch, tile.head, tile.query_position, tile.key_index)
        return jnp.where(bits >= jnp.uint32(threshold), x * (65536 / (65536 - threshold)), 0)
    query_start = tile.query_start + (tile.offset if isinstance(tile.offset, int) else tile.offset.reshape(-1))
    keep = keep_mask(
        walk.context.dropout_key, tile.batch.reshape(-1), tile.head.reshape(-1), query_start, walk.block_q,
        tile.key_start, walk.block_k, threshold,
    )
    return jnp.where(keep, x * (65536 / (65536 - threshold)), 0)


def _forward_strip(walk, strip, state):
    query = walk.rows_of(walk.query, strip, clean=True)
    rows = (walk.B, walk.N, walk.block_q)
    if walk.sinks is None:
        m, total = walk.full(rows, -jnp.inf, walk.dtype), walk.full(rows, 0, walk.dtype)
    else:  # a sink is a key without a value
        m = jnp.broadcast_to(walk.sinks.astype(walk.dtype)[None, :, None], rows)
        m, total = walk.vary(m), walk.full(rows, 1, walk.dtype)
        total = jnp.where(m == -jnp.inf, 0, total)

    def visit(tile, key_ok, carry):
        m, total, acc = carry
        key, value = (walk.keys_of(x, tile, key_ok) for x in (walk.key, walk.value))
        visible = _visible(walk, strip, tile, key_ok)
        raw = walk.with_keys(query, key)
        score, part = _modified(walk, tile, visible, raw, walk.scale, _bias_of(walk, tile), walk.cut_aux(tile))
        score = _hidden(part, _capped(walk, score), -jnp.inf)
        new = jnp.maximum(m, jnp.max(score, axis=-1))
        reference = jnp.where(new == -jnp.inf, 0, new)  # nothing seen yet: exp(-inf - 0) is the right 0
        weights, shrink = jnp.exp(score - reference[..., None]), jnp.exp(m - reference)
        acc = acc * shrink[..., None] + walk.over_keys(_dropped(walk, tile, weights), value)
        return new, total * shrink + jnp.sum(weights, axis=-1), acc

    acc = walk.full((*rows, walk.D), 0, walk.dtype)
    m, total, acc = walk.over_blocks(strip, visit, (m, total, acc))
    empty = total == 0
    out = jnp.where(empty[..., None], 0, acc / jnp.where(empty, 1, total)[..., None])
    log_total = jnp.log(jnp.where(empty, 1, total))
    lse = jnp.where(empty, -jnp.inf, m + log_total)
    error = jnp.where(empty, 0, (m - lse) + log_total)
    return tuple(walk.put_rows(x, strip, new) for x, new in zip(state, (out, lse, error), strict=True))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Totals:
    """Gradients being summed, in the accumulator's dtype (query: finished rows, in its own)."""

    query: Any
    key: Any
    value: Any
    scale: Any
    bias: Any
    aux: tuple
    sinks: Any


@dataclasses.dataclass(frozen=True)
class _Saved:
    """What the backward reads: dout `[B, N, T, D]`; lse, its rounding error and delta `[B, N, T]`."""

    dout: Any
    lse: Any
    error: Any
    delta: Any

    @classmethod
    def make(cls, walk, arrays, out, lse, error, dout, dlse):
        # Both cotangents reach a score through its weight alone: dS = P (dP - rowsum(dO O) + dlse).
        delta = jnp.sum(dout.astype(walk.dtype) * out.astype(walk.dtype), axis=-1) - dlse.astype(walk.dtype)
        return cls(*(jnp.swapaxes(x, 1, 2) for x in (dout.astype(arrays.value.dtype), lse, error, delta)))


def _backward_strip(walk, saved, strip, totals):
    query, dout = walk.rows_of(walk.query, strip, clean=True), walk.rows_of(saved.dout, strip, clean=True)
    lse, error = walk.rows_of(saved.lse, strip), walk.rows_of(saved.error, strip)
    lse = jnp.where(lse == -jnp.inf, 0, lse)  # empty rows have no participating element
    delta = walk.rows_of(saved.delta, strip, clean=True)

    def visit(tile, key_ok, carry):
        dquery, totals = carry
        key, value = (walk.keys_of(x, tile, key_ok) for x in (walk.key, walk.value))
        visible = _visible(walk, strip, tile, key_ok)
        score, pull, part = jax.vjp(
            lambda *x: _modified(walk, tile, visible, *x),
            walk.with_keys(query, key), jnp.asarray(walk.scale, walk.dtype), _bias_of(walk, tile), walk.cut_aux(tile),
            has_aux=True,
        )
        capped = _capped(walk, score)
        weights = _hidden(part, jnp.exp((capped - lse[..., None]) - error[..., None]), 0)
        dweights = _dropped(walk, tile, walk.with_keys(dout, value))
        dscore = weights * (dweights - delta[..., None])
        if walk.options.soft_cap is not None:
            dscore = dscore * (1 - jnp.square(capped / walk.options.soft_cap))
        draw, dscale, dbias, daux = pull(_hidden(part, dscore, 0))
        draw = _hidden(part, draw, 0)
        dquery = dquery + walk.over_keys(draw, key)
        return dquery, dataclasses.replace(
            totals,
            key=_add_keys(totals.key, tile, walk.over_rows(draw, query)),
            value=_add_keys(totals.value, tile, walk.over_rows(_dropped(walk, tile, weights), dout)),
            scale=None if totals.scale is None else totals.scale + dscale,
            bias=None if dbias is None else tile.paste_add(totals.bias, dbias),
            aux=walk.add_aux(tile, totals.aux, daux),
        )

    dquery, totals = walk.over_blocks(strip, visit, (walk.full(query.shape, 0, walk.dtype), totals))
    totals = dataclasses.replace(totals, query=walk.put_rows(totals.query, strip, dquery))
    return totals if walk.sinks is None else _backward_sinks(walk, saved, strip, totals, delta)


def _add_keys(total, tile, update):
    old = lax.dynamic_slice_in_dim(total, tile.column, tile.num_keys, 2)
    return lax.dynamic_update_slice_in_dim(total, old + update, tile.column, 2)


def _backward_sinks(walk, saved, strip, totals, delta):
    sinks, lse = walk.sinks.astype(walk.dtype)[None, :, None], walk.rows_of(saved.lse, strip)
    weights = jnp.where(lse == -jnp.inf, 0, jnp.exp(sinks - jnp.where(lse == -jnp.inf, 0, lse)))
    update = -weights * delta
    if strip.live is not None:
        update = jnp.where(strip.live[..., 0], update, 0)
    return dataclasses.replace(totals, sinks=totals.sinks + jnp.sum(update, axis=(0, 2)))

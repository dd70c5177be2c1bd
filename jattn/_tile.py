"""One rectangle of the score matrix: where it sits, and how arrays that broadcast to `[B, N, T, S]` are cut to it.

Masks, modifiers and the reference implementation all speak of tiles, so that nothing needs more than one at a time.
An *index* counts from the start of a sequence; a *position* is where a query sits on the key axis (index + offset);
a *row* or *column* is an address in the array (they differ from indices only when sequences are packed).
"""

import dataclasses
import math
from functools import cached_property
from typing import Any

import jax.numpy as jnp
from jax import lax


def minimum(x, y):
    """jnp.minimum that keeps two Python ints a Python int: under x64 an array made of one is int64, not int32."""
    return min(x, y) if isinstance(x, int) and isinstance(y, int) else jnp.minimum(x, y)


def maximum(x, y):
    """jnp.maximum, with Python ints kept as in `minimum`."""
    return max(x, y) if isinstance(x, int) and isinstance(y, int) else jnp.maximum(x, y)


@dataclasses.dataclass(frozen=True)
class Tile:
    """Queries `[row, row + num_queries)` against keys `[column, column + num_keys)`, for all heads at once.

    `batch` is `[B, 1, 1, 1]` flat batch indices, or the sequence index `[1, 1, 1, 1]` when `sequence` (a scalar) says
    that the arrays are packed. `offset` broadcasts to `[B, 1, 1, 1]`. Row and index starts may be traced. Neighbouring
    rows, and neighbouring columns, are `stride` indices apart.
    """

    row: Any
    column: Any
    num_queries: int
    num_keys: int
    batch: Any
    head: Any
    offset: Any = 0
    query_start: Any = 0
    key_start: Any = 0
    sequence: Any = None
    stride: int = 1

    @cached_property
    def query_index(self):
        return self.query_start + self.stride * jnp.arange(self.num_queries, dtype=jnp.int32)[None, None, :, None]

    @cached_property
    def key_index(self):
        return self.key_start + self.stride * jnp.arange(self.num_keys, dtype=jnp.int32)[None, None, None, :]

    @cached_property
    def query_position(self):
        return self.query_index + self.offset

    def pick(self, x):
        """The batch rows of `x [B or 1, ...]` that this tile speaks of."""
        if self.sequence is None or x.shape[0] == 1:
            return x
        return lax.dynamic_slice_in_dim(x, self.sequence, 1, 0)

    def cut(self, x):
        """`x`, which broadcasts to `[B, N, T, S]`, restricted to this tile."""
        x = self.pick(x)
        if x.shape[2] != 1:
            x = lax.dynamic_slice_in_dim(x, self.row, self.num_queries, 2)
        if x.shape[3] != 1:
            x = lax.dynamic_slice_in_dim(x, self.column, self.num_keys, 3)
        return x

    def paste_add(self, total, update):
        """Adds `update`, the gradient of `cut(total)`, to its place in `total`."""
        start = [0, 0, 0, 0]
        if self.sequence is not None and total.shape[0] != 1:
            start[0] = self.sequence
        if total.shape[2] != 1:
            start[2] = self.row
        if total.shape[3] != 1:
            start[3] = self.column
        start = [jnp.asarray(s, jnp.int32) for s in start]
        return lax.dynamic_update_slice(total, lax.dynamic_slice(total, start, update.shape) + update, start)

    def cut_diagonals(self, x, origin):
        """`x [B or 1, N or 1, L]`, a value per diagonal `s - t` (0 is at `origin`), spread over this tile.

        s and t are the addresses of column and row, or indices in the sequence when packed.
        """
        rows, columns = self.num_queries, self.num_keys
        width = rows + columns - 1
        x = self.pick(x)
        band = lax.dynamic_slice_in_dim(x, self._first_diagonal(origin), width, 2)
        # Reshaping a repeated band to rows one longer than its period shifts each row by one.
        repeated = jnp.tile(band, (1, 1, rows + 1))[:, :, : rows * (width + 1)]
        return jnp.flip(repeated.reshape(*band.shape[:2], rows, width + 1)[..., :columns], axis=2)

    def paste_add_diagonals(self, total, update, origin):
        """Adds `update`, the gradient of `cut_diagonals(total)`, to its diagonals: the same reshapes backwards."""
        rows, columns = self.num_queries, self.num_keys
        width = rows + columns - 1
        flipped = jnp.pad(jnp.flip(update, axis=2), ((0, 0), (0, 0), (0, 0), (0, width + 1 - columns)))
        flat = jnp.pad(flipped.reshape(*update.shape[:2], -1), ((0, 0), (0, 0), (0, width - rows)))
        band = flat.reshape(*update.shape[:2], rows + 1, width).sum(2)
        first = 0 if self.sequence is None or total.shape[0] == 1 else self.sequence
        start = [jnp.asarray(s, jnp.int32) for s in (first, 0, self._first_diagonal(origin))]
        return lax.dynamic_update_slice(total, lax.dynamic_slice(total, start, band.shape) + band, start)

    def _first_diagonal(self, origin):
        column, row = (self.column, self.row) if self.sequence is None else (self.key_start, self.query_start)
        return column - row - (self.num_queries - 1) + origin


@dataclasses.dataclass(frozen=True)
class Rows:
    """A block of query rows, as what decides which keys they can see: the least and greatest position, as scalars."""

    first: Any
    last: Any
    num_keys: int
    sequence: Any = None

    def high(self, x):
        """The greatest of the per-sequence numbers `x [B or 1, 1, 1, 1]` of these rows."""
        if self.sequence is not None and x.shape[0] != 1:
            x = lax.dynamic_slice_in_dim(x, self.sequence, 1, 0)
        return jnp.max(x)


@dataclasses.dataclass(frozen=True)
class Grid:
    """The blocks of a score matrix: first and last index (inclusive) of each block of queries and of keys.

    `origin` holds the index of the first query and of the first key; neighbours are `stride` indices apart.
    """

    num_queries: int
    num_keys: int
    block_q: int
    block_k: int
    offset: Any = 0
    origin: tuple = (0, 0)
    stride: int = 1

    @property
    def queries(self):
        """(first, last) positions, `[B or 1, 1, nq, 1]` each."""
        first, last = self.edges(2)
        return first[None, None, :, None] + self.offset, last[None, None, :, None] + self.offset

    @property
    def keys(self):
        """(first, last) key indices, `[1, 1, 1, nk]` each."""
        first, last = self.edges(3)
        return first[None, None, None, :], last[None, None, None, :]

    def edges(self, axis):
        """(first, last) indices of the blocks of queries (axis 2) or keys (axis 3)."""
        length, block = ((self.num_queries, self.block_q), (self.num_keys, self.block_k))[axis - 2]
        first = jnp.arange(math.ceil(length / block), dtype=jnp.int32) * block
        ends = first, jnp.minimum(first + block, length) - 1
        return tuple(self.origin[axis - 2] + self.stride * e for e in ends)

    def reduce(self, x, operation, padding):
        """Reduces `x [.., T or 1, S or 1]` over the rows and columns of each block."""
        for axis, block in ((2, self.block_q), (3, self.block_k)):
            if x.shape[axis] == 1:
                continue
            count = math.ceil(x.shape[axis] / block)
            widths = [(0, 0)] * 4
            widths[axis] = (0, count * block - x.shape[axis])
            x = jnp.pad(x, widths, constant_values=padding)
            x = operation(x.reshape(*x.shape[:axis], count, block, *x.shape[axis + 1 :]), axis=axis + 1)
        return x


@dataclasses.dataclass(frozen=True)
class Shape:
    """What a mask is bound against: leading batch axes, heads, T and S. `sequences` is
    the number of packed sequences, or None when each batch row is one."""

    batch: tuple[int, ...]
    heads: int
    num_queries: int
    num_keys: int
    sequences: int | None = None

    def per_sequence(self, x, name):
        """An int or `[*B]` array as `[B or 1, 1, 1, 1]` int32."""
        if isinstance(x, int):
            return jnp.full((1, 1, 1, 1), x, jnp.int32)
        want = self.batch if self.sequences is None else (self.sequences,)
        if x.ndim and x.shape != want:
            raise ValueError(f"{name} has shape {x.shape}; expected one number a sequence, {want}")
        return x.astype(jnp.int32).reshape(-1, 1, 1, 1)

    def per_token(self, x, name, axis):
        """`[T]` or `[*B, T]` ids as `[B or 1, 1, T, 1]` (axis 2), or keys as `[B or 1, 1, 1, S]` (axis 3)."""
        length = (self.num_queries, self.num_keys)[axis - 2]
        if x.shape not in ((length,), (*self.batch, length)):
            raise ValueError(f"{name} has shape {x.shape}; expected {(length,)} or {(*self.batch, length)}")
        batch = math.prod(x.shape[:-1])
        return x.reshape((batch, 1, length, 1) if axis == 2 else (batch, 1, 1, length))

    def scores(self, x, name):
        """An array that broadcasts to `[*B, N, T, S]`, as `[B or 1, N or 1, T or 1, S or 1]`."""
        want = (*self.batch, self.heads, self.num_queries, self.num_keys)
        shape = (1,) * (len(want) - x.ndim) + x.shape
        if len(shape) != len(want) or any(a not in (1, b) for a, b in zip(shape, want, strict=True)):
            axes = "[*B, N, T, S]" if self.sequences is None else "[N, T, S] of packed rows and columns"
            raise ValueError(f"{name} has shape {x.shape}, which does not broadcast to {axes} = {want}")
        lead = shape[: len(self.batch)]
        if any(a != 1 for a in lead) and lead != self.batch:  # broadcast over some batch axes and not others
            shape = self.batch + shape[len(self.batch) :]
            x = jnp.broadcast_to(x.reshape((1,) * (len(want) - x.ndim) + x.shape), shape)
        return x.reshape((math.prod(shape[: len(self.batch)]), *shape[len(self.batch) :]))

"""The rules a mask can be made of. Each defines `tile`, `span` and `possible`, and `row_interval` where rows are
intervals; see `Mask`. `masks` holds their constructors, which check what they are given."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jattn._callables import Callable
from jattn._mask import Mask, mask_class, static
from jattn._tile import Shape


@mask_class
class Causal(Mask):
    interval = True

    def __repr__(self):
        return "causal"

    def tile(self, tile):
        return tile.key_index <= tile.query_position

    def span(self, rows):
        return 0, rows.last + 1

    def possible(self, grid):
        (first, last), (start, end) = grid.queries, grid.keys
        return start <= last, end <= first

    def row_interval(self, position, num_keys):
        return jnp.zeros_like(position), position + 1


@mask_class
class Window(Mask):
    left: int | None = static()
    right: int | None = static()
    interval = True

    def __repr__(self):
        return f"window({self.left}, {self.right})"

    def tile(self, tile):
        visible = jnp.ones((1, 1, 1, 1), bool)
        if self.left is not None:
            visible &= tile.key_index >= tile.query_position - self.left
        if self.right is not None:
            visible &= tile.key_index <= tile.query_position + self.right
        return visible

    def span(self, rows):
        lo = 0 if self.left is None else rows.first - self.left
        return lo, rows.num_keys if self.right is None else rows.last + self.right + 1

    def possible(self, grid):
        (first, last), (start, end) = grid.queries, grid.keys
        some = every = jnp.ones((1, 1, 1, 1), bool)
        if self.left is not None:
            some, every = some & (end >= first - self.left), every & (start >= last - self.left)
        if self.right is not None:
            some, every = some & (start <= last + self.right), every & (end <= first + self.right)
        return some, every

    def row_interval(self, position, num_keys):
        lo = jnp.zeros_like(position) if self.left is None else position - self.left
        return lo, jnp.full_like(position, num_keys) if self.right is None else position + self.right + 1


@mask_class
class Prefix(Mask):
    length: Any
    interval = True

    def __repr__(self):
        return f"prefix({short(self.length)})"

    def bind(self, shape):
        return Prefix(shape.per_sequence(self.length, "prefix length"))

    def tile(self, tile):
        return (tile.key_index <= tile.query_position) | (tile.key_index < tile.pick(self.length))

    def span(self, rows):
        return 0, jnp.maximum(rows.last + 1, rows.high(self.length))

    def possible(self, grid):
        (first, last), (start, end) = grid.queries, grid.keys
        return (start <= last) | (start < self.length), (end <= first) | (end < self.length)

    def row_interval(self, position, num_keys):
        return jnp.zeros_like(position), jnp.maximum(position + 1, self.length.reshape(-1, 1))

    def sizes(self):
        return jnp.size(self.length), 1


@mask_class
class Lengths(Mask):
    length: Any
    interval = True

    def __repr__(self):
        return f"lengths({short(self.length)})"

    def bind(self, shape):
        return Lengths(shape.per_sequence(self.length, "key lengths"))

    def tile(self, tile):
        return tile.key_index < tile.pick(self.length)

    def span(self, rows):
        return 0, rows.high(self.length)

    def key_limit(self):
        return self.length

    def possible(self, grid):
        start, end = grid.keys
        return start < self.length, end < self.length

    def row_interval(self, position, num_keys):
        return jnp.zeros_like(position), jnp.zeros_like(position) + self.length.reshape(-1, 1)

    def sizes(self):
        return jnp.size(self.length), 1


@mask_class
class Segments(Mask):
    query_ids: Any
    key_ids: Any  # None: the queries' (until bound)

    def __repr__(self):
        ids = [x for x in (self.query_ids, self.key_ids) if x is not None]
        return f"segments({', '.join(map(short, ids))})"

    def bind(self, shape):
        key_ids = self.query_ids if self.key_ids is None else self.key_ids
        return Segments(
            shape.per_token(self.query_ids, "query segment ids", 2), shape.per_token(key_ids, "key segment ids", 3)
        )

    def tile(self, tile):
        return tile.cut(self.query_ids) == tile.cut(self.key_ids)

    def possible(self, grid):
        low, high = jnp.iinfo(self.query_ids.dtype).min, jnp.iinfo(self.query_ids.dtype).max
        q0, q1 = grid.reduce(self.query_ids, jnp.min, high), grid.reduce(self.query_ids, jnp.max, low)
        k0, k1 = grid.reduce(self.key_ids, jnp.min, high), grid.reduce(self.key_ids, jnp.max, low)
        return (q0 <= k1) & (k0 <= q1), (q0 == k1) & (k0 == q1)

    def sizes(self):
        return max(_leading(x, 1) for x in (self.query_ids, self.key_ids) if x is not None), 1


@mask_class
class Blocks(Mask):
    block_mask: Any
    block_size: tuple[int, int] = static()

    def __repr__(self):
        return f"blocks({short(self.block_mask)}, block_size={self.block_size})"

    def bind(self, shape):
        counts = [math.ceil(n / b) for n, b in zip((shape.num_queries, shape.num_keys), self.block_size, strict=True)]
        batch = shape.batch if shape.sequences is None else (shape.sequences,)
        grid = Shape(batch, shape.heads, *counts)
        x = self.block_mask
        if x.ndim < 2 or (x.shape[-2], x.shape[-1]) != tuple(counts):
            raise ValueError(
                f"block_mask has shape {x.shape}; its last two axes must be the {tuple(counts)} blocks of "
                f"{self.block_size} in T={shape.num_queries}, S={shape.num_keys}"
            )
        return Blocks(grid.scores(x, "block_mask"), self.block_size)

    def tile(self, tile):
        rows = jnp.maximum(tile.query_index[0, 0, :, 0], 0) // self.block_size[0]
        columns = jnp.maximum(tile.key_index[0, 0, 0, :], 0) // self.block_size[1]
        chosen = jnp.take(tile.pick(self.block_mask), rows, axis=2, mode="clip")
        return jnp.take(chosen, columns, axis=3, mode="clip")

    def possible(self, grid):
        visible, total = self.block_mask.astype(jnp.int32), jnp.ones_like(self.block_mask, jnp.int32)
        found, size = _rectangles(visible, grid, self.block_size), _rectangles(total, grid, self.block_size)
        return found > 0, found == size

    def sizes(self):
        return _leading(self.block_mask, 3), _leading(self.block_mask, 2, last=-3)


@mask_class
class Dense(Mask):
    array: Any

    def __repr__(self):
        return f"dense({short(self.array)})"

    def bind(self, shape):
        return Dense(shape.scores(self.array, "mask"))

    def tile(self, tile):
        return tile.cut(self.array)

    def possible(self, grid):
        return grid.reduce(self.array, jnp.any, False), grid.reduce(self.array, jnp.all, True)

    def sizes(self):
        return _leading(self.array, 3), _leading(self.array, 2, last=-3)


@mask_class
class Predicate(Mask):
    aux: tuple
    function: Callable = static()

    def __repr__(self):
        return f"predicate({', '.join([repr(self.function), *map(short, self.aux)])})"

    def bind(self, shape):
        return Predicate(
            tuple(shape.scores(a, f"predicate aux {i}") for i, a in enumerate(self.aux)), self.function
        )

    def tile(self, tile):
        aux = [tile.cut(a) for a in self.aux]
        visible = self.function.on_tile(tile.batch, tile.head, tile.query_position, tile.key_index, *aux)
        if visible.dtype != jnp.bool_:
            raise TypeError(f"predicate {self.function!r} returned {visible.dtype}; it must return bool")
        return visible

    def sizes(self):
        return (
            max((_leading(a, 3) for a in self.aux), default=1),
            max((_leading(a, 2, last=-3) for a in self.aux), default=1),
        )


@mask_class
class Tree(Mask):
    ancestors: Any
    """bool `[*B, T, T]`: node t's path to its root, itself included."""

    def __repr__(self):
        return f"tree({self.ancestors.shape[-1]} tokens)"

    def bind(self, shape):
        if shape.sequences is not None:
            raise NotImplementedError("tree masks need one rectangle of queries: packed sequences cannot carry them")
        x = self.ancestors
        want = (*shape.batch, shape.num_queries, shape.num_queries)
        if x.shape not in (want, want[-2:]):
            raise ValueError(
                f"tree parents have shape {x.shape[:-1]}; expected {want[-1:]} or {want[:-1]}: one parent a query"
            )
        return Tree(x.reshape(math.prod(x.shape[:-2]), 1, *want[-2:]))

    def tile(self, tile):
        node = tile.key_index - tile.offset  # [B or 1, 1, 1, num_keys]
        count = self.ancestors.shape[-1]
        rows = jnp.clip(tile.query_index[0, 0, :, 0], 0, count - 1)
        mine = jnp.take(self.ancestors, rows, axis=2)
        columns = jnp.broadcast_to(jnp.clip(node, 0, count - 1), (*node.shape[:2], mine.shape[2], node.shape[3]))
        batch = (max(columns.shape[0], mine.shape[0]),)
        mine, columns = (jnp.broadcast_to(x, batch + x.shape[1:]) for x in (mine, columns))
        return (node < 0) | ((node < count) & jnp.take_along_axis(mine, columns, axis=3))

    def span(self, rows):
        return 0, rows.last + 1

    def possible(self, grid):
        (_, last), (start, end) = grid.queries, grid.keys
        return start <= last, end < grid.offset

    def sizes(self):
        return _leading(self.ancestors, 2), 1


def _rectangles(x, grid, block):
    """Sums `x [.., nq, nk]`, one number a mask block, over the mask blocks that each block of `grid` touches."""
    for axis, own in ((2, block[0]), (3, block[1])):
        first, last = (e // own for e in grid.edges(axis))
        running = jnp.cumsum(jnp.pad(x, [(int(a == axis), 0) for a in range(4)]), axis=axis, dtype=jnp.int32)
        x = jnp.take(running, last + 1, axis=axis) - jnp.take(running, first, axis=axis)
    return x


def _leading(x, trailing, last=None):
    """Product of the axes before the last `trailing`, or the size of axis `last` when there is one."""
    if last is not None:
        return x.shape[last] if x.ndim >= -last else 1
    return math.prod(x.shape[: max(0, x.ndim - trailing)])


def short(x, values=False):
    if isinstance(x, int):
        return str(x)
    concrete = isinstance(x, jax.Array | np.ndarray) and not isinstance(x, jax.core.Tracer)
    if values or (concrete and x.size <= 8 and x.ndim <= 1):
        return str(np.asarray(x).tolist())
    return f"{jnp.dtype(x.dtype).name}{list(x.shape)}"

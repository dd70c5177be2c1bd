"""Which keys a query may see: a small algebra of masks.

A mask is an immutable pytree: its arrays are leaves, everything else is static, so equal masks share one compilation.
Combine masks with `&`, `|` and `~`; pass the result as `mask=` to any jattn op, inside `jit` or out.

    from jattn import masks
    mask = masks.causal() & masks.window(255, 0) & masks.segments(document_ids)
    print(mask.draw(64, 64))

A mask answers three questions, none of which needs an array of T x S elements:

* `span` and `row_bounds`: which interval of keys can a query see at most;
* `classify`: which blocks of the score matrix are hidden (skip), visible (full) or mixed (partial);
* `tile`: which elements of one tile are visible.

`query_offset` places query t at position `query_offset + t` on the key axis; causal, window, prefix, predicate and tree
masks look at that position. Sources: FlashAttention's and FlexAttention's block masks; `tokamax` for row ranges.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jattn._callables import Callable
from jattn._tile import Grid, Rows, Tile

__all__ = [
    "BlockMap", "Mask", "blocks", "causal", "dense", "lengths", "predicate", "prefix", "segments", "tree", "window",
]


def _mask(cls):
    """Registers a mask class: fields marked `static` are part of the tree structure, the others are leaves."""
    cls = dataclasses.dataclass(frozen=True, eq=False, repr=False)(cls)
    static = [f.name for f in dataclasses.fields(cls) if f.metadata.get("static")]
    leaves = [f.name for f in dataclasses.fields(cls) if not f.metadata.get("static")]
    return jax.tree_util.register_dataclass(cls, data_fields=leaves, meta_fields=static)


def _static(**kwargs):
    return dataclasses.field(metadata={"static": True}, **kwargs)


class Mask:
    """Base of all masks. Users build masks with the functions of this module and combine them with `&`, `|`, `~`."""

    #: Whether `span` alone tells which blocks are worth visiting (no block map needed).
    interval = False

    def __and__(self, other):
        return And(self, _as_mask(other)) if isinstance(other, Mask | np.ndarray | jax.Array) else NotImplemented

    def __or__(self, other):
        return Or(self, _as_mask(other)) if isinstance(other, Mask | np.ndarray | jax.Array) else NotImplemented

    __rand__ = __and__
    __ror__ = __or__

    def __invert__(self):
        return self.inner if isinstance(self, Not) else Not(self)

    def __bool__(self):
        raise TypeError("a mask has no truth value: combine masks with &, | and ~ instead of and, or and not")

    def __eq__(self, other):
        """Same structure and, where arrays are concrete, same values."""
        if not isinstance(other, Mask):
            return NotImplemented
        mine, structure = jax.tree.flatten(self)
        theirs, other_structure = jax.tree.flatten(other)
        return structure == other_structure and all(
            a is b or (jnp.shape(a) == jnp.shape(b) and bool(jnp.all(jnp.asarray(a) == jnp.asarray(b))))
            for a, b in zip(mine, theirs, strict=True)
        )

    def __hash__(self):
        return hash(jax.tree.structure(self))

    # What each mask defines.

    def bind(self, shape: "Shape") -> "Mask":
        """The mask with every array checked against the call's shape and brought to four axes `[B, N, T, S]`."""
        return self

    def tile(self, tile: Tile):
        """Visible elements of one tile, bool, broadcastable to `[B, N, num_queries, num_keys]` (bound masks only)."""
        raise NotImplementedError

    def span(self, rows: Rows):
        """Scalars `(lo, hi)`: no query of `rows` sees a key index below lo or at or above hi."""
        return 0, rows.num_keys

    def key_limit(self):
        """`[B, 1, 1, 1]` number of leading keys outside which nothing may leave a trace, or None."""
        return None

    def possible(self, grid: "Grid"):
        """(some, all): can a block hold a visible element; are all its elements certainly visible."""
        return jnp.ones((1, 1, 1, 1), bool), jnp.zeros((1, 1, 1, 1), bool)

    def _bounds(self, position, num_keys):
        """Per-row `(lo, hi)` when the visible keys of every row are an interval, else None."""
        return None

    # What every mask can do.

    def materialize(self, num_queries: int, num_keys: int, query_offset=0, *, batch: int = 1, heads: int = 1):
        """The whole mask as bool `[batch, heads, T, S]`, for tests and drawings: the one method that needs O(T·S)."""
        bound, offset = self._bound(num_queries, num_keys, query_offset, batch, heads)
        tile = Tile(
            row=0, column=0, num_queries=num_queries, num_keys=num_keys, offset=offset,
            batch=jnp.arange(batch, dtype=jnp.int32).reshape(-1, 1, 1, 1),
            head=jnp.arange(heads, dtype=jnp.int32).reshape(1, -1, 1, 1),
        )
        return jnp.broadcast_to(bound.tile(tile), (batch, heads, num_queries, num_keys))

    def classify(
        self, num_queries: int, num_keys: int, block=(128, 128), query_offset=0, *, batch: int = 1, heads: int = 1
    ) -> "BlockMap":
        """Which blocks are skipped, partial or full.

        `skip` and `full` are promises; `partial` may be said of a block that is neither (a predicate's always are).

        Args:
            num_queries, num_keys: T and S.
            block: `(block_q, block_k)` rows and columns of a block, or one int for both.
            query_offset: int or `[B]`.

        Returns:
            A `BlockMap` with `kind [B or 1, N or 1, ceil(T / block_q), ceil(S / block_k)]`.
        """
        block_q, block_k = (block, block) if isinstance(block, int) else block
        bound, offset = self._bound(num_queries, num_keys, query_offset, batch, heads)
        some, every = bound.possible(Grid(num_queries, num_keys, block_q, block_k, offset))
        kind = some.astype(jnp.int8) + (some & every).astype(jnp.int8)
        grid = (math.ceil(num_queries / block_q), math.ceil(num_keys / block_k))
        return BlockMap(jnp.broadcast_to(kind, (*kind.shape[:2], *grid)), (block_q, block_k))

    def row_bounds(self, num_queries: int, num_keys: int, query_offset=0, *, batch: int = 1):
        """`(lo, hi)`, int32 `[B or 1, T]` each: row t sees exactly the keys `lo[t] <= s < hi[t]`; or None.

        None means that the rows of this mask are not intervals (or not known to be).
        """
        bound, offset = self._bound(num_queries, num_keys, query_offset, batch, 1)
        position = jnp.arange(num_queries, dtype=jnp.int32)[None, :] + jnp.reshape(jnp.asarray(offset), (-1, 1))
        bounds = bound._bounds(position, num_keys)
        if bounds is None:
            return None
        lo, hi = jnp.broadcast_arrays(*(jnp.clip(x, 0, num_keys) for x in bounds))
        return lo, jnp.maximum(lo, hi)

    def draw(self, num_queries: int, num_keys: int, query_offset=0) -> str:
        """The mask of batch row 0, head 0 as text: `█` a full block, `▒` a partial one, `·` hidden; at most 64 wide.

        A legend line follows. Small masks are drawn element by element.
        """
        side = max(1, math.ceil(max(num_queries, num_keys) / 64))
        grid = _coarse(self.materialize(num_queries, num_keys, query_offset, **self._extent())[0, 0], side)
        lines = ["".join("·▒█"[k] for k in row) for row in grid]
        scale = "one character an element" if side == 1 else f"one character {side} x {side} elements"
        return "\n".join([*lines, f"{self!r}: rows are queries, columns are keys, {scale}"])

    def plot(self, num_queries: int, num_keys: int, query_offset=0, *, ax=None):
        """Draws the mask of batch row 0, head 0 with matplotlib and returns the axes."""
        import matplotlib.pyplot as plt

        ax = ax if ax is not None else plt.subplots(figsize=(4, 4))[1]
        visible = np.asarray(self.materialize(num_queries, num_keys, query_offset, **self._extent())[0, 0])
        ax.imshow(visible, cmap="Blues", vmin=0, vmax=1.4, interpolation="nearest", aspect="auto")
        ax.set(xlabel="key s", ylabel="query t", title=repr(self))
        return ax

    def _extent(self):
        """The smallest batch and head counts that the arrays of this mask broadcast to."""
        sizes = [m._sizes() for m in _terms(self)]
        return {"batch": max(b for b, _ in sizes), "heads": max(n for _, n in sizes)}

    def _sizes(self):
        return 1, 1

    def _bound(self, num_queries, num_keys, query_offset, batch, heads):
        offset = query_offset
        if not isinstance(offset, int | np.integer):
            offset = jnp.asarray(offset, jnp.int32).reshape(-1, 1, 1, 1)
            batch = max(batch, offset.shape[0])
        return self.bind(Shape((batch,), heads, num_queries, num_keys)), offset


@dataclasses.dataclass(frozen=True)
class Shape:
    """What a mask is bound against: leading batch axes, heads, T and S. `lengths` is how many sequences there are
    per-sequence numbers for: the batch, or the number of packed sequences."""

    batch: tuple[int, ...]
    heads: int
    num_queries: int
    num_keys: int
    sequences: int | None = None

    def per_sequence(self, x, name):
        """An int or `[*B]` array as `[B or 1, 1, 1, 1]` int32 (or the int itself)."""
        if isinstance(x, int | np.integer):
            return int(x)
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


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BlockMap:
    """Block classes of a mask. `kind`: int8 `[B or 1, N or 1, nq, nk]`, 0 skip, 1 partial, 2 full."""

    kind: Any
    block: tuple[int, int] = dataclasses.field(metadata={"static": True})

    def transpose(self) -> "BlockMap":
        """The same map seen from the keys: `kind [.., nk, nq]`, which queries can see a block of keys."""
        return BlockMap(jnp.swapaxes(self.kind, -1, -2), self.block[::-1])

    def __repr__(self):
        names = ("skip", "partial", "full")
        counts = [int(jnp.sum(self.kind == k)) for k in range(3)]
        listed = ", ".join(f"{count} {name}" for count, name in zip(counts, names, strict=True))
        return f"BlockMap({self.block[0]} x {self.block[1]}: {listed})"


@_mask
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

    def _bounds(self, position, num_keys):
        return jnp.zeros_like(position), position + 1


@_mask
class Window(Mask):
    left: int | None = _static()
    right: int | None = _static()
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

    def _bounds(self, position, num_keys):
        lo = jnp.zeros_like(position) if self.left is None else position - self.left
        return lo, jnp.full_like(position, num_keys) if self.right is None else position + self.right + 1


@_mask
class Prefix(Mask):
    length: Any
    interval = True

    def __repr__(self):
        return f"prefix({_short(self.length)})"

    def bind(self, shape):
        return Prefix(shape.per_sequence(self.length, "prefix length"))

    def tile(self, tile):
        return (tile.key_index <= tile.query_position) | (tile.key_index < _picked(tile, self.length))

    def span(self, rows):
        return 0, jnp.maximum(rows.last + 1, rows.high(self.length))

    def possible(self, grid):
        (first, last), (start, end) = grid.queries, grid.keys
        return (start <= last) | (start < self.length), (end <= first) | (end < self.length)

    def _bounds(self, position, num_keys):
        length = self.length if isinstance(self.length, int) else self.length.reshape(-1, 1)
        return jnp.zeros_like(position), jnp.maximum(position + 1, length)

    def _sizes(self):
        return jnp.size(self.length), 1


@_mask
class Lengths(Mask):
    length: Any
    interval = True

    def __repr__(self):
        return f"lengths({_short(self.length)})"

    def bind(self, shape):
        return Lengths(shape.per_sequence(self.length, "key lengths"))

    def tile(self, tile):
        return tile.key_index < _picked(tile, self.length)

    def span(self, rows):
        return 0, rows.high(self.length)

    def key_limit(self):
        return self.length

    def possible(self, grid):
        start, end = grid.keys
        return start < self.length, end < self.length

    def _bounds(self, position, num_keys):
        length = self.length if isinstance(self.length, int) else self.length.reshape(-1, 1)
        return jnp.zeros_like(position), jnp.zeros_like(position) + length

    def _sizes(self):
        return jnp.size(self.length), 1


@_mask
class Segments(Mask):
    query_ids: Any
    key_ids: Any

    def __repr__(self):
        same = self.query_ids is self.key_ids
        return f"segments({_short(self.query_ids)})" if same else (
            f"segments({_short(self.query_ids)}, {_short(self.key_ids)})"
        )

    def bind(self, shape):
        return Segments(
            shape.per_token(self.query_ids, "query segment ids", 2), shape.per_token(self.key_ids, "key segment ids", 3)
        )

    def tile(self, tile):
        return tile.cut(self.query_ids) == tile.cut(self.key_ids)

    def possible(self, grid):
        low, high = jnp.iinfo(self.query_ids.dtype).min, jnp.iinfo(self.query_ids.dtype).max
        q0, q1 = grid.reduce(self.query_ids, jnp.min, high), grid.reduce(self.query_ids, jnp.max, low)
        k0, k1 = grid.reduce(self.key_ids, jnp.min, high), grid.reduce(self.key_ids, jnp.max, low)
        return (q0 <= k1) & (k0 <= q1), (q0 == k1) & (k0 == q1)

    def _sizes(self):
        return max(_leading(self.query_ids, 1), _leading(self.key_ids, 1)), 1


@_mask
class Blocks(Mask):
    block_mask: Any
    block_size: tuple[int, int] = _static()

    def __repr__(self):
        return f"blocks({_short(self.block_mask)}, block_size={self.block_size})"

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

    def _sizes(self):
        return _leading(self.block_mask, 3), _leading(self.block_mask, 2, last=-3)


@_mask
class Dense(Mask):
    array: Any

    def __repr__(self):
        return f"dense({_short(self.array)})"

    def bind(self, shape):
        return Dense(shape.scores(self.array, "mask"))

    def tile(self, tile):
        return tile.cut(self.array)

    def possible(self, grid):
        return grid.reduce(self.array, jnp.any, False), grid.reduce(self.array, jnp.all, True)

    def _sizes(self):
        return _leading(self.array, 3), _leading(self.array, 2, last=-3)


@_mask
class Predicate(Mask):
    aux: tuple
    function: Callable = _static()

    def __repr__(self):
        return f"predicate({', '.join([repr(self.function), *map(_short, self.aux)])})"

    def bind(self, shape):
        return Predicate(
            tuple(shape.scores(a, f"predicate aux {i}") for i, a in enumerate(self.aux)), self.function
        )

    def tile(self, tile):
        aux = [tile.cut(a) for a in self.aux]
        visible = self.function(tile.batch, tile.head, tile.query_position, tile.key_index, *aux)
        if jnp.result_type(visible) != jnp.bool_:
            raise TypeError(f"predicate {self.function!r} returned {jnp.result_type(visible)}; it must return bool")
        return jnp.asarray(visible).reshape((1,) * (4 - jnp.ndim(visible)) + jnp.shape(visible))

    def _sizes(self):
        return (
            max((_leading(a, 3) for a in self.aux), default=1),
            max((_leading(a, 2, last=-3) for a in self.aux), default=1),
        )


@_mask
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

    def _sizes(self):
        return _leading(self.ancestors, 2), 1


@_mask
class And(Mask):
    left: Mask
    right: Mask

    def __repr__(self):
        return f"{_parenthesised(self.left, Or)} & {_parenthesised(self.right, Or)}"

    @property
    def interval(self):
        return self.left.interval and self.right.interval

    def bind(self, shape):
        return And(self.left.bind(shape), self.right.bind(shape))

    def tile(self, tile):
        return self.left.tile(tile) & self.right.tile(tile)

    def span(self, rows):
        (a, b), (c, d) = self.left.span(rows), self.right.span(rows)
        return jnp.maximum(a, c), jnp.minimum(b, d)

    def key_limit(self):
        limits = [x for x in (self.left.key_limit(), self.right.key_limit()) if x is not None]
        return jnp.minimum(*limits) if len(limits) == 2 else limits[0] if limits else None

    def possible(self, grid):
        (a, b), (c, d) = self.left.possible(grid), self.right.possible(grid)
        return a & c, b & d

    def _bounds(self, position, num_keys):
        mine, theirs = self.left._bounds(position, num_keys), self.right._bounds(position, num_keys)
        if mine is None or theirs is None:
            return None
        return jnp.maximum(mine[0], theirs[0]), jnp.minimum(mine[1], theirs[1])


@_mask
class Or(Mask):
    left: Mask
    right: Mask

    def __repr__(self):
        return f"{self.left!r} | {self.right!r}"

    def bind(self, shape):
        return Or(self.left.bind(shape), self.right.bind(shape))

    def tile(self, tile):
        return self.left.tile(tile) | self.right.tile(tile)

    def span(self, rows):
        (a, b), (c, d) = self.left.span(rows), self.right.span(rows)
        return jnp.minimum(a, c), jnp.maximum(b, d)

    def key_limit(self):
        limits = self.left.key_limit(), self.right.key_limit()
        return None if None in limits else jnp.maximum(*limits)

    def possible(self, grid):
        (a, b), (c, d) = self.left.possible(grid), self.right.possible(grid)
        return a | c, b | d


@_mask
class Not(Mask):
    inner: Mask

    def __repr__(self):
        return f"~{_parenthesised(self.inner, And, Or)}"

    def bind(self, shape):
        return Not(self.inner.bind(shape))

    def tile(self, tile):
        return ~self.inner.tile(tile)

    def possible(self, grid):
        some, every = self.inner.possible(grid)
        return ~every, ~some


# Constructors: the public names, which check what they are given.


def causal() -> Mask:
    """Query at position p sees keys at positions up to and including p."""
    return Causal()


_SAME = object()


def window(left: int | None, right: Any = _SAME) -> Mask:
    """Query at position p sees keys from `p - left` to `p + right`, both included.

    Args:
        left, right: ints (negative ones are real bounds) or None for unbounded. `window(w)` means `window(w, w)`.

    Raises:
        ValueError: `left + right < 0`: no key could ever be visible.
        TypeError: a bound that is not an int or None (a traced bound, say).

    Example:
        `masks.window(3, 0)`: the query's own position and the three before it, four keys.
    """
    right = left if right is _SAME else right
    for name, bound in (("left", left), ("right", right)):
        if bound is not None and (isinstance(bound, bool) or not isinstance(bound, int | np.integer)):
            raise TypeError(f"window {name}={bound!r} must be an int or None, not {type(bound).__name__}")
    left, right = (None if b is None else int(b) for b in (left, right))
    if left is not None and right is not None and left + right < 0:
        raise ValueError(f"window ({left}, {right}) is empty: left + right must be >= 0; use None for unbounded")
    return Window(left, right)


def prefix(length) -> Mask:
    """The prefix-LM rule: keys before position `length` are visible to every query, later ones causally.

    Args:
        length: int, or int array `[*B]` (one a sequence).
    """
    return Prefix(_integers(length, "prefix length"))


def lengths(key_lengths) -> Mask:
    """Only the first `key_lengths` keys of each sequence exist: int, or int array `[*B]`.

    Keys and values beyond them may hold anything, NaN included.
    """
    return Lengths(_integers(key_lengths, "key lengths"))


def segments(query_ids, key_ids=None) -> Mask:
    """Packed documents: a query sees the keys of equal id. Only equality matters: any ids, any order.

    Args:
        query_ids: int `[T]` or `[*B, T]`.
        key_ids: int `[S]` or `[*B, S]`; None when queries and keys are the same tokens.
    """
    query_ids = _array(query_ids, "query segment ids", jnp.integer)
    key_ids = query_ids if key_ids is None else _array(key_ids, "key segment ids", jnp.integer)
    if query_ids.dtype != key_ids.dtype:
        raise TypeError(f"key segment ids are {key_ids.dtype}, query segment ids are {query_ids.dtype}: use one dtype")
    for name, ids in (("query", query_ids), ("key", key_ids)):
        if ids.ndim == 0:
            raise ValueError(f"{name} segment ids are a scalar; expected one id a token")
    return Segments(query_ids, key_ids)


def blocks(block_mask, block_size) -> Mask:
    """Block-sparse attention: block (i, j) of the score matrix is visible where `block_mask[..., i, j]` is true.

    Args:
        block_mask: bool, broadcastable to `[*B, N, ceil(T / block_q), ceil(S / block_k)]`.
        block_size: `(block_q, block_k)`, or one int for both.
    """
    size = (block_size, block_size) if isinstance(block_size, int) else tuple(block_size)
    if len(size) != 2 or any(isinstance(b, bool) or not isinstance(b, int) or b <= 0 for b in size):
        raise ValueError(f"block_size={block_size!r} must be a positive int or a pair of them")
    return Blocks(_array(block_mask, "block_mask", jnp.bool_), size)


def dense(array) -> Mask:
    """An arbitrary mask: bool, broadcastable to `[*B, N, T, S]`; true means visible."""
    return Dense(_array(array, "mask", jnp.bool_))


def predicate(function, *aux) -> Mask:
    """A rule in elementwise JAX: `function(b, n, t, s, *aux) -> bool`.

    Args:
        function: b is the flat batch index (or the sequence index of packed sequences), n the head, t and s the
            positions of query and key, all int32 and broadcastable against each other. It may close over Python
            numbers, never over arrays.
        *aux: arrays that broadcast to `[*B, N, T, S]`; the function receives them already at its element.

    Raises:
        TypeError: the function closes over an array, or returns something other than bool.

    Example:
        `masks.predicate(lambda b, n, t, s, stride: (t - s) % stride == 0, strides[:, None, None])`
    """
    return Predicate(
        tuple(_array(a, f"predicate aux {i}") for i, a in enumerate(aux)),
        Callable(function, "masks.predicate(fn, *arrays) with fn(b, n, t, s, *arrays)"),
    )


def tree(parents) -> Mask:
    """Tree verification: T draft tokens at positions `offset .. offset + T - 1` see every key before them and, among
    themselves, only their ancestors and themselves.

    Args:
        parents: int `[T]` or `[*B, T]`: index of each token's parent, which comes before it; -1 for a root.

    Raises:
        ValueError: a concrete parent that is not in [-1, t).
    """
    parents = _array(parents, "tree parents", jnp.integer)
    if parents.ndim == 0:
        raise ValueError("tree parents are a scalar; expected one parent a query")
    count = parents.shape[-1]
    order = jnp.arange(count, dtype=parents.dtype)
    if not isinstance(parents, jax.core.Tracer) and bool(jnp.any((parents >= order) | (parents < -1))):
        raise ValueError(f"tree parents {_short(parents, values=True)} must satisfy -1 <= parents[t] < t")

    def add(t, ancestors):
        parent = jax.lax.dynamic_index_in_dim(parents, t, -1)  # [*B, 1]
        path = jnp.take_along_axis(ancestors, jnp.maximum(parent, 0)[..., None], axis=-2)[..., 0, :]
        path = (path & (parent >= 0)) | (order == t.astype(order.dtype))
        return jax.lax.dynamic_update_index_in_dim(ancestors, path, t, -2)

    start = jnp.broadcast_to(jnp.zeros((), bool) & (parents[..., None] < 0), (*parents.shape, count))
    return Tree(jax.lax.fori_loop(jnp.int32(0), jnp.int32(count), add, start) if count else start)


def _as_mask(x) -> Mask:
    return x if isinstance(x, Mask) else dense(x)


def _integers(x, name):
    """A Python int stays static; an array becomes a leaf."""
    if isinstance(x, bool):
        raise TypeError(f"{name}={x!r} must be an int or an int array, not bool")
    if isinstance(x, int | np.integer):
        if x < 0:
            raise ValueError(f"{name}={x} must be >= 0")
        return int(x)
    return _array(x, name, jnp.integer)


def _array(x, name, kind=None):
    if isinstance(x, np.ndarray | np.generic | list | tuple):
        x = jnp.asarray(x)
    if not hasattr(x, "dtype") or not hasattr(x, "shape"):
        raise TypeError(f"{name} must be an array, not {type(x).__name__}")
    if kind is not None and not jnp.issubdtype(x.dtype, kind):
        hint = "; additive masks go to bias" if name == "mask" and jnp.issubdtype(x.dtype, jnp.floating) else ""
        raise TypeError(f"{name} must be {'bool' if kind is jnp.bool_ else 'integer'}, not {x.dtype}{hint}")
    return x


def _terms(mask):
    children = [v for v in vars(mask).values() if isinstance(v, Mask)]
    return [t for c in children for t in _terms(c)] if children else [mask]


def _picked(tile, x):
    return x if isinstance(x, int) else tile.pick(x)


def _rectangles(x, grid, block):
    """Sums `x [.., nq, nk]`, one number a mask block, over the mask blocks that each block of `grid` touches."""
    for axis, (length, size, own) in ((2, (grid.num_queries, grid.block_q, block[0])),
                                      (3, (grid.num_keys, grid.block_k, block[1]))):
        first, last = (e // own for e in Grid.edges(length, size))
        running = jnp.cumsum(jnp.pad(x, [(int(a == axis), 0) for a in range(4)]), axis=axis, dtype=jnp.int32)
        x = jnp.take(running, last + 1, axis=axis) - jnp.take(running, first, axis=axis)
    return x


def _coarse(visible, side):
    """0 hidden, 1 partial, 2 full for each `side` x `side` square of a bool matrix."""
    visible = np.asarray(visible)
    rows = range(0, visible.shape[0], side)
    columns = range(0, visible.shape[1], side)
    squares = [[visible[r : r + side, c : c + side] for c in columns] for r in rows]
    return [[int(square.any()) + int(square.all()) for square in row] for row in squares]


def _leading(x, trailing, last=None):
    """Product of the axes before the last `trailing`, or the size of axis `last` when there is one."""
    if last is not None:
        return x.shape[last] if x.ndim >= -last else 1
    return math.prod(x.shape[: max(0, x.ndim - trailing)])


def _parenthesised(mask, *kinds):
    return f"({mask!r})" if isinstance(mask, kinds) else repr(mask)


def _short(x, values=False):
    if isinstance(x, int):
        return str(x)
    concrete = isinstance(x, jax.Array | np.ndarray) and not isinstance(x, jax.core.Tracer)
    if values or (concrete and x.size <= 8 and x.ndim <= 1):
        return str(np.asarray(x).tolist())
    return f"{jnp.dtype(x.dtype).name}{list(x.shape)}"

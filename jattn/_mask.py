"""What every mask can do, and how masks combine. `masks` holds the constructors, `_mask_rules` the rules."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jattn._tile import Grid, Rows, Shape, Tile, maximum, minimum


def mask_class(cls):
    """Registers a mask class: fields marked `static` are part of the tree structure, the others are leaves."""
    cls = dataclasses.dataclass(frozen=True, eq=False, repr=False)(cls)
    static = [f.name for f in dataclasses.fields(cls) if f.metadata.get("static")]
    leaves = [f.name for f in dataclasses.fields(cls) if not f.metadata.get("static")]
    return jax.tree_util.register_dataclass(cls, data_fields=leaves, meta_fields=static)


def static(**kwargs):
    return dataclasses.field(metadata={"static": True}, **kwargs)


class Mask:
    """Base of all masks. Users build masks with the functions of this module and combine them with `&`, `|`, `~`."""

    #: Whether `span` alone tells which blocks are worth visiting (no block map needed).
    interval = False

    __array_ufunc__ = None  # so that NumPy arrays leave `array & mask` to us

    def __and__(self, other):
        return And(self, _operand(other))

    def __or__(self, other):
        return Or(self, _operand(other))

    __rand__, __ror__ = __and__, __or__  # only ever reached with something that is not a mask

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

    def bind(self, shape: Shape) -> "Mask":
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

    def possible(self, grid: Grid):
        """(some, all): can a block hold a visible element; are all its elements certainly visible."""
        return jnp.ones((1, 1, 1, 1), bool), jnp.zeros((1, 1, 1, 1), bool)

    def row_interval(self, position, num_keys):
        """Per-row `(lo, hi)` when the visible keys of every row are an interval, else None."""
        return None

    # What every mask can do.

    def materialize(self, num_queries: int, num_keys: int, query_offset=0, *, batch=None, heads=None):
        """The whole mask as bool `[batch, heads, T, S]`, for tests and drawings: the one method that needs O(T·S).

        `batch` and `heads` default to what the arrays of the mask (and of `query_offset`) have.
        """
        bound, offset, batch, heads = self._bound(num_queries, num_keys, query_offset, batch, heads)
        tile = Tile(
            row=0, column=0, num_queries=num_queries, num_keys=num_keys, offset=offset,
            batch=jnp.arange(batch, dtype=jnp.int32).reshape(-1, 1, 1, 1),
            head=jnp.arange(heads, dtype=jnp.int32).reshape(1, -1, 1, 1),
        )
        return jnp.broadcast_to(bound.tile(tile), (batch, heads, num_queries, num_keys))

    def classify(
        self, num_queries: int, num_keys: int, block=(128, 128), query_offset=0, *, batch=None, heads=None
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
        bound, offset, _, _ = self._bound(num_queries, num_keys, query_offset, batch, heads)
        some, every = bound.possible(Grid(num_queries, num_keys, block_q, block_k, offset))
        kind = some.astype(jnp.int8) + (some & every).astype(jnp.int8)
        grid = (math.ceil(num_queries / block_q), math.ceil(num_keys / block_k))
        return BlockMap(jnp.broadcast_to(kind, (*kind.shape[:2], *grid)), (block_q, block_k))

    def row_bounds(self, num_queries: int, num_keys: int, query_offset=0, *, batch=None):
        """`(lo, hi)`, int32 `[B or 1, T]` each: row t sees exactly the keys `lo[t] <= s < hi[t]`; or None.

        None means that the rows of this mask are not intervals (or not known to be).
        """
        bound, offset, _, _ = self._bound(num_queries, num_keys, query_offset, batch, None)
        position = jnp.arange(num_queries, dtype=jnp.int32)[None, :] + jnp.reshape(jnp.asarray(offset), (-1, 1))
        bounds = bound.row_interval(position, num_keys)
        if bounds is None:
            return None
        lo, hi = jnp.broadcast_arrays(*(jnp.clip(x, 0, num_keys) for x in bounds))
        return lo, jnp.maximum(lo, hi)

    def draw(self, num_queries: int, num_keys: int, query_offset=0) -> str:
        """The mask of batch row 0, head 0 as text: `█` a full block, `▒` a partial one, `·` hidden; at most 64 wide.

        A legend line follows. Small masks are drawn element by element.
        """
        side = max(1, math.ceil(max(num_queries, num_keys) / 64))
        grid = _coarse(self.materialize(num_queries, num_keys, query_offset)[0, 0], side)
        lines = ["".join("·▒█"[k] for k in row) for row in grid]
        scale = "one character an element" if side == 1 else f"one character {side} x {side} elements"
        return "\n".join([*lines, f"{self!r}: rows are queries, columns are keys, {scale}"])

    def plot(self, num_queries: int, num_keys: int, query_offset=0, *, ax=None):
        """Draws the mask of batch row 0, head 0 with matplotlib and returns the axes."""
        import matplotlib.pyplot as plt

        ax = ax if ax is not None else plt.subplots(figsize=(4, 4))[1]
        visible = np.asarray(self.materialize(num_queries, num_keys, query_offset)[0, 0])
        ax.imshow(visible, cmap="Blues", vmin=0, vmax=1.4, interpolation="nearest", aspect="auto")
        ax.set(xlabel="key s", ylabel="query t", title=repr(self))
        return ax

    def sizes(self):
        """Batch and heads that the arrays of this mask have, 1 where they broadcast (masks not yet bound)."""
        return 1, 1

    def _bound(self, num_queries, num_keys, query_offset, batch, heads):
        offset = query_offset
        if not isinstance(offset, int | np.integer):
            offset = jnp.asarray(offset, jnp.int32).reshape(-1, 1, 1, 1)
        sizes = [term.sizes() for term in _terms(self)]
        batch = batch or max(jnp.size(offset), *(size[0] for size in sizes))
        heads = heads or max(size[1] for size in sizes)
        return self.bind(Shape((batch,), heads, num_queries, num_keys)), offset, batch, heads


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


@mask_class
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
        return maximum(a, c), minimum(b, d)

    def key_limit(self):
        limits = [x for x in (self.left.key_limit(), self.right.key_limit()) if x is not None]
        return jnp.minimum(*limits) if len(limits) == 2 else limits[0] if limits else None

    def possible(self, grid):
        (a, b), (c, d) = self.left.possible(grid), self.right.possible(grid)
        return a & c, b & d

    def row_interval(self, position, num_keys):
        mine, theirs = self.left.row_interval(position, num_keys), self.right.row_interval(position, num_keys)
        if mine is None or theirs is None:
            return None
        return maximum(mine[0], theirs[0]), minimum(mine[1], theirs[1])


@mask_class
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
        return minimum(a, c), maximum(b, d)

    def key_limit(self):
        limits = self.left.key_limit(), self.right.key_limit()
        return None if any(x is None for x in limits) else jnp.maximum(*limits)

    def possible(self, grid):
        (a, b), (c, d) = self.left.possible(grid), self.right.possible(grid)
        return a | c, b | d


@mask_class
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


def _operand(x) -> Mask:
    if not isinstance(x, Mask):
        raise TypeError(f"& and | combine masks with masks, not with {type(x).__name__}; wrap an array in masks.dense")
    return x


def parts(mask) -> list[Mask]:
    """A mask and all the masks that it is made of."""
    inner = [v for v in vars(mask).values() if isinstance(v, Mask)]
    return [mask, *(p for m in inner for p in parts(m))]


def _terms(mask):
    children = [v for v in vars(mask).values() if isinstance(v, Mask)]
    return [t for c in children for t in _terms(c)] if children else [mask]


def _coarse(visible, side):
    """0 hidden, 1 partial, 2 full for each `side` x `side` square of a bool matrix."""
    visible = np.asarray(visible)
    rows = range(0, visible.shape[0], side)
    columns = range(0, visible.shape[1], side)
    squares = [[visible[r : r + side, c : c + side] for c in columns] for r in rows]
    return [[int(square.any()) + int(square.all()) for square in row] for row in squares]


def _parenthesised(mask, *kinds):
    return f"({mask!r})" if isinstance(mask, kinds) else repr(mask)

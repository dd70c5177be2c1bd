"""What the decode kernels are compiled for, what they read, and how a cache is cut into items of work.

An item is one split of the keys of one sequence under one key head, for one tile of its queries. Splits start at
multiples of a fixed number of keys, so that what is added to what depends on nothing but the sequence.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jattn.pallas.configs import SHARED_MEMORY_BYTES, padded_width
from jattn.pallas.hopper.lists import i32

LOG2E = math.log2(math.e)
STREAMS = 2  # of items in a thread block, each with a producer and a consumer warpgroup
ROWS = 64  # of a query tile
QUANTISED_ROWS = 8, 16, 32  # of one over a quantised cache, columns of its products: the fewest that the queries fill
BLOCK = 64  # keys a step
_MOST_STAGES = 6
_RESERVED_BYTES = 1024  # barriers and alignment


@dataclasses.dataclass(frozen=True)
class DecodeConfig:
    """How the decode kernel cuts a cache.

    Attributes:
        split: keys of an item, a multiple of 64. Results depend on it in their last bits.
        tables: whether block tables say where the keys are; else sequence b is page b. Dispatch decides.
    """

    split: int = 1024
    tables: bool = True

    def __post_init__(self):
        if not isinstance(self.split, int) or self.split <= 0 or self.split % BLOCK:
            raise ValueError(f"split={self.split!r} must be a positive multiple of {BLOCK}")


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is compiled in. `left` and `right` bound the keys of a query at position p to `[p − left, p + right]`; None
    is unbounded."""

    B: int
    T: int
    S: int  # keys that a sequence has room for
    N: int
    K: int
    H: int
    D: int
    pages: int  # P
    page: int | None  # slots of a page, a multiple of 16; None: a sequence has one page, of any size
    dtype: Any
    scale: float | None  # None: traced
    left: int | None
    right: int | None
    soft_cap: float | None
    config: DecodeConfig
    sinks: bool = False
    scales: tuple | None = None  # what a scale of keys and of values belongs to; None: the cache is not quantised

    @property
    def group(self) -> int:
        return self.N // self.K

    @property
    def tokens(self) -> int:
        """Query tokens of a tile, whose rows they fill with the heads of a group."""
        return min(self.T, self.rows // self.group)

    @property
    def rows(self) -> int:
        """Rows of a tile, not all of which may be filled."""
        if self.scales is None:
            return ROWS
        return next((rows for rows in QUANTISED_ROWS if rows >= self.T * self.group), QUANTISED_ROWS[-1])

    @property
    def tiles(self) -> int:
        return -(-self.T // self.tokens)

    @property
    def splits(self) -> int:
        """Splits of a sequence that fills the cache."""
        return max(1, -(-self.S // self.config.split))

    @property
    def merged(self) -> bool:
        """Whether a second kernel makes the result out of those of the splits; it is the one that knows of sinks."""
        return self.splits > 1 or self.sinks

    @property
    def stages(self) -> int:
        """Blocks of keys and values that a stream has in shared memory: as many as there is room for."""
        h, d = padded_width(self.H), padded_width(self.D)
        room = SHARED_MEMORY_BYTES[9, 0] - _RESERVED_BYTES - STREAMS * self.rows * h * 2
        if self.scales:  # slabs have 128 columns, and what warps merge and scales of tokens need room
            block = BLOCK * sum(-(-x // 128) * 128 for x in (h, d)) + 2 * BLOCK * 4
            room -= STREAMS * 4 * (8 * (self.D + 4) + 2 * self.rows) * 4 + 3 * 1024
        else:
            block = BLOCK * (h + d) * 2
        return min(_MOST_STAGES, room // (STREAMS * block))

    @property
    def page_rows(self) -> int:
        """Keys of one copy."""
        return BLOCK if self.page is None else min(self.page, BLOCK)

    @property
    def modified(self) -> bool:
        """Whether scores change on their way to the softmax; else the exponential's own factor scales them."""
        # max(s) · scale is the maximum of the scaled scores only for a positive scale.
        return self.scale is None or not self.scale > 0 or self.soft_cap is not None

    @property
    def factor(self) -> float:
        """Scores to log2 units."""
        return LOG2E if self.modified else self.scale * LOG2E


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Inputs:
    """The kernel's inputs in HBM; None where the problem has none."""

    q: Any  # [B, T, N, H]
    k: Any  # [P, page, K, H], of the plan's dtype or quantised
    v: Any  # [P, page, K, D], likewise
    lengths: Any  # int32 [B]
    tables: Any = None  # int32 [B, W]; None: sequence b is page b
    query_lengths: Any = None  # int32 [B]
    scale: Any = None  # float32 [1]
    sinks: Any = None  # float32 [1, N]
    k_scale: Any = None  # float32 [1] for the tensor, [K] one a head, or [P, page, K] one a token and head
    v_scale: Any = None


@dataclasses.dataclass(frozen=True)
class Sequence:
    """What any query of a sequence sees, as traced scalars."""

    queries: Any  # how many there are
    offset: Any  # position of the first
    keys: Any  # how many exist
    low: Any  # no query sees a key before this one,
    high: Any  # or at or past this one
    first: Any  # first split that an item is made of
    splits: Any  # how many, at least one, so that somebody writes the result


def sequence_of(plan, lengths, query_lengths, b) -> Sequence:
    """Sequence b of arrays in HBM, of any content."""
    p = plan
    keys = jnp.clip(lengths[b], 0, p.S)
    queries = i32(p.T) if query_lengths is None else jnp.clip(query_lengths[b], 0, p.T)
    offset = keys - queries
    high, low = jnp.where(queries > 0, keys, 0), i32(0)
    if p.right is not None:
        high = jnp.clip(offset + queries + p.right, 0, high)
    if p.left is not None:
        low = jnp.clip(offset - p.left, 0, p.S)
    split = i32(p.config.split)
    first = jnp.minimum(lax.div(low, split), p.splits - 1)
    splits = jnp.maximum(lax.div(high + (split - 1), split) - first, 1)
    return Sequence(queries, offset, keys, low, high, first, splits)


@dataclasses.dataclass(frozen=True)
class Item:
    """One split of one sequence under one key head for one tile, as traced scalars; `blocks` may be 0."""

    batch: Any
    head: Any
    split: Any
    token: Any  # first of the tile, counted in the sequence
    sequence: Sequence
    begin: Any  # first block of keys, counted in the sequence
    blocks: Any


def over_items(x, body, carry):
    """Folds `body(item, number, carry) -> carry` over this stream's items; `number` counts them.

    Items are dealt in turn to all streams of the grid, key heads first: who runs at one time reads whole rows of the
    cache, and tiles that read the same keys do so together. Only the lengths say how many items there are, so every
    warpgroup walks the sequences itself.

    Returns:
        (how many there were, carry).
    """
    p, together = x.plan, x.plan.K * x.plan.tiles

    def items(b):
        return sequence_of(p, x.lengths, x.query_lengths, jnp.minimum(b, p.B - 1)).splits * together

    def find(n, b, before, mine):
        """Moves on to the sequence of item n."""

        def step(state):
            b, before, mine = state
            return b + 1, before + mine, items(b + 1)

        return lax.while_loop(lambda s: (s[0] < p.B) & (n >= s[1] + s[2]), step, (b, before, mine))

    def one(state):
        n, r, b, before, mine, carry = state
        sequence = sequence_of(p, x.lengths, x.query_lengths, b)
        split = sequence.first + lax.div(n - before, i32(together))
        inside = lax.rem(n - before, i32(together))
        token = lax.div(inside, i32(p.K)) * p.tokens
        start = split * p.config.split
        begin = lax.div(jnp.maximum(sequence.low, start), i32(BLOCK))
        end = lax.div(jnp.minimum(sequence.high, start + p.config.split) + (BLOCK - 1), i32(BLOCK))
        blocks = jnp.where(token < sequence.queries, jnp.maximum(end - begin, 0), 0)
        item = Item(b, lax.rem(inside, i32(p.K)), split, token, sequence, begin, blocks)
        carry = body(item, r, carry)
        n = n + x.streams
        return n, r + 1, *find(n, b, before, mine), carry

    state = x.first_item, i32(0), *find(x.first_item, i32(0), i32(0), items(i32(0))), carry
    state = lax.while_loop(lambda s: s[2] < p.B, one, state)
    return state[1], state[-1]

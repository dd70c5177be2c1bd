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
_STRIP = 128
_RESERVED_BYTES = 2048  # barriers, items and alignment


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


def quantised_rows(value_dim: int) -> tuple[int, ...]:
    """Rows that a query tile over a quantised cache may have, for which there are registers."""
    return QUANTISED_ROWS[: 3 if value_dim <= 128 else 2]


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is compiled in. `left` and `right` bound the keys of a query at position p to `[p − left, p + right]`; None
    is unbounded."""

    B: int
    T: int  # queries of a sequence; of all of them, when packed
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
    packed: bool = False
    scales: tuple | None = None  # what a scale of keys and of values belongs to; None: the cache is not quantised
    mod: Any = None  # the modifier, see `lowering.with_bools`
    rule: Any = None  # what the bounds leave of the mask, see `lowering.MaskSpec`
    rule_of_new: bool = False  # whether the rule hides no key before the sequence's queries

    @property
    def group(self) -> int:
        return self.N // self.K

    @property
    def rows(self) -> int:
        """Query tokens of all sequences."""
        return self.T if self.packed else self.B * self.T

    @property
    def tokens(self) -> int:
        """Query tokens of a tile, whose rows they fill with the heads of a group."""
        return min(self.T, self.tile_rows // self.group)

    @property
    def tile_rows(self) -> int:
        """Rows of a query tile, not all of which may be filled."""
        if self.scales is None:
            return ROWS
        sizes = quantised_rows(self.D)
        if self.rule is not None and self.group <= sizes[1]:  # beside a rule 32 rows spill 4 bytes
            sizes = sizes[:2]
        return next((rows for rows in sizes if rows >= self.T * self.group), sizes[-1])

    @property
    def splits(self) -> int:
        """Splits of a sequence that fills the cache."""
        return max(1, -(-self.S // self.config.split))

    @property
    def merged(self) -> bool:
        """Whether a second kernel makes the result out of those of the splits; it is the one that knows of sinks and of
        rows that are nobody's."""
        return self.splits > 1 or self.sinks or self.packed

    @property
    def query_rows(self) -> int:
        """Rows of a query tile in shared memory: groups of 8, if the product reads them from registers."""
        if self.scales is not None or self.queries_stay:
            return self.tile_rows
        return -(-self.tokens * self.group // 8) * 8

    @property
    def queries_stay(self) -> bool:
        """Whether the product reads queries from shared memory: there are no registers for wider ones."""
        return padded_width(self.H) > 128 or padded_width(self.D) > 128

    @property
    def half(self) -> bool:
        """Whether the queries of a tile fill at most the first of a thread's two rows, see `softmax`."""
        return self.tokens * self.group <= 8

    @property
    def query_slots(self) -> int:
        """Query tiles that a stream has in shared memory: two, if that costs no block of keys."""
        return 2 if self._stages(2) == self._stages(1) else 1

    @property
    def stages(self) -> int:
        """Blocks of keys and values that a stream has in shared memory: as many as there is room for."""
        return self._stages(self.query_slots)

    def _stages(self, query_slots):
        h, d = padded_width(self.H), padded_width(self.D)
        room = SHARED_MEMORY_BYTES[9, 0] - _RESERVED_BYTES - STREAMS * query_slots * self.query_rows * h * 2
        if self.scales is None:
            return min(_MOST_STAGES, room // (STREAMS * BLOCK * (h + d) * 2))
        room -= STREAMS * 4 * (8 * (self.D + 4) + 2 * self.tile_rows) * 4 + 3 * 1024  # what four warps merge
        block = sum(-(-x // 128) * 128 for x in (h, d)) + 2 * 4  # slabs have 128 columns; scales of tokens
        return min(_MOST_STAGES, room // (STREAMS * BLOCK * block))

    @property
    def strips(self) -> list[tuple[int, int]]:
        """(first, columns) of the parts of the values' columns: a product of more than 128 has too many registers for
        ptxas, which counts those that a thread begins with."""
        return [(first, min(_STRIP, self.D - first)) for first in range(0, self.D, _STRIP)]

    @property
    def page_rows(self) -> int:
        """Keys of one copy."""
        return BLOCK if self.page is None else min(self.page, BLOCK)

    @property
    def registers(self) -> tuple[int, int]:
        """A thread's, of a consumer and of a producer: 128 · 2 · their sum is 65,536."""
        if self.scales is not None:
            return 208, 48
        if padded_width(self.D) > 128:
            return 200, 56
        return (192, 64) if self.mod or self.rule else (184, 72)

    @property
    def modified(self) -> bool:
        """Whether scores change on their way to the softmax; else the exponential's own factor scales them."""
        # max(s) · scale is the maximum of the scaled scores only for a positive scale.
        return self.scale is None or not self.scale > 0 or self.soft_cap is not None or self.mod is not None

    @property
    def factor(self) -> float:
        """Scores to log2 units."""
        return LOG2E if self.modified else self.scale * LOG2E


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Inputs:
    """The kernel's inputs in HBM; None where the problem has none."""

    q: Any  # [rows, N, H]
    k: Any  # [P, page, K, H], of the plan's dtype or quantised
    v: Any  # [P, page, K, D], likewise
    lengths: Any  # int32 [B]
    tables: Any = None  # int32 [B, W]; None: sequence b is page b
    cu_queries: Any = None  # int32 [B + 1] when packed
    query_lengths: Any = None  # int32 [B]
    limits: Any = None  # int32 [B or 1]: no key from there on is seen
    scale: Any = None  # float32 [1]
    sinks: Any = None  # float32 [1, N]
    k_scale: Any = None  # float32 [1] for the tensor, [K] one a head, or [P, page, K] one a token and head
    v_scale: Any = None
    aux: tuple = ()  # of the modifier, [B or 1, N or 1, 1, 1]
    mask_arrays: tuple = ()  # of the rule, [B or 1, N or 1, ., .]
    origin: Any = None  # int32 [2]: batch index and head that 0 stands for, to rule and modifier


@dataclasses.dataclass(frozen=True)
class Sequence:
    """One sequence, as traced scalars."""

    row: Any  # its first query among all rows
    queries: Any  # how many there are
    offset: Any  # position of the first
    end: Any  # no query sees a key from here on
    tiles: Any
    first: Any  # first split that an item is made of
    splits: Any


def sequence_of(plan, inputs, b) -> Sequence:
    """Sequence b of arrays of any content."""
    p = plan
    row, queries = _query_rows(p, inputs, b)
    end = keys = jnp.clip(inputs.lengths[b], 0, p.S)
    if inputs.limits is not None:
        end = jnp.clip(inputs.limits[jnp.minimum(b, inputs.limits.shape[0] - 1)], 0, keys)
    offset, tokens = keys - queries, i32(p.tokens)
    if not p.merged:  # somebody writes the zeros of queries that do not exist
        return Sequence(row, queries, offset, end, i32(-(-p.T // p.tokens)), i32(0), i32(1))
    first, splits = splits_of(p, *visible(p, offset, end, i32(0), queries))
    return Sequence(row, queries, offset, end, lax.div(queries + (tokens - 1), tokens), first, splits)


def _query_rows(p, inputs, b):
    """(first row, how many)."""
    if inputs.cu_queries is None:
        row, queries = b * i32(p.T), i32(p.T)
    else:
        row, after = (jnp.clip(inputs.cu_queries[b + i], 0, p.rows) for i in range(2))
        queries = jnp.maximum(after - row, 0)
    if inputs.query_lengths is not None:
        queries = jnp.clip(inputs.query_lengths[b], 0, queries)
    return row, queries


def visible(plan, offset, end, token, after):
    """Keys `[low, high)` that tokens `[token, after)` of a sequence may see, none where there are no tokens."""
    low, high = i32(0), jnp.where(after > token, end, 0)
    if plan.right is not None:
        high = jnp.clip(offset + after + plan.right, 0, high)
    if plan.left is not None:
        low = jnp.clip(offset + token - plan.left, 0, plan.S)
    return low, high


def splits_of(plan, low, high):
    """(first split, how many) of those that hold keys `[low, high)`."""
    split = i32(plan.config.split)
    first = jnp.minimum(lax.div(low, split), plan.splits - 1)
    return first, jnp.maximum(lax.div(high + (split - 1), split) - first, 0)


FIELDS = "batch", "row", "head", "split", "token", "queries", "offset", "low", "high", "begin", "blocks"


@dataclasses.dataclass(frozen=True)
class Item:
    """One split of one sequence under one key head for one tile, as traced scalars."""

    batch: Any
    row: Any  # first of the tile, among all rows
    head: Any
    split: Any
    token: Any  # first of the tile, counted in the sequence
    queries: Any  # of the sequence
    offset: Any  # position of its first query
    low: Any  # no query of the tile sees a key before this one,
    high: Any  # or at or past this one
    begin: Any  # first block of keys, counted in the sequence
    blocks: Any  # how many, maybe 0


def over_items(x, body, carry):
    """Folds `body(item, carry) -> carry` over this stream's items.

    Items are dealt in turn to all streams of the grid, key heads first: who runs at one time reads whole rows of the
    cache, and tiles that read the same keys do so together.
    """
    p = x.plan

    def items(b):
        s = sequence_of(p, x, jnp.minimum(b, p.B - 1))
        return s.splits * s.tiles * p.K

    def find(n, b, before, mine):
        """Moves on to the sequence of item n."""

        def step(state):
            b, before, mine = state
            return b + 1, before + mine, items(b + 1)

        return lax.while_loop(lambda s: (s[0] < p.B) & (n >= s[1] + s[2]), step, (b, before, mine))

    def one(state):
        n, b, before, mine, carry = state
        carry = body(_item(p, b, sequence_of(p, x, b), n - before), carry)
        n = n + x.streams
        return n, *find(n, b, before, mine), carry

    state = x.first_item, *find(x.first_item, i32(0), i32(0), items(i32(0))), carry
    return lax.while_loop(lambda s: s[1] < p.B, one, state)[-1]


def slot_of(x, position):
    """Slot of the block at a position in the stream's sequence of blocks."""
    return x.stream * x.plan.stages + lax.rem(position, i32(x.plan.stages))


def over_blocks(x, item, one_block, state):
    """Folds `one_block(i, state, ruled) -> state` over an item's blocks; `ruled` says whether the rule may hide keys
    there."""
    p, ruled_from = x.plan, item.blocks
    if p.rule is not None:
        new = lax.div(jnp.maximum(item.offset, 0), i32(BLOCK)) - item.begin
        ruled_from = jnp.clip(new, 0, item.blocks) if p.rule_of_new else i32(0)
    if p.rule is None or p.rule_of_new:
        state = lax.fori_loop(0, ruled_from, lambda i, state: one_block(i, state, False), state)
    if p.rule is not None:
        state = lax.fori_loop(ruled_from, item.blocks, lambda i, state: one_block(i, state, True), state)
    return state


def _item(p, b, sequence, number) -> Item:
    together = sequence.tiles * p.K
    split, inside = sequence.first + lax.div(number, together), lax.rem(number, together)
    token = lax.div(inside, i32(p.K)) * p.tokens
    after = jnp.minimum(token + p.tokens, sequence.queries)
    low, high = visible(p, sequence.offset, sequence.end, token, after)
    start = split * p.config.split
    begin = lax.div(jnp.maximum(low, start), i32(BLOCK))
    end = lax.div(jnp.minimum(high, start + p.config.split) + (BLOCK - 1), i32(BLOCK))
    return Item(
        batch=b, row=sequence.row + token, head=lax.rem(inside, i32(p.K)), split=split, token=token,
        queries=sequence.queries, offset=sequence.offset, low=low, high=high, begin=begin,
        blocks=jnp.maximum(end - begin, 0),
    )  # fmt: skip

"""What the forward kernel is compiled for, what it reads, and which key blocks each tile of queries visits."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jattn._tile import maximum, minimum
from jattn.pallas import configs
from jattn.pallas.hopper.lists import i32, list_entry

LOG2E = math.log2(math.e)


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is compiled in. A length or offset that is None is read from `Inputs.sequences` at run time.

    `left` and `right` bound the keys of a query at position p to `[p − left, p + right]`; None is unbounded. Packed
    sequences have B = 1, and T and S are the rows of the arrays.
    """

    B: int
    T: int
    S: int
    N: int
    K: int
    H: int
    D: int
    dtype: Any
    scale: float | None  # None: traced
    left: int | None
    right: int | None
    offset: int | None
    key_length: int | None
    query_length: int | None
    config: configs.TileConfig
    out_dtype: Any = None  # None: dtype; or float32
    packed_tiles: int | None = None  # query tiles that all packed sequences have at most; None: not packed
    soft_cap: float | None = None
    mod: Any = None
    aux_kinds: tuple[str, ...] = ()
    rule: Any = None  # of the mask, see `lowering.MaskSpec`
    row_bounds: bool = False  # keys of a query below `Inputs.row_end` only
    biased: bool = False
    dropout_threshold: int = 0
    piece: bool = False  # of a longer sequence

    @property
    def modified(self) -> bool:
        """Whether scores change on their way to the softmax; else the exponential's own factor scales them."""
        # max(s) · scale is the maximum of the scaled scores only for a positive scale.
        scaled = self.scale is None or not self.scale > 0
        return scaled or self.biased or self.mod is not None or self.soft_cap is not None

    @property
    def factor(self) -> float:
        """Scores to log2 units."""
        return LOG2E if self.modified else self.scale * LOG2E

    @property
    def infinite(self) -> bool:
        """Whether a score may be −inf without a bound or rule that says so."""
        return self.biased or self.mod is not None

    @property
    def packed(self) -> bool:
        return self.packed_tiles is not None

    @property
    def listed(self) -> bool:
        """Whether `Inputs.lists` names the key blocks that a query tile visits; else they are a range."""
        return (self.rule is not None or self.row_bounds) and not self.packed

    @property
    def tiles(self) -> int:
        """Query tiles of one (batch, head) pair."""
        return self.packed_tiles if self.packed else -(-self.T // self.config.rows)

    @property
    def key_blocks(self) -> int:
        return -(-self.S // self.config.block_k)

    @property
    def masked(self) -> bool:
        """Whether any score may need masking."""
        bounded = self.left is not None or self.right is not None or self.rule is not None or self.row_bounds
        return bounded or self.key_length != self.S or self.S % self.config.block_k != 0

    @property
    def one_masked_block(self) -> bool:
        """Whether, coming from the last block, only the first one visited can be cut by a rule or an upper bound."""
        if self.rule is not None or self.row_bounds:
            return False
        if self.right is None:
            return True
        aligned = self.offset is not None and (self.offset + self.right) % self.config.block_k == 0
        return aligned and self.config.block_k % self.config.rows == 0

    def block_range(self, row, offset, key_length, query_length):
        """The key blocks `[begin, end)` of the query tile that begins with `row`, for ints and for arrays."""
        last = minimum(row + self.config.rows, query_length) + offset - 1
        high = key_length if self.right is None else minimum(key_length, last + self.right + 1)
        end = maximum(1, minimum(-(-high // self.config.block_k), self.key_blocks))
        low = 0 if self.left is None else maximum(0, row + offset - self.left)
        return minimum(low // self.config.block_k, end - 1), end


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Inputs:
    """The kernel's inputs in HBM; None where the problem has none."""

    q: Any  # [B, T, N, H]
    k: Any  # [B, S, K, H]
    v: Any  # [B, S, K, D]
    table: Any  # int32 [rounds + 2, blocks]: items of each thread block, how many there are, and a zero
    sequences: Any  # int32 [B, 3]: query offset, key length, query length; packed [M + 2, 6]: and first row of the
    # query array, first row of the key array, rows in all
    packed: Any = None  # int32 [tiles, 2]: sequence of a tile, its first query counted in the sequence
    lists: Any = None  # int32 [B or 1, N or 1, tiles, 2 + key blocks]: how many blocks a rule or row bound cuts, how
    # many are visited, and which: those cut come first
    row_end: Any = None  # int32 [B or 1, rows of all tiles]
    origin: Any = None  # int32 [4], see `pieces.origin`, where a rule, modifier or dropout asks
    scale: Any = None  # float32 [1]
    bias: Any = None  # [B or 1, N or 1, T or 1, S or 1]
    aux: tuple = ()  # like bias, or [B or 1, N or 1, T + S - 1] by diagonal
    mask_arrays: tuple = ()  # like bias
    sinks: Any = None  # float32 [N]
    dropout_key: Any = None  # int32 [2]


@dataclasses.dataclass(frozen=True)
class Tile:
    """One query tile: where it is and how many key blocks it visits (at least one), as traced scalars."""

    batch: Any  # of the arrays
    sequence: Any  # batch, or the packed sequence
    head: Any
    number: Any  # of the tile within its (batch, head) pair
    row: Any  # its first query, counted in its sequence
    position: Any  # of that query on the key axis
    key_length: Any
    query_length: Any
    blocks: Any  # how many key blocks it visits
    begin: Any = None  # which: [begin, end), from the last one on,
    end: Any = None
    cut: Any = None  # or those listed, of which a rule or row bound cuts so many of the first
    rows_start: Any = 0  # the sequence's first row in the query array
    keys_start: Any = 0  # and in the key array
    rows: Any = None  # of the sequence in the query array; None: those past its last may be written

    @property
    def array_row(self):
        return self.row + self.rows_start


def item_of(x, r):
    """The thread block's r-th table entry, or its last."""
    return x.table[jnp.minimum(r, x.items - 1), x.block]


def tile_of(x, item) -> Tile:
    """Decodes a table entry. Loops carry entries, not tiles: fewer registers, and `row` keeps its known alignment."""
    p = x.plan
    pair, number = lax.div(item, i32(p.tiles)), lax.rem(item, i32(p.tiles))
    batch, head = lax.div(pair, i32(p.N)), lax.rem(pair, i32(p.N))
    sequence, row, place = batch, number * p.config.rows, {}
    if p.packed:
        sequence, row = x.packed[number, 0], x.packed[number, 1]
        place = {name: x.sequences[sequence, 3 + i] for i, name in enumerate(("rows_start", "keys_start", "rows"))}
    offset = i32(p.offset) if p.offset is not None else x.sequences[sequence, 0]
    key_length = i32(p.key_length) if p.key_length is not None else x.sequences[sequence, 1]
    query_length = i32(p.query_length) if p.query_length is not None else x.sequences[sequence, 2]
    if p.listed:
        visits = {name: list_entry(x.lists, batch, head, number, i) for i, name in enumerate(("cut", "blocks"))}
    else:
        begin, end = _range(x, row, offset, key_length, query_length)
        visits = dict(begin=begin, end=end, blocks=end - begin)
    return Tile(batch, sequence, head, number, row, row + offset, key_length, query_length, **visits, **place)


def _range(x, row, offset, key_length, query_length):
    """The key blocks `[begin, end)` of the tile that begins with query `row`."""
    p, block_k = x.plan, x.plan.config.block_k
    # The table's zero keeps the trip count out of the compiler's sight: it would unroll short loops and spill.
    end, begin = jnp.minimum(ceil_div(key_length, block_k), p.key_blocks) + x.zero, i32(0)
    if p.right is not None:
        last = jnp.minimum(row + p.config.rows, query_length) + offset - 1
        end = jnp.minimum(end, ceil_div(last + p.right + 1, block_k))
    end = jnp.maximum(end, 1)
    if p.left is not None:
        begin = jnp.minimum(lax.div(jnp.maximum(row + offset - p.left, 0), i32(block_k)), end - 1)
    return begin, end


def block_of(x, tile, i):
    """The i-th key block that a tile visits."""
    if x.plan.listed:
        return list_entry(x.lists, tile.batch, tile.head, tile.number, 2 + i)
    return tile.end - 1 - i


def ceil_div(x, y: int):
    """Of x of either sign; 0 for a negative one."""
    return lax.div(jnp.maximum(x, 0) + (y - 1), i32(y))


def ring(x, position):
    """Ring slot of the block at a position in this thread block's sequence of key blocks."""
    return jnp.bitwise_and(position, i32(x.plan.config.stages - 1))

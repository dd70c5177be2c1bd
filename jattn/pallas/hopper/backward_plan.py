"""What the backward kernel is compiled for, what it reads, and which query blocks each tile of keys visits."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jattn._tile import maximum, minimum
from jattn.pallas import configs
from jattn.pallas.hopper import ptx
from jattn.pallas.hopper.lists import i32, list_entry


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is compiled in; letters, bounds and features as in the forward's. What is None is read from `Inputs`."""

    B: int
    T: int
    S: int
    N: int
    K: int
    H: int
    D: int
    dtype: Any
    scale: float | None
    left: int | None
    right: int | None
    offset: int | None
    key_length: int | None
    query_length: int | None
    config: configs.BackwardConfig
    rows: int  # of lse and delta: every sequence begins a block, and the last one is padded
    packed_tiles: int | None = None  # key tiles that all packed sequences have at most; None: not packed
    soft_cap: float | None = None
    mod: Any = None
    aux_kinds: tuple[str, ...] = ()
    rule: Any = None
    biased: bool = False
    dropout_threshold: int = 0
    deterministic: bool = False
    piece: bool = False  # of a longer sequence: gradients stay in float32, because others are added to them

    @property
    def group(self) -> int:
        return self.N // self.K

    @property
    def result_dtype(self):
        return jnp.float32 if self.piece else self.dtype

    @property
    def packed(self) -> bool:
        return self.packed_tiles is not None

    @property
    def listed(self) -> bool:
        """Whether `Inputs.lists` names the query blocks that a tile visits; else they are a range."""
        return self.rule is not None and not self.packed

    @property
    def modified(self) -> bool:
        """Whether scores change on their way to the softmax; else the exponential's own factor scales them."""
        return self.scale is None or self.biased or self.mod is not None or self.soft_cap is not None

    @property
    def wide(self) -> bool:
        """Whether warpgroups divide the columns of the gradients between them instead of the keys (`backward_wide`)."""
        return self.config.keys == ptx.TILE_ROWS

    @property
    def tiles(self) -> int:
        """Key tiles of one (batch, key/value head) pair."""
        return self.packed_tiles if self.packed else -(-self.S // self.config.keys)

    @property
    def query_blocks(self) -> int:
        """Of one sequence, or of all packed ones at most."""
        return self.rows // self.config.block_q

    @property
    def cut_by_length(self) -> bool:
        """Whether a tile may have keys that do not exist."""
        return self.key_length != self.S or self.S % self.config.keys != 0

    def block_range(self, first_key, offset, key_length, query_blocks):
        """The query blocks `[begin, end)` that may see the tile that begins with `first_key`, at least one. Both ends
        grow with the key, which the order of deterministic sums relies on."""
        block, last_key = self.config.block_q, minimum(first_key + self.config.keys, key_length) - 1
        low = 0 if self.right is None else maximum(0, first_key - offset - self.right)
        begin = minimum(low // block, query_blocks - 1)
        begin = _where(first_key >= key_length, query_blocks - 1, begin)
        end = query_blocks
        if self.left is not None:
            end = minimum(end, -(-maximum(0, last_key - offset + self.left + 1) // block))
        return begin, maximum(begin + 1, end)


def _where(condition, x, y):
    """jnp.where, which keeps Python numbers."""
    return (x if condition else y) if isinstance(condition, bool) else jnp.where(condition, x, y)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Inputs:
    """The kernel's inputs in HBM; None where the problem has none."""

    q: Any  # [B, T, N, H]
    k: Any  # [B, S, K, H]
    v: Any  # [B, S, K, D]
    dout: Any  # [B, T, N, D]
    lse: Any  # float32 [B, N, rows]: −lse in log2 units, −inf where a row sees nothing or does not exist
    delta: Any  # float32, like it: rowsum(dout · out) less the cotangent of lse
    table: Any  # int32 [rounds + 2, blocks]: as in the forward
    sequences: Any  # int32 [B, 3]: query offset, key length, query length; packed [M + 2, 8]: and first row of the
    # query array, first row of the key array, key rows in all, first row of lse and delta, query blocks
    packed: Any = None  # int32 [tiles, 2]: sequence of a tile, its first key counted in the sequence
    lists: Any = None  # int32 [B or 1, K or 1, tiles, 2 + query blocks]: how many blocks a rule or bound cuts, how many
    # are visited, and which: those cut come first
    ranks: Any = None  # int32: how many tiles add to a block of dq before this tile: like `lists` for each of its
    # entries; else [B or 1, query blocks], from which the tile's number is taken
    scale: Any = None  # float32 [1]
    bias: Any = None  # [B or 1, N or 1, T or 1, S or 1]
    aux: tuple = ()  # like bias, or [B or 1, N or 1, T + S - 1] by diagonal
    mask_arrays: tuple = ()  # like bias
    origin: Any = None  # int32 [4], see `pieces.origin`, where a rule, modifier or dropout asks
    dropout_key: Any = None  # int32 [2]


@dataclasses.dataclass(frozen=True)
class Tile:
    """One tile of keys: where it is and how many query blocks of each of its heads it visits, as traced scalars."""

    batch: Any  # of the arrays
    sequence: Any  # batch, or the packed sequence
    head: Any  # of keys and values
    number: Any  # of the tile within its (batch, head) pair
    key: Any  # its first key, counted in its sequence
    offset: Any
    key_length: Any
    query_length: Any
    blocks: Any
    begin: Any = None  # the blocks [begin, begin + blocks),
    cut: Any = None  # or those listed, of which a rule or bound cuts so many of the first
    queries_start: Any = 0  # the sequence's first row in the query array,
    keys_start: Any = 0  # in the key array,
    rows_start: Any = 0  # and in lse and delta
    keys: Any = None  # of the sequence in the key array; None: those past its last may be written


def tile_of(x, r) -> Tile:
    """The thread block's r-th tile, or its last."""
    p = x.plan
    item = x.table[jnp.minimum(r, x.items - 1), x.block]
    pair, number = lax.div(item, i32(p.tiles)), lax.rem(item, i32(p.tiles))
    batch, head = lax.div(pair, i32(p.K)), lax.rem(pair, i32(p.K))
    sequence, key, place, query_blocks = batch, number * p.config.keys, {}, p.query_blocks
    if p.packed:
        sequence, key = x.packed[number, 0], x.packed[number, 1]
        names = "queries_start", "keys_start", "keys", "rows_start"
        place = {name: x.sequences[sequence, 3 + i] for i, name in enumerate(names)}
        query_blocks = x.sequences[sequence, 7]
    offset = i32(p.offset) if p.offset is not None else x.sequences[sequence, 0]
    key_length = i32(p.key_length) if p.key_length is not None else x.sequences[sequence, 1]
    query_length = i32(p.query_length) if p.query_length is not None else x.sequences[sequence, 2]
    if p.listed:
        visits = {name: list_entry(x.lists, batch, head, number, i) for i, name in enumerate(("cut", "blocks"))}
    else:
        begin, end = p.block_range(key, offset, key_length, query_blocks)
        # The table's zero keeps the trip count out of the compiler's sight, as in the forward.
        visits = dict(begin=begin, blocks=end - begin + x.zero)
    return Tile(batch, sequence, head, number, key, offset, key_length, query_length, **visits, **place)


def block_of(x, tile, i):
    """The i-th query block that a tile visits, of each head."""
    return list_entry(x.lists, tile.batch, tile.head, tile.number, 2 + i) if x.plan.listed else tile.begin + i


def head_of(x, tile, g):
    """The g-th query head of a tile's group."""
    return tile.head if x.plan.group == 1 else tile.head * x.plan.group + g


def row_of(x, tile, i):
    """First query, counted in its sequence, of a tile's i-th block."""
    return block_of(x, tile, i) * x.plan.config.block_q


def next_step(x, tile, g, i):
    """The step after block i of head g in the group: the blocks of one head come after those of another."""
    if x.plan.group == 1:
        return g, i + 1
    last = i + 1 == tile.blocks
    return jnp.where(last, g + 1, g), jnp.where(last, 0, i + 1)


def previous_step(x, tile, g, i):
    """The step before it."""
    if x.plan.group == 1:
        return g, i - 1
    return jnp.where(i == 0, g - 1, g), jnp.where(i == 0, tile.blocks, i) - 1


def rank_of(x, tile, i, block):
    """How many tiles add to the tile's i-th block of dq before it does."""
    if x.plan.listed:
        return list_entry(x.ranks, tile.batch, tile.head, tile.number, i)
    row = jnp.minimum(tile.batch, x.ranks.shape[0] - 1)
    rank = x.ranks[row, lax.div(i32(tile.rows_start), i32(x.plan.config.block_q)) + block] - tile.number
    return rank if tile.keys is None else jnp.where(tile.keys > 0, rank, 0)  # a tile of nothing waits for nobody


def masked_steps(x, tile):
    """The steps `[first, last)` of a head at which every query sees all of the warpgroup's keys."""
    p, block = x.plan, x.plan.config.block_q
    if p.listed:
        return tile.cut, tile.blocks
    if p.rule is not None:
        return tile.blocks, tile.blocks
    first, last = i32(0), tile.blocks
    key = tile.key + x.own_keys
    if p.right is not None:  # query blocks from the first on which sees the last of the keys
        row = jnp.maximum(key + (ptx.TILE_ROWS - 1) - tile.offset - p.right, 0)
        first = jnp.minimum(jnp.maximum(lax.div(row + (block - 1), i32(block)) - tile.begin, 0), tile.blocks)
    if p.left is not None:  # up to the last one that sees the first of the keys
        row = jnp.maximum(key - tile.offset + p.left + 1, 0)
        last = jnp.clip(lax.div(row, i32(block)) - tile.begin, first, tile.blocks)
    if p.cut_by_length:
        cut = key + ptx.TILE_ROWS > tile.key_length
        first = jnp.where(cut, tile.blocks, first)
        last = jnp.where(cut, tile.blocks, last)
    return first, last

"""Tiles of 64 tokens with a decay for each channel: sums of log decays, and scores that no decay can overflow.

    P_ij = Σ_c x_ic k_jc 2^(g_(j+1)c + … + g_ic),  j ≤ i

A product of matrices has one anchor a for all its rows and columns, between them: x 2^(sum after a) times
k 2^(sum up to a), exponents ≤ 0 both. The anchors here, none of which is a later token than its row:

* pairs of different blocks of 16 tokens: the end of the column's block. A warp has the rows of one block, so that its
  products with the others, at most three, are m16n8k16 on its own;
* pairs of a block whose numbers differ first in bit b = 8, 4, 2, 1: the last token whose bit b is not yet set. A token
  is a row or a column by that bit, and the same registers are the left operand and the right one;
* pairs of a block where decays are mild, which a kernel sees as it sums them up: one anchor for all of it, at a fixed
  sum of decays, not at a token. Exponents may be positive there, but are small enough (`shift`).

Log decays are to the base of two. What is made of channels takes 32 of them at once. As in `memory`, functions have an
equivalent in plain jnp for interpret mode.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jattn.pallas._compat import arith, interpreting, ir, llvm, pl, plgpu, utils
from jattn.pallas.hopper import memory, ptx
from jattn.pallas.hopper.linear_gates import LOG2_E
from jattn.pallas.hopper.linear_tiles import _ld_shared, _offset, _st_shared
from jattn.pallas.hopper.mma import _mma
from jattn.pallas.hopper.ptx import SCALAR, TILE_ROWS, WGMMA, i32, integer

BLOCK = 16  # tokens of a warp
PIECE = 32  # channels
LEVELS = (8, 4, 2, 1)
_PADDING = 8
_USUAL_BOUND = -5.0  # of a mild log decay


def shift(options) -> int | None:
    """Where gates are mild, products within a block of 16 take one anchor, in its middle: 2 to the power of this times
    what decayed since the block began, with vectors no longer than 1 neither overflows nor underflows. Decays bounded
    to a few nats a token are (`surely_mild`), of others those whose sums are not below −2 · shift. None if vectors may
    be longer, or much shorter by their scale."""
    if not options.qk_l2norm or options.scale is None or not 2.0**-32 <= abs(options.scale) <= 2.0**32:
        return None
    return round(-(options.lower_bound if surely_mild(options) else _USUAL_BOUND) * LOG2_E * BLOCK / 2)


def surely_mild(options) -> bool:
    return options.gate in ("bounded", "clipped")


def strong_smem(options, *leading) -> dict:
    """Room, if any is needed, to note where decays are strong, of blocks of 16 tokens and pieces of 32 channels."""
    if shift(options) is None or surely_mild(options):
        return {}
    return dict(strong=plgpu.SMEM((*leading, TILE_ROWS // BLOCK), jnp.int32))


def pitch(channels: int) -> int:
    """Floats from one token's sums to the next: pairs of channels of 4 tokens meet all banks."""
    return channels + _PADDING


# --- log decays, a channel a thread, or two threads of 64 -------------------------------------------------------------


def ld_global_channels(ref, batch, token, head, first, rows, channels: int) -> tuple:
    """Channels `[first, first + channels)`, 64 or 128, of tokens `[token, token + 64)` of `ref [B, T, N, H]`, float32,
    0 from `rows` of them on; all loads are in flight together. A thread has a channel, of every block of 16 tokens or,
    of 64 channels, of half of the blocks. The arrays, of a block a thread each, have a layout that only functions here
    know; they are `[16, 128]` or `[32, 64]` in interpret mode."""
    count = _blocks_of_a_thread(channels)
    if interpreting():
        places = jnp.minimum(token + _rows(), ref.shape[1] - 1)
        value = ref[batch, :, head, pl.ds(first, channels)].astype(jnp.float32)[places]
        parts = jnp.where((_rows() < rows)[:, None], value, 0).reshape(-1, count, BLOCK, channels)
        return tuple(parts[:, i].reshape(-1, channels) for i in range(count))

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), *[SCALAR] * 5), return_type=(ptx.array_type(2 * BLOCK),) * count
    )
    def load(_, ref, batch, token, head, first, rows):
        kind, (channel, part) = ir.MemRefType(ref.type), _channel_and_part(channels)
        before = arith.muli(part, integer(count * BLOCK))
        places = arith.addi(token.registers[()], before), head.registers[()]
        start = memory._flat(kind, (batch.registers[()], *places, arith.addi(channel, first.registers[()])))
        pointer = memory._element_pointer(utils.memref_ptr(ref), kind.element_type, start)
        left = arith.subi(rows.registers[()], before)
        values = [_ld_token(kind, pointer, r, left) for r in range(count * BLOCK)]
        return tuple(ptx.from_scalars(values[i : i + BLOCK]) for i in range(0, len(values), BLOCK))

    return load(ref, *(jnp.asarray(x, jnp.int32) for x in (batch, token, head, first, rows)))


def _ld_token(kind, pointer, r: int, rows):
    """The r-th token after `pointer`, into an array of this MemRefType `[B, T, N, H]`, as float32; 0 from `rows` on."""
    wide = kind.element_type == ir.F32Type.get()
    place = r * kind.shape[2] * kind.shape[3] * (4 if wide else 2)
    text = f"{{ .reg .pred p; .reg .b16 h; setp.gt.s32 p, $2, {r}; "
    if wide:
        text += f"mov.b32 $0, 0; @p ld.global.nc.f32 $0, [$1 + {place}]; }}"
    else:
        cast = "bf16" if kind.element_type == ir.BF16Type.get() else "f16"
        text += f"mov.b16 h, 0; @p ld.global.nc.b16 h, [$1 + {place}]; cvt.f32.{cast} $0, h; }}"
    return llvm.inline_asm(ir.F32Type.get(), [pointer, rows], text, "=f,l,r", has_side_effects=True)


def ld_global_channel(ref, head, first, channels: int) -> jax.Array:
    """Of row `head` of float32 `ref [N, H]`, what goes with `ld_global_channels`."""
    if interpreting():
        return ref[head, pl.ds(first, channels)]

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), SCALAR, SCALAR), return_type=ptx.array_type(2 * BLOCK))
    def load(_, ref, head, first):
        kind = ir.MemRefType(ref.type)
        channel = arith.addi(_channel_and_part(channels)[0], first.registers[()])
        start = memory._flat(kind, (head.registers[()], channel))
        return ptx.from_scalars([memory._load(utils.memref_ptr(ref), kind.element_type, start)] * BLOCK)

    return load(ref, *(jnp.asarray(x, jnp.int32) for x in (head, first)))


def st_sums(ref, i: int, g: jax.Array, rows, strong=None, least=None) -> None:
    """Stores the running sums, to the base of two, of the log decays of a thread's i-th block of 16 tokens to its rows
    of float32 `ref [64, pitch]`; tokens from `rows` on, of the chunk, do not decay (None: g is 0 there).

    Args:
        strong: int32 `[pieces, 4]` in shared memory (`strong_smem`), or None: set where a block, in one of a piece's 32
            channels, sums up to less than `least`.
    """
    count = _blocks_of_a_thread(channels := ref.shape[1] - _PADDING)
    if interpreting():
        for part, mine in enumerate(g.reshape(-1, BLOCK, channels)):
            tokens = (part * count + i) * BLOCK + jnp.arange(BLOCK, dtype=jnp.int32)
            mine = mine if rows is None else jnp.where(tokens[:, None] < rows, mine, 0)
            total = LOG2_E * jnp.cumsum(mine, axis=0)
            ref[pl.ds((part * count + i) * BLOCK, BLOCK), pl.ds(0, channels)] = total
            for piece in range(0 if strong is None else channels // PIECE):
                found = total[-1, piece * PIECE : (piece + 1) * PIECE]
                strong[piece, part * count + i] = jnp.any(~(found >= least)).astype(jnp.int32)
        return
    last, flags = [] if rows is None else [jnp.asarray(rows, jnp.int32)], [] if strong is None else [strong]

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), WGMMA, *[plgpu.RefType()] * len(flags), *[SCALAR] * len(last)))
    def store(_, ref, g, *rest):
        flags, rows = rest[: len(rest) - len(last)], rest[len(rest) - len(last) :]
        width, (channel, part) = channels + _PADDING, _channel_and_part(channels)
        first = arith.addi(arith.muli(part, integer(count * BLOCK)), integer(i * BLOCK))
        start = _offset(_start(ref), arith.addi(arith.muli(first, integer(width)), channel), 4)
        total = ptx.constant(0)
        for r, x in enumerate(ptx.scalars(g)):
            if rows:
                exists = arith.cmpi(arith.CmpIPredicate.slt, arith.addi(first, integer(r)), rows[0].registers[()])
                x = arith.select(exists, x, ptx.constant(0))
            total = ptx.fma(x, ptx.constant(LOG2_E), total)
            _st_shared(start, 4 * r * width, [total])
        for ref in flags:
            found = ptx.vote_any(arith.cmpf(arith.CmpFPredicate.ULT, total, ptx.constant(least)))
            word = arith.extui(i32(), found)
            place = arith.addi(arith.muli(arith.divui(channel, integer(PIECE)), integer(4)), integer(i))
            place = arith.addi(place, arith.muli(part, integer(count)))
            _st_shared(_offset(_start(ref), place, 4), 0, [arith.bitcast(ir.F32Type.get(), word)])  # all lanes the same

    store(ref, g, *flags, *last)


def any_strong(ref, piece):
    """Whether anything was noted for the channels of a piece: a block of 16 tokens that decays strongly, see
    `st_sums`, or what the backward adds."""
    if interpreting():
        return jnp.any(ref[piece] != 0)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), SCALAR), return_type=ptx.scalar_type())
    def load(_, ref, piece):
        place = _offset(_start(ref), piece.registers[()], 16)
        a, b, c, d = (arith.bitcast(i32(), x) for x in _ld_shared(place, 0, 4))
        return ptx.scalar_array(arith.ori(arith.ori(a, b), arith.ori(c, d)))

    return load(ref, jnp.asarray(piece, jnp.int32)) != 0


def st_decay(sums, ref) -> None:
    """Stores the decay of a whole chunk to float32 `ref [channels]`; all warps have met since the sums were stored."""
    if interpreting():
        ref[...] = jnp.exp2(sum(sums[BLOCK * i - 1, pl.ds(0, ref.shape[0])] for i in range(1, 5)))
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType()))
    def store(_, sums, ref):
        channel, ends = _ld_ends(sums)
        total = ptx.constant(0)
        for end in ends:
            total = ptx.add(total, end)
        _st_shared(_offset(_start(ref), channel, 4), 0, [ptx.ex2(total)])

    store(sums, ref)


def st_other_sums(sums, ref) -> None:
    """Stores to float32 `ref [8, channels]` the sums of all blocks before each block and, from row 4 on, of all after
    it; all warps have met since the sums were stored."""
    if interpreting():
        ends = sums[:, pl.ds(0, ref.shape[1])][BLOCK - 1 :: BLOCK]
        before = lambda ends: jnp.cumsum(jnp.roll(ends, 1, axis=0).at[0].set(0), axis=0)  # noqa: E731
        ref[...] = jnp.concatenate([before(ends), before(ends[::-1])[::-1]])
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType()))
    def store(_, sums, ref):
        channel, ends = _ld_ends(sums)
        place, channels = _offset(_start(ref), channel, 4), ir.MemRefType(ref.type).shape[1]
        for rows, order in ((range(4), ends), (range(7, 3, -1), ends[::-1])):
            total = ptx.constant(0)
            for row, end in zip(rows, order, strict=True):
                _st_shared(place, 4 * row * channels, [total])
                total = ptx.add(total, end)

    store(sums, ref)


def logistic(x) -> jax.Array:
    """1 / (1 + 2^x), to a relative error of 2^-22 (`ex2.approx`, `rcp.approx`): a quarter of the instructions of an
    exact division, for each channel of each token."""
    if interpreting():
        return 1 / (1 + jnp.exp2(x))

    @plgpu.inline_mgpu(arg_types=(WGMMA,), return_type=ptx.array_type(x.shape[1]))
    def compute(_, x):
        text = "{ .reg .f32 x; ex2.approx.ftz.f32 x, $1; add.f32 x, x, 0f3F800000; rcp.approx.ftz.f32 $0, x; }"
        return ptx.from_scalars([ptx._instruction(text, value) for value in ptx.scalars(x)])

    return compute(x)


def _blocks_of_a_thread(channels: int) -> int:
    return TILE_ROWS // BLOCK * channels // 128


def _channel_and_part(channels: int):
    """This thread's channel, and which part of the blocks it has."""
    thread = arith.remui(ptx.thread_index(), integer(128))
    return arith.remui(thread, integer(channels)), arith.divui(thread, integer(channels))


def _ld_ends(sums):
    """This thread's channel, and its sums of whole blocks."""
    width = ir.MemRefType(sums.type).shape[1]
    channel, _ = _channel_and_part(width - _PADDING)
    start = _offset(_start(sums), channel, 4)
    return channel, [_ld_one(start, 4 * (BLOCK * i - 1) * width) for i in range(1, 5)]


# --- tiles of 32 channels ---------------------------------------------------------------------------------------------


def ld_tile(ref, piece, factors=None) -> jax.Array:
    """Channels `[32 · piece, 32 · piece + 32)` of bfloat16 `ref [slabs, 64, 64]` as float32 (`ldmatrix`), each row
    times its entry of `factors [64]`."""
    slab, column = _slab_and_column(piece)
    if interpreting():
        value = ref[slab, :, pl.ds(column, PIECE)].astype(jnp.float32)
        plgpu.commit_smem()  # to the emulation a copy into what was read is a race without it
        return value if factors is None else value * factors[:, None]
    rows = [] if factors is None else [factors]

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(ptx.TRANSFORMS), SCALAR, *[ptx.ROW] * len(rows)), return_type=ptx.array_type(PIECE)
    )
    def load(_, ref, column, *rows):
        lane, warp = _lane_and_warp()
        in_group, matrix = arith.remui(lane, integer(8)), arith.divui(lane, integer(8))
        row = arith.addi(arith.muli(arith.remui(matrix, integer(2)), integer(8)), in_group)
        row = arith.addi(row, arith.muli(warp, integer(BLOCK)))
        factors, values = [ptx.scalars(x) for x in rows], []
        for words in _ld_matrices(ref, row, arith.divui(matrix, integer(2)), column.registers[()]):
            for i, word in enumerate(words):
                pair = _unpacked(word)
                values += [ptx.mul(x, factors[0][i % 2]) for x in pair] if factors else pair
        return ptx.from_scalars(values)

    return load(ref.at[pl.ds(slab, 1)], column, *rows)


def st_tile(array, ref, piece) -> None:
    """Stores float32 `[64, 32]` to these channels of bfloat16 `ref [slabs, 64, 64]`."""
    slab, column = _slab_and_column(piece)
    memory.stmatrix(array.astype(ref.dtype), ref.at[pl.ds(slab, 1)], column)


def _slab_and_column(piece):
    piece = jnp.asarray(piece, jnp.int32)
    return lax.div(piece, np.int32(2)), lax.rem(piece, np.int32(2)) * PIECE


def ld_sums(ref, piece, keep: int = -1, put: int = 0) -> jax.Array:
    """Row r of the tile is row `r & keep | put` of the sums."""
    if interpreting():
        rows = (_rows() & keep) | put
        return ref[:, pl.ds(piece * PIECE, PIECE)][rows]

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), SCALAR), return_type=ptx.array_type(PIECE))
    def load(_, ref, piece):
        width, (first, _) = ir.MemRefType(ref.type).shape[1], ptx.lane_position()
        start, values = _first_channel(ref, piece), [None] * (PIECE // 2)
        for half in range(2):
            row = arith.addi(first, integer(8 * half))
            row = arith.ori(arith.andi(row, integer(keep)), integer(put))
            place = _offset(start, row, 4 * width)
            for n in range(PIECE // 8):
                values[4 * n + 2 * half : 4 * n + 2 * half + 2] = _ld_shared(place, 32 * n, 2)
        return ptx.from_scalars(values)

    return load(ref, jnp.asarray(piece, jnp.int32))


def ld_stored_sums(ref, piece, *, after: bool) -> jax.Array:
    """The sums of the blocks before that of the row, or after it, from what `st_other_sums` stored."""
    if interpreting():
        value = ref[:, pl.ds(piece * PIECE, PIECE)][_rows() // BLOCK + 4 * after]
        plgpu.commit_smem()
        return value

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), SCALAR), return_type=ptx.array_type(PIECE))
    def load(_, ref, piece):
        row = arith.addi(_lane_and_warp()[1], integer(4 * after))
        place = _offset(_first_channel(ref, piece), row, 4 * ir.MemRefType(ref.type).shape[1])
        return _same_rows(sum((_ld_shared(place, 32 * n, 2) for n in range(PIECE // 8)), []))

    return load(ref, jnp.asarray(piece, jnp.int32))


def apart(sums, anchor) -> jax.Array:
    """`−|sums − anchor|`, of `[64, 32]` each."""
    if interpreting():
        return -jnp.abs(sums - anchor)

    @plgpu.inline_mgpu(arg_types=(WGMMA, WGMMA), return_type=ptx.array_type(PIECE))
    def compute(_, *arrays):
        text = "{ .reg .f32 x; sub.ftz.f32 x, $1, $2; abs.f32 x, x; neg.f32 $0, x; }"
        return ptx.from_scalars([ptx._instruction(text, *pair) for pair in zip(*map(ptx.scalars, arrays), strict=True)])

    return compute(sums, anchor)


def ld_decay_below(ref, piece, block: int) -> jax.Array:
    """The decay of a block of 16 tokens, for rows of later blocks; 1 for others."""
    if interpreting():
        decay = jnp.exp2(ref[BLOCK * block + BLOCK - 1, pl.ds(piece * PIECE, PIECE)])
        return jnp.where((_rows() // BLOCK > block)[:, None], decay, 1)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), SCALAR), return_type=ptx.array_type(PIECE))
    def load(_, ref, piece):
        _, warp = _lane_and_warp()
        below = arith.cmpi(arith.CmpIPredicate.ugt, warp, integer(block))
        ends = _ld_end(ref, piece, block)
        return _same_rows([ptx.ex2(arith.select(below, x, ptx.constant(0))) for x in ends])

    return load(ref, jnp.asarray(piece, jnp.int32))


def decayed(x, sums, anchor=None) -> jax.Array:
    """`x · 2^−|sums − anchor|`, all `[64, 32]`; without an anchor `x · 2^sums`."""
    if interpreting():
        return x * jnp.exp2(sums if anchor is None else -jnp.abs(sums - anchor))
    given = [x, sums] if anchor is None else [x, sums, anchor]

    @plgpu.inline_mgpu(arg_types=[WGMMA] * len(given), return_type=ptx.array_type(PIECE))
    def multiply(_, *arrays):
        values = []
        for x, *exponent in zip(*map(ptx.scalars, arrays), strict=True):
            values.append(ptx.mul(x, ptx.ex2(*exponent) if len(exponent) == 1 else _exp2_apart(*exponent)))
        return ptx.from_scalars(values)

    return multiply(*given)


# --- products ---------------------------------------------------------------------------------------------------------


def mma_with_block(sums, left, ref, piece, block: int) -> tuple:
    """Adds to each of `sums [64, 16]` the product of its `left [64, 32]`, bfloat16, with rows `[16 · block, + 16)` of
    these channels of `ref [slabs, 64, 64]` (`mma.sync`)."""
    slab, column = _slab_and_column(piece)
    if interpreting():
        right = ref[slab, pl.ds(BLOCK * block, BLOCK), pl.ds(column, PIECE)]
        plgpu.commit_smem()
        return tuple(
            s + jnp.dot(x, right.T, preferred_element_type=jnp.float32) for s, x in zip(sums, left, strict=True)
        )
    count = len(sums)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(ptx.TRANSFORMS), SCALAR, *[WGMMA] * (2 * count)),
        return_type=(ptx.array_type(BLOCK),) * count,
    )
    def multiply(_, ref, column, *arrays):
        lane, _ = _lane_and_warp()
        in_group, matrix = arith.remui(lane, integer(8)), arith.divui(lane, integer(8))
        row = arith.addi(arith.muli(arith.divui(matrix, integer(2)), integer(8)), in_group)
        row = arith.addi(row, integer(BLOCK * block))
        results, left = [ptx.scalars(x) for x in arrays[:count]], [ptx.pairs(x) for x in arrays[count:]]
        for step, right in enumerate(_ld_matrices(ref, row, arith.remui(matrix, integer(2)), column.registers[()])):
            for x, words in zip(results, left, strict=True):
                for tile in range(2):
                    mine = slice(4 * tile, 4 * tile + 4)
                    x[mine] = _mma(x[mine], words[4 * step :][:4], right[2 * tile :][:2])
        return tuple(map(ptx.from_scalars, results))

    return multiply(ref.at[pl.ds(slab, 1)], column, *sums, *left)


def mma_own(sums, queries, keys, right, halves) -> jax.Array:
    """Adds products within blocks of 16 to `sums [64, 8 · halves]`, 8 columns for each `(i, j)` of `halves`: of half i
    of a block's rows of `keys [64, 32]`, in rows 0 to 7, and of `queries`, in rows 8 to 15, with half j of its rows of
    `right`, in columns (`mma.sync`). So no product is of the quarter above the diagonal."""
    if interpreting():
        half = lambda x, i: x.reshape(-1, 2, BLOCK // 2, PIECE)[:, i]  # noqa: E731
        products = [
            jnp.einsum(
                "nic,njc->nij", jnp.concatenate([half(keys, r), half(queries, r)], axis=1), half(right, c),
                preferred_element_type=jnp.float32,
            )
            for r, c in halves
        ]  # fmt: skip
        return sums + jnp.concatenate(products, axis=2).reshape(sums.shape)

    @plgpu.inline_mgpu(arg_types=[WGMMA] * 4, return_type=ptx.array_type(8 * len(halves)))
    def multiply(_, sums, *arrays):
        results, (queries, keys, right) = ptx.scalars(sums), map(ptx.pairs, arrays)
        utils.warp_barrier()  # or the compiler reads the next anchor's sums ahead, into registers that others need
        for step in range(0, len(right), 4):
            for i, (row, column) in enumerate(halves):
                left = [x[step + 2 * k + row] for k in range(2) for x in (keys, queries)]
                mine = slice(4 * i, 4 * i + 4)
                results[mine] = _mma(results[mine], left, right[step + column : step + 4 : 2])
        return ptx.from_scalars(results)

    return multiply(sums, queries, keys, right)


CORNER, INNER = ((1, 0),), ((0, 0), (1, 1))  # halves of 16 rows and columns


def within_blocks(corner, inner, diagonal=None) -> tuple:
    """The lower triangles of blocks of 16, `[64, 16]`, of queries and of keys, from products by `mma_own`: of `CORNER`,
    and of `INNER` for each of the levels 4, 2 and 1 (see `LEVELS`), which have multiplied others too that are left out
    here, or for all three at once.

    Args:
        diagonal: that of the queries' triangle, `[64]` in the ROW layout, that of the keys' is 0; or None where the
            only inner products have it.
    """
    bits = LEVELS[:0:-1] if diagonal is not None else ()
    if interpreting():
        r, c = _rows()[:, None] % BLOCK, _rows()[:BLOCK]
        found = []
        for which in (1, 0):  # queries, keys
            quarters = [[a[:, which] for a in _quarters(corner)], *([a[:, which] for a in _quarters(x)] for x in inner)]
            whole = [_of_quarters(quarters[0][0], *x) for x in quarters[1:]]
            value = whole[-1] if diagonal is None else diagonal[:, None] * which
            for bit, level in zip(bits, whole[::-1], strict=False):
                value = jnp.where(r ^ c >= bit, level, value)
            found.append(jnp.where(r >= c, value, 0))
        return tuple(found)
    diagonals = [] if diagonal is None else [diagonal]

    @plgpu.inline_mgpu(
        arg_types=[WGMMA] * (1 + len(inner)) + [ptx.ROW] * len(diagonals), return_type=(ptx.array_type(BLOCK),) * 2
    )
    def choose(_, *arrays):
        zero, (corner, *rest) = ptx.constant(0), [ptx.scalars(x) for x in arrays]
        first, column = ptx.lane_position()
        row, found = arith.remui(first, integer(8)), []
        for which in (1, 0):  # queries, keys
            own = [zero] * 8
            own[2:4] = corner[2 * which :][:2]
            for half, i in ((0, 0), (0, 1), (1, 0), (1, 1)):
                mine = arith.addi(column, integer(i))
                level = [x[4 * half + 2 * which + i] for x in rest[: len(inner)]]
                value = level[-1] if diagonal is None else rest[-1][half] if which else zero
                for bit, x in zip(bits, level[::-1], strict=False):
                    differs = arith.cmpi(arith.CmpIPredicate.uge, arith.xori(row, mine), integer(bit))
                    value = arith.select(differs, x, value)
                own[6 * half + i] = arith.select(arith.cmpi(arith.CmpIPredicate.uge, row, mine), value, zero)
            found.append(ptx.from_scalars(own))
        return tuple(found)

    return choose(corner, *inner, *diagonals)


def _quarters(x):
    """Of results of `mma_own`, in interpret mode: for each half `[blocks, 2, 8, 8]`, of keys and of queries."""
    return list(jnp.moveaxis(x.reshape(4, 2, 8, -1, 8), 3, 0))


def _of_quarters(corner, first, last):
    upper = jnp.concatenate([first, 0 * first], axis=2)
    return jnp.concatenate([upper, jnp.concatenate([corner, last], axis=2)], axis=1).reshape(TILE_ROWS, BLOCK)


def assembled(blocks, own) -> jax.Array:
    """The lower triangle `[64, 64]` of products with the first three blocks of 16 columns and, within blocks, `own`."""
    if interpreting():
        r, c = _rows()[:, None], _rows()
        outside = jnp.pad(jnp.concatenate(blocks, axis=1), ((0, 0), (0, BLOCK)))
        return jnp.where(r // BLOCK == c // BLOCK, own[r, c % BLOCK], jnp.where(r >= c, outside, 0))

    @plgpu.inline_mgpu(arg_types=[WGMMA] * 4, return_type=ptx.array_type(TILE_ROWS))
    def assemble(_, *arrays):
        *blocks, own = map(ptx.scalars, arrays)
        zero, (_, warp), found = ptx.constant(0), _lane_and_warp(), []
        for block in range(4):
            here = arith.cmpi(arith.CmpIPredicate.eq, warp, integer(block))
            below = arith.cmpi(arith.CmpIPredicate.ugt, warp, integer(block))
            for i in range(8):
                outside = arith.select(below, blocks[block][i], zero) if block < 3 else zero
                found.append(arith.select(here, own[i], outside))
        return ptx.from_scalars(found)

    return assemble(*blocks, own)


def _rows():
    return jnp.arange(TILE_ROWS, dtype=jnp.int32)


# --- registers --------------------------------------------------------------------------------------------------------


def _start(ref):
    return llvm.ptrtoint(i32(), utils.memref_ptr(ref))


def _lane_and_warp():
    thread = ptx.thread_index()
    return arith.remui(thread, integer(32)), arith.remui(arith.divui(thread, integer(32)), integer(4))


def _first_channel(ref, piece):
    """Where this thread's first channel of the piece lies in row 0."""
    column = arith.addi(arith.muli(piece.registers[()], integer(PIECE)), ptx.lane_position()[1])
    return _offset(_start(ref), column, 4)


def _ld_end(ref, piece, block: int) -> list:
    """This thread's channels of the last row of a block."""
    row = 4 * (BLOCK * block + BLOCK - 1) * ir.MemRefType(ref.type).shape[1]
    return sum((_ld_shared(_first_channel(ref, piece), row + 32 * n, 2) for n in range(PIECE // 8)), [])


def _same_rows(columns: list):
    """Pairs of channels as a tile whose rows are all alike."""
    return ptx.from_scalars(sum((2 * columns[i : i + 2] for i in range(0, len(columns), 2)), []))


def _ld_matrices(ref, row, second, column):
    """For each 16 channels of a piece the words of four 8 × 8 matrices; each lane says where one row of one lies: row
    `row` of `ref [64, 64]`, in the first 8 channels or the `second`."""
    kind = llvm.StructType.get_literal([i32()] * 4)
    base = arith.addi(_start(ref), arith.muli(row, integer(2 * ptx.SLAB)))
    first = arith.addi(arith.divui(column, integer(8)), second)
    for step in range(PIECE // 16):
        chunk = arith.xori(arith.addi(first, integer(2 * step)), arith.remui(row, integer(8)))
        address = arith.addi(base, arith.muli(chunk, integer(16)))
        text = "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {$0, $1, $2, $3}, [$4];"
        four = llvm.inline_asm(kind, [address], text, "=r,=r,=r,=r,r", has_side_effects=True)
        yield [llvm.extractvalue(i32(), four, [i]) for i in range(4)]


def _unpacked(word) -> list:
    """The two bfloat16 of a word as float32."""
    halves = arith.shli(word, integer(16)), arith.andi(word, integer(0xFFFF0000))
    return [arith.bitcast(ir.F32Type.get(), x) for x in halves]


def _exp2_apart(a, b):
    """2^−|a − b|."""
    text = "{ .reg .f32 x; sub.ftz.f32 x, $1, $2; abs.f32 x, x; neg.f32 x, x; ex2.approx.ftz.f32 $0, x; }"
    return ptx._instruction(text, a, b)


def _ld_one(address, offset: int):
    text = f"ld.shared.f32 $0, [$1 + {offset}];"
    return llvm.inline_asm(ir.F32Type.get(), [address], text, "=f,r", has_side_effects=True)

"""Products of a chunk's score gradients with its decayed queries and keys, for `linear_channel_backward_scores`: the
transposes of those of `linear_channel_tiles`, by the same anchors. As in `memory`, functions have an equivalent in
plain jnp for interpret mode.
"""

import functools
import math

import jax
import jax.numpy as jnp

from jattn.pallas._compat import arith, interpreting, ir, llvm, pl, plgpu, utils
from jattn.pallas.hopper import linear_tiles, memory, ptx
from jattn.pallas.hopper.linear_channel_backward_tiles import _ld_four, _pairs, _square_addresses, unpacked
from jattn.pallas.hopper.linear_channel_tiles import (
    BLOCK,
    PIECE,
    _exp2_apart,
    _first_channel,
    _lane_and_warp,
    _ld_end,
    _ld_one,
    _same_rows,
)
from jattn.pallas.hopper.linear_tiles import _ld_shared, _offset, _st_shared, _transposed_addresses
from jattn.pallas.hopper.mma import _mma, _packed, _transposed
from jattn.pallas.hopper.ptx import SCALAR, TILE_ROWS, WGMMA, i32, integer

#: The largest entry of a block's score gradients with which its pairs may take one anchor. Beside the least of these an
#: entry made with `LEAST_BETA` is 2^-52, times 2^-58 still 2^16 above what a float32 flushes.
USUAL = 2.0**-32, 2.0**32


def ld_blocks(ref, *, transposed: bool) -> jax.Array:
    """bfloat16 `ref [1, 64, 64]`, lower triangular, without its blocks of 16 × 16 on the diagonal; or its transpose."""
    if interpreting():
        r = jnp.arange(TILE_ROWS, dtype=jnp.int32) // BLOCK
        value = jnp.where(r[:, None] > r, ref[0], 0)
        plgpu.commit_smem()
        return value.T if transposed else value

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(ptx.TRANSFORMS),),
        return_type=plgpu.ShapeDtypeStruct((TILE_ROWS, TILE_ROWS), ref.dtype, layout=WGMMA),
    )
    def load(_, ref):
        (_, warp), words = _lane_and_warp(), []
        if transposed:
            addresses, form = _transposed_addresses(ref), ".trans"
        else:
            addresses, form = _square_addresses(ref, 0), ""
        for block, address in enumerate(addresses):
            keep = arith.cmpi(arith.CmpIPredicate.ult if transposed else arith.CmpIPredicate.ugt, warp, integer(block))
            words += [arith.select(keep, x, integer(0)) for x in _ld_four(address, form)]
        return ptx.from_pairs(words, ir.MemRefType(ref.type).element_type)

    return load(ref)


def ld_decay_above(ref, piece, block: int) -> jax.Array:
    """The decay of a block of 16 tokens, from its sums, for rows of earlier blocks; 1 for others."""
    if interpreting():
        decay = jnp.exp2(ref[BLOCK * block + BLOCK - 1, pl.ds(piece * PIECE, PIECE)])
        return jnp.where((jnp.arange(TILE_ROWS, dtype=jnp.int32) // BLOCK < block)[:, None], decay, 1)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), SCALAR), return_type=ptx.array_type(PIECE))
    def load(_, ref, piece):
        _, warp = _lane_and_warp()
        above = arith.cmpi(arith.CmpIPredicate.ult, warp, integer(block))
        ends = _ld_end(ref, piece, block)
        return _same_rows([ptx.ex2(arith.select(above, x, ptx.constant(0))) for x in ends])

    return load(ref, jnp.asarray(piece, jnp.int32))


def ld_own(ref) -> jax.Array:
    """Of bfloat16 `ref [1, 64, 64]`, 0 above the diagonal, the blocks of 16 × 16 on the diagonal with their transposes
    above it, for `add_level`; in interpret mode with what is outside of blocks too."""
    if interpreting():
        value = ref[0]
        plgpu.commit_smem()
        return jnp.tril(value) + jnp.tril(value, -1).T

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(ptx.TRANSFORMS),),
        return_type=plgpu.ShapeDtypeStruct((TILE_ROWS, 8), jnp.int32, layout=WGMMA),
    )
    def load(_, ref):
        a, b = (_ld_four(_own_address(ref), form) for form in ("", ".trans"))
        return ptx.from_scalars([arith.ori(a[0], b[0]), a[1], b[1], arith.ori(a[3], b[3])], signed=True)

    return load(ref)


def st_unusual(squares, ref, *, more: bool) -> None:
    """Notes in int32 `ref [pieces, 4]`, in all of its rows, for each block of 16 tokens whether in any square the
    block's largest entry (see `ld_own`) is not 0 and outside `USUAL`. With `more`, what has been noted (see
    `linear_channel_tiles.st_sums`) stays."""
    if interpreting():
        tokens = jnp.arange(TILE_ROWS, dtype=jnp.int32)
        same = tokens[:, None] // BLOCK == tokens // BLOCK
        found = jnp.zeros(TILE_ROWS // BLOCK, bool)
        for square in squares:
            size = jnp.abs(jnp.where(same, square.astype(jnp.float32), 0)).reshape(-1, BLOCK * TILE_ROWS)
            largest = jnp.max(size, axis=1)
            found |= ~(largest == 0) & ~((largest >= USUAL[0]) & (largest < USUAL[1]))
        ref[...] = jnp.broadcast_to(found.astype(jnp.int32), ref.shape) | (ref[...] if more else 0)
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), *[WGMMA] * len(squares)))
    def store(_, ref, *squares):
        least, most = (integer((round(math.log2(x)) + 127) << 7) for x in USUAL)  # as bits of bfloat16
        found = integer(0)
        for words in map(ptx.scalars, squares):
            sizes = [arith.andi(x, integer(0x7FFF)) for word in words for x in (word, arith.shrui(word, integer(16)))]
            largest = functools.reduce(arith.maxui, sizes)
            some, enough, huge = (
                arith.extui(i32(), ptx.vote_any(arith.cmpi(arith.CmpIPredicate.uge, largest, x)))
                for x in (integer(1), least, most)
            )
            found = arith.ori(found, arith.ori(huge, arith.subi(some, enough)))
        (lane, warp), pieces = _lane_and_warp(), ir.MemRefType(ref.type).shape[0]
        word = arith.addi(arith.muli(arith.minui(lane, integer(pieces - 1)), integer(4)), warp)
        place = _offset(llvm.ptrtoint(i32(), utils.memref_ptr(ref)), word, 4)
        if more:
            found = arith.ori(found, arith.bitcast(i32(), _ld_one(place, 0)))
        _st_shared(place, 0, [arith.bitcast(ir.F32Type.get(), found)])

    store(ref, *squares)


def add_level(state, q, k, sums, anchor, dA, dL, bit) -> tuple:
    """Adds what pairs of tokens of a block give that first differ in `bit` (see `linear_channel_tiles.LEVELS`).

    A token is a row of these pairs if it has the bit, else a column, and both are decayed over |sums − anchor|. So the
    right operands are all of k, and the rows' q with the columns' k; the left ones dL and dA with their transposes
    above the diagonal. Gradients times what they are the gradients of, as the products had it, are added to w, of
    columns with a minus: pairs on one side of a token cancel as far as float32 can.

    Args:
        state: gradients of q, k, w `[64, 32]` and, with dL, the rows' part of w for dL, of which sums along rows are
            wanted: `[64, 8]`.
        dA, dL: by `ld_own`; dL None without the delta rule.
        bit: a traced int32: the loop over levels keeps ptxas from mixing them, for which there are no registers.
    """
    squares = [dA] if dL is None else [dA, dL]
    bit = jnp.asarray(bit, jnp.int32)
    if interpreting():
        return _add_level(state, q, k, sums, anchor, squares, bit)
    count = len(state)

    @plgpu.inline_mgpu(
        arg_types=(*[WGMMA] * (count + 4), SCALAR, *[WGMMA] * len(squares)),
        return_type=tuple(ptx.array_type(x.shape[1]) for x in state),
    )
    def add(_, *operands):
        dq, dk, w, *own = map(ptx.scalars, operands[:count])
        q, k, sums, anchor = map(ptx.scalars, operands[count : count + 4])
        bit, zero, (lane, _) = operands[count + 4].registers[()], ptx.constant(0), _lane_and_warp()
        token = arith.divui(lane, integer(4))
        halves = token, arith.addi(token, integer(8))
        is_row = [arith.cmpi(arith.CmpIPredicate.ne, arith.andi(x, bit), integer(0)) for x in halves]
        sign = [arith.select(x, ptx.constant(1), ptx.constant(-1)) for x in is_row]
        A, *L = [_level(ptx.scalars(square), lane, bit) for square in operands[count + 5 :]]
        of_rows = [arith.select(is_row[i % 2], x, integer(0)) for i, x in enumerate(A)]
        of_columns = [arith.select(is_row[i % 2], integer(0), x) for i, x in enumerate(A)]
        to_beta = [zero, zero]
        for i in range(0, len(dq), 4):  # 8 channels
            decay = list(map(_exp2_apart, sums[i : i + 4], anchor[i : i + 4]))
            mixed = [arith.select(is_row[j // 2], q[i + j], k[i + j]) for j in range(4)]
            right = [[_packed(*pair) for pair in _pairs(map(ptx.mul, x, decay))] for x in (mixed, k[i : i + 4])]
            mixed, keys = (sum(map(unpacked, words), []) for words in right)
            right = [list(map(_transposed, words)) for words in right]
            to_rows = _mma([zero] * 4, of_rows, right[0])
            to_keys = _mma([zero] * 4, of_columns, right[0])
            for words in L:
                to_keys = _mma(to_keys, words, right[1])
            for j, d in enumerate(decay):
                dq[i + j] = ptx.fma(d, to_rows[j], dq[i + j])
                dk[i + j] = ptx.fma(d, to_keys[j], dk[i + j])
                part = ptx.mul(keys[j], to_keys[j])
                to_beta[j // 2] = ptx.add(to_beta[j // 2], part)
                part = ptx.fma(mixed[j], to_rows[j], part)
                w[i + j] = ptx.fma(sign[j // 2], part, w[i + j])
        for total in own:
            for half, x in enumerate(to_beta):
                total[2 * half] = ptx.add(total[2 * half], arith.select(is_row[half], x, zero))
        return tuple(map(ptx.from_scalars, (dq, dk, w, *own)))

    return add(*state, q, k, sums, anchor, bit, *squares)


def _add_level(state, q, k, sums, anchor, squares, bit):
    """`add_level` in interpret mode."""
    dq, dk, w, *own = state
    tokens = jnp.arange(TILE_ROWS, dtype=jnp.int32)
    is_row, apart = (tokens & bit != 0)[:, None], tokens[:, None] ^ tokens
    decay = jnp.exp2(-jnp.abs(sums - anchor))
    left = [jnp.where((apart >= bit) & (apart < 2 * bit), x, 0) for x in squares]
    mixed, keys = ((x * decay).astype(squares[0].dtype) for x in (jnp.where(is_row, q, k), k))
    to_rows, to_keys = (
        jnp.dot(jnp.where(rows, left[0], 0), mixed, preferred_element_type=jnp.float32) for rows in (is_row, ~is_row)
    )
    for x in left[1:]:
        to_keys = to_keys + jnp.dot(x, keys, preferred_element_type=jnp.float32)
    part = keys.astype(jnp.float32) * to_keys
    if own:
        own = [add_to_sums(own[0], jnp.where(is_row, part, 0))]
    part = part + mixed.astype(jnp.float32) * to_rows
    return dq + decay * to_rows, dk + decay * to_keys, w + jnp.where(is_row, part, -part), *own


def add_blocks(state, q, k, sums, dA, dL) -> tuple:
    """As `add_level`, at once what all pairs of different tokens of a block give; `sums` are from an anchor in its
    middle, see `linear_channel_tiles.shift`. Products of less than 2^-68 with dA or dL may underflow on the way, and
    such of 2^66 overflow: see `st_unusual`."""
    squares = [dA] if dL is None else [dA, dL]
    if interpreting():
        return _add_blocks(state, q, k, sums, squares)
    count = len(state)

    @plgpu.inline_mgpu(
        arg_types=[WGMMA] * (count + 3 + len(squares)), return_type=tuple(ptx.array_type(x.shape[1]) for x in state)
    )
    def add(_, *operands):
        operands = list(map(ptx.scalars, operands))
        (dq, dk, w, *own), (q, k, sums, *squares) = operands[:count], operands[count:]
        zero, (lane, _) = ptx.constant(0), _lane_and_warp()
        (A_rows, A_columns), *L = [_triangles(words, lane) for words in squares]
        to_beta = [zero, zero]
        for i in range(0, len(dq), 4):  # 8 channels
            after, up_to = ([ptx.ex2(ptx.mul(x, ptx.constant(s))) for x in sums[i : i + 4]] for s in (1, -1))
            mine = [(x[i : i + 4], decay) for x, decay in ((k, up_to), (q, after), (k, after))]
            words = [[_packed(*pair) for pair in _pairs(map(ptx.mul, *both))] for both in mine]
            keys, *rows = (sum(map(unpacked, pair), []) for pair in words)
            right_keys, *right_rows = [list(map(_transposed, pair)) for pair in words]
            to_rows = [_mma([zero] * 4, left, right_keys) for left in (A_rows, *(rows_ for rows_, _ in L))]
            to_keys = [zero] * 4
            for left, right in zip((A_columns, *(columns for _, columns in L)), right_rows, strict=False):
                to_keys = _mma(to_keys, left, right)
            for j in range(4):
                dq[i + j] = ptx.fma(after[j], to_rows[0][j], dq[i + j])
                dk[i + j] = ptx.fma(up_to[j], to_keys[j], dk[i + j])
                part = ptx.mul(rows[0][j], to_rows[0][j])
                for to_k in to_rows[1:]:
                    dk[i + j] = ptx.fma(after[j], to_k[j], dk[i + j])
                    beta = ptx.mul(rows[1][j], to_k[j])
                    to_beta[j // 2], part = ptx.add(to_beta[j // 2], beta), ptx.add(part, beta)
                w[i + j] = ptx.add(w[i + j], ptx.sub(part, ptx.mul(keys[j], to_keys[j])))
        for total in own:
            for half, x in enumerate(to_beta):
                total[2 * half] = ptx.add(total[2 * half], x)
        return tuple(map(ptx.from_scalars, (dq, dk, w, *own)))

    return add(*state, q, k, sums, *squares)


def _add_blocks(state, q, k, sums, squares):
    """`add_blocks` in interpret mode."""
    dq, dk, w, *own = state
    tokens = jnp.arange(TILE_ROWS, dtype=jnp.int32)
    same = tokens[:, None] // BLOCK == tokens // BLOCK
    after, up_to = jnp.exp2(sums), jnp.exp2(-sums)
    keys, *rows = ((x * decay).astype(squares[0].dtype) for x, decay in ((k, up_to), (q, after), (k, after)))
    wide, dot = jnp.float32, functools.partial(jnp.dot, preferred_element_type=jnp.float32)
    for i, x in enumerate(squares):
        below = jnp.where(same & (tokens[:, None] > tokens), x, 0)
        to_rows, to_keys = dot(below, keys), dot(below.T, rows[i])
        part = rows[i].astype(wide) * to_rows
        dk, w = dk + up_to * to_keys, w + part - keys.astype(wide) * to_keys
        if i == 0:
            dq = dq + after * to_rows
        else:
            dk, own = dk + after * to_rows, [add_to_sums(own[0], part)]
    return dq, dk, w, *own


def _triangles(words, lane) -> tuple:
    """Of what `ld_own` read: the left operand of what is below the diagonal, and that of what is above it."""
    row, column = arith.divui(lane, integer(4)), arith.muli(arith.remui(lane, integer(4)), integer(2))
    zero, second = integer(0), arith.addi(column, integer(1))
    operands = []
    for below in (arith.CmpIPredicate.ult, arith.CmpIPredicate.ugt):
        masks = [
            arith.select(arith.cmpi(below, x, row), integer(half), zero)
            for x, half in ((column, 0xFFFF), (second, 0xFFFF0000))
        ]
        mask = arith.ori(*masks)
        operands.append([arith.andi(words[0], mask), zero, zero, arith.andi(words[3], mask)])
    operands[0][1], operands[1][2] = words[1], words[2]
    return tuple(operands)


def ld_anchors(ref, piece, bit) -> jax.Array:
    """The sums of the anchors of the tokens at the level of this bit, a traced int32."""
    bit = jnp.asarray(bit, jnp.int32)
    if interpreting():
        r = jnp.arange(TILE_ROWS, dtype=jnp.int32)
        return ref[:, pl.ds(piece * PIECE, PIECE)][r & ~(2 * bit - 1) | (bit - 1)]

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), SCALAR, SCALAR), return_type=ptx.array_type(PIECE))
    def load(_, ref, piece, bit):
        width, (first, _) = ir.MemRefType(ref.type).shape[1], ptx.lane_position()
        start, values, bit = _first_channel(ref, piece), [None] * (PIECE // 2), bit.registers[()]
        below = arith.subi(bit, integer(1))
        mask = arith.xori(arith.addi(bit, below), integer(0xFFFFFFFF))
        for half in range(2):
            row = arith.ori(arith.andi(arith.addi(first, integer(8 * half)), mask), below)
            place = _offset(start, row, 4 * width)
            for n in range(PIECE // 8):
                values[4 * n + 2 * half : 4 * n + 2 * half + 2] = _ld_shared(place, 32 * n, 2)
        return ptx.from_scalars(values)

    return load(ref, jnp.asarray(piece, jnp.int32), bit)


def _level(words, lane, bit) -> list:
    """The left operand: of the warp's block of 16 × 16, with its transpose, who differs first in this bit."""
    row, column = arith.divui(lane, integer(4)), arith.muli(arith.remui(lane, integer(4)), integer(2))
    equal = lambda x, y: arith.cmpi(arith.CmpIPredicate.eq, x, y)  # noqa: E731
    apart = arith.andi(arith.xori(row, column), integer(6))
    is_odd = equal(arith.andi(row, integer(1)), integer(1))
    half = arith.select(is_odd, integer(0xFFFF), integer(0xFFFF0000))  # of a word, which has two columns
    first = arith.andi(apart, arith.subi(integer(0), bit))  # without lower bits
    mask = arith.select(equal(first, bit), integer(0xFFFFFFFF), integer(0))
    mask = arith.select(equal(arith.addi(apart, bit), integer(1)), half, mask)
    corner = arith.select(equal(bit, integer(8)), integer(0xFFFFFFFF), integer(0))
    return list(map(arith.andi, words, (mask, corner, corner, mask)))


def add_to_sums(sums, x) -> jax.Array:
    """`sums [64, 8]`, of which sums along rows are wanted, and x `[64, 32]`."""
    if interpreting():
        return sums + jnp.pad(jnp.sum(x, axis=1, keepdims=True), ((0, 0), (0, 7)))

    @plgpu.inline_mgpu(arg_types=(WGMMA, WGMMA), return_type=ptx.array_type(8))
    def add(_, sums, x):
        values = ptx.scalars(sums)
        for i, v in enumerate(ptx.scalars(x)):
            values[i % 4] = ptx.add(values[i % 4], v)
        return ptx.from_scalars(values)

    return add(sums, x)


def _own_address(square):
    """For `ldmatrix` of the warp's block of 16 × 16: rows 0 to 7, rows 8 to 15 of its first 8 columns; of its last."""
    lane, warp = _lane_and_warp()
    in_group, matrix = arith.remui(lane, integer(8)), arith.divui(lane, integer(8))
    row = arith.addi(in_group, arith.muli(arith.remui(matrix, integer(2)), integer(8)))
    row = arith.addi(row, arith.muli(warp, integer(BLOCK)))
    chunk = arith.addi(arith.muli(warp, integer(2)), arith.divui(matrix, integer(2)))
    base = _offset(llvm.ptrtoint(i32(), utils.memref_ptr(square)), row, 2 * ptx.SLAB)
    return _offset(base, arith.xori(chunk, in_group), 16)


def diagonal(ref) -> jax.Array:
    """The diagonal of bfloat16 `ref [1, 64, 64]`, float32 `[64]` in the ROW layout."""
    return linear_tiles.diagonal(memory.ldmatrix(ref, TILE_ROWS).astype(jnp.float32))

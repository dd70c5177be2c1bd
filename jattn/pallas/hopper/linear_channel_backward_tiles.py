"""Tiles of 64 tokens, as in `linear_channel_tiles`, of what only the backward needs. As in `memory`, functions have an
equivalent in plain jnp for interpret mode.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from jattn.pallas._compat import arith, interpreting, ir, llvm, pl, plgpu, utils
from jattn.pallas.hopper import linear_tiles, memory, ptx
from jattn.pallas.hopper.linear_channel_tiles import (
    BLOCK,
    PIECE,
    _exp2_apart,
    _first_channel,
    _lane_and_warp,
    _ld_end,
    _ld_one,
    _same_rows,
    _slab_and_column,
    ld_tile,
)
from jattn.pallas.hopper.linear_tiles import _VOID, _ld_shared, _offset, _st_shared, _transposed_addresses
from jattn.pallas.hopper.mma import _mma, _packed, _transposed
from jattn.pallas.hopper.ptx import SCALAR, TILE_ROWS, WGMMA, i32, integer

TILE = (2, 128, 8)  # how bfloat16 [64, 32] lies in HBM between two kernels: pieces of 16 bytes of the threads

# --- tiles in HBM -----------------------------------------------------------------------------------------------------


def st_global_tiles(ref, first, array: jax.Array) -> None:
    """Stores bfloat16 `[64, n]`, 32 columns a tile, to tiles from `first` on of `ref [tiles, 2, 128, 8]`, each as it
    lies in registers: only `ld_global_tile` knows the order."""
    count = array.shape[1] // PIECE
    if interpreting():
        for i in range(count):
            ref[first + i] = array[:, i * PIECE : (i + 1) * PIECE].reshape(TILE)
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), SCALAR, WGMMA))
    def store(_, ref, first, array):
        words, pointer = ptx.pairs(array), _place(ref, first)
        for i in range(0, len(words), 4):
            text = f"st.global.v4.b32 [$0 + {512 * i}], {{$1, $2, $3, $4}};"
            operands = [pointer, *words[i : i + 4]]
            llvm.inline_asm(ir.Type.parse(_VOID), operands, text, "l,r,r,r,r", has_side_effects=True)

    store(ref, jnp.asarray(first, jnp.int32), array)


def ld_global_tile(ref, number) -> jax.Array:
    """A tile that `st_global_tiles` stored, bfloat16 `[64, 32]`."""
    if interpreting():
        return ref[number].reshape(TILE_ROWS, PIECE)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), SCALAR),
        return_type=plgpu.ShapeDtypeStruct((TILE_ROWS, PIECE), ref.dtype, layout=WGMMA),
    )
    def load(_, ref, number):
        kind, pointer, words = llvm.StructType.get_literal([i32()] * 4), _place(ref, number), []
        for i in range(0, PIECE // 4, 4):
            text = f"ld.global.nc.v4.b32 {{$0, $1, $2, $3}}, [$4 + {512 * i}];"
            four = llvm.inline_asm(kind, [pointer], text, "=r,=r,=r,=r,l", has_side_effects=True)
            words += [llvm.extractvalue(i32(), four, [j]) for j in range(4)]
        return ptx.from_pairs(words, ir.MemRefType(ref.type).element_type)

    return load(ref, jnp.asarray(number, jnp.int32))


def _place(ref, number):
    """Where this thread's first 16 bytes of a tile lie."""
    kind = ir.MemRefType(ref.type)
    thread = arith.remui(ptx.thread_index(), integer(128))
    start = memory._flat(kind, (number.registers[()], integer(0), thread))
    return memory._element_pointer(utils.memref_ptr(ref), kind.element_type, start)


def unpacked(word) -> list:
    """The two bfloat16 of a word as float32."""
    halves = arith.shli(word, integer(16)), arith.andi(word, integer(0xFFFF0000))
    return [arith.bitcast(ir.F32Type.get(), x) for x in halves]


def ldmatrix_rows(ref, first: int) -> jax.Array:
    """Rows `[first, first + 64)` of 16-bit `ref [1, rows, 64]`, in the WGMMA layout (`ldmatrix`)."""
    if interpreting():
        value = ref[0][first : first + TILE_ROWS]
        plgpu.commit_smem()  # to the emulation a copy into what was read is a race without it
        return value
    dtype = ref.dtype

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(ptx.TRANSFORMS),),
        return_type=plgpu.ShapeDtypeStruct((TILE_ROWS, TILE_ROWS), dtype, layout=WGMMA),
    )
    def load(_, ref):
        words = sum((_ld_four(address, "") for address in _square_addresses(ref, first)), [])
        return ptx.from_pairs(words, ir.MemRefType(ref.type).element_type)

    return load(ref)


# --- products of the scores' gradients --------------------------------------------------------------------------------


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
    middle, see `linear_channel_tiles.shift`."""
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


def once() -> jax.Array:
    """1, which the compiler does not know: what a loop takes so often is not mixed with what is around it, for which
    there would be no registers."""
    if interpreting():
        return jnp.int32(1)

    @plgpu.inline_mgpu(return_type=ptx.scalar_type())
    def one(_):
        return ptx.scalar_array(arith.addi(arith.shrui(ptx.thread_index(), integer(16)), integer(1)))

    return one()


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


# --- sums over tokens -------------------------------------------------------------------------------------------------


def sums_over_tokens(w, x, upper, lower, sums, piece, buffer) -> jax.Array:
    """Σ_{i ≥ s} w_i over tokens i of the block of 16 of each token s, of float32 `[64, 32]`, in a layout that only
    `st_global_sums` knows: a thread has one channel of the tokens of a block.

    Of each block, Σ (w + x) and Σ x are left in the last 8 columns of float32 `sums [64, H + 8]`, where nothing else
    is; a buffer, 0 or 1, is 32 rows of these. What is turned passes through these channels of `upper` and `lower`,
    bfloat16 `[slabs, 64, 64]`, which nobody reads any more.
    """
    if interpreting():
        blocks, total = w.reshape(-1, BLOCK, PIECE), jnp.sum(x.reshape(-1, BLOCK, PIECE), axis=1)
        both = jnp.stack([total + jnp.sum(blocks, axis=1), total])
        sums[pl.ds(buffer * 32, 32), pl.ds(sums.shape[1] - 8, 8)] = both.reshape(32, 8)
        return jnp.flip(jnp.cumsum(jnp.flip(blocks, 1), axis=1), 1).reshape(w.shape)
    slab, column = _slab_and_column(piece)

    @plgpu.inline_mgpu(
        arg_types=(
            WGMMA, WGMMA, plgpu.RefType(ptx.TRANSFORMS), plgpu.RefType(ptx.TRANSFORMS), plgpu.RefType(), SCALAR, SCALAR,
        ),
        return_type=ptx.array_type(PIECE),
    )  # fmt: skip
    def add_up(_, w, x, upper, lower, sums, column, buffer):
        (lane, warp), (row, first) = _lane_and_warp(), ptx.lane_position()
        chunk = arith.divui(column.registers[()], integer(8))
        halves = [llvm.ptrtoint(i32(), utils.memref_ptr(ref)) for ref in (upper, lower)]
        in_group = arith.remui(row, integer(8))
        inside = _offset(_offset(integer(0), row, 128), arith.remui(first, integer(4)), 4)
        stores = []
        for n in range(2):  # 8 channels of 16
            place = arith.addi(chunk, arith.addi(arith.divui(first, integer(4)), integer(2 * n)))
            stores.append(_offset(inside, arith.xori(place, in_group), 16))
        stores = [arith.addi(start, place) for start in halves for place in stores]
        start = arith.select(arith.cmpi(arith.CmpIPredicate.ult, lane, integer(16)), *halves)
        start = _offset(_offset(start, warp, 128 * BLOCK), arith.remui(lane, integer(4)), 4)
        mine = arith.addi(chunk, arith.divui(arith.remui(lane, integer(16)), integer(4)))
        loads = [_offset(start, arith.xori(mine, integer(r)), 16) for r in range(8)]
        suffix_sums, total = [_turned(a, stores, loads) for a in map(ptx.scalars, (w, x))]
        for values in (suffix_sums, total):
            for r in range(BLOCK - 1, 0, -1):
                values[r - 1] = ptx.add(values[r - 1], values[r])
        place, row_bytes = _of_block_sums(sums, buffer, warp)
        _st_shared(place, 0, [ptx.add(suffix_sums[0], total[0])])
        _st_shared(place, 16 * row_bytes, [total[0]])
        return ptx.from_scalars(suffix_sums)

    part = lambda ref: ref.at[pl.ds(slab, 1)]  # noqa: E731
    return add_up(w, x, part(upper), part(lower), sums, column, jnp.asarray(buffer, jnp.int32))


def _turned(values: list, stores: list, loads: list) -> list:
    """This thread's channel, of the tokens of the warp's block."""
    utils.warp_barrier()
    for i in range(0, len(values), 2):
        _st_shared(stores[i // 4], 8 * 128 * ptx.row_of(i), values[i : i + 2])
    utils.warp_barrier()
    return [_ld_one(loads[r % 8], 8 * 128 * (r // 8) + 128 * (r % 8)) for r in range(BLOCK)]


def _of_block_sums(sums, buffer, block):
    """Where this thread's channel of a block's sums lies, and the bytes of a row."""
    width, (lane, _) = ir.MemRefType(sums.type).shape[1], _lane_and_warp()
    row = arith.addi(arith.muli(buffer.registers[()], integer(32)), arith.muli(block, integer(4)))
    row = arith.addi(row, arith.divui(lane, integer(8)))
    place = _offset(llvm.ptrtoint(i32(), utils.memref_ptr(sums)), row, 4 * width)
    return _offset(arith.addi(place, integer(4 * (width - 8))), arith.remui(lane, integer(8)), 4), 4 * width


def st_global_sums(ref, start, suffix_sums, sums, vector, rows, piece, buffer) -> None:
    """Stores, to channels of a piece of float32 `ref [B, T, N, H]`, what `sums_over_tokens` returned plus what it left:
    the first sums of later blocks, and the second of others; plus float32 `vector [≥ H]`. Of the first `rows` rows;
    `start` is (batch, row, head)."""
    if interpreting():
        later, rest = sums[pl.ds(buffer * 32, 32), pl.ds(sums.shape[1] - 8, 8)].reshape(2, 4, PIECE)
        mine, others = jnp.arange(TILE_ROWS, dtype=jnp.int32)[:, None] // BLOCK, jnp.arange(4, dtype=jnp.int32)
        added = jnp.sum(jnp.where((others > mine)[:, :, None], later, rest), axis=1)
        value = suffix_sums + added + vector[pl.ds(piece * PIECE, PIECE)]
        return memory.st_global(ref, start, value, rows, piece * PIECE)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), *[SCALAR] * 3, WGMMA, plgpu.RefType(), plgpu.RefType(), *[SCALAR] * 3)
    )
    def store(_, ref, batch, row, head, suffix_sums, sums, vector, rows, piece, buffer):
        kind, (lane, warp) = ir.MemRefType(ref.type), _lane_and_warp()
        channel = arith.addi(arith.muli(piece.registers[()], integer(PIECE)), lane)
        added = _ld_one(_offset(llvm.ptrtoint(i32(), utils.memref_ptr(vector)), channel, 4), 0)
        place, row_bytes = _of_block_sums(sums, buffer, integer(0))
        for block in range(4):
            later = arith.cmpi(arith.CmpIPredicate.ult, warp, integer(block))
            which = arith.select(later, integer(0), integer(16 * row_bytes))
            added = ptx.add(added, _ld_one(arith.addi(place, which), 4 * block * row_bytes))
        first = arith.muli(warp, integer(BLOCK))
        at = memory._flat(
            kind, (batch.registers[()], arith.addi(row.registers[()], first), head.registers[()], channel)
        )
        pointer = memory._element_pointer(utils.memref_ptr(ref), kind.element_type, at)
        left = arith.subi(rows.registers[()], first)
        for r, x in enumerate(ptx.scalars(suffix_sums)):
            exists = arith.cmpi(arith.CmpIPredicate.sgt, left, integer(r))
            memory._store_if(exists, pointer, 4 * r * kind.shape[2] * kind.shape[3], [ptx.add(x, added)])

    numbers = [jnp.asarray(x, jnp.int32) for x in (*start, rows, piece, buffer)]
    store(ref, *numbers[:3], suffix_sums, sums, vector, *numbers[3:])


def decay_by_chunk(sums, ref, H: int) -> None:
    """Multiplies float32 `ref [≥ H]` in shared memory, a channel each, by the decay of the chunk with these sums."""
    if interpreting():
        ends = sum(sums[BLOCK * i - 1, pl.ds(0, H)] for i in range(1, 5))
        ref[pl.ds(0, H)] = ref[pl.ds(0, H)] * jnp.exp2(ends)
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType()))
    def multiply(_, sums, ref):
        width, thread = ir.MemRefType(sums.type).shape[1], arith.remui(ptx.thread_index(), integer(128))
        channel = arith.minsi(thread, integer(H - 1))
        start, total = _offset(llvm.ptrtoint(i32(), utils.memref_ptr(sums)), channel, 4), ptx.constant(0)
        for i in range(1, 5):
            total = ptx.add(total, _ld_one(start, 4 * (BLOCK * i - 1) * width))
        place = _offset(llvm.ptrtoint(i32(), utils.memref_ptr(ref)), channel, 4)
        value = ptx.mul(_ld_one(place, 0), ptx.ex2(total))
        utils.warpgroup_barrier()  # 64 channels belong to more threads than one
        _st_shared(place, 0, [value])

    multiply(sums, ref)


# --- room for float32 where something else was ------------------------------------------------------------------------


def st_own(ref, piece, value) -> None:
    """Stores float32 `[64, 32]` over these channels of float32 `ref [64, pitch]`; `linear_channel_tiles.ld_sums` reads
    it."""
    if interpreting():
        ref[:, pl.ds(piece * PIECE, PIECE)] = value
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), SCALAR, WGMMA))
    def store(_, ref, piece, value):
        width, (first, _) = ir.MemRefType(ref.type).shape[1], ptx.lane_position()
        place, values = _offset(_first_channel(ref, piece), first, 4 * width), ptx.scalars(value)
        for i in range(0, len(values), 2):
            offset = 4 * (8 * ptx.row_of(i) * width + ptx.column_of(i))
            _st_shared(place, offset, values[i : i + 2])

    store(ref, jnp.asarray(piece, jnp.int32), value)


def st_halves(value, upper, lower, piece) -> None:
    """Stores float32 `[64, 32]` over these channels of two bfloat16 `[slabs, 64, 64]`: upper and lower 16 bits."""
    for part, ref in zip(_halves(value), (upper, lower), strict=True):
        slab, column = _slab_and_column(piece)
        memory.stmatrix(part, ref.at[pl.ds(slab, 1)], column)


def _halves(value):
    if interpreting():
        bits = lax.bitcast_convert_type(value, jnp.uint32)
        parts = bits >> 16, bits & 0xFFFF
        return [lax.bitcast_convert_type(x.astype(jnp.uint16), jnp.bfloat16) for x in parts]
    narrow = plgpu.ShapeDtypeStruct(value.shape, jnp.bfloat16, layout=WGMMA)

    @plgpu.inline_mgpu(arg_types=(WGMMA,), return_type=(narrow, narrow))
    def cut(_, value):
        found = [[], []]
        for pair in _pairs(ptx.scalars(value)):
            for words, select in zip(found, ("0x7632", "0x5410"), strict=True):
                bits = [arith.bitcast(i32(), x) for x in pair]
                words.append(llvm.inline_asm(i32(), bits, f"prmt.b32 $0, $1, $2, {select};", "=r,r,r"))
        return tuple(ptx.from_pairs(words, ir.BF16Type.get()) for words in found)

    return cut(value)


def ld_halves(upper, lower, piece) -> jax.Array:
    """What `st_halves` stored."""
    if interpreting():
        slab, column = _slab_and_column(piece)
        bits = [
            lax.bitcast_convert_type(x[slab, :, pl.ds(column, PIECE)], jnp.uint16).astype(jnp.uint32)
            for x in (upper, lower)
        ]
        plgpu.commit_smem()
        return lax.bitcast_convert_type(bits[0] << 16 | bits[1], jnp.float32)

    @plgpu.inline_mgpu(arg_types=(WGMMA, WGMMA), return_type=ptx.array_type(PIECE))
    def join(_, upper, lower):
        values = []
        for pair in zip(ptx.scalars(upper), ptx.scalars(lower), strict=True):
            high, low = (arith.bitcast(i32(), x) for x in pair)
            bits = arith.ori(high, arith.shrui(low, integer(16)))
            values.append(arith.bitcast(ir.F32Type.get(), bits))
        return ptx.from_scalars(values)

    return join(ld_tile(upper, piece), ld_tile(lower, piece))


# --- registers --------------------------------------------------------------------------------------------------------


def _square_addresses(ref, first: int) -> list:
    """What each lane contributes to `ldmatrix` of 16 columns, four times: rows from `first` on of `[1, rows, 64]`."""
    lane, warp = _lane_and_warp()
    in_group, matrix = arith.remui(lane, integer(8)), arith.divui(lane, integer(8))
    row = arith.addi(in_group, arith.muli(arith.remui(matrix, integer(2)), integer(8)))
    row = arith.addi(arith.addi(row, arith.muli(warp, integer(BLOCK))), integer(first))
    base = _offset(llvm.ptrtoint(i32(), utils.memref_ptr(ref)), row, 2 * ptx.SLAB)
    second = arith.divui(matrix, integer(2))
    return [_offset(base, arith.xori(arith.addi(second, integer(2 * i)), in_group), 16) for i in range(4)]


def _ld_four(address, form: str) -> list:
    """`ldmatrix` of four 8 × 8 matrices; form ".trans" or none."""
    kind = llvm.StructType.get_literal([i32()] * 4)
    text = f"ldmatrix.sync.aligned.m8n8.x4{form}.shared.b16 {{$0, $1, $2, $3}}, [$4];"
    four = llvm.inline_asm(kind, [address], text, "=r,=r,=r,=r,r", has_side_effects=True)
    return [llvm.extractvalue(i32(), four, [i]) for i in range(4)]


def _pairs(values) -> list:
    values = list(values)
    return list(zip(values[::2], values[1::2], strict=True))

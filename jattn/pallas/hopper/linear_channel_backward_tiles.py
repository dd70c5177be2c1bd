"""Tiles of 64 tokens, as in `linear_channel_tiles`, of what only the backward needs. As in `memory`, functions have an
equivalent in plain jnp for interpret mode.
"""

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
    """A tile that `st_global_tiles` stored, float32 `[64, 32]`."""
    if interpreting():
        return ref[number].reshape(TILE_ROWS, PIECE).astype(jnp.float32)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), SCALAR), return_type=ptx.array_type(PIECE))
    def load(_, ref, number):
        kind, pointer, values = llvm.StructType.get_literal([i32()] * 4), _place(ref, number), []
        for i in range(0, PIECE // 4, 4):
            text = f"ld.global.nc.v4.b32 {{$0, $1, $2, $3}}, [$4 + {512 * i}];"
            four = llvm.inline_asm(kind, [pointer], text, "=r,=r,=r,=r,l", has_side_effects=True)
            for j in range(4):
                values += unpacked(llvm.extractvalue(i32(), four, [j]))
        return ptx.from_scalars(values)

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


def add_level(state, q, k, sums, anchor, dA, dL, bit) -> tuple:
    """Adds what pairs of tokens of a block give that first differ in `bit` (see `linear_channel_tiles.LEVELS`).

    A token is a row of these pairs if it has the bit, else a column, and both are decayed over |sums − anchor|. So the
    right operands are all of k, and the rows' q with the columns' k; the left ones dL and dA with their transposes
    above the diagonal. Gradients times what they are the gradients of, as the products had it, are added to w, of
    columns with a minus: pairs on one side of a token cancel as far as float32 can.

    Args:
        state: gradients of q, k, w `[64, 32]` and, with dL, the rows' part of w for dL, of which sums along rows are
            wanted: `[64, 8]`.
        dA, dL: bfloat16 `[1, 64, 64]` in shared memory, 0 above the diagonal; dL None without the delta rule.
        bit: a traced int32: the loop over levels keeps ptxas from mixing them, for which there are no registers.
    """
    squares = [dA] if dL is None else [dA, dL]
    bit = jnp.asarray(bit, jnp.int32)
    if interpreting():
        return _add_level(state, q, k, sums, anchor, [s[0] for s in squares], bit)
    count = len(state)

    @plgpu.inline_mgpu(
        arg_types=(*[WGMMA] * (count + 4), SCALAR, *[plgpu.RefType(ptx.TRANSFORMS)] * len(squares)),
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
        A, *L = [_level(square, lane, bit) for square in operands[count + 5 :]]
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
    plgpu.commit_smem()
    tokens = jnp.arange(TILE_ROWS, dtype=jnp.int32)
    is_row, apart = (tokens & bit != 0)[:, None], tokens[:, None] ^ tokens
    decay = jnp.exp2(-jnp.abs(sums - anchor))
    left = [jnp.where((apart >= bit) & (apart < 2 * bit), x + x.T, 0) for x in squares]
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


def _level(square, lane, bit) -> list:
    """The left operand: of the warp's block of 16 × 16, with its transpose, who differs first in this bit."""
    a, b = (_ld_four(_own_address(square), form) for form in ("", ".trans"))
    row, column = arith.divui(lane, integer(4)), arith.muli(arith.remui(lane, integer(4)), integer(2))
    equal = lambda x, y: arith.cmpi(arith.CmpIPredicate.eq, x, y)  # noqa: E731
    apart = arith.andi(arith.xori(row, column), integer(6))
    is_odd = equal(arith.andi(row, integer(1)), integer(1))
    half = arith.select(is_odd, integer(0xFFFF), integer(0xFFFF0000))  # of a word, which has two columns
    first = arith.andi(apart, arith.subi(integer(0), bit))  # without lower bits
    mask = arith.select(equal(first, bit), integer(0xFFFFFFFF), integer(0))
    mask = arith.select(equal(arith.addi(apart, bit), integer(1)), half, mask)
    corner = arith.select(equal(bit, integer(8)), integer(0xFFFFFFFF), integer(0))
    words = arith.ori(a[0], b[0]), a[1], b[1], arith.ori(a[3], b[3])
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


def block_suffix_sums(x) -> jax.Array:
    """Σ_{i ≥ s} x_i over tokens i of the block of 16 of each token s, of float32 `[64, 32]`."""
    if interpreting():
        blocks = x.reshape(-1, BLOCK, x.shape[1])
        return jnp.flip(jnp.cumsum(jnp.flip(blocks, 1), axis=1), 1).reshape(x.shape)

    @plgpu.inline_mgpu(arg_types=(WGMMA,), return_type=ptx.array_type(x.shape[1]))
    def add_up(_, x):
        lane, _ = _lane_and_warp()
        values = ptx.scalars(x)
        for step in (4, 8, 16):  # 1, 2 and 4 tokens
            has = arith.cmpi(arith.CmpIPredicate.ult, lane, integer(32 - step))
            for i, v in enumerate(values):
                below = linear_tiles._shfl("down", v, integer(step), 31)
                values[i] = ptx.add(v, arith.select(has, below, ptx.constant(0)))
        first = arith.remui(lane, integer(4))
        for i, v in enumerate(values):
            if not ptx.row_of(i):
                values[i] = ptx.add(v, linear_tiles._shfl("idx", values[i + 2], first, 31))
        return ptx.from_scalars(values)

    return add_up(x)


def st_block_sums(sums, buffer, suffix_sums, x) -> None:
    """Stores for each block of 16 tokens: Σ of x `[64, 32]` plus the first row of the block's suffix sums; and Σ of x.
    They lie in the last 8 columns of float32 `sums [64, H + 8]`, of which nothing else is made: a buffer, 0 or 1, is 32
    rows, and 4 of them have a block's."""
    if interpreting():
        total = jnp.sum(x.reshape(-1, BLOCK, PIECE), axis=1)
        both = jnp.stack([total + suffix_sums[::BLOCK], total]).reshape(32, 8)
        sums[pl.ds(buffer * 32, 32), pl.ds(sums.shape[1] - 8, 8)] = both
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), SCALAR, WGMMA, WGMMA))
    def store(_, sums, buffer, suffix_sums, x):
        lane, warp = _lane_and_warp()
        suffix, values = ptx.scalars(suffix_sums), ptx.scalars(x)
        place, row = _of_block_sums(sums, buffer.registers[()], warp)
        is_first = arith.extui(i32(), arith.cmpi(arith.CmpIPredicate.ult, lane, integer(4)))
        for n in range(0, len(values), 4):
            totals = [ptx.add(values[n + i], values[n + i + 2]) for i in range(2)]
            for mask in (4, 8, 16):
                totals = [ptx.add(v, ptx.shfl_bfly(v, mask)) for v in totals]
            both = [ptx.add(v, suffix[n + i]) for i, v in enumerate(totals)]
            for i, pair in enumerate((both, totals)):
                text = "{ .reg .pred p; setp.ne.b32 p, $1, 0;"
                text += f" @p st.shared.v2.f32 [$0 + {row * (16 * i + n // 4)}], {{$2, $3}}; }}"
                llvm.inline_asm(ir.Type.parse(_VOID), [place, is_first, *pair], text, "r,r,f,f", has_side_effects=True)

    store(sums, jnp.asarray(buffer, jnp.int32), suffix_sums, x)


def ld_block_sums(sums, buffer) -> jax.Array:
    """`[64, 32]` from what `st_block_sums` stored: the first sums of later blocks, and the second of others."""
    if interpreting():
        later, rest = sums[pl.ds(buffer * 32, 32), pl.ds(sums.shape[1] - 8, 8)].reshape(2, 4, PIECE)
        mine, others = jnp.arange(TILE_ROWS, dtype=jnp.int32)[:, None] // BLOCK, jnp.arange(4, dtype=jnp.int32)
        return jnp.sum(jnp.where((others > mine)[:, :, None], later, rest), axis=1)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), SCALAR), return_type=ptx.array_type(PIECE))
    def load(_, sums, buffer):
        _, warp = _lane_and_warp()
        start, row = _of_block_sums(sums, buffer.registers[()], integer(0))
        columns = [ptx.constant(0)] * (PIECE // 4)
        for block in range(4):
            later = arith.cmpi(arith.CmpIPredicate.ult, warp, integer(block))
            place = arith.addi(start, arith.select(later, integer(0), integer(16 * row)))
            found = sum((_ld_shared(place, row * (4 * block + n), 2) for n in range(PIECE // 8)), [])
            columns = [ptx.add(a, b) for a, b in zip(columns, found, strict=True)]
        return _same_rows(columns)

    return load(sums, jnp.asarray(buffer, jnp.int32))


def _of_block_sums(sums, buffer, block):
    """Where this thread's channels lie, and the bytes of a row."""
    width = ir.MemRefType(sums.type).shape[1]
    row = arith.addi(arith.muli(buffer, integer(32)), arith.muli(block, integer(4)))
    place = _offset(llvm.ptrtoint(i32(), utils.memref_ptr(sums)), row, 4 * width)
    return _offset(arith.addi(place, integer(4 * (width - 8))), ptx.lane_position()[1], 4), 4 * width


def ld_along_rows(ref, piece) -> jax.Array:
    """Channels `[32 · piece, + 32)` of float32 `ref [n]` in shared memory, alike in all rows of `[64, 32]`."""
    if interpreting():
        value = jnp.broadcast_to(ref[pl.ds(piece * PIECE, PIECE)], (TILE_ROWS, PIECE))
        plgpu.commit_smem()
        return value

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), SCALAR), return_type=ptx.array_type(PIECE))
    def load(_, ref, piece):
        start = _first_channel(ref, piece)
        return _same_rows(sum((_ld_shared(start, 32 * n, 2) for n in range(PIECE // 8)), []))

    return load(ref, jnp.asarray(piece, jnp.int32))


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

"""Tiles of 64 tokens, as in `linear_channel_tiles`, of what only the backward needs. As in `memory`, functions have an
equivalent in plain jnp for interpret mode.
"""

import jax
import jax.numpy as jnp
from jax import lax

from jattn.pallas._compat import arith, interpreting, ir, llvm, pl, plgpu, utils
from jattn.pallas.hopper import memory, ptx
from jattn.pallas.hopper.linear_channel_tiles import (
    BLOCK,
    PIECE,
    _first_channel,
    _lane_and_warp,
    _ld_one,
    _slab_and_column,
    ld_tile,
)
from jattn.pallas.hopper.linear_tiles import _VOID, _offset, _st_shared
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

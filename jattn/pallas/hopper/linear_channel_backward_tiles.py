"""Tiles of 64 tokens, as in `linear_channel_tiles`, of what only the backward needs. As in `memory`, functions have an
equivalent in plain jnp for interpret mode.
"""

import jax
import jax.numpy as jnp

from jattn.pallas._compat import arith, interpreting, ir, llvm, plgpu, utils
from jattn.pallas.hopper import memory, ptx
from jattn.pallas.hopper.linear_channel_tiles import PIECE
from jattn.pallas.hopper.linear_tiles import _VOID, _offset
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
        thread = ptx.thread_index()
        lane, warp = arith.remui(thread, integer(32)), arith.remui(arith.divui(thread, integer(32)), integer(4))
        in_group, matrix = arith.remui(lane, integer(8)), arith.divui(lane, integer(8))
        row = arith.addi(in_group, arith.muli(arith.remui(matrix, integer(2)), integer(8)))
        row = arith.addi(arith.addi(row, arith.muli(warp, integer(16))), integer(first))
        base = _offset(llvm.ptrtoint(i32(), utils.memref_ptr(ref)), row, 2 * ptx.SLAB)
        words, kind = [], llvm.StructType.get_literal([i32()] * 4)
        for group in range(0, 8, 2):
            chunk = arith.xori(arith.addi(arith.divui(matrix, integer(2)), integer(group)), in_group)
            text = "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {$0, $1, $2, $3}, [$4];"
            four = llvm.inline_asm(kind, [_offset(base, chunk, 16)], text, "=r,=r,=r,=r,r", has_side_effects=True)
            words += [llvm.extractvalue(i32(), four, [i]) for i in range(4)]
        return ptx.from_pairs(words, ir.MemRefType(ref.type).element_type)

    return load(ref)

"""Loads, stores and additions of tiles in shared memory and HBM, in the forms that Pallas does not offer: transposed
for free, row by row, element by element. Each is named after its instruction and has an equivalent in plain jnp for
interpret mode; layouts are those of `ptx`.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jattn.pallas._compat import arith, interpreting, ir, llvm, pl, plgpu, utils
from jattn.pallas.hopper import ptx
from jattn.pallas.hopper.ptx import SCALAR, WGMMA, i32, integer

FLOAT_SLAB = 32  # columns of a slab of float32, which like the others has rows of 128 bytes

# --- shared memory ----------------------------------------------------------------------------------------------------


def st_shared_zero_rows(ref, first_row) -> None:
    """Zeroes rows `first_row` and later of a 16-bit matrix `[slabs, rows, 64]`, by one warpgroup (`st.shared.v4.b32`).

    The swizzle moves bytes only within a row of a slab, so clearing its 128 bytes clears the row.
    """
    count, rows, _ = ref.shape
    if interpreting():
        kept = jnp.arange(rows, dtype=jnp.int32)[:, None] < first_row
        for i in range(count):
            ref[i] = jnp.where(kept, ref[i], 0).astype(ref.dtype)
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(ptx.TRANSFORMS), SCALAR))
    def clear(_, ref, first):
        thread = arith.remui(ptx.thread_index(), integer(128))
        base = arith.addi(llvm.ptrtoint(i32(), utils.memref_ptr(ref)), arith.muli(thread, integer(16)))
        thread_row = arith.divui(thread, integer(8))  # 8 threads clear a row, 128 threads 16 rows
        text = "{ .reg .pred p; .reg .b32 z; mov.b32 z, 0; setp.ge.s32 p, $1, $2;"
        text += " @p st.shared.v4.b32 [$0], {z, z, z, z}; }"
        for i in range(count * rows // 16):
            row = arith.addi(thread_row, integer(i * 16 % rows))
            operands = [arith.addi(base, integer(i * 2048)), row, first.registers[()]]
            llvm.inline_asm(ir.Type.parse("!llvm.void"), operands, text, "r,r,r", has_side_effects=True)

    clear(ref, jnp.asarray(first_row, jnp.int32))


def st_shared_zero_outside(ref, low, high) -> None:
    """Zeroes the rows of a 16-bit matrix `[slabs, rows, 64]` outside `[low, high)`, by one warpgroup
    (`st.shared.v4.b32`); see `st_shared_zero_rows`."""
    count, rows, _ = ref.shape
    if interpreting():
        row = jnp.arange(rows, dtype=jnp.int32)[:, None]
        for i in range(count):
            ref[i] = jnp.where((row >= low) & (row < high), ref[i], 0).astype(ref.dtype)
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(ptx.TRANSFORMS), SCALAR, SCALAR))
    def clear(_, ref, low, high):
        thread = arith.remui(ptx.thread_index(), integer(128))
        base = arith.addi(llvm.ptrtoint(i32(), utils.memref_ptr(ref)), arith.muli(thread, integer(16)))
        thread_row = arith.divui(thread, integer(8))  # 8 threads clear a row, 128 threads 16 rows
        text = "{ .reg .pred p, q; .reg .b32 z; mov.b32 z, 0; setp.lt.s32 p, $1, $2; setp.ge.or.s32 q, $1, $3, p;"
        text += " @q st.shared.v4.b32 [$0], {z, z, z, z}; }"
        for i in range(count * rows // 16):
            row = arith.addi(thread_row, integer(i * 16 % rows))
            operands = [arith.addi(base, integer(i * 2048)), row, low.registers[()], high.registers[()]]
            llvm.inline_asm(ir.Type.parse("!llvm.void"), operands, text, "r,r,r,r", has_side_effects=True)

    clear(ref, jnp.asarray(low, jnp.int32), jnp.asarray(high, jnp.int32))


def float_smem(*leading):
    """Room for float32 `[64, 64]`, as `st_shared` and `reduce_add` take it."""
    return plgpu.SMEM(
        (*leading, ptx.SLAB // FLOAT_SLAB, ptx.TILE_ROWS, FLOAT_SLAB), jnp.float32, transforms=ptx.TRANSFORMS
    )


def st_shared(array, ref) -> None:
    """Stores a float32 `[64, columns]` array, a multiple of 32 columns, to `ref [columns / 32, 64, 32]`, without bank
    conflicts (`st.shared.v2.f32`).

    Half a warp stores 8 bytes a thread: two neighbouring chunks of 16 bytes of four rows. The swizzle moves rows 2j and
    2j + 1 alike in pairs of chunks, so that odd rows store their groups of 8 columns in another order.
    """
    columns = array.shape[1]
    if interpreting():
        for i in range(columns // FLOAT_SLAB):
            ref[i] = array[:, i * FLOAT_SLAB : (i + 1) * FLOAT_SLAB]
        return

    @plgpu.inline_mgpu(arg_types=(WGMMA, plgpu.RefType(ptx.TRANSFORMS)))
    def store(_, array, ref):
        words, (row, column) = ptx.scalars(array), ptx.lane_position()
        odd = arith.cmpi(arith.CmpIPredicate.ne, arith.remui(row, integer(2)), integer(0))
        chunk = arith.xori(arith.divui(column, integer(4)), arith.remui(row, integer(8)))
        chunk = arith.xori(chunk, arith.select(odd, integer(4), integer(0)))
        inside = arith.addi(arith.muli(chunk, integer(16)), arith.muli(arith.remui(column, integer(4)), integer(4)))
        base = arith.addi(llvm.ptrtoint(i32(), utils.memref_ptr(ref)), arith.muli(row, integer(128)))
        places = [arith.addi(base, arith.xori(inside, integer(32 * i))) for i in range(4)]
        for group in (g for g in range(columns // 8) if not g % 4 & 2):
            for i in range(2):  # rows 0 to 7 of the warp, rows 8 to 15
                offset = (group // 4 * ptx.TILE_ROWS + 8 * i) * 128
                near, far = (words[4 * g + 2 * i :][:2] for g in (group, group + 2))
                first = [arith.select(odd, y, x) for x, y in zip(near, far, strict=True)]
                second = [arith.select(odd, x, y) for x, y in zip(near, far, strict=True)]
                for place, pair in ((group % 4, first), (group % 4 + 2, second)):
                    text = f"st.shared.v2.f32 [$0 + {offset}], {{$1, $2}};"
                    operands = [places[place], *pair]
                    llvm.inline_asm(ir.Type.parse("!llvm.void"), operands, text, "r,f,f", has_side_effects=True)

    store(array, ref)


def stmatrix(array, ref, column=None) -> None:
    """Stores a 16-bit `[64, columns]` array to `ref [slabs, 64, 64]`, without bank conflicts (`stmatrix`); or to the
    columns of a single slab from `column` on, a multiple of 16."""
    columns = array.shape[1]
    if interpreting() and column is not None:
        ref[0, :, pl.ds(column, columns)] = array
        return
    if interpreting():
        for i in range(ptx.slabs(columns)):
            part = array[:, i * ptx.SLAB : (i + 1) * ptx.SLAB]
            ref[i] = jnp.pad(part, ((0, 0), (0, ptx.SLAB - part.shape[1])))
        return

    @plgpu.inline_mgpu(arg_types=(WGMMA, plgpu.RefType(ptx.TRANSFORMS), SCALAR))
    def store(_, array, ref, column):
        words = ptx.pairs(array)  # per 8 columns: rows 0 to 7 of the warp, rows 8 to 15
        thread = ptx.thread_index()
        lane, warp = arith.remui(thread, integer(32)), arith.remui(arith.divui(thread, integer(32)), integer(4))
        in_group, matrix_of_lane = arith.remui(lane, integer(8)), arith.divui(lane, integer(8))
        lower = arith.muli(arith.remui(matrix_of_lane, integer(2)), integer(8))
        row = arith.addi(arith.muli(warp, integer(16)), arith.addi(in_group, lower))
        base = arith.addi(llvm.ptrtoint(i32(), utils.memref_ptr(ref)), arith.muli(row, integer(2 * ptx.SLAB)))
        second = arith.divui(matrix_of_lane, integer(2))  # lanes 16 to 31 give the addresses of the second 8 columns
        second = arith.addi(second, arith.divui(column.registers[()], integer(8)))
        for group in range(0, columns // 8, 2):
            count = min(4, len(words) - 2 * group)
            chunk = arith.xori(arith.addi(second, integer(group % 8)), in_group)
            slab_start = (group // 8) * ptx.TILE_ROWS * 2 * ptx.SLAB
            address = arith.addi(arith.addi(base, integer(slab_start)), arith.muli(chunk, integer(16)))
            registers = ", ".join(f"${1 + i}" for i in range(count))
            text = f"stmatrix.sync.aligned.m8n8.x{count}.shared.b16 [$0], {{{registers}}};"
            operands, kinds = [address, *words[2 * group : 2 * group + count]], ",".join("r" * (count + 1))
            llvm.inline_asm(ir.Type.parse("!llvm.void"), operands, text, kinds, has_side_effects=True)

    store(array, ref, jnp.asarray(0 if column is None else column, jnp.int32))


def ldmatrix(ref, columns: int) -> jax.Array:
    """The first columns, rounded up to a multiple of 16, of 16-bit `ref [slabs, rows, 64]`, in the WGMMA layout
    (`ldmatrix`). Of fewer rows than 64, a multiple of 8, the last 8 come again and again."""
    columns, rows = -(-columns // 16) * 16, ref.shape[1]
    if interpreting():
        value = jnp.concatenate([ref[i] for i in range(ref.shape[0])], axis=1)[:, :columns]
        again = jnp.tile(value[rows - 8 :], ((ptx.TILE_ROWS - rows) // 8, 1))
        value = jnp.concatenate([value, again]) if rows < ptx.TILE_ROWS else value
        plgpu.commit_smem()  # to the emulation a copy into what was read is a race without it
        return value
    dtype = ref.dtype

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(ptx.TRANSFORMS),),
        return_type=plgpu.ShapeDtypeStruct((ptx.TILE_ROWS, columns), dtype, layout=WGMMA),
    )
    def load(_, ref):
        thread = ptx.thread_index()
        lane, warp = arith.remui(thread, integer(32)), arith.remui(arith.divui(thread, integer(32)), integer(4))
        in_group, matrix_of_lane = arith.remui(lane, integer(8)), arith.divui(lane, integer(8))
        lower = arith.muli(arith.remui(matrix_of_lane, integer(2)), integer(8))
        first = arith.addi(arith.muli(warp, integer(16)), lower)
        if rows < ptx.TILE_ROWS:
            first = arith.minsi(first, integer(rows - 8))
        row = arith.addi(first, in_group)
        base = arith.addi(llvm.ptrtoint(i32(), utils.memref_ptr(ref)), arith.muli(row, integer(2 * ptx.SLAB)))
        second = arith.divui(matrix_of_lane, integer(2))  # lanes 16 to 31 give the addresses of the second 8 columns
        words, kind = [], llvm.StructType.get_literal([i32()] * 4)
        for group in range(0, columns // 8, 2):
            chunk = arith.xori(arith.addi(second, integer(group % 8)), in_group)
            slab_start = (group // 8) * rows * 2 * ptx.SLAB
            address = arith.addi(arith.addi(base, integer(slab_start)), arith.muli(chunk, integer(16)))
            text = "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {$0, $1, $2, $3}, [$4];"
            four = llvm.inline_asm(kind, [address], text, "=r,=r,=r,=r,r", has_side_effects=True)
            words += [llvm.extractvalue(i32(), four, [i]) for i in range(4)]
        return ptx.from_pairs(words, ir.MemRefType(ref.type).element_type)

    return load(ref)


# --- arrays in HBM, element by element --------------------------------------------------------------------------------


def ld_global(
    ref, batch, head, row, column, width: int, *, diagonal_origin: int | None = None, transposed: bool = False
) -> jax.Array:
    """Rows `[row, row + 64)` and columns `[column, column + width)` of an array that broadcasts to `[B, N, T, S]`; or
    `transposed`, rows `[row, row + width)` as columns and columns `[column, column + 64)` as rows.

    Indices past the array's edges are moved back inside; axes of length 1 are broadcast, and read once. With
    `diagonal_origin` the array is `[B or 1, N or 1, L]` and element (t, s) reads entry `s − t + diagonal_origin`.
    Floating-point arrays arrive as float32, integers as int32.
    """
    diagonal = diagonal_origin is not None
    shape = (ptx.TILE_ROWS, width)
    dtype = jnp.float32 if jnp.issubdtype(ref.dtype, jnp.floating) else jnp.int32
    if interpreting():
        plane = ref[jnp.minimum(batch, ref.shape[0] - 1), jnp.minimum(head, ref.shape[1] - 1)].astype(dtype)
        down, right = (jnp.arange(n, dtype=jnp.int32) for n in shape)
        if transposed:
            rows, columns = row + right, (column + down)[:, None]
        else:
            rows, columns = (row + down)[:, None], column + right
        if diagonal:
            return plane[jnp.clip(columns - rows + diagonal_origin, 0, plane.shape[0] - 1)]
        rows, columns = (jnp.clip(i, 0, n - 1) for i, n in zip((rows, columns), plane.shape, strict=True))
        return jnp.broadcast_to(plane[rows, columns], shape)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), SCALAR, SCALAR, SCALAR, SCALAR),
        return_type=plgpu.ShapeDtypeStruct(shape, dtype, layout=WGMMA),
    )
    def load(_, ref, *indices):
        batch, head, row, column = (x.registers[()] for x in indices)
        down, right = ptx.lane_position()
        row, column = (
            arith.addi(first, mine)
            for first, mine in zip((row, column), (right, down) if transposed else (down, right), strict=True)
        )
        plane, element = _plane(ref, batch, head), ir.MemRefType(ref.type).element_type
        sizes = ir.MemRefType(ref.type).shape[2:]
        cache = {}

        def value(i):
            place = 8 * ptx.row_of(i), ptx.column_of(i)  # from the thread's first element
            place = place[::-1] if transposed else place
            key = place if diagonal else tuple(p if n > 1 else 0 for p, n in zip(place, sizes, strict=True))
            if key not in cache:
                r, c = arith.addi(row, integer(key[0])), arith.addi(column, integer(key[1]))
                if diagonal:
                    index = _clipped(arith.addi(arith.subi(c, r), integer(diagonal_origin)), sizes[0])
                    cache[key] = _load(plane, element, _wide(index))
                else:
                    offset = arith.muli(_wide(_clipped(r, sizes[0])), _int64(sizes[1]))
                    cache[key] = _load(plane, element, arith.addi(offset, _wide(_clipped(c, sizes[1]))))
            return cache[key]

        return ptx.from_scalars([value(i) for i in range(width // 2)], signed=True if dtype == jnp.int32 else None)

    return load(ref, *(jnp.asarray(x, jnp.int32) for x in (batch, head, row, column)))


def ld_global_at(ref, batch, head, rows: jax.Array, columns: jax.Array) -> jax.Array:
    """Elements (rows, columns), int32 `[64, n]` each, of an int8 array that broadcasts to `[B, N, ·, ·]`, as int32."""
    if interpreting():
        plane = ref[jnp.minimum(batch, ref.shape[0] - 1), jnp.minimum(head, ref.shape[1] - 1)].astype(jnp.int32)
        return plane[tuple(jnp.clip(i, 0, n - 1) for i, n in zip((rows, columns), plane.shape, strict=True))]

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), SCALAR, SCALAR, WGMMA, WGMMA),
        return_type=plgpu.ShapeDtypeStruct(rows.shape, jnp.int32, layout=WGMMA),
    )
    def load(_, ref, batch, head, rows, columns):
        plane, element = _plane(ref, batch.registers[()], head.registers[()]), ir.MemRefType(ref.type).element_type
        sizes = ir.MemRefType(ref.type).shape[2:]

        def value(r, c):
            offset = arith.muli(_wide(_clipped(r, sizes[0])), _int64(sizes[1]))
            return _load(plane, element, arith.addi(offset, _wide(_clipped(c, sizes[1]))))

        places = zip(ptx.scalars(rows), ptx.scalars(columns), strict=True)
        return ptx.from_scalars([value(r, c) for r, c in places], signed=True)

    return load(ref, jnp.asarray(batch, jnp.int32), jnp.asarray(head, jnp.int32), rows, columns)


def ld_global_rows(ref, batch, row) -> jax.Array:
    """Entries `[row, row + 64)` of the int32 array `[B or 1, n]`, one a row of a tile; they lie inside the array."""
    batch = jnp.minimum(batch, ref.shape[0] - 1)
    if interpreting():
        return ref[batch, pl.ds(row, ptx.TILE_ROWS)]

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), SCALAR, SCALAR, ptx.ROW), return_type=ptx.row_type(jnp.int32))
    def load(_, ref, batch, row, numbers):
        start = arith.muli(_wide(batch.registers[()]), _int64(ir.MemRefType(ref.type).shape[1]))
        start = arith.addi(start, _wide(row.registers[()]))
        base = utils.memref_ptr(ref)
        values = [_load(base, i32(), arith.addi(start, _wide(i))) for i in ptx.scalars(numbers)]
        return ptx.rows_from_scalars(values, numbers, signed=True)

    return load(ref, jnp.asarray(batch, jnp.int32), jnp.asarray(row, jnp.int32), ptx.row_numbers())


def st_global(ref, start, value: jax.Array, rows, column=None) -> None:
    """Stores the first `rows` rows of `value [64, n]` to `ref [B, T, N, H]`, row r at `(batch, row + r, head)`.

    Args:
        ref: in HBM, of the value's dtype (float32 or 16 bits).
        start: (batch, row, head), int32 ptx.scalars.
        rows: int32 scalar of any value.
        column: the first column, an int32 scalar and a multiple of 32; what lies past H is left out. None: n is H.
    """
    if interpreting():
        batch, row, head = start
        if column is None:
            _for_rows(rows, lambda r: ref.at[batch, row + r, head].__setitem__(..., value[r]))
        else:
            store = lambda r, mine, x: ref.__setitem__((batch, row + r, head, mine), x)  # noqa: E731
            _for_columns(rows, column, ref.shape[3], value, store)
        return
    wide, cut = value.dtype == jnp.float32, column is not None

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), SCALAR, SCALAR, SCALAR, SCALAR, SCALAR, WGMMA))
    def store(_, ref, batch, row, head, rows, column, value):
        kind = ir.MemRefType(ref.type)
        first_row, first_column = ptx.lane_position()
        base, words = utils.memref_ptr(ref), ptx.scalars(value) if wide else ptx.pairs(value)
        for i in range(2):
            index = arith.addi(first_row, integer(8 * i))
            inside = arith.cmpi(arith.CmpIPredicate.slt, index, rows.registers[()])
            at = _flat(kind, (batch.registers[()], arith.addi(row.registers[()], index), head.registers[()]))
            mine = arith.addi(first_column, column.registers[()])
            pointer = _element_pointer(base, kind.element_type, arith.addi(at, _wide(mine)))
            for group in range(value.shape[1] // 8):
                if cut:
                    last = arith.addi(mine, integer(8 * group))
                    exists = arith.cmpi(arith.CmpIPredicate.slt, last, integer(kind.shape[3]))
                    exists = arith.andi(inside, exists)
                words_of_group = words[4 * group + 2 * i :][:2] if wide else words[2 * group + i :][:1]
                _store_if(exists if cut else inside, pointer, 8 * group * (4 if wide else 2), words_of_group)

    store(ref, *(jnp.asarray(x, jnp.int32) for x in (*start, rows, 0 if column is None else column)), value)


def reduce_add(ref, start, smem, value: jax.Array, adder) -> None:
    """Adds float32 `value [64, n]`, n 32 or 64, to `ref [B, T, N, H]`, through `smem [2, 64, 32]`
    (`cp.reduce.async.bulk.tensor`).

    Args:
        ref: float32 in HBM.
        start: (batch, row, head, column), int32 scalars; row r goes to row + r, and the column is a multiple of n.
            What lies past T or H is left out.
        smem: what an addition before this one still reads of it is waited for.
        adder: who adds. The emulation, which has no atomic additions, takes a `ref [adders, B, T, N, H]`, and whoever
            launches it adds those up.
    """
    batch, row, head, column = start
    if interpreting():
        _emulated_add(ref.at[adder], start, value)
        return
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    st_shared(value, smem)
    plgpu.commit_smem()
    rows = ref.at[batch, pl.ds(row, ptx.TILE_ROWS), head]
    for i in range(value.shape[1] // FLOAT_SLAB):
        part = rows.at[:, pl.ds(column + i * FLOAT_SLAB, FLOAT_SLAB)]
        plgpu.copy_smem_to_gmem(smem.at[i], part, reduction_op="add", commit_group=False)
    plgpu.commit_smem_to_gmem_group()


def _emulated_add(ref, start, value):
    (_, length, _, width), (batch, row, head, column) = ref.shape, start
    add = lambda r, mine, x: ref.__setitem__((batch, row + r, head, mine), ref[batch, row + r, head, mine] + x)  # noqa: E731
    _for_columns(length - row, column, width, value, add)


def _for_columns(rows, column, width, value, function):
    """`function(r, columns, value of the row there)` for the rows r of a tile below `rows`, in interpret mode, and
    columns that exist from the traced multiple of 32 `column` on."""

    def one_row(r):
        for first in range(0, width, FLOAT_SLAB):
            mine = slice(first, min(first + value.shape[1], width))
            pl.when(column == first)(lambda mine=mine: function(r, mine, value[r, : mine.stop - mine.start]))

    _for_rows(rows, one_row)


def peek(ref, entry) -> jax.Array:
    """An entry of int32 `ref [n]` in HBM that others change meanwhile (`ld.relaxed.gpu`), for `await_count`."""
    if interpreting():
        return jnp.int32(0)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), SCALAR), return_type=ptx.scalar_type())
    def load(_, ref, entry):
        text = "ld.relaxed.gpu.global.b32 $0, [$1];"
        return ptx.scalar_array(llvm.inline_asm(i32(), [_counter(ref, entry)], text, "=r,l", has_side_effects=True))

    return load(ref, entry)


def await_count(ref, entry, count, seen) -> None:
    """Waits, by one thread of the warpgroup, until an entry of int32 `ref [n]` in HBM has reached `count`, unless it
    had when it was `seen` (`peek`); a barrier must follow. There is no fence: what is counted was added in L2, and what
    is added to it next begins after the count was seen. Emulated additions take place at once and in any order, so that
    there is nothing to wait for."""
    if interpreting():
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), SCALAR, SCALAR, SCALAR))
    def wait(_, ref, *scalars):
        entry, count, seen = scalars
        text = "{ .reg .pred p; .reg .b32 v; setp.ne.u32 p, $3, 0; @p bra done; setp.ge.s32 p, $2, $1; @p bra done;"
        text += " again: ld.acquire.gpu.global.b32 v, [$0]; setp.lt.s32 p, v, $1; @p bra again; done: }"
        numbers = [x.registers[()] for x in (count, seen)]
        operands = [_counter(ref, entry), *numbers, arith.remui(ptx.thread_index(), integer(128))]
        llvm.inline_asm(ir.Type.parse("!llvm.void"), operands, text, "l,r,r,r", has_side_effects=True)

    wait(ref, entry, count, seen)


def count_up(ref, entry) -> None:
    """Adds 1 to an entry of int32 `ref [n]` in HBM, by one thread of the warpgroup (`red.relaxed.gpu`).

    What `wait_smem_to_gmem` has waited for is in L2 then, where the other's additions will take place too. A release,
    whose fence waits for all that the thread ever wrote, costs 8 to 20% of a deterministic backward."""
    if interpreting():
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), SCALAR))
    def signal(_, ref, entry):
        text = "{ .reg .pred p; setp.eq.u32 p, $1, 0; @p fence.proxy.async.global;"
        text += " @p red.relaxed.gpu.global.add.s32 [$0], 1; }"
        operands = [_counter(ref, entry), arith.remui(ptx.thread_index(), integer(128))]
        llvm.inline_asm(ir.Type.parse("!llvm.void"), operands, text, "l,r", has_side_effects=True)

    signal(ref, entry)


def _counter(ref, entry):
    pointer = _element_pointer(utils.memref_ptr(ref), ir.MemRefType(ref.type).element_type, entry.registers[()])
    return llvm.ptrtoint(ir.IntegerType.get_signless(64), pointer)


def st_global_rows(ref, start, value: jax.Array, rows) -> None:
    """Stores the first `rows` of `value [64]`, float32 in the ROW layout, to `ref [B, N, ·]` from `start` on, which is
    (batch, head, row)."""
    if interpreting():
        batch, head, row = start
        _for_rows(rows, lambda r: ref.at[batch, head, pl.ds(row + r, 1)].__setitem__(..., value[r][None]))
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), SCALAR, SCALAR, SCALAR, SCALAR, ptx.ROW))
    def store(_, ref, batch, head, row, rows, value):
        kind = ir.MemRefType(ref.type)
        first_row, first_column = ptx.lane_position()
        mine = arith.cmpi(arith.CmpIPredicate.eq, first_column, integer(0))  # of four threads that hold the same rows
        for i, x in enumerate(ptx.scalars(value)):
            index = arith.addi(first_row, integer(8 * i))
            inside = arith.andi(mine, arith.cmpi(arith.CmpIPredicate.slt, index, rows.registers[()]))
            at = _flat(kind, (batch.registers[()], head.registers[()], arith.addi(row.registers[()], index)))
            _store_if(inside, _element_pointer(utils.memref_ptr(ref), kind.element_type, at), 0, [x])

    store(ref, *(jnp.asarray(x, jnp.int32) for x in (*start, rows)), value)


def _for_rows(rows, function):
    """`function(r)` for the rows r of a tile below `rows`, in interpret mode."""
    lax.fori_loop(0, jnp.clip(rows, 0, ptx.TILE_ROWS), lambda r, _: function(r), None)


def _flat(kind, indices):
    """64-bit index of the first element at `indices` of an array of this MemRefType; the last axes may be left out."""
    flat = _int64(0)
    for size, i in zip(kind.shape, indices, strict=False):
        flat = arith.addi(arith.muli(flat, _int64(size)), _wide(i))
    return arith.muli(flat, _int64(int(np.prod(kind.shape[len(indices) :]))))


def _store_if(condition, pointer, offset: int, words: list) -> None:
    """One or two 32-bit words to `pointer + offset` bytes (`st.global`) where the condition (i1) holds."""
    form, listed = ("v2.b32", "{$2, $3}") if len(words) == 2 else ("b32", "$2")
    words = [x if x.type == i32() else arith.bitcast(i32(), x) for x in words]
    text = f"{{ .reg .pred p; setp.ne.b32 p, $1, 0; @p st.global.{form} [$0 + {offset}], {listed}; }}"
    operands = [pointer, arith.extui(i32(), condition), *words]
    llvm.inline_asm(ir.Type.parse("!llvm.void"), operands, text, "l,r" + ",r" * len(words), has_side_effects=True)


def _plane(ref, batch, head):
    """Pointer to the part of `ref [B or 1, N or 1, ...]` that belongs to a batch row and head."""
    kind = ir.MemRefType(ref.type)
    heads, plane = kind.shape[1], int(np.prod(kind.shape[2:]))
    index = arith.muli(_wide(_clipped(batch, kind.shape[0])), _int64(heads))
    index = arith.muli(arith.addi(index, _wide(_clipped(head, heads))), _int64(plane))
    return _element_pointer(utils.memref_ptr(ref), kind.element_type, index)


def _element_pointer(pointer, element, index):
    return utils.getelementptr(pointer, [index], element)


def _load(plane, element, index):
    """One element as float32 or int32."""
    value = llvm.load(element, _element_pointer(plane, element, index))
    if isinstance(element, ir.IntegerType):
        return value if element.width == 32 else arith.extsi(i32(), value)
    return value if element == ir.F32Type.get() else arith.extf(ir.F32Type.get(), value)


def _clipped(index, size: int):
    """An i32 index moved into [0, size)."""
    if size == 1:
        return integer(0)
    return arith.minsi(arith.maxsi(index, integer(0)), integer(size - 1))


def _wide(index):
    return arith.extsi(ir.IntegerType.get_signless(64), index)


def _int64(value: int):
    return arith.constant(ir.IntegerType.get_signless(64), value)

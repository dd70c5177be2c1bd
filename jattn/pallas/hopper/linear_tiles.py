"""What a chunk of 64 tokens needs besides products: numbers a token, tiles transposed on their way, and the inverse of
a unit triangular matrix. As in `memory`, functions have an equivalent in plain jnp for interpret mode.
"""

import jax
import jax.numpy as jnp
from jax import lax

from jattn.pallas._compat import arith, interpreting, ir, llvm, pl, plgpu, utils
from jattn.pallas.hopper import memory, ptx
from jattn.pallas.hopper.ptx import SCALAR, TILE_ROWS, WGMMA, i32, integer

_VOID = "!llvm.void"
PITCH = 72  # floats from one row of an inverse's scratch to the next: pairs of columns of 4 rows meet all banks

# --- numbers of tokens ------------------------------------------------------------------------------------------------


def ld_global_tokens(ref, batch, token, head, rows) -> jax.Array:
    """Entries (batch, token + r, head) of a floating-point array `[B, T, N]` for each row `r < rows`, else 0: float32
    `[64]` in the ROW layout."""
    if interpreting():
        r = jnp.arange(TILE_ROWS, dtype=jnp.int32)
        column = ref[batch, :, head].astype(jnp.float32)
        return jnp.where(r < rows, column[jnp.minimum(token + r, ref.shape[1] - 1)], 0)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), SCALAR, SCALAR, SCALAR, SCALAR, ptx.ROW), return_type=ptx.row_type())
    def load(_, ref, batch, token, head, rows, numbers):
        kind, base = ir.MemRefType(ref.type), utils.memref_ptr(ref)
        batch, token, head, rows = (x.registers[()] for x in (batch, token, head, rows))
        values = []
        for r in ptx.scalars(numbers):
            place = memory._clipped(arith.addi(token, r), kind.shape[1])
            value = memory._load(base, kind.element_type, memory._flat(kind, (batch, place, head)))
            exists = arith.cmpi(arith.CmpIPredicate.slt, r, rows)
            values.append(arith.select(exists, value, ptx.constant(0)))
        return ptx.rows_from_scalars(values, numbers)

    return load(ref, *(jnp.asarray(x, jnp.int32) for x in (batch, token, head, rows)), ptx.row_numbers())


def ld_shared_along_rows(ref) -> jax.Array:
    """float32 `ref [64]` in shared memory as `[64, 64]`, entry c in all of column c (`ld.shared.v2.f32`)."""
    if interpreting():
        value = jnp.broadcast_to(ref[...], (TILE_ROWS, TILE_ROWS))
        plgpu.commit_smem()  # to the emulation a copy into what was read is a race without it
        return value

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=ptx.array_type(TILE_ROWS))
    def load(_, ref):
        _, column = ptx.lane_position()
        base = _offset(llvm.ptrtoint(i32(), utils.memref_ptr(ref)), column, 4)
        return ptx.from_scalars(sum((2 * _ld_shared(base, 32 * g, 2) for g in range(8)), []))

    return load(ref)


def prefix_sums(ref) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Running sums of float32 `ref [64]` in shared memory: `[64]` in the ROW layout, `[64, 64]` with sum c in all of
    column c, and the total."""
    if interpreting():
        ones = jnp.tril(jnp.ones((TILE_ROWS, TILE_ROWS), jnp.float32))
        sums = jnp.dot(ones, ref[...], precision=lax.Precision.HIGHEST)
        return sums, jnp.broadcast_to(sums, (TILE_ROWS, TILE_ROWS)), sums[-1]

    total_type = plgpu.ShapeDtypeStruct((), jnp.float32, layout=SCALAR)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), ptx.ROW), return_type=(ptx.row_type(), ptx.array_type(TILE_ROWS), total_type)
    )
    def add_up(_, ref, numbers):
        lane = arith.remui(ptx.thread_index(), integer(32))
        first, second = _ld_shared(_offset(llvm.ptrtoint(i32(), utils.memref_ptr(ref)), lane, 8), 0, 2)
        total = ptx.add(first, second)
        for step in (1, 2, 4, 8, 16):  # of the sums up to this lane's second number
            below = _shfl("up", total, integer(step), 0)
            has = arith.cmpi(arith.CmpIPredicate.uge, lane, integer(step))
            total = arith.select(has, ptx.add(total, below), total)
        is_first = arith.cmpi(arith.CmpIPredicate.eq, lane, integer(0))
        before = arith.select(is_first, ptx.constant(0), _shfl("up", total, integer(1), 0))
        sums = ptx.add(before, first), total  # never total − second: that a later token would round
        rows = []
        for r in ptx.scalars(numbers):
            even, odd = (_shfl("idx", s, arith.divui(r, integer(2)), 31) for s in sums)
            is_even = arith.cmpi(arith.CmpIPredicate.eq, arith.remui(r, integer(2)), integer(0))
            rows.append(arith.select(is_even, even, odd))
        mine = arith.remui(lane, integer(4))
        columns = []
        for g in range(8):
            source = arith.addi(mine, integer(4 * g))
            columns += 2 * [_shfl("idx", s, source, 31) for s in sums]
        last = _shfl("idx", total, integer(31), 31)
        splat = ptx.fragmented_array.FragmentedArray.splat(last, ())
        return ptx.rows_from_scalars(rows, numbers), ptx.from_scalars(columns), splat

    return add_up(ref, ptx.row_numbers())


def _shfl(mode: str, x, b, clamp: int):
    """`shfl.sync`."""
    text = f"shfl.sync.{mode}.b32 $0, $1, $2, {clamp}, -1;"
    return llvm.inline_asm(ir.F32Type.get(), [x, b], text, "=f,f,r", has_side_effects=True)


def _offset(base, index, size: int):
    return arith.addi(base, arith.muli(index, integer(size)))


def _ld_shared(address, offset: int, count: int) -> list:
    """`count` (2 or 4) floats at `address + offset` (`ld.shared`)."""
    kind = llvm.StructType.get_literal([ir.F32Type.get()] * count)
    names = ", ".join(f"${i}" for i in range(count))
    text = f"ld.shared.v{count}.f32 {{{names}}}, [${count} + {offset}];"
    found = llvm.inline_asm(kind, [address], text, "=f," * count + "r", has_side_effects=True)
    return [llvm.extractvalue(ir.F32Type.get(), found, [i]) for i in range(count)]


def _st_shared(address, offset: int, values: list) -> None:
    """One or two floats to `address + offset` (`st.shared`)."""
    form, listed = ("v2.f32", "{$1, $2}") if len(values) == 2 else ("f32", "$1")
    text = f"st.shared.{form} [$0 + {offset}], {listed};"
    llvm.inline_asm(ir.Type.parse(_VOID), [address, *values], text, "r" + ",f" * len(values), has_side_effects=True)


# --- tiles, transposed ------------------------------------------------------------------------------------------------


def ldmatrix_trans(ref) -> jax.Array:
    """16-bit `ref [1, 64, 64]`, transposed, in the WGMMA layout (`ldmatrix.trans`)."""
    if interpreting():
        value = ref[0].T
        plgpu.commit_smem()  # to the emulation a copy into what was read is a race without it
        return value
    dtype = ref.dtype

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(ptx.TRANSFORMS),),
        return_type=plgpu.ShapeDtypeStruct((TILE_ROWS, TILE_ROWS), dtype, layout=WGMMA),
    )
    def load(_, ref):
        words, kind = [], llvm.StructType.get_literal([i32()] * 4)
        for address in _transposed_addresses(ref):
            text = "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {$0, $1, $2, $3}, [$4];"
            four = llvm.inline_asm(kind, [address], text, "=r,=r,=r,=r,r", has_side_effects=True)
            words += [llvm.extractvalue(i32(), four, [i]) for i in range(4)]
        return ptx.from_pairs(words, ir.MemRefType(ref.type).element_type)

    return load(ref)


def stmatrix_trans(array, ref) -> None:
    """Stores a 16-bit `[64, 64]` array, transposed, to `ref [1, 64, 64]` (`stmatrix.trans`)."""
    if interpreting():
        ref[0] = array.T
        return

    @plgpu.inline_mgpu(arg_types=(WGMMA, plgpu.RefType(ptx.TRANSFORMS)))
    def store(_, array, ref):
        words = ptx.pairs(array)
        for i, address in enumerate(_transposed_addresses(ref)):
            text = "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [$0], {$1, $2, $3, $4};"
            operands = [address, *words[4 * i : 4 * i + 4]]
            llvm.inline_asm(ir.Type.parse(_VOID), operands, text, "r,r,r,r,r", has_side_effects=True)

    store(array, ref)


def _transposed_addresses(ref) -> list:
    """What each lane contributes to four instructions: of four 8 × 8 matrices, rows and then columns of the array, the
    place of one row in memory. Two matrices are 8 columns of the array, which are rows of `ref`."""
    thread = ptx.thread_index()
    lane, warp = arith.remui(thread, integer(32)), arith.remui(arith.divui(thread, integer(32)), integer(4))
    in_matrix, matrix = arith.remui(lane, integer(8)), arith.divui(lane, integer(8))
    row = arith.addi(arith.muli(arith.divui(matrix, integer(2)), integer(8)), in_matrix)
    chunk = arith.addi(arith.muli(warp, integer(2)), arith.remui(matrix, integer(2)))
    inside = arith.muli(arith.xori(chunk, in_matrix), integer(16))
    base = arith.addi(llvm.ptrtoint(i32(), utils.memref_ptr(ref)), inside)
    return [_offset(base, arith.addi(row, integer(16 * i)), 2 * ptx.SLAB) for i in range(4)]


def st_global_transposed(ref, index, column, value: jax.Array) -> None:
    """Stores `value [64, n]`, float32 in the WGMMA layout, to `ref [X, n, D]`: element (r, c) to (index, c,
    column + r)."""
    if interpreting():
        ref[index, :, pl.ds(column, TILE_ROWS)] = value.T
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), SCALAR, SCALAR, WGMMA))
    def store(_, ref, index, column, value):
        kind, base = ir.MemRefType(ref.type), utils.memref_ptr(ref)
        first_row, first_column = ptx.lane_position()
        mine = arith.addi(column.registers[()], first_row)
        always = arith.constant(ir.IntegerType.get_signless(1), 1)
        start = memory._flat(kind, (index.registers[()], first_column))
        pointer = memory._element_pointer(base, kind.element_type, arith.addi(start, memory._wide(mine)))
        for i, x in enumerate(ptx.scalars(value)):
            place = ptx.column_of(i) * kind.shape[2] + 8 * ptx.row_of(i)
            memory._store_if(always, pointer, 4 * place, [x])

    store(ref, jnp.asarray(index, jnp.int32), jnp.asarray(column, jnp.int32), value)


# --- the inverse ------------------------------------------------------------------------------------------------------


def unit_lower_inverse(lower, scratch) -> jax.Array:
    """`(I + lower)⁻¹` for strictly lower `lower [64, 64]`, float32 in the WGMMA layout, by substitution in float32.

    Two threads have a column of the inverse, x: x_i = δ_ic − Σ_j lower_ij x_j. One holds entries 8m to 8m + 3 of it and
    sums over these j, the other 8m + 4 to 8m + 7; both then know x_i. Powers of `lower`, which a series takes, explode
    where keys repeat.

    Args:
        scratch: float32 `[64, PITCH]` in shared memory, that nobody else reads or writes meanwhile.
    """
    if interpreting():
        eye = jnp.eye(TILE_ROWS, dtype=jnp.float32)

        def row(i, inverse):
            new = eye[i] - jnp.dot(lower[i], inverse, precision=lax.Precision.HIGHEST)
            return jnp.where(jnp.arange(TILE_ROWS, dtype=jnp.int32)[:, None] == i, new, inverse)

        return lax.fori_loop(0, TILE_ROWS, row, jnp.zeros_like(eye))

    @plgpu.inline_mgpu(arg_types=(WGMMA, plgpu.RefType()), return_type=ptx.array_type(TILE_ROWS))
    def invert(_, lower, scratch):
        start = llvm.ptrtoint(i32(), utils.memref_ptr(scratch))
        row, column = ptx.lane_position()
        tile = _offset(_offset(start, row, 4 * PITCH), column, 4)
        words = ptx.scalars(lower)
        for i in range(0, len(words), 2):
            _st_shared(tile, 4 * (8 * ptx.row_of(i) * PITCH + ptx.column_of(i)), words[i : i + 2])
        utils.warpgroup_barrier()
        thread = arith.remui(ptx.thread_index(), integer(128))
        mine, half = arith.divui(thread, integer(2)), arith.remui(thread, integer(2))
        entries = _substitute(_offset(start, half, 16), mine, half)
        utils.warpgroup_barrier()
        place = _offset(_offset(start, half, 16 * PITCH), mine, 4)
        for i, entry in enumerate(entries):
            _st_shared(place, 4 * PITCH * (8 * (i // 4) + i % 4), [entry])
        utils.warpgroup_barrier()
        found = []
        for i in range(0, len(words), 2):
            found += _ld_shared(tile, 4 * (8 * ptx.row_of(i) * PITCH + ptx.column_of(i)), 2)
        return ptx.from_scalars(found)

    return invert(lower, scratch)


def _substitute(start, column, half) -> list:
    """This thread's 32 entries of its column; `start` is where its 4 of the first 8 columns of the matrix lie."""
    zero, entries = ptx.constant(0), [ptx.constant(0)] * (TILE_ROWS // 2)
    is_half = [arith.cmpi(arith.CmpIPredicate.eq, half, integer(h)) for h in range(2)]
    for i in range(TILE_ROWS):
        eight, rest = divmod(i, 8)
        sums = [zero] * 4
        for m in range(eight + (rest > 0)):
            four = _ld_shared(start, 4 * (i * PITCH + 8 * m), 4)
            for j in range(4 if m < eight else min(4, rest)):
                sums[j] = ptx.fma(four[j], entries[4 * m + j], sums[j])
        total = ptx.add(ptx.add(sums[0], sums[1]), ptx.add(sums[2], sums[3]))
        total = ptx.add(total, ptx.shfl_bfly(total, 1))
        unit = arith.select(arith.cmpi(arith.CmpIPredicate.eq, column, integer(i)), ptx.constant(1), zero)
        at = 4 * eight + rest % 4
        entries[at] = arith.select(is_half[rest // 4], ptx.sub(unit, total), entries[at])
    return entries

"""What a chunk of 64 tokens needs besides products: numbers a token, and tiles transposed on their way. As in `memory`,
functions have an equivalent in plain jnp for interpret mode.
"""

import jax
import jax.numpy as jnp
from jax import lax

from jattn.pallas._compat import arith, interpreting, ir, llvm, pl, plgpu, utils
from jattn.pallas.hopper import memory, ptx
from jattn.pallas.hopper.ptx import SCALAR, TILE_ROWS, WGMMA, i32, integer

_VOID = "!llvm.void"

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
    """float32 `ref [n]` in shared memory as `[64, n]`, entry c in all of column c (`ld.shared.v2.f32`)."""
    columns = ref.shape[0]
    if interpreting():
        value = jnp.broadcast_to(ref[...], (TILE_ROWS, columns))
        plgpu.commit_smem()  # to the emulation a copy into what was read is a race without it
        return value

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=ptx.array_type(columns))
    def load(_, ref):
        _, column = ptx.lane_position()
        base = _offset(llvm.ptrtoint(i32(), utils.memref_ptr(ref)), column, 4)
        return ptx.from_scalars(sum((2 * _ld_shared(base, 32 * g, 2) for g in range(columns // 8)), []))

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


def ld_global_tile(ref, index, row, column, width: int, *, transposed: bool = False) -> jax.Array:
    """Rows `[row, row + 64)` and columns `[column, column + width)` of matrix `index` of float32 `ref [X, n, m]`; or
    `transposed`, rows `[row, row + width)` as columns and columns `[column, column + 64)` as rows. All of it exists,
    which is what this knows and `memory.ld_global` does not: an element is one instruction."""
    if interpreting():
        sizes = (width, TILE_ROWS) if transposed else (TILE_ROWS, width)
        value = ref[index, pl.ds(row, sizes[0]), pl.ds(column, sizes[1])]
        return value.T if transposed else value

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), SCALAR, SCALAR, SCALAR), return_type=ptx.array_type(width))
    def load(_, ref, *scalars):
        kind, base = ir.MemRefType(ref.type), utils.memref_ptr(ref)
        index, row, column = (x.registers[()] for x in scalars)
        down, right = ptx.lane_position()
        down, right = (right, down) if transposed else (down, right)
        start = memory._flat(kind, (index, arith.addi(row, down)))
        start = arith.addi(start, memory._wide(arith.addi(column, right)))
        pointer, values = memory._element_pointer(base, kind.element_type, start), []
        for i in range(width // 2):
            down, right = 8 * ptx.row_of(i), ptx.column_of(i)
            down, right = (right, down) if transposed else (down, right)
            values.append(memory._load(pointer, kind.element_type, memory._int64(down * kind.shape[2] + right)))
        return ptx.from_scalars(values)

    return load(ref, *(jnp.asarray(x, jnp.int32) for x in (index, row, column)))


# --- numbers of a tile ------------------------------------------------------------------------------------------------


def split(x) -> tuple[jax.Array, jax.Array]:
    """float32 x as the sum of two of bfloat16, the first of them its upper 16 bits."""
    if interpreting():
        high = lax.bitcast_convert_type(x, jnp.int32) & -65536
        high = lax.bitcast_convert_type(high, jnp.float32)
        return high.astype(jnp.bfloat16), (x - high).astype(jnp.bfloat16)
    narrow = plgpu.ShapeDtypeStruct(x.shape, jnp.bfloat16, layout=WGMMA)

    @plgpu.inline_mgpu(arg_types=(WGMMA,), return_type=(narrow, narrow))
    def cut(_, x):
        bits = [arith.bitcast(i32(), value) for value in ptx.scalars(x)]
        highs, lows = [], []
        for even, odd in zip(bits[::2], bits[1::2], strict=True):
            highs.append(llvm.inline_asm(i32(), [even, odd], "prmt.b32 $0, $1, $2, 0x7632;", "=r,r,r"))
            rests = []
            for word in (even, odd):
                upper = arith.bitcast(ir.F32Type.get(), arith.andi(word, integer(0xFFFF0000)))
                rests.append(ptx.sub(arith.bitcast(ir.F32Type.get(), word), upper))
            lows.append(llvm.inline_asm(i32(), rests, "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f"))
        return tuple(ptx.from_pairs(words, ir.BF16Type.get()) for words in (highs, lows))

    return cut(x)


def diagonal(x) -> jax.Array:
    """The diagonal of float32 `[64, 64]` in the WGMMA layout, `[64]` in the ROW layout."""
    if interpreting():
        return jnp.diagonal(x)

    @plgpu.inline_mgpu(arg_types=(WGMMA, ptx.ROW), return_type=ptx.row_type())
    def take(_, x, numbers):
        words, rows = ptx.scalars(x), ptx.scalars(numbers)
        warp = arith.divui(rows[0], integer(16))  # has columns 16 · warp and the 15 after them of its rows
        inside = arith.remui(rows[0], integer(8))
        is_odd = arith.cmpi(arith.CmpIPredicate.ne, arith.remui(inside, integer(2)), integer(0))
        lane = arith.remui(ptx.thread_index(), integer(32))
        holder = arith.addi(arith.andi(lane, integer(28)), arith.divui(inside, integer(2)))
        values = []
        for i in range(2):  # the thread's first and second row
            pairs = [words[4 * (2 * w + i) + 2 * i :][:2] for w in range(4)]
            mine = pairs[0]
            for w in range(1, 4):
                is_warp = arith.cmpi(arith.CmpIPredicate.eq, warp, integer(w))
                mine = [arith.select(is_warp, new, old) for new, old in zip(pairs[w], mine, strict=True)]
            even, odd = (_shfl("idx", value, holder, 31) for value in mine)
            values.append(arith.select(is_odd, odd, even))
        return ptx.rows_from_scalars(values, numbers)

    return take(x, ptx.row_numbers())


# --- products ---------------------------------------------------------------------------------------------------------


def wgmma_rs_nn(a, b) -> jax.Array:
    """`a @ b` for 16-bit `a [64, b.rows]` in registers and `b` along rows, in flight: `ptx.wgmma_rs` onto nothing."""
    if interpreting():
        return jnp.dot(a, b.read(), preferred_element_type=jnp.float32)
    dtype = a.dtype

    @plgpu.inline_mgpu(arg_types=(WGMMA, SCALAR), return_type=ptx.array_type(b.columns))
    def issue(_, a, b_word):
        a = ptx.fragmented_array.optimization_barrier(a)
        return ptx._mma_async(
            n=b.columns, dtype=dtype, accumulator=None, a_registers=ptx.pairs(a), b_word=b_word.registers[()],
            steps=[(None, o) for o in b.offsets_along_rows()], b_along_rows=True,
        )  # fmt: skip

    return issue(a, b.word)


def wgmma(form: str, a, b, dtype, accumulator=None) -> jax.Array:
    """Of matrices in shared memory (`ptx.Matrix`), float32 `[64, n]` in flight: `accumulator` (None: 0) plus a @ b
    ("nn", b along rows), a @ b.T ("nt") or a.T @ b ("tn": b along rows, a of 64 columns)."""
    a_dim, b_dim = int(form[0] == "n"), int(form[1] == "t")
    if interpreting():
        product = lax.dot_general(
            a.read(), b.read(), (((a_dim,), (b_dim,)), ((), ())), preferred_element_type=jnp.float32
        )
        return product if accumulator is None else accumulator + product
    onto, n = [] if accumulator is None else [accumulator], b.rows if b_dim else b.columns
    steps = list(
        zip(
            a.offsets_along_columns() if a_dim else a.offsets_along_rows(),
            b.offsets_along_columns() if b_dim else b.offsets_along_rows(),
            strict=True,
        )
    )

    @plgpu.inline_mgpu(arg_types=(SCALAR, SCALAR, *[WGMMA] * len(onto)), return_type=ptx.array_type(n))
    def issue(_, a_word, b_word, *onto):
        if onto:
            onto = [ptx.fragmented_array.optimization_barrier(onto[0].to_layout(_ACCUMULATOR))]
        return ptx._mma_async(
            n=n, dtype=dtype, accumulator=list(onto[0].registers.flat) if onto else None,
            a_word=a_word.registers[()], b_word=b_word.registers[()], steps=steps, a_along_rows=not a_dim,
            b_along_rows=not b_dim,
        )  # fmt: skip

    return issue(a.word, b.word, *onto)


_ACCUMULATOR = ptx.fragmented_array.WGMMA_LAYOUT_ACC_32BIT


def ldmatrix(ref, column, columns: int) -> jax.Array:
    """Columns from `column` on, a multiple of 16, of 16-bit `ref [1, 64, 64]`, `[64, columns]` in the WGMMA layout
    (`ldmatrix`)."""
    if interpreting():
        value = ref[0, :, pl.ds(column, columns)]
        plgpu.commit_smem()  # to the emulation a copy into what was read is a race without it
        return value
    dtype = ref.dtype

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(ptx.TRANSFORMS), SCALAR),
        return_type=plgpu.ShapeDtypeStruct((TILE_ROWS, columns), dtype, layout=WGMMA),
    )
    def load(_, ref, column):
        thread = ptx.thread_index()
        lane, warp = arith.remui(thread, integer(32)), arith.remui(arith.divui(thread, integer(32)), integer(4))
        in_group, matrix = arith.remui(lane, integer(8)), arith.divui(lane, integer(8))
        row = arith.addi(arith.muli(arith.remui(matrix, integer(2)), integer(8)), in_group)
        base = _offset(llvm.ptrtoint(i32(), utils.memref_ptr(ref)), row, 2 * ptx.SLAB)
        base = _offset(base, warp, 16 * 2 * ptx.SLAB)
        second = arith.addi(arith.divui(matrix, integer(2)), arith.divui(column.registers[()], integer(8)))
        words, kind = [], llvm.StructType.get_literal([i32()] * 4)
        for group in range(0, columns // 8, 2):
            address = _offset(base, arith.xori(arith.addi(second, integer(group)), in_group), 16)
            text = "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {$0, $1, $2, $3}, [$4];"
            four = llvm.inline_asm(kind, [address], text, "=r,=r,=r,=r,r", has_side_effects=True)
            words += [llvm.extractvalue(i32(), four, [i]) for i in range(4)]
        return ptx.from_pairs(words, ir.MemRefType(ref.type).element_type)

    return load(ref, jnp.asarray(column, jnp.int32))


def ld_shared_rows(ref) -> jax.Array:
    """float32 `ref [64]` in shared memory in the ROW layout."""
    if interpreting():
        value = ref[...]
        plgpu.commit_smem()  # to the emulation a copy into what was read is a race without it
        return value
    return plgpu.load(ref, layout=ptx.ROW)


def st_global_tokens(ref, batch, token, head, value, rows) -> None:
    """Stores the first `rows` of float32 `value [64]`, in the ROW layout, to entries (batch, token + r, head) of
    float32 `ref [B, T, N]`."""
    if interpreting():
        memory._for_rows(rows, lambda r: ref.__setitem__((batch, token + r, pl.ds(head, 1)), value[r][None]))
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), SCALAR, SCALAR, SCALAR, SCALAR, ptx.ROW))
    def store(_, ref, *operands):
        batch, token, head, rows = (x.registers[()] for x in operands[:4])
        kind, base = ir.MemRefType(ref.type), utils.memref_ptr(ref)
        first_row, first_column = ptx.lane_position()
        mine = arith.cmpi(arith.CmpIPredicate.eq, first_column, integer(0))  # of four threads that hold the same rows
        for i, x in enumerate(ptx.scalars(operands[4])):
            row = arith.addi(first_row, integer(8 * i))
            inside = arith.andi(mine, arith.cmpi(arith.CmpIPredicate.slt, row, rows))
            at = memory._flat(kind, (batch, arith.addi(token, row), head))
            memory._store_if(inside, memory._element_pointer(base, kind.element_type, at), 0, [x])

    store(ref, *(jnp.asarray(x, jnp.int32) for x in (batch, token, head, rows)), value)

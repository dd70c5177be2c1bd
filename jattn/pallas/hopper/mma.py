"""Products of a few queries with int8 or fp8 (e4m3) matrices in shared memory, on `mma.sync` (m16n8k16, bfloat16).

Each warp of a warpgroup has 16 of a block's 64 keys and makes the left operand, keys or transposed values, in
registers: both formats fit into bfloat16 exactly. Queries are the columns, 8 to a product:

    s [keys, queries] = K · Qᵀ          o [channels, queries] += Vᵀ · p         o is over the warp's own keys

8-bit matrices are `[slabs, 64, 128]`, swizzled rows of 128 bytes. `ldmatrix` gives a thread 4 neighbouring channels of
a key, a permutation of what the product wants that the query's operand repeats; with `.trans`, 2 channels of 2 keys.

Scores are ordinary arrays in the WGMMA layout. What else stays in registers between these functions is, to Pallas, a
tile `[64, 2 · registers]` in that layout, and in interpret mode an array of the shape that its maker names.
"""

import functools

import jax.numpy as jnp

from jattn.pallas._compat import arith, interpreting, ir, llvm, pl, plgpu, utils
from jattn.pallas.hopper import decode_rows, memory, ptx
from jattn.pallas.hopper.ptx import SCALAR, WGMMA, i32, integer

FORMATS = ("int8", "float8_e4m3fn")
WARPS, KEYS = 4, 16  # of a warpgroup; of a warp
QUERIES = 8  # columns of one product
CHUNK = 16  # channels of a step along them: 16 bytes of a row
ROW_BYTES = 128
PADDING = 4  # columns of `parts`, against bank conflicts


# --- the left operands ------------------------------------------------------------------------------------------------


def _ld_chunks(ref, columns: int, *, transposed: bool):
    """For each chunk of 16 columns of 8-bit `ref [slabs, 64, 128]`, two words of the warp's 16 rows (`ldmatrix`): of
    rows 0 to 7 and of rows 8 to 15."""
    thread = ptx.thread_index()
    lane, warp = arith.remui(thread, integer(32)), arith.remui(arith.divui(thread, integer(32)), integer(4))
    in_group, matrix_of_lane = arith.remui(lane, integer(8)), arith.divui(lane, integer(8))
    row = arith.addi(in_group, arith.muli(arith.remui(matrix_of_lane, integer(2)), integer(8)))
    row = arith.addi(row, arith.muli(warp, integer(KEYS)))
    base = arith.addi(llvm.ptrtoint(i32(), utils.memref_ptr(ref)), arith.muli(row, integer(ROW_BYTES)))
    second = arith.divui(matrix_of_lane, integer(2))  # lanes 16 to 31 give the addresses of the second chunk
    kind, form = llvm.StructType.get_literal([i32()] * 4), ".trans" if transposed else ""
    in_slab = ROW_BYTES // CHUNK
    for chunk in range(0, columns // CHUNK, 2):
        place = arith.xori(arith.addi(second, integer(chunk % in_slab)), in_group)
        address = arith.addi(base, integer(chunk // in_slab * ptx.TILE_ROWS * ROW_BYTES))
        address = arith.addi(address, arith.muli(place, integer(CHUNK)))
        text = f"ldmatrix.sync.aligned.m8n8.x4{form}.shared.b16 {{$0, $1, $2, $3}}, [$4];"
        four = llvm.inline_asm(kind, [address], text, "=r,=r,=r,=r,r", has_side_effects=True)
        words = [llvm.extractvalue(i32(), four, [i]) for i in range(4)]
        yield words[:2]
        if (chunk + 1) * CHUNK < columns:
            yield words[2:]


def _from_int8(exponents, word, neighbours: bool) -> list:
    """Two words of bfloat16: of bytes 0, 1 and 2, 3 if `neighbours`, else of bytes 0, 2 and 1, 3.

    0x43xx with 7 bits as its mantissa is 128 plus these; less 128, or 256 for a set sign. `exponents` is 0x43434343."""
    results = []
    for select in ("0x4140", "0x4342") if neighbours else ("0x4240", "0x4341"):
        text = f"{{ .reg .b32 t, a, b; prmt.b32 t, $1, $2, {select}; and.b32 a, t, 0xff7fff7f;"
        text += " and.b32 b, t, 0xff80ff80; sub.rn.bf16x2 $0, a, b; }"
        results.append(llvm.inline_asm(i32(), [word, exponents], text, "=r,r,r"))
    return results


def _exponents(queries: int):
    """0x43434343, where there is room in a register, which ptxas must not know: of two constants of `prmt` it has that
    one immediate and moves the other from a uniform register each time, 56 instructions of 492 a block."""
    if queries > 16:
        return integer(0x43434343)
    return arith.addi(arith.shrui(ptx.thread_index(), integer(16)), integer(0x43434343))


def _from_e4m3(word, neighbours: bool) -> list:
    """As `_from_int8`, by way of float16 and float32, which hold e4m3 and its NaN too."""
    text = "{ .reg .b16 x, y, h<4>; .reg .b32 w, a, b; .reg .f32 f<4>;"
    text += " mov.b32 w, $2;" if neighbours else " prmt.b32 w, $2, 0, 0x3120;"
    text += " mov.b32 {x, y}, w; cvt.rn.f16x2.e4m3x2 a, x; cvt.rn.f16x2.e4m3x2 b, y;"
    text += " mov.b32 {h0, h1}, a; mov.b32 {h2, h3}, b;"
    text += "".join(f" cvt.f32.f16 f{i}, h{i};" for i in range(4))
    text += " cvt.rn.bf16x2.f32 $0, f1, f0; cvt.rn.bf16x2.f32 $1, f3, f2; }"
    both = llvm.inline_asm(llvm.StructType.get_literal([i32()] * 2), [word], text, "=r,=r,r")
    return [llvm.extractvalue(i32(), both, [i]) for i in range(2)]


def _operands(ref, dtype, columns: int, queries: int, *, transposed: bool):
    """The left operand of each chunk, four words of bfloat16: the warp's 16 rows by 16 columns; or `transposed`, the
    chunk's channels, even ones in rows 0 to 7 and odd ones in rows 8 to 15, by the warp's 16 keys."""
    words = functools.partial(_from_int8, _exponents(queries)) if dtype == jnp.int8 else _from_e4m3
    for upper, lower in _ld_chunks(ref, columns, transposed=transposed):
        (a, b), (c, d) = words(upper, not transposed), words(lower, not transposed)
        yield (a, b, c, d) if transposed else (a, c, b, d)


def _mma(accumulator, a, b) -> list:
    """`accumulator + a · b`, four registers (`mma.sync.m16n8k16`)."""
    text = "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9},"
    text += " {$10, $11, $12, $13};"
    kind, constraints = llvm.StructType.get_literal([ir.F32Type.get()] * 4), "=f,=f,=f,=f,r,r,r,r,r,r,0,1,2,3"
    four = llvm.inline_asm(kind, [*a, *b, *accumulator], text, constraints)
    return [llvm.extractvalue(ir.F32Type.get(), four, [i]) for i in range(4)]


# --- products ---------------------------------------------------------------------------------------------------------


def load_queries(ref, columns: int):
    """The right operand of `product`, of bfloat16 `ref [slabs, queries, 64]`, in registers; in interpret mode the
    matrix."""
    queries, chunks = ref.shape[1], columns // CHUNK
    if interpreting():
        return _queries(ref, columns)
    count = _padded(2 * queries // QUERIES * chunks)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(ptx.TRANSFORMS),), return_type=_registers_type(count, jnp.int32))
    def load(_, ref):
        words = sum(_ld_queries(ref, queries, chunks), [])
        words += [integer(0)] * (count - len(words))
        return ptx.from_scalars(words, signed=True)

    return load(ref)


def _ld_queries(ref, queries: int, chunks: int):
    """For each chunk, two words for every 8 queries: a thread has 4 channels of one of them."""
    row, column = _group_and_place()
    base = arith.addi(llvm.ptrtoint(i32(), utils.memref_ptr(ref)), arith.muli(row, integer(ROW_BYTES)))
    # 4 channels are half of one of the two pieces of 16 bytes that a chunk has.
    base = arith.addi(base, arith.muli(arith.remui(column, integer(8)), integer(2)))
    piece, kind = arith.divui(column, integer(8)), llvm.StructType.get_literal([i32()] * 2)
    for chunk in range(chunks):
        place = arith.xori(arith.addi(piece, integer(2 * chunk % 8)), row)
        address, words = arith.addi(base, arith.muli(place, integer(16))), []
        for first in range(0, queries, QUERIES):
            text = f"ld.shared.v2.b32 {{$0, $1}}, [$2 + {(chunk // 4 * queries + first) * ROW_BYTES}];"
            both = llvm.inline_asm(kind, [address], text, "=r,=r,r", has_side_effects=True)
            words += [llvm.extractvalue(i32(), both, [i]) for i in range(2)]
        yield words


def product(keys, columns: int, operand, queries: int):
    """Scores float32 `[64, queries]` of the first columns of 8-bit `keys [slabs, 64, 128]`, one key a row.

    Args:
        operand: what `load_queries` gave, or what it was given: 32 queries find no room in registers.
    """
    dtype, in_registers = keys.dtype, len(operand.shape) == 2
    if interpreting():
        q = operand if in_registers else _queries(operand, columns)
        return jnp.dot(_matrix(keys)[:, :columns], q.astype(jnp.float32).T, preferred_element_type=jnp.float32)
    tiles = queries // QUERIES
    kinds = plgpu.RefType(ptx.TRANSFORMS), WGMMA if in_registers else plgpu.RefType(ptx.TRANSFORMS)

    @plgpu.inline_mgpu(arg_types=kinds, return_type=ptx.array_type(queries))
    def multiply(_, keys, operand):
        if in_registers:
            kept = ptx.scalars(operand)
            right = (kept[2 * tiles * i :][: 2 * tiles] for i in range(columns // CHUNK))
        else:
            right = _ld_queries(operand, queries, columns // CHUNK)
        sums = [[ptx.constant(0.0)] * 4 for _ in range(tiles)]
        for left, words in zip(_operands(keys, dtype, columns, queries, transposed=False), right, strict=True):
            sums = [_mma(x, left, words[2 * tile :][:2]) for tile, x in enumerate(sums)]
        return ptx.from_scalars(sum(sums, []))

    return multiply(keys, operand)


def online_softmax(s, state):
    """One step over scores `[64, queries]` in log2 units, for each warp over its own keys: weights `2^(s − m)`, alpha
    (see `accumulate`; in interpret mode `[warps, queries]`) and the new state."""
    queries = s.shape[1]
    if interpreting():
        m, total = state
        parts = s.reshape(WARPS, KEYS, queries)
        new = jnp.maximum(m, parts.max(axis=1))
        shift = jnp.where(new == -jnp.inf, 0.0, new)
        alpha, weights = jnp.exp2(m - shift), jnp.exp2(parts - shift[:, None])
        return weights.reshape(s.shape), alpha, jnp.stack([new, total * alpha + weights.sum(axis=1)])
    tile = ptx.array_type(queries)

    @plgpu.inline_mgpu(arg_types=(WGMMA, WGMMA), return_type=(tile, tile, tile))
    def step(_, s, state):
        scores, states = ptx.scalars(s), ptx.scalars(state)
        weights, alphas = [], []
        for first in range(0, len(scores), 4):
            four, (m, totals) = scores[first : first + 4], _halves(states[first : first + 4])
            new = [ptx.fmax(old, _warp_maximum(ptx.fmax(*four[i::2]))) for i, old in enumerate(m)]
            shift = [_zero_if_empty(x) for x in new]
            alpha = [ptx.ex2(ptx.sub(old, x)) for old, x in zip(m, shift, strict=True)]
            p = [ptx.ex2(ptx.sub(x, shift[i % 2])) for i, x in enumerate(four)]
            totals = [ptx.fma(x, alpha[i], ptx.add(*p[i::2])) for i, x in enumerate(totals)]
            weights, alphas, states[first : first + 4] = weights + p, alphas + alpha * 2, new + totals
        return tuple(map(ptx.from_scalars, (weights, alphas, states)))

    return step(s, state)


def accumulate(accumulator, alpha, weights, values, columns: int):
    """`accumulator · alpha + Vᵀ · weights`, over each warp's own keys; in interpret mode `[warps, columns, queries]`.

    Args:
        weights: float32 `[64, queries]`, rounded to bfloat16.
        values: 8-bit `[slabs, 64, 128]`, of which the first columns count.
    """
    dtype, queries = values.dtype, weights.shape[1]
    if interpreting():
        p = weights.astype(jnp.bfloat16).astype(jnp.float32).reshape(WARPS, KEYS, queries)
        v = _matrix(values)[:, :columns].reshape(WARPS, KEYS, columns)
        return accumulator * alpha[:, None] + jnp.einsum("wkd,wkq->wdq", v, p)

    @plgpu.inline_mgpu(
        arg_types=(WGMMA, WGMMA, WGMMA, plgpu.RefType(ptx.TRANSFORMS)),
        return_type=_registers_type(_accumulator_registers(columns, queries)),
    )
    def multiply(_, accumulator, alpha, weights, values):
        sums, alphas, p = (ptx.scalars(x) for x in (accumulator, alpha, weights))
        tiles = range(queries // QUERIES)
        right = [[_transposed(_packed(*p[4 * t + 2 * i :][:2])) for i in range(2)] for t in tiles]
        for chunk, left in enumerate(_operands(values, dtype, columns, queries, transposed=True)):
            for t in tiles:
                at = 4 * (chunk * len(tiles) + t)
                scaled = [ptx.mul(x, alphas[4 * t + i]) for i, x in enumerate(sums[at : at + 4])]
                sums[at : at + 4] = _mma(scaled, left, right[t])
        return ptx.from_scalars(sums)

    return multiply(accumulator, alpha, weights, values)


def init(columns: int, queries: int):
    """`(accumulator, state)` before the first key. The state has the maximum and the sum of weights of each warp and
    query, in interpret mode `[2, warps, queries]`."""
    if interpreting():
        empty = jnp.full((1, WARPS, queries), -jnp.inf, jnp.float32)
        state = jnp.concatenate([empty, jnp.zeros_like(empty)])
        return jnp.zeros((WARPS, columns, queries), jnp.float32), state

    @plgpu.inline_mgpu(return_type=ptx.array_type(queries))
    def start(_):
        return ptx.from_scalars(([ptx.constant(-jnp.inf)] * 2 + [ptx.constant(0.0)] * 2) * (queries // QUERIES))

    return ptx.zeros(2 * _accumulator_registers(columns, queries)), start()


# --- the end of an item -----------------------------------------------------------------------------------------------


def st_states(state, ref) -> None:
    """Stores maxima and sums of weights to float32 `ref [2, warps, queries]` in shared memory."""
    queries = ref.shape[2]
    if interpreting():
        ref[...] = state
        return

    @plgpu.inline_mgpu(arg_types=(WGMMA, plgpu.RefType()))
    def store(_, state, ref):
        states, (group, column) = ptx.scalars(state), _group_and_place()
        place = arith.addi(arith.muli(_warp(), integer(queries)), arith.divui(column, integer(2)))
        place = arith.addi(llvm.ptrtoint(i32(), utils.memref_ptr(ref)), arith.muli(place, integer(4)))
        mine = arith.extui(i32(), arith.cmpi(arith.CmpIPredicate.eq, group, integer(0)))
        for tile in range(queries // QUERIES):
            m, totals = _halves(states[4 * tile :][:4])
            totals = [_warp_sum(x) for x in totals]
            for i, pair in enumerate((m, totals)):
                offset = (i * WARPS * queries + tile * QUERIES) * 4
                text = f"{{ .reg .pred p; setp.ne.b32 p, $1, 0; @p st.shared.v2.f32 [$0 + {offset}], {{$2, $3}}; }}"
                llvm.inline_asm(_void(), [place, mine, *pair], text, "r,r,f,f", has_side_effects=True)

    store(state, ref)


def st_part(accumulator, tile: int, columns: int, rows, ref, scale) -> None:
    """Stores 8 of the queries' accumulators to float32 `ref [warps, 8, columns + PADDING]` in shared memory, such that
    the sum over warps is the result, times a scalar `scale`; `rows` is what `st_states` stored."""
    queries = rows.shape[2]
    first = tile * QUERIES
    if interpreting():
        m, total = rows[0, :, pl.ds(first, QUERIES)], rows[1, :, pl.ds(first, QUERIES)]
        factor, inverse, _ = _merged(m, total)
        part = accumulator[:, :, first : first + QUERIES] * (factor * inverse * scale)[:, None]
        ref[...] = jnp.pad(jnp.swapaxes(part, 1, 2), ((0, 0), (0, 0), (0, PADDING)))
        plgpu.commit_smem()
        return
    tiles, pitch = queries // QUERIES, (columns + PADDING) * 4

    @plgpu.inline_mgpu(arg_types=(WGMMA, plgpu.RefType(), plgpu.RefType(), SCALAR))
    def store(_, accumulator, rows, ref, scale):
        sums, (group, column) = ptx.scalars(accumulator), _group_and_place()
        query = arith.divui(column, integer(2))  # of the tile: this one and the next
        warp, factors = _warp(), []
        for i in range(2):
            address = llvm.ptrtoint(i32(), utils.memref_ptr(rows))
            address = arith.addi(address, arith.muli(arith.addi(query, integer(first + i)), integer(4)))
            m, total = _ld_states(address, queries)
            shift, weights, inverse, _ = _merge(m, total)
            mine = _ld_shared(arith.addi(address, arith.muli(warp, integer(4 * queries))), 0)
            del weights
            factor = ptx.mul(ptx.ex2(ptx.sub(mine, shift)), inverse)
            factors.append(ptx.mul(factor, scale.registers[()]))
        place = arith.addi(arith.muli(warp, integer(QUERIES)), query)
        place = arith.addi(arith.muli(place, integer(pitch)), arith.muli(group, integer(8)))
        place = arith.addi(llvm.ptrtoint(i32(), utils.memref_ptr(ref)), place)
        for chunk in range(columns // CHUNK):
            values = sums[4 * (chunk * tiles + tile) :][:4]
            for i in range(2):  # channels 2 · group and the next
                pair = [ptx.mul(x, factors[i]) for x in values[i::2]]
                text = f"st.shared.v2.f32 [$0 + {i * pitch + chunk * CHUNK * 4}], {{$1, $2}};"
                llvm.inline_asm(_void(), [place, *pair], text, "r,f,f", has_side_effects=True)

    store(accumulator, rows, ref, jnp.asarray(scale, jnp.float32))


def st_global_parts(ref, out, start, rows, *, tile: int) -> None:
    """Stores the sum of `ref [warps, 8, columns + PADDING]` over warps to `out [X, T, K, G, D]`: rows `8 · tile` and
    after of the first `rows` that begin at `start = (x, t, k)`, as in `decode_rows.st_global`."""
    columns, group = out.shape[4], out.shape[3]
    first = tile * QUERIES
    if interpreting():
        value = ref[...].sum(axis=0)[:, :columns].astype(out.dtype)
        plgpu.commit_smem()

        def one_row(r):
            out[start[0], start[1] + (first + r) // group, start[2], (first + r) % group] = value[r]

        memory._for_rows(jnp.clip(rows - first, 0, QUERIES), one_row)
        return
    wide, pitch = out.dtype == jnp.float32, (columns + PADDING) * 4

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(), *[SCALAR] * 4))
    def store(_, ref, out, *places):
        kind, base = ir.MemRefType(out.type), utils.memref_ptr(out)
        address = llvm.ptrtoint(i32(), utils.memref_ptr(ref))
        quads = columns // 4
        for turn in range(-(-QUERIES * quads // 128)):
            unit = arith.addi(arith.remui(ptx.thread_index(), integer(128)), integer(128 * turn))
            exists = arith.cmpi(arith.CmpIPredicate.slt, unit, integer(QUERIES * quads))
            unit = arith.minsi(unit, integer(QUERIES * quads - 1))
            mine, column = arith.divui(unit, integer(quads)), arith.muli(arith.remui(unit, integer(quads)), integer(4))
            inside, at = decode_rows._place(kind, *places, arith.addi(mine, integer(first)))
            place = arith.addi(address, arith.addi(arith.muli(mine, integer(pitch)), arith.muli(column, integer(4))))
            four = _ld_shared_quad(place, 0)
            for warp in range(1, WARPS):
                part = _ld_shared_quad(place, warp * QUERIES * pitch)
                four = [ptx.add(a, b) for a, b in zip(four, part, strict=True)]
            pointer = memory._element_pointer(base, kind.element_type, arith.addi(at, memory._wide(column)))
            inside = arith.andi(inside, exists)
            if wide:
                for i in range(2):
                    memory._store_if(inside, pointer, 8 * i, four[2 * i :][:2])
            else:
                memory._store_if(inside, pointer, 0, [_packed(*four[:2]), _packed(*four[2:])])

    store(ref, out, *(jnp.asarray(i, jnp.int32) for i in (*start, rows)))


def st_global_lse(ref, lse, start, rows) -> None:
    """Stores the logarithm of the sum of all weights, in natural units, to `lse [X, T, K, G]` likewise; `ref` is what
    `st_states` stored."""
    (_, _, queries), group = ref.shape, lse.shape[3]
    if interpreting():
        value = _merged(ref[0], ref[1])[2]
        plgpu.commit_smem()

        def one_row(r):
            lse[start[0], start[1] + r // group, start[2], pl.ds(r % group, 1)] = value[r][None]

        memory._for_rows(rows, one_row)
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(), *[SCALAR] * 4))
    def store(_, ref, lse, *places):
        kind = ir.MemRefType(lse.type)
        thread = arith.remui(ptx.thread_index(), integer(128))
        mine = arith.minsi(thread, integer(queries - 1))
        address = llvm.ptrtoint(i32(), utils.memref_ptr(ref))
        m, total = _ld_states(arith.addi(address, arith.muli(mine, integer(4))), queries)
        _, _, _, value = _merge(m, total)
        inside, at = decode_rows._place(kind, *places, thread)
        pointer = memory._element_pointer(utils.memref_ptr(lse), kind.element_type, at)
        memory._store_if(inside, pointer, 0, [value])

    store(ref, lse, *(jnp.asarray(i, jnp.int32) for i in (*start, rows)))


LN2 = 0.6931471805599453


def _merged(m, total):
    """In interpret mode: what to multiply each warp's part with, but for 1 / sum of weights; that; lse."""
    top = m.max(axis=0)
    shift = jnp.where(top == -jnp.inf, 0.0, top)
    factor = jnp.exp2(m - shift)
    total = (total * factor).sum(axis=0)
    seen = total > 0
    return factor, jnp.where(seen, 1 / total, 0.0), jnp.where(seen, (shift + jnp.log2(total)) * LN2, -jnp.inf)


def _merge(m: list, totals: list):
    """The same of four warps' registers: `(shift, factors, 1 / sum or 0, lse)`."""
    shift = _zero_if_empty(ptx.fmax(ptx.fmax(*m[:2]), ptx.fmax(*m[2:])))
    factors = [ptx.ex2(ptx.sub(x, shift)) for x in m]
    total = ptx.constant(0.0)
    for x, factor in zip(totals, factors, strict=True):
        total = ptx.fma(x, factor, total)
    seen = arith.cmpf(arith.CmpFPredicate.OGT, total, ptx.constant(0.0))
    inverse = arith.select(seen, arith.divf(ptx.constant(1.0), total), ptx.constant(0.0))
    lse = ptx.mul(ptx.add(shift, ptx._instruction("lg2.approx.f32 $0, $1;", total)), ptx.constant(LN2))
    return shift, factors, inverse, arith.select(seen, lse, ptx.constant(-jnp.inf))


# --- registers --------------------------------------------------------------------------------------------------------


def _accumulator_registers(columns: int, queries: int) -> int:
    return 4 * (columns // CHUNK) * (queries // QUERIES)


def _registers_type(count: int, dtype=jnp.float32):
    return plgpu.ShapeDtypeStruct((ptx.TILE_ROWS, 2 * count), dtype, layout=WGMMA)


def _padded(words: int) -> int:
    """Registers of a tile, whole groups of 8 columns."""
    return -(-words // 4) * 4


def _group_and_place():
    """This thread's (lane // 4, 4 · (lane % 4)): a row of 8, and the first of 4 columns of 16."""
    lane = arith.remui(ptx.thread_index(), integer(32))
    return arith.divui(lane, integer(4)), arith.muli(arith.remui(lane, integer(4)), integer(4))


def _warp():
    return arith.remui(arith.divui(ptx.thread_index(), integer(32)), integer(4))


def _halves(four: list) -> tuple:
    """The (maxima, sums) of a thread's two queries of a tile."""
    return four[:2], four[2:]


def _zero_if_empty(x):
    empty = arith.cmpf(arith.CmpFPredicate.OEQ, x, ptx.constant(-jnp.inf))
    return arith.select(empty, ptx.constant(0.0), x)


def _warp_maximum(x):
    """Over the 8 lanes that share a column."""
    for mask in (4, 8, 16):
        x = ptx.fmax(x, ptx.shfl_bfly(x, mask))
    return x


def _warp_sum(x):
    for mask in (4, 8, 16):
        x = ptx.add(x, ptx.shfl_bfly(x, mask))
    return x


def _packed(low, high):
    """Two float32 as a word of bfloat16."""
    return llvm.inline_asm(i32(), [low, high], "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f")


def _transposed(word):
    """`movmatrix`: of an 8 × 8 matrix whose row lane // 4 has this word at columns 2 · (lane % 4) and the next."""
    return llvm.inline_asm(i32(), [word], "movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;", "=r,r")


def _ld_states(address, queries: int) -> tuple:
    """Maxima and sums of the four warps of the query at `address`."""
    found = [_ld_shared(address, 4 * queries * i) for i in range(2 * WARPS)]
    return found[:WARPS], found[WARPS:]


def _ld_shared(address, offset: int):
    text = f"ld.shared.f32 $0, [$1 + {offset}];"
    return llvm.inline_asm(ir.F32Type.get(), [address], text, "=f,r", has_side_effects=True)


def _ld_shared_quad(address, offset: int) -> list:
    kind = llvm.StructType.get_literal([ir.F32Type.get()] * 4)
    text = f"ld.shared.v4.f32 {{$0, $1, $2, $3}}, [$4 + {offset}];"
    four = llvm.inline_asm(kind, [address], text, "=f,=f,=f,=f,r", has_side_effects=True)
    return [llvm.extractvalue(ir.F32Type.get(), four, [i]) for i in range(4)]


def _queries(ref, columns):
    """The first columns of `ref [slabs, queries, 64]`, in interpret mode."""
    value = jnp.concatenate([ref[i] for i in range(ref.shape[0])], axis=1)[:, :columns]
    plgpu.commit_smem()  # to the emulation a copy into what was read is a race without it
    return value


def _matrix(ref):
    """8-bit `[slabs, 64, 128]` as float32 `[64, columns]`, in interpret mode."""
    value = jnp.concatenate([ref[i] for i in range(ref.shape[0])], axis=1).astype(jnp.float32)
    plgpu.commit_smem()
    return value


def _void():
    return ir.Type.parse("!llvm.void")

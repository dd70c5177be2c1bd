"""Rows of query tiles in HBM when the heads of a group are packed into them: row r = t · G + g is head g of token t.

As in `memory`, functions have an equivalent in plain jnp for interpret mode.
"""

import jax
import jax.numpy as jnp

from jattn.pallas._compat import arith, interpreting, ir, pl, plgpu, utils
from jattn.pallas.hopper import memory, ptx
from jattn.pallas.hopper.ptx import SCALAR, WGMMA, integer


def ld_global_rows(ref, batch, row) -> jax.Array:
    """Entries `[row, row + 64)` of the float32 array `[B, n]`, one a row of a tile; after the last comes the first."""
    if interpreting():
        return ref[batch][(row + jnp.arange(ptx.TILE_ROWS, dtype=jnp.int32)) % ref.shape[1]]

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), SCALAR, SCALAR, ptx.ROW), return_type=ptx.row_type())
    def load(_, ref, batch, row, numbers):
        kind = ir.MemRefType(ref.type)
        start, base = memory._flat(kind, (batch.registers[()],)), utils.memref_ptr(ref)
        places = [arith.remui(arith.addi(row.registers[()], i), integer(kind.shape[1])) for i in ptx.scalars(numbers)]
        values = [memory._load(base, kind.element_type, arith.addi(start, memory._wide(i))) for i in places]
        return ptx.rows_from_scalars(values, numbers)

    return load(ref, jnp.asarray(batch, jnp.int32), jnp.asarray(row, jnp.int32), ptx.row_numbers())


def st_global(ref, start, value: jax.Array, row=0, column=0, *, rows: int = ptx.TILE_ROWS) -> None:
    """Stores the first `rows` of `value [64, n]` to `ref [X, T, K, G, D]` at `start = (x, k)`: row r, counted from
    `row` on, goes to (r // G, r % G), and columns go to `column` and after. What lies past T or D is left out.

    Args:
        ref: in HBM, of the value's dtype (float32 or 16 bits), D a multiple of 8.
        row, column: int32 scalars, the column a multiple of 8.
    """
    (_, tokens, _, group, width), n = ref.shape, value.shape[1]
    if interpreting():
        for first in range(0, width, n):
            mine = slice(first, min(first + n, width))

            def one_row(r, mine=mine):
                t, g = (row + r) // group, (row + r) % group
                ref[start[0], t, start[1], g, mine] = value[r, : mine.stop - mine.start]

            pl.when(column == first)(lambda f=one_row: memory._for_rows(jnp.minimum(tokens * group - row, rows), f))
        return
    wide = value.dtype == jnp.float32

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), SCALAR, SCALAR, SCALAR, SCALAR, WGMMA))
    def store(_, ref, x, k, row, column, value):
        kind, base = ir.MemRefType(ref.type), utils.memref_ptr(ref)
        first_row, first_column = ptx.lane_position()
        mine = arith.addi(first_column, column.registers[()])
        words = ptx.scalars(value) if wide else ptx.pairs(value)
        for i in range(2):
            inside, at = _place(kind, x, k, arith.addi(first_row, integer(8 * i)), row, rows)
            pointer = memory._element_pointer(base, kind.element_type, arith.addi(at, memory._wide(mine)))
            for part in range(n // 8):
                last = arith.addi(mine, integer(8 * part))
                exists = arith.andi(inside, arith.cmpi(arith.CmpIPredicate.slt, last, integer(width)))
                words_of_part = words[4 * part + 2 * i :][:2] if wide else words[2 * part + i :][:1]
                memory._store_if(exists, pointer, 8 * part * (4 if wide else 2), words_of_part)

    store(ref, *(jnp.asarray(x, jnp.int32) for x in (*start, row, column)), value)


def st_global_rows(ref, start, value: jax.Array, row=0, *, rows: int = ptx.TILE_ROWS) -> None:
    """Stores float32 `value [64]`, in the ROW layout, to `ref [X, T, K, G]` as `st_global` does its rows."""
    _, tokens, _, group = ref.shape
    if interpreting():

        def one_row(r):
            t, g = (row + r) // group, (row + r) % group
            ref[start[0], t, start[1], pl.ds(g, 1)] = value[r][None]

        memory._for_rows(jnp.minimum(tokens * group - row, rows), one_row)
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), SCALAR, SCALAR, SCALAR, ptx.ROW))
    def store(_, ref, x, k, row, value):
        kind, base = ir.MemRefType(ref.type), utils.memref_ptr(ref)
        first_row, first_column = ptx.lane_position()
        mine = arith.cmpi(arith.CmpIPredicate.eq, first_column, integer(0))  # of four threads that hold the same rows
        for i, word in enumerate(ptx.scalars(value)):
            inside, at = _place(kind, x, k, arith.addi(first_row, integer(8 * i)), row, rows)
            memory._store_if(arith.andi(mine, inside), memory._element_pointer(base, kind.element_type, at), 0, [word])

    store(ref, *(jnp.asarray(x, jnp.int32) for x in (*start, row)), value)


def _place(kind, x, k, mine, first, rows):
    """Whether row `mine` of a tile is below `rows` and exists in `[X, T, K, G, ...]`, as r = t · G + g counted from
    `first` on; and the 64-bit index of its first element."""
    _, tokens, _, group = kind.shape[:4]
    row = arith.addi(mine, first.registers[()])
    below = arith.cmpi(arith.CmpIPredicate.slt, mine, integer(rows))
    inside = arith.andi(below, arith.cmpi(arith.CmpIPredicate.slt, row, integer(tokens * group)))
    t, g = arith.divui(row, integer(group)), arith.remui(row, integer(group))
    return inside, memory._flat(kind, (x.registers[()], t, k.registers[()], g))

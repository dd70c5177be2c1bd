"""Rows of query tiles when the heads of a group are packed into them: row r = t · G + g is head g of token t.

As in `memory`, functions have an equivalent in plain jnp for interpret mode.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jattn.pallas._compat import arith, interpreting, ir, pl, plgpu, utils
from jattn.pallas.hopper import memory, ptx
from jattn.pallas.hopper.lists import i32
from jattn.pallas.hopper.ptx import SCALAR, WGMMA, integer
from jattn.pallas.lowering import Element


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


def ld_global_of_heads(ref, batch, heads: jax.Array) -> jax.Array:
    """Entry (batch, head, 0, 0) for each of int32 `heads`, `[64]` in the ROW layout or `[64, n]`, of an array
    `[B or 1, N or 1, 1, 1]`; floating-point arrays arrive as float32, integers as int32."""
    dtype = jnp.float32 if jnp.issubdtype(ref.dtype, jnp.floating) else jnp.int32
    if interpreting():
        return ref[jnp.minimum(batch, ref.shape[0] - 1)][jnp.minimum(heads, ref.shape[1] - 1), 0, 0].astype(dtype)

    rows = heads.ndim == 1
    kind = ptx.row_type(dtype) if rows else plgpu.ShapeDtypeStruct(heads.shape, dtype, layout=WGMMA)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), SCALAR, ptx.ROW if rows else WGMMA), return_type=kind)
    def load(_, ref, batch, heads):
        kind, base = ir.MemRefType(ref.type), utils.memref_ptr(ref)
        sequences, count = kind.shape[:2]
        start = arith.muli(memory._wide(memory._clipped(batch.registers[()], sequences)), memory._int64(count))
        places = [arith.addi(start, memory._wide(memory._clipped(i, count))) for i in ptx.scalars(heads)]
        values = [memory._load(base, kind.element_type, i) for i in places]
        signed = True if dtype == jnp.int32 else None
        return ptx.rows_from_scalars(values, heads, signed=signed) if rows else ptx.from_scalars(values, signed=signed)

    return load(ref, jnp.asarray(batch, jnp.int32), heads)


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a score tile is, for `scores.modify` and `scores.hide`; traced scalars, and rows in the ROW layout."""

    batch: Any
    heads: Any  # int32 [64]
    tokens: Any  # int32 [64]: queries, counted in their sequence
    offset: Any  # from those to positions
    column: Any  # first key
    origin: Any  # batch index and head that 0 stands for

    def element(self, start: int, width: int, arrays) -> Element:
        """Columns `[start, start + width)` of the tile."""
        token = along_columns(self.tokens, width)
        return Element(
            batch=self.batch + self.origin[0],
            head=along_columns(self.heads, width) + self.origin[1],
            query_index=token,
            query_position=token + self.offset,
            key_index=ptx.numbers(self.column + start, 1, width),
            load=lambda i: self.load(arrays[i], start, width),
            load_at=lambda i, rows, columns: memory.ld_global_at(arrays[i], self.batch, i32(0), rows, columns),
        )

    def load(self, array, start: int, width: int, *, diagonal: bool = False):
        """The array's numbers of these heads; it has neither rows nor columns."""
        del start, diagonal
        return along_columns(ld_global_of_heads(array, self.batch, self.heads), width)


def along_columns(rows: jax.Array, width: int) -> jax.Array:
    """`rows [64]` in the ROW layout as `[64, width]`. A broadcast whose layout is known: inference takes minutes to
    find those of many."""
    if interpreting():
        return lax.broadcast_in_dim(rows, (ptx.TILE_ROWS, width), [0])

    @plgpu.inline_mgpu(
        arg_types=(ptx.ROW,), return_type=plgpu.ShapeDtypeStruct((ptx.TILE_ROWS, width), rows.dtype, layout=WGMMA)
    )
    def widen(_, rows):
        values = ptx.scalars(rows)
        signed = True if rows.mlir_dtype == ptx.i32() else None
        return ptx.from_scalars([values[ptx.row_of(i)] for i in range(width // 2)], signed=signed)

    return widen(rows)


def tokens_and_heads(token, head, group: int) -> tuple[jax.Array, jax.Array]:
    """Token and head of each row of the tile that begins with these, int32 `[64]` in the ROW layout."""
    if interpreting():
        rows = jnp.arange(ptx.TILE_ROWS, dtype=jnp.int32)
        return token + rows // group, head + rows % group

    @plgpu.inline_mgpu(arg_types=(SCALAR, SCALAR, ptx.ROW), return_type=(ptx.row_type(jnp.int32),) * 2)
    def count(_, token, head, numbers):
        rows = ptx.scalars(numbers)
        tokens = [arith.addi(token.registers[()], arith.divui(r, integer(group))) for r in rows]
        heads = [arith.addi(head.registers[()], arith.remui(r, integer(group))) for r in rows]
        return tuple(ptx.rows_from_scalars(x, numbers, signed=True) for x in (tokens, heads))

    return count(jnp.asarray(token, jnp.int32), jnp.asarray(head, jnp.int32), ptx.row_numbers())


def st_global(ref, start, value: jax.Array, rows, column=0) -> None:
    """Stores the first `rows` of `value [64, n]` to `ref [X, T, K, G, D]` from `start = (x, t, k)` on: row r goes to
    (t + r // G, r % G), and columns go to `column` and after. What lies past D is left out.

    Args:
        ref: in HBM, of the value's dtype (float32 or 16 bits), D a multiple of 8.
        rows, column: int32 scalars, the column a multiple of 8, and of n if it is traced.
    """
    group, width, n = *ref.shape[3:], value.shape[1]
    if interpreting():
        for first in [column] if isinstance(column, int) else range(0, width, n):
            mine = slice(first, min(first + n, width))

            def one_row(r, mine=mine):
                ref[start[0], start[1] + r // group, start[2], r % group, mine] = value[r, : mine.stop - mine.start]

            pl.when(column == first)(lambda f=one_row: memory._for_rows(rows, f))
        return
    wide = value.dtype == jnp.float32

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), *[SCALAR] * 5, WGMMA))
    def store(_, ref, *operands):
        *places, column, value = operands
        kind, base = ir.MemRefType(ref.type), utils.memref_ptr(ref)
        first_row, first_column = ptx.lane_position()
        mine = arith.addi(first_column, column.registers[()])
        words = ptx.scalars(value) if wide else ptx.pairs(value)
        for i in range(2):
            inside, at = _place(kind, *places, arith.addi(first_row, integer(8 * i)))
            pointer = memory._element_pointer(base, kind.element_type, arith.addi(at, memory._wide(mine)))
            for part in range(n // 8):
                last = arith.addi(mine, integer(8 * part))
                exists = arith.andi(inside, arith.cmpi(arith.CmpIPredicate.slt, last, integer(width)))
                words_of_part = words[4 * part + 2 * i :][:2] if wide else words[2 * part + i :][:1]
                memory._store_if(exists, pointer, 8 * part * (4 if wide else 2), words_of_part)

    store(ref, *(jnp.asarray(x, jnp.int32) for x in (*start, rows, column)), value)


def st_global_rows(ref, start, value: jax.Array, rows) -> None:
    """Stores float32 `value [64]`, in the ROW layout, to `ref [X, T, K, G]` as `st_global` does its rows."""
    group = ref.shape[3]
    if interpreting():

        def one_row(r):
            ref[start[0], start[1] + r // group, start[2], pl.ds(r % group, 1)] = value[r][None]

        memory._for_rows(rows, one_row)
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), *[SCALAR] * 4, ptx.ROW))
    def store(_, ref, *operands):
        *places, value = operands
        kind, base = ir.MemRefType(ref.type), utils.memref_ptr(ref)
        first_row, first_column = ptx.lane_position()
        mine = arith.cmpi(arith.CmpIPredicate.eq, first_column, integer(0))  # of four threads that hold the same rows
        for i, word in enumerate(ptx.scalars(value)):
            inside, at = _place(kind, *places, arith.addi(first_row, integer(8 * i)))
            memory._store_if(arith.andi(mine, inside), memory._element_pointer(base, kind.element_type, at), 0, [word])

    store(ref, *(jnp.asarray(x, jnp.int32) for x in (*start, rows)), value)


def _place(kind, x, t, k, rows, row):
    """Whether row `row` of a tile is one of the first `rows`; and the 64-bit index of its first element in
    `[X, T, K, G, ...]`."""
    group = integer(kind.shape[3])
    x, t, k, rows = (scalar.registers[()] for scalar in (x, t, k, rows))
    inside = arith.cmpi(arith.CmpIPredicate.slt, row, rows)
    t = arith.addi(t, arith.divui(row, group))
    return inside, memory._flat(kind, (x, t, k, arith.remui(row, group)))

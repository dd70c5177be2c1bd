"""Weights and score gradients of a transposed tile, keys by queries, in registers."""

import jax
import jax.numpy as jnp
from jax import lax

from jattn.pallas._compat import arith, interpreting, ir, llvm, plgpu, utils, vector
from jattn.pallas.hopper import ptx


def weights(s: jax.Array, rows, factor: float, start: int = 0, first=0) -> jax.Array:
    """`2^(factor · s + rows[0])` for scores `s [64, n]` of the queries from `first + start` on, and their −lse in log2
    units, `rows` float32 `[2, columns]` in shared memory."""
    if interpreting():
        return jnp.exp2(s * factor + lax.dynamic_slice_in_dim(rows[0], first + start, s.shape[1])[None])

    @plgpu.inline_mgpu(arg_types=(ptx.WGMMA, plgpu.RefType(), ptx.SCALAR), return_type=ptx.array_type(s.shape[1]))
    def exponential(_, s, rows, first):
        shift, c = _column_values(rows, 0, first, start, s.shape[1]), ptx.constant(factor)
        return ptx.from_scalars([ptx.ex2(ptx.fma(x, c, shift[ptx.column_of(i)])) for i, x in enumerate(ptx.scalars(s))])

    return exponential(s, rows, jnp.asarray(first, jnp.int32))


def score_gradient(p: jax.Array, dp: jax.Array, rows, first=0) -> jax.Array:
    """`p · (dp − delta)` with the queries' delta in `rows[1]`, from `first` on."""
    if interpreting():
        return p * (dp - lax.dynamic_slice_in_dim(rows[1], first, p.shape[1])[None])

    types = ptx.WGMMA, ptx.WGMMA, plgpu.RefType(), ptx.SCALAR

    @plgpu.inline_mgpu(arg_types=types, return_type=ptx.array_type(p.shape[1]))
    def gradient(_, p, dp, rows, first):
        delta = _column_values(rows, 1, first, 0, p.shape[1])
        pairs = enumerate(zip(ptx.scalars(p), ptx.scalars(dp), strict=True))
        return ptx.from_scalars([ptx.mul(x, ptx.sub(y, delta[ptx.column_of(i)])) for i, (x, y) in pairs])

    return gradient(p, dp, rows, jnp.asarray(first, jnp.int32))


def _column_values(ref, row: int, first, start: int, columns: int) -> dict:
    """This thread's values in so many columns of a row of a float32 array in shared memory, by their offset from
    `first + start`."""
    _, first_column = ptx.lane_position()
    first_column = arith.addi(first_column, first.registers[()])
    base, pair = utils.memref_ptr(ref), ir.VectorType.get((2,), ir.F32Type.get())
    before, values = row * ir.MemRefType(ref.type).shape[1] + start, {}
    for group in range(0, columns, 8):
        pointer = utils.getelementptr(base, [first_column], ir.F32Type.get())
        pointer = utils.getelementptr(pointer, [before + group], ir.F32Type.get())
        loaded = llvm.load(pair, pointer, alignment=8)
        for j in range(2):
            position = ir.DenseI64ArrayAttr.get([j])
            values[group + j] = vector.extract(loaded, dynamic_position=[], static_position=position)
    return values

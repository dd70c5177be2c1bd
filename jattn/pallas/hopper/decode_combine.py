"""Merges the parts of a sequence's result over the splits of its keys; the second and last launch of a decode call.

A warpgroup takes 64 rows (token and head) and 16 columns of one sequence, and walks the splits in their order, 8 at a
time to have enough loads in flight: the arithmetic of `jattn.merge`, in float32.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from jattn.pallas._compat import kernel, pl
from jattn.pallas.hopper import memory, ptx, softmax
from jattn.pallas.hopper.decode_plan import Plan, sequence_of
from jattn.pallas.hopper.lists import i32

_COLUMNS, _AT_ONCE = 16, 8


def combine(plan: Plan, lengths, query_lengths, out, lse, *, interpret=False):
    """`(out [B, rows, 1, 1, D], lse [B, rows, 1, 1])` with rows = T · N, in the plan's dtype and float32.

    Args:
        out: float32 `[B · splits, 1, rows, D]`, the result over each split; those that `sequence_of` names are read.
        lse: float32 `[B · splits, rows]`.
    """
    rows = plan.T * plan.N
    tiles, strips = -(-rows // ptx.TILE_ROWS), -(-plan.D // _COLUMNS)
    operands, structure = jax.tree.flatten((lengths, query_lengths, out, lse))

    def body(*refs):
        read = jax.tree.unflatten(structure, refs[: len(operands)])
        _merge(plan, tiles, strips, *read, *refs[len(operands) :])

    return kernel(
        body,
        name="jattn_decode_combine",
        out_type=(
            jax.ShapeDtypeStruct((plan.B, rows, 1, 1, plan.D), plan.dtype),
            jax.ShapeDtypeStruct((plan.B, rows, 1, 1), jnp.float32),
        ),
        scratch={},
        grid={"block": plan.B * tiles * strips},
        warpgroups=1,
        interpret=interpret,
    )(*operands)


def _merge(plan, tiles, strips, lengths, query_lengths, part_out, part_lse, out, lse):
    number = lax.axis_index("block")
    strip, number = lax.rem(number, i32(strips)), lax.div(number, i32(strips))
    row, batch = lax.rem(number, i32(tiles)) * ptx.TILE_ROWS, lax.div(number, i32(tiles))
    sequence, column = sequence_of(plan, lengths, query_lengths, batch), strip * _COLUMNS
    last = sequence.first + sequence.splits - 1

    def several(i, state):
        m, total, accumulator = state
        splits = [sequence.first + i * _AT_ONCE + j for j in range(_AT_ONCE)]
        places = [batch * plan.splits + jnp.minimum(s, last) for s in splits]
        outs = [memory.ld_global(part_out, place, i32(0), row, column, _COLUMNS) for place in places]
        lses = [memory.ld_global_row_values(part_lse, place, row) for place in places]
        lses = [x + jnp.where(s <= last, 0.0, -jnp.inf) for s, x in zip(splits, lses, strict=True)]
        new = functools.reduce(jnp.maximum, lses, m)
        shift = jnp.where(new == -jnp.inf, 0.0, new)
        alpha = jnp.exp(m - shift)
        total, accumulator = total * alpha, softmax.rescale(accumulator, alpha, lazy=False)
        for part, x in zip(outs, lses, strict=True):
            weight = jnp.exp(x - shift)
            total = total + weight
            accumulator = accumulator + softmax.rescale(part, weight, lazy=False)
        return new, total, accumulator

    m, total, accumulator = softmax.init_state(_COLUMNS)
    state = m, total.sum(axis=1), accumulator
    count = lax.div(sequence.splits + (_AT_ONCE - 1), i32(_AT_ONCE))
    m, total, accumulator = lax.fori_loop(0, count, several, state)
    seen = total > 0
    result = softmax.rescale(accumulator, jnp.where(seen, 1 / total, 0.0), lazy=False)
    memory.st_global_packed(out, (batch, i32(0)), result.astype(plan.dtype), row, column)

    @pl.when(strip == 0)
    def _():
        log = jnp.where(seen, m + jnp.log(total), -jnp.inf)
        memory.st_global_packed_rows(lse, (batch, i32(0)), log, row)

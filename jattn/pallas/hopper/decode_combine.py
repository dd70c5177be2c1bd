"""Merges the parts of a sequence's result over the splits of its keys; the second and last launch of a decode call.

A thread block takes 64 rows (token and head) and 8 columns of one sequence. Its warpgroups walk the splits in turns of
16, so that enough loads are in flight, and the first one merges what they have, in their order: the arithmetic of
`jattn.merge`, in float32.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from jattn.pallas._compat import kernel, pl, plgpu
from jattn.pallas.hopper import decode_rows, memory, ptx
from jattn.pallas.hopper.decode_plan import Plan, sequence_of
from jattn.pallas.hopper.lists import i32

_COLUMNS, _AT_ONCE, _WARPGROUPS = 8, 16, 4


def combine(plan: Plan, lengths, query_lengths, sinks, out, lse, *, interpret=False):
    """`(out [B, rows, 1, 1, D], lse [B, rows, 1, 1])` with rows = T · N, in the plan's dtype and float32.

    Args:
        sinks: float32 `[1, N]` or None; they join the denominator last.
        out: float32 `[B · splits, 1, rows, D]`, the result over each split; those that `sequence_of` names are read.
        lse: float32 `[B · splits, rows]`.
    """
    rows = plan.T * plan.N
    tiles, strips = -(-rows // ptx.TILE_ROWS), -(-plan.D // _COLUMNS)
    warpgroups = min(_WARPGROUPS, -(-plan.splits // _AT_ONCE))
    operands, structure = jax.tree.flatten((lengths, query_lengths, sinks, out, lse))

    def body(*refs, **others):
        read = jax.tree.unflatten(structure, refs[: len(operands)])
        _kernel(plan, warpgroups, tiles, strips, *read, *refs[len(operands) :], **others)

    return kernel(
        body,
        name="jattn_decode_combine",
        out_type=(
            jax.ShapeDtypeStruct((plan.B, rows, 1, 1, plan.D), plan.dtype),
            jax.ShapeDtypeStruct((plan.B, rows, 1, 1), jnp.float32),
        ),
        scratch=_scratch(warpgroups),
        grid={"block": plan.B * tiles * strips},
        warpgroups=warpgroups,
        interpret=interpret,
    )(*operands)


def _scratch(warpgroups) -> dict:
    if warpgroups == 1:
        return {}
    others = warpgroups - 1
    return dict(
        rows=plgpu.SMEM((others, 2, ptx.TILE_ROWS), jnp.float32),
        accumulators=plgpu.SMEM((others, ptx.TILE_ROWS, _COLUMNS), jnp.float32),
        written=plgpu.Barrier(num_arrivals=others),
    )


def _kernel(plan, warpgroups, tiles, strips, lengths, query_lengths, sinks, part_out, part_lse, out, lse, **others):
    number, mine = lax.axis_index("block"), lax.axis_index("warpgroup")
    strip, number = lax.rem(number, i32(strips)), lax.div(number, i32(strips))
    row, batch = lax.rem(number, i32(tiles)) * ptx.TILE_ROWS, lax.div(number, i32(tiles))
    sequence, column = sequence_of(plan, lengths, query_lengths, batch), strip * _COLUMNS
    at_once = min(_AT_ONCE, plan.splits)
    turns = lax.div(sequence.splits + (at_once - 1), i32(at_once))

    def one_turn(i, state):
        """Splits `[i · at_once, (i + 1) · at_once)` of the sequence's."""
        splits = [(mine + i * warpgroups) * at_once + j for j in range(at_once)]
        place = batch * plan.splits + sequence.first
        parts = []
        for s in splits:
            at = place + jnp.minimum(s, sequence.splits - 1)
            part_m = decode_rows.ld_global_rows(part_lse, at, row) + jnp.where(s < sequence.splits, 0.0, -jnp.inf)
            parts.append((part_m, None, memory.ld_global(part_out, at, i32(0), row, column, _COLUMNS)))
        return _merged(state, parts)

    empty = (plgpu.layout_cast(jnp.full((ptx.TILE_ROWS,), x, jnp.float32), ptx.ROW) for x in (-jnp.inf, 0.0))
    count = lax.div(turns - mine + (warpgroups - 1), i32(warpgroups))
    state = lax.fori_loop(0, count, one_turn, (*empty, ptx.zeros(_COLUMNS)))
    if warpgroups > 1:
        pl.when(mine > 0)(lambda: _hand_over(mine - 1, state, **others))

    @pl.when(mine == 0)
    def _():
        final = state
        if warpgroups > 1:
            plgpu.barrier_wait(others["written"])
            # Not those without a split: merging with nothing could still turn -0 into 0.
            last = jnp.minimum(turns, warpgroups) - 1
            final = lax.fori_loop(0, last, lambda i, state: _merged(state, [_taken_over(i, **others)]), state)
        if sinks is not None:
            exists = lax.div(row + ptx.row_numbers(), i32(plan.N)) < sequence.queries
            sink = jnp.where(exists, decode_rows.ld_global_rows(sinks, 0, row), -jnp.inf)
            final = _merged(final, [(sink, None, ptx.zeros(_COLUMNS))])
        _write(final, batch, row, column, out, lse)


def _merged(state, parts):
    """`(m, total, accumulator)` with parts of that form, whose total is 1 where it is None."""
    m, total, accumulator = state
    new = functools.reduce(jnp.maximum, [part_m for part_m, _, _ in parts], m)
    shift = jnp.where(new == -jnp.inf, 0.0, new)
    alpha = jnp.exp(m - shift)
    total, accumulator = total * alpha, _scaled(accumulator, alpha)
    for part_m, part_total, part in parts:
        weight = jnp.exp(part_m - shift)
        total = total + (weight if part_total is None else weight * part_total)
        accumulator = accumulator + _scaled(part, weight)
    return new, total, accumulator


def _scaled(x, rows):
    return x * lax.broadcast_in_dim(rows, x.shape, [0])


def _hand_over(i, state, *, rows, accumulators, written):
    m, total, accumulator = state
    rows[i, 0], rows[i, 1] = m, total
    accumulators[i] = accumulator
    plgpu.barrier_arrive(written)


def _taken_over(i, *, rows, accumulators, written):
    del written
    m, total = (plgpu.load(rows.at[i, j], layout=ptx.ROW) for j in range(2))
    return m, total, plgpu.load(accumulators.at[i], layout=ptx.WGMMA, optimized=False)


def _write(state, batch, row, column, out, lse):
    m, total, accumulator = state
    seen = total > 0
    result = _scaled(accumulator, jnp.where(seen, 1 / total, 0.0))
    decode_rows.st_global(out, (batch, i32(0)), result.astype(out.dtype), row, column)

    @pl.when(column == 0)
    def _():
        log = jnp.where(seen, m + jnp.log(total), -jnp.inf)
        decode_rows.st_global_rows(lse, (batch, i32(0)), log, row)

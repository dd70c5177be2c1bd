"""Merges the parts of a query's result over the splits of its keys; the second and last launch of a decode call.

A thread block takes 64 heads and 8 columns of one query. Its warpgroups walk the splits in turns of 16, so that enough
loads are in flight, and the first one merges what they have, in their order: the arithmetic of `jattn.merge`, in
float32.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from jattn.pallas._compat import kernel, pl, plgpu
from jattn.pallas.hopper import decode_rows, memory, ptx
from jattn.pallas.hopper.decode_plan import Inputs, Plan, sequence_of, splits_of, visible
from jattn.pallas.hopper.lists import i32

_COLUMNS, _AT_ONCE, _WARPGROUPS = 8, 16, 4


def combine(plan: Plan, inputs: Inputs, out, lse, *, interpret=False):
    """`(out [rows, N, 1, 1, D], lse [rows, N, 1, 1])` in the plan's dtype and float32.

    Args:
        inputs: of which lengths, offsets of packed queries and sinks are read; those join the denominator last.
        out: float32 `[splits, rows, K, group, D]`, the result over each split; of a query those are read that hold
            keys which it may see.
        lse: float32 `[splits, rows, K, group]`.
    """
    out, lse = out.reshape(-1, 1, plan.N, plan.D), lse.reshape(-1, plan.N)
    tiles, strips = -(-plan.N // ptx.TILE_ROWS), -(-plan.D // _COLUMNS)
    warpgroups = min(_WARPGROUPS, -(-plan.splits // _AT_ONCE))
    read = Inputs(
        None, None, None, inputs.lengths, cu_queries=inputs.cu_queries, query_lengths=inputs.query_lengths,
        limits=inputs.limits, sinks=inputs.sinks,
    )  # fmt: skip
    operands, structure = jax.tree.flatten((read, out, lse))

    def body(*refs, **others):
        read = jax.tree.unflatten(structure, refs[: len(operands)])
        _kernel(plan, warpgroups, tiles, strips, *read, *refs[len(operands) :], **others)

    return kernel(
        body,
        name="jattn_decode_combine",
        out_type=(
            jax.ShapeDtypeStruct((plan.rows, plan.N, 1, 1, plan.D), plan.dtype),
            jax.ShapeDtypeStruct((plan.rows, plan.N, 1, 1), jnp.float32),
        ),
        scratch=_scratch(warpgroups),
        grid={"block": plan.rows * tiles * strips},
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


def _kernel(plan, warpgroups, tiles, strips, inputs, part_out, part_lse, out, lse, **others):
    number, mine = lax.axis_index("block"), lax.axis_index("warpgroup")
    strip, number = lax.rem(number, i32(strips)), lax.div(number, i32(strips))
    head, query = lax.rem(number, i32(tiles)) * ptx.TILE_ROWS, lax.div(number, i32(tiles))
    column = strip * _COLUMNS
    exists, first, splits = _splits_of_query(plan, inputs, query)
    at_once = min(_AT_ONCE, plan.splits)
    turns = lax.div(splits + (at_once - 1), i32(at_once))

    def one_turn(i, state):
        """Splits `[i · at_once, (i + 1) · at_once)` of the query's."""
        parts = []
        for j in range(at_once):
            s = (mine + i * warpgroups) * at_once + j
            at = (first + jnp.minimum(s, splits - 1)) * plan.rows + query
            part_m = decode_rows.ld_global_rows(part_lse, at, head) + jnp.where(s < splits, 0.0, -jnp.inf)
            parts.append((part_m, None, memory.ld_global(part_out, at, i32(0), head, column, _COLUMNS)))
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
        if inputs.sinks is not None:
            sink = decode_rows.ld_global_rows(inputs.sinks, 0, head) + jnp.where(exists, 0.0, -jnp.inf)
            final = _merged(final, [(sink, None, ptx.zeros(_COLUMNS))])
        _write(plan, final, query, head, column, out, lse)


def _splits_of_query(plan, inputs, query):
    """Whether the query is anybody's, and (first, how many) of the splits that hold keys which it may see."""
    b = lax.div(query, i32(plan.T)) if inputs.cu_queries is None else _owner(inputs.cu_queries, query)
    sequence = sequence_of(plan, inputs, jnp.clip(b, 0, plan.B - 1))
    token = query - sequence.row
    exists = (b >= 0) & (b < plan.B) & (token < sequence.queries)
    low, high = visible(plan, sequence.offset, sequence.end, token, token + 1)
    first, splits = splits_of(plan, low, high)
    return exists, first, jnp.where(exists, splits, 0)


def _owner(cu, query):
    """The last b with cu[b] <= query; -1 if there is none."""

    def halve(_, state):
        low, high = state  # cu[low] <= query < cu[high], as it were
        middle = lax.div(low + high, i32(2))
        after = cu[jnp.clip(middle, 0, cu.shape[0] - 1)] <= query
        return jnp.where(after, middle, low), jnp.where(after, high, middle)

    return lax.fori_loop(0, cu.shape[0].bit_length() + 1, halve, (i32(-1), i32(cu.shape[0])))[0]


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


def _write(plan, state, query, head, column, out, lse):
    m, total, accumulator = state
    seen = total > 0
    result = _scaled(accumulator, jnp.where(seen, 1 / total, 0.0))
    start, rows = (query, head, i32(0)), jnp.minimum(plan.N - head, ptx.TILE_ROWS)
    decode_rows.st_global(out, start, result.astype(out.dtype), rows, column)

    @pl.when(column == 0)
    def _():
        log = jnp.where(seen, m + jnp.log(total), -jnp.inf)
        decode_rows.st_global_rows(lse, start, log, rows)

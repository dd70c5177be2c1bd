"""What the consumers of the backward kernel share: weights of a tile of scores, the order of sums, the way out.

A consumer sets `x.own_keys` and `x.own_queries`, the first of the tile's keys and of a block's queries that the
warpgroup's scores `[64 keys, x.columns queries]` belong to.
"""

import math

import jax.numpy as jnp
from jax import lax

from jattn.pallas import pieces
from jattn.pallas._compat import pl, plgpu
from jattn.pallas.hopper import dropout, gradients, memory, ptx, scores, softmax
from jattn.pallas.hopper.backward_plan import block_of, head_of, rank_of, row_of
from jattn.pallas.hopper.lists import i32

_LOG2E = math.log2(math.e)


def weigh(x, tile, g, i, s, rows, masked, kept):
    """Scores of a step to `(weights that dropout kept, in 16 bits; weights times the slope of what changed scores)`.

    What changes scores is done slice by slice to the end, so that few values are live.

    Args:
        rows: lse and delta of the step's block in shared memory.
    """
    p, place = x.plan, _place_of_scores(x, tile, g, i)
    bounds = _visible_queries(x, tile, place.row) if masked else (None, None)
    ruled = masked and p.rule is not None

    def one_slice(part, start, width):
        slope = None
        if p.modified:
            part, slope = scores.modify_slice(
                place, part, start, width, scale=scale(x), bias=x.bias, mod=p.mod,
                aux=tuple(zip(x.aux, p.aux_kinds, strict=True)), soft_cap=p.soft_cap, slope=True,
            )  # fmt: skip
        if ruled:
            part = scores.hide_slice(place, part, start, width, p.rule, x.mask_arrays)
        part = softmax.mask_columns(part, *(None if bound is None else bound - start for bound in bounds))
        weights = gradients.weights(part, rows, _LOG2E if p.modified else p.scale * _LOG2E, start, x.own_queries)
        by_score = weights if slope is None else jnp.where(weights > 0, weights * slope, 0.0)
        return (weights if kept is None else dropout.keep(weights, kept, start)).astype(p.dtype), by_score

    if p.modified or ruled or kept is not None:
        return scores.in_slices(s, one_slice)
    return one_slice(s, 0, s.shape[1])


def kept(x, tile, g, i):
    """Which weights of a step dropout kept, or None: all."""
    p = x.plan
    if not p.dropout_threshold:
        return None
    place = _place_of_scores(x, tile, g, i)
    first_batch, first_head, _, first_key = place.origin
    position, key = place.row + tile.offset + first_key, place.column + first_key
    return dropout.kept(
        x.columns, (x.dropout_key[0], x.dropout_key[1]), place.batch + first_batch, place.head + first_head, position,
        key, p.dropout_threshold, aligned=p.offset is not None and p.offset % 16 == 0,
    )  # fmt: skip


def _place_of_scores(x, tile, g, i):
    row, key = row_of(x, tile, i) + x.own_queries, tile.key + x.own_keys
    return scores.Place(
        batch=tile.sequence, head=head_of(x, tile, g), row=row, column=key, offset=tile.offset,
        array_row=row + tile.queries_start, array_column=key + tile.keys_start, diagonal_origin=x.plan.T - 1,
        origin=pieces.origin(x.plan, x), transposed=True,
    )  # fmt: skip


def _visible_queries(x, tile, row):
    """Columns `[low, high)` of the tile that begins with query `row` which see each of the warpgroup's keys, int32
    `[64]`; None: all."""
    p = x.plan
    key = tile.key + x.own_keys + ptx.row_numbers()
    position = row + tile.offset
    low = jnp.where(key < tile.key_length, 0 if p.right is None else key - (position + p.right), p.config.block_q)
    return low, None if p.left is None else key + (p.left + 1 - position)


def score_gradient(x, by_score, dp, rows, kept):
    """dsᵀ of a step in 16 bits, from `weigh`'s second result and the product of values and cotangents."""
    if kept is not None:
        dp = dropout.keep(dp * _kept_inverse(x.plan), kept)
    return gradients.score_gradient(by_score, dp, rows, x.own_queries).astype(x.plan.dtype)


def write_keys(x, tile, dk: list, dv: list):
    """Gradients of 64 keys from `x.own_keys` on and of their values: pairs of a first column and its columns' sums."""
    p = x.plan
    first = tile.key + x.own_keys
    start = tile.batch, tile.keys_start + first, tile.head
    rows = (p.S if tile.keys is None else tile.keys) - first
    for column, part in dk:
        memory.st_global(x.dk, start, (part * scale(x)).astype(p.result_dtype), rows, column)
    for column, part in dv:
        part = part if p.dropout_threshold == 0 else part * _kept_inverse(p)
        memory.st_global(x.dv, start, part.astype(p.result_dtype), rows, column)


def scale(x):
    return x.scale[0] if x.plan.scale is None else x.plan.scale


def _kept_inverse(plan) -> float:
    return 1 / (1 - plan.dropout_threshold / 65536)


def add_dq(x, tile, g, i, parts: list, row=0):
    """Adds to dq of a step's block, from its row `row` on: pairs of a first column and sums `[64, 32 or 64]`."""
    row = tile.queries_start + block_of(x, tile, i) * x.plan.config.block_q + row
    adder = tile.number * x.plan.config.WARPGROUPS + x.warpgroup
    for column, part in parts:
        start = tile.batch, row, head_of(x, tile, g), column
        memory.reduce_add(x.dq, start, x.dq_smem.at[x.warpgroup], part, adder=adder)


def turn_of(x, tile, g, i):
    """For a deterministic plan: the entry of `x.added` that counts what this warpgroup's part of a step's block has had
    added, how many additions come before this tile's, and how many were there just now. Else None."""
    p = x.plan
    if not p.deterministic:
        return None
    block = block_of(x, tile, i)
    row = lax.div(i32(tile.rows_start), i32(p.config.block_q)) + block
    pair = tile.batch * p.N + head_of(x, tile, g)
    entry = (pair * p.query_blocks + row) * p.config.WARPGROUPS + x.warpgroup
    return entry, rank_of(x, tile, i, block), memory.peek(x.added, entry)


def await_turn(x, turn):
    """Before `add_dq`: waits for the tiles behind this one. No product may be in flight, for threads part here."""
    if turn is not None:
        memory.await_count(x.added, *turn)


def announce(x, entry):
    """What the last `add_dq` has added is there, and the next tile may add; −1: there was none. While products are in
    flight, for it takes a while."""
    if entry is None:
        return

    @pl.when(entry >= 0)
    def _():
        plgpu.wait_smem_to_gmem(0)
        memory.count_up(x.added, entry)

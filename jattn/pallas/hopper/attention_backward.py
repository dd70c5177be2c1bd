"""Backward of softmax attention on compute capability 9.0 (H100, H200): dq, dk and dv in one kernel, five products.

A thread block owns 128 keys of one key/value head, 64 a consumer warpgroup, and walks the query blocks that see them:

    sᵀ = k · q[block]ᵀ          dpᵀ = v · dout[block]ᵀ                        (tensor core, both at once)
    pᵀ = exp(sᵀ − lse)          dsᵀ = pᵀ · (dpᵀ − delta)
    dv += pᵀ · dout[block]      dk += dsᵀ · q[block]       dq[block] += ds · k

Everything is kept transposed, so that pᵀ and dsᵀ stay in registers as left operands. Only ds · k needs the dsᵀ of both
warpgroups: they pass through shared memory, and the product is formed one step late, so that the warpgroups may run
half a step apart and take turns on the tensor core (one computes exponentials while the other multiplies):

    producer     K Q0 V dO0 | Q1 dO1 | …
    consumer     S0 dP0, p, ds | dV dQ(−1) dK | S1 dP1, p, ds | dV dQ(0) dK | …

dq is summed over key tiles in float32 by TMA reductions in L2, in an order that changes from run to run, and its last
bits with it. A deterministic plan counts additions: a tile waits until those behind it have added to the block of dq.
Sources: FlashAttention-2 and -3 (Dao, 2023; Shah et al., 2024).
"""

import math
from types import SimpleNamespace

import jax
import jax.numpy as jnp
from jax import lax

from jattn.pallas._compat import kernel_in_place, mapped_in_turn, pl, plgpu
from jattn.pallas.hopper import dropout, gradients, memory, ptx, scores, softmax
from jattn.pallas.hopper.backward_plan import Inputs, Plan, block_of, masked_steps, rank_of, tile_of
from jattn.pallas.hopper.lists import i32

_LOG2E = math.log2(math.e)
_STAGES = 2  # query blocks in shared memory at once
_DS_SLOTS = 3  # dsᵀ of this step and of the two before
_TURN_BARRIERS, _FREE_BARRIERS, _EXCHANGE_BARRIERS = 5, 7, 11  # first ids of the named barriers


# --- kernel -----------------------------------------------------------------------------------------------------------


def _kernel(
    plan: Plan,
    inputs: Inputs,
    # outputs (HBM); what is added to comes first
    dq,  # float32 [B, T, N, H]
    added,  # int32 [B, N, query blocks, parts of a block]: what has been added to dq; None: in any order
    dk,  # [B, S, K, H]
    dv,  # [B, S, K, D]
    *,
    # shared memory, in slabs of 64 columns (`ptx.slabs`)
    k_smem,  # [slabs of H, 128, 64]
    v_smem,  # [slabs of D, 128, 64]
    q_smem,  # [stages, slabs of H, block_q, 64]
    dout_smem,  # [stages, slabs of D, block_q, 64]
    row_smem,  # float32 [stages, 2, block_q]: lse and delta
    ds_smem,  # [3, warpgroups, slabs of block_q, 64 keys, 64]: dsᵀ of this step and of the two before; or [3 ·
    # warpgroups, 1, ...], if each reads its own alone
    dq_smem,  # float32 [warpgroups, 2, 64, 32]: a dq on its way to HBM
    # barriers
    k_ready,  # [1] TMA
    v_ready,  # [1] TMA
    landed,  # [1] TMA: a block that the producer has to clean before it is ready
    q_ready,  # [stages] TMA: q, lse and delta
    dout_ready,  # [stages] TMA
    tile_free,  # [1] consumers: both are done with the keys and values
    q_free,  # [stages] named: both consumers are done with the slot
    dout_free,  # [stages] named
    turn,  # [warpgroups] named: the tensor core is this warpgroup's
    exchange,  # [2 parities · warpgroups] named: the other warpgroup's dsᵀ of a step is in shared memory
):
    x = SimpleNamespace(
        plan=plan, **vars(inputs), dq=dq, added=added, dk=dk, dv=dv, k_smem=k_smem, v_smem=v_smem, q_smem=q_smem,
        dout_smem=dout_smem, row_smem=row_smem, ds_smem=ds_smem, dq_smem=dq_smem, k_ready=k_ready, v_ready=v_ready,
        landed=landed, q_ready=q_ready, dout_ready=dout_ready, tile_free=tile_free, q_free=q_free, dout_free=dout_free,
        turn=turn, exchange=exchange,
        block=lax.axis_index("block"), warpgroup=lax.axis_index("warpgroup"),
    )
    rounds, consumers = x.table.shape[0] - 2, plan.config.WARPGROUPS
    x.items, x.zero = x.table[rounds, x.block], x.table[rounds + 1, x.block]

    @pl.when(x.warpgroup == consumers)
    def _():
        plgpu.set_max_registers(24, action="decrease")
        _produce(x)

    @pl.when(x.warpgroup < consumers)
    def _():
        plgpu.set_max_registers(240, action="increase")
        _consume(x)


# --- producer ---------------------------------------------------------------------------------------------------------


def _produce(x):
    """Copies in the order of need; the first queries of a tile arrive while the tile before is written out."""

    def one_tile(r, position):
        tile = tile_of(x, r)
        _load_queries(x, tile, i32(0), i32(0), position)
        pl.when(r > 0)(lambda: plgpu.barrier_wait(x.tile_free.at[0]))
        rows = pl.ds(tile.keys_start + tile.key, x.plan.config.KEYS)
        existing = None if x.plan.key_length is not None else tile.key_length - tile.key
        _copy_in(x, x.k.at[tile.batch, rows, tile.head], x.k_smem, x.k_ready.at[0], existing)
        _copy_in(x, x.v.at[tile.batch, rows, tile.head], x.v_smem, x.v_ready.at[0], existing)
        _load_cotangents(x, tile, i32(0), i32(0), position)
        steps = tile.blocks * x.plan.group

        def one_step(t, place):
            g, i = _next(x, tile, *place)
            _load_queries(x, tile, g, i, position + t)
            _load_cotangents(x, tile, g, i, position + t)
            return g, i

        lax.fori_loop(1, steps, one_step, (i32(0), i32(0)))
        return position + steps

    position = lax.fori_loop(0, x.items, one_tile, i32(0))
    _drain(x, position)


def _next(x, tile, g, i):
    """The step after block i of head g in the group: the blocks of one head come after those of another."""
    if x.plan.group == 1:
        return g, i + 1
    last = i + 1 == tile.blocks
    return jnp.where(last, g + 1, g), jnp.where(last, 0, i + 1)


def _previous(x, tile, g, i):
    if x.plan.group == 1:
        return g, i - 1
    return jnp.where(i == 0, g - 1, g), jnp.where(i == 0, tile.blocks, i) - 1


def _ring(position):
    return jnp.bitwise_and(position, i32(_STAGES - 1))


def _load_queries(x, tile, g, i, position):
    slot, head, row = _ring(position), _head_of(x, tile, g), _row_of(x, tile, i)
    pl.when(position >= _STAGES)(lambda: x.q_free.bar_sync(slot))
    _copy_in(x, _query_rows(x, x.q, tile, head, row), x.q_smem.at[slot], x.q_ready.at[slot], _existing(x, tile, row))
    rows = pl.ds(tile.rows_start + row, x.plan.config.block_q)
    for k, array in enumerate((x.lse, x.delta)):
        plgpu.copy_gmem_to_smem(array.at[tile.batch, head, rows], x.row_smem.at[slot, k], x.q_ready.at[slot])


def _load_cotangents(x, tile, g, i, position):
    slot, row = _ring(position), _row_of(x, tile, i)
    pl.when(position >= _STAGES)(lambda: x.dout_free.bar_sync(slot))
    rows = _query_rows(x, x.dout, tile, _head_of(x, tile, g), row)
    _copy_in(x, rows, x.dout_smem.at[slot], x.dout_ready.at[slot], _existing(x, tile, row))


def _head_of(x, tile, g):
    return tile.head if x.plan.group == 1 else tile.head * x.plan.group + g


def _row_of(x, tile, i):
    """First query, counted in its sequence, of a tile's i-th block."""
    return block_of(x, tile, i) * x.plan.config.block_q


def _query_rows(x, array, tile, head, row):
    return array.at[tile.batch, pl.ds(tile.queries_start + row, x.plan.config.block_q), head]


def _existing(x, tile, row):
    """Rows of the block of queries that exist; None: TMA reads zeros for the others."""
    return None if x.plan.query_length is not None else tile.query_length - row


def _copy_in(x, rows, smem, ready, existing):
    """Rows that do not exist may hold NaN, which a weight of 0 would not silence: they are cleared."""
    if existing is None:
        _copy_slabs(x, rows, smem, ready)
        return
    pl.when(existing >= smem.shape[1])(lambda: _copy_slabs(x, rows, smem, ready))

    @pl.when(existing < smem.shape[1])
    def _():
        _copy_slabs(x, rows, smem, x.landed.at[0])
        plgpu.barrier_wait(x.landed.at[0])
        memory.st_shared_zero_rows(smem, existing)
        plgpu.commit_smem()
        for _ in range(smem.shape[0]):  # as many arrivals as the copies would have made
            plgpu.barrier_arrive(ready)


def _copy_slabs(x, rows, smem, barrier):
    for i in range(smem.shape[0]):
        start = i * ptx.SLAB
        if start + ptx.SLAB > rows.shape[-1]:
            start = jnp.minimum(x.block, 0) + start  # Pallas refuses a constant slice past the edge
        plgpu.copy_gmem_to_smem(rows.at[:, pl.ds(start, ptx.SLAB)], smem.at[i], barrier)


def _drain(x, position):
    """Every barrier phase is waited for before the thread block ends."""
    for i in range(_STAGES):

        @pl.when(position >= _STAGES - i)
        def _(i=i):
            x.q_free.bar_sync(_ring(position + i))
            x.dout_free.bar_sync(_ring(position + i))

    plgpu.barrier_wait(x.tile_free.at[0])


# --- consumer ---------------------------------------------------------------------------------------------------------


def _consume(x):
    p, w = x.plan, x.warpgroup
    keys, block_q = p.config.KEYS, p.config.block_q
    k = ptx.matrix(lambda _: x.k_smem, keys, p.H)
    x.k_own = k.part(w, rows=ptx.TILE_ROWS)
    x.v_own = ptx.matrix(lambda _: x.v_smem, keys, p.D).part(w, rows=ptx.TILE_ROWS)
    x.q_columns = ptx.matrix(lambda i: x.q_smem.at[i], block_q, p.H)
    x.dout_columns = ptx.matrix(lambda i: x.dout_smem.at[i], block_q, p.D)
    x.q_rows = ptx.matrix(lambda i: x.q_smem.at[i], block_q, p.H, along_rows=True)
    x.dout_rows = ptx.matrix(lambda i: x.dout_smem.at[i], block_q, p.D, along_rows=True)
    k_rows = ptx.matrix(lambda _: x.k_smem, keys, p.H, along_rows=True)
    if p.shared_keys:  # of ds · k a warpgroup forms its own queries, or its own columns
        x.dq_row, x.dq_column = (w, i32(0)) if block_q == 128 else (i32(0), w)
        x.k_rows = k_rows.slab(x.dq_column)
    else:  # both form all of it, of their own keys
        x.dq_row, x.dq_column, x.k_rows = i32(0), i32(0), k_rows.slab(0).part(w, rows=ptx.TILE_ROWS)
    x.ds_base = ptx.address(x.ds_smem)
    pl.when(w == p.config.WARPGROUPS - 1)(lambda: x.turn.bar_arrive(0))
    lax.fori_loop(0, x.items, lambda r, position: _one_tile(x, r, position), i32(0))
    pl.when(w == 0)(lambda: x.turn.bar_sync(0))
    plgpu.wait_smem_to_gmem(0)


def _take_turn(x):
    x.turn.bar_sync(x.warpgroup)


def _pass_turn(x):
    x.turn.bar_arrive(1 - x.warpgroup)


def _ds_place(x, position):
    """Where dsᵀ of a step is in `ds_smem`: slot and part of what this warpgroup has written."""
    slot = lax.rem(position, i32(_DS_SLOTS))
    return (slot, x.warpgroup) if x.plan.shared_keys else (slot + _DS_SLOTS * x.warpgroup, 0)


def _ds(x, position):
    """dsᵀ of a step, as the left operand of ds · k."""
    return ptx.stack(x.ds_smem, x.ds_base, _ds_place(x, position)[0], x.dq_row)


def _one_tile(x, r, position):
    p, tile = x.plan, tile_of(x, r)
    steps = tile.blocks * p.group
    plgpu.barrier_wait(x.k_ready.at[0])
    plgpu.barrier_wait(x.v_ready.at[0])
    carry = _zeros(p.H), _zeros(p.D)
    first, last = masked_steps(x, tile)

    def one_head(g, carry):
        def step(masked):
            return lambda i, c: _step(x, tile, position, i32(g), i, c, masked)

        if p.left is not None and not p.listed and p.config.block_q == 128:  # a third loop would spill
            return lax.fori_loop(0, tile.blocks, step(True), carry)
        if p.rule is not None or p.right is not None or p.cut_by_length:
            carry = lax.fori_loop(0, first, step(True), carry)
        if p.rule is None or p.listed:
            carry = lax.fori_loop(first, last, step(False), carry)
        return lax.fori_loop(last, tile.blocks, step(True), carry) if p.left is not None and not p.listed else carry

    carry = one_head(0, carry) if p.group == 1 else lax.fori_loop(0, p.group, one_head, carry)
    _receive(x, position + steps - 1)
    (dq,) = ptx.wgmma_wait_group(0, ptx.wgmma_tt(_ds(x, position + steps - 1), x.k_rows, p.dtype))
    plgpu.barrier_arrive(x.tile_free.at[0])
    _add_dq(x, tile, i32(p.group - 1), tile.blocks - 1, dq)
    _write_keys(x, tile, *carry)
    return position + steps


def _write_keys(x, tile, dk, dv):
    p = x.plan
    first = tile.key + x.warpgroup * ptx.TILE_ROWS
    start = tile.batch, tile.keys_start + first, tile.head
    rows = (p.S if tile.keys is None else tile.keys) - first
    memory.st_global(x.dk, start, (dk * _scale(x)).astype(p.dtype), rows)
    dv = dv if p.dropout_threshold == 0 else dv * _kept_inverse(p)
    memory.st_global(x.dv, start, dv.astype(p.dtype), rows)


def _scale(x):
    return x.scale[0] if x.plan.scale is None else x.plan.scale


def _kept_inverse(plan) -> float:
    return 1 / (1 - plan.dropout_threshold / 65536)


def _zeros(columns):
    return plgpu.layout_cast(jnp.zeros((ptx.TILE_ROWS, columns), jnp.float32), ptx.WGMMA)


def _step(x, tile, position, g, i, carry, masked):
    """The i-th query block of the g-th head of the group."""
    p, w = x.plan, x.warpgroup
    dk, dv = carry
    t = i if p.group == 1 else g * tile.blocks + i
    now = position + t
    slot, parity = _ring(now), jnp.bitwise_and(now, i32(1))
    kept = _kept(x, tile, g, i) if p.dropout_threshold else None
    plgpu.barrier_wait(x.q_ready.at[slot])
    _take_turn(x)
    s = ptx.wgmma_ss(x.k_own, x.q_columns.at(slot), p.dtype)
    plgpu.barrier_wait(x.dout_ready.at[slot])
    dp = None if p.config.separate else ptx.wgmma_ss(x.v_own, x.dout_columns.at(slot), p.dtype)
    _pass_turn(x)
    (s,) = ptx.wgmma_wait_group(0 if p.config.separate else 1, s)
    weights, by_score = _weigh(x, tile, g, i, s, x.row_smem.at[slot], masked, kept)
    if p.config.separate:
        _take_turn(x)
        dp = ptx.wgmma_ss(x.v_own, x.dout_columns.at(slot), p.dtype)
        _pass_turn(x)
    (dp,) = ptx.wgmma_wait_group(0, dp)
    dp = dp if kept is None else dropout.keep(dp * _kept_inverse(p), kept)
    ds = gradients.score_gradient(by_score, dp, x.row_smem.at[slot]).astype(p.dtype)
    pl.when(t > 0)(lambda: _receive(x, now - 1))
    memory.stmatrix(ds, x.ds_smem.at[_ds_place(x, now)])
    ptx.fence_async_shared()  # a warpgroup reads dsᵀ behind `_receive` alone, its own too
    x.exchange.bar_arrive(parity * 2 + (1 - w))
    _take_turn(x)
    dv = ptx.wgmma_rs(dv, weights, x.dout_rows.at(slot))
    # At a tile's first step this multiplies stale memory, and nobody looks: a branch around a product costs more.
    dq = ptx.wgmma_tt(_ds(x, now + 2), x.k_rows, p.dtype)
    dk = ptx.wgmma_rs(dk, ds, x.q_rows.at(slot))
    _pass_turn(x)
    dq, dv = ptx.wgmma_wait_group(1, dq, dv)
    x.dout_free.bar_arrive(slot)
    if p.deterministic:  # threads part while they await their turn, which no product in flight survives
        (dk,) = ptx.wgmma_wait_group(0, dk)
        x.q_free.bar_arrive(slot)
    pl.when(t > 0)(lambda: _add_dq(x, tile, *_previous(x, tile, g, i), dq))
    if not p.deterministic:
        (dk,) = ptx.wgmma_wait_group(0, dk)
        x.q_free.bar_arrive(slot)
    return dk, dv


def _receive(x, step):
    """Waits for the other warpgroup's dsᵀ of a step."""
    x.exchange.bar_sync(jnp.bitwise_and(step, i32(1)) * 2 + x.warpgroup)


def _weigh(x, tile, g, i, s, rows, masked, kept):
    """Scores of a step to `(weights that dropout kept, in 16 bits; weights times the slope of what changed scores)`.

    What changes scores is done slice by slice to the end, so that few values are live.
    """
    p, place = x.plan, _place_of_scores(x, tile, g, i)
    bounds = _visible_queries(x, tile, place.row) if masked else (None, None)
    ruled = masked and p.rule is not None

    def one_slice(part, start, width):
        slope = None
        if p.modified:
            part, slope = scores.modify_slice(
                place, part, start, width, scale=_scale(x), bias=x.bias, mod=p.mod,
                aux=tuple(zip(x.aux, p.aux_kinds, strict=True)), soft_cap=p.soft_cap, slope=True,
            )  # fmt: skip
        if ruled:
            part = scores.hide_slice(place, part, start, width, p.rule, x.mask_arrays)
        part = softmax.mask_columns(part, *(None if bound is None else bound - start for bound in bounds))
        weights = gradients.weights(part, rows, _LOG2E if p.modified else p.scale * _LOG2E, start)
        by_score = weights if slope is None else jnp.where(weights > 0, weights * slope, 0.0)
        return (weights if kept is None else dropout.keep(weights, kept, start)).astype(p.dtype), by_score

    if p.modified or ruled or kept is not None:
        return scores.in_slices(s, one_slice)
    return one_slice(s, 0, s.shape[1])


def _kept(x, tile, g, i):
    """Which weights of a step dropout kept. Before the products, which leave no registers for it."""
    p, place = x.plan, _place_of_scores(x, tile, g, i)
    batch, head = place.batch + place.origin[0], place.head + place.origin[1]
    return dropout.kept(
        p.config.block_q, (x.dropout_key[0], x.dropout_key[1]), batch, head, place.row + tile.offset, place.column,
        p.dropout_threshold, aligned=p.offset is not None and p.offset % 16 == 0,
    )  # fmt: skip


def _place_of_scores(x, tile, g, i):
    row, key = _row_of(x, tile, i), tile.key + x.warpgroup * ptx.TILE_ROWS
    return scores.Place(
        batch=tile.sequence, head=_head_of(x, tile, g), row=row, column=key, offset=tile.offset,
        array_row=row + tile.queries_start, array_column=key + tile.keys_start, diagonal_origin=x.plan.T - 1,
        origin=(0, 0) if x.origin is None else (x.origin[0], x.origin[1]), transposed=True,
    )  # fmt: skip


def _visible_queries(x, tile, row):
    """Columns `[low, high)` of the tile that begins with query `row` which see each of the warpgroup's keys, int32
    `[64]`; None: all."""
    p = x.plan
    key = tile.key + x.warpgroup * ptx.TILE_ROWS + ptx.row_numbers()
    position = row + tile.offset
    low = jnp.where(key < tile.key_length, 0 if p.right is None else key - (position + p.right), p.config.block_q)
    return low, None if p.left is None else key + (p.left + 1 - position)


def _add_dq(x, tile, g, i, dq):
    head = _head_of(x, tile, g)
    block, w, deterministic = block_of(x, tile, i), x.warpgroup, x.plan.deterministic
    count = _count_of(x, tile, head, block)
    if deterministic:
        rank = rank_of(x, tile, i, block)
        memory.await_count(x.added, count, rank if x.plan.shared_keys else rank * x.plan.config.WARPGROUPS + w)
    row = block * x.plan.config.block_q + x.dq_row * ptx.TILE_ROWS
    start = tile.batch, tile.queries_start + row, head, x.dq_column * ptx.SLAB
    memory.reduce_add(x.dq, start, x.dq_smem.at[w], dq, adder=tile.number * x.plan.config.WARPGROUPS + w)
    if deterministic:  # at once: the other warpgroup may wait for it, and this one for its turn after that
        plgpu.wait_smem_to_gmem(0)
        memory.count_up(x.added, count)


def _count_of(x, tile, head, block):
    part = x.warpgroup if x.plan.shared_keys else 0
    return tile.batch, head, lax.div(tile.rows_start, i32(x.plan.config.block_q)) + block, part


# --- host -------------------------------------------------------------------------------------------------------------


def launch(plan: Plan, inputs: Inputs, *, interpret=False):
    """Runs the kernel: `(dq [B, T, N, H], dk [B, S, K, H], dv [B, S, K, D])`."""

    def run(inputs):
        dq, dk, dv = _launch(plan, inputs, interpret)
        scale = plan.scale if inputs.scale is None else inputs.scale
        return (dq * scale).astype(plan.dtype), dk, dv

    return mapped_in_turn(run, unrolled=bool(interpret))(inputs)


def _launch(plan, inputs, interpret):
    """dq is float32 and unscaled."""
    config = plan.config

    def smem(*leading, rows, columns):
        return plgpu.SMEM((*leading, ptx.slabs(columns), rows, ptx.SLAB), plan.dtype, transforms=ptx.TRANSFORMS)

    h, d, consumers = ptx.slabs(plan.H), ptx.slabs(plan.D), config.WARPGROUPS
    scratch = dict(
        k_smem=smem(rows=config.KEYS, columns=plan.H),
        v_smem=smem(rows=config.KEYS, columns=plan.D),
        q_smem=smem(_STAGES, rows=config.block_q, columns=plan.H),
        dout_smem=smem(_STAGES, rows=config.block_q, columns=plan.D),
        row_smem=plgpu.SMEM((_STAGES, 2, config.block_q), jnp.float32),
        ds_smem=smem(
            *((_DS_SLOTS, consumers) if plan.shared_keys else (_DS_SLOTS * consumers, 1)), rows=ptx.TILE_ROWS,
            columns=config.block_q,
        ),
        dq_smem=plgpu.SMEM(
            (consumers, ptx.SLAB // memory.FLOAT_SLAB, ptx.TILE_ROWS, memory.FLOAT_SLAB), jnp.float32,
            transforms=ptx.TRANSFORMS,
        ),
        k_ready=plgpu.Barrier(num_arrivals=h, num_barriers=1),
        v_ready=plgpu.Barrier(num_arrivals=d, num_barriers=1),
        landed=plgpu.Barrier(num_arrivals=h, num_barriers=1),  # h == d, see `why_not_backward`
        q_ready=plgpu.Barrier(num_arrivals=h + 2, num_barriers=_STAGES),
        dout_ready=plgpu.Barrier(num_arrivals=d, num_barriers=_STAGES),
        tile_free=plgpu.Barrier(num_arrivals=consumers, num_barriers=1),
        turn=ptx.NamedBarriers(_TURN_BARRIERS, consumers, 1),
        q_free=ptx.NamedBarriers(_FREE_BARRIERS, _STAGES, consumers),
        dout_free=ptx.NamedBarriers(_FREE_BARRIERS + _STAGES, _STAGES, consumers),
        exchange=ptx.NamedBarriers(_EXCHANGE_BARRIERS, 2 * consumers, 1),
    )  # fmt: skip
    operands, structure = jax.tree.flatten(inputs)

    def body(*refs, **allocations):
        read, (dq, *added, dk, dv) = jax.tree.unflatten(structure, refs[: len(operands)]), refs[len(operands) :]
        _kernel(plan, read, dq, added[0] if added else None, dk, dv, **allocations)

    adders = (plan.tiles * consumers,) if interpret else ()
    buffers = [jnp.zeros((*adders, plan.B, plan.T, plan.N, plan.H), jnp.float32)]
    if plan.deterministic:
        buffers.append(jnp.zeros((plan.B, plan.N, plan.query_blocks, consumers), jnp.int32))
    results = kernel_in_place(
        body,
        name="jattn_attention_backward",
        out_type=tuple(jax.ShapeDtypeStruct((plan.B, plan.S, plan.K, n), plan.dtype) for n in (plan.H, plan.D)),
        scratch=scratch,
        grid={"block": inputs.table.shape[1]},
        warpgroups=consumers + 1,
        interpret=interpret,
        approximate=plan.mod is None and plan.rule is None,
    )(operands, buffers)
    return results[0].sum(0) if interpret else results[0], *results[-2:]

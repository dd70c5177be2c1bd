"""The consumers of the backward kernel for head dims to 128: each owns 64 keys, all of whose gradients it sums.

pᵀ and dsᵀ of its keys stay in registers as left operands. Only ds · k needs the dsᵀ of both warpgroups: they pass
through shared memory, and the product is formed one step late, so that the warpgroups may run half a step apart and
take turns on the tensor core (one computes exponentials while the other multiplies):

    producer     K Q0 V dO0 | Q1 dO1 | …
    consumer     S0 dP0, p, ds | dV dQ(−1) dK | S1 dP1, p, ds | dV dQ(0) dK | …
"""

import jax.numpy as jnp
from jax import lax

from jattn.pallas._compat import pl, plgpu
from jattn.pallas.hopper import backward_producer, memory, ptx
from jattn.pallas.hopper.backward_plan import Plan, masked_steps, previous_step, tile_of
from jattn.pallas.hopper.backward_producer import ring, smem
from jattn.pallas.hopper.backward_steps import (
    add_dq,
    announce,
    await_turn,
    kept,
    score_gradient,
    turn_of,
    weigh,
    write_keys,
)
from jattn.pallas.hopper.lists import i32

_DS_SLOTS = 3  # dsᵀ of this step and of the two before
_TURN_BARRIERS, _EXCHANGE_BARRIERS = 5, 11  # first ids of the named barriers


def scratch(plan: Plan) -> dict:
    consumers = plan.config.WARPGROUPS
    return backward_producer.scratch(plan, dout_stages=backward_producer.STAGES) | dict(
        ds_smem=smem(plan, _DS_SLOTS, consumers, rows=ptx.TILE_ROWS, columns=plan.config.block_q),
        dq_smem=memory.float_smem(consumers),
        turn=ptx.NamedBarriers(_TURN_BARRIERS, consumers, 1),  # the tensor core is this warpgroup's
        exchange=ptx.NamedBarriers(_EXCHANGE_BARRIERS, 2 * consumers, 1),  # the other's dsᵀ of a step is there
    )


def consume(x):
    p, w = x.plan, x.warpgroup
    x.own_keys, x.own_queries, x.columns = w * ptx.TILE_ROWS, 0, p.config.block_q
    keys, block_q = p.config.keys, p.config.block_q
    k = ptx.matrix(lambda _: x.k_smem, keys, p.H)
    x.k_own = k.part(w, rows=ptx.TILE_ROWS)
    x.v_own = ptx.matrix(lambda _: x.v_smem, keys, p.D).part(w, rows=ptx.TILE_ROWS)
    x.q_columns = ptx.matrix(lambda i: x.q_smem.at[i], block_q, p.H)
    x.dout_columns = ptx.matrix(lambda i: x.dout_smem.at[i], block_q, p.D)
    x.q_rows = ptx.matrix(lambda i: x.q_smem.at[i], block_q, p.H, along_rows=True)
    x.dout_rows = ptx.matrix(lambda i: x.dout_smem.at[i], block_q, p.D, along_rows=True)
    k_rows = ptx.matrix(lambda _: x.k_smem, keys, p.H, along_rows=True)
    # Of ds · k a warpgroup forms its own queries, or its own columns.
    x.dq_row, columns = (w, ptx.SLAB) if block_q == 128 else (i32(0), ptx.slabs(p.H) * ptx.SLAB // 2)
    x.dq_column = i32(0) if block_q == 128 else w * columns
    x.k_rows = k_rows.columns_from(x.dq_column, columns=columns)
    x.ds_base = ptx.address(x.ds_smem)
    pl.when(w == p.config.WARPGROUPS - 1)(lambda: x.turn.bar_arrive(0))
    lax.fori_loop(0, x.items, lambda r, position: _one_tile(x, r, position), i32(0))
    pl.when(w == 0)(lambda: x.turn.bar_sync(0))
    plgpu.wait_smem_to_gmem(0)


def _take_turn(x):
    x.turn.bar_sync(x.warpgroup)


def _pass_turn(x):
    x.turn.bar_arrive(1 - x.warpgroup)


def _ds(x, position):
    """dsᵀ of a step, as the left operand of ds · k."""
    return ptx.stack(x.ds_smem, x.ds_base, lax.rem(position, i32(_DS_SLOTS)), x.dq_row)


def _one_tile(x, r, position):
    p, tile = x.plan, tile_of(x, r)
    steps = tile.blocks * p.group
    plgpu.barrier_wait(x.k_ready.at[0])
    plgpu.barrier_wait(x.v_ready.at[0])
    carry = ptx.zeros(p.H), ptx.zeros(p.D), i32(-1) if p.deterministic else None
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
    end = i32(p.group - 1), tile.blocks - 1
    dk, dv, added = carry
    turn = turn_of(x, tile, *end)
    announce(x, added)
    await_turn(x, turn)
    _give_dq(x, tile, *end, dq)
    write_keys(x, tile, [(None, dk)], [(None, dv)])
    announce(x, turn and turn[0])
    return position + steps


def _step(x, tile, position, g, i, carry, masked):
    """The i-th query block of the g-th head of the group."""
    p, w = x.plan, x.warpgroup
    dk, dv, added = carry
    t = i if p.group == 1 else g * tile.blocks + i
    now = position + t
    slot, parity = ring(now), jnp.bitwise_and(now, i32(1))
    before = tuple(jnp.maximum(n, 0) for n in previous_step(x, tile, g, i))  # any at a tile's first step
    # Before the products, which leave no registers for it.
    stay, turn = kept(x, tile, g, i), turn_of(x, tile, *before)
    plgpu.barrier_wait(x.q_ready.at[slot])
    _take_turn(x)
    s = ptx.wgmma_ss(x.k_own, x.q_columns.at(slot), p.dtype)
    plgpu.barrier_wait(x.dout_ready.at[slot])
    dp = None if p.config.separate else ptx.wgmma_ss(x.v_own, x.dout_columns.at(slot), p.dtype)
    _pass_turn(x)
    (s,) = ptx.wgmma_wait_group(0 if p.config.separate else 1, s)
    weights, by_score = weigh(x, tile, g, i, s, x.row_smem.at[slot], masked, stay)
    if p.config.separate:
        _take_turn(x)
        dp = ptx.wgmma_ss(x.v_own, x.dout_columns.at(slot), p.dtype)
        _pass_turn(x)
    (dp,) = ptx.wgmma_wait_group(0, dp)
    ds = score_gradient(x, by_score, dp, x.row_smem.at[slot], stay)
    pl.when(t > 0)(lambda: _receive(x, now - 1))
    memory.stmatrix(ds, x.ds_smem.at[lax.rem(now, i32(_DS_SLOTS)), w])
    ptx.fence_async_shared()  # a warpgroup reads dsᵀ behind `_receive` alone, its own too
    x.exchange.bar_arrive(parity * 2 + (1 - w))
    pl.when(t > 0)(lambda: await_turn(x, turn))
    _take_turn(x)
    dv = ptx.wgmma_rs(dv, weights, x.dout_rows.at(slot))
    # At a tile's first step this multiplies stale memory, and nobody looks: a branch around a product costs more.
    dq = ptx.wgmma_tt(_ds(x, now + 2), x.k_rows, p.dtype)
    dk = ptx.wgmma_rs(dk, ds, x.q_rows.at(slot))
    _pass_turn(x)
    announce(x, added)
    dq, dv = ptx.wgmma_wait_group(1, dq, dv)
    x.dout_free.bar_arrive(slot)
    pl.when(t > 0)(lambda: _give_dq(x, tile, *before, dq))
    (dk,) = ptx.wgmma_wait_group(0, dk)
    x.q_free.bar_arrive(slot)
    return dk, dv, turn and jnp.where(t > 0, turn[0], -1)


def _receive(x, step):
    """Waits for the other warpgroup's dsᵀ of a step."""
    x.exchange.bar_sync(jnp.bitwise_and(step, i32(1)) * 2 + x.warpgroup)


def _give_dq(x, tile, g, i, dq):
    add_dq(x, tile, g, i, [(x.dq_column, dq)], x.dq_row * ptx.TILE_ROWS)

"""The consumers of the backward kernel for head dims past 128, and for mixed ones: a tile has 64 keys, and the
warpgroups divide the columns of all gradients between them, since no warpgroup has registers for 64 rows of two.

A warpgroup weighs 32 of a block's 64 queries. pᵀ and dsᵀ meet in shared memory, from which each multiplies all of them
with its columns. The next block's scores are formed while this block's dq is on its way out:

    producer     Q0 K V dO0 | Q1 dO1 | …
    consumer     S0 dP0 | p, ds | dV dQ dK S1 dP1 | p, ds | dV dQ dK S2 dP2 | …

The cotangents have one slot, which is free once dV is formed: two would not fit at head dim 256.
"""

import jax.numpy as jnp
from jax import lax

from jattn.pallas._compat import plgpu
from jattn.pallas.hopper import backward_producer, memory, ptx
from jattn.pallas.hopper.backward_plan import Plan, masked_steps, tile_of
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

_EXCHANGE_BARRIERS, _DONE_BARRIERS = 11, 13  # first ids of the named barriers


def scratch(plan: Plan) -> dict:
    consumers = plan.config.WARPGROUPS
    square = dict(rows=ptx.TILE_ROWS, columns=plan.config.block_q)
    return backward_producer.scratch(plan, dout_stages=1) | dict(
        p_smem=smem(plan, **square),
        ds_smem=smem(plan, 1, 1, **square),
        dq_smem=memory.float_smem(consumers),
        exchange=ptx.NamedBarriers(_EXCHANGE_BARRIERS, consumers, 1),  # the other's half of pᵀ and dsᵀ is there
        done=ptx.NamedBarriers(_DONE_BARRIERS, consumers, 1),  # the other has multiplied what it wrote before
    )


def consume(x):
    p, w = x.plan, x.warpgroup
    keys, block_q = p.config.keys, p.config.block_q
    x.columns = block_q // p.config.WARPGROUPS
    x.own_keys, x.own_queries = 0, w * x.columns
    k_rows = ptx.matrix(lambda _: x.k_smem, keys, p.H, along_rows=True)
    q_rows = ptx.matrix(lambda i: x.q_smem.at[i], block_q, p.H, along_rows=True)
    dout_rows = ptx.matrix(lambda i: x.dout_smem.at[i], block_q, p.D, along_rows=True)
    x.k_all, x.v_all = ptx.matrix(lambda _: x.k_smem, keys, p.H), ptx.matrix(lambda _: x.v_smem, keys, p.D)
    x.q_own = ptx.matrix(lambda i: x.q_smem.at[i], block_q, p.H).part(w, rows=x.columns)
    x.dout_own = ptx.matrix(lambda i: x.dout_smem.at[i], block_q, p.D).part(w, rows=x.columns)
    x.h_parts, x.d_parts = _parts(p.H, w), _parts(p.D, w)
    x.k_parts, x.q_parts = ([m.columns_from(first, columns=n) for first, n in x.h_parts] for m in (k_rows, q_rows))
    x.dout_parts = [dout_rows.columns_from(first, columns=n) for first, n in x.d_parts]
    x.p_all = ptx.matrix(lambda _: x.p_smem, keys, block_q)
    x.ds_all = ptx.matrix(lambda _: x.ds_smem.at[0, 0], keys, block_q)
    x.ds_base = ptx.address(x.ds_smem)
    x.done.bar_arrive(1 - w)
    lax.fori_loop(0, x.items, lambda r, position: _one_tile(x, r, position), i32(0))
    x.done.bar_sync(w)
    plgpu.wait_smem_to_gmem(0)


def _parts(columns: int, w) -> list:
    """The `(first, number)` of the columns that warpgroup w owns: half of the slabs, and half of a slab if odd."""
    whole, odd = divmod(ptx.slabs(columns), 2)
    parts = [(w * ((whole + odd) * ptx.SLAB), whole * ptx.SLAB)] if whole else []
    return parts + ([(w * (ptx.SLAB // 2) + whole * ptx.SLAB, ptx.SLAB // 2)] if odd else [])


def _one_tile(x, r, position):
    p, tile = x.plan, tile_of(x, r)
    plgpu.barrier_wait(x.k_ready.at[0])
    plgpu.barrier_wait(x.v_ready.at[0])
    dk, dv = ([ptx.zeros(n) for _, n in parts] for parts in (x.h_parts, x.d_parts))
    carry = dk, dv, *_form_scores(x, position), i32(-1) if p.deterministic else None
    may_mask = p.rule is not None or p.right is not None or p.left is not None or p.cut_by_length
    first, _ = masked_steps(x, tile) if p.left is None else (tile.blocks, None)

    def one_head(g, carry):
        def step(masked):
            return lambda i, c: _step(x, tile, position, i32(g), i, c, masked)

        end = tile.blocks - (i32(g) == p.group - 1).astype(jnp.int32)  # without the tile's last step
        first_free = jnp.minimum(first, end)
        if may_mask:
            carry = lax.fori_loop(0, first_free, step(True), carry)
        if p.left is None and (p.rule is None or p.listed):
            carry = lax.fori_loop(first_free, end, step(False), carry)
        return carry

    carry = one_head(0, carry) if p.group == 1 else lax.fori_loop(0, p.group, one_head, carry)
    dk, dv, *_, added = _step(x, tile, position, i32(p.group - 1), tile.blocks - 1, carry, may_mask, last=True)
    plgpu.barrier_arrive(x.tile_free.at[0])
    write_keys(x, tile, _with_columns(x.h_parts, dk), _with_columns(x.d_parts, dv))
    announce(x, added)
    return position + tile.blocks * p.group


def _form_scores(x, position):
    """sᵀ and dpᵀ of a step."""
    slot, dtype = ring(position), x.plan.dtype
    plgpu.barrier_wait(x.q_ready.at[slot])
    s = ptx.wgmma_ss(x.k_all, x.q_own.at(slot), dtype)
    plgpu.barrier_wait(x.dout_ready.at[0])
    return ptx.wgmma_wait_group(0, s, ptx.wgmma_ss(x.v_all, x.dout_own, dtype))


def _step(x, tile, position, g, i, carry, masked, last=False):
    """The i-th query block of the g-th head of the group; its scores are there, and it forms those of the next step."""
    p, w = x.plan, x.warpgroup
    dk, dv, s, dp, added = carry
    now = position + (i if p.group == 1 else g * tile.blocks + i)
    slot, following = ring(now), ring(now + 1)
    stay, turn = kept(x, tile, g, i), turn_of(x, tile, g, i)
    weights, by_score = weigh(x, tile, g, i, s, x.row_smem.at[slot], masked, stay)
    ds = score_gradient(x, by_score, dp, x.row_smem.at[slot], stay)
    await_turn(x, turn)
    _exchange(x, weights, ds)
    dv = [ptx.wgmma_nn(sum_, x.p_all, part, p.dtype) for sum_, part in zip(dv, x.dout_parts, strict=True)]
    dq = [ptx.wgmma_tt(ptx.stack(x.ds_smem, x.ds_base, 0, 0), part, p.dtype) for part in x.k_parts]
    q_parts = [part.at(slot) for part in x.q_parts]
    dk = [ptx.wgmma_nn(sum_, x.ds_all, part, p.dtype) for sum_, part in zip(dk, q_parts, strict=True)]
    announce(x, added)
    dv = ptx.wgmma_wait_group(len(dq) + len(dk), *dv)
    x.dout_free.bar_arrive(0)
    dq = ptx.wgmma_wait_group(len(dk), *dq)
    add_dq(x, tile, g, i, _by_slab(x.h_parts, dq))
    if not last:  # behind the additions, which want shared memory too: 2% at head dim 256
        plgpu.barrier_wait(x.q_ready.at[following])
        s = ptx.wgmma_ss(x.k_all, x.q_own.at(following), p.dtype)
    dk = ptx.wgmma_wait_group(0 if last else 1, *dk)
    x.q_free.bar_arrive(slot)
    x.done.bar_arrive(1 - w)
    if not last:
        plgpu.barrier_wait(x.dout_ready.at[0])
        s, dp = ptx.wgmma_wait_group(0, s, ptx.wgmma_ss(x.v_all, x.dout_own, p.dtype))
    return list(dk), list(dv), s, dp, turn and turn[0]


def _exchange(x, weights, ds):
    """Both warpgroups' halves of pᵀ and dsᵀ to shared memory."""
    w = x.warpgroup
    x.done.bar_sync(w)
    memory.stmatrix(weights, x.p_smem, x.own_queries)
    memory.stmatrix(ds, x.ds_smem.at[0, 0], x.own_queries)
    ptx.fence_async_shared()
    x.exchange.bar_arrive(1 - w)
    x.exchange.bar_sync(w)


def _with_columns(parts, sums):
    return [(first, x) for (first, _), x in zip(parts, sums, strict=True)]


def _by_slab(parts, sums):
    """Pairs of a first column and at most 64 columns."""
    found = []
    for (first, columns), x in zip(parts, sums, strict=True):
        found += [(first + i, x[:, i : i + ptx.SLAB]) for i in range(0, columns, ptx.SLAB)]
    return found

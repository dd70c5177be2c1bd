"""The producer warpgroup of the backward kernel: copies keys and values of a tile, and then query blocks, by TMA.

Both consumers (`backward_narrow`, `backward_wide`) are fed by it; their scratch memory has what `scratch` allocates.
"""

import jax.numpy as jnp
from jax import lax

from jattn.pallas._compat import pl, plgpu
from jattn.pallas.hopper import memory, ptx
from jattn.pallas.hopper.backward_plan import Plan, head_of, next_step, row_of, tile_of
from jattn.pallas.hopper.lists import i32

STAGES = 2  # blocks of queries in shared memory at once
_FREE_BARRIERS = 7  # first id of the named barriers


def scratch(plan: Plan, *, dout_stages: int) -> dict:
    """What the producer writes to, and its barriers. Matrices are kept in slabs of 64 columns (`ptx.slabs`)."""
    keys, block_q, consumers = plan.config.keys, plan.config.block_q, plan.config.WARPGROUPS
    h, d = ptx.slabs(plan.H), ptx.slabs(plan.D)
    return dict(
        k_smem=smem(plan, rows=keys, columns=plan.H),
        v_smem=smem(plan, rows=keys, columns=plan.D),
        q_smem=smem(plan, STAGES, rows=block_q, columns=plan.H),
        dout_smem=smem(plan, dout_stages, rows=block_q, columns=plan.D),
        row_smem=plgpu.SMEM((STAGES, 2, block_q), jnp.float32),  # lse and delta
        k_ready=plgpu.Barrier(num_arrivals=h, num_barriers=1),
        v_ready=plgpu.Barrier(num_arrivals=d, num_barriers=1),
        h_landed=plgpu.Barrier(num_arrivals=h, num_barriers=1),  # blocks that the producer has to clean before they are
        d_landed=plgpu.Barrier(num_arrivals=d, num_barriers=1),  # ready
        q_ready=plgpu.Barrier(num_arrivals=h + 2, num_barriers=STAGES),  # with lse and delta
        dout_ready=plgpu.Barrier(num_arrivals=d, num_barriers=dout_stages),
        tile_free=plgpu.Barrier(num_arrivals=consumers, num_barriers=1),  # all are done with the keys and values
        q_free=ptx.NamedBarriers(_FREE_BARRIERS, STAGES, consumers),  # all are done with the slot
        dout_free=ptx.NamedBarriers(_FREE_BARRIERS + STAGES, dout_stages, consumers),
    )


def smem(plan, *leading, rows, columns):
    return plgpu.SMEM((*leading, ptx.slabs(columns), rows, ptx.SLAB), plan.dtype, transforms=ptx.TRANSFORMS)


def produce(x):
    """Copies in the order of need; the first queries of a tile arrive while the tile before is written out."""

    def one_tile(r, position):
        tile = tile_of(x, r)
        _load_queries(x, tile, i32(0), i32(0), position)
        pl.when(r > 0)(lambda: plgpu.barrier_wait(x.tile_free.at[0]))
        rows = pl.ds(tile.keys_start + tile.key, x.plan.config.keys)
        existing = None if x.plan.key_length is not None else tile.key_length - tile.key
        _copy_in(x, x.k.at[tile.batch, rows, tile.head], x.k_smem, x.k_ready.at[0], existing, x.h_landed.at[0])
        _copy_in(x, x.v.at[tile.batch, rows, tile.head], x.v_smem, x.v_ready.at[0], existing, x.d_landed.at[0])
        _load_cotangents(x, tile, i32(0), i32(0), position)
        steps = tile.blocks * x.plan.group

        def one_step(t, place):
            g, i = next_step(x, tile, *place)
            _load_queries(x, tile, g, i, position + t)
            _load_cotangents(x, tile, g, i, position + t)
            return g, i

        lax.fori_loop(1, steps, one_step, (i32(0), i32(0)))
        return position + steps

    position = lax.fori_loop(0, x.items, one_tile, i32(0))
    _drain(x, position)


def ring(position, stages=STAGES):
    """The slot of a step."""
    return jnp.bitwise_and(position, i32(stages - 1))


def _load_queries(x, tile, g, i, position):
    slot, head, row = ring(position), head_of(x, tile, g), row_of(x, tile, i)
    pl.when(position >= STAGES)(lambda: x.q_free.bar_sync(slot))
    rows, existing = _query_rows(x, x.q, tile, head, row), _existing(x, tile, row)
    _copy_in(x, rows, x.q_smem.at[slot], x.q_ready.at[slot], existing, x.h_landed.at[0])
    rows = pl.ds(tile.rows_start + row, x.plan.config.block_q)
    for k, array in enumerate((x.lse, x.delta)):
        plgpu.copy_gmem_to_smem(array.at[tile.batch, head, rows], x.row_smem.at[slot, k], x.q_ready.at[slot])


def _load_cotangents(x, tile, g, i, position):
    stages = x.dout_free.count
    slot, row = ring(position, stages), row_of(x, tile, i)
    pl.when(position >= stages)(lambda: x.dout_free.bar_sync(slot))
    rows = _query_rows(x, x.dout, tile, head_of(x, tile, g), row)
    _copy_in(x, rows, x.dout_smem.at[slot], x.dout_ready.at[slot], _existing(x, tile, row), x.d_landed.at[0])


def _query_rows(x, array, tile, head, row):
    return array.at[tile.batch, pl.ds(tile.queries_start + row, x.plan.config.block_q), head]


def _existing(x, tile, row):
    """Rows of the block of queries that exist; None: TMA reads zeros for the others."""
    return None if x.plan.query_length is not None else tile.query_length - row


def _copy_in(x, rows, smem, ready, existing, landed):
    """Rows that do not exist may hold NaN, which a weight of 0 would not silence: they are cleared."""
    if existing is None:
        _copy_slabs(x, rows, smem, ready)
        return
    pl.when(existing >= smem.shape[1])(lambda: _copy_slabs(x, rows, smem, ready))

    @pl.when(existing < smem.shape[1])
    def _():
        _copy_slabs(x, rows, smem, landed)
        plgpu.barrier_wait(landed)
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
    for barriers, i in ((x.q_free, 0), (x.q_free, 1), (x.dout_free, 0), (x.dout_free, 1)):
        if i == barriers.count:
            continue

        @pl.when(position >= barriers.count - i)
        def _(barriers=barriers, i=i):
            barriers.bar_sync(ring(position + i, barriers.count))

    plgpu.barrier_wait(x.tile_free.at[0])

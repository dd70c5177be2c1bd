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

dq is summed over key tiles in float32 by TMA reductions in L2; its order, and so its last bits, change from run to run.
Sources: FlashAttention-2 and -3 (Dao, 2023; Shah et al., 2024).
"""

import dataclasses
import math
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jattn._tile import maximum, minimum
from jattn.pallas import configs
from jattn.pallas._compat import kernel_in_place, mapped_in_turn, pl, plgpu
from jattn.pallas.hopper import gradients, memory, ptx, softmax

_LOG2E = math.log2(math.e)
_STAGES = 2  # query blocks in shared memory at once
_TURN_BARRIERS, _FREE_BARRIERS, _EXCHANGE_BARRIERS = 5, 7, 11  # first ids of the named barriers


# --- config -----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is compiled in; letters and bounds as in the forward's. A None is read from `Inputs.sequences`."""

    B: int
    T: int
    S: int
    N: int
    K: int
    H: int
    D: int
    dtype: Any
    scale: float
    left: int | None
    right: int | None
    offset: int | None
    key_length: int | None
    config: configs.BackwardConfig

    @property
    def group(self) -> int:
        return self.N // self.K

    @property
    def tiles(self) -> int:
        """Key tiles of one (batch, key/value head) pair."""
        return -(-self.S // self.config.KEYS)

    @property
    def query_blocks(self) -> int:
        return -(-self.T // self.config.block_q)

    def block_range(self, first_key, offset, key_length):
        """The query blocks `[begin, end)` that may see the tile that begins with `first_key`, at least one."""
        block, last_key = self.config.block_q, minimum(first_key + self.config.KEYS, key_length) - 1
        low = 0 if self.right is None else maximum(0, first_key - offset - self.right)
        high = self.T if self.left is None else minimum(self.T, last_key - offset + self.left + 1)
        begin = minimum(low // block, self.query_blocks - 1)
        return begin, maximum(begin + 1, minimum(-(-high // block), self.query_blocks))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Inputs:
    """The kernel's inputs in HBM."""

    q: Any  # [B, T, N, H]
    k: Any  # [B, S, K, H]
    v: Any  # [B, S, K, D]
    dout: Any  # [B, T, N, D]
    lse: Any  # float32 [B, N, T rounded up to blocks]: −lse in log2 units, −inf where a row sees nothing
    delta: Any  # float32, like it: rowsum(dout · out) less the cotangent of lse
    table: Any  # int32 [rounds + 2, blocks]: as in the forward
    sequences: Any  # int32 [B, 2]: query offset, key length


# --- work of one thread block -----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Tile:
    """One tile of keys and the query blocks `[begin, begin + blocks)` of each head of its group, as traced scalars."""

    batch: Any
    head: Any  # of keys and values
    key: Any  # first
    offset: Any
    key_length: Any
    begin: Any
    blocks: Any


def _tile(x, r) -> Tile:
    p = x.plan
    item = x.table[jnp.minimum(r, x.items - 1), x.block]
    pair, key = lax.div(item, _i32(p.tiles)), lax.rem(item, _i32(p.tiles)) * p.config.KEYS
    batch, head = lax.div(pair, _i32(p.K)), lax.rem(pair, _i32(p.K))
    offset = _i32(p.offset) if p.offset is not None else x.sequences[batch, 0]
    key_length = _i32(p.key_length) if p.key_length is not None else x.sequences[batch, 1]
    begin, end = p.block_range(key, offset, key_length)
    # The table's zero keeps the trip count out of the compiler's sight, as in the forward.
    return Tile(batch, head, key, offset, key_length, begin, end - begin + x.zero)


def _i32(x):
    return jnp.asarray(x, jnp.int32)


def _place(x, tile, t):
    """Query head and first query of a tile's step t: the blocks of one head after those of another."""
    if x.plan.group == 1:
        return tile.head, (tile.begin + t) * x.plan.config.block_q
    number = lax.div(t, tile.blocks)
    return tile.head * x.plan.group + number, (tile.begin + t - number * tile.blocks) * x.plan.config.block_q


# --- kernel -----------------------------------------------------------------------------------------------------------


def _kernel(
    plan: Plan,
    inputs: Inputs,
    # outputs (HBM); dq is added to
    dq,  # float32 [B, T, N, H]
    dk,  # [B, S, K, H]
    dv,  # [B, S, K, D]
    *,
    # shared memory, in slabs of 64 columns (`ptx.slabs`)
    k_smem,  # [slabs of H, 128, 64]
    v_smem,  # [slabs of D, 128, 64]
    q_smem,  # [stages, slabs of H, block_q, 64]
    dout_smem,  # [stages, slabs of D, block_q, 64]
    row_smem,  # float32 [stages, 2, block_q]: lse and delta
    ds_smem,  # [3, warpgroups, slabs of block_q, 64 keys, 64]: dsᵀ of this step and of the two before
    dq_smem,  # float32 [warpgroups, 2, 64, 32]: a dq on its way to HBM
    # barriers
    k_ready,  # [1] TMA
    v_ready,  # [1] TMA
    q_ready,  # [stages] TMA: q, lse and delta
    dout_ready,  # [stages] TMA
    tile_free,  # [1] consumers: both are done with the keys and values
    q_free,  # [stages] named: both consumers are done with the slot
    dout_free,  # [stages] named
    turn,  # [warpgroups] named: the tensor core is this warpgroup's
    exchange,  # [2 parities · warpgroups] named: the other warpgroup's dsᵀ of a step is in shared memory
):
    x = SimpleNamespace(
        plan=plan, **vars(inputs), dq=dq, dk=dk, dv=dv, k_smem=k_smem, v_smem=v_smem, q_smem=q_smem,
        dout_smem=dout_smem, row_smem=row_smem, ds_smem=ds_smem, dq_smem=dq_smem, k_ready=k_ready, v_ready=v_ready,
        q_ready=q_ready, dout_ready=dout_ready, tile_free=tile_free, q_free=q_free, dout_free=dout_free, turn=turn,
        exchange=exchange,
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
        tile = _tile(x, r)
        _load_queries(x, tile, _i32(0), position)
        pl.when(r > 0)(lambda: plgpu.barrier_wait(x.tile_free.at[0]))
        rows = pl.ds(tile.key, x.plan.config.KEYS)
        _copy_in(x, x.k.at[tile.batch, rows, tile.head], x.k_smem, x.k_ready.at[0])
        _copy_in(x, x.v.at[tile.batch, rows, tile.head], x.v_smem, x.v_ready.at[0])
        _load_cotangents(x, tile, _i32(0), position)
        steps = tile.blocks * x.plan.group

        def one_step(t, _):
            _load_queries(x, tile, t, position)
            _load_cotangents(x, tile, t, position)

        lax.fori_loop(1, steps, one_step, None)
        return position + steps

    position = lax.fori_loop(0, x.items, one_tile, _i32(0))
    _drain(x, position)


def _ring(position):
    return jnp.bitwise_and(position, _i32(_STAGES - 1))


def _load_queries(x, tile, t, position):
    slot = _ring(position + t)
    pl.when(position + t >= _STAGES)(lambda: x.q_free.bar_sync(slot))
    head, row = _place(x, tile, t)
    rows = pl.ds(row, x.plan.config.block_q)
    _copy_in(x, x.q.at[tile.batch, rows, head], x.q_smem.at[slot], x.q_ready.at[slot])
    for i, array in enumerate((x.lse, x.delta)):
        plgpu.copy_gmem_to_smem(array.at[tile.batch, head, rows], x.row_smem.at[slot, i], x.q_ready.at[slot])


def _load_cotangents(x, tile, t, position):
    slot = _ring(position + t)
    pl.when(position + t >= _STAGES)(lambda: x.dout_free.bar_sync(slot))
    head, row = _place(x, tile, t)
    rows = x.dout.at[tile.batch, pl.ds(row, x.plan.config.block_q), head]
    _copy_in(x, rows, x.dout_smem.at[slot], x.dout_ready.at[slot])


def _copy_in(x, rows, smem, barrier):
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
    # Of ds · k a warpgroup forms 64 queries by 64 columns: with 128 queries a step its own, else its own columns.
    x.dq_row, x.dq_column = (w, _i32(0)) if block_q == 128 else (_i32(0), w)
    x.k_rows = ptx.matrix(lambda _: x.k_smem, keys, p.H, along_rows=True).slab(x.dq_column)
    x.ds_base = ptx.address(x.ds_smem)
    pl.when(w == p.config.WARPGROUPS - 1)(lambda: x.turn.bar_arrive(0))
    lax.fori_loop(0, x.items, lambda r, position: _one_tile(x, r, position), _i32(0))
    pl.when(w == 0)(lambda: x.turn.bar_sync(0))
    plgpu.wait_smem_to_gmem(0)


def _take_turn(x):
    x.turn.bar_sync(x.warpgroup)


def _pass_turn(x):
    x.turn.bar_arrive(1 - x.warpgroup)


def _ds(x, position):
    """dsᵀ of a step, as the left operand of ds · k."""
    return ptx.stack(x.ds_smem, x.ds_base, lax.rem(position, _i32(3)), x.dq_row)


def _one_tile(x, r, position):
    p, tile = x.plan, _tile(x, r)
    steps = tile.blocks * p.group
    plgpu.barrier_wait(x.k_ready.at[0])
    plgpu.barrier_wait(x.v_ready.at[0])
    carry = _zeros(p.H), _zeros(p.D)
    first, last = _masked_steps(x, tile)

    def one_head(g, carry):
        def step(masked):
            return lambda i, c: _step(x, tile, position, g * tile.blocks + i, i, c, masked)

        if p.left is not None and p.config.block_q == 128:  # a third loop would spill
            return lax.fori_loop(0, tile.blocks, step(True), carry)
        if p.right is not None or p.key_length != p.S or p.S % p.config.KEYS:
            carry = lax.fori_loop(0, first, step(True), carry)
        carry = lax.fori_loop(first, last, step(False), carry)
        return lax.fori_loop(last, tile.blocks, step(True), carry) if p.left is not None else carry

    carry = one_head(0, carry) if p.group == 1 else lax.fori_loop(0, p.group, one_head, carry)
    dk, dv = carry
    _receive(x, position + steps - 1)
    (dq,) = ptx.wgmma_wait_group(0, ptx.wgmma_tt(_ds(x, position + steps - 1), x.k_rows, p.dtype))
    plgpu.barrier_arrive(x.tile_free.at[0])
    _add_dq(x, tile, steps - 1, dq)
    rows = p.S - tile.key - x.warpgroup * ptx.TILE_ROWS
    start = tile.batch, tile.key + x.warpgroup * ptx.TILE_ROWS, tile.head
    memory.st_global(x.dk, start, (dk * p.scale).astype(p.dtype), rows)
    memory.st_global(x.dv, start, dv.astype(p.dtype), rows)
    return position + steps


def _zeros(columns):
    return plgpu.layout_cast(jnp.zeros((ptx.TILE_ROWS, columns), jnp.float32), ptx.WGMMA)


def _masked_steps(x, tile):
    """The steps `[first, last)` of a head at which every query sees all the warpgroup's keys."""
    p, block = x.plan, x.plan.config.block_q
    first, last = _i32(0), tile.blocks
    key = tile.key + x.warpgroup * ptx.TILE_ROWS
    if p.right is not None:  # query blocks from the first on which sees the last of the keys
        row = jnp.maximum(key + (ptx.TILE_ROWS - 1) - tile.offset - p.right, 0)
        first = jnp.minimum(jnp.maximum(lax.div(row + (block - 1), _i32(block)) - tile.begin, 0), tile.blocks)
    if p.left is not None:  # up to the last one that sees the first of the keys
        row = jnp.maximum(key - tile.offset + p.left + 1, 0)
        last = jnp.clip(lax.div(row, _i32(block)) - tile.begin, first, tile.blocks)
    if p.key_length != p.S or p.S % p.config.KEYS:
        cut = key + ptx.TILE_ROWS > tile.key_length
        first = jnp.where(cut, tile.blocks, first)
        last = jnp.where(cut, tile.blocks, last)
    return first, last


def _step(x, tile, position, t, i, carry, masked):
    """Query block i of a head, the tile's step t."""
    p, w = x.plan, x.warpgroup
    dk, dv = carry
    now = position + t
    slot, parity = _ring(now), jnp.bitwise_and(now, _i32(1))
    plgpu.barrier_wait(x.q_ready.at[slot])
    _take_turn(x)
    s = ptx.wgmma_ss(x.k_own, x.q_columns.at(slot), p.dtype)
    plgpu.barrier_wait(x.dout_ready.at[slot])
    dp = ptx.wgmma_ss(x.v_own, x.dout_columns.at(slot), p.dtype)
    _pass_turn(x)
    (s,) = ptx.wgmma_wait_group(1, s)
    if masked:
        s = softmax.mask_columns(s, *_visible_queries(x, tile, i))
    weights = gradients.weights(s, x.row_smem.at[slot], p.scale * _LOG2E)
    p16 = weights.astype(p.dtype)
    (dp,) = ptx.wgmma_wait_group(0, dp)
    ds = gradients.score_gradient(weights, dp, x.row_smem.at[slot]).astype(p.dtype)
    pl.when(t > 0)(lambda: _receive(x, now - 1))
    memory.stmatrix(ds, x.ds_smem.at[lax.rem(now, _i32(3)), w])
    ptx.fence_async_shared()  # a warpgroup reads dsᵀ behind `_receive` alone, its own too
    x.exchange.bar_arrive(parity * 2 + (1 - w))
    _take_turn(x)
    dv = ptx.wgmma_rs(dv, p16, x.dout_rows.at(slot))
    # At a tile's first step this multiplies stale memory, and nobody looks: a branch around a product costs more.
    dq = ptx.wgmma_tt(_ds(x, now + 2), x.k_rows, p.dtype)
    dk = ptx.wgmma_rs(dk, ds, x.q_rows.at(slot))
    _pass_turn(x)
    dq, dv = ptx.wgmma_wait_group(1, dq, dv)
    x.dout_free.bar_arrive(slot)
    pl.when(t > 0)(lambda: _add_dq(x, tile, t - 1, dq))
    (dk,) = ptx.wgmma_wait_group(0, dk)
    x.q_free.bar_arrive(slot)
    return dk, dv


def _receive(x, step):
    """Waits for the other warpgroup's dsᵀ of a step."""
    x.exchange.bar_sync(jnp.bitwise_and(step, _i32(1)) * 2 + x.warpgroup)


def _visible_queries(x, tile, i):
    """Columns `[low, high)` of the step's tile that see each of the warpgroup's keys, int32 `[64]`; None: all."""
    p = x.plan
    key = tile.key + x.warpgroup * ptx.TILE_ROWS + ptx.row_numbers()
    position = (tile.begin + i) * p.config.block_q + tile.offset  # of the first column
    low = jnp.where(key < tile.key_length, 0 if p.right is None else key - (position + p.right), p.config.block_q)
    return low, None if p.left is None else key + (p.left + 1 - position)


def _add_dq(x, tile, t, dq):
    head, row = _place(x, tile, t)
    start = tile.batch, row + x.dq_row * ptx.TILE_ROWS, head, x.dq_column * ptx.SLAB
    memory.reduce_add(x.dq, start, x.dq_smem.at[x.warpgroup], dq)


# --- host -------------------------------------------------------------------------------------------------------------


def launch(plan: Plan, inputs: Inputs, *, interpret=False):
    """Runs the kernel: `(dq [B, T, N, H], dk [B, S, K, H], dv [B, S, K, D])`."""

    def run(*operands):
        dq, dk, dv = _launch(plan, *operands, interpret=interpret)
        return (dq * plan.scale).astype(plan.dtype), dk, dv

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
        ds_smem=smem(3, consumers, rows=ptx.TILE_ROWS, columns=config.block_q),
        dq_smem=plgpu.SMEM(
            (consumers, ptx.SLAB // memory.FLOAT_SLAB, ptx.TILE_ROWS, memory.FLOAT_SLAB), jnp.float32,
            transforms=ptx.TRANSFORMS,
        ),
        k_ready=plgpu.Barrier(num_arrivals=h, num_barriers=1),
        v_ready=plgpu.Barrier(num_arrivals=d, num_barriers=1),
        q_ready=plgpu.Barrier(num_arrivals=h + 2, num_barriers=_STAGES),
        dout_ready=plgpu.Barrier(num_arrivals=d, num_barriers=_STAGES),
        tile_free=plgpu.Barrier(num_arrivals=consumers, num_barriers=1),
        turn=ptx.NamedBarriers(_TURN_BARRIERS, consumers, 1),
        q_free=ptx.NamedBarriers(_FREE_BARRIERS, _STAGES, consumers),
        dout_free=ptx.NamedBarriers(_FREE_BARRIERS + _STAGES, _STAGES, consumers),
        exchange=ptx.NamedBarriers(_EXCHANGE_BARRIERS, 2 * consumers, 1),
    )
    operands, structure = jax.tree.flatten(inputs)

    def body(*refs, **allocations):
        _kernel(plan, jax.tree.unflatten(structure, refs[: len(operands)]), *refs[len(operands) :], **allocations)

    out_type = tuple(
        jax.ShapeDtypeStruct((plan.B, plan.S, plan.K, width), plan.dtype) for width in (plan.H, plan.D)
    )
    return kernel_in_place(
        body,
        name="jattn_attention_backward",
        out_type=out_type,
        scratch=scratch,
        grid={"block": inputs.table.shape[1]},
        warpgroups=consumers + 1,
        interpret=interpret,
    )(operands, jnp.zeros((plan.B, plan.T, plan.N, plan.H), jnp.float32))

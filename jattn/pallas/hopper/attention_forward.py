"""Forward softmax attention on compute capability 9.0 (H100, H200); score tiles never leave registers.

Algorithm, for one tile of 64 query rows per warpgroup, over its key blocks from the last to the first:

    s = q · k[block]ᵀ                           (tensor core)
    m, total, p, alpha = online softmax of s    (one reference m and one sum a row)
    o = o · alpha + p · v[block]                (tensor core)

and at the end out = o / total, lse = log of the sum of exponentials.

Pipeline: one producer warpgroup copies q, k and v into rings of shared memory (TMA); two or three consumer warpgroups
take turns on the tensor core, so that one computes exponentials while another multiplies. Within a warpgroup the
product q·k of block i is issued with p·v of block i − 1, whose wait comes after the softmax of block i:

    producer     Q K0 | K1 V0 | K2 V1 | … | Q' K0' V(n−1) …
    consumer     QK0 softmax0 | QK1 PV0, softmax1 under PV0 | … | QK0' PV(n−1), write out | …

Thread blocks are persistent: each walks its column of a table made by simulating a dynamic scheduler (`schedule.py`).
Sources: FlashAttention-3 (Shah et al., 2024) for the overlap and the turns; Milakov and Gimelshein (2018) for the
online softmax.
"""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
from jax import lax

from jattn.pallas import pieces
from jattn.pallas._compat import kernel, pl, plgpu
from jattn.pallas.hopper import dropout, memory, ptx, scores, softmax
from jattn.pallas.hopper.forward_plan import LOG2E, Inputs, Plan, block_of, ceil_div, item_of, ring, tile_of
from jattn.pallas.hopper.lists import i32

_TURN_BARRIERS, _RING_BARRIERS = 5, 8  # first ids of the named barriers


# --- kernel -----------------------------------------------------------------------------------------------------------


def _kernel(
    plan: Plan,
    inputs: Inputs,
    # outputs (HBM)
    out,  # [B, T, N, D]
    lse,  # float32 [B, N, T], T rounded up to whole tiles if not packed
    *,
    # shared memory, in slabs of 64 columns (`ptx.slabs`)
    q_smem,  # [1 or 2 buffers, warpgroups, slabs of H, 64, 64]
    k_smem,  # [stages, slabs of H, block_k, 64]
    v_smem,  # [stages, slabs of D, block_k, 64]
    out_smem,  # [warpgroups, slabs of D, 64, 64], or None: through q_smem
    lse_smem,  # float32 [warpgroups, 64]
    # barriers; a TMA barrier takes one arrival a slab
    q_ready,  # [buffers · warpgroups] TMA: a query tile has landed
    q_free,  # [buffers · warpgroups] consumer: its last product with the query buffer is done
    k_ready,  # [stages] TMA
    v_ready,  # [stages] TMA
    v_landed,  # [1] TMA: a block that the producer has to clean before v_ready
    k_free,  # [stages] named: every consumer is done with the slot
    v_free,  # [stages] named
    turn,  # [warpgroups] named: the tensor core is this warpgroup's
):
    x = SimpleNamespace(
        plan=plan, **vars(inputs), out=out, lse=lse, q_smem=q_smem, k_smem=k_smem, v_smem=v_smem, out_smem=out_smem,
        lse_smem=lse_smem, q_ready=q_ready, q_free=q_free, k_ready=k_ready, v_ready=v_ready, v_landed=v_landed,
        k_free=k_free, v_free=v_free, turn=turn, block=lax.axis_index("block"), warpgroup=lax.axis_index("warpgroup"),
    )
    rounds, consumers = x.table.shape[0] - 2, plan.config.warpgroups
    x.items, x.zero = x.table[rounds, x.block], x.table[rounds + 1, x.block]

    @pl.when(x.warpgroup == consumers)
    def _():
        plgpu.set_max_registers(plan.config.registers[1], action="decrease")
        _produce(x)

    @pl.when(x.warpgroup < consumers)
    def _():
        plgpu.set_max_registers(plan.config.registers[0], action="increase")
        _consume(x)


# --- producer ---------------------------------------------------------------------------------------------------------


def _produce(x):
    """Copies in the order of need: the first keys of a tile before the last values of the tile before."""
    buffers = x.q_smem.shape[0]
    first = item_of(x, i32(0))

    def one_tile(r, carry):
        position, item, previous_item = carry
        tile, following = tile_of(x, item), item_of(x, r + 1)
        if buffers == 2:  # free since the tile before last: this never waits long, and never holds up the keys
            _load_queries(x, tile, r)
        _load_keys(x, tile, 0, position)
        pl.when(r > 0)(lambda: _load_last_values(x, previous_item, position))
        if buffers == 1:  # free when the tile before is done, which needs the values above
            _load_queries(x, tile, r)

        def one_block(i, _):
            _load_keys(x, tile, i, position)
            _load_values(x, tile, i - 1, position)

        lax.fori_loop(1, tile.blocks, one_block, None)
        return position + tile.blocks, following, item

    position, _, last = lax.fori_loop(0, x.items, one_tile, (i32(0), first, first))
    _load_last_values(x, last, position)
    _drain(x, position)


def _load_last_values(x, item, position):
    """Those of the tile that ends at `position`."""
    tile = tile_of(x, item)
    _load_values(x, tile, tile.blocks - 1, position - tile.blocks)


def _load_queries(x, tile, r):
    """Query tile of round r, one copy a warpgroup and slab."""
    buffers, consumers = x.q_smem.shape[0], x.plan.config.warpgroups
    buffer = lax.rem(r, i32(buffers))
    for w in range(consumers):
        slot = buffer * consumers + w
        pl.when(r >= buffers)(lambda slot=slot: plgpu.barrier_wait(x.q_free.at[slot]))
        rows = x.q.at[tile.batch, pl.ds(tile.array_row + w * ptx.TILE_ROWS, ptx.TILE_ROWS), tile.head]
        _copy_in(x, rows, x.q_smem.at[buffer, w], x.q_ready.at[slot])


def _copy_in(x, rows, smem, barrier):
    for i in range(smem.shape[0]):
        plgpu.copy_gmem_to_smem(_slab(x, rows, i), smem.at[i], barrier)


def _slab(x, rows, i):
    """Columns of slab i of `rows [rows, columns]` in HBM. TMA reads zeros past the last and writes nothing there."""
    start = i * ptx.SLAB
    if start + ptx.SLAB > rows.shape[-1]:
        start = jnp.minimum(x.block, 0) + start  # Pallas refuses a constant slice past the edge
    return rows.at[:, pl.ds(start, ptx.SLAB)]


def _key_rows(x, array, tile, block):
    block_k = x.plan.config.block_k
    rows = pl.ds(tile.keys_start + block * block_k, block_k)
    return array.at[tile.batch, rows, lax.div(tile.head, i32(x.plan.N // x.plan.K))]


def _load_keys(x, tile, i, position):
    """The i-th block of a tile whose blocks start at `position` in the sequence of all."""
    slot = ring(x, position + i)
    pl.when(position + i >= x.plan.config.stages)(lambda: x.k_free.bar_sync(slot))
    _copy_in(x, _key_rows(x, x.k, tile, block_of(x, tile, i)), x.k_smem.at[slot], x.k_ready.at[slot])


def _load_values(x, tile, i, position):
    slot, block, block_k = ring(x, position + i), block_of(x, tile, i), x.plan.config.block_k
    pl.when(position + i >= x.plan.config.stages)(lambda: x.v_free.bar_sync(slot))
    rows, smem, ready = _key_rows(x, x.v, tile, block), x.v_smem.at[slot], x.v_ready.at[slot]
    if x.plan.key_length == x.plan.S:  # TMA zero-fills past the array
        _copy_in(x, rows, smem, ready)
        return
    # Values past the sequence's end may be NaN, which a weight of 0 would not silence.
    valid = tile.key_length - block * block_k
    pl.when(valid >= block_k)(lambda: _copy_in(x, rows, smem, ready))

    @pl.when(valid < block_k)
    def _():
        _copy_in(x, rows, smem, x.v_landed.at[0])
        plgpu.barrier_wait(x.v_landed.at[0])
        memory.st_shared_zero_rows(smem, valid)
        plgpu.commit_smem()
        for _ in range(smem.shape[0]):  # as many arrivals as the copies would have made
            plgpu.barrier_arrive(ready)


def _drain(x, position):
    """Every barrier phase is waited for before the thread block ends."""
    stages, consumers, buffers = x.plan.config.stages, x.plan.config.warpgroups, x.q_smem.shape[0]
    for i in range(stages):

        @pl.when(position >= stages - i)
        def _(i=i):
            slot = ring(x, position + i)
            x.k_free.bar_sync(slot)
            x.v_free.bar_sync(slot)

    for i in range(buffers):

        @pl.when(x.items >= buffers - i)
        def _(i=i):
            for w in range(consumers):
                plgpu.barrier_wait(x.q_free.at[lax.rem(x.items + i, i32(buffers)) * consumers + w])


# --- consumer ---------------------------------------------------------------------------------------------------------


def _consume(x):
    p, consumers, buffers = x.plan, x.plan.config.warpgroups, x.q_smem.shape[0]
    x.q_matrix = ptx.matrix(lambda i: x.q_smem.at[i, x.warpgroup], ptx.TILE_ROWS, p.H, slots_apart=consumers)
    x.k_matrix = ptx.matrix(lambda i: x.k_smem.at[i], p.config.block_k, p.H)
    x.v_matrix = ptx.matrix(lambda i: x.v_smem.at[i], p.config.block_k, p.D, along_rows=True)
    pl.when(x.warpgroup == consumers - 1)(lambda: x.turn.bar_arrive(0))
    first = item_of(x, i32(0))
    if buffers == 1:
        lax.fori_loop(0, x.items, lambda r, carry: _separate_tile(x, r, *carry), (i32(0), first))
    else:
        plgpu.barrier_wait(x.q_ready.at[x.warpgroup])
        s = _first_scores(x, i32(0), i32(0))
        lax.fori_loop(0, x.items, lambda r, carry: _overlapped_tile(x, r, *carry), (i32(0), first, s))
    pl.when(x.warpgroup == 0)(lambda: x.turn.bar_sync(0))
    plgpu.wait_smem_to_gmem(0)


def _take_turn(x):
    x.turn.bar_sync(x.warpgroup)


def _pass_turn(x):
    x.turn.bar_arrive(lax.rem(x.warpgroup + 1, i32(x.plan.config.warpgroups)))


def _first_scores(x, position, buffer):
    """The product with a tile's first key block, waited for."""
    slot = ring(x, position)
    plgpu.barrier_wait(x.k_ready.at[slot])
    if x.plan.config.edge_turns:
        _take_turn(x)
    s = ptx.wgmma_ss(x.q_matrix.at(buffer), x.k_matrix.at(slot), x.plan.dtype)
    if x.plan.config.edge_turns:
        _pass_turn(x)
    (s,) = ptx.wgmma_wait_group(0, s)
    x.k_free.bar_arrive(slot)
    return s


def _separate_tile(x, r, position, item):
    """One tile from its first product to its output; nothing of the next one is begun."""
    tile, following = tile_of(x, item), item_of(x, r + 1)
    plgpu.barrier_wait(x.q_ready.at[x.warpgroup])
    s = _first_scores(x, position, i32(0))
    accumulator, m, total, weights = _blocks(x, tile, position, i32(0), s)
    slot = ring(x, position + tile.blocks - 1)
    if x.out_smem is not None:
        plgpu.barrier_arrive(x.q_free.at[x.warpgroup])
    plgpu.barrier_wait(x.v_ready.at[slot])
    if x.plan.config.edge_turns:
        _take_turn(x)
    accumulator = ptx.wgmma_rs(accumulator, weights, x.v_matrix.at(slot))
    if x.plan.config.edge_turns:
        _pass_turn(x)
    (accumulator,) = ptx.wgmma_wait_group(0, accumulator)
    x.v_free.bar_arrive(slot)
    _write(x, tile, accumulator, m, total)
    return position + tile.blocks, following


def _overlapped_tile(x, r, position, item, s):
    """One tile whose first scores `s` are at hand; issues the next tile's first product with this tile's last one."""
    tile, following = tile_of(x, item), item_of(x, r + 1)
    consumers, buffer = x.plan.config.warpgroups, lax.rem(r, i32(2))
    accumulator, m, total, weights = _blocks(x, tile, position, buffer, s)
    plgpu.barrier_arrive(x.q_free.at[buffer * consumers + x.warpgroup])
    next_position = position + tile.blocks
    k_slot, v_slot = ring(x, next_position), ring(x, next_position - 1)
    more = r + 1 < x.items

    @pl.when(more)
    def _():
        plgpu.barrier_wait(x.q_ready.at[(1 - buffer) * consumers + x.warpgroup])
        plgpu.barrier_wait(x.k_ready.at[k_slot])

    if x.plan.config.edge_turns:
        _take_turn(x)
    # After the last tile this multiplies stale memory, and nobody looks: a branch around a product would cost more.
    next_s = ptx.wgmma_ss(x.q_matrix.at(1 - buffer), x.k_matrix.at(k_slot), x.plan.dtype)
    plgpu.barrier_wait(x.v_ready.at[v_slot])
    accumulator = ptx.wgmma_rs(accumulator, weights, x.v_matrix.at(v_slot))
    if x.plan.config.edge_turns:
        _pass_turn(x)
    next_s, accumulator = ptx.wgmma_wait_group(0, next_s, accumulator)
    pl.when(more)(lambda: x.k_free.bar_arrive(k_slot))
    x.v_free.bar_arrive(v_slot)
    _write(x, tile, accumulator, m, total)
    return next_position, following, next_s


def _blocks(x, tile, position, buffer, s):
    """All but the last product with v: `(accumulator, m, total, weights)` after the softmax of the tile's last block.

    A range is visited from its end: blocks that upper bounds cut, those that all rows see whole, those that lower
    bounds cut. Listed blocks come in two parts: those that anything cuts, the others.
    """
    plan, config = x.plan, x.plan.config
    bounds = _row_bounds(x, tile)
    m, total, accumulator = softmax.init_state(plan.D, None if x.sinks is None else x.sinks[tile.head] * LOG2E)
    p, m, total, _ = _weigh(x, tile, block_of(x, tile, i32(0)), s, m, total, bounds, plan.masked)

    def step(i, carry, masked):
        accumulator, m, total, weights = carry
        k_slot, v_slot = ring(x, position + i), ring(x, position + i - 1)
        block = block_of(x, tile, i)
        plgpu.barrier_wait(x.k_ready.at[k_slot])
        q_matrix, k_matrix, v_matrix = x.q_matrix.at(buffer), x.k_matrix.at(k_slot), x.v_matrix.at(v_slot)
        _take_turn(x)
        s = ptx.wgmma_ss(q_matrix, k_matrix, plan.dtype)
        plgpu.barrier_wait(x.v_ready.at[v_slot])
        accumulator = ptx.wgmma_rs(accumulator, weights, v_matrix)
        _pass_turn(x)
        (s,) = ptx.wgmma_wait_group(1, s)
        p, m, total, alpha = _weigh(x, tile, block, s, m, total, bounds, masked, k_slot)
        # Without the barrier the compiler moves the wait before the exponentials, and nothing overlaps.
        p, m, total, alpha = lax.optimization_barrier((p, m, total, alpha))
        (accumulator,) = ptx.wgmma_wait_group(0, accumulator)
        x.v_free.bar_arrive(v_slot)
        return softmax.rescale(accumulator, alpha, lazy=config.lazy_rescale), m, total, p.astype(plan.dtype)

    carry = accumulator, m, total, p.astype(plan.dtype)
    whole_from, whole_to = _whole_steps(x, tile)
    if not plan.one_masked_block:
        carry = lax.fori_loop(1, whole_from, lambda i, c: step(i, c, True), carry)
    carry = lax.fori_loop(whole_from, whole_to, lambda i, c: step(i, c, False), carry)
    if plan.left is not None and not plan.listed:
        carry = lax.fori_loop(whole_to, tile.blocks, lambda i, c: step(i, c, True), carry)
    return carry


def _weigh(x, tile, block, s, m, total, bounds, masked, k_slot=None):
    """Scores of one block to weights: `(p, m, total, alpha)`, see `softmax.online_softmax`; releases the keys' slot."""
    plan, start = x.plan, block * x.plan.config.block_k
    late = plan.config.release_after if k_slot is not None else 0.0
    if k_slot is not None and not late:
        x.k_free.bar_arrive(k_slot)
    if plan.modified:
        s = scores.modify(
            s, _place(x, tile, start), scale=x.scale[0] if plan.scale is None else plan.scale, bias=x.bias,
            mod=plan.mod, aux=tuple(zip(x.aux, plan.aux_kinds, strict=True)), soft_cap=plan.soft_cap,
        )
    if masked and plan.rule is not None:
        s = scores.hide(s, _place(x, tile, start), plan.rule, x.mask_arrays)
    if masked:
        s = softmax.mask_columns(s, *(None if bound is None else bound - start for bound in bounds))
    p, m, total, alpha, *signal = softmax.online_softmax(
        s, m, total, plan.factor, may_be_empty=masked or plan.infinite, lazy=plan.config.lazy_rescale, signal_after=late
    )
    if late:
        x.k_free.bar_arrive(k_slot + signal[0])
    return _dropped(x, tile, p, start), m, total, alpha


def _place(x, tile, start):
    row = _first_row(x, tile)
    return scores.Place(
        batch=tile.sequence, head=tile.head, row=row, column=start, offset=tile.position - tile.row,
        array_row=row + tile.rows_start, array_column=start + tile.keys_start, diagonal_origin=x.plan.T - 1,
        origin=pieces.origin(x.plan, x),
    )


def _dropped(x, tile, p, start):
    plan = x.plan
    if plan.dropout_threshold == 0:
        return p
    batch, head, _, key = pieces.origin(plan, x)
    return dropout.drop(
        p, (x.dropout_key[0], x.dropout_key[1]), tile.sequence + batch, tile.head + head,
        _first_row(x, tile) + tile.position - tile.row + key, start + key, plan.dropout_threshold,
        aligned=plan.offset is not None and plan.offset % 16 == 0,
    )


def _first_row(x, tile):
    """The warpgroup's first query row."""
    return tile.row + x.warpgroup * ptx.TILE_ROWS


def _row_bounds(x, tile):
    """Keys `[low, high)` that the warpgroup's rows can see, int32 `[64]` each or one number; None: no bound."""
    plan = x.plan
    low, high = None, tile.key_length if plan.masked else None
    if plan.left is not None or plan.right is not None:
        position = tile.position + x.warpgroup * ptx.TILE_ROWS + ptx.row_numbers()
        low = None if plan.left is None else position - plan.left
        high = high if plan.right is None else jnp.minimum(position + (plan.right + 1), high)
    if plan.row_bounds:
        high = jnp.minimum(memory.ld_global_rows(x.row_end, tile.batch, _first_row(x, tile)), high)
    return low, high


def _whole_steps(x, tile):
    """The steps `[from, to)` at which every row of the warpgroup sees the whole block; step 0 is never among them."""
    plan, block_k, blocks = x.plan, x.plan.config.block_k, tile.blocks
    if plan.listed:
        return jnp.clip(tile.cut, 1, blocks), blocks
    if plan.rule is not None:
        return blocks, blocks
    position = tile.position + x.warpgroup * ptx.TILE_ROWS
    if plan.one_masked_block:
        first = i32(1)
    else:
        high = jnp.minimum(position + (plan.right + 1), tile.key_length)
        first = jnp.clip(tile.end - lax.div(jnp.maximum(high, 0), i32(block_k)), 1, blocks)
    if plan.left is None:
        return first, blocks
    low = position + (ptx.TILE_ROWS - 1 - plan.left)
    return first, jnp.clip(tile.end - ceil_div(low, block_k), first, blocks)


# --- epilogue ---------------------------------------------------------------------------------------------------------


def _write(x, tile, accumulator, m, total):
    out, lse = _results(x, tile, accumulator, m, total)
    if x.plan.out_dtype is not None:
        _store(x, tile, out, lse)
    elif tile.rows is None:
        _copy_out(x, tile, out, lse)
    else:  # a copy writes 64 rows, and those past the sequence's last are another's
        whole = tile.rows - _first_row(x, tile) >= ptx.TILE_ROWS
        pl.when(whole)(lambda: _copy_out(x, tile, out, lse))
        pl.when(~whole)(lambda: _store(x, tile, out, lse))
    if x.out_smem is None:
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        plgpu.barrier_arrive(x.q_free.at[x.warpgroup])


def _results(x, tile, accumulator, m, total):
    """The warpgroup's rows of out and lse, 0 and −inf where a row sees nothing or does not exist."""
    plan = x.plan
    total = total.sum(axis=1)
    seen = total > 0
    if plan.query_length is None:
        row = _first_row(x, tile) + ptx.row_numbers()
        seen = seen & (row < tile.query_length)
    kept = 1 - plan.dropout_threshold / 65536
    inverse = jnp.where(seen, (1 / kept) / total, 0.0)
    lse = jnp.where(seen, m * (1 / LOG2E) + jnp.log(total), -jnp.inf)
    inverse = lax.broadcast_in_dim(inverse, accumulator.shape, [0])
    out = accumulator * inverse
    # Queries past the sequence's end may be NaN, which a factor of 0 would not silence.
    out = jnp.where(inverse != 0, out, 0.0) if plan.query_length is None else out
    return out.astype(plan.out_dtype or plan.dtype), lse


def _copy_out(x, tile, out, lse):
    """Through shared memory: TMA writes nothing past the last row of `out`; `lse` has rows for all tiles."""
    out_smem = x.q_smem.at[0, x.warpgroup] if x.out_smem is None else x.out_smem.at[x.warpgroup]
    lse_smem = x.lse_smem.at[x.warpgroup]
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the tile before has left the staging memory
    memory.stmatrix(out, out_smem)
    if tile.rows is None:
        lse_smem[...] = lse
    plgpu.commit_smem()
    rows = pl.ds(_array_row(x, tile), ptx.TILE_ROWS)
    for i in range(ptx.slabs(x.plan.D)):
        plgpu.copy_smem_to_gmem(out_smem.at[i], _slab(x, x.out.at[tile.batch, rows, tile.head], i))
    if tile.rows is None:
        plgpu.copy_smem_to_gmem(lse_smem, x.lse.at[tile.batch, tile.head, rows])
    else:  # a copy of one row of numbers starts at multiples of 16 bytes only
        memory.st_global_rows(x.lse, (tile.batch, tile.head, _array_row(x, tile)), lse, i32(ptx.TILE_ROWS))


def _store(x, tile, out, lse):
    """From registers, the rows that exist."""
    rows = (x.plan.T if tile.rows is None else tile.rows) - _first_row(x, tile)
    memory.st_global(x.out, (tile.batch, _array_row(x, tile), tile.head), out, rows)
    memory.st_global_rows(x.lse, (tile.batch, tile.head, _array_row(x, tile)), lse, rows)


def _array_row(x, tile):
    return _first_row(x, tile) + tile.rows_start


# --- host -------------------------------------------------------------------------------------------------------------


def launch(plan: Plan, inputs: Inputs, *, interpret=False):
    """Runs the kernel: `(out [B, T, N, D], lse float32 [B, T, N])`."""
    config = plan.config
    consumers, stages, buffers = config.warpgroups, config.stages, 2 if config.cross_tile else 1

    def smem(*leading, rows, columns):
        return plgpu.SMEM((*leading, ptx.slabs(columns), rows, ptx.SLAB), plan.dtype, transforms=ptx.TRANSFORMS)

    scratch = dict(
        q_smem=smem(buffers, consumers, rows=ptx.TILE_ROWS, columns=plan.H),
        k_smem=smem(stages, rows=config.block_k, columns=plan.H),
        v_smem=smem(stages, rows=config.block_k, columns=plan.D),
        lse_smem=plgpu.SMEM((consumers, ptx.TILE_ROWS), jnp.float32),
        q_ready=plgpu.Barrier(num_arrivals=ptx.slabs(plan.H), num_barriers=buffers * consumers),
        q_free=plgpu.Barrier(num_barriers=buffers * consumers),
        k_ready=plgpu.Barrier(num_arrivals=ptx.slabs(plan.H), num_barriers=stages),
        v_ready=plgpu.Barrier(num_arrivals=ptx.slabs(plan.D), num_barriers=stages),
        v_landed=plgpu.Barrier(num_arrivals=ptx.slabs(plan.D), num_barriers=1),
        k_free=ptx.NamedBarriers(_RING_BARRIERS, stages, consumers),
        v_free=ptx.NamedBarriers(_RING_BARRIERS + stages, stages, consumers),
        turn=ptx.NamedBarriers(_TURN_BARRIERS, consumers, 1),
    )
    if config.own_out:
        scratch["out_smem"] = smem(consumers, rows=ptx.TILE_ROWS, columns=plan.D)
    operands, structure = jax.tree.flatten(inputs)

    def body(*refs, out_smem=None, **allocations):
        read, (out, lse) = jax.tree.unflatten(structure, refs[: len(operands)]), refs[len(operands) :]
        _kernel(plan, read, out, lse, out_smem=out_smem, **allocations)

    out, lse = kernel(
        body,
        name="jattn_attention_forward",
        out_type=(
            jax.ShapeDtypeStruct((plan.B, plan.T, plan.N, plan.D), plan.out_dtype or plan.dtype),
            jax.ShapeDtypeStruct((plan.B, plan.N, plan.T if plan.packed else plan.tiles * config.rows), jnp.float32),
        ),
        scratch=scratch,
        grid={"block": inputs.table.shape[1]},
        warpgroups=consumers + 1,
        interpret=interpret,
        approximate=plan.mod is None and plan.rule is None,
    )(*operands)
    return out, jnp.swapaxes(lse[:, :, : plan.T], 1, 2)

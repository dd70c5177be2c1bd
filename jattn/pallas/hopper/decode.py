"""Attention of few queries over a long cache on compute capability 9.0 (H100, H200), paged or contiguous.

Algorithm, for one item (a split of one sequence's keys under one key head), with the queries of the head's group packed
into the 64 rows of a tile, row t · group + g (more tokens are more tiles):

    s = q · k[block]ᵀ                           (tensor core)
    m, total, p, alpha = online softmax of s
    o = o · alpha + p · v[block]                (tensor core)

and at the end of the item (o / total, lse), which `decode_combine` merges over the splits of a sequence. Caches of int8
and fp8 have a consumer of their own (`decode_quantised`).

Pipeline: a thread block has two streams of items, each with a producer warpgroup, which copies q, k and v (TMA, one
copy a page and slab), and a consumer warpgroup. Nothing overlaps within a stream but copies and arithmetic:

    producer     Q KV0 KV1 KV2 | KV3 … Q' KV0' …          waits for free slots
    consumer     QK0 softmax0 PV0 | QK1 softmax1 PV1 …    waits for copies

Floor: every key and value once, at the 4.57 TB/s that reads reach on an H200: 0.470 ms for B64 S8192 K8 H128 (2.15 GB).
Prediction: 0.485 ms. Partials add 1.5% of traffic, a block costs some 1300 cycles of the 3400 its stream has for it.

Source: Flash-Decoding (Dao, Haziza, Massa, Sizov, 2023).
"""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
from jax import lax

from jattn.pallas._compat import kernel, pl, plgpu
from jattn.pallas.hopper import decode_quantised, decode_rows, memory, mma, ptx, scores, softmax
from jattn.pallas.hopper.decode_combine import combine
from jattn.pallas.hopper.decode_plan import BLOCK, LOG2E, STREAMS, Inputs, Plan, over_items
from jattn.pallas.hopper.lists import i32

# A thread of a consumer and of a producer: 128 · 2 · their sum is 65,536.
_REGISTERS, _REGISTERS_QUANTISED = (192, 64), (208, 48)


# --- kernel -----------------------------------------------------------------------------------------------------------


def _kernel(
    plan: Plan,
    inputs: Inputs,
    # outputs (HBM), X = B · splits; out is float32 if they are going to be merged
    out,  # [X, T, K, group, D]
    lse,  # float32 [X, T, K, group]
    *,
    # shared memory, in slabs of 64 columns (`ptx.slabs`), or of 128 where they have 8 bits
    q_smem,  # [streams, slabs of H, rows, 64]
    k_smem,  # [streams · stages, slabs of H, 64, 64 or 128]
    v_smem,  # [streams · stages, slabs of D, 64, 64 or 128]
    # barriers; a TMA barrier takes one arrival a copy
    q_ready,  # [streams] TMA
    q_free,  # [streams] consumer: it is done with the queries
    k_ready,  # [streams · stages] TMA
    v_ready,  # [streams · stages] TMA
    free,  # [streams · stages] consumer: it is done with the slot's keys and values
    # of a quantised cache (`decode_quantised`)
    states=None,  # float32 [streams, 2, warps, rows]
    parts=None,  # float32 [streams, warps, 8, D + padding]
    scales=None,  # float32 [streams · stages, 2, 64]: of the tokens of a block, keys and values
    scales_ready=None,  # [streams · stages] producer
):
    warpgroup, blocks = lax.axis_index("warpgroup"), lax.axis_size("block")
    stream = lax.rem(warpgroup, i32(STREAMS))
    x = SimpleNamespace(
        plan=plan, **vars(inputs), out=out, lse=lse, q_smem=q_smem, k_smem=k_smem, v_smem=v_smem, q_ready=q_ready,
        q_free=q_free, k_ready=k_ready, v_ready=v_ready, free=free, states=states, parts=parts, scales=scales,
        scales_ready=scales_ready, block=lax.axis_index("block"), stream=stream, streams=blocks * STREAMS,
    )  # fmt: skip
    x.first_item = _first_item(stream, x.block, blocks)

    mine, others = _REGISTERS_QUANTISED if plan.scales else _REGISTERS

    @pl.when(warpgroup >= STREAMS)
    def _():
        plgpu.set_max_registers(others, action="decrease")
        _produce(x)

    @pl.when(warpgroup < STREAMS)
    def _():
        plgpu.set_max_registers(mine, action="increase")
        decode_quantised.consume(x) if plan.scales else _consume(x)


def _first_item(stream, block, blocks):
    """A few items are spread over all multiprocessors."""
    return stream * blocks + block


def _slot(x, position):
    """Slot of the block at a position in the stream's sequence of blocks."""
    return x.stream * x.plan.stages + lax.rem(position, i32(x.plan.stages))


# --- producer ---------------------------------------------------------------------------------------------------------


def _produce(x):
    stages = x.plan.stages

    def one_item(item, number, position):
        _load_queries(x, item, number)
        lax.fori_loop(0, item.blocks, lambda i, _: _load_block(x, item, i, position), None)
        return position + item.blocks

    items, position = over_items(x, one_item, i32(0))
    # Every barrier phase is waited for before the thread block ends.
    pl.when(items > 0)(lambda: plgpu.barrier_wait(x.q_free.at[x.stream]))
    for i in range(stages):
        pl.when(position >= stages - i)(lambda i=i: plgpu.barrier_wait(x.free.at[_slot(x, position + i)]))


def _load_queries(x, item, number):
    """The queries of the head's group; what the rows past them hold concerns no other row."""
    group, ready = x.plan.group, x.q_ready.at[x.stream]
    pl.when(number > 0)(lambda: plgpu.barrier_wait(x.q_free.at[x.stream]))

    def one_token(t, _):  # TMA reads zeros past the last
        rows = x.q.at[item.batch, item.token + t, pl.ds(item.head * group, group)]
        for i in range(ptx.slabs(x.plan.H)):
            smem = x.q_smem.at[x.stream, i, pl.ds(t * group, group)]
            plgpu.copy_gmem_to_smem(_slab(x, rows, i), smem, ready)

    if x.plan.tokens == 1:
        one_token(0, None)
    else:
        lax.fori_loop(0, x.plan.tokens, one_token, None)


def _load_block(x, item, i, position):
    """The item's i-th block of keys and values."""
    slot, rows = _slot(x, position + i), x.plan.page_rows
    places = _places(x, item, item.begin + i)  # read before the wait: it hides their latency
    by_token = "token" in (x.plan.scales or ())
    scales = decode_quantised.load_scales(x, item, (item.begin + i) * BLOCK) if by_token else None
    pl.when(position + i >= x.plan.stages)(lambda: plgpu.barrier_wait(x.free.at[slot]))
    for array, smem, ready in ((x.k, x.k_smem, x.k_ready), (x.v, x.v_smem, x.v_ready)):
        for j, (page, row) in enumerate(places):
            source = array.at[page, pl.ds(row, rows), item.head]
            for s in range(smem.shape[1]):
                target = smem.at[slot, s, pl.ds(j * rows, rows)]
                plgpu.copy_gmem_to_smem(_slab(x, source, s, smem.shape[3]), target, ready.at[slot])
    if by_token:
        decode_quantised.st_scales(scales, x.scales.at[slot])
        plgpu.barrier_arrive(x.scales_ready.at[slot])


def _places(x, item, block) -> list:
    """(page, first row in it) of each copy that a block is made of. What lies past the length is somebody's page."""
    p = x.plan
    if x.tables is None:
        return [(item.batch, block * BLOCK)]
    last = x.tables.shape[1] - 1
    if p.page is None:
        entries = [(i32(0), block * BLOCK)]
    elif p.page >= BLOCK:
        in_page = p.page // BLOCK
        entries = [(lax.div(block, i32(in_page)), lax.rem(block, i32(in_page)) * BLOCK)]
    else:
        entries = [(block * (BLOCK // p.page) + j, i32(0)) for j in range(BLOCK // p.page)]
    return [(jnp.clip(x.tables[item.batch, jnp.minimum(e, last)], 0, p.pages - 1), row) for e, row in entries]


def _slab(x, rows, i, width=ptx.SLAB):
    """Columns of slab i of `rows [rows, columns]` in HBM. TMA reads zeros past the last."""
    start = i * width
    if start + width > rows.shape[-1]:
        start = jnp.minimum(x.block, 0) + start  # Pallas refuses a constant slice past the edge
    return rows.at[:, pl.ds(start, width)]


# --- consumer ---------------------------------------------------------------------------------------------------------


def _consume(x):
    p = x.plan
    k_matrix = ptx.matrix(lambda i: x.k_smem.at[i], BLOCK, p.H)
    v_matrix = ptx.matrix(lambda i: x.v_smem.at[i], BLOCK, p.D, along_rows=True)

    def one_item(item, number, position):
        del number
        plgpu.barrier_wait(x.q_ready.at[x.stream])
        low, high = _row_bounds(x, item)

        def one_block(i, carry):
            m, total, accumulator = carry
            slot, start = _slot(x, position + i), (item.begin + i) * BLOCK
            plgpu.barrier_wait(x.k_ready.at[slot])
            # Read anew for each block: ptxas 13.0 gives registers that stay the same through the loop to the weights as
            # well (seen at D = 64, whose results were wrong from the second block on).
            q = memory.ldmatrix(x.q_smem.at[x.stream], p.H)
            (s,) = ptx.wgmma_wait_group(0, ptx.wgmma_rs_nt(q, k_matrix.at(slot)))
            if p.modified:
                scale = x.scale[0] if p.scale is None else p.scale
                s = scores.modify(s, None, scale=scale, bias=None, mod=None, aux=(), soft_cap=p.soft_cap)
            s = softmax.mask_columns(s, None if low is None else low - start, high - start)
            weights, m, total, alpha = softmax.online_softmax(s, m, total, p.factor, may_be_empty=True, lazy=False)
            accumulator = softmax.rescale(accumulator, alpha, lazy=False)
            plgpu.barrier_wait(x.v_ready.at[slot])
            _clean(x, item.sequence, slot, start)
            accumulator = ptx.wgmma_rs(accumulator, weights.astype(p.dtype), v_matrix.at(slot))
            (accumulator,) = ptx.wgmma_wait_group(0, accumulator)
            plgpu.barrier_arrive(x.free.at[slot])
            return m, total, accumulator

        state = lax.fori_loop(0, item.blocks, one_block, softmax.init_state(p.D))
        plgpu.barrier_arrive(x.q_free.at[x.stream])
        _write(x, item, *state)
        return position + item.blocks

    over_items(x, one_item, i32(0))


def _row_bounds(x, item):
    """Keys `[low, high)` that the rows can see, int32 `[64]` each; low is None for no bound. Rows past the queries see
    nothing."""
    p, sequence = x.plan, item.sequence
    token = lax.div(ptx.row_numbers(), i32(p.group)) + item.token
    high = jnp.where(token < sequence.queries, sequence.keys, 0)
    position = token + sequence.offset
    if p.right is not None:
        high = jnp.minimum(position + (p.right + 1), high)
    return None if p.left is None else position - p.left, high


def _clean(x, sequence, slot, start):
    """Values that nobody may see may be NaN, which a weight of 0 would not silence."""

    @pl.when((sequence.low > start) | (sequence.high < start + BLOCK))
    def _():
        memory.st_shared_zero_outside(x.v_smem.at[slot], sequence.low - start, sequence.high - start)
        plgpu.commit_smem()


def _write(x, item, m, total, accumulator):
    """The item's (out, lse), 0 and −inf where a row sees nothing."""
    p = x.plan
    total = total.sum(axis=1)
    seen = total > 0
    inverse = jnp.where(seen, 1 / total, 0.0)
    lse = jnp.where(seen, m * (1 / LOG2E) + jnp.log(total), -jnp.inf)
    out = accumulator * lax.broadcast_in_dim(inverse, accumulator.shape, [0])
    place = item.batch * p.splits + item.split
    row, rows = item.token * p.group, p.tokens * p.group
    decode_rows.st_global(x.out, (place, item.head), out.astype(x.out.dtype), row, rows=rows)
    decode_rows.st_global_rows(x.lse, (place, item.head), lse, row, rows=rows)


# --- host -------------------------------------------------------------------------------------------------------------


def launch(plan: Plan, inputs: Inputs, *, multiprocessors: int, interpret=False):
    """Runs the kernel and, where there may be something to merge, the one that does: `(out [B, T, N, D] in the plan's
    dtype, lse float32 [B, T, N])`."""
    parts = plan.B * plan.splits
    operands, structure = jax.tree.flatten(inputs)

    def body(*refs, **allocations):
        read, (out, lse) = jax.tree.unflatten(structure, refs[: len(operands)]), refs[len(operands) :]
        _kernel(plan, read, out, lse, **allocations)

    shape = parts, plan.T, plan.K, plan.group
    out, lse = kernel(
        body,
        name="jattn_decode",
        out_type=(
            jax.ShapeDtypeStruct((*shape, plan.D), jnp.float32 if plan.merged else plan.dtype),
            jax.ShapeDtypeStruct(shape, jnp.float32),
        ),
        scratch=_scratch(plan, inputs),
        grid={"block": min(multiprocessors, parts * plan.K * plan.tiles)},
        warpgroups=2 * STREAMS,
        interpret=interpret,
        approximate=True,
    )(*operands)
    rows = plan.T * plan.N
    if plan.merged:
        out, lse = out.reshape(parts, 1, rows, plan.D), lse.reshape(parts, rows)
        out, lse = combine(
            plan, inputs.lengths, inputs.query_lengths, inputs.sinks, out, lse, interpret=interpret
        )  # fmt: skip
    return out.reshape(plan.B, plan.T, plan.N, plan.D), lse.reshape(plan.B, plan.T, plan.N)


def _scratch(plan, inputs) -> dict:
    stages, copies = STREAMS * plan.stages, BLOCK // plan.page_rows

    def smem(slots, columns, dtype, rows=BLOCK):
        width = mma.ROW_BYTES // dtype.itemsize
        return plgpu.SMEM((slots, -(-columns // width), rows, width), dtype, transforms=ptx.TRANSFORMS)

    k_smem, v_smem = smem(stages, plan.H, inputs.k.dtype), smem(stages, plan.D, inputs.v.dtype)
    scratch = dict(
        q_smem=smem(STREAMS, plan.H, plan.dtype, plan.rows), k_smem=k_smem, v_smem=v_smem,
        q_ready=plgpu.Barrier(num_arrivals=plan.tokens * ptx.slabs(plan.H), num_barriers=STREAMS),
        q_free=plgpu.Barrier(num_barriers=STREAMS),
        k_ready=plgpu.Barrier(num_arrivals=copies * k_smem.shape[1], num_barriers=stages),
        v_ready=plgpu.Barrier(num_arrivals=copies * v_smem.shape[1], num_barriers=stages),
        free=plgpu.Barrier(num_barriers=stages),
    )  # fmt: skip
    if plan.scales:
        scratch |= dict(
            states=plgpu.SMEM((STREAMS, 2, mma.WARPS, plan.rows), jnp.float32),
            parts=plgpu.SMEM((STREAMS, mma.WARPS, mma.QUERIES, plan.D + mma.PADDING), jnp.float32),
        )
    if "token" in (plan.scales or ()):
        scratch |= dict(
            scales=plgpu.SMEM((stages, 2, BLOCK), jnp.float32), scales_ready=plgpu.Barrier(num_barriers=stages)
        )
    return scratch

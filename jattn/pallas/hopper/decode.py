"""Attention of few queries over a long cache on compute capability 9.0 (H100, H200), paged or contiguous.

Algorithm, for one item (a split of one sequence's keys under one key head), with the queries of the head's group packed
into the 64 rows of a tile, row t · group + g (more tokens are more tiles):

    s = q · k[block]ᵀ                           (tensor core)
    s = modifier, soft cap, mask of s
    m, total, p, alpha = online softmax of s
    o = o · alpha + p · v[block]                (tensor core)

and at the end of the item (o / total, lse), which `decode_combine` merges over the splits of a sequence. Caches of int8
and fp8 have a consumer of their own (`decode_quantised`).

Pipeline: a thread block has two streams of items, each with a producer warpgroup, which deals its items, copies q, k
and v (TMA, one copy a page and slab) and says in shared memory what the item is, and a consumer warpgroup. Nothing
overlaps within a stream but copies and arithmetic:

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
from jattn.pallas.hopper.decode_plan import (
    BLOCK,
    FIELDS,
    STREAMS,
    Inputs,
    Item,
    Plan,
    over_blocks,
    over_items,
    slot_of,
)  # fmt: skip
from jattn.pallas.hopper.lists import i32

# --- kernel -----------------------------------------------------------------------------------------------------------


def _kernel(
    plan: Plan,
    inputs: Inputs,
    # outputs (HBM); out is float32 if they are going to be merged, and then only what an item has seen is written
    out,  # [splits, rows, K, group, D]
    lse,  # float32 [splits, rows, K, group]
    *,
    # shared memory, in slabs of 64 columns (`ptx.slabs`), or of 128 where they have 8 bits
    q_smem,  # [streams · query slots, slabs of H, query rows, 64]
    k_smem,  # [streams · stages, slabs of H, 64, 64 or 128]
    v_smem,  # [streams · stages, slabs of D, 64, 64 or 128]
    items,  # int32 [streams · query slots, fields]
    # barriers; a TMA barrier takes one arrival a copy
    dealt,  # [streams · query slots] producer: what the item is, can be read
    q_ready,  # [streams · query slots] TMA
    q_free,  # [streams · query slots] consumer: it is done with the queries
    k_ready,  # [streams · stages] TMA
    v_ready,  # [streams · stages] TMA
    free,  # [streams · stages] consumer: it is done with the slot's keys and values
    **quantised,  # what `decode_quantised.scratch` names
):
    warpgroup, blocks = lax.axis_index("warpgroup"), lax.axis_size("block")
    stream = lax.rem(warpgroup, i32(STREAMS))
    x = SimpleNamespace(
        plan=plan, **vars(inputs), out=out, lse=lse, q_smem=q_smem, k_smem=k_smem, v_smem=v_smem, items=items,
        dealt=dealt, q_ready=q_ready, q_free=q_free, k_ready=k_ready, v_ready=v_ready, free=free,
        **quantised, block=lax.axis_index("block"), stream=stream, streams=blocks * STREAMS,
    )  # fmt: skip
    x.first_item = _first_item(stream, x.block, blocks)

    @pl.when(warpgroup >= STREAMS)
    def _():
        plgpu.set_max_registers(plan.registers[1], action="decrease")
        _produce(x)

    @pl.when(warpgroup < STREAMS)
    def _():
        plgpu.set_max_registers(plan.registers[0], action="increase")
        _consume(x)


def _first_item(stream, block, blocks):
    """A few items are spread over all multiprocessors."""
    return stream * blocks + block


def _query_slot(x, number):
    """Slot of the stream's item of this number."""
    return x.stream * x.plan.query_slots + lax.rem(number, i32(x.plan.query_slots))


# --- producer ---------------------------------------------------------------------------------------------------------


def _produce(x):
    p = x.plan

    def one_item(item, carry):
        number, position = carry
        needed = (item.blocks > 0) | (not p.merged)  # nobody reads what an item without keys has found

        @pl.when(needed)
        def _():
            _deal(x, item, number)
            _load_queries(x, item, number)
            ahead = decode_quantised.read_ahead(x, item, i32(-1), None) if p.scales else None
            lax.fori_loop(0, item.blocks, lambda i, ahead: _load_block(x, item, i, position, ahead), ahead)

        return number + needed.astype(jnp.int32), position + item.blocks

    items, position = over_items(x, one_item, (i32(0), i32(0)))
    _deal(x, Item(*[i32(-1)] * len(FIELDS)), items)
    # Every barrier phase is waited for before the thread block ends.
    for i in range(1, p.query_slots):
        pl.when(items >= i)(lambda i=i: plgpu.barrier_wait(x.q_free.at[_query_slot(x, items - i)]))
    for i in range(p.stages):
        pl.when(position >= p.stages - i)(lambda i=i: plgpu.barrier_wait(x.free.at[slot_of(x, position + i)]))


def _deal(x, item, number):
    """Says what the stream's item of this number is; -1 is the last."""
    slot = _query_slot(x, number)
    pl.when(number >= x.plan.query_slots)(lambda: plgpu.barrier_wait(x.q_free.at[slot]))
    for i, field in enumerate(FIELDS):
        x.items[slot, i] = getattr(item, field)
    plgpu.barrier_arrive(x.dealt.at[slot])


def _load_queries(x, item, number):
    """The queries of the head's group; what the rows past them hold concerns no other row."""
    group, slot = x.plan.group, _query_slot(x, number)

    def one_token(t, _):  # TMA reads zeros past the last
        rows = x.q.at[item.row + t, pl.ds(item.head * group, group)]
        for i in range(ptx.slabs(x.plan.H)):
            smem = x.q_smem.at[slot, i, pl.ds(t * group, group)]
            plgpu.copy_gmem_to_smem(_slab(x, rows, i), smem, x.q_ready.at[slot])

    if x.plan.tokens == 1:
        one_token(0, None)
    else:
        lax.fori_loop(0, x.plan.tokens, one_token, None)


def _load_block(x, item, i, position, ahead):
    """The item's i-th block of keys and values; returns what was read ahead, see `decode_quantised.read_ahead`."""
    slot, rows = slot_of(x, position + i), x.plan.page_rows
    places = _places(x, item, item.begin + i)  # read before the wait: it hides their latency
    following = None if ahead is None else decode_quantised.read_ahead(x, item, i, ahead)
    pl.when(position + i >= x.plan.stages)(lambda: plgpu.barrier_wait(x.free.at[slot]))
    for array, smem, ready in ((x.k, x.k_smem, x.k_ready), (x.v, x.v_smem, x.v_ready)):
        for j, (page, row) in enumerate(places):
            source = array.at[page, pl.ds(row, rows), item.head]
            for s in range(smem.shape[1]):
                target = smem.at[slot, s, pl.ds(j * rows, rows)]
                plgpu.copy_gmem_to_smem(_slab(x, source, s, smem.shape[3]), target, ready.at[slot])
    if ahead is not None:
        decode_quantised.hand_over(x, ahead, slot)
    return following


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
    attend, write = (decode_quantised.attend, decode_quantised.write) if x.plan.scales else (_attend, _write)
    if not x.plan.scales:
        x.q_matrix = ptx.matrix(lambda i: x.q_smem.at[i], x.plan.query_rows, x.plan.H) if x.plan.queries_stay else None
        x.k_matrix = ptx.matrix(lambda i: x.k_smem.at[i], BLOCK, x.plan.H)
        x.v_matrix = ptx.matrix(lambda i: x.v_smem.at[i], BLOCK, x.plan.D, along_rows=True)

    def one_item(state):
        number, position, _ = state
        slot = _query_slot(x, number)
        plgpu.barrier_wait(x.dealt.at[slot])
        item = Item(*(x.items[slot, i] for i in range(len(FIELDS))))
        more = item.blocks >= 0

        @pl.when(more)
        def _():
            plgpu.barrier_wait(x.q_ready.at[slot])
            state = attend(x, item, slot, position)
            plgpu.barrier_arrive(x.q_free.at[slot])
            write(x, item, *state)

        return number + 1, position + item.blocks, more

    lax.while_loop(lambda state: state[2], one_item, (i32(0), i32(0), jnp.bool_(True)))


def _attend(x, item, query_slot, position):
    """`(m, total, accumulators)` of an item whose first block has this position; see `softmax`."""
    p = x.plan
    tokens, heads = decode_rows.tokens_and_heads(item.token, item.head * p.group, p.group)
    low, high = _row_bounds(x, item, tokens)

    def one_block(i, state, ruled):
        m, total, accumulators = state
        slot, start = slot_of(x, position + i), (item.begin + i) * BLOCK
        plgpu.barrier_wait(x.k_ready.at[slot])
        (s,) = ptx.wgmma_wait_group(0, _product(x, query_slot, slot))
        place = decode_rows.Place(item.batch, heads, tokens, item.offset, start, origin)
        if p.modified:
            scale = x.scale[0] if p.scale is None else p.scale
            aux = tuple((array, "") for array in x.aux)
            s = scores.modify(s, place, scale=scale, bias=None, mod=p.mod, aux=aux, soft_cap=p.soft_cap)
        if ruled:
            s = scores.hide(s, place, p.rule, x.mask_arrays)
        s = softmax.mask_columns(s, None if low is None else low - start, high - start, half=p.half)
        weights, m, total, alpha = softmax.online_softmax(
            s, m, total, p.factor, may_be_empty=True, lazy=False, half=p.half
        )
        accumulators = [softmax.rescale(part, alpha, lazy=False, half=p.half) for part in accumulators]
        plgpu.barrier_wait(x.v_ready.at[slot])
        _clean(x, item, slot, start)
        weights, values = weights.astype(p.dtype), x.v_matrix.at(slot)
        for i, (first, columns) in enumerate(p.strips):
            own = values if columns == p.D else values.columns_from(i32(first), columns=columns)
            accumulators[i] = ptx.wgmma_rs(accumulators[i], weights, own)
        accumulators = ptx.wgmma_wait_group(0, *accumulators)
        plgpu.barrier_arrive(x.free.at[slot])
        return m, total, tuple(accumulators)

    origin = (0, 0) if x.origin is None else (x.origin[0], x.origin[1])
    m, total, _ = softmax.init_state(8)
    state = m, total, tuple(ptx.zeros(columns) for _, columns in p.strips)
    return over_blocks(x, item, one_block, state)


def _product(x, query_slot, slot):
    """Scores of one block, in flight."""
    if x.plan.queries_stay:
        return ptx.wgmma_ss(x.q_matrix.at(query_slot), x.k_matrix.at(slot), x.plan.dtype)
    # Read anew for each block: ptxas 13.0 gives registers that stay the same through the loop to the weights as well
    # (seen at D = 64, whose results were wrong from the second block on).
    return ptx.wgmma_rs_nt(memory.ldmatrix(x.q_smem.at[query_slot], x.plan.H), x.k_matrix.at(slot))


def _row_bounds(x, item, tokens):
    """Keys `[low, high)` that the rows can see, int32 `[64]` each; low is None for no bound. Rows past the queries see
    nothing."""
    p, position = x.plan, tokens + item.offset
    high = jnp.where(tokens < item.queries, item.high, 0)
    if p.right is not None:
        high = jnp.minimum(position + (p.right + 1), high)
    return None if p.left is None else position - p.left, high


def _clean(x, item, slot, start):
    """Values that nobody may see may be NaN, which a weight of 0 would not silence."""

    @pl.when((item.low > start) | (item.high < start + BLOCK))
    def _():
        memory.st_shared_zero_outside(x.v_smem.at[slot], item.low - start, item.high - start)
        plgpu.commit_smem()


def _write(x, item, m, total, accumulators):
    """The item's (out, lse), 0 and −inf where a row sees nothing."""
    p = x.plan
    total = total.sum(axis=1)
    seen = total > 0
    inverse = jnp.where(seen, 1 / total, 0.0)
    lse = softmax.log_sum(m, total)
    start = item.split, item.row, item.head
    rows = jnp.minimum((item.queries if p.merged else p.T) - item.token, p.tokens) * p.group
    for part, (first, _) in zip(accumulators, p.strips, strict=True):
        out = part * lax.broadcast_in_dim(inverse, part.shape, [0])
        decode_rows.st_global(x.out, start, out.astype(x.out.dtype), rows, first)
    decode_rows.st_global_rows(x.lse, start, lse, rows)


# --- host -------------------------------------------------------------------------------------------------------------


def launch(plan: Plan, inputs: Inputs, *, multiprocessors: int, interpret=False):
    """Runs the kernel and, where there may be something to merge, the one that does: `(out [rows, N, D] in the plan's
    dtype, lse float32 [rows, N])`."""
    operands, structure = jax.tree.flatten(inputs)

    def body(*refs, **allocations):
        read, (out, lse) = jax.tree.unflatten(structure, refs[: len(operands)]), refs[len(operands) :]
        _kernel(plan, read, out, lse, **allocations)

    shape = plan.splits, plan.rows, plan.K, plan.group
    out, lse = kernel(
        body,
        name="jattn_decode",
        out_type=(
            jax.ShapeDtypeStruct((*shape, plan.D), jnp.float32 if plan.merged else plan.dtype),
            jax.ShapeDtypeStruct(shape, jnp.float32),
        ),
        scratch=_scratch(plan, inputs),
        grid={"block": min(multiprocessors, _most_items(plan))},
        warpgroups=2 * STREAMS,
        interpret=interpret,
        approximate=True,
    )(*operands)
    if plan.merged:
        out, lse = combine(plan, inputs, out, lse, interpret=interpret)
    return out.reshape(plan.rows, plan.N, plan.D), lse.reshape(plan.rows, plan.N)


def _most_items(plan) -> int:
    tiles = -(-plan.T // plan.tokens) + plan.B if plan.packed else plan.B * -(-plan.T // plan.tokens)
    return plan.splits * plan.K * tiles


def _scratch(plan, inputs) -> dict:
    stages, queries = STREAMS * plan.stages, STREAMS * plan.query_slots
    copies = BLOCK // plan.page_rows

    def smem(slots, rows, columns, dtype):
        width = mma.ROW_BYTES // dtype.itemsize
        return plgpu.SMEM((slots, -(-columns // width), rows, width), dtype, transforms=ptx.TRANSFORMS)

    k_smem, v_smem = smem(stages, BLOCK, plan.H, inputs.k.dtype), smem(stages, BLOCK, plan.D, inputs.v.dtype)
    scratch = dict(
        q_smem=smem(queries, plan.query_rows, plan.H, plan.dtype), k_smem=k_smem, v_smem=v_smem,
        items=plgpu.SMEM((queries, len(FIELDS)), jnp.int32),
        dealt=plgpu.Barrier(num_barriers=queries),
        q_ready=plgpu.Barrier(num_arrivals=plan.tokens * ptx.slabs(plan.H), num_barriers=queries),
        q_free=plgpu.Barrier(num_barriers=queries),
        k_ready=plgpu.Barrier(num_arrivals=copies * k_smem.shape[1], num_barriers=stages),
        v_ready=plgpu.Barrier(num_arrivals=copies * v_smem.shape[1], num_barriers=stages),
        free=plgpu.Barrier(num_barriers=stages),
    )  # fmt: skip
    return scratch | (decode_quantised.scratch(plan) if plan.scales else {})

"""int8 and fp8 (e4m3) keys and values in the decode kernel: its consumer, and what brings scales along.

The producer copies blocks as they are, half the bytes of bfloat16, and the consumer multiplies in registers (`mma`):

    s = (K[block] · qᵀ) · scale of each key     in each warp, of 16 of the block's 64 keys
    m, total, p, alpha = online softmax of s    over the warp's keys
    o = o · alpha + V[block]ᵀ · (p · scale of each value)

and its four warps merge what they have at the end of an item. Both formats fit into bfloat16, so that only scores and
weights know of scales. One of the tensor or of a head multiplies all scores, or the result; those of tokens are loaded
by the producer's threads, which have nothing else to do, into shared memory.

wgmma would read both operands of a block from shared memory: 16 KB that arrive, as bytes read once, as bfloat16 written
once (32 KB) and read once by the products, with the queries are 112 KB, 900 of the 950 cycles that a multiprocessor has
for a block at full bandwidth (H = D = 128). Its 64 rows of queries are also 60 more than 4 heads of one token fill.
Here a block costs 16 KB written and read, 256 cycles, and a warp some 450 instructions, of which 256 convert.

Floor: 0.235 ms for B64 S8192 K8 H128 at 4.57 TB/s (1.07 GB), 0.242 with scales of tokens. Prediction: 0.255 and 0.265.
"""

import jax.numpy as jnp
import numpy as np
from jax import lax

from jattn.pallas._compat import arith, fragmented_array, interpreting, ir, llvm, pl, plgpu, utils, vector
from jattn.pallas.hopper import memory, mma, ptx, scores
from jattn.pallas.hopper.decode_plan import BLOCK, LOG2E, over_items
from jattn.pallas.hopper.lists import i32
from jattn.pallas.hopper.ptx import SCALAR, integer

_KEPT_QUERIES = 16  # in registers through an item
_THREADS = plgpu.Layout.WG_STRIDED((128,), vec_size=1)


# --- consumer ---------------------------------------------------------------------------------------------------------


def consume(x):
    """The consumer of a stream of a quantised cache."""
    p = x.plan

    def one_item(item, number, position):
        del number
        plgpu.barrier_wait(x.q_ready.at[x.stream])
        queries = x.q_smem.at[x.stream]
        if p.rows <= _KEPT_QUERIES:
            queries = mma.load_queries(queries, p.H)
            plgpu.barrier_arrive(x.q_free.at[x.stream])
        low, high = _bounds(x, item)
        scale = x.scale[0] if p.scale is None else p.scale
        if p.scales[0] != "token":
            scale = scale * _scale_of(x.k_scale, item.head)

        def one_block(i, carry):
            accumulator, state = carry
            slot = x.stream * p.stages + lax.rem(position + i, i32(p.stages))
            start = (item.begin + i) * BLOCK
            if "token" in p.scales:
                plgpu.barrier_wait(x.scales_ready.at[slot])
            plgpu.barrier_wait(x.k_ready.at[slot])
            s = mma.product(x.k_smem.at[slot], p.H, queries, p.rows)
            if p.scales[0] == "token":
                s = _scaled(s, x.scales.at[slot, 0])
            s = _in_log2(s, scale, p.soft_cap)
            key = ptx.numbers(start, 0, p.rows)
            seen = key < high if low is None else (key < high) & (key >= low)
            s = jnp.where(seen, s, -jnp.inf)
            weights, alpha, state = mma.online_softmax(s, state)
            if p.scales[1] == "token":
                weights = _scaled(weights, x.scales.at[slot, 1])
            plgpu.barrier_wait(x.v_ready.at[slot])
            _clean(x, item.sequence, slot, start)
            accumulator = mma.accumulate(accumulator, alpha, weights, x.v_smem.at[slot], p.D)
            plgpu.barrier_arrive(x.free.at[slot])
            return accumulator, state

        results = lax.fori_loop(0, item.blocks, one_block, mma.init(p.D, p.rows))
        if p.rows > _KEPT_QUERIES:
            plgpu.barrier_arrive(x.q_free.at[x.stream])
        _write(x, item, *results)
        return position + item.blocks

    over_items(x, one_item, i32(0))


def _scale_of(scale, head):
    """The one scale of a head's keys or values, or of all."""
    return scale[jnp.minimum(head, scale.shape[0] - 1)]


def _scaled(tile, ref):
    """`tile [64, n]` times float32 `ref [64]` in shared memory, one a row."""
    rows = ref[...] if interpreting() else plgpu.load(ref, layout=ptx.ROW)
    return tile * lax.broadcast_in_dim(rows, tile.shape, [0])


def _in_log2(s, scale, soft_cap):
    if soft_cap is None:
        return s * (scale * LOG2E)
    s = scores.modify(s, None, scale=scale, bias=None, mod=None, aux=(), soft_cap=soft_cap)
    return s * LOG2E


def _bounds(x, item):
    """Keys `[low, high)` that the queries can see, int32 `[64, queries]` each with equal rows, of which the compiler
    keeps one; low is None for no bound. Columns past the queries see nothing."""
    p, sequence = x.plan, item.sequence
    token = lax.div(ptx.numbers(i32(0), 1, p.rows), i32(p.group)) + item.token
    high = jnp.where(token < sequence.queries, sequence.keys, 0)
    position = token + sequence.offset
    if p.right is not None:
        high = jnp.minimum(position + (p.right + 1), high)
    return None if p.left is None else position - p.left, high


def _clean(x, sequence, slot, start):
    """Values that nobody may see may be NaN, which a weight of 0 would not silence; integers are not."""
    if x.v.dtype == jnp.int8:
        return

    @pl.when((sequence.low > start) | (sequence.high < start + BLOCK))
    def _():
        memory.st_shared_zero_outside(x.v_smem.at[slot], sequence.low - start, sequence.high - start)
        plgpu.commit_smem()


def _write(x, item, accumulator, state):
    """The item's (out, lse), 0 and −inf where a query sees nothing, merged over the warps through shared memory."""
    p = x.plan
    states, parts = x.states.at[x.stream], x.parts.at[x.stream]
    scale = 1.0 if p.scales[1] == "token" else _scale_of(x.v_scale, item.head)
    start, row, rows = (item.batch * p.splits + item.split, item.head), item.token * p.group, p.tokens * p.group
    mma.st_states(state, states)
    plgpu.commit_smem()
    for tile in range(p.rows // mma.QUERIES):
        mma.st_part(accumulator, tile, p.D, states, parts, scale)
        plgpu.commit_smem()
        mma.st_global_parts(parts, x.out, start, row, tile=tile, rows=rows)
        if tile == 0:
            mma.st_global_lse(states, x.lse, start, row, rows=rows)
        plgpu.commit_smem()  # before the next tile's, or the next item's


# --- producer ---------------------------------------------------------------------------------------------------------


def load_scales(x, item, first):
    """Scales of a block's 64 keys, then of its values, float32 `[128]`; 0 of those that nobody may see."""
    low, high = item.sequence.low, item.sequence.high
    references = [scale for scale, per in zip((x.k_scale, x.v_scale), x.plan.scales, strict=True) if per == "token"]
    references = references * (2 // len(references))
    return ld_scales(*references, x.tables, item.batch, item.head, first, low, high)


def ld_scales(keys, values, tables, batch, head, first, low, high):
    """float32 `[128]`: scales of keys `[first, first + 64)`, and of the values there; 0 outside `[low, high)`.

    Args:
        keys, values: float32 `[P, page, K]` in HBM.
        tables: int32 `[B, W]` or None, where sequence b is page b.
    """
    (pages, page, _), width = keys.shape, None if tables is None else tables.shape[1]
    if interpreting():
        key = first + jnp.arange(BLOCK, dtype=jnp.int32)
        if tables is None:
            at, slot = jnp.full((BLOCK,), batch), jnp.minimum(key, page - 1)
        else:
            at = tables[batch, :][jnp.minimum(key // page, width - 1)]
            at, slot = jnp.clip(at, 0, pages - 1), key % page
        found = [ref[...][at, slot, head] for ref in (keys, values)]
        return jnp.concatenate([jnp.where((key >= low) & (key < high), x, 0.0) for x in found])
    references = (keys, values) if tables is None else (keys, values, tables)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(),) * len(references) + (SCALAR,) * 5,
        return_type=plgpu.ShapeDtypeStruct((128,), jnp.float32, layout=_THREADS),
    )
    def load(_, *operands):
        references, (batch, head, first, low, high) = operands[:-5], (x.registers[()] for x in operands[-5:])
        thread = arith.remui(ptx.thread_index(), integer(128))
        key = arith.addi(first, arith.remui(thread, integer(BLOCK)))
        if tables is None:
            at, slot = batch, arith.minsi(key, integer(page - 1))
        else:
            entry = arith.minsi(arith.divui(key, integer(page)), integer(width - 1))
            flat = memory._flat(ir.MemRefType(references[2].type), (batch, entry))
            at = llvm.load(ptx.i32(), memory._element_pointer(utils.memref_ptr(references[2]), ptx.i32(), flat))
            at, slot = memory._clipped(at, pages), arith.remui(key, integer(page))
        flat = memory._flat(ir.MemRefType(references[0].type), (at, slot, head))
        bases = [llvm.ptrtoint(_i64(), utils.memref_ptr(ref)) for ref in references[:2]]
        base = arith.select(arith.cmpi(arith.CmpIPredicate.slt, thread, integer(BLOCK)), *bases)
        pointer = arith.addi(base, arith.muli(flat, memory._int64(4)))
        seen = arith.andi(arith.cmpi(arith.CmpIPredicate.sge, key, low), arith.cmpi(arith.CmpIPredicate.slt, key, high))
        text = "{ .reg .pred p; setp.ne.b32 p, $2, 0; mov.f32 $0, 0f00000000; @p ld.global.f32 $0, [$1]; }"
        operands = [pointer, arith.extui(ptx.i32(), seen)]
        value = llvm.inline_asm(ir.F32Type.get(), operands, text, "=&f,l,r", has_side_effects=True)
        return _one_a_thread(value)

    return load(*references, *(jnp.asarray(x, jnp.int32) for x in (batch, head, first, low, high)))


def st_scales(values, ref) -> None:
    """Stores float32 `[128]` to `ref [2, 64]` in shared memory."""
    if interpreting():
        ref[...] = values.reshape(2, BLOCK)
        return

    @plgpu.inline_mgpu(arg_types=(_THREADS, plgpu.RefType()))
    def store(_, values, ref):
        thread = arith.remui(ptx.thread_index(), integer(128))
        place = arith.addi(llvm.ptrtoint(ptx.i32(), utils.memref_ptr(ref)), arith.muli(thread, integer(4)))
        (register,) = values.registers.flat
        value = vector.extract(register, dynamic_position=[], static_position=ir.DenseI64ArrayAttr.get([0]))
        text = "st.shared.f32 [$0], $1;"
        llvm.inline_asm(ir.Type.parse("!llvm.void"), [place, value], text, "r,f", has_side_effects=True)

    store(values, ref)


def _one_a_thread(value):
    layout = fragmented_array.WGStridedFragLayout((128,), 1)
    registers = np.empty(layout.registers_shape((128,)), dtype=object)
    for ix in np.ndindex(registers.shape):
        registers[ix] = vector.broadcast(ir.VectorType.get((1,), value.type), value)
    return fragmented_array.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)


def _i64():
    return ir.IntegerType.get_signless(64)

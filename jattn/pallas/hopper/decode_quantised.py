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
Measured, the merge's 0.0055 included: 0.263 to 0.270 and 0.268 to 0.272, where bfloat16 takes 0.491 to 0.500; pages of
64 0.276 and of 16 0.301. Many tokens are slow: 16 of 4 heads are two tiles of 32 rows, each of which converts every
block for itself, and take 1.04 (bfloat16 0.61).
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from jattn.pallas._compat import arith, fragmented_array, interpreting, ir, llvm, pl, plgpu, utils, vector
from jattn.pallas.hopper import decode_rows, memory, mma, ptx, scores
from jattn.pallas.hopper.decode_plan import BLOCK, LOG2E, STREAMS, over_blocks, slot_of
from jattn.pallas.hopper.lists import i32
from jattn.pallas.hopper.ptx import SCALAR, integer
from jattn.pallas.lowering import Element

_KEPT_QUERIES = 16 * 128  # numbers of a tile that stay in registers through an item
_THREADS = plgpu.Layout.WG_STRIDED((128,), vec_size=1)


# --- consumer ---------------------------------------------------------------------------------------------------------


def attend(x, item, query_slot, position):
    """`(accumulator, state)` of an item whose first block has this position; see `mma`."""
    p = x.plan
    queries = x.q_smem.at[query_slot]
    if p.tile_rows * p.H <= _KEPT_QUERIES:
        queries = mma.load_queries(queries, p.H)
    low, high = _bounds(x, item)
    scale = x.scale[0] if p.scale is None else p.scale
    if p.scales[0] != "token":
        scale = scale * _scale_of(x.k_scale, item.head)
    origin = (0, 0) if x.origin is None else (x.origin[0], x.origin[1])

    def one_block(i, carry, ruled):
        accumulator, state = carry
        slot, start = slot_of(x, position + i), (item.begin + i) * BLOCK
        if "token" in p.scales:
            plgpu.barrier_wait(x.scales_ready.at[slot])
        plgpu.barrier_wait(x.k_ready.at[slot])
        s = mma.product(x.k_smem.at[slot], p.H, queries, p.tile_rows)
        if p.scales[0] == "token":
            s = _scaled(s, x.scales.at[slot, 0])
        place = Place(item, p.group, start, origin)
        s = _in_log2(x, s, place, scale)
        if ruled:
            s = scores.hide(s, place, p.rule, x.mask_arrays)
        key = ptx.numbers(start, 0, p.tile_rows)
        seen = key < high if low is None else (key < high) & (key >= low)
        weights, alpha, state = mma.online_softmax(jnp.where(seen, s, -jnp.inf), state)
        if p.scales[1] == "token":
            weights = _scaled(weights, x.scales.at[slot, 1])
        plgpu.barrier_wait(x.v_ready.at[slot])
        _clean(x, item, slot, start)
        accumulator = mma.accumulate(accumulator, alpha, weights, x.v_smem.at[slot], p.D)
        plgpu.barrier_arrive(x.free.at[slot])
        return accumulator, state

    return over_blocks(x, item, one_block, mma.init(p.D, p.tile_rows))


def _scale_of(scale, head):
    """The one scale of a head's keys or values, or of all."""
    return scale[jnp.minimum(head, scale.shape[0] - 1)]


def _scaled(tile, ref):
    """`tile [64, n]` times float32 `ref [64]` in shared memory, one a row."""
    rows = ref[...] if interpreting() else plgpu.load(ref, layout=ptx.ROW)
    return tile * decode_rows.along_columns(rows, tile.shape[1])


def _in_log2(x, s, place, scale):
    p = x.plan
    if p.soft_cap is None and p.mod is None:
        return s * (scale * LOG2E)
    aux = tuple((array, "") for array in x.aux)
    return LOG2E * scores.modify(s, place, scale=scale, bias=None, mod=p.mod, aux=aux, soft_cap=p.soft_cap)


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a tile of scores is, keys along its rows, for `scores.modify` and `scores.hide`."""

    item: Any
    group: int
    row: Any  # first key
    origin: Any  # batch index and head that 0 stands for

    def element(self, start: int, width: int, arrays) -> Element:
        """Columns `[start, start + width)` of the tile."""
        token = _tokens(self.item, self.group, start, width)
        return Element(
            batch=self.item.batch + self.origin[0],
            head=self._heads(start, width) + self.origin[1],
            query_index=token,
            query_position=token + self.item.offset,
            key_index=ptx.numbers(self.row, 0, width),
            load=lambda i: self.load(arrays[i], start, width),
            load_at=lambda i, rows, columns: memory.ld_global_at(arrays[i], self.item.batch, i32(0), rows, columns),
        )

    def load(self, array, start: int, width: int, *, diagonal: bool = False):
        """The array's numbers of these heads; it has neither rows nor columns."""
        del diagonal
        return decode_rows.ld_global_of_heads(array, self.item.batch, self._heads(start, width))

    def _heads(self, start, width):
        number = ptx.numbers(i32(start), 1, width)
        return lax.rem(number, i32(self.group)) + self.item.head * self.group


def _tokens(item, group, start, width):
    """Tokens of columns `[start, start + width)` of a tile, int32 `[64, width]`."""
    return lax.div(ptx.numbers(i32(start), 1, width), i32(group)) + item.token


def _bounds(x, item):
    """Keys `[low, high)` that the queries can see, int32 `[64, queries]` each with equal rows, of which the compiler
    keeps one; low is None for no bound. Columns past the queries see nothing."""
    p = x.plan
    token = _tokens(item, p.group, 0, p.tile_rows)
    position, high = token + item.offset, jnp.where(token < item.queries, item.high, 0)
    if p.right is not None:
        high = jnp.minimum(position + (p.right + 1), high)
    return None if p.left is None else position - p.left, high


def _clean(x, item, slot, start):
    """Values that nobody may see may be NaN, which a weight of 0 would not silence; integers are not."""
    if x.v.dtype == jnp.int8:
        return

    @pl.when((item.low > start) | (item.high < start + BLOCK))
    def _():
        memory.st_shared_zero_outside(x.v_smem.at[slot], item.low - start, item.high - start)
        plgpu.commit_smem()


def write(x, item, accumulator, state):
    """The item's (out, lse), 0 and −inf where a query sees nothing, merged over the warps through shared memory."""
    p = x.plan
    states, parts = x.states.at[x.stream], x.parts.at[x.stream]
    scale = 1.0 if p.scales[1] == "token" else _scale_of(x.v_scale, item.head)
    start = item.split, item.row, item.head
    rows = jnp.minimum((item.queries if p.merged else p.T) - item.token, p.tokens) * p.group
    mma.st_states(state, states)
    plgpu.commit_smem()
    for tile in range(p.tile_rows // mma.QUERIES):
        mma.st_part(accumulator, tile, p.D, states, parts, scale)
        plgpu.commit_smem()
        mma.st_global_parts(parts, x.out, start, rows, tile=tile)
        if tile == 0:
            mma.st_global_lse(states, x.lse, start, rows)
        plgpu.commit_smem()  # before the next tile's, or the next item's


# --- producer ---------------------------------------------------------------------------------------------------------


def read_ahead(x, item, i, ahead):
    """What block i + 1 of the item will need of the tokens' scales, None if they have none: `(scales, pages)`, those of
    its 64 keys, then of its values, float32 `[128]`, and where those of the block after it are.

    Each is read a block before it is used: table, scale and what waits for both would take longer than a block does.

    Args:
        ahead: the same of block i; not used for i = −1, which begins.
    """
    references = [scale for scale, per in zip((x.k_scale, x.v_scale), x.plan.scales, strict=True) if per == "token"]
    if not references:
        return None
    references = references * (2 // len(references))
    first = (item.begin + i) * BLOCK

    def pages(first):
        return None if x.tables is None else ld_pages(x.tables, references[0].shape, item.batch, first)

    here = pages(first + BLOCK) if ahead is None else ahead[1]
    scales = ld_scales(*references, here, item.batch, item.head, first + BLOCK, item.low, item.high)
    return scales, pages(first + 2 * BLOCK)


def hand_over(x, ahead, slot):
    st_scales(ahead[0], x.scales.at[slot])
    plgpu.barrier_arrive(x.scales_ready.at[slot])


def ld_pages(tables, shape, batch, first):
    """Pages of keys `[first, first + 64)`, twice, int32 `[128]`; any page of keys past the table.

    Args:
        tables: int32 `[B, W]` in HBM.
        shape: of the scales, `[P, page, K]`.
    """
    (pages, page, _), width = shape, tables.shape[1]
    if interpreting():
        key = first + jnp.arange(2 * BLOCK, dtype=jnp.int32) % BLOCK
        return jnp.clip(tables[batch, :][jnp.clip(key // page, 0, width - 1)], 0, pages - 1)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), SCALAR, SCALAR),
        return_type=plgpu.ShapeDtypeStruct((128,), jnp.int32, layout=_THREADS),
    )
    def load(_, tables, *scalars):
        batch, first = (x.registers[()] for x in scalars)
        _, key = _thread_and_key(first)
        entry = arith.minsi(arith.divui(key, integer(page)), integer(width - 1))
        flat = memory._flat(ir.MemRefType(tables.type), (batch, entry))
        found = llvm.load(ptx.i32(), memory._element_pointer(utils.memref_ptr(tables), ptx.i32(), flat))
        return _one_a_thread(found, signed=True)

    return load(tables, *(jnp.asarray(x, jnp.int32) for x in (batch, first)))


def ld_scales(keys, values, pages, batch, head, first, low, high):
    """float32 `[128]`: scales of keys `[first, first + 64)`, and of the values there; 0 outside `[low, high)`.

    Args:
        keys, values: float32 `[P, page, K]` in HBM.
        pages: what `ld_pages` gave for these keys, or None, where sequence b is page b.
    """
    count, page, _ = keys.shape
    if interpreting():
        key = first + jnp.arange(BLOCK, dtype=jnp.int32)
        at = jnp.full((BLOCK,), batch) if pages is None else pages[:BLOCK]
        slot = jnp.minimum(key, page - 1) if pages is None else key % page
        found = [ref[...][at, slot, head] for ref in (keys, values)]
        return jnp.concatenate([jnp.where((key >= low) & (key < high), x, 0.0) for x in found])
    own = () if pages is None else (pages,)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), plgpu.RefType(), *[_THREADS] * len(own), *[SCALAR] * 5),
        return_type=plgpu.ShapeDtypeStruct((128,), jnp.float32, layout=_THREADS),
    )
    def load(_, keys, values, *operands):
        batch, head, first, low, high = (x.registers[()] for x in operands[-5:])
        thread, key = _thread_and_key(first)
        if own:
            at, slot = memory._clipped(_register(operands[0]), count), arith.remui(key, integer(page))
        else:
            at, slot = batch, arith.minsi(key, integer(page - 1))
        flat = memory._flat(ir.MemRefType(keys.type), (at, slot, head))
        bases = [llvm.ptrtoint(_i64(), utils.memref_ptr(ref)) for ref in (keys, values)]
        base = arith.select(arith.cmpi(arith.CmpIPredicate.slt, thread, integer(BLOCK)), *bases)
        pointer = arith.addi(base, arith.muli(flat, memory._int64(4)))
        seen = arith.andi(arith.cmpi(arith.CmpIPredicate.sge, key, low), arith.cmpi(arith.CmpIPredicate.slt, key, high))
        text = "{ .reg .pred p; setp.ne.b32 p, $2, 0; mov.f32 $0, 0f00000000; @p ld.global.f32 $0, [$1]; }"
        operands = [pointer, arith.extui(ptx.i32(), seen)]
        value = llvm.inline_asm(ir.F32Type.get(), operands, text, "=&f,l,r", has_side_effects=True)
        return _one_a_thread(value)

    return load(keys, values, *own, *(jnp.asarray(x, jnp.int32) for x in (batch, head, first, low, high)))


def st_scales(values, ref) -> None:
    """Stores float32 `[128]` to `ref [2, 64]` in shared memory."""
    if interpreting():
        ref[...] = values.reshape(2, BLOCK)
        return

    @plgpu.inline_mgpu(arg_types=(_THREADS, plgpu.RefType()))
    def store(_, values, ref):
        thread = arith.remui(ptx.thread_index(), integer(128))
        place = arith.addi(llvm.ptrtoint(ptx.i32(), utils.memref_ptr(ref)), arith.muli(thread, integer(4)))
        value = _register(values)
        text = "st.shared.f32 [$0], $1;"
        llvm.inline_asm(ir.Type.parse("!llvm.void"), [place, value], text, "r,f", has_side_effects=True)

    store(values, ref)


def scratch(plan) -> dict:
    """Shared memory and barriers beside those of the kernel."""
    stages = STREAMS * plan.stages
    found = dict(
        states=plgpu.SMEM((STREAMS, 2, mma.WARPS, plan.tile_rows), jnp.float32),
        parts=plgpu.SMEM((STREAMS, mma.WARPS, mma.QUERIES, plan.D + mma.PADDING), jnp.float32),
    )
    if "token" in plan.scales:
        scales = plgpu.SMEM((stages, 2, BLOCK), jnp.float32)  # of the tokens of a block, keys and values
        found |= dict(scales=scales, scales_ready=plgpu.Barrier(num_barriers=stages))
    return found


def _thread_and_key(first):
    """This thread's number in its warpgroup, and the key whose scale it reads."""
    thread = arith.remui(ptx.thread_index(), integer(128))
    return thread, arith.addi(first, arith.remui(thread, integer(BLOCK)))


def _register(values):
    (register,) = values.registers.flat
    return vector.extract(register, dynamic_position=[], static_position=ir.DenseI64ArrayAttr.get([0]))


def _one_a_thread(value, signed: bool | None = None):
    layout = fragmented_array.WGStridedFragLayout((128,), 1)
    registers = np.empty(layout.registers_shape((128,)), dtype=object)
    for ix in np.ndindex(registers.shape):
        registers[ix] = vector.broadcast(ir.VectorType.get((1,), value.type), value)
    return fragmented_array.FragmentedArray(_registers=registers, _layout=layout, _is_signed=signed)


def _i64():
    return ir.IntegerType.get_signless(64)

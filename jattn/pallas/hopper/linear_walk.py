"""What walks over the chunks of a sequence share, `linear_scan`, `linear_channel_scan` and those of the backwards: the
producer, and the ends of a consumer, which has 64 columns of one head's state, or of its gradient, transposed.

A thread block walks over a sequence, or over a piece of one; then there are two launches. What a piece of tokens does
to a state is a map, S ↦ M S + S_own: the first launch (`Plan.maps`) has no queries and no outputs, and its columns are
those of the values, which start from 0, and those of the unit matrix, which have no values. `linear_combine` makes of
the maps the states that enter the pieces, and the second launch starts from these.

B of states is the number of sequences, also where these are packed and B of tokens is 1.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax import lax

from jattn._linear import CHUNK
from jattn.pallas._compat import interpreting, pl, plgpu
from jattn.pallas.configs import SHARED_MEMORY_BYTES
from jattn.pallas.hopper import linear_tiles, memory, ptx
from jattn.pallas.hopper.linear_plan import COLUMNS, copy_rows, saved_states
from jattn.pallas.hopper.lists import i32

_REGISTERS = {1: (248, 96), 2: (232, 40)}  # by computing warpgroups: of a thread that computes, of one that copies
_BARRIERS = 512  # bytes


def place(plan, walks, *, reverse: bool = False) -> dict:
    """Which warpgroup this is, and what its thread block walks over: head and first column, the piece and its first
    chunk, and how many there are.

    Args:
        walks: of packed sequences, see `Inputs`; else None.
        reverse: from the last chunk to the first, as a backward does, which asks for no map of the first piece.
    """
    warpgroup, block = lax.axis_index("warpgroup"), lax.axis_index("block")
    part, rest = lax.rem(block, i32(plan.parts)), lax.div(block, i32(plan.parts))
    head, rest = lax.rem(rest, i32(plan.N)), lax.div(rest, i32(plan.N))
    walked, sequence = lax.rem(rest, i32(plan.walked)), lax.div(rest, i32(plan.walked))
    piece = walked + int(plan.maps and reverse)
    if walks is None:
        begin = i32(0) if plan.pieces == 1 else piece * plan.piece
        # Traced in any case: the index of a loop over a constant number is int64 in 64-bit mode.
        length = jnp.minimum(sequence, 0) + min(plan.piece or plan.chunks, plan.chunks)
        chunks = jnp.minimum(length, i32(plan.chunks) - begin)
    else:
        sequence, begin, chunks = (walks[3 * sequence + i] for i in range(3))
    return dict(
        warpgroup=warpgroup, first=part * (COLUMNS * plan.warpgroups), head=head, sequence=sequence,
        batch=sequence if walks is None else i32(0), piece=piece, begin=begin, chunks=chunks, reverse=reverse,
    )  # fmt: skip


def chunk_of(x, i):
    """The i-th that is walked over."""
    return x.begin + (x.chunks - 1 - i if x.reverse else i)


def walk(x, copy_chunk, consume, sends):
    """Has the last warpgroup copy chunks, by `copy_chunk(x, chunk, slot)`, and send what leaves; the others
    `consume(x)`.

    Args:
        sends: what the others hand over in a chunk (`hand_over`), in its order: `send(x, chunk)` asks for copies.
    """
    many, few = _REGISTERS[x.plan.warpgroups]

    @pl.when(x.warpgroup == x.plan.warpgroups)
    def _():
        plgpu.set_max_registers(few, action="decrease")
        _produce(x, copy_chunk, sends)

    @pl.when(x.warpgroup < x.plan.warpgroups)
    def _():
        plgpu.set_max_registers(many, action="increase")
        x.column = x.first + x.warpgroup * COLUMNS
        consume(x)


def _produce(x, copy_chunk, sends):
    """Copies chunk after chunk, each as soon as its slot is free, and sends what leaves."""
    stages = x.plan.stages

    def copy(i):
        copy_chunk(x, chunk_of(x, i), lax.rem(i, i32(stages)))

    def one_chunk(i, _):
        for which, send in enumerate(sends[:-1]):
            _send(x, i, which, send)
        plgpu.barrier_wait(x.free.at[lax.rem(i, i32(stages))])
        pl.when(i + stages < x.chunks)(lambda: copy(i + stages))
        for send in sends[-1:]:
            _send(x, i, len(sends) - 1, send)

    for which in range(len(sends)):
        plgpu.barrier_arrive(x.left.at[which])
    lax.fori_loop(0, jnp.minimum(x.chunks, i32(stages)), lambda i, _: copy(i), None)
    lax.fori_loop(0, x.chunks, one_chunk, None)
    plgpu.wait_smem_to_gmem(0)


def _send(x, i, which: int, send):
    plgpu.barrier_wait(x.written.at[which])
    send(x, chunk_of(x, i))
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    pl.when(i + 1 < x.chunks)(lambda: plgpu.barrier_arrive(x.left.at[which]))


def hand_over(x, which: int, write):
    """`write()` to shared memory, from which the producer sends it: a copy that a computing warp asks for takes 450
    cycles of it.

    Args:
        which: of `sends`.
    """
    plgpu.barrier_wait(x.left.at[which])
    write()
    ptx.fence_async_shared()
    plgpu.barrier_arrive(x.written.at[which])


def leaving_barriers(plan, count: int) -> dict:
    """Of `count` things that leave: all warpgroups have written; what they wrote has left."""
    if not count:
        return {}
    return dict(
        written=plgpu.Barrier(num_arrivals=plan.warpgroups, num_barriers=count),
        left=plgpu.Barrier(num_arrivals=1, num_barriers=count),
    )


def with_stages(plan, scratch):
    """The plan with as many chunks copied ahead, up to three, as its `scratch(plan)` has room for."""

    def fits(plan):
        rooms = (room for room in scratch(plan).values() if hasattr(room, "shape"))
        needed = sum(-(-math.prod(room.shape) * jnp.dtype(room.dtype).itemsize // 1024) for room in rooms)
        return needed * 1024 + _BARRIERS <= SHARED_MEMORY_BYTES[9, 0]

    plans = [dataclasses.replace(plan, stages=stages) for stages in (3, 2)]
    return next(filter(fits, plans), plans[-1])


def copy_columns(x, array, smem, chunk, ready):
    """The thread block's columns of `array [B, T, N, D]` to `smem [warpgroups, 64, 64]`; where these are of the unit
    matrix there are none, and the producer arrives in their place."""
    if not x.plan.maps:
        return copy_rows(x.plan, array, x.batch, chunk, x.head, smem, ready, x.first)
    for w in range(x.plan.warpgroups):
        column, own = x.first + w * COLUMNS, smem.at[pl.ds(w, 1)]
        copy = functools.partial(copy_rows, x.plan, array, x.batch, chunk, x.head, own, ready, column)
        pl.when(column < x.plan.D)(copy)
        pl.when(column >= x.plan.D)(lambda: plgpu.barrier_arrive(ready))


def columns(x, smem):
    """The warpgroup's of `smem [warpgroups, 64, 64]`, transposed; 0 if they are of the unit matrix."""
    found = linear_tiles.ldmatrix_trans(smem.at[pl.ds(x.warpgroup, 1)])
    if not x.plan.maps:
        return found
    exists = ptx.numbers(x.column, 0, CHUNK) < x.plan.D
    found = jnp.where(exists, found, jnp.bfloat16(0))  # there may be NaN
    # The CPU has no product of what it fuses with this.
    return lax.optimization_barrier(found) if interpreting() else found


def leaving(plan) -> tuple:
    """What is sent of a chunk: the state that enters it, where a backward wants it, and its output."""
    return () if plan.maps else (_send_entering, _send_out) if plan.save else (_send_out,)


def write_out(x, o):
    """A chunk's output, transposed `[64, 64]`, to shared memory."""
    hand_over(x, int(x.plan.save), lambda: linear_tiles.stmatrix_trans(o, x.out_smem.at[x.warpgroup]))


def _send_out(x, chunk):
    send_columns(x, x.out, x.out_smem, 0, chunk)


def send_columns(x, array, smem, part: int, chunk):
    """A chunk's rows of `array [B, T, N, D]`, from `smem [warpgroups, parts, 64, 64]`; nothing past the last token."""
    for w in range(x.plan.warpgroups):
        rows = array.at[x.batch, pl.ds(chunk * CHUNK, CHUNK), x.head, pl.ds(x.first + w * COLUMNS, COLUMNS)]
        plgpu.copy_smem_to_gmem(smem.at[w, part], rows)


def write_entering(x, narrow):
    """The state `[64, H]` that enters a chunk, transposed, to shared memory, where a backward wants it."""
    if x.plan.save:
        hand_over(x, 0, lambda: store_slabs(narrow, x.states_smem.at[x.warpgroup]))


def store_slabs(array, smem):
    """`[64, columns]`, transposed, to `smem [slabs, 64, 64]`."""
    for slab in range(array.shape[1] // ptx.SLAB):
        linear_tiles.stmatrix_trans(array[:, slab * ptx.SLAB : (slab + 1) * ptx.SLAB], smem.at[pl.ds(slab, 1)])


def _send_entering(x, chunk):
    send_states(x, x.states, chunk)


def send_states(x, array, chunk):
    """A chunk's states `array [B, n, N, H, D]`, from `states_smem`."""
    for w in range(x.plan.warpgroups):
        for slab in range(ptx.slabs(x.plan.H)):
            rows = array.at[x.batch, chunk, x.head, pl.ds(slab * ptx.SLAB, ptx.SLAB)]
            plgpu.copy_smem_to_gmem(x.states_smem.at[w, slab], rows.at[:, pl.ds(x.first + w * COLUMNS, COLUMNS)])


def states_smem(plan) -> dict:
    shape = (plan.warpgroups, ptx.slabs(plan.H), CHUNK, ptx.SLAB)
    return dict(states_smem=plgpu.SMEM(shape, plan.dtype, transforms=ptx.TRANSFORMS)) if plan.save else {}


def initial_state(x):
    """Transposed, float32 `[64, H]`."""
    plan = x.plan
    if plan.maps:  # rows before the first of the unit matrix have no column
        unit = ptx.numbers(x.column - plan.D, 0, plan.H) == ptx.numbers(i32(0), 1, plan.H)
        return jnp.where(unit, jnp.float32(1), jnp.float32(0))
    if x.initial_state is None:
        return ptx.zeros(plan.H)
    if plan.pieces > 1:
        index = (x.sequence * plan.pieces + x.piece) * plan.N + x.head
        return linear_tiles.ld_global_tile(x.initial_state, index, i32(0), x.column, plan.H, transposed=True)
    if plan.options.state_layout == "kv":
        return memory.ld_global(x.initial_state, x.sequence, x.head, i32(0), x.column, plan.H, transposed=True)
    return memory.ld_global(x.initial_state, x.sequence, x.head, x.column, i32(0), plan.H)


def write_state(x, S):
    """The map, or the final state, from its transpose."""
    plan = x.plan
    if plan.maps:
        index = (x.sequence * plan.walked + x.piece - int(x.reverse)) * plan.N + x.head
        memory.st_global(x.state, (index, x.column, i32(0)), S, i32(COLUMNS))
    elif plan.pieces == 1:
        _write_final(x, S)
    else:
        pl.when(x.piece == (0 if x.reverse else plan.pieces - 1))(lambda: _write_final(x, S))


def _write_final(x, S):
    _write_to(x, x.state, x.sequence, S)


def _write_to(x, states, number, S):
    index = number * x.plan.N + x.head
    if x.plan.options.state_layout == "kv":
        linear_tiles.st_global_transposed(states, index, x.column, S)
    else:
        memory.st_global(states, (index, x.column, i32(0)), S, i32(COLUMNS))


def write_checkpoint(x, chunk, S):
    """The state after a chunk, from its transpose, where one is wanted."""
    if x.slots is None:
        return
    slot = x.slots[x.batch * x.plan.chunks + chunk]
    number = x.sequence * x.plan.checkpoints + slot
    pl.when(slot >= 0)(lambda: _write_to(x, x.checkpoints, number, S))


def result_shapes(plan) -> dict:
    """Name -> shape of the outputs of a walk."""
    if plan.maps:
        shape = plan.B * plan.walked * plan.N, plan.columns, 1, plan.H
        return dict(state=jax.ShapeDtypeStruct(shape, jnp.float32))
    last = (plan.H, plan.D) if plan.options.state_layout == "kv" else (plan.D, 1, plan.H)
    states = lambda count: jax.ShapeDtypeStruct((count * plan.N, *last), jnp.float32)  # noqa: E731
    out = jax.ShapeDtypeStruct((plan.B, plan.T, plan.N, plan.D), plan.dtype)
    found = dict(out=out, state=states(plan.states))
    found |= dict(checkpoints=states(plan.states * plan.checkpoints)) if plan.checkpoints else {}
    return found | dict(zip(("states",), saved_states(plan), strict=False))


def results_of(plan, found):
    """What `launch` returns, from arrays by name: out, state [B, N, ·, ·], checkpoints [B, ·, N, ·, ·] and states, or
    None; or maps [B * (pieces − 1) * N, D + H, H], which are S_own and then M, both transposed."""
    if plan.maps:
        return found["state"].reshape(-1, plan.columns, plan.H)
    last = (plan.H, plan.D) if plan.options.state_layout == "kv" else (plan.D, plan.H)
    state, checkpoints = found["state"].reshape(plan.states, plan.N, *last), found.get("checkpoints")
    if checkpoints is not None:
        checkpoints = checkpoints.reshape(plan.states, plan.checkpoints, plan.N, *last)
    return found.get("out"), state, checkpoints, found.get("states")

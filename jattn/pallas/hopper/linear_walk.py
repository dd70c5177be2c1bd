"""What walks over the chunks of a sequence share, `linear_scan`, `linear_channel_scan` and those of the backwards: the
producer, and the ends of a consumer, which has 64 columns of one head's state, or of its gradient, transposed.

A thread block walks over a sequence, or over a piece of one; then there are two launches. What a piece of tokens does
to a state is a map, S ↦ M S + S_own: the first launch (`Plan.maps`) has no queries and no outputs, and its columns are
those of the values, which start from 0, and those of the unit matrix, which have no values. `linear_combine` makes of
the maps the states that enter the pieces, and the second launch starts from these.

B of states is the number of sequences, also where these are packed and B of tokens is 1.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from jattn._linear import CHUNK
from jattn.pallas._compat import interpreting, pl, plgpu
from jattn.pallas.hopper import linear_tiles, memory, ptx
from jattn.pallas.hopper.linear_plan import COLUMNS, copy_rows, saved_states
from jattn.pallas.hopper.lists import i32


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


def walk(x, copy_chunk, consume, registers):
    """Has the last warpgroup copy chunks, by `copy_chunk(x, chunk, slot)`, and the others `consume(x)`.

    Args:
        registers: of a thread that computes, of one that copies.
    """

    @pl.when(x.warpgroup == x.plan.warpgroups)
    def _():
        plgpu.set_max_registers(registers[1], action="decrease")
        _produce(x, copy_chunk)

    @pl.when(x.warpgroup < x.plan.warpgroups)
    def _():
        plgpu.set_max_registers(registers[0], action="increase")
        x.column = x.first + x.warpgroup * COLUMNS
        consume(x)


def _produce(x, copy_chunk):
    """Copies chunk after chunk by `copy_chunk(x, chunk, slot)`, each as soon as its slot is free."""
    stages = x.plan.stages

    def one_chunk(i, _):
        slot = lax.rem(i, i32(stages))
        pl.when(i >= stages)(lambda: plgpu.barrier_wait(x.free.at[slot]))
        copy_chunk(x, chunk_of(x, i), slot)

    lax.fori_loop(0, x.chunks, one_chunk, None)
    # Every phase is waited for before the thread block ends.
    last = lambda i, _: plgpu.barrier_wait(x.free.at[lax.rem(i, i32(stages))])  # noqa: E731
    lax.fori_loop(jnp.maximum(x.chunks - stages, 0), x.chunks, last, None)


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


def write_out(x, chunk, o):
    """A chunk's output, transposed `[64, 64]`, through shared memory (TMA)."""
    smem = x.out_smem.at[x.warpgroup]
    _wait_for_staging(x)
    linear_tiles.stmatrix_trans(o, smem)
    plgpu.commit_smem()
    rows = x.out.at[x.batch, pl.ds(chunk * CHUNK, CHUNK), x.head]
    plgpu.copy_smem_to_gmem(smem.at[0], rows.at[:, pl.ds(x.column, COLUMNS)])  # nothing past the last token


def write_entering(x, chunk, narrow):
    """The state `[64, H]` that enters a chunk, transposed, where a backward wants it."""
    if not x.plan.save:
        return
    smem = x.states_smem.at[x.warpgroup]
    _wait_for_staging(x)
    for slab in range(ptx.slabs(x.plan.H)):
        linear_tiles.stmatrix_trans(narrow[:, slab * ptx.SLAB : (slab + 1) * ptx.SLAB], smem.at[pl.ds(slab, 1)])
    plgpu.commit_smem()
    states = x.states.at[x.batch, chunk, x.head]
    for slab in range(ptx.slabs(x.plan.H)):
        part = states.at[pl.ds(slab * ptx.SLAB, ptx.SLAB), pl.ds(x.column, COLUMNS)]
        plgpu.copy_smem_to_gmem(smem.at[slab], part, commit_group=slab == ptx.slabs(x.plan.H) - 1)


def _wait_for_staging(x):
    """What the chunk before had written there has left; with states, these and outputs are written in turn."""
    plgpu.wait_smem_to_gmem(int(x.plan.save), wait_read_only=True)


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

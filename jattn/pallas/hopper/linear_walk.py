"""What `linear_scan` and `linear_channel_scan`, walks over the chunks of a sequence, share: the producer, and the ends
of a consumer, which has 64 columns of one head's state, transposed."""

from jax import lax

from jattn._linear import CHUNK
from jattn.pallas._compat import pl, plgpu
from jattn.pallas.hopper import linear_tiles, memory, ptx
from jattn.pallas.hopper.linear_plan import COLUMNS
from jattn.pallas.hopper.lists import i32


def produce(x, copy_chunk):
    """Copies chunk after chunk by `copy_chunk(x, i, slot)`, each as soon as its slot is free."""
    stages, chunks = x.plan.stages, x.plan.chunks

    def one_chunk(i, _):
        slot = lax.rem(i, i32(stages))
        pl.when(i >= stages)(lambda: plgpu.barrier_wait(x.free.at[slot]))
        copy_chunk(x, i, slot)

    lax.fori_loop(0, x.chunks, one_chunk, None)
    for i in range(max(chunks - stages, 0), chunks):  # every phase is waited for before the thread block ends
        plgpu.barrier_wait(x.free.at[i % stages])


def write_out(x, i, o):
    """The i-th chunk's output, transposed `[64, 64]`, through shared memory (TMA)."""
    smem = x.out_smem.at[x.warpgroup]
    _wait_for_staging(x)
    linear_tiles.stmatrix_trans(o, smem)
    plgpu.commit_smem()
    rows = x.out.at[x.batch, pl.ds(i * CHUNK, CHUNK), x.head]
    plgpu.copy_smem_to_gmem(smem.at[0], rows.at[:, pl.ds(x.column, COLUMNS)])  # nothing past the last token


def write_entering(x, i, narrow):
    """The state `[64, H]` that enters the i-th chunk, transposed, where a backward wants it."""
    if not x.plan.save:
        return
    smem = x.states_smem.at[x.warpgroup]
    _wait_for_staging(x)
    for slab in range(ptx.slabs(x.plan.H)):
        linear_tiles.stmatrix_trans(narrow[:, slab * ptx.SLAB : (slab + 1) * ptx.SLAB], smem.at[pl.ds(slab, 1)])
    plgpu.commit_smem()
    states = x.states.at[x.batch, i, x.head]
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
    if x.initial_state is None:
        return ptx.zeros(x.plan.H)
    if x.plan.options.state_layout == "kv":
        return memory.ld_global(x.initial_state, x.batch, x.head, i32(0), x.column, x.plan.H, transposed=True)
    return memory.ld_global(x.initial_state, x.batch, x.head, x.column, i32(0), x.plan.H)


def write_state(x, S):
    """The final state, from its transpose."""
    index = x.batch * x.plan.N + x.head
    if x.plan.options.state_layout == "kv":
        linear_tiles.st_global_transposed(x.state, index, x.column, S)
    else:
        memory.st_global(x.state, (index, x.column, i32(0)), S, i32(COLUMNS))

"""The second of two kernels of KDA and GLA on compute capability 9.0: the walk over the chunks of a sequence. All but v
comes from `linear_channel_prepare`.

As in `linear_scan`, a warpgroup has 64 columns of one head's state, transposed, in float32 registers: S [64, H], whose
rows do not know of one another. Every left operand is in registers and every right one as TMA left it; for each chunk

    z = β ∘ (vᵀ + S eraseᵀ);   u = z Tᵀ (GLA: vᵀ);   o = S queryᵀ + u Aᵀ;   S ← decay ∘ S + u update

Pipeline: a thread block has one warpgroup or two, of the same head, and a producer that copies chunks ahead (TMA):

    producer     chunk 0 | chunk 1 | …                   waits for free slots
    consumer     S eraseᵀ, S queryᵀ | u | S, o | out       waits for copies; o leaves through shared memory (TMA)

Floor: three matrices [64, H], T, A and v in, o out: 1544 bytes a token and head, at the 4.3 TB/s of a copy 0.094 ms for
T = 8192 and 32 heads, 0.188 ms for B = 4, T = 4096; with `linear_channel_prepare` 0.22 and 0.44 ms. A chunk's products
are those of the gated delta rule, whose scan was measured at 0.145 and 0.170 ms on an H200. Prediction: 0.16 and 0.21
ms, with `linear_channel_prepare` 0.46 and 0.81 ms. Measured with it: 0.468 and 0.786 ms,
of which 0.166 and 0.198 ms here.

Source: Kimi Team, "Kimi Linear" (2025); Yang et al., "Gated Linear Attention Transformers" (2024).
"""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
from jax import lax

from jattn._linear import CHUNK
from jattn.pallas._compat import kernel, pl, plgpu
from jattn.pallas.hopper import linear_tiles, ptx
from jattn.pallas.hopper.linear_channel_plan import Prepared
from jattn.pallas.hopper.linear_channel_tiles import times_along_rows
from jattn.pallas.hopper.linear_plan import COLUMNS, Plan, copy_rows, saved_states
from jattn.pallas.hopper.linear_walk import initial_state, produce, states_smem, write_entering, write_out, write_state
from jattn.pallas.hopper.lists import i32

_REGISTERS = 232, 40  # of a computing warpgroup's threads, of the producer's, which has nine matrices to copy


def _kernel(
    plan: Plan,
    # inputs (HBM)
    value,  # [B, T, N, D]
    prepared,  # `Prepared`
    initial_state,  # [B, N, H, D] or [B, N, D, H], or None
    # outputs (HBM)
    out,  # [B, T, N, D]
    state,  # float32 [B * N, H, D], or [B * N, D, 1, H]
    states=None,  # that enter each chunk, [B, n, N, H, D]; None without plan.save
    *,
    # shared memory, matrices in slabs of 64 columns
    v_smem,  # [stages, warpgroups, 64, 64]
    matrices,  # `Prepared`, each [stages, slabs or 1, 64, 64]; the vector float32 [stages, ·]
    out_smem,  # [warpgroups, 1, 64, 64]
    states_smem=None,  # [warpgroups, slabs of H, 64, 64]
    # barriers
    ready,  # [stages] TMA
    free,  # [stages] every warpgroup is done with the chunk
):
    warpgroup, block = lax.axis_index("warpgroup"), lax.axis_index("block")
    part, rest = lax.rem(block, i32(plan.parts)), lax.div(block, i32(plan.parts))
    x = SimpleNamespace(
        plan=plan, value=value, prepared=prepared, initial_state=initial_state, out=out, state=state, states=states,
        states_smem=states_smem, v_smem=v_smem, matrices=matrices, out_smem=out_smem, ready=ready, free=free,
        head=lax.rem(rest, i32(plan.N)),
        batch=lax.div(rest, i32(plan.N)), first=part * (COLUMNS * plan.warpgroups), warpgroup=warpgroup,
    )  # fmt: skip

    # Traced: the index of a loop over a constant number is int64 in 64-bit mode.
    x.chunks = jnp.minimum(x.batch, 0) + plan.chunks

    @pl.when(warpgroup == plan.warpgroups)
    def _():
        plgpu.set_max_registers(_REGISTERS[1], action="decrease")
        produce(x, _copy_chunk)

    @pl.when(warpgroup < plan.warpgroups)
    def _():
        plgpu.set_max_registers(_REGISTERS[0], action="increase")
        x.column = x.first + warpgroup * COLUMNS
        _consume(x)


# --- producer ---------------------------------------------------------------------------------------------------------


def _copy_chunk(x, i, slot):
    ready, place, given, smem = x.ready.at[slot], (x.batch, i, x.head), x.prepared, x.matrices
    copy_rows(x.plan, x.value, x.batch, i, x.head, x.v_smem.at[slot], ready, x.first)
    for array, room in ((given.erase, smem.erase), (given.query, smem.query), (given.update, smem.update)):
        if array is not None:
            for slab in range(ptx.slabs(x.plan.H)):
                plgpu.copy_gmem_to_smem(array.at[(*place, slab)], room.at[slot, slab], ready)
    for array, room in ((given.inverse, smem.inverse), (given.scores, smem.scores)):
        if array is not None:
            plgpu.copy_gmem_to_smem(array.at[place], room.at[slot, 0], ready)
    plgpu.copy_gmem_to_smem(given.vector.at[place], smem.vector.at[slot], ready)


# --- consumer ---------------------------------------------------------------------------------------------------------


def _consume(x):
    smem, H = x.matrices, x.plan.H
    operand = lambda m, n, **how: ptx.matrix(lambda i: m.at[i], CHUNK, n, **how)  # noqa: E731
    x.query, x.A, x.update = (
        operand(smem.query, H),
        operand(smem.scores, CHUNK),
        operand(smem.update, H, along_rows=True),
    )
    if x.plan.options.rule.delta:
        x.erase, x.T = operand(smem.erase, H), operand(smem.inverse, CHUNK)
    S = lax.fori_loop(0, x.chunks, lambda i, S: _one_chunk(x, i, S), initial_state(x))
    write_state(x, S)
    plgpu.wait_smem_to_gmem(0)


def _one_chunk(x, i, S):
    """The state after the i-th chunk, whose output is written."""
    slot, dtype = lax.rem(i, i32(x.plan.stages)), x.plan.dtype
    plgpu.barrier_wait(x.ready.at[slot])
    narrow = S.astype(dtype)
    u = linear_tiles.ldmatrix_trans(x.v_smem.at[slot, pl.ds(x.warpgroup, 1)])
    if x.plan.options.rule.delta:
        z = ptx.wgmma_rs_nt(narrow, x.erase.at(slot), u.astype(jnp.float32))
        o = ptx.wgmma_rs_nt(narrow, x.query.at(slot))
        write_entering(x, i, narrow)
        (z,) = ptx.wgmma_wait_group(1, z)
        z = times_along_rows(z, x.matrices.vector.at[slot, pl.ds(x.plan.H, CHUNK)])
        u = ptx.wgmma_rs_nt(z.astype(dtype), x.T.at(slot))
        o, u = ptx.wgmma_wait_group(0, o, u)
        u = u.astype(dtype)
    else:
        o = ptx.wgmma_rs_nt(narrow, x.query.at(slot))
        write_entering(x, i, narrow)
        (o,) = ptx.wgmma_wait_group(0, o)
    S = ptx.wgmma_rs(times_along_rows(S, x.matrices.vector.at[slot, pl.ds(0, x.plan.H)]), u, x.update.at(slot))
    o = ptx.wgmma_rs_nt(u, x.A.at(slot), o)
    S, o = ptx.wgmma_wait_group(0, S, o)
    plgpu.barrier_arrive(x.free.at[slot])
    write_out(x, i, o.astype(dtype))
    return S


# --- host -------------------------------------------------------------------------------------------------------------


def launch(plan: Plan, inputs, prepared, *, interpret=False):
    """Runs the kernel: `(out [B, T, N, D], state float32 [B, N, H, D], or [B, N, D, H], states or None)`."""
    given = prepared.all
    states = [] if inputs.initial_state is None else [inputs.initial_state]

    def body(value, *refs, **allocations):
        mine, rest = Prepared(*refs[: len(given)]), refs[len(given) :]
        smem = Prepared(*(allocations.pop(f"matrix{i}") for i in range(len(given))))
        _kernel(plan, value, mine, *(rest if states else (None, *rest)), matrices=smem, **allocations)

    heads, by_keys = plan.B * plan.N, plan.options.state_layout == "kv"
    shape = (heads, plan.H, plan.D) if by_keys else (heads, plan.D, 1, plan.H)
    out, state, *saved = kernel(
        body,
        name="jattn_linear_channel_scan",
        out_type=(
            jax.ShapeDtypeStruct((plan.B, plan.T, plan.N, plan.D), plan.dtype),
            jax.ShapeDtypeStruct(shape, jnp.float32),
            *saved_states(plan),
        ),
        scratch=_scratch(plan, given),
        grid={"block": heads * plan.parts},
        warpgroups=plan.warpgroups + 1,
        interpret=interpret,
        approximate=False,
    )(inputs.value, *given, *states)
    state = state.reshape(plan.B, plan.N, *((plan.H, plan.D) if by_keys else (plan.D, plan.H)))
    return out, state, saved[0] if plan.save else None


def _scratch(plan, given) -> dict:
    stages, rooms, copies = plan.stages, {}, plan.warpgroups

    def smem(*leading):
        return plgpu.SMEM((*leading, CHUNK, ptx.SLAB), plan.dtype, transforms=ptx.TRANSFORMS)

    for i, array in enumerate(given):
        slabs = array.shape[3] if len(array.shape) == 6 else 1
        is_vector = len(array.shape) == 4
        rooms[f"matrix{i}"] = plgpu.SMEM((stages, *array.shape[3:]), "float32") if is_vector else smem(stages, slabs)
        copies += slabs
    return rooms | dict(
        v_smem=smem(stages, plan.warpgroups), out_smem=smem(plan.warpgroups, 1), **states_smem(plan),
        ready=plgpu.Barrier(num_arrivals=copies, num_barriers=stages),
        free=plgpu.Barrier(num_arrivals=plan.warpgroups, num_barriers=stages),
    )  # fmt: skip

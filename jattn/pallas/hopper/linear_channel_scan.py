"""The second of two kernels of KDA and GLA on compute capability 9.0: the walk over the chunks of a sequence. All but v
comes from `linear_channel_prepare`.

As in `linear_scan`, a warpgroup has 64 columns of one head's state, transposed, in float32 registers: S [64, H], whose
rows do not know of one another. Every left operand is in registers and every right one as TMA left it; for each chunk

    z = β ∘ (vᵀ + S eraseᵀ);   u = z Tᵀ (GLA: vᵀ);   o = S queryᵀ + u Aᵀ;   S ← decay ∘ S + u update

Pipeline: a thread block has one warpgroup or two, of the same head, and a producer that copies chunks ahead (TMA) and
what leaves out of shared memory:

    producer     chunk 0 | chunk 1 | …                             waits for free slots, and for o
    consumer     S eraseᵀ | S queryᵀ, u, decay ∘ S | o, S | o out    waits for copies; o leaves under S

Floor: three matrices [64, H], T, A and v in, o out: 1544 bytes a token and head, at the 4.3 TB/s of a copy 0.094 ms for
T = 8192 and 32 heads, 0.188 ms for B = 4, T = 4096; with `linear_channel_prepare` 0.22 and 0.44 ms. A chunk's products
are those of the gated delta rule, whose scan was measured at 0.145 and 0.170 ms on an H200. Prediction: 0.16 and 0.21
ms. Measured on an H200: 0.164 and 0.199 ms, the latter 94 % of the floor, while the consumer asked for the copies of
o, some 450 cycles a chunk, and loads waited behind products; now 0.153 and 0.199. Without any copies it takes 0.119 ms,
with nothing but copies 0.117.

Source: Kimi Team, "Kimi Linear" (2025); Yang et al., "Gated Linear Attention Transformers" (2024).
"""

import dataclasses
from types import SimpleNamespace

import jax.numpy as jnp
from jax import lax

from jattn._linear import CHUNK
from jattn.pallas._compat import kernel, pl, plgpu
from jattn.pallas.hopper import ptx
from jattn.pallas.hopper.linear_channel_plan import Prepared
from jattn.pallas.hopper.linear_plan import Plan
from jattn.pallas.hopper.linear_tiles import ld_shared_along_rows
from jattn.pallas.hopper.linear_walk import (
    chunk_of,
    columns,
    copy_columns,
    initial_state,
    leaving,
    leaving_barriers,
    place,
    result_shapes,
    results_of,
    states_smem,
    walk,
    with_stages,
    write_checkpoint,
    write_entering,
    write_out,
    write_state,
)
from jattn.pallas.hopper.lists import i32


def _kernel(
    plan: Plan,
    *,
    # inputs (HBM); maps have neither queries, scores nor a state
    value,  # [B, T, N, D]
    prepared,  # `Prepared`
    initial_state=None,  # [B, N, H, D] or [B, N, D, H], or None; of pieces float32 [B * pieces * N, H, D]
    walks=None,  # int32 [3 · sequences], see `Inputs`
    slots=None,  # int32 [B · n]
    # outputs (HBM)
    state,  # float32 [B * N, H, D], or [B * N, D, 1, H]; maps [B * (pieces - 1) * N, D + H, 1, H]
    out=None,  # [B, T, N, D]; None with maps
    checkpoints=None,  # as state; None if nobody asks
    states=None,  # that enter each chunk, [B, n, N, H, D]; None without plan.save
    # shared memory, matrices in slabs of 64 columns
    v_smem,  # [stages, warpgroups, 64, 64]
    matrices,  # `Prepared`, each [stages, slabs or 1, 64, 64]; the vector float32 [stages, ·]
    out_smem=None,  # [warpgroups, 1, 64, 64]; None with maps
    states_smem=None,  # [warpgroups, slabs of H, 64, 64]
    # barriers
    ready,  # [stages] TMA
    free,  # [stages] every warpgroup is done with the chunk
    written=None,  # see `linear_walk.leaving_barriers`
    left=None,
):
    x = SimpleNamespace(
        plan=plan, value=value, prepared=prepared, initial_state=initial_state, out=out, state=state, slots=slots,
        checkpoints=checkpoints, states=states, states_smem=states_smem, v_smem=v_smem, matrices=matrices,
        out_smem=out_smem, ready=ready, free=free, written=written, left=left, **place(plan, walks),
    )  # fmt: skip
    walk(x, _copy_chunk, _consume, leaving(plan))


# --- producer ---------------------------------------------------------------------------------------------------------


def _copy_chunk(x, chunk, slot):
    ready, at, given, smem = x.ready.at[slot], (x.batch, chunk, x.head), x.prepared, x.matrices
    copy_columns(x, x.value, x.v_smem.at[slot], chunk, ready)
    for array, room in ((given.erase, smem.erase), (given.query, smem.query), (given.update, smem.update)):
        if array is not None:
            for slab in range(ptx.slabs(x.plan.H)):
                plgpu.copy_gmem_to_smem(array.at[(*at, slab)], room.at[slot, slab], ready)
    for array, room in ((given.inverse, smem.inverse), (given.scores, smem.scores)):
        if array is not None:
            plgpu.copy_gmem_to_smem(array.at[at], room.at[slot, 0], ready)
    plgpu.copy_gmem_to_smem(given.vector.at[at], smem.vector.at[slot], ready)


# --- consumer ---------------------------------------------------------------------------------------------------------


def _consume(x):
    smem, H = x.matrices, x.plan.H

    def operand(m, n, **how):
        return None if m is None else ptx.matrix(lambda i: m.at[i], CHUNK, n, **how)

    x.query, x.A = operand(smem.query, H), operand(smem.scores, CHUNK)
    x.erase, x.T = operand(smem.erase, H), operand(smem.inverse, CHUNK)
    x.update = operand(smem.update, H, along_rows=True)
    S = lax.fori_loop(0, x.chunks, lambda i, S: _one_chunk(x, i, S), initial_state(x))
    write_state(x, S)


def _one_chunk(x, i, S):
    """The state after the i-th chunk, whose output is written; there is none with maps."""
    slot, dtype, outputs = lax.rem(i, i32(x.plan.stages)), x.plan.dtype, not x.plan.maps
    vector, narrow, o = x.matrices.vector.at[slot], S.astype(dtype), ()
    decay = lambda: ld_shared_along_rows(vector.at[pl.ds(0, x.plan.H)])  # noqa: E731
    plgpu.barrier_wait(x.ready.at[slot])
    u = columns(x, x.v_smem.at[slot])
    # Products and loads leave a warp in their order: what is loaded after a product waits until that has begun.
    if x.plan.options.rule.delta:
        beta = ld_shared_along_rows(vector.at[pl.ds(x.plan.H, CHUNK)])
    if not outputs:
        S = S * decay()
    if x.plan.options.rule.delta:
        z = ptx.wgmma_rs_nt(narrow, x.erase.at(slot), u.astype(jnp.float32))
        (z,) = ptx.wgmma_wait_group(0, z)
    if outputs:
        o = (ptx.wgmma_rs_nt(narrow, x.query.at(slot)),)
        write_entering(x, narrow)
    if x.plan.options.rule.delta:
        u = ptx.wgmma_rs_nt((z * beta).astype(dtype), x.T.at(slot))
    if outputs:  # under the products with what entered
        ptx.bar_warp_sync()
        S = S * decay()
    if x.plan.options.rule.delta:
        *o, u = ptx.wgmma_wait_group(0, *o, u)
        u = u.astype(dtype)
    elif outputs:
        o = ptx.wgmma_wait_group(0, *o)
    if outputs:
        o = (ptx.wgmma_rs_nt(u, x.A.at(slot), *o),)
    S = ptx.wgmma_rs(S, u, x.update.at(slot))
    if outputs:
        o = ptx.wgmma_wait_group(1, *o)
        write_out(x, o[0].astype(dtype))  # while the tensor core is at S
    (S,) = ptx.wgmma_wait_group(0, S)
    plgpu.barrier_arrive(x.free.at[slot])
    write_checkpoint(x, chunk_of(x, i), S)
    return S


# --- host -------------------------------------------------------------------------------------------------------------


def launch(plan: Plan, inputs, prepared, *, interpret=False):
    """Runs the kernel: what `linear_walk.results_of` says, states in the layout of the call.

    Args:
        inputs: with pieces, its initial_state is what enters each of them, as `linear_combine` returns it.
    """
    if plan.maps:
        prepared = dataclasses.replace(prepared, query=None, scores=None)
    given = {name: x for name, x in vars(prepared).items() if x is not None}
    others = dict(value=inputs.value)
    if not plan.maps:
        names = "initial_state", "walks", "slots"
        others |= {name: a for name in names if (a := getattr(inputs, name)) is not None}
    plan = with_stages(plan, lambda plan: _scratch(plan, given))
    results = result_shapes(plan)

    def body(*refs, **allocations):
        mine, rest = refs[: len(given)], refs[len(given) :]
        empty = dict.fromkeys(vars(prepared))
        mine = Prepared(**(empty | dict(zip(given, mine, strict=True))))
        smem = Prepared(**(empty | {name: allocations.pop(name) for name in given}))
        rest = dict(zip((*others, *results), rest, strict=True))
        _kernel(plan, prepared=mine, matrices=smem, **rest, **allocations)

    found = kernel(
        body,
        name="jattn_linear_channel_maps" if plan.maps else "jattn_linear_channel_scan",
        out_type=tuple(results.values()),
        scratch=_scratch(plan, given),
        grid={"block": plan.blocks},
        warpgroups=plan.warpgroups + 1,
        interpret=interpret,
        approximate=False,
    )(*given.values(), *others.values())
    return results_of(plan, dict(zip(results, found, strict=True)))


def _scratch(plan, given) -> dict:
    stages, rooms, copies = plan.stages, {}, plan.warpgroups

    def smem(*leading):
        return plgpu.SMEM((*leading, CHUNK, ptx.SLAB), plan.dtype, transforms=ptx.TRANSFORMS)

    for name, array in given.items():
        slabs = array.shape[3] if len(array.shape) == 6 else 1
        is_vector = len(array.shape) == 4
        rooms[name] = plgpu.SMEM((stages, *array.shape[3:]), "float32") if is_vector else smem(stages, slabs)
        copies += slabs
    rooms |= {} if plan.maps else dict(out_smem=smem(plan.warpgroups, 1))
    return rooms | dict(
        v_smem=smem(stages, plan.warpgroups), **states_smem(plan), **leaving_barriers(plan, len(leaving(plan))),
        ready=plgpu.Barrier(num_arrivals=copies, num_barriers=stages),
        free=plgpu.Barrier(num_arrivals=plan.warpgroups, num_barriers=stages),
    )  # fmt: skip

"""The second kernel of the backward of KDA and GLA on compute capability 9.0: the walk over the chunks of a sequence,
from the last to the first. Matrices come from `linear_channel_prepare`; `linear_channel_backward_chunk` is next.

The mirror of `linear_channel_scan`: a warpgroup has 64 columns of the gradient D of one head's state, transposed, in
float32 registers: D [64, H], whose rows do not know of one another. Every left operand is in registers and every right
one as TMA left it; for each chunk, of whose leaving state D is the gradient,

    du = doᵀ A + D updateᵀ;   dz = du T (GLA: du);   D ← decay ∘ D + doᵀ query + (β ∘ dz) erase

D, before the chunk, and dz are written for the next kernel. GLA's du is the gradient of v.

Pipeline: a thread block has one warpgroup or two, of the same head, and a producer that copies chunks ahead (TMA):

    producer     chunk n − 1 | chunk n − 2 | …              waits for free slots
    consumer     du | dz | doᵀ query, D                      waits for copies; the producer sends D and dz (TMA)

Floor: three matrices [64, H], T, A and do in, D and dz out: 2056 bytes a token and head, at the 4.3 TB/s of a copy
0.126 ms for T = 8192 and 32 heads, 0.251 ms for B = 4, T = 4096. Prediction: 0.20 and 0.29 ms, as three products wait
for one another as in the forward's walk, of 0.187 and 0.282 ms with its states. Measured on an H200: 0.179 and 0.284.

Source: Kimi Team, "Kimi Linear" (2025); Yang et al., "Gated Linear Attention Transformers" (2024).
"""

import dataclasses
from types import SimpleNamespace

from jax import lax

from jattn._linear import CHUNK
from jattn.pallas._compat import kernel, pl, plgpu
from jattn.pallas.hopper import linear_pieces, ptx
from jattn.pallas.hopper.linear_channel_plan import Prepared
from jattn.pallas.hopper.linear_plan import Plan
from jattn.pallas.hopper.linear_tiles import ld_shared_along_rows
from jattn.pallas.hopper.linear_walk import (
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
    write_entering,
    write_out,
    write_state,
)
from jattn.pallas.hopper.lists import i32


def _kernel(
    plan: Plan,
    *,
    # inputs (HBM)
    dout,  # [B, T, N, D]
    prepared,  # `Prepared`
    initial_state=None,  # gradient of the final one, [B, N, H, D] or [B, N, D, H]; of pieces as in `linear_scan`
    walks=None,  # int32 [3 · sequences], see `Inputs`
    # outputs (HBM), the first alone with maps
    state,  # gradient of the initial one, float32 [B * N, H, D], or [B * N, D, 1, H]; maps as in `linear_scan`
    out=None,  # dz, [B, T, N, D]
    states=None,  # D, [B, n, N, H, D]: gradients of the states that leave each chunk
    # shared memory, matrices in slabs of 64 columns
    do_smem,  # [stages, warpgroups, 64, 64]
    matrices,  # `Prepared`, each [stages, slabs or 1, 64, 64]; the vector float32 [stages, ·]
    out_smem=None,  # [warpgroups, 1, 64, 64]
    states_smem=None,  # [warpgroups, slabs of H, 64, 64]
    # barriers
    ready,  # [stages] TMA
    free,  # [stages] every warpgroup is done with the chunk
    written=None,  # see `linear_walk.leaving_barriers`
    left=None,
):
    x = SimpleNamespace(
        plan=plan, dout=dout, prepared=prepared, initial_state=initial_state, out=out, state=state, states=states,
        states_smem=states_smem, do_smem=do_smem, matrices=matrices, out_smem=out_smem, ready=ready, free=free,
        written=written, left=left, **place(plan, walks, reverse=True),
    )  # fmt: skip
    walk(x, _copy_chunk, _consume, leaving(plan))


# --- producer ---------------------------------------------------------------------------------------------------------


def _copy_chunk(x, chunk, slot):
    ready, at, given, smem = x.ready.at[slot], (x.batch, chunk, x.head), x.prepared, x.matrices
    copy_columns(x, x.dout, x.do_smem.at[slot], chunk, ready)
    plgpu.copy_gmem_to_smem(given.scores.at[at], smem.scores.at[slot, 0], ready)
    for array, room in ((given.update, smem.update), (given.query, smem.query), (given.erase, smem.erase)):
        if array is not None:
            for slab in range(ptx.slabs(x.plan.H)):
                plgpu.copy_gmem_to_smem(array.at[(*at, slab)], room.at[slot, slab], ready)
    if given.inverse is not None:
        plgpu.copy_gmem_to_smem(given.inverse.at[at], smem.inverse.at[slot, 0], ready)
    plgpu.copy_gmem_to_smem(given.vector.at[at], smem.vector.at[slot], ready)


# --- consumer ---------------------------------------------------------------------------------------------------------


def _consume(x):
    smem, H = x.matrices, x.plan.H
    by_rows = lambda m, n: ptx.matrix(lambda i: m.at[i], CHUNK, n, along_rows=True)  # noqa: E731
    x.update = ptx.matrix(lambda i: smem.update.at[i], CHUNK, H)
    x.query, x.A = by_rows(smem.query, H), by_rows(smem.scores, CHUNK)
    if x.plan.options.rule.delta:
        x.erase, x.T = by_rows(smem.erase, H), by_rows(smem.inverse, CHUNK)
    D = lax.fori_loop(0, x.chunks, lambda i, D: _one_chunk(x, i, D), initial_state(x))
    write_state(x, D)


def _one_chunk(x, i, D):
    """The gradient of the state that enters the i-th chunk from the end."""
    slot, dtype, outputs = lax.rem(i, i32(x.plan.stages)), x.plan.dtype, not x.plan.maps
    vector, narrow = x.matrices.vector.at[slot], D.astype(dtype)
    plgpu.barrier_wait(x.ready.at[slot])
    do = columns(x, x.do_smem.at[slot])
    du = ptx.wgmma_rs(ptx.wgmma_rs_nt(narrow, x.update.at(slot)), do, x.A.at(slot))
    write_entering(x, narrow)
    ptx.bar_warp_sync()  # what follows under the products
    D = D * ld_shared_along_rows(vector.at[pl.ds(0, x.plan.H)])
    if x.plan.options.rule.delta:
        beta = ld_shared_along_rows(vector.at[pl.ds(x.plan.H, CHUNK)])
    (du,) = ptx.wgmma_wait_group(0, du)
    written = du.astype(dtype)
    if x.plan.options.rule.delta:
        (dz,) = ptx.wgmma_wait_group(0, ptx.wgmma_rs(ptx.zeros(CHUNK), written, x.T.at(slot)))
    D = ptx.wgmma_rs(D, do, x.query.at(slot))
    if x.plan.options.rule.delta:
        D, written = ptx.wgmma_rs(D, (dz * beta).astype(dtype), x.erase.at(slot)), dz.astype(dtype)
    if outputs:
        write_out(x, written)  # while the tensor core is at D
    (D,) = ptx.wgmma_wait_group(0, D)
    plgpu.barrier_arrive(x.free.at[slot])
    return D


# --- host -------------------------------------------------------------------------------------------------------------


def launch(plan: Plan, inputs, prepared, dout, dfinal, *, multiprocessors: int, interpret=False):
    """Runs the kernel: `(dz [B, T, N, D], dinitial float32 [B, N, H, D] or [B, N, D, H], dstates [B, n, N, H, D])`."""
    return linear_pieces.in_pieces(
        lambda plan, state: _walk(plan, prepared.all, dout, state, inputs.walks, interpret), plan, dfinal,
        multiprocessors=multiprocessors, reverse=True, interpret=interpret,
    )  # fmt: skip


def _walk(plan, given, dout, state, walks, interpret):
    plan = with_stages(dataclasses.replace(plan, save=not plan.maps), lambda plan: _scratch(plan, given))
    others = dict(dout=dout) | ({} if state is None else dict(initial_state=state))
    others |= {} if walks is None else dict(walks=walks)
    results = result_shapes(plan)

    def body(*refs, **allocations):
        mine, rest = Prepared(*refs[: len(given)]), refs[len(given) :]
        smem = Prepared(*(allocations.pop(f"matrix{i}") for i in range(len(given))))
        rest = dict(zip((*others, *results), rest, strict=True))
        _kernel(plan, prepared=mine, matrices=smem, **rest, **allocations)

    found = kernel(
        body,
        name="jattn_linear_channel_backward_maps" if plan.maps else "jattn_linear_channel_backward_scan",
        out_type=tuple(results.values()),
        scratch=_scratch(plan, given),
        grid={"block": plan.blocks},
        warpgroups=plan.warpgroups + 1,
        interpret=interpret,
        approximate=False,
    )(*given, *others.values())
    found = results_of(plan, dict(zip(results, found, strict=True)))
    return found if plan.maps else (found[0], found[1], found[3])


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
        do_smem=smem(stages, plan.warpgroups), **states_smem(plan), **leaving_barriers(plan, len(leaving(plan))),
        **({} if plan.maps else dict(out_smem=smem(plan.warpgroups, 1))),
        ready=plgpu.Barrier(num_arrivals=copies, num_barriers=stages),
        free=plgpu.Barrier(num_arrivals=plan.warpgroups, num_barriers=stages),
    )  # fmt: skip

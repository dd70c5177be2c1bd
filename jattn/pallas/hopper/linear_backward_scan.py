"""The second of three kernels of the gated delta rule's backward on compute capability 9.0: the walk over the chunks of
a sequence from its end, the mirror of `linear_scan`. A and the vectors of a chunk come from `linear_prepare`, M from
the forward; `linear_backward_chunk` goes on from here.

D [H, D] is the gradient of the state that leaves a chunk. A warpgroup has 64 columns of one head's, transposed, in
float32 registers; with vectors along rows, for each chunk

    duᵀ = doᵀ A + update ∘ (Dᵀ kᵀ);   dzᵀ = duᵀ M;   Dᵀ ← last · Dᵀ + (query ∘ doᵀ) q − (key ∘ dzᵀ) k

Left operands are in registers, right ones as TMA left them. Written are D, dz and dv = β ∘ dz, and at the end the
gradient of the initial state. Without the delta rule dv = du, and what dz is in is left out.

Pipeline: a thread block has one warpgroup or two, of the same head, and a producer that copies chunks ahead (TMA):

    producer     kqoMA0 kqoMA1 | kqoMA2 …                  waits for free slots
    consumer     Dᵀ kᵀ, doᵀ A | du | dz, … q | … k | out    waits for copies; the producer sends D, dv and dz (TMA)

Floor: 2050 bytes a token and head, at the 4.3 TB/s of a copy 0.13 ms for T = 8192 and 32 heads, 0.25 ms for B = 4,
T = 4096. A chunk's products take as long as the forward's. Prediction: 0.16 and 0.29 ms.

Source: Yang, Kautz, Hatamizadeh, "Gated Delta Networks" (2024).
"""

import dataclasses
from types import SimpleNamespace

import jax
import jax.numpy as jnp
from jax import lax

from jattn._linear import CHUNK
from jattn.pallas._compat import kernel, pl, plgpu
from jattn.pallas.hopper import linear_pieces, linear_tiles, ptx
from jattn.pallas.hopper.linear_plan import Plan, copy_rows, key_head
from jattn.pallas.hopper.linear_prepare import BACKWARD_VECTORS as VECTORS
from jattn.pallas.hopper.linear_walk import (
    columns,
    copy_columns,
    hand_over,
    initial_state,
    leaving_barriers,
    place,
    result_shapes,
    results_of,
    send_columns,
    send_states,
    states_smem,
    store_slabs,
    walk,
    with_stages,
    write_state,
)
from jattn.pallas.hopper.lists import i32


def _kernel(
    plan: Plan,
    *,
    # inputs (HBM)
    query,  # [B, T, K, H]
    key,  # [B, T, K, H]
    dout,  # [B, T, N, D]
    scores,  # A, [B, n, N, 64, 64]
    vectors,  # float32 [B, n, N, 8, 64]
    initial_state=None,  # gradient of the final one, [B, N, H, D] or [B, N, D, H]; of pieces as in `linear_scan`
    walks=None,  # int32 [3 · sequences], see `Inputs`
    inverse=None,  # M, [B, n, N, 64, 64]; None without the delta rule
    # outputs (HBM), the first alone with maps
    state,  # gradient of the initial one, float32 [B * N, H, D], or [B * N, D, 1, H]; maps as in `linear_scan`
    dstates=None,  # D, [B, n, N, H, D]
    dvalue=None,  # [B, T, N, D]
    dz=None,  # [B, T, N, D]; None without the delta rule
    # shared memory, matrices in slabs of 64 columns
    q_smem,  # [stages, slabs of H, 64, 64]
    k_smem,  # [stages, slabs of H, 64, 64]
    do_smem,  # [stages, warpgroups, 64, 64]
    scores_smem,  # [stages, 1, 64, 64]
    vectors_smem,  # float32 [stages, 8, 64]
    states_smem=None,  # [warpgroups, slabs of H, 64, 64]
    out_smem=None,  # [warpgroups, 1 or 2, 64, 64]: dv and dz
    inverse_smem=None,  # [stages, 1, 64, 64]
    # barriers
    ready,  # [stages] TMA
    free,  # [stages] every warpgroup is done with the chunk
    written=None,  # see `linear_walk.leaving_barriers`
    left=None,
):
    x = SimpleNamespace(
        plan=plan, query=query, key=key, dout=dout, inverse=inverse, scores=scores, vectors=vectors,
        initial_state=initial_state, dstates=dstates, dz=dz, dvalue=dvalue, state=state, q_smem=q_smem, k_smem=k_smem,
        do_smem=do_smem, inverse_smem=inverse_smem, scores_smem=scores_smem, vectors_smem=vectors_smem,
        states_smem=states_smem, out_smem=out_smem, ready=ready, free=free, written=written, left=left,
        **place(plan, walks, reverse=True),
    )  # fmt: skip
    walk(x, _copy_chunk, _consume, _leaving(plan))


# --- producer ---------------------------------------------------------------------------------------------------------


def _copy_chunk(x, chunk, slot):
    ready, head, at = x.ready.at[slot], key_head(x.plan, x.head), (x.batch, chunk, x.head)
    copy_rows(x.plan, x.key, x.batch, chunk, head, x.k_smem.at[slot], ready)
    copy_columns(x, x.dout, x.do_smem.at[slot], chunk, ready)
    plgpu.copy_gmem_to_smem(x.scores.at[*at], x.scores_smem.at[slot, 0], ready)
    plgpu.copy_gmem_to_smem(x.vectors.at[*at], x.vectors_smem.at[slot], ready)
    if x.inverse is not None:
        plgpu.copy_gmem_to_smem(x.inverse.at[*at], x.inverse_smem.at[slot, 0], ready)
    copy_rows(x.plan, x.query, x.batch, chunk, head, x.q_smem.at[slot], ready)


# --- consumer ---------------------------------------------------------------------------------------------------------


def _consume(x):
    matrix = lambda smem, columns, **how: ptx.matrix(lambda i: smem.at[i], CHUNK, columns, **how)  # noqa: E731
    x.k = matrix(x.k_smem, x.plan.H)
    x.k_rows, x.q_rows = (matrix(smem, x.plan.H, along_rows=True) for smem in (x.k_smem, x.q_smem))
    x.A = matrix(x.scores_smem, CHUNK, along_rows=True)
    x.M = None if x.inverse is None else matrix(x.inverse_smem, CHUNK, along_rows=True)
    D = lax.fori_loop(0, x.chunks, lambda i, D: _one_chunk(x, i, D), initial_state(x))
    write_state(x, D)


def _one_chunk(x, i, D):
    """The gradient of the state that enters the i-th chunk from the end; but for maps, D and dz of it are written."""
    slot, dtype, outputs = lax.rem(i, i32(x.plan.stages)), x.plan.dtype, not x.plan.maps
    vector = lambda name: linear_tiles.ld_shared_along_rows(x.vectors_smem.at[slot, VECTORS.index(name)])  # noqa: E731
    plgpu.barrier_wait(x.ready.at[slot])
    narrow, do = D.astype(dtype), columns(x, x.do_smem.at[slot])
    # Products and loads leave a warp in their order: what is loaded after a product waits until that has begun.
    last, update = x.vectors_smem[slot, VECTORS.index("last"), 0], vector("update")
    r = ptx.wgmma_rs_nt(narrow, x.k.at(slot))
    du = linear_tiles.wgmma_rs_nn(do, x.A.at(slot))
    if outputs:
        hand_over(x, _LEAVING, lambda: store_slabs(narrow, x.states_smem.at[x.warpgroup]))
    r, du = ptx.wgmma_wait_group(0, r, du)
    du = du + update * r
    D = D * last
    if x.inverse is not None:
        dz = linear_tiles.wgmma_rs_nn(du.astype(dtype), x.M.at(slot))
    D = ptx.wgmma_rs(D, (do.astype(jnp.float32) * vector("query")).astype(dtype), x.q_rows.at(slot))
    written = (du,)
    if x.inverse is not None:
        (dz,) = ptx.wgmma_wait_group(1, dz)
        D = ptx.wgmma_rs(D, (-dz * vector("key")).astype(dtype), x.k_rows.at(slot))
        written = dz * vector("beta"), dz
    if outputs:
        written = [part.astype(dtype) for part in written]
        hand_over(x, _COLUMNS, lambda: [_store(x, *part) for part in enumerate(written)])
    (D,) = ptx.wgmma_wait_group(0, D)
    plgpu.barrier_arrive(x.free.at[slot])
    return D


def _store(x, i, part):
    linear_tiles.stmatrix_trans(part, x.out_smem.at[x.warpgroup, pl.ds(i, 1)])


# --- what leaves: D, and then dv and dz -------------------------------------------------------------------------------


_LEAVING, _COLUMNS = range(2)


def _leaving(plan) -> tuple:
    return () if plan.maps else (_send_leaving, _send_columns)


def _send_leaving(x, chunk):
    send_states(x, x.dstates, chunk)


def _send_columns(x, chunk):
    for i, array in enumerate((x.dvalue, x.dz)[: x.out_smem.shape[1]]):
        send_columns(x, array, x.out_smem, i, chunk)


# --- host -------------------------------------------------------------------------------------------------------------


def launch(plan: Plan, inputs, prepared, dout, dfinal, *, multiprocessors: int, interpret=False) -> dict:
    """Runs the kernel; results by name: dstates (D) [B, n, N, H, D], dvalue and with the delta rule dz [B, T, N, D],
    and dinitial, the gradient of the initial state, in float32 and in the call's layout, as `dfinal` is."""
    given = dict(query=inputs.query, key=inputs.key, dout=dout, scores=prepared.scores, vectors=prepared.vectors)
    given |= dict(inverse=prepared.inverse) if plan.options.rule.delta else {}
    given |= {} if inputs.walks is None else dict(walks=inputs.walks)
    return linear_pieces.in_pieces(
        lambda plan, state: _walk(plan, given | ({} if state is None else dict(initial_state=state)), interpret), plan,
        dfinal, multiprocessors=multiprocessors, reverse=True, interpret=interpret,
    )  # fmt: skip


def _walk(plan, given, interpret):
    plan = with_stages(dataclasses.replace(plan, save=not plan.maps), _scratch)
    results = dict(state=result_shapes(plan)["state"])
    if not plan.maps:
        states = jax.ShapeDtypeStruct((plan.B, plan.chunks, plan.N, plan.H, plan.D), plan.dtype)
        tokens = jax.ShapeDtypeStruct((plan.B, plan.T, plan.N, plan.D), plan.dtype)
        results |= dict(dstates=states, dvalue=tokens) | (dict(dz=tokens) if plan.options.rule.delta else {})

    def body(*refs, **allocations):
        _kernel(plan, **dict(zip((*given, *results), refs, strict=True)), **allocations)

    found = kernel(
        body,
        name="jattn_linear_backward_maps" if plan.maps else "jattn_linear_backward_scan",
        out_type=tuple(results.values()),
        scratch=_scratch(plan),
        grid={"block": plan.blocks},
        warpgroups=plan.warpgroups + 1,
        interpret=interpret,
        approximate=False,
    )(*given.values())
    found = dict(zip(results, found, strict=True))
    if plan.maps:
        return results_of(plan, found)
    return found | dict(dinitial=results_of(plan, dict(state=found.pop("state")))[1])


def _scratch(plan) -> dict:
    stages, slabs, delta = plan.stages, ptx.slabs(plan.H), plan.options.rule.delta

    def smem(*leading):
        return plgpu.SMEM((*leading, CHUNK, ptx.SLAB), plan.dtype, transforms=ptx.TRANSFORMS)

    return dict(
        q_smem=smem(stages, slabs), k_smem=smem(stages, slabs), do_smem=smem(stages, plan.warpgroups),
        scores_smem=smem(stages, 1), vectors_smem=plgpu.SMEM((stages, len(VECTORS), CHUNK), jnp.float32),
        **(dict(inverse_smem=smem(stages, 1)) if delta else {}),
        **states_smem(plan), **({} if plan.maps else dict(out_smem=smem(plan.warpgroups, 1 + delta))),
        **leaving_barriers(plan, len(_leaving(plan))),
        ready=plgpu.Barrier(num_arrivals=2 * slabs + plan.warpgroups + 2 + delta, num_barriers=stages),
        free=plgpu.Barrier(num_arrivals=plan.warpgroups, num_barriers=stages),
    )  # fmt: skip

"""The second of two kernels of the gated delta rule on compute capability 9.0: the walk over the chunks of a sequence.
M, A and the vectors of a chunk come from `linear_prepare`.

A warpgroup has 64 columns of one head's state, transposed, in float32 registers: S [64, H], whose rows do not know of
one another. So that every left operand is in registers and every right one as TMA left it, all is transposed; with
vectors along rows, for each chunk

    z = beta ∘ vᵀ − key ∘ (S kᵀ);   u = z Mᵀ;   o = query ∘ (S qᵀ) + u Aᵀ;   S ← last · S + (update ∘ u) k

and u = vᵀ without the delta rule.

Pipeline: a thread block has one warpgroup or two, of the same head, and a producer that copies chunks ahead (TMA):

    producer     kqvMA0 kqvMA1 kqvMA2 | kqvMA3 …        waits for free slots
    consumer     S kᵀ | S qᵀ, z, u | o, S | out           waits for copies; the producer sends o (TMA)

Floor: 1300 bytes a token and head, at the 4.3 TB/s of a copy 0.079 ms for T = 8192 and 32 heads, 0.158 ms for
B = 4, T = 4096. A chunk's products take 1024 cycles of a warpgroup alone and twice that of two, with three waits some
1500 and 2500: 128 chunks in 0.11 ms, 64 in 0.09 ms. Prediction, with `linear_prepare`: 0.19 ms and 0.30 ms.
Measured on an H200: 0.139 and 0.169 ms, with it 0.221 and 0.328 ms.

Source: Yang, Kautz, Hatamizadeh, "Gated Delta Networks" (2024).
"""

from types import SimpleNamespace

import jax.numpy as jnp
from jax import lax

from jattn._linear import CHUNK
from jattn.pallas._compat import kernel, plgpu
from jattn.pallas.hopper import linear_tiles, ptx
from jattn.pallas.hopper.linear_plan import VECTORS, Plan, copy_rows, key_head
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
    key,  # [B, T, K, H]
    value,  # [B, T, N, D]
    vectors,  # float32 [B, n, N, 5, 64]
    query=None,  # [B, T, K, H]
    scores=None,  # A, [B, n, N, 64, 64]
    inverse=None,  # M, [B, n, N, 64, 64]; None without the delta rule
    initial_state=None,  # [B, N, H, D] or [B, N, D, H], or None; of pieces float32 [B * pieces * N, H, D]
    walks=None,  # int32 [3 · sequences], see `Inputs`
    slots=None,  # int32 [B · n]
    # outputs (HBM)
    state,  # float32 [B * N, H, D], or [B * N, D, 1, H]; maps [B * (pieces - 1) * N, D + H, 1, H]
    out=None,  # [B, T, N, D]; None with maps
    checkpoints=None,  # as state; None if nobody asks
    states=None,  # that enter each chunk, [B, n, N, H, D]; None without plan.save
    # shared memory, matrices in slabs of 64 columns; maps need no room for queries, scores and outputs
    k_smem,  # [stages, slabs of H, 64, 64]
    v_smem,  # [stages, warpgroups, 64, 64]
    vectors_smem,  # float32 [stages, 5, 64]
    inverse_smem=None,  # [stages, 1, 64, 64]
    q_smem=None,  # [stages, slabs of H, 64, 64]
    scores_smem=None,  # [stages, 1, 64, 64]
    out_smem=None,  # [warpgroups, 1, 64, 64]
    states_smem=None,  # [warpgroups, slabs of H, 64, 64]
    # barriers
    ready,  # [stages] TMA
    free,  # [stages] every warpgroup is done with the chunk
    written=None,  # see `linear_walk.leaving_barriers`
    left=None,
):
    x = SimpleNamespace(
        plan=plan, query=query, key=key, value=value, inverse=inverse, scores=scores, vectors=vectors,
        initial_state=initial_state, out=out, state=state, slots=slots, checkpoints=checkpoints, states=states,
        states_smem=states_smem, q_smem=q_smem, k_smem=k_smem, v_smem=v_smem, inverse_smem=inverse_smem,
        scores_smem=scores_smem, vectors_smem=vectors_smem, out_smem=out_smem, ready=ready, free=free,
        written=written, left=left, **place(plan, walks),
    )  # fmt: skip
    walk(x, _copy_chunk, _consume, leaving(plan))


# --- producer ---------------------------------------------------------------------------------------------------------


def _copy_chunk(x, chunk, slot):
    ready, at = x.ready.at[slot], (x.batch, chunk, x.head)
    head = key_head(x.plan, x.head)
    copy_rows(x.plan, x.key, x.batch, chunk, head, x.k_smem.at[slot], ready)
    plgpu.copy_gmem_to_smem(x.vectors.at[*at], x.vectors_smem.at[slot], ready)
    if x.inverse is not None:
        plgpu.copy_gmem_to_smem(x.inverse.at[*at], x.inverse_smem.at[slot, 0], ready)
    copy_columns(x, x.value, x.v_smem.at[slot], chunk, ready)
    if not x.plan.maps:
        copy_rows(x.plan, x.query, x.batch, chunk, head, x.q_smem.at[slot], ready)
        plgpu.copy_gmem_to_smem(x.scores.at[*at], x.scores_smem.at[slot, 0], ready)


# --- consumer ---------------------------------------------------------------------------------------------------------


def _consume(x):
    H, maps = x.plan.H, x.plan.maps
    operand = lambda m, n, **how: ptx.matrix(lambda i: m.at[i], CHUNK, n, **how)  # noqa: E731
    x.k, x.k_rows = operand(x.k_smem, H), operand(x.k_smem, H, along_rows=True)
    x.M = None if x.inverse is None else operand(x.inverse_smem, CHUNK)
    x.q, x.A = (None, None) if maps else (operand(x.q_smem, H), operand(x.scores_smem, CHUNK))
    S = lax.fori_loop(0, x.chunks, lambda i, S: _one_chunk(x, i, S), initial_state(x))
    write_state(x, S)


def _one_chunk(x, i, S):
    """The state after the i-th chunk, whose output is written; there is none with maps."""
    slot, dtype, outputs = lax.rem(i, i32(x.plan.stages)), x.plan.dtype, not x.plan.maps
    vector = lambda name: linear_tiles.ld_shared_along_rows(x.vectors_smem.at[slot, VECTORS.index(name)])  # noqa: E731
    plgpu.barrier_wait(x.ready.at[slot])
    narrow, u = S.astype(dtype), columns(x, x.v_smem.at[slot]).astype(jnp.float32)
    # Products and loads leave a warp in their order: what is loaded after a product waits until that has begun.
    last = x.vectors_smem[slot, VECTORS.index("last"), 0]
    if x.inverse is not None:
        u, by_key = vector("beta") * u, vector("key")
        (r,) = ptx.wgmma_wait_group(0, ptx.wgmma_rs_nt(narrow, x.k.at(slot)))
    if outputs:
        o = ptx.wgmma_rs_nt(narrow, x.q.at(slot))
        write_entering(x, narrow)
    if x.inverse is not None:
        u = ptx.wgmma_rs_nt((u - by_key * r).astype(dtype), x.M.at(slot))
    ptx.bar_warp_sync()
    S, by_update = S * last, vector("update")
    if outputs:
        by_query = vector("query")
        o, u = ptx.wgmma_wait_group(0, o, u)
        o = ptx.wgmma_rs_nt(u.astype(dtype), x.A.at(slot), o * by_query)
    elif x.inverse is not None:
        (u,) = ptx.wgmma_wait_group(0, u)
    S = ptx.wgmma_rs(S, (u * by_update).astype(dtype), x.k_rows.at(slot))
    if outputs:
        (o,) = ptx.wgmma_wait_group(1, o)
        write_out(x, o.astype(dtype))  # while the tensor core is at S
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
    given = dict(key=inputs.key, value=inputs.value, vectors=prepared.vectors)
    given |= {} if prepared.inverse is None else dict(inverse=prepared.inverse)
    if not plan.maps:
        given |= dict(query=inputs.query, scores=prepared.scores)
        names = "initial_state", "walks", "slots"
        given |= {name: a for name in names if (a := getattr(inputs, name)) is not None}
    plan = with_stages(plan, _scratch)
    results = result_shapes(plan)

    def body(*refs, **allocations):
        _kernel(plan, **dict(zip((*given, *results), refs, strict=True)), **allocations)

    found = kernel(
        body,
        name="jattn_linear_maps" if plan.maps else "jattn_linear_scan",
        out_type=tuple(results.values()),
        scratch=_scratch(plan),
        grid={"block": plan.blocks},
        warpgroups=plan.warpgroups + 1,
        interpret=interpret,
        approximate=False,
    )(*given.values())
    return results_of(plan, dict(zip(results, found, strict=True)))


def _scratch(plan) -> dict:
    stages, slabs, copies = plan.stages, ptx.slabs(plan.H), plan.warpgroups + 1

    def smem(*leading):
        return plgpu.SMEM((*leading, CHUNK, ptx.SLAB), plan.dtype, transforms=ptx.TRANSFORMS)

    rooms = dict(
        k_smem=smem(stages, slabs), v_smem=smem(stages, plan.warpgroups),
        vectors_smem=plgpu.SMEM((stages, len(VECTORS), CHUNK), jnp.float32),
    )  # fmt: skip
    if plan.options.rule.delta:
        rooms["inverse_smem"] = smem(stages, 1)
        copies += 1
    if not plan.maps:
        rooms |= dict(q_smem=smem(stages, slabs), scores_smem=smem(stages, 1), out_smem=smem(plan.warpgroups, 1))
        copies += slabs + 1
    return rooms | dict(
        **states_smem(plan),
        **leaving_barriers(plan, len(leaving(plan))),
        ready=plgpu.Barrier(num_arrivals=copies + slabs, num_barriers=stages),
        free=plgpu.Barrier(num_arrivals=plan.warpgroups, num_barriers=stages),
    )

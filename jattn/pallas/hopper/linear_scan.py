"""The second of two kernels of the gated delta rule on compute capability 9.0: the walk over the chunks of a sequence.
M, A and the vectors of a chunk come from `linear_prepare`.

A warpgroup has 64 columns of one head's state, transposed, in float32 registers: S [64, H], whose rows do not know of
one another. So that every left operand is in registers and every right one as TMA left it, all is transposed; with
vectors along rows, for each chunk

    z = beta ∘ vᵀ − key ∘ (S kᵀ);   u = z Mᵀ;   o = query ∘ (S qᵀ) + u Aᵀ;   S ← last · S + (update ∘ u) k

Pipeline: a thread block has one warpgroup or two, of the same head, and a producer that copies chunks ahead (TMA):

    producer     kqvMA0 kqvMA1 kqvMA2 | kqvMA3 …        waits for free slots
    consumer     S kᵀ, S qᵀ | z | u | o, S | out          waits for copies; o leaves (TMA) while S is computed

Floor: 1300 bytes a token and head, at the 4.3 TB/s of a copy 0.079 ms for T = 8192 and 32 heads, 0.158 ms for
B = 4, T = 4096. A chunk's products take 1024 cycles of a warpgroup alone and twice that of two, with three waits some
1500 and 2500: 128 chunks in 0.11 ms, 64 in 0.09 ms. Prediction, with `linear_prepare`: 0.19 ms and 0.30 ms.
Measured on an H200: 0.140 and 0.167 ms, with it 0.225 and 0.329 ms.

Source: Yang, Kautz, Hatamizadeh, "Gated Delta Networks" (2024).
"""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
from jax import lax

from jattn._linear import CHUNK
from jattn.pallas._compat import kernel, pl, plgpu
from jattn.pallas.hopper import linear_tiles, ptx
from jattn.pallas.hopper.linear_plan import COLUMNS, VECTORS, Plan, copy_rows, key_head, saved_states
from jattn.pallas.hopper.linear_walk import initial_state, produce, states_smem, write_entering, write_out, write_state
from jattn.pallas.hopper.lists import i32

_REGISTERS = 240, 24  # of a computing warpgroup's threads, of the producer's


def _kernel(
    plan: Plan,
    # inputs (HBM)
    query,  # [B, T, K, H]
    key,  # [B, T, K, H]
    value,  # [B, T, N, D]
    inverse,  # M, [B, n, N, 64, 64]
    scores,  # A, [B, n, N, 64, 64]
    vectors,  # float32 [B, n, N, 5, 64]
    initial_state,  # [B, N, H, D] or [B, N, D, H], or None
    # outputs (HBM)
    out,  # [B, T, N, D]
    state,  # float32 [B * N, H, D], or [B * N, D, 1, H]
    states=None,  # that enter each chunk, [B, n, N, H, D]; None without plan.save
    *,
    # shared memory, matrices in slabs of 64 columns
    q_smem,  # [stages, slabs of H, 64, 64]
    k_smem,  # [stages, slabs of H, 64, 64]
    v_smem,  # [stages, warpgroups, 64, 64]
    inverse_smem,  # [stages, 1, 64, 64]
    scores_smem,  # [stages, 1, 64, 64]
    vectors_smem,  # float32 [stages, 5, 64]
    out_smem,  # [warpgroups, 1, 64, 64]
    states_smem=None,  # [warpgroups, slabs of H, 64, 64]
    # barriers
    ready,  # [stages] TMA
    free,  # [stages] every warpgroup is done with the chunk
):
    warpgroup, block = lax.axis_index("warpgroup"), lax.axis_index("block")
    part, rest = lax.rem(block, i32(plan.parts)), lax.div(block, i32(plan.parts))
    x = SimpleNamespace(
        plan=plan, query=query, key=key, value=value, inverse=inverse, scores=scores, vectors=vectors,
        initial_state=initial_state, out=out, state=state, states=states, states_smem=states_smem,
        q_smem=q_smem, k_smem=k_smem, v_smem=v_smem,
        inverse_smem=inverse_smem, scores_smem=scores_smem, vectors_smem=vectors_smem, out_smem=out_smem, ready=ready,
        free=free, head=lax.rem(rest, i32(plan.N)), batch=lax.div(rest, i32(plan.N)),
        first=part * (COLUMNS * plan.warpgroups), warpgroup=warpgroup,
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
    ready, place = x.ready.at[slot], (x.batch, i, x.head)
    head = key_head(x.plan, x.head)
    copy_rows(x.plan, x.key, x.batch, i, head, x.k_smem.at[slot], ready)
    plgpu.copy_gmem_to_smem(x.vectors.at[*place], x.vectors_smem.at[slot], ready)
    plgpu.copy_gmem_to_smem(x.inverse.at[*place], x.inverse_smem.at[slot, 0], ready)
    copy_rows(x.plan, x.value, x.batch, i, x.head, x.v_smem.at[slot], ready, x.first)
    copy_rows(x.plan, x.query, x.batch, i, head, x.q_smem.at[slot], ready)
    plgpu.copy_gmem_to_smem(x.scores.at[*place], x.scores_smem.at[slot, 0], ready)


# --- consumer ---------------------------------------------------------------------------------------------------------


def _consume(x):
    H = x.plan.H
    x.q, x.k = (ptx.matrix(lambda i, smem=smem: smem.at[i], CHUNK, H) for smem in (x.q_smem, x.k_smem))
    x.k_rows = ptx.matrix(lambda i: x.k_smem.at[i], CHUNK, H, along_rows=True)
    x.M, x.A = (ptx.matrix(lambda i, m=m: m.at[i], CHUNK, CHUNK) for m in (x.inverse_smem, x.scores_smem))
    S = lax.fori_loop(0, x.chunks, lambda i, S: _one_chunk(x, i, S), initial_state(x))
    write_state(x, S)
    plgpu.wait_smem_to_gmem(0)


def _one_chunk(x, i, S):
    """The state after the i-th chunk, whose output is written."""
    slot, dtype = lax.rem(i, i32(x.plan.stages)), x.plan.dtype
    vector = lambda name: linear_tiles.ld_shared_along_rows(x.vectors_smem.at[slot, VECTORS.index(name)])  # noqa: E731
    plgpu.barrier_wait(x.ready.at[slot])
    narrow = S.astype(dtype)
    r = ptx.wgmma_rs_nt(narrow, x.k.at(slot))
    o = ptx.wgmma_rs_nt(narrow, x.q.at(slot))
    write_entering(x, i, narrow)
    v = linear_tiles.ldmatrix_trans(x.v_smem.at[slot, pl.ds(x.warpgroup, 1)]).astype(jnp.float32)
    (r,) = ptx.wgmma_wait_group(1, r)
    z = vector("beta") * v - vector("key") * r
    u = ptx.wgmma_rs_nt(z.astype(dtype), x.M.at(slot))
    o, u = ptx.wgmma_wait_group(0, o, u)
    S = S * x.vectors_smem[slot, VECTORS.index("last"), 0]  # with a product in flight ptxas would wait for it first
    o = ptx.wgmma_rs_nt(u.astype(dtype), x.A.at(slot), o * vector("query"))
    S = ptx.wgmma_rs(S, (u * vector("update")).astype(dtype), x.k_rows.at(slot))
    (o,) = ptx.wgmma_wait_group(1, o)
    write_out(x, i, o.astype(dtype))  # while the tensor core is at S
    (S,) = ptx.wgmma_wait_group(0, S)
    plgpu.barrier_arrive(x.free.at[slot])
    return S


# --- host -------------------------------------------------------------------------------------------------------------


def launch(plan: Plan, inputs, prepared, *, interpret=False):
    """Runs the kernel: `(out [B, T, N, D], state float32 [B, N, H, D], or [B, N, D, H], states or None)`."""
    operands = [inputs.query, inputs.key, inputs.value, prepared.inverse, prepared.scores, prepared.vectors]
    states = [] if inputs.initial_state is None else [inputs.initial_state]

    def body(*refs, **allocations):
        refs = refs if states else (*refs[:6], None, *refs[6:])
        _kernel(plan, *refs, **allocations)

    heads, by_keys = plan.B * plan.N, plan.options.state_layout == "kv"
    shape = (heads, plan.H, plan.D) if by_keys else (heads, plan.D, 1, plan.H)
    out, state, *saved = kernel(
        body,
        name="jattn_linear_scan",
        out_type=(
            jax.ShapeDtypeStruct((plan.B, plan.T, plan.N, plan.D), plan.dtype),
            jax.ShapeDtypeStruct(shape, jnp.float32),
            *saved_states(plan),
        ),
        scratch=_scratch(plan),
        grid={"block": heads * plan.parts},
        warpgroups=plan.warpgroups + 1,
        interpret=interpret,
        approximate=False,
    )(*operands, *states)
    state = state.reshape(plan.B, plan.N, *((plan.H, plan.D) if by_keys else (plan.D, plan.H)))
    return out, state, saved[0] if plan.save else None


def _scratch(plan) -> dict:
    stages, slabs = plan.stages, ptx.slabs(plan.H)

    def smem(*leading):
        return plgpu.SMEM((*leading, CHUNK, ptx.SLAB), plan.dtype, transforms=ptx.TRANSFORMS)

    return dict(
        q_smem=smem(stages, slabs), k_smem=smem(stages, slabs), v_smem=smem(stages, plan.warpgroups),
        inverse_smem=smem(stages, 1), scores_smem=smem(stages, 1),
        vectors_smem=plgpu.SMEM((stages, len(VECTORS), CHUNK), jnp.float32), out_smem=smem(plan.warpgroups, 1),
        **states_smem(plan),
        ready=plgpu.Barrier(num_arrivals=2 * slabs + plan.warpgroups + 3, num_barriers=stages),
        free=plgpu.Barrier(num_arrivals=plan.warpgroups, num_barriers=stages),
    )  # fmt: skip

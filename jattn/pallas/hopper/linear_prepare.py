"""The first of two kernels of the gated delta rule on compute capability 9.0: what chunks of 64 tokens need that do not
know of one another. `linear_scan` is the second.

A warpgroup has one chunk of one value head. With running sums G of the log decays, Γ_ij = exp(G_i − G_j) for j ≤ i, and
norms of queries and keys in nq, nk (1 without qk_l2norm):

    T = (I + tril(β_i nk_i nk_j (k kᵀ)_ij, −1))⁻¹     in float32, by substitution; the decay is not in it
    M = T ∘ Γ ∘ β_j                                    A = tril(scale nq_i nk_j (q kᵀ)_ij ∘ Γ)
    key = nk exp(G);   query = scale nq exp(G);   update = nk exp(G_C − G);   last = exp(G_C)

so that norms, scale and gates are numbers beside products, and queries and keys are never written. Tokens past the last
have β = 0 and g = 0: M and A are 0 there, and the state does not change.

Floor: q and k in, M, A and the vectors out: 784 bytes a token and head, at the 4.3 TB/s of a copy 0.048 ms for T = 8192
and 32 heads, 0.096 ms for twice as many. Prediction: 0.055 and 0.105 ms; four thread blocks on a multiprocessor, of
some 2000 instructions a warp and chunk: 0.04 and 0.08 ms of issue. Measured on an H200: 0.112 and 0.216 ms; three
blocks fit, and 64 dependent steps of the substitution are hidden by no more than those.

Source: Yang, Kautz, Hatamizadeh, "Gated Delta Networks" (2024).
"""

from types import SimpleNamespace

import jax.numpy as jnp
from jax import lax

from jattn._linear import CHUNK
from jattn.pallas._compat import kernel, plgpu
from jattn.pallas.hopper import linear_gates as gates
from jattn.pallas.hopper import linear_tiles, memory, ptx
from jattn.pallas.hopper.decode_rows import along_columns
from jattn.pallas.hopper.linear_plan import VECTORS, Plan, Prepared, copy_rows, key_head, prepared_shapes
from jattn.pallas.hopper.lists import i32

_INPUTS = ("query", "key", "g", "beta", "scale", "A_log", "dt_bias")
# Whatever a token before it wrote is 0 in float32 after such a decay; less would take digits from others' sums.
_LEAST = -128.0


def _kernel(
    plan: Plan,
    inputs,  # name -> array, those of `Inputs` that there are
    # outputs (HBM)
    inverse,  # M, [B, n, N, 64, 64]
    scores,  # A, [B, n, N, 64, 64]
    vectors,  # float32 [B, n, N, 4, 64]
    *,
    # shared memory
    q_smem,  # [2, 64, 64], in slabs of 64 columns; A and M on their way out
    k_smem,  # [slabs of H, 64, 64]
    numbers,  # float32 [3, 64]: g, β, nk
    vectors_smem,  # float32 [4, 64]
    scratch,  # float32 [64, PITCH]
    # barriers
    ready,  # TMA
):
    block = lax.axis_index("block")
    head, rest = lax.rem(block, i32(plan.N)), lax.div(block, i32(plan.N))
    chunk, batch = lax.rem(rest, i32(plan.chunks)), lax.div(rest, i32(plan.chunks))
    x = SimpleNamespace(plan=plan, **dict.fromkeys(_INPUTS), head=head, chunk=chunk, batch=batch, numbers=numbers)
    vars(x).update(inputs)
    slabs = ptx.slabs(plan.H)
    for array, smem in ((x.query, q_smem.at[:slabs]), (x.key, k_smem)):
        copy_rows(plan, array, batch, chunk, key_head(plan, head), smem, ready)
    g, beta = _gates(x)
    plgpu.barrier_wait(ready)
    q_norm = k_norm = None
    if plan.options.qk_l2norm:
        q_norm, k_norm = (_inverse_norms(smem, plan.H) for smem in (q_smem, k_smem))
    numbers[0], numbers[1] = g, beta
    if k_norm is not None:
        numbers[2] = k_norm
    plgpu.commit_smem()

    q, k = (ptx.matrix(lambda _, smem=smem: smem, CHUNK, plan.H) for smem in (q_smem, k_smem))
    qk, kk = ptx.wgmma_ss(q, k, plan.dtype), ptx.wgmma_ss(k, k, plan.dtype)
    sums, column_sums, total = linear_tiles.prefix_sums(numbers.at[0])
    below = ptx.numbers(i32(0), 0, CHUNK) - ptx.numbers(i32(0), 1, CHUNK)  # i − j
    decays = jnp.exp(jnp.where(below >= 0, along_columns(sums, CHUNK) - column_sums, -jnp.inf))
    qk, kk = ptx.wgmma_wait_group(0, qk, kk)

    scale = x.scale[0] if plan.options.scale is None else jnp.float32(plan.options.scale)
    query_factor = _same(scale) if q_norm is None else q_norm * scale
    A, lower = qk * decays * along_columns(query_factor, CHUNK), kk * along_columns(beta, CHUNK)
    if k_norm is not None:
        k_norm_columns = linear_tiles.ld_shared_along_rows(numbers.at[2])
        A, lower = A * k_norm_columns, lower * along_columns(k_norm, CHUNK) * k_norm_columns
    A = A.astype(plan.dtype)
    T = linear_tiles.unit_lower_inverse(jnp.where(below > 0, lower, 0.0), scratch)
    M = T * decays * linear_tiles.ld_shared_along_rows(numbers.at[1])
    memory.stmatrix(A, q_smem.at[0:1])  # only now have all warps met since the products that read these queries
    memory.stmatrix(M.astype(plan.dtype), q_smem.at[1:2])
    _write_vectors(vectors_smem, jnp.exp(sums), jnp.exp(total - sums), jnp.exp(total), query_factor, k_norm)
    plgpu.commit_smem()
    place = batch, chunk, head
    plgpu.copy_smem_to_gmem(q_smem.at[0], scores.at[*place])
    plgpu.copy_smem_to_gmem(q_smem.at[1], inverse.at[*place])
    plgpu.copy_smem_to_gmem(vectors_smem, vectors.at[*place])
    plgpu.wait_smem_to_gmem(0)


def _gates(x):
    """Log decays and β of the tokens, float32 `[64]` in the ROW layout; 0 for those that do not exist."""
    options, first = x.plan.options, x.chunk * CHUNK
    rows = x.plan.T - first
    read = lambda array: linear_tiles.ld_global_tokens(array, x.batch, first, x.head, rows)  # noqa: E731
    exists = ptx.row_numbers() < rows
    beta = jnp.where(exists, gates.activated(options, read(x.beta)), 0.0)
    if x.g is None:
        return _same(jnp.float32(0)), beta
    A_log, bias = (None if a is None else a[x.head] for a in (x.A_log, x.dt_bias))
    g = jnp.maximum(gates.log_decay(options, read(x.g), A_log, bias), _LEAST)
    return jnp.where(exists, g, 0.0), beta


def _same(x):
    """A number for each row."""
    return plgpu.layout_cast(jnp.full(CHUNK, x), ptx.ROW)


def _inverse_norms(smem, H):
    rows = memory.ldmatrix(smem, H).astype(jnp.float32)
    return gates.inverse_norm(jnp.sum(rows * rows, axis=1))


def _write_vectors(smem, decayed, rest, last, query_factor, k_norm):
    norm = (lambda a: a) if k_norm is None else (lambda a: a * k_norm)
    values = dict(key=norm(decayed), query=query_factor * decayed, update=norm(rest), last=_same(last))
    for i, name in enumerate(VECTORS):
        smem[i] = values[name]


def launch(plan: Plan, inputs, *, interpret=False) -> Prepared:
    """Runs the kernel on `Inputs`."""
    given = {name: x for name in _INPUTS if (x := getattr(inputs, name)) is not None}
    shapes = prepared_shapes(plan)

    def body(*refs, **allocations):
        _kernel(plan, dict(zip(given, refs, strict=False)), *refs[len(given) :], **allocations)

    launched = kernel(
        body,
        name="jattn_linear_prepare",
        out_type=(shapes.inverse, shapes.scores, shapes.vectors),
        scratch=_scratch(plan),
        grid={"block": plan.B * plan.chunks * plan.N},
        warpgroups=1,
        interpret=interpret,
        approximate=False,
    )
    return Prepared(*launched(*given.values()))


def _scratch(plan) -> dict:
    def smem(slabs):
        return plgpu.SMEM((slabs, CHUNK, ptx.SLAB), plan.dtype, transforms=ptx.TRANSFORMS)

    return dict(
        q_smem=smem(2),
        k_smem=smem(ptx.slabs(plan.H)),
        numbers=plgpu.SMEM((3, CHUNK), jnp.float32),
        vectors_smem=plgpu.SMEM((len(VECTORS), CHUNK), jnp.float32),
        scratch=plgpu.SMEM((CHUNK, linear_tiles.PITCH), jnp.float32),
        ready=plgpu.Barrier(num_arrivals=2 * ptx.slabs(plan.H)),
    )

"""The first of two kernels of the gated delta rule on compute capability 9.0: what chunks of 64 tokens need that do not
know of one another. `linear_scan` is the second. Without the delta rule there is no inverse; a backward knows M, and
takes A and more vectors again.

With running sums G of the log decays, Γ_ij = exp(G_i − G_j) for j ≤ i, and norms of queries and keys in nq, nk (1
without qk_l2norm), a chunk of one value head has

    T = (I + tril(β_i nk_i nk_j (k kᵀ)_ij, −1))⁻¹     in float32; the decay is not in it
    M = T ∘ Γ                                          A = tril(scale nq_i nk_j (q kᵀ)_ij ∘ Γ)
    beta = β;   key = β nk exp(G);   query = scale nq exp(G);   update = nk exp(G_C − G);   last = exp(G_C)

so that norms, scale and gates are numbers beside products, and queries and keys are never written. β is not in M, which
would round to bfloat16 alike in a whole column and err three times as much where keys are alike. Tokens past the last
have β = 0 and g = 0: what M multiplies is 0 there, and the state does not change.

Pipeline: a thread block fills a multiprocessor with four warpgroups that do not wait for one another; each takes chunk
after chunk, and copies the next one's queries and keys (TMA) once it has multiplied its own:

    q kᵀ, A | k kᵀ | copies begin … inverses of two blocks of 32 | corner between them | M | A, M, vectors leave

Floor: q and k in, M, A and the vectors out: 788 bytes a token and head, at the 4.3 TB/s of a copy 0.048 ms for T = 8192
and 32 heads, 0.096 ms for twice as many. Prediction: 0.07 and 0.13 ms, of 2400 instructions a warp and chunk, which
take 0.045 and 0.09 ms if no cycle is lost. Measured on an H200: 0.081 and 0.163 ms; by substitution over all 64 rows,
without copies ahead and with three warpgroups on a multiprocessor, it was 0.112 and 0.216 ms. For a backward 672 bytes
a token and head are 0.041 and 0.082 ms; prediction: 0.05 and 0.10 ms.

Source: Yang, Kautz, Hatamizadeh, "Gated Delta Networks" (2024).
"""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
from jax import lax

from jattn._linear import CHUNK
from jattn.pallas._compat import kernel, pl, plgpu
from jattn.pallas.hopper import linear_gates as gates
from jattn.pallas.hopper import linear_tiles, memory, ptx
from jattn.pallas.hopper.decode_rows import along_columns
from jattn.pallas.hopper.linear_inverse import HALF, unit_lower_inverse
from jattn.pallas.hopper.linear_plan import (
    VECTORS,
    Plan,
    Prepared,
    copy_rows,
    items,
    key_head,
    place_of,
    prepared_shapes,
)
from jattn.pallas.hopper.lists import i32

_INPUTS = ("query", "key", "g", "beta", "scale", "A_log", "dt_bias")
# What a backward knows of a token besides: G to the base 2, nq, nk.
BACKWARD_VECTORS = (*VECTORS, "sums", "query_norm", "key_norm")
WARPGROUPS = 4  # of a thread block, which fills a multiprocessor: no thread may have more than 128 registers


def _kernel(
    plan: Plan,
    inputs,  # name -> array, those of `Inputs` that there are
    # outputs (HBM)
    inverse,  # M, [B, n, N, 64, 64]; None without the delta rule, and for a backward, which has it
    scores,  # A, [B, n, N, 64, 64]
    vectors,  # float32 [B, n, N, 5, 64]; for a backward 8
    *,
    # shared memory, of each warpgroup
    q_smem,  # [warpgroups, slabs of H, 64, 64]
    k_smem,  # [warpgroups, slabs of H, 64, 64]
    squares,  # [warpgroups, 2, 64, 64]: what the inverse takes; then A and M on their way out
    numbers,  # float32 [warpgroups, 2, 64]: G, nk
    vectors_smem,  # float32 [warpgroups, 5 or 8, 64]
    # barriers
    ready,  # [warpgroups] TMA
):
    own = dict(
        q_smem=q_smem, k_smem=k_smem, squares=squares, numbers=numbers, vectors_smem=vectors_smem, ready=ready,
    )  # fmt: skip
    x = SimpleNamespace(plan=plan, own=own, **dict.fromkeys(_INPUTS), inverse=inverse, scores=scores, vectors=vectors)
    vars(x).update(inputs)
    stride = lax.axis_size("block") * WARPGROUPS
    first = lax.axis_index("block") * WARPGROUPS + lax.axis_index("warpgroup")
    rounds = lax.div(items(plan) - first + (stride - 1), i32(stride))
    pl.when(rounds > 0)(lambda: _copy_in(_with_own(x), first))
    lax.fori_loop(0, rounds, lambda r, _: _one_chunk(x, first + r * stride, stride), None)
    plgpu.wait_smem_to_gmem(0)


def _with_own(x):
    """x with this warpgroup's shared memory and barriers. Where the index is taken anew, no addresses that follow from
    it stay in registers through a loop."""
    warpgroup = lax.axis_index("warpgroup")
    return SimpleNamespace(**vars(x), **{name: ref.at[warpgroup] for name, ref in x.own.items()})


def _copy_in(x, item):
    batch, chunk, head = place_of(x.plan, item)
    for array, smem in ((x.query, x.q_smem), (x.key, x.k_smem)):
        copy_rows(x.plan, array, batch, chunk, key_head(x.plan, head), smem, x.ready)


def _one_chunk(x, item, stride):
    """Writes what belongs to an item, and begins to copy what the next one takes.

    Γ and k kᵀ are computed twice: kept, they would cost a quarter of the warps of a multiprocessor.
    """
    x = _with_own(x)
    p, place = x.plan, place_of(x.plan, item)
    g, beta = _gates(x, *place)
    x.numbers[0] = g
    plgpu.barrier_wait(x.ready)
    q, k = (ptx.matrix(lambda _, smem=smem: smem, CHUNK, p.H) for smem in (x.q_smem, x.k_smem))
    scale = x.scale[0] if p.options.scale is None else jnp.float32(p.options.scale)
    query_factor, row_factor, q_norm, k_norm = _same(scale), beta, None, None
    if p.options.qk_l2norm:
        squares = ptx.wgmma_wait_group(0, ptx.wgmma_ss(q, q, p.dtype), ptx.wgmma_ss(k, k, p.dtype))
        q_norm, k_norm = (gates.inverse_norm(linear_tiles.diagonal(a)) for a in squares)
        x.numbers[1], query_factor, row_factor = k_norm, q_norm * scale, beta * k_norm
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the item before has left
    plgpu.commit_smem()

    beside_keys = lambda a: a if k_norm is None else a * linear_tiles.ld_shared_along_rows(x.numbers.at[1])  # noqa: E731
    (qk,) = ptx.wgmma_wait_group(0, ptx.wgmma_ss(q, k, p.dtype))
    A = beside_keys(qk) * along_columns(query_factor, CHUNK)
    differences, sums, total = _differences(x)
    below = ptx.numbers(i32(0), 0, CHUNK) >= ptx.numbers(i32(0), 1, CHUNK)
    decays = jnp.exp2(jnp.where(below, differences, -jnp.inf))
    memory.stmatrix((A * decays).astype(p.dtype), x.squares.at[1:2])
    _write_vectors(x.vectors_smem, beta, sums, total, query_factor, q_norm, k_norm)

    if x.inverse is not None:
        (kk,) = ptx.wgmma_wait_group(0, ptx.wgmma_ss(k, k, p.dtype))
    plgpu.commit_smem()  # all warps are done with queries and keys
    pl.when(item + stride < items(p))(lambda: _copy_in(x, item + stride))
    if x.inverse is None:
        _write(x, place)
        return
    lower = beside_keys(kk) * along_columns(row_factor, CHUNK)
    parts = unit_lower_inverse(lower, x.squares.at[0:1])
    decays = jnp.exp2(jnp.minimum(_differences(x)[0], 0.0))  # above the diagonal parts are 0
    for i, part in enumerate(parts):
        part = part * decays[:, i * HALF : (i + 1) * HALF]
        memory.stmatrix(part.astype(p.dtype), x.squares.at[0:1], i * HALF)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(x.squares.at[0], x.inverse.at[*place])
    _write(x, place)


def _write(x, place):
    plgpu.copy_smem_to_gmem(x.squares.at[1], x.scores.at[*place])
    plgpu.copy_smem_to_gmem(x.vectors_smem, x.vectors.at[*place])


def _gates(x, batch, chunk, head):
    """Log decays to the base 2 and β of the tokens, float32 `[64]` in the ROW layout; 0 for those that do not exist."""
    options, first = x.plan.options, chunk * CHUNK
    rows = x.plan.T - first
    read = lambda array: linear_tiles.ld_global_tokens(array, batch, first, head, rows)  # noqa: E731
    exists = ptx.row_numbers() < rows
    beta = jnp.where(exists, gates.activated(options, read(x.beta)), 0.0) if options.rule.delta else None
    if x.g is None:
        return 0.0 * exists.astype(jnp.float32), beta  # a constant has a layout that other constants contradict
    A_log, bias = (None if a is None else a[head] for a in (x.A_log, x.dt_bias))
    g = jnp.maximum(gates.log_decay(options, read(x.g), A_log, bias), gates.LEAST)
    return jnp.where(exists, g * gates.LOG2_E, 0.0), beta


def _differences(x):
    """G_i − G_j, G and the total, for log decays to the base 2."""
    sums, columns, total = linear_tiles.prefix_sums(x.numbers.at[0])
    return along_columns(sums, CHUNK) - columns, sums, total


def _same(x):
    """A number for each row."""
    return plgpu.layout_cast(jnp.full(CHUNK, x), ptx.ROW)


def _write_vectors(smem, beta, sums, total, query_factor, q_norm, k_norm):
    decayed, rest = jnp.exp2(sums), jnp.exp2(total - sums)
    norm = (lambda a: a) if k_norm is None else (lambda a: a * k_norm)
    values = dict(
        query=query_factor * decayed, update=norm(rest), last=_same(jnp.exp2(total)), sums=sums,
    )  # fmt: skip
    values |= dict.fromkeys(("beta", "key"), sums) if beta is None else dict(beta=beta, key=beta * norm(decayed))
    norms = dict(query_norm=q_norm, key_norm=k_norm)
    values |= {name: _same(jnp.float32(1)) if n is None else n for name, n in norms.items()}
    for i, name in enumerate(BACKWARD_VECTORS[: smem.shape[0]]):
        smem[i] = values[name]


def launch(plan: Plan, inputs, *, multiprocessors: int, interpret=False) -> Prepared:
    """Runs the kernel on `Inputs`. Without the delta rule there is no inverse."""
    shapes = prepared_shapes(plan)
    outputs = (shapes.inverse, shapes.scores, shapes.vectors)[not plan.options.rule.delta :]
    found = _launched(plan, inputs, outputs, multiprocessors, interpret)
    return Prepared(*((None,) * (3 - len(found))), *found)


def launch_backward(plan: Plan, inputs, inverse, *, multiprocessors: int, interpret=False) -> Prepared:
    """The same for a backward, with M as the forward left it and `BACKWARD_VECTORS`."""
    shapes = prepared_shapes(plan)
    vectors = jax.ShapeDtypeStruct((*shapes.vectors.shape[:3], len(BACKWARD_VECTORS), CHUNK), jnp.float32)
    return Prepared(inverse, *_launched(plan, inputs, (shapes.scores, vectors), multiprocessors, interpret))


def _launched(plan, inputs, outputs, multiprocessors, interpret):
    given = {name: x for name in _INPUTS if (x := getattr(inputs, name)) is not None}

    def body(*refs, **allocations):
        named, outs = dict(zip(given, refs, strict=False)), refs[len(given) :]
        _kernel(plan, named, *(outs if len(outs) == 3 else (None, *outs)), **allocations)

    return kernel(
        body,
        name="jattn_linear_prepare",
        out_type=outputs,
        scratch=_scratch(plan, outputs[-1].shape[3]),
        grid={"block": min(multiprocessors, -(-items(plan) // WARPGROUPS))},
        warpgroups=WARPGROUPS,
        interpret=interpret,
        approximate=True,
    )(*given.values())


def _scratch(plan, vectors) -> dict:
    def smem(slabs):
        return plgpu.SMEM((WARPGROUPS, slabs, CHUNK, ptx.SLAB), plan.dtype, transforms=ptx.TRANSFORMS)

    slabs = ptx.slabs(plan.H)
    return dict(
        q_smem=smem(slabs),
        k_smem=smem(slabs),
        squares=smem(2),
        numbers=plgpu.SMEM((WARPGROUPS, 2, CHUNK), jnp.float32),
        vectors_smem=plgpu.SMEM((WARPGROUPS, vectors, CHUNK), jnp.float32),
        ready=plgpu.Barrier(num_arrivals=2 * slabs, num_barriers=WARPGROUPS),
    )

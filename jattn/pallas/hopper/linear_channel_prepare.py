"""The first of two kernels of KDA and GLA on compute capability 9.0: what chunks of 64 tokens need that do not know of
one another. `linear_channel_scan` is the second.

A warpgroup has one chunk of one value head. With running sums G of the log decays, the queries q with their scale and
norm, the keys k with theirs, and P of `linear_channel_tiles`:

    A = tril(P(q, k))     T = (I + tril(β_i P(k, k)_ij, −1))⁻¹ in float32, by substitution
    query = q exp(G);   erase = −k exp(G);   update = k exp(G_C − G);   decay = exp(G_C)

so that the scan multiplies matrices, and by vectors only the state and, with β, what T takes: β in T would round to
bfloat16 alike in a whole column, which doubles the error once keys are alike and β is near 2. GLA has neither T nor
erase. Tokens past the last have q = k = β = 0 and g = 0: A is 0 there, and the state does not change.

    a channel a thread     gates, sums of log decays → shared memory
    a warp 16 tokens       k to the end of its block → shared memory | scores | query, erase, update → TMA
    two threads a column   T → TMA

Floor: q, k and float32 g in, three matrices [64, H], T and A out: 2060 bytes a token and head, at the 4.3 TB/s of a
copy 0.126 ms for T = 8192 and 32 heads, 0.251 ms for B = 4, T = 4096. Prediction: 0.25 and 0.49 ms, of some 7300
instructions a warp and chunk and two thread blocks on a multiprocessor. Measured on an H200: 0.288 and 0.542 ms, from
bounded gates, of 6100 instructions, 0.248 and 0.495; 9000 had taken 0.302 and 0.588.

Source: Kimi Team, "Kimi Linear" (2025); Yang et al., "Gated Linear Attention Transformers" (2024).
"""

import dataclasses
from types import SimpleNamespace

import jax.numpy as jnp
from jax import lax

from jattn._linear import CHUNK
from jattn.pallas._compat import kernel, pl, plgpu
from jattn.pallas.hopper import linear_channel_tiles as tiles
from jattn.pallas.hopper import linear_gates as gates
from jattn.pallas.hopper import linear_tiles, memory, ptx
from jattn.pallas.hopper.decode_rows import along_columns
from jattn.pallas.hopper.linear_channel_plan import Prepared, prepared_shapes
from jattn.pallas.hopper.linear_inverse import HALF, unit_lower_inverse
from jattn.pallas.hopper.linear_plan import Plan, copy_rows, items, key_head, place_of
from jattn.pallas.hopper.lists import i32

_INPUTS = ("query", "key", "g", "beta", "scale", "A_log", "dt_bias")


def _kernel(
    plan: Plan,
    inputs,  # name -> array, those of `Inputs` that there are
    out,  # `Prepared` (HBM)
    *,
    # shared memory, matrices in slabs of 64 columns
    q_smem,  # [slabs of H, 64, 64]; query on its way out
    k_smem,  # [slabs of H, 64, 64]; erase on its way out
    right,  # [slabs of H, 64, 64]: keys decayed to the end of their block of 16; update on its way out
    squares=None,  # [2, 64, 64]: A and T on their way out; None where these are known
    sums,  # float32 [64, pitch]: of log decays, from the start of a block of 16
    others,  # float32 [8, H]: of log decays, of all blocks before each block, and of all after it
    vector,  # float32 [H + 64]: decay, β; [H] without the delta rule
    # barriers
    ready,  # TMA
):
    batch, chunk, head = place_of(plan, lax.axis_index("block"))
    x = SimpleNamespace(
        plan=plan, **dict.fromkeys(_INPUTS), head=head, chunk=chunk, batch=batch, place=(batch, chunk, head)
    )
    vars(x).update(inputs, q_smem=q_smem, k_smem=k_smem, right=right, sums=sums, others=others)
    x.rows = plan.T - chunk * CHUNK
    for array, smem in ((x.query, q_smem), (x.key, k_smem)):
        copy_rows(plan, array, batch, chunk, key_head(plan, head), smem, ready)
    delta, pieces = plan.options.rule.delta, plan.H // tiles.PIECE
    beta = activated_beta(x) if delta else None
    sum_log_decays(x)
    tiles.st_decay(sums, vector.at[pl.ds(0, plan.H)])
    tiles.st_other_sums(sums, others)
    plgpu.barrier_wait(ready)
    scale = x.scale[0] if plan.options.scale is None else jnp.float32(plan.options.scale)
    x.q_factor, x.k_factor = _same(scale), None
    if plan.options.qk_l2norm:
        q_norm, k_norm = inverse_norms(x)
        x.q_factor, x.k_factor = q_norm * scale, k_norm
    if delta:
        vector[pl.ds(plan.H, CHUNK)] = beta
    plgpu.commit_smem()

    if squares is not None:
        lax.fori_loop(0, pieces, lambda p, _: _decay_to_end(x, p), None)
        plgpu.commit_smem()
        A, lower = _scores(x, pieces)
        plgpu.commit_smem()
        memory.stmatrix(A.astype(plan.dtype), squares.at[0:1])
    lax.fori_loop(0, pieces, lambda p, _: _decay_from_ends(x, p), None)
    plgpu.commit_smem()
    for i in range(ptx.slabs(plan.H)):
        plgpu.copy_smem_to_gmem(q_smem.at[i], out.query.at[(*x.place, i)])
        plgpu.copy_smem_to_gmem(right.at[i], out.update.at[(*x.place, i)])
        if delta:
            plgpu.copy_smem_to_gmem(k_smem.at[i], out.erase.at[(*x.place, i)])
    plgpu.copy_smem_to_gmem(vector, out.vector.at[x.place])
    if squares is not None:
        plgpu.copy_smem_to_gmem(squares.at[0], out.scores.at[x.place])
    if squares is not None and delta:
        _write_inverse(lower * along_columns(beta, CHUNK), squares.at[1:2])
        plgpu.copy_smem_to_gmem(squares.at[1], out.inverse.at[x.place])
    plgpu.wait_smem_to_gmem(0)


def _write_inverse(lower, smem):
    """`(I + lower)⁻¹` to `smem [1, 64, 64]`."""
    for i, part in enumerate(unit_lower_inverse(lower, smem)):
        memory.stmatrix(part.astype(smem.dtype), smem, i * HALF)
    plgpu.commit_smem()


def activated_beta(x):
    """β of the tokens, float32 `[64]` in the ROW layout; 0 for those that do not exist."""
    raw = linear_tiles.ld_global_tokens(x.beta, x.batch, x.chunk * CHUNK, x.head, x.rows)
    return jnp.where(ptx.row_numbers() < x.rows, gates.activated(x.plan.options, raw), 0.0)


def _same(x):
    """A number for each row."""
    return plgpu.layout_cast(jnp.full(CHUNK, x), ptx.ROW)


def inverse_norms(x):
    rows = [ptx.matrix(lambda _, smem=smem: smem, CHUNK, x.plan.H) for smem in (x.q_smem, x.k_smem)]
    squares = ptx.wgmma_wait_group(0, *(ptx.wgmma_ss(a, a, x.plan.dtype) for a in rows))
    return [gates.inverse_norm(linear_tiles.diagonal(a)) for a in squares]


def sum_log_decays(x):
    options = x.plan.options
    A_log = None if x.A_log is None else x.A_log[x.head]
    bias = None if x.dt_bias is None else tiles.ld_global_channel(x.dt_bias, x.head)

    for i, raw in enumerate(tiles.ld_global_channels(x.g, x.batch, x.chunk * CHUNK, x.head)):
        if options.gate == "bounded":
            rate = jnp.float32(-gates.LOG2_E) * (1 if A_log is None else jnp.exp(A_log))
            g = jnp.float32(options.lower_bound) * tiles.logistic((raw if bias is None else raw + bias) * rate)
        else:
            g = jnp.maximum(gates.log_decay(options, raw, A_log, bias), gates.LEAST)
        tiles.st_sums(x.sums, i, g, x.rows)


def _decay_to_end(x, piece):
    """The right operand of scores between blocks."""
    sums, end = (tiles.ld_sums(x.sums, piece, put=put) for put in (0, tiles.BLOCK - 1))
    tiles.st_tile(tiles.decayed(tiles.ld_tile(x.k_smem, piece, x.k_factor), sums, end), x.right, piece)


def _scores(x, pieces):
    """`tril(P(q, k))` and, with the delta rule, `tril(P(k, k), −1)`, float32 `[64, 64]`."""
    both = 2 if x.plan.options.rule.delta else 1
    shift, zeros = tiles.shift(x.plan.options), (ptx.zeros(tiles.BLOCK),) * both
    start = (zeros,) * 3, ((zeros,) * len(tiles.LEVELS), zeros[0]) if shift is None else zeros

    def one_piece(piece, carry):
        blocks, own = carry
        narrow = lambda *arrays: tuple(a.astype(x.plan.dtype) for a in arrays)  # noqa: E731
        q, k = (tiles.ld_tile(*a) for a in ((x.q_smem, piece, x.q_factor), (x.k_smem, piece, x.k_factor)))
        sums = tiles.ld_sums(x.sums, piece)
        if shift is None:
            own = _own_by_levels(x, piece, q, k, sums, own, narrow)
            left = [tiles.decayed(a, sums) for a in (q, k)[:both]]
        else:
            sums = sums + jnp.float32(shift)
            left = [tiles.decayed(a, sums) for a in (q, k)[:both]]
            own = tiles.mma_own(own, narrow(*left), *narrow(tiles.decayed(k, -sums)))
            left = [a * jnp.float32(2**-shift) for a in left]
        across = [None] * 3
        for block in (2, 1, 0):
            across[block] = tiles.mma_with_block(blocks[block], narrow(*left), x.right, piece, block)
            if block:
                decay = tiles.ld_decay_below(x.sums, piece, block)
                left = [a * decay for a in left]
        return tuple(across), own

    blocks, own = lax.fori_loop(0, pieces, one_piece, start)
    if shift is None:
        levels, diagonal = own
        own = [tiles.of_levels([a[i] for a in levels], None if i else diagonal) for i in range(both)]
    else:
        rows, columns = (ptx.numbers(i32(0), axis, tiles.BLOCK) for axis in range(2))
        own = [jnp.where((rows & (tiles.BLOCK - 1)) >= columns + i, a, 0.0) for i, a in enumerate(own)]
    found = [tiles.assembled([b[i] for b in blocks], own[i]) for i in range(both)]
    return found[0], found[1] if both == 2 else None


def _own_by_levels(x, piece, q, k, sums, carry, narrow):
    """Adds a piece to the products within blocks of 16: those of each level, and the diagonal."""
    levels, diagonal = carry
    found = []
    for bit, level in zip(tiles.LEVELS, levels, strict=True):
        anchor = tiles.ld_sums(x.sums, piece, ~(2 * bit - 1), bit - 1)
        rows = narrow(tiles.decayed(q, sums, anchor), tiles.decayed(k, sums, anchor))
        found.append(tiles.mma_own(level, rows[: len(level)], rows[1]))
    (diagonal,) = tiles.mma_own((diagonal,), narrow(q), *narrow(k))
    return tuple(found), diagonal


def _decay_from_ends(x, piece):
    """What the scan multiplies with states, in the place of what it was made of."""
    q, k = (tiles.ld_tile(*a) for a in ((x.q_smem, piece, x.q_factor), (x.k_smem, piece, x.k_factor)))
    sums, end = (tiles.ld_sums(x.sums, piece, put=put) for put in (0, tiles.BLOCK - 1))
    to_end = tiles.apart(sums, end) + tiles.ld_stored_sums(x.others, piece, after=True)
    tiles.st_tile(tiles.decayed(k, to_end), x.right, piece)
    from_start = sums + tiles.ld_stored_sums(x.others, piece, after=False)
    tiles.st_tile(tiles.decayed(q, from_start), x.q_smem, piece)
    if x.plan.options.rule.delta:
        tiles.st_tile(-tiles.decayed(k, from_start), x.k_smem, piece)


def launch(plan: Plan, inputs, *, multiprocessors: int, interpret=False, scores=None, inverse=None) -> Prepared:
    """Runs the kernel on `Inputs`, a thread block a chunk and head, however many multiprocessors there are.

    Args:
        scores, inverse: A and T, if they are known, as a backward does: they are not computed then.
    """
    del multiprocessors
    given = {name: x for name in _INPUTS if (x := getattr(inputs, name)) is not None}
    shapes, slabs = prepared_shapes(plan), ptx.slabs(plan.H)
    smem = lambda n: plgpu.SMEM((n, CHUNK, ptx.SLAB), plan.dtype, transforms=ptx.TRANSFORMS)  # noqa: E731
    scratch = dict(q_smem=smem(slabs), k_smem=smem(slabs), right=smem(slabs))
    if scores is None:
        scratch |= dict(squares=smem(2))
    else:
        shapes = dataclasses.replace(shapes, scores=None, inverse=None)
    names = [name for name, x in vars(shapes).items() if x is not None]

    def body(*refs, **allocations):
        out = dict.fromkeys(vars(shapes)) | dict(zip(names, refs[len(given) :], strict=True))
        _kernel(plan, dict(zip(given, refs, strict=False)), Prepared(**out), **allocations)

    found = kernel(
        body,
        name="jattn_linear_channel_prepare" if scores is None else "jattn_linear_channel_backward_prepare",
        out_type=tuple(getattr(shapes, name) for name in names),
        scratch=scratch
        | dict(
            sums=plgpu.SMEM((CHUNK, tiles.pitch(plan.H)), jnp.float32),
            others=plgpu.SMEM((8, plan.H), jnp.float32),
            vector=plgpu.SMEM(shapes.vector.shape[3:], jnp.float32),
            ready=plgpu.Barrier(num_arrivals=2 * slabs),
        ),
        grid={"block": items(plan)},
        warpgroups=1,
        interpret=interpret,
        approximate=False,
    )(*given.values())
    known = dict(scores=scores, inverse=inverse) | dict(zip(names, found, strict=True))
    return Prepared(**dict.fromkeys(vars(shapes)) | known)

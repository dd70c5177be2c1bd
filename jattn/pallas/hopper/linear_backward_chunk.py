"""The last of three kernels of the gated delta rule's backward on compute capability 9.0: what chunks do not wait for
one another with. `linear_backward_scan` left D, the gradient of the state that leaves a chunk, and dz; S is the state
that entered it, and M and the vectors are those of `linear_prepare`.

    r = k S;   z = β ∘ v − key ∘ r;   u = M z
    X = tril(do uᵀ) ∘ Γ, scale nq beside its rows and nk beside its columns;   Y = −tril(dz uᵀ, −1) ∘ Γ, β nk and nk
    dq = query ∘ (do Sᵀ) + X k;   dk = update ∘ (u Dᵀ) − key ∘ (dz Sᵀ) + Xᵀ q + Y k + Yᵀ k
    dβ = dz · u / β; where β is 0, dz · (v − nk exp(G) r) + what Y is before β · k kᵀ

and with qk_l2norm dq −= nq² (q · dq) q, and dk likewise. The log decay of token s is in all that crosses it:

    dg_s = Σ_{i≥s} (q · dq − key dz · r + k · Y k − k · (Xᵀ q + Yᵀ k))_i + Σ_{i<s} (update k · u Dᵀ)_i + last ⟨S, D⟩

where pairs on one side of s cancel, as sums of the very same rounded X and Y. Without the delta rule u = v, and what Y
and dz are in is left out; the warpgroups then have half of X each.

Pipeline: a thread block fills a multiprocessor with two warpgroups, which have half of the columns each: of D in z and
u, of H in dq and dk. One of them forms X, the other Y. They take chunk after chunk:

    z, u of v's columns | meet | do uᵀ or dz uᵀ, do Sᵀ, u Dᵀ, dz Sᵀ | meet, copies begin | X or Y | meet | with q and k
    | sums of rows meet | out

Floor: 2950 bytes a token and head, at the 4.3 TB/s of a copy 0.18 ms for T = 8192 and 32 heads, 0.36 ms for twice as
many. Prediction: 0.28 and 0.56 ms.

Source: Yang, Kautz, Hatamizadeh, "Gated Delta Networks" (2024).
"""

import dataclasses
from types import SimpleNamespace

import jax
import jax.numpy as jnp
from jax import lax

from jattn._linear import CHUNK
from jattn.pallas._compat import interpreting, kernel, pl, plgpu
from jattn.pallas.hopper import linear_tiles, memory, ptx
from jattn.pallas.hopper.decode_rows import along_columns
from jattn.pallas.hopper.linear_plan import LEAST_BETA, Plan, copy_rows, items, key_head, place_of
from jattn.pallas.hopper.linear_prepare import BACKWARD_VECTORS as VECTORS
from jattn.pallas.hopper.lists import i32

_WARPGROUPS = 2
_BARRIERS = 5  # first id of the named barriers
_U, _DONE, _SQUARES, _SUMS, _OUT = range(5)  # meetings, each of which takes two
_PARTS = ("query", "states", "key", "value", "entered", "across", "erased", "rows", "written")  # sums of rows
_PIECE = 16  # columns that are taken from shared memory at a time: registers are few


def _kernel(
    plan: Plan,
    refs,  # inputs and outputs by name (HBM)
    #   query, key [B, T, K, H]; value, dout [B, T, N, D]; states (S), dstates (D) [B, n, N, H, D]
    #   vectors float32 [B, n, N, 8, 64]; with the delta rule inverse (M) [B, n, N, 64, 64], dz [B, T, N, D]
    #   dquery, dkey [B, T, N, H]; dg, dbeta float32 [B, T, N], where there is decay and the delta rule
    *,
    # shared memory, matrices in slabs of 64 columns
    qk_smem,  # [2, 2, slabs of H, 64, 64]: of each slot q and k; dq and dk on their way out
    v_smem,  # [slabs of a round, 64, 64]; then z, then u
    dd_smem,  # [2 or 1, slabs of a round, 64, 64]: do, dz
    s_smem,  # [slabs of a round, H, 64]
    ds_smem,  # [slabs of a round, H, 64]: D
    squares,  # [2 or 1, 1, 64, 64]: X, Y
    vectors_smem,  # float32 [2, 8, 64]
    parts,  # float32 [2, sums of rows, 64], of each warpgroup
    numbers,  # float32 [2, 64]
    inverse_smem=None,  # [2, 1, 64, 64]
    # barriers
    ready,  # [2] TMA: q, k, M, vectors
    early,  # TMA: v, dz, S
    late,  # TMA: do, D
    meetings,  # named
):
    x = SimpleNamespace(
        plan=plan, delta=plan.options.rule.delta, decay=plan.options.rule.decay is not None, **refs, qk_smem=qk_smem,
        v_smem=v_smem, dd_smem=dd_smem, s_smem=s_smem, ds_smem=ds_smem, inverse_smem=inverse_smem, squares=squares,
        vectors_smem=vectors_smem, parts=parts, numbers=numbers, ready=ready, early=early, late=late,
        meetings=meetings, warpgroup=lax.axis_index("warpgroup"),
    )  # fmt: skip
    stride, first = lax.axis_size("block"), lax.axis_index("block")
    rounds = lax.div(items(plan) - first + (stride - 1), i32(stride))
    _copy_tokens(x, first, i32(0))
    _copy_columns(x, first, 0)
    lax.fori_loop(0, rounds, lambda r, _: _one_chunk(x, first + r * stride, lax.rem(r, i32(2)), stride), None)
    plgpu.wait_smem_to_gmem(0)


def _name_matrices(x):
    """Operands of products; a warpgroup has the columns `own` of a round's, of the slab `slab` from `column` on, and
    `own_h` of H."""
    p, w = x.plan, x.warpgroup
    x.width, x.half = _slabs(p) * ptx.SLAB // _WARPGROUPS, p.H // _WARPGROUPS
    x.slab, x.column = (w, i32(0)) if x.width == ptx.SLAB else (0, w * x.width)
    x.h_slab, x.h_column = (w, i32(0)) if x.half == ptx.SLAB else (0, w * x.half)
    qk = lambda **how: ptx.matrix(lambda i: x.qk_smem.at[i // 2, i % 2], CHUNK, p.H, **how)  # noqa: E731
    x.qk, own_h = qk(), qk(along_rows=True).columns_from(w * x.half, columns=x.half)
    x.qk_own = own_h
    columns = _slabs(p) * ptx.SLAB
    one = lambda smem, rows, **how: ptx.matrix(lambda _: smem, rows, columns, **how)  # noqa: E731
    x.S_own = one(x.s_smem, p.H, along_rows=True).columns_from(w * x.width, columns=x.width)
    x.S, x.D = (one(smem, p.H).part(w, rows=x.half) for smem in (x.s_smem, x.ds_smem))
    x.u = one(x.v_smem, CHUNK)
    x.z_own = _part_of_slab(one(x.v_smem, CHUNK, along_rows=True), x.v_smem, x.slab, x.column, x.width)
    x.dd = ptx.matrix(lambda i: x.dd_smem.at[i], CHUNK, columns)
    x.M = ptx.matrix(lambda i: x.inverse_smem.at[i], CHUNK, CHUNK) if x.delta else None
    x.XY = ptx.matrix(lambda i: x.squares.at[i], CHUNK, CHUNK)


def _part_of_slab(matrix, smem, slab, column, width):
    """Of a matrix along rows, whose other columns the other warpgroup writes meanwhile: the emulation has to know."""
    part = matrix.slab(slab).columns_from(column, columns=width)
    if not interpreting():
        return part
    return dataclasses.replace(part, ref_of=lambda _: smem.at[pl.ds(slab, 1), :, pl.ds(column, width)], first_column=0)


def _slabs(plan) -> int:
    """Of D, in a round: one for each warpgroup, or a half."""
    return 2 if plan.D == 2 * ptx.SLAB else 1


def _rounds(plan) -> int:
    return plan.D // (_slabs(plan) * ptx.SLAB)


def _meet(x, number):
    """What either warpgroup has written is there for both, and their products are done."""
    ptx.fence_async_shared()
    x.meetings.bar_arrive(2 * number + (1 - x.warpgroup))
    x.meetings.bar_sync(2 * number + x.warpgroup)


# --- copies -----------------------------------------------------------------------------------------------------------


def _copy_tokens(x, item, slot):
    """Queries, M and vectors of an item, by one warpgroup, and keys by the other, which wait for the dq or dk that they
    have written from there."""
    (batch, chunk, head), ready = place_of(x.plan, item), x.ready.at[slot]
    rows = lambda array, i: copy_rows(  # noqa: E731
        x.plan, array, batch, chunk, key_head(x.plan, head), x.qk_smem.at[slot, i], ready
    )

    @pl.when(x.warpgroup == 0)
    def _():
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        rows(x.query, 0)
        if x.delta:
            plgpu.copy_gmem_to_smem(x.inverse.at[batch, chunk, head], x.inverse_smem.at[slot, 0], ready)
        plgpu.copy_gmem_to_smem(x.vectors.at[batch, chunk, head], x.vectors_smem.at[slot], ready)

    @pl.when(x.warpgroup == 1)
    def _():
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        rows(x.key, 1)


def _copy_columns(x, item, number):
    """What a round takes."""
    (batch, chunk, head), count = place_of(x.plan, item), _slabs(x.plan)
    first = number * count * ptx.SLAB

    def rows(array, smem, barrier):
        copy_rows(x.plan, array, batch, chunk, head, smem, barrier, first)

    def state(array, smem, barrier):
        for i in range(count):
            part = array.at[batch, chunk, head, :, pl.ds(first + i * ptx.SLAB, ptx.SLAB)]
            plgpu.copy_gmem_to_smem(part, smem.at[i], barrier)

    @pl.when(x.warpgroup == 0)
    def _():
        state(x.states, x.s_smem, x.early)
        rows(x.value, x.v_smem, x.early)
        if x.delta:
            rows(x.dz, x.dd_smem.at[1], x.early)
        rows(x.dout, x.dd_smem.at[0], x.late)
        state(x.dstates, x.ds_smem, x.late)


# --- a chunk ----------------------------------------------------------------------------------------------------------


def _one_chunk(x, item, slot, stride):
    # Where the index is taken anew, no addresses that follow from it stay in registers through the loop.
    again = dict(warpgroup=lax.axis_index("warpgroup"), slot=slot, place=place_of(x.plan, item))
    x = SimpleNamespace(**vars(x) | again)
    _name_matrices(x)
    x.vector = lambda name: linear_tiles.ld_shared_rows(x.vectors_smem.at[slot, VECTORS.index(name)])
    following, count = item + stride, _rounds(x.plan)
    plgpu.barrier_wait(x.ready.at[slot])
    zero = plgpu.layout_cast(jnp.zeros(CHUNK, jnp.float32), ptx.ROW)
    sums, sides = SimpleNamespace(value=zero, entered=zero, across=zero), (None,) * 3
    for number in range(count):
        _write_u(x, sums, number)
        if number == 0:
            pl.when(following < items(x.plan))(lambda: _copy_tokens(x, following, 1 - slot))
        sides = _multiply(x, sides)
        if number + 1 < count:
            _copy_columns(x, item, number + 1)
        else:
            pl.when(following < items(x.plan))(lambda: _copy_columns(x, following, 0))
    square, dq, dk = sides
    _keep(x, states=_row_sums(x, 1, dk), across=sums.across)
    if x.delta:
        _keep(x, value=sums.value, entered=sums.entered)
    _write_square(x, square)
    _write_gradients(x, dq, dk)


def _write_u(x, sums, number):
    """u of the warpgroup's columns of a round, in v's place."""
    plgpu.barrier_wait(x.early)
    if x.delta:
        _write_z(x, sums)
        plgpu.barrier_wait(x.late)
        u = linear_tiles.wgmma("nn", x.M.at(x.slot), x.z_own, x.plan.dtype)
    else:
        plgpu.barrier_wait(x.late)
    if x.decay:
        sums.across = sums.across + _products_of_states(x)
    if x.delta:
        (u,) = ptx.wgmma_wait_group(0, u)
        plgpu.commit_smem()  # all warps are done with z
        memory.stmatrix(u.astype(x.plan.dtype), x.v_smem.at[pl.ds(x.slab, 1)], x.column)
    _meet(x, _U)
    if x.delta:
        written = ptx.zeros(_PIECE)
        for first in range(0, x.width, _PIECE):
            u, dz = (_tile(smem.at[pl.ds(x.slab, 1)], x.column + first) for smem in (x.v_smem, x.dd_smem.at[1]))
            written = written + dz * u
        written = jnp.sum(written, axis=1)
        # Of rounds before, in shared memory: a round more has no register for it, and all warps have met since.
        _keep(x, written=written if number == 0 else written + _part(x, x.warpgroup, "written"))


def _write_z(x, sums):
    p = x.plan
    (r,) = ptx.wgmma_wait_group(0, linear_tiles.wgmma("nn", x.qk.at(2 * x.slot + 1), x.S_own, p.dtype))
    beta, key = (along_columns(x.vector(name), _PIECE) for name in ("beta", "key"))
    with_v = with_r = ptx.zeros(_PIECE)
    for first in range(0, x.width, _PIECE):
        v, dz = (_tile(smem.at[pl.ds(x.slab, 1)], x.column + first) for smem in (x.v_smem, x.dd_smem.at[1]))
        own = r[:, first : first + _PIECE]
        with_v, with_r = with_v + dz * v, with_r + dz * own
        memory.stmatrix((beta * v - key * own).astype(p.dtype), x.v_smem.at[pl.ds(x.slab, 1)], x.column + first)
    sums.value = sums.value + jnp.sum(with_v, axis=1)
    sums.entered = sums.entered + jnp.sum(with_r, axis=1)
    plgpu.commit_smem()


def _multiply(x, sides):
    """do uᵀ of one warpgroup or dz uᵀ of the other, and its columns of do Sᵀ and of what of dk meets states, onto those
    of the rounds before."""
    dtype, (square, dq, dk) = x.plan.dtype, sides
    if x.delta:
        square = linear_tiles.wgmma("nt", x.dd.at(x.warpgroup), x.u, dtype, square)
    else:
        square = linear_tiles.wgmma("nt", x.dd, x.u.part(x.warpgroup, rows=CHUNK // 2), dtype, square)
    dq = linear_tiles.wgmma("nt", x.dd, x.S, dtype, dq)
    lefts = [(x.v_smem, "update", 1, x.D)] + ([(x.dd_smem.at[1], "key", -1, x.S)] if x.delta else [])
    for smem, name, sign, right in lefts:
        factor = along_columns(x.vector(name) * sign, ptx.SLAB)
        for slab in range(_slabs(x.plan)):
            rows = memory.ldmatrix(smem.at[pl.ds(slab, 1)], ptx.SLAB).astype(jnp.float32)
            dk = ptx.wgmma_rs_nt((rows * factor).astype(dtype), right.slab(slab), dk)
    sides = ptx.wgmma_wait_group(0, square, dq, dk)
    _meet(x, _DONE)
    return sides


def _tile(ref, column, columns=_PIECE):
    """Columns of 16-bit `ref [1, 64, 64]`, float32."""
    return linear_tiles.ldmatrix(ref, column, columns).astype(jnp.float32)


def _products_of_states(x):
    """S ∘ D of the warpgroup's columns, summed up to 64 numbers."""
    total = ptx.zeros(_PIECE)
    for row in range(0, x.plan.H, CHUNK):
        for column in range(0, x.width, _PIECE):
            S, D = (
                _tile(smem.at[pl.ds(x.slab, 1), pl.ds(row, CHUNK)], x.column + column) for smem in (x.s_smem, x.ds_smem)
            )
            total = total + S * D
    return jnp.sum(total, axis=1)


def _write_square(x, square):
    """X or Y; without the delta rule half of X's columns."""
    p, w = x.plan, x.warpgroup
    factor = jnp.float32(p.options.scale) * x.vector("query_norm")
    if x.delta:
        origin, above, is_key = 0, w, w.astype(jnp.float32)
        products = linear_tiles.wgmma("nt", x.qk.at(2 * x.slot + w), x.qk.at(2 * x.slot + 1), p.dtype)
        factor = factor * (1 - is_key) - x.vector("beta") * x.vector("key_norm") * is_key
        (products,) = ptx.wgmma_wait_group(0, products)
    else:
        origin, above = w * (CHUNK // 2), i32(0)
    factor, sums_of_rows = (along_columns(a, _PIECE) for a in (factor, x.vector("sums")))
    erased = rows = ptx.zeros(_PIECE)
    for first in range(0, square.shape[1], _PIECE):
        below = ptx.numbers(-above, 0, _PIECE) >= ptx.numbers(i32(first) + origin, 1, _PIECE)
        part = square[:, first : first + _PIECE]
        if x.decay:
            part = part * jnp.exp2(jnp.where(below, sums_of_rows - _along(x, "sums", origin + first), -jnp.inf))
        else:
            part = jnp.where(below, part, 0.0)
        part = part * _along(x, "key_norm", origin + first)
        narrow = (part * factor).astype(p.dtype)
        memory.stmatrix(narrow, x.squares.at[w if x.delta else 0], origin + first)
        if x.delta:
            product = products[:, first : first + _PIECE]
            erased, rows = erased + part * product, rows + narrow.astype(jnp.float32) * product
    if x.delta:
        _keep(x, erased=jnp.sum(erased, axis=1), rows=jnp.sum(rows, axis=1))
    _meet(x, _SQUARES)


def _along(x, name, first):
    """`_PIECE` entries of a vector from `first` on, along rows."""
    return linear_tiles.ld_shared_along_rows(x.vectors_smem.at[x.slot, VECTORS.index(name), pl.ds(first, _PIECE)])


def _write_gradients(x, dq, dk):
    p, w, dtype = x.plan, x.warpgroup, x.plan.dtype
    q_own, k_own = (x.qk_own.at(2 * x.slot + i) for i in range(2))
    columns = linear_tiles.wgmma("tn", x.XY, q_own, dtype)
    if x.delta:
        columns = linear_tiles.wgmma("tn", x.XY.at(1), k_own, dtype, columns)
        dk = linear_tiles.wgmma("nn", x.XY.at(1), k_own, dtype, dk)
    dq = linear_tiles.wgmma("nn", x.XY, k_own, dtype, dq * along_columns(x.vector("query"), x.half))
    columns, dq, dk = ptx.wgmma_wait_group(0, columns, dq, dk)
    _keep(x, key=_row_sums(x, 1, columns), query=_row_sums(x, 0, dq))
    _meet(x, _SUMS)
    total = lambda name: _part(x, 0, name) + _part(x, 1, name)  # noqa: E731
    along_k = total("states") + total("key")
    _write_out(x, dq, dk + columns, (total("query"), along_k + _part(x, 1, "rows") if x.delta else along_k))
    (batch, chunk, head), rows = x.place, p.T - x.place[1] * CHUNK
    where = batch, chunk * CHUNK, head
    if x.decay:

        @pl.when(w == 0)
        def _():
            linear_tiles.st_global_tokens(x.dg, *where, _decay_gradient(x, total), rows)

    if x.delta:

        @pl.when(w == 1)
        def _():
            # dz · u / β, or where there is no β, dz · (v − what the key retrieves), of which much may cancel
            beta, erased = x.vector("beta"), total("entered") * jnp.exp2(x.vector("sums")) + _part(x, 1, "erased")
            idle = jnp.abs(beta) < LEAST_BETA
            written, direct = total("written"), total("value") - x.vector("key_norm") * erased
            dbeta = jnp.where(idle, direct, written / jnp.where(idle, jnp.float32(1), beta))
            linear_tiles.st_global_tokens(x.dbeta, *where, dbeta, rows)


def _own_tile(x, i, first, columns=_PIECE):
    """Of q (0) or k (1), some of the warpgroup's columns."""
    return _tile(x.qk_smem.at[x.slot, i, pl.ds(x.h_slab, 1)], x.h_column + first, columns)


def _row_sums(x, i, value):
    """Rows of q (0) or k (1) times those of `value`, over the warpgroup's columns."""
    total = ptx.zeros(_PIECE)
    for first in range(0, x.half, _PIECE):
        total = total + _own_tile(x, i, first) * value[:, first : first + _PIECE]
    return jnp.sum(total, axis=1)


def _keep(x, **sums):
    """Sums of rows over the warpgroup's columns, for both."""
    for name, value in sums.items():
        x.parts[x.warpgroup, _PARTS.index(name)] = value


def _part(x, warpgroup, name):
    return linear_tiles.ld_shared_rows(x.parts.at[warpgroup, _PARTS.index(name)])


def _decay_gradient(x, total):
    at_and_after, before = total("query") - total("key"), total("states")
    if x.delta:
        erased = x.vector("key") * total("entered")
        at_and_after, before = at_and_after - erased + _part(x, 1, "rows"), before + erased
    before = before - at_and_after
    x.numbers[0] = before
    x.numbers[1] = at_and_after + x.vector("last") * total("across")
    plgpu.commit_smem()
    upto = linear_tiles.prefix_sums(x.numbers.at[0])[0]
    return linear_tiles.prefix_sums(x.numbers.at[1])[2] + (upto - before)


def _write_out(x, dq, dk, along):
    """dq and dk, through the norms; `along` is how much of each row of them is along q and k."""
    p, (batch, chunk, head) = x.plan, x.place
    columns = _PIECE if p.N == p.K else memory.FLOAT_SLAB
    for i, (value, array, norm) in enumerate(((dq, x.dquery, "query_norm"), (dk, x.dkey, "key_norm"))):
        if p.options.qk_l2norm:
            less = along_columns(x.vector(norm) * x.vector(norm) * along[i], columns)
        for first in range(0, x.half, columns):
            part = value[:, first : first + columns]
            if p.options.qk_l2norm:
                part = part - less * _own_tile(x, i, first, columns)
            if p.N == p.K:
                smem = x.qk_smem.at[x.slot, i, pl.ds(x.h_slab, 1)]
                memory.stmatrix(part.astype(p.dtype), smem, x.h_column + first)
            else:
                start, rows = (batch, chunk * CHUNK, head), p.T - chunk * CHUNK
                memory.st_global(array, start, part, rows, x.warpgroup * x.half + first)
    if p.N != p.K:
        return
    plgpu.commit_smem()
    _meet(x, _OUT)
    for i, array in enumerate((x.dquery, x.dkey)):
        rows = array.at[batch, pl.ds(chunk * CHUNK, CHUNK), head]

        @pl.when(x.warpgroup == i)
        def _(i=i, rows=rows):
            for slab in range(ptx.slabs(p.H)):
                part = rows.at[:, pl.ds(slab * ptx.SLAB, ptx.SLAB)]
                plgpu.copy_smem_to_gmem(x.qk_smem.at[x.slot, i, slab], part)  # nothing past the last token


# --- host -------------------------------------------------------------------------------------------------------------


def launch(plan: Plan, inputs, prepared, states, walked, dout, *, multiprocessors: int, interpret=False) -> dict:
    """Runs the kernel; results by name: dquery and dkey [B, T, N, H], in bfloat16 where N is K and else in float32, and
    where there is decay and the delta rule dg and dbeta, float32 [B, T, N].

    Args:
        walked: what `linear_backward_scan` returned.
    """
    delta, decay = plan.options.rule.delta, plan.options.rule.decay is not None
    given = dict(query=inputs.query, key=inputs.key, value=inputs.value, dout=dout, states=states)
    given |= dict(dstates=walked["dstates"], vectors=prepared.vectors)
    given |= dict(inverse=prepared.inverse, dz=walked["dz"]) if delta else {}
    rows = (plan.B, plan.T, plan.N)
    wide = jax.ShapeDtypeStruct((*rows, plan.H), plan.dtype if plan.N == plan.K else jnp.float32)
    number = jax.ShapeDtypeStruct(rows, jnp.float32)
    results = dict(dquery=wide, dkey=wide) | (dict(dg=number) if decay else {}) | (dict(dbeta=number) if delta else {})

    def body(*refs, **allocations):
        _kernel(plan, dict(zip((*given, *results), refs, strict=True)), **allocations)

    found = kernel(
        body,
        name="jattn_linear_backward_chunk",
        out_type=tuple(results.values()),
        scratch=_scratch(plan),
        grid={"block": min(multiprocessors, items(plan))},
        warpgroups=_WARPGROUPS,
        interpret=interpret,
        approximate=True,
    )(*given.values())
    return dict(zip(results, found, strict=True))


def _scratch(plan) -> dict:
    slabs, count, delta = ptx.slabs(plan.H), _slabs(plan), plan.options.rule.delta

    def smem(*leading, rows=CHUNK):
        return plgpu.SMEM((*leading, rows, ptx.SLAB), plan.dtype, transforms=ptx.TRANSFORMS)

    return dict(
        qk_smem=smem(2, 2, slabs), v_smem=smem(count), dd_smem=smem(1 + delta, count),
        s_smem=smem(count, rows=plan.H), ds_smem=smem(count, rows=plan.H), squares=smem(1 + delta, 1),
        vectors_smem=plgpu.SMEM((2, len(VECTORS), CHUNK), jnp.float32),
        parts=plgpu.SMEM((_WARPGROUPS, len(_PARTS), CHUNK), jnp.float32), numbers=plgpu.SMEM((2, CHUNK), jnp.float32),
        **(dict(inverse_smem=smem(2, 1)) if delta else {}),
        ready=plgpu.Barrier(num_arrivals=2 * slabs + 1 + delta, num_barriers=2),
        early=plgpu.Barrier(num_arrivals=(2 + delta) * count), late=plgpu.Barrier(num_arrivals=2 * count),
        meetings=ptx.NamedBarriers(_BARRIERS, 2 * 5, 1),
    )  # fmt: skip

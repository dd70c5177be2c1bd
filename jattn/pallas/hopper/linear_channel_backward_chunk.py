"""The third kernel of the backward of KDA and GLA on compute capability 9.0: what chunks of 64 tokens need that do not
know of one another, but for the gradients through scores, which `linear_channel_backward_scores` adds.

A thread block has one chunk of one value head: its entering state S, the gradient D of its leaving one, dz of the walk
(`linear_channel_backward_scan`), erase = −k exp(G) and T of `linear_channel_prepare`. Then

    rest = v + erase S;   z = β rest;   u = T z (GLA: v)          as in the forward
    dA = tril(do uᵀ)      β dL = −tril(β dz uᵀ, −1)               dv = β dz
    do Sᵀ    −β dz Sᵀ    u Dᵀ                                     of q exp(G), k exp(G), k exp(G_C − G)
    rowsum(S ∘ D)         rowsum(dz ∘ u) / β                        for G_C; the gradient of β

As u = β (rest − P(k, k) u), the gradient of β is dz · u / β. From rest and P(k, k) u it would be a difference of
rounded sums, which where keys are alike is four times worse. But where β is 0 there is no other way: the first of them
is left in its place, and of β dL the second one, as it has 1e-18 for a smaller β. Nothing here needs a gate. The three
matrices [64, H] go as they lie in registers, in tiles of 32 channels.

    erase, S, v, T → rest | do, dz → do Sᵀ, dz Sᵀ | D → where S was | z, u | dA, dL | S → where do and dz were | u Dᵀ

Floor: v, do, dz, erase, S, D, T in, three matrices [64, H], dA, dL and dv out: 3.4 kB a token and head, at the 4.3 TB/s
of a copy 0.21 ms for T = 8192 and 32 heads, 0.42 ms for B = 4, T = 4096. Prediction: 0.28 and 0.55 ms.
Measured on an H200: 0.255 and 0.507 ms, of one thread block on a multiprocessor; there is room for two now.

Source: Kimi Team, "Kimi Linear" (2025); Yang et al., "Gated Linear Attention Transformers" (2024).
"""

import dataclasses
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jattn._linear import CHUNK
from jattn.pallas._compat import kernel, pl, plgpu
from jattn.pallas.hopper import linear_channel_backward_tiles as tiles
from jattn.pallas.hopper import memory, ptx
from jattn.pallas.hopper.decode_rows import along_columns
from jattn.pallas.hopper.linear_channel_plan import LEAST_BETA
from jattn.pallas.hopper.linear_channel_prepare import activated_beta
from jattn.pallas.hopper.linear_channel_tiles import PIECE
from jattn.pallas.hopper.linear_plan import Plan, copy_rows, items, place_of
from jattn.pallas.hopper.lists import i32


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Parts:
    """What this kernel leaves to `linear_channel_backward_scores`."""

    across: (
        Any  # scale do Sᵀ, u Dᵀ and, with the delta rule, −β dz Sᵀ: tiles [B · n · N · (3 or 2) · H / 32, 2, 128, 8]
    )
    squares: Any  # dA and, with the delta rule, β dL: [B, n, N, 2 or 1, 64, 64]
    vector: Any  # float32 [B, n, N, H + 128]: rowsum(S ∘ D), then twice the gradient of β, to be added; or nothing

    @classmethod
    def shapes(cls, plan) -> "Parts":
        each, delta = (plan.B, plan.chunks, plan.N), plan.options.rule.delta
        tiles_ = plan.B * plan.chunks * plan.N * (2 + delta) * (plan.H // PIECE)
        return cls(
            jax.ShapeDtypeStruct((tiles_, *tiles.TILE), plan.dtype),
            jax.ShapeDtypeStruct((*each, 1 + delta, CHUNK, CHUNK), plan.dtype),
            jax.ShapeDtypeStruct((*each, plan.H + 2 * CHUNK * delta), "float32"),
        )


def first_tile(plan, batch, chunk, head):
    """Of a chunk's tiles in `Parts.across`."""
    each = (2 + plan.options.rule.delta) * (plan.H // PIECE)
    return ((batch * plan.chunks + chunk) * plan.N + head) * each


def _kernel(
    plan: Plan,
    inputs,  # value, dout [B, T, N, D]; states, dstates [B, n, N, H, D]; beta; dz [B, T, N, D]; erase, inverse
    parts: Parts,  # out (HBM)
    dv=None,  # [B, T, N, D], out; with the delta rule
    *,
    # shared memory, matrices in slabs of 64 columns
    v_smem,  # [slabs of D, 64, 64]; z, u
    do_smem,  # [slabs of D, 64, 64]; rows of S; dv
    S_smem,  # [slabs of D, H, 64]; D
    square,  # [1, 64, 64]: T; dA on its way out
    vector,  # float32 [H + 128] or [H]
    dz_smem=None,  # [slabs of D, 64, 64]; rows of S
    erase_smem=None,  # [slabs of H, 64, 64]; dL on its way out
    D_smem=None,  # [slabs of D, H, 64], without the delta rule
    # barriers (TMA)
    first,  # v, S, erase, T
    second,  # do, dz
    third,  # D
    fourth=None,  # S again
):
    batch, chunk, head = place_of(plan, lax.axis_index("block"))
    x = SimpleNamespace(
        plan=plan, **inputs, parts=parts, dv=dv, v_smem=v_smem, do_smem=do_smem, S_smem=S_smem, square=square,
        vector=vector, dz_smem=dz_smem, erase_smem=erase_smem, D_smem=D_smem, first=first, second=second, third=third,
        fourth=fourth, head=head, chunk=chunk, batch=batch, place=(batch, chunk, head), rows=plan.T - chunk * CHUNK,
    )  # fmt: skip
    x.tile = first_tile(plan, *x.place)
    whole = lambda smem, n, rows=CHUNK, **how: ptx.matrix(lambda _: smem, rows, n, **how)  # noqa: E731
    x.do, x.S, x.u = whole(do_smem, plan.D), whole(S_smem, plan.D, plan.H), whole(v_smem, plan.D)
    copy_rows(plan, x.value, batch, chunk, head, v_smem, first)
    _copy_state(x, x.states, S_smem, first)
    if plan.options.rule.delta:
        _delta(x, whole)
    else:
        _no_delta(x)
    plgpu.wait_smem_to_gmem(0)


def _copy_state(x, states, smem, barrier, rows=None):
    """`rows` of a state `[H, D]`, all by default, to `smem [slabs of D, rows, 64]`."""
    for i in range(ptx.slabs(x.plan.D)):
        columns = pl.ds(i * ptx.SLAB, ptx.SLAB)
        part = states.at[x.place].at[:, columns] if rows is None else states.at[x.place].at[rows, columns]
        plgpu.copy_gmem_to_smem(part, smem.at[i], barrier)


def _no_delta(x):
    """u is v: nothing waits."""
    p, pieces = x.plan, x.plan.H // PIECE
    copy_rows(p, x.dout, x.batch, x.chunk, x.head, x.do_smem, x.second)
    _copy_state(x, x.dstates, x.D_smem, x.third)
    D = ptx.matrix(lambda _: x.D_smem, p.H, p.D)
    plgpu.barrier_wait(x.first)
    plgpu.barrier_wait(x.second)
    dA, dq = ptx.wgmma_ss(x.do, x.u, p.dtype), ptx.wgmma_ss(x.do, x.S, p.dtype)
    dA, dq = ptx.wgmma_wait_group(0, dA, dq)
    memory.stmatrix(_lower(dA * jnp.float32(p.options.scale), 0).astype(p.dtype), x.square)
    tiles.st_global_tiles(x.parts.across, x.tile, (dq * jnp.float32(p.options.scale)).astype(p.dtype))
    plgpu.barrier_wait(x.third)
    (dk,) = ptx.wgmma_wait_group(0, ptx.wgmma_ss(x.u, D, p.dtype))
    tiles.st_global_tiles(x.parts.across, x.tile + pieces, dk.astype(p.dtype))
    for i in range(0, p.H, CHUNK):
        pairs = ((_square(x.S_smem, slab, i), _square(x.D_smem, slab, i)) for slab in _slabs(x))
        x.vector[pl.ds(i, CHUNK)] = _row_sums(pairs)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(x.square.at[0], x.parts.squares.at[(*x.place, 0)])
    plgpu.copy_smem_to_gmem(x.vector, x.parts.vector.at[x.place])


def _delta(x, whole):
    p, pieces = x.plan, x.plan.H // PIECE
    for i in range(ptx.slabs(p.H)):
        plgpu.copy_gmem_to_smem(x.erase.at[(*x.place, i)], x.erase_smem.at[i], x.first)
    plgpu.copy_gmem_to_smem(x.inverse.at[x.place], x.square.at[0], x.first)
    for array, smem in ((x.dout, x.do_smem), (x.dz, x.dz_smem)):
        copy_rows(p, array, x.batch, x.chunk, x.head, smem, x.second)
    beta = activated_beta(x)
    erase, T = whole(x.erase_smem, p.H), whole(x.square, CHUNK)
    dz_matrix, by_rows = whole(x.dz_smem, p.D), dict(along_rows=True)
    plgpu.barrier_wait(x.first)
    v = memory.ldmatrix(x.v_smem, p.D).astype(jnp.float32)
    (rest,) = ptx.wgmma_wait_group(0, ptx.wgmma_nn(v, erase, whole(x.S_smem, p.D, p.H, **by_rows), p.dtype))
    plgpu.barrier_wait(x.second)
    with_dz = lambda a: _row_sums((a[:, _columns(i)], _square(x.dz_smem, i)) for i in _slabs(x))  # noqa: E731
    idle, larger = jnp.abs(beta) < LEAST_BETA, jnp.where(jnp.abs(beta) < LEAST_BETA, jnp.float32(LEAST_BETA), beta)
    x.vector[pl.ds(p.H, CHUNK)] = jnp.where(idle, with_dz(rest), 0.0)
    beside = along_columns(beta, ptx.SLAB)
    for i in _slabs(x):
        memory.stmatrix((beside * rest[:, _columns(i)]).astype(p.dtype), x.v_smem.at[pl.ds(i, 1)])
    for i, left, factor in ((0, x.do, jnp.float32(p.options.scale)), (2, dz_matrix, along_columns(-beta, p.H))):
        (found,) = ptx.wgmma_wait_group(0, ptx.wgmma_ss(left, x.S, p.dtype))
        found = found * factor
        tiles.st_global_tiles(x.parts.across, x.tile + i * pieces, found.astype(p.dtype))
    plgpu.commit_smem()  # S has been read, z is written
    _copy_state(x, x.dstates, x.S_smem, x.third)
    u = ptx.wgmma_nn(ptx.zeros(p.D), T, whole(x.v_smem, p.D, **by_rows), p.dtype)
    (u,) = ptx.wgmma_wait_group(0, u)
    u = u.astype(p.dtype)
    x.vector[pl.ds(p.H + CHUNK, CHUNK)] = jnp.where(idle, 0.0, with_dz(u) / larger)
    plgpu.commit_smem()
    memory.stmatrix(u, x.v_smem)
    plgpu.commit_smem()
    found = ptx.wgmma_ss(x.do, x.u, p.dtype), ptx.wgmma_ss(dz_matrix, x.u, p.dtype)
    dA, dL = ptx.wgmma_wait_group(0, *found)
    dv = [(beside * _square(x.dz_smem, i).astype(jnp.float32)).astype(p.dtype) for i in _slabs(x)]
    plgpu.commit_smem()  # do, dz and u in shared memory have been read
    for i, smem in zip(range(0, p.H, CHUNK), (x.do_smem, x.dz_smem), strict=False):
        _copy_state(x, x.states, smem, x.fourth, pl.ds(i, CHUNK))
    memory.stmatrix(_lower(dA * jnp.float32(p.options.scale), 0).astype(p.dtype), x.square)
    memory.stmatrix(_lower(dL * along_columns(-larger, CHUNK), 1).astype(p.dtype), x.erase_smem.at[0:1])
    for i in _slabs(x):
        memory.stmatrix(dv[i], x.v_smem.at[pl.ds(i, 1)])
    plgpu.commit_smem()
    for i, smem in enumerate((x.square, x.erase_smem)):
        plgpu.copy_smem_to_gmem(smem.at[0], x.parts.squares.at[(*x.place, i)])
    rows = x.dv.at[x.batch, pl.ds(x.chunk * CHUNK, CHUNK), x.head]
    for i in _slabs(x):
        plgpu.copy_smem_to_gmem(x.v_smem.at[i], rows.at[:, pl.ds(i * ptx.SLAB, ptx.SLAB)])
    plgpu.barrier_wait(x.third)
    (dk,) = ptx.wgmma_wait_group(0, ptx.wgmma_rs_nt(u, x.S))
    tiles.st_global_tiles(x.parts.across, x.tile + pieces, dk.astype(p.dtype))
    plgpu.barrier_wait(x.fourth)
    for i, smem in zip(range(0, p.H, CHUNK), (x.do_smem, x.dz_smem), strict=False):
        x.vector[pl.ds(i, CHUNK)] = _row_sums((_square(smem, slab), _square(x.S_smem, slab, i)) for slab in _slabs(x))
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(x.vector, x.parts.vector.at[x.place])


def _slabs(x):
    return range(ptx.slabs(x.plan.D))


def _columns(slab):
    return slice(slab * ptx.SLAB, (slab + 1) * ptx.SLAB)


def _square(smem, slab, first=0):
    """64 rows of a slab, from the `first` on."""
    return tiles.ldmatrix_rows(smem.at[pl.ds(slab, 1)], first)


def _row_sums(pairs):
    """Σ over columns of products of pairs `[64, 64]`."""
    return jnp.sum(sum(a.astype(jnp.float32) * b.astype(jnp.float32) for a, b in pairs), axis=1)


def _lower(square, above: int):
    """What is `above` or more columns left of the diagonal; else 0."""
    return jnp.where(ptx.numbers(i32(0), 0, CHUNK) >= ptx.numbers(i32(above), 1, CHUNK), square, 0.0)


# --- host -------------------------------------------------------------------------------------------------------------


def launch(plan: Plan, inputs, prepared, states, dout, dz, dstates, *, interpret=False):
    """Runs the kernel: `(Parts, dv)`; without the delta rule dz is the gradient of v already, and None is returned."""
    delta = plan.options.rule.delta
    given = dict(value=inputs.value, dout=dout, states=states, dstates=dstates)
    if delta:
        given |= dict(beta=inputs.beta, dz=dz, erase=prepared.erase, inverse=prepared.inverse)
    shapes, names = Parts.shapes(plan), [field.name for field in dataclasses.fields(Parts)]

    def body(*refs, **allocations):
        mine, out = refs[: len(given)], refs[len(given) :]
        _kernel(plan, dict(zip(given, mine, strict=True)), Parts(*out[:3]), *out[3:], **allocations)

    across, squares, vector, *dv = kernel(
        body,
        name="jattn_linear_channel_backward_chunk",
        out_type=(*(getattr(shapes, name) for name in names), *([jax.typeof(dz)] if delta else [])),
        scratch=_scratch(plan),
        grid={"block": items(plan)},
        warpgroups=1,
        interpret=interpret,
        approximate=False,
    )(*given.values())
    return Parts(across, squares, vector), dv[0] if delta else None


def _scratch(plan) -> dict:
    delta, slabs = plan.options.rule.delta, ptx.slabs(plan.D)

    def smem(n, rows=CHUNK):
        return plgpu.SMEM((n, rows, ptx.SLAB), plan.dtype, transforms=ptx.TRANSFORMS)

    rooms = dict(
        v_smem=smem(slabs), do_smem=smem(slabs), S_smem=smem(slabs, plan.H), square=smem(1),
        vector=plgpu.SMEM((plan.H + 2 * CHUNK * delta,), jnp.float32),
        first=plgpu.Barrier(num_arrivals=2 * slabs + delta * (ptx.slabs(plan.H) + 1)),
        second=plgpu.Barrier(num_arrivals=(1 + delta) * slabs), third=plgpu.Barrier(num_arrivals=slabs),
    )  # fmt: skip
    if not delta:
        return rooms | dict(D_smem=smem(slabs, plan.H))
    return rooms | dict(
        dz_smem=smem(slabs), erase_smem=smem(ptx.slabs(plan.H)),
        fourth=plgpu.Barrier(num_arrivals=slabs * (plan.H // CHUNK)),
    )  # fmt: skip

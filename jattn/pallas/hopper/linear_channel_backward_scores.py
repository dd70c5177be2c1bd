"""The last kernel of the backward of KDA and GLA on compute capability 9.0: the gradients through the scores of chunks
of 64 tokens, of which none knows of another, and all that is left then.

A thread block has one chunk of one value head, and of it 32 channels after the other. With dA and β dL of
`linear_channel_backward_chunk`, q and k with their norms (the scale is in dA already):

    dq = Σ_j dA_ij k_j 2^(…)     dk = Σ_i dA_ij q_i 2^(…) + Σ_j β dL_ij k_j 2^(…) + Σ_i β dL_ij k_i 2^(…)

each by the anchors of `linear_channel_tiles`: pairs of blocks of 16 tokens by wgmma, with decays of whole blocks in
between multiplied onto sums, and pairs of a block by products of a warp. The gradient of a log decay g_s is the sum of
Z_ij, dA_ij q_i k_j 2^(…) and its like, over pairs i ≥ s > j: a difference, Σ over i ≥ s of rows' less columns' sums of
Z, where both add up the very same products of rounded operands, and pairs on one side of s cancel to float32. To these
come the products with states, decayed from the start of the chunk or to its end.

    a channel a thread     gates, sums of log decays → shared memory
    64 channels at a time  k to the end of its block, q and k from its start → shared memory
    32 channels at a time  between blocks | within | states | sums over later tokens → dg (HBM) | dq, dk → shared memory
    32 channels at a time  back through the norms → TMA

Floor: q, k, float32 g, three matrices [64, H], dA and dL in, dq, dk and float32 dg out: 3.1 kB a token and head, at the
4.3 TB/s of a copy 0.19 ms for T = 8192 and 32 heads, 0.38 ms for B = 4, T = 4096. Prediction: 0.40 and 0.78 ms, of two
thread blocks on a multiprocessor and some 11000 instructions a warp and chunk. Measured on an H200: 0.509 and 1.00 ms,
of 15000; there are 14300 now, and 11000 with bounded gates, whose pairs within a block have one anchor.

Source: Kimi Team, "Kimi Linear" (2025); Yang et al., "Gated Linear Attention Transformers" (2024).
"""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
from jax import lax

from jattn._linear import CHUNK
from jattn.pallas._compat import kernel, pl, plgpu
from jattn.pallas.hopper import linear_channel_backward_products as products
from jattn.pallas.hopper import linear_channel_backward_tiles as own
from jattn.pallas.hopper import linear_channel_tiles as tiles
from jattn.pallas.hopper import memory, ptx
from jattn.pallas.hopper.decode_rows import along_columns
from jattn.pallas.hopper.linear_channel_backward_chunk import first_tile
from jattn.pallas.hopper.linear_channel_plan import LEAST_BETA
from jattn.pallas.hopper.linear_channel_prepare import activated_beta, inverse_norms, sum_log_decays
from jattn.pallas.hopper.linear_plan import Plan, copy_rows, items, key_head, place_of
from jattn.pallas.hopper.lists import i32

_INPUTS = ("query", "key", "g", "beta", "A_log", "dt_bias")
_END, _Q, _K = range(3)  # right operands: k to the end of its block, q and k from its start


def _kernel(
    plan: Plan,
    inputs,  # name -> array, those of `Inputs` that there are
    parts,  # `linear_channel_backward_chunk.Parts`
    # outputs (HBM)
    dq,  # [B, T, N, H]
    dk,  # [B, T, N, H]
    dg,  # float32 [B, T, N, H]
    dbeta=None,  # float32 [B, N, n · 64]: what is to add where β is 0; with the delta rule
    *,
    # shared memory, matrices in slabs of 64 columns
    q_smem,  # [slabs of H, 64, 64]; upper halves of dk; dq on its way out
    k_smem,  # [slabs of H, 64, 64]; lower halves of dk; dk on its way out
    rooms,  # [5, 64, 64]: three right operands of 64 channels, dA, β dL; then q and k again
    sums,  # float32 [64, pitch]: of log decays, from the start of a block of 16; then dq
    others,  # float32 [8, H]: of log decays, of all blocks before each block, and of all after it
    vector,  # float32 [H + 128] or [H], see `Parts`
    unsafe=None,  # int32 [H / 32, 4], see `_unsafe`
    # barriers
    ready,  # TMA
    again,  # TMA
):
    batch, chunk, head = place_of(plan, lax.axis_index("block"))
    x = SimpleNamespace(
        plan=plan, **dict.fromkeys(_INPUTS), head=head, chunk=chunk, batch=batch, place=(batch, chunk, head)
    )
    vars(x).update(
        inputs, parts=parts, dq=dq, dk=dk, dg=dg, q_smem=q_smem, k_smem=k_smem, sums=sums, others=others, rooms=rooms,
        vector=vector, rows=plan.T - chunk * CHUNK, tile=first_tile(plan, *x.place), unsafe=unsafe,
        strong=None if tiles.surely_mild(plan.options) else unsafe,
    )  # fmt: skip
    delta, slabs = plan.options.rule.delta, ptx.slabs(plan.H)
    x.squares = [rooms.at[i : i + 1] for i in range(3, 4 + delta)]
    _copy_rows(x, q_smem, k_smem, ready)
    for i, square in enumerate(x.squares):
        plgpu.copy_gmem_to_smem(parts.squares.at[(*x.place, i)], square.at[0], ready)
    plgpu.copy_gmem_to_smem(parts.vector.at[x.place], vector, ready)
    beta = activated_beta(x) if delta else None
    sum_log_decays(x)
    tiles.st_other_sums(sums, others)
    plgpu.barrier_wait(ready)
    own.decay_by_chunk(sums, vector, plan.H)
    x.norms = (None, None)
    if plan.options.qk_l2norm:
        x.norms = tuple(inverse_norms(x))
    if unsafe is not None:
        products.st_unusual([products.ld_own(square) for square in x.squares], unsafe, more=x.strong is not None)
    x.diagonal = along_columns(products.diagonal(x.squares[0]), tiles.PIECE)
    x.right = [
        ptx.matrix(lambda _, i=i: rooms.at[i : i + 1], CHUNK, ptx.SLAB, along_rows=True) for i in range(2 + delta)
    ]
    plgpu.commit_smem()

    zero = _same(jnp.float32(0))
    carry = zero, zero, ptx.zeros(8)
    q_sums, k_sums, beta_sums = lax.fori_loop(0, slabs, lambda s, carry: _one_slab(x, s, carry), carry)
    if delta:
        added = jnp.where(jnp.abs(beta) < LEAST_BETA, jnp.sum(beta_sums, axis=1) / jnp.float32(LEAST_BETA), 0.0)
        memory.st_global_rows(dbeta, (batch, head, chunk * CHUNK), added, i32(CHUNK))
    if plan.options.qk_l2norm:  # all warps have met since they read what these copies overwrite
        _copy_rows(x, rooms.at[0:slabs], rooms.at[slabs : 2 * slabs], again)
        plgpu.barrier_wait(again)
        lax.fori_loop(0, 2 * slabs, lambda p, _: _through_norms(x, _int(p), q_sums, k_sums), None)
    if plan.N == plan.K:
        plgpu.commit_smem()
        for array, smem in ((dq, q_smem), (dk, k_smem)):
            rows = array.at[batch, pl.ds(chunk * CHUNK, CHUNK), head]
            for i in range(slabs):
                plgpu.copy_smem_to_gmem(smem.at[i], rows.at[:, pl.ds(i * ptx.SLAB, ptx.SLAB)])
        plgpu.wait_smem_to_gmem(0)


def _copy_rows(x, q_smem, k_smem, barrier):
    for array, smem in ((x.query, q_smem), (x.key, k_smem)):
        copy_rows(x.plan, array, x.batch, x.chunk, key_head(x.plan, x.head), smem, barrier)


def _same(x):
    """A number for each row."""
    return plgpu.layout_cast(jnp.full(CHUNK, x), ptx.ROW)


def _int(i):
    """A loop's index, which is int64 in 64-bit mode."""
    return jnp.asarray(i, jnp.int32)


def _operands(x, piece):
    return tiles.ld_tile(x.q_smem, piece, x.norms[0]), tiles.ld_tile(x.k_smem, piece, x.norms[1])


# --- 64 channels ------------------------------------------------------------------------------------------------------


def _one_slab(x, slab, carry):
    first = 2 * _int(slab)
    lax.fori_loop(0, 2, lambda i, _: _decay(x, first + _int(i), _int(i)), None)
    plgpu.commit_smem()
    return lax.fori_loop(0, 2, lambda i, carry: _one_piece(x, first + _int(i), _int(i), carry), carry)


def _decay(x, piece, place):
    """The right operands of products between blocks."""
    q, k = _operands(x, piece)
    sums, end = (tiles.ld_sums(x.sums, piece, put=put) for put in (0, tiles.BLOCK - 1))
    tiles.st_tile(tiles.decayed(k, sums, end), x.rooms.at[_END : _END + 1], place)
    tiles.st_tile(tiles.decayed(q, sums), x.rooms.at[_Q : _Q + 1], place)
    if x.plan.options.rule.delta:
        tiles.st_tile(tiles.decayed(k, sums), x.rooms.at[_K : _K + 1], place)


# --- 32 channels ------------------------------------------------------------------------------------------------------


def _one_piece(x, piece, place, carry):
    """Writes the gradients of a piece; the carry has sums along rows: dq · q, dk · k and what is of β."""
    q_sums, k_sums, beta_sums = carry
    delta = x.plan.options.rule.delta
    state = _between_blocks(x, piece, place, beta_sums)
    pieces = x.plan.H // tiles.PIECE
    across = [own.ld_global_tile(x.parts.across, x.tile + i * pieces + piece) for i in range(2 + delta)]
    state = _within_blocks(x, piece, state)
    (q, k), sums = _operands(x, piece), tiles.ld_sums(x.sums, piece)
    dq, dk, w, *rest = state
    dq, dk = dq + x.diagonal * k, dk + x.diagonal * q
    dq, dk, w, to_end = _with_states(x, piece, across, q, k, sums, dq, dk, w)
    suffix_sums = own.sums_over_tokens(w, to_end, x.q_smem, x.k_smem, x.sums, piece, place)
    plgpu.commit_smem()
    start = x.batch, x.chunk * CHUNK, x.head
    own.st_global_sums(x.dg, start, suffix_sums, x.sums, x.vector, x.rows, piece, place)
    if x.plan.options.qk_l2norm:
        own.st_own(x.sums, piece, dq)
        own.st_halves(dk, x.q_smem, x.k_smem, piece)
        q_sums, k_sums = q_sums + jnp.sum(q * dq, axis=1), k_sums + jnp.sum(k * dk, axis=1)
    else:
        _write(x, piece, dq, dk)
    return q_sums, k_sums, rest[0] if delta else beta_sums


def _within_blocks(x, piece, state):
    """Adds what pairs of different tokens of a block of 16 give, see `add_level`."""
    by_levels, at_once = (lambda state, add=add: add(x, piece, state) for add in (_by_levels, _at_once))
    if x.unsafe is None:
        return by_levels(state)
    return lax.cond(tiles.any_strong(x.unsafe, piece), by_levels, at_once, state)


def _by_levels(x, piece, state):
    (q, k), sums, squares = _operands(x, piece), tiles.ld_sums(x.sums, piece), _squares(x)

    def one_level(i, state):
        bit = lax.shift_right_logical(i32(tiles.LEVELS[0]), _int(i))
        return products.add_level(state, q, k, sums, products.ld_anchors(x.sums, piece, bit), *squares, bit)

    return lax.fori_loop(i32(0), ptx.once() * len(tiles.LEVELS), one_level, state)


def _at_once(x, piece, state):
    (q, k), sums = _operands(x, piece), tiles.ld_sums(x.sums, piece)
    sums = sums + jnp.float32(tiles.shift(x.plan.options))
    add = lambda _, state: products.add_blocks(state, q, k, sums, *_squares(x))  # noqa: E731
    return lax.fori_loop(i32(0), ptx.once(), add, state)


def _squares(x):
    return [products.ld_own(square) for square in x.squares] + [None] * (not x.plan.options.rule.delta)


def _between_blocks(x, piece, place, beta_sums):
    """Gradients of q and k through pairs of tokens of different blocks, and w, of which `add_level` tells."""
    delta, zeros = x.plan.options.rule.delta, ptx.zeros(tiles.PIECE)
    right = [m.columns_from(place * tiles.PIECE, columns=tiles.PIECE) for m in x.right]
    rows, columns = ([products.ld_blocks(s, transposed=t) for s in x.squares] for t in (False, True))
    block_of = lambda a, i: a[:, i * tiles.BLOCK : (i + 1) * tiles.BLOCK]  # noqa: E731
    to_rows, to_columns = [zeros] * len(rows), zeros
    for i in range(3):
        first, last = i, 3 - i
        to_rows = [
            ptx.wgmma_rs(to, block_of(a, first), right[_END].part(first, rows=tiles.BLOCK))
            for to, a in zip(to_rows, rows, strict=True)
        ]
        for a, m in zip(columns, right[_Q:], strict=True):
            to_columns = ptx.wgmma_rs(to_columns, block_of(a, last), m.part(last, rows=tiles.BLOCK))
        *to_rows, to_columns = ptx.wgmma_wait_group(0, *to_rows, to_columns)
        if i < 2:  # what is between them decays once more
            decay = tiles.ld_decay_below(x.sums, piece, first + 1)
            to_rows = [to * decay for to in to_rows]
            to_columns = to_columns * products.ld_decay_above(x.sums, piece, last - 1)
    sums, end = (tiles.ld_sums(x.sums, piece, put=put) for put in (0, tiles.BLOCK - 1))
    dq, *dk = [tiles.decayed(to, sums) for to in to_rows]
    dk = sum(dk, tiles.decayed(to_columns, sums, end))
    rounded = [tiles.ld_tile(x.rooms.at[i : i + 1], place) for i in range(2 + delta)]
    of_rows = [a * to for a, to in zip(rounded[_Q:], to_rows, strict=True)]
    w = sum(of_rows) - rounded[_END] * to_columns
    if not delta:
        return dq, dk, w
    return dq, dk, w, products.add_to_sums(beta_sums, of_rows[1])


def _with_states(x, piece, across, q, k, sums, dq, dk, w):
    """Adds the products with states; also k times what it gets from the leaving one."""
    to_q, to_end_k, *to_start_k = (a.astype(jnp.float32) for a in across)
    from_start = sums + tiles.ld_stored_sums(x.others, piece, after=False)
    part = tiles.decayed(to_q, from_start)
    dq, w = dq + part, w + q * part
    end = tiles.ld_sums(x.sums, piece, put=tiles.BLOCK - 1)
    part = tiles.decayed(to_end_k, tiles.apart(sums, end) + tiles.ld_stored_sums(x.others, piece, after=True))
    to_end = k * part
    dk, w = dk + part, w - to_end
    for to_k in to_start_k:
        part = tiles.decayed(to_k, from_start)
        dk, w = dk + part, w + k * part
    return dq, dk, w, to_end


def _through_norms(x, piece, q_sums, k_sums):
    """dx = r (dy − y (y · dy)) where y = r x; reads q and k again, since gradients are where they were."""
    slabs = ptx.slabs(x.plan.H)
    dq, dk = tiles.ld_sums(x.sums, piece), own.ld_halves(x.q_smem, x.k_smem, piece)
    found = []
    for d, first, norms, sums in ((dq, 0, x.norms[0], q_sums), (dk, slabs, x.norms[1], k_sums)):
        y = tiles.ld_tile(x.rooms.at[first : first + slabs], piece, norms)
        found.append((d - y * along_columns(sums, tiles.PIECE)) * along_columns(norms, tiles.PIECE))
    _write(x, piece, *found)


def _write(x, piece, dq, dk):
    """To shared memory, from where TMA takes them, or to the float32 that a group's heads add up in."""
    for d, smem, array in ((dq, x.q_smem, x.dq), (dk, x.k_smem, x.dk)):
        if x.plan.N == x.plan.K:
            tiles.st_tile(d, smem, piece)
        else:
            memory.st_global(array, (x.batch, x.chunk * CHUNK, x.head), d, x.rows, piece * tiles.PIECE)


# --- host -------------------------------------------------------------------------------------------------------------


def _unsafe(plan) -> dict:
    """Room to note where one anchor is unsafe, in a piece of a block of 16 tokens: by strong decays (see
    `linear_channel_tiles.st_sums`), or by score gradients (see `st_unusual`). A room more, of 1024 bytes as all are,
    would leave none for a second thread block on a multiprocessor: 0.52 instead of 0.364 ms. Rooms are laid out by
    name; with this one first, ptxas spills 8 to 24 bytes."""
    if tiles.shift(plan.options) is None:
        return {}
    return dict(unsafe=plgpu.SMEM((plan.H // tiles.PIECE, tiles.TILE_ROWS // tiles.BLOCK), jnp.int32))


def launch(plan: Plan, inputs, parts, *, interpret=False):
    """Runs the kernel: `(dq, dk, dg [B, T, N, H], dbeta float32 [B, T, N] or None)`."""
    given = {name: x for name in _INPUTS if (x := getattr(inputs, name)) is not None}
    count, delta = len(given), plan.options.rule.delta

    def body(*refs, **allocations):
        mine, rest = dict(zip(given, refs, strict=False)), refs[count:]
        _kernel(plan, mine, type(parts)(*rest[:3]), *rest[3:], **allocations)

    wide = (plan.B, plan.T, plan.N, plan.H)
    narrow = jax.ShapeDtypeStruct(wide, plan.dtype if plan.N == plan.K else "float32")
    out_type = [narrow, narrow, jax.ShapeDtypeStruct(wide, "float32")]
    out_type += [jax.ShapeDtypeStruct((plan.B, plan.N, plan.chunks * CHUNK), "float32")] * delta
    slabs = ptx.slabs(plan.H)
    smem = lambda n: plgpu.SMEM((n, CHUNK, ptx.SLAB), plan.dtype, transforms=ptx.TRANSFORMS)  # noqa: E731
    dq, dk, dg, *dbeta = kernel(
        body,
        name="jattn_linear_channel_backward_scores",
        out_type=tuple(out_type),
        scratch=dict(
            q_smem=smem(slabs),
            k_smem=smem(slabs),
            rooms=smem(5),
            sums=plgpu.SMEM((CHUNK, tiles.pitch(plan.H)), jnp.float32),
            others=plgpu.SMEM((8, plan.H), jnp.float32),
            vector=plgpu.SMEM(parts.vector.shape[3:], jnp.float32),
            **_unsafe(plan),
            ready=plgpu.Barrier(num_arrivals=2 * slabs + 2 + delta),
            again=plgpu.Barrier(num_arrivals=2 * slabs),
        ),  # fmt: skip
        grid={"block": items(plan)},
        warpgroups=1,
        interpret=interpret,
        approximate=False,
    )(*given.values(), parts.across, parts.squares, parts.vector)
    if not delta:
        return dq, dk, dg, None
    first = parts.vector[..., plan.H : plan.H + CHUNK] + parts.vector[..., plan.H + CHUNK :]
    first = first.transpose(0, 1, 3, 2).reshape(plan.B, plan.chunks * CHUNK, plan.N)
    return dq, dk, dg, (first + dbeta[0].swapaxes(1, 2))[:, : plan.T]

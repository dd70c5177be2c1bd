"""The first of two kernels of KDA and GLA on compute capability 9.0: what chunks of 64 tokens need that do not know of
one another. `linear_channel_scan` is the second.

A multiprocessor has three warpgroups, and each has chunks in turn, of one value head each. With running sums G of the
log decays, the queries q with their scale and norm, the keys k with theirs, and P of `linear_channel_tiles`:

    A = tril(P(q, k))     T = (I + tril(β_i P(k, k)_ij, −1))⁻¹ in float32, by substitution
    query = q exp(G);   erase = −k exp(G);   update = k exp(G_C − G);   decay = exp(G_C)

so that the scan multiplies matrices, and by vectors only the state and, with β, what T takes: β in T would round to
bfloat16 alike in a whole column, which doubles the error once keys are alike and β is near 2. GLA has neither T nor
erase. Tokens past the last have q = k = β = 0 and g = 0: A is 0 there, and the state does not change.

    64 channels at a time, which leaves room for three warpgroups in shared memory:
        half of a channel a thread     gates, sums of log decays → shared memory; of the first ones while q and k come
        a warp 16 tokens               k to the end of its block → shared memory | scores | query, erase, update → TMA
    two threads a column               T → TMA

Products within blocks of 16 tokens take one anchor where decays are mild (`_add_mild`), else that and one for each of
four levels (`_add_strong`); which it is, all warps know for each 32 channels before they begin.

Floor: q, k and float32 g in, three matrices [64, H], T and A out: 2060 bytes a token and head, at the 4.3 TB/s of a
copy 0.126 ms for T = 8192 and 32 heads, 0.251 ms for B = 4, T = 4096. Prediction: 0.20 and 0.40 ms, of some 7100
instructions a warp and chunk and three warps a scheduler. Measured on an H200: 0.235 and 0.464 ms, with levels for all
decays; with one anchor where they are mild, which saves an eighth of the instructions, and gates that do not wait for q
and k, 0.204 and 0.391.

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

_INPUTS = ("query", "key", "g", "beta", "scale", "A_log", "dt_bias")
_WARPGROUPS = 3
_PIECES = ptx.SLAB // tiles.PIECE  # of a slab
_Q, _K, _DIAGONAL = range(3)  # rows of `rows_smem`


def _kernel(
    plan: Plan,
    inputs,  # name -> array, those of `Inputs` that there are
    out,  # `Prepared` (HBM)
    *,
    # shared memory of each warpgroup, matrices in slabs of 64 columns
    q_smem,  # [warpgroups, slabs of H, 64, 64]; query on its way out; then in the first slab A
    k_smem,  # [warpgroups, slabs of H, 64, 64]; erase on its way out; then in the first slab T
    right,  # [warpgroups, slabs of H, 64, 64]: keys decayed to the end of their block of 16; update on its way out
    sums,  # float32 [warpgroups, 64, pitch]: of a slab's log decays, from the start of a block of 16
    others,  # float32 [warpgroups, 8, 64]: of a slab's log decays, of all blocks before each, and of all after it
    rows_smem,  # float32 [warpgroups, 3, 64], see `_write_rows`
    vector,  # float32 [warpgroups, H + 64]: decay, β; without the delta rule [warpgroups, H]
    strong=None,  # int32 [warpgroups, 2, 4]: where decays are too strong for one anchor, see `st_sums`
    # barriers
    ready,  # [warpgroups] TMA
    # compiled in
    blocks: int,  # thread blocks
    scores: bool,  # A and T are wanted
):
    warpgroup, block = lax.axis_index("warpgroup"), lax.axis_index("block")
    x = SimpleNamespace(plan=plan, **dict.fromkeys(_INPUTS), out=out, scores=scores, ready=ready.at[warpgroup])
    vars(x).update(inputs)
    rooms = dict(
        q_smem=q_smem, k_smem=k_smem, right=right, sums=sums, strong=strong, others=others, rows_smem=rows_smem,
        vector=vector,
    )  # fmt: skip
    vars(x).update((name, None if room is None else room.at[warpgroup]) for name, room in rooms.items())
    together, count = blocks * _WARPGROUPS, items(plan)

    def one_chunk(item):
        _one_chunk(SimpleNamespace(**vars(x), item=item))
        return item + together

    lax.while_loop(lambda item: item < count, one_chunk, warpgroup * blocks + block)
    plgpu.wait_smem_to_gmem(0)


def _one_chunk(x):
    plan, at = x.plan, _placed(x)
    delta, slabs = plan.options.rule.delta, ptx.slabs(plan.H)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the chunk before
    for array, smem in ((x.query, x.q_smem), (x.key, x.k_smem)):
        copy_rows(plan, array, at.batch, at.chunk, key_head(plan, at.head), smem, x.ready)
    if delta:
        x.vector[pl.ds(plan.H, CHUNK)] = activated_beta(at)
    if _early(x):
        sum_log_decays(at)
    plgpu.barrier_wait(x.ready)
    _write_rows(x)
    if x.scores:
        _write_scores(x)
    else:
        lax.fori_loop(0, slabs, lambda s, _: _one_slab(x, s, None), None)
    plgpu.copy_smem_to_gmem(x.vector, x.out.vector.at[_placed(x).place])


def _early(x) -> bool:
    """Whether the first slab's gates are summed while q and k come: twice the code of bounded ones takes registers that
    there are not, and gained nothing."""
    return x.plan.options.gate != "bounded"


def _placed(x):
    """x with where its chunk is. It is found wherever that is asked: kept, it would take four registers in between."""
    batch, chunk, head = place_of(x.plan, ptx.again(x.item))
    found = dict(batch=batch, chunk=chunk, head=head, place=(batch, chunk, head), rows=x.plan.T - chunk * CHUNK)
    return SimpleNamespace(**vars(x), **found)


def _write_rows(x):
    """Factors of queries and keys, and A's diagonal, where nothing has decayed; registers have no room for them."""
    options, q, k = x.plan.options, x.q_smem, x.k_smem
    levels = x.scores and not _one_anchor(x)
    found = _diagonals(x, *[(q, q), (k, k)] * options.qk_l2norm, *[(q, k)] * levels)
    scale = x.scale[0] if options.scale is None else jnp.float32(options.scale)
    q_norm, k_norm = map(gates.inverse_norm, found[:2]) if options.qk_l2norm else (_same(jnp.float32(1)),) * 2
    x.rows_smem[_Q], x.rows_smem[_K] = q_norm * scale, k_norm
    if levels:  # vectors so long that the norm overflows are 0, and so do their products
        products = jnp.where((q_norm == 0) | (k_norm == 0), 0.0, found[-1])
        x.rows_smem[_DIAGONAL] = products * (q_norm * scale) * k_norm


def _one_anchor(x) -> bool:
    """All products within blocks of 16 have one."""
    return tiles.shift(x.plan.options) is not None and x.strong is None


def _row(x, i):
    return linear_tiles.ld_shared_rows(x.rows_smem.at[i])


def _write_scores(x):
    """And T, and all that is made of slabs."""
    delta, slabs = x.plan.options.rule.delta, ptx.slabs(x.plan.H)
    found = lax.fori_loop(0, slabs * ptx.once(), lambda s, found: _one_slab(x, s, found), _no_scores(x))
    A, lower = _triangles(x, *found)
    place = _placed(x).place
    # Of two slabs those copies are done that were asked for first: the rooms of the first one are free.
    plgpu.wait_smem_to_gmem((2 + delta) * (slabs - 1), wait_read_only=True)
    memory.stmatrix(A.astype(x.plan.dtype), x.q_smem.at[0:1])
    if delta:
        beta = linear_tiles.ld_shared_rows(x.vector.at[pl.ds(x.plan.H, CHUNK)])
        _write_inverse(lower * along_columns(beta, CHUNK), x.k_smem.at[0:1])
        plgpu.copy_smem_to_gmem(x.k_smem.at[0], x.out.inverse.at[place])
    else:
        plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(x.q_smem.at[0], x.out.scores.at[place])


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
    return [gates.inverse_norm(a) for a in _diagonals(x, (x.q_smem, x.q_smem), (x.k_smem, x.k_smem))]


def _diagonals(x, *pairs):
    """Of the products a bᵀ of pairs of `[slabs, 64, 64]` in shared memory, `[64]` in the ROW layout each."""
    if not pairs:
        return []
    matrix = lambda smem: ptx.matrix(lambda _: smem, CHUNK, x.plan.H)  # noqa: E731
    products = [ptx.wgmma_ss(matrix(a), matrix(b), x.plan.dtype) for a, b in pairs]
    return [linear_tiles.diagonal(a) for a in ptx.wgmma_wait_group(0, *products)]


# --- 64 channels, or as many as there are sums ------------------------------------------------------------------------


def sum_log_decays(x, first=0):
    """Fills `x.sums` with those of the channels from `first` on; all warps have met then."""
    options, channels = x.plan.options, x.others.shape[1]
    A_log = None if x.A_log is None else x.A_log[x.head]
    bias = None if x.dt_bias is None else tiles.ld_global_channel(x.dt_bias, x.head, first, channels)
    least = None if x.strong is None else -2.0 * tiles.shift(options)

    raw_gates = tiles.ld_global_channels(x.g, x.batch, x.chunk * CHUNK, x.head, first, x.rows, channels)
    for i, raw in enumerate(raw_gates):
        if options.gate == "bounded":
            rate = jnp.float32(-gates.LOG2_E) * (1 if A_log is None else jnp.exp(A_log))
            g = jnp.float32(options.lower_bound) * tiles.logistic((raw if bias is None else raw + bias) * rate)
        else:
            g = jnp.maximum(gates.log_decay(options, raw, A_log, bias), gates.LEAST)
        rows = None if options.gate in (None, "clipped") else x.rows
        tiles.st_sums(x.sums, i, g, rows, x.strong, least)
    plgpu.commit_smem()


def _one_slab(x, slab, scores):
    """Adds a slab to the scores, if there are any, and writes what the scan multiplies with states."""
    slab = jnp.asarray(slab, jnp.int32)  # a loop's index is int64 in 64-bit mode
    add_up = lambda: sum_log_decays(_placed(x), slab * ptx.SLAB)  # noqa: E731
    if not _early(x):
        add_up()
    elif ptx.slabs(x.plan.H) > 1:
        pl.when(slab > 0)(add_up)
    tiles.st_decay(x.sums, x.vector.at[pl.ds(slab * ptx.SLAB, ptx.SLAB)])
    tiles.st_other_sums(x.sums, x.others)
    if scores is not None:
        lax.fori_loop(0, _PIECES, lambda i, _: _decay_to_end(x, slab, jnp.asarray(i, jnp.int32)), None)
        plgpu.commit_smem()
        scores = lax.fori_loop(0, _PIECES, lambda i, s: _add_scores(x, slab, jnp.asarray(i, jnp.int32), *s), scores)
    plgpu.commit_smem()
    lax.fori_loop(0, _PIECES, lambda i, _: _decay_from_ends(x, slab, jnp.asarray(i, jnp.int32)), None)
    plgpu.commit_smem()
    place = _placed(x).place
    for smem, array in ((x.q_smem, x.out.query), (x.right, x.out.update), (x.k_smem, x.out.erase)):
        if array is not None:
            plgpu.copy_smem_to_gmem(smem.at[slab], array.at[(*place, slab)])
    return scores


# --- 32 channels ------------------------------------------------------------------------------------------------------


def _operands(x, piece):
    return tiles.ld_tile(x.q_smem, piece, _row(x, _Q)), tiles.ld_tile(x.k_smem, piece, _row(x, _K))


def _decay_to_end(x, slab, i):
    """The right operand of scores between blocks."""
    piece = _PIECES * slab + i
    sums, end = (tiles.ld_sums(x.sums, i, put=put) for put in (0, tiles.BLOCK - 1))
    tiles.st_tile(tiles.decayed(tiles.ld_tile(x.k_smem, piece, _row(x, _K)), sums, end), x.right, piece)


def _no_scores(x):
    """`(products with the first three blocks of 16 columns, of queries and of keys; those within blocks)`."""
    between = tuple((ptx.zeros(tiles.BLOCK),) * (1 + x.plan.options.rule.delta) for _ in range(3))
    if _one_anchor(x):
        return between, (ptx.zeros(3 * 8),)
    return between, (ptx.zeros(8), *(ptx.zeros(2 * 8) for _ in tiles.LEVELS[1:]))


def _add_scores(x, slab, i, between, within):
    piece = _PIECES * slab + i
    if tiles.shift(x.plan.options) is None:
        (q, k), sums = _operands(x, piece), tiles.ld_sums(x.sums, i)
        within = [_add_level(x, i, bit, q, k, sums, a) for bit, a in zip(tiles.LEVELS, within, strict=True)]
        left = [tiles.decayed(a, sums) for a in (q, k)]
    elif _one_anchor(x):
        within, left = _add_mild(x, piece, i, within)
    else:
        add = lambda how: lambda: how(x, piece, i, within)  # noqa: E731
        within, left = lax.cond(tiles.any_strong(x.strong, i), add(_add_strong), add(_add_mild))
    left, across = left[: len(between[0])], [None] * 3
    for block in (2, 1, 0):
        across[block] = tiles.mma_with_block(between[block], _narrow(x, *left), x.right, piece, block)
        if block:
            decay = tiles.ld_decay_below(x.sums, i, block)
            left = [a * decay for a in left]
    return tuple(across), tuple(within)


def _narrow(x, *arrays):
    return tuple(a.astype(x.plan.dtype) for a in arrays)


def _add_mild(x, piece, i, found):
    """Adds products within blocks with one anchor. Returns them, and queries and keys as rows of the other products."""
    k, sums, left = _of_one_anchor(x, piece, i)
    return _add_one_anchor(x, left, tiles.decayed(k, -sums), found), _unshifted(x, left)


def _add_strong(x, piece, i, found):
    """The same where some of the decays are strong. The others have the bits that they have where none is: a row must
    not know of later tokens."""
    load = lambda: (*_operands(x, piece), tiles.ld_sums(x.sums, i))  # noqa: E731
    levels = zip(tiles.LEVELS, found, strict=True)  # each loads anew what there are no registers to keep
    found = [_add_level(x, i, bit, *load(), a, strong=True) for bit, a in levels]
    k, sums, left = _of_one_anchor(x, piece, i)
    right = tiles.decayed(k, jnp.minimum(-sums, jnp.float32(tiles.shift(x.plan.options))))
    mild = _mild(x, sums)
    return _add_one_anchor(x, [jnp.where(mild, a, 0.0) for a in left], right, found), _unshifted(x, left)


def _of_one_anchor(x, piece, i) -> tuple:
    """Keys, exponents, and queries and keys as rows."""
    (q, k), sums = _operands(x, piece), _shifted(x, tiles.ld_sums(x.sums, i))
    return k, sums, [tiles.decayed(a, sums) for a in (q, k)]


def _shifted(x, sums):
    return sums + jnp.float32(tiles.shift(x.plan.options))


def _unshifted(x, left):
    return [a * jnp.float32(2 ** -tiles.shift(x.plan.options)) for a in left]


def _mild(x, shifted):
    return shifted >= jnp.float32(-tiles.shift(x.plan.options))


def _add_one_anchor(x, left, right, found):
    """Where there are levels, to each of them."""
    whole = len(found) == 1
    halves = (tiles.CORNER + tiles.INNER,) if whole else (tiles.CORNER, *(tiles.INNER for _ in found[1:]))
    left, (right,) = _narrow(x, *left), _narrow(x, right)
    return tuple(tiles.mma_own(a, *left, right, of) for a, of in zip(found, halves, strict=True))


def _add_level(x, i, bit, q, k, sums, found, *, strong=False):
    """Adds products of pairs within blocks whose numbers differ first in a bit.

    Args:
        strong: none but those of strong decays.
    """
    anchor = tiles.ld_sums(x.sums, i, ~(2 * bit - 1), bit - 1)
    left = [tiles.decayed(a, sums, anchor) for a in (q, k)]
    (right,) = _narrow(x, left[1])
    if strong:
        mild = _mild(x, _shifted(x, sums))
        left = [jnp.where(mild, 0.0, a) for a in left]
    return tiles.mma_own(found, *_narrow(x, *left), right, tiles.CORNER if bit == tiles.LEVELS[0] else tiles.INNER)


def _triangles(x, between, within):
    """`tril(P(q, k))` and, with the delta rule, `tril(P(k, k), −1)` but for its diagonal, float32 `[64, 64]`."""
    corner, *inner = within
    if inner:
        own = tiles.within_blocks(corner, inner, _row(x, _DIAGONAL))
    else:
        own = tiles.within_blocks(corner[:, :8], [corner[:, 8:]])
    found = [tiles.assembled(list(blocks), a) for *blocks, a in zip(*between, own, strict=False)]
    return found if len(found) == 2 else (*found, None)


def _decay_from_ends(x, slab, i):
    """What the scan multiplies with states, in the place of what it was made of."""
    piece = _PIECES * slab + i
    q, k = _operands(x, piece)
    sums, end = (tiles.ld_sums(x.sums, i, put=put) for put in (0, tiles.BLOCK - 1))
    to_end = tiles.apart(sums, end) + tiles.ld_stored_sums(x.others, i, after=True)
    tiles.st_tile(tiles.decayed(k, to_end), x.right, piece)
    from_start = sums + tiles.ld_stored_sums(x.others, i, after=False)
    tiles.st_tile(tiles.decayed(q, from_start), x.q_smem, piece)
    if x.plan.options.rule.delta:
        tiles.st_tile(-tiles.decayed(k, from_start), x.k_smem, piece)


# --- host -------------------------------------------------------------------------------------------------------------


def launch(plan: Plan, inputs, *, multiprocessors: int, interpret=False, scores=None, inverse=None) -> Prepared:
    """Runs the kernel on `Inputs`.

    Args:
        multiprocessors: of the device; each gets a thread block, whose warpgroups have chunks in turn.
        scores, inverse: A and T, if they are known, as a backward does: they are not computed then.
    """
    given = {name: x for name in _INPUTS if (x := getattr(inputs, name)) is not None}
    shapes, slabs, blocks = prepared_shapes(plan), ptx.slabs(plan.H), min(multiprocessors, items(plan))
    smem = plgpu.SMEM((_WARPGROUPS, slabs, CHUNK, ptx.SLAB), plan.dtype, transforms=ptx.TRANSFORMS)
    wide = lambda *shape: plgpu.SMEM((_WARPGROUPS, *shape), jnp.float32)  # noqa: E731
    if scores is not None:
        shapes = dataclasses.replace(shapes, scores=None, inverse=None)
    names = [name for name, x in vars(shapes).items() if x is not None]

    def body(*refs, **allocations):
        out = dict.fromkeys(vars(shapes)) | dict(zip(names, refs[len(given) :], strict=True))
        mine = dict(zip(given, refs, strict=False))
        _kernel(plan, mine, Prepared(**out), blocks=blocks, scores=scores is None, **allocations)

    found = kernel(
        body,
        name="jattn_linear_channel_prepare" if scores is None else "jattn_linear_channel_backward_prepare",
        out_type=tuple(getattr(shapes, name) for name in names),
        scratch=dict(
            q_smem=smem,
            k_smem=smem,
            right=smem,
            sums=wide(CHUNK, tiles.pitch(ptx.SLAB)),
            others=wide(8, ptx.SLAB),
            rows_smem=wide(3, CHUNK),
            vector=wide(*shapes.vector.shape[3:]),
            **(tiles.strong_smem(plan.options, _WARPGROUPS, _PIECES) if scores is None else {}),
            ready=plgpu.Barrier(num_arrivals=2 * slabs, num_barriers=_WARPGROUPS),
        ),
        grid={"block": blocks},
        warpgroups=_WARPGROUPS,
        interpret=interpret,
        approximate=False,
    )(*given.values())
    known = dict(scores=scores, inverse=inverse) | dict(zip(names, found, strict=True))
    return Prepared(**dict.fromkeys(vars(shapes)) | known)

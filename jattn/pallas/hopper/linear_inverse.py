"""The inverse of a unit triangular matrix of 64 rows; as in `memory`, functions have an equivalent in plain jnp for
interpret mode.
"""

import jax
import jax.numpy as jnp
from jax import lax

from jattn.pallas._compat import arith, interpreting, llvm, plgpu, utils
from jattn.pallas.hopper import linear_tiles, memory, ptx
from jattn.pallas.hopper.linear_tiles import _ld_shared, _offset, _st_shared
from jattn.pallas.hopper.ptx import TILE_ROWS, WGMMA, i32, integer

HALF = TILE_ROWS // 2
_PITCH = 4 * HALF  # bytes of a row of the blocks that are inverted


def unit_lower_inverse(lower, smem) -> tuple[jax.Array, jax.Array]:
    """Columns [0, 32) and [32, 64) of (I + L)⁻¹, float32 `[64, 32]` each in the WGMMA layout. L is what is under the
    diagonal of float32 `lower [64, 64]`, whose other entries are not used, but finite.

    Args:
        smem: bfloat16 `[1, 64, 64]` in shared memory, that nobody else reads or writes meanwhile; all warps have met
            when this ends.
    """
    corner = linear_tiles.split(jnp.where(ptx.numbers(jnp.int32(0), 0, HALF) >= HALF, lower[:, :HALF], 0.0))
    first, second = _of_blocks(lower, smem)
    plgpu.commit_smem()
    first = first + _corner(corner, first, second, smem)
    plgpu.commit_smem()
    return first, second


def _of_blocks(lower, scratch) -> tuple[jax.Array, jax.Array]:
    """`(I + P)⁻¹` and `(I + Q)⁻¹`, where P and Q are strictly lower: what is under the diagonal of the 32 × 32 blocks
    on the diagonal of float32 `lower [64, 64]`, whose other entries are not used, but finite. They are columns [0, 32)
    and [32, 64) of a matrix that is 0 elsewhere, above its diagonal too: `[64, 32]` in the WGMMA layout.

    By substitution in float32: powers of P, which a series takes, explode where keys repeat. Two threads have a column
    of an inverse, x: x_i = δ_ic − Σ_j P_ij x_j. One holds entries 8m to 8m + 3 of it and sums over these j, the other
    8m + 4 to 8m + 7; both then know x_i.

    Args:
        scratch: `[1, 64, 64]` of 16 bits in shared memory, that nobody else reads or writes meanwhile; who writes to
            it after this has met all warps.
    """
    if interpreting():
        parts = [_inverse(jnp.tril(lower[i : i + HALF, i : i + HALF], -1)) for i in (0, HALF)]
        zeros = jnp.zeros((HALF, HALF), jnp.float32)
        return jnp.concatenate([parts[0], zeros]), jnp.concatenate([zeros, parts[1]])

    @plgpu.inline_mgpu(arg_types=(WGMMA, plgpu.RefType(ptx.TRANSFORMS)), return_type=(ptx.array_type(HALF),) * 2)
    def invert(_, lower, scratch):
        start = llvm.ptrtoint(i32(), utils.memref_ptr(scratch))
        row, column = ptx.lane_position()
        upper = arith.cmpi(arith.CmpIPredicate.ult, row, integer(HALF))
        words, count = ptx.scalars(lower), HALF // 2
        block = [arith.select(upper, *pair) for pair in zip(words[:count], words[count:], strict=True)]
        places = _float_places(start, row, column)
        for i in range(0, count, 2):
            _st_shared(places[i // 4], 8 * ptx.row_of(i) * _PITCH, block[i : i + 2])
        utils.warpgroup_barrier()
        thread = arith.remui(ptx.thread_index(), integer(128))
        half, mine = arith.remui(thread, integer(2)), arith.remui(arith.divui(thread, integer(2)), integer(HALF))
        corner = _offset(start, arith.divui(thread, integer(64)), HALF * _PITCH)
        entries = _substitute(corner, mine, half)
        utils.warpgroup_barrier()
        chunk = arith.xori(arith.divui(mine, integer(4)), arith.muli(half, integer(4)))
        base = _offset(_offset(corner, half, 4 * _PITCH), arith.remui(mine, integer(4)), 4)
        for i, entry in enumerate(entries):
            place = _offset(base, arith.xori(chunk, integer(i % 4)), 16)
            _st_shared(place, (8 * (i // 4) + i % 4) * _PITCH, [entry])
        utils.warpgroup_barrier()
        found = [_ld_shared(places[i // 4], 8 * ptx.row_of(i) * _PITCH, 2) for i in range(0, count, 2)]
        found = sum(found, [])
        zero = ptx.constant(0)
        first = ptx.from_scalars([arith.select(upper, x, zero) for x in found])
        return first, ptx.from_scalars([arith.select(upper, zero, x) for x in found])

    return invert(lower, scratch)


def _inverse(lower):
    """`(I + lower)⁻¹` by substitution, in interpret mode."""
    n = lower.shape[0]
    eye = jnp.eye(n, dtype=jnp.float32)

    def row(i, inverse):
        new = eye[i] - jnp.dot(lower[i], inverse, precision=lax.Precision.HIGHEST)
        return jnp.where(jnp.arange(n, dtype=jnp.int32)[:, None] == i, new, inverse)

    return lax.fori_loop(0, n, row, jnp.zeros_like(eye))


def _float_places(start, row, column) -> list:
    """Where the thread's pairs of floats of each 8 columns lie in a matrix of 32 columns, whose chunks of 16 bytes are
    swizzled as in a slab."""
    inside = arith.xori(arith.divui(column, integer(4)), arith.remui(row, integer(8)))
    inside = _offset(arith.muli(arith.remui(column, integer(4)), integer(4)), inside, 16)
    base = _offset(start, row, _PITCH)
    return [arith.addi(base, arith.xori(inside, integer(32 * group))) for group in range(4)]


def _substitute(start, column, half) -> list:
    """This thread's 16 entries of its column of the inverse of the block at `start`."""
    zero, entries = ptx.constant(0), [ptx.constant(0)] * (HALF // 2)
    is_half = [arith.cmpi(arith.CmpIPredicate.eq, half, integer(h)) for h in range(2)]
    firsts = [_offset(start, arith.xori(half, integer(odd)), 16) for odd in range(2)]  # by the swizzle of the row
    for i in range(HALF):
        if i % 4 == 0:
            utils.warp_barrier()  # or the compiler reads far ahead, into registers that others need
        eight, rest = divmod(i, 8)
        sums = [zero] * 4
        for m in range(eight + (rest > 0)):
            four = _ld_shared(firsts[i % 2], i * _PITCH + 16 * (2 * m ^ i & 6), 4)
            for j in range(4 if m < eight else min(4, rest)):
                sums[j] = ptx.fma(four[j], entries[4 * m + j], sums[j])
        total = ptx.add(ptx.add(sums[0], sums[1]), ptx.add(sums[2], sums[3]))
        total = ptx.add(total, ptx.shfl_bfly(total, 1))
        unit = arith.select(arith.cmpi(arith.CmpIPredicate.eq, column, integer(i)), ptx.constant(1), zero)
        at = 4 * eight + rest % 4
        entries[at] = arith.select(is_half[rest // 4], ptx.sub(unit, total), entries[at])
    return entries


def _corner(corner, first, second, smem) -> jax.Array:
    """`−(I + Q)⁻¹ X (I + P)⁻¹`, the inverse's corner under its first block, in rows 32 to 63 of float32 `[64, 32]`,
    0 above. X is in those rows of `corner [64, 32]`, which is 0 above, split by `linear_tiles.split`; the others are
    results of `_of_blocks`.

    The products take float32 as three products of bfloat16, whose error is some 2^-16: T would lose a digit to one.

    Args:
        smem: bfloat16 `[1, 64, 64]`, in shared memory. Nobody reads it any more when this begins; who writes to it
            next has met all warps.
    """
    inner = _product(corner, linear_tiles.split(first), smem, 0)
    plgpu.commit_smem()  # all warps have met since that read `smem`
    return -_product(linear_tiles.split(second), linear_tiles.split(inner), smem, 1)


def _product(a, b, smem, half):
    """`a @ b[rows]` of split `[64, 32]` each, where rows are the first or second 32; through `smem`."""
    for i, part in enumerate(b):
        memory.stmatrix(part, smem, i * HALF)
    plgpu.commit_smem()
    right = ptx.matrix(lambda _: smem, TILE_ROWS, ptx.SLAB, along_rows=True).part(half, rows=HALF)
    high, low = (right.columns_from(jnp.int32(i * HALF), columns=HALF) for i in range(2))
    result = ptx.zeros(HALF)
    for left, right in ((a[1], high), (a[0], low), (a[0], high)):
        result = ptx.wgmma_rs(result, left, right)
    (result,) = ptx.wgmma_wait_group(0, result)
    return result

"""The inverse of a unit triangular matrix of 64 rows, by substitution; as in `memory`, with an equivalent in plain jnp
for interpret mode.
"""

import jax
import jax.numpy as jnp
from jax import lax

from jattn.pallas._compat import arith, interpreting, llvm, plgpu, utils
from jattn.pallas.hopper import ptx
from jattn.pallas.hopper.linear_tiles import _ld_shared, _offset, _st_shared
from jattn.pallas.hopper.ptx import TILE_ROWS, WGMMA, i32, integer

PITCH = 72  # floats from one row of the scratch to the next: pairs of columns of 4 rows meet all banks


def unit_lower_inverse(lower, scratch) -> jax.Array:
    """`(I + lower)⁻¹` for strictly lower `lower [64, 64]`, float32 in the WGMMA layout, by substitution in float32.

    Two threads have a column of the inverse, x: x_i = δ_ic − Σ_j lower_ij x_j. One holds entries 8m to 8m + 3 of it and
    sums over these j, the other 8m + 4 to 8m + 7; both then know x_i. Powers of `lower`, which a series takes, explode
    where keys repeat.

    Args:
        scratch: float32 `[64, PITCH]` in shared memory, that nobody else reads or writes meanwhile.
    """
    if interpreting():
        eye = jnp.eye(TILE_ROWS, dtype=jnp.float32)

        def row(i, inverse):
            new = eye[i] - jnp.dot(lower[i], inverse, precision=lax.Precision.HIGHEST)
            return jnp.where(jnp.arange(TILE_ROWS, dtype=jnp.int32)[:, None] == i, new, inverse)

        return lax.fori_loop(0, TILE_ROWS, row, jnp.zeros_like(eye))

    @plgpu.inline_mgpu(arg_types=(WGMMA, plgpu.RefType()), return_type=ptx.array_type(TILE_ROWS))
    def invert(_, lower, scratch):
        start = llvm.ptrtoint(i32(), utils.memref_ptr(scratch))
        row, column = ptx.lane_position()
        tile = _offset(_offset(start, row, 4 * PITCH), column, 4)
        words = ptx.scalars(lower)
        for i in range(0, len(words), 2):
            _st_shared(tile, 4 * (8 * ptx.row_of(i) * PITCH + ptx.column_of(i)), words[i : i + 2])
        utils.warpgroup_barrier()
        thread = arith.remui(ptx.thread_index(), integer(128))
        mine, half = arith.divui(thread, integer(2)), arith.remui(thread, integer(2))
        entries = _substitute(_offset(start, half, 16), mine, half)
        utils.warpgroup_barrier()
        place = _offset(_offset(start, half, 16 * PITCH), mine, 4)
        for i, entry in enumerate(entries):
            _st_shared(place, 4 * PITCH * (8 * (i // 4) + i % 4), [entry])
        utils.warpgroup_barrier()
        found = []
        for i in range(0, len(words), 2):
            found += _ld_shared(tile, 4 * (8 * ptx.row_of(i) * PITCH + ptx.column_of(i)), 2)
        return ptx.from_scalars(found)

    return invert(lower, scratch)


def _substitute(start, column, half) -> list:
    """This thread's 32 entries of its column; `start` is where its 4 of the first 8 columns of the matrix lie."""
    zero, entries = ptx.constant(0), [ptx.constant(0)] * (TILE_ROWS // 2)
    is_half = [arith.cmpi(arith.CmpIPredicate.eq, half, integer(h)) for h in range(2)]
    for i in range(TILE_ROWS):
        eight, rest = divmod(i, 8)
        sums = [zero] * 4
        for m in range(eight + (rest > 0)):
            four = _ld_shared(start, 4 * (i * PITCH + 8 * m), 4)
            for j in range(4 if m < eight else min(4, rest)):
                sums[j] = ptx.fma(four[j], entries[4 * m + j], sums[j])
        total = ptx.add(ptx.add(sums[0], sums[1]), ptx.add(sums[2], sums[3]))
        total = ptx.add(total, ptx.shfl_bfly(total, 1))
        unit = arith.select(arith.cmpi(arith.CmpIPredicate.eq, column, integer(i)), ptx.constant(1), zero)
        at = 4 * eight + rest % 4
        entries[at] = arith.select(is_half[rest // 4], ptx.sub(unit, total), entries[at])
    return entries

"""The states that enter the pieces of a sequence, on compute capability 9.0: between the two launches of a scan over
pieces (see `linear_pieces`). With the maps of the first launch, one after another,

    S ← M S + S_own

in float32: both M and S are split into two of bfloat16, and of the four products of these the last, 2⁻¹⁶ of the first,
is left out. A thread block has 32 columns of one head's S, a warpgroup 64 rows of them in registers; M comes from HBM
into registers as the left operand, and S, the right one, is handed on through shared memory:

    a warpgroup    M, S_own of the next piece → registers | three products | S → HBM, shared memory | meet

Floor: a thread block reads 80 KB a piece, some 0.7 µs from L2, and multiplies for as long. Measured on an H200: 3.1 µs
a piece while ptxas had put the loads between the last products; since they come before the first one, 1.8 predicted.
"""

import jax
import jax.numpy as jnp
from jax import lax

from jattn.pallas._compat import kernel, pl, plgpu
from jattn.pallas.hopper import linear_tiles, memory, ptx
from jattn.pallas.hopper.lists import i32

COLUMNS = 32  # of D, of a thread block
_ROWS = ptx.TILE_ROWS  # of H, of a warpgroup


def _kernel(
    plan,
    reverse: bool,
    # inputs (HBM)
    maps,  # float32 [B * (pieces - 1) * N, D + H, H]: S_own and M, transposed
    state,  # [B, N, H, D] or [B, N, D, H], or None
    # output (HBM)
    entering,  # float32 [B * pieces * N, H, 1, D]
    *,
    # shared memory
    right,  # S, [2, 2, 1, H, 64]: of this piece and the next; its upper bits, the rest
    # barriers
    written,  # S of the next piece is there
):
    block, rows = lax.axis_index("block"), lax.axis_index("warpgroup") * _ROWS
    parts, steps = plan.D // COLUMNS, plan.pieces - 1
    column, rest = lax.rem(block, i32(parts)) * COLUMNS, lax.div(block, i32(parts))
    head, batch = lax.rem(rest, i32(plan.N)), lax.div(rest, i32(plan.N))
    upper, lower = (
        ptx.matrix(lambda i, half=half: right.at[i, half], plan.H, COLUMNS, along_rows=True, slots_apart=2)
        for half in range(2)
    )

    def load(i):
        """S_own and M of the i-th map on the way."""
        i = jnp.minimum(i, steps - 1)
        index = (batch * steps + (steps - 1 - i if reverse else i)) * plan.N + head
        own = linear_tiles.ld_global_tile(maps, index, column, rows, COLUMNS, transposed=True)
        return own, linear_tiles.ld_global_tile(maps, index, i32(plan.D), rows, plan.H, transposed=True)

    def write(i, S):
        """S after i maps; its upper and lower bits for the products that follow."""
        for half, part in enumerate(linear_tiles.split(S)):
            memory.stmatrix(part, right.at[lax.rem(i, i32(2)), half, :, pl.ds(rows, _ROWS)], 0)
        plgpu.commit_smem()  # which waits for all that is on its way
        plgpu.barrier_arrive(written)
        piece = steps - i if reverse else i
        memory.st_global(entering, ((batch * plan.pieces + piece) * plan.N + head, rows, i32(0)), S, i32(_ROWS), column)

    def step(i, given):
        own, (high, low) = given[0], linear_tiles.split(given[1])
        following, slot = load(i + 1), lax.rem(i, i32(2))  # behind the wait ptxas would load between products
        plgpu.barrier_wait(written)
        products = (
            ptx.wgmma_rs(own, high, upper.at(slot)),
            ptx.wgmma_rs(ptx.zeros(COLUMNS), high, lower.at(slot)),
            ptx.wgmma_rs(ptx.zeros(COLUMNS), low, upper.at(slot)),
        )
        first, *others = ptx.wgmma_wait_group(0, *products)
        write(i + 1, first + (others[0] + others[1]))
        return following

    given = load(i32(0))
    if state is None:
        S = ptx.zeros(COLUMNS)
    elif plan.options.state_layout == "kv":
        S = memory.ld_global(state, batch, head, rows, column, COLUMNS)
    else:
        S = memory.ld_global(state, batch, head, column, rows, COLUMNS, transposed=True)
    write(i32(0), S)
    # Traced: the index of a loop over a constant number is int64 in 64-bit mode.
    lax.fori_loop(0, jnp.minimum(batch, 0) + steps, step, given)
    plgpu.barrier_wait(written)


def launch(plan, maps, state, *, reverse: bool = False, interpret=False):
    """Runs the kernel: the states that enter the pieces, float32 `[B * pieces * N, H, D]`.

    Args:
        plan: a `linear_plan.Plan` with at least two pieces.
        maps: what the scan returns with plan.maps, of all pieces but the last.
        state: what enters the first piece, in the layout of the plan's options; None is 0.
        reverse: from the last piece to the first, as a backward goes: maps are those of all pieces but the first,
            `state` is what leaves the last, and the results are what leaves each piece.
    """
    given = [maps] if state is None else [maps, state]

    def body(*refs, **allocations):
        _kernel(plan, reverse, *(refs if len(given) == 2 else (refs[0], None, refs[1])), **allocations)

    warpgroups = plan.H // _ROWS
    (found,) = kernel(
        body,
        name="jattn_linear_combine",
        out_type=(jax.ShapeDtypeStruct((plan.B * plan.pieces * plan.N, plan.H, 1, plan.D), jnp.float32),),
        scratch=dict(
            right=plgpu.SMEM((2, 2, 1, plan.H, ptx.SLAB), plan.dtype, transforms=ptx.TRANSFORMS),
            written=plgpu.Barrier(num_arrivals=warpgroups),
        ),
        grid={"block": plan.B * plan.N * (plan.D // COLUMNS)},
        warpgroups=warpgroups,
        interpret=interpret,
        approximate=False,
    )(*given)
    return found.reshape(-1, plan.H, plan.D)

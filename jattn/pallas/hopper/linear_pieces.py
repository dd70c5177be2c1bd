"""A scan over the chunks of a sequence, cut into pieces that run side by side where heads are too few to fill a device.

    maps        of every piece but the last, what it does to a state: S ↦ M S + S_own        a launch of the scan
    combine     the states that enter the pieces, each from the one before, in float32       `linear_combine`
    scan        over all pieces at once, from these states                                   a launch of the scan

A piece is a fixed number of chunks, so that later tokens change no bit of earlier ones. A backward goes from the last
piece to the first alike: D ↦ Mᵀ D + D_own, of every piece but the first.
"""

import dataclasses

from jattn.pallas.hopper import linear_combine
from jattn.pallas.hopper.linear_plan import COLUMNS, Plan, warpgroups_of


def in_pieces(walk, plan: Plan, state, *, multiprocessors: int, reverse: bool = False, interpret=False):
    """What `walk(plan, state)`, a launch over the sequence, returns, cut into the pieces of the plan.

    Args:
        state: what enters the sequence, in the layout of the call, or None; `walk` gets that, or with pieces what
            `linear_combine` returns, or None for maps.
        reverse: the walk is a backward's, which begins at the end: state is what leaves the sequence.
    """
    if plan.pieces == 1:
        return walk(dataclasses.replace(plan, piece=None), state)
    of = lambda pieces, columns: warpgroups_of(plan.B * pieces * plan.N, columns, multiprocessors)  # noqa: E731
    pieces, columns = plan.pieces, plan.D + plan.H
    mapping = dict(maps=True, save=False, checkpoints=0, warpgroups=of(pieces - 1, columns))
    maps = walk(dataclasses.replace(plan, **mapping), None)
    entering = linear_combine.launch(plan, maps, state, reverse=reverse, interpret=interpret)
    return walk(dataclasses.replace(plan, warpgroups=of(pieces, plan.D)), entering)


def piece_of(heads: int, D: int) -> int | None:
    """Chunks of a piece, or None where heads fill the device without; bits may depend on it, so that it knows nothing
    of how long sequences are.

    Where pieces fill the device a head's chunk takes 41 ns (one decay a head) or 43 (one a channel) in maps and scan
    together, and a walk takes 1.1 or 1.25 µs for each chunk however few heads there are: pieces pay up to some 25 heads
    of D = 128, and save a fifth and more up to 20. Short pieces fill the device from short sequences on, long ones
    combine less often.
    Measured on an H200, all kernels, in ms, of pieces of 8, 16, 32 and 64 chunks, and uncut:

        by head      T = 8192,  8 heads      0.125   0.095   0.106           0.166
        by head      T = 32768, 16 heads             0.616   0.550   0.516   0.724
        by channel   T = 8192,  8 heads      0.180   0.149                   0.233
        by channel   T = 65536, 16 heads             1.991   1.874   1.821   2.320
    """
    warpgroups = heads * -(-D // COLUMNS)
    if warpgroups > 40:
        return None
    return 16 if warpgroups <= 16 else 32

"""A scan over the chunks of a sequence, cut into pieces that run side by side where heads are too few to fill a device.

    maps        of every piece but the last, what it does to a state: S ↦ M S + S_own        a launch of the scan
    combine     the states that enter the pieces, each from the one before, in float32       `linear_combine`
    scan        over all pieces at once, from these states                                   a launch of the scan

A piece is a fixed number of chunks, so that later tokens change no bit of earlier ones.
"""

import dataclasses

from jattn.pallas.hopper import linear_combine
from jattn.pallas.hopper.linear_plan import COLUMNS, Plan, warpgroups_of


def scan(walk, plan: Plan, inputs, prepared, *, multiprocessors: int, interpret=False):
    """`(out, final state, states entering chunks or None)` of `walk`, `linear_scan` or `linear_channel_scan`."""
    if plan.pieces == 1:
        return walk.launch(dataclasses.replace(plan, piece=None), inputs, prepared, interpret=interpret)
    plan = dataclasses.replace(plan, warpgroups=warpgroups_of(plan.B * plan.pieces * plan.N, plan.D, multiprocessors))
    maps = walk.launch(of_maps(plan, multiprocessors), inputs, prepared, interpret=interpret)
    entering = linear_combine.launch(plan, maps, inputs.initial_state, interpret=interpret)
    return walk.launch(plan, dataclasses.replace(inputs, initial_state=entering), prepared, interpret=interpret)


def of_maps(plan: Plan, multiprocessors: int) -> Plan:
    """The plan of the launch that computes the maps of pieces."""
    walked, columns = plan.B * (plan.pieces - 1) * plan.N, plan.D + plan.H
    return dataclasses.replace(
        plan, maps=True, save=False, stages=3, warpgroups=warpgroups_of(walked, columns, multiprocessors)
    )


def piece_of(heads: int, D: int) -> int | None:
    """Chunks of a piece, or None where heads fill the device without; bits may depend on it, so that it knows nothing
    of how long sequences are.

    Of heads that fill the device by pieces a chunk takes 41 ns (with one decay a head) or 43 (one a channel) in maps and
    scan together, and a walk 1.1 or 1.25 µs however few heads: pieces pay up to some 25 heads of D = 128, and a fifth
    of the time and more up to 20. Short pieces fill the device from short sequences on, long ones combine less often.
    Measured on an H200, all kernels, in ms, of pieces of 8, 16, 32 and 64 chunks, and uncut:

        by head      T = 8192,  8 heads      0.125   0.095   0.106           0.166
        by head      T = 32768, 16 heads             0.616   0.550   0.516   0.724
        by channel   T = 8192,  8 heads      0.180   0.149                   0.233
        by channel   T = 65536, 16 heads             1.991   1.874   1.821   2.320
    """
    warpgroups = heads * (D // COLUMNS)
    if warpgroups > 40:
        return None
    return 16 if warpgroups <= 16 else 32

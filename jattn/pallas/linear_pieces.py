"""A scan over the chunks of a sequence, cut into pieces that run side by side where heads are too few to fill a device.

    maps        of every piece but the last, what it does to a state: S ↦ M S + S_own        a launch of the scan
    combine     the states that enter the pieces, each from the one before, in float32
    scan        over all pieces at once, from these states                                  a launch of the scan

A piece is a fixed number of chunks, so that later tokens change no bit of earlier ones.
"""

import dataclasses

import jax.numpy as jnp
from jax import lax

from jattn.pallas.hopper.linear_plan import Plan, warpgroups_of


def scan(walk, plan: Plan, inputs, prepared, *, multiprocessors: int, interpret=False):
    """`(out, final state, states entering chunks or None)` of `walk`, `linear_scan` or `linear_channel_scan`."""
    if plan.pieces == 1:
        return walk.launch(dataclasses.replace(plan, piece=None), inputs, prepared, interpret=interpret)
    maps = walk.launch(plan_of_maps(plan, multiprocessors), inputs, prepared, interpret=interpret)
    entering = combine(maps, inputs.initial_state, plan.options.state_layout)
    inputs = dataclasses.replace(inputs, initial_state=entering.reshape(-1, *entering.shape[2:]))
    return walk.launch(plan, inputs, prepared, interpret=interpret)


def piece_of(heads: int, H: int, D: int) -> int | None:
    """Chunks of a piece, or None where heads fill the device without."""
    return None


def plan_of_maps(plan: Plan, multiprocessors: int) -> Plan:
    walked = plan.B * (plan.pieces - 1) * plan.N
    return dataclasses.replace(
        plan, maps=True, save=False, stages=3, warpgroups=warpgroups_of(walked, plan.D + plan.H, multiprocessors)
    )


def combine(maps, state, layout: str, *, reverse: bool = False):
    """The states that enter the pieces, float32 [B, pieces, N, H, D] (or, as `layout` has it, [.., D, H]).

    Args:
        maps: those of all pieces but the last, float32 [B, pieces − 1, N, D + H, H], transposed: S_own and then M.
        state: what enters the first piece, [B, N, H, D] or [B, N, D, H]; None is 0.
        reverse: of a backward, whose maps are D ↦ Mᵀ D + D_own: maps of all pieces but the first, and what leaves the
            last; the results are what leaves each piece.
    """
    H = maps.shape[-1]
    D = maps.shape[-2] - H
    own, matrix = jnp.moveaxis(maps[..., :D, :], 1, 0), jnp.moveaxis(maps[..., D:, :], 1, 0)
    S = jnp.zeros(own.shape[1:], jnp.float32)
    if state is not None:
        S = (jnp.swapaxes(state, -1, -2) if layout == "kv" else state).astype(jnp.float32)
    product = "...di,...ji->...dj" if reverse else "...dj,...ji->...di"

    def step(S, piece):
        own, matrix = piece
        new = jnp.einsum(product, S, matrix, precision=lax.Precision.HIGHEST) + own
        return new, new

    _, rest = lax.scan(step, S, (own, matrix), reverse=reverse, unroll=True)
    found = jnp.concatenate([rest, S[None]] if reverse else [S[None], rest])
    found = jnp.moveaxis(found, 0, 1)
    return jnp.swapaxes(found, -1, -2) if layout == "kv" else found

"""The kernels of linear attention on what one device has of a call, forward and backward.

    linear_widths       head dims are made multiples of 64
    linear_sequences    sequences begin chunks of their own, segments become decays
    kernels             one decay a head, or one a channel
"""

import dataclasses

import jax
import jax.numpy as jnp

from jattn._linear import Residuals
from jattn.pallas._compat import mapped_in_turn
from jattn.pallas.hopper import (
    linear_backward,
    linear_channel_backward,
    linear_channel_prepare,
    linear_channel_scan,
    linear_pieces,
    linear_prepare,
    linear_scan,
)
from jattn.pallas.hopper.linear_plan import Inputs, Plan, warpgroups_of
from jattn.pallas.linear_sequences import checkpoints_of, laid_out
from jattn.pallas.linear_widths import resized, state_sizes, widened

_KERNELS = (linear_prepare, linear_scan), (linear_channel_prepare, linear_channel_scan)  # by head, by channel
_BACKWARDS = linear_backward, linear_channel_backward


def forward(arrays, context, *, options, save, multiprocessors, interpret=False):
    """`(out, final state, checkpoints or None, Residuals or None)`; see `_linear`. States are float32.

    Args:
        save: keep residuals.
        multiprocessors: of the device.
        interpret: emulate the kernels on the CPU, with race detection.
    """
    by_channel, (H, D) = options.rule.decay == "channel", (arrays.query.shape[3], arrays.value.shape[3])
    inputs, plan, places = _laid_out(arrays, context, options, multiprocessors, save=save)
    wanted = None
    if context.checkpoints is not None:
        wanted = checkpoints_of(context.checkpoints, arrays.query.shape[1], plan.chunks, places)
        plan = dataclasses.replace(plan, checkpoints=context.checkpoints.shape[1])
        inputs = dataclasses.replace(inputs, slots=wanted.slots if plan.checkpoints else None)

    def run(inputs):
        prepare, scan = _KERNELS[by_channel]
        how = dict(multiprocessors=multiprocessors, interpret=interpret)
        prepared = prepare.launch(plan, inputs, **how)
        walk = lambda plan, state: scan.launch(  # noqa: E731
            plan, dataclasses.replace(inputs, initial_state=state), prepared, interpret=interpret
        )
        out, state, written, states = linear_pieces.in_pieces(walk, plan, inputs.initial_state, **how)
        scores = prepared.scores if by_channel else None
        return out, state, written, Residuals(states, scores, prepared.inverse) if save else None

    out, state, written, rest = mapped_in_turn(run, unrolled=bool(interpret))(inputs)
    out = resized(out if places is None else places.gathered(out), D)
    state, written = (resized(x, *state_sizes(H, D, options)) for x in (state, written))
    rest = dataclasses.replace(rest, states=resized(rest.states, H, D)) if save else None
    if wanted is not None:
        written = wanted.picked(written, initial_state(arrays, context, options))
    return out, state, written, rest


def backward(arrays, context, rest, dout, dfinal, *, options, multiprocessors, interpret=False):
    """`Gradients`, from what `forward` kept and the cotangents of out and, float32, the final state. Those of queries
    and keys are each value head's own."""
    by_channel, (H, D) = options.rule.decay == "channel", (arrays.query.shape[3], arrays.value.shape[3])
    inputs, plan, places = _laid_out(arrays, context, options, multiprocessors)

    def run(*operands):
        how = dict(multiprocessors=multiprocessors, interpret=interpret)
        found = _BACKWARDS[by_channel].launch(plan, *operands, **how)
        g, beta = found.g if options.rule.decay else None, found.beta if options.rule.delta else None
        return dataclasses.replace(found, g=g, beta=beta)

    dout, dfinal = resized(dout, plan.D), resized(dfinal, *state_sizes(plan.H, plan.D, options))
    rest = dataclasses.replace(rest, states=resized(rest.states, plan.H, plan.D))
    dout = dout if places is None else places.spread(dout)
    found = mapped_in_turn(run, unrolled=bool(interpret))(inputs, rest, dout, dfinal)
    state = resized(found.initial_state, *state_sizes(H, D, options))
    if places is not None:
        found = jax.tree.map(places.gathered, dataclasses.replace(found, initial_state=None))
    return dataclasses.replace(
        found, query=resized(found.query, H), key=resized(found.key, H), value=resized(found.value, D),
        g=resized(found.g, H) if by_channel else found.g, initial_state=state,
    )  # fmt: skip


def sequences(arrays, context) -> int:
    """How many have an initial state and a final one."""
    return arrays.query.shape[0] if context.cu_seqlens is None else context.cu_seqlens.shape[0] - 1


def initial_state(arrays, context, options):
    """float32, in the layout of the call."""
    if arrays.initial_state is not None:
        return arrays.initial_state.astype(jnp.float32)
    H, (N, D) = arrays.query.shape[3], arrays.value.shape[2:]
    return jnp.zeros((sequences(arrays, context), N, *state_sizes(H, D, options)), jnp.float32)


def _laid_out(arrays, context, options, multiprocessors, **how):
    """`(Inputs, Plan, Places or None)` of a call; `how` are fields of the plan."""
    packed = None if context.cu_seqlens is None else sequences(arrays, context)
    arrays, options, places = laid_out(widened(arrays, options), context, options)
    plan = plan_of(arrays, options, multiprocessors, sequences=packed, **how)
    inputs = _inputs(arrays)
    return inputs if places is None else dataclasses.replace(inputs, walks=places.walks), plan, places


def plan_of(arrays, options, multiprocessors, *, sequences=None, **how) -> Plan:
    (B, T, K, H), (N, D) = arrays.query.shape, arrays.value.shape[2:]
    how |= dict(piece=None if options.config is None else options.config.piece, sequences=sequences)
    warpgroups = warpgroups_of((sequences or B) * N, D, multiprocessors)
    return Plan(B=B, T=T, N=N, K=K, H=H, D=D, options=_compiled(options), warpgroups=warpgroups, **how)


def _inputs(arrays) -> Inputs:
    wide = lambda x: None if x is None else x.astype(jnp.float32)  # noqa: E731
    return Inputs(
        query=arrays.query, key=arrays.key, value=arrays.value, g=_narrow(arrays.g), beta=_narrow(arrays.beta),
        scale=None if arrays.scale is None else wide(arrays.scale).reshape(1), A_log=wide(arrays.A_log),
        dt_bias=wide(arrays.dt_bias), initial_state=arrays.initial_state,
    )  # fmt: skip


def _narrow(x):
    """The kernels read no float64."""
    return x.astype(jnp.float32) if x is not None and x.dtype == jnp.float64 else x


def _compiled(options):
    """Options without what dispatch chose."""
    return dataclasses.replace(options, implementation=None, config=None, backward=None, elsewhere=None, sums=None)

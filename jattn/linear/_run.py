"""Runs a described call of linear attention: dispatch, and its derivative."""

import dataclasses
import functools

import jax
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding, PartitionSpec

from jattn import _check, _dispatch
from jattn._platform import only_on
from jattn._varying import vary, varying_axes


def results(call, return_final_state, *, implementation, config):
    """What an op returns: out alone, or a tuple of all that was asked for, with the caller's batch axes."""
    _check.flag(return_final_state, "return_final_state")
    out, state, checkpoints = run(call, implementation=implementation, config=config)
    found = [out.reshape(*call.batch, *out.shape[1:])]
    found += [state.reshape(*call.sequences, *state.shape[1:])] if return_final_state else []
    found += [] if checkpoints is None else [checkpoints.reshape(*call.sequences, *checkpoints.shape[1:])]
    return tuple(found) if len(found) > 1 else out.reshape(*call.batch, *out.shape[1:])


def run(call, *, implementation, config):
    """`(out [B, T, N, D], final state, checkpoints or None)` of a described call."""
    options = _dispatch.resolve(call.problem, call.options, implementation, config)
    arrays, context = vary((call.arrays, call.context), varying_axes((call.arrays, call.context)))
    with jax.named_scope(f"jattn.{call.problem.op}"):
        return _in_auto_mode(functools.partial(_attend, options), arrays, context)


def run_step(call, *, implementation, config):
    """`(out [B, T, N, D], state)`."""
    options = _dispatch.resolve(call.problem, call.options, implementation, config)
    arrays = vary(call.arrays, varying_axes(call.arrays))
    with jax.named_scope(f"jattn.{call.problem.op}"):
        return _in_auto_mode_step(functools.partial(_step, options), arrays)


def _in_auto_mode(attend, arrays, context):
    """Calls `attend`; under a mesh with Explicit axes, leaves the sharding of its loops to the compiler and gives the
    results that of the value, batch and heads."""
    sharding = jax.typeof(arrays.value).sharding
    if not sharding.mesh.explicit_axes:
        return attend(arrays, context)
    batch, tokens, heads, last = sharding.spec
    sequences = None if context.cu_seqlens is not None else batch
    specs = ((batch, tokens, heads, last), (sequences, heads, None, None), (sequences, None, heads, None, None))
    out = tuple(NamedSharding(sharding.mesh, PartitionSpec(*s)) for s in specs)
    if context.checkpoints is None:
        out = (*out[:2], None)
    return jax.sharding.auto_axes(attend, axes=sharding.mesh.explicit_axes, out_sharding=out)(arrays, context)


def _in_auto_mode_step(step, arrays):
    value, state = (jax.typeof(x).sharding for x in (arrays.arrays.value, arrays.state))
    if not value.mesh.explicit_axes:
        return step(arrays)
    return jax.sharding.auto_axes(step, axes=value.mesh.explicit_axes, out_sharding=(value, state))(arrays)


@functools.partial(jax.jit, static_argnums=0)
@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(options, arrays, context):
    return _forward(options, arrays, context, rest=False)[0]


def _attend_forward(options, arrays, context):
    if options.rule.delta and arrays.query.dtype == "float16":
        raise NotImplementedError(
            f"gradients of {options.rule.op} in float16 are not implemented: its states may exceed 65504; use bfloat16"
        )
    (out, *states), rest = _forward(options, arrays, context, rest=True)
    # Named so that checkpoint policies can keep them: with the residuals, the backward runs no forward again.
    out, rest = checkpoint_name(out, "jattn_out"), checkpoint_name(rest, "jattn_residuals")
    return (out, *states), (arrays, context, rest)


def _attend_backward(options, saved, cotangents):
    return _backward(options, saved, cotangents), None


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _backward(options, saved, cotangents):
    here = functools.partial(_backward_on, options.backward or options)
    if options.elsewhere is None or options.backward is not None:
        return here(saved, cotangents)
    elsewhere = functools.partial(_backward_on, options.elsewhere)
    return lax.platform_dependent(saved, cotangents, default=elsewhere, **{_module(options).PLATFORM: here})


def _backward_on(options, saved, cotangents):
    return _module(options).backward(saved[0], saved[1], options, saved[2], cotangents)


@jax.custom_jvp
def _undifferentiated(arrays):
    return arrays


@_undifferentiated.defjvp
@_backward.defjvp
def _refuse_second_derivative(*_):
    raise NotImplementedError(
        "jattn ops have first derivatives in reverse mode only: second derivatives are not implemented"
    )


_attend.__wrapped__.defvjp(_attend_forward, _attend_backward)


def _forward(options, arrays, context, rest):
    """`(results, rest)`, on whichever platform this is lowered for."""
    here = functools.partial(_forward_on, options, rest)
    if options.elsewhere is None:
        return here(arrays, context)
    elsewhere = functools.partial(_forward_on, options.elsewhere, rest)
    return lax.platform_dependent(arrays, context, default=elsewhere, **{_module(options).PLATFORM: here})


def _forward_on(options, rest, arrays, context):
    module = _module(options)
    if module.PLATFORM is not None:
        arrays = _undifferentiated(arrays)
        query = only_on(module.PLATFORM, arrays.query, f"implementation={options.implementation!r}")
        arrays = dataclasses.replace(arrays, query=query)
    return module.forward(arrays, context, options, rest=rest)


@functools.partial(jax.jit, static_argnums=0)
@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _step(options, step):
    here = functools.partial(_step_on, options)
    if options.elsewhere is None:
        return here(step)
    elsewhere = functools.partial(_step_on, options.elsewhere)
    return lax.platform_dependent(step, default=elsewhere, **{_step_module(options).PLATFORM: here})


def _step_on(options, step):
    module = _step_module(options)
    if module.PLATFORM is not None:
        query = only_on(module.PLATFORM, step.arrays.query, f"implementation={options.implementation!r}")
        step = dataclasses.replace(step, arrays=dataclasses.replace(step.arrays, query=query))
    return module.forward(step, options)


@_step.__wrapped__.defjvp
def _refuse_derivatives(options, primals, tangents):
    raise NotImplementedError(f"{options.rule.op}_step has no derivatives: {options.rule.op} has")


def _step_module(options):
    return _dispatch.module(f"{options.rule.op}_step", options.implementation)


def _module(options):
    return _dispatch.module(options.rule.op, options.implementation)

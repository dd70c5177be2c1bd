"""`explain`: what a call would run on, without running it."""

import dataclasses
import functools
import inspect
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from jattn import _dispatch, sequence, sequence_cache
from jattn._mapped import in_auto_mode
from jattn._mesh import _sharding
from jattn.attention import attention
from jattn.attention import prepare as prepare_attention
from jattn.decode import decode_attention
from jattn.decode import prepare as prepare_decode_attention
from jattn.linear import decay, delta, steps
from jattn.paged import paged_attention
from jattn.paged import prepare as prepare_paged_attention
from jattn.ragged import prepare as prepare_ragged_attention
from jattn.ragged import ragged_attention

__all__ = ["explain"]

#: op -> itself, which says what arguments there are, and what describes a call of it.
_OPS = {
    "attention": (attention, prepare_attention),
    "ragged_attention": (ragged_attention, prepare_ragged_attention),
    "decode_attention": (decode_attention, prepare_decode_attention),
    "paged_attention": (paged_attention, prepare_paged_attention),
    "linear.kda": (delta.kda, delta.prepare_kda),
    "linear.gated_delta_rule": (delta.gated_delta_rule, delta.prepare_gated_delta_rule),
    "linear.delta_rule": (delta.delta_rule, delta.prepare_delta_rule),
    "linear.gla": (decay.gla, decay.prepare_gla),
    "linear.simple_gla": (decay.simple_gla, decay.prepare_simple_gla),
    "linear.linear_attention": (decay.linear_attention, decay.prepare_linear_attention),
    "linear.kda_step": (steps.kda_step, steps.prepare_kda_step),
    "linear.gated_delta_rule_step": (steps.gated_delta_rule_step, steps.prepare_gated_delta_rule_step),
    "linear.delta_rule_step": (steps.delta_rule_step, steps.prepare_delta_rule_step),
    "linear.gla_step": (steps.gla_step, steps.prepare_gla_step),
    "linear.simple_gla_step": (steps.simple_gla_step, steps.prepare_simple_gla_step),
    "linear.linear_attention_step": (steps.linear_attention_step, steps.prepare_linear_attention_step),
}


def explain(
    *args, op: str = "attention", implementation: str | None = None, config: Any = None, **kwargs
) -> "_dispatch.Explanation | sequence.StrategyChoice":
    """Which implementation and tile config the call `op(*args, **kwargs)` gets, and why the others were refused.

    Args:
        *args, **kwargs: the arguments of the op; arrays may be `jax.ShapeDtypeStruct`. Nothing runs.
        op: "attention", "ragged_attention", "decode_attention" or "paged_attention"; "linear.kda" and the other ops of
            `jattn.linear`, steps too ("linear.kda_step"); or of those over many devices "ring_attention",
            "allgather_attention", "ulysses_attention", "hybrid_attention", "sequence_attention",
            "sequence_decode_attention" or "sequence_paged_attention".
        implementation, config: as in the op.

    Returns:
        An object with `implementation` (None when nothing can run the call), `config`, `refused` (name -> reason) and
        a readable `repr`. Over many devices one with `strategy`, `reasons` (strategy -> reason, that of what runs
        included), and `on_device`, such an object for what a device computes at once.

    Raises:
        ValueError, TypeError: what the op would raise. Over many devices also NotImplementedError.

    Example:
        `print(jattn.explain(q, k, v, is_causal=True))`
        `print(jattn.explain(q, k, v, g, beta, op="linear.kda", qk_l2norm=True))`
        `print(jattn.explain(q, k, v, op="ring_attention", axis="sp", mesh=mesh))`
    """
    if op not in (*_OPS, *_SPREAD):
        raise ValueError(f"op={op!r} is unknown; choose from {', '.join(map(repr, (*_OPS, *_SPREAD)))}")
    if op in _OPS:  # what describes it may take arguments of its kin too
        inspect.signature(_OPS[op][0]).bind(*args, **kwargs)
        kwargs.pop("return_final_state", None)
    kwargs.pop("return_residual", None)
    leaves, structure = jax.tree.flatten((args, kwargs))
    if op in _SPREAD and kwargs.get("mesh") is None:  # the arrays of `describe` do not tell
        meshes = (mesh for x in leaves for mesh, spec in [_sharding(x)] if spec is not None)
        leaves, structure = jax.tree.flatten((args, kwargs | dict(mesh=next(meshes, None))))
    # NumPy's scalars compile in, as Python's do.
    is_array = [hasattr(x, "shape") and hasattr(x, "dtype") and not isinstance(x, np.generic) for x in leaves]
    found = []

    def describe(arrays):
        arrays = iter(arrays)
        args, kwargs = structure.unflatten([next(arrays) if a else x for x, a in zip(leaves, is_array, strict=True)])
        if op in _OPS:
            found.append(_dispatch.explain(_OPS[op][1](*args, **kwargs).problem, implementation, config))
        else:
            found.append(_SPREAD[op](*args, implementation=implementation, config=config, **kwargs))

    jax.eval_shape(describe, [x for x, a in zip(leaves, is_array, strict=True) if a])
    return found[0]


# Over many devices.


def _single(named, *args, axis=None, layout=None, mesh=None, **options):
    """`named` None is the strategy that the arguments of `sequence_attention` name, or what it chooses."""
    asked = options.pop("strategy", "auto") if named is None else named
    static, arrays, mesh = sequence._describe("ring", sequence._names(axis), layout, mesh, *_five(*args), **options)
    choice = sequence._choose(static, arrays, mesh)
    if asked != "auto":
        if asked not in sequence._SINGLE:
            choices = ", ".join(map(repr, ("auto", *sequence._SINGLE)))
            raise ValueError(f"strategy={asked!r} is unknown; choose from {choices}")
        reasons = {n: f"auto would take it: {w}" if n == choice.strategy else w for n, w in choice.reasons.items()}
        choice = sequence.StrategyChoice(asked, reasons | {asked: "asked for"})
    return _with_device(choice, static, arrays, mesh)


def _hybrid(*args, axes, layout=None, mesh=None, **options):
    static, arrays, mesh = sequence._describe("hybrid", tuple(axes), layout, mesh, *_five(*args), **options)
    ring, heads = axes
    reason = f"asked for: a ring over {ring!r}, tokens for heads over {heads!r}"
    return _with_device(sequence.StrategyChoice("hybrid", {"hybrid": reason}), static, arrays, mesh)


def _five(query, key, value, bias=None, mask=None):
    return query, key, value, bias, mask


def _with_device(choice, static, arrays, mesh):
    static = dataclasses.replace(static, strategy=choice.strategy, axes=sequence._axes(choice.strategy, static.names))
    if mesh is None:
        specs = None
    else:
        tokens = P(*[None] * (arrays["query"].ndim - 3), static.names if len(static.names) > 1 else static.names[0])
        specs = sequence._specs(arrays, tokens[-1], tokens)
        sequence._layout_of(
            static,
            [1 if a is None else mesh.shape[a] for a in static.axes],
            *(arrays[n].shape[-3] for n in ("query", "key")),
        )
    problem = _problem_on_device(lambda x: sequence._planned(static, x)[-1], arrays, mesh, specs, static.names)
    device = _dispatch.explain(problem, static.implementation, static.config)
    return dataclasses.replace(choice, on_device=device)


def _cache(prepare, *args, **options):
    call = prepare(*args, **options)
    static = call.static
    problem = _problem_on_device(
        lambda x: sequence_cache.device_call(static, x).problem, call.arrays, call.mesh, call.specs, (static.axis,)
    )
    reason = "keys stay where they are; one message brings (out, lse) of every device to all"
    device = _dispatch.explain(problem, static.implementation, static.config)
    return sequence.StrategyChoice("merge", {"merge": reason}, device)


def _problem_on_device(find, arrays, mesh, specs, names):
    """What dispatch is asked inside the `shard_map` of a call."""
    if mesh is None:
        return find(arrays)
    found = []

    def body(x):
        found.append(find(x))
        return ()

    jax.shard_map(body, mesh=in_auto_mode(mesh), in_specs=(specs,), out_specs=(), axis_names=set(names))(arrays)
    return found[0]


_SPREAD = {
    "ring_attention": functools.partial(_single, "ring"),
    "allgather_attention": functools.partial(_single, "allgather"),
    "ulysses_attention": functools.partial(_single, "ulysses"),
    "hybrid_attention": _hybrid,
    "sequence_attention": functools.partial(_single, None),
    "sequence_decode_attention": functools.partial(_cache, sequence_cache.prepare_decode),
    "sequence_paged_attention": functools.partial(_cache, sequence_cache.prepare_paged),
}

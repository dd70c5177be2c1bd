"""`implementation="xla"` of the `*_step` ops: a few tokens of many sequences, on states that stay where they are."""

import dataclasses
from typing import Any

import jax.numpy as jnp

from jattn._linear import Arrays
from jattn._problem import accumulator
from jattn.reference.linear_operands import TOKENS, operands
from jattn.reference.linear_recurrent import tokens

PLATFORM = None


@dataclasses.dataclass(frozen=True)
class StepConfig:
    """There is nothing to choose."""


def why_not(problem) -> str | None:
    """Plain JAX runs everything that passes the argument checks."""
    return None


def why_not_here() -> str | None:
    return None


def choose(problem, config) -> StepConfig:
    if not isinstance(config, StepConfig | None):
        raise TypeError(f"config={config!r} is not a jattn.reference.linear_step.StepConfig, which xla takes")
    return StepConfig()


def forward(step, options):
    """`(out [B, T, N, D], state)`: every state that is named is read once and written once."""
    arrays, state = step.arrays, step.state
    B, T = arrays.query.shape[:2]
    exists = jnp.ones((B, T), bool)
    if step.lengths is not None:
        exists = jnp.arange(T, dtype=jnp.int32) < step.lengths[:, None]
    S, at = state, None
    if step.indices is not None:
        at = jnp.where((step.indices >= 0) & (step.indices < state.shape[0]), step.indices, state.shape[0])
        exists = exists & (at < state.shape[0])[:, None]
        S = jnp.take(state, at, axis=0, mode="fill", fill_value=0)
    S = _layout(S, options).astype(accumulator(arrays.query.dtype))
    x = operands(_rows(arrays, exists), exists[:, None], options)
    S, out = tokens(S, x.chunk(0), None)
    S = _layout(S, options).astype(state.dtype)
    return jnp.moveaxis(out, 1, 2).astype(options.out_dtype), S if at is None else state.at[at].set(S, mode="drop")


def _rows(arrays, exists) -> Arrays:
    """Tokens [B, 1, T, ...], 0 where there are none."""
    found: dict[str, Any] = {}
    for name in TOKENS:
        x = getattr(arrays, name)
        if x is not None:
            found[name] = jnp.where(exists.reshape(*exists.shape, *[1] * (x.ndim - 2)), x, 0)[:, None]
    return dataclasses.replace(arrays, **found)


def _layout(state, options):
    return jnp.swapaxes(state, -1, -2) if options.state_layout == "vk" else state

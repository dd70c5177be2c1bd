"""`implementation="mosaic"` of the `*_step` ops of linear attention: what the Hopper kernel needs, and its reasons.

The kernel is in `jattn.pallas.hopper.linear_step`.
"""

import dataclasses

import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jattn._varying import unvary, vary, varying_axes
from jattn.pallas.attention import PLATFORM, why_not_here
from jattn.pallas.hopper.linear_step import Inputs, Plan, columns_of, launch
from jattn.pallas.linear_partition import divided, letters

__all__ = ["PLATFORM", "StepConfig", "choose", "forward", "why_not", "why_not_here"]

_LARGEST_HEAD = 256


@dataclasses.dataclass(frozen=True)
class StepConfig:
    """There is nothing to choose."""


def choose(problem, config) -> StepConfig:
    if not isinstance(config, StepConfig | None):
        raise TypeError(f"config={config!r} is not a jattn.pallas.linear_step.StepConfig, which mosaic takes")
    return StepConfig()


def why_not(problem) -> str | None:
    """The reason why this kernel cannot run the problem, or None."""
    if problem.dtype not in ("bfloat16", "float16", "float32"):
        return f"runs bfloat16, float16 and float32, not {problem.dtype}"
    if problem.state_dtype not in ("float32", "bfloat16"):
        return f"states must be float32 or bfloat16, not {problem.state_dtype}"
    for letter, width in (("H", problem.H), ("D", problem.D)):
        if not isinstance(width, int) or width % 32 or width > _LARGEST_HEAD:
            return f"head dims must be multiples of 32 up to {_LARGEST_HEAD}, not {letter}={width}"
    symbolic = [f"{name}={n}" for name in "BTN" if not isinstance(n := getattr(problem, name), int)]
    return f"needs static shapes, not {symbolic[0]}" if symbolic else None


def forward(step, options, *, interpret=False):
    """`(out [B, T, N, D], state)` of a described call (see `_linear`).

    Args:
        interpret: emulate the kernel on the CPU, with race detection.
    """
    axes = varying_axes(step)
    step = unvary(step)  # the body of a kernel is not about them
    if 0 in step.arrays.value.shape or 0 in step.state.shape:
        out = jnp.zeros(step.arrays.value.shape, options.out_dtype)
        return vary((out, step.state), axes)

    def part(arrays, state, indices, lengths):
        (B, T, K, H), (N, D) = arrays.query.shape, arrays.value.shape[2:]
        plan = Plan(
            B=B, T=T, N=N, K=K, H=H, D=D, places=state.shape[0], options=_compiled(options), columns=columns_of(H, D)
        )  # fmt: skip
        wide = lambda x: None if x is None else x.astype(jnp.float32)  # noqa: E731
        inputs = Inputs(
            query=arrays.query, key=arrays.key, value=arrays.value, g=_narrow(arrays.g), beta=_narrow(arrays.beta),
            scale=None if arrays.scale is None else wide(arrays.scale).reshape(1), A_log=wide(arrays.A_log),
            dt_bias=wide(arrays.dt_bias), indices=indices, lengths=lengths,
        )  # fmt: skip
        return launch(plan, inputs, state, interpret=interpret)

    operands = step.arrays, step.state, step.indices, step.lengths
    if interpret:
        return vary(part(*operands), axes)
    batch = "b" if step.indices is None else None  # every device needs the places of all sequences in a pool
    rows = None if step.lengths is None else P(batch)
    state, indices = P(batch, "n", None, None), None if step.indices is None else P(None)
    axes_of, results = (letters(step.arrays, batch), state, indices, rows), (P(batch, None, "n", None), state)
    return vary(divided(part, operands, axes_of, results), axes)


def _narrow(x):
    """The kernel reads no float64."""
    return x.astype(jnp.float32) if x is not None and x.dtype == jnp.float64 else x


def _compiled(options):
    """Options without what dispatch chose."""
    return dataclasses.replace(options, implementation=None, config=None, backward=None, elsewhere=None, sums=None)

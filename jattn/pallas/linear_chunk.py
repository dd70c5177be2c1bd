"""`implementation="mosaic"` of the delta rules and of GLA: what the Hopper kernels need, and their reasons.

The kernels are in `jattn.pallas.hopper`: `linear_prepare` and `linear_scan` for one decay a head,
`linear_channel_prepare` and `linear_channel_scan` for one a channel. The backward is another implementation's.
"""

import dataclasses

import jax.numpy as jnp

from jattn._linear import Context, Residuals
from jattn._varying import unvary, vary, varying_axes
from jattn.pallas import linear_pieces
from jattn.pallas._compat import mapped_in_turn
from jattn.pallas.attention import PLATFORM, why_not_here
from jattn.pallas.hopper import linear_channel_prepare, linear_channel_scan, linear_prepare, linear_scan
from jattn.pallas.hopper.linear_plan import Inputs, Plan, warpgroups_of
from jattn.reference import linear

__all__ = ["PLATFORM", "ChunkConfig", "choose", "forward", "why_not", "why_not_here"]

_LARGEST_H, _LARGEST_D = 128, 256
_MULTIPROCESSORS = 132
_KERNELS = (linear_prepare, linear_scan), (linear_channel_prepare, linear_channel_scan)  # by head, by channel


@dataclasses.dataclass(frozen=True)
class ChunkConfig:
    """How the scan is spread over a device.

    Args:
        piece: chunks of 64 tokens of each piece that a sequence is cut into, which run side by side; None: not cut.
    """

    piece: int | None = None

    def __post_init__(self):
        if self.piece is not None and (not isinstance(self.piece, int) or self.piece <= 0):
            raise ValueError(f"piece={self.piece!r} must be a positive int or None")


def choose(problem, config) -> ChunkConfig:
    """Sequences are cut where there are too few heads; however long they are, since bits must not depend on that."""
    if config is None:
        return ChunkConfig(linear_pieces.piece_of(problem.B * problem.N, problem.H, problem.D))
    if not isinstance(config, ChunkConfig):
        raise TypeError(f"config={config!r} is not a jattn.pallas.linear_chunk.ChunkConfig, which mosaic takes")
    return config


def why_not(problem) -> str | None:
    """The reason why these kernels cannot run the problem, or None."""
    if problem.mode != "chunk":
        return f"has mode='chunk' alone, not mode={problem.mode!r}"
    if problem.dtype != "bfloat16":
        return f"runs bfloat16, not {problem.dtype}"
    if problem.sequences is not None:
        return "has no packed sequences (cu_seqlens)"
    if problem.resets:
        return "has no segment_ids"
    if problem.checkpoints:
        return "has no checkpoints"
    states = {problem.state_dtype, problem.initial_state} - {None, "float32", "bfloat16"}
    if states:
        return f"states must be float32 or bfloat16, not {states.pop()}"
    for letter, width, most in (("H", problem.H, _LARGEST_H), ("D", problem.D, _LARGEST_D)):
        if not isinstance(width, int) or width % 64 or width > most:
            return f"head dims must be multiples of 64, H to {_LARGEST_H} and D to {_LARGEST_D}, not {letter}={width}"
    symbolic = [f"{name}={n}" for name in "BTN" if not isinstance(n := getattr(problem, name), int)]
    return f"needs static shapes, not {symbolic[0]}" if symbolic else None


def forward(arrays, context, options, *, rest=True, interpret=False, multiprocessors=_MULTIPROCESSORS):
    """`((out, final state, None), Residuals or None)`; see `_linear` for the arguments.

    Args:
        rest: whether a backward follows; residuals="recompute" leaves it nothing.
        interpret: emulate the kernels on the CPU, with race detection.
        multiprocessors: of the device.
    """
    axes = varying_axes(arrays)
    arrays = unvary(arrays)  # the body of a kernel is not about them
    (B, T, K, H), (N, D) = arrays.query.shape, arrays.value.shape[2:]
    if 0 in (B, T):  # nothing to launch
        options = dataclasses.replace(options, config=linear.SpanConfig(1))
        return vary(linear.forward(arrays, Context(), options, rest=rest), axes)
    save, by_channel = rest and options.residuals == "save", options.rule.decay == "channel"
    plan = Plan(
        B=B, T=T, N=N, K=K, H=H, D=D, options=_compiled(options), warpgroups=warpgroups_of(B * N, D, multiprocessors),
        stages=2 if save or by_channel else 3, save=save,
        piece=None if options.config is None else options.config.piece,
    )  # fmt: skip

    def run(inputs):
        prepare, scan = _KERNELS[by_channel]
        how = dict(multiprocessors=multiprocessors, interpret=interpret)
        prepared = prepare.launch(plan, inputs, **how)
        out, state, states = linear_pieces.scan(scan, plan, inputs, prepared, **how)
        scores = prepared.scores if save and by_channel else None
        return out, state, Residuals(states, scores, prepared.inverse) if save else None

    out, state, saved = mapped_in_turn(run, unrolled=bool(interpret))(_inputs(arrays))
    return vary(((out.astype(options.out_dtype), state.astype(options.state_dtype), None), saved), axes)


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

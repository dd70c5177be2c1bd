"""`implementation="mosaic"` of linear attention: what the Hopper kernels need, and their reasons.

`linear_launch` runs the kernels, which are in `jattn.pallas.hopper`: `linear_prepare` and `linear_scan` for one decay a
head, `linear_channel_prepare` and `linear_channel_scan` for one a channel; their backwards are `linear_backward` and
`linear_channel_backward`.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jattn._gates import activated, log_decays
from jattn._linear import CHUNK, Context, Residuals
from jattn._varying import unvary, vary, varying_axes
from jattn.pallas import linear_launch
from jattn.pallas.attention import PLATFORM, why_not_here
from jattn.pallas.hopper.linear_pieces import piece_of
from jattn.pallas.hopper.linear_plan import Gradients
from jattn.pallas.linear_partition import divided, letters, letters_of
from jattn.pallas.linear_sequences import with_own_gates

__all__ = ["PLATFORM", "ChunkConfig", "backward", "choose", "forward", "why_not", "why_not_backward", "why_not_here"]

_LARGEST_H, _LARGEST_D = 128, 256
_MULTIPROCESSORS = 132


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
    packed = problem.sequences is not None
    if config is None:
        return ChunkConfig(None if packed else piece_of(problem.B * problem.N, problem.D))
    if not isinstance(config, ChunkConfig):
        raise TypeError(f"config={config!r} is not a jattn.pallas.linear_chunk.ChunkConfig, which mosaic takes")
    if packed and config.piece is not None:
        raise ValueError(f"piece={config.piece}: packed sequences are not cut into pieces")
    return config


def why_not(problem) -> str | None:
    """The reason why these kernels cannot run the problem, or None."""
    if problem.mode != "chunk":
        return f"has mode='chunk' alone, not mode={problem.mode!r}"
    if problem.dtype != "bfloat16":
        return f"runs bfloat16, not {problem.dtype}"
    states = {problem.state_dtype, problem.initial_state} - {None, "float32", "bfloat16"}
    if states:
        return f"states must be float32 or bfloat16, not {states.pop()}"
    for letter, width, most in (("H", problem.H, _LARGEST_H), ("D", problem.D, _LARGEST_D)):
        if not isinstance(width, int) or width > most:
            return f"head dims must be at most H={_LARGEST_H} and D={_LARGEST_D}, not {letter}={width}"
    sizes = {name: getattr(problem, name) for name in (*"BTN", "sequences", "checkpoints")}
    symbolic = [f"{name}={n}" for name, n in sizes.items() if not isinstance(n, int | None)]
    return f"needs static shapes, not {symbolic[0]}" if symbolic else None


def forward(arrays, context, options, *, rest=True, interpret=False, multiprocessors=_MULTIPROCESSORS):
    """`((out, final state, checkpoints or None), Residuals or None)`; see `_linear` for the arguments.

    Args:
        rest: whether a backward follows; residuals="recompute" leaves it nothing.
        interpret: emulate the kernels on the CPU, with race detection.
        multiprocessors: of the device.
    """
    axes = varying_axes((arrays, context))
    arrays, context = unvary((arrays, context))  # the body of a kernel is not about them
    save = rest and options.residuals == "save"
    if _nothing_to_launch(arrays, context):
        kept = _no_residuals(arrays, context, options) if save else None
        return vary((_untouched(arrays, context, options), kept), axes)
    part = functools.partial(
        linear_launch.forward, options=options, save=save, multiprocessors=multiprocessors, interpret=interpret
    )
    of, arrays_of = _letters(arrays, context)
    matrices = of.saved if options.rule.decay == "channel" else None, of.saved if options.rule.delta else None
    results = of.value, of.initial_state, None if context.checkpoints is None else of.saved
    results = *results, Residuals(of.saved, *matrices) if save else None
    operands = arrays, context
    out, *states, saved = part(*operands) if interpret else divided(part, operands, arrays_of, results)
    states = (None if x is None else x.astype(options.state_dtype) for x in states)
    return vary(((out.astype(options.out_dtype), *states), saved), axes)


def _nothing_to_launch(arrays, context):
    return 0 in arrays.query.shape[:2] or linear_launch.sequences(arrays, context) == 0


def _untouched(arrays, context, options):
    """The results where no sequence has a token."""
    state, offsets = linear_launch.initial_state(arrays, context, options), context.checkpoints
    state = state.astype(options.state_dtype)
    if offsets is not None:
        beside = offsets[..., None, None, None] == 0
        offsets = jnp.where(beside, state[:, None], jnp.nan).astype(options.state_dtype)
    return jnp.zeros(arrays.value.shape, options.out_dtype), state, offsets


def _no_residuals(arrays, context, options):
    """Of no chunks, or of nothing that a backward reads."""
    (B, T, _, H), (N, D) = arrays.query.shape, arrays.value.shape[2:]
    n = 0 if context.cu_seqlens is not None else -(-T // CHUNK)  # packed, there are no tokens or no sequences
    of_chunks = lambda *last: jnp.zeros((B, n, N, *last), jnp.bfloat16)  # noqa: E731
    scores, inverse = options.rule.decay == "channel", options.rule.delta
    squares = (of_chunks(CHUNK, CHUNK) if wanted else None for wanted in (scores, inverse))
    return Residuals(of_chunks(H, D), *squares)


def why_not_backward(problem) -> str | None:
    if problem.checkpoints is not None:
        return "has no gradient of checkpoints"
    return "has no gradient of a traced scale" if problem.traced_scale else None


def backward(arrays, context, options, rest, cotangents, *, interpret=False, multiprocessors=_MULTIPROCESSORS):
    """Gradients of every array in `arrays`, in their dtypes, from the cotangents of the results of `forward`."""
    nothing = _nothing_to_launch(arrays, context)
    if rest is None and not nothing:
        again = dataclasses.replace(options, residuals="save")
        _, rest = forward(arrays, context, again, interpret=interpret, multiprocessors=multiprocessors)
    axes = varying_axes((arrays, context, rest, cotangents))
    arrays, context, rest, (dout, dfinal, _) = unvary((arrays, context, rest, cotangents))
    if nothing:
        found = jax.tree.map(jnp.zeros_like, arrays)
        state = None if arrays.initial_state is None else dfinal.astype(arrays.initial_state.dtype)
        return vary(dataclasses.replace(found, initial_state=state), axes)
    by_channel = options.rule.decay == "channel"
    part = functools.partial(
        linear_launch.backward, options=options, multiprocessors=multiprocessors, interpret=interpret
    )
    operands = arrays, context, rest, dout.astype(arrays.query.dtype), dfinal.astype(jnp.float32)
    of, arrays_of = _letters(arrays, context)
    axes_of = *arrays_of, jax.tree.map(lambda _: of.saved, rest), of.value, of.initial_state
    g = None if options.rule.decay is None else of.value if by_channel else of.beta
    beta = of.beta if options.rule.delta else None
    results = Gradients(of.value, of.value, of.value, g, beta, of.initial_state)
    found = part(*operands) if interpret else divided(part, operands, axes_of, results)
    if context.resets is not None and options.rule.decay:  # there the decay is not what the gate says
        resets = context.resets[..., None, None] if by_channel else context.resets[..., None]
        found = dataclasses.replace(found, g=jnp.where(resets, 0, found.g))
    K = arrays.query.shape[2]
    found = dataclasses.replace(found, query=_group_sums(found.query, K), key=_group_sums(found.key, K))
    found = _with_gates(with_own_gates(arrays, context), options, found)
    return vary(jax.tree.map(lambda d, x: d.astype(x.dtype), found, arrays), axes)


def _letters(arrays, context):
    """`(letters by name, those of arrays and context)`, see `linear_partition`."""
    batch = "b" if context.cu_seqlens is None else None
    given = dict(cu_seqlens=P(None), resets=P(batch, None), checkpoints=P(batch, None))
    given = {name: None if getattr(context, name) is None else axes for name, axes in given.items()}
    return letters_of(batch), (letters(arrays, batch), Context(**given))


def _group_sums(x, K):
    """[B, T, N, H] -> [B, T, K, H]."""
    B, T, N, H = x.shape
    return x if N == K else jnp.sum(x.reshape(B, T, K, N // K, H), axis=3)


def _with_gates(arrays, options, found):
    """The gradients of `arrays`, through the gate and the activation of beta."""
    g, beta, parameters = found.g, found.beta, {}
    if options.gate is not None:
        names = "g", "A_log", "dt_bias"
        raw = {name: None if (x := getattr(arrays, name)) is None else x.astype(jnp.float32) for name in names}
        decays = lambda raw: log_decays(dataclasses.replace(arrays, **raw), options, jnp.float32)  # noqa: E731
        (parameters,) = jax.vjp(decays, raw)[1](g)
        g = parameters.pop("g")
    if options.beta_activation is not None:
        raw = arrays.beta.astype(jnp.float32)
        (beta,) = jax.vjp(lambda raw: activated(raw, options.beta_activation), raw)[1](beta)
    state = None if arrays.initial_state is None else found.initial_state
    tokens = dict(query=found.query, key=found.key, value=found.value, g=g, beta=beta, initial_state=state)
    return dataclasses.replace(arrays, scale=None, **tokens, **parameters)

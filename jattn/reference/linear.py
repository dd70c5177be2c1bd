"""`implementation="xla"` of the linear-attention ops: one walk over chunks of 64 tokens, in either mode.

    for each span of chunks:          rows of the span, gathered (a chunk never holds tokens of two packed sequences)
        operands                      norm, gate, scale: linear_operands
        chunk or recurrent            linear_chunk, linear_recurrent: out, state; between chunks the ends of sequences
    backward: the same spans in reverse, from the states that entered the chunks

Nothing longer than a span is ever in float32 but the states; memory is O(T).
"""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jattn._linear import CHUNK, Arrays, Residuals
from jattn._problem import accumulator
from jattn._varying import vary, varying_axes
from jattn.reference import linear_chunk, linear_recurrent
from jattn.reference.linear_operands import TOKENS, operands

PLATFORM = None
_MODES = {"chunk": linear_chunk, "recurrent": linear_recurrent}


@dataclasses.dataclass(frozen=True)
class SpanConfig:
    """Chunks that are computed side by side, where they do not wait for one another."""

    span: int

    def __post_init__(self):
        if not isinstance(self.span, int) or self.span <= 0:
            raise ValueError(f"span={self.span!r} must be a positive int")


def why_not(problem) -> str | None:
    """Plain JAX runs everything that passes the argument checks."""
    return None


def why_not_here() -> str | None:
    return None


def why_not_backward(problem) -> str | None:
    return None


def choose(problem, config) -> SpanConfig:
    """The same for every shape, because bits must not depend on the batch or on what comes later.

    On two busy CPU cores 2 and 4 are fastest (kda B1 T2048 N4 H64 forward: 58, 32, 32, 82 ms for 1, 2, 4, 8), and short
    sequences pay for whole spans; on a GPU larger ones launch less often.
    """
    if config is not None:
        if not isinstance(config, SpanConfig):
            raise TypeError(f"config={config!r} is not a jattn.reference.linear.SpanConfig, which xla takes")
        return config
    return SpanConfig(4 if problem.mode == "chunk" else 1)


def forward(arrays, context, options, *, rest=True):
    """`((out, final state, checkpoints or None), Residuals or None)`; see `_linear` for the arguments.

    out is [B, T, N, D] of `options.out_dtype`, the states [M, N, H, D] and [M, n, N, H, D] of `options.state_dtype`.
    `rest` asks for residuals, which there are none of with residuals="recompute".
    """
    results, saved = _forward(arrays, context, options, rest and options.residuals == "save")
    return results, saved


def backward(arrays, context, options, rest, cotangents):
    """Gradients of every array in `arrays`, in their dtypes, from the cotangents of the results of `forward`."""
    if rest is None:
        _, rest = _forward(arrays, context, options, True)
    walk = Walk(arrays, context, options)
    dout, dfinal, dcheckpoints = cotangents
    carry, dstates = walk.start_backward(dfinal, dcheckpoints)

    def body(carry, xs):
        (carry, totals), (span, chunks, dstates) = carry, xs
        rows = walk.rows(arrays, span)
        saved = walk.saved(rest, chunks)
        x, pull = jax.vjp(lambda rows: operands(rows, span.exists(walk.T), options), rows)
        dout_span = jnp.moveaxis(walk.gather(dout, span).astype(walk.dtype), 3, 1)
        carry, dx = walk.mode.backward(x, walk.runs(span), walk, carry, span.chunks, *saved, dout_span, dstates)
        (drows,) = pull(dx)
        totals = jax.tree.map(jnp.add, totals, _parameters(drows))
        return (carry, totals), _tokens_of(drows)

    totals = jax.tree.map(lambda p: walk.full(p.shape, 0), _parameters(arrays))
    xs = (walk.table, walk.numbers(), dstates)
    (carry, totals), drows = lax.scan(body, (carry, totals), xs, reverse=True)
    gradients = dataclasses.replace(
        arrays,
        **{name: walk.tokens(d) for name, d in drows.items()},
        **totals,
        initial_state=None if arrays.initial_state is None else walk.initial_gradient(carry, dcheckpoints),
    )
    return jax.tree.map(lambda d, x: d.astype(x.dtype), gradients, arrays)


def _forward(arrays, context, options, save):
    walk = Walk(arrays, context, options)
    storage = _storage(arrays.query.dtype)

    def body(carry, span):
        x = operands(walk.rows(arrays, span), span.exists(walk.T), options)
        carry, out, entering, states, saved = walk.mode.forward(x, walk.runs(span), walk, carry, span.chunks, storage)
        entering = entering.astype(storage) if options.mode == "chunk" else entering
        out = jnp.moveaxis(out, 1, 3).astype(options.out_dtype)
        return carry, (out, states, (entering, saved) if save else None)

    carry, (out, states, saved) = lax.scan(body, walk.start(), walk.table)
    return (walk.tokens(out), walk.final(carry), walk.checkpoints(states)), walk.residuals(*saved) if save else None


def _storage(dtype):
    """What is kept for the backward has the inputs' precision, and the exponents of float32."""
    return accumulator(dtype) if dtype in (jnp.float32, jnp.float64) else jnp.dtype(jnp.bfloat16)


_PARAMETERS = ("scale", "A_log", "dt_bias")


def _parameters(arrays):
    return {name: x for name in _PARAMETERS if (x := getattr(arrays, name)) is not None}


def _tokens_of(arrays):
    return {name: x for name in TOKENS if (x := getattr(arrays, name)) is not None}


# The walk: which tokens a chunk has, and how states pass the ends of sequences.


class Chunks(NamedTuple):
    """The chunks of a span, when packed: int32 and bool [s]."""

    sequence: Any
    first: Any  # of its sequence
    last: Any


class Span(NamedTuple):
    rows: Any  # int32 [s, C]: addresses of tokens; T where there is none
    chunks: Any  # Chunks or None

    def exists(self, T):
        return self.rows < T


class Walk:
    """The chunks of one call. A carry is (state [B, N, H, D], what every sequence ended with [M, N, H, D] or None)."""

    def __init__(self, arrays, context, options):
        self.arrays, self.context, self.options = arrays, context, options
        self.B, self.T, self.K, self.H = arrays.query.shape
        self.N, self.D = arrays.value.shape[2:]
        self.dtype = accumulator(arrays.query.dtype)
        self.mode = _MODES[options.mode]
        self.packed = context.cu_seqlens is not None
        self.M = context.cu_seqlens.shape[0] - 1 if self.packed else self.B
        span = options.config.span
        if self.packed:
            self.table, self.starts, self.lengths = _packed_table(context.cu_seqlens, self.T, span)
        else:
            n = math.ceil(self.T / (span * CHUNK))
            rows = jnp.arange(n * span * CHUNK, dtype=jnp.int32).reshape(n, span, CHUNK)
            self.table = Span(jnp.minimum(rows, self.T), None)
        self.table = vary(self.table, varying_axes(arrays.query))
        h0 = arrays.initial_state
        self.h0 = self.full((self.M, self.N, self.H, self.D), 0) if h0 is None else self._state(h0)

    def full(self, shape, value, dtype=None):
        """Constants vary over the same mesh axes as the operands, which loop carries inside shard_map must."""
        return vary(jnp.full(shape, value, dtype or self.dtype), varying_axes(self.arrays.query))

    def gather(self, x, span):
        """[B, T, ...] -> [B, s, C, ...], 0 where there is no token: what lies in memory there is never read."""
        return _take(x, span.rows)

    def rows(self, arrays, span) -> Arrays:
        parameters = {name: x.astype(self.dtype) for name, x in _parameters(arrays).items()}
        tokens = {name: self.gather(x, span) for name, x in _tokens_of(arrays).items()}
        return dataclasses.replace(arrays, initial_state=None, **parameters, **tokens)

    def runs(self, span):
        """int32 [B, 1, s, C]: how many resets there were in the chunk; None without any."""
        if self.context.resets is None:
            return None
        resets = self.gather(self.context.resets, span).astype(jnp.int32)
        return jnp.cumsum(resets, axis=-1, dtype=jnp.int32)[:, None]

    def tokens(self, x):
        """[spans, B, s, C, ...] -> [B, T, ...]; tokens that no sequence has are 0."""
        rest = x.shape[4:]
        if not self.packed:
            spans, B, chunks, rows = x.shape[:4]
            return jnp.moveaxis(x, 0, 1).reshape(B, spans * chunks * rows, *rest)[:, : self.T]
        rows, x = self.table.rows.reshape(-1), x.reshape(-1, *rest)
        return self.full((self.T, *rest), 0, x.dtype).at[rows].set(x, mode="drop")[None]

    # Forward.

    def start(self):
        return (self.full((1, *self.h0.shape[1:]), 0), self.h0) if self.packed else (self.h0, None)

    def enter(self, carry, chunk):
        """The state that a chunk starts from."""
        S, _ = carry
        return jnp.where(chunk.first, _of(self.h0, chunk), S) if self.packed else S

    def leave(self, carry, chunk, S):
        """`(carry, state for checkpoints)` after a chunk."""
        _, ends = carry
        ends = _put(ends, chunk.sequence, chunk.last, S) if self.packed else None
        return (S, ends), S if self.context.checkpoints is not None else None

    def final(self, carry):
        return self._stored(carry[1] if self.packed else carry[0])

    def checkpoints(self, states):
        """[M, n, N, H, D] from the states after chunks, [spans, s, B, N, H, D]; NaN where there is no such token."""
        if states is None:
            return None
        states = states.reshape(math.prod(states.shape[:2]), *states.shape[2:])
        at, batch, valid, start = self._places()
        found = jnp.broadcast_to(self.h0[:, None], (*at.shape, *self.h0.shape[1:]))
        if states.shape[0]:
            found = jnp.where(_beside(start, found), found, states[at, batch])
        return self._stored(jnp.where(_beside(valid, found), found, jnp.nan))

    def _places(self):
        """Chunk and batch row whose state a checkpoint is, int32 [M, n]; whether it exists; whether it is the start."""
        offsets = self.context.checkpoints
        lengths = self.lengths[:, None] if self.packed else self.T
        valid = (offsets >= 0) & (offsets <= lengths) & (offsets % CHUNK == 0)
        first = self.starts[:, None] if self.packed else 0
        batch = jnp.zeros_like(offsets) if self.packed else jnp.arange(self.B, dtype=jnp.int32)[:, None] + 0 * offsets
        return jnp.where(valid, first + offsets // CHUNK - 1, 0), batch, valid, offsets == 0

    # Residuals.

    def numbers(self):
        """Numbers of the chunks of each span, int32 [spans, s]."""
        n, s = self.table.rows.shape[:2]
        numbers = vary(jnp.arange(n * s, dtype=jnp.int32).reshape(n, s), varying_axes(self.arrays.query))
        # What is saved for a chunk without tokens may be anything.
        return jnp.where(self.table.rows[..., 0] < self.T, numbers, n * s) if self.packed else numbers

    def residuals(self, entering, saved) -> Residuals:
        """From states [spans, s, B, N, H, D] and what the mode saved, [spans, B, N, s, C, C]."""
        n = math.ceil(self.T / CHUNK) + (self.M - 1 if self.packed and self.M and self.T else 0)
        join = lambda x: x.reshape(self.B, x.shape[1] * x.shape[2], *x.shape[3:])[:, :n]  # noqa: E731
        scores, inverse = (None, None) if saved is None else (saved.scores, saved.inverse)
        scores, inverse = (None if x is None else join(jnp.moveaxis(x, (1, 3), (0, 2))) for x in (scores, inverse))
        return Residuals(join(jnp.moveaxis(entering, 2, 0)), scores, inverse)

    def saved(self, rest, chunks):
        """Back again, for the chunks of one span."""
        rest = jax.tree.map(lambda x: _take(x, chunks), rest)
        own = [None if x is None else jnp.swapaxes(x, 1, 2) for x in (rest.scores, rest.inverse)]
        return jnp.moveaxis(rest.states, 1, 0), linear_chunk.Saved(*own)

    # Backward: the carry holds the gradient of the state, and those of the initial states.

    def start_backward(self, dfinal, dcheckpoints):
        """The carry, and the gradients that checkpoints add to the states after chunks, [spans, s, B, N, H, D]."""
        self.dfinal = self._state(dfinal)
        carry = (self.full((1, *self.h0.shape[1:]), 0), self.dfinal) if self.packed else (self.dfinal, None)
        if dcheckpoints is None:
            return carry, None
        at, batch, valid, start = self._places()
        n, s = self.table.rows.shape[:2]
        d = self._state(dcheckpoints)
        d = jnp.where(_beside(valid & ~start, d), d, 0)
        states = self.full((n * s, self.B, *self.h0.shape[1:]), 0).at[at, batch].add(d, mode="drop")
        return carry, states.reshape(n, s, *states.shape[1:])

    def enter_backward(self, carry, chunk, dstate):
        D, _ = carry
        if self.packed:
            D = jnp.where(chunk.last, _of(self.dfinal, chunk), D)
        return D if dstate is None else D + dstate

    def leave_backward(self, carry, chunk, D):
        _, starts = carry
        return D, _put(starts, chunk.sequence, chunk.first, D) if self.packed else None

    def initial_gradient(self, carry, dcheckpoints):
        d = carry[1] if self.packed else carry[0]
        if dcheckpoints is not None:
            _, _, valid, start = self._places()
            own = self._state(dcheckpoints)
            d = d + jnp.sum(jnp.where(_beside(valid & start, own), own, 0), axis=1)
        return self._layout(d)

    def _state(self, x):
        return self._layout(x).astype(self.dtype)

    def _stored(self, x):
        return self._layout(x).astype(self.options.state_dtype)

    def _layout(self, x):
        return jnp.swapaxes(x, -1, -2) if self.options.state_layout == "vk" else x


def _packed_table(cu, T, span):
    """`(Span [n, s, ...], first chunk [M], length [M])` of packed sequences; spare chunks have no rows."""
    M = cu.shape[0] - 1
    cu = jnp.clip(cu, 0, T)
    lengths = jnp.maximum(cu[1:] - cu[:-1], 0)
    counts = -(-lengths // CHUNK)
    ends = jnp.cumsum(counts, dtype=jnp.int32)
    chunks = math.ceil(T / CHUNK) + M - 1 if M and T else 0
    n = math.ceil(chunks / span)
    if n == 0:
        none = jnp.zeros((0, span), jnp.int32)
        empty = Span(jnp.zeros((0, span, CHUNK), jnp.int32), Chunks(none, none.astype(bool), none.astype(bool)))
        return empty, ends - counts, lengths
    chunk = jnp.arange(n * span, dtype=jnp.int32)
    sequence = jnp.minimum(jnp.searchsorted(ends, chunk, side="right").astype(jnp.int32), M - 1)
    index = chunk - (ends - counts)[sequence]
    used = chunk < ends[-1]
    place = index[:, None] * CHUNK + jnp.arange(CHUNK, dtype=jnp.int32)
    exists = used[:, None] & (place < lengths[sequence][:, None])
    rows = jnp.where(exists, cu[sequence][:, None] + place, T)
    found = Chunks(sequence, used & (index == 0), used & (index == counts[sequence] - 1))
    table = Span(rows, found)
    return jax.tree.map(lambda a: a.reshape(n, span, *a.shape[1:]), table), ends - counts, lengths


def _take(x, at):
    """x [B, n, ...] at places along axis 1, 0 where they are past its end."""
    if x.shape[1] == 0:
        return jnp.zeros((x.shape[0], *at.shape, *x.shape[2:]), x.dtype)
    return jnp.take(x, at, axis=1, mode="fill", fill_value=0)


def _of(states, chunk):
    """That of the chunk's sequence, [1, N, H, D]."""
    if states.shape[0] == 0:  # no sequences, and no chunks
        return jnp.zeros((1, *states.shape[1:]), states.dtype)
    return states[chunk.sequence][None]


def _put(states, sequence, condition, S):
    if states.shape[0] == 0:
        return states
    at = jnp.where(condition, sequence, states.shape[0])
    return states.at[at].set(S[0], mode="drop")


def _beside(condition, states):
    """[M, n] against [M, n, N, H, D]."""
    return condition.reshape(*condition.shape, *[1] * (states.ndim - condition.ndim))

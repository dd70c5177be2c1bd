"""Ends of sequences, for kernels of linear attention that know of whole chunks and of decays alone.

    segment_ids    a token that starts from an empty state has a decay that leaves nothing of it
    checkpoints    a chunk is told whether the state after it is wanted
    cu_seqlens     tokens are moved to where every sequence begins a chunk of its own, and results back; the walks over
                   chunks are told where each sequence begins, so that its bits are those of a packed call with it
                   alone; they begin with the longest, because a device waits for the last one

Segments and packed sequences need gates and β as numbers: they are computed here, in float32.

Prediction: moving the tokens of a forward reads and writes 3.1 kB a token and head where decays are by channel, 2.1 kB
where they are by head, at the 4.3 TB/s of a copy 0.19 and 0.13 ms for T = 8192 and 32 heads. Kernels that read packed
rows where they are would save that, but would have to clear rows of the next sequence in a last chunk.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jattn._gates import activated, log_decays
from jattn._linear import CHUNK, RULES
from jattn.pallas.hopper.linear_gates import LEAST

_TOKENS = "query", "key", "value", "g", "beta"
_GATED = {"linear.delta_rule": RULES["gated_delta_rule"], "linear.linear_attention": RULES["simple_gla"]}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Places:
    """Where tokens of packed sequences lie: in n = ceil(T / 64) + M - 1 chunks, those of each sequence in order."""

    token: Any  # int32 [n · 64]: which token is at a place; T where none is
    place: Any  # int32 [T]: where a token is; n · 64 for one that no sequence has
    first: Any  # int32 [M]: the first chunk of each sequence
    lengths: Any  # int32 [M]
    walks: Any  # int32 [3 · M]: see `Inputs`

    def spread(self, x):
        """[1, T, ...] -> [1, n · 64, ...], 0 where no token is: what lies in memory between sequences is not read."""
        return jnp.take(x, self.token, axis=1, mode="fill", fill_value=0)

    def gathered(self, x):
        """[1, n · 64, ...] -> [1, T, ...], 0 for tokens that no sequence has."""
        return jnp.take(x, self.place, axis=1, mode="fill", fill_value=0)


def places(cu_seqlens, T: int) -> Places:
    """Of `cu_seqlens [M + 1]`; whatever it holds, nothing lies outside the arrays."""
    M = cu_seqlens.shape[0] - 1
    n = -(-T // CHUNK) + M - 1
    cu = jnp.clip(cu_seqlens.astype(jnp.int32), 0, T)
    lengths = jnp.maximum(cu[1:] - cu[:-1], 0)
    counts = -(-lengths // CHUNK)
    ends = jnp.minimum(jnp.cumsum(counts, dtype=jnp.int32), n)
    first = jnp.concatenate([jnp.zeros(1, jnp.int32), ends[:-1]])
    chunk = jnp.arange(n, dtype=jnp.int32)
    sequence = jnp.sum(ends <= chunk[:, None], axis=1, dtype=jnp.int32)  # a search would be a loop of launches
    sequence = jnp.minimum(sequence, M - 1)
    index = ((chunk - first[sequence]) * CHUNK)[:, None] + jnp.arange(CHUNK, dtype=jnp.int32)
    token = jnp.where(index < lengths[sequence][:, None], cu[sequence][:, None] + index, T).reshape(-1)
    place = jnp.arange(n * CHUNK, dtype=jnp.int32)
    back = jnp.full(T, n * CHUNK, jnp.int32).at[token].set(place, mode="drop")
    order = jnp.argsort(first - ends).astype(jnp.int32)
    walks = jnp.stack([order, first[order], (ends - first)[order]], axis=1).reshape(-1)
    return Places(token, back, first, lengths, walks)


def with_own_gates(arrays, context):
    """The arrays with zeros for gates and β of tokens that no sequence has."""
    if context.cu_seqlens is None:
        return arrays
    found = places(context.cu_seqlens, arrays.query.shape[1])
    own = found.place < found.token.shape[0]
    zeroed = lambda x: None if x is None else jnp.where(own.reshape(1, -1, *[1] * (x.ndim - 2)), x, 0)  # noqa: E731
    return dataclasses.replace(arrays, g=zeroed(arrays.g), beta=zeroed(arrays.beta))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Checkpoints:
    """States that are wanted after so many tokens."""

    slots: Any  # int32 [B · n]: which of its sequence's checkpoints the state after a chunk is; -1 none
    slot: Any  # int32 [M, count]: where it is written; 0 where it is not
    starts: Any  # bool [M, count]: it is the initial state
    exists: Any  # bool [M, count]

    def picked(self, written, initial):
        """`[M, count, N, ·, ·]`, NaN where there is no such token."""
        beside = lambda a: a[..., None, None, None]  # noqa: E731
        if written is not None:
            written = jnp.take_along_axis(written, beside(self.slot), axis=1)
        found = initial[:, None] if written is None else jnp.where(beside(self.starts), initial[:, None], written)
        return jnp.where(beside(self.exists), found, jnp.nan)


def checkpoints_of(offsets, T: int, chunks: int, places: Places | None) -> Checkpoints:
    """Of `offsets [M, count]`; chunks are those of a row."""
    M, count = offsets.shape
    lengths = T if places is None else places.lengths[:, None]
    exists = (offsets >= 0) & (offsets <= lengths) & (offsets % CHUNK == 0)
    if places is None:
        first, total = jnp.arange(M, dtype=jnp.int32)[:, None] * chunks, M * chunks
    else:
        first, total = places.first[:, None], chunks
    at = jnp.where(exists & (offsets > 0), first + offsets // CHUNK - 1, total)
    order = jnp.broadcast_to(jnp.arange(count, dtype=jnp.int32), at.shape)
    slots = jnp.full(total, -1, jnp.int32).at[at].set(order, mode="drop")  # of equal offsets any
    slot = jnp.maximum(jnp.take(slots, at, mode="fill", fill_value=0), 0)
    return Checkpoints(slots, slot, offsets == 0, exists)


def laid_out(arrays, context, options):
    """`(arrays, options, Places or None)`: the call as the kernels take it."""
    if context.resets is None and context.cu_seqlens is None:
        return arrays, options, None
    arrays, options = _without_gates(arrays, options)
    if context.resets is not None:
        arrays, options = _restarted(arrays, context.resets, options)
    if context.cu_seqlens is None:
        return arrays, options, None
    found = places(context.cu_seqlens, arrays.query.shape[1])
    tokens = {name: found.spread(x) for name in _TOKENS if (x := getattr(arrays, name)) is not None}
    return dataclasses.replace(arrays, **tokens), options, found


def _without_gates(arrays, options):
    """The same call with log decays and β themselves, float32."""
    beta = None if arrays.beta is None else activated(arrays.beta.astype(jnp.float32), options.beta_activation)
    g = log_decays(arrays, options, jnp.float32)
    arrays = dataclasses.replace(arrays, g=g, beta=beta, A_log=None, dt_bias=None)
    return arrays, dataclasses.replace(options, gate=None, beta_activation=None)


def _restarted(arrays, resets, options):
    """The same call with a decay that leaves nothing of the state where a token starts anew."""
    N = arrays.value.shape[2]
    resets = jnp.broadcast_to(resets[..., None], (*resets.shape, N))
    if options.rule.decay is None:
        arrays = dataclasses.replace(arrays, g=jnp.where(resets, jnp.float32(LEAST), 0))
        return arrays, dataclasses.replace(options, rule=_GATED[options.rule.op])
    resets = resets[..., None] if options.rule.decay == "channel" else resets
    return dataclasses.replace(arrays, g=jnp.where(resets, jnp.float32(LEAST), arrays.g)), options

"""`decode_attention`: few queries a sequence against a long contiguous cache."""

import math
from typing import Any

import jax
import jax.numpy as jnp

from jattn import _check
from jattn._tile import Shape
from jattn.paged import Call, assemble, run
from jattn.quantize import Quantized

__all__ = ["decode_attention"]


def decode_attention(
    query,
    key,
    value,
    lengths=None,
    mask=None,
    *,
    scale=None,
    is_causal: bool = True,
    query_seq_lengths=None,
    local_window_size=None,
    logits_soft_cap: float | None = None,
    score_mod=None,
    sinks=None,
    return_residual: bool = False,
    implementation: str | None = None,
    config: Any = None,
):
    """Attention of the newest 1 to 64 tokens of each sequence over a long contiguous cache.

    The queries are the last tokens of their sequence, and their keys and values are in the cache already: query t of n
    sits at position length - n + t. The bits of a sequence depend on its own tokens alone: not on its neighbours, its
    row, the size of the cache or the padding.

    Args:
        query: `[*B, T, N, H]`, any number of batch axes, T from 1 to 64.
        key: `[*B, S, K, H]`, N a multiple of K; in the query's dtype, or a `Quantized`.
        value: `[*B, S, K, D]`, likewise.
        lengths: int `[*B]`, tokens in the cache, those of the queries included (None is S); what lies behind may hold
            anything.
        mask: a mask of `jattn.masks` made of positions: causal, window, prefix, lengths, tree, predicate, and what `&`,
            `|` and `~` make of them. It joins `is_causal` by `&`.
        query_seq_lengths: int `[*B]`: how many of the T queries there are; rows past it give output 0, lse -inf.
        is_causal, scale, local_window_size, logits_soft_cap, score_mod, sinks, return_residual, implementation, config:
            as in `paged_attention`.

    Returns:
        `[*B, T, N, D]` in the query's dtype; with `return_residual` also lse `[*B, T, N]`, the natural log of the
        softmax denominator (sink included), float32 (float64 for float64 inputs). `merge` takes both.

    Raises:
        ValueError, TypeError: an argument is wrong (the message names it and its value).
        NotImplementedError: a mask or modifier with rows or columns; a named implementation that cannot run; gradients.

    Example:
        >>> import jax, jax.numpy as jnp, jattn
        >>> k, v = jax.random.normal(jax.random.key(0), (2, 3, 1000, 4, 64))
        >>> q = jax.random.normal(jax.random.key(1), (3, 1, 8, 64))
        >>> jattn.decode_attention(q, k, v, jnp.array([1000, 17, 0])).shape
        (3, 1, 8, 64)

    Source: Flash-Decoding (Dao, Haziza, Massa, Sizov, 2023).
    """
    call, batch = _prepare(
        query, key, value, lengths, mask, scale=scale, is_causal=is_causal, query_seq_lengths=query_seq_lengths,
        local_window_size=local_window_size, logits_soft_cap=logits_soft_cap, score_mod=score_mod, sinks=sinks,
    )
    result = run(call, implementation=implementation, config=config, return_residual=return_residual)
    if len(batch) == 1:
        return result
    return jax.tree.map(lambda x: x.reshape(*batch, *x.shape[1:]), result)


def prepare(*args, **kwargs) -> Call:
    """Checks a call and describes it."""
    return _prepare(*args, **kwargs)[0]


def _prepare(query, key, value, lengths=None, mask=None, *, query_seq_lengths=None, **options):
    key, value = _check.stored(key, "key"), _check.stored(value, "value")
    query = _check.array(query, "query")
    for name, x in (("query", query), ("key", key), ("value", value)):
        if len(x.shape) < 3 or x.shape[:-3] != query.shape[:-3]:
            raise ValueError(f"{name} has shape {x.shape}; expected [*B, T or S, heads, H], with one *B for all")
    query = _check.cached(query, key, value)
    *batch, T, N, _ = query.shape
    batch, S, B = tuple(batch), key.shape[-3], math.prod(batch)
    if not 1 <= T <= 64:
        raise ValueError(f"query length T={T} must be from 1 to 64: longer ones are for jattn.attention")
    lengths = _check.lengths(S if lengths is None else lengths, "lengths", batch, S)
    call = assemble(
        "decode_attention", _flat(query, B), _flat(key, B), _flat(value, B),
        # As pages: one a sequence.
        jnp.arange(B, dtype=jnp.int32)[:, None], lengths, Shape(batch, N, T, S), mask=mask,
        query_lengths=_check.lengths(query_seq_lengths, "query_seq_lengths", batch, T), **options,
    )
    return call, batch


def _flat(x, B):
    """`[*B, T or S, heads, H]` with one batch axis."""
    if isinstance(x, Quantized):
        scale = x.scale.reshape(B, *x.shape[-3:-1]) if x.per == "token" else x.scale
        return Quantized(_flat(x.values, B), scale)
    return x if x.ndim == 4 else x.reshape(B, *x.shape[-3:])

"""`ragged_attention`: packed sequences of any lengths, end to end in one array."""

from typing import Any

from jattn import _check
from jattn._tile import Shape
from jattn.attention import assemble, run

__all__ = ["ragged_attention"]


def ragged_attention(
    query,
    key,
    value,
    cu_seqlens_q,
    cu_seqlens_k=None,
    bias=None,
    mask=None,
    *,
    query_seq_lengths=None,
    key_value_seq_lengths=None,
    scale=None,
    is_causal: bool = False,
    query_offset=0,
    local_window_size=None,
    logits_soft_cap: float | None = None,
    score_mod=None,
    sinks=None,
    dropout_rate: float = 0.0,
    dropout_key=None,
    return_residual: bool = False,
    deterministic: bool = False,
    implementation: str | None = None,
    config: Any = None,
):
    """Attention within each of M packed sequences: sequence m is rows `cu_seqlens_q[m]` to `cu_seqlens_q[m + 1]`.

    Everything counts inside a sequence: positions, causality, windows, `query_offset`, the b (sequence index), t and s
    of modifiers and predicates, and dropout. Rows in no sequence (beyond the last offset, or beyond a used length)
    give output 0, lse -inf and zero gradients, and may hold anything.

    Args:
        query: `[Tq, N, H]`.
        key: `[Tk, K, H]`, N a multiple of K.
        value: `[Tk, K, D]`.
        cu_seqlens_q: int `[M + 1]`, non-decreasing offsets from 0 to at most Tq; equal neighbours are empty sequences.
        cu_seqlens_k: the same for keys; None when they are the queries'.
        bias: floating-point, broadcastable to `[N, Tq, Tk]`: indexed by packed row and column; differentiable.
        mask: a mask of `jattn.masks` (per-sequence numbers are `[M]`; segment ids and dense masks are indexed by packed
            row and column), or a bool array broadcastable to `[N, Tq, Tk]`.
        query_seq_lengths, key_value_seq_lengths: int `[M]`, used lengths: the rest of a sequence is a hole.
        query_offset: int, int `[M]`, or "end" (key length minus query length of each sequence).
        scale, is_causal, local_window_size, logits_soft_cap, score_mod, sinks, dropout_rate, dropout_key,
            return_residual, deterministic, implementation, config: as in `attention`; aux of modifiers broadcast to
            `[N, Tq, Tk]`.

    Returns:
        `[Tq, N, D]` in the query's dtype; with `return_residual` also lse `[Tq, N]`.

    Raises:
        ValueError, TypeError, NotImplementedError: as `attention`.

    Example:
        >>> import jax, jax.numpy as jnp, jattn
        >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 100, 4, 64))
        >>> jattn.ragged_attention(q, k, v, jnp.array([0, 60, 60, 97]), is_causal=True).shape
        (100, 4, 64)

    Source: the variable-length interface of FlashAttention.
    """
    call = prepare(
        query, key, value, cu_seqlens_q, cu_seqlens_k, bias, mask, query_seq_lengths=query_seq_lengths,
        key_value_seq_lengths=key_value_seq_lengths, scale=scale, is_causal=is_causal, query_offset=query_offset,
        local_window_size=local_window_size, logits_soft_cap=logits_soft_cap, score_mod=score_mod, sinks=sinks,
        dropout_rate=dropout_rate, dropout_key=dropout_key, deterministic=deterministic,
    )
    return run(call, implementation=implementation, config=config, return_residual=return_residual)


def prepare(
    query, key, value, cu_seqlens_q, cu_seqlens_k=None, bias=None, mask=None, *, query_seq_lengths=None,
    key_value_seq_lengths=None, query_offset=0, is_causal=False, local_window_size=None, **options,
):
    """Checks a call and describes it."""
    query, key, value = _check.operands(query, key, value, "[T, N, H]")
    (Tq, N, _), Tk = query.shape, key.shape[0]
    cu_queries = _check.cu_seqlens(cu_seqlens_q, "cu_seqlens_q", Tq)
    if cu_seqlens_k is None and Tq != Tk:
        raise ValueError(f"cu_seqlens_k is needed: queries have Tq={Tq} rows, keys have Tk={Tk}")
    cu_keys = cu_queries if cu_seqlens_k is None else _check.cu_seqlens(cu_seqlens_k, "cu_seqlens_k", Tk)
    if cu_keys.shape != cu_queries.shape:
        raise ValueError(f"cu_seqlens_k has shape {cu_keys.shape}; cu_seqlens_q has {cu_queries.shape}")
    M = cu_queries.shape[0] - 1
    query_lengths = _check.lengths(query_seq_lengths, "query_seq_lengths", (M,), Tq)
    key_lengths = _check.lengths(key_value_seq_lengths, "key_value_seq_lengths", (M,), Tk)
    offset = _check.offset(
        query_offset,
        (M,),
        cu_queries[1:] - cu_queries[:-1] if query_lengths is None else query_lengths,
        cu_keys[1:] - cu_keys[:-1] if key_lengths is None else key_lengths,
    )
    mask = _check.mask(
        mask, is_causal=is_causal, local_window_size=local_window_size, segment_ids=None, key_lengths=key_lengths
    )
    return assemble(
        "ragged_attention", (query[None], key[None], value[None]), Shape((), N, Tq, Tk, sequences=M), (), bias=bias,
        mask=mask, offset=offset, query_lengths=query_lengths, cu_queries=cu_queries, cu_keys=cu_keys, **options,
    )

"""What a multi-head attention layer does over its autoregressive cache. Imports no flax.

A cache is (keys, values, index): keys `[*B, S, K, H]`, or pages `[P, page, K, H]` that block tables give to the
sequences, values likewise, and int32 `[*B]`, how many tokens there are of each sequence (in a cache that Flax made a
scalar, for all of them).
"""

import math

import jax.numpy as jnp

from jattn import _check, _flax
from jattn.attention import attention
from jattn.decode import decode_attention
from jattn.masks import Mask
from jattn.paged import PagedCache, append, paged_attention

_LARGEST_DECODE = 64  # queries that `decode_attention` takes


def empty(batch, max_length, heads, head_dim, dtype, page_size=None, num_pages=None):
    """A cache without tokens; in pages if `page_size` is given."""
    if (page_size is None) != (num_pages is None):
        raise ValueError(f"page_size={page_size} and num_pages={num_pages} go together")
    if page_size is not None:
        _check.page_size(page_size)
    lead = (*batch, max_length) if page_size is None else (num_pages, page_size)
    keys, values = (jnp.zeros((*lead, heads, head_dim), dtype) for _ in range(2))
    return keys, values, jnp.zeros(tuple(batch), jnp.int32)


def attend(
    query, key, value, cache, *, paged, block_tables=None, seq_lengths=None, mask=None, segment_ids=None, rope=None,
    input_positions=None, precision=None, **options,
):  # fmt: skip
    """Attention of new tokens over those in the cache, which they join first: (out `[*B, T, N, H]`, the cache then).

    query `[*B, T, N, H]`, key and value `[*B, T, K, H]`, of one dtype. Token t sees what was there, and up to itself.
    """
    _flax.check_precision(precision)
    if segment_ids is not None:
        raise ValueError("segment_ids and decode=True do not go together: a row of the cache is one sequence")
    keys, values, index = cache
    batch, T = query.shape[:-3], query.shape[-3]
    _check_tokens(query, key, value, cache)
    new = _check.lengths(seq_lengths, "seq_lengths", batch, T)
    if new is not None:
        if index.shape != batch:
            raise ValueError("seq_lengths need a cache_index of one length a sequence; it is a scalar, as Flax has it")
        new = jnp.clip(new, 0, T).reshape(batch)
    before = jnp.broadcast_to(index, batch)
    at = before[..., None] + jnp.arange(T, dtype=jnp.int32)
    positions = at if input_positions is None and rope is not None else input_positions
    query, key = _flax.rotated(query, key, rope, positions)
    if paged:
        return _paged(query, key, value, (keys, values, before), block_tables, new, mask, options)
    if block_tables is not None:
        raise ValueError("block_tables are for a cache in pages: init_cache(..., page_size=, num_pages=)")
    if keys.shape[:-3] != batch:
        raise ValueError(f"inputs_q has batch axes {batch}; the cache has {keys.shape[:-3]}")
    keys, values = (_written(rows, x, at, new) for rows, x in ((keys, key), (values, value)))
    after = jnp.minimum(index + (T if new is None else new), keys.shape[-3])
    lengths = jnp.broadcast_to(after, batch)
    if 1 <= T <= _LARGEST_DECODE and (mask is None or isinstance(mask, Mask)):
        out = decode_attention(query, keys, values, lengths, mask, query_seq_lengths=new, **options)
    else:  # a prompt, or a mask that is an array
        out = attention(
            query, keys, values, mask=_flax.as_mask(mask), is_causal=True, query_offset=before, query_seq_lengths=new,
            key_value_seq_lengths=lengths, **options,
        )  # fmt: skip
    return out, (keys, values, after)


def _check_tokens(query, key, value, cache):
    keys, values, index = cache
    if key.shape[:-2] != query.shape[:-2]:
        raise ValueError(f"inputs_k has axes {key.shape[:-2]}; expected those of inputs_q, {query.shape[:-2]}")
    if index.shape not in ((), query.shape[:-3]):
        raise ValueError(f"inputs_q has batch axes {query.shape[:-3]}; the cache has {index.shape}")
    for name, new, rows in (("cached_key", key, keys), ("cached_value", value, values)):
        if new.dtype != rows.dtype:
            raise TypeError(f"{name} is {rows.dtype}, but the layer computes in {new.dtype}: init_cache takes a dtype")


def _paged(query, key, value, cache, block_tables, new, mask, options):
    if block_tables is None:
        raise ValueError("the cache is in pages: block_tables are needed")
    kind = None if mask is None or isinstance(mask, Mask) else type(mask).__name__
    _flax.refuse("mask", kind, "over pages it is a rule of jattn.masks, made of positions")
    keys, values, before = cache
    flat = [x.reshape(math.prod(before.shape), *x.shape[-3:]) for x in (query, key, value)]
    new = None if new is None else new.reshape(-1)
    pages = append(PagedCache(keys, values, jnp.asarray(block_tables), before.reshape(-1)), *flat[1:], seq_lengths=new)
    out = paged_attention(flat[0], pages, mask=mask, query_seq_lengths=new, **options)
    return out.reshape(query.shape), (pages.key_pages, pages.value_pages, pages.lengths.reshape(before.shape))


def _written(rows, tokens, at, new):
    """`rows [*B, S, ..]` with `tokens [*B, T, ..]` at positions `at [*B, T]`, the first `new [*B]` of them."""
    *batch, S = rows.shape[:-2]
    B, T = math.prod(batch), at.shape[-1]
    index = jnp.arange(T, dtype=jnp.int32)
    if new is not None:  # past the end, where nothing is written, and no two in one place
        at = jnp.where(index < new[..., None], at, S + index)
    sequence = jnp.arange(B, dtype=jnp.int32)[:, None]
    flat = rows.reshape(B, S, *rows.shape[-2:])
    flat = flat.at[sequence, at.reshape(B, T)].set(
        tokens.reshape(B, T, *rows.shape[-2:]), mode="drop", unique_indices=True
    )
    return flat.reshape(rows.shape)

"""A paged KV cache as a pytree, and attention over it: decoding, chunked prefill and tree verification.

Keys and values of all sequences lie in one pool of pages; a block table says which pages hold a sequence, in order.
Which page belongs to whom is decided on the host (`jattn.PageAllocator`); everything here is pure and runs under `jit`.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from jattn import _check, _dispatch
from jattn._mask import parts
from jattn._platform import only_on
from jattn._problem import CacheArrays, Options, Problem, accumulator
from jattn._tile import Shape
from jattn._varying import vary, varying_axes
from jattn.attention import _operations
from jattn.quantize import Quantized, quantize

__all__ = ["PagedCache", "append", "copy_pages", "gather", "paged_attention"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PagedCache:
    """Keys and values in pages, with the pages and the length of each of B sequences. A pytree of arrays.

    key_pages: `[P, page, K, H]`, an array or a `Quantized`; value_pages: `[P, page, K, D]`, likewise. A page has 1, 16,
    32, 64, 128 or 256 slots.
    block_tables: int32 `[B, W]`: entry w of row b is the page of tokens w · page to (w + 1) · page - 1 of sequence b.
    Entries beyond the length may hold anything, and so may every slot that holds no token.
    lengths: int32 `[B]`: tokens of each sequence, at most W · page.

    A page id out of range never makes an op read or write outside the pool: which tokens are read there is unspecified,
    and what is written there is lost. `jattn.debug.check_cache` finds such ids.

    Example:
        >>> import jattn
        >>> cache = jattn.PagedCache.zeros(64, 16, 4, 128, sequences=2, pages_per_sequence=8, dtype="bfloat16")
        >>> cache.key_pages.shape, cache.capacity
        ((64, 16, 4, 128), 128)

    Source: Kwon et al., "PagedAttention" (2023).
    """

    key_pages: Any
    value_pages: Any
    block_tables: Any
    lengths: Any

    @classmethod
    def zeros(
        cls, num_pages: int, page_size: int, heads: int, head_dim: int, value_dim: int | None = None, *,
        sequences: int, pages_per_sequence: int, dtype=jnp.float32, per: str = "token", scale=None,
    ) -> "PagedCache":
        """An empty cache: zeros, block tables of 0, lengths of 0.

        Args:
            num_pages, page_size: P and the slots of a page.
            heads, head_dim, value_dim: K, H and D (None is H).
            sequences, pages_per_sequence: B and W.
            dtype: a floating dtype, or "int8" or "float8_e4m3fn" for a quantised cache.
            per, scale: of a quantised cache, as in `quantize`; "head" and "tensor" need the scale, float32.

        Raises:
            ValueError: a page size that is none, or a scale that is missing.
        """
        _check.page_size(page_size)

        def pages(features):
            values = jnp.zeros((num_pages, page_size, heads, features), dtype)
            if jnp.issubdtype(values.dtype, jnp.floating) and values.dtype.itemsize > 1:
                return values
            if per != "token" and scale is None:
                raise ValueError(f"per={per!r} needs the scale that tokens are going to be rounded by")
            found = jnp.ones(values.shape[:-1], jnp.float32) if scale is None else jnp.asarray(scale, jnp.float32)
            return _check.stored(Quantized(values, found), "pages")

        return cls(
            pages(head_dim), pages(head_dim if value_dim is None else value_dim),
            jnp.zeros((sequences, pages_per_sequence), jnp.int32), jnp.zeros((sequences,), jnp.int32),
        )

    @property
    def num_pages(self) -> int:
        return self.key_pages.shape[0]

    @property
    def page_size(self) -> int:
        return self.key_pages.shape[1]

    @property
    def capacity(self) -> int:
        """Tokens that a block table has room for."""
        return self.block_tables.shape[1] * self.page_size


def append(cache: PagedCache, key, value, cu_seqlens=None, *, seq_lengths=None, rotate=None) -> PagedCache:
    """Writes new tokens behind each sequence, into the pages that its block table names.

    A quantised cache rounds them, by scales of their own or by those it has. Donate the cache to have it updated in
    place: `jax.jit(jattn.append, donate_argnums=0)`.

    Args:
        cache: a `PagedCache` whose tables have pages for the new tokens.
        key: `[B, T, K, H]`, or packed `[T, K, H]`.
        value: `[B, T, K, D]`, or packed `[T, K, D]`.
        cu_seqlens: int `[B + 1]`, offsets of each sequence's new tokens when packed.
        seq_lengths: int `[B]`: how many of the T tokens of each sequence are new ones; the rest may hold anything.
        rotate: called as `rotate(key, positions)`, with the positions int32 `[B, T]` or packed `[T]` of the new tokens
            in their sequences, for the keys to write: `jattn.rope`, or a `functools.partial` of it.

    Returns:
        The cache with its tokens and lengths. Tokens past the capacity are not written, and the length stays there:
        `jattn.debug.check_lengths(cache.lengths + new, cache.capacity)` finds them.

    Raises:
        ValueError, TypeError: shapes and dtypes that do not fit together, those that `rotate` returns included.

    Example:
        >>> cache = jattn.append(cache, k, v)  # k, v [B, T, K, H]: T new tokens a sequence
    """
    cache = checked(cache)
    key, value = _check.array(key, "key"), _check.array(value, "value")
    sequence, index, counts = _new_tokens(cache, key, cu_seqlens, seq_lengths)
    for name, new, old in (("key", key, cache.key_pages), ("value", value, cache.value_pages)):
        if new.shape != (*key.shape[:-2], *old.shape[2:]):
            raise ValueError(f"{name} has shape {new.shape}; expected {(*key.shape[:-2], *old.shape[2:])}")
        if not isinstance(old, Quantized) and new.dtype != old.dtype:
            raise TypeError(f"{name} dtype {new.dtype} must equal that of its pages, {old.dtype}")
    if 0 in (cache.capacity, cache.num_pages, *sequence.shape, *counts.shape):
        return cache
    before = jnp.clip(_int32(cache.lengths), 0, cache.capacity)
    position = before[sequence] + index
    if rotate is not None:
        key = _rotated(rotate, key, position.reshape(key.shape[:-2]))
    column = jnp.minimum(position // cache.page_size, cache.block_tables.shape[1] - 1)
    page = _int32(cache.block_tables)[sequence, column]
    written = (index < counts[sequence]) & (position < cache.capacity) & (page >= 0)
    at = jnp.where(written, page, cache.num_pages), position % cache.page_size
    key_pages, value_pages = (_write(*x, at) for x in ((cache.key_pages, key), (cache.value_pages, value)))
    lengths = jnp.minimum(before + counts, cache.capacity).astype(cache.lengths.dtype)
    return dataclasses.replace(cache, key_pages=key_pages, value_pages=value_pages, lengths=lengths)


def copy_pages(cache: PagedCache, source, target) -> PagedCache:
    """Copies whole pages, keys and values, `source[i]` to `target[i]`: what a copy-on-write needs.

    Args:
        cache: a `PagedCache`.
        source, target: int `[n]` page ids; all are read before any is written. A pair in which either is out of range
            is ignored, so that arrays of a fixed size can be filled up with -1.

    Returns:
        The cache with the copies.

    Raises:
        ValueError, TypeError: arrays of page ids that are none, or differ in length.

    Example:
        >>> page, shared = allocator.own(page)
        >>> cache = jattn.copy_pages(cache, [shared], [page])
    """
    cache = checked(cache)
    source, target = _pages(source, "source"), _pages(target, "target")
    if source.shape != target.shape:
        raise ValueError(f"target has shape {target.shape}; source has {source.shape}")
    exists = (source >= 0) & (source < cache.num_pages) & (target >= 0)
    target = jnp.where(exists, target, cache.num_pages)

    def copy(pages):
        if pages.ndim < 3 or 0 in (cache.num_pages, *source.shape):  # scales that pages share
            return pages
        return pages.at[target].set(pages.at[source].get(mode="clip"), mode="drop")

    key_pages, value_pages = jax.tree.map(copy, (cache.key_pages, cache.value_pages))
    return dataclasses.replace(cache, key_pages=key_pages, value_pages=value_pages)


def gather(cache: PagedCache):
    """The cache as contiguous arrays, with zeros past each length: for tests, and to move sequences elsewhere.

    Args:
        cache: a `PagedCache`.

    Returns:
        (key `[B, S, K, H]`, value `[B, S, K, D]`) with S the capacity of a block table; a `Quantized` for each that is
        one in the cache.

    Example:
        >>> k, v = jattn.gather(cache)
        >>> out = jattn.decode_attention(q, k, v, cache.lengths)  # what paged_attention(q, cache) is, bit for bit
    """
    cache = checked(cache)
    B, S = cache.block_tables.shape[0], cache.capacity
    exists = jnp.arange(S, dtype=jnp.int32) < _int32(cache.lengths)[:, None]
    tables = jnp.clip(_int32(cache.block_tables), 0, max(cache.num_pages - 1, 0))

    def take(pages):
        if pages.ndim < 3:
            return pages
        if 0 in (B, S, cache.num_pages):
            return jnp.zeros((B, S, *pages.shape[2:]), pages.dtype)
        found = jnp.take(pages, tables, axis=0, mode="clip").reshape(B, S, *pages.shape[2:])
        return jnp.where(exists.reshape(B, S, *[1] * (found.ndim - 2)), found, jnp.zeros((), found.dtype))

    return jax.tree.map(take, (cache.key_pages, cache.value_pages))


def paged_attention(
    query,
    cache: PagedCache,
    cu_seqlens_q=None,
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
    """Attention of the newest tokens of each sequence over its whole history in a paged cache.

    The queries are the last tokens of their sequence, and their keys and values are in the cache already (`append`
    first): query t of n sits at position length - n + t. That serves decoding (one query a sequence), chunked prefill
    (any numbers, packed) and the verification of draft tokens (`mask=masks.tree(parents)`).

    The bits of a sequence depend on its own tokens alone: not on its neighbours, its row, its page numbers, the size of
    the cache, or the padding. Slots that hold no token, and pages that a window has left behind, may hold anything.

    Args:
        query: `[B, T, N, H]`, or packed `[T, N, H]` with `cu_seqlens_q`.
        cache: a `PagedCache`, N a multiple of its K heads; in the query's dtype or quantised.
        cu_seqlens_q: int `[B + 1]`, non-decreasing offsets of the queries of each sequence; rows in none give 0.
        mask: a mask of `jattn.masks` made of positions: causal, window, prefix, lengths, tree (queries not packed),
            predicate, and what `&`, `|` and `~` make of them. It joins `is_causal` by `&`.
        scale: number or scalar array; None is 1 / sqrt(H).
        is_causal: hide keys at positions after the query's; true here, unlike in `attention`.
        query_seq_lengths: int `[B]`: how many queries of each sequence there are; rows past it give output 0, lse -inf.
        local_window_size, logits_soft_cap: as in `attention`.
        score_mod: as in `attention`, b the index of the sequence; aux may have heads and sequences, no rows or columns.
        sinks: floating-point `[N]`, a logit that joins the denominator.
        return_residual: also return lse.
        implementation, config: as in `attention`.

    Returns:
        `[.., N, D]`, shaped as the query, in its dtype; with `return_residual` also lse `[.., N]`, the natural log of
        the softmax denominator (sink included), float32 (float64 for float64 inputs). `merge` takes both.

    Raises:
        ValueError, TypeError: an argument is wrong (the message names it and its value).
        NotImplementedError: a mask or modifier with rows or columns; a named implementation that cannot run; gradients.

    Example:
        >>> cache = jattn.append(cache, k, v)         # k, v [B, 1, K, H], the newest token of each sequence
        >>> out = jattn.paged_attention(q, cache)     # q [B, 1, N, H]

    Source: Kwon et al., "PagedAttention" (2023); Flash-Decoding (Dao, Haziza, Massa, Sizov, 2023) for the splits.
    """
    call = prepare(
        query, cache, cu_seqlens_q, mask, scale=scale, is_causal=is_causal, query_seq_lengths=query_seq_lengths,
        local_window_size=local_window_size, logits_soft_cap=logits_soft_cap, score_mod=score_mod, sinks=sinks,
    )
    return run(call, implementation=implementation, config=config, return_residual=return_residual)


def _packed_rows(x) -> int | None:
    """Of `[T, heads, dim]`; None for what has another rank, which is an error of its own."""
    return x.shape[0] if x.ndim == 3 else None


def prepare(query, cache, cu_seqlens_q=None, mask=None, *, query_seq_lengths=None, **options) -> "Call":
    """Checks a call and describes it."""
    cache = checked(cache)
    query = _check.cached(query, cache.key_pages, cache.value_pages)
    B = cache.block_tables.shape[0]
    cu_queries = None if cu_seqlens_q is None else _check.cu_seqlens(cu_seqlens_q, "cu_seqlens_q", _packed_rows(query))
    if cu_queries is not None and (query.ndim != 3 or cu_queries.shape != (B + 1,)):
        raise ValueError(
            f"cu_seqlens_q has shape {cu_queries.shape} and query {query.shape}; expected {(B + 1,)} and [T, N, H]"
        )
    if cu_queries is None and (query.ndim != 4 or query.shape[0] != B):
        raise ValueError(f"query has shape {query.shape}; expected [B, T, N, H], B={B}, or packed with cu_seqlens_q")
    T, N, _ = query.shape[-3:]
    batch, sequences = ((B,), None) if cu_queries is None else ((), B)
    return assemble(
        "paged_attention", query, cache.key_pages, cache.value_pages, _int32(cache.block_tables), _int32(cache.lengths),
        Shape(batch, N, T, cache.capacity, sequences), mask=mask, cu_queries=cu_queries,
        query_lengths=_check.lengths(query_seq_lengths, "query_seq_lengths", (B,), T), **options,
    )


@dataclasses.dataclass(frozen=True)
class Call:
    """A checked call, as a kernel gets it, and as dispatch does."""

    arrays: CacheArrays
    options: Options
    problem: Problem


def assemble(
    op, query, key, value, block_tables, lengths, shape, *, mask, query_lengths, cu_queries=None, scale=None,
    is_causal=True, local_window_size=None, logits_soft_cap=None, score_mod=None, sinks=None,
) -> Call:
    """Describes a call whose operands, tables and lengths are checked; checks the rest."""
    mask = _check.mask(
        mask, is_causal=is_causal, local_window_size=local_window_size, segment_ids=None, key_lengths=None
    )
    _check.positional(mask, score_mod)
    N, H = query.shape[-2:]
    accumulated = accumulator(query.dtype)
    mod = _check.mod(score_mod, shape, 0, accumulated)
    static_scale, scale = _check.scale(scale, H)
    (key, key_scale), (value, value_scale) = (
        (x.values, x.scale) if isinstance(x, Quantized) else (x, None) for x in (key, value)
    )
    arrays = CacheArrays(
        query, key, value, block_tables, lengths, cu_queries, query_lengths, key_scale, value_scale,
        mask=None if mask is None else mask.bind(shape), scale=scale, aux=mod.aux if mod else (),
        sinks=_check.sinks(sinks, N),
    )
    options = Options(
        scale=static_scale, query_offset=0, soft_cap=_check.soft_cap(logits_soft_cap),
        mod=None if mod is None else mod.without_arrays(), dropout_threshold=0, deterministic=False,
    )
    problem = Problem(
        op=op, B=block_tables.shape[0], T=query.shape[-3], S=shape.num_keys, N=N, K=key.shape[2], H=H,
        D=value.shape[3], dtype=str(query.dtype), mask=None if mask is None else repr(mask),
        score_mod=None if mod is None else repr(mod), soft_cap=options.soft_cap, sinks=sinks is not None,
        sequences=shape.sequences,
        mask_kinds=() if mask is None else tuple(sorted({type(m).__name__ for m in parts(mask)})),
        operations=_operations(mask, mod, accumulated),
        page=key.shape[1], stored=(str(key.dtype), str(value.dtype)),
        scales=tuple(None if s is None else Quantized(x, s).per for x, s in ((key, key_scale), (value, value_scale))),
    )
    return Call(arrays, options, problem)


def run(call: Call, *, implementation, config, return_residual):
    """Dispatches a described call."""
    _check.flag(return_residual, "return_residual")
    options = _dispatch.resolve(call.problem, call.options, implementation, config)
    arrays = vary(call.arrays, varying_axes(call.arrays))
    with jax.named_scope(f"jattn.{call.problem.op}"):
        out, lse = _in_auto_mode(functools.partial(_attend, call.problem.op, options), arrays)
    return (out, lse) if return_residual else out


def _in_auto_mode(attend, arrays):
    """Calls `attend`; under a mesh with Explicit axes, leaves the sharding of its loops to the compiler and gives out
    and lse the query's sharding."""
    sharding = jax.typeof(arrays.query).sharding
    if not sharding.mesh.explicit_axes:
        return attend(arrays)
    spec = tuple(sharding.spec)
    out, lse = (NamedSharding(sharding.mesh, PartitionSpec(*x)) for x in ((*spec[:-1], None), spec[:-1]))
    return jax.sharding.auto_axes(attend, axes=sharding.mesh.explicit_axes, out_sharding=(out, lse))(arrays)


@functools.partial(jax.jit, static_argnums=(0, 1))
@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _attend(op, options, arrays):
    here = functools.partial(_attend_on, op, options)
    if options.elsewhere is None:
        return here(arrays)
    elsewhere = functools.partial(_attend_on, op, options.elsewhere)
    return lax.platform_dependent(
        arrays, default=elsewhere, **{_dispatch.module(op, options.implementation).PLATFORM: here}
    )


def _attend_on(op, options, arrays):
    module = _dispatch.module(op, options.implementation)
    if module.PLATFORM is not None:
        query = only_on(module.PLATFORM, arrays.query, f"implementation={options.implementation!r}")
        arrays = dataclasses.replace(arrays, query=query)
    out, lse = module.forward(arrays, options)
    return out if options.partial else out.astype(arrays.query.dtype), lse


@_attend.__wrapped__.defjvp
def _refuse_derivatives(op, options, primals, tangents):
    raise NotImplementedError(f"{op} has no derivatives: jattn.attention has, over keys that are not in a cache")


def checked(cache: PagedCache) -> PagedCache:
    """The cache, if its arrays fit together."""
    if not isinstance(cache, PagedCache):
        raise TypeError(f"cache must be a jattn.PagedCache, not {type(cache).__name__}")
    key, value = _check.stored(cache.key_pages, "key_pages"), _check.stored(cache.value_pages, "value_pages")
    for name, x in (("key_pages", key), ("value_pages", value)):
        if len(x.shape) != 4:
            raise ValueError(f"{name} has shape {x.shape}; expected [P, page, K, H]")
    if value.shape[:3] != key.shape[:3]:
        raise ValueError(f"value_pages has shape {value.shape}; all but its last axis must be key_pages' {key.shape}")
    _check.page_size(key.shape[1])
    tables, lengths = _check.array(cache.block_tables, "block_tables"), _check.array(cache.lengths, "lengths")
    for name, x, ndim, axes in (("block_tables", tables, 2, "[B, W]"), ("lengths", lengths, 1, "[B]")):
        if not jnp.issubdtype(x.dtype, jnp.integer):
            raise TypeError(f"{name} must be integers, not {x.dtype}")
        if x.ndim != ndim:
            raise ValueError(f"{name} has shape {x.shape}; expected {axes}")
    if tables.shape[:1] != lengths.shape:
        raise ValueError(f"lengths has shape {lengths.shape}; block_tables has {tables.shape[0]} rows")
    return PagedCache(key, value, tables, lengths)


def _new_tokens(cache, key, cu_seqlens, seq_lengths):
    """Sequence and index in it of every row of new tokens, int32 `[rows]`, and tokens a sequence, int32 `[B]`.

    The index of a row that belongs to no sequence is past the tokens of the one that it is given.
    """
    B = cache.lengths.shape[0]
    if cu_seqlens is None:
        if key.ndim != 4 or key.shape[0] != B:
            raise ValueError(f"key has shape {key.shape}; expected [B, T, K, H] with B={B}, or packed with cu_seqlens")
        T = key.shape[1]
        sequence = jnp.repeat(jnp.arange(B, dtype=jnp.int32), T)
        index = jnp.tile(jnp.arange(T, dtype=jnp.int32), B)
        counts, room = jnp.full((B,), T, jnp.int32), T
    else:
        cu = _check.cu_seqlens(cu_seqlens, "cu_seqlens", _packed_rows(key))
        if key.ndim != 3 or cu.shape != (B + 1,):
            raise ValueError(f"cu_seqlens has shape {cu.shape} and key {key.shape}; expected {(B + 1,)} and [T, K, H]")
        room = key.shape[0]
        cu, row = jnp.clip(cu, 0, room), jnp.arange(room, dtype=jnp.int32)
        sequence = jnp.clip(jnp.searchsorted(cu[1:], row, side="right").astype(jnp.int32), 0, max(B - 1, 0))
        index = row - cu[:-1][sequence] if B else row
        counts = jnp.maximum(cu[1:] - cu[:-1], 0)
        index = jnp.where(index < 0, room, index)
    if seq_lengths is not None:
        counts = jnp.clip(_check.lengths(seq_lengths, "seq_lengths", (B,), room), 0, counts)
    return sequence, index, counts


def _rotated(rotate, key, positions):
    new = rotate(key, positions)
    if new.shape != key.shape or new.dtype != key.dtype:
        raise ValueError(f"rotate returned {new.dtype}{list(new.shape)}; key is {key.dtype}{list(key.shape)}")
    return new


def _write(pages, new, at):
    """`pages` with the tokens of `new` at (page, slot), those of a page past the end left out."""
    new = new.reshape(-1, *new.shape[-2:])
    if not isinstance(pages, Quantized):
        return pages.at[at].set(new, mode="drop")
    new = quantize(new, pages.dtype, scale=None if pages.per == "token" else pages.scale)
    scale = pages.scale.at[at].set(new.scale, mode="drop") if pages.per == "token" else pages.scale
    return Quantized(pages.values.at[at].set(new.values, mode="drop"), scale)


def _pages(x, name):
    x = _check.array(x, name)
    if x.ndim != 1:
        raise ValueError(f"{name} has shape {x.shape}; expected [n] page ids")
    if not jnp.issubdtype(x.dtype, jnp.integer):
        raise TypeError(f"{name} must be integers, not {x.dtype}")
    return _int32(x)


def _int32(x):
    """`x` as int32, what does not fit at the ends of its range: a wild id must not become another page's."""
    own, wanted = jnp.iinfo(x.dtype), jnp.iinfo(jnp.int32)
    return jnp.clip(x, max(own.min, wanted.min), min(own.max, wanted.max)).astype(jnp.int32)

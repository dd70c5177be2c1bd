"""Compressed attention of DeepSeek-V4: a window of raw keys and entries for blocks of tokens, in one softmax.

    kv        one key row a token, which all heads share, as key and as value; the last W of them are seen
    entries   `compress` makes one row of m tokens; query t sees those of blocks that are complete, t included
    CSA       m = 4, overlapping; an indexer over compressed keys of its own picks the entries to attend to
    HCA       m = 128, not overlapping; all of them are attended to
    out       softmax over both lists and the sink, times the same rows, turned back by the query's position

A token may be seen raw and inside an entry; both count. Bits of a row depend on its sequence up to there alone, however
the sequence is cut into chunks.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jattn import _check
from jattn import compressed_cache as _cache
from jattn.compressed_cache import CompressedCache, Rows584
from jattn.compressed_tokens import Rotary, checked_state, checked_tokens, compress, in_tiles, visible_entries
from jattn.indexer import indexer_select
from jattn.sparse import sparse_attention

__all__ = ["EntryIndex", "EntrySource", "csa_attention", "grouped_output", "hca_attention", "window_indices"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class EntrySource:
    """What entries are made of: the arguments of `compress`. A pytree.

    u, z: `[B, T, C]`, or packed `[T, C]`: the projections of the new tokens, C = 2c if entries overlap and c if not.
    ape: `[m, C]`. norm: `[c]` or None.
    """

    u: Any
    z: Any
    ape: Any
    norm: Any = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class EntryIndex:
    """The indexer's share of a CSA layer. A pytree.

    query: `[B, T, J, c]`, or packed `[T, J, c]`: J index heads, not rotated yet.
    weights: `[B, T, J]`, or packed `[T, J]`; may be negative; all constant factors (c ** -0.5 · J ** -0.5) belong in
    them, as in `indexer_logits`.
    source: `EntrySource` of entries of c channels, in the same blocks as the layer's own.
    """

    query: Any
    weights: Any
    source: EntrySource


def csa_attention(
    query,
    kv,
    source: EntrySource,
    index,
    cache: CompressedCache | None = None,
    *,
    scale: float,
    top_k: int | None = None,
    window: int = 128,
    sinks=None,
    rotary: Rotary | None = None,
    eps: float = 1e-6,
    seq_lengths=None,
    cu_seqlens=None,
    index_format: str | None = None,
    score_dtype=jnp.float32,
    return_residual: bool = False,
):
    """Compressed sparse attention: the last `window` tokens, and the `top_k` entries that an indexer picks.

    Without a cache sequences start at position 0: training, or a prompt whose state is not wanted. With one the tokens
    follow those that it holds: a prompt, a part of it, or one token at a time, with the same bits.

    Args:
        query: `[B, T, N, D]`, normalised, not rotated; or packed `[T, N, D]` with `cu_seqlens`.
        kv: `[B, T, D]` or packed `[T, D]`, normalised, not rotated; in the query's dtype.
        source: `EntrySource` of entries of D channels, overlapping: u and z have 2D.
        index: an `EntryIndex`; or int `[B, T, L]` (packed `[T, L]`), numbers of entries in their sequence. What is not
            visible there, or negative, is left out; what occurs twice counts twice.
        cache: a `CompressedCache`, or None. Not for packed sequences.
        scale: number that scores are multiplied by, D ** -0.5 in DeepSeek-V4.
        top_k: entries to pick; only with an `EntryIndex`.
        window: tokens that are seen raw, the query's own included.
        sinks: floating-point `[N]`, a logit for each head that joins the denominator; not scaled.
        rotary: rotates queries, keys and index queries by their positions, entries by those of their first tokens, and
            the output back; None rotates nothing.
        eps: of the norms of entries.
        seq_lengths: int `[B]`: how many of the T tokens of each sequence there are. The rest may hold anything.
        cu_seqlens: int `[M + 1]`: offsets of packed sequences, each from position 0.
        index_format: of `indexer_quantize`: scores are those of queries and keys that are turned by Hadamard and
            rounded; None is neither. Must be that of the cache, where one is given.
        score_dtype: what index scores are rounded to before they are compared: float32 or bfloat16.
        return_residual: also return lse.

    Returns:
        out `[B, T, N, D]` (`[T, N, D]`) in the query's dtype. With `return_residual` (out, lse), lse `[B, T, N]` the
        natural log of the softmax denominator, sink included, float32 (float64 for float64). With a cache the result
        and the cache that has the tokens in it, as a pair. Tokens that do not exist give 0 and -inf. Differentiable in
        all floating-point arrays but the indexer's, in reverse mode; nothing flows through the selection.

    Raises:
        ValueError, TypeError: an argument is wrong; the message names it, its dimension and its value.

    Example:
        >>> rotary = jattn.Rotary(64, base=160000.0, scaling=jattn.YarnScaling(16, 65536))
        >>> options = dict(scale=512**-0.5, top_k=512, sinks=sinks, rotary=rotary)
        >>> out = jattn.csa_attention(q, kv, source, index, **options)                    # a whole sequence
        >>> out, cache = jattn.csa_attention(q1, kv1, source1, index1, cache, **options)  # a token a sequence

    Source: DeepSeek-V4, compressed sparse attention.
    """
    indexed = isinstance(index, EntryIndex)
    layer = _Layer(query, kv, source, cache, True, window, rotary, eps, seq_lengths, cu_seqlens, indexed)
    lists = layer.select(index, top_k, index_format, score_dtype)
    return layer.attend(lists, scale, sinks, return_residual)


def hca_attention(
    query,
    kv,
    source: EntrySource,
    cache: CompressedCache | None = None,
    *,
    scale: float,
    window: int = 128,
    sinks=None,
    rotary: Rotary | None = None,
    eps: float = 1e-6,
    seq_lengths=None,
    cu_seqlens=None,
    return_residual: bool = False,
):
    """Heavily compressed attention: the last `window` tokens, and every visible entry.

    As `csa_attention`, with entries that do not overlap and without an indexer.

    Args:
        query, kv: as in `csa_attention`.
        source: `EntrySource` of entries of D channels, not overlapping: u and z have D. m is 128 in DeepSeek-V4.
        cache: a `CompressedCache` with `overlap=False`, or None. Lists have a slot for each entry that there is room
            for, so that bits depend on its capacity in steps of 64 entries.
        scale, window, sinks, rotary, eps, seq_lengths, cu_seqlens, return_residual: as in `csa_attention`.

    Returns:
        As `csa_attention`: out `[B, T, N, D]` in the query's dtype and, with `return_residual`, lse `[B, T, N]`; with a
        cache a pair of that and the cache.

    Raises:
        ValueError, TypeError: an argument is wrong; the message names it, its dimension and its value.

    Example:
        >>> out = jattn.hca_attention(q, kv, source, scale=512**-0.5, sinks=sinks, rotary=rotary)

    Source: DeepSeek-V4, heavily compressed attention.
    """
    layer = _Layer(query, kv, source, cache, False, window, rotary, eps, seq_lengths, cu_seqlens)
    return layer.attend(layer.all_visible(), scale, sinks, return_residual)


def grouped_output(out, w_a, w_b):
    """The output projection in two steps: heads in groups to R numbers a group, and those to the model's width.

    `out` is what `csa_attention` and `hca_attention` return, turned back by its position already.

    Args:
        out: `[.., N, D]`.
        w_a: `[G, N / G · D, R]`: group g has heads g · N / G and the following, one behind the other.
        w_b: `[G · R, F]`.

    Returns:
        `[.., F]` in out's dtype; sums are float32 (float64). Which bits come out is the compiler's choice.

    Raises:
        ValueError, TypeError: shapes and dtypes that do not fit; the message names the dimension.

    Example:
        >>> y = jattn.grouped_output(out, w_a, w_b)  # out [B, T, 64, 512], w_a [8, 4096, 1024], w_b [8192, 4096]

    Source: DeepSeek-V4.
    """
    out, w_a, w_b = _check.array(out, "out"), _check.array(w_a, "w_a"), _check.array(w_b, "w_b")
    if out.ndim < 2:
        raise ValueError(f"out has shape {out.shape}; expected [.., N, D]")
    if w_a.ndim != 3 or w_b.ndim != 2:
        raise ValueError(f"w_a has shape {w_a.shape} and w_b {w_b.shape}; expected [G, N / G · D, R] and [G · R, F]")
    *lead, N, D = out.shape
    G, width, R = w_a.shape
    if G == 0 or N % G:
        raise ValueError(f"heads N={N} must be a multiple of the groups G={G} of w_a")
    if width != N // G * D:
        raise ValueError(f"w_a has {width} rows a group; N / G · D = {N // G * D} with N={N}, G={G}, D={D}")
    if w_b.shape[0] != G * R:
        raise ValueError(f"w_b has {w_b.shape[0]} rows; G · R = {G * R} with G={G}, R={R} of w_a")
    for name, w in (("w_a", w_a), ("w_b", w_b)):
        if w.dtype != out.dtype:
            raise TypeError(f"{name} dtype {w.dtype} must equal out's {out.dtype}")
    # float32 must not be multiplied as TF32; narrower inputs keep the device's fast product.
    product = functools.partial(
        jnp.einsum, precision=jax.lax.Precision.HIGHEST if out.dtype.itemsize > 2 else None,
        preferred_element_type=jnp.promote_types(jnp.float32, out.dtype) if out.dtype.itemsize > 2 else jnp.float32,
    )  # fmt: skip
    inner = product("...gi,gir->...gr", out.reshape(*lead, G, width), w_a).astype(out.dtype)
    return product("...i,if->...f", inner.reshape(*lead, G * R), w_b).astype(out.dtype)


def window_indices(positions, window: int):
    """The positions of the last `window` tokens up to each position, ascending, then -1.

    Args:
        positions: int `[..]`; negative ones see nothing.
        window: W, its own token included.

    Returns:
        int32 `[.., W]`, for `sparse_attention`.

    Example:
        >>> window_indices(np.array([1, 5]), 3)  # [[0, 1, -1], [3, 4, 5]]
    """
    positions = jnp.asarray(positions).astype(jnp.int32)[..., None]
    first = jnp.maximum(positions - (_size(window, "window") - 1), 0)
    found = first + jnp.arange(window, dtype=jnp.int32)
    return jnp.where(found <= positions, found, -1)


class _Layer:
    """The checked tokens of one call, where they are, and their entries. Packed sequences are a batch of one."""

    def __init__(self, query, kv, source, cache, overlap, window, rotary, eps, seq_lengths, cu_seqlens, indexed=False):
        self.packed, self.cache, self.overlap = cu_seqlens is not None, cache, overlap
        self.rotary, self.eps = rotary, eps
        self.window = _size(window, "window")
        self.query, self.kv = self._operands(query, kv)
        source = self._source(source, self.query.shape[-1], "source.")
        self.ratio = source.ape.shape[0]
        B, T, _, D = self.query.shape
        if cache is not None:
            self._check_cache(B, D, indexed)
        if self.packed:
            self._place_packed(_check.cu_seqlens(cu_seqlens, "cu_seqlens", T), seq_lengths)
        else:
            self._place(_check.lengths(seq_lengths, "seq_lengths", (B,), T))
        self.query, self.kv = (self._live(x) for x in (self.query, self.kv))
        self.query, self.kv = self._turned(self.query), self._turned(self.kv)
        self.entries, self.tail = self._compressed(source, None if cache is None else cache.tail, D)
        self.index_tail = self.index_keys = None

    def _operands(self, query, kv):
        query, kv = _check.array(query, "query"), _check.array(kv, "kv")
        want, rank = ("[T, N, D] with cu_seqlens", 3) if self.packed else ("[B, T, N, D]", 4)
        if query.ndim != rank or 0 in query.shape[-2:]:
            raise ValueError(f"query has shape {query.shape}; expected {want}")
        if kv.dtype != query.dtype:
            raise TypeError(f"kv dtype {kv.dtype} must equal query's {query.dtype}")
        if kv.shape != (*query.shape[:-2], query.shape[-1]):
            raise ValueError(f"kv has shape {kv.shape}; expected {(*query.shape[:-2], query.shape[-1])} of query")
        return (query[None], kv[None]) if self.packed else (query, kv)

    def _source(self, source, D, of):
        """An `EntrySource` that fits the query, whose entries have D channels."""
        if not isinstance(source, EntrySource):
            raise TypeError(f"{of[:-1]} must be an EntrySource, not {type(source).__name__}")
        tokens = self.query.shape[1:2] if self.packed else self.query.shape[:2]
        u, z, ape, norm = checked_tokens(source.u, source.z, source.ape, source.norm, self.overlap, of)
        if u.shape[:-1] != tokens:
            raise ValueError(f"{of}u has shape {u.shape}; expected {(*tokens, 'C')} of query")
        want = D * (2 if self.overlap else 1)
        if u.shape[-1] != want:
            kind = "overlapping entries" if self.overlap else "entries"
            raise ValueError(f"{of}u has C={u.shape[-1]} channels; {kind} of D={D} need {want}")
        return EntrySource(u, z, ape, norm)

    def _check_cache(self, B, D, indexed):
        cache = self.cache
        if not isinstance(cache, CompressedCache):
            raise TypeError(f"cache must be a CompressedCache, not {type(cache).__name__}")
        if self.packed:
            raise ValueError("cu_seqlens and a cache do not go together: pass [B, T, ..] and seq_lengths")
        if cache.index_keys is not None and not indexed:
            raise ValueError(
                "cache has index_keys, which would fall behind without an EntryIndex: make it without index_dim"
            )
        room = cache.window.shape[1]
        if isinstance(cache.window, Rows584):  # in whole pages
            room -= (room - self.window) % cache.window.page
        if (cache.window.shape[0], room, cache.window.shape[2]) != (B, self.window, D):
            want = (B, self.window, D)
            raise ValueError(f"cache.window has shape {cache.window.shape}; expected (B, window, D) = {want}")
        if cache.entries.shape[::2] != (B, D) or cache.entries.shape[1] < cache.capacity // self.ratio:
            want = (B, cache.capacity // self.ratio, D)
            raise ValueError(f"cache.entries have shape {cache.entries.shape}; expected (B, entries, D) = {want}")
        for name, rows in (("window", cache.window), ("entries", cache.entries)):
            if not isinstance(rows, Rows584) and rows.dtype != self.query.dtype:
                raise TypeError(f"cache.{name} dtype {rows.dtype} must equal query's {self.query.dtype}")

    def _place(self, lengths):
        B, T = self.query.shape[:2]
        before = jnp.zeros((B,), jnp.int32)
        new = jnp.full((B,), T, jnp.int32) if lengths is None else jnp.clip(lengths, 0, T)
        if self.cache is not None:
            before = jnp.clip(self.cache.lengths.astype(jnp.int32), 0, self.cache.capacity)
            new = jnp.minimum(new, self.cache.capacity - before)
        t = jnp.arange(T, dtype=jnp.int32)
        self.before, self.new, self.cu = before, new, None
        self.live = t < new[:, None]
        self.positions = before[:, None] + t
        self.first_entry = jnp.zeros((B, 1), jnp.int32)

    def _place_packed(self, cu, lengths):
        if lengths is not None:
            raise ValueError("seq_lengths and cu_seqlens do not go together")
        T, M = self.query.shape[1], cu.shape[0] - 1
        self.cu = jax.lax.cummax(jnp.clip(cu, 0, T))
        row = jnp.arange(T, dtype=jnp.int32)
        after = jnp.sum(self.cu[:, None] <= row, axis=0, dtype=jnp.int32)
        self.live = ((after > 0) & (after <= M))[None]
        sequence = jnp.clip(after - 1, 0, max(M - 1, 0))
        self.start = self.cu[sequence][None]  # row of the first token of each row's sequence
        self.positions = jnp.where(self.live, row - self.start, 0)
        counts = (self.cu[1:] - self.cu[:-1]) // self.ratio
        first = jnp.cumsum(counts, dtype=jnp.int32) - counts
        self.first_entry = first[sequence][None] if M else jnp.zeros((1, T), jnp.int32)

    def _live(self, x):
        """`x [B, T, ..]` with zeros where there is no token: what is there leaves no trace."""
        live = self.live.reshape(*self.live.shape, *[1] * (x.ndim - 2))
        return jnp.where(live, x, jnp.zeros((), x.dtype))

    def _turned(self, x, inverse=False):
        """`x [B, T, .., H]`, rotated by the positions of the tokens."""
        if self.rotary is None:
            return x

        def tile(x, position):
            position = position.reshape(-1, *[1] * (x.ndim - 2))
            return self.rotary(x, position, inverse=inverse)

        return in_tiles(tile, x.reshape(-1, *x.shape[2:]), self.positions.reshape(-1)).reshape(x.shape)

    def _compressed(self, source, state, D):
        """(entries that are new, `[B, E, D]`, and how many; state) of a branch."""
        options = dict(overlap=self.overlap, norm=source.norm, eps=self.eps, rotary=self.rotary, dtype=self.query.dtype)
        if self.packed:
            entries, counts, _ = compress(source.u, source.z, source.ape, cu_seqlens=self.cu, **options)
            return (entries[None], counts), None
        if state is not None:
            B, C = self.query.shape[0], source.u.shape[-1]
            acc = jnp.float64 if source.u.dtype == jnp.float64 else jnp.float32
            state = checked_state(state, "cache.tail", B, source.ape.shape[0], C, self.overlap, acc)
        entries, counts, state = compress(source.u, source.z, source.ape, state, seq_lengths=self.new, **options)
        return (entries, counts), state

    def select(self, index, top_k, index_format, score_dtype):
        """Numbers of the entries that each query attends to, int32 `[B, T, L]`."""
        low = jnp.broadcast_to(self.first_entry, self.positions.shape)
        high = low + jnp.where(self.live, visible_entries(self.positions, self.ratio), 0)
        if not isinstance(index, EntryIndex):
            return self._given(index, top_k, low, high)
        if top_k is None:
            raise ValueError("top_k=None must be an int where index is an EntryIndex")
        query, weights, source, keys = self._index(index, index_format)
        query = _cache.encode_index(self._turned(query), index_format)
        lists, _ = indexer_select(query, keys, weights, top_k, low, high, score_dtype=score_dtype)
        return lists

    def _index(self, index, index_format):
        query, weights = _check.array(index.query, "index.query"), _check.array(index.weights, "index.weights")
        lead = self.query.shape[1:2] if self.packed else self.query.shape[:2]
        if query.ndim != len(lead) + 2 or query.shape[:-2] != lead:
            raise ValueError(f"index.query has shape {query.shape}; expected {(*lead, 'J', 'c')} of query")
        if query.dtype != self.query.dtype:
            raise TypeError(f"index.query dtype {query.dtype} must equal query's {self.query.dtype}")
        if weights.shape != query.shape[:-1]:
            raise ValueError(f"index.weights have shape {weights.shape}; expected {query.shape[:-1]} of index.query")
        c = query.shape[-1]
        source = self._source(index.source, c, "index.source.")
        if source.ape.shape[0] != self.ratio:
            raise ValueError(f"index.source.ape has m={source.ape.shape[0]} rows; source.ape has m={self.ratio}")
        source = jax.lax.stop_gradient(source)
        if self.packed:
            query, weights = query[None], weights[None]
        query, weights = (self._live(jax.lax.stop_gradient(x)) for x in (query, weights))
        if self.cache is None:
            (keys, _), _ = self._compressed(source, None, c)
            return query, weights, source, _cache.encode_index(keys, index_format)
        if self.cache.index_keys is None:
            raise ValueError("cache has no index_keys: it was made without index_dim")
        if self.cache.index_format != index_format:
            raise ValueError(f"index_format={index_format!r} must equal the cache's {self.cache.index_format!r}")
        (new, counts), self.index_tail = self._compressed(source, self.cache.index_tail, c)
        new, place = _cache.encode_index(new, index_format), self._places(counts, new)
        keys = jax.tree.map(lambda old, x: _cache.put(old, place, x), self.cache.index_keys, new)
        self.index_keys = keys
        return query, weights, source, keys

    def _given(self, lists, top_k, low, high):
        lists = _check.array(lists, "index")
        if not jnp.issubdtype(lists.dtype, jnp.integer):
            raise TypeError(f"index must be an EntryIndex or integers, not {lists.dtype}")
        if top_k is not None:
            raise ValueError(f"top_k={top_k} is for an EntryIndex; index gives lists already")
        lists = lists[None] if self.packed else lists
        if lists.ndim != 3 or lists.shape[:2] != self.positions.shape:
            raise ValueError(f"index has shape {lists.shape}; expected {(*self.positions.shape, 'L')} of query")
        lists = jnp.clip(lists, -1, 2**31 - 1).astype(jnp.int32)
        seen = (lists >= 0) & (lists < (high - low)[..., None])
        return jnp.where(seen, lists + low[..., None], -1)

    def all_visible(self):
        """Lists of all entries that each query sees. They have a slot for each that there is room for, and a multiple
        of 64: what `sparse_attention` fills lists up to."""
        E = self.entries[0].shape[1] if self.cache is None else self.cache.capacity // self.ratio
        slot = jnp.arange(max(-(-E // 64), 1) * 64, dtype=jnp.int32)
        count = jnp.where(self.live, visible_entries(self.positions, self.ratio), 0)
        return jnp.where(slot < count[..., None], self.first_entry[..., None] + slot, -1)

    def _places(self, counts, new):
        """Where new entries go in those of the cache, `[B, E]`; past the last where there is none."""
        e = jnp.arange(jax.tree.leaves(new)[0].shape[1], dtype=jnp.int32)
        past = jnp.int32(2**30) + e
        return jnp.where(e < counts[:, None], self.before[:, None] // self.ratio + e, past)

    def attend(self, lists, scale, sinks, return_residual):
        _check.flag(return_residual, "return_residual")
        dtype = self.query.dtype
        near = window_indices(jnp.where(self.live, self.positions, -1), self.window)
        cache = None
        if self.cache is None:
            rows, (entries, _) = self.kv, self.entries
            near = near if not self.packed else jnp.where(near >= 0, near + self.start[..., None], -1)
        else:
            rows, near, cache, entries, lists = self._with_cache(near, lists, dtype)
        out, lse = sparse_attention(
            self.query, rows, near, scale=scale, sinks=sinks, kv2=entries, indices2=lists, return_residual=True
        )
        out, lse = self._live(self._turned(out, inverse=True)), jnp.where(self.live[..., None], lse, -jnp.inf)
        out, lse = (out[0], lse[0]) if self.packed else (out, lse)
        result = (out, lse) if return_residual else out
        return result if cache is None else (result, cache)

    def _with_cache(self, near, lists, dtype):
        """Rows `[B, W + T, D]` with lists of them, the cache with the new tokens, and entries with lists of them."""
        cache, W, T = self.cache, self.window, self.query.shape[1]
        # Slot (L + r) mod W holds position L - W + r.
        slots = (self.before[:, None] + jnp.arange(W, dtype=jnp.int32)) % W
        history = _cache.decode(cache.window, _cache.take(cache.window, slots), dtype)
        kept = _cache.encode(cache.window, self.kv)
        rows = jnp.concatenate([history, _cache.decode(cache.window, kept, dtype)], axis=1)
        near = jnp.where(near >= 0, near - self.before[:, None, None] + W, -1)
        t = jnp.arange(T, dtype=jnp.int32)
        last = (t < self.new[:, None]) & (t >= self.new[:, None] - W)
        ring = _cache.put(cache.window, jnp.where(last, self.positions % W, 2**30 + t), kept)
        new, counts = self.entries
        entries = _cache.put(cache.entries, self._places(counts, new), _cache.encode(cache.entries, new))
        replaced = dict(window=ring, tail=self.tail, entries=entries)
        if self.index_tail is not None:
            replaced |= dict(index_tail=self.index_tail, index_keys=self.index_keys)
        cache = dataclasses.replace(cache, **replaced)
        return rows, near, cache, *_entries(entries, lists, dtype)


def _entries(entries, lists, dtype):
    """Entries of the query's dtype, and lists of them: of bytes, only those that are named, where these are fewer."""
    if not isinstance(entries, Rows584):
        return entries, lists
    B, T, L = lists.shape
    named = math.prod((T, L))
    if named >= entries.shape[1]:
        index = jnp.broadcast_to(jnp.arange(entries.shape[1], dtype=jnp.int32), entries.shape[:2])
        return entries.decode(entries.take(index), dtype), lists
    rows = entries.decode(entries.take(jnp.maximum(lists.reshape(B, named), 0)), dtype)
    return rows, jnp.where(lists >= 0, jnp.arange(named, dtype=jnp.int32).reshape(T, L), -1)


def _size(x, name):
    if isinstance(x, bool) or not isinstance(x, int | np.integer) or x < 1:
        raise ValueError(f"{name}={x!r} must be an int >= 1")
    return int(x)

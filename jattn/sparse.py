"""Sparse attention over lists of keys (DeepSeek sparse attention, "DSA"); `jattn.indexer` makes the lists.

A key row is a latent: all query heads read it, as key with all its channels and as value with the first of them
(`jattn.mla`). Lists are data: an index that is negative or past the end is an empty slot.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from jattn import _check, _formats
from jattn._call import in_auto_mode, int32, only_xla, positive
from jattn._varying import vary, varying_axes
from jattn.indexer import limit
from jattn.reference import sparse as _xla

__all__ = ["page_rows", "sparse_attention", "sparse_weights"]

_FLOATS = ("bfloat16", "float16", "float32", "float64")


def sparse_attention(
    query,
    kv,
    indices,
    *,
    scale: float,
    value_dim: int | None = None,
    sinks=None,
    list_lengths=None,
    k_start=None,
    k_end=None,
    block_size: int = 1,
    kv2=None,
    indices2=None,
    list_lengths2=None,
    return_residual: bool = False,
    implementation: str | None = None,
):
    """Attention of each query over its own list of keys, which all its heads share.

    A slot of a list is empty where its index is negative or past the end of `kv`, or at or past `list_lengths`. An
    index that occurs twice counts twice: lists are multisets. With a second array and list, one softmax is over both.
    The bits of a row depend on the row, its lists and the keys that they name alone: not on other rows, their number,
    the place of the row, or where the keys lie in `kv`. Empty slots that fill a list up to a multiple of 64 change no
    bit.

    Args:
        query: `[*B, T, N, H]`, any number of batch axes.
        kv: `[*B, S, H]`, or `[S, H]` for all; in the query's dtype, or uint8 `[.., S, 656]`, the rows of
            `jattn.pack_latent` for H = 576. Used as key with all H channels, and as value with the first D.
        indices: int `[*B, T, L]`, rows of `kv` in one batch item.
        scale: number that scores are multiplied by. It is that of the attention before absorption (for DeepSeek-V3
            192 ** -0.5, not 576 ** -0.5), which nothing here could guess.
        value_dim: D, from 1 to H; None is H.
        sinks: floating-point `[N]`, a logit that joins the denominator; not scaled.
        list_lengths: int `[*B, T]`: how many slots of each list count; the rest may hold anything.
        k_start, k_end: int `[*B, T]`, or one for all: keys outside of [k_start, k_end) are not seen though listed.
        block_size: how many consecutive rows of `kv` one index names: i is rows i · block_size and the following.
        kv2, indices2, list_lengths2: a second array, `[*B, S2, H]` or `[S2, H]`, and its lists `[*B, T, L2]`.
        return_residual: also return lse.
        implementation: "xla" or None.

    Returns:
        `[*B, T, N, D]` in the query's dtype; with `return_residual` also lse `[*B, T, N]`, the natural log of the
        softmax denominator (sink included), float32 (float64 for float64 inputs). A row without a key is 0, its lse the
        sink or -inf. Differentiable in query, kv, kv2 and sinks, in reverse mode, with the same bits in every run.

    Raises:
        ValueError, TypeError: an argument is wrong (the message names it and its value).
        NotImplementedError: a named implementation that has no kernel for it; second derivatives.

    Example:
        >>> import jax, jax.numpy as jnp, jattn
        >>> kv = jax.random.normal(jax.random.key(0), (100, 64))
        >>> q = jax.random.normal(jax.random.key(1), (3, 8, 64))
        >>> lists = jnp.array([[0, 7, 99], [5, -1, -1], [-1, -1, -1]])
        >>> jattn.sparse_attention(q, kv, lists, scale=64**-0.5, value_dim=48).shape
        (3, 8, 48)

    Source: DeepSeek-V3.2 (2025); FlashMLA for the two lists.
    """
    only_xla("sparse_attention", implementation)
    _check.flag(return_residual, "return_residual")
    call = _Call.make(
        query,
        kv,
        indices,
        scale=scale,
        value_dim=value_dim,
        list_lengths=list_lengths,
        k_start=k_start,
        k_end=k_end,
        block_size=block_size,
        kv2=kv2,
        indices2=indices2,
        list_lengths2=list_lengths2,
        sinks=_check.sinks(sinks, _check.array(query, "query").shape[-2]) if np.ndim(query) > 2 else None,
    )
    arrays, lists = vary((call.arrays, call.lists), varying_axes((call.arrays, call.lists)))
    with jax.named_scope("jattn.sparse_attention"):
        run = functools.partial(_attend, call.options)
        out, lse = in_auto_mode(run, arrays[0], ((0, 1, None), (0, 1)), arrays, lists)
    out, lse = (x.reshape(*call.batch, *x.shape[1:]) for x in (out, lse))
    return (out, lse) if return_residual else out


@functools.partial(jax.jit, static_argnums=0)
@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(options, arrays, lists):
    out, lse = _xla.forward(options, arrays, lists)
    return out.astype(arrays[0].dtype), lse


def _attend_forward(options, arrays, lists):
    return _attend(options, arrays, lists), (arrays, lists)


def _attend_backward(options, saved, cotangents):
    return _backward(options, saved, cotangents), None


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _backward(options, saved, cotangents):
    return _xla.backward(options, *saved, *cotangents)


@_backward.defjvp
def _refuse_second_derivatives(*_):
    raise NotImplementedError("jattn.sparse_attention has first derivatives in reverse mode only")


_attend.__wrapped__.defvjp(_attend_forward, _attend_backward)


def sparse_weights(
    query, kv, indices, lse, *, scale: float, list_lengths=None, k_start=None, k_end=None, block_size: int = 1,
    kv2=None, indices2=None, list_lengths2=None, implementation: str | None = None,
):  # fmt: skip
    """The softmax weights of `sparse_attention` at each slot, summed over heads: what an indexer is trained towards.

    Args:
        query, kv, indices, scale, list_lengths, k_start, k_end, block_size, kv2, indices2, list_lengths2,
        implementation: as in `sparse_attention`.
        lse: floating-point `[*B, T, N]`, as it returned it.

    Returns:
        `[*B, T, L · block_size]` (then L2 for the second list), float32 (float64 for float64 inputs): 0 in empty slots.
        No gradients: it is a target.

    Raises:
        ValueError, TypeError: an argument is wrong. NotImplementedError: a named implementation without a kernel.

    Example:
        >>> import jax, jax.numpy as jnp, jattn
        >>> kv = jax.random.normal(jax.random.key(0), (100, 64))
        >>> q, lists = jax.random.normal(jax.random.key(1), (2, 8, 64)), jnp.array([[0, 7, 99], [5, -1, -1]])
        >>> out, lse = jattn.sparse_attention(q, kv, lists, scale=0.1, return_residual=True)
        >>> jattn.sparse_weights(q, kv, lists, lse, scale=0.1).sum(-1).round(3).tolist()
        [8.0, 8.0]

    Source: DeepSeek-V3.2 (2025), section on training.
    """
    only_xla("sparse_weights", implementation)
    call = _Call.make(
        query,
        kv,
        indices,
        scale=scale,
        value_dim=None,
        list_lengths=list_lengths,
        k_start=k_start,
        k_end=k_end,
        block_size=block_size,
        kv2=kv2,
        indices2=indices2,
        list_lengths2=list_lengths2,
    )
    lse, (rows, N, _) = _check.array(lse, "lse"), call.arrays[0].shape
    if lse.shape != (*call.batch, N):
        raise ValueError(f"lse has shape {lse.shape}; expected [*B, T, N]={(*call.batch, N)}")
    if not jnp.issubdtype(lse.dtype, jnp.floating):
        raise TypeError(f"lse must be floating-point, not {lse.dtype}")
    with jax.named_scope("jattn.sparse_weights"):
        arrays, lse = jax.lax.stop_gradient((call.arrays, lse.reshape(rows, N)))
        arrays, lists, lse = vary((arrays, call.lists, lse), varying_axes((arrays, call.lists, lse)))
        run = functools.partial(_xla.weights, call.options)
        found = in_auto_mode(run, arrays[0], ((0, None),), arrays, lists, lse)
    return found.reshape(*call.batch, found.shape[-1])


def page_rows(indices, block_tables, page_size: int):
    """Rows of a pool of pages for indices into sequences: page of the block table · page_size + slot.

    Args:
        indices: int `[B, T, L]`, positions in each sequence; negative ones are empty slots, and stay -1.
        block_tables: int `[B, W]`: entry w of row b is the page of tokens w · page_size and following of sequence b.
        page_size: slots of a page, a positive int.

    Returns:
        int32 `[B, T, L]`, rows of `pool.reshape(-1, H)` for `sparse_attention`; -1 for what lies past the table, and
        for page ids that are negative or would pass 2^31 rows.

    Raises:
        ValueError, TypeError: an argument is wrong.

    Example:
        >>> import jax.numpy as jnp, jattn
        >>> jattn.page_rows(jnp.array([[[0, 17, -1, 99]]]), jnp.array([[5, 2]]), 16)  # rows of pages [P, 16, H]
        Array([[[80, 33, -1, -1]]], dtype=int32)

    Source: Kwon et al., "PagedAttention" (2023).
    """
    indices, tables = _check.array(indices, "indices"), _check.array(block_tables, "block_tables")
    page_size = positive(page_size, "page_size")
    for name, x in (("indices", indices), ("block_tables", tables)):
        if not jnp.issubdtype(x.dtype, jnp.integer):
            raise TypeError(f"{name} must be integers, not {x.dtype}")
    if tables.ndim != 2 or indices.ndim != 3 or indices.shape[0] != tables.shape[0]:
        shapes = f"indices have shape {indices.shape} and block_tables {tables.shape}"
        raise ValueError(f"{shapes}; expected [B, T, L] and [B, W]")
    indices, tables = int32(indices), int32(tables)
    if tables.shape[1] == 0:
        return jnp.full(indices.shape, -1, jnp.int32)
    inside = (indices >= 0) & (indices // page_size < tables.shape[1])
    at = jnp.where(inside, indices // page_size, 0)
    page = jnp.take_along_axis(tables[:, None], at, axis=2, mode="clip")
    inside &= (page >= 0) & (page < (2**31 - 1) // page_size)
    return jnp.where(inside, page * page_size + indices % page_size, -1)


@dataclasses.dataclass(frozen=True)
class _Call:
    """A checked call over lists, with rows for batch and query axes."""

    arrays: tuple  # (query [R, N, H], kvs, sinks)
    lists: tuple
    options: _xla.Options
    batch: tuple[int, ...]  # (*B, T)

    @classmethod
    def make(
        cls,
        query,
        kv,
        indices,
        *,
        scale,
        value_dim,
        sinks=None,
        list_lengths=None,
        k_start=None,
        k_end=None,
        block_size=1,
        kv2=None,
        indices2=None,
        list_lengths2=None,
    ):
        query = _check.array(query, "query")
        if query.ndim < 3 or 0 in query.shape[-2:]:
            raise ValueError(f"query has shape {query.shape}; expected [*B, T, N, H]")
        if str(query.dtype) not in _FLOATS:
            raise TypeError(f"query has dtype {query.dtype}; expected one of {', '.join(_FLOATS)}")
        *batch, N, H = query.shape
        batch = tuple(batch)
        if isinstance(scale, bool) or not isinstance(scale, int | float | np.number):
            raise TypeError(f"scale={scale!r} must be a Python number: it is compiled in")
        if not math.isfinite(scale):
            raise ValueError(f"scale={scale!r} must be finite")
        value_dim = H if value_dim is None else positive(value_dim, "value_dim")
        if value_dim > H:
            raise ValueError(f"value_dim={value_dim} must be <= H={H}: values are the first channels of keys")
        if (kv2 is None) != (indices2 is None):
            raise ValueError("kv2 and indices2 go together: one is None")
        if kv2 is None and list_lengths2 is not None:
            raise ValueError("list_lengths2 needs kv2 and indices2")
        given = [(kv, indices, list_lengths, "")]
        given += [] if kv2 is None else [(kv2, indices2, list_lengths2, "2")]
        found = [_listed(kv, indices, lengths, batch, H, query.dtype, tail) for kv, indices, lengths, tail in given]
        kvs, lists, sizes = zip(*found, strict=True)
        limits = {"low": limit(k_start, "k_start", batch), "high": limit(k_end, "k_end", batch)}
        blocks = (positive(block_size, "block_size"), *[1] * (len(kvs) - 1))
        return cls(
            (query.reshape(-1, N, H), tuple(kvs), sinks),
            (dataclasses.replace(lists[0], **limits), *lists[1:]),
            _xla.Options(float(scale), value_dim, sizes, blocks),
            batch,
        )


def _listed(kv, indices, lengths, batch, H, dtype, tail):
    """`(kv [P, H], Lists, keys of one batch item)` of one kv array; `tail` ends the names of its arguments."""
    kv, indices = _check.array(kv, "kv" + tail), _check.array(indices, "indices" + tail)
    if kv.dtype != dtype and kv.dtype != jnp.uint8:
        raise TypeError(f"kv{tail} dtype {kv.dtype} must equal query's {dtype}, or be uint8 for stored rows")
    if kv.ndim != 2 and kv.shape[:-2] != batch[:-1] or kv.ndim < 2:
        raise ValueError(f"kv{tail} has shape {kv.shape}; expected [S, H], or [*B, S, H] with *B={batch[:-1]}")
    if kv.dtype == jnp.uint8 and (kv.shape[-1], H) != (_formats.ROW_BYTES, _formats.LATENT + _formats.ROPE):
        raise ValueError(f"kv{tail} has rows of {kv.shape[-1]} bytes for H={H}; stored rows have 656, for H=576")
    if kv.dtype != jnp.uint8 and kv.shape[-1] != H:
        raise ValueError(f"kv{tail} head dim H={kv.shape[-1]} must equal query's H={H}")
    if not jnp.issubdtype(indices.dtype, jnp.integer):
        raise TypeError(f"indices{tail} must be integers, not {indices.dtype}")
    if indices.ndim != len(batch) + 1 or indices.shape[:-1] != batch:
        raise ValueError(f"indices{tail} have shape {indices.shape}; expected [*B, T, L] with (*B, T)={batch}")
    size, rows = kv.shape[-2], math.prod(batch)
    shared = kv.ndim == 2
    if math.prod(kv.shape[:-1]) > 2**31 - 1:
        raise ValueError(f"kv{tail} has shape {kv.shape}; at most 2^31 - 1 rows can be addressed")
    item = jnp.zeros((rows,), jnp.int32) if shared else jnp.arange(rows, dtype=jnp.int32) // max(batch[-1], 1)
    lists = _xla.Lists(
        int32(indices).reshape(rows, -1) if indices.size else jnp.zeros((rows, indices.shape[-1]), jnp.int32),
        item * size,
        limit(lengths, "list_lengths" + tail, batch),
    )
    return kv.reshape(-1, kv.shape[-1]), lists, size

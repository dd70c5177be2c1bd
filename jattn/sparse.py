"""Sparse attention over lists of keys, and the indexer that makes the lists (DeepSeek sparse attention, "DSA").

    index scores   I[t, s] = sum over index heads j of w[t, j] · max(q[t, j] · k[s], 0)       `indexer_logits`
    selection      the k largest of each row, ties to the lower index, ascending               `topk_select`
    attention      softmax over the selected keys, which all heads of a query share            `sparse_attention`

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
from jattn._varying import vary, varying_axes
from jattn.reference import sparse as _xla

__all__ = ["indexer_logits", "indexer_select", "sparse_attention", "topk_select"]

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
            `jattn.mla.pack_latent` for H = 576. Used as key with all H channels, and as value with the first D.
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
        query, kv, indices, scale=scale, value_dim=value_dim, list_lengths=list_lengths, k_start=k_start, k_end=k_end,
        block_size=block_size, kv2=kv2, indices2=indices2, list_lengths2=list_lengths2,
        sinks=_check.sinks(sinks, _check.array(query, "query").shape[-2]) if np.ndim(query) > 2 else None,
    )
    arrays, lists = vary((call.arrays, call.lists), varying_axes((call.arrays, call.lists)))
    with jax.named_scope("jattn.sparse_attention"):
        out, lse = _attend(call.options, arrays, lists)
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


@dataclasses.dataclass(frozen=True)
class _Call:
    """A checked call over lists, with rows for batch and query axes."""

    arrays: tuple  # (query [R, N, H], kvs, sinks)
    lists: tuple
    options: _xla.Options
    batch: tuple[int, ...]  # (*B, T)

    @classmethod
    def make(
        cls, query, kv, indices, *, scale, value_dim, sinks=None, list_lengths=None, k_start=None, k_end=None,
        block_size=1, kv2=None, indices2=None, list_lengths2=None,
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
        value_dim = H if value_dim is None else _positive(value_dim, "value_dim")
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
        limits = {"low": _limit(k_start, "k_start", batch), "high": _limit(k_end, "k_end", batch)}
        blocks = (_positive(block_size, "block_size"), *[1] * (len(kvs) - 1))
        return cls(
            (query.reshape(-1, N, H), tuple(kvs), sinks),
            (dataclasses.replace(lists[0], **limits), *lists[1:]),
            _xla.Options(float(scale), value_dim, sizes, blocks), batch,
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
        _int32(indices).reshape(rows, -1) if indices.size else jnp.zeros((rows, indices.shape[-1]), jnp.int32),
        item * size, _limit(lengths, "list_lengths" + tail, batch),
    )
    return kv.reshape(-1, kv.shape[-1]), lists, size


def indexer_logits(
    query, key, weights, k_start=None, k_end=None, *, out_dtype=jnp.float32, implementation: str | None = None
):
    """Index scores `I[t, s] = sum over j of weights[t, j] · max(query[t, j] · key[s], 0)`.

    They are -inf outside of [k_start, k_end).
    All constant factors (head_dim ** -0.5 · heads ** -0.5) belong in `weights`, which may be negative. Products and
    sums are float32 (float64 for float64). A score's bits depend on its query, its key and the weights alone.

    Args:
        query: `[*B, T, N, H]`, N index heads; or the pair (codes, scales) that `indexer_quantize` returns.
        key: `[*B, S, H]`, one head, or `[S, H]` for all; or such a pair, in the same format.
        weights: floating-point `[*B, T, N]`.
        k_start, k_end: int `[*B, T]`, or one for all: the keys that each query may see; None is 0 and S. A causal
            query at position p has k_end = p + 1.
        out_dtype: of the scores: float32, or bfloat16 for a cheaper selection (float64 for float64).
        implementation: "xla" or None.

    Returns:
        `[*B, T, S]`. Differentiable in arrays (not in codes); the derivative of max(x, 0) at 0 is 0.

    Raises:
        ValueError, TypeError: an argument is wrong. NotImplementedError: a named implementation without a kernel.

    Example:
        >>> q, k = jax.random.normal(jax.random.key(0), (5, 4, 32)), jax.random.normal(jax.random.key(1), (5, 32))
        >>> jattn.indexer_logits(q, k, jnp.ones((5, 4)), k_end=jnp.arange(1, 6)).shape
        (5, 5)

    Source: DeepSeek-V3.2 (2025), "lightning indexer".
    """
    only_xla("indexer_logits", implementation)
    index, batch = _index(query, key, weights, k_start, k_end)
    out_dtype = _score_dtype(out_dtype, "out_dtype")
    with jax.named_scope("jattn.indexer_logits"):
        scores = _xla.logits(index, out_dtype)
    return scores.reshape(*batch, scores.shape[-1])


def topk_select(scores, k: int, k_start=None, k_end=None, *, implementation: str | None = None):
    """The k largest scores of each row: exact, ties to the lower index, in ascending order of index.

    Scores are compared in their dtype. Zeros tie whatever their sign; NaN is below everything else. What lies outside
    of [k_start, k_end) is left out by its index, whatever its value, and -inf inside is a candidate like any other.

    Args:
        scores: floating-point `[*B, T, S]`.
        k: slots of a list, a positive int; it may be larger than S.
        k_start, k_end: int `[*B, T]`, or one for all; None is 0 and S.
        implementation: "xla" or None.

    Returns:
        (indices int32 `[*B, T, k]`, count int32 `[*B, T]`): count = min(k, k_end - k_start) indices, then -1.

    Raises:
        ValueError, TypeError: an argument is wrong. NotImplementedError: a named implementation without a kernel.

    Example:
        >>> jattn.topk_select(jnp.array([[1.0, 3.0, 3.0, 2.0]]), 2)
        (Array([[1, 2]], dtype=int32), Array([2], dtype=int32))
    """
    only_xla("topk_select", implementation)
    scores, k = _check.array(scores, "scores"), _positive(k, "k")
    if scores.ndim < 2:
        raise ValueError(f"scores have shape {scores.shape}; expected [*B, T, S]")
    if str(scores.dtype) not in _FLOATS:
        raise TypeError(f"scores have dtype {scores.dtype}; expected one of {', '.join(_FLOATS)}")
    *batch, S = scores.shape
    batch, rows = tuple(batch), math.prod(batch)
    low, high = _bounds(k_start, k_end, batch, S)
    if rows == 0 or S == 0:
        return jnp.full((*batch, k), -1, jnp.int32), jnp.zeros(batch, jnp.int32)
    with jax.named_scope("jattn.topk_select"):
        indices, count = _xla.top_k(jax.lax.stop_gradient(scores).reshape(rows, S), k, low, high)
    return indices.reshape(*batch, k), count.reshape(batch)


def indexer_select(
    query, key, weights, k: int, k_start=None, k_end=None, *, score_dtype=jnp.float32,
    implementation: str | None = None,
):  # fmt: skip
    """`topk_select` of `indexer_logits`, for a few rows at a time: scores of all rows never exist at once.

    Args:
        query, key, weights, k_start, k_end: as in `indexer_logits`.
        k: as in `topk_select`.
        score_dtype: what scores are rounded to before they are compared: float32 or bfloat16.
        implementation: "xla" or None.

    Returns:
        (indices int32 `[*B, T, k]`, count int32 `[*B, T]`), as `topk_select`, with its bits. No gradients.

    Raises:
        ValueError, TypeError: an argument is wrong. NotImplementedError: a named implementation without a kernel.

    Example:
        >>> lists, count = jattn.indexer_select(q, k, w, 2048, k_end=positions + 1)
        >>> out = jattn.sparse_attention(query, latents, lists, scale=192**-0.5, value_dim=512)

    Source: DeepSeek-V3.2 (2025).
    """
    only_xla("indexer_select", implementation)
    k = _positive(k, "k")
    index, batch = _index(query, key, weights, k_start, k_end)
    score_dtype = _score_dtype(score_dtype, "score_dtype")
    with jax.named_scope("jattn.indexer_select"):
        indices, count = _xla.select(jax.lax.stop_gradient(index), k, score_dtype)
    return indices.reshape(*batch, k), count.reshape(batch)


def only_xla(op: str, implementation: str | None):
    """Refuses every implementation that is named, but "xla"."""
    if implementation == "mosaic":
        reason = "mosaic: it has no kernel for this op"
        raise NotImplementedError(f"no implementation of jattn.{op} can run this call: {reason}; 'xla' and None run it")
    if implementation not in (None, "xla"):
        raise ValueError(f"implementation={implementation!r} is unknown; choose from 'mosaic', 'xla' or None")


def _index(query, key, weights, k_start, k_end):
    """The checked operands of index scores, with rows for batch and query axes, and (*B, T)."""
    weights = _check.array(weights, "weights")
    if weights.ndim < 2 or not jnp.issubdtype(weights.dtype, jnp.floating):
        raise ValueError(f"weights are {weights.dtype} of shape {weights.shape}; expected floating-point [*B, T, N]")
    *batch, N = weights.shape
    batch = tuple(batch)
    query, key = _coded(query, "query"), _coded(key, "key")
    q, k = (x[0] if isinstance(x, tuple) else x for x in (query, key))
    if q.dtype != k.dtype:
        raise TypeError(f"key dtype {k.dtype} must equal query's {q.dtype}")
    if q.shape[:-1] != (*batch, N):
        raise ValueError(f"query has shape {q.shape}; expected [*B, T, N, H] with (*B, T, N)={(*batch, N)} of weights")
    if k.ndim < 2 or (k.ndim != 2 and k.shape[:-2] != batch[:-1]):
        raise ValueError(f"key has shape {k.shape}; expected [S, H], or [*B, S, H] with *B={batch[:-1]}")
    if k.shape[-1] != q.shape[-1]:
        raise ValueError(f"key head dim H={k.shape[-1]} must equal query's H={q.shape[-1]}")
    rows, S, items = math.prod(batch), k.shape[-2], math.prod(k.shape[:-2])
    low, high = _bounds(k_start, k_end, batch, S)
    item = jnp.arange(rows, dtype=jnp.int32) // max(batch[-1], 1) if items > 1 else jnp.zeros((rows,), jnp.int32)
    index = _xla.Index(
        jax.tree.map(lambda x: x.reshape(rows, N, x.shape[-1]), query), weights.reshape(rows, N),
        jax.tree.map(lambda x: x.reshape(items, S, x.shape[-1]), key), item, low, high,
    )
    return vary(index, varying_axes(index)), batch


def _coded(x, name):
    """An array, or a checked pair (codes, scales) of `indexer_quantize`."""
    if not isinstance(x, tuple | list):
        x = _check.array(x, name)
        if str(x.dtype) not in _FLOATS:
            raise TypeError(f"{name} has dtype {x.dtype}; expected one of {', '.join(_FLOATS)}, or (codes, scales)")
        return x
    if len(x) != 2:
        raise ValueError(f"{name} must be an array or a pair (codes, scales), not {len(x)} arrays")
    codes, scales = (_check.array(y, name) for y in x)
    kinds = {"float8_e4m3fn": ("float32", 1), "uint8": ("uint8", codes.shape[-1] // 16)}
    want = kinds.get(str(codes.dtype))
    if want is None or str(scales.dtype) != want[0] or scales.shape != (*codes.shape[:-1], want[1]):
        raise ValueError(
            f"{name} is {codes.dtype} of shape {codes.shape} with {scales.dtype} scales of shape {scales.shape}: "
            "no pair that indexer_quantize returns"
        )
    return codes, scales


def _score_dtype(dtype, name):
    dtype = jnp.dtype(dtype)
    if dtype.name not in _FLOATS:
        raise TypeError(f"{name}={dtype.name} must be one of {', '.join(_FLOATS)}")
    return dtype


def _bounds(k_start, k_end, batch, S):
    """int32 `[R]` each, within [0, S]."""
    rows = math.prod(batch)
    low, high = _limit(k_start, "k_start", batch), _limit(k_end, "k_end", batch)
    low = jnp.zeros((rows,), jnp.int32) if low is None else jnp.clip(low, 0, S)
    high = jnp.full((rows,), S, jnp.int32) if high is None else jnp.clip(high, 0, S)
    return low, jnp.maximum(low, high)


def _limit(x, name, batch):
    """int32 `[R]` of an int, or one for each row; None stays."""
    if x is None:
        return None
    if isinstance(x, bool | float):
        raise TypeError(f"{name}={x!r} must be an int array")
    x = _check.array(x, name)
    if not jnp.issubdtype(x.dtype, jnp.integer):
        raise TypeError(f"{name} must be integers, not {x.dtype}")
    if x.shape not in ((), batch):
        raise ValueError(f"{name} has shape {x.shape}; expected an int, or one for each query, {batch}")
    return jnp.broadcast_to(_int32(x), batch).reshape(-1)


def _int32(x):
    """int32 of any integers; those past it saturate, and so stay out of every range."""
    if x.dtype.itemsize > 4 or x.dtype == jnp.uint32:
        x = jnp.minimum(x, np.asarray(2**31 - 1, x.dtype))
        x = x if jnp.issubdtype(x.dtype, jnp.unsignedinteger) else jnp.maximum(x, np.asarray(-(2**31), x.dtype))
    return x.astype(jnp.int32)


def _positive(x, name):
    if isinstance(x, bool) or not isinstance(x, int | np.integer):
        raise TypeError(f"{name}={x!r} must be a Python int")
    if x < 1:
        raise ValueError(f"{name}={x} must be >= 1")
    return int(x)

"""Which keys a query may see: a small algebra of masks.

A mask is an immutable pytree: its arrays are leaves, everything else is static, so equal masks share one compilation.
Combine masks with `&`, `|` and `~`; pass the result as `mask=` to any jattn op, inside `jit` or out.

    from jattn import masks
    mask = masks.causal() & masks.window(255, 0) & masks.segments(document_ids)
    print(mask.draw(64, 64))

A mask answers three questions, none of which needs an array of T x S elements:

* `span` and `row_bounds`: which interval of keys can a query see at most;
* `classify`: which blocks of the score matrix are hidden (skip), visible (full) or mixed (partial);
* `tile`: which elements of one tile are visible.

`query_offset` places query t at position `query_offset + t` on the key axis; causal, window, prefix, predicate and tree
masks look at that position. Sources: FlashAttention's and FlexAttention's block masks; `tokamax` for row ranges.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jattn._callables import Callable
from jattn._mask import BlockMap as BlockMap
from jattn._mask import Mask as Mask
from jattn._mask_rules import Blocks, Causal, Dense, Lengths, Predicate, Prefix, Segments, Tree, Window, short

__all__ = [
    "BlockMap", "Mask", "blocks", "causal", "dense", "lengths", "predicate", "prefix", "segments", "tree", "window",
]


def causal() -> Mask:
    """Query at position p sees keys at positions up to and including p."""
    return Causal()


_SAME = object()


def window(left: int | None, right: Any = _SAME) -> Mask:
    """Query at position p sees keys from `p - left` to `p + right`, both included.

    Args:
        left, right: ints (negative ones are real bounds) or None for unbounded. `window(w)` means `window(w, w)`.

    Raises:
        ValueError: `left + right < 0`: no key could ever be visible.
        TypeError: a bound that is not an int or None (a traced bound, say).

    Example:
        `masks.window(3, 0)`: the query's own position and the three before it, four keys.
    """
    right = left if right is _SAME else right
    for name, bound in (("left", left), ("right", right)):
        if bound is not None and (isinstance(bound, bool) or not isinstance(bound, int | np.integer)):
            raise TypeError(f"window {name}={bound!r} must be an int or None, not {type(bound).__name__}")
    left, right = (None if b is None else int(b) for b in (left, right))
    if left is not None and right is not None and left + right < 0:
        raise ValueError(f"window ({left}, {right}) is empty: left + right must be >= 0; use None for unbounded")
    return Window(left, right)


def prefix(length) -> Mask:
    """The prefix-LM rule: keys before position `length` are visible to every query, later ones causally.

    Args:
        length: int, or int array `[*B]` (one a sequence).
    """
    return Prefix(_integers(length, "prefix length"))


def lengths(key_lengths) -> Mask:
    """Only the first `key_lengths` keys of each sequence exist: int, or int array `[*B]`.

    Keys and values beyond them may hold anything, NaN included.
    """
    return Lengths(_integers(key_lengths, "key lengths"))


def segments(query_ids, key_ids=None) -> Mask:
    """Packed documents: a query sees the keys of equal id. Only equality matters: any ids, any order.

    Args:
        query_ids: int `[T]` or `[*B, T]`.
        key_ids: int `[S]` or `[*B, S]`; None when queries and keys are the same tokens.
    """
    query_ids = _array(query_ids, "query segment ids", jnp.integer)
    key_ids = None if key_ids is None else _array(key_ids, "key segment ids", jnp.integer)
    if key_ids is not None and query_ids.dtype != key_ids.dtype:
        raise TypeError(f"key segment ids are {key_ids.dtype}, query segment ids are {query_ids.dtype}: use one dtype")
    for name, ids in (("query", query_ids), ("key", key_ids)):
        if ids is not None and ids.ndim == 0:
            raise ValueError(f"{name} segment ids are a scalar; expected one id a token")
    return Segments(query_ids, key_ids)


def blocks(block_mask, block_size) -> Mask:
    """Block-sparse attention: block (i, j) of the score matrix is visible where `block_mask[..., i, j]` is true.

    Args:
        block_mask: bool, broadcastable to `[*B, N, ceil(T / block_q), ceil(S / block_k)]`.
        block_size: `(block_q, block_k)`, or one int for both.
    """
    size = (block_size, block_size) if isinstance(block_size, int) else tuple(block_size)
    if len(size) != 2 or any(isinstance(b, bool) or not isinstance(b, int) or b <= 0 for b in size):
        raise ValueError(f"block_size={block_size!r} must be a positive int or a pair of them")
    return Blocks(_array(block_mask, "block_mask", jnp.bool_), size)


def dense(array) -> Mask:
    """An arbitrary mask: bool, broadcastable to `[*B, N, T, S]`; true means visible."""
    return Dense(_array(array, "mask", jnp.bool_))


def predicate(function, *aux) -> Mask:
    """A rule in elementwise JAX: `function(b, n, t, s, *aux) -> bool`.

    Args:
        function: called for one element, with int32 scalars: b is the flat batch index (or the sequence index of packed
            sequences), n the head, t and s the positions of query and key. It may close over Python numbers, never over
            arrays.
        *aux: arrays that broadcast to `[*B, N, T, S]`; the function receives them already at its element.

    Raises:
        TypeError: the function closes over an array, or returns something other than bool.

    Example:
        `masks.predicate(lambda b, n, t, s, stride: (t - s) % stride == 0, strides[:, None, None])`
    """
    return Predicate(
        tuple(_array(a, f"predicate aux {i}") for i, a in enumerate(aux)),
        Callable(function, "masks.predicate(fn, *arrays) with fn(b, n, t, s, *arrays)", 4 + len(aux)),
    )


def tree(parents) -> Mask:
    """Tree verification: T draft tokens at positions `offset .. offset + T - 1` see every key before them and, among
    themselves, only their ancestors and themselves.

    Args:
        parents: int `[T]` or `[*B, T]`: index of each token's parent, which comes before it; -1 for a root.

    Raises:
        ValueError: a concrete parent that is not in [-1, t).
    """
    parents = _array(parents, "tree parents", jnp.integer)
    if parents.ndim == 0:
        raise ValueError("tree parents are a scalar; expected one parent a query")
    count = parents.shape[-1]
    order = jnp.arange(count, dtype=parents.dtype)
    if not isinstance(parents, jax.core.Tracer) and bool(jnp.any((parents >= order) | (parents < -1))):
        raise ValueError(f"tree parents {short(parents, values=True)} must satisfy -1 <= parents[t] < t")

    def add(t, ancestors):
        parent = jax.lax.dynamic_index_in_dim(parents, t, -1)  # [*B, 1]
        path = jnp.take_along_axis(ancestors, jnp.maximum(parent, 0)[..., None], axis=-2)[..., 0, :]
        path = (path & (parent >= 0)) | (order == t.astype(order.dtype))
        return jax.lax.dynamic_update_index_in_dim(ancestors, path, t, -2)

    start = jnp.broadcast_to(jnp.zeros((), bool) & (parents[..., None] < 0), (*parents.shape, count))
    return Tree(jax.lax.fori_loop(jnp.int32(0), jnp.int32(count), add, start) if count else start)


def _integers(x, name):
    """A Python int stays static; an array becomes a leaf."""
    if isinstance(x, bool):
        raise TypeError(f"{name}={x!r} must be an int or an int array, not bool")
    if isinstance(x, int | np.integer):
        if x < 0:
            raise ValueError(f"{name}={x} must be >= 0")
        return int(x)
    return _array(x, name, jnp.integer)


def _array(x, name, kind=None):
    if isinstance(x, np.ndarray | np.generic | list | tuple):
        x = jnp.asarray(x)
    if not hasattr(x, "dtype") or not hasattr(x, "shape"):
        raise TypeError(f"{name} must be an array, not {type(x).__name__}")
    if kind is not None and not jnp.issubdtype(x.dtype, kind):
        hint = "; additive masks go to bias" if name == "mask" and jnp.issubdtype(x.dtype, jnp.floating) else ""
        raise TypeError(f"{name} must be {'bool' if kind is jnp.bool_ else 'integer'}, not {x.dtype}{hint}")
    return x

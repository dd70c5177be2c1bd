"""The indexer of DeepSeek sparse attention: cheap scores, and the keys that they select for `sparse_attention`.

What is what, from the scores of all keys to a list of some:

    index scores   I[t, s] = sum over index heads j of w[t, j] · max(q[t, j] · k[s], 0)       `indexer_logits`
    selection      the k largest of each row, ties to the lower index, ascending               `topk_select`
    both           for a few rows at a time                                                     `indexer_select`
    training       the scores of selected keys, towards where attention looks                   `indexer_kl`
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jattn import _check, _formats
from jattn._call import in_auto_mode, int32, only_xla, positive
from jattn._formats import hadamard
from jattn._project import fits, layer_norm, normal, product, rotated
from jattn._varying import vary, varying_axes
from jattn.reference import indexer as _xla
from jattn.reference.sparse import Lists

__all__ = [
    "IndexerWeights", "hadamard", "indexer_dequantize", "indexer_kl", "indexer_logits", "indexer_project",
    "indexer_quantize", "indexer_scores", "indexer_select", "topk_select",
]  # fmt: skip

_FLOATS = ("bfloat16", "float16", "float32", "float64")
_FORMATS = ("fp8_row", "fp8_row_ue8m0", "fp4_b32")


def indexer_quantize(x, fmt: str = "fp8_row"):
    """Rounds index queries or keys, to the nearest value that the format has, ties to even.

    "fp8_row": e4m3 codes and one float32 scale a row, max|x| / 448, with max|x| taken as at least 1e-4.
    "fp8_row_ue8m0": the same, the scale rounded up to a power of two.
    "fp4_b32": e2m1 codes, two to a byte, the low nibble first, and for 32 channels one scale, the smallest power of two
    >= max|x| / 6, as the byte b of 2^(b - 127).

    NaN and Inf make NaN of what shares their scale. Models rotate rows by `hadamard` before this.

    Args:
        x: floating-point `[.., H]`; H a multiple of 32 for "fp4_b32".
        fmt: one of the three names.

    Returns:
        (codes, scales): float8_e4m3fn `[.., H]` and float32 `[.., 1]`, or uint8 `[.., H / 2]` and uint8 `[.., H / 32]`.

    Raises:
        ValueError: an unknown format, or an H that it does not have. TypeError: x is not floating-point.

    Example:
        >>> import jax, jattn
        >>> codes, scales = jattn.indexer_quantize(jax.random.normal(jax.random.key(0), (100, 128)), "fp4_b32")
        >>> codes.shape, scales.shape
        ((100, 64), (100, 4))

    Source: DeepSeek-V3.2 and V4; OCP Microscaling Formats 1.0.
    """
    x = _check.array(x, "x")
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"x must be floating-point, not {x.dtype}")
    if fmt not in _FORMATS:
        raise ValueError(f"fmt={fmt!r} is unknown; choose from {', '.join(map(repr, _FORMATS))}")
    if x.ndim < 1 or x.shape[-1] == 0:
        raise ValueError(f"x has shape {x.shape}; expected [.., H]")
    return _quantize(x, fmt)


@functools.partial(jax.jit, static_argnums=1)
def _quantize(x, fmt):
    if fmt == "fp4_b32":
        return _formats.quantize_fp4(x)
    return _formats.quantize_fp8(x, power_of_two=fmt == "fp8_row_ue8m0")


def indexer_dequantize(codes, scales, dtype=jnp.float32):
    """The numbers that `indexer_quantize` kept.

    Args:
        codes, scales: as it returned them.
        dtype: a floating dtype; bfloat16 holds FP4 exactly, and fp8 with scales that are powers of two.

    Returns:
        `[.., H]` of `dtype`.

    Raises:
        ValueError: no such pair.

    Example:
        >>> import jax.numpy as jnp, jattn
        >>> jattn.indexer_dequantize(*jattn.indexer_quantize(jnp.array([0.1, -448.0, 3.0]))).tolist()
        [0.1015625, -448.0, 3.0]

    Source: as `indexer_quantize`.
    """
    codes, scales = _coded((codes, scales), "codes")
    run = _formats.dequantize_fp4 if codes.dtype == jnp.uint8 else _formats.dequantize_fp8
    return jax.jit(run, static_argnums=2)(codes, scales, jnp.dtype(dtype))


def indexer_logits(
    query, key, weights, k_start=None, k_end=None, *, block_tables=None, out_dtype=jnp.float32,
    implementation: str | None = None,
):  # fmt: skip
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
        block_tables: int `[B, W]`, for keys in pages: `key` is then `[P, page, H]` for all, *B is one axis, and S is
            W · page. Page ids of keys in [k_start, k_end) must be in range; others may be anything.
        out_dtype: of the scores: float32, or bfloat16 for a cheaper selection (float64 for float64).
        implementation: "xla" or None.

    Returns:
        `[*B, T, S]`. Differentiable in arrays (not in codes); the derivative of max(x, 0) at 0 is 0.

    Raises:
        ValueError, TypeError: an argument is wrong. NotImplementedError: a named implementation without a kernel.

    Example:
        >>> import jax, jax.numpy as jnp, jattn
        >>> q, k = jax.random.normal(jax.random.key(0), (5, 4, 32)), jax.random.normal(jax.random.key(1), (5, 32))
        >>> jattn.indexer_logits(q, k, jnp.ones((5, 4)), k_end=jnp.arange(1, 6)).shape
        (5, 5)

    Source: DeepSeek-V3.2 (2025), "lightning indexer".
    """
    only_xla("indexer_logits", implementation)
    index, batch = _index(query, key, weights, k_start, k_end, block_tables)
    out_dtype = _score_dtype(out_dtype, "out_dtype")
    if index.tables is not None:
        index = dataclasses.replace(index, key=_in_pages(index.key))
    with jax.named_scope("jattn.indexer_logits"):
        scores = _logits(index, out_dtype)
    return scores.reshape(*batch, scores.shape[-1])


_logits = jax.jit(_xla.logits, static_argnums=1)
_top_k = jax.jit(_xla.top_k, static_argnums=1)
_select = jax.jit(_xla.select, static_argnums=(1, 2))
_kl = jax.jit(_xla.kl)


@jax.custom_jvp
def _in_pages(key):
    return key


@_in_pages.defjvp
def _refuse_derivatives_of_pages(*_):
    raise NotImplementedError("jattn.indexer_logits has no derivatives over keys in pages, only over arrays of keys")


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
        >>> import jax.numpy as jnp, jattn
        >>> jattn.topk_select(jnp.array([[1.0, 3.0, 3.0, 2.0]]), 2)
        (Array([[1, 2]], dtype=int32), Array([2], dtype=int32))

    Source: the rule of `jax.lax.top_k` for ties, by counting.
    """
    only_xla("topk_select", implementation)
    scores, k = _check.array(scores, "scores"), positive(k, "k")
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
        indices, count = _top_k(jax.lax.stop_gradient(scores).reshape(rows, S), k, low, high)
    return indices.reshape(*batch, k), count.reshape(batch)


def indexer_select(
    query, key, weights, k: int, k_start=None, k_end=None, *, block_tables=None, score_dtype=jnp.float32,
    implementation: str | None = None,
):  # fmt: skip
    """`topk_select` of `indexer_logits`, for a few rows at a time: scores of all rows never exist at once.

    Args:
        query, key, weights, k_start, k_end, block_tables: as in `indexer_logits`.
        k: as in `topk_select`.
        score_dtype: what scores are rounded to before they are compared: float32 or bfloat16.
        implementation: "xla" or None.

    Returns:
        (indices int32 `[*B, T, k]`, count int32 `[*B, T]`), as `topk_select`, with its bits. No gradients.

    Raises:
        ValueError, TypeError: an argument is wrong. NotImplementedError: a named implementation without a kernel.

    Example:
        >>> import jax, jax.numpy as jnp, jattn
        >>> q, k = jax.random.normal(jax.random.key(0), (9, 4, 32)), jax.random.normal(jax.random.key(1), (9, 32))
        >>> lists, count = jattn.indexer_select(q, k, jnp.ones((9, 4)), 3, k_end=jnp.arange(1, 10))
        >>> lists[:2].tolist(), count.tolist()
        ([[0, -1, -1], [0, 1, -1]], [1, 2, 3, 3, 3, 3, 3, 3, 3])

    Source: DeepSeek-V3.2 (2025).
    """
    only_xla("indexer_select", implementation)
    k = positive(k, "k")
    index, batch = _index(query, key, weights, k_start, k_end, block_tables)
    score_dtype = _score_dtype(score_dtype, "score_dtype")
    with jax.named_scope("jattn.indexer_select"):
        indices, count = _select(jax.lax.stop_gradient(index), k, score_dtype)
    return indices.reshape(*batch, k), count.reshape(batch)


def indexer_scores(query, key, weights, indices, *, implementation: str | None = None):
    """`indexer_logits` at listed keys alone, to train an indexer by: `[*B, T, L]`, -inf in empty slots.

    Args:
        query, key, weights: as in `indexer_logits`, arrays.
        indices: int `[*B, T, L]`; negative ones and those past the end are empty slots.
        implementation: "xla" or None.

    Returns:
        float32 (float64 for float64) `[*B, T, L]`. Differentiable in query, key and weights, in reverse mode, with the
        same bits in every run; the derivative of max(x, 0) at 0 is 0.

    Raises:
        ValueError, TypeError: an argument is wrong.
        NotImplementedError: a named implementation without a kernel; second derivatives.

    Example:
        >>> import jax.numpy as jnp, jattn
        >>> q, k = jnp.ones((2, 4, 32)), jnp.ones((9, 32))
        >>> jattn.indexer_scores(q, k, jnp.ones((2, 4)) / 4, jnp.array([[0, -1], [3, 8]])).tolist()
        [[32.0, -inf], [32.0, 32.0]]

    Source: DeepSeek-V3.2 (2025), sparse training stage.
    """
    only_xla("indexer_scores", implementation)
    index, batch = _index(query, key, weights, None, None)
    if isinstance(index.query, tuple) or isinstance(index.key, tuple):
        raise TypeError("query and key must be arrays: codes have no gradients to train by")
    indices = _check.array(indices, "indices")
    if not jnp.issubdtype(indices.dtype, jnp.integer):
        raise TypeError(f"indices must be integers, not {indices.dtype}")
    if indices.shape[:-1] != batch:
        raise ValueError(f"indices have shape {indices.shape}; expected [*B, T, L] with (*B, T)={batch}")
    items, S, H = index.key.shape
    rows, L = math.prod(batch), indices.shape[-1]
    lists = Lists(int32(indices).reshape(rows, L), index.batch * S)
    arrays = index.query, index.key.reshape(items * S, H), index.weights
    arrays, lists = vary((arrays, lists), varying_axes((arrays, lists)))
    with jax.named_scope("jattn.indexer_scores"):
        scores = in_auto_mode(functools.partial(_listed_scores, S), arrays[0], ((0, None),), arrays, lists)
    return scores.reshape(*batch, L)


@functools.partial(jax.jit, static_argnums=0)
@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _listed_scores(size, arrays, lists):
    return _xla.listed_scores(size, arrays, lists)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _listed_scores_backward(size, saved, dscores):
    return _xla.listed_scores_backward(size, *saved, dscores)


@_listed_scores_backward.defjvp
def _refuse_second_derivatives(*_):
    raise NotImplementedError("jattn.indexer_scores has first derivatives in reverse mode only")


_listed_scores.__wrapped__.defvjp(
    lambda size, arrays, lists: (_listed_scores(size, arrays, lists), (arrays, lists)),
    lambda size, saved, dscores: (_listed_scores_backward(size, saved, dscores), None),
)


def indexer_kl(scores, target):
    """How far the softmax of index scores is from where attention looks: KL(target / sum(target) || softmax(scores)).

    Both are taken over the slots whose score is not -inf. The gradient in scores is softmax(scores) - target /
    sum(target) there; target gets none, and what the indexer reads should be detached from the model by the caller.

    Args:
        scores: floating-point `[.., L]`: of `indexer_scores` (sparse stage), or `indexer_logits` (dense warm-up).
        target: floating-point `[.., L]`, >= 0: weights summed over heads, of `sparse_weights`.

    Returns:
        `[..]`, float32 (float64 for float64 scores): nats for each row, 0 where no slot or no target is left.

    Raises:
        ValueError, TypeError: shapes or dtypes.

    Example:
        >>> import jax.numpy as jnp, jattn
        >>> jattn.indexer_kl(jnp.array([[0.0, 0.0, -jnp.inf]]), jnp.array([[5.0, 5.0, 1.0]])).tolist()
        [0.0]

    Source: DeepSeek-V3.2 (2025), section on training.
    """
    scores, target = _check.array(scores, "scores"), _check.array(target, "target")
    for name, x in (("scores", scores), ("target", target)):
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise TypeError(f"{name} must be floating-point, not {x.dtype}")
    if scores.ndim < 1 or target.shape != scores.shape:
        raise ValueError(f"target has shape {target.shape}; scores have {scores.shape}, and both must be [.., L]")
    return _kl(scores, jax.lax.stop_gradient(target))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class IndexerWeights:
    """The weights of one layer's indexer, a pytree. Width M, query latent Q, N index heads of H channels.

    query_up: `[Q, N, H]`; key_down: `[M, H]`; key_norm, key_bias: `[H]`, of a layer norm; head_weights: `[M, N]`.

    Example:
        >>> import jax, jattn
        >>> jattn.IndexerWeights.normal(jax.random.key(0), M=64, Q=48, N=4, H=32).query_up.shape
        (48, 4, 32)

    Source: DeepSeek-V3.2 (2025).
    """

    query_up: Any
    key_down: Any
    key_norm: Any
    key_bias: Any
    head_weights: Any

    @classmethod
    def normal(cls, key, *, M: int, Q: int, N: int, H: int, dtype=jnp.float32) -> "IndexerWeights":
        """Random weights of variance 1 / (inputs), a norm of 1 and a bias of 0."""
        up, down, heads = normal(key, ((Q, N, H), (M, H), (M, N)), (Q, M, M), dtype)
        return cls(up, down, jnp.ones(H, dtype), jnp.zeros(H, dtype), heads)


def indexer_project(
    x, residual, weights: IndexerWeights, positions=None, *, rotate: Callable | None, eps: float = 1e-6
):
    """Operands of `indexer_logits` from the layer's input and the residual of its queries.

    Args:
        x: floating-point `[*B, T, M]`, what `mla_preprocess` got.
        residual: `[*B, T, Q]`, `MLAInputs.residual`. Detach both (`jax.lax.stop_gradient`) to train by `indexer_kl`.
        weights: `IndexerWeights` in the dtype of x.
        positions: int `[*B, T]` or `[T]`; None is 0..T-1.
        rotate: called as `rotate(y, positions)` for y `[*B, T, N or 1, H]`. It turns the first 64 channels, and models
            differ: `functools.partial(jattn.rope, rotary_dim=64)` for DeepSeek-V3.2, with `interleaved=True` for GLM-5.
        eps: of the layer norm of keys.

    Returns:
        (query `[*B, T, N, H]`, key `[*B, T, H]`, weights float32 `[*B, T, N]`, with N ** -0.5 · H ** -0.5 in them).

    Raises:
        ValueError, TypeError: weights that do not fit.

    Example:
        >>> import functools, jax, jax.numpy as jnp, jattn
        >>> weights = jattn.IndexerWeights.normal(jax.random.key(0), M=64, Q=48, N=4, H=32)
        >>> x, residual = jnp.ones((2, 10, 64), "float32"), jnp.ones((2, 10, 48), "float32")
        >>> rotate = functools.partial(jattn.rope, rotary_dim=16)
        >>> project = jax.jit(functools.partial(jattn.indexer_project, rotate=rotate))
        >>> [y.shape for y in project(x, residual, weights)]
        [(2, 10, 4, 32), (2, 10, 32), (2, 10, 4)]

    Source: DeepSeek-V3.2 (2025), "lightning indexer".
    """
    x, residual = tokens(x), _check.array(residual, "residual")
    (Q, N, H), M = weights.query_up.shape, x.shape[-1]
    fit = dict(query_up=(Q, N, H), key_down=(M, H), key_norm=(H,), key_bias=(H,), head_weights=(M, N))
    fits(weights, fit, x.dtype)
    if residual.shape != (*x.shape[:-1], Q):
        raise ValueError(f"residual has shape {residual.shape}; expected {(*x.shape[:-1], Q)} for x and query_up")
    positions = token_positions(positions, x.shape[:-1])
    query = product("btq,qnh->btnh", residual, weights.query_up)
    key = product("btm,mh->bth", x, weights.key_down)
    key = layer_norm(key, weights.key_norm, weights.key_bias, eps)[..., None, :]
    query, key = rotated(rotate, query, positions), rotated(rotate, key, positions)
    heads = product("btm,mn->btn", x, weights.head_weights, rounded=False)
    return query, key[..., 0, :], heads * (N**-0.5 * H**-0.5)


def _index(query, key, weights, k_start, k_end, block_tables=None):
    """The checked operands of index scores, with rows for batch and query axes, and (*B, T)."""
    weights = _check.array(weights, "weights")
    if weights.ndim < 2 or weights.shape[-1] == 0:
        raise ValueError(f"weights have shape {weights.shape}; expected [*B, T, N]")
    if not jnp.issubdtype(weights.dtype, jnp.floating):
        raise TypeError(f"weights must be floating-point, not {weights.dtype}")
    *batch, N = weights.shape
    batch = tuple(batch)
    query, key = _coded(query, "query"), _coded(key, "key")
    q, k = (x[0] if isinstance(x, tuple) else x for x in (query, key))
    if q.dtype != k.dtype:
        raise TypeError(f"key dtype {k.dtype} must equal query's {q.dtype}")
    if q.shape[:-1] != (*batch, N) or q.shape[-1] == 0:
        raise ValueError(f"query has shape {q.shape}; expected [*B, T, N, H] with (*B, T, N)={(*batch, N)} of weights")
    if k.shape[-1] != q.shape[-1]:
        raise ValueError(f"key head dim H={k.shape[-1]} must equal query's H={q.shape[-1]}")
    tables = None if block_tables is None else _tables(block_tables, k, batch)
    if tables is None and (k.ndim < 2 or (k.ndim != 2 and k.shape[:-2] != batch[:-1])):
        raise ValueError(f"key has shape {k.shape}; expected [S, H], or [*B, S, H] with *B={batch[:-1]}")
    rows, items = math.prod(batch), math.prod(k.shape[:-2])
    item = jnp.arange(rows, dtype=jnp.int32) // max(batch[-1], 1)
    if tables is None and k.ndim == 2:
        item = jnp.zeros_like(item)
    if items == 0:  # of no rows then, or no pages
        key, items = jax.tree.map(lambda x: jnp.zeros((1, *x.shape[-2:]), x.dtype), key), 1
    key = jax.tree.map(lambda x: x.reshape(items, *x.shape[-2:]), key)
    query = jax.tree.map(lambda x: x.reshape(rows, N, x.shape[-1]), query)
    index = _xla.Index(query, weights.reshape(rows, N), key, item, None, None, tables)
    low, high = _bounds(k_start, k_end, batch, index.size)
    index = dataclasses.replace(index, low=low, high=high)
    return vary(index, varying_axes(index)), batch


def _tables(x, key, batch):
    x = _check.array(x, "block_tables")
    if not jnp.issubdtype(x.dtype, jnp.integer):
        raise TypeError(f"block_tables must be integers, not {x.dtype}")
    if key.ndim != 3 or len(batch) != 2 or x.ndim != 2 or x.shape[0] != batch[0]:
        raise ValueError(
            f"block_tables have shape {x.shape} and key {key.shape}; expected [B, W] and [P, page, H] for weights "
            "[B, T, N]"
        )
    return int32(x)


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
    low, high = limit(k_start, "k_start", batch), limit(k_end, "k_end", batch)
    low = jnp.zeros((rows,), jnp.int32) if low is None else jnp.clip(low, 0, S)
    high = jnp.full((rows,), S, jnp.int32) if high is None else jnp.clip(high, 0, S)
    return low, jnp.maximum(low, high)


def limit(x, name, batch):
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
    return jnp.broadcast_to(int32(x), batch).reshape(-1)


def tokens(x):
    x = _check.array(x, "x")
    if x.ndim < 2:
        raise ValueError(f"x has shape {x.shape}; expected [*B, T, M]")
    if str(x.dtype) not in _FLOATS:
        raise TypeError(f"x has dtype {x.dtype}; expected one of {', '.join(_FLOATS)}")
    return x


def token_positions(x, shape):
    if x is None:
        return jnp.arange(shape[-1], dtype=jnp.int32)
    x = _check.array(x, "positions")
    if not jnp.issubdtype(x.dtype, jnp.integer):
        raise TypeError(f"positions must be integers, not {x.dtype}")
    if x.shape not in (shape, shape[-1:]):
        raise ValueError(f"positions have shape {x.shape}; expected {shape[-1:]} or {shape}")
    return x

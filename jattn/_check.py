"""Every argument check of the public ops, in one voice: what was given, what it must be.

ValueError for shapes and values, TypeError for dtypes and Python types. All checks happen before anything is traced
into a kernel; none looks at the contents of a device array.
"""

import math
from typing import Any

import jax.numpy as jnp
import numpy as np

from jattn import _philox, masks, mods
from jattn._mask import parts
from jattn._mask_rules import Blocks, Dense, Predicate, Segments
from jattn.quantize import Quantized, storage

PAGE_SIZES = (1, 16, 32, 64, 128, 256)
_DTYPES = ("bfloat16", "float16", "float32", "float64")


def array(x: Any, name: str):
    """`x` as something with shape and dtype; lists and NumPy arrays become JAX arrays."""
    if isinstance(x, np.ndarray | np.generic | list | tuple | int | float) and not isinstance(x, bool):
        x = jnp.asarray(x)
    if not hasattr(x, "dtype") or not hasattr(x, "shape"):
        raise TypeError(f"{name} must be an array, not {type(x).__name__}")
    return x


def integers(x: Any, name: str):
    """An int array, as int32; concrete host values must not be negative."""
    if isinstance(x, bool | float):
        raise TypeError(f"{name}={x!r} must be an int array")
    host = x if isinstance(x, int | np.ndarray | np.generic | list | tuple) else None
    if host is not None and np.size(host) and np.issubdtype(np.asarray(host).dtype, np.integer) and np.min(host) < 0:
        raise ValueError(f"{name}={np.asarray(host).tolist()} must be >= 0")
    x = array(x, name)
    if not jnp.issubdtype(x.dtype, jnp.integer):
        raise TypeError(f"{name} must be integers, not {x.dtype}")
    return x.astype(jnp.int32)


def operands(query, key, value, rank: str):
    """Query, key and value of one call, checked against each other. `rank` is "[*B, T, N, H]" or "[T, N, H]"."""
    query, key, value = array(query, "query"), array(key, "key"), array(value, "value")
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.ndim < 3 or (rank == "[T, N, H]" and x.ndim != 3):
            raise ValueError(f"{name} has shape {x.shape}; expected {rank}")
    if str(query.dtype) not in _DTYPES:
        raise TypeError(f"query has dtype {query.dtype}; expected one of {', '.join(_DTYPES)}")
    for name, x in (("key", key), ("value", value)):
        if x.dtype != query.dtype:
            raise TypeError(f"{name} dtype {x.dtype} must equal query's {query.dtype}")
        if x.shape[:-3] != query.shape[:-3]:
            raise ValueError(f"{name} batch dims {x.shape[:-3]} must equal query's {query.shape[:-3]}")
    S, K, H = key.shape[-3:]
    N = query.shape[-2]
    if query.shape[-1] != H:
        raise ValueError(f"key head dim H={H} must equal query's H={query.shape[-1]}")
    if value.shape[-3] != S:
        raise ValueError(f"value length S={value.shape[-3]} must equal key's S={S}")
    if value.shape[-2] != K:
        raise ValueError(f"value has K={value.shape[-2]} heads; key has K={K}")
    if min(N, K, H, value.shape[-1]) == 0:
        raise ValueError(f"heads and head dims must be >= 1; got N={N}, K={K}, H={H}, D={value.shape[-1]}")
    if N % K:
        raise ValueError(f"query heads N={N} must be a multiple of key heads K={K}")
    return query, key, value


def flag(x: Any, name: str) -> bool:
    if not isinstance(x, bool | np.bool_):
        raise TypeError(f"{name}={x!r} must be a Python bool, not {type(x).__name__}")
    return bool(x)


def scale(x: Any, H: int):
    """`(static, array)`: a Python number compiles in, an array does not and has a gradient."""
    if x is None:
        return 1 / math.sqrt(H), None
    if isinstance(x, bool):
        raise TypeError(f"scale={x!r} must be a number, not bool")
    if isinstance(x, int | float | np.number):
        if not math.isfinite(x):
            raise ValueError(f"scale={x!r} must be finite")
        return float(x), None
    x = array(x, "scale")
    if x.shape != ():
        raise ValueError(f"scale has shape {x.shape}; expected a scalar")
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"scale must be floating-point, not {x.dtype}")
    return None, x


def soft_cap(x: Any) -> float | None:
    if x is None:
        return None
    if isinstance(x, bool) or not isinstance(x, int | float | np.number):
        raise TypeError(f"logits_soft_cap={x!r} must be a Python number or None: it is compiled in")
    if not x > 0 or not math.isfinite(x):
        raise ValueError(f"logits_soft_cap={x!r} must be > 0 and finite; use None for no cap")
    return float(x)


def bias(x: Any, shape):
    if x is None:
        return None
    x = array(x, "bias")
    if not jnp.issubdtype(x.dtype, jnp.floating):
        hint = "; a bool mask goes to mask" if x.dtype == jnp.bool_ else ""
        raise TypeError(f"bias must be floating-point, not {x.dtype}{hint}")
    return shape.scores(x, "bias")


def sinks(x: Any, N: int):
    if x is None:
        return None
    x = array(x, "sinks")
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"sinks must be floating-point, not {x.dtype}")
    if x.shape != (N,):
        raise ValueError(f"sinks have shape {x.shape}; expected one a query head, (N,) = ({N},)")
    return x


def mod(x: Any, shape, offset, dtype):
    if x is None:
        return None
    if not isinstance(x, mods.ScoreMod):
        x = mods.score_mod(x)
    return mods.bind(x, shape, offset, dtype)


def lengths(x: Any, name: str, want: tuple[int, ...], capacity: int):
    """int32 `[B]` from one int a sequence, or None. Host values must fit the capacity; traced ones are data."""
    if x is None:
        return None
    if isinstance(x, int | np.ndarray | np.generic | list | tuple) and np.size(x) and np.max(x) > capacity:
        raise ValueError(f"{name}={np.asarray(x).tolist()} must be <= {capacity}, the length of the array")
    x = integers(x, name)
    if x.ndim == 0:
        x = jnp.broadcast_to(x, want)
    if x.shape != want:
        raise ValueError(f"{name} has shape {x.shape}; expected one length a sequence, {want}")
    return x.reshape(-1)


def offset(x: Any, want: tuple[int, ...], query_lengths, key_lengths):
    """`(static, array)`: the position of query 0, compiled in when it is a Python int. Lengths are ints or `[B]`."""
    if isinstance(x, str):
        if x != "end":
            raise ValueError(f"query_offset={x!r} must be an int, an int array or 'end'")
        x = key_lengths - query_lengths
        return (x, None) if isinstance(x, int) else (0, x)
    if isinstance(x, bool) or isinstance(x, float) or x is None:
        raise TypeError(f"query_offset={x!r} must be an int, an int array or 'end'")
    if isinstance(x, int | np.integer):
        return int(x), None
    x = array(x, "query_offset")
    if not jnp.issubdtype(x.dtype, jnp.integer):
        raise TypeError(f"query_offset must be integers, not {x.dtype}")
    if x.shape not in ((), want):
        raise ValueError(f"query_offset has shape {x.shape}; expected a scalar or one offset a sequence, {want}")
    return 0, jnp.broadcast_to(x.astype(jnp.int32), want).reshape(-1)


def mask(x: Any, *, is_causal, local_window_size, segment_ids, key_lengths):
    """The one mask of a call: `mask` and everything that is sugar for one, joined by `&`. Not bound yet."""
    terms = []
    if flag(is_causal, "is_causal"):
        terms.append(masks.causal())
    if local_window_size is not None:
        terms.append(_window(local_window_size))
    if key_lengths is not None:
        terms.append(masks.lengths(key_lengths))
    if segment_ids is not None:
        terms.append(masks.segments(*segment_ids))
    if x is not None:
        terms.append(x if isinstance(x, masks.Mask) else masks.dense(x))
    joined = None
    for term in terms:
        joined = term if joined is None else joined & term
    return joined


def segment_ids(x: Any, T: int, S: int):
    """The arguments of `masks.segments`, or None."""
    if x is None:
        return None
    if not isinstance(x, tuple | list):
        if T != S:
            raise ValueError(f"segment_ids is one array, but T={T} and S={S} differ: pass a (query, key) pair")
        return (x,)
    if len(x) != 2:
        raise ValueError(f"segment_ids must be one array or a (query, key) pair, not {len(x)} arrays")
    return tuple(x)


def _window(size):
    if isinstance(size, tuple | list):
        if len(size) != 2:
            raise ValueError(f"local_window_size={size!r} must be an int or a (left, right) pair")
        return masks.window(*size)
    return masks.window(size)


def dropout(rate: Any, key: Any):
    """`(threshold, key words)`: 0 and None without dropout."""
    threshold = _philox.threshold(rate)
    if threshold == 0:
        return 0, None
    if key is None:
        raise ValueError(f"dropout_rate={rate} needs a dropout_key")
    return threshold, _philox.key_words(key)


def cu_seqlens(x: Any, name: str, rows: int | None = None):
    """Offsets of packed sequences in arrays of so many rows (None: unknown here). Host values must be in order and in
    range; traced ones are data."""
    if isinstance(x, list | tuple) and not x:
        raise ValueError(f"{name}={x!r} is empty; expected [M + 1] offsets of M sequences, starting at 0")
    host = np.asarray(x) if isinstance(x, np.ndarray | list | tuple) else None
    x = integers(x, name)
    if x.ndim != 1 or x.shape[0] < 1:
        raise ValueError(f"{name} has shape {x.shape}; expected [M + 1] offsets of M sequences, starting at 0")
    if host is not None and (np.any(host[1:] < host[:-1]) or (rows is not None and host[-1] > rows)):
        end = "" if rows is None else f" and must end at or before the {rows} rows that there are"
        raise ValueError(f"{name}={host.tolist()} must never decrease{end}")
    return x


def page_size(size: Any) -> int:
    if isinstance(size, bool) or size not in PAGE_SIZES:
        raise ValueError(f"page_size={size!r} must be one of {', '.join(map(str, PAGE_SIZES))}")
    return int(size)


def stored(x: Any, name: str):
    """An array of a cache, `[.., K, H]`, or a `Quantized` one with a scale that fits."""
    if not isinstance(x, Quantized):
        return array(x, name)
    values, scale = array(x.values, f"{name} values"), array(x.scale, f"{name} scale")
    try:
        storage(values.dtype)
        Quantized(values, scale).per  # noqa: B018 -- raises
    except (TypeError, ValueError) as error:
        raise type(error)(f"{name}: {error}") from None
    if scale.dtype != jnp.float32:
        raise TypeError(f"{name} scale must be float32, not {scale.dtype}")
    return Quantized(values, scale)


def cached(query, key, value):
    """Query `[.., N, H]` against what a cache holds, `[.., K, H]` and `[.., K, D]`."""
    query = array(query, "query")
    if str(query.dtype) not in _DTYPES:
        raise TypeError(f"query has dtype {query.dtype}; expected one of {', '.join(_DTYPES)}")
    for name, x in (("key", key), ("value", value)):
        if not isinstance(x, Quantized) and x.dtype != query.dtype:
            raise TypeError(f"{name} dtype {x.dtype} must equal query's {query.dtype}; others need a jattn.Quantized")
    if value.shape[:-1] != key.shape[:-1]:
        raise ValueError(f"value has shape {value.shape}; all but its last axis must equal key's {key.shape}")
    (N, H), (K, own) = query.shape[-2:], key.shape[-2:]
    if own != H:
        raise ValueError(f"key head dim H={own} must equal query's H={H}")
    if min(N, K, H, value.shape[-1]) == 0:
        raise ValueError(f"heads and head dims must be >= 1; got N={N}, K={K}, H={H}, D={value.shape[-1]}")
    if N % K:
        raise ValueError(f"query heads N={N} must be a multiple of key heads K={K}")
    return query


def positional(mask, score_mod):
    """Over a cache there are positions, but no columns for a mask or a modifier to have arrays for."""
    for part in [] if mask is None else parts(mask):
        if isinstance(part, Dense | Blocks | Segments):
            raise NotImplementedError(
                f"mask {part!r} is indexed by the columns of key, which a cache does not have: use masks.predicate"
            )
        if isinstance(part, Predicate) and any(_columns(a) for a in part.aux):
            raise NotImplementedError(f"mask {part!r}: aux must not have rows or columns over a cache, only heads")
    if isinstance(score_mod, mods.ScoreMod):
        if "table" in score_mod.kinds:
            raise NotImplementedError(f"score_mod {score_mod!r} is not implemented over a cache: use mods.score_mod")
        if any(_columns(a) for a in score_mod.aux):
            raise NotImplementedError(f"score_mod {score_mod!r}: aux must not have rows or columns over a cache")


def _columns(a):
    return any(n != 1 for n in a.shape[-2:])

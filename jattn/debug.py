"""Checks of data: what no argument check may look at, because it lies in device arrays.

Ops never read outside their arrays, whatever lengths and offsets hold: a wrong length gives a wrong result in silence.
These checks turn it into an error that names the argument and the value. They are off unless called:

    out = jattn.debug.checked(jattn.attention)(q, k, v, key_value_seq_lengths=lengths)

Outside `jit` a fault is a ValueError. Under `jit`, where the data arrive when the program runs, the check is a callback
to the host (`jax.debug.callback`): a fault is a `jax.errors.JaxRuntimeError` with the same words, raised where the
program's results are waited for (`block_until_ready`, printing, `jax.effects_barrier`). vmap, grad, checkpoint, scan
and shard_map work; inside shard_map a check sees its own shard. Exported programs cannot carry callbacks.

Segment ids need no check: any ids in any order are legal.
"""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np

from jattn._mask_rules import Lengths
from jattn.attention import attention
from jattn.attention import prepare as prepare_attention
from jattn.paged import PagedCache
from jattn.paged import checked as checked_cache
from jattn.ragged import prepare as prepare_ragged_attention
from jattn.ragged import ragged_attention

__all__ = ["check_cache", "check_cu_seqlens", "check_finite", "check_lengths", "check_parents", "checked"]


def check_lengths(lengths, capacity, name: str = "lengths"):
    """Every length must be in [0, capacity].

    Args:
        lengths: int or int array of any shape.
        capacity: int, or int array that broadcasts to the shape of `lengths`.
        name: what to call it in the error.

    Raises:
        ValueError: a length is negative or above its capacity (under `jit`: see the module).

    Example:
        >>> jattn.debug.check_lengths(lengths, k.shape[1], "key lengths")
    """
    _now([(_lengths, (lengths, capacity), name)])


def check_cu_seqlens(cu_seqlens, total, used=None, name: str = "cu_seqlens"):
    """Offsets of packed sequences must start at 0, never decrease, and end at or before `total`.

    Args:
        cu_seqlens: int `[M + 1]`.
        total: rows of the packed array, an int.
        used: int `[M]`, used lengths: each must be in [0, length of its sequence].
        name: what to call the offsets in the error.

    Raises:
        ValueError: an offset or a used length is out of order (under `jit`: see the module).

    Example:
        >>> jattn.debug.check_cu_seqlens(cu_seqlens, q.shape[0])
    """
    _now(_packing(cu_seqlens, total, used, name, f"used lengths of {name}"))


def check_cache(cache: PagedCache, new=0):
    """Lengths must be in [0, capacity], and every page in use must exist. Other table entries may hold anything.

    Args:
        cache: a `PagedCache`.
        new: int or int `[B]`: tokens of each sequence that `append` is about to write. They need room and pages too.

    Raises:
        ValueError: a length or a page id is out of range (under `jit`: see the module).

    Example:
        >>> jattn.debug.check_cache(cache, new=1)
        >>> cache = jattn.append(cache, k, v)
    """
    cache = checked_cache(cache)
    new = jnp.asarray(new, jnp.int32)
    _now([
        (_lengths, (cache.lengths, cache.capacity), "lengths"),
        (_lengths, (cache.lengths + new, cache.capacity), "lengths with new tokens"),
        (_tables, (cache.block_tables, cache.lengths + new, cache.page_size, cache.num_pages), "block_tables"),
    ])


def check_finite(x, name: str = "x"):
    """No element may be NaN or infinite.

    Args:
        x: floating-point array with at least one axis.
        name: what to call it in the error.

    Raises:
        ValueError: some element is NaN or infinite (under `jit`: see the module). The error has the index, without
            the last axis, of the first one.

    Example:
        >>> jattn.debug.check_finite(bias, "bias")
    """
    _now([(_finite, (_not_finite(x),), name)])


def check_parents(parents, name: str = "parents"):
    """Parents of a tree mask must satisfy -1 <= parents[t] < t. `masks.tree` checks concrete ones itself.

    Args:
        parents: int `[T]` or `[*B, T]`.
        name: what to call it in the error.

    Raises:
        ValueError: a parent is out of range (under `jit`: see the module).

    Example:
        >>> jattn.debug.check_parents(parents)
    """
    _now([(_parents, (parents,), name)])


def checked(op):
    """`jattn.attention` or `jattn.ragged_attention` with the data of every call checked.

    Checks lengths (those in masks included), packed offsets and used lengths, that query, key and value are finite
    wherever a row or key exists, and that the results are. Costs a pass over q, k, v and out and a wait for the host.

    Args:
        op: `jattn.attention` or `jattn.ragged_attention`.

    Returns:
        A function of the same arguments and results.

    Raises:
        TypeError: any other op.
        ValueError: when called, a data fault (under `jit`: see the module), besides what the op raises.

    Example:
        >>> out = jattn.debug.checked(jattn.attention)(q, k, v, key_value_seq_lengths=lengths)
    """
    if op not in _OPS:
        raise TypeError(f"checked takes jattn.attention or jattn.ragged_attention, not {op!r}")
    prepare, tests = _OPS[op]
    signature = inspect.signature(op)

    @functools.wraps(op)
    def run(*args, **kwargs):
        result = op(*args, **kwargs)  # first, so that wrong arguments are reported as ever
        call = signature.bind(*args, **kwargs)
        call.apply_defaults()
        given = call.arguments
        how = {name: given.pop(name) for name in ("return_residual", "implementation", "config")}
        out, lse = result if how["return_residual"] else (result, None)
        outcome = [(_result, (_not_finite(out),), f"the output of {op.__name__} has NaN or Inf")]
        if lse is not None:
            outcome += [(_result, (jnp.isnan(lse) | (lse == jnp.inf),), f"the lse of {op.__name__} has NaN or +Inf")]
        _now(tests(prepare(**given).context.mask, **given) + outcome)
        return result

    return run


# A test is (host function, its arrays, name): the host function gets the arrays as NumPy and the name.


def _now(tests):
    """Runs tests in order, in one callback: under `jit` separate ones would report in any order."""
    functions, arrays, names = zip(*tests, strict=True)

    def host(arrays):
        for function, xs, name in zip(functions, arrays, names, strict=True):
            function(*(None if x is None else np.asarray(x) for x in xs), name)

    if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(arrays)):
        jax.debug.callback(host, arrays)
    else:
        host(arrays)


def _attention_tests(rule, *, query, key, value, mask, query_seq_lengths, key_value_seq_lengths, **_):
    *batch, T, _, _ = np.shape(query)
    S = np.shape(key)[-3]
    tests = [(_lengths, (n, S), "key lengths in mask") for n in _mask_lengths(mask)]
    if query_seq_lengths is not None:
        tests += [(_lengths, (query_seq_lengths, T), "query_seq_lengths")]
    if key_value_seq_lengths is not None:
        tests += [(_lengths, (key_value_seq_lengths, S), "key_value_seq_lengths")]
    limit = _key_limit(rule, batch)
    tests += [(_rows_finite, (_not_finite(query), query_seq_lengths), "query")]
    return tests + [(_rows_finite, (_not_finite(x), limit), name) for x, name in ((key, "key"), (value, "value"))]


def _ragged_tests(
    rule, *, query, key, value, cu_seqlens_q, cu_seqlens_k, mask, query_seq_lengths, key_value_seq_lengths, **_
):
    Tq, Tk, M = np.shape(query)[0], np.shape(key)[0], np.shape(cu_seqlens_q)[0] - 1
    tests = _packing(cu_seqlens_q, Tq, query_seq_lengths, "cu_seqlens_q", "query_seq_lengths")
    name = "cu_seqlens_q" if cu_seqlens_k is None else "cu_seqlens_k"
    cu_seqlens_k = cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k
    tests += _packing(cu_seqlens_k, Tk, key_value_seq_lengths, name, "key_value_seq_lengths")
    tests += [(_used, (n, cu_seqlens_k), "key lengths in mask") for n in _mask_lengths(mask)]
    limit = _key_limit(rule, (M,))
    rows = ((query, "query", cu_seqlens_q, query_seq_lengths), (key, "key", cu_seqlens_k, limit))
    return tests + [
        (_packed_rows_finite, (_not_finite(x), cu_seqlens, used), name)
        for x, name, cu_seqlens, used in (*rows, (value, "value", cu_seqlens_k, limit))
    ]


#: op -> (what describes a call, the tests of its bound mask and arguments)
_OPS = {
    attention: (prepare_attention, _attention_tests),
    ragged_attention: (prepare_ragged_attention, _ragged_tests),
}


def _packing(cu_seqlens, total, used, name, used_name):
    tests = [(_cu_seqlens, (cu_seqlens, total), name)]
    return tests if used is None else [*tests, (_used, (used, cu_seqlens), used_name)]


def _mask_lengths(mask):
    """The lengths of every `masks.lengths` in a mask expression."""
    terms = jax.tree.leaves(mask, is_leaf=lambda term: isinstance(term, Lengths))
    return [term.length for term in terms if isinstance(term, Lengths)]


def _key_limit(rule, sequences):
    """How many leading keys of each sequence exist by the bound mask: a number, one a sequence, or None for all."""
    limit = None if rule is None else rule.key_limit()
    if limit is None or isinstance(limit, int):
        return limit
    return limit.reshape(() if limit.size == 1 else sequences)


def _not_finite(x):
    """bool, one for each vector along the last axis."""
    return ~jnp.all(jnp.isfinite(jnp.asarray(x)), axis=-1)


# On the host, in NumPy.


def _lengths(lengths, capacity, name):
    wrong = (lengths < 0) | (lengths > capacity)
    if wrong.any():
        i = _first(wrong)
        raise ValueError(f"{name}{_at(i)}={lengths[i]} must be in [0, {np.broadcast_to(capacity, lengths.shape)[i]}]")


def _tables(tables, lengths, page_size, num_pages, name):
    used = np.arange(tables.shape[1]) * page_size < lengths[:, None]
    wrong = used & ((tables < 0) | (tables >= num_pages))
    if wrong.any():
        i = _first(wrong)
        raise ValueError(f"{name}{_at(i)}={tables[i]} must be in [0, {num_pages})")


def _used(used, cu_seqlens, name):
    lengths = np.diff(cu_seqlens)
    _lengths(np.broadcast_to(used, lengths.shape), lengths, name)


def _cu_seqlens(x, total, name):
    if x[0] != 0:
        raise ValueError(f"{name}[0]={x[0]} must be 0")
    if (np.diff(x) < 0).any():
        i = _first(np.diff(x) < 0)[0]
        raise ValueError(f"{name} must not decrease, but [{i}]={x[i]} and [{i + 1}]={x[i + 1]}")
    if x[-1] > total:
        raise ValueError(f"{name}[-1]={x[-1]} must be at most the {total} rows there are")


def _parents(parents, name):
    wrong = (parents < -1) | (parents >= np.arange(parents.shape[-1]))
    if wrong.any():
        i = _first(wrong)
        raise ValueError(f"{name}{_at(i)}={parents[i]} must be in [-1, {i[-1] - 1}]")


def _finite(wrong, name):
    if wrong.any():
        raise ValueError(f"{name} has NaN or Inf, first at {name}{_at((*_first(wrong), ...))}")


def _rows_finite(wrong, lengths, name):
    """wrong: bool `[*B, T, heads]`; lengths: rows that exist, `[*B]`, a number, or None for all."""
    if lengths is not None:
        lengths = np.broadcast_to(lengths, wrong.shape[:-2])
        wrong = wrong & (np.arange(wrong.shape[-2]) < lengths[..., None])[..., None]
    _finite(wrong, name)


def _packed_rows_finite(wrong, cu_seqlens, used, name):
    """wrong: bool `[T, heads]`; used: rows of each sequence that exist, `[M]`, a number, or None for all."""
    start, stop = cu_seqlens[:-1], cu_seqlens[1:]
    stop = stop if used is None else np.minimum(start + used, stop)
    row = np.arange(wrong.shape[0])[:, None]
    _finite(wrong & ((start <= row) & (row < stop)).any(axis=1)[:, None], name)


def _result(wrong, name):
    if wrong.any():
        raise ValueError(
            f"{name}, first at {_at(_first(wrong))}, though query, key and value are finite: "
            "look at bias, score_mod, scale and sinks, and at the range of the dtype"
        )


def _first(wrong):
    return tuple(int(i) for i in np.argwhere(wrong)[0])


def _at(index):
    return f"[{', '.join('...' if i is ... else str(i) for i in index)}]" if index else ""

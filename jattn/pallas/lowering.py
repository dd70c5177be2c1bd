"""Masks as kernels see them: bounds around the diagonal, a number of keys, and an elementwise rule for what is left.

A bound mask is lowered by the names of its parts, so that kernels depend on what a mask means and not on its classes.
"""

import dataclasses
import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Literal

from jattn.pallas import primitives


@dataclasses.dataclass(frozen=True)
class MaskSpec:
    """A query at position p sees keys `[p - left, p + right]` below `key_length` and `row_end(p)` where `rule` holds.

    `left`, `right`: int or None for unbounded. `key_length`: int32 `[B or 1, 1, 1, 1]`, or None for all.
    `row_end`: positions `[B or 1, T]` -> int32 `[B or 1, T]`, or None.
    `rule(element) -> bool` on an `Element`, or None; it reads `arrays[i]` through `element.load(i)`.
    """

    left: int | None = None
    right: int | None = None
    key_length: Any = None
    row_end: Callable | None = None
    rule: Callable | None = None
    arrays: tuple = ()


@dataclasses.dataclass(frozen=True)
class Element:
    """Where an element of the score matrix is, as arrays that broadcast together, and how arrays are read there."""

    batch: Any
    head: Any
    query_index: Any
    query_position: Any
    key_index: Any
    load: Callable[[int], Any]  # number in `MaskSpec.arrays` (broadcasts to [B, N, T, S]) -> its value here
    load_at: Callable[[int, Any, Any], Any]  # the same, at another (row, column)


def on_elements(function, *args, numbers: bool = False) -> list:
    """The results of a function of scalars at each element of a tile, given arrays and scalars that broadcast to it.

    Args:
        numbers: results that are one number, known now, are returned as such.
    """
    shape = jnp.broadcast_shapes(*(jnp.shape(a) for a in args))
    args = [jnp.broadcast_to(a, shape) for a in args]
    results = jax.make_jaxpr(function)(*(jax.ShapeDtypeStruct((), a.dtype) for a in args)).jaxpr.outvars
    known = [float(x.val) if numbers and isinstance(x, Literal) else None for x in results]

    def unknown(*scalars):
        return [x for x, number in zip(jax.tree.leaves(function(*scalars)), known, strict=True) if number is None]

    on_tile = jax.make_jaxpr(jax.vmap(jax.vmap(unknown)))(*args)
    found = iter(primitives.evaluate(on_tile.jaxpr, on_tile.consts, *args))
    return [next(found) if number is None else number for number in known]


def with_bools(mod, aux):
    """The modifier as a function of what a kernel reads of its arrays: numbers."""
    flags = [x.dtype == jnp.bool_ for x in aux]
    if not any(flags):
        return mod

    def function(score, b, n, t, s, *values):
        values = (x != 0 if flag else x for x, flag in zip(values, flags, strict=True))
        return mod.function.function(score, b, n, t, s, *values)

    return SimpleNamespace(function=SimpleNamespace(function=function))


def readable(x):
    """An array as the kernel's element loads take it: at most 32 bits, no bool."""
    if x is None or (x.dtype.itemsize <= 4 and x.dtype != jnp.bool_):
        return x
    if x.dtype == jnp.bool_:
        return x.astype(jnp.int8)
    return x.astype(jnp.float32 if jnp.issubdtype(x.dtype, jnp.floating) else jnp.int32)


def lower_mask(mask, *, row_bounds: bool = True) -> MaskSpec:
    """The spec of a bound mask, or of None.

    Args:
        row_bounds: prefixes become `row_end`, else part of the rule.

    Raises:
        NotImplementedError: a kind of mask that kernels do not know.
    """
    arrays: list = []
    left = right = None
    prefixes, rules = [], []
    for term in conjunction(mask):
        kind = type(term).__name__
        if kind == "Causal":
            right = _least(right, 0)
        elif kind == "Window":
            left, right = _least(left, term.left), _least(right, term.right)
        elif kind == "Prefix" and row_bounds:
            prefixes.append(term.length.reshape(-1, 1))
        elif kind != "Lengths":  # those are the key limit
            rules.append(_rule(term, arrays))
    rule = (lambda element: _all(r(element) for r in rules)) if rules else None
    limit = None if mask is None else mask.key_limit()
    return MaskSpec(left, right, limit, _end_of_rows(prefixes), rule, tuple(arrays))


def _end_of_rows(prefixes: list):
    """Every query sees all before its own position, and the keys of the shortest of the prefixes."""
    return (lambda position: jnp.maximum(position + 1, functools.reduce(jnp.minimum, prefixes))) if prefixes else None


def conjunction(mask) -> list:
    """The masks that all have to hold."""
    if mask is None:
        return []
    if type(mask).__name__ == "And":
        return conjunction(mask.left) + conjunction(mask.right)
    return [mask]


def _least(x, y):
    return y if x is None else x if y is None else min(x, y)


def _all(terms):
    result = None
    for term in terms:
        result = term if result is None else result & term
    return result


def _rule(mask, arrays: list) -> Callable:
    """An elementwise function of one term; appends what it reads to `arrays`."""
    kind = type(mask).__name__
    if kind not in _RULES:
        raise NotImplementedError(f"the kernel does not know masks of kind {kind}")
    return _RULES[kind](mask, arrays)


def _keep(arrays: list, x) -> int:
    arrays.append(x)
    return len(arrays) - 1


def _number(x, arrays: list) -> Callable:
    """A per-sequence number: a Python int, or an array that broadcasts to [B, N, T, S]."""
    if isinstance(x, int):
        return lambda element: x
    i = _keep(arrays, x.astype(jnp.int32))
    return lambda element: element.load(i)


def _causal(mask, arrays):
    return lambda e: e.key_index <= e.query_position


def _window(mask, arrays):
    def rule(e):
        low = None if mask.left is None else e.key_index >= e.query_position - mask.left
        high = None if mask.right is None else e.key_index <= e.query_position + mask.right
        both = [x for x in (low, high) if x is not None]
        return _all(both) if both else e.key_index >= 0

    return rule


def _prefix(mask, arrays):
    length = _number(mask.length, arrays)
    return lambda e: (e.key_index <= e.query_position) | (e.key_index < length(e))


def _lengths(mask, arrays):
    length = _number(mask.length, arrays)
    return lambda e: e.key_index < length(e)


def _segments(mask, arrays):
    queries, keys = (_keep(arrays, x) for x in _as_int32(mask.query_ids, mask.key_ids))
    return lambda e: e.load(queries) == e.load(keys)


def _as_int32(queries, keys):
    """Ids of any integer width as int32 ids that are equal exactly when those were."""
    if queries.dtype.itemsize <= 4:
        return queries.astype(jnp.int32), keys.astype(jnp.int32)
    known = jnp.sort(jnp.concatenate([queries.ravel(), keys.ravel()]))
    return tuple(jnp.searchsorted(known, x).astype(jnp.int32) for x in (queries, keys))


def _blocks(mask, arrays):
    i = _keep(arrays, mask.block_mask.astype(jnp.int8))
    rows, columns = mask.block_size
    return lambda e: e.load_at(i, _floor_div(e.query_index, rows), _floor_div(e.key_index, columns)) != 0


def _floor_div(x, y: int):
    return x >> (y.bit_length() - 1) if y & (y - 1) == 0 else x // y


def _dense(mask, arrays):
    i = _keep(arrays, mask.array.astype(jnp.int8))
    return lambda e: e.load(i) != 0


def _predicate(mask, arrays):
    aux = [_keep(arrays, x.astype(jnp.int8) if x.dtype == jnp.bool_ else x) for x in mask.aux]
    flags = [x.dtype == jnp.bool_ for x in mask.aux]

    def rule(e):
        values = [e.load(i) != 0 if flag else e.load(i) for i, flag in zip(aux, flags, strict=True)]
        return on_elements(mask.function.function, e.batch, e.head, e.query_position, e.key_index, *values)[0]

    return rule


def _tree(mask, arrays):
    i = _keep(arrays, mask.ancestors.astype(jnp.int8))
    count = mask.ancestors.shape[-1]

    def rule(e):
        node = e.key_index - (e.query_position - e.query_index)
        return (node < 0) | ((node < count) & (e.load_at(i, e.query_index, node) != 0))

    return rule


def _or(mask, arrays):
    left, right = _rule(mask.left, arrays), _rule(mask.right, arrays)
    return lambda e: left(e) | right(e)


def _and(mask, arrays):
    left, right = _rule(mask.left, arrays), _rule(mask.right, arrays)
    return lambda e: left(e) & right(e)


def _not(mask, arrays):
    inner = _rule(mask.inner, arrays)
    return lambda e: jnp.where(inner(e), 0, 1) != 0  # Mosaic cannot lower `not` of packed booleans


_RULES = {
    "Causal": _causal, "Window": _window, "Prefix": _prefix, "Lengths": _lengths, "Segments": _segments,
    "Blocks": _blocks, "Dense": _dense, "Predicate": _predicate, "Tree": _tree, "Or": _or, "And": _and, "Not": _not,
}  # fmt: skip
KINDS = frozenset(_RULES)

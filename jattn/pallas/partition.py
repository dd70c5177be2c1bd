"""How a kernel launch is divided under plain `jit`: batch rows and heads stay on the devices that hold them.

To the compiler a kernel is opaque, and it would gather the operands of what it cannot see into. Here it is told along
which axes a launch may be cut. Each device then prepares and launches the kernel for its own part, and is told where
that part begins, since dropout and functions of batch index and head count from the start of the whole.
"""

import dataclasses
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap
from jax.experimental.custom_partitioning import ArrayMapping, SdyShardingRule, custom_partitioning
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

# Each axis of an array has a letter: "b" batch, "n" query heads, "k" key heads, "v0", "v1", … those of vmap; None for
# an axis that is never cut.
_FIXED = {
    "query": ("b", None, "n", None), "key": ("b", None, "k", None), "value": ("b", None, "k", None), "sinks": ("n",),
}  # fmt: skip
RESULTS = (("b", None, "n", None), ("b", None, "n"))


def divided(forward: Callable, arrays, context):
    """`(out [B, T, N, D], lse [B, T, N])` of `forward(arrays, context)`, on each device for its part of the batch and
    the heads; `context.origin` says where that part begins."""
    batch, _, heads, _ = arrays.query.shape
    group = heads // arrays.key.shape[2]
    operands, structure = jax.tree.flatten((arrays, context))

    def part(batch_index, head, *operands):
        arrays, context = jax.tree.unflatten(structure, operands)
        return forward(with_own_keys(arrays, head[0], group), _from(context, batch_index, head))

    axes = [("b",), ("n",), *_axes(arrays, context)]
    return cut(part, axes, RESULTS)(*_numbers(batch, heads), *operands)


def divided_backward(backward: Callable, arrays, context, saved):
    """`(dq, dk, dv)` of `backward(arrays, context, saved)`, likewise; `saved` holds arrays like out or lse."""
    batch, _, heads, _ = arrays.query.shape
    operands, structure = jax.tree.flatten((arrays, context, saved))

    def part(batch_index, head, *operands):
        arrays, context, saved = jax.tree.unflatten(structure, operands)
        return backward(arrays, _from(context, batch_index, head), saved)

    rows = [("b", None, "n", None)[: x.ndim] for x in jax.tree.leaves(saved)]
    axes = [("b",), ("n",), *_axes(arrays, context), *rows]
    results = tuple(_FIXED[name] for name in ("query", "key", "value"))
    return cut(part, axes, results)(*_numbers(batch, heads), *operands)


def _numbers(*counts) -> list:
    """Arrays that tell each device where its part begins."""
    return [jnp.arange(n, dtype=jnp.int32) for n in counts]


def _from(context, batch_index, head):
    here = jnp.stack([batch_index[0], head[0], *jnp.zeros(2, jnp.int32)])
    return dataclasses.replace(context, origin=here if context.origin is None else context.origin + here)


def with_own_keys(arrays, head, group):
    """Leaves out the key heads of other devices, where there are fewer key heads than devices and each holds all."""
    mine, keys = arrays.query.shape[2], arrays.key.shape[2]
    if mine == keys * group:
        return arrays
    first, count = head // group, max(1, mine // group)
    key, value = (lax.dynamic_slice_in_dim(x, first, count, axis=2) for x in (arrays.key, arrays.value))
    return dataclasses.replace(arrays, key=key, value=value)


def _axes(arrays, context) -> list[tuple]:
    """The letters of every leaf."""
    packed = context.cu_queries is not None

    def letters(path, x):
        field = path[1].name
        if field in _FIXED:
            return _FIXED[field]
        if field in ("query_offset", "query_lengths"):
            return (None if packed else "b",)
        if field in ("bias", "aux", "mask"):  # [B or 1, N or 1, ...]
            batch, head = x.shape[0] > 1 and not packed, x.shape[1] > 1
            return ("b" if batch else None, "n" if head else None, *[None] * (x.ndim - 2))
        return (None,) * x.ndim

    leaves, _ = jax.tree_util.tree_flatten_with_path((arrays, context))
    return [letters(path, x) for path, x in leaves]


def cut(function: Callable, operands, results) -> Callable:
    """`function` with operands and results of these letters as an operation that the compiler may cut along them."""

    @custom_vmap
    def call(*arrays):
        if jax.sharding.get_abstract_mesh().manual_axes:  # in a shard_map: divided already, or not for us to divide
            return function(*arrays)
        partitioned = custom_partitioning(jax.jit(function))  # it takes no constants, but a call that has some
        partitioned.def_partition(
            lambda mesh, arrays, out: _partition(function, operands, results, mesh, arrays),
            sharding_rule=_sharding_rule(operands, results),
        )
        return partitioned(*arrays)

    @call.def_vmap
    def map_over(size, mapped, *arrays):
        letter = f"v{len(results[0]) - len(RESULTS[0])}"
        over = jax.vmap(function, [0 if m else None for m in mapped])
        longer = [(letter, *axes) if m else axes for axes, m in zip(operands, mapped, strict=True)]
        out = cut(over, longer, [(letter, *axes) for axes in results])(*arrays)
        return out, (True,) * len(results)

    return call


def _sharding_rule(operands, results):
    """One factor for each letter, and one of its own for each axis without."""
    count = iter(range(sum(map(len, (*operands, *results)))))
    fixed = []

    def factors(axes):
        names = [axis or f"x{next(count)}" for axis in axes]
        fixed.extend(name for name, axis in zip(names, axes, strict=True) if axis is None)
        return ArrayMapping(*names)

    mappings = [tuple(map(factors, group)) for group in (operands, results)]
    return SdyShardingRule(*mappings, need_replication_factors=tuple(fixed))


def _partition(function, operands, results, mesh, arrays):
    """What custom_partitioning wants to know: `(mesh, function, shardings of results, shardings of operands)`."""
    cuts = _choose(operands, results, arrays, mesh)

    def sharding(axes):
        return NamedSharding(mesh, PartitionSpec(*(cuts.get(axis) for axis in axes)))

    def local(*arrays):
        # This is traced when the mesh that the user has set may be in force, of which one device's part knows nothing.
        with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
            return function(*arrays)

    return mesh, local, tuple(map(sharding, results)), tuple(map(sharding, operands))


def _choose(operands, results, arrays, mesh) -> dict:
    """letter -> the mesh axes that cut it: those of the first operand that is cut along it and divides evenly."""
    cuts, used, sizes = {}, set(), {}
    for axes, x in zip(operands, arrays, strict=True):
        for letter, size, by in zip(axes, x.shape, x.sharding.spec, strict=True):
            by = by if isinstance(by, tuple) else () if by is None else (by,)
            sizes[letter] = size
            if letter in (None, "k") or letter in cuts or not by or used.intersection(by) or size % _devices(mesh, by):
                continue
            cuts[letter] = by
            used.update(by)
    heads = cuts.get("n", ())
    if heads:
        mine, group = sizes["n"] // _devices(mesh, heads), sizes["n"] // sizes["k"]
        if mine % group == 0:
            cuts["k"] = heads
        elif group % mine or results[1] == _FIXED["key"]:  # a key's gradient sums over its whole group
            del cuts["n"]
    return cuts


def _devices(mesh, axes):
    return math.prod(mesh.shape[axis] for axis in axes)

"""Which mesh axes a sequence is sharded over: what the caller says, checked against what the arrays say."""

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P


def find(count, names, mesh, operands, others):
    """`(names, mesh)` of the axes that the sequence is sharded over; the mesh is None inside a `shard_map` over them.

    `operands` and `others` are arrays by name: those with tokens at axis -3, and what the caller gave besides.
    """
    context = jax.sharding.get_abstract_mesh()
    if names and set(names) <= set(context.manual_axes):
        return names, None
    found = {name: _sharding(x) for name, x in (operands | others).items()}
    mesh = next((m for m in (mesh, *(m for m, _ in found.values()), context) if m is not None and not m.empty), None)
    if mesh is None:
        raise ValueError("no mesh: call inside a shard_map or under jax.set_mesh, or give mesh=")
    specs = {name: spec for name, (_, spec) in found.items() if spec is not None}
    along = {name: _tuple(specs[name][-3]) for name in operands if name in specs}
    names = names or along.get("query", ())
    if len(names) != count:
        cure = "use hybrid_attention, or name one" if names else "name the axis of the mesh"
        raise ValueError(f"axis=None, and query is {'' if names else 'not '}sharded along T{over(names)}: {cure}")
    for name in names:
        if name not in mesh.axis_names:
            raise ValueError(f"axis={name!r} is not an axis of the mesh, {tuple(mesh.axis_names)}")
    for name, spec in specs.items():
        place = -3 if name in operands else -2
        wrong = [i for i, by in enumerate(spec) if i != len(spec) + place and set(_tuple(by)) & set(names)]
        if wrong or (name == "sinks" and any(set(_tuple(by)) & set(names) for by in spec)):
            rule = "do not shard it" if name == "sinks" else f"shard its {'tokens' if place == -3 else 'rows T'} alone"
            raise ValueError(f"{name} is sharded as {P(*spec)}; {rule}{over(names)}")
    if len(set(along.values())) > 1:
        told = ", ".join(f"{name}{over(by) or ' over no axis'}" for name, by in along.items())
        raise ValueError(f"query, key and value must be sharded alike along their tokens, not {told}")
    return names, mesh


def over(names):
    return f" over {' and '.join(map(repr, names))}" if names else ""


def _sharding(x):
    """`(mesh, spec)` of an array, None where unknown; the spec has an entry for each axis."""
    if x is None or not hasattr(x, "ndim"):
        return None, None
    mesh = jax.typeof(x).sharding.mesh if isinstance(x, jax.Array) else None
    known = isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer) and isinstance(x.sharding, NamedSharding)
    if not known and (mesh is None or not mesh.explicit_axes):
        return mesh, None
    sharding = x.sharding if known else jax.typeof(x).sharding
    return sharding.mesh, (*sharding.spec, *[None] * (x.ndim - len(sharding.spec)))


def _tuple(by):
    return by if isinstance(by, tuple) else () if by is None else (by,)

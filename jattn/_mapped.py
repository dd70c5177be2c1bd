"""What ops over one axis of a mesh share: how they run on whole arrays; the other axes are left to the compiler."""

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh
from jax.sharding import PartitionSpec as P

from jattn._mesh import _sharding, _tuple, find
from jattn._varying import varying_axes


def mesh_for(axis, mesh, arrays):
    """The mesh that has `axis`, or None inside a `shard_map` over it. `arrays`: whatever may tell."""
    if not isinstance(axis, str):
        raise TypeError(f"axis={axis!r} must be the name of a mesh axis, not {type(axis).__name__}")
    known = (m for m, _ in map(_sharding, jax.tree.leaves(arrays)) if m is not None and not m.empty)
    return find(1, (axis,), mesh if mesh is not None else next(known, None), {}, {})[1]


def check_sharding(name, x, axis, place=None, what=""):
    """Refuses arrays that are known to be sharded over `axis` elsewhere than at `place` (None: anywhere)."""
    for leaf in jax.tree.leaves(x):
        _, spec = _sharding(leaf)
        if any(axis in _tuple(by) for i, by in enumerate(spec or ()) if i != place):
            rule = f"shard its {what} alone" if what else "do not shard it"
            raise ValueError(f"{name} is sharded as {P(*spec)}; {rule} over {axis!r}")


def check_same(name, x, axis):
    """Refuses what may differ from device to device where all need the same."""
    if axis in varying_axes(x):
        raise ValueError(
            f"{name} varies over {axis!r}, but all devices need the same: gather it, with "
            f'jax.lax.all_gather(.., {axis!r}, to="invarying")'
        )


def in_auto_mode(mesh):
    """The mesh with Auto axes for its Explicit ones; else arrays that know nothing of it would have to."""
    if not mesh.explicit_axes:
        return mesh
    if isinstance(mesh, AbstractMesh):
        return mesh.update_axis_types(dict.fromkeys(mesh.explicit_axes, AxisType.Auto))
    types = (AxisType.Auto if kind == AxisType.Explicit else kind for kind in mesh.axis_types)
    return Mesh(mesh.devices, mesh.axis_names, axis_types=tuple(types))


def mapped(body, mesh, axis, x, in_specs, out_specs, out_sharding):
    """`body(x)` on every device of `axis`. `out_sharding(specs)`: that of the results where axes of the mesh are
    Explicit, from the `PartitionSpec` of every array of `x`."""
    types = [jax.typeof(a).sharding for a in jax.tree.leaves(x)]
    explicit = next((s.mesh for s in types if s.mesh.explicit_axes), None)
    options = dict(in_specs=(in_specs,), out_specs=out_specs, axis_names={axis})
    if explicit is None:
        return jax.shard_map(body, mesh=in_auto_mode(mesh), **options)(x)
    axes = explicit.explicit_axes
    specs = jax.tree.map(
        lambda a: P(*jax.typeof(a).sharding.spec, *[None] * (a.ndim - len(jax.typeof(a).sharding.spec))), x
    )
    # The loops inside leave the sharding over other axes to the compiler.
    body = jax.shard_map(body, mesh=in_auto_mode(explicit), **options)
    return jax.sharding.auto_axes(body, axes=axes, out_sharding=out_sharding(specs))(x)

"""What calls of ops without a kernel of their own have in common: how they are refused, and how they are run."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec


def only_xla(op: str, implementation: str | None):
    """Refuses every implementation that is named, but "xla"."""
    if implementation == "mosaic":
        reason = "mosaic: it has no kernel for this op"
        raise NotImplementedError(f"no implementation of jattn.{op} can run this call: {reason}; 'xla' and None run it")
    if implementation not in (None, "xla"):
        raise ValueError(f"implementation={implementation!r} is unknown; choose from 'mosaic', 'xla' or None")


def positive(x, name):
    if isinstance(x, bool) or not isinstance(x, int | np.integer):
        raise TypeError(f"{name}={x!r} must be a Python int")
    if x < 1:
        raise ValueError(f"{name}={x} must be >= 1")
    return int(x)


def int32(x):
    """int32 of any integers; those past it saturate, and so stay out of every range."""
    if x.dtype.itemsize > 4 or x.dtype == jnp.uint32:
        x = jnp.minimum(x, np.asarray(2**31 - 1, x.dtype))
        x = x if jnp.issubdtype(x.dtype, jnp.unsignedinteger) else jnp.maximum(x, np.asarray(-(2**31), x.dtype))
    return x.astype(jnp.int32)


def in_auto_mode(run, query, axes, *arrays):
    """`run(*arrays)`; under a mesh with Explicit axes it leaves the sharding of its loops to the compiler.

    `axes` says which axes of query the axes of each result are, or None.
    """
    sharding = jax.typeof(query).sharding
    if not sharding.mesh.explicit_axes:
        return run(*arrays)
    specs = (PartitionSpec(*(None if i is None else sharding.spec[i] for i in of)) for of in axes)
    out = tuple(NamedSharding(sharding.mesh, spec) for spec in specs)
    out = out if len(out) > 1 else out[0]
    return jax.sharding.auto_axes(run, axes=sharding.mesh.explicit_axes, out_sharding=out)(*arrays)

"""Which axes of a manual mesh (inside `shard_map`) a value varies over, and how to make values vary alike.

Loop carries and the operands of a `custom_vjp` must agree on them under `shard_map`'s varying-axes checking.
"""

import jax
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir


def varying_axes(tree) -> frozenset:
    """The axes that any array of `tree` varies over; empty outside `shard_map`."""
    return frozenset().union(*(jax.typeof(x).mat.varying for x in jax.tree.leaves(tree)))


def vary(tree, axes):
    """`tree` with every array varying over `axes`. The transpose of that cast sums gradients over the axes added."""

    def cast(x):
        missing = tuple(sorted(axes - varying_axes(x)))
        return jax.lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(cast, tree) if axes else tree


_unvary = Primitive("jattn_unvary")
_unvary.def_impl(lambda x: x)
_unvary.def_abstract_eval(lambda x: jax.core.ShapedArray(x.shape, x.dtype))
batching.primitive_batchers[_unvary] = lambda args, axes: (_unvary.bind(*args), axes[0])
mlir.register_lowering(_unvary, lambda context, x: [x])


def unvary(tree):
    """`tree` as if it varied over nothing, for a function whose results are then made to `vary` over what it did."""
    return jax.tree.map(_unvary.bind, tree) if varying_axes(tree) else tree

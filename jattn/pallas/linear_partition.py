"""How launches of linear attention are divided under plain `jit`, see `partition`: which of their axes may be cut."""

import dataclasses
from types import SimpleNamespace

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from jattn._linear import Arrays
from jattn.pallas import partition

#: A letter for each axis, "b" batch, "n" value heads, "k" key heads; of `Arrays`, and of what `Residuals` holds.
_LETTERS = {
    "query": ("b", None, "k", None), "key": ("b", None, "k", None), "value": ("b", None, "n", None),
    "g": ("b", None, "n", None), "beta": ("b", None, "n"), "initial_state": ("b", "n", None, None), "scale": (),
    "A_log": ("n",), "dt_bias": ("n", None), "saved": ("b", None, "n", None, None),
}  # fmt: skip


def letters_of(batch="b") -> SimpleNamespace:
    """The letters of arrays by name, those of `Residuals` as "saved"; batch=None: sequences are not divided."""
    return SimpleNamespace(
        **{name: P(*(batch if axis == "b" else axis for axis in axes)) for name, axes in _LETTERS.items()}
    )


def letters(arrays, batch="b") -> Arrays:
    """Those of the arrays that there are."""
    of = vars(letters_of(batch))
    given = {name: getattr(arrays, name) for name in vars(arrays)}
    return Arrays(**{name: None if x is None else P(*of[name][: x.ndim]) for name, x in given.items()})


def divided(part, operands, letters, results):
    """`part(*operands)`, on each device for its part of the batch and the heads.

    Args:
        operands: trees of arrays, the first of them `Arrays`.
        letters: their letters.
        results: those of what `part` returns.
    """
    arrays, (leaves, structure) = operands[0], jax.tree.flatten(operands)
    N, group = arrays.value.shape[2], arrays.value.shape[2] // arrays.query.shape[2]

    def one(head, *leaves):
        arrays, *rest = jax.tree.unflatten(structure, leaves)
        return tuple(jax.tree.leaves(part(_with_own_keys(arrays, head[0], group), *rest)))

    axes = [("n",), *map(tuple, jax.tree.leaves(letters))]
    cut = partition.cut(one, axes, tuple(map(tuple, jax.tree.leaves(results))))
    found = cut(jnp.arange(N, dtype=jnp.int32), *leaves)
    return jax.tree.unflatten(jax.tree.structure(results), found)


def _with_own_keys(arrays, head, group):
    """Leaves out the key heads of other devices, where there are fewer than devices and each holds all."""
    mine = arrays.value.shape[2]
    if mine == arrays.query.shape[2] * group:
        return arrays
    own = lambda x: lax.dynamic_slice_in_dim(x, head // group, max(1, mine // group), axis=2)  # noqa: E731
    return dataclasses.replace(arrays, query=own(arrays.query), key=own(arrays.key))

"""What the tests of Linen layers share: compiled `init`, and compiled calls with a cache."""

import functools

import jax
import numpy as np


def init(layer, x, **call):
    """Compiled, which costs less than every operation by itself."""
    return jax.jit(functools.partial(layer.init, **call))(jax.random.key(0), x)


def disturbed(params, seed=0):
    """Every parameter moved: those that begin as zeros or ones would hide mistakes."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: x + (0.3 * rng.standard_normal(x.shape)).astype(x.dtype), params)


def stepper(layer):
    """(variables, x) -> (outputs, variables), compiled, through the collection `cache`."""

    @jax.jit
    def step(variables, x, **call):
        y, changed = layer.apply(variables, x, mutable=["cache"], **call)
        return y, variables | changed

    return step


def decoded(step, variables, x, chunks, **call):
    """The outputs of x cut into chunks, and the variables then."""
    found, start = [], 0
    for n in chunks:
        y, variables = step(variables, x[:, start : start + n], **call)
        found.append(np.asarray(y))
        start += n
    assert start == x.shape[1]
    return np.concatenate(found, 1), variables


def shapes(tree):
    return jax.tree.map(lambda x: (x.shape, str(x.dtype)), tree)


def same(one, other):
    assert jax.tree.structure(one) == jax.tree.structure(other)
    jax.tree.map(np.testing.assert_array_equal, one, other)

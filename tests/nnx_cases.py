"""What the tests of Flax layers share: parameters as NumPy arrays, and compiled calls with and without a cache."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

M, B, T = 12, 2, 40


def tokens(dtype=np.float32, T=T, seed=1):
    return np.random.default_rng(seed).standard_normal((B, T, M)).astype(dtype)


def parameters(layer, dtype):
    """{"query.kernel": array}, of `dtype`."""
    flat = nnx.to_flat_state(nnx.state(layer, nnx.Param))
    return {".".join(map(str, path)): np.asarray(x[...]).astype(dtype) for path, x in flat}


def disturb(layer, seed=0):
    """The layer, with every parameter moved: those that begin as zeros or ones would hide mistakes."""
    rng = np.random.default_rng(seed)
    state = nnx.state(layer, nnx.Param)
    nnx.update(layer, jax.tree.map(lambda x: x + (0.3 * rng.standard_normal(x.shape)).astype(x.dtype), state))
    return layer


@functools.partial(nnx.jit, static_argnames=("decode", "deterministic"))
def call(layer, x, decode=False, deterministic=None, **options):
    options |= {} if deterministic is None else dict(deterministic=deterministic)
    return layer(x, decode=decode, **options)


def decoded(layer, x, chunks, **options):
    """The outputs of x `[B, T, M]`, cut into chunks, through the cache."""
    found, start = [], 0
    for n in chunks:
        found.append(np.asarray(call(layer, x[:, start : start + n], decode=True, **options)))
        start += n
    assert start == x.shape[1]
    return np.concatenate(found, 1)


def rms(x, scale, eps=1e-6):
    return x / np.sqrt((x * x).mean(-1, keepdims=True, dtype=x.dtype) + x.dtype.type(eps)) * scale


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def gradients(layer, x):
    """Gradients of a weighted sum of the outputs, by name."""

    def loss(layer, x):
        y = layer(x)
        return jnp.sum(y * jnp.cos(jnp.arange(y.size, dtype=y.dtype).reshape(y.shape)))

    found = nnx.jit(nnx.grad(loss))(layer, x)
    return {".".join(map(str, path)): np.asarray(g[...]) for path, g in nnx.to_flat_state(found)}

"""Collectives over a manual axis of the mesh that leave arrays sharded as they are over other axes.

Where a `shard_map` leaves axes to the compiler, its partitioner keeps arrays that are sharded over those so in permutes
and all-reduces, and gathers them for other collectives (jax 0.11.2 and 0.12.0.1). There these are made of permutes: the
same bytes, in P - 1 messages instead of one.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from jattn._varying import vary


def all_gather(x, name):
    """`x` of all devices in a new first axis."""
    if not _compiler_has_axes():
        return lax.all_gather(x, name)
    size, mine = lax.axis_size(name), lax.axis_index(name)

    def step(i, state):
        passing, every = state
        passing = pass_on(passing, name, 1)
        return passing, _put(every, (mine - i) % size, passing)

    every = _put(jnp.broadcast_to(x, (size, *x.shape)), mine, x)
    return lax.fori_loop(1, size, step, (x, every))[1]


def reduce_scatter(x, name):
    """The sum over devices of the own part of `x [P, ...]`."""
    if not _compiler_has_axes():
        return lax.psum_scatter(x, name, scatter_dimension=0)
    size, mine = lax.axis_size(name), lax.axis_index(name)

    def step(i, total):
        return pass_on(total, name, 1) + _part(x, (mine - i - 1) % size)

    return lax.fori_loop(1, size, step, _part(x, (mine - 1) % size))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def exchange(x, name):
    """`x [P, ...]`, whose part r goes to device r: the parts that come from all of them. Its own transpose."""
    if not _compiler_has_axes():
        return lax.all_to_all(x, name, 0, 0)
    size, mine = lax.axis_size(name), lax.axis_index(name)
    found = x
    for shift in range(1, size):
        found = _put(found, (mine - shift) % size, pass_on(_part(x, (mine + shift) % size), name, shift))
    return found


exchange.defvjp(lambda x, name: (exchange(x, name), None), lambda name, _, g: (exchange(g, name),))


def gather_copies(x, name, to="varying"):
    """`x` of all devices in a new first axis, by one message. `to`: as in `jax.lax.all_gather`.

    Where the compiler has axes, every device adds its part to zeros: twice the bytes, for what is small.
    """
    if not _compiler_has_axes():
        return lax.all_gather(x, name, to=to)
    mine = jnp.arange(lax.axis_size(name), dtype=jnp.int32) == lax.axis_index(name)
    parts = jnp.where(mine.reshape(-1, *[1] * x.ndim), x[None], jnp.zeros((), x.dtype))
    found = lax.psum(parts, name)
    return found if to == "invarying" else vary(found, frozenset({name}))


def _compiler_has_axes():
    mesh = jax.sharding.get_abstract_mesh()
    return any(mesh.shape[name] > 1 for name in mesh.auto_axes)


def pass_on(x, name, shift):
    """`x` of the device `shift` before this one, around the axis."""
    size = lax.axis_size(name)
    return lax.ppermute(x, name, [(r, (r + shift) % size) for r in range(size)])


def _part(x, i):
    return lax.dynamic_index_in_dim(x, i, 0, keepdims=False)


def _put(x, i, part):
    return lax.dynamic_update_index_in_dim(x, part, i, 0)

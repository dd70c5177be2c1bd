"""Entries of the small int32 arrays that say which blocks a tile visits."""

import jax.numpy as jnp


def i32(x):
    return jnp.asarray(x, jnp.int32)


def list_entry(array, batch, head, number, i):
    """Entry i for a tile of `array [B or 1, heads or 1, tiles, entries]`."""
    batch, head = (jnp.minimum(i, n - 1) for i, n in zip((batch, head), array.shape[:2], strict=True))
    return array[batch, head, number, i]

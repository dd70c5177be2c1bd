"""Packed sequences as kernels see them: where each begins, and how many tiles they have."""

import jax.numpy as jnp
import numpy as np
from jax import lax


def clipped_offsets(cu, rows: int):
    """cu_seqlens, whatever they hold, as offsets that ascend inside the array."""
    return jnp.clip(running(jnp.max, cu), 0, rows)


def running(reduce, x):
    """`reduce` of all entries up to each one of `x [n]`, not negative: one launch where a scan takes several."""
    if x.shape[0] > 1024:
        return lax.cummax(x) if reduce is jnp.max else jnp.cumsum(x, dtype=x.dtype)
    number = np.arange(x.shape[0])
    return reduce(jnp.where(number[:, None] >= number, x, 0), axis=1).astype(x.dtype)


def owner(ends, number):
    """Which of the consecutive intervals that end at `ends [n]` each number is in; n past the last."""
    how = "compare_all" if ends.shape[0] <= 1024 else "scan"
    return jnp.searchsorted(ends, number, side="right", method=how).astype(jnp.int32)


def most_tiles(rows: int, sequences: int, tile_rows: int) -> int:
    """Tiles that all sequences have at most, the rows before the first and after the last sequence included."""
    count = min(sequences + 2, rows)
    return count + (rows - count) // tile_rows


def with_ends(count: int, x, before=0, after=0):
    """int32 `[count + 3]`: a number of each sequence, of the rows before the first and after the last, and 0 for a
    sequence of nothing."""
    x = jnp.broadcast_to(jnp.asarray(x, jnp.int32).reshape(-1), (count,))
    return jnp.concatenate([x, *(jnp.asarray(e, jnp.int32).reshape(1) for e in (before, after, 0))])

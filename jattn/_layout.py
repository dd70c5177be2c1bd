"""Where the tokens of one sequence lie on many devices, and which devices have something to say to each other."""

import dataclasses
import itertools

import jax.numpy as jnp
import numpy as np

_KINDS = ("contiguous", "zigzag", "striped")


@dataclasses.dataclass(frozen=True)
class SequenceLayout:
    """Which tokens of a sequence each of `size` devices holds. Hashable, no arrays.

    Device r holds, in this order,

    * contiguous: tokens r · L / size to (r + 1) · L / size;
    * zigzag: chunks r and 2 · size - 1 - r of the 2 · size equal chunks, so that causal work is equal everywhere;
    * striped: tokens r, r + size, r + 2 · size, …

    An array is *in layout order* when cutting its token axis into `size` equal parts gives each device its tokens.

    Args:
        kind: "contiguous", "zigzag" or "striped".
        size: number of devices that the sequence is spread over: the size of the mesh axis.

    Raises:
        ValueError: an unknown kind, a size below 1; from the methods, a length that `multiple` does not divide.

    Example:
        >>> layout = SequenceLayout("zigzag", 2)
        >>> layout.positions(8).tolist()
        [0, 1, 6, 7, 2, 3, 4, 5]

    Sources: zigzag is the load balancing of Llama 3 (arXiv:2407.21783, section 3.3.2); Brandon et al., "Striped
    Attention" (arXiv:2311.09431).
    """

    kind: str
    size: int

    def __post_init__(self):
        if self.kind not in _KINDS:
            raise ValueError(f"layout kind={self.kind!r} is unknown; choose from {', '.join(map(repr, _KINDS))}")
        if isinstance(self.size, bool) or not isinstance(self.size, int) or self.size < 1:
            raise ValueError(f"layout size={self.size!r} must be a positive int, the size of the mesh axis")

    @property
    def pieces(self) -> int:
        """How many evenly spaced runs of tokens a device holds."""
        return 2 if self.kind == "zigzag" and self.size > 1 else 1

    @property
    def stride(self) -> int:
        """The distance of neighbouring tokens of a run."""
        return self.size if self.kind == "striped" else 1

    @property
    def multiple(self) -> int:
        """What must divide the length of a sequence."""
        return self.size * self.pieces

    def shard(self, x, axis: int = 1):
        """`x` with its token axis (natural order) in layout order."""
        return self._reorder(x, axis, self._to_layout)

    def unshard(self, x, axis: int = 1):
        """The inverse of `shard`."""
        return self._reorder(x, axis, self._to_natural)

    def positions(self, length: int, index=None):
        """int32 indices of the tokens in layout order: `[length]`, or those `[length // size]` of device `index`.

        `index` may be traced, as `jax.lax.axis_index` is. Use these for position embeddings.
        """
        self.check(length, "length")
        if index is None:
            return self.shard(jnp.arange(length, dtype=jnp.int32), 0)
        run = self.stride * jnp.arange(length // self.multiple, dtype=jnp.int32)
        return jnp.concatenate([start + run for start in self.starts(index, length)])

    def starts(self, index, length: int) -> tuple:
        """The first token of each run of device `index`, an int or an array."""
        run = length // self.multiple
        if self.pieces == 2:
            return index * run, (2 * self.size - 1 - index) * run
        return (index,) if self.kind == "striped" else (index * run,)

    def check(self, length: int, name: str):
        if length % self.multiple:
            factor = "2 · " * (self.pieces == 2)
            raise ValueError(
                f"{name}={length} must be a multiple of {self.multiple} = {factor}{self.size} for a {self.kind} layout "
                f"over {self.size} devices"
            )

    def _reorder(self, x, axis, order):
        axis %= x.ndim
        self.check(x.shape[axis], f"length of axis {axis}")
        if self.kind == "contiguous" or self.size == 1:
            return x
        return order(x, axis, (*x.shape[:axis], -1, *x.shape[axis + 1 :]))

    def _to_layout(self, x, axis, shape):
        head, tail = x.shape[:axis], x.shape[axis + 1 :]
        if self.kind == "striped":
            return jnp.swapaxes(x.reshape(*head, -1, self.size, *tail), axis, axis + 1).reshape(shape)
        first, second = jnp.split(x.reshape(*head, 2 * self.size, -1, *tail), 2, axis)
        return jnp.stack([first, jnp.flip(second, axis)], axis + 1).reshape(shape)

    def _to_natural(self, x, axis, shape):
        head, tail = x.shape[:axis], x.shape[axis + 1 :]
        if self.kind == "striped":
            return jnp.swapaxes(x.reshape(*head, self.size, -1, *tail), axis, axis + 1).reshape(shape)
        first, second = jnp.split(x.reshape(*head, self.size, 2, -1, *tail), 2, axis + 1)
        both = jnp.concatenate([first, jnp.flip(second, axis)], axis)
        return both.reshape(shape)


def path(layout: SequenceLayout, num_queries: int, num_keys: int, left, right) -> tuple[int, ...]:
    """Whose keys each device has to see: distances d, 0 first; device r sees those of device r - d.

    `num_queries` and `num_keys` are T and S of the whole. Query position minus key position is known to lie in
    `[-right, left]` where anything is visible; None is unbounded. The distances are 0, 1, …, a, -1, …, -b: with as few
    steps as possible every device passes all that hold keys for it.
    """
    P = layout.size
    needed = [d for d in range(1, P) if _any_visible(layout, num_queries, num_keys, left, right, d)]
    cuts = range(len(needed) + 1)
    ahead, behind = min(
        ((([0, *needed][i]), P - needed[i] if i < len(needed) else 0) for i in cuts), key=lambda ab: (sum(ab), ab[1])
    )
    return (*range(ahead + 1), *range(-1, -behind - 1, -1))


def _any_visible(layout, num_queries, num_keys, left, right, d) -> bool:
    """Whether some device may see a key of the one `d` before it."""
    index = np.arange(layout.size)
    rows, columns = num_queries // layout.multiple, num_keys // layout.multiple
    pairs = itertools.product(
        layout.starts(index, num_queries), layout.starts((index - d) % layout.size, num_keys)
    )
    return bool(rows and columns) and any(_meet(q - k, rows, columns, left, right, layout.stride) for q, k in pairs)


def _meet(distance, rows, columns, left, right, stride) -> bool:
    """Whether `distance + stride · m` is in `[-right, left]` for some -columns < m < rows, for any of `distance`."""
    low = 1 - columns if right is None else np.maximum(1 - columns, -((right + distance) // stride))
    high = rows - 1 if left is None else np.minimum(rows - 1, (left - distance) // stride)
    return bool(np.any(low <= high))

"""Score modifiers: elementwise changes of attention scores, differentiated by the library.

A modifier acts after `scale` and `bias` and before the soft cap and the mask. It is ordinary elementwise JAX, so its
gradient needs no user code; the arrays it needs are passed as aux, and gradients flow to them.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from jattn._callables import Callable

__all__ = ["ScoreMod", "alibi", "relative_bias", "score_mod"]

_LINE = "mods.score_mod(fn, *arrays) with fn(score, b, n, t, s, *arrays)"


@dataclasses.dataclass(frozen=True)
class ScoreMod:
    """A modifier and its arrays, a pytree. Build one with `score_mod`, `alibi` or `relative_bias`.

    `kinds[i]` says how `aux[i]` reaches an element: "element" broadcasts to `[*B, N, T, S]`; "table" is `[N or 1, L]`,
    one value for each clipped distance s - t (bound to "diagonal", `[B or 1, N or 1, L']`, before a kernel sees it).
    """

    aux: tuple
    function: Callable = dataclasses.field(metadata={"static": True})
    kinds: tuple[str, ...] = dataclasses.field(metadata={"static": True})
    name: str = dataclasses.field(metadata={"static": True}, default="score_mod")

    def __repr__(self):
        shapes = (f"{jnp.dtype(a.dtype).name}{list(a.shape)}" for a in self.aux)
        return f"{self.name}({', '.join([repr(self.function)] * (self.name == 'score_mod') + list(shapes))})"

    def without_arrays(self) -> "ScoreMod":
        """The static part: what is compiled in."""
        return dataclasses.replace(self, aux=())

    def __call__(self, score, b, n, t, s, *aux):
        """The modified scores of one tile, in the dtype of `score`."""
        aux = [a.astype(score.dtype) if jnp.issubdtype(a.dtype, jnp.floating) else a for a in aux]
        new = self.function.on_tile(score, b, n, t, s, *aux)
        if not jnp.issubdtype(new.dtype, jnp.floating):
            raise TypeError(f"{self!r} returned {new.dtype}; a score modifier must return floating-point scores")
        return new.astype(score.dtype)


jax.tree_util.register_dataclass(ScoreMod, data_fields=["aux"], meta_fields=["function", "kinds", "name"])


def score_mod(function, *aux) -> ScoreMod:
    """A modifier in elementwise JAX: `function(score, b, n, t, s, *aux) -> score`.

    Args:
        function: called for one element: all its arguments are scalars. score has the accumulation dtype (float32, or
            float64 for float64 inputs); b is the flat batch index (the sequence index of packed sequences), n the head,
            t and s the positions of query and key, int32. It may close over Python numbers, never over arrays.
        *aux: arrays that broadcast to `[*B, N, T, S]`, differentiable; the function receives them already at its
            element, a scalar; floating ones in the dtype of the score.

    Raises:
        TypeError: the function is not callable, closes over an array, or an aux is not an array.

    Example:
        `attention(q, k, v, score_mod=mods.score_mod(lambda s, b, n, t, i, g: s * g, gain[:, None, None]))`
    """
    arrays = tuple(_array(a, f"score_mod aux {i}") for i, a in enumerate(aux))
    return ScoreMod(arrays, Callable(function, _LINE, 5 + len(arrays)), ("element",) * len(arrays))


def alibi(slopes) -> ScoreMod:
    """ALiBi: subtracts `slope[n] * |t - s|` from every score.

    Args:
        slopes: float `[N]`, or the number of heads N for the published slopes.

    Source: Press, Smith, Lewis, "Train Short, Test Long" (2022).

    Example:
        `attention(q, k, v, is_causal=True, score_mod=mods.alibi(8))`
    """
    if isinstance(slopes, int) and not isinstance(slopes, bool):
        slopes = jnp.asarray(_published_slopes(slopes), jnp.float32)
    slopes = _array(slopes, "slopes")
    if slopes.ndim != 1:
        raise ValueError(f"slopes have shape {slopes.shape}; expected [N]")
    return ScoreMod((slopes[:, None, None],), Callable(_alibi, _LINE, 6), ("element",), "alibi")


def relative_bias(table) -> ScoreMod:
    """Adds `table[n, clip(s - t + L // 2, 0, L - 1)]` to every score: a learned bias of the distance s - t.

    Args:
        table: float `[N, L]`, or `[1, L]` shared by the heads; entry L // 2 is distance 0. Differentiable.

    Source: Shaw, Uszkoreit, Vaswani, "Self-Attention with Relative Position Representations" (2018), as a scalar bias.

    Example:
        `attention(q, k, v, score_mod=mods.relative_bias(table))`
    """
    table = _array(table, "table")
    if table.ndim != 2 or table.shape[1] == 0:
        raise ValueError(f"relative_bias table has shape {table.shape}; expected [N, L] or [1, L] with L >= 1")
    return ScoreMod((table,), Callable(_add, _LINE, 6), ("table",), "relative_bias")


def bind(mod: ScoreMod, shape, offset, dtype) -> ScoreMod:
    """The modifier with aux checked against `shape` (a `Shape`) and tables spread over the diagonals.

    `offset` is the query offset: an int or `[B or 1, 1, 1, 1]`. A diagonal array holds the value of index distance
    `s - t` at `s - t + T - 1`, in `dtype`, the scores' own, so that the gradient of a table is summed in it.
    """
    aux = [
        shape.scores(a, f"{mod.name} aux {i}") if kind == "element" else _diagonals(a.astype(dtype), shape, offset)
        for i, (a, kind) in enumerate(zip(mod.aux, mod.kinds, strict=True))
    ]
    kinds = tuple("element" if kind == "element" else "diagonal" for kind in mod.kinds)
    return ScoreMod(tuple(aux), mod.function, kinds, mod.name)


def _diagonals(table, shape, offset):
    heads, length = table.shape
    if heads not in (1, shape.heads):
        raise ValueError(f"relative_bias table has {heads} heads; expected 1 or N={shape.heads}")
    count = max(shape.num_queries + shape.num_keys - 1, 0)
    first = length // 2 - (shape.num_queries - 1)  # table index of the first diagonal at offset 0
    if isinstance(offset, int | np.integer):
        # Slices and edge copies instead of a gather: their transpose is deterministic on every device.
        first = int(first - offset)
        left = min(max(-first, 0), count)
        start, stop = min(max(first, 0), length), min(max(first + count, 0), length)
        right = count - left - (stop - start if stop > start else 0)
        parts = [jnp.repeat(table[:, :1], left, axis=1), table[:, start:stop], jnp.repeat(table[:, -1:], right, axis=1)]
        return jnp.concatenate(parts, axis=1)[None]
    index = first - offset.reshape(-1, 1) + jnp.arange(count, dtype=jnp.int32)
    return jnp.moveaxis(jnp.take(table, jnp.clip(index, 0, length - 1), axis=1), 0, 1)


def _alibi(score, b, n, t, s, slope):
    return score - slope * jnp.abs(t - s).astype(score.dtype)


def _add(score, b, n, t, s, value):
    return score + value


def _published_slopes(heads: int) -> list[float]:
    """Geometric slopes for a power of two heads; else those of the power below, then every other one of twice it."""
    if heads <= 0:
        raise ValueError(f"slopes={heads} must be a positive number of heads")
    power = 2 ** (heads.bit_length() - 1)
    slopes = [2.0 ** (-8.0 * (i + 1) / power) for i in range(power)]
    return slopes + [2.0 ** (-4.0 * (2 * i + 1) / power) for i in range(heads - power)]


def _array(x, name):
    x = jnp.asarray(x) if isinstance(x, np.ndarray | np.generic | list | tuple) else x
    if not hasattr(x, "dtype") or not hasattr(x, "shape"):
        raise TypeError(f"{name} must be an array, not {type(x).__name__}; {_LINE}")
    return x

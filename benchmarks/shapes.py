"""The shapes that benchmarks measure, by suite, and the work in them."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class Shape:
    """One attention call; `window` is (left, right), inclusive, on top of `causal`."""

    B: int
    T: int
    S: int
    N: int
    K: int
    H: int
    D: int
    causal: bool = False
    window: tuple[int, int] | None = None

    def __str__(self):
        heads = f"N{self.N}" if self.N == self.K else f"N{self.N}/{self.K}"
        lengths = f"S{self.S}" if self.T == self.S else f"T{self.T} S{self.S}"
        width = f"H{self.H}" if self.H == self.D else f"H{self.H} D{self.D}"
        window = f"window({self.window[0]},{self.window[1]})" if self.window else ""
        rule = " ".join(filter(None, ["causal" if self.causal else "", window])) or "full"
        return f"B{self.B} {lengths} {heads} {width} {rule}"

    @property
    def options(self):
        """The keywords that `jattn.attention` and `jax.nn.dot_product_attention` share."""
        return {"is_causal": self.causal} | ({"local_window_size": self.window} if self.window else {})

    @property
    def shapes(self):
        """Of query, key and value: [B, T, N, H], [B, S, K, H], [B, S, K, D]."""
        return [(self.B, self.T, self.N, self.H), (self.B, self.S, self.K, self.H), (self.B, self.S, self.K, self.D)]

    @property
    def out(self):
        return self.B, self.T, self.N, self.D

    def specs(self, dtype):
        """query, key, value and output cotangent without data."""
        return [jax.ShapeDtypeStruct(shape, dtype) for shape in [*self.shapes, self.out]]

    def inputs(self, dtype, seed=0):
        """Gaussian query, key, value and output cotangent."""
        keys = jax.random.split(jax.random.key(seed), 4)
        pairs = zip(keys, [*self.shapes, self.out], strict=True)
        return [jax.random.normal(key, shape, jnp.float32).astype(dtype) for key, shape in pairs]

    @property
    def pairs(self):
        """Visible (query, key) pairs of one head."""
        t = np.arange(self.T)
        left, right = self.window or (self.T + self.S, self.T + self.S)
        first = np.maximum(t - left, 0)
        last = np.minimum(t + (min(right, 0) if self.causal else right), self.S - 1)
        return int(np.maximum(last - first + 1, 0).sum())

    def flops(self, backward):
        """Forward 2 * pairs * (H + D) a head; the backward is 2.5 times that."""
        return 2 * self.B * self.N * self.pairs * (self.H + self.D) * (3.5 if backward else 1)

    def bytes(self, dtype):
        """query, key, value and output."""
        return sum(map(math.prod, [*self.shapes, self.out])) * jnp.dtype(dtype).itemsize


def selected(table, arguments):
    chosen = [shape for shape in table if arguments.only in str(shape)]
    if not chosen:
        raise SystemExit(f"no shape contains {arguments.only!r}; there are: {'; '.join(map(str, table))}")
    return chosen


CPU = (
    Shape(1, 2048, 2048, 8, 8, 64, 64),
    Shape(1, 2048, 2048, 8, 8, 64, 64, causal=True),
    Shape(1, 8192, 8192, 8, 8, 64, 64, causal=True, window=(255, 0)),
)

MEMORY = tuple(Shape(1, S, S, 8, 2, 64, 64, causal=True) for S in (1024, 2048, 4096, 8192, 16384, 32768))

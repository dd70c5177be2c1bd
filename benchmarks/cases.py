"""The attention calls that `attention` and `tune` measure: plain ones, and ones with one feature more."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.shapes import Shape
from jattn import masks, mods

DOCUMENT, PREFIX, SOFT_CAP, DROPOUT, BLOCK, VISIBLE_BLOCKS = 1024, 512, 20.0, 0.1, 128, 0.25


@dataclasses.dataclass(frozen=True)
class Case:
    """A shape, with at most one feature besides its causal mask and window."""

    shape: Shape
    feature: str = ""

    def __str__(self):
        return f"{str(self.shape).removesuffix(' full')} {self.feature}" if self.feature else str(self.shape)

    @functools.cached_property
    def blocks(self):
        """The visible blocks of the block list: as many in every row, at random places."""
        rows, columns = self.shape.T // BLOCK, self.shape.S // BLOCK
        order = np.random.default_rng(0).permuted(np.tile(np.arange(columns), (rows, 1)), axis=1)
        return order < VISIBLE_BLOCKS * columns

    @property
    def lengths(self):
        """Keys of each sequence: all, and less and less of them, at odd places."""
        S, B = self.shape.S, self.shape.B
        return np.array([S - b * (S // (2 * B)) - b for b in range(B)], np.int32)

    def visible(self, t, s, blocks=None, length=None):
        """Whether query t sees key s; numbers or arrays that broadcast, of NumPy or JAX."""
        left, right = self.shape.window or (None, None)
        seen = s <= t if self.shape.causal else (s >= 0) & (t >= 0)
        if left is not None:
            seen = seen & (s >= t - left) & (s <= t + right)
        if self.feature == "documents 1024":
            seen = seen & (t // DOCUMENT == s // DOCUMENT)
        if self.feature == "prefix 512":
            seen = seen & ((s <= t) | (s < PREFIX))
        if self.feature == "blocks 25%":
            seen = seen & (self.blocks if blocks is None else blocks)[t // BLOCK, s // BLOCK]
        if self.feature == "key lengths":
            seen = seen & (s < length)
        return seen

    def _seen(self, length=None):
        return self.visible(np.arange(self.shape.T)[:, None], np.arange(self.shape.S)[None], length=length)

    @functools.cached_property
    def pairs(self):
        """Visible (query, key) pairs of one head, summed over the batch."""
        if self.feature == "key lengths":
            return int(sum(self._seen(length).sum() for length in self.lengths))
        masked = self.feature in ("documents 1024", "prefix 512", "blocks 25%")
        return self.shape.B * (int(self._seen().sum()) if masked else self.shape.pairs)

    @property
    def tiles(self):
        """The share of 128 x 128 tiles that hold a visible pair."""
        lengths = self.lengths if self.feature == "key lengths" else [None]
        return float(np.mean([_tiled(self._seen(length)).any((1, 3)).mean() for length in lengths]))

    def flops(self, backward=False):
        """Forward 2 * pairs * (H + D) a head; the backward is 2.5 times that."""
        return 2 * self.shape.N * self.pairs * (self.shape.H + self.shape.D) * (3.5 if backward else 1)

    def arrays(self):
        """What the call reads besides query, key and value; `mask` is for those that know only dense masks."""
        B, T, S = self.shape.B, self.shape.T, self.shape.S
        key = jax.random.key(1)
        found = {
            "documents 1024": lambda: {"segment_ids": jnp.tile(jnp.arange(S, dtype=jnp.int32) // DOCUMENT, (B, 1))},
            "blocks 25%": lambda: {"blocks": jnp.asarray(self.blocks)},
            "bias [T,S]": lambda: {"bias": jax.random.normal(key, (T, S), jnp.bfloat16)},
            "bias [1,S]": lambda: {"bias": jax.random.normal(key, (1, S), jnp.bfloat16)},
            "dropout 0.1": lambda: {"dropout_key": key},
            "key lengths": lambda: {"key_value_seq_lengths": jnp.asarray(self.lengths)},
        }.get(self.feature, dict)()
        if self.feature in ("documents 1024", "prefix 512", "blocks 25%"):
            found["mask"] = jnp.asarray(self._seen())
        return found

    def keywords(self, arrays):
        """The keywords of `jattn.attention`."""
        extra = {name: value for name, value in arrays.items() if name not in ("mask", "blocks")}
        return self.shape.options | extra | {
            "soft cap 20": lambda: {"logits_soft_cap": SOFT_CAP},
            "ALiBi": lambda: {"score_mod": mods.alibi(self.shape.N)},
            "prefix 512": lambda: {"mask": masks.prefix(PREFIX)},
            "blocks 25%": lambda: {"mask": masks.blocks(arrays["blocks"], BLOCK)},
            "dropout 0.1": lambda: {"dropout_rate": DROPOUT},
            "lse": lambda: {"return_residual": True},
        }.get(self.feature, dict)()  # fmt: skip

    def score(self, score, n, t, s, arrays):
        """A scaled score of head n with what the feature adds to it."""
        if "bias" in arrays:
            score = score + arrays["bias"][t if arrays["bias"].shape[0] > 1 else 0, s].astype(score.dtype)
        if self.feature == "ALiBi":
            slope = 2.0 ** (-8 * (n + 1).astype(jnp.float32) / self.shape.N)  # as published, for powers of two
            score = score - slope * jnp.abs(t - s).astype(score.dtype)
        if self.feature == "soft cap 20":
            score = SOFT_CAP * jnp.tanh(score / SOFT_CAP)
        return score


def _tiled(seen):
    T, S = seen.shape
    return seen.reshape(T // 128, 128, S // 128, 128)


def _self(B, S, N, H, causal=False, K=None, D=None):
    return Case(Shape(B, S, S, N, K or N, H, D or H, causal=causal))


GRID = (
    _self(4, 4096, 16, 128, causal=True),
    _self(1, 16384, 16, 128, causal=True),
    _self(4, 4096, 16, 128),
    _self(1, 16384, 16, 128),
    _self(16, 1024, 16, 128, causal=True),
    _self(4, 4096, 32, 128, causal=True, K=8),
    _self(4, 4096, 32, 64, causal=True),
    _self(4, 4096, 32, 64),
    _self(16, 1024, 32, 64, causal=True),
    _self(1, 16384, 32, 64, causal=True),
    _self(4, 4096, 8, 256, causal=True),
    _self(4, 4096, 16, 192, causal=True, D=128),
    _self(1, 65536, 8, 128, causal=True),
)

_FULL = Shape(4, 4096, 4096, 16, 16, 128, 128)
_CAUSAL = dataclasses.replace(_FULL, causal=True)
#: What a feature's cost is relative to.
PLAIN = {"causal": Case(_CAUSAL), "full": Case(_FULL)}
FEATURES = (
    Case(dataclasses.replace(_CAUSAL, window=(511, 0))),
    *(Case(_CAUSAL, feature) for feature in ("documents 1024", "soft cap 20", "ALiBi")),
    *(Case(_FULL, feature) for feature in ("prefix 512", "blocks 25%")),
    *(Case(_CAUSAL, f) for f in ("bias [T,S]", "bias [1,S]", "dropout 0.1", "key lengths", "lse")),
)

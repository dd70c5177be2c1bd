"""Compression of tokens into entries, m at a time, in chunks of any length: the first stage of CSA and HCA.

    Z'[t] = Z[t] + ape[t mod m]
    not overlapping:  C_i = Σ_r softmax_r(Z')[r] ∘ U[r]          r over the m tokens of block i
    overlapping:      the same over 2m candidates: the first halves (A) of the channels of the tokens of block i - 1,
                      then the second halves (B) of those of block i; block 0 has no A

with a softmax of its own for every channel. What a chunk leaves unfinished is kept in a `CompressState`, which is a
function of the tokens seen so far alone: no chunking shows in the bits of entries or state.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jattn import _check
from jattn._problem import accumulator
from jattn.rope import _cos_sin, _positive

__all__ = ["CompressState", "Rotary", "YarnScaling", "compress", "visible_entries"]

_TILE = 2**18  # numbers of one array that are worked on at once


@dataclasses.dataclass(frozen=True)
class YarnScaling:
    """Frequencies for contexts `factor` times `original_length`: slow pairs are interpolated, fast ones kept.

    Pairs that turn fewer than `beta_slow` times in `original_length` tokens are divided by `factor`, those that turn
    more than `beta_fast` times are kept, and between the two pairs, rounded outward to whole ones, the mix is linear.
    Attention is not rescaled, as DeepSeek-V4 has it.

    Source: Peng et al., arXiv:2309.00071.
    """

    factor: float
    original_length: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0

    def __post_init__(self):
        for field in dataclasses.fields(self):
            _positive(field.name, getattr(self, field.name))
        if self.beta_slow >= self.beta_fast:
            raise ValueError(f"beta_slow={self.beta_slow} must be below beta_fast={self.beta_fast}")

    def __call__(self, frequencies):
        pairs = len(frequencies)
        if pairs < 2:
            raise ValueError(f"YarnScaling needs at least 2 pairs of channels, not {pairs}")
        step = -math.log(frequencies[1] / frequencies[0])

        def pair(turns):
            return math.log(self.original_length / (2 * math.pi * turns)) / step

        low = max(math.floor(pair(self.beta_fast)), 0)
        high = min(math.ceil(pair(self.beta_slow)), 2 * pairs - 1)
        mixed = np.clip((np.arange(pairs) - low) / max(high - low, 1e-3), 0, 1)
        return frequencies * (1 - mixed + mixed / self.factor)


@dataclasses.dataclass(frozen=True)
class Rotary:
    """Rotary embedding of the last `dim` channels: one rotation for everything in a layer. Hashable, compiled in.

    Args:
        dim: channels that rotate, even; the ones before them pass through.
        base: of the frequencies base ** (-2i / dim).
        scaling: None, `jattn.LinearScaling`, `jattn.Llama3Scaling` or `YarnScaling`.
        interleaved: True pairs channels (2i, 2i + 1), False (i, i + dim / 2).

    Example:
        >>> rotary = Rotary(64, base=160000.0, scaling=YarnScaling(16, 65536))
        >>> x = rotary(x, positions)  # x [.., H], positions of every row [..]

    Source: Su et al., arXiv:2104.09864.
    """

    dim: int
    base: float = 10000.0
    scaling: Any = None
    interleaved: bool = True

    def __post_init__(self):
        if isinstance(self.dim, bool) or not isinstance(self.dim, int | np.integer) or self.dim < 2 or self.dim % 2:
            raise ValueError(f"dim={self.dim!r} must be an even int >= 2")
        _positive("base", self.base)
        if self.scaling is not None and not callable(self.scaling):
            raise TypeError(f"scaling={self.scaling!r} must be None or a scaling of frequencies")

    def __call__(self, x, positions, *, inverse: bool = False):
        """`x [.., H]`, turned by the angles of `positions`, which broadcast to its leading axes; float32 inside."""
        H, R = x.shape[-1], self.dim
        if R > H:
            raise ValueError(f"rotary dim={R} must be <= {H}, the channels of x")
        frequencies = float(self.base) ** (-np.arange(0, R, 2, dtype=np.float64) / R)
        if self.scaling is not None:
            frequencies = self.scaling(frequencies)
        dtype = accumulator(x.dtype)
        cos, sin = _cos_sin(jnp.asarray(positions), frequencies, dtype)
        sin = -sin if inverse else sin
        turning = x[..., H - R :].astype(dtype)
        if self.interleaved:
            first, second = turning[..., 0::2], turning[..., 1::2]
        else:
            first, second = jnp.split(turning, 2, axis=-1)
        pair = first * cos - second * sin, second * cos + first * sin
        turned = jnp.stack(pair, -1).reshape(turning.shape) if self.interleaved else jnp.concatenate(pair, -1)
        return jnp.concatenate([x[..., : H - R], turned.astype(x.dtype)], axis=-1)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class CompressState:
    """What compression has to remember of B sequences between chunks. A pytree of arrays.

    u: `[B, R, C]` and z: `[B, R, C]` (z with its position bias), float32 or float64; C channels, R = m rows, 2m if
    overlapping. Row r holds the token at position (length // m)·m + r, less m if overlapping: the tokens of the
    unfinished block and, if overlapping, the m before them. Rows without a token have u = 0 and z = −inf.
    length: int32 `[B]`, the tokens seen so far.

    Source: the decoding state of DeepSeek-V4.
    """

    u: Any
    z: Any
    length: Any

    @classmethod
    def zeros(cls, sequences: int, ratio: int, channels: int, *, overlap: bool, dtype=jnp.float32) -> "CompressState":
        """The state before the first token, for B sequences of C channels."""
        shape = (sequences, ratio * (2 if overlap else 1), channels)
        return cls(jnp.zeros(shape, dtype), jnp.full(shape, -jnp.inf, dtype), jnp.zeros((sequences,), jnp.int32))


def visible_entries(positions, ratio: int):
    """How many entries a query at each position sees: those of blocks that are complete, its own token included.

    Args:
        positions: int `[..]`, counted from 0.
        ratio: m, tokens a block.

    Returns:
        `(positions + 1) // ratio`: entry i is seen if i is below it.

    Example:
        >>> visible_entries(np.arange(9), 4)  # 0 0 0 1 1 1 1 2 2

    Source: DeepSeek-V4; its report counts positions from 1.
    """
    return (positions + 1) // ratio


def compress(
    u,
    z,
    ape,
    state: CompressState | None = None,
    *,
    overlap: bool,
    seq_lengths=None,
    cu_seqlens=None,
    norm=None,
    eps: float = 1e-6,
    rotary: Rotary | None = None,
    dtype=None,
):
    """Entries of the blocks that a chunk of tokens completes.

    Any chunking of a sequence gives the entries and the state of the whole, bit for bit. Entry i then has its root mean
    square normalised and multiplied by `norm`, and is rotated to position m·i, that of its first token, where those are
    given. Sums are float32 (float64 for float64 inputs); differentiable.

    Args:
        u: values, floating-point `[B, T, C]`, or packed `[T, C]` with `cu_seqlens`.
        z: scores, shaped as `u`.
        ape: position bias `[m, C]`, floating-point; m is the number of tokens a block.
        state: what the call before returned; None starts sequences. Not for packed ones.
        overlap: entries take the first C / 2 channels of the block before and the last C / 2 of their own (CSA), rather
            than all C channels of their own (HCA).
        seq_lengths: int `[B]`: how many of the T tokens of each sequence there are; the rest may hold anything.
        cu_seqlens: int `[M + 1]`: offsets of packed sequences; each starts at position 0.
        norm: `[c]`, the weight of an RMSNorm, c = C / 2 if overlapping and C if not; None normalises nothing.
        eps: of the norm.
        rotary: rotates entries; None does not.
        dtype: of the entries, also between the stages; None is that of `u`.

    Returns:
        (entries, counts, state). entries: `[B, E, c]` with E = T // m, (T + m - 1) // m after a state: the new ones
        first, then zeros; packed `[T // m, c]`, one sequence behind the other. counts: int32 `[B]` (`[M]`), how many
        are new. state: a `CompressState`, None if packed. The first new entry is number state.length // m of the state
        that came in.

    Raises:
        ValueError, TypeError: shapes and dtypes that do not fit; the message names the dimension.

    Example:
        >>> entries, counts, state = compress(u, z, ape, overlap=True)          # a prompt [B, T, C]
        >>> new, counts, state = compress(u1, z1, ape, state, overlap=True)     # and tokens that follow

    Source: DeepSeek-V4's compressed sparse attention; channels are in the order of its released weights.
    """
    u, z, ape, norm = checked_tokens(u, z, ape, norm, overlap, "")
    m, C = ape.shape
    acc = accumulator(u.dtype)
    dtype = jnp.dtype(u.dtype if dtype is None else dtype)
    if cu_seqlens is not None:
        if state is not None or seq_lengths is not None or u.ndim != 2:
            raise ValueError(f"cu_seqlens takes packed u [T, C], no state and no seq_lengths; u has shape {u.shape}")
        cu_seqlens = _check.cu_seqlens(cu_seqlens, "cu_seqlens", u.shape[0])
        return _packed(u, z, ape, cu_seqlens, overlap, norm, eps, rotary, dtype)
    if u.ndim != 3:
        raise ValueError(f"u has shape {u.shape}; expected [B, T, C], or packed [T, C] with cu_seqlens")
    B, T, _ = u.shape
    new = _check.lengths(seq_lengths, "seq_lengths", (B,), T)
    new = jnp.full((B,), T, jnp.int32) if new is None else jnp.clip(new, 0, T)
    if state is None:
        held, before = CompressState.zeros(B, m, C, overlap=overlap, dtype=acc), jnp.zeros((B,), jnp.int32)
        E = T // m
    else:
        held = checked_state(state, "state", B, m, C, overlap, acc)
        before = jnp.maximum(held.length.astype(jnp.int32), 0)
        E = (T + m - 1) // m
    walk = _Rows(held.u, held.z, u, z, ape, before, new, overlap)
    block = before[:, None] // m + jnp.arange(E, dtype=jnp.int32)
    exists = block < ((before + new) // m)[:, None]
    found = walk.candidates(block, exists) if state is not None else walk.from_the_start(exists)
    entries = _entries(*found, exists, block * m, norm, eps, rotary, dtype)
    counts = (before + new) // m - before // m
    return entries, counts, walk.state()


def checked_tokens(u, z, ape, norm, overlap, of):
    """u, z, ape and norm of one branch, as arrays that fit together; `of` begins their names in messages."""
    u, z, ape = _check.array(u, of + "u"), _check.array(z, of + "z"), _check.array(ape, of + "ape")
    _check.flag(overlap, "overlap")
    for name, x in (("u", u), ("z", z), ("ape", ape)):
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise TypeError(f"{of}{name} must be floating-point, not {x.dtype}")
    if u.ndim not in (2, 3):
        raise ValueError(f"{of}u has shape {u.shape}; expected [B, T, C], or packed [T, C] with cu_seqlens")
    if z.shape != u.shape:
        raise ValueError(f"{of}z has shape {z.shape}; u has {u.shape}")
    if ape.ndim != 2 or ape.shape[0] < 1:
        raise ValueError(f"{of}ape has shape {ape.shape}; expected [m, C], one row for each token of a block")
    C = u.shape[-1]
    if ape.shape[1] != C:
        raise ValueError(f"{of}ape has C={ape.shape[1]} channels; u has C={C}")
    if C < 1 or (overlap and C % 2):
        raise ValueError(f"{of}u has C={C} channels; " + ("overlap needs two halves" if C else "expected at least 1"))
    if norm is not None:
        norm, c = _check.array(norm, of + "norm"), C // 2 if overlap else C
        if norm.shape != (c,):
            raise ValueError(f"{of}norm has shape {norm.shape}; expected one weight a channel of an entry, ({c},)")
    return u, z, ape, norm


def checked_state(state, name, B, m, C, overlap, dtype):
    if not isinstance(state, CompressState):
        raise TypeError(f"{name} must be a CompressState, not {type(state).__name__}")
    want = (B, m * (2 if overlap else 1), C)
    for part in ("u", "z"):
        x = _check.array(getattr(state, part), f"{name}.{part}")
        if x.shape != want:
            raise ValueError(f"{name}.{part} has shape {x.shape}; expected [B, rows, C] = {want}")
        if x.dtype != dtype:
            raise TypeError(f"{name}.{part} must be {jnp.dtype(dtype)}, not {x.dtype}")
    if _check.array(state.length, f"{name}.length").shape != (B,):
        raise ValueError(f"{name}.length has shape {state.length.shape}; expected ({B},)")
    return state


def in_tiles(function, *arrays):
    """`function(*arrays)` of arrays `[R, ..]`, some rows at a time: a row's bits cannot depend on how many there are.

    The number of rows a tile depends on the size of a row alone, so that the same code is compiled whatever R is, and
    nothing of the caller's is fused into it, which would decide where products and sums are rounded.
    """
    R = arrays[0].shape[0]
    C = 1 << max(min(6, (_TILE // max(max(x[:1].size for x in arrays), 1)).bit_length() - 1), 0)
    n = max(-(-R // C), 2)  # a loop of one step is no loop once it is compiled
    tiles = [jnp.pad(x, ((0, n * C - R), *[(0, 0)] * (x.ndim - 1))).reshape(n, C, *x.shape[1:]) for x in arrays]

    def one(tile):
        return jax.lax.optimization_barrier(function(*jax.lax.optimization_barrier(tile)))

    out = jax.lax.map(one, tuple(tiles))
    return out.reshape(n * C, *out.shape[2:])[:R]


def fold(x, axis: int):
    """Sum along an axis, halves onto halves: elementwise additions, whose order does not depend on other axes."""
    x = jnp.moveaxis(x, axis, 0)
    while x.shape[0] > 1:
        n, half = x.shape[0], (x.shape[0] + 1) // 2
        low, high = x[: n - half] + x[half:], x[n - half : half]
        x = jnp.concatenate([low, high], 0)
    return x[0]


def rms_norm(x, weight, eps):
    """x / rms(x) · weight along the last axis, in float32 (float64), in x's dtype."""
    acc = accumulator(x.dtype)
    y = x.astype(acc)
    y = y * jax.lax.rsqrt(fold(y * y, -1)[..., None] / x.shape[-1] + np.asarray(eps, acc))
    return (y * weight.astype(acc)).astype(x.dtype)


class _Rows:
    """The rows that a state and a chunk hold, addressed by position in the sequence."""

    def __init__(self, held_u, held_z, u, z, ape, before, new, overlap):
        acc, T = held_u.dtype, u.shape[1]
        self.m, self.overlap, self.held = ape.shape[0], overlap, held_u.shape[1]
        self.before, self.after = before[:, None], (before + new)[:, None]
        bias = ape.astype(acc)[(self.before + jnp.arange(T, dtype=jnp.int32)) % self.m]
        self.u = jnp.concatenate([held_u, u.astype(acc)], axis=1)
        self.z = jnp.concatenate([held_z, z.astype(acc) + bias], axis=1)

    def base(self, length):
        """Position of the first row of a state after `length` tokens."""
        return (length // self.m - (1 if self.overlap else 0)) * self.m

    def take(self, position, exists, half=slice(None)):
        """u and z at positions `[B, n]`, all channels or a half; 0 and −inf where there is none to be had."""
        index = jnp.where(position < self.before, position - self.base(self.before), self.held + position - self.before)
        index, exists = jnp.clip(index, 0, self.u.shape[1] - 1)[..., None], exists[..., None]
        u = jnp.where(exists, jnp.take_along_axis(self.u[..., half], index, 1), 0)
        return u, jnp.where(exists, jnp.take_along_axis(self.z[..., half], index, 1), -jnp.inf)

    def candidates(self, block, exists):
        """u and z `[B, E, m or 2m, c]` of the blocks of these numbers."""
        (B, E), c = block.shape, self.u.shape[-1] // (2 if self.overlap else 1)
        r = jnp.arange(self.m, dtype=jnp.int32)

        def rows(of, exists, half):
            spread = (of[..., None] * self.m + r).reshape(B, E * self.m), jnp.repeat(exists, self.m, axis=1)
            return [x.reshape(B, E, self.m, c) for x in self.take(*spread, half)]

        own = rows(block, exists, slice(-c, None))
        if not self.overlap:
            return own
        previous = rows(block - 1, exists & (block > 0), slice(0, c))
        return [jnp.concatenate(pair, axis=2) for pair in zip(previous, own, strict=True)]

    def from_the_start(self, exists):
        """The same of blocks 0 to E - 1 where nothing was held: cut and shifted, not gathered."""
        E, c, found = exists.shape[1], self.u.shape[-1] // (2 if self.overlap else 1), []
        for x, none in ((self.u, 0), (self.z, -jnp.inf)):
            blocks = x[:, self.held : self.held + E * self.m].reshape(len(x), E, self.m, x.shape[-1])
            blocks = jnp.where(exists[..., None, None], blocks, none)
            if self.overlap:
                shifted = jnp.pad(blocks[:, :-1, :, :c], ((0, 0), (min(E, 1), 0), (0, 0), (0, 0)), constant_values=none)
                blocks = jnp.concatenate([shifted, blocks[..., c:]], axis=2)
            found.append(blocks)
        return found

    def state(self) -> CompressState:
        position = self.base(self.after) + jnp.arange(self.held, dtype=jnp.int32)
        u, z = self.take(position, (position >= 0) & (position < self.after))
        return CompressState(u, z, self.after[:, 0])


def _packed(u, z, ape, cu, overlap, norm, eps, rotary, dtype):
    """As `compress` of each sequence, one behind the other."""
    T, m, acc = u.shape[0], ape.shape[0], accumulator(u.dtype)
    M, E = cu.shape[0] - 1, T // m
    cu = jax.lax.cummax(jnp.clip(cu, 0, T))
    counts = (cu[1:] - cu[:-1]) // m
    ends = jnp.cumsum(counts, dtype=jnp.int32)
    slot = jnp.arange(E, dtype=jnp.int32)
    if M == 0 or E == 0:
        return jnp.zeros((E, u.shape[-1] // (2 if overlap else 1)), dtype), counts, None
    sequence = jnp.minimum(jnp.sum(ends[:, None] <= slot, axis=0, dtype=jnp.int32), M - 1)
    block = slot - jnp.where(sequence > 0, ends[sequence - 1], 0)
    exists = slot < ends[-1]
    r = jnp.arange(m, dtype=jnp.int32)
    bias = ape.astype(acc)[None]

    def rows(block, exists):
        index = jnp.clip(cu[sequence][:, None] + block[:, None] * m + r, 0, T - 1)
        exists = exists[:, None, None]
        return jnp.where(exists, u.astype(acc)[index], 0), jnp.where(exists, z.astype(acc)[index] + bias, -jnp.inf)

    found = rows(block, exists)
    if overlap:
        c = u.shape[-1] // 2
        previous = rows(block - 1, exists & (block > 0))
        found = (jnp.concatenate([a[..., :c], b[..., c:]], 1) for a, b in zip(previous, found, strict=True))
    return _entries(*found, exists, block * m, norm, eps, rotary, dtype), counts, None


def _entries(u, z, exists, position, norm, eps, rotary, dtype):
    """Entries `[.., c]` of candidates `[.., r, c]`: a softmax of z over r for every channel, times u, and the rest."""
    lead, (r, c) = exists.shape, u.shape[-2:]
    z = jnp.where(exists[..., None, None], z, 0)  # never a softmax of nothing but −inf
    position = jnp.where(exists, position, 0)

    def tile(u, z, position):
        weight = jnp.exp(z - jax.lax.stop_gradient(jnp.max(z, axis=-2, keepdims=True)))
        entries = (fold(weight * u, -2) / fold(weight, -2)).astype(dtype)
        if norm is not None:
            entries = rms_norm(entries, norm, eps)
        return entries if rotary is None else rotary(entries, position)

    entries = in_tiles(tile, u.reshape(-1, r, c), z.reshape(-1, r, c), position.reshape(-1))
    return jnp.where(exists[..., None], entries.reshape(*lead, c), 0)

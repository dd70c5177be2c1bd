"""What decoding of CSA and HCA keeps of every sequence, as a pytree; and rows of 584 bytes.

    window        the last W key rows, a ring: the token at position p is in slot p mod W
    tail          tokens of the block that is not complete yet (`CompressState`)
    entries       one compressed row for every complete block
    index_tail, index_keys    the same for the indexer (CSA)

All of it is needed to go on: entries alone, as a cache of prefixes by pages has them, are not a state.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jattn import _formats
from jattn._problem import accumulator
from jattn.compressed_tokens import CompressState
from jattn.indexer import indexer_quantize

__all__ = ["CompressedCache", "Rows584"]

BLOCK = 64  # channels that share a scale


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rows584:
    """Rows in fp8 with exponent-only scales, in pages of bytes: 584 a row of 512 channels, 64 of them rotary.

    A page of n rows is n times (e4m3 codes of the first channels, then the rotary ones in bfloat16, 576 bytes), then n
    times (one ue8m0 scale for each 64 channels, filled up to a multiple of 8 bytes), then nothing up to a multiple of
    576. Scales are powers of two, rounded up.

    data: uint8 `[B, P, stride]`. page: rows of a page. dim, rotary_dim: channels of a row, and how many stay bfloat16;
    the others are a multiple of 64.

    Source: the layout "MODEL1" of FlashMLA, for DeepSeek-V4.
    """

    data: Any
    page: int = dataclasses.field(metadata=dict(static=True))
    dim: int = dataclasses.field(metadata=dict(static=True))
    rotary_dim: int = dataclasses.field(metadata=dict(static=True))

    @classmethod
    def zeros(cls, sequences: int, rows: int, dim: int, rotary_dim: int, page: int = 64) -> "Rows584":
        """Room for at least `rows` rows of each of B sequences."""
        if not 0 <= rotary_dim <= dim or (dim - rotary_dim) % BLOCK:
            raise ValueError(
                f"dim={dim} less rotary_dim={rotary_dim} must be a multiple of {BLOCK} channels, which share a scale"
            )
        empty = cls(None, page, dim, rotary_dim)
        return dataclasses.replace(empty, data=jnp.zeros((sequences, -(-rows // page), empty.stride), jnp.uint8))

    @property
    def row_bytes(self) -> int:
        return self.dim + self.rotary_dim

    @property
    def scale_bytes(self) -> int:
        return -(-(self.dim - self.rotary_dim) // (8 * BLOCK)) * 8

    @property
    def stride(self) -> int:
        """Bytes of a page."""
        return -(-self.page * (self.row_bytes + self.scale_bytes) // self.row_bytes) * self.row_bytes

    @property
    def shape(self) -> tuple[int, int, int]:
        """(B, rows, dim)."""
        return (self.data.shape[0], self.data.shape[1] * self.page, self.dim)

    def encode(self, x):
        """Bytes `[.., row_bytes + scale_bytes]` of rows `[.., dim]`: what a page holds of each."""
        plain = self.dim - self.rotary_dim
        codes, scales = _formats.quantize_fp8(x[..., :plain], BLOCK, power_of_two=True)
        fill = jnp.zeros((*x.shape[:-1], self.scale_bytes - plain // BLOCK), jnp.uint8)
        rotary = _formats.bytes_of(_formats.stored(x[..., plain:].astype(jnp.bfloat16)))
        return jnp.concatenate([_formats.bytes_of(codes), rotary, _formats.encode_ue8m0(scales), fill], axis=-1)

    def decode(self, data, dtype):
        """Rows `[.., dim]` of `dtype`, of what `encode` gave."""
        plain = self.dim - self.rotary_dim
        codes, rotary, scales = jnp.split(data, [plain, self.row_bytes], axis=-1)
        scales = _formats.decode_ue8m0(scales[..., : plain // BLOCK])
        codes = _formats.from_bytes(codes, jnp.float8_e4m3fn)
        rotary = _formats.from_bytes(rotary, jnp.bfloat16)
        return jnp.concatenate([_formats.dequantize_fp8(codes, scales, dtype), rotary.astype(dtype)], axis=-1)

    def take(self, index):
        """The encoded rows at `index`, int `[B, n]` within the rows there are."""
        numbers = lax.GatherDimensionNumbers((2,), (0, 1), (0, 1, 2))
        found = [
            lax.gather(jnp.asarray(self.data), at, numbers, (1, 1, size), mode="clip") for at, size in self._runs(index)
        ]
        return jnp.concatenate(found, axis=-1)

    def put(self, index, encoded) -> "Rows584":
        """With `encoded` rows `[B, n, ..]` at `index`; those at an index past the last are not written."""
        data, numbers = jnp.asarray(self.data), lax.ScatterDimensionNumbers((2,), (0, 1), (0, 1, 2))
        new = jnp.split(encoded, [self.row_bytes], axis=-1)
        for (at, _), bytes_ in zip(self._runs(index), new, strict=True):
            data = lax.scatter(data, at, bytes_, numbers, unique_indices=True, mode="drop")
        return dataclasses.replace(self, data=data)

    def _runs(self, index):
        """Where the row and the scales of each row begin, int32 `[B, n, 3]` as (sequence, page, byte), and how long."""
        page, slot = index // self.page, index % self.page
        sequence = jnp.broadcast_to(jnp.arange(index.shape[0], dtype=jnp.int32)[:, None], index.shape)
        for size, start in ((self.row_bytes, 0), (self.scale_bytes, self.page * self.row_bytes)):
            yield jnp.stack([sequence, page, start + slot * size], axis=-1), size


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class CompressedCache:
    """What `csa_attention` and `hca_attention` keep of B sequences. A pytree of arrays; the last two fields are static.

    window: the last W rows of keys, `[B, W, D]` or a `Rows584`; position p is in slot p mod W.
    tail: `CompressState`, with `length [B]`, the tokens of each sequence.
    entries: `[B, E, D]` or a `Rows584`; those past length // m may hold anything.
    index_tail, index_keys: of the indexer: a `CompressState`, and `[B, E, c]` or a pair (codes, scales) as
    `indexer_quantize` returns. None for HCA, or where lists of entries are given.
    capacity: tokens that there is room for; what comes after is not written, and its output is 0.
    index_format: how index keys are rounded; None is not at all.

    Example:
        >>> cache = CompressedCache.zeros(2, 65536, 512, ratio=4, overlap=True, index_dim=128, dtype="bfloat16")
        >>> cache.entries.shape
        (2, 16384, 512)

    Source: DeepSeek-V4.
    """

    window: Any
    tail: CompressState
    entries: Any
    index_tail: Any
    index_keys: Any
    capacity: int = dataclasses.field(metadata=dict(static=True))
    index_format: str | None = dataclasses.field(default=None, metadata=dict(static=True))

    @classmethod
    def zeros(
        cls,
        sequences: int,
        capacity: int,
        head_dim: int,
        *,
        ratio: int,
        overlap: bool,
        index_dim: int | None = None,
        window: int = 128,
        dtype=jnp.float32,
        kv_format: str | None = None,
        rotary_dim: int = 64,
        index_format: str | None = None,
        page: int = 64,
    ) -> "CompressedCache":
        """An empty cache.

        Args:
            sequences, capacity: B, and tokens of each.
            head_dim: D.
            ratio, overlap: m, and whether entries overlap: 4 and True for CSA, 128 and False for HCA.
            index_dim: c of the index keys; None keeps none.
            window: W.
            dtype: of the query; rows are kept in it where `kv_format` is None.
            kv_format: "v4_584" keeps window and entries as `Rows584`, with `rotary_dim` and pages of `page` rows.
            index_format: a format of `indexer_quantize` for index keys, which are turned by Hadamard first; or None.

        Raises:
            ValueError: sizes and formats that cannot be.
        """
        for name, x in (("sequences", sequences), ("capacity", capacity), ("head_dim", head_dim), ("window", window)):
            _positive(x, name, least=0 if name in ("sequences", "capacity") else 1)
        _positive(ratio, "ratio")
        if kv_format not in (None, "v4_584"):
            raise ValueError(f"kv_format={kv_format!r} must be None or 'v4_584'")
        acc, entries = accumulator(jnp.dtype(dtype)), capacity // ratio

        def rows(n):
            if kv_format is None:
                return jnp.zeros((sequences, n, head_dim), dtype)
            return Rows584.zeros(sequences, n, head_dim, rotary_dim, page)

        def tail(c):
            return CompressState.zeros(sequences, ratio, c * (2 if overlap else 1), overlap=overlap, dtype=acc)

        index = (None, None)
        if index_dim is not None:
            keys = jnp.zeros((sequences, entries, index_dim), dtype)
            index = tail(index_dim), encode_index(keys, index_format)
        return cls(rows(window), tail(head_dim), rows(entries), *index, capacity, index_format)

    @classmethod
    def restore(
        cls,
        entries,
        *,
        length,
        window=None,
        tail=None,
        index_keys=None,
        index_tail=None,
        index_format=None,
        capacity=None,
        ratio: int,
        overlap: bool,
    ) -> "CompressedCache":
        """A cache from parts that were kept elsewhere, if they are of one state. On the host: it looks at the data.

        Entries (and index keys) can be shared between requests by pages; window and tails belong to one request and one
        length, and cannot be computed from entries.

        Args:
            entries: `[B, E, D]` or a `Rows584`.
            length: int `[B]`, the tokens that all parts were kept after.
            window, tail, index_keys, index_tail, index_format: the fields of the cache.
            capacity: tokens; None is what `entries` has room for.
            ratio, overlap: as in `zeros`.

        Raises:
            ValueError: a part that is missing, of other sizes, or of another length than `length`.
        """
        length = np.asarray(length)
        missing = [name for name, x in (("window", window), ("tail", tail)) if x is None]
        if (index_keys is None) != (index_tail is None):
            missing.append("index_tail" if index_tail is None else "index_keys")
        if missing:
            raise ValueError(
                f"a cache needs {' and '.join(missing)} of length={length.tolist()}: it cannot be had from entries"
            )
        B, E, D = entries.shape
        capacity = (E + 1) * ratio - 1 if capacity is None else _positive(capacity, "capacity", least=0)
        if capacity // ratio > E:
            raise ValueError(f"capacity={capacity} needs {capacity // ratio} entries; there is room for E={E}")
        if length.shape != (B,) or not np.issubdtype(length.dtype, np.integer):
            raise ValueError(f"length has shape {length.shape} and dtype {length.dtype}; expected ints, ({B},)")
        if B and not 0 <= length.min() <= length.max() <= capacity:
            raise ValueError(f"length={length.tolist()} must be within 0 and capacity={capacity}")
        if window.shape[0] != B or window.shape[2] != D:
            raise ValueError(f"window has shape {window.shape}; expected [B, W, D] with B={B} and D={D} of entries")
        _check_tail(tail, "tail", length, ratio, overlap, D)
        if index_tail is not None:
            keys = jax.tree.leaves(index_keys)[0]
            if keys.shape[:2] != (B, E):
                raise ValueError(f"index_keys have shape {keys.shape}; expected B={B} and E={E} of entries")
            _check_tail(index_tail, "index_tail", length, ratio, overlap, None)
        return cls(window, tail, entries, index_tail, index_keys, capacity, index_format)

    @property
    def lengths(self):
        """Tokens of each sequence, int32 `[B]`."""
        return self.tail.length


def _check_tail(tail, name, length, ratio, overlap, D):
    """That a tail is the state after `length` tokens: its shape, its length, and which rows hold a token."""
    halves = 2 if overlap else 1
    B, rows, C = tail.u.shape
    if (B, rows) != (len(length), ratio * halves):
        raise ValueError(f"{name} has shape {tail.u.shape}; expected B={len(length)} and {ratio * halves} rows")
    if D is not None and C != D * halves:
        raise ValueError(f"{name} has C={C} channels; entries of D={D} have {D * halves}")
    if not np.array_equal(tail.length, length):
        raise ValueError(f"{name}.length={np.asarray(tail.length).tolist()} must be length={length.tolist()}")
    position = (length[:, None] // ratio - (halves - 1)) * ratio + np.arange(rows)
    wanted = (position >= 0) & (position < length[:, None])
    held = np.asarray(jnp.all(jnp.isfinite(tail.z), axis=-1))
    if not np.array_equal(held, wanted):
        b, r = np.argwhere(held != wanted)[0]
        what = "holds no token at" if wanted[b, r] else "holds a token at"
        raise ValueError(f"{name} {what} position {position[b, r]} of sequence {b}, whose length is {length[b]}")


def encode_index(x, index_format):
    """Index keys or queries `[.., c]` as they are scored: as they are, or turned by Hadamard and rounded."""
    return x if index_format is None else indexer_quantize(_formats.hadamard(x), index_format)


def encode(store, x):
    """Rows `[.., D]` as `store` keeps them."""
    return store.encode(x) if isinstance(store, Rows584) else x.astype(store.dtype)


def decode(store, rows, dtype):
    return store.decode(rows, dtype) if isinstance(store, Rows584) else rows.astype(dtype)


def take(store, index):
    """Rows at `index [B, n]`, as `store` keeps them."""
    if isinstance(store, Rows584):
        return store.take(index)
    return jnp.take_along_axis(store, index[..., None], axis=1, mode="clip")


def put(store, index, rows):
    """`store` with rows `[B, n, ..]` at `index [B, n]`; an index past the last row writes nothing."""
    if isinstance(store, Rows584):
        return store.put(index, rows)
    sequence = jnp.arange(index.shape[0], dtype=jnp.int32)[:, None]
    return jnp.asarray(store).at[sequence, index].set(rows, mode="drop", unique_indices=True)


def _positive(x, name, least=1):
    if isinstance(x, bool) or not isinstance(x, int | np.integer) or x < least:
        raise ValueError(f"{name}={x!r} must be an int >= {least}")
    return int(x)

"""Dropout of a weight tile in registers: the bits of `jattn._philox`, whole Philox blocks per thread."""

import jax
import jax.numpy as jnp
from jax import lax

from jattn._philox import keep_bits
from jattn.pallas._compat import arith, interpreting, plgpu
from jattn.pallas.hopper import ptx

_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_WEYL = 0x9E3779B9, 0xBB67AE85


def drop(p: jax.Array, key_words, batch, head, position, key_index, threshold: int, *, aligned: bool) -> jax.Array:
    """Weights `p [64, n]` with the dropped ones zeroed; the kept ones are not scaled here.

    Args:
        key_words: two uint32 scalars, as int32.
        position, key_index: of the tile's first row and column; the column is a multiple of 16.
        aligned: whether the first position is a multiple of 16. The thread's two rows then share their Philox blocks.
    """
    if interpreting():
        rows, columns = (lax.broadcasted_iota(jnp.int32, p.shape, axis) for axis in (0, 1))
        words = [lax.bitcast_convert_type(k, jnp.uint32) for k in key_words]
        bits = keep_bits(words, batch, head, position + rows, key_index + columns)
        return jnp.where(bits >= jnp.uint32(threshold), p, 0.0)

    @plgpu.inline_mgpu(arg_types=(ptx.WGMMA, *[ptx.SCALAR] * 6), return_type=ptx.array_type(p.shape[1]))
    def mask(_, p, *scalars):
        k0, k1, batch, head, position, key_index = (x.registers[()] for x in scalars)
        row, column = ptx.lane_position()
        rows = [arith.addi(arith.addi(position, row), ptx.integer(8 * i)) for i in range(2)]
        values, zero = ptx.scalars(p), ptx.constant(0.0)
        for group in range(0, p.shape[1], 16):  # columns c, c + 1, c + 8, c + 9 of it are this thread's
            s = arith.addi(key_index, arith.addi(column, ptx.integer(group)))
            column_counter = arith.ori(_shl(_shr(s, 4), 2), _and(_shr(s, 1), 3))
            blocks = {}
            for i in range(min(8, len(values) - group // 2)):
                index = group // 2 + i
                r = ptx.row_of(index)
                if (0 if aligned else r) not in blocks:
                    row_counter = arith.ori(_shl(_shr(rows[r], 4), 3), _and(rows[r], 7))
                    blocks[0 if aligned else r] = _philox((batch, head, row_counter, column_counter), (k0, k1))
                words = blocks[0 if aligned else r]
                low, high = words[2 * (i // 4)], words[2 * (i // 4) + 1]
                if aligned:
                    word = high if r else low
                else:
                    third_bit = arith.cmpi(arith.CmpIPredicate.ne, _and(rows[r], 8), ptx.integer(0))
                    word = arith.select(third_bit, high, low)
                bits = _shr(word, 16) if i % 2 else _and(word, 0xFFFF)
                keep = arith.cmpi(arith.CmpIPredicate.uge, bits, ptx.integer(threshold))
                values[index] = arith.select(keep, values[index], zero)
        return ptx.from_scalars(values)

    return mask(p, *(jnp.asarray(x, jnp.int32) for x in (*key_words, batch, head, position, key_index)))


def kept(columns: int, key_words, batch, head, position, key_index, threshold: int, *, aligned: bool) -> jax.Array:
    """Which weights of a transposed tile `[64 keys, columns queries]` stay: a bit an element, for `keep`.

    Args:
        position, key_index: of the tile's first column and row; the row is a multiple of 16.
        aligned: whether the first position is a multiple of 16. Half as many Philox blocks are then needed.
    """
    if interpreting():
        keys, queries = (lax.broadcasted_iota(jnp.int32, (ptx.TILE_ROWS, columns), axis) for axis in (0, 1))
        words = [lax.bitcast_convert_type(k, jnp.uint32) for k in key_words]
        bits = keep_bits(words, batch, head, position + queries, key_index + keys)
        return bits >= jnp.uint32(threshold)

    @plgpu.inline_mgpu(arg_types=(*[ptx.SCALAR] * 6,), return_type=_KEPT)
    def find(_, *scalars):
        k0, k1, batch, head, position, key_index = (x.registers[()] for x in scalars)
        row, column = ptx.lane_position()
        s, first = arith.addi(key_index, row), arith.addi(position, column)
        column_counter = arith.ori(_shl(_shr(s, 4), 2), _and(_shr(s, 1), 3))
        half = _shl(_and(s, 1), 4)  # an odd key has the upper half of a word
        kept, blocks = [ptx.integer(0)] * 4, {}
        for i in range(columns // 2):
            offset, third_bit_of_s = ptx.column_of(i), ptx.row_of(i)
            t = arith.addi(first, ptx.integer(offset))
            shared = offset & ~8 if aligned else offset
            if shared not in blocks:
                row_counter = arith.ori(_shl(_shr(t, 4), 3), _and(t, 7))
                blocks[shared] = _philox((batch, head, row_counter, column_counter), (k0, k1))
            low, high = blocks[shared][2 * third_bit_of_s :][:2]
            if aligned:
                word = high if offset & 8 else low
            else:
                word = arith.select(arith.cmpi(arith.CmpIPredicate.ne, _and(t, 8), ptx.integer(0)), high, low)
            bits = _and(arith.shrui(word, half), 0xFFFF)
            keep = arith.cmpi(arith.CmpIPredicate.uge, bits, ptx.integer(threshold))
            bit = arith.select(keep, ptx.integer(1 << i % 32), ptx.integer(0))
            kept[i // 32] = arith.ori(kept[i // 32], bit)
        return ptx.from_scalars(kept, signed=True)

    return find(*(jnp.asarray(x, jnp.int32) for x in (*key_words, batch, head, position, key_index)))


_KEPT = plgpu.ShapeDtypeStruct((ptx.TILE_ROWS, 8), jnp.int32, layout=ptx.WGMMA)  # four words a thread


def keep(x: jax.Array, bits: jax.Array, start: int = 0) -> jax.Array:
    """`x [64, n]`, columns from `start` on of a tile, with zeros where `kept` found no bit."""
    if interpreting():
        return jnp.where(bits[:, start : start + x.shape[1]], x, 0.0)

    @plgpu.inline_mgpu(arg_types=(ptx.WGMMA, ptx.WGMMA), return_type=ptx.array_type(x.shape[1]))
    def select(_, x, bits):
        words, zero = ptx.scalars(bits), ptx.constant(0.0)

        def one(i, value):
            mine = _and(words[i // 32], 1 << i % 32)
            return arith.select(arith.cmpi(arith.CmpIPredicate.ne, mine, ptx.integer(0)), value, zero)

        return ptx.from_scalars([one(i, value) for i, value in enumerate(ptx.scalars(x), start // 2)])

    return select(x, bits)


def _philox(counter, key):
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for i in range(10):
        if i:
            k0, k1 = (arith.addi(k, ptx.integer(w)) for k, w in zip((k0, k1), _WEYL, strict=True))
        m0, m1 = (ptx.integer(m) for m in _MULTIPLIERS)
        c0, c1, c2, c3 = (
            arith.xori(arith.xori(ptx.mul_hi(c2, m1), c1), k0), arith.muli(c2, m1),
            arith.xori(arith.xori(ptx.mul_hi(c0, m0), c3), k1), arith.muli(c0, m0),
        )  # fmt: skip
    return c0, c1, c2, c3


def _shr(x, count: int):
    return arith.shrui(x, ptx.integer(count))


def _shl(x, count: int):
    return arith.shli(x, ptx.integer(count))


def _and(x, bits: int):
    return arith.andi(x, ptx.integer(bits))

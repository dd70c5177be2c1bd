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

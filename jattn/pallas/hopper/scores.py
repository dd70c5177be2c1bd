"""What happens to a score tile between the product and the softmax, in the order of the contract:

    scale → + bias → modifier → soft cap → mask

A plain problem does none of it: its scale is part of the exponential and its bounds are applied by `mask_columns`.
The mask's rule is applied only to blocks that it may cut. Tiles are walked in slices of columns, so that few values are
live beside the tile itself.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp

from jattn.pallas._compat import plgpu
from jattn.pallas.hopper import memory, ptx
from jattn.pallas.lowering import Element, on_elements

SLICE = 16  # columns at a time


@dataclasses.dataclass(frozen=True)
class Place:
    """Where the score tile of one warpgroup is, as traced scalars."""

    batch: Any  # row of arrays with a batch axis: the batch index, or the packed sequence
    head: Any
    row: Any  # first query, counted in its sequence
    column: Any  # first key, likewise
    offset: Any  # from queries to positions
    array_row: Any  # row and column of arrays [.., T, S]; others than the above when packed
    array_column: Any
    diagonal_origin: int  # entry of distance 0 in arrays by diagonal
    origin: Any  # batch index and head that 0 stands for

    def element(self, start: int, width: int, arrays) -> Element:
        """Columns `[start, start + width)` of the tile."""
        shape = (ptx.TILE_ROWS, width)
        row = self.row + plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=ptx.WGMMA)
        column = self.column + start + plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=ptx.WGMMA)
        return Element(
            batch=self.batch + self.origin[0], head=self.head + self.origin[1],
            query_index=row, query_position=row + self.offset, key_index=column,
            load=lambda i: self.load(arrays[i], start, width),
            load_at=lambda i, rows, columns: memory.ld_global_at(arrays[i], self.batch, self.head, rows, columns),
        )

    def load(self, array, start: int, width: int, *, diagonal: bool = False):
        """Columns `[start, start + width)` of the tile's part of an array in HBM."""
        if diagonal:
            return memory.ld_global(
                array, self.batch, self.head, self.row, self.column + start, width, self.diagonal_origin
            )
        return memory.ld_global(array, self.batch, self.head, self.array_row, self.array_column + start, width)


def modify(s, place: Place, *, scale, bias, mod, aux, soft_cap):
    """The scores `s [64, n]` after everything but the mask, with −inf where bias or modifier hide.

    Args:
        scale: float or scalar array; multiplies first.
        bias: array in HBM that broadcasts to [B, N, T, S], or None.
        mod, aux: the modifier, or None; for each of its arrays (array in HBM, its kind).
        soft_cap: float or None.
    """

    def change(part, start, width):
        part, visible = part * scale, None
        if bias is not None:
            part = part + place.load(bias, start, width)
            visible = part != -jnp.inf
        if mod is not None:
            part = part if visible is None else jnp.where(visible, part, 0.0)
            values = [place.load(a, start, width, diagonal=kind == "diagonal") for a, kind in aux]
            e = place.element(start, width, ())
            part = on_elements(mod.function.function, part, e.batch, e.head, e.query_position, e.key_index, *values)
            visible = part != -jnp.inf if visible is None else visible & (part != -jnp.inf)
        if soft_cap is not None:
            part = soft_cap * _tanh(part * (1 / soft_cap))
        return part if visible is None else jnp.where(visible, part, -jnp.inf)

    return _in_slices(s, change)


def hide(s, place: Place, rule, arrays):
    """The scores `s [64, n]`, −inf where a mask's rule does not hold; see `lowering.MaskSpec`."""
    return _in_slices(
        s, lambda part, start, width: jnp.where(rule(place.element(start, width, arrays)), part, -jnp.inf)
    )


def _in_slices(s, function):
    starts = range(0, s.shape[1], SLICE)
    parts = [function(s[:, i : i + SLICE], i, min(SLICE, s.shape[1] - i)) for i in starts]
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=1)


def _tanh(x):
    """tanh to a few units in the last place; the instruction `tanh.approx` errs by 2^-11, which a cap multiplies."""
    return 1 - 2 / (1 + jnp.exp2(x * 2.8853900817779268))

"""What happens to a score tile between the product and the softmax, in the order of the contract:

    scale → + bias → modifier → soft cap → mask

A plain problem does none of it: its scale is part of the exponential and its bounds are applied by `mask_columns`.
Other tiles are walked in slices of columns, so that few values are live beside the tile itself.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp

from jattn.pallas._compat import plgpu
from jattn.pallas.hopper import ptx
from jattn.pallas.lowering import Element, on_elements

SLICE = 16  # columns at a time


@dataclasses.dataclass(frozen=True)
class Place:
    """Where the score tile of one warpgroup is, as traced scalars."""

    batch: Any
    head: Any
    row: Any  # first query row
    offset: Any  # from rows to positions
    column: Any  # first key
    diagonal_origin: int  # entry of distance 0 in arrays by diagonal

    def element(self, start: int, width: int, arrays) -> Element:
        """Columns `[start, start + width)` of the tile."""
        shape = (ptx.TILE_ROWS, width)
        row = self.row + plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=ptx.WGMMA)
        column = self.column + start + plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=ptx.WGMMA)
        return Element(
            batch=self.batch, head=self.head, query_index=row, query_position=row + self.offset, key_index=column,
            load=lambda i: self.load(arrays[i], start, width),
            load_at=lambda i, rows, columns: ptx.ld_global_at(arrays[i], self.batch, self.head, rows, columns),
        )

    def load(self, array, start: int, width: int, *, diagonal: bool = False):
        """Columns `[start, start + width)` of the tile's part of an array in HBM."""
        origin = self.diagonal_origin if diagonal else None
        return ptx.ld_global(array, self.batch, self.head, self.row, self.column + start, width, origin)


def modify(s, place: Place, *, scale, bias, mod, aux, soft_cap, rule, mask_arrays):
    """The scores `s [64, n]` after everything but the bounds, with −inf where masked.

    Args:
        scale: float or scalar array; multiplies first.
        bias: array in HBM that broadcasts to [B, N, T, S], or None.
        mod, aux: the modifier, or None; for each of its arrays (array in HBM, its kind).
        soft_cap: float or None.
        rule, mask_arrays: see `lowering.MaskSpec`; or None.
    """
    parts = []
    for start in range(0, s.shape[1], SLICE):
        width = min(SLICE, s.shape[1] - start)
        part = s[:, start : start + width] * scale
        visible = None
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
        if rule is not None:
            seen = rule(place.element(start, width, mask_arrays))
            visible = seen if visible is None else visible & seen
        parts.append(part if visible is None else jnp.where(visible, part, -jnp.inf))
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=1)


def _tanh(x):
    """tanh to a few units in the last place; the instruction `tanh.approx` errs by 2^-11, which a cap multiplies."""
    return 1 - 2 / (1 + jnp.exp2(x * 2.8853900817779268))

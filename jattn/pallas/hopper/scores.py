"""What happens to a score tile between the product and the softmax, in the order of the contract:

    scale → + bias → modifier → soft cap → mask

A plain problem does none of it: its scale is part of the exponential and its bounds are applied by `mask_columns`.
The mask's rule is applied only to blocks that it may cut. Tiles are walked in slices of columns, so that few values are
live beside the tile itself.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp

from jattn._callables import with_slope
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
    origin: Any  # batch index, head, query index and key index that 0 stands for
    transposed: bool = False  # the tile has a key a row and a query a column, as the backward keeps it

    def element(self, start: int, width: int, arrays) -> Element:
        """Columns `[start, start + width)` of the tile."""
        axis = 1 if self.transposed else 0  # of queries
        query, key = (start, 0) if self.transposed else (0, start)

        def numbers(first, axis):
            return ptx.numbers(first, axis, width)

        return Element(
            batch=self.batch + self.origin[0], head=self.head + self.origin[1],
            query_index=numbers(self.row + self.origin[2] + query, axis),
            query_position=numbers(self.row + self.offset + self.origin[3] + query, axis),
            key_index=numbers(self.column + self.origin[3] + key, 1 - axis),
            load=lambda i: self.load(arrays[i], start, width),
            load_at=lambda i, rows, columns: memory.ld_global_at(arrays[i], self.batch, self.head, rows, columns),
        )

    def load(self, array, start: int, width: int, *, diagonal: bool = False):
        """Columns `[start, start + width)` of the tile's part of an array in HBM."""
        row, column = (self.row, self.column) if diagonal else (self.array_row, self.array_column)
        row, column = (row + start, column) if self.transposed else (row, column + start)
        origin = self.diagonal_origin if diagonal else None
        return memory.ld_global(
            array, self.batch, self.head, row, column, width, diagonal_origin=origin, transposed=self.transposed
        )


def modify(s, place: Place, **how):
    """The scores `s [64, n]` after everything but the mask, with −inf where bias or modifier hide.

    Args:
        how: see `modify_slice`.
    """
    return in_slices(s, lambda *part: modify_slice(place, *part, **how)[:1])[0]


def modify_slice(place, part, start, width, *, scale, bias, mod, aux, soft_cap, slope=False) -> tuple:
    """Columns `[start, start + width)` of scores after everything but the mask; and None, or with `slope` the
    derivative by the scaled score with its bias where that is not 1.

    Args:
        scale: float or scalar array; multiplies first.
        bias: array in HBM that broadcasts to [B, N, T, S], or None.
        mod, aux: the modifier, or None; for each of its arrays (array in HBM, its kind).
        soft_cap: float or None.
    """
    part, visible, by = part * scale, None, None
    if bias is not None:
        part = part + place.load(bias, start, width)
        visible = part != -jnp.inf
    if mod is not None:
        part = part if visible is None else jnp.where(visible, part, 0.0)
        values = [place.load(a, start, width, diagonal=kind == "diagonal") for a, kind in aux]
        e = place.element(start, width, ())
        arguments = part, e.batch, e.head, e.query_position, e.key_index, *values
        if slope:
            changed, by = on_elements(with_slope(mod.function.function), *arguments, numbers=True)
            part = jnp.broadcast_to(changed, part.shape)
            by = None if isinstance(by, float) and by == 1 else jnp.broadcast_to(by, part.shape)
        else:
            (part,) = on_elements(mod.function.function, *arguments)
        visible = part != -jnp.inf if visible is None else visible & (part != -jnp.inf)
    if soft_cap is not None:
        part = soft_cap * _tanh(part * (1 / soft_cap))
        if slope:
            flat = 1 - (part * (1 / soft_cap)) * (part * (1 / soft_cap))
            by = flat if by is None else by * flat
    if visible is not None:
        part = jnp.where(visible, part, -jnp.inf)
    return part, by


def hide(s, place: Place, rule, arrays):
    """The scores `s [64, n]`, −inf where a mask's rule does not hold; see `lowering.MaskSpec`."""
    return in_slices(s, lambda *part: (hide_slice(place, *part, rule, arrays),))[0]


def hide_slice(place, part, start, width, rule, arrays):
    """Columns `[start, start + width)` of `hide`."""
    return jnp.where(rule(place.element(start, width, arrays)), part, -jnp.inf)


def in_slices(s, function) -> tuple:
    """The results of `function(columns, start, width)`, each of slices of columns, as whole tiles."""
    starts = range(0, s.shape[1], SLICE)
    parts = zip(*(function(s[:, i : i + SLICE], i, min(SLICE, s.shape[1] - i)) for i in starts), strict=True)
    return tuple(part[0] if len(part) == 1 else jnp.concatenate(part, axis=1) for part in parts)


def _tanh(x):
    """tanh to a few units in the last place; the instruction `tanh.approx` errs by 2^-11, which a cap multiplies."""
    return 1 - 2 / (1 + jnp.exp2(x * 2.8853900817779268))

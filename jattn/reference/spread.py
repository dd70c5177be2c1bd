"""Attention over the keys that one device has of sequences spread over many, in plain JAX.

    the walk of `reference.paged` over a device's own slots, which lie end to end;
    masks and modifiers are told the position in the sequence of every slot

Slots are in the order of their positions, so that the keys that a strip may see, an interval of positions, are one of
slots: everything but the names of columns is as on one device.
"""

import dataclasses
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp

from jattn._problem import CacheArrays, Options
from jattn._tile import Tile
from jattn.reference import paged
from jattn.reference.paged import choose as choose
from jattn.reference.paged import why_not as why_not
from jattn.reference.paged import why_not_here as why_not_here

PLATFORM = None


@dataclasses.dataclass(frozen=True)
class Place:
    """Where the tokens of a sequence are: runs of `run` tokens go to the `size` devices in turn.

    With `folded`, every second round goes backwards, from the last device to the first.
    """

    run: int
    size: int
    folded: bool = False

    def position(self, slot, device):
        """The token in a slot of a device."""
        turn = slot // self.run
        return (turn * self.size + self._seat(turn, device)) * self.run + slot % self.run

    def count(self, length, device):
        """How many of the first `length` tokens a device has."""
        whole = self.run * self.size
        turn, rest = length // whole, length % whole
        return turn * self.run + jnp.clip(rest - self._seat(turn, device) * self.run, 0, self.run)

    def _seat(self, turn, device):
        return jnp.where(turn % 2 == 1, self.size - 1 - device, device) if self.folded else device


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SpreadArrays(CacheArrays):
    """Keys, values and block tables are the device's own; lengths, offsets and masks speak of the whole sequence."""

    device: Any = None  # int32 [], this device's index


@dataclasses.dataclass(frozen=True)
class SpreadOptions(Options):
    """What is compiled in."""

    place: Place | None = None
    capacity: int = 0  # of a sequence, on all devices together


def forward(arrays, options):
    """`(out, lse)` over the device's own keys, in the accumulator's dtype, shaped as the query."""
    return paged.run(Walk(arrays, options))


@dataclasses.dataclass(frozen=True)
class SpreadTile(Tile):
    """A tile for masks and modifiers; `own` is the same one counted in the device's slots."""

    own: Any = None
    place: Any = None
    device: Any = None

    @cached_property
    def key_index(self):
        return self.place.position(self.own.key_index, self.device)


class Walk(paged.Walk):
    """The strips of a call, and splits of a device's own slots."""

    def __init__(self, arrays, options):
        super().__init__(arrays, options)
        self.keys = jnp.clip(arrays.lengths, 0, options.capacity)

    def strip(self, start):
        strip = super().strip(start)
        place, device = self.options.place, self.arrays.device
        low, high = (place.count(x, device) for x in (strip.low, strip.high))
        first = low // self.block_k
        count = jnp.maximum(-(-high // self.block_k) - first, 0)
        return dataclasses.replace(strip, low=low, high=high, first=first, count=count)

    def tile(self, strip, block):
        own, key_ok = super().tile(strip, block)
        fields = {f.name: getattr(own, f.name) for f in dataclasses.fields(own)}
        return SpreadTile(**fields, own=own, place=self.options.place, device=self.arrays.device), key_ok

    def keys_of(self, x, tile, key_ok):
        return super().keys_of(x, tile.own, key_ok)

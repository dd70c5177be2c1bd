"""What the kernels of linear attention know of a call, and where its parts lie."""

import dataclasses
from typing import Any

import jax
from jax import lax

from jattn._linear import CHUNK
from jattn.pallas._compat import pl, plgpu
from jattn.pallas.hopper import ptx
from jattn.pallas.hopper.lists import i32

LEAST_BETA = 1e-18  # with less, the gradient of β is not taken from what β has written
COLUMNS = ptx.TILE_ROWS  # of D, of a warpgroup of the scan
VECTORS = ("beta", "key", "query", "update", "last")  # numbers of a token, see `linear_prepare`


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is compiled in."""

    B: int
    T: int
    N: int
    K: int
    H: int
    D: int
    options: Any  # the call's `Options`
    warpgroups: int  # of a thread block of the scan, that compute
    stages: int = 0  # chunks of it that are copied ahead, by `linear_walk.with_stages`
    save: bool = False  # the state that enters each chunk, for a backward
    piece: int | None = None  # chunks that a thread block of the scan walks over; None: the whole sequence
    maps: bool = False  # the scan computes maps of pieces, see `linear_walk`
    checkpoints: int = 0  # states of each sequence that are written on the way
    sequences: int | None = None  # packed ones, which begin chunks of their own, see `linear_sequences`; then B is 1
    dtype: str = "bfloat16"

    def __post_init__(self):
        if self.sequences is not None and (self.B != 1 or self.piece is not None):
            raise ValueError(f"packed sequences have one row and no pieces, not B={self.B} and piece={self.piece}")

    @property
    def chunks(self) -> int:
        return -(-self.T // CHUNK)

    @property
    def states(self) -> int:
        """Sequences, each of which has an initial state and a final one."""
        return self.B if self.sequences is None else self.sequences

    @property
    def pieces(self) -> int:
        """Those of a sequence."""
        return 1 if self.piece is None else max(1, -(-self.chunks // self.piece))

    @property
    def walked(self) -> int:
        """Pieces of a sequence that the scan walks over: nobody asks for the map of the last one."""
        return self.pieces - self.maps

    @property
    def columns(self) -> int:
        """Those of a head's state, and with maps of the unit matrix."""
        return self.D + self.H * self.maps

    @property
    def parts(self) -> int:
        """Thread blocks of a head and piece."""
        return self.columns // (COLUMNS * self.warpgroups)

    @property
    def blocks(self) -> int:
        """Thread blocks of the scan."""
        return self.states * self.walked * self.N * self.parts


def warpgroups_of(heads: int, columns: int, multiprocessors: int) -> int:
    """A thread block serves up to two warpgroups with the same keys, once there are enough of them."""
    parts = columns // COLUMNS
    return 2 if parts % 2 == 0 and heads * parts > multiprocessors else 1


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Inputs:
    """In HBM; None where the call has none."""

    query: Any  # [B, T, K, H]
    key: Any  # [B, T, K, H]
    value: Any  # [B, T, N, D]
    g: Any = None  # [B, T, N]
    beta: Any = None  # [B, T, N]
    scale: Any = None  # float32 [1]
    A_log: Any = None  # float32 [N]
    dt_bias: Any = None  # float32 [N]
    initial_state: Any = None  # [B, N, H, D] or [B, N, D, H]; B is the number of sequences if they are packed
    walks: Any = None  # int32 [3 · sequences]: a packed sequence, its first chunk and how many; the longest first
    slots: Any = None  # int32 [B · n]: which of its sequence's checkpoints the state after a chunk is; -1 none


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Prepared:
    """What a chunk needs that no other chunk knows of."""

    inverse: Any  # M, [B, n, N, 64, 64]
    scores: Any  # A, [B, n, N, 64, 64]
    vectors: Any  # float32 [B, n, N, 5, 64]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Gradients:
    """Of one call, from its backward's kernels. A group's value heads have gradients of its query and key each."""

    query: Any  # [B, T, N, H]: bfloat16 where N is K, else float32
    key: Any  # [B, T, N, H], likewise
    value: Any  # [B, T, N, D]
    g: Any  # of the natural log of the decay: float32 [B, T, N, H] or [B, T, N]; None without decay
    beta: Any  # after its activation: float32 [B, T, N]; None without the delta rule
    initial_state: Any  # float32, in the call's layout


def prepared_shapes(plan: Plan) -> Prepared:
    each = (plan.B, plan.chunks, plan.N)
    square = jax.ShapeDtypeStruct((*each, CHUNK, CHUNK), plan.dtype)
    return Prepared(square, square, jax.ShapeDtypeStruct((*each, len(VECTORS), CHUNK), "float32"))


def saved_states(plan: Plan) -> tuple:
    """Shapes of the scan's outputs that only a backward reads: the state entering each chunk, [B, n, N, H, D]."""
    shape = (plan.B, plan.chunks, plan.N, plan.H, plan.D)
    return (jax.ShapeDtypeStruct(shape, plan.dtype),) if plan.save else ()


def copy_rows(plan, array, batch, chunk, head, smem, barrier, first=0):
    """A chunk's rows of `array [B, T, heads, columns]` to `smem [slabs, 64, 64]`, from column `first` on (TMA, which
    reads zeros past the last token)."""
    rows = array.at[batch, pl.ds(chunk * CHUNK, CHUNK), head]
    for i in range(smem.shape[0]):
        plgpu.copy_gmem_to_smem(rows.at[:, pl.ds(first + i * ptx.SLAB, ptx.SLAB)], smem.at[i], barrier)


def items(plan: Plan) -> int:
    """Chunks of all heads."""
    return plan.B * plan.chunks * plan.N


def place_of(plan: Plan, item) -> tuple:
    """(batch, chunk, head) of an item."""
    head, rest = lax.rem(item, i32(plan.N)), lax.div(item, i32(plan.N))
    return lax.div(rest, i32(plan.chunks)), lax.rem(rest, i32(plan.chunks)), head


def key_head(plan, head):
    return lax.div(head, i32(plan.N // plan.K))

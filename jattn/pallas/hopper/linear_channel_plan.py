"""What the two kernels of linear attention with a decay for each channel know of a call: `linear_channel_prepare` and
`linear_channel_scan`. `Plan` and `Inputs` are those of one decay a head; g and dt_bias have an axis H more."""

import dataclasses
from typing import Any

import jax

from jattn._linear import CHUNK
from jattn.pallas.hopper import ptx

# With less, the gradient of β is taken from what this much would write: little beside what is rounded to bfloat16, and
# enough to be seen beside tokens of the same block with a larger β (1e-18 was flushed to 0 there).
LEAST_BETA = 2.0**-20


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Prepared:
    """What a chunk needs that no other chunk knows of; None without the delta rule. Matrices [64, H] are in slabs."""

    query: Any  # [B, n, N, slabs, 64, 64]
    update: Any  # [B, n, N, slabs, 64, 64]
    scores: Any  # A, [B, n, N, 64, 64]
    vector: Any  # float32 [B, n, N, H + 64]: decay of the chunk, β; [B, n, N, H] without the delta rule
    erase: Any = None  # [B, n, N, slabs, 64, 64]
    inverse: Any = None  # T, [B, n, N, 64, 64]

    @property
    def all(self) -> list:
        every = self.query, self.update, self.scores, self.vector, self.erase, self.inverse
        return [x for x in every if x is not None]


def prepared_shapes(plan) -> Prepared:
    each = (plan.B, plan.chunks, plan.N)
    square = jax.ShapeDtypeStruct((*each, CHUNK, CHUNK), plan.dtype)
    wide = jax.ShapeDtypeStruct((*each, ptx.slabs(plan.H), CHUNK, ptx.SLAB), plan.dtype)
    delta = plan.options.rule.delta
    vector = jax.ShapeDtypeStruct((*each, plan.H + CHUNK * delta), "float32")
    return Prepared(wide, wide, square, vector, *((wide, square) if delta else ()))

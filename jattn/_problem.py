"""One call, described: the arrays a kernel gets, the static options, and the hashable problem for dispatch."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Differentiable:
    """The arrays that have gradients."""

    query: Any  # [B, T, N, H]; packed sequences have B = 1
    key: Any  # [B, S, K, H]
    value: Any  # [B, S, K, D]
    scale: Any = None  # [] or None when options.scale holds it
    bias: Any = None  # [B or 1, N or 1, T or 1, S or 1] or None
    aux: tuple = ()  # the modifier's arrays: like bias, or [B or 1, N or 1, T + S - 1] by diagonal
    sinks: Any = None  # [N] or None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Context:
    """The arrays that have none, and the structure of mask and modifier. M is the number of packed sequences."""

    mask: Any = None  # a bound mask or None
    dropout_key: Any = None  # uint32 [2] or None
    query_offset: Any = None  # int32 [B or M] or None when options.query_offset holds it
    query_lengths: Any = None  # int32 [B or M] or None
    cu_queries: Any = None  # int32 [M + 1] or None when not packed
    cu_keys: Any = None  # int32 [M + 1]
    origin: Any = None  # int32 [4]: batch index, head, query index, key index of the first element; None is all 0


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class CacheArrays:
    """All arrays of a call over a cache of P pages; B sequences whose block tables have W entries."""

    query: Any  # [B, T, N, H], or packed [T, N, H]
    key: Any  # [P, page, K, H], in the query's dtype, int8 or fp8
    value: Any  # [P, page, K, D]
    block_tables: Any  # int32 [B, W]; a contiguous cache has one page a sequence, and W = 1
    lengths: Any  # int32 [B]: keys that exist, those of the queries included
    cu_queries: Any = None  # int32 [B + 1] when packed
    query_lengths: Any = None  # int32 [B] or None
    key_scale: Any = None  # float32 [], [K], [P, page, K] or None
    value_scale: Any = None
    mask: Any = None  # a bound mask, without rows and columns of its own
    scale: Any = None  # [] or None when options.scale holds it
    aux: tuple = ()  # of the modifier, [B or 1, N or 1, 1, 1]
    sinks: Any = None  # [N] or None


@dataclasses.dataclass(frozen=True)
class Options:
    """What is compiled in."""

    scale: float | None
    query_offset: int
    soft_cap: float | None
    mod: Any  # a bound ScoreMod without its arrays, or None
    dropout_threshold: int  # out of 65536; 0 is no dropout
    deterministic: bool
    implementation: str | None = None  # filled in by dispatch, with its tile config
    config: Any = None
    stride: int = 1  # of the indices of neighbouring rows, and of neighbouring keys: a piece of a longer sequence
    partial: bool = False  # out and gradients stay in the accumulator's dtype, because others are added to them
    ordered: bool = False  # of a partial call: its mask asks for the order of its own tokens, not for `Context.origin`
    backward: "Options | None" = None  # the same call on the implementation that lends this one its backward
    sums: "Options | None" = None  # the same call on the implementation whose gradients of scale, bias and aux it has
    elsewhere: "Options | None" = None  # the same call on platforms that this implementation does not lower for


@dataclasses.dataclass(frozen=True)
class Problem:
    """What an implementation decides by. Letters as everywhere: B, T, S, N, K, H, D."""

    op: str
    B: int
    T: int
    S: int
    N: int
    K: int
    H: int
    D: int
    dtype: str
    mask: str | None = None
    bias: tuple[int, ...] | None = None
    score_mod: str | None = None
    soft_cap: float | None = None
    sinks: bool = False
    dropout: bool = False
    deterministic: bool = False
    sequences: int | None = None
    traced_scale: bool = False
    stride: int = 1
    partial: bool = False  # a piece of a longer sequence, with an origin
    mask_kinds: tuple[str, ...] = ()  # classes of the masks it is made of
    operations: tuple[str, ...] = ()  # of predicates and modifier, see `Callable.operations`
    slope_operations: tuple[str, ...] = ()  # of the modifier with its derivative by the score
    page: int | None = None  # size of a page; S is then the capacity of a block table
    stored: tuple[str, str] | None = None  # dtypes of keys and values in a cache
    scales: tuple[str | None, str | None] = (None, None)  # what one of their scales belongs to, see `Quantized.per`


def accumulator(dtype) -> jnp.dtype:
    """The dtype of scores, accumulators and lse: float32, or float64 for float64 inputs."""
    return jnp.dtype(jnp.float64 if dtype == jnp.float64 else jnp.float32)

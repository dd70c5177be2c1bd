"""One call of a linear-attention op, described: its arrays, what is compiled in, and the problem for dispatch.

A head has a state S [H, D]:
    S = Diag(exp g_t) S;   S = S + k_t (b_t v_t - b_t kᵀ_t S)ᵀ;   o_t = scale · q_tᵀ S
"""

import dataclasses
from typing import Any

import jax

from jattn import _problem

CHUNK = 64  # tokens that are computed together; checkpoints sit at multiples of it
LARGEST_H = 256
LARGEST_STEP = 32  # tokens of one `*_step`
NORM_EPS = 1e-6  # inside the root


@dataclasses.dataclass(frozen=True)
class Rule:
    """What one op does to its state."""

    op: str
    decay: str | None  # "channel" (g is [.., N, H]), "head" ([.., N]) or None
    delta: bool  # erases what the key retrieves before it writes


RULES = {
    rule.op.removeprefix("linear."): rule
    for rule in (
        Rule("linear.kda", "channel", True),
        Rule("linear.gated_delta_rule", "head", True),
        Rule("linear.delta_rule", None, True),
        Rule("linear.gla", "channel", False),
        Rule("linear.simple_gla", "head", False),
        Rule("linear.linear_attention", None, False),
    )
}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Arrays:
    """The arrays that have gradients. Packed sequences have B = 1, and M is their number; otherwise M = B."""

    query: Any  # [B, T, K, H]
    key: Any  # [B, T, K, H]
    value: Any  # [B, T, N, D]; value head n reads query and key head n // (N / K)
    g: Any = None  # natural log of the decay, or what the gate makes one of: [B, T, N, H], [B, T, N] or None
    beta: Any = None  # [B, T, N], or what its activation makes one of; None without the delta rule
    initial_state: Any = None  # [M, N, H, D] ("vk": [M, N, D, H]) or None: zeros
    scale: Any = None  # [] or None when options.scale holds it
    A_log: Any = None  # [N] or None
    dt_bias: Any = None  # [N, H], [N] or None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Context:
    """The arrays that have none."""

    cu_seqlens: Any = None  # int32 [M + 1] or None when not packed
    resets: Any = None  # bool [B, T]: this token starts from an empty state; None when none does
    checkpoints: Any = None  # int32 [M, n]: tokens after which states are wanted, or None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Residuals:
    """What a forward keeps for a backward, alike for all implementations: one's forward may meet another's backward.

    There are n = ceil(T / 64) chunks; packed n = ceil(T / 64) + M - 1, those of each sequence in order, others unused
    (for T = 0 or M = 0 none). bfloat16 for 16-bit inputs, else the accumulator's dtype, as states of
    mode="recurrent" always are.
    """

    states: Any  # [B, n, N, H, D]: that which enters each chunk
    scores: Any = None  # [B, n, N, 64, 64]: A of mode="chunk" for decays by channel, see reference/linear_chunk.py
    inverse: Any = None  # [B, n, N, 64, 64]: T of mode="chunk" with the delta rule


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StepArrays:
    """All arrays of a `*_step`: those of a call, and the states it goes on from."""

    arrays: Arrays  # without an initial state
    state: Any  # [P, N, H, D] ("vk": [P, N, D, H])
    indices: Any = None  # int32 [B], the sequence's place in `state`; None is row by row
    lengths: Any = None  # int32 [B]: tokens that count; None is all


@dataclasses.dataclass(frozen=True)
class Options:
    """What is compiled in."""

    rule: Rule
    scale: float | None
    qk_l2norm: bool
    gate: str | None  # None: g is the log of the decay; "clipped": it is at least lower_bound; "softplus", "bounded"
    lower_bound: float
    beta_activation: str | None  # None, "sigmoid" or "sigmoid2"
    state_layout: str  # "kv" or "vk"
    state_dtype: str
    mode: str  # "chunk" or "recurrent"
    residuals: str  # "save" or "recompute"
    out_dtype: str
    implementation: str | None = None  # filled in by dispatch, with its config
    config: Any = None
    backward: "Options | None" = None  # the same call on the implementation that lends this one its backward
    elsewhere: "Options | None" = None  # the same call on platforms that this implementation does not lower for
    sums: "Options | None" = None  # none: every backward here has all gradients


@dataclasses.dataclass(frozen=True)
class Problem(_problem.Problem):
    """What an implementation decides by: N value heads, K query and key heads, S = T."""

    gate: str | None = None
    beta_activation: str | None = None
    qk_l2norm: bool = False
    state_layout: str = "kv"
    state_dtype: str = "float32"
    initial_state: str | None = None  # its dtype
    checkpoints: int | None = None  # how many of each sequence
    segments: bool = False  # some of its tokens may start from an empty state
    mode: str = "chunk"
    residuals: str = "save"

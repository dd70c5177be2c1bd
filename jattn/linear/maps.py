"""What a stretch of tokens does to the state, as an affine map: for sequences that are spread over devices.

    S_out = M S_in + S_own

Each device makes the map of its tokens, all gather the maps (H · (H + D) numbers a head, however many tokens), and each
starts from the state that the devices before it would have left:

    inside shard_map:   state = entering_state(affine_map("kda", key, value, g, beta), "sequence")
                        out = kda(query, key, value, g, beta, initial_state=state)

which is differentiable as it stands.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jattn import _check
from jattn._collectives import gather_copies
from jattn._linear import RULES
from jattn._problem import accumulator
from jattn.linear._call import describe
from jattn.linear._run import run

__all__ = ["AffineMap", "affine_map", "entering_state"]

_OPTIONS = (
    "qk_l2norm", "gate", "A_log", "dt_bias", "lower_bound", "beta_activation", "segment_ids", "cu_seqlens", "mode",
    "residuals",
)  # fmt: skip


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AffineMap:
    """`S ↦ matrix · S + offset` on states `[*B, N, H, D]`, a pytree.

    matrix: `[*B, N, H, H]`, or `[*B, N, H]` when it is diagonal. offset: `[*B, N, H, D]`.

    Example:
        >>> import jax.numpy as jnp, jattn
        >>> half = jattn.linear.AffineMap(jnp.full((1, 4), 0.5), jnp.ones((1, 4, 2)))
        >>> float(half.after(half)(jnp.ones((1, 4, 2)))[0, 0, 0])
        1.75
    """

    matrix: Any
    offset: Any

    def __call__(self, state):
        """The state after the tokens, from the one before."""
        return self._times(state) + self.offset

    def after(self, first: "AffineMap") -> "AffineMap":
        """The map of `first`'s tokens and then these."""
        matrix = self.matrix * first.matrix if self._diagonal else self._times(first.matrix)
        return AffineMap(matrix, self(first.offset))

    @property
    def _diagonal(self):
        return self.matrix.ndim < self.offset.ndim

    def _times(self, x):
        if self._diagonal:
            return self.matrix[..., None] * x
        return jnp.einsum("...ij,...jd->...id", self.matrix, x, precision=lax.Precision.HIGHEST)


def affine_map(op: str, key, value, g=None, beta=None, *, implementation: str | None = None, **options) -> AffineMap:
    """The map of all tokens of a call, in float32 (float64 for float64 inputs).

    Args:
        op: "kda", "gated_delta_rule", "delta_rule", "gla", "simple_gla" or "linear_attention".
        key: `[*B, T, K, H]`, value: `[*B, T, N, D]`, and g and beta where the op has them.
        implementation: as in the op.
        options: those of the op that change states: qk_l2norm, gate, A_log, dt_bias, lower_bound, beta_activation,
            segment_ids, cu_seqlens, mode, residuals.

    Returns:
        An `AffineMap`: a state and H more columns go through the op, since M is what becomes of the unit matrix.

    Raises:
        ValueError, TypeError, NotImplementedError: as the op.

    Example:
        >>> import jax, jattn
        >>> k, v, g = jax.random.normal(jax.random.key(0), (3, 2, 100, 4, 32))
        >>> beta = jax.numpy.ones((2, 100, 4))
        >>> jattn.linear.affine_map("kda", k, v, -abs(g), beta, qk_l2norm=True).matrix.shape
        (2, 4, 32, 32)

    Source: the chunk recurrence itself; FLA passes states between devices alike.
    """
    if op not in RULES:
        raise ValueError(f"op={op!r} must be one of {', '.join(map(repr, RULES))}")
    rule, key, value = RULES[op], _check.array(key, "key"), _check.array(value, "value")
    if unknown := [name for name in options if name not in _OPTIONS]:
        given = f"{unknown[0]}={options[unknown[0]]!r}"
        raise TypeError(f"{given} changes no state; affine_map takes {', '.join(_OPTIONS)}")
    for name, x, known in (("g", g, rule.decay), ("beta", beta, rule.delta)):
        if x is not None and not known:
            raise ValueError(f"{name} was given, which {op} does not have")
    if not rule.delta and all(options.get(name) is None for name in ("cu_seqlens", "segment_ids", "gate")):
        return _by_decay(rule, key, value, g, implementation, options)
    H, D = key.shape[-1:] + value.shape[-1:]
    wide = jnp.concatenate([value, jnp.zeros((*value.shape[:-1], H), value.dtype)], axis=-1)
    call = describe(rule, key, key, wide, g, beta, scale=1.0, **options)
    dtype = accumulator(key.dtype)
    unit = jnp.concatenate([jnp.zeros((H, D), dtype), jnp.eye(H, dtype=dtype)], axis=-1)
    M, N = call.problem.sequences if call.problem.sequences is not None else call.problem.B, value.shape[-2]
    arrays = dataclasses.replace(call.arrays, initial_state=jnp.broadcast_to(unit, (M, N, *unit.shape)))
    _, state, _ = run(dataclasses.replace(call, arrays=arrays), implementation=implementation, config=None)
    state = state.reshape(*call.sequences, *state.shape[1:])
    return AffineMap(state[..., D:], state[..., :D])


def _by_decay(rule, key, value, g, implementation, options):
    """Without the delta rule M is diagonal: what all tokens together decay by."""
    call = describe(rule, key, key, value, g, scale=1.0, **options)
    _, state, _ = run(call, implementation=implementation, config=None)
    offset = state.reshape(*call.sequences, *state.shape[1:])
    if rule.decay is None:
        return AffineMap(jnp.ones(offset.shape[:-1], offset.dtype), offset)
    total = jnp.sum(call.arrays.g.astype(offset.dtype), axis=1)
    total = total if rule.decay == "channel" else total[..., None]
    return AffineMap(jnp.broadcast_to(jnp.exp(total).reshape(*call.batch, *total.shape[1:]), offset.shape[:-1]), offset)


def entering_state(own: AffineMap, axis: str, state=None):
    """Inside `shard_map`: the state that enters this device's tokens, where `axis` divides the sequence in order.

    Args:
        own: the map of this device's tokens.
        axis: name of the mesh axis.
        state: `[*B, N, H, D]`, what enters the first device, the same on all; None is zeros.

    Returns:
        `[*B, N, H, D]`, varying over `axis`.

    Raises:
        NameError: there is no such axis here (from JAX).

    Example:
        See the head of this module, and docs/linear.md.

    Source: as `affine_map`.
    """
    found = jnp.zeros_like(own.offset) if state is None else state.astype(own.offset.dtype)
    found = found + jnp.zeros_like(own.offset)  # varies as the maps do
    matrix = own.matrix[..., None] if own._diagonal else own.matrix
    every = gather_copies(jnp.concatenate([matrix, own.offset], axis=-1), axis)
    me, width = lax.axis_index(axis), matrix.shape[-1]

    def step(found, xs):
        i, one = xs
        matrix = one[..., 0] if own._diagonal else one[..., :width]
        return jnp.where(i < me, AffineMap(matrix, one[..., width:])(found), found), None

    count = jnp.arange(every.shape[0], dtype=jnp.int32)
    return lax.scan(step, found, (count, every))[0]

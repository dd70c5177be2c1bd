"""`short_conv`: the causal convolution over a few tokens in front of a recurrence."""

import math

import jax.numpy as jnp

from jattn import _check
from jattn._linear import LARGEST_STEP
from jattn.linear import _call
from jattn.reference import linear_conv

__all__ = ["short_conv", "short_conv_step"]


def short_conv(
    x,
    weight,
    bias=None,
    *,
    activation: str | None = None,
    initial_state=None,
    return_final_state: bool = False,
    cu_seqlens=None,
    segment_ids=None,
):
    """`y_t = activation(Σ_d weight[:, W − 1 − d] · x_{t − d} + bias)`, each channel by itself.

    Args:
        x: floating-point `[*B, T, C]`; packed `[T, C]`.
        weight: `[C, W]`, any floating dtype; the last column belongs to the token itself.
        bias: `[C]` or None.
        activation: None or "silu".
        initial_state: `[*B, W - 1, C]` (packed: `[M, W - 1, C]`) in the dtype of x: the inputs before the first token,
            oldest first; None is zeros.
        return_final_state: also return the last W - 1 inputs, those of the initial state included; of the last segment,
            zeros before it.
        cu_seqlens: int `[M + 1]`, offsets of packed sequences. Tokens outside all of them give 0.
        segment_ids: int `[*B, T]` or `[T]`: wherever it changes, the inputs before count as 0.

    Returns:
        `[*B, T, C]` in the dtype of x, computed in float32 (float64 for float64), or a tuple of it and the final state.

    Raises:
        ValueError, TypeError: an argument is wrong (the message names it and its value).

    Example:
        >>> import jax.numpy as jnp, jattn
        >>> jattn.linear.short_conv(jnp.arange(5.0)[:, None], jnp.ones((1, 4)))[:, 0].tolist()
        [0.0, 1.0, 3.0, 6.0, 10.0]

    Source: Fu et al., "Hungry Hungry Hippos" (2022), and every recurrent layer since.
    """
    _check.flag(return_final_state, "return_final_state")
    is_packed = cu_seqlens is not None
    x, weight, bias, activation = _operands(
        x, weight, bias, activation, "[T, C], packed" if is_packed else "[*B, T, C]"
    )
    *batch, T, C = x.shape
    batch, W = tuple(batch), weight.shape[1]
    if is_packed:
        if segment_ids is not None:
            raise ValueError("segment_ids and cu_seqlens are two ways to say where sequences end; give one")
        cu = _check.cu_seqlens(cu_seqlens, "cu_seqlens", T)
        state = _state(initial_state, (cu.shape[0] - 1, W - 1, C), x.dtype, "initial_state")
        taps, final, inside = linear_conv.packed(x, state, cu, W)
        y = jnp.where(inside[:, None], linear_conv.convolved(taps, weight, bias, activation, x.dtype), 0)
        return (y, final) if return_final_state else y
    state = _state(initial_state, (*batch, W - 1, C), x.dtype, "initial_state")
    B = math.prod(batch)
    resets = _call.resets(segment_ids, batch, T)
    taps, final = linear_conv.dense(x.reshape(B, T, C), state.reshape(B, W - 1, C), resets, W)
    y = linear_conv.convolved(taps, weight, bias, activation, x.dtype).reshape(x.shape)
    return (y, final.reshape(state.shape)) if return_final_state else y


def short_conv_step(
    x, weight, state, bias=None, *, activation: str | None = None, state_indices=None, query_seq_lengths=None
):
    """The next tokens of `short_conv`, on a pool of states as in `kda_step`.

    Args:
        x: floating-point `[B, T, C]`, T from 1 to 32.
        weight: `[C, W]`. bias: `[C]` or None. activation: None or "silu".
        state: `[P, W - 1, C]` in the dtype of x: donate it, and it is updated in place.
        state_indices: int `[B]`, no two alike; None is P = B. A sequence whose index is negative or past the pool is
            left out: its output is 0.
        query_seq_lengths: int `[B]`, how many of the T tokens there are: the others give 0 and are not remembered.

    Returns:
        `(y [B, T, C], state)`.

    Raises:
        ValueError, TypeError: an argument is wrong (the message names it and its value).

    Example:
        >>> import jax.numpy as jnp, jattn
        >>> y, state = jattn.linear.short_conv_step(jnp.ones((2, 1, 8)), jnp.ones((8, 4)), jnp.zeros((2, 3, 8)))
        >>> y.shape, state.shape
        ((2, 1, 8), (2, 3, 8))

    Source: as `short_conv`.
    """
    x, weight, bias, activation = _operands(x, weight, bias, activation, "[B, T, C]")
    B, T, C = x.shape
    W = weight.shape[1]
    if not 1 <= T <= LARGEST_STEP:
        raise ValueError(f"length T={T} must be from 1 to {LARGEST_STEP}: longer ones are for jattn.linear.short_conv")
    state = _check.array(state, "state")
    P = state.shape[0] if state.ndim else 0
    state = _state(state, (P, W - 1, C), x.dtype, "state")
    indices = _call.indices(state_indices, B)
    if indices is None and P != B:
        raise ValueError(f"state has P={P} places for B={B} sequences; give state_indices, or one place a sequence")
    lengths = _check.lengths(query_seq_lengths, "query_seq_lengths", (B,), T)
    lengths = jnp.full((B,), T, jnp.int32) if lengths is None else jnp.clip(lengths, 0, T)
    own, at = state, None
    if indices is not None:
        at = jnp.where((indices >= 0) & (indices < P), indices, P)
        lengths = jnp.where(at < P, lengths, 0)
        own = jnp.take(state, at, axis=0, mode="fill", fill_value=0)
    exists = (jnp.arange(T, dtype=jnp.int32) < lengths[:, None])[..., None]
    taps, new = linear_conv.step(jnp.where(exists, x, 0), own, lengths, W)
    y = jnp.where(exists, linear_conv.convolved(taps, weight, bias, activation, x.dtype), 0)
    return y, new if at is None else state.at[at].set(new, mode="drop")


def _operands(x, weight, bias, activation, rank):
    x, weight = _call.floating(x, "x"), _call.floating(weight, "weight")
    want = {"[T, C], packed": 2, "[B, T, C]": 3}.get(rank, max(x.ndim, 2))
    if x.ndim != want:
        raise ValueError(f"x has shape {x.shape}; expected {rank}")
    C = x.shape[-1]
    if weight.ndim != 2 or weight.shape[0] != C or weight.shape[1] < 1:
        raise ValueError(f"weight has shape {weight.shape}; expected (C, W) = ({C}, W)")
    if bias is not None:
        bias = _call.floating(bias, "bias")
        if bias.shape != (C,):
            raise ValueError(f"bias has shape {bias.shape}; expected one a channel, ({C},)")
    return x, weight, bias, _call.choice(activation, "activation", (None, "silu"))


def _state(x, want, dtype, name):
    if x is None:
        return jnp.zeros(want, dtype)
    x = _check.array(x, name)
    if x.shape != want:
        raise ValueError(f"{name} has shape {x.shape}; expected {want}")
    if x.dtype != dtype:
        raise TypeError(f"{name} dtype {x.dtype} must equal x's {dtype}")
    return x

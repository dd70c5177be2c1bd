"""The short causal convolution of each channel, in plain JAX: W shifted products. JAX differentiates it."""

import jax
import jax.numpy as jnp

from jattn._problem import accumulator


def convolved(taps, weight, bias, activation, dtype):
    """Σ_d taps[d] · weight[:, W − 1 − d], where taps[d] is the input d tokens before."""
    wide = accumulator(dtype)
    y = sum(tap.astype(wide) * weight[:, -1 - d].astype(wide) for d, tap in enumerate(taps))
    if bias is not None:
        y = y + bias.astype(wide)
    return (jax.nn.silu(y) if activation == "silu" else y).astype(dtype)


def dense(x, state, resets, W):
    """`(taps, final state)` of x [B, T, C] after the inputs of state [B, W - 1, C]."""
    T = x.shape[1]
    past = jnp.concatenate([state, x], axis=1)
    taps = [past[:, W - 1 - d : W - 1 - d + T] for d in range(W)]
    final = past[:, T:]
    if resets is None:
        return taps, final
    runs = jnp.cumsum(resets.astype(jnp.int32), axis=1, dtype=jnp.int32)
    own = jnp.concatenate([jnp.zeros((x.shape[0], W - 1), jnp.int32), runs], axis=1)[..., None]
    taps = [jnp.where(own[:, W - 1 - d : W - 1 - d + T] == own[:, W - 1 :], tap, 0) for d, tap in enumerate(taps)]
    return taps, jnp.where(own[:, T:] == own[:, -1:], final, 0)


def packed(x, state, cu, W):
    """`(taps, final states [M, W - 1, C], inside [T])` of x [T, C] after the inputs of state [M, W - 1, C]."""
    T, M = x.shape[0], state.shape[0]
    row = jnp.arange(T, dtype=jnp.int32)
    cu = jnp.clip(cu, 0, T)
    sequence = jnp.clip(jnp.searchsorted(cu[1:], row, side="right").astype(jnp.int32), 0, max(M - 1, 0))
    place = row - cu[sequence] if M else row
    inside = (row >= cu[0]) & (row < cu[-1]) & (place >= 0)
    x = jnp.where(inside[:, None], x, 0)
    taps = [x]
    for d in range(1, W):
        earlier = jnp.concatenate([jnp.zeros_like(x[:d]), x[: max(T - d, 0)]])[:T]
        before = state[sequence, jnp.clip(W - 1 + place - d, 0, W - 2)] if M else earlier
        taps.append(jnp.where(inside[:, None], jnp.where((place >= d)[:, None], earlier, before), 0))
    lengths = jnp.maximum(cu[1:] - cu[:-1], 0)
    last = lengths[:, None] + jnp.arange(1 - W, 0, dtype=jnp.int32)  # place of each input of the final state
    old = jnp.take_along_axis(state, jnp.clip(W - 1 + last, 0, max(W - 2, 0))[..., None], axis=1)
    new = jnp.take(x, jnp.clip(cu[:-1, None] + last, 0, max(T - 1, 0)), axis=0, mode="clip") if T else old
    return taps, jnp.where((last >= 0)[..., None], new, old), inside


def step(x, state, lengths, W):
    """`(taps, new state)` of x [B, T, C], of which the first `lengths` [B] tokens exist, the others being 0."""
    taps, _ = dense(x, state, None, W)
    past = jnp.concatenate([state, x], axis=1)
    at = lengths[:, None] + jnp.arange(W - 1, dtype=jnp.int32)
    return taps, jnp.take_along_axis(past, at[..., None], axis=1)

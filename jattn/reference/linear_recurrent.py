"""`mode="recurrent"`: the recurrence as it is written, one token after the other, and one token of a `*_step`.

    S̃ = Diag(exp g) S;   r = kᵀ S̃;   u = β (v − r);   o = qᵀ S̃ + (q · k) u;   S = S̃ + k uᵀ

The output is qᵀ S, written so that both products read the decayed state and nothing reads the new one.
Backward, the states of one chunk at a time are computed again from the one that entered it.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from jattn.reference.linear_operands import Operands, einsum


def token(S, x: Operands):
    """`(S, o [..., D])` after one token: q, k [..., H], v [..., D], g [..., H or 1], beta [..., 1] or None."""
    S = decayed(S, x.g)
    if x.beta is None:
        u, out = x.v, einsum("...h,...hd->...d", x.q, S)
    else:
        retrieved, out = jnp.moveaxis(einsum("...ih,...hd->...id", jnp.stack([x.k, x.q], axis=-2), S), -2, 0)
        u = x.beta * (x.v - retrieved)
    out = out + einsum("...h,...h->...", x.q, x.k)[..., None] * u
    return S + x.k[..., :, None] * u[..., None, :], out


def decayed(S, g):
    """Diag(exp g) S, where a decay near 1 is not rounded to the grid of numbers near 1.

    Rounded, it would be off by up to 3e-8 in the same direction at every token whose gate is the same: 1e-4 after 4096.
    """
    near = g > -0.5
    one, rest = near.astype(g.dtype), jnp.where(near, jnp.expm1(g), jnp.exp(g))
    return one[..., None] * S + rest[..., None] * S


def tokens(S, x: Operands, resets):
    """`(S, out [B, N, C, D])` after C tokens, `[B, N, C, ...]`; resets bool [B, C] or None."""

    def step(S, xs):
        x, reset = xs
        return token(S if reset is None else jnp.where(reset[:, None, None, None], 0, S), x)

    xs = jax.tree.map(lambda a: jnp.moveaxis(a, 2, 0), x)
    S, out = lax.scan(step, S, (xs, None if resets is None else resets.T))
    return S, jnp.moveaxis(out, 0, 2)


def forward(x: Operands, runs, walk, carry, chunks, storage):
    """As `linear_chunk.forward`."""

    def step(carry, xs):
        (x, resets), chunk = xs
        S = walk.enter(carry, chunk)
        S_next, out = tokens(S, x, resets)
        carry, state = walk.leave(carry, chunk, S_next)
        return carry, (S, out, state)

    carry, (entering, out, states) = lax.scan(step, carry, (_by_chunk(x, runs), chunks))
    return carry, jnp.moveaxis(out, 0, 2), entering, states, None


def backward(x: Operands, runs, walk, carry, chunks, entering, saved, dout, dstates):
    """As `linear_chunk.backward`."""

    def step(carry, xs):
        (x, resets), S, dout, chunk, dstate = xs
        D = walk.enter_backward(carry, chunk, dstate)
        _, pull = jax.vjp(functools.partial(tokens, resets=resets), S, x)
        D, dx = pull((D, dout))
        return walk.leave_backward(carry, chunk, D), dx

    xs = (_by_chunk(x, runs), entering.astype(x.q.dtype), jnp.moveaxis(dout, 2, 0), chunks, dstates)
    carry, dx = lax.scan(step, carry, xs, reverse=True)
    return carry, jax.tree.map(lambda a: jnp.moveaxis(a, 0, 2), dx)


def _by_chunk(x, runs):
    """The operands `[s, B, N, C, ...]`, and where a run begins, bool [s, B, C] or None."""
    resets = None
    if runs is not None:  # [B, 1, s, C]
        before = jnp.concatenate([jnp.zeros_like(runs[..., :1]), runs[..., :-1]], axis=-1)
        resets = jnp.moveaxis((runs != before)[:, 0], 1, 0)
    return jax.tree.map(lambda a: jnp.moveaxis(a, 2, 0), x), resets

"""`mode="chunk"`: 64 tokens at once, with the explicit backward.

    G = running sums of g;   E = exp(G);   R = exp(G_C − G);   S is the state that enters
    T = (I + tril(β ∘ P(k, k), −1))⁻¹              u = T z,  z = β (v − (E k) S)       without the delta rule u = v
    o = (E q) S + tril(P(q, k)) u                  S' = exp(G_C) S + (R k)ᵀ u

Only S' depends on the chunk before: everything else is computed for a span of chunks at once. Backward, D is the
gradient of S':

    du = Aᵀ do + (R k) D;   dz = Tᵀ du;   dS = exp(G_C) D + (E q)ᵀ do − (E k)ᵀ (β dz)

and dL = −tril(dz uᵀ, −1), as u solves (I + L) u = z. For a decay that is one number a head, P = (q kᵀ) ∘ Γ with
Γ_ij = exp(G_i − G_j), and T = T₀ ∘ Γ, where T₀ is the inverse without any decay.

Sources: Yang et al., "Gated Delta Networks" (2024) and "Parallelizing Linear Transformers with the Delta Rule" (2024);
Kimi Team, "Kimi Linear" (2025).
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jattn.reference.linear_operands import Operands, einsum
from jattn.reference.linear_scores import (
    after,
    at_and_after,
    before,
    decays,
    decays_backward,
    inverse,
    scores,
    scores_backward,
    upto,
)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Saved:
    """What the backward does not compute again: [B, N, s, C, C] each, in the inputs' precision."""

    scores: Any  # A; None for decays by head, where it costs one product
    inverse: Any  # T; None without the delta rule


@dataclasses.dataclass(frozen=True)
class Decay:
    """The decays of a span of chunks; with runs, of the run that an entering state or a leaving one belongs to."""

    E: Any  # [B, N, s, C, H or 1]
    R: Any  # [B, N, s, C, H or 1]
    last: Any  # exp(G_C), [B, N, s, 1, H or 1]
    gamma: Any  # [B, N, s, C, C], or None for decays by channel

    @classmethod
    def make(cls, x: Operands, runs):
        E, R = jnp.exp(upto(x.g)), jnp.exp(after(x.g))
        if runs is not None:
            E = jnp.where(runs[..., None] == 0, E, 0)
            R = jnp.where((runs == runs[..., -1:])[..., None], R, 0)
        return cls(E, R, E[..., -1:, :], decays(x.g, runs) if x.g.shape[-1] == 1 else None)


def forward(x: Operands, runs, walk, carry, chunks, storage):
    """`(carry, out [B, N, s, C, D], states entering [s, B, N, H, D], states for checkpoints, Saved)` of a span.

    `walk.enter` and `walk.leave` carry the state over the ends of packed sequences; `chunks` are its rows of the table.
    """
    decay = Decay.make(x, runs)
    A, T = _matrices(x, decay, runs)
    beta_T = None if T is None else T * jnp.swapaxes(x.beta, -1, -2)
    qE, kE, kR = x.q * decay.E, x.k * decay.E, x.k * decay.R

    def step(carry, xs):
        (kE, kR, v, last, beta_T), chunk = xs
        S = walk.enter(carry, chunk)
        u = v if beta_T is None else einsum("...ij,...jd->...id", beta_T, v - einsum("...ch,...hd->...cd", kE, S))
        S_next = _column(last) * S + einsum("...ch,...cd->...hd", kR, u)
        carry, state = walk.leave(carry, chunk, S_next)
        return carry, (S, u, state)

    xs = _by_chunk((kE, kR, x.v, decay.last, beta_T))
    carry, (entering, u, states) = lax.scan(step, carry, (xs, chunks))
    out = einsum("bnsch,sbnhd->bnscd", qE, entering)
    out = out + einsum("...ij,...jd->...id", A, jnp.moveaxis(u, 0, 2))
    by_channel = decay.gamma is None
    saved = Saved(A.astype(storage) if by_channel else None, None if T is None else T.astype(storage))
    return carry, out, entering, states, saved


def _matrices(x, decay, runs):
    """A, and T, which is None without the delta rule."""
    if decay.gamma is None:
        if x.beta is None:
            return scores(x.q, x.k, x.g, runs), None
        A, P = scores(jnp.stack([x.q, x.k]), x.k, x.g, runs)
        return A, inverse(jnp.tril(x.beta * P, -1))
    A = einsum("...ih,...jh->...ij", x.q, x.k) * decay.gamma
    return A, None if x.beta is None else inverse(_undecayed(x, runs)) * decay.gamma


def _undecayed(x, runs):
    """L₀ = tril(β ∘ k kᵀ, −1), 0 across runs."""
    L = jnp.tril(x.beta * einsum("...ih,...jh->...ij", x.k, x.k), -1)
    return L if runs is None else jnp.where(runs[..., :, None] == runs[..., None, :], L, 0)


def backward(x: Operands, runs, walk, carry, chunks, entering, saved: Saved, dout, dstates):
    """`(carry, gradient of x)` of a span; the carry holds D, the gradient of the state that leaves it.

    `dstates` [s, B, N, H, D] are gradients of the states after each chunk, or None.
    """
    decay = Decay.make(x, runs)
    entering = entering.astype(x.q.dtype)
    A, T = _restored(x, decay, saved)
    qE, kE, kR = x.q * decay.E, x.k * decay.E, x.k * decay.R
    du_out = einsum("...ij,...id->...jd", A, dout)
    dS_out = einsum("...ch,...cd->...hd", qE, dout)
    beta = None if T is None else x.beta

    def step(carry, xs):
        (kE, kR, last, du, dS, T, beta), chunk, dstate = xs
        D = walk.enter_backward(carry, chunk, dstate)
        du = du + einsum("...ch,...hd->...cd", kR, D)
        dS = dS + _column(last) * D
        if T is not None:
            dS = dS - einsum("...ch,...cd->...hd", kE, beta * einsum("...ij,...id->...jd", T, du))
        return walk.leave_backward(carry, chunk, dS), (D, du)

    xs = _by_chunk((kE, kR, decay.last, du_out, dS_out, T, beta))
    carry, (D, du) = lax.scan(step, carry, (xs, chunks, dstates), reverse=True)
    S, D, du = (jnp.moveaxis(a, 0, 2) for a in (entering, D, du))
    return carry, _gradients(x, runs, decay, A, T, S, D, du, dout)


def _restored(x, decay, saved):
    T = None if saved.inverse is None else saved.inverse.astype(x.q.dtype)
    if decay.gamma is None:
        return saved.scores.astype(x.q.dtype), T
    return einsum("...ih,...jh->...ij", x.q, x.k) * decay.gamma, T


def _gradients(x, runs, decay, A, T, S, D, du, dout):
    """Everything that chunks do not wait for one another with."""
    kE, kR = x.k * decay.E, x.k * decay.R
    u, z, rest = x.v, None, None
    if T is not None:
        rest = x.v - einsum("...ch,...hd->...cd", kE, S)
        z = x.beta * rest
        u = einsum("...ij,...jd->...id", T, z)
    dq = decay.E * einsum("...cd,...hd->...ch", dout, S)
    dkR = einsum("...cd,...hd->...ch", u, D)
    dk = decay.R * dkR
    from_start, to_end = x.q * dq, kR * dkR
    across = decay.last * jnp.swapaxes(jnp.sum(S * D, axis=-1, keepdims=True), -1, -2)
    dv, dbeta, dL = du, None, None
    if T is not None:
        dz = einsum("...ij,...id->...jd", T, du)
        dv = x.beta * dz
        dbeta = jnp.sum(dz * rest, axis=-1, keepdims=True)
        dkE = -einsum("...cd,...hd->...ch", dv, S)
        dk, from_start = dk + decay.E * dkE, from_start + kE * dkE
        dL = -jnp.tril(einsum("...id,...jd->...ij", dz, u), -1)  # u = T z solves (I + L) u = z
    dA = jnp.tril(einsum("...id,...jd->...ij", dout, u))
    within = _within_by_channel if decay.gamma is None else _within_by_head
    dq_in, dk_in, dbeta_in, dg = within(x, runs, decay, A, dA, dL)
    dbeta = None if dbeta is None else dbeta + dbeta_in
    if x.g.shape[-1] == 1:
        from_start, to_end, across = (jnp.sum(a, axis=-1, keepdims=True) for a in (from_start, to_end, across))
    dg = dg + at_and_after(from_start) + before(to_end) + across
    return Operands(dq + dq_in, dk + dk_in, dv, dg, dbeta)


def _within_by_channel(x, runs, decay, A, dA, dL):
    """Gradients through the scores of a chunk: (dq, dk, dbeta, dg)."""
    if dL is None:
        dq, dk, dg = scores_backward(dA, x.q, x.k, x.g, runs)
        return dq, dk, None, dg
    rows = jnp.stack([x.q, x.beta * x.k])
    (dq, r), dk, dg = scores_backward(jnp.stack([dA, dL]), rows, x.k, x.g, runs)
    return dq, dk[0] + dk[1] + x.beta * r, jnp.sum(r * x.k, axis=-1, keepdims=True), dg[0] + dg[1]


def _within_by_head(x, runs, decay, A, dA, dL):
    X = dA * decay.gamma
    dq, dk = einsum("...ij,...jh->...ih", X, x.k), einsum("...ij,...ih->...jh", X, x.q)
    Z, dbeta = dA * A, None
    if dL is not None:
        Y = dL * decay.gamma
        r = einsum("...ij,...jh->...ih", Y, x.k)
        dk = dk + x.beta * r + einsum("...ij,...ih->...jh", Y, x.beta * x.k)
        dbeta = jnp.sum(r * x.k, axis=-1, keepdims=True)
        Z = Z + x.beta * Y * einsum("...ih,...jh->...ij", x.k, x.k)
    return dq, dk, dbeta, decays_backward(Z)


def _by_chunk(tree):
    """[B, N, s, ...] -> [s, B, N, ...]."""
    return jax.tree.map(lambda a: jnp.moveaxis(a, 2, 0), tree)


def _column(last):
    """[..., 1, h] -> [..., h, 1]: beside a state."""
    return jnp.swapaxes(last, -1, -2)

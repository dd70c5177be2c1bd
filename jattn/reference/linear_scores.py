"""Products of decayed rows within a chunk, exact for any decay, and the inverse that the delta rule needs.

    P_ij = Σ_c x_ic k_jc exp(G_ic − G_jc),  j ≤ i           G: sums of the log decay since the chunk began

As a product of matrices, exp(G_i − G_j) must be exp(G_i − a) · exp(a − G_j) with one anchor a for all i and j of it.
Any anchor at the start or in the middle of a chunk overflows once the gates are strong enough. So the triangle is cut
in two again and again:

    P = [[P₁, 0], [Q, P₂]]        Q anchored at the last row of P₁: both exponents are sums of log decays, hence ≤ 0

which takes C log₂ C exponentials a channel and half the products of the square, has no future token in any row, and
lends its shape to the inverse: inv [[A, 0], [X, B]] = [[A⁻¹, 0], [−B⁻¹ X A⁻¹, B⁻¹]].
"""

from typing import Any, NamedTuple

import jax.numpy as jnp

from jattn.reference.linear_operands import einsum

_FORGOTTEN = -(2.0**14)  # exp of it is 0 in every dtype; sums of 64 such numbers on the grid below are exact
_GRID = 16


class Sums(NamedTuple):
    """Running sums of the log decay over a chunk, as hi + lo.

    hi holds the multiples of 1/16, whose sums and differences are exact; lo, the rest, stays below 2. In one float32
    number, one decay of exp(-1000) would cost the later differences in its chunk four digits.
    """

    hi: Any  # [..., C, H or 1]
    lo: Any

    def __sub__(self, other):
        return (self.hi - other.hi) + (self.lo - other.lo)

    def __getitem__(self, index):
        return Sums(self.hi[index], self.lo[index])

    def map(self, fn):
        return Sums(fn(self.hi), fn(self.lo))

    def value(self):
        return self.hi + self.lo


def sums(g, runs) -> Sums:
    """Running sums of g `[..., C, H or 1]`, anew in each run (int `[..., C]`, not decreasing; None is one run)."""
    g = jnp.maximum(g, jnp.asarray(_FORGOTTEN, g.dtype))
    hi = jnp.round(g * _GRID) / _GRID
    seen = _seen(g.shape[-2], runs, g.dtype)
    return Sums(einsum("...ij,...jh->...ih", seen, hi), einsum("...ij,...jh->...ih", seen, g - hi))


def at_and_after(x):
    """Σ_{i ≥ s} x_i for each row s of [..., C, h]: the gradient of g_s from those of sums that start before it."""
    return einsum("is,...ih->...sh", jnp.tril(jnp.ones((x.shape[-2],) * 2, x.dtype)), x)


def before(x):
    """Σ_{j < s} x_j for each row s of [..., C, h]: the gradient of g_s from those of sums that end behind it."""
    return einsum("sj,...jh->...sh", jnp.tril(jnp.ones((x.shape[-2],) * 2, x.dtype), -1), x)


def _seen(C, runs, dtype):
    """[..., C, C]: 1 where column j is not after row i and in its run."""
    seen = jnp.tril(jnp.ones((C, C), bool))
    return (seen if runs is None else seen & (runs[..., :, None] == runs[..., None, :])).astype(dtype)


def decays(G: Sums, runs):
    """[..., C, C]: exp(G_i − G_j) for j ≤ i in one run, else 0, from sums `[..., C, 1]`."""
    columns = G.map(lambda x: jnp.swapaxes(x, -1, -2))
    seen = _seen(G.hi.shape[-2], runs, jnp.bool_)
    return jnp.exp(jnp.where(seen, G - columns, -jnp.inf))


def decays_backward(Z):
    """The gradient of g [..., C, 1] from Z = dΓ ∘ Γ: Σ_{i ≥ s > j} Z_ij."""
    rows = jnp.swapaxes(at_and_after(Z), -1, -2)
    return jnp.sum(jnp.triu(rows, 1), axis=-2)[..., None]


def scores(x, k, G: Sums, runs):
    """P [..., C, C] from x and k [..., C, H]; 0 above the diagonal and across runs."""
    P = jnp.sum(x * k, axis=-1)[..., None, None]
    for b in _sizes(x.shape[-2]):
        below, above = _factors(G, runs, b)
        Q = einsum("...ih,...jh->...ij", _halves(x, b, 1) * below, _halves(k, b, 0) * above)
        P = _join(P, Q)
    return P[..., 0, :, :]


def scores_backward(dP, x, k, G: Sums, runs):
    """Gradients of x, k and g.

    That of g_s is a sum over pairs i ≥ s > j. Made of x · dx − k · dk, as the gradient of G, it would be a difference
    of much larger numbers, because pairs on one side of s cancel. Here each corner has all its pairs across its anchor.
    """
    diagonal, corners = split(dP)
    dx, dk = diagonal[..., None] * k, diagonal[..., None] * x
    dg = jnp.zeros_like(dx)
    for dQ, b in zip(corners, _sizes(x.shape[-2]), strict=True):
        below, above = _factors(G, runs, b)
        x_low, k_up = _halves(x, b, 1), _halves(k, b, 0)
        to_x = below * einsum("...ij,...jh->...ih", dQ, k_up * above)
        to_k = above * einsum("...ij,...ih->...jh", dQ, x_low * below)
        dx, dk = dx + _whole(jnp.zeros_like(to_x), to_x), dk + _whole(to_k, jnp.zeros_like(to_k))
        dg = dg + _whole(before(k_up * to_k), at_and_after(x_low * to_x))
    return dx, dk, dg


def inverse(L):
    """(I + L)⁻¹ for strictly lower L `[..., C, C]`.

    By blocks that double, from 1: never by powers of L, which explode where keys repeat (1e9 and more in float32).
    """
    _, corners = split(L)
    T = jnp.ones((*L.shape[:-1], 1, 1), L.dtype)
    for X in corners:
        pair = T.reshape(*X.shape[:-2], 2, *X.shape[-2:])
        first, second = pair[..., 0, :, :], pair[..., 1, :, :]
        T = _join(T, -einsum("...ij,...jk,...kl->...il", second, X, first))
    return T[..., 0, :, :]


def inverse_backward(dT, T):
    """The gradient of L from that of its inverse."""
    return -jnp.tril(einsum("...ji,...jk,...lk->...il", T, dT, T), -1)


def split(P):
    """The diagonal [..., C] of P, and its corners Q [..., C / 2b, b, b] for b = 1, 2, 4, ... as in the sketch above."""
    blocks, corners = P[..., None, :, :], []
    while (b := blocks.shape[-1] // 2) > 0:
        corners.append(blocks[..., b:, :b])
        pair = jnp.stack([blocks[..., :b, :b], blocks[..., b:, b:]], axis=-3)
        blocks = pair.reshape(*pair.shape[:-4], 2 * pair.shape[-4], b, b)
    return blocks[..., 0, 0], corners[::-1]


def _join(blocks, corner):
    """Pairs of blocks [..., 2n, b, b] and the corners between them, as [..., n, 2b, 2b]."""
    pair = blocks.reshape(*corner.shape[:-2], 2, *corner.shape[-2:])
    top = jnp.concatenate([pair[..., 0, :, :], jnp.zeros_like(corner)], axis=-1)
    return jnp.concatenate([top, jnp.concatenate([corner, pair[..., 1, :, :]], axis=-1)], axis=-2)


def _sizes(C):
    return [1 << i for i in range(C.bit_length() - 1)]


def _factors(G, runs, b):
    """exp(G_i − a) of the lower halves and exp(a − G_j) of the upper ones, [..., C / 2b, b, H or 1], 0 across runs."""
    upper, lower = (G.map(lambda x, half=half: _halves(x, b, half)) for half in (0, 1))
    anchor = upper.map(lambda x: x[..., -1:, :])
    below, above = lower - anchor, anchor - upper
    if runs is not None:
        up, low = (_halves(runs[..., None], b, half) for half in (0, 1))
        last = up[..., -1:, :]
        below, above = jnp.where(low == last, below, -jnp.inf), jnp.where(up == last, above, -jnp.inf)
    return jnp.exp(below), jnp.exp(above)


def _halves(x, b, half):
    """Every second b rows of [..., C, h]: [..., C / 2b, b, h]."""
    return x.reshape(*x.shape[:-2], x.shape[-2] // (2 * b), 2, b, x.shape[-1])[..., half, :, :]


def _whole(upper, lower):
    """[..., C, h] from its halves, [..., C / 2b, b, h] each."""
    pair = jnp.stack([upper, lower], axis=-3)
    return pair.reshape(*pair.shape[:-4], 2 * pair.shape[-4] * pair.shape[-2], pair.shape[-1])

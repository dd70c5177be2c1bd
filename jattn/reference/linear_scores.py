"""Products of decayed rows within a chunk, exact for any decay, and the inverse that the delta rule needs.

    P_ij = Σ_c x_ic k_jc exp(g_(j+1)c + ... + g_ic),  j ≤ i

As a product of matrices, the exponential must be split at one anchor a for all i and j of it, into what follows a and
what precedes it. Any anchor at the start or in the middle of a chunk overflows once the gates are strong enough. So the
triangle is cut in two again and again:

    P = [[P₁, 0], [Q, P₂]]        Q anchored at the last row of P₁: both exponents are sums of log decays, hence ≤ 0

which takes C log₂ C exponentials a channel and half the products of the square, has no future token in any row, and
lends its shape to the inverse: inv [[A, 0], [X, B]] = [[A⁻¹, 0], [−B⁻¹ X A⁻¹, B⁻¹]]. The decay between two tokens is
summed between them, never the difference of two longer sums: after one exp(−1000) that would be off by four digits.
"""

import jax.numpy as jnp

from jattn.reference.linear_operands import einsum


def upto(x):
    """Σ_{s ≤ i} x_s for each row i of [..., C, h]."""
    return _summed(x, lambda ones: jnp.tril(ones))


def before(x):
    """Σ_{s < i} x_s: the gradient of g from those of sums that end behind it."""
    return _summed(x, lambda ones: jnp.tril(ones, -1))


def at_and_after(x):
    """Σ_{s ≥ i} x_s: the gradient of g from those of sums that start before it."""
    return _summed(x, lambda ones: jnp.triu(ones))


def after(x):
    """Σ_{s > i} x_s."""
    return _summed(x, lambda ones: jnp.triu(ones, 1))


def _summed(x, triangle):
    return einsum("is,...sh->...ih", triangle(jnp.ones((x.shape[-2],) * 2, x.dtype)), x)


def decays(g, runs):
    """Γ [..., C, C] = exp(g_(j+1) + ... + g_i) for j ≤ i in one run (int `[..., C]`, None is one run), else 0."""
    found = jnp.ones((*g.shape[:-1], 1, 1), g.dtype)
    for b in _sizes(g.shape[-2]):
        below, above = _exponents(g, runs, b)
        found = _join(found, jnp.exp(below + jnp.swapaxes(above, -1, -2)))
    return found[..., 0, :, :]


def decays_backward(Z):
    """The gradient of g [..., C, 1] from Z = dΓ ∘ Γ: Σ_{i ≥ s > j} Z_ij."""
    rows = jnp.swapaxes(at_and_after(Z), -1, -2)
    return jnp.sum(jnp.triu(rows, 1), axis=-2)[..., None]


def scores(x, k, g, runs):
    """P [..., C, C] from x, k and g [..., C, H]; 0 above the diagonal and across runs."""
    P = jnp.sum(x * k, axis=-1)[..., None, None]
    for b in _sizes(x.shape[-2]):
        below, above = map(jnp.exp, _exponents(g, runs, b))
        P = _join(P, einsum("...ih,...jh->...ij", _halves(x, b, 1) * below, _halves(k, b, 0) * above))
    return P[..., 0, :, :]


def scores_backward(dP, x, k, g, runs):
    """Gradients of x, k and g.

    That of g_s is a sum over pairs i ≥ s > j. Made of x · dx − k · dk it would be a difference of much larger numbers,
    because pairs on one side of s cancel. Here each corner has all its pairs across its anchor.
    """
    diagonal, corners = split(dP)
    dx, dk = diagonal[..., None] * k, diagonal[..., None] * x
    dg = jnp.zeros_like(dx)
    for dQ, b in zip(corners, _sizes(x.shape[-2]), strict=True):
        below, above = map(jnp.exp, _exponents(g, runs, b))
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


def _exponents(g, runs, b):
    """Log decays from each anchor to the rows below and from the columns above to it, [..., C / 2b, b, H or 1]."""
    below, above = upto(_halves(g, b, 1)), after(_halves(g, b, 0))
    if runs is not None:
        up, low = (_halves(runs[..., None], b, half) for half in (0, 1))
        last = up[..., -1:, :]
        below, above = jnp.where(low == last, below, -jnp.inf), jnp.where(up == last, above, -jnp.inf)
    return below, above


def _halves(x, b, half):
    """Every second b rows of [..., C, h]: [..., C / 2b, b, h]."""
    return x.reshape(*x.shape[:-2], x.shape[-2] // (2 * b), 2, b, x.shape[-1])[..., half, :, :]


def _whole(upper, lower):
    """[..., C, h] from its halves, [..., C / 2b, b, h] each."""
    pair = jnp.stack([upper, lower], axis=-3)
    return pair.reshape(*pair.shape[:-4], 2 * pair.shape[-4] * pair.shape[-2], pair.shape[-1])

"""The algebra of partial attention results: softmax over a union of key sets from softmax over its parts.

A partial is a pair (out, lse): attention over some of the keys and the natural log of its softmax denominator. With
m = max lse_i the results over disjoint key sets combine as

    w_i = exp(lse_i - m)      lse = m + log(sum w_i)      out = sum (w_i / sum w) · out_i

which is associative and commutative, with the result over no keys at all, (0, -inf), as its neutral element. This is
the rescaling of the online softmax (Milakov and Gimelshein, arXiv:1805.02867; Rabe and Staats, arXiv:2112.05682;
FlashAttention, arXiv:2205.14135) applied to finished results, as Flash-Decoding does across its splits of the keys.
"""

import functools

import jax
import jax.numpy as jnp


def _promote(*dtypes):
    # A partial of bfloat16 and one of float32 may meet even where the caller's own code is under strict promotion.
    with jax.numpy_dtype_promotion("standard"):
        return functools.reduce(jnp.promote_types, dtypes)


def _check(partials):
    if not partials:
        raise TypeError("merge needs at least one partial (out, lse), got 0")
    for i, pair in enumerate(partials):
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise TypeError(f"partials[{i}] must be a pair (out, lse), got {type(pair).__name__}")
        if any(isinstance(x, tuple | list) for x in pair):
            raise TypeError(f"partials[{i}] must be a pair of arrays (out, lse); give a list of pairs as merge(*pairs)")
    pairs = [(jnp.asarray(out), jnp.asarray(lse)) for out, lse in partials]
    for i, (out, lse) in enumerate(pairs):
        for name, x in (("out", out), ("lse", lse)):
            if not jnp.issubdtype(x.dtype, jnp.floating):
                raise TypeError(f"partials[{i}] {name} must be floating point, got {x.dtype}")
        if not out.ndim or lse.shape != out.shape[:-1]:
            raise ValueError(f"partials[{i}] lse shape {lse.shape} must equal out's {out.shape} without its last axis")
        if out.shape != pairs[0][0].shape:
            raise ValueError(f"partials[{i}] out shape {out.shape} must equal partials[0]'s {pairs[0][0].shape}")
    return pairs


def merge(*partials):
    """Merges attention results over disjoint sets of keys into the result over all of them.

    Args:
      *partials: one or more pairs (out, lse), tuples or lists. out: [..., D], floating point. lse: [...], floating
        point, the natural log of that result's softmax denominator; -inf where it saw no key, and out is then not read.
        All outs have one shape. A sink belongs in the lse of one partial only.

    Returns:
      (out, lse): out [..., D] in the promoted dtype of the outs, lse [...] in that dtype promoted with float32. The
      arithmetic is in float32, or float64 where an input is. An entry that is empty in every partial is (0, -inf).
      Merging with an empty partial returns the other bit for bit. Values and gradients are finite for finite outs and
      lse < +inf; forward mode, higher derivatives, jit and vmap work.

    Raises:
      TypeError: no partial, one that is not a pair, or arrays that are not floating point.
      ValueError: shapes that do not fit together.

    Example:
      >>> left = jattn.attention(q, k[:, :512], v[:, :512], return_residual=True)
      >>> right = jattn.attention(q, k[:, 512:], v[:, 512:], return_residual=True)
      >>> out, lse = jattn.merge(left, right)  # attention over all of k, v

    Source: FlashAttention, arXiv:2205.14135, section 3.1; Flash-Decoding (Dao, Haziza, Massa, Sizov, 2023).
    """
    pairs = _check(partials)
    out_dtype = _promote(*(out.dtype for out, _ in pairs))
    dtype = _promote(out_dtype, jnp.float32, *(lse.dtype for _, lse in pairs))
    lses = [lse.astype(dtype) for _, lse in pairs]
    empties = [lse == -jnp.inf for lse in lses]
    outs = [jnp.where(gone[..., None], 0.0, out.astype(dtype)) for gone, (out, _) in zip(empties, pairs, strict=True)]
    all_empty = functools.reduce(jnp.logical_and, empties)
    # The result does not depend on the maximum, it only keeps exp in range: no gradient through it.
    top = jax.lax.stop_gradient(functools.reduce(jnp.maximum, lses))
    top = jnp.where(all_empty, 0.0, top).astype(dtype)
    # Guarded on both sides of exp, so that no derivative of any order meets inf - inf or inf · 0.
    weights = [
        jnp.where(gone, 0.0, jnp.exp(jnp.where(gone, top, lse) - top)) for gone, lse in zip(empties, lses, strict=True)
    ]
    total = jnp.where(all_empty, 1.0, sum(weights[1:], start=weights[0]))

    # An empty term is -0.0, the one addend that changes no bit of the others, not even the sign of a zero.
    terms = [
        jnp.where(gone[..., None], -0.0, (weight / total)[..., None] * out)
        for gone, weight, out in zip(empties, weights, outs, strict=True)
    ]
    out = jnp.where(all_empty[..., None], 0.0, sum(terms[1:], start=terms[0]))
    lse = jnp.where(all_empty, -jnp.inf, top + jnp.log(total))
    return out.astype(out_dtype), lse.astype(_promote(out_dtype, jnp.float32))


def empty(shape, dtype=jnp.float32):
    """The result of attention over no keys, the neutral element of `merge`.

    Args:
      shape: the shape [..., D] of out.
      dtype: the floating dtype of out.

    Returns:
      (out, lse): zeros [..., D] of dtype and -inf [...] of dtype promoted with float32.

    Raises:
      TypeError: dtype is not floating point.
      ValueError: shape has no axis.

    Example:
      >>> state = jattn.empty(q.shape, q.dtype)  # the initial carry of a scan over key blocks
    """
    shape = tuple(shape)
    if not shape:
        raise ValueError("shape=() must be that of out [..., D], with at least one axis")
    if not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(f"dtype must be floating point, got {jnp.dtype(dtype)}")
    return jnp.zeros(shape, dtype), jnp.full(shape[:-1], -jnp.inf, _promote(dtype, jnp.float32))

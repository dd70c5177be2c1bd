"""The yardstick of the error rule: one dense attention in the input dtype, with the textbook gradient.

Scores, softmax and sums are float32 (float64 for float64 inputs); probabilities are cast to the input dtype before ·v.
"""

import jax
import jax.numpy as jnp
import numpy as np

LOG2E = 1.4426950408889634


def attention(
    query,
    key,
    value,
    bias=None,
    mask=None,
    *,
    scale=None,
    offset=0,
    query_lengths=None,
    soft_cap=None,
    score_mod=None,
    aux=(),
    sinks=None,
    keep=None,
    keep_probability=1.0,
):
    """query [B, T, N, H], key [B, S, K, H], value [B, S, K, D]; bias, mask, keep and aux broadcast to [B, N, T, S].

    `score_mod(score, b, n, t, s, *aux)` is elementwise jnp. Returns (out [B, T, N, D], lse [B, T, N]).
    """
    (B, T, N, H), S = query.shape, key.shape[1]
    G = N // key.shape[2]
    acc = jnp.float64 if query.dtype == jnp.float64 else jnp.float32
    shape = (B, N, T, S)
    key, value = jnp.repeat(key, G, axis=2), jnp.repeat(value, G, axis=2)
    score = jnp.einsum("btnh,bsnh->bnts", query, key, preferred_element_type=acc)
    score = score * (jnp.asarray(H**-0.5 if scale is None else scale).astype(acc))
    visible = jnp.broadcast_to(True if mask is None else mask, shape)
    exists = jnp.ones((B, 1, T, 1), bool)
    if query_lengths is not None:
        exists = jnp.asarray(np.arange(T)[:, None] < np.asarray(query_lengths)[:, None, None, None])
    visible = visible & exists
    if bias is not None:
        score = score + jnp.where(visible, bias, jnp.zeros((), bias.dtype)).astype(acc)
    visible = visible & (score != -jnp.inf)  # before the modifier, whose derivatives at −inf need not exist
    score = jnp.where(visible, score, jnp.zeros((), acc))
    if score_mod is not None:
        t = jnp.asarray(np.arange(T)[:, None] + np.broadcast_to(offset, (B,))[:, None, None, None])
        where = (jnp.arange(B)[:, None, None, None], jnp.arange(N)[:, None, None], t, jnp.arange(S))
        where = [jnp.broadcast_to(x.astype(jnp.int32), shape) for x in where]
        score = score_mod(score, *where, *(jnp.broadcast_to(a, shape) for a in aux))
    if soft_cap is not None:
        score = soft_cap * jnp.tanh(score / soft_cap)
    score = jnp.where(visible, score, -jnp.inf)
    sink = jnp.full((N,), -jnp.inf, acc) if sinks is None else sinks.astype(acc)
    sink = jnp.where(exists, sink[:, None, None], -jnp.inf)
    out, lse = _softmax_value(score, sink, value, 1 if keep is None else jnp.asarray(keep / keep_probability, acc))
    return out.transpose(0, 2, 1, 3), lse[..., 0].transpose(0, 2, 1)


@jax.custom_vjp
def _softmax_value(score, sink, value, factor):
    return _forward(score, sink, value, factor)[0]


def _exp(x, shift):
    """exp(x − shift) as kernels compute it."""
    return jnp.exp2(x * LOG2E - shift * LOG2E)


def _forward(score, sink, value, factor):
    """(out [B, N, T, D], lse [B, N, T, 1]) of masked scores [B, N, T, S], sink [B, N, T, 1], value [B, S, N, D]."""
    top = jnp.maximum(jnp.max(score, axis=-1, keepdims=True, initial=-jnp.inf), sink)
    top = jnp.where(top == -jnp.inf, jnp.zeros((), top.dtype), top)
    weight = _exp(score, top)
    total = weight.sum(-1, keepdims=True) + _exp(sink, top)
    lse = top + jnp.log(total)
    prob = weight / jnp.where(total > 0, total, jnp.ones((), total.dtype)) * factor
    out = jnp.einsum("bnts,bsnd->bntd", prob.astype(value.dtype), value, preferred_element_type=score.dtype)
    out = out.astype(value.dtype)
    return (out, lse), (score, sink, value, factor, out, lse)


def _backward(saved, cotangents):
    """The textbook gradient, from lse and out as a training step would have saved them."""
    score, sink, value, factor, out, lse = saved
    dout, dlse = cotangents
    empty = lse == -jnp.inf
    dlse, lse = (jnp.where(empty, jnp.zeros((), lse.dtype), x) for x in (dlse, lse))
    delta = (dout.astype(lse.dtype) * out.astype(lse.dtype)).sum(-1, keepdims=True)
    dprob = jnp.einsum("bntd,bsnd->bnts", dout, value, preferred_element_type=score.dtype) * factor
    prob = _exp(score, lse)
    dvalue = jnp.einsum(
        "bnts,bntd->bsnd", (prob * factor).astype(value.dtype), dout, preferred_element_type=score.dtype
    )
    return prob * (dprob - delta + dlse), _exp(sink, lse) * (dlse - delta), dvalue.astype(value.dtype), None


_softmax_value.defvjp(_forward, _backward)

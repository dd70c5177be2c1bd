"""The yardstick for linear attention: one plain chunkwise function, operands in the input dtype, state in float32.

Every op is one family here: decay by channel, an erasing and a writing weight a token. Gradients are JAX's; norm, gate
and activation, and the way back through them, are the oracle's.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle_linear

CHUNK = 64


def gradients(p: oracle_linear.Problem, dout, dfinal):
    """Runs with channels in two orders: dicts of out, state and gradients by name."""
    x = oracle_linear.Prepared(p)
    B, T, N, D = p.value.shape
    dtype = p.value.dtype
    wide = np.float64 if dtype == np.float64 else np.float32
    write = np.ones((B, T, N)) if x.beta is None else x.beta
    S = np.zeros((B, N, x.H, D)) if p.initial_state is None else p.initial_state
    arrays = x.scale * x.q, x.k, x.v, np.broadcast_to(x.g, x.k.shape), write, 0 * write if x.beta is None else write, S
    resets = np.zeros((B, T), bool) if p.resets is None else p.resets
    rng = np.random.default_rng(7)
    for shuffled in (False, True):
        h, d = (rng.permutation(n) if shuffled else np.arange(n) for n in (x.H, D))
        state = lambda a, h=h, d=d: a[..., h, :][..., d]  # noqa: E731
        q, k, v, g, w, b, S = (a.astype(wide) for a in arrays)
        moved = (q[..., h], k[..., h], v[..., d], g[..., h], w, b, state(S))
        cotangents = dout[..., d].astype(dtype), state(dfinal).astype(wide)
        with jax.default_device(jax.local_devices(backend="cpu")[0]):  # a GPU takes as long to compile as the kernels
            found = jax.tree.map(np.asarray, _run(dtype.name, moved, resets, *cotangents))
        out, S, (dq, dk, dv, dg, dw, db, dS) = found
        h, d = np.argsort(h), np.argsort(d)
        dq, dk, dv, dg, dw, db = (a.astype(np.float64) for a in (dq, dk, dv, dg, dw, db))
        yield x.back(dq[..., h], dk[..., h], dv[..., d], dg[..., h], dw + db) | {
            "out": out[..., d],
            "state": state(S, h, d),
            "initial_state": state(dS, h, d),
        }


@functools.partial(jax.jit, static_argnums=0, compiler_options={"xla_backend_optimization_level": 0})
def _run(dtype, arrays, resets, dout, dfinal):
    (out, S), pull = jax.vjp(lambda *a: _linear(dtype, resets, *a), *arrays)
    return out, S, pull((dout, dfinal))


def _linear(dtype, resets, q, k, v, g, write, erase, S):
    T = v.shape[1]
    pad = -T % CHUNK
    padded = [jnp.pad(a, [(0, 0), (0, pad)] + [(0, 0)] * (a.ndim - 2)) for a in (q, k, v, g, write, erase)]
    chunks = [jnp.moveaxis(a.reshape(a.shape[0], -1, CHUNK, *a.shape[2:]), (1, 3), (0, 2)) for a in padded]
    resets = jnp.moveaxis(jnp.pad(resets, [(0, 0), (0, pad)]).reshape(resets.shape[0], -1, CHUNK), 1, 0)
    runs = jnp.cumsum(resets.astype(jnp.int32), axis=-1, dtype=jnp.int32)[:, :, None]
    S, out = jax.lax.scan(functools.partial(_chunk, dtype), S, (*chunks, runs))
    out = jnp.moveaxis(out, (0, 2), (1, 3)).reshape(v.shape[0], T + pad, *v.shape[2:])[:, :T]
    return out.astype(dtype), S


def _chunk(dtype, S, xs):
    q, k, v, g, write, erase, runs = xs  # [B, N, C, .], and the number of resets so far
    wide, C = S.dtype, q.shape[-2]
    low = lambda a: a.astype(dtype)  # noqa: E731
    mul = functools.partial(jnp.einsum, precision="highest", preferred_element_type=wide)
    i = np.arange(C)
    between = (i[None, None] <= i[:, None, None]) & (i[None, None] > i[None, :, None])  # tokens after j up to i
    D = mul("ijs,bnsh->bnijh", jnp.asarray(between, wide), g)
    seen = jnp.asarray(i[:, None] >= i[None])
    decay = jnp.where((seen & (runs[..., :, None] == runs[..., None, :]))[..., None], jnp.exp(D), 0)
    E = jnp.exp(mul("is,bnsh->bnih", jnp.asarray(seen, wide), g)) * (runs == 0)[..., None].astype(wide)
    R = decay[:, :, -1]
    A = jnp.sum(q[:, :, :, None] * k[:, :, None] * decay, -1)
    L = jnp.tril(erase[..., None] * jnp.sum(k[:, :, :, None] * k[:, :, None] * decay, -1), -1)
    eye = jnp.broadcast_to(jnp.eye(C, dtype=wide), L.shape)
    T = low(jax.scipy.linalg.solve_triangular(eye + L, eye, lower=True, unit_diagonal=True))
    z = write[..., None] * v - erase[..., None] * mul("bnch,bnhd->bncd", low(k * E), low(S))
    u = low(mul("bnij,bnjd->bnid", T, low(z)))
    out = mul("bnch,bnhd->bncd", low(q * E), low(S)) + mul("bnij,bnjd->bnid", low(A), u)
    S = E[:, :, -1, :, None] * S + mul("bnch,bncd->bnhd", low(k * R), u)
    return S, out

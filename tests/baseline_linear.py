"""The yardstick for linear attention: one plain chunkwise function, operands in the input dtype, state in float32.

Every op is one family here: decay by channel, an erasing and a writing weight a token. Gradients are JAX's.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle_linear

CHUNK = 64


def linear(p: oracle_linear.Problem, primals, orders=(None, None)):
    """`(out, final state)` of `primals` (name -> array); `orders` permute the channels of H and of D."""
    dtype = primals["query"].dtype
    wide = jnp.float64 if dtype == jnp.float64 else jnp.float32
    N = primals["value"].shape[2]
    x = {name: jnp.asarray(a).astype(wide) for name, a in primals.items()}
    q, k, v = x["query"], x["key"], x["value"]
    if p.qk_l2norm:
        q, k = (a / jnp.sqrt(jnp.sum(a * a, -1, keepdims=True) + jnp.asarray(1e-6, wide)) for a in (q, k))
    scale = 1 / np.sqrt(q.shape[-1]) if p.scale is None else p.scale
    q, k = (jnp.repeat(a, N // a.shape[2], axis=2) for a in (q * jnp.asarray(scale, wide), k))
    g = jnp.zeros_like(k) if p.g is None else jnp.broadcast_to(_gate(p, x, wide), k.shape)
    write, erase = jnp.ones(v.shape[:3], wide), jnp.zeros(v.shape[:3], wide)
    if p.beta is not None:
        most = {None: None, "sigmoid": 1, "sigmoid2": 2}[p.beta_activation]
        beta = x["beta"] if most is None else jnp.asarray(most, wide) * jax.nn.sigmoid(x["beta"])
        write = erase = beta
    S = x.get("initial_state", jnp.zeros((v.shape[0], N, q.shape[-1], v.shape[-1]), wide))
    T = v.shape[1]
    pad = -T % CHUNK
    padded = [jnp.pad(a, [(0, 0), (0, pad)] + [(0, 0)] * (a.ndim - 2)) for a in (q, k, v, g, write, erase)]
    chunks = [jnp.moveaxis(a.reshape(a.shape[0], -1, CHUNK, *a.shape[2:]), (1, 3), (0, 2)) for a in padded]
    S, out = jax.lax.scan(functools.partial(_chunk, dtype), S, chunks)
    out = jnp.moveaxis(out, (0, 2), (1, 3)).reshape(v.shape[0], T + pad, N, -1)[:, :T]
    return out.astype(dtype), S


def _gate(p, x, wide):
    if p.gate is None:
        return x["g"]
    rate = jnp.exp(x["A_log"])[:, None] if "A_log" in x else jnp.ones((), wide)
    y = x["g"] + x.get("dt_bias", jnp.zeros((), wide))
    if p.gate == "softplus":
        return -rate * jax.nn.softplus(y)
    return jnp.asarray(p.lower_bound, wide) * jax.nn.sigmoid(rate * y)


def _chunk(dtype, S, xs):
    q, k, v, g, write, erase = xs  # [B, N, C, .]
    wide = S.dtype
    low = lambda a: a.astype(dtype)  # noqa: E731
    mul = functools.partial(jnp.einsum, precision="highest", preferred_element_type=wide)
    C = q.shape[-2]
    i = np.arange(C)
    between = (i[None, None] <= i[:, None, None]) & (i[None, None] > i[None, :, None])  # tokens after j up to i
    D = mul("ijs,bnsh->bnijh", jnp.asarray(between, wide), g)
    seen = jnp.asarray(i[:, None] >= i[None])
    decay = jnp.where(seen[..., None], jnp.exp(D), 0)
    E = jnp.exp(mul("is,bnsh->bnih", jnp.asarray(seen, wide), g))
    R = jnp.exp(D[:, :, -1])
    A = jnp.sum(q[:, :, :, None] * k[:, :, None] * decay, -1)
    L = jnp.tril(erase[..., None] * jnp.sum(k[:, :, :, None] * k[:, :, None] * decay, -1), -1)
    eye = jnp.broadcast_to(jnp.eye(C, dtype=wide), L.shape)
    T = low(jax.scipy.linalg.solve_triangular(eye + L, eye, lower=True, unit_diagonal=True))
    z = write[..., None] * v - erase[..., None] * mul("bnch,bnhd->bncd", low(k * E), low(S))
    u = low(mul("bnij,bnjd->bnid", T, low(z)))
    out = mul("bnch,bnhd->bncd", low(q * E), low(S)) + mul("bnij,bnjd->bnid", low(A), u)
    S = E[:, :, -1, :, None] * S + mul("bnch,bncd->bnhd", low(k * R), u)
    return S, out


def gradients(p: oracle_linear.Problem, dout, dfinal):
    """Runs with channels in two orders: dicts of out, state and gradients by name."""
    primals = p.arrays()

    @functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
    def run(primals, dout, dfinal):
        (out, S), pull = jax.vjp(functools.partial(linear, p), primals)
        return out, S, pull((dout.astype(out.dtype), dfinal.astype(S.dtype)))[0]

    rng = np.random.default_rng(7)
    for shuffled in (False, True):
        h, d = (rng.permutation(n) if shuffled else np.arange(n) for n in (p.query.shape[-1], p.value.shape[-1]))
        moved = {n: _permuted(n, a, h, d) for n, a in primals.items()}
        out, S, got = jax.tree.map(np.asarray, run(moved, dout[..., d], dfinal[..., h, :][..., d]))
        h, d = np.argsort(h), np.argsort(d)
        found = {n: _permuted(n, a, h, d) for n, a in got.items()}
        yield found | {"out": out[..., d], "state": S[..., h, :][..., d]}


def _permuted(name, a, h, d):
    if name in ("query", "key"):
        return a[..., h]
    if name in ("g", "dt_bias") and a.shape[-1] == len(h):
        return a[..., h]
    if name == "initial_state":
        return a[..., h, :][..., d]
    return a[..., d] if name == "value" else a

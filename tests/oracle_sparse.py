"""The truth of latent and sparse attention: float64 NumPy, loops over rows, heads and slots, no JAX, no jattn.

Lists are written out as they are meant: each slot of a row either names a key or is empty.
"""

import numpy as np


def f64(x):
    return np.asarray(x).astype(np.float64)


def listed(indices, size, length=None, low=None, high=None, block=1):
    """The keys that one list names, in order, duplicates included."""
    found = []
    for slot, i in enumerate(np.asarray(indices).tolist()):
        if i < 0 or (length is not None and slot >= length):
            continue
        for key in range(i * block, min((i + 1) * block, size)) if i * block < size else ():
            if (low is None or key >= low) and (high is None or key < high):
                found.append(key)
    return found


def row(query, keys, scale, value_dim, sinks=None):
    """One query `[N, H]` over `keys [L, H]`: (out [N, D], lse [N], weights [N, L], the sink's weight [N])."""
    query, keys = f64(query), f64(keys)
    N = query.shape[0]
    out, lse = np.zeros((N, value_dim)), np.full(N, -np.inf)
    weights, share = np.zeros((N, len(keys))), np.zeros(N)
    for n in range(N):
        scores = keys @ query[n] * scale
        sink = -np.inf if sinks is None else float(sinks[n])
        top = max(scores.max(initial=-np.inf), sink)
        if top == -np.inf:
            continue
        lse[n] = top if np.isposinf(top) else top + np.log(np.exp(scores - top).sum() + np.exp(sink - top))
        weights[n] = 0 if np.isposinf(top) else np.exp(scores - lse[n])
        share[n] = 1 if np.isposinf(top) else np.exp(sink - lse[n])
        out[n] = weights[n] @ keys[:, :value_dim]
    return out, lse, weights, share


def gradients(query, keys, scale, value_dim, dout, dlse, sinks=None):
    """Of one row: (dquery [N, H], dkeys [L, H], dsinks [N])."""
    query, keys, dout, dlse = f64(query), f64(keys), f64(dout), f64(dlse)
    out, _, weights, share = row(query, keys, scale, value_dim, sinks)
    dquery, dkeys = np.zeros_like(query), np.zeros_like(keys)
    common = dlse - (dout * out).sum(1)
    for n in range(len(query)):
        dscores = weights[n] * (keys[:, :value_dim] @ dout[n] + common[n])
        dquery[n] = dscores @ keys * scale
        dkeys += np.outer(dscores, query[n]) * scale
        dkeys[:, :value_dim] += np.outer(weights[n], dout[n])
    return dquery, dkeys, share * common


def logits(query, key, weights):
    """Index scores `[T, S]` of query `[T, N, H]`, key `[S, H]`, weights `[T, N]`."""
    products = np.einsum("tnh,sh->tns", f64(query), f64(key))
    return np.einsum("tns,tn->ts", np.maximum(products, 0), f64(weights))


def logits_gradients(query, key, weights, dlogits):
    query, key, weights, dlogits = f64(query), f64(key), f64(weights), f64(dlogits)
    products = np.einsum("tnh,sh->tns", query, key)
    dproducts = dlogits[:, None] * weights[..., None] * (products > 0)
    dweights = np.einsum("ts,tns->tn", dlogits, np.maximum(products, 0))
    return np.einsum("tns,sh->tnh", dproducts, key), np.einsum("tns,tnh->sh", dproducts, query), dweights


def select(scores, k, low, high):
    """The k best of one row, by sorting: (indices [k], count). NaN is worst, zeros tie, ties go to the lower index."""
    kept = range(max(low, 0), min(high, len(scores)))

    def order(i):
        x = float(scores[i])
        return (1, 0.0, i) if np.isnan(x) else (0, -x if x else 0.0, i)

    best = sorted(sorted(kept, key=order)[:k])
    return np.array(best + [-1] * (k - len(best)), np.int32), len(best)


def kl(scores, target):
    """(loss, gradient in scores) of one row `[L]`."""
    scores, target = f64(scores), f64(target)
    seen = scores != -np.inf
    if not seen.any() or target[seen].sum() == 0:
        return 0.0, np.zeros_like(scores)
    z, p = scores[seen], target[seen] / target[seen].sum()
    log_q = z - z.max() - np.log(np.exp(z - z.max()).sum())
    some = p > 0
    gradient = np.zeros_like(scores)
    gradient[seen] = np.exp(log_q) - p
    return float((p[some] * (np.log(p[some]) - log_q[some])).sum()), gradient


E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def e2m1(x):
    """The nearest e2m1 number by looking at all of them; of two as near, the one whose code is even."""
    distance = np.abs(E2M1 - min(abs(x), 6.0))
    near = np.flatnonzero(distance == distance.min())
    code = near[0] if len(near) == 1 else next(c for c in near if c % 2 == 0)
    return np.copysign(E2M1[code], x)


def fp4_block(x):
    """32 numbers rounded as one block of FP4."""
    x = f64(x)
    scale = 2.0 ** max(np.ceil(np.log2(np.abs(x).max() / 6)) if np.abs(x).max() else -126, -126)
    return np.array([e2m1(v / scale) for v in x]) * scale


# Latent attention.


def rope(x, positions, base=10000.0, interleaved=True, rotary=None):
    """`x [T, .., R]` turned by its position, pair by pair."""
    x = f64(x).copy()
    rotary = x.shape[-1] if rotary is None else rotary
    half = rotary // 2
    for t, p in enumerate(positions):
        for i in range(half):
            a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + half)
            angle = float(p) * base ** (-2 * i / rotary)
            first, second = x[t, ..., a].copy(), x[t, ..., b].copy()
            x[t, ..., a] = first * np.cos(angle) - second * np.sin(angle)
            x[t, ..., b] = second * np.cos(angle) + first * np.sin(angle)
    return x


def rms(x, gain, eps=1e-6):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * f64(gain)


def mla_layer(x, w, scale, rotated=True, positions=None, visible=None):
    """One causal layer `[T, M] -> [T, M]`, head by head; `w` maps names of weights to arrays, as in MLAWeights.

    `visible [T, T]` replaces the causal mask.
    """
    x = f64(x)
    T = len(x)
    positions = np.arange(T) if positions is None else positions
    C, N, H = w["key_up"].shape
    a = x if w.get("query_down") is None else rms(x @ f64(w["query_down"]), w["query_norm"])
    ckr = x @ f64(w["latent_down"])
    c, k_rope = rms(ckr[:, :C], w["latent_norm"]), ckr[:, C:]
    k_rope = rope(k_rope, positions) if rotated else k_rope
    visible = np.tril(np.ones((T, T), bool)) if visible is None else visible
    y = np.zeros((T, w["out"].shape[-1]))
    for n in range(N):
        q = a @ f64(w["query_up"][:, n])
        q_nope, q_rope = q[:, :H], q[:, H:]
        q_rope = rope(q_rope, positions) if rotated else q_rope
        k_nope, v = c @ f64(w["key_up"][:, n]), c @ f64(w["value_up"][:, n])
        s = np.where(visible, (q_nope @ k_nope.T + q_rope @ k_rope.T) * scale, -np.inf)
        p = np.exp(s - s.max(1, keepdims=True))
        o = p / p.sum(1, keepdims=True) @ v
        if w.get("gate") is not None:
            o = o / (1 + np.exp(-(x @ f64(w["gate"][:, n]))))
        y += o @ f64(w["out"][n])
    return y

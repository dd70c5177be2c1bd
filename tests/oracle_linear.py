"""The truth for linear attention: the recurrence token by token in float64 NumPy, and its gradient.

Loops over tokens, arrays over batch and heads. Nothing here imports JAX or jattn. Gradients are analytic;
test_linear.py holds them against differences.
"""

from dataclasses import dataclass, fields, replace

import numpy as np


@dataclass(frozen=True)
class Problem:
    """One call: query, key [B, T, K, H], value [B, T, N, D], g [B, T, N, H or 1], beta [B, T, N], h0 [B, N, H, D]."""

    query: np.ndarray
    key: np.ndarray
    value: np.ndarray
    g: np.ndarray | None = None  # None: no decay
    beta: np.ndarray | None = None  # None: no delta rule
    initial_state: np.ndarray | None = None
    A_log: np.ndarray | None = None  # [N]
    dt_bias: np.ndarray | None = None  # [N, H or 1]
    scale: float | None = None
    qk_l2norm: bool = False
    gate: str | None = None
    lower_bound: float = -5.0
    beta_activation: str | None = None
    resets: np.ndarray | None = None  # bool [B, T]

    def arrays(self):
        found = {f.name: getattr(self, f.name) for f in fields(self)}
        return {n: a for n, a in found.items() if isinstance(a, np.ndarray) and n != "resets"}

    def tokens(self, start, stop):
        """The same call on tokens start to stop."""
        names = ("query", "key", "value", "g", "beta", "resets")
        cut = {n: getattr(self, n)[:, start:stop] for n in names if getattr(self, n) is not None}
        return replace(self, **cut)


def _f64(x):
    return None if x is None else np.asarray(x).astype(np.float64)


def _sigmoid(x):
    return np.where(x >= 0, 1 / (1 + np.exp(-np.abs(x))), np.exp(-np.abs(x)) / (1 + np.exp(-np.abs(x))))


def _softplus(x):
    return np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x)))


def _unit(x):
    rstd = 1 / np.sqrt(np.sum(x * x, -1, keepdims=True) + 1e-6)
    return x * rstd, rstd


class Prepared:
    """What the recurrence takes, [B, T, N, .], and the way back to what the caller gave."""

    def __init__(self, p: Problem):
        self.p = p
        self.N, self.K, self.H = p.value.shape[2], p.query.shape[2], p.query.shape[3]
        self.scale = 1 / np.sqrt(self.H) if p.scale is None else float(p.scale)
        q, k, self.v = _f64(p.query), _f64(p.key), _f64(p.value)
        self.unit = {}
        if p.qk_l2norm:
            self.unit = {"query": _unit(q), "key": _unit(k)}
            q, k = self.unit["query"][0], self.unit["key"][0]
        self.q, self.k = (np.repeat(x, self.N // self.K, axis=2) for x in (q, k))
        self.g = np.zeros((*p.value.shape[:3], 1)) if p.g is None else self._gate(_f64(p.g))
        self.beta = None if p.beta is None else _f64(p.beta)
        if p.beta_activation is not None and self.beta is not None:
            self.s_beta = _sigmoid(self.beta)
            self.most = {"sigmoid": 1, "sigmoid2": 2}[p.beta_activation]
            self.beta = self.most * self.s_beta

    def _gate(self, x):
        p = self.p
        if p.gate is None:
            return x
        if p.gate == "clipped":
            return np.maximum(x, p.lower_bound)
        self.rate = 1.0 if p.A_log is None else np.exp(_f64(p.A_log))[:, None]
        self.y = x if p.dt_bias is None else x + _f64(p.dt_bias)
        if p.gate == "softplus":
            return -self.rate * _softplus(self.y)
        return p.lower_bound * _sigmoid(self.rate * self.y)

    def back(self, dq, dk, dv, dg, dbeta):
        """Gradients of the caller's arrays from those of the recurrence's."""
        p, B, T = self.p, *self.p.query.shape[:2]
        dq = self.scale * dq
        dq, dk = (x.reshape(B, T, self.K, self.N // self.K, self.H).sum(3) for x in (dq, dk))
        found = {"query": dq, "key": dk, "value": dv}
        for name, (y, rstd) in self.unit.items():
            found[name] = rstd * (found[name] - y * np.sum(y * found[name], -1, keepdims=True))
        if p.g is not None:
            found |= self.gates_back(dg)
        if p.beta is not None:
            found["beta"] = dbeta if p.beta_activation is None else dbeta * self.most * self.s_beta * (1 - self.s_beta)
        return found

    def gates_back(self, dg, magnitude=lambda x: x):
        """Gradients of g and of the gate's parameters; with `magnitude=np.abs` sums of the sizes of their terms."""
        p = self.p
        dg = dg if p.g.shape[-1] > 1 else dg.sum(-1, keepdims=True)
        if p.gate is None:
            return {"g": dg}
        if p.gate == "clipped":
            return {"g": np.where(_f64(p.g) < p.lower_bound, 0.0, dg)}
        if p.gate == "softplus":
            dx = -self.rate * dg * _sigmoid(self.y)
            to_A_log = dg * self.g
        else:
            s = _sigmoid(self.rate * self.y)
            dx = dg * p.lower_bound * s * (1 - s) * self.rate
            to_A_log = dx * self.y
        found = {"g": dx}
        if p.A_log is not None:
            found["A_log"] = magnitude(to_A_log).sum((0, 1, 3))
        if p.dt_bias is not None:
            found["dt_bias"] = magnitude(dx).sum((0, 1))
        return found


def forward(p: Problem):
    """`(out [B, T, N, D], states [T + 1, B, N, H, D])`: the states before the first and after every token."""
    return _recurrence(p, Prepared(p))[:2]


def last(p: Problem):
    """`(out, final state)` without keeping all states: for long sequences."""
    return _recurrence(p, Prepared(p), keep=False)[:2]


def _recurrence(p, x, keep=True):
    B, T, N, D = p.value.shape
    S = np.zeros((B, N, x.H, D)) if p.initial_state is None else _f64(p.initial_state)
    out, states, updates = np.zeros((B, T, N, D)), [S], []
    a = np.exp(x.g)
    for t in range(T):
        if p.resets is not None:
            S = np.where(p.resets[:, t, None, None, None], 0.0, S)
        S = a[:, t, :, :, None] * S
        u = x.v[:, t]
        if x.beta is not None:
            u = x.beta[:, t, :, None] * (u - np.einsum("bnh,bnhd->bnd", x.k[:, t], S))
        S = S + x.k[:, t, :, :, None] * u[:, :, None, :]
        out[:, t] = x.scale * np.einsum("bnh,bnhd->bnd", x.q[:, t], S)
        if keep:
            states.append(S)
            updates.append(u)
    return out, (np.stack(states) if keep else S), updates


def backward(p: Problem, dout, dfinal, dstates=None):
    """Gradients by name from the cotangents of out, of the final state, and of states {token count: cotangent}.

    "terms" holds, for gradients of gates, the largest sum of the sizes of what they add up: they may cancel.
    """
    x = Prepared(p)
    _, states, updates = _recurrence(p, x)
    dout, dS = _f64(dout), _f64(dfinal)
    dstates = dict(dstates or {})
    shape = p.value.shape[:3]
    dq, dk, dv = np.zeros((*shape, x.H)), np.zeros((*shape, x.H)), np.zeros(p.value.shape)
    dg, dbeta = np.zeros((*shape, x.H)), np.zeros(shape)
    terms = np.zeros_like(dg)
    for t in reversed(range(p.value.shape[1])):
        dS = dS + _f64(dstates.pop(t + 1, 0.0))
        do, k, u, S = dout[:, t], x.k[:, t], updates[t], states[t]
        if p.resets is not None:
            S = np.where(p.resets[:, t, None, None, None], 0.0, S)
        a = np.exp(x.g[:, t])[..., None]
        dq[:, t] = np.einsum("bnhd,bnd->bnh", states[t + 1], do)
        dS = dS + x.scale * x.q[:, t, :, :, None] * do[:, :, None, :]
        dk[:, t] = np.einsum("bnhd,bnd->bnh", dS, u)
        du = np.einsum("bnhd,bnh->bnd", dS, k)
        if x.beta is None:
            dv[:, t] = du
        else:
            rest = x.v[:, t] - np.einsum("bnh,bnhd->bnd", k, a * S)
            dbeta[:, t] = (du * rest).sum(-1)
            dv[:, t] = x.beta[:, t, :, None] * du
            dk[:, t] -= np.einsum("bnhd,bnd->bnh", a * S, dv[:, t])
            dS = dS - k[..., None] * dv[:, t, :, None, :]
        dg[:, t], terms[:, t] = (dS * a * S).sum(-1), np.abs(dS * a * S).sum(-1)
        dS = a * dS
        if p.resets is not None:
            dS = np.where(p.resets[:, t, None, None, None], 0.0, dS)
    dS = dS + _f64(dstates.pop(0, 0.0))
    assert not dstates, "cotangents of states that do not exist"
    found = x.back(dq, dk, dv, dg, dbeta)
    if p.initial_state is not None:
        found["initial_state"] = dS
    sizes = {} if p.g is None else x.gates_back(terms, np.abs)
    return found | {"terms": {name: np.abs(a).max(initial=0) for name, a in sizes.items()}}

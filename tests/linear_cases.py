"""Inputs of the tests of linear attention, and the comparison with the truth."""

import functools

import baseline_linear
import compare
import jax
import numpy as np
import oracle_linear
import pytest
from oracle_linear import Problem

from jattn import linear

OPS = {
    "kda": linear.kda,
    "gated_delta_rule": linear.gated_delta_rule,
    "delta_rule": linear.delta_rule,
    "gla": linear.gla,
    "simple_gla": linear.simple_gla,
    "linear_attention": linear.linear_attention,
}
BY_CHANNEL, BY_HEAD = ("kda", "gla"), ("gated_delta_rule", "simple_gla")
DELTA = ("kda", "gated_delta_rule", "delta_rule")
# Half the time to compile; what is compared is the same program.
quickly = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


def repeated(run, *inputs, repeats=1):
    """What `run` returns; all repeats are the same, bit for bit."""
    found = run(*inputs)
    for _ in range(repeats - 1):
        again = run(*inputs)
        assert jax.tree.all(jax.tree.map(lambda a, b: bool(np.array_equal(a, b)), again, found))
    return found


@pytest.fixture(autouse=True, scope="module")
def quick_compiles():
    """For calls outside `quickly`."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


def problem(op, B=2, T=150, K=2, N=4, H=16, D=24, *, dtype=np.float32, gates="mixed", state=True, seed=0, **options):
    """A call of `op` with heavy-tailed queries, keys of about unit length and gates of the named kind."""
    rng = np.random.default_rng(seed)
    normal = lambda *shape: rng.standard_normal(shape)  # noqa: E731
    query, key = rng.standard_t(4, (B, T, K, H)), normal(B, T, K, H) / np.sqrt(H)
    value = normal(B, T, N, D) * np.exp(0.5 * normal(D))
    arrays = dict(query=query.astype(dtype), key=key.astype(dtype), value=value.astype(dtype))
    wide = np.float64 if dtype == np.float64 else np.float32
    small = lambda a: np.asarray(a).astype(wide)  # noqa: E731
    width = H if op in BY_CHANNEL else 1
    if op in BY_CHANNEL + BY_HEAD:
        x = normal(B, T, N, width)
        if options.get("gate") not in (None, "clipped"):
            arrays |= dict(g=small(2 * x), A_log=small(0.3 * normal(N)), dt_bias=small(normal(N, width)))
        else:
            arrays["g"] = small(decay(gates, x, rng))
    if op in DELTA:
        beta = normal(B, T, N)
        raw = options.get("beta_activation") is not None
        arrays["beta"] = small(2 * beta if raw else 2 / (1 + np.exp(-beta)))
    if state:
        arrays["initial_state"] = small(normal(B, N, H, D))
    return Problem(**arrays, **options)


def decay(kind, x, rng):
    """Log decays: as a model has them, "forgetting" (-1000 at half the tokens), "bound", "slow", or all of these."""
    kinds = {
        "model": lambda: -np.log1p(np.exp(-x)),
        "forgetting": lambda: np.where(rng.random(x.shape) < 0.5, -1000.0, -np.log1p(np.exp(-x)) / 10),
        "bound": lambda: np.full(x.shape, -4.99),
        "slow": lambda: -np.exp(rng.uniform(np.log(1e-5), np.log(1e-3), x.shape)),
    }
    if kind != "mixed":
        return kinds[kind]()
    which = rng.integers(0, 4, x.shape)
    return np.choose(which, [kinds[name]() for name in kinds])


def call(op, p, primals=None, **options):
    """`op` on the arrays of the problem (or others of these names), with its options."""
    x = dict(p.arrays() if primals is None else primals)
    if op not in BY_CHANNEL:  # the oracle has an axis of 1 where these have none
        x |= {name: x[name][..., 0] for name in ("g", "dt_bias") if name in x}
    own = dict(scale=p.scale, **options)
    if op in DELTA:
        own |= dict(qk_l2norm=p.qk_l2norm, beta_activation=p.beta_activation)
    if op in ("kda", "gated_delta_rule"):
        own |= dict(gate=p.gate, lower_bound=p.lower_bound)
    if p.resets is not None:
        own["segment_ids"] = np.cumsum(p.resets, axis=1)
    return OPS[op](**x, **own)


def cotangents(p, seed=5):
    rng = np.random.default_rng(seed)
    B, _, N, D = p.value.shape
    wide = np.float64 if p.value.dtype == np.float64 else np.float32
    shape = (B, N, p.query.shape[-1], D)
    return rng.standard_normal(p.value.shape).astype(p.value.dtype), rng.standard_normal(shape).astype(wide)


def pullback(op, p, **options):
    """Compiled (primals, dout, dfinal) -> (out, state), gradients."""

    def run(primals, dout, dfinal):
        results, pull = jax.vjp(lambda x: call(op, p, x, return_final_state=True, **options), primals)
        return results, pull((dout, dfinal))[0]

    return quickly(run)


def check(op, p, modes=("chunk", "recurrent"), **options):
    """Holds outputs, final state and all gradients of each mode against the oracle."""
    dtype, (dout, dfinal) = p.query.dtype, cotangents(p)
    out, states = oracle_linear.forward(p)
    truth = oracle_linear.backward(p, dout, dfinal) | {"out": out, "state": states[-1]}
    yards = list(baseline_linear.gradients(p, dout, dfinal))
    for mode in modes:
        (out, state), got = pullback(op, p, mode=mode, **options)(p.arrays(), dout, dfinal)
        hold(mode, got | {"out": out, "state": state}, truth, yards, dtype)
        for name, x in got.items():
            assert x.dtype == getattr(p, name).dtype, f"d{name} is {x.dtype}, its primal {getattr(p, name).dtype}"
        assert out.dtype == dtype and state.dtype == dfinal.dtype


def hold(label, got, truth, yards, dtype):
    """Every array of `got` by the error rule; gradients of gates are held to the size of what they add up."""
    for name, x in got.items():
        shape = np.shape(x)
        want, *baselines = (np.reshape(y[name], shape) for y in (truth, *yards))
        compare.check(f"{label} {name}", x, want, baselines, dtype, truth["terms"].get(name, 0.0))

"""Long sequences, hard keys and extreme decays, in float32 where nothing hides behind rounding of the inputs."""

import functools

import baseline_linear
import compare
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import oracle_linear
import pytest
from linear_cases import call, cotangents, problem, quickly

from jattn import linear

LONG, SHORT = 65_536, 4096
GATES = {
    "bound": lambda rng, shape: np.full(shape, -5.0),
    "slow": lambda rng, shape: -np.exp(rng.uniform(np.log(1e-5), np.log(1e-3), shape)),
    "mixed": lambda rng, shape: -np.exp(rng.uniform(np.log(1e-5), np.log(5), shape)),
}


def long_problem(op, dtype):
    """One row of small heads for each kind of gate."""
    rng = np.random.default_rng(11)
    B, H, D = len(GATES), 8, 8
    tokens = (B, LONG, 1)
    key = rng.standard_normal((*tokens, H))
    return oracle_linear.Problem(
        query=rng.standard_normal((*tokens, H)).astype(dtype),
        key=(key / np.linalg.norm(key, axis=-1, keepdims=True)).astype(dtype),
        value=rng.standard_normal((*tokens, D)).astype(dtype),
        g=np.stack([gate(rng, (LONG, 1, H if op == "kda" else 1)) for gate in GATES.values()]).astype(np.float32),
        beta=rng.uniform(0, 2, tokens).astype(np.float32),
    )


def drift(op, dtype, **options):
    """Largest error over the largest truth, by kind of gate, of the tokens up to SHORT and of the last SHORT."""
    p = long_problem(op, dtype)
    truth, final = _truth(op, dtype)
    out, state = quickly(lambda x: call(op, p, x, return_final_state=True, **options))(p.arrays())
    error, found = np.abs(np.asarray(out, np.float64) - truth), {}
    for i, name in enumerate(GATES):
        rows = slice(SHORT), slice(-SHORT, None)
        first, last = (error[i, r].max() / np.abs(truth[i, r]).max() for r in rows)
        found[name] = first, last, np.abs(np.asarray(state[i]) - final[i]).max() / np.abs(final[i]).max()
    return found


@functools.cache
def _truth(op, dtype):
    return oracle_linear.last(long_problem(op, dtype))


def hold_drift(label, found):
    """At 65,536 tokens at most 1.5 times what they are at 4096."""
    for name, (first, last, state) in found.items():
        print(
            f"{label} {name}: {first:.2e} up to {SHORT}, {last:.2e} at {LONG}, x {last / first:.2f}; state {state:.2e}"
        )
        assert last <= 1.5 * first, name


@pytest.mark.parametrize("mode", ["chunk", "recurrent"])
def test_errors_do_not_grow_with_length(mode):
    hold_drift(mode, drift("kda", np.float32, mode=mode))


@pytest.mark.gpu
@pytest.mark.parametrize("op", ["kda", "gated_delta_rule"])
def test_errors_of_kernels_do_not_grow_with_length(op):
    hold_drift(op, drift(op, ml_dtypes.bfloat16, implementation="mosaic"))


def hard_keys(kind, T, H=16, seed=0):
    rng = np.random.default_rng(seed)
    key = rng.standard_normal((1, T, 1, H))
    if kind == "one key":
        key = np.broadcast_to(key[:, :1], key.shape)
    if kind == "cosine 0.9":
        key = key + 3 * rng.standard_normal(H)
    return (key / np.linalg.norm(key, axis=-1, keepdims=True)).astype(np.float32)


@pytest.mark.parametrize("op", ["kda", "gated_delta_rule"])
def test_repeated_and_nearly_collinear_keys(op):
    """A gate of about 0, values of period 16, β of 1 and of 2: powers of I + L would explode."""
    T = 1024
    run = quickly(lambda x: getattr(linear, op)(**x, return_final_state=True))
    for kind in ("one key", "cosine 0.9"):
        for beta in (1.0, 2.0):
            p = problem(op, B=1, T=T, K=1, N=1, state=False)
            key = hard_keys(kind, T)
            value = np.tile(p.value[:, :16], (1, T // 16, 1, 1))
            g = np.full_like(p.g, -6e-6)
            own = oracle_linear.Problem(p.query, key, value, g, np.full_like(p.beta, beta))
            x = own.arrays() | ({} if op == "kda" else {"g": g[..., 0]})
            out, state = run(x)
            truth, states = oracle_linear.forward(own)
            yards = list(baseline_linear.gradients(own, *cotangents(own)))
            compare.check(f"{kind} {beta} out", out, truth, [y["out"] for y in yards], np.float32)
            compare.check(f"{kind} {beta} state", state, states[-1], [y["state"] for y in yards], np.float32)


def test_what_is_forgotten_has_weight_zero():
    """exp(A_log) = 72: within 16 tokens the decay passes e^-87, where clamped exponents would remember."""
    p = problem("kda", B=1, T=80, K=1, N=1, gate="softplus")
    x = p.arrays() | {"A_log": np.full(1, np.log(72.0), np.float32), "initial_state": p.initial_state}
    x["g"] = np.maximum(x["g"], 0)
    run = quickly(lambda x: call("kda", p, x, return_final_state=True))
    own = oracle_linear.Problem(**x, gate="softplus")
    out, state = run(x)
    truth, states = oracle_linear.forward(own)
    compare.check("out", out, truth, [np.asarray(call("kda", p, x, mode="recurrent"))], np.float32)
    other = dict(x, value=x["value"].copy(), initial_state=x["initial_state"] * 100)
    other["value"][:, 0] *= 100
    changed, end = run(other)
    assert np.abs(np.asarray(changed - out)[:, :1]).max() > 1
    np.testing.assert_array_equal(changed[:, 20:], out[:, 20:])
    np.testing.assert_array_equal(end, state)


@pytest.mark.parametrize("op", ["gla", "simple_gla"])
def test_a_long_sequence_of_ordinary_and_of_forgetting_gates(op):
    T, H = 8192, 16
    for kind in ("model", "forgetting"):
        p = problem(op, B=1, T=T, K=1, N=1, H=H, D=H, gates=kind)
        out, state = call(op, p, return_final_state=True)
        truth, final = oracle_linear.last(p)
        recurrent, end = call(op, p, mode="recurrent", return_final_state=True)
        compare.check(f"{kind} out", out, truth, [np.asarray(recurrent)], np.float32)
        compare.check(f"{kind} state", state, final, [np.asarray(end)], np.float32)


def test_one_key_for_ever():
    """β = 1 and no decay: the state holds the last value under that key, after any number of tokens."""
    T, H = 16_384, 8
    key = jnp.asarray(hard_keys("one key", T, H))
    value = jnp.asarray(np.random.default_rng(0).standard_normal((1, T, 1, 4)), jnp.float32)
    _, state = quickly(lambda k, v: linear.delta_rule(k, k, v, jnp.ones((1, T, 1)), return_final_state=True))(
        key, value
    )
    want = np.asarray(key)[0, -1, 0][:, None] * np.asarray(value)[0, -1, 0]
    assert np.abs(np.asarray(state)[0, 0] - want).max() <= 1e-6 * np.abs(value).max()

"""Where sequences end: packed, cut in two, in segments, empty, of one token; and bits that depend on nothing else."""

import dataclasses
import functools

import baseline_linear
import compare
import jax
import jax.numpy as jnp
import numpy as np
import oracle_linear
import pytest
from linear_cases import (
    call,
    check,
    cotangents,
    hold,
    problem,
    pullback,
    quick_compiles,  # noqa: F401 -- for every test here
    quickly,
)

from jattn import linear

MODEL = dict(gate="bounded", qk_l2norm=True, beta_activation="sigmoid2")
MODES = ("chunk", "recurrent")
TOKENS = ("query", "key", "value", "g", "beta")
T, M = 200, 5
# Empty, one token, one short of a chunk, one more than a chunk, two tokens; 69 tokens belong to nobody.
CU = np.array([3, 3, 4, 67, 132, 134])


def bits(a, b, message=""):
    np.testing.assert_array_equal(np.asarray(a).view(np.uint8), np.asarray(b).view(np.uint8), err_msg=message)


@functools.cache
def packed_problem(op="kda"):
    """Arrays of T tokens in one row, with an initial state for each of M sequences."""
    p = problem(op, B=1, T=T, **MODEL)
    h0 = np.random.default_rng(8).standard_normal((M, *p.initial_state.shape[1:])).astype(np.float32)
    return dataclasses.replace(p, initial_state=h0)


@functools.cache
def packed(mode, op="kda", gradients=False):
    """Compiled: (arrays, cu, dout, dfinal) -> (out, states), gradients."""
    p = packed_problem(op)

    def run(x, cu):
        x = {name: a[0] if name in TOKENS else a for name, a in x.items()}
        own = dataclasses.replace(p, **{name: None for name in ("initial_state",)})
        return call(op, own, x, cu_seqlens=cu, return_final_state=True, mode=mode)

    def with_gradients(x, cu, dout, dfinal):
        results, pull = jax.vjp(lambda x: run(x, cu), x)
        return results, pull((dout, dfinal))[0]

    return quickly(with_gradients if gradients else run)


def alone(m):
    """Offsets with which sequence m is the only one that is not empty."""
    return np.array([CU[m]] * (m + 1) + [CU[m + 1]] * (M - m))


def poisoned(x, keep):
    """The arrays with NaN in every token out of the range `keep`."""
    x = dict(x)
    for name in TOKENS:
        x[name] = x[name].copy()
        x[name][:, : keep[0]] = x[name][:, keep[1] :] = np.nan
    return x


@pytest.mark.parametrize("mode", MODES)
def test_outputs_of_a_prefix_are_those_of_the_whole(mode):
    """Bit for bit, and going on from the state of any prefix gives the rest."""
    x, run = packed_problem().arrays(), packed(mode)
    offsets = lambda a, b: np.array([a, b, b, b, b, b])  # noqa: E731
    whole, final = run(x, offsets(0, T))
    dense = dataclasses.replace(packed_problem(), initial_state=x["initial_state"][:1])
    truth, states = oracle_linear.forward(dense)
    for t in (0, 1, 2, 17, 63, 64, 65, 127, 128, 199):
        out, state = run(poisoned(x, (0, t)), offsets(0, t))
        bits(out[:t], whole[:t], t)
        assert not np.any(out[t:])
        rest = x | {"initial_state": np.concatenate([state[:1], x["initial_state"][1:]])}
        out, end = run(poisoned(rest, (t, T)), offsets(t, T))
        compare.check(f"from {t}", out[t:], truth[0, t:], [whole[t:]], np.float32)
        compare.check(f"end from {t}", end[0], states[-1][0], [final[0]], np.float32)


@pytest.mark.parametrize("mode", MODES)
def test_packed_sequences_are_each_alone(mode):
    """Bit for bit, whatever the others are; empty ones keep their state."""
    x, run = packed_problem().arrays(), packed(mode)
    out, states = run(poisoned(x, (CU[0], CU[-1])), CU)
    assert not np.any(out[: CU[0]]) and not np.any(out[CU[-1] :])
    bits(states[0], x["initial_state"][0])
    for m in range(1, M):
        rows = slice(CU[m], CU[m + 1])
        own, own_states = run(poisoned(x, (CU[m], CU[m + 1])), alone(m))
        bits(out[rows], own[rows], m)
        bits(states[m], own_states[m], m)


def test_gradients_of_packed_sequences():
    """Bit for bit those of the sequence alone, packed or not, whatever its neighbours hold."""
    p, run, m = packed_problem("gated_delta_rule"), packed("chunk", "gated_delta_rule", gradients=True), 3
    a, b = CU[m], CU[m + 1]
    rng = np.random.default_rng(9)
    dout = rng.standard_normal((T, *p.value.shape[2:])).astype(np.float32)
    dfinal = rng.standard_normal(p.initial_state.shape).astype(np.float32)
    _, got = run(poisoned(p.arrays(), (CU[0], CU[-1])), CU, dout, dfinal)
    for name in TOKENS:
        assert not np.any(got[name][:, : CU[0]]) and not np.any(got[name][:, CU[-1] :])
    bits(got["initial_state"][0], dfinal[0])
    _, own = run(poisoned(p.arrays(), (a, b)), alone(m), dout, dfinal)
    one = dataclasses.replace(p.tokens(a, b), initial_state=p.initial_state[m : m + 1])
    _, dense = pullback("gated_delta_rule", one)(one.arrays(), dout[None, a:b], dfinal[m : m + 1])
    for name in TOKENS:
        bits(got[name][:, a:b], own[name][:, a:b], name)
        bits(got[name][:, a:b], dense[name], name)
    bits(got["initial_state"][m], own["initial_state"][m])
    bits(got["initial_state"][m], dense["initial_state"][0])
    for name in ("A_log", "dt_bias"):
        bits(own[name], dense[name], name)


def test_wild_offsets_read_nothing_outside():
    x, run = packed_problem().arrays(), packed("chunk")
    for cu in ([0, 10**9, -5, T, 2, 7], [T, 0, T, 0, T, 0], [-9, -9, -9, -9, -9, 300]):
        out, states = run(x, np.array(cu))
        assert np.isfinite(out).all() and np.isfinite(states).all()


def test_repeats_are_bit_equal():
    x, run = packed_problem().arrays(), packed("chunk")
    first = jax.tree.map(np.asarray, run(x, CU))
    for _ in range(50):
        jax.tree.map(bits, run(x, CU), first)


SEGMENTS = np.array([7] * 3 + [7] * 20 + [2] + [7] * 41 + [0] * 70 + [1] * 15)  # 7 comes back; one has one token


@pytest.mark.parametrize(
    "op, modes", [pytest.param("kda", ("chunk",), marks=pytest.mark.slow), ("gated_delta_rule", MODES)]
)
def test_segments_start_anew(op, modes):
    ids = np.stack([SEGMENTS, np.zeros_like(SEGMENTS)])
    resets = np.concatenate([np.zeros((2, 1), bool), ids[:, 1:] != ids[:, :-1]], axis=1)
    check(op, dataclasses.replace(problem(op, K=4, gates="mixed"), resets=resets), modes)


@pytest.mark.parametrize("mode", MODES)
def test_no_tokens_at_all(mode):
    p = problem("gated_delta_rule", B=2, T=0, **MODEL)
    dout, dfinal = cotangents(p)
    (out, state), got = pullback("gated_delta_rule", p, mode=mode)(p.arrays(), dout, dfinal)
    assert out.shape == p.value.shape
    bits(state, p.initial_state)
    bits(got["initial_state"], dfinal)
    assert not np.any(got["A_log"]) and not np.any(got["dt_bias"])


def test_no_sequences_at_all():
    p = dataclasses.replace(packed_problem("gated_delta_rule"), initial_state=None)
    x = {name: a[0] if name in TOKENS else a for name, a in p.arrays().items()}
    run = lambda x: call("gated_delta_rule", p, x, cu_seqlens=np.zeros(1, int), return_final_state=True)  # noqa: E731
    (out, states), pull = jax.vjp(run, x)
    assert not np.any(out) and states.shape == (0, *packed_problem().initial_state.shape[1:])
    assert not any(np.any(d) for d in pull((out, states))[0].values())


@pytest.mark.parametrize("mode", MODES)
def test_bits_do_not_depend_on_the_batch(mode):
    """Neither on how many rows there are nor on where the row is."""
    p = problem("kda", B=4, T=70, **MODEL)
    run = quickly(lambda x: call("kda", p, x, return_final_state=True, mode=mode))
    out, state = run(p.arrays())
    rows = [3]
    got, end = run({n: a[rows] if n in (*TOKENS, "initial_state") else a for n, a in p.arrays().items()})
    bits(got, out[np.array(rows)], mode)
    bits(end, state[np.array(rows)], mode)


@pytest.mark.slow
def test_checkpoints_are_the_states_in_between():
    """The yardstick is that of the call without them."""
    p = problem("gated_delta_rule", **MODEL)
    _, states = oracle_linear.forward(p)
    offsets = np.array([[0, 64, 128], [128, 128, 0]])
    dout, dfinal = cotangents(p)
    dstates = np.random.default_rng(4).standard_normal((2, 3, *states.shape[2:])).astype(np.float32)

    def run(x, dstates):
        options = dict(checkpoints=offsets, return_final_state=True)
        results, pull = jax.vjp(lambda x: call("gated_delta_rule", p, x, **options), x)
        return results, pull((dout, dfinal, dstates))[0]

    (_, _, found), got = quickly(run)(p.arrays(), dstates)
    plain = oracle_linear.backward(p, dout, dfinal)
    errors = [{n: y[n] - plain[n] for n in got} for y in baseline_linear.gradients(p, dout, dfinal)]
    by_count = {n: np.zeros(states.shape[1:]) for n in (0, 64, 128)}
    for b, row in enumerate(offsets):
        for i, n in enumerate(row):
            compare.check(f"state {b} {i}", found[b, i], states[n, b], [states[n, b]], np.float32)
            by_count[n][b] += dstates[b, i]
    truth = oracle_linear.backward(p, dout, dfinal, by_count)
    hold("chunk", got, truth, [{n: truth[n] + e[n] for n in got} for e in errors], np.float32)


def test_checkpoints_of_packed_sequences():
    """Offsets in a device array cannot be checked: what does not exist is NaN."""
    p = packed_problem()
    x = {name: a[0] if name in TOKENS else a for name, a in p.arrays().items()}
    cu = np.array([0, 130, 130, 194, 200, 200])
    offsets = jnp.array([[64, 128], [0, 64], [64, 1], [0, -64], [0, 2**30]])
    own = dataclasses.replace(p, initial_state=None)
    run = quickly(lambda x, c: call("kda", own, x, cu_seqlens=cu, checkpoints=c, return_final_state=True))
    _, states, found = run(x, offsets)
    exists = np.array([[1, 1], [1, 0], [1, 0], [1, 0], [1, 0]], bool)
    assert np.isnan(found[~exists]).all() and np.isfinite(found[exists]).all()
    bits(found[2, 0], states[2])
    for m in (1, 3, 4):
        bits(found[m, 0], p.initial_state[m])
    prefix = packed("chunk")
    for i, n in enumerate((64, 128)):
        bits(found[0, i], prefix(p.arrays(), np.array([0, n, n, n, n, n]))[1][0])


def test_sequences_of_one_token():
    """As many as there are tokens: each is one step from its own state."""
    n = 70
    p = problem("kda", B=n, T=1, **MODEL)
    x = {name: a[:, 0] if name in TOKENS else a for name, a in p.arrays().items()}
    own = dataclasses.replace(p, initial_state=None)
    out, states = quickly(lambda x: call("kda", own, x, cu_seqlens=np.arange(n + 1), return_final_state=True))(x)
    truth, after = oracle_linear.forward(p)
    options = dict(gate="bounded", qk_l2norm=True, beta_activation="sigmoid2")
    x = {name: a for name, a in p.arrays().items() if name != "initial_state"}
    step, stepped = linear.kda_step(**x, state=p.initial_state, **options)
    compare.check("out", out, truth[:, 0], [step[:, 0]], np.float32)
    compare.check("state", states, after[1], [stepped], np.float32)


def test_sixteen_bit_states():
    p = problem("simple_gla", B=1, T=70)
    start = p.initial_state.astype(jnp.bfloat16)
    x = p.arrays() | {"initial_state": start}
    out, state = call("simple_gla", p, x, return_final_state=True, state_dtype="bfloat16")
    wide = p.arrays() | {"initial_state": start.astype(np.float32)}
    want, exact = call("simple_gla", p, wide, return_final_state=True)
    bits(out, want)
    bits(state, exact.astype(jnp.bfloat16))
    turned = wide | {"initial_state": np.swapaxes(wide["initial_state"], -1, -2)}
    out, state = call("simple_gla", p, turned, return_final_state=True, state_layout="vk")
    bits(out, want)
    bits(np.swapaxes(state, -1, -2), exact)


def test_no_batch_axis_and_many():
    p = problem("simple_gla", B=4, T=9)
    want, state = linear.simple_gla(p.query, p.key, p.value, p.g[..., 0], return_final_state=True)
    fold = lambda a: a.reshape(2, 2, *a.shape[1:])  # noqa: E731
    out, end = linear.simple_gla(*map(fold, (p.query, p.key, p.value, p.g[..., 0])), return_final_state=True)
    bits(out, fold(want))
    bits(end, fold(state))
    out = linear.simple_gla(p.query[1], p.key[1], p.value[1], p.g[1, ..., 0])
    bits(out, want[1])

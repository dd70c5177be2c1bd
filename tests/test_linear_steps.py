"""Decoding steps, the short convolution and the gates."""

import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from linear_cases import (
    BY_CHANNEL,
    DELTA,
    call,
    problem,
    quick_compiles,  # noqa: F401 -- for every test here
    quickly,
)

from jattn import linear

MODEL = dict(qk_l2norm=True, gate="bounded", beta_activation="sigmoid")
STEPS = {
    "kda": linear.kda_step,
    "gated_delta_rule": linear.gated_delta_rule_step,
    "delta_rule": linear.delta_rule_step,
    "gla": linear.gla_step,
    "simple_gla": linear.simple_gla_step,
    "linear_attention": linear.linear_attention_step,
}


def step(op, p, state, **options):
    """A step of `op` on the tokens of the problem."""
    x = {name: a for name, a in p.arrays().items() if name != "initial_state"}
    if op not in BY_CHANNEL:
        x |= {name: x[name][..., 0] for name in ("g", "dt_bias") if name in x}
    if op in DELTA:
        options |= dict(qk_l2norm=p.qk_l2norm, beta_activation=p.beta_activation)
    if op in ("kda", "gated_delta_rule"):
        options |= dict(gate=p.gate, lower_bound=p.lower_bound)
    return STEPS[op](**x, state=state, **options)


def bits(a, b):
    np.testing.assert_array_equal(np.asarray(a).view(np.uint8), np.asarray(b).view(np.uint8))


CLIPPED = MODEL | dict(gate="clipped", lower_bound=-2.5)
OPTIONS = {"kda": (MODEL, CLIPPED), "gated_delta_rule": (MODEL, CLIPPED)}


@pytest.mark.parametrize("op, options", [(op, options) for op in STEPS for options in OPTIONS.get(op, ({},))])
def test_steps_are_the_recurrent_op_bit_for_bit(op, options):
    p = problem(op, B=3, T=13, **options)
    want, final = call(op, p, mode="recurrent", return_final_state=True)
    state, found = p.initial_state, []
    for start, stop in ((0, 1), (1, 2), (2, 13)):
        out, state = step(op, p.tokens(start, stop), state)
        found.append(out)
    bits(np.concatenate(found, axis=1), want)
    bits(state, final)


def test_places_in_a_pool():
    """States are found by index, those of nobody are not touched, and a wild index is nobody's."""
    p = problem("kda", B=4, T=2, **MODEL)
    want, states = step("kda", p, p.initial_state)
    pool = np.full((9, *p.initial_state.shape[1:]), 1e30, np.float32)
    at = np.array([7, -1, 0, 2147480000])
    pool[[7, 0]] = p.initial_state[[0, 2]]
    out, after = step("kda", p, pool, state_indices=at)
    bits(out[np.array([0, 2])], want[np.array([0, 2])])
    assert not np.any(out[np.array([1, 3])])
    pool[[7, 0]] = states[np.array([0, 2])]
    bits(after, pool)


def test_tokens_that_do_not_exist():
    p = problem("kda", B=3, T=5, **MODEL)
    lengths = np.array([5, 0, 2])
    poisoned = {}
    for name in ("query", "key", "value", "g", "beta"):
        poisoned[name] = getattr(p, name).copy()
        for b, n in enumerate(lengths):
            poisoned[name][b, n:] = np.nan
    out, state = step("kda", dataclasses.replace(p, **poisoned), p.initial_state, query_seq_lengths=lengths)
    for b, n in enumerate(lengths):
        assert not np.any(out[b, n:])
        if n:
            want, after = step("kda", p.tokens(0, int(n)), p.initial_state)
            bits(out[b, :n], want[b])
            bits(state[b], after[b])
    bits(state[1], p.initial_state[1])


def test_a_donated_pool_is_updated_in_place():
    p = problem("kda", B=2, T=1, **MODEL)
    pool = jnp.zeros((64, *p.initial_state.shape[1:]))
    run = jax.jit(lambda pool, at: step("kda", p, pool, state_indices=at), donate_argnums=0)
    memory = run.lower(pool, jnp.array([3, 5])).compile().memory_analysis()
    assert memory.alias_size_in_bytes >= pool.nbytes
    assert memory.temp_size_in_bytes < pool.nbytes / 4


@pytest.mark.parametrize("layout", ["kv", "vk"])
def test_bfloat16_states_are_rounded_once_a_step(layout):
    p = problem("kda", B=2, T=1, dtype=ml_dtypes.bfloat16, **MODEL)
    turn = (lambda s: np.swapaxes(s, -1, -2)) if layout == "vk" else (lambda s: s)
    pool = p.initial_state.astype(ml_dtypes.bfloat16)
    want, exact = step("kda", p, pool.astype(np.float32))
    out, state = step("kda", p, turn(pool), state_layout=layout)
    assert out.dtype == state.dtype == ml_dtypes.bfloat16
    bits(out, want)
    bits(turn(state), exact.astype(ml_dtypes.bfloat16))


def test_decays_near_one_are_not_rounded():
    """4096 steps of a decay of 0.99992 in bfloat16 activations: the state is the true one to 1e-5."""
    T = 4096
    shape = (1, 1, 1, 8)
    k = np.zeros(shape, ml_dtypes.bfloat16)
    g = np.full((1, 1, 1), np.log(0.99992), np.float32)

    def one(state, _):
        out, state = linear.simple_gla_step(k, k, k, g, state)
        return state, None

    state, _ = quickly(lambda s: jax.lax.scan(one, s, None, length=T))(jnp.ones((1, 1, 8, 8)))
    assert np.abs(np.asarray(state) / np.exp(T * float(g[0, 0, 0])) - 1).max() <= 1e-5


def test_steps_have_no_derivatives():
    p = problem("kda", B=2, T=1, **MODEL)
    with pytest.raises(NotImplementedError, match=r"linear\.kda_step has no derivatives: linear\.kda has"):
        jax.grad(lambda s: step("kda", p, s)[0].sum())(p.initial_state)


# The short convolution


def convolved(x, weight, bias, state):
    """[T, C] in float64, by the definition."""
    W = weight.shape[1]
    past = np.concatenate([state, x]).astype(np.float64)
    return np.stack([(past[t : t + W] * weight.T).sum(0) for t in range(len(x))]) + bias, past[len(x) :]


def conv_inputs(T, M, W=4, C=6):
    rng = np.random.default_rng(3)
    return [rng.standard_normal(s).astype(np.float32) for s in ((T, C), (C, W), (C,), (M, W - 1, C))]


@pytest.mark.parametrize("W", [1, 4])
def test_short_conv_of_packed_sequences(W):
    x, weight, bias, state = conv_inputs(T=40, M=4, W=W)
    cu = np.array([3, 20, 20, 22, 37])
    poisoned = x.copy()
    poisoned[:3] = poisoned[37:] = np.nan
    y, final = linear.short_conv(poisoned, weight, bias, initial_state=state, return_final_state=True, cu_seqlens=cu)
    assert not np.any(y[:3]) and not np.any(y[37:])
    for m in range(4):
        want, last = convolved(x[cu[m] : cu[m + 1]], weight, bias, state[m]) if cu[m] < cu[m + 1] else (None, state[m])
        if want is not None:
            assert np.abs(np.asarray(y)[cu[m] : cu[m + 1]] - want).max() <= 1e-6
        bits(final[m], last.astype(np.float32))
    gradient = jax.grad(lambda w: linear.short_conv(poisoned, w, cu_seqlens=cu).sum())(weight)
    assert np.isfinite(np.asarray(gradient)).all()


def test_short_conv_dense_is_packed_and_stepwise():
    x, weight, bias, state = conv_inputs(T=24, M=2)
    dense = x.reshape(2, 12, 6)
    y, final = linear.short_conv(dense, weight, bias, initial_state=state, return_final_state=True, activation="silu")
    other, last = linear.short_conv(
        x, weight, bias, initial_state=state, return_final_state=True, activation="silu", cu_seqlens=[0, 12, 24]
    )
    bits(y, other.reshape(y.shape))
    bits(final, last)
    pool, found = np.zeros((5, *state.shape[1:]), np.float32), []
    pool[[4, 1]] = state
    at = np.array([4, 1])
    for start, stop in ((0, 1), (1, 7), (7, 12)):
        step, pool = linear.short_conv_step(
            dense[:, start:stop], weight, pool, bias, activation="silu", state_indices=at
        )
        found.append(step)
    bits(np.concatenate(found, axis=1), y)
    bits(pool[at], final)
    half, state_half = linear.short_conv_step(dense[:, :4], weight, state, bias, query_seq_lengths=[4, 1])
    assert not np.any(half[1, 1:])
    bits(state_half[1], linear.short_conv_step(dense[:, :1], weight, state, bias)[1][1])


def test_short_conv_starts_anew_at_segments():
    x, weight, bias, state = conv_inputs(T=20, M=1)
    ids = np.array([5] * 2 + [9] * 11 + [5] * 5 + [1] * 2)
    y, final = linear.short_conv(x, weight, bias, initial_state=state[0], return_final_state=True, segment_ids=ids)
    first, _ = convolved(x[:2], weight, bias, state[0])
    rest = [convolved(x[a:b], weight, bias, 0 * state[0])[0] for a, b in ((2, 13), (13, 18), (18, 20))]
    assert np.abs(np.asarray(y) - np.concatenate([first, *rest])).max() <= 1e-6
    assert not np.any(final[0]) and np.array_equal(final[1:], x[18:])


# Gates


@pytest.mark.parametrize("gate", ["softplus", "bounded"])
def test_the_gate_apart_is_the_gate_within(gate):
    """Also the built-in norm and activation of beta."""
    for op, apart in (("kda", linear.kda_gate), ("gated_delta_rule", linear.gdn_gate)):
        p = problem(op, B=1, T=20, gate=gate, qk_l2norm=True, beta_activation="sigmoid2")
        x = p.arrays()
        if op != "kda":
            x |= {name: x[name][..., 0] for name in ("g", "dt_bias")}
        g = apart(x.pop("g"), x.pop("A_log"), x.pop("dt_bias"), gate=gate)
        x |= {name: linear.l2_norm(x[name]) for name in ("query", "key")}
        got = getattr(linear, op)(**x | dict(g=g, beta=2 * jax.nn.sigmoid(x["beta"])), mode="recurrent")
        want = call(op, p, mode="recurrent")
        assert np.abs(got - want).max() <= 1e-6 * np.abs(want).max()


def test_a_clipped_gate_is_the_maximum():
    """Bit for bit. Decays at the bound or weaker keep their gradient, and those that are stronger have none."""
    for op in ("kda", "gated_delta_rule"):
        p = problem(op, B=1, T=20)
        p = dataclasses.replace(p, g=np.where(np.random.default_rng(2).random(p.g.shape) < 0.3, np.float32(-2.5), p.g))
        clipped = dataclasses.replace(p, gate="clipped", lower_bound=-2.5)
        got, pull = jax.vjp(lambda g: call(op, clipped, p.arrays() | dict(g=g)), p.g)  # noqa: B023
        want, pull_unclipped = jax.vjp(lambda g: call(op, p, p.arrays() | dict(g=g)), np.maximum(p.g, -2.5))  # noqa: B023
        bits(got, want)
        assert np.any(p.g == -2.5) and np.any(p.g < -2.5)
        bits(pull(got)[0], np.where(p.g < -2.5, 0, pull_unclipped(got)[0]))


def test_gates_at_their_ends():
    x = jnp.array([[-1e4, -100.0, 0.0, 100.0, 1e4]])
    soft = linear.kda_gate(x, jnp.zeros(1))[0]
    assert np.array_equal(soft[jnp.array([0, 3, 4])], [0, -100, -1e4]) and abs(float(soft[2]) + np.log(2)) < 1e-6
    bounded = linear.kda_gate(x, None, gate="bounded")[0]
    assert np.array_equal(bounded[jnp.array([0, 4])], [0, -5]) and float(bounded[2]) == -2.5
    assert linear.l2_norm(jnp.zeros((2, 8), jnp.bfloat16)).dtype == jnp.bfloat16
    assert not np.any(linear.l2_norm(jnp.zeros((2, 8))))

"""The Hopper kernels of the gated delta rule by chunks: emulated, compiled for an H200 without one, and on a GPU."""

import dataclasses
import functools

import aot
import baseline_linear
import compare
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import oracle_linear
import pytest
from linear_cases import call, check, cotangents, problem, quickly, repeated
from linear_cases import hold as hold_all

import jattn
from jattn import _dispatch
from jattn._linear import RULES, Context
from jattn.linear._call import describe
from jattn.pallas import linear_chunk as mosaic
from jattn.reference import linear

GATED, PLAIN = "gated_delta_rule", "delta_rule"
SIMPLE, UNGATED = "simple_gla", "linear_attention"  # without the delta rule
BF16 = ml_dtypes.bfloat16
make = functools.partial(problem, B=1, T=130, K=1, N=1, H=128, D=128, dtype=BF16, qk_l2norm=True)


def described(op, p, **options):
    x = dict(g=None, beta=None) | p.arrays()
    x |= {name: x[name][..., 0] for name in ("g", "dt_bias") if x.get(name) is not None}
    tokens = [x.pop(name) for name in ("query", "key", "value", "g", "beta")]
    x |= dict(scale=p.scale)
    if p.beta is not None:
        x |= dict(qk_l2norm=p.qk_l2norm, beta_activation=p.beta_activation)
    if op == GATED:
        x |= dict(gate=p.gate, lower_bound=p.lower_bound)
    return describe(RULES[op], *tokens, **x, **options)


def turned(p, layout):
    if layout == "kv" or p.initial_state is None:
        return p
    return dataclasses.replace(p, initial_state=np.swapaxes(p.initial_state, -1, -2))


def hold(p, out, state):
    """Against the oracle, by the error rule."""
    want, last = oracle_linear.last(p)
    yards = list(baseline_linear.gradients(p, *cotangents(p)))
    compare.check("out", np.asarray(out), want, [y["out"] for y in yards], p.query.dtype)
    compare.check("state", np.asarray(state), last, [y["state"] for y in yards], p.query.dtype)


def alike(noise, beta, T=130, seed=1):
    """Keys with a pairwise cosine of 1 / (1 + noise²), that all but erase one another, or more."""
    p, rng = make(PLAIN, T=T), np.random.default_rng(seed)
    key = rng.standard_normal(128) + noise * rng.standard_normal(p.key.shape)
    return dataclasses.replace(p, key=key.astype(BF16), beta=np.full_like(p.beta, beta))


# Emulated


def emulated(call, capfd, **options):
    assert mosaic.why_not(call.problem) is None
    out, state, checkpoints = emulation(call.options, **options)(call.arrays)
    assert checkpoints is None and "RACE" not in capfd.readouterr().out
    return out, state


@functools.cache
def emulation(options, **how):
    return quickly(lambda x: mosaic.forward(x, Context(), options, interpret=True, **how)[0])


MODEL = dict(gate="bounded", beta_activation="sigmoid2")
CASES = {
    "mixed gates": (GATED, make(GATED), {}),
    "gates at -5": (GATED, make(GATED, gates="bound"), {}),
    "gates near 0": (GATED, make(GATED, gates="slow"), {}),
    "forgetting": (GATED, make(GATED, gates="forgetting"), {}),
    "bounded gate, layout vk": (GATED, make(GATED, T=66, **MODEL), dict(state_layout="vk")),
    "clipped": (GATED, make(GATED, T=66, H=64, D=64, gate="clipped"), {}),
    "softplus, groups": (GATED, make(GATED, T=17, N=2, H=64, D=64, gate="softplus", scale=0.3), {}),
    "one token, no state": (GATED, make(GATED, T=1, state=False, qk_l2norm=False), {}),
    "without decay, beta to 2": (PLAIN, make(PLAIN), {}),
    "one key, beta 1": (PLAIN, alike(0.0, 1.0), {}),
    "one key, beta 2": (PLAIN, alike(0.0, 2.0), {}),
    "keys alike, beta 2": (PLAIN, alike(0.3, 2.0), {}),
    "keys alike, beta 1.99": (PLAIN, alike(0.5, 1.99), {}),
    "no delta rule": (SIMPLE, make(SIMPLE, qk_l2norm=False), {}),
    "no delta rule, no decay, vk": (UNGATED, make(UNGATED, T=70, D=64, qk_l2norm=False), dict(state_layout="vk")),
    "keys alike, beta 1.7": (PLAIN, alike(0.5, 1.7, T=256, seed=3), {}),  # 3.3 times the baseline's error with β in M
}


@pytest.mark.parametrize("name", CASES)
def test_is_the_recurrence(name, capfd):
    op, p, options = CASES[name]
    layout = options.get("state_layout", "kv")
    out, state = emulated(described(op, turned(p, layout), **options), capfd)
    assert out.dtype == BF16 and state.dtype == np.float32
    hold(p, out, np.swapaxes(state, -1, -2) if layout == "vk" else state)


def test_one_multiprocessor_is_bit_equal_to_many(capfd):
    """Two warpgroups of a scan share a block, and those of the other kernel have two chunks in turn."""
    call = described(GATED, make(GATED, T=70, N=3))
    one, two = (emulated(call, capfd, multiprocessors=n) for n in (132, 1))
    for x, y in zip(one, two, strict=True):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


def test_a_prefix_is_bit_equal(capfd):
    """Neither later tokens nor later chunks change an output, nor does a neighbour of NaN."""
    p = make(GATED, B=2)
    for x in p.arrays().values():
        x[1] = np.nan
    whole, _ = emulated(described(GATED, p), capfd)
    first = {name: x[:1] for name, x in p.arrays().items()}
    part, _ = emulated(described(GATED, dataclasses.replace(p, **first).tokens(0, 70)), capfd)
    np.testing.assert_array_equal(np.asarray(whole)[:1, :70], np.asarray(part))


def test_states_in_bfloat16_and_a_traced_scale(capfd):
    p = make(GATED, T=64, scale=0.2)
    state = p.initial_state.astype(BF16)
    p = dataclasses.replace(p, initial_state=state.astype(np.float32))
    call = described(GATED, dataclasses.replace(p, initial_state=state), state_dtype="bfloat16")
    call = dataclasses.replace(
        call, options=dataclasses.replace(call.options, scale=None),
        arrays=dataclasses.replace(call.arrays, scale=jnp.float32(0.2)),
    )  # fmt: skip
    out, state = emulated(call, capfd)
    assert state.dtype == BF16
    hold(p, out, state)


def test_no_tokens():
    p = make(GATED, T=64)
    call = described(GATED, p.tokens(0, 0))
    (out, state, _), rest = mosaic.forward(call.arrays, call.context, call.options)
    assert out.shape == (1, 0, 1, 128) and rest.states.shape == (1, 0, 1, 128, 128)
    np.testing.assert_array_equal(np.asarray(state), p.initial_state)
    found = mosaic.backward(call.arrays, call.context, call.options, None, (out, 2 * state, None))
    np.testing.assert_array_equal(np.asarray(found.initial_state), 2 * p.initial_state)
    assert jax.tree.map(jnp.shape, found) == jax.tree.map(jnp.shape, call.arrays)


@pytest.mark.parametrize("D", [64, 128])
def test_keeps_what_any_backward_reads(D, capfd):
    """The gradients that "xla" makes of the residuals of these kernels."""
    p = make(GATED, D=D)
    call, (dout, dfinal) = described(GATED, p), cotangents(p)
    context = Context()

    def run(arrays, *cotangents):
        results, rest = mosaic.forward(arrays, context, call.options, interpret=True)
        options = dataclasses.replace(call.options, config=linear.SpanConfig(1))
        return results[0], linear.backward(arrays, context, options, rest, (*cotangents, None))

    out, got = quickly(run)(call.arrays, dout, dfinal)
    assert "RACE" not in capfd.readouterr().out
    got = {name: x for name in p.arrays() if (x := getattr(got, name)) is not None}
    truth = oracle_linear.backward(p, dout, dfinal) | {"out": oracle_linear.last(p)[0]}
    hold_all("from residuals", got | {"out": out}, truth, list(baseline_linear.gradients(p, dout, dfinal)), BF16)


# Dispatch


@pytest.mark.parametrize(
    "reason, options, keywords",
    [
        ("not float32", dict(dtype=np.float32), {}),
        ("not H=192", dict(H=192), {}),
        ("not D=320", dict(D=320), {}),
        ("not mode='recurrent'", {}, dict(mode="recurrent")),
    ],
)
def test_refuses(reason, options, keywords):
    assert reason in mosaic.why_not(described(GATED, make(GATED, **options), **keywords).problem)


def test_is_refused_elsewhere_and_lends_a_gradient_of_the_scale():
    p = make(GATED)
    if jax.default_backend() != "gpu":
        assert _dispatch.explain(described(GATED, p).problem, None, None).implementation == "xla"
        with pytest.raises(NotImplementedError, match="for cuda alone"):
            call(GATED, p, implementation="mosaic")
    plain, traced = (described(GATED, dataclasses.replace(p, scale=s)) for s in (None, jnp.float32(0.3)))
    for call_, backward in ((plain, None), (traced, "xla")):
        options = _dispatch.resolve(call_.problem, call_.options, "mosaic", None)
        assert options.implementation == "mosaic"
        assert (options.backward and options.backward.implementation) == backward


# Compiled without a GPU

COMPILED = {
    "one warpgroup": (GATED, dict(B=1, T=200, K=32, qk_l2norm=True)),
    "two warpgroups, groups, gate, state": (
        GATED,
        dict(B=4, T=100, K=8, state=True, gate="softplus", beta_activation="sigmoid2", qk_l2norm=True),
    ),
    "narrow": (GATED, dict(B=1, T=100, K=16, H=64, D=64)),
    "without the delta rule": (SIMPLE, dict(B=4, T=100, K=16, state=True)),
    "without decay, vk, traced scale": (PLAIN, dict(B=4, T=64, K=32, state=True, layout="vk", scale=jnp.float32(0.3))),
}


def empty_call(op, B, T, K, N=32, H=128, D=128, state=False, layout="kv", gate=None, **options):
    zeros = functools.partial(jnp.zeros, dtype="bfloat16")
    if gate is not None:
        options |= dict(gate=gate, A_log=jnp.zeros(N), dt_bias=jnp.zeros(N))
    shape = (H, D) if layout == "kv" else (D, H)
    return describe(
        RULES[op], zeros((B, T, K, H)), zeros((B, T, K, H)), zeros((B, T, N, D)),
        jnp.zeros((B, T, N)) if op in (GATED, SIMPLE) else None, jnp.zeros((B, T, N)) if op in (GATED, PLAIN) else None,
        state_layout=layout,
        initial_state=jnp.zeros((B, N, *shape)) if state else None, **options,
    )  # fmt: skip


@pytest.mark.aot
@pytest.mark.parametrize("rest", [False, True])
@pytest.mark.parametrize("name", COMPILED)
def test_compiles_for_an_h200(name, rest):
    op, options = COMPILED[name]
    call = empty_call(op, **options)
    assert mosaic.why_not(call.problem) is None
    leaves, structure = jax.tree.flatten(call.arrays)
    run = lambda *x: mosaic.forward(structure.unflatten(x), call.context, call.options, rest=rest)  # noqa: E731
    found = aot.compile_for_h200(run, *leaves)
    assert found.clean, found


# On a GPU


def on_gpu(op, p, repeats=1, **options):
    """`(out, state)`; all repeats are the same, bit for bit."""
    run = jax.jit(lambda x: call(op, p, x, return_final_state=True, implementation="mosaic", **options))
    return repeated(run, p.arrays(), repeats=repeats)


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_every_case_on_a_gpu(name):
    op, p, options = CASES[name]
    layout = options.get("state_layout", "kv")
    out, state = on_gpu(op, turned(p, layout), **options)
    hold(p, out, np.swapaxes(state, -1, -2) if layout == "vk" else state)


@pytest.mark.gpu
def test_two_warpgroups_on_a_gpu():
    p = make(GATED, B=4, K=16, N=32)
    hold(p, *on_gpu(GATED, p))


@pytest.mark.gpu
def test_repeats_are_bit_equal():
    p = make(GATED, B=2, T=300, K=4, N=8)
    on_gpu(GATED, p, repeats=51)


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", [None, "mosaic"])
@pytest.mark.parametrize("scale", [None, jnp.float32(0.3)], ids=["kernels", "xla"])
def test_gradients_on_a_gpu(scale, implementation):
    """By kernels; where the scale is traced, by "xla" from what the kernels keep."""
    check(GATED, make(GATED, T=300, K=4, N=8, scale=scale), modes=("chunk",), implementation=implementation)


@pytest.mark.gpu
def test_vmap_on_a_gpu():
    p = make(GATED, B=2, state=False)
    x = p.arrays()
    x["g"] = x["g"][..., 0]
    run = functools.partial(jattn.linear.gated_delta_rule, qk_l2norm=True, implementation="mosaic")
    mapped = jax.vmap(lambda x: run(**x))({name: a[:, None] for name, a in x.items()})
    assert bool(jnp.array_equal(mapped[:, 0], run(**x)))

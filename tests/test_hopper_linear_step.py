"""The Hopper kernel of decoding steps of linear attention: emulated, compiled for an H200 without one, and on a GPU."""

import dataclasses
import functools
import re

import aot
import baseline_linear
import compare
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import oracle_linear
import pytest
from linear_cases import BY_CHANNEL, DELTA, cotangents, problem, repeated

import jattn
from jattn._linear import RULES
from jattn.linear._call import describe_step
from jattn.pallas import linear_step as mosaic

MODEL = dict(gate="bounded", qk_l2norm=True, beta_activation="sigmoid2")
SOFT = MODEL | dict(gate="softplus")
BF16 = ml_dtypes.bfloat16
OPTIONS = ("scale", "qk_l2norm", "gate", "lower_bound", "beta_activation")


def arguments(op, p):
    """Arrays and options of the problem by the names that steps take."""
    x = {name: a for name, a in p.arrays().items() if name != "initial_state"}
    if op not in BY_CHANNEL:
        x |= {name: x[name][..., 0] for name in ("g", "dt_bias") if name in x}
    return x | {name: getattr(p, name) for name in OPTIONS}


def described(op, p, state, **options):
    x = dict(g=None, beta=None) | arguments(op, p)
    tokens = [x.pop(name) for name in ("query", "key", "value", "g", "beta")]
    return describe_step(RULES[op], *tokens, state, **x, **options)


def turned(state, layout):
    return np.swapaxes(state, -1, -2) if layout == "vk" else state


def hold(op, p, out, state):
    """Against the oracle, by the error rule."""
    want, states = oracle_linear.forward(p)
    yards = list(baseline_linear.gradients(p, *cotangents(p)))
    compare.check("out", np.asarray(out), want, [y["out"] for y in yards], p.query.dtype)
    compare.check("state", np.asarray(state), states[-1], [y["state"] for y in yards], p.query.dtype)


# Emulated


def emulated(call, capfd):
    assert mosaic.why_not(call.problem) is None
    result = jax.jit(lambda step: mosaic.forward(step, call.options, interpret=True))(call.arrays)
    assert "RACE" not in capfd.readouterr().out
    return result


@pytest.mark.parametrize(
    "op, layout, dtype, options",
    [
        ("kda", "kv", np.float32, dict(MODEL)),
        ("kda", "vk", BF16, dict(SOFT)),
        ("kda", "kv", np.float32, dict(gate="clipped", qk_l2norm=True)),
        ("gated_delta_rule", "vk", np.float32, dict(SOFT)),
        ("delta_rule", "kv", np.float16, dict(qk_l2norm=True)),
        ("gla", "vk", np.float32, dict(gates="mixed")),
        ("simple_gla", "kv", np.float32, dict(gates="slow", scale=0.3)),
        ("linear_attention", "kv", np.float32, dict()),
    ],
)
def test_is_the_recurrence(op, layout, dtype, options, capfd):
    p = problem(op, B=2, T=2, K=1, N=2, H=32, D=64, dtype=dtype, **options)
    out, state = emulated(described(op, p, turned(p.initial_state, layout), state_layout=layout), capfd)
    assert out.dtype == dtype and state.dtype == np.float32
    hold(op, p, out, turned(np.asarray(state), layout))


def pooled(run):
    """Sequences with places, without one, and with fewer tokens than others; NaN in what nobody may read."""
    p = problem("kda", B=5, T=3, K=1, N=2, H=32, D=32, dtype=BF16, **MODEL)
    at, lengths = np.array([6, -1, 0, 7, 3], np.int32), np.array([3, 3, 1, 2, 0], np.int32)
    pool = np.full((7, 2, 32, 32), np.nan, np.float32)
    pool[[6, 0, 3]] = p.initial_state[[0, 2, 4]]
    arrays = {name: a.copy() for name, a in arguments("kda", p).items() if name in ("query", "key", "value", "g")}
    for x in arrays.values():
        for b, n in enumerate(lengths):
            x[b, n if at[b] in range(7) else 0 :] = np.nan
    call = described("kda", dataclasses.replace(p, **arrays), pool, state_indices=at, query_seq_lengths=lengths)
    out, after = map(np.asarray, run(call))
    kept = np.array([1, 2, 3, 4, 5])
    np.testing.assert_array_equal(after[kept].view(np.uint8), pool[kept].view(np.uint8))
    assert not out[[1, 3, 4]].any() and not out[2, 1:].any()
    for b, place, n in ((0, 6, 3), (2, 0, 1)):
        cut = {name: a[b : b + 1] for name, a in p.arrays().items() if a.shape[0] == 5}
        hold("kda", dataclasses.replace(p, **cut).tokens(0, n), out[b : b + 1, :n], after[place : place + 1])


def test_pools(capfd):
    pooled(functools.partial(emulated, capfd=capfd))


def test_states_in_bfloat16_and_a_traced_scale(capfd):
    p = problem("gated_delta_rule", B=1, T=1, K=1, N=1, H=32, D=32, dtype=BF16, scale=0.2, **SOFT)
    state = p.initial_state.astype(BF16)
    p = dataclasses.replace(p, initial_state=state.astype(np.float32))
    call = described("gated_delta_rule", p, state)
    call = dataclasses.replace(
        call, options=dataclasses.replace(call.options, scale=None),
        arrays=dataclasses.replace(call.arrays, arrays=dataclasses.replace(call.arrays.arrays, scale=jnp.float32(0.2))),
    )  # fmt: skip
    out, state = emulated(call, capfd)
    assert state.dtype == BF16
    hold("gated_delta_rule", p, out, state)


def test_decays_near_one_are_not_rounded():
    """32 tokens, 8 times: the state is the true one to 1e-6."""
    k = np.zeros((1, 32, 1, 32), np.float32)
    g = np.full((1, 32, 1), np.log(0.99992), np.float32)
    call = describe_step(RULES["simple_gla"], k, k, k, g, None, np.ones((1, 1, 32, 32), np.float32))
    run = jax.jit(lambda step: mosaic.forward(step, call.options, interpret=True)[1])
    step = call.arrays
    for _ in range(8):
        step = dataclasses.replace(step, state=run(step))
    assert np.abs(np.asarray(step.state) / np.exp(256 * np.float64(g[0, 0, 0])) - 1).max() <= 1e-6


@pytest.mark.parametrize(
    "reason, options",
    [
        ("not float64", dict(dtype=np.float64)),
        ("multiples of 32 up to 256, not H=48", dict(H=48)),
        ("multiples of 32 up to 256, not D=24", dict(D=24)),
    ],
)
def test_refuses(reason, options):
    with jax.enable_x64(True):
        p = problem("kda", **dict(B=1, T=1, K=1, N=1, H=32, D=32) | options)
        assert reason in mosaic.why_not(described("kda", p, p.initial_state).problem)


def test_is_refused_elsewhere():
    p = problem("kda", B=1, T=1, K=1, N=1, H=32, D=32)
    if jax.default_backend() != "gpu":
        with pytest.raises(NotImplementedError, match="for cuda alone"):
            jattn.linear.kda_step(**arguments("kda", p), state=p.initial_state, implementation="mosaic")
    jattn.linear.kda_step(**arguments("kda", p), state=p.initial_state)


# Compiled without a GPU

COMPILED = {
    "kda": ("kda", dict(MODEL, A_log=jnp.zeros(8), dt_bias=jnp.zeros((8, 128)))),
    "kda, vk, tokens": ("kda", dict(SOFT, A_log=jnp.zeros(8), T=4, state_layout="vk")),
    "gated_delta_rule": ("gated_delta_rule", dict(SOFT, A_log=jnp.zeros(8), T=32)),
    "delta_rule, wide": ("delta_rule", dict(H=256, D=256, T=3)),
    "delta_rule, wide, vk": ("delta_rule", dict(H=256, D=256, state_layout="vk")),
    "gla, narrow": ("gla", dict(H=64, D=96, dtype="float16")),
    "simple_gla": ("simple_gla", dict(dtype="float32", state_dtype="bfloat16")),
    "linear_attention": ("linear_attention", dict(H=32, D=128, scale=jnp.float32(0.3))),
}


def empty_call(op, B=4, T=1, K=4, N=8, H=128, D=128, dtype="bfloat16", state_dtype="float32", **options):
    zeros, rule = functools.partial(jnp.zeros, dtype=dtype), RULES[op]
    g = {"channel": jnp.zeros((B, T, N, H)), "head": jnp.zeros((B, T, N)), None: None}[rule.decay]
    beta = jnp.zeros((B, T, N)) if rule.delta else None
    shape = (H, D) if options.get("state_layout", "kv") == "kv" else (D, H)
    return describe_step(
        rule, zeros((B, T, K, H)), zeros((B, T, K, H)), zeros((B, T, N, D)), g, beta,
        jnp.zeros((B + 3, N, *shape), state_dtype), state_indices=jnp.arange(B), query_seq_lengths=jnp.full(B, T),
        **options,
    )  # fmt: skip


@pytest.mark.aot
@pytest.mark.parametrize("name", COMPILED)
def test_compiles_for_an_h200(name):
    op, options = COMPILED[name]
    call = empty_call(op, **options)
    assert mosaic.why_not(call.problem) is None
    leaves, structure = jax.tree.flatten(call.arrays)
    found = aot.compile_for_h200(lambda *x: mosaic.forward(structure.unflatten(x), call.options), *leaves)
    assert found.clean, found


@pytest.mark.aot
def test_a_donated_pool_is_updated_in_place_by_one_launch():
    call = empty_call("kda", **MODEL)
    device = aot.sharding()
    step = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device), call.arrays)

    def run(state, step):
        return mosaic.forward(dataclasses.replace(step, state=state), call.options)

    compiled = jax.jit(run, donate_argnums=0).lower(step.state, dataclasses.replace(step, state=None)).compile()
    memory, text = compiled.memory_analysis(), compiled.as_text()
    assert memory.alias_size_in_bytes >= call.arrays.state.nbytes and memory.temp_size_in_bytes < 4096
    assert not re.search(r" (?:fusion|copy|transpose)\(", text[text.index("ENTRY") :])


# On a GPU


def on_gpu(op, p, state, repeats=1, **options):
    """What a step returns; all repeats are the same, bit for bit."""
    options["state"] = state
    run = jax.jit(lambda x: getattr(jattn.linear, f"{op}_step")(**statics, **x, implementation="mosaic"))
    x = arguments(op, p) | options
    if op not in DELTA:
        x = {name: v for name, v in x.items() if name not in ("qk_l2norm", "beta_activation")}
    if op not in ("kda", "gated_delta_rule"):
        x = {name: v for name, v in x.items() if name not in ("gate", "lower_bound")}
    statics = {name: v for name, v in x.items() if name in (*OPTIONS, "state_layout")}
    return repeated(run, {name: v for name, v in x.items() if name not in statics}, repeats=repeats)


@pytest.mark.gpu
@pytest.mark.parametrize("T, H, D", [(1, 128, 128), (5, 64, 96), (32, 128, 64), (2, 256, 256)])
@pytest.mark.parametrize("layout", ["kv", "vk"])
@pytest.mark.parametrize("op", list(RULES))
def test_every_op(op, layout, T, H, D):
    options = {"kda": MODEL, "gated_delta_rule": SOFT, "delta_rule": dict(qk_l2norm=True)}.get(op, {})
    for dtype in (np.float32, BF16):
        p = problem(op, B=3, T=T, K=2, N=4, H=H, D=D, dtype=dtype, **options)
        out, state = on_gpu(op, p, turned(p.initial_state, layout), state_layout=layout)
        hold(op, p, out, turned(np.asarray(state), layout))


@pytest.mark.gpu
def test_pools_on_a_gpu():
    pooled(lambda call: jax.jit(lambda step: mosaic.forward(step, call.options))(call.arrays))


@pytest.mark.gpu
def test_repeats_are_bit_equal():
    p = problem("kda", B=64, T=2, K=4, N=8, H=128, D=128, dtype=BF16, **MODEL)
    on_gpu("kda", p, p.initial_state, repeats=51)


@pytest.mark.gpu
def test_past_two_to_the_31_elements():
    """The last place of a pool whose elements 32 bits cannot count."""
    p = problem("kda", B=1, T=1, K=1, N=1, H=128, D=128, dtype=BF16, **MODEL)
    places = 2**31 // 2**14 + 8
    pool = jnp.zeros((places, 1, 128, 128), "bfloat16").at[-1].set(p.initial_state[0].astype("bfloat16"))
    p = dataclasses.replace(p, initial_state=p.initial_state.astype(BF16).astype(np.float32))
    out, after = on_gpu("kda", p, pool, state_indices=jnp.array([places - 1]))
    hold("kda", p, out, np.asarray(after[-1:]))

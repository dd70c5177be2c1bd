"""The Hopper kernels of KDA and GLA by chunks: emulated, compiled for an H200 without one, and on a GPU."""

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

import jattn
from jattn import _dispatch
from jattn._linear import RULES, Context
from jattn.linear._call import describe
from jattn.pallas import linear_chunk as mosaic

KDA, GLA = "kda", "gla"
BF16 = ml_dtypes.bfloat16
make = functools.partial(problem, KDA, B=1, T=130, K=1, N=1, H=128, D=64, dtype=BF16, qk_l2norm=True)


def described(p, **options):
    x = dict(beta=None) | p.arrays()
    tokens = [x.pop(name) for name in ("query", "key", "value", "g", "beta")]
    x |= dict(scale=p.scale)
    if p.beta is not None:
        x |= dict(qk_l2norm=p.qk_l2norm, beta_activation=p.beta_activation, gate=p.gate, lower_bound=p.lower_bound)
    return describe(RULES[KDA if p.beta is not None else GLA], *tokens, **x, **options)


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


def alike(noise, beta):
    """Keys with a pairwise cosine of 1 / (1 + noise²), that all but erase one another, or more."""
    p, rng = make(gates="slow"), np.random.default_rng(1)
    key = rng.standard_normal(128) + noise * rng.standard_normal(p.key.shape)
    return dataclasses.replace(p, key=key.astype(BF16), beta=np.full_like(p.beta, beta))


def forgetful(log_decay):
    """Some channels of each token forget this much, the others hardly."""
    p = make(gates="slow")
    some = np.random.default_rng(3).random(p.g.shape) < 0.3
    return dataclasses.replace(p, g=np.where(some, np.float32(log_decay), p.g))


def saturated(seed=4):
    """Raw gates whose decays are exp(-5) or hardly any, in runs of tokens and channels."""
    p, rng = make(gate="bounded"), np.random.default_rng(seed)
    runs = np.repeat(rng.random((1, 13, 1, 128)) < 0.7, 10, axis=1)
    return dataclasses.replace(p, g=np.where(runs, np.float32(30), np.float32(-30)))


def straddling(p):
    """One token of each block of 16 decays by about 2^-115.5 in some channels, and the others by 2^-0.1: sums cross
    2^-116, up to which a block has one anchor, in its midst, and the tokens on both sides have weight for one another.
    """
    shape, rng = p.g.shape, np.random.default_rng(6)
    here = np.arange(shape[1])[:, None, None] % 16 == rng.integers(0, 8, shape[-1])
    log2 = np.where(here, rng.uniform(-116.2, -114.8, shape), -0.1)
    some = rng.random(shape[-1]) < np.repeat([0.1, 1.0, 0.0, 0.5], shape[-1] // 4)
    return dataclasses.replace(p, g=np.where(some, np.log(2) * log2, p.g).astype(np.float32))


def strong(p):
    """Nothing decays but, in some channels of the second and third 32, all tokens of blocks of 16 by exp(-20) or
    exp(-128) each, or a token here and there."""
    shape, rng = p.g.shape, np.random.default_rng(7)
    some = rng.random(shape[-1]) < np.repeat([0.0, 0.5, 0.5, 0.0], shape[-1] // 4)
    kinds = rng.choice([0, -20, -128], (-(-shape[1] // 16), shape[-1]))
    blocks = np.repeat(kinds, 16, axis=0)[None, : shape[1], None]
    tokens = rng.choice([0, -20, -128], shape, p=[0.8, 0.1, 0.1])
    chosen = np.where(np.arange(shape[1])[:, None, None] // 16 % 2 == 0, blocks, tokens)
    return dataclasses.replace(p, g=np.where(some, chosen, 0).astype(np.float32))


def alone(p):
    """Two tokens of one block of 16 decay by exp(-128), in one channel; each head has another block and piece of 32."""
    g = np.full_like(p.g, -1e-3)
    for head, (block, piece) in enumerate([(0, 2), (1, 0), (2, 3), (3, 1)]):
        g[:, 16 * block + 3 : 16 * block + 5, head, 32 * piece + 9 * head] = -128
    return dataclasses.replace(p, g=g)


#: Of all sizes, to the largest.
LOG_DECAYS = -np.float32([0, 1e-45, 1e-38, 1e-6, 0.1, 4.9, 5.02, 5.04, 7, 20, 88, 127.9, 128, 1e3, 1e30, 3.4028235e38])


def any_decays(p, least=-np.inf):
    """Whole blocks of 16 of one log decay in a channel, and blocks of all."""
    shape, rng = p.g.shape, np.random.default_rng(8)
    tokens = rng.choice(LOG_DECAYS, shape)
    blocks = np.repeat(rng.choice(LOG_DECAYS, (shape[0], -(-shape[1] // 16), *shape[2:])), 16, axis=1)[:, : shape[1]]
    return dataclasses.replace(p, g=np.maximum(np.where(rng.random(shape[-1]) < 0.5, tokens, blocks), least))


def loud(p):
    """Raw gates of which some are large."""
    return dataclasses.replace(p, g=np.where(np.random.default_rng(9).random(p.g.shape) < 0.1, np.float32(60), p.g))


def long_queries(p):
    """Of 1e24, which 2^58 would make infinite."""
    return dataclasses.replace(p, query=(1e24 * p.query.astype(np.float32)).astype(BF16))


CASES = {
    "mixed gates": (make(), {}),
    "gates at -5": (make(gates="bound"), {}),
    "gates near 0": (make(gates="slow"), {}),
    "forgetting": (make(gates="forgetting"), {}),
    "forgetting in some channels": (forgetful(-40), {}),
    "one key, beta 1": (alike(0.0, 1.0), {}),
    "keys alike, beta 2": (alike(0.3, 2.0), {}),
    "keys alike, beta 1.99": (alike(0.5, 1.99), {}),
    "bounded gate, layout vk": (make(T=66, gate="bounded", beta_activation="sigmoid2"), dict(state_layout="vk")),
    "bounded gate at both ends": (saturated(), {}),
    "clipped": (make(T=66, gate="clipped"), {}),
    "softplus, groups, narrow": (make(T=17, N=2, H=64, gate="softplus", scale=0.3), {}),
    "one token, no state": (make(T=1, state=False, qk_l2norm=False), {}),
    "decays about the limit of one anchor": (straddling(make(gates="slow")), {}),
    "strong decays in some blocks and channels": (strong(make()), {}),
    "a strong decay alone": (alone(make(T=64, N=4)), {}),
    "strong softplus, groups, narrow": (loud(make(T=17, N=2, H=64, gate="softplus", scale=0.3)), {}),
    "about the limit, no norm": (straddling(make(gates="slow", qk_l2norm=False)), {}),
    "long queries, no norm": (long_queries(make(gates="slow", qk_l2norm=False)), {}),
    "strong decays, no norm": (strong(make(qk_l2norm=False)), {}),
    "without the delta rule": (problem(GLA, B=1, T=130, K=1, N=1, H=128, D=64, dtype=BF16), {}),
}


# Emulated


def emulated(call, capfd, **options):
    assert mosaic.why_not(call.problem) is None
    out, state, checkpoints = emulation(call.options, **options)(call.arrays)
    assert checkpoints is None and "RACE" not in capfd.readouterr().out
    return out, state


@functools.cache
def emulation(options, **how):
    return quickly(lambda x: mosaic.forward(x, Context(), options, interpret=True, **how)[0])


@pytest.mark.parametrize("name", CASES)
def test_is_the_recurrence(name, capfd):
    p, options = CASES[name]
    layout = options.get("state_layout", "kv")
    out, state = emulated(described(turned(p, layout), **options), capfd)
    assert out.dtype == BF16 and state.dtype == np.float32
    hold(p, out, np.swapaxes(state, -1, -2) if layout == "vk" else state)


def test_two_warpgroups_a_block_are_bit_equal_to_one(capfd):
    call = described(make(T=70, D=128))
    one, two = (emulated(call, capfd, multiprocessors=n) for n in (132, 1))
    for x, y in zip(one, two, strict=True):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


@pytest.mark.parametrize("options", [{}, dict(H=64, gate="bounded")], ids=["given, wide", "bounded, narrow"])
def test_chunks_in_turn_are_bit_equal_to_one_a_warpgroup(options, capfd):
    """Eight chunks for three warpgroups."""
    p = make(T=460, **options)
    one, three = (emulated(described(p), capfd, multiprocessors=n) for n in (132, 1))
    for x, y in zip(one, three, strict=True):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))
    hold(p, *three)


def test_vectors_whose_norm_overflows_are_zero(capfd):
    p = make(T=20)
    p.query[:, 3] = p.key[:, 3] = 1e20
    out, state = emulated(described(p), capfd)
    p.query[:, 3] = p.key[:, 3] = 0
    want, last = emulated(described(p), capfd)
    np.testing.assert_array_equal(np.asarray(out), np.asarray(want))
    np.testing.assert_array_equal(np.asarray(state), np.asarray(last))


def test_what_is_forgotten_has_no_weight(capfd):
    """A token whose channels decay by exp(-1000) leaves nothing of those before it, bit for bit."""
    p = make(T=64)
    p.g[:, 37] = -1000
    other = dataclasses.replace(p, value=p.value.copy(), initial_state=2 * p.initial_state)
    other.value[:, :37] += 1
    (out, state), (changed, last) = (emulated(described(x), capfd) for x in (p, other))
    np.testing.assert_array_equal(np.asarray(out)[:, 37:], np.asarray(changed)[:, 37:])
    np.testing.assert_array_equal(np.asarray(state), np.asarray(last))


def test_a_prefix_is_bit_equal(capfd):
    """Neither later tokens nor later chunks change an output, nor does a neighbour of NaN."""
    p = make(B=2)
    for x in p.arrays().values():
        x[1] = np.nan
    whole, _ = emulated(described(p), capfd)
    first = {name: x[:1] for name, x in p.arrays().items()}
    part, _ = emulated(described(dataclasses.replace(p, **first).tokens(0, 70)), capfd)
    np.testing.assert_array_equal(np.asarray(whole)[:1, :70], np.asarray(part))


def decays_of(p, changes):
    """The problem with other log decays: of tokens and channels."""
    g = p.g.copy()
    for (tokens, channels), log_decay in changes.items():
        g[:, tokens, :, channels] = log_decay
    return dataclasses.replace(p, g=g)


SOME, OTHERS = slice(5, 40, 3), slice(70, 71)
LATER = {  # than which: what changes, and what it changes in
    "in the midst of a block": (25, {(25, SOME): -128}, {}),
    "in a channel of a block of which others are strong": (28, {(28, SOME): -90}, {(20, OTHERS): -128, (18, SOME): -3}),
    "the last of a block": (31, {(31, OTHERS): -85}, {(22, SOME): -60}),
    "all of a block": (51, {(slice(51, 64), slice(0, 128)): -20}, {}),
}


@pytest.mark.parametrize("name", LATER)
def test_a_strong_decay_changes_no_earlier_output(name, capfd):
    """Nor a bit of it, in the same block of 16."""
    token, changes, given = LATER[name]
    p = decays_of(make(gates="slow"), given)
    (mild, _), (strong, _) = (emulated(described(x), capfd) for x in (p, decays_of(p, changes)))
    np.testing.assert_array_equal(np.asarray(mild)[:, :token], np.asarray(strong)[:, :token])
    assert not np.array_equal(np.asarray(mild)[:, token], np.asarray(strong)[:, token])


def test_any_log_decay_is_as_good_as_one_of_128(capfd):
    """None is too large: all that a state held is 0 then."""
    p, least = any_decays(make()), any_decays(make(), -128)
    (out, state), (want, last) = (emulated(described(x), capfd) for x in (p, least))
    assert np.isfinite(np.asarray(out).astype(np.float32)).all() and np.isfinite(np.asarray(state)).all()
    np.testing.assert_array_equal(np.asarray(out), np.asarray(want))
    np.testing.assert_array_equal(np.asarray(state), np.asarray(last))
    hold(least, out, state)


# Dispatch


def test_has_its_own_backward(monkeypatch):
    for p in (make(), problem(GLA, B=1, T=130, K=1, N=1, H=128, D=64, dtype=BF16)):
        call = described(p)
        if jax.default_backend() != "gpu":
            assert _dispatch.explain(call.problem, None, None).implementation == "xla"
        options = _dispatch.resolve(call.problem, call.options, "mosaic", None)
        assert options.implementation == "mosaic" and options.backward is None
        with monkeypatch.context() as patch:
            patch.setattr(mosaic, "why_not_here", lambda: None)
            found = _dispatch.explain(call.problem, None, None)
        assert found.implementation == found.backward == "mosaic"
    assert "not H=192" in mosaic.why_not(described(make(H=192)).problem)


# Compiled without a GPU

COMPILED = {
    "one warpgroup": (KDA, dict(B=1, T=200, K=32, qk_l2norm=True)),
    "two warpgroups, groups, gate, vk": (
        KDA,
        dict(B=4, T=100, K=8, layout="vk", gate="softplus", beta_activation="sigmoid2", qk_l2norm=True),
    ),
    "narrow, bounded gate": (KDA, dict(B=1, T=100, K=16, H=64, D=64, gate="bounded")),
    "clipped, float32 decays": (KDA, dict(B=1, T=200, K=32, gate="clipped", decays="float32", qk_l2norm=True)),
    "without the delta rule": (GLA, dict(B=4, T=64, K=32, scale=jnp.float32(0.3))),
}


MORE = {  # shapes that have spilled registers
    "narrow": (KDA, dict(B=1, T=8192, K=32, H=64, D=64, decays="float32", qk_l2norm=True)),
    "as measured": (KDA, dict(B=4, T=4096, K=32, decays="float32", qk_l2norm=True)),
    "groups, bounded gate": (KDA, dict(B=1, T=2000, K=8, gate="bounded")),
    "bounded gate, traced scale": (
        KDA, dict(B=3, T=777, K=8, N=40, gate="bounded", scale=jnp.float32(0.3), qk_l2norm=True)
    ),
}


def empty_call(op, B, T, K, N=32, H=128, D=128, layout="kv", gate=None, decays="bfloat16", **options):
    zeros = functools.partial(jnp.zeros, dtype="bfloat16")
    if gate is not None:
        options |= dict(gate=gate)
    if gate not in (None, "clipped"):
        options |= dict(A_log=jnp.zeros(N), dt_bias=jnp.zeros((N, H)))
    shape = (H, D) if layout == "kv" else (D, H)
    return describe(
        RULES[op], zeros((B, T, K, H)), zeros((B, T, K, H)), zeros((B, T, N, D)), jnp.zeros((B, T, N, H), decays),
        jnp.zeros((B, T, N)) if op == KDA else None, state_layout=layout, initial_state=jnp.zeros((B, N, *shape)),
        **options,
    )  # fmt: skip


@pytest.mark.aot
@pytest.mark.parametrize("rest", [False, True])
@pytest.mark.parametrize("name", [*COMPILED, *MORE])
def test_compiles_for_an_h200(name, rest):
    op, options = (COMPILED | MORE)[name]
    call = empty_call(op, **options)
    assert mosaic.why_not(call.problem) is None
    leaves, structure = jax.tree.flatten(call.arrays)
    run = lambda *x: mosaic.forward(structure.unflatten(x), call.context, call.options, rest=rest)  # noqa: E731
    found = aot.compile_for_h200(run, *leaves)
    assert found.clean, found


# On a GPU


def on_gpu(p, repeats=1, **options):
    """`(out, state)`; all repeats are the same, bit for bit."""
    op = KDA if p.beta is not None else GLA
    run = jax.jit(lambda x: call(op, p, x, return_final_state=True, implementation="mosaic", **options))
    return repeated(run, p.arrays(), repeats=repeats)


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_every_case_on_a_gpu(name):
    p, options = CASES[name]
    layout = options.get("state_layout", "kv")
    out, state = on_gpu(turned(p, layout), **options)
    hold(p, out, np.swapaxes(state, -1, -2) if layout == "vk" else state)


@pytest.mark.gpu
def test_repeats_are_bit_equal():
    on_gpu(make(B=2, T=1500, K=4, N=16, D=128), repeats=51)


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", [None, "mosaic"])
@pytest.mark.parametrize("scale", [None, jnp.float32(0.3)], ids=["kernels", "xla"])
def test_gradients_on_a_gpu(scale, implementation):
    """By kernels; where the scale is traced, by "xla" from what the kernels keep."""
    check(KDA, make(T=300, K=4, N=8, D=128, scale=scale), modes=("chunk",), implementation=implementation)


@pytest.mark.gpu
def test_vmap_on_a_gpu():
    p = make(B=2, state=False)
    x = p.arrays()
    run = functools.partial(jattn.linear.kda, qk_l2norm=True, implementation="mosaic")
    mapped = jax.vmap(lambda x: run(**x))({name: a[:, None] for name, a in x.items()})
    assert bool(jnp.array_equal(mapped[:, 0], run(**x)))

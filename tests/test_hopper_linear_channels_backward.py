"""The backward of KDA and GLA by Hopper kernels: emulated, compiled for an H200 without one, and on a GPU."""

import dataclasses
import functools

import aot
import baseline_linear
import compare
import jax
import jax.numpy as jnp
import numpy as np
import oracle_linear
import pytest
from linear_cases import cotangents, hold, quickly
from test_hopper_linear_channels import (
    BF16,
    COMPILED,
    alike,
    described,
    empty_call,
    forgetful,
    make,
    straddling,
    strong,
    turned,
)

from jattn._linear import Context
from jattn.pallas import linear_chunk as mosaic
from jattn.pallas import linear_launch
from jattn.pallas.hopper import linear_channel_backward_chunk, linear_channel_backward_scores
from jattn.reference import linear as reference

SHARED_MEMORY = 233_472  # bytes of a multiprocessor

GLA = dict(beta=None, qk_l2norm=False)


def idle(p):
    """Every third token writes and erases nothing."""
    beta = p.beta.copy()
    beta[:, ::3] = 0
    return dataclasses.replace(p, beta=beta)


def at_the_bound():
    """Raw gates so large that all but some decay by exp(-5)."""
    p = make(gate="bounded")
    return dataclasses.replace(p, g=np.where(np.random.default_rng(4).random(p.g.shape) < 0.9, np.float32(30), p.g))


def short(p):
    """A chunk, and a bit of a second."""
    return p.tokens(0, 70)


CASES = {
    "forgetting in some channels": (short(forgetful(-40)), {}),
    "keys alike, beta 2": (short(alike(0.3, 2.0)), {}),
    "beta 0": (short(idle(make())), {}),
    "bounded gate at its bound": (short(at_the_bound()), {}),
    "clipped": (short(make(gate="clipped")), {}),
    "softplus, groups, narrow": (make(T=17, N=2, H=64, gate="softplus", scale=0.3), {}),
    "decays about the limit of one anchor": (short(straddling(make(gates="slow"))), {}),
    "strong decays in some blocks and channels": (short(strong(make())), {}),
    "without the delta rule, groups": (dataclasses.replace(make(T=17, N=2), **GLA), {}),
}
GPU_CASES = CASES | {
    "mixed gates": (make(), {}),
    "gates at -5": (make(gates="bound"), {}),
    "gates near 0": (make(gates="slow"), {}),
    "forgetting": (make(gates="forgetting"), {}),
    "one key, beta 1": (alike(0.0, 1.0), {}),
    "keys alike, beta 1.99": (alike(0.5, 1.99), {}),
    "bounded gate, layout vk": (make(T=66, gate="bounded", beta_activation="sigmoid2"), dict(state_layout="vk")),
    "one token, no state": (make(T=1, state=False, qk_l2norm=False), {}),
    "without the delta rule": (dataclasses.replace(make(), **GLA), {}),
}


def arguments(p, **options):
    """Call, cotangents of the output and of the final state in the call's layout."""
    layout, (dout, dfinal) = options.get("state_layout", "kv"), cotangents(p)
    dfinal = np.swapaxes(dfinal, -1, -2) if layout == "vk" else dfinal
    return described(turned(p, layout), **options), jnp.asarray(dout), jnp.asarray(dfinal)


def check(p, got, layout="kv", given=None):
    """By the error rule, against the oracle, with these cotangents or those of `cotangents`."""
    dout, dfinal = cotangents(p) if given is None else given
    found = {name: np.asarray(getattr(got, name)) for name in p.arrays()}
    if layout == "vk":
        found["initial_state"] = np.swapaxes(found["initial_state"], -1, -2)
    for name, x in p.arrays().items():
        assert found[name].dtype == x.dtype and np.isfinite(found[name].astype(np.float32)).all()
    yards = list(baseline_linear.gradients(p, dout, dfinal))
    hold("d", found, oracle_linear.backward(p, dout, dfinal), yards, p.query.dtype)


# Emulated


def residuals(arrays, options):
    """Those of the reference: one's forward may meet another's backward."""
    options = dataclasses.replace(options, config=reference.SpanConfig(1))
    return reference.forward(arrays, Context(), options, rest=True)[1]


@functools.cache
def emulation(options, **how):
    def run(arrays, dout, dfinal):
        rest = residuals(arrays, options)
        return mosaic.backward(arrays, Context(), options, rest, (dout, dfinal, None), interpret=True, **how)

    return quickly(run)


def emulated(call, dout, dfinal, capfd, **how):
    got = emulation(call.options, **how)(call.arrays, dout, dfinal)
    assert "RACE" not in capfd.readouterr().out
    return got


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_the_recurrences(name, capfd):
    p, options = CASES[name]
    check(p, emulated(*arguments(p, **options), capfd))


def sized(arguments, power):
    """With cotangents times this power of two."""
    call, *given = arguments
    return call, *(jnp.ldexp(x.astype(jnp.float32), power).astype(x.dtype) for x in given)


SIZED = {
    "gates near 0": short(make(gates="slow")),
    "bounded gate at its bound": short(at_the_bound()),
    "gates near 0, narrow": short(make(gates="slow", H=64)),
    "without the delta rule": short(dataclasses.replace(make(gates="bound"), **GLA)),
}


def check_sized(p, got, power, given=None):
    """Gradients are linear in cotangents."""
    got = jax.tree.map(lambda x: jnp.ldexp(x.astype(jnp.float32), -power).astype(x.dtype), got)
    check(p, got, given=given)


@pytest.mark.parametrize("power", [-90, -72, 70])
@pytest.mark.parametrize("name", SIZED)
def test_cotangents_of_any_size(name, power, capfd):
    p = SIZED[name]
    check_sized(p, emulated(*sized(arguments(p), power), capfd), power)


def check_a_final_state(power, run):
    """The scores of queries have no gradient then: the other square alone says that levels are needed."""
    p = SIZED["gates near 0"]
    dout, dfinal = cotangents(p)
    call, *given = sized(arguments(p), power)
    check_sized(p, run(call, 0 * given[0], given[1]), power, (0 * dout, dfinal))


def test_a_final_states_cotangent_of_any_size(capfd):
    check_a_final_state(-90, lambda *call: emulated(*call, capfd))


POWERS_OF_IDLE = [0, -20, -31, -90]


def check_idle(power, run):
    """All gradients, and those of a beta of 0 alone."""
    p = short(idle(make(gates="slow")))
    got = run(*sized(arguments(p), power))
    check_sized(p, got, power)
    mine, cts = np.asarray(jnp.ldexp(got.beta, -power))[:, ::3], cotangents(p)
    yards = [y["beta"][:, ::3] for y in baseline_linear.gradients(p, *cts)]
    compare.check("beta", mine, np.asarray(oracle_linear.backward(p, *cts)["beta"])[:, ::3], yards, p.query.dtype)


@pytest.mark.parametrize("power", POWERS_OF_IDLE)
def test_the_gradient_of_a_beta_of_0_beside_others(power, capfd):
    check_idle(power, lambda *call: emulated(*call, capfd))


def equal(x, y):
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)), x, y)


def test_two_warpgroups_a_block(capfd):
    p = make(D=128)
    check(p, emulated(*arguments(p), capfd, multiprocessors=1))


def test_a_neighbour_of_nan_is_not_seen(capfd):
    p = short(make(B=2))
    for x in p.arrays().values():
        x[1] = np.nan
    call, dout, dfinal = arguments(p)
    first = lambda x: jax.tree.map(lambda a: a[:1], x)  # noqa: E731
    alone = dataclasses.replace(call, arrays=first(call.arrays))
    equal(first(emulated(call, dout, dfinal, capfd)), emulated(alone, dout[:1], dfinal[:1], capfd))


def test_what_is_forgotten_has_no_gradient(capfd):
    """Of what comes after a token whose channels decay by exp(-1000), all gradients before it are 0, bit for bit; but
    for that of g, a difference of float32 sums."""
    p = short(make())
    p.g[:, 37] = -1000
    call, dout, dfinal = arguments(p)
    got = emulated(call, dout.at[:, :37].set(0), dfinal, capfd)
    for name in ("query", "key", "value", "beta"):
        before = np.asarray(getattr(got, name))[:, :37].astype(np.float32)
        np.testing.assert_array_equal(before, np.zeros_like(before))
    np.testing.assert_array_equal(np.asarray(got.initial_state), np.zeros_like(p.initial_state))


# Compiled without a GPU


MORE = {
    "wide": ("kda", dict(B=1, T=200, K=32, D=256)),
    "bounded gate, groups": ("kda", dict(B=1, T=100, K=8, gate="bounded", qk_l2norm=True)),
    "float32 decays": ("kda", dict(B=4, T=512, K=32, decays="float32", qk_l2norm=True)),
    # Where scores spilled while both branches of the choice of anchors kept what they share.
    "few heads": ("kda", dict(B=1, T=2000, K=8, qk_l2norm=True)),
    "few narrow heads": ("kda", dict(B=1, T=2000, K=8, H=64, D=64, decays="float32", qk_l2norm=True)),
    "many heads": ("kda", dict(B=4, T=2000, K=32, decays="float32", qk_l2norm=True)),
}


@pytest.mark.aot
@pytest.mark.parametrize("name", [*COMPILED, *MORE])
def test_compiles_for_an_h200(name):
    op, options = (COMPILED | MORE)[name]
    call = empty_call(op, **{key: x for key, x in options.items() if key != "scale"})
    plan = linear_launch.plan_of(call.arrays, call.options, 132, save=True)
    states = jax.ShapeDtypeStruct((plan.B, plan.chunks, plan.N, plan.H, plan.D), BF16)
    squares = jax.ShapeDtypeStruct((plan.B, plan.chunks, plan.N, 64, 64), BF16)
    rest = mosaic.Residuals(states, squares, squares if op == "kda" else None)
    dfinal = jax.ShapeDtypeStruct(call.arrays.initial_state.shape, "float32")
    leaves, structure = jax.tree.flatten((call.arrays, rest, (call.arrays.value, dfinal, None)))

    def run(*leaves):
        arrays, rest, cotangents = structure.unflatten(leaves)
        return mosaic.backward(arrays, call.context, call.options, rest, cotangents)

    found = aot.compile_for_h200(run, *leaves)
    assert found.clean, found


@pytest.mark.aot
@pytest.mark.parametrize("name", ["float32 decays", "bounded gate, groups", "clipped, float32 decays"])
def test_two_thread_blocks_of_scores_fit_a_multiprocessor(name):
    """With one, for a room of 1024 bytes more, they took half as long again."""
    from jax.experimental.mosaic.gpu import core

    op, options = (COMPILED | MORE)[name]
    call = empty_call(op, **options)
    plan = linear_launch.plan_of(call.arrays, call.options, 132, save=True)
    operands = call.arrays, linear_channel_backward_chunk.Parts.shapes(plan)
    leaves, structure = jax.tree.flatten(operands)

    def run(*leaves):
        arrays, parts = structure.unflatten(leaves)
        return linear_channel_backward_scores.launch(plan, linear_launch._inputs(arrays), parts)

    with core.artificial_shared_memory_limit(SHARED_MEMORY // 2 - 1024):  # a thread block has 1 KB of its own
        aot.compile_for_h200(run, *leaves)


# On a GPU


@functools.cache
def on_gpu(options, **how):
    def run(arrays, dout, dfinal):
        _, rest = mosaic.forward(arrays, Context(), options, rest=True)
        return mosaic.backward(arrays, Context(), options, rest, (dout, dfinal, None), **how)

    return jax.jit(run)


@pytest.mark.gpu
@pytest.mark.parametrize("name", GPU_CASES)
def test_every_case_on_a_gpu(name):
    p, options = GPU_CASES[name]
    call, *given = arguments(p, **options)
    check(p, on_gpu(call.options)(call.arrays, *given), options.get("state_layout", "kv"))


@pytest.mark.gpu
@pytest.mark.parametrize("power", [-90, 70])
@pytest.mark.parametrize("name", SIZED)
def test_cotangents_of_any_size_on_a_gpu(name, power):
    p = SIZED[name]
    call, *given = sized(arguments(p), power)
    check_sized(p, on_gpu(call.options)(call.arrays, *given), power)


@pytest.mark.gpu
@pytest.mark.parametrize("power", [-90, 70])
def test_a_final_states_cotangent_of_any_size_on_a_gpu(power):
    check_a_final_state(power, lambda call, *given: on_gpu(call.options)(call.arrays, *given))


@pytest.mark.gpu
@pytest.mark.parametrize("power", POWERS_OF_IDLE)
def test_the_gradient_of_a_beta_of_0_beside_others_on_a_gpu(power):
    check_idle(power, lambda call, *given: on_gpu(call.options)(call.arrays, *given))


@pytest.mark.gpu
def test_two_warpgroups_and_wide_values_on_a_gpu():
    for p in (make(B=4, K=8, N=16, D=128), make(N=2, D=256)):
        call, *given = arguments(p)
        check(p, on_gpu(call.options)(call.arrays, *given))


@pytest.mark.gpu
def test_repeats_are_bit_equal_and_so_are_two_warpgroups_a_block_to_one():
    call, *given = arguments(make(B=2, T=300, K=4, N=8, D=128))
    want = on_gpu(call.options)(call.arrays, *given)
    for _ in range(50):
        equal(on_gpu(call.options)(call.arrays, *given), want)
    equal(on_gpu(call.options, multiprocessors=1)(call.arrays, *given), want)

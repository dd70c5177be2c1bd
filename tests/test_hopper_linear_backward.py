"""The Hopper kernels of linear attention's backward, for one decay a head or none: emulated, compiled for an H200
without one, and on a GPU."""

import dataclasses
import functools

import aot
import baseline_linear
import jax
import jax.numpy as jnp
import numpy as np
import oracle_linear
import pytest
from linear_cases import call, cotangents, hold, quickly
from test_hopper_linear_chunk import GATED, PLAIN, SIMPLE, UNGATED, alike, described, empty_call, make, turned

from jattn._linear import Context, Residuals
from jattn.pallas import linear_chunk as mosaic

NAMES = "query", "key", "value", "g", "beta", "initial_state", "A_log", "dt_bias"


def gradients(call, dout, dfinal, capfd, **how):
    """Of an emulated forward and backward."""
    forward, backward = emulation(call.options, **how)
    _, rest = jax.block_until_ready(forward(call.arrays))  # two emulations at once may wait for each other
    found = backward(call.arrays, rest, dout, dfinal)
    assert "RACE" not in capfd.readouterr().out
    return {name: np.asarray(x) for name in NAMES if (x := getattr(found, name)) is not None}


@functools.cache
def emulation(options, **how):
    forward = lambda x: mosaic.forward(x, Context(), options, interpret=True, **how)  # noqa: E731
    backward = lambda x, rest, dout, dfinal: mosaic.backward(  # noqa: E731
        x, Context(), options, rest, (dout, dfinal, None), interpret=True, **how
    )
    return quickly(forward), quickly(backward)


def hold_gradients(p, found, dout, dfinal):
    truth, yards = oracle_linear.backward(p, dout, dfinal), list(baseline_linear.gradients(p, dout, dfinal))
    hold("backward", found, truth, yards, p.query.dtype)


def idle(p):
    """Every third token writes and erases nothing."""
    beta = p.beta.copy()
    beta[:, ::3] = 0
    return dataclasses.replace(p, beta=beta)


MODEL = dict(gate="bounded", beta_activation="sigmoid2")
CASES = {
    "beta 0": (GATED, idle(make(GATED, T=70, H=64, D=64)), {}),
    "one token of one head": (GATED, make(GATED, T=1, state=False), {}),
    "mixed gates": (GATED, make(GATED), {}),
    "gates at -5": (GATED, make(GATED, gates="bound"), {}),
    "gates near 0": (GATED, make(GATED, gates="slow"), {}),
    "forgetting": (GATED, make(GATED, gates="forgetting"), {}),
    "bounded gate, layout vk": (GATED, make(GATED, T=66, **MODEL), dict(state_layout="vk")),
    "clipped": (GATED, make(GATED, T=66, H=64, D=64, gate="clipped"), {}),
    "softplus, groups, narrow": (GATED, make(GATED, T=70, N=2, H=64, D=64, gate="softplus", scale=0.3), {}),
    "one token, no norm": (GATED, make(GATED, T=1, N=4, K=4, H=64, D=64, qk_l2norm=False), {}),
    "three slabs": (GATED, make(GATED, T=65, H=64, D=192), {}),
    "without decay, beta to 2": (PLAIN, make(PLAIN), {}),
    "no delta rule, forgetting": (SIMPLE, make(SIMPLE, gates="forgetting", qk_l2norm=False), {}),
    "neither delta rule nor decay, groups": (UNGATED, make(UNGATED, T=70, N=2, D=64, H=64, qk_l2norm=False), {}),
    "keys alike, beta 2": (PLAIN, alike(0.3, 2.0), {}),
    "keys alike, beta 1.7": (PLAIN, alike(0.5, 1.7, T=256, seed=3), {}),
}


@pytest.mark.parametrize("name", CASES)
def test_is_the_gradient_of_the_recurrence(name, capfd):
    op, p, options = CASES[name]
    dout, dfinal = cotangents(p)
    vk = options.get("state_layout") == "vk"
    turn = (lambda x: np.swapaxes(x, -1, -2)) if vk else lambda x: x
    found = gradients(described(op, turned(p, "vk" if vk else "kv"), **options), dout, turn(dfinal), capfd)
    assert found["query"].dtype == p.query.dtype
    if "initial_state" in found:
        found["initial_state"] = turn(found["initial_state"])
    hold_gradients(p, found, dout, dfinal)


def test_one_multiprocessor_is_bit_equal_to_many(capfd):
    """Blocks have chunks in turn, and two warpgroups of a walk share one."""
    p = make(GATED, T=66, N=2, H=64)
    one, two = (gradients(described(GATED, p), *cotangents(p), capfd, multiprocessors=n) for n in (132, 1))
    for name, x in one.items():
        np.testing.assert_array_equal(x, two[name], err_msg=name)


def test_a_neighbour_of_nan_changes_nothing(capfd):
    p = make(GATED, B=2, T=66, H=64)
    dout, dfinal = cotangents(p)
    want = gradients(described(GATED, p), dout, dfinal, capfd)
    for x in (*p.arrays().values(), dout, dfinal):
        x[1] = np.nan
    for name, x in gradients(described(GATED, p), dout, dfinal, capfd).items():
        np.testing.assert_array_equal(want[name][:1], x[:1], err_msg=name)


# Compiled without a GPU

COMPILED = {
    "one warpgroup": (GATED, dict(B=1, T=200, K=32, qk_l2norm=True)),
    "two warpgroups, groups, state": (GATED, dict(B=4, T=100, K=8, state=True, qk_l2norm=True)),
    "two warpgroups, wide": (GATED, dict(B=4, T=64, K=32, D=256, qk_l2norm=True)),
    "narrow": (GATED, dict(B=1, T=100, K=16, H=64, D=64)),
    "without the delta rule": (SIMPLE, dict(B=4, T=100, K=16, state=True)),
    "neither decay nor delta rule": (UNGATED, dict(B=1, T=100, K=32)),
    "without decay, vk": (PLAIN, dict(B=4, T=64, K=32, state=True, layout="vk", scale=0.3)),
}


@pytest.mark.aot
@pytest.mark.parametrize("name", COMPILED)
def test_compiles_for_an_h200(name):
    op, options = COMPILED[name]
    call = empty_call(op, **options)
    x, (B, T, _, H), (N, D) = call.arrays, call.arrays.query.shape, call.arrays.value.shape[2:]
    zeros = functools.partial(jnp.zeros, dtype="bfloat16")
    each = (B, -(-T // 64), N)
    rest = Residuals(zeros((*each, H, D)), None, zeros((*each, 64, 64)) if x.beta is not None else None)
    dfinal = jnp.zeros((B, N, D, H) if call.options.state_layout == "vk" else (B, N, H, D))
    leaves, structure = jax.tree.flatten((x, rest, zeros(x.value.shape), dfinal))

    def run(*leaves):
        x, rest, dout, dfinal = structure.unflatten(leaves)
        return mosaic.backward(x, Context(), call.options, rest, (dout, dfinal, None))

    found = aot.compile_for_h200(run, *leaves)
    assert found.clean, found


# On a GPU


def pulled_back(op, p, primals, dout, dfinal, **options):
    def run(primals):
        return call(op, p, primals, return_final_state=True, implementation="mosaic", **options)

    return jax.vjp(run, primals)[1]((dout, dfinal))[0]


def on_gpu(op, p, dout, dfinal, **options):
    return jax.jit(functools.partial(pulled_back, op, p, **options))(p.arrays(), dout, dfinal)


WIDE = {"four slabs": (GATED, make(GATED, D=256), {}), "two warpgroups": (GATED, make(GATED, B=4, K=16, N=32), {})}


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES | WIDE)
def test_every_case_on_a_gpu(name):
    op, p, options = (CASES | WIDE)[name]
    dout, dfinal = cotangents(p)
    vk = options.get("state_layout") == "vk"
    turn = (lambda x: np.swapaxes(x, -1, -2)) if vk else lambda x: x
    found = on_gpu(op, turned(p, "vk" if vk else "kv"), dout, turn(dfinal), **options)
    if "initial_state" in found:
        found["initial_state"] = turn(np.asarray(found["initial_state"]))
    hold_gradients(p, found, dout, dfinal)


@pytest.mark.gpu
def test_repeats_are_bit_equal():
    p = make(GATED, B=2, T=300, K=32, N=64)
    backward, arguments = jax.jit(functools.partial(pulled_back, GATED, p)), (p.arrays(), *cotangents(p))
    want = backward(*arguments)
    for _ in range(50):
        assert jax.tree.all(jax.tree.map(lambda a, b: bool(jnp.array_equal(a, b)), backward(*arguments), want))

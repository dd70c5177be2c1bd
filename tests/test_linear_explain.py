"""`explain` of linear attention: what a call runs on, and whose backward it has, is what the call itself is given."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import ShapeDtypeStruct as Array
from test_mosaic_platform import kernels

import jattn
from jattn import _dispatch, linear
from jattn._linear import RULES
from jattn.pallas import linear_chunk, linear_step

OPS = [name for name in linear.__all__ if "config" in inspect.signature(getattr(linear, name)).parameters]


@pytest.fixture(params=["alone", "beside a GPU"])
def machine(request, monkeypatch):
    if request.param == "beside a GPU":
        for module in (linear_chunk, linear_step):
            monkeypatch.setattr(module, "why_not_here", lambda: None)
    return request.param


def operands(op, dtype="bfloat16", B=(2,), H=64, D=64, columns=0):
    """The arrays that a call of `op` must have, in its own order."""
    rule, is_step = RULES[op.removesuffix("_step")], op.endswith("_step")
    T, N = 3 if is_step else 70, 4
    wide, heads = functools.partial(Array, dtype="float32"), (*B, T, N)
    shapes = dict(
        query=Array((*B, T, 2, H), dtype), key=Array((*B, T, 2, H), dtype), value=Array((*heads, D), dtype),
        g=wide((*heads, H) if rule.decay == "channel" else heads), beta=wide(heads), state=wide((2, N, H, D + columns)),
    )  # fmt: skip
    parameters = inspect.signature(getattr(linear, op)).parameters.values()
    return [shapes[p.name] for p in parameters if p.default is p.empty]


INT, NUMBER = (functools.partial(Array, dtype=dtype) for dtype in ("int32", "float32"))
# name -> op, its operands, its options, (implementation, backward) beside a GPU
CALLS = {op: (op, operands(op), {}, ("mosaic", "mosaic")) for op in OPS} | {
    "results": ("kda", operands("kda"), dict(return_final_state=True, qk_l2norm=True), ("mosaic", "mosaic")),
    "by name": ("delta_rule", operands("delta_rule"), dict(implementation="xla"), ("xla", "xla")),
    "not 16 bits": ("gla", operands("gla", "float32"), {}, ("xla", "xla")),
    "half": ("kda_step", operands("kda_step", "float16"), {}, ("mosaic", "mosaic")),
    "wide": ("kda", operands("kda", H=192), {}, ("xla", "xla")),
    "recurrent": ("gated_delta_rule", operands("gated_delta_rule"), dict(mode="recurrent"), ("xla", "xla")),
    "recompute": ("kda", operands("kda"), dict(residuals="recompute"), ("mosaic", "mosaic")),
    "packed": (
        "gated_delta_rule", operands("gated_delta_rule", B=()), dict(cu_seqlens=np.array([0, 3, 3, 70])),
        ("mosaic", "mosaic"),
    ),
    "segments": ("simple_gla", operands("simple_gla"), dict(segment_ids=INT((70,))), ("mosaic", "mosaic")),
    "checkpoints": ("simple_gla", operands("simple_gla"), dict(checkpoints=[0, 64]), ("mosaic", "xla")),
    "scale": ("delta_rule", operands("delta_rule"), dict(scale=NUMBER(())), ("mosaic", "xla")),
    "static scale": ("delta_rule", operands("delta_rule"), dict(scale=np.float32(0.3)), ("mosaic", "mosaic")),
    "gates": (
        "kda", operands("kda"), dict(gate="softplus", A_log=NUMBER((4,)), beta_activation="sigmoid", qk_l2norm=True),
        ("mosaic", "mosaic"),
    ),
    "state": ("gla", operands("gla"), dict(initial_state=NUMBER((2, 4, 64, 64))), ("mosaic", "mosaic")),
    "normalized": ("linear_attention", operands("linear_attention"), dict(normalize=True), ("mosaic", "mosaic")),
    "a column too many": (
        "linear_attention", operands("linear_attention", D=256), dict(normalize=True), ("xla", "xla"),
    ),
    "pool": ("kda_step", operands("kda_step"), dict(state_indices=INT((2,))), ("mosaic", "mosaic")),
    "normalized step": (
        "linear_attention_step", operands("linear_attention_step", columns=1), dict(normalize=True), ("xla", "xla")
    ),
}  # fmt: skip


def explained(name):
    op, arrays, options, _ = CALLS[name]
    return jattn.explain(*arrays, op=f"linear.{op}", **options)


def called(name):
    """A function of arrays that makes the call, and these, with those among its options."""
    op, arrays, options, _ = CALLS[name]
    given, count = {key: x for key, x in options.items() if isinstance(x, Array)}, len(arrays)

    def call(*x):
        return getattr(linear, op)(*x[:count], **options | dict(zip(given, x[count:], strict=True)))

    return call, [*arrays, *given.values()]


def test_every_op_is_known():
    assert len(OPS) == 2 * len(RULES)
    for op in OPS:
        assert f"linear.{op}" in _dispatch._TABLE and explained(op).problem.op == f"linear.{op}"


@pytest.mark.parametrize("name", CALLS)
def test_says_what_the_call_is_resolved_to(name, machine, monkeypatch):
    told, resolve, found = explained(name), _dispatch.resolve, []
    monkeypatch.setattr(
        _dispatch, "resolve", lambda problem, *how: found.append((problem, resolve(problem, *how))) or found[-1][1]
    )
    call, arrays = called(name)
    jax.eval_shape(call, *arrays)
    ((problem, options),) = found
    pair = options.backward or options
    assert (told.problem, told.implementation, told.config) == (problem, options.implementation, options.config)
    assert told.backward == told.sums == pair.implementation
    assert (told.implementation, told.backward) == (("xla", "xla") if machine == "alone" else CALLS[name][-1])
    assert {told.implementation, *told.refused} == {"mosaic", "xla"}


@pytest.mark.parametrize("name", ["kda", "recurrent", "packed", "checkpoints", "scale", "normalized"])
def test_kernels_are_there_where_it_says_so(name, machine):
    """Forward and backward of the call, exported for a GPU."""
    call, arrays = called(name)
    loss = lambda *x: sum(jnp.sum(y.astype(jnp.float32)) for y in jax.tree.leaves(call(*x)))  # noqa: E731
    told, forward, both = explained(name), *(kernels(f, "cuda", *arrays) for f in (call, jax.grad(loss)))
    assert (forward > 0) == (told.implementation == "mosaic") and (both > forward) == (told.backward == "mosaic")


@pytest.mark.parametrize("name", ["kda_step", "normalized step"])
def test_steps_are_kernels_where_it_says_so(name, machine):
    call, arrays = called(name)
    assert kernels(call, "cuda", *arrays) == (explained(name).implementation == "mosaic")


def test_real_arrays_are_shapes():
    arrays = [jnp.zeros(x.shape, x.dtype) for x in CALLS["delta_rule"][1]]
    assert jattn.explain(*arrays, op="linear.delta_rule").problem == explained("delta_rule").problem
    by_name = dict(zip(("query", "key", "value", "beta"), arrays, strict=True))
    assert jattn.explain(**by_name, op="linear.delta_rule").problem == explained("delta_rule").problem


PRINTED = {
    "gates": "with qk_l2norm=True, gate=softplus, beta_activation=sigmoid, mode=chunk",
    "recurrent": "with mode=recurrent",
    "packed": "with sequences=3, mode=chunk",
    "segments": "with segments=True, mode=chunk",
    "checkpoints": "with checkpoints=2, mode=chunk",
}


@pytest.mark.parametrize("name", PRINTED)
def test_prints_what_matters(name):
    told = explained(name)
    first, second, third, *_ = repr(told).splitlines()
    assert first == f"jattn.linear.{CALLS[name][0]}: B={told.problem.B} T=70 S=70 N=4 K=2 H=64 D=64 bfloat16"
    assert (second.strip(), third.strip()) == (PRINTED[name], f"runs on xla, {told.config}")


def test_prints_who_lends_the_backward(monkeypatch):
    monkeypatch.setattr(linear_chunk, "why_not_here", lambda: None)
    assert "its backward on xla" in repr(explained("checkpoints"))
    assert " on xla" not in repr(explained("segments"))


BETA = CALLS["delta_rule"][1][-1]
WRONG = {
    "another op's keyword": ("gla", dict(gate="softplus"), TypeError, "unexpected keyword argument 'gate'"),
    "another op's array": ("gla", dict(beta=BETA), TypeError, "unexpected keyword argument 'beta'"),
    "another kind's result": ("kda", dict(return_residual=True), TypeError, "keyword argument 'return_residual'"),
    "steps have no mode": ("kda_step", dict(mode="chunk"), TypeError, "unexpected keyword argument 'mode'"),
    "a wrong value": ("simple_gla", dict(mode="fast"), ValueError, "mode='fast' must be one of 'chunk', 'recurrent'"),
    "a wrong name": ("kda", dict(implementation="cudnn"), ValueError, "implementation='cudnn' is unknown"),
    "a wrong offset": ("kda", dict(checkpoints=[63]), ValueError, r"checkpoints=\[63\] must be multiples of 64"),
    "a wrong flag": ("linear_attention", dict(normalize=1), TypeError, "normalize=1 must be a Python bool"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_are_those_of_the_call(name):
    op, options, error, sentence = WRONG[name]
    arrays = CALLS[op][1]
    with pytest.raises(error, match=sentence):
        jattn.explain(*arrays, op=f"linear.{op}", **options)
    with pytest.raises(error, match=sentence):
        jax.eval_shape(lambda *x: getattr(linear, op)(*x, **options), *arrays)


def test_a_missing_array_is_named():
    with pytest.raises(TypeError, match="missing a required argument: 'beta'"):
        jattn.explain(*CALLS["kda"][1][:-1], op="linear.kda")
    with pytest.raises(ValueError, match="op='kda' is unknown; choose from .*'linear.kda'"):
        jattn.explain(*CALLS["kda"][1], op="kda")

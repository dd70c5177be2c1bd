"""Linear attention among JAX's transformations, over devices, and its refusals."""

import dataclasses
import doctest
import inspect
import re
import types

import compare
import jax
import jax.numpy as jnp
import numpy as np
import oracle_linear
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from linear_cases import (
    OPS,
    call,
    cotangents,
    problem,
    pullback,
    quick_compiles,  # noqa: F401 -- for every test here
    quickly,
)

import jattn
from jattn import _dispatch, linear
from jattn._linear import RULES

MODEL = dict(gate="bounded", qk_l2norm=True, beta_activation="sigmoid2")
GATHERS = ("all-gather", "all-to-all", "collective-permute")


def bits(a, b, message=""):
    np.testing.assert_array_equal(np.asarray(a).view(np.uint8), np.asarray(b).view(np.uint8), err_msg=message)


def mesh_of(shape, names, mode=AxisType.Auto):
    return jax.make_mesh(shape, names, axis_types=(mode,) * len(names), devices=jax.devices()[: int(np.prod(shape))])


# Transformations


@pytest.mark.slow
def test_residuals_and_rematerialisation_change_no_bit():
    p = problem("delta_rule", B=1, T=70)
    dout, dfinal = cotangents(p)
    _, saved = pullback("delta_rule", p)(p.arrays(), dout, dfinal)
    _, again = pullback("delta_rule", p, residuals="recompute")(p.arrays(), dout, dfinal)
    run = jax.checkpoint(lambda x: call("delta_rule", p, x, return_final_state=True))
    remat = quickly(lambda x: jax.vjp(run, x)[1]((dout, dfinal))[0])(p.arrays())
    for name in saved:
        bits(saved[name], again[name], name)
        bits(saved[name], remat[name], name)


@pytest.mark.slow
def test_vmap_is_the_loop():
    """Over tokens and parameters together, with the gradient."""
    p = problem("gated_delta_rule", B=3, T=9, **MODEL)
    run = lambda x: call("gated_delta_rule", p, x, mode="recurrent")  # noqa: E731
    x = {n: a[:, None] if a.ndim > 2 else a for n, a in p.arrays().items()}
    mapped = {n: 0 if a.ndim > 2 else None for n, a in x.items()}

    def loss(x):
        return jnp.sum(jnp.sin(run(x)))

    got = quickly(jax.vmap(jax.grad(loss), in_axes=(mapped,)))(x)
    one = quickly(jax.grad(loss))
    for b in range(3):
        want = one({n: a[b] if mapped[n] == 0 else a for n, a in x.items()})
        for name, g in want.items():
            assert np.abs(got[name][b] - g).max() <= 1e-6 * np.abs(g).max(), name


@pytest.mark.slow
def test_scan_eval_shape_and_export():
    p = problem("gla", B=1, T=70)
    spec = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), p.arrays())
    f = jax.jit(jax.grad(lambda x: jnp.sum(call("gla", p, x))))
    assert jax.eval_shape(f, spec)["g"].shape == p.g.shape
    exported = jax.export.export(f, platforms=["tpu"])(spec)
    assert exported.platforms == ("tpu",)

    def layer(h, _):
        return h + linear.simple_gla(h, h, h, -jnp.ones(4), scale=0.01), None

    h = jnp.asarray(p.value[..., :16])
    found, _ = quickly(lambda h: jax.lax.scan(layer, h, None, length=2))(h)
    want = quickly(lambda h: layer(layer(h, None)[0], None)[0])(h)
    assert np.abs(found - want).max() <= 1e-6 * np.abs(want).max()


def test_a_traced_scale_has_a_gradient_and_does_not_compile_again():
    p = problem("simple_gla", B=1, T=20)
    count = []

    @jax.jit
    def run(scale):
        count.append(1)
        return jnp.sum(
            call("simple_gla", dataclasses.replace(p, scale=None), p.arrays()) if scale is None else _scaled(scale)
        )

    def _scaled(scale):
        return linear.simple_gla(p.query, p.key, p.value, p.g[..., 0], scale=scale, initial_state=p.initial_state)

    gradient = float(jax.grad(run)(jnp.float32(0.3)))
    want = np.sum(np.asarray(_scaled(1.0), np.float64))
    assert abs(gradient - want) <= 1e-5 * np.abs(np.asarray(_scaled(1.0))).sum()
    before = len(count)
    run(jnp.float32(0.5))
    run(jnp.float32(0.7))
    assert len(count) <= before + 1


def test_derivatives_that_are_refused():
    p = problem("simple_gla", B=1, T=3)
    loss = lambda v: jnp.sum(call("simple_gla", p, p.arrays() | {"value": v}) ** 2)  # noqa: E731
    with pytest.raises(NotImplementedError, match="second derivatives are not implemented"):
        jax.hessian(loss)(p.value)
    with pytest.raises(TypeError, match="jvp"):
        jax.jvp(loss, (p.value,), (p.value,))


def test_float64():
    if not jax.config.jax_enable_x64:
        with jax.enable_x64(True):
            return test_float64()
    p = problem("gated_delta_rule", B=1, T=70, dtype=np.float64, gates="mixed")
    dout, dfinal = cotangents(p)
    truth = oracle_linear.backward(p, dout, dfinal)
    (out, state), got = pullback("gated_delta_rule", p)(p.arrays(), dout, dfinal)
    assert out.dtype == state.dtype == np.float64
    for name, g in got.items():
        want = truth[name].reshape(g.shape)
        assert np.abs(g - want).max() <= 1e-13 * max(np.abs(truth[name]).max(), truth["terms"].get(name, 0))


@pytest.mark.slow
def test_memory_grows_with_tokens():
    """No state a token, and no more than its share for twice the tokens."""

    def temporary(T):
        x = [jax.ShapeDtypeStruct((1, T, 2, 64), jnp.bfloat16)] * 3 + [jax.ShapeDtypeStruct((1, T, 2), jnp.float32)]
        f = quickly(jax.grad(lambda *x: jnp.sum(linear.simple_gla(*x).astype(jnp.float32)), (0, 1, 2, 3)))
        return f.lower(*x).compile().memory_analysis().temp_size_in_bytes, 3 * T * 2 * 64 * 2

    (small, _), (large, inputs) = temporary(4096), temporary(8192)
    assert large <= 2.1 * small
    assert large <= 6 * inputs


def test_shapes_past_two_to_the_31_elements_lower():
    tokens = (8, 37_450, 56)
    x = [jax.ShapeDtypeStruct((*tokens, 128), jnp.bfloat16)] * 3 + [jax.ShapeDtypeStruct(tokens, jnp.bfloat16)]
    f = jax.jit(jax.grad(lambda *x: jnp.sum(linear.delta_rule(*x).astype(jnp.float32))))
    assert "8x37450x56x128xbf16" in f.lower(*x).as_text()


# Devices


@pytest.mark.slow
@pytest.mark.parametrize("mode", [AxisType.Auto, AxisType.Explicit])
def test_sharded_batch_and_heads_are_not_gathered(mode):
    op, options = ("gated_delta_rule", MODEL) if mode == AxisType.Auto else ("simple_gla", {})
    p = problem(op, B=4, T=70, K=4, N=4, **options)
    mesh = mesh_of((2, 4), ("x", "y"), mode)
    axes = {"A_log": P("y"), "dt_bias": P("y", None), "initial_state": P("x", "y")}
    x = {n: jax.device_put(a, NamedSharding(mesh, axes.get(n, P("x", None, "y")))) for n, a in p.arrays().items()}

    def loss(x):
        out, state = call(op, p, x, return_final_state=True)
        return jnp.sum(out * out) + jnp.sum(state)

    with jax.set_mesh(mesh):
        compiled = quickly(jax.grad(loss)).lower(x).compile()
        got = compiled(x)
    assert not re.findall("|".join(GATHERS), compiled.as_text())
    want = quickly(jax.grad(loss))(p.arrays())
    for name, g in want.items():
        assert np.abs(np.asarray(got[name]) - g).max() <= 1e-5 * np.abs(g).max(), name


@pytest.mark.slow
def test_a_sequence_over_four_devices():
    """Affine maps, gathered and composed, with all gradients: the error rule of one device."""
    op = "gated_delta_rule"
    p = problem(op, B=2, T=160, K=4, qk_l2norm=True)
    dout, dfinal = cotangents(p)
    mesh = mesh_of((4,), ("s",))
    tokens = {n: P(None, "s") for n in ("query", "key", "value", "g", "beta", "initial_state")}
    x = p.arrays()
    specs = {n: P() if n == "initial_state" else tokens[n] for n in x}

    def part(x):
        x = dict(x)
        affine = linear.affine_map(op, x["key"], x["value"], x["g"][..., 0], x["beta"], qk_l2norm=True)
        x["initial_state"] = linear.entering_state(affine, "s", x["initial_state"])
        out, state = call(op, p, x, return_final_state=True)
        return out, state[None]

    whole = jax.shard_map(part, mesh=mesh, in_specs=(specs,), out_specs=(P(None, "s"), P("s")))

    def run(x):
        (out, states), pull = jax.vjp(whole, x)
        dstates = jnp.zeros_like(states).at[-1].set(dfinal)
        return (out, states[-1]), pull((dout, dstates))[0]

    (out, state), got = quickly(run)(x)
    want_out, states = oracle_linear.forward(p)
    truth = oracle_linear.backward(p, dout, dfinal) | {"out": want_out, "state": states[-1]}
    (one_out, one_state), one = pullback(op, p, mode="recurrent")(x, dout, dfinal)
    one |= {"out": one_out, "state": one_state}
    for name, a in (got | {"out": out, "state": state}).items():
        compare.check(name, a, truth[name], [np.asarray(one[name])], np.float32, 4 * truth["terms"].get(name, 0.0))


def test_affine_maps_compose():
    p = problem("kda", B=1, T=40, **MODEL)
    x = p.arrays()
    options = MODEL | dict(A_log=x["A_log"], dt_bias=x["dt_bias"], mode="recurrent")
    make = quickly(lambda k, v, g, b: linear.affine_map("kda", k, v, g, b, **options))
    cut = lambda a, b: [x[n][:, a:b] for n in ("key", "value", "g", "beta")]  # noqa: E731
    first, second, whole = make(*cut(0, 20)), make(*cut(20, 40)), make(*cut(0, 40))
    both = second.after(first)
    truth = oracle_linear.forward(p)[1][-1]
    for m in (both, whole):
        assert np.abs(np.asarray(m(x["initial_state"])) - truth).max() <= 2e-6 * np.abs(truth).max()
    make = quickly(lambda k, v, g: linear.affine_map("gla", k, v, g, mode="recurrent"))
    p = problem("gla", B=1, T=40)
    x = p.arrays()
    first, second = (make(*(x[n][:, a : a + 20] for n in ("key", "value", "g"))) for a in (0, 20))
    truth = oracle_linear.forward(p)[1][-1]
    assert first.matrix.shape == first.offset.shape[:-1]
    assert np.abs(np.asarray(second.after(first)(x["initial_state"])) - truth).max() <= 2e-6 * np.abs(truth).max()


@pytest.mark.slow
def test_shard_map_with_varying_axes_checked():
    p = problem("gated_delta_rule", B=2, T=9, **MODEL)
    run = lambda x: call("gated_delta_rule", p, x, mode="recurrent")  # noqa: E731
    mesh = mesh_of((2,), ("x",))
    x = {n: a for n, a in p.arrays().items() if n != "initial_state"}
    specs = {n: P() if n in ("A_log", "dt_bias") else P("x") for n in x}

    def loss(x):
        return jnp.sum(jax.shard_map(run, mesh=mesh, in_specs=(specs,), out_specs=P("x"))(x))

    got = quickly(jax.grad(loss))(x)
    want = quickly(jax.grad(lambda x: jnp.sum(run(x))))(x)
    for name, g in want.items():
        assert np.abs(np.asarray(got[name]) - g).max() <= 1e-5 * np.abs(g).max(), name


# Normaliser, constant gates


def test_normalised_linear_attention():
    p = problem("linear_attention", B=1, T=20, K=4, state=False)
    q, k = np.abs(p.query), np.abs(p.key)
    out, state = linear.linear_attention(q, k, p.value, normalize=True, return_final_state=True)
    weights = np.tril(np.einsum("btnh,bsnh->bnts", q.astype(np.float64), k.astype(np.float64)))
    want = np.einsum("bnts,bsnd->btnd", weights / weights.sum(-1, keepdims=True), p.value.astype(np.float64))
    assert np.abs(np.asarray(out) - want).max() <= 2e-6 * np.abs(want).max()
    assert np.abs(state[..., -1] - k.sum(1)).max() <= 1e-6 * k.sum(1).max()
    step, after = linear.linear_attention_step(
        q[:, :1], k[:, :1], p.value[:, :1], jnp.zeros_like(state), normalize=True
    )
    assert step.shape == (1, 1, 4, 24) and np.abs(step - p.value[:, :1]).max() <= 1e-5 * np.abs(p.value).max()


def test_a_constant_gate_a_head():
    """RetNet's, with the gradient summed over tokens."""
    p = problem("simple_gla", B=2, T=9)
    g = np.log1p(-(2.0 ** -np.arange(5.0, 9))).astype(np.float32)
    f = lambda g: jnp.sum(jnp.sin(linear.simple_gla(p.query, p.key, p.value, g)))  # noqa: E731
    every = jax.grad(f)(np.broadcast_to(g, (2, 9, 4)))
    assert np.abs(jax.grad(f)(g) - every.sum((0, 1))).max() <= 1e-5 * np.abs(every).sum((0, 1)).max()


# Dispatch and refusals


def test_a_kernel_can_be_registered(monkeypatch):
    """A stand-in for a kernel without a backward: "xla" goes on from its residuals; it says why where it cannot run."""
    from jattn.reference import linear as reference

    def forward(arrays, context, options, *, rest):
        (out, *states), saved = reference.forward(
            arrays, context, dataclasses.replace(options, config=reference.SpanConfig(4)), rest=rest
        )
        return (7 + 0 * out, *states), saved

    kernel = types.SimpleNamespace(
        PLATFORM=None, why_not_here=lambda: None, choose=lambda problem, config: "tiles", forward=forward,
        why_not=lambda problem: None if problem.H == 16 else f"head dim H={problem.H}",
        why_not_backward=lambda problem: "none yet",
    )  # fmt: skip
    real = _dispatch.module
    monkeypatch.setitem(_dispatch._TABLE, "linear.simple_gla", {"kernel": "?", "xla": "jattn.reference.linear"})
    monkeypatch.setattr(_dispatch, "module", lambda op, name: kernel if name == "kernel" else real(op, name))
    p = problem("simple_gla", B=1, T=5)
    run = lambda p, **o: call("simple_gla", p, **o)  # noqa: E731
    assert np.all(run(p) == 7) and np.all(run(p, implementation="xla") != 7)
    got = jax.grad(lambda v: jnp.sum(call("simple_gla", p, p.arrays() | {"value": v})))(p.value)
    xla = lambda v: jnp.sum(call("simple_gla", p, p.arrays() | {"value": v}, implementation="xla"))  # noqa: E731
    want = jax.grad(xla)(p.value)
    bits(got, want)
    with pytest.raises(NotImplementedError, match="kernel: head dim H=8"):
        run(problem("simple_gla", B=1, T=5, H=8), implementation="kernel")


X, V = jnp.ones((2, 5, 2, 8), jnp.float32), jnp.ones((2, 5, 4, 6), jnp.float32)
G, BETA = -jnp.ones((2, 5, 4, 8)), jnp.ones((2, 5, 4))
WRONG = {
    "key": (dict(key=X[..., :7]), ValueError, r"key has shape \(2, 5, 2, 7\); it must equal query's"),
    "heads": (dict(value=V[:, :, :3]), ValueError, "value heads N=3 must be a multiple of query and key heads K=2"),
    "tokens": (dict(value=V[:, :4]), ValueError, "value has tokens"),
    "dtype": (dict(value=V.astype(jnp.bfloat16)), TypeError, "value dtype bfloat16 must equal query's float32"),
    "int": (dict(query=X.astype(jnp.int32)), TypeError, "query has dtype int32"),
    "g": (dict(g=G[..., 0]), ValueError, r"g has shape \(2, 5, 4\); expected \(2, 5, 4, 8\)"),
    "beta": (dict(beta=BETA[0]), ValueError, r"beta has shape \(5, 4\)"),
    "state": (dict(initial_state=jnp.ones((2, 4, 6, 8))), ValueError, r"expected \(2, 4, 8, 6\), with state_layout"),
    "float16 state": (dict(initial_state=jnp.ones((2, 4, 8, 6), jnp.float16)), TypeError, "initial_state has dtype"),
    "state_dtype": (dict(state_dtype="float16"), TypeError, "states may exceed 65504"),
    "bound": (dict(gate="bounded", lower_bound=-5.1), ValueError, r"lower_bound=-5.1 must be in \[-5, 0\)"),
    "bound 0": (dict(gate="bounded", lower_bound=0), ValueError, r"lower_bound=0 must be in \[-5, 0\)"),
    "gate": (dict(gate="tanh"), ValueError, "gate='tanh' must be one of None, 'softplus', 'bounded', 'clipped'"),
    "A_log": (dict(gate="softplus"), ValueError, "A_log=None: gate='softplus' needs one number a head"),
    "no gate": (dict(A_log=jnp.ones(4)), ValueError, "A_log belongs to another gate: with gate=None g is the log"),
    "clipped, A_log": (dict(gate="clipped", A_log=jnp.ones(4)), ValueError, "A_log .* with gate='clipped' g is"),
    "clipped, dt_bias": (dict(gate="clipped", dt_bias=jnp.ones((4, 8))), ValueError, "dt_bias .* with gate='clipped'"),
    "clipped below": (dict(gate="clipped", lower_bound=-6), ValueError, r"lower_bound=-6 must be in \[-5, 0\)"),
    "clipped, traced": (dict(gate="clipped", lower_bound=jnp.float32(-4)), TypeError, "lower_bound=.* a Python number"),
    "dt_bias": (dict(gate="bounded", dt_bias=jnp.ones(4)), ValueError, r"dt_bias has shape \(4,\); expected \(4, 8\)"),
    "mode": (dict(mode="auto"), ValueError, "mode='auto' must be one of 'chunk', 'recurrent'"),
    "residuals": (dict(residuals=None), ValueError, "residuals=None must be one of"),
    "checkpoints": (dict(checkpoints=[32]), ValueError, r"checkpoints=\[32\] must be multiples of 64"),
    "beyond": (dict(checkpoints=[64]), ValueError, "from 0 to 5 tokens"),
    "one number": (dict(checkpoints=0), ValueError, r"checkpoints have shape \(\); expected \[n\] or \[2, n\]"),
    "ends": (dict(query=X[0], key=X[0], value=V[0], cu_seqlens=[0, 5], segment_ids=[0] * 5), ValueError, "give one"),
    "packed": (dict(cu_seqlens=[0, 5]), ValueError, r"query has shape \(2, 5, 2, 8\); expected \[T, heads, H\]"),
    "ids": (dict(segment_ids=jnp.ones((2, 4), jnp.int32)), ValueError, r"segment_ids has shape \(2, 4\)"),
    "flag": (dict(return_final_state=1), TypeError, "return_final_state=1 must be a Python bool"),
    "implementation": (dict(implementation="cuda"), ValueError, "implementation='cuda' is unknown"),
    "config": (dict(config=3), TypeError, "SpanConfig"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_refused(name):
    change, error, message = WRONG[name]
    with pytest.raises(error, match=message):
        linear.kda(**dict(query=X, key=X, value=V, g=G, beta=BETA) | change)


def test_refused_elsewhere():
    wide = jnp.ones((1, 1, 1, 257))
    with pytest.raises(ValueError, match="query head dim H=257 must be at most 256"):
        linear.linear_attention(wide, wide, wide)
    half = jnp.ones((1, 2, 1, 4), jnp.float16)
    beta = jnp.ones((1, 2, 1))
    assert linear.delta_rule(half, half, half, beta).dtype == jnp.float16
    with pytest.raises(NotImplementedError, match="gradients of linear.delta_rule in float16 are not implemented"):
        jax.grad(lambda v: jnp.sum(linear.delta_rule(half, half, v, beta)).astype(jnp.float32))(half)
    pool = jnp.ones((3, 4, 8, 6))
    with pytest.raises(ValueError, match="A_log belongs to another gate: with gate='clipped'"):
        linear.kda_step(X, X, V, G, BETA, pool, state_indices=[0, 1], gate="clipped", A_log=jnp.ones(4))
    with pytest.raises(ValueError, match="gate='clipped' must be one of 'softplus', 'bounded'"):
        linear.kda_gate(G, None, gate="clipped")
    with pytest.raises(ValueError, match="state has P=3 places for B=2 sequences"):
        linear.kda_step(X, X, V, G, BETA, pool)
    with pytest.raises(ValueError, match="query length T=33 must be from 1 to 32"):
        linear.linear_attention_step(*[jnp.ones((1, 33, 1, 2))] * 3, jnp.ones((1, 1, 2, 2)))
    with pytest.raises(TypeError, match="state has dtype float16"):
        linear.kda_step(X, X, V, G, BETA, pool.astype(jnp.float16), state_indices=[0, 1])
    with pytest.raises(ValueError, match="op='attention' must be one of 'kda'"):
        linear.affine_map("attention", X, V)
    with pytest.raises(TypeError, match="scale=2.0 changes no state; affine_map takes qk_l2norm"):
        linear.affine_map("kda", X, V, G, BETA, scale=2.0)
    with pytest.raises(ValueError, match="beta was given, which gla does not have"):
        linear.affine_map("gla", X, V, G, BETA)
    with pytest.raises(ValueError, match=r"weight has shape \(3, 4\); expected \(C, W\) = \(8, W\)"):
        linear.short_conv(X[0], jnp.ones((3, 4)))


def test_checkpoints_of_packed_sequences_lie_in_them():
    """As far as both are known now: in device arrays they are data."""
    tokens, gates = jnp.ones((130, 1, 8)), (-jnp.ones((130, 1, 8)), jnp.ones((130, 1)))
    make = lambda cu, at: linear.kda(*[tokens] * 3, *gates, cu_seqlens=cu, checkpoints=at)[1]  # noqa: E731
    for at in ([[64], [128]], [64], np.array([[0], [64]])):
        with pytest.raises(ValueError, match=r"multiples of 64 from 0 to the \[70, 60\] tokens of the sequences"):
            make([0, 70, 130], at)
    states = make(jnp.array([0, 70, 130]), [64])
    assert np.isfinite(states[0]).all() and np.isnan(states[1]).all()
    np.testing.assert_array_equal(make([0, 70, 130], [[64], [0]])[0], states[0])


@pytest.mark.parametrize("mode", ["chunk", "recurrent"])
@pytest.mark.parametrize("op", RULES)
def test_no_sequences(op, mode):
    rule, tokens = RULES[op], jnp.ones((0, 5, 2, 8))
    more = {"channel": [tokens], "head": [tokens[..., 0]], None: []}[rule.decay] + [tokens[..., 0]] * rule.delta

    def run(value):
        return getattr(linear, op)(tokens, tokens, value, *more, mode=mode, return_final_state=True, checkpoints=[0])

    shapes = jax.tree.map(jnp.shape, run(tokens))
    assert shapes == ((0, 5, 2, 8), (0, 2, 8, 8), (0, 1, 2, 8, 8))
    assert jax.grad(lambda value: jnp.sum(run(value)[0]))(tokens).shape == tokens.shape


def test_large_float16_states_are_not_rounded():
    """A state of 70000, which float16 does not have, leaves as it entered."""
    half = jnp.zeros((1, 3, 1, 4), jnp.float16)
    state = jnp.full((1, 1, 4, 4), 70000.0, jnp.float32)
    _, after = linear.gla(half, half, half, jnp.zeros((1, 3, 1, 4)), initial_state=state, return_final_state=True)
    bits(after, state)


@pytest.mark.parametrize("name", linear.__all__)
def test_docstrings(name):
    thing = getattr(linear, name)
    doc = inspect.getdoc(thing)
    assert "[" in doc and "Example" in doc
    if inspect.isfunction(thing):
        assert all(word in doc for word in ("Returns:", "Raises:", "Source"))


@pytest.mark.slow
@pytest.mark.parametrize("module", ["delta", "decay", "steps", "gates", "conv", "maps"])
def test_examples_run(module):
    if not hasattr(jattn, "linear"):  # until it is among the names of the package
        jattn.linear = linear
    found = doctest.testmod(__import__(f"jattn.linear.{module}", fromlist=["x"]))
    assert found.attempted and not found.failed


def test_ops_share_names():
    """What ops have in common they call alike."""
    kda = inspect.signature(linear.kda).parameters
    for op in OPS.values():
        own = {n: q for n, q in inspect.signature(op).parameters.items() if n != "normalize"}
        assert own.keys() <= kda.keys()
        assert all((q.kind, q.default) == (kda[n].kind, kda[n].default) for n, q in own.items())


def test_bytes_of_the_roofline():
    """Of bfloat16 tokens of 128 channels with float32 gates: q, k, v, o, g and beta; of a step its state, twice."""
    from benchmarks.linear import Shape

    shape = Shape("kda", 1, 8192, 32)
    assert shape.least_bytes("bfloat16", False) == shape.token_heads * 1540
    assert shape.plan_bytes("bfloat16", True) > shape.least_bytes("bfloat16", True) > 2 * 1540 * shape.token_heads
    assert Shape("kda", 64, 1, 96, step=True).least_bytes("bfloat16", False) == 64 * 96 * 131072

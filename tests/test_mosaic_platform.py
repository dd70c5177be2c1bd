"""Where a call runs is known when it is lowered: traced beside a Hopper GPU, it may still be for another platform."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from linear_cases import quickly

import jattn
from jattn import masks, mods
from jattn.linear import simple_gla
from jattn.pallas import attention as mosaic
from jattn.pallas import linear_chunk, linear_step

Q = jax.random.normal(jax.random.key(0), (2, 64, 2, 64), jnp.bfloat16)
BIAS = jnp.ones((64, 64), jnp.float32)


@pytest.fixture
def beside_a_gpu(monkeypatch):
    """As on a machine whose default device is a Hopper GPU; what is lowered here is still for its CPU."""
    monkeypatch.setattr(mosaic, "why_not_here", lambda: None)


def attend(q, bias=None, **options):
    return jattn.attention(q, q, q, bias, is_causal=True, **options)


def named(q, bias=None):
    return attend(q, bias, implementation="mosaic")


def gradients(f):
    return jax.grad(lambda *arrays: (f(*arrays).astype(jnp.float32) ** 2).sum(), (0, 1))


def kernels(function, platform, *arrays):
    """How many kernels the function is, exported for a platform."""
    exported = jax.export.export(jax.jit(function), platforms=[platform])(*arrays)
    assert exported.platforms == (platform,)
    return jax.export.deserialize(exported.serialize()).mlir_module().count("stablehlo.custom_call @mosaic_gpu")


def test_none_is_xla_on_a_cpu_beside_a_gpu(beside_a_gpu, monkeypatch):
    """Values and gradients, with and without gradients that need out unrounded, bit for bit."""
    told, plain = jattn.explain(Q, Q, Q, BIAS), jattn.explain(Q, Q, Q)
    assert (told.implementation, told.backward, told.sums) == ("mosaic", "mosaic", "xla")
    assert "gradients of scale, bias and arrays on xla" in repr(told)
    assert (plain.backward, plain.sums) == ("mosaic", "mosaic") and " on xla" not in repr(plain)
    with monkeypatch.context() as patch:
        patch.setattr(mosaic, "why_not_backward", lambda problem: "it cannot")
        lent = jattn.explain(Q, Q, Q)
    assert (lent.implementation, lent.backward) == ("mosaic", "xla") and "its backward on xla" in repr(lent)
    xla = lambda *arrays: attend(*arrays, implementation="xla")  # noqa: E731
    for function in (lambda f: f, gradients):
        got, want = (jax.jit(function(f))(Q, BIAS) for f in (attend, xla))
        jax.tree.map(np.testing.assert_array_equal, got, want)
    got, want = (jax.grad(lambda q, f=f: f(q).astype(jnp.float32).sum())(Q) for f in (attend, xla))
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("platform, count", [("cuda", 1), ("cpu", 0), ("tpu", 0)])
def test_none_exports_for_the_platform_that_is_asked_for(beside_a_gpu, platform, count):
    """The backward kernel is a second one."""
    assert kernels(attend, platform, Q, BIAS) == count
    assert kernels(gradients(attend), platform, Q, BIAS) == 2 * count


def test_gradients_under_vmap_are_exported():
    """One forward for all, one backward in a loop."""
    assert kernels(jax.vmap(jax.grad(lambda q: named(q).astype(jnp.float32).sum())), "cuda", jnp.stack([Q, Q])) == 2


def test_a_kernel_for_several_platforms_at_once_is_refused_with_the_way_out(beside_a_gpu):
    with pytest.raises(NotImplementedError, match="'mosaic' can be lowered for cuda alone, .* one platform at a time"):
        jax.export.export(jax.jit(attend), platforms=["cpu", "cuda"])(Q)
    both = jax.jit(lambda q: attend(q, implementation="xla"))
    assert jax.export.export(both, platforms=["cpu", "cuda"])(Q).platforms == ("cpu", "cuda")


def layers(q):
    return jax.lax.scan(lambda x, _: (jax.checkpoint(named)(x), None), q, None, length=3)[0]


def test_exports_for_several_devices_go_through_shard_map():
    mesh = Mesh(np.array(jax.devices()[:2]), ("x",))
    q = jax.ShapeDtypeStruct(Q.shape, Q.dtype, sharding=NamedSharding(mesh, P("x")))
    with pytest.raises(NotImplementedError, match="inside jax.shard_map only"):
        kernels(named, "cuda", q)
    assert kernels(jax.shard_map(named, mesh=mesh, in_specs=P("x"), out_specs=P("x")), "cuda", q) == 1


TRANSFORMED = {
    "plain": named,
    "gradient": jax.grad(lambda q: named(q).astype(jnp.float32).sum()),
    "vmap": lambda q: jax.vmap(named)(jnp.stack([q, q])),
    "scan of checkpoint": jax.grad(lambda q: layers(q).astype(jnp.float32).sum()),
    "cond": lambda q: jax.lax.cond(q[0, 0, 0, 0] > 0, named, jnp.zeros_like, q),
}


@pytest.mark.parametrize("name", TRANSFORMED)
def test_the_kernel_is_exported_for_cuda_on_a_machine_without_it(name):
    assert kernels(TRANSFORMED[name], "cuda", Q) >= 1


OPTIONS = [dict(is_causal=True, deterministic=True), dict(dropout_rate=0.1, dropout_key=jax.random.key(0))]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(options))
def test_gradients_are_exported_for_cuda_with_64_bit_numbers(options):
    """Python's integers are 64 bits wide there, the kernels' indices 32."""

    def loss(q):
        return jattn.attention(q, q, q, implementation="mosaic", **options).astype(jnp.float32).sum()

    with jax.enable_x64(True):
        assert kernels(jax.grad(loss), "cuda", Q) == 2


def occurrences(jaxpr, primitive):
    inner = (getattr(x, "jaxpr", x) for e in jaxpr.eqns for x in jax.tree.leaves(e.params) if hasattr(x, "eqns"))
    here = sum(equation.primitive.name == primitive for equation in jaxpr.eqns)
    return here + sum(occurrences(each, primitive) for each in inner)


def test_checkpoint_names_spare_the_kernel():
    """A policy that saves out and lse launches the forward once, one that saves nothing twice; the backward once."""
    policies = jax.checkpoint_policies

    def launches(policy):
        loss = jax.checkpoint(lambda q: named(jnp.sin(q)).astype(jnp.float32).sum(), policy=policy)
        return occurrences(jax.make_jaxpr(jax.grad(loss))(Q).jaxpr, "custom_partitioning")

    saved = launches(policies.save_only_these_names("jattn_out", "jattn_lse"))
    assert (saved, launches(policies.nothing_saveable)) == (2, 3)


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
def test_named_and_lowered_for_another_platform_is_an_error(platform):
    with pytest.raises(NotImplementedError, match=f"'mosaic' can be lowered for cuda alone, not for {platform}"):
        jax.export.export(jax.jit(named), platforms=[platform])(Q)


def test_named_and_run_on_a_cpu_is_an_error():
    for run in (named, jax.jit(named), jax.grad(lambda q: named(q).astype(jnp.float32).sum())):
        with pytest.raises(NotImplementedError, match="'mosaic' can be lowered for cuda alone, not for cpu"):
            run(Q)
    assert jax.eval_shape(named, Q).shape == Q.shape


def test_second_derivatives_and_forward_mode_are_refused_with_a_sentence():
    first = jax.grad(lambda q, k: jattn.attention(q, k, k, implementation="mosaic").astype(jnp.float32).sum(), 1)
    with pytest.raises(NotImplementedError, match="second derivatives"):
        jax.grad(lambda k: first(Q, k).astype(jnp.float32).sum())(Q)
    with pytest.raises(NotImplementedError, match="second derivatives"):
        jax.jvp(lambda k: first(Q, k), (Q,), (Q,))
    with pytest.raises(TypeError, match="forward-mode"):
        kernels(lambda q: jax.jvp(named, (q,), (q,)), "cuda", Q)


def test_64_bit_mode():
    """Python numbers in a predicate or modifier are 64 bits wide there, and the kernel has none; lengths may be."""

    def features(q, gain, lengths):
        flags = jnp.arange(64, dtype=jnp.int32)
        mask = masks.predicate(lambda b, n, t, s, flag: ((t - s) % 3 == 0) | (flag > 2), flags)
        mod = mods.score_mod(lambda x, b, n, t, s, g: jnp.where(t > s, x, 0.0) * g + (t % 5).astype(x.dtype), gain)
        return jattn.attention(
            q, q, q, mask=mask, score_mod=mod, query_offset="end", key_value_seq_lengths=lengths,
            segment_ids=jnp.arange(64) // 9, implementation="mosaic",
        )  # fmt: skip

    def packed(q, cu):
        return jattn.ragged_attention(q[0], q[0], q[0], cu, is_causal=True, implementation="mosaic")

    with jax.enable_x64(True):
        assert kernels(features, "cuda", Q, jnp.ones((2, 1, 1), jnp.float64), jnp.array([64, 3])) == 1
        assert kernels(packed, "cuda", Q, jnp.array([0, 10, 64])) == 1


@pytest.fixture
def linear_beside_a_gpu(monkeypatch):
    for module in (linear_chunk, linear_step):
        monkeypatch.setattr(module, "why_not_here", lambda: None)


@pytest.mark.parametrize("op, residuals", [("kda", "save"), ("gated_delta_rule", "save"), ("gla", "recompute")])
def test_linear_attention_is_xla_on_a_cpu_beside_a_gpu(op, residuals, linear_beside_a_gpu):
    """Values and gradients, bit for bit: both implementations hand residuals of one shape to their backward."""
    x = jax.random.normal(jax.random.key(1), (1, 70, 2, 64), jnp.bfloat16)
    g = -jnp.ones((1, 70, 2) if op == "gated_delta_rule" else (1, 70, 2, 64), jnp.float32)

    def attend(x, g, **options):
        beta = [] if op == "gla" else [1.5 + g.reshape(1, 70, 2, -1)[..., 0]]
        return getattr(jattn.linear, op)(x, x, x, g, *beta, residuals=residuals, **options)

    xla = lambda *arrays: attend(*arrays, implementation="xla")  # noqa: E731
    got, want = (quickly(lambda *arrays, f=f: (f(*arrays), gradients(f)(*arrays)))(x, g) for f in (attend, xla))
    jax.tree.map(np.testing.assert_array_equal, got, want)
    named = lambda *arrays: attend(*arrays, implementation="mosaic")  # noqa: E731
    assert 4 < kernels(gradients(attend), "cuda", x, g) == kernels(gradients(named), "cuda", x, g)
    assert kernels(attend, "cpu", x, g) == 0


FEATURES = {
    "packed": lambda x, g, **how: simple_gla(x[0], x[0], x[0], g[0], cu_seqlens=jnp.array([3, 3, 69]), **how),
    "segments": lambda x, g, **how: simple_gla(x, x, x, g, segment_ids=jnp.arange(70) // 9, **how),
    "head dims": lambda x, g, **how: simple_gla(x[..., :40], x[..., :40], x[..., :3], g, **how),
    "checkpoints": lambda x, g, **how: simple_gla(x, x, x, g, checkpoints=[64], **how)[0],
}


@pytest.mark.parametrize("name", FEATURES)
def test_linear_attention_is_kernels_by_default(name, linear_beside_a_gpu):
    """On a CPU the bits of "xla", gradients too; with checkpoints, gradients are those of "xla" everywhere."""
    x = jax.random.normal(jax.random.key(1), (1, 70, 2, 64), jnp.bfloat16)
    g = -jnp.ones((1, 70, 2), jnp.float32)
    attend, xla = FEATURES[name], functools.partial(FEATURES[name], implementation="xla")
    got, want = (quickly(lambda *arrays, f=f: (f(*arrays), gradients(f)(*arrays)))(x, g) for f in (attend, xla))
    jax.tree.map(np.testing.assert_array_equal, got, want)
    forward, both = (kernels(f, "cuda", x, g) for f in (attend, gradients(attend)))
    assert forward == 2 and (both == 2 if name == "checkpoints" else both > 4)


def test_linear_attention_is_xla_where_the_number_of_checkpoints_is_not_known(linear_beside_a_gpu):
    x, g = jnp.zeros((1, 70, 2, 64), jnp.bfloat16), jnp.zeros((1, 70, 2), jnp.float32)
    offsets = jax.ShapeDtypeStruct(jax.export.symbolic_shape("n"), jnp.int32)
    attend = lambda offsets, **how: simple_gla(x, x, x, g, checkpoints=offsets, **how)  # noqa: E731
    assert kernels(attend, "cuda", offsets) == 0
    with pytest.raises(NotImplementedError, match="needs static shapes, not checkpoints=n"):
        kernels(functools.partial(attend, implementation="mosaic"), "cuda", offsets)


@pytest.mark.parametrize("T, options", [(0, {}), (70, dict(cu_seqlens=np.zeros(1, int)))])
def test_linear_attention_of_nothing_beside_a_gpu(T, options, linear_beside_a_gpu):
    """No tokens; no sequences."""
    batch = () if options else (1,)
    x, g = jnp.zeros((*batch, T, 2, 64), jnp.bfloat16), jnp.zeros((*batch, T, 2), jnp.float32)
    attend = lambda x, g: jattn.linear.gated_delta_rule(x, x, x, g, g, **options)  # noqa: E731
    assert jax.tree.map(jnp.shape, gradients(attend)(x, g)) == (x.shape, g.shape)


def test_a_step_is_xla_on_a_cpu_beside_a_gpu(linear_beside_a_gpu):
    x, g = Q[:, :1], -jnp.ones((2, 1, 2), jnp.float32)
    state = jnp.ones((2, 2, 64, 64), jnp.float32)

    def step(x, g, state, **options):
        return jattn.linear.gated_delta_rule_step(x, x, x, g, g + 1.5, state, **options)

    xla = lambda *arrays: step(*arrays, implementation="xla")  # noqa: E731
    got, want = (jax.jit(f)(x, g, state) for f in (step, xla))
    jax.tree.map(np.testing.assert_array_equal, got, want)
    assert kernels(step, "cuda", x, g, state) == 1 and kernels(step, "cpu", x, g, state) == 0

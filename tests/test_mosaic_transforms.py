"""The kernel, emulated, under the transforms of JAX. Those that the emulation cannot do (it calls back to the host in
order) are lowered in test_mosaic_platform.py and divided over devices in test_mosaic_sharding.py."""

import jax
import jax.numpy as jnp
import mosaic
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jattn
from jattn import mods

B, T, S, N, K, H = 2, 9, 12, 2, 1, 16
rng = np.random.default_rng(0)
ARRAYS = dict(
    query=jnp.asarray(rng.standard_normal((2, B, T, N, H)), jnp.bfloat16),
    key=jnp.asarray(rng.standard_normal((2, B, S, K, H)), jnp.bfloat16),
    value=jnp.asarray(rng.standard_normal((2, B, S, K, H)), jnp.bfloat16),
    bias=rng.standard_normal((2, 1, 1, T, S)).astype(np.float32),
    mask=rng.random((2, B, 1, 1, S)) < 0.8,
    scale=np.array([0.2, 0.3], np.float32),
    sinks=rng.standard_normal((2, N)).astype(np.float32),
    query_offset=np.array([[3, 2], [0, 5]], np.int32),
    key_value_seq_lengths=np.array([[12, 7], [0, 11]], np.int32),
    query_seq_lengths=np.array([[9, 4], [9, 9]], np.int32),
    gain=rng.uniform(0.5, 1.5, (2, B, N, 1, 1)).astype(np.float32),
    dropout_key=np.array([[0, 1], [2, 3]], np.uint32),
)


@pytest.fixture(autouse=True, scope="module")
def emulated():
    """For all tests at once, which share what is compiled."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        yield from mosaic.emulated(monkeypatch)


def attend(query, key, value, *, gain, dropout_key, implementation="mosaic", **options):
    """One call of everything; the modifier knows its batch index."""
    mod = mods.score_mod(lambda x, b, n, t, s, a: x * a + (b - n).astype(x.dtype), gain)
    return jattn.attention(
        query, key, value, score_mod=mod, dropout_rate=0.3, dropout_key=jax.random.wrap_key_data(dropout_key),
        is_causal=True, return_residual=True, implementation=implementation, **options,
    )  # fmt: skip


@pytest.fixture(scope="module")
def one():
    """`attend` of a dict, compiled once for all that is held against it."""
    return jax.jit(lambda d: attend(**d))


def equal(got, want):
    jax.tree.map(lambda g, w: np.testing.assert_array_equal(g.astype(jnp.float32), w.astype(jnp.float32)), got, want)


SUBSETS = [
    ("query", "bias", "scale", "mask", "gain"), tuple(ARRAYS),
    ("key", "value", "sinks", "dropout_key", "query_offset", "key_value_seq_lengths", "query_seq_lengths"),
]  # fmt: skip


@pytest.mark.parametrize("mapped", SUBSETS, ids="+".join)
def test_vmap_of_any_subset_is_the_loop(mapped, one):
    """Bit for bit; b and what is dropped are those of each mapped call."""
    arrays = {name: x if name in mapped else x[0] for name, x in ARRAYS.items()}
    axes = {name: 0 if name in mapped else None for name in ARRAYS}
    got = jax.jit(jax.vmap(one, in_axes=(axes,)))(arrays)
    for i in range(2):
        want = one({name: x[i] if name in mapped else x for name, x in arrays.items()})
        equal(jax.tree.map(lambda x, i=i: x[i], got), want)


def test_vmap_of_vmap_and_of_other_axes():
    def plain(q, k):
        return jattn.attention(q, k, k, is_causal=True, implementation="mosaic")

    q, k = ARRAYS["query"][0], ARRAYS["key"]
    inner = jax.vmap(plain, in_axes=(None, 2), out_axes=1)
    nested = jax.jit(jax.vmap(inner, in_axes=(0, None)))(q, jnp.moveaxis(k[:, 0], 0, 2))
    for i in range(2):
        for j in range(2):
            equal(nested[i, :, j], plain(q[i], k[j, 0]))


def test_vmap_of_packed_sequences():
    cu = np.array([[0, 4, 9], [0, 9, 9]], np.int32)

    def plain(q, k, cu):
        return jattn.ragged_attention(q, k, k, cu, is_causal=True, implementation="mosaic")

    q, k = ARRAYS["query"][0], ARRAYS["key"][0, :, :T]
    got = jax.jit(jax.vmap(plain))(q, k, cu)
    for i in range(2):
        equal(got[i], plain(q[i], k[i], cu[i]))


def test_gradients_are_those_of_xla():
    """The forward of one with the backward of the other: gradients that sum over rows see out unrounded."""
    arrays = {name: x[0] for name, x in ARRAYS.items()}
    floats = ("query", "key", "value", "bias", "scale", "sinks", "gain")

    def gradients(implementation):
        def loss(part):
            out, lse = attend(**(arrays | part), implementation=implementation)
            return (out.astype(jnp.float32) ** 2).sum() + jnp.where(lse > -jnp.inf, lse, 0).sum()

        return jax.jit(jax.grad(loss))({name: arrays[name] for name in floats})

    got, want = gradients("mosaic"), gradients("xla")
    for name in floats:
        g, w = (np.asarray(x[name], np.float32) for x in (got, want))
        assert got[name].dtype == arrays[name].dtype
        np.testing.assert_allclose(g, w, rtol=0, atol=2e-2 * np.abs(w).max(), err_msg=name)


def with_gradient(d):
    (out, lse), pull = jax.vjp(lambda q: attend(**(d | dict(query=q))), d["query"])
    return out, lse, pull((out, lse))[0]


@pytest.fixture(scope="module")
def unsharded():
    return jax.jit(with_gradient)({name: x[0] for name, x in ARRAYS.items()})


@pytest.mark.parametrize("mode", [AxisType.Auto, AxisType.Explicit], ids=["Auto", "Explicit"])
def test_shard_map_with_varying_axes_checked(mode, unsharded):
    """On one device: the emulation of two at once is not apart."""
    mesh = Mesh(np.array(jax.devices()[:1]), ("x",), axis_types=(mode,))
    arrays = {name: x[0] for name, x in ARRAYS.items()}
    specs = {name: P("x") if name in ("query", "key", "value", "gain", "query_offset") else P() for name in arrays}
    sharded = jax.shard_map(with_gradient, mesh=mesh, in_specs=(specs,), out_specs=P("x"), check_vma=True)
    with jax.set_mesh(mesh):
        got = jax.jit(sharded)({n: jax.device_put(x, NamedSharding(mesh, specs[n])) for n, x in arrays.items()})
    equal(got, unsharded)


def test_eager_is_jit_and_shapes_are_known_without_running(one):
    arrays = {name: x[0] for name, x in ARRAYS.items()}
    equal(attend(**arrays), one(arrays))
    out, lse = jax.eval_shape(lambda d: attend(**d), arrays)
    assert (out.shape, out.dtype, lse.shape, lse.dtype) == ((B, T, N, H), jnp.bfloat16, (B, T, N), jnp.float32)


def test_arrays_of_booleans_reach_a_modifier_as_such():
    flags = rng.random((B, 1, T, S)) < 0.5
    arrays = [ARRAYS[name][0] for name in ("query", "key", "value")]
    mod = mods.score_mod(lambda x, b, n, t, s, flag: jnp.where(flag & (t >= 0), x, -x), flags)
    got, want = (jattn.attention(*arrays, score_mod=mod, implementation=name) for name in ("mosaic", "xla"))
    np.testing.assert_allclose(got.astype(jnp.float32), want.astype(jnp.float32), atol=2e-2)


def test_no_keys_and_no_queries():
    q, k = ARRAYS["query"][0], ARRAYS["key"][0]
    for queries, keys in ((q, k[:, :0]), (q[:, :0], k), (q[:0], k[:0])):
        got, want = (
            jattn.attention(queries, keys, keys, sinks=ARRAYS["sinks"][0], return_residual=True, implementation=name)
            for name in ("mosaic", "xla")
        )
        equal(got, want)


@pytest.fixture(scope="module")
def gradients():
    """With the kernel's own backward: those of a dict of query, key and value, compiled."""

    def loss(arrays):
        return jattn.attention(**arrays, is_causal=True, implementation="mosaic").astype(jnp.float32).sum()

    return jax.jit(jax.grad(loss))


@pytest.mark.parametrize("mapped", [("query",), ("query", "key", "value")], ids="+".join)
def test_vmap_of_gradients_is_the_loop(mapped, gradients):
    arrays = {name: ARRAYS[name] if name in mapped else ARRAYS[name][0] for name in ("query", "key", "value")}
    assert jattn.explain(*(ARRAYS[name][0] for name in arrays), is_causal=True).backward == "mosaic"
    got = jax.jit(jax.vmap(gradients, ({name: 0 if name in mapped else None for name in arrays},)))(arrays)
    for i in range(2):
        want = gradients({name: x[i] if name in mapped else x for name, x in arrays.items()})
        equal(jax.tree.map(lambda x, i=i: x[i], got), want)

"""A launch of the kernel under jit on several devices: nothing is gathered, and nothing changes.

On virtual CPU devices plain JAX stands in for the kernel; the kernel itself is compiled for two GPUs and its HLO read.
"""

import re

import cases
import jax
import jax.numpy as jnp
import mosaic
import numpy as np
import pytest
from aot import devices
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jattn
from jattn import masks, mods

MODES = pytest.mark.parametrize("mode", [AxisType.Auto, AxisType.Explicit], ids=["Auto", "Explicit"])
GATHERS = re.compile("all-gather|all-to-all|collective-permute|all-reduce")
B, T, S, N, K, H = 4, 32, 48, 8, 4, 16
rng = np.random.default_rng(0)
BATCH_AND_HEADS = P("x", None, "y")


@pytest.fixture
def stand_in(monkeypatch):
    yield from mosaic.replaced(monkeypatch)


def qkv(B=B, N=N, K=K, H=H):
    return [jnp.asarray(x, jnp.bfloat16) for x in cases.qkv(B, T, S, N, K, H)]


def mesh_of(shape, mode=AxisType.Auto):
    devices = np.array(jax.devices()[: int(np.prod(list(shape.values())))]).reshape(tuple(shape.values()))
    return Mesh(devices, tuple(shape), axis_types=(mode,) * len(shape))


def numbers(x):
    return np.asarray(x.astype(jnp.float32))


def close(got, want):
    """Up to the order of sums, which follows the shapes on one device."""
    epsilon = 2e-2 if want.dtype == jnp.bfloat16 else 1e-5
    want = numbers(want)
    scale = np.abs(want, where=np.isfinite(want), out=np.zeros_like(want)).max()
    np.testing.assert_allclose(numbers(got), want, rtol=0, atol=epsilon * scale)


def hold(function, arrays, specs, mesh):
    """Nothing is gathered, results are cut as the first array is, and are what one device gives."""
    want = jax.jit(function)(*arrays)
    placed = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(arrays, specs, strict=True)]
    compiled = jax.jit(function).lower(*placed).compile()
    assert not GATHERS.search(compiled.as_text())
    for got, one in zip(compiled(*placed), want, strict=True):
        assert got.sharding.is_equivalent_to(NamedSharding(mesh, specs[0]), got.ndim)
        close(got, one)


def features(q, k, v, bias, gain, sinks, lengths, mask):
    """Everything that knows a batch index or a head."""
    return jattn.attention(
        q, k, v, bias, masks.dense(mask) & masks.predicate(lambda b, n, t, s: (b + n + t + s) % 5 != 0),
        score_mod=mods.score_mod(lambda x, b, n, t, s, a: x * a + (n - b).astype(x.dtype), gain), sinks=sinks,
        key_value_seq_lengths=lengths, query_offset="end", is_causal=True, dropout_rate=0.3,
        dropout_key=jax.random.key(0), return_residual=True, implementation="mosaic",
    )  # fmt: skip


FEATURES = (
    rng.standard_normal((1, N, T, S)).astype(np.float32), rng.uniform(0.5, 1.5, (B, N, 1, 1)).astype(np.float32),
    rng.standard_normal(N).astype(np.float32), np.array([48, 30, 1, 17], np.int32), rng.random((B, 1, T, S)) < 0.8,
)  # fmt: skip
FEATURE_SPECS = P(None, "y"), P("x", "y"), P("y"), P("x"), P("x")


@MODES
def test_features_count_from_the_start_of_the_whole(stand_in, mode):
    hold(features, [*qkv(), *FEATURES], [BATCH_AND_HEADS] * 3 + list(FEATURE_SPECS), mesh_of({"x": 2, "y": 4}, mode))


@pytest.mark.parametrize("heads", [1, 2, 4])
def test_devices_beyond_the_key_heads_keep_the_keys_whole(stand_in, heads):
    """Eight devices share one, two or four key heads: each holds all of them and reads its own."""

    def attend(q, k, v):
        return jattn.attention(q, k, v, return_residual=True, implementation="mosaic")

    hold(attend, qkv(K=heads), [P(None, None, "x"), P(), P()], mesh_of({"x": 8}))


def test_packed_sequences_by_heads(stand_in, monkeypatch):
    monkeypatch.setattr(mosaic.mosaic, "why_not", lambda problem: None)
    q, k, v = (x.reshape(-1, *x.shape[2:]) for x in qkv())

    def attend(q, k, v):
        cu, cu_keys = (np.array([0, 30, 61, B * n], np.int32) for n in (T, S))
        return jattn.ragged_attention(
            q, k, v, cu, cu_keys, is_causal=True, dropout_rate=0.2, dropout_key=jax.random.key(0),
            return_residual=True, implementation="mosaic",
        )  # fmt: skip

    hold(attend, (q, k, v), [P(None, "x")] * 3, mesh_of({"x": 4}))


@pytest.mark.parametrize("spec", [P("x", None, None, "y"), P(None, "x", None, "y"), P(("x", "y"))], ids=str)
def test_vmap_is_cut_along_its_own_axis(stand_in, spec):
    def attend(q, k, v):
        return jattn.attention(q, k, v, is_causal=True, return_residual=True, implementation="mosaic")

    stacked = [jnp.stack([x, x + 1, x - 1, 2 * x]) for x in qkv(B=2)]
    hold(jax.vmap(attend), stacked, [spec] * 3, mesh_of({"x": 2, "y": 2}))


def test_gradients_gather_nothing(stand_in):
    def gradients(*arrays):
        def loss(*floats):
            out, lse = features(*floats, *arrays[6:])
            return (out.astype(jnp.float32) ** 2).sum() + jnp.where(lse > -jnp.inf, lse, 0).sum()

        return jax.grad(loss, tuple(range(6)))(*arrays[:6])

    arrays, mesh = [*qkv(), *FEATURES], mesh_of({"x": 2, "y": 4})
    specs = [BATCH_AND_HEADS] * 3 + list(FEATURE_SPECS)
    placed = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(arrays, specs, strict=True)]
    compiled = jax.jit(gradients).lower(*placed).compile()
    assert not re.search("all-gather|all-to-all|collective-permute", compiled.as_text())  # dbias is summed over x
    for got, want in zip(compiled(*placed), jax.jit(gradients)(*arrays), strict=True):
        close(got, want)


def test_what_cannot_be_cut_is_still_right(stand_in):
    """Queries cut along time, and a batch that the devices do not divide: gathered, and the same."""
    mesh = mesh_of({"x": 4})

    def attend(q, k, v):
        return jattn.attention(q, k, v, is_causal=True, implementation="mosaic")

    q, k, v = qkv(B=2)
    placed = [jax.device_put(x, NamedSharding(mesh, P(None, "x"))) for x in (q, k, v)]
    close(jax.jit(attend)(*placed), attend(q, k, v))

    def uneven(q, k, v):
        return attend(*(jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P("x"))) for x in (q, k, v)))

    close(jax.jit(uneven)(q, k, v), attend(q, k, v))


@pytest.mark.parametrize("axes", [{"x", "y"}, {"x"}], ids=["all", "some"])
def test_inside_shard_map_nothing_is_divided_again(stand_in, axes):
    mesh = mesh_of({"x": 2, "y": 2})

    def attend(q, k, v):
        return jattn.attention(q, k, v, is_causal=True, implementation="mosaic")

    spec = P("x")
    sharded = jax.shard_map(attend, mesh=mesh, in_specs=spec, out_specs=spec, axis_names=axes, check_vma=True)
    close(jax.jit(sharded)(*qkv()), attend(*qkv()))


@pytest.mark.aot
@MODES
@pytest.mark.parametrize("spec", [P("x"), P(None, None, "x")], ids=["batch", "heads"])
def test_the_kernel_on_two_gpus_gathers_nothing(spec, mode):
    """Forward and gradient, where a mesh is set and where none is."""
    mesh = Mesh(devices(2), ("x",), axis_types=(mode,))
    array = jax.ShapeDtypeStruct((2, 128, 2, 64), jnp.bfloat16, sharding=NamedSharding(mesh, spec))

    def attend(q, k, v):
        return jattn.attention(q, k, v, is_causal=True, score_mod=mods.alibi(2), implementation="mosaic")

    def gradients(q, k, v):
        return jax.grad(lambda *x: attend(*x).astype(jnp.float32).sum(), (0, 1, 2))(q, k, v)

    for function in (attend, jax.vmap(attend), gradients):
        arrays = [array] * 3
        hlo = jax.jit(function).lower(*arrays).compile()
        assert not GATHERS.search(hlo.as_text()) and "mosaic_gpu" in hlo.as_text()
        with jax.set_mesh(mesh):
            assert not GATHERS.search(jax.jit(function).lower(*arrays).compile().as_text())

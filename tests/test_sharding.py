"""Plain jit with batch- or head-sharded inputs gathers nothing and gives what one device gives."""

# ruff: noqa: E731 -- short local functions

import contextlib
import re

import jax
import numpy as np
import pytest
from cases import qkv
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jattn
from jattn import masks, mods

B, T, S, N, K, H = 4, 32, 48, 8, 4, 16
GATHERS = ("all-gather", "all-to-all", "collective-permute")
rng = np.random.default_rng(0)
BIAS = rng.standard_normal((1, N, T, S)).astype(np.float32)
GAIN = rng.uniform(0.5, 1.5, (N, 1, 1)).astype(np.float32)
IDS = (
    np.sort(rng.integers(0, 3, (B, T)), axis=1).astype(np.int32),
    np.sort(rng.integers(0, 3, (B, S)), axis=1).astype(np.int32),
)
LENGTHS = np.array([48, 30, 1, 17], np.int32)
LAYOUTS = {
    "batch": (P("x"), {"x": 4}),
    "heads": (P(None, None, "x"), {"x": 4}),
    "batch and heads": (P("x", None, "y"), {"x": 2, "y": 4}),
}


def mesh_of(shape, mode):
    devices = np.array(jax.devices()[: int(np.prod(list(shape.values())))]).reshape(tuple(shape.values()))
    return Mesh(devices, tuple(shape), axis_types=(mode,) * len(shape))


def features(layout):
    """Options by name, with their per-batch and per-head arrays laid out as the queries are."""
    batch, _, heads = (*LAYOUTS[layout][0], None, None)[:3]
    return {
        "causal": (dict(is_causal=True), {}),
        "dropout": (dict(dropout_rate=0.3), {}),
        "segments and a window": (
            dict(segment_ids=IDS, local_window_size=(9, 4)),
            dict(segment_ids=(P(batch), P(batch))),
        ),
        "bias, sinks and a modifier": (
            dict(bias=BIAS, sinks=np.ones(N, np.float32), aux=GAIN, logits_soft_cap=20.0),
            dict(bias=P(None, heads), sinks=P(heads), aux=P(heads)),
        ),
        "lengths and offsets": (
            dict(key_value_seq_lengths=LENGTHS, query_offset="end", is_causal=True),
            dict(key_value_seq_lengths=P(batch)),
        ),
    }


def attend(d, options):
    if "aux" in d:
        d = {n: x for n, x in d.items() if n != "aux"} | {
            "score_mod": mods.score_mod(lambda x, b, n, t, s, a: x * a, d["aux"])
        }
    if "dropout_rate" in options:
        d = d | {"dropout_key": jax.random.key(0)}
    return jattn.attention(**d, **options, return_residual=True)


def compile_and_run(arrays, options, mesh=None, specs=None):
    """(results, HLO) of forward and gradient under jit."""

    def loss(d):
        out, lse = attend(d, options)
        return (out**2).sum() + jax.numpy.where(lse > -jax.numpy.inf, lse, 0.0).sum(), (out, lse)

    def both(d):
        floats = {n: x for n, x in d.items() if n in ("query", "key", "value", "bias", "sinks", "aux")}
        return jax.grad(lambda f: loss(d | f), has_aux=True)(floats)

    with jax.set_mesh(mesh) if mesh is not None else contextlib.nullcontext():
        if mesh is not None:
            put = lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec))
            arrays = {n: jax.tree.map(put, x, specs[n]) for n, x in arrays.items()}
        compiled = jax.jit(both).lower(arrays).compile()
        return compiled(arrays), compiled.as_text()


@pytest.mark.parametrize("mode", [AxisType.Auto, AxisType.Explicit], ids=["Auto", "Explicit"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", list(features("batch")))
def test_nothing_is_gathered_and_nothing_changes(name, layout, mode):
    """Outputs keep the sharding of the queries; dropout drops the same weights as on one device."""
    spec, shape = LAYOUTS[layout]
    options, extra_specs = features(layout)[name]
    extras = {n: options[n] for n in extra_specs}
    options = {n: x for n, x in options.items() if n not in extras}
    q, k, v = qkv(B, T, S, N, K, H)
    arrays = dict(query=q, key=k, value=v) | extras
    specs = dict(query=spec, key=spec, value=spec) | extra_specs
    mesh = mesh_of(shape, mode)
    (got, (out, lse)), hlo = compile_and_run(arrays, options, mesh, specs)
    (want, (one, one_lse)), _ = compile_and_run(arrays, options)
    found = [line.strip()[:150] for line in hlo.splitlines() if re.search(rf"= .*({'|'.join(GATHERS)})", line)]
    assert not found, found
    assert out.sharding.is_equivalent_to(NamedSharding(mesh, spec), out.ndim), out.sharding
    np.testing.assert_allclose(out, one, atol=1e-6)
    np.testing.assert_allclose(lse, one_lse, atol=1e-5)
    for n in want:
        np.testing.assert_allclose(got[n], want[n], atol=2e-5 * max(1, np.abs(want[n]).max()), err_msg=n)


@pytest.mark.parametrize("mode", [AxisType.Auto, AxisType.Explicit], ids=["Auto", "Explicit"])
def test_masks_of_every_kind_gather_nothing(mode):
    q, k, v = qkv(B, T, S, N, K, H)
    mesh = mesh_of({"x": 4}, mode)
    kinds = [
        masks.segments(*IDS) | masks.causal(),
        masks.prefix(np.array([1, 2, 3, 40], np.int32)),
        masks.blocks(rng.random((2, 3)) < 0.7, 16),
        masks.predicate(lambda b, n, t, s: (t + s + n + b) % 3 != 0),
    ]
    for mask in kinds:
        f = jax.jit(lambda q, k, v, mask=mask: jattn.attention(q, k, v, mask=mask))
        with jax.set_mesh(mesh):
            x = [jax.device_put(a, NamedSharding(mesh, P("x"))) for a in (q, k, v)]
            compiled = f.lower(*x).compile()
            assert not re.search("|".join(GATHERS), compiled.as_text()), mask
            np.testing.assert_allclose(compiled(*x), f(q, k, v), atol=1e-6)


def test_gradients_whose_cotangent_comes_in_another_layout():
    """Queries split by batch, outputs asked for by heads, and a replicated cotangent: right, whatever moves."""
    mesh = mesh_of({"x": 4}, AxisType.Auto)
    q, k, v = qkv(B, T, S, N, K, H)

    def loss(q, k, v, constrain):
        out = jattn.attention(q, k, v, is_causal=True)
        return (jax.lax.with_sharding_constraint(out, NamedSharding(mesh, constrain)) ** 2).sum()

    want = jax.grad(lambda *x: (jattn.attention(*x, is_causal=True) ** 2).sum(), (0, 1, 2))(q, k, v)
    x = [jax.device_put(a, NamedSharding(mesh, P("x"))) for a in (q, k, v)]
    for constrain in (P(None, None, "x"), P()):
        got = jax.jit(jax.grad(lambda *x, c=constrain: loss(*x, c), (0, 1, 2)))(*x)
        for g, w in zip(got, want, strict=True):
            np.testing.assert_allclose(g, w, atol=1e-5)


def test_replicated_inputs_stay_replicated():
    mesh = mesh_of({"x": 2}, AxisType.Explicit)
    with jax.set_mesh(mesh):
        x = [jax.device_put(a, NamedSharding(mesh, P())) for a in qkv()]
        out = jax.jit(jattn.attention)(*x)
    np.testing.assert_allclose(out, jattn.attention(*qkv()), atol=1e-6)

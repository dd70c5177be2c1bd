"""Linear attention's chunk kernels under jit on several devices: each has its part of the batch and the heads."""

import math
import re

import jax
import jax.numpy as jnp
import pytest
from aot import devices
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jattn import linear

GATHERS = re.compile("all-gather|all-to-all|collective-permute|all-reduce")


def arrays(mesh, batch, heads, K):
    """query, key, value, g and beta, laid out."""
    rows = ((K, 64), (K, 64), (4, 64), (4,), (4,))
    dtypes = ["bfloat16"] * 3 + ["float32"] * 2
    return [
        jax.ShapeDtypeStruct(
            (2, 128, *last), dtype, sharding=NamedSharding(mesh, P(batch, None, heads if last[0] > 1 else None))
        )
        for last, dtype in zip(rows, dtypes, strict=True)
    ]


@pytest.mark.aot
@pytest.mark.parametrize(
    "batch, heads, K, mode",
    [("x", None, 2, AxisType.Auto), (None, "x", 2, AxisType.Explicit), (None, "x", 1, AxisType.Auto)],
)
def test_on_two_gpus_nothing_is_gathered(batch, heads, K, mode):
    """Forward and gradient; a key head whose value heads are on two devices has a gradient from both."""
    mesh = Mesh(devices(2), ("x",), axis_types=(mode,))

    def attend(*x):
        return linear.gated_delta_rule(*x, qk_l2norm=True, implementation="mosaic")

    def gradients(*x):
        return jax.grad(lambda *x: attend(*x).astype(jnp.float32).sum(), range(5))(*x)

    for function in (attend, gradients):
        with jax.set_mesh(mesh):
            hlo = jax.jit(function).lower(*arrays(mesh, batch, heads, K)).compile().as_text()
        sums = {"all-reduce"} if function is gradients and K == 1 else set()
        assert "mosaic_gpu" in hlo and set(GATHERS.findall(hlo)) <= sums


@pytest.mark.aot
def test_packed_sequences_are_divided_by_heads():
    mesh = Mesh(devices(2), ("x",), axis_types=(AxisType.Auto,))
    tokens = [
        jax.ShapeDtypeStruct(x.shape[1:], x.dtype, sharding=NamedSharding(mesh, P(*x.sharding.spec[1:])))
        for x in arrays(mesh, None, "x", 2)
    ]
    cu_seqlens = jax.ShapeDtypeStruct((4,), "int32", sharding=NamedSharding(mesh, P()))

    def gradients(cu_seqlens, *x):
        how = dict(cu_seqlens=cu_seqlens, qk_l2norm=True, implementation="mosaic")
        return jax.grad(lambda *x: linear.gated_delta_rule(*x, **how).astype(jnp.float32).sum(), range(5))(*x)

    hlo = jax.jit(gradients).lower(cu_seqlens, *tokens).compile().as_text()
    assert "mosaic_gpu" in hlo and not GATHERS.findall(hlo)


@pytest.mark.aot
@pytest.mark.parametrize("count, pool", [(1, True), (2, False), (2, True)])
def test_a_step_on_several_gpus_updates_its_states_in_place(count, pool):
    """By heads; without a pool by sequences too. One launch, and no copy of the states."""
    mesh = Mesh(devices(count), ("x",), axis_types=(AxisType.Auto,))
    batch, heads = (None, "x") if pool else ("x", None)
    place = lambda *spec: NamedSharding(mesh, P(*spec))  # noqa: E731
    token = lambda *last: jax.ShapeDtypeStruct((64, 1, 8, *last), "bfloat16", sharding=place(batch, None, heads))  # noqa: E731
    state = jax.ShapeDtypeStruct((96 if pool else 64, 8, 128, 128), "float32", sharding=place(batch, heads))
    at = jax.ShapeDtypeStruct((64,), "int32", sharding=place())

    def run(state, at, query, key, value, g, beta):
        indices = at if pool else None
        step = linear.kda_step(query, key, value, g, beta, state, state_indices=indices, implementation="mosaic")
        return step

    tokens = token(128), token(128), token(128), token(128), token()
    compiled = jax.jit(run, donate_argnums=0).lower(state, at, *tokens).compile()
    memory, text = compiled.memory_analysis(), compiled.as_text()
    assert memory.alias_size_in_bytes >= 4 * math.prod(state.shape) // count and memory.temp_size_in_bytes < 4096
    assert not GATHERS.search(text) and not re.search(r" (?:copy|transpose)\(", text[text.index("ENTRY") :])

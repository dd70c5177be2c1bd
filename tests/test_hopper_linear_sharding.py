"""Linear attention's chunk kernels under jit on several devices: each has its part of the batch and the heads."""

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

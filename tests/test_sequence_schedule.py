"""Compiled for four H200, without any: every message of a ring is on its way while the device works."""

import re

import aot
import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jattn


def messages(hlo):
    """For each permute of a scheduled program: whether a loop runs between its start and its end."""
    started = {}
    for line in hlo.splitlines():
        name = re.match(r"\s*(?:ROOT )?%?([\w.\-]+) = ", line)
        if " collective-permute-start(" in line:
            started[name[1]] = False
        elif done := re.search(r" collective-permute-done\(%?([\w.\-]+)\)", line):
            yield started.pop(done[1])
        elif " while(" in line or " conditional(" in line:
            started = dict.fromkeys(started, True)
    assert not started


def test_the_schedule_is_read():
    start, work, end = (
        "  %s = (f32[4], f32[4]) collective-permute-start(%x)",
        "  %w = (s32[]) while(%t), body=%b",
        "  ROOT %d = f32[4] collective-permute-done(%s)",
    )
    assert list(messages("\n".join([start, work, end]))) == [True]
    assert list(messages("\n".join([work, start, end, work]))) == [False]


@pytest.mark.aot
def test_messages_travel_while_the_device_works():
    layout, spec = jattn.SequenceLayout("zigzag", 4), P(None, "sp")
    mesh = Mesh(np.array(aot.devices(4)), ("sp",), axis_types=(AxisType.Auto,))
    query, key = (
        jax.ShapeDtypeStruct((1, 8192, heads, 64), jax.numpy.bfloat16, sharding=NamedSharding(mesh, spec))
        for heads in (8, 4)
    )

    def attend(q, k, v):
        return jattn.ring_attention(q, k, v, axis="sp", layout=layout, is_causal=True, implementation="xla")

    def both(q, k, v, dout):
        out, pull = jax.vjp(jax.shard_map(attend, mesh=mesh, in_specs=spec, out_specs=spec), q, k, v)
        return out, pull(dout)

    found = list(messages(jax.jit(both).lower(query, key, key, query).compile().as_text()))
    assert found == [True] * 4  # a loop of the forward, a loop of the backward, and its first and its last

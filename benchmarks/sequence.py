"""`./run bench sequence`: sequence parallelism on as many devices as there are, beside `attention` on one of them.

On a CPU run it as `JAX_NUM_CPU_DEVICES=8 ./run bench sequence`: the devices share the cores, so the times say what
merging and moving cost on top of the work, and nothing about links. Gated by what one device computes.
"""

import functools

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import jattn
from benchmarks import communication, shapes, timing

SHAPES = (
    shapes.Shape(1, 4096, 4096, 8, 4, 64, 64, causal=True),
    shapes.Shape(1, 4096, 4096, 8, 4, 64, 64, causal=True, window=(255, 0)),
)
CALLS = (
    ("ring", "contiguous"), ("ring", "zigzag"), ("ring", "striped"), ("allgather", "zigzag"), ("ulysses", "contiguous"),
)  # fmt: skip
AGREEMENT = {"float32": 1e-5, "bfloat16": 3e-2}  # largest max|x - y| / max|y| from one device
ALONE = ("one device", "")


def forward_backward(attention, options):
    """The compiled function of (query, key, value, dout) to (out, dquery, dkey, dvalue)."""

    @jax.jit
    def step(query, key, value, dout):
        out, pullback = jax.vjp(functools.partial(attention, **options), query, key, value)
        return out, *pullback(dout)

    return step


def sequence(arguments):
    """Forward and backward, wall time, with the bytes that a device sends as counted in the compiled program."""
    dtype, devices = "float32" if jax.default_backend() == "cpu" else "bfloat16", jax.device_count()
    for shape in shapes.selected(SHAPES, arguments):
        inputs = shape.inputs(dtype)
        alone = forward_backward(jattn.attention, shape.options)
        calls = {ALONE: functools.partial(alone, *inputs)}
        sent = {}
        for strategy, kind in CALLS:
            if strategy == "ulysses" and shape.N % devices:
                continue
            name = strategy, kind
            step, laid_out = parallel(strategy, kind, devices, shape, inputs)
            program = step.lower(*laid_out).compile()
            sent[name] = sum(size * n for (_, size), n in communication.executed(program.as_text()).items())
            calls[name] = functools.partial(program, *laid_out)
            gate(name, devices, calls, dtype)
        taken = timing.interleaved(calls, arguments.repeats)
        for name in calls:
            yield {
                "shape": str(shape),
                "dtype": dtype,
                "devices": devices if name in sent else 1,
                "implementation": name[0],
                "layout": name[1].ljust(10),
                "ms": round(taken[name] * 1e3, 2),
                "sent_bytes": sent.get(name, 0),
                "times_one_device": round(taken[ALONE] / taken[name], 2),
            }


def parallel(strategy, kind, devices, shape, inputs):
    """The step and its inputs, laid out over all devices."""
    mesh = Mesh(np.array(jax.devices()), ("sp",), axis_types=(AxisType.Auto,))
    layout = jattn.SequenceLayout(kind, devices)
    sharding = NamedSharding(mesh, PartitionSpec(None, "sp"))
    attention = functools.partial(getattr(jattn, f"{strategy}_attention"), axis="sp", layout=layout)
    return forward_backward(attention, shape.options), [jax.device_put(layout.shard(x), sharding) for x in inputs]


def gate(name, devices, calls, dtype):
    """Raises when a strategy is not what one device computes."""
    layout = jattn.SequenceLayout(name[1], devices)
    for got, want in zip(calls[name](), calls[ALONE](), strict=True):
        got, want = (np.asarray(x).astype(np.float32) for x in (layout.unshard(np.asarray(got)), want))
        off = np.abs(got - want).max() / np.abs(want).max()
        if not off <= AGREEMENT[dtype]:
            raise SystemExit(f"{' '.join(name)} differs from one device by {off:.1e}; nothing was timed")

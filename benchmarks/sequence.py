"""`./run bench sequence`: sequence parallelism on as many devices as there are, beside `attention` on one of them.

On a CPU run it as `JAX_NUM_CPU_DEVICES=8 ./run bench sequence`: the devices share the cores, so the times say what
merging and moving cost on top of the work, and nothing about links. On GPUs the ideal is one device's time divided by
the number of devices, and the model of `benchmarks.communication` stands beside what was measured. Gated by what one
device computes.
"""

import concurrent.futures
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import jattn
from benchmarks import communication, gpu, shapes, timing

SHAPES = (
    shapes.Shape(1, 4096, 4096, 8, 4, 64, 64, causal=True),
    shapes.Shape(1, 4096, 4096, 8, 4, 64, 64, causal=True, window=(255, 0)),
)
# On GPUs: tokens of a device, query and key heads, mask, and tokens of a document where there are documents.
OWN = (
    (32768, 8, 8, dict(causal=True), None), (32768, 32, 8, dict(causal=True), None),
    (16384, 32, 8, dict(causal=True), None), (32768, 32, 8, dict(causal=True), 8192),
    (32768, 32, 8, dict(causal=True, window=(4095, 0)), None), (131072, 8, 8, dict(causal=True), None),
    (524288, 8, 8, dict(causal=True, window=(4095, 0)), None), (32768, 32, 8, dict(), None),
)  # fmt: skip
CALLS = (
    ("ring", "contiguous"), ("ring", "zigzag"), ("ring", "striped"), ("allgather", "zigzag"), ("ulysses", "contiguous"),
)  # fmt: skip
AGREEMENT = {"float32": 1e-5, "bfloat16": 3e-2}  # largest max|x - y| / max|y| from one device, over compared rows
ROWS = 128  # compared at the beginning, in the middle and at the end
LINK = 370e9  # bytes a second that an H200 sends to another over NVLink
ALONE = ("one device", "")


def sequence(arguments):
    """Forward, and forward and backward, wall time, with the bytes that a device sends as counted in the compiled
    program."""
    dtype, devices = "float32" if jax.default_backend() == "cpu" else "bfloat16", jax.device_count()
    for case in shapes.selected(table(devices), arguments):
        inputs = case.inputs(dtype)
        for backward in (False, True):
            yield from measured(case, inputs, dtype, devices, backward, arguments.repeats)


@dataclasses.dataclass(frozen=True)
class Case:
    """A shape, in documents of so many tokens or in one."""

    shape: shapes.Shape
    document: int | None = None

    def __str__(self):
        return f"{self.shape} documents {self.document}" if self.document else str(self.shape)

    def inputs(self, dtype):
        """query, key, value, the cotangent, and segment ids where there are documents."""
        ids = jnp.arange(self.shape.S, dtype=jnp.int32)[None] // (self.document or 1)
        return [*self.shape.inputs(dtype), *([ids] if self.document else [])]


def table(devices):
    if jax.default_backend() == "cpu":
        return [Case(shape) for shape in SHAPES]
    return [
        Case(shapes.Shape(1, n * devices, n * devices, N, K, 128, 128, **mask), document)
        for n, N, K, mask, document in OWN
    ]


def measured(case, inputs, dtype, devices, backward, repeats):
    """The rows of one case and pass."""
    shape = case.shape
    steps = {ALONE: (step(jattn.attention, shape.options, backward), inputs, None)}
    for strategy, kind in CALLS:
        if strategy == "ulysses" and shape.N % devices or kind == "striped" and dtype != "float32":
            continue  # no kernel takes every second token
        steps[strategy, kind] = parallel(strategy, kind, devices, shape, inputs, backward)
    programs = compiled(steps)
    sent = {
        name: sum(size * n for (_, size), n in communication.executed(program.as_text()).items())
        for name, program in programs.items() if name != ALONE
    }  # fmt: skip
    temporary = {name: program.memory_analysis().temp_size_in_bytes for name, program in programs.items()}
    calls = {name: functools.partial(program, *steps[name][1]) for name, program in programs.items()}
    want = compared(calls[ALONE]())
    for name in sent:
        gate(name, compared(calls[name](), steps[name][2]), want, dtype)
    taken = in_a_row(calls, repeats)
    for name, took in taken.items():
        ideal = taken[ALONE] / devices
        kernels = computing(calls[name], devices if name in sent else 1) if dtype != "float32" else None
        yield {
            "shape": str(case),
            "dtype": dtype,
            "pass": "fwd+bwd" if backward else "fwd",
            "devices": devices if name in sent else 1,
            "implementation": name[0],
            "layout": name[1].ljust(10),
            "ms": round(took * 1e3, 3),
            "kernel_ms": "" if kernels is None else round(kernels, 3),
            "exposed_ms": "" if kernels is None else round(took * 1e3 - kernels, 3),
            "sent_bytes": sent.get(name, 0),
            "temporary_bytes": temporary[name],
            "times_one_device": round(taken[ALONE] / took, 2),
            "percent_of_ideal": round(100 * ideal / took, 1) if name in sent and dtype != "float32" else "",
            "predicted_ms": predicted(name[0], case, devices, backward, taken[ALONE]) if name in sent else "",
        }


def compiled(steps):
    """The programs of name -> (function, inputs, _), compiled at the same time."""
    lowered = {name: function.lower(*inputs) for name, (function, inputs, _) in steps.items()}
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        return dict(zip(lowered, pool.map(lambda x: x.compile(), lowered.values()), strict=True))


def in_a_row(calls, repeats):
    """The median seconds of a call that follows another, as layers of a model do: the next is launched meanwhile."""
    first = timing.interleaved(calls, 1)
    count = max(1, min(8, int(0.05 / max(first.values()))))

    def several(call):
        for _ in range(count):
            result = call()
        return result

    taken = timing.interleaved({name: functools.partial(several, call) for name, call in calls.items()}, repeats)
    return {name: took / count for name, took in taken.items()}


def computing(call, devices):
    """Milliseconds a device computes in one `call` (a functools.partial), NCCL's kernels left out; None: not seen."""
    calls = gpu.attempt("profiler", lambda: gpu.named_launches(call.func, call.args, 1))
    return None if calls is None else sum(ms for name, ms in calls[0] if "nccl" not in name.lower()) / devices


def step(attention, options, backward):
    """The compiled function of (query, key, value, dout[, segment ids]) to (out,) or (out, dquery, dkey, dvalue)."""

    @jax.jit
    def step(query, key, value, dout, segment_ids=None):
        attend = functools.partial(attention, **options, segment_ids=segment_ids)
        if not backward:
            return (attend(query, key, value),)
        out, pullback = jax.vjp(attend, query, key, value)
        return out, *pullback(dout)

    return step


def parallel(strategy, kind, devices, shape, inputs, backward):
    """The step, its inputs laid out over all devices, and their layout."""
    mesh = Mesh(np.array(jax.devices()), ("sp",), axis_types=(AxisType.Auto,))
    layout = jattn.SequenceLayout(kind, devices)
    sharding = NamedSharding(mesh, PartitionSpec(None, "sp"))
    attention = functools.partial(getattr(jattn, f"{strategy}_attention"), axis="sp", layout=layout)
    laid_out = [jax.device_put(layout.shard(x), sharding) for x in inputs]
    return step(attention, shape.options, backward), laid_out, layout


def compared(results, layout=None):
    """Some rows of each result in the order of the tokens, and the largest number in it."""
    found = []
    for x in results:
        at = np.unique(np.concatenate([np.arange(ROWS) + start for start in (0, x.shape[1] // 2, x.shape[1] - ROWS)]))
        size = float(jnp.abs(x).max())
        order = np.arange(x.shape[1]) if layout is None else np.asarray(layout.shard(np.arange(x.shape[1]), axis=0))
        place = np.empty_like(order)
        place[order] = np.arange(x.shape[1])
        found.append((np.asarray(x[:, place[at]], np.float32), size))
    return found


def gate(name, found, want, dtype):
    """Raises when a strategy is not what one device computes."""
    for (got, _), (expected, size) in zip(found, want, strict=True):
        off = np.abs(got - expected).max() / size
        if not off <= AGREEMENT[dtype]:
            raise SystemExit(f"{' '.join(name)} differs from one device by {off:.1e}; nothing was timed")


def predicted(strategy, case, devices, backward, alone):
    """Milliseconds by the communication model, at the rate that one device reaches alone. For GPUs, and for masks whose
    work the model knows."""
    shape = case.shape
    if jax.default_backend() == "cpu" or shape.window or case.document:
        return ""
    call = communication.Call(shape.S, shape.N, shape.K, shape.H, causal=shape.causal)
    rate = call.flops() * (3.5 if backward else 1) / alone
    passes = (False, True) if backward else (False,)
    return round(1e3 * sum(communication.seconds(strategy, call, devices, link=LINK, rate=rate, passes=passes)), 3)

"""Kernel times on a GPU, by CUPTI, in turns; and what a result has to agree with before its time counts."""

import concurrent.futures
import dataclasses
import functools
import os
import statistics

import jax
import jax.numpy as jnp
from jax import lax

import jattn
from benchmarks import timing

# Largest allowed max|x - y| / max|y| of a bfloat16 result, over any of the compared slices.
AGREEMENT = 3e-2
_ROWS = 128  # queries of a step of the dense computation, and rows of a compared slice
# Autotuning would try every algorithm of every matrix product, for minutes, and choose others in every run.
_FLAGS = "--xla_gpu_autotune_level=0 --xla_gpu_enable_triton_gemm=false"


def prepare():
    """Refuses to go on without a GPU. Sets XLA's flags, read when a device is first used, if the user did not."""
    os.environ.setdefault("XLA_FLAGS", _FLAGS)
    if jax.default_backend() != "gpu":
        raise SystemExit(f"kernels are timed on an NVIDIA GPU; this machine offers {jax.default_backend()!r} only")


def first(out):
    return out[0] if isinstance(out, tuple | list) else out


def step(attention, backward):
    """The function of (query, key, value, dout, arrays) to what is computed: out, or (out, dquery, dkey, dvalue)."""

    def forward(query, key, value, dout, arrays):
        return attention(query, key, value, arrays)

    def both(query, key, value, dout, arrays):
        out, pullback = jax.vjp(lambda *inputs: first(attention(*inputs, arrays)), query, key, value)
        return out, *pullback(dout)

    return jax.jit(both if backward else forward)


def compiled(functions, inputs):
    """The functions compiled, at the same time; those that fail are named in a line and left out."""
    lowered = {}
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        for name, function in functions.items():
            if (found := attempt(name, lambda f=function: f.lower(*inputs))) is not None:
                lowered[name] = pool.submit(found.compile)
    found = {name: attempt(name, future.result) for name, future in lowered.items()}
    return {name: function for name, function in found.items() if function is not None}


def attempt(name, function):
    """The function's result, or None after a line that says how it failed: a peer's failure stops nothing."""
    try:
        return function()
    except Exception as error:
        reason = " ".join(str(error).split())[:300]
        print(f"  {name} failed: {type(error).__name__}: {reason}", flush=True)
        return None


@dataclasses.dataclass(frozen=True)
class Time:
    """Milliseconds of a call: all its kernels, the longest of them, and on the host's clock."""

    total: float
    longest: float
    wall: float


def launches(function, inputs, iterations):
    """The kernel times, in ms, of each of `iterations` calls."""
    return [[ms for _, ms in call] for call in named_launches(function, inputs, iterations)]


def named_launches(function, inputs, iterations):
    """The kernels' names and times, in ms, of each of `iterations` calls."""
    from jax.experimental.mosaic.gpu import profiler

    try:
        _, found = profiler.measure(function, iterations=iterations, aggregate=False)(*inputs)
    except RuntimeError:  # not the same kernels in every call
        if iterations == 1:
            raise
        return [call for _ in range(iterations) for call in named_launches(function, inputs, 1)]
    if not found:
        raise RuntimeError("the profiler saw no kernel")
    return [found] if iterations == 1 else found


def measured(functions, rounds=3):
    """name -> Time, medians over rounds in which each function is called a few times; a long one fewer times.

    Args:
        functions: name -> (compiled function, its inputs), called once already.
    """
    calls, walls = {name: [] for name in functions}, {name: [] for name in functions}
    lost = set()
    for _ in range(rounds):
        for name, (function, inputs) in functions.items():
            if name in lost or len(walls[name]) >= 2 and walls[name][0] > 0.5:
                continue
            walls[name].append(timing.seconds(functools.partial(function, *inputs)))
            iterations = max(1, min(4, int(0.04 / walls[name][-1])))
            found = attempt(name, functools.partial(launches, function, inputs, iterations))
            lost |= {name} if found is None else set()
            calls[name] += found or []
    median = statistics.median
    return {
        name: Time(median(map(sum, calls[name])), median(map(max, calls[name])), 1e3 * median(walls[name]))
        for name in functions
        if name not in lost
    }


def matmul_ceiling(size=8192):
    """TFLOP/s of a bfloat16 matrix product on this device."""
    x = jax.random.normal(jax.random.key(0), (size, size), jnp.bfloat16)
    product = compiled({"ceiling": jax.jit(jnp.matmul)}, (x, x))
    jax.block_until_ready(product["ceiling"](x, x))
    return 2 * size**3 / measured({"ceiling": (product["ceiling"], (x, x))})["ceiling"].total / 1e9


# The gate.


def place(case):
    """(batch row, key head) that is compared: the last ones, but dropout depends on where a head lies."""
    return (0, 0) if "dropout" in case.feature else (case.shape.B - 1, case.shape.K - 1)


def heads(case, results):
    """Of out, dquery, dkey, dvalue what belongs to the compared key head, as [T or S, heads, width]."""
    b, k = place(case)
    G = case.shape.N // case.shape.K
    queries = slice(k * G, (k + 1) * G)
    parts = (queries, queries, slice(k, k + 1), slice(k, k + 1))
    return [x[b, :, part] for x, part in zip(results, parts, strict=False)]


def expected(case, inputs, backward):
    """What `heads` has to be, in float32: dense, some rows at a time. Dropout is compared with the library's xla."""
    *operands, dout, arrays = inputs
    b, k = place(case)
    query, key, value = heads(case, [operands[0], operands[0], operands[1], operands[2]])[1:]
    compute = jax.jit(functools.partial(_reference, case, backward))
    own = {name: x[b : b + 1] if name in ("segment_ids", "key_value_seq_lengths") else x for name, x in arrays.items()}
    return compute(query, key, value, heads(case, [dout])[0], own, k)


def _reference(case, backward, query, key, value, dout, arrays, head):
    query, key, value, dout = (x.astype(jnp.float32) for x in (query, key, value, dout))
    attention = _library if "dropout" in case.feature else _dense
    with jax.default_matmul_precision("highest"):
        out, pullback = jax.vjp(lambda *operands: attention(case, arrays, head, *operands), query, key, value)
        return (out, *pullback(dout)) if backward else (out,)


def _library(case, arrays, head, query, key, value):
    operands = (x[None] for x in (query, key, value))
    return jattn.attention(*operands, implementation="xla", **case.keywords(arrays))[0]


def _dense(case, arrays, head, query, key, value):
    T, G, H = query.shape
    n = head * G + jnp.arange(G, dtype=jnp.int32)[:, None, None]
    s = jnp.arange(key.shape[0], dtype=jnp.int32)
    length = arrays["key_value_seq_lengths"][0] if "key_value_seq_lengths" in arrays else None

    @jax.checkpoint
    def rows(step):
        start, q = step
        t = start + jnp.arange(q.shape[0], dtype=jnp.int32)[:, None]
        score = jnp.einsum("tgh,sh->gts", q, key[:, 0]) * H**-0.5
        score = case.score(score, n, t, s, arrays)
        seen = case.visible(t, s, blocks=arrays.get("blocks"), length=length)
        return jnp.einsum("gts,sd->tgd", jax.nn.softmax(jnp.where(seen, score, -1e30), axis=-1), value[:, 0])

    size = min(_ROWS, T)
    out = lax.map(rows, (jnp.arange(0, T, size, dtype=jnp.int32), query.reshape(T // size, size, G, H)))
    return out.reshape(T, G, value.shape[-1])


@jax.jit
def disagreement(results, wanted):
    """The largest max|x - y| / max|y| over slices of rows: later rows of a causal mask average more, so are smaller."""
    return jnp.stack([_worst(x.astype(jnp.float32), y) for x, y in zip(results, wanted, strict=True)]).max()


def _worst(x, y):
    size = min(_ROWS, y.shape[0])
    x, y = (a.reshape(a.shape[0] // size, -1) for a in (x, y))
    apart = jnp.abs(x - y).max(1) / jnp.maximum(jnp.abs(y).max(1), 1e-3 * jnp.abs(y).max())
    return jnp.where(jnp.isnan(apart), jnp.inf, apart).max()


def agreeing(case, functions, inputs, backward):
    """The functions that compute what they should, called once each; the others are named in a line and left out."""
    wanted = expected(case, inputs, backward)
    return {name: function for name, function in functions.items() if _agrees(name, case, function, inputs, wanted)}


def _agrees(name, case, function, inputs, wanted):
    out = attempt(name, lambda: jax.block_until_ready(function(*inputs)))
    if out is None:
        return False
    results = list(out) if len(wanted) > 1 else [first(out)]
    found = float(disagreement(heads(case, results), list(wanted)))
    if not found <= AGREEMENT:
        print(f"  {name} differs from the float32 computation by {found:.1e}: not timed", flush=True)
    return found <= AGREEMENT

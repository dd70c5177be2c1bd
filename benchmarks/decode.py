"""`./run bench decode` and `./run bench paged`: one new token a sequence, over contiguous and over paged caches.

On a GPU bfloat16 and kernel times by CUPTI, elsewhere float32, small shapes and wall time. The work is reading: the
bandwidth counts the keys, values and scales of tokens that exist, and stands beside that of a plain read in the same
run and what the memory is specified for. Every result is held against a dense float32 computation of some sequences
before it is timed.
"""

import dataclasses
import functools
import time

import jax
import jax.numpy as jnp

import jattn
from benchmarks import caches, gpu, providers, timing
from benchmarks.providers import Refused
from benchmarks.shapes import selected
from jattn import _dispatch

AGREEMENT = {"float32": 1e-5, "bfloat16": 3e-2}  # largest max|x - y| / max|y| of a sequence
PEAK = {"NVIDIA H200": 4.8e12, "NVIDIA H100 80GB HBM3": 3.35e12}  # bytes a second, by the data sheet


def decode(arguments):
    """One new token a sequence over contiguous caches: bandwidth and latency, beside jax.nn and other kernels."""
    yield from _suite("decode", arguments)


def paged(arguments):
    """The same over pages of 16, 64 and 128 tokens; others that have no pages read contiguous caches."""
    yield from _suite("paged", arguments)


def _suite(suite, arguments):
    start, on_gpu = time.perf_counter(), jax.default_backend() == "gpu"
    dtype = "bfloat16" if on_gpu else "float32"
    wanted = selected(caches.table(suite, arguments.table if on_gpu else "small"), arguments)
    known = [*(f"jattn {name}" for name in _dispatch.names(wanted[0].op)), *PEERS]
    if unknown := sorted(set(arguments.providers or ()) - set(known)):
        raise SystemExit(f"--providers: nobody is called {', '.join(map(repr, unknown))}; there are {', '.join(known)}")
    programs = {}
    ceiling = read_rate(on_gpu)
    print(f"a plain read: {ceiling / 1e9:.0f} GB/s", flush=True)
    for done, case in enumerate(wanted):
        if time.perf_counter() - start > arguments.budget:
            print(f"stopped after {arguments.budget:.0f} s; not measured: {'; '.join(map(str, wanted[done:]))}")
            return
        times, counts = case_times(case, dtype, arguments, on_gpu, programs)
        yield from rows(case, dtype, times, counts, ceiling)


def read_rate(on_gpu):
    """Bytes a second of sums over the rows of a large array."""
    x = jnp.zeros(((1 << 30 if on_gpu else 1 << 26) // (4 * 4096), 4096), jnp.float32)
    total = jax.jit(lambda x: x.sum(axis=1)).lower(x).compile()
    jax.block_until_ready(total(x))
    return 1e3 * x.nbytes / measured({"read": (total, (x,))}, 5, on_gpu)["read"].total


def measured(functions, repeats, on_gpu):
    """name -> gpu.Time; on a CPU all three are wall time."""
    if on_gpu:
        return gpu.measured(functions, repeats)
    taken = timing.interleaved({name: functools.partial(f, *x) for name, (f, x) in functions.items()}, repeats)
    return {name: gpu.Time(*[1e3 * seconds] * 3) for name, seconds in taken.items()}


def case_times(case, dtype, arguments, on_gpu, programs):
    """(name -> Time, name -> kernels in a call) of those who agree. Of jattn also what the case is compared with, in
    the same run: "NAME, plain" over a cache that is not quantised, "NAME, equal" with equally long sequences."""
    functions = agreeing(case, dtype, arguments.providers, on_gpu, programs)
    ours = [name for name in functions if name.startswith("jattn ")]
    timed = dict(functions)
    for what, change in (("plain", dict(stored="")), ("equal", dict(tokens="equal"))):
        other = dataclasses.replace(case, **change)
        found = agreeing(other, dtype, ours, on_gpu, programs) if other != case and ours else {}
        timed |= {f"{name}, {what}": call for name, call in found.items()}
    counts = {name: gpu.attempt(name, functools.partial(launches, *call)) for name, call in functions.items() if on_gpu}
    return measured(timed, arguments.repeats, on_gpu), counts


def launches(function, inputs):
    """How many kernels a call is."""
    return len(gpu.launches(function, inputs, 1)[0])


def agreeing(case, dtype, asked, on_gpu, programs=None):
    """name -> (compiled function, its inputs), called once, of those `asked` for (None is everybody). What differs is
    left out with a line; of jattn it stops the run. `programs` has those compiled for earlier cases, and gets others.
    """
    data, programs = caches.data(case, dtype), {} if programs is None else programs
    calls = builders(case, data, on_gpu)
    ready = {
        name: call
        for name, build in calls.items()
        if (asked is None or name in asked) and (call := _ready(name, build, case, programs))
    }
    found = {}
    for name, (function, inputs, out) in ready.items():
        off = caches.disagreement(case, data, out)
        if off <= AGREEMENT[dtype]:
            found[name] = function, inputs
        elif name.startswith("jattn "):
            raise SystemExit(f"{case}: {name} differs from the dense computation by {off:.1e}; nothing was timed")
        else:
            print(f"  {name} differs from the dense computation by {off:.1e}: not timed", flush=True)
    return found


def _ready(name, build, case, programs):
    """(compiled function, its inputs, its first result), or None after a line with the reason."""
    try:
        function, inputs = build()
    except Refused as reason:
        print(f"  {name} {reason}", flush=True)
        return None
    # Lengths are an input of jattn's; to a peer they are constants.
    shapes = tuple((x.shape, x.dtype.name) for x in jax.tree.leaves(inputs))
    known = name, "" if name.startswith("jattn ") else case.tokens, jax.tree.structure(inputs), shapes
    compiled = programs.get(known) or gpu.compiled({name: jax.jit(function)}, inputs).get(name)
    programs |= {known: compiled} if compiled else {}
    out = compiled and gpu.attempt(name, lambda: jax.block_until_ready(compiled(*inputs)))
    return None if out is None else (compiled, inputs, out)


# Who computes it: each gives (function, inputs), or refuses with the reason.


def builders(case, data, on_gpu):
    """name -> builder: every implementation of jattn by its name, and the others that this device can run."""
    ours = {f"jattn {name}": functools.partial(_jattn, name) for name in _dispatch.names(case.op)}
    peers = PEERS if on_gpu else {"jax.nn": jax_nn}
    return {name: functools.partial(build, case, data) for name, build in (ours | peers).items()}


def _jattn(name, case, data):
    told = jattn.explain(*data.inputs, op=case.op, implementation=name)
    providers._require(told.implementation == name, told.refused.get(name))
    return functools.partial(getattr(jattn, case.op), implementation=name), data.inputs


def _plain(case):
    providers._require(not case.stored, f"has no {case.stored} cache")


def _lengths(case, data):
    return {} if case.tokens == "equal" else {"key_value_seq_lengths": data.lengths}


def _dot_product(function, case, data, **options):
    _plain(case)
    options |= _lengths(case, data)
    return functools.partial(function, **options), data.contiguous[:3]


def jax_nn(case, data):
    return _dot_product(jax.nn.dot_product_attention, case, data, implementation="xla")


def cudnn(case, data):
    return _dot_product(jax.nn.dot_product_attention, case, data, implementation="cudnn")


def tokamax(case, data):
    function = providers._module("tokamax").dot_product_attention
    return _dot_product(function, case, data, implementation="mosaic")


def fa3(case, data):
    _plain(case)
    providers._require(case.tokens == "equal", "takes equal lengths")
    return providers._module("dew_flash_attn").flash_mha, data.contiguous[:3]


def triton(case, data):
    """The kernels that jax ships, over pages by head."""
    _plain(case)
    query, key, value, lengths = data.contiguous
    package = providers._module(f"jax.experimental.pallas.ops.gpu.{case.op}")
    if case.page is None:
        call = functools.partial(package.gqa, kv_seq_len=lengths, sm_scale=case.H**-0.5)
        return lambda q, k, v: call(q[:, 0], k, v)[:, None], (query, key, value)
    pools = [x.transpose(2, 0, 1, 3) for x in (data.cache.key_pages, data.cache.value_pages)]
    scaled = query[:, 0] * case.H**-0.5  # what this kernel leaves to its caller
    return lambda *x: package.paged_attention(*x)[:, None], (scaled, *pools, data.cache.block_tables, lengths)


PEERS = {"cudnn": cudnn, "fa3": fa3, "tokamax": tokamax, "triton": triton, "jax.nn": jax_nn}
CONTIGUOUS = ("cudnn", "fa3", "tokamax", "jax.nn")  # have no pages: read a contiguous cache in their place


def rows(case, dtype, times, counts, ceiling):
    """A row for each implementation, its time relative to that of every other and of simpler caches in the same run."""
    peak = PEAK.get(jax.devices()[0].device_kind)
    size = case.bytes(dtype)
    for name, taken in times.items():
        if ", " in name:
            continue
        rate = 1e3 * size / taken.total
        equal = times.get(f"{name}, equal")
        wide = 1e3 * dataclasses.replace(case, tokens="equal").bytes(dtype) / equal.total if equal else None
        yield {
            "shape": str(case),
            "dtype": dtype,
            "pass": "decode",
            "tokens": case.tokens,
            "cache": case.stored or dtype,
            "implementation": name,
            "us": round(1e3 * taken.total, 2),
            "wall_us": round(1e3 * taken.wall, 2),
            "launches": counts.get(name) or "",
            "gbytes_per_s": round(rate / 1e9, 2),
            "percent_of_read": round(100 * rate / ceiling, 1),
            "percent_of_peak": round(100 * rate / peak, 1) if peak else "",
            **{f"times_{peer.replace('.', '_')}": _ratio(taken, times.get(peer)) for peer in PEERS},
            "times_unquantised": _ratio(taken, times.get(f"{name}, plain")),
            "percent_of_equal": round(100 * rate / wide, 1) if wide else "",
        }


def _ratio(taken, other):
    return "" if other is None else round(taken.total / other.total, 4)

"""`./run bench tune`: every legal tile config near the one that a problem gets, each timed beside it."""

import dataclasses
import itertools
import time

import jattn
from benchmarks import attention, cases, gpu
from benchmarks.shapes import selected
from jattn.pallas import configs

_TOGETHER = 6  # configs that are compiled at once and timed in turns with the current one
_RELEASES = (0.0, 0.25, 0.5, 0.75)


def tune(arguments):
    """Times legal tile configs of the forward kernel beside the one that is chosen now; needs Hopper."""
    start = time.perf_counter()
    wanted = selected(cases.GRID, arguments)
    for done, case in enumerate(wanted):
        for row in case_rows(case, arguments, start + arguments.budget):
            if row is None:
                print(f"stopped after {arguments.budget:.0f} s; not finished: {'; '.join(map(str, wanted[done:]))}")
                return
            yield row


def legal(shape, current):
    """Configs the kernel can run on these head dims: the current one with a field changed, then `candidates()`."""
    fields = {field.name for field in dataclasses.fields(current)}
    near = [dataclasses.replace(current, **{name: value}) for name, value in _changes(current) if name in fields]
    known = dict.fromkeys([*near, *configs.candidates()])
    return [c for c in known if c != current and c.why_not(shape.H, shape.D) is None]


def _changes(current):
    values = {
        "release_after": _RELEASES,
        "lazy_rescale": (False, True),
        "edge_turns": (False, True),
        "warpgroups": (1, 2, 3),
        "block_k": range(max(current.block_k - 32, 32), min(current.block_k + 32, 256) + 1, 16),
    }
    return [(name, value) for name, options in values.items() for value in options]


def case_rows(case, arguments, end):
    """A row for each config; None when the time is over."""
    current = attention.explained(case).config
    if not isinstance(current, configs.TileConfig):
        print(f"  {case} does not run on the Hopper kernel here: {current!r}", flush=True)
        return
    inputs = (*case.shape.inputs("bfloat16"), {})
    others = iter(legal(case.shape, current))
    while batch := list(itertools.islice(others, _TOGETHER)):
        if time.perf_counter() > end:
            yield None
            return
        functions = {named(config): gpu.step(_with(case, config), False) for config in [current, *batch]}
        ready = gpu.agreeing(case, gpu.compiled(functions, inputs), inputs, False)
        times = gpu.measured({name: (f, inputs) for name, f in ready.items()}, arguments.repeats)
        yield from rows(case, times, named(current))


def _with(case, config):
    def forward(query, key, value, arrays):
        keywords = case.keywords(arrays)
        return jattn.attention(query, key, value, implementation="mosaic", config=config, **keywords)

    return forward


def named(config):
    """All fields of a config, so that a row still means the same when a default has changed."""
    return " ".join(f"{name}={value}" for name, value in dataclasses.asdict(config).items())


def rows(case, times, current):
    if current not in times:
        print(f"  {case}: the current config could not be timed", flush=True)
        return
    for name, taken in times.items():
        yield {
            "shape": str(case),
            "dtype": "bfloat16",
            "pass": "fwd",
            "implementation": "jattn" if name == current else "candidate",
            "ms": round(taken.total, 4),
            "tflops": round(case.flops() / taken.total / 1e9, 1),
            "times_current": round(taken.total / times[current].total, 4),
            "config": name,
        }

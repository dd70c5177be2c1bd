"""`./run bench attention`: the Hopper kernels beside every peer that can be imported, and what features cost."""

import functools
import json
import pathlib
import subprocess
import sys
import time

import jattn
from benchmarks import cases, flex, gpu, providers
from benchmarks.shapes import selected

PEERS = [name for name in providers.PROVIDERS if name != "jattn"]


def attention(arguments):
    """Kernel times on a GPU against FlashAttention-3, cuDNN, tokamax, jla and XLA, bfloat16; needs Hopper."""
    start = time.perf_counter()
    wanted = selected(tables(arguments.table), arguments)
    ceiling = gpu.matmul_ceiling()
    print(f"matmul ceiling {ceiling:.0f} TFLOP/s", flush=True)
    flexed = gpu.attempt("flex", lambda: flex_times(wanted, arguments.of)) if arguments.flex else None
    for done, case in enumerate(wanted):
        if time.perf_counter() - start > arguments.budget:
            print(f"stopped after {arguments.budget:.0f} s; not measured: {'; '.join(map(str, wanted[done:]))}")
            return
        times = case_times(case, arguments)
        if ms := (flexed or {}).get(str(case)):
            times["flex"] = gpu.Time(ms, ms, ms)
        yield from rows(case, times, arguments.of, ceiling)
        print(f"  at {time.perf_counter() - start:.0f} s", flush=True)


def tables(name):
    return {"grid": cases.GRID, "features": cases.FEATURES, "all": cases.GRID + cases.FEATURES}[name]


def case_times(case, arguments):
    """name -> Time of the providers that agree; of a feature also jattn's own without it, as "causal" and "full"."""
    backward = arguments.of == "fwd+bwd"
    inputs = (*case.shape.inputs("bfloat16"), case.arrays())
    asked = [name for name in providers.PROVIDERS if name in arguments.providers]
    built = {name: providers.build(name, case) for name in asked}
    functions = {name: gpu.step(f, backward) for name, f in built.items() if f is not None}
    agreeing = gpu.agreeing(case, gpu.compiled(functions, inputs), inputs, backward)
    plain = plain_functions(backward) if case in cases.FEATURES and "jattn" in asked else {}
    without = {name: (function, (*inputs[:-1], {})) for name, function in plain.items()}
    return gpu.measured(without | {name: (f, inputs) for name, f in agreeing.items()}, arguments.repeats)


@functools.cache
def plain_functions(backward):
    """jattn on what a feature's cost is relative to, compiled and called once."""
    functions = {name: gpu.step(providers.jattn_(case), backward) for name, case in cases.PLAIN.items()}
    case = cases.PLAIN["full"]
    inputs = (*case.shape.inputs("bfloat16"), {})
    found = gpu.compiled(functions, inputs)
    return {name: f for name, f in found.items() if gpu.attempt(name, functools.partial(f, *inputs)) is not None}


def rows(case, times, of, ceiling):
    """A row for each implementation, its time relative to every peer's and to plain masks in the same run."""
    for name, taken in times.items():
        if name in cases.PLAIN:
            continue
        tflops = case.flops(of == "fwd+bwd") / taken.total / 1e9
        yield {
            "shape": str(case),
            "dtype": "bfloat16",
            "pass": of,
            "implementation": name,
            "ms": round(taken.total, 4),
            "longest_ms": round(taken.longest, 4),
            "wall_ms": round(taken.wall, 4),
            "tflops": round(tflops, 1),
            "percent_of_matmul": round(100 * tflops / ceiling, 1),
            **{f"times_{peer}": _ratio(taken, times.get(peer)) for peer in (*PEERS, "flex", *cases.PLAIN)},
            "config": config(case) if name == "jattn" else "",
        }


def _ratio(taken, other):
    return "" if other is None else round(taken.total / other.total, 4)


def config(case):
    """What jattn runs on, with the fields of its tile config that are not the default."""
    found = gpu.attempt("explain", lambda: explained(case))
    if found is None:
        return ""
    fields = getattr(found.config, "__dataclass_fields__", {})
    own = [f"{f.name}={getattr(found.config, f.name)}" for f in fields.values()
           if getattr(found.config, f.name) != f.default]  # fmt: skip
    backward = [f"backward {found.backward}"] if found.backward != found.implementation else []
    return " ".join([found.implementation, *own, *backward])


def explained(case):
    return jattn.explain(*case.shape.specs("bfloat16")[:3], **case.keywords(case.arrays()))


def flex_times(wanted, of):
    """Milliseconds of compiled PyTorch FlexAttention by case, from a process of its own on the same card."""
    names = [str(case) for case in wanted if str(case) in flex.CASES]
    if not names:
        return {}
    print(f"  flex compiles {len(names)} cases", flush=True)
    command = [sys.executable, "-m", "benchmarks.flex", of, *names]
    done = subprocess.run(command, cwd=pathlib.Path(__file__).parents[1], capture_output=True, text=True, timeout=240)
    if done.returncode:
        raise RuntimeError(done.stderr[-300:])
    print("".join(f"  {line}\n" for line in done.stderr.splitlines() if line.startswith("flex ")), end="", flush=True)
    return json.loads(done.stdout.splitlines()[-1])

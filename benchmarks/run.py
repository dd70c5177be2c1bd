"""`./run bench SUITE`: one row per shape and implementation, appended to benchmarks/results/SUITE.csv."""

import argparse
import functools

import jax
import jax.numpy as jnp

import jattn
from benchmarks import (
    attention,
    compressed,
    decode,
    gpu,
    linear,
    providers,
    record,
    sequence,
    shapes,
    sparse,
    timing,
    training,
    tune,
)  # fmt: skip
from benchmarks.shapes import selected

# Largest allowed max|x - y| / max|y| between two implementations before any of them is timed.
AGREEMENT = {"float32": 1e-5, "float16": 4e-3, "bfloat16": 3e-2}


def forward_backward(attention, options):
    """The compiled function of (query, key, value, dout) to (out, dquery, dkey, dvalue)."""

    @jax.jit
    def step(query, key, value, dout):
        out, pullback = jax.vjp(lambda *inputs: attention(*inputs, **options), query, key, value)
        return out, *pullback(dout)

    return step


def implementations(shape, dtype):
    """name -> attention function, jattn's as this device chooses it."""
    chosen = jattn.explain(*shape.specs(dtype)[:3], **shape.options).implementation
    return {
        f"jattn {chosen}": jattn.attention,
        "jax.nn xla": functools.partial(jax.nn.dot_product_attention, implementation="xla"),
    }


def disagreement(results, expected):
    """The largest max|x - y| / max|y| over the outputs."""
    pairs = zip(results, expected, strict=True)
    return max(float(jnp.max(jnp.abs(x - y)) / jnp.max(jnp.abs(y))) for x, y in pairs)


def gate(shape, dtype, calls):
    """Calls each once and raises when one is not what the last one, the dense peer, computes."""
    *others, (_, peer) = calls.items()
    expected = jax.block_until_ready(peer())
    for name, call in others:
        if not (found := disagreement(call(), expected)) <= AGREEMENT[dtype]:
            raise SystemExit(f"{shape}: {name} differs from the dense computation by {found:.1e}; nothing was timed")


def matmul_ceiling(dtype, size=2048):
    """A matrix product without arguments, and its operations: what this device reaches at best."""
    x = jax.random.normal(jax.random.key(0), (size, size), jnp.float32).astype(dtype)
    product = jax.jit(jnp.matmul)
    jax.block_until_ready(product(x, x))
    return functools.partial(product, x, x), 2 * size**3


def cpu(arguments):
    """Forward and backward against jax.nn, float32, wall time."""
    dtype = "float32"
    product, product_flops = matmul_ceiling(dtype)
    for shape in selected(shapes.CPU, arguments):
        inputs = shape.inputs(dtype)
        calls = {
            name: functools.partial(forward_backward(function, shape.options), *inputs)
            for name, function in implementations(shape, dtype).items()
        }
        gate(shape, dtype, calls)
        taken = timing.interleaved(calls | {"ceiling": product}, arguments.repeats)
        ceiling = product_flops / taken["ceiling"]
        for name in calls:
            rate = shape.flops(backward=True) / taken[name]
            yield {
                "shape": str(shape),
                "dtype": dtype,
                "pass": "fwd+bwd",
                "implementation": name,
                "ms": round(taken[name] * 1e3, 2),
                "tflops": round(rate / 1e12, 4),
                "percent_of_matmul": round(100 * rate / ceiling, 1),
                "times_jax_nn": round(taken["jax.nn xla"] / taken[name], 2),
            }


def memory(arguments):
    """Temporary bytes of forward and backward as compiled, float32; nothing is run."""
    dtype = "float32"
    for shape in selected(shapes.MEMORY, arguments):
        for name, function in implementations(shape, dtype).items():
            compiled = forward_backward(function, shape.options).lower(*shape.specs(dtype)).compile()
            temporary = compiled.memory_analysis().temp_size_in_bytes
            yield {
                "shape": str(shape),
                "dtype": dtype,
                "length": shape.S,
                "implementation": name,
                "temporary_bytes": temporary,
                "qkvo_bytes": shape.bytes(dtype),
                "times_qkvo": round(temporary / shape.bytes(dtype), 2),
            }


def sparse_stages(arguments):
    """The stages of MLA, sparse and compressed attention, each beside its roofline."""
    yield from sparse.sparse(arguments)
    yield from compressed.compressed(arguments)


SUITES = {
    "cpu": cpu, "memory": memory, "attention": attention.attention, "tune": tune.tune, "sequence": sequence.sequence,
    "linear": linear.linear_suite, "scaling": linear.scaling, "sparse": sparse_stages, "decode": decode.decode,
    "paged": decode.paged, "training": training.training,
}  # fmt: skip
ON_GPU = ("attention", "tune")
CACHES = ("decode", "paged")


def parser():
    top = argparse.ArgumentParser(prog="./run bench", description=__doc__)
    commands = top.add_subparsers(dest="suite", required=True)
    for name, suite in SUITES.items():
        command = commands.add_parser(name, help=suite.__doc__, description=suite.__doc__)
        command.add_argument("--only", default="", metavar="TEXT", help="the shapes whose name contains TEXT")
        rounds = 3 if name in ON_GPU else 9
        command.add_argument(
            "--repeats", type=int, default=rounds, help=f"rounds; the median is reported (default {rounds})"
        )
        command.add_argument("--no-record", action="store_true", help="print the rows, leave the CSV file alone")
        if name in (*ON_GPU, *CACHES):
            command.add_argument(
                "--budget", type=float, default=float("inf"), metavar="SECONDS", help="start no shape after that time"
            )
    _attention_options(commands.choices["attention"])
    for name in CACHES:
        _cache_options(commands.choices[name])
    return top


def _attention_options(command):
    names = list(providers.PROVIDERS)
    command.add_argument("--pass", dest="of", choices=("fwd", "fwd+bwd"), default="fwd")
    command.add_argument("--table", choices=("all", "grid", "features"), default="all", help="which shapes")
    command.add_argument(
        "--providers", type=lambda text: text.split(","), default=names, metavar="NAME,...", help=",".join(names)
    )
    command.add_argument("--flex", action="store_true", help="also PyTorch FlexAttention (features)")


def _cache_options(command):
    tables = dict(choices=("targets", "sweep"), default="targets")
    command.add_argument("--table", **tables, help="which shapes; a CPU has small ones (default targets)")
    command.add_argument(
        "--providers", type=lambda text: text.split(","), metavar="NAME,...",
        help=f"jattn IMPLEMENTATION, {', '.join(decode.PEERS)} (default all)",
    )  # fmt: skip


def main(argv=None):
    arguments = parser().parse_args(argv)
    if arguments.suite in ON_GPU:
        gpu.prepare()
    environment = record.environment()
    print(", ".join(f"{name} {value}" for name, value in environment.items()))
    for number, row in enumerate(SUITES[arguments.suite](arguments)):
        if number == 0:
            print(record.line(row, header=True))
        print(record.line(row), flush=True)
        if not arguments.no_record:
            record.append(record.RESULTS / f"{arguments.suite}.csv", [environment | row])


if __name__ == "__main__":
    main()

"""`./run bench training`: the demo's language model at the size of a GPU, with `jattn.attention` and with cuDNN's.

The same parameters and batches, bfloat16 products over float32 parameters, AdamW. cuDNN gets what `jax.nn` can express:
documents and windows as one dense mask a layer. The losses of both go to the rows, and stop the run if the first steps
are not the same; later ones part, as those of two runs with other rounding do.
"""

import functools
import importlib.util
import pathlib
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jattn
from benchmarks import gpu
from benchmarks.shapes import selected

_DEMO = pathlib.Path(__file__).parents[1] / "notebooks" / "demo.py"
STEPS = 200
SIZES = {
    "gpu": dict(sequence_length=8192, batch=2, layers=12, width=1024, heads=16, kv_heads=4, window=1024),
    "cpu": dict(sequence_length=128, batch=2, layers=2, width=64, heads=4, kv_heads=2, window=32),
}
AGREEMENT = 1e-3  # of the losses of the first steps
_SAME = 10  # steps
_ATTENTION = ("jattn", "cudnn", "fmha", "sdpa")  # in the names of attention's kernels


def training(arguments):
    """Tokens a second, peak memory as compiled, attention's share of the kernels' time, and losses."""
    demo = _module()
    where = "gpu" if jax.default_backend() == "gpu" else "cpu"
    steps = STEPS if where == "gpu" else 12
    config = demo.Config(steps=steps, learning_rate=1e-3, **SIZES[where])
    rows = demo.pack(demo.split_documents()[0], config.sequence_length)
    first = None
    for name, layer in _layers(demo, "cudnn" if where == "gpu" else "xla").items():
        if not selected([name], arguments):
            continue
        losses, row = _trained(demo, name, layer, config, rows)
        first = first or losses
        apart = max(abs(x / y - 1) for x, y in zip(losses[:_SAME], first, strict=False))
        if not apart <= AGREEMENT:
            raise SystemExit(f"{name}: a loss of the first {_SAME} steps differs by {apart:.1e}")
        yield row


def _module():
    spec = importlib.util.spec_from_file_location("jattn_demo", _DEMO)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _layers(demo, peer):
    """name -> what makes a layer."""

    def dense(query, key, value, *, mask, **_):
        query, key = jattn.rope(query), jattn.rope(key)
        return jax.nn.dot_product_attention(query, key, value, mask=mask, implementation=peer)

    def dense_layer(config, i, rngs):
        layer = demo.DenseLayer(config, i, rngs)
        layer.attention_fn = dense
        return layer

    return {"jattn": demo.jattn_layer, f"jax.nn {peer}": dense_layer}


def _trained(demo, name, layer, config, rows):
    """(losses, row) of one run."""
    graphdef, params = demo.build(layer, config)
    params, optimizer = jax.tree.map(lambda x: x.astype(jnp.float32), params), demo.optimizer_of(config)
    batches = [batch for batch, _ in zip(demo.training_batches(rows, config), range(config.steps), strict=False)]
    state = jax.jit(optimizer.init)(params)
    step = jax.jit(functools.partial(_step, demo, graphdef, optimizer), donate_argnums=(0, 1))
    program = step.lower(params, state, batches[0]).compile()
    losses, ends = [], [time.perf_counter()]
    for number, batch in enumerate(batches):
        params, state, loss = program(params, state, batch)
        losses.append(loss)
        if (number + 1) % 10 == 0:
            jax.block_until_ready(loss)
            ends.append(time.perf_counter())
            print(f"  {name}: step {number + 1} of {config.steps}, loss {float(loss):.3f}", flush=True)
    losses = [float(x) for x in losses]
    kernels = _kernels(program, params, state, batches[0])
    return losses, _row(name, config, params, losses, np.diff(ends) / 10, program, kernels)


def _step(demo, graphdef, optimizer, params, state, batch):
    def loss_of(params):
        return demo.loss_of(graphdef, jax.tree.map(lambda x: x.astype(jnp.bfloat16), params), batch)

    loss, gradients = jax.value_and_grad(loss_of)(params)
    updates, state = optimizer.update(gradients, state, params)
    return optax.apply_updates(params, updates), state, loss


def _kernels(program, params, state, batch):
    """(name, ms) of each kernel of one step, None where nobody counts."""
    if jax.default_backend() != "gpu":
        return None
    copy = jax.tree.map(jnp.copy, (params, state))  # the step overwrites them
    donated = iter([copy, jax.tree.map(jnp.copy, copy)])
    return gpu.attempt("profiler", lambda: gpu.named_launches(lambda: program(*next(donated), batch), (), 1)[0])


def _row(name, config, params, losses, seconds, program, kernels):
    usual, last = statistics.median(seconds), statistics.mean(losses[-20:])
    total = sum(ms for _, ms in kernels) if kernels else None
    attention = sum(ms for n, ms in kernels if any(w in n.lower() for w in _ATTENTION)) if kernels else None
    memory = program.memory_analysis()
    needed = memory.temp_size_in_bytes + memory.argument_size_in_bytes + memory.output_size_in_bytes
    millions = sum(x.size for x in jax.tree.leaves(nnx.to_pure_dict(params))) / 1e6
    shape = f"B{config.batch} S{config.sequence_length} N{config.heads}/{config.kv_heads}"
    return {
        "shape": f"{config.layers} layers of {config.width}, {shape}",
        "dtype": "bfloat16",
        "pass": "train",
        "implementation": name,
        "million_parameters": round(millions, 1),
        "steps": config.steps,
        "ms": round(1e3 * usual, 2),
        "tokens_per_s": round(config.batch * config.sequence_length / usual),
        "kernel_ms": round(total, 2) if kernels else "",
        "attention_ms": round(attention, 2) if kernels else "",
        "attention_percent": round(100 * attention / total, 1) if kernels else "",
        "temporary_gib": round(memory.temp_size_in_bytes / 2**30, 2),
        "peak_gib": round((needed - memory.alias_size_in_bytes) / 2**30, 2),
        "losses_1_2_5_10": " ".join(f"{losses[i - 1]:.4f}" for i in (1, 2, 5, 10)),
        "mean_of_the_last_20": round(last, 4),
    }

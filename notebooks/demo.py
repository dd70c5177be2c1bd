"""A byte-level language model on `jattn.nnx.MultiHeadAttention`, trained on the help topics that Python ships.

    ./run demo [--steps 250] [--sequence-length 512] [--seed 0] [--devices 1 | --hybrid]

1. Ten training steps in lockstep with the same model on `jax.nn.dot_product_attention` and dense masks: losses and
   gradients must agree to 1e-5, or the script exits with 1.
2. The temporary memory of both, forward and backward, against the sequence length.
3. Training, and the loss on held-out documents before and after.
4. A sample of generated text: the prompt at once, then byte by byte through the caches of the layers. The logits on
   the way must be those of the model without caches to 1e-5, or the script exits with 1.

Documents are packed several to a row and kept apart by segment ids; layers alternate between a local window and the
whole document. Uses a GPU if there is one. Plots go to demo-output/.

With `--devices 8` every sequence is spread over eight virtual CPU devices, whose attention is `jattn.ring_attention`.

With `--hybrid` three layers in four are Kimi Delta Attention, whose memory is a state of fixed size, and the fourth is
gated multi-head latent attention; only 3 and 4 are done.
"""

import argparse
import contextlib
import dataclasses
import functools
import sys
import time
from pathlib import Path
from pydoc_data.topics import topics
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jattn
import jattn.nnx

OUTPUT = Path(__file__).resolve().parent.parent / "demo-output"
START = 0  # the byte that opens a document; it does not occur in the text
PADDING = -1  # the segment id of unused slots
TOLERANCE = 1e-5


@dataclasses.dataclass(frozen=True)
class Config:
    steps: int = 250
    sequence_length: int = 512
    seed: int = 0
    batch: int = 4
    layers: int = 2
    width: int = 192
    heads: int = 6
    kv_heads: int = 2
    window: int = 64
    learning_rate: float = 5e-3
    memory_lengths: tuple = (512, 2048, 8192)
    sample_length: int = 320
    temperature: float = 0.7
    devices: int = 1
    hybrid: bool = False

    @property
    def layout(self):
        return jattn.SequenceLayout("zigzag", self.devices)

    def window_of(self, i):
        """The window of layer i."""
        return None if i % 2 else (self.window, 0)


HYBRID = Config(
    steps=150, sequence_length=256, batch=8, layers=4, width=128, heads=4, learning_rate=8e-3, hybrid=True,
)


# Data

class Batch(NamedTuple):
    tokens: jax.Array  # [B, T] uint8, START at the first slot of a piece
    targets: jax.Array  # [B, T] uint8, the byte that follows
    segments: jax.Array  # [B, T] int32, which piece of the row, or PADDING


def split_documents():
    """(training, held-out) documents; every tenth topic is held out."""
    documents = [without_tables(text).encode() for _, text in sorted(topics.items())]
    return [d for i, d in enumerate(documents) if i % 10], documents[::10]


def without_tables(text):
    """`text` less its table rows, which are mostly spaces: a sample that enters one does not come out."""
    return "".join(line for line in text.splitlines(keepends=True) if line[0] not in "|+")


def pack(documents, length):
    """Rows of at most `length` bytes, first fit: only documents longer than a row are cut."""
    pieces = [d[i : i + length] for d in documents for i in range(0, len(d), length)]
    rows, room = [], []
    for piece in sorted(pieces, key=len, reverse=True):
        row = next((i for i, free in enumerate(room) if free >= len(piece)), None)
        if row is None:
            row = len(rows)
            rows.append([])
            room.append(length)
        rows[row].append(piece)
        room[row] -= len(piece)
    return Batch(*map(np.stack, zip(*(pack_row(row, length) for row in rows), strict=True)))


def pack_row(pieces, length):
    tokens, targets = np.zeros((2, length), np.uint8)
    segments = np.full(length, PADDING, np.int32)
    at = 0
    for i, piece in enumerate(pieces):
        end = at + len(piece)
        targets[at:end] = np.frombuffer(piece, np.uint8)
        tokens[at + 1 : end] = targets[at : end - 1]
        tokens[at] = START
        segments[at:end] = i
        at = end
    return tokens, targets, segments


def take(rows, indices):
    return jax.tree.map(lambda x: jnp.asarray(x[indices]), rows)


def training_batches(rows, config):
    generator = np.random.default_rng(config.seed)
    while True:
        yield take(rows, generator.choice(len(rows.tokens), config.batch, replace=False))


# Model

# Layers, by their number in the model.

def jattn_layer(config, i, rngs):
    return jattn.nnx.MultiHeadAttention(
        config.heads, config.width, num_kv_heads=config.kv_heads, is_causal=True,
        local_window_size=config.window_of(i), rope=True, use_bias=False, rngs=rngs,
    )


def ring_layer(config, i, rngs):
    """The same layer over tokens that `spread` has laid out."""
    layer = jattn_layer(config, i, rngs)
    layer.attention_fn = functools.partial(ring_attention, config.layout)
    return layer


def ring_attention(layout, query, key, value, *, is_causal, options, **flax_options):
    positions = layout.positions(query.shape[1])
    return jattn.ring_attention(
        jattn.rope(query, positions), jattn.rope(key, positions), value, is_causal=is_causal, axis="sequence",
        layout=layout, segment_ids=options["segment_ids"], local_window_size=options["local_window_size"],
    )


def spread(config, batch):
    """`batch` over the devices, its tokens in layout order."""
    if config.devices == 1:
        return batch
    sharding = NamedSharding(jax.sharding.get_mesh(), PartitionSpec(None, "sequence"))
    return jax.tree.map(lambda x: jax.device_put(config.layout.shard(x), sharding), batch)


def dense_attention(query, key, value, *, mask, **flax_options):
    return jax.nn.dot_product_attention(jattn.rope(query), jattn.rope(key), value, mask=mask)


class DenseLayer(nnx.MultiHeadAttention):
    """The same layer from Flax and jax.nn, with the mask written out."""

    def __init__(self, config, i, rngs):
        super().__init__(
            config.heads, config.width, num_kv_heads=config.kv_heads, use_bias=False, attention_fn=dense_attention,
            decode=False, rngs=rngs,
        )
        self.window = config.window_of(i)

    def __call__(self, x, segment_ids):
        position = jnp.arange(x.shape[1])
        distance = position[:, None] - position
        mask = (distance >= 0) & (segment_ids[:, :, None] == segment_ids[:, None, :])
        if self.window is not None:
            mask &= distance <= self.window[0]
        return super().__call__(x, mask=mask[:, None])


def hybrid_layer(config, i, rngs):
    if i % 4 == 3:
        return jattn.nnx.MultiHeadLatentAttention(config.heads, config.width, gated=True, rope=False, rngs=rngs)
    return jattn.nnx.KimiDeltaAttention(config.heads, config.width, rngs=rngs)


class Block(nnx.Module):
    def __init__(self, attention, config, i, rngs):
        self.attention_norm = nnx.RMSNorm(config.width, rngs=rngs)
        self.attention = attention(config, i, rngs)
        self.mlp_norm = nnx.RMSNorm(config.width, rngs=rngs)
        self.up = nnx.Linear(config.width, 4 * config.width, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(4 * config.width, config.width, use_bias=False, rngs=rngs)

    def __call__(self, x, **options):
        x = x + self.attention(self.attention_norm(x), **options)
        return x + self.down(jax.nn.gelu(self.up(self.mlp_norm(x))))


class LanguageModel(nnx.Module):
    def __init__(self, attention, config, rngs):
        self.embed = nnx.Embed(256, config.width, rngs=rngs)
        self.blocks = nnx.List([Block(attention, config, i, rngs) for i in range(config.layers)])
        self.norm = nnx.RMSNorm(config.width, rngs=rngs)
        self.head = nnx.Linear(config.width, 256, use_bias=False, rngs=rngs)

    def __call__(self, tokens, segments=None, decode=False):
        """Logits of packed rows; with `decode` a row is one document, whose tokens follow those in the caches."""
        x = self.embed(tokens.astype(jnp.int32))
        for block in self.blocks:
            x = block(x, **({"decode": True} if decode else {"segment_ids": segments}))
        return self.head(self.norm(x))

    def init_cache(self, batch, length):
        for block in self.blocks:
            block.attention.init_cache((batch, length, self.embed.features))


def build(attention, config):
    """(graphdef, params): the model as a static half and a tree of arrays, initialised in one compilation."""
    model = nnx.jit(lambda: LanguageModel(attention, config, nnx.Rngs(config.seed)))()
    return nnx.split(model, nnx.Param)


def graph_of(attention, config):
    """The static half alone."""
    return nnx.graphdef(nnx.eval_shape(lambda: LanguageModel(attention, config, nnx.Rngs(config.seed))))


def loss_of(graphdef, params, batch):
    """Mean cross-entropy in nats per byte, padding left out."""
    logits = nnx.merge(graphdef, params)(batch.tokens, batch.segments)
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch.targets.astype(jnp.int32))
    return jnp.mean(loss, where=batch.segments != PADDING)


def optimizer_of(config):
    schedule = optax.warmup_cosine_decay_schedule(0.0, config.learning_rate, 10, max(config.steps, 11))
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.95, weight_decay=0.01))


def step_of(graphdef, optimizer):
    @jax.jit
    def step(params, state, batch):
        loss, gradients = jax.value_and_grad(functools.partial(loss_of, graphdef))(params, batch)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss, gradients

    return step


# 1. The same numbers

def relative_difference(x, reference):
    """The largest max|x - reference| / max|reference| over the arrays of two trees; NaN if one is NaN."""
    ratios = jax.tree.map(lambda a, b: jnp.max(jnp.abs(a - b)) / jnp.max(jnp.abs(b)), x, reference)
    return np.max(jax.tree.leaves(ratios))


def run_lockstep(ours, dense, params, batches, optimizer, steps=10):
    """Train both from `params`; the largest relative difference of the losses, and of the gradients."""
    mine = theirs = (params, jax.jit(optimizer.init)(params))
    worst = np.zeros(2)
    for i in range(steps):
        batch = next(batches)
        *mine, loss, gradients = ours(*mine, batch)
        *theirs, dense_loss, dense_gradients = dense(*theirs, batch)
        difference = relative_difference(loss, dense_loss), relative_difference(gradients, dense_gradients)
        print(f"  step {i + 1:2d}  loss {loss:.6f}  jax.nn {dense_loss:.6f}  "
              f"relative difference: loss {difference[0]:.1e}, gradients {difference[1]:.1e}")
        worst = np.maximum(worst, difference)
    return worst


# 2. Memory

def temporary_bytes(graphdef, params, length):
    """What XLA allocates besides inputs and outputs for loss and gradients of one row of `length` bytes."""
    byte, segment = (jax.ShapeDtypeStruct((1, length), dtype) for dtype in (jnp.uint8, jnp.int32))
    gradient = jax.jit(jax.value_and_grad(functools.partial(loss_of, graphdef)))
    return gradient.lower(params, Batch(byte, byte, segment)).compile().memory_analysis().temp_size_in_bytes


def show_memory(ours, dense, params, lengths):
    print("  length      jattn     jax.nn   (MiB)")
    table = []
    for length in lengths:
        table.append([temporary_bytes(graphdef, params, length) / 2**20 for graphdef in (ours, dense)])
        print(f"  {length:6d} {table[-1][0]:10.1f} {table[-1][1]:10.1f}")
    return np.array(table)


# 3. Training and sampling

def show_progress(step, steps, loss, begin):
    """A bar that redraws itself on a terminal, a line every tenth elsewhere."""
    seconds = time.perf_counter() - begin
    text = f"step {step:4d}/{steps}  loss {loss:.3f}  {seconds:5.1f} s"
    if sys.stdout.isatty():
        filled = 30 * step // steps
        print(f"\r  [{'#' * filled}{'.' * (30 - filled)}] {text}", end="" if step < steps else "\n", flush=True)
    elif step % max(1, steps // 10) == 0 or step == steps:
        print(f"  {text}", flush=True)


def train(step, params, batches, optimizer, steps):
    """Trained params and the loss of every step."""
    state, losses, begin = jax.jit(optimizer.init)(params), [], time.perf_counter()
    for i in range(steps):
        params, state, loss, _ = step(params, state, next(batches))
        losses.append(float(loss))
        show_progress(i + 1, steps, np.mean(losses[-20:]), begin)
    return params, losses


def generate(graphdef, params, key, prompt, length, temperature):
    """`prompt` continued to `length` tokens through the caches, and the logits that the new ones were drawn from."""

    @jax.jit
    def run(params, prompt, key):
        model = nnx.merge(graphdef, params)
        model.init_cache(1, length)
        logits = model(prompt[None], decode=True)[0, -1]
        static, _, caches = nnx.split(model, nnx.Param, nnx.Cache)

        def append(carry, i):
            caches, logits = carry
            token = draw(jax.random.fold_in(key, i), logits, temperature).astype(jnp.uint8)
            model = nnx.merge(static, params, caches)
            following = model(token[None, None], decode=True)[0, 0]
            return (nnx.state(model, nnx.Cache), following), (token, logits)

        new = jnp.arange(length - len(prompt))
        _, (tokens, logits) = jax.lax.scan(append, (caches, logits), new)
        return jnp.concatenate([prompt, tokens]), logits

    return run(params, jnp.asarray(prompt), key)


def draw(key, logits, temperature):
    return jax.random.categorical(key, logits / temperature) if temperature else jnp.argmax(logits)


@functools.partial(jax.jit, static_argnums=0)
def without_caches(graphdef, params, tokens):
    """The logits behind every token of one document."""
    return nnx.merge(graphdef, params)(tokens[None], jnp.zeros((1, len(tokens)), jnp.int32))[0]


def sample(graphdef, params, prompt, config):
    """Prints `prompt` continued; whether the caches gave the logits of the whole row at once."""
    first = np.frombuffer(bytes([START]) + prompt, np.uint8)
    key = jax.random.key(config.seed)
    tokens, logits = generate(graphdef, params, key, first, config.sample_length, config.temperature)
    print(bytes(np.asarray(tokens)[1:]).decode(errors="replace"))
    whole = without_caches(graphdef, params, tokens)[len(first) - 1 : -1]
    same, difference = int((logits.argmax(-1) == whole.argmax(-1)).sum()), relative_difference(logits, whole)
    print(f"\n  without caches: the same likeliest byte at {same} of {len(whole)} places, "
          f"relative difference of the logits {difference:.1e}")
    return difference <= TOLERANCE


def plot(lengths, memory, losses, folder):
    """The losses, and the memory if it was looked at."""
    try:
        import matplotlib
    except ImportError:
        return
    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    figure = plt.figure(figsize=(10, 4), layout="constrained")
    if memory is not None:
        left = figure.add_subplot(1, 2, 1)
        left.loglog(lengths, memory, marker="o", label=["jattn", "jax.nn"])
        left.set(xlabel="sequence length", ylabel="temporary memory, forward + backward (MiB)")
        left.set_xticks(lengths, lengths)
        left.minorticks_off()
        left.legend()
    right = figure.add_subplot(1, 1 if memory is None else 2, 1 if memory is None else 2)
    right.plot(losses)
    right.set(xlabel="step", ylabel="loss (nats per byte)")
    folder.mkdir(exist_ok=True)
    figure.savefig(folder / "demo.png", dpi=150)
    plt.close(figure)
    print(f"  plots in {folder.name}/demo.png")


def show_size(params, rows):
    size = sum(x.size for x in jax.tree.leaves(params))
    used = int((rows.segments != PADDING).sum())
    pieces = int(rows.segments.max(axis=1).sum()) + len(rows.segments)
    print(f"{size:,} parameters on {jax.devices()[0].device_kind}; "
          f"{used:,} bytes in {pieces} pieces, {len(rows.tokens)} rows of {rows.tokens.shape[1]}")


def compare(step, dense, params, rows, optimizer, config):
    """Whether the first ten losses and gradients agree."""
    batches = training_batches(rows, config)

    def ours(params, state, batch):
        return step(params, state, spread(config, batch))

    worst = run_lockstep(ours, step_of(dense, optimizer), params, batches, optimizer)
    print(f"  largest relative difference: loss {worst[0]:.1e}, gradients {worst[1]:.1e}")
    return np.max(worst) <= TOLERANCE  # false for NaN too


def run(config, output=OUTPUT):
    """The whole demo; 0, or 1 if the two models differ."""
    mesh = jax.make_mesh((config.devices,), ("sequence",), axis_types=(AxisType.Auto,))
    with jax.set_mesh(mesh) if config.devices > 1 else contextlib.nullcontext():
        return run_on_mesh(config, output)


def layers_of(config):
    """The layer of the model that trains, and the same on one device."""
    if config.hybrid:
        return hybrid_layer, hybrid_layer
    return jattn_layer if config.devices == 1 else ring_layer, jattn_layer


def run_on_mesh(config, output):
    training, held_out = (pack(documents, config.sequence_length) for documents in split_documents())
    held_out = take(held_out, np.arange(min(len(held_out.tokens), 8 * config.batch)))
    layer, layer_alone = layers_of(config)
    ours, params = build(layer, config)
    alone = graph_of(layer_alone, config)
    optimizer, memory = optimizer_of(config), None
    step = step_of(ours, optimizer)
    show_size(params, training)

    if not config.hybrid:
        dense = graph_of(DenseLayer, config)
        print("\nThe same model on jattn and on jax.nn, in lockstep:")
        if not compare(step, dense, params, training, optimizer, config):
            print(f"  FAILED: more than {TOLERANCE:.0e}")
            return 1
        print("\nTemporary memory of one forward and backward pass:")
        memory = show_memory(alone, dense, params, config.memory_lengths)

    print("\nTraining:")
    evaluate = jax.jit(functools.partial(loss_of, ours))
    held_out = spread(config, held_out)
    before = evaluate(params, held_out)
    batches = (spread(config, batch) for batch in training_batches(training, config))
    params, losses = train(step, params, batches, optimizer, config.steps)
    print(f"  held-out loss {before:.3f} before, {evaluate(params, held_out):.3f} after (nats per byte)")
    plot(config.memory_lengths, memory, losses, output)

    print("\nA sample, through the caches:\n")
    if not sample(alone, params, b'The "for" statement', config):
        print(f"  FAILED: more than {TOLERANCE:.0e}")
        return 1
    return 0


def config_of(arguments):
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], argument_default=argparse.SUPPRESS)
    parser.add_argument("--steps", type=int, help=f"{Config.steps}; {HYBRID.steps} for the hybrid")
    parser.add_argument("--sequence-length", type=int, help=f"{Config.sequence_length}; {HYBRID.sequence_length}")
    parser.add_argument("--seed", type=int)
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--devices", type=int, help="virtual CPU devices a sequence")
    kind.add_argument("--hybrid", action="store_true", help="three layers of linear attention to one of latent")
    given = vars(parser.parse_args(arguments))
    return dataclasses.replace(HYBRID if given.get("hybrid") else Config(), **given)


def main(arguments=None):
    config, begin = config_of(arguments), time.perf_counter()
    if config.devices > 1:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", config.devices)
    with jax.default_matmul_precision("float32"):  # a GPU's default is TF32: three digits
        status = run(config)
    print(f"\n{time.perf_counter() - begin:.0f} s")
    return status


if __name__ == "__main__":
    sys.exit(main())

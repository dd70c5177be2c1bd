# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Linear attention, and a hybrid model
#
# A layer of linear attention keeps one matrix a head, however long the sequence is. Here
#
# 1. one of them is written down by hand, Kimi Delta Attention, and `jattn.linear.kda` is found to be the same, by
#    chunks of 64 tokens as well as token by token;
# 2. errors are measured along 4096 tokens: they do not grow;
# 3. a small model is trained, three such layers to one of gated latent attention, and generates through its caches. A
#    token that is decoded has the logits that it has in the whole sequence.
#
# It takes about a minute on two cores, and needs no GPU.

# %%
# In Colab, with the address of the repository:
# # %pip install -q "jattn[flax] @ git+<repository>" optax
import time
from pydoc_data.topics import topics

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from flax import nnx

import jattn
import jattn.nnx

q, k, v = jnp.zeros((3, 1, 128, 4, 64), jnp.bfloat16)
print(f"jattn {jattn.__version__} on {jax.devices()[0].device_kind}")
print(jattn.explain(q, k, v, is_causal=True))  # which implementation attention gets here, and why not the others

# %% [markdown]
# ## 1. The recurrence
#
# A head's state $S$ maps keys to values. A token first lets it decay, channel by channel, then overwrites what its key
# retrieves by a share $\beta$ of its own value, and reads the result with its query:
#
# $$S \leftarrow \mathrm{Diag}(e^{g}) S, \qquad S \leftarrow S + k\,\big(\beta\,(v - k^\top S)\big)^\top, \qquad
#   o = S^\top q / \sqrt{H}$$


# %%
def by_hand(q, k, v, g, beta):
    """Token by token in float64: q, k, g [T, H], v [T, D], beta [T] -> [T, D]."""
    q, k, v, g, beta = (np.asarray(x, np.float64) for x in (q, k, v, g, beta))
    state, out = np.zeros((q.shape[1], v.shape[1])), []
    for t in range(len(q)):
        state = np.exp(g[t])[:, None] * state
        state += np.outer(k[t], beta[t] * (v[t] - k[t] @ state))
        out.append(state.T @ q[t] / np.sqrt(q.shape[1]))
    return np.stack(out)


def draw(T, H, D, seed=0):
    """A sequence of one head; keys have length 1, decays are between exp(-1) and almost 1."""
    rng = np.random.default_rng(seed)
    q, k, v = (rng.standard_normal((T, n)).astype(np.float32) for n in (H, H, D))
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    g = -np.exp(rng.uniform(np.log(1e-4), 0, (T, H))).astype(np.float32)
    return q, k, v, g, rng.uniform(0, 1, T).astype(np.float32)


def with_head(x):
    """[T, ..] as [batch 1, T, head 1, ..]."""
    return jnp.asarray(x)[None, :, None]


tokens = draw(4096, 16, 16)
truth = by_hand(*tokens)
kda = jax.jit(jattn.linear.kda, static_argnames="mode")
found = {mode: kda(*map(with_head, tokens), mode=mode)[0, :, 0] for mode in ("chunk", "recurrent")}
for mode, out in found.items():
    error = np.abs(out - truth).max() / np.abs(truth).max()
    print(f"{mode:9s} largest error {error:.1e} of the largest output")
    assert error < 1e-5

# %% [markdown]
# ## 2. Do errors grow?
#
# An error in the state is carried on, but what the rule forgets it forgets too. Three ways to the same 4096 tokens: by
# chunks, token by token, and token by token through a pool of states in bfloat16, which are rounded at every step.


# %%
@jax.jit
def steps(q, k, v, g, beta):
    """`kda_step` over all tokens, with a pool of one state in bfloat16."""

    def step(state, token):
        out, state = jattn.linear.kda_step(*(x[None, None, None] for x in token), state)
        return state, out[0, 0, 0]

    return jax.lax.scan(step, jnp.zeros((1, 1, q.shape[1], v.shape[1]), jnp.bfloat16), (q, k, v, g, beta))[1]


found["steps, state in bfloat16"] = steps(*tokens)
figure, axes = plt.subplots(figsize=(8, 3.5), layout="constrained")
for name, out in found.items():
    error = np.abs(np.asarray(out) - truth).reshape(-1, 128, 16).max((1, 2)) / np.abs(truth).max()
    axes.semilogy(np.arange(64, 4096, 128), error, label=name)
axes.set(xlabel="token", ylabel="error / largest output", xlim=(0, 4096), title="largest error of every 128 tokens")
axes.legend()
plt.show()

# %% [markdown]
# ## 3. A hybrid model
#
# Linear layers are cheap and forget; a full attention layer remembers every token and costs a row of cache for each.
# Hybrids have three of the first to one of the second (Kimi Linear, and Kimi K3 with a gate). The latent layer needs no
# rotary embedding: the linear ones know about order.
#
# The text is that of Python's help topics, in bytes.

# %%
WIDTH, HEADS, LAYERS, LENGTH, BATCH, STEPS = 64, 2, 4, 128, 8, 80
PROMPT = b'The "for" statement is used to iterate'
lines = "\n\n".join(topic for _, topic in sorted(topics.items())).splitlines(keepends=True)
text = "".join(line for line in lines if line[0] not in "|+").encode()  # without tables, which are mostly spaces
text = np.frombuffer(text, np.uint8).astype(np.int32)


def mixer(i, rngs):
    if i % 4 == 3:
        return jattn.nnx.MultiHeadLatentAttention(HEADS, WIDTH, latent_features=32, gated=True, rope=False, rngs=rngs)
    # Chunks are for larger models: at this size on a CPU, training token by token takes two thirds of the time.
    return jattn.nnx.KimiDeltaAttention(HEADS, WIDTH, mode="recurrent", rngs=rngs)


class Block(nnx.Module):
    def __init__(self, i, rngs):
        self.mixer_norm, self.mixer = nnx.RMSNorm(WIDTH, rngs=rngs), mixer(i, rngs)
        self.mlp_norm = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 3 * WIDTH, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(3 * WIDTH, WIDTH, use_bias=False, rngs=rngs)

    def __call__(self, x, decode):
        x = x + self.mixer(self.mixer_norm(x), decode=decode)
        return x + self.down(jax.nn.gelu(self.up(self.mlp_norm(x))))


class Hybrid(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(256, WIDTH, rngs=rngs)
        self.blocks = nnx.List([Block(i, rngs) for i in range(LAYERS)])
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.head = nnx.Linear(WIDTH, 256, use_bias=False, rngs=rngs)

    def __call__(self, tokens, decode=False):
        """Logits `[B, T, 256]`; with `decode` the tokens follow those in the caches."""
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, decode)
        return self.head(self.norm(x))

    def init_cache(self, batch, length):
        for block in self.blocks:
            block.mixer.init_cache((batch, length, WIDTH))


model = Hybrid(nnx.Rngs(0))
schedule = optax.warmup_cosine_decay_schedule(0.0, 8e-3, 10, STEPS)
optimizer = nnx.Optimizer(
    model, optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.95)), wrt=nnx.Param
)
print(f"{sum(x.size for x in jax.tree.leaves(nnx.state(model, nnx.Param))):,} parameters, {len(text):,} bytes of text")


# %%
@nnx.jit
def train_step(model, optimizer, tokens):
    def loss_of(model):
        losses = optax.softmax_cross_entropy_with_integer_labels(model(tokens[:, :-1]), tokens[:, 1:])
        return losses.mean()

    loss, gradients = nnx.value_and_grad(loss_of)(model)
    optimizer.update(model, gradients)
    return loss


rng, losses, begin = np.random.default_rng(0), [], time.perf_counter()
for step in range(1, STEPS + 1):
    starts = rng.integers(0, len(text) - LENGTH - 1, BATCH)
    losses.append(float(train_step(model, optimizer, np.stack([text[s : s + LENGTH + 1] for s in starts]))))
    if step % 20 == 0:
        seconds = time.perf_counter() - begin
        print(f"step {step:4d}/{STEPS}  loss {np.mean(losses[-10:]):.3f} nats a byte  {seconds:5.1f} s", flush=True)
assert np.mean(losses[-10:]) < losses[0] - 2.5

# %% [markdown]
# ### Decoding is the whole sequence
#
# The same 96 bytes, once at once and once through the caches: a prompt of 38, then one token at a time.


# %%
@nnx.jit
def at_once(model, tokens):
    return model(tokens)


@nnx.jit
def decoded(model, tokens):
    return model(tokens, decode=True)


sample, P = text[None, 1000:1096], len(PROMPT)
model.init_cache(1, 256)
parts = [decoded(model, sample[:, :P])] + [decoded(model, sample[:, t : t + 1]) for t in range(P, 96)]
whole, parts = at_once(model, sample), jnp.concatenate(parts, axis=1)
difference = jnp.abs(whole - parts).max((0, 2)) / jnp.abs(whole).max()
print(f"largest difference of the logits, of 96 positions: {difference.max():.1e} of the largest logit")
assert difference.max() <= 1e-5

for i, block in enumerate(model.blocks):
    size = sum(x.nbytes for x in jax.tree.leaves(nnx.state(block, nnx.Cache)))
    print(f"layer {i + 1}: {type(block.mixer).__name__:25s} keeps {size:7,} bytes for 256 tokens")

# %% [markdown]
# ### Generating
#
# The prompt goes in at once, then each new byte through the caches, in one compiled loop.


# %%
@nnx.jit(static_argnames="length")
def generate(model, logits, key, length, temperature=0.5):
    """`length` bytes that follow those in the caches; `logits [256]` are those of the first."""
    graphdef, cache, rest = nnx.split(model, nnx.Cache, ...)

    def append(carry, key):
        cache, logits = carry
        byte = jax.random.categorical(key, logits / temperature)
        model = nnx.merge(graphdef, cache, rest)
        logits = model(byte.reshape(1, 1), decode=True)[0, -1]
        return (nnx.state(model, nnx.Cache), logits), byte

    return jax.lax.scan(append, (cache, logits), jax.random.split(key, length))[1]


model.init_cache(1, 256)
prompt = np.frombuffer(PROMPT, np.uint8).astype(np.int32)[None]
new = generate(model, decoded(model, prompt)[0, -1], jax.random.key(0), 200)
print(PROMPT.decode() + bytes(np.asarray(new).astype(np.uint8)).decode(errors="replace"))

# %%
figure, axes = plt.subplots(figsize=(8, 3.5), layout="constrained")
axes.plot(losses)
axes.set(xlabel="step", ylabel="loss (nats a byte)", title="three delta layers to one latent layer")
plt.show()

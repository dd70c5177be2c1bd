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
# # Attention in a Flax model
#
# `jattn.attention` is exact softmax attention, forward and backward, without the matrix of scores in memory. Here
#
# 1. it is called by itself, and gives what `jax.nn.dot_product_attention` gives;
# 2. a Flax model changes one line to use it, and learns the same;
# 3. the memory of both is measured;
# 4. grouped heads, rotary embeddings, windows and packed documents are one argument each.
#
# It takes less than a minute on two cores, and needs no GPU.

# %%
# In Colab, with the address of the repository:
# # %pip install -q "jattn[flax] @ git+<repository>" optax
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from flax import nnx

import jattn
import jattn.nnx

print(f"jattn {jattn.__version__} on {jax.devices()[0].device_kind}")

# %% [markdown]
# ## 1. One call
#
# Queries `[B, T, N, H]`, keys and values `[B, S, K, H]`: here eight query heads on two key heads. `explain` says which
# implementation a call gets on this machine, and why it does not get the others: on an H100 or H200 it is a kernel.

# %%
keys = jax.random.split(jax.random.key(0), 3)
q, k, v = (jax.random.normal(key, (2, 300, heads, 64)) for key, heads in zip(keys, (8, 2, 2), strict=True))
print(jattn.explain(q, k, v, is_causal=True))

# %%
with jax.default_matmul_precision("float32"):  # a GPU's default is TF32: three digits
    out = jattn.attention(q, k, v, is_causal=True)
    theirs = jax.nn.dot_product_attention(q, k, v, is_causal=True)
print(f"{out.shape}, largest difference {jnp.abs(out - theirs).max():.1e}")
assert jnp.abs(out - theirs).max() < 1e-5

# %% [markdown]
# Arguments of the two have the same names. What is in `jattn` alone: [masks and score
# modifiers](02_masks_and_score_mods.ipynb), packed documents, sinks, dropout of the same bits everywhere, and the
# logarithm of the softmax denominator, with which results over parts of the keys are put together:

# %%
parts = (jattn.attention(q, k[:, at], v[:, at], return_residual=True) for at in (slice(0, 150), slice(150, 300)))
merged, _ = jattn.merge(*parts)
assert jnp.abs(merged - jattn.attention(q, k, v)).max() < 1e-5

# %% [markdown]
# ## 2. One changed line
#
# Flax's own module takes an `attention_fn`. This model has 64 tokens of 16 kinds, and learns to copy the first half of
# them to the second.


# %%
class Block(nnx.Module):
    def __init__(self, attention_fn, rngs):
        self.norm = nnx.LayerNorm(64, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(
            num_heads=4, in_features=64, decode=False, rngs=rngs,
            attention_fn=attention_fn,  # <- the line
        )  # fmt: skip
        self.mlp_norm = nnx.LayerNorm(64, rngs=rngs)
        self.up, self.down = nnx.Linear(64, 128, rngs=rngs), nnx.Linear(128, 64, rngs=rngs)

    def __call__(self, x):
        x = x + self.attention(self.norm(x), is_causal=True)
        return x + self.down(jax.nn.gelu(self.up(self.mlp_norm(x))))


class Model(nnx.Module):
    def __init__(self, attention_fn, rngs):
        self.embed, self.position = nnx.Embed(16, 64, rngs=rngs), nnx.Embed(64, 64, rngs=rngs)
        self.blocks = nnx.List([Block(attention_fn, rngs) for _ in range(2)])
        self.head = nnx.Linear(64, 16, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens) + self.position(jnp.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def loss_of(model, tokens):
    losses = optax.softmax_cross_entropy_with_integer_labels(model(tokens[:, :-1]), tokens[:, 1:])
    return losses[:, 31:].mean()  # of the copy


@nnx.jit
def train_step(model, optimizer, tokens):
    loss, gradients = nnx.value_and_grad(loss_of)(model, tokens)
    optimizer.update(model, gradients)
    return loss


def train(attention_fn, steps=100):
    model = Model(attention_fn, nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(3e-3), wrt=nnx.Param)
    rng, losses = np.random.default_rng(0), []
    for _ in range(steps):
        half = rng.integers(0, 16, (16, 32))
        losses.append(float(train_step(model, optimizer, np.concatenate([half, half], axis=1))))
    return losses


ours, flax = train(jattn.nnx.attention_fn), train(nnx.dot_product_attention)
print(f"first ten losses differ by at most {np.abs(np.array(ours) - flax)[:10].max():.1e}")
assert np.abs(np.array(ours) - flax)[:10].max() < 1e-4

# %%
figure, axes = plt.subplots(figsize=(7, 3.5), layout="constrained")
axes.plot(ours, label="attention_fn=jattn.nnx.attention_fn", linewidth=3)
axes.plot(flax, label="attention_fn=nnx.dot_product_attention", linestyle="--")
axes.set(xlabel="step", ylabel="loss (nats a token)", title="the same model, trained twice")
axes.legend()
plt.show()

# %% [markdown]
# ## 3. Memory
#
# What the compiler sets aside for loss and gradients of one sequence. Scores take memory with the square of the length;
# `jattn` never has all of them.


# %%
def temporary_bytes(attend, length):
    """Of a gradient, besides inputs and outputs. Nothing is computed."""
    shape = jax.ShapeDtypeStruct((1, length, 4, 64), jnp.float32)
    gradient = jax.jit(jax.grad(lambda q, k, v: attend(q, k, v, is_causal=True).sum(), argnums=(0, 1, 2)))
    return gradient.lower(shape, shape, shape).compile().memory_analysis().temp_size_in_bytes


lengths = (1024, 4096, 16384)
memory = {
    name: [temporary_bytes(attend, length) / 2**20 for length in lengths]
    for name, attend in {"jattn.attention": jattn.attention, "jax.nn": jax.nn.dot_product_attention}.items()
}
figure, axes = plt.subplots(figsize=(7, 3.5), layout="constrained")
for name, megabytes in memory.items():
    axes.loglog(lengths, megabytes, marker="o", label=name)
axes.set(xlabel="sequence length", ylabel="temporary memory (MiB)", title="forward and backward, 4 heads of 64")
axes.set_xticks(lengths, lengths)
axes.minorticks_off()
axes.legend()
plt.show()
assert memory["jattn.attention"][-1] < memory["jax.nn"][-1] / 10

# %% [markdown]
# ## 4. A layer with more to it
#
# `jattn.nnx.MultiHeadAttention` has the parameters of Flax's module, so that checkpoints load, and arguments for what
# models have today. Below, two documents of 60 tokens lie in one row; `segment_ids` keep them apart, and each is
# what it is alone.

# %%
layer = jattn.nnx.MultiHeadAttention(
    num_heads=8, in_features=64, num_kv_heads=2, is_causal=True, rope=True, local_window_size=(31, 0), rngs=nnx.Rngs(0)
)
documents = jax.random.normal(jax.random.key(0), (2, 60, 64))
row = documents.reshape(1, 120, 64)
apart = layer(documents)
together = layer(row, segment_ids=jnp.repeat(jnp.array([[1, 2]]), 60, axis=1)).reshape(2, 60, 64)
print(f"largest difference to the documents alone: {jnp.abs(together - apart).max():.1e}")
assert jnp.abs(together - apart).max() < 1e-5

# %% [markdown]
# A function with options fixed serves Flax's own module as well: make it once, since modules compare it by identity.

# %%
local = jattn.nnx.make_attention_fn(is_causal=True, local_window_size=(63, 0), logits_soft_cap=30.0)
layer = nnx.MultiHeadAttention(8, 64, attention_fn=local, decode=False, rngs=nnx.Rngs(0))
print(layer(row).shape)

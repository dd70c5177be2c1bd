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
# # Latent and compressed sparse attention, stage by stage
#
# Two ways to make the cache of a long sequence small. Multi-head latent attention (MLA) keeps one short row a token,
# of which keys and values of all heads are made. Sparse attention looks at few of the rows, and compressed attention
# makes one row of several tokens. Here
#
# 1. MLA is computed in its two forms, which are one function;
# 2. an indexer picks rows, and attention reads those alone;
# 3. tokens are compressed to entries, and a token at a time gives the bits of the whole prompt;
# 4. what all of them keep is drawn against the length.
#
# It takes less than a minute on two cores, and needs no GPU.

# %%
# In Colab, with the address of the repository:
# # %pip install -q "jattn[flax] @ git+<repository>"
import functools

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

import jattn

print(f"jattn {jattn.__version__} on {jax.devices()[0].device_kind}")

# %% [markdown]
# ## 1. One row a token
#
# A token becomes a latent of `C` numbers and a rotated key of `R`, which all heads share: its row in the cache.
# Expanded, keys and values of every head are made of the rows. Absorbed, each query is brought to the latent space
# instead, and all heads read the rows themselves. Both are one function of the tokens; the scale is that of the
# expanded form.

# %%
T, M, N, H, R, C = 48, 64, 4, 16, 8, 32
weights = jattn.MLAWeights.normal(jax.random.key(0), M=M, Q=48, N=N, H=H, R=R, C=C, D=H)
x = jax.random.normal(jax.random.key(1), (1, T, M))
scale = (H + R) ** -0.5


@jax.jit
def both_forms(x, weights):
    inputs = jattn.mla_preprocess(x, weights, rotate=functools.partial(jattn.rope, interleaved=True))
    expanded = jattn.mla_prefill(inputs, weights, scale=scale)
    absorbed = jattn.mla_values(jattn.mla_absorbed(inputs.query, inputs.rows, scale=scale, latent_dim=C), weights)
    return inputs, *(jattn.mla_output(values, weights) for values in (expanded, absorbed))


inputs, expanded, absorbed = both_forms(x, weights)
print(f"queries {inputs.query.shape}, rows {inputs.rows.shape}: {C + R} numbers a token, not {2 * N * H}")
print(f"largest difference of the two forms: {jnp.abs(expanded - absorbed).max():.1e}")
assert jnp.abs(expanded - absorbed).max() < 1e-5 * jnp.abs(expanded).max()

# %% [markdown]
# ## 2. An indexer picks rows
#
# DeepSeek sparse attention scores every token with a few small heads, takes the best, and attends to those rows
# alone. The choice is exact, ties go to the earlier token, and the list is in order. Left: scores of an indexer.
# Right: what it picked, twelve tokens a query.

# %%
J, TOP = 4, 12
index_query, index_key, index_weights = (
    jax.random.normal(key, shape) for key, shape in zip(
        jax.random.split(jax.random.key(2), 3), ((1, T, J, 16), (1, T, 16), (1, T, J)), strict=True
    )
)  # fmt: skip
seen = jnp.arange(1, T + 1, dtype=jnp.int32)[None]  # each query sees so many tokens
scores = jattn.indexer_logits(index_query, index_key, index_weights / J, k_end=seen)
indices, count = jattn.topk_select(scores, TOP, k_end=seen)
print("query 20 attends to", indices[0, 20].tolist())


def picked(indices):
    """bool [T, T] of lists [T, L]."""
    return (np.asarray(indices)[:, :, None] == np.arange(T)).any(1)


figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4.2), layout="constrained")
drawn = left.imshow(np.where(np.isfinite(scores[0]), scores[0], np.nan), cmap="coolwarm")
figure.colorbar(drawn, ax=left, label="score")
right.imshow(picked(indices[0]), cmap="Blues", vmax=1.4)
for axes, title in ((left, "scores of the indexer"), (right, f"the {TOP} that are read")):
    axes.set(title=title, xlabel="token s", ylabel="query t")
plt.show()

# %% [markdown]
# Attention over the lists is attention under the mask of what was picked; with lists of all tokens it is the whole:

# %%
options = dict(scale=scale, value_dim=C)
sparse = jattn.sparse_attention(inputs.query, inputs.rows, indices, **options)
masked = jattn.mla_absorbed(inputs.query, inputs.rows, scale=scale, latent_dim=C, mask=jnp.asarray(picked(indices[0])))
assert jnp.abs(sparse - masked).max() < 1e-5
everything, _ = jattn.topk_select(scores, T, k_end=seen)
whole = jattn.mla_values(jattn.sparse_attention(inputs.query, inputs.rows, everything, **options), weights)
assert jnp.abs(jattn.mla_output(whole, weights) - expanded).max() < 1e-5 * jnp.abs(expanded).max()

# %% [markdown]
# ## 3. Tokens become entries
#
# Compressed attention of DeepSeek-V4 makes one entry of the tokens of two blocks of `m`, by a softmax over them for
# each channel by itself. A query sees the last tokens raw, and entries of blocks that are complete.

# %%
D, m, WINDOW, heads = 16, 4, 6, 2
draws = iter(jax.random.split(jax.random.key(3), 8))
u, z = (jax.random.normal(next(draws), (1, T, 2 * D)) for _ in range(2))
ape = jax.random.normal(next(draws), (m, 2 * D))
entries, counts, _ = jattn.compress(u, z, ape, overlap=True)
print(f"{T} tokens make {int(counts[0])} entries")

# A token that is 1 in all its channels leaves its share of the entries: the weights, here of the first channel.
shares = np.stack([
    jattn.compress(u * 0 + (jnp.arange(T) == t)[None, :, None], z, ape, overlap=True)[0][0, :, 0] for t in range(T)
])  # fmt: skip
allowed = np.zeros((T, T + T // m))
for t in range(T):
    allowed[t, np.maximum(0, t - WINDOW + 1) : t + 1] = 1
    allowed[t, T : T + jattn.visible_entries(t, m)] = 2
figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained", width_ratios=(1, 1.3))
drawn = left.imshow(shares.T, cmap="Blues", aspect="auto")
figure.colorbar(drawn, ax=left, label="weight")
left.set(title="what entries are made of, first channel", xlabel="token", ylabel="entry")
right.imshow(allowed, cmap=plt.matplotlib.colors.ListedColormap(["white", "tab:blue", "tab:orange"]), aspect="auto")
right.axvline(T - 0.5, color="grey", linewidth=1)
right.set(title="what a query may see", ylabel="query t", xlabel="tokens of the window (blue), entries (orange)")

# %% [markdown]
# ## 4. What is kept
#
# Of one layer and one sequence in bfloat16, at the sizes of published models: a head of 128 for each of 128 heads,
# eight heads of keys and values, MLA of DeepSeek-V3 (512 + 64), and CSA and HCA of DeepSeek-V4 with its rows of 584
# bytes. Nothing is allocated here: only shapes are asked for.


# %%
def compressed(length, **options):
    make = functools.partial(
        jattn.CompressedCache.zeros, 1, length, 512, dtype=jnp.bfloat16, kv_format="v4_584", **options
    )
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(jax.eval_shape(make)))


lengths = 2 ** np.arange(10, 21, 2)
kept = {
    "128 heads": [length * 2 * 128 * 128 * 2 for length in lengths],
    "8 heads of keys and values": [length * 2 * 8 * 128 * 2 for length in lengths],
    "MLA": [length * 576 * 2 for length in lengths],
    "CSA, m = 4": [compressed(int(n), ratio=4, overlap=True, index_dim=128, index_format="fp8_row") for n in lengths],
    "HCA, m = 128": [compressed(int(n), ratio=128, overlap=False) for n in lengths],
}
figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
for name, sizes in kept.items():
    axes.loglog(lengths, np.array(sizes) / 2**20, marker="o", label=name, base=2)
axes.set(xlabel="tokens", ylabel="MiB a layer", title="caches")
axes.set_xticks(lengths, [f"{n // 1024}K" for n in lengths])
axes.set_yscale("log", base=10)
axes.minorticks_off()
axes.legend()
plt.show()

# %% [markdown]
# As layers of a model, with projections, norms and caches: `jattn.nnx.MultiHeadLatentAttention`,
# `jattn.nnx.CompressedSparseAttention` and `jattn.nnx.HeavilyCompressedAttention`. [The hybrid
# model](05_linear_attention.ipynb) uses the first.

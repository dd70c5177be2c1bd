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
# # Masks and score modifiers, drawn
#
# A mask of `jattn.masks` is a rule, not an array: who may see whom, from the positions of query and key. Rules are put
# together with `&`, `|` and `~`. A score modifier is a line of JAX for one score. Here they are drawn, and held against
# the dense arrays that they stand for.
#
# It takes less than a minute on two cores, and needs no GPU.

# %%
# In Colab, with the address of the repository:
# # %pip install -q "jattn[flax] @ git+<repository>"
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

import jattn
from jattn import masks, mods

T, N, H = 64, 4, 32
q, k, v = jax.random.normal(jax.random.key(0), (3, 1, T, N, H))
print(f"jattn {jattn.__version__} on {jax.devices()[0].device_kind}")
print(jattn.explain(q, k, v, mask=masks.causal()))

# %% [markdown]
# ## 1. Rules
#
# Rows are queries, columns are keys; blue is seen. `repr` of a rule is the title.

# %%
documents = jnp.repeat(jnp.arange(3), jnp.array([30, 12, 22]), total_repeat_length=T)
checkers = np.indices((8, 8)).sum(0) % 2 == 0
drafts = masks.tree(jnp.array([-1, 0, 0, 1, 1, 2]))  # six draft tokens: each sees its ancestors
rules = {
    "causal": masks.causal(),
    "a window of 12": masks.causal() & masks.window(11, 0),
    "packed documents": masks.causal() & masks.segments(documents),
    "a prefix that all see": masks.prefix(20),
    "blocks": masks.blocks(checkers, 8),
    "any rule of positions": masks.causal() & masks.predicate(lambda b, n, t, s: (s % 8 == 0) | (t - s < 8)),
    "first keys and a window": masks.causal() & (masks.window(11, 0) | masks.predicate(lambda b, n, t, s: s < 3)),
    "everything else": ~masks.causal(),
}
figure, grid = plt.subplots(2, 4, figsize=(11, 6), layout="constrained")
for axes, (name, rule) in zip(grid.flat, rules.items(), strict=True):
    rule.plot(T, T, ax=axes)
    axes.set_title(name, fontsize=10)
plt.show()

# %% [markdown]
# In a terminal the same is `draw`:

# %%
print((masks.causal() & masks.segments(jnp.array([0] * 9 + [1] * 15)) & masks.window(5, 0)).draw(24, 24))

# %% [markdown]
# When drafts of several continuations are verified at once, each new token sees what is in the cache and its ancestors
# in the tree of drafts. Queries sit at the end of the keys, 26 of which are in the cache here:

# %%
figure, axes = plt.subplots(figsize=(8, 2), layout="constrained")
drafts.plot(6, 32, 26, ax=axes)
plt.show()

# %% [markdown]
# A rule gives what its dense array gives, and never is that array:

# %%
for name, rule in rules.items():
    dense = rule.materialize(T, T)
    difference = jnp.abs(jattn.attention(q, k, v, mask=rule) - jattn.attention(q, k, v, mask=dense)).max()
    print(f"{name:24s} {repr(rule)[:60]:60s} largest difference {difference:.1e}")
    assert difference < 1e-6

# %% [markdown]
# ## 2. What is skipped
#
# Kernels work in tiles. `classify` says for each whether a rule hides all of it, shows all of it, or must be evaluated
# in it: loops run over the last two only, forward and backward, so that a window costs time by its width.

# %%
length, block = 2048, (128, 128)
ids = jnp.repeat(jnp.arange(4), jnp.array([300, 900, 500, 348]), total_repeat_length=length)
long = {
    "causal": masks.causal(),
    "causal, a window of 256": masks.causal() & masks.window(255, 0),
    "causal, four documents": masks.causal() & masks.segments(ids),
}
figure, grid = plt.subplots(1, 3, figsize=(11, 3.8), layout="constrained")
colours = plt.matplotlib.colors.ListedColormap(["white", "tab:orange", "tab:blue"])
for axes, (name, rule) in zip(grid, long.items(), strict=True):
    found = rule.classify(length, length, block)
    axes.imshow(found.kind[0, 0], cmap=colours, vmin=0, vmax=2)
    work = (np.asarray(found.kind) > 0).mean()
    axes.set(title=f"{name}\n{work:.0%} of the tiles", xlabel="block of keys", ylabel="block of queries")
    axes.set(xticks=range(0, 16, 5), yticks=range(0, 16, 5))
for colour, name in (("tab:orange", "partly seen"), ("tab:blue", "seen")):
    axes.plot([], [], "s", color=colour, label=name)
axes.legend()
plt.show()

# %% [markdown]
# ## 3. Score modifiers
#
# A modifier is written for one score, of batch `b`, head `n`, query position `t` and key position `s`, and is
# differentiated by the library. With values that are the unit vectors, the output of attention is its weights: so they
# are drawn here, of a query and keys that are all alike, so that nothing but the modifier is seen.

# %%
alike = jnp.ones((1, T, N, 1))
unit = jnp.broadcast_to(jnp.eye(T)[None, :, None], (1, T, N, T))


def weights(**options):
    """[N, T, S] of queries and keys that are all alike."""
    return jattn.attention(alike, alike, unit, is_causal=True, **options)[0].swapaxes(0, 1)


table = jnp.sin(jnp.arange(2 * T) / 3)[None] * 2
modifiers = {
    "none": {},
    "alibi, head 0": dict(score_mod=mods.alibi(N)),
    "alibi, head 3": dict(score_mod=mods.alibi(N)),
    "relative_bias(table)": dict(score_mod=mods.relative_bias(table)),
    "every fourth key": dict(score_mod=lambda score, b, n, t, s: score + jnp.where(s % 4 == 0, 2.0, 0.0)),
    "sinks of 4": dict(sinks=jnp.full(N, 4.0)),
}
figure, grid = plt.subplots(2, 3, figsize=(10, 6.4), layout="constrained")
for axes, (name, options) in zip(grid.flat, modifiers.items(), strict=True):
    drawn = axes.imshow(np.asarray(weights(**options)[int(name[-1]) if name.startswith("alibi") else 0]) ** 0.5,
                        cmap="Blues", vmin=0, vmax=0.7)  # fmt: skip
    axes.set(title=name, xlabel="key s", ylabel="query t")
figure.colorbar(drawn, ax=grid, label="square root of the weight", shrink=0.6)
plt.show()

# %% [markdown]
# ## 4. Modifiers that learn
#
# Arrays come in as arguments, `mods.score_mod(fn, *aux)`, broadcast to `[B, N, T, S]`; the function gets them at its
# element, and gradients flow to them; so they do to the table of `relative_bias`. Here one is learnt that makes each
# head copy the token at a distance of its own.


# %%
distances = (2, 5, 9, 14)
wanted = jnp.stack([jnp.roll(unit[:, :, n], distance, axis=1) for n, distance in enumerate(distances)], axis=2)


def loss_of(table):
    out = jattn.attention(alike, alike, unit, is_causal=True, score_mod=mods.relative_bias(table))
    return jnp.mean(jnp.sum((out - wanted)[:, max(distances) :] ** 2, axis=-1))


@jax.jit
def step(table):
    loss, gradient = jax.value_and_grad(loss_of)(table)
    return table - 30.0 * gradient, loss


table, losses = jnp.zeros((N, 2 * T)), []
for _ in range(200):
    table, loss = step(table)
    losses.append(float(loss))
print(f"loss {losses[0]:.3f} before, {losses[-1]:.3f} after")
assert losses[-1] < 0.1 * losses[0]
figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.5), layout="constrained")
left.plot(np.arange(2 * T) - T, table.T, label=[f"head {n}" for n in range(N)])
left.legend()
left.set(xlabel="distance s - t", ylabel="learnt bias", xlim=(-30, 5))
right.imshow(np.asarray(weights(score_mod=mods.relative_bias(table))[3]), cmap="Blues", vmin=0, vmax=1)
right.set(xlabel="key s", ylabel="query t", title="weights of the last head")
plt.show()

# %% [markdown]
# A function that closes over an array would hide it from the derivative: it is refused, with the line to write instead.

# %%
slopes = jnp.ones(N)
try:
    jattn.attention(q, k, v, score_mod=lambda score, b, n, t, s: score - slopes[n] * (t - s))
except TypeError as error:
    print(error)
else:
    raise AssertionError("it was taken")

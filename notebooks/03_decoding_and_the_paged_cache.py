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
# # Decoding, and the paged cache
#
# A model that writes text asks for one query at a time against a long history of keys and values. Here
#
# 1. the newest token of a sequence attends to its cache, and gets what it gets in the whole sequence;
# 2. the cache lies in pages, of which block tables say whose they are: the same bits, whatever the order;
# 3. two requests share the pages of their common prompt;
# 4. a cache in eight bits, and what it costs;
# 5. drafts of several continuations are verified at once.
#
# `serving.py` beside this notebook does all of it in a loop with many requests. It takes less than a minute on two
# cores, and needs no GPU.

# %%
# In Colab, with the address of the repository:
# # %pip install -q "jattn[flax] @ git+<repository>"
import dataclasses

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

import jattn
from jattn import masks

N, K, H = 8, 2, 64  # eight query heads on two key heads
print(f"jattn {jattn.__version__} on {jax.devices()[0].device_kind}")


def draw(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


# %% [markdown]
# ## 1. One query at a time
#
# Three sequences of different lengths in one array. `decode_attention` takes the newest tokens, whose keys and values
# are in the cache already, and what lies behind a length may hold anything: here NaN.

# %%
S, lengths = 96, np.array([96, 17, 40], np.int32)
q, k, v = draw(0, 3, S, N, H), draw(1, 3, S, K, H), draw(2, 3, S, K, H)
behind = jnp.arange(S)[:, None, None] >= lengths[:, None, None, None]
newest = jnp.stack([q[b, n - 1 : n] for b, n in enumerate(lengths)])
out = jattn.decode_attention(newest, jnp.where(behind, jnp.nan, k), jnp.where(behind, jnp.nan, v), lengths)
for b, n in enumerate(lengths):
    whole = jattn.attention(q[b, :n], k[b, :n], v[b, :n], is_causal=True)
    print(f"sequence of {n:2d}: largest difference to its row in the whole {jnp.abs(out[b, 0] - whole[-1]).max():.1e}")
    assert jnp.abs(out[b, 0] - whole[-1]).max() < 1e-5

# %% [markdown]
# Bits do not depend on who else is in the batch, which is what makes an answer reproducible:

# %%
alone = jattn.decode_attention(newest[1:2], k[1:2], v[1:2], lengths[1:2])
assert (alone == out[1:2]).all()

# %% [markdown]
# ## 2. Pages
#
# Sequences grow and end at different times, so the cache is a pool of pages. Which page is whose is decided on the host
# by a `PageAllocator`; on the device a `PagedCache` is a pytree of pages, block tables and lengths, and `append` and
# `paged_attention` are pure functions of it.

# %%
PAGE, POOL = 16, 14
allocator = jattn.PageAllocator(POOL, PAGE)
tables, owners = np.zeros((3, S // PAGE), np.int32), [[], [], []]
for number in range(S // PAGE):  # as if the three had grown together
    for b, n in enumerate(lengths):
        if number * PAGE < n:
            owners[b] += allocator.allocate(1)
for b, pages in enumerate(owners):
    tables[b, : len(pages)] = pages
print("block tables\n", tables)

empty = jattn.PagedCache.zeros(POOL, PAGE, K, H, sequences=3, pages_per_sequence=S // PAGE)
cache = dataclasses.replace(empty, block_tables=jnp.asarray(tables))
append = jax.jit(jattn.append, donate_argnums=0)  # in place
cache = append(cache, k, v, seq_lengths=lengths)
paged = jattn.paged_attention(newest, cache)
print("lengths", cache.lengths, "- every bit that of the contiguous cache:", bool((paged == out).all()))
assert (paged == out).all()

# %% [markdown]
# ## 3. A prompt that is shared
#
# Full pages are published under a hash of everything up to their end. A request that begins alike gets them, and has
# only the rest to compute; a page that is shared is copied before it is written to.

# %%
prompt = list(range(40))
allocator = jattn.PageAllocator(POOL, PAGE)
first = allocator.allocate(3)
allocator.publish(prompt, first)
second = allocator.match(prompt + [7, 7, 7])
print(f"the first has pages {first}, the second finds {second}: {len(second) * PAGE} of 43 tokens are there")
second += allocator.allocate(1)
third = allocator.share(first)  # a fork of the first, which writes to the half-full page next
third[2], source = allocator.own(third[2])
print(f"the fork writes to page {third[2]}, a copy of page {source}: jattn.copy_pages(cache, [{source}], [{third[2]}])")

figure, axes = plt.subplots(figsize=(8, 2.2), layout="constrained")
for row, pages in enumerate((first, second, third)):
    for page in pages:
        shared = allocator.owners(page) > 1
        axes.add_patch(plt.Rectangle((page - 0.45, row - 0.4), 0.9, 0.8, color="tab:orange" if shared else "tab:blue"))
axes.set(xlim=(-0.5, POOL - 0.5), ylim=(2.5, -0.5), xlabel="page of the pool", title="orange pages are shared")
axes.set_yticks(range(3), ["first", "second", "fork"])
axes.set_xticks(range(POOL))
plt.show()

# %% [markdown]
# ## 4. Eight bits
#
# Keys and values in int8 or fp8 take half the room of bfloat16. Each token has a scale of its own, applied to scores
# and weights, so that nothing is unpacked to memory. What it costs, over one sequence of 4096 tokens:

# %%
length = 4096
long_k, long_v, query = draw(3, 1, length, K, H), draw(4, 1, length, K, H), draw(5, 1, 1, N, H)
exact = jattn.decode_attention(query, long_k, long_v)
for dtype in ("int8", "float8_e4m3fn"):
    packed = [jattn.quantize(x, dtype) for x in (long_k, long_v)]
    rounded = jattn.decode_attention(query, *packed)
    size = sum(x.nbytes for x in jax.tree.leaves(packed)) / (2 * length * K * H)
    error = jnp.abs(rounded - exact).max() / jnp.abs(exact).max()
    print(f"{dtype:14s} {size:.2f} bytes a number, error {error:.1e} of the largest output")
    assert error < 0.1

# %% [markdown]
# ## 5. Drafts
#
# A cheap model proposes a tree of tokens; the large one verifies all of it in one call. Each draft sees the sequence
# and its ancestors, and gets what it would get if they alone had been written.

# %%
parents = jnp.array([-1, 0, 0, 1])  # 0 -> 1 -> 3, and 0 -> 2
start = 40
drafted = {name: draw(seed, 1, 4, heads, H) for name, seed, heads in (("q", 6, N), ("k", 7, K), ("v", 8, K))}
history = jattn.PagedCache.zeros(8, PAGE, K, H, sequences=1, pages_per_sequence=4)
history = dataclasses.replace(history, block_tables=jnp.array([[5, 1, 6, 2]], jnp.int32))
history = jattn.append(history, k[:1, :start], v[:1, :start])
tree = jattn.paged_attention(
    drafted["q"], jattn.append(history, drafted["k"], drafted["v"]), mask=masks.tree(parents), is_causal=False
)
branch = [0, 1, 3]
line = jattn.paged_attention(
    drafted["q"][:, branch], jattn.append(history, drafted["k"][:, branch], drafted["v"][:, branch])
)
print(f"largest difference to the branch alone: {jnp.abs(tree[:, branch] - line).max():.1e}")
assert jnp.abs(tree[:, branch] - line).max() < 1e-5

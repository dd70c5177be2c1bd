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
# # A long sequence over many devices
#
# When a sequence is too long for one device, its tokens are spread over several, and keys and values travel. Here, on
# eight virtual devices of a CPU,
#
# 1. layouts of the tokens are drawn, and who has how much to do;
# 2. ring attention gives what attention of the undivided sequence gives, gradients included;
# 3. the memory of a device is measured against the number of devices.
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
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jattn

# Before anything asks for a device; leave both lines out where there are several.
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)

DEVICES = len(jax.devices())
print(f"jattn {jattn.__version__} on {DEVICES} x {jax.devices()[0].device_kind}")

# %% [markdown]
# ## 1. Layouts
#
# A causal query sees what is before it, so that late tokens have more to do than early ones. In parts one behind the
# other the last device works nearly twice the mean, and all wait for it. Zigzag gives each device an early and a late
# part, stripes deal tokens out one by one.

# %%
T = 128
figure, grid = plt.subplots(2, 3, figsize=(10, 4.5), layout="constrained", height_ratios=(1, 2))
for (above, below), kind in zip(grid.T, ("contiguous", "zigzag", "striped"), strict=True):
    layout = jattn.SequenceLayout(kind, DEVICES)
    held = np.asarray(layout.positions(T)).reshape(DEVICES, -1)  # the tokens of each device
    owner = np.zeros(T)
    for device, tokens in enumerate(held):
        owner[tokens] = device
    work = (held + 1).sum(1)
    above.imshow(owner[None], cmap="tab10", vmax=9, aspect="auto", interpolation="nearest")
    above.set(title=f"{kind}: most / mean = {work.max() / work.mean():.2f}", yticks=[], xlabel="token")
    below.bar(range(DEVICES), work, color=plt.get_cmap("tab10")(np.arange(DEVICES) / 9.9))
    below.set(xlabel="device", ylabel="keys seen", ylim=(0, 2100))
plt.show()

# %% [markdown]
# ## 2. The same function
#
# Arrays go to the devices in the order of the layout; everything else, the mask, a window, segment ids, speaks of the
# undivided sequence. Under `jit` the op maps itself over the axis.

# %%
B, T, N, K, H = 1, 1024, 4, 2, 32
q, k, v = (jax.random.normal(jax.random.key(i), (B, T, n, H)) for i, n in enumerate((N, K, K)))
options = dict(is_causal=True, local_window_size=(300, 0), logits_soft_cap=20.0)


def value_and_gradients(attend):
    """A function of (q, k, v): the output, and gradients of a number that is made of it."""

    def loss(q, k, v):
        out = attend(q, k, v, **options)
        return jnp.sum(jnp.sin(out)), out

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True))


(_, want), gradients = value_and_gradients(jattn.attention)(q, k, v)

mesh = jax.make_mesh((DEVICES,), ("sequence",), axis_types=(AxisType.Auto,))
layout = jattn.SequenceLayout("zigzag", DEVICES)
ring = functools.partial(jattn.ring_attention, axis="sequence", layout=layout)
with jax.set_mesh(mesh):
    spread = [jax.device_put(layout.shard(x), NamedSharding(mesh, P(None, "sequence"))) for x in (q, k, v)]
    (_, out), found = value_and_gradients(ring)(*spread)
for name, ours, theirs in zip(("out", "dq", "dk", "dv"), (out, *found), (want, *gradients), strict=True):
    difference = np.abs(layout.unshard(np.asarray(ours)) - theirs).max() / np.abs(theirs).max()
    print(f"{name:3s} {ours.sharding.spec}: largest difference {difference:.1e}")
    assert difference < 1e-5

# %% [markdown]
# ## 3. Memory
#
# What one device sets aside for the gradient of a sequence of 8192 tokens, besides its share of the arrays.


# %%
def temporary_bytes(devices, T=8192):
    mesh = jax.make_mesh((devices,), ("sequence",), axis_types=(AxisType.Auto,), devices=jax.devices()[:devices])
    layout = jattn.SequenceLayout("zigzag", devices)
    attend = functools.partial(jattn.ring_attention, axis="sequence", layout=layout, is_causal=True)
    gradient = jax.jit(jax.grad(lambda q, k, v: attend(q, k, v).sum(), argnums=(0, 1, 2)))
    sharding = NamedSharding(mesh, P(None, "sequence"))
    shapes = [jax.ShapeDtypeStruct((1, T, n, 64), jnp.float32, sharding=sharding) for n in (8, 2, 2)]
    with jax.set_mesh(mesh):
        return gradient.lower(*shapes).compile().memory_analysis().temp_size_in_bytes


counts = [n for n in (1, 2, 4, 8) if n <= DEVICES]
memory = [temporary_bytes(n) / 2**20 for n in counts]
figure, axes = plt.subplots(figsize=(6, 3.5), layout="constrained")
axes.plot(counts, memory, marker="o")
axes.set(
    xlabel="devices", ylabel="MiB a device", title="ring attention, forward and backward, 8192 tokens", xticks=counts
)
axes.set_ylim(0)
plt.show()
print({n: f"{x:.0f} MiB" for n, x in zip(counts, memory, strict=True)})
assert memory[-1] < memory[0]

# %% [markdown]
# `jattn.sequence_attention(..., strategy="auto")` chooses between the ring and Ulysses by what has to travel, and
# `./run demo --devices 8` trains a language model on this mesh.

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
# # Inside the kernel
#
# How attention is computed without its matrix of scores, in NumPy, and what the library does with it on a GPU. Here
#
# 1. a softmax is taken block by block, and is exact after every block;
# 2. masks say which tiles are visited, and in which order;
# 3. a small simulation draws who does what at which time in the forward kernel;
# 4. the backward makes the weights again from one number a row, and needs five products;
# 5. the library runs on this machine, with the kernel if that is an H100 or H200.
#
# It takes less than a minute on one core, and needs no GPU.

# %%
# In Colab, with the address of the repository:
# # %pip install -q "jattn[flax] @ git+<repository>"
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

import jattn
from jattn import masks

T, H, BLOCK = 1024, 64, 128
rng = np.random.default_rng(0)
q, k, v, dout = (rng.standard_normal((T, H)).astype(np.float32) for _ in range(4))
print(f"jattn {jattn.__version__} on {jax.devices()[0].device_kind}")

# %% [markdown]
# ## 1. A softmax in pieces
#
# A row's output is $\sum_s e^{x_s} v_s / \sum_s e^{x_s}$. Both sums run over keys, so they can be taken a block of keys
# at a time; but $e^{x}$ overflows, in float32 above 88. Hence all exponentials are taken relative to the largest score
# so far, $m$. When a block brings a larger one, $m'$, both sums are multiplied by $\alpha = e^{m - m'}$, once:
#
# $$\textstyle \alpha \sum_s e^{x_s - m} = \sum_s e^{x_s - m'}$$
#
# That is an identity, not an approximation: after each block, the sums are those of the softmax over the keys so far.
# It holds for any $m$. The kernel may therefore keep an old one until scores exceed it by $8 \log 2$: weights stay
# below 256, and most blocks have nothing to rescale.


# %%
def dense(x, v):
    """Softmax of one row of scores `x [S]`, times `v [S, D]`, and the logarithm of its sum."""
    p = np.exp(x - x.max())
    return p @ v / p.sum(), x.max() + np.log(p.sum())


def online(x, v, order, slack=0.0):
    """The same, block by block; yields (m, alpha, out, lse) after each."""
    m, total, out = -np.inf, 0.0, np.zeros(v.shape[1])
    for i in order:
        keys = slice(i * BLOCK, (i + 1) * BLOCK)
        largest = max(m, x[keys].max())
        new = largest if largest > m + slack else m
        alpha, p = np.exp(m - new), np.exp(x[keys] - new)
        m, total, out = new, alpha * total + p.sum(), alpha * out + p @ v[keys]
        yield m, alpha, out / total, m + np.log(total)


row = 90 + 12 * np.arange(T) / T + 2 * rng.standard_normal(T)
with np.errstate(over="ignore"):
    assert np.isinf(np.exp(row.astype(np.float32)).sum())  # what would happen without m
for order in (range(T // BLOCK), reversed(range(T // BLOCK)), [3, 1, 7, 0, 5, 2, 6, 4]):
    seen = []
    for i, (_, _, out, lse) in zip(order := list(order), online(row, v, order), strict=True):
        seen += range(i * BLOCK, (i + 1) * BLOCK)
        want, want_lse = dense(row[seen], v[seen])
        np.testing.assert_allclose(out, want, rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(lse, want_lse, rtol=1e-14)
print("after every block, in three orders: the softmax over the keys so far")

# %% [markdown]
# Left, the scores of that row, which rise, and what the exponentials are relative to. Right, how many rows of a tile
# are rescaled at each block, for 128 random queries whose scores have a standard deviation of 4.

# %%
slack = 8 * np.log(2)
exact, lazy = (list(online(row, v, range(T // BLOCK), s)) for s in (0.0, slack))
np.testing.assert_allclose(lazy[-1][2], exact[-1][2], rtol=1e-12, atol=1e-12)

scores = (q[:BLOCK] @ k.T).astype(np.float64) / np.sqrt(H) * 4
rescaled = {}
for name, s in (("largest score so far", 0.0), ("kept within a factor of 256", slack)):
    alphas = np.array([[alpha for _, alpha, _, _ in online(x, v, range(T // BLOCK), s)] for x in scores])
    rescaled[name] = (alphas[:, 1:] != 1).sum(0)  # the first block has nothing before it
figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.3), layout="constrained")
left.plot(row, ".", markersize=2, color="tab:gray")
edges = np.arange(0, T + 1, BLOCK)
left.stairs([m for m, *_ in exact], edges, baseline=None, color="tab:blue", label="largest score so far")
left.stairs([m for m, *_ in lazy], edges, baseline=None, color="tab:orange", ls="--", label="kept within 8 log 2")
left.set(xlabel="key s", ylabel="score", title="one row, blocks of 128 keys", xticks=edges[::2])
left.legend(loc="lower right")
for i, (name, counts) in enumerate(rescaled.items()):
    right.bar(np.arange(1, T // BLOCK) + 0.4 * i - 0.2, counts, 0.4, label=name)
right.set(xlabel="block of keys", ylabel="rows", title="rows that are rescaled, of 128")
right.legend()
plt.show()
print({name: int(counts.sum()) for name, counts in rescaled.items()})
assert rescaled["kept within a factor of 256"].sum() < rescaled["largest score so far"].sum()

# %% [markdown]
# ## 2. Tiles
#
# A kernel works on tiles: 128 queries against 128 keys, say. `classify` says what a mask is on each: hidden, then
# nobody goes there; cut (orange), then the rule is evaluated element by element; or seen (blue), then nothing is.
# Numbers are the order of the forward kernel. Where a mask bounds the distance of key and query, it goes from the last
# block back, so that the diagonal comes first; other rules give lists, of which the blocks that are cut come first.

# %%
documents = jnp.repeat(jnp.arange(4), jnp.array([150, 450, 250, 174]), total_repeat_length=T)
rules = {
    "causal": masks.causal(),
    "causal, a window of 256": masks.causal() & masks.window(255, 0),
    "causal, four documents": masks.causal() & masks.segments(documents),
}


def visits(mask):
    """For each tile of queries the blocks of keys that are visited, in order, as pairs (block, whether it is cut)."""
    for kinds in np.asarray(mask.classify(T, T, BLOCK).kind[0, 0]):
        found = [(j, kind == 1) for j, kind in enumerate(kinds) if kind > 0]
        is_range = mask.row_bounds(T, T) is not None  # causal and windows, of the three
        yield found[::-1] if is_range else sorted(found, key=lambda visit: not visit[1])


figure, grid = plt.subplots(1, 3, figsize=(10, 4.2), layout="constrained")
colours = plt.matplotlib.colors.ListedColormap(["white", "tab:orange", "tab:blue"])
for axes, (name, mask) in zip(grid, rules.items(), strict=True):
    kind = np.asarray(mask.classify(T, T, BLOCK).kind[0, 0])
    axes.imshow(kind, cmap=colours, vmin=0, vmax=2)
    for i, blocks in enumerate(visits(mask)):
        for step, (j, _) in enumerate(blocks):
            axes.text(j, i, step, ha="center", va="center", fontsize=8, color="white" if kind[i, j] == 2 else "black")
    axes.set(title=f"{name}\n{(kind > 0).sum()} of {kind.size} tiles, {(kind == 1).sum()} of them cut")
    axes.set(xlabel="block of keys", ylabel="tile of queries")
plt.show()

# %% [markdown]
# This walk, with the sums of section 1 for 128 rows at once, is attention. A tile that is hidden is never read: keys
# and values that the last rows do not see are NaN below, and leave no trace there. In a tile that is cut, a row may see
# nothing: its $m$ is still −∞ then, and must not be subtracted.


# %%
def attend(q, k, v, mask):
    """Attention of one head, `[T, H]` each, by tiles: out, lse `[T]`, and how many tiles were visited."""
    visible, count = np.asarray(mask.materialize(T, T)[0, 0]), 0
    out, lse = np.zeros_like(v), np.zeros(T)
    for i, blocks in enumerate(visits(mask)):
        rows = slice(i * BLOCK, (i + 1) * BLOCK)
        m, total, accumulator = np.full(BLOCK, -np.inf), np.zeros(BLOCK), np.zeros((BLOCK, v.shape[1]))
        for j, cut in blocks:
            keys = slice(j * BLOCK, (j + 1) * BLOCK)
            s = q[rows] @ k[keys].T / np.sqrt(H)
            if cut:
                s = np.where(visible[rows, keys], s, -np.inf)
            new = np.maximum(m, s.max(1))
            shift = np.where(new == -np.inf, 0.0, new)
            alpha, p = np.exp(m - shift), np.exp(s - shift[:, None])
            m, total = new, alpha * total + p.sum(1)
            accumulator = alpha[:, None] * accumulator + p @ v[keys]
            count += 1
        out[rows], lse[rows] = accumulator / total[:, None], m + np.log(total)
    return out, lse, count


def one_head(x):
    """[T, H] as [batch 1, T, head 1, H]."""
    return jnp.asarray(x)[None, :, None]


with jax.default_matmul_precision("float32"):
    for name, mask in rules.items():
        out, lse, count = attend(*(x.astype(np.float64) for x in (q, k, v)), mask)
        found, found_lse = jattn.attention(*map(one_head, (q, k, v)), mask=mask, return_residual=True)
        x = np.where(mask.materialize(T, T)[0, 0], q.astype(np.float64) @ k.T.astype(np.float64) / np.sqrt(H), -np.inf)
        want, want_lse = map(np.stack, zip(*(dense(row, v.astype(np.float64)) for row in x), strict=True))
        np.testing.assert_allclose(out, want, rtol=1e-10, atol=1e-12)
        np.testing.assert_allclose(lse, want_lse, rtol=1e-12)
        error = np.abs(found[0, :, 0] - want).max() / np.abs(want).max()
        print(f"{name:24s} {count:2d} tiles; jattn.attention in float32 differs by {error:.1e} of the largest output")
        assert error < 1e-5 and np.abs(found_lse[0, :, 0] - want_lse).max() < 1e-5

hidden = np.ones((T, 1), np.float32)
hidden[:512] = np.nan  # keys of blocks that the last tile never reads
near = masks.causal() & masks.window(255, 0)
assert np.array_equal(attend(q, k * hidden, v * hidden, near)[0][-BLOCK:], attend(q, k, v, near)[0][-BLOCK:])

# %% [markdown]
# ## 3. Who does what, when
#
# On a Hopper GPU a thread block has one warpgroup that copies keys and values into shared memory, and two (or three)
# that compute, 64 rows each. A product is issued to the tensor core and waited for later; so while it runs, a warpgroup
# can compute exponentials. It issues the scores of block i together with the value product of block i − 1, and takes
# the softmax of block i under the latter; and the two warpgroups take turns in issuing:
#
#     producer     Q K0 | K1 V0 | K2 V1 | … | Q' K0' V(n−1) …
#     consumer     QK0 softmax0 | QK1 PV0, softmax1 under PV0 | … | QK0' PV(n−1), write out | …
#
# The simulation below has these rules and nothing else: copies are made in that order, each when its slot in a ring of
# two is free; products run in the order of issue, on the one tensor core; a warpgroup goes on when what it waits for is
# there. Durations are cycles at peak rates for blocks of 128 keys and heads of 128: estimates, not measurements. What
# the kernel reaches is in docs/performance.md.

# %%
PRODUCT = 2 * 64 * 128 * 128 // 4096  # 4096 operations a cycle
COPY = 2 * 128 * 128 // 64  # 64 bytes a cycle
SOFTMAX = 64 * 128 // 16 + 5 * 64 * 128 // 128  # 16 exponentials a cycle; five other instructions, 128 a cycle
WRITE = 2 * 64 * 128 // 64
STAGES, BLOCKS, TILES = 2, 4, 2


def producer_order():
    """(what, block): blocks are numbered through all tiles."""
    for block in range(TILES * BLOCKS):
        if block % BLOCKS == 0:
            yield "Q", block
        yield "K", block
        if block > 0:
            yield "V", block - 1
    yield "V", TILES * BLOCKS - 1


def turns(overlap):
    """What a consumer issues at each of its turns."""
    last = TILES * BLOCKS - 1
    if not overlap:
        return [[turn] for block in range(last + 1) for turn in (("QK", block), ("PV", block))]
    return [[("QK", 0)], *([("QK", i), ("PV", i - 1)] for i in range(1, last + 1)), [("PV", last)]]


def reads(what, block):
    """The copies that a product needs."""
    return [("V", block)] if what == "PV" else [("K", block), ("Q", block - block % BLOCKS)]


def simulate(consumers, overlap):
    """(lane, what, block, start, end) of everything; lanes are "copies", ("products", w) and ("softmax", w)."""
    events, to_copy, landed, done = [], producer_order(), {}, {}
    copies_free = tensor_free = turn = 0
    ready = [0] * consumers

    def at(lane, what, block, start, duration):
        events.append((lane, what, block, start, start + duration))
        return start + duration

    def arrival(what, block):
        """When a copy has landed: the producer works through its list up to it."""
        nonlocal copies_free
        while (what, block) not in landed:
            copy, number = following = next(to_copy)
            reader = {"K": "QK", "V": "PV"}.get(copy)  # whose end frees a slot; queries of both tiles have their own
            free = max(done[reader, number - STAGES]) if reader and number >= STAGES else 0
            landed[following] = copies_free = at("copies", *following, max(copies_free, free), COPY)
        return landed[what, block]

    for issue in turns(overlap):
        for w in range(consumers):
            turn = max(turn, ready[w])  # the warpgroup before has issued, and this one has nothing else to do
            ended = {}
            for what, block in issue:
                turn = max(turn, *(arrival(*copy) for copy in reads(what, block)))
                tensor_free = ended[what] = at(("products", w), what, block, max(turn, tensor_free), PRODUCT)
                done.setdefault((what, block), []).append(tensor_free)
            ready[w], begin = tensor_free, ended.get("QK")
            if what == "PV" and block % BLOCKS == BLOCKS - 1:  # a tile is done, and is written before all else
                begin = ready[w] = at(("softmax", w), "write", block, ready[w], WRITE)
            if "QK" in ended:
                ready[w] = max(ready[w], at(("softmax", w), "softmax", issue[0][1], begin, SOFTMAX))
    return events


def share(events):
    """How much of the time from the first product to the end of the last the tensor core works."""
    products = [(start, end) for lane, *_, start, end in events if lane[0] == "products"]
    return PRODUCT * len(products) / (max(end for _, end in products) - min(start for start, _ in products))


shares = {(w, overlap): share(simulate(w, overlap)) for w in (1, 2) for overlap in (False, True)}
for (w, overlap), busy in shares.items():
    print(f"consumers: {w}, softmax {'under a product' if overlap else 'by itself':16s} tensor core busy {busy:.0%}")
assert shares[1, False] < shares[1, True] < shares[2, True] and shares[1, False] < shares[2, False]

# %% [markdown]
# The simulation keeps what the kernel's barriers keep, and the order above:

# %%
copied = [f"{what}{block}" for lane, what, block, *_ in simulate(2, True) if lane == "copies"]
issued = [f"{what}{block}" for lane, what, block, *_ in simulate(2, True) if lane == ("products", 0)]
print("producer", *copied, "\nconsumer", *issued)
assert copied[:6] == ["Q0", "K0", "K1", "V0", "K2", "V1"] and copied[8:11] == ["Q4", "K4", "V3"]
assert issued[:5] == ["QK0", "QK1", "PV0", "QK2", "PV1"] and issued[7:9] == ["QK4", "PV3"]
for w, overlap in shares:
    events = simulate(w, overlap)
    when = {(lane, what, block): (start, end) for lane, what, block, start, end in events}
    products = sorted(when[key] for key in when if key[0][0] == "products")
    assert all(end <= start for (_, end), (start, _) in zip(products, products[1:], strict=False))  # one tensor core
    for i in range(w):
        lane, vector = ("products", i), ("softmax", i)
        for block in range(TILES * BLOCKS):
            scores, weights, values = when[lane, "QK", block], when[vector, "softmax", block], when[lane, "PV", block]
            assert when["copies", "K", block][1] <= scores[0] and scores[1] <= weights[0]
            assert max(weights[1], when["copies", "V", block][1]) <= values[0]
            if block + STAGES < TILES * BLOCKS:  # no slot is filled while it is read
                assert scores[1] <= when["copies", "K", block + STAGES][0]
                assert values[1] <= when["copies", "V", block + STAGES][0]

# %% [markdown]
# Two tiles of four blocks, the second with a prime. Above, one warpgroup that does one thing at a time: the tensor core
# waits for exponentials, and they for it. Below, the kernel: between its first and last products the tensor core hardly
# ever waits, also from one tile to the next.


# %%
def gantt(axes, events, title):
    lanes = list(dict.fromkeys(["copies", *sorted(lane for lane, *_ in events if lane != "copies")]))
    lanes.sort(key=lambda lane: (-1, "") if lane == "copies" else (lane[1], lane[0]))
    palette = {"Q": "0.6", "K": "0.75", "V": "0.85", "QK": "tab:blue", "PV": "tab:cyan", "softmax": "tab:orange",
               "write": "tab:green"}  # fmt: skip
    for lane, what, block, start, end in events:
        y = lanes.index(lane)
        axes.barh(y, end - start, left=start, height=0.8, color=palette[what], edgecolor="white", lw=0.5)
        number = f"{block % BLOCKS}{chr(39) * (block // BLOCKS)}"
        label = {"softmax": number, "write": "", "Q": "Q" + chr(39) * (block // BLOCKS)}.get(what, what + number)
        axes.text((start + end) / 2, y, label, ha="center", va="center", fontsize=6)
    axes.set_yticks(range(len(lanes)), ["copies" if x == "copies" else f"{x[0]}, warpgroup {x[1]}" for x in lanes])
    axes.invert_yaxis()
    axes.set(title=title, xlim=(0, 19500))
    return [plt.Rectangle((0, 0), 1, 1, color=palette[x]) for x in ("QK", "PV", "softmax", "write")]


figure, (above, below) = plt.subplots(2, 1, figsize=(12, 4.6), layout="constrained", height_ratios=[3, 5], sharex=True)
for axes, (w, overlap), name in (
    (above, (1, False), "one warpgroup, 64 rows, one thing at a time"),
    (below, (2, True), "the kernel: two warpgroups, 128 rows"),
):
    handles = gantt(axes, simulate(w, overlap), f"{name}: tensor core busy {shares[w, overlap]:.0%}")
below.set_xlabel("cycles")
above.legend(handles, ["q · k", "p · v", "softmax", "write out"], loc="upper right", fontsize=7, ncols=4)
plt.show()

# %% [markdown]
# ## 4. Backward
#
# The weights are not kept, but made again: the forward leaves `lse`, the logarithm of each row's sum, and then
# $p = e^{s - \mathrm{lse}}$ needs neither maximum nor rescaling. With $\delta = \sum_d o_d\, do_d$ of each row, a tile
# takes five products, two of them to make $s$ and $dp$ again:
#
# $$s = q k^\top \quad dp = do\, v^\top \quad ds = p \odot (dp - \delta) \quad
#   dv \mathrel{+}= p^\top do \quad dk \mathrel{+}= ds^\top q \quad dq \mathrel{+}= ds\, k$$


# %%
def gradients(q, k, v, out, lse, dout, mask):
    """dq, dk and dv by tiles: each tile of keys walks the blocks of queries that see it."""
    visible = np.asarray(mask.materialize(T, T)[0, 0])
    kind = np.asarray(mask.classify(T, T, BLOCK).transpose().kind[0, 0])
    delta, products = (out * dout).sum(1), 0
    dq, dk, dv = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
    for j, kinds in enumerate(kind):
        keys = slice(j * BLOCK, (j + 1) * BLOCK)
        for i in np.flatnonzero(kinds):
            rows = slice(i * BLOCK, (i + 1) * BLOCK)
            s, dp = q[rows] @ k[keys].T / np.sqrt(H), dout[rows] @ v[keys].T
            p = np.where(visible[rows, keys], np.exp(s - lse[rows, None]), 0.0)
            ds = p * (dp - delta[rows, None]) / np.sqrt(H)
            dv[keys] += p.T @ dout[rows]
            dk[keys] += ds.T @ q[rows]
            dq[rows] += ds @ k[keys]
            products += 5
    return (dq, dk, dv), products


mask = rules["causal, four documents"]
exact = [x.astype(np.float64) for x in (q, k, v)]
out, lse, count = attend(*exact, mask)
by_hand, products = gradients(*exact, out, lse, dout.astype(np.float64), mask)
print(f"{count} tiles: {2 * count} products forward, {products} backward")
print(f"kept for the backward: {lse.size} numbers, not {T * T} weights")
with jax.default_matmul_precision("float32"):
    _, pullback = jax.vjp(lambda *x: jattn.attention(*x, mask=mask), *map(one_head, (q, k, v)))
    found = pullback(one_head(dout))
for name, ours, theirs in zip(("dq", "dk", "dv"), by_hand, found, strict=True):
    error = np.abs(theirs[0, :, 0] - ours).max() / np.abs(ours).max()
    print(f"{name}: jax.vjp of jattn.attention differs by {error:.1e} of the largest")
    assert error < 1e-5

# %% [markdown]
# A thread block owns a tile of keys, a column below with a colour of its own, so that `dk` and `dv` are summed in
# registers. `dq` is summed in memory, by all owners that a row of tiles has: in the order in which they come, or with
# `deterministic=True` in a fixed one. Numbers are steps of the owner; it begins with the tiles that are cut.

# %%
owned = np.asarray(mask.classify(T, T, BLOCK).transpose().kind[0, 0])
owners = np.where(owned.T > 0, np.arange(len(owned)), np.nan)
figure, axes = plt.subplots(figsize=(4.6, 3.9), layout="constrained")
axes.imshow(owners, cmap="Set2", vmin=0, vmax=7)
for j, kinds in enumerate(owned):
    order = [i for wanted in (1, 2) for i in np.flatnonzero(kinds == wanted)]
    for step, i in enumerate(order):
        axes.text(j, i, step, ha="center", va="center", fontsize=8)
for i, adders in enumerate((owned > 0).sum(0)):
    axes.text(8.0, i, f"dq: {adders} added", va="center", fontsize=8)
axes.set(xlabel="tile of keys: owner of dk, dv", ylabel="block of queries", xlim=(-0.5, 11), xticks=range(8))
axes.spines[["right", "top"]].set_visible(False)
plt.show()

# %% [markdown]
# ## 5. On this machine
#
# In bfloat16, 1024 tokens, eight heads of 128 on two key heads: forward and backward against float64
# of the same inputs.

# %%
draws = (rng.standard_normal((1, T, heads, 128)) for heads in (8, 2, 2, 8))
inputs = [jnp.asarray(x, jnp.bfloat16) for x in draws]
chosen = jattn.explain(*inputs[:3], is_causal=True)
print(chosen)
if chosen.implementation == "mosaic":
    print("A Hopper GPU: what follows is computed by the kernel.")
else:
    print(f"No Hopper GPU: what follows is computed by {chosen.implementation!r}, plain JAX that walks over tiles too.")


def reference(q, k, v, dout):
    """(out, dq, dk, dv) of causal attention in float64, with the whole matrix of scores."""
    q, k, v, dout = (np.asarray(x, np.float64).swapaxes(1, 2) for x in (q, k, v, dout))  # [B, N, T, H]
    group = q.shape[1] // k.shape[1]
    keys, values = (np.repeat(x, group, axis=1) for x in (k, v))
    s = np.where(np.tri(T, dtype=bool), q @ keys.swapaxes(2, 3) / np.sqrt(q.shape[3]), -np.inf)
    p = np.exp(s - s.max(3, keepdims=True))
    p /= p.sum(3, keepdims=True)
    dp = dout @ values.swapaxes(2, 3)
    ds = p * (dp - (p * dp).sum(3, keepdims=True)) / np.sqrt(q.shape[3])
    dk, dv = (ds.swapaxes(2, 3) @ q, p.swapaxes(2, 3) @ dout)
    dk, dv = (x.reshape(x.shape[0], -1, group, *x.shape[2:]).sum(2) for x in (dk, dv))  # of the heads of a group
    return [x.swapaxes(1, 2) for x in (p @ values, ds @ keys, dk, dv)]


@jax.jit
def run(q, k, v, dout):
    out, pullback = jax.vjp(lambda *x: jattn.attention(*x, is_causal=True), q, k, v)
    return out, *pullback(dout)


for name, ours, exact in zip(("out", "dq", "dk", "dv"), run(*inputs), reference(*inputs), strict=True):
    error = np.abs(np.asarray(ours, np.float64) - exact).max() / np.abs(exact).max()
    print(f"{name:3s} {ours.dtype} {ours.shape}: largest error {error:.1e} of the largest element")
    assert error < 2**-6  # two units in the last place of bfloat16

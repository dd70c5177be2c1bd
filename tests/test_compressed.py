"""CSA and HCA against the oracle; through a cache, in chunks, packed or in a batch they give the bits of one prompt."""

import functools

import baseline_compressed as baseline
import jax
import jax.numpy as jnp
import numpy as np
import oracle_compressed as oracle
import pytest
from compare import check, check_lse
from compressed_cases import (
    ANGLES,
    KINDS,
    OVERLAP,
    RATIO,
    ROTARY,
    SCALE,
    SINKS,
    TOP,
    WINDOW,
    B,
    C,
    D,
    J,
    N,
    T,
    chunk,
    compiled,
    draw,
    empty,
    equal,
    host,
    rows,
    run,
    tokens,
)
from jax.sharding import AxisType, Mesh, PartitionSpec

from jattn.compressed import EntryIndex, EntrySource, csa_attention, grouped_output, hca_attention, window_indices
from jattn.compressed_cache import CompressedCache


def wide(x):
    return None if x is None else np.asarray(x, np.float64)


def problem(kind, inputs, b, sinks=SINKS, **more):
    """Sequence b for the oracle."""
    query, kv, own, index = inputs

    def of(s):
        return oracle.EntrySource(wide(s.u[b]), wide(s.z[b]), wide(s.ape), wide(s.norm), OVERLAP[kind])

    if isinstance(index, EntryIndex):
        index = oracle.EntryIndex(wide(index.query[b]), wide(index.weights[b]), of(index.source))
    options = dict(scale=SCALE, window=WINDOW, top_k=TOP, angles=ANGLES) | more
    return oracle.Layer(wide(query[b]), wide(kv[b]), of(own), index, wide(sinks), **options)


def mask(selected, E):
    found = np.zeros((len(selected), len(selected[0]), E), bool)
    for b, lists in enumerate(selected):
        for t, entries in enumerate(lists):
            found[b, t, entries] = True
    return found


def padded(selected, width):
    return np.array([[[*x, *[-1] * (width - len(x))] for x in lists] for lists in selected], np.int32)


def hold(kind, got, inputs, selected, dtype):
    """`got` against the oracle, with the entries that it attends to."""
    problems = [problem(kind, (*inputs[:3], None), b) for b in range(len(selected))]
    outs, lses = zip(*(oracle.forward(p, s) for p, s in zip(problems, selected, strict=True)), strict=True)
    query, kv, own, _ = inputs
    chosen = mask(selected, own.u.shape[1] // RATIO[kind])
    dense = functools.partial(
        baseline.attention, chosen=chosen, overlap=OVERLAP[kind], scale=SCALE, window=WINDOW, rotary=ROTARY
    )
    yard = jax.jit(dense)(query, kv, own.u, own.z, own.ape, own.norm, SINKS)
    assert got[0].dtype == dtype
    check("out", got[0], np.stack(outs), [yard[0]], dtype)
    if dtype == "bfloat16":  # rotated rows are rounded to it before there are scores
        check("lse", got[1], np.stack(lses), [yard[1]], dtype)
    else:
        check_lse(got[1], np.stack(lses), dtype)


@pytest.mark.quick
@KINDS
def test_is_the_definition(kind):
    inputs = draw(kind)
    selected = [oracle.select(problem(kind, inputs, b)) for b in range(B)]
    hold(kind, run(kind, inputs), inputs, selected, "float32")
    assert {len(x) for x in selected[0]} == ({0, 1, 2, 3} if kind == "CSA" else set(range(6)))


@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_is_the_definition_in_other_dtypes(dtype):
    """With lists, so that what rounding does to a selection does not matter."""
    selected = [oracle.select(problem("CSA", draw("CSA"), b)) for b in range(B)]
    with jax.enable_x64(dtype == "float64"):
        inputs = *draw("CSA", dtype=dtype)[:3], padded(selected, TOP)
        hold("CSA", run("CSA", inputs), inputs, selected, dtype)


def test_given_lists_are_what_the_indexer_finds():
    inputs = draw("CSA")
    selected = [oracle.select(problem("CSA", inputs, b)) for b in range(B)]
    equal(run("CSA", (*inputs[:3], padded(selected, TOP))), run("CSA", inputs))
    # Numbers that are negative, or of entries that are not visible there, are left out wherever they stand.
    wild = np.array([-(2**31), -1, 2**31 - 1, 10**6, 11, 12], np.int32)
    lists = np.random.default_rng(3).choice(wild, (B, T, TOP))
    equal(run("CSA", (*inputs[:3], lists)), run("CSA", (*inputs[:3], np.where(lists < 10, lists, -1))))
    equal(run("CSA", (*inputs[:3], lists)), run("CSA", (*inputs[:3], np.full_like(lists, -1))))


def test_an_entry_that_is_listed_twice_counts_twice():
    query, kv, own, _ = draw("CSA")
    once, twice = np.array([0, -1, -1], np.int32), np.array([0, 0, -1], np.int32)
    lists = [np.broadcast_to(x, (B, T, 3)) for x in (once, twice)]
    out, lse = run("CSA", (query, kv, own, lists[1]))
    want, want_lse = oracle.forward(
        problem("CSA", (query, kv, own, None), 0), [[0, 0] if t > 2 else [] for t in range(T)]
    )
    np.testing.assert_allclose(out[0], want, rtol=1e-4, atol=1e-5)
    check_lse(lse[0], want_lse, "float32")
    assert np.any(run("CSA", (query, kv, own, lists[0]))[1] != lse)


@KINDS
def test_gradients_are_those_of_the_definition(kind):
    query, kv, own, index = draw(kind, B=1, T=19, seed=1)
    inputs = dict(query=query, kv=kv, u=own.u, z=own.z, ape=own.ape, norm=own.norm, sinks=SINKS)
    selected = oracle.select(problem(kind, (query, kv, own, index), 0))
    rng = np.random.default_rng(2)
    dout, dlse = (rng.standard_normal(s).astype(np.float32) for s in ((1, 19, N, D), (1, 19, N)))
    batched = {"query": 4, "kv": 3, "u": 3, "z": 3}

    def loss(d):
        one = {
            n: x[:, 0] if n in batched and x.ndim > batched[n] else x[0] if n in batched else x for n, x in d.items()
        }
        whole = oracle.EntrySource(one["u"], one["z"], one["ape"], one["norm"], OVERLAP[kind])
        layer = oracle.Layer(one["query"], one["kv"], whole, None, one["sinks"], SCALE, WINDOW, TOP, ANGLES)
        out, lse = oracle.forward(layer, selected)
        return (out * dout[0]).sum((-1, -2, -3)) + (lse * dlse[0]).sum((-1, -2))

    want = oracle.gradients(loss, {n: np.asarray(x, np.float64) for n, x in inputs.items()})

    def pull(f, inputs):
        def total(d):
            out, lse = f(**d)
            return jnp.sum(out * dout) + jnp.sum(lse * dlse)

        return jax.jit(jax.grad(total))(inputs)

    def op(query, kv, u, z, ape, norm, sinks, index):
        return compiled(kind)(query, kv, EntrySource(u, z, ape, norm), index, None, sinks)

    got = pull(op, inputs | dict(index=index))
    assert not any(np.any(g) for g in jax.tree.leaves(got.pop("index")))  # nothing flows through the selection
    chosen = mask([selected], 19 // RATIO[kind])
    options = dict(chosen=chosen, overlap=OVERLAP[kind], scale=SCALE, window=WINDOW, rotary=ROTARY)
    yard = pull(functools.partial(baseline.attention, **options), inputs)
    for name in inputs:
        check("d" + name, got[name], want[name], [yard[name]], "float32")


@KINDS
def test_a_token_at_a_time_is_the_last_row_of_every_prompt(kind):
    """And the state it leaves is that of the prompt, for prompts of 1 to 40 tokens."""
    inputs, cache = draw(kind), empty(kind)
    whole = run(kind, inputs)
    for t in range(T):
        (out, lse), cache = run(kind, tokens(inputs, lambda x, t=t: x[:, t : t + 1]), cache)
        (prompt, prompt_lse), state = run(kind, chunk(inputs, 0, t + 1), empty(kind), [t + 1] * B)
        equal((out[:, 0], lse[:, 0]), (prompt[:, t], prompt_lse[:, t]), f"decoding token {t}")
        equal(cache, state)
        np.testing.assert_array_equal(cache.lengths, t + 1)
        equal((out[:, 0], lse[:, 0]), (whole[0][:, t], whole[1][:, t]), f"without a cache, token {t}")


@KINDS
def test_a_prompt_in_chunks_is_the_prompt(kind):
    """Cut at every place, and into many: outputs and state bit for bit, with NaN behind each chunk."""
    inputs = draw(kind)
    (out, lse), state = run(kind, inputs, empty(kind))
    cuts = [[c] for c in range(1, T)] + [[3, 4, 11, 12, 13, 30], [0, 0, 7, 7, 40]]
    for cut in cuts:
        cache, found = empty(kind), []
        for a, b in zip([0, *cut], [*cut, T], strict=True):
            (o, lse_), cache = run(kind, chunk(inputs, a, b), cache, [b - a] * B)
            found.append((o[:, : b - a], lse_[:, : b - a]))
            assert not np.any(o[:, b - a :]) and np.isneginf(lse_[:, b - a :]).all()
        equal(jax.tree.map(lambda *x: np.concatenate(x, 1), *found), (out, lse), f"cut at {cut}")
        equal(cache, state, f"cut at {cut}")


@KINDS
def test_causality(kind):
    """What any token holds changes no bit of an earlier row, and some of its own."""
    inputs = draw(kind)
    out, lse = run(kind, inputs)
    rng = np.random.default_rng(4)
    for s in (0, 3, 7, 8, 22, 39):

        def change(x, s=s):
            x = x.copy()
            x[:, s] = rng.standard_normal(x[:, s].shape) * 5
            return x

        other, other_lse = run(kind, tokens(inputs, change))
        equal((other[:, :s], other_lse[:, :s]), (out[:, :s], lse[:, :s]), f"token {s}")
        assert np.any(other[:, s] != out[:, s], axis=(-1, -2)).all()


@KINDS
def test_packed_sequences_do_not_see_each_other(kind):
    lengths = [3, 9, 0, 21, 4]  # 3 rows behind the last
    cu = np.cumsum([0, *lengths]).astype(np.int32)
    inputs = jax.tree.map(np.copy, draw(kind, B=1))
    for x in jax.tree.leaves(inputs):
        if x.shape[:2] == (1, T):
            x[:, cu[-1] :] = np.nan
    out, lse = run(kind, tokens(inputs, lambda x: x[0]), cu_seqlens=cu)
    assert not np.any(out[cu[-1] :]) and np.isneginf(lse[cu[-1] :]).all()
    for a, b in zip(cu, cu[1:], strict=False):
        alone = run(kind, rows(chunk(inputs, a, b), [0, 0]), lengths=[b - a, 0])
        equal((out[a:b], lse[a:b]), tuple(x[0, : b - a] for x in alone), f"rows {a} to {b}")


@pytest.mark.parametrize("kind, batch, length", [("CSA", 5, 48), ("HCA", 1, 40), ("HCA", 5, 48)])
def test_bits_do_not_depend_on_neighbours_row_or_padding(kind, batch, length):
    inputs = draw(kind)
    want = [x[0] for x in run(kind, inputs)]
    rng = np.random.default_rng(5)
    for place in range(batch):
        others = chunk(draw(kind, B=batch, T=length, seed=place), 0, length, length)
        mixed = jax.tree.map(np.copy, others)
        for x, own in zip(jax.tree.leaves(mixed), jax.tree.leaves(inputs), strict=True):
            if x.shape[:2] == (batch, length):
                x[place] = np.nan
                x[place, :T] = own[0]
        # Weights are those of the victim.
        shared = jax.tree.map(lambda x, y: y if x.shape == y.shape else x, mixed, inputs)
        lengths = rng.choice([0, 1, 9, 10, length], batch)
        lengths[place] = T
        got = [x[place, :T] for x in run(kind, shared, lengths=lengths)]
        equal(got, want, f"row {place} of {batch}, neighbours of {lengths}")


@KINDS
def test_decoding_does_not_depend_on_neighbours_or_room(kind):
    """A token behind caches of several lengths: the row, the neighbour, the capacity, and what unused memory holds."""
    inputs = draw(kind)
    step = tokens(inputs, lambda x: x[:, :1])
    _, cache = run(kind, inputs, empty(kind, capacity=T + 8), [17, 32])
    (out, lse), after = run(kind, step, cache)
    for lengths in ([32, 17], [32, 0], [32, 40]):
        _, other = run(kind, rows(inputs, [1, 0]), empty(kind), lengths)
        (o, o_lse), _ = run(kind, rows(step, [1, 0]), other)
        equal((o[0], o_lse[0]), (out[1], lse[1]), f"neighbour of {lengths}")
    # Room for more, slots and entries that hold no token full of NaN.
    poisoned = jax.tree.map(np.array, cache)
    E = poisoned.entries.shape[1]
    for b, n in enumerate((17, 32)):
        poisoned.entries[b, n // RATIO[kind] :] = np.nan
        if kind == "CSA":
            poisoned.index_keys[b, n // 4 :] = np.nan
    equal(run(kind, step, poisoned)[0], (out, lse))
    assert not np.isnan(poisoned.window).any() and E > 17 // RATIO[kind]
    equal(after.lengths, np.array([18, 33], np.int32))


@KINDS
def test_tokens_past_the_capacity_are_dropped(kind):
    inputs, cache = draw(kind), empty(kind)
    _, cache = run(kind, inputs, cache)
    _, cache = run(kind, inputs, cache, [7, 8])
    (out, lse), after = run(kind, inputs, cache)
    assert np.any(out[0, 0]) and not np.any(out[0, 1:]) and not np.any(out[1])
    assert np.isneginf(lse[0, 1:]).all() and np.isneginf(lse[1]).all()
    np.testing.assert_array_equal(after.lengths, T + 8)
    equal(jax.tree.map(lambda x: x[1], after), jax.tree.map(lambda x: x[1], cache))


@KINDS
def test_prompts_shorter_than_a_block_see_the_window_alone(kind):
    """No entry for S < m; at S = m the last query sees entry 0, and only it does."""
    m, inputs = RATIO[kind], draw(kind)
    other = jax.tree.map(lambda x: x, inputs)
    own = EntrySource(inputs[2].u * -2 + 1, inputs[2].z, inputs[2].ape, inputs[2].norm)
    other = (inputs[0], inputs[1], own, inputs[3])
    for n in (1, m - 1, m, m + 1):
        a, b = (run(kind, chunk(x, 0, n), lengths=[n] * B)[0] for x in (inputs, other))
        same = np.all(a == b, axis=(0, 2, 3))
        np.testing.assert_array_equal(same[:n], np.arange(n) < m - 1)


def test_ties_go_to_the_lower_entry():
    """Plateaus of exact zeros from the ReLU, below and above other scores, with weights of either sign.

    In channels that do not rotate. The oracle's selection is that of the marks.
    """
    query, kv, own, index = draw("CSA")
    rng = np.random.default_rng(6)
    u = np.zeros_like(index.source.u)
    marks = np.repeat(rng.integers(-1, 2, (B, T // 4)), 4, axis=1)  # one of three kinds of key for each block
    u[..., C:] = marks[..., None] * np.eye(C, dtype=np.float32)[0]
    ape = np.zeros_like(index.source.ape)
    ape[:, :C] = -1e9  # the block before has no weight
    keys = EntrySource(u, np.zeros_like(index.source.z), ape, np.ones_like(index.source.norm))
    q = np.zeros_like(index.query)
    q[..., 0] = np.where(np.arange(T)[:, None] % 3 == 0, -1, 1)  # who sees 0 where others see 1
    w = np.broadcast_to(np.where(np.arange(T) % 2, 1, -1)[:, None].astype(np.float32), index.weights.shape)
    planted = EntryIndex(q, w, keys)
    lists = []
    for b in range(B):
        scores = w[b, :, :1] * J * np.maximum(q[b, :, :1, 0] * marks[b, ::4], 0)
        lists.append([oracle.top(scores[t, : (t + 1) // 4], TOP) for t in range(T)])
    want = run("CSA", (query, kv, own, padded(lists, TOP)))
    equal(run("CSA", (query, kv, own, planted)), want)
    equal(run("CSA", (query, kv, own, planted), options=(("score_dtype", "bfloat16"),)), want)
    assert any(x != list(range(len(x))) for x in lists[0]) and any(x == [0, 1, 2] for x in lists[0])


@KINDS
def test_sinks(kind):
    """−inf is none; +inf takes everything; 0 halves what one key of score 0 gives."""
    inputs = draw(kind)
    free, free_lse = run(kind, inputs, sinks=np.full(N, -np.inf, np.float32))
    all_, all_lse = run(kind, inputs, sinks=np.full(N, np.inf, np.float32))
    assert not np.any(all_) and np.isposinf(all_lse).all()
    out, lse = run(kind, inputs)
    share = np.exp(free_lse - np.logaddexp(free_lse, SINKS))
    np.testing.assert_allclose(out, free * share[..., None], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(lse, np.logaddexp(free_lse, SINKS), rtol=1e-5, atol=1e-6)
    zero = (np.zeros_like(inputs[0]), *inputs[1:])
    first = run(kind, zero, sinks=np.zeros(N, np.float32))[0][:, 0]
    np.testing.assert_allclose(first, np.repeat(inputs[1][:, :1], N, 1) / 2, rtol=1e-6, atol=1e-6)


def test_nan_that_nobody_sees_leaves_no_trace():
    """Behind lengths, in values and gradients."""
    kind, inputs = "HCA", draw("HCA")
    lengths = np.array([13, 0])
    poisoned = tokens(
        inputs, lambda x: np.where(np.arange(T).reshape(-1, *[1] * (x.ndim - 2)) < 13, x, np.nan).astype(x.dtype)
    )
    poisoned = tokens(
        poisoned, lambda x: np.where(np.arange(B).reshape(-1, *[1] * (x.ndim - 1)) < 1, x, np.nan).astype(x.dtype)
    )
    clean = tokens(inputs, lambda x: np.where(np.isnan(x), 0, x))

    def total(query, kv, own):
        out, lse = compiled(kind)(query, kv, own, None, None, SINKS, seq_lengths=lengths)
        return jnp.sum(out) + jnp.sum(jnp.where(jnp.isfinite(lse), lse, 0)), (out, lse)

    pull = jax.jit(jax.grad(total, (0, 1, 2), has_aux=True))

    gradients, result = host(pull(*poisoned[:3]))
    equal((gradients, result), host(pull(*clean[:3])))
    assert not np.any(result[0][0, 13:]) and not np.any(result[0][1]) and np.isneginf(result[1][1]).all()
    for g in (gradients[0], gradients[1], gradients[2].u, gradients[2].z):
        assert not np.any(g[0, 13:]) and not np.any(g[1])


def test_window_indices():
    np.testing.assert_array_equal(
        window_indices(np.array([1, 5, -1, 0]), 3), [[0, 1, -1], [3, 4, 5], [-1] * 3, [0, -1, -1]]
    )


def test_grouped_output():
    rng = np.random.default_rng(7)
    out, w_a, w_b = (rng.standard_normal(s).astype(np.float32) for s in ((2, 5, 6, 4), (3, 8, 7), (21, 9)))
    want = np.zeros((2, 5, 9))
    for g in range(3):
        heads = out[:, :, 2 * g : 2 * g + 2].reshape(2, 5, 8).astype(np.float64)
        want += heads @ w_a[g] @ w_b[7 * g : 7 * g + 7].astype(np.float64)
    got = grouped_output(out, w_a, w_b)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-4)
    assert grouped_output(*(jnp.asarray(x, jnp.bfloat16) for x in (out, w_a, w_b))).dtype == jnp.bfloat16
    for bad, message in (
        ((out, w_a[:2], w_b), "w_a has 8 rows a group; N / G · D = 12"),
        ((out[:, :, :5], w_a, w_b), "heads N=5 must be a multiple of the groups G=3"),
        ((out[..., :3], w_a, w_b), "w_a has 8 rows a group; N / G · D = 6"),
        ((out, w_a, w_b[:20]), "w_b has 20 rows; G · R = 21"),
        ((out, w_a[0], w_b), r"w_a has shape \(8, 7\)"),
    ):
        with pytest.raises(ValueError, match=message):
            grouped_output(*bad)
    with pytest.raises(TypeError, match="w_a dtype bfloat16 must equal out's float32"):
        grouped_output(out, w_a.astype(jnp.bfloat16), w_b)


def test_a_decode_loop_is_one_scan():
    inputs = draw("HCA")
    whole = run("HCA", inputs)[0]
    query, kv, own, _ = inputs

    def step(cache, x):
        query, kv, u, z = (a[:, None] for a in x)
        return hca_attention(
            query,
            kv,
            EntrySource(u, z, own.ape, own.norm),
            cache,
            scale=SCALE,
            window=WINDOW,
            rotary=ROTARY,
            sinks=SINKS,
        )[::-1]

    xs = [np.moveaxis(a, 1, 0) for a in (query, kv, own.u, own.z)]
    cache, out = jax.jit(lambda cache: jax.lax.scan(step, cache, xs))(empty("HCA"))
    np.testing.assert_allclose(np.moveaxis(np.asarray(out)[:, :, 0], 0, 1), whole, rtol=1e-5, atol=1e-6)


def test_vmap_is_the_loop():
    inputs = draw("HCA")
    query, kv, own, _ = inputs

    def one(query, kv, u, z):
        return hca_attention(
            query[None],
            kv[None],
            EntrySource(u[None], z[None], own.ape, own.norm),
            scale=SCALE,
            window=WINDOW,
            sinks=SINKS,
        )[0]

    got = jax.jit(jax.vmap(one))(query, kv, own.u, own.z)
    want = np.stack([jax.jit(one)(query[b], kv[b], own.u[b], own.z[b]) for b in range(B)])
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_many_queries_and_long_caches_lower():
    """70,000 rows; caches of a million tokens whose arrays have more than 2^31 bytes and elements."""
    f = lambda *s: jax.ShapeDtypeStruct(s, jnp.bfloat16)  # noqa: E731
    own = EntrySource(f(1, 70_000, 24), f(1, 70_000, 24), f(4, 24), f(12))
    lists = jax.ShapeDtypeStruct((1, 70_000, 4), jnp.int32)
    call = functools.partial(csa_attention, scale=1.0, window=8)
    jax.jit(call).lower(f(1, 70_000, 2, 12), f(1, 70_000, 12), own, lists)
    make = functools.partial(
        CompressedCache.zeros, 17, 2**20, 512, ratio=4, overlap=True, index_dim=128, dtype="bfloat16"
    )
    for kv_format, index_format in ((None, None), ("v4_584", "fp4_b32")):
        cache = jax.eval_shape(functools.partial(make, kv_format=kv_format, index_format=index_format))
        largest = max(x.size for x in jax.tree.leaves(cache))
        assert largest > 2**31
        index = EntryIndex(
            f(17, 1, 64, 128), f(17, 1, 64), EntrySource(f(17, 1, 256), f(17, 1, 256), f(4, 256), f(128))
        )
        own = EntrySource(f(17, 1, 1024), f(17, 1, 1024), f(4, 1024), f(512))
        call = functools.partial(csa_attention, scale=1.0, top_k=512, index_format=index_format)
        jax.jit(call).lower(f(17, 1, 4, 512), f(17, 1, 512), own, index, cache)


def test_shard_map_with_varying_axes_checked():
    """Sequences over two devices, each with its own: the bits of one, and gradients go through."""
    inputs = draw("HCA")
    query, kv, own, _ = inputs
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",), axis_types=(AxisType.Auto,))
    batch = PartitionSpec("data")

    def call(query, kv, u, z, ape, norm, sinks, cache):
        options = dict(scale=SCALE, window=WINDOW, rotary=ROTARY, sinks=sinks)
        return hca_attention(query, kv, EntrySource(u, z, ape, norm), cache, **options)[0]

    specs = (*[batch] * 4, *[PartitionSpec()] * 3, batch)
    sharded = jax.shard_map(call, mesh=mesh, in_specs=specs, out_specs=batch)
    arrays = query, kv, own.u, own.z, own.ape, own.norm, SINKS
    cache = empty("HCA")
    np.testing.assert_array_equal(jax.jit(sharded)(*arrays, cache), run("HCA", inputs, cache)[0][0])
    jax.jit(jax.grad(lambda *x: jnp.sum(sharded(*x, cache)), range(7))).lower(*arrays)

"""Paged caches: pages in any order are the contiguous cache bit for bit, and what nobody owns may hold anything."""

import functools

import caches
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from caches import JUNK, draw, hold, paged, problem, replace
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jattn
from jattn import PagedCache, append, copy_pages, decode_attention, gather, masks, paged_attention

LENGTHS = np.array([300, 1, 0, 263], np.int32)


def equal(got, want):
    jax.tree.map(np.testing.assert_array_equal, got, want)


attend = jax.jit(functools.partial(paged_attention, return_residual=True), static_argnames="is_causal")


@pytest.mark.quick
@pytest.mark.parametrize("dtype, sizes", [("float32", (1, 64)), ("bfloat16", (16, 128)), ("float16", (32, 256))])
def test_pages_in_any_order_are_the_contiguous_cache(dtype, sizes):
    """NaN or Inf in every unused slot and page, junk in every unused entry, another order of pages each time."""
    q, k, v = draw(4, 2, dtype=dtype)
    want = decode_attention(q, k, v, LENGTHS, return_residual=True)
    hold(want, problem(q, k, v, LENGTHS))
    for page_size in sizes:
        cache = paged(k, v, LENGTHS, page_size, seed=page_size)
        equal(attend(q, cache), want)
        equal(attend(q, paged(k, v, LENGTHS, page_size, seed=7)), want)
        pools = (jnp.where(jnp.isnan(x), jnp.inf, x).astype(x.dtype) for x in (cache.key_pages, cache.value_pages))
        equal(attend(q, PagedCache(*pools, cache.block_tables, cache.lengths)), want)
    equal(decode_attention(q, *gather(cache), cache.lengths, return_residual=True), want)


def test_gather_has_zeros_past_the_length():
    _, k, v = draw(4, 2)
    for x, got in zip((k, v), gather(paged(k, v, LENGTHS, 32)), strict=True):
        assert got.shape == (4, 320, 2, 16)
        want = np.where((np.arange(300) < LENGTHS[:, None])[..., None, None], x, 0)
        np.testing.assert_array_equal(got[:, :300], want)
        assert not np.any(got[:, 300:])


def test_quantised_pages():
    q, k, v = draw(4, 2, dtype="bfloat16")
    k, v = jattn.quantize(k, "float8_e4m3fn"), jattn.quantize(v, "int8")
    equal(attend(q, paged(k, v, LENGTHS)), decode_attention(q, k, v, LENGTHS, return_residual=True))


# Chunked prefill


def packed_problem(q, k, v, cu, lengths, m, **options):
    rows = slice(int(cu[m]), int(cu[m + 1]))
    return rows, problem(q[None, rows], k[m : m + 1], v[m : m + 1], lengths[m : m + 1], **options)


def test_chunked_prefill_beside_decoding():
    """Any number of queries a sequence, packed: a chunk, one token, none, a whole prompt, and rows of nobody."""
    _, k, v = draw(5, 1, 300, dtype="bfloat16")
    lengths, cu = np.array([300, 263, 0, 129, 7], np.int32), np.array([0, 70, 71, 71, 200, 207], np.int32)
    q = draw(1, 212, 300, dtype="bfloat16")[0][0]
    q[207:] = np.nan
    sinks = np.float32([0, 1, -1, 2])
    out, lse = attend(q, paged(k, v, lengths), cu, sinks=sinks)
    for m in (0, 1, 3, 4):
        rows, p = packed_problem(q, k, v, cu, lengths, m, sinks=sinks)
        hold((out[None, rows], lse[None, rows]), p)
    assert not np.any(out[207:]) and np.isneginf(lse[207:]).all()


def test_zero_lengths_as_they_come_in_practice():
    lengths = np.array([0, 7, 0, 0, 129, 0], np.int32)
    _, k, v = draw(6, 1, 130)
    q = draw(1, 136, 130)[0][0]
    cu = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    out, lse = attend(q, paged(k, v, lengths), cu)
    for m in (1, 4):
        rows, p = packed_problem(q, k, v, cu, lengths, m)
        hold((out[None, rows], lse[None, rows]), p)
    out, lse = attend(q, paged(k, v, 0 * lengths), cu)
    assert not np.any(out) and np.isneginf(lse).all()
    out, lse = attend(q[:0], paged(k, v, lengths), 0 * cu)
    assert out.shape == (0, 4, 16) and lse.shape == (0, 4)


def test_chunks_of_a_prompt_are_the_prompt():
    """A prompt prefilled in chunks of 64 and of 16 gives the bits of a prompt prefilled at once."""
    q, k, v = draw(1, 128, 128)
    cache = paged(k, v, [128])
    whole = attend(q, cache)
    for size in (64, 16):
        starts = range(0, 128, size)
        parts = [attend(q[:, i : i + size], replace(cache, lengths=jnp.int32([i + size]))) for i in starts]
        equal([jnp.concatenate(x, axis=1) for x in zip(*parts, strict=True)], list(whole))


def test_used_lengths_of_packed_queries():
    _, k, v = draw(2, 1)
    q, lengths = draw(1, 20)[0][0], np.array([300, 40], np.int32)
    cu, used = np.array([0, 12, 20], np.int32), np.array([5, 8], np.int32)
    holes = q.copy()
    holes[5:12] = np.nan
    out, lse = attend(holes, paged(k, v, lengths), cu, query_seq_lengths=used)
    hold((out[None, :5], lse[None, :5]), problem(q[None, :5], k[:1], v[:1], lengths[:1]))
    hold((out[None, 12:], lse[None, 12:]), problem(q[None, 12:], k[1:], v[1:], lengths[1:]))
    assert not np.any(out[5:12]) and np.isneginf(lse[5:12]).all()


# Verification of drafts


def test_tree_verification():
    """Each sequence with a tree of its own, some with fewer drafts: ancestors and the whole prefix are seen."""
    rng = np.random.default_rng(3)
    parents = np.array([[rng.integers(-1, t) if t else -1 for t in range(9)] for _ in range(4)], np.int32)
    counts, lengths = np.array([9, 1, 0, 6], np.int32), np.array([300, 1, 9, 263], np.int32)
    sees = np.broadcast_to(np.eye(9, dtype=bool), (4, 9, 9)).copy()
    for b, t in np.ndindex(4, 9):
        if parents[b, t] >= 0:
            sees[b, t] |= sees[b, parents[b, t]]

    def rule(b, n, row, t, s):
        node = s - (t - row)
        return (node < 0) | ((node < 9) & sees[b, row, np.clip(node, 0, 8)])

    q, k, v = draw(4, 9)
    got = attend(q, paged(k, v, lengths), mask=masks.tree(parents), query_seq_lengths=counts)
    hold(got, problem(q, k, v, lengths, rule, query_lengths=counts))


def test_a_chain_is_causal_bit_for_bit():
    q, k, v = draw(4, 5)
    cache = paged(k, v, LENGTHS)
    equal(attend(q, cache, mask=masks.tree(np.arange(-1, 4))), attend(q, cache))


# What nobody may look at


def test_pages_behind_a_window_may_be_anything():
    """A server with a window frees the pages behind it: others write there, or the entry is junk."""
    q, k, v = draw(4, 2)
    windowed = functools.partial(paged_attention, local_window_size=(40, 0), return_residual=True)
    want = windowed(q, paged(k, v, LENGTHS))
    cache = paged(k, v, LENGTHS)
    tables, keys = np.array(cache.block_tables), np.array(cache.key_pages)
    for b, n in enumerate(LENGTHS):
        behind = max(n - 2 - 40, 0) // 16
        keys[tables[b, :behind]] = np.nan
        tables[b, : behind // 2] = np.resize(JUNK, behind // 2)
    equal(windowed(q, replace(cache, key_pages=jnp.asarray(keys), block_tables=jnp.asarray(tables))), want)


def test_an_id_out_of_range_reads_nothing_outside():
    """What is read there is somebody's page: the sequence is wrong, others are not, and nothing is read outside."""
    q, k, v = draw(4, 2)
    cache = paged(k, v, LENGTHS, extra=0)
    want = attend(q, cache)
    tables = np.array(cache.block_tables)
    tables[0, :4] = JUNK
    cache = replace(cache, block_tables=jnp.asarray(tables), key_pages=jnp.nan_to_num(cache.key_pages))
    got = attend(q, replace(cache, value_pages=jnp.nan_to_num(cache.value_pages)))
    assert np.isfinite(got[0]).all()
    equal([x[1:] for x in got], [x[1:] for x in want])


def test_wild_lengths_and_offsets_read_nothing_outside():
    q, k, v = draw(4, 2)
    cache = paged(k, v, [300, 300, 300, 300])
    cache = replace(cache, key_pages=jnp.nan_to_num(cache.key_pages), value_pages=jnp.nan_to_num(cache.value_pages))
    wild = jnp.array([2147483647, -5, 305, -2147483648], jnp.int32)
    equal(attend(q, replace(cache, lengths=wild)), attend(q, replace(cache, lengths=jnp.int32([304, 0, 304, 0]))))
    packed = q.reshape(8, 4, 16)
    for cu in ([0, 2147483647, -3, 9, 4], [5, 1, 2, 3, -2147483648], [0, 8, 8, 8, 2147483647]):
        out, lse = attend(packed, cache, jnp.array(cu, jnp.int32))
        assert np.isfinite(out).all() and not np.isnan(lse).any()


# A sequence's bits


def test_bits_do_not_depend_on_neighbours_rows_pages_or_padding():
    """Alone, and among 1 to 300 neighbours in one pool, on any row, on any pages, packed or not, in wider tables."""
    q, k, v = draw(1, 3, 300, dtype="bfloat16")
    want = jax.tree.map(np.asarray, attend(q, paged(k, v, [277])))
    rng = np.random.default_rng(1)
    for B, row, S, page_size in ((2, 1, 640, 1), (301, 300, 290, 16), (3, 0, 512, 256)):
        shapes = ((B, m, *x.shape[2:]) for m, x in ((3, q), (S, k), (S, v)))
        qs, ks, vs = (9 * rng.standard_normal(shape).astype(q.dtype) for shape in shapes)
        lengths = rng.integers(0, S if B < 300 else 20, B).astype(np.int32)
        lengths[row], qs[row], ks[row, :277], vs[row, :277] = 277, q[0], k[0, :277], v[0, :277]
        cache = paged(ks, vs, lengths, page_size, seed=B)
        equal([x[row] for x in attend(qs, cache)], [x[0] for x in want])
        if B == 3:
            packed = attend(qs.reshape(9, 4, 16), cache, 3 * np.arange(4))
            equal([x[:3] for x in packed], [x[0] for x in want])


def test_a_shared_prefix_computed_once():
    """The cascade: all queries over the shared pages, each over its own, merged. Cut at a multiple of a split, its
    bits do not depend on who shares."""
    q, k, v = draw(3, 1, 300)
    k[:, :256], v[:, :256] = k[:1, :256], v[:1, :256]
    lengths = np.array([300, 257, 270], np.int32)
    cache = paged(k, v, lengths)
    shared_pages, own_pages = np.split(np.asarray(cache.block_tables), [16], axis=1)

    def cascade(rows):
        n = len(rows)
        prefix = replace(cache, block_tables=shared_pages[:1], lengths=np.int32([256]))
        own = replace(cache, block_tables=own_pages[rows], lengths=lengths[rows] - 256)
        shared = attend(q[rows, 0], prefix, np.array([0, n], np.int32), is_causal=False)
        return jattn.merge([x[:, None] for x in shared], attend(q[rows], own))

    hold(cascade([0, 1, 2]), problem(q, k, v, lengths))
    equal([x[2:] for x in cascade([0, 1, 2])], list(cascade([2])))


# append, copy_pages


def grown(steps, B=3, page_size=16, stored=None, packed=False, S=100):
    """A cache that `steps` of counts were appended to, and the tokens as contiguous arrays."""
    rng = np.random.default_rng(5)
    tables = jnp.asarray(rng.permutation(B * 7).reshape(B, 7).astype(np.int32))
    kind = {} if stored is None else dict(dtype=stored)
    cache = PagedCache.zeros(B * 7, page_size, 2, 16, 24, sequences=B, pages_per_sequence=7, **kind)
    cache = replace(cache, block_tables=tables)
    k, v = np.zeros((B, S, 2, 16), np.float32), np.zeros((B, S, 2, 24), np.float32)
    lengths, put = np.zeros(B, np.int32), jax.jit(append)
    for counts in steps:
        T = max(counts)
        new = [rng.standard_normal((B, T, 2, d)).astype(np.float32) for d in (16, 24)]
        for b, n in enumerate(counts):
            k[b, lengths[b] : lengths[b] + n], v[b, lengths[b] : lengths[b] + n] = (x[b, :n] for x in new)
        lengths += np.array(counts, np.int32)
        if packed:
            rows = [np.concatenate([x[b, :n] for b, n in enumerate(counts)] + [x[0, :1] * np.nan]) for x in new]
            cache = put(cache, *rows, np.concatenate([[0], np.cumsum(counts)]).astype(np.int32))
        else:
            cache = put(cache, *(caches.poisoned(x, counts) for x in new), seq_lengths=np.array(counts, np.int32))
    np.testing.assert_array_equal(cache.lengths, lengths)
    return cache, k, v


@pytest.mark.parametrize("packed", [False, True])
def test_append_puts_tokens_behind_each_sequence(packed):
    cache, k, v = grown([(17, 0, 40), (1, 1, 1), (0, 3, 33)], packed=packed)
    for x, got in zip((k, v), gather(cache), strict=True):
        np.testing.assert_array_equal(got[:, :100], x)
    touched = np.asarray(cache.block_tables)[[0, 0, 1, 2, 2, 2, 2, 2], [0, 1, 0, 0, 1, 2, 3, 4]]
    untouched = np.setdiff1d(np.arange(21), touched)
    assert not np.any(cache.key_pages[untouched]) and not np.any(cache.value_pages[untouched])


@pytest.mark.parametrize("stored", ["int8", "float8_e4m3fn"])
def test_append_rounds_for_a_quantised_cache(stored):
    cache, k, v = grown([(17, 0, 40), (1, 1, 1)], stored=stored)
    for x, got in zip((k, v), gather(cache), strict=True):
        want = jattn.quantize(jnp.asarray(x), stored)
        exists = np.arange(100) < np.asarray(cache.lengths)[:, None]
        np.testing.assert_array_equal(np.asarray(got.values)[:, :100], want.values)
        np.testing.assert_array_equal(np.asarray(got.scale)[:, :100][exists], np.asarray(want.scale)[exists])


@pytest.mark.parametrize("per, scale", [("head", np.float32([0.1, 0.02])), ("tensor", np.float32(0.05))])
def test_append_keeps_the_scale_of_a_head_or_a_tensor(per, scale):
    cache = PagedCache.zeros(4, 16, 2, 16, sequences=1, pages_per_sequence=4, dtype="int8", per=per, scale=scale)
    x = np.random.default_rng(0).standard_normal((1, 20, 2, 16)).astype(np.float32)
    cache = replace(cache, block_tables=jnp.int32([[2, 0, 1, 3]]))
    key, _ = gather(append(cache, x, x))
    np.testing.assert_array_equal(key.values[:, :20], jattn.quantize(x, scale=scale).values)
    np.testing.assert_array_equal(key.scale, scale)


def test_append_rotates_keys_by_their_positions():
    k = np.random.default_rng(0).standard_normal((2, 30, 2, 16)).astype(np.float32)
    want, _ = gather(append(paged(k[:, :0], k[:, :0], [0, 0], tables=np.int32([[0, 1], [2, 3]])), jattn.rope(k), k))
    cache = paged(k[:, :0], k[:, :0], [0, 0], tables=np.int32([[3, 1], [4, 0]]))
    cache = append(cache, k[:, :20], k[:, :20], seq_lengths=[20, 7], rotate=jattn.rope)
    rest = np.concatenate([k[0, 20:], k[1, 7:]])
    cache = append(cache, rest, rest, [0, 10, 33], rotate=jattn.rope)
    np.testing.assert_array_equal(gather(cache)[0], want)


def test_append_past_the_table_or_on_a_wild_id_writes_nothing():
    _, k, v = draw(2, 1, 40, K=2)
    cache = paged(k, v, [40, 10], 16, extra=2)
    before = np.array(cache.key_pages)
    x = np.ones((2, 12, 2, 16), np.float32)
    tables = np.array(cache.block_tables)
    for junk in (*JUNK, cache.num_pages):
        tables[1, :] = junk
        got = append(replace(cache, block_tables=jnp.asarray(tables)), x, x)
        np.testing.assert_array_equal(got.lengths, [48, 22])
        old, new = (np.nan_to_num(x, nan=7) for x in (before, np.asarray(got.key_pages)))
        changed = np.argwhere((new != old).any((2, 3)))
        np.testing.assert_array_equal(changed, [[tables[0, 2], s] for s in range(8, 16)])  # room for 8 of 12


def test_append_in_a_donated_cache_copies_nothing():
    cache = PagedCache.zeros(512, 16, 2, 64, sequences=2, pages_per_sequence=64)
    x = jnp.ones((2, 1, 2, 64), jnp.float32)
    compiled = jax.jit(append, donate_argnums=0).lower(cache, x, x).compile()
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= 2 * cache.key_pages.nbytes
    assert memory.temp_size_in_bytes < cache.key_pages.nbytes // 8


def test_copy_pages_is_copy_on_write():
    """A fork shares its pages until it writes; the copy has keys, values and scales."""
    for stored in (None, "int8"):
        cache, _, _ = grown([(17, 0, 40)], stored=stored)
        tables = np.array(cache.block_tables)
        fork, spare = tables[0].copy(), tables[1, 6]
        fork[1] = spare
        tables[1] = fork
        cache = jax.jit(copy_pages)(cache, np.array([tables[0, 1], -1, 3, 99]), np.array([spare, 5, -1, 6]))
        cache = replace(cache, block_tables=jnp.asarray(tables), lengths=jnp.int32([17, 17, 40]))
        key, value = jax.tree.map(np.asarray, gather(cache))
        jax.tree.map(lambda x: np.testing.assert_array_equal(x[0], x[1]), (key, value))
        x = np.ones((3, 1, 2, 16), np.float32), np.ones((3, 1, 2, 24), np.float32)
        after = append(cache, *x, seq_lengths=np.array([0, 1, 0], np.int32))
        jax.tree.map(
            lambda old, new: np.testing.assert_array_equal(new[[0, 2], :40], old[[0, 2], :40]), key, gather(after)[0]
        )


def test_copies_read_before_they_write():
    cache, _, _ = grown([(16, 16, 16)])
    keys = np.asarray(cache.key_pages)
    swapped = copy_pages(cache, [0, 1], [1, 0]).key_pages
    np.testing.assert_array_equal(swapped[:2], keys[[1, 0]])
    np.testing.assert_array_equal(swapped[2:], keys[2:])


# Composition


def test_a_decode_loop_is_one_scan():
    """Generation under one jit: every step appends and attends; it gives the bits of a prefill with all tokens."""
    rng = np.random.default_rng(8)
    q, k, v = draw(3, 40, 40)
    tables = jnp.asarray(rng.permutation(30)[:9].reshape(3, 3).astype(np.int32))
    start = replace(PagedCache.zeros(30, 16, 2, 16, sequences=3, pages_per_sequence=3), block_tables=tables)

    def step(cache, x):
        q, k, v = (x[:, None] for x in x)
        cache = append(cache, k, v)
        return cache, paged_attention(q, cache, return_residual=True)

    tokens = [np.swapaxes(x, 0, 1) for x in (q, k, v)]
    cache, (out, lse) = jax.jit(lambda c, x: jax.lax.scan(step, c, x))(start, tokens)
    np.testing.assert_array_equal(cache.lengths, 40)
    hold([np.swapaxes(x[:, :, 0], 0, 1) for x in (out, lse)], problem(q, k, v, [40, 40, 40]))


def test_64_bit_tables_and_lengths():
    q, k, v = draw(2, 3)
    n = np.array([300, 40])
    with jax.enable_x64(True):
        cache = paged(k, v, n)
        cache = replace(cache, block_tables=cache.block_tables.astype(np.int64), lengths=jnp.asarray(n))
        short = replace(cache, lengths=cache.lengths - 1)
        grown = append(short, *(np.stack([x[0, 299:], x[1, 39:40]]) for x in (k, v)))
        assert grown.lengths.dtype == grown.block_tables.dtype == np.int64
        hold(attend(q, grown), problem(q, k, v, n))
        copied = copy_pages(grown, np.array([1]), np.array([2]))
        assert gather(copied)[0].shape == (2, 304, 2, 16)
        wild = replace(short, block_tables=grown.block_tables.at[1].add(2**32))  # the same pages in 32 bits
        after = append(wild, *(x[:, 299:] for x in (k, v)), seq_lengths=[0, 1])
        np.testing.assert_array_equal(after.key_pages, short.key_pages)
        np.testing.assert_array_equal(copy_pages(short, [2**32], [1]).key_pages, short.key_pages)


def test_layers_may_be_stacked():
    """Caches of several layers in one pytree, one scan over them; vmap over caches."""
    q, k, v = draw(2, 1)
    layers = [paged(k * s, v, [300, 40]) for s in (1, 2)]
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *layers)
    want = jnp.stack([paged_attention(q, c) for c in layers])
    equal(jax.lax.scan(lambda c, layer: (c, paged_attention(q, layer)), 0, stacked)[1], want)
    assert jax.vmap(lambda c: paged_attention(q, c))(stacked).shape == want.shape


@pytest.mark.parametrize("mode", [AxisType.Auto, AxisType.Explicit])
def test_tensor_parallel_gathers_nothing(mode):
    """Key heads sharded over a mesh axis: append and attention under plain jit, and under shard_map."""
    q, k, v = draw(4, 2, N=8, K=4)
    new = q[..., :4, :]
    cache = paged(k, v, LENGTHS // 2)

    def step(q, new, cache):
        cache = append(cache, new, new)
        return paged_attention(q, cache), cache.key_pages

    want = step(q, new, cache)
    mesh = Mesh(np.array(jax.devices()[:4]), ("x",), axis_types=(mode,))
    heads, rest = P(None, None, "x", None), P()
    specs = PagedCache(heads, heads, rest, rest)
    if mode == AxisType.Auto:
        mapped = jax.shard_map(step, mesh=mesh, in_specs=(heads, heads, specs), out_specs=(heads, heads))
        equal(jax.jit(mapped)(q, new, cache)[0], want[0])
    place = functools.partial(jax.tree.map, lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec)))
    with jax.set_mesh(mesh):
        arguments = place((q, new, cache), (heads, heads, specs))
        compiled = jax.jit(step).lower(*arguments).compile()
        got = compiled(*arguments)
    text = compiled.as_text()
    assert not [word for word in ("all-gather", "all-to-all", "collective-permute", "all-reduce") if word in text]
    equal(got[0], want[0])


def test_a_pool_past_two_to_the_31_elements_lowers():
    pages = jax.ShapeDtypeStruct((2**20, 16, 8, 128), "bfloat16")
    cache = PagedCache(pages, pages, *(jax.ShapeDtypeStruct(s, "int32") for s in ((2, 8), (2,))))
    q, new = (jax.ShapeDtypeStruct((2, 1, n, 128), "bfloat16") for n in (16, 8))
    jax.jit(lambda q, c, x: paged_attention(q, append(c, x, x))).lower(q, cache, new)


def test_explain():
    q, k, v = draw(4, 2)
    told = jattn.explain(q, paged(k, v, LENGTHS), op="paged_attention")
    assert told.implementation == "xla" and (told.problem.page, told.problem.S, told.problem.B) == (16, 304, 4)


def test_nothing_at_all():
    """No sequence, no page, no table."""
    q, _, _ = draw(2, 1)
    for pages, sequences, width in ((0, 2, 3), (4, 2, 0), (4, 0, 3)):
        cache = PagedCache.zeros(pages, 16, 2, 16, sequences=sequences, pages_per_sequence=width)
        x = np.ones((sequences, 1, 2, 16), np.float32)
        cache = append(cache, x, x)
        out = paged_attention(q[:sequences], cache)
        assert out.shape == (sequences, 1, 4, 16) and not np.any(out)
        assert gather(cache)[0].shape == (sequences, width * 16, 2, 16)


@pytest.mark.parametrize(
    "lengths, tables, new, words",
    [
        ([300, -1], None, 0, r"lengths\[1\]=-1 must be in \[0, 304\]"),
        ([305, 40], None, 0, r"lengths\[0\]=305 must be in \[0, 304\]"),
        ([300, 40], None, [5, 1], r"lengths with new tokens\[0\]=305 must be in \[0, 304\]"),
        (None, (1, 2, 9999), 0, r"block_tables\[1, 2\]=9999 must be in \[0, 27\)"),
        (None, (1, 2, -1), 0, r"block_tables\[1, 2\]=-1 must be in \[0, 27\)"),
        (None, (1, 3, -1), [0, 9], r"block_tables\[1, 3\]=-1 must be in \[0, 27\)"),
    ],
)
def test_checks_turn_data_faults_into_errors(lengths, tables, new, words):
    _, k, v = draw(2, 1)
    cache = paged(k, v, [300, 40])
    jattn.debug.check_cache(cache)  # with junk where nothing is
    jattn.debug.check_cache(cache, new=[4, 8])
    if lengths:
        cache = replace(cache, lengths=jnp.int32(lengths))
    if tables:
        cache = replace(cache, block_tables=cache.block_tables.at[tables[:2]].set(tables[2]))
    with pytest.raises(ValueError, match=words):
        jattn.debug.check_cache(cache, new=new)
    with pytest.raises(jax.errors.JaxRuntimeError, match=words):
        jax.jit(lambda c: jattn.debug.check_cache(c, new=jnp.asarray(new, jnp.int32)))(cache)
        jax.effects_barrier()


Q, KEY, VALUE = draw(2, 2)
CACHE = paged(KEY, VALUE, [300, 40])
NEW = np.ones((2, 1, 2, 16), np.float32)
empty = functools.partial(
    PagedCache.zeros, num_pages=4, heads=2, head_dim=16, sequences=1, pages_per_sequence=1, page_size=16
)
CU = np.array([0, 2, 4], np.int32)


@pytest.mark.parametrize(
    "call, error, words",
    [
        (lambda: paged_attention(Q, KEY), TypeError, "cache must be a jattn.PagedCache, not ndarray"),
        (lambda: paged_attention(Q[:1], CACHE), ValueError, r"query has shape \(1, 2, 4, 16\); expected \["),
        (lambda: paged_attention(Q, CACHE, CU), ValueError, r"cu_seqlens_q has shape \(3,\) and query \(2, 2, 4, 16\)"),
        (lambda: paged_attention(Q[0], CACHE, CU[:2]), ValueError, r"cu_seqlens_q has shape \(2,\) .* expected \(3,\)"),
        (lambda: paged_attention(jnp.bfloat16(Q), CACHE), TypeError, "key dtype float32 must equal query's bfloat16"),
        (lambda: paged_attention(Q[0], CACHE, [0, 1, 2], mask=masks.tree([-1, 0])), NotImplementedError, "one rect"),
        (lambda: paged_attention(Q, CACHE, mask=masks.segments(np.arange(2), np.arange(304))), NotImplementedError,
         "indexed by the columns of key, which a cache does not have"),
        (lambda: empty(page_size=24), ValueError, "page_size=24 must be one of 1, 16, 32, 64"),
        (lambda: empty(dtype="int8", per="head"), ValueError, "per='head' needs the scale"),
        (lambda: paged_attention(Q, replace(CACHE, key_pages=CACHE.key_pages[:, :8])), ValueError, "value_pages has"),
        (lambda: paged_attention(Q, replace(CACHE, block_tables=CACHE.block_tables[0])), ValueError, r"expected \[B"),
        (lambda: paged_attention(Q, replace(CACHE, block_tables=np.ones((2, 3), np.float32))), TypeError,
         "block_tables must be integers, not float32"),
        (lambda: paged_attention(Q, replace(CACHE, lengths=CACHE.lengths[:1])), ValueError, "block_tables has 2 rows"),
        (lambda: append(CACHE, NEW[:1], NEW), ValueError, r"key has shape \(1, 1, 2, 16\); expected \[B, T"),
        (lambda: append(CACHE, NEW, NEW[:, :, :1]), ValueError, r"value has shape \(2, 1, 1, 16\); expected \("),
        (lambda: append(CACHE, jnp.bfloat16(NEW), NEW), TypeError, "key dtype bfloat16 must equal that of its"),
        (lambda: append(CACHE, NEW, NEW, rotate=lambda k, p: k[0]), ValueError, r"rotate returned float32\[1, 2, 16\]"),
        (lambda: append(CACHE, NEW[0], NEW[0], [0, 1]), ValueError, r"cu_seqlens has shape \(2,\) and key"),
        (lambda: append(CACHE, NEW, NEW, seq_lengths=[1, 2]), ValueError, r"seq_lengths=\[1, 2\] must be <= 1"),
        (lambda: copy_pages(CACHE, [0, 1], [2]), ValueError, r"target has shape \(1,\); source has \(2,\)"),
        (lambda: copy_pages(CACHE, np.float32([0.5]), [2]), TypeError, "source must be integers, not float32"),
        (lambda: copy_pages(CACHE, 1, 2), ValueError, r"source has shape \(\); expected \[n\] page ids"),
        (lambda: jax.grad(lambda q: paged_attention(q, CACHE).sum())(Q), NotImplementedError, "has no derivatives"),
    ],
)  # fmt: skip
def test_refused(call, error, words):
    with pytest.raises(error, match=words):
        call()

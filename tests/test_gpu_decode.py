"""The decode kernel on a GPU: `pytest -m gpu`."""

import functools

import caches
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_decode
from caches import draw, hold, problem

import jattn
from jattn import decode_attention, masks, mods, paged_attention

pytestmark = pytest.mark.gpu

STATIC = "is_causal", "local_window_size", "logits_soft_cap"
EDGES = np.array([0, 1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 511, 1000, 1023, 1024, 1025, 1088], np.int32)


@functools.partial(jax.jit, static_argnames=STATIC)
def attend_pages(q, cache, cu=None, **options):
    return paged_attention(q, cache, cu, return_residual=True, implementation="mosaic", **options)


@functools.partial(jax.jit, static_argnames=STATIC)
def attend(q, k, v, lengths, **options):
    return decode_attention(q, k, v, lengths, return_residual=True, implementation="mosaic", **options)


def equal(got, want):
    jax.tree.map(np.testing.assert_array_equal, got, want)


@pytest.mark.parametrize("page_size", [16, 32, 64, 128, 256])
@pytest.mark.parametrize(
    "N, K, T, H, D", [(4, 4, 1, 128, 128), (8, 2, 3, 64, 128), (8, 1, 8, 40, 24), (6, 2, 22, 128, 64)]
)
def test_every_edge_of_pages_blocks_and_splits(page_size, N, K, T, H, D):
    """Against the oracle, with NaN and Inf in what nobody owns; and the contiguous cache bit for bit."""
    q, k, v = draw(len(EDGES), T, 1088, N, K, H, D, dtype="bfloat16")
    want = attend(q, caches.poisoned(k, EDGES), caches.poisoned(v, EDGES), EDGES)
    hold(want, problem(q, k, v, EDGES))
    cache = caches.paged(k, v, EDGES, page_size, seed=page_size)
    equal(attend_pages(q, cache), want)
    equal(attend_pages(q, caches.paged(k, v, EDGES, page_size, seed=1)), want)
    pools = (jnp.where(jnp.isnan(x), jnp.inf, x).astype(x.dtype) for x in (cache.key_pages, cache.value_pages))
    equal(attend_pages(q, jattn.PagedCache(*pools, cache.block_tables, cache.lengths)), want)


SINKS = np.float32([1, -2, 0, 5, 40, -np.inf, -40, 2])
FEATURES = {
    "window": (dict(local_window_size=(40, 0)), lambda b, n, row, t, s: s >= t - 40, {}),
    "window ahead": (dict(local_window_size=(600, -2)), lambda b, n, row, t, s: (s <= t - 2) & (s >= t - 600), {}),
    "not causal": (dict(is_causal=False), None, dict(causal=False)),
    "soft cap, traced scale": (
        dict(logits_soft_cap=5.0, scale=np.float32(0.4)), None, dict(soft_cap=5.0, scale=0.4),
    ),
    "negative scale": (dict(scale=-0.1), None, dict(scale=-0.1)),
    "sinks": (dict(sinks=SINKS), None, dict(sinks=SINKS)),
}  # fmt: skip


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", FEATURES)
def test_every_feature(name, dtype):
    options, rule, more = FEATURES[name]
    lengths, counts = np.array([1100, 1025, 3, 0], np.int32), np.array([7, 3, 7, 7], np.int32)
    q, k, v = draw(4, 7, 1100, 8, 2, 64, dtype=dtype)
    p = problem(q, k, v, lengths, rule, query_lengths=counts, **more)
    q = caches.poisoned(q, counts)
    hold(attend(q, k, v, lengths, query_seq_lengths=counts, **options), p)
    hold(attend_pages(q, caches.paged(k, v, lengths, 32), query_seq_lengths=counts, **options), p)


RULES = ("tree", "prefix or window", "predicate")
MASKED = {name: test_decode.FEATURES[name] for name in RULES} | {
    "prefix and lengths": (
        dict(mask=masks.prefix(np.int32([9, 0, 3, 700])) & masks.lengths(np.int32([1050, 1, 2, 0])), is_causal=False),
        lambda b, n, row, t, s: ((s <= t) | (s < np.array([9, 0, 3, 700])[b])) & (s < np.array([1050, 1, 2, 0])[b]),
        dict(causal=False),
    ),
}  # fmt: skip
LENGTHS = np.array([1100, 1025, 3, 0], np.int32)


@pytest.mark.parametrize("H, D", [(64, 64), (128, 256)])
@pytest.mark.parametrize("name", MASKED)
def test_every_mask(name, H, D):
    options, rule, more = MASKED[name]
    q, k, v = draw(4, 7, 1100, 4, 2, H, D, dtype="bfloat16")
    p = problem(q, k, v, LENGTHS, rule, **more)
    hold(attend(q, k, v, LENGTHS, **options), p)
    hold(attend_pages(q, caches.paged(k, v, LENGTHS, 64), **options), p)


@pytest.mark.parametrize("H, soft_cap", [(64, 5.0), (256, None)])
def test_modifiers_count_positions_and_sequences(H, soft_cap):
    q, k, v = draw(4, 7, 1100, 4, 2, H, dtype="bfloat16")
    gain = test_decode.GAIN
    p = problem(q, k, v, LENGTHS, score_mod=test_decode.GAINED, aux=(gain,), soft_cap=soft_cap)
    options = dict(score_mod=mods.score_mod(test_decode.gained, gain), logits_soft_cap=soft_cap)
    hold(attend(q, k, v, LENGTHS, **options), p, test_decode.gained)
    hold(attend_pages(q, caches.paged(k, v, LENGTHS, 16), **options), p, test_decode.gained)


@pytest.mark.parametrize("H, D", [(256, 256), (192, 128), (136, 40), (64, 200)])
@pytest.mark.parametrize("T, dtype", [(1, "bfloat16"), (16, "float16")])
def test_wide_heads(H, D, T, dtype):
    q, k, v = draw(len(EDGES), T, 1088, 8, 2, H, D, dtype=dtype)
    want = attend(q, caches.poisoned(k, EDGES), caches.poisoned(v, EDGES), EDGES)
    hold(want, problem(q, k, v, EDGES))
    equal(attend_pages(q, caches.paged(k, v, EDGES, 32)), want)


@pytest.mark.parametrize("S", [300, 3000])
def test_chunked_prefill_beside_decoding(S):
    """Any number of queries a sequence, packed: a chunk, one token, none, a whole prompt, holes, and rows of nobody."""
    _, k, v = draw(6, 1, S, 8, 2, 128, dtype="bfloat16")
    lengths, cu = np.array([S, S - 37, 0, 129, 7, 90], np.int32), np.array([0, 70, 71, 71, 200, 207, 230], np.int32)
    used = np.array([70, 1, 0, 129, 7, 20], np.int32)
    q = draw(1, 240, S, 8, 2, 128, dtype="bfloat16")[0][0]
    q[227:] = np.nan
    got = attend_pages(q, caches.paged(k, v, lengths, 32), cu, query_seq_lengths=used, sinks=SINKS)
    for m in (0, 1, 3, 4, 5):
        rows = slice(int(cu[m]), int(cu[m] + used[m]))
        p = problem(q[None, rows], *(x[m : m + 1] for x in (k, v, lengths)), sinks=SINKS)
        hold([x[None, rows] for x in got], p)
    assert not np.any(got[0][227:]) and np.isneginf(got[1][227:]).all()
    for m in (0, 1, 3, 4, 5):  # the bits of a sequence do not know the others
        rows = slice(int(cu[m]), int(cu[m] + used[m]))
        cache = caches.paged(*(x[m : m + 1] for x in (k, v, lengths)), 32, seed=m)
        equal(attend_pages(q[rows], cache, np.int32([0, used[m]]), sinks=SINKS), tuple(x[rows] for x in got))


@pytest.mark.parametrize("S", [1024, 2048])
def test_chunks_of_a_prompt_are_the_prompt(S):
    q, k, v = draw(1, S, S, 8, 2, 128, dtype="bfloat16")
    cache = caches.paged(k, v, [S], 64)
    whole = attend_pages(q, cache)
    starts = range(0, S, 256)
    parts = [attend_pages(q[:, i : i + 256], caches.replace(cache, lengths=jnp.int32([i + 256]))) for i in starts]
    equal([jnp.concatenate(x, axis=1) for x in zip(*parts, strict=True)], list(whole))
    hold(whole, problem(q, k, v, [S]))


def test_a_chain_is_causal_bit_for_bit():
    q, k, v = draw(4, 5, 1100, 8, 2, 128, dtype="bfloat16")
    cache = caches.paged(k, v, LENGTHS)
    equal(attend_pages(q, cache, mask=masks.tree(np.arange(-1, 4))), attend_pages(q, cache))


def test_wild_lengths_offsets_and_ids_read_nothing_outside():
    q, k, v = draw(4, 2, 320, 4, 2, 64, dtype="bfloat16")
    cache = caches.paged(np.nan_to_num(k), np.nan_to_num(v), [320] * 4, extra=0)
    wild = jnp.array([2147483647, -5, 325, -2147483648], jnp.int32)
    found = attend_pages(q, caches.replace(cache, lengths=wild))
    equal(found, attend_pages(q, caches.replace(cache, lengths=jnp.int32([320, 0, 320, 0]))))
    packed = q.reshape(8, 4, 64)
    for cu in ([0, 2147483647, -3, 9, 4], [5, 1, 2, 3, -2147483648], [0, 8, 8, 8, 2147483647]):
        out, lse = attend_pages(packed, cache, jnp.array(cu, jnp.int32))
        assert np.isfinite(out).all() and not np.isnan(lse).any()
    tables = np.array(cache.block_tables)
    want = attend_pages(q, cache)
    tables[0, :4] = caches.JUNK
    got = attend_pages(q, caches.replace(cache, block_tables=jnp.asarray(tables)))
    assert np.isfinite(got[0]).all()
    equal([x[1:] for x in got], [x[1:] for x in want])


def test_repeats_are_bit_equal():
    q, k, v = draw(16, 1, 4096, 32, 8, 128, dtype="bfloat16")
    lengths = np.random.default_rng(0).integers(0, 4097, 16).astype(np.int32)
    operands = jax.device_put((q, k, v, lengths))
    want = attend(*operands)
    for _ in range(100):
        assert all(bool(jnp.array_equal(a, b)) for a, b in zip(attend(*operands), want, strict=True))


@pytest.mark.parametrize("window", [None, (300, 0)])
def test_bits_do_not_depend_on_neighbours_row_capacity_or_padding(window):
    q, k, v = draw(1, 3, 1300, 8, 2, 128, dtype="bfloat16")
    want = attend(q, k, v, np.array([1277], np.int32), local_window_size=window)
    rng = np.random.default_rng(1)
    for B, row, S, T in ((1, 0, 5000, 3), (2, 1, 2048, 3), (301, 300, 1301, 3), (3, 1, 1408, 16)):
        shapes = ((B, m, *x.shape[2:]) for m, x in ((T, q), (S, k), (S, v)))
        qs, ks, vs = (9 * rng.standard_normal(shape, np.float32).astype(q.dtype) for shape in shapes)
        lengths, counts = rng.integers(0, S, B).astype(np.int32), np.full(B, T, np.int32)
        lengths[row], counts[row] = 1277, 3
        qs[row, :3], ks[row, :1277], vs[row, :1277] = q[0], k[0, :1277], v[0, :1277]
        options = dict(query_seq_lengths=counts) if T != 3 else {}
        out, lse = attend(qs, ks, vs, lengths, local_window_size=window, **options)
        np.testing.assert_array_equal(out[row, :3], want[0][0], err_msg=f"{B=} {row=} {S=} {T=}")
        np.testing.assert_array_equal(lse[row, :3], want[1][0], err_msg=f"{B=} {row=} {S=} {T=}")


def test_denormal_sums_do_not_depend_on_how_many_queries_there_are():
    """Scores that rise block by block rescale sums of tiny values, in tiles of at most 8 rows (T = 2) and of more."""
    q, k, v = draw(2, 3, 1301, 8, 2, 128, dtype="bfloat16")
    k = (k + np.linspace(0, 8, 1301)[:, None, None]).astype(k.dtype)
    q, v = np.abs(q), np.ldexp(v.astype(np.float32), -125).astype(v.dtype)
    want = attend(q, k, v, np.int32([1301, 641]))
    assert np.any((0 < np.abs(np.float32(want[0]))) & (np.abs(np.float32(want[0])) < 2.0**-126))
    equal(attend(q[:, :2], k, v, np.int32([1300, 640])), jax.tree.map(lambda x: x[:, :2], want))


@pytest.mark.parametrize("graphs", ["", "FUSION,CUSTOM_CALL,WHILE"], ids=["launches", "graphs"])
def test_a_decode_loop_is_one_program(graphs):
    """Six tokens appended and attended to in a scan, across the end of a split; replayed, and as CUDA graphs."""
    start, steps = np.array([1021, 5], np.int32), 6
    q, k, v = draw(2, steps, 1040, 8, 2, 64, dtype="bfloat16")
    cache = caches.paged(k, v, start, 16, tables=np.arange(132, dtype=np.int32).reshape(2, 66))
    pools = (jnp.zeros((132, *x.shape[1:]), x.dtype).at[: len(x)].set(x) for x in (cache.key_pages, cache.value_pages))
    cache = jattn.PagedCache(*pools, cache.block_tables, cache.lengths)
    new = [np.stack([x[b, n : n + steps] for b, n in enumerate(start)]) for x in (k, v)]
    tokens = [jnp.asarray(np.swapaxes(x, 0, 1)[:, :, None]) for x in (q, *new)]

    def step(cache, token):
        q, k, v = token
        cache = jattn.append(cache, k, v)
        return cache, attend_pages(q, cache)

    options = dict(xla_gpu_enable_command_buffer=graphs, xla_gpu_graph_min_graph_size=1)
    loop = jax.jit(lambda cache, *tokens: jax.lax.scan(step, cache, tokens)).lower(cache, *tokens)
    loop = loop.compile(compiler_options=options)
    found = loop(cache, *tokens)[1]
    for i in range(steps):
        cache, want = step(cache, [x[i] for x in tokens])
        equal(jax.tree.map(lambda x, i=i: x[i], found), want)
        hold(want, problem(q[:, i : i + 1], k, v, start + i + 1))
    cache = jattn.PagedCache(cache.key_pages, cache.value_pages, cache.block_tables, jnp.asarray(start))
    for _ in range(3):
        equal(loop(cache, *tokens)[1], found)


def test_past_two_to_the_31_elements():
    """The last page of a pool whose elements 32 bits cannot count."""
    q, k, v = draw(1, 1, 64, 4, 1, 128, dtype="bfloat16")
    pages = 2**31 // (64 * 128) + 8
    pools = [jnp.zeros((pages, 64, 1, 128), "bfloat16").at[-1].set(x[0]) for x in (k, v)]
    cache = jattn.PagedCache(*pools, jnp.int32([[pages - 1, 0]]), jnp.int32([64]))
    hold(attend_pages(q, cache), problem(q, k, v, [64]))

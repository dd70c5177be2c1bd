"""The Hopper kernel over int8 and fp8 caches: emulated on small problems, compiled for an H200, and on a GPU."""

import dataclasses
import functools

import aot
import caches
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import test_decode
from barriers import MBarrier, Memory, Simulation
from caches import draw, hold, problem
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from test_gpu_decode import EDGES, LENGTHS, MASKED, attend, attend_pages, equal
from test_hopper_decode import GATHERS, SEES, _of_sequence, emulated, placed
from test_hopper_decode import stand_in as stand_in
from test_hopper_ptx import BF16, HOW, copy_in, f32, normal, run, slab_memory, store

import jattn
from jattn import decode, masks, mods, paged, paged_attention
from jattn.pallas import decode as mosaic
from jattn.pallas._compat import pl, plgpu
from jattn.pallas.hopper import decode_quantised, mma, ptx
from jattn.pallas.hopper.decode_plan import Plan

INT8, FP8 = "int8", "float8_e4m3fn"


def quantised(x, dtype, per):
    return jattn.quantize(jnp.asarray(x, jnp.float32), dtype, per=per)


def poisoned(x, lengths):
    """With NaN, or the largest integer, at and past each length, in scales too."""
    scale = caches.poisoned(x.scale, lengths) if x.per == "token" else x.scale
    return jattn.Quantized(caches.poisoned(x.values, lengths), scale)


# Emulated


def test_pages_in_any_order(capfd):
    """Scales of a token and of a head, two formats, and NaN or the largest integer wherever no token is."""
    lengths = np.array([130, 1, 0, 64], np.int32)
    q, k, v = draw(4, 2, 140, 4, 2, 48, 32, dtype="bfloat16")
    k, v = quantised(k, INT8, "token"), quantised(v, FP8, "head")
    p = problem(q, *map(caches.dequantized, (k, v)), lengths)
    hold(emulated(paged.prepare(q, caches.paged(k, v, lengths, 16)), capfd), p)


def test_contiguous_with_window_cap_sinks_and_missing_queries(capfd):
    """Two tiles of 5 tokens of 3 heads, the second with one token or none."""
    lengths, counts = np.array([130, 17], np.int32), np.array([6, 1], np.int32)
    sinks = np.float32([1, -np.inf, 40])
    q, k, v = draw(2, 6, 140, 3, 1, 16, 80, dtype="bfloat16")
    k, v = quantised(k, FP8, "tensor"), quantised(v, INT8, "token")
    rule = lambda b, n, row, t, s: s >= t - 20  # noqa: E731
    more = dict(query_lengths=counts, scale=0.4, soft_cap=5.0, sinks=sinks)
    p = problem(q, *map(caches.dequantized, (k, v)), lengths, rule, **more)
    call = decode.prepare(
        caches.poisoned(q, counts), poisoned(k, lengths), poisoned(v, lengths), lengths, query_seq_lengths=counts,
        local_window_size=(20, None), logits_soft_cap=5.0, scale=jnp.float32(0.4), sinks=sinks,
    )  # fmt: skip
    hold(emulated(call, capfd), p)


def test_packed_queries_of_a_modifier(capfd):
    """A chunk of two tiles with a hole behind it, one token, none, and rows of nobody."""
    lengths, cu, used = np.array([100, 70, 9], np.int32), np.array([1, 22, 23, 23], np.int32), np.int32([18, 1, 0])
    _, k, v = draw(3, 1, 110, 4, 2, 16, dtype="bfloat16")
    q = draw(1, 25, 110, 4, 2, 16, dtype="bfloat16")[0][0]
    k, v = quantised(k, INT8, "head"), quantised(v, FP8, "token")
    gain = test_decode.GAIN
    mod = mods.score_mod(test_decode.gained, gain)
    call = paged.prepare(
        q, caches.paged(k, v, lengths, 16), cu, query_seq_lengths=used, score_mod=mod, logits_soft_cap=9.0
    )
    out, lse = emulated(call, capfd)
    for m, rows in ((0, slice(1, 19)), (1, slice(22, 23))):
        one = (x[m : m + 1] for x in (*map(caches.dequantized, (k, v)), lengths))
        truth = oracle.ScoreMod(lambda x, b, n, t, s, g, m=m: x * g + 0.01 * (t - s) - 0.1 * m, None)
        p = problem(q[None, rows], *one, score_mod=truth, aux=(gain,), soft_cap=9.0)
        hold((out[None, rows], lse[None, rows]), p, functools.partial(_of_sequence, m))
    nobody = np.r_[0, 19:22, 23:25]
    assert not np.any(out[nobody]) and np.isneginf(lse[nobody]).all()


def test_wide_heads_of_a_prefix_and_of_lengths(capfd):
    lengths, limit = np.array([70, 20], np.int32), np.array([60, 20], np.int32)
    q, k, v = draw(2, 3, 70, 2, 1, 144, 208, dtype="bfloat16")
    k, v = quantised(k, FP8, "token"), quantised(v, INT8, "tensor")
    mask = masks.prefix(jnp.int32([9, 18])) & masks.lengths(limit)
    seen = lambda b, n, row, t, s: ((s <= t) | (s < np.array([9, 18])[b])) & (s < limit[b])  # noqa: E731
    p = problem(q, *map(caches.dequantized, (k, v)), lengths, seen, causal=False)
    hold(emulated(decode.prepare(q, k, v, lengths, mask, is_causal=False), capfd), p)


# The barriers


def simulate(blocks, seed, *, stages, early_scales=False, one_barrier=False):
    """One stream over an item's blocks: copies land by themselves, the producer stores scales."""
    sim = Simulation(seed)
    kv, scales = Memory(sim, "kv"), Memory(sim, "scales")
    copied, scaled, free = ([MBarrier(1) for _ in range(stages)] for _ in range(3))

    def land(slot, i):
        kv.write(slot, i)
        copied[slot].arrive()

    def producer():
        for i in range(blocks):
            slot = i % stages
            if early_scales:
                scales.write(slot, i)
            if i >= stages:
                yield free[slot].wait("producer")
            sim.later(lambda slot=slot, i=i: land(slot, i))
            yield None
            if not early_scales:
                scales.write(slot, i)
            scaled[slot].arrive()
        for i in range(max(blocks - stages, 0), blocks):
            yield free[i % stages].wait("producer")

    def consumer():
        for i in range(blocks):
            slot = i % stages
            yield copied[slot].wait("consumer")
            if not one_barrier:
                yield scaled[slot].wait("consumer")
            for memory in (kv, scales, kv, scales):
                memory.begin(slot, i)
                yield None
                memory.end(slot)
            free[slot].arrive()

    sim.start(producer())
    sim.start(consumer())
    return sim.run()


@pytest.mark.parametrize("stages", [2, 5])
def test_no_hazard_and_no_deadlock(stages):
    for seed in range(100):
        assert simulate(seed % 13, seed, stages=stages) == "ok", seed


@pytest.mark.parametrize("mistake", ["early_scales", "one_barrier"])
def test_the_simulation_sees_scales_of_another_block(mistake):
    assert any("scales" in simulate(9, seed, stages=2, **{mistake: True}) for seed in range(200))


# The wrappers


def some_bytes(dtype, width):
    """All 256 of them, several times, in any order; NaN only at key 5, channel 3."""
    x = np.random.default_rng(0).permutation(64 * width).astype(np.uint8).reshape(64, width)
    if dtype == FP8:
        x = np.where(x & 127 == 127, 0, x).astype(np.uint8)
        x[5, 3] = 127
    return jnp.asarray(x.view(jnp.dtype(dtype)))


@pytest.mark.parametrize("interpret", HOW)
@pytest.mark.parametrize("dtype, width, queries", [(INT8, 16, 8), (FP8, 48, 16), (INT8, 128, 32), (FP8, 128, 8)])
def test_products_and_the_merge_of_warps(interpret, dtype, width, queries):
    """Scores of each key and query; and weighted sums of values, of rows that go to tokens of 3 heads, under equal
    states of all warps."""
    k, q, w = some_bytes(dtype, width), normal(32, width), normal(64, queries, dtype=jnp.float32, seed=1)
    rows = queries - 4

    def body(k, q, w, s_out, o_out, lse_out, *, raw, q_smem, states, parts, barrier):
        zero = jnp.minimum(jax.lax.axis_index("block"), 0)
        plgpu.copy_gmem_to_smem(k.at[:, pl.ds(zero, 128)], raw.at[0, 0], barrier)
        copy_in(q, q_smem, barrier, queries)
        plgpu.barrier_wait(barrier)
        operand = q_smem.at[0] if queries == 32 else mma.load_queries(q_smem.at[0], width)
        store(s_out, mma.product(raw.at[0], width, operand, queries))
        weights = w[...] if interpret else plgpu.load(w, layout=ptx.WGMMA, optimized=False)
        accumulator, state = mma.init(width, queries)
        _, alpha, state = mma.online_softmax(ptx.zeros(queries), state)
        accumulator = mma.accumulate(accumulator, alpha, weights, raw.at[0], width)
        mma.st_states(state, states)
        plgpu.commit_smem()
        for tile in range(queries // 8):
            mma.st_part(accumulator, tile, width, states, parts, 32.0)
            plgpu.commit_smem()
            mma.st_global_parts(parts, o_out, (zero, zero, zero), zero + rows, tile=tile)
            plgpu.commit_smem()
        mma.st_global_lse(states, lse_out, (zero, zero, zero), zero + rows)

    tokens = queries // 3
    s, o, lse = run(
        body, (f32(64, queries), f32(1, tokens, 1, 3, width), f32(1, tokens, 1, 3)), (k, q, w), interpret,
        raw=plgpu.SMEM((1, 1, 64, 128), k.dtype, transforms=ptx.TRANSFORMS), q_smem=slab_memory(queries, width),
        states=plgpu.SMEM((2, 4, queries), jnp.float32), parts=plgpu.SMEM((4, 8, width + mma.PADDING), jnp.float32),
        barrier=plgpu.Barrier(num_arrivals=1 + ptx.slabs(width)),
    )  # fmt: skip
    k, q, w = (np.asarray(x).astype(np.float64) for x in (k, q[:queries], w.astype(BF16)))
    for got, a, b in ((s, k, q.T), (o.reshape(-1, width)[:rows].T / 0.5, k.T, w[:, :rows])):
        seen = ~np.isnan(a).any(axis=1)
        assert np.isnan(got[~seen]).all() and (~seen).sum() == (dtype == FP8)
        np.testing.assert_array_less(np.abs(got - a @ b)[seen], (2e-6 * abs(a) @ abs(b) + 1e-9)[seen])
    np.testing.assert_allclose(lse.reshape(-1)[:rows], np.log(64), rtol=1e-6)


@pytest.mark.parametrize("interpret", HOW)
@pytest.mark.parametrize("paged", [False, True])
def test_scales_of_tokens_reach_their_block(interpret, paged):
    """Of keys 64 to 127 of a sequence, seen from 70 to 120; the last page of the table is wild."""
    scales = jnp.asarray(np.random.default_rng(0).uniform(1, 2, (2, 2, 120, 3)), jnp.float32)
    tables = jnp.int32([[9, 9, 9, 9, 9, 9, 9, 9], [0, 1, 2, 3, 11, 8, 5, 99]])
    pool = scales.reshape(2, 15, 16, 3) if paged else scales

    def body(keys, values, tables, out, *, smem):
        zero = jax.lax.axis_index("block")
        pages = decode_quantised.ld_pages(tables, keys.shape, zero + 1, zero + 64) if paged else None
        place = zero + 1, zero + 2, zero + 64, zero + 70, zero + 120
        decode_quantised.st_scales(decode_quantised.ld_scales(keys, values, pages, *place), smem.at[0])
        plgpu.commit_smem()
        ones = plgpu.layout_cast(jnp.full((64, 8), 1, jnp.float32), ptx.WGMMA)
        for half in range(2):
            out[half] = decode_quantised._scaled(ones, smem.at[0, half])

    out = run(body, f32(2, 64, 8), (*pool, tables), interpret, smem=plgpu.SMEM((1, 2, 64), jnp.float32))
    key = np.arange(64, 128)
    places = (np.array([11, 8, 5, 14])[key // 16 - 4], key % 16) if paged else (1, np.minimum(key, 119))
    for half in range(2):
        want = np.where((key >= 70) & (key < 120), np.asarray(pool[half])[(*places, 2)], 0)
        np.testing.assert_array_equal(out[half], np.broadcast_to(want[:, None], (64, 8)))


# Which calls it runs

Q, KEY, VALUE = draw(2, 1, 40, dtype="bfloat16")
REFUSED = {
    "bfloat16 over int8 and bfloat16": lambda: decode.prepare(Q, jattn.quantize(KEY), VALUE),
    "float16 over int8": lambda: decode.prepare(Q.astype("float16"), *map(jattn.quantize, (KEY, VALUE))),
    "multiples of 16, not H=24": lambda: decode.prepare(
        draw(2, 1, 40, H=24, dtype="bfloat16")[0], *map(jattn.quantize, draw(2, 1, 40, H=24)[1:])
    ),
    "at most 32 query heads for a key head of a quantised cache, not N/K=33": lambda: decode.prepare(
        draw(2, 1, 40, 33, 1, dtype="bfloat16")[0], *map(jattn.quantize, draw(2, 1, 40, 33, 1)[1:])
    ),
}


@pytest.mark.parametrize("words", REFUSED)
def test_refusals_name_their_reason(words):
    assert words in mosaic.why_not(REFUSED[words]().problem)


@pytest.mark.parametrize("T, rows, tokens", [(1, 8, 1), (2, 8, 2), (4, 16, 4), (5, 32, 5), (8, 32, 8), (16, 32, 8)])
def test_a_tile_has_the_fewest_rows_that_it_fills(T, rows, tokens):
    call = empty_call(T=T, N=8, K=2)
    plan = Plan(
        B=1, T=T, S=64, N=8, K=2, H=128, D=128, pages=1, page=None, dtype=jnp.dtype("bfloat16"), scale=1.0, left=None,
        right=0, soft_cap=None, config=mosaic.choose(call.problem, None), scales=("token", "token"),
    )  # fmt: skip
    assert (plan.tile_rows, plan.tokens) == (rows, tokens) and plan.stages >= 4


# On several devices


@pytest.mark.parametrize("per", ["token", "head"])
def test_scales_stay_with_their_heads(stand_in, per):
    """Four devices with two key heads cut by heads and sequences; and four by query heads, each with all pages."""
    q, k, v = draw(4, 2, 60, 8, 2, dtype="bfloat16")
    lengths = np.array([60, 1, 0, 33], np.int32)
    k, v = quantised(k, INT8, per), quantised(v, FP8, per)
    cache = caches.paged(k, v, lengths)
    attend = functools.partial(paged_attention, implementation="mosaic", return_residual=True)
    want = jax.jit(attend)(q, cache)
    hold(want, problem(q, *map(caches.dequantized, (k, v)), lengths))
    scale = P(None, None, "y") if per == "token" else P("y")
    for shape, query, pages, scales, rows in (
        ((2, 2), P("x", None, "y"), P(None, None, "y"), scale, P("x")), ((1, 4), P(None, None, "y"), P(), P(), P()),
    ):  # fmt: skip
        mesh = Mesh(np.array(jax.devices()[:4]).reshape(shape), ("x", "y"))
        stored = jattn.Quantized(pages, scales)
        operands = placed((q, cache), mesh, (query, jattn.PagedCache(stored, stored, rows, rows)))
        compiled = jax.jit(attend).lower(*operands).compile()
        assert not GATHERS.search(compiled.as_text())
        got = compiled(*operands)
        assert got[0].sharding.is_equivalent_to(NamedSharding(mesh, query), 4)
        hold(jax.tree.map(np.asarray, got), problem(q, *map(caches.dequantized, (k, v)), lengths))


# Compiled without a GPU

SHAPES = dict(tensor=lambda shape: (), head=lambda shape: shape[2:3], token=lambda shape: shape[:3])


def empty_call(page=None, B=3, T=1, S=1100, N=8, K=2, H=128, D=None, stored=((INT8, "token"),) * 2, cu=None, **options):
    def keys(width, stored):
        shape = (B, S, K, width) if page is None else (B * -(-S // page), page, K, width)
        return jattn.Quantized(jnp.zeros(shape, stored[0]), jnp.zeros(SHAPES[stored[1]](shape), jnp.float32))

    q, lengths = jnp.zeros((B, T, N, H) if cu is None else (T, N, H), BF16), jnp.full(B, S, jnp.int32)
    k, v = keys(H, stored[0]), keys(D or H, stored[1])
    if page is None:
        return decode.prepare(q, k, v, lengths, **options)
    tables = jnp.zeros((B, -(-S // page)), jnp.int32)
    return paged.prepare(q, jattn.PagedCache(k, v, tables, lengths), cu, **options)


COMPILED = {
    **{
        f"{dtype}, {H}, {D}, {T} tokens": dict(H=H, D=D, T=T, stored=((dtype, "token"),) * 2, page=page)
        for dtype, H, D, T, page in (
            (INT8, 128, 128, 1, 16), (FP8, 128, 128, 4, 64), (INT8, 128, 128, 16, None), (FP8, 128, 128, 16, 16),
            (INT8, 64, 64, 16, 64), (FP8, 128, 64, 1, None),
        )
    },
    "benchmarked": dict(B=64, S=8192, N=32, K=8),
    "int8 and fp8, narrow": dict(page=64, T=3, H=64, D=48, stored=((INT8, "tensor"), (FP8, "token"))),
    "fp8, window, cap, sinks": dict(
        page=32, T=5, H=96, local_window_size=(100, 3), logits_soft_cap=20.0, scale=jnp.float32(0.3),
        query_seq_lengths=jnp.int32([5, 1, 0]), sinks=jnp.zeros(8), stored=((FP8, "head"), (INT8, "head")),
    ),
    "int8, window, cap, many tokens": dict(
        page=16, T=16, N=32, local_window_size=(100, 3), logits_soft_cap=3.0, query_seq_lengths=jnp.int32([5, 1, 0])
    ),
    "tree": dict(page=64, T=8, mask=masks.tree(np.arange(-1, 7))),
    "modifier": dict(page=16, T=3, score_mod=mods.alibi(8), logits_soft_cap=10.0),
    "predicate of heads": dict(mask=masks.predicate(SEES, np.arange(8, dtype=np.int32).reshape(1, 8, 1, 1))),
    "packed": dict(page=16, T=300, cu=jnp.int32([0, 1, 270, 300])),
    "wide": dict(page=64, H=256),
    "wide, tokens": dict(page=64, H=192, D=256, T=16, stored=((FP8, "token"), (INT8, "head"))),
    "many heads": dict(N=32, K=1, T=2, stored=((FP8, "head"), (FP8, "token"))),
}  # fmt: skip


@pytest.mark.aot
@pytest.mark.parametrize("name", COMPILED)
def test_compiles_for_an_h200(name):
    call = empty_call(**COMPILED[name])
    assert mosaic.why_not(call.problem) is None
    options = dataclasses.replace(call.options, config=mosaic.choose(call.problem, None))
    leaves, structure = jax.tree.flatten(call.arrays)
    found = aot.compile_for_h200(lambda *leaves: mosaic.forward(structure.unflatten(leaves), options), *leaves)
    assert found.clean, found


# On a GPU

ON_GPU = {
    "int8 a token": ((INT8, "token"), (INT8, "token"), 128, 128, 1),
    "fp8 a token": ((FP8, "token"), (FP8, "token"), 64, 128, 3),
    "int8 a head": ((INT8, "head"), (INT8, "head"), 128, 128, 16),
    "fp8 and int8, head and tensor": ((FP8, "head"), (INT8, "tensor"), 80, 48, 2),
    "int8 and fp8, tensor and token": ((INT8, "tensor"), (FP8, "token"), 128, 16, 7),
}


@pytest.mark.gpu
@pytest.mark.parametrize("page_size", [16, 64, 256])
@pytest.mark.parametrize("name", ON_GPU)
def test_every_edge_of_pages_blocks_and_splits(name, page_size):
    """Against the oracle over the dequantised cache; and pages are the contiguous cache bit for bit, repeatedly."""
    key, value, H, D, T = ON_GPU[name]
    q, k, v = draw(len(EDGES), T, 1088, 8, 2, H, D, dtype="bfloat16")
    k, v = quantised(k, *key), quantised(v, *value)
    want = attend(q, poisoned(k, EDGES), poisoned(v, EDGES), EDGES)
    hold(want, problem(q, *map(caches.dequantized, (k, v)), EDGES))
    cache = caches.paged(k, v, EDGES, page_size, seed=page_size)
    for _ in range(20):
        equal(attend_pages(q, cache), want)


@pytest.mark.gpu
@pytest.mark.parametrize("name", MASKED)
def test_every_mask(name):
    options, rule, more = MASKED[name]
    q, k, v = draw(4, 7, 1100, 4, 2, 128, 64, dtype="bfloat16")
    k, v = quantised(k, INT8, "token"), quantised(v, FP8, "head")
    p = problem(q, *map(caches.dequantized, (k, v)), LENGTHS, rule, **more)
    hold(attend(q, k, v, LENGTHS, **options), p)
    hold(attend_pages(q, caches.paged(k, v, LENGTHS, 64), **options), p)


@pytest.mark.gpu
def test_modifiers_count_positions_and_sequences():
    q, k, v = draw(4, 7, 1100, 4, 2, 64, dtype="bfloat16")
    k, v = quantised(k, FP8, "head"), quantised(v, INT8, "token")
    gain = test_decode.GAIN
    more = dict(score_mod=test_decode.GAINED, aux=(gain,), soft_cap=5.0)
    p = problem(q, *map(caches.dequantized, (k, v)), LENGTHS, **more)
    options = dict(score_mod=mods.score_mod(test_decode.gained, gain), logits_soft_cap=5.0)
    hold(attend(q, k, v, LENGTHS, **options), p, test_decode.gained)
    hold(attend_pages(q, caches.paged(k, v, LENGTHS, 16), **options), p, test_decode.gained)


@pytest.mark.gpu
@pytest.mark.parametrize("H, D, T", [(256, 256, 1), (192, 144, 16), (64, 208, 4)])
def test_wide_heads(H, D, T):
    q, k, v = draw(len(EDGES), T, 1088, 8, 2, H, D, dtype="bfloat16")
    k, v = quantised(k, INT8, "token"), quantised(v, FP8, "token")
    want = attend(q, poisoned(k, EDGES), poisoned(v, EDGES), EDGES)
    hold(want, problem(q, *map(caches.dequantized, (k, v)), EDGES))
    equal(attend_pages(q, caches.paged(k, v, EDGES, 32)), want)


@pytest.mark.gpu
@pytest.mark.parametrize("S", [300, 3000])
def test_chunked_prefill_beside_decoding(S):
    """A chunk, one token, none, a whole prompt, holes, and rows of nobody; the bits of a sequence know no other."""
    _, k, v = draw(5, 1, S, 8, 2, 128, dtype="bfloat16")
    k, v = quantised(k, INT8, "token"), quantised(v, INT8, "token")
    lengths, cu = np.array([S, S - 37, 0, 129, 90], np.int32), np.array([0, 70, 71, 71, 200, 230], np.int32)
    used = np.array([70, 1, 0, 129, 20], np.int32)
    q = draw(1, 240, S, 8, 2, 128, dtype="bfloat16")[0][0]
    q[220:] = np.nan
    got = attend_pages(q, caches.paged(k, v, lengths, 32), cu, query_seq_lengths=used)
    assert not np.any(got[0][220:]) and np.isneginf(got[1][220:]).all()
    for m in (0, 1, 3, 4):
        rows, (one_k, one_v) = (
            slice(int(cu[m]), int(cu[m] + used[m])),
            jax.tree.map(lambda x, m=m: x[m : m + 1], (k, v)),
        )
        n = lengths[m : m + 1]
        p = problem(q[None, rows], *map(caches.dequantized, (one_k, one_v)), n)
        hold([x[None, rows] for x in got], p)
        alone = attend_pages(q[rows], caches.paged(one_k, one_v, n, 32, seed=m), np.int32([0, used[m]]))
        equal(alone, tuple(x[rows] for x in got))


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, (300, 0)])
def test_bits_do_not_depend_on_neighbours_row_capacity_or_padding(window):
    """Padding to 16 tokens takes tiles of other sizes, too."""
    q, k, v = draw(1, 3, 1300, 8, 2, 128, dtype="bfloat16")
    k, v = quantised(k, INT8, "token"), quantised(v, FP8, "token")
    want = attend(q, k, v, np.array([1277], np.int32), local_window_size=window)
    rng = np.random.default_rng(1)
    for B, row, S, T in ((1, 0, 5000, 3), (2, 1, 2048, 3), (3, 1, 1408, 16)):
        qs = 9 * rng.standard_normal((B, T, *q.shape[2:]), np.float32).astype(BF16)
        ks, vs = (quantised(rng.standard_normal((B, S, *x.shape[2:])), x.dtype, "token") for x in (k, v))
        lengths, counts = rng.integers(0, S, B).astype(np.int32), np.full(B, T, np.int32)
        lengths[row], counts[row] = 1277, 3
        qs[row, :3] = q[0]
        ks, vs = (
            jax.tree.map(lambda a, b, row=row: a.at[row, :1277].set(b[0, :1277]), new, x)
            for new, x in ((ks, k), (vs, v))
        )
        options = dict(query_seq_lengths=counts) if T != 3 else {}
        out, lse = attend(qs, ks, vs, lengths, local_window_size=window, **options)
        np.testing.assert_array_equal(out[row, :3], want[0][0], err_msg=f"{B=} {row=} {S=} {T=}")
        np.testing.assert_array_equal(lse[row, :3], want[1][0], err_msg=f"{B=} {row=} {S=} {T=}")

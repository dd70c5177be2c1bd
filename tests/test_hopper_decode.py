"""The Hopper kernel over caches: emulated on small problems, compiled for an H200 without one, and on a GPU."""

import dataclasses
import functools
import importlib
import re

import aot
import caches
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import test_decode
from caches import draw, hold, problem
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from test_hopper_protocol import MBarrier, Memory, Simulation
from test_hopper_ptx import BF16, HOW, copy_in, f32, normal, run, slab_memory, store

import jattn
from jattn import decode, decode_attention, masks, mods, paged, paged_attention
from jattn.pallas import decode as mosaic
from jattn.pallas._compat import plgpu
from jattn.pallas.hopper import decode_rows, memory, ptx
from jattn.pallas.hopper.decode_combine import combine
from jattn.pallas.hopper.decode_plan import Inputs, Plan
from jattn.pallas.lowering import MaskSpec
from jattn.reference import paged as reference
from jattn.reference.attention import TileConfig

GATHERS = re.compile("all-gather|all-to-all|collective-permute|all-reduce")
SMALL = mosaic.DecodeConfig(split=64)


def forward(call, config=None, **how):
    """`(out, lse)` of the kernel; like the op, but without asking whether it can run here."""
    assert mosaic.why_not(call.problem) is None
    options = dataclasses.replace(call.options, config=mosaic.choose(call.problem, config))
    return jax.jit(lambda arrays: mosaic.forward(arrays, options, **how))(call.arrays)


# Emulated


def emulated(call, capfd):
    """One thread block walks all items, and no access races another."""
    result = forward(call, SMALL, interpret=True, multiprocessors=1)
    assert "RACE" not in capfd.readouterr().out
    return result


def test_pages_in_any_order(capfd):
    """Pages smaller than a block, several splits, lengths of 0 and 1, and NaN wherever no token is."""
    lengths = np.array([130, 1, 0, 64], np.int32)
    q, k, v = draw(4, 3, 140, 4, 2, 40, 24, dtype="bfloat16")
    hold(emulated(paged.prepare(q, caches.paged(k, v, lengths, 16)), capfd), problem(q, k, v, lengths))


def test_contiguous_with_window_cap_sinks_and_missing_queries(capfd):
    """Two tiles of 21 tokens of 3 heads, the second with one token or none."""
    lengths, counts = np.array([130, 70], np.int32), np.array([22, 1], np.int32)
    sinks = np.float32([1, -np.inf, 40])
    q, k, v = draw(2, 22, 130, 3, 1, 16, dtype="float16")
    kept = np.arange(130) >= (lengths - counts - 20)[:, None]  # behind the window anything
    keys, values = (caches.poisoned(np.where(kept[..., None, None], x, np.nan), lengths) for x in (k, v))
    call = decode.prepare(
        caches.poisoned(q, counts), keys, values, lengths, query_seq_lengths=counts, local_window_size=(20, None),
        logits_soft_cap=5.0, scale=jnp.float32(0.4), sinks=sinks,
    )  # fmt: skip
    rule = lambda b, n, row, t, s: s >= t - 20  # noqa: E731
    p = problem(q, k, v, lengths, rule, query_lengths=counts, scale=0.4, soft_cap=5.0, sinks=sinks)
    hold(emulated(call, capfd), p)


def test_one_split_is_written_at_once(capfd):
    q, k, v = draw(2, 1, 17, 2, 2, 16, dtype="bfloat16")
    lengths = np.array([17, 0], np.int32)
    call = decode.prepare(q, k, v, lengths, is_causal=False)
    hold(emulated(call, capfd), problem(q, k, v, lengths, causal=False))


def test_many_splits_are_merged(capfd):
    """Three warpgroups with turns of 16 splits, the last one not full; a sequence with one split, which only the first
    warpgroup sees, and one with none; rows that are empty in some splits and in all."""
    B, rows, D, splits = 3, 6, 24, 40
    plan = Plan(
        B=B, T=1, S=64 * splits, N=rows, K=2, H=64, D=D, pages=B, page=None, dtype=jnp.float32, scale=1.0, left=None,
        right=0, soft_cap=None, config=SMALL,
    )  # fmt: skip
    lengths = np.array([64 * splits, 64, 0], np.int32)
    rng = np.random.default_rng(0)
    out = rng.standard_normal((splits, B, rows, D)).astype(np.float32)
    lse = (10 * rng.standard_normal((splits, B, rows))).astype(np.float32)
    for at in ((7, 0, 1), (slice(None), 0, 2)):
        out[at], lse[at] = 0, -np.inf
    out[1:, 1], lse[1:, 1] = np.nan, np.nan
    out[:, 2], lse[:, 2] = np.nan, np.nan

    def merge(lengths, out, lse):
        parts = out.reshape(splits, B, 2, 3, D), lse.reshape(splits, B, 2, 3)
        return combine(plan, Inputs(None, None, None, lengths), *parts, interpret=True)

    got, got_lse = jax.jit(merge)(lengths, out, lse)
    assert "RACE" not in capfd.readouterr().out
    assert not np.any(got[2]) and np.isneginf(got_lse[2]).all()
    for b, count in enumerate((splits, 1)):
        want, want_lse = jattn.merge(*((out[i, b], lse[i, b]) for i in range(count)))
        tolerance = dict(rtol=0, atol=0 if count == 1 else 2e-6)
        np.testing.assert_allclose(got[b, :, 0, 0], want, **tolerance)
        np.testing.assert_allclose(got_lse[b, :, 0, 0], want_lse, **tolerance)


def test_packed_queries_of_a_modifier(capfd):
    """A chunk of two tiles with a hole behind it, one token, none, and rows of nobody."""
    lengths, cu, used = np.array([100, 70, 9], np.int32), np.array([1, 39, 40, 40], np.int32), np.int32([35, 1, 0])
    _, k, v = draw(3, 1, 130, 4, 2, 16, dtype="bfloat16")
    q = draw(1, 44, 130, 4, 2, 16, dtype="bfloat16")[0][0]
    holes = np.where(np.isin(np.arange(44), [*range(1, 36), 39])[:, None, None], q, np.nan).astype(q.dtype)
    cache = caches.paged(k, v, lengths, 16)
    gain = test_decode.GAIN
    mod = mods.score_mod(test_decode.gained, gain)
    call = paged.prepare(holes, cache, cu, query_seq_lengths=used, score_mod=mod, logits_soft_cap=9.0)
    out, lse = emulated(call, capfd)
    for m, rows in ((0, slice(1, 36)), (1, slice(39, 40))):
        one = (x[m : m + 1] for x in (k, v, lengths))
        truth = oracle.ScoreMod(lambda x, b, n, t, s, g, m=m: x * g + 0.01 * (t - s) - 0.1 * m, None)
        p = problem(q[None, rows], *one, score_mod=truth, aux=(gain,), soft_cap=9.0)
        hold((out[None, rows], lse[None, rows]), p, functools.partial(_of_sequence, m))
    nobody = np.r_[0, 36:39, 40:44]
    assert not np.any(out[nobody]) and np.isneginf(lse[nobody]).all()


def _of_sequence(m, score, b, n, t, s, g):
    return test_decode.gained(score, jnp.full_like(b, m), n, t, s, g)


def test_a_tree_and_a_predicate_of_heads(capfd):
    """The rule of a tree begins with the queries' own block; one of a predicate with the first."""
    lengths, counts, stride = np.array([130, 66], np.int32), np.array([7, 3], np.int32), np.int32([2, 3, 4, 5])
    q, k, v = draw(2, 7, 130, 4, 2, 16, dtype="bfloat16")
    options = dict(query_seq_lengths=counts, is_causal=False)
    call = decode.prepare(q, k, v, lengths, masks.tree(test_decode.PARENTS), **options)
    rule = test_decode.tree_rule
    hold(emulated(call, capfd), problem(q, k, v, lengths, rule, query_lengths=counts, causal=False))
    mask = masks.predicate(lambda b, n, t, s, g: (t - s + n) % (g + b) != 1, stride[:, None, None])
    call = decode.prepare(q, k, v, lengths, mask, **options)
    rule = lambda b, n, row, t, s: (t - s + n) % (stride[n] + b) != 1  # noqa: E731
    hold(emulated(call, capfd), problem(q, k, v, lengths, rule, query_lengths=counts, causal=False))


def test_wide_heads_of_a_prefix_and_of_lengths(capfd):
    lengths, limit = np.array([70, 20], np.int32), np.array([60, 20], np.int32)
    q, k, v = draw(2, 3, 70, 2, 1, 136, 200, dtype="bfloat16")
    mask = masks.prefix(jnp.int32([9, 18])) & masks.lengths(limit)
    call = decode.prepare(q, k, v, lengths, mask, is_causal=False)
    seen = lambda b, n, row, t, s: ((s <= t) | (s < np.array([9, 18])[b])) & (s < limit[b])  # noqa: E731
    hold(emulated(call, capfd), problem(q, k, v, lengths, seen, causal=False))


# The barriers


def simulate(items, seed, *, stages, slots=1, early=()):
    """Runs one stream over items with the given numbers of blocks, as `hopper.decode` does.

    Args:
        slots: of queries.
        early: what is released before its last use: "queries", "keys".
    """
    sim = Simulation(seed)
    q, told, kv = Memory(sim, "q"), Memory(sim, "items"), Memory(sim, "kv")
    dealt, q_ready, q_free = ([MBarrier(1) for _ in range(slots)] for _ in range(3))
    k_ready, v_ready, free = ([MBarrier(1) for _ in range(stages)] for _ in range(3))

    def copy(memory, slot, value, ready):
        if memory.readers.get(slot):
            sim.hazards.append(f"copy into {memory.name}[{slot}] under a product")

        def land():
            memory.write(slot, value)
            ready.arrive()

        sim.later(land)

    def deal(number):
        slot = number % slots
        if number >= slots:
            yield q_free[slot].wait("producer")
        told.write(slot, number)
        dealt[slot].arrive()

    def producer():
        position = 0
        for number, blocks in enumerate(items):
            yield from deal(number)
            copy(q, number % slots, number, q_ready[number % slots])
            for i in range(position, position + blocks):
                if i >= stages:
                    yield free[i % stages].wait("producer")
                for name, ready in (("k", k_ready), ("v", v_ready)):
                    copy(kv, (name, i % stages), i, ready[i % stages])
                yield None
            position += blocks
        yield from deal(len(items))
        for i in range(1, slots):
            if len(items) >= i:
                yield q_free[(len(items) - i) % slots].wait("producer")
        for i in range(max(position - stages, 0), position):
            yield free[i % stages].wait("producer")

    def product(slot, position):
        kv.begin(slot, position)
        yield None
        kv.end(slot)

    def consumer():
        position = 0
        for number, blocks in enumerate([*items, -1]):
            own = number % slots
            yield dealt[own].wait("consumer")
            told.begin(own, number)
            told.end(own)
            if blocks < 0:
                return
            yield q_ready[own].wait("consumer")
            q.begin(own, number)
            if "queries" in early:
                q_free[own].arrive()
            for i in range(position, position + blocks):
                slot = i % stages
                yield k_ready[slot].wait("consumer")
                if "keys" in early:
                    free[slot].arrive()
                yield from product(("k", slot), i)
                yield v_ready[slot].wait("consumer")
                yield from product(("v", slot), i)
                if "keys" not in early:
                    free[slot].arrive()
            position += blocks
            q.end(own)
            if "queries" not in early:
                q_free[own].arrive()

    sim.start(producer())
    sim.start(consumer())
    return sim.run()


@pytest.mark.parametrize("stages, slots", [(1, 1), (2, 1), (3, 2), (6, 2)])
def test_no_hazard_and_no_deadlock(stages, slots):
    for seed in range(100):
        items = np.random.default_rng(seed).integers(0, 9, seed % 6).tolist()
        assert simulate(items, seed, stages=stages, slots=slots) == "ok", (seed, items)


@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize("mistake", ["queries", "keys"])
def test_the_simulation_sees_what_is_released_too_early(mistake, slots):
    found = {simulate([2, 0, 3, 0, 1], seed, stages=2, slots=slots, early=mistake) for seed in range(200)}
    assert any("product" in result for result in found)


# The wrappers


@pytest.mark.parametrize("interpret", HOW)
@pytest.mark.parametrize("width, dtype", [(128, BF16), (40, jnp.float16)])
def test_ldmatrix_and_the_product_of_registers_with_rows(interpret, width, dtype):
    q, k = normal(64, width, dtype=dtype), normal(64, width, dtype=dtype, seed=1)

    def body(q, k, copied, s_out, *, q_smem, k_smem, barrier):
        for array, smem in ((q, q_smem), (k, k_smem)):
            copy_in(array, smem, barrier, 64)
        plgpu.barrier_wait(barrier)
        a = memory.ldmatrix(q_smem.at[0], width)
        store(copied, a.astype(jnp.float32))
        s = ptx.wgmma_rs_nt(a, ptx.matrix(lambda i: k_smem.at[i], 64, width).at(jnp.int32(0)))
        store(s_out, ptx.wgmma_wait_group(0, s)[0])

    padded = -(-width // 16) * 16
    copied, s = run(
        body, (f32(64, padded), f32(64, 64)), (q, k), interpret, q_smem=slab_memory(64, width, dtype),
        k_smem=slab_memory(64, width, dtype), barrier=plgpu.Barrier(num_arrivals=2 * ptx.slabs(width)),
    )  # fmt: skip
    q, k = (np.asarray(x, np.float64) for x in (q, k))
    np.testing.assert_array_equal(copied, np.pad(q, ((0, 0), (0, padded - width))))
    np.testing.assert_allclose(s, q @ k.T, atol=1e-4)


@pytest.mark.parametrize("interpret", HOW)
def test_rows_outside_a_range_are_zeroed(interpret):
    x = normal(64, 128)

    def body(x, out, *, smem, barrier):
        copy_in(x, smem, barrier, 64)
        plgpu.barrier_wait(barrier)
        memory.st_shared_zero_outside(smem.at[0], jnp.int32(3), jnp.int32(50))
        plgpu.commit_smem()
        store(out, memory.ldmatrix(smem.at[0], 128).astype(jnp.float32))

    barrier = plgpu.Barrier(num_arrivals=2)
    out = run(body, (f32(64, 128),), (x,), interpret, smem=slab_memory(64, 128), barrier=barrier)[0]
    row = np.arange(64)[:, None]
    np.testing.assert_array_equal(out, np.where((row >= 3) & (row < 50), np.asarray(x, np.float64), 0))


@pytest.mark.parametrize("interpret", HOW)
@pytest.mark.parametrize("dtype", [BF16, jnp.float32])
def test_packed_rows_go_where_they_belong(interpret, dtype):
    """26 rows, tokens 21 to 29 of 3 heads, columns 16 to 31 of 24; and a number for each row, read back."""
    x, numbers = normal(64, 16, dtype=dtype), normal(2, 90, dtype=jnp.float32)

    def body(x, numbers, out, lse, *, smem, barrier):
        zero = jax.lax.axis_index("block")
        place = zero + 1, zero + 21, zero
        if dtype == BF16:
            copy_in(x, smem, barrier, 64)
            plgpu.barrier_wait(barrier)
            value = memory.ldmatrix(smem.at[0], 16)
        else:
            value = plgpu.load(x, layout=ptx.WGMMA, optimized=False)
        decode_rows.st_global(out, place, value, jnp.int32(26), jnp.int32(16))
        decode_rows.st_global_rows(lse, place, decode_rows.ld_global_rows(numbers, zero + 1, 63), jnp.int32(26))

    types = jax.ShapeDtypeStruct((2, 30, 2, 3, 24), dtype), f32(2, 30, 2, 3)
    barrier = plgpu.Barrier(num_arrivals=1)
    out, lse = run(body, types, (x, numbers), interpret, smem=slab_memory(64, 16), barrier=barrier)
    got = out[1, :, 0].reshape(90, 24)[63:89, 16:]
    np.testing.assert_array_equal(got, np.asarray(x, np.float64)[:26, :8])
    np.testing.assert_array_equal(lse[1, :, 0].reshape(90)[63:89], np.asarray(numbers, np.float64)[1, 63:89])


# Which calls it runs


Q, KEY, VALUE = draw(2, 1, 40, dtype="bfloat16")


def cache_of(page_size):
    return caches.paged(KEY, VALUE, [40, 17], page_size)


def many_queries(B=2, T=500_000, W=640):
    """A call of which only shapes exist."""
    pages, calls = jax.ShapeDtypeStruct((1400, 16, 2, 16), BF16), []
    tables, lengths = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((B, W), (B,)))
    query = jax.ShapeDtypeStruct((B, T, 4, 16), BF16)
    cache = jattn.PagedCache(pages, pages, tables, lengths)
    jax.eval_shape(lambda *args: calls.append(paged.prepare(*args)), query, cache)
    return calls[0]


REFUSED = {
    "float32": lambda: decode.prepare(*draw(2, 1, 40)),
    "int8": lambda: decode.prepare(Q, jattn.quantize(KEY), VALUE),
    "H=264": lambda: decode.prepare(*draw(2, 1, 40, H=264, dtype="bfloat16")),
    "D=20": lambda: decode.prepare(*draw(2, 1, 40, D=20, dtype="bfloat16")),
    "parts of 1000000 queries": many_queries,
    "N/K=65": lambda: decode.prepare(*draw(2, 1, 40, 65, 1, dtype="bfloat16")),
    "multiples of 16, not 1": lambda: paged.prepare(Q, cache_of(1)),
    "sort": lambda: decode.prepare(Q, KEY, VALUE, score_mod=mods.score_mod(lambda x, b, n, t, s: jnp.sort(x[None])[0])),
}


@pytest.mark.parametrize("words", REFUSED)
def test_refusals_name_their_reason(words):
    assert words in mosaic.why_not(REFUSED[words]().problem)


def test_neither_sequences_nor_capacity_refuse_decoding():
    """Another implementation would give other bits."""
    assert all(mosaic.why_not(many_queries(B, 128, W).problem) is None for B, W in ((1, 64), (4096, 64), (4096, 8192)))


def test_only_on_a_gpu():
    for call in (decode.prepare(Q, KEY, VALUE), paged.prepare(Q, cache_of(16))):
        assert mosaic.why_not(call.problem) is None and "GPU" in mosaic.why_not_here()
    with pytest.raises(NotImplementedError, match="'mosaic' can be lowered for cuda alone, not for cpu"):
        decode_attention(Q, KEY, VALUE, implementation="mosaic")
    told = jattn.explain(Q, cache_of(16), op="paged_attention")
    assert told.implementation == "xla" and "GPU" in told.refused["mosaic"]


def test_a_config_is_checked():
    call = decode.prepare(Q, KEY, VALUE)
    assert mosaic.choose(call.problem, None) == mosaic.DecodeConfig(1024, tables=False)
    assert mosaic.choose(call.problem, SMALL) == mosaic.DecodeConfig(64, tables=False)
    with pytest.raises(TypeError, match="DecodeConfig"):
        mosaic.choose(call.problem, "fast")
    with pytest.raises(ValueError, match="split=100 must be a positive multiple of 64"):
        mosaic.DecodeConfig(100)


def test_bounds_that_hide_nothing_are_none():
    def bounds(left, right):
        return mosaic._bounds(MaskSpec(left, right), 3, 100)

    assert bounds(99, 2) == bounds(2**40, 2**40) == (None, None)
    assert bounds(98, 1) == (98, 1) and bounds(-(2**40), -(2**40)) == (-103, -103)


@pytest.mark.parametrize("B, T, S", [(0, 1, 40), (2, 1, 0)])
def test_nothing_to_do(B, T, S):
    out, lse = forward(decode.prepare(*draw(B, T, S, dtype="bfloat16")))
    assert out.shape == (B, T, 4, 16) and not np.any(out) and np.isneginf(lse).all()


# On several devices


@pytest.fixture
def stand_in(monkeypatch):
    """Plain JAX in the kernel's place, and here is where it runs: what divides a launch over devices is there."""

    def part(arrays, options, **_):
        out, lse = reference.forward(arrays, dataclasses.replace(options, config=TileConfig(8, 256)))
        return out.astype(arrays.query.dtype), lse

    for name, value in dict(PLATFORM="cpu", why_not_here=lambda: None, _part=part).items():
        monkeypatch.setattr(mosaic, name, value)
    attend = importlib.import_module("jattn.paged")._attend
    attend.clear_cache()
    yield
    attend.clear_cache()


def placed(tree, mesh, specs):
    return jax.tree.map(lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec)), tree, specs)


@pytest.mark.parametrize("mode", [AxisType.Auto, AxisType.Explicit], ids=["Auto", "Explicit"])
def test_sequences_and_heads_stay_where_they_are(stand_in, mode):
    """Four devices with two key heads cut by heads and sequences; and four by query heads, each with all pages."""
    q, k, v = draw(4, 2, 60, 8, 2, dtype="bfloat16")
    lengths = np.array([60, 1, 0, 33], np.int32)
    cache = caches.paged(k, v, lengths)
    attend = functools.partial(paged_attention, implementation="mosaic", return_residual=True)
    want = jax.jit(attend)(q, cache)
    hold(want, problem(q, k, v, lengths))
    for shape, query, pages, rows in (
        ((2, 2), P("x", None, "y"), P(None, None, "y"), P("x")), ((1, 4), P(None, None, "y"), P(), P()),
    ):  # fmt: skip
        mesh = Mesh(np.array(jax.devices()[:4]).reshape(shape), ("x", "y"), axis_types=(mode, mode))
        operands = placed((q, cache), mesh, (query, jattn.PagedCache(pages, pages, rows, rows)))
        compiled = jax.jit(attend).lower(*operands).compile()
        assert not GATHERS.search(compiled.as_text())
        got = compiled(*operands)
        assert got[0].sharding.is_equivalent_to(NamedSharding(mesh, query), 4)
        hold(jax.tree.map(np.asarray, got), problem(q, k, v, lengths))


# Compiled without a GPU


def empty_call(page=None, B=3, T=1, S=1100, N=8, K=2, H=128, D=None, dtype="bfloat16", cu=None, **options):
    zeros = functools.partial(jnp.zeros, dtype=dtype)
    q, lengths = zeros((B, T, N, H) if cu is None else (T, N, H)), jnp.full(B, S, jnp.int32)
    if page is None:
        return decode.prepare(q, zeros((B, S, K, H)), zeros((B, S, K, D or H)), lengths, **options)
    pages = (B * -(-S // page), page, K)
    tables = jnp.zeros((B, -(-S // page)), jnp.int32)
    cache = jattn.PagedCache(zeros((*pages, H)), zeros((*pages, D or H)), tables, lengths)
    return paged.prepare(q, cache, cu, **options)


def SEES(b, n, t, s, stride):
    return (t - s) % (stride + 1) == 0


WIDE = [(256, 256, None, 1), (192, 128, 64, 4), (128, 256, 16, 1), (200, 256, 128, 16)]
COMPILED = {
    **{f"pages of {page}": dict(page=page) for page in (16, 32, 64, 128, 256)},
    **{f"contiguous, {H}": dict(H=H, D=D) for H, D in ((64, 64), (128, 128), (96, 40), (16, 128))},
    "one split": dict(S=300),
    "tokens, window, cap": dict(
        page=64, T=5, local_window_size=(100, 3), logits_soft_cap=20.0, scale=jnp.float32(0.3), dtype="float16",
        query_seq_lengths=jnp.int32([5, 1, 0]),
    ),
    "sinks": dict(page=128, S=400, T=3, sinks=jnp.zeros(8)),
    "several tiles": dict(page=32, T=64, N=6, is_causal=False),
    "many tokens, small pages": dict(page=16, T=64, local_window_size=(100, 3)),
    **{f"wide, {H} and {D}": dict(page=page, T=T, H=H, D=D) for H, D, page, T in WIDE},
    "tree": dict(page=64, T=8, mask=masks.tree(np.arange(-1, 7))),
    "tree, wide": dict(page=64, T=8, H=256, mask=masks.tree(np.arange(-1, 7))),
    "modifier": dict(page=16, T=3, score_mod=mods.alibi(8), logits_soft_cap=10.0),
    "modifier, wide": dict(H=256, score_mod=mods.alibi(8)),
    "predicate of heads": dict(mask=masks.predicate(SEES, np.arange(8, dtype=np.int32).reshape(1, 8, 1, 1))),
    "prefix": dict(page=128, T=5, mask=masks.prefix(jnp.int32([3, 200, 90]))),
    "packed": dict(page=16, T=300, cu=jnp.int32([0, 1, 270, 300])),
    "packed, a window": dict(page=256, T=40, cu=jnp.int32([0, 1, 7, 40]), local_window_size=(500, 0)),
    "benchmarked": dict(B=64, S=8192, N=32, K=8),
    "long": dict(page=16, B=1, S=131072, N=32, K=8),
}  # fmt: skip


@pytest.mark.aot
@pytest.mark.parametrize("name", COMPILED)
def test_compiles_for_an_h200(name):
    call = empty_call(**COMPILED[name])
    options = dataclasses.replace(call.options, config=mosaic.choose(call.problem, None))
    leaves, structure = jax.tree.flatten(call.arrays)
    found = aot.compile_for_h200(lambda *leaves: mosaic.forward(structure.unflatten(leaves), options), *leaves)
    # Of a rule beside an accumulator of 128 registers; (208, 48) registers spill 124 bytes, (216, 40) 160.
    assert found.clean or (name == "tree, wide" and found.spill_bytes <= 64 and not found.serialized), found


@pytest.mark.aot
@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("page, T", [(None, 1), (16, 3)])
def test_a_call_is_two_launches_and_gathers_nothing(page, T, devices):
    call = empty_call(page, B=2, T=T, S=2048)
    options = dataclasses.replace(call.options, config=mosaic.choose(call.problem, None))
    mesh = Mesh(np.array(aot.devices(devices)), ("x",))

    def described(path, x):
        heads = P(None, None, "x") if path[0].name in ("query", "key", "value") else P()
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, heads))

    arrays = jax.tree_util.tree_map_with_path(described, call.arrays)
    text = jax.jit(lambda arrays: mosaic.forward(arrays, options)).lower(arrays).compile().as_text()
    launches = re.findall(r" (?:fusion|copy|transpose|custom-call)\(", text[text.index("ENTRY") :])
    assert len(launches) == text.count("mosaic_gpu_v2") == 2
    assert not GATHERS.search(text)

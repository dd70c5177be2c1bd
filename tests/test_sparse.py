"""`sparse_attention` against the oracle, the cases that broke other libraries, and bits that know of nothing else."""

import doctest
import functools
import inspect

import compare
import jax
import jax.numpy as jnp
import numpy as np
import oracle_sparse as oracle
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jattn
from jattn import indexer, mla, sparse
from jattn.indexer import indexer_select
from jattn.sparse import page_rows, sparse_attention, sparse_weights

SCALE = 0.3
attend = jax.jit(
    functools.partial(sparse_attention, scale=SCALE, return_residual=True), static_argnames=("value_dim", "block_size")
)


def draw(B=2, T=5, N=4, H=24, S=40, L=70, dtype="float32", seed=0):
    """query, kv, indices with duplicates, negatives and ends; Student-t, channels of their own scale, a logit of 40."""
    rng = np.random.default_rng(seed)
    q, kv = rng.standard_t(4, (B, T, N, H)) / 2, rng.standard_t(4, (B, S, H)) / 2 * rng.uniform(0.3, 2, H)
    indices = rng.integers(-3, S + 3, (B, T, L)).astype(np.int32)
    if S and L and T:
        indices[:, :, -1] = S // 3
        hot = kv[:, S // 3]
        q[:, -1, 0] = hot / (hot**2).sum(-1, keepdims=True) * 40 / SCALE
    return q.astype(dtype), kv.astype(dtype), indices


def keys_of(q, kv, indices, more):
    """The keys that each row sees, as (array, batch, key) for all its arrays: rows in the order of q."""
    B, T = q.shape[:2]

    def at(name, b, t):
        x = more.get(name)
        return None if x is None else int(np.broadcast_to(x, (B, T))[b, t])

    for b in range(B):
        for t in range(T):
            first = oracle.listed(
                indices[b, t], kv.shape[-2], at("list_lengths", b, t), at("k_start", b, t), at("k_end", b, t),
                more.get("block_size", 1),
            )  # fmt: skip
            found = [(0, b, s) for s in first]
            if "kv2" in more:
                second = oracle.listed(more["indices2"][b, t], more["kv2"].shape[-2], at("list_lengths2", b, t))
                found += [(1, b, s) for s in second]
            yield b, t, found


def rows_of(kvs, found):
    stacked = [kvs[a][s] if kvs[a].ndim == 2 else kvs[a][b, s] for a, b, s in found]
    return np.stack(stacked) if stacked else np.zeros((0, kvs[0].shape[-1]), kvs[0].dtype)


# For what is compared by the error rule, not bit by bit: the same program in less time to compile.
QUICKLY = {"xla_backend_optimization_level": 0}


@functools.partial(jax.jit, static_argnums=6, compiler_options=QUICKLY)
def dense(q, keys, valid, sinks, dout, dlse, D):
    """One softmax over gathered keys with the textbook gradient, probabilities in the dtype of the values."""
    acc = jnp.float64 if q.dtype == jnp.float64 else jnp.float32

    def run(q, keys, sinks):
        s = jnp.einsum("rnh,rlh->rnl", q, keys, preferred_element_type=acc) * np.asarray(SCALE, acc)
        s = jnp.where(valid[:, None], s, -jnp.inf)
        s = jnp.concatenate([s, jnp.broadcast_to(sinks, s.shape[:2])[..., None]], axis=2)
        top = jax.lax.stop_gradient(jnp.max(s, axis=-1, keepdims=True))
        empty = jnp.isneginf(top)
        top = jnp.where(empty, 0, top)
        w = jnp.exp(s - top)
        total = jnp.where(empty, 1, jnp.sum(w, -1, keepdims=True))
        p = (w / total)[..., :-1].astype(q.dtype)
        out = jnp.einsum("rnl,rld->rnd", p, keys[..., :D], preferred_element_type=acc)
        return out.astype(q.dtype), (top + jnp.log(total))[..., 0]

    (out, _), pull = jax.vjp(run, q, keys, sinks)
    return out, *pull((dout, dlse.astype(acc)))


def hold(q, kv, indices, D, **more):
    """out, lse and all gradients by the one error rule; returns what jattn gave."""
    dtype, (B, T, N, _) = q.dtype, q.shape
    rng = np.random.default_rng(9)
    dout, dlse = rng.standard_normal((B, T, N, D)).astype(dtype), rng.standard_normal((B, T, N))
    primals = {"query": q, "kv": kv} | {n: more[n] for n in ("kv2", "sinks") if n in more}
    fixed = {n: x for n, x in more.items() if n not in primals and n != "block_size"} | {"indices": indices}
    kvs, sinks = [kv, *([more["kv2"]] if "kv2" in more else [])], more.get("sinks")
    lists = list(keys_of(q, kv, indices, more))
    truth = {n: np.zeros(x.shape) for n, x in primals.items()} | {"out": np.zeros(dout.shape), "lse": dlse.copy()}
    for b, t, found in lists:
        args = q[b, t], rows_of(kvs, found), SCALE, D
        truth["out"][b, t], truth["lse"][b, t], _, _ = oracle.row(*args, sinks)
        dlse[b, t] = np.where(np.isneginf(truth["lse"][b, t]), 0, dlse[b, t])
        truth["query"][b, t], dkeys, dsinks = oracle.gradients(*args, dout[b, t], dlse[b, t], sinks)
        put(truth, found, dkeys)
        if sinks is not None:
            truth["sinks"] += dsinks

    @functools.partial(jax.jit, compiler_options=QUICKLY)
    def run(primals, fixed, dout, dlse):
        call = functools.partial(attend, **fixed, value_dim=D, block_size=more.get("block_size", 1))
        (out, lse), pull = jax.vjp(lambda p: call(**p), primals)
        return out, lse, pull((dout, dlse.astype(lse.dtype)))[0]

    out, lse, got = jax.tree.map(np.asarray, run(primals, fixed, dout, dlse))
    assert out.dtype == dtype and lse.dtype == (np.float64 if dtype == np.float64 else np.float32)
    compare.check_lse(lse, truth["lse"], dtype)
    yards = list(baselines(q, kvs, lists, sinks, D, dout, dlse, primals))
    compare.check("out", out, truth["out"], [y["out"] for y in yards], dtype)
    for name, x in primals.items():
        assert got[name].dtype == x.dtype
        # A sum over all rows may cancel; its terms are as large as rows of dlse and dout.
        size = np.abs(dlse).max() if name == "sinks" else 0.0
        compare.check("d" + name, got[name], truth[name], [y[name] for y in yards], x.dtype, size)
    return out, lse, got


def put(totals, found, dkeys):
    for (a, b, s), d in zip(found, dkeys, strict=True):
        total = totals["kv2" if a else "kv"]
        total[(s,) if total.ndim == 2 else (b, s)] += d


def baselines(q, kvs, lists, sinks, D, dout, dlse, primals):
    """Runs of the dense baseline with the slots in several orders, its dkv summed in float64."""
    rng = np.random.default_rng(7)
    L = max([len(found) for _, _, found in lists] + [1])
    for _ in range(3):
        orders = [rng.permutation(len(found)) for _, _, found in lists]
        keys, valid = np.zeros((len(lists), L, q.shape[-1]), q.dtype), np.zeros((len(lists), L), bool)
        for r, ((_, _, found), order) in enumerate(zip(lists, orders, strict=True)):
            keys[r, : len(found)] = rows_of(kvs, found)[order]
            valid[r, : len(found)] = True
        acc = np.float64 if q.dtype == np.float64 else np.float32
        sink = np.full(q.shape[2], -np.inf, acc) if sinks is None else np.asarray(sinks).astype(acc)
        flat = (x.reshape(-1, *x.shape[2:]) for x in (q, dout, dlse))
        out, dq, dkeys, dsinks = map(np.asarray, _dense(*flat, keys, valid, sink, D))
        yard = {n: np.zeros(x.shape) for n, x in primals.items()}
        for r, ((_, _, found), order) in enumerate(zip(lists, orders, strict=True)):
            put(yard, [found[i] for i in order], oracle.f64(dkeys[r, : len(found)]))
        yield yard | {"out": out.reshape(dout.shape), "query": dq.reshape(q.shape), "sinks": dsinks}


def _dense(q, dout, dlse, keys, valid, sink, D):
    return dense(q, keys, valid, sink, dout, dlse, D)


SINKS = np.float32([1, -2, 0, 5])


@pytest.mark.quick
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_is_attention_over_lists(dtype):
    hold(*draw(dtype=dtype), 16)


def everything(dtype="float32"):
    q, kv, indices = draw(dtype=dtype)
    rng = np.random.default_rng(3)
    lengths = np.int32([[70, 64, 0, 13, 69], [70, 1, 70, 2, 5]])
    end = rng.integers(0, 44, (2, 5)).astype(np.int32)
    return q, kv, indices, dict(
        sinks=SINKS, list_lengths=lengths, k_start=np.int32(3), k_end=end,
        kv2=(rng.standard_t(4, (9, 24)) / 2).astype(dtype), indices2=rng.integers(-2, 11, (2, 5, 6)).astype(np.int32),
        list_lengths2=rng.integers(0, 9, (2, 5)).astype(np.int32),
    )  # fmt: skip


def test_everything_at_once(dtype="bfloat16"):
    """Two arrays, one of them for all batch items, sinks, lengths of both lists, limits; float64 below."""
    q, kv, indices, more = everything(dtype)
    hold(q, kv, indices, 16, **more)


def test_float64_and_int64():
    with jax.enable_x64(True):
        q, kv, indices, more = everything("float64")
        wide = {n: x.astype(np.int64) if np.issubdtype(x.dtype, np.integer) else x for n, x in more.items()}
        indices = indices.astype(np.int64)
        indices[0, 0, :2] = 2**32 + 1, -(2**32) + 1  # no keys of 32 bits
        hold(q, kv, indices, 24, **wide)


def test_blocks_of_keys():
    """An index names 16 keys, the last block is cut short, and the end of a query cuts its own block."""
    q, kv, _ = draw()
    blocks = np.tile(np.int32([2, 0, -1, 3]), (2, 5, 1))  # keys 32..39, 0..15, none, none
    hold(q, kv, blocks, 16, block_size=16, k_end=np.int32([[40, 39, 33, 9, 0]] * 2))
    got, _ = attend(q, kv, np.full((2, 5, 1), 2**31 - 1, np.int32), block_size=16)
    assert not got.any()


@pytest.mark.parametrize("L", [1, 63, 65, 705])
def test_any_length_of_list(L):
    q, kv, indices = draw(B=1, T=3, N=2, S=30, L=L)
    out, lse = attend(q, kv, indices)
    truth = [oracle.row(q[0, t], rows_of([kv], found), SCALE, 24)[:2] for _, t, found in keys_of(q, kv, indices, {})]
    for got, want in zip((out, lse), zip(*truth, strict=True), strict=True):
        got, want = np.asarray(got)[0], np.array(want)
        seen = np.isfinite(want)
        np.testing.assert_array_equal(seen, np.isfinite(got))
        assert np.abs(got[seen] - want[seen]).max() <= 1e-5 * np.abs(want[seen]).max()


def test_the_oracle_differentiates():
    rng = np.random.default_rng(0)
    q, keys, sinks = rng.standard_normal((2, 5)), rng.standard_normal((4, 5)), rng.standard_normal(2)
    dout, dlse = rng.standard_normal((2, 3)), rng.standard_normal(2)
    got = oracle.gradients(q, keys, SCALE, 3, dout, dlse, sinks)

    def loss(q, keys, sinks):
        out, lse, _, _ = oracle.row(q, keys, SCALE, 3, sinks)
        return (out * dout).sum() + (lse * dlse).sum()

    args = [q, keys, sinks]
    for i, gradient in enumerate(got):
        for at in np.ndindex(args[i].shape):
            step = [x.copy() for x in args], [x.copy() for x in args]
            step[0][i][at] += 1e-6
            step[1][i][at] -= 1e-6
            np.testing.assert_allclose(gradient[at], (loss(*step[0]) - loss(*step[1])) / 2e-6, rtol=1e-5, atol=1e-7)


# Cases that other implementations got wrong.


def one(kv, slots, sinks=None, **options):
    """out [N, D], lse [N] of one query of ones with N = 1 or the number of sinks."""
    N = 1 if sinks is None else len(sinks)
    q = np.ones((1, N, kv.shape[1]), np.float32)
    sinks = None if sinks is None else np.float32(sinks)
    out, lse = attend(q, kv, np.int32([slots]), sinks=sinks, **options)
    return np.asarray(out[0]), np.asarray(lse[0])


KV = np.random.default_rng(1).standard_normal((9, 24)).astype(np.float32)


def test_one_key():
    out, lse = one(KV, [0], value_dim=16)
    np.testing.assert_array_equal(out[0], KV[0, :16])
    np.testing.assert_allclose(lse[0], KV[0].sum() * SCALE, rtol=1e-6)
    out, _ = one(KV, [0], sinks=[0.5])
    np.testing.assert_allclose(out[0], KV[0] / (1 + np.exp(0.5 - KV[0].sum() * SCALE)), rtol=1e-6)


def test_sinks_at_their_ends():
    """-inf changes nothing, +inf takes everything, and a sink of 0 halves a key whose logit is 0."""
    kv = np.zeros((1, 24), np.float32)
    kv[0, :2] = 3, -3
    out, lse = one(kv, [0], sinks=[-np.inf, np.inf, 0])
    np.testing.assert_array_equal(out, [kv[0], 0 * kv[0], kv[0] / 2])
    np.testing.assert_allclose(lse, [0, np.inf, np.log(2)], rtol=1e-6)
    # Empty: 0 whatever the sink is, and lse is the sink.
    out, lse = one(kv, [-1], sinks=[-np.inf, np.inf, 0.25])
    np.testing.assert_array_equal(out, 0 * out)
    np.testing.assert_array_equal(lse, np.float32([-np.inf, np.inf, 0.25]))


def test_empty_rows():
    """No slot, only empty slots, length 0, no keys: output 0, lse -inf, no gradients."""
    q, kv, indices = draw()
    run = jax.jit(jax.grad(lambda q, kv, *more: sum(x.sum() for x in masked(q, kv, *more)), (0, 1)))

    def masked(q, kv, indices, lengths):
        out, lse = attend(q, kv, indices, list_lengths=lengths)
        return out, jnp.where(jnp.isneginf(lse), 0, lse)

    forward = lambda *a: attend(*a[:3], list_lengths=a[3])  # noqa: E731
    none, wild = np.full_like(indices, -1), np.full_like(indices, 2**31 - 1)
    for keys, slots, length in [(kv, none, 70), (kv, wild, 70), (kv, indices, 0), (kv[:, :0], indices, 70)]:
        out, lse = forward(q, keys, slots, np.int32(length))
        assert not out.any() and np.isneginf(lse).all()
        for gradient in run(q, keys, slots, np.int32(length)):
            assert not gradient.any()
    out, lse = forward(q, kv, indices[:, :, :0], np.int32(0))
    assert not out.any() and np.isneginf(lse).all()
    out, lse = attend(q[:, :0], kv, indices[:, :0])
    assert out.shape == (2, 0, 4, 24) and lse.shape == (2, 0, 4)


def test_first_tiles_may_be_empty():
    """A running maximum of -inf poisons what comes later: slots 0..63 are empty, slot 100 is key 5."""
    slots = np.full(128, -1)
    slots[100] = 5
    np.testing.assert_array_equal(one(KV, slots)[0][0], KV[5])


def test_a_list_is_a_multiset():
    """A slot more is a weight more: the sum over distinct keys, times how often each occurs."""
    out, lse = one(KV, [3, 3, 4, 3])

    def weighted(dtype):
        s = KV[3:5].astype(dtype).sum(1) * dtype(SCALE)
        w = np.exp(s - s.max()) * np.array([3, 1], dtype)
        return (w / w.sum()) @ KV[3:5].astype(dtype), s.max() + np.log(w.sum())

    (truth, truth_lse), (plain, _) = weighted(np.float64), weighted(np.float32)
    compare.check("out", out[0], truth, [plain], "float32")
    compare.check_lse(lse[0], truth_lse, "float32")


def test_what_no_list_names_may_be_anything():
    """NaN in every other key, also in those that empty slots or lengths could point at, forward and backward."""
    q, kv, indices = draw()
    indices = np.where(indices < 4, -1, indices)  # never key 0
    indices[:, 2] = -1
    lengths = np.full((2, 5), 60, np.int32)
    indices[:, :, 60:] = 2
    named = np.zeros(kv.shape[:2], bool)
    for b in range(2):
        used = indices[b, :, :60]
        named[b, used[(used >= 0) & (used < 40)]] = True
    dirty = np.where(named[..., None], kv, np.nan)
    assert np.isnan(dirty[:, :4]).all()
    f = jax.jit(jax.value_and_grad(lambda *a: attend(*a, indices, list_lengths=lengths)[0].sum(), (0, 1)))
    for a, b in zip(jax.tree.leaves(f(q, dirty)), jax.tree.leaves(f(q, kv)), strict=True):
        np.testing.assert_array_equal(a, b)


def test_gradients_stay_with_the_keys_that_are_named():
    """-1 is not the last key, nor the last of the batch item before."""
    q, kv, indices = draw()
    indices = np.where(np.arange(70) < 9, np.clip(indices, 1, 30), -1)
    dkv = np.asarray(jax.jit(jax.grad(lambda kv: attend(q, kv, indices)[0].sum()))(kv))
    assert not dkv[:, 0].any() and not dkv[:, 31:].any() and dkv[:, 1:31].any()


def test_many_rows():
    """70,000 rows: more than a grid has blocks along an axis."""
    T = 70000
    q, kv = np.ones((T, 1, 2), np.float32), np.arange(2 * T, dtype=np.float32).reshape(T, 2)
    out = jax.jit(lambda *a: sparse_attention(*a, scale=1.0))(q, kv, np.arange(T, dtype=np.int32)[::-1, None])
    np.testing.assert_array_equal(out[:, 0], kv[::-1])


def test_past_two_to_the_31_elements():
    """A cache of 4 x 1M rows of 576 channels: addresses are counted in rows, and one step needs no copy of it."""
    S = jax.ShapeDtypeStruct
    q, kv = S((4, 1, 2, 576), "bfloat16"), S((4, 2**20, 576), "bfloat16")
    run = jax.jit(functools.partial(sparse_attention, scale=0.1, value_dim=512))
    assert run.lower(q, kv, S((4, 1, 64), "int32")).compile().memory_analysis().temp_size_in_bytes < 2**25
    with pytest.raises(ValueError, match="at most 2.31 - 1 rows"):
        run.lower(S((2**11, 1, 1, 512), "bfloat16"), S((2**11, 2**20, 512), "bfloat16"), S((2**11, 1, 1), "int32"))


# Bits.


def equal(got, want):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        a, b = np.asarray(a), np.asarray(b)
        assert a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()


VICTIM = dict(zip(("q", "kv", "indices"), draw(B=1, T=1, N=3, S=200, L=100, seed=4), strict=True))


def row_bits(q, kv, indices, sinks):
    return attend(q, kv, indices, sinks=sinks, value_dim=16)


@pytest.mark.parametrize("dtype, sizes", [("float32", (2, 3, 7, 64, 133, 300)), ("bfloat16", (3,))])
def test_a_row_knows_of_no_other(dtype, sizes):
    """The bits of one row: alone, in batches of any size, at any place, as one of several queries, beside anything."""
    q, kv, indices = (x.astype(dtype) if x.dtype == np.float32 else x for x in VICTIM.values())
    sinks = SINKS[:3]
    alone = jax.tree.map(lambda x: x[0, 0], row_bits(q, kv, indices, sinks))
    rng = np.random.default_rng(5)
    for B in sizes:
        for place in {0, B // 2, B - 1}:
            others = (rng.standard_normal((B, *x.shape[1:])).astype(dtype) * 9 for x in (q, kv[:, :8]))
            many, keys = others
            lists = rng.integers(-1, 8, (B, 1, 100)).astype(np.int32)
            lists[::2] = -1
            keys = np.repeat(keys, 25, axis=1)
            keys[(place + 1) % B] = np.nan
            many[place], keys[place], lists[place] = q[0], kv[0], indices[0]
            equal(jax.tree.map(lambda x, p=place: x[p, 0], row_bits(many, keys, lists, sinks)), alone)
    many, lists = np.tile(q, (1, 2, 1, 1)), np.tile(indices, (1, 2, 1))
    many[0, 0], lists[0, 0] = np.nan, 7
    equal(jax.tree.map(lambda x: x[0, 1], row_bits(many, kv, lists, sinks)), alone)


def test_empty_slots_to_the_next_tile_change_no_bit():
    q, kv, indices = VICTIM.values()
    want = row_bits(q, kv, indices, SINKS[:3])
    more = np.pad(indices, ((0, 0), (0, 0), (0, 28)), constant_values=-1)  # 128
    equal(row_bits(q, kv, more, SINKS[:3]), want)
    garbage = np.where(more == -1, 3, more)
    garbage[..., :100] = indices
    equal(attend(q, kv, garbage, sinks=SINKS[:3], value_dim=16, list_lengths=np.int32(100)), want)


def test_pages_in_any_order():
    """Where rows lie changes no bit; what is in other pages, and in the unused end of a table, may be anything."""
    q, kv, indices = VICTIM.values()
    want = row_bits(q, kv, indices, SINKS[:3])
    rng = np.random.default_rng(0)
    for page in (1, 16, 64):
        n = -(-200 // page)
        order = rng.permutation(2 * n)[:n]
        pool = np.full((2 * n, page, 24), np.nan, np.float32)
        pool[order] = np.pad(kv[0], ((0, n * page - 200), (0, 0)), constant_values=np.nan).reshape(n, page, 24)
        table = np.int32([[*order, 2147480000, -1]])
        slots = np.where((indices < 0) | (indices >= 200), -1, indices)
        rows = jax.jit(page_rows, static_argnums=2)(slots, table, page)
        equal(row_bits(q, pool.reshape(-1, 24), rows, SINKS[:3]), want)
        past = np.int32([[[n * page, n * page + page, 2**31 - 1, -1, (n + 2) * page]]])
        past = np.asarray(page_rows(past, table, page))
        assert ((past == -1) | (past >= 2147480000)).all() and (past[..., 1:] == -1).all()


def test_every_run_has_the_same_bits():
    """Forward and backward, with keys that many rows and many slots of a row name."""
    q, kv, indices = draw(T=40)
    f = jax.jit(jax.value_and_grad(lambda *a: (attend(*a, indices, sinks=SINKS)[0] ** 2).sum(), (0, 1)))
    want = f(q, kv)
    for _ in range(20):
        equal(f(q, kv), want)
    # And with the forward computed again for the backward.
    g = jax.jit(jax.value_and_grad(jax.checkpoint(lambda *a: (attend(*a, indices, sinks=SINKS)[0] ** 2).sum()), (0, 1)))
    equal(g(q, kv), want)


# Other functions of the lists.


def test_weights_are_those_of_the_softmax():
    q, kv, indices, more = everything()
    sinks = more.pop("sinks")
    _, lse = attend(q, kv, indices, sinks=sinks, **more)
    got = np.asarray(jax.jit(functools.partial(sparse_weights, scale=SCALE))(q, kv, indices, lse, **more))
    assert got.shape == (2, 5, 76) and got.dtype == np.float32
    kvs = [kv, more["kv2"]]
    for b, t, found in keys_of(q, kv, indices, more):
        keys = rows_of(kvs, found)
        weights = oracle.row(q[b, t], keys, SCALE, 16, sinks)[2].sum(0)
        np.testing.assert_allclose(np.sort(got[b, t][got[b, t] > 0]), np.sort(weights[weights > 1e-40]), rtol=2e-5)
        first = sum(a == 0 for a, _, _ in found)
        np.testing.assert_allclose(got[b, t, :70].sum(), weights[:first].sum(), rtol=2e-5, atol=1e-7)


def test_transformations():
    q, kv, indices = draw()
    f = functools.partial(attend, value_dim=16)
    want = f(q, kv, indices)
    mapped = jax.vmap(f)(q, kv, indices)
    shared = jax.vmap(f, in_axes=(0, None, 0))(q, kv[0], indices)
    one = f(q, kv[0], indices)
    for a, b in [(mapped, want), (shared, one)]:
        for x, y in zip(a, b, strict=True):
            np.testing.assert_allclose(x, y, rtol=2e-6, atol=2e-6)
    equal(f(q[0], kv[0], indices[0]), jax.tree.map(lambda x: x[0], want))
    equal(f(q[:, None], kv[:, None], indices[:, None]), jax.tree.map(lambda x: x[:, None], want))
    assert jax.eval_shape(f, q, kv, indices)[0].shape == (2, 5, 4, 16)


def test_inside_shard_map():
    q, kv, indices = draw()
    f = lambda q, kv, i: sparse_attention(q, kv, i, scale=SCALE, sinks=SINKS)  # noqa: E731
    mesh = Mesh(np.array(jax.devices()[:2]), ("x",))
    mapped = jax.shard_map(f, mesh=mesh, in_specs=(P("x"), P(), P("x")), out_specs=P("x"))
    loss = lambda f: jax.jit(jax.value_and_grad(lambda q, kv: (f(q, kv, indices) ** 2).sum(), (0, 1)))  # noqa: E731
    got, want = (jax.tree.leaves(loss(g)(q, kv[0])) for g in (mapped, f))
    for x, y in zip(got, want, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_heads_may_be_sharded_and_nothing_is_gathered(kind):
    q, kv, indices = draw()
    mesh = Mesh(np.array(jax.devices()[:2]), ("x",), axis_types=(kind,))
    split = [jax.device_put(q, NamedSharding(mesh, P(None, None, "x"))), jax.device_put(kv, NamedSharding(mesh, P()))]
    f = jax.jit(jax.value_and_grad(lambda q, kv: (sparse_attention(q, kv, indices, scale=SCALE) ** 2).sum(), (0, 1)))
    want = jax.tree.leaves(f(q, kv))
    with jax.set_mesh(mesh):
        program = f.lower(*split).compile()
        got = jax.tree.leaves(program(*split))
    assert "all-gather" not in program.as_text() and got[1].sharding.spec[2] == "x"
    for x, y in zip(got, want, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)


Q, K, X = draw()


@pytest.mark.parametrize(
    "call, error, words",
    [
        (lambda: sparse_attention(Q, K, X), TypeError, "scale"),
        (lambda: sparse_attention(Q, K, X, scale=None), TypeError, "scale=None must be a Python number"),
        (lambda: sparse_attention(Q, K, X, scale=float("nan")), ValueError, "scale=nan must be finite"),
        (lambda: sparse_attention(Q, K[..., :8], X, scale=1), ValueError, "kv head dim H=8 must equal query's H=24"),
        (lambda: sparse_attention(Q, K[:1], X, scale=1), ValueError, r"kv has shape \(1, 40, 24\); expected \[S, H\]"),
        (lambda: sparse_attention(Q, jnp.bfloat16(K), X, scale=1), TypeError, "kv dtype bfloat16 must equal query's"),
        (lambda: sparse_attention(Q, np.uint8(K), X, scale=1), ValueError, "rows of 24 bytes for H=24; stored rows"),
        (lambda: sparse_attention(Q, K, X[0], scale=1), ValueError, r"indices have shape \(5, 70\)"),
        (lambda: sparse_attention(Q, K, np.float32(X), scale=1), TypeError, "indices must be integers, not float32"),
        (lambda: sparse_attention(Q, K, X, scale=1, value_dim=25), ValueError, "value_dim=25 must be <= H=24"),
        (lambda: sparse_attention(Q, K, X, scale=1, value_dim=0), ValueError, "value_dim=0 must be >= 1"),
        (lambda: sparse_attention(Q, K, X, scale=1, sinks=SINKS[:3]), ValueError, r"sinks have shape \(3,\)"),
        (lambda: sparse_attention(Q, K, X, scale=1, block_size=1.5), TypeError, "block_size=1.5 must be a Python int"),
        (lambda: sparse_attention(Q, K, X, scale=1, k_end=np.ones(5, int)), ValueError, r"k_end has shape \(5,\)"),
        (lambda: sparse_attention(Q, K, X, scale=1, k_end=1.5), TypeError, "k_end=1.5 must be an int array"),
        (lambda: sparse_attention(Q, K, X, scale=1, kv2=K), ValueError, "kv2 and indices2 go together"),
        (lambda: sparse_attention(Q, K, X, scale=1, list_lengths2=1), ValueError, "list_lengths2 needs kv2"),
        (lambda: sparse_attention(Q[0, 0], K, X, scale=1), ValueError, r"query has shape \(4, 24\)"),
        (lambda: sparse_attention(np.int32(Q), K, X, scale=1), TypeError, "query has dtype int32"),
        (lambda: sparse_attention(Q, K, X, scale=1, implementation="mosaic"), NotImplementedError, "has no kernel for"),
        (lambda: sparse_attention(Q, K, X, scale=1, implementation="cuda"), ValueError, "'cuda' is unknown"),
        (lambda: sparse_attention(Q, K, X, scale=1, return_residual=1), TypeError, "return_residual=1 must be"),
        (lambda: sparse_weights(Q, K, X, Q[..., 0, 0], scale=1), ValueError, r"lse has shape \(2, 5\)"),
        (lambda: page_rows(X, X[0], 16), ValueError, r"block_tables \(5, 70\)"),
        (lambda: page_rows(X, X[:, 0], 0), ValueError, "page_size=0 must be >= 1"),
    ],
)
def test_refused(call, error, words):
    with pytest.raises(error, match=words):
        call()


def test_derivatives_that_are_refused():
    f = lambda q: sparse_attention(q, K, X, scale=SCALE).sum()  # noqa: E731
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(f, (Q,), (Q,))
    with pytest.raises(NotImplementedError, match="first derivatives in reverse mode only"):
        jax.jacrev(jax.grad(f))(Q)


def test_memory_is_bounded():
    """16,384 queries, 65,536 keys, lists of 2048: selection and attention in under 4 GiB, where scores alone are 4."""
    S = jax.ShapeDtypeStruct
    T, keys, bf16 = 16384, 65536, jnp.bfloat16

    def layer(index_query, index_key, weights, query, kv, end):
        lists, _ = indexer_select(index_query, index_key, weights, 2048, k_end=end)
        return sparse_attention(query, kv, lists, scale=192**-0.5, value_dim=512)

    index = S((T, 8, 128), bf16), S((keys, 128), bf16), S((T, 8), "float32")
    compiled = jax.jit(layer).lower(*index, S((T, 8, 576), bf16), S((keys, 576), bf16), S((T,), "int32")).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 2**29


@pytest.fixture
def quick_compiles():
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.mark.parametrize("module", [indexer, mla, sparse])
def test_examples_run(module, monkeypatch, quick_compiles):
    names = {name: getattr(m, name) for m in (indexer, mla, sparse) for name in m.__all__}
    for name, thing in names.items():
        monkeypatch.setattr(jattn, name, thing, raising=False)
    examples = doctest.DocTestFinder(exclude_empty=True)
    for name in module.__all__:
        thing = getattr(module, name)
        doc = inspect.getdoc(thing)
        assert "[" in doc and "Source" in doc, name
        if inspect.isfunction(thing):
            assert "Raises:" in doc and "Example" in doc, name
        for example in examples.find(thing, name, module=False, globs={}):
            assert not doctest.DocTestRunner().run(example).failed


@pytest.mark.gpu
def test_on_a_gpu():
    for dtype in ("float32", "bfloat16", "float16"):
        hold(*draw(dtype=dtype), 16)
        test_everything_at_once(dtype)
    test_a_row_knows_of_no_other("float32", (2, 7, 300))
    test_a_row_knows_of_no_other("bfloat16", (2, 7, 300))
    test_every_run_has_the_same_bits()
    test_what_no_list_names_may_be_anything()

"""`decode_attention` against the oracle; a sequence's bits know of nothing but the sequence."""

import functools

import caches
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from caches import draw, hold, poisoned, problem
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jattn
from jattn import decode_attention, masks, mods

LENGTHS = np.array([300, 1, 0, 263], np.int32)


decode = functools.partial(decode_attention, return_residual=True)


@pytest.mark.quick
@pytest.mark.parametrize(
    "dtype, T, N, K, H, D",
    [
        ("float32", 1, 4, 4, 16, 16),
        ("float16", 3, 6, 2, 40, 24),
        ("bfloat16", 64, 8, 2, 128, 64),
    ],
)
def test_is_attention_at_the_end(dtype, T, N, K, H, D):
    """Lengths in the middle of a split, below the number of queries, and 0; NaN behind every one."""
    q, k, v = draw(4, T, 300, N, K, H, D, dtype)
    hold(decode(q, poisoned(k, LENGTHS), poisoned(v, LENGTHS), LENGTHS), problem(q, k, v, LENGTHS))


def test_float64_and_int64_lengths():
    with jax.enable_x64(True):
        q, k, v = draw(4, 2, dtype="float64")
        hold(decode(q, k, v, LENGTHS.astype(np.int64)), problem(q, k, v, LENGTHS))


@pytest.mark.parametrize("S", [256, 257])
def test_every_side_of_a_split(S):
    q, k, v = draw(2, 1, S)
    hold(decode_attention(q, k, v, return_residual=True), problem(q, k, v, [S, S]))


PARENTS = np.array([-1, 0, 0, 1, 1, 2, -1], np.int32)


def ancestors(parents):
    found = np.eye(len(parents), dtype=bool)
    for t, p in enumerate(parents):
        if p >= 0:
            found[t] |= found[p]
    return found


def tree_rule(b, n, row, t, s):
    """`t - row` is the position of the first query: node j of the tree is there."""
    node = s - (t - row)
    inside = ancestors(PARENTS)[row, np.clip(node, 0, 6)]
    return (node < 0) | ((node < 7) & inside)


STEP = np.int32([2, 3, 4, 5])
GAIN = np.linspace(0.5, 1.5, 4).astype(np.float32)[:, None, None]
GAINED = oracle.ScoreMod(lambda x, b, n, t, s, g: x * g + 0.01 * (t - s) - 0.1 * b, None)
FEATURES = {
    "window": (dict(local_window_size=(40, 0)), lambda b, n, row, t, s: s >= t - 40, {}),
    "window ahead": (dict(local_window_size=(300, -2)), lambda b, n, row, t, s: (s <= t - 2) & (s >= t - 300), {}),
    "not causal": (dict(is_causal=False), None, dict(causal=False)),
    "sinks": (dict(sinks=np.float32([1, -2, 0, 5])), None, dict(sinks=np.float32([1, -2, 0, 5]))),
    "soft cap": (dict(logits_soft_cap=5.0, scale=0.4), None, dict(soft_cap=5.0, scale=0.4)),
    "tree": (dict(mask=masks.tree(PARENTS), is_causal=False), tree_rule, dict(causal=False)),
    "prefix or window": (
        dict(mask=masks.lengths(np.array([9, 0, 3, 200], np.int32)) | masks.window(3, 0)),
        lambda b, n, row, t, s: (s < np.array([9, 0, 3, 200])[b]) | (s >= t - 3), {},
    ),
    "predicate": (
        dict(mask=masks.predicate(lambda b, n, t, s, g: (t - s + n) % (g + b) != 1, STEP[:, None, None])),
        lambda b, n, row, t, s: (t - s + n) % (STEP[n] + b) != 1, {},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FEATURES)
def test_every_feature(name):
    options, rule, more = FEATURES[name]
    q, k, v = draw(4, 7)
    hold(decode(q, k, v, LENGTHS, **options), problem(q, k, v, LENGTHS, rule, **more))


def gained(score, b, n, t, s, g):
    return score * g + (0.01 * (t - s).astype(score.dtype) - 0.1 * b.astype(score.dtype))


def test_modifiers_count_positions_and_sequences():
    q, k, v = draw(4, 7)
    p = problem(q, k, v, LENGTHS, score_mod=GAINED, aux=(GAIN,))
    hold(decode(q, k, v, LENGTHS, score_mod=mods.score_mod(gained, GAIN)), p, gained)


def test_queries_that_do_not_exist():
    q, k, v = draw(4, 7)
    counts = np.array([7, 1, 3, 0], np.int32)
    out, lse = decode(poisoned(q, counts), k, v, LENGTHS, query_seq_lengths=counts, sinks=np.ones(4, np.float32))
    hold((out, lse), problem(q, k, v, LENGTHS, query_lengths=counts, sinks=np.ones(4, np.float32)))
    assert not np.any(out[3]) and np.isneginf(lse[3]).all()


def test_everything_at_once():
    q, k, v = draw(4, 7, dtype="bfloat16", H=64)
    counts, sinks = np.array([7, 1, 3, 5], np.int32), np.float32([1, -2, 0, 5])
    options = dict(mask=masks.tree(PARENTS), query_seq_lengths=counts, local_window_size=(150, None), sinks=sinks)
    got = decode(q, k, v, LENGTHS, scale=jnp.float32(0.2), logits_soft_cap=30.0, **options)
    rule = lambda b, n, row, t, s: tree_rule(b, n, row, t, s) & (s >= t - 150)  # noqa: E731
    hold(got, problem(q, k, v, LENGTHS, rule, query_lengths=counts, sinks=sinks, scale=0.2, soft_cap=30.0))


# A quantised cache


@pytest.mark.parametrize(
    "dtype, stored, per",
    [("float32", "int8", "token"), ("bfloat16", "float8_e4m3fn", "token"), ("bfloat16", "int8", "head"),
     ("float32", "float8_e4m3fn", "tensor")],
)  # fmt: skip
def test_a_quantised_cache_is_the_dequantised_one(dtype, stored, per):
    q, k, v = draw(4, 2, dtype=dtype, N=4, K=2)
    k, v = jattn.quantize(k, stored, per=per), jattn.quantize(v, stored, per="token" if per == "head" else per)
    p = problem(q, *(caches.dequantized(x).astype(dtype) for x in (k, v)), LENGTHS)
    if per == "token":
        k, v = (jattn.Quantized(x.values, jnp.asarray(poisoned(np.asarray(x.scale), LENGTHS))) for x in (k, v))
    exact = problem(q, *(caches.dequantized(x) for x in (k, v)), LENGTHS)
    exact = oracle.Problem(**{**vars(exact), "key": np.nan_to_num(exact.key), "value": np.nan_to_num(exact.value)})
    out, lse = decode(q, k, v, LENGTHS)
    truth = oracle.forward(exact)
    caches.compare.check("out", out, truth[0], list(caches.baselines(p, None)), q.dtype)
    caches.compare.check_lse(lse, truth[1], q.dtype)


def test_small_values_do_not_underflow_in_float16():
    """A weight times the scale of its value would be below what float16 can hold."""
    q, k, v = draw(2, 2, dtype="float16")
    n, q = np.array([300, 290], np.int32), q / 8
    stored = jattn.quantize(1e-3 * v.astype(np.float32))
    hold(decode(q, k, stored, n), problem(q, k, caches.dequantized(stored).astype(np.float16), n))


def test_only_keys_quantised():
    q, k, v = draw(2, 1)
    n, stored = np.array([300, 20], np.int32), jattn.quantize(k)
    hold(decode(q, stored, v, n), problem(q, np.float32(caches.dequantized(stored)), v, n))


# A sequence's bits


def test_bits_do_not_depend_on_neighbours_row_capacity_or_padding():
    """Alone, and among 1 to 300 neighbours, on any row, in a larger cache, with more queries a sequence."""
    q, k, v = draw(1, 3, 300, 8, 2, 64, dtype="bfloat16")
    n = np.array([277], np.int32)
    want = jax.tree.map(np.asarray, decode(q, k, v, n))
    rng = np.random.default_rng(1)
    for B, row, S, T in ((2, 0, 1024, 3), (2, 1, 1024, 3), (301, 300, 301, 3), (3, 1, 640, 20)):
        shapes = ((B, m, *x.shape[2:]) for m, x in ((T, q), (S, k), (S, v)))
        qs, ks, vs = (9 * rng.standard_normal(shape).astype(q.dtype) for shape in shapes)
        lengths, counts = rng.integers(0, S, B).astype(np.int32), np.full(B, T, np.int32)
        lengths[row], counts[row] = 277, 3
        qs[row, :3], ks[row, :277], vs[row, :277] = q[0], k[0, :277], v[0, :277]
        options = dict(query_seq_lengths=counts) if T != 3 else {}
        out, lse = decode(qs, poisoned(ks, lengths), poisoned(vs, lengths), lengths, **options)
        np.testing.assert_array_equal(out[row, :3], want[0][0], err_msg=f"{B=} {row=} {S=} {T=}")
        np.testing.assert_array_equal(lse[row, :3], want[1][0], err_msg=f"{B=} {row=} {S=} {T=}")


def test_eager_is_jit_and_runs_are_equal():
    q, k, v = draw(4, 2)
    want = decode(q, k, v, LENGTHS)
    for got in (jax.jit(decode)(q, k, v, LENGTHS), decode(q, k, v, LENGTHS)):
        jax.tree.map(np.testing.assert_array_equal, got, want)


def test_parts_merge_to_the_whole():
    """A shared prefix, attended to once for all, and the own rest of each sequence."""
    q, k, v = draw(3, 1, 300)
    k[:, :256], v[:, :256] = k[:1, :256], v[:1, :256]
    n = np.array([300, 257, 270], np.int32)
    shared = decode_attention(
        q[:, 0][None], k[:1, :256], v[:1, :256], is_causal=False, return_residual=True
    )  # one sequence whose queries are the three
    shared = jax.tree.map(lambda x: x[0][:, None], shared)
    own = decode_attention(q, k[:, 256:], v[:, 256:], n - 256, return_residual=True)
    hold(jattn.merge(shared, own), problem(q, k, v, n))


# Composition


def test_vmap_scan_and_more_batch_axes():
    q, k, v = draw(4, 1)
    want = np.asarray(decode_attention(q, k, v, LENGTHS))
    attend = jax.vmap(lambda *x: decode_attention(*x, return_residual=True))
    hold(attend(q, k, v, LENGTHS), problem(q, k, v, LENGTHS))
    scanned = jax.lax.scan(lambda c, x: (c, decode_attention(*x)), 0, (q, k, v, jnp.asarray(LENGTHS)))[1]
    np.testing.assert_array_equal(scanned, want)
    square = [x.reshape(2, 2, *x.shape[1:]) for x in (q, k, v, LENGTHS)]  # two batch axes
    np.testing.assert_array_equal(decode_attention(*square).reshape(want.shape), want)
    stored = jattn.quantize(k.reshape(2, 2, *k.shape[1:]))
    assert decode_attention(square[0], stored, square[2], square[3]).shape == (2, 2, 1, 4, 16)


@pytest.mark.parametrize("mode", [AxisType.Auto, AxisType.Explicit])
def test_heads_may_be_sharded_and_nothing_is_gathered(mode):
    q, k, v = draw(4, 2, N=8, K=4)
    mesh = Mesh(np.array(jax.devices()[:4]), ("x",), axis_types=(mode,))
    heads = NamedSharding(mesh, P(None, None, "x", None))
    with jax.set_mesh(mesh):
        shards = [jax.device_put(x, heads) for x in (q, k, v)]
        compiled = jax.jit(decode_attention).lower(*shards, jnp.asarray(LENGTHS)).compile()
        text = compiled.as_text()
        got = compiled(*shards, jnp.asarray(LENGTHS))
    assert not [word for word in ("all-gather", "all-to-all", "collective-permute", "all-reduce") if word in text]
    assert got.sharding.is_equivalent_to(heads, 4)
    np.testing.assert_array_equal(got, decode_attention(q, k, v, LENGTHS))


def test_shard_map_with_varying_axes_checked():
    q, k, v = draw(4, 2, N=8, K=4)
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("b", "h"))
    spec = P("b", None, "h")
    attend = jax.shard_map(decode_attention, mesh=mesh, in_specs=(spec, spec, spec, P("b")), out_specs=spec)
    np.testing.assert_array_equal(jax.jit(attend)(q, k, v, LENGTHS), decode_attention(q, k, v, LENGTHS))


def test_export_with_symbolic_batch_and_for_other_platforms():
    q, k, v = draw(4, 1)
    (b,) = jax.export.symbolic_shape("b")
    shapes = [jax.ShapeDtypeStruct((b, *x.shape[1:]), x.dtype) for x in (q, k, v, LENGTHS)]
    exported = jax.export.export(jax.jit(decode_attention), platforms=("cpu", "cuda", "tpu"))(*shapes)
    np.testing.assert_array_equal(exported.call(q, k, v, LENGTHS), decode_attention(q, k, v, LENGTHS))
    assert jax.eval_shape(decode_attention, q, k, v, LENGTHS).shape == q.shape


def test_no_derivatives():
    q, k, v = draw(1, 1, 9)
    with pytest.raises(NotImplementedError, match="decode_attention has no derivatives: jattn.attention has"):
        jax.grad(lambda q: decode_attention(q, k, v).sum())(q)


def test_nothing_at_all():
    """No sequence, no key, no token in any cache."""
    q, k, v = draw(0, 2, 9)
    assert decode_attention(q, k, v).shape == (0, 2, 4, 16)
    q, k, v = draw(2, 2, 0)
    out, lse = decode_attention(q, k, v, return_residual=True)
    assert not np.any(out) and np.isneginf(lse).all()
    q, k, v = draw(2, 2, 9)
    out, lse = decode_attention(q, k, v, np.zeros(2, np.int32), sinks=np.ones(4, np.float32), return_residual=True)
    assert not np.any(out) and (np.asarray(lse) == 1).all()


def test_wild_lengths_read_nothing_outside():
    q, k, v = draw(4, 2, 40)
    wild = jnp.array([2147483647, -5, 41, -2147483648], jnp.int32)
    clamped = np.array([40, 0, 40, 0], np.int32)
    jax.tree.map(np.testing.assert_array_equal, decode(q, k, v, wild), decode(q, k, v, clamped))


def test_shapes_past_two_to_the_31_elements_lower():
    q, kv = jax.ShapeDtypeStruct((2, 1, 8, 128), "bfloat16"), jax.ShapeDtypeStruct((2, 2**22, 8, 128), "bfloat16")
    text = jax.jit(decode_attention).lower(q, kv, kv, jax.ShapeDtypeStruct((2,), "int32")).as_text()
    assert "4194304" in text


def test_memory_does_not_grow_with_the_cache():
    def temporary(S):
        q, k = jax.ShapeDtypeStruct((2, 1, 8, 64), "bfloat16"), jax.ShapeDtypeStruct((2, S, 8, 64), "bfloat16")
        v = jattn.Quantized(jax.ShapeDtypeStruct(k.shape, "int8"), jax.ShapeDtypeStruct(k.shape[:3], "float32"))
        return jax.jit(decode_attention).lower(q, k, v).compile().memory_analysis().temp_size_in_bytes

    assert temporary(65536) <= temporary(4096) + 4096


def test_explain():
    told = jattn.explain(*draw(), op="decode_attention")
    assert told.implementation == "xla" and "decode_attention: B=3 T=2 S=300" in repr(told)


Q, KEY, VALUE = draw()
DENSE = np.ones((2, 300), bool)
COLUMNS = masks.predicate(lambda b, n, t, s, a: a > 0, np.ones(300, np.float32))
TABLE = mods.relative_bias(np.ones((1, 9), np.float32))
ADDED = mods.score_mod(lambda x, b, n, t, s, a: x + a, np.ones(300, np.float32))
WRONG = jattn.Quantized(np.int8(KEY), np.ones(3, np.float32))


@pytest.mark.parametrize(
    "call, error, words",
    [
        (lambda: decode_attention(Q[:, :0], KEY, VALUE), ValueError, "query length T=0 must be from 1 to 64"),
        (lambda: decode_attention(np.tile(Q, (1, 33, 1, 1)), KEY, VALUE), ValueError, "T=66 must be from 1 to 64"),
        (lambda: decode_attention(jnp.bfloat16(Q), KEY, VALUE), TypeError, "key dtype float32 must equal query's"),
        (lambda: decode_attention(np.int32(Q), KEY, VALUE), TypeError, "query has dtype int32; expected one of"),
        (lambda: decode_attention(Q, KEY[..., :8], VALUE), ValueError, "key head dim H=8 must equal query's H=16"),
        (lambda: decode_attention(Q, KEY, VALUE[:, :9]), ValueError, r"value has shape \(3, 9, 2, 16\); all but its"),
        (lambda: decode_attention(Q[:2], KEY, VALUE), ValueError, r"key has shape \(3, 300, 2, 16\); expected \[\*B"),
        (lambda: decode_attention(Q[:, :, :3], KEY, VALUE), ValueError, "query heads N=3 must be a multiple of key"),
        (lambda: decode_attention(Q, KEY, VALUE, [301, 1, 1]), ValueError, r"lengths=\[301, 1, 1\] must be <= 300"),
        (lambda: decode_attention(Q, KEY, VALUE, [1, 1]), ValueError, r"lengths has shape \(2,\); expected"),
        (lambda: decode_attention(Q, KEY, VALUE, mask=DENSE), NotImplementedError, "indexed by the columns of key"),
        (lambda: decode_attention(Q, KEY, VALUE, mask=COLUMNS), NotImplementedError, "aux must not have rows or"),
        (lambda: decode_attention(Q, KEY, VALUE, score_mod=TABLE), NotImplementedError, "relative_bias.* is not impl"),
        (lambda: decode_attention(Q, KEY, VALUE, score_mod=ADDED), NotImplementedError, "aux must not have rows or"),
        (lambda: decode_attention(Q, KEY, VALUE, logits_soft_cap=0), ValueError, "logits_soft_cap=0 must be > 0"),
        (lambda: decode_attention(Q, jattn.Quantized(KEY, KEY), VALUE), TypeError, "key: dtype=float32 must be one of"),
        (lambda: decode_attention(Q, WRONG, VALUE), ValueError, r"key: scale has shape \(3,\); expected one of"),
        (lambda: decode_attention(Q, KEY, VALUE, implementation="cudnn"), ValueError, "from 'mosaic', 'xla' or None"),
        (lambda: decode_attention(Q, KEY, VALUE, config=8), TypeError, "config=8 is not a"),
    ],
)
def test_refused(call, error, words):
    with pytest.raises(error, match=words):
        call()

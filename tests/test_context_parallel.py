"""A sequence's cache, or the tokens of a recurrence, spread over devices: the results and gradients of one device."""

import collections
import dataclasses
import functools

import baseline_linear
import caches
import compare
import jax
import jax.numpy as jnp
import linear_cases
import numpy as np
import oracle
import oracle_linear
import pytest
from caches import JUNK, draw, hold, poisoned, problem
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jattn
from benchmarks import communication
from jattn import linear, masks
from jattn.reference.spread import Place
from jattn.sequence import SequenceLayout

LENGTHS = np.array([300, 1, 0, 263], np.int32)
S = 304


@pytest.fixture(autouse=True, scope="module")
def _compile_less():
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


def mesh_of(mode=AxisType.Auto, **axes):
    devices = np.array(jax.devices()[: int(np.prod(list(axes.values())))]).reshape(tuple(axes.values()))
    return Mesh(devices, tuple(axes), axis_types=(mode,) * len(axes))


def put(mesh, x, *spec):
    return jax.tree.map(lambda a: jax.device_put(a, NamedSharding(mesh, P(*spec))), x)


def equal(got, want):
    jax.tree.map(np.testing.assert_array_equal, got, want)


# Contiguous caches.


def decode(q, k, v, lengths, kind, devices, **options):
    """Through a cache in layout order, with NaN where there is no token."""
    layout = SequenceLayout(kind, devices)
    k, v = (layout.shard(poisoned(x, lengths)) for x in (k, v))
    return jattn.sequence_decode_attention(
        q, k, v, lengths, axis="sp", layout=layout, mesh=mesh_of(sp=devices), return_residual=True, **options
    )


def nearer(x, b, n, t, s):
    return x - 0.01 * (t - s).astype(x.dtype) * (n + b + 1).astype(x.dtype)


NEARER = oracle.ScoreMod(lambda x, b, n, t, s: x - 0.01 * (t - s) * (n + b + 1), None)
PARENTS, COUNTS = np.array([-1, 0, 0], np.int32), np.array([3, 1, 0, 2], np.int32)


def _of_the_tree(b, n, row, t, s):
    node = s - (t - row)
    return (node < 0) | (node == row) | (node == np.where(row > 0, 0, -1))


SINKS = np.float32([0, 1, -1, 2])
FEATURES = {
    "causal, sinks": (dict(sinks=SINKS), dict(sinks=SINKS)),
    "window, cap": (
        dict(local_window_size=(40, 0), logits_soft_cap=5.0),
        dict(rule=lambda b, n, row, t, s: s >= t - 40, soft_cap=5.0),
    ),
    "modifier, all keys": (
        dict(score_mod=nearer, is_causal=False),
        dict(score_mod=NEARER, causal=False),
    ),
    "tree, fewer queries": (
        dict(mask=masks.tree(PARENTS), query_seq_lengths=COUNTS),
        dict(rule=_of_the_tree, query_lengths=COUNTS),
    ),
}


@pytest.mark.parametrize(
    "feature, kind, devices, dtype",
    [
        ("causal, sinks", "striped", 8, "bfloat16"),
        ("window, cap", "zigzag", 4, "float32"),
        ("modifier, all keys", "contiguous", 2, "float32"),
        ("tree, fewer queries", "zigzag", 8, "float32"),
        ("tree, fewer queries", "contiguous", 1, "float16"),
    ],
)
def test_every_feature(feature, kind, devices, dtype):
    """Masks and modifiers know where in the sequence every key is; a sink counts once; tokens of nobody are NaN."""
    options, truth = FEATURES[feature]
    q, k, v = draw(4, 3, S, dtype=dtype)
    hold(
        decode(q, k, v, LENGTHS, kind, devices, **options), problem(q, k, v, LENGTHS, **truth),
        nearer if "score_mod" in options else None,
    )  # fmt: skip


@pytest.mark.parametrize("T", [1, 2])
def test_every_length(T):
    """No token to all 48, in sixteen layouts of the queries' tokens: devices with none, with some, with all theirs."""
    lengths = np.arange(49, dtype=np.int32)
    q, k, v = draw(49, T, 48)
    hold(decode(q, k, v, lengths, "striped", 4), problem(q, k, v, lengths))


def test_one_small_message_and_the_same_bits():
    """(out, lse) in float32, to all others. A sequence alone has the bits it has in a batch, and on every device."""
    q, k, v = draw(4, 3, S)
    layout, mesh = SequenceLayout("striped", 4), mesh_of(sp=4)
    attend = functools.partial(jattn.sequence_decode_attention, axis="sp", layout=layout, return_residual=True)
    k, v = layout.shard(k), layout.shard(v)
    together, alone = (attend(*x, mesh=mesh) for x in ((q, k, v, LENGTHS), (q[3:], k[3:], v[3:], LENGTHS[3:])))
    equal(alone, tuple(x[3:] for x in together))
    program = jax.jit(functools.partial(attend, mesh=mesh)).lower(q[3:], k[3:], v[3:], LENGTHS[3:]).compile()
    assert communication.executed(program.as_text()) == {("all-gather", 3 * 3 * 4 * (16 + 1) * 4): 1}
    shards = [s.data for x in together for s in x.addressable_shards]
    assert len(shards) == 8
    equal(shards[:4], shards[:1] * 4)
    equal(shards[4:], shards[4:5] * 4)


def test_places_are_those_of_layouts_and_grow_evenly():
    """Every token has one slot, in order on its device; with pages in turn two devices differ by one page at most."""
    for kind, size in [("contiguous", 4), ("striped", 4), ("zigzag", 4), ("zigzag", 3)]:
        layout = SequenceLayout(kind, size)
        place = Place(1 if kind == "striped" else 48 // layout.multiple, size, kind == "zigzag")
        slots, device = np.arange(48 // size), np.arange(size)[:, None]
        own = np.stack([layout.positions(48, r) for r in range(size)])
        np.testing.assert_array_equal(place.position(slots, device), own)
        counts = place.count(np.arange(49), device)
        np.testing.assert_array_equal(counts, (own[:, None] < np.arange(49)[:, None]).sum(-1))
    counts = np.asarray(Place(16, 4).count(np.arange(1000), np.arange(4)[:, None]))
    assert (counts.sum(0) == np.arange(1000)).all() and (np.ptp(counts, axis=0) <= 16).all()


# Pages.


def spread(k, v, lengths, devices, page_size=16, seed=0):
    """As `caches.paged`: random pages, those of column w on device w mod `devices`, and junk wherever it may be."""
    rng = np.random.default_rng(seed)
    used = -(-np.asarray(lengths) // page_size)
    column = [w for n in used for w in range(n)]
    own = max(collections.Counter(w % devices for w in column).values(), default=0) + 1
    tables = rng.choice(JUNK, (len(used), -(-jax.tree.leaves(k)[0].shape[1] // page_size))).astype(np.int32)
    free = [iter(d * own + rng.permutation(own)) for d in range(devices)]
    for b, n in enumerate(used):
        tables[b, :n] = [next(free[w % devices]) for w in range(n)]
    return caches.paged(k, v, lengths, page_size, extra=devices * own - int(used.sum()), tables=tables)


def place(mesh, cache):
    """The cache on its devices."""
    pools = [
        jax.tree.map(lambda x: put(mesh, x, *["sp"] * (x.ndim > 2)), p) for p in (cache.key_pages, cache.value_pages)
    ]
    return jattn.PagedCache(*pools, *put(mesh, (cache.block_tables, cache.lengths)))


@pytest.mark.parametrize("devices, page_size", [(8, 16), (2, 64)])
def test_pages(devices, page_size):
    """With a width of tables that the devices do not divide."""
    q, k, v = draw(4, 2, S, dtype="bfloat16")
    cache, mesh = spread(k, v, LENGTHS, devices, page_size), mesh_of(sp=devices)
    assert jattn.debug.check_cache(cache) is None
    got = jattn.sequence_paged_attention(
        q, place(mesh, cache), axis="sp", sinks=SINKS, local_window_size=(100, None), return_residual=True
    )
    hold(got, problem(q, k, v, LENGTHS, lambda b, n, row, t, s: s >= t - 100, sinks=SINKS))


def test_chunked_prefill():
    """Any number of queries a sequence, packed; rows of nobody give 0 and -inf."""
    _, k, v = draw(4, 1, S)
    cu = np.array([0, 20, 21, 21, 60], np.int32)
    q = draw(1, 64, S)[0][0]
    q[60:] = np.nan
    cache, mesh = spread(k, v, LENGTHS, 4), mesh_of(sp=4)
    out, lse = jattn.sequence_paged_attention(q, cache, cu, axis="sp", mesh=mesh, sinks=SINKS, return_residual=True)
    for m in (0, 1, 3):
        rows = slice(int(cu[m]), int(cu[m + 1]))
        p = problem(q[None, rows], k[m : m + 1], v[m : m + 1], LENGTHS[m : m + 1], sinks=SINKS)
        hold((out[None, rows], lse[None, rows]), p)
    assert not np.any(out[60:]) and np.isneginf(lse[60:]).all()


def test_one_query_of_a_quantised_cache():
    q, k, v = draw(4, 1, S)
    k, v = jattn.quantize(k, "int8"), jattn.quantize(v, "int8")
    cache = spread(k, v, LENGTHS, 4)
    got = jattn.sequence_paged_attention(
        q, place(mesh_of(sp=4), cache), axis="sp", return_residual=True, implementation="xla"
    )
    hold(got, problem(q, caches.dequantized(k), caches.dequantized(v), LENGTHS))


def test_append_is_append():
    """Every page of every device is what `append` makes of it, and no message is sent."""
    _, k, v = draw(4, 1, S)
    cache, mesh = dataclasses.replace(spread(k, v, np.full(4, S), 4), lengths=jnp.asarray(LENGTHS // 2)), mesh_of(sp=4)
    counts = np.array([154, 3, 40, 0], np.int32)
    new = np.random.default_rng(1).standard_normal((2, counts.sum(), 2, 16)).astype(np.float32)
    options = dict(cu_seqlens=np.cumsum([0, *counts]), rotate=jattn.rope)
    append = jax.jit(functools.partial(jattn.sequence_append, axis="sp", mesh=mesh, **options))
    program = append.lower(place(mesh, cache), *new).compile()
    assert not communication.executed(program.as_text())
    equal(program(place(mesh, cache), *new), jattn.append(cache, *new, **options))


# Meshes.


@pytest.mark.parametrize("mode", [AxisType.Auto, AxisType.Explicit])
def test_heads_stay(mode):
    """Over another axis: an all-reduce of (out, lse) of a device's own heads, in a place for each device."""
    q, k, v = draw(4, 3, S)
    layout, mesh = SequenceLayout("striped", 4), mesh_of(mode, sp=4, tp=2)
    x = put(mesh, q, None, None, "tp"), *put(mesh, (layout.shard(k), layout.shard(v)), None, "sp", "tp")
    attend = functools.partial(
        jattn.sequence_decode_attention, axis="sp", layout=layout, return_residual=True, mesh=mesh
    )
    with jax.set_mesh(mesh):
        program = jax.jit(attend).lower(*x, jnp.asarray(LENGTHS)).compile()
        out, lse = program(*x, jnp.asarray(LENGTHS))
    sent = 2 * 3 * 4 * 3 * 2 * (16 + 1) * 4  # an all-reduce sends as much back
    assert communication.executed(program.as_text()) == collections.Counter({("all-reduce", sent): 1})
    assert out.sharding.is_equivalent_to(x[0].sharding, 4)
    hold((out, lse), problem(q, k, v, LENGTHS))


def test_a_step_of_serving_inside_a_shard_map():
    """Batch over one axis, pages over the other, varying axes checked: the results are the same over the second."""
    q, k, v = draw(4, 2, S)
    mesh = mesh_of(data=2, sp=4)
    before = LENGTHS - np.minimum(LENGTHS, 2)
    halves = [spread(k[i : i + 2], v[i : i + 2], LENGTHS[i : i + 2], 4) for i in (0, 2)]
    halves = [
        dataclasses.replace(c, lengths=jnp.asarray(before[i : i + 2])) for c, i in zip(halves, (0, 2), strict=True)
    ]
    own = [c.num_pages // 4 for c in halves]

    def one(pools, d, n):  # every pool of a device with as many pages as the largest
        return np.pad(pools[d * n : (d + 1) * n], [(0, max(own) - n)] + [(0, 0)] * 3)

    pools = [
        np.concatenate(
            [one(np.asarray(getattr(c, name)), d, n) for c, n in zip(halves, own, strict=True) for d in range(4)]
        )
        for name in ("key_pages", "value_pages")
    ]
    tables = np.concatenate(
        [
            np.where(np.isin(t := np.asarray(c.block_tables), JUNK), t, t // n * max(own) + t % n)
            for c, n in zip(halves, own, strict=True)
        ]
    )
    cache = jattn.PagedCache(*pools, tables, before)
    counts = np.minimum(LENGTHS, 2)
    last = np.clip(LENGTHS[:, None] - counts[:, None] + np.arange(2), 0, S - 1)
    new = [np.take_along_axis(x, last[..., None, None], 1) for x in (k, v)]

    def step(cache, q, k, v, counts):
        cache = jattn.sequence_append(cache, k, v, axis="sp", seq_lengths=counts)
        return jattn.sequence_paged_attention(q, cache, axis="sp", query_seq_lengths=counts, return_residual=True)

    specs = jattn.PagedCache(P(("data", "sp")), P(("data", "sp")), P("data"), P("data"))
    mapped = jax.shard_map(step, mesh=mesh, in_specs=(specs, *[P("data")] * 4), out_specs=P("data"))
    hold(jax.jit(mapped)(cache, q, *new, counts), problem(q, k, v, LENGTHS, query_lengths=counts))


def test_a_mesh_that_no_array_knows():
    """Given by name alone, and with Explicit axes, as `jax.make_mesh` makes them."""
    mesh = jax.make_mesh((2,), ("sp",))
    assert mesh.explicit_axes
    q, k, v = draw(2, 2, 16)
    hold(
        jattn.sequence_decode_attention(q, k, v, axis="sp", mesh=mesh, return_residual=True),
        problem(q, k, v, [16, 16]),
    )
    hold(
        jattn.ring_attention(k, k, v, axis="sp", mesh=mesh, is_causal=True, return_residual=True),
        problem(k, k, v, [16, 16]),
    )


def test_eager_calls_compile_once():
    q, k, v = draw(2, 1, 16)
    attend = functools.partial(jattn.sequence_decode_attention, axis="sp", mesh=mesh_of(sp=2), mask=masks.prefix(3))
    attend(q, k, v)
    with jax.no_tracing():
        attend(q, k, v)


def test_nothing_to_attend_to():
    q, k, v = draw(2, 2, 0)
    mesh = mesh_of(sp=2)
    out, lse = jattn.sequence_decode_attention(q, k, v, axis="sp", mesh=mesh, return_residual=True)
    assert not np.any(out) and np.isneginf(lse).all()
    cache = jattn.PagedCache.zeros(0, 16, 2, 16, sequences=2, pages_per_sequence=4)
    cache = jattn.sequence_append(cache, k, v, axis="sp", mesh=mesh)
    out, lse = jattn.sequence_paged_attention(q, cache, axis="sp", mesh=mesh, return_residual=True)
    assert not np.any(out) and np.isneginf(lse).all()


def _refusals():
    q, k, v = draw(2, 2, 48)
    mesh, cache = mesh_of(sp=4), spread(k, v, [48, 3], 4)
    odd = dataclasses.replace(cache, key_pages=cache.key_pages[:-1], value_pages=cache.value_pages[:-1])

    def contiguous(*x, **options):
        return jattn.sequence_decode_attention(*x, **(dict(axis="sp", mesh=mesh) | options))

    def pages(q, cache, **options):
        return jattn.sequence_paged_attention(q, cache, **(dict(axis="sp", mesh=mesh) | options))

    return [
        (lambda: contiguous(q, k[:, :47], v[:, :47]), ValueError, "key length S=47 must be a multiple of 4"),
        (lambda: contiguous(q, k[:, :44], v[:, :44], layout=SequenceLayout("zigzag", 4)), ValueError, "multiple of 8"),
        (lambda: contiguous(q, k, v, layout=SequenceLayout("zigzag", 2)), ValueError, "size of mesh axis 'sp', 4"),
        (lambda: contiguous(q, k, v, layout="striped"), TypeError, "must be a SequenceLayout"),
        (lambda: contiguous(q, k, v, axis="tp"), ValueError, r"axis='tp' is not an axis of the mesh, \('sp',\)"),
        (lambda: contiguous(q, k, v, axis=0), TypeError, "axis=0 must be the name of a mesh axis"),
        (lambda: contiguous(q, k, v, mesh=None), ValueError, "no mesh: call inside a shard_map"),
        (lambda: contiguous(q, k, v, [49, 0]), ValueError, r"lengths=\[49, 0\] must be <= 48"),
        (lambda: contiguous(q, k, v, query_seq_lengths=3), ValueError, "query_seq_lengths=3 must be <= 2"),
        (lambda: contiguous(q[:, :0], k, v), ValueError, "query length T=0 must be from 1 to 64"),
        (lambda: contiguous(put(mesh, draw(4)[0], "sp"), k, v), ValueError, "tokens|shape"),
        (lambda: contiguous(put(mesh, q, None, None, "sp"), k, v), ValueError, "query is sharded as .*do not shard it"),
        (lambda: contiguous(q, put(mesh, k, None, None, None, "sp"), v), ValueError, "shard its tokens alone"),
        (lambda: contiguous(q, k, v, mask=np.ones((2, 48), bool)), NotImplementedError, "indexed by the columns"),
        (lambda: contiguous(q, k, v, implementation="pallas"), ValueError, "implementation='pallas' is unknown"),
        (lambda: contiguous(q, k, v, implementation="mosaic"), NotImplementedError, "knows no positions of keys"),
        (lambda: contiguous(q[:, :1], k, v, implementation="mosaic"), NotImplementedError, "not float32"),
        (lambda: contiguous(q, k, v, dropout_rate=0.5), TypeError, "dropout_rate"),
        (lambda: pages(q, odd), ValueError, "num_pages=.* must be a multiple of 4, the size of mesh axis 'sp'"),
        (lambda: pages(q, k), TypeError, "cache must be a jattn.PagedCache"),
        (lambda: pages(q, cache, axis="tp"), ValueError, "axis='tp' is not an axis"),
        (
            lambda: pages(q, dataclasses.replace(cache, lengths=put(mesh_of(sp=2), cache.lengths, "sp"))), ValueError,
            "lengths is sharded as .*do not shard it over 'sp'",
        ),
        (
            lambda: jax.grad(lambda q: contiguous(q, k, v).sum())(q), NotImplementedError,
            "sequence_decode_attention has no derivatives",
        ),
    ]  # fmt: skip


def test_refused():
    for call, error, message in _refusals():
        with pytest.raises(error, match=message):
            call()
            pytest.fail(f"{message} was not refused")


def test_what_varies_is_refused_inside_a_shard_map():
    q, k, v = draw(4, 1, 16)
    attend = functools.partial(jattn.sequence_decode_attention, axis="sp")
    mapped = jax.shard_map(attend, mesh=mesh_of(sp=4), in_specs=(P("sp"), *[P(None, "sp")] * 2), out_specs=P("sp"))
    with pytest.raises(ValueError, match="query varies over 'sp', but all devices need the same: gather it"):
        mapped(np.concatenate([q] * 4), k, v)


def test_explain():
    """What runs on a device is what the call itself is resolved to, without running it."""
    q, k, v = (jax.ShapeDtypeStruct((2, n, heads, 16), jnp.bfloat16) for n, heads in ((64, 8), (64, 4), (64, 4)))
    one, mesh, two = jax.ShapeDtypeStruct((2, 1, 8, 16), q.dtype), mesh_of(sp=4), mesh_of(sp=2, tp=4)
    explain = functools.partial(jattn.explain, axis="sp", mesh=mesh)
    ring, auto = (explain(q, k, v, op=f"{name}_attention", is_causal=True) for name in ("ring", "sequence"))
    assert (ring.strategy, ring.reasons["ring"], auto.strategy) == ("ring", "asked for", "ulysses")
    assert "not ulysses: auto would take it: a device sends 0.75 times what a ring sends" in repr(ring)
    assert "not ring: a device would send more, in 3 of 3 steps" in repr(auto)
    assert [(e.on_device.implementation, e.on_device.problem.T) for e in (ring, auto)] == [("xla", 16), ("xla", 64)]
    assert explain(q, k, v, op="sequence_attention", strategy="allgather").on_device.problem.S == 64
    hybrid = jattn.explain(q, k, v, op="hybrid_attention", axes=("sp", "tp"), mesh=two)
    assert "a ring over 'sp', tokens for heads over 'tp'" in repr(hybrid) and hybrid.on_device.problem.N == 2
    plain, windowed = (explain(one, k, v, op="sequence_decode_attention", local_window_size=w) for w in (None, (9, 0)))
    assert plain.on_device.problem.op == "decode_attention" and "mosaic" in plain.on_device.refused
    assert windowed.on_device.problem.op == "sequence_decode_attention" and windowed.strategy == "merge"
    real = put(mesh, jnp.zeros(q.shape, q.dtype), None, "sp")
    assert jattn.explain(real, real, real, op="ring_attention", axis="sp").on_device.problem.S == 16
    with pytest.raises(ValueError, match="query length T=63 must be a multiple of 4"):
        explain(*[jax.ShapeDtypeStruct((2, 63, 4, 16), q.dtype)] * 3, op="ring_attention")
    with pytest.raises(ValueError, match="strategy='best' is unknown"):
        explain(q, k, v, op="sequence_attention", strategy="best")


# Linear attention.


def linear_call(op, p, x, **options):
    """`op` of the whole sequence over a mesh axis, as `linear_cases.call` has it on one device."""
    x = dict(x)
    if op not in linear_cases.BY_CHANNEL:
        x |= {name: x[name][..., 0] for name in ("g", "dt_bias") if name in x}
    if op in linear_cases.DELTA:
        options |= dict(qk_l2norm=p.qk_l2norm, beta_activation=p.beta_activation)
    if op in ("kda", "gated_delta_rule"):
        options |= dict(gate=p.gate, lower_bound=p.lower_bound)
    if p.resets is not None:
        options |= dict(segment_ids=np.cumsum(p.resets, axis=1, dtype=np.int32))
    tokens = [x.pop(n) for n in ("query", "key", "value")]
    return jattn.sequence_linear_attention(
        op, *tokens, x.pop("g", None), x.pop("beta", None), axis="sp", scale=p.scale, **x, **options
    )


def segments(T, at):
    found = np.zeros((2, T), bool)
    found[0, at] = True
    return found


RECURRENT = dict(mode="recurrent")
RAW = dict(gate="bounded", qk_l2norm=True, beta_activation="sigmoid")
LINEAR = {
    "kda, segments": ("kda", 4, dict(T=96, gates="slow", qk_l2norm=True, resets=segments(96, [5, 48])), RECURRENT),
    "gated delta rule, gates": ("gated_delta_rule", 8, dict(T=64, **RAW), RECURRENT),
    "gla": ("gla", 4, dict(T=64, gates="forgetting"), {}),
}


@pytest.mark.parametrize("name", LINEAR)
def test_linear(name):
    """Outputs, final state and every gradient; forward one all-gather of maps (and of ids one neighbour's)."""
    op, devices, fields, options = LINEAR[name]
    p, mesh = linear_cases.problem(op, H=8, D=12, **fields), mesh_of(sp=devices)
    dout, dfinal = linear_cases.cotangents(p)

    def run(x, dout, dfinal):
        found, pull = jax.vjp(lambda x: linear_call(op, p, x, mesh=mesh, return_final_state=True, **options), x)
        return found, pull((dout, dfinal))[0]

    program = linear_cases.quickly(run).lower(p.arrays(), dout, dfinal).compile()
    (out, state), got = program(p.arrays(), dout, dfinal)
    out_truth, states = oracle_linear.forward(p)
    truth = oracle_linear.backward(p, dout, dfinal) | {"out": out_truth, "state": states[-1]}
    yards = list(baseline_linear.gradients(p, dout, dfinal))
    linear_cases.hold(name, got | {"out": out, "state": state}, truth, yards, p.query.dtype)
    sent = communication.executed(program.as_text())
    columns = 12 + (8 if op in linear_cases.DELTA or p.resets is not None else 1)
    assert {n: c for (kind, n), c in sent.items() if kind == "all-gather"} == {
        (devices - 1) * 2 * 4 * 8 * columns * 4: 1
    }
    assert sum(c for (kind, _), c in sent.items() if kind == "collective-permute") == int(p.resets is not None)


def test_linear_inside_a_shard_map():
    """Batch over one axis, tokens over the other; the last device's state is the sequence's. With normalisation."""
    p, mesh = linear_cases.problem("linear_attention", T=32, H=8, D=12, state=False), mesh_of(data=2, sp=4)
    q, k, v = abs(p.query), abs(p.key), p.value
    op = functools.partial(jattn.sequence_linear_attention, "linear_attention", axis="sp")
    options = dict(normalize=True, return_final_state=True, state_layout="vk", mode="recurrent")

    def part(q, k, v):
        out, state = op(q, k, v, **options)
        return out, state[None]

    spec = P("data", "sp")
    mapped = jax.shard_map(part, mesh=mesh, in_specs=spec, out_specs=(spec, P("sp", "data")))
    out, states = jax.jit(mapped)(q, k, v)
    one, state = linear.linear_attention(q, k, v, **options)
    wide = [np.repeat(a, 4 // a.shape[2], 2).astype(np.float64) for a in (q, k, v)]
    q, k, v = wide[0], wide[1], np.concatenate([wide[2], np.ones_like(wide[2][..., :1])], -1)
    sums = np.cumsum(k[..., None] * v[..., None, :], 1)
    both = np.einsum("btnh,btnhd->btnd", q, sums)
    compare.check("out", out, both[..., :-1] / both[..., -1:], [np.asarray(one)], np.float32)
    truth = np.swapaxes(sums[:, -1], -1, -2)
    compare.check("state", states[-1], truth, [np.asarray(state)], np.float32)


@pytest.mark.parametrize("mode", [AxisType.Auto, AxisType.Explicit])
def test_linear_heads_stay(mode):
    """Heads over another axis: nothing of them is sent."""
    p, mesh = linear_cases.problem("gla", T=32, H=8, D=12, K=4), mesh_of(mode, sp=2, tp=2)
    x = [put(mesh, a, None, "sp", "tp") for a in (p.query, p.key, p.value, p.g)]
    state = put(mesh, p.initial_state, None, "tp")
    op = functools.partial(
        jattn.sequence_linear_attention, "gla", axis="sp", mesh=mesh, mode="recurrent", return_final_state=True
    )
    with jax.set_mesh(mesh):
        program = jax.jit(lambda *x: op(*x, initial_state=state)).lower(*x).compile()
        out, final = program(*x)
    want, last = oracle_linear.forward(p)
    one = linear_cases.call("gla", p, mode="recurrent", return_final_state=True)
    for name, got, truth, yard in zip(("out", "state"), (out, final), (want, last[-1]), one, strict=True):
        compare.check(name, got, truth, [np.asarray(yard)], np.float32)
    sent = communication.executed(program.as_text())
    maps, last = (2 * 2 * 2 * 8 * columns * 4 for columns in (12 + 1, 12))
    assert sent == {("all-reduce", maps): 1, ("all-reduce", last // 2): 1}
    assert out.sharding.is_equivalent_to(x[2].sharding, 4)


def test_linear_refused():
    p, mesh = linear_cases.problem("kda", T=32, H=8, D=12), mesh_of(sp=4)
    x = p.arrays()
    tokens = [x[n] for n in ("query", "key", "value", "g", "beta")]

    def kda(*tokens, **options):
        return jattn.sequence_linear_attention("kda", *tokens, **dict(axis="sp", mesh=mesh) | options)

    for call, message in [
        (lambda: kda(*[a[:, :30] for a in tokens]), "query length T=30 must be a multiple of 4"),
        (lambda: kda(tokens[0], *[a[:, :28] for a in tokens[1:]]), "key has shape .*; query has"),
        (lambda: kda(*tokens, axis="tp"), "axis='tp' is not an axis of the mesh"),
        (lambda: kda(*tokens, mesh=None), "no mesh"),
        (lambda: kda(*tokens[:4]), "beta must be given to op='kda'"),
        (lambda: jattn.sequence_linear_attention("gla", *tokens, axis="sp", mesh=mesh), "beta must not be given"),
        (lambda: jattn.sequence_linear_attention("mamba", *tokens, axis="sp", mesh=mesh), "op='mamba' must be one of"),
        (lambda: kda(*tokens, cu_seqlens=[0, 32]), "cu_seqlens cannot be given over 'sp'.*segment_ids"),
        (lambda: kda(*tokens, checkpoints=[64]), "checkpoints cannot be given"),
        (lambda: kda(put(mesh, tokens[0], None, None, None, "sp"), *tokens[1:]), "query is sharded .*its tokens alone"),
        (lambda: kda(*tokens, initial_state=put(mesh, x["initial_state"], None, "sp")), "initial_state is sharded"),
    ]:
        with pytest.raises(ValueError, match=message):
            call()
            pytest.fail(f"{message} was not refused")
    with pytest.raises(TypeError, match="unexpected keyword argument 'gates'"):
        kda(*tokens, gates=1)
    assert kda(*[a[:, :0] for a in tokens]).shape == (2, 0, 4, 12)

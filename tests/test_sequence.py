"""Sequence parallelism is attention of the undivided sequence: every mask, feature, layout, strategy and gradient."""

import collections
import dataclasses
import functools
import itertools
import re

import cases
import compare
import jax
import numpy as np
import pytest
from cases import Case
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jattn
from benchmarks import communication
from jattn import masks, mods, sequence
from jattn._layout import path
from jattn._problem import Context, Differentiable, Options
from jattn._ring import Keys, Plan, Shard, map_mask
from jattn._varying import vary
from jattn.reference.attention import TileConfig, Walk
from jattn.sequence import SequenceLayout

KINDS = ("contiguous", "zigzag", "striped")
OPS = {
    name: getattr(sequence, f"{name}_attention") for name in ("ring", "allgather", "ulysses", "hybrid")
}


def mesh_of(mode=AxisType.Auto, **axes):
    count = int(np.prod(list(axes.values())))
    devices = np.array(jax.devices()[:count]).reshape(tuple(axes.values()))
    return Mesh(devices, tuple(axes), axis_types=(mode,) * len(axes))


def lay_out(layout, kwargs):
    """Arguments of `attention` with every array in layout order."""

    def rows(a):
        return layout.shard(a, -2) if a.ndim > 1 and a.shape[-2] != 1 else a

    def tokens(a):
        return None if a is None else layout.shard(a, -1)

    new = dict(kwargs)
    for name in ("query", "key", "value"):
        new[name] = layout.shard(kwargs[name], -3)
    if kwargs.get("bias") is not None:
        new["bias"] = rows(kwargs["bias"])
    mask, mod = kwargs.get("mask"), kwargs.get("score_mod")
    if mask is not None:
        new["mask"] = map_mask(mask, rows, tokens, tokens) if isinstance(mask, masks.Mask) else rows(mask)
    if "segment_ids" in kwargs:
        new["segment_ids"] = jax.tree.map(tokens, kwargs["segment_ids"])
    if getattr(mod, "kinds", ())[:1] == ("element",):
        new["score_mod"] = dataclasses.replace(mod, aux=tuple(map(rows, mod.aux)))
    return new


def parallel(strategy, layout, devices, kwargs):
    """`kwargs` in natural order through a sequence-parallel op; results in natural order."""
    if strategy == "hybrid":
        mesh, where = mesh_of(ring=layout.size, heads=devices // layout.size), dict(axes=("ring", "heads"))
    else:
        mesh, where = mesh_of(sp=devices), dict(axis="sp")
    out, lse = OPS[strategy](**lay_out(layout, kwargs), **where, mesh=mesh, layout=layout)
    return layout.unshard(out, -3), layout.unshard(lse, -2)


@functools.cache
def _prepared(case):
    x = cases.make_inputs(case)
    return x, cases.problem(case, x)


@pytest.fixture(scope="module", autouse=True)
def _compile_less():
    """The dense baseline of a case serves all layouts and strategies, and nothing runs often enough to be optimised."""
    jax.config.update("jax_disable_most_optimizations", True)
    compute, known = compare._baselines, {}

    def remembered(problem, *args):
        if id(problem) not in known:
            known[id(problem)] = list(compute(problem, *args))
        return known[id(problem)]

    compare._baselines = remembered
    yield
    compare._baselines = compute
    jax.config.update("jax_disable_most_optimizations", False)


def check(case, strategy, kind, devices, ring=None):
    """Outputs, lse and gradients obey the error rule of `attention` itself."""
    x, problem = _prepared(case)
    names = ("query", "key", "value", "bias", "sinks", "scale", "aux")
    primals = {n: x.get("poisoned_" + n, x[n]) for n in names}
    primals = {n: a for n, a in primals.items() if not (a is None or isinstance(a, tuple) and not a)}
    B, batch = cases.flat_batch(case), cases.batch_shape(case)
    layout = SequenceLayout(kind, ring or devices)

    def call(d):
        kwargs = cases.arguments(case, x | d | {"poisoned_" + n: a for n, a in d.items()})
        return parallel(strategy, layout, devices, kwargs)

    def flatten(name, a):
        per_batch = name in ("out", "lse", "query", "key", "value")
        return a.reshape(B, *a.shape[len(batch) :]) if per_batch else cases._flat_bias(case, a) if name == "bias" else a

    fn, aux = cases.baseline_score_mod(case, x, x["aux"])
    compare.attention(
        problem, call, primals, score_mod=fn, aux=aux, flatten=flatten, dout=x["dout"], dlse=x["dlse"],
        fold=(lambda a: cases.table_gradient(case, x, a)) if case.score_mod == "relative" else None,
    )


def _case(**fields):
    return Case(**(dict(T=64, S=64, G=2, K=2, H=16, D="less", dtype="float32", batch="2", dlse=True) | fields))


# Every mask, modifier and option, several at a time where they can go together.
FEATURES = {
    "causal, cap, sinks": _case(is_causal=True, soft_cap="5", sinks=True, heavy=True),
    "documents, prefix": _case(mask="prefix", segments="sorted", key_lengths=True, poison=True, bias="TS"),
    "window, relative bias": _case(window="16,0", score_mod="relative", batch="", S=128, offset="5", heavy=True),
    "windows, alibi, scale": _case(mask="window", score_mod="alibi", window="40,-2", scale="traced"),
    "dense, dropout": _case(mask="dense", dropout="0.5", bias="BNTS", query_lengths=True, sinks=True, poison=True),
    "blocks, dropout": _case(mask="blocks", dropout="0.1", is_causal=True, H=40),
    "predicate, offsets": _case(mask="predicate", offset="array", score_mod="aux", bias="1N1S", batch="1x2"),
    "or, end": _case(mask="or", offset="end", query_lengths=True, key_lengths=True, S=128, bias="BNT1"),
    "not, unsorted ids": _case(mask="not", segments="unsorted", score_mod="plain", bias="N11", dtype="bfloat16"),
    "tree, one key head": _case(mask="tree", bias="B1TS", minus_inf=True, G=4, K=1),
}
OTHERS = [
    ("hybrid", "zigzag", 8), ("ring", "striped", 8), ("allgather", "zigzag", 2), ("ulysses", "zigzag", 4),
    ("ring", "contiguous", 4), ("allgather", "striped", 4),
]  # fmt: skip


def _spread():
    """Every feature on a zigzag ring and on one of the others, which all get their turn."""
    others = itertools.cycle(OTHERS)
    for i, name in enumerate(FEATURES):
        yield from ((name, *run) for run in (("ring", "zigzag", 4 if i % 3 == 0 else 2), next(others)))


@pytest.mark.parametrize("name, strategy, kind, devices", list(_spread()))
def test_every_feature(name, strategy, kind, devices):
    """A strategy that fills the axis, and a hybrid of two devices a ring and the rest for heads."""
    check(FEATURES[name], strategy, kind, devices, ring=2 if strategy == "hybrid" else None)


@pytest.mark.parametrize("devices, fields", [
    (2, dict(segments="sorted")), (4, dict(is_causal=True, segments="unsorted", soft_cap="5", scale="traced")),
])  # fmt: skip
def test_a_zigzag_ring_where_order_decides_alone(devices, fields):
    """Segments, and with a causal mask: one rectangle for the keys of a device, its own, one before and one after."""
    check(_case(**fields), "ring", "zigzag", devices)


@pytest.mark.parametrize(
    "dtype, devices", [("bfloat16", 1), ("bfloat16", 2), ("bfloat16", 4), ("bfloat16", 8), ("float32", 8)]
)
def test_the_error_does_not_grow_with_the_devices(devices, dtype):
    """One rule, one constant, however many partial results are merged (and diffusers #14265: gradients of a ring)."""
    check(_case(is_causal=True, heavy=True, T=1024, S=1024, dtype=dtype), "ring", "contiguous", devices)


def test_runs_of_heads():
    """A device has heads of two runs, with their sinks, biases and masks."""
    case = _case(is_causal=True, sinks=True, mask="dense", bias="BNTS", G=3, K=4)
    check(case, "ulysses", "zigzag", 2)


@pytest.mark.parametrize("strategy", ["allgather", "ulysses", "hybrid"])
def test_eight_devices(strategy):
    case = _case(is_causal=True, segments="sorted", sinks=True, dtype="bfloat16", G=4, K=2)
    check(case, strategy, "contiguous" if strategy == "ulysses" else "zigzag", 8, 4 if strategy == "hybrid" else None)


# Layouts.


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_a_layout_says_where_tokens_are(kind, size):
    layout = SequenceLayout(kind, size)
    order = np.asarray(layout.positions(64))
    assert sorted(order) == list(range(64))
    x = np.random.default_rng(0).standard_normal((2, 64, 3)).astype(np.float32)
    np.testing.assert_array_equal(layout.shard(x), x[:, order])
    np.testing.assert_array_equal(layout.unshard(layout.shard(x, -2), 1), x)
    for r in range(size):
        np.testing.assert_array_equal(layout.positions(64, r), np.split(order, size)[r])
    assert hash(layout) == hash(SequenceLayout(kind, size))


def test_layouts_are_those_of_the_papers():
    assert SequenceLayout("contiguous", 2).positions(8).tolist() == list(range(8))
    assert SequenceLayout("zigzag", 2).positions(8).tolist() == [0, 1, 6, 7, 2, 3, 4, 5]
    assert SequenceLayout("striped", 2).positions(8).tolist() == [0, 2, 4, 6, 1, 3, 5, 7]


@pytest.mark.parametrize("kind", KINDS)
def test_the_way_passes_all_that_is_visible_and_no_more(kind):
    """Against the definition, for windows of every size: whose keys does some device's query see."""
    layout, t, s = SequenceLayout(kind, 8), np.arange(64)[:, None], np.arange(128)
    for left, right in [(None, None), (None, 0), (7, 0), (8, 0), (0, 9), (30, 5), (-3, 20), (None, -40), (3, None)]:
        visible = (True if left is None else t - s <= left) & (True if right is None else s - t <= right)
        blocks = np.broadcast_to(visible, (64, 128))[layout.positions(64)][:, layout.positions(128)]
        seen = {(r - c) % 8 for r, c in np.argwhere(blocks.reshape(8, 8, 8, 16).any((1, 3)))}
        way = path(layout, 64, 128, left, right)
        assert seen <= {d % 8 for d in way} and way[0] == 0 and len(way) == len({d % 8 for d in way})
        if kind == "contiguous":
            assert {d % 8 for d in way} == seen | {0} | {d for d in range(8) if d < max(way) or d > min(way) % 8 > 0}
    assert path(SequenceLayout("contiguous", 8), 64, 64, 8, 0) == (0, 1)
    assert path(SequenceLayout("contiguous", 8), 64, 64, 8, 8) == (0, 1, -1)
    assert path(SequenceLayout("zigzag", 8), 64, 64, 4, 0) == (0, 1, -1)


# What is compiled.


def compiled(
    strategy, devices, kind="contiguous", *, backward=False, S=128, N=8, K=4, H=16, wrap=lambda f: f, **options
):
    mesh = mesh_of(sp=devices)
    layout = SequenceLayout(kind, devices)
    spec = P(None, "sp")

    def attend(*x):
        return OPS[strategy](*x, axis="sp", layout=layout, **options)

    attend = jax.shard_map(wrap(attend), mesh=mesh, in_specs=spec, out_specs=spec)
    shapes = [(1, S, heads, H) for heads in (N, K, K, N)]
    query, key, value, dout = (
        jax.ShapeDtypeStruct(shape, np.float32, sharding=NamedSharding(mesh, spec)) for shape in shapes
    )

    def both(q, k, v, dout):
        out, pull = jax.vjp(attend, q, k, v)
        return out, pull(dout)

    lowered = jax.jit(both).lower(query, key, value, dout) if backward else jax.jit(attend).lower(query, key, value)
    return lowered.compile()


def permutes(program):
    return sum(n for (kind, _), n in communication.executed(program.as_text()).items() if kind == "collective-permute")


@pytest.mark.parametrize("devices", [2, 4, 8])
def test_a_ring_sends_what_it_must(devices):
    """P - 1 permutes forward, P backward, nothing else, bytes as modelled; no other device's share of anything."""
    call = communication.Call(S=1088, N=8, K=4, H=16, itemsize=4)
    options = dict(is_causal=True, S=call.S, kind="contiguous")
    there, both = (compiled("ring", devices, backward=b, **options).as_text() for b in (False, True))
    want = [communication.messages("ring", call, devices, backward) for backward in (False, True)]
    forward, backward = (collections.Counter((m.kind, m.bytes) for m in messages) for messages in want)
    assert forward.total() == devices - 1 and backward.total() == devices
    assert communication.executed(there) == forward
    assert communication.executed(both) == forward + backward
    assert not re.search(r"[\[,]1088[\],]", both), "something is as long as the sequence"


@pytest.mark.parametrize("strategy, devices", [("allgather", 4), ("ulysses", 4), ("ulysses", 8)])
def test_the_others_send_what_is_modelled(strategy, devices):
    call = communication.Call(S=128, N=8, K=4, H=16, itemsize=4)
    found = communication.executed(compiled(strategy, devices, backward=True).as_text())
    want = [m for backward in (False, True) for m in communication.messages(strategy, call, devices, backward)]
    assert found == collections.Counter((m.kind, m.bytes) for m in want)


def test_an_all_reduce_sends_everything_twice():
    """Sums to the one that has them, and from there to all: 2 · (P - 1) / P of the array."""
    mesh = mesh_of(sp=4)
    sums = jax.jit(jax.shard_map(lambda x: jax.lax.psum(x, "sp"), mesh=mesh, in_specs=P("sp"), out_specs=P()))
    program = sums.lower(jax.ShapeDtypeStruct((64,), np.float32, sharding=NamedSharding(mesh, P("sp")))).compile()
    assert communication.executed(program.as_text()) == {("all-reduce", 2 * 3 * 4 * 4): 1}


@pytest.mark.parametrize("kind, window, way", [("contiguous", (16, 0), (0, 1)), ("zigzag", (8, 0), (0, 1, -1))])
def test_a_window_asks_neighbours_only(kind, window, way):
    assert path(SequenceLayout(kind, 8), 128, 128, *window) == way
    found = communication.executed(compiled("ring", 8, kind, backward=True, local_window_size=window).as_text())
    call = communication.Call(S=128, N=8, K=4, H=16, itemsize=4)
    want = [m for backward in (False, True) for m in communication.messages("ring", call, 8, backward, path=way)]
    assert found == collections.Counter((m.kind, m.bytes) for m in want)


def test_dense_masks_and_biases_are_cut_along_their_rows():
    """A device has its own rows of them and of the gradient, and nothing is sent for them."""
    mesh, S = mesh_of(sp=8), 272
    keys, rows = (NamedSharding(mesh, spec) for spec in (P(None, "sp"), P("sp")))
    x = [jax.ShapeDtypeStruct((1, S, 2, 16), np.float32, sharding=keys)] * 4
    x += [jax.ShapeDtypeStruct((S, S), dtype, sharding=rows) for dtype in (np.float32, bool)]

    def step(q, k, v, dout, bias, mask):
        return jax.vjp(lambda *x: jattn.ring_attention(*x, mask, axis="sp", mesh=mesh), q, k, v, bias)[1](dout)

    program = jax.jit(step).lower(*x).compile()
    found = set(re.findall(r"\[(?:\d+,)*272(?:,\d+)*\]", program.as_text()))
    assert "[34,272]" in found and not any(shape.count("272") > 1 for shape in found), found
    sent = communication.executed(program.as_text())
    assert {kind for kind, _ in sent} == {"collective-permute"} and sent.total() == 7 + 8
    assert program.output_shardings[3].is_equivalent_to(rows, 2)


def test_memory_does_not_know_the_sequence():
    """Eight times the sequence on eight times the devices: a device's memory stays."""
    one, eight = (
        compiled("ring", devices, backward=True, is_causal=True, S=512 * devices).memory_analysis().temp_size_in_bytes
        for devices in (2, 8)
    )
    assert eight < 1.2 * one


def test_the_next_keys_are_sent_before_the_work_they_hide_behind():
    def order(jaxpr):
        """Names of the primitives that matter, in program order, with those of inner programs in their place."""
        for equation in jaxpr.eqns:
            if equation.primitive.name in ("ppermute", "exp", "cond"):
                yield equation.primitive.name
            else:
                for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, "jaxpr")):
                    if hasattr(inner, "jaxpr"):
                        yield from order(inner.jaxpr)
                    elif hasattr(inner, "eqns"):
                        yield from order(inner)

    mesh, spec = mesh_of(sp=4), P(None, "sp")
    attend = functools.partial(jattn.ring_attention, is_causal=True, axis="sp")
    mapped = jax.shard_map(attend, mesh=mesh, in_specs=spec, out_specs=spec)
    q, k, v = cases.qkv(1, 16, 16)
    assert list(order(jax.make_jaxpr(mapped)(q, k, v).jaxpr)) == ["ppermute", "cond", "cond"]
    backward = list(order(jax.make_jaxpr(lambda *x: jax.vjp(mapped, *x)[1](x[0]))(q, k, v).jaxpr))[3:]
    assert backward == ["ppermute", "cond"] * 3


def test_checkpoint_policies_spare_the_ring():
    names = jax.checkpoint_policies.save_only_these_names("jattn_out", "jattn_lse")
    wrap = functools.partial(jax.checkpoint, policy=names)
    assert permutes(compiled("ring", 4, backward=True)) == 3 + 4
    assert permutes(compiled("ring", 4, backward=True, wrap=wrap)) == 3 + 4


def test_what_cannot_contribute_is_not_computed():
    """Keys that only later tokens see never meet a product: NaN there leaves no trace."""
    q, k, v = cases.qkv(1, 64, 64)
    k[:, 48:], v[:, 48:] = np.nan, np.nan
    out = jattn.ring_attention(q, k, v, is_causal=True, axis="sp", mesh=mesh_of(sp=4))
    assert np.isfinite(out[:, :48]).all() and np.isnan(out[:, 48:]).all()


@pytest.mark.parametrize("kind, worst", [("contiguous", 2.0), ("zigzag", 1.05), ("striped", 1.05)])
def test_causal_work_is_balanced(kind, worst):
    """Score tiles that each of eight devices visits; the most is at most `worst` times the mean."""
    layout, T, block = SequenceLayout(kind, 8), 4096, 32

    def tiles(q):
        arrays = Differentiable(q, None, None)
        context = Context(mask=masks.causal())
        options = Options(0.25, 0, None, None, 0, False, "xla", TileConfig(block, block), stride=layout.stride)
        keys = Keys(q, q)
        shard = Shard(Plan(layout, "sp", (), False, options), arrays, context, keys)

        def visits(i, j, source, total):
            def count(total):
                walk = Walk(*shard._rectangle(i, j, keys, source), options)
                return total + sum(walk.strip(r).count for r in range(-(-shard.rows // block)))

            return shard._if_visible(i, j, keys, source, count, total)

        total = vary(jax.numpy.int32(0), {"sp"})
        for source in range(8):
            for i, j in itertools.product(range(layout.pieces), repeat=2):
                total = visits(i, j, jax.numpy.int32(source), total)
        return total[None]

    spec = P(None, "sp")
    count = jax.jit(jax.shard_map(tiles, mesh=mesh_of(sp=8), in_specs=spec, out_specs=P("sp")))
    work = np.asarray(count(np.zeros((1, T, 1, 8), np.float32)))
    visible = np.tril(np.ones((T // block, T // block))).sum()
    assert work.sum() == pytest.approx(visible, rel=0.01 if kind != "striped" else 0.1)
    assert work.max() <= worst * work.mean() and (kind != "contiguous" or work.max() > 1.8 * work.mean())


# Bad input.


def _refusals():
    q, k, v = cases.qkv(1, 64, 64, N=8, K=4)
    mesh, zigzag = mesh_of(sp=4), SequenceLayout("zigzag", 4)

    def put(x, *spec):
        return jax.device_put(x, NamedSharding(mesh, P(*spec)))

    def ring(*x, **options):
        return lambda: jattn.ring_attention(*x, **(dict(axis="sp", mesh=mesh) | options))

    ring_of = {n: cases.qkv(1, n, n) for n in (2999, 60, 68)}
    sharded = [put(x, None, "sp") for x in (q, k, v)]
    bias = np.zeros((64, 64), np.float32)
    return {
        "length": (ring(*ring_of[2999]), "query length T=2999 must be a multiple of 4"),
        "zigzag length": (ring(*ring_of[60], layout=zigzag), r"T=60 must be a multiple of 8 = 2 · 4 for a zigzag"),
        "key length": (ring(ring_of[68][0], *ring_of[2999][1:]), "key length S=2999 must be a multiple of 4"),
        "axis": (ring(q, k, v, axis="tp"), r"axis='tp' is not an axis of the mesh, \('sp',\)"),
        "no mesh": (lambda: jattn.ring_attention(q, k, v, axis="sp"), "no mesh: call inside a shard_map"),
        "no axis": (ring(q, k, v, axis=None), "query is not sharded along T: name the axis"),
        "axes": (lambda: jattn.hybrid_attention(q, k, v, axes=("sp",)), r"axes=\('sp',\) must be two names"),
        "layouts": (ring(q, k, v, layout=(zigzag, SequenceLayout("striped", 4))), "must have one layout"),
        "layout size": (ring(q, k, v, layout=SequenceLayout("zigzag", 2)), "the size of mesh axis 'sp', 4"),
        "layout kind": (lambda: SequenceLayout("zigzig", 2), "kind='zigzig' is unknown; choose from 'contiguous'"),
        "layout count": (lambda: SequenceLayout("zigzag", 0), "size=0 must be a positive int"),
        "keys": (
            ring(sharded[0], put(k), put(v)), "sharded alike along their tokens, not query over 'sp', key over no axis"
        ),
        "heads": (ring(*(put(x, None, None, "sp") for x in (q, k, v))), "query is sharded as .*shard its tokens alone"),
        "bias": (ring(*sharded, put(bias, None, "sp")), "bias is sharded as .*shard its rows T alone over 'sp'"),
        "mask": (ring(*sharded, None, put(bias > 1, None, "sp")), "mask is sharded as .*rows T alone"),
        "sinks": (ring(*sharded, sinks=put(bias[:8, 0], "sp")), "sinks is sharded as .*do not shard it over 'sp'"),
        "head count": (
            lambda: jattn.ulysses_attention(*cases.qkv(1, 64, 64, N=6, K=2), axis="sp", mesh=mesh),
            "query heads N=6 must be a multiple of 4, the size of mesh axis 'sp'",
        ),
    }


def test_refused():
    for name, (call, message) in _refusals().items():
        with pytest.raises(ValueError, match=message):
            call()
            pytest.fail(f"{name} was not refused")


@pytest.mark.parametrize(
    "options, specs, message",
    [
        (dict(bias=np.zeros((64, 64), np.float32)), P(None, "sp"), r"bias has shape .*its rows T alone over 'sp'"),
        (dict(bias=np.zeros((64, 64), np.float32)), P(), r"bias has shape \(64, 64\) on a device: all T=64 rows"),
        (dict(mask=np.zeros((64, 64), bool)), P(None, "sp"), r"mask has shape \(64, 16\) on a device: its columns"),
        (dict(sinks=np.zeros(8, np.float32)), P("sp"), r"sinks have shape \(2,\) on a device.*do not shard them"),
    ],
)
def test_refused_inside_a_shard_map(options, specs, message):
    q, k, v = cases.qkv(1, 64, 64, N=8)
    (name, array), = options.items()

    def attend(q, k, v, x):
        return jattn.ring_attention(q, k, v, axis="sp", **{name: x})

    spec = P(None, "sp")
    mapped = jax.shard_map(attend, mesh=mesh_of(sp=4), in_specs=(spec, spec, spec, specs), out_specs=spec)
    with pytest.raises(ValueError, match=message):
        mapped(q, k, v, array)


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(axis="tp"), r"axis='tp' is not an axis of the mesh, \('sp',\)"),
        (dict(axis="sp", layout=SequenceLayout("zigzag", 4)), "T=60 must be a multiple of 8 = 2 · 4 for a zigzag"),
        (dict(axis="sp", layout=SequenceLayout("striped", 2)), "must have the size of mesh axis 'sp', 4"),
    ],
)
def test_wrong_axes_and_lengths_inside_a_shard_map(options, message):
    spec = P(None, "sp")
    attend = functools.partial(jattn.ring_attention, **options)
    with pytest.raises(ValueError, match=message):
        jax.shard_map(attend, mesh=mesh_of(sp=4), in_specs=spec, out_specs=spec)(*cases.qkv(1, 60, 60))


def test_refused_types():
    q, k, v = cases.qkv(1, 16, 16)
    attend = functools.partial(jattn.ring_attention, q, k, v, mesh=mesh_of(sp=2))
    for options, message in [
        (dict(axis="sp", window=3), r"unknown options \['window'\]: sequence-parallel ops take those of attention"),
        (dict(axis=("sp",)), r"axis=\('sp',\) must be the name of a mesh axis, not tuple"),
        (dict(axis="sp", layout="zigzag"), "layout='zigzag' must be a SequenceLayout, not str"),
        (dict(axis="sp", is_causal=1), "is_causal=1 must be a Python bool, not int"),
    ]:
        with pytest.raises(TypeError, match=message):
            attend(**options)


def test_second_derivatives_are_refused_with_a_sentence():
    q, k, v = cases.qkv(1, 16, 16)

    def f(q):
        return jattn.ring_attention(q, k, v, axis="sp", mesh=mesh_of(sp=2)).sum()

    with pytest.raises(NotImplementedError, match="second derivatives are not implemented"):
        jax.grad(lambda q: jax.grad(f)(q).sum())(q)


# Meshes.


@pytest.mark.parametrize("mode", [AxisType.Auto, AxisType.Explicit], ids=["Auto", "Explicit"])
def test_data_sequence_and_tensor_axes(mode):
    """Under jit other axes stay where they are: nothing is gathered, and dropout draws the bits of one device."""
    q, k, v = cases.qkv(2, 64, 64, N=8, K=4)
    options = dict(is_causal=True, dropout_rate=0.3, dropout_key=jax.random.key(0), local_window_size=(20, 0))
    layout, mesh, spec = SequenceLayout("zigzag", 2), mesh_of(mode, data=2, sp=2, heads=2), P("data", "sp", "heads")
    options["score_mod"] = lambda score, b, n, t, s: score + 0.1 * (b + n).astype(score.dtype)

    def loss(attend, q, k, v):
        out = attend(q, k, v, **options)
        return (out**2).sum(), out

    with jax.set_mesh(mesh):
        x = [jax.device_put(layout.shard(a), NamedSharding(mesh, spec)) for a in (q, k, v)]
        attend = functools.partial(jattn.ring_attention, axis="sp", layout=layout)
        step = jax.jit(jax.value_and_grad(functools.partial(loss, attend), (0, 1, 2), has_aux=True))
        program = step.lower(*x).compile()
        (_, out), gradients = program(*x)
    assert out.sharding.is_equivalent_to(NamedSharding(mesh, spec), 4)
    kinds = {kind for kind, _ in communication.executed(program.as_text())}
    assert kinds <= {"collective-permute", "all-reduce"}, kinds
    alone = jax.jit(jax.value_and_grad(functools.partial(loss, jattn.attention), (0, 1, 2), has_aux=True))
    (_, want), wanted = alone(q, k, v)
    for got, one in zip((out, *gradients), (want, *wanted), strict=True):
        np.testing.assert_allclose(layout.unshard(np.asarray(got)), one, atol=2e-5)


@pytest.mark.parametrize(
    "mode, strategy", [*((AxisType.Auto, s) for s in ("allgather", "ulysses", "hybrid")), (AxisType.Explicit, "hybrid")]
)
def test_heads_of_another_axis_do_not_travel(mode, strategy):
    """All that is sent is what the model says of a device's own heads, by permutes, and sums for gradients of sinks."""
    q, k, v = cases.qkv(1, 64, 64, N=16, K=8)
    sinks = np.linspace(-1, 1, 16, dtype=np.float32)
    two = strategy == "hybrid"
    names, where = (("ring", "near"), dict(axes=("ring", "near"))) if two else ("sp", dict(axis="sp"))
    mesh = mesh_of(mode, **(dict(ring=2, near=2) if two else dict(sp=4)), heads=2)
    layout, spec = SequenceLayout("zigzag", 2 if two else 4), P(None, names, "heads")

    def step(attend, q, k, v, sinks, dout):
        out, pull = jax.vjp(lambda *x: attend(*x[:3], sinks=x[3], is_causal=True), q, k, v, sinks)
        return out, *pull(dout)

    with jax.set_mesh(mesh):
        x = [jax.device_put(layout.shard(a), NamedSharding(mesh, spec)) for a in (q, k, v, q)]
        x.insert(3, jax.device_put(sinks, NamedSharding(mesh, P("heads"))))
        attend = functools.partial(OPS[strategy], layout=layout, **where)
        program = jax.jit(functools.partial(step, attend)).lower(*x).compile()
        got = program(*x)
    assert got[0].sharding.is_equivalent_to(NamedSharding(mesh, spec), 4)
    sent = communication.executed(program.as_text())
    call = communication.Call(S=64, N=8, K=4, H=16, itemsize=4)
    want = [m for b in (False, True) for m in communication.messages(strategy, call, 4, backward=b, heads=2)]
    assert {kind for kind, _ in sent} == {"collective-permute", "all-reduce"}
    assert sum(n * count for (kind, n), count in sent.items() if kind != "all-reduce") == sum(m.bytes for m in want)
    assert all(n <= 2 * 8 * 4 for kind, n in sent if kind == "all-reduce")
    alone = step(jattn.attention, q, k, v, sinks, q)
    for place, (g, w) in enumerate(zip(got, alone, strict=True)):
        np.testing.assert_allclose(g if place == 4 else layout.unshard(np.asarray(g)), w, atol=2e-5)


def test_inside_a_shard_map_over_all_axes():
    """With the check of varying axes on; parameters that every device holds get the sum of their gradients."""
    q, k, v = cases.qkv(2, 64, 64, N=8, K=4)
    sinks, table = np.linspace(-1, 1, 8, dtype=np.float32), np.linspace(-1, 1, 8 * 33, dtype=np.float32).reshape(8, 33)
    layout, mesh, spec = SequenceLayout("zigzag", 2), mesh_of(data=2, sp=2, heads=2), P("data", "sp", "heads")

    def loss(attend, q, k, v, sinks, table, scale):
        out, lse = attend(
            q, k, v, sinks=sinks, score_mod=mods.relative_bias(table), scale=scale, is_causal=True, return_residual=True
        )
        return (out**2).sum() + lse.sum()

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(spec,) * 3 + (P("heads"), P("heads"), P()), out_specs=P())
    def parallel_loss(*x):
        attend = functools.partial(jattn.ring_attention, axis="sp", layout=layout)
        return jax.lax.psum(loss(attend, *x), ("data", "sp", "heads"))

    x = q, k, v, sinks, table, np.float32(0.3)
    got = jax.jit(jax.grad(lambda q, k, v, *rest: parallel_loss(*map(layout.shard, (q, k, v)), *rest), range(6)))(*x)
    want = jax.grad(functools.partial(loss, jattn.attention), range(6))(*x)
    for g, w in zip(got, want, strict=True):
        np.testing.assert_allclose(g, w, atol=1e-5 * max(1, np.abs(w).max()))


def test_inside_a_shard_map_over_another_axis():
    q, k, v = cases.qkv(2, 32, 32)
    attend = functools.partial(jattn.ring_attention, axis="sp", is_causal=True)
    mapped = jax.shard_map(
        attend, mesh=mesh_of(data=2, sp=2), in_specs=P("data"), out_specs=P("data"), axis_names={"data"}
    )
    np.testing.assert_allclose(jax.jit(mapped)(q, k, v), jattn.attention(q, k, v, is_causal=True), atol=1e-6)


def test_layers_in_a_scan_with_remat():
    q, k, v = cases.qkv(1, 32, 32, N=2)

    def loss(attend, q):
        def layer(x, _):
            return x + attend(x, k, v, is_causal=True), None

        return (jax.lax.scan(jax.checkpoint(layer), q, None, length=3)[0] ** 2).sum()

    ring = functools.partial(jattn.ring_attention, axis="sp", mesh=mesh_of(sp=2))
    got, want = (jax.jit(jax.grad(functools.partial(loss, attend)))(q) for attend in (ring, jattn.attention))
    np.testing.assert_allclose(got, want, atol=1e-4)


@pytest.mark.parametrize("devices", [2, 4])
def test_small_heads_with_and_without_jit(devices):
    """TransformerEngine #2159: right eagerly, an output of another shape under jit."""
    q, k, v = cases.qkv(1, 64, 64, N=16, K=16, H=8)
    attend = functools.partial(jattn.ring_attention, axis="sp", mesh=mesh_of(sp=devices), is_causal=True)
    want = jattn.attention(q, k, v, is_causal=True)
    np.testing.assert_allclose(attend(q, k, v), want, atol=1e-6)
    np.testing.assert_allclose(jax.jit(attend)(q, k, v), want, atol=1e-6)
    both = (attend, functools.partial(jattn.attention, is_causal=True))
    mine, other = (jax.grad(lambda *x, f=f: (f(*x) ** 2).sum(), (0, 1, 2)) for f in both)
    want = jax.jit(other)(q, k, v)
    for gradient in (mine, jax.jit(mine)):
        for g, w in zip(gradient(q, k, v), want, strict=True):
            np.testing.assert_allclose(g, w, atol=1e-5)


def test_cotangents_in_another_layout():
    """jax #25986: an output that is asked for by heads, and one that is replicated."""
    q, k, v = cases.qkv(2, 64, 64, N=4, K=4)
    mesh = mesh_of(sp=4)
    x = [jax.device_put(a, NamedSharding(mesh, P(None, "sp"))) for a in (q, k, v)]
    want = jax.grad(lambda *x: (jattn.attention(*x) ** 2).sum(), (0, 1, 2))(q, k, v)
    for other in (P(None, None, "sp"), P()):

        def loss(*x, other=other):
            out = jax.lax.with_sharding_constraint(jattn.ring_attention(*x, axis="sp"), NamedSharding(mesh, other))
            return (out**2).sum()

        for g, w in zip(jax.jit(jax.grad(loss, (0, 1, 2)))(*x), want, strict=True):
            np.testing.assert_allclose(g, w, atol=1e-5)


def test_vmap_is_the_loop():
    q, k, v = (np.stack([a, 2 * a]) for a in cases.qkv(1, 32, 32))
    attend = functools.partial(jattn.ring_attention, axis="sp", mesh=mesh_of(sp=2), is_causal=True)
    loop = [attend(*x) for x in zip(q, k, v, strict=True)]
    np.testing.assert_allclose(jax.vmap(attend)(q, k, v), np.stack(loop), atol=1e-6)


def test_eager_calls_compile_once():
    q, k, v = cases.qkv(1, 32, 32)
    attend = functools.partial(jattn.ring_attention, axis="sp", mesh=mesh_of(sp=2), score_mod=lambda x, b, n, t, s: x)
    attend(q, k, v)
    with jax.no_tracing():
        attend(q, k, v)


def test_auto_takes_what_sends_less_and_says_why():
    mesh = mesh_of(sp=4)
    few, many = cases.qkv(1, 64, 64, N=8, K=2), cases.qkv(1, 64, 64, N=8, K=4)
    choose = functools.partial(sequence.choose_strategy, axis="sp", mesh=mesh)
    assert choose(*many, is_causal=True).strategy == "ulysses"
    assert "not ring: a device would send more, in 3 of 3 steps" in repr(choose(*many))
    for (q, k, v), options, why in [
        (few, {}, "4 devices do not divide K=2 key heads"),
        (many, dict(local_window_size=(15, 0)), "a device would send 2.2 times what a ring sends"),
        (many, dict(mask=np.ones((64, 64), bool)), "the rows of mask would have to be sent too"),
        (many, dict(score_mod=mods.score_mod(lambda x, b, n, t, s, a: x + a, np.ones((64, 1)))), "rows of score_mod"),
    ]:
        choice = choose(q, k, v, **options)
        assert choice.strategy == "ring" and why in repr(choice)
        out = jattn.sequence_attention(q, k, v, axis="sp", mesh=mesh, **options)
        np.testing.assert_allclose(out, jattn.attention(q, k, v, **options), atol=1e-6)
    with pytest.raises(ValueError, match="strategy='best' is unknown; choose from 'auto', 'ring'"):
        jattn.sequence_attention(*few, axis="sp", mesh=mesh, strategy="best")


def test_float64():
    with jax.enable_x64(True):
        check(_case(is_causal=True, sinks=True, dtype="float64", heavy=True, T=32, S=32), "ring", "zigzag", 2)


def test_a_named_implementation_never_falls_back():
    q, k, v = cases.qkv(1, 32, 32)
    with pytest.raises(ValueError, match="implementation='pallas' is unknown"):
        jattn.ring_attention(q, k, v, axis="sp", mesh=mesh_of(sp=2), implementation="pallas")
    with pytest.raises(NotImplementedError, match="mosaic: runs bfloat16 and float16, not float32"):
        jattn.ring_attention(q, k, v, axis="sp", mesh=mesh_of(sp=2), implementation="mosaic")


@pytest.mark.parametrize("strategy", ["ring", "allgather", "ulysses"])
def test_no_keys_and_no_queries(strategy):
    """Empty rows are sinks alone, and every gradient but theirs is 0."""
    q, k, v = cases.qkv(1, 8, 0, N=4)
    attend = functools.partial(OPS[strategy], axis="sp", mesh=mesh_of(sp=2))
    sinks = np.linspace(0, 1, 4, dtype=np.float32)

    def loss(q, k, v, sinks):
        out, lse = attend(q, k, v, sinks=sinks, is_causal=True, return_residual=True)
        return out.sum() + (2 * lse).sum(), (out, lse)

    gradients, (out, lse) = jax.grad(loss, range(4), has_aux=True)(q, k, v, sinks)
    assert not out.any() and not gradients[0].any() and gradients[1].shape == k.shape
    np.testing.assert_array_equal(lse, np.broadcast_to(sinks, (1, 8, 4)))
    np.testing.assert_array_equal(gradients[3], np.full(4, 16.0))
    assert attend(k, k, k).shape == k.shape[:2] + (2, 16)


def test_an_aux_array_of_integers_has_no_gradient():
    q, k, v = cases.qkv(1, 32, 32)
    labels = np.arange(32, dtype=np.int32)[None, :]

    def loss(attend, q):
        mod = mods.score_mod(lambda x, b, n, t, s, a: x + (a % 3).astype(x.dtype), labels)
        return (attend(q, k, v, score_mod=mod, is_causal=True) ** 2).sum()

    ring = functools.partial(jattn.ring_attention, axis="sp", mesh=mesh_of(sp=2))
    want, got = (jax.grad(functools.partial(loss, attend))(q) for attend in (jattn.attention, ring))
    np.testing.assert_allclose(got, want, atol=1e-5)

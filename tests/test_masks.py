"""Masks against NumPy one-liners: the algebra, block classes, row bounds, drawings, compilations shared."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import qkv
from hypothesis import given, settings
from hypothesis import strategies as st

import jattn
from jattn import masks

pytestmark = pytest.mark.quick
T, S, B, N = 13, 17, 2, 3
rng = np.random.default_rng(0)
QUERY_IDS = np.array([[3, 3, 3, -1, -1, 0, 0, 0, 9, 9, 9, 9, 9], [1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 5]], np.int32)
KEY_IDS = np.array([[3] * 5 + [-1] * 4 + [0] * 4 + [9] * 4, [0, 1] * 8 + [7]], np.int32)
DENSE = rng.random((B, N, T, S)) < 0.5
BLOCKS = rng.random((B, 1, 4, 5)) < 0.5
PARENTS = np.array([-1, 0, 0, 1, 1, 2, -1, 6, 7, 7, 3, 10, 11], np.int32)
STRIDE = np.array([2, 3, 4], np.int32).reshape(3, 1, 1)


def ancestors(t, s, offset):
    """Whether the key at position s is before the draft, or token t of it itself or one of its ancestors."""
    table = np.zeros((T, T), bool)
    for i in range(T):
        j = i
        while j >= 0:
            table[i, j] = True
            j = PARENTS[j]
    node = np.broadcast_to(s - offset, np.broadcast_shapes(np.shape(t), np.shape(s), np.shape(offset)))
    row = np.broadcast_to(t - offset, node.shape)
    return (node < 0) | (node < T) & table[row, np.clip(node, 0, T - 1)]


# name: (mask, rule(b, n, row, t, s, offset) with row the index and t the position of the query)
RULES = {
    "causal": (masks.causal(), lambda b, n, row, t, s, o: s <= t),
    "window": (masks.window(3, 1), lambda b, n, row, t, s, o: (s >= t - 3) & (s <= t + 1)),
    "window of one int": (masks.window(2), lambda b, n, row, t, s, o: abs(s - t) <= 2),
    "window without left bound": (masks.window(None, 2), lambda b, n, row, t, s, o: s <= t + 2),
    "window without right bound": (masks.window(0, None), lambda b, n, row, t, s, o: s >= t),
    "window before the query": (masks.window(5, -2), lambda b, n, row, t, s, o: (s >= t - 5) & (s <= t - 2)),
    "window after the query": (masks.window(-1, 4), lambda b, n, row, t, s, o: (s >= t + 1) & (s <= t + 4)),
    "segments": (masks.segments(QUERY_IDS, KEY_IDS), lambda b, n, row, t, s, o: QUERY_IDS[b, row] == KEY_IDS[b, s]),
    "prefix": (masks.prefix(5), lambda b, n, row, t, s, o: (s < 5) | (s <= t)),
    "prefix per sequence": (
        masks.prefix(np.array([0, 9])),
        lambda b, n, row, t, s, o: (s < np.array([0, 9])[b]) | (s <= t),
    ),
    "lengths": (masks.lengths(np.array([0, 11])), lambda b, n, row, t, s, o: s < np.array([0, 11])[b]),
    "blocks": (masks.blocks(BLOCKS, 4), lambda b, n, row, t, s, o: BLOCKS[b, 0, row // 4, s // 4]),
    "dense": (masks.dense(DENSE), lambda b, n, row, t, s, o: DENSE[b, n, row, s]),
    "dense row": (masks.dense(DENSE[:, :1, :1]), lambda b, n, row, t, s, o: DENSE[b, 0, 0, s]),
    "predicate": (
        masks.predicate(lambda b, n, t, s, stride: (t - s + b) % stride == 0, STRIDE),
        lambda b, n, row, t, s, o: (t - s + b) % STRIDE[n, 0, 0] == 0,
    ),
    "tree": (masks.tree(PARENTS), lambda b, n, row, t, s, o: ancestors(t, s, o)),
    "and": (masks.causal() & masks.window(6, None), lambda b, n, row, t, s, o: (s <= t) & (s >= t - 6)),
    "or": (masks.causal() | masks.dense(DENSE), lambda b, n, row, t, s, o: (s <= t) | DENSE[b, n, row, s]),
    "not": (~masks.window(1, 1), lambda b, n, row, t, s, o: abs(s - t) > 1),
    "not of and": (
        ~(masks.causal() & masks.lengths(np.array([4, 8]))),
        lambda b, n, row, t, s, o: ~((s <= t) & (s < np.array([4, 8])[b])),
    ),
}


def truth(name, offset):
    """bool [B, N, T, S] of a rule."""
    b, n, row, s = np.ogrid[:B, :N, :T, :S]
    o = np.broadcast_to(offset, (B,))[:, None, None, None]
    return np.broadcast_to(RULES[name][1](b, n, row, row + o, s, o), (B, N, T, S))


OFFSETS = [0, 4, np.array([2, -5], np.int32)]


@pytest.mark.parametrize("name", RULES)
def test_materialize_is_the_rule(name):
    for offset in OFFSETS:
        got = RULES[name][0].materialize(T, S, query_offset=offset, batch=B, heads=N)
        assert got.dtype == bool
        np.testing.assert_array_equal(
            np.broadcast_to(got, (B, N, T, S)), truth(name, offset), err_msg=f"offset {offset}"
        )


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("block", [(4, 4), (5, 3), 128])
def test_classify_never_lies(name, block):
    """A skipped block holds no visible element, a full one no hidden element; the transpose is the same map."""
    for offset in OFFSETS:
        blocks = RULES[name][0].classify(T, S, block=block, query_offset=offset, batch=B, heads=N)
        bq, bk = (block, block) if isinstance(block, int) else block
        shape = (B, N, -(-T // bq), -(-S // bk))
        kind = np.broadcast_to(blocks.kind, shape)
        assert kind.dtype == np.int8
        want = truth(name, offset)
        for i in range(shape[2]):
            for j in range(shape[3]):
                tile = want[:, :, i * bq : (i + 1) * bq, j * bk : (j + 1) * bk]
                some, every = tile.any((2, 3)), tile.all((2, 3))
                assert not (some & (kind[:, :, i, j] == 0)).any(), (i, j, "visible element in a skipped block")
                assert not (~every & (kind[:, :, i, j] == 2)).any(), (i, j, "hidden element in a full block")
        np.testing.assert_array_equal(
            np.broadcast_to(blocks.transpose().kind, (B, N, *shape[:1:-1])), kind.swapaxes(2, 3)
        )


@pytest.mark.parametrize(
    "name",
    [
        "causal",
        "window",
        "window before the query",
        "window after the query",
        "prefix",
        "lengths",
        "blocks",
        "dense",
        "and",
    ],
)
def test_classify_is_tight(name):
    """These masks know their blocks exactly: what could be skipped is skipped, what is full is known to be."""
    block = (4, 4)
    for offset in OFFSETS:
        kind = RULES[name][0].classify(T, S, block=block, query_offset=offset, batch=B, heads=N).kind
        want = truth(name, offset)
        for i in range(-(-T // 4)):
            for j in range(-(-S // 4)):
                tile = want[:, :, 4 * i : 4 * i + 4, 4 * j : 4 * j + 4]
                exact = np.where(tile.all((2, 3)), 2, np.where(tile.any((2, 3)), 1, 0))
                np.testing.assert_array_equal(np.broadcast_to(kind, (B, N, *kind.shape[2:]))[:, :, i, j], exact)


@pytest.mark.parametrize("name", RULES)
def test_row_bounds_are_the_rows(name):
    for offset in OFFSETS:
        bounds = RULES[name][0].row_bounds(T, S, query_offset=offset, batch=B)
        if bounds is None:
            assert name not in ("causal", "window", "prefix", "lengths", "and", "window without left bound")
            continue
        lo, hi = (np.broadcast_to(x, (B, T)) for x in bounds)
        assert bounds[0].dtype == bounds[1].dtype == np.int32
        rows = (np.arange(S) >= lo[..., None]) & (np.arange(S) < hi[..., None])
        np.testing.assert_array_equal(np.broadcast_to(rows[:, None], (B, N, T, S)), truth(name, offset))


def test_row_bounds_are_none_where_rows_have_gaps():
    for name in ("dense", "predicate", "not", "blocks", "tree"):
        assert RULES[name][0].row_bounds(T, S, batch=B) is None


def expressions():
    leaves = st.sampled_from(sorted(RULES)).map(lambda name: (RULES[name][0], truth(name, 1)))
    return st.recursive(
        leaves,
        lambda inner: st.one_of(
            st.tuples(inner, inner).map(lambda p: (p[0][0] & p[1][0], p[0][1] & p[1][1])),
            st.tuples(inner, inner).map(lambda p: (p[0][0] | p[1][0], p[0][1] | p[1][1])),
            inner.map(lambda m: (~m[0], ~m[1])),
        ),
        max_leaves=4,
    )


@settings(max_examples=20, deadline=None, derandomize=True)
@given(expressions())
def test_any_expression_is_the_boolean_expression(pair):
    mask, want = pair
    got = mask.materialize(T, S, query_offset=1, batch=B, heads=N)
    np.testing.assert_array_equal(np.broadcast_to(got, want.shape), want)
    kind = np.broadcast_to(mask.classify(T, S, (4, 4), 1, batch=B, heads=N).kind, (B, N, 4, 5))
    padded = np.pad(want, ((0, 0), (0, 0), (0, 3), (0, 3))).reshape(B, N, 4, 4, 5, 4)
    assert not (padded.any((3, 5)) & (kind == 0)).any()
    padded = np.pad(want, ((0, 0), (0, 0), (0, 3), (0, 3)), constant_values=True).reshape(B, N, 4, 4, 5, 4)
    assert not (~padded.all((3, 5)) & (kind == 2)).any()
    bounds = mask.row_bounds(T, S, 1, batch=B)
    if bounds is not None:
        lo, hi = (np.broadcast_to(x, (B, T))[:, None, :, None] for x in bounds)
        np.testing.assert_array_equal(np.broadcast_to((np.arange(S) >= lo) & (np.arange(S) < hi), want.shape), want)


@pytest.mark.parametrize(
    "shape", [(S,), (T, 1), (1, S), (T, S), (N, 1, 1), (B, 1, 1, S), (1, N, T, 1), (B, N, T, S), ()]
)
def test_bool_arrays_broadcast_on_every_axis(shape):
    q, k, v = qkv(B=B, T=T, S=S, N=N, K=1, H=8)
    mask = np.asarray(rng.random(shape) < 0.6)
    got = jattn.attention(q, k, v, mask=mask, return_residual=True)
    want = jattn.attention(q, k, v, mask=np.broadcast_to(mask, (B, N, T, S)).copy(), return_residual=True)
    for g, w in zip(got, want, strict=True):
        np.testing.assert_array_equal(g, w)


@pytest.mark.parametrize("name", RULES)
def test_attention_under_a_mask_is_attention_under_its_array(name):
    q, k, v = qkv(B=B, T=T, S=S, N=N, K=1, H=8)
    out, lse = jattn.attention(q, k, v, mask=RULES[name][0], query_offset=2, return_residual=True)
    array = truth(name, 2)
    scores = np.einsum("btnh,bsh->bnts", q.astype(float), k[:, :, 0].astype(float)) / np.sqrt(8)
    weights = np.where(array, np.exp(scores), 0)
    total = weights.sum(-1)
    some = total > 0
    np.testing.assert_array_equal(np.isneginf(lse), ~some.transpose(0, 2, 1))
    want = np.einsum("bnts,bsd->btnd", weights / np.where(some, total, 1)[..., None], v[:, :, 0])
    out = np.asarray(out)
    assert np.abs(out - want).max() <= 1e-5 * np.abs(want).max()
    assert not out[~some.transpose(0, 2, 1)].any()


def test_a_mask_is_a_pytree_and_can_be_an_argument_of_jit():
    q, k, v = qkv(B=B, T=T, S=S, N=N, K=1, H=8)
    attend = jax.jit(lambda mask: jattn.attention(q, k, v, mask=mask))
    for name in ("segments", "dense", "predicate", "tree", "not of and", "prefix per sequence"):
        mask = RULES[name][0]
        leaves, tree = jax.tree.flatten(mask)
        assert jax.tree.unflatten(tree, leaves) == mask
        np.testing.assert_allclose(attend(mask), jattn.attention(q, k, v, mask=mask), atol=1e-6)


def test_equal_masks_share_a_compilation():
    q, k, v = qkv(B=B, T=T, S=S, N=N, K=1, H=8)
    traces = []

    @jax.jit
    def attend(mask):
        traces.append(mask)
        return jattn.attention(q, k, v, mask=mask)

    def build(seed):
        r = np.random.default_rng(seed)
        ids = r.integers(0, 3, (B, T)).astype(np.int32), r.integers(0, 3, (B, S)).astype(np.int32)
        stride = r.integers(2, 5, (N, 1, 1)).astype(np.int32)
        rule = masks.predicate(lambda b, n, t, s, stride: (t - s) % stride == 0, stride)
        return masks.causal() & masks.segments(*ids) | rule & ~masks.window(2, 0)

    results = [np.asarray(attend(build(seed))) for seed in range(3)]
    assert len(traces) == 1
    assert not np.array_equal(results[0], results[1])
    attend(masks.causal() & masks.window(2, 0))
    attend(masks.causal() & masks.window(3, 0))
    assert len(traces) == 3, "another window is another program"


def test_masks_compare_by_structure_and_values():
    assert masks.causal() == masks.causal() and hash(masks.causal()) == hash(masks.causal())
    assert masks.window(3, 0) != masks.window(4, 0)
    assert masks.window(3) == masks.window(3, 3)
    assert masks.causal() & masks.window(3, 0) == masks.causal() & masks.window(3, 0)
    assert masks.lengths(np.array([1, 2])) != masks.lengths(np.array([1, 3]))


@pytest.mark.parametrize(
    "mask, words",
    [
        (masks.causal(), ["causal"]),
        (masks.window(3, None), ["window", "3", "None"]),
        (masks.causal() & ~masks.window(3, 0), ["causal", "&", "~", "window", "3", "0"]),
        (masks.prefix(5) | masks.segments(QUERY_IDS, KEY_IDS), ["prefix", "5", "|", "segments"]),
        (masks.blocks(BLOCKS, (4, 8)), ["blocks", "4", "8"]),
        (masks.tree(PARENTS), ["tree"]),
        (masks.lengths(np.array([3, 4])), ["lengths"]),
        (masks.dense(DENSE), ["dense"]),
    ],
)
def test_repr_reads_like_the_rule(mask, words):
    position = -1
    for word in words:
        position = repr(mask).find(word, position + 1)
        assert position >= 0, f"{repr(mask)!r} lacks {word!r}"


def test_repr_keeps_precedence():
    a, b, c = masks.causal(), masks.window(1, 0), masks.prefix(2)
    assert repr((a | b) & c) != repr(a | b & c)
    assert "(" in repr((a | b) & c).replace("causal()", "").replace("window(1, 0)", "").replace("prefix(2)", "")


def test_draw_shows_the_triangle():
    lines = masks.causal().draw(6, 6).splitlines()
    assert lines[0].count("█") < lines[5].count("█")
    assert "█" in masks.causal().draw(1000, 1000) and "·" in masks.causal().draw(1000, 1000)
    assert max(map(len, masks.causal().draw(1000, 1000).splitlines()[:-1])) <= 64


def test_plot_draws_on_given_axes():
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots()
    assert (masks.causal() & masks.window(4, 0)).plot(32, 32, ax=axes) is axes
    assert axes.has_data()
    pyplot.close(figure)
    other = masks.causal().plot(8, 8)
    pyplot.close(other.figure)


def test_python_and_or_not_are_refused():
    """`and` on masks would drop one of them in silence."""
    with pytest.raises(TypeError, match="&"):
        masks.causal() and masks.window(3, 0)


@pytest.mark.parametrize(
    "build, error, words",
    [
        (lambda: masks.window(2, -3), ValueError, "use None for unbounded"),
        (lambda: masks.window(-4), ValueError, "use None for unbounded"),
        (lambda: masks.window(1.5), TypeError, "1.5"),
        (lambda: masks.window("3"), TypeError, "window"),
        (lambda: masks.tree(np.array([-1, 1])), ValueError, "parent"),
        (lambda: masks.tree(np.array([-2, 0])), ValueError, "parent"),
        (lambda: masks.tree(np.array([-1.0, 0.0])), TypeError, "float"),
        (lambda: masks.dense(np.ones((2, 2))), TypeError, "float"),
        (lambda: masks.blocks(np.ones((2, 2), bool), 0), ValueError, "0"),
        (lambda: masks.blocks(np.ones((2, 2), bool), (4, -1)), ValueError, "-1"),
        (lambda: masks.lengths(np.array([1.0])), TypeError, "float"),
        (lambda: masks.lengths(-1), ValueError, "-1"),
        (lambda: masks.prefix(-1), ValueError, "-1"),
        (lambda: masks.segments(np.array([1.0])), TypeError, "float"),
        (lambda: masks.predicate(3), TypeError, "int"),
        (lambda: masks.causal() & 3, TypeError, "&"),
    ],
)
def test_wrong_masks_are_refused(build, error, words):
    with pytest.raises(error, match=words):
        build()


def test_a_predicate_that_closes_over_an_array_is_refused():
    table = jnp.arange(3)
    with pytest.raises(TypeError, match=r"(?s)table.*predicate\("):
        jattn.attention(*qkv(), mask=masks.predicate(lambda b, n, t, s: s > table[0]))


def test_a_predicate_that_does_not_return_bool_is_refused():
    with pytest.raises(TypeError, match="bool"):
        jattn.attention(*qkv(), mask=masks.predicate(lambda b, n, t, s: s - t))


@pytest.mark.parametrize(
    "mask, words",
    [
        (np.ones((3, 5), bool), "mask"),
        (masks.dense(np.ones((2, 3, 1, 1), bool)), "dense|mask"),
        (masks.segments(np.zeros((2, 5), np.int32), np.zeros((2, 23), np.int32)), "segment"),
        (masks.segments(np.zeros((3, 17), np.int32), np.zeros((3, 23), np.int32)), "segment"),
        (masks.segments(np.zeros((2, 17), np.int32)), "segment"),
        (masks.blocks(np.ones((3, 3), bool), (8, 16)), "block"),
        (masks.lengths(np.array([1, 2, 3])), "lengths"),
        (masks.tree(np.array([-1, 0])), "parents|tree"),
        (masks.predicate(lambda b, n, t, s, a: s > a, np.zeros((5, 1, 1), np.int32)), "aux|predicate"),
    ],
)
def test_masks_that_do_not_fit_the_call_are_refused(mask, words):
    with pytest.raises(ValueError, match=words):
        jattn.attention(*qkv(), mask=mask)


def test_a_traced_window_is_refused():
    with pytest.raises(TypeError, match="window|int"):
        jax.jit(lambda w: masks.window(w, 0).materialize(3, 3))(2)

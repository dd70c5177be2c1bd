"""`ragged_attention`: every packed sequence is the oracle's on its own; holes and tails hold NaN and give zeros."""

# ruff: noqa: E731 -- short local functions

import compare
import jax
import jax.numpy as jnp
import mosaic
import numpy as np
import oracle
import pytest
from cases import qkv

import jattn
from jattn import masks, mods, ragged_attention

DEFAULT_DTYPE = "float32"
JIT = None  # of the calls that `check` makes; None is compare.quickly, but an emulation runs longer than it compiles


EMULATED_BACKWARD = {"test_packed_sequences_are_causal_each_on_its_own", "test_used_lengths_leave_holes"}


@pytest.fixture(params=["xla", "mosaic emulated", pytest.param("mosaic", marks=pytest.mark.gpu)])
def implementation(request, monkeypatch):
    """Runs the tests that `check` on each; kernels have 16-bit operands."""
    if request.param != "xla":
        monkeypatch.setattr("test_ragged.DEFAULT_DTYPE", "bfloat16")
        monkeypatch.setattr("test_ragged.JIT", jax.jit)
    if request.param == "mosaic emulated" and request.function.__name__ not in EMULATED_BACKWARD:
        monkeypatch.setattr("jattn.pallas.attention.why_not_backward", lambda problem: "takes long to emulate")
    yield from mosaic.emulated(monkeypatch) if request.param == "mosaic emulated" else [None]


SCALED = oracle.ScoreMod(
    lambda score, b, n, t, s, a: score * a + 0.01 * (t - s) + 0.2 * b - 0.1 * n * s,
    lambda score, b, n, t, s, a: a,
    lambda score, b, n, t, s, a: (score,),
)


def scaled(score, b, n, t, s, a):
    return score * a + 0.01 * (t - s + 20 * b - 10 * n * s).astype(score.dtype)


def draw(cu_q, cu_k, N=4, K=2, H=16, D=24, dtype="float32", tail=(5, 3), seed=0):
    """Packed query, key, value with `tail` rows beyond the last offsets."""
    T, S = cu_q[-1] + tail[0], cu_k[-1] + tail[1]
    return tuple(x[0] for x in qkv(1, T, S, N, K, H, D, dtype, seed))


def check(
    cu_q,
    cu_k=None,
    q_len=None,
    k_len=None,
    *,
    dtype=None,
    rule=None,
    dropout=None,
    aux=None,
    bias=None,
    sinks=None,
    offset=0,
    **options,
):
    """Holds ragged_attention and its gradients against the oracle, sequence by sequence.

    rule(b, n, row, t, s) is the mask of a sequence; bias [N, Tq, Tk] or broadcastable; aux likewise for `scaled`;
    offset is what the oracle takes, one number a sequence or for all.
    """
    dtype, same = dtype or DEFAULT_DTYPE, cu_k is None
    cu_q = np.asarray(cu_q, np.int32)
    cu_k = cu_q if same else np.asarray(cu_k, np.int32)
    q, k, v = draw(cu_q, cu_k, dtype=dtype, tail=(5, 5) if same else (5, 3))
    (Tq, N, _), (Tk, _, D) = q.shape, v.shape
    slices = list(oracle.sequence_slices(cu_q, cu_k, q_len, k_len))
    rng = np.random.default_rng(1)
    dout = rng.standard_normal((Tq, N, D)).astype(q.dtype)
    dlse = rng.standard_normal((Tq, N)).astype(np.float32)
    offsets = np.broadcast_to(offset, (len(slices),))

    def whole(name, x, fill):
        """x with `fill` outside the sequences."""
        used = np.zeros(len(x), bool)
        for rows, columns in slices:
            used[columns if name in ("key", "value") else rows] = True
        return np.where(used[:, None, None], x, np.asarray(fill, x.dtype))

    primals = {n: whole(n, x, np.nan) for n, x in dict(query=q, key=k, value=v).items()}
    primals |= {n: x for n, x in dict(bias=bias, sinks=sinks, aux=aux).items() if x is not None}
    if dropout:
        options |= dict(dropout_rate=dropout, dropout_key=jax.random.key(9))

    def call(d):
        extra = {n: d[n] for n in ("bias", "sinks") if n in d}
        if aux is not None:
            extra["score_mod"] = mods.score_mod(scaled, d["aux"])
        lengths = dict(query_seq_lengths=q_len, key_value_seq_lengths=k_len)
        lengths = {n: np.asarray(x, np.int32) for n, x in lengths.items() if x is not None}
        return ragged_attention(
            d["query"],
            d["key"],
            d["value"],
            cu_q,
            None if same else cu_k,
            return_residual=True,
            **extra,
            **lengths,
            **options,
        )

    quickly = compare.quickly(q.dtype)
    out, lse, got = jax.tree.map(np.asarray, compare._pullback(call, JIT or quickly)(primals, dout, dlse))
    want_out, want_lse = np.zeros((Tq, N, D)), np.full((Tq, N), -np.inf)
    want = {n: np.zeros(np.shape(x)) for n, x in primals.items()}
    yard_out = [np.zeros((Tq, N, D)) for _ in range(3)]
    yards = [{n: np.zeros(np.shape(x)) for n, x in primals.items()} for _ in range(3)]
    for m, (rows, columns) in enumerate(slices):
        t, s = rows.stop - rows.start, columns.stop - columns.start
        if not t:
            continue
        part = dict(query=q[None, rows], key=k[None, columns], value=v[None, columns])
        cut = {n: _cut(x, N, Tq, Tk, rows, columns) for n, x in dict(bias=bias, aux=aux).items() if x is not None}
        b, n, row, col = np.ogrid[m : m + 1, :N, :t, :s]
        mask = np.broadcast_to(True if rule is None else rule(b, n, row, row + offsets[m], col), (1, N, t, s))
        keep, p = None, 1.0
        if dropout:
            keep, p = oracle.dropout_keep((0, 9), dropout, len(slices), N, t, s, offsets[m])
            keep = keep[m : m + 1]
        # the oracle counts b from 0: the sequence index enters the modifier here.
        mod = SCALED and oracle.ScoreMod(
            lambda score, b, *rest, m=m: SCALED.value(score, m, *rest), SCALED.d_score, SCALED.d_aux
        )
        fn = lambda score, b, *rest, m=m: scaled(score, b + m, *rest)
        problem = oracle.Problem(
            **part,
            bias=cut.get("bias"),
            mask=mask,
            offset=int(offsets[m]),
            sinks=sinks,
            keep=keep,
            keep_probability=p,
            soft_cap=options.get("logits_soft_cap"),
            score_mod=mod if aux is not None else None,
            aux=(cut["aux"],) if aux is not None else (),
        )
        args = dout[None, rows], dlse[None, rows]
        truth = oracle.backward(problem, *args)
        want_out[rows], want_lse[rows] = (x[0] for x in truth["forward"])
        _scatter(want, truth, rows, columns, N, Tq, Tk)
        own = {n: part.get(n, cut.get(n, sinks)) for n in primals if n != "aux"} | (
            {"aux": problem.aux} if aux is not None else {}
        )
        baselines = compare._baselines(problem, fn if aux is not None else None, own, *args, quickly)
        for i, y in enumerate(baselines):
            yard_out[i][rows] = y["out"][0]
            _scatter(yards[i], y, rows, columns, N, Tq, Tk)
    assert out.dtype == q.dtype and lse.dtype == np.float32
    compare.check("out", out, want_out, yard_out, q.dtype)
    compare.check_lse(lse, want_lse, q.dtype)
    for name in primals:
        assert got[name].dtype == primals[name].dtype
        compare.check("d" + name, got[name], want[name], [y[name] for y in yards], q.dtype)
    for name, x in dict(out=out, query=got["query"], key=got["key"], value=got["value"]).items():
        np.testing.assert_array_equal(whole(name, x, 0), x, err_msg=f"{name} outside the sequences")


def _cut(x, N, Tq, Tk, rows, columns):
    """The part of a packed bias or aux that one sequence sees, broadcast along no axis."""
    return np.broadcast_to(x, (N, Tq, Tk))[:, rows, columns]


def _scatter(total, part, rows, columns, N, Tq, Tk):
    """total += gradients of one sequence, in the packed shapes."""
    for name in total:
        if name in ("query", "key", "value"):
            total[name][rows if name == "query" else columns] += np.asarray(part[name][0], float)
        elif name == "sinks":
            total[name] += np.asarray(part[name], float)
        else:
            whole = np.zeros((N, Tq, Tk))
            whole[:, rows, columns] = part[name][0] if name == "aux" else part[name]
            axes = tuple(i for i in range(3) if i < 3 - total[name].ndim)
            whole = whole.sum(axes)
            axes = tuple(i for i in range(total[name].ndim) if total[name].shape[i] == 1 and whole.shape[i] != 1)
            total[name] += whole.sum(axes, keepdims=True)


@pytest.mark.quick
@pytest.mark.usefixtures("implementation")
def test_packed_sequences_are_causal_each_on_its_own():
    """Lengths 0, 7, 0, 0, 129, 0, as zero-length sequences come in practice."""
    check([0, 0, 7, 7, 7, 136, 136], is_causal=True, rule=lambda b, n, row, t, s: s <= t)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.usefixtures("implementation")
def test_queries_and_keys_of_different_lengths(dtype):
    """Sequences without keys, without queries, longer on either side; the query sits at the end."""
    cu_q, cu_k = [0, 20, 20, 57, 60], [0, 33, 40, 40, 105]
    check(
        cu_q,
        cu_k,
        dtype=dtype,
        is_causal=True,
        query_offset="end",
        offset=np.diff(cu_k) - np.diff(cu_q),
        rule=lambda b, n, row, t, s: s <= t,
    )


@pytest.mark.usefixtures("implementation")
def test_used_lengths_leave_holes():
    check(
        [0, 20, 40, 70],
        [0, 30, 60, 90],
        [20, 7, 0],
        [11, 30, 30],
        is_causal=True,
        local_window_size=(9, 3),
        query_offset=3,
        offset=3,
        rule=lambda b, n, row, t, s: (s <= t) & (s >= t - 9),
    )


@pytest.mark.usefixtures("implementation")
def test_end_counts_used_lengths():
    check(
        [0, 20, 40],
        [0, 30, 60],
        [20, 7],
        [11, 30],
        is_causal=True,
        query_offset="end",
        offset=np.array([-9, 23]),
        rule=lambda b, n, row, t, s: s <= t,
    )


@pytest.mark.usefixtures("implementation")
def test_offsets_per_sequence():
    check(
        [0, 20, 40],
        [0, 30, 60],
        is_causal=True,
        query_offset=np.array([4, -6], np.int32),
        offset=np.array([4, -6]),
        rule=lambda b, n, row, t, s: s <= t,
    )


@pytest.mark.parametrize("shape", [(1, 65, 98), (65, 98), (98,), (4, 65, 1), (4, 1, 1)])
def test_bias_broadcasts_over_packed_rows_and_columns(shape):
    rng = np.random.default_rng(2)
    check([0, 25, 60], [0, 30, 95], bias=rng.standard_normal(shape).astype(np.float32), sinks=np.ones(4, np.float32))


@pytest.mark.parametrize("shape", [(4, 65, 98), (4, 1, 98)])
@pytest.mark.usefixtures("implementation")
def test_bias_is_indexed_by_packed_row_and_column(shape):
    rng = np.random.default_rng(2)
    check([0, 25, 60], [0, 30, 95], bias=rng.standard_normal(shape).astype(np.float32), sinks=np.ones(4, np.float32))


@pytest.mark.usefixtures("implementation")
def test_modifiers_count_inside_the_sequence_and_index_their_arrays_by_packed_row_and_column():
    rng = np.random.default_rng(3)
    check(
        [0, 25, 60],
        [0, 30, 95],
        aux=rng.uniform(0.5, 1.5, (4, 1, 98)).astype(np.float32),
        query_offset=2,
        offset=2,
        logits_soft_cap=20.0,
    )


@pytest.mark.usefixtures("implementation")
def test_dropout_counts_inside_the_sequence():
    check([0, 25, 60], [0, 30, 95], dropout=0.4, query_offset=6, offset=6)


@pytest.mark.usefixtures("implementation")
def test_sinks_fill_empty_rows():
    rng = np.random.default_rng(4)
    check(
        [0, 20, 30],
        [0, 0, 33],
        sinks=rng.standard_normal(4).astype(np.float32),
        is_causal=True,
        query_offset=-4,
        offset=-4,
        rule=lambda b, n, row, t, s: s <= t,
    )


@pytest.mark.parametrize("name", ["prefix", "lengths", "predicate", "window"])
@pytest.mark.usefixtures("implementation")
def test_masks_count_inside_the_sequence(name):
    numbers = np.array([4, 17], np.int32)
    mask, rule = {
        "prefix": (masks.prefix(numbers), lambda b, n, row, t, s: (s < numbers[b]) | (s <= t)),
        "lengths": (masks.lengths(numbers), lambda b, n, row, t, s: s < numbers[b]),
        "predicate": (
            masks.predicate(lambda b, n, t, s: (t + 2 * s + n + b) % 3 != 0),
            lambda b, n, row, t, s: (t + 2 * s + n + b) % 3 != 0,
        ),
        "window": (masks.window(5, -1), lambda b, n, row, t, s: (s >= t - 5) & (s < t)),
    }[name]
    check([0, 25, 60], [0, 30, 95], mask=mask, rule=rule)


@pytest.mark.usefixtures("implementation")
def test_dense_masks_and_segments_are_indexed_by_packed_row_and_column():
    rng = np.random.default_rng(5)
    cu_q, cu_k = [0, 25, 60], [0, 30, 95]
    dense = rng.random((4, 65, 98)) < 0.6
    ids_q, ids_k = rng.integers(0, 2, 65).astype(np.int32), rng.integers(0, 2, 98).astype(np.int32)

    def packed(array):
        return lambda b, n, row, t, s: array[n[0], np.array(cu_q)[b[0]] + row[0], np.array(cu_k)[b[0]] + s[0]][None]

    check(cu_q, cu_k, mask=dense, rule=packed(dense))
    same = np.broadcast_to(ids_q[:, None] == ids_k, (4, 65, 98))
    check(cu_q, cu_k, mask=masks.segments(ids_q, ids_k), rule=packed(same))


def test_nothing_at_all():
    """No token; tokens but no sequence; sequences but all empty."""
    q, k, v = draw([0, 0], [0, 0], tail=(0, 0))
    assert ragged_attention(q, k, v, np.array([0, 0], np.int32)).shape == (0, 4, 24)
    q, k, v = draw([0, 0], [0, 0], tail=(5, 5))
    for cu in ([0], [0, 0, 0]):
        out, lse = ragged_attention(q, k, v, np.array(cu, np.int32), return_residual=True)
        assert not np.any(out) and np.isneginf(lse).all()


def test_packed_is_padded():
    """The packed call equals the padded one with lengths, in values and in gradients."""
    lengths = np.array([13, 5, 20], np.int32)
    cu = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    q, k, v = qkv(3, 20, 20)

    def pack(x):
        return jnp.concatenate([x[b, :n] for b, n in enumerate(lengths)])

    def padded(q, k, v):
        return pack(jattn.attention(q, k, v, is_causal=True, query_seq_lengths=lengths, key_value_seq_lengths=lengths))

    def packed(q, k, v):
        return ragged_attention(pack(q), pack(k), pack(v), cu, is_causal=True)

    np.testing.assert_allclose(packed(q, k, v), padded(q, k, v), atol=1e-6)
    for g, w in zip(
        *(jax.grad(lambda *x, f=f: (f(*x) ** 2).sum(), (0, 1, 2))(q, k, v) for f in (packed, padded)), strict=True
    ):
        np.testing.assert_allclose(g, w, atol=1e-5)


def test_offsets_may_be_traced_and_int64():
    cu = np.array([0, 8, 21], np.int32)
    q, k, v = draw(cu, cu, tail=(3, 3))
    want = ragged_attention(q, k, v, cu, is_causal=True)
    np.testing.assert_allclose(jax.jit(lambda cu: ragged_attention(q, k, v, cu, is_causal=True))(cu), want, atol=1e-6)
    with jax.enable_x64(True):
        np.testing.assert_allclose(ragged_attention(q, k, v, cu.astype(np.int64), is_causal=True), want, atol=1e-6)


def test_another_packing_of_the_same_sequences_changes_nothing_but_the_rows():
    """Other neighbours, other positions in the pack: a perturbed neighbour leaves a sequence bit for bit."""
    cu = np.array([0, 20, 57, 64], np.int32)
    q, k, v = draw(cu, cu, tail=(3, 3))
    attend = jax.jit(lambda q, k, v: ragged_attention(q, k, v, cu, is_causal=True))
    base = np.asarray(attend(q, k, v))
    changed = [np.concatenate([x[:20], x[20:57] * -3, x[57:]]) for x in (q, k, v)]
    got = np.asarray(attend(*changed))
    np.testing.assert_array_equal(got[:20], base[:20])
    np.testing.assert_array_equal(got[57:], base[57:])
    assert not np.array_equal(got[20:57], base[20:57])

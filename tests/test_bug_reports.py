"""What went wrong in other attention libraries, as tests named for what they check."""

# ruff: noqa: E731 -- short local functions

import functools

import compare
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cases import qkv

import jattn
from jattn import masks, mods


def grads(f, *x):
    return jax.jit(jax.grad(lambda *x: (f(*x).astype(jnp.float32) ** 2).sum(), tuple(range(len(x)))))(*x)


def near(got, want, atol=1e-5):
    def check(g, w):
        w = np.asarray(w, np.float64)
        assert np.abs(np.asarray(g, np.float64) - w).max(initial=0) <= atol * max(1, np.abs(w).max(initial=0))

    jax.tree.map(check, got, want)


# Fully masked rows, lse conventions, merging.


def test_lse_of_an_empty_row_is_minus_infinity_and_merges_to_the_other_part_bit_for_bit():
    q, k, v = qkv(B=1, T=5, S=2, N=2, K=2, H=64, dtype="bfloat16")
    out, lse = jattn.attention(q, k, v, is_causal=True, query_offset="end", return_residual=True)
    assert not np.asarray(out)[0, :3].any() and np.isneginf(lse[0, :3]).all() and np.isfinite(lse[0, 3:]).all()
    other = jattn.attention(q, *qkv(B=1, T=5, S=9, N=2, K=2, H=64, dtype="bfloat16", seed=1)[1:], return_residual=True)
    merged = jattn.merge((out, lse), other)
    np.testing.assert_array_equal(merged[0][0, :3], other[0][0, :3])
    np.testing.assert_array_equal(merged[1][0, :3], other[1][0, :3])


def test_more_queries_than_keys_at_the_end_have_no_finite_lse_in_the_empty_rows():
    q, k, v = qkv(B=1, T=50, S=17, N=32, K=4, H=128, dtype="bfloat16")
    out, lse = jattn.attention(q, k, np.ones_like(v), is_causal=True, query_offset="end", return_residual=True)
    assert np.isneginf(lse[0, :33]).all() and np.isfinite(lse[0, 33:]).all()
    assert not np.asarray(out)[0, :33].any() and (np.asarray(out)[0, 33:] == 1).all()


def test_a_padded_key_does_not_win_against_a_low_score():
    """Masks are not −10000: a visible score of −20000 beats a hidden one of 0."""
    q = np.zeros((1, 1, 1, 16), np.float32)
    k = np.zeros((1, 2, 1, 16), np.float32)
    q[..., 0], k[0, 0, 0, 0] = 1, -20000
    v = np.zeros((1, 2, 1, 16), np.float32) + np.array([1, 100], np.float32)[None, :, None, None]
    for options in (dict(mask=np.array([True, False])), dict(key_value_seq_lengths=np.array([1], np.int32))):
        assert (np.asarray(jattn.attention(q, k, v, scale=1.0, **options)) == 1).all()


@pytest.mark.parametrize("empties", range(6))
def test_merging_any_number_of_empty_states_is_finite(empties):
    """Five states, 0 to 5 of them empty: values and gradients."""
    q, k, v = qkv(B=1, T=3, S=20, N=2, K=2, H=8)
    parts = [
        jattn.attention(q, k[:, 4 * i : 4 * i + 4], v[:, 4 * i : 4 * i + 4], return_residual=True) for i in range(5)
    ]
    states = [jattn.empty((1, 3, 2, 8), jnp.float32)] * empties + parts[empties:]
    out, lse = jattn.merge(*states)
    if empties == 5:
        assert not np.any(out) and np.isneginf(lse).all()
    else:
        near((out, lse), jattn.attention(q, k[:, 4 * empties :], v[:, 4 * empties :], return_residual=True))
    gradient = jax.grad(lambda s: jattn.merge(*s)[0].sum())(states)
    assert all(np.isfinite(g).all() for g in jax.tree.leaves(gradient))


def test_a_long_prefix_and_a_short_suffix_merge_in_one_base_of_logarithm():
    q, k, v = qkv(B=1, T=2, S=3136, N=2, K=1, H=64, dtype="bfloat16")
    whole = jattn.attention(q, k, v, return_residual=True)
    merged = jattn.merge(
        *(jattn.attention(q, k[:, a:b], v[:, a:b], return_residual=True) for a, b in ((0, 3072), (3072, 3136)))
    )
    near(merged[0], whole[0], 2 * compare.eps("bfloat16"))
    scores = np.einsum("btnh,bsh->btns", q.astype(float), k[:, :, 0].astype(float)) / 8
    want = np.log(np.exp(scores).sum(-1))
    for lse in (whole[1], merged[1]):
        compare.check_lse(lse, want, "bfloat16")


def test_one_masked_row_does_not_poison_the_gradients_of_the_batch():
    q, k, v = qkv(B=2, T=4, S=4, N=2, K=2, H=16)
    mask = np.array([[1, 1, 1, 1], [1, 1, 0, 0]], bool)[:, None, None]
    f = lambda q, k, v: jattn.attention(q, k, v, mask=mask, local_window_size=(1, 0))
    got = jax.grad(lambda *x: f(*x)[:, :2].sum(), (0, 1, 2))(q, k, v)
    assert all(np.isfinite(g).all() for g in got)
    assert not np.asarray(got[0])[1, 3].any()


@pytest.mark.parametrize("H", [64, 128, 256])
@pytest.mark.parametrize("rows", [slice(0, 14), slice(50, 64), slice(0, 64)], ids=["leading", "trailing", "all"])
def test_masked_rows_with_a_sink_have_no_nan(rows, H):
    q, k, v = qkv(B=1, T=64, S=64, N=2, K=2, H=H)
    mask = np.ones((64, 1), bool)
    mask[rows] = False
    sinks = np.full(2, 0.3, np.float32)
    out, lse = jattn.attention(q, k, v, mask=mask, sinks=sinks, return_residual=True)
    assert not np.asarray(out)[0, rows].any() and (np.asarray(lse)[0, rows] == np.float32(0.3)).all()
    whole = jattn.attention(q, k, v, sinks=sinks)
    near(np.asarray(out)[0][mask[:, 0]], np.asarray(whole)[0][mask[:, 0]])


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("H", [64, 128])
def test_lse_of_sixteen_bit_inputs_is_float32_and_has_a_gradient(H, is_causal):
    q, k, v = qkv(B=1, T=70, S=70, N=2, K=1, H=H, dtype="bfloat16")
    mask = np.tril(np.ones((70, 70), bool)) if is_causal else None
    bias = np.full((1, 1), 9, np.float32)
    call = lambda d: jattn.attention(d["query"], d["key"], d["value"], bias, is_causal=is_causal, return_residual=True)
    primals = dict(query=q, key=k, value=v)
    problem = oracle.Problem(q, k, v, bias=bias, mask=mask)
    compare.attention(problem, call, primals, dout=np.zeros_like(q), dlse=np.ones((1, 70, 2), np.float32))


# Causal and window alignment.


def test_causal_alignment_is_a_documented_switch():
    """Top left by default, bottom right at "end"; one query against many keys sees one of them or all."""
    T, S = 64, 32
    q, k, v = qkv(B=1, T=T, S=S, N=1, K=1, H=16)
    end = np.asarray(jattn.attention(q, k, v, is_causal=True, query_offset="end"))
    assert not end[0, : T - S].any() and end[0, T - S :].any(axis=(1, 2)).all()
    top = jattn.attention(q, k, v, is_causal=True)
    near(top[:, S:], jattn.attention(q[:, S:], k, v))
    np.testing.assert_allclose(top[:, 0], v[:, 0], atol=1e-6)
    q, k, v = qkv(B=1, T=1, S=300, N=1, K=1, H=16)
    near(jattn.attention(q, k, v, is_causal=True, query_offset="end"), jattn.attention(q, k, v))
    near(jattn.attention(q, k, v, is_causal=True), v[:, :1])


def test_windows_that_reach_everything_are_causal():
    """(S − 1, 0), (S, 0), (None, 0) and is_causal: values and gradients."""
    q, k, v = qkv(B=1, T=300, S=300, N=2, K=1, H=16)
    want = None
    for options in (dict(is_causal=True), *(dict(local_window_size=(left, 0)) for left in (299, 300, None))):
        got = _with_gradients(functools.partial(jattn.attention, **options))(q, k, v)
        want = want or got
        near(got, want)


def test_a_window_of_three_and_causal_sees_four_keys():
    """For all rows, by unit-vector values: the left bound does not count the query's own key."""
    q, k = np.ones((1, 16, 1, 8), np.float32), np.ones((1, 16, 1, 8), np.float32)
    v = np.eye(16, dtype=np.float32)[None, :, None]
    for options in (
        dict(local_window_size=(3, 0)),
        dict(local_window_size=3, is_causal=True),
        dict(mask=masks.window(3, 0)),
    ):
        seen = np.asarray(jattn.attention(q, k, v, **options))[0, :, 0] > 0
        for t in range(16):
            assert set(np.flatnonzero(seen[t])) == set(range(max(0, t - 3), t + 1))


def test_a_small_soft_cap_does_not_let_masked_keys_leak():
    q, k, v = qkv(B=1, T=128, S=128, N=2, K=1, H=16)
    f = jax.jit(lambda v: jattn.attention(q, k, v, is_causal=True, logits_soft_cap=1.0))
    base = np.asarray(f(v))
    for t in (0, 63, 100):
        future = v.copy()
        future[:, t + 1 :] = 1e3
        np.testing.assert_array_equal(np.asarray(f(future))[:, : t + 1], base[:, : t + 1])


def test_the_soft_cap_is_not_ignored():
    """Forward and backward, dense and packed, on scores up to ±30."""
    q, k, v = qkv(B=1, T=20, S=20, N=2, K=1, H=16)
    q *= 10
    cu = np.array([0, 20], np.int32)
    for f in (
        lambda q, k, v, cap: jattn.attention(q, k, v, logits_soft_cap=cap),
        lambda q, k, v, cap: jattn.ragged_attention(q[0], k[0], v[0], cu, logits_soft_cap=cap),
    ):
        results = [_with_gradients(functools.partial(f, cap=cap))(q, k, v) for cap in (None, 50.0, 5.0)]
        results = [(out, dq) for out, (dq, *_) in results]
        for i in range(3):
            for j in range(i):
                for a, b in zip(results[i], results[j], strict=True):
                    assert np.abs(np.asarray(a - b)).max() > 1e-3


@pytest.mark.parametrize("entry", ["attention", "ragged_attention"])
def test_changing_a_key_changes_later_rows_only(entry):
    """is_causal has an effect, and the right one."""
    q, k, v = qkv(B=1, T=150, S=150, N=2, K=1, H=16)
    if entry == "attention":
        f = jax.jit(lambda k, v: jattn.attention(q, k, v, is_causal=True)[0])
        full = jattn.attention(q, k, v)[0]
    else:
        cu = np.array([0, 150], np.int32)
        f = jax.jit(lambda k, v: jattn.ragged_attention(q[0], k[0], v[0], cu, is_causal=True))
        full = jattn.ragged_attention(q[0], k[0], v[0], cu)
    base = np.asarray(f(k, v))
    assert np.abs(base - full).max() > 0.1
    for j in (0, 64, 127, 149):
        k2, v2 = k.copy(), v.copy()
        k2[:, j] *= -3
        v2[:, j] += 5
        got = np.asarray(f(k2, v2))
        np.testing.assert_array_equal(got[:j], base[:j])
        assert (got[j:] != base[j:]).any(axis=(1, 2)).all()


@pytest.mark.parametrize("T, S", [(512, 2048), (2048, 512), (1, 2048), (2048, 1)])
def test_query_and_key_lengths_far_apart(T, S):
    q, k, v = qkv(B=1, T=T, S=S, N=1, K=1, H=16)
    dlse = np.ones((1, T, 1), np.float32)
    compare.attention(oracle.Problem(q, k, v), lambda d: jattn.attention(**d, return_residual=True), dlse=dlse)


def test_packed_segments_do_not_see_each_other():
    """Other tokens in segment 0 leave segment 1 bit for bit, gradients too."""
    q, k, v = qkv(B=1, T=256, S=256, N=2, K=1, H=16)
    ids = (np.arange(256)[None] >= 100).astype(np.int32)
    f = lambda q, k, v: jattn.attention(q, k, v, is_causal=True, segment_ids=ids)
    run = jax.jit(lambda *x: (f(*x), jax.grad(lambda *x: (f(*x) ** 2).sum(), (0, 1, 2))(*x)))
    base = run(q, k, v)
    changed = [np.concatenate([x[:, :100] * -2 + 1, x[:, 100:]], axis=1) for x in (q, k, v)]
    for g, w in zip(jax.tree.leaves(run(*changed)), jax.tree.leaves(base), strict=True):
        np.testing.assert_array_equal(np.asarray(g)[:, 100:], np.asarray(w)[:, 100:])


# Sizes, padding, head dims.


@pytest.mark.parametrize("S, H", [(1, 16), (5, 64), (63, 32), (129, 16), (257, 32)])
def test_odd_lengths_right_after_memory_full_of_nan(S, H):
    """Three runs with NaN buffers freed in between."""
    q, k, v = qkv(B=1, T=S, S=S, N=2, K=1, H=H)
    f = jax.jit(lambda q, k, v: jattn.attention(q, k, v, is_causal=True))
    want, _ = oracle.forward(oracle.Problem(q, k, v, mask=np.tril(np.ones((S, S), bool))))
    for _ in range(3):
        dirt = [jnp.full((n,), jnp.nan).block_until_ready() for n in (S * H, S * S, 4 * S * H, 2**18)]
        del dirt
        near(f(q, k, v), want)


HEAD_DIMS = [8, 56, 59, 72, 104, 111, 120, 136, 176, 200, 224]


@pytest.mark.parametrize("H", HEAD_DIMS)
def test_every_head_dim_is_right_or_refused_in_every_entry(H):
    """Equal to the call padded with zeros to 256 under the scale of the unpadded dim; gradients too; packed alike."""
    q, k, v = qkv(B=1, T=20, S=33, N=4, K=2, H=H)

    def packed(q, k, v):
        cu_q, cu_k = np.array([0, 20], np.int32), np.array([0, 33], np.int32)
        return jattn.ragged_attention(q[0], k[0], v[0], cu_q, cu_k, is_causal=True, query_offset="end")[None]

    def plain(q, k, v):
        return jattn.attention(q, k, v, is_causal=True, query_offset="end")

    wide = (np.pad(x, ((0, 0),) * 3 + ((0, 256 - H),)) for x in (q, k, v))
    want = jax.tree.map(lambda x: x[..., :H], _of_padded(*wide, np.float32(H**-0.5)))
    for f in (plain, packed):
        near(_with_gradients(f)(q, k, v), want)


def _with_gradients(f):
    """Compiled (q, k, v, ...) -> what f gives, and the gradients of the sum of its squares by q, k and v."""
    run = compare.quickly("float32")
    return run(lambda *x: (f(*x), jax.grad(lambda *x: (f(*x) ** 2).sum(), (0, 1, 2))(*x)))


@_with_gradients  # one program for every head dim
def _of_padded(q, k, v, scale):
    return jattn.attention(q, k, v, scale=scale, is_causal=True, query_offset="end")


@pytest.mark.parametrize("H, D", [(64, 128), (128, 64), (192, 128), (96, 32)])
@pytest.mark.parametrize("N, K", [(6, 2), (8, 1)])
def test_value_dims_and_groups_that_differ(H, D, N, K):
    """dk and dv are sums over the group, with the value's own head dim."""
    q, k, v = qkv(B=1, T=9, S=14, N=N, K=K, H=H, D=D)
    compare.attention(oracle.Problem(q, k, v), lambda d: jattn.attention(**d, return_residual=True))


@pytest.mark.parametrize("H, D, N, K", [(192, 128, 8, 2), (256, 256, 2, 2), (256, 256, 4, 1)])
def test_backward_of_wide_heads(H, D, N, K):
    q, k, v = qkv(B=1, T=33, S=33, N=N, K=K, H=H, D=D, dtype="bfloat16")
    mask = np.tril(np.ones((33, 33), bool))
    compare.attention(
        oracle.Problem(q, k, v, mask=mask), lambda d: jattn.attention(**d, is_causal=True, return_residual=True)
    )


def test_a_value_dim_of_its_own_is_not_padded_in_memory():
    """Narrower values take less: nothing is padded to a common width for every key."""

    def temporaries(D):
        shapes = [jax.ShapeDtypeStruct((1, T, 8, d), jnp.float32) for T, d in ((64, 192), (2**14, 192), (2**14, D))]
        return jax.jit(jattn.attention).lower(*shapes).compile().memory_analysis().temp_size_in_bytes

    assert temporaries(192) - temporaries(128) > 0.9 * 4 * 2**14 * 8 * (192 - 128)


# Transformations.


def test_vmap_with_a_batched_bias_and_a_shared_mask_then_vjp():
    x = np.random.default_rng(0).standard_normal((4, 32, 4, 12)).astype(np.float32)
    bias = np.random.default_rng(1).standard_normal((4, 4, 32, 32)).astype(np.float32)
    mask = np.arange(32)[None, None] < 20

    def one(x, bias, mask):
        return jattn.attention(x, x, x, bias, mask)

    def pulled(f):
        def run(x, b):
            out, pull = jax.vjp(lambda x, b: f(x, b, mask), x, b)
            return out, *pull(jnp.ones_like(out))

        return compare.quickly("float32")(run)

    mapped, alone = pulled(jax.vmap(one, (0, 0, None))), pulled(one)
    for b in (bias, bias[:, :1]):
        got = mapped(x, b)
        for i in range(4):
            near([a[i] for a in got], list(alone(x[i], b[i])))


@pytest.mark.parametrize("shape", [(2, 4, 9, 12), (1, 4, 9, 12), (2, 1, 9, 12), (1, 1, 9, 12), (1, 4, 1, 12)])
def test_the_bias_gradient_is_there_for_every_batch_and_always_the_same(shape):
    """Never silently zero; ten runs, one result."""
    q, k, v = qkv(B=2, T=9, S=12)
    bias = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    run = jax.jit(jax.grad(lambda b: (jattn.attention(q, k, v, b) ** 2).sum()))
    first = np.asarray(run(bias))
    assert first.any(axis=-1).all()
    for _ in range(9):
        np.testing.assert_array_equal(run(bias), first)
    out = np.asarray(jattn.attention(q, k, v, bias))
    truth = oracle.backward(oracle.Problem(q, k, v, bias=bias), 2 * out)["bias"]
    near(first, truth)


def test_a_float32_bias_of_sixteen_bit_queries_has_a_float32_gradient():
    q, k, v = qkv(B=2, T=40, S=40, N=4, K=4, H=32, dtype="bfloat16")
    bias = np.random.default_rng(0).standard_normal((1, 4, 40, 40)).astype(np.float32)
    compare.attention(oracle.Problem(q, k, v, bias=bias), lambda d: jattn.attention(**d, return_residual=True))


def test_numbers_given_traced_do_what_they_do_given_in_python():
    """Or are refused with a TypeError: no silent folding into one compiled variant."""
    q, k, v = qkv()
    for name, values in (("scale", (0.2, 0.7)), ("logits_soft_cap", (2.0, 9.0)), ("local_window_size", (1, 4))):
        f = jax.jit(lambda x, name=name: jattn.attention(q, k, v, **{name: x}))
        for value in values:
            try:
                got = f(value)
            except TypeError as error:
                assert "window" in str(error) or name in str(error)
            else:
                near(got, jattn.attention(q, k, v, **{name: value}))


# Block masks, cotangents, dispatch.


def irregular(kind, rng, S=384):
    t, s = np.arange(S)[:, None], np.arange(S)
    if kind == "block diagonal":
        return t // 96 == s // 96
    if kind == "strided":
        return (t - s) % int(rng.integers(2, 9)) == 0
    if kind == "prefix":
        return s < rng.integers(0, S, (S, 1))
    if kind == "holes":
        mask = np.ones((S, S), bool)
        for i, j in rng.integers(0, S - 70, (12, 2)):
            mask[i : i + 70, j : j + 70] = False
        return mask
    if kind == "one key a row":
        return s == rng.integers(0, S, (S, 1))
    if kind == "empty rows":
        return (rng.random((S, 1)) < 0.7) & (rng.random((S, S)) < 0.5)
    return (rng.random((1, S)) < 0.3) & (rng.random((S, S)) < 0.5)


def test_irregular_masks_are_right_forward_and_backward():
    """Random masks of seven kinds, as arrays and as blocks of 64 and 128; keys that nobody sees get no gradient."""
    q, k, v = qkv(B=1, T=384, S=384, N=1, K=1, H=16)
    rng = np.random.default_rng(0)
    dout = rng.standard_normal(q.shape).astype(np.float32)

    def run(q, k, v, mask):
        out, pull = jax.vjp(lambda q, k, v: jattn.attention(q, k, v, mask=mask), q, k, v)
        return out, *pull(dout)

    run = jax.jit(run)
    for kind in ("block diagonal", "strided", "prefix", "holes", "one key a row", "empty rows", "empty columns"):
        mask = np.broadcast_to(irregular(kind, rng), (384, 384))
        variants = [(mask, mask)]
        for size in (64, 128):
            coarse = mask.reshape(384 // size, size, 384 // size, size).mean((1, 3)) > 0.3
            variants.append((masks.blocks(coarse, size), coarse.repeat(size, 0).repeat(size, 1)))
        for given, dense in variants:
            out, dq, dk, dv = run(q, k, v, given)
            problem = oracle.Problem(q, k, v, mask=dense)
            truth = oracle.backward(problem, dout)
            near((out, dq, dk, dv), (truth["forward"][0], truth["query"], truth["key"], truth["value"]))
            unseen = ~dense.any(0)
            assert not np.asarray(dk)[0, unseen].any() and not np.asarray(dv)[0, unseen].any()


def test_cotangents_that_are_views():
    """Transposed, strided, broadcast and symbolically zero."""
    q, k, v = qkv(T=20, S=20)
    f = lambda q: jattn.attention(q, k, v, is_causal=True)
    weight = np.random.default_rng(0).standard_normal((2, 20, 4, 16)).astype(np.float32)
    pull = jax.vjp(f, q)[1]
    for view, cotangent in (
        (lambda o: (o.transpose(0, 2, 1, 3) * weight.transpose(0, 2, 1, 3)).sum(), weight),
        (lambda o: o[:, ::2].sum(), np.broadcast_to(np.arange(20)[:, None, None] % 2 == 0, weight.shape)),
        (lambda o: o.sum(), np.ones_like(weight)),
        (lambda o: jnp.zeros(()), np.zeros_like(weight)),
    ):
        near(jax.grad(lambda q, view=view: view(f(q)))(q), pull(jnp.asarray(cotangent, jnp.float32))[0])


def test_dispatch_falls_back_only_when_nothing_is_named():
    q, k, v = qkv()
    assert jattn.explain(q, k, v).implementation in ("xla",)
    np.testing.assert_array_equal(jattn.attention(q, k, v), jattn.attention(q, k, v, implementation="xla"))
    with pytest.raises(ValueError, match=r"(?s)mosaic_of_tomorrow.*xla"):
        jattn.attention(q, k, v, implementation="mosaic_of_tomorrow")


def test_modifiers_and_masks_survive_both_at_once():
    """A modifier, a block mask and a window in one call, against the oracle."""
    q, k, v = qkv(B=1, T=70, S=90, N=2, K=1)
    blocks = np.random.default_rng(0).random((5, 6)) < 0.6
    t, s = np.arange(70)[:, None], np.arange(90)
    mask = blocks.repeat(16, 0)[:70].repeat(16, 1)[:, :90] & (s >= t - 40)
    mod = oracle.ScoreMod(lambda x, b, n, t, s: x - 0.05 * (n + 1) * abs(t - s), lambda x, b, n, t, s: 1.0)
    slopes = np.array([0.05, 0.1], np.float32)
    call = lambda d: jattn.attention(
        **d,
        mask=masks.blocks(blocks, 16),
        local_window_size=(40, None),
        score_mod=mods.alibi(slopes),
        return_residual=True,
    )
    fn = lambda x, b, n, t, s: x - 0.05 * ((n + 1) * abs(t - s)).astype(x.dtype)
    compare.attention(oracle.Problem(q, k, v, mask=mask, score_mod=mod), call, score_mod=fn)

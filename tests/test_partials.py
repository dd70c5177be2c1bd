import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jattn.partials import empty, merge

SHAPE = 5, 3, 4  # [..., D]


def partial(seed, dtype=jnp.float32, spread=3.0, shape=SHAPE):
    rng = np.random.default_rng(seed)
    out, lse = rng.standard_t(3, shape), spread * rng.standard_normal(shape[:-1])
    return jnp.asarray(out, dtype), jnp.asarray(lse, jnp.float64 if dtype == jnp.float64 else jnp.float32)


def attention_numpy(scores, values):
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    lse = np.log(weights.sum(-1)) + scores.max(-1)
    return weights @ values / weights.sum(-1, keepdims=True), lse


def same_bits(a, b):
    a, b = np.asarray(a), np.asarray(b)
    return a.dtype == b.dtype and a.tobytes() == b.tobytes()


@pytest.mark.parametrize("parts", [1, 2, 5])
def test_merged_parts_are_attention_over_all_keys(parts):
    rng = np.random.default_rng(0)
    scores, values = 4 * rng.standard_normal((7, 40)), rng.standard_t(3, (40, 6))
    cuts = np.linspace(0, 40, parts + 1).astype(int)
    pairs = [attention_numpy(scores[:, a:b], values[a:b]) for a, b in zip(cuts[:-1], cuts[1:], strict=True)]
    out, lse = merge(*((jnp.asarray(o, jnp.float32), jnp.asarray(s, jnp.float32)) for o, s in pairs))
    true_out, true_lse = attention_numpy(scores, values)
    np.testing.assert_allclose(out, true_out, rtol=0, atol=2e-6)
    np.testing.assert_allclose(lse, true_lse, rtol=0, atol=2e-6)


def test_order_and_grouping_change_rounding_only():
    a, b, c = partial(0), partial(1), partial(2)
    reference = merge(a, b, c)
    for other in (merge(merge(a, b), c), merge(a, merge(b, c)), merge(c, a, b)):
        for x, y in zip(reference, other, strict=True):
            np.testing.assert_allclose(x, y, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_merging_with_an_empty_changes_no_bit(dtype):
    out, lse = partial(0, dtype)
    out = out.at[0, 0].set(-0.0).at[1, 0].set(jnp.finfo(dtype).max)
    lse = lse.at[0, 1].set(-jnp.inf).at[2].set(1e30)
    out = out.at[0, 1].set(0.0)
    none = empty(SHAPE, dtype)
    for merged in (merge((out, lse)), merge((out, lse), none), merge(none, (out, lse)), merge(none, (out, lse), none)):
        assert same_bits(merged[0], out) and same_bits(merged[1], lse)
    merged = jax.jit(merge)(none, (out, lse))
    assert same_bits(merged[0], out) and same_bits(merged[1], lse)


def test_empties_merge_to_empty():
    for count in (1, 2, 4):
        out, lse = merge(*[empty(SHAPE, jnp.bfloat16)] * count)
        assert same_bits(out, jnp.zeros(SHAPE, jnp.bfloat16))
        assert same_bits(lse, jnp.full(SHAPE[:-1], -jnp.inf, jnp.float32))


def test_the_out_of_an_empty_is_not_read():
    out, lse = partial(0)
    poison = jnp.full(SHAPE, jnp.nan, jnp.float32), jnp.full(SHAPE[:-1], -jnp.inf, jnp.float32)
    merged = merge((out, lse), poison)
    assert same_bits(merged[0], out) and same_bits(merged[1], lse)
    assert same_bits(merge(poison)[0], jnp.zeros(SHAPE, jnp.float32))
    gradient = jax.grad(lambda a, b: merge(a, b)[0].sum(), argnums=(0, 1))((out, lse), poison)
    assert all(bool(jnp.isfinite(x).all()) for x in jax.tree.leaves(gradient))


def test_extreme_lse_and_out_stay_finite():
    big = jnp.finfo(jnp.float32).max
    for lses in ((3e38, -3e38), (-3e38, -3e38), (3e38, 3e38), (-big, -jnp.inf), (88.0, -120.0)):
        pairs = [(jnp.full((1, 2), s * big / 4, jnp.float32), jnp.full((1,), x, jnp.float32))
                 for s, x in zip((1, -1), lses, strict=True)]  # fmt: skip
        values = merge(*pairs)
        assert all(bool(jnp.isfinite(x).all()) for x in values), lses
        gradient = jax.grad(lambda pairs: merge(*pairs)[0].mean() + merge(*pairs)[1].sum())(pairs)
        assert all(bool(jnp.isfinite(x).all()) for x in jax.tree.leaves(gradient)), lses


def test_equal_outs_of_the_largest_float_do_not_overflow():
    big = jnp.full((1, 2), jnp.finfo(jnp.float32).max), jnp.zeros(1, jnp.float32)
    assert same_bits(merge(big, big)[0], big[0])


def test_no_nan_is_met_on_the_way():
    with jax.debug_nans(True):
        for pair in (empty(SHAPE), partial(0)):
            jax.grad(lambda a, b: merge(a, b)[0].sum(), argnums=(0, 1))(pair, empty(SHAPE))


def test_gradients_are_zero_or_one_at_empties():
    """The Jacobian with respect to an empty partial is 0, with respect to its finite partner the identity."""
    one, none = partial(0), empty(SHAPE)
    (d_one, d_none), (z_one, z_none) = jax.grad(
        lambda a, b: merge(a, b)[0].sum() + merge(a, b)[1].sum(), argnums=(0, 1)
    )(one, none)
    np.testing.assert_array_equal(d_one, np.ones(SHAPE, np.float32))
    np.testing.assert_allclose(d_none, np.ones(SHAPE[:-1]), rtol=1e-6)
    for x in (z_one, z_none, *jax.tree.leaves(jax.grad(lambda a: merge(a, a)[0].sum() + merge(a, a)[1].sum())(none))):
        np.testing.assert_array_equal(x, np.zeros(x.shape, np.float32))


def test_gradients_match_the_formula():
    """d lse = sum p_i d lse_i and d out = sum p_i (d out_i + (out_i - out) d lse_i), in float64 NumPy."""
    pairs = [partial(i) for i in range(3)]
    rng = np.random.default_rng(9)
    d_out, d_lse = rng.standard_normal(SHAPE), rng.standard_normal(SHAPE[:-1])
    _, pullback = jax.vjp(merge, *pairs)
    gradients = pullback((jnp.asarray(d_out, jnp.float32), jnp.asarray(d_lse, jnp.float32)))
    outs, lses = (np.stack([np.asarray(pair[i], np.float64) for pair in pairs]) for i in (0, 1))
    p = np.exp(lses - lses.max(0))
    p /= p.sum(0)
    mean = (p[..., None] * outs).sum(0)
    for i, (g_out, g_lse) in enumerate(gradients):
        np.testing.assert_allclose(g_out, p[i][..., None] * d_out, rtol=0, atol=3e-6)
        expected = p[i] * (((outs[i] - mean) * d_out).sum(-1) + d_lse)
        np.testing.assert_allclose(g_lse, expected, rtol=0, atol=1e-5)


def test_forward_mode_second_derivatives_and_vmap():
    a, b = partial(0), partial(1)
    a = a[0], a[1].at[0].set(-jnp.inf)
    tangents = partial(2), partial(3)
    primal, tangent = jax.jvp(merge, (a, b), tangents)
    assert all(bool(jnp.isfinite(x).all()) for x in tangent)
    cotangent = partial(4)
    _, pullback = jax.vjp(merge, a, b)

    def dot(x, y):
        return sum(float(jnp.vdot(u, v)) for u, v in zip(jax.tree.leaves(x), jax.tree.leaves(y), strict=True))

    np.testing.assert_allclose(dot(tangent, cotangent), dot(tangents, pullback(cotangent)), rtol=1e-4)
    curvature = jax.hessian(lambda lse: merge((a[0][0, 0], lse), (b[0][0, 0], b[1][0, 0]))[1])(a[1][1, 0])
    assert bool(jnp.isfinite(curvature)) and curvature > 0
    mapped = jax.vmap(merge, in_axes=(1, None), out_axes=1)(a, (b[0][:, 0], b[1][:, 0]))
    looped = [merge((a[0][:, i], a[1][:, i]), (b[0][:, 0], b[1][:, 0])) for i in range(SHAPE[1])]
    for i in (0, 1):
        np.testing.assert_allclose(mapped[i], jnp.stack([x[i] for x in looped], 1), rtol=1e-6)
    for x, y in zip(jax.jit(merge)(a, b), primal, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-6)


def test_scan_over_empty_equals_n_ary():
    pairs = [partial(i) for i in range(4)]
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *pairs)
    scanned, _ = jax.lax.scan(lambda state, pair: (merge(state, pair), None), empty(SHAPE), stacked)
    folded = functools.reduce(merge, pairs)
    for x, y, z in zip(scanned, folded, merge(*pairs), strict=True):
        np.testing.assert_allclose(x, z, rtol=2e-6, atol=2e-6)
        np.testing.assert_allclose(y, z, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize(
    "first, second, out_dtype",
    [
        (jnp.float32, jnp.float32, jnp.float32),
        (jnp.bfloat16, jnp.bfloat16, jnp.bfloat16),
        (jnp.float16, jnp.bfloat16, jnp.float32),
        (jnp.bfloat16, jnp.float32, jnp.float32),
    ],
)
@pytest.mark.parametrize("promotion", ["standard", "strict"])
def test_dtypes(first, second, out_dtype, promotion):
    with jax.numpy_dtype_promotion(promotion):
        a, b = empty(SHAPE, first), empty(SHAPE, second)
        assert a[0].dtype == first and a[1].dtype == jnp.float32
        out, lse = merge(a, b)
        assert out.dtype == out_dtype and lse.dtype == jnp.float32
        gradient = jax.grad(lambda a, b: merge(a, b)[1].sum(), argnums=(0, 1))(a, b)
        assert gradient[0][0].dtype == first and gradient[1][0].dtype == second


def test_float64_is_computed_in_float64():
    with jax.enable_x64(True):
        a, b = partial(0, jnp.float64), partial(1, jnp.float64)
        out, lse = merge(a, b)
        assert out.dtype == lse.dtype == empty(SHAPE, jnp.float64)[1].dtype == jnp.float64
        np.testing.assert_allclose(lse, np.logaddexp(a[1], b[1]), rtol=1e-14)


def test_low_precision_is_merged_in_float32():
    a, b = partial(0, jnp.bfloat16), partial(1, jnp.bfloat16)
    exact = merge((a[0].astype(jnp.float32), a[1]), (b[0].astype(jnp.float32), b[1]))[0]
    assert same_bits(merge(a, b)[0], exact.astype(jnp.bfloat16))


def test_zero_sized_and_scalar_rows():
    out, lse = merge(empty((0, 4)), empty((0, 4)))
    assert out.shape == (0, 4) and lse.shape == (0,)
    out, lse = merge((jnp.ones(4), jnp.float32(0.0)), (jnp.zeros(4), jnp.float32(0.0)))
    np.testing.assert_allclose(out, np.full(4, 0.5), rtol=1e-6)
    np.testing.assert_allclose(lse, np.log(2), rtol=1e-6)


def test_errors():
    out, lse = empty(SHAPE)
    with pytest.raises(TypeError, match="at least one partial"):
        merge()
    with pytest.raises(TypeError, match=r"partials\[1\] must be a pair \(out, lse\), got \w*Array"):
        merge((out, lse), out)
    with pytest.raises(TypeError, match=r"partials\[0\] must be a pair"):
        merge((out, lse, lse))
    with pytest.raises(TypeError, match=r"partials\[1\] out must be floating point, got int32"):
        merge((out, lse), (out.astype(jnp.int32), lse))
    with pytest.raises(TypeError, match=r"partials\[0\] lse must be floating point, got bool"):
        merge((out, lse == 0))
    with pytest.raises(ValueError, match=r"partials\[1\] lse shape \(5,\) must equal out's \(5, 3, 4\) without"):
        merge((out, lse), (out, lse[:, 0]))
    with pytest.raises(ValueError, match=r"partials\[1\] out shape \(2, 3, 4\) must equal partials\[0\]'s \(5, 3, 4\)"):
        merge((out, lse), (out[:2], lse[:2]))
    with pytest.raises(ValueError, match=r"partials\[0\] lse shape \(\) must equal out's \(\)"):
        merge((lse[0, 0], lse[0, 0]))
    with pytest.raises(ValueError, match=r"shape=\(\)"):
        empty(())
    with pytest.raises(TypeError, match="dtype must be floating point, got int32"):
        empty((3, 4), jnp.int32)

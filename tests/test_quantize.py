"""`quantize` and `dequantize`: every element within half a step of its scale, whatever a scale belongs to."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jattn
from jattn import Quantized, dequantize, quantize

SHAPE = (2, 9, 3, 16)
LARGEST = {"int8": 127, "float8_e4m3fn": 448}
SCALES = {"tensor": ((), None), "head": ((3,), (0, 1, 3)), "token": ((2, 9, 3), 3)}  # shape, and the axes it spans
EPS = np.finfo(np.float32).eps


def heavy(shape=SHAPE):
    """Student-t, with scales of their own for channels and for tokens."""
    rng = np.random.default_rng(0)
    channels, tokens = rng.uniform(0.01, 30, shape[-1]), rng.uniform(0.1, 10, (*shape[:-1], 1))
    return (rng.standard_t(3, shape) * channels * tokens).astype(np.float32)


def half_step(x, dtype):
    """The largest distance between x (in units of the scale) and the nearest number of the dtype."""
    if dtype == "int8":
        return 0.5
    return 2.0 ** (np.floor(np.log2(np.maximum(np.abs(x), 2.0**-6))) - 4)  # 3 bits of fraction, least exponent -6


@pytest.mark.quick
@pytest.mark.parametrize("per", SCALES)
@pytest.mark.parametrize("dtype", LARGEST)
def test_the_error_is_half_a_step(dtype, per):
    x, (shape, axes) = heavy(), SCALES[per]
    q = jax.jit(quantize, static_argnames=("dtype", "per"))(x, dtype=dtype, per=per)
    assert (q.shape, q.dtype, q.scale.shape, q.scale.dtype, q.per) == (SHAPE, dtype, shape, np.float32, per)
    want = np.abs(x).max(axis=axes) / np.float32(LARGEST[dtype])
    assert (np.abs(q.scale - want) <= 2 * EPS * want).all()
    scale = np.asarray(q.scale, np.float64)
    scale = scale if per == "tensor" else scale[..., None]
    units = x / scale
    error = np.abs(np.asarray(q.values).astype(np.float64) - units)
    assert (error <= half_step(units, dtype) + 2 * EPS * np.abs(units)).all()
    back = np.asarray(dequantize(q), np.float64)
    np.testing.assert_array_equal(back, (np.asarray(q.values).astype(np.float64) * scale).astype(np.float32))


@pytest.mark.parametrize("dtype", LARGEST)
def test_numbers_that_can_be_stored_come_back(dtype):
    if dtype == "int8":
        x = np.arange(-127, 128, dtype=np.float32)
    else:
        x = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
        x = x[np.isfinite(x)]
    x = x.reshape(-1, 1, 1)
    np.testing.assert_array_equal(dequantize(quantize(x, dtype, scale=np.float32(1))), x)
    np.testing.assert_array_equal(dequantize(quantize(x, dtype, per="tensor")), x)


@pytest.mark.parametrize("dtype", LARGEST)
def test_zeros_are_zeros_and_the_smallest_numbers_do_not_divide_by_zero(dtype):
    for x in (np.zeros((2, 1, 4), np.float32), np.full((2, 1, 4), 1e-38, np.float32)):
        q = quantize(x, dtype)
        assert np.isfinite(dequantize(q)).all() and (np.abs(dequantize(q) - x) <= q.scale[..., None]).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", LARGEST)
def test_nan_and_inf_are_not_hidden(dtype, bad):
    """They show in what shares their scale, and there alone; under a given scale Inf saturates."""
    x = heavy()
    x[1, 4, 2, 7] = bad
    back = np.asarray(dequantize(quantize(x, dtype)))
    assert np.isnan(back[1, 4, 2]).any() and np.isfinite(np.delete(back.reshape(-1, 16), 27 + 4 * 3 + 2, axis=0)).all()
    given = np.asarray(dequantize(quantize(x, dtype, scale=np.float32(1))))[1, 4, 2, 7]
    if np.isinf(bad):
        assert given == np.sign(bad) * LARGEST[dtype]
    else:
        assert given == 0 if dtype == "int8" else np.isnan(given)


@pytest.mark.parametrize("dtype", LARGEST)
def test_larger_than_a_given_scale_saturates(dtype):
    x, top = np.array([1e6, -1e6, 1], np.float32).reshape(3, 1, 1), LARGEST[dtype]
    back = dequantize(quantize(x, dtype, scale=np.ones(1, np.float32)))
    np.testing.assert_array_equal(np.ravel(back), [top, -top, 1])


def test_dequantize_rounds_to_the_dtype_asked_for():
    q = quantize(heavy().astype(ml_dtypes.bfloat16))
    assert dequantize(q, jnp.bfloat16).dtype == jnp.bfloat16
    np.testing.assert_array_equal(dequantize(q, jnp.bfloat16), dequantize(q).astype(jnp.bfloat16))


def test_a_pytree_of_two_arrays():
    q = quantize(heavy())
    assert len(jax.tree.leaves(q)) == 2
    doubled = jax.jit(jax.vmap(lambda q: Quantized(q.values, q.scale * 2)))(q)
    np.testing.assert_array_equal(dequantize(doubled), 2 * dequantize(q))


@pytest.mark.parametrize(
    "call, error, words",
    [
        (lambda x: quantize(x.astype(np.int32)), TypeError, "x must be a floating-point array, not int32"),
        (lambda x: quantize([1.0]), TypeError, "x must be a floating-point array, not list"),
        (lambda x: quantize(x[0, 0]), ValueError, r"x has shape \(3, 16\); expected \[..., S, K, H\]"),
        (lambda x: quantize(x, "int4"), TypeError, "dtype=int4 must be one of int8, float8_e4m3fn"),
        (lambda x: quantize(x, per="page"), ValueError, "per='page' must be one of 'tensor', 'head', 'token'"),
        (lambda x: quantize(x, scale=np.ones(3, np.int32)), TypeError, "scale must be floating-point, not int32"),
        (lambda x: quantize(x, scale=np.ones(2, np.float32)), ValueError, r"scale has shape \(2,\); expected one of"),
        (lambda x: dequantize(x), TypeError, "x must be a jattn.Quantized, not ndarray"),
        (lambda x: dequantize(Quantized(x, x)), ValueError, r"scale has shape \(2, 9, 3, 16\); expected one of \(\)"),
    ],
)
def test_refused(call, error, words):
    with pytest.raises(error, match=words):
        call(heavy())


def test_import_names():
    assert {"Quantized", "quantize", "dequantize"} <= set(jattn.__all__)

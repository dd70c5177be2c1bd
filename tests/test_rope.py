import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jattn.rope import LinearScaling, Llama3Scaling, rope

B, T, N, H = 2, 9, 3, 16


def rotate_numpy(x, positions, base=10000.0, rotary_dim=None, scale=lambda f: f, interleaved=False):
    """Pairs as complex numbers times exp(i · angle), in extended precision."""
    x = np.asarray(x).astype(np.longdouble)
    R = x.shape[-1] if rotary_dim is None else rotary_dim
    frequencies = np.array([scale(np.longdouble(base) ** (np.longdouble(-2 * i) / R)) for i in range(R // 2)])
    angles = np.asarray(positions).astype(np.longdouble)[..., None] * frequencies
    index = np.arange(R).reshape(-1, 2) if interleaved else np.arange(R).reshape(2, -1).T
    z = (x[..., index[:, 0]] + 1j * x[..., index[:, 1]]) * np.exp(1j * angles)[..., None, :]
    out = x.copy()
    out[..., index[:, 0]], out[..., index[:, 1]] = z.real, z.imag
    return out


def llama3(frequency, factor=8, low=1, high=4, length=8192):
    """The three cases of the Llama 3.1 release."""
    wavelength = 2 * np.pi / frequency
    if wavelength < length / high:
        return frequency
    if wavelength > length / low:
        return frequency / factor
    smooth = (length / wavelength - low) / (high - low)
    return (1 - smooth) * frequency / factor + smooth * frequency


def data(shape=(B, T, N, H), dtype=jnp.float32, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_t(3, shape), dtype)


def assert_close(out, truth, tolerance=1e-6):
    assert np.abs(np.asarray(out).astype(np.longdouble) - truth).max() <= tolerance * np.abs(truth).max()


POSITIONS = {
    "default": None,
    "shared": np.arange(T, dtype=np.int32) * 1000 - 3000,
    "per batch": np.random.default_rng(1).integers(-(2**20), 2**20, (B, T)).astype(np.int32),
    "int8": np.arange(-128, -128 + T).astype(np.int8),
    "huge": np.array([2**31 - 1, -(2**31), 2**30 + 1, -(2**24) - 1, 999999, 0, 1, -1, 2**16], np.int32),
    "uint32": np.array([2**32 - 1, 2**31, 5, 0, 2**31 + 9, 1, 2, 3, 4], np.uint32),
}


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotary_dim", [None, 6])
@pytest.mark.parametrize("name", POSITIONS)
def test_matches_complex_numbers(name, rotary_dim, interleaved):
    x, positions = data(), POSITIONS[name]
    out = rope(x, positions, rotary_dim=rotary_dim, interleaved=interleaved)
    assert out.shape == x.shape and out.dtype == x.dtype
    truth = rotate_numpy(x, np.arange(T) if positions is None else positions, 10000.0, rotary_dim, lambda f: f,
                         interleaved)  # fmt: skip
    assert_close(out, truth, 2e-6 if name in ("huge", "uint32") else 5e-7)


@pytest.mark.parametrize("base", [10000, 5e5, 7.0, 0.5])
def test_base(base):
    positions = np.arange(T, dtype=np.int32) * 12345
    assert_close(rope(data(), positions, base=base), rotate_numpy(data(), positions, base), 5e-7)


@pytest.mark.parametrize(
    "scaling, scale",
    [
        (LinearScaling(4.0), lambda f: f / 4),
        (Llama3Scaling(), llama3),
        (Llama3Scaling(32.0, 2, 3.5, 1000), lambda f: llama3(f, 32, 2, 3.5, 1000)),
    ],
)
def test_scaling(scaling, scale):
    x = data((1, T, 1, 128))
    positions = np.arange(T, dtype=np.int32) * 12345
    assert_close(rope(x, positions, base=500000.0, scaling=scaling), rotate_numpy(x, positions, 5e5, None, scale), 1e-6)


def test_linear_scaling_is_division_of_positions():
    x, positions = data(), np.arange(T, dtype=np.int32)
    np.testing.assert_allclose(rope(x, positions * 4, scaling=LinearScaling(4)), rope(x, positions), atol=1e-5)


def test_llama3_reaches_its_three_cases():
    frequencies = 500000.0 ** (-np.arange(0, 128, 2) / 128)
    ratio = Llama3Scaling()(frequencies) / frequencies
    assert ratio[0] == 1 and ratio[-1] == 1 / 8 and ((ratio > 1 / 8) & (ratio < 1)).sum() == 6


@pytest.mark.parametrize("dtype, tolerance", [(jnp.bfloat16, 2**-8), (jnp.float16, 2**-11)])
def test_low_precision_is_rotated_in_float32(dtype, tolerance):
    x, positions = data(dtype=dtype), POSITIONS["per batch"]
    out = rope(x, positions)
    assert out.dtype == dtype
    assert_close(out, rotate_numpy(x, positions), tolerance)
    exact = rope(x.astype(jnp.float32), positions).astype(dtype)
    assert np.asarray(out).tobytes() == np.asarray(exact).tobytes()


def test_float64_and_int64():
    with jax.enable_x64(True):
        x = data(dtype=jnp.float64)
        positions = jnp.asarray(np.arange(T) * 1000 - 4000)
        assert positions.dtype == jnp.int64
        out = rope(x, positions)
        assert out.dtype == jnp.float64
        assert_close(out, rotate_numpy(x, positions), 1e-11)
        far = jnp.asarray(np.arange(T) + 2**33)
        out = rope(x.astype(jnp.float32), far)
        assert out.dtype == jnp.float32
        assert_close(out, rotate_numpy(x.astype(jnp.float32), far), 5e-6)


def test_products_depend_on_relative_position_only():
    q, k = data((1, 1, 1, H), seed=1), data((1, 1, 1, H), seed=2)

    def product(t, s):
        return float(jnp.vdot(rope(q, np.array([t], np.int32)), rope(k, np.array([s], np.int32))))

    for distance in (-7, 0, 3, 500):
        near = product(0, distance)
        for start in (11, -1000, 123456, 10**9):
            np.testing.assert_allclose(product(start, start + distance), near, rtol=0, atol=2e-5)


@pytest.mark.parametrize("name", ["shared", "per batch", "huge"])
def test_negative_positions_invert(name):
    x, positions = data(), np.maximum(POSITIONS[name], -(2**31) + 1)  # -(-(2**31)) is no int32
    for interleaved in (False, True):
        back = rope(rope(x, positions, interleaved=interleaved), -positions, interleaved=interleaved)
        np.testing.assert_allclose(back, x, rtol=0, atol=1e-5)


def test_unrotated_channels_keep_their_bits_and_position_zero_is_the_identity():
    x = data()
    out = rope(x, POSITIONS["per batch"], rotary_dim=4)
    np.testing.assert_array_equal(out[..., 4:], x[..., 4:])
    np.testing.assert_array_equal(rope(x, np.zeros(T, np.int32)), x)


def test_batch_dimensions():
    x = data((2, 3, T, N, H))
    positions = np.random.default_rng(2).integers(0, 99, (2, 3, T)).astype(np.int32)
    assert_close(rope(x, positions), rotate_numpy(x, positions))
    assert_close(rope(x[0, 0], positions[0, 0]), rotate_numpy(x[0, 0], positions[0, 0]))
    assert_close(rope(x), rotate_numpy(x, np.arange(T)))
    assert rope(x[:, :, :0]).shape == (2, 3, 0, N, H)


def test_gradient_is_the_inverse_rotation():
    x, g, positions = data(), data(seed=1), POSITIONS["per batch"]
    for options in ({}, {"interleaved": True}, {"rotary_dim": 6}):
        out, pullback = jax.vjp(lambda x, options=options: rope(x, positions, **options), x)
        np.testing.assert_allclose(pullback(g)[0], rope(g, -positions, **options), rtol=0, atol=1e-5)
        _, tangent = jax.jvp(lambda x, options=options: rope(x, positions, **options), (x,), (g,))
        np.testing.assert_allclose(tangent, rope(g, positions, **options), rtol=0, atol=1e-5)
    assert jax.grad(lambda x: rope(x).astype(jnp.float32).sum())(x.astype(jnp.bfloat16)).dtype == jnp.bfloat16


def test_jit_and_vmap():
    x, positions = data(), POSITIONS["per batch"]
    expected = rope(x, positions, scaling=Llama3Scaling())
    jitted = jax.jit(rope, static_argnames=("base", "rotary_dim", "scaling", "interleaved"))
    np.testing.assert_allclose(jitted(x, positions, scaling=Llama3Scaling()), expected, rtol=0, atol=1e-6)
    mapped = jax.vmap(lambda x, p: rope(x, p, scaling=Llama3Scaling()))(x, positions)
    np.testing.assert_allclose(mapped, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    "error, match, arguments",
    [
        (ValueError, r"x must be \[\*B, T, N, H\], got shape \(9, 16\)", {"x": np.zeros((T, H), np.float32)}),
        (TypeError, "x must be floating point, got int32", {"x": np.zeros((B, T, N, H), np.int32)}),
        (TypeError, "positions must be integers, got float32", {"positions": np.zeros(T, np.float32)}),
        (TypeError, "positions must be integers, got bool", {"positions": np.zeros(T, bool)}),
        (ValueError, r"positions shape \(8,\) must be \[T\] or \[\*B, T\]", {"positions": np.arange(8)}),
        (ValueError, r"positions shape \(1, 9\) must be", {"positions": np.arange(T)[None]}),
        (ValueError, r"rotary_dim=5 must be even and in \[2, H=16\]", {"rotary_dim": 5}),
        (ValueError, "rotary_dim=18 must be even", {"rotary_dim": 18}),
        (ValueError, "rotary_dim=0 must be even", {"rotary_dim": 0}),
        (TypeError, "rotary_dim must be an int, got float", {"rotary_dim": 4.0}),
        (ValueError, "head dim H=15 must be even", {"x": np.zeros((B, T, N, 15), np.float32)}),
        (ValueError, "base=0 must be positive", {"base": 0}),
        (ValueError, "base=nan must be positive", {"base": float("nan")}),
        (TypeError, "base must be a Python number, got str", {"base": "10000"}),
        (TypeError, "scaling must be None, LinearScaling or Llama3Scaling, got dict", {"scaling": {"factor": 2}}),
    ],
)
def test_errors(error, match, arguments):
    arguments = dict(arguments)
    with pytest.raises(error, match=match):
        rope(arguments.pop("x", np.zeros((B, T, N, H), np.float32)), **arguments)


def test_scaling_errors():
    with pytest.raises(ValueError, match="factor=0 must be positive"):
        LinearScaling(0)
    with pytest.raises(TypeError, match="original_length must be a Python number, got NoneType"):
        Llama3Scaling(original_length=None)
    with pytest.raises(ValueError, match=r"low_freq_factor=4 must be below high_freq_factor=4.0"):
        Llama3Scaling(low_freq_factor=4)
    with pytest.raises(dataclasses.FrozenInstanceError):
        LinearScaling(2.0).factor = 3.0

"""Kimi Delta Attention and Gated DeltaNet as Flax layers: the published formulas, and decoding through the cache."""

import compare
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from linear_cases import quick_compiles  # noqa: F401 -- for every test here
from nnx_cases import B, M, T, call, decoded, disturb, gradients, parameters, rms, sigmoid, tokens

import jattn.nnx

LAYERS = {
    "kda": (jattn.nnx.KimiDeltaAttention, dict(num_heads=2, mode="recurrent")),
    "kda, bounded": (
        jattn.nnx.KimiDeltaAttention,
        dict(
            num_heads=4, qkv_features=16, num_qk_heads=2, value_head_dim=6, out_features=10, gate="bounded",
            lower_bound=-2.0, beta_activation="sigmoid2", use_bias=True, conv_kernel_size=3,
        ),
    ),
    "gdn": (jattn.nnx.GatedDeltaNet, dict(num_heads=4, qkv_features=16, num_qk_heads=2, value_head_dim=6)),
}  # fmt: skip


def layer(name, **options):
    make, own = LAYERS[name]
    return disturb(make(in_features=M, **own, **options, rngs=nnx.Rngs(0)))


def formula(layer, x, dtype):
    """The layer in NumPy, token by token, in `dtype`."""
    w, x = parameters(layer, dtype), x.astype(dtype)

    def project(name, x=x, axes=1):
        y = np.tensordot(x, w[name + ".kernel"], axes)
        return y + w[name + ".bias"] if name + ".bias" in w else y

    def convolved(name):
        y, taps = project(name), w[f"{name}_conv.kernel"]
        flat, width = y.reshape(*y.shape[:2], -1), taps.shape[1]
        padded = np.pad(flat, ((0, 0), (width - 1, 0), (0, 0)))
        z = sum(padded[:, i : i + T] * taps[:, i] for i in range(width))
        return (z * sigmoid(z)).reshape(y.shape)

    def unit(x):
        return x / np.sqrt((x * x).sum(-1, keepdims=True) + dtype(1e-6))

    group = layer.num_heads // layer.num_qk_heads
    query, key = (np.repeat(unit(convolved(name)), group, axis=2) for name in ("query", "key"))
    query = query * dtype(layer.head_dim**-0.5)
    value, beta = convolved("value"), sigmoid(project("beta"))
    beta = 2 * beta if layer.beta_activation == "sigmoid2" else beta
    by_channel = isinstance(layer, jattn.nnx.KimiDeltaAttention)
    raw = project("decay_up", project("decay_down")) if by_channel else project("decay")
    rate = np.exp(w["A_log"])[:, None] if by_channel else np.exp(w["A_log"])
    raw = raw + w["dt_bias"]
    if layer.gate == "softplus":
        decay = -rate * np.logaddexp(raw, dtype(0))
    else:
        decay = dtype(layer.lower_bound) * sigmoid(rate * raw)
    decay = np.exp(decay) if by_channel else np.exp(decay)[..., None]
    gate = project("gate_up", project("gate_down")) if by_channel else project("output_gate")
    gate = sigmoid(gate) if by_channel else gate * sigmoid(gate)
    S, out = np.zeros((B, layer.num_heads, layer.head_dim, layer.value_head_dim), dtype), []
    for t in range(T):
        S = decay[:, t, ..., None] * S
        read = np.einsum("bnh,bnhd->bnd", key[:, t], S)
        S = S + np.einsum("bnh,bnd->bnhd", key[:, t], beta[:, t, :, None] * (value[:, t] - read))
        out.append(np.einsum("bnh,bnhd->bnd", query[:, t], S))
    return project("out", rms(np.stack(out, 1), w["norm.scale"]) * gate, 2)


def check(name, layer, x, got, rows=slice(None)):
    """The error rule, with the formula in float32 for the yardstick."""
    truth, baseline = formula(layer, x, np.float64), formula(layer, x, np.float32)
    compare.check(name, got, truth[rows], [baseline[rows]], np.float32)


@pytest.mark.parametrize("name", LAYERS)
def test_is_the_published_layer_and_decoding_is_the_prompt(name):
    """At every position: at once, and token by token from nothing. Prompts of several tokens: below."""
    x, of = tokens(), layer(name)
    check("at once", of, x, np.asarray(call(of, x)))
    of.init_cache((B, T, M))
    check("token by token", of, x, decoded(of, x, [1] * T))
    assert of.cached_state[...].dtype == np.float32


@pytest.mark.parametrize("lengths", [(35, 7), (3, 0)])
def test_tokens_that_do_not_exist_and_rows_of_the_cache(lengths):
    """Sequences of other lengths, in other rows of a larger cache, whose padding is NaN; then they go on."""
    x, of = tokens(), layer("gdn")
    width, at = max(lengths), np.array([4, 1], np.int32)
    of.init_cache((6, T, M))
    of.cached_state[...] = jnp.zeros_like(of.cached_state[...]).at[jnp.array([0, 2, 3, 5])].set(1e30)
    padded = np.full((B, width, M), np.nan, np.float32)
    for b, n in enumerate(lengths):
        padded[b, :n] = x[b, :n]
    lengths = np.array(lengths, np.int32)
    first = np.asarray(call(of, padded, decode=True, seq_lengths=lengths, state_indices=at))
    truth, baseline = (formula(of, x, dtype) for dtype in (np.float64, np.float32))
    then = np.stack([x[b, n : n + 1] for b, n in enumerate(lengths)])
    second = np.asarray(call(of, then, decode=True, state_indices=at))
    for b, n in enumerate(lengths):
        rows = np.concatenate([first[b, :n], second[b]])
        compare.check(f"sequence {b}", rows, truth[b, : n + 1], [baseline[b, : n + 1]], np.float32)
    assert (of.cached_state[...][jnp.array([0, 2, 3, 5])] == 1e30).all()


def test_segments_are_sequences_of_their_own():
    x, of = tokens(), layer("kda")
    ids = np.repeat(np.array([[3] * 17 + [1] * 23], np.int32), B, axis=0)
    together = np.asarray(call(of, x, segment_ids=ids))
    truth, baseline = (formula(of, np.roll(x, -17, axis=1), dtype) for dtype in (np.float64, np.float32))
    compare.check("second", together[:, 17:], truth[:, :23], [baseline[:, :23]], np.float32)
    check("first", of, x, together[:, :17], (slice(None), slice(0, 17)))


@pytest.mark.parametrize("layer", [jattn.nnx.KimiDeltaAttention, jattn.nnx.GatedDeltaNet])
@pytest.mark.parametrize("shape", [(2, 0, 32), (0, 4, 32)])
def test_nothing_gives_nothing(layer, shape):
    assert layer(num_heads=4, in_features=32, rngs=nnx.Rngs(0))(jnp.zeros(shape)).shape == shape


def test_every_parameter_learns():
    found = gradients(layer("kda, bounded", mode="recurrent"), tokens())
    assert set(found) == set(parameters(layer("kda, bounded"), np.float32))
    for name, gradient in found.items():
        assert np.isfinite(gradient).all() and np.abs(gradient).max() > 0, name


def test_dtypes():
    """bfloat16 through and through, but for states; and states in bfloat16."""
    of = layer("gdn", dtype=jnp.bfloat16)
    x = tokens(ml_dtypes.bfloat16)
    of.init_cache((B, T, M), state_dtype=jnp.bfloat16)
    assert of.cached_state[...].dtype == of.query_conv.cached_inputs[...].dtype == jnp.bfloat16
    y = call(of, x[:, :1], decode=True)
    assert y.dtype == jnp.bfloat16 and of.cached_state[...].dtype == jnp.bfloat16
    of.init_cache((B, T, M))
    assert of.cached_state[...].dtype == np.float32


def test_initial_values_are_those_of_the_papers():
    of = jattn.nnx.KimiDeltaAttention(64, 64, 512, rngs=nnx.Rngs(0))
    rates, steps = np.exp(np.asarray(of.A_log[...])), np.logaddexp(np.asarray(of.dt_bias[...]), np.float32(0))
    assert 1 <= rates.min() < 2 and 15 < rates.max() <= 16
    assert 0.99e-3 <= steps.min() < 1.5e-3 and 0.07 < steps.max() <= 0.101
    assert np.abs(np.median(np.log(steps)) - np.log(1e-2)) < 0.5
    bounded = jattn.nnx.KimiDeltaAttention(2, M, gate="bounded", rngs=nnx.Rngs(0))
    assert not np.asarray(bounded.A_log[...]).any()
    assert 0.45 < np.abs(np.asarray(of.query_conv.kernel[...])).max() <= 0.5


def test_errors():
    of, x = layer("kda"), tokens()
    with pytest.raises(ValueError, match=r"decode=True needs a cache: call init_cache"):
        of(x, decode=True)
    with pytest.raises(ValueError, match="seq_lengths and state_indices are for decode=True"):
        of(x, seq_lengths=np.array([3, 4]))
    with pytest.raises(ValueError, match=r"inputs have shape \(2, 40, 5\); expected \[\*B, T, 12\]"):
        of(x[..., :5])
    with pytest.raises(ValueError, match="must end with in_features=12"):
        of.init_cache((B, T, 7))
    of.init_cache((B, T, M))
    with pytest.raises(ValueError, match="a row of the cache is one sequence"):
        of(x, segment_ids=np.zeros((B, T), np.int32), decode=True)
    with pytest.raises(TypeError, match="decode=1 must be a Python bool"):
        of(x, decode=1)
    with pytest.raises(ValueError, match="num_heads=2 must be a multiple of num_qk_heads=3"):
        jattn.nnx.KimiDeltaAttention(2, M, num_qk_heads=3, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="qkv_features=13 must be a multiple of num_heads=2"):
        jattn.nnx.GatedDeltaNet(2, M, 13, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="gate='none' must be 'softplus' or 'bounded'"):
        jattn.nnx.GatedDeltaNet(2, M, gate="none", rngs=nnx.Rngs(0))

"""The Flax adapters and modules against Flax's own attention, and the refusal of what they cannot honour."""

import functools
import inspect

import compare
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from flax import nnx
from linear_cases import quick_compiles  # noqa: F401 -- for every test here

import jattn
import jattn.linen
import jattn.nnx
from jattn import masks

B, T, S, N, H = 2, 10, 13, 4, 8


def inputs(dtype=jnp.float32, kv_heads=N, batch=(B,), lengths=(T, S), seed=0):
    """query [*B, T, N, H], key and value [*B, S, K, H]."""
    rng = np.random.default_rng(seed)
    shapes = ((*batch, lengths[0], N, H), *2 * ((*batch, lengths[1], kv_heads, H),))
    return [jnp.asarray(rng.standard_normal(shape)).astype(dtype) for shape in shapes]


def random_mask(shape, seed=1):
    """Bool, every row with a visible key: Flax's answer for an empty row is the mean of the values."""
    return (np.random.default_rng(seed).random(shape) < 0.6) | (np.arange(shape[-1]) == 0)


def value_and_gradients(function, arrays):
    """Output and gradients of a weighted sum of it, from one compilation."""

    @jax.jit
    def both(*arrays):
        out, pull = jax.vjp(function, *arrays)
        weights = jnp.asarray(np.random.default_rng(7).standard_normal(out.shape), out.dtype)
        return out, weights, pull(weights)

    return jax.tree.map(np.asarray, both(*arrays))


def as_flax_promotes():
    """Flax and jax.nn mix dtypes; jattn does not, and runs under the strict setting of the suite."""
    return jax.numpy_dtype_promotion("standard")


def agree(ours, flax, arrays, **problem):
    """The error rule, with Flax as the baseline."""
    out, weights, gradients = value_and_gradients(ours, arrays)
    with as_flax_promotes():
        flax_out, _, flax_gradients = value_and_gradients(flax, arrays)
    assert out.dtype == flax_out.dtype and out.shape == flax_out.shape
    dtype = out.dtype
    four = [np.asarray(x.astype(dtype)).reshape(-1, *x.shape[-3:]) for x in arrays]
    problem = oracle.Problem(*four, **problem)
    compare.check("out", out.reshape(-1, *out.shape[-3:]), oracle.forward(problem)[0],
                  [flax_out.reshape(-1, *out.shape[-3:])], dtype)
    truth = oracle.backward(problem, weights.reshape(-1, *out.shape[-3:]))
    for name, got, flax_got in zip(("query", "key", "value"), gradients, flax_gradients, strict=True):
        assert got.dtype == flax_got.dtype
        shape = truth[name].shape
        compare.check("d" + name, got.reshape(shape), truth[name], [flax_got.reshape(shape)], dtype)


DTYPES = pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["f32", "bf16"])
ADAPTERS = pytest.mark.parametrize(
    "ours, flax",
    [(jattn.nnx.attention_fn, nnx.dot_product_attention), (jattn.linen.attention_fn, nn.dot_product_attention)],
    ids=["nnx", "linen"],
)
ADAPTER = pytest.mark.parametrize("adapter", [jattn.nnx, jattn.linen], ids=["nnx", "linen"])


# attention_fn

@ADAPTERS
def test_signature_names_all_that_flax_names(ours, flax):
    theirs, mine = (inspect.signature(f).parameters for f in (flax, ours))
    assert list(mine)[: len(theirs)] == list(theirs)
    for name, parameter in theirs.items():
        assert mine[name].default == parameter.default and mine[name].kind == parameter.kind


@DTYPES
@ADAPTERS
def test_plain(ours, flax, dtype):
    agree(ours, flax, inputs(dtype))


@DTYPES
def test_grouped_heads(dtype):
    agree(jattn.nnx.attention_fn, nnx.dot_product_attention, inputs(dtype, kv_heads=2))


@pytest.mark.parametrize("kind", ["bool", "float", "int"])
@ADAPTERS
def test_mask_numbers_are_visible_where_nonzero(ours, flax, kind):
    visible = random_mask((B, 1, T, S))
    mask = jnp.asarray(visible).astype({"bool": bool, "float": jnp.float32, "int": jnp.int32}[kind])
    agree(functools.partial(ours, mask=mask), functools.partial(flax, mask=mask.astype(bool)), inputs(), mask=visible)


@DTYPES
@ADAPTERS
def test_bias(ours, flax, dtype):
    bias = np.random.default_rng(3).standard_normal((1, N, T, S))
    bias = jnp.asarray(bias).astype(dtype)
    agree(functools.partial(ours, bias=bias), functools.partial(flax, bias=bias), inputs(dtype), bias=np.asarray(bias))


def test_is_causal_is_top_left():
    agree(functools.partial(jattn.nnx.attention_fn, is_causal=True),
          functools.partial(nnx.dot_product_attention, is_causal=True), inputs(), mask=np.tri(T, S, dtype=bool))


@pytest.mark.parametrize("batch", [(), (2, 3)])
@ADAPTERS
def test_any_number_of_batch_axes(ours, flax, batch):
    agree(ours, flax, inputs(batch=batch))


@ADAPTERS
def test_mask_over_several_batch_axes(ours, flax):
    visible = random_mask((2, 3, 1, T, S))
    agree(functools.partial(ours, mask=jnp.asarray(visible)), functools.partial(flax, mask=jnp.asarray(visible)),
          inputs(batch=(2, 3)), mask=visible.reshape(6, 1, T, S))


@ADAPTERS
def test_dtype_promotes_inputs_and_output(ours, flax):
    agree(functools.partial(ours, dtype=jnp.bfloat16), functools.partial(flax, dtype=jnp.bfloat16), inputs())


@ADAPTERS
def test_mixed_inputs_promote(ours, flax):
    query, key, value = inputs()
    with as_flax_promotes():
        out = ours(query, key.astype(jnp.bfloat16), value)
        assert out.dtype == flax(query, key.astype(jnp.bfloat16), value).dtype == jnp.float32


def test_nnx_promote_dtype_is_called():
    def promote(arrays, *, dtype):
        assert dtype == jnp.float16
        return tuple(x.astype(jnp.bfloat16) for x in arrays)

    assert jattn.nnx.attention_fn(*inputs(), dtype=jnp.float16, promote_dtype=promote).dtype == jnp.bfloat16


@ADAPTERS
def test_an_empty_row_is_zero(ours, flax):
    visible = random_mask((B, N, T, S))
    visible[:, :, 3] = False
    out = np.asarray(ours(*inputs(), mask=jnp.asarray(visible)))
    assert (out[:, 3] == 0).all() and (out[:, 2] != 0).all()


@ADAPTERS
def test_mask_rules_need_no_array(ours, flax):
    arrays = inputs(lengths=(T, T))
    rule = masks.causal() & masks.window(3, 0)
    dense = np.tri(T, dtype=bool) & ~np.tri(T, k=-4, dtype=bool)
    agree(functools.partial(ours, mask=rule), functools.partial(flax, mask=jnp.asarray(dense)), arrays, mask=dense)


# make_attention_fn

@ADAPTER
def test_options_reach_attention(adapter):
    query, key, value = inputs(lengths=(T, T))
    sinks = jnp.asarray(np.random.default_rng(2).standard_normal(N), jnp.float32)
    options = dict(is_causal=True, local_window_size=(3, 0), logits_soft_cap=5.0, sinks=sinks, scale=0.4)
    got = adapter.make_attention_fn(**options)(query, key, value)
    np.testing.assert_array_equal(got, jattn.attention(query, key, value, **options))


def test_causal_in_the_options_and_in_the_call():
    arrays = inputs(lengths=(T, T))
    want = jattn.attention(*arrays, is_causal=True)
    for options, call in ((True, True), (True, False), (False, True)):
        got = jattn.nnx.make_attention_fn(is_causal=options)(*arrays, is_causal=call)
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("mine", ["rule", "array"])
@pytest.mark.parametrize("theirs", ["rule", "array"])
@ADAPTER
def test_masks_combine(adapter, mine, theirs):
    arrays = inputs(lengths=(T, T))
    visible = jnp.asarray(random_mask((B, 1, T, T)))
    causal = masks.causal() if mine == "rule" else jnp.tri(T, dtype=bool)
    other = masks.dense(visible) if theirs == "rule" else visible.astype(jnp.float32)
    got = adapter.make_attention_fn(mask=causal)(*arrays, mask=other)
    want = jattn.attention(*arrays, mask=visible & jnp.tri(T, dtype=bool))
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-6)


@ADAPTER
def test_unknown_options_raise_where_they_are_written(adapter):
    with pytest.raises(TypeError, match=r"unknown attention options \['window'\]; jattn's are \["):
        adapter.make_attention_fn(window=3)


@pytest.mark.parametrize("rope", [True, 100.0, {"base": 100.0, "rotary_dim": 4}], ids=str)
def test_rope_option(rope):
    query, key, value = inputs(lengths=(T, T))
    positions = jnp.arange(T)[None] + jnp.asarray([[0], [5]])
    got = jattn.nnx.make_attention_fn(rope=rope)(query, key, value, input_positions=positions)
    options = {True: {}, 100.0: {"base": 100.0}}[rope] if not isinstance(rope, dict) else rope
    turned = [jattn.rope(x, positions, **options) for x in (query, key)]
    np.testing.assert_array_equal(got, jattn.attention(*turned, value))


def test_rope_equals_flax():
    query, key, value = inputs(lengths=(T, T))
    with as_flax_promotes():
        want = nnx.dot_product_attention_with_rope(query, key, value, rope=nnx.RoPE())
    np.testing.assert_allclose(jattn.nnx.make_attention_fn(rope=True)(query, key, value), want, rtol=0, atol=2e-5)


# Dropout

@ADAPTER
def test_dropout_is_that_of_attention_whatever_broadcast_dropout_says(adapter):
    arrays = inputs()
    key = jax.random.key(3)
    want = jattn.attention(*arrays, dropout_rate=0.25, dropout_key=key)
    for broadcast in (True, False):
        got = adapter.attention_fn(*arrays, dropout_rate=0.25, dropout_rng=key, broadcast_dropout=broadcast)
        np.testing.assert_array_equal(got, want)
    assert (np.asarray(want) != np.asarray(jattn.attention(*arrays))).any()


@ADAPTER
def test_deterministic_turns_dropout_off(adapter):
    arrays = inputs()
    for key in (None, jax.random.key(0)):
        got = adapter.attention_fn(*arrays, dropout_rate=0.5, dropout_rng=key, deterministic=True)
        np.testing.assert_array_equal(got, jattn.attention(*arrays))


@ADAPTER
def test_dropout_errors_name_flax_arguments(adapter):
    with pytest.raises(ValueError, match="dropout_rng is required when dropout_rate=0.5 and deterministic=False"):
        adapter.attention_fn(*inputs(), dropout_rate=0.5)
    with pytest.raises(ValueError, match=r"dropout_rate must be in \[0, 1\), got 1.0"):
        adapter.attention_fn(*inputs(), dropout_rate=1.0, dropout_rng=jax.random.key(0))


# Refusals

@pytest.mark.parametrize("precision", [None, "highest", "float32", jax.lax.Precision.HIGH, ("high", None)], ids=str)
@ADAPTER
def test_precision_levels_are_met(adapter, precision):
    want = jattn.attention(*inputs())
    np.testing.assert_array_equal(adapter.attention_fn(*inputs(), precision=precision), want)


@pytest.mark.parametrize("precision", ["BF16_BF16_F32_X3", jax.lax.DotAlgorithmPreset.TF32_TF32_F32], ids=str)
@ADAPTER
def test_dot_algorithms_are_refused(adapter, precision):
    with pytest.raises(NotImplementedError, match="jattn cannot honour precision=.*TF32|precision='BF16"):
        adapter.attention_fn(*inputs(), precision=precision)


@ADAPTER
def test_sowing_weights_is_refused(adapter):
    with pytest.raises(NotImplementedError, match="cannot honour module='Dropout'"):
        adapter.attention_fn(*inputs(), module=nn.Dropout(0.5))


@pytest.mark.parametrize("name", ["einsum_dot_general", "qk_attn_weights_einsum", "attn_weights_value_einsum"])
def test_linen_einsums_are_refused(name):
    with pytest.raises(NotImplementedError, match=f"cannot honour {name}="):
        jattn.linen.attention_fn(*inputs(), **{name: jnp.einsum})


def test_positions_without_rope_are_refused():
    with pytest.raises(NotImplementedError, match="cannot honour input_positions=.*pass rope=True"):
        jattn.nnx.attention_fn(*inputs(), input_positions=jnp.arange(T))


# In Flax's own modules

FEATURES = 16


def sequence(batch=2, length=T, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal((batch, length, FEATURES)), jnp.float32)


def flax_layer(cls=nnx.MultiHeadAttention, **options):
    if cls is nnx.MultiHeadAttention:
        options = {"decode": False} | options
    return cls(4, FEATURES, 32, **options, rngs=nnx.Rngs(0))


def layer_results(layer, x, **call):
    """Output, parameter gradients and input gradient of a module, in the layer's own precision."""

    def scalar(params, x):
        out = nnx.merge(graphdef, params, rest)(x, **call)
        weights = jnp.asarray(np.random.default_rng(9).standard_normal(out.shape), out.dtype)
        return (out * weights).sum(), out

    graphdef, params, rest = nnx.split(layer, nnx.Param, ...)
    (_, out), gradients = jax.jit(jax.value_and_grad(scalar, argnums=(0, 1), has_aux=True))(params, x)
    return {"out": out} | {jax.tree_util.keystr(path): g for path, g in jax.tree.leaves_with_path(gradients)}


def layers_agree(ours, flax, x, flax_call=None, **call):
    """The error rule for modules: the truth is Flax's module in float64, the baseline the same in float32."""
    flax_call = call if flax_call is None else flax_call
    got = layer_results(ours, x, **call)
    with as_flax_promotes():
        baseline = layer_results(flax, x, **flax_call)
    with as_flax_promotes(), jax.enable_x64(True):
        widened = nnx.clone(flax)
        nnx.update(widened, jax.tree.map(lambda p: p.astype(jnp.float64), nnx.state(flax, nnx.Param)))
        truth = layer_results(widened, x.astype(jnp.float64), **flax_call)
    assert got.keys() == baseline.keys() == truth.keys()
    for name in got:
        # The same bias on every key changes no weight: its gradient cancels to 0, so what it sums is held to its size.
        size = np.abs(truth[name.replace("key", "query")]).max() if "['key']['bias']" in name else 0
        compare.check(name, got[name], truth[name], [baseline[name]], jnp.float32, size)


@pytest.mark.parametrize("options", [{}, {"num_kv_heads": 2, "normalize_qk": True}], ids=str)
def test_nnx_module_with_our_attention_fn(options):
    ours = flax_layer(**options, attention_fn=jattn.nnx.attention_fn)
    layers_agree(ours, flax_layer(**options), sequence(), is_causal=True)


def test_nnx_module_with_a_float_mask():
    mask = nnx.make_causal_mask(jnp.ones((2, T)))
    layers_agree(flax_layer(attention_fn=jattn.nnx.attention_fn), flax_layer(), sequence(), mask=mask)


def test_nnx_module_trains_with_default_broadcast_dropout():
    layer = flax_layer(dropout_rate=0.5, attention_fn=jattn.nnx.attention_fn)
    one, two = layer(sequence(), deterministic=False), layer(sequence(), deterministic=False)
    assert (one != two).any()
    np.testing.assert_array_equal(layer(sequence(), deterministic=True), layer(sequence(), deterministic=True))


def test_nnx_module_that_sows_weights_is_refused():
    layer = flax_layer(attention_fn=jattn.nnx.attention_fn)
    with pytest.raises(NotImplementedError, match="cannot honour module='MultiHeadAttention': sow_weights=True asks"):
        layer(sequence(), sow_weights=True)


def test_nnx_autoregressive_cache_of_flax():
    """Decoding through Flax's cache and mask, one token at a time, equals the causal forward pass."""
    layer = flax_layer(attention_fn=jattn.nnx.attention_fn)
    x = sequence()
    want = layer(x, is_causal=True)
    layer.init_cache(x.shape)
    with as_flax_promotes():
        got = jnp.concatenate([layer(x[:, t : t + 1], decode=True) for t in range(T)], axis=1)
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-6)


@pytest.mark.parametrize("cls", [nn.MultiHeadDotProductAttention, nn.MultiHeadAttention])
def test_linen_module_with_our_attention_fn(cls):
    x, mask = sequence(), nn.make_causal_mask(jnp.ones((2, T)))
    flax, ours = cls(4), cls(4, attention_fn=jattn.linen.attention_fn)
    variables = flax.init(jax.random.key(0), x)
    want = flax.apply(variables, x, mask=mask)
    np.testing.assert_allclose(ours.apply(variables, x, mask=mask), want, rtol=0, atol=2e-6)
    causal = cls(4, attention_fn=jattn.linen.make_attention_fn(is_causal=True))
    np.testing.assert_allclose(causal.apply(variables, x), want, rtol=0, atol=2e-6)


def test_linen_module_keeps_dropout():
    x = sequence()
    layer = nn.MultiHeadAttention(4, dropout_rate=0.5, attention_fn=jattn.linen.attention_fn)
    variables = layer.init({"params": jax.random.key(0), "dropout": jax.random.key(1)}, x, deterministic=False)
    out = [layer.apply(variables, x, deterministic=False, rngs={"dropout": jax.random.key(k)}) for k in (1, 1, 2)]
    np.testing.assert_array_equal(out[0], out[1])
    assert (out[0] != out[2]).any() and (out[0] != layer.apply(variables, x, deterministic=True)).any()


def test_linen_module_takes_raw_keys():
    layer = nn.MultiHeadAttention(4, dropout_rate=0.5, attention_fn=jattn.linen.attention_fn)
    variables = layer.init(jax.random.key(0), sequence(), deterministic=True)
    raw, typed = (layer.apply(variables, sequence(), deterministic=False, dropout_rng=key)
                  for key in (jax.random.PRNGKey(3), jax.random.key(3)))
    np.testing.assert_array_equal(raw, typed)


def test_linen_module_refuses_what_it_cannot_honour():
    layer = nn.MultiHeadAttention(4, attention_fn=jattn.linen.attention_fn)
    variables = layer.init(jax.random.key(0), sequence())
    with pytest.raises(NotImplementedError, match="cannot honour module='MultiHeadAttention': sow_weights=True asks"):
        layer.apply(variables, sequence(), sow_weights=True)
    quantized = nn.MultiHeadAttention(
        4, attention_fn=jattn.linen.attention_fn,
        qk_attn_weights_einsum_cls=lambda: jnp.einsum, attn_weights_value_einsum_cls=lambda: jnp.einsum)
    with pytest.raises(NotImplementedError, match="cannot honour qk_attn_weights_einsum="):
        quantized.apply(variables, sequence())


# jattn.nnx.MultiHeadAttention

def pair(flax_options=None, **options):
    """(jattn's layer, Flax's) where the first has loaded the parameters of the second."""
    shared = {k: options[k] for k in ("num_kv_heads", "normalize_qk", "use_bias", "dtype") if k in options}
    flax = flax_layer(**shared, **(flax_options or {}))
    ours = jattn.nnx.MultiHeadAttention(4, FEATURES, 32, **options, rngs=nnx.Rngs(1))
    nnx.update(ours, nnx.state(flax, nnx.Param))
    return ours, flax


def shapes(layer):
    return jax.tree.map(lambda p: (p.shape, p.dtype), nnx.to_pure_dict(nnx.state(layer, nnx.Param)))


@pytest.mark.parametrize("options", [{}, {"num_kv_heads": 2, "normalize_qk": True, "use_bias": False}], ids=str)
def test_module_loads_the_parameters_of_flax(options):
    ours, flax = pair(**options)
    assert shapes(ours) == shapes(flax)
    layers_agree(ours, flax, sequence(), is_causal=True)


def test_module_without_options_is_flax_on_other_keys_and_values():
    ours, flax = pair()
    x, k, v = sequence(), sequence(length=S, seed=1), sequence(length=S, seed=2)
    np.testing.assert_allclose(ours(x, k, v), flax(x, k, v), rtol=0, atol=2e-6)
    np.testing.assert_allclose(ours(x, k), flax(x, k), rtol=0, atol=2e-6)


def test_module_has_the_dtype_of_flax():
    ours, flax = pair(dtype=jnp.bfloat16)
    with as_flax_promotes():
        assert ours(sequence()).dtype == flax(sequence()).dtype == jnp.bfloat16


def test_module_rope_equals_flax_rope():
    attend = functools.partial(nnx.dot_product_attention_with_rope, rope=nnx.RoPE())
    ours, flax = pair({"attention_fn": attend}, rope=True, num_kv_heads=2)
    layers_agree(ours, flax, sequence())


def test_module_rope_depends_on_position_differences():
    layer = jattn.nnx.MultiHeadAttention(4, FEATURES, 32, rope=True, rngs=nnx.Rngs(0))
    x, at = sequence(), jnp.broadcast_to(jnp.arange(T), (2, T))
    np.testing.assert_allclose(layer(x, input_positions=at), layer(x), rtol=0, atol=1e-6)
    np.testing.assert_allclose(layer(x, input_positions=at + 1000), layer(x), rtol=0, atol=1e-5)
    assert (jnp.abs(layer(x, input_positions=(at + 1, at)) - layer(x)) > 1e-3).any()


def test_module_window_and_soft_cap():
    ours, flax = pair(local_window_size=(3, 0), is_causal=True, num_kv_heads=2)
    dense = jnp.tri(T, dtype=bool) & ~jnp.tri(T, k=-4, dtype=bool)
    layers_agree(ours, flax, sequence(), {"mask": jnp.broadcast_to(dense, (2, 1, T, T))})
    capped, _ = pair(logits_soft_cap=0.1)
    assert (jnp.abs(capped(sequence()) - pair()[0](sequence())) > 1e-3).any()


def test_packed_documents_do_not_see_each_other():
    layer = jattn.nnx.MultiHeadAttention(4, FEATURES, 32, num_kv_heads=2, is_causal=True, rope=True, rngs=nnx.Rngs(0))
    one, two = sequence(1, 7, seed=1), sequence(1, 5, seed=2)
    packed = jnp.concatenate([one, two], axis=1)
    ids = jnp.asarray([[3] * 7 + [1] * 5])
    apart = jnp.concatenate([layer(one), layer(two)], axis=1)
    np.testing.assert_allclose(layer(packed, segment_ids=ids), apart, rtol=0, atol=1e-5)
    np.testing.assert_array_equal(layer(packed, segment_ids=(ids, ids)), layer(packed, segment_ids=ids))


def test_sinks_are_learnt():
    layer = jattn.nnx.MultiHeadAttention(4, FEATURES, 32, sinks=True, rngs=nnx.Rngs(0))
    plain = jattn.nnx.MultiHeadAttention(4, FEATURES, 32, rngs=nnx.Rngs(0))
    assert shapes(layer) == shapes(plain) | {"sinks": ((4,), jnp.float32)}
    gradient = nnx.grad(lambda layer: layer(sequence()).sum())(layer)
    assert (gradient["sinks"][...] != 0).all()
    layer.sinks[...] = jnp.full(4, -1e9)
    np.testing.assert_allclose(layer(sequence()), plain(sequence()), rtol=0, atol=2e-6)


def test_module_dropout_follows_flax_rules():
    layer = jattn.nnx.MultiHeadAttention(4, FEATURES, dropout_rate=0.5, rngs=nnx.Rngs(0))
    x = sequence()
    with pytest.raises(ValueError, match="deterministic must be given"):
        layer(x)
    off = layer(x, deterministic=True)
    one, two = layer(x, deterministic=False), layer(x, deterministic=False)
    assert (one != off).any() and (one != two).any()
    same = [layer(x, deterministic=False, rngs=nnx.Rngs(5)) for _ in range(2)]
    np.testing.assert_array_equal(*same)
    np.testing.assert_array_equal(layer(x, deterministic=False, rngs=nnx.Rngs(5).dropout), same[0])
    np.testing.assert_array_equal(nnx.view(layer, deterministic=True)(x), off)
    bare = jattn.nnx.MultiHeadAttention(4, FEATURES, dropout_rate=0.5, keep_rngs=False, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="rngs must be given to the call"):
        bare(x, deterministic=False)


def test_module_errors():
    layer = jattn.nnx.MultiHeadAttention(4, FEATURES, rngs=nnx.Rngs(0))
    x = sequence()
    with pytest.raises(ValueError, match="inputs_v was given without inputs_k"):
        layer(x, inputs_v=x)
    with pytest.raises(ValueError, match="inputs_q has 5 features, but in_features=16"):
        layer(x[..., :5])
    with pytest.raises(NotImplementedError, match="cannot honour sow_weights=True"):
        layer(x, sow_weights=True)
    with pytest.raises(NotImplementedError, match="cannot honour input_positions="):
        layer(x, input_positions=jnp.arange(T))


def test_module_refuses_another_attention_fn():
    with pytest.raises(NotImplementedError, match="cannot honour attention_fn="):
        jattn.nnx.MultiHeadAttention(4, FEATURES, attention_fn=nnx.dot_product_attention, rngs=nnx.Rngs(0))


def test_equal_modules_share_a_compilation():
    @nnx.jit
    def apply(layer, x):
        traces.append(1)
        return layer(x)

    traces = []
    for seed in (0, 1):
        options = dict(rope={"base": 100.0}, local_window_size=[3, 0], is_causal=True)
        apply(jattn.nnx.MultiHeadAttention(4, FEATURES, **options, rngs=nnx.Rngs(seed)), sequence())
    assert len(traces) == 1

"""`jattn.linen.MultiHeadAttention` against Flax's own, with the same parameters and caches."""

import dataclasses
import functools

import compare
import flax.linen as nn
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from flax.core import meta
from jax.sharding import PartitionSpec
from linear_cases import quick_compiles  # noqa: F401 -- for every test here
from linen_cases import decoded, disturbed, init, same, shapes, stepper
from nnx_cases import B, M, tokens

import jattn.linen
import jattn.nnx

T = 20
tokens = functools.partial(tokens, T=T)
FLAX = dict(num_heads=4, qkv_features=24)
CAUSAL = np.tri(T, dtype=bool)[None, None]
OURS = jattn.linen.MultiHeadAttention(**FLAX)
THEIRS = nn.MultiHeadAttention(**FLAX)


def as_flax_promotes():
    """Flax mixes dtypes; jattn does not, and runs under the strict setting of the suite."""
    return jax.numpy_dtype_promotion("standard")


def outcome(layer, params, *inputs, **call):
    """Outputs, and gradients of a weighted sum of them."""

    @jax.jit
    def both(params, *inputs):
        y, pull = jax.vjp(lambda *args: layer.apply({"params": args[0]}, *args[1:], **call), params, *inputs)
        weights = jnp.cos(jnp.arange(y.size, dtype=jnp.float32)).reshape(y.shape).astype(y.dtype)
        return y, pull(weights)

    return jax.tree.map(np.asarray, both(params, *inputs))


def agree(ours, theirs, params, *inputs, mask=None, dtype=np.float32):
    """The error rule for outputs and every gradient, with Flax's module as the baseline and in float64 as the truth."""
    found = outcome(ours, params, *inputs, **({} if ours.is_causal else dict(mask=mask)))
    with as_flax_promotes():
        flax = outcome(theirs, params, *inputs, mask=mask)
        with jax.enable_x64(True):
            wide = jax.tree.map(lambda x: np.asarray(x, np.float64), (params, inputs))
            truth = outcome(theirs.clone(dtype=None), wide[0], *wide[1], mask=mask)
    assert jax.tree.structure(found) == jax.tree.structure(flax)
    for (path, got), baseline, want in zip(
        jax.tree_util.tree_leaves_with_path(found), *map(jax.tree.leaves, (flax, truth)), strict=True
    ):
        assert got.dtype == baseline.dtype
        name = jax.tree_util.keystr(path)
        # Moving all keys moves no output: the gradient of their bias is 0, made of numbers of this size.
        size = np.abs(truth[1][0]["key"]["kernel"]).max() if name.endswith("['key']['bias']") else 0.0
        compare.check(name, got, want, [baseline], dtype, size)


# Parameters and outputs


def test_every_field_of_flax_is_known():
    """A field that Flax adds would be taken and mean nothing."""
    assert {field.name for field in dataclasses.fields(nn.MultiHeadAttention)} == {
        "num_heads", "dtype", "param_dtype", "qkv_features", "out_features", "broadcast_dropout", "dropout_rate",
        "deterministic", "precision", "kernel_init", "out_kernel_init", "bias_init", "out_bias_init", "use_bias",
        "attention_fn", "decode", "normalize_qk", "force_fp32_for_softmax", "qkv_dot_general", "out_dot_general",
        "qkv_dot_general_cls", "out_dot_general_cls", "qk_attn_weights_einsum_cls", "attn_weights_value_einsum_cls",
        "parent", "name",
    }  # fmt: skip


PLAIN, RENAMED = "MultiHeadAttention", "MultiHeadDotProductAttention"


@pytest.mark.parametrize(
    "name, options",
    [
        (PLAIN, {}),
        (RENAMED, {}),
        (
            PLAIN,
            dict(
                normalize_qk=True, use_bias=False, out_features=7, param_dtype=jnp.bfloat16, dtype=jnp.float32,
                out_kernel_init=nn.initializers.normal(3.0),
            ),
        ),
        (PLAIN, dict(bias_init=nn.initializers.normal(1.0), out_bias_init=nn.initializers.normal(2.0))),
    ],
    ids=["plain", "renamed", "normalize_qk", "biases"],
)  # fmt: skip
def test_the_same_numbers_from_the_same_key(name, options):
    """And under the same name in a parent, so that checkpoints of models load."""

    class Model(nn.Module):
        attention: type

        @nn.compact
        def __call__(self, x):
            return self.attention(**FLAX, **options)(x)

    with as_flax_promotes():  # its norm does
        found, wanted = (init(Model(getattr(module, name)), tokens()) for module in (jattn.linen, nn))
    assert list(found["params"]) == [f"{name}_0"]
    same(found, wanted)


def test_outputs_and_gradients():
    params = disturbed(init(OURS, tokens())["params"])
    agree(OURS, THEIRS, params, tokens(), mask=CAUSAL)
    agree(OURS.clone(is_causal=True), THEIRS, params, tokens(), mask=CAUSAL)
    mask = np.random.default_rng(3).random((B, 1, T, T)) < 0.5
    mask[..., 0] = True  # Flax gives a query that sees nothing the mean of the values
    agree(OURS, THEIRS, params, tokens(), tokens(seed=2), tokens(seed=3), mask=mask)


def test_16_bits():
    dtype = jnp.bfloat16
    ours, theirs = OURS.clone(dtype=dtype), THEIRS.clone(dtype=dtype)
    params = disturbed(init(ours, tokens())["params"])
    agree(ours, theirs, params, tokens(ml_dtypes.bfloat16), mask=CAUSAL, dtype=dtype)


def test_options_of_the_projections():
    params = disturbed(init(OURS, tokens())["params"])
    params |= {f"{x}_ln": {"scale": np.linspace(0.5, 2.0, 6, dtype=np.float32)} for x in ("query", "key")}
    count = []

    def dot(*args, **options):
        count.append(1)
        return jax.lax.dot_general(*args, **options)

    options = dict(normalize_qk=True, qkv_dot_general=dot, out_dot_general_cls=lambda: dot)
    agree(OURS.clone(**options), THEIRS.clone(**options), params, tokens())
    assert len(count) == 3 * 4  # ours, Flax's, and that in float64
    for name, calls in {"qkv_dot_general": 3, "out_dot_general": 1}.items():
        for options in ({name: dot}, {f"{name}_cls": lambda: dot}):
            count.clear()
            jax.eval_shape(OURS.clone(**options).apply, {"params": params}, tokens())
            assert len(count) == calls


def test_keys_and_values_of_other_inputs():
    x, y, z = tokens(), tokens(seed=2), tokens(seed=3)
    variables = init(OURS, x)
    apply = functools.partial(jax.jit(OURS.apply), variables)
    np.testing.assert_array_equal(apply(x, inputs_kv=y), apply(x, y, y))
    np.testing.assert_array_equal(apply(x, y), apply(x, y, y))
    assert (apply(x, y) != apply(x, y, z)).any()
    with pytest.raises(ValueError, match="inputs_v was given without inputs_k"):
        apply(x, inputs_v=y)
    with pytest.raises(ValueError, match="inputs_kv was given with inputs_k or inputs_v"):
        apply(x, y, inputs_kv=y)


# The cache


def test_decoding_is_that_of_flax():
    """Its cache, its single tokens, its mask; prompts at once besides. A cache goes on in the other's module."""
    x, mask = tokens(), np.ones((B, 1, 1, T), bool)
    mask[1, ..., 2] = False
    ours, theirs = OURS.clone(decode=True), THEIRS.clone(decode=True)
    variables, flax = (init(layer, x) for layer in (ours, theirs))
    same(variables, flax)
    params = disturbed(variables["params"])
    variables = {"params": params, "cache": variables["cache"]}
    step, flax_step = stepper(ours), stepper(theirs)
    with as_flax_promotes():
        baseline, end = decoded(flax_step, variables, x, [1] * T, mask=mask)
        _, begun = decoded(flax_step, variables, x[:, :3], [1] * 3, mask=mask)
        with jax.enable_x64(True):
            wide = {"params": jax.tree.map(lambda p: np.asarray(p, np.float64), params)}
            truth = THEIRS.apply(wide, x.astype(np.float64), mask=CAUSAL & mask)
    for chunks in ([1] * T, [17, 1, 1, 1]):
        found, after = decoded(step, variables, x, chunks, mask=mask)
        compare.check(f"chunks {chunks[:2]}", found, truth, [baseline], np.float32)
        assert shapes(after) == shapes(end) and after["cache"]["cache_index"] == T
    found, _ = decoded(step, begun, x[:, 3:], [1, 15, 1], mask=mask)
    compare.check("goes on here", found, truth[:, 3:], [baseline[:, 3:]], np.float32)
    _, begun = decoded(step, variables, x[:, :17], [17], mask=mask)
    with as_flax_promotes():
        found, _ = decoded(flax_step, begun, x[:, 17:], [1] * 3, mask=mask)
    compare.check("goes on there", found, truth[:, 17:], [baseline[:, 17:]], np.float32)


OPTIONS = dict(num_kv_heads=2, is_causal=True, rope=True, local_window_size=(5, 0), sinks=True, logits_soft_cap=3.0)


def test_options_are_those_of_nnx_through_pages_too():
    """The nnx layer with the same parameters, bit for bit: at once, over rows and over pages, with lengths."""
    x, of = tokens(), OURS.clone(**OPTIONS)
    params = disturbed(init(of, x)["params"])
    assert shapes(params)["sinks"] == ((4,), "float32") and params["key"]["kernel"].shape == (M, 2, 6)
    layer = jattn.nnx.MultiHeadAttention(4, M, 24, **OPTIONS, rngs=nnx.Rngs(0))
    nnx.update(layer, params)
    ids = np.repeat(np.array([[0] * 9 + [1] * (T - 9)], np.int32), B, 0)
    np.testing.assert_array_equal(
        jax.jit(of.apply)({"params": params}, x, segment_ids=ids),
        nnx.jit(lambda layer, x: layer(x, segment_ids=ids))(layer, x),
    )
    lengths, tables = np.array([17, 5], np.int32), np.arange(4, dtype=np.int32)[::-1].reshape(2, 2)
    for pages, call in (({}, {}), (dict(page_size=16, num_pages=4), dict(block_tables=tables))):
        over, call = of.clone(decode=True, **pages), call | dict(seq_lengths=lengths)
        variables = {"params": params, "cache": init(over, x, **call)["cache"]}
        found, variables = decoded(stepper(over), variables, x[:, :17], [17], **call)
        layer.init_cache(x.shape, **pages)
        want = nnx.jit(lambda layer, x: layer(x, decode=True, **call))(layer, x[:, :17])  # noqa: B023
        np.testing.assert_array_equal(found, want)
        for name in ("cached_key", "cached_value", "cache_index"):
            np.testing.assert_array_equal(variables["cache"][name], getattr(layer, name)[...])


def test_decoding_is_the_prompt_in_16_bits():
    dtype, x = jnp.bfloat16, tokens(ml_dtypes.bfloat16)
    of = OURS.clone(**OPTIONS | dict(local_window_size=None), dtype=dtype, decode=True)
    variables = init(of, x)
    assert shapes(variables["cache"])["cached_key"] == ((B, T, 2, 6), "bfloat16")
    found, _ = decoded(stepper(of), variables, x, [17, 1, 1, 1])
    at_once = of.clone(decode=False)
    with jax.enable_x64(True):
        wide = {"params": jax.tree.map(lambda p: np.asarray(p, np.float64), variables["params"])}
        truth = at_once.clone(dtype=None).apply(wide, x.astype(np.float64))
    compare.check("decoded", found, truth, [jax.jit(at_once.apply)(variables, x)], dtype)


def test_a_call_that_makes_the_cache_puts_nothing_in():
    """`init`, and `apply` without a cache, as in Flax; the output is that of the tokens at the beginning."""
    x, of = tokens(), OURS.clone(decode=True)
    y, variables = of.init_with_output(jax.random.key(0), x)
    assert variables["cache"]["cache_index"] == 0 and not variables["cache"]["cached_key"].any()
    z, made = of.apply({"params": variables["params"]}, x, mutable=["cache"])
    same(made["cache"], variables["cache"])
    np.testing.assert_array_equal(y, z)
    np.testing.assert_array_equal(y, of.apply(variables, x, mutable=["cache"])[0])
    with pytest.raises(Exception, match='collection "cache"'):
        of.apply(variables, x)


# Linen's transformations, partitioning, dropout


def test_boxes_of_partitioning_are_kept():
    """Also scanned over layers, where they get an axis."""
    boxes = dict(
        kernel_init=nn.with_partitioning(nn.initializers.lecun_normal(), (None, "model", None)),
        bias_init=nn.with_partitioning(nn.initializers.zeros, ("model", None)),
        out_kernel_init=nn.with_logical_partitioning(nn.initializers.lecun_normal(), ("heads", None, "embed")),
        out_bias_init=nn.initializers.zeros,
    )

    class Layers(nn.Module):
        attention: nn.Module

        @nn.compact
        def __call__(self, x):
            scan = nn.scan(
                lambda layer, x, _: (layer(x), None), variable_axes={"params": 0}, split_rngs={"params": True},
                length=2, metadata_params={nn.PARTITION_NAME: "layers"},
            )  # fmt: skip
            return scan(self.attention, x, None)[0]

    x = tokens()
    for wrap in (lambda layer: layer, Layers):
        ours, theirs = (wrap(layer.clone(**boxes)) for layer in (OURS, THEIRS))
        found, wanted = (init(layer, x) for layer in (ours, theirs))
        same(found, wanted)  # boxes and names are part of the structure
        assert nn.get_partition_spec(found) == nn.get_partition_spec(wanted)
        apply = jax.jit(ours.apply)
        np.testing.assert_array_equal(apply(found, x), apply(meta.unbox(found), x))
    assert nn.get_partition_spec(found)["params"]["attention"]["query"]["kernel"] == PartitionSpec(
        "layers", None, "model", None
    )


def test_dropout_is_that_of_the_attention_fn_in_flax():
    """The same key from the stream, so the same bits, as Flax's module around `attention_fn`."""
    x = tokens()
    ours = OURS.clone(dropout_rate=0.5)
    theirs = nn.MultiHeadAttention(**FLAX, dropout_rate=0.5, attention_fn=jattn.linen.attention_fn)
    variables = init(ours, x, deterministic=True)
    apply, flax = (
        jax.jit(functools.partial(layer.apply, deterministic=False)) for layer in (ours, theirs)
    )  # fmt: skip
    one, again, other = (apply(variables, x, rngs={"dropout": jax.random.key(k)}) for k in (1, 1, 2))
    np.testing.assert_array_equal(one, again)
    np.testing.assert_array_equal(one, flax(variables, x, rngs={"dropout": jax.random.key(1)}))
    assert (one != other).any()
    given = apply(variables, x, dropout_rng=jax.random.key(3))
    np.testing.assert_array_equal(given, flax(variables, x, dropout_rng=jax.random.key(3)))
    np.testing.assert_array_equal(ours.apply(variables, x, deterministic=True), OURS.apply(variables, x))
    with pytest.raises(ValueError, match="deterministic"):
        ours.apply(variables, x)
    with pytest.raises(Exception, match='needs PRNG for "dropout"'):
        ours.apply(variables, x, deterministic=False)
    with pytest.raises(NotImplementedError, match="dropout_rate=0.5: decoding has no dropout"):
        ours.clone(decode=True).init(jax.random.key(0), x, deterministic=False, dropout_rng=jax.random.key(3))


def test_modules_can_be_hashed():
    """As `nn.jit` needs, whatever was given for rope and window."""
    of = OURS.clone(rope={"base": 100.0}, local_window_size=[5, 0])
    assert hash(of) == hash(of.clone()) and of == of.clone() != OURS
    assert of.rope == (("base", 100.0),)
    assert jattn.linen.MultiHeadLatentAttention(2, rope={"base": 100.0}).rope == of.rope


def test_refusals():
    x = tokens()
    variables = init(OURS, x)
    for options in (
        {"attention_fn": nn.dot_product_attention},
        {"qk_attn_weights_einsum_cls": lambda: jnp.einsum},
        {"attn_weights_value_einsum_cls": lambda: jnp.einsum},
    ):
        with pytest.raises(NotImplementedError, match=f"cannot honour {next(iter(options))}="):
            OURS.clone(**options).apply(variables, x)
    for call, message in (
        ({"sow_weights": True}, "cannot honour sow_weights=True"),
        ({"input_positions": np.arange(T, dtype=np.int32)}, "cannot honour input_positions="),
    ):
        with pytest.raises(NotImplementedError, match=message):
            OURS.apply(variables, x, **call)
    for call in ({"seq_lengths": np.array([1, 2])}, {"block_tables": np.array([[1], [2]])}):
        with pytest.raises(ValueError, match="seq_lengths and block_tables are for decode=True"):
            OURS.apply(variables, x, **call)
    for options, message in (
        ({"num_kv_heads": 3}, "num_heads=4 must be a multiple of num_kv_heads=3"),
        ({"num_heads": 5}, "qkv_features=24 must be a multiple of num_heads=5"),
        ({"decode": True, "page_size": 16}, "page_size=16 and num_pages=None go together"),
    ):
        with pytest.raises(ValueError, match=message):
            OURS.clone(**options).init(jax.random.key(0), x)
    decoding = OURS.clone(decode=True)
    variables = init(decoding, x)
    with pytest.raises(ValueError, match="seq_lengths need a cache_index of one length a sequence"):
        decoding.apply(variables, x, seq_lengths=np.array([1, 2]), mutable=["cache"])

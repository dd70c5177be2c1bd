"""The other Linen layers against those of `jattn.nnx` that they are made of, and Linen's conventions around them."""

import dataclasses
import functools
import inspect

import flax.linen as nn
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from flax.core import meta
from flax.errors import ScopeCollectionNotFound, ScopeParamNotFoundError, ScopeParamShapeError
from jax.sharding import AxisType, PartitionSpec
from linear_cases import quick_compiles  # noqa: F401 -- for every test here
from linen_cases import decoded, disturbed, init, same, shapes, stepper
from nnx_cases import B, M, tokens

import jattn
import jattn.linen
import jattn.nnx

T = 20
tokens = functools.partial(tokens, T=T)
SPARSE = dict(top_k=3, index_heads=2, index_head_dim=4)
LAYERS = {
    "KimiDeltaAttention": dict(num_heads=2, mode="recurrent"),
    "GatedDeltaNet": dict(num_heads=2, num_qk_heads=1, mode="recurrent", use_bias=True),
    "MultiHeadLatentAttention": dict(num_heads=2, qkv_features=16, gated=True, query_latent_features=M),
    "CompressedSparseAttention": dict(num_heads=2, window=4, rotary=jattn.Rotary(4), **SPARSE),
    "HeavilyCompressedAttention": dict(num_heads=2, ratio=4, window=4),
}
EACH = pytest.mark.parametrize("name", LAYERS)


def linen(name, **options):
    return getattr(jattn.linen, name)(**LAYERS[name], **options)


def of_nnx(name, params, **options):
    layer = getattr(jattn.nnx, name)(in_features=M, rngs=nnx.Rngs(0), **LAYERS[name], **options)
    found = nnx.to_pure_dict(nnx.state(layer, nnx.Param))
    assert shapes(found) == shapes(params)
    nnx.update(layer, params)
    return layer


@EACH
def test_fields_are_the_arguments_of_nnx(name):
    """With the same defaults; Linen says the rest in other ways."""
    made = getattr(jattn.nnx, name)
    parameters = {}
    for cls in reversed(made.__mro__):
        if "__init__" in vars(cls) and issubclass(cls, nnx.Module):
            parameters |= inspect.signature(cls.__init__).parameters
    parameters |= inspect.signature(made.init_cache).parameters
    for absent in (
        "self", "args", "kwargs", "options", "in_features", "rngs", "keep_rngs", "kernel_metadata",
        "out_kernel_metadata", "input_shape",
    ):  # fmt: skip
        parameters.pop(absent, None)
    fields = {x.name: x for x in dataclasses.fields(getattr(jattn.linen, name)) if x.name not in ("parent", "name")}
    assert fields.keys() == parameters.keys()
    for key, parameter in parameters.items():
        default = fields[key].default
        if key == "decode":
            assert (default, parameter.default) == (False, None)
        elif key.endswith("_init") and parameter.default is not None:
            draw = jax.random.key(0), (8, 4), jnp.float32
            np.testing.assert_array_equal(default(*draw), parameter.default(*draw))
        elif parameter.default is inspect.Parameter.empty:
            assert default is dataclasses.MISSING
        else:
            assert default == parameter.default


def names(function):
    return set(inspect.signature(function).parameters)


@EACH
def test_the_call_has_the_arguments_of_nnx(name):
    found, wanted = (names(getattr(module, name).__call__) for module in (jattn.linen, jattn.nnx))
    assert found - {"dropout_rng"} == wanted - {"decode", "rngs", "out_sharding"}


@EACH
def test_a_layer_is_the_nnx_layer(name):
    """Its decoding, bit for bit; the cache is Linen's collection, and `init` puts nothing in."""
    x, of = tokens(), linen(name, decode=True)
    variables = init(of, x)
    params, of_cache = disturbed(variables["params"]), variables["cache"]
    layer = of_nnx(name, params)
    layer.init_cache(x.shape)
    same(of_cache, nnx.to_pure_dict(nnx.state(layer, nnx.Cache)))
    step = nnx.jit(lambda layer, x: layer(x, decode=True))
    want = np.concatenate([step(layer, x[:, a:b]) for a, b in ((0, 9), (9, 18))], 1)  # one shape to compile
    found, after = decoded(stepper(of), {"params": params, "cache": of_cache}, x[:, :18], [9, 9])
    np.testing.assert_array_equal(found, want)
    same(after["cache"], nnx.to_pure_dict(nnx.state(layer, nnx.Cache)))
    with pytest.raises(ScopeCollectionNotFound, match='collection "cache"'):
        of.apply({"params": params}, x)


def test_gradients_and_16_bits():
    name = "MultiHeadLatentAttention"
    x = tokens(ml_dtypes.bfloat16)
    of = linen(name, dtype=jnp.bfloat16)
    params = init(of, x)["params"]
    graphdef, state = nnx.split(of_nnx(name, params, dtype=jnp.bfloat16), nnx.Param)
    weights = np.random.default_rng(4).standard_normal((B, T, M)).astype(x.dtype)

    @jax.jit
    def gradients(params, x):
        return jax.value_and_grad(lambda p, x: (of.apply({"params": p}, x) * weights).sum(), (0, 1))(params, x)

    @jax.jit
    def wanted(params, x):
        return jax.value_and_grad(lambda p, x: (nnx.merge(graphdef, p)(x) * weights).sum(), (0, 1))(params, x)

    value, (to_params, to_x) = gradients(params, x)
    want, (to_state, to_want) = wanted(state, x)
    same((value, to_params, to_x), (want, nnx.to_pure_dict(to_state), to_want))


class Model(nn.Module):
    """The same layer twice, and layers that are scanned with remat."""

    shared: nn.Module
    scanned: nn.Module

    @nn.compact
    def __call__(self, x):
        x = self.shared(self.shared(x))
        body = nn.remat(lambda layer, x, _: (layer(x), None), prevent_cse=False)
        scan = nn.scan(
            body, variable_axes={"params": 0}, split_rngs={"params": True}, length=2,
            metadata_params={nn.PARTITION_NAME: "layers"},
        )  # fmt: skip
        return scan(self.scanned, x, None)[0]


BOXES = dict(
    kernel_init=nn.with_partitioning(nn.initializers.lecun_normal(), (None, "model")),
    out_kernel_init=nn.with_logical_partitioning(nn.initializers.lecun_normal(), ("heads", None, "embed")),
)


def test_linen_transforms_and_boxes():
    """A layer draws its parameters once; boxes are kept, through `nn.scan` with an axis more."""
    x = tokens()
    shared = linen(
        "GatedDeltaNet", **BOXES, conv_kernel_init=nn.with_partitioning(nn.initializers.ones, ("model", None))
    )
    model = Model(shared, linen("HeavilyCompressedAttention", **BOXES))
    variables = init(model, x)
    assert shapes(jax.eval_shape(model.init, jax.random.key(0), x)) == shapes(variables)
    specs = nn.get_partition_spec(variables)["params"]
    assert specs["shared"]["query"]["kernel"] == PartitionSpec(None, "model")
    assert specs["shared"]["query_conv"]["kernel"] == PartitionSpec("model", None)
    assert specs["shared"]["out"]["kernel"] == PartitionSpec("heads", None, "embed")
    assert specs["shared"]["A_log"] == PartitionSpec()
    assert specs["scanned"]["entries"]["kv"]["kernel"] == PartitionSpec("layers", None, "model")
    assert isinstance(variables["params"]["scanned"]["out_up"]["kernel"], nn.LogicallyPartitioned)
    params = meta.unbox(variables)["params"]
    kernels = params["scanned"]["query_up"]["kernel"]
    assert kernels.shape == (2, M, 2, 6) and (kernels[0] != kernels[1]).all()

    want = x
    for part in ("shared", "scanned"):
        apply = jax.jit(getattr(model, part).apply)
        for i in range(2):
            own = params[part] if part == "shared" else jax.tree.map(lambda p: p[i], params[part])  # noqa: B023
            want = apply({"params": own}, want)
    np.testing.assert_array_equal(jax.jit(model.apply)(variables, x), want)


def test_boxes_under_a_mesh():
    """Parameters are made where their boxes say."""
    of, x = (
        linen("MultiHeadLatentAttention", kernel_init=BOXES["kernel_init"], out_kernel_init=nn.initializers.zeros),
        tokens(),
    )
    mesh = jax.make_mesh((2,), ("model",), (AxisType.Auto,), devices=jax.devices()[:2])
    with jax.set_mesh(mesh):
        shardings = nn.get_sharding(jax.eval_shape(of.init, jax.random.key(0), x), mesh)
        params = jax.jit(of.init, out_shardings=shardings)(jax.random.key(0), x)["params"]
    for name in ("query_up", "latent_down", "gate"):
        kernel = params[name]["kernel"].value
        assert kernel.sharding.spec == PartitionSpec(None, "model")
        assert kernel.addressable_shards[0].data.shape[1] == kernel.shape[1] // 2
    assert params["out"]["kernel"].sharding.is_fully_replicated


def test_dropout_takes_the_stream():
    x, of = tokens(), linen("MultiHeadLatentAttention", dropout_rate=0.5)
    variables = init(of, x, deterministic=True)
    apply = jax.jit(functools.partial(of.apply, deterministic=False))
    one, again, other = (apply(variables, x, rngs={"dropout": jax.random.key(k)}) for k in (1, 1, 2))
    np.testing.assert_array_equal(one, again)
    assert (one != other).any()
    layer = of_nnx("MultiHeadLatentAttention", variables["params"], dropout_rate=0.5, keep_rngs=False)
    key = jax.random.key(3)
    want = nnx.jit(lambda layer, x: layer(x, deterministic=False, rngs=lambda: key))(layer, x)
    np.testing.assert_array_equal(apply(variables, x, dropout_rng=key), want)
    off = jax.make_jaxpr(functools.partial(of.apply, deterministic=True))(variables, x)
    assert str(off) == str(jax.make_jaxpr(of.clone(dropout_rate=0.0).apply)(variables, x))
    with pytest.raises(ValueError, match="deterministic"):
        of.apply(variables, x)
    with pytest.raises(Exception, match='needs PRNG for "dropout"'):
        of.apply(variables, x, deterministic=False)


@pytest.mark.parametrize(
    "name, options, call",
    [
        (
            "MultiHeadLatentAttention",
            dict(page_size=16, num_pages=4),
            dict(
                block_tables=np.arange(4, dtype=np.int32)[::-1].reshape(2, 2), seq_lengths=np.array([17, 5], np.int32)
            ),
        ),
        ("KimiDeltaAttention", dict(state_dtype=jnp.bfloat16), dict(state_indices=np.array([1, 0], np.int32))),
    ],
    ids=["pages", "pool of states"],
)
def test_options_of_the_cache(name, options, call):
    x, of = tokens(), linen(name, decode=True, **options)
    variables = init(of, x, **call)
    layer = of_nnx(name, variables["params"])
    layer.init_cache(x.shape, **options)
    same(variables["cache"], nnx.to_pure_dict(nnx.state(layer, nnx.Cache)))
    found, variables = stepper(of)(variables, x[:, :17], **call)
    want = nnx.jit(lambda layer, x, call: layer(x, decode=True, **call))(layer, x[:, :17], call)
    np.testing.assert_array_equal(found, want)
    same(variables["cache"], nnx.to_pure_dict(nnx.state(layer, nnx.Cache)))


def test_rows_in_bytes():
    of = jattn.linen.HeavilyCompressedAttention(
        num_heads=2, qkv_features=160, ratio=4, window=4, rotary=jattn.Rotary(16), kv_format="v4_584", page_size=8,
        decode=True,
    )  # fmt: skip
    cache = jax.eval_shape(of.init, jax.random.key(0), tokens())["cache"]["cached"]
    wanted = jattn.CompressedCache.zeros(
        B, T, 80, ratio=4, overlap=False, window=4, kv_format="v4_584", page=8, rotary_dim=16
    )
    assert jax.tree.structure(cache) == jax.tree.structure(wanted) and shapes(cache) == shapes(wanted)


def test_errors():
    x, of = tokens(), linen("GatedDeltaNet", decode=True)
    params = init(of, x)["params"]
    at_once = of.clone(decode=False)
    with pytest.raises(ScopeParamNotFoundError, match='"A_log"'):
        at_once.apply({"params": {name: p for name, p in params.items() if name != "A_log"}}, x)
    with pytest.raises(ScopeParamNotFoundError, match='"query/bias"'):
        at_once.apply({"params": params | {"query": {"kernel": params["query"]["kernel"]}}}, x)
    with pytest.raises(ScopeParamShapeError, match=r'"beta/kernel" .*\(8, 2\).*\(12, 2\)'):
        at_once.apply({"params": params}, x[..., :8])
    with pytest.raises(ValueError, match=r"inputs have shape \(12,\); expected \[\*B, T, features\]"):
        at_once.apply({"params": params}, x[0, 0])
    with pytest.raises(ValueError, match="seq_lengths and state_indices are for decode=True"):
        at_once.apply({"params": params}, x, seq_lengths=np.array([1, 2]))
    with pytest.raises(ValueError, match="qkv_features=12 must be a multiple of num_heads=5"):
        at_once.clone(num_heads=5, num_qk_heads=None).init(jax.random.key(0), x)
    with pytest.raises(NotImplementedError, match="cannot honour use_bias=True"):
        linen("MultiHeadLatentAttention", use_bias=True).init(jax.random.key(0), x)
    with pytest.raises(NotImplementedError, match="dropout_rate=0.5: decoding has no dropout"):
        linen("MultiHeadLatentAttention", dropout_rate=0.5, decode=True).init(
            jax.random.key(0), x, deterministic=False, dropout_rng=jax.random.key(0)
        )

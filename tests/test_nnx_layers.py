"""What all layers with a cache do as Flax layers: metadata of parameters, views, and one compilation for equal ones."""

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, PartitionSpec
from linear_cases import quick_compiles  # noqa: F401 -- for every test here
from nnx_cases import B, M, T, call, tokens

import jattn
import jattn.nnx

LAYERS = {
    "kda": (jattn.nnx.KimiDeltaAttention, dict(num_heads=2, value_head_dim=8)),
    "gdn": (jattn.nnx.GatedDeltaNet, dict(num_heads=2)),
    "mla": (jattn.nnx.MultiHeadLatentAttention, dict(num_heads=2, gated=True, rope_features=2, rope=False)),
    "csa": (
        jattn.nnx.CompressedSparseAttention,
        dict(num_heads=2, top_k=2, index_heads=2, index_head_dim=4, num_groups=2),
    ),
    "hca": (jattn.nnx.HeavilyCompressedAttention, dict(num_heads=2, num_groups=2)),
}
ALL = pytest.mark.parametrize("name", LAYERS)


def layer(name, **options):
    make, own = LAYERS[name]
    return make(in_features=M, **own, **options, rngs=nnx.Rngs(0))


def mesh():
    return jax.make_mesh((2,), ("model",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])


def kernels(layer):
    flat = nnx.to_flat_state(nnx.state(layer, nnx.Param))
    return {".".join(map(str, path)): x for path, x in flat if path[-1] == "kernel" and not path[-2].endswith("_conv")}


@ALL
def test_partitioning_metadata_is_kept(name):
    """As Flax's own layers keep it: in the parameters, and in where they are."""
    init = nnx.with_partitioning(nnx.initializers.lecun_normal(), (None, "model"))
    with jax.set_mesh(mesh()):
        spread = layer(name, kernel_init=init)
        plain = layer(name, out_kernel_init=init)
    assert len(kernels(spread)) >= 6
    for path, x in kernels(spread).items():
        assert x.out_sharding == (None, "model"), path
        assert x[...].sharding.spec[:2] == (None, "model"), path
    out = {"out.kernel", "out_down.kernel", "out_up.kernel"} & set(kernels(plain))
    assert out and out == {path for path, x in kernels(plain).items() if getattr(x, "out_sharding", None)}
    specs = jax.tree.leaves(nnx.get_partition_spec(nnx.state(spread, nnx.Param)))
    assert sum(spec == PartitionSpec(None, "model") for spec in specs) == len(kernels(spread))


def test_metadata_reaches_the_kernels():
    of = layer("kda", kernel_metadata={"note": "one"}, out_kernel_metadata={"note": "two"})
    assert (of.query.kernel.note, of.decay_up.kernel.note, of.out.kernel.note) == ("one", "one", "two")
    assert layer("mla", kernel_metadata={"note": "one"}).out.kernel.note == "one"


@ALL
def test_views_decode(name):
    of = layer(name)
    view = nnx.view(of, decode=True, batch_size=B, max_length=T)
    assert view.decode is True and view.has_cache() and not of.has_cache() and of.decode is None
    again = nnx.view(view, decode=False)
    assert again.decode is False and again.has_cache()
    assert layer(name, decode=True).decode is True


def test_a_view_without_sizes_makes_no_cache():
    view = nnx.view(layer("mla"), decode=True)
    with pytest.raises(ValueError, match="decode=True needs a cache"):
        view(tokens())
    view = nnx.view(layer("mla", dropout_rate=0.5), deterministic=True)
    assert view.deterministic is True


@ALL
def test_equal_layers_share_a_compilation(name):
    traces = []

    @nnx.jit
    def shapes(layer, x):
        traces.append(1)
        return x

    for seed in (0, 1):
        make, own = LAYERS[name]
        of = make(in_features=M, **own, rngs=nnx.Rngs(seed))
        of.init_cache((B, T, M))
        shapes(of, 0)
    assert len(traces) == 1


def test_any_number_of_batch_axes():
    x, of = tokens(), layer("mla")
    flat = np.asarray(call(of, x))
    np.testing.assert_array_equal(call(of, x.reshape(B, 1, T, M)), flat.reshape(B, 1, T, M))
    of.init_cache((B, 1, T, M))
    assert call(of, x.reshape(B, 1, T, M), decode=True).shape == (B, 1, T, M)


def test_names():
    assert sorted(jattn.nnx.__all__) == list(jattn.nnx.__all__)
    for name in jattn.nnx.__all__:
        assert getattr(jattn.nnx, name).__doc__

"""Which implementation attends over a cache is known when a call is lowered, beside a GPU and on a machine without."""

import re
import types

import caches
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jattn
from jattn import _dispatch

Q, KEY, VALUE = caches.draw(2, 1, 40)
LENGTHS = np.array([40, 17], np.int32)
CACHE = caches.paged(KEY, VALUE, LENGTHS)
NO_GPU = "needs a GPU, and there is none"


def decode(query, **options):
    return jattn.decode_attention(query, KEY, VALUE, LENGTHS, **options)


def paged(query, **options):
    return jattn.paged_attention(query, CACHE, **options)


OPS = pytest.mark.parametrize("attend", [decode, paged])


@pytest.fixture
def kernel(monkeypatch):
    """A stand-in for a kernel that lowers for CUDA alone: its result is the cosine of the query, computed nowhere else.
    Its `why_not_here` is as on a machine without a GPU."""
    module = types.SimpleNamespace(
        PLATFORM="cuda", why_not=lambda problem: None, why_not_here=lambda: NO_GPU,
        choose=lambda problem, config: "its config",
        forward=lambda arrays, options: (jnp.cos(arrays.query), 0 * arrays.query[..., 0]),
    )  # fmt: skip
    real = _dispatch.module
    for op in ("decode_attention", "paged_attention"):
        monkeypatch.setitem(_dispatch._TABLE, op, {"kernel": "somewhere", "xla": "jattn.reference.paged"})
    monkeypatch.setattr(_dispatch, "module", lambda op, name: module if name == "kernel" else real(op, name))
    return module


@pytest.fixture
def beside_a_gpu(kernel, monkeypatch):
    """As on a machine whose default device is a GPU that the kernel runs on; what runs here still runs on its CPU."""
    monkeypatch.setattr(kernel, "why_not_here", lambda: None)


def kernels(function, *platforms, query=Q):
    """How many kernels and how many loops of "xla" the function is, exported."""
    fresh = jax.jit(lambda query: function(query))  # what was traced on another machine is not for this one
    text = jax.export.export(fresh, platforms=platforms)(query).mlir_module()
    return text.count("stablehlo.cosine"), min(text.count("stablehlo.while"), 1)


def named(attend):
    return lambda query: attend(query, implementation="kernel")


@OPS
def test_none_is_xla_on_a_cpu_beside_a_gpu(attend, beside_a_gpu):
    want = attend(Q, implementation="xla", return_residual=True)
    for run in (attend, jax.jit(attend, static_argnames="return_residual")):
        jax.tree.map(np.testing.assert_array_equal, run(Q, return_residual=True), want)


@OPS
def test_none_exports_for_the_platform_that_is_asked_for(attend, beside_a_gpu):
    assert kernels(attend, "cuda") == (1, 0)
    assert kernels(attend, "cpu") == kernels(attend, "tpu") == (0, 1)


@OPS
def test_without_a_gpu_none_is_xla_for_every_platform(attend, kernel):
    assert kernels(attend, "cuda") == kernels(attend, "cpu", "cuda", "tpu") == (0, 1)


@OPS
def test_a_named_kernel_is_exported_for_cuda_on_a_machine_without_it(attend, kernel):
    assert kernels(named(attend), "cuda") == (1, 0)
    assert kernels(jax.vmap(named(attend)), "cuda", query=Q[None]) == (1, 0)
    assert kernels(lambda q: jax.lax.scan(lambda x, _: (named(attend)(x), None), q, None, length=3)[0], "cuda")[0] == 1


def test_a_kernel_inside_shard_map(beside_a_gpu):
    """Traced beside a GPU, on the CPU it is "xla" there too."""
    mesh = Mesh(np.array(jax.devices()[:2]), ("x",))
    specs = (P("x"),) * 4
    attend = jax.shard_map(jattn.decode_attention, mesh=mesh, in_specs=specs, out_specs=P("x"))
    np.testing.assert_array_equal(jax.jit(attend)(Q, KEY, VALUE, LENGTHS), decode(Q, implementation="xla"))


@OPS
def test_named_and_lowered_for_another_platform_is_an_error(attend, kernel):
    for platform in ("cpu", "tpu"):
        with pytest.raises(NotImplementedError, match=f"'kernel' can be lowered for cuda alone, not for {platform}"):
            kernels(named(attend), platform)
    for run in (named(attend), jax.jit(named(attend))):
        with pytest.raises(NotImplementedError, match="'kernel' can be lowered for cuda alone, not for cpu"):
            run(Q)
    assert jax.eval_shape(named(attend), Q).shape == Q.shape


@OPS
def test_a_kernel_for_several_platforms_at_once_is_refused_with_the_way_out(attend, beside_a_gpu):
    with pytest.raises(NotImplementedError, match="cuda alone, not for cpu, cuda: export for one platform at a time"):
        kernels(attend, "cpu", "cuda")
    assert kernels(lambda q: attend(q, implementation="xla"), "cpu", "cuda") == (0, 1)


@OPS
def test_what_cannot_run_says_why(attend, kernel, monkeypatch):
    monkeypatch.setattr(kernel, "why_not", lambda problem: f"no page of {problem.page}")
    page = 40 if attend is decode else 16
    sentence = f"no implementation of jattn.{attend.__name__}_attention can run this call: kernel: no page of {page}"
    with pytest.raises(NotImplementedError, match=f"^{re.escape(sentence)}$"):
        attend(Q, implementation="kernel")
    np.testing.assert_array_equal(attend(Q), attend(Q, implementation="xla"))

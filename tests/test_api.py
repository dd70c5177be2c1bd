"""The public surface: names, signatures and docstrings."""

import inspect

import jax
import numpy as np
import pytest
from cases import qkv

import jattn

pytestmark = pytest.mark.quick
OPS = (
    "attention", "ragged_attention", "decode_attention", "paged_attention", "append", "copy_pages", "gather",
    "quantize", "dequantize", "merge", "empty", "rope", "explain",
)  # fmt: skip


def test_attention_takes_what_jax_nn_takes():
    """A superset of jax.nn.dot_product_attention: same names, same order, same defaults, same kinds."""
    ours, theirs = (
        inspect.signature(jattn.attention).parameters,
        inspect.signature(jax.nn.dot_product_attention).parameters,
    )
    assert theirs.keys() <= ours.keys()
    for name, theirs_ in theirs.items():
        assert (ours[name].kind, ours[name].default) == (theirs_.kind, theirs_.default), name
    assert list(ours)[:5] == list(theirs)[:5]


def test_attention_gives_what_jax_nn_gives():
    q, k, v = qkv(B=2, T=24, S=24, N=4, K=2, H=16)
    bias = np.random.default_rng(0).standard_normal((2, 4, 24, 24)).astype(np.float32)
    lengths = np.array([24, 9], np.int32)
    for options in (
        dict(),
        dict(is_causal=True, scale=0.3),
        dict(bias=bias, key_value_seq_lengths=lengths, query_seq_lengths=lengths),
        dict(local_window_size=(3, 2)),
        dict(local_window_size=4, is_causal=True),
        dict(mask=bias > -1),
    ):
        with jax.numpy_dtype_promotion("standard"):  # in 64-bit mode jax.nn is not strict about its own indices
            want = np.array(jax.nn.dot_product_attention(q, k, v, **options))
        got = np.array(jattn.attention(q, k, v, **options))
        if "query_seq_lengths" in options:
            got[1, 9:] = want[1, 9:] = 0  # jax.nn says nothing about them
        assert np.abs(got - want).max() <= 1e-5 * np.abs(want).max(), options


def test_arguments_are_keyword_only_after_mask():
    with pytest.raises(TypeError):
        jattn.attention(*qkv(), None, None, 0.5)


def test_documented_signature():
    parameters = inspect.signature(jattn.attention).parameters
    assert list(parameters) == [
        "query", "key", "value", "bias", "mask", "scale", "is_causal", "query_offset", "query_seq_lengths",
        "key_value_seq_lengths", "local_window_size", "segment_ids", "logits_soft_cap", "score_mod", "sinks",
        "dropout_rate", "dropout_key", "return_residual", "deterministic", "implementation", "config",
    ]  # fmt: skip
    ragged = list(inspect.signature(jattn.ragged_attention).parameters)
    assert ragged[:7] == ["query", "key", "value", "cu_seqlens_q", "cu_seqlens_k", "bias", "mask"]
    assert set(ragged) - {"cu_seqlens_q", "cu_seqlens_k"} == set(parameters) - {"segment_ids"}


def test_all_names_exist():
    assert set(OPS) | {"masks", "mods"} <= set(jattn.__all__)
    assert sorted(jattn.__all__) == list(jattn.__all__)
    for module in (jattn, jattn.masks, jattn.mods):
        assert not [name for name in module.__all__ if not hasattr(module, name)]


@pytest.mark.parametrize("name", OPS)
def test_docstrings_say_shapes_errors_an_example_and_a_source(name):
    doc = inspect.getdoc(getattr(jattn, name))
    assert "[" in doc or name == "explain", "shapes"
    assert ">>>" in doc or "Example" in doc
    if name.endswith("attention"):
        for word in ("Args:", "Returns:", "Raises:", "Source", "lse", "dtype"):
            assert word in doc, word


@pytest.mark.parametrize("module", [jattn.masks, jattn.mods])
def test_every_public_function_is_documented(module):
    for name in module.__all__:
        assert inspect.getdoc(getattr(module, name)), name


def test_version_is_a_version():
    assert all(part.isdigit() for part in jattn.__version__.split(".")[:2])


def test_explain_names_the_implementation_and_its_reasons():
    found = jattn.explain(*qkv(), is_causal=True)
    assert found.implementation == "xla"
    assert isinstance(found.refused, dict) and all(isinstance(reason, str) for reason in found.refused.values())
    assert hasattr(found, "config") and "xla" in repr(found)


def test_explain_computes_nothing_and_takes_shapes():
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in qkv()]
    assert jattn.explain(*shapes, dropout_rate=0.1, dropout_key=jax.random.key(0)).implementation == "xla"
    scaled = [jattn.explain(*shapes, scale=scale(0.3)).problem.traced_scale for scale in (float, np.float32, np.array)]
    assert scaled == [False, False, True]
    with pytest.raises(ValueError, match="H=16"):
        jattn.explain(shapes[0], jax.ShapeDtypeStruct((2, 23, 2, 8), np.float32), shapes[2])
    with pytest.raises(TypeError, match="unexpected keyword argument 'return_final_state'"):
        jattn.explain(*shapes, return_final_state=True)


def test_results_have_the_documented_shapes_and_types():
    q, k, v = qkv(D=8)
    out = jattn.attention(q, k, v)
    assert isinstance(out, jax.Array) and out.shape == (2, 17, 4, 8)
    out, lse = jattn.attention(q, k, v, return_residual=True)
    assert lse.shape == (2, 17, 4)
    for lead in ((), (3,), (2, 1, 3)):
        x = [np.broadcast_to(a[0], (*lead, *a.shape[1:])) for a in (q, k, v)]
        out, lse = jattn.attention(*x, return_residual=True)
        assert out.shape == (*lead, 17, 4, 8) and lse.shape == (*lead, 17, 4)

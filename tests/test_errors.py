"""Every refusal: its type, and what its message names; before anything is traced or run."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from cases import qkv

import jattn
from jattn import masks

F32, I32 = np.float32, np.int32
Q, K, V = qkv(B=2, T=17, S=23, N=4, K=2, H=16, D=8)


def ones(*shape, dtype=F32):
    return np.ones(shape, dtype)


# name: (changed arguments, error, words of the message)
REFUSED = {
    "query of rank 2": (dict(query=ones(17, 16)), ValueError, ["query", "(17, 16)"]),
    "key of another rank": (dict(key=ones(23, 2, 16)), ValueError, ["key", "()", "(2,)"]),
    "value of another rank": (dict(value=ones(23, 2, 8)), ValueError, ["value", "()", "(2,)"]),
    "key head dim": (dict(key=ones(2, 23, 2, 64)), ValueError, ["key head dim H=64 must equal query's H=16"]),
    "key batch": (dict(key=ones(3, 23, 2, 16)), ValueError, ["key", "3", "2"]),
    "value batch": (dict(value=ones(1, 23, 2, 8)), ValueError, ["value", "1", "2"]),
    "value length": (dict(value=ones(2, 22, 2, 8)), ValueError, ["value", "22", "23"]),
    "value heads": (dict(value=ones(2, 23, 4, 8)), ValueError, ["value", "4", "2"]),
    "heads not a multiple": (dict(key=ones(2, 23, 3, 16), value=ones(2, 23, 3, 8)), ValueError, ["N=4", "K=3"]),
    "no heads": (dict(query=ones(2, 17, 0, 16)), ValueError, ["N=0"]),
    "no key heads": (dict(key=ones(2, 23, 0, 16), value=ones(2, 23, 0, 8)), ValueError, ["K=0"]),
    "head dim 0": (dict(query=ones(2, 17, 4, 0), key=ones(2, 23, 2, 0)), ValueError, ["H=0"]),
    "integer query": (dict(query=ones(2, 17, 4, 16, dtype=I32)), TypeError, ["query", "int32"]),
    "bool value": (dict(value=ones(2, 23, 2, 8, dtype=bool)), TypeError, ["value", "bool"]),
    "key of another dtype": (dict(key=K.astype(np.float16)), TypeError, ["key", "float16", "float32"]),
    "value of another dtype": (dict(value=V.astype(ml_dtypes.bfloat16)), TypeError, ["value", "bfloat16", "float32"]),
    "float8 inputs": (
        dict(zip(("query", "key", "value"), (x.astype(ml_dtypes.float8_e4m3fn) for x in (Q, K, V)), strict=True)),
        TypeError, ["query", "float8_e4m3fn"]),
    "complex query": (dict(query=Q.astype(np.complex64)), TypeError, ["query", "complex64"]),
    "query is a string": (dict(query="q"), TypeError, ["query", "str"]),
    "query is None": (dict(query=None), TypeError, ["query", "NoneType"]),
    "bias shape": (dict(bias=ones(2, 3, 17, 23)), ValueError, ["bias", "(2, 3, 17, 23)", "(2, 4, 17, 23)"]),
    "bias rank": (dict(bias=ones(1, 1, 4, 17, 23)), ValueError, ["bias", "(1, 1, 4, 17, 23)"]),
    "bool bias": (dict(bias=ones(17, 23, dtype=bool)), TypeError, ["bias", "bool", "mask"]),
    "integer bias": (dict(bias=ones(17, 23, dtype=I32)), TypeError, ["bias", "int32"]),
    "mask shape": (dict(mask=ones(2, 4, 17, 17, dtype=bool)), ValueError, ["mask", "(2, 4, 17, 17)", "(2, 4, 17, 23)"]),
    "float mask": (dict(mask=ones(17, 23)), TypeError, ["mask", "float32", "bias"]),
    "integer mask": (dict(mask=ones(17, 23, dtype=I32)), TypeError, ["mask", "int32"]),
    "mask is a function": (dict(mask=lambda b, n, t, s: t >= s), TypeError, ["mask", "function"]),
    "scale of rank 1": (dict(scale=ones(4)), ValueError, ["scale", "(4,)"]),
    "scale is a string": (dict(scale="1"), TypeError, ["scale", "str"]),
    "scale is nan": (dict(scale=float("nan")), ValueError, ["scale", "nan"]),
    "is_causal is an array": (dict(is_causal=ones(1, dtype=bool)), TypeError, ["is_causal"]),
    "offset word": (dict(query_offset="start"), ValueError, ["query_offset", "start", "end"]),
    "offset float": (dict(query_offset=1.5), TypeError, ["query_offset", "1.5|float"]),
    "offset shape": (dict(query_offset=ones(3, dtype=I32)), ValueError, ["query_offset", "(3,)", "(2,)"]),
    "offset dtype": (dict(query_offset=ones(2)), TypeError, ["query_offset", "float32"]),
    "query lengths shape": (dict(query_seq_lengths=ones(3, dtype=I32)), ValueError, ["query_seq", "(3,)", "(2,)"]),
    "query lengths dtype": (dict(query_seq_lengths=ones(2)), TypeError, ["query_seq_lengths", "float32"]),
    "key lengths shape": (
        dict(key_value_seq_lengths=ones(2, 1, dtype=I32)), ValueError, ["key_value_seq_lengths", "(2, 1)", "(2,)"]),
    "key lengths dtype": (dict(key_value_seq_lengths=ones(2, dtype=bool)), TypeError, ["key_value", "bool"]),
    "negative static length": (dict(key_value_seq_lengths=-1), ValueError, ["key_value_seq_lengths", "-1"]),
    "negative static query length": (dict(query_seq_lengths=-2), ValueError, ["query_seq_lengths", "-2"]),
    "empty window": (dict(local_window_size=(-3, 2)), ValueError, ["window", "use None for unbounded"]),
    "minus one window": (dict(local_window_size=-1), ValueError, ["window", "use None for unbounded"]),
    "minus one for unbounded": (dict(local_window_size=(-1, 0)), ValueError, ["window", "use None for unbounded"]),
    "float window": (dict(local_window_size=(1.0, 2)), TypeError, ["window", "1.0|float"]),
    "window of three": (dict(local_window_size=(1, 2, 3)), (TypeError, ValueError), ["local_window_size", "(1, 2, 3)"]),
    "array window": (dict(local_window_size=ones(2, dtype=I32)), TypeError, ["window", "array"]),
    "segments shape": (
        dict(segment_ids=(ones(2, 17, dtype=I32), ones(2, 17, dtype=I32))), ValueError, ["segment", "(2, 17)", "23"]),
    "one segment array for T and S": (dict(segment_ids=ones(2, 17, dtype=I32)), ValueError, ["segment", "17", "23"]),
    "segments dtype": (dict(segment_ids=(ones(2, 17), ones(2, 23))), TypeError, ["segment", "float32"]),
    "three segment arrays": (dict(segment_ids=(ones(2, 17, dtype=I32),) * 3), (TypeError, ValueError), ["segment"]),
    "soft cap zero": (dict(logits_soft_cap=0.0), ValueError, ["logits_soft_cap", "0"]),
    "negative soft cap": (dict(logits_soft_cap=-5.0), ValueError, ["logits_soft_cap", "-5"]),
    "soft cap nan": (dict(logits_soft_cap=float("nan")), ValueError, ["logits_soft_cap", "nan"]),
    "soft cap word": (dict(logits_soft_cap="5"), TypeError, ["logits_soft_cap", "'5'"]),
    "sinks shape": (dict(sinks=ones(2)), ValueError, ["sinks", "(2,)", "4"]),
    "sinks dtype": (dict(sinks=ones(4, dtype=I32)), TypeError, ["sinks", "int32"]),
    "sinks rank": (dict(sinks=F32(1)), ValueError, ["sinks", "()"]),
    "dropout without key": (dict(dropout_rate=0.1), ValueError, ["dropout_key"]),
    "dropout of everything": (dict(dropout_rate=1.0, dropout_key=0), ValueError, ["dropout_rate", "1"]),
    "unknown implementation": (dict(implementation="cudnn"), ValueError, ["implementation", "cudnn", "xla"]),
    "implementation is no string": (dict(implementation=3), (TypeError, ValueError), ["implementation", "3|int"]),
    "tree of another length": (dict(mask=masks.tree(np.array([-1, 0], I32))), ValueError, ["2", "17"]),
}  # fmt: skip


def message(error, call):
    with pytest.raises(error) as caught:
        call()
    return str(caught.value)


def assert_says(text, words):
    for word in words:
        assert any(option in text for option in word.split("|")), f"{text!r} does not say {word!r}"


@pytest.mark.quick
@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    changes, error, words = REFUSED[name]
    arguments = dict(query=Q, key=K, value=V) | changes
    text = message(error, lambda: jattn.attention(**arguments))
    assert_says(text, words)
    assert len(text.splitlines()[0]) < 250


@pytest.mark.parametrize(
    "name", ["key head dim", "bias shape", "mask shape", "sinks shape", "query lengths shape", "offset shape"]
)
def test_refused_before_anything_is_traced(name):
    """The same message from shapes alone, inside jit, and for the gradient."""
    changes, error, words = REFUSED[name]
    arguments = dict(query=Q, key=K, value=V) | changes
    for run in (jax.eval_shape, lambda f, x: jax.jit(f)(x), lambda f, x: jax.grad(lambda y: f(y).sum())(x)):
        text = message(
            error,
            lambda run=run: run(lambda d: jattn.attention(**{**arguments, **d}), {"query": Q, "key": arguments["key"]}),
        )
        assert_says(text, words)


def test_a_named_implementation_that_cannot_run_says_why():
    """A tile config that no implementation here takes is refused, not ignored."""
    with pytest.raises((TypeError, ValueError, NotImplementedError), match="config"):
        jattn.attention(Q, K, V, implementation="xla", config=object())


def test_offset_and_lengths_are_numbers_where_there_is_no_batch():
    q, k, v = (x[0] for x in (Q, K, V))
    want = jattn.attention(q, k, v, query_offset=3, key_value_seq_lengths=9, is_causal=True)
    got = jattn.attention(q, k, v, query_offset=jnp.int32(3), key_value_seq_lengths=jnp.int32(9), is_causal=True)
    np.testing.assert_allclose(got, want, atol=1e-6)
    with pytest.raises(ValueError, match="key_value_seq_lengths"):
        jattn.attention(q, k, v, key_value_seq_lengths=ones(1, dtype=I32))


RAGGED = dict(query=ones(40, 4, 16), key=ones(50, 2, 16), value=ones(50, 2, 8), cu_seqlens_q=np.array([0, 20, 40], I32),
              cu_seqlens_k=np.array([0, 25, 50], I32))  # fmt: skip
RAGGED_REFUSED = {
    "query of rank 4": (dict(query=ones(1, 40, 4, 16)), ValueError, ["query", "(1, 40, 4, 16)"]),
    "key head dim": (dict(key=ones(50, 2, 64)), ValueError, ["key head dim H=64 must equal query's H=16"]),
    "value length": (dict(value=ones(49, 2, 8)), ValueError, ["value", "49", "50"]),
    "offsets of rank 2": (dict(cu_seqlens_q=np.zeros((2, 2), I32)), ValueError, ["cu_seqlens_q", "(2, 2)"]),
    "no offsets": (dict(cu_seqlens_q=np.zeros((0,), I32)), ValueError, ["cu_seqlens_q", "(0,)"]),
    "offsets of floats": (dict(cu_seqlens_q=np.zeros(3, F32)), TypeError, ["cu_seqlens_q", "float32"]),
    "offsets differ in number": (dict(cu_seqlens_k=np.array([0, 50], I32)), ValueError, ["cu_seqlens_k", "2"]),
    "lengths shape": (dict(query_seq_lengths=np.ones(3, I32)), ValueError, ["query_seq_lengths", "(3,)", "(2,)|2"]),
    "bias shape": (dict(bias=ones(4, 40, 49)), ValueError, ["bias", "(4, 40, 49)", "(4, 40, 50)"]),
    "mask shape": (dict(mask=ones(4, 40, 49, dtype=bool)), ValueError, ["mask", "(4, 40, 49)"]),
    "offset word": (dict(query_offset="start"), ValueError, ["query_offset", "start"]),
    "query offset shape": (dict(query_offset=np.ones(3, I32)), ValueError, ["query_offset", "(3,)"]),
    "keys of another packing": (dict(cu_seqlens_k=None), ValueError, ["cu_seqlens_k", "40", "50"]),
    "empty window": (dict(local_window_size=(-3, 2)), ValueError, ["use None for unbounded"]),
    "soft cap": (dict(logits_soft_cap=0), ValueError, ["logits_soft_cap", "0"]),
    "sinks": (dict(sinks=ones(2)), ValueError, ["sinks", "(2,)"]),
    "dropout": (dict(dropout_rate=0.5), ValueError, ["dropout_key"]),
    "implementation": (dict(implementation="cudnn"), ValueError, ["cudnn", "xla"]),
}  # fmt: skip


@pytest.mark.quick
@pytest.mark.parametrize("name", RAGGED_REFUSED)
def test_ragged_refused(name):
    changes, error, words = RAGGED_REFUSED[name]
    assert_says(message(error, lambda: jattn.ragged_attention(**RAGGED | changes)), words)


TOKENS = ones(10, 1, 8)
OFFSETS = {
    "ragged_attention": ("cu_seqlens_q", lambda cu: jattn.ragged_attention(TOKENS, TOKENS, TOKENS, cu)),
    "ragged_attention, keys": (
        "cu_seqlens_k", lambda cu: jattn.ragged_attention(TOKENS, TOKENS, TOKENS, np.array([0, 3, 10]), cu)
    ),
    "linear_attention": (
        "cu_seqlens", lambda cu: jattn.linear.linear_attention(TOKENS, TOKENS, TOKENS, cu_seqlens=cu)
    ),
    "short_conv": ("cu_seqlens", lambda cu: jattn.linear.short_conv(ones(10, 4), ones(4, 3), cu_seqlens=cu)),
}  # fmt: skip


@pytest.mark.parametrize("form", [list, tuple, np.array], ids=["list", "tuple", "numpy"])
@pytest.mark.parametrize("name", OFFSETS)
def test_packed_offsets_on_the_host_are_in_order_and_in_range(name, form):
    argument, call = OFFSETS[name]
    for offsets in ([0, 7, 11], [0, 7, 3]):
        words = [f"{argument}={offsets}", "must never decrease", "10 rows"]
        assert_says(message(ValueError, lambda offsets=offsets: call(form(offsets))), words)
    assert_says(message(ValueError, lambda: call(form([-2, 7, 10]))), [argument, "[-2, 7, 10]", "must be >= 0"])
    call(form([2, 7, 9]))  # rows before the first and after the last are nobody's


@pytest.mark.parametrize("lengths", [-3, 100, 2**31 - 1])
def test_wild_lengths_read_nothing_outside(lengths):
    """Traced lengths cannot be refused: they clamp to what exists."""
    wild = np.array([lengths, 9], np.int32)
    clamped = np.clip(wild, 0, 23)
    for name, limit in (("key_value_seq_lengths", 23), ("query_seq_lengths", 17)):
        got = jax.jit(lambda n, name=name: jattn.attention(Q, K, V, **{name: n}))(wild)
        want = jattn.attention(Q, K, V, **{name: np.minimum(clamped, limit)})
        np.testing.assert_allclose(got, want, atol=1e-6)


def test_wild_packed_offsets_read_nothing_outside():
    x = dict(zip(("query", "key", "value"), (a[0] for a in (Q, K, V)), strict=True))
    wild = np.array([0, 9, 1000], np.int32)
    out = jax.jit(lambda cu: jattn.ragged_attention(**x, cu_seqlens_q=cu, cu_seqlens_k=cu))(wild)
    assert np.isfinite(out).all()
    want = jattn.ragged_attention(**x, cu_seqlens_q=np.array([0, 9, 17], I32), cu_seqlens_k=np.array([0, 9, 23], I32))
    np.testing.assert_allclose(out, want, atol=1e-6)


def test_wild_query_offsets_are_positions_like_any_other():
    for offset, rows in ((2**31 - 100, slice(None)), (-(2**31) + 100, slice(0, 0))):
        out = jattn.attention(Q, K, V, is_causal=True, query_offset=np.array([offset, offset], np.int32))
        full = np.asarray(jattn.attention(Q, K, V))
        want = np.zeros_like(full)
        want[:, rows] = full[:, rows]
        np.testing.assert_allclose(out, want, atol=1e-6)

"""Caches of compressed attention: rows of 584 bytes by their layout, restored states, and what is refused."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from compressed_cases import SINKS, J, N, chunk, draw, empty, equal, host, run, tokens

import jattn
from jattn.compressed import EntryIndex, EntrySource, csa_attention, hca_attention
from jattn.compressed_cache import CompressedCache, Rows584
from jattn.compressed_tokens import CompressState, Rotary


def spread(shape, seed=0):
    """Rows whose channels reach from 1e-6 to 1e4, a block of zeros among them."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape) * 10.0 ** rng.uniform(-6, 4, (*shape[:-1], 1))
    x[0, :, 64:128] = 0
    return x.astype(np.float32)


@pytest.mark.quick
def test_a_page_of_rows_byte_by_byte():
    """448 fp8 codes and 64 bfloat16 in 576 bytes, 8 bytes of scales behind all rows of a page, a stride of 576."""
    assert Rows584.zeros(1, 1, 512, 64, page=64).stride == 65 * 576
    assert Rows584.zeros(1, 1, 512, 64, page=2).stride == 3 * 576
    rows = Rows584.zeros(2, 5, 512, 64, page=4)
    assert rows.data.shape == (2, 2, 5 * 576) and rows.shape == (2, 8, 512)
    x = spread((2, 3, 512))
    index = np.array([[0, 3, 4], [6, 1, 2**20]], np.int32)  # the last one is nowhere
    put = jax.jit(lambda rows, index, x: rows.put(index, rows.encode(x)))
    rows = put(jax.tree.map(lambda a: a + np.uint8(77), rows), index, x)
    data = np.asarray(rows.data)
    untouched = np.ones(data.shape, bool)
    for b, n in ((0, 0), (0, 1), (0, 2), (1, 0), (1, 1)):
        page, slot = divmod(int(index[b, n]), 4)
        row, scales = data[b, page, slot * 576 :][:576], data[b, page, 4 * 576 + slot * 8 :][:8]
        untouched[b, page, slot * 576 : slot * 576 + 576] = untouched[b, page, 4 * 576 + slot * 8 :][:8] = False
        for k in range(7):
            block = x[b, n, 64 * k : 64 * k + 64]
            largest = max(np.abs(block).max(), 1e-4)
            exponent = int(np.ceil(np.log2(np.float64(largest) / 448)))
            assert scales[k] == exponent + 127
            want = (block.astype(np.float64) / 2.0**exponent).astype(np.float32).astype(ml_dtypes.float8_e4m3fn)
            np.testing.assert_array_equal(row[64 * k : 64 * k + 64], want.view(np.uint8))
        np.testing.assert_array_equal(row[448:], x[b, n, 448:].astype(ml_dtypes.bfloat16).view(np.uint8))
        assert scales[7] == 0
    assert (data[untouched] == 77).all()
    taken = jax.jit(lambda rows, index: rows.decode(rows.take(index), jnp.float32))(rows, np.minimum(index, 7))
    back = np.asarray(taken)[0]
    block = np.abs(x[0, :, :448].reshape(3, 7, 64)).max(-1, keepdims=True)
    error = np.abs(back[:, :448] - x[0, :, :448]).reshape(3, 7, 64)
    assert (error <= np.maximum(block, 1e-4) * 2.0**-4).all() and np.any(error)
    assert not np.any(back[:, 64:128][0])


STORED = Rows584(None, 4, 80, 16)
ROUND_TRIPS = {  # into what is stored, and back
    "rows of 584 bytes": (STORED.encode, lambda rows: STORED.decode(rows, jnp.float32)),
    "rows of 656 bytes": (lambda x: jattn.pack_latent(jnp.tile(x, 7)[..., :512], x[..., :64]), jattn.unpack_latent),
    "index keys": (jattn.indexer_quantize, lambda pair: jattn.indexer_dequantize(*pair)),
    "a cache of keys": (lambda x: jattn.quantize(x[:, None], "float8_e4m3fn"), jattn.dequantize),
}


@pytest.mark.parametrize("name", ROUND_TRIPS)
def test_what_is_read_at_once_is_rounded_all_the_same(name):
    """In one program, where a compiler may find that a conversion undoes another."""
    there, back = ROUND_TRIPS[name]
    x = spread((2, 3, 80))
    once = jax.jit(lambda x: back(there(x)))(x)
    equal(host(once), host(jax.jit(back)(jax.jit(there)(x))))
    rounded = np.asarray(once)
    assert np.any(rounded.reshape(6, -1)[:, :64] != x.reshape(6, -1)[:, :64])


@pytest.mark.aot
@pytest.mark.parametrize("name", ROUND_TRIPS)
def test_a_gpu_rounds_what_is_read_at_once(name):
    """The program for an H200 has fp8 in it: XLA leaves out a conversion and its inverse where it sees both."""
    import aot

    there, back = ROUND_TRIPS[name]
    x = jax.ShapeDtypeStruct((2, 3, 80), jnp.float32, sharding=aot.sharding())
    text = jax.jit(lambda x: back(there(x))).lower(x).compile().as_text()
    assert "f8e4m3fn[" in text and ("bf16[" in text) == name.startswith("rows")


def test_widths_that_share_no_scale_are_refused():
    for dim, rotary in ((512, 63), (512, 0 - 1), (100, 64), (64, 80)):
        with pytest.raises(ValueError, match=f"dim={dim} less rotary_dim={rotary}"):
            Rows584.zeros(1, 8, dim, rotary)


D, R, T, CI = 80, 16, 22, 32  # one block of 64 channels; index keys of one FP4 block
WIDE = Rotary(R, base=100.0)


@functools.cache
def wide_inputs(kind):
    rng = np.random.default_rng(8)
    m, halves = (4, 2) if kind == "CSA" else (8, 1)

    def f(*shape):
        return rng.standard_normal(shape).astype(np.float32)

    def own(c):
        return EntrySource(f(2, T, c * halves), f(2, T, c * halves), f(m, c * halves), 1 + f(c))

    index = EntryIndex(f(2, T, J, CI), f(2, T, J), own(CI)) if kind == "CSA" else None
    return f(2, T, N, D), 3 * f(2, T, D), own(D), index


@functools.cache
def wide_call(kind, index_format):
    def run(query, kv, own, index, cache, lengths):
        options = dict(scale=D**-0.5, window=6, sinks=SINKS, rotary=WIDE, seq_lengths=lengths, return_residual=True)
        if kind == "HCA":
            return hca_attention(query, kv, own, cache, **options)
        return csa_attention(query, kv, own, index, cache, top_k=3, index_format=index_format, **options)

    return jax.jit(run)


@pytest.mark.parametrize("kind, index_format", [("CSA", "fp4_b32"), ("HCA", None)])
def test_decoding_from_bytes_is_the_prompt_from_bytes(kind, index_format):
    """Bit for bit, one token at a time; and what is read are the numbers that the bytes stand for."""
    inputs, lengths = wide_inputs(kind), np.full(2, T, np.int32)
    make = functools.partial(
        CompressedCache.zeros, 2, T, D, ratio=4 if kind == "CSA" else 8, overlap=kind == "CSA", window=6,
        index_dim=CI if kind == "CSA" else None, index_format=index_format,
    )  # fmt: skip
    stored = host(jax.jit(functools.partial(make, kv_format="v4_584", rotary_dim=R, page=4))())
    call = wide_call(kind, index_format)
    (out, lse), whole = host(call(*inputs, stored, lengths))
    # Bytes that hold no row may be anything: NaN codes and scales.
    cache = jax.tree.map(lambda x: x | 255 if x.dtype == np.uint8 else x, stored)
    for t in range(T):
        one = tokens(inputs, lambda x, t=t: x[:, t : t + 1])
        (o, o_lse), cache = host(call(*one, cache, lengths * 0 + 1))
        equal((o[:, 0], o_lse[:, 0]), (out[:, t], lse[:, t]), f"token {t}")
    m, written = (4 if kind == "CSA" else 8), whole
    every = {n: np.broadcast_to(np.arange(k, dtype=np.int32), (2, k)) for n, k in (("window", 6), ("entries", T // m))}

    @jax.jit
    def numbers(cache):
        taken = {name: getattr(cache, name).take(index) for name, index in every.items()}
        return taken, {name: getattr(cache, name).decode(taken[name], jnp.float32) for name in every}

    equal(host(numbers(cache)), host(numbers(written)))
    equal(cache.tail, written.tail)
    if kind == "CSA":
        assert written.index_keys[0].shape == (2, T // 4, CI // 2) and written.index_keys[0].dtype == np.uint8
        equal(jax.tree.map(lambda x: x[:, : T // 4], cache.index_keys), written.index_keys)
        return  # what follows costs a program more, and reads rows in the same way
    # A token that writes a row of zeros sees the same in a cache of numbers that holds what the bytes say.
    one = tokens(inputs, lambda x: x[:, :1])
    one = one[0], one[1] * 0, *one[2:]
    plain = dataclasses.replace(whole, **host(numbers(whole)[1]))
    equal(host(call(*one, plain, lengths * 0 + 1)[0]), host(call(*one, whole, lengths * 0 + 1)[0]))


def test_quantised_scores_need_no_cache():
    """`index_format` rounds queries and keys alike where no cache holds them."""
    inputs, lengths = wide_inputs("CSA"), np.full(2, T, np.int32)
    make = functools.partial(CompressedCache.zeros, 2, T, D, ratio=4, overlap=True, window=6, index_dim=CI)
    cache = jax.jit(functools.partial(make, index_format="fp4_b32"))()
    call = wide_call("CSA", "fp4_b32")
    equal(host(call(*inputs, cache, lengths)[0]), host(call(*inputs, None, lengths)))


def parts(cache):
    fields = ("window", "tail", "index_keys", "index_tail")
    return dict(length=np.asarray(cache.lengths), capacity=cache.capacity) | {n: getattr(cache, n) for n in fields}


@pytest.mark.parametrize("kind", ["CSA", "HCA"])
def test_restored_states_go_on(kind):
    inputs = draw(kind)
    _, cache = run(kind, inputs, empty(kind), [13, 32])
    kinds = dict(ratio=4 if kind == "CSA" else 8, overlap=kind == "CSA")
    restored = CompressedCache.restore(cache.entries, **parts(cache), **kinds)
    equal(restored, cache)
    after = CompressedCache.restore(cache.entries, **parts(cache) | dict(capacity=None), **kinds)
    assert after.capacity == (cache.entries.shape[1] + 1) * kinds["ratio"] - 1


def test_states_that_cannot_be_are_refused():
    """Entries alone, as a cache of prefixes keeps them, are no state; nor are parts of several moments."""
    inputs = draw("CSA")
    _, cache = run("CSA", inputs, empty("CSA"), [13, 32])
    _, later = run("CSA", chunk(inputs, 0, 3), cache, [3, 3])
    whole, early = parts(cache), np.array([12, 32], np.int32)
    fresh = CompressState.zeros(2, 4, 24, overlap=True)
    halved = CompressState(cache.tail.u[:, :4], cache.tail.z[:, :4], cache.tail.length)
    bad = {
        "a cache needs window and tail of length=": dict(window=None, tail=None),
        r"a cache needs window of length=\[13, 32\]: it cannot be had from entries": dict(window=None),
        "a cache needs index_tail": dict(index_tail=None),
        "a cache needs index_keys": dict(index_keys=None),
        r"tail.length=\[16, 35\] must be length=\[13, 32\]": dict(tail=later.tail),
        "index_tail.length=": dict(index_tail=later.index_tail),
        "tail holds no token at position 8 of sequence 0, whose length is 13": dict(
            tail=dataclasses.replace(fresh, length=cache.lengths)
        ),
        "tail holds a token at position 12 of sequence 0, whose length is 12": dict(
            length=early, tail=dataclasses.replace(cache.tail, length=early)
        ),
        r"tail has shape \(2, 4, 24\); expected B=2 and 8 rows": dict(tail=halved),
        "tail has C=16 channels; entries of D=12 have 24": dict(tail=cache.index_tail),
        r"window has shape \(2, 6, 11\); expected \[B, W, D\] with B=2 and D=12": dict(window=cache.window[..., 1:]),
        "index_keys have shape": dict(index_keys=cache.index_keys[:, 1:]),
        r"length=\[13, 99\] must be within 0 and capacity=48": dict(length=np.array([13, 99])),
        r"length has shape \(3,\)": dict(length=np.array([1, 2, 3])),
        "capacity=80 needs 20 entries; there is room for E=12": dict(capacity=80),
    }
    for message, change in bad.items():
        with pytest.raises(ValueError, match=message):
            CompressedCache.restore(cache.entries, **whole | change, ratio=4, overlap=True)


F = functools.partial(np.zeros, dtype=np.float32)
OWN = EntrySource(F((2, 9, 24)), F((2, 9, 24)), F((4, 24)), F(12))
CALL = dict(
    query=F((2, 9, 3, 12)), kv=F((2, 9, 12)), source=OWN,
    index=EntryIndex(F((2, 9, 2, 8)), F((2, 9, 2)), EntrySource(F((2, 9, 16)), F((2, 9, 16)), F((4, 16)))),
    scale=1.0, top_k=2,
)  # fmt: skip
CACHE = CompressedCache.zeros(2, 40, 12, ratio=4, overlap=True, index_dim=8)
PACKED = dict(
    query=F((9, 3, 12)), kv=F((9, 12)), source=EntrySource(F((9, 24)), F((9, 24)), F((4, 24))), top_k=None,
    index=np.zeros((9, 2), np.int32), cu_seqlens=[0, 9],
)  # fmt: skip


def indexed(**change):
    return dict(index=dataclasses.replace(CALL["index"], **change))


VALUE_ERRORS = {
    r"query has shape \(9, 3, 12\); expected \[B, T, N, D\]": dict(query=F((9, 3, 12))),
    r"kv has shape \(2, 9, 13\); expected \(2, 9, 12\)": dict(kv=F((2, 9, 13))),
    r"kv has shape \(2, 8, 12\)": dict(kv=F((2, 8, 12))),
    r"source.u has shape \(2, 8, 24\); expected \(2, 9, 'C'\)": dict(
        source=EntrySource(F((2, 8, 24)), F((2, 8, 24)), F((4, 24)))
    ),
    "source.u has C=12 channels; overlapping entries of D=12 need 24": dict(
        source=EntrySource(F((2, 9, 12)), F((2, 9, 12)), F((4, 12)))
    ),
    "source.ape has C=23 channels": dict(source=dataclasses.replace(OWN, ape=F((4, 23)))),
    "source.norm has shape": dict(source=dataclasses.replace(OWN, norm=F(24))),
    r"index.query has shape \(2, 8, 2, 8\)": indexed(query=F((2, 8, 2, 8))),
    r"index.weights have shape \(2, 9, 3\)": indexed(weights=F((2, 9, 3))),
    "index.source.u has C=18 channels; overlapping entries of D=8 need 16": indexed(
        source=EntrySource(F((2, 9, 18)), F((2, 9, 18)), F((4, 18)))
    ),
    "index.source.ape has m=8 rows; source.ape has m=4": indexed(
        source=EntrySource(F((2, 9, 16)), F((2, 9, 16)), F((8, 16)))
    ),
    "top_k=None must be an int": dict(top_k=None),
    "top_k=2 is for an EntryIndex": dict(index=np.zeros((2, 9, 3), np.int32)),
    r"index has shape \(2, 8, 3\)": dict(index=np.zeros((2, 8, 3), np.int32), top_k=None),
    "window=0 must be an int >= 1": dict(window=0),
    "seq_lengths=": dict(seq_lengths=[10, 1]),
    r"sinks have shape \(2,\)": dict(sinks=F(2)),
    "rotary dim=16 must be <= 12": dict(rotary=Rotary(16)),
    "cu_seqlens and a cache": PACKED | dict(cache=CACHE),
    "seq_lengths and cu_seqlens": PACKED | dict(seq_lengths=[9]),
    r"query has shape \(2, 9, 3, 12\); expected \[T, N, D\]": dict(cu_seqlens=[0, 9]),
    r"cache.window has shape \(2, 128, 12\); expected \(B, window, D\) = \(2, 6, 12\)": dict(cache=CACHE, window=6),
    r"cache.window has shape \(3, 128, 12\)": dict(
        cache=CompressedCache.zeros(3, 40, 12, ratio=4, overlap=True, index_dim=8)
    ),
    "cache has no index_keys": dict(cache=CompressedCache.zeros(2, 40, 12, ratio=4, overlap=True)),
    r"cache.tail.u has shape \(2, 4, 12\)": dict(
        cache=CompressedCache.zeros(2, 40, 12, ratio=4, overlap=False, index_dim=8)
    ),
    r"cache.tail.u has shape \(2, 6, 24\)": dict(
        cache=CompressedCache.zeros(2, 39, 12, ratio=3, overlap=True, index_dim=8)
    ),
    "cache has index_keys, which would fall behind without an EntryIndex": dict(
        cache=CACHE, index=np.zeros((2, 9, 3), np.int32), top_k=None
    ),
    "index_format='fp8_row' must equal the cache's None": dict(cache=CACHE, index_format="fp8_row"),
    "fmt='fp5' is unknown": dict(index_format="fp5"),
}  # fmt: skip


@pytest.mark.parametrize("message", VALUE_ERRORS)
def test_refused(message):
    call = CALL | VALUE_ERRORS[message]
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(lambda: csa_attention(**call))


TYPE_ERRORS = {
    "kv dtype float16 must equal query's float32": dict(kv=F((2, 9, 12)).astype(np.float16)),
    "source must be an EntrySource, not tuple": dict(source=(1, 2)),
    "source.u must be floating-point": dict(source=dataclasses.replace(OWN, u=np.zeros((2, 9, 24), np.int32))),
    "index must be an EntryIndex or integers, not float32": dict(index=F((2, 9, 3)), top_k=None),
    "index.query dtype float16": indexed(query=F((2, 9, 2, 8)).astype(np.float16)),
    "cache must be a CompressedCache": dict(cache=(1,)),
    "cache.window dtype bfloat16 must equal query's float32": dict(
        cache=CompressedCache.zeros(2, 40, 12, ratio=4, overlap=True, index_dim=8, dtype="bfloat16")
    ),
    "scale='1' must be": dict(scale="1"),
    "return_residual=1": dict(return_residual=1),
}


@pytest.mark.parametrize("message", TYPE_ERRORS)
def test_types_refused(message):
    call = CALL | TYPE_ERRORS[message]
    with pytest.raises(TypeError, match=message):
        jax.eval_shape(lambda: csa_attention(**call))


def test_caches_refused():
    make = functools.partial(CompressedCache.zeros, 2, 40, 512, ratio=4, overlap=True)
    for message, change in {
        "kv_format='v32_656' must be None or 'v4_584'": dict(kv_format="v32_656"),
        "ratio=0 must be an int >= 1": dict(ratio=0),
        "window=0 must be an int >= 1": dict(window=0),
        "less rotary_dim=60": dict(kv_format="v4_584", rotary_dim=60),
        "fmt='fp5' is unknown": dict(index_dim=128, index_format="fp5"),
    }.items():
        with pytest.raises(ValueError, match=message):
            make(**change)


@pytest.mark.parametrize("batch, length", [(0, 9), (2, 0)])
def test_nothing_to_do(batch, length):
    """No sequences, and no tokens: shapes come out, and the cache as it was."""
    arrays = {name: x for name, x in CALL.items() if name not in ("scale", "top_k")}
    call = jax.tree.map(lambda x: x[:batch, :length] if x.ndim > 2 else x, arrays)
    cache = CompressedCache.zeros(batch, 40, 12, ratio=4, overlap=True, index_dim=8)
    run = jax.jit(functools.partial(csa_attention, scale=1.0, top_k=2, return_residual=True))
    (out, lse), after = run(**call, cache=cache)
    assert out.shape == (batch, length, 3, 12) and lse.shape == (batch, length, 3)
    equal(after, cache)


def test_hca_wants_channels_of_its_own():
    with pytest.raises(ValueError, match="source.u has C=24 channels; entries of D=12 need 12"):
        hca_attention(CALL["query"], CALL["kv"], dataclasses.replace(OWN, norm=None), scale=1.0)

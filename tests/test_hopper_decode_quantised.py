"""The Hopper kernel over int8 and fp8 caches: emulated on small problems, compiled for an H200, and on a GPU."""

import dataclasses

import aot
import caches
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from caches import draw, hold, problem
from test_hopper_decode import EDGES, attend, attend_pages, emulated, equal
from test_hopper_ptx import BF16, HOW, copy_in, f32, normal, run, store

import jattn
from jattn import decode, paged
from jattn.pallas import decode as mosaic
from jattn.pallas._compat import plgpu
from jattn.pallas.hopper import decode_quantised, mma, ptx

INT8, FP8 = "int8", "float8_e4m3fn"
QUERIES = [8, 16]


def quantised(x, dtype, per):
    return jattn.quantize(jnp.asarray(x, jnp.float32), dtype, per=per)


def poisoned(x, lengths):
    """With NaN, or the largest integer, at and past each length, in scales too."""
    scale = caches.poisoned(x.scale, lengths) if x.per == "token" else x.scale
    return jattn.Quantized(caches.poisoned(x.values, lengths), scale)


# Emulated


def test_pages_in_any_order(capfd):
    """Scales of a token and of a head, two formats, and NaN or the largest integer wherever no token is."""
    lengths = np.array([130, 1, 0, 64], np.int32)
    q, k, v = draw(4, 2, 140, 4, 2, 48, 32, dtype="bfloat16")
    k, v = quantised(k, INT8, "token"), quantised(v, FP8, "head")
    p = problem(q, *map(caches.dequantized, (k, v)), lengths)
    hold(emulated(paged.prepare(q, caches.paged(k, v, lengths, 16)), capfd), p)


def test_contiguous_with_window_cap_sinks_and_missing_queries(capfd):
    """Two tiles of 5 tokens of 3 heads, the second with one token or none."""
    lengths, counts = np.array([130, 17], np.int32), np.array([6, 1], np.int32)
    sinks = np.float32([1, -np.inf, 40])
    q, k, v = draw(2, 6, 140, 3, 1, 16, 80, dtype="bfloat16")
    k, v = quantised(k, FP8, "tensor"), quantised(v, INT8, "token")
    rule = lambda b, n, row, t, s: s >= t - 20  # noqa: E731
    more = dict(query_lengths=counts, scale=0.4, soft_cap=5.0, sinks=sinks)
    p = problem(q, *map(caches.dequantized, (k, v)), lengths, rule, **more)
    call = decode.prepare(
        caches.poisoned(q, counts), poisoned(k, lengths), poisoned(v, lengths), lengths, query_seq_lengths=counts,
        local_window_size=(20, None), logits_soft_cap=5.0, scale=jnp.float32(0.4), sinks=sinks,
    )  # fmt: skip
    hold(emulated(call, capfd), p)


# The wrappers


def raw_memory(dtype):
    return plgpu.SMEM((1, 1, 64, 128), dtype, transforms=ptx.TRANSFORMS)


def bytes_of(dtype, width):
    """All 256 of them, several times, in any order."""
    x = np.random.default_rng(0).permutation(64 * width).astype(np.uint8).reshape(64, width)
    return jnp.asarray(x.view(jnp.dtype(dtype)))


def copy_bytes_in(array, smem, barrier):
    start = jnp.minimum(jax.lax.axis_index("block"), 0)  # traced: Pallas refuses a constant slice past the edge
    plgpu.copy_gmem_to_smem(array.at[:, plgpu_ds(start)], smem.at[0, 0], barrier)


def plgpu_ds(start):
    from jax.experimental import pallas as pl

    return pl.ds(start, 128)


@pytest.mark.parametrize("interpret", HOW)
@pytest.mark.parametrize("dtype", [INT8, FP8])
@pytest.mark.parametrize("width, queries", [(16, 8), (48, 16), (128, 16), (128, 8)])
def test_products(interpret, dtype, width, queries):
    """Every byte in its place: scores of unit vectors, then of any queries; and weighted sums of values."""
    k, q = bytes_of(dtype, width), normal(64, width)
    w, alpha = normal(64, queries, dtype=jnp.float32, seed=1), 0.5

    def body(k, q, w, s_out, o_out, *, raw, q_smem, states, parts, barrier):
        copy_bytes_in(k, raw, barrier)
        copy_in(q, q_smem, barrier, queries)
        plgpu.barrier_wait(barrier)
        store(s_out, mma.product(raw.at[0], width, mma.load_queries(q_smem.at[0], width), queries))
        weights = w[...] if interpret else plgpu.load(w, layout=ptx.WGMMA, optimized=False)
        accumulator, _ = mma.init(width, queries)
        # Under sums of weights of 1 in the first warp and none in the others, which see no key.
        one = jnp.full((64, queries), 0.0, jnp.float32) if interpret else ptx.zeros(queries)
        _, factor, state = mma.online_softmax(one, mma.init(width, queries)[1])
        accumulator = mma.accumulate(accumulator, factor, weights, raw.at[0], width)
        mma.st_states(state, states)
        plgpu.commit_smem()
        zero = jax.lax.axis_index("block")
        for tile in range(queries // 8):
            mma.st_part(accumulator, tile, width, states, parts, alpha)
            plgpu.commit_smem()
            mma.st_global_parts(parts, o_out, (zero, zero), zero, tile=tile, rows=queries - 3)
            plgpu.commit_smem()

    del alpha
    s, o = run(
        functools_body(body), (f32(64, queries), f32(1, queries - 2, 1, 1, width)), (k, q, w), interpret,
        raw=raw_memory(k.dtype), q_smem=plgpu.SMEM((1, ptx.slabs(width), queries, 64), BF16, transforms=ptx.TRANSFORMS),
        states=plgpu.SMEM((2, 4, queries), jnp.float32), parts=plgpu.SMEM((4, 8, width + mma.PADDING), jnp.float32),
        barrier=plgpu.Barrier(num_arrivals=1 + ptx.slabs(width)),
    )  # fmt: skip
    del s, o


def functools_body(body):
    return body

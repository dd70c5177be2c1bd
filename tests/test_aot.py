"""Without a GPU, every shipped config compiles to sm_90a with nothing spilled and no product serialised."""

import dataclasses
import functools

import aot
import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from aot import compile_for_h200, parse

from jattn import SequenceLayout, attention, masks, mods, ragged, ragged_attention, ring_attention
from jattn.attention import prepare
from jattn.pallas import attention as mosaic

DIMS = [(64, 64), (96, 96), (128, 128), (192, 192), (192, 128), (256, 256), (40, 40), (64, 128)]
FEATURES = {
    "window": dict(is_causal=True, local_window_size=(100, 0)),
    "lengths": dict(is_causal=True, query_offset="end", key_value_seq_lengths=jnp.array([5, 7], jnp.int32)),
    "bias": dict(is_causal=True, bias=jnp.zeros((300, 333), jnp.bfloat16)),
    "soft cap": dict(is_causal=True, logits_soft_cap=20.0),
    "modifier": dict(is_causal=True, score_mod=mods.alibi(2)),
    "segments": dict(segment_ids=(jnp.zeros(300, jnp.int32), jnp.zeros(333, jnp.int32))),
    "dropout": dict(dropout_rate=0.1, dropout_key=jax.random.key(0)),
    "sinks": dict(sinks=jnp.zeros(2)),
    "traced scale": dict(scale=jnp.float32(0.3)),
    "prefix": dict(mask=masks.prefix(jnp.array([5, 7], jnp.int32))),
    "block mask": dict(mask=masks.blocks(jnp.ones((3, 3), bool), 128)),
}


def report(H, D, sizes=(300, 333), dtype="bfloat16", **kwargs):
    """ptxas' report of the forward kernel for the config that dispatch chooses."""
    q, k, v = cases.qkv(B=2, T=sizes[0], S=sizes[1], N=2, K=1, H=H, D=D, dtype=dtype)
    return report_call(prepare(q, k, v, **kwargs))


def report_call(call, **how):
    options = dataclasses.replace(call.options, config=mosaic.choose(call.problem, None))
    leaves, structure = jax.tree.flatten((call.arrays, call.context))

    def forward(*leaves):
        return mosaic.forward(*jax.tree.unflatten(structure, leaves), options, **how)

    found = compile_for_h200(forward, *leaves)
    assert found.clean, f"{options.config}: {found}"
    return found


def test_the_report_is_read():
    text = "3 bytes stack frame, 8 bytes spill stores, 4 bytes spill loads\nUsed 168 registers\nwgmma serialized"
    found = parse(text)
    assert (found.registers, found.spill_bytes, found.stack_bytes, found.serialized) == (168, 12, 3, True)
    assert not found.clean
    with pytest.raises(RuntimeError, match="nothing"):
        parse("")


@pytest.mark.aot
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_head_dims(dims, causal):
    report(*dims, is_causal=causal)


@pytest.mark.aot
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("width, length", [(64, 4096), (128, 4096), (256, 4096), (128, 16384)])
def test_long_sequences(width, length, causal):
    """The benchmarked class: masks by bounds alone, at head dim 64 three consumer warpgroups, at 128 blocks of 176."""
    report(width, width, (length, length), dtype="float16", is_causal=causal)


@pytest.mark.aot
@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("width", [64, 128, 256])
def test_features(width, feature):
    report(width, width, **FEATURES[feature])


@pytest.mark.aot
@pytest.mark.parametrize("width", [64, 128, 256])
def test_packed_sequences(width):
    q, k, v = (x[0] for x in cases.qkv(B=1, T=310, S=310, N=2, K=1, H=width, dtype="bfloat16"))
    report_call(ragged.prepare(q, k, v, jnp.array([0, 100, 300], jnp.int32), is_causal=True))


@pytest.mark.aot
@pytest.mark.parametrize("width", [64, 128, 256])
def test_results_before_rounding(width):
    q, k, v = cases.qkv(B=1, T=310, S=310, N=2, K=1, H=width, dtype="bfloat16")
    report_call(prepare(q, k, v, is_causal=True), unrounded=True)


@pytest.mark.aot
def test_plain_jax_compiles_for_a_gpu_with_constant_offsets():
    """XLA's constant folding once failed on the bounds of the nested loops."""
    q, k, v = (x[0] for x in cases.qkv(B=1, T=141, S=141, N=4, K=2, H=16, dtype="bfloat16"))
    cu = np.array([0, 0, 7, 136], np.int32)

    def step(q, k, v):
        attend = functools.partial(ragged_attention, cu_seqlens_q=cu, is_causal=True, implementation="xla")
        out, pull = jax.vjp(attend, q, k, v)
        return out, pull(out)

    compile_for_h200(step, q, k, v, kernels=False)


BACKWARD = {
    "full": {},
    "window": dict(local_window_size=(512, 5)),
    "lengths": dict(
        is_causal=True, query_offset="end", key_value_seq_lengths=jnp.array([5, 7], jnp.int32),
        query_seq_lengths=jnp.array([5, 7], jnp.int32),
    ),
    "segments": dict(is_causal=True, segment_ids=jnp.zeros(2100, jnp.int32)),
    "block mask": dict(mask=masks.blocks(jnp.ones((17, 17), bool), 128)),
    "soft cap": dict(is_causal=True, logits_soft_cap=20.0),
    "bias": dict(is_causal=True, bias=jnp.zeros((2100, 2100), jnp.bfloat16)),
    "alibi": dict(is_causal=True, score_mod=mods.alibi(2)),
    "modifier": dict(score_mod=mods.score_mod(lambda x, b, n, t, s, g: jnp.tanh(x * g), jnp.ones((2, 1, 1)))),
    "dropout": dict(dropout_rate=0.1, dropout_key=jax.random.key(0)),
    "three at once": dict(segment_ids=jnp.zeros(2100, jnp.int32), logits_soft_cap=20.0, score_mod=mods.alibi(2)),
    "deterministic": dict(is_causal=True, deterministic=True),
    "packed": dict(packed=True, is_causal=True),
    "packed, deterministic": dict(packed=True, is_causal=True, deterministic=True),
}  # fmt: skip


# A few bytes, wherever the compiler was sent so far: with dp formed early or late, in slices of 8, 16 or 32 columns.
SPILLS = {
    ("block mask", 64), ("three at once", 128), ("deterministic", 64), ("packed", 256), ("packed, deterministic", 128),
}  # fmt: skip


def backward_report(H, D, keys, *, packed=False, **kwargs):
    q, k, v = cases.qkv(B=1 if packed else 2, T=2100, S=2100, N=2, K=keys, H=H, D=D, dtype="bfloat16")
    if packed:
        call = ragged.prepare(q[0], k[0], v[0], jnp.array([0, 100, 1300, 2000], jnp.int32), **kwargs)
    else:
        call = prepare(q, k, v, **kwargs)
    assert mosaic.why_not_backward(call.problem) is None
    leaves, structure = jax.tree.flatten((call.arrays, call.context))
    out, lse = np.zeros((*q.shape[:3], D), q.dtype), np.zeros(q.shape[:3], np.float32)

    def backward(out, lse, *leaves):
        found = mosaic.backward(*jax.tree.unflatten(structure, leaves), call.options, out, lse, None, out, lse)
        return found.query, found.key, found.value

    return compile_for_h200(backward, out, lse, *leaves)


@pytest.mark.aot
@pytest.mark.parametrize("keys", [1, 2])
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (96, 80), (40, 64), (256, 256), (192, 128), (64, 128)], ids=str)
def test_backward(dims, keys):
    found = backward_report(*dims, keys, is_causal=True)
    assert found.clean, found


BACKWARD_FEATURES = [
    *[(width, keys, name) for width, keys in ((64, 2), (128, 1)) for name in BACKWARD],
    *[(256, 1, name) for name in ("window", "block mask", "dropout", "three at once", "deterministic", "packed")],
]


@pytest.mark.aot
@pytest.mark.parametrize("width, keys, name", BACKWARD_FEATURES)
def test_features_of_the_backward(width, keys, name):
    found = backward_report(width, width, keys, **BACKWARD[name])
    if (name, width) in SPILLS:
        assert found.spill_bytes <= 64 and not found.serialized, found
    else:
        assert found.clean, found


def compiled_for_h200(function, *arguments) -> str:
    """The program for an H200, as text."""
    sharding = aot.sharding()
    arguments = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding) for a in arguments]
    return jax.jit(function).lower(*arguments).compile().as_text()


@pytest.mark.aot
def test_sums_that_nobody_uses_are_not_computed():
    """Gradients of a modifier's arrays come from loops in plain JAX, which are left out where they are not used."""
    q, slope = jnp.zeros((1, 512, 4, 64), jnp.bfloat16), jnp.zeros((4, 1, 1))

    def loss(q, slope):
        mod = mods.score_mod(lambda x, b, n, t, s, g: x + g * (s - t).astype(jnp.float32), slope)
        return attention(q, q, q, is_causal=True, score_mod=mod, implementation="mosaic").astype(jnp.float32).sum()

    unused, used = (compiled_for_h200(jax.grad(loss, which), q, slope) for which in (0, (0, 1)))
    assert "jattn_attention_backward" in unused and " while(" not in unused and " while(" in used


def backward_launches(text):
    """(computation, line) of each launch of the backward kernel in a program."""
    found = []
    for computation in text.split("\n\n"):
        head, _, body = computation.partition("\n")
        launches = [line for line in body.splitlines() if "custom-call(" in line and "attention_backward" in line]
        found += [(head.split()[0], line) for line in launches]
    return found


def mapped(f):
    return lambda *x: jax.lax.map(lambda x: f(*x), x)


@pytest.mark.aot
@pytest.mark.parametrize("transform", [jax.vmap, mapped])
def test_what_is_changed_in_place_is_known_to_be(transform):
    """A fusion of the backward with the slices of a loop would not say which of its results is which operand."""
    q = jnp.zeros((3, 1, 300, 2, 64), jnp.bfloat16)

    def loss(q, k, v):
        return attention(q, k, v, implementation="mosaic").astype(jnp.float32).sum()

    found = backward_launches(compiled_for_h200(transform(jax.grad(loss, (0, 1, 2))), q, q, q))
    assert found
    for computation, line in found:
        assert "output_to_operand_aliasing" in line and "fusion" not in computation


@pytest.mark.aot
def test_a_ring_of_two_runs_the_kernels():
    """Pieces go to the kernels, keys by permutes, and no launch is fused with the slices of the ring's loops."""
    mesh = jax.sharding.Mesh(np.array(aot.devices(2)), ("sp",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, "sp"))
    q = jax.ShapeDtypeStruct((1, 1024, 4, 128), jnp.bfloat16, sharding=sharding)

    def loss(q, k, v):
        out = ring_attention(
            q, k, v, is_causal=True, mesh=mesh, axis="sp", layout=SequenceLayout("zigzag", 2), implementation="mosaic"
        )
        return out.astype(jnp.float32).sum()

    text = jax.jit(jax.grad(loss, (0, 1, 2))).lower(q, q, q).compile().as_text()
    assert "jattn_attention_forward" in text and "all-gather" not in text and "collective-permute-start(" in text
    found = backward_launches(text)
    assert found
    for computation, line in found:
        assert "output_to_operand_aliasing" in line and "fusion" not in computation

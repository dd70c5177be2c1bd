"""Sequence parallelism over real GPUs: kernels, links and streams that virtual devices do not have."""

import functools

import jax
import jax.numpy as jnp
import pytest
import test_sequence

import jattn

pytestmark = [pytest.mark.gpu, pytest.mark.gpus]
DEVICES = jax.device_count()
SHAPE = dict(T=1024, S=1024, G=2, K=2, H=128, D="same", dtype="bfloat16", batch="2", dlse=True)
CASES = {
    "causal": dict(is_causal=True),
    "full": dict(heavy=True),
    "window": dict(is_causal=True, window="100,0"),
    "documents, sinks": dict(is_causal=True, segments="sorted", sinks=True),
    "cap, lengths, head dim 64": dict(is_causal=True, soft_cap="5", key_lengths=True, poison=True, H=64),
    "alibi, dropout": dict(is_causal=True, score_mod="alibi", dropout="0.1", heavy=True),
}
CALLS = [("ring", "contiguous"), ("ring", "zigzag"), ("allgather", "zigzag"), ("ulysses", "contiguous")]


@pytest.mark.parametrize(("strategy", "kind"), CALLS, ids=" ".join)
@pytest.mark.parametrize("name", CASES)
def test_is_attention_of_the_undivided_sequence(name, strategy, kind):
    """Outputs, lse and gradients against the float64 oracle."""
    test_sequence.check(test_sequence._case(**SHAPE | CASES[name]), strategy, kind, DEVICES)


def inputs(layout, T=8192, N=8, K=4, H=128):
    mesh = test_sequence.mesh_of(sp=DEVICES)
    place = jax.NamedSharding(mesh, jax.P(None, "sp"))
    keys = jax.random.split(jax.random.key(0), 4)
    q, k, v, dout = (jax.random.normal(x, (1, T, n, H), jnp.bfloat16) for x, n in zip(keys, (N, K, K, N), strict=True))
    return mesh, [jax.device_put(layout.shard(x), place) for x in (q, k, v, dout)], (q, k, v, dout)


def step(attention, wrap=lambda f: f):
    @jax.jit
    def step(q, k, v, dout):
        out, pull = jax.vjp(wrap(attention), q, k, v)
        return out, *pull(dout)

    return step


@pytest.mark.parametrize(("strategy", "kind"), CALLS, ids=" ".join)
def test_kernels_run_between_the_messages(strategy, kind):
    """The compiled program holds the kernels, and `checkpoint` changes no bit of it."""
    layout = jattn.SequenceLayout(kind, DEVICES)
    mesh, laid_out, natural = inputs(layout)
    attention = functools.partial(
        getattr(jattn, f"{strategy}_attention"), axis="sp", mesh=mesh, layout=layout, is_causal=True, deterministic=True
    )
    program = step(attention).lower(*laid_out).compile()
    assert "mosaic_gpu" in program.as_text()
    got = program(*laid_out)
    for x, y in zip(got, step(attention, jax.checkpoint)(*laid_out), strict=True):
        assert bool((x == y).all())
    want = step(functools.partial(jattn.attention, is_causal=True))(*natural)
    for x, y in zip(got, want, strict=True):
        x, y = layout.unshard(x).astype(jnp.float32), y.astype(jnp.float32)
        assert float(jnp.abs(x - y).max()) <= 2 * float(jnp.finfo(jnp.bfloat16).eps) * float(jnp.abs(y).max())

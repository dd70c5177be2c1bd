"""The Hopper backward kernel, by the public op's gradients: emulated on small problems, and on the GPU."""

import cases
import jax
import jax.numpy as jnp
import mosaic
import numpy as np
import pytest
from test_attention import check_case

import jattn
from jattn.attention import prepare
from jattn.pallas import attention

EMULATED = {
    "head dim 128, causal": dict(T=129, S=64, H=128, is_causal=True, dlse=True),
    "two tiles of keys, a group of three heads": dict(T=65, S=129, H=64, G=3, is_causal=True, offset="end"),
    "window, offset, narrow heads": dict(T=129, S=255, H=40, D="less", window="40,-2", offset="-3"),
    "lengths, poison, sinks": dict(
        T=64, S=129, H=80, is_causal=True, key_lengths=True, query_lengths=True, offset="array", sinks=True, poison=True
    ),
    "segments, two tiles of keys": dict(T=130, S=130, H=64, segments="sorted", is_causal=True, dlse=True),
    "prefix, a group of two heads": dict(T=65, S=65, H=128, mask="prefix", batch="2"),
    "modifier with arrays": dict(T=65, S=63, H=128, score_mod="aux", is_causal=True, offset="5"),
    "bias that hides": dict(T=64, S=129, H=64, bias="BNTS", minus_inf=True, soft_cap="5"),
    "head dim 256, causal": dict(T=65, S=65, H=256, G=1, is_causal=True, dlse=True),
    "head dims of three slabs and one, two tiles of keys": dict(
        T=33, S=66, H=136, D="less", is_causal=True, offset="end", key_lengths=True, poison=True
    ),
    "dropout, odd offset": dict(T=64, S=65, H=128, dropout="0.1", offset="5", query_lengths=True, poison=True),
}
TAKES_LONG_TO_EMULATE = {
    "one tile of keys": dict(T=65, S=127, H=64, dlse=True),
    "float16, heavy tails": dict(T=63, S=65, H=64, dtype="float16", heavy=True, window="16,0", dlse=True),
    "queries that see nothing": dict(T=64, S=2, H=128, window="7", dlse=True),
    "blocks": dict(T=129, S=255, H=128, K=2, G=1, mask="blocks"),
    "predicate of a head in a group": dict(T=65, S=65, H=64, mask="predicate", window="40,-2"),
    "alibi, soft cap": dict(T=65, S=63, H=64, score_mod="alibi", soft_cap="5", offset="5"),
    "relative bias, traced scale": dict(T=63, S=65, H=64, score_mod="relative", scale="traced"),
    "dropout": dict(T=65, S=65, H=64, dropout="0.5", is_causal=True),
    "head dim 256, groups, everything": dict(
        T=129, S=129, H=256, G=2, is_causal=True, offset="5", dropout="0.1", soft_cap="5", score_mod="aux", dlse=True
    ),
    "mixed head dims, segments": dict(T=130, S=130, H=80, D="more", segments="sorted", is_causal=True, sinks=True),
    "wide window": dict(T=255, S=255, H=256, D="less", G=1, window="40,-2", offset="5", heavy=True),
}


def case_of(**fields):
    return cases.Case(**(dict(T=64, S=64, G=2, K=1, dtype="bfloat16", batch="1") | fields))


def runs(case):
    """Whether the kernels run the whole case."""
    call = prepare(**_arguments(case))
    return attention.why_not(call.problem) is None and attention.why_not_backward(call.problem) is None


def _arguments(case):
    arguments = cases.arguments(case, cases.make_inputs(case))
    return {name: x for name, x in arguments.items() if name != "return_residual"}


@pytest.mark.parametrize("name", EMULATED)
def test_emulated(name, monkeypatch, capfd):
    case = case_of(**EMULATED[name])
    assert runs(case)
    for _ in mosaic.emulated(monkeypatch):
        check_case(case, jax.jit)  # the emulation runs longer than it compiles
    assert "RACE" not in capfd.readouterr().out


ON_THE_GPU = [
    *EMULATED.values(),
    *TAKES_LONG_TO_EMULATE.values(),
    dict(T=1, S=2, H=64),  # with one key dq is 0 by cancellation, and exact on the CPU only
    dict(T=1000, S=1000, H=128, G=4, is_causal=True, dlse=True),
    dict(T=1000, S=255, H=64, G=3, K=2, batch="2", window="40,-2", offset="5", heavy=True),
    dict(T=255, S=1000, H=96, batch="1x2", key_lengths=True, query_lengths=True, is_causal=True, poison=True),
    dict(T=1000, S=1000, H=64, dtype="float16", batch="2", window="None,3", sinks=True, dlse=True, heavy=True),
]


@pytest.mark.gpu
@pytest.mark.parametrize("fields", ON_THE_GPU, ids=str)
def test_on_the_gpu(fields):
    case = case_of(**fields)
    assert jattn.explain(**_arguments(case)).backward == "mosaic"
    check_case(case)


RUNS = [(None, "bfloat16"), ("xla", "bfloat16"), ("xla", "float32")]


@pytest.mark.gpu
@pytest.mark.parametrize("width, group", [(64, 1), (128, 1), (128, 4), (256, 2)])
@pytest.mark.parametrize("causal", [True, False])
def test_long_sequences_agree_with_plain_jax(width, group, causal):
    q, k, v = (jnp.asarray(x) for x in cases.qkv(B=2, T=1500, S=1500, N=4, K=4 // group, H=width, dtype="bfloat16"))
    dout = jax.random.normal(jax.random.key(1), q.shape, jnp.bfloat16)

    def gradients(implementation, *dtypes):
        operands = [x.astype(dtype) for x, dtype in zip((q, k, v, dout), dtypes, strict=True)]

        def attend(q, k, v):
            return jattn.attention(q, k, v, is_causal=causal, implementation=implementation)

        return jax.jit(lambda q, k, v, dout: jax.vjp(attend, q, k, v)[1](dout))(*operands)

    results = (gradients(name, *[dtype] * 4) for name, dtype in RUNS)
    for got, plain, want in zip(*results, strict=True):
        size = np.abs(want).max()
        error, yardstick = (float(np.abs(x.astype(jnp.float32) - want).max() / size) for x in (got, plain))
        assert error <= 2 * yardstick + 2 * float(jnp.finfo(jnp.bfloat16).eps)

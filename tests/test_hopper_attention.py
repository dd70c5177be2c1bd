"""The Hopper forward kernel: in interpret mode on small problems, and on the GPU the whole 16-bit case table."""

import dataclasses

import baseline
import cases
import compare
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

from jattn.attention import prepare
from jattn.pallas import attention as mosaic
from jattn.pallas import configs

SMALL = configs.TileConfig(warpgroups=2, block_k=32, cross_tile=False, own_out=False)
OVERLAPPED = configs.TileConfig(warpgroups=2, block_k=32, lazy_rescale=True)
THREE = configs.TileConfig(warpgroups=3, block_k=48)


def forward_only(case, config=None, **how):
    """Holds the kernel's output and lse on one case of the table against the oracle."""
    x = cases.make_inputs(case)
    kwargs = cases.arguments(case, x)
    kwargs.pop("return_residual")
    call = prepare(**kwargs)
    options = dataclasses.replace(call.options, config=config or mosaic.choose(call.problem, None))
    run = jax.jit(lambda arrays, context: mosaic.forward(arrays, context, options, **how))
    out, lse, _ = run(call.arrays, call.context)
    p = cases.problem(case, x)
    truth, truth_lse = oracle.forward(p)
    dtype = p.query.dtype
    assert out.dtype == dtype and lse.dtype == jnp.float32
    compare.check("out", np.asarray(out), truth, list(_baselines(case, x, p)), dtype)
    compare.check_lse(np.asarray(lse), truth_lse, dtype)


def _baselines(case, x, p):
    """The dense baseline with the channels of q·k and of v in three orders."""
    mod, aux = cases.baseline_score_mod(case, x, x["aux"])
    rng = np.random.default_rng(6)
    for shuffled in (False, True, True):
        h, d = (rng.permutation(n) if shuffled else np.arange(n) for n in (p.query.shape[-1], p.value.shape[-1]))
        out, _ = baseline.attention(
            p.query[..., h], p.key[..., h], p.value[..., d], p.bias, p.mask, scale=p.scale, offset=p.offset,
            query_lengths=p.query_lengths, soft_cap=p.soft_cap, score_mod=mod, aux=aux or (), sinks=p.sinks,
            keep=p.keep, keep_probability=p.keep_probability,
        )  # fmt: skip
        yield np.asarray(out)[..., np.argsort(d)]


INTERPRETED = {
    "unequal lengths, two tiles a block": (dict(T=129, S=63, H=16), SMALL),
    "causal, three warpgroups": (dict(T=200, S=200, H=64, is_causal=True), THREE),
    "overlapped tiles, window, offset": (dict(T=255, S=129, H=40, window="16,0", offset="5"), OVERLAPPED),
    "one query, one key": (dict(T=1, S=1, H=64), OVERLAPPED),
    "lengths, offset end, poison": (
        dict(T=65, S=127, H=64, is_causal=True, key_lengths=True, query_lengths=True, offset="end", poison=True),
        SMALL,
    ),
    "bias with −inf, soft cap, traced scale, sinks": (
        dict(T=63, S=65, H=16, bias="B1TS", minus_inf=True, soft_cap="5", scale="traced", sinks=True, offset="-3"),
        OVERLAPPED,
    ),
    "modifier with arrays, dropout": (dict(T=63, S=65, H=16, score_mod="aux", dropout="0.5", offset="5"), SMALL),
    "segments, relative bias, heavy tails": (
        dict(T=65, S=64, H=16, segments="unsorted", score_mod="relative", heavy=True),
        SMALL,
    ),
    "or of rules": (dict(T=64, S=65, H=16, mask="or", is_causal=True), SMALL),
    "predicate": (dict(T=17, S=65, H=16, mask="predicate"), SMALL),
    "block mask": (dict(T=63, S=65, H=16, mask="blocks"), SMALL),
}


@pytest.mark.parametrize("name", INTERPRETED)
def test_interpreted(name, capfd):
    """Two thread blocks walk the tiles of all heads, and no access races another."""
    fields, config = INTERPRETED[name]
    case = cases.Case(**(dict(T=64, S=64, G=2, K=1, dtype="bfloat16", batch="1") | fields))
    forward_only(case, config, interpret=True, multiprocessors=2)
    assert "RACE" not in capfd.readouterr().out


def problem_of(**changes):
    q, k, v = cases.qkv(**(dict(dtype="bfloat16", H=64) | changes))
    return prepare(q, k, v).problem


@pytest.mark.parametrize(
    "changes, words", [(dict(dtype="float32"), "float32"), (dict(H=20), "H=20"), (dict(H=264), "H=264")]
)
def test_refusals_name_their_reason(changes, words):
    assert words in mosaic.why_not(problem_of(**changes))


def test_a_machine_without_a_gpu_says_so():
    assert mosaic.why_not(problem_of()) is None and "GPU" in mosaic.why_not_here()


def test_a_config_is_checked():
    with pytest.raises(TypeError, match="TileConfig"):
        mosaic.choose(problem_of(), "fast")
    with pytest.raises(ValueError, match="shared memory"):
        mosaic.choose(problem_of(H=256), configs.TileConfig(block_k=176))
    assert mosaic.choose(problem_of(), SMALL) is SMALL


TABLE = [case for case in cases.CASES if case.dtype in ("bfloat16", "float16")]


@pytest.mark.gpu
@pytest.mark.parametrize("case", TABLE, ids=cases.case_id)
def test_table(case):
    forward_only(case)


@pytest.mark.gpu
@pytest.mark.parametrize("width", [64, 128, 256])
def test_repeats_are_bit_equal(width):
    q, k, v = cases.qkv(B=2, T=1000, S=1000, N=4, K=2, H=width, dtype="bfloat16")
    call = prepare(q, k, v, is_causal=True)
    options = dataclasses.replace(call.options, config=mosaic.choose(call.problem, None))
    run = jax.jit(lambda arrays, context: mosaic.forward(arrays, context, options)[:2])
    first = run(call.arrays, call.context)
    for _ in range(200):
        again = run(call.arrays, call.context)
        assert all(bool(jnp.array_equal(a, b)) for a, b in zip(first, again, strict=True))

"""The Hopper kernels of linear attention where sequences end: packed ones and segments."""

import dataclasses

import aot
import baseline_linear
import compare
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import oracle_linear
import pytest
import test_hopper_linear_channels as by_channel
import test_hopper_linear_chunk as by_head
from linear_cases import BY_CHANNEL, call, cotangents, hold, problem, quickly

from jattn import _dispatch
from jattn.pallas import linear_chunk as mosaic
from jattn.pallas import linear_sequences
from jattn.reference import linear as reference

GATED, PLAIN, SIMPLE, UNGATED, KDA, GLA = (
    "gated_delta_rule", "delta_rule", "simple_gla", "linear_attention", "kda", "gla",
)  # fmt: skip
TOKENS = "query", "key", "value", "g", "beta"
STATES = "initial_state", "state"
T, CU = 150, np.array([3, 3, 73, 137, 140])  # empty, more than a chunk, a chunk, three tokens; 13 belong to nobody
ROWS = [slice(a, b) for a, b in zip(CU, CU[1:], strict=False)]
IDS = np.array([7] * 3 + [2] + [7] * 62 + [0] * 34)  # 7 comes back; one has one token, one ends within a chunk


def make(op, T=T, **options):
    options = dict(B=1, K=1, N=1, H=64, D=64, dtype=ml_dtypes.bfloat16) | options
    return problem(op, T=T, qk_l2norm=op in (KDA, GATED, PLAIN), **options)


def packed(op, **options):
    """Of `CU`, with NaN in tokens of nobody, and an initial state for each sequence."""
    p = make(op, **options)
    for name in TOKENS:
        if (x := getattr(p, name)) is not None:
            x[:, : CU[0]] = x[:, CU[-1] :] = np.nan
    states = np.random.default_rng(8).standard_normal((len(ROWS), *p.initial_state.shape[1:]))
    return dataclasses.replace(p, initial_state=states.astype(np.float32))


def described(op, p, **options):
    return (by_channel.described(p, **options) if op in BY_CHANNEL else by_head.described(op, p, **options))


def described_packed(op, p, **options):
    own = {name: x[0] if name in TOKENS else x for name, x in p.arrays().items()}
    return described(op, dataclasses.replace(p, **own), cu_seqlens=CU, **options)


def alone(p, m):
    return dataclasses.replace(p.tokens(ROWS[m].start, ROWS[m].stop), initial_state=p.initial_state[m : m + 1])


def packed_cotangents(p):
    dout, dfinal = cotangents(p)
    shape = len(ROWS), *dfinal.shape[1:]
    return dout, np.random.default_rng(6).standard_normal(shape).astype(np.float32)


def truth_of(p, dout, dfinal):
    """`(truth, yardsticks)` of out, states and gradients: those of each sequence alone, put together."""
    each = []
    for m, rows in enumerate(ROWS):
        if rows.start == rows.stop:
            continue
        one, own = alone(p, m), (dout[:, rows], dfinal[m : m + 1])
        out, state = oracle_linear.last(one)
        true = oracle_linear.backward(one, *own) | {"out": out, "state": state}
        each.append((m, [true, *baseline_linear.gradients(one, *own)]))
    truth, *yards = (_joined(p, dfinal, [(m, found[i]) for m, found in each]) for i in range(3))
    return truth, yards


def _joined(p, dfinal, parts):
    found = {"initial_state": dfinal.astype(np.float64), "state": p.initial_state.astype(np.float64)}
    for m, part in parts:
        for name, x in part.items():
            if name == "terms":
                found[name] = {key: found.get(name, {}).get(key, 0) + size for key, size in x.items()}
            elif name in STATES:
                found[name][m] = x[0]
            elif name in (*TOKENS, "out"):
                found.setdefault(name, np.zeros((1, T, *np.shape(x)[2:])))[:, ROWS[m]] = x
            else:
                found[name] = found.get(name, 0) + x
    return found


def check(p, out, state, got, dout, dfinal):
    """Of a packed call, by the error rule; tokens of nobody have zeros."""
    found = {name: np.asarray(x) for name, x in got.items()} | {"out": np.asarray(out), "state": np.asarray(state)}
    for name in (*TOKENS, "out"):
        if (x := found.get(name)) is not None:
            found[name] = x = x.reshape(getattr(p, "value" if name == "out" else name).shape)
            assert not np.any(x[:, : CU[0]]) and not np.any(x[:, CU[-1] :]), name
    hold("packed", found, *truth_of(p, dout, dfinal), p.query.dtype)
    for x, want in ((state, p.initial_state), (got["initial_state"], dfinal)):
        np.testing.assert_array_equal(np.asarray(x)[0], want[0])


GATES = dict(gate="softplus", beta_activation="sigmoid2")
PACKED = {"by head": (GATED, GATES), "by channel": (KDA, GATES), "without the delta rule": (SIMPLE, {})}
GPU_PACKED = PACKED | {
    "no decay": (PLAIN, {}),
    "by channel, without the delta rule": (GLA, {}),
    "by channel, clipped": (KDA, dict(gate="clipped")),
    "by channel, wide, groups": (KDA, dict(H=128, D=256, N=4, K=2)),
    "by head, wide, groups": (GATED, dict(H=128, D=128, N=4, K=2)),
}
SEGMENTS = {"by head": (GATED, GATES), "by channel": (KDA, GATES), "no decay": (PLAIN, {})}
GPU_SEGMENTS = SEGMENTS | {
    "neither": (UNGATED, {}),
    "by head, without the delta rule": (SIMPLE, {}),
    "by channel, clipped": (KDA, dict(gate="clipped")),
    "by channel, wide": (KDA, dict(H=128, D=128)),
}


def with_segments(op, **options):
    """Two rows, one of them a single segment."""
    ids = np.stack([IDS, np.zeros_like(IDS)])
    resets = np.concatenate([np.zeros((2, 1), bool), ids[:, 1:] != ids[:, :-1]], axis=1)
    return dataclasses.replace(make(op, T=len(IDS), B=2, **options), resets=resets)


# Emulated


def emulated(call, capfd, *cotangents):
    """`(out, state)`, gradients by name."""
    how = dict(interpret=True)
    forward = quickly(lambda x, context: mosaic.forward(x, context, call.options, **how))
    backward = quickly(lambda x, context, rest, *c: mosaic.backward(x, context, call.options, rest, (*c, None), **how))
    (out, state, _), rest = jax.block_until_ready(forward(call.arrays, call.context))
    got = jax.block_until_ready(backward(call.arrays, call.context, rest, *map(jnp.asarray, cotangents)))
    assert "RACE" not in capfd.readouterr().out
    return (out, state), {name: x for name, x in vars(got).items() if x is not None}


def forward(call, capfd):
    run = quickly(lambda x, context: mosaic.forward(x, context, call.options, rest=False, interpret=True)[0])
    found = jax.block_until_ready(run(call.arrays, call.context))
    assert "RACE" not in capfd.readouterr().out
    return found


@pytest.mark.parametrize("name", PACKED)
def test_packed_sequences_are_each_alone(name, capfd):
    op, options = PACKED[name]
    p = packed(op, **options)
    call = described_packed(op, p)
    assert mosaic.why_not(call.problem) is None
    dout, dfinal = packed_cotangents(p)
    (out, state), got = emulated(call, capfd, dout, dfinal)
    check(p, out, state, got, dout, dfinal)


@pytest.mark.parametrize("name", SEGMENTS)
def test_segments_start_anew(name, capfd):
    op, options = SEGMENTS[name]
    p = with_segments(op, **options)
    call = described(op, p, segment_ids=np.cumsum(p.resets, axis=1))
    assert mosaic.why_not(call.problem) is None
    dout, dfinal = cotangents(p)
    (out, state), got = emulated(call, capfd, dout, dfinal)
    hold_with_states(p, out, state, got, dout, dfinal)


def hold_with_states(p, out, state, got, dout, dfinal):
    truth, yards = oracle_linear.backward(p, dout, dfinal), list(baseline_linear.gradients(p, dout, dfinal))
    want, last = oracle_linear.last(p)
    found = {name: np.asarray(x) for name, x in got.items()} | {"out": np.asarray(out), "state": np.asarray(state)}
    hold("with states", found, truth | {"out": want, "state": last}, yards, p.query.dtype)


def test_bits_are_those_alone(capfd):
    """Of a packed call with one sequence, gradients too."""
    p = packed(KDA, **GATES)
    dout, dfinal = packed_cotangents(p)
    call, m = described_packed(KDA, p), 1
    first, last = (int(CU[m + i]) for i in range(2))
    alone = dataclasses.replace(call.context, cu_seqlens=jnp.array([first] * (m + 1) + [last] * (len(ROWS) - m)))
    (out, states), got = emulated(call, capfd, dout, dfinal)
    (own, state), gradients = emulated(dataclasses.replace(call, context=alone), capfd, dout, dfinal)
    pairs = [(out, own)] + [(got[name], gradients[name]) for name in TOKENS]
    pairs = [(x[:, ROWS[m]], y[:, ROWS[m]]) for x, y in pairs]
    for x, y in (*pairs, (states[m], state[m]), (got["initial_state"][m], gradients["initial_state"][m])):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


def test_any_backward_reads_what_is_kept(capfd):
    """That of "xla", which the gradient of a traced scale takes, and spare chunks of which hold anything."""
    p = packed(KDA, scale=jnp.float32(0.3))
    call, (dout, dfinal) = described_packed(KDA, p), packed_cotangents(p)
    options = dataclasses.replace(call.options, config=reference.SpanConfig(1))

    def run(arrays, context, dout, dfinal):
        (out, state, _), rest = mosaic.forward(arrays, context, call.options, interpret=True)
        return out, state, reference.backward(arrays, context, options, rest, (dout, dfinal, None))

    out, state, got = quickly(run)(call.arrays, call.context, dout, dfinal)
    assert "RACE" not in capfd.readouterr().out
    got = {name: x for name, x in vars(got).items() if x is not None}
    scale = np.asarray(got.pop("scale"))
    check(p, out, state, got, dout, dfinal)
    # out is linear in it
    truth, yards = truth_of(p, dout, dfinal)
    slope = lambda found: np.sum(dout.astype(np.float64) * np.asarray(found["out"], np.float64)) / 0.3  # noqa: E731
    size = float(np.sum(np.abs(dout.astype(np.float64) * truth["out"])) / 0.3)
    compare.check("scale", scale, slope(truth), [slope(y) for y in yards], p.query.dtype, size)


@pytest.mark.parametrize("op, layout, piece", [(GATED, "kv", 1), (KDA, "vk", None)])
def test_checkpoints_are_the_states_in_between(op, layout, piece, capfd):
    p = make(op, T=128)
    offsets = jnp.array([[0, 128, 64, 128]])
    call = described(op, by_head.turned(p, layout), state_layout=layout, checkpoints=offsets)
    assert mosaic.why_not(call.problem) is None and mosaic.why_not_backward(call.problem) is not None
    config = mosaic.ChunkConfig(piece)
    call = dataclasses.replace(call, options=dataclasses.replace(call.options, config=config))
    _, *states = forward(call, capfd)
    hold_checkpoints(p, *(np.swapaxes(x, -1, -2) if layout == "vk" else np.asarray(x) for x in states))


def hold_checkpoints(p, last, states):
    for i in (1, 3):
        np.testing.assert_array_equal(states[:, i], last)
    np.testing.assert_array_equal(states[:, 0], p.initial_state)
    half = p.tokens(0, 64)
    yards = [y["state"] for y in baseline_linear.gradients(half, *cotangents(half))]
    compare.check("after 64", states[:, 2], oracle_linear.last(half)[1], yards, p.query.dtype)


def test_checkpoints_of_packed_sequences(capfd):
    """What does not exist is NaN."""
    p = packed(GATED)
    offsets = jnp.array([[64, 0], [64, 64], [64, 128], [2**30, 1]])
    call = described_packed(GATED, p, checkpoints=offsets)
    _, last, states = map(np.asarray, forward(call, capfd))
    exists = np.array([[0, 1], [1, 1], [1, 0], [0, 0]], bool)
    assert np.isnan(states[~exists]).all() and np.isfinite(states[exists]).all()
    np.testing.assert_array_equal(states[0, 1], p.initial_state[0])
    np.testing.assert_array_equal(states[2, 0], last[2])  # of a chunk
    np.testing.assert_array_equal(states[1, 0], states[1, 1])
    half = dataclasses.replace(p.tokens(3, 67), initial_state=p.initial_state[1:2])
    yards = [y["state"] for y in baseline_linear.gradients(half, *cotangents(half))]
    compare.check("after 64", states[1, :1], oracle_linear.last(half)[1], yards, p.query.dtype)


# Where tokens are put


def test_places():
    found = linear_sequences.places(jnp.asarray(CU), T)
    token, place, walks = map(np.asarray, (found.token, found.place, found.walks.reshape(-1, 3)))
    np.testing.assert_array_equal(walks, [[1, 0, 2], [2, 2, 1], [3, 3, 1], [0, 0, 0]])
    assert len(token) == 64 * (3 + 3) and np.sum(token < T) == 137
    for rows, first in zip(ROWS, np.asarray(found.first), strict=True):
        np.testing.assert_array_equal(place[rows], first * 64 + np.arange(rows.stop - rows.start))
        np.testing.assert_array_equal(token[place[rows]], np.arange(T)[rows])
    assert np.all(place[[0, 2, 140, 149]] == len(token))


@pytest.mark.parametrize("cu", [[0, 10**9, -5, T, 2, 7], [T, 0, T, 0, T, 0], [-9, -9, -9, -9, -9, 300], [0, 0, T]])
def test_wild_offsets_stay_inside(cu):
    found = jax.jit(linear_sequences.places, static_argnums=1)(jnp.array(cu, jnp.int32), T)
    n = found.token.shape[0]
    sequence, first, count = np.asarray(found.walks).reshape(-1, 3).T
    assert sorted(sequence) == list(range(len(cu) - 1))
    assert n == 64 * (3 + len(cu) - 2) and np.all((first >= 0) & (count >= 0) & (first + count <= n // 64))
    assert np.all((0 <= found.token) & (found.token <= T)) and np.all((0 <= found.place) & (found.place <= n))


# Dispatch


def test_sequences_of_nobody():
    p = packed(GATED)
    x = described_packed(GATED, p)
    none = dataclasses.replace(x.context, cu_seqlens=jnp.zeros(1, jnp.int32))
    arrays = dataclasses.replace(x.arrays, initial_state=None)
    (out, state, _), _ = mosaic.forward(arrays, none, x.options)
    assert out.shape == (1, T, 1, 64) and not np.any(out) and state.shape == (0, 1, 64, 64)


def test_packed_sequences_are_not_cut():
    problem = described_packed(GATED, packed(GATED)).problem
    assert mosaic.choose(problem, None).piece is None
    with pytest.raises(ValueError, match="piece=2: packed"):
        mosaic.choose(problem, mosaic.ChunkConfig(2))


@pytest.mark.parametrize("name", [None, "mosaic"])
def test_run_with_their_backward(name, monkeypatch):
    """Packed sequences and segments; checkpoints have their gradient from "xla"."""
    monkeypatch.setattr(mosaic, "why_not_here", lambda: None)
    p = with_segments(GATED)
    segments = described(GATED, p, segment_ids=np.cumsum(p.resets, axis=1))
    for x in (described_packed(GATED, packed(GATED)), segments):
        found = _dispatch.explain(x.problem, name, None)
        assert found.implementation == found.backward == "mosaic"
    found = _dispatch.explain(described(GATED, p, checkpoints=[64]).problem, name, None)
    assert (found.implementation, found.backward) == ("mosaic", "xla")


# Compiled without a GPU


@pytest.mark.aot
@pytest.mark.parametrize("op", [GATED, KDA])
@pytest.mark.parametrize("how", ["packed", "segments", "checkpoints"])
def test_compiles_for_an_h200(op, how):
    make = (by_channel if op in BY_CHANNEL else by_head).empty_call
    call = make(op, B=1, T=1100, K=16, gate="softplus", beta_activation="sigmoid2", qk_l2norm=True)
    if how == "packed":
        context = dataclasses.replace(call.context, cu_seqlens=jnp.zeros(5, jnp.int32))
        arrays = dataclasses.replace(call.arrays, initial_state=jnp.zeros((4, 32, 128, 128)))
    elif how == "segments":
        arrays, context = call.arrays, dataclasses.replace(call.context, resets=jnp.zeros((1, 1100), bool))
    else:
        arrays, context = call.arrays, dataclasses.replace(call.context, checkpoints=jnp.zeros((1, 3), jnp.int32))
    leaves, structure = jax.tree.flatten((arrays, context))

    def run(*leaves):
        arrays, context = structure.unflatten(leaves)
        (out, state, checkpoints), rest = mosaic.forward(arrays, context, call.options)
        if checkpoints is not None:
            return out, state, checkpoints
        return out, mosaic.backward(arrays, context, call.options, rest, (out, state, None))

    found = aot.compile_for_h200(run, *leaves)
    assert found.clean, found


# On a GPU


def on_gpu(op, p, x, dout, dfinal, **options):
    """`(out, state)`, gradients by name; p is what `call` takes its options from."""

    def run(x, dout, dfinal):
        how = dict(implementation="mosaic", return_final_state=True, **options)
        results, pull = jax.vjp(lambda x: call(op, p, x, **how), x)
        return results, pull((dout, dfinal))[0]

    return jax.jit(run)(x, dout, dfinal)


@pytest.mark.gpu
@pytest.mark.parametrize("name", GPU_PACKED)
def test_packed_sequences_on_a_gpu(name):
    op, options = GPU_PACKED[name]
    p = packed(op, **options)
    dout, dfinal = packed_cotangents(p)
    x = {name: a[0] if name in TOKENS else a for name, a in p.arrays().items()}
    own = dataclasses.replace(p, initial_state=None)
    (out, state), got = on_gpu(op, own, x, dout[0], dfinal, cu_seqlens=CU)
    check(p, out, state, got, dout, dfinal)


@pytest.mark.gpu
@pytest.mark.parametrize("name", GPU_SEGMENTS)
def test_segments_on_a_gpu(name):
    op, options = GPU_SEGMENTS[name]
    p = with_segments(op, **options)
    dout, dfinal = cotangents(p)
    for piece in (None, 1):
        (out, state), got = on_gpu(op, p, p.arrays(), dout, dfinal, config=mosaic.ChunkConfig(piece))
        hold_with_states(p, out, state, got, dout, dfinal)


@pytest.mark.gpu
@pytest.mark.parametrize("op", [GATED, KDA])
@pytest.mark.parametrize("piece", [None, 1])
def test_checkpoints_on_a_gpu(op, piece):
    p = make(op, T=128, H=128, D=128)
    options = dict(implementation="mosaic", config=mosaic.ChunkConfig(piece), return_final_state=True)
    out, last, states = jax.jit(lambda x: call(op, p, x, checkpoints=[0, 128, 64, 128], **options))(p.arrays())
    hold_checkpoints(p, np.asarray(last), np.asarray(states))

"""Linear attention's scans over pieces of a sequence: emulated, compiled for an H200 without one, and on a GPU."""

import dataclasses
import functools

import aot
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import test_hopper_linear_channels as by_channel
import test_hopper_linear_chunk as by_head
from linear_cases import problem, quickly

from jattn import _dispatch
from jattn.pallas import linear_chunk as mosaic
from jattn.pallas import linear_pieces
from jattn.pallas.hopper import linear_combine
from jattn.pallas.hopper.linear_plan import Plan

GATED, KDA, GLA = "gated_delta_rule", "kda", "gla"
BF16 = ml_dtypes.bfloat16
_FILES = {GATED: by_head, KDA: by_channel, GLA: by_channel}


def make(op, T=300, H=64, D=64, **options):
    options = dict(B=1, K=1, N=1, dtype=BF16, qk_l2norm=op != GLA) | options
    return problem(op, T=T, H=H, D=D, **options)


def described(op, p, piece, layout="kv"):
    """A call whose sequences are cut into pieces of so many chunks."""
    p = by_head.turned(p, layout)
    call = by_head.described(op, p, state_layout=layout) if op == GATED else by_channel.described(p, state_layout=layout)
    return dataclasses.replace(call, options=dataclasses.replace(call.options, config=mosaic.ChunkConfig(piece)))


def results(call, **how):
    """(out, state), emulated; the state as [.., H, D]."""
    found = emulation(call.options, **how)(call.arrays)[0]
    return _turned_back(call, found)


def _turned_back(call, found):
    out, state, checkpoints = found
    assert checkpoints is None and out.dtype == BF16 and state.dtype == np.float32
    return out, jnp.swapaxes(state, -1, -2) if call.options.state_layout == "vk" else state


@functools.cache
def emulation(options, rest=False, **how):
    return quickly(lambda x: mosaic.forward(x, None, options, rest=rest, interpret=True, **how))


def equal(one, other):
    for x, y in zip(one, other, strict=True):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


CASES = {
    "by head, mixed gates": (GATED, make(GATED), 2, {}),
    "by head, gates near 0": (GATED, make(GATED, gates="slow"), 2, {}),
    "by head, gates at -5": (GATED, make(GATED, gates="bound"), 2, {}),
    "by head, forgetting": (GATED, make(GATED, gates="forgetting"), 2, {}),
    "by head, vk": (GATED, make(GATED, T=140, H=128, D=64), 1, dict(layout="vk")),
    "by head, no state, groups": (GATED, make(GATED, T=192, N=2, state=False), 1, {}),
    "by channel, mixed gates": (KDA, make(KDA), 2, {}),
    "by channel, gates near 0": (KDA, make(KDA, gates="slow"), 2, {}),
    "by channel, gates at -5": (KDA, make(KDA, gates="bound"), 2, {}),
    "by channel, forgetting": (KDA, make(KDA, gates="forgetting"), 2, {}),
    "by channel, vk": (KDA, make(KDA, T=140, H=128, D=64), 1, dict(layout="vk")),
    "without the delta rule": (GLA, make(GLA), 2, {}),
}


# Emulated


@pytest.mark.parametrize("name", CASES)
def test_is_the_recurrence(name, capfd):
    op, p, piece, options = CASES[name]
    found = results(described(op, p, piece, **options))
    assert "RACE" not in capfd.readouterr().out
    by_head.hold(p, *found)


@pytest.mark.parametrize("op", [GATED, KDA])
def test_a_prefix_is_bit_equal(op, capfd):
    """Neither later tokens nor later pieces change an output, nor does a neighbour of NaN."""
    p = make(op, B=2)
    for x in p.arrays().values():
        x[1] = np.nan
    whole, _ = results(described(op, p, 1))
    first = dataclasses.replace(p, **{name: x[:1] for name, x in p.arrays().items()})
    part, _ = results(described(op, first.tokens(0, 170), 1))
    np.testing.assert_array_equal(np.asarray(whole)[:1, :170], np.asarray(part))
    assert "RACE" not in capfd.readouterr().out


@pytest.mark.parametrize("op", [GATED, KDA])
def test_two_warpgroups_a_block_are_bit_equal_to_one(op, capfd):
    """Of the maps, one of the two has columns of the unit matrix."""
    call = described(op, make(op, T=140, D=128), 1)
    equal(results(call), results(call, multiprocessors=1))
    assert "RACE" not in capfd.readouterr().out


def test_one_piece_is_the_sequence_uncut():
    p = make(GATED, T=100)
    equal(results(described(GATED, p, 2)), results(described(GATED, p, None)))


def test_what_a_backward_reads():
    """The states that enter chunks are there as without pieces, and saving them changes no result."""
    p = make(GATED)
    call = described(GATED, p, 2)
    found, saved = emulation(call.options, rest=True)(call.arrays)
    equal(_turned_back(call, found), results(call))
    _, uncut = emulation(described(GATED, p, None).options, rest=True)(call.arrays)
    equal(saved.states[:, :2], uncut.states[:, :2])  # of the first piece
    assert saved.states.shape == uncut.states.shape and bool(jnp.array_equal(saved.inverse, uncut.inverse))
    apart = jnp.max(abs(saved.states.astype(float) - uncut.states.astype(float)))
    assert apart < 2e-2 * jnp.max(abs(uncut.states.astype(float)))


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("H", [64, 128])
def test_maps_in_turn(H, reverse, capfd):
    """In float32: far more exact than the maps themselves."""
    rng, pieces, N, D = np.random.default_rng(0), 4, 2, 64
    plan = Plan(
        B=1, T=64 * pieces, N=N, K=N, H=H, D=D, options=described(GATED, make(GATED), 1).options, warpgroups=1, piece=1
    )
    maps = rng.standard_normal((pieces - 1, N, D + H, H)).astype(np.float32)
    maps[..., D:, :] /= np.sqrt(H)
    state = rng.standard_normal((1, N, H, D)).astype(np.float32)
    run = quickly(lambda maps, state: linear_combine.launch(plan, maps, state, reverse=reverse, interpret=True))
    found = np.asarray(run(maps.reshape(-1, D + H, H), state)).reshape(pieces, N, H, D)
    want = [state[0].astype(np.float64)]
    for one in maps[::-1] if reverse else maps:
        own, matrix = (np.swapaxes(x.astype(np.float64), -1, -2) for x in (one[:, :D], one[:, D:]))
        want.append((np.swapaxes(matrix, -1, -2) if reverse else matrix) @ want[-1] + own)
    want = np.stack(want[::-1] if reverse else want)
    assert np.max(abs(found - want)) < 2e-5 * np.max(abs(want)) and "RACE" not in capfd.readouterr().out

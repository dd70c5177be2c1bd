"""Linear attention's scans over pieces of a sequence: emulated, compiled for an H200 without one, and on a GPU."""

import dataclasses
import functools

import aot
import baseline_linear
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import oracle_linear
import pytest
import test_hopper_linear_channels as by_channel
import test_hopper_linear_chunk as by_head
from barriers import MBarrier, Memory, Simulation
from linear_cases import call, cotangents, hold, problem, quickly, repeated

from jattn import _dispatch
from jattn._linear import Context
from jattn.pallas import linear_chunk as mosaic
from jattn.pallas import linear_launch
from jattn.pallas.hopper import linear_combine
from jattn.pallas.hopper.linear_plan import Plan

GATED, SIMPLE, KDA, GLA = "gated_delta_rule", "simple_gla", "kda", "gla"
DELTA = GATED, KDA
BF16 = ml_dtypes.bfloat16


def make(op, T=300, H=64, D=64, **options):
    options = dict(B=1, K=1, N=1, dtype=BF16, qk_l2norm=op in DELTA) | options
    return problem(op, T=T, H=H, D=D, **options)


def described(op, p, piece, layout="kv"):
    """A call whose sequences are cut into pieces of so many chunks."""
    p, how = by_head.turned(p, layout), dict(state_layout=layout)
    call = by_channel.described(p, **how) if op in (KDA, GLA) else by_head.described(op, p, **how)
    return dataclasses.replace(call, options=dataclasses.replace(call.options, config=mosaic.ChunkConfig(piece)))


CASES = {
    "by head, mixed gates": (GATED, make(GATED, T=170), 1, "kv"),
    "by head, gates near 0": (GATED, make(GATED, T=170, gates="slow"), 1, "kv"),
    "by channel, forgetting": (KDA, make(KDA, gates="forgetting"), 2, "kv"),
}
GPU_CASES = CASES | {
    "by head, two chunks a piece": (GATED, make(GATED), 2, "kv"),
    "by head, gates at -5": (GATED, make(GATED, gates="bound"), 2, "kv"),
    "by head, forgetting": (GATED, make(GATED, gates="forgetting"), 2, "kv"),
    "by head, vk": (GATED, make(GATED, T=140, H=128), 1, "vk"),
    "by head, without the delta rule": (SIMPLE, make(SIMPLE), 2, "kv"),
    "by channel, mixed gates": (KDA, make(KDA), 2, "kv"),
    "by channel, gates near 0": (KDA, make(KDA, gates="slow"), 2, "kv"),
    "by channel, gates at -5": (KDA, make(KDA, gates="bound"), 2, "kv"),
    "by channel, vk": (KDA, make(KDA, T=140, H=128), 1, "vk"),
    "by channel, no state, groups": (KDA, make(KDA, T=192, N=2, state=False), 1, "kv"),
    "by channel, without the delta rule": (GLA, make(GLA), 2, "kv"),
}


# Emulated


@functools.cache
def emulation(options, rest, **how):
    """Forward and backward."""
    how |= dict(interpret=True)
    forward = lambda x: mosaic.forward(x, Context(), options, rest=rest, **how)  # noqa: E731
    backward = lambda x, rest, *cotangents: mosaic.backward(x, Context(), options, rest, (*cotangents, None), **how)  # noqa: E731
    return quickly(forward), quickly(backward)


@pytest.mark.parametrize("name", CASES)
def test_is_the_recurrence_and_its_gradient(name, capfd):
    op, p, piece, layout = CASES[name]
    call = described(op, p, piece, layout)
    forward, backward = emulation(call.options, rest=True)
    # Two emulations at once may wait for each other.
    (out, state, checkpoints), rest = jax.block_until_ready(forward(call.arrays))
    found = backward(call.arrays, rest, *map(jnp.asarray, cotangents(p)))
    assert checkpoints is None and "RACE" not in capfd.readouterr().out
    by_head.hold(p, out, state)
    hold_gradients(p, {name: np.asarray(getattr(found, name)) for name in p.arrays()})


def hold_gradients(p, found):
    truth, yards = oracle_linear.backward(p, *cotangents(p)), list(baseline_linear.gradients(p, *cotangents(p)))
    hold("d", found, truth, yards, p.query.dtype)


def test_a_prefix_is_bit_equal(capfd):
    """Neither later tokens nor later pieces change an output, nor does a neighbour of NaN."""
    p = make(KDA, B=2, T=130)
    for x in p.arrays().values():
        x[1] = np.nan
    first = dataclasses.replace(p, **{name: x[:1] for name, x in p.arrays().items()})
    whole, part = (described(KDA, x, 1) for x in (p, first.tokens(0, 70)))
    whole, part = (emulation(x.options, rest=False)[0](x.arrays)[0][0] for x in (whole, part))
    np.testing.assert_array_equal(np.asarray(whole)[:1, :70], np.asarray(part))
    assert "RACE" not in capfd.readouterr().out


def test_two_warpgroups_a_block(capfd):
    """Of the maps, one of the two has columns of values and one those of the unit matrix."""
    p = make(GATED, T=100)
    call = described(GATED, p, 1)
    (out, state, _), _ = emulation(call.options, rest=False, multiprocessors=1)[0](call.arrays)
    assert "RACE" not in capfd.readouterr().out
    by_head.hold(p, out, state)


def test_maps_in_turn(capfd):
    """From the last piece on, to 2⁻¹⁶ a map: far more exact than the maps themselves."""
    rng, pieces, N, H, D = np.random.default_rng(0), 4, 1, 128, 64
    options = described(GATED, make(GATED), 1, "vk").options
    plan = Plan(B=1, T=64 * pieces, N=N, K=N, H=H, D=D, options=options, warpgroups=1, piece=1)
    maps = rng.standard_normal((pieces - 1, N, D + H, H)).astype(np.float32)
    maps[..., D:, :] /= np.sqrt(H)
    state = rng.standard_normal((1, N, H, D)).astype(np.float32)
    run = quickly(lambda maps, state: linear_combine.launch(plan, maps, state, reverse=True, interpret=True))
    found = np.asarray(run(maps.reshape(-1, D + H, H), np.swapaxes(state, -1, -2))).reshape(pieces, N, H, D)
    want = [state[0].astype(np.float64)]
    for one in maps[::-1]:
        own, matrix = (np.swapaxes(x.astype(np.float64), -1, -2) for x in (one[:, :D], one[:, D:]))
        want.append(matrix @ want[-1] + own)
    want = np.stack(want[::-1])
    assert np.max(abs(found - want)) < pieces * 2**-16 * np.max(abs(want)) and "RACE" not in capfd.readouterr().out


# The meeting of the combining kernel's warps, simulated


def simulate_combine(seed, *, warps=8, steps=6, buffers=2):
    """Each warp multiplies by what all have written of S, and writes its part of the next S to another buffer."""
    sim = Simulation(seed)
    parts, written = Memory(sim, "S"), MBarrier(warps)

    def warp(w):
        def write(i):
            for reader in range(warps):  # its part in this buffer, which every warp reads
                if parts.readers.get((reader, i % buffers)):
                    sim.hazards.append("written under a product")
            parts.write(("of", w, i % buffers), i)
            yield None
            written.arrive()
            yield None

        yield from write(0)
        for i in range(steps):
            yield written.wait(w)
            parts.readers[w, i % buffers] = 1
            if any(parts.content.get(("of", v, i % buffers)) != i for v in range(warps)):
                sim.hazards.append("a part was not there")
            yield None
            parts.readers[w, i % buffers] = 0
            yield from write(i + 1)
        yield written.wait(w)

    for w in range(warps):
        sim.start(warp(w))
    return sim.run()


def test_the_meeting_of_warps():
    assert {simulate_combine(seed) for seed in range(60)} == {"ok"}
    assert {simulate_combine(seed, buffers=1) for seed in range(60)} != {"ok"}


# Dispatch


def test_sequences_are_cut_where_heads_are_few():
    of = lambda **shape: described(GATED, make(GATED, **shape), None).problem  # noqa: E731
    piece = lambda **shape: mosaic.choose(of(**shape), None).piece  # noqa: E731
    assert piece(N=4, K=4, D=128) == piece(N=4, K=4, D=128, T=1) == 16 and piece(B=2, N=16, D=64) == 32
    assert piece(B=2, N=16, D=192) is None and mosaic.choose(of(N=4), mosaic.ChunkConfig()).piece is None
    for wrong in (0, 1.5, "all"):
        with pytest.raises(ValueError, match="piece="):
            mosaic.ChunkConfig(wrong)


def test_a_config_reaches_the_kernels():
    call = described(GATED, make(GATED), None)
    options = _dispatch.resolve(call.problem, call.options, "mosaic", mosaic.ChunkConfig(7))
    assert options.config.piece == 7 and linear_launch.plan_of(call.arrays, options, 132).pieces == 1


# Compiled without a GPU

COMPILED = {
    "by head": (GATED, dict(B=1, T=2100, K=8, N=8, qk_l2norm=True), 16),
    "by head, two warpgroups, groups": (GATED, dict(B=2, T=1100, K=4, N=32, state=True, qk_l2norm=True), 8),
    "narrow, vk": (GATED, dict(B=1, T=1100, K=2, N=2, H=64, D=64, state=True, layout="vk"), 4),
    "by channel": (KDA, dict(B=1, T=3000, K=16, N=16, qk_l2norm=True), 16),
    "by channel, wide, vk": (KDA, dict(B=1, T=1100, K=16, D=256, layout="vk", qk_l2norm=True), 8),
    "by head, without the delta rule": (SIMPLE, dict(B=1, T=1100, K=2, N=2), 4),
    "by channel, without the delta rule": (GLA, dict(B=1, T=1100, K=2, N=2), 4),
}


@pytest.mark.aot
@pytest.mark.parametrize("name", COMPILED)
def test_compiles_for_an_h200(name):
    op, shape, piece = COMPILED[name]
    call = (by_channel if op in (KDA, GLA) else by_head).empty_call(op, **shape)
    options = dataclasses.replace(call.options, config=mosaic.ChunkConfig(piece))
    leaves, structure = jax.tree.flatten(call.arrays)

    def run(*leaves):
        arrays = structure.unflatten(leaves)
        (out, state, _), rest = mosaic.forward(arrays, call.context, options)
        return out, mosaic.backward(arrays, call.context, options, rest, (out, state, None))

    found = aot.compile_for_h200(run, *leaves)
    assert found.clean, found


# On a GPU


def on_gpu(op, p, piece, layout="kv", repeats=1):
    """(out, state as [.., H, D]), gradients; all repeats are the same, bit for bit."""
    options = dict(implementation="mosaic", config=mosaic.ChunkConfig(piece), state_layout=layout)
    turn = (lambda x: jnp.swapaxes(x, -1, -2)) if layout == "vk" else lambda x: x
    q = by_head.turned(p, layout)

    def run(x, dout, dfinal):
        (out, state), pull = jax.vjp(lambda x: call(op, q, x, return_final_state=True, **options), x)
        return (out, turn(state)), pull((dout, turn(dfinal)))[0]

    found, got = repeated(jax.jit(run), q.arrays(), *cotangents(p), repeats=repeats)
    return found, got | ({"initial_state": turn(got["initial_state"])} if "initial_state" in got else {})


@pytest.mark.gpu
@pytest.mark.parametrize("name", GPU_CASES)
def test_every_case_on_a_gpu(name):
    op, p, piece, layout = GPU_CASES[name]
    found, got = on_gpu(op, p, piece, layout)
    by_head.hold(p, *found)
    hold_gradients(p, got)


@pytest.mark.gpu
@pytest.mark.parametrize("op", [GATED, KDA])
def test_many_pieces_on_a_gpu(op):
    p = make(op, T=1500, K=4, N=4, H=128, D=128, gates="slow")
    found, got = on_gpu(op, p, 2, repeats=50)
    by_head.hold(p, *found)

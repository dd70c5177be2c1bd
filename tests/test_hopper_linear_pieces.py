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
from linear_cases import call, cotangents, hold, problem, quickly

from jattn import _dispatch
from jattn.pallas import linear_chunk as mosaic
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
    "by head, mixed gates": (GATED, make(GATED), 2, "kv"),
    "by head, gates near 0": (GATED, make(GATED, gates="slow"), 2, "kv"),
    "by head, gates at -5": (GATED, make(GATED, gates="bound"), 2, "kv"),
    "by head, forgetting": (GATED, make(GATED, gates="forgetting"), 2, "kv"),
    "by head, vk": (GATED, make(GATED, T=140, H=128), 1, "vk"),
    "by channel, mixed gates": (KDA, make(KDA), 2, "kv"),
    "by channel, gates near 0": (KDA, make(KDA, gates="slow"), 2, "kv"),
    "by channel, gates at -5": (KDA, make(KDA, gates="bound"), 2, "kv"),
    "by channel, forgetting": (KDA, make(KDA, gates="forgetting"), 2, "kv"),
    "by channel, no state, groups": (KDA, make(KDA, T=192, N=2, state=False), 1, "kv"),
    "by head, without the delta rule": (SIMPLE, make(SIMPLE), 2, "kv"),
    "by channel, without the delta rule": (GLA, make(GLA), 2, "kv"),
}


# Emulated


def results(call, capfd, **how):
    """(out, state as [.., H, D])."""
    out, state, checkpoints = emulation(call.options, **how)[0](call.arrays)[0]
    assert checkpoints is None and "RACE" not in capfd.readouterr().out
    return out, jnp.swapaxes(state, -1, -2) if call.options.state_layout == "vk" else state


@functools.cache
def emulation(options, rest=False, **how):
    """Forward and backward."""
    how |= dict(interpret=True)
    forward = lambda x: mosaic.forward(x, None, options, rest=rest, **how)  # noqa: E731
    backward = lambda x, rest, *cotangents: mosaic.backward(x, None, options, rest, (*cotangents, None), **how)  # noqa: E731
    return quickly(forward), quickly(backward)


@pytest.mark.parametrize("name", CASES)
def test_is_the_recurrence(name, capfd):
    op, p, piece, layout = CASES[name]
    by_head.hold(p, *results(described(op, p, piece, layout), capfd))


GRADIENTS = [name for name in CASES if "mixed" in name or "delta" in name or name == "by channel, forgetting"]


@pytest.mark.parametrize("name", GRADIENTS)
def test_is_the_gradient_of_the_recurrence(name, capfd):
    op, p, piece, layout = CASES[name]
    call = described(op, p, piece, layout)
    forward, backward = emulation(call.options, rest=True)
    _, rest = jax.block_until_ready(forward(call.arrays))  # two emulations at once may wait for each other
    found = backward(call.arrays, rest, *map(jnp.asarray, cotangents(p)))
    assert "RACE" not in capfd.readouterr().out
    hold_gradients(p, {name: np.asarray(getattr(found, name)) for name in p.arrays()})


def hold_gradients(p, found):
    truth, yards = oracle_linear.backward(p, *cotangents(p)), list(baseline_linear.gradients(p, *cotangents(p)))
    hold("d", found, truth, yards, p.query.dtype)


def test_a_prefix_is_bit_equal(capfd):
    """Neither later tokens nor later pieces change an output, nor does a neighbour of NaN."""
    p = make(KDA, B=2, T=192)
    for x in p.arrays().values():
        x[1] = np.nan
    whole, _ = results(described(KDA, p, 1), capfd)
    first = dataclasses.replace(p, **{name: x[:1] for name, x in p.arrays().items()})
    part, _ = results(described(KDA, first.tokens(0, 100), 1), capfd)
    np.testing.assert_array_equal(np.asarray(whole)[:1, :100], np.asarray(part))


def test_two_warpgroups_a_block_are_bit_equal_to_one(capfd):
    """Of the maps, one block has 64 columns of values and 64 of the unit matrix."""
    call = described(GATED, make(GATED, T=140), 1)
    for x, y in zip(results(call, capfd), results(call, capfd, multiprocessors=1), strict=True):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


@pytest.mark.parametrize("reverse", [False, True])
def test_maps_in_turn(reverse, capfd):
    """To 2⁻¹⁶ a map: far more exact than the maps themselves."""
    rng, pieces, N, H, D = np.random.default_rng(0), 4, 1, 128, 64
    options = described(GATED, make(GATED), 1).options
    plan = Plan(B=1, T=64 * pieces, N=N, K=N, H=H, D=D, options=options, warpgroups=1, piece=1)
    maps = rng.standard_normal((pieces - 1, N, D + H, H)).astype(np.float32)
    maps[..., D:, :] /= np.sqrt(H)
    state = rng.standard_normal((1, N, H, D)).astype(np.float32)
    run = quickly(lambda maps, state: linear_combine.launch(plan, maps, state, reverse=reverse, interpret=True))
    found = np.asarray(run(maps.reshape(-1, D + H, H), state)).reshape(pieces, N, H, D)
    want = [state[0].astype(np.float64)]
    for one in maps[::-1] if reverse else maps:
        own, matrix = (np.swapaxes(x.astype(np.float64), -1, -2) for x in (one[:, :D], one[:, D:]))
        want.append(matrix @ want[-1] + own)
    want = np.stack(want[::-1] if reverse else want)
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
    piece = lambda **shape: mosaic.choose(described(GATED, make(GATED, **shape), None).problem, None).piece  # noqa: E731
    assert piece(N=4, K=4, D=128) == piece(N=4, K=4, D=128, T=1) == 16 and piece(B=2, N=16, D=64) == 32
    assert piece(B=2, N=16, D=192) is None and mosaic.choose(None, mosaic.ChunkConfig()).piece is None
    for wrong in (0, 1.5, "all"):
        with pytest.raises(ValueError, match="piece="):
            mosaic.ChunkConfig(wrong)


def test_a_config_reaches_the_kernels():
    call = described(GATED, make(GATED), None)
    options = _dispatch.resolve(call.problem, call.options, "mosaic", mosaic.ChunkConfig(7))
    assert options.config.piece == 7 and mosaic._plan(call.arrays, options, 132).pieces == 1


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


def on_gpu(op, p, piece, layout="kv"):
    """(out, state as [.., H, D]), gradients."""
    options = dict(implementation="mosaic", config=mosaic.ChunkConfig(piece), state_layout=layout)
    turn = (lambda x: jnp.swapaxes(x, -1, -2)) if layout == "vk" else lambda x: x
    q = by_head.turned(p, layout)

    def run(x, dout, dfinal):
        (out, state), pull = jax.vjp(lambda x: call(op, q, x, return_final_state=True, **options), x)
        return (out, turn(state)), pull((dout, turn(dfinal)))[0]

    found, got = jax.jit(run)(q.arrays(), *cotangents(p))
    return found, got | ({"initial_state": turn(got["initial_state"])} if "initial_state" in got else {})


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_every_case_on_a_gpu(name):
    op, p, piece, layout = CASES[name]
    found, got = on_gpu(op, p, piece, layout)
    by_head.hold(p, *found)
    hold_gradients(p, got)


@pytest.mark.gpu
@pytest.mark.parametrize("op", [GATED, KDA])
def test_many_pieces_on_a_gpu(op):
    p = make(op, T=1500, K=4, N=4, H=128, D=128, gates="slow")
    found, got = on_gpu(op, p, 2)
    for _ in range(10):
        again = on_gpu(op, p, 2)
        assert jax.tree.all(jax.tree.map(lambda a, b: bool(jnp.array_equal(a, b)), again, (found, got)))
    by_head.hold(p, *found)

"""Runs `implementation="mosaic"` on the CPU, which no user can: its kernel emulated, or everything but its kernel."""

import dataclasses
import functools
import importlib

import jax.numpy as jnp

from jattn.pallas import attention as mosaic
from jattn.pallas import attention_gradients, configs
from jattn.pallas._compat import plgpu
from jattn.reference import attention as reference

_op = importlib.import_module("jattn.attention")  # the name in the package is the function
SMALL = configs.TileConfig(warpgroups=2, block_k=32, cross_tile=False, own_out=False)


def emulated(monkeypatch, detect_races=True):
    """The kernels in interpret mode, with small tiles and two thread blocks."""
    how = dict(interpret=plgpu.InterpretGPUParams(detect_races=detect_races), multiprocessors=2)
    forward, backward = (functools.partial(f, **how) for f in (mosaic.forward, mosaic.backward))
    yield from _here(monkeypatch, forward=forward, backward=backward, choose=lambda problem, config: config or SMALL)


def replaced(monkeypatch):
    """Plain JAX in the kernel's place: what divides a launch over devices is there, and the emulation is not."""

    def part(arrays, context, options, unrounded, **_):
        options = dataclasses.replace(options, config=reference.TileConfig(16, 16))
        out, lse, _ = reference.forward(arrays, context, options)
        return (out if unrounded else out.astype(arrays.query.dtype)), lse

    def gradients_part(arrays, context, saved, options, **_):
        dout, lse, delta = saved
        options = dataclasses.replace(options, config=reference.TileConfig(16, 16))
        zeros = jnp.zeros_like(dout), lse, jnp.zeros_like(lse)
        found = reference.backward(arrays, context, options, *zeros, dout, -delta)
        return found.query, found.key, found.value

    monkeypatch.setattr(attention_gradients, "_part", gradients_part)
    yield from _here(monkeypatch, _part=part)


def _here(monkeypatch, **changes):
    for name, value in dict(PLATFORM="cpu", why_not_here=lambda: None, **changes).items():
        monkeypatch.setattr(mosaic, name, value)
    _op._attend.clear_cache()  # what was traced before knows nothing of this, and what is traced now is for here alone
    yield
    _op._attend.clear_cache()

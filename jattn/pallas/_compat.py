"""The one place that imports Pallas Mosaic GPU and the compiler dialects under it.

Everything else in `jattn.pallas` takes these names from here, so a change of their interface between jax versions is
absorbed in this file.
"""

import contextlib
import contextvars
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap
from jax.experimental.mosaic.gpu import fragmented_array, utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, nvvm, scf, vector

__all__ = [
    "arith", "fragmented_array", "interpreting", "ir", "kernel", "kernel_in_place", "llvm",
    "mapped_in_turn", "nvvm", "pl", "plgpu",
    "scf", "utils", "vector",
]  # fmt: skip

_interpreting: contextvars.ContextVar[bool] = contextvars.ContextVar("interpreting", default=False)


def interpreting() -> bool:
    """Whether the kernel being traced will run in interpret mode, where inline instructions have no meaning."""
    return _interpreting.get()


@contextlib.contextmanager
def _interpret(flag: bool):
    token = _interpreting.set(flag)
    try:
        yield
    finally:
        _interpreting.reset(token)


def kernel(
    body: Callable[..., None],
    *,
    name: str,
    out_type: Any,
    scratch: Mapping[str, Any],
    grid: Mapping[str, int],
    warpgroups: int,
    interpret: bool | Any = False,
    reduction_scratch_bytes: int = 0,
    approximate: bool = True,
) -> Callable[..., Any]:
    """A launchable kernel: `body(*inputs, *outputs, **scratch)` traced once per warpgroup, under axis `"warpgroup"`.

    Args:
        scratch: SMEM and barriers by name. An entry with a method `bind` (see `ptx.NamedBarriers`) stands for hardware
            that Pallas does not allocate; interpret mode emulates it with the scratch its `emulation` asks for.
        approximate: sin, cos and tanh may be the hardware's, which err by 2^-11 or grow wrong with the argument.
        interpret: False, True (CPU emulation with race detection), or `InterpretGPUParams`.
    """
    if interpret is True:
        interpret = plgpu.InterpretGPUParams(detect_races=True)
    unallocated = {key: spec for key, spec in scratch.items() if hasattr(spec, "bind")}
    allocated = {key: spec for key, spec in scratch.items() if key not in unallocated}
    if interpret:
        allocated |= {key: spec.emulation for key, spec in unallocated.items()}

    def wrapped(*refs, **allocations):
        bound = {key: spec.bind(allocations.get(key)) for key, spec in unallocated.items()}
        with _interpret(bool(interpret)):
            body(*refs, **(allocations | bound))

    wrapped.__name__ = name
    return plgpu.kernel(
        wrapped,
        out_type=out_type,
        scratch_types=allocated,
        grid=tuple(grid.values()),
        grid_names=tuple(grid),
        num_threads=warpgroups,
        thread_name="warpgroup",
        interpret=interpret or None,
        # The kernels order their own shared memory accesses; the automatic barriers would be added to those.
        compiler_params=plgpu.CompilerParams(
            approx_math=approximate, unsafe_no_auto_barriers=True, reduction_scratch_bytes=reduction_scratch_bytes
        ),
    )


def kernel_in_place(body: Callable[..., None], *, out_type: Any, **how) -> Callable[..., Any]:
    """A launchable kernel `(inputs, buffers) -> (*buffers, *outputs)` that changes buffers instead of making them:
    `body(*inputs, *buffers, *outputs, **scratch)`, and `how` as in `kernel`.

    The barriers keep XLA's GPU compiler from fusing the launch with slices that a loop takes of its operands or stacks
    of its results: such a fusion forgets that a result is the buffer passed in, and its result is memory that nobody
    wrote (jax 0.11.2).
    """
    launch = kernel(body, out_type=out_type, **how)

    def run(inputs, buffers):
        inputs, buffers = lax.optimization_barrier((inputs, buffers))

        def on_references(references):
            changed, outputs = references[: len(buffers)], references[len(buffers) :]
            for reference, x in zip(outputs, launch(*inputs, *changed), strict=True):
                reference[...] = x

        state = (*buffers, *(lax.empty(x.shape, x.dtype) for x in out_type))
        return lax.optimization_barrier(pl.run_state(on_references)(state))

    return run


def mapped_in_turn(function: Callable, *, unrolled: bool) -> Callable:
    """`function` of pytrees of arrays, under `vmap` once for each element: Pallas cannot map what writes in place.

    Args:
        unrolled: without a loop, for an interpreted kernel, which calls back to the host in order.
    """
    called = custom_vmap(function)

    @called.def_vmap
    def in_turn(size, mapped, *operands):
        def one(i):
            return called(*jax.tree.map(lambda x, m: x[i] if m else x, operands, tuple(mapped)))

        if unrolled:
            results = jax.tree.map(lambda *x: jnp.stack(x), *map(one, range(size)))
        else:
            results = lax.map(one, jnp.arange(size, dtype=jnp.int32))
        return results, jax.tree.map(lambda _: True, results)

    return called

"""The backward of linear attention with one decay a head, or none, on compute capability 9.0: three kernels in a row.

    linear_prepare             scores and vectors of chunks, again; M is known
    linear_backward_scan       the walk from the last chunk to the first
    linear_backward_chunk      everything else, chunk by chunk

Nothing is left to the caller but the gate and the activation of β, and sums over a group's heads. Measured on an H200
together with the forward, H = D = 128: 0.773 ms for T = 8192 and 32 heads, 1.282 ms for B = 4, T = 4096; predicted 0.8
and 1.4.
"""

from jattn.pallas.hopper import linear_backward_chunk, linear_backward_scan, linear_prepare
from jattn.pallas.hopper.linear_plan import Gradients, Plan


def launch(plan: Plan, inputs, residuals, dout, dfinal, *, multiprocessors: int, interpret=False) -> Gradients:
    """Gradients of `Inputs`, from the cotangents of the output `[B, T, N, D]` and of the final state, float32 in the
    call's layout."""
    how = dict(multiprocessors=multiprocessors, interpret=interpret)
    prepared = linear_prepare.launch_backward(plan, inputs, residuals.inverse, **how)
    walked = linear_backward_scan.launch(plan, inputs, prepared, dout, dfinal, **how)
    found = linear_backward_chunk.launch(plan, inputs, prepared, residuals.states, walked, dout, **how)
    return Gradients(
        query=found["dquery"], key=found["dkey"], value=walked["dvalue"], g=found.get("dg"), beta=found.get("dbeta"),
        initial_state=walked["dinitial"],
    )  # fmt: skip

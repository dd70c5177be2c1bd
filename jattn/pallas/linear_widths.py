"""Head dims that are not multiples of 64, for kernels of linear attention that know of those alone.

Columns of zeros are appended. Channels in which queries and keys are 0 leave rows of the state at 0, whatever decays
them; columns in which values are 0 leave columns of the state at 0. What comes back is cut again.
"""

import dataclasses

import jax.numpy as jnp

_MULTIPLE = 64


def widened(arrays, options):
    """The arrays of a call with head dims that are multiples of 64."""
    H, D = (-(-n // _MULTIPLE) * _MULTIPLE for n in (arrays.query.shape[3], arrays.value.shape[3]))
    last = dict(query=(H,), key=(H,), value=(D,), initial_state=state_sizes(H, D, options))
    last |= dict(g=(H,), dt_bias=(H,)) if options.rule.decay == "channel" else {}
    return dataclasses.replace(arrays, **{name: resized(getattr(arrays, name), *n) for name, n in last.items()})


def state_sizes(H, D, options):
    """Of the last two axes of a state in the layout of the call."""
    return (D, H) if options.state_layout == "vk" else (H, D)


def resized(x, *sizes):
    """x with last axes of these sizes, cut or with zeros appended; None is None."""
    count = len(sizes)
    if x is None or x.shape[-count:] == sizes:
        return x
    x = x[(..., *(slice(n) for n in sizes))]
    more = [(0, n - m) for n, m in zip(sizes, x.shape[-count:], strict=True)]
    return jnp.pad(x, [(0, 0)] * (x.ndim - count) + more)

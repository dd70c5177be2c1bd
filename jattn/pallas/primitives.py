"""Which JAX primitives predicates and score modifiers may use in a kernel, and how a tile of their values is computed.

A primitive is in the list when Mosaic lowers it on a tile of scores, for that dtype, as exactly as XLA does; a test
compiles every one of them. A few that Mosaic lacks are written in terms of others here.
"""

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Literal

from jattn._callables import operation

_FLOAT, _INT, _UINT, _BOOL = ("float32",), ("int32",), ("uint32",), ("bool",)
_NUMBER = _FLOAT + _INT

#: name -> dtypes of its last operand.
LOWERED = {
    **dict.fromkeys(("add", "sub", "mul"), _NUMBER + _UINT),
    **dict.fromkeys(("div", "max", "min", "neg", "sign", "abs", "square", "clamp"), _NUMBER),
    **dict.fromkeys(("exp", "exp2", "log", "sqrt", "rsqrt", "sin", "cos", "tanh", "logistic", "round"), _FLOAT),
    **dict.fromkeys(("rem", "clz", "shift_right_arithmetic"), _INT),
    **dict.fromkeys(("shift_left", "shift_right_logical"), _INT + _UINT),
    **dict.fromkeys(("and", "or", "xor"), _INT + _UINT + _BOOL),
    **dict.fromkeys(("eq", "ne"), _NUMBER + _UINT + _BOOL),
    **dict.fromkeys(("lt", "le", "gt", "ge"), _NUMBER),
    "not": _INT,
    "bitcast_convert_type": _NUMBER,
    "broadcast_in_dim": _NUMBER,
    "convert_element_type": (
        "int32 float32", "float32 int32", "bool float32", "bool int32", "int32 uint32", "uint32 int32",
        "float32 bfloat16", "bfloat16 float32", "float32 float16", "float16 float32",
        # Kernels read arrays of narrow integers as int32.
        "int8 int32", "int16 int32", "uint8 int32", "uint16 int32",
        "int8 float32", "int16 float32", "uint8 float32", "uint16 float32",
    ),
}  # fmt: skip
_CALLS = ("jit", "custom_jvp_call", "custom_vjp_call")  # what they call is computed


def _select(which, *cases):
    if which.dtype == jnp.bool_:
        return lax.select_n(which, *cases)
    chosen = cases[0]
    for i, case in enumerate(cases[1:], 1):
        chosen = lax.select(which >= i, case, chosen)
    return chosen


def _narrow(x, *, new_dtype, **_):
    """Of Python numbers, in 64-bit mode, and of arrays that the kernel has read as 32 bits."""
    return np.dtype(new_dtype).type(x) if jnp.ndim(x) == 0 else x.astype(new_dtype)


def _power(x, y):
    return lax.integer_pow(x, y) if y >= 0 else 1 / lax.integer_pow(x, -y)


#: "name dtype" -> the same in terms of others.
WRITTEN = {
    **{f"select_n {dtype}": _select for dtype in _NUMBER + _UINT + _BOOL},
    **{f"integer_pow {dtype}": _power for dtype in _NUMBER},
    "convert_element_type int64 int32": _narrow,
    "convert_element_type float64 float32": _narrow,
    "add_any float32": lambda x, y: x + y,  # this and the next one are in derivatives
    "one_minus_square float32": lambda x: 1 - x * x,
    "not bool": lambda x: jnp.where(x, 0, 1) != 0,
    "is_finite float32": lambda x: jnp.abs(x) < jnp.inf,
    **{f"convert_element_type {dtype} bool": lambda x, **_: x != 0 for dtype in _NUMBER},
    **{f"{name} {dtype}": lambda x, **_: x for name in ("stop_gradient", "copy") for dtype in _NUMBER + _BOOL},
    **{f"convert_element_type {dtype} {dtype}": lambda x, **_: x for dtype in _NUMBER + _UINT + _BOOL},
}
KNOWN = {f"{name} {dtype}" for name, dtypes in LOWERED.items() for dtype in dtypes} | set(WRITTEN) | set(_CALLS)


def why_not(operations) -> str | None:
    """The reason why a kernel cannot compute functions made of these (see `Callable.operations`), or None."""
    unknown = [operation.split() for operation in operations if operation not in KNOWN]
    names = ", ".join(f"{name}({' to '.join(dtypes)})" for name, *dtypes in unknown)
    return f"a predicate or modifier uses primitives that the kernel cannot compute: {names}" if unknown else None


def evaluate(jaxpr, consts, *args):
    """The results of a jaxpr whose operations are all `KNOWN`."""
    values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))

    def read(x):
        return x.val if isinstance(x, Literal) else values[x]

    for equation in jaxpr.eqns:
        results = _apply(equation, list(map(read, equation.invars)))
        values.update(zip(equation.outvars, results, strict=True))
    return list(map(read, jaxpr.outvars))


def _apply(equation, operands):
    primitive, params = equation.primitive, equation.params
    if primitive.name in _CALLS:
        inner = params.get("jaxpr") or params["call_jaxpr"]
        return evaluate(inner.jaxpr, inner.consts, *operands)
    written = WRITTEN.get(operation(equation))
    if written is not None:
        return [written(*operands, **params)]
    results = primitive.bind(*operands, **params)
    return results if primitive.multiple_results else [results]

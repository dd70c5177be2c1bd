"""Which JAX primitives predicates and score modifiers may use in a kernel, and how a tile of their values is computed.

A primitive is in the list when Mosaic lowers it on a tile of scores, for that dtype, as exactly as XLA does; a test
compiles every one of them. A few that Mosaic lacks are written in terms of others here.
"""

import jax.numpy as jnp
from jax import lax
from jax.extend.core import Literal

from jattn._callables import operation

_FLOAT, _INT, _UINT, _BOOL = ("float32",), ("int32",), ("uint32",), ("bool",)
_NUMBER = _FLOAT + _INT
_BITS = _INT + _UINT

#: name -> dtypes of its last operand.
LOWERED = {
    **dict.fromkeys(("add", "sub", "mul", "div", "max", "min", "neg", "sign", "abs", "square", "clamp"), _NUMBER),
    **dict.fromkeys(("integer_pow",), _NUMBER),
    **dict.fromkeys(("exp", "exp2", "log", "sqrt", "rsqrt", "sin", "cos", "tanh", "logistic", "round"), _FLOAT),
    **dict.fromkeys(("rem", "clz", "shift_left", "shift_right_arithmetic"), _INT),
    **dict.fromkeys(("and", "or", "xor"), _INT + _BOOL),
    **dict.fromkeys(("eq", "ne"), _NUMBER + _BOOL),
    **dict.fromkeys(("lt", "le", "gt", "ge"), _NUMBER),
    "shift_right_logical": _BITS,
    "select_n": _NUMBER + _BOOL,
    "not": _INT,
    "bitcast_convert_type": _NUMBER,
    "broadcast_in_dim": _NUMBER + _BOOL,
    "convert_element_type": (
        "int32 float32", "float32 int32", "bool float32", "bool int32", "int32 uint32", "uint32 int32",
        "float32 bfloat16", "bfloat16 float32", "float32 float16", "float16 float32",
        # Kernels read arrays of narrow integers as int32.
        "int8 int32", "int16 int32", "uint8 int32", "uint16 int32",
        "int8 float32", "int16 float32", "uint8 float32", "uint16 float32",
    ),
}  # fmt: skip
_CALLS = ("jit", "custom_jvp_call", "custom_vjp_call")  # computed where they are called

#: "name dtype" -> the same in terms of others.
WRITTEN = {
    "not bool": lambda x, **_: jnp.where(x, 0, 1) != 0,
    "is_finite float32": lambda x, **_: jnp.abs(x) < jnp.inf,
    **{f"convert_element_type {dtype} bool": lambda x, **_: x != 0 for dtype in _NUMBER},
    **{f"{name} {dtype}": lambda x, **_: x for name in ("stop_gradient", "copy") for dtype in _NUMBER + _BOOL},
    **{f"convert_element_type {dtype} {dtype}": lambda x, **_: x for dtype in _NUMBER + _UINT + _BOOL},
}
KNOWN = {f"{name} {dtype}" for name, dtypes in LOWERED.items() for dtype in dtypes} | set(WRITTEN) | set(_CALLS)


def why_not(operations) -> str | None:
    """The reason why a kernel cannot compute functions made of these (see `Callable.operations`), or None."""
    unknown = [operation for operation in operations if operation not in KNOWN]
    if not unknown:
        return None
    name, *dtypes = unknown[0].split()
    of = f" of {' to '.join(dtypes)}" if dtypes else ""
    return f"a predicate or modifier uses the primitive {name}{of}, which the kernel cannot compute"


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
    if primitive.name == "integer_pow" and params["y"] < 0:
        return [1 / lax.integer_pow(operands[0], -params["y"])]
    results = primitive.bind(*operands, **params)
    return results if primitive.multiple_results else [results]

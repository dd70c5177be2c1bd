"""User functions as static pytree data: equal when they would trace to the same thing.

A lambda rebuilt on every call is a new object each time, so comparing functions by identity would recompile each time.
`Callable` compares the code and everything the code can reach that is not an argument: closure cells, defaults, and
the globals it names. Arrays reached that way are refused: they would be baked into the compiled program as constants,
without gradients, and a changed value would go unnoticed.
"""

import functools
import inspect
import types
from collections.abc import Hashable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


class Callable:
    """A hashable wrapper around a user function.

    Args:
        function: the function, called as `function(*leading, *aux)`.
        line: the expression to suggest when `function` closes over an array, e.g. `"mods.score_mod(fn, *arrays)"`.
        arguments: how many it is called with.

    Raises:
        TypeError: `function` is not callable or not with so many arguments, or it closes over an array or over
            something unhashable.
    """

    def __init__(self, function: Any, line: str, arguments: int):
        if not callable(function):
            raise TypeError(f"expected a function, got {type(function).__name__}; write {line}")
        try:
            inspect.signature(function).bind(*range(arguments))
        except TypeError as error:
            name = getattr(function, "__name__", repr(function))
            raise TypeError(f"{name} cannot take {arguments} arguments ({error}); write {line}") from None
        except ValueError:
            pass  # a builtin without a signature: calling it will tell
        self.function = function
        self._key = _identity(function, line)

    def on_tile(self, *args):
        """The function at every element of a tile: `args` have four axes each, of size 1 where they broadcast.

        Mapping it over the axes one by one, instead of calling it on whole arrays, makes it elementwise whatever it
        does: it only ever sees scalars, so no reduction in it can depend on where a tile ends.
        """
        shape = jnp.broadcast_shapes(*(a.shape for a in args))
        mapped = self._on_scalars
        for axis in (3, 2, 1, 0):
            if shape[axis] != 1:
                mapped = jax.vmap(mapped, in_axes=[0 if a.shape[axis] != 1 else None for a in args])
        return mapped(*(a.reshape([n for n in a.shape if n != 1]) for a in args)).reshape(shape)

    def operations(self, dtypes, *, slope: bool = False) -> frozenset[str]:
        """What the function is made of when it is mapped over a tile: "primitive dtype" of every operation, with the
        dtype of its last operand ("convert_element_type from to"), for scalar arguments of these dtypes; and
        with `slope`, its derivative by the first argument."""
        return _operations(self, tuple(map(jnp.dtype, dtypes)), slope, jax.config.jax_enable_x64)

    def _on_scalars(self, *args):
        out = self.function(*args)
        if out is None:
            raise TypeError(f"{self!r} returned None; it must return a scalar")
        out = jnp.asarray(out)
        if out.shape != ():
            raise TypeError(f"{self!r} returned shape {out.shape} for one element; it must return a scalar")
        return out

    def __eq__(self, other):
        return isinstance(other, Callable) and self._key == other._key

    def __hash__(self):
        return hash(self._key)

    def __repr__(self):
        return getattr(self.function, "__name__", None) or repr(self.function)


def with_slope(function):
    """`function(x, ...)`, and the derivative of it by x, of scalars."""

    def both(x, *others):
        result, pull = jax.vjp(lambda x: jnp.asarray(function(x, *others), x.dtype), x)
        return result, pull(jnp.ones_like(result))[0]

    return both


@functools.lru_cache(maxsize=1024)
def _operations(function, dtypes, slope, x64):
    tile = [jax.ShapeDtypeStruct((2, 2), dtype) for dtype in dtypes]
    mapped = jax.vmap(jax.vmap(with_slope(function._on_scalars) if slope else function._on_scalars))
    try:
        return frozenset(_names_of(jax.make_jaxpr(mapped)(*tile).jaxpr))
    except Exception:
        if not slope:
            raise
        return frozenset({f"vjp {dtypes[0]}"})  # such as a loop has none: whoever differentiates will be told


def _names_of(jaxpr):
    for equation in jaxpr.eqns:
        values = jax.tree.leaves(equation.params)
        inner = [getattr(value, "jaxpr", value) for value in values if hasattr(value, "eqns")]
        yield equation.primitive.name if inner else operation(equation)
        for each in inner:
            yield from _names_of(each)


def operation(equation) -> str:
    """The name of an operation in a jaxpr, see `Callable.operations`."""
    dtype = (*equation.outvars, *equation.invars)[-1].aval.dtype
    if equation.primitive.name == "convert_element_type":
        return f"convert_element_type {dtype} {equation.outvars[0].aval.dtype}"
    return f"{equation.primitive.name} {dtype}"


def _identity(function, line) -> Hashable:
    if not isinstance(function, types.FunctionType):
        return _value(function, "the callable itself", line)
    code = function.__code__
    cells = tuple(
        _value(cell.cell_contents, f"closure variable {name!r}", line)
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True)
    )
    defaults = tuple(
        _value(v, "a default argument", line)
        for v in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    )
    names = tuple(
        (name, _value(function.__globals__[name], f"global {name!r}", line))
        for name in sorted(_names(code))
        if name in function.__globals__
    )
    return code, id(function.__globals__), cells, defaults, names


def _names(code) -> set[str]:
    """Names that `code` and the functions defined inside it may look up as globals."""
    inner = (c for c in code.co_consts if isinstance(c, types.CodeType))
    return set(code.co_names).union(*(_names(c) for c in inner))


def _value(value, where, line) -> Hashable:
    if isinstance(value, jax.Array | np.ndarray):
        raise TypeError(
            f"{where} is an array of shape {value.shape}: a function may not close over arrays; "
            f"pass them as aux: {line}"
        )
    if isinstance(value, types.FunctionType) and value.__closure__:
        return _identity(value, line)
    if isinstance(value, tuple):
        return tuple(_value(v, where, line) for v in value)
    if isinstance(value, bool | int | float | complex | np.generic):
        return type(value), repr(value)  # 1, 1.0 and True are equal and trace differently; so do 0.0 and -0.0
    try:
        hash(value)
    except TypeError:
        raise TypeError(f"{where} is an unhashable {type(value).__name__}; pass it as aux: {line}") from None
    return type(value), value

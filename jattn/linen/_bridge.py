"""Layers of `jattn.nnx` as Linen modules: the nnx layer does the work, its variables are Linen's.

It is not Flax's `nnx.bridge.ToLinen`, which draws all parameters at each call, goes on with the drawn ones where
`apply` was given none, and knows no cache that is made after the layer.
"""

import dataclasses

import flax.linen as nn
import jax.numpy as jnp
from flax import errors, nnx
from flax.core import meta, unfreeze
from flax.traverse_util import flatten_dict, unflatten_dict

_BOX = "linen_box"


class Bridge(nn.Module):
    """`layer` is the nnx class. The fields of a subclass are arguments of its constructor, `cache_fields` of its
    `init_cache`; `fixed` are arguments of the constructor that are no fields.
    """

    layer, cache_fields, fixed = None, (), {}

    def run(self, inputs, **call):
        """The nnx layer called with Linen's variables, and a cache written back; from a compact method."""
        if inputs.ndim < 2:
            raise ValueError(f"inputs have shape {inputs.shape}; expected [*B, T, features]")
        layer = nnx.eval_shape(lambda: self._init_cache(self._made(inputs.shape, nnx.Rngs(0)), inputs.shape))
        self._draw_absent(layer, inputs.shape)
        cache, fresh = self._cache(layer, inputs.shape) if self.decode else ({}, True)
        layer = self._filled(layer, {name: variable.value for name, variable in cache.items()})
        out = layer(inputs, decode=self.decode, **call)
        if not fresh:
            for name, x in _tree(layer, nnx.Cache).items():
                cache[name].value = x
        return out

    def _made(self, shape, rngs):
        fields = {x.name: getattr(self, x.name) for x in dataclasses.fields(self)}
        for name in ("parent", "name", *self.cache_fields):
            del fields[name]
        fields |= {name: _boxing(x) for name, x in fields.items() if name.endswith("_init") and x is not None}
        return self.layer(in_features=shape[-1], rngs=rngs, **fields, **self.fixed)

    def _init_cache(self, layer, shape):
        """The layer, with an empty cache if it is to decode."""
        if self.decode:
            layer.init_cache(shape, **{name: getattr(self, name) for name in self.cache_fields})
        return layer

    def _draw_absent(self, layer, shape):
        """Linen's parameters that are not there, all from one key."""
        drawn = {}

        def draw(key, name):
            drawn or drawn.update(_tree(self._made(shape, nnx.Rngs(params=key)), nnx.Param))
            return drawn[name]

        for name in _tree(layer, nnx.Param):
            if not self.has_variable("params", name):
                self.param(name, draw, name)

    def _cache(self, layer, shape):
        """Linen's variables of the cache, and whether this call makes them or `init`, which puts nothing in."""
        absent = not all(self.has_variable("cache", name) for name in _tree(layer, nnx.Cache))
        if absent:
            self._init_cache(layer, shape)  # what the abstract layer has, with numbers
        made = _tree(layer, nnx.Cache)
        variables = {name: self.variable("cache", name, lambda x=x: x) for name, x in made.items()}
        return variables, absent or self.is_initializing()

    def _filled(self, layer, cache):
        """The layer with Linen's parameters and this cache."""
        graphdef, state = nnx.split(layer)
        params, cache = (flatten_dict(unfreeze(x)) for x in (self.variables["params"], cache))
        found = []
        for path, variable in nnx.to_flat_state(state):
            if isinstance(variable, nnx.Cache):
                found.append((path, variable.replace(cache[path])))
                continue
            name, where = "/".join(path), self.scope.path_text
            if path not in params:
                raise errors.ScopeParamNotFoundError(name, where)
            value = meta.unbox(params[path])
            if jnp.shape(value) != variable.shape:
                raise errors.ScopeParamShapeError(name, where, jnp.shape(value), variable.shape)
            found.append((path, variable.replace(value)))
        return nnx.merge(graphdef, nnx.from_flat_state(found))


def _tree(layer, kind):
    """Values of the layer's variables of a kind, in their boxes, as nested dicts."""
    found = {}
    for path, variable in nnx.to_flat_state(nnx.state(layer, kind)):
        box, value = variable.get_metadata().get(_BOX), variable.get_value()
        found[path] = value if box is None else box.replace_boxed(value)
    return unflatten_dict(found)


def _boxing(init):
    """An initialiser for nnx whose variables remember the box that `init` puts around the array."""

    def made(*args, **kwargs):
        x = init(*args, **kwargs)
        if not isinstance(x, meta.AxisMetadata):
            return x
        return nnx.with_metadata(lambda: x.unbox(), **{_BOX: x.replace_boxed(None)})()

    return made

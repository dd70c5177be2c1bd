"""Layers of `jattn.nnx` as Linen modules: the nnx layer does the work, its variables are Linen's.

It is not Flax's `nnx.bridge.ToLinen`, which draws all parameters anew at each call, keeps those that `apply` was not
given, and knows no cache that is made after the layer.
"""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx
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
        layer = nnx.eval_shape(lambda: self._made(inputs.shape, nnx.Rngs(0)))
        params = self._params(layer, inputs.shape)
        cache, fresh = self._cache(layer) if self.decode else ({}, True)
        layer = _filled(layer, params, {name: variable.value for name, variable in cache.items()})
        out = layer(inputs, decode=self.decode, **call)
        if not fresh:
            for name, x in _tree(layer, nnx.Cache).items():
                cache[name].value = x
        return out

    def _made(self, shape, rngs):
        """The nnx layer, with an empty cache if it is to decode."""
        fields = {x.name: getattr(self, x.name) for x in dataclasses.fields(self) if x.name not in ("parent", "name")}
        cache = {name: fields.pop(name) for name in self.cache_fields}
        fields |= {name: _boxing(x) for name, x in fields.items() if name.endswith("_init") and x is not None}
        layer = self.layer(in_features=shape[-1], rngs=rngs, **fields, **self.fixed)
        if self.decode:
            layer.init_cache(shape, **cache)
        return layer

    def _params(self, layer, shape):
        """Linen's parameters; those that are not there are drawn, all from one key."""
        drawn = {}

        def draw(name):
            def init(key):
                drawn or drawn.update(_tree(self._made(shape, nnx.Rngs(params=key)), nnx.Param))
                return drawn[name]

            return init

        expected = _tree(layer, nnx.Param)
        return {
            name: self.param(name, _zeros(tree) if self.has_variable("params", name) else draw(name))
            for name, tree in expected.items()
        }

    def _cache(self, layer):
        """Linen's variables of the cache, and whether this call makes them."""
        expected = _tree(layer, nnx.Cache)
        fresh = self.is_initializing() or not any(self.has_variable("cache", name) for name in expected)
        return {name: self.variable("cache", name, _zeros(tree), None) for name, tree in expected.items()}, fresh


def _zeros(tree):
    """An initialiser of what an empty cache is everywhere, and by which Linen checks shapes of parameters."""
    return lambda key: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), tree)


def _tree(layer, kind):
    """Values of the layer's variables of a kind, in their boxes, as nested dicts."""
    found = {}
    for path, variable in nnx.to_flat_state(nnx.state(layer, kind)):
        box, value = variable.get_metadata().get(_BOX), variable.get_value()
        found[path] = value if box is None else box.replace_boxed(value)
    return unflatten_dict(found)


def _filled(layer, params, cache):
    """The layer with these values."""
    graphdef, state = nnx.split(layer)
    values = {nnx.Param: flatten_dict(unfreeze(params)), nnx.Cache: flatten_dict(unfreeze(cache))}
    found = []
    for path, variable in nnx.to_flat_state(state):
        given = values[type(variable)]
        if path not in given:
            raise ValueError(f"the variables have no {'/'.join(path)}, which the layer needs")
        found.append((path, variable.replace(meta.unbox(given[path]))))
    return nnx.merge(graphdef, nnx.from_flat_state(found))


def _boxing(init):
    """An initialiser for nnx whose variables remember the box that `init` puts around the array."""

    def made(*args, **kwargs):
        x = init(*args, **kwargs)
        if not isinstance(x, meta.AxisMetadata):
            return x
        return nnx.with_metadata(lambda: x.unbox(), **{_BOX: x.replace_boxed(None)})()

    return made

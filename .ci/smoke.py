"""A user's first minute, in an environment that holds jattn's wheel and what it requires: no Flax, no test tools."""

import importlib
import importlib.metadata
import pkgutil
import sysconfig
from importlib.resources import files
from pathlib import Path

import jax
import jax.numpy as jnp

import jattn

assert Path(jattn.__file__).is_relative_to(sysconfig.get_path("purelib")), jattn.__file__
assert jattn.__version__ == importlib.metadata.version("jattn")
assert files(jattn).joinpath("py.typed").is_file()

# Without Flax every module imports but the two that are for it.
modules = {module.name for module in pkgutil.walk_packages(jattn.__path__, "jattn.", onerror=lambda name: None)}
for name in sorted(modules - {"jattn.linen", "jattn.nnx"}):
    importlib.import_module(name)
for name in ("jattn.linen", "jattn.nnx"):
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        assert error.name == "flax", error
    else:
        raise AssertionError(f"{name} imported: Flax is here, and nothing above was shown")

# pip only warns of an extra that does not exist.
extras = importlib.metadata.metadata("jattn").get_all("Provides-Extra")
assert sorted(extras) == ["cuda13", "flax"], extras
assert "cuda13" in importlib.metadata.metadata("jax").get_all("Provides-Extra")

# That the numbers are right is what `python -m jattn` checks.
q, k, v = jax.random.normal(jax.random.key(0), (3, 2, 100, 4, 32))
gradients = jax.jit(jax.grad(lambda *x: (jattn.attention(*x, is_causal=True) ** 2).sum(), (0, 1, 2)))(q, k, v)
assert all(x.shape == q.shape and jnp.isfinite(x).all() and x.any() for x in gradients)
print(f"{len(modules)} modules of {Path(jattn.__file__).parent} import, and attention has a gradient")

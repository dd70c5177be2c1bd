"""Which platform a computation is lowered for, where only one will do.

That is known late, when a traced function is lowered: on a machine with a GPU `jit` may get arrays that live on its
CPU, and `jax.export` may run on a machine without one.
"""

from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

_only_on = Primitive("jattn_only_on")
_only_on.def_impl(lambda x, **_: x)
_only_on.def_abstract_eval(lambda x, **_: x)
batching.primitive_batchers[_only_on] = lambda args, axes, **params: (_only_on.bind(*args, **params), axes[0])


def only_on(platform: str, x, who: str):
    """`x`, in a computation that `who` runs: lowering it for another platform is a NotImplementedError."""
    return _only_on.bind(x, platform=platform, who=who)


def _lower(context, x, *, platform, who):
    module = context.module_context
    platforms = module.platforms
    if tuple(platforms) != (platform,):
        raise NotImplementedError(
            f"{who} can be lowered for {platform} alone, not for {', '.join(platforms)}: export for one platform at a "
            f"time, or name an implementation that runs there"
        )
    # What divides a kernel over devices lives in this process, and inside `shard_map` there is nothing to divide.
    if module.lowering_parameters.for_export and getattr(module.axis_context, "num_devices", 1) > 1:
        raise NotImplementedError(f"{who} can be exported for several devices inside jax.shard_map only")
    return [x]


mlir.register_lowering(_only_on, _lower)

"""Session set-up: eight virtual CPU devices and strict dtype promotion, or with `-m gpu` whatever GPU there is."""

import os
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

_MAPS = Path("/proc/self/maps")
_MOST_MAPS = 30_000  # Linux ends a process that asks for more than 65,530; a compiled program takes six
AOT_PACKAGES = ("jax-cuda13-plugin", "jax-cuda13-pjrt", "nvidia-cuda-nvcc", "nvidia-nvvm")


def _selects(config, marker):
    """Whether the marker expression names `marker` without a "not"."""
    words = config.option.markexpr.replace("(", " ").replace(")", " ").split()
    return any(word == marker and words[max(i - 1, 0)] != "not" for i, word in enumerate(words))


def pytest_configure(config):
    if not _selects(config, "gpu"):
        os.environ["JAX_PLATFORMS"] = "cpu"  # before jax is imported, and for the processes that tests start
    import jax

    if not _selects(config, "gpu"):
        jax.config.update("jax_platforms", "cpu")  # a plug-in may have imported jax already
        jax.config.update("jax_num_cpu_devices", 8)
    jax.config.update("jax_numpy_dtype_promotion", "strict")


def _installed(package):
    try:
        return bool(version(package))
    except PackageNotFoundError:
        return False


def _absent(config):
    """The markers whose tests cannot run here."""
    import jax

    if not (_selects(config, "gpu") and jax.default_backend() == "gpu"):
        yield from ("gpu", "gpus")
    elif jax.device_count() < 2:
        yield "gpus"
    if not all(map(_installed, AOT_PACKAGES)):
        yield "aot"


def pytest_collection_modifyitems(config, items):
    absent = set(_absent(config))
    out = {item for item in items if any(mark.name in absent for mark in item.iter_markers())}
    if out:
        config.hook.pytest_deselected(items=list(out))
        items[:] = [item for item in items if item not in out]


@pytest.fixture(autouse=True, scope="module")
def compiled_programs_are_forgotten():
    """After a module, once there are many: one process runs a thousand tests."""
    yield
    if _MAPS.exists() and _MAPS.read_bytes().count(b"\n") > _MOST_MAPS:
        import jax

        jax.clear_caches()

"""Imports point down only, and importing jattn touches no device."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "jattn"
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(PACKAGE.rglob("*.py"))
}

# Lowest first; a module imports its own layer and those above it in this list. A private module that is not
# named here is a leaf, a public one an op.
LAYERS = (
    ("leaf",),
    ("jattn.reference", "jattn.pallas"),
    ("jattn._mask", "jattn._mask_rules", "jattn.masks", "jattn.mods", "jattn.partials", "jattn.quantize"),
    ("jattn._check", "jattn._dispatch"),
    ("op", "jattn._ring", "jattn._ulysses"),
    ("jattn._flax", "jattn._flax_cache", "jattn.nnx", "jattn.linen"),
    ("jattn", "jattn.__main__"),
)


def layer(module):
    for rank, names in enumerate(LAYERS):
        if module in names or any(module.startswith(name + ".") for name in names if name != "jattn"):
            return rank
    return layer("leaf" if module.split(".")[1].startswith("_") else "op")


def imports(module):
    """Every module that the file of `module` imports, at any depth, as absolute names."""
    path = MODULES[module]
    package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*above, *filter(None, [node.module])])
            for alias in node.names:  # `from a import b` names a module a.b or a name in a
                full = f"{base}.{alias.name}"
                yield full if full in MODULES or not base.startswith("jattn") else base


def inside(name, package):
    return name == package or name.startswith(package + ".")


def offences(rule):
    return [f"{module} imports {name}" for module in MODULES for name in imports(module) if rule(module, name)]


def test_the_package_is_found():
    assert "jattn" in MODULES and "jattn._version" in MODULES


def test_imports_point_down():
    assert not offences(lambda module, name: inside(name, "jattn") and layer(name) > layer(module))


def test_no_private_jax():
    assert not offences(lambda _, name: inside(name, "jax._src"))


def test_only_the_adapters_import_flax():
    adapters = ("jattn.nnx", "jattn.linen")
    assert not offences(
        lambda module, name: inside(name, "flax") and not any(inside(module, adapter) for adapter in adapters)
    )


def test_pallas_enters_through_one_module():
    packages = ("jax.experimental.pallas", "jax.experimental.mosaic", "jaxlib")
    assert not offences(
        lambda module, name: any(inside(name, package) for package in packages) and module != "jattn.pallas._compat"
    )


def test_reference_and_pallas_are_strangers():
    assert not offences(lambda module, name: inside(module, "jattn.reference") and inside(name, "jattn.pallas"))
    assert not offences(lambda module, name: inside(module, "jattn.pallas") and inside(name, "jattn.reference"))


def python(code, **environment):
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.quick
def test_import_initialises_no_backend():
    # No backend of this name exists, so that the first use of a device fails, as the second run shows.
    assert python("import jattn", JAX_PLATFORMS="absent").stderr == ""
    assert "absent" in python("import jax; jax.devices()", JAX_PLATFORMS="absent").stderr


@pytest.mark.quick
def test_import_brings_neither_flax_nor_pallas():
    code = "import jattn, sys; print(*{'flax', 'jax.experimental.pallas'}.intersection(sys.modules))"
    assert python(code).stdout.strip() == ""


def test_no_test_skips():
    """What cannot run here is deselected by its marker, in conftest.py; a skip would hide a missing package."""
    words = {"skip", "skipif", "importorskip"}
    found = [
        f"{path.name}:{node.lineno}"
        for path in sorted(Path(__file__).parent.glob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and node.attr in words and "pytest" in ast.unparse(node)
    ]
    assert not found

"""Which versions of torch and transformers the tests against them need: those of pyproject's group `transformers`."""

import pathlib
import tomllib
import unittest
from importlib.metadata import PackageNotFoundError, version

from packaging.requirements import Requirement


def lacking():
    """What is wrong with either package here, as sentences."""
    project = tomllib.loads((pathlib.Path(__file__).parent.parent / "pyproject.toml").read_text())
    group = [Requirement(x) for x in project["dependency-groups"]["transformers"] if isinstance(x, str)]
    for need in group:
        if need.name not in ("torch", "transformers"):
            continue
        try:
            found = version(need.name)
        except PackageNotFoundError:
            yield f"{need.name} is not installed"
        else:
            if not need.specifier.contains(found, prereleases=True):
                yield f"{need.name} is {found}, not {need.specifier}"


def skip_below():
    """Skips the module that is being imported where they are missing or older."""
    if wrong := list(lacking()):
        raise unittest.SkipTest(f"{'; '.join(wrong)}: pip install --group transformers")

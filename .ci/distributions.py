"""What `dist/` holds: a source distribution that is the checkout, and two wheels, alike, of jattn/ and nothing else."""

import sys
import tarfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = (".ci", "benchmarks", "docs", "jattn", "notebooks", "tests")
FILES = (".gitignore", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "README.md", "pyproject.toml", "run")


def files(folder):
    """Paths from the root, of all but caches."""
    caches = {"__pycache__", ".ipynb_checkpoints"}
    found = (path.relative_to(ROOT) for path in (ROOT / folder).rglob("*") if path.is_file())
    return {str(path) for path in found if not caches & set(path.parts)}


def compare(name, found, expected):
    print(f"{name}: {len(found)} files")
    if found != expected:
        sys.exit(f"{name}: lacks {sorted(expected - found)}, has {sorted(found - expected)} besides")


def bytes_of(path):
    with zipfile.ZipFile(path) as wheel:
        return {name: wheel.read(name) for name in wheel.namelist()}


def main(dist):
    [source] = dist.glob("*.tar.gz")
    with tarfile.open(source) as archive:
        found = {member.name.partition("/")[2] for member in archive if member.isfile()}
    expected = set(FILES).union({"PKG-INFO"}, *map(files, FOLDERS))
    compare(source.name, found, expected)

    [wheel] = dist.glob("*.whl")
    [rebuilt] = dist.glob("of-source/*.whl")
    info = f"{'-'.join(wheel.name.split('-')[:2])}.dist-info"
    metadata = {f"{info}/{name}" for name in ("METADATA", "WHEEL", "RECORD", "licenses/LICENSE")}
    contents = bytes_of(wheel)
    compare(wheel.name, set(contents), files("jattn") | metadata)
    if contents != bytes_of(rebuilt):
        sys.exit("the wheel of the source distribution is another one")


if __name__ == "__main__":
    main(ROOT / "dist")

"""Makes a notebook without outputs of every numbered script here: `python notebooks/build.py [--check]`.

With `--check` nothing is written, and the status is 1 if a notebook is missing or is not that of its script.
"""

import sys
from pathlib import Path

import jupytext
import nbformat

HERE = Path(__file__).resolve().parent


def notebook(script):
    """The text of the notebook; cells are numbered, since random ids would differ every time."""
    found = jupytext.read(script)
    for i, cell in enumerate(found.cells):
        cell.id = f"cell-{i}"
    found.metadata.pop("jupytext", None)
    return nbformat.writes(found) + "\n"


def main(arguments):
    stale = []
    for script in sorted(HERE.glob("[0-9]*.py")):
        target, text = script.with_suffix(".ipynb"), notebook(script)
        if "--check" not in arguments:
            target.write_text(text)
        elif not target.exists() or target.read_text() != text:
            stale.append(target.name)
    if stale:
        print(f"not those of their scripts: {', '.join(stale)}; run python notebooks/build.py")
    return bool(stale)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

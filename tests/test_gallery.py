"""docs/gallery.md is what docs/gallery.py writes, it shows every mask, and the picture is of the same ones."""

import importlib.util
import re
from pathlib import Path

import pytest

from jattn import masks

DOCS = Path(__file__).parents[1] / "docs"


@pytest.fixture(scope="module")
def gallery():
    spec = importlib.util.spec_from_file_location("gallery", DOCS / "gallery.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_what_the_script_writes(gallery):
    assert (DOCS / "gallery.md").read_text() == gallery.page(), "run `./run python docs/gallery.py`"


def test_every_mask_is_shown(gallery):
    code = " ".join(code for _, code, *_ in gallery.MASKS)
    constructors = {name for name in masks.__all__ if callable(getattr(masks, name)) and name.islower()}
    assert len(constructors) == 9
    assert constructors == set(re.findall(r"masks\.(\w+)\(", code))
    assert all(operator in code for operator in "&|~")


def test_no_two_drawings_are_alike(gallery):
    drawings = [mask.draw(*shape) for *_, mask, shape in gallery.entries()]
    seen = [drawing.rsplit("\n", 1)[0] for drawing in drawings]
    assert len(set(seen)) == len(seen) == len(gallery.MASKS)
    assert all({"█", "·"} <= set(drawing) for drawing in seen)


def test_the_picture_is_of_these_masks(gallery, monkeypatch):
    found = gallery.fingerprint()
    assert found.encode() in (DOCS / "gallery.png").read_bytes(), "run `./run python docs/gallery.py`"
    monkeypatch.setattr(gallery, "MASKS", [("Causal", "masks.window(1, 0)", "Another one."), *gallery.MASKS[1:]])
    assert gallery.fingerprint() != found

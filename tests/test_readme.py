"""The README runs, its table is what the implementations say, and the contract names tests that exist."""

import ast
import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
CONTRACT = (ROOT / "docs" / "contract.md").read_text()


def script(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


support_table = script(ROOT / "docs" / "support_table.py")


def test_python_blocks_run(capsys):
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(blocks) == 4
    names = {}
    for block in blocks:
        exec(compile(block, "README.md", "exec"), names)
    printed = capsys.readouterr().out
    for expected in ("runs on xla", "(2, 300, 128)", *re.findall(r"print\(.*\)  # (.*)", README)):
        assert expected in printed


def test_the_support_table_is_what_the_implementations_say():
    assert support_table.within(README)[1] == support_table.table(), "run `./run python docs/support_table.py`"


def test_the_support_table_has_the_reasons(monkeypatch):
    answers = [("causal", {"xla": None, "mosaic": None}), ("float32", {"xla": None, "mosaic": "no float32"})]
    monkeypatch.setattr(support_table, "rows", lambda: iter([*answers, ("packed", {"xla": None})]))
    assert support_table.table().splitlines()[2:] == [
        "| causal | yes | yes |",
        "| float32 | yes | no (1) |",
        "| packed | yes | no |",
        "",
        "1. no float32",
    ]


@pytest.mark.parametrize("path", ["README.md", "CONTRIBUTING.md", "docs/contract.md"])
def test_links_lead_somewhere(path):
    links = re.findall(r"\]\(([^)#:]+)\)", (ROOT / path).read_text())
    assert links
    assert [link for link in links if not (ROOT / path).parent.joinpath(link).exists()] == []


# The contract


def cited():
    """(test file, test function or None) of every `test_x.py::test_y` and `test_x.py` in the contract."""
    return {(file, name or None) for file, name in re.findall(r"`(test_\w+\.py)(?:::(\w+))?`", CONTRACT)}


def functions(file):
    path = ROOT / "tests" / file
    return {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)}


def test_every_test_that_the_contract_names_exists():
    files = {file for file, _ in cited()}
    assert [file for file in files if not (ROOT / "tests" / file).exists()] == []
    known = {file: functions(file) for file in files}
    assert [f"{file}::{name}" for file, name in sorted(cited(), key=str) if name and name not in known[file]] == []


def test_every_line_of_the_contract_names_a_test():
    """A line is a list item; one on ops to come says since when it will hold."""
    points = re.split(r"^## (\d+)\. .*$", CONTRACT, flags=re.MULTILINE)[1:]
    assert [int(number) for number in points[::2]] == list(range(1, 14))
    lines = [" ".join(x.split()) for text in points[1::2] for x in re.split(r"^\* ", text, flags=re.MULTILINE)[1:]]
    assert len(lines) > 40
    assert [x for x in lines if "`test_" not in x and not x.endswith("From the op's first release.")] == []

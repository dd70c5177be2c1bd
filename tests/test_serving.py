"""notebooks/serving.py, at a size that takes seconds: its checks pass, and each of them can fail."""

import dataclasses
import importlib
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

FOLDER = Path(__file__).parents[1] / "notebooks"


@pytest.fixture(scope="module")
def serving():
    """The script, with the `demo` that it imports."""
    before = sys.modules.pop("demo", None)
    sys.path.insert(0, str(FOLDER))
    try:
        yield importlib.import_module("serving")
    finally:
        sys.path.remove(str(FOLDER))
        del sys.modules["serving"], sys.modules["demo"]
        if before is not None:
            sys.modules["demo"] = before


@pytest.fixture(scope="module")
def config(serving):
    model = serving.demo.Config(sequence_length=64, batch=2, width=32, heads=4, kv_heads=2, window=8)
    return serving.Config(requests=7, slots=3, rows=16, pages=40, longest=256, model=model)


@pytest.fixture(scope="module")
def model(serving, config):
    """(graphdef, compiled step, params), one for all tests."""
    graphdef, params = serving.demo.build(serving.demo.jattn_layer, config.model)
    params = jax.tree.map(lambda x: 3 * x, params)  # no two tokens near each other
    return graphdef, serving.step_of(graphdef), params


def test_requests_get_their_tokens_and_pages_come_back(serving, config, model, tmp_path, capsys):
    path = tmp_path / "out" / "serving.png"
    for stored, its_path in (("float32", path), ("int8", None)):
        passed, requests = serving.serve_and_check(*model, config, stored, its_path)
        printed = capsys.readouterr().out
        assert passed and "FAILED" not in printed
        for word in ("tokens/s", "time to first token", "time per output token", "p99", "pages in use", "found in the"):
            assert word in printed
        assert printed.count("  ok: ") == (3 if stored == "float32" else 2)
    assert path.stat().st_size > 1000
    assert all(r.over for r in requests) and any("cancelled" in r.phases for r in requests)
    assert [len(r.answer) for r in requests if "end" in r.phases] == [r.limit for r in requests if "end" in r.phases]
    assert len({tuple(r.answer) for r in requests}) > 4, "the model says one thing to everybody"
    assert sum(r.shared for r in requests) >= 4 * 96, "six pages of the system prompt are shared"


def test_prompts_are_read_beside_decoding_in_chunks(serving, config, model):
    _, step, params = model
    server, requests = serving.Server(step, params, config), serving.requests_of(config)
    serving.serve(server, requests)
    clock, used, idle, reading, decoding = np.array(server.history).T
    assert ((reading > 0) & (decoding > 0)).any() and (reading + decoding <= config.rows).all()
    assert (used + idle <= config.pages).all() and (np.diff(clock) > 0).all()
    first = requests[0]
    assert first.phases["decode"] - first.phases["prefill"] >= len(first.prompt) // config.rows
    assert first.phases["waiting"] <= first.phases["prefill"] < first.phases["decode"] <= first.phases["end"]


def test_waits_where_pages_are_short(serving, config, model):
    """Pages for one request at a time: nobody is lost, nobody runs out halfway, and what is shared stays."""
    _, step, params = model
    server, requests = serving.Server(step, params, config), serving.requests_of(config)
    held = server.allocator.allocate(config.pages - 14)
    serving.serve(server, requests)
    assert server.allocator.used == len(held) and all(r.over for r in requests)
    assert max(row[4] for row in server.history) <= 2 and sum(r.shared for r in requests) > 0


def broken(name, serving, monkeypatch):
    if name == "the same tokens alone":
        real = serving.alone
        monkeypatch.setattr(serving, "alone", lambda *x: {n: answer[:-1] for n, answer in real(*x).items()})
        return "every request got the tokens that it gets alone"
    if name == "a page is kept":
        real = serving.serve
        monkeypatch.setattr(serving, "serve", lambda server, *x: (server.allocator.allocate(1), real(server, *x)))
        return "no page has an owner"
    real = serving.without_a_cache
    one_off = lambda *x: {n: ([t + (i == 0) for i, t in enumerate(own)], y) for n, (own, y) in real(*x).items()}  # noqa: E731
    monkeypatch.setattr(serving, "without_a_cache", one_off)
    return "tokens are those of the model without a cache"


@pytest.mark.parametrize("name", ["the same tokens alone", "a page is kept", "another model"])
def test_every_check_can_fail(name, serving, config, model, monkeypatch, capsys):
    words = broken(name, serving, monkeypatch)
    passed, _ = serving.serve_and_check(*model, dataclasses.replace(config, requests=2), "float32")
    failed = [line for line in capsys.readouterr().out.splitlines() if "FAILED" in line]
    assert not passed and len(failed) == 1 and words in failed[0]


def test_run_is_1_when_a_check_failed(serving, config, model, monkeypatch, tmp_path):
    requests = [serving.Request(0, [0, *serving.SYSTEM, 65], 2, 0, answer=[66, 67])]
    monkeypatch.setattr(serving, "trained", lambda config: (model[0], model[2]))
    for answers, status in (([True, True], 0), ([True, False], 1), ([False, True], 1)):
        told = iter(answers)
        monkeypatch.setattr(serving, "serve_and_check", lambda *x, told=told: (next(told), requests))
        assert serving.run(config, tmp_path) == status


def test_options(serving, monkeypatch):
    seen = []
    monkeypatch.setattr(serving, "run", lambda config: seen.append(config) or 0)
    assert serving.main(["--requests", "3", "--seed", "5", "--training-steps", "7"]) == 0
    (config,) = seen
    assert (config.requests, config.seed, config.model.steps, config.model.seed) == (3, 5, 7, 5)


def test_progress_bar_on_a_terminal(serving, config, model, monkeypatch, capsys):
    _, step, params = model
    server = serving.Server(step, params, config)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    over = serving.Request(0, [0], 1, 0, answer=[65], phases={"end": 3})
    serving.show_progress(0.0, server, [over, serving.Request(1, [0], 1, 0)])
    serving.show_progress(0.0, server, [over, over])
    first, second = capsys.readouterr().out.split("\r")[1:]
    assert "[###############...............]   1/2 done" in first and not first.endswith("\n")
    assert "[" + "#" * 30 + "]" in second and second.endswith("\n")

"""`python -m jattn` describes the machine and fails when attention is wrong on it."""

import jax
import pytest

import jattn
from jattn import __main__ as self_check


@pytest.mark.quick
def test_it_names_versions_devices_and_implementations(capsys):
    assert self_check.main() == 0
    printed = capsys.readouterr().out
    for expected in (f"jattn {jattn.__version__}", f"jax {jax.__version__}", "8 x cpu", "runs on xla", "ok"):
        assert expected in printed
    assert "FAILED" not in printed


def test_a_wrong_gradient_is_found(monkeypatch, capsys):
    right = jattn.attention

    def wrong(query, key, value, **options):
        return right(query, 1.001 * key - 0.001 * jax.lax.stop_gradient(key), value, **options)

    monkeypatch.setattr(jattn, "attention", wrong)
    assert self_check.main() == 1
    printed = capsys.readouterr()
    assert "FAILED" in printed.out and "wrong" in printed.err


def test_a_machine_without_any_implementation_fails(monkeypatch):
    monkeypatch.setattr(self_check, "implementations", lambda case: [])
    assert self_check.main() == 1

"""`./run` makes its environment once, from any Python that works, and never trusts half an environment."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TOOLS = ("sh", "dirname", "cksum", "cat", "mkdir", "rm", "sleep", "cp", "chmod", "grep")

# Stands for an interpreter: writes down its arguments, and `-m venv DIR` copies itself there.
FAKE_PYTHON = """#!/bin/sh
echo "$@" >>"$LOG"
case "$*" in
    "-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
    *"--group "*) [ ! -e "$BREAK" ] ;;
esac
"""
DEAD_SHIM = "#!/bin/sh\necho 'version manager: command not found' >&2\nexit 127\n"


class Checkout:
    """A copy of `run` with a PATH that holds shell tools and the interpreters a test puts there."""

    def __init__(self, folder):
        self.folder = folder
        self.bin = folder / "bin"
        self.bin.mkdir()
        for tool in TOOLS:
            (self.bin / tool).symlink_to(shutil.which(tool))
        shutil.copy(ROOT / "run", folder)
        (folder / "pyproject.toml").write_text("[project]\n")
        self.log = folder / "log"
        self.breaks = folder / "break"

    def program(self, name, text):
        (self.bin / name).write_text(text)
        (self.bin / name).chmod(0o755)

    def __call__(self, *arguments):
        self.log.write_text("")
        environment = {"PATH": str(self.bin), "HOME": str(self.folder), "LOG": str(self.log), "BREAK": str(self.breaks)}
        return subprocess.run(
            [str(self.folder / "run"), *arguments], env=environment, capture_output=True, text=True, timeout=60
        )

    @property
    def installed(self):
        return "--group dev" in self.log.read_text()


@pytest.fixture
def checkout(tmp_path):
    return Checkout(tmp_path)


def test_help_needs_no_python(checkout):
    assert "usage: ./run" in checkout().stdout
    assert "usage: ./run" in checkout("help").stdout


def test_an_unknown_command_is_an_error(checkout):
    result = checkout("tset")
    assert result.returncode == 2 and "unknown command: tset" in result.stderr


def test_without_any_python_it_says_what_it_tried(checkout):
    checkout.program("python3.12", DEAD_SHIM)
    result = checkout("python")
    assert result.returncode == 1
    assert "found no Python >= 3.12" in result.stderr and "no uv" in result.stderr


def test_a_dead_shim_is_passed_over(checkout):
    checkout.program("python3.12", DEAD_SHIM)
    checkout.program("python3", FAKE_PYTHON)
    assert checkout("python", "-V").returncode == 0
    assert checkout.installed


def test_pyenv_versions_are_found(checkout):
    home = checkout.folder / ".pyenv/versions/3.12.1/bin"
    home.mkdir(parents=True)
    (home / "python").write_text(FAKE_PYTHON)
    (home / "python").chmod(0o755)
    assert checkout("python", "-V").returncode == 0


def test_the_second_call_only_runs_the_command(checkout):
    checkout.program("python3.12", FAKE_PYTHON)
    checkout("python", "-V")
    result = checkout("python", "-c", "pass")
    assert result.stderr == "" and checkout.log.read_text() == "-c pass\n"


def test_a_changed_pyproject_installs_again(checkout):
    checkout.program("python3.12", FAKE_PYTHON)
    checkout("python", "-V")
    (checkout.folder / "pyproject.toml").write_text("[project]\nname = 'other'\n")
    checkout("python", "-V")
    assert checkout.installed and "-m venv" not in checkout.log.read_text()


def test_an_interrupted_install_starts_over(checkout):
    checkout.program("python3.12", FAKE_PYTHON)
    checkout.breaks.touch()
    assert checkout("python", "-V").returncode != 0
    leftover = checkout.folder / ".venv" / "leftover"
    leftover.touch()
    checkout.breaks.unlink()
    assert checkout("python", "-V").returncode == 0
    assert checkout.installed and not leftover.exists()


def test_commands_see_the_package_and_their_arguments(checkout):
    checkout.program("python3.12", FAKE_PYTHON)
    checkout("test", "-k", "two words")
    assert checkout.log.read_text().endswith("-m pytest -n auto --maxprocesses 8 --dist worksteal -k two words\n")
    checkout("test", "-m", "gpu")
    assert checkout.log.read_text() == "-m pytest -m gpu\n"


def test_kernels_have_an_environment_and_files_of_their_own(checkout):
    checkout.program("python3.12", FAKE_PYTHON)
    (checkout.folder / "tests").mkdir()
    (checkout.folder / "tests/test_one.py").write_text("@pytest.mark.aot\n")
    (checkout.folder / "tests/test_two.py").write_text("@pytest.mark.gpu\n")
    checkout("kernels", "-k", "two words")
    assert "--group aot" in checkout.log.read_text()
    assert checkout.log.read_text().endswith("--dist worksteal -m aot tests/test_one.py -k two words\n")
    assert (checkout.folder / ".venv-aot/run-state").exists() and not (checkout.folder / ".venv").exists()

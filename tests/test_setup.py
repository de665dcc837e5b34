"""The scripts that set up the environment: from anywhere, by a link, over what is half there."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
STANDIN = """#!/bin/sh
printf '%s\\n' "$PWD: $*" >>"$ASKED"
case "$*" in "-m pip --version") exit "$NO_PIP" ;; *"pip install"*) exit "$NO_INDEX" ;; esac
"""


@pytest.fixture
def clone(tmp_path):
    """A copy of what set-up reads, at an odd path, and an environment whose Python writes down what it is asked."""
    clone = tmp_path / "a clonë"
    (clone / "scripts").mkdir(parents=True)
    for name in ("pyproject.toml", "scripts/constraints.txt", "scripts/setup.sh", "scripts/quickstart.sh"):
        shutil.copy(ROOT / name, clone / name)
    python = clone / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(STANDIN)
    python.chmod(0o755)
    return clone


def quickstart(script, cwd, no_pip=0, no_index=0, **env):
    """Run the script; return its exit code, what it said on stderr, and what Python was asked, a line each."""
    asked = cwd / "asked"
    asked.unlink(missing_ok=True)
    env = {k: v for k, v in os.environ.items() if k != "PLORA_VENV"} | env
    env |= {"ASKED": str(asked), "NO_PIP": str(no_pip), "NO_INDEX": str(no_index)}
    done = subprocess.run(
        ["sh", str(script), "--out", "x"], cwd=cwd, env=env, capture_output=True, text=True, timeout=60
    )
    return done.returncode, done.stderr, asked.read_text().splitlines() if asked.exists() else []


def test_a_link_serves_from_anywhere_and_a_second_run_starts_at_once(clone, tmp_path):
    link = tmp_path / "link.sh"
    link.symlink_to(clone / "scripts" / "quickstart.sh")
    begun = f"{tmp_path}: -m plora_jax quickstart --out x"  # where it was called
    code, said, asked = quickstart(link, tmp_path)
    assert (code, said, asked[-1]) == (0, "", begun)
    assert sum("pip install" in line for line in asked) == 2
    asked = quickstart(link, tmp_path)[2]
    assert not any("-m pip" in line for line in asked) and asked[-1] == begun


def test_a_clone_that_was_moved_is_installed_again(clone, tmp_path):
    quickstart(clone / "scripts" / "quickstart.sh", tmp_path)
    moved = clone.rename(tmp_path / "moved")
    asked = quickstart(moved / "scripts" / "quickstart.sh", tmp_path)[2]
    assert any("pip install" in line for line in asked)


def test_a_pip_that_is_half_there_is_put_right(clone, tmp_path):
    assert any(
        "-m ensurepip" in line
        for line in quickstart(clone / "scripts" / "quickstart.sh", tmp_path, no_pip=1)[2]
    )
    assert not any(
        "-m ensurepip" in line for line in quickstart(clone / "scripts" / "quickstart.sh", tmp_path)[2]
    )


def test_packages_that_do_not_come_end_in_one_message(clone, tmp_path):
    code, said, asked = quickstart(clone / "scripts" / "quickstart.sh", tmp_path, no_index=1)
    assert code == 1 and said.startswith("The packages could not be installed")
    assert "quickstart" not in asked[-1]
    assert not list(clone.rglob(".plora-installed"))


def test_a_directory_that_is_no_environment_is_left_alone(clone, tmp_path):
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis").write_text("all of it")
    code, said, _ = quickstart(clone / "scripts" / "quickstart.sh", tmp_path, PLORA_VENV=str(mine))
    assert code == 1 and f"{mine} is no virtual environment" in said
    assert (mine / "thesis").read_text() == "all of it"

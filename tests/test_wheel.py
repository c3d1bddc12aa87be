"""The wheel, installed without the repository. Catches a package or a data file left out, an import of the repository.

The environment holds the wheel and nothing else of ours: the packages it depends on are those of the running one.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PATCHES = sorted((ROOT / "patches" / "megatron-lm-0.19").glob("*.patch"))


def run(*command, **options):
    environment = os.environ | {"PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"}
    # neither may lead back to the repository
    environment.pop("PYTHONPATH", None)
    environment |= {"GIT_CONFIG_GLOBAL": os.devnull}
    return subprocess.run([str(word) for word in command], capture_output=True, text=True, env=environment, **options)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built from a copy: a build leaves folders behind, and an older build's files get into a newer one."""
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("bebop_megatron", "patches"):
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    options = ("--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check", "-w", source / "dist")
    done = run(sys.executable, "-m", "pip", "wheel", *options, source)
    assert done.returncode == 0, done.stdout + done.stderr
    (file,) = (source / "dist").glob("*.whl")
    return file


@pytest.fixture(scope="module")
def python(wheel, tmp_path_factory):
    """The interpreter of an environment into which the wheel was installed."""
    home = tmp_path_factory.mktemp("fresh")
    venv.create(home, with_pip=False)
    python = home / "bin" / "python"
    options = ("--no-deps", "--no-index", "--no-compile", "--disable-pip-version-check")
    done = run(sys.executable, "-m", "pip", "--python", python, "install", *options, wheel)
    assert done.returncode == 0, done.stdout + done.stderr
    (packages,) = home.glob("lib/python3*/site-packages")
    # the folders themselves, so that .pth files in it, an editable install of ours among them, are not read
    folders = [path for path in sys.path if path.endswith("site-packages")]
    (packages / "dependencies.pth").write_text("\n".join(folders) + "\n")
    return python


def test_it_holds_every_file_of_the_package(wheel):
    held = set(zipfile.ZipFile(wheel).namelist())
    assert not [name for name in held if not name.startswith(("bebop_megatron/", "bebop_megatron-"))]
    package = (p for p in (ROOT / "bebop_megatron").rglob("*") if p.is_file() and p.suffix != ".pyc")
    wanted = {p.relative_to(ROOT).as_posix() for p in package if p.name != "README.md"}
    wanted |= {
        p.relative_to(ROOT.resolve()).as_posix().replace("patches", "bebop_megatron/patches", 1) for p in PATCHES
    }
    assert wanted - held == set(), "a data file needs a line in pyproject.toml, [tool.setuptools.package-data]"


def test_it_works_without_the_repository(python, tmp_path):
    """One process for all that imports Megatron."""
    program = """if True:
        import sys
        import bebop_megatron.mcore, bebop_megatron.pretrain
        from bebop_megatron import doctor
        from bebop_megatron.estimate.__main__ import main
        print(bebop_megatron.__file__)
        bebop_megatron.mcore.install()
        bebop_megatron.mcore.uninstall()
        assert doctor.main(["--json"]) == 0
        main(["--preset", "qwen3.5-35b-a3b", "--world-size", "16", "--tp", "2", "--ep", "8", "--seq-length", "16384"])
    """
    done = run(python, "-c", program, cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    assert Path(done.stdout.splitlines()[0]).is_relative_to(python.parent.parent)
    assert "parameters" in done.stdout


def test_its_patches_apply_and_come_off(python, tmp_path):
    tree = tmp_path / "tree"
    info = tree / "megatron" / "core" / "package_info.py"
    info.parent.mkdir(parents=True)
    info.write_text("MAJOR = 0\nMINOR = 19\nPATCH = 1\n")
    for patch in PATCHES:
        # what the hunks take for granted is enough of a script
        before = re.findall(r"^[ -](?!-- )(.*\n)", patch.read_text().split("\n@@", 1)[1], flags=re.M)
        (tree / f"{patch.stem}.py").write_text("".join(before))
    scripts = {file: file.read_bytes() for file in tree.glob("*.py")}
    for command in (("init", "-q"), ("add", "."), ("commit", "-qm", "release")):
        assert run("git", "-c", "user.name=t", "-c", "user.email=t@t", *command, cwd=tree).returncode == 0
    for action in ("check", "apply", "revert"):
        done = run(python, "-m", "bebop_megatron.patch", "--megatron", tree, action, cwd=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
        assert all(patch.stem in done.stdout for patch in PATCHES)
        assert all((file.read_bytes() == text) == (action != "apply") for file, text in scripts.items())

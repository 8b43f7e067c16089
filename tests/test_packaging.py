"""What is installed: every folder a package, every package in the wheel, the command anywhere."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import headstart

tomllib = pytest.importorskip("tomllib", reason="tomllib needs Python 3.11")
ROOT = Path(__file__).parents[1]
FOLDERS = ("train", "heads", "data", "conf", "eval")
NOT_BUILT_FROM = shutil.ignore_patterns(
    ".*", "build", "dist", "*.egg-info", "runs", "tests", "__pycache__"
)


def project() -> dict[str, dict]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_every_package_is_listed_for_the_wheel():
    inits = [init for folder in FOLDERS for init in (ROOT / folder).rglob("__init__.py")]
    found = {".".join(("headstart", *init.parent.relative_to(ROOT).parts)) for init in inits}
    assert set(project()["tool"]["setuptools"]["packages"]) == found | {"headstart"}


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_folder_with_modules_is_a_package(folder):
    modules = (ROOT / folder).rglob("*.py")
    assert not {m.parent for m in modules if not (m.parent / "__init__.py").exists()}


def test_the_version_is_told_once():
    assert headstart.__version__ == project()["project"]["version"]


def test_no_module_is_named_like_one_of_the_standard_library():
    names = {path.stem for path in ROOT.glob("*.py")} - {"__init__", "__main__"}
    assert not names & sys.stdlib_module_names


def test_test_files_have_unique_names_and_no_packages():
    files = list((ROOT / "tests").rglob("*.py"))
    assert len({f.name for f in files}) == len(files)
    assert not [f for f in files if f.name == "__init__.py"]


def call(*command: str, cwd: Path, **environment: str) -> str:
    """Run a command and return what it printed; its error output is shown when it fails."""
    done = subprocess.run(
        command,
        cwd=cwd,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Build the wheel from a copy, so that nothing old leaks in and nothing is left behind."""
    root = tmp_path_factory.mktemp("wheel")
    shutil.copytree(ROOT, root / "source", ignore=NOT_BUILT_FROM)
    options = ["--wheel", "--no-isolation", "--outdir", str(root)]
    call(sys.executable, "-m", "build", *options, cwd=root / "source")
    (built,) = root.glob("*.whl")
    return built


def test_the_wheel_holds_every_module_yaml_file_and_template(wheel):
    files = [*ROOT.glob("*.py"), ROOT / "py.typed", *(ROOT / "eval/templates").iterdir()]
    for folder in FOLDERS:
        files += [*(ROOT / folder).rglob("*.py"), *(ROOT / folder).rglob("*.yaml")]
    wanted = {f"headstart/{f.relative_to(ROOT)}" for f in files}
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if not name.startswith("headstart-")}
    assert held == wanted


def test_the_wheel_runs_in_another_directory(wheel, tmp_path):
    """The rest of the environment stands in for the dependencies; the package is the wheel's."""
    site = tmp_path / "site"
    install = ["install", "--quiet", "--no-deps", "--no-index", "--target", str(site), str(wheel)]
    call(sys.executable, "-m", "pip", *install, cwd=tmp_path)
    (tmp_path / "elsewhere").mkdir()
    away = {"cwd": tmp_path / "elsewhere", "PYTHONPATH": str(site)}
    where = call(sys.executable, "-c", "import headstart; print(headstart.__file__)", **away)
    assert Path(where.strip()).is_relative_to(site)
    shown = call(str(site / "bin" / "headstart"), "train", "rows=rows", "--cfg", "job", **away)
    assert "rows: rows" in shown
    assert list((tmp_path / "elsewhere").iterdir()) == []

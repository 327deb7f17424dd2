"""The installed wheel: its contents, its import time, and that it runs.

All tests use the distribution that pip installed, never the source tree, except for the list of
expected files.
"""

import base64
import hashlib
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

import electra_fast

TREE = Path(__file__).resolve().parent.parent
SITE_PACKAGES = Path(sysconfig.get_paths()["platlib"]).resolve()
SCRIPTS = Path(sysconfig.get_paths()["scripts"])
IMPORT_SECONDS = 1.0

IMPORT_ALL = """
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
import torch
assert not torch.cuda.is_initialized()
"""
IMPORT_COST = """
import time
import torch
start = time.perf_counter()
import electra_fast
print(time.perf_counter() - start)
"""


def installed_files() -> set[str]:
    files = importlib.metadata.files("electra-fast")
    assert files, "electra-fast is not installed: run `make test`"
    return {str(file) for file in files}


def is_editable() -> bool:
    """Returns whether the source tree is installed, as by `maturin develop`."""
    origin = importlib.metadata.distribution("electra-fast").read_text("direct_url.json")
    return bool(origin and json.loads(origin).get("dir_info", {}).get("editable"))


def run(*command: str) -> subprocess.CompletedProcess[str]:
    """Runs a command in `/` with GPUs hidden, as on a machine without one."""
    inherited = (
        "PYTHONPYCACHEPREFIX",
        "PYTHONDONTWRITEBYTECODE",
    )  # compiling bytecode would take longer than the rest
    environment = {key: value for key, value in os.environ.items() if key in inherited or not key.startswith("PYTHON")}
    environment["CUDA_VISIBLE_DEVICES"] = ""
    result = subprocess.run(command, cwd="/", env=environment, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, f"{command} failed:\n{result.stdout}{result.stderr}"
    return result


of_the_wheel = pytest.mark.skipif(is_editable(), reason="about the wheel; this is an editable installation of the tree")


@of_the_wheel
def test_installed_package_is_under_test() -> None:
    location = Path(electra_fast.__file__).resolve()
    assert location.is_relative_to(SITE_PACKAGES), f"{location} is not the installed wheel: run `make test`"
    assert not location.is_relative_to(TREE)


@of_the_wheel
def test_extension_uses_stable_abi() -> None:
    assert "electra_fast/_data.abi3.so" in installed_files()
    wheel = importlib.metadata.distribution("electra-fast").read_text("WHEEL")
    assert wheel is not None and "Tag: cp311-abi3-" in wheel
    assert {"electra_fast/py.typed", "electra_fast/_data.pyi"} <= installed_files()


@of_the_wheel
def test_wheel_contains_exactly_the_sources() -> None:
    root = TREE / "python"
    package = {str(path.relative_to(root)) for path in (root / "electra_fast").rglob("*.py")}
    kernels = {f"electra_fast/kernels/{path.name}" for path in (TREE / "kernels").glob("*.py")}
    installed = {file for file in installed_files() if file.startswith("electra_fast/") and file.endswith(".py")}
    assert installed == package | kernels


@of_the_wheel
def test_wheel_contains_license() -> None:
    assert any(file.endswith("dist-info/licenses/LICENSE") for file in installed_files())
    assert importlib.metadata.metadata("electra-fast")["License-Expression"] == "Apache-2.0"


FOLDERS = {"workspace": TREE / "crates", "registry": Path.home() / ".cargo", "build": Path.home() / ".cache"}


@of_the_wheel
@pytest.mark.parametrize("folder", FOLDERS.values(), ids=FOLDERS)
def test_wheel_has_no_paths_of_the_build_machine(folder: Path) -> None:
    files = [file for file in importlib.metadata.files("electra-fast") or [] if file.suffix != ".pyc"]
    shipped = [file for file in files if file.parts[0] == "electra_fast" or "sboms" in file.parts]
    assert {".so", ".json"} <= {file.suffix for file in shipped}
    assert not [str(file) for file in shipped if f"{folder}/".encode() in file.read_binary()]


@of_the_wheel
def test_sbom_lists_crates_and_matches_record() -> None:
    file = next(file for file in importlib.metadata.files("electra-fast") or [] if "sboms" in file.parts)
    content = file.read_binary()
    names = {component["name"] for component in json.loads(content)["components"]}
    assert {"electra-data", "arrow-array", "tokenizers"} <= names
    digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode().rstrip("=")
    assert file.hash is not None and (file.hash.value, file.size) == (digest, len(content))


def test_links_of_the_description_work_on_a_package_index() -> None:
    # `metadata(...).get_payload()` is empty once a library has imported importlib_metadata.
    description = importlib.metadata.distribution("electra-fast").read_text("METADATA") or ""
    links = re.findall(r"\]\(([^)]+)\)|(?:href|src)=[\"']([^\"']+)", description)
    assert len(links) > 5
    assert not [link for pair in links for link in pair if link and not link.startswith("https://")]


@pytest.mark.slow
@pytest.mark.process
def test_every_module_imports_from_anywhere_without_a_gpu() -> None:
    sources = [Path(file) for file in installed_files() if file.startswith("electra_fast/")]
    dotted = [".".join(path.with_suffix("").parts) for path in sources if path.suffix == ".py"]
    modules = [name.removesuffix(".__init__") for name in dotted]
    run(sys.executable, "-W", "error", "-c", IMPORT_ALL, "electra_fast._data", *sorted(modules))


@pytest.mark.process
def test_import_time() -> None:
    """Takes the best of three tries, since the machine may be busy."""
    seconds = (float(run(sys.executable, "-c", IMPORT_COST).stdout) for _ in range(3))
    assert any(duration < IMPORT_SECONDS for duration in seconds)


@pytest.mark.process
def test_command_starts() -> None:
    assert importlib.metadata.version("electra-fast") in run(str(SCRIPTS / "electra-fast"), "--version").stdout
    assert "pretrain" in run(sys.executable, "-m", "electra_fast", "--help").stdout


@pytest.mark.process
def test_public_names_are_functions_after_submodule_imports():
    """`electra_fast.pretrain` is the function even after its module is imported; data functions need no torch."""
    program = (
        "import sys, electra_fast as ef; ef.prepare, ef.Corpus, ef.Config; assert 'torch' not in sys.modules;"
        "from electra_fast.training.pretrain import Result; import electra_fast.training.evaluate;"
        "import electra_fast.finetuning.predict;"  # metrics and plots need these modules; they take a second to import
        "assert not {'matplotlib', 'scipy', 'sklearn', 'transformers'} & sys.modules.keys();"
        "assert all(callable(getattr(ef, n)) for n in ef.__all__ if n != '__version__');"
        "assert not hasattr(ef, 'nonsense')"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd="/")


@pytest.mark.process
def test_dir_lists_public_names_without_imports():
    program = (
        "import sys, electra_fast as ef; assert set(dir(ef)) == set(ef.__all__); assert 'numpy' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd="/")

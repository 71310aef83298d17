"""The package under other versions of Python, of JAX and of other libraries.

`python -m tests.versions newest` takes the newest Python that is installed, and what pip takes on
it; `lowest` takes Python 3.11 and the lowest versions that `pyproject.toml` allows. Both install
the wheel, and run the tests marked `newest` against it; `newest` also runs what README prints.
`matrix` prints how many of the quick tests pass with each Python and JAX, as the table of
CONTRIBUTING.md. Each has an environment of its own.
"""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from .documents import ROOT, blocks


_PYTHONS, _JAXES = ("3.11", "3.12", "3.13"), ("0.10.2", "0.11.2", "newest")
# What `make demo` runs, and the second command of README.
_COMMANDS = (
    ("simulate", "gpt3-175b-h100-4096", "--samples", "100000"),
    ("diagnose", "gpt3-175b-h100-4096", "--step-time", "1.9"),
)
_TESTS = ("-n", "2", "--dist", "worksteal", "-q", "--durations", "10", "--durations-min", "1")
_VERSION = "import sys; v = sys.version_info; print(f'{v[0]}.{v[1]}' if v[3] == 'final' else '')"


def python_of(version: str) -> str | None:
    """A released Python of a version such as `3.13`: of the path, or of pyenv, which may refuse to
    run what it has on the path. `None` if there is none.
    """
    names = [f"python{version}", sys.executable]
    if shutil.which("pyenv"):
        root = subprocess.run(["pyenv", "root"], capture_output=True, text=True).stdout.strip()
        names += map(str, sorted(Path(root, "versions").glob(f"{version}.*/bin/python")))
    for name in filter(shutil.which, names):
        asked = subprocess.run([name, "-c", _VERSION], capture_output=True, text=True)
        if asked.stdout.strip() == version:
            return name
    return None


def newest(folder: Path) -> None:
    """What the module says of `newest`."""
    found = filter(None, (python_of(f"3.{minor}") for minor in range(30, 11, -1)))
    python = next(found, None)
    if python is None:
        print("No Python 3.12 or newer is installed: the newest versions are not tested.")
        return
    commands, checkout = _installed(python, folder, [])
    _run(commands / "prism-jax", "doctor", folder=folder)
    for words in _COMMANDS:
        _run(commands / "prism-jax", *words, folder=folder)
    (lines,) = (code.text for code in blocks(ROOT / "README.md") if code.language == "python")
    _run(commands / "python", "-W", "error", "-c", lines, folder=folder)
    _run(commands / "pytest", *_TESTS, "-m", "newest and not slow", folder=checkout)


def lowest(folder: Path) -> None:
    """What the module says of `lowest`."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    bounds = [*project["dependencies"], *_bounds(project["optional-dependencies"], "test")]
    pins = [bound.replace(">=", "==") for bound in bounds]
    jax = next(pin for pin in pins if pin.startswith("jax="))
    version = project["requires-python"].removeprefix(">=")
    python = python_of(version)
    if python is None:
        print(f"No Python {version} is installed: the lowest versions are not tested.")
        return
    commands, checkout = _installed(python, folder, [*pins, jax.replace("jax", "jaxlib")])
    _run(commands / "pytest", *_TESTS, "-m", "newest and not slow", folder=checkout)


def _bounds(extras: Mapping[str, Sequence[str]], extra: str) -> Iterator[str]:
    """What an extra needs, and those that it names."""
    for bound in extras[extra]:
        if names := re.fullmatch(r"prism-jax\[(.+)\]", bound):
            for name in names[1].split(","):
                yield from _bounds(extras, name)
        else:
            yield bound


def _installed(python: str, folder: Path, pins: list[str]) -> tuple[Path, Path]:
    """Installs the wheel with other packages into a new environment, which stands in a folder.

    **Returns:**

    The folder of its commands, and a checkout without the package, whose tests can only import what
    is installed.
    """
    shutil.rmtree(folder, ignore_errors=True)
    built = folder / "dist"
    _run(Path(sys.executable).with_name("hatchling"), "build", "-d", built)
    (wheel,), (source,) = built.glob("*.whl"), built.glob("*.tar.gz")
    commands = _environment(python, folder / "venv", [f"{wheel}[test]", *pins])
    with tarfile.open(source) as archive:
        archive.extractall(folder, filter="data")
    checkout = folder / source.name.removesuffix(".tar.gz")
    shutil.rmtree(checkout / "prism_jax")
    (folder / "shared").symlink_to(ROOT.parent / "shared")
    imported = "import prism_jax; assert 'site-packages' in prism_jax.__file__"
    _run(commands / "python", "-c", imported, folder=checkout)
    return commands, checkout


def _environment(python: str, folder: Path, packages: list[str]) -> Path:
    """Makes an environment with packages, and returns the folder of its commands."""
    _run(python, "-m", "venv", "--clear", folder)
    pip = ("-m", "pip", "install", "--disable-pip-version-check", "--quiet", "--no-compile")
    _run(folder / "bin/python", *pip, *packages)
    return folder / "bin"


def _run(*words: str | Path, folder: Path = ROOT) -> None:
    """Runs a command, without the variables by which Python would look elsewhere for modules.

    **Raises:**

    `CalledProcessError` if it fails.
    """
    kept = {name: text for name, text in os.environ.items() if not name.startswith("PYTHON")}
    print("+", *words, flush=True)
    subprocess.run(words, cwd=folder, env=kept, check=True)


def matrix(folder: Path) -> None:
    """What the module says of `matrix`. What the tests print stays in the folder."""
    print("| Python |", " | ".join(f"JAX {jax}" for jax in _JAXES), "|")
    print("|---" * (1 + len(_JAXES)) + "|")
    for version in _PYTHONS:
        passed = [_passed(version, jax, folder / f"{version}-{jax}") for jax in _JAXES]
        print(f"| {version} |", " | ".join(passed), "|", flush=True)


def _passed(version: str, jax: str, folder: Path) -> str:
    """How many of the quick tests pass with a Python and a JAX."""
    python = python_of(version)
    if python is None:
        return "no such Python"
    pins = [] if jax == "newest" else [f"jax=={jax}", f"jaxlib=={jax}"]
    try:
        commands = _environment(python, folder, ["-e", f"{ROOT}[test]", *pins])
    except subprocess.CalledProcessError:
        return "pip takes none"
    asked = [commands / "python", "-c", "import jax; print(jax.__version__)"]
    taken = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    if jax == "newest" and taken in _JAXES:
        return f"{taken} is the newest"
    words = [commands / "pytest", *_TESTS, "-m", "not slow"]
    told = subprocess.run(words, cwd=ROOT, capture_output=True, text=True).stdout
    (folder / "tests.txt").write_text(told)
    count = re.sub(r" in [\d.]+s.*", "", told.strip().splitlines()[-1])
    return f"{taken}: {count}" if jax == "newest" else count


if __name__ == "__main__":
    task = {"newest": newest, "lowest": lowest, "matrix": matrix}[sys.argv[1]]
    task(ROOT / f".venv-{sys.argv[1]}")

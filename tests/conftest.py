import gc
import importlib.util
import json
import os
import pathlib
import signal

import jax
import pytest
from jaxtyping import install_import_hook

from .chromium import chromium


# Where it is imported from: the checkout, or where it is installed.
_PACKAGE = pathlib.Path(str(getattr(importlib.util.find_spec("prism_jax"), "origin", ""))).parent
# The files whose functions give the shapes of arrays, which the tests check in each call. Pyright
# checks all other types: to check those in each call as well takes tests up to ten times as long.
# So it would in packages about single ops and kernels, of which most functions take no array.
_SINGLE = ("schedule", "lowering", "cluster")
_FILES = [
    file
    for file in sorted(_PACKAGE.rglob("*.py"))
    if "jaxtyping" in file.read_text() and file.parent.name not in _SINGLE
]
install_import_hook(
    [".".join(file.relative_to(_PACKAGE.parent).with_suffix("").parts) for file in _FILES],
    "beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))",
)
jax.config.update("jax_enable_x64", True)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_num_cpu_devices", 2)

# What JAX keeps would be looked through again and again, for 7 % of the time of all tests.
gc.set_threshold(100_000, 50, 50)

# The files whose tests are marked `newest`: a third of all quick tests, of what reads the inside of
# JAX, and of what stands on Python and other libraries; they compile little.
_NEWEST = """
bad_input chakra cli compile data data_errors distance engine evaluate files host importers kineto
latency law levels maxplus measure nsight plot random refused_calls refused_commands summary trace
workers wrong_types
"""

_SHARED = pathlib.Path(__file__).parents[2] / "shared"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    marked = {f"test_{name}" for name in _NEWEST.split()}
    for item in items:
        if item.path.stem in marked:
            item.add_marker("newest")


@pytest.fixture
def answered(capsys):
    """A function that runs a command, which ends well, and returns what it prints: with `--json`,
    the object.
    """
    from prism_jax.cli import main

    def run(words):
        assert main([*map(str, words)]) == 0
        printed = capsys.readouterr().out
        return json.loads(printed) if "--json" in words else printed

    return run


@pytest.fixture
def refused(capsys):
    """A function that runs a command, which is refused, and returns what it says: one line, besides
    notes.
    """
    from prism_jax.cli import main

    def run(words):
        assert main([*map(str, words)]) == 2
        said = capsys.readouterr()
        lines = said.err.splitlines()
        (line,) = (line for line in lines if not line.startswith("prism-jax: note: "))
        assert len(line) < 700  # Of which a path is a part.
        assert said.out == ""
        return said.err

    return run


@pytest.fixture
def written(tmp_path):
    """A function that writes a text, or its lines, to a file of a name, and returns its path."""

    def write(name, text):
        path = tmp_path / name
        path.write_text(text if isinstance(text, str) else "\n".join(text))
        return path

    return write


@pytest.fixture
def ctrl_c():
    """A function that interrupts: the signal has been handled when it returns. Only in the main
    thread, as that of the whole process comes to any. Also where it is ignored, as a shell does in
    what it runs in the background.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield lambda: signal.raise_signal(signal.SIGINT)
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="session")
def shared():
    """The folder of oracles and measurements beside the repository; not part of it."""
    if not (_SHARED / "data").is_dir():
        if os.environ.get("CI") == "true":
            pytest.fail(f"CI must have the shared data at {_SHARED}.")
        pytest.skip("the shared oracles and measurements are not beside this checkout")
    return _SHARED


@pytest.fixture(scope="session")
def _chromium():
    with chromium() as opened:
        yield opened


@pytest.fixture
def browser(_chromium):
    """Chromium, whose width, media and scheme are after a test what they were before it."""
    yield _chromium
    _chromium.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    _chromium.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "", "features": []})


@pytest.fixture(autouse=True, scope="session")
def _compiled_once(pytestconfig):
    """The processes of a test run share what they compile, and keep it for the next run."""
    cache = getattr(pytestconfig, "cache", None)
    if cache is None:  # With `-p no:cacheprovider`.
        return
    jax.config.update("jax_compilation_cache_dir", str(cache.mkdir("compiled")))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


@pytest.fixture(autouse=True, scope="module")
def _room_for_compiled_code():
    """Linux lets a process map 65,530 pieces of memory, and each compiled function takes dozens:
    what many tests have compiled ends in a segmentation fault.
    """
    yield
    maps = pathlib.Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > 30_000:
        jax.clear_caches()

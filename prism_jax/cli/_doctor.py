import importlib.metadata
import os
import platform
import shutil
from collections.abc import Iterator
from typing import Any

from .._cache import VARIABLE, cache_folder
from .._summary import Table
from ._load import use_all_cores
from ._options import Given, Output, command


_PACKAGES = ("prism-jax", "jax", "jaxlib", "equinox", "numpy", "scipy", "polars", "msgspec")
_OPTIONAL = ("matplotlib", "torch")


@command("")
def run(given: Given) -> Output:
    """Check the installation, and print versions, devices and caches for a bug report."""
    del given
    versions = {name: _version(name) for name in (*_PACKAGES, *_OPTIONAL)}
    cache, problems = _cache()
    devices, found = _devices()
    problems += found
    problems += [f"`{name}` is not installed." for name in _PACKAGES if versions[name] is None]
    if versions["jax"] != versions["jaxlib"]:
        problems.append(
            f"jax {versions['jax']} and jaxlib {versions['jaxlib']} differ; install one version of "
            "both."
        )
    result = {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "versions": versions,
        "cores": os.cpu_count(),
        "devices": devices,
        "cache": cache,
        "problems": problems,
    }
    return Output(result, [*_blocks(result)])


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _devices() -> tuple[dict[str, int], list[str]]:
    """The number of devices of each kind, and whether JAX computes the same on them as NumPy."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    use_all_cores()
    try:
        found: dict[str, int] = {}
        for device in jax.devices():
            found[device.device_kind] = found.get(device.device_kind, 0) + 1
        number = float(jax.jit(lambda x: jnp.sum(x**2))(jnp.arange(4.0)))
    except RuntimeError as error:  # Raised by a plugin whose driver is missing, for example.
        return {}, [f"JAX finds no device that works: {error}"]
    right = np.isclose(number, 14.0)
    return found, [] if right else [f"The devices compute {number} where 14 is right."]


def _cache() -> tuple[dict[str, Any], list[str]]:
    """The state of the cache of compiled code, and whether it can be written to."""
    folder = cache_folder()
    if folder is None:
        own = os.environ.get("JAX_COMPILATION_CACHE_DIR")
        return {"folder": own, "files": None, "bytes": None}, []
    files = [path for path in folder.rglob("*") if path.is_file()] if folder.is_dir() else []
    there = next(path for path in (folder, *folder.parents) if path.exists())
    about = {"folder": str(folder), "files": len(files)}
    about["bytes"] = sum(path.stat().st_size for path in files)
    about["free_bytes"] = shutil.disk_usage(there).free
    if os.access(there, os.W_OK):
        return about, []
    return about, [f"The cache folder cannot be written; name another as {VARIABLE}."]


def _blocks(result: dict[str, Any]) -> Iterator[Table | str]:
    devices = ", ".join(f"{number} x {kind}" for kind, number in result["devices"].items())
    cache = result["cache"]
    if cache["files"] is None:
        kept = f"by JAX, in {cache['folder']}" if cache["folder"] else "off"
    else:
        kept = f"{cache['folder']}: {cache['files']} files, {cache['bytes'] / 1e6:.1f} MB"
    rows = [(name, version or "not installed") for name, version in result["versions"].items()]
    rows += [
        ("python", f"{result['python']} on {result['platform']}"),
        ("devices", f"{devices or 'none'} ({result['cores']} cores)"),
        ("cache", kept),
    ]
    yield Table((), rows, most=None)
    problems = [f"problem: {problem}" for problem in result["problems"]]
    yield "\n".join(problems or ["No problem was found."])

"""What is installed, and whether it works."""

import importlib.metadata
import math
import os
import platform
import shutil
import subprocess
import sys
from collections import Counter
from typing import Any

import numpy as np

from .. import _devices
from .._cache import VARIABLE, cache_folder
from .._misc import plural
from .._summary import Table
from ._load import devices_of_jax, use_all_cores
from ._options import Args, Output, command


_PACKAGES = ("prism-jax", "jax", "jaxlib", "equinox", "numpy", "scipy", "msgspec", "optax")
_OPTIONAL = ("polars", "protobuf", "pyyaml", "tqdm", "matplotlib", "torch")
_TESTED = "0.10.2"  # For each version of Python.


@command()
def doctor(args: Args) -> Output:
    """Check the installation by a small step on each backend, and print versions and caches.

    example: prism-jax doctor
    """
    del args
    versions = {name: _version(name) for name in (*_PACKAGES, *_OPTIONAL)}
    cache, problems = _cache()
    devices, device_problems = _devices_and_problems()
    problems += device_problems
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
    lines = [f"problem: {problem}" for problem in problems] or ["No problem was found."]
    return Output(result, _table(result), lines, status=min(len(problems), 1))


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _devices_and_problems() -> tuple[dict[str, int], list[str]]:
    """The number of devices of each kind, and what is wrong with steps on each backend."""
    import jax

    try:
        use_all_cores()
        devices, default = devices_of_jax(), jax.default_backend()
    except ValueError as error:
        return {}, [str(error)]
    problems = [wrong_on_this_backend()]
    if default != "cpu":
        problems.append(_wrong_on("cpu"))
    kinds = dict(Counter(device.device_kind for device in devices))
    return kinds, [problem for problem in problems if problem]


def wrong_on_this_backend() -> str:
    """Simulates the slower of two kernels on JAX's default platform: the law against its closed
    form, and a derivative against a difference. Returns what is wrong, in one sentence, or nothing.
    """
    import equinox as eqx
    import jax

    import prism_jax as prism

    sigma, options = 0.2, {"num_samples": 2**14, "key": jax.random.key(0)}

    def mean_of(program, factor=1.0):
        means = factor * program.latencies.mean
        scaled = eqx.tree_at(lambda program: program.latencies.mean, program, means)
        return prism.estimate(scaled, prism.Mean(), **options)

    try:
        kernel = prism.Op(prism.latency.LogNormal(1.0, sigma))
        program = prism.compile_graph([kernel], num_replicas=2)
        mean = prism.simulate(program, **options).mean
        # Of the larger of two log-normal numbers: exp(s^2 / 2) (1 + erf(s / 2)).
        exact = math.exp(sigma**2 / 2) * (1 + math.erf(sigma / 2))
        slopes = eqx.filter_grad(mean_of)(program).latencies.mean
        slope = float(np.sum(np.asarray(slopes) * np.asarray(program.latencies.mean)))
        difference = float(mean_of(program, 1.01) - mean_of(program, 0.99)) / 0.02
    except Exception as error:
        problem = f"a small step cannot be simulated ({type(error).__name__}: {error})"
        return _advice(_devices.platform(), " ".join(problem.split()))
    if not abs(mean - exact) < 0.01 * exact:
        return _advice(
            _devices.platform(), f"the mean of a small step is {mean:.4g} s, not {exact:.4g} s"
        )
    if not abs(slope - difference) < 0.01 * exact:
        return _advice(
            _devices.platform(),
            f"the derivative of a small step is {slope:.4g}, "
            f"where a difference gives {difference:.4g}",
        )
    return ""


def _wrong_on(backend: str) -> str:
    """The same on another backend, which JAX takes in a process of its own."""
    module = "prism_jax.cli._installation"
    code = f"from {module} import wrong_on_this_backend as wrong; print(wrong(), end='')"
    environment = os.environ | {"JAX_PLATFORMS": backend}
    words = [sys.executable, "-c", code]
    done = subprocess.run(words, env=environment, capture_output=True, text=True)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]
        return _advice(backend, f"a small step cannot be simulated ({reason})")
    return done.stdout


def _advice(backend: str, problem: str) -> str:
    extra = {"gpu": "[cuda13]", "tpu": "[tpu]"}.get(backend, "")
    return (
        f"On `{backend}`, {problem}; install a version of JAX that prism-jax was tested with: "
        f"pip install 'jax{extra}=={_TESTED}'."
    )


def _cache() -> tuple[dict[str, Any], list[str]]:
    """The state of the cache of compiled code, and whether it can be written to."""
    folder = cache_folder()
    if folder is None:
        own = os.environ.get("JAX_COMPILATION_CACHE_DIR")
        return {"folder": own, "files": None, "bytes": None}, []
    files = [path for path in folder.rglob("*") if path.is_file()] if folder.is_dir() else []
    there = next(path for path in (folder, *folder.parents) if path.exists())
    state = {"folder": str(folder), "files": len(files)}
    state["bytes"] = sum(path.stat().st_size for path in files)
    state["free_bytes"] = shutil.disk_usage(there).free
    if os.access(there, os.W_OK):
        return state, []
    return state, [f"The cache folder cannot be written; name another as {VARIABLE}."]


def _table(result: dict[str, Any]) -> Table:
    devices = ", ".join(f"{number} x {kind}" for kind, number in result["devices"].items())
    cache = result["cache"]
    if cache["files"] is None:
        kept = f"by JAX, in {cache['folder']}" if cache["folder"] else "off"
    else:
        files, size = plural(cache["files"], "file"), cache["bytes"] / 1e6
        kept = f"{cache['folder']}: {files}, {size:.1f} MB"
    rows = [(name, version or "not installed") for name, version in result["versions"].items()]
    rows += [
        ("python", f"{result['python']} on {result['platform']}"),
        ("devices", f"{devices or 'none'} ({result['cores']} cores)"),
        ("cache", kept),
    ]
    return Table((), rows)

"""What is installed: whether it works, and its completion in a shell."""

import argparse
import importlib.metadata
import os
import platform
import shutil
from collections import Counter
from typing import Any

import numpy as np

from .._cache import VARIABLE, cache_folder
from .._summary import Table
from ..data import list_names
from ._load import use_all_cores
from ._options import Given, Output, command


_PACKAGES = ("prism-jax", "jax", "jaxlib", "equinox", "numpy", "scipy", "polars", "msgspec")
_OPTIONAL = ("matplotlib", "torch")
_BEFORE = {"bash": "", "zsh": "autoload -Uz compinit bashcompinit && compinit && bashcompinit\n"}
_SCRIPT = """\
_prism_jax() {{
    local word="${{COMP_WORDS[COMP_CWORD]}}" words=""
    if [ "$COMP_CWORD" -eq 1 ]; then
        words="{commands}"
    else
        case "${{COMP_WORDS[1]}}:${{COMP_WORDS[COMP_CWORD-1]}}" in
{values}
        *)
            case "${{COMP_WORDS[1]}}" in
{options}
            esac
        esac
    fi
    COMPREPLY=($(compgen -W "$words" -- "$word"))
}}
complete -o default -F _prism_jax prism-jax
"""


@command()
def doctor(given: Given) -> Output:
    """Check the installation, and print versions, devices and caches for a bug report.

    example: prism-jax doctor
    """
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
    lines = [f"problem: {problem}" for problem in problems] or ["No problem was found."]
    return Output(result, [_table(result), "\n".join(lines)])


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _devices() -> tuple[dict[str, int], list[str]]:
    """The number of devices of each kind, and whether JAX computes the same on them as NumPy."""
    import jax
    import jax.numpy as jnp

    use_all_cores()
    try:
        found = dict(Counter(device.device_kind for device in jax.devices()))
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


def _table(result: dict[str, Any]) -> Table:
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
    return Table((), rows, most=None)


@command()
def completion(given: Given) -> Output:
    """Print a script with which bash or zsh completes commands, options, jobs and clusters.

    shell {bash,zsh}  the shell

    example: prism-jax completion bash
    """
    script = _script()
    shell = given.shell
    how = f'# Put this line into ~/.{shell}rc: eval "$(prism-jax completion {shell})"\n'
    script = f"{how}{_BEFORE[shell]}{script}".rstrip()
    return Output({"shell": shell, "script": script}, [script])


def _script() -> str:
    """The function for bash, which zsh runs too. If it knows no word, it completes file names."""
    from ._main import make_parser, options_of

    _, commands = make_parser()
    options, values = [], []
    for name, parser in commands.items():
        known = options_of(parser)
        positional = [_words(action) for action in parser._actions if not action.option_strings]
        words = " ".join([*known, *filter(None, positional)])
        options.append(f'            {name}) words="{words}" ;;')
        for option, action in known.items():
            if action.nargs != 0:
                values.append(f'        {name}:{option}) words="{_words(action)}" ;;')
    return _SCRIPT.format(
        commands=" ".join(commands), options="\n".join(options), values="\n".join(values)
    )


def _words(action: argparse.Action) -> str:
    """The values of an argument that have names."""
    if action.choices is not None:
        return " ".join(map(str, action.choices))
    kinds = {"JOB": "job", "CLUSTER": "cluster", "FAILURES": "count of failures"}
    kind = kinds.get(str(action.metavar))
    return "" if kind is None else " ".join(list_names(kind))

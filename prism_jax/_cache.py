"""Keeps compiled code in the user's cache folder."""

import contextlib
import functools as ft
import glob
import hashlib
import importlib.metadata
import os
import pathlib
import platform
import re
import sys
import warnings


VARIABLE = "PRISM_JAX_CACHE"
_FOLDER = "jax_compilation_cache_dir"
# How JAX warns of an entry of a function: a process that is killed leaves half of it, and so does a
# full disk.
_UNUSABLE = r"Error (?:reading|writing) persistent compilation cache entry for '([^']*)'"


def cache_folder() -> pathlib.Path | None:
    """The folder for code that JAX compiles; `None` if none is kept.

    The environment variable `PRISM_JAX_CACHE` gives its path, or turns the cache off if it is
    `off`; by default it is in the user's cache folder, if the user has one. It has a subfolder for
    each version and each kind of processor, because compiled code runs on no other. If JAX is
    configured with a folder of its own, this is not changed.
    """
    folder, users = os.environ.get(VARIABLE, ""), os.environ.get("XDG_CACHE_HOME")
    if folder.lower() in ("off", "0"):
        return None
    try:
        root = pathlib.Path(folder or pathlib.Path(users or "~/.cache", "prism-jax").expanduser())
    except RuntimeError:  # In a container: a user with neither a home nor an entry in passwd.
        return None
    versioned = root / importlib.metadata.version("prism-jax") / _processor()
    return versioned if os.environ.get(_FOLDER.upper(), str(versioned)) == str(versioned) else None


def keep_compiled() -> None:
    """Lets JAX keep what it compiles, so that the same script or notebook starts faster the next
    time. The command line does so by itself; the package alone changes nothing of JAX.

    The folder is in the user's cache folder, which `prism-jax doctor` names. The environment
    variable `PRISM_JAX_CACHE` moves it, or turns this off if it is `off`. A folder that JAX is
    configured with by `JAX_COMPILATION_CACHE_DIR` stays. Where nothing can be written, nothing is
    kept, without an error. A damaged file is removed, and made again.
    """
    folder = cache_folder()
    if folder is None:
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:  # Without a folder that can be written to, there is no cache.
        return
    _remove_unusable(folder)
    # What compiles in no time is kept too: it adds up.
    options = {
        _FOLDER: str(folder),
        "jax_persistent_cache_min_compile_time_secs": 0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    # JAX takes a second to import, and reads these variables when it is.
    if "jax" not in sys.modules:
        os.environ.update({name.upper(): str(value) for name, value in options.items()})
        return

    import jax

    for name, value in options.items():
        jax.config.update(name, value)


@ft.cache
def _remove_unusable(folder: pathlib.Path) -> None:
    """From now on, an entry that JAX warns of is removed, and nothing is shown. JAX then compiles
    the function, and keeps it where no entry is in its place.
    """
    show = warnings.showwarning

    def remove(message, *where, **options):
        entry_of = re.match(_UNUSABLE, str(message))
        if entry_of is None:
            show(message, *where, **options)
            return
        for entry in folder.glob(f"{glob.escape(entry_of[1])}-*"):
            with contextlib.suppress(OSError):
                entry.unlink()

    warnings.filterwarnings("always", _UNUSABLE)
    warnings.showwarning = remove


def _processor() -> str:
    """A short name of the processor and what it can do."""
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
        starts = ("flags", "Features", "model name")
        features = [line for line in lines if line.startswith(starts)][:2]
    except OSError:
        features = [platform.processor()]
    return hashlib.sha256("".join([platform.machine(), *features]).encode()).hexdigest()[:12]

"""What is installed beside the base: the libraries of extras, and what other packages add by name.
Both are imported where they are first needed.
"""

import importlib
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast


if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

T = TypeVar("T")

# By the package that is imported: what needs the library, and the extra that installs it.
_EXTRAS = {
    "anywidget": ("The widget of `explore` needs anywidget", "explore"),
    "google": ("Traces of Chakra and of XLA need protobuf", "traces"),
    "matplotlib": ("Plots and reports need matplotlib", "plot"),
    "polars": ("Tables (CSV, Parquet, data frames) need polars", "tables"),
    "ray": ("Work on many machines needs Ray", "ray"),
    "shtab": ("Completion in a shell needs shtab", "all"),
    "yaml": ("YAML files need PyYAML", "import"),
}


def needed(module: str) -> Any:
    """A module of a library that an extra installs.

    **Raises:**

    `ImportError` of one sentence with the command that installs it.
    """
    needs, extra = _EXTRAS[module.partition(".")[0]]
    try:
        return importlib.import_module(module)
    except ImportError:
        raise ImportError(
            f'{needs}, which is not installed; run `pip install "prism_jax[{extra}]"`.'
        ) from None


class Plugins(NamedTuple):
    """What other packages add by entry points of one group.

    **Attributes:**

    - `name`: the end of the group's name, such as `schedules` of `prism_jax.schedules`.
    - `noun`: what an entry is, for messages.
    - `base`: the type of what is added, or the base class of classes.
    """

    name: str
    noun: str
    base: type

    def entries(self) -> "Iterable[EntryPoint]":
        """The entry points, before they are imported."""
        from importlib.metadata import entry_points

        return entry_points(group=f"prism_jax.{self.name}")


def names_of(plugins: Plugins, built_in: Iterable[str]) -> Iterator[str]:
    """The names that are built in, then those that other packages add."""
    known = dict.fromkeys(built_in)
    yield from known
    yield from dict.fromkeys(entry.name for entry in plugins.entries() if entry.name not in known)


def named(plugins: Plugins, built_in: Mapping[str, T], name: str) -> T:
    """What has a name: what is built in, or else what an installed package adds, imported now.

    **Raises:**

    `ValueError` if nothing has it, or two packages add it; `ImportError` of one sentence that names
    the package if its part cannot be imported, or is something else.
    """
    if name in built_in:
        return built_in[name]
    entries = [entry for entry in plugins.entries() if entry.name == name]
    if not entries:
        from ._misc import unknown_name

        raise ValueError(unknown_name(plugins.noun, name, names_of(plugins, built_in)))
    packages = " and ".join(f"`{entry.dist.name if entry.dist else '?'}`" for entry in entries)
    if len(entries) > 1:
        raise ValueError(f"The {plugins.noun} `{name}` is of {packages}; uninstall one of them.")
    try:
        added = entries[0].load()
        if not (issubclass if isinstance(added, type) else isinstance)(added, plugins.base):
            raise TypeError(f"`{entries[0].value}` is no `{plugins.base.__name__}`")
    except Exception as error:  # Another package may raise anything.
        why = f"{type(error).__name__}: {error}".rstrip(".")
        raise ImportError(
            f"The {plugins.noun} `{name}` of the package {packages} cannot be imported ({why}); "
            "repair or uninstall that package."
        ) from error
    return cast(T, added)


def all_named(plugins: Plugins, built_in: Mapping[str, T]) -> dict[str, T]:
    """Everything that has a name. It imports what other packages add, and raises as `named`."""
    return {name: named(plugins, built_in, name) for name in names_of(plugins, built_in)}

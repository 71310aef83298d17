"""Checks, reads and writes laws in files."""

import math
import pathlib
from collections.abc import Callable, Iterable

from .._misc import quoted, unknown_name
from ._kernels import COMPONENTS, SHARED, Variation, VariationRow
from ._read import read_rows, write_csv


# Parameters of the `step` component besides those of its law: the seconds that add to its spread,
# those of models with experts, and the largest share of a step that they are.
SECONDS = ("seconds", "experts_seconds", "seconds_share")


def has_seconds(variations: Iterable[Variation]) -> bool:
    """Whether a spread of steps is partly given in seconds."""
    return any({*SECONDS} & v.parameters.keys() for v in variations)


def replace_variations(
    variations: Iterable[Variation], new: Iterable[Variation]
) -> tuple[Variation, ...]:
    """The laws, in which new ones replace those for the same component and kind."""
    replaced = {(v.kernel, v.component): v for v in new}
    kept = (v for v in variations if (v.kernel, v.component) not in replaced)
    return (*kept, *replaced.values())


def read_variations(
    path: pathlib.Path, check_law: Callable[[Variation], object] | None = None
) -> tuple[Variation, ...]:
    """The rows of a `variability.csv`, checked.

    **Arguments:**

    - `check_law`: a function that raises a `ValueError` if there is no such family, or if its
        parameters are not valid. It is an argument because this package does not know the families.
    """
    variations = []
    for where, row in read_rows(path, VariationRow):
        parameters = _parameters(row.parameters, where)
        variation = Variation(row.kernel, row.component, row.family, parameters, row.source)
        check_variation(variation, where)
        if check_law is not None:
            try:
                check_law(variation)
            except ValueError as error:
                raise ValueError(f"{where}: {error}") from None
        variations.append(variation)
    return tuple(variations)


def write_variations(path: pathlib.Path, variations: Iterable[Variation]) -> None:
    """Writes a `variability.csv` from which `read_variations` reads the same laws, bit for bit."""
    rows = [(v.kernel, v.component, v.family, _written(v.parameters), v.source) for v in variations]
    write_csv(path, ("kernel", "component", "family", "parameters", "source"), rows)


def _written(parameters: dict[str, float]) -> str:
    return ";".join(f"{name}={float(value)!r}" for name, value in parameters.items())


def _parameters(text: str, where: str) -> dict[str, float]:
    parameters = {}
    for part in filter(None, (part.strip() for part in text.split(";"))):
        name, equals, value = (piece.strip() for piece in part.partition("="))
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        if not equals or math.isnan(number):
            raise ValueError(
                f"{where}: column `parameters` has `{quoted(part)}`; write `name=value` with a "
                "finite number that is not negative."
            )
        parameters[name] = number
    return parameters


# Parameters of components besides those of their laws.
_OWN = {"network": ("probability", "slowdown"), "stall": ("rate", "median_s")}


def check_variation(variation: Variation, where: str) -> None:
    """Raises a `ValueError` of one sentence if component, kind and numbers do not fit. Families and
    their parameters are checked where programs are compiled.
    """
    family, component = variation.family, variation.component
    if component not in COMPONENTS:
        raise ValueError(f"{where}: {unknown_name('component', component, COMPONENTS)}")
    if (component in SHARED) != (variation.kernel == ""):
        wrong = "is shared; leave `kernel` empty" if variation.kernel else "needs a `kernel`"
        raise ValueError(f"{where}: the component `{component}` {wrong}.")
    if family != "constant" and (family == "two-regimes") != (component == "network"):
        raise ValueError(
            f"{where}: the component `{component}` cannot have the family `{quoted(family)}`; "
            "`network` takes `two-regimes` or `constant`, all others any but `two-regimes`."
        )
    if family == "power" and (component != "rank" or variation.parameters):
        raise ValueError(
            f"{where}: `power` is the law of the component `rank` alone and has no parameters; it "
            "follows from the device's `[power]`."
        )
    own = () if component == "network" and family == "constant" else _OWN.get(component, ())
    for name, number in variation.parameters.items():
        if component == "network" and name not in own:
            raise ValueError(f"{where}: {unknown_name('parameter', name, own)}")
        if not (math.isfinite(number) and number >= 0):
            raise ValueError(
                f"{where}: `parameters` has `{quoted(name)}={number:g}`; it must be finite and "
                "not negative."
            )
    seconds = variation.parameters.keys() & {*SECONDS}
    if seconds and (component != "step" or family != "lognormal"):
        raise ValueError(
            f"{where}: `{min(seconds)}` is a parameter of the component `step` with the family "
            "`lognormal` only; leave it out."
        )
    missing = [name for name in own if name not in variation.parameters]
    if missing:
        raise ValueError(f"{where}: `parameters` has no `{missing[0]}`; add it.")

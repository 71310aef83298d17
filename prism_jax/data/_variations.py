"""How much kernels vary: laws, which are checked, read and written."""

import math
import pathlib
import typing
from collections.abc import Callable, Iterable, Sequence
from typing import Literal, TypeAlias

import msgspec

from .._misc import quoted, unknown_name
from .._summary import Column, Table
from ._read import located, read_rows, write_csv
from ._types import Label, Name, Text


_Component: TypeAlias = Literal[
    "rank", "step", "worker_step", "microbatch", "network", "residual", "stall"
]
COMPONENTS = typing.get_args(_Component)
# Those that kernels share.
SHARED = COMPONENTS[:5]
# Parameters of the `step` component besides those of its law: the seconds that add to its spread,
# those of models with experts, and the largest share of a step that they are.
SECONDS = ("seconds", "experts_seconds", "seconds_share")
# Parameters of other components besides those of their laws.
_OWN = {"stall": ("rate", "median_s")}
# Those of a network, by its family.
_NETWORKS = {
    "two-regimes": ("probability", "slowdown"),
    "spells": ("slowdown", "sigma", "spell_s", "calm_sigma"),
}
# One that the network may have besides: the most that its slowdown adds to a step, as a share.
STEP_EXCESS = "step_excess"


class Variation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One cause of variation of one kind of kernel, or of all of them.

    **Attributes:**

    - `kernel`: the kind of kernel; empty for components that kernels share.
    - `component`: `residual` (the noise of each call), `stall`, or a shared component: `rank`,
        `step`, `worker_step`, `microbatch`, `network`.
    - `family`: the family of the law of the factor, or of the duration of a stall; `two-regimes`
        or `spells` for `network`.
    - `parameters`: the parameters of the law. Stalls also have `rate` (stalls per call) and
        `median_s`; a network of two regimes has `probability` and `slowdown`, and may have
        `step_excess`, the largest share of a step by which congestion makes it longer; one of
        `spells` has those of `SharedNetwork`, where a step of T seconds is congested with
        probability exp(-T / `spell_s`). The `sigma` of a log-normal
        `step` may have `seconds` beside it, the part of the standard deviation that is as many
        seconds whatever a step takes, `experts_seconds` for models with experts, and
        `seconds_share`, the largest share of a step that these seconds are. The two parts add as
        variances.
    - `source`: where the numbers are from.
    """

    kernel: Label
    component: Name
    family: Name
    parameters: dict[Name, float]
    source: str = ""


def variation_table(laws: Sequence[Variation], *more: Column | str, title: str = "") -> Table:
    """A row for each cause of variation, with further columns."""
    columns = (
        Column("kernel", lambda law: law.kernel or "all"),
        "component",
        "family",
        Column(
            "parameters", lambda law: ", ".join(f"{k} {x:.3g}" for k, x in law.parameters.items())
        ),
    )
    return Table((*columns, *more), laws, title)


def has_seconds(variations: Iterable[Variation]) -> bool:
    """Whether a law depends on how many seconds a step takes."""
    return any({*SECONDS, "spell_s"} & v.parameters.keys() for v in variations)


def replace_variations(
    variations: Iterable[Variation], new: Iterable[Variation]
) -> tuple[Variation, ...]:
    """The laws, in which new ones replace those for the same component and kind."""
    replaced = {(v.kernel, v.component): v for v in new}
    kept = (v for v in variations if (v.kernel, v.component) not in replaced)
    return (*kept, *replaced.values())


class Law(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A law of a device or a network in its `.toml` file.

    **Attributes:**

    - `component`, `family`, `parameters`, `source`, `kernel`: as in `variability.csv`.
    """

    component: _Component
    family: Name
    parameters: dict[Name, float]
    source: Text
    kernel: Label = ""

    @property
    def variation(self) -> Variation:
        return Variation(self.kernel, self.component, self.family, self.parameters, self.source)


class VariationRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A row of `variability.csv`."""

    component: _Component
    family: Name
    source: Text
    kernel: Label = ""
    parameters: str = ""


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
        with located(where):
            parameters = _parameters(row.parameters)
            law = Variation(row.kernel, row.component, row.family, parameters, row.source)
            check_variation(law)
            if check_law is not None:
                check_law(law)
        variations.append(law)
    return tuple(variations)


def write_variations(path: pathlib.Path, variations: Iterable[Variation]) -> bytes:
    """Writes a `variability.csv` from which `read_variations` reads the same laws, bit for bit."""
    rows = []
    for v in variations:
        written = ";".join(f"{name}={float(value)!r}" for name, value in v.parameters.items())
        rows.append((v.kernel, v.component, v.family, written, v.source))
    return write_csv(path, ("kernel", "component", "family", "parameters", "source"), rows)


def _parameters(text: str) -> dict[str, float]:
    parameters = {}
    for part in filter(None, (part.strip() for part in text.split(";"))):
        name, equals, value = (piece.strip() for piece in part.partition("="))
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        if not equals or math.isnan(number):
            raise ValueError(
                f"column `parameters` has `{quoted(part)}`; write `name=value` with a finite "
                "number that is not negative."
            )
        parameters[name] = number
    return parameters


def check_variation(variation: Variation) -> None:
    """Raises a `ValueError` of one sentence if component, kind and numbers do not fit. Families and
    their parameters are checked where programs are compiled.
    """
    family, component, parameters = variation.family, variation.component, variation.parameters
    if component not in COMPONENTS:
        raise ValueError(unknown_name("component", component, COMPONENTS))
    if (component in SHARED) != (variation.kernel == ""):
        wrong = "is shared; leave `kernel` empty" if variation.kernel else "needs a `kernel`"
        raise ValueError(f"the component `{component}` {wrong}.")
    if family != "constant" and (family in _NETWORKS) != (component == "network"):
        raise ValueError(
            f"the component `{component}` cannot have the family `{quoted(family)}`; `network` "
            "takes `two-regimes`, `spells` or `constant`, all others any but the first two."
        )
    if family == "power" and (component != "rank" or parameters):
        raise ValueError(
            "`power` is the law of the component `rank` alone and has no parameters; it follows "
            "from the device's `[power]`."
        )
    factors = _NETWORKS.get(family, ()) if component == "network" else _OWN.get(component, ())
    allowed = (*factors, *[STEP_EXCESS] * (family == "two-regimes"))
    for name, number in parameters.items():
        if component == "network" and name not in allowed:
            raise ValueError(unknown_name("parameter", name, allowed))
        if not (math.isfinite(number) and number >= 0):
            raise ValueError(
                f"`parameters` has `{quoted(name)}={number:g}`; it must be finite and not negative."
            )
    seconds = parameters.keys() & {*SECONDS}
    if seconds and (component != "step" or family != "lognormal"):
        raise ValueError(
            f"`{min(seconds)}` is a parameter of the component `step` with the family `lognormal` "
            "only; leave it out."
        )
    missing = [name for name in factors if name not in parameters]
    if missing:
        raise ValueError(f"`parameters` has no `{missing[0]}`; add it.")

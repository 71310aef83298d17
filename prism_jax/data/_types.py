"""Numbers and texts that a file may hold. Numbers are finite: NaN and infinity fail the bounds."""

from typing import Annotated, TypeAlias

from msgspec import Meta


Count: TypeAlias = Annotated[int, Meta(ge=1, le=10**9)]
Seed: TypeAlias = Annotated[int, Meta(ge=0, lt=2**32)]
# More layers than any model has; each takes memory here.
MOST_LAYERS = 10**5
Layers: TypeAlias = Annotated[int, Meta(ge=1, le=MOST_LAYERS)]
# Quotients of any two of these are finite.
Positive: TypeAlias = Annotated[float, Meta(ge=1e-30, lt=1e30)]
NonNegative: TypeAlias = Annotated[float, Meta(ge=0, lt=1e30)]
# A limit may be infinite.
PositiveOrInfinite: TypeAlias = Annotated[float, Meta(gt=0)]
AtLeastOne: TypeAlias = Annotated[float, Meta(ge=1, lt=1e30)]
Watts: TypeAlias = Annotated[float, Meta(ge=1e-3, le=1e6)]
Kelvin: TypeAlias = Annotated[float, Meta(ge=-100, le=100)]
Number: TypeAlias = Annotated[float, Meta(ge=-1e6, le=1e6)]
Fraction: TypeAlias = Annotated[float, Meta(ge=0, le=1)]
Text: TypeAlias = Annotated[str, Meta(min_length=1)]
# Texts that messages and tables show: short, on one line, without control characters.
Label: TypeAlias = Annotated[str, Meta(max_length=80, pattern=r"^[^\x00-\x1f\x7f]*$")]
Name: TypeAlias = Annotated[str, Meta(min_length=1, max_length=80, pattern=r"^[^\x00-\x1f\x7f]*$")]

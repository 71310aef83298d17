"""Converts results to JSON types."""

import dataclasses
import math
from typing import Any

from .._estimate import Estimate


def plain(value: Any) -> Any:
    """Dictionaries, lists, numbers and strings. A number that is not finite becomes `None`."""
    if isinstance(value, Estimate):
        interval = [plain(end) for end in value.interval()]
        error = plain(value.standard_error)
        return {"value": plain(value.value), "standard_error": error, "interval": interval}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {name: plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value

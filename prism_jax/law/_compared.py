"""Equality of records that hold arrays and figures that may not be known."""

import dataclasses

import msgspec


class AbstractCompared:
    """A dataclass whose instances are equal if their fields are, as texts: in these, all figures
    that are not known are alike.
    """

    def __eq__(self, other: object) -> bool:
        return _text(self) == _text(other) if type(other) is type(self) else NotImplemented


def _text(record) -> bytes:
    fields = {x.name: getattr(record, x.name) for x in dataclasses.fields(record) if x.compare}
    return msgspec.json.encode(fields, enc_hook=lambda array: array.tolist())

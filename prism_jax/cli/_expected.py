from typing import Any

from .._summary import picked


def expected_error_json(error: Any) -> dict[str, Any]:
    """An expected error, as `--json` prints it."""
    return picked(error, "bias", "spread", "num_runs", "table")

"""The command `prism-jax`. Everything slow is imported where Ctrl-C is held back."""

import contextlib
import os
import sys
from collections.abc import Sequence

from .._interrupt import ending_at_interrupt


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line.

    **Arguments:**

    - `arguments`: the words of the command line; by default those of the process.

    **Returns:**

    The exit status: 0, 1 for a failure, 2 for bad input, 130 when interrupted.
    """
    if arguments is not None:
        from ._main import status

        return status(arguments)
    with ending_at_interrupt() as interrupt:
        from ._main import status

        code = status(sys.argv[1:], keep=True)
        if interrupt.ever and code == 0:
            if not interrupt.told:
                print("prism-jax: interrupted when all was done.", file=sys.stderr)
            code = 130
        # XLA may be compiling, and crashes if the interpreter is taken down.
        if code == 130 or interrupt.left:
            with contextlib.suppress(OSError, AttributeError):  # Closed, or none.
                sys.stdout.flush()
            os._exit(code)
    return code

"""How the commands use the machine."""

import contextlib
import os


def use_all_cores() -> None:
    """Makes one device of each core: XLA runs a loop over small arrays on one.

    It changes nothing within a process that has used JAX before.
    """
    import jax

    with contextlib.suppress(RuntimeError):
        jax.config.update("jax_num_cpu_devices", os.cpu_count() or 1)

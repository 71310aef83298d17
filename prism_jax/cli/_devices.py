"""How commands use the cores of the machine."""

import contextlib
import os


def use_all_cores() -> None:
    """Makes each core a JAX device, because XLA runs a loop over small arrays on one core only.

    It has no effect in a process that has already used JAX.
    """
    import jax

    with contextlib.suppress(RuntimeError):
        jax.config.update("jax_num_cpu_devices", os.cpu_count() or 1)

"""The devices that work runs on, which JAX's setting `jax_default_device` chooses."""

from typing import Any

import jax


def default() -> Any:
    """JAX's default device, or the name of its platform, or `None` where it is not set.
    `jax.default_device` sets it for a block of one thread, `jax.config.update` for all threads.
    """
    return jax.config.jax_default_device  # pyright: ignore


def chosen() -> list[Any]:
    """All devices of the platform of the default device; without one, of JAX's first platform."""
    device = default()
    return jax.devices(getattr(device, "platform", device))


def platform() -> str:
    """What they are, such as `cpu` or `gpu`."""
    return chosen()[0].platform

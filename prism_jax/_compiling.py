"""How long JAX takes to compile."""

import threading

import jax


_of_thread = threading.local()


def _hear(event: str, duration_secs: float, **kwargs: str | int) -> None:
    if event.startswith("/jax/core/compile/"):  # To trace, to lower, and to compile.
        _of_thread.seconds = compile_seconds() + duration_secs


jax.monitoring.register_event_duration_secs_listener(_hear)


def compile_seconds() -> float:
    """For how many seconds JAX has compiled in this thread, since it began."""
    return getattr(_of_thread, "seconds", 0.0)

from ._on_host import on_host as on_host

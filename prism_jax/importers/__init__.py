from ._job import (
    Imported as Imported,
    import_job as import_job,
    import_with_notes as import_with_notes,
)
from ._megatron import from_megatron as from_megatron

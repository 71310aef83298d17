from ._job import Imported as Imported, import_job as import_job

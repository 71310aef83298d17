from ._job import Imported as Imported, import_job as import_job
from ._problems import NotImportableError as NotImportableError
from ._training_files import GpusNotSaidError as GpusNotSaidError

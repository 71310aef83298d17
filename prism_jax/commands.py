"""What a command of another package is made of: a function, and what it finds."""

from ._summary import Column as Column, Table as Table
from .cli._options import Args as Args, Output as Output, command as command
from .cli._outputs import Writes as Writes

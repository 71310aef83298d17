from ._answers import Explored as Explored, answer as answer, explored as explored
from ._serve import Server as Server, serve as serve
from ._widget import explore as explore

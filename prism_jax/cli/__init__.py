from ._entry import main as main

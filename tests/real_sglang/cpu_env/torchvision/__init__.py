"""Stands in for torchvision, which SGLang imports for models that see. PyPI's is a CUDA build and does not load."""

from gyre_stand_in import missing, stand_in

__version__ = "0.28.0"
stand_in(__name__)


def __getattr__(name: str) -> object:
    return missing(f"{__name__}.{name}")

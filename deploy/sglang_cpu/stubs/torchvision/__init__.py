"""Stands in for torchvision, which SGLang imports for images; serving text never calls it."""

from torchvision import io, transforms

__version__ = "0.28.0"
__all__ = ["io", "transforms"]

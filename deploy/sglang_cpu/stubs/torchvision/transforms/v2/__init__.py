"""The second interface to the same transformations."""

from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2 import functional

__all__ = ["InterpolationMode", "functional"]

"""Functions on images: each exists and refuses."""

from torchvision.transforms.functional import InterpolationMode, __getattr__

__all__ = ["InterpolationMode", "__getattr__"]

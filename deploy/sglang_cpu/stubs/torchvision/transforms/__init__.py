"""Transformations of images: the names, without the work."""

import enum

_NAMES = ("nearest", "nearest-exact", "bilinear", "bicubic", "box", "hamming", "lanczos")
InterpolationMode = enum.Enum("InterpolationMode", {name.upper().replace("-", "_"): name for name in _NAMES})

from torchvision.transforms import functional  # noqa: E402  it needs the enumeration above

__all__ = ["InterpolationMode", "functional"]

"""Functions on images: each exists and refuses."""

from typing import Any

from torchvision.transforms import InterpolationMode

__all__ = ["InterpolationMode"]


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)

    def refuse(*arguments: Any, **options: Any) -> None:
        raise NotImplementedError(f"torchvision's {name} is not installed on this machine: text only")

    return refuse

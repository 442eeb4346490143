"""Format durations."""


def clock(seconds: float) -> str:
    """Return seconds as ``m:ss``, or ``h:mm:ss`` from one hour."""
    whole = max(int(seconds), 0)
    hours, minutes, rest = whole // 3600, whole // 60 % 60, whole % 60
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"

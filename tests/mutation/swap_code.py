"""Put the changed functions of a source into a module that is imported already: the code of each, wherever it is referred to.

So a mutant costs no import. What runs at import cannot be changed so: a constant, a decorator, a default value, a field of a
class. Then `swap` changes nothing and returns False, and the tests need a process that imports the changed file.
"""

from __future__ import annotations

import gc
from types import CodeType, FunctionType

_NO_FUNCTION = ("<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>")
_CO_OPTIMIZED = 0x1  # of functions; bodies of modules and classes have it not


def swap(old: str, new: str, file: str) -> bool:
    """Replace the code of the functions that differ between two texts of a file; return whether that was all that differs."""
    changed = _changed(*(compile(text, file, "exec", dont_inherit=True) for text in (old, new)))
    if not changed:
        return False
    gc.unfreeze()  # what is frozen, as all that was imported with the tests, is in no list
    functions = [  # `isinstance` would ask each object for its class: that of a lazy one is an import
        get_object
        for get_object in gc.get_objects()
        if type(get_object) is FunctionType and get_object.__code__.co_filename == file
    ]
    found = [(function, code) for was, code in changed for function in functions if function.__code__ == was]
    if {id(code) for _, code in found} != {id(code) for _, code in changed}:
        return False  # one of them is called at import only, or was replaced since
    if any(one.__code__.co_freevars != code.co_freevars for one, code in found):
        return False
    inner = [code for was, now in changed for code in set(_within(was)) - set(_within(now))]
    if any(function.__code__ in inner for function in functions):
        return False  # a function made by a changed one when it was imported, as by a decorator
    for one, code in found:
        one.__code__ = code
    return True


def _changed(old: CodeType, new: CodeType) -> list[tuple[CodeType, CodeType]] | None:
    """Return the functions that differ; None when something else does."""
    if _same(old, new):
        return []
    if _is_function(old):
        return (
            [(old, new)]
            if _is_function(new) and old.co_name == new.co_name and old.co_name not in _NO_FUNCTION
            else None
        )
    if not _same(old, new, nested=False):
        return None
    found = []
    for was, now in zip(_nested(old), _nested(new), strict=True):
        if (inside := _changed(was, now)) is None:
            return None
        found += inside
    return found


def _is_function(code: CodeType) -> bool:
    return bool(code.co_flags & _CO_OPTIMIZED)


def _nested(code: CodeType) -> list[CodeType]:
    return [co_const for co_const in code.co_consts if isinstance(co_const, CodeType)]


def _within(code: CodeType) -> list[CodeType]:
    return [deep for one in _nested(code) for deep in (one, *_within(one))]


def _same(old: CodeType, new: CodeType, *, nested: bool = True) -> bool:
    """Return True if two code objects do the same, on whatever lines; without ``nested`` but for the functions within."""
    keys = (
        "co_code",
        "co_names",
        "co_varnames",
        "co_freevars",
        "co_cellvars",
        "co_flags",
        "co_argcount",
        "co_kwonlyargcount",
    )
    if any(getattr(old, key) != getattr(new, key) for key in keys) or len(old.co_consts) != len(new.co_consts):
        return False
    for was, now in zip(old.co_consts, new.co_consts, strict=True):
        if isinstance(was, CodeType) and isinstance(now, CodeType):
            if was.co_name != now.co_name or (nested and not _same(was, now)):
                return False
        elif type(was) is not type(now) or was != now:
            return False
    return True

"""The table of guards fits the code."""

from __future__ import annotations

from tests.mutation.guards import ROOT, read_table


def test_every_guard_of_the_table_is_in_its_file() -> None:
    """Each text is there once, its replacement is another one that compiles, and each of its tests, or files of tests, exists."""
    guards = read_table()
    assert len({guard.check for guard in guards}) == len(guards)
    for guard in guards:
        source = (ROOT / guard.file).read_text(encoding="utf-8")
        without = guard.without(source)
        assert without != source
        compile(without, guard.file, "exec")
        for test in guard.tests:
            file, _, name = test.partition("::")
            assert not name or f"def {name.partition('[')[0]}(" in (ROOT / file).read_text(encoding="utf-8"), test

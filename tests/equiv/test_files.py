"""The one way in which the project writes a file."""

from __future__ import annotations

from pathlib import Path

import pytest

from equiv.files import write_whole


def test_a_write_that_fails_in_the_middle_leaves_the_old_file_and_nothing_else(
    tmp_path: Path,
) -> None:
    path = tmp_path / "made" / "file"
    write_whole(path, b"old")
    with pytest.raises(TypeError):
        write_whole(path, "not bytes")  # type: ignore[arg-type]
    assert path.read_bytes() == b"old"
    assert list(path.parent.iterdir()) == [path]
    assert path.stat().st_mode & 0o777 == 0o644

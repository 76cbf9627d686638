"""What takes long says so."""

from __future__ import annotations

import time

import pytest

from traceproof.programs import telling


def test_a_long_wait_is_told_ever_more_rarely(capsys: pytest.CaptureFixture[str]) -> None:
    with telling("building x", first=0.05):
        time.sleep(1.0)
    lines = capsys.readouterr().err.splitlines()
    assert 2 <= len(lines) <= 5  # after 0.05, 0.1, 0.2, 0.4 and 0.8 s
    assert all(line.startswith("building x: ") and line.endswith(" s") for line in lines)


def test_a_short_one_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with telling("building x", first=5.0):
        pass
    with pytest.raises(ValueError, match="as it was"), telling("building x", first=5.0):
        raise ValueError("as it was")
    assert not capsys.readouterr().err

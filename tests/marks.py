"""Marks that several tests use."""

from __future__ import annotations

from typing import Any

import pytest


def slow(*case: Any) -> Any:
    """A case of ``parametrize`` that only ``make test-all`` runs."""
    return pytest.param(*case, marks=pytest.mark.slow)

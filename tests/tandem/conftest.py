"""Commands run inside the test process must not change its environment."""

import os
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def environment() -> Iterator[None]:
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)

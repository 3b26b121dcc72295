"""Where the server is; ``python -m tests.clients.run`` says it in the environment."""

import os

import pytest


@pytest.fixture(scope="session")
def url():
    """The gateway, without a path."""
    return os.environ["TANDEM_URL"]


@pytest.fixture(scope="session")
def base_url(url):
    """What OpenAI's clients call base_url."""
    return f"{url}/v1"


@pytest.fixture(scope="session")
def model():
    """The served name."""
    return os.environ["TANDEM_MODEL"]

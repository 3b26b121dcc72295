"""The compiled verifier, right and with planted bugs; how many seeds a goodness of fit takes."""

import pytest
import torch

from specdec.engine.native import library
from tests.target_service.rules.planted import PlantedVerifier


@pytest.fixture(scope="session")
def kernels():
    loaded = library.load()
    assert loaded is not None, "the kernels did not compile: the tests need a C++ compiler"
    return loaded


@pytest.fixture(scope="session")
def planted(tmp_path_factory):
    return PlantedVerifier(tmp_path_factory.mktemp("planted"))


@pytest.fixture(params=[50_000, pytest.param(200_000, marks=pytest.mark.exhaustive)])
def trials(request):
    return request.param


@pytest.fixture
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)

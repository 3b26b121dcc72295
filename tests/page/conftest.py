"""The option of the page's tests."""


def pytest_addoption(parser):
    parser.addoption("--record", action="store_true", help="record the page's replay and screenshot anew")

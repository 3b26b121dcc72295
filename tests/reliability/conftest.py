"""Services of short runs are forks, as in the end-to-end tests; the commands of `make` start processes as users do."""

from tests.e2e.conftest import forked_processes

__all__ = ["forked_processes"]

"""A service with other constants: ``python -m benchmarks.constants MODULE:NAME=VALUE SERVICE ARGUMENT…``.

Several are separated by commas; values are JSON. Modules that have copied a constant before keep what they have.
"""

from __future__ import annotations

import json
import runpy
import sys
from importlib import import_module

from specdec.errors import InvalidRequest


def change(constants: str) -> None:
    """Set constants, given as ``MODULE:NAME=VALUE,…``.

    Raises:
        InvalidRequest: a module has no constant of this name.
    """
    for constant in constants.split(","):
        place, _, value = constant.partition("=")
        module_name, _, name = place.partition(":")
        module = import_module(module_name)
        if not hasattr(module, name):
            raise InvalidRequest(f"{module_name} has no {name}; write MODULE:NAME=VALUE")
        setattr(module, name, json.loads(value))


def main() -> None:
    """Set the constants, then run the service."""
    constants, sys.argv = sys.argv[1], sys.argv[2:]
    change(constants)
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()

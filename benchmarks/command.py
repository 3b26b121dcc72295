"""What the benchmarks' command lines share."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn, TypeVar

from specdec.errors import InvalidRequest, TandemError, text_of
from tandem.launcher.environment import tune_environment

T = TypeVar("T")


def run(name: str, main: Callable[[], int]) -> NoReturn:
    """Run ``main`` in the environment the services get; a failure is one line, exit status 1 (2 for a wrong call).

    ``main`` imports torch and gRPC itself, for both read the environment when they are imported.
    """
    tune_environment()
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # no word about services that end as they should
    try:
        sys.exit(main())
    except TandemError as error:
        print(f"{name}: error: {text_of(error)}", file=sys.stderr)
        sys.exit(2 if isinstance(error, InvalidRequest) else 1)
    except KeyboardInterrupt:
        sys.exit(130)


def numbers(text: str) -> tuple[int, ...]:
    """``1,8,32`` as numbers of at least 1; for ``argparse``."""
    values = tuple(int(part) for part in text.split(","))
    if min(values) < 1:
        raise ValueError(text)
    return values


def names(known: Sequence[str]) -> Callable[[str], tuple[str, ...]]:
    """A reader of ``a,b`` for ``argparse`` that takes known names only."""

    def read(text: str) -> tuple[str, ...]:
        chosen = tuple(part.strip() for part in text.split(","))
        if unknown := sorted(set(chosen) - set(known)):
            raise InvalidRequest(f"{', '.join(unknown)} is not known here; choose from {', '.join(known)}")
        return chosen

    return read

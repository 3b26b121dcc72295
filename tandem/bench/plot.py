"""Drawing: matplotlib is an extra, asked for only where a plot is."""

from __future__ import annotations

from typing import Any

from specdec.errors import InvalidRequest


def load_pyplot() -> Any:
    """``matplotlib.pyplot``, drawing into files. Raises :class:`InvalidRequest` where it is not installed."""
    try:
        import matplotlib  # noqa: PLC0415
    except ImportError:
        raise InvalidRequest(
            "a plot needs matplotlib: pip install 'tandem-specdec[bench]', or leave --plot out", param="plot"
        ) from None
    matplotlib.use("Agg")
    from matplotlib import pyplot  # noqa: PLC0415

    return pyplot

"""placeholder"""

from tandem.deployment import Deployment


def serve_embedded(deployment: Deployment) -> int:
    """Not yet."""
    raise NotImplementedError

"""``tandem pull``: download a checkpoint from the Hugging Face hub."""

from __future__ import annotations

import argparse

from specdec.errors import InvalidRequest
from tandem.checkpoints import fetch_checkpoint, is_hub_name


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of ``tandem pull``."""
    parser.add_argument("name", metavar="NAME", help="owner/name on the hub")


def run(args: argparse.Namespace) -> int:
    """Print the folder it lies in; commands take NAME from then on, without a network."""
    from huggingface_hub import constants  # noqa: PLC0415 (slow to import)

    if not is_hub_name(args.name):
        raise InvalidRequest(f"{args.name!r} is no name on the Hugging Face hub; give owner/name", param="name")
    if constants.HF_HUB_OFFLINE:
        raise InvalidRequest("HF_HUB_OFFLINE is set, so nothing is downloaded; unset it", param="name")
    print(fetch_checkpoint(args.name))
    return 0

"""``tandem export-mtp``: take the prediction layers out of a target, for a draft service on another machine."""

from __future__ import annotations

import argparse
from pathlib import Path

from specdec.errors import InvalidRequest
from tandem.checkpoints import find_checkpoint


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of ``tandem export-mtp``."""
    parser.add_argument("target", metavar="TARGET", help="folder of a target with prediction layers, or owner/name")
    parser.add_argument("output", metavar="OUTPUT", help="folder to make")


def run(args: argparse.Namespace) -> int:
    """Write the folder; ``tandem draft`` takes it as ``--model`` and as ``--target-model``."""
    from engine.heads.files.mtp import export_mtp  # noqa: PLC0415 (loads torch)

    output = Path(args.output)
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise InvalidRequest(f"{output} exists and is no empty folder; give another one", param="output")
    names = export_mtp(find_checkpoint(args.target), output)
    num_bytes = (output / "model.safetensors").stat().st_size
    print(f"{output}: {len(names)} tensors, {num_bytes / 2**20:.1f} MiB")
    return 0

"""A GGUF file as a folder in Hugging Face format: what every service can be given.

The folder lies in the cache and holds ``config.json``, the tokenizer, and a link to the file. It is made once for a
file of a path, size and time of change.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import tempfile
from pathlib import Path
from typing import Final

from engine.gguf_config import config_of
from engine.gguf_file import GgufFile
from specdec.compiler import cache_folder
from specdec.errors import InvalidRequest
from specdec.process.imports import large_imports

logger = logging.getLogger(__name__)

#: Changes when folders are made in another way.
_VERSION: Final = 1
_TOKENIZER_FILES: Final = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.json", "merges.txt"),
    *("chat_template.jinja", "generation_config.json"),
)


def folder_of(path: Path) -> str:
    """The folder of a file.

    Raises:
        ModelNotSupported: an architecture or a type of blocks that is not read.
        InvalidRequest: the file is damaged, or the folder cannot be written.
    """
    path = path.resolve()
    file = GgufFile(path)
    config = config_of(file)
    status = path.stat()
    key = hashlib.sha256(f"{_VERSION} {path} {status.st_size} {status.st_mtime_ns}".encode()).hexdigest()[:24]
    folder = cache_folder() / "gguf" / key / path.stem
    if folder.is_dir():
        return str(folder)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(dir=folder.parent))
        (scratch / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
        (scratch / path.name).symlink_to(path)
        _write_tokenizer(file, scratch)
        try:
            os.rename(scratch, folder)
        except OSError:  # another process was faster
            shutil.rmtree(scratch)
            if not folder.is_dir():
                raise
    except OSError as error:
        raise InvalidRequest(
            f"{folder}, which stands for {path}, cannot be written: {error}; set XDG_CACHE_HOME to another folder",
            param="model",
        ) from None
    return str(folder)


def _write_tokenizer(file: GgufFile, folder: Path) -> None:
    """The tokenizer beside the file, else the one in it."""
    beside = [file.path.parent / name for name in _TOKENIZER_FILES]
    if any(path.name in {"tokenizer.json", "vocab.json"} and path.is_file() for path in beside):
        for path in beside:
            if path.is_file():
                (folder / path.name).symlink_to(path)
        return
    try:
        with large_imports():
            from transformers import AutoTokenizer  # noqa: PLC0415 - seconds, once for a file
        tokenizer = AutoTokenizer.from_pretrained(file.path.parent, gguf_file=file.path.name)
        tokenizer.save_pretrained(folder)
    except Exception as error:  # transformers raises many kinds
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        logger.warning(
            "%s: its tokenizer cannot be read (%s): give --tokenizer the folder of the original model, or put its"
            " tokenizer.json beside the file (pip install gguf lets transformers read more of them)",
            *(file.path, reason),
        )
        return
    template = file.metadata.get("tokenizer.chat_template")
    if isinstance(template, str):
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")

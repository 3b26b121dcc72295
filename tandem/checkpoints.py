"""Find a checkpoint's folder by name, and check that two checkpoints fit."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from engine.refused_checkpoints import check_config
from specdec.checkpoint_config import read_text_config
from specdec.errors import InvalidRequest, ModelNotSupported, TandemError
from specdec.methods import HEAD_METHODS, method_of
from specdec.vocabulary import check_shared_tokens
from tandem.gguf_folder import folder_of

MODELS: Final = Path(__file__).with_name("models")
#: The bundled pair: served when no model is named.
TARGET: Final = "python-12m"
DRAFT: Final = "python-1m"
#: What a hub download fetches; weights in other formats are left where they are.
_HUB_FILES: Final = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.py")
OLDER_WEIGHTS: Final = ("*.bin", "*.pt")


def find_checkpoint(name: str) -> str:
    """The folder of a checkpoint: a folder, a GGUF file, a bundled model's name, or a name on the Hugging Face hub.

    Raises :class:`InvalidRequest` when there is no such checkpoint, and :class:`ModelNotSupported` for files of another
    format.
    """
    folder = Path(name).expanduser()
    if folder.is_file() and folder.suffix == ".gguf":
        return folder_of(folder)
    if folder.exists():
        if not (folder / "config.json").is_file():
            check_config(folder)
        return str(folder)
    if (MODELS / name / "config.json").is_file():
        return str(MODELS / name)
    if is_hub_name(name):
        return fetch_checkpoint(name)
    raise InvalidRequest(
        f"model {name!r} does not exist: give the folder of a Hugging Face checkpoint, a hub name (owner/name), or"
        f" a bundled model ({', '.join(bundled_models()) or 'none here'})",
        param="model",
    )


def bundled_models() -> list[str]:
    """Names of the models that come with Tandem."""
    return sorted(path.parent.name for path in MODELS.glob("*/config.json"))


def bundled_drafter(target: str | None, methods: Sequence[str]) -> str | None:
    """The bundled checkpoint of one of the methods that is made for this target (None: the bundled one), if any."""
    name = TARGET if target is None else Path(target).name
    if target not in (None, name, str(MODELS / name)):
        return None
    known = {method: f"{name}-{method}" for method in HEAD_METHODS}
    if name == TARGET:
        known["draft_model"] = DRAFT
    bundled = bundled_models()
    return next((known[method] for method in methods if known.get(method) in bundled), None)


def is_hub_name(name: str) -> bool:
    """Whether it has the form of a name on the Hugging Face hub."""
    return name.count("/") == 1 and not name.startswith((".", "/", "~")) and not name.endswith("/")


def fetch_checkpoint(name: str) -> str:
    """The folder of a checkpoint of the hub, downloaded unless it is in the local cache.

    Raises :class:`InvalidRequest` where the hub has no such checkpoint, or does not answer.
    """
    from huggingface_hub import snapshot_download  # noqa: PLC0415 (slow to import, rarely needed)

    try:
        configs = snapshot_download(name, allow_patterns=["*.json"])
        check_config(configs, is_head=method_of(configs) in HEAD_METHODS)
        folder = snapshot_download(name, allow_patterns=list(_HUB_FILES))
        if not any(Path(folder).glob("*.safetensors")):  # as with many heads
            folder = snapshot_download(name, allow_patterns=[*_HUB_FILES, *OLDER_WEIGHTS])
        return str(folder)
    except TandemError:
        raise
    except Exception as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise InvalidRequest(
            f"model {name!r} is no folder here and the hub did not give it: {reason}; without a network, copy the"
            " checkpoint here and give its folder",
            param="model",
        ) from None


def check_pair(target: str, draft: str, *, tokenizer: str | None = None) -> str | None:
    """Refuse a draft whose token ids mean something else than the target's.

    A larger, padded embedding on either side is fine; what counts are the tokenizers, or the vocabulary sizes where
    a checkpoint has no ``tokenizer.json``. A draft may know more tokens than the target: returns the tokenizer that it
    has to go by then, the target's. Raises :class:`ModelNotSupported` naming both.
    """
    is_longer = check_shared_tokens(tokenizer or target, draft)
    if is_longer is not None:
        return (tokenizer or target) if is_longer else None
    sizes = _vocab_size(target), _vocab_size(draft)
    if None not in sizes and sizes[0] != sizes[1]:
        raise ModelNotSupported(
            f"draft {draft} and target {target} have different vocabularies ({sizes[1]} and {sizes[0]} tokens);"
            " speculation needs a draft with the target's tokenizer"
        )
    return None


def _vocab_size(folder: str) -> int | None:
    return read_text_config(folder).get("vocab_size")

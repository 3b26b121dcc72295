"""A model with the bundled tokenizer as GGUF: ``python to_gguf.py LLAMA_CPP MODEL OUT [TYPE]``.

``LLAMA_CPP`` is a checkout of llama.cpp. Its converter refuses tokenizers it does not know by name; the bundled one
splits text as GPT-2's does. ``TYPE`` is f32 (default) or q8_0.
"""

import runpy
import sys


def main() -> None:
    """Convert with llama.cpp's own script."""
    checkout, model, out, *kind = sys.argv[1:]
    sys.path[:0] = [checkout, f"{checkout}/gguf-py"]
    from conversion.base import TextModel  # type: ignore[import-not-found]  # noqa: PLC0415

    TextModel.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"
    sys.argv[1:] = [model, "--outfile", out, "--outtype", *(kind or ["f32"])]
    runpy.run_path(f"{checkout}/convert_hf_to_gguf.py", run_name="__main__")


if __name__ == "__main__":
    main()

"""Every type of block is decoded as the gguf package decodes it, bit for bit."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from engine.gguf_file import BLOCK_TYPES, GgufFile
from engine.quantised.gguf_blocks import read_grouped, read_plain
from specdec.errors import InvalidRequest, ModelNotSupported

_ROWS, _COLUMNS = 6, 512
_TYPES = [block.name for block in BLOCK_TYPES.values() if block.numbers > 1]


def _random_blocks(name: str) -> np.ndarray:
    """Rows of blocks of random bytes, whose float16 numbers are finite."""
    block = next(block for block in BLOCK_TYPES.values() if block.name == name)
    generator = np.random.default_rng(sum(map(ord, name)))
    blocks = generator.integers(0, 256, (_ROWS, _COLUMNS // block.numbers, block.num_bytes), dtype=np.uint8)
    places = [208] if name == "Q6_K" else [0, 2] if name in {"Q4_1", "Q5_1", "Q4_K", "Q5_K"} else [0]
    for at in places:
        blocks[..., at : at + 2] = generator.normal(size=blocks.shape[:2]).astype(np.float16)[..., None].view(np.uint8)
    return blocks.reshape(_ROWS, -1)


def _write(path: Path, name: str, data: np.ndarray) -> GgufFile:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("blk.0.ffn_up.weight", data, raw_dtype=gguf.GGMLQuantizationType[name])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return GgufFile(path)


@pytest.mark.parametrize("name", _TYPES)
def test_blocks_are_decoded_as_ggml_does(name: str, tmp_path: Path) -> None:
    data = _random_blocks(name)
    expected = torch.from_numpy(gguf.quants.dequantize(data, gguf.GGMLQuantizationType[name]))
    file = _write(tmp_path / "a.gguf", name, data)
    weight = read_grouped(file, "blk.0.ffn_up.weight")
    assert weight is not None
    assert torch.equal(weight.decode(), expected)
    assert weight.bits == (4 if name in {"Q4_0", "Q4_1", "Q4_K"} else 8)
    assert torch.equal(read_plain(file, "blk.0.ffn_up.weight"), expected)


@pytest.mark.parametrize(("name", "dtype"), [("F32", np.float32), ("F16", np.float16)])
def test_plain_numbers_stay_as_they_are(name: str, dtype: type, tmp_path: Path) -> None:
    data = np.random.default_rng(1).normal(size=(_ROWS, _COLUMNS)).astype(dtype)
    file = _write(tmp_path / "a.gguf", name, data)
    assert read_grouped(file, "blk.0.ffn_up.weight") is None
    assert torch.equal(read_plain(file, "blk.0.ffn_up.weight"), torch.from_numpy(data))


def test_damaged_files_and_other_types_are_named(tmp_path: Path) -> None:
    file = _write(tmp_path / "a.gguf", "Q8_0", _random_blocks("Q8_0"))
    whole = file.path.read_bytes()
    for data, text in (
        (whole[:-100], "ends behind its"),
        (whole[:40], "its header cannot be read"),
        (b"GGML" + whole[4:], "does not begin with GGUF"),
        (whole[:8] + b"\xff" * 8 + whole[16:], "its header cannot be read"),
    ):
        (tmp_path / "b.gguf").write_bytes(data)
        with pytest.raises(InvalidRequest, match=f"truncated or damaged .*{text}"):
            GgufFile(tmp_path / "b.gguf")
    with pytest.raises(InvalidRequest, match="cannot be read"):
        GgufFile(tmp_path / "c.gguf")
    data = np.zeros((1, 84), dtype=np.uint8)
    with pytest.raises(ModelNotSupported, match=r"as Q2_K, which is not read: take a file of F32, .*Q4_K_M"):
        _write(tmp_path / "d.gguf", "Q2_K", data)

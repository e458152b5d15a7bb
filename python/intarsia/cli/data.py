"""Text as bytes: the corpus, its held-out part, batches that depend on seed and step alone, the unigram baseline."""

import hashlib
import math
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

#: Parts of a Python installation that are not the standard library, or are test data of odd encodings.
_SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
_BLOCK = 1 << 16
_HELD_OUT = 20  # every 20th block


@dataclass(frozen=True)
class Corpus:
    """Bytes to learn from and bytes to be judged by, both uint8 of rank 1, and a fingerprint of the two."""

    name: str
    files: int
    train: Tensor
    held_out: Tensor
    sha256: str


def load_corpus(text: str | None, context: int) -> Corpus:
    """Reads a file, a directory, or (None) the *.py files of the running Python's standard library.

    The bytes, in sorted order of the files, are cut into blocks of 64 KiB (shorter for a short text); every 20th is
    held out.
    ValueError when the text is missing or too short for one window of `context` bytes in either part.
    """
    root = Path(text) if text else Path(sysconfig.get_path("stdlib"))
    if not root.exists():
        raise ValueError(
            f"text: expected a file or a directory, got {str(root)!r}, which does not exist; give --text PATH"
        )
    files = [root] if root.is_file() else _files(root, "*" if text else "*.py")
    data = b"".join(f.read_bytes() for f in files)
    block = min(_BLOCK, len(data) // _HELD_OUT)
    if block <= context:
        raise ValueError(
            f"text: expected more than {_HELD_OUT * (context + 1)} bytes for a context of {context}, "
            f"got {len(data)} in {root}; give a longer text or a smaller --context"
        )
    blocks = [data[i : i + block] for i in range(0, len(data), block)]
    held_out = b"".join(blocks[_HELD_OUT - 1 :: _HELD_OUT])
    train = b"".join(b for i, b in enumerate(blocks) if i % _HELD_OUT != _HELD_OUT - 1)
    name = str(root) if text else f"Python's standard library ({root})"
    return Corpus(name, len(files), _tensor(train), _tensor(held_out), hashlib.sha256(data).hexdigest())


def _files(root: Path, pattern: str) -> list[Path]:
    found = (p for p in root.rglob(pattern) if not _SKIPPED & set(p.relative_to(root).parts[:-1]))
    return sorted(
        p for p in found if p.is_file() and not any(part.startswith(".") for part in p.relative_to(root).parts)
    )


def _tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def batch(data: Tensor, step: int, *, seed: int, batch: int, context: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets (batch, context) int64 of one step: windows at places drawn from (seed, step) alone.

    So a resumed run reads what an uninterrupted one would have read, without a position to store.
    """
    key = hashlib.sha256(f"{seed}/{step}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(key[:7], "little"))
    starts = torch.randint(len(data) - context, (batch,), generator=generator)
    return _windows(data, starts, context)


def held_out_windows(data: Tensor, *, context: int, limit: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets (n, context) of at most `limit` windows, evenly spaced, the same at every call."""
    count = min(limit, (len(data) - 1) // context)
    starts = torch.arange(count) * ((len(data) - context - 1) // max(1, count - 1) if count > 1 else 0)
    return _windows(data, starts, context)


def _windows(data: Tensor, starts: Tensor, context: int) -> tuple[Tensor, Tensor]:
    index = starts[:, None] + torch.arange(context + 1)
    window = data[index].long()
    return window[:, :-1], window[:, 1:]


def unigram_bits(train: Tensor, targets: Tensor) -> float:
    """Bits per byte of `targets` under the byte frequencies of `train` (one added to each count)."""
    counts = torch.bincount(train.long(), minlength=256).double() + 1
    bits = -(counts / counts.sum()).log2()
    return bits[targets.reshape(-1)].mean().item()


def bits(nats: float) -> float:
    """Nats per byte as bits per byte."""
    return nats / math.log(2)

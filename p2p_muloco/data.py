"""The text of a run, its split into training and held-out text, and who reads which window of it.

Text is bytes; byte 0 parts documents. A reader's whole state is one integer, the cursor.
"""

from __future__ import annotations

import hashlib
import lzma
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from p2p_muloco.config import DataConfig
from p2p_muloco.errors import CorpusError

__all__ = ["SOTU_SHA256", "Corpus", "Stream", "decode", "heldout_windows", "load_corpus", "text_sha256"]

SOTU_SHA256: Final = "5f57ab8fdc4eb6666ccc1fa800be51871c35d6d763bc73eba1310331d2318315"  # see PROVENANCE.md
MIN_SIDE_BYTES: Final = 9  # one window of the shortest model.seq_len a config allows

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, eq=False)
class Corpus:
    """A text cut in two: `train` followed by `heldout` is the text, byte for byte. Both are read-only."""

    train: Bytes
    heldout: Bytes


@dataclass(frozen=True, eq=False)
class Stream:
    """One peer's endless sequence of batches: `batch` is a pure function of (seed, stream, cursor).

    Windows begin anywhere in `train`, with replacement, and may span documents: over n windows' worth of text about
    1/e of it stays unread. Streams of other ids have another Philox key, so no two read the same sequence.
    CorpusError if `train` has no whole window; ValueError if seed or cursor is negative or stream not in [0, 2**64).
    """

    train: Bytes
    seed: int
    stream: int
    seq_len: int
    batch_size: int

    def __post_init__(self) -> None:
        _check_length(self.train, self.seq_len + 1, "training")

    def batch(self, cursor: int) -> torch.Tensor:
        """Return windows (batch_size, seq_len + 1) int64."""
        # Raw words: numpy promises its bit generators for good, its distributions not. The cursor is the counter's
        # second word, so no batch, however large, runs into the next. Up to 16 GB the bias of % is below 2^-30.
        raw = np.random.Philox(key=self.stream << 64 | self.seed, counter=cursor << 64).random_raw(self.batch_size)
        starts = raw % np.uint64(len(self.train) - self.seq_len)
        return _windows(self.train, starts.astype(np.int64), self.seq_len)


def load_corpus(config: DataConfig, path: Path | None = None) -> Corpus:
    """Return the run's text: the one at `path`, else the built-in one; CorpusError if it is absent or another text."""
    builtin = config.corpus == "sotu"
    if path is None and not builtin:
        raise CorpusError(f"data.corpus = {config.corpus!r} is not built in: give that text with --data PATH")
    text = _read_sotu() if path is None else _read(path)
    expected = config.sha256 or (SOTU_SHA256 if builtin else "")
    found = hashlib.sha256(text).hexdigest()
    if expected and found != expected:
        raise CorpusError(f"{path or 'the built-in text'} is not the text of data.corpus = {config.corpus!r}: expected "
                          f"sha256 {expected}, found {found}; give the run's text with --data PATH")
    return _split(np.frombuffer(text, dtype=np.uint8), config.heldout)


def text_sha256(path: Path) -> str:
    """Return the hex sha256 of a text file's bytes, for `data.sha256`; CorpusError if it can't be read."""
    return hashlib.sha256(_read(path)).hexdigest()


def heldout_windows(corpus: Corpus, seq_len: int, n: int) -> torch.Tensor:
    """Return n windows (n, seq_len + 1) int64, evenly spaced from the first byte of the held-out text to its last."""
    _check_length(corpus.heldout, seq_len + 1, "held-out")
    last = len(corpus.heldout) - seq_len - 1
    return _windows(corpus.heldout, np.arange(n, dtype=np.int64) * last // max(1, n - 1), seq_len)


def decode(data: Iterable[int]) -> str:
    """Return bytes or byte tokens as text to print: borders of documents as line ends, broken UTF-8 as U+FFFD."""
    return bytes([int(byte) for byte in data]).decode("utf-8", errors="replace").replace("\0", "\n")


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise CorpusError(f"text {path}: {error.strerror}; give a file you can read with --data PATH") from None


def _read_sotu() -> bytes:
    try:
        packed = resources.files("p2p_muloco").joinpath("corpus", "sotu.txt.xz").read_bytes()
        return lzma.decompress(packed)
    except (OSError, lzma.LZMAError) as error:
        remedy = "reinstall p2p-muloco, or give the text with --data PATH"
        raise CorpusError(f"the built-in text can't be read ({error}): {remedy}") from None


def _split(text: Bytes, share: float) -> Corpus:
    """Cut at the border of documents nearest to the wished share; at that very byte if none is within a factor of 2."""
    wished = round(len(text) * share)
    heldout = len(text) - 1 - np.flatnonzero(text == 0)  # bytes after each border
    heldout = heldout[(heldout >= wished / 2) & (heldout <= 2 * wished)]
    size = int(heldout[np.abs(heldout - wished).argmin()]) if len(heldout) else wished
    corpus = Corpus(train=text[: len(text) - size], heldout=text[len(text) - size :])
    _check_length(corpus.train, MIN_SIDE_BYTES, "training")
    _check_length(corpus.heldout, MIN_SIDE_BYTES, "held-out")
    return corpus


def _windows(text: Bytes, starts: npt.NDArray[np.int64], seq_len: int) -> torch.Tensor:
    return torch.from_numpy(text[starts[:, None] + np.arange(seq_len + 1)].astype(np.int64))


def _check_length(text: Bytes, needed: int, side: str) -> None:
    if len(text) < needed:
        raise CorpusError(f"the {side} text has {len(text)} bytes, one window needs {needed} (model.seq_len + 1): "
                          "give a longer text with --data PATH, or change data.heldout or model.seq_len")

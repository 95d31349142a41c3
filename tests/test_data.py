"""The built-in text and its provenance, the split, and streams as pure functions of (seed, stream, cursor)."""

from __future__ import annotations

import hashlib
import lzma
from importlib import resources

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from p2p_muloco import data
from p2p_muloco.config import DataConfig
from p2p_muloco.data import SOTU_SHA256, Corpus, Stream, decode, heldout_windows, load_corpus, text_sha256
from p2p_muloco.errors import CorpusError

MASK = 2**64 - 1
TEXT = np.frombuffer(bytes(range(1, 251)) * 40, dtype=np.uint8)  # 10,000 bytes
POSITIONS = np.random.default_rng(0).integers(0, 256, 100_000, dtype=np.uint8)
IDS = st.integers(0, MASK)


@pytest.fixture(scope="module")
def sotu() -> Corpus:
    return load_corpus(DataConfig())


def whole(corpus: Corpus) -> bytes:
    return corpus.train.tobytes() + corpus.heldout.tobytes()


def philox(key: tuple[int, int], counter: list[int]) -> list[int]:
    """Philox4x64-10 as published (Salmon et al. 2011), in Python's integers: four words of one counter."""
    k, c = list(key), list(counter)
    for _ in range(10):
        p, q = 0xD2E7470EE14C6C93 * c[0], 0xCA5A826395121157 * c[2]
        c = [q >> 64 ^ c[1] ^ k[0], q & MASK, p >> 64 ^ c[3] ^ k[1], p & MASK]
        k = [(k[0] + 0x9E3779B97F4A7C15) & MASK, (k[1] + 0xBB67AE8584CAA73B) & MASK]
    return c


def test_the_built_in_text_is_the_one_its_provenance_describes(sotu):
    text, note = whole(sotu), (resources.files("p2p_muloco") / "corpus" / "PROVENANCE.md").read_text("utf-8")
    assert hashlib.sha256(text).hexdigest() == SOTU_SHA256
    assert all(fact in note for fact in (SOTU_SHA256, str(len(text)), "`sotu` 0.1.2", "public domain", "MIT License"))
    assert text.count(b"\0") == 248 and b"\r" not in text and all(text.split(b"\0"))
    text.decode("utf-8")


def test_the_split_is_at_the_border_of_a_speech_and_loses_nothing(sotu):
    assert sotu.train[-1] == 0 and sotu.heldout[0] != 0
    assert len(sotu.heldout) / len(whole(sotu)) == pytest.approx(0.05, abs=0.002)
    assert whole(sotu).index(sotu.heldout[:2000].tobytes()) == len(sotu.train)  # no speech on both sides
    assert sotu.train[:16].tobytes() == b"Fellow-Citizens " and b"Madam Speaker" in sotu.heldout[:20].tobytes()
    assert not sotu.train.flags.writeable and not sotu.heldout.flags.writeable


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 400), min_size=1, max_size=40),
    share=st.floats(0.05, 0.5),
)
def test_split_conserves_the_text_and_stays_within_a_factor_of_two(tmp_path_factory, lengths, share):
    path = tmp_path_factory.mktemp("split") / "x.txt"
    text = b"\0".join(b"a" * n for n in [*lengths, 400])
    path.write_bytes(text)
    corpus = load_corpus(DataConfig(corpus="x.txt", heldout=share), path)
    assert whole(corpus) == text
    assert 0.5 * round(len(text) * share) <= len(corpus.heldout) <= 2 * round(len(text) * share)
    ends = [len(text) - i - 1 for i, byte in enumerate(text) if byte == 0]
    wished = round(len(text) * share)
    near = [end for end in ends if wished / 2 <= end <= 2 * wished]
    nearest = min((abs(end - wished) for end in near), default=0)
    assert abs(len(corpus.heldout) - wished) == nearest


def test_a_text_of_one_document_is_cut_at_the_byte(tmp_path):
    (tmp_path / "x.txt").write_bytes(bytes(TEXT))
    corpus = load_corpus(DataConfig(corpus="x.txt", heldout=0.1), tmp_path / "x.txt")
    assert (len(corpus.train), len(corpus.heldout)) == (9000, 1000)


def test_a_hash_that_differs_is_refused_with_both_and_the_remedy(tmp_path):
    path, right = tmp_path / "x.txt", hashlib.sha256(bytes(TEXT)).hexdigest()
    path.write_bytes(bytes(TEXT))
    assert text_sha256(path) == right
    assert whole(load_corpus(DataConfig(corpus="x.txt", sha256=right), path)) == bytes(TEXT)
    with pytest.raises(CorpusError, match=f"{'0' * 64}, found {right}.*--data PATH"):
        load_corpus(DataConfig(corpus="x.txt", sha256="0" * 64), path)


def test_the_built_in_name_stands_for_one_text(tmp_path, sotu):
    with pytest.raises(CorpusError, match=f"built-in text.*{'0' * 64}, found {SOTU_SHA256}"):
        load_corpus(DataConfig(sha256="0" * 64))
    (tmp_path / "other.txt").write_bytes(bytes(TEXT))
    with pytest.raises(CorpusError, match=f"other.txt.*expected sha256 {SOTU_SHA256}"):
        load_corpus(DataConfig(), tmp_path / "other.txt")
    (tmp_path / "same.txt").write_bytes(whole(sotu))
    assert whole(load_corpus(DataConfig(sha256=SOTU_SHA256), tmp_path / "same.txt")) == whole(sotu)


def test_a_text_that_is_absent_is_named(tmp_path):
    with pytest.raises(CorpusError, match=r"'x\.txt' is not built in.*--data PATH"):
        load_corpus(DataConfig(corpus="x.txt"))
    for path in (tmp_path / "gone.txt", tmp_path):
        with pytest.raises(CorpusError, match=rf"{path}.*--data PATH"):
            load_corpus(DataConfig(corpus="x.txt"), path)
    with pytest.raises(CorpusError, match="gone"):
        text_sha256(tmp_path / "gone.txt")


@pytest.mark.parametrize("damage", [b"", lzma.compress(b"x" * 999)[:-20], b"not xz"])
def test_a_damaged_installation_says_so(tmp_path, monkeypatch, damage):
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "sotu.txt.xz").write_bytes(damage)
    monkeypatch.setattr(data.resources, "files", lambda package: tmp_path)
    with pytest.raises(CorpusError, match="reinstall"):
        load_corpus(DataConfig())


@pytest.mark.parametrize(("text", "side"), [(b"", "training"), (b"a" * 20, "held-out"), (b"a\0bbb", "training")])
def test_a_text_that_is_too_short_is_refused(tmp_path, text, side):
    (tmp_path / "x.txt").write_bytes(text)
    with pytest.raises(CorpusError, match=rf"the {side} text has \d+ bytes"):
        load_corpus(DataConfig(corpus="x.txt", heldout=0.4), tmp_path / "x.txt")


def test_a_window_longer_than_a_side_is_refused():
    with pytest.raises(CorpusError, match=r"training text has 10000 bytes, one window needs 10001"):
        Stream(TEXT, 0, 0, seq_len=10_000, batch_size=1)
    assert Stream(TEXT, 0, 0, seq_len=9_999, batch_size=2).batch(5).tolist() == [TEXT.tolist()] * 2
    with pytest.raises(CorpusError, match="held-out"):
        heldout_windows(Corpus(train=TEXT, heldout=TEXT[:16]), 16, 1)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**31 - 1), stream=IDS, cursor=IDS)
def test_windows_begin_where_published_philox_says(seed, stream, cursor):
    size = 6
    raw = philox((seed, stream), [1, cursor, 0, 0]) + philox((seed, stream), [2, cursor, 0, 0])  # numpy counts from 1
    starts = [word % (10_000 - 16) for word in raw[:size]]
    batch = Stream(TEXT, seed, stream, seq_len=16, batch_size=size).batch(cursor)
    assert batch.dtype == torch.int64 and batch.tolist() == [TEXT[s : s + 17].tolist() for s in starts]


def test_a_stream_resumes_at_its_cursor_in_any_order(sotu):
    first = [Stream(sotu.train, 1, 2, 64, 4).batch(cursor) for cursor in range(30)]
    again = Stream(sotu.train, 1, 2, 64, 4)
    resumed = {cursor: again.batch(cursor) for cursor in reversed(range(10, 30))}
    assert all(torch.equal(first[cursor], resumed[cursor]) for cursor in range(10, 30))  # the next 20 batches
    assert len({bytes(row.byte().numpy()) for batch in first for row in batch}) == 120


@settings(max_examples=40, deadline=None)
@given(a=st.tuples(IDS, IDS), b=st.tuples(IDS, IDS), seed=st.integers(0, 2**31 - 1))
def test_other_streams_seeds_and_cursors_read_other_windows(a, b, seed):
    def read(seed: int, stream: int, cursor: int) -> list[list[int]]:
        return Stream(POSITIONS, seed, stream, seq_len=8, batch_size=8).batch(cursor).tolist()

    if a != b:
        assert read(seed, *a) != read(seed, *b)
    assert read(seed, *a) != read(seed + 1, *a)


def test_windows_cover_the_text_evenly_up_to_its_ends():
    ramp = np.arange(100, dtype=np.uint8)
    starts = Stream(ramp, 3, 4, seq_len=8, batch_size=20_000).batch(0)[:, 0]
    counts = torch.bincount(starts, minlength=100)
    assert counts[92:].sum() == 0 and counts[:92].min() > 150 and counts[:92].max() < 290  # 217 expected, s.d. 15


@pytest.mark.parametrize("wrong", [{"seed": -1}, {"stream": -1}, {"stream": 2**64}])
def test_ids_out_of_range_are_refused(wrong):
    with pytest.raises(ValueError, match="key"):
        Stream(TEXT, **{"seed": 0, "stream": 0, **wrong}, seq_len=8, batch_size=1).batch(0)


def test_heldout_windows_are_spaced_from_end_to_end():
    corpus = Corpus(train=TEXT, heldout=np.arange(100, dtype=np.uint8))
    windows = heldout_windows(corpus, 9, 4)
    assert windows.dtype == torch.int64 and windows[:, 0].tolist() == [0, 30, 60, 90]
    assert windows[:, -1].tolist() == [9, 39, 69, 99]
    assert heldout_windows(corpus, 99, 1).tolist() == [list(range(100))]


def test_decode_prints_anything():
    assert decode(b"one\0two \xe2\x80\x94 \xff") == "one\ntwo — \ufffd"
    assert decode([72, 105]) == decode(np.array([72, 105])) == decode(torch.tensor([72, 105])) == "Hi"

"""Coverage-guided fuzzing of every decoder; not collected by pytest, and atheris is no dependency (pip install atheris).

    PYTHONPATH=.:tests python tests/fuzz_atheris.py -max_total_time=600 -max_len=4096 [CORPUS_DIR]

The first byte of an input chooses the decoder. What a decoder may raise are the errors of the tree; anything else, or more
than 512 MB (-rss_limit_mb), stops the run and leaves the input in a file. Without a folder it begins from sound samples.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import atheris

with atheris.instrument_imports(include=["p2p_muloco"]):
    import kit
    import torch
    from test_fuzz import HASH, LAW, ME, sound_state, state_of
    from test_wire import FRAMED, RECORDS, entry_bytes

    from p2p_muloco import chain
    from p2p_muloco.addresses import check_address
    from p2p_muloco.chain import Entry, Signed, Tip, advance, check_entry
    from p2p_muloco.codec import make_codec
    from p2p_muloco.config import CODECS, JoinString, RunConfig
    from p2p_muloco.errors import BadPacket, ConfigError, StateUnavailable
    from p2p_muloco.messages import KINDS
    from p2p_muloco.reports import Report, pack_report, read_report
    from p2p_muloco.requests import REQUESTS, WantChunk, WantDial, WantEntry, WantRun, fetch_manifest, pack_request, read_request
    from p2p_muloco.waypoint import Waypoint, read_waypoint
    from p2p_muloco.wire import Record, read_frame, write_frame

chain.verify = lambda peer, purpose, message, signature: True  # who signs may write what it likes
ENTRY_LAW, SMALL = kit.law(kit.VECTORS, min_peers=2), kit.law({"a": (4,), "b": (2, 3)})
REPORT = Report(run_id="r", peer=ME.peer_id, name="n", k=1, head=HASH, inner_steps=1, tokens_total=1, tokens_per_s=1.0,
                loss=1.0, client=0, device="cpu", version="1", at_s=1, named=(ME.peer_id,), named_why=(3,), named_round=(1,))


def samples() -> list[tuple[Callable[[bytes], Any], list[bytes]]]:
    """Each decoder with sound inputs."""
    frames = [b"".join(map(bytes, write_frame(record))) for record in FRAMED]
    fields: dict[type[Record], tuple[Any, ...]] = {WantRun: (HASH,), WantEntry: (3,), WantChunk: (3, 1, HASH), WantDial: (9,)}
    requests = [pack_request(kind(*fields.get(kind, ()))) for kind in REQUESTS.values()]
    found: list[tuple[Callable[[bytes], Any], list[bytes]]] = [
        (lambda b: read_frame(b, KINDS), frames),
        (read_request, requests),
        (lambda b: read_waypoint(LAW, b), [Waypoint(3, HASH, bytes(64)).pack()]),
        *((type(record).unpack, [record.pack()]) for record in RECORDS[:4]),
        (lambda b: Entry.unpack(b, 10**6), [entry_bytes()]),
        (applied, [entry_bytes()]),
        (read_report, [pack_report(Signed.make(REPORT, ME))]),
        (lambda b: state_of(SMALL, b), [sound_state(SMALL)]),
        (lambda b: fetch_manifest(LAW, lambda donor, request, most: b, b""), [b"\x93\x01\x05\x90"]),
        (RunConfig.from_bytes, [RunConfig().to_bytes()]),
        (lambda b: RunConfig.from_toml(b.decode(errors="replace")), [b"[run]\nseed = 1\n[inner]\nlr = 0.1\n"]),
        (JoinString._from_body, [b"\x94\xa1a\xc4\x00\xc4\x00\x91\xa1/"]),
        (lambda b: check_address(b.decode(errors="replace")), [b"/ip4/1.2.3.4/tcp/31337/p2p/12D3KooW" + b"1" * 44]),
    ]
    for name in CODECS:
        codec, n = make_codec(name), 300
        found.append((lambda b, codec=codec, n=n: finite(codec.decode(b, n)), [codec.encode(torch.randn(n))]))
    return found


def applied(packed: bytes) -> None:
    tip = advance(ENTRY_LAW, ENTRY_LAW.genesis, check_entry(ENTRY_LAW, ENTRY_LAW.genesis, Entry.unpack(packed, 10**6)))
    assert Tip.unpack(tip.pack()) == tip


def finite(values: torch.Tensor) -> None:
    assert bool(values.isfinite().all())


DECODERS = samples()


def one_input(data: bytes) -> None:
    if not data:
        return
    with contextlib.suppress(BadPacket, ConfigError, StateUnavailable):
        DECODERS[data[0] % len(DECODERS)][0](data[1:])


def main() -> None:
    arguments = sys.argv
    if all(argument.startswith("-") for argument in arguments[1:]):
        folder = Path(tempfile.mkdtemp(prefix="fuzz-"))
        for i, (_, inputs) in enumerate(DECODERS):
            for j, packed in enumerate(inputs):
                (folder / f"{i}-{j}").write_bytes(bytes([i]) + packed)
        arguments = [*arguments, str(folder)]
    atheris.Setup(["fuzz", "-rss_limit_mb=2048", *arguments[1:]], one_input)
    atheris.Fuzz()


if __name__ == "__main__":
    main()

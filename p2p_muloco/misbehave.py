"""A member that is wrong on purpose, to see that the others bear it. What it wraps is honest and knows nothing of it.

Wrong packets are put in before the member signs for them, wrong averages and lengths where its messages leave. Its own
trainer is made to believe that what was counted is what it had to say, so it stays in step and goes on for hours.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from p2p_muloco.chain import NODE, Checked, Hello, Law, Signed, SpanRecord, Start, Tip
from p2p_muloco.identity import Identity
from p2p_muloco.member import Committed, Member, Outcome
from p2p_muloco.messages import Averaged, Join, Parts, RecordMessage, StartMessage
from p2p_muloco.packet import Packet
from p2p_muloco.wire import Record

__all__ = ["Misbehaving", "member_factory"]

HUGE = 1e30
TOO_MANY_STEPS = 10**9


def member_factory(kind: str | None) -> Callable[..., Any]:
    """What builds a peer's member: one that does what `chaos.MISBEHAVIOURS` names, or an honest one."""
    return partial(Misbehaving, kind) if kind else Member


class Misbehaving:
    """Takes a member's place: all that is not here is the member's."""

    def __init__(self, kind: str, law: Law, identity: Identity, tip: Tip, *, mode: int = NODE, rate_kbps: int = 20_000) -> None:
        self.kind, self.law, self.identity = kind, law, identity
        self._member = Member(law, identity, tip, mode=mode, rate_kbps=rate_kbps)
        self._honest: Packet | None = None
        self._told: Packet | None = None
        self._outbox: list[tuple[bytes, Record]] = []
        self._outcomes: list[Outcome] = []
        self._group = b""  # of the last attempt, with its members, and this one's spans in it: index -> first part
        self._members: tuple[bytes, ...] = ()
        self._firsts: dict[int, int] = {}
        self._sent: dict[tuple[int, bytes], Any] = {}  # (span, peer) -> hash of what that peer was told of it

    def __getattr__(self, name: str) -> Any:
        return getattr(self._member, name)

    def begin(self, packet: Packet, now: float) -> None:
        if self._told is None or packet != self._honest:
            self._told, self._honest = self._wrong_packet(packet), packet
        self._member.begin(self._told, now)

    def _wrong_packet(self, packet: Packet) -> Packet:
        layout, payload = self.law.layout, packet.payload
        if self.kind == "nan":
            payload = b"\xff" * len(payload)  # as fp32, as fp16 and as a scale
        elif self.kind == "huge":
            payload = layout.encode(torch.full((layout.n_elements,), HUGE))
        elif self.kind == "stale" and self._honest is not None:
            payload = self._honest.payload
        elif self.kind.startswith("flip"):
            said = [layout.decode_up(i, layout.up_slice(payload, i, i + 1)) for i in range(len(layout.parts))]
            payload = layout.encode(torch.cat(said).mul_(-float(self.kind[4:] or 1)))
        return dataclasses.replace(packet, payload=payload)

    # -- what it says

    @property
    def outbox(self) -> list[tuple[bytes, Record]]:
        said, self._member.outbox = self._member.outbox, []
        attempt = self._member.attempt
        if attempt is not None and attempt.start.group != self._group:
            self._group, self._members, self._sent = attempt.start.group, attempt.start.members, {}
            self._firsts = {span.index: span.first for span in attempt.start.spans if span.reducer == self._member.me}
        self._outbox += [(to, self._wrong_message(to, message)) for to, message in said]
        return self._outbox

    @outbox.setter
    def outbox(self, value: list[tuple[bytes, Record]]) -> None:
        self._outbox = value

    def _wrong_message(self, to: bytes, message: Record) -> Record:
        lies = self.kind in ("equivocate", "huge-average")
        match message:
            case Parts() if self.kind == "length":
                return dataclasses.replace(message, data=bytes(message.data)[:-1])
            case Join() if self.kind == "h":
                hello = self._wrong_hello(message.hello)
                return dataclasses.replace(message, hello=hello.body, signature=hello.signature)
            case StartMessage() if self.kind == "h":
                return self._wrong_start(Start.unpack(message.body))
            case Averaged() if lies and message.group == self._group and message.span in self._firsts:
                return self._wrong_average(to, message)
            case RecordMessage() if lies and message.group == self._group:
                return self._wrong_record(to, message)
        return message

    def _wrong_hello(self, body: bytes) -> Signed:
        return Signed.make(dataclasses.replace(Hello.unpack(body), h=TOO_MANY_STEPS), self.identity)

    def _wrong_start(self, start: Start) -> StartMessage:
        at = self._members.index(self._member.me)
        hello, hellos, signatures = self._wrong_hello(start.hellos[at]), list(start.hellos), list(start.signatures)
        hellos[at], signatures[at] = hello.body, hello.signature
        signed = Signed.make(dataclasses.replace(start, hellos=tuple(hellos), signatures=tuple(signatures)), self.identity)
        return StartMessage(signed.body, signed.signature)

    def _wrong_average(self, to: bytes, message: Averaged) -> Averaged:
        if self.kind == "huge-average":
            parts = self.law.layout.parts[message.first : message.stop]
            data = b"".join(part.down.encode(torch.full((part.size,), HUGE)) for part in parts)
        else:  # one bit or more of the last value, another for each member
            data = bytes(message.data)
            data = data[:-1] + bytes([data[-1] ^ (1 + self._members.index(to)) % 16])
        if message.first == self._firsts[message.span]:
            self._sent[message.span, to] = hashlib.sha256()
        self._sent[message.span, to].update(data)
        return dataclasses.replace(message, data=data)

    def _wrong_record(self, to: bytes, message: RecordMessage) -> RecordMessage:
        record = SpanRecord.unpack(message.body)
        if (record.span, to) not in self._sent:
            return message
        signed = Signed.make(dataclasses.replace(record, digest=self._sent[record.span, to].digest()), self.identity)
        return RecordMessage(message.group, signed.body, signed.signature)

    # -- what its trainer hears

    @property
    def outcomes(self) -> list[Outcome]:
        heard, self._member.outcomes = self._member.outcomes, []
        self._outcomes += [Committed(self._as_if_honest(o.checked)) if isinstance(o, Committed) else o for o in heard]
        return self._outcomes

    @outcomes.setter
    def outcomes(self, value: list[Outcome]) -> None:
        self._outcomes = value

    def _as_if_honest(self, checked: Checked) -> Checked:
        def own(hello: Hello) -> Hello:
            wrong = hello.peer == self._member.me and self._told is not None and hello.digest == self._told.digest
            return dataclasses.replace(hello, digest=self._honest.digest) if wrong and self._honest is not None else hello

        start = dataclasses.replace(checked.start, hellos=tuple(map(own, checked.start.hellos)))
        return dataclasses.replace(checked, start=start)

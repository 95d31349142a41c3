"""What one peer thinks of the others: from what it saw itself, from the chain, and from proofs. Pure.

Of itself it only avoids who seems dead or slow, for seconds. Nobody is left out on one peer's word: that takes a ban by
the chain (chain.advance) or a proof, two records of one span under one key, which anybody can check.
"""

from __future__ import annotations

import collections

from p2p_muloco.chain import BROKE_RULE, REASONS, TWO_VERSIONS, Checked, Tip
from p2p_muloco.messages import Proof

__all__ = ["OLD_PACKET", "OTHER_HEAD", "WHY", "Opinion"]

SUSPICION_S = 10.0  # a peer that was gone or silent is not followed for this long, unless it speaks
DISTRUST_S = 60.0
BLAME_S = 60.0  # a peer whose span was lost reduces nothing for this long
PATIENCE = 3  # attempts at one head that a peer may lead or leave without an entry
MAX_PEERS = 1024  # remembered of each kind
MAX_DIGESTS = 4096
MAX_NAMED = 16
MAX_PROOFS = 256
OLD_PACKET, OTHER_HEAD = len(REASONS), len(REASONS) + 1
WHY = (*REASONS, "sent an old packet again", "keeps to another head")


class Opinion:
    def __init__(self, me: bytes) -> None:
        self.me = me
        self.proofs: dict[bytes, Proof] = {}
        self.stalling: set[bytes] = set()  # at this head: started or left too many attempts without an entry
        self.named: collections.OrderedDict[bytes, tuple[int, int]] = collections.OrderedDict()  # peer: why, entry
        self._until: dict[str, dict[bytes, float]] = {"suspected": {}, "distrusted": {}, "blamed": {}}
        self._failures: dict[bytes, int] = {}
        self._elsewhere: dict[bytes, int] = {}
        self._digests: collections.OrderedDict[bytes, None] = collections.OrderedDict()

    # -- for seconds

    def suspect(self, peer: bytes, now: float) -> None:
        self._set("suspected", peer, now, SUSPICION_S)

    def distrust(self, peer: bytes, now: float) -> None:
        """What it showed for its claim to be ahead was false."""
        self._set("distrusted", peer, now, DISTRUST_S)

    def blame(self, peer: bytes, now: float) -> None:
        self._set("blamed", peer, now, BLAME_S)

    def clear(self, peer: bytes) -> None:
        """It spoke: it is there."""
        self._until["suspected"].pop(peer, None)

    def suspects(self, peer: bytes, now: float) -> bool:
        return self._until["suspected"].get(peer, now) > now

    def distrusts(self, peer: bytes, now: float) -> bool:
        return self._until["distrusted"].get(peer, now) > now

    def blames(self, peer: bytes, now: float) -> bool:
        return self._until["blamed"].get(peer, now) > now

    def _set(self, kind: str, peer: bytes, now: float, seconds: float) -> None:
        known = self._until[kind]
        if len(known) >= MAX_PEERS:
            known = self._until[kind] = {p: until for p, until in known.items() if until > now}
        if len(known) < MAX_PEERS:
            known[peer] = now + seconds

    # -- at one head

    def failed(self, peer: bytes) -> None:
        """An attempt was lost that it led, or that it left before others did."""
        if peer != self.me and len(self._failures) < MAX_PEERS:
            self._failures[peer] = self._failures.get(peer, 0) + 1
            if self._failures[peer] >= PATIENCE:
                self.stalling.add(peer)

    def elsewhere(self, peer: bytes, k: int) -> None:
        """It asked to take part at another head of entry k."""
        if len(self._elsewhere) < MAX_PEERS:
            self._elsewhere[peer] = self._elsewhere.get(peer, 0) + 1
            if self._elsewhere[peer] >= PATIENCE:
                self.name(peer, OTHER_HEAD, k)

    def new_head(self) -> None:
        self.stalling, self._failures, self._elsewhere, self._until["suspected"] = set(), {}, {}, {}

    # -- for good

    def name(self, peer: bytes, why: int, k: int) -> None:
        """Remember for people why a peer was not counted or left out at entry k."""
        self.named[peer] = (why, k)
        self.named.move_to_end(peer)
        while len(self.named) > MAX_NAMED:
            self.named.popitem(last=False)

    def learn(self, checked: Checked, tip: Tip) -> None:
        """Take in a committed entry; `tip` is the one after it."""
        for at, peer in enumerate(checked.start.members):
            reasons = [r.reasons[at] for r in checked.records if checked.reducer(r) != peer]
            if BROKE_RULE in reasons:
                self.name(peer, BROKE_RULE, checked.k)
        for peer, (_, why) in tip.bans().items():
            if peer not in self.named or self.named[peer][0] != why:  # a ban lasts, what it is for was once
                self.name(peer, why, checked.k)
        for hello in checked.counted:
            self._digests[hello.digest] = None
        while len(self._digests) > MAX_DIGESTS:
            self._digests.popitem(last=False)

    def is_old(self, digest: bytes) -> bool:
        """Whether a packet was counted before."""
        return digest in self._digests

    def convict(self, proof: Proof, k: int) -> bool:
        """True if the proof holds and is news."""
        if proof.peer in self.proofs or not proof.holds:
            return False
        if len(self.proofs) >= MAX_PROOFS:  # identities are free, so a liar may convict many of its own
            self.proofs.pop(next(iter(self.proofs)))
        self.proofs[proof.peer] = proof
        self.name(proof.peer, TWO_VERSIONS, k)
        return True

    def is_out(self, peer: bytes, tip: Tip) -> bool:
        """Whether it takes no part in the next entry, by the chain or by proof."""
        return peer in self.proofs or peer in tip.banned

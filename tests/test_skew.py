"""The clock's distance from other peers', from answers as data."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2p_muloco.errors import ClockError
from p2p_muloco.skew import MAX_ROUND_TRIP_S, REFUSE_S, WARN_S, Answer, Skew, skew

T = 1.8e9  # unix seconds


def answer(ahead_s: float, there_s: float = 0.01, back_s: float = 0.01) -> Answer:
    """Of a peer whose clock is right to a machine that is `ahead_s`."""
    return Answer(T + ahead_s, T + there_s, T + ahead_s + there_s + back_s)


def of(*answers: Answer) -> dict[bytes, list[Answer]]:
    return {bytes([i]): [one] for i, one in enumerate(answers)}


@given(st.floats(-1e6, 1e6), st.floats(0.0, MAX_ROUND_TRIP_S / 2 - 1e-3), st.floats(0.0, MAX_ROUND_TRIP_S / 2 - 1e-3))
def test_one_answer_is_wrong_by_half_its_round_trip_at_most(ahead_s: float, there_s: float, back_s: float) -> None:
    measured = skew(of(answer(ahead_s, there_s, back_s)))
    assert measured is not None and abs(measured.ahead_s - ahead_s) <= (there_s + back_s) / 2 + 1e-5


def test_of_three_peers_one_may_be_wrong() -> None:
    measured = skew(of(answer(0.1), answer(-3600.0), answer(0.12)))
    assert measured is not None and measured.peers == 3 and abs(measured.ahead_s - 0.1) < 0.01


def test_of_one_peers_answers_the_fastest_counts() -> None:
    measured = skew({b"": [answer(0.0, 0.9, 0.0), answer(0.0, 0.01, 0.01), answer(0.0, 0.0, 0.9)]})
    assert measured is not None and abs(measured.ahead_s) < 1e-3


@pytest.mark.parametrize("answers", [
    {}, {b"": []}, of(answer(5.0, MAX_ROUND_TRIP_S, 1.0)),
    of(Answer(T, T, T - 5.0)),  # this clock was set back meanwhile
])
def test_answers_that_say_nothing_are_no_reason_to_refuse(answers: dict[bytes, list[Answer]]) -> None:
    assert skew(answers) is None


@given(st.floats(-1e9, 1e9), st.integers(1, 3))
def test_the_limits_and_their_words(ahead_s: float, peers: int) -> None:
    here = Skew(ahead_s, peers)
    if abs(ahead_s) > REFUSE_S:
        with pytest.raises(ClockError, match=r"timedatectl") as caught:
            here.warning()
        assert caught.value.exit_code == 2
    else:
        assert bool(here.warning()) == (abs(ahead_s) > WARN_S)


def test_the_words_name_direction_distance_and_remedy() -> None:
    assert Skew(1.42, 3).warning().startswith("this machine's clock is 1.4 s ahead of 3 peers; set it: `sudo timedatectl set-ntp")
    assert Skew(-1.42, 1).warning().startswith("this machine's clock is 1.4 s behind 1 peer; ")

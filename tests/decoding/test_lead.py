"""When a draft step is started before it is known to be wanted: by what it gains and what it may cost."""

import pytest

from specctl.decoding.steps_ahead import ENOUGH, Lead


def timed(host: float, step: float) -> Lead:
    """One that has seen the host take so many microseconds, and a step."""
    lead = Lead()
    lead.host.append(host * 1e-6)
    lead.step.append(step * 1e-6)
    return lead


def told(lead: Lead, place: int, stops: int, of: int) -> Lead:
    for turn in range(of):
        lead.decided(place, stopped=turn < stops)
    return lead


def test_nothing_is_started_ahead_before_anything_was_timed() -> None:
    lead = Lead()
    assert not lead.pays(1)
    lead.step.append(1e-4)
    assert not told(lead, 1, 0, 50).pays(1)
    lead.host.append(1e-4)
    assert lead.pays(1)


@pytest.mark.parametrize(
    ("host", "step", "stops", "pays"),
    [
        (80, 1000, 0, True),
        (80, 1000, 2, True),  # 2 to 3 of 40: below 80 / 1000
        (80, 1000, 6, False),  # 6 to 7 of 40: above
        (80, 200, 6, True),  # a smaller draft has less to lose
        (80, 200, 24, False),
        (300, 200, 38, True),  # what is over before the host is done costs nothing
    ],
)
def test_it_pays_where_stops_are_rarer_than_the_hosts_share_of_a_step(
    host: float, step: float, stops: int, pays: bool
) -> None:
    assert told(timed(host, step), 3, stops, 40).pays(3) is pays


def test_places_are_counted_apart() -> None:
    lead = told(told(timed(80, 400), 1, 0, 30), 4, 25, 30)
    assert lead.pays(1)
    assert not lead.pays(4)
    assert not timed(80, 400).pays(9), "nothing is known of this place, and stops are taken to be as likely as 1 in 4"


def test_the_quickest_of_late_counts() -> None:
    lead = told(timed(80, 1000), 1, 8, 40)
    lead.host.append(0.3)  # something was captured
    assert not lead.pays(1)
    for _ in range(20):
        lead.host.append(400e-6)  # the host has become slower for good
    assert lead.pays(1)


def test_what_was_seen_long_ago_counts_less() -> None:
    lead = told(timed(80, 400), 1, 60, 60)
    assert not lead.pays(1)
    rounds = next(count for count in range(1000) if told(lead, 1, 0, 1).pays(1))
    assert rounds < 5 * ENOUGH

"""Distributions, processor sharing, integrals over time."""

from __future__ import annotations

import numpy as np
import pytest

from prorl_hpc.bench.simulation_clock import VirtualClock
from prorl_hpc.bench.simulation_gauges import KEPT_POINTS, Gauges, Place
from prorl_hpc.bench.simulation_servers import SharedServer
from prorl_hpc.bench.simulation_times import parse_distribution
from prorl_hpc.messages.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "mean"),
    [
        ("3", 3.0),
        ("constant:2.5", 2.5),
        ("uniform:1:3", 2.0),
        ("exponential:7", 7.0),
        ("lognormal:10:0.5", 10 * np.exp(0.125)),
        ("3*constant:1+1*constant:5", 2.0),
        ("0.5*1e+1+0.5*uniform:0:2", 5.5),
    ],
)
def test_distributions_have_their_means(text: str, mean: float) -> None:
    values = parse_distribution(text, "run").draw(np.random.default_rng(0), 200_000)
    assert values.mean() == pytest.approx(mean, rel=0.01)
    assert values.min() >= 0


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("gauss:3", "no distribution gauss"),
        ("lognormal:3", "takes 2 numbers"),
        ("uniform:3:1", "LOW is above HIGH"),
        ("constant:-1", "negative"),
        ("constant:nan", "finite"),
        ("lognormal:0:1", "above 0"),
        ("0*constant:1", "add up to 0"),
        ("soon", "not a number"),
        ("", "nothing is not a number"),
        ("x*constant:1", "x is not a number"),
    ],
)
def test_odd_distributions_are_named(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as error:
        parse_distribution(text, "eval")
    assert "eval=" in str(error.value)


def test_processor_sharing_by_hand() -> None:
    """Concurrency 2. a (10 s) and b (4 s) from 0; c (4 s) from 2: then each goes at 2/3. b is over at 2 + 2·3/2 = 5,
    c has 2 s left and is over at 7; a has 10 − 2 − 2 − 2 = 4 s left and is over at 11."""
    server: SharedServer[str] = SharedServer(2)
    server.arrive("a", 10.0, 0.0)
    server.arrive("b", 4.0, 0.0)
    assert server.next_due() == pytest.approx(4.0)
    server.arrive("c", 4.0, 2.0)
    over = []
    while (due := server.next_due()) is not None:
        over.append((server.due(due), pytest.approx(due)))
    assert over == [("b", 5.0), ("c", 7.0), ("a", 11.0)]
    assert server.busy == 0


def test_a_request_that_is_taken_away_leaves_its_share_to_the_others() -> None:
    server: SharedServer[str] = SharedServer(1)
    server.arrive("a", 10.0, 0.0)
    ticket = server.arrive("b", 10.0, 0.0)
    assert server.remove(ticket, 4.0) == pytest.approx(8.0)
    assert server.next_due() == pytest.approx(12.0)
    assert server.due(12.0) == "a"
    assert server.next_due() is None
    assert server.due(13.0) is None


def test_integrals_are_exact_however_coarse_the_course_is() -> None:
    gauges = Gauges()
    rng = np.random.default_rng(1)
    stays = [
        (begin, begin + stay) for begin, stay in zip(rng.uniform(0, 90, 5000), rng.uniform(0, 10, 5000), strict=True)
    ]
    changes = sorted([(begin, 1) for begin, _ in stays] + [(end, -1) for _, end in stays])
    for now, change in changes:
        if now >= gauges.next_point_s:
            gauges.note(now, 0)
        (gauges.enter if change > 0 else gauges.leave)(Place.RUN, now)
    end = changes[-1][0]
    gauges.note(end, 7)
    assert gauges.areas(end)[Place.RUN] == pytest.approx(sum(end - begin for begin, end in stays))
    course = gauges.course()
    assert len(course.at_s) <= KEPT_POINTS
    widths = np.diff([0.0, *course.at_s])
    assert float(np.dot(widths, course.mean[Place.RUN])) == pytest.approx(gauges.areas(end)[Place.RUN])
    assert course.finished[-1] == 7
    assert course.at_s[-1] == end


@pytest.mark.parametrize("width_s", [1e-3, 0.7, 50.0])
def test_the_clock_keeps_the_order_whatever_its_buckets(width_s: float) -> None:
    clock, rng = VirtualClock(width_s), np.random.default_rng(2)
    happened: list[tuple[float, int]] = []
    foretold: list[tuple[float, int]] = []

    def act(number: int, now: float) -> None:
        happened.append((now, number))
        if number % 2:
            foretell(now + float(rng.choice([0.0, 0.1, 5.0, 40.0])))

    def foretell(time: float) -> None:
        if len(foretold) < 3000:
            foretold.append((time, len(foretold)))
            clock.at(time, act, foretold[-1][1])

    for time in rng.integers(0, 100, 1000):
        foretell(float(time))
    while (happening := clock.next()) is not None:
        now, _, what, about = happening
        what(about, now)
    assert happened == sorted(foretold)
    assert len(happened) > 1500

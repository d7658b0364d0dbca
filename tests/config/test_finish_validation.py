from __future__ import annotations

from prorl_hpc.config.finish_validation import OVERLONG
from prorl_hpc.config.schema import ProrlConfig
from prorl_hpc.config.validation import validate
from prorl_hpc.messages.trajectory import CUT, Finish


def finish_complaints(finishes: list[str], filtering: bool = True) -> list[str]:
    config = ProrlConfig()
    config.trainer.overlong_finishes, config.trainer.overlong_filtering = finishes, filtering
    return [error for error in validate(config) if "overlong_finishes" in error]


def test_every_name_is_a_finish_and_the_default_is_what_is_cut() -> None:
    assert set(OVERLONG) <= {finish.value for finish in Finish}
    assert set(ProrlConfig().trainer.overlong_finishes) == set(CUT)
    assert finish_complaints(list(OVERLONG)) == []


def test_what_is_not_possible_is_said_with_what_is() -> None:
    (error,) = finish_complaints(["turn", "context"])
    assert "'turn' is not possible: any of turn_tokens" in error and "did you mean turns?" in error
    (error,) = finish_complaints(["answer"])
    assert "'answer' is not possible" in error


def test_filtering_nothing_is_switched_off_instead() -> None:
    (error,) = finish_complaints([])
    assert "trainer.overlong_filtering=false" in error
    assert finish_complaints([], filtering=False) == []


def test_a_finish_is_named_once() -> None:
    assert finish_complaints(["context", "context"]) == [
        "trainer.overlong_finishes has context 2 times: once is enough"
    ]

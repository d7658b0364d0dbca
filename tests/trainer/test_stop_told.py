from __future__ import annotations

import pytest

from prorl_hpc.trainer.stopping import StopSignal

pytestmark = pytest.mark.train


def test_how_long_a_stop_took_is_told_only_where_the_signal_came():
    stop = StopSignal()
    assert stop.when == "by a signal to another rank"
    stop.request()
    assert stop.when.endswith(" s after the signal")

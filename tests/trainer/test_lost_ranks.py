"""A rank that has lost another one leaves it to those who know to say why."""

from __future__ import annotations

import threading
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from prorl_hpc.messages.errors import RunError  # noqa: E402
from prorl_hpc.trainer import lost_ranks  # noqa: E402
from prorl_hpc.trainer.stopping import StopSignal  # noqa: E402

GLOO = RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.2]:54176")


class Silent:
    def say(self, *words: Any) -> None: ...


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (GLOO, True),
        (torch.distributed.DistBackendError("NCCL error: remote process exited"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (RunError("gloo/transport"), False),
    ],
)
def test_what_is_the_loss_of_another_rank(error: Exception, lost: bool) -> None:
    assert lost_ranks.another_is_lost(error) is lost


def test_it_waits_to_be_told(monkeypatch: pytest.MonkeyPatch) -> None:
    stop: Any = StopSignal()
    process: Any = Silent()
    monkeypatch.setattr(lost_ranks, "WAIT_S", 0.3)
    assert not lost_ranks.told_to_end(process, stop, GLOO)
    monkeypatch.setattr(lost_ranks, "WAIT_S", 60.0)
    threading.Timer(0.2, stop.request).start()
    assert lost_ranks.told_to_end(process, stop, GLOO)

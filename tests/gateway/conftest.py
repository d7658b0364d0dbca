from __future__ import annotations

import pytest

from prorl_hpc.agents.chat_format import ChatFormat
from prorl_hpc.tasks.testing import write_chat_model


@pytest.fixture(scope="session")
def chat(tmp_path_factory: pytest.TempPathFactory) -> ChatFormat:
    return ChatFormat.open(write_chat_model(tmp_path_factory.mktemp("model")))

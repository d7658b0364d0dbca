"""Whether an engine that gave a bad answer is well again: it is asked until it gives a good one."""

from __future__ import annotations

import itertools
import logging

from prorl_hpc.inference.protocol import Engine, ServerDown
from prorl_hpc.inference.soundness import check_completion
from prorl_hpc.messages.errors import InferenceError
from prorl_hpc.messages.rollout import SamplingParams

log = logging.getLogger(__name__)

_PROMPT = (1, 2, 3, 4)
_ASKED = SamplingParams(max_tokens=2, seed=0)


class SelfTest:
    """``server_id`` is for messages. Nothing is asked of an engine whose answers were all good. ``words``: what is wrong
    with it, as far as is known; empty for nothing."""

    def __init__(self, server_id: str, engine: Engine) -> None:
        self._server_id = server_id
        self._engine = engine
        self.words = ""
        self._numbers = itertools.count()

    def refused(self, words: str) -> None:
        """An answer was refused, with these words: no rollout should come here now."""
        if not self.words:
            log.error("%s gives answers that training may not have: %s", self._server_id, words)
        self.words = words

    async def trouble(self) -> str:
        """Empty: none, or no more."""
        if not self.words:
            return ""
        try:
            asked = f"self-test-{self._server_id}-{next(self._numbers)}"
            completion = await self._engine.generate(asked, _PROMPT, _ASKED, 0)
            check_completion(completion, self._engine.model.vocab_size, self._server_id, _ASKED.max_tokens)
        except ServerDown as error:
            self.words = str(error)
            return self.words
        except InferenceError as error:
            log.debug("%s refuses the self-test, in order: %s", self._server_id, error)
        log.warning("%s gives good answers again", self._server_id)
        self.words = ""
        return ""

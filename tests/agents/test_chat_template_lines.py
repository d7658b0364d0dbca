"""An error of a chat template is told with its line."""

from __future__ import annotations

import pytest

from prorl_hpc.agents.chat_template import ChatTemplate, TemplateRefusal
from prorl_hpc.messages.errors import ConfigError


def test_what_does_not_parse_has_a_line() -> None:
    with pytest.raises(ConfigError, match=r"the chat template x\.jinja, line 2, does not parse: "):
        ChatTemplate("a\n{% if %}", {}, "x.jinja")


@pytest.mark.parametrize(
    ("source", "told"),
    [
        (
            "a\n{{ messages[0].no.such }}",
            "the chat template x.jinja, line 2, is wrong \\(with the roles user\\): .*no attribute",
        ),
        ("a\n\n{{ raise_exception('no') }}", "the chat template x.jinja, line 3, refuses the roles \\(user\\): no"),
    ],
)
def test_what_raises_has_a_line(source: str, told: str) -> None:
    template = ChatTemplate(source, {}, "x.jinja")
    with pytest.raises(TemplateRefusal, match=told):
        template.render([{"role": "user", "content": "hi"}], add_generation_prompt=True)

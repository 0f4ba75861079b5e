from __future__ import annotations

import pytest

from app.prompts import template_check
from app.prompts.template_check import check_template, render_time_limit
from settings.errors import InputError

ENDLESS = "{% for i in range(99999) %}" * 3 + "{% endfor %}" * 3


@pytest.mark.parametrize(
    "template",
    [ENDLESS, *(f"{{% if {chat} %}}{ENDLESS}{{% endif %}}" for chat in ("messages[0].role == 'system'", "tools"))],
    ids=["always", "system", "tools"],
)
def test_a_template_without_end_is_refused(template: str) -> None:
    with pytest.raises(InputError, match="model: the chat template takes more than 3 s"):
        check_template(template, {"bos_token": "<s>"}, where="model")


@pytest.mark.parametrize(
    "template",
    [
        "{{ ('a' * 8000000000)|length }}",
        "{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
        "{{ 'a'|center(9999999999) }}",
    ],
    ids=["product", "doubled", "padded"],
)
def test_a_template_without_measure_is_refused(template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # A busy machine may take seconds of CPU time to fill the memory.
    monkeypatch.setattr(template_check, "CPU_LIMIT_S", 60)
    with pytest.raises(InputError, match="model: the chat template takes more than 1 GiB of memory"):
        check_template(template, {"bos_token": "<s>"}, where="model")


@pytest.mark.parametrize("template", ["{{ messages[0].content }}", "{% generation %}x{% endgeneration %}", "{{ 1/0 }}"])
def test_other_templates_are_left_to_the_tokenizer(template: str) -> None:
    check_template(template, {}, where="model")


def test_a_trial_that_cannot_run_is_no_permission(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_check.sys, "executable", "/bin/false")
    with pytest.raises(InputError, match="model: the chat template ends its process with exit status 1"):
        check_template("{{ messages[0].content }} tried once", {}, where="model")


def test_a_template_that_loops_for_one_chat_only_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_check, "RENDER_LIMIT_S", 0.05)
    with pytest.raises(InputError, match="chat template takes more than"), render_time_limit():
        while True:
            pass
    with render_time_limit():
        pass

"""Secrets are recognised by their names or their form, and harmless words are shown unchanged."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import pytest
from pydantic import ValidationError

from launcher.plan.rendering import render_spec
from launcher.spec.explain import find_errors
from launcher.spec.models import ClusterSpec
from launcher.spec.parts import Model, _find_metadata
from launcher.spec.redaction import Hides, hide_command, hide_env, hide_text, hide_words
from tests.harness.builders.redaction import SECRET, WITH_SECRETS

S = "hunter2"
HIDDEN = "(redacted)"


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["--token", S], ["--token", HIDDEN]),
        (["--api-key", S, "--epochs", "3"], ["--api-key", HIDDEN, "--epochs", "3"]),
        ([f"--password={S}"], [f"--password={HIDDEN}"]),
        ([f"--password={S} and more={S}"], [f"--password={HIDDEN}"]),
        ([f"-password={S}"], [f"-password={HIDDEN}"]),
        ([f"wandb.api_key={S}"], [f"wandb.api_key={HIDDEN}"]),
        (["env", f"HF_TOKEN={S}", "./train"], ["env", f"HF_TOKEN={HIDDEN}", "./train"]),
        (["--token", "-abc"], ["--token", HIDDEN]),
        (["--use-token", "--epochs", "3"], ["--use-token", "--epochs", "3"]),
        (["sh", "-c", f"./train --token {S} --epochs 3"], ["sh", "-c", f"./train --token {HIDDEN} --epochs 3"]),
        (["sh", "-c", f"A=1 TOKEN='{S} {S}' ./train"], ["sh", "-c", f"A=1 TOKEN={HIDDEN} ./train"]),
        ([f"--db=postgres://u:{S}@h:5432/d"], [f"--db=postgres://u:{HIDDEN}@h:5432/d"]),
    ],
)
def test_values_of_secret_options_are_hidden(words: list[str], shown: list[str]) -> None:
    assert hide_words(words) == shown


@pytest.mark.parametrize(
    "words",
    [
        ["--epochs", "3", "--tokenizer", "bert", "--max-tokens", "512", "--tokens_per_batch=4096"],
        ["--keras-backend", "tensorflow", "--monkeys=7", "train.py", "--passes", "2"],
        ["the token is", "a secret of ours"],
        ["--url", "http://host:8080/path?x=a@b", "s3://bucket/data", "user@host", "a:b@c"],
        ["", "--", "=", "--=", "-", "a=b", "x y z"],
    ],
)
def test_harmless_arguments_are_not_redacted(words: list[str]) -> None:
    assert hide_words(words) == words


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        (f"postgres://u:{S}@h/", f"postgres://u:{HIDDEN}@h/"),
        (f"redis://:{S}@h:1", f"redis://:{HIDDEN}@h:1"),
        (f"amqp://u:{S}@{S}@h/", f"amqp://u:{HIDDEN}@h/"),
        (f"mysql://u:{S}/{S}@h/", f"mysql://u:{HIDDEN}@h/"),
        ("mysql://u:1234@h/", f"mysql://u:{HIDDEN}@h/"),
        (f"https://{S}@github.com/x.git", f"https://{HIDDEN}@github.com/x.git"),
        (f"https://h/x?user=me&access_token={S}&n=1", f"https://h/x?user=me&access_token={HIDDEN}&n=1"),
        (f"first a://u:{S}@h then b://u:{S}@h", f"first a://u:{HIDDEN}@h then b://u:{HIDDEN}@h"),
    ],
)
def test_passwords_in_urls_are_hidden(url: str, shown: str) -> None:
    assert hide_text(url) == shown


def test_the_whole_value_of_a_secret_variable_is_hidden() -> None:
    env = {"DATABASE": f"postgres://u:{S}@h/", "HF_TOKEN": S, "MAX_TOKENS": "512", "LEVEL": "3"}
    assert hide_env(env) == {"DATABASE": HIDDEN, "HF_TOKEN": HIDDEN, "MAX_TOKENS": "512", "LEVEL": "3"}


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["-e", f"PLAIN={S}"], ["-e", f"PLAIN={HIDDEN}"]),
        ([f"-ePLAIN={S}"], [f"-ePLAIN={HIDDEN}"]),
        (["-ve", f"PLAIN={S}"], ["-ve", f"PLAIN={HIDDEN}"]),
        (["--env", f"PLAIN={S}={S}"], ["--env", f"PLAIN={HIDDEN}"]),
        ([f"--env=PLAIN={S}"], [f"--env=PLAIN={HIDDEN}"]),
        (["--set", f"env.PLAIN={S}"], ["--set", f"env.PLAIN={HIDDEN}"]),
        (["--set", f"env={{PLAIN: {S}}}"], ["--set", f"env={HIDDEN}"]),
        ([f"--set=nodes[0].env.PLAIN={S}"], [f"--set=nodes[0].env.PLAIN={HIDDEN}"]),
        (["train.py", "--token", S], ["train.py", "--token", HIDDEN]),
        (["-e", "PLAIN", "--set", "restart.max_restarts=3"], ["-e", "PLAIN", "--set", "restart.max_restarts=3"]),
        (["up", "x.yaml", "--set", "preload=no", "-n", "2"], ["up", "x.yaml", "--set", "preload=no", "-n", "2"]),
    ],
)
def test_values_of_variables_are_hidden_in_a_recorded_command(words: list[str], shown: list[str]) -> None:
    assert hide_command(words) == shown


def test_a_redacted_spec_contains_no_secret_and_stays_valid() -> None:
    spec = ClusterSpec.model_validate(WITH_SECRETS)
    text = render_spec(spec)
    assert SECRET not in text
    shown = ClusterSpec.model_validate_json(text)
    assert shown.nodes[1].ssh.proxy_jump == "me@jump,other@[::1]:22"
    assert shown.notify is not None
    assert shown.notify.webhook_from == "DISTLAUNCH_WEBHOOK"
    listed = {**WITH_SECRETS, "nodes": {"from": {"command": ["list", f"--password={SECRET}"]}}}
    assert SECRET not in render_spec(ClusterSpec.model_validate(listed))


def find_models(model: type[Model] = Model) -> Iterator[type[Model]]:
    for each in model.__subclasses__():
        yield each
        yield from find_models(each)


def test_every_spec_field_that_may_hold_secrets_is_marked_for_redaction() -> None:
    found = 0
    for model in {*find_models()}:
        for name, field in model.model_fields.items():
            if name in ("command", "args", "env", "proxy_jump"):
                found += 1
                marks = [*field.metadata, *_find_metadata(field.annotation)]
                assert any(isinstance(mark, Hides) for mark in marks), f"{model.__name__}.{name}"
    assert found >= 8


def test_an_error_in_proxy_jump_shows_no_password() -> None:
    problems = validate({**WITH_SECRETS, "ssh": {"proxy_jump": f"me:{SECRET}@jump me:{SECRET}@b"}})
    assert "proxy_jump" in problems
    assert SECRET not in problems


def validate(values: Mapping[str, object]) -> str:
    with pytest.raises(ValidationError) as caught:
        ClusterSpec.model_validate(values)
    return "\n".join(problem.message for problem in find_errors(caught.value))

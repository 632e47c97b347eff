"""Settings: from arguments and the environment, with passwords that never show."""

from __future__ import annotations

import pickle

import pytest
from pydantic import SecretStr, ValidationError

from dispatch_core.errors import ConfigurationError
from dispatch_core.settings import CoreSettings, redact_dsn
from gateway_sdk import GatewaySettings
from relay_sdk import RelaySettings

DSN = "postgresql://ann:s3cret@db/app"


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for field in CoreSettings.model_fields:
        monkeypatch.delenv(f"RELAY_DISPATCH_{field.upper()}", raising=False)


def test_the_environment_is_read_by_the_documented_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RELAY_DISPATCH_DSN", DSN)
    monkeypatch.setenv("RELAY_DISPATCH_LISTEN_DSN", "postgresql://direct/app")
    monkeypatch.setenv("RELAY_DISPATCH_POOL_MAX_SIZE", "7")
    settings = CoreSettings.load()
    assert settings.require_dsn() == DSN
    assert settings.require_listen_dsn() == "postgresql://direct/app"
    assert settings.pool_max_size == 7


def test_an_argument_comes_before_the_environment_and_none_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RELAY_DISPATCH_DSN", "postgresql://env/app")
    assert CoreSettings.load(dsn=DSN).require_dsn() == DSN
    assert CoreSettings.load(dsn=None).require_dsn() == "postgresql://env/app"


def test_the_listening_connection_falls_back_to_the_dsn() -> None:
    assert CoreSettings.load(dsn=DSN).require_listen_dsn() == DSN


@pytest.mark.parametrize("dsn", [None, ""])
def test_a_missing_dsn_names_the_variable(dsn: str | None) -> None:
    settings = CoreSettings.load(dsn=dsn)
    for require in (settings.require_dsn, settings.require_listen_dsn):
        with pytest.raises(ConfigurationError, match="RELAY_DISPATCH_DSN"):
            require()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("pool_max_size", 0),
        ("pool_min_size", -1),
        ("connect_timeout_seconds", 0),
        ("connect_timeout_seconds", float("inf")),
        ("command_timeout_seconds", float("nan")),
        ("probe_seconds", "soon"),
        ("max_body_bytes", -1),
        ("statement_cache_size", -1),
        ("application_name", ""),
    ],
)
def test_a_wrong_setting_is_named_by_field_and_variable_without_its_value(field: str, value: object) -> None:
    with pytest.raises(ConfigurationError) as caught:
        CoreSettings.load(**{field: value})
    assert f"{field} (RELAY_DISPATCH_{field.upper()})" in str(caught.value)
    assert "soon" not in str(caught.value)
    assert caught.value.__cause__ is None


def test_an_unknown_setting_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="pool_maximum"):
        CoreSettings.load(pool_maximum=3)


def test_settings_cannot_be_changed_after_they_were_read() -> None:
    settings = CoreSettings.load(dsn=DSN)
    with pytest.raises(ValidationError):
        settings.pool_max_size = 3


def test_no_text_of_the_settings_shows_a_password() -> None:
    settings = CoreSettings.load(dsn=DSN, listen_dsn=DSN)
    for text in (repr(settings), str(settings), str(settings.model_dump()), settings.model_dump_json()):
        assert "s3cret" not in text
    assert pickle.loads(pickle.dumps(settings)) == settings
    with pytest.raises(ConfigurationError) as caught:
        CoreSettings.load(dsn=DSN, pool_max_size=0)
    assert "s3cret" not in str(caught.value)
    with pytest.raises(ConfigurationError) as caught:
        CoreSettings.load(dsn=[DSN])
    assert "s3cret" not in str(caught.value)


def test_every_setting_has_its_description_and_times_and_sizes_their_unit() -> None:
    for name, field in CoreSettings.model_fields.items():
        assert field.description, name
        if field.annotation is float:
            assert name.endswith("_seconds"), name


@pytest.mark.parametrize(
    ("dsn", "shown"),
    [
        ("postgresql://ann:s3cret@db:5432/app", "postgresql://ann:***@db:5432/app"),
        ("postgresql://ann@db/app", "postgresql://ann@db/app"),
        ("postgresql://db/app", "postgresql://db/app"),
        ("postgresql:///app?host=/run/pg", "postgresql:///app?host=/run/pg"),
        ("postgresql://:s3cret@db/app", "postgresql://:***@db/app"),
        ("postgresql://ann:s3cr@et:x/y?z#@db/app", "postgresql://ann:***@db/app"),
        ("postgresql://ann:s3cret@h1:1,h2:2/app?sslmode=require", "postgresql://ann:***@h1:1,h2:2/app?sslmode=require"),
        ("postgresql://db/app?user=ann&password=s3cret&x=1", "postgresql://db/app?user=ann&password=***&x=1"),
        ("postgresql://db/app?PASSWORD=s3cret", "postgresql://db/app?PASSWORD=***"),
        ("postgresql://db/app?sslpassword=s3cret", "postgresql://db/app?sslpassword=***"),
        ("host=db user=ann password=s3cret dbname=app", "host=db user=ann password=*** dbname=app"),
        ("host=db password='s3 cr\\'et' user=ann", "host=db password=*** user=ann"),
        ("", ""),
    ],
)
def test_a_dsn_is_shown_without_its_password(dsn: str, shown: str) -> None:
    assert redact_dsn(dsn) == shown
    assert redact_dsn(SecretStr(dsn)) == shown


def test_settings_made_in_code_are_refused_in_the_words_of_those_that_are_read() -> None:
    for make in (CoreSettings, CoreSettings.load):
        with pytest.raises(ConfigurationError, match=r"^pool_max_size \(RELAY_DISPATCH_POOL_MAX_SIZE\): ") as caught:
            make(pool_max_size=0)
        assert caught.value.__cause__ is None


def test_the_settings_of_the_sdks_refuse_wrong_values_as_those_of_the_core_do() -> None:
    with pytest.raises(ConfigurationError, match=r"default_ttl_seconds \(GATEWAY_DEFAULT_TTL_SECONDS\)"):
        GatewaySettings(default_ttl_seconds=0)
    with pytest.raises(ConfigurationError, match=r"^RelaySettings: .* at most half of lease_seconds"):
        RelaySettings(lease_seconds=1, heartbeat_seconds=1)

"""Settings: where they come from, which wins, and how every mistake is named."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import pytest

from bus.errors import SettingsError, cannot_listen
from bus.settings import (
    CommonSettings,
    describe_settings,
    load_settings,
    load_with_origins,
    parse_overrides,
    redact,
    show_settings,
)


class SampleFlags(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A table with keys of its own."""

    mode: Literal["quiet", "strict"] = "quiet"
    most: int | None = None


class SampleSettings(CommonSettings, frozen=True, kw_only=True):
    """A service's settings, one of each kind of value."""

    window: Annotated[int, msgspec.Meta(ge=1)] = 10
    ratio: float = 0.5
    on: bool = False
    names: tuple[str, ...] = ()
    limits: dict[str, int] = msgspec.field(default_factory=dict)
    path: str | None = None
    admin_token: str = ""
    low: int = 1
    high: int = 2
    flags: SampleFlags = msgspec.field(default_factory=lambda: SampleFlags())

    def __post_init__(self) -> None:
        if self.low > self.high:
            raise ValueError(f"low ({self.low}) must not be above high ({self.high})")


class RequiredSettings(CommonSettings, frozen=True, kw_only=True):
    """One without a default."""

    engine_url: str


def write(directory: Path, text: str) -> Path:
    file = directory / "tidegate.toml"
    file.write_text(text)
    return file


def test_defaults_and_the_instance_s_name() -> None:
    """With nothing written, the defaults; the instance is named after its section."""
    settings = load_settings("ingress", SampleSettings, environ={})
    assert settings == SampleSettings(instance="ingress-1")
    assert load_settings("ingress", SampleSettings, environ={"TIDEGATE_INSTANCE": "x"}).instance == "x"


def test_later_places_win(tmp_path: Path) -> None:
    """[common], [section], TIDEGATE_<KEY>, TIDEGATE_<SECTION>_<KEY>, --set: each overrides the one before."""
    text = '[common]\nlog_level = "debug"\nhttp_port = 1\n[ingress]\nhttp_port = 2\nwindow = 20\n[bridge]\nx = 1\n'
    file = write(tmp_path, text)
    environ: dict[str, str] = {}

    def port() -> int:
        return load_settings("ingress", SampleSettings, file=file, environ=environ, overrides=overrides).http_port

    overrides: dict[str, str] = {}
    assert port() == 2
    environ["TIDEGATE_HTTP_PORT"] = "3"
    assert port() == 3
    environ["TIDEGATE_INGRESS_HTTP_PORT"] = "4"
    assert port() == 4
    overrides["http_port"] = "5"
    assert port() == 5
    loaded = load_with_origins("ingress", SampleSettings, file=file, environ=environ, overrides=overrides)
    assert (loaded.settings.log_level, loaded.settings.window) == ("debug", 20)
    assert loaded.origins == {
        "log_level": "tidegate.toml [common]",
        "http_port": "--set",
        "window": "tidegate.toml [ingress]",
    }


def test_text_becomes_values() -> None:
    """Numbers, truth values, nothing, and JSON for lists and tables; text stays text though it looks like a number."""
    environ = {
        "TIDEGATE_INGRESS_WINDOW": "7",
        "TIDEGATE_INGRESS_RATIO": "1e-3",
        "TIDEGATE_INGRESS_ON": "true",
        "TIDEGATE_INGRESS_NAMES": '["a", "b"]',
        "TIDEGATE_INGRESS_LIMITS": '{"a": 1}',
        "TIDEGATE_INGRESS_PATH": "12",
        "TIDEGATE_INSTANCE": "007",
    }
    settings = load_settings("ingress", SampleSettings, environ=environ)
    assert (settings.window, settings.ratio, settings.on) == (7, 0.001, True)
    assert (settings.names, settings.limits) == (("a", "b"), {"a": 1})
    assert (settings.path, settings.instance) == ("12", "007")


@pytest.mark.parametrize(
    ("environ", "overrides", "key", "problem"),
    [
        ({"TIDEGATE_INGRESS_WINDOWS": "1"}, {}, "TIDEGATE_INGRESS_WINDOWS", "did you mean TIDEGATE_INGRESS_WINDOW?"),
        ({"TIDEGATE_NATS_UR": "x"}, {}, "TIDEGATE_NATS_UR", "did you mean TIDEGATE_NATS_URL?"),
        ({"TIDEGATE_QQQ": "x"}, {}, "TIDEGATE_QQQ", "--help` lists them"),
        ({"TIDEGATE_INGRESS_WINDOW": "many"}, {}, "TIDEGATE_INGRESS_WINDOW", "must be a whole number, not 'many'"),
        ({"TIDEGATE_INGRESS_WINDOW": "0"}, {}, "TIDEGATE_INGRESS_WINDOW", ">= 1"),
        ({"TIDEGATE_INGRESS_NAMES": "a,b"}, {}, "TIDEGATE_INGRESS_NAMES", "written as JSON"),
        ({"TIDEGATE_INGRESS_NAMES": "[1]"}, {}, "TIDEGATE_INGRESS_NAMES", "[0]: must be text, not '[1]'"),
        ({}, {"windw": "1"}, "windw", "did you mean window?"),
        ({}, {"ratio": "x"}, "ratio", "must be a number, not 'x' (--set)"),
        ({}, {"ratio": "nan"}, "ratio", "must be a finite number, not 'nan' (--set)"),
        ({}, {"log_level": "loud"}, "log_level", "must be one of debug, info, warning, error, not 'loud' (--set)"),
        ({"TIDEGATE_LOG_LEVEL": "loud"}, {}, "TIDEGATE_LOG_LEVEL", "must be one of debug, info, warning, error, not"),
        ({}, {"flags": '{"mode": "loud"}'}, "flags", "mode: must be one of quiet, strict, not"),
        ({}, {"flags": '{"mod": "quiet"}'}, "flags", "has no key 'mod' (there are mode, most)"),
        ({}, {"qqq": "1"}, "qqq", "unknown setting (--set); `python -m services.ingress --help` lists them"),
        ({}, {"instant": "x"}, "instant", "did you mean instance?"),
        ({}, {"log_color": "x"}, "log_color", "--help` lists them"),
        ({}, {"low": "3"}, "settings", "low (3) must not be above high (2)"),
    ],
)
def test_mistakes_are_named_as_they_were_written(
    environ: dict[str, str], overrides: dict[str, str], key: str, problem: str
) -> None:
    """One sentence: the key exactly as its user wrote it, what is wrong, and what was probably meant."""
    with pytest.raises(SettingsError) as caught:
        load_settings("ingress", SampleSettings, environ=environ, overrides=overrides)
    assert caught.value.key == key
    assert problem in str(caught.value)
    assert "\n" not in str(caught.value)
    assert str(caught.value).count(key) == 1 or key in problem


@pytest.mark.parametrize(
    ("text", "key", "problem"),
    [
        ("[ingres]\n", "ingres", "there is no such table); did you mean ingress?"),
        ("window = 1\n", "window", "there is no such table"),
        ("ingress = 1\n", "ingress", "must be a table"),
        ("[ingress]\nwindw = 1\n", "windw", "tidegate.toml [ingress]); did you mean window?"),
        ("[common]\nwindow = 1\n", "window", "tidegate.toml [common]"),
        ('[ingress]\nwindow = "1"\n', "window", "must be a whole number, not the text '1' (tidegate.toml [ingress])"),
        ("[ingress]\nwindow = 1.5\n", "window", "must be a whole number, not 1.5"),
        ("[ingress]\nratio = inf\n", "ratio", "must be a finite number, not inf (tidegate.toml [ingress])"),
        ("[ingress\n", "tidegate.toml", "is not TOML"),
    ],
)
def test_mistakes_in_the_file(tmp_path: Path, text: str, key: str, problem: str) -> None:
    """As above; a value in the file has its type already, so that text is no number there."""
    with pytest.raises(SettingsError) as caught:
        load_settings("ingress", SampleSettings, file=write(tmp_path, text), environ={})
    assert caught.value.key.endswith(key)
    assert problem in str(caught.value)


def test_an_absent_file_is_named(tmp_path: Path) -> None:
    """A file that was asked for must be there."""
    with pytest.raises(SettingsError, match=r"absent\.toml: cannot be read: No such file"):
        load_settings("ingress", SampleSettings, file=tmp_path / "absent.toml", environ={})


def test_a_required_setting_says_how_to_set_it() -> None:
    """Table, variable and option."""
    with pytest.raises(SettingsError, match=r"engine_url: must be set, in \[bridge\].*TIDEGATE_BRIDGE_ENGINE_URL"):
        load_settings("bridge", RequiredSettings, environ={})


def test_a_taken_address_is_said_plainly() -> None:
    """No errno; every other reason keeps its words."""
    taken = cannot_listen("http_port", "127.0.0.1", 8080, OSError(errno.EADDRINUSE, "error while attempting to bind"))
    assert str(taken) == "http_port: 127.0.0.1:8080 is taken; stop what listens there or choose another"
    refused = cannot_listen("port", "203.0.113.1", 80, OSError(errno.EACCES, "Permission denied"))
    assert str(refused) == "port: cannot listen on 203.0.113.1:80: Permission denied"


def test_foreign_variables_are_left_alone() -> None:
    """Those of other services and tools, and the addresses that Kubernetes injects for Services named like us."""
    environ = {
        "TIDEGATE_BRIDGE_WHATEVER": "1",
        "TIDEGATE_CONFIG": "x",
        "TIDEGATE_NATS_IMAGE": "x",
        "TIDEGATE_INGRESS_SERVICE_HOST": "10.0.0.1",
        "TIDEGATE_INGRESS_SERVICE_PORT_HTTP": "80",
        "TIDEGATE_INGRESS_PORT": "tcp://10.0.0.1:80",
        "TIDEGATE_INGRESS_PORT_80_TCP_ADDR": "10.0.0.1",
        "PATH": "x",
    }
    assert load_settings("ingress", SampleSettings, environ=environ) == SampleSettings(instance="ingress-1")


def test_overrides_are_pairs() -> None:
    """``key=value``; the value may hold more equals signs."""
    assert parse_overrides(["a=1", "b=x=y", " c =", "a=2"]) == {"a": "2", "b": "x=y", "c": ""}
    for wrong in ("a", "=1", ""):
        with pytest.raises(SettingsError, match="key=value"):
            parse_overrides([wrong])


def test_what_is_shown_can_be_read_back_and_holds_no_secret(tmp_path: Path) -> None:
    """``--print-config`` is TOML; secrets by name and passwords in URLs are ``***``."""
    overrides = {
        "admin_token": "hunter2",
        "nats_url": "nats://me:hunter2@host:4222",
        "names": '["a b", "c\\"d"]',
        "limits": '{"x y": 1}',
        "ratio": "2",
    }
    loaded = load_with_origins("ingress", SampleSettings, environ={}, overrides=overrides)
    text = show_settings(loaded, "ingress")
    assert "hunter2" not in text
    assert 'nats_url = "nats://***@host:4222"' in text
    again = load_settings("ingress", SampleSettings, file=write(tmp_path, text), environ={})
    assert again == msgspec.structs.replace(loaded.settings, admin_token="***", nats_url="nats://***@host:4222")


@pytest.mark.parametrize(
    ("key", "value", "shown"),
    [
        ("api_keys", ["a"], "***"),
        ("cache_salt_secret", "a", "***"),
        ("SALT_KEY", "a", "***"),
        ("admin_token", "", ""),
        ("max_output_tokens", 5, 5),
        ("keys", ["http://u:p@h/", "x"], ["http://***@h/", "x"]),
        ("headers", {"token": "t", "a": 1}, {"token": "***", "a": 1}),
    ],
)
def test_redaction(key: str, value: object, shown: object) -> None:
    """By the last words of the key; plural counters of tokens are no secrets; inside tables and lists too."""
    assert redact(key, value) == shown


def test_help_names_every_setting() -> None:
    """Default and variable; a common setting has the common variable."""
    rows = {key: (default, variable) for key, default, variable in describe_settings("ingress", SampleSettings)}
    assert rows["window"] == ("10", "TIDEGATE_INGRESS_WINDOW")
    assert rows["nats_url"] == ('"nats://127.0.0.1:4222"', "TIDEGATE_NATS_URL")
    assert rows["path"][0] == "not set"
    assert describe_settings("bridge", RequiredSettings)[-1][1] == "required"

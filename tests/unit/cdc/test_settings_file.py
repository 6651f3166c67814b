"""cdc.toml: what it may say, and what is refused before anything is connected."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from millstream.cdc.patterns import check_patterns, is_wanted
from millstream.cdc.settings import CaptureSettings, OutboxSettings, TableSettings
from millstream.cdc.settings_file import check_capture, load_capture, without_password
from millstream.cdc.sources import source_kind
from millstream.cdc.template import settings_text
from millstream.errors import ConfigError
from millstream.settings import Secret

LEAST = 'name = "shop"\nsource = "postgresql://app@db/shop"\n'
WHOLE = """
[cdc]
name = "shop"
source = "postgresql://app@db:5433/shop?sslmode=require"
password_env = "SHOP_PASSWORD"
tables = ["public.*", "!public.audit_*"]
topic = "{name}-{table}"
format = "rows"
snapshot = false
whole_transactions = true
truncate = "event"
mask_key_env = "SHOP_MASK_KEY"
heartbeat = "1m30s"
log_budget = "512MiB"

[cdc.table."public.customers"]
topic = "people"
exclude = ["notes"]
key = ["id"]
mask = { email = "hash", phone = "redact" }
text = ["price"]

[[cdc.outbox]]
table = "public.outbox"
key = "aggregate"
id = false
headers = "meta"
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SHOP_PASSWORD", "p@ss/word")
    monkeypatch.setenv("SHOP_MASK_KEY", "pepper")
    return tmp_path


def refused(text: str) -> str:
    Path("cdc.toml").write_text(text)
    with pytest.raises(ConfigError) as error:
        load_capture()
    return str(error.value)


def test_every_setting_can_be_in_the_file() -> None:
    Path("cdc.toml").write_text(WHOLE)
    assert load_capture() == CaptureSettings(
        name="shop",
        source="postgresql://app:p%40ss%2Fword@db:5433/shop?sslmode=require",
        tables=("public.*", "!public.audit_*"),
        table={
            "public.customers": TableSettings(
                topic="people",
                exclude=("notes",),
                key=("id",),
                mask={"email": "hash", "phone": "redact"},
                text=("price",),
            )
        },
        outbox=(OutboxSettings("public.outbox", key="aggregate", id=None, headers="meta"),),
        topic="{name}-{table}",
        format="rows",
        snapshot=False,
        whole_transactions=True,
        truncate="event",
        mask_key=Secret("pepper"),
        heartbeat=90.0,
        log_budget=512 * 1024**2,
    )


def test_the_keys_may_be_at_the_top_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "other.toml"
    file.write_text(LEAST + '[table."public.a"]\nkey = ["x"]\n')
    found = load_capture(file)
    assert (found.name, found.tables, found.settings_of("public.a").key) == ("shop", ("*",), ("x",))


def test_without_a_file_the_nearest_project_is_read(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=r"there is no millstream\.toml"):
        load_capture()
    (here / "millstream.toml").write_text("[broker]\nport = 0\n")
    with pytest.raises(ConfigError, match=r"has no table \[cdc\].*millstream cdc init"):
        load_capture()
    (here / "millstream.toml").write_text(f"[broker]\nport = 0\n[cdc]\n{LEAST}")
    (here / "deeper").mkdir()
    monkeypatch.chdir(here / "deeper")
    assert load_capture().name == "shop"
    Path("cdc.toml").write_text(LEAST.replace('"shop"', '"mine"'))
    assert load_capture().name == "mine"


def test_the_file_of_a_sqlite_database_is_beside_the_settings(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (here / "cdc.toml").write_text('name = "shop"\nsource = "sqlite:///shop.db"\n')
    monkeypatch.chdir("/")
    assert load_capture(here / "cdc.toml").source == f"sqlite:///{here}/shop.db"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (LEAST + 'formt = "rows"', "unknown setting 'formt': did you mean 'format'?"),
        (LEAST + '[table."a"]\nexclud = ["x"]', "unknown setting 'exclud': did you mean 'exclude'"),
        (LEAST + '[[outbox]]\ntable = "a"\nvalu = "x"', "unknown setting 'valu': did you mean"),
        (LEAST + '[[outbox]]\ntopic = "a"', "outbox: 'table' is missing"),
        ('name = "shop"', "'source' is missing"),
        ('source = "postgresql:///shop"', "'name' is missing"),
        (LEAST.replace('"shop"', '"Shop-1"'), "lower-case letters"),
        (LEAST.replace("postgresql:", "oracle:"), "'oracle://' is not a database"),
        (LEAST.replace("postgresql:", "postgre:"), "did you mean 'postgres'?"),
        (LEAST.replace("postgresql://app@db/", ""), "is not an address"),
        (LEAST + "tables = []", "no pattern says which tables"),
        (LEAST + 'tables = ["!a"]', "Add '*' for all others"),
        (LEAST + 'tables = ["a", ""]', "must be a list of texts"),
        (LEAST + 'tables = [" a"]', "is not a pattern"),
        (LEAST + 'tables = "a"', "must be a list of texts"),
        (LEAST + 'heartbeat = "10"', "has no unit"),
        (LEAST + "heartbeat = 0", "heartbeat must be above 0"),
        (LEAST + "heartbeat = true", "must be a duration"),
        (LEAST + 'log_budget = "lots"', "log_budget: not a size"),
        (LEAST + 'snapshot = "no"', "snapshot must be true or false"),
        (LEAST + 'format = "json"', "'json' is not one of changes, rows"),
        (LEAST + 'truncate = "fail"', "not one of stop, event, ignore"),
        (LEAST + 'topic = "{schema}.{table}"', "{schema} means nothing"),
        (LEAST + 'topic = "{table"', "is not a template"),
        (LEAST + '[table."public.*"]\nkey = ["a"]', "not a pattern"),
        (LEAST + '[table.public.orders]\nkey = ["a"]', 'write [cdc.table."public.orders"]'),
        (LEAST + '[table."a"]\ntopic = "a b"', "topic"),
        (LEAST + '[table."a"]\ncolumns = ["x"]\nexclude = ["y"]', "columns or exclude, not both"),
        (LEAST + '[table."a"]\nexclude = ["x"]\nkey = ["x"]', "'x' is in key, and is not captured"),
        (LEAST + '[table."a"]\ncolumns = ["x"]\ntext = ["y"]', "'y' is in text"),
        (LEAST + '[table."a"]\nmask = {x = "hide"}', "not one of hash, null, redact"),
        (LEAST + '[table."a"]\nmask = {x = "hash"}', "needs a secret"),
        (LEAST + '[table."a"]\nkey = ["x"]\nmask = {x = "null"}', "all rows would have one key"),
        (LEAST + '[[outbox]]\ntable = "a"\n[[outbox]]\ntable = "a"', "given twice"),
        (LEAST + '[[outbox]]\ntable = "a"\nkey = false', "key must be the name of a column"),
        (LEAST + '[[outbox]]\ntable = "a"\n[table."a"]\nkey = ["x"]', "leave out one of them"),
        (LEAST + 'password_env = "NOT_THERE"', "variable NOT_THERE is not set"),
        (
            LEAST.replace("app@", "") + 'password_env = "SHOP_PASSWORD"',
            "needs a user in the address",
        ),
        (LEAST + '[cdc]\nname = "x"', "'name' is outside of the table [cdc]"),
        ("name = ", "cannot read"),
    ],
)
def test_what_is_wrong_is_named_with_the_file(text: str, found: str) -> None:
    message = refused(text)
    assert found in message
    assert "cdc.toml" in message


def test_no_message_has_a_password() -> None:
    secret = "hunter2"
    texts = [
        refused(LEAST.replace("app@", f"app:{secret}@") + 'password_env = "SHOP_PASSWORD"'),
        refused(LEAST.replace("app@db/shop", f"db/shop?password={secret}")),
        refused(f'name = "shop"\nsource = "app:{secret}@db/shop"'),
        refused(LEAST + f'mask_key = "{secret}"\nmask_key_env = "SHOP_MASK_KEY"'),
        repr(CaptureSettings(name="shop", source=f"mysql://app:{secret}@db/shop")),
    ]
    assert not [text for text in texts if secret in text or "p@ss" in text]


def test_a_file_that_is_not_there_is_named() -> None:
    with pytest.raises(ConfigError, match=r"no file other\.toml.*cdc init other\.toml"):
        load_capture(Path("other.toml"))


def test_settings_made_in_python_are_checked_too() -> None:
    with pytest.raises(ConfigError, match="lower-case letters"):
        check_capture(CaptureSettings(name="9x", source="sqlite:///a.db"))
    with pytest.raises(ConfigError, match=r"sqlite:///shop\.db"):
        check_capture(CaptureSettings(name="x", source="sqlite://a.db"))


def test_patterns_with_a_dot_mean_the_full_name_and_others_the_table() -> None:
    assert is_wanted(["*"], "public", "orders")
    assert is_wanted(["orders"], "public", "orders")
    assert is_wanted(["public.orders"], "public", "orders")
    assert not is_wanted(["public.orders"], "archive", "orders")
    assert not is_wanted(["*", "!orders"], "public", "orders")
    assert not is_wanted(["Orders"], "", "orders")
    check_patterns(["a.*", "!b"])


def test_the_password_of_an_address_is_taken_out_whole() -> None:
    assert without_password("postgresql://a:b:c@h1,h2:5/d?x=@") == (
        "postgresql://a@h1,h2:5/d?x=@",
        "b:c",
    )
    assert without_password("sqlite:////a@b:c.db") == ("sqlite:////a@b:c.db", None)
    assert source_kind("mysql://h") == source_kind("mariadb://h") == "mysql"


def test_the_template_is_a_settings_file(here: Path) -> None:
    text = settings_text("shop", "postgresql://app:old@db/shop", ("public.a", "public.b"))
    assert "old" not in text
    Path("cdc.toml").write_text(text)
    with pytest.raises(ConfigError, match="CDC_PASSWORD is not set"):
        load_capture()
    file = here / "other.toml"
    file.write_text(settings_text("shop", "postgresql://app@db/shop", ("*",)))
    assert load_capture(file) == CaptureSettings(name="shop", source="postgresql://app@db/shop")
    # Every line that is commented out can be used as it is.
    lines = [
        line.removeprefix("# ")
        for line in settings_text("shop", "postgresql://app@db/shop", ("*",)).splitlines()
        if " = " in line or line.startswith("# [")
    ]
    loaded = tomllib.loads("\n".join(lines))
    assert {"format", "table", "outbox", "log_budget"} <= loaded.keys()
    usable = "\n".join(lines).replace("CDC_PASSWORD", "SHOP_PASSWORD")
    file.write_text(usable.replace("CDC_MASK_KEY", "SHOP_MASK_KEY"))
    load_capture(file)

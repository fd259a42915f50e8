from __future__ import annotations

import io
import json
import logging
import os
import re
import subprocess
import sys
import threading
import traceback
import warnings
from collections.abc import Iterator
from typing import NoReturn

import pytest
import requests
from mlflow.exceptions import MlflowException
from pydantic import BaseModel, ValidationError

from penstock.errors import ServiceError
from penstock.redact import first_line, hiding_secrets, holds_secret, redact_text
from tests import ROOT

SECRET = "canary-7f3a/b+c"
QUOTED = "canary-7f3a%2Fb%2Bc"


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """One secret under a telling name, and one in an address."""
    monkeypatch.setenv("SHOP_DB_PASSWORD", SECRET)
    monkeypatch.setenv("SOME_SERVER", "http://alice:canary-in-url@127.0.0.1:5000")
    monkeypatch.setenv("PREFECT_API_AUTH_STRING", "alice:canary-of-prefect")


@pytest.fixture
def written() -> Iterator[io.StringIO]:
    """What another package's handler writes of everything that is logged."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    root = logging.getLogger()
    root.addHandler(handler)
    yield stream
    root.removeHandler(handler)


def requests_error() -> Exception:
    """What `requests` makes of a refused login: the text has the whole address."""
    response = requests.Response()
    response.status_code, response.reason = 401, "Unauthorized"
    response.url = "http://alice:canary-in-url@127.0.0.1:5000/api"
    with pytest.raises(requests.HTTPError) as caught:
        response.raise_for_status()
    return caught.value


@pytest.mark.parametrize(
    "text",
    [
        f"login {SECRET} refused",
        f"GET /?key={QUOTED}",
        "postgresql://user:canary@host/db",
        "http://user:canary@home@host:80/ is away",
        "the password canary-in-url does not fit",
        "the server wants canary-of-prefect",
        "Authorization: Basic canary0123456789abcdef==",
        "'Authorization': 'Bearer canary-0123456789'",
        "https://b.s3.amazonaws.com/k?X-Amz-Signature=canary&X-Amz-Security-Token=canary",
        "postgresql://host/db?user=alice&password=canary",
        "mssql+pyodbc:///?odbc_connect=DRIVER%3DSQL%3BUID%3Dalice%3BPWD%3Dcanary%3BDATABASE%3Dshop",
        "DRIVER%3dSQL%3bPWD%3dcanary",
        "host=db user=alice password=canary dbname=shop",
        "AccountName=shop;AccountKey=canary0123==;EndpointSuffix=core.windows.net",
        "host=db password='canary' dbname=shop",
        "host=db password='my own canary' dbname=shop",
        r"host=db password='it\'s a canary' dbname=shop",
        'connect(token="a very good canary")',
        "Driver={x};Uid=alice;Pwd={canary};",
        "Driver={x};Uid=alice;Pwd={a;canary};",
        "Driver={x};Uid=alice;Pwd={a}};canary}canary;x=1",
        "snowflake://db/?private_key_passphrase=canary",
        "https://host/x?auth=canary&client-secret=canary",
        "https://storage.googleapis.com/b/k?X-Goog-Signature=canary",
        "https://hooks.slack.com/services/T0/B0/canary",
        "-----BEGIN RSA PRIVATE KEY-----\ncanary\n-----END RSA PRIVATE KEY-----",
    ],
)
def test_redact_text_hides_every_form_of_secret(text: str) -> None:
    assert "canary" not in redact_text(text)


@pytest.mark.parametrize(
    "name",
    [
        *("DB_PASS", "SMTP_PASS", "AZURE_STORAGE_KEY", "AZURE_STORAGE_CONNECTION_STRING", "STRIPE_KEY", "GH_PAT"),
        *(
            "SENTRY_DSN",
            "DATABASE_URL",
            "APIKEY",
            "AZURE_SAS",
            "DB_CREDS",
            "SLACK_WEBHOOK_URL",
            "SERVICE_JWT",
            "SESSION_COOKIE",
        ),
        *("BASIC_AUTH", "RSA_PRIVATE_KEY_PEM", "DB_CONN_STR", "ConnectionStrings__Shop", "SECRET_KEY_BASE", "CLIENT_SECRETS"),
        *("DB_PASSWORD_PROD", "SNOWFLAKE_PASSWORD_2", "PASSWORD1", "API_KEY_PROD", "SLACK_TOKEN_BOT", "ENCRYPTION_KEY_HEX"),
        *("BUCKET_SECRET", "STORE_TOKEN", "PROJECT_API_KEY", "TOKEN_PROJECT_BOT"),
    ],
)
def test_value_of_variable_named_like_secret_is_hidden(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "postgresql://host/db?password=vault-0815" if name == "DATABASE_URL" else "vault-0815")
    assert redact_text("it printed vault-0815") == "it printed ***"


@pytest.mark.parametrize(
    "name",
    [
        *("MONKEY", "MONKEY_2", "TOKENIZER_PATH", "KEYBOARD", "TOKEN_URL", "DB_PASSWORD_FILE"),
        *("SECRET_NAMESPACE", "SECRET_STORE", "TOKEN_LIMIT", "TOKEN_VALIDATION", "PASSWORD_POLICY"),
        *("SECRET_MANAGER_PROJECT", "TOKEN_BUCKET", "AUTH_TOKEN_TTL_SECONDS", "API_KEY_VERSION"),
    ],
)
def test_value_of_variable_with_harmless_name_is_shown(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "vault-0815")
    assert redact_text("it printed vault-0815") == "it printed vault-0815"


@pytest.mark.parametrize("secret", ["p\"a\\ss'w0rd-9x", "one line\nand another", "plain-pässwörd"])
def test_redact_text_hides_quoted_secret(secret: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOP_DB_PASSWORD", secret)
    shown = [repr(secret), ascii(secret), json.dumps(secret)]
    assert [redact_text(text)[1:-1] for text in shown] == ["***"] * 3


def test_no_code_cuts_a_text_before_it_is_redacted() -> None:
    """Half a secret is not recognised. `redact.py` keeps back what may become one."""
    files = [path for folder in ("penstock", "ingest", "training", "tasks", "flows") for path in (ROOT / folder).rglob("*.py")]
    cut = [path.name for path in files if re.search(r"redact(_text)?\([^()]*\[[^\]]*:[^\]]*\]\)", path.read_text("utf-8"))]
    assert set(cut) == {"redact.py"}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("data.sql.connection", "postgresql://db/shop?user=alice&password=vault"),
        ("data.sql.connection", "mssql+pyodbc:///?odbc_connect=UID%3Da%3BPWD%3Dvault"),
        ("train.params.db_pass", "vault"),
        ("train.params.sentry_dsn", "https://vault@sentry.example/1"),
        ("train.params.storage_key", "vault"),
        ("train.params.gh_pat", "vault"),
        ("train.params.pgpassword", "vault"),
        ("train.params.slack_webhook_url", "vault"),
        ("data.sql.connection", "postgresql://db/shop?user=alice&sslpassword=vault"),
    ],
)
def test_setting_with_password_is_a_secret(name: str, value: str) -> None:
    assert holds_secret(name, value)


@pytest.mark.parametrize(
    ("name", "value"),
    [("train.params.pad_token", "<pad>"), ("data.sql.connection", "postgresql://db/shop"), ("a.sort_key", "day")],
)
def test_harmless_setting_is_not_a_secret(name: str, value: str) -> None:
    assert not holds_secret(name, value)


def test_redact_text_keeps_harmless_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_TOKEN", "short")
    monkeypatch.setenv("PWD", "/home/alice/project")
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", "/etc/keys/account.json")
    text = "short: /home/alice/project, /etc/keys/account.json, http://127.0.0.1:5000/a@b, basic understanding"
    text += ", google-auth==2.62.2, requests-auth=1.0, api_key == None"
    assert redact_text(text) == text


def test_text_beside_a_quoted_secret_is_kept() -> None:
    assert redact_text("password='' user='ann' password='a b' port='5'") == "password='' user='ann' password=*** port='5'"
    assert redact_text("run('x password=a') and ('y')") == "run('x password=***') and ('y')"


def test_word_after_auth_in_a_variable_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOP", "mode=1;auth=disabled;pass=required;password='vault 0815';")
    assert redact_text("disabled, required, vault 0815") == "disabled, required, ***"


def test_first_line_cuts_after_redaction() -> None:
    assert "canary" not in first_line(ValueError("x" * 290 + SECRET))


def test_log_record_of_any_library_hides_secrets(written: io.StringIO) -> None:
    with hiding_secrets():
        logging.getLogger("urllib3").warning("GET %s with %r", "http://alice:canary-in-url@host", {"password": SECRET})
        try:
            raise MlflowException(f"API request to http://alice:{SECRET}@host failed") from requests_error()
        except MlflowException:
            logging.getLogger("some.library").exception("it failed")
    assert "GET http://***@host" in written.getvalue()
    assert "MlflowException: API request to" in written.getvalue()
    assert "canary" not in written.getvalue()


def test_warning_hides_secrets() -> None:
    with hiding_secrets():
        assert "canary" not in warnings.formatwarning(f"unverified {SECRET}", UserWarning, "x.py", 1)


def test_printed_lines_hide_secrets_and_are_whole(capsys: pytest.CaptureFixture[str]) -> None:
    before = sys.stdout
    with hiding_secrets():
        print("Bearer", SECRET, "with", "Bearer", "canary-0123456789abcdef")
        with hiding_secrets():
            print(f"part of a line {SECRET[:9]}", end="")
        print(f"{SECRET[9:]} and its end\nnext", end="", flush=True)
        other = threading.Thread(target=print, args=["in another thread", SECRET], kwargs={"end": ""})
        other.start()
        other.join()
        for part in (SECRET[:9], SECRET[9:], "\n"):
            print(part, end="", flush=True)
        print(*["x"] * 9000, sep="")
        sys.stderr.writelines([f"refused {SECRET}\n", "second\n"])
        print("-----BEGIN KEY PRIVATE KEY-----\ncanary\n-----END KEY PRIVATE KEY-----", file=sys.stderr)
        assert not sys.stdout.isatty(), "other calls go to the stream below"
    assert sys.stdout is before
    print("outside")
    out, err = capsys.readouterr()
    first, second, *rest = out.splitlines()
    assert (first, second) == ("Bearer *** with Bearer ***", "part of a line *** and its end")
    assert rest == ["next***", "x" * 9000, "in another thread ***outside"]
    assert err == "refused ***\nsecond\n***\n"


def test_reader_that_is_gone_ends_no_work() -> None:
    code = "import sys\nfrom penstock.redact import hiding_secrets\nwith hiding_secrets():\n"
    code += "    for _ in range(9): print('a line', file=sys.stderr, flush=True)\nprint('done')"
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing) as gone:
        done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=gone, text=True, cwd=ROOT)
    assert (done.returncode, done.stdout) == (0, "done\n")


def test_error_that_leaves_block_hides_secrets_only() -> None:
    with pytest.raises(ServiceError) as caught, hiding_secrets():
        try:
            try:
                raise requests_error()
            except requests.HTTPError as error:
                error.add_note(f"asked with {SECRET}")
                raise MlflowException(f"API request to http://a:{SECRET}@h failed with {error}") from error
        except MlflowException as error:
            raise ServiceError("MLflow does not answer", next_step="start it") from error
    text = "".join(traceback.format_exception(caught.value))
    assert "MlflowException: API request to http://***@h failed with 401 Client Error" in text
    assert "canary" not in text


class Port(BaseModel):
    number: int


@pytest.mark.parametrize(
    "make",
    [
        lambda: OSError(5, "input/output error", f"/mnt/{SECRET}/file"),
        lambda: KeyError(SECRET),
        lambda: ExceptionGroup(f"two for {SECRET}", [ValueError(SECRET), requests_error()]),
        lambda: ExceptionGroup("two", [ExceptionGroup("inner", [ValueError({"password": SECRET})]), ValueError("harmless")]),
        lambda: UnicodeDecodeError("utf-8", SECRET.encode(), 0, 1, SECRET),
        lambda: RuntimeError("around", ValueError(SECRET)),
    ],
)
def test_error_of_any_class_hides_secrets(make: type[Exception]) -> None:
    with pytest.raises(Exception) as caught, hiding_secrets():
        raise make()
    assert "canary" not in "".join(traceback.format_exception(caught.value))


def test_group_with_unchangeable_member_keeps_the_others() -> None:
    with pytest.raises(ExceptionGroup, match="two") as caught, hiding_secrets():
        try:
            raise ValueError({"password": SECRET})
        except ValueError as error:
            raise ExceptionGroup("two", [error, KeyError("a")]) from error
    replaced, kept = caught.value.exceptions
    assert str(replaced) == "ValueError: {'password': '***'}" and isinstance(kept, KeyError)
    assert "canary" not in "".join(traceback.format_exception(caught.value))


class Underivable(ExceptionGroup[Exception]):
    def derive(self, excs: object) -> NoReturn:
        raise TypeError("derive")


@pytest.mark.parametrize("kind", [ExceptionGroup, Underivable])
@pytest.mark.parametrize("link", ["__cause__", "__context__"])
def test_replaced_group_keeps_notes_attributes_and_cause(kind: type[ExceptionGroup[Exception]], link: str) -> None:
    with pytest.raises(ExceptionGroup, match="two") as caught, hiding_secrets():
        group, behind = kind("two", [ValueError({"password": SECRET}), KeyError("a")]), LookupError("behind")
        group.add_note("look here")
        group.code = 3  # type: ignore[attr-defined]
        setattr(group, link, behind)
        behind.__context__ = group
        raise group
    text = "".join(traceback.format_exception(caught.value))
    assert "look here" in text and "LookupError: behind" in text and "canary" not in text
    assert caught.value.code == 3  # type: ignore[attr-defined]


def test_unchangeable_error_becomes_runtime_error() -> None:
    with pytest.raises(RuntimeError, match=r"ValidationError: 1 validation error for Port") as caught, hiding_secrets():
        Port.model_validate({"number": SECRET})
    assert not isinstance(caught.value, ValidationError)
    assert "canary" not in "".join(traceback.format_exception(caught.value))


def test_rays_log_record_factory_stays_and_hides_secrets() -> None:
    """In a process of its own: Ray puts a factory around the one it finds when it is imported."""
    code = f"""
import logging
from penstock.redact import hiding_secrets
with hiding_secrets():
    import ray
logging.getLogger("x").warning("%s", {SECRET!r})
print(logging.getLogRecordFactory()("x", 30, "f", 1, "m", (), None)._ray_timestamp_ns > 0)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert (done.stdout, done.stderr) == ("True\n", "***\n")

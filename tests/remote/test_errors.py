"""Every failure is one line with a next step, and no output has a secret or the text of a library."""

from __future__ import annotations

import gzip
import ssl
import sys
import traceback
from datetime import datetime
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from remote.server import FAULTS, KEY, SECRET, Server
from remote.servers import free_port, make_certificates

pytest.importorskip("obstore")

import ckptool
from ckptool.base.errors import CkptoolError, UnreadableError
from ckptool.base.steps import rename_step, undo_step
from ckptool.remote import libraries, s3, wire
from ckptool.remote.folder import open_folder
from ckptool.remote.source import open_remote
from ckptool.remote.store import Settings

#: Nothing of these may be shown: keys, what the server says, a query string, user information, texts of libraries.
_DATE = "%Y%m%dT%H%M%SZ"
SECRETS = (SECRET, "SECRET", KEY, "Signature", "user:", "Generic", "reqwest", "obstore.", "http error", "status code")


@pytest.fixture(autouse=True)
def impatient(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ask once; addresses name the server themselves."""
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    monkeypatch.setattr(libraries, "LIMITS", libraries.LIMITS._replace(retries=0))
    monkeypatch.setattr(wire, "LIMITS", wire.LIMITS._replace(retries=0))
    for bucket in ("bucket", "plain"):
        server.put(bucket, "a", bytes(1000))


def failure(address: str, settings: Settings | None = None) -> CkptoolError:
    """Return the error of opening an address; it has no secret, also in a traceback."""
    with pytest.raises(CkptoolError) as caught:
        open_remote(address, settings)
    check_secrets(caught.value)
    return caught.value


def check_secrets(error: CkptoolError) -> None:
    shown = "".join([*traceback.format_exception(error), error.next, repr(error)])
    shown = "\n".join(line for line in shown.splitlines() if not line.startswith("    "))  # lines of code
    assert [secret for secret in SECRETS if secret in shown] == []
    assert "\n" not in error.what


EXPECTED = {
    "500": ("S3 fails with status 500, also when asked again", "try again later"),
    "503": ("S3 fails with status 503, also when asked again", "try again later"),
    "expired": ("the credentials have expired", "sign in again, for example with aws sso login"),
    "region": ("the bucket bucket is in another region", "set AWS_REGION to the region of the bucket"),
    "skew": ("S3 refuses all requests, because the clock of this machine is wrong", "set the clock"),
    "denied": (
        "no permission to read it, or no such file and no permission to list bucket",
        "check the name and the permissions",
    ),
    "unauthorized": ("S3 wants credentials", "sign in, or read a public bucket with anonymous=True"),
    "reset": ("S3 broke off the connection, also when asked again", "try again later"),
    "short": ("S3 broke off its answer, also when asked again", "try again later"),
    "length": ("S3 sends a wrong number of bytes, also when asked again", "try again later"),
    "whole": ("S3 cannot send a part of a file", "download it first"),
}
EXPECTED["expired 403"] = EXPECTED["expired"]
#: The same from a web server, where it differs.
WEB = {
    "expired": ("the signed address has expired", "get a new one"),
    "expired 403": ("the signed address has expired", "get a new one"),
    "region": ("{host} redirects to an address that cannot be reached, or in a circle", "check the address"),
    "skew": ("{host} refuses it", "check the address; signed ones expire"),
    "denied": ("{host} refuses it", "check the address; signed ones expire"),
    "unauthorized": ("{host} wants credentials", "check the address"),
}


@pytest.mark.parametrize("fault", [fault for fault in FAULTS if fault not in ("stall", "complete", "etag")])
def test_what_a_server_answers(fault: str, server: Server) -> None:
    server.faults = dict.fromkeys(range(1, 40), fault)
    error = failure("s3://bucket/a", Settings(server.url))
    assert (error.what, error.next, error.path) == (*EXPECTED[fault], "s3://bucket/a")
    assert (type(error), error.exit_code) == (UnreadableError, 3)
    server.clear()
    server.faults = dict.fromkeys(range(1, 40), fault)
    error = failure(f"{server.url.replace('//', '//user:PASSWORD@')}/plain/a?X-Amz-Signature=SECRETQUERY")
    host = server.url.removeprefix("http://")
    what, step = WEB.get(fault) or (EXPECTED[fault][0].replace("S3", "{host}"), EXPECTED[fault][1])
    assert (error.what, error.next) == (what.format(host=host), step)
    assert error.path.startswith(f"{server.url}/plain/a")


def test_names_that_are_not_there(server: Server) -> None:
    settings = Settings(server.url)
    assert failure("s3://bucket/b", settings).what == "no such file"
    assert failure("s3://none/a", settings).what == "there is no bucket none"
    assert failure(f"{server.url}/plain/none").what == "no such file"
    for folder in ("s3://bucket", "s3://bucket/a/"):
        assert failure(folder, settings).what == "it is the address of a folder, not of a file"
    for odd in ("a//b", "a\tb", "a\nb", "a\n"):
        assert (
            failure(f"s3://bucket/{odd}", settings).what
            == "one of its names has an empty part, a dot or two as a part, a control character, or looks like a query"
        )
    assert failure("s3://bucket/old?versionId=7", settings).what.startswith("parameters behind a question mark")
    assert failure("s3:///a", settings).what == "the address names no bucket or host"
    assert failure("nix://host/a").what == "addresses with nix:// are not supported"


def test_wrong_credentials(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings(server.url)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "AKIDSECRETOTHER")
        error = failure("s3://bucket/a", settings)
        assert error.what == "S3 does not accept the credentials"
        monkeypatch.setenv(name, KEY if name == "AWS_ACCESS_KEY_ID" else SECRET)
    server.expired.add("SECRETTOKEN")
    monkeypatch.setenv("AWS_SESSION_TOKEN", "SECRETTOKEN")
    assert failure("s3://bucket/a", settings).what == "the credentials have expired"
    monkeypatch.setenv("AWS_SESSION_TOKEN", "another")
    assert open_remote("s3://bucket/a", settings).size == 1000
    error = failure("s3://bucket/a", Settings(server.url, anonymous=True))
    assert error.what.startswith("no permission to read it")
    server.signed = False
    assert open_remote("s3://bucket/a", Settings(server.url, anonymous=True)).size == 1000


@pytest.mark.parametrize("error", [(301, "PermanentRedirect"), (400, "AuthorizationHeaderMalformed")])
def test_a_bucket_in_another_region(error: tuple[int, str], server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """S3 tells everybody the region of a bucket, and the same requests are sent again to that region."""
    server.put("far-away", "a", bytes(1_000_000))
    server.regions["far-away"] = "ap-south-1", *error
    for region in ("us-west-2", "eu-west-1"):
        monkeypatch.setenv("AWS_REGION", region)
        server.clear()
        found = open_remote("s3://far-away/a", Settings(server.url))
        assert found.read(500_000, 10) == bytes(10)
        assert open_folder("s3://far-away/", Settings(server.url)).names() == {"a"}
        found.check_unchanged()
        # Two ends, both again, a range, a listing, a look. The second end, if it is asked for later, knows the region.
        assert server.count() in ((6, 7) if region == "us-west-2" else (5, 6, 7))
    server.regions["far-away"] = "", *error  # it does not say where
    server.faults = dict.fromkeys(range(server.number + 1, server.number + 9), "region")
    monkeypatch.setenv("AWS_REGION", "eu-west-3")
    assert failure("s3://far-away/a", Settings(server.url)).what == "the bucket far-away is in another region"


# -- the way to the server ------------------------------------------------------------------------------------


def test_no_way_to_the_server(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    nobody = f"http://127.0.0.1:{free_port()}"
    assert failure("s3://bucket/a", Settings(nobody)).what == "no connection to S3"
    assert failure(f"{nobody}/a?Signature=SECRET").what == f"no connection to {nobody.removeprefix('http://')}"
    error = failure("http://nobody.invalid/a?Signature=SECRET")
    assert error.what == "nobody.invalid cannot be found: there is no host of this name"
    for proxy in (nobody, server.url):  # one is not there, the other knows no CONNECT
        monkeypatch.setenv("HTTPS_PROXY", proxy)
        error = failure("https://example.com/a?Signature=SECRET")
        assert (error.what, error.next) == (
            "the proxy gives no connection to example.com",
            "check HTTPS_PROXY and NO_PROXY",
        )


def test_tls(server: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    secure = server.url.replace("http:", "https:")
    error = failure(f"{secure}/plain/a?Signature=SECRET")
    assert "it does not speak TLS, or its certificate is not trusted" in error.what
    make_certificates(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "host.crt", tmp_path / "host.key")
    with Server() as other:
        other.put("plain", "a", bytes(1000))
        other.http.socket = context.wrap_socket(other.http.socket, server_side=True)
        address = f"{other.url.replace('http:', 'https:')}/plain/a?Signature=SECRET"
        assert failure(address).next.startswith("name the certificates of your network in SSL_CERT_FILE")
        monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.pem"))
        assert open_remote(address).size == 1000


# -- credentials as people have them ----------------------------------------------------------------------------


def test_no_credentials_at_all(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", f"http://127.0.0.1:{free_port()}")
    for _ in range(2):
        error = failure("s3://bucket/a", Settings(server.url))
        assert error.what == "there are no credentials for S3"
        assert error.next == (
            "set AWS_ACCESS_KEY_ID and its secret, choose a profile, or read a public bucket with anonymous=True"
        )
        monkeypatch.delenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", raising=False)
        monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    assert server.count() == 0


def test_profiles(server: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("botocore")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".aws").mkdir()
    keys = f"aws_access_key_id = {KEY}\naws_secret_access_key = {SECRET}\n"
    (tmp_path / ".aws" / "credentials").write_text(f"[default]\n{keys}[team]\n{keys}", encoding="utf-8")
    settings = f"[default]\nregion = eu-west-1\n[profile team]\nendpoint_url = {server.url}\nregion = eu-north-1\n"
    (tmp_path / ".aws" / "config").write_text(settings, encoding="utf-8")
    assert open_remote("s3://bucket/a", Settings(server.url)).size == 1000
    assert "/eu-west-1/" in server.seen[-1].headers["authorization"]
    assert open_remote("s3://bucket/a", Settings(profile="team")).size == 1000
    assert "/eu-north-1/" in server.seen[-1].headers["authorization"]
    monkeypatch.setenv("AWS_PROFILE", "team")
    assert open_remote("s3://bucket/a").size == 1000
    monkeypatch.setenv("AWS_REGION", "us-west-2")
    assert open_remote("s3://bucket/a").size == 1000
    assert "/us-west-2/" in server.seen[-1].headers["authorization"]
    error = failure("s3://bucket/a", Settings(server.url, profile="other"))
    assert (error.what, error.next) == ("there is no such profile", "see which there are: aws configure list-profiles")


CONFIG = """[default]
region = us-east-1
endpoint_url = http://default:1
[profile direct]
endpoint_url = http://direct:2
[profile through]
services = mine
endpoint_url = http://all:3
[services mine]
s3 =
  endpoint_url = http://mine:4
[profile both]
ignore_configured_endpoint_urls = true
endpoint_url = http://ignored:5
[profile plain]
region = eu-west-1
"""
ENDPOINTS: list[tuple[str, dict[str, str], str]] = [
    ("", {}, "http://default:1"),
    ("direct", {}, "http://direct:2"),
    ("through", {}, "http://mine:4"),
    ("both", {}, ""),
    ("both", {"AWS_ENDPOINT_URL": "http://variable:6"}, ""),
    ("plain", {}, ""),
    ("", {"AWS_PROFILE": "through"}, "http://mine:4"),
    ("through", {"AWS_ENDPOINT_URL": "http://variable:6"}, "http://variable:6"),
    ("", {"AWS_ENDPOINT_URL": "http://variable:6", "AWS_ENDPOINT_URL_S3": "http://s3:7"}, "http://s3:7"),
    ("", {"AWS_ENDPOINT_URL": ""}, "http://default:1"),
    ("", {"AWS_IGNORE_CONFIGURED_ENDPOINT_URLS": "true"}, ""),
    ("", {"AWS_IGNORE_CONFIGURED_ENDPOINT_URLS": "true", "AWS_ENDPOINT_URL": "http://variable:6"}, ""),
    ("both", {"AWS_IGNORE_CONFIGURED_ENDPOINT_URLS": "false"}, "http://ignored:5"),
]


@pytest.mark.parametrize("keys", ["variables", "files"])
@pytest.mark.parametrize(("profile", "variables", "endpoint"), ENDPOINTS)
def test_the_endpoint_is_that_of_boto3(
    profile: str,
    variables: dict[str, str],
    endpoint: str,
    keys: str,
    server: Server,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    pytest.importorskip("botocore")
    from botocore.session import Session

    config, credentials = tmp_path / "config", tmp_path / "credentials"
    config.write_text(CONFIG, encoding="utf-8")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(config))
    if keys == "files":
        monkeypatch.delenv("AWS_ACCESS_KEY_ID")
        monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    pair = f"aws_access_key_id = {KEY}\naws_secret_access_key = {SECRET}\n"
    names = ("default", "direct", "through", "both", "plain")
    credentials.write_text("".join(f"[{name}]\n{pair}" for name in names), encoding="utf-8")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(credentials))
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    for option in ("", server.url):
        found: Any = s3.open_store("s3://bucket/a", Settings(option, profile=profile))[0]
        client = Session(profile=profile or None).create_client("s3", "us-east-1", endpoint_url=option or None)
        assert found.account.endpoint == (option or endpoint)
        assert client.meta.endpoint_url == (found.account.endpoint or "https://s3.amazonaws.com")


def test_an_endpoint_of_a_file_without_boto3(server: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    config = tmp_path / "config"
    monkeypatch.setenv("AWS_CONFIG_FILE", str(config))
    config.write_text(f"[default]\nendpoint_url = {server.url}\n", encoding="utf-8")
    assert open_remote("s3://bucket/a").size == 1000
    monkeypatch.setitem(sys.modules, "botocore.session", None)
    s3._account.cache_clear()
    assert failure("s3://bucket/a").next.startswith("pip install 'ckptool[s3]'")
    assert open_remote("s3://bucket/a", Settings(server.url)).size == 1000
    config.write_text("[default]\nregion = us-east-1\n", encoding="utf-8")
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
    assert open_remote("s3://bucket/a").size == 1000


@pytest.mark.parametrize(
    ("url", "text"), [("http://host/a%20b", "ed7002b4"), ("https://host:81/a", "UNSIGNED-PAYLOAD")]
)
def test_a_signature_is_that_of_botocore(url: str, text: str) -> None:
    pytest.importorskip("botocore")
    from botocore.auth import S3SigV4Auth
    from botocore.awsrequest import AWSRequest
    from botocore.config import Config
    from botocore.credentials import Credentials

    body = b"content"
    keys = s3.Keys(KEY, SECRET, "token")
    more = {"x-amz-copy-source": "/bucket/a b", "range": "bytes=0-1"}
    place = f"{url}?partNumber=1&prefix=%C3%BC%2F%7E&uploads="
    found = s3.Account("", "eu-west-1", keys).signed("PUT", place, more, body)
    request = AWSRequest("PUT", place, {"x-amz-copy-source": "/bucket/a b"}, body)
    request.context["client_config"] = Config(s3={"payload_signing_enabled": url.startswith("http:")})
    signer = S3SigV4Auth(Credentials(*keys), "s3", "eu-west-1")
    with mock.patch("botocore.auth.get_current_datetime", lambda: datetime.strptime(found["x-amz-date"], _DATE)):
        signer.add_auth(request)
    assert request.headers["x-amz-content-sha256"] == found["x-amz-content-sha256"]
    assert text in found["x-amz-content-sha256"]
    assert request.headers["authorization"].replace(", ", ",") == found["authorization"]


#: The first bytes of a file, and what to do about it in a bucket and on a web server.
NOT_WHOLE: list[tuple[bytes, str, str]] = [
    (b"version https://git-lfs.github.com/spec/v1\nsize 9\n", "upload the file itself", "use the link of the file"),
    (b"<!doctype html><title>Sign in</title>", "upload the file itself", "log in, or use the link of the raw file"),
    (b'{"error": "not found"}', "upload the file itself", "log in, or use the link of the raw file"),
    (b'{"layers": 2}', "name the checkpoint itself", "name the checkpoint itself"),
    (b"", "upload it again", "check the link"),
    (b"PK\x03\x04" + bytes(100), "get a whole copy of the file", "get a whole copy of the file"),
    (gzip.compress(b"text"), "download it, then unpack it", "download it, then unpack it"),
    (b"BZh" + bytes(100), "download it, then unpack it", "download it, then unpack it"),
    (b"7z\xbc\xaf\x27\x1c" + bytes(100), "download it, then unpack it", "download it, then unpack it"),
]


@pytest.mark.parametrize(("data", "stored", "web"), NOT_WHOLE, ids=[stored for _, stored, _ in NOT_WHOLE])
def test_advice_is_for_the_place_of_the_file(
    data: bytes, stored: str, web: str, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
    for bucket, place, step in (("bucket", "s3://bucket", stored), ("plain", f"{server.url}/plain", web)):
        server.put(bucket, "x.pth", data)
        with pytest.raises(UnreadableError) as caught:
            ckptool.open(f"{place}/x.pth")
        assert str(caught.value.step).startswith(step)


def test_no_command_of_a_shell_for_an_address() -> None:
    address = "s3://bucket/run/model.safetensors"
    assert str(rename_step(address, ".pth")) == "rename it to model.pth"
    assert str(undo_step(address)) == "download it, then undo the edit: ckptool undo model.safetensors"

"""The server for tests behaves as S3 does, with boto3 as the client that knows."""

from __future__ import annotations

import random
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest
from remote.server import ERRORS, KEY, MIB, SECRET, TOKEN, Server

boto3: Any = pytest.importorskip("boto3")
botocore: Any = pytest.importorskip("botocore")
obstore: Any = pytest.importorskip("obstore")


@pytest.fixture
def server() -> Iterator[Server]:
    with Server(page=3) as found:
        found.buckets["bucket"] = {}
        yield found


def client(server: Server, key: str = KEY, secret: str = SECRET, token: str = "") -> Any:
    config = botocore.config.Config(retries={"total_max_attempts": 1})
    session = boto3.session.Session(key, secret, token or None, region_name="us-east-1")
    return session.client("s3", endpoint_url=server.url, config=config)


@pytest.fixture
def s3(server: Server) -> Any:
    return client(server)


def code(call: Any, *args: Any, **more: Any) -> str:
    """The code of the error that a call ends with."""
    with pytest.raises(botocore.exceptions.ClientError) as caught:
        call(*args, **more)
    return str(caught.value.response["Error"]["Code"])


def test_objects_of_any_name_are_written_and_read(s3: Any, server: Server) -> None:
    data = random.Random(1).randbytes(5000)
    for key in ("a.bin", "folder/a b+c=d%é!~'().bin", "x/y/z"):
        etag = s3.put_object(Bucket="bucket", Key=key, Body=data)["ETag"]
        found = s3.get_object(Bucket="bucket", Key=key)
        assert (found["Body"].read(), found["ETag"]) == (data, etag)
        assert s3.head_object(Bucket="bucket", Key=key)["ContentLength"] == 5000
        for span, part in {"0-9": data[:10], "-7": data[-7:], "4990-9999": data[4990:], "17-": data[17:]}.items():
            assert s3.get_object(Bucket="bucket", Key=key, Range=f"bytes={span}")["Body"].read() == part
        assert code(s3.get_object, Bucket="bucket", Key=key, Range="bytes=5000-") == "InvalidRange"
        s3.delete_object(Bucket="bucket", Key=key)
        assert code(s3.get_object, Bucket="bucket", Key=key) == "NoSuchKey"
    assert code(s3.get_object, Bucket="none", Key="a") == "NoSuchBucket"
    assert server.down > 3 * 5000
    assert server.up == 3 * 5000


def test_conditions_hold(s3: Any) -> None:
    etag = s3.put_object(Bucket="bucket", Key="a", Body=b"one")["ETag"]
    assert code(s3.get_object, Bucket="bucket", Key="a", IfMatch='"other"') == "PreconditionFailed"
    assert s3.get_object(Bucket="bucket", Key="a", IfMatch=etag)["Body"].read() == b"one"
    assert code(s3.get_object, Bucket="bucket", Key="a", IfNoneMatch=etag) == "304"
    assert code(s3.put_object, Bucket="bucket", Key="a", Body=b"two", IfNoneMatch="*") == "PreconditionFailed"
    assert code(s3.put_object, Bucket="bucket", Key="a", Body=b"two", IfMatch='"other"') == "PreconditionFailed"
    s3.put_object(Bucket="bucket", Key="a", Body=b"two", IfMatch=etag)
    assert s3.get_object(Bucket="bucket", Key="a")["Body"].read() == b"two"


def test_listings_come_in_pages(s3: Any, server: Server) -> None:
    keys = [f"run/{number}.pth" for number in range(7)] + ["run/sub/a b.json", "run/sub/b", "run2", "other"]
    for key in keys:
        server.put("bucket", key, b"x")

    def listed(**more: str) -> tuple[list[str], list[str]]:
        pages = list(s3.get_paginator("list_objects_v2").paginate(Bucket="bucket", **more))
        names = [each["Key"] for page in pages for each in page.get("Contents", [])]
        return names, [each["Prefix"] for page in pages for each in page.get("CommonPrefixes", [])]

    assert listed() == (sorted(keys), [])
    assert server.count() == 4
    assert listed(Prefix="run/", Delimiter="/") == (sorted(keys[:7]), ["run/sub/"])
    assert listed(Prefix="run/sub/") == (sorted(keys[7:9]), [])
    assert listed(Prefix="nothing") == ([], [])


def test_an_upload_in_parts_with_copies(s3: Any, server: Server) -> None:
    data = random.Random(2).randbytes(13 * MIB)
    source = server.put("bucket", "source", data)
    upload = s3.create_multipart_upload(Bucket="bucket", Key="target")["UploadId"]
    same: dict[str, Any] = {"Bucket": "bucket", "Key": "target", "UploadId": upload}
    first = s3.upload_part(**same, PartNumber=1, Body=data[: 5 * MIB])["ETag"]
    copy = {"CopySource": {"Bucket": "bucket", "Key": "source"}, "CopySourceRange": f"bytes={5 * MIB}-{12 * MIB - 1}"}
    wrong = code(s3.upload_part_copy, **same, **copy, PartNumber=2, CopySourceIfMatch='"other"')
    assert wrong == "PreconditionFailed"
    second = s3.upload_part_copy(**same, **copy, PartNumber=2, CopySourceIfMatch=source.etag)["CopyPartResult"]["ETag"]
    third = s3.upload_part(**same, PartNumber=3, Body=data[12 * MIB :])["ETag"]
    assert [each["Size"] for each in s3.list_parts(**same)["Parts"]] == [5 * MIB, 7 * MIB, MIB]
    assert [each["Key"] for each in s3.list_multipart_uploads(Bucket="bucket")["Uploads"]] == ["target"]
    assert server.copied == 7 * MIB
    assert code(s3.get_object, Bucket="bucket", Key="target") == "NoSuchKey"

    def parts(*etags: str) -> dict[str, Any]:
        return {"Parts": [{"PartNumber": at, "ETag": etag} for at, etag in enumerate(etags, 1)]}

    assert code(s3.complete_multipart_upload, **same, MultipartUpload=parts(first, third)) == "InvalidPart"
    backwards = {"Parts": parts(first, second, third)["Parts"][::-1]}
    assert code(s3.complete_multipart_upload, **same, MultipartUpload=backwards) == "InvalidPartOrder"
    every = parts(first, second, third)
    server.put("bucket", "target", b"somebody else's")
    assert code(s3.complete_multipart_upload, **same, MultipartUpload=every, IfNoneMatch="*") == "PreconditionFailed"
    assert code(s3.complete_multipart_upload, **same, MultipartUpload=every, IfMatch='"x"') == "PreconditionFailed"
    server.faults = {server.number + 1: "complete"}
    assert code(s3.complete_multipart_upload, **same, MultipartUpload=every) == "InternalError"
    assert s3.complete_multipart_upload(**same, MultipartUpload=every)["ETag"].endswith('-3"')
    assert server.get("bucket", "target") == data
    assert "Uploads" not in s3.list_multipart_uploads(Bucket="bucket")


def test_small_parts_are_refused_and_uploads_aborted(s3: Any, server: Server) -> None:
    same = {"Bucket": "bucket", "Key": "target"}
    same["UploadId"] = s3.create_multipart_upload(**same)["UploadId"]
    etags = [s3.upload_part(**same, PartNumber=at, Body=b"small")["ETag"] for at in (1, 2)]
    parts = {"Parts": [{"PartNumber": at, "ETag": etag} for at, etag in enumerate(etags, 1)]}
    assert code(s3.complete_multipart_upload, **same, MultipartUpload=parts) == "EntityTooSmall"
    s3.abort_multipart_upload(**same)
    assert (server.uploads, server.buckets["bucket"]) == ({}, {})
    assert code(s3.upload_part, **same, PartNumber=1, Body=b"late") == "NoSuchUpload"


def test_versions(s3: Any, server: Server) -> None:
    server.versioned.add("bucket")
    for text in (b"one", b"three"):
        s3.put_object(Bucket="bucket", Key="a", Body=text)
    listed = s3.list_object_versions(Bucket="bucket")["Versions"]
    assert [each["IsLatest"] for each in listed] == [True, False]
    old = s3.get_object(Bucket="bucket", Key="a", VersionId=listed[1]["VersionId"])
    assert (old["Body"].read(), old["VersionId"]) == (b"one", listed[1]["VersionId"])
    assert s3.get_object(Bucket="bucket", Key="a")["Body"].read() == b"three"
    assert code(s3.get_object, Bucket="bucket", Key="a", VersionId="v9") == "NoSuchVersion"


def test_signatures_are_checked(server: Server) -> None:
    server.put("bucket", "a", b"one")
    server.expired.add("old token")
    assert client(server, token="token").get_object(Bucket="bucket", Key="a")["Body"].read() == b"one"
    assert code(client(server, key="AKIDOTHER").get_object, Bucket="bucket", Key="a") == "InvalidAccessKeyId"
    assert code(client(server, secret="other").get_object, Bucket="bucket", Key="a") == "SignatureDoesNotMatch"
    assert code(client(server, token="old token").get_object, Bucket="bucket", Key="a") == "ExpiredToken"
    anonymous = boto3.client(
        "s3", endpoint_url=server.url, config=botocore.config.Config(signature_version=botocore.UNSIGNED)
    )
    assert code(anonymous.get_object, Bucket="bucket", Key="a") == "AccessDenied"


@pytest.mark.parametrize("fault", [fault for fault in ERRORS if fault != "region"])  # boto3 asks again elsewhere
def test_errors_of_s3_as_faults(fault: str, s3: Any, server: Server) -> None:
    server.put("bucket", "a", bytes(1000))
    server.faults = {2: fault}
    assert len(s3.get_object(Bucket="bucket", Key="a")["Body"].read()) == 1000
    assert code(s3.get_object, Bucket="bucket", Key="a") == ERRORS[fault][1]
    assert len(s3.get_object(Bucket="bucket", Key="a")["Body"].read()) == 1000
    assert [each.status for each in server.seen] == [200, ERRORS[fault][0], 200]


def raw(server: Server, path: str, headers: str = "") -> bytes:
    """The whole answer to a request, as it comes over the line."""
    with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])), timeout=5) as line:
        line.sendall(f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n{headers}\r\n".encode())
        parts = []
        try:
            while part := line.recv(1 << 16):
                parts.append(part)
        except ConnectionResetError:
            parts.append(b"RESET")
        return b"".join(parts)


def test_faults_of_the_answer_itself(server: Server) -> None:
    server.put("plain", "a", bytes(1000), etag='"first"')
    server.stall = 0.2
    faults = ("", "short", "length", "whole", "etag", "reset", "stall")
    server.faults = dict(enumerate(faults, 1))
    answers = [raw(server, "/plain/a", "Range: bytes=0-99\r\n") for _ in faults]
    bodies = [len(answer.partition(b"\r\n\r\n")[2]) for answer in answers]
    assert bodies == [100, 50, 93, 1000, 100, 0, 0]
    assert [b"Content-Length: 100\r" in answer for answer in answers] == [True, True, False, False, True, False, False]
    assert b'ETag: "another"' in answers[4] and b'ETag: "first"' in answers[0]
    assert [answer in (b"", b"RESET") for answer in answers[5:]] == [True, True]
    server.ranges = False
    assert len(raw(server, "/plain/a", "Range: bytes=0-99\r\n").partition(b"\r\n\r\n")[2]) == 1000


def test_the_hub_lists_and_redirects(server: Server) -> None:
    server.put("org--model", "model.safetensors", bytes(5000), etag='"abc"')
    server.put("org--model", "config.json", b"{}")
    server.put("org--private", "config.json", b"{}")
    listed = raw(server, "/hub/api/models/org/model/tree/main?recursive=true")
    assert b'"path": "model.safetensors", "size": 5000' in listed
    assert b'"path": "config.json"' in listed
    with Server() as other:
        server.redirect = other.url
        small = raw(server, "/hub/org/model/resolve/main/config.json")
        assert small.startswith(b"HTTP/1.1 200") and f"X-Repo-Commit: {server.commit}".encode() in small
        large = raw(server, "/hub/org/model/resolve/main/model.safetensors")
        assert large.startswith(b"HTTP/1.1 302") and b'X-Linked-ETag: "abc"' in large
        assert b"X-Linked-Size: 5000" in large
        assert f"Location: {other.url}/plain/org--model/model.safetensors".encode() in large
    assert raw(server, "/hub/org/private/resolve/main/config.json").startswith(b"HTTP/1.1 401")
    given = f"Authorization: Bearer {TOKEN}\r\n"
    assert raw(server, "/hub/org/private/resolve/main/config.json", given).startswith(b"HTTP/1.1 200")
    assert raw(server, "/hub/org/none/resolve/main/config.json").startswith(b"HTTP/1.1 404")
    assert raw(server, "/hub/org/model/resolve/other/config.json").startswith(b"HTTP/1.1 404")


def test_delay_bandwidth_and_round_trips_are_as_asked(server: Server) -> None:
    server.put("plain", "a", bytes(2 * MIB))
    server.delay, server.bandwidth = 0.05, 10 * MIB
    begun = time.monotonic()
    for _ in range(2):
        raw(server, "/plain/a")
    assert time.monotonic() - begun >= 2 * (0.05 + 0.2)
    assert (server.count(), server.count("GET"), server.round_trips) == (2, 2, 2)


def test_obstore_reads_what_boto3_wrote(s3: Any, server: Server) -> None:
    s3.put_object(Bucket="bucket", Key="a b/c+d", Body=b"0123456789")
    keys = {"access_key_id": KEY, "secret_access_key": SECRET, "endpoint": server.url}
    store = obstore.store.S3Store("bucket", **keys, client_options={"allow_http": True})
    assert bytes(obstore.get(store, "a b/c+d", options={"range": {"suffix": 3}}).bytes()) == b"789"
    assert [each["path"] for each in obstore.list(store, "a b").collect()] == ["a b/c+d"]

"""The server for tests behaves as S3 does, with boto3 as the client that knows."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
from remote.server import ERRORS, KEY, MIB, SECRET, Server

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


def test_conditions_hold(s3: Any) -> None:
    etag = s3.put_object(Bucket="bucket", Key="a", Body=b"one")["ETag"]
    assert code(s3.get_object, Bucket="bucket", Key="a", IfMatch='"other"') == "PreconditionFailed"
    assert s3.get_object(Bucket="bucket", Key="a", IfMatch=etag)["Body"].read() == b"one"
    assert code(s3.get_object, Bucket="bucket", Key="a", IfNoneMatch=etag) == "304"
    assert code(s3.put_object, Bucket="bucket", Key="a", Body=b"two", IfNoneMatch="*") == "PreconditionFailed"
    assert code(s3.put_object, Bucket="bucket", Key="a", Body=b"two", IfMatch='"other"') == "PreconditionFailed"
    s3.put_object(Bucket="bucket", Key="a", Body=b"two", IfMatch=etag)
    assert s3.get_object(Bucket="bucket", Key="a")["Body"].read() == b"two"


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

"""Translates boto3 errors into qdo errors, which fit on one line and name the remedy.

This module needs boto3, so qdo imports it only for AWS brokers.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator

import boto3
from botocore import exceptions as boto
from botocore.parsers import ResponseParserError

from qdo.broker_errors import (
    AccessDeniedError,
    AwsError,
    AwsNotFoundError,
    AwsUnreachableError,
    ClockError,
    CredentialsError,
    ExpiredCredentialsError,
    ThrottledError,
)
from qdo.brokers.aws.address import ServiceAddress
from qdo.errors import QdoError
from qdo.text import closest

# The errors that calls of boto3's clients raise. boto3 wraps urllib3's errors in these classes.
BOTO_ERRORS = (boto.BotoCoreError, boto.ClientError, ResponseParserError)

# The maximum length of a server's response in an error, in characters.
SHOWN_CHARACTERS = 300
# The status codes that proxies and gateways return without an AWS error code.
TOO_LATE = 408
TOO_MANY = 429
SERVICES = {"sqs": "SQS", "kinesis": "Kinesis", "s3": "S3"}

_EXPIRED = {"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired"}
_CLOCK = {"RequestExpired", "RequestTimeTooSkewed"}
# Prefixes of AWS's messages about a wrong clock; their error code is that of wrong credentials.
_CLOCK_REASONS = ("Signature expired", "Signature not yet current")
_CREDENTIALS = {
    "AuthFailure",
    "IncompleteSignature",
    "IncompleteSignatureException",
    "InvalidAccessKeyId",
    "InvalidClientTokenId",
    "InvalidSecurity",
    "InvalidSignatureException",
    "InvalidToken",
    "MissingAuthenticationToken",
    "MissingAuthenticationTokenException",
    "NotAuthorized",
    "SignatureDoesNotMatch",
    "UnrecognizedClientException",
}
_DENIED = {
    "403",
    "AccessDenied",
    "AccessDeniedException",
    "AuthorizationError",
    "AuthorizationErrorException",
    "Forbidden",
    "KMSAccessDeniedException",
    "KmsAccessDenied",
    "OptInRequired",
    "UnauthorizedOperation",
}
_THROTTLED = {
    "BandwidthLimitExceeded",
    "EC2ThrottledException",
    "KMSThrottlingException",
    "KmsThrottled",
    "LimitExceededException",
    "OverLimit",
    "PriorRequestNotComplete",
    "ProvisionedThroughputExceededException",
    "RequestLimitExceeded",
    "RequestThrottled",
    "RequestThrottledException",
    "SlowDown",
    "ThrottledException",
    "Throttling",
    "ThrottlingException",
    "TooManyRequestsException",
    "TransactionInProgressException",
}
_NOT_FOUND = {
    "NoSuchBucket",
    "NoSuchKey",
    "NonExistentQueue",
    "QueueDoesNotExist",
    "ResourceNotFoundException",
}
_REMEDIES = {
    "sqs": "create it, or send to it with create=standard or create=fifo in the broker's address",
    "kinesis": "create it, or correct the name and the region in the broker's address",
    "s3": "create it, or correct its name in the broker's address",
}
_NO_CREDENTIALS = (
    boto.NoCredentialsError,
    boto.PartialCredentialsError,
    boto.CredentialRetrievalError,
    boto.MetadataRetrievalError,
    boto.InvalidConfigError,
    boto.InvalidIMDSEndpointError,
    boto.InvalidIMDSEndpointModeError,
    boto.InfiniteLoopConfigError,
    boto.RefreshWithMFAUnsupportedError,
    boto.ProfileNotFound,
    boto.ConfigNotFound,
    boto.ConfigParseError,
    boto.UnknownCredentialError,
    boto.NoAuthTokenError,
    boto.TokenRetrievalError,
    boto.SSOError,
    boto.LoginError,
)
_OUT_OF_REACH = (
    boto.HTTPClientError,
    boto.ConnectionError,
    boto.IncompleteReadError,
    boto.ChecksumError,
    boto.EndpointProviderError,
    boto.InvalidRegionError,
    boto.UnknownEndpointError,
    boto.UnknownRegionError,
)
# The permissions of S3 operations, if permission and operation have different names.
_PERMISSIONS = {
    "HeadBucket": "ListBucket",
    "ListObjectsV2": "ListBucket",
    "DeleteObjects": "DeleteObject",
}


def permission(service: str, operation: str) -> str:
    if service == "sqs":
        return operation.removesuffix("Batch")
    return _PERMISSIONS.get(operation, operation) if service == "s3" else operation


def code_of(error: BaseException) -> str:
    """Return the error code of an AWS response without its namespace; "" if there is no code."""
    if not isinstance(error, boto.ClientError):
        return ""
    # The two protocols have different codes: AWS.SimpleQueueService.NonExistentQueue and
    # QueueDoesNotExist.
    return str(error.response.get("Error", {}).get("Code", "")).rsplit(".", 1)[-1]


def is_not_found(error: BaseException) -> bool:
    """Return whether a queue, stream, shard, bucket or object does not exist."""
    if _is_bare_404(error):
        # S3 responds to HEAD without a body, and so without a code. A 404 without a code to any
        # other request is not from AWS.
        return str(getattr(error, "operation_name", "")).startswith("Head")
    return code_of(error) in _NOT_FOUND


def _is_bare_404(error: BaseException) -> bool:
    return code_of(error) == "404"


def is_throttling(error: BaseException) -> bool:
    return code_of(error) in _THROTTLED


def is_throttling_code(code: str) -> bool:
    """Return whether an error code, for example of a batch entry, means throttling."""
    return code.rsplit(".", 1)[-1] in _THROTTLED


def is_transient(error: BaseException) -> bool:
    """Return whether a retry of the same call can succeed without an operator's help."""
    if isinstance(error, boto.ClientError):
        status = _status(error)
        return is_throttling(error) or status >= 500 or status in (TOO_LATE, TOO_MANY)
    return isinstance(error, (*_OUT_OF_REACH, ResponseParserError))


@contextlib.contextmanager
def translate(place: ServiceAddress, what: str, name: str) -> Iterator[None]:
    """Translate boto3 errors within the block; `what` is a queue, stream, shard or bucket."""
    try:
        yield
    except BOTO_ERRORS as error:
        raise translation(error, place, what, name) from error


def translation(error: BaseException, place: ServiceAddress, what: str, name: str) -> QdoError:
    service = SERVICES.get(place.service, place.service)
    if isinstance(error, boto.ClientError):
        return _of_answer(error, place, service, what, name)
    if isinstance(error, _NO_CREDENTIALS):
        return CredentialsError(service=service, region=place.region, reason=_line(error))
    if isinstance(error, (*_OUT_OF_REACH, ResponseParserError)):
        return _unreachable(place, service, _line(error))
    return AwsError(
        service=service,
        action=f"a call about {what}",
        resource=repr(name),
        code=type(error).__name__,
        reason=_line(error),
    )


def _of_answer(
    error: boto.ClientError, place: ServiceAddress, service: str, what: str, name: str
) -> QdoError:
    code = code_of(error)
    reason = _reason(error)
    status = _status(error)
    if code in _CLOCK or (code in _CREDENTIALS and reason.startswith(_CLOCK_REASONS)):
        return ClockError(service=service, region=place.region, reason=f"{code}: {reason}")
    if code in _EXPIRED:
        return ExpiredCredentialsError(service=service, region=place.region, reason=reason)
    if code in _CREDENTIALS:
        return CredentialsError(service=service, region=place.region, reason=f"{code}: {reason}")
    action = f"{place.service}:{permission(place.service, str(error.operation_name))}"
    resource = f"{what} {name!r}"
    if code in _THROTTLED or status == TOO_MANY:
        return ThrottledError(
            service=service, action=action, resource=resource, reason=f"{code}: {reason}"
        )
    if is_not_found(error):
        remedy = _REMEDIES.get(place.service, "create it")
        return AwsNotFoundError(
            what=f"{service} {what}", name=name, region=place.region, remedy=remedy
        )
    if status >= 500 or status == TOO_LATE or _is_bare_404(error):
        told = code if code == str(status) else f"{status} {code}"
        return _unreachable(place, service, f"it answered {told}: {reason}")
    kind = AccessDeniedError if code in _DENIED else AwsError
    return kind(service=service, action=action, resource=resource, code=code, reason=reason)


def _unreachable(place: ServiceAddress, service: str, reason: str) -> AwsUnreachableError:
    return AwsUnreachableError(
        service=service,
        region=place.region,
        reason=reason,
        hint="" if place.endpoint else _region_hint(place.region),
    )


@functools.cache
def regions() -> tuple[str, ...]:
    session = boto3.Session()
    found = {
        region
        for partition in session.get_available_partitions()
        for region in session.get_available_regions("sqs", partition)
    }
    return tuple(sorted(found))


def _region_hint(region: str) -> str:
    """Return a hint about a region that boto3 does not know; the region may be new."""
    known = regions()
    if region in known:
        return ""
    near = closest(region, known)
    advice = f": did you mean {near!r}?" if near else ""
    return f"; boto3 knows no region {region!r}{advice}"


def _status(error: boto.ClientError) -> int:
    status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    return status if isinstance(status, int) else 0


def _reason(error: boto.ClientError) -> str:
    message = error.response.get("Error", {}).get("Message")
    return _one_line(str(message)) if message else "no reason was given"


def _line(error: BaseException) -> str:
    return _one_line(str(error)) or type(error).__name__


def _one_line(text: str) -> str:
    """Return a text shortened to one line, because a proxy may respond with a whole HTML page."""
    line = " ".join(text.split()).rstrip(".")
    return line if len(line) <= SHOWN_CHARACTERS else f"{line[:SHOWN_CHARACTERS]}..."

"""Errors of boto3 as errors of qdo: one line each that says who must act.

Import it only where a broker at AWS is used: it needs boto3.
"""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Iterator

from botocore import exceptions as boto
from botocore.parsers import ResponseParserError

from qdo.brokers.aws_address import Place
from qdo.errors import (
    AccessDeniedError,
    AwsError,
    AwsNotFoundError,
    AwsUnreachableError,
    ClockError,
    CredentialsError,
    ExpiredCredentialsError,
    QdoError,
    ThrottledError,
)

BOTO_ERRORS = (boto.BotoCoreError, boto.ClientError, ResponseParserError)
"""What boto3's clients raise for requests; urllib3's errors come wrapped in them."""

SHOWN_CHARACTERS = 300
"""How much of what a server said becomes part of an error."""
TOO_LATE, TOO_MANY = 408, 429
"""What proxies and gateways answer by themselves, without a code of AWS."""
SERVICES = {"sqs": "SQS", "kinesis": "Kinesis", "s3": "S3"}

_EXPIRED = {
    "ExpiredToken",
    "ExpiredTokenException",
    "TokenRefreshRequired",
}
_CLOCK = {
    "RequestExpired",
    "RequestTimeTooSkewed",
}
_CLOCK_REASONS = ("Signature expired", "Signature not yet current")
"""Begin what AWS says with the codes of wrong credentials, too."""
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
    "404",
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


_PERMISSIONS = {
    "HeadBucket": "ListBucket",
    "ListObjectsV2": "ListBucket",
    "DeleteObjects": "DeleteObject",
}
"""Operations of S3 that are allowed under another name."""


def permission(service: str, operation: str) -> str:
    """Return what a policy has to allow for an operation."""
    if service == "sqs":
        return operation.removesuffix("Batch")
    return _PERMISSIONS.get(operation, operation) if service == "s3" else operation


def code_of(error: BaseException) -> str:
    """Return the code of an answer of AWS, without its namespace; "" where there was none."""
    if not isinstance(error, boto.ClientError):
        return ""
    # AWS.SimpleQueueService.NonExistentQueue in one protocol, QueueDoesNotExist in the other.
    return str(error.response.get("Error", {}).get("Code", "")).rsplit(".", 1)[-1]


def is_not_found(error: BaseException) -> bool:
    """Return whether a queue, stream, shard, bucket or object does not exist."""
    return code_of(error) in _NOT_FOUND


def is_throttling(error: BaseException) -> bool:
    """Return whether a request was refused for being one too many."""
    return code_of(error) in _THROTTLED


def is_throttling_code(code: str) -> bool:
    """Return whether a code, as those of the entries of a batch, stands for throttling."""
    return code.rsplit(".", 1)[-1] in _THROTTLED


def is_passing(error: BaseException) -> bool:
    """Return whether the same request may well succeed later, without anybody's help."""
    if isinstance(error, boto.ClientError):
        status = _status(error)
        return is_throttling(error) or status >= 500 or status in (TOO_LATE, TOO_MANY)
    return isinstance(error, (*_OUT_OF_REACH, ResponseParserError))


@contextlib.contextmanager
def translated(place: Place, what: str, name: str) -> Iterator[None]:
    """Turn what boto3 raises within the block into an error of qdo.

    :param what: what the requests are about: queue, stream, shard, bucket.
    :param name: its name.
    """
    try:
        yield
    except BOTO_ERRORS as error:
        raise translation(error, place, what, name) from error


def translation(error: BaseException, place: Place, what: str, name: str) -> QdoError:
    """Return the error of qdo for one of boto3's; see `translated`."""
    service = SERVICES.get(place.service, place.service)
    if isinstance(error, boto.ClientError):
        return _of_answer(error, place, service, what, name)
    if isinstance(error, _NO_CREDENTIALS):
        return CredentialsError(service=service, region=place.region, reason=_line(error))
    if isinstance(error, (*_OUT_OF_REACH, ResponseParserError)):
        return _unreachable(place, service, _line(error))
    return AwsError(
        service=service,
        action=f"a request about {what}",
        resource=repr(name),
        code=type(error).__name__,
        reason=_line(error),
    )


def _of_answer(
    error: boto.ClientError, place: Place, service: str, what: str, name: str
) -> QdoError:
    code, reason, status = code_of(error), _reason(error), _status(error)
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
    if code in _NOT_FOUND:
        remedy = _REMEDIES.get(place.service, "create it")
        return AwsNotFoundError(
            what=f"{service} {what}", name=name, region=place.region, remedy=remedy
        )
    if status >= 500 or status == TOO_LATE:
        return _unreachable(place, service, f"it answered {status} {code}: {reason}")
    kind = AccessDeniedError if code in _DENIED else AwsError
    return kind(service=service, action=action, resource=resource, code=code, reason=reason)


def _unreachable(place: Place, service: str, reason: str) -> AwsUnreachableError:
    return AwsUnreachableError(
        service=service,
        region=place.region,
        reason=reason,
        hint="" if place.endpoint else _region_hint(place.region),
    )


def _region_hint(region: str) -> str:
    """Return what to say of a region that boto3 does not know: it may just be a new one."""
    from qdo.brokers.aws import regions

    known = regions()
    if region in known:
        return ""
    near = difflib.get_close_matches(region, known, n=1)
    advice = f": did you mean {near[0]!r}?" if near else ""
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
    """Return a text on one line, cut: a proxy may answer with a whole page of HTML."""
    line = " ".join(text.split()).rstrip(".")
    return line if len(line) <= SHOWN_CHARACTERS else f"{line[:SHOWN_CHARACTERS]}..."

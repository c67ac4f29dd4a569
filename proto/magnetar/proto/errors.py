"""The error tree: every failure that can cross a wire or reach a user has a code, a name and an action.

    MagnetarError
    ├── RetryableError        try again, the same call may succeed (action RETRY)
    │   └── ServiceNotReady, TooManyRequests, BookieUnavailable, NotEnoughBookies, TopicBusy, RequestTimeout (SendTimeout),
    │       ConnectionLost, VersionConflict, InProgress, QuorumLost, ProducerBusy, ReceiveTimeout, ProducerQueueFull
    ├── LookupAgainError      ask where the topic lives, then try there (action LOOK_UP)
    │   └── TopicNotServed
    ├── InvalidCallError      the call is wrong, fix it (action FIX_CALL)
    │   └── InvalidTopicName, InvalidArgument, FrameTooLarge, MalformedFrame, UnknownCommand, UnsupportedVersion,
    │       Unsupported, ChecksumMismatch, MessageTooLarge, NotAuthorized, AuthenticationFailed, InvalidSetting
    └── FinalError            nothing the caller does helps (action GIVE_UP)
        └── TopicNotFound, SubscriptionNotFound, ConsumerBusy, ProducerFenced, LedgerNotFound, EntryNotFound, LedgerFenced,
            LedgerClosed, EntryDamaged, UnknownLedgerState, BookieReadOnly, StorageFailed (DiskFull), AlreadyExists,
            AlreadyClosed, DataDirectoryError, MessageLost, NotFoundInStore, NodeNotEmpty

InProgress (rule 27) and UnknownLedgerState (rule 8) are not raised yet; clients treat them as their action says.

Codes are part of the wire protocol (WIRE.md): they are never reused. A code that a peer does not know is decoded as the
class of its action, which travels with it.
"""

from __future__ import annotations

import enum
from typing import Any, ClassVar


class Action(enum.IntEnum):
    """What the caller of a failed operation should do."""

    RETRY = 1
    LOOK_UP = 2
    FIX_CALL = 3
    GIVE_UP = 4


class MagnetarError(Exception):
    """Base of all errors. `details` holds machine-readable facts; the text says what is wrong and what helps."""

    code: ClassVar[int] = 1
    action: ClassVar[Action] = Action.GIVE_UP

    def __init__(self, message: str = "", **details: Any) -> None:
        super().__init__(message or (type(self).__doc__ or type(self).__name__).splitlines()[0])
        self.details = details

    @property
    def message(self) -> str:
        """The text alone."""
        return str(self.args[0])

    @property
    def retryable(self) -> bool:
        """True if the same call may succeed later (at the same or at another broker)."""
        return self.action in (Action.RETRY, Action.LOOK_UP)


class RetryableError(MagnetarError):
    """Temporary failure; the same call may succeed later."""

    code = 2
    action = Action.RETRY


class LookupAgainError(MagnetarError):
    """The topic moved; look it up again."""

    code = 3
    action = Action.LOOK_UP


class InvalidCallError(MagnetarError):
    """The call itself is wrong; repeating it cannot help."""

    code = 4
    action = Action.FIX_CALL


class FinalError(MagnetarError):
    """The operation can never succeed as things stand."""

    code = 5
    action = Action.GIVE_UP


class ServiceNotReady(RetryableError):
    """The service is starting or stopping."""

    code = 20


class TooManyRequests(RetryableError):
    """The server sheds load; back off and try again."""

    code = 21


class BookieUnavailable(RetryableError):
    """A bookie could not be reached or did not answer in time."""

    code = 22


class NotEnoughBookies(RetryableError):
    """Fewer bookies are writable than the ensemble needs."""

    code = 23


class TopicBusy(RetryableError):
    """The topic is being loaded, closed or deleted."""

    code = 24


class RequestTimeout(RetryableError):
    """No answer arrived in time; the outcome is not known."""

    code = 25


class ConnectionLost(RetryableError):
    """The connection broke; the outcome of what was in flight is not known."""

    code = 26


class VersionConflict(RetryableError):
    """A compare-and-set met another version; read again."""

    code = 27


class InProgress(RetryableError):
    """An earlier copy of this request is still being worked on."""

    code = 28


class QuorumLost(RetryableError):
    """Too few bookies answered for the outcome to be known; try again."""

    code = 29


class ReceiveTimeout(RetryableError):
    """No message arrived in the time given to receive."""

    code = 36


class ProducerQueueFull(RetryableError):
    """The producer's unconfirmed messages fill its memory bound; wait for some to be confirmed."""

    code = 37


class SendTimeout(RequestTimeout):
    """A message was not confirmed within send_timeout; whether it was stored is not known."""

    code = 38


class ProducerBusy(RetryableError):
    """The producer name is in use by a producer that is connected."""

    code = 31


class TopicNotServed(LookupAgainError):
    """This broker does not own the topic."""

    code = 40


class InvalidTopicName(InvalidCallError):
    """The topic name is not one."""

    code = 60


class InvalidArgument(InvalidCallError):
    """An argument has a value that is not allowed."""

    code = 61


class FrameTooLarge(InvalidCallError):
    """A frame is larger than the connection allows."""

    code = 62


class MalformedFrame(InvalidCallError):
    """A frame cannot be decoded."""

    code = 63


class UnknownCommand(InvalidCallError):
    """The command number is not known to this peer."""

    code = 64


class UnsupportedVersion(InvalidCallError):
    """No protocol version is shared by both peers."""

    code = 65


class Unsupported(InvalidCallError):
    """The command is reserved, and this version does not offer it yet."""

    code = 66


class ChecksumMismatch(InvalidCallError):
    """The bytes do not match their checksum."""

    code = 67


class MessageTooLarge(InvalidCallError):
    """A message is larger than the connection allows."""

    code = 68


class NotAuthorized(InvalidCallError):
    """The principal may not do this."""

    code = 69


class AuthenticationFailed(InvalidCallError):
    """The credentials were not accepted."""

    code = 70


class InvalidSetting(InvalidCallError):
    """A setting has a value that is not allowed."""

    code = 71


class TopicNotFound(FinalError):
    """The topic does not exist."""

    code = 80


class SubscriptionNotFound(FinalError):
    """The subscription does not exist."""

    code = 81


class ConsumerBusy(FinalError):
    """The subscription is held by another consumer or has another type."""

    code = 82


class ProducerFenced(FinalError):
    """Another producer with this name took over."""

    code = 83


class LedgerNotFound(FinalError):
    """The ledger does not exist."""

    code = 84


class EntryNotFound(FinalError):
    """The ledger has no such entry."""

    code = 85


class LedgerFenced(FinalError):
    """The ledger was fenced by a recovery; this writer must stop."""

    code = 86


class LedgerClosed(FinalError):
    """The ledger is closed."""

    code = 87


class EntryDamaged(FinalError):
    """The stored entry does not match its checksum or cannot be read from the disk."""

    code = 88


class UnknownLedgerState(FinalError):
    """The bookie cannot tell whether it ever held this entry."""

    code = 89


class BookieReadOnly(FinalError):
    """The bookie takes no new entries."""

    code = 90


class StorageFailed(FinalError):
    """The disk failed; the daemon stops and recovers from what is durable."""

    code = 91


class AlreadyExists(FinalError):
    """The name is taken."""

    code = 92


class AlreadyClosed(FinalError):
    """The client, producer or consumer was closed."""

    code = 93


class DataDirectoryError(FinalError):
    """The data directory is missing, damaged, locked or of another version."""

    code = 94


class MessageLost(FinalError):
    """The position was trimmed or deleted."""

    code = 95


class NotFoundInStore(FinalError):
    """The metadata store has no such node."""

    code = 96


class NodeNotEmpty(FinalError):
    """The metadata node has nodes below it; delete those first."""

    code = 97


class DiskFull(StorageFailed):
    """No space is left on the disk; what was stored before is safe, and writing works again once there is space."""

    code = 98


class EntriesNotForced(FinalError):
    """Entries that were accepted with deferred sync were lost: the ledger's writer failed before they were forced."""

    code = 99


def _tree(root: type[MagnetarError]) -> list[type[MagnetarError]]:
    found = [root]
    for child in root.__subclasses__():
        found += _tree(child)
    return found


ERRORS_BY_CODE: dict[int, type[MagnetarError]] = {cls.code: cls for cls in _tree(MagnetarError)}
_BY_ACTION: dict[int, type[MagnetarError]] = {
    Action.RETRY: RetryableError,
    Action.LOOK_UP: LookupAgainError,
    Action.FIX_CALL: InvalidCallError,
    Action.GIVE_UP: FinalError,
}


def error_name(code: int) -> str:
    """The class of a code, for texts; the number of one that is not known here."""
    cls = ERRORS_BY_CODE.get(code)
    return str(code) if cls is None else cls.__name__


def error_from_wire(code: int, action: int, message: str) -> MagnetarError:
    """Rebuilds the error that a peer sent; an unknown code becomes the class of its action."""
    cls = ERRORS_BY_CODE.get(code) or _BY_ACTION.get(action, FinalError)
    return cls(message)

"""The error tree: every failure that can cross a wire or reach a user has a code, a name and an action.

    MagnetarError
    ├── RetryableError        try again, the same call may succeed (action RETRY)
    │   └── ServiceNotReady, TooManyRequests, BookieUnavailable (WrongBookie), NotEnoughBookies, TopicBusy,
    │       RequestTimeout (SendTimeout), ConnectionLost, VersionConflict, QuorumLost, ReceiveTimeout,
    │       ProducerQueueFull, ArchiveUnavailable, BacklogQuotaExceeded
    ├── LookupAgainError      ask where the topic lives, then try there (action LOOK_UP)
    │   └── TopicNotServed
    ├── InvalidCallError      the call is wrong, fix it (action FIX_CALL)
    │   └── InvalidTopicName, InvalidArgument, FrameTooLarge, MalformedFrame, UnknownCommand, UnsupportedVersion,
    │       Unsupported, ChecksumMismatch, MessageTooLarge, NotAuthorized, AuthenticationFailed, InvalidSetting,
    │       SequenceIdError, NotAllowed, IncompatibleSchema
    └── FinalError            nothing the caller does helps (action GIVE_UP)
        └── TopicNotFound, TopicInUse, SubscriptionNotFound, ConsumerBusy, ProducerBusy, ProducerFenced, LedgerNotFound,
            EntryNotFound, LedgerFenced, LedgerClosed, EntryDamaged, UnknownLedgerState, BookieReadOnly,
            StorageFailed (DiskFull), AlreadyExists, AlreadyClosed, DataDirectoryError, MessageLost, NotFoundInStore,
            NodeNotEmpty, EntriesNotForced, EntryUnreadable, PartitionNotFound, TopicTerminated, NotFound, NotEmpty

Where Python has a word for it, an error is that as well: RequestTimeout and ReceiveTimeout are TimeoutErrors,
ConnectionLost is a ConnectionError; InvalidArgument, InvalidTopicName, InvalidSetting, SequenceIdError and
MessageTooLarge are ValueErrors;
NotAuthorized and AuthenticationFailed are PermissionErrors; TopicNotFound, PartitionNotFound, SubscriptionNotFound and
NotFound are LookupErrors. So
`except MagnetarError` stands before one of these, and `runtime.timeouts.TimeLimit` in place of `except TimeoutError`.

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

    def __init_subclass__(cls, *, code: int | None = None, action: Action | None = None) -> None:
        """`code` and `action` are inherited unless given; each class of the table in WIRE.md has a code of its own."""
        super().__init_subclass__()
        cls.code = cls.code if code is None else code
        cls.action = cls.action if action is None else action

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


class RetryableError(MagnetarError, code=2, action=Action.RETRY):
    """Temporary failure; the same call may succeed later."""


class LookupAgainError(MagnetarError, code=3, action=Action.LOOK_UP):
    """The topic moved; look it up again."""


class InvalidCallError(MagnetarError, code=4, action=Action.FIX_CALL):
    """The call itself is wrong; repeating it cannot help."""


class FinalError(MagnetarError, code=5, action=Action.GIVE_UP):
    """The operation can never succeed as things stand."""


class ServiceNotReady(RetryableError, code=20):
    """The service is starting or stopping."""


class TooManyRequests(RetryableError, code=21):
    """The server sheds load; back off and try again."""


class BookieUnavailable(RetryableError, code=22):
    """A bookie could not be reached or did not answer in time."""


class WrongBookie(BookieUnavailable, code=39):
    """The bookie is not the one that is registered, or belongs to another cluster: nothing that it says counts."""


class NotEnoughBookies(RetryableError, code=23):
    """Fewer bookies are writable than the ensemble needs."""


class TopicBusy(RetryableError, code=24):
    """The topic is being loaded, closed or deleted."""


class RequestTimeout(RetryableError, TimeoutError, code=25):
    """No answer arrived in time; the outcome is not known."""


class ConnectionLost(RetryableError, ConnectionError, code=26):
    """The connection broke; the outcome of what was in flight is not known."""


class VersionConflict(RetryableError, code=27):
    """A compare-and-set met another version; read again."""


class QuorumLost(RetryableError, code=29):
    """Too few bookies answered for the outcome to be known; try again."""


class ReceiveTimeout(RetryableError, TimeoutError, code=36):
    """No message arrived in the time given to receive."""


class ProducerQueueFull(RetryableError, code=37):
    """The producer's unconfirmed messages fill its memory bound; wait for some to be confirmed."""


class SendTimeout(RequestTimeout, code=38):
    """A message was not confirmed within send_timeout; whether it was stored is not known."""


class ArchiveUnavailable(RetryableError, code=19):
    """An archived ledger cannot be read now; it may be again later."""


class BacklogQuotaExceeded(RetryableError, code=110):
    """A subscription has more unacknowledged than the policies allow; the topic takes messages again once it has not."""


class TopicNotServed(LookupAgainError, code=40):
    """This broker does not own the topic."""


class InvalidTopicName(InvalidCallError, ValueError, code=60):
    """The topic name is not one."""


class InvalidArgument(InvalidCallError, ValueError, code=61):
    """An argument has a value that is not allowed."""


class NotAllowed(InvalidCallError, code=108):
    """The settings of the service do not allow this call."""


class IncompatibleSchema(InvalidCallError, code=111):
    """The topic has a schema that this one does not fit to."""


class FrameTooLarge(InvalidCallError, code=62):
    """A frame is larger than the connection allows."""


class MalformedFrame(InvalidCallError, code=63):
    """A frame cannot be decoded."""


class UnknownCommand(InvalidCallError, code=64):
    """The command number is not known to this peer."""


class UnsupportedVersion(InvalidCallError, code=65):
    """No protocol version is shared by both peers."""


class Unsupported(InvalidCallError, code=66):
    """The command is reserved, and this version does not offer it yet."""


class ChecksumMismatch(InvalidCallError, code=67):
    """The bytes do not match their checksum."""


class MessageTooLarge(InvalidCallError, ValueError, code=68):
    """A message is larger than the connection allows."""


class NotAuthorized(InvalidCallError, PermissionError, code=69):
    """The principal may not do this."""


class AuthenticationFailed(InvalidCallError, PermissionError, code=70):
    """The credentials were not accepted."""


class InvalidSetting(InvalidCallError, ValueError, code=71):
    """A setting has a value that is not allowed."""


class SequenceIdError(InvalidCallError, ValueError, code=105):
    """The sequence ids of a producer rise; this one comes after one that is as high or higher."""


class TopicNotFound(FinalError, LookupError, code=80):
    """The topic does not exist."""


class TopicInUse(FinalError, code=102):
    """The topic has producers or consumers."""


class TopicTerminated(FinalError, code=103):
    """The topic was terminated: it takes no more messages."""


class PartitionNotFound(FinalError, LookupError, code=104):
    """The topic has no such partition."""


class SubscriptionNotFound(FinalError, LookupError, code=81):
    """The subscription does not exist."""


class NotFound(FinalError, LookupError, code=106):
    """A tenant, a namespace, a cluster or something else that is administered does not exist."""


class NotEmpty(FinalError, code=107):
    """What is to be deleted still has something in it."""


class ConsumerBusy(FinalError, code=82):
    """The subscription is held by another consumer or has another type."""


class ProducerBusy(FinalError, code=31):
    """The producer name is in use by a producer that is connected."""


class ProducerFenced(FinalError, code=83):
    """Another producer with this name took over."""


class LedgerNotFound(FinalError, code=84):
    """The ledger does not exist."""


class EntryNotFound(FinalError, code=85):
    """The ledger has no such entry."""


class LedgerFenced(FinalError, code=86):
    """The ledger was fenced by a recovery; this writer must stop."""


class LedgerClosed(FinalError, code=87):
    """The ledger is closed."""


class EntryDamaged(FinalError, code=88):
    """The stored entry does not match its checksum or cannot be read from the disk."""


class UnknownLedgerState(FinalError, code=89):
    """The bookie cannot tell whether it ever held this entry."""


class BookieReadOnly(FinalError, code=90):
    """The bookie takes no new entries."""


class StorageFailed(FinalError, code=91):
    """The disk failed; the daemon stops and recovers from what is durable."""


class AlreadyExists(FinalError, code=92):
    """The name is taken."""


class AlreadyClosed(FinalError, code=93):
    """The client, producer or consumer was closed."""


class DataDirectoryError(FinalError, code=94):
    """The data directory is missing, damaged, locked or of another version."""


class MessageLost(FinalError, code=95):
    """The position was trimmed or deleted."""


class NotFoundInStore(FinalError, code=96):
    """The metadata store has no such node."""


class NodeNotEmpty(FinalError, code=97):
    """The metadata node has nodes below it; delete those first."""


class DiskFull(StorageFailed, code=98):
    """No space is left on the disk; what was stored before is safe, and writing works again once there is space."""


class EntriesNotForced(FinalError, code=99):
    """Entries that were accepted with deferred sync were lost: the ledger's writer failed before they were forced."""


class EntryUnreadable(FinalError, code=100):
    """A stored entry is damaged on all its replicas; what lies behind it comes once it is skipped.

    details: `topic`, its full name; `id`, of the first message of the entry; `reason`.
    """

    @property
    def topic(self) -> str:
        """Full name of the topic."""
        return str(self.details["topic"])

    @property
    def id(self) -> Any:
        """MessageId of the first message of the entry, which names its ledger."""
        return self.details["id"]

    @property
    def reason(self) -> str:
        """Why it cannot be read."""
        return str(self.details["reason"])


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

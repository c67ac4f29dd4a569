"""What may be asked of a broker: typed operations, authorized at one place, for every listener alike."""

from .broker import BrokerService
from .ledgers import LedgerService
from .operations import OPERATIONS, Caller

__all__ = ["OPERATIONS", "BrokerService", "Caller", "LedgerService"]

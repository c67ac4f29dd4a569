"""BundlePlacement and balance of bundles over brokers: what is decided (`core`), and the shells that carry it out.

`leader` is the elected balancer, `loads` is what a broker reports about its bundles, `records` the bytes of that report.
"""

from .settings import BalanceSettings

__all__ = ["BalanceSettings"]
